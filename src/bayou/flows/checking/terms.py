"""Checks of the ladj: exact ones are compared with the Jacobian, estimates and bounds with
draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows.checking.case import Case, distance
from bayou.flows.checking.report import Result
from bayou.flows.core.bases import Base, DiagonalNormal, StandardNormal
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj

ESTIMATES = 4096  # draws of an estimated ladj
GROUPS = 64  # groups of these draws, each with a gradient
GROUP_SIZE = ESTIMATES // GROUPS
TEST_DRAWS = 2**14  # of y, and of the proposal
PILOT_DRAWS = 2**10  # of y, from which the proposal is computed
MAX_ATOMS = 64  # values of a discrete proposal
TEST_FUNCTIONS = 7  # besides the constant
MAX_RELATIVE_ERROR = 0.1  # the standard error above which the test has no power
BASE_PERTURBATION = 0.3  # the standard deviation of the mean and log std of a base
ROUNDING_ERROR = 1e-10
MIN_SCALE = 1e-6  # of a coordinate of the proposal


def ladj(case: Case) -> Iterator[Result]:
    """Compare the ladj, or the mean of an estimate, with log|det| of the autograd Jacobian.

    For a bound, E[exp log p] = p(y) is tested by draws.

    Args:
        case: the map to check.
    """
    ladj_kind = case.transform.ladj_kind
    if ladj_kind is Ladj.estimate and not case.is_bijective:
        yield Result.skip("ladj", "an estimate, and not a bijection; check the links")
    elif not case.is_bijective or ladj_kind is Ladj.bound:
        yield from _check_bound(case)
    elif ladj_kind is Ladj.estimate:
        yield from _check_estimate(case)
    else:
        yield from _check_exact(case)


def _log_det(y: Tensor, x: Tensor, create_graph: bool = False) -> Tensor:
    """Compute log|det ∂y/∂x| of every row: (n,).

    Rows are independent, so one backward pass computes a row of the Jacobian of all.
    """
    totals = y.reshape(len(x), -1).sum(0)
    gradients = [
        torch.autograd.grad(total, x, retain_graph=True, create_graph=create_graph)[0]
        for total in totals
    ]
    jacobian = torch.stack([gradient.reshape(len(x), -1) for gradient in gradients], 1)
    return torch.linalg.slogdet(jacobian)[1]


def _check_exact(case: Case) -> Iterator[Result]:
    """Compare the ladj with the Jacobian."""
    limit = case.with_solver_error(case.tolerances["ladj"])
    for name, f, x, context, noise in case.passes():
        y, log_det = f(x.requires_grad_(), context, noise=noise)
        yield Result.of(f"ladj {name}", distance(log_det.detach(), _log_det(y, x)), limit)
    yield from _check_opposite(case)


def _check_estimate(case: Case) -> Iterator[Result]:
    """Compare the means of an estimate and of its gradient with those of the Jacobian.

    E[ladj] = log|det|, and E[∇ Σ_i w_i·ladj_i] = ∇ Σ_i w_i·log|det|_i for random weights w of the
    rows.
    """
    weights = rng.normal(1, (case.rows,), case.reference, rng.fold(case.seed, "weights"))[0]
    for name, f, x, context, noise in case.passes():
        x.requires_grad_()
        leaves = [x, *(p for p in f.parameters() if p.requires_grad)]
        log_det = _log_det(f(x, context, noise=noise)[0], x, create_graph=True)
        log_det_gradient = gradient(weights @ log_det, leaves, retain_graph=True)
        copies = x.expand(GROUP_SIZE, *x.shape)
        estimates = []
        estimate_gradients = []
        for group in range(GROUPS):
            start = group * GROUP_SIZE * case.rows
            estimate = f(copies, context, seed=case.seed, start=start)[1]  # (GROUP_SIZE, rows)
            estimates.append(estimate.detach())
            loss = weights @ estimate.mean(0)
            estimate_gradients.append(gradient(loss, leaves, retain_graph=True))
        max_error = case.tolerances["estimate"]
        draws = torch.cat(estimates)
        yield from _compare_mean(case, f"ladj {name}", draws, log_det.detach(), max_error)
        max_error = case.tolerances["estimate gradient"] * max(1.0, log_det_gradient.norm().item())
        draws = torch.stack(estimate_gradients)
        yield from _compare_mean(case, f"ladj {name} gradient", draws, log_det_gradient, max_error)


def gradient(loss: Tensor, leaves: list[Tensor], retain_graph: bool = False) -> Tensor:
    """Return the gradient in all leaves as one vector, 0 where there is none.

    Args:
        loss: a scalar.
        leaves: the tensors to differentiate in.
        retain_graph: whether to keep the graph, which compiled code does not allow.
    """
    loss = loss + 0 * leaves[0].sum()  # a constant loss has gradient 0
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=retain_graph)
    return torch.cat(
        [
            (torch.zeros_like(leaf) if entries is None else entries).flatten()
            for entries, leaf in zip(gradients, leaves, strict=True)
        ]
    )


def _compare_mean(
    case: Case, name: str, draws: Tensor, expected: Tensor, max_error: float
) -> Iterator[Result]:
    """Compare the mean of draws (n, D) with ``expected`` (D,).

    The difference is at most some standard errors, and these are at most ``max_error``.
    """
    error = draws.std(0) / math.sqrt(len(draws))
    gap = _in_standard_errors(draws.mean(0) - expected, error)
    limit = case.tolerances["standard errors"]
    yield Result.of(name, gap, limit, "standard errors of the mean")
    yield Result.of(f"{name} error", error.max().item(), max_error, "largest standard error")


def _in_standard_errors(gap: Tensor, error: Tensor) -> float:
    """Return the largest gap in standard errors; rounding alone does not make it large."""
    largest = (gap.abs() / (error + ROUNDING_ERROR)).max().item()
    return math.inf if math.isnan(largest) else largest


@torch.no_grad()
def _check_bound(case: Case) -> Iterator[Result]:
    """Test E[exp(log p(x) + V)] = p(y), by draws of y from the map and from a proposal g.

    Inverse: E_g[ψ(y)·exp(log p(x) + V)] = E_p[ψ(y)·g(y)] for test functions ψ. Forward: with
    A = log p(x) + V − log g(y), taken from forward at draws of p and from inverse at draws of g,
    E_p[ψ·sigmoid(−A)] = E_g[ψ·sigmoid(A)] (Bennett 1976).
    """
    f = case.transform
    yield from _check_opposite(case)
    if case.base is None:
        yield Result.skip("ladj inverse", f"no base distribution on {f.domain}; pass base=")
        return
    flow = Flow(_perturb_base(case.base, case.seed), f)
    context = case.single_context()
    proposal = Proposal(flow.sample(PILOT_DRAWS, context, seed=rng.fold(case.seed, "pilot")))
    seed = rng.fold(case.seed, "draws")
    y, forward_log_prob = flow.sample_and_log_prob(TEST_DRAWS, context, seed=seed)
    z = proposal.draw(TEST_DRAWS)
    is_inside = f.in_image(z)
    z_inside = torch.where(is_inside.reshape(-1, *[1] * (z.ndim - 1)), z, y)
    inverse_log_prob = flow.log_prob(z_inside, context, seed=rng.fold(case.seed, "back"))
    inverse_log_prob = inverse_log_prob.where(is_inside, -torch.inf)
    y_functions = proposal.functions(y)  # (TEST_DRAWS, ψ)
    z_functions = proposal.functions(z)
    y_weight = proposal.log_prob(y).exp()
    z_weight = inverse_log_prob.exp()
    yield _compare_draws(case, "inverse", y_weight, z_weight, y_functions, z_functions)
    y_weight = torch.sigmoid(proposal.log_prob(y) - forward_log_prob)
    z_weight = torch.sigmoid(inverse_log_prob - proposal.log_prob(z))
    yield _compare_draws(case, "forward", y_weight, z_weight, y_functions, z_functions)


def _compare_draws(
    case: Case,
    name: str,
    y_weight: Tensor,
    z_weight: Tensor,
    y_functions: Tensor,
    z_functions: Tensor,
) -> Result:
    """Compare the weighted means of test functions at draws of the map, y, and the proposal, z."""
    y_terms = y_weight.unsqueeze(-1) * y_functions
    z_terms = z_weight.unsqueeze(-1) * z_functions
    error = ((y_terms.var(0) + z_terms.var(0)) / TEST_DRAWS).sqrt()
    relative_error = (error[0] / y_terms[:, 0].mean()).item()
    note = f"standard errors, of {100 * relative_error:.1g} %"
    if relative_error > MAX_RELATIVE_ERROR:
        reason = f"too few draws for {case.size} dimensions: {note}"
        return Result.skip(f"ladj {name}", reason)
    gap = _in_standard_errors(y_terms.mean(0) - z_terms.mean(0), error)
    return Result.of(f"ladj {name}", gap, case.tolerances["standard errors"], note)


def _perturb_base(base: Base, seed: int) -> Base:
    """Return a normal with random mean and std in place of a standard normal.

    Where q(z|y) is the conditional of the base, errors of q would cancel.
    """
    if type(base) is not StandardNormal:
        return base
    normal = DiagonalNormal(base.event_shape).to(base.anchor)
    for name, parameter in normal.named_parameters():
        noise = rng.normal(1, parameter.shape, parameter, rng.fold(seed, name))[0]
        parameter.copy_(BASE_PERTURBATION * noise)
    return normal


@torch.no_grad()
def _check_opposite(case: Case) -> Iterator[Result]:
    """Compare the two terms of a round trip, which are opposite."""
    trip = case.round_trip("forward", "inverse") or case.round_trip("inverse", "forward")
    # The term of a bijection may be random although its values are not.
    if trip is None or (case.is_bijective and case.transform.ladj_kind is Ladj.bound):
        yield Result.skip(
            "ladj opposite", "both directions are random; the rows forward and inverse compare them"
        )
        return
    start, end = trip
    limit = case.with_solver_error(case.tolerances["ladj"])
    yield Result.of("ladj opposite", distance(end[1], start[1]), limit)


class Proposal:
    """A distribution close to that of y, and bounded test functions of y.

    It is a Gaussian, or uniform on the most frequent values if y is discrete. Its draws are those
    of torch's generator, which ``check`` isolates.

    Args:
        y: draws of y, (n, *event).
    """

    def __init__(self, y: Tensor) -> None:
        flat = y.flatten(1)
        self.event: torch.Size = y.shape[1:]
        self.mean: Tensor = flat.mean(0)
        self.std: Tensor = flat.std(0).clamp_min(MIN_SCALE)
        self.waves: Tensor = torch.randn(TEST_FUNCTIONS, len(self.mean)).to(y)
        self.phases: Tensor = 2 * math.pi * torch.rand(TEST_FUNCTIONS).to(y)
        values, counts = flat.unique(dim=0, return_counts=True)
        self.atoms: Tensor | None = None
        if len(values) < len(flat) // 2:
            self.atoms = values[counts.argsort(descending=True)[:MAX_ATOMS]]
        else:
            covariance = flat.T.cov().reshape(flat.shape[1], -1)
            self.normal: torch.distributions.MultivariateNormal = (
                torch.distributions.MultivariateNormal(self.mean, covariance)
            )

    def draw(self, n: int) -> Tensor:
        """Draw n events: (n, *event).

        Args:
            n: the number of events.
        """
        if self.atoms is None:
            return self.normal.sample((n,)).reshape(n, *self.event)
        return self.atoms[torch.randint(len(self.atoms), (n,))].reshape(n, *self.event)

    def log_prob(self, y: Tensor) -> Tensor:
        """Compute the log-density of events (n, *event), or their log-mass: (n,).

        Args:
            y: events.
        """
        flat = y.flatten(1)
        if self.atoms is None:
            return self.normal.log_prob(flat)
        is_atom = (flat.unsqueeze(1) == self.atoms).all(-1).any(-1)
        return y.new_full(is_atom.shape, -math.log(len(self.atoms))).where(is_atom, -math.inf)

    def functions(self, y: Tensor) -> Tensor:
        """Evaluate the test functions, 1 and random cosines: (n, 1 + TEST_FUNCTIONS).

        Args:
            y: events (n, *event).
        """
        standardized = (y.flatten(1) - self.mean) / self.std
        cosines = (standardized @ self.waves.T + self.phases).cos()
        return torch.cat([torch.ones_like(standardized[:, :1]), cosines], -1)
