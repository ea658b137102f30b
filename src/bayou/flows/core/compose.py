"""Compositions of maps: chains, inverses, and maps with parameters from a context."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from bayou.core.modules import Modules
from bayou.flows.core.nets import mlp
from bayou.flows.core.transform import (
    Cost,
    Event,
    InversionError,
    Label,
    Ladj,
    Map,
    Pair,
    Rows,
    Transform,
    batch_shape,
    common_event,
    read_flag,
)


class Direction(nn.Module):
    """One direction of a map as a module, for ``functional_call``.

    Args:
        transform: the map.
        method: the name of its method, such as "forward".
    """

    def __init__(self, transform: Map, method: str) -> None:
        super().__init__()
        self.transform = transform
        self.method = method

    def forward(self, *args: Any, **options: Any) -> Pair:
        pair: Pair = getattr(self.transform, self.method)(*args, **options)
        return pair


class Composite(Map):
    """A map whose properties follow from those of the maps that it is made of."""

    event_shape: Event  # if it is a transform
    label = Label()
    opposite = Label()

    if not TYPE_CHECKING:

        def __new__(cls, *links: Any, **options: Any) -> Any:
            """Create an instance of the general class if a link is not a ``Transform``.

            ``Chain(f, g)`` is a ``MapChain`` unless f and g are bijections.
            """
            maps = [link for link in (*links, *options.values()) if isinstance(link, Map)]
            if issubclass(cls, Transform) and not all(isinstance(link, Transform) for link in maps):
                return cls.__base__(*links, **options)
            return object.__new__(cls)

    def _describe(self, event_in: Event, event_out: Event, label: Label, opposite: Label) -> None:
        """Set the events and the labels."""
        if isinstance(self, Transform):
            self.event_shape = event_out
        else:
            self.event_in = event_in
            self.event_out = event_out
        self.label = label
        self.opposite = opposite
        self.ladj_kind: Ladj = label.kind

    def _describe_links(self, links: list[Map]) -> None:
        """Set the properties of maps that are applied one after another, but for the context."""
        event = _join_events(links)
        self.forward_kind: Cost = max(link.forward_kind for link in links)
        self.inverse_kind: Cost = max(link.inverse_kind for link in links)
        self.domain: tuple[float, float] = links[0].domain
        self.codomain: tuple[float, float] = links[-1].codomain
        self.takes_noise: bool = any(link.takes_noise for link in links)
        self.accuracy: float = sum(link.accuracy for link in links)
        self.whole_in: bool = links[0].whole_in
        self.whole_out: bool = links[-1].whole_out
        label = reduce(or_, (link.label for link in links))
        opposite = reduce(or_, (link.opposite for link in links))
        self._describe(links[0].event_in, event, label, opposite)


class MapChain(Composite):
    """A composition y = f_T(... f_1(x)) of maps whose events agree; its term is the sum.

    Args:
        transforms: f_1, ..., f_T; links that are chains are flattened.

    Shapes: x (..., *event_in of f_1), y (..., *event_out of f_T), term (...).
    """

    def __init__(self, *transforms: Map) -> None:
        super().__init__()
        if not transforms:
            raise ValueError("Chain got no transforms; pass at least one")
        links: list[Map] = []
        for transform in transforms:
            links += transform.transforms if isinstance(transform, MapChain) else [transform]
        self._describe_links(links)
        contexts = {link.context_dim for link in links if link.context_dim > 0}
        if len(contexts) > 1:
            raise ValueError(
                f"the links of a chain take contexts of different sizes {sorted(contexts)}; use "
                "one size"
            )
        self.transforms: Modules[Any] = nn.ModuleList(links)  # type: ignore[assignment]
        self.context_dim: int = max(contexts, default=0)
        self._no_noise: tuple[tuple[()], ...] = ((),) * len(links)

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        noises = noise if len(noise) else self._no_noise
        terms = []
        for link, link_noise in zip(self.transforms, noises, strict=True):
            x, term = link._forward(x, context if link.context_dim else None, *link_noise)
            terms.append(term)
        return x, sum(terms[1:], terms[0])

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        noises = noise if len(noise) else self._no_noise
        terms = []
        for link, link_noise in zip(reversed(self.transforms), reversed(noises), strict=True):
            y, term = link._inverse(y, context if link.context_dim else None, *link_noise)
            terms.append(term)
        return y, sum(terms[1:], terms[0])

    def check_values(self, x: Tensor, inverse: bool) -> None:
        """Raise a ValueError for values outside the domain of the link that reads them.

        Args:
            x: the input of a direction.
            inverse: whether it is that of ``inverse``.
        """
        first = self.transforms[-1 if inverse else 0]
        first.check_values(x, inverse)

    def in_image(self, y: Tensor) -> Tensor:
        """Return whether y is in the image of the last link.

        Args:
            y: (..., *event_out).
        """
        is_inside: Tensor = self.transforms[-1].in_image(y)
        return is_inside

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return tuple(
            link._noise(rows.fold(i), inverse) if link.takes_noise else ()
            for i, link in enumerate(self.transforms)
        )


def _join_events(links: list[Map]) -> Event:
    """Return the event that a chain returns, with the sizes that its links know."""
    event = links[0].event_out
    for i, link in enumerate(links[1:], 1):
        agreed = common_event(event, link.event_in)
        if agreed is None:
            raise ValueError(
                f"the events of a chain do not match: link {i} returns {event}, link {i + 1} takes "
                f"{link.event_in}; build both with the same size"
            )
        event = agreed if isinstance(link, Transform) else link.event_out
    return event


class Chain(MapChain, Transform):
    """A composition of bijections, y = f_T(... f_1(x)), with the sum of the ladjs.

    Args:
        transforms: f_1, ..., f_T; the output event of each must match the input event of the next.
            If one of them is not a ``Transform``, the result is a ``MapChain``.

    Shapes: x, y (..., *event), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Chain, DiagonalAffine, realnvp
        >>> y, ladj = Chain(realnvp(4), DiagonalAffine(4))(torch.zeros(10, 4))
        >>> y.shape, ladj.shape
        (torch.Size([10, 4]), torch.Size([10]))
    """


class MapInverse(Composite):
    """The same map with its two directions exchanged.

    Args:
        transform: the map.
    """

    def __init__(self, transform: Map) -> None:
        super().__init__()
        self.transform = transform
        self.takes_noise: bool = transform.takes_noise
        self.accuracy: float = transform.accuracy
        self.context_dim: int = transform.context_dim
        self.whole_in: bool = transform.whole_out
        self.whole_out: bool = transform.whole_in
        self.forward_kind: Cost = transform.inverse_kind
        self.inverse_kind: Cost = transform.forward_kind
        self.domain: tuple[float, float] = transform.codomain
        self.codomain: tuple[float, float] = transform.domain
        self._describe(transform.event_out, transform.event_in, transform.opposite, transform.label)

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self.transform._inverse(x, context, *noise)

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self.transform._forward(y, context, *noise)

    def check_values(self, x: Tensor, inverse: bool) -> None:
        """Raise a ValueError for values outside the domain of a direction.

        Args:
            x: the input of a direction.
            inverse: whether it is that of ``inverse``.
        """
        is_whole = self.whole_out if inverse else self.whole_in
        if is_whole:
            self.transform.check_values(x, not inverse)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return self.transform._noise(rows, not inverse)


class Inverse(MapInverse, Transform):
    """The inverse of a bijection, y = f⁻¹(x): its directions exchanged.

    Args:
        transform: f. If it is not a ``Transform``, the result is a ``MapInverse``.

    Shapes: x, y (..., *event), ladj (...).

    Example:
        >>> from bayou.flows import Inverse, iaf
        >>> Inverse(iaf(4)).forward_kind  # fast densities, slow draws
        <Cost.autoregressive: 1>
    """


class MapConditional(Composite):
    """Any map f with parameters from a hypernetwork, y = f(x; θ + h(context)).

    Args:
        transform: f.
        context_dim: the size of the context.
        hidden: the widths of the hidden layers of h, (64,) by default; the last layer starts at 0.
    """

    def __init__(self, transform: Map, context_dim: int, hidden: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        if transform.context_dim:
            raise ValueError(
                f"{type(transform).__name__} already takes a context; use it without Conditional"
            )
        self.shapes: dict[str, torch.Size] = {
            name: p.shape for name, p in transform.named_parameters()
        }
        if not self.shapes:
            raise ValueError(
                f"{type(transform).__name__} has no parameters that could depend on a context"
            )
        self.transform = transform
        # A tuple hides the two views from the module tree, so that their parameters are not saved
        # three times.
        self._directions = (Direction(transform, "_forward"), Direction(transform, "_inverse"))
        self.hypernet: nn.Sequential = mlp(
            context_dim, hidden, sum(s.numel() for s in self.shapes.values())
        )
        self.context_dim = context_dim
        self._describe_links([transform])

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._call(self._directions[0], x, context, noise, self.event_in, self.event_out)

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._call(self._directions[1], y, context, noise, self.event_out, self.event_in)

    def check_values(self, x: Tensor, inverse: bool) -> None:
        """Raise a ValueError for values outside the domain of a direction.

        Args:
            x: the input of a direction.
            inverse: whether it is that of ``inverse``.
        """
        self.transform.check_values(x, inverse)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return self.transform._noise(rows, inverse)

    def _parameters_of_rows(self, context: Tensor, batch: torch.Size) -> dict[str, Tensor]:
        """Return θ + h(context) for every row of a batch, as parameters of a ``Direction``."""
        flat = self.hypernet(context)
        flat = flat.expand(*batch, -1).flatten(0, -2) if batch else flat[None]
        deltas = flat.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            f"transform.{name}": p + delta.reshape(-1, *p.shape)
            for (name, p), delta in zip(self.transform.named_parameters(), deltas, strict=True)
        }

    def _call(
        self,
        direction: Direction,
        x: Tensor,
        context: Tensor | None,
        noise: Any,
        input_event: Event,
        output_event: Event,
    ) -> Pair:
        """Return the result of a direction, row by row under vmap."""
        x_batch = batch_shape(x, input_event)
        batch = torch.broadcast_shapes(x_batch, context.shape[:-1])  # type: ignore[union-attr]
        event = x.shape[len(x_batch) :]
        if 0 in batch:  # some operations do not support vmap over an empty axis
            shape = event if None in output_event else output_event
            return x.new_zeros(*batch, *shape), x.new_zeros(batch)
        parameters = self._parameters_of_rows(context, batch)  # type: ignore[arg-type]
        rows = x.expand(*batch, *event).reshape(-1, *event)
        noise = tree_map(lambda value: value.reshape(-1, *value.shape[len(batch) :]), noise)
        call = vmap(
            lambda values, row, noise: functional_call(direction, values, (row, None, *noise))
        )
        y, term = call(parameters, rows, noise)
        if read_flag(term.isfinite().all()) is False:  # in vmap a failed inversion returns NaN
            raise InversionError(
                "a conditional inversion did not converge and returned NaN; check the range of the "
                "input"
            )
        return y.reshape(*batch, *y.shape[1:]), term.reshape(batch)


class Conditional(MapConditional, Transform):
    """Any bijection with parameters from a hypernetwork, y = f(x; θ + h(context)).

    It uses ``vmap`` over stacked parameters, so memory grows with batch × number of parameters;
    coupling and autoregressive flows take a context directly, at lower cost.

    Args:
        transform: f. If it is not a ``Transform``, the result is a ``MapConditional``.
        context_dim: the size of the context.
        hidden: the widths of the hidden layers of h, (64,) by default; the last layer starts at 0.

    Shapes: x, y (..., *event), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Conditional, radial
        >>> transform = Conditional(radial(4), context_dim=3)
        >>> y, ladj = transform(torch.zeros(10, 4), torch.zeros(10, 3))
        >>> y.shape, ladj.shape
        (torch.Size([10, 4]), torch.Size([10]))
    """
