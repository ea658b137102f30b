"""Low-rank curvature by Lanczos iterations, added to the precision of the prior."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.func import jvp, vjp

from bayou import rng
from bayou.curvature.covariance import Covariance
from bayou.curvature.structures import Curvature, Multipliers, cholesky, definite
from bayou.curvature.sweep import QUIET, Kept
from bayou.likelihoods import Information
from bayou.network import PlainAttention, out_of_memory
from bayou.params import Params


def gauss_newton(call: Callable[[Params], Tensor], at: Params, v: Params, h: Callable[[Tensor], Information]) -> Params:
    """Σ_n J_nᵀ·H_n·J_n·v for outputs ``call(at)`` and H = ``h(outputs)``, by forward mode, H and backward mode."""
    f, pull = linearized(call, at)
    _, u = tangent(call, at, v)
    (found,) = pull(h(f).product(u))
    return {name: value.detach() for name, value in found.items()}


def tangent(call: Callable[[Params], Tensor], at: Params, v: Params) -> tuple[Tensor, Tensor]:
    """f and J·v of a function of named tensors; if an operation has no forward mode, by two backward passes."""
    try:
        with QUIET, PlainAttention():
            found: tuple[Tensor, Tensor] = jvp(call, (at,), (v,))  # type: ignore[assignment]
        return found
    except RuntimeError as error:
        if out_of_memory(error):
            raise
    f, pull = linearized(call, at)
    _, push = linearized(lambda u: pull(u)[0], torch.zeros_like(f))  # u → Jᵀ·u is linear: its transpose is J
    return f.detach(), push(v)[0].detach()


def linearized(call: Callable[[Any], Any], at: Any) -> tuple[Any, Callable[[Any], tuple[Any]]]:
    """``torch.func.vjp`` without an auxiliary output: the value, and u → (Jᵀ·u,)."""
    try:
        with PlainAttention():
            found: tuple[Any, Any] = vjp(call, at)  # type: ignore[assignment]
        return found
    except RuntimeError as error:
        if out_of_memory(error) or isinstance(at, Tensor):
            raise
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    with torch.enable_grad(), PlainAttention(), Kept():  # torch.func does not support gradient checkpointing
        f = call(leaves)
    gradient = partial(torch.autograd.grad, f, list(leaves.values()), create_graph=True, materialize_grads=True)
    return f.detach(), lambda u: (dict(zip(leaves, gradient(u), strict=True)),)


def lanczos(
    product: Callable[[Tensor], Tensor],
    start: Callable[[int], Tensor],
    rank: int,
    steps: int,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor, bool]:
    """The largest ``rank`` eigenvalues of a symmetric matrix and their vectors, by its products alone: (K,), (K, D).

    Lanczos iterations with full orthogonalization (Paige 1972). ``start(i)`` is a random vector; if the iterations end
    in an invariant subspace, up to three other starts follow. Ctrl-C ends the iterations; the last value states this.
    """
    basis: list[Tensor] = []
    images: list[Tensor] = []
    v, tries, largest, interrupted = start(0), 0, 0.0, False
    while len(basis) < min(steps, len(v)):
        for _ in range(2):  # twice is enough (Parlett 1980)
            if basis:
                old = torch.stack(basis)
                v = v - old.mT @ (old @ v)
        norm = float(v.norm())
        if norm <= 1e-10 * largest or norm == 0.0:
            tries += 1
            if tries > 3:
                break
            v = start(tries) * max(largest, 1.0)
            continue
        try:
            images.append(product(v / norm))
        except KeyboardInterrupt:
            interrupted = True
            if not images:
                raise
            break
        basis.append(v / norm)
        v = images[-1]
        largest = max(largest, float(v.norm()))
        report(len(basis))
    q, image = torch.stack(basis), torch.stack(images)
    inner = q @ image.mT
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    kept = min(rank, len(values))
    return values[-kept:].flip(0).clamp_min(0.0), (vectors[:, -kept:].mT @ q).flip(0), interrupted


@final
class LowRankCurvature(Curvature):
    """Λ = scale·F·Fᵀ + multiplier·P, F (D, K); ``tensors["factor"]`` is P^{−½}·F as rows, (K, D).

    The directions are the leading eigenvectors of P^{−½}·C·P^{−½}. P is exact; only C is truncated.
    """

    kind = "low rank precision"

    def prepare(self) -> None:
        self.precision = self.flat_prior()

    def _scaled(self, multipliers: Multipliers, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The multiplier of every weight (D,), and the factor beside it (K, D)."""
        each = self.per_weight(multipliers)
        return each, scale.sqrt() * self.tensors["factor"] * each.rsqrt()

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Σ log P + log |1 + FᵀP⁻¹F|."""
        each, factor = self._scaled(multipliers, scale)
        inner = torch.eye(len(factor), dtype=factor.dtype, device=factor.device) + factor @ factor.mT
        return (each * self.precision).log().sum() + 2 * cholesky(inner).diagonal().log().sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> LowRankPrecision:
        each, factor = self._scaled(multipliers, scale)
        definite(each * self.precision)
        values, vectors = torch.linalg.eigh(factor @ factor.mT)
        keep = values > values.abs().max() * 1e-14
        values, vectors = values[keep], vectors[:, keep]
        basis = (vectors * values.rsqrt()).mT @ factor  # orthonormal rows
        scales = LowRankPrecision(self.shapes, {}).named((each * self.precision).rsqrt())
        found = {"basis": basis, "value": values} | {f"scale.{name}": value for name, value in scales.items()}
        return LowRankPrecision(self.shapes, {name: value.to(like.dtype) for name, value in found.items()})


@final
class LowRankPrecision(Covariance):
    """Σ = S·(1 + Uᵀ·e·U)⁻¹·S, a diagonal S (the std of the prior) and orthonormal rows U: the inverse of low rank.

    ``tensors``: "scale.NAME" (*shape), "basis" U (K, D), "value" e (K,). Σ^½ = S·(1 − Uᵀ·(1 − (1 + e)^{−½})·U).
    """

    kind = "low rank precision"

    def _scale(self) -> Tensor:
        return self.flat({name: self.tensors[f"scale.{name}"] for name in self.shapes})

    def _shrunk(self, z: Tensor) -> Tensor:
        """(1 + Uᵀ·e·U)^{−½}·z for z (..., D)."""
        basis, value = self.tensors["basis"], self.tensors["value"]
        return z - ((z @ basis.mT) * (1 - (1 + value).rsqrt())) @ basis

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        scale = self._scale()
        noise = rng.normal(n, scale.shape, scale, rng.fold(seed, "low rank"), start)
        # one product for each draw, so that its rounding does not depend on n
        return self.named(scale * (torch.stack([self._shrunk(z) for z in noise]) if n else noise))

    def mahalanobis(self, deviation: Params) -> Tensor:
        d = self.flat(deviation) / self._scale()
        return d.square().sum(-1) + ((d @ self.tensors["basis"].mT).square() * self.tensors["value"]).sum(-1)

    @property
    def log_det(self) -> Tensor:
        return 2 * self._scale().log().sum() - self.tensors["value"].log1p().sum()

    def spread(self, rows: Params) -> Tensor:
        return self._shrunk(self.flat(rows) * self._scale())

    def variance(self) -> Params:
        basis, value = self.tensors["basis"], self.tensors["value"]
        return self.named(self._scale().square() * (1 - (value / (1 + value)) @ basis.square()))
