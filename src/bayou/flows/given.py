"""A distribution of one event given another: what surjections draw from, and what they score."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from bayou.flows.bases import StandardNormal, Uniform
from bayou.flows.flow import Flow
from bayou.flows.transform import Pair, Rows


class Given(nn.Module):
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
    def event(self) -> tuple[int, ...]:
        """The event of x."""
        return self.flow.event_shape

    def accepts(self, event: tuple[int, ...], given: tuple[int, ...], who: str) -> Given:
        """Itself, or a ValueError where it is a distribution of another event, or given another one."""
        if self.event != event:
            raise ValueError(f"{who} needs a distribution of events {event}, got one of {self.event}")
        width = self.flow.transform.context_dim
        if self.net is None and width not in (0, math.prod(given)):
            raise ValueError(
                f"{who} gives its distribution {given}, {math.prod(given)} numbers, as context, and the flow takes "
                f"{width}; build it with context_dim={math.prod(given)}, or pass Given(flow, net)"
            )
        return self

    def noise(self, rows: Rows) -> Tensor:
        """What one draw takes, for every row."""
        base = self.flow.base
        if isinstance(base, Uniform):
            return base.low + (base.high - base.low) * open_uniform(rows, *base.event_shape)
        return rows.normal(*base.event_shape)

    def draw(self, noise: Tensor, y: Tensor, given: int) -> Pair:
        """x and log q(x | y); ``given``: how many axes an event of y has."""
        x, ladj = self.flow.transform._forward(noise, self._context(y, given))
        return x, self.flow.base.log_prob(noise) - ladj

    def log_prob(self, x: Tensor, y: Tensor, given: int) -> Tensor:
        """log q(x | y)."""
        z, ladj = self.flow.transform._inverse(x, self._context(y, given))
        return self.flow.base.log_prob(z) + ladj

    def _context(self, y: Tensor, given: int) -> Tensor | None:
        if not self.flow.transform.context_dim:
            return None
        return y.flatten(-given) if self.net is None else self.net(y)


def as_given(q: Given | Flow) -> Given:
    """A flow as a distribution given its context."""
    return q if isinstance(q, Given) else Given(q)


def open_uniform(rows: Rows, *event: int) -> Tensor:
    """Uniform noise on (0, 1): both ends stay away from logarithms."""
    u = rows.uniform(*event)
    eps = 2.0**-24
    return eps + (1 - 2 * eps) * u
