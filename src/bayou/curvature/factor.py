"""A full curvature of few rows, C = Fᵀ·F, by its factor F instead of D × D matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Full
from bayou.curvature.layers import LayerCall
from bayou.curvature.rank_updates import reduce_rank
from bayou.curvature.structures import (
    Curvature,
    Multipliers,
    RowGradients,
    check_definite,
    cholesky,
    common_multiplier,
    per_weight,
)
from bayou.curvature.sweep import Plan, Shapes, Sum

MIN_FACTORED_WEIGHTS: Final = 500  # weights, with fewer of which a matrix costs nothing
# Rows of F for each weight, up to which F takes less memory and time than Fᵀ·F.
MAX_ROWS_PER_WEIGHT: Final = 0.4
BLOCK: Final = 128  # rows of F that are decomposed at a time
ROOT_NUMBERS: Final = 2**24  # of rows of the root that are held at a time


@final
class RowsSum(Sum):
    """The rows of F with C = Fᵀ·F, one for each example and column of H, or C where they are many.

    C of N examples and K columns has a rank of at most N·K. As long as that is at most 0.4 of
    the number of weights, F (N·K, D) is kept; once there are more rows they are summed, as C is.

    Args:
        shapes: of the named tensors.
        plan: how their gradients are computed.
        like: a tensor of the network.
    """

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        self.gradients: RowGradients = RowGradients(shapes, like)
        self.size: int = sum(shape.numel() for shape in shapes.values())
        self.rows: list[Tensor] = []
        self.count: int = 0
        self.total: Tensor | None = None
        if self.size < MIN_FACTORED_WEIGHTS:
            self.total = self.zeros(self.size, self.size)

    def receive_gradient(self, layer: LayerCall, a: Tensor, g: Tensor) -> None:
        """Compute the gradients of every example."""
        self.gradients.add(layer.gradients(a, g))

    def receive_row_gradients(self, gradients: Params) -> None:
        """Keep the gradients of every example."""
        self.gradients.add(gradients)

    def finish_column(self) -> None:
        """Keep the rows of a column, or add their products."""
        rows = self.gradients.take()
        self.count += len(rows)
        if self.total is None and self.count <= MAX_ROWS_PER_WEIGHT * self.size:
            self.rows.append(rows)
            return
        if self.total is None:
            kept = torch.cat([*self.rows, rows[:0]])
            self.rows = []
            self.total = kept.mT @ kept
        self.total += rows.mT @ rows

    def tensors(self, factor: float = 1.0) -> Params:
        """Return F as "factor", or C as "matrix"."""
        if self.total is not None:
            return {"matrix": factor * self.total}
        empty = self.zeros(0, self.size)
        return {"factor": factor**0.5 * torch.cat([empty, *self.rows])}


def to_matrix(tensors: Params) -> Params:
    """Return the tensors of a full curvature with C as a matrix.

    Args:
        tensors: with "factor" or "matrix".
    """
    if "factor" not in tensors:
        return tensors
    return {"matrix": tensors["factor"].mT @ tensors["factor"]}


@final
class LowRankCurvature(Curvature):
    """The precision Λ = scale·Fᵀ·F + diag(P) of a factor F (M, D) of few rows.

    With F̃ = F·P^−½ and the eigenvalues λ of the Gram matrix F̃·F̃ᵀ (M, M), by Sylvester's identity

        log |Λ| = log |P| + log |1 + scale·F̃·F̃ᵀ| = log |P| + Σ log(1 + scale·λ).

    One multiplier of all tensors divides λ, so that these are computed once.
    """

    kind = "full"

    def prepare(self) -> None:
        """Compute the prior precision of every weight."""
        self.precision: Tensor = per_weight(self.prior, self.shapes)
        self.eigenvalues: Tensor | None = None  # of F̃·F̃ᵀ for multipliers of 1

    def _whiten(self, precision: Tensor) -> Tensor:
        """Return F̃ = F·P^−½."""
        return self.tensors["factor"] * precision.rsqrt()

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return log |Λ|; for one multiplier of all tensors by eigenvalues that are kept."""
        common = common_multiplier(multipliers)
        precision = per_weight(multipliers, self.shapes) * self.precision
        log_prior = precision.log().sum()
        if common is not None:
            if self.eigenvalues is None:
                whitened = self._whiten(self.precision)
                self.eigenvalues = torch.linalg.eigvalsh(whitened @ whitened.mT).clamp_min(0.0)
            return log_prior + (1 + scale / common * self.eigenvalues).log().sum()
        whitened = self._whiten(precision)
        eye = torch.eye(len(whitened), dtype=whitened.dtype, device=whitened.device)
        lower = cholesky(eye + scale * (whitened @ whitened.mT))
        return log_prior + 2 * lower.diagonal().log().sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> LowRankPrecision:
        """Return Λ⁻¹."""
        precision = per_weight(multipliers, self.shapes) * self.precision
        check_definite(precision)
        factor = (scale.sqrt() * self._whiten(precision)).mT.contiguous()
        gain, diagonal = decompose(factor)
        tensors = {
            "std": precision.rsqrt(),
            "factor": factor,
            "gain": gain,
            "diagonal": diagonal,
        }
        cast = {name: value.to(like.dtype) for name, value in tensors.items()}
        return LowRankPrecision(self.shapes, cast)


