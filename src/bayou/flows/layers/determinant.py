"""Flows based on the matrix determinant lemma: planar, radial, Sylvester."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou import rng
from bayou.flows.core.arguments import positive, promote
from bayou.flows.core.roots import solve_tanh
from bayou.flows.core.transform import Cost, Pair, Symmetric, Transform
from bayou.flows.layers.elementwise import UNIT_SOFTPLUS
from bayou.flows.layers.linear import orthonormal, reflections as product_of_reflections

Form = Literal["orthogonal", "householder", "triangular"]


def tanh_ladj(h: Tensor, one_plus: Tensor) -> Tensor:
    """log(1 + (1 − h²)·c) for h = tanh(·) and one_plus = 1 + c > 0, arranged as a sum of positive
    terms.
    """
    return torch.log(h.square() + one_plus * (1 - h.square()))


class _Stack(Symmetric, Transform):
    """K maps with parameters θ (K, P), or W·context + θ; W starts at 0, so that all rows start with
    the same flow.

    The parameters of all maps are one matrix product, computed once for all draws of a context.
    """

    inverse_kind = Cost.iterative

    def __init__(self, dim: int, context_dim: int, theta: Tensor) -> None:
        super().__init__()
        self.event_shape, self.context_dim = (dim,), positive(context_dim, "the context", 0)
        self.theta = nn.Parameter(theta)
        self.weight = (
            nn.Parameter(theta.new_zeros(theta.numel(), context_dim)) if context_dim else None
        )

    def _rows(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, torch.Size]:
        """x (B, n, D), n draws for each of B contexts; the parameters (B, K, P); the batch of x."""
        if context is None or self.weight is None:
            return x.reshape(1, -1, x.shape[-1]), self.theta.unsqueeze(0), x.shape[:-1]
        batch, own = torch.broadcast_shapes(x.shape[:-1], context.shape[:-1]), context.shape[:-1]
        if batch[len(batch) - len(own) :] != own:
            context, own = context.expand(*batch, -1), batch
        rows, draws = own.numel(), batch[: len(batch) - len(own)].numel()
        p = F.linear(context.reshape(rows, self.context_dim), self.weight, self.theta.flatten())
        x = x.expand(*batch, -1).reshape(draws, rows, x.shape[-1])
        return x.transpose(0, 1), p.reshape(rows, *self.theta.shape), batch

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, p, batch = self._rows(x, context)
        x, ladj = (self._to_base if inverse else self._to_data)(x, p)
        return x.transpose(0, 1).reshape(*batch, x.shape[-1]), ladj.transpose(0, 1).reshape(batch)

    @abstractmethod
    def _to_data(self, x: Tensor, p: Tensor) -> Pair: ...

    @abstractmethod
    def _to_base(self, y: Tensor, p: Tensor) -> Pair: ...


class Planar(_Stack):
    """Maps y = x + û·tanh(wᵀx + b), det = 1 + tanh′·ûᵀw, with ûᵀw = softplus(uᵀw) − 1 > −1 (Rezende
    & Mohamed 2015).

    The inverse solves α + ûᵀw·tanh(α + b) = wᵀy for α = wᵀx: one scalar root per row and map.

    Args:
        dim: D, the size of x.
        layers: the number of maps.
        context_dim: the size of a context of which w, u and b are linear functions, 0 for none.
        seed: of the initial parameters.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).
    """

    def __init__(
        self, dim: int, layers: int = 1, context_dim: int = 0, seed: rng.Seed = None
    ) -> None:
        shape = (positive(layers, "the number of layers"), positive(dim, "Planar"))
        noise = rng.normal(2, shape, torch.zeros(()), seed)
        w = noise[0] / math.sqrt(dim)
        w = w + 0.1 * torch.sign(w)  # away from 0, where the direction is undefined
        # uᵀw = log(e − 1) is the identity along w, since its softplus is 1.
        u = UNIT_SOFTPLUS * w / w.square().sum(-1, keepdim=True) + 0.01 * noise[1]
        super().__init__(dim, context_dim, torch.cat([w, u, torch.zeros(layers, 1)], -1))

    @staticmethod
    def _parts(p: Tensor, dim: int) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Of every map w (B, D, 1), û (B, 1, D), b, 1 + ûᵀw (B, 1, 1); and the last of all maps (B,
        1, K).
        """
        w, u, b = p.split([dim, dim, 1], -1)
        inner = (u * w).sum(-1, keepdim=True)
        one_plus = F.softplus(inner)
        u = u + (one_plus - 1 - inner) * w / w.square().sum(-1, keepdim=True)
        each = (w.unsqueeze(-1), u.unsqueeze(-2), b.unsqueeze(-1), one_plus.unsqueeze(-1))
        return list(zip(*(part.unbind(1) for part in each), strict=True)), one_plus.mT

    def _to_data(self, x: Tensor, p: Tensor) -> Pair:
        maps, one_plus = self._parts(p, x.shape[-1])
        hs = []
        for w, u, b, _ in maps:
            hs.append(torch.tanh(torch.baddbmm(b, x, w)))  # (B, n, 1)
            x = torch.baddbmm(x, hs[-1], u)
        return x, tanh_ladj(torch.cat(hs, -1), one_plus).sum(-1)

    def _to_base(self, y: Tensor, p: Tensor) -> Pair:
        maps, one_plus = self._parts(p, y.shape[-1])
        hs: list[Tensor] = []
        for w, u, b, plus in reversed(maps):
            alpha = solve_tanh(plus - 1, torch.ones_like(b), b, y @ w)
            hs.insert(0, torch.tanh(alpha + b))
            y = y - hs[0] * u
        return y, -tanh_ladj(torch.cat(hs, -1), one_plus).sum(-1)


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
        return self.center + away * ((r + total) / (alpha + r)).unsqueeze(-1), self._ladj(
            r, alpha, total
        )

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        alpha, total = self.log_alpha.exp(), F.softplus(self.raw_sum)
        away = y - self.center
        length = torch.linalg.vector_norm(away, dim=-1)
        half = 0.5 * (total - length)
        product = alpha * length
        root = torch.sqrt(half.square() + product + torch.finfo(y.dtype).tiny)
        # Two forms of the positive root; each is used where it does not cancel.
        r = torch.where(half > 0, product / (half.abs() + root), root - half)
        return self.center + away * ((alpha + r) / (r + total)).unsqueeze(-1), -self._ladj(
            r, alpha, total
        )


