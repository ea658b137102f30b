"""The interface of maps and transforms, and checks of their input."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Flag, IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng

Event = tuple[int | None, ...]  # None stands for any size
Pair = tuple[Tensor, Tensor]
ANGLES = (-math.pi, math.pi)  # the domain of a map of circles


class Ladj(IntEnum):
    """What the term of a map is; a chain has the largest kind of its links."""

    exact = 0
    bound = 1  # exp of the log-density is unbiased, so that the log-density itself is a bound
    estimate = (
        2  # the log-density is unbiased; its exp is not, so never use it in an importance weight
    )


class Side(Flag):
    """The relation of the expected log-density to the true one; ``|`` combines two parts."""

    equal = 0
    lower = 1  # E[...] ≤ log p(y)
    upper = 2  # E[...] ≥ log p(y)
    unknown = 3  # one part on each side: not a bound

    @property
    def opposite(self) -> Side:
        """The side of the negative."""
        return {Side.lower: Side.upper, Side.upper: Side.lower}.get(self, self)


@dataclass(frozen=True)
class Label:
    """The properties of a log-density through a map: its kind, and its side forward and in the
    inverse.
    """

    kind: Ladj = Ladj.exact
    forward: Side = Side.equal  # of log p(x) − term of ``forward``, x ~ p
    inverse: Side = Side.equal  # of log p(x) + term of ``inverse``, y given

    @classmethod
    def of(cls, kind: Ladj) -> Label:
        """A bound is ≥ forward and ≤ in the inverse: reverse KL and maximum likelihood both stay
        valid.
        """
        return cls(kind, Side.upper, Side.lower) if kind is Ladj.bound else cls(kind)

    def __or__(self, other: Label) -> Label:
        return Label(
            max(self.kind, other.kind), self.forward | other.forward, self.inverse | other.inverse
        )


class Cost(IntEnum):
    """How a direction of a map is computed; a chain has the largest cost of its links."""

    analytic = 0
    autoregressive = 1  # one step per dimension
    iterative = 2  # root finding to a tolerance


class InversionError(ArithmeticError):
    """A root was not found to the tolerance of its dtype; the message has the residual."""


def is_recorded(x: Tensor) -> bool:
    """Whether a compiler or a CUDA graph records the operations on x, so that no branch may depend
    on its values.
    """
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def concrete(flag: Tensor) -> bool | None:
    """The value of a boolean scalar; None where it cannot be read (in torch.compile, vmap or a CUDA
    graph).
    """
    if is_recorded(flag):
        return None
    try:
        return bool(flag)
    except RuntimeError:  # a batched tensor of vmap has no single value
        return None


@dataclass(frozen=True)
class Rows:
    """The source of the noise of a map: the noise of row i is a function of (seed, start + i)
    alone.
    """

    batch: tuple[int, ...]
    like: Tensor
    seed: rng.Seed = None
    start: int = 0

    def normal(self, *event: int) -> Tensor:
        r"""Standard normal noise (\*batch, \*event)."""
        return self._draw(rng.normal, event)

    def uniform(self, *event: int) -> Tensor:
        r"""Uniform noise on [0, 1): (\*batch, \*event)."""
        return self._draw(rng.uniform, event)

    def _draw(self, sampler: Callable[..., Tensor], event: tuple[int, ...]) -> Tensor:
        flat = sampler(math.prod(self.batch), event, self.like, self.seed, self.start)
        return flat.reshape((*self.batch, *event))

    def fold(self, *names: str | int) -> Rows:
        """The same rows with independent noise for a named part."""
        return replace(self, seed=rng.fold(self.seed, *names))


class Map(nn.Module, ABC):
    r"""A deterministic or stochastic map y = f(x) from base to data, with a term in each direction.

    log p(y) = log p(x) − term of ``forward`` = log p(x) + term of ``inverse``, exactly or as
    ``label`` states. The term of a bijection is its ladj. For y ~ f(y|x) and x ~ r(x|y) it is log
    f(y|x) − log r(x|y) in the inverse, a bound if the inverse is stochastic (Nielsen et al. 2020,
    SurVAE). ``opposite`` is the label with the directions exchanged.

    Shapes: x (..., \*event_in), y (..., \*event_out), context (..., context_dim), term (...). The
    batch dimensions of x and context broadcast. A subclass implements ``_forward`` and
    ``_inverse``; the public methods validate the input. A map that ``takes_noise`` also implements
    ``_noise`` and receives the noise as additional arguments.
    """

    event_in: Event
    event_out: Event
    context_dim: int = 0  # 0: no context
    takes_noise: bool = False
    whole_in: bool = False  # whether x consists of integers, stored as floats
    whole_out: bool = False  # whether y does
    levels_in: int | None = None  # integers x lie in 0 .. levels_in − 1; None: unbounded
    levels_out: int | None = None  # the same for y
    ladj_kind: Ladj = Ladj.exact
    forward_kind: Cost = Cost.analytic
    inverse_kind: Cost = Cost.analytic
    domain: tuple[float, float] = (-torch.inf, torch.inf)
    codomain: tuple[float, float] = (-torch.inf, torch.inf)
    accuracy: float = (
        0.0  # error of a solver beyond rounding, in values and terms; ``check`` allows it
    )
    many_small_operations = True  # for the compiler: see training.graphs
    recordable: bool = True  # whether every pass performs the same operations, so that ``fit`` can record a CUDA graph

    @property
    def label(self) -> Label:
        """Kind and sides of log p(y)."""
        return Label.of(self.ladj_kind)

    @property
    def opposite(self) -> Label:
        """The label of ``Inverse(self)``."""
        return self.label

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        seed: rng.Seed = None,
        start: int = 0,
        noise: Any = None,
    ) -> Pair:
        """Map base to data, (y, term). The noise of row i depends on (seed, start + i), unless
        ``noise`` is given.
        """
        self.validate(x, context)
        own = self.noise(x, context, seed=seed, start=start) if noise is None else noise
        return self._forward(x, context, *own)

    def inverse(
        self,
        y: Tensor,
        context: Tensor | None = None,
        *,
        seed: rng.Seed = None,
        start: int = 0,
        noise: Any = None,
    ) -> Pair:
        """Map data to base, (x, term of the inverse)."""
        self.validate(y, context, inverse=True)
        own = (
            self.noise(y, context, inverse=True, seed=seed, start=start) if noise is None else noise
        )
        return self._inverse(y, context, *own)

    def noise(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        inverse: bool = False,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> tuple[Any, ...]:
        """The noise of one pass over x, for ``noise=`` in compiled code and under vmap."""
        if not self.takes_noise:
            return ()
        batch = x.shape[: x.ndim - len(self.event_out if inverse else self.event_in)]
        if context is not None:
            batch = torch.broadcast_shapes(batch, context.shape[:-1])
        return self._noise(
            Rows(tuple(batch), x, rng.fold(seed, "inverse" if inverse else "forward"), start),
            inverse,
        )

    @abstractmethod
    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair: ...

    @abstractmethod
    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair: ...

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        """The noise arguments of one direction: tensors (*rows.batch, ...), or tuples of them."""
        return ()

    def in_image(self, y: Tensor) -> Tensor:
        """Whether y = f(x) for some x: (...). Elsewhere the density of y is 0."""
        low, high = self.codomain
        inside = (y > low) & (y < high)
        return inside.flatten(-len(self.event_out)).all(-1)

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Raise a ValueError unless shape, dtype, values and context are valid."""
        name = type(self).__name__
        tensor = next(self.parameters(), None)
        dtype = None if tensor is None else tensor.dtype
        event = self.event_out if inverse else self.event_in
        check_tensor(x, event, dtype, f"{name} input")
        self.check_values(x, inverse)
        if self.context_dim == 0 and context is not None:
            raise ValueError(
                f"{name} takes no context but got one of shape {tuple(context.shape)}; "
                "build it with context_dim=..., or wrap it in Conditional"
            )
        if self.context_dim > 0:
            if context is None:
                raise ValueError(
                    f"{name} needs a context (..., {self.context_dim}) but got none; pass context="
                )
            check_tensor(context, (self.context_dim,), dtype, f"{name} context")
            batch, context_batch = x.shape[: x.ndim - len(event)], context.shape[:-1]
            try:
                torch.broadcast_shapes(batch, context_batch)
            except RuntimeError:
                raise ValueError(
                    f"{name} got batch {tuple(batch)} but a context with batch {tuple(context_batch)}; "
                    "make the two broadcast"
                ) from None

    def check_values(self, x: Tensor, inverse: bool) -> None:
        """Raise a ValueError for values outside the domain of a direction."""
        if self.whole_out if inverse else self.whole_in:
            check_whole(x, self.levels_out if inverse else self.levels_in, type(self).__name__)


