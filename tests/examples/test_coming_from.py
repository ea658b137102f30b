"""The pages "Coming from": the code of another library and that of bayou do the same task."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "coming_from"
STEMS = sorted(path.stem for path in FOLDER.glob("*.py"))
PAGES = ROOT / "docs" / "coming_from"


def module(stem):
    """Return an example under another name than that of the library that it imports."""
    spec = importlib.util.spec_from_file_location(f"coming_from_{stem}", FOLDER / f"{stem}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def both(stem):
    example = module(stem)
    return example, example.other_library(), example.with_bayou()


@pytest.mark.parametrize("stem", STEMS)
def test_a_page_shows_the_code_that_is_tested(stem):
    text = (PAGES / f"{stem}.md").read_text(encoding="utf-8")
    paths = re.findall(r"\{literalinclude\} (\S+)", text)
    assert {(PAGES / path).resolve() for path in paths} == {FOLDER / f"{stem}.py"}
    assert len(paths) == 3
    code = (FOLDER / f"{stem}.py").read_text(encoding="utf-8")
    markers = ("# start other", "# end other", "# start bayou", "# end bayou")
    assert [code.count(marker) for marker in markers] == [1, 1, 1, 1]
    listed = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert f"\ncoming_from/{stem}\n" in listed


def test_every_page_has_its_code():
    assert sorted(path.stem for path in PAGES.glob("*.md")) == STEMS


@pytest.mark.peers
def test_laplace_torch_has_the_same_gaussian():
    _, (mean, std), (bayou_mean, bayou_std) = both("laplace_torch")
    # 2,000 draws: a standard error of 1/√2000 of a mean and 1/√4000 of a standard deviation
    assert ((mean - bayou_mean).abs() < 5 * std / 2000**0.5).all()
    torch.testing.assert_close(bayou_std, std, rtol=0.08, atol=0)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_bayesian_torch_has_the_same_mean_and_narrower_posteriors():
    _, (mean, std), (bayou_mean, bayou_std) = both("bayesian_torch")
    torch.testing.assert_close(bayou_mean, mean, rtol=0, atol=0.15)
    assert (std < bayou_std).all()


@pytest.mark.peers
def test_pyro_has_the_same_posterior():
    """Both beside the closed form: precision I + AᵀA/.3², A the rows (x, 1)."""
    example, *results = both("pyro")
    rows = torch.cat((example.x, torch.ones_like(example.x)), 1)
    new = torch.cat((example.x_new, torch.ones_like(example.x_new)), 1)
    covariance = torch.linalg.inv(torch.eye(2) + rows.T @ rows / 0.3**2)
    exact_mean = new @ covariance @ rows.T @ example.y / 0.3**2
    exact_std = (new @ covariance * new).sum(1, keepdim=True).sqrt()
    for mean, std in results:
        assert ((mean - exact_mean).abs() < 0.4 * exact_std).all()  # 100 effective draws: .1
        torch.testing.assert_close(std, exact_std, rtol=0.3, atol=0)


@pytest.mark.peers
def test_mapie_covers_as_much_with_intervals_as_wide():
    example, *results = both("mapie")
    y = example.test[1].squeeze(-1)
    widths = []
    for low, high in results:
        coverage = ((low <= y) & (y <= high)).double().mean()
        assert 0.84 < coverage < 0.96  # 400 held-out and 400 test rows: .021 of both together
        widths.append(float((high - low).mean()))
    assert widths[0] == pytest.approx(widths[1], rel=0.15)


@pytest.mark.peers
@pytest.mark.parametrize("stem", ["zuko", "nflows"])
def test_flows_of_both_libraries_fit_the_density(stem):
    """Beside the density of the draws: log N(x₀; 0, 1) + log N(x₁; x₀²/2, ½)."""
    example, *results = both(stem)
    first, second = example.test.unbind(1)
    normal = torch.distributions.Normal
    exact = normal(0.0, 1.0).log_prob(first) + normal(first.square() / 2, 0.5).log_prob(second)
    for log_density, samples in results:
        assert samples.shape == (1000, 2)
        assert 0 < exact.mean() - log_density.mean() < 0.3  # nats


def test_bayou_beside_torch_uncertainty_is_sure_inside_and_unsure_at_the_border():
    probabilities, entropy = module("torch_uncertainty").with_bayou()
    assert probabilities.shape == (3, 2)
    assert probabilities[0, 0] > 0.9
    assert entropy.argmax() == 2
