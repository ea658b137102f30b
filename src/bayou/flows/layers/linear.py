"""Linear maps with tractable determinants.

Diagonal and triangular matrices, products of reflections, permutations, and 1×1 convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows.core.arguments import as_event, check_size, promote
from bayou.flows.core.transform import Event, Pair, Transform, batch_shape


class DiagonalAffine(Transform):
    """A learned scale and shift of every coordinate.

    y = exp(log_scale) ⊙ x + shift, ladj = Σ log_scale; the identity at first.

    Args:
        event: the size of a vector, or the shape of an event.

    Shapes: x, y (..., *event), ladj (...).
    """

    def __init__(self, event: int | Sequence[int]) -> None:
        super().__init__()
        shape = as_event(event, "DiagonalAffine")
        self.event_shape: Event = shape
        self.log_scale: nn.Parameter = nn.Parameter(torch.zeros(shape))
        self.shift: nn.Parameter = nn.Parameter(torch.zeros(shape))

    def _ladj(self, x: Tensor) -> Tensor:
        batch = batch_shape(x, self.event_shape)
        # entries with the same scale: see ``ActNorm``
        repeats = x.shape[len(batch) :].numel() // self.log_scale.numel()
        return (repeats * self.log_scale.sum()).expand(batch)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return x * self.log_scale.exp() + self.shift, self._ladj(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        return (y - self.shift) * (-self.log_scale).exp(), -self._ladj(y)


class _TriangularFactors(nn.Module):
    """A matrix W = L·U, the identity at first.

    L is unit lower triangular, U is upper triangular with the diagonal exp(log_diagonal).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lower = nn.Parameter(torch.zeros(dim, dim))
        self.upper = nn.Parameter(torch.zeros(dim, dim))
        self.log_diagonal = nn.Parameter(torch.zeros(dim))

    def factors(self) -> Pair:
        """Return L and U."""
        identity = torch.eye(
            self.lower.shape[-1],
            dtype=self.lower.dtype,
            device=self.lower.device,
        )
        lower = self.lower.tril(-1) + identity
        upper = self.upper.triu(1) + torch.diag_embed(self.log_diagonal.exp())
        return lower, upper

    def log_determinant(self) -> Tensor:
        """Return log det W = Σ log diag U."""
        return self.log_diagonal.sum(-1)

    def multiply(self, x: Tensor) -> Tensor:
        """Return W·x for rows x (..., D)."""
        lower, upper = self.factors()
        return x @ (lower @ upper).mT

    def solve(self, y: Tensor) -> Tensor:
        """Return W⁻¹·y for rows y (..., D), by two triangular solves."""
        lower, upper = (promote(factor) for factor in self.factors())
        rows = promote(y).reshape(-1, y.shape[-1])
        rows = torch.linalg.solve_triangular(
            lower.mT, rows, upper=True, left=False, unitriangular=True
        )
        rows = torch.linalg.solve_triangular(upper.mT, rows, upper=False, left=False)
        return rows.reshape(y.shape).to(y.dtype)


