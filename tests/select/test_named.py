"""Methods by name on small data: none may explain a clear signal by noise, collapse or diverge."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.core import progress
from bayou.inference.method import identity
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical, GaussianPosterior, Guided, Posterior
from bayou.priors import BoundNormal
from bayou.select import NamedMethod, by_name, folds, named, prior_scale, regression
from bayou.select.noise import correct_noise, has_noise_to_select
from bayou.select.noise_and_prior import GAIN_OF_NUMBERS, NoiseAndPrior
from bayou.select.recipes import MAX_FULL_WEIGHTS
from bayou.select.regularization_path import PathSearch
from bayou.select.search_run import SearchRun
from bayou.training.data import Rows

NOISE = 0.4
PRIOR = bayou.Normal("fan_in", gain=GAIN_OF_NUMBERS)


@pytest.fixture(scope="module", autouse=True)
def _one_search_for_all_methods() -> Iterator[None]:
    """It is of the mode, the data and the network: methods that begin alike have one search."""
    plain = regression.select_ratio_and_shape
    searches = dict[str, Any]()
    plain_scale = prior_scale.best_prior_scale
    scales = dict[str, Any]()

    def search(target: Target, rows: Rows, folds: Any, run: SearchRun) -> Any:
        key = str(identity(run.start, target, rows, 0))
        if key not in searches:
            searches[key] = plain(target, rows, folds, run)
        return searches[key]

    def scale(
        target: Target, rows: Rows, folds: Any, progress: Any, max_up: int, effort: float
    ) -> Any:
        key = str((identity(bayou.MAP(), target, rows, 0), max_up))
        if key not in scales:
            scales[key] = plain_scale(target, rows, folds, progress, max_up, effort)
        best = scales[key]
        return replace(best, target=replace(target, prior=best.target.prior))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "select_ratio_and_shape", search)
        patch.setattr(prior_scale, "best_prior_scale", scale)
        yield


def waves(n: int = 100, noise: float = NOISE) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the true function: most of the variance of y is signal."""
    generator = torch.Generator().manual_seed(0)
    x = 3.4 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 1.7
    f = math.sqrt(2) * torch.sin(2.5 * x)
    return x, f + noise * torch.randn(n, 1, generator=generator, dtype=torch.float64), f


def circles(n: int = 300) -> tuple[Tensor, Tensor]:
    """Two classes that no line divides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, (x.norm(dim=1) > 1.1).long()


def dense(inputs: int, outputs: int, width: int = 50) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs)).double()


def fit_numbers(name: str, x: Tensor, y: Tensor, steps: int = 200, **options: Any) -> Posterior:
    net = named.find(name).prepare(dense(x.shape[1], y.shape[1]))
    method = by_name(name, steps=steps, **options)
    likelihood = bayou.Gaussian(0.5, learn=True)
    return bayou.fit(
        net, (x, y), method=method, likelihood=likelihood, prior=PRIOR, seed=0, progress=False
    )


def noise_of(posterior: Posterior) -> float:
    return float(posterior.target.likelihood.log_scale.detach().exp())  # type: ignore[operator, union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ffg", "mnf", "ivon"])
def test_a_signal_is_not_called_noise(name: str) -> None:
    """The best ELBO over weights and noise together is a flat function in this problem; held-out
    rows know better.
    """
    x, y, f = waves()
    posterior = fit_numbers(name, x, y)
    p = posterior.predict(x, samples=50, seed=0)
    assert noise_of(posterior) == pytest.approx(NOISE, rel=0.25)
    assert float((p.mean - f).square().mean().sqrt()) < 0.5  # a constant is off by 1


@pytest.mark.parametrize(
    "name", ["swag", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ivon", "lowrank"))]
)
def test_little_noise_does_not_break_a_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a regression grow with 1/noise²: steps that do not follow them diverge."""
    x, y, f = waves(noise=0.03)
    monkeypatch.setattr(
        regression,
        "select_ratio_and_shape",
        lambda *args: (NoiseAndPrior(0.03, fold_error=0.03**2), {}, []),
    )  # as a search finds
    p = fit_numbers(name, x, y, steps=120).predict(x, samples=50, seed=0)
    assert float((p.mean - f).square().mean().sqrt()) < 0.3


@pytest.mark.parametrize("name", ["lowrank", "sparse", "jeffreys", "horseshoe"])
@pytest.mark.slow
def test_classes_that_no_line_divides(name: str) -> None:
    """Families that used to collapse to the prior, which leaves the share of the majority, 55 %."""
    x, y = circles()
    posterior = bayou.fit(dense(2, 2), (x, y), by_name(name, steps=250), seed=0, progress=False)
    p = posterior.predict(x, samples=50, seed=0)
    assert float((p.mean.argmax(1) == y).double().mean()) > 0.93
    assert float(-p.log_prob(y).mean()) < 0.35


