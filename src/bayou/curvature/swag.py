"""Diagonal plus low rank: the covariance of SWAG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Full
from bayou.curvature.rank_updates import MAX_DENSE_WEIGHTS, subtract_low_rank


@final
class LowRankPlusDiagonal(Covariance):
    """A diagonal plus low-rank Σ = diag(std²) + F·Fᵀ.

    ``tensors`` has "std.NAME" (*shape) and "factor.NAME" (K, *shape); and "rank" where updates keep
    this structure, so that they are approximate.
    """

    kind = "low rank plus diagonal"

    @property
    def adds_exactly(self) -> bool:  # type: ignore[override]
        """Whether updates make a matrix of it: up to 1,000 weights, unless it has a "rank"."""
        return "rank" not in self.tensors and self.size <= MAX_DENSE_WEIGHTS

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return std (D,) and F (K, D), the tensors one after another."""
        std = {name: self.tensors[f"std.{name}"] for name in self.shapes}
        factor = {name: self.tensors[f"factor.{name}"] for name in self.shapes}
        return self.to_vector(std), self.to_vector(factor)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from N(0, Σ)."""
        factors = {name: self.tensors[f"factor.{name}"] for name in self.shapes}
        first = next(iter(factors.values()))
        # (n, K), shared by all tensors
        common = rng.normal(n, (len(first),), first, rng.fold(seed, "factor"), start)
        draws = {}
        for name, shape in self.shapes.items():
            std = self.tensors[f"std.{name}"]
            draws[name] = std * rng.normal(n, shape, std, rng.fold(seed, name), start)
            if n:
                # one sum over K for each draw, so that its rounding does not depend on n
                sums = [torch.tensordot(z, factors[name], 1) for z in common]
                draws[name] = draws[name] + torch.stack(sums)
        return draws

    def _inner(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return std, F/std and the Cholesky factor of I + (F/std)·(F/std)ᵀ."""
        std, factor = self._factors()
        scaled = factor / std
        eye = torch.eye(len(factor), dtype=std.dtype, device=std.device)
        return std, scaled, torch.linalg.cholesky(eye + scaled @ scaled.mT)

    def mahalanobis(self, deviation: Params) -> Tensor:
        """Return dᵀ Σ⁻¹ d by Woodbury: |d/std|² − |L⁻¹·(F/std)·(d/std)|² (``_inner``)."""
        std, scaled, root = self._inner()
        d = self.to_vector(deviation) / std
        projections = (d @ scaled.mT).unsqueeze(-1)
        inner = torch.linalg.solve_triangular(root, projections, upper=False).squeeze(-1)
        return d.square().sum(-1) - inner.square().sum(-1)

    @property
    def log_det(self) -> Tensor:
        """Return log |Σ|."""
        std, _, root = self._inner()
        return 2 * (std.log().sum() + root.diagonal().log().sum())

    def spread(self, rows: Params) -> Tensor:
        """Return (J·diag(std), J·F): D + K columns."""
        std, factor = self._factors()
        jacobian = self.to_vector(rows)
        return torch.cat((jacobian * std, jacobian @ factor.mT), -1)

    def _full(self) -> Full:
        """Return the same Σ as a matrix."""
        std, factor = self._factors()
        matrix = factor.mT @ factor
        matrix.diagonal().add_(std.square())
        root = torch.linalg.cholesky(matrix.flip(0, 1)).flip(0, 1)  # upper triangular
        return Full(self.shapes, {"root": root})

    def product(self, rows: Params) -> Params:
        """Return Σ·a of every row."""
        std, factor = self._factors()
        vectors = self.to_vector(rows)
        return self.from_vector(vectors * std.square() + vectors @ factor.mT @ factor)

    def with_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ + AᵀA)⁻¹ as a matrix, or the Σ of this rank with its variances.

        Args:
            rows: A, M rows, tensors (M, *shape).
            prior: not used.
        """
        if self.adds_exactly:
            return self._full().with_rows(rows, prior)
        std, factor = self._factors()
        vectors = self.to_vector(rows)
        products = self.to_vector(self.product(rows))
        middle = vectors @ products.mT
        middle.diagonal().add_(1.0)
        lower = torch.linalg.cholesky(middle)
        removed = torch.linalg.solve_triangular(lower, products / std, upper=False)
        variance, low_rank = subtract_low_rank((factor / std).mT, removed.mT, len(factor))
        return self._of_factors(std * variance.sqrt(), low_rank.mT * std)

    def without_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ − AᵀA)⁻¹ as a matrix."""
        if self.adds_exactly:
            return self._full().without_rows(rows, prior)
        return super().without_rows(rows, prior)

    def forget_rows(self, forget: float, prior: Params) -> LowRankPlusDiagonal:
        """Return (λ·Σ⁻¹ + (1 − λ)·P)⁻¹, of the same rank."""
        std, scaled, root = self._inner()
        # Σ⁻¹ = diag(std)⁻¹·(1 − UᵀU)·diag(std)⁻¹
        u = torch.linalg.solve_triangular(root, scaled, upper=False)
        diagonal = forget + (1 - forget) * std.square() * self._spread_prior(prior).to(std)
        middle = -forget * (u / diagonal) @ u.mT
        middle.diagonal().add_(1.0)
        lower = torch.linalg.cholesky(middle)
        factor = forget**0.5 * torch.linalg.solve_triangular(lower, u / diagonal, upper=False)
        return self._of_factors(std * diagonal.rsqrt(), factor * std)

    def _of_factors(self, std: Tensor, factor: Tensor) -> LowRankPlusDiagonal:
        """Return Σ = diag(std²) + F·Fᵀ over the same tensors, of std (D,) and F (K, D)."""
        tensors = {name: value for name, value in self.tensors.items() if name == "rank"}
        tensors |= {f"std.{name}": value for name, value in self.from_vector(std).items()}
        tensors |= {f"factor.{name}": value for name, value in self.from_vector(factor).items()}
        return LowRankPlusDiagonal(self.shapes, tensors)

    def marginal(self, names: Sequence[str]) -> LowRankPlusDiagonal:
        """Return Σ of some of the tensors."""
        keys = [f"{factor}.{name}" for factor in ("std", "factor") for name in names]
        tensors = {key: self.tensors[key] for key in keys}
        return LowRankPlusDiagonal({name: self.shapes[name] for name in names}, tensors)

    def variance(self) -> Params:
        """Return the diagonal of Σ."""
        std, factor = self._factors()
        return self.from_vector(std.square() + factor.square().sum(0))