class LULinear(Transform):
    """A learned linear map in its triangular factors.

    y = L·U·x + shift, ladj = Σ log diag U; the identity at first (Kingma & Dhariwal 2018, Glow).
    The inverse is two triangular solves.

    Args:
        dim: the number of coordinates D.

    Shapes: x, y (..., D), ladj (...).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.event_shape: Event = (check_size(dim, "LULinear"),)
        self.weight: _TriangularFactors = _TriangularFactors(dim)
        self.shift: nn.Parameter = nn.Parameter(torch.zeros(dim))

    def _ladj(self, x: Tensor) -> Tensor:
        return self.weight.log_determinant().expand(x.shape[:-1])

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return self.weight.multiply(x) + self.shift, self._ladj(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        return self.weight.solve(y - self.shift), -self._ladj(y)


class Conv1x1(Transform):
    """A learned linear map of the channels of every pixel.

    A 1×1 convolution with W = L·U, ladj = H·W·Σ log diag U; the identity at first (Kingma &
    Dhariwal 2018, Glow).

    Args:
        channels: the number of channels C.

    Shapes: x, y (..., C, H, W) of any height and width, ladj (...).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.event_shape: Event = (check_size(channels, "Conv1x1"), None, None)
        self.weight: _TriangularFactors = _TriangularFactors(channels)

    def _ladj(self, x: Tensor) -> Tensor:
        pixels = x.shape[-1] * x.shape[-2]
        return (self.weight.log_determinant() * pixels).expand(x.shape[:-3])

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return self.weight.multiply(x.movedim(-3, -1)).movedim(-1, -3), self._ladj(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        return self.weight.solve(y.movedim(-3, -1)).movedim(-1, -3), -self._ladj(y)


def orthonormalize(a: Tensor) -> Tensor:
    """Return Q of a = Q·R, by two Cholesky QR steps (Yamamoto et al. 2015).

    For large batches of small matrices this is faster than ``torch.linalg.qr``.

    Args:
        a: matrices (..., D, M) of rank M.

    Returns:
        Q (..., D, M) with QᵀQ = I.
    """
    q = promote(a)
    for _ in range(2):  # the second pass removes the error due to the condition number
        lower = torch.linalg.cholesky_ex(q.mT @ q).L
        q = torch.linalg.solve_triangular(lower, q.mT, upper=False).mT
    return q.to(a.dtype)


def multiply_reflections(vectors: Tensor) -> Tensor:
    """Return the product H_1 ⋯ H_K of the reflections H = I − 2·v·vᵀ/‖v‖².

    It is computed as I − V·T·Vᵀ with T⁻¹ + T⁻ᵀ = VᵀV (Joffrain et al. 2006).

    Args:
        vectors: V, with the vectors v as columns (..., D, K).

    Returns:
        Orthogonal matrices (..., D, D).
    """
    v = promote(vectors)
    gram = v.mT @ v
    half = gram.triu(1) + torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1) / 2)
    identity = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
    product = identity - v @ torch.linalg.solve_triangular(half, v.mT, upper=True)
    return product.to(vectors.dtype)


class Householder(Transform):
    """A learned orthogonal map, y = H_1 ⋯ H_K·x with reflections H, ladj = 0.

    Tomczak & Welling 2016.

    Args:
        dim: the number of coordinates D.
        reflections: the number of reflections K; by default D, with which every orthogonal matrix
            is a product.
        seed: the seed of the initial reflections; by default torch's generator.

    Shapes: x, y (..., D), ladj (...).
    """

    def __init__(self, dim: int, reflections: int | None = None, seed: rng.Seed = None) -> None:
        super().__init__()
        self.event_shape: Event = (check_size(dim, "Householder"),)
        count = check_size(dim if reflections is None else reflections, "the number of reflections")
        self.vectors: nn.Parameter = nn.Parameter(rng.normal(count, (dim,), torch.zeros(()), seed))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = x @ multiply_reflections(self.vectors.mT).mT
        return y, x.new_zeros(x.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        x = y @ multiply_reflections(self.vectors.mT)
        return x, y.new_zeros(y.shape[:-1])


class Permutation(Transform):
    """A fixed permutation, y_i = x_{order_i}, ladj = 0.

    Args:
        order: each of 0 .. D − 1 once.

    Shapes: x, y (..., D), ladj (...).
    """

    order: Tensor
    back: Tensor

    def __init__(self, order: Sequence[int] | Tensor) -> None:
        super().__init__()
        index = torch.as_tensor(order, dtype=torch.long)
        if index.numel() == 0 or not is_permutation(index, index.numel()):
            raise ValueError(f"Permutation needs each of 0..D-1 once, got {index.tolist()}")
        self.event_shape: Event = (len(index),)
        self.register_buffer("order", index)
        self.register_buffer("back", index.argsort())

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return x[..., self.order], x.new_zeros(x.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        return y[..., self.back], y.new_zeros(y.shape[:-1])


def is_permutation(index: Tensor, size: int) -> bool:
    """Return whether an index is a vector with each of 0 .. size − 1 once.

    Args:
        index: whole numbers.
        size: the number of entries.
    """
    return index.shape == (size,) and torch.equal(index.sort().values, torch.arange(size))


def reverse(dim: int) -> Permutation:
    """Return the permutation that reverses the coordinates.

    Args:
        dim: the number of coordinates D.
    """
    return Permutation(list(range(check_size(dim, "reverse")))[::-1])


def shuffle(dim: int, seed: rng.Seed = None) -> Permutation:
    """Return a fixed random permutation.

    Args:
        dim: the number of coordinates D.
        seed: the seed of the permutation; by default torch's generator.
    """
    return Permutation(rng.permutation(check_size(dim, "shuffle"), seed))
