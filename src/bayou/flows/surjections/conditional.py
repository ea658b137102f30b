"""Conditional distributions, and surjections that draw from one in the inverse."""

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

    Shapes: x (..., \*event), y (..., \*given), whose batches broadcast; log p (...). ``given``: how many axes an event
    of y has.
    """

    event: tuple[int, ...]  # of x
    levels: int | None = None  # x has whole numbers 0 .. levels − 1, as floats; None: any real numbers

    def accepts(self, event: tuple[int, ...], given: tuple[int, ...], who: str) -> Self:
        """Itself, or a ValueError where it is a distribution of another event, or given another one."""
        if self.event != event:
            raise ValueError(f"{who} needs a distribution of events {event}, got one of {self.event}")
        return self

    @abstractmethod
    def noise(self, rows: Rows, *copies: int) -> Tensor:
        r"""What one draw takes, for every row: (\*rows, \*copies, \*noise)."""

    @abstractmethod
    def draw(self, noise: Tensor, y: Tensor, given: int) -> Pair:
        """x and log p(x | y)."""

    @abstractmethod
    def log_prob(self, x: Tensor, y: Tensor, given: int) -> Tensor:
        """log p(x | y)."""

    @abstractmethod
    def center(self, y: Tensor, given: int) -> Tensor:
        """One x for every y, without noise: the mean where it is known, else the image of the middle of the noise."""


class ConditionalFlow(ConditionalDistribution):
    r"""q(x | y): a flow whose context is ``net(y)``, by default y itself, flattened; a flow without context ignores y.

    Its base is a standard normal or uniform, so that its noise is one tensor which depends on no parameter.
    Shapes: x (..., \*event), y (..., \*given), context (..., context_dim), log q (...).
    """

    def __init__(self, flow: Flow, net: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        if type(flow.base) not in (StandardNormal, Uniform):
            raise ValueError(
                f"a conditional distribution needs a base without parameters, StandardNormal or Uniform, got "
                f"{type(flow.base).__name__}; put a DiagonalAffine first in the transform"
            )
        if flow.transform.takes_noise:
            raise ValueError(f"{type(flow.transform).__name__} takes noise of its own; use a flow of transforms")
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
                f"{who} gives its distribution {given}, {math.prod(given)} numbers, as context, and the flow takes "
                f"{width}; build it with context_dim={math.prod(given)}, or pass ConditionalFlow(flow, net)"
            )
        return self

    def noise(self, rows: Rows, *copies: int) -> Tensor:
        base = self.flow.base
        if isinstance(base, Uniform):
            return base.low + (base.high - base.low) * open_uniform(rows, *copies, *base.event_shape)
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
def as_given(q: ConditionalFlow | Flow) -> ConditionalFlow: ...
@overload
def as_given(q: ConditionalDistribution | Flow) -> ConditionalDistribution: ...
def as_given(q: ConditionalDistribution | Flow) -> ConditionalDistribution:
    """A flow as a distribution given its context."""
    return ConditionalFlow(q) if isinstance(q, Flow) else q


def open_uniform(rows: Rows, *event: int) -> Tensor:
    """Uniform noise on (0, 1), without the endpoints, where logarithms are infinite."""
    u = rows.uniform(*event)
    eps = 2.0**-24
    return eps + (1 - 2 * eps) * u


def normal(event: tuple[int, ...]) -> Flow:
    """N(mean, std²), both learned: the default distribution of an event."""
    if len(event) != 1:
        raise ValueError(f"say which distribution the dropped events {event} have: pass a flow over them")
    return Flow(StandardNormal(event), DiagonalAffine(*event))


class Surjection(Map):
    """y = f(x), many to one; the inverse draws x ~ q(x|y), with the term −log q(x|y): a bound."""

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
