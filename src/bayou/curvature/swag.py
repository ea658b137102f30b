"""Diagonal plus low rank: the covariance of SWAG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature.covariance import Covariance


@final
class LowRankPlusDiagonal(Covariance):
    """A diagonal plus low-rank Σ = diag(std²) + F·Fᵀ.

    ``tensors`` has "std.NAME" (*shape) and "factor.NAME" (K, *shape).
    """

    kind = "low rank plus diagonal"

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

    def marginal(self, names: Sequence[str]) -> LowRankPlusDiagonal:
        """Return Σ of some of the tensors."""
        keys = [f"{factor}.{name}" for factor in ("std", "factor") for name in names]
        tensors = {key: self.tensors[key] for key in keys}
        return LowRankPlusDiagonal({name: self.shapes[name] for name in names}, tensors)

    def variance(self) -> Params:
        """Return the diagonal of Σ."""
        std, factor = self._factors()
        return self.from_vector(std.square() + factor.square().sum(0))