class Transform(Map):
    r"""A bijection y = f(x) from base to data, with ladj = log|det ∂y/∂x|: the map whose two events
    agree.

    Shapes: x, y (..., \*event_shape); context (..., context_dim); ladj (...).
    """

    event_shape: Event

    @property
    def event_in(self) -> Event:  # type: ignore[override]
        return self.event_shape

    @property
    def event_out(self) -> Event:  # type: ignore[override]
        return self.event_shape

    @abstractmethod
    def _forward(self, x: Tensor, context: Tensor | None) -> Pair: ...

    @abstractmethod
    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair: ...


class Symmetric(Map):
    """A map whose two directions are computed by one method."""

    @abstractmethod
    def _both(self, x: Tensor, context: Tensor | None, inverse: bool, *noise: Any) -> Pair:
        """The result of a direction."""

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._both(x, context, False, *noise)

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._both(y, context, True, *noise)


def check_tensor(
    x: Tensor, event_shape: tuple[int | None, ...], dtype: torch.dtype | None, what: str
) -> None:
    """Raise a ValueError unless x is a finite floating-point tensor (..., *event_shape) of this
    dtype.
    """
    expected = (
        "("
        + ", ".join(["..."] + ["*" if size is None else str(size) for size in event_shape])
        + ")"
    )
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{what} must be a tensor {expected}, got {type(x).__name__}; use torch.as_tensor"
        )
    if not x.is_floating_point():
        remedy = (
            "one_hot(k, n).float() for classes"
            if what.endswith("context")
            else "dequantize discrete data"
        )
        raise ValueError(
            f"{what} must be floating point, got {x.dtype}; use x.float(), or {remedy}"
        )
    trailing = x.shape[x.ndim - len(event_shape) :] if x.ndim >= len(event_shape) else None
    if trailing is None or any(
        want not in (None, got) for got, want in zip(trailing, event_shape, strict=True)
    ):
        raise ValueError(
            f"{what} has shape {tuple(x.shape)} but the last {len(event_shape)} axes must be {expected}; "
            "move the event axes last, or build the transform with that size"
        )
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{what} is {x.dtype} but the parameters are {dtype}; call .to({dtype}) on one of them"
        )
    if concrete(x.isfinite().all()) is False:
        bad = (~x.isfinite()).sum().item()
        raise ValueError(
            f"{what} has {bad} NaN or infinite values of {x.numel()}; remove or impute them first"
        )


