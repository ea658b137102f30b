"""Linear maps with tractable determinants: diagonal, triangular, reflections, permutations, 1×1
convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows.core.arguments import as_event, positive, promote
from bayou.flows.core.transform import Transform


class DiagonalAffine(Transform):
    """y = exp(log_scale) ⊙ x + shift, ladj = Σ log_scale. Shapes: x, y (..., *event), ladj
    (...).
    """

    def __init__(self, event: int | Sequence[int]) -> None:
        super().__init__()
        self.event_shape = shape = as_event(event, "DiagonalAffine")
        self.log_scale = nn.Parameter(torch.zeros(shape))
        self.shift = nn.Parameter(torch.zeros(shape))

    def _ladj(self, x: Tensor) -> Tensor:
        first = x.ndim - len(self.event_shape)
        shared = (
            x.shape[first:].numel() // self.log_scale.numel()
        )  # entries with the same scale: see ``ActNorm``
        return (shared * self.log_scale.sum()).expand(x.shape[:first])

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return x * self.log_scale.exp() + self.shift, self._ladj(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return (y - self.shift) * (-self.log_scale).exp(), -self._ladj(y)


class _TriangularFactors(nn.Module):
    """W = L·U with L unit lower triangular and U upper triangular, diagonal exp(log_diagonal);
    starts at I.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lower = nn.Parameter(torch.zeros(dim, dim))
        self.upper = nn.Parameter(torch.zeros(dim, dim))
        self.log_diagonal = nn.Parameter(torch.zeros(dim))

    def factors(self) -> tuple[Tensor, Tensor]:
        one = torch.eye(self.lower.shape[-1], dtype=self.lower.dtype, device=self.lower.device)
        return self.lower.tril(-1) + one, self.upper.triu(1) + torch.diag_embed(
            self.log_diagonal.exp()
        )

    def multiply(self, x: Tensor) -> Tensor:
        """W x for rows x (..., D)."""
        lower, upper = self.factors()
        return x @ (lower @ upper).mT

    def solve(self, y: Tensor) -> Tensor:
        """W⁻¹ y for rows y (..., D), by two triangular solves."""
        lower, upper = (promote(factor) for factor in self.factors())
        rows = promote(y).reshape(-1, y.shape[-1])
        rows = torch.linalg.solve_triangular(
            lower.mT, rows, upper=True, left=False, unitriangular=True
        )
        rows = torch.linalg.solve_triangular(upper.mT, rows, upper=False, left=False)
        return rows.reshape(y.shape).to(y.dtype)


class LULinear(Transform):
    """y = L·U·x + shift, ladj = Σ log diag U (Kingma & Dhariwal 2018, Glow). Shapes: x, y (..., D),
    ladj (...).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.event_shape = (positive(dim, "LULinear"),)
        self.weight = _TriangularFactors(dim)
        self.shift = nn.Parameter(torch.zeros(dim))

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.weight.multiply(x) + self.shift, self.weight.log_diagonal.sum(-1).expand(
            x.shape[:-1]
        )

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.weight.solve(y - self.shift), -self.weight.log_diagonal.sum(-1).expand(
            y.shape[:-1]
        )


class Conv1x1(Transform):
    """A 1×1 convolution of images (C, H, W) with W = L·U, ladj = H·W·Σ log diag U (Kingma &
    Dhariwal 2018, Glow).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.event_shape = (positive(channels, "Conv1x1"), None, None)
        self.weight = _TriangularFactors(channels)

    def _ladj(self, x: Tensor) -> Tensor:
        return (self.weight.log_diagonal.sum(-1) * (x.shape[-1] * x.shape[-2])).expand(x.shape[:-3])

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.weight.multiply(x.movedim(-3, -1)).movedim(-1, -3), self._ladj(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.weight.solve(y.movedim(-3, -1)).movedim(-1, -3), -self._ladj(y)


def orthonormal(a: Tensor) -> Tensor:
    """Q of a = Q·R (..., D, M), by two Cholesky QR steps (Yamamoto et al. 2015).

    For large batches of small matrices this is faster than ``torch.linalg.qr``.
    """
    q = promote(a)
    for _ in range(2):  # the second pass removes the error due to the condition number
        lower = torch.linalg.cholesky_ex(q.mT @ q).L
        q = torch.linalg.solve_triangular(lower, q.mT, upper=False).mT
    return q.to(a.dtype)


def reflections(vectors: Tensor) -> Tensor:
    """H_1 ⋯ H_K, H = I − 2·v·vᵀ/‖v‖², of the columns v (..., D, K): I − V·T·Vᵀ, T⁻¹ + T⁻ᵀ = VᵀV
    (Joffrain 2006).
    """
    v = promote(vectors)
    gram = v.mT @ v
    half = gram.triu(1) + torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1) / 2)
    one = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
    return (one - v @ torch.linalg.solve_triangular(half, v.mT, upper=True)).to(vectors.dtype)


class Householder(Transform):
    """y = H_1 ⋯ H_K·x with learned reflections H, ladj = 0 (Tomczak & Welling 2016).

    Args:
        dim: D.
        reflections: K, by default D, with which every orthogonal matrix is a product.
        seed: of the initial reflections.
    """

    def __init__(self, dim: int, reflections: int | None = None, seed: rng.Seed = None) -> None:
        super().__init__()
        self.event_shape = (positive(dim, "Householder"),)
        count = positive(dim if reflections is None else reflections, "the number of reflections")
        self.vectors = nn.Parameter(rng.normal(count, (dim,), torch.zeros(()), seed))

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return x @ reflections(self.vectors.mT).mT, x.new_zeros(()).expand(x.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return y @ reflections(self.vectors.mT), y.new_zeros(()).expand(y.shape[:-1])


class Permutation(Transform):
    """y_i = x_{order_i}, ladj = 0.

    Args:
        order: each of 0 .. D − 1 once.
    """

    order: Tensor
    back: Tensor

    def __init__(self, order: Sequence[int] | Tensor) -> None:
        super().__init__()
        index = torch.as_tensor(order, dtype=torch.long)
        if (
            index.ndim != 1
            or not torch.equal(index.sort().values, torch.arange(len(index)))
            or len(index) == 0
        ):
            raise ValueError(f"Permutation needs each of 0..D-1 once, got {index.tolist()}")
        self.event_shape = (len(index),)
        self.register_buffer("order", index)
        self.register_buffer("back", index.argsort())

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return x[..., self.order], x.new_zeros(()).expand(x.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return y[..., self.back], y.new_zeros(()).expand(y.shape[:-1])


def reverse(dim: int) -> Permutation:
    """The permutation that reverses the coordinates."""
    return Permutation(list(range(positive(dim, "reverse")))[::-1])


def shuffle(dim: int, seed: rng.Seed = None) -> Permutation:
    """A fixed random permutation."""
    return Permutation(rng.permutation(positive(dim, "shuffle"), seed))
