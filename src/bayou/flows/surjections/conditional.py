"""Conditional distributions, and the base class of surjections, whose inverse draws from one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, overload

from torch import Tensor, nn

from bayou.flows.core.bases import StandardNormal, Uniform
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Label, Ladj, Map, Pair, Rows
from bayou.flows.layers.linear import DiagonalAffine


class ConditionalDistribution(nn.Module, ABC):
    r"""p(x | y), with the noise of a draw as an argument.

    Shapes: x (..., \*event), y (..., \*given) with batches that broadcast, log p (...). The
    argument ``given`` is the number of event axes of y.
    """

    event: tuple[int, ...]  # of x
    levels: int | None = (
        None  # x has integers 0 .. levels − 1, stored as floats; None: real numbers
    )

    def accepts(self, event: tuple[int, ...], given: tuple[int, ...], who: str) -> Self:
        """Itself, or a ValueError unless it is a distribution of this event, conditional on an
        event of shape given.
        """
        if self.event != event:
            raise ValueError(
                f"{who} needs a distribution of events {event}, got one of events {self.event}"
            )
        return self

    @abstractmethod
    def noise(self, rows: Rows, *copies: int) -> Tensor:
        r"""The noise of one draw for every row: (\*rows, \*copies, \*noise)."""

    @abstractmethod
    def draw(self, noise: Tensor, y: Tensor, given: int) -> Pair:
        """x and log p(x | y)."""

    @abstractmethod
    def log_prob(self, x: Tensor, y: Tensor, given: int) -> Tensor:
        """log p(x | y)."""

    @abstractmethod
    def center(self, y: Tensor, given: int) -> Tensor:
        """One x for every y, without noise: the mean if it is known, else the image of the center
        of the noise.
        """


class ConditionalFlow(ConditionalDistribution):
    r"""q(x | y): a flow with context ``net(y)``.

    Args:
        flow: a flow with a base without parameters, ``StandardNormal`` or ``Uniform``; without
            context it ignores y.
        net: from y to the context, by default y itself, flattened.

    Shapes: x (..., \*event), y (..., \*given), context (..., context_dim), log q (...).
    """

    def __init__(self, flow: Flow, net: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        if type(flow.base) not in (StandardNormal, Uniform):
            raise ValueError(
                f"a conditional distribution needs a base without parameters, StandardNormal or Uniform, got "
                f"{type(flow.base).__name__}; start the transform with a DiagonalAffine"
            )
        if flow.transform.takes_noise:
            raise ValueError(
                f"{type(flow.transform).__name__} takes noise; use a flow of transforms"
            )
        self.flow, self.net = flow, net

    @property
    def event(self) -> tuple[int, ...]:  # type: ignore[override]
        """The event of x."""
        return self.flow.event_shape

    def accepts(self, event: tuple[int, ...], given: tuple[int, ...], who: str) -> Self:
        super().accepts(event, given, who)
        width = self.flow.transform.context_dim
        if self.net is None and width not in (0, math.prod(given)):
            raise ValueError(
                f"{who} passes its distribution an event {given} as context, {math.prod(given)} numbers, and the flow "
                f"takes {width}; build it with context_dim={math.prod(given)}, or pass ConditionalFlow(flow, net)"
            )
        return self

    def noise(self, rows: Rows, *copies: int) -> Tensor:
        base = self.flow.base
        if isinstance(base, Uniform):
            return base.low + (base.high - base.low) * open_uniform(
                rows, *copies, *base.event_shape
            )
        return rows.normal(*copies, *base.event_shape)

    def draw(self, noise: Tensor, y: Tensor, given: int) -> Pair:
        x, ladj = self.flow.transform._forward(noise, self._context(y, given))
        return x, self.flow.base.log_prob(noise) - ladj

    def log_prob(self, x: Tensor, y: Tensor, given: int) -> Tensor:
        z, ladj = self.flow.transform._inverse(x, self._context(y, given))
        return self.flow.base.log_prob(z) + ladj

    def center(self, y: Tensor, given: int) -> Tensor:
        base = self.flow.base
        middle = (base.low + base.high) / 2 if isinstance(base, Uniform) else 0.0
        noise = y.new_full((*y.shape[: y.ndim - given], *base.event_shape), middle)
        return self.flow.transform._forward(noise, self._context(y, given))[0]

    def _context(self, y: Tensor, given: int) -> Tensor | None:
        if not self.flow.transform.context_dim:
            return None
        return y.flatten(-given) if self.net is None else self.net(y)


@overload
def as_conditional(q: ConditionalFlow | Flow) -> ConditionalFlow: ...
@overload
def as_conditional(q: ConditionalDistribution | Flow) -> ConditionalDistribution: ...
def as_conditional(q: ConditionalDistribution | Flow) -> ConditionalDistribution:
    """A flow as a distribution conditional on its context."""
    return ConditionalFlow(q) if isinstance(q, Flow) else q


def open_uniform(rows: Rows, *event: int) -> Tensor:
    """Uniform noise on the open interval (0, 1), so that logarithms are finite."""
    u = rows.uniform(*event)
    eps = 2.0**-24
    return eps + (1 - 2 * eps) * u


def normal(event: tuple[int, ...]) -> Flow:
    """N(mean, std²) with learned mean and std: the default distribution of an event."""
    if len(event) != 1:
        raise ValueError(
            f"there is no default distribution of events {event}; pass a flow over them"
        )
    return Flow(StandardNormal(event), DiagonalAffine(*event))


class Surjection(Map):
    """A many-to-one map y = f(x) whose inverse draws x ~ q(x|y): its term −log q(x|y) gives a
    bound.
    """

    takes_noise = True
    ladj_kind = Ladj.bound
    opposite = Label()  # Inverse(self): exact
    event_in: tuple[int, ...]
    event_out: tuple[int, ...]

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return self._draws(rows) if inverse else ()

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        """The noise of x ~ q(x|y)."""
        raise NotImplementedError
