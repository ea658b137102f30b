"""Flows based on the matrix determinant lemma: planar, radial, Sylvester."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows.core.arguments import check_size, promote
from bayou.flows.core.roots import solve_tanh
from bayou.flows.core.transform import Cost, Event, Pair, Symmetric, Transform
from bayou.flows.layers.elementwise import UNIT_SOFTPLUS
from bayou.flows.layers.linear import multiply_reflections, orthonormalize

Form = Literal["orthogonal", "householder", "triangular"]

MAX_DEFAULT_REFLECTIONS = 8  # of a Householder Sylvester flow, as published


def tanh_ladj(h: Tensor, one_plus_c: Tensor) -> Tensor:
    """Return log(1 + (1 − h²)·c), arranged as a sum of positive terms.

    Args:
        h: values of tanh.
        one_plus_c: 1 + c, positive.
    """
    return torch.log(h.square() + one_plus_c * (1 - h.square()))


class _Stack(Symmetric, Transform):
    """K maps with parameters θ (K, P), or W·context + θ.

    W starts at 0, so that all rows start with the same flow. The parameters of all maps are one
    matrix product, computed once for all draws of a context.
    """

    inverse_kind = Cost.iterative

    def __init__(self, dim: int, context_dim: int, theta: Tensor) -> None:
        super().__init__()
        self.event_shape: Event = (dim,)
        self.context_dim = check_size(context_dim, "the context", 0)
        self.theta = nn.Parameter(theta)
        self.weight: nn.Parameter | None = None
        if context_dim:
            self.weight = nn.Parameter(theta.new_zeros(theta.numel(), context_dim))

    def _group_by_context(
        self,
        x: Tensor,
        context: Tensor | None,
    ) -> tuple[Tensor, Tensor, torch.Size]:
        """Return x (B, n, D), the parameters (B, K, P), and the batch shape of x.

        There are n draws for each of B contexts; without a context B is 1.
        """
        if context is None or self.weight is None:
            return x.reshape(1, -1, x.shape[-1]), self.theta.unsqueeze(0), x.shape[:-1]
        context_batch = context.shape[:-1]
        batch = torch.broadcast_shapes(x.shape[:-1], context_batch)
        if batch[len(batch) - len(context_batch) :] != context_batch:
            context = context.expand(*batch, -1)
            context_batch = batch
        contexts = math.prod(context_batch)
        draws = math.prod(batch[: len(batch) - len(context_batch)])
        p = F.linear(context.reshape(contexts, self.context_dim), self.weight, self.theta.flatten())
        x = x.expand(*batch, -1).reshape(draws, contexts, x.shape[-1])
        return x.transpose(0, 1), p.reshape(contexts, *self.theta.shape), batch

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        rows, p, batch = self._group_by_context(x, context)
        if inverse:
            rows, ladj = self._map_to_base(rows, p)
        else:
            rows, ladj = self._map_to_data(rows, p)
        y = rows.transpose(0, 1).reshape(*batch, rows.shape[-1])
        return y, ladj.transpose(0, 1).reshape(batch)

    @abstractmethod
    def _map_to_data(self, x: Tensor, p: Tensor) -> Pair:
        """Apply all maps to x (B, n, D), with parameters (B, K, P)."""

    @abstractmethod
    def _map_to_base(self, y: Tensor, p: Tensor) -> Pair:
        """Invert all maps at y (B, n, D), with parameters (B, K, P)."""


class Planar(_Stack):
    """A stack of planar flows, y = x + û·tanh(wᵀx + b).

    det = 1 + tanh′·ûᵀw, with ûᵀw = softplus(uᵀw) − 1 > −1, so that every map is a bijection
    (Rezende & Mohamed 2015). The inverse solves α + ûᵀw·tanh(α + b) = wᵀy for α = wᵀx: one scalar
    root per row and map.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps; 1 by default.
        context_dim: the size of a context of which w, u and b are linear functions; 0, the default,
            for none.
        seed: the seed of the initial parameters; by default torch's generator.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Planar
        >>> transform = Planar(4, layers=8, context_dim=3)
        >>> y, ladj = transform(torch.zeros(10, 4), torch.zeros(10, 3))
        >>> y.shape, ladj.shape
        (torch.Size([10, 4]), torch.Size([10]))
    """

    def __init__(
        self,
        dim: int,
        layers: int = 1,
        context_dim: int = 0,
        seed: rng.Seed = None,
    ) -> None:
        shape = (check_size(layers, "the number of layers"), check_size(dim, "Planar"))
        noise = rng.normal(2, shape, torch.zeros(()), seed)
        w = noise[0] / math.sqrt(dim)
        w = w + 0.1 * torch.sign(w)  # away from 0, where the direction is undefined
        # uᵀw = log(e − 1) is the identity along w, since its softplus is 1.
        u = UNIT_SOFTPLUS * w / w.square().sum(-1, keepdim=True) + 0.01 * noise[1]
        super().__init__(dim, context_dim, torch.cat([w, u, torch.zeros(layers, 1)], -1))

    @staticmethod
    def _maps(p: Tensor, dim: int) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Return the parameters of every map, and 1 + ûᵀw of all maps (B, 1, K).

        Those of a map are w (B, D, 1), û (B, 1, D), b (B, 1, 1) and ûᵀw (B, 1, 1).
        """
        w, u, b = p.split([dim, dim, 1], -1)
        inner = (u * w).sum(-1, keepdim=True)
        one_plus = F.softplus(inner)
        u = u + (one_plus - 1 - inner) * w / w.square().sum(-1, keepdim=True)
        columns = (w.unsqueeze(-1), u.unsqueeze(-2), b.unsqueeze(-1), one_plus.unsqueeze(-1) - 1)
        maps = zip(*(column.unbind(1) for column in columns), strict=True)
        return list(maps), one_plus.mT

    def _map_to_data(self, x: Tensor, p: Tensor) -> Pair:
        maps, one_plus = self._maps(p, x.shape[-1])
        activations = []
        for w, u, b, _ in maps:
            h = torch.tanh(torch.baddbmm(b, x, w))  # (B, n, 1)
            activations.append(h)
            x = torch.baddbmm(x, h, u)
        return x, tanh_ladj(torch.cat(activations, -1), one_plus).sum(-1)

    def _map_to_base(self, y: Tensor, p: Tensor) -> Pair:
        maps, one_plus = self._maps(p, y.shape[-1])
        activations: list[Tensor] = []
        for w, u, b, scale in reversed(maps):
            alpha = solve_tanh(scale, torch.ones_like(b), b, y @ w)
            h = torch.tanh(alpha + b)
            activations.insert(0, h)
            y = y - h * u
        return y, -tanh_ladj(torch.cat(activations, -1), one_plus).sum(-1)


