"""Flows whose parameters are a linear function of a context, for encoders.

``Conditional`` does this for any flow by ``vmap``. Here the parameters of all layers are one matrix product, computed
once for all draws of a context.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou import rng
from bayou.flows.continuous_time.continuous import Continuous
from bayou.flows.continuous_time.fields import time_features
from bayou.flows.core.arguments import positive
from bayou.flows.core.bases import StandardNormal
from bayou.flows.core.compose import Chain
from bayou.flows.core.flow import Flow
from bayou.flows.core.roots import solve_tanh
from bayou.flows.core.transform import Cost, Pair, Transform
from bayou.flows.layers.builders import iaf
from bayou.flows.layers.determinant import (
    planar_parts,
    planar_start,
    solve_sylvester,
    sylvester_ladj,
    sylvester_rank,
    tanh_ladj,
    triangle,
)
from bayou.flows.layers.elementwise import Gate
from bayou.flows.layers.linear import orthonormal, reflections as product_of_reflections

Form = Literal["orthogonal", "householder", "triangular"]


class _Amortized(Transform):
    """The parameters of a row are W·context + θ; W starts at 0, so that all rows start with the same flow."""

    inverse_kind = Cost.iterative

    def __init__(self, dim: int, context_dim: int, start: Tensor) -> None:
        super().__init__()
        self.event_shape, self.context_dim = (positive(dim, "the flow"),), positive(context_dim, "the context")
        self.start = nn.Parameter(start)  # θ
        self.weight = nn.Parameter(start.new_zeros(start.numel(), context_dim))

    def _rows(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
        """x (B, n, D), n draws for each of B contexts; the parameters (B, *shape of θ); the batch of x."""
        batch, own = torch.broadcast_shapes(x.shape[:-1], context.shape[:-1]), context.shape[:-1]
        if batch[len(batch) - len(own) :] != own:
            context, own = context.expand(*batch, -1), batch
        rows, draws = own.numel(), batch[: len(batch) - len(own)].numel()
        p = F.linear(context.reshape(rows, self.context_dim), self.weight, self.start.flatten())
        x = x.expand(*batch, -1).reshape(draws, rows, x.shape[-1])
        return x.transpose(0, 1), p.reshape(rows, *self.start.shape), batch

    @staticmethod
    def _answer(x: Tensor, ladj: Tensor, batch: torch.Size) -> Pair:
        return x.transpose(0, 1).reshape(*batch, x.shape[-1]), ladj.transpose(0, 1).reshape(batch)


class AmortizedAffine(Transform):
    """y = exp(s) ⊙ x + m, (m, s) = W·context + b: a Gaussian encoder or decoder (Kingma & Welling 2014)."""

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.event_shape, self.context_dim = (positive(dim, "AmortizedAffine"),), context_dim
        self.net = nn.Linear(positive(context_dim, "the context"), 2 * dim)
        nn.init.zeros_(self.net.bias)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        shift, log_scale = self.net(context).chunk(2, -1)
        y = x * log_scale.exp() + shift
        return y, log_scale.sum(-1).expand(y.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        shift, log_scale = self.net(context).chunk(2, -1)
        x = (y - shift) * (-log_scale).exp()
        return x, -log_scale.sum(-1).expand(x.shape[:-1])


class AmortizedPlanar(_Amortized):
    """``layers`` planar maps x + û·tanh(wᵀx + b) with û, w and b from the context (Rezende & Mohamed 2015).

    Args:
        dim: D, the size of x.
        context_dim: the size of the context.
        layers: the number of maps.
        seed: of the initial parameters.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).
    """

    def __init__(self, dim: int, context_dim: int, layers: int = 10, seed: rng.Seed = None) -> None:
        noise = rng.normal(
            2 * positive(layers, "the number of layers"), (positive(dim, "the flow"),), torch.zeros(()), seed
        )
        w, u = planar_start(noise.reshape(2, layers, dim))
        super().__init__(dim, context_dim, torch.cat([w, u, torch.zeros(layers, 1)], -1))

    @staticmethod
    def _parts(p: Tensor, dim: int) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Of every layer w (B, D, 1), û (B, 1, D), b, 1 + ûᵀw (B, 1, 1); and the last of all layers (B, 1, K)."""
        w, u, b = p.split([dim, dim, 1], -1)
        u, one_plus = planar_parts(w, u)
        each = (w.unsqueeze(-1), u.unsqueeze(-2), b.unsqueeze(-1), one_plus.unsqueeze(-1))
        return list(zip(*(part.unbind(1) for part in each), strict=True)), one_plus.mT

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        x, p, batch = self._rows(x, context)  # type: ignore[arg-type]
        layers, one_plus = self._parts(p, x.shape[-1])
        hs = []
        for w, u, b, _ in layers:
            hs.append(torch.tanh(torch.baddbmm(b, x, w)))  # (B, n, 1)
            x = torch.baddbmm(x, hs[-1], u)
        return self._answer(x, tanh_ladj(torch.cat(hs, -1), one_plus).sum(-1), batch)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        y, p, batch = self._rows(y, context)  # type: ignore[arg-type]
        layers, one_plus = self._parts(p, y.shape[-1])
        hs: list[Tensor] = []
        for w, u, b, plus in reversed(layers):
            alpha = solve_tanh(plus - 1, torch.ones_like(b), b, y @ w)
            hs.insert(0, torch.tanh(alpha + b))
            y = y - hs[0] * u
        return self._answer(y, -tanh_ladj(torch.cat(hs, -1), one_plus).sum(-1), batch)