def tilted(n: int, test: int = 2000, noise: float = 0.2) -> tuple[Tensor, ...]:
    """A plane in ten dimensions under noise, standardized: what a network of 601 weights
    interpolates.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n + test, 10, generator=generator, dtype=torch.float64)
    y = x[:, :4].sum(1, keepdim=True) / 2 + noise * torch.randn(
        n + test, 1, generator=generator, dtype=torch.float64
    )
    return x[:n], y[:n], x[n:], y[n:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "laplace", "ffg", "swag"])
def test_intervals_cover_what_they_promise_where_the_network_can_interpolate(name: str) -> None:
    """The noise of the largest evidence covers .69, .98, .81 and .67 here.

    By n = 200 residuals a noise is known to 1/√(2n) = 5 %, and a coverage of .9 by it to .34 times
    that, .017; the spread of a method is judged by the 40 rows of one fold, .038.
    """
    x, y, x_test, y_test = tilted(200)
    posterior = fit_numbers(name, x, y, steps=250)
    p = posterior.predict(x_test, samples=50 if posterior.draws is None else None, seed=0)
    lower, upper = p.interval(0.9)
    error = 3 * 0.017 if name == "map" else 2 * 0.038
    assert float(((lower < y_test) & (y_test < upper)).double().mean()) == pytest.approx(
        0.9, abs=error
    )
    assert float((p.mean - y_test).square().mean().sqrt()) < 1.5 * 0.2


@pytest.mark.parametrize("extra", [(), pytest.param((nn.Dropout(0.0),), marks=pytest.mark.slow)])
def test_one_fifth_of_many_rows_says_how_noisy_they_are(extra: tuple[nn.Module, ...]) -> None:
    """Also where full passes cannot follow the loss: 120 residuals say a noise to 6.5 %, of a mode
    that is good.
    """
    x, y, _ = waves(600)
    net = nn.Sequential(*dense(1, 1), *extra)
    method = by_name("map", steps=200)
    likelihood = bayou.Gaussian(0.5, learn=True)
    posterior = bayou.fit(
        net, (x, y), method=method, likelihood=likelihood, prior=PRIOR, seed=0, progress=False
    )
    assert noise_of(posterior) == pytest.approx(NOISE, rel=3 * 0.065)


def test_the_path_is_searched_where_full_passes_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW", 0.0)
    x, y, _ = waves(40)
    stages: dict[nn.Module, list[str]] = {}
    for net in (dense(1, 1), nn.Sequential(*dense(1, 1), nn.Dropout(0.1))):
        told = stages[net] = list[str]()
        method, likelihood = by_name("map", steps=4), bayou.Gaussian(0.5, learn=True)
        show = lambda title, *rest, told=told: told.append(title)  # noqa: E731
        bayou.fit(
            net, (x, y), method=method, likelihood=likelihood, prior=PRIOR, seed=0, progress=show
        )
    assert ["1 of 2: choosing noise and prior" in told for told in stages.values()] == [True, False]


def test_a_method_pays_for_its_own_spread() -> None:
    """Functions with variance v at every row, whose mean is right: with all rows, 0.64·v and the
    noise are σ².
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    rows = Rows((torch.zeros_like(y), y), torch.arange(len(y)), 4096)
    net = nn.Linear(1, 1).double()
    made = Target.build(net, bayou.Gaussian(1.0), bayou.Normal(1.0), len(y))
    spread = 0.8 * torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    stack = {"weight": torch.zeros(2, 1, 1, dtype=torch.float64), "bias": spread}
    settings = correct_noise(
        NoiseAndPrior(1.0, 2.0, fold_error=float(y.square().mean())),
        Empirical(made, Network(net), stack),
        rows,
        0,
    )
    assert settings.is_corrected
    assert settings.noise**2 == pytest.approx(1 / (1 + 0.64 * 0.8**2), rel=1e-3)
    assert settings.scale == pytest.approx(2 * settings.noise, rel=1e-12)


@pytest.mark.usefixtures("short_search")
def test_a_fit_is_saved_with_its_noise(tmp_path: Path) -> None:
    x, y, _ = waves(40)
    posterior = fit_numbers("ffg", x, y, steps=40)
    posterior.save(tmp_path / "p.bayou")
    again = bayou.load(tmp_path / "p.bayou", dense(1, 1))
    assert noise_of(again) == noise_of(posterior)
    assert again.predict(x, samples=3, seed=0).mean.equal(
        posterior.predict(x, samples=3, seed=0).mean
    )