class Radial(Transform):
    """A radial flow, y = x + β·(x − c)/(α + r) with r = ‖x − c‖.

    β = softplus(·) − α ≥ −α, so that the map is a bijection, with
    det = (1 + β/(α + r))^(D−1)·(1 + αβ/(α + r)²) (Rezende & Mohamed 2015). The inverse is a
    quadratic in r: r² + (α + β − ‖y − c‖)·r − α·‖y − c‖ = 0.

    Args:
        dim: the number of coordinates D.
        seed: the seed of the initial center c; by default torch's generator.

    Shapes: x, y (..., D), ladj (...).
    """

    def __init__(self, dim: int, seed: rng.Seed = None) -> None:
        super().__init__()
        self.event_shape: Event = (check_size(dim, "Radial"),)
        self.center: nn.Parameter = nn.Parameter(rng.normal(1, (dim,), torch.zeros(()), seed)[0])
        self.log_alpha: nn.Parameter = nn.Parameter(torch.zeros(()))
        self.raw_sum: nn.Parameter = nn.Parameter(
            torch.tensor(UNIT_SOFTPLUS)
        )  # α + β = softplus(raw_sum)

    def _ladj(self, r: Tensor, alpha: Tensor, alpha_plus_beta: Tensor) -> Tensor:
        """Return log det at the distance r, each factor as a ratio of positive terms."""
        dim = self.center.shape[-1]
        alpha_plus_r = alpha + r
        radial = (r.square() + 2 * alpha * r + alpha * alpha_plus_beta) / alpha_plus_r.square()
        tangential = (r + alpha_plus_beta) / alpha_plus_r
        return (dim - 1) * torch.log(tangential) + torch.log(radial)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        alpha = self.log_alpha.exp()
        alpha_plus_beta = F.softplus(self.raw_sum)
        offset = x - self.center
        r = torch.linalg.vector_norm(offset, dim=-1)
        stretch = (r + alpha_plus_beta) / (alpha + r)
        y = self.center + offset * stretch.unsqueeze(-1)
        return y, self._ladj(r, alpha, alpha_plus_beta)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        alpha = self.log_alpha.exp()
        alpha_plus_beta = F.softplus(self.raw_sum)
        offset = y - self.center
        length = torch.linalg.vector_norm(offset, dim=-1)
        half = 0.5 * (alpha_plus_beta - length)
        product = alpha * length
        root = torch.sqrt(half.square() + product + torch.finfo(y.dtype).tiny)
        # Two forms of the positive root; each is used where it does not cancel.
        r = torch.where(half > 0, product / (half.abs() + root), root - half)
        shrinkage = (alpha + r) / (r + alpha_plus_beta)
        x = self.center + offset * shrinkage.unsqueeze(-1)
        return x, -self._ladj(r, alpha, alpha_plus_beta)


