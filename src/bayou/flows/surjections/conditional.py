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

SMALLEST_UNIFORM = 2.0**-24  # of ``open_uniform``, and its distance to 1


class ConditionalDistribution(nn.Module, ABC):
    r"""A distribution p(x | y), with the noise of a draw as an argument.

    A subclass implements ``noise``, ``draw``, ``log_prob`` and ``center``. Where y has several
    axes, ``y_axes`` states how many of its last axes are those of its event.

    Attributes:
        event: the shape of x.
        levels: the number L of values 0 .. L − 1 of x, stored as floats; None for real numbers.

    Shapes: x (..., \*event), y (..., \*y_event) with batches that broadcast, log p (...).
    """

    event: tuple[int, ...]
    levels: int | None = None

    def accepts(self, event: tuple[int, ...], y_event: tuple[int, ...], caller: str) -> Self:
        """Return the distribution itself, or raise an error unless its shapes agree.

        Args:
            event: the required shape of x.
            y_event: the shape of the y that will be passed.
            caller: the name of the class that needs the distribution, for the error.

        Raises:
            ValueError: for another event.
        """
        if self.event != event:
            raise ValueError(
                f"{caller} needs a distribution of events {event}, got one of events {self.event}"
            )
        return self

    @abstractmethod
    def noise(self, rows: Rows, *copies: int) -> Tensor:
        r"""Draw the noise of one x for every row.

        Args:
            rows: the source of the noise.
            copies: axes of several draws for every row; none by default.

        Returns:
            Noise (\*rows.batch, \*copies, \*noise_event).
        """

    @abstractmethod
    def draw(self, noise: Tensor, y: Tensor, y_axes: int) -> Pair:
        """Return x and log p(x | y) for noise of ``noise``.

        Args:
            noise: the noise of the draws.
            y: the values of the condition.
            y_axes: the number of axes of the event of y.
        """

    @abstractmethod
    def log_prob(self, x: Tensor, y: Tensor, y_axes: int) -> Tensor:
        """Return log p(x | y).

        Args:
            x: points.
            y: the values of the condition.
            y_axes: the number of axes of the event of y.
        """

    @abstractmethod
    def center(self, y: Tensor, y_axes: int) -> Tensor:
        """Return one x for every y, without noise.

        This is the mean if it is known, else the image of the center of the noise.

        Args:
            y: the values of the condition.
            y_axes: the number of axes of the event of y.
        """


