"""Checks of the ladj: exact ones are compared with the Jacobian, estimates and bounds with
draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou import rng
from bayou.flows.checking.case import Case, distance
from bayou.flows.checking.report import Result
from bayou.flows.core.bases import Base, DiagonalNormal, StandardNormal
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj

ESTIMATES, GROUPS = 4096, 64  # draws of an estimate, and groups of them, each with a gradient
TEST_DRAWS, PILOT_DRAWS, ATOMS = (
    2**14,
    2**10,
    64,
)  # draws of y, draws for the proposal, values of a discrete proposal
MAX_RELATIVE_ERROR = 0.1  # the standard error above which the test has no power


def ladj(case: Case) -> Iterator[Result]:
    """The ladj, or the mean of an estimate, is log|det| of the autograd Jacobian; for a bound,
    E[exp log p] = p(y).
    """
    kind = case.transform.ladj_kind
    if kind is Ladj.estimate and not case.bijective:
        yield Result.skipped("ladj", "an estimate, and not a bijection; check the links")
    elif not case.bijective or kind is Ladj.bound:
        yield from _bound(case)
    else:
        yield from _estimate(case) if kind is Ladj.estimate else _exact(case)


def _log_det(y: Tensor, x: Tensor, keep: bool = False) -> Tensor:
    """log|det ∂y/∂x| of every row: (n,). Rows are independent, so one backward pass computes a
    column for all.
    """
    columns = y.reshape(len(x), -1).sum(0)
    rows = [
        torch.autograd.grad(c, x, retain_graph=True, create_graph=keep)[0].reshape(len(x), -1)
        for c in columns
    ]
    return torch.linalg.slogdet(torch.stack(rows, 1))[1]


def _exact(case: Case) -> Iterator[Result]:
    limit = case.with_solver_error(case.tolerances["ladj"])
    for name, f, x, context, noise in case.pairs():
        y, got = f(x.requires_grad_(), context, noise=noise)
        yield Result.of(f"ladj {name}", distance(got.detach(), _log_det(y, x)), limit)
    yield from _opposite(case)


def _estimate(case: Case) -> Iterator[Result]:
    """E[ladj] = log|det|, and E[∇ Σ_i w_i·ladj_i] = ∇ Σ_i w_i·log|det|_i for random weights w of
    the rows.
    """
    limit, each = case.tolerances["standard errors"], ESTIMATES // GROUPS
    weight = rng.normal(1, (case.rows,), case.like, rng.fold(case.seed, "weights"))[0]
    for name, f, x, context, noise in case.pairs():
        x.requires_grad_()
        leaves = [x, *(p for p in f.parameters() if p.requires_grad)]
        expected = _log_det(f(x, context, noise=noise)[0], x, keep=True)
        slope = gradient(weight @ expected, leaves, keep=True)
        terms, slopes = [], []
        for group in range(GROUPS):
            copies = x.expand(each, *x.shape)
            term = f(copies, context, seed=case.seed, start=group * each * case.rows)[
                1
            ]  # (each, rows)
            terms.append(term.detach())
            slopes.append(gradient(weight @ term.mean(0), leaves, keep=True))
        yield from _near(
            f"ladj {name}", torch.cat(terms), expected.detach(), limit, case.tolerances["estimate"]
        )
        allowed = case.tolerances["estimate gradient"] * max(1.0, slope.norm().item())
        yield from _near(f"ladj {name} gradient", torch.stack(slopes), slope, limit, allowed)


def gradient(loss: Tensor, leaves: list[Tensor], keep: bool = False) -> Tensor:
    """The gradient in all leaves as one vector, 0 where there is none; ``keep`` the graph, if not
    compiled.
    """
    loss = loss + 0 * leaves[0].sum()  # a constant loss has gradient 0
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=keep)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten()
            for g, p in zip(found, leaves, strict=True)
        ]
    )


def _near(
    name: str, draws: Tensor, expected: Tensor, limit: float, ceiling: float
) -> Iterator[Result]:
    """The mean of draws (n, D) equals ``expected`` (D,) within standard errors, which are small
    enough.
    """
    error = draws.std(0) / math.sqrt(len(draws))
    yield Result.of(
        name, _errors(draws.mean(0) - expected, error), limit, "standard errors of the mean"
    )
    yield Result.of(f"{name} error", error.max().item(), ceiling, "largest standard error")


def _errors(gap: Tensor, error: Tensor) -> float:
    """The largest gap in standard errors; rounding alone does not make it large."""
    worst = (gap.abs() / (error + 1e-10)).max().item()
    return math.inf if math.isnan(worst) else worst


@torch.no_grad()
def _bound(case: Case) -> Iterator[Result]:
    """E[exp(log p(x) + V)] = p(y), by draws of y from the map and from a proposal g, for test
    functions ψ.

    Inverse: E_g[ψ(y)·exp(log p(x) + V)] = E_p[ψ(y)·g(y)]. Forward: with A = log p(x) + V − log
    g(y), taken from forward at draws of p and from inverse at draws of g, E_p[ψ·sigmoid(−A)] =
    E_g[ψ·sigmoid(A)] (Bennett 1976).
    """
    f = case.transform
    yield from _opposite(case)
    if case.base is None:
        yield Result.skipped("ladj inverse", f"no base distribution on {f.domain}; pass base=")
        return
    flow, limit = Flow(_perturbed(case.base, case.seed), f), case.tolerances["standard errors"]
    one = None if f.context_dim == 0 else case.context(1)[0]  # type: ignore[index]
    near = Proposal.at(flow.sample(PILOT_DRAWS, one, seed=rng.fold(case.seed, "pilot")))
    y, there = flow.sample_and_log_prob(TEST_DRAWS, one, seed=rng.fold(case.seed, "draws"))
    z = near.draw(TEST_DRAWS, rng.fold(case.seed, "proposal"))
    inside = f.in_image(z)
    safe = torch.where(inside.reshape(-1, *[1] * (z.ndim - 1)), z, y)
    back = flow.log_prob(safe, one, seed=rng.fold(case.seed, "back")).where(inside, -torch.inf)
    test_y, test_z = (
        near.functions(part, rng.fold(case.seed, "functions")) for part in (y, z)
    )  # (TEST_DRAWS, ψ)
    for name, left, right in (
        ("inverse", near.log_prob(y).exp(), back.exp()),
        (
            "forward",
            torch.sigmoid(near.log_prob(y) - there),
            torch.sigmoid(back - near.log_prob(z)),
        ),
    ):
        left, right = left.unsqueeze(-1) * test_y, right.unsqueeze(-1) * test_z
        error = ((left.var(0) + right.var(0)) / TEST_DRAWS).sqrt()
        relative = (error[0] / left[:, 0].mean()).item()
        note = f"standard errors, of {100 * relative:.1g} %"
        if relative > MAX_RELATIVE_ERROR:
            yield Result.skipped(
                f"ladj {name}", f"too few draws for {case.size} dimensions: {note}"
            )
        else:
            yield Result.of(
                f"ladj {name}", _errors(left.mean(0) - right.mean(0), error), limit, note
            )


def _perturbed(base: Base, seed: int) -> Base:
    """A standard normal with random mean and std: where q(z|y) is the conditional of the base,
    errors of q cancel.
    """
    if type(base) is not StandardNormal:
        return base
    moved = DiagonalNormal(base.event_shape).to(base.anchor)
    for name, p in moved.named_parameters():
        p.copy_(0.3 * rng.normal(1, p.shape, p, rng.fold(seed, name))[0])
    return moved


@torch.no_grad()
def _opposite(case: Case) -> Iterator[Result]:
    """The two terms of a round trip are opposite."""
    trip = case.round_trip("forward", "inverse") or case.round_trip("inverse", "forward")
    # The term of a bijection may be random although its values are not.
    if trip is None or (case.bijective and case.transform.ladj_kind is Ladj.bound):
        yield Result.skipped(
            "ladj opposite", "both directions are random; the rows forward and inverse compare them"
        )
    else:
        limit = case.with_solver_error(case.tolerances["ladj"])
        yield Result.of("ladj opposite", distance(trip[1][1], trip[0][1]), limit)


@dataclass(frozen=True)
class Proposal:
    """A distribution close to that of y: a Gaussian, or uniform on the most frequent values if y is
    discrete.
    """

    mean: Tensor  # (D,)
    scale: Tensor  # (D, D), a Cholesky factor
    atoms: Tensor | None
    event: tuple[int, ...]

    @classmethod
    def at(cls, y: Tensor) -> Proposal:
        flat = y.flatten(1)
        values, counts = flat.unique(dim=0, return_counts=True)
        atoms = (
            values[counts.argsort(descending=True)[:ATOMS]]
            if len(values) < len(flat) // 2
            else None
        )
        spread = flat.T.cov().reshape(flat.shape[1], -1)
        return cls(
            flat.mean(0),
            torch.linalg.cholesky(spread) if atoms is None else spread,
            atoms,
            y.shape[1:],
        )

    def draw(self, n: int, seed: rng.Seed) -> Tensor:
        if self.atoms is None:
            flat = self.mean + rng.normal(n, self.mean.shape, self.mean, seed) @ self.scale.T
        else:
            flat = self.atoms[(rng.uniform(n, (), self.mean, seed) * len(self.atoms)).long()]
        return flat.reshape(n, *self.event)

    def log_prob(self, y: Tensor) -> Tensor:
        if self.atoms is None:
            return torch.distributions.MultivariateNormal(
                self.mean, scale_tril=self.scale
            ).log_prob(y.flatten(1))
        found = (y.flatten(1).unsqueeze(1) == self.atoms).all(-1).any(-1)
        return y.new_full(found.shape, -math.log(len(self.atoms))).where(found, -math.inf)

    def functions(self, y: Tensor, seed: rng.Seed, count: int = 7) -> Tensor:
        """Bounded test functions of y, 1 and random cosines: (n, 1 + count)."""
        away = (y.flatten(1) - self.mean) / self.scale.diagonal().abs().clamp_min(1e-6)
        waves = rng.normal(count, self.mean.shape, self.mean, rng.fold(seed, "wave"))
        phases = 2 * math.pi * rng.uniform(count, (), self.mean, rng.fold(seed, "phase"))
        return torch.cat([torch.ones_like(away[:, :1]), (away @ waves.T + phases).cos()], -1)
