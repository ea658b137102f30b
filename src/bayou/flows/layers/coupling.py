"""Coupling flows: some coordinates determine the parameters of the map of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows.core.arguments import positive
from bayou.flows.core.nets import mlp
from bayou.flows.core.transform import ANGLES, Ladj, Pair, Rows, Symmetric, Transform, on_circle
from bayou.flows.layers.elementwise import Elementwise, Gate

Mask = Literal["half", "alternate"] | Tensor | Sequence[bool]


def coupling_mask(dim: int, mask: Mask = "half", flip: bool = False) -> Tensor:
    """A boolean mask (D,), True where a coordinate is kept; at least one is kept and one
    changed.
    """
    if positive(dim, "a coupling") < 2:
        raise ValueError(
            f"a coupling needs at least 2 dimensions, got {dim}; in one dimension use an autoregressive flow (naf, "
            "spline_autoregressive) or DiagonalAffine"
        )
    if isinstance(mask, str):
        if mask not in ("half", "alternate"):
            raise ValueError(f'mask must be "half", "alternate" or {dim} booleans, got {mask!r}')
        kept = torch.arange(dim) < dim // 2 if mask == "half" else torch.arange(dim) % 2 == 0
    else:
        kept = torch.as_tensor(mask)
        if kept.dtype != torch.bool or kept.shape != (dim,):
            raise ValueError(
                f"mask must be {dim} booleans (True: kept), got {kept.dtype} of shape {tuple(kept.shape)}; "
                "use mask.bool()"
            )
    kept = ~kept if flip else kept
    if bool(kept.all()) or not bool(kept.any()):
        raise ValueError(
            f"mask must keep some coordinates and change others, got all {bool(kept[0])}"
        )
    return kept


def broadcast_context(
    x: Tensor, context: Tensor | None, dims: int = 1
) -> tuple[Tensor, Tensor | None]:
    """x with ``dims`` event axes, and the context, expanded to a common batch shape."""
    if context is None or x.shape[:-dims] == context.shape[:-1]:
        return x, context
    batch = torch.broadcast_shapes(x.shape[:-dims], context.shape[:-1])
    return x.expand(*batch, *x.shape[-dims:]), context.expand(*batch, -1)


class Coupling(Symmetric, Transform):
    """y_kept = x_kept, y_rest = g(x_rest; net(x_kept, context)) for an elementwise g (Dinh et al.
    2015, 2017).

    Args:
        dim: D, at least 2.
        elementwise: g.
        mask: the coordinates that are kept: the first "half", "alternate" ones, or D booleans.
        flip: exchange kept and changed coordinates.
        hidden: the widths of the default conditioner, an MLP whose last layer starts at zero.
        context_dim: the size of the context, 0 for none.
        conditioner: any module (..., kept + context_dim) → (..., changed·g.params); a circular g
            gives it the cosines and sines of the kept angles, (..., 2·kept + context_dim).

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).
    """

    order: Tensor
    back: Tensor

    def __init__(
        self,
        dim: int,
        elementwise: Elementwise,
        mask: Mask = "half",
        flip: bool = False,
        hidden: Sequence[int] = (64, 64),
        context_dim: int = 0,
        conditioner: nn.Module | None = None,
    ) -> None:
        super().__init__()
        kept = coupling_mask(dim, mask, flip)
        self.event_shape, self.context_dim = (dim,), context_dim
        self.elementwise, self.inverse_kind = elementwise, elementwise.inverse_kind
        self.kept, self.changed = int(kept.sum()), int((~kept).sum())
        order = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
        self.register_buffer("order", order)
        self.register_buffer("back", order.argsort())
        # Halves and alternate coordinates are split and joined by slices, which is faster than
        # indexing.
        self._kept_first = bool(kept[: self.kept].all())
        self._kept_last = bool(kept[-self.kept :].all())
        odd = torch.arange(dim) % 2 == 1
        self._kept_odd = bool((kept == odd).all())
        self._alternate = self._kept_odd or bool((kept != odd).all())
        if elementwise.circular:
            self.domain = self.codomain = ANGLES
        inputs = self.kept * (1 + elementwise.circular) + context_dim
        self.conditioner = conditioner or mlp(inputs, hidden, self.changed * elementwise.params)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._alternate:
            even, odd = x[..., ::2], x[..., 1::2]
            return (odd, even) if self._kept_odd else (even, odd)
        if self._kept_last:
            rest, kept = x.split([self.changed, self.kept], -1)
            return kept, rest
        kept, rest = (x if self._kept_first else x[..., self.order]).split(
            [self.kept, self.changed], -1
        )
        return kept, rest

    def _join(self, kept: Tensor, rest: Tensor) -> Tensor:
        if self._alternate:
            even, odd = (rest, kept) if self._kept_odd else (kept, rest)
            pairs = torch.stack([even[..., : odd.shape[-1]], odd], -1).flatten(-2)
            return pairs if even.shape == odd.shape else torch.cat([pairs, even[..., -1:]], -1)
        if self._kept_last:
            return torch.cat([rest, kept], -1)
        x = torch.cat([kept, rest], -1)
        return x if self._kept_first else x[..., self.back]

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context)
        kept, rest = self._split(x)
        read = on_circle(kept) if self.elementwise.circular else kept
        p: Tensor = self.conditioner(read if context is None else torch.cat([read, context], -1))
        p = p.unflatten(-1, (self.changed, self.elementwise.params))
        rest, log_slope = self.elementwise.either(rest, p, inverse)
        return self._join(kept, rest), log_slope.sum(-1)


class ResampledGate(Symmetric, Transform):
    """The gated coupling of MNF with a new mask m ~ Bernoulli(½)^D in every training pass (Louizos
    & Welling 2017).

    h = tanh(f(m ⊙ x)), y = m ⊙ x + (1 − m) ⊙ (γ ⊙ x + (1 − γ) ⊙ μ), ladj = Σ (1 − m)·log γ. The
    ladj is exact given the mask, but the density of y is a mixture over masks, so it is a bound.
    The inverse, and eval mode, use the last mask.

    Args:
        dim: D.
        hidden: the widths of f.
        context_dim: the size of the context, 0 for none.
    """

    ladj_kind = Ladj.bound
    takes_noise = True
    mask: Tensor

    def __init__(self, dim: int, hidden: Sequence[int] = (50,), context_dim: int = 0) -> None:
        super().__init__()
        self.register_buffer("mask", coupling_mask(dim, "alternate"))
        self.event_shape, self.context_dim = (dim,), context_dim
        self.gate = Gate()
        self.conditioner = mlp(dim + context_dim, hidden, 2 * dim, nn.Tanh)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[()]:
        if (
            self.training and not inverse
        ):  # one mask for all rows, as published; it may keep or change all coordinates
            noise = rng.uniform(1, self.mask.shape, next(self.conditioner.parameters()), rows.seed)[
                0
            ]
            self.mask.copy_(noise < 0.5)
        return ()

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context)
        kept = torch.where(self.mask, x, 0.0)
        p: Tensor = self.conditioner(kept if context is None else torch.cat([kept, context], -1))
        y, log_slope = self.gate.either(x, p.unflatten(-1, (x.shape[-1], 2)), inverse)
        return torch.where(self.mask, x, y), torch.where(self.mask, 0.0, log_slope).sum(-1)
