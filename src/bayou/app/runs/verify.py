"""Known values that a correct implementation must reproduce, computed on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

import bayou
from bayou import diagnostics, flows
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.core import rng
from bayou.inference.method import Method
from bayou.posteriors import Guided, Posterior

F64 = torch.float64
FIT_OPTIONS: dict[str, Any] = {"likelihood": bayou.Gaussian(0.1), "progress": False}
REGRESSION = "conjugate regression"


@final
@dataclass(frozen=True)
class KnownValue:
    """A known value and the computed one.

    Args:
        name: what is computed.
        expected: the known value and the tolerance, as text.
        got: the computed value, as text.
        passed: whether they agree.
    """

    name: str
    expected: str
    got: str
    passed: bool


def compare(name: str, expected: float, got: float, tolerance: float) -> KnownValue:
    """Compare a computed number with the known one.

    Args:
        name: what is computed.
        expected: the known value.
        got: the computed value.
        tolerance: the largest difference that passes.
    """
    digits = max(2, -math.floor(math.log10(tolerance)))
    passed = abs(got - expected) <= tolerance
    return KnownValue(name, f"{expected:.7g} ± {tolerance:.1g}", f"{got:.{digits + 1}f}", passed)


def known_values() -> Iterator[KnownValue]:
    """Compute all of them, one after another; under a minute on a laptop."""
    yield from conjugate_laplace()
    yield from conjugate_elbo()
    yield from multiplicative_bound()
    yield from flow_kl()
    yield from determinants()


def regression() -> tuple[Tensor, Tensor]:
    """Return x = linspace(−1, 1, 21) as features (1, x, x², x³), and y = sin 3x."""
    x = torch.linspace(-1, 1, 21, dtype=F64)
    return torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)


def linear() -> nn.Linear:
    """Return a linear model with four weights at 0."""
    net = nn.Linear(4, 1, bias=False, dtype=F64)
    nn.init.zeros_(net.weight)
    return net


def _fit_regression(method: Method) -> Posterior:
    """Fit the linear model to the regression."""
    return raise_if_interrupted(bayou.fit(linear(), regression(), method=method, **FIT_OPTIONS))


def conjugate_laplace() -> Iterator[KnownValue]:
    """Compare a Laplace approximation with Bayesian linear regression, in closed form."""
    start = bayou.MAP(steps=2000, lr=0.1, schedule="cosine", batch_size=21)
    posterior = _fit_regression(bayou.Laplace("full", start=start))
    mean = posterior.mean()["weight"][0].tolist()
    for index, expected in ((1, 2.532311), (3, -2.470425)):
        name = f"{REGRESSION}: posterior mean of weight {index}"
        yield compare(name, expected, mean[index], 1e-5)
    unit = torch.eye(4, dtype=F64)  # inputs at which the outputs are the weights
    _, variance = posterior.function(unit, diagonal=True)  # type: ignore[attr-defined]
    std = float(variance.flatten()[1].sqrt())
    yield compare(f"{REGRESSION}: its standard deviation", 0.089850, std, 1e-5)
    log_evidence = posterior.log_evidence  # type: ignore[attr-defined]
    yield compare(f"{REGRESSION}: log evidence by Laplace", 6.465824, log_evidence, 1e-5)


def conjugate_elbo() -> Iterator[KnownValue]:
    """Compare the best mean-field bound, and the evidence by annealing from that fit."""
    method = bayou.VI(bayou.MeanField(), steps=600, lr=0.05, samples=16, schedule="cosine")
    posterior = _fit_regression(method)
    if not isinstance(posterior, Guided):
        raise TypeError(f"VI returned a {type(posterior).__name__}, expected Guided")
    bound = bayou.elbo(posterior, regression(), samples=4000, seed=0)
    tolerance = 0.02 + 4 * bound.standard_error
    yield compare(f"{REGRESSION}: ELBO of the best mean field", 5.145762, bound.value, tolerance)
    annealed = _fit_regression(bayou.Annealed(method, draws=200))
    mixing = annealed.mixing or {}
    log_evidence = mixing["log_evidence"]
    yield compare(f"{REGRESSION}: log evidence by annealing", 6.465824, log_evidence, 0.1)


def multiplicative_bound() -> Iterator[KnownValue]:
    """Compare the bound of a multiplicative flow with one input and three outputs."""
    bnn = bayou.bayesianize(nn.Linear(1, 3, bias=False).double(), {"weight": bayou.MNF(flow=None)})
    guide = bnn.guides[0]
    with torch.no_grad():
        guide.center.copy_(torch.tensor([[1.5], [-0.7], [0.2]]))
        guide.log_std.fill_(math.log(0.3))
        guide.gain.base.log_std.fill_(math.log(0.5))
        guide.auxiliary.log_std.fill_(math.log(0.5))
    gap = diagnostics.bound_gap(bnn, draws=10, samples=40_000, seed=0)["weight"]
    yield compare("KL of MNF with the conjugate auxiliary", 2.901481, gap.bound.value, 0.03)
    yield compare("gap of this bound of MNF", 0.0, gap.gap_upper.value, 1e-3)


def flow_kl() -> Iterator[KnownValue]:
    """Compare the KL divergence of z = 2ε + 1 to N(0, 1)."""
    transform = flows.DiagonalAffine(1).double()
    with torch.no_grad():
        transform.shift.fill_(1.0)
        transform.log_scale.fill_(math.log(2.0))
    flow = flows.Flow(flows.StandardNormal(1).double(), transform)
    z, log_q = flow.sample_and_log_prob(200_000, seed=0)
    log_ratio = (log_q - torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)).detach()
    standard_error = float(log_ratio.std() / len(log_ratio) ** 0.5)
    kl = float(log_ratio.mean())
    yield compare("KL of a flow to its prior", 1.306853, kl, 4 * standard_error)


def determinants() -> Iterator[KnownValue]:
    """Compare log-determinants of analytic flows with autograd, and maps with their inverses."""
    errors = {"inverse": 0.0, "ladj": 0.0}
    for name in ("realnvp", "iaf", "spline_coupling", "gated", "lu_linear", "glow"):
        with rng.isolated(0, torch.device("cpu")):
            flow = flows.registry("vector")[name].build(4)
        for check in errors:
            for result in flows.check(flow, 4, only=[check]).results:
                error = (result.value or 0.0) if result.passed else math.inf
                errors[check] = max(errors[check], error)
    title = "log-determinants against the autograd Jacobian, worst"
    yield compare(title, 0.0, errors["ladj"], 1e-8)
    yield compare("inverses of the same flows, worst", 0.0, errors["inverse"], 1e-8)
