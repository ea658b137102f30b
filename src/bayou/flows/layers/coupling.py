"""Coupling flows: some coordinates determine the map of the remaining ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows.core.arguments import check_size
from bayou.flows.core.nets import mlp
from bayou.flows.core.transform import (
    ANGLES,
    Cost,
    Event,
    Ladj,
    Map,
    Pair,
    Rows,
    Symmetric,
    Transform,
    broadcast_context,
    embed_angles,
)
from bayou.flows.layers.elementwise import Elementwise, Gate

Mask = Literal["half", "alternate"] | Tensor | Sequence[bool]


def coupling_mask(dim: int, mask: Mask = "half", flip: bool = False) -> Tensor:
    """Return the boolean mask of a coupling, True where a coordinate is kept.

    Args:
        dim: the number of coordinates D, at least 2.
        mask: the kept coordinates: "half" (the first D // 2, the default), "alternate" (0, 2, ...)
            or D booleans.
        flip: whether to exchange kept and changed coordinates; False by default.

    Returns:
        Booleans (D,), of which at least one is True and one is False.

    Raises:
        ValueError: for fewer than 2 coordinates, or a mask that keeps all or none of them.

    Example:
        >>> from bayou.flows import coupling_mask
        >>> coupling_mask(4, "alternate")
        tensor([ True, False,  True, False])
    """
    if check_size(dim, "a coupling") < 2:
        raise ValueError(
            f"a coupling needs at least 2 dimensions, got {dim}; in one dimension use an "
            "autoregressive flow (naf, spline_autoregressive) or DiagonalAffine"
        )
    kept = _read_mask(dim, mask)
    if flip:
        kept = ~kept
    if bool(kept.all()) or not bool(kept.any()):
        raise ValueError(
            f"mask must keep some coordinates and change others, got all {bool(kept[0])}"
        )
    return kept


def _read_mask(dim: int, mask: Mask) -> Tensor:
    """Return a mask as booleans (D,)."""
    if isinstance(mask, str):
        if mask == "half":
            return torch.arange(dim) < dim // 2
        if mask == "alternate":
            return torch.arange(dim) % 2 == 0
        raise ValueError(f'mask must be "half", "alternate" or {dim} booleans, got {mask!r}')
    kept = torch.as_tensor(mask)
    if kept.dtype != torch.bool or kept.shape != (dim,):
        raise ValueError(
            f"mask must be {dim} booleans (True: kept), got {kept.dtype} of shape "
            f"{tuple(kept.shape)}; use mask.bool()"
        )
    return kept


def _join_context(x: Tensor, context: Tensor | None) -> Tensor:
    """Concatenate x and the context, if there is one."""
    if context is None:
        return x
    return torch.cat([x, context], -1)


class Coupling(Symmetric, Transform):
    """A coupling: y_kept = x_kept, y_rest = g(x_rest; net(x_kept, context)).

    The elementwise g is increasing, so that the map is a bijection with
    ladj = Σ log ∂y_rest/∂x_rest. Both directions cost one pass of the network (Dinh et al. 2015,
    NICE; Dinh et al. 2017, RealNVP).

    Args:
        dim: the number of coordinates D, at least 2.
        elementwise: g.
        mask: the coordinates that are kept: the first "half" (the default), "alternate" ones, or D
            booleans.
        flip: whether to exchange kept and changed coordinates; False by default.
        hidden: the widths of the hidden layers of the default conditioner, (64, 64) by default: an
            MLP whose last layer starts at zero.
        context_dim: the size of the context; 0, the default, for none.
        conditioner: a network to use instead, (..., kept + context_dim) → (..., changed·g.params);
            a circular g gives it the cosines and sines of the kept angles,
            (..., 2·kept + context_dim).

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Affine, Coupling
        >>> coupling = Coupling(4, Affine(), mask="alternate")
        >>> y, ladj = coupling(torch.zeros(10, 4))
        >>> y.shape, ladj.shape
        (torch.Size([10, 4]), torch.Size([10]))
    """

    codomain: tuple[float, float]

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
        self.event_shape: Event = (dim,)
        self.context_dim = context_dim
        self.elementwise = elementwise
        self.inverse_kind: Cost = elementwise.inverse_kind
        self.kept: int = int(kept.sum())
        self.changed: int = int((~kept).sum())
        order = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
        self.register_buffer("order", order)
        self.register_buffer("back", order.argsort())
        # Halves and alternate coordinates are split and joined by slices, which is faster than
        # indexing. The group with coordinate 0 comes first.
        self._keeps_first = bool(kept[0])
        is_first = kept == kept[0]
        coordinates = torch.arange(dim)
        self._alternates = torch.equal(is_first, coordinates % 2 == 0)
        self._is_half = torch.equal(is_first, coordinates < is_first.sum())
        if elementwise.circular:
            self.domain = self.codomain = ANGLES
        inputs = self.kept * (1 + elementwise.circular) + context_dim
        self.conditioner: nn.Module | nn.Sequential = conditioner or mlp(
            inputs, hidden, self.changed * elementwise.params
        )

    def _split(self, x: Tensor) -> Pair:
        """Return the kept and the remaining coordinates of x."""
        if self._alternates:
            first, second = x[..., ::2], x[..., 1::2]
        elif self._is_half:
            size = self.kept if self._keeps_first else self.changed
            first, second = x[..., :size], x[..., size:]
        else:
            kept, rest = x[..., self.order].split([self.kept, self.changed], -1)
            return kept, rest
        if self._keeps_first:
            return first, second
        return second, first

    def _join(self, kept: Tensor, rest: Tensor) -> Tensor:
        """Return the vector with these kept and remaining coordinates."""
        first, second = (kept, rest) if self._keeps_first else (rest, kept)
        if self._alternates:
            return _interleave(first, second)
        if self._is_half:
            return torch.cat([first, second], -1)
        return torch.cat([kept, rest], -1)[..., self.back]

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context)
        kept, rest = self._split(x)
        features = kept
        if self.elementwise.circular:
            features = embed_angles(kept)
        p: Tensor = self.conditioner(_join_context(features, context))
        p = p.unflatten(-1, (self.changed, self.elementwise.params))
        rest, log_slope = self.elementwise.either(rest, p, inverse)
        return self._join(kept, rest), log_slope.sum(-1)


def couple_together(couplings: Sequence[Coupling], x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply couplings of several flows at once, forward.

    Only the networks are called one by one: the elementwise maps of all flows are one operation,
    which for small vectors takes as long as that of one flow.

    Args:
        couplings: G couplings for which ``can_couple_together`` holds.
        x: the vectors of all flows, one after another, (..., ΣD).

    Returns:
        The results (..., ΣD), and the ladj of each flow, (G, ...).
    """
    elementwise = couplings[0].elementwise
    layouts = tuple((c._alternates, c._keeps_first, c.kept, c.changed) for c in couplings)
    order, back = _joint_order(layouts, x.device)
    kept_sizes = [coupling.kept for coupling in couplings]
    changed_sizes = [coupling.changed for coupling in couplings]
    sizes = [sum(kept_sizes), sum(changed_sizes)]
    kept, rest = x.index_select(-1, order).split(sizes, -1)
    parameters = [
        coupling.conditioner(inputs)
        for coupling, inputs in zip(couplings, kept.split(kept_sizes, -1), strict=True)
    ]
    p = torch.cat(parameters, -1).unflatten(-1, (sizes[1], elementwise.params))
    rest, log_slope = elementwise.forward(rest, p)
    ladj = torch.stack([slopes.sum(-1) for slopes in log_slope.split(changed_sizes, -1)])
    return torch.cat([kept, rest], -1).index_select(-1, back), ladj


def can_couple_together(couplings: Sequence[Map]) -> bool:
    """Return whether ``couple_together`` applies: couplings of halves or alternate coordinates.

    Their elementwise maps must be equal, and none has a context.

    Args:
        couplings: one map of each flow.
    """
    first = couplings[0]
    if type(first) is not Coupling:
        return False
    return all(
        type(coupling) is Coupling
        and coupling.elementwise == first.elementwise
        and coupling.context_dim == 0
        and not coupling.elementwise.circular
        and (coupling._alternates or coupling._is_half)
        for coupling in couplings
    )


@lru_cache(maxsize=64)
def _joint_order(layouts: tuple[tuple[bool, bool, int, int], ...], device: torch.device) -> Pair:
    """Return the order with all kept coordinates first, and its inverse.

    Args:
        layouts: of each coupling whether every second coordinate is kept, instead of one half,
            whether coordinate 0 is, and the numbers of kept and of changed coordinates.
        device: the device of the vectors.
    """
    kept_parts = []
    changed_parts = []
    start = 0
    for alternates, keeps_first, kept, changed in layouts:
        coordinates = torch.arange(start, start + kept + changed)
        first_size = kept if keeps_first else changed
        if alternates:
            first, second = coordinates[::2], coordinates[1::2]
        else:
            first, second = coordinates[:first_size], coordinates[first_size:]
        kept_parts.append(first if keeps_first else second)
        changed_parts.append(second if keeps_first else first)
        start += kept + changed
    order = torch.cat(kept_parts + changed_parts)
    return order.to(device), order.argsort().to(device)


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """Return the vector with these even and odd coordinates; ``even`` may have one more."""
    pairs = torch.stack([even[..., : odd.shape[-1]], odd], -1).flatten(-2)
    if even.shape == odd.shape:
        return pairs
    return torch.cat([pairs, even[..., -1:]], -1)


class ResampledGate(Symmetric, Transform):
    """The gated coupling of multiplicative normalizing flows, with a random mask.

    h = tanh(f(m ⊙ x)), y = m ⊙ x + (1 − m) ⊙ (γ ⊙ x + (1 − γ) ⊙ μ), ladj = Σ (1 − m)·log γ, with a
    new mask m ~ Bernoulli(½)^D in every training pass (Louizos & Welling 2017). The ladj is exact
    given the mask, but the density of y is a mixture over masks, so it is a bound. The inverse, and
    eval mode, use the last mask.

    Args:
        dim: the number of coordinates D, at least 2.
        hidden: the widths of the hidden layers of f, (50,) by default.
        context_dim: the size of the context; 0, the default, for none.

    Shapes: x, y (..., D), context (..., context_dim), ladj (...).
    """

    ladj_kind = Ladj.bound
    takes_noise = True
    mask: Tensor

    def __init__(self, dim: int, hidden: Sequence[int] = (50,), context_dim: int = 0) -> None:
        super().__init__()
        self.register_buffer("mask", coupling_mask(dim, "alternate"))
        self.event_shape: Event = (dim,)
        self.context_dim = context_dim
        self.gate: Gate = Gate()
        self.conditioner: nn.Sequential = mlp(dim + context_dim, hidden, 2 * dim, nn.Tanh)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[()]:
        """Draw the mask of a training pass, which all rows share."""
        if self.training and not inverse:
            parameter = next(self.conditioner.parameters())
            noise = rng.uniform(1, self.mask.shape, parameter, rows.seed)[0]
            self.mask.copy_(noise < 0.5)  # as published; it may keep or change all coordinates
        return ()

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context)
        kept = torch.where(self.mask, x, 0.0)
        p: Tensor = self.conditioner(_join_context(kept, context))
        y, log_slope = self.gate.either(x, p.unflatten(-1, (x.shape[-1], 2)), inverse)
        return torch.where(self.mask, x, y), torch.where(self.mask, 0.0, log_slope).sum(-1)
