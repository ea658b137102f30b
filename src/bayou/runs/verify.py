"""Known values that a correct implementation must reproduce, computed on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

import bayou
from bayou import diagnostics, flows, rng
from bayou.posteriors import Guided
from bayou.runs.interrupt import raise_if_interrupted

F64 = torch.float64


@final
@dataclass(frozen=True)
class Check:
    """A known value and the computed one."""

    name: str
    expected: str
    got: str
    passed: bool


def near(name: str, expected: float, got: float, tolerance: float) -> Check:
    """A check of one number."""
    digits = max(2, -math.floor(math.log10(tolerance)))
    passed = abs(got - expected) <= tolerance
    return Check(name, f"{expected:.7g} ± {tolerance:.1g}", f"{got:.{digits + 1}f}", passed)


def checks() -> Iterator[Check]:
    """All of them, one after another; under a minute on a laptop."""
    for make in (conjugate, multiplicative, flow_kl, determinants, sparse):
        yield from make()


def regression() -> tuple[Tensor, Tensor]:
    """x = linspace(−1, 1, 21), features (1, x, x², x³), y = sin 3x."""
    x = torch.linspace(-1, 1, 21, dtype=F64)
    return torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)


def linear() -> nn.Linear:
    """Four weights at 0."""
    net = nn.Linear(4, 1, bias=False, dtype=F64)
    nn.init.zeros_(net.weight)
    return net


def conjugate() -> Iterator[Check]:
    """Bayesian linear regression: posterior and evidence in closed form."""
    start = bayou.MAP(steps=2000, lr=0.1, schedule="cosine", batch_size=21)
    method = bayou.Laplace("full", start=start)
    options: dict[str, Any] = {"likelihood": bayou.Gaussian(0.1), "progress": False}
    posterior = raise_if_interrupted(bayou.fit(linear(), regression(), method=method, **options))
    mean = posterior.mean()["weight"][0].tolist()
    for name, expected, got in zip("01", (2.532311, -2.470425), (mean[1], mean[3]), strict=True):
        yield near(
            f"1  conjugate regression: posterior mean of weight {1 + 2 * int(name)}",
            expected,
            got,
            1e-5,
        )
    unit = torch.eye(4, dtype=F64)  # inputs at which the outputs are the weights
    _, variance = posterior.function(unit, diagonal=True)  # type: ignore[attr-defined]
    yield near(
        "1  conjugate regression: its standard deviation",
        0.089850,
        float(variance.flatten()[1].sqrt()),
        1e-5,
    )
    yield near(
        "1  conjugate regression: log evidence by Laplace", 6.465824, posterior.log_evidence, 1e-5
    )  # type: ignore[attr-defined]
    for words, value, rank in (("log evidence", 6.465824, None), ("best mean field", 5.145762, 0)):
        last = bayou.methods.VBLL(rank, effort=0.06, lr=0.1)
        layer = raise_if_interrupted(bayou.fit(linear(), regression(), method=last, **options))
        yield near(f"1  conjugate regression: {words} by VBLL", value, layer.log_evidence, 1e-5)  # type: ignore[attr-defined]
    ascent = bayou.VI(bayou.MeanField(), steps=600, lr=0.05, samples=16, schedule="cosine")
    field = raise_if_interrupted(bayou.fit(linear(), regression(), method=ascent, **options))
    assert isinstance(field, Guided)
    bound = bayou.elbo(field, regression(), samples=4000, seed=0)
    yield near(
        "1  conjugate regression: ELBO of the best mean field",
        5.145762,
        bound.value,
        0.02 + 4 * bound.standard_error,
    )
    annealed = raise_if_interrupted(
        bayou.fit(linear(), regression(), bayou.Annealed(ascent, draws=200), **options)
    )
    found = annealed.mixing or {}
    yield near(
        "1  conjugate regression: log evidence by annealing", 6.465824, found["log_evidence"], 0.1
    )
    chains = bayou.MCLMC(draws=200, warmup=100, steps=5)
    drawn = raise_if_interrupted(bayou.fit(linear(), regression(), chains, **options)).predict(
        unit, 800
    )
    yield near(
        "1  conjugate regression: standard deviation by MCLMC",
        0.08985,
        float(drawn.outputs[:, 1].std()),
        0.013,
    )


def multiplicative() -> Iterator[Check]:
    """The bound of a multiplicative flow with one input and three outputs."""
    bnn = bayou.bayesianize(nn.Linear(1, 3, bias=False).double(), {"weight": bayou.MNF(flow=None)})
    guide = bnn.guides[0]
    with torch.no_grad():
        guide.center.copy_(torch.tensor([[1.5], [-0.7], [0.2]]))
        guide.log_std.fill_(math.log(0.3))
        guide.gain.base.log_std.fill_(math.log(0.5))
        guide.auxiliary.log_std.fill_(math.log(0.5))
    found = diagnostics.bound_gap(bnn, draws=10, samples=40_000, seed=0)["weight"]
    yield near(
        "2  MNF: KL with the conjugate auxiliary is exact", 2.901481, found.bound.value, 0.03
    )
    yield near("2  MNF: its gap", 0.0, found.gap_upper.value, 1e-3)


def flow_kl() -> Iterator[Check]:
    """z = 2ε + 1 against N(0, 1)."""
    transform = flows.DiagonalAffine(1).double()
    with torch.no_grad():
        transform.shift.fill_(1.0)
        transform.log_scale.fill_(math.log(2.0))
    flow = flows.Flow(flows.StandardNormal(1).double(), transform)
    z, log_q = flow.sample_and_log_prob(200_000, seed=0)
    each = (log_q - torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)).detach()
    yield near(
        "5  KL of a flow to its prior",
        1.306853,
        float(each.mean()),
        4 * float(each.std() / len(each) ** 0.5),
    )


def determinants() -> Iterator[Check]:
    """The log-determinant of every analytic flow against the autograd Jacobian, and its inverse."""
    worst = {"inverse": 0.0, "ladj": 0.0}
    for name in ("realnvp", "iaf", "spline_coupling", "gated", "lu_linear", "glow"):
        with rng.isolated(0, torch.device("cpu")):
            flow = flows.registry("vector")[name].build(4)
        for kind in worst:
            results = flows.check(flow, 4, only=[kind]).results
            errors = [(one.value or 0.0) if one.passed else math.inf for one in results]
            worst[kind] = max(worst[kind], *errors)
    yield near("5  log-determinants against the autograd Jacobian, worst", 0.0, worst["ladj"], 1e-8)
    yield near("5  inverses of the same flows, worst", 0.0, worst["inverse"], 1e-8)


def sparse() -> Iterator[Check]:
    """Sparse variational dropout at log α = 0."""
    prior = bayou.priors.LogUniform().bind((1,), dtype=F64)
    one = torch.ones(1, dtype=F64)
    kl = prior.kl(one, one)
    assert kl is not None
    yield near("6  −KL of sparse variational dropout at log α = 0", -0.43124, -float(kl), 1e-5)
