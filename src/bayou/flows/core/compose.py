"""Compositions of maps: chains, inverses, and maps with parameters from a context."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from bayou.flows.core.nets import mlp
from bayou.flows.core.transform import (
    Event,
    InversionError,
    Label,
    Map,
    Pair,
    Rows,
    Transform,
    common_event,
    concrete,
)
from bayou.modules import Modules


class Direction(nn.Module):
    """One direction of a map as a module, for ``functional_call``."""

    def __init__(self, transform: Map, method: str) -> None:
        super().__init__()
        self.transform, self.method = transform, method

    def forward(self, *args: Any, **options: Any) -> Pair:
        pair: Pair = getattr(self.transform, self.method)(*args, **options)
        return pair


class Composite(Map):
    """A map whose properties follow from those of its parts."""

    event_shape: Event  # if it is a transform
    label = Label()
    opposite = Label()

    if not TYPE_CHECKING:

        def __new__(cls, *parts: Any, **options: Any) -> Any:
            """For a bijective class, an instance of the general one if a part is not a
            ``Transform``.
            """
            maps = [part for part in (*parts, *options.values()) if isinstance(part, Map)]
            if issubclass(cls, Transform) and not all(isinstance(part, Transform) for part in maps):
                return cls.__base__(*parts, **options)
            return object.__new__(cls)

    def _describe(self, event_in: Event, event_out: Event, label: Label, opposite: Label) -> None:
        if isinstance(self, Transform):
            self.event_shape = event_out
        else:
            self.event_in, self.event_out = event_in, event_out
        self.label, self.opposite, self.ladj_kind = label, opposite, label.kind


class MapChain(Composite):
    """y = f_T(... f_1(x)) for maps whose events agree; the term is the sum."""

    def __init__(self, *transforms: Map) -> None:
        super().__init__()
        if not transforms:
            raise ValueError("Chain got no transforms; pass at least one")
        flat: list[Map] = []
        for t in transforms:
            flat += t.transforms if isinstance(t, MapChain) else [t]
        event = flat[0].event_out
        for i, t in enumerate(flat[1:], 1):
            agreed = common_event(event, t.event_in)
            if agreed is None:
                raise ValueError(
                    f"the events of a chain do not match: link {i} returns {event}, link {i + 1} takes {t.event_in}; "
                    "build both with the same size"
                )
            event = agreed if isinstance(t, Transform) else t.event_out
        contexts = {t.context_dim for t in flat if t.context_dim > 0}
        if len(contexts) > 1:
            raise ValueError(
                f"the links of a chain take contexts of different sizes {sorted(contexts)}; use one size"
            )
        self.transforms: Modules[Any] = nn.ModuleList(flat)  # type: ignore[assignment]
        self.context_dim = max(contexts, default=0)
        self.forward_kind = max(t.forward_kind for t in flat)
        self.inverse_kind = max(t.inverse_kind for t in flat)
        self.domain, self.codomain = flat[0].domain, flat[-1].codomain
        self.takes_noise = any(t.takes_noise for t in flat)
        self.accuracy = sum(t.accuracy for t in flat)
        self.whole_in, self.whole_out = flat[0].whole_in, flat[-1].whole_out
        label, opposite = (
            reduce(or_, (t.label for t in flat)),
            reduce(or_, (t.opposite for t in flat)),
        )
        self._describe(flat[0].event_in, event, label, opposite)
        self._no_noise: tuple[tuple[()], ...] = ((),) * len(flat)

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        terms = []
        for t, own in zip(self.transforms, noise if len(noise) else self._no_noise, strict=True):
            x, term = t._forward(x, context if t.context_dim else None, *own)
            terms.append(term)
        return x, sum(terms[1:], terms[0])

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        terms = []
        for t, own in zip(
            reversed(self.transforms),
            reversed(noise if len(noise) else self._no_noise),
            strict=True,
        ):
            y, term = t._inverse(y, context if t.context_dim else None, *own)
            terms.append(term)
        return y, sum(terms[1:], terms[0])

    def check_values(self, x: Tensor, inverse: bool) -> None:
        self.transforms[-1 if inverse else 0].check_values(x, inverse)

    def in_image(self, y: Tensor) -> Tensor:
        """Whether y is in the image of the last link."""
        found: Tensor = self.transforms[-1].in_image(y)
        return found

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return tuple(
            t._noise(rows.fold(i), inverse) if t.takes_noise else ()
            for i, t in enumerate(self.transforms)
        )


class Chain(MapChain, Transform):
    """y = f_T(... f_1(x)), with the sum of the ladjs.

    Args:
        transforms: f_1, ..., f_T; the output event of each must match the input event of the next.
            If one of them is not a ``Transform``, the result is a ``MapChain``.

    Shapes: x, y (..., *event), ladj (...).
    """


class MapInverse(Composite):
    """The same map with its two directions exchanged."""

    def __init__(self, transform: Map) -> None:
        super().__init__()
        self.transform = transform
        self.takes_noise, self.accuracy = transform.takes_noise, transform.accuracy
        self.context_dim = transform.context_dim
        self.whole_in, self.whole_out = transform.whole_out, transform.whole_in
        self.forward_kind, self.inverse_kind = transform.inverse_kind, transform.forward_kind
        self.domain, self.codomain = transform.codomain, transform.domain
        self._describe(transform.event_out, transform.event_in, transform.opposite, transform.label)

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self.transform._inverse(x, context, *noise)

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self.transform._forward(y, context, *noise)

    def check_values(self, x: Tensor, inverse: bool) -> None:
        if self.whole_out if inverse else self.whole_in:
            self.transform.check_values(x, not inverse)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return self.transform._noise(rows, not inverse)


class Inverse(MapInverse, Transform):
    """y = f⁻¹(x): a bijection with its directions exchanged.

    Args:
        transform: f. If it is not a ``Transform``, the result is a ``MapInverse``.
    """


class MapConditional(Composite):
    """y = f(x; θ + h(context)) for any map f, with parameters from a hypernetwork h that starts at
    0.
    """

    def __init__(self, transform: Map, context_dim: int, hidden: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        if transform.context_dim:
            raise ValueError(
                f"{type(transform).__name__} already takes a context; use it without Conditional"
            )
        self.shapes = {name: p.shape for name, p in transform.named_parameters()}
        if not self.shapes:
            raise ValueError(
                f"{type(transform).__name__} has no parameters that could depend on a context"
            )
        self.transform = transform
        # A tuple hides the two views from the module tree, so that their parameters are not saved
        # three times.
        self._directions = (Direction(transform, "_forward"), Direction(transform, "_inverse"))
        self.hypernet = mlp(context_dim, hidden, sum(s.numel() for s in self.shapes.values()))
        self.context_dim, self.takes_noise, self.accuracy = (
            context_dim,
            transform.takes_noise,
            transform.accuracy,
        )
        self.whole_in, self.whole_out = transform.whole_in, transform.whole_out
        self.forward_kind, self.inverse_kind = transform.forward_kind, transform.inverse_kind
        self.domain, self.codomain = transform.domain, transform.codomain
        self._describe(transform.event_in, transform.event_out, transform.label, transform.opposite)

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._conditioned(
            self._directions[0], x, context, noise, self.event_in, self.event_out
        )

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._conditioned(
            self._directions[1], y, context, noise, self.event_out, self.event_in
        )

    def check_values(self, x: Tensor, inverse: bool) -> None:
        self.transform.check_values(x, inverse)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return self.transform._noise(rows, inverse)

    def _conditioned(
        self,
        direction: Direction,
        x: Tensor,
        context: Tensor | None,
        noise: Any,
        taken: Event,
        given: Event,
    ) -> Pair:
        batch = torch.broadcast_shapes(x.shape[: x.ndim - len(taken)], context.shape[:-1])  # type: ignore[union-attr]
        event = x.shape[x.ndim - len(taken) :]
        if 0 in batch:  # some operations do not support vmap over an empty axis
            return x.new_zeros(*batch, *(event if None in given else given)), x.new_zeros(batch)
        flat = (
            self.hypernet(context).expand(*batch, -1).flatten(0, -2)
            if batch
            else self.hypernet(context)[None]
        )
        deltas = flat.split([s.numel() for s in self.shapes.values()], -1)
        params = {
            f"transform.{name}": p + delta.reshape(-1, *p.shape)
            for (name, p), delta in zip(self.transform.named_parameters(), deltas, strict=True)
        }
        rows = x.expand(*batch, *event).reshape(-1, *event)
        noise = tree_map(lambda part: part.reshape(-1, *part.shape[len(batch) :]), noise)
        call = vmap(
            lambda values, row, noise: functional_call(direction, values, (row, None, *noise))
        )
        y, term = call(params, rows, noise)
        if concrete(term.isfinite().all()) is False:  # in vmap a failed inversion returns NaN
            raise InversionError(
                "a conditional inversion did not converge and returned NaN; check the range of the input"
            )
        return y.reshape(*batch, *y.shape[1:]), term.reshape(batch)


class Conditional(MapConditional, Transform):
    """y = f(x; θ + h(context)): any transform with parameters from a hypernetwork h, which starts
    at 0.

    It uses ``vmap`` over stacked parameters, so memory grows with batch × number of parameters;
    coupling and autoregressive flows take a context directly, at lower cost.

    Args:
        transform: f. If it is not a ``Transform``, the result is a ``MapConditional``.
        context_dim: the size of the context.
        hidden: the widths of the hidden layers of h.

    Shapes: x, y (..., *event), context (..., context_dim), ladj (...).
    """