def check_whole(y: Tensor, levels: int | None, who: str) -> None:
    """Raise a ValueError unless y consists of integers, in 0 .. levels − 1 if levels are given."""
    if concrete((y == y.floor()).all()) is False:
        raise ValueError(
            f"{who} takes whole numbers as data, got {y.flatten()[(y != y.floor()).flatten()][0]:g}; round them first"
        )
    if levels is not None and concrete(((y >= 0) & (y < levels)).all()) is False:
        raise ValueError(
            f"{who} takes 0 to {levels - 1}, got {y.min():g} to {y.max():g}; use more levels, or shift the data"
        )


def clamp_inside(x: Tensor, interval: tuple[float, float]) -> Tensor:
    """x clamped to an open interval: an endpoint becomes the nearest representable number inside
    it.
    """
    limits, (low, high) = torch.finfo(x.dtype), interval
    least = None if math.isinf(low) else low + max(abs(low) * limits.eps / 2, limits.tiny)
    most = None if math.isinf(high) else high - max(abs(high) * limits.eps / 2, limits.tiny)
    return x if least is None and most is None else x.clamp(least, most)


def wrap_angle(x: Tensor) -> Tensor:
    """x modulo 2π in [−π, π), up to rounding at the ends; values inside are unchanged."""
    return x - 2 * math.pi * torch.floor((x + math.pi) / (2 * math.pi))


def on_circle(x: Tensor) -> Tensor:
    """Angles (..., D) as points (cos x, sin x) of circles, in pairs: (..., 2·D)."""
    return torch.stack([x.cos(), x.sin()], -1).flatten(-2)


def sum_event(x: Tensor, event_dims: int) -> Tensor:
    """Sum over the trailing event dimensions, for any memory format."""
    return x.sum(tuple(range(-event_dims, 0)))


def common_event(given: Event, taken: Event) -> Event | None:
    """The shape that two event shapes agree on, with None sizes filled in; None if they differ."""
    if len(given) != len(taken) or any(
        None not in (a, b) and a != b for a, b in zip(given, taken, strict=True)
    ):
        return None
    return tuple(b if a is None else a for a, b in zip(given, taken, strict=True))