@pytest.mark.slow
@pytest.mark.usefixtures("short_search")
def test_a_file_of_swag_can_be_read_by_a_new_process(tmp_path: Path) -> None:
    """Covariances are found among the classes that were imported, and nobody imports SWAG to load a
    file.
    """
    x, y, _ = waves(40)
    fit_numbers("swag", x, y, steps=20).save(tmp_path / "p.bayou")
    build = "nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1)).double()"
    code = f"import bayou, sys; from torch import nn; print(bayou.load(sys.argv[1], {build}))"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "p.bayou"], capture_output=True, text=True
    )
    assert "GaussianPosterior" in done.stdout, done.stderr


def target(likelihood: bayou.likelihoods.Likelihood, prior: Any = PRIOR, width: int = 5) -> Target:
    return Target.build(dense(2, 2, width), likelihood, prior, 10)


def test_held_out_rows_are_for_a_learned_gaussian_noise() -> None:
    learned = bayou.Gaussian(0.5, learn=True)
    assert has_noise_to_select(target(learned))
    assert not has_noise_to_select(target(bayou.Categorical()))
    assert not has_noise_to_select(target(bayou.Gaussian(0.5)))
    assert not has_noise_to_select(target(learned, bayou.priors.StudentT()))
    assert not has_noise_to_select(target(learned, bayou.Normal(1.0, learn=True)))


def overlapping(n: int, distance: float) -> tuple[Tensor, Tensor]:
    """Two classes of ten-dimensional Gaussians whose means are so far apart, along the diagonal."""
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(n) % 2
    x = torch.randn(n, 10, generator=generator, dtype=torch.float64)
    return x + distance / math.sqrt(10) * (y.double().unsqueeze(1) - 0.5), y


@pytest.mark.parametrize(("distance", "wider"), [(1.0, False), (8.0, True)])
def test_held_out_rows_narrow_the_prior_where_classes_overlap_and_widen_it_where_not(
    distance: float, wider: bool, tmp_path: Path
) -> None:
    rows, net, prior = (
        overlapping(60, distance),
        dense(10, 2, width=20),
        bayou.Normal("fan_in", gain=3.0),
    )
    method = by_name("map", steps=100)
    posterior = bayou.fit(net, rows, method, progress=False, checkpoint=tmp_path / "c")
    first = posterior.target.priors["0.weight"]
    assert isinstance(first, BoundNormal)
    step = math.log(float(first.log_scale.exp().mean()) / (3 / math.sqrt(10))) / math.log(
        prior_scale.SCALE_FACTOR
    )
    assert step == pytest.approx(round(step))
    assert step >= 1 if wider else step <= -1
    kept = bayou.fit(net, rows, method, prior=prior, progress=False)
    assert kept.target.prior == prior
    test = overlapping(2060, distance)
    new = [p.predict(test[0][60:]).log_prob(test[1][60:]).mean() for p in (posterior, kept)]
    assert new[0] > new[1]
    again = bayou.fit(net, rows, method, progress=False, checkpoint=tmp_path / "c")
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.sample(1).values(), posterior.sample(1).values(), strict=True)
    )