def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor L of 1 + F·Fᵀ, block by block, in 4·M²·D operations.

    Below the blocks of its diagonal L is F·Gᵀ. With T = 1 at first, for the rows f of F of each
    block: L_jj·L_jjᵀ = 1 + f·T·fᵀ, g = L_jj⁻¹·f·T, and T ← T − gᵀ·g, as in a Kalman filter.

    Args:
        factor: F, (D, M) in float64.

    Returns:
        G (D, M), and L_jj^−ᵀ of all blocks one below the other, (D, ``BLOCK``).
    """
    size, rank = factor.shape
    remaining = torch.eye(rank, dtype=factor.dtype, device=factor.device)
    gain = torch.empty_like(factor)
    diagonal = factor.new_zeros(size, BLOCK)
    for block in _blocks(size):
        f = factor[block]
        h = f @ remaining
        eye = torch.eye(len(f), dtype=f.dtype, device=f.device)
        inverse = torch.linalg.solve_triangular(cholesky(eye + h @ f.mT), eye, upper=False)
        g = inverse @ h
        remaining.addmm_(g.mT, g, alpha=-1)
        gain[block] = g
        diagonal[block, : len(f)] = inverse.mT
    return gain, diagonal


def _blocks(size: int) -> list[slice]:
    """Return the blocks of rows of a factor."""
    return [slice(first, min(size, first + BLOCK)) for first in range(0, size, BLOCK)]


@final
class LowRankPrecision(Covariance):
    """Σ = S·(1 + F·Fᵀ)⁻¹·S for S = diag(std), a full Σ whose precision is diagonal plus low rank.

    Its root R is that of ``Full``, upper triangular, and has the same draws: R = S·L^−ᵀ, where
    L·Lᵀ = 1 + F·Fᵀ (``decompose``). Products with R take M·D operations in place of D².

    ``tensors``: "std" (D,), "factor" F (D, M), "gain" G (D, M), and "diagonal" (D, ``BLOCK``); and
    "rank" where updates keep at most so many columns of F.
    """

    kind = "low rank precision"

    @staticmethod
    def of_factor(
        shapes: Shapes, std: Tensor, factor: Tensor, rank: Tensor | None = None
    ) -> LowRankPrecision:
        """Return Σ = S·(1 + F·Fᵀ)⁻¹·S with what products with its root need.

        Args:
            shapes: of the named tensors.
            std: the diagonal of S, (D,).
            factor: F, (D, M).
            rank: how many columns of F updates keep, ()  ; None (default) for all.
        """
        gain, diagonal = decompose(factor.double().contiguous())
        tensors = {"std": std, "factor": factor, "gain": gain, "diagonal": diagonal}
        if rank is not None:
            tensors["rank"] = rank
        cast = {name: value.to(std.dtype) for name, value in tensors.items()}
        return LowRankPrecision(shapes, cast)

    @property
    def adds_exactly(self) -> bool:  # type: ignore[override]
        """Whether all columns of F are kept."""
        return "rank" not in self.tensors

    def product(self, rows: Params) -> Params:
        """Return Σ·a of every row: S·(1 − F·(1 + FᵀF)⁻¹·Fᵀ)·S·a."""
        std = self.tensors["std"]
        factor = self.tensors["factor"]
        middle = factor.mT @ factor
        middle.diagonal().add_(1.0)
        scaled = self.to_vector(rows) * std
        inner = torch.linalg.solve(middle, (scaled @ factor).unsqueeze(-1)).squeeze(-1)
        return self.from_vector((scaled - inner @ factor.mT) * std)

    def with_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ + AᵀA)⁻¹: new columns of F, of which at most ``rank`` are kept (LoFi).

        Without ``rank`` it is exact, and a matrix once F has too many columns.
        """
        std = self.tensors["std"]
        columns = (self.to_vector(rows) * std).mT
        factor = torch.cat((self.tensors["factor"], columns), 1)
        if "rank" in self.tensors:
            factor, left_out = reduce_rank(factor, int(self.tensors["rank"]))
            shrink = (1 + left_out).rsqrt()
            return LowRankPrecision.of_factor(
                self.shapes, std * shrink, shrink.unsqueeze(1) * factor, self.tensors["rank"]
            )
        if factor.shape[1] > MAX_ROWS_PER_WEIGHT * len(std):
            return self.as_matrix().with_rows(rows, prior)
        return LowRankPrecision.of_factor(self.shapes, std, factor)

    def without_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ − AᵀA)⁻¹, as a matrix."""
        if "rank" in self.tensors:
            return super().without_rows(rows, prior)
        return self.as_matrix().without_rows(rows, prior)

    def forget_rows(self, forget: float, prior: Params) -> LowRankPrecision:
        """Return (λ·Σ⁻¹ + (1 − λ)·P)⁻¹."""
        old_std = self.tensors["std"]
        precision = self._spread_prior(prior).to(old_std)
        std = (forget * old_std**-2 + (1 - forget) * precision).rsqrt()
        factor = forget**0.5 * (std / old_std).unsqueeze(1) * self.tensors["factor"]
        return LowRankPrecision.of_factor(self.shapes, std, factor, self.tensors.get("rank"))

    def _parts(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield each block with its rows of F and of G, and its L_jj^−ᵀ."""
        factor = self.tensors["factor"]
        gain = self.tensors["gain"]
        for block in _blocks(len(factor)):
            inverse = self.tensors["diagonal"][block, : block.stop - block.start]
            yield block, factor[block], gain[block], inverse

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from N(0, Σ)."""
        std = self.tensors["std"]
        noise = rng.normal(n, (len(std),), std, rng.fold(seed, "full"), start)
        # products for each draw by itself, so that its rounding does not depend on n
        return self.from_vector(torch.stack([self._draw(z) for z in noise]) if n else noise)

    def _draw(self, noise: Tensor) -> Tensor:
        """Return R·z, by back substitution in Lᵀ·w = z, (D,)."""
        draw = torch.empty_like(noise)
        product = noise.new_zeros(self.tensors["factor"].shape[1])  # Fᵀ·w of the later blocks
        for block, f, g, inverse in reversed(list(self._parts())):
            draw[block] = inverse @ (noise[block] - g @ product)
            product = product + draw[block] @ f
        return self.tensors["std"] * draw

    def mahalanobis(self, deviation: Params) -> Tensor:
        """Return dᵀ Σ⁻¹ d = |d/std|² + |Fᵀ·(d/std)|²."""
        d = self.to_vector(deviation) / self.tensors["std"]
        return d.square().sum(-1) + (d @ self.tensors["factor"]).square().sum(-1)

    @property
    def log_det(self) -> Tensor:
        """Return log |Σ|."""
        log_root = self.tensors["std"].log().sum()
        for _, _, _, inverse in self._parts():
            log_root = log_root + inverse.diagonal().log().sum()
        return 2 * log_root

    def spread(self, rows: Params) -> Tensor:
        """Return R with R·Rᵀ = J·Σ·Jᵀ: J·S·L^−ᵀ."""
        scaled = self.to_vector(rows) * self.tensors["std"]
        columns = []
        product = scaled.new_zeros(*scaled.shape[:-1], self.tensors["factor"].shape[1])
        for block, f, g, inverse in self._parts():
            columns.append((scaled[..., block] - product @ f.mT) @ inverse)
            product = product + columns[-1] @ g
        return torch.cat(columns, -1)

    def _root_rows(self, index: Tensor) -> Iterator[Tensor]:
        """Yield rows of R, a few at a time."""
        std = self.tensors["std"]
        for few in index.split(max(1, ROOT_NUMBERS // len(std))):
            unit = std.new_zeros(len(few), len(std))
            unit[torch.arange(len(few), device=few.device), few] = 1.0
            yield self.spread(self.from_vector(unit))

    def variance(self) -> Params:
        """Return the diagonal of Σ."""
        index = torch.arange(self.size, device=self.tensors["std"].device)
        return self.from_vector(torch.cat([r.square().sum(1) for r in self._root_rows(index)]))

    def as_matrix(self) -> Full:
        """Return the same Σ as a matrix, from which Laplace of the next task continues."""
        index = torch.arange(self.size, device=self.tensors["std"].device)
        return Full(self.shapes, {"root": torch.cat(list(self._root_rows(index)))})

    def marginal(self, names: Sequence[str]) -> Full:
        """Return Σ of some of the tensors, as a matrix."""
        return self.as_matrix().marginal(names)

    def with_independent(self, other: Covariance) -> Full:
        """Return Σ of these tensors and of others that are independent of them."""
        return self.as_matrix().with_independent(other)
