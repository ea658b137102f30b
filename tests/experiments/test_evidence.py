"""Annealed importance sampling against evidences that are known: in closed form, and by
quadrature.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import bayou
from bayou import priors
from experiments.evidence import Evidence, evidence

F64 = torch.float64
Pair = tuple[Tensor, Tensor]


def regression():
    """Number 1: x = linspace(−1, 1, 21), features (1, x, x², x³), y = sin 3x."""
    x = torch.linspace(-1, 1, 21, dtype=F64)
    return torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)


def logistic():
    """Two weights, twelve rows."""
    x = torch.linspace(-2, 2, 12, dtype=F64).unsqueeze(1)
    y = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1], dtype=F64).unsqueeze(1)
    return nn.Linear(1, 1).double(), (x, y)


def quadrature(data, log_prior):
    """log ∫ p(w)·Π σ(±f(x)) dw over a grid; the integrand is smooth and has died at its edges."""
    axis = torch.linspace(-25, 25, 1501, dtype=F64)
    slope, shift = torch.meshgrid(axis, axis, indexing="ij")
    total = log_prior(slope) + log_prior(shift)
    for x, y in zip(data[0].flatten().tolist(), data[1].flatten().tolist(), strict=True):
        total = total + nn.functional.logsigmoid((slope * x + shift) * (2 * y - 1))
    return float(total.flatten().logsumexp(0)) + 2 * math.log(float(axis[1] - axis[0]))


def normal(scale):
    return torch.distributions.Normal(torch.zeros((), dtype=F64), scale).log_prob


def test_conjugate_regression_number_1():
    x, y = regression()
    law = MultivariateNormal(torch.zeros(21, dtype=F64), x @ x.T + 0.01 * torch.eye(21))
    exact = float(law.log_prob(y[:, 0]))
    assert exact == pytest.approx(6.465824, abs=1e-6)
    net = nn.Linear(4, 1, bias=False).double()
    options = {"chains": 500, "temperatures": 200, "first": 1e-4, "leapfrogs": 6}
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
def test_logistic_regression_against_quadrature(prior, log_prior):
    net, data = logistic()
    exact = quadrature(data, log_prior)
    options = {"likelihood": bayou.Bernoulli(), "prior": prior, "progress": False}
    found = evidence(net, data, chains=400, temperatures=40, leapfrogs=5, first=0.01, **options)
    assert found.standard_error < 0.1
    assert abs(found.value - exact) < 4 * found.standard_error


def test_the_numbers_of_weights():
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
def test_invalid_evidence_arguments_raise(changes, message):
    net, data = logistic()
    given = {"data": data, "likelihood": bayou.Gaussian(0.1), "progress": False} | changes
    with pytest.raises(ValueError, match=message):
        evidence(net, **given)
