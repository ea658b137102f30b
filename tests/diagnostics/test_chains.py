"""R-hat, effective sample sizes and Monte-Carlo errors against ArviZ, and the report on a posterior
of chains.
"""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import bayou
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical

F64 = torch.float64

measures = importlib.import_module("bayou.metrics.chains")
REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "arviz_chains.json").read_text())[
    "cases"
]
NAMES = ("rhat", "ess_bulk", "ess_tail", "ess_mean", "mcse")


def autoregressive(chains, draws, coefficient, columns=1, seed=0):
    noise = torch.randn(
        chains, draws, columns, generator=torch.Generator().manual_seed(seed), dtype=F64
    )
    x = [noise[:, 0] / math.sqrt(1 - coefficient**2)]
    for t in range(1, draws):
        x.append(coefficient * x[-1] + noise[:, t])
    return torch.stack(x, 1)


@pytest.mark.parametrize("case", REFERENCE)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_numbers_of_arviz(case, name):
    expected = REFERENCE[case][name]
    found = getattr(measures, name)(torch.tensor(REFERENCE[case]["draws"], dtype=F64))
    if expected is not None:  # ArviZ has no R-hat of one chain; split in two, there is one
        assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert math.isfinite(found)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of ArviZ, about its next version
def test_equal_to_arviz_itself():
    import arviz

    for chains, draws, coefficient in ((4, 250, 0.6), (2, 101, -0.4), (5, 30, 0.95)):
        x = autoregressive(chains, draws, coefficient)[..., 0]
        for name, expected in (
            ("rhat", arviz.rhat(x.numpy())),
            ("ess_bulk", arviz.ess(x.numpy(), method="bulk")),
            ("ess_tail", arviz.ess(x.numpy(), method="tail")),
            ("ess_mean", arviz.ess(x.numpy(), method="mean")),
            ("mcse", arviz.mcse(x.numpy(), method="mean")),
        ):
            assert float(getattr(measures, name)(x)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9, -0.5])
def test_the_effective_size_of_an_autoregressive_chain(coefficient):
    """K·(1 − φ)/(1 + φ) independent draws; the estimate scatters by a few per cent at this
    length.
    """
    x = autoregressive(4, 5000, coefficient, columns=8, seed=3)
    exact = 20_000 * (1 - coefficient) / (1 + coefficient)
    assert float(measures.ess_mean(x).mean()) == pytest.approx(exact, rel=0.08)
    assert measures.rhat(x).max() < 1.01


def test_the_standard_error_is_the_scatter_of_means():
    """600 chains of φ = 0.8: the standard deviation of their means, known to 3 %, against the mean
    estimate.
    """
    x = autoregressive(1, 500, 0.8, columns=600, seed=5)
    scatter = x.mean((0, 1)).std()
    assert float(measures.mcse(x).mean()) == pytest.approx(float(scatter), rel=0.1)


def test_chains_that_disagree_in_place_or_in_scale_are_found():
    x = autoregressive(4, 200, 0.0)
    assert measures.rhat(x) < 1.02
    shifted, stretched = x.clone(), x.clone()
    shifted[0] += 2
    stretched[0] *= 5
    assert measures.rhat(shifted) > 1.2
    assert measures.rhat(stretched) > 1.05  # found by the folded draws
    drifting = x + torch.linspace(0, 3, 200).reshape(1, -1, 1)
    assert measures.rhat(drifting) > 1.2  # found by splitting


def test_coordinates_do_not_see_each_other(monkeypatch):
    x = autoregressive(3, 40, 0.5, columns=6).unflatten(-1, (2, 3))
    for name in NAMES:
        whole = getattr(measures, name)(x)
        assert whole.shape == (2, 3)
        assert float(whole[1, 2]) == pytest.approx(
            float(getattr(measures, name)(x[..., 1, 2])), rel=1e-12
        )
        with monkeypatch.context() as patch:
            patch.setattr(measures, "CHUNK_NUMBERS", 2 * 3 * 40)
            torch.testing.assert_close(getattr(measures, name)(x), whole, rtol=1e-12, atol=0)


def test_bad_draws_are_refused():
    with pytest.raises(ValueError, match="at least 4 draws"):
        measures.rhat(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="NaN"):
        measures.ess_bulk(torch.full((2, 10), torch.nan))
    assert float(measures.ess_mean(torch.ones(2, 10))) == 20


def posterior(draws=None):
    """Two chains of a small network, one bias constant."""
    net = nn.Linear(2, 1, dtype=F64)
    target = Target.build(net, bayou.Gaussian(0.1), None, 5)
    weight = autoregressive(2, 100, 0.3, columns=2).reshape(200, 1, 2)
    stack = draws or {"weight": weight, "bias": torch.ones(1, dtype=F64).expand(200, 1)}
    return Empirical(target, Network(net), stack, chains=2)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # ArviZ, on a weight that never moves
def test_draws_by_chain_are_those_of_arviz():
    import arviz

    p = posterior()
    draws = {name: value.numpy() for name, value in p.by_chain().items()}
    newer = int(arviz.__version__.partition(".")[0]) >= 1
    data = arviz.from_dict({"posterior": draws}) if newer else arviz.from_dict(posterior=draws)
    found = arviz.rhat(data)["weight"].to_numpy()
    torch.testing.assert_close(
        torch.from_numpy(found), measures.rhat(p.by_chain()["weight"]), rtol=1e-6, atol=0
    )
