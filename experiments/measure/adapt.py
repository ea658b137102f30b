"""Transforms of zuko, nflows and normflows under the contract of bayou, so that
``bayou.flows.check`` runs on them.

They are recognized by their interface; none of the three libraries is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributions, nn

from bayou.core import rng
from bayou.flows import Cost, Ladj, Map, Rows, Transform

Interval = tuple[float, float]
Pair = tuple[Tensor, Tensor]
REAL: Interval = (-math.inf, math.inf)


def adapt(
    transform: Any,
    event: int | Sequence[int],
    *,
    context_dim: int = 0,
    ladj_kind: Ladj = Ladj.exact,
    forward_kind: Cost = Cost.analytic,
    inverse_kind: Cost = Cost.analytic,
    domain: Interval = REAL,
    codomain: Interval = REAL,
    training: bool = False,
) -> Transform:
    r"""A transform of another library as one of bayou's: ``check(adapt(theirs, 2))``.

    ``forward`` and ``inverse`` are theirs. zuko and nflows go forward from data to base, so that a
    flow over one is ``Flow(base, Inverse(adapt(theirs, dim)))``; normflows goes forward from base
    to data, as bayou does.

    Args:
        transform: of zuko a lazy transform or flow, or what a lazy transform gives (then without
            parameters, and one for ``torch.distributions`` in general); of nflows a transform or
            flow; of normflows a flow layer or a ``NormalizingFlow``.
        event: the shape of one event, or its size: x (..., \*event).
        context_dim: the size of the context that it takes.
        ladj_kind, forward_kind, inverse_kind, domain, codomain: its properties, as for
            ``bayou.flows.Transform``. An estimate draws from torch's global stream, which the seed
            of a call then sets.
        training: keep the module in training mode, if it computes something else than in eval mode.
    """
    sizes = (event,) if isinstance(event, int) else tuple(event)
    if not sizes or any(
        isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise ValueError(
            f"the event must be a size, or the sizes of its axes, all above 0; got {event!r}"
        )
    module, call = _interface(transform)
    adapted = Adapted(module, call, sizes, training)
    adapted.context_dim, adapted.ladj_kind, adapted.takes_noise = (
        context_dim,
        ladj_kind,
        ladj_kind is Ladj.estimate,
    )
    adapted.forward_kind, adapted.inverse_kind = forward_kind, inverse_kind
    adapted.domain, adapted.codomain = domain, codomain
    return adapted


class Adapted(Transform):
    """A transform of another library, and its calling convention."""

    event_shape: tuple[int, ...]

    def __init__(
        self, theirs: nn.Module, call: Call, event: tuple[int, ...], training: bool
    ) -> None:
        super().__init__()
        self.theirs, self.call, self.event_shape, self.keeps_training = (
            theirs,
            call,
            event,
            training,
        )
        self.title = type(theirs.transform if isinstance(theirs, Fixed) else theirs).__name__
        self.train()

    def train(self, mode: bool = True) -> Adapted:
        """Set training or eval mode, unless the adapted module must stay in training mode."""
        super().train(mode)
        if self.keeps_training:
            self.theirs.train()
        return self

    def _forward(self, x: Tensor, context: Tensor | None, *seed: int) -> Pair:
        return self._answer("forward", x, context, *seed)

    def _inverse(self, y: Tensor, context: Tensor | None, *seed: int) -> Pair:
        return self._answer("inverse", y, context, *seed)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (rng.integer(rng.fold(rows.seed, rows.start)),)

    def _answer(
        self, direction: str, x: Tensor, context: Tensor | None, seed: int | None = None
    ) -> Pair:
        batch = x.shape[: x.ndim - len(self.event_shape)]
        if context is not None:
            batch = torch.broadcast_shapes(batch, context.shape[:-1])
            context = context.expand(*batch, self.context_dim).reshape(-1, self.context_dim)
        flat = x.expand(*batch, *self.event_shape).reshape(-1, *self.event_shape)
        if seed is None:
            pair = self.call(self.theirs, direction, flat, context)
        else:
            with rng.isolated(seed, x.device):
                pair = self.call(self.theirs, direction, flat, context)
        y, ladj = self._checked(pair, direction, flat)
        return y.reshape(*batch, *self.event_shape), ladj.expand(len(flat)).reshape(batch)

    def _checked(self, pair: Any, direction: str, x: Tensor) -> Pair:
        if (
            isinstance(pair, tuple)
            and len(pair) == 2
            and all(isinstance(part, Tensor) for part in pair)
        ):
            y, ladj = pair
            if y.shape == x.shape and ladj.shape in ((len(x),), (1,), ()):
                return y, ladj
            got = f"shapes {tuple(y.shape)} and {tuple(ladj.shape)}"
        else:
            got = type(pair).__name__
        raise ValueError(
            f"{direction} of {self.title} gave {got} for x {tuple(x.shape)}, expected (y, ladj) of shapes "
            f"{tuple(x.shape)} and {(len(x),)}; adapt(transform, event) takes bijections, and the shape of one event"
        )


Call = Callable[[Any, str, Tensor, Tensor | None], Any]


def _interface(transform: Any) -> tuple[nn.Module, Call]:
    """The module to call, and how; a ValueError for what has none of the interfaces."""
    name = type(transform).__name__
    if isinstance(transform, Map):
        raise ValueError(f"{name} is already a map of bayou; use it directly")
    if isinstance(transform, distributions.Transform):
        return Fixed(transform), _lazy
    if not isinstance(transform, nn.Module):
        what = f"the class {transform.__name__}" if isinstance(transform, type) else name
        raise ValueError(
            f"adapt takes a transform of zuko, nflows or normflows, an instance; got {what}"
        )
    for inner in ("transform", "_transform"):  # a flow of zuko, of nflows: without its base
        part = getattr(transform, inner, None)
        if isinstance(part, nn.Module) and (
            hasattr(transform, "base") or hasattr(transform, "_distribution")
        ):
            return _interface(part)
    if hasattr(transform, "forward_and_log_det") and hasattr(transform, "inverse_and_log_det"):
        return transform, _model
    if hasattr(transform, "inverse"):
        return transform, _pair
    if hasattr(transform, "inv"):
        return transform, _lazy
    raise ValueError(
        f"{name} has none of the supported interfaces: zuko's (t(context), .inv), nflows' and normflows' "
        "(forward and inverse that give (y, ladj)), normflows' models (forward_and_log_det); pass the transform itself"
    )


class Fixed(nn.Module):
    """A transform of torch.distributions: its tensors are not parameters, and a copy is the same
    object.
    """

    def __init__(self, transform: distributions.Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, context: Tensor | None = None) -> distributions.Transform:
        return self.transform

    def __deepcopy__(self, memo: Any) -> Fixed:
        return self


def _lazy(theirs: Any, direction: str, x: Tensor, context: Tensor | None) -> Any:
    t = theirs(context)
    if not isinstance(t, distributions.Transform):
        return t
    t = t.inv if direction == "inverse" else t
    event = t.domain.event_dim
    if hasattr(t, "call_and_ladj"):
        y, ladj = t.call_and_ladj(x)
    else:
        y = t(x)
        ladj = t.log_abs_det_jacobian(x, y)
    return y, ladj.flatten(1).sum(-1) if event < x.ndim - 1 and ladj.ndim > 1 else ladj


def _pair(theirs: Any, direction: str, x: Tensor, context: Tensor | None) -> Any:
    call = theirs if direction == "forward" else theirs.inverse
    return call(x) if context is None else call(x, context)


def _model(theirs: Any, direction: str, x: Tensor, context: Tensor | None) -> Any:
    call = theirs.forward_and_log_det if direction == "forward" else theirs.inverse_and_log_det
    return call(x) if context is None else call(x, context)