class AmortizedSylvester(_Amortized):
    """``layers`` maps x + Q·R·tanh(R̃·Qᵀx + b) with Q, R, R̃ and b from the context (van den Berg et al. 2018).

    R and R̃ are the two triangles of one matrix, with separate diagonals in (−1, 1).

    Args:
        dim, context_dim, layers, seed: as for ``AmortizedPlanar``.
        form: Q is "orthogonal" (D × rank), "householder" (a product of ``reflections``) or "triangular" (the identity,
            or the reversal of coordinates in every second layer).
        rank, reflections: as for ``Sylvester``.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        layers: int = 4,
        form: Form = "orthogonal",
        rank: int | None = None,
        reflections: int = 8,
        seed: rng.Seed = None,
    ) -> None:
        positive(dim, "the flow")
        rank = sylvester_rank(dim, form, rank)
        columns = {"orthogonal": rank, "householder": positive(reflections, "the reflections"), "triangular": 0}[form]
        sizes = [dim * columns, rank * rank, rank, rank, rank]
        noise = rng.normal(positive(layers, "the number of layers"), (sum(sizes[:2]),), torch.zeros(()), seed)
        frame, matrix = noise.split(sizes[:2], -1)
        super().__init__(dim, context_dim, torch.cat([frame, 0.01 * matrix, torch.zeros(layers, 3 * rank)], -1))
        self.form, self.rank, self.sizes = form, rank, sizes

    def _q(self, frame: Tensor, dim: int) -> Tensor | None:
        """Q (B, K, D, rank) with orthonormal columns; None for the triangular form."""
        if self.form == "triangular":
            return None
        frame = frame.unflatten(-1, (dim, -1))
        return orthonormal(frame) if self.form == "orthogonal" else product_of_reflections(frame)

    def _parts(self, x: Tensor, p: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Q, R and R̃ (B, K, rank, rank), b (B, K, rank)."""
        frame, matrix, first, second, b = p.split(self.sizes, -1)
        matrix = matrix.unflatten(-1, (self.rank, self.rank))
        return self._q(frame, x.shape[-1]), triangle(matrix, first), triangle(matrix.mT, second), b

    def _outer(self, q: Tensor | None, r: Tensor, r_tilde: Tensor) -> tuple[Tensor, Tensor]:
        """(Q·R)ᵀ (B, K, rank, D) and (R̃·Qᵀ)ᵀ (B, K, D, rank)."""
        if q is not None:
            return (q @ r).mT, q @ r_tilde.mT
        flip = (torch.arange(r.shape[1], device=r.device) % 2 == 1).reshape(-1, 1, 1)
        return torch.where(flip, r.mT.flip(-1), r.mT), torch.where(flip, r_tilde.mT.flip(-2), r_tilde.mT)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        x, p, batch = self._rows(x, context)  # type: ignore[arg-type]
        q, r, r_tilde, b = self._parts(x, p)
        hs = []
        out, into = self._outer(q, r, r_tilde)
        for left, right, offset in zip(out.unbind(1), into.unbind(1), b.unsqueeze(1).unbind(2), strict=True):
            hs.append(torch.tanh(torch.baddbmm(offset, x, right)))  # (B, n, rank)
            x = torch.baddbmm(x, hs[-1], left)
        return self._answer(
            x, sylvester_ladj(torch.stack(hs, 2), r.unsqueeze(1), r_tilde.unsqueeze(1)).sum((-2, -1)), batch
        )

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        y, p, batch = self._rows(y, context)  # type: ignore[arg-type]
        q, r, r_tilde, b = self._parts(y, p)
        out, _ = self._outer(q, r, r_tilde)
        hs: list[Tensor] = []
        for k in reversed(range(r.shape[1])):
            target = (y.flip(-1) if k % 2 else y) if q is None else y @ q[:, k]
            hs.insert(0, solve_sylvester(target, r[:, k], r_tilde[:, k], b[:, k]))
            y = y - hs[0] @ out[:, k]
        return self._answer(
            y, -sylvester_ladj(torch.stack(hs, 2), r.unsqueeze(1), r_tilde.unsqueeze(1)).sum((-2, -1)), batch
        )


