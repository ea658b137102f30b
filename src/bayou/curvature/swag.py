"""Diagonal plus low rank: the covariance of SWAG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from bayou import rng
from bayou.curvature.covariance import Covariance
from bayou.params import Params


@final
class LowRankPlusDiagonal(Covariance):
    """Σ = diag(std²) + F·Fᵀ; ``tensors`` has "std.NAME" (*shape) and "factor.NAME" (K, *shape)."""

    kind = "low rank plus diagonal"

    def _parts(self) -> tuple[Tensor, Tensor]:
        """std (D,) and F (K, D), the tensors one after another."""
        std, factor = (
            {n: self.tensors[f"{part}.{n}"] for n in self.shapes} for part in ("std", "factor")
        )
        return self.flat(std), self.flat(factor)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        factors = {name: self.tensors[f"factor.{name}"] for name in self.shapes}
        first = next(iter(factors.values()))
        common = rng.normal(
            n, (len(first),), first, rng.fold(seed, "factor"), start
        )  # (n, K), shared by all tensors
        drawn = {}
        for name, shape in self.shapes.items():
            std = self.tensors[f"std.{name}"]
            own = std * rng.normal(n, shape, std, rng.fold(seed, name), start)
            # one sum over K for each draw, so that its rounding does not depend on n
            drawn[name] = (
                own + torch.stack([torch.tensordot(z, factors[name], 1) for z in common])
                if n
                else own
            )
        return drawn

    def _inner(self) -> tuple[Tensor, Tensor, Tensor]:
        std, factor = self._parts()
        scaled = factor / std
        eye = torch.eye(len(factor), dtype=std.dtype, device=std.device)
        return std, scaled, torch.linalg.cholesky(eye + scaled @ scaled.mT)

    def mahalanobis(self, deviation: Params) -> Tensor:
        """By Woodbury: |d/std|² − |L⁻¹·(F/std)·(d/std)|², L·Lᵀ = I + (F/std)·(F/std)ᵀ."""
        std, scaled, root = self._inner()
        d = self.flat(deviation) / std
        inner = torch.linalg.solve_triangular(
            root, (d @ scaled.mT).unsqueeze(-1), upper=False
        ).squeeze(-1)
        return d.square().sum(-1) - inner.square().sum(-1)

    @property
    def log_det(self) -> Tensor:
        std, _, root = self._inner()
        return 2 * (std.log().sum() + root.diagonal().log().sum())

    def spread(self, rows: Params) -> Tensor:
        """(J·diag(std), J·F): D + K columns."""
        std, factor = self._parts()
        flat = self.flat(rows)
        return torch.cat((flat * std, flat @ factor.mT), -1)

    def marginal(self, names: Sequence[str]) -> LowRankPlusDiagonal:
        kept = {
            f"{part}.{name}": self.tensors[f"{part}.{name}"]
            for part in ("std", "factor")
            for name in names
        }
        return LowRankPlusDiagonal({name: self.shapes[name] for name in names}, kept)

    def variance(self) -> Params:
        std, factor = self._parts()
        return self.named(std.square() + factor.square().sum(0))