class ConditionalFlow(ConditionalDistribution):
    r"""A conditional distribution q(x | y): a flow with the context ``net(y)``.

    log q(x | y) = log p(f⁻¹(x; net(y))) + ladj of f⁻¹, with the flow's base p and transform f.

    Args:
        flow: a flow with a base without parameters, ``StandardNormal`` or ``Uniform``; without
            context it ignores y.
        net: a network from y to the context; None, the default, for y itself, flattened.

    Shapes: x (..., \*event), y (..., \*y_event), context (..., context_dim), log q (...).

    Raises:
        ValueError: for a base with parameters, or a transform that takes noise.

    Example:
        >>> import torch, bayou.flows as flows
        >>> encoder = flows.AmortizedAffine(dim=2, context_dim=16)
        >>> net = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU())
        >>> q = flows.ConditionalFlow(flows.Flow(flows.StandardNormal(2), encoder), net)
        >>> q.log_prob(torch.zeros(10, 2), torch.zeros(10, 5), y_axes=1).shape
        torch.Size([10])
    """

    def __init__(self, flow: Flow, net: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        if type(flow.base) not in (StandardNormal, Uniform):
            raise ValueError(
                "a conditional distribution needs a base without parameters, StandardNormal or "
                f"Uniform, got {type(flow.base).__name__}; start the transform with a "
                "DiagonalAffine"
            )
        if flow.transform.takes_noise:
            raise ValueError(
                f"{type(flow.transform).__name__} takes noise; use a flow of transforms"
            )
        self.flow = flow
        self.net = net

    @property
    def event(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of x."""
        return self.flow.event_shape

    def accepts(self, event: tuple[int, ...], y_event: tuple[int, ...], caller: str) -> Self:
        super().accepts(event, y_event, caller)
        context_dim = self.flow.transform.context_dim
        size = math.prod(y_event)
        if self.net is None and context_dim not in (0, size):
            raise ValueError(
                f"{caller} passes its distribution an event {y_event} as context, {size} numbers, "
                f"and the flow takes {context_dim}; build it with context_dim={size}, or pass "
                "ConditionalFlow(flow, net)"
            )
        return self

    def noise(self, rows: Rows, *copies: int) -> Tensor:
        base = self.flow.base
        if isinstance(base, Uniform):
            u = open_uniform(rows, *copies, *base.event_shape)
            return base.low + (base.high - base.low) * u
        return rows.normal(*copies, *base.event_shape)

    def draw(self, noise: Tensor, y: Tensor, y_axes: int) -> Pair:
        x, ladj = self.flow.transform._forward(noise, self._context(y, y_axes))
        return x, self.flow.base.log_prob(noise) - ladj

    def log_prob(self, x: Tensor, y: Tensor, y_axes: int) -> Tensor:
        z, ladj = self.flow.transform._inverse(x, self._context(y, y_axes))
        return self.flow.base.log_prob(z) + ladj

    def center(self, y: Tensor, y_axes: int) -> Tensor:
        base = self.flow.base
        middle = 0.0
        if isinstance(base, Uniform):
            middle = (base.low + base.high) / 2
        noise = y.new_full((*y.shape[: y.ndim - y_axes], *base.event_shape), middle)
        return self.flow.transform._forward(noise, self._context(y, y_axes))[0]

    def _context(self, y: Tensor, y_axes: int) -> Tensor | None:
        """Return the context of the flow for every y."""
        if not self.flow.transform.context_dim:
            return None
        if self.net is None:
            return y.flatten(-y_axes)
        return self.net(y)


@overload
def as_conditional(q: ConditionalFlow | Flow) -> ConditionalFlow: ...
@overload
def as_conditional(q: ConditionalDistribution | Flow) -> ConditionalDistribution: ...
def as_conditional(q: ConditionalDistribution | Flow) -> ConditionalDistribution:
    """Return a flow as a distribution conditional on its context.

    Args:
        q: a flow, or a conditional distribution, which is returned unchanged.
    """
    if isinstance(q, Flow):
        return ConditionalFlow(q)
    return q


def open_uniform(rows: Rows, *event: int) -> Tensor:
    r"""Draw uniform noise on the open interval (0, 1), so that logarithms are finite.

    Args:
        rows: the source of the noise.
        event: the sizes of the axes of one row.

    Returns:
        Noise (\*rows.batch, \*event).
    """
    u = rows.uniform(*event)
    return SMALLEST_UNIFORM + (1 - 2 * SMALLEST_UNIFORM) * u


def normal(event: tuple[int, ...]) -> Flow:
    """Build N(mean, std²) with learned mean and std: the default distribution of a vector.

    Args:
        event: the shape of a draw, with one axis.

    Raises:
        ValueError: for an event with several axes.
    """
    if len(event) != 1:
        raise ValueError(
            f"there is no default distribution of events {event}; pass a flow over them"
        )
    return Flow(StandardNormal(event), DiagonalAffine(*event))


class Surjection(Map):
    """A many-to-one map y = f(x) whose inverse draws x ~ q(x | y).

    Its term of the inverse is −log q(x | y), possibly with a constant, and gives a bound,
    log p(y) ≥ E_q[log p(x) − log q(x | y)] (Nielsen et al. 2020, SurVAE flows).
    """

    takes_noise = True
    ladj_kind = Ladj.bound
    opposite: Label = Label()  # Inverse(self): exact
    event_in: tuple[int, ...]
    event_out: tuple[int, ...]

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        if inverse:
            return self._inverse_noise(rows)
        return ()

    @abstractmethod
    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        """Draw the noise of x ~ q(x | y) for every row."""