@pytest.mark.slow
def test_held_out_rows_narrow_the_prior_of_a_network_that_says_its_noise() -> None:
    """A wide prior lets the variance head learn its rows by heart, and new rows cost nats."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1060, 10, generator=generator, dtype=torch.float64)
    y = x[:, :1] + (0.5 * x[:, 1:2]).exp() * torch.randn(
        1060, 1, generator=generator, dtype=torch.float64
    )
    net, prior = dense(10, 2, width=20), bayou.Normal("fan_in", gain=3.0)
    options: dict[str, Any] = {"likelihood": bayou.HeteroscedasticGaussian(), "progress": False}
    new = []
    for given in (None, prior):
        posterior = bayou.fit(
            net, (x[:60], y[:60]), by_name("map", steps=100), prior=given, **options
        )
        assert (posterior.target.prior == prior) == (given is not None)
        new.append(float(posterior.predict(x[60:]).log_prob(y[60:]).mean()))
    assert new[0] > new[1] + 0.1


@pytest.mark.parametrize(("name", "steps"), [("swag", 2), ("ffg", 1), ("sghmc", 2), ("lowrank", 1)])
def test_what_draws_all_weights_has_a_prior_one_step_wider_at_most(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wider_is_better(*args: Any) -> PathSearch:
        return PathSearch(len(args[3]) - 1, 0, torch.zeros(1), {}, {})

    monkeypatch.setattr(prior_scale, "search_paths", wider_is_better)

    def scale(target: Target) -> Tensor:
        first = target.priors["0.weight"]
        assert isinstance(first, BoundNormal)
        return first.log_scale.exp().mean()

    method, rows = by_name(name, steps=20), overlapping(30, 1.0)
    posterior = bayou.fit(dense(10, 2, 5), rows, method, progress=False)
    assert float(scale(posterior.target)) == pytest.approx(
        3 / math.sqrt(10) * prior_scale.SCALE_FACTOR**steps
    )


@pytest.mark.usefixtures("short_search")
def test_data_without_noise_still_have_a_fit() -> None:
    """No noise suits them: the method learns it as it would alone."""
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
    posterior = fit_numbers("ffg", x, 0 * x, steps=30)
    assert isinstance(posterior, Guided)
    assert bool(posterior.predict(x, samples=5, seed=0).mean.isfinite().all())


@pytest.mark.usefixtures("short_search")
def test_ctrl_c_before_the_method_gives_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = waves(40)
    original = bayou.MAP.fit

    def stopped(self: bayou.MAP, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        found.stopped = "interrupted"
        return found

    monkeypatch.setattr(bayou.MAP, "fit", stopped)
    posterior = fit_numbers("ffg", x, y, steps=20)
    assert isinstance(posterior, Empirical)
    assert posterior.stopped == "interrupted"


@pytest.mark.usefixtures("short_search")
def test_members_of_an_ensemble_start_anew_and_not_at_the_mode() -> None:
    x, y, _ = waves(40)
    posterior = fit_numbers("ensemble", x, y, steps=20, members=2)
    first, second = posterior.sample(2, seed=0)["0.weight"]
    assert not torch.allclose(first, second, atol=0.1)


def test_by_size_looks_at_the_weights() -> None:
    x, y = circles(60)
    for width, small in ((10, True), (MAX_FULL_WEIGHTS // 5 + 1, False)):
        net = dense(2, 2, width)
        count = sum(p.numel() for p in net.parameters())
        assert (count <= MAX_FULL_WEIGHTS) is small
        method = by_name("laplace", steps=5)
        posterior = bayou.fit(net, (x, y), method=method, prior=PRIOR, seed=0, progress=False)
        assert isinstance(posterior, GaussianPosterior)
        assert posterior.covariance.size == (count if small else 2 * width + 2)


def test_a_plan_reaches_every_part() -> None:
    method = by_name("mnf", steps=7, batch_size=9, lr=0.3, beta=0.5, warmup=0.25)
    assert isinstance(method, NamedMethod)
    assert method.selects_layers
    assert method.batch_size == 9
    family: Any = method.method
    assert (family.steps, family.lr, family.beta, family.warmup) == (7, 0.3, 0.5, 0.25)
    assert isinstance(method.start, bayou.MAP)
    assert (method.start.steps, method.start.batch_size) == (7, 9)


@pytest.mark.parametrize("effort", [0.1, 10.0])
def test_effort_multiplies_the_length_that_a_method_has_by_default(effort: float) -> None:
    rows = Rows(
        torch.utils.data.TensorDataset(torch.zeros(640, 1), torch.zeros(640, 1)),
        torch.arange(640),
        2,
    )
    mnf, sgld, nuts, annealed, swag = (
        by_name(n, effort=effort) for n in ("mnf", "sgld", "nuts", "annealed", "swag")
    )
    for part in (mnf.start, mnf.method, annealed.method.of):  # type: ignore[attr-defined]
        assert part.total_steps(rows) == effort * 10 * 320
    few, many = sgld.large, sgld.method
    assert [(one.chains, one._plan(rows)[0]) for one in (few, many)] == [
        (2, effort * 10_000),
        (8, effort * 5000),
    ]
    assert by_name("sgld", chains=3).method.chains == 3  # type: ignore[attr-defined]
    assert nuts.method.draws == nuts.method.warmup == effort * 250  # type: ignore[attr-defined]
    assert annealed.method.temperatures == effort * 40  # type: ignore[attr-defined]
    assert swag.method.total_steps(rows) == max(effort, 0.2) * 3200  # type: ignore[attr-defined]
    assert by_name("mnf", effort=effort, steps=7).start.total_steps(rows) == 7  # type: ignore[attr-defined]
    short = Rows(rows.source, torch.arange(100), 2)
    assert [len(folds.split_folds(one, 0, effort)) for one in (short, rows)] == [
        1 if effort < 1 else 5,
        1,
    ]


@pytest.mark.parametrize("effort", [0.0, -1.0, math.inf, math.nan])
def test_effort_is_a_positive_number(effort: float) -> None:
    for make in (lambda **given: by_name("map", **given), bayou.SGLD, bayou.MAP):
        with pytest.raises(ValueError, match="effort"):
            make(effort=effort)


def test_every_name_has_a_label_and_a_summary_of_one_line() -> None:
    for name, one in named.METHODS.items():
        assert one.name == name
        assert one.label
        assert len(one.summary) < 90
    assert list(bayou.list_methods()) == list(named.METHODS)
    x, y = circles(20)
    with pytest.raises(ValueError, match="did you mean 'laplace'"):
        bayou.fit(dense(2, 2), (x, y), "laplase")
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        by_name("map", step=3)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        by_name("map", steps=0)
    with pytest.raises(ValueError, match="Auto needs a dict"):
        bayou.select.Auto({})


def test_straight_priors_are_narrow_in_the_first_layer_and_wide_behind() -> None:
    made = target(bayou.Gaussian(0.5, learn=True))
    scales = [
        {name: float(p.log_scale.exp()) for name, p in one.priors.items()}  # type: ignore[attr-defined]
        for one in (made, NoiseAndPrior(0.3, 3.0, 5.0, 2.0).apply(made))
    ]
    factors = {name: scales[1][name] / scales[0][name] for name in made.free}
    assert factors == pytest.approx(
        {"0.weight": 1.5, "0.bias": 7.5, "2.weight": 6.0, "2.bias": 30.0}
    )


class Residual(nn.Module):
    """A block whose activation is one layer that is called twice, as in many networks for
    images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(x + self.second(self.relu(self.first(x))))
        return out