class PlanarField(nn.Module):
    """v(t, z) = Σ_j g_j·u_j·tanh(w_jᵀz + b_j), gates g in (0, 1) and offsets b from t and a context (Chen et al. 2018).

    Its trace Σ_j g_j·tanh′·w_jᵀu_j has a closed form. u starts at 0, so that a flow starts as the identity.

    Args:
        dim: D.
        units: the number of terms.
        context_dim: the size of the context, 0 for none.
        frequencies: of the Fourier features of t.
    """

    def __init__(self, dim: int, units: int = 64, context_dim: int = 0, frequencies: int = 4) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.w = nn.Linear(positive(dim, "the field"), positive(units, "the units"), bias=False)
        self.u = nn.Parameter(torch.zeros(units, dim))
        self.from_time = nn.Linear(2 * frequencies + 1, 2 * units)
        self.from_context = nn.Linear(context_dim, 2 * units, bias=False) if context_dim else None

    def forward(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """t (...), z (..., dim), context (..., context_dim) to (..., dim)."""
        return self.with_trace(t, z, context)[0]

    def with_trace(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Pair:
        """The field, and its trace (...)."""
        p = self.from_time(time_features(t, self.frequencies))
        if self.from_context is not None:
            p = p + self.from_context(context)
        gate, offset = p.chunk(2, -1)
        gate, h = gate.sigmoid(), torch.tanh(self.w(z) + offset)
        return (gate * h) @ self.u, gate * (1 - h.square()) @ (self.w.weight * self.u).sum(-1)


Kind = Literal[
    "gaussian", "planar", "sylvester_orthogonal", "sylvester_householder", "sylvester_triangular", "iaf", "continuous"
]


def amortized(kind: Kind, dim: int, context_dim: int, **options: Any) -> Flow:
    """q(z | context): a Gaussian followed by a flow.

    Args:
        kind: the kind of the flow.
        dim: the size of z.
        context_dim: the size of the context.
        options: those of ``AmortizedPlanar`` or ``AmortizedSylvester``; ``layers`` and ``hidden`` of "iaf" (with gated
            updates, Kingma et al. 2016); ``units`` of the ``PlanarField`` and ``steps`` of "continuous".
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}")
    first = AmortizedAffine(dim, context_dim)
    if kind == "gaussian":
        if options:
            raise ValueError(f"a Gaussian has no options, got {', '.join(options)}")
        return Flow(StandardNormal(dim), first)
    return Flow(StandardNormal(dim), Chain(first, _KINDS[kind](dim, context_dim=context_dim, **options)))


def _continuous(dim: int, context_dim: int, units: int = 64, steps: int = 4, **options: Any) -> Continuous:
    return Continuous(dim, PlanarField(dim, units, context_dim), context_dim=context_dim, steps=steps, **options)


_KINDS: dict[str, Callable[..., Transform]] = {
    "gaussian": AmortizedAffine,
    "planar": AmortizedPlanar,
    "sylvester_orthogonal": partial(AmortizedSylvester, form="orthogonal"),
    "sylvester_householder": partial(AmortizedSylvester, form="householder"),
    "sylvester_triangular": partial(AmortizedSylvester, form="triangular"),
    "iaf": partial(iaf, elementwise=Gate()),
    "continuous": _continuous,
}