class Sylvester(_Stack):
    """Maps y = x + Q·R·tanh(R̃·Qᵀx + b), R and R̃ upper triangular, QᵀQ = I (van den Berg et al.
    2018).

    det = Π_i (1 + tanh′_i·R_ii·R̃_ii); R and R̃ are the two triangles of one matrix, with separate
    diagonals in (−1, 1). The inverse solves for Qᵀx from its last coordinate to its first, one
    scalar root each.

    Args:
        dim: D, the size of x.
        layers: the number of maps.
        form: Q is "orthogonal" (D × rank), "householder" (D × D, a product of reflections) or
            "triangular" (the identity, or the reversal of coordinates in every second map).
        rank: columns of Q for the orthogonal form, D // 2 by default.
        reflections: the number of reflections of the Householder form; by default 8, as published,
            and at most D.
        context_dim: the size of a context of which Q (before it is orthonormalized), R, R̃ and b
            are linear functions, 0 for none.
        seed: of the initial parameters.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).
    """

    def __init__(
        self,
        dim: int,
        layers: int = 1,
        form: Form = "orthogonal",
        rank: int | None = None,
        reflections: int | None = None,
        context_dim: int = 0,
        seed: rng.Seed = None,
    ) -> None:
        rank = _rank(positive(dim, "Sylvester"), form, rank)
        count = positive(
            min(8, dim) if reflections is None else reflections, "the number of reflections"
        )
        columns = {"orthogonal": rank, "householder": count, "triangular": 0}[form]
        sizes = [dim * columns, rank * rank, rank, rank, rank]
        noise = rng.normal(
            positive(layers, "the number of layers"), (sum(sizes[:-1]),), torch.zeros(()), seed
        )
        noise[:, sizes[0] :] *= 0.01  # not 0: there the gradient of R and R̃ is 0
        super().__init__(dim, context_dim, torch.cat([noise, torch.zeros(layers, rank)], -1))
        self.form, self.rank, self.sizes = form, rank, sizes

    def _q(self, frame: Tensor, dim: int) -> Tensor | None:
        """Q (B, K, D, rank) with orthonormal columns; None for the triangular form."""
        if self.form == "triangular":
            return None
        frame = frame.unflatten(-1, (dim, -1))
        if self.form == "householder":
            return product_of_reflections(frame)
        if self.context_dim:
            return orthonormal(frame)
        q, r = torch.linalg.qr(promote(frame))  # the same Q, also of an ill-conditioned frame
        return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(frame.dtype)

    def _parts(self, p: Tensor, dim: int) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Q, and R and R̃ (B, K, rank, rank), b (B, K, rank), (Q·R)ᵀ (B, K, rank, D), (R̃·Qᵀ)ᵀ (B,
        K, D, rank).
        """
        frame, matrix, first, second, b = p.split(self.sizes, -1)
        matrix, q = matrix.unflatten(-1, (self.rank, self.rank)), self._q(frame, dim)
        r = matrix.triu(1) + torch.diag_embed(first.tanh())
        r_tilde = matrix.mT.triu(1) + torch.diag_embed(second.tanh())
        if q is not None:
            return q, (r, r_tilde, b, (q @ r).mT, q @ r_tilde.mT)
        flip = (torch.arange(r.shape[1], device=r.device) % 2 == 1).reshape(-1, 1, 1)
        out, into = (
            torch.where(flip, r.mT.flip(-1), r.mT),
            torch.where(flip, r_tilde.mT.flip(-2), r_tilde.mT),
        )
        return None, (r, r_tilde, b, out, into)

    @staticmethod
    def _ladj(hs: list[Tensor], r: Tensor, r_tilde: Tensor) -> Tensor:
        """Σ_i log(1 + (1 − h_i²)·R_ii·R̃_ii) over all maps, of h (B, n, rank) each: (B, n)."""
        diagonal = r.diagonal(dim1=-2, dim2=-1) * r_tilde.diagonal(dim1=-2, dim2=-1)  # (B, K, rank)
        return tanh_ladj(torch.stack(hs, 2), 1 + diagonal.unsqueeze(1)).sum((-2, -1))

    def _to_data(self, x: Tensor, p: Tensor) -> Pair:
        _, (r, r_tilde, b, out, into) = self._parts(p, x.shape[-1])
        hs = []
        for left, right, offset in zip(
            out.unbind(1), into.unbind(1), b.unsqueeze(1).unbind(2), strict=True
        ):
            hs.append(torch.tanh(torch.baddbmm(offset, x, right)))  # (B, n, rank)
            x = torch.baddbmm(x, hs[-1], left)
        return x, self._ladj(hs, r, r_tilde)

    def _to_base(self, y: Tensor, p: Tensor) -> Pair:
        q, (r, r_tilde, b, out, _) = self._parts(p, y.shape[-1])
        hs: list[Tensor] = []
        for k in reversed(range(r.shape[1])):
            target = (y.flip(-1) if k % 2 else y) if q is None else y @ q[:, k]
            hs.insert(0, _solve_sylvester(target, r[:, k], r_tilde[:, k], b[:, k]))
            y = y - hs[0] @ out[:, k]
        return y, -self._ladj(hs, r, r_tilde)


def _rank(dim: int, form: Form, rank: int | None) -> int:
    """The rank of a Sylvester map: by default dim // 2 for the orthogonal form and dim for the
    others.
    """
    if form not in ("orthogonal", "householder", "triangular"):
        raise ValueError(
            f'Sylvester form must be "orthogonal", "householder" or "triangular", got {form!r}'
        )
    if form != "orthogonal" and rank not in (None, dim):
        raise ValueError(
            f"the {form} form has rank {dim}, got rank={rank}; a lower rank needs the orthogonal form"
        )
    rank = (max(1, dim // 2) if form == "orthogonal" else dim) if rank is None else rank
    if not 1 <= rank <= dim:
        raise ValueError(f"Sylvester rank must be between 1 and {dim}, got {rank}")
    return rank


def _solve_sylvester(target: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor) -> Tensor:
    """h = tanh(R̃·v + b) for the v with v + R·h = target (B, n, rank), from the last coordinate to
    the first.
    """
    v: list[Tensor] = []
    h: list[Tensor] = []
    for i in reversed(range(b.shape[-1])):
        rest, offset = target[..., i], b[:, i, None].expand(target.shape[:-1])
        if v:
            rest = rest - (torch.stack(h, -1) @ r[:, i, i + 1 :, None]).squeeze(-1)
            offset = offset + (torch.stack(v, -1) @ r_tilde[:, i, i + 1 :, None]).squeeze(-1)
        scale, slope = r[:, i, i, None], r_tilde[:, i, i, None]
        v.insert(0, solve_tanh(scale, slope, offset, rest))
        h.insert(0, torch.tanh(slope * v[0] + offset))
    return torch.stack(h, -1)
