"""Flows based on the matrix determinant lemma: planar, radial, Sylvester."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou import rng
from bayou.flows.core.arguments import positive, promote
from bayou.flows.core.roots import solve_tanh
from bayou.flows.core.transform import Cost, Pair, Transform
from bayou.flows.layers.elementwise import UNIT_SOFTPLUS
from bayou.flows.layers.linear import reflections as product_of_reflections


def planar_start(noise: Tensor) -> tuple[Tensor, Tensor]:
    """Initial w and u (..., D) of planar maps near the identity, from normal noise (2, ..., D)."""
    w = noise[0] / math.sqrt(noise.shape[-1])
    w = w + 0.1 * torch.sign(w)  # away from 0, where the direction is undefined
    # uᵀw = log(e − 1) is the identity along w, since its softplus is 1.
    return w, UNIT_SOFTPLUS * w / _inner(w, w) + 0.01 * noise[1]


def planar_parts(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """û with ûᵀw = softplus(uᵀw) − 1, and 1 + ûᵀw: () from w and u (D,), or (..., 1) from w and u (..., D)."""
    inner = _inner(u, w)
    one_plus = F.softplus(inner)
    return u + (one_plus - 1 - inner) * w / _inner(w, w), one_plus


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """aᵀb in a shape that broadcasts with a; for vectors a dot product, which is faster than a sum."""
    return a.dot(b) if a.ndim == 1 else (a * b).sum(-1, keepdim=True)


def tanh_ladj(h: Tensor, one_plus: Tensor) -> Tensor:
    """log(1 + (1 − h²)·c) for h = tanh(·) and one_plus = 1 + c > 0, arranged as a sum of positive terms."""
    return torch.log(h.square() + one_plus * (1 - h.square()))


class Planar(Transform):
    """y = x + û·tanh(wᵀx + b), det = 1 + tanh′·ûᵀw, with ûᵀw = softplus(uᵀw) − 1 > −1 (Rezende & Mohamed 2015).

    The inverse solves α + ûᵀw·tanh(α + b) = wᵀy for α = wᵀx: one scalar root per row.

    Args:
        dim: D, the size of x.
        seed: of the initial parameters.

    Shapes: x, y (..., D), ladj (...).
    """

    inverse_kind = Cost.iterative

    def __init__(self, dim: int, seed: rng.Seed = None) -> None:
        super().__init__()
        self.event_shape = (positive(dim, "Planar"),)
        w, u = planar_start(rng.normal(2, (dim,), torch.zeros(()), seed))
        self.w, self.u, self.b = nn.Parameter(w), nn.Parameter(u), nn.Parameter(torch.zeros(()))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        u, one_plus = planar_parts(self.w, self.u)
        h = torch.tanh(x @ self.w + self.b)
        return x + h.unsqueeze(-1) * u, tanh_ladj(h, one_plus)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        u, one_plus = planar_parts(self.w, self.u)
        alpha = solve_tanh(one_plus - 1, torch.ones_like(self.b), self.b, y @ self.w)
        h = torch.tanh(alpha + self.b)
        return y - h.unsqueeze(-1) * u, -tanh_ladj(h, one_plus)


class Radial(Transform):
    """y = x + β·(x − c)/(α + r), r = ‖x − c‖, β = softplus(·) − α ≥ −α (Rezende & Mohamed 2015).

    The inverse is a quadratic in r: r² + (α + β − ‖y − c‖)·r − α·‖y − c‖ = 0.

    Args:
        dim: D, the size of x.
        seed: of the initial parameters.

    Shapes: x, y (..., D), ladj (...).
    """

    def __init__(self, dim: int, seed: rng.Seed = None) -> None:
        super().__init__()
        self.event_shape = (positive(dim, "Radial"),)
        self.center = nn.Parameter(rng.normal(1, (dim,), torch.zeros(()), seed)[0])
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.raw_sum = nn.Parameter(torch.tensor(UNIT_SOFTPLUS))  # α + β = softplus(raw_sum)

    def _ladj(self, r: Tensor, alpha: Tensor, total: Tensor) -> Tensor:
        # (1 + β/(α+r))^(D−1)·(1 + αβ/(α+r)²), each factor as a ratio of positive terms.
        dim, reach = self.center.shape[-1], alpha + r
        along = (r.square() + 2 * alpha * r + alpha * total) / reach.square()
        return (dim - 1) * torch.log((r + total) / reach) + torch.log(along)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        alpha, total = self.log_alpha.exp(), F.softplus(self.raw_sum)
        away = x - self.center
        r = torch.linalg.vector_norm(away, dim=-1)
        return self.center + away * ((r + total) / (alpha + r)).unsqueeze(-1), self._ladj(r, alpha, total)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        alpha, total = self.log_alpha.exp(), F.softplus(self.raw_sum)
        away = y - self.center
        length = torch.linalg.vector_norm(away, dim=-1)
        half = 0.5 * (total - length)
        product = alpha * length
        root = torch.sqrt(half.square() + product + torch.finfo(y.dtype).tiny)
        # Two forms of the positive root; each is used where it does not cancel.
        r = torch.where(half > 0, product / (half.abs() + root), root - half)
        return self.center + away * ((alpha + r) / (r + total)).unsqueeze(-1), -self._ladj(r, alpha, total)


def sylvester_rank(dim: int, form: str, rank: int | None) -> int:
    """The rank of a Sylvester map: by default dim // 2 for the orthogonal form and dim for the others."""
    if form not in ("orthogonal", "householder", "triangular"):
        raise ValueError(f'Sylvester form must be "orthogonal", "householder" or "triangular", got {form!r}')
    if form != "orthogonal" and rank not in (None, dim):
        raise ValueError(f"the {form} form has rank {dim}, got rank={rank}; a lower rank needs the orthogonal form")
    rank = (max(1, dim // 2) if form == "orthogonal" else dim) if rank is None else rank
    if not 1 <= rank <= dim:
        raise ValueError(f"Sylvester rank must be between 1 and {dim}, got {rank}")
    return rank


class Sylvester(Transform):
    """y = x + Q·R·tanh(R̃·Qᵀx + b), R and R̃ upper triangular, QᵀQ = I (van den Berg et al. 2018).

    det = Π_i (1 + tanh′_i·R_ii·R̃_ii), with |R_ii|, |R̃_ii| < 1. The inverse solves for Qᵀx from its last coordinate to
    its first, one scalar root each.

    Args:
        dim: D, the size of x.
        form: Q is "orthogonal" (D × rank, by QR), "householder" (D × D, a product of reflections) or "triangular" (the
            identity, or the reversal of coordinates with ``flip``).
        rank: columns of Q for the orthogonal form, D // 2 by default.
        reflections: the number of reflections of the Householder form, D by default.
        flip: reverse the coordinates (triangular form).
        seed: of the initial parameters.

    Shapes: x, y (..., D), ladj (...).
    """

    inverse_kind = Cost.iterative
    reversal: Tensor

    def __init__(
        self,
        dim: int,
        form: Literal["orthogonal", "householder", "triangular"] = "orthogonal",
        rank: int | None = None,
        reflections: int | None = None,
        flip: bool = False,
        seed: rng.Seed = None,
    ) -> None:
        super().__init__()
        self.event_shape = (positive(dim, "Sylvester"),)
        rank = sylvester_rank(dim, form, rank)
        self.form = form
        like = torch.zeros(())
        if form == "orthogonal":
            self.frame = nn.Parameter(rng.normal(dim, (rank,), like, rng.fold(seed, "frame")))
        elif form == "householder":
            count = positive(dim if reflections is None else reflections, "the number of reflections")
            self.frame = nn.Parameter(rng.normal(count, (dim,), like, rng.fold(seed, "frame")))
        else:
            self.register_buffer("reversal", torch.arange(dim).flip(0) if flip else torch.arange(dim))
        small = 0.01 * rng.normal(2, (rank, rank), like, rng.fold(seed, "triangles"))
        self.r = nn.Parameter(small[0])
        self.r_tilde = nn.Parameter(small[1])
        self.b = nn.Parameter(torch.zeros(rank))

    def _q(self) -> Tensor:
        """Q (D, rank) with orthonormal columns."""
        if self.form == "orthogonal":
            return torch.linalg.qr(promote(self.frame)).Q.to(self.frame.dtype)
        if self.form == "householder":
            return product_of_reflections(self.frame.mT)
        one = torch.eye(len(self.reversal), dtype=self.b.dtype, device=self.b.device)
        return one[:, self.reversal]

    def _triangles(self) -> tuple[Tensor, Tensor]:
        return triangle(self.r, self.r.diagonal()), triangle(self.r_tilde, self.r_tilde.diagonal())

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        q, (r, r_tilde) = self._q(), self._triangles()
        h = torch.tanh(x @ q @ r_tilde.mT + self.b)
        return x + h @ (q @ r).mT, sylvester_ladj(h, r, r_tilde).sum(-1)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        q, (r, r_tilde) = self._q(), self._triangles()
        h = solve_sylvester(y @ q, r, r_tilde, self.b)
        return y - h @ (q @ r).mT, -sylvester_ladj(h, r, r_tilde).sum(-1)


def triangle(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """The upper triangle of matrices (..., M, M) with the diagonal tanh(diagonal)."""
    return matrix.triu(1) + torch.diag_embed(diagonal.tanh())


def sylvester_ladj(h: Tensor, r: Tensor, r_tilde: Tensor) -> Tensor:
    """log(1 + (1 − h_i²)·R_ii·R̃_ii) of h (..., M) and triangles (..., M, M): (..., M)."""
    return tanh_ladj(h, 1 + r.diagonal(dim1=-2, dim2=-1) * r_tilde.diagonal(dim1=-2, dim2=-1))


def solve_sylvester(target: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor) -> Tensor:
    """h = tanh(R̃·v + b) for the v with v + R·h = target, from the last coordinate to the first.

    Shapes: target (..., N, M) with triangles (..., M, M) and b (..., M); with triangles (M, M), target (..., M).
    """
    v: list[Tensor] = []
    h: list[Tensor] = []
    axis = (..., None) if b.ndim > 1 else ...  # the axis of the N rows that share a set of parameters
    for i in reversed(range(b.shape[-1])):
        rest, offset = target[..., i], b[..., i][axis].expand(target.shape[:-1])
        if v:
            rest = rest - (torch.stack(h, -1) @ r[..., i, i + 1 :, None]).squeeze(-1)
            offset = offset + (torch.stack(v, -1) @ r_tilde[..., i, i + 1 :, None]).squeeze(-1)
        scale, slope = r[..., i, i][axis], r_tilde[..., i, i][axis]
        v.insert(0, solve_tanh(scale, slope, offset, rest))
        h.insert(0, torch.tanh(slope * v[0] + offset))
    return torch.stack(h, -1)
