"""Annealed importance sampling against evidences that are known: in closed form, and by
quadrature.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import bayou
from bayou import priors
from bayou.network.target import Target
from experiments.evidence import Evidence, evidence

F64 = torch.float64
Pair = tuple[Tensor, Tensor]


def regression() -> Pair:
    """Number 1: x = linspace(−1, 1, 21), features (1, x, x², x³), y = sin 3x."""
    x = torch.linspace(-1, 1, 21, dtype=F64)
    return torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)


def logistic() -> tuple[nn.Linear, Pair]:
    """Two weights, twelve rows."""
    x = torch.linspace(-2, 2, 12, dtype=F64).unsqueeze(1)
    y = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1], dtype=F64).unsqueeze(1)
    return nn.Linear(1, 1).double(), (x, y)


def quadrature(data: Pair, log_prior: Any) -> float:
    """log ∫ p(w)·Π σ(±f(x)) dw over a grid; the integrand is smooth and has died at its edges."""
    axis = torch.linspace(-25, 25, 1501, dtype=F64)
    slope, shift = torch.meshgrid(axis, axis, indexing="ij")
    total = log_prior(slope) + log_prior(shift)
    for x, y in zip(data[0].flatten().tolist(), data[1].flatten().tolist(), strict=True):
        total = total + nn.functional.logsigmoid((slope * x + shift) * (2 * y - 1))
    return float(total.flatten().logsumexp(0)) + 2 * math.log(float(axis[1] - axis[0]))


def normal(scale: float) -> Any:
    return torch.distributions.Normal(torch.zeros((), dtype=F64), scale).log_prob


def test_conjugate_regression_number_1() -> None:
    x, y = regression()
    exact = float(
        MultivariateNormal(torch.zeros(21, dtype=F64), x @ x.T + 0.01 * torch.eye(21)).log_prob(
            y[:, 0]
        )
    )
    assert exact == pytest.approx(6.465824, abs=1e-6)
    net = nn.Linear(4, 1, bias=False).double()
    options: dict[str, Any] = {"chains": 500, "temperatures": 200, "first": 1e-4, "leapfrogs": 6}
    found = evidence(net, (x, y), likelihood=bayou.Gaussian(0.1), progress=False, **options)
    assert found.standard_error < 0.3
    assert abs(found.value - exact) < 4 * found.standard_error
    assert found.mean < found.value
    assert found.mean < exact  # by some nats of the spread
    assert found.draws["weight"].shape == (500, 1, 4)
    weights = (found.log_weights - found.log_weights.max()).exp().unsqueeze(1)
    mean = (weights * found.draws["weight"][:, 0]).sum(0) / weights.sum()
    assert torch.allclose(
        mean, torch.tensor([0, 2.532311, 0, -2.470425], dtype=F64), atol=0.12
    )  # 0.125/√(60 effective)


@pytest.mark.parametrize(
    ("prior", "log_prior"),
    [
        (bayou.Normal(2.0), normal(2.0)),
        (priors.StudentT(3.0), torch.distributions.StudentT(torch.tensor(3.0, dtype=F64)).log_prob),
    ],
)
def test_logistic_regression_against_quadrature(prior: bayou.priors.Prior, log_prior: Any) -> None:
    net, data = logistic()
    exact = quadrature(data, log_prior)
    options: dict[str, Any] = {"likelihood": bayou.Bernoulli(), "prior": prior, "progress": False}
    found = evidence(net, data, chains=400, temperatures=40, leapfrogs=5, first=0.01, **options)
    assert found.standard_error < 0.1
    assert abs(found.value - exact) < 4 * found.standard_error


@pytest.mark.slow
def test_few_temperatures_widen_the_weights_and_bias_nothing() -> None:
    """E[w] = p(D) after any number of moves: the step sizes come from other chains, so that nothing
    is learned.
    """
    net, data = logistic()
    exact = quadrature(data, normal(2.0))
    options: dict[str, Any] = {
        "likelihood": bayou.Bernoulli(),
        "prior": bayou.Normal(2.0),
        "progress": False,
    }
    few, more = (
        evidence(net, data, chains=4000, temperatures=t, leapfrogs=4, first=0.05, **options)
        for t in (3, 12)
    )
    for found in (few, more):
        assert found.standard_error < 0.1
        assert abs(found.value - exact) < 4 * found.standard_error
        assert 1 < found.ess < 4000
    assert few.spread > 1.5 * more.spread
    assert few.mean < more.mean < exact


def test_the_numbers_of_weights() -> None:
    """log 1/C Σw, its error by the delta method and the effective chains, of weights (1, 2, 3,
    6).
    """
    w = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=F64)
    found = Evidence.of(w.log() + 1000, 0.5, {})  # no overflow
    assert found.value == pytest.approx(1000 + math.log(3))
    assert found.ess == pytest.approx(144 / 50)
    assert found.standard_error == pytest.approx(float(w.std()) / math.sqrt(4) / 3)
    assert found.spread == pytest.approx(float(w.log().std()))
    assert "lower bound in expectation" in str(found)


def test_a_chain_is_a_function_of_the_seed() -> None:
    net, data = logistic()
    options: dict[str, Any] = {
        "likelihood": bayou.Bernoulli(),
        "chains": 3,
        "temperatures": 4,
        "leapfrogs": 2,
    }
    torch.manual_seed(1)
    one = evidence(net, data, seed=3, progress=False, **options)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = (evidence(net, data, seed=seed, progress=False, **options) for seed in (3, 4))
    assert torch.equal(torch.get_rng_state(), state)  # the global stream is left alone
    assert net.training  # and so is the network
    assert torch.equal(one.log_weights, again.log_weights)
    assert not torch.equal(one.log_weights, other.log_weights)


def test_a_target_or_a_posterior_has_all_that_is_needed() -> None:
    net, data = logistic()
    options: dict[str, Any] = {"chains": 3, "temperatures": 4, "leapfrogs": 2, "progress": False}
    own: dict[str, Any] = {"likelihood": bayou.Bernoulli(), "prior": bayou.Normal(2.0)}
    target = Target.build(net, **own, n=12)
    posterior = bayou.fit(net, data, method=bayou.MAP(steps=1), **own, progress=False)
    expected = evidence(net, data, **own, **options)
    for other in (target, replace(target, n=5), posterior):
        assert evidence(other, data, **options).value == expected.value


def test_progress_and_ctrl_c() -> None:
    net, data = logistic()
    seen: list[tuple[str, int, int]] = []

    def tell(title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        seen.append((title, step, total))
        assert numbers.keys() == {"beta", "log_weight", "seconds_left"}

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    options: dict[str, Any] = {
        "likelihood": bayou.Bernoulli(),
        "chains": 2,
        "temperatures": 3,
        "leapfrogs": 1,
    }
    evidence(net, data, progress=tell, **options)
    assert seen[-1] == ("evidence", 3, 3)
    with pytest.raises(KeyboardInterrupt, match="interrupted at β = .* and has no estimate"):
        evidence(net, data, progress=press, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"likelihood": bayou.Gaussian(0.1, learn=True)}, "a learned noise has a flat prior"),
        ({"prior": bayou.Normal(1.0, learn=True)}, "evidence cannot learn a prior"),
        ({"prior": bayou.priors.LogUniform()}, "improper"),
        ({"chains": 1}, "chains must be a whole number of at least 2, got 1"),
        ({"first": 0.0}, "strictly between 0 and 1, got 0.0"),
        ({"data": (torch.zeros(3, 2), torch.zeros(3, 1))}, "float32|shape|inputs"),
    ],
)
def test_errors_say_what_to_do(changes: dict[str, Any], message: str) -> None:
    net, data = logistic()
    given = {"data": data, "likelihood": bayou.Gaussian(0.1), "progress": False} | changes
    with pytest.raises(ValueError, match=message):
        evidence(net, **given)


def test_a_target_takes_no_second_likelihood() -> None:
    net, data = logistic()
    target = Target.build(net, bayou.Bernoulli(), None, 12)
    with pytest.raises(ValueError, match="a Target has its likelihood and prior; leave them out"):
        evidence(target, data, prior=bayou.Normal(1.0))
    frozen = Target.build(net.requires_grad_(False), bayou.Bernoulli(), None, 12)
    with pytest.raises(ValueError, match="nothing to integrate over"):
        evidence(frozen, data)