@dataclass
class _SylvesterMaps:
    """The parameters of K Sylvester maps, for B contexts.

    Attributes:
        q: Q (B, K, D, rank).
        r: R (B, K, rank, rank).
        r_tilde: R̃ (B, K, rank, rank).
        b: (B, K, rank).
        outward: (Q·R)ᵀ (B, K, rank, D).
        inward: (R̃·Qᵀ)ᵀ (B, K, D, rank).
    """

    q: Tensor
    r: Tensor
    r_tilde: Tensor
    b: Tensor
    outward: Tensor
    inward: Tensor

    def ladj(self, activations: list[Tensor]) -> Tensor:
        """Return Σ_i log(1 + (1 − h_i²)·R_ii·R̃_ii) over all maps: (B, n).

        Args:
            activations: h (B, n, rank) of every map.
        """
        diagonal = self.r.diagonal(dim1=-2, dim2=-1) * self.r_tilde.diagonal(dim1=-2, dim2=-1)
        one_plus = 1 + diagonal.unsqueeze(1)  # (B, 1, K, rank)
        return tanh_ladj(torch.stack(activations, 2), one_plus).sum((-2, -1))


class Sylvester(_Stack):
    """A stack of Sylvester flows, y = x + Q·R·tanh(R̃·Qᵀx + b).

    R and R̃ are upper triangular and QᵀQ = I, so that det = Π_i (1 + tanh′_i·R_ii·R̃_ii) (van den
    Berg et al. 2018). R and R̃ are the two triangles of one matrix, with separate diagonals in
    (−1, 1). The inverse solves for Qᵀx from its last coordinate to its first, one scalar root each.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps; 1 by default.
        form: the form of Q: "orthogonal" (the default; D × rank), "householder" (D × D, a product
            of reflections) or "triangular" (the identity, or the reversal of coordinates in every
            second map).
        rank: the number of columns of Q for the orthogonal form, D // 2 by default.
        reflections: the number of reflections of the Householder form; by default 8, as published,
            and at most D.
        context_dim: the size of a context of which Q (before it is orthonormalized), R, R̃ and b
            are linear functions; 0, the default, for none.
        seed: the seed of the initial parameters; by default torch's generator.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Sylvester
        >>> transform = Sylvester(6, layers=4, rank=2)
        >>> y, ladj = transform(torch.zeros(10, 6))
        >>> y.shape, ladj.shape
        (torch.Size([10, 6]), torch.Size([10]))
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
        rank = _choose_rank(check_size(dim, "Sylvester"), form, rank)
        if reflections is None:
            reflections = min(MAX_DEFAULT_REFLECTIONS, dim)
        check_size(reflections, "the number of reflections")
        columns = {"orthogonal": rank, "householder": reflections, "triangular": 0}[form]
        sizes = [dim * columns, rank * rank, rank, rank, rank]
        check_size(layers, "the number of layers")
        noise = rng.normal(layers, (sum(sizes[:-1]),), torch.zeros(()), seed)
        noise[:, sizes[0] :] *= 0.01  # not 0: there the gradient of R and R̃ is 0
        super().__init__(dim, context_dim, torch.cat([noise, torch.zeros(layers, rank)], -1))
        self.form = form
        self.rank = rank
        self.sizes = sizes

    def _q(self, frame: Tensor, dim: int) -> Tensor:
        """Return Q (B, K, D, rank) with orthonormal columns."""
        if self.form == "triangular":
            identity = torch.eye(dim, dtype=frame.dtype, device=frame.device)
            identities = identity.expand(1, frame.shape[1], dim, dim).clone()
            identities[:, 1::2] = identity.flip(-1)
            return identities
        frame = frame.unflatten(-1, (dim, -1))
        if self.form == "householder":
            return multiply_reflections(frame)
        if self.context_dim:
            return orthonormalize(frame)
        q, r = torch.linalg.qr(promote(frame))  # the same Q, also of an ill-conditioned frame
        return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(frame.dtype)

    def _maps(self, p: Tensor, dim: int) -> _SylvesterMaps:
        """Return the parameters of the maps from their raw values p (B, K, P)."""
        frame, triangles, raw_diagonal, raw_tilde_diagonal, b = p.split(self.sizes, -1)
        triangles = triangles.unflatten(-1, (self.rank, self.rank))
        q = self._q(frame, dim)
        r = triangles.triu(1) + torch.diag_embed(raw_diagonal.tanh())
        r_tilde = triangles.mT.triu(1) + torch.diag_embed(raw_tilde_diagonal.tanh())
        return _SylvesterMaps(q, r, r_tilde, b, outward=(q @ r).mT, inward=q @ r_tilde.mT)

    def _map_to_data(self, x: Tensor, p: Tensor) -> Pair:
        maps = self._maps(p, x.shape[-1])
        activations = []
        for outward, inward, b in zip(
            maps.outward.unbind(1),
            maps.inward.unbind(1),
            maps.b.unsqueeze(1).unbind(2),
            strict=True,
        ):
            h = torch.tanh(torch.baddbmm(b, x, inward))  # (B, n, rank)
            activations.append(h)
            x = torch.baddbmm(x, h, outward)
        return x, maps.ladj(activations)

    def _map_to_base(self, y: Tensor, p: Tensor) -> Pair:
        maps = self._maps(p, y.shape[-1])
        activations: list[Tensor] = []
        for k in reversed(range(maps.r.shape[1])):
            target = y @ maps.q[:, k]
            h = _solve_sylvester(target, maps.r[:, k], maps.r_tilde[:, k], maps.b[:, k])
            activations.insert(0, h)
            y = y - h @ maps.outward[:, k]
        return y, -maps.ladj(activations)


def _choose_rank(dim: int, form: Form, rank: int | None) -> int:
    """Return the rank of a Sylvester map, or its default.

    That is dim // 2 for the orthogonal form and dim for the other forms.
    """
    if form not in ("orthogonal", "householder", "triangular"):
        raise ValueError(
            f'Sylvester form must be "orthogonal", "householder" or "triangular", got {form!r}'
        )
    if form != "orthogonal":
        if rank not in (None, dim):
            raise ValueError(
                f"the {form} form has rank {dim}, got rank={rank}; a lower rank needs the "
                "orthogonal form"
            )
        return dim
    if rank is None:
        return max(1, dim // 2)
    if not 1 <= rank <= dim:
        raise ValueError(f"Sylvester rank must be between 1 and {dim}, got {rank}")
    return rank


def _solve_sylvester(target: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor) -> Tensor:
    """Return h = tanh(R̃·v + b) for the v with v + R·h = target.

    Both matrices are upper triangular, so that v follows from its last coordinate to its first.

    Args:
        target: (B, n, rank).
        r: R (B, rank, rank).
        r_tilde: R̃ (B, rank, rank).
        b: (B, rank).
    """
    v: list[Tensor] = []
    h: list[Tensor] = []
    for i in reversed(range(b.shape[-1])):
        remainder = target[..., i]
        offset = b[:, i, None].expand(target.shape[:-1])
        if v:
            remainder = remainder - (torch.stack(h, -1) @ r[:, i, i + 1 :, None]).squeeze(-1)
            offset = offset + (torch.stack(v, -1) @ r_tilde[:, i, i + 1 :, None]).squeeze(-1)
        scale = r[:, i, i, None]
        slope = r_tilde[:, i, i, None]
        v.insert(0, solve_tanh(scale, slope, offset, remainder))
        h.insert(0, torch.tanh(slope * v[0] + offset))
    return torch.stack(h, -1)