def test_dropout_is_added_to_any_network_with_activation_layers() -> None:
    torch.manual_seed(0)
    block = Residual()
    net = nn.ModuleDict({"body": nn.ModuleList([block, block])})
    thin = bayou.select.with_dropout(net, 0.4)
    assert list(thin.state_dict()) == list(net.state_dict())
    assert isinstance(block.relu, nn.ReLU), "the network that was given is changed"
    assert [module.p for module in thin.modules() if isinstance(module, nn.Dropout)] == [
        0.4
    ]  # a shared block: once

    x, y = torch.randn(30, 4), torch.randint(4, (30,))
    method = bayou.MCDropout(bayou.MAP(steps=5))
    posterior = bayou.fit(bayou.select.with_dropout(block), (x, y), method, progress=False)
    outputs = posterior.predict(x, 500, seed=0).outputs
    assert float((outputs == 0).double().mean(0).min()) > 0.1  # the last activation is dropped too
    with torch.no_grad():
        assert torch.equal(bayou.select.with_dropout(block).eval()(x), block(x))


def test_dropout_of_a_sequential_is_behind_its_own_activations() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Residual(), nn.Linear(4, 1))
    thin = bayou.select.with_dropout(net, 0.1)
    assert [name for name, module in thin.named_modules() if isinstance(module, nn.Dropout)] == [
        "1.1"
    ]
    assert list(thin.state_dict()) == list(net.state_dict())
    assert bayou.select.with_dropout(thin) is thin
    nested = bayou.select.with_dropout(nn.Sequential(Residual(), nn.Linear(4, 1)))
    assert [name for name, module in nested.named_modules() if isinstance(module, nn.Dropout)] == [
        "0.relu.1"
    ]
    shared = nn.Tanh()
    twice = bayou.select.with_dropout(
        nn.Sequential(nn.Linear(2, 4), shared, nn.Linear(4, 4), shared)
    )
    assert [name for name, module in twice.named_modules() if isinstance(module, nn.Dropout)] == [
        "1.1",
        "3.1",
    ]


def test_a_network_without_activation_layers_gets_no_dropout() -> None:
    with pytest.raises(
        ValueError, match=r"Linear has no layer like nn\.ReLU .* put nn\.Dropout\(p\)"
    ):
        bayou.select.with_dropout(nn.Linear(2, 1))


def test_dropout_by_name_refuses_a_network_without_dropout_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = list[str]()
    monkeypatch.setattr(bayou.MAP, "fit", lambda self, *args, **kwargs: trained.append("MAP"))
    for name in ("select_ratio_and_shape", "select_noise_of_modes"):
        monkeypatch.setattr(regression, name, lambda *args, name=name: trained.append(name))
    net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError, match=r"Sequential calls no dropout in eval mode; put nn.Dropout"
    ):
        bayou.fit(net, (x, x[:, :1]), "dropout", progress=False)
    assert not trained
