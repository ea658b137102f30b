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

from bayou.core import rng

Event = tuple[int | None, ...]  # None stands for any size
Pair = tuple[Tensor, Tensor]
ANGLES = (-math.pi, math.pi)  # the domain of a map of circles


class Ladj(IntEnum):
    """The kind of a map's term; a chain has the largest kind of its links."""

    exact = 0
    # exp of the log-density is unbiased, so that the log-density itself is a bound
    bound = 1
    # the log-density is unbiased; its exp is not, so never use it in an importance weight
    estimate = 2


class Side(Flag):
    """The relation of the expected log-density to the true one; ``|`` combines two of them."""

    equal = 0
    lower = 1  # E[...] ≤ log p(y)
    upper = 2  # E[...] ≥ log p(y)
    unknown = 3  # a lower and an upper one: not a bound

    @property
    def opposite(self) -> Side:
        """The side of the negative."""
        return {Side.lower: Side.upper, Side.upper: Side.lower}.get(self, self)


@dataclass(frozen=True)
class Label:
    """The properties of a log-density through a map; ``|`` combines those of two links.

    Args:
        kind: whether it is exact, a bound or an estimate; exact by default.
        forward: the side of log p(x) − term of ``forward``, for x ~ p; equal by default.
        inverse: the side of log p(x) + term of ``inverse``, at a fixed y; equal by default.
    """

    kind: Ladj = Ladj.exact
    forward: Side = Side.equal
    inverse: Side = Side.equal

    @classmethod
    def of(cls, kind: Ladj) -> Label:
        """Return the label of a map of one kind.

        A bound is ≥ forward and ≤ in the inverse: reverse KL and maximum likelihood both stay
        valid.

        Args:
            kind: of the map.
        """
        if kind is Ladj.bound:
            return cls(kind, Side.upper, Side.lower)
        return cls(kind)

    def __or__(self, other: Label) -> Label:
        return Label(
            max(self.kind, other.kind),
            self.forward | other.forward,
            self.inverse | other.inverse,
        )


class Cost(IntEnum):
    """The cost of a direction of a map; a chain has the largest cost of its links."""

    analytic = 0
    autoregressive = 1  # one step per dimension
    iterative = 2  # root finding to a tolerance


class InversionError(ArithmeticError):
    """A root was not found to the tolerance of its dtype; the message has the residual."""


def is_recorded(x: Tensor) -> bool:
    """Return whether a compiler or a CUDA graph records the operations on x.

    No branch may then depend on its values.

    Args:
        x: any tensor.
    """
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def read_flag(flag: Tensor) -> bool | None:
    """Return the value of a boolean scalar, or None where it cannot be read.

    That is the case in ``torch.compile``, in vmap, and while a CUDA graph is recorded.

    Args:
        flag: a boolean tensor ().
    """
    if is_recorded(flag):
        return None
    try:
        return bool(flag)
    except RuntimeError:  # a batched tensor of vmap has no single value
        return None


@dataclass(frozen=True)
class Rows:
    """The source of the noise of a map.

    The noise of row i is a function of (seed, start + i) alone, so that it does not depend on the
    other rows.

    Args:
        batch: the batch shape of the rows.
        like: a tensor of the dtype and device of the noise.
        seed: an int, a generator or None, as everywhere in bayou; None by default.
        start: the index of the first row; 0 by default.
    """

    batch: tuple[int, ...]
    like: Tensor
    seed: rng.Seed = None
    start: int = 0

    def normal(self, *event: int) -> Tensor:
        r"""Draw standard normal noise.

        Args:
            event: the sizes of the axes of one row.

        Returns:
            Noise (\*batch, \*event).
        """
        return self._draw(rng.normal, event)

    def uniform(self, *event: int) -> Tensor:
        r"""Draw uniform noise on [0, 1).

        Args:
            event: the sizes of the axes of one row.

        Returns:
            Noise (\*batch, \*event).
        """
        return self._draw(rng.uniform, event)

    def signs(self, *event: int) -> Tensor:
        r"""Draw signs, −1 or 1 with equal probabilities.

        Args:
            event: the sizes of the axes of one row.

        Returns:
            Noise (\*batch, \*event).
        """
        return torch.where(self.uniform(*event) < 0.5, -1.0, 1.0).to(self.like)

    def _draw(self, sampler: Callable[..., Tensor], event: tuple[int, ...]) -> Tensor:
        flat = sampler(math.prod(self.batch), event, self.like, self.seed, self.start)
        return flat.reshape((*self.batch, *event))

    def fold(self, *names: str | int) -> Rows:
        """Return the same rows with noise that is independent of theirs.

        Args:
            names: what the noise is for; other names have other noise.
        """
        return replace(self, seed=rng.fold(self.seed, *names))


class Map(nn.Module, ABC):
    r"""A deterministic or stochastic map y = f(x) from base to data, with a term per direction.

    log p(y) = log p(x) − term of ``forward`` = log p(x) + term of ``inverse``, exactly or as
    ``label`` states. The term of a bijection is its ladj. For y ~ f(y|x) and x ~ r(x|y) it is log
    f(y|x) − log r(x|y) in the inverse, a bound if the inverse is stochastic (Nielsen et al. 2020,
    SurVAE). ``opposite`` is the label with the directions exchanged.

    A subclass implements ``_forward`` and ``_inverse``; the public methods validate the input. A
    map that ``takes_noise`` also implements ``_noise`` and receives the noise as additional
    arguments.

    Attributes:
        event_in: the shape of x, with None for a size that may vary.
        event_out: the shape of y.
        context_dim: the size of the context; 0 for a map without one.
        takes_noise: whether a direction draws noise.
        whole_in: whether x consists of integers, stored as floats.
        whole_out: whether y does.
        levels_in: integers x lie in 0 .. levels_in − 1; None: unbounded.
        levels_out: the same for y.
        ladj_kind: whether the term is exact, a bound or an estimate.
        forward_kind: the cost of ``forward``.
        inverse_kind: the cost of ``inverse``.
        domain: the open interval of the numbers of x.
        codomain: the open interval of the numbers of y.
        accuracy: the error of a solver beyond rounding, in values and terms; ``check`` allows it.
        many_small_operations: whether the compiler fuses the kernels of the map on a GPU: see
            ``training.graphs``.
        recordable: whether every pass performs the same operations, so that ``fit`` can record a
            CUDA graph.
        has_fixed_steps: whether a direction whose cost is iterative takes the same few steps for
            all values, so that it can be exported.

    Shapes: x (..., \*event_in), y (..., \*event_out), context (..., context_dim), term (...). The
    batch dimensions of x and context broadcast.
    """

    event_in: Event
    event_out: Event
    context_dim: int = 0
    takes_noise: bool = False
    whole_in: bool = False
    whole_out: bool = False
    levels_in: int | None = None
    levels_out: int | None = None
    ladj_kind: Ladj = Ladj.exact
    forward_kind: Cost = Cost.analytic
    inverse_kind: Cost = Cost.analytic
    domain: tuple[float, float] = (-torch.inf, torch.inf)
    codomain: tuple[float, float] = (-torch.inf, torch.inf)
    accuracy: float = 0.0
    many_small_operations = True
    recordable: bool = True
    has_fixed_steps: bool = False

    @property
    def label(self) -> Label:
        """The kind and the sides of log p(y)."""
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
        r"""Map base to data.

        Args:
            x: (..., \*event_in).
            context: (..., context_dim), for a map with a context.
            seed: of the noise; by default torch's generator.
            start: the noise of row i depends on (seed, start + i); 0 by default.
            noise: the output of ``noise`` to use instead.

        Returns:
            y (..., \*event_out) and the term (...).

        Raises:
            ValueError: for a wrong shape or dtype, and values outside the domain.
        """
        self.validate(x, context)
        if noise is None:
            noise = self.noise(x, context, seed=seed, start=start)
        return self._forward(x, context, *noise)

    def inverse(
        self,
        y: Tensor,
        context: Tensor | None = None,
        *,
        seed: rng.Seed = None,
        start: int = 0,
        noise: Any = None,
    ) -> Pair:
        r"""Map data to base.

        Args:
            y: (..., \*event_out).
            context: (..., context_dim), for a map with a context.
            seed: of the noise; by default torch's generator.
            start: the noise of row i depends on (seed, start + i); 0 by default.
            noise: the output of ``noise(..., inverse=True)`` to use instead.

        Returns:
            x (..., \*event_in) and the term of the inverse (...).

        Raises:
            ValueError: for a wrong shape or dtype, and values outside the codomain.
            InversionError: if an iteration does not converge.
        """
        self.validate(y, context, inverse=True)
        if noise is None:
            noise = self.noise(y, context, inverse=True, seed=seed, start=start)
        return self._inverse(y, context, *noise)

    def noise(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        inverse: bool = False,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> tuple[Any, ...]:
        """Draw the noise of one pass over x, for ``noise=`` in compiled code and under vmap.

        Args:
            x: the input of that pass.
            context: (..., context_dim), for a map with a context.
            inverse: whether the pass is one of ``inverse``; False by default.
            seed: of the noise; by default torch's generator.
            start: the noise of row i depends on (seed, start + i); 0 by default.

        Returns:
            The additional arguments of the pass; () for a map without noise.
        """
        if not self.takes_noise:
            return ()
        event = self.event_out if inverse else self.event_in
        direction = "inverse" if inverse else "forward"
        batch = batch_shape(x, event)
        if context is not None:
            batch = torch.broadcast_shapes(batch, context.shape[:-1])
        rows = Rows(tuple(batch), x, rng.fold(seed, direction), start)
        return self._noise(rows, inverse)

    @abstractmethod
    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        """Return y and the term, for a valid input."""

    @abstractmethod
    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        """Return x and the term of the inverse, for a valid input."""

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        """Return the noise arguments of one direction.

        Tensors (*rows.batch, ...), or tuples of them.
        """
        return ()

    def in_image(self, y: Tensor) -> Tensor:
        r"""Return whether y = f(x) for some x; elsewhere the density of y is 0.

        Args:
            y: (..., \*event_out).

        Returns:
            Booleans (...).
        """
        low, high = self.codomain
        is_inside = (y > low) & (y < high)
        return is_inside.flatten(-len(self.event_out)).all(-1)

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Check shape, dtype and values of the input of a direction.

        Args:
            x: the input.
            context: (..., context_dim), for a map with a context.
            inverse: whether x is the input of ``inverse``; False by default.

        Raises:
            ValueError: naming what is wrong and what to do.
        """
        name = type(self).__name__
        tensor = next(self.parameters(), None)
        dtype = None if tensor is None else tensor.dtype
        event = self.event_out if inverse else self.event_in
        check_tensor(x, event, dtype, f"{name} input")
        self.check_values(x, inverse)
        if self.context_dim > 0:
            self._check_context(context, tuple(batch_shape(x, event)), dtype)
        elif context is not None:
            raise ValueError(
                f"{name} takes no context but got one of shape {tuple(context.shape)}; "
                "build it with context_dim=..., or wrap it in Conditional"
            )

    def _check_context(
        self,
        context: Tensor | None,
        batch: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> None:
        """Raise a ValueError unless the context suits the map and a batch of rows."""
        name = type(self).__name__
        if context is None:
            raise ValueError(
                f"{name} needs a context (..., {self.context_dim}) but got none; pass context="
            )
        check_tensor(context, (self.context_dim,), dtype, f"{name} context")
        context_batch = tuple(context.shape[:-1])
        try:
            torch.broadcast_shapes(batch, context_batch)
        except RuntimeError:
            raise ValueError(
                f"{name} got batch {batch} but a context with batch {context_batch}; "
                "make the two broadcast"
            ) from None

    def check_values(self, x: Tensor, inverse: bool) -> None:
        """Raise a ValueError for values outside the domain of a direction.

        Args:
            x: the input of that direction.
            inverse: whether it is that of ``inverse``.
        """
        is_whole = self.whole_out if inverse else self.whole_in
        levels = self.levels_out if inverse else self.levels_in
        if is_whole:
            check_integers(x, levels, type(self).__name__)


class Transform(Map):
    r"""A bijection y = f(x) from base to data, with ladj = log|det ∂y/∂x|.

    It is the map whose two events agree.

    Attributes:
        event_shape: the shape of x and y, with None for a size that may vary.

    Shapes: x, y (..., \*event_shape); context (..., context_dim); ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Transform
        >>> class Exp(Transform):
        ...     event_shape = (2,)
        ...     codomain = (0.0, torch.inf)
        ...     def _forward(self, x, context):
        ...         return x.exp(), x.sum(-1)
        ...     def _inverse(self, y, context):
        ...         return y.log(), -y.log().sum(-1)
        >>> y, ladj = Exp()(torch.ones(10, 2))
        >>> y.shape, ladj.shape
        (torch.Size([10, 2]), torch.Size([10]))
    """

    event_shape: Event

    @property
    def event_in(self) -> Event:  # type: ignore[override]
        """The shape of x."""
        return self.event_shape

    @property
    def event_out(self) -> Event:  # type: ignore[override]
        """The shape of y."""
        return self.event_shape

    @abstractmethod
    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        """Return y and the ladj, for a valid input."""

    @abstractmethod
    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        """Return x and the ladj of the inverse, for a valid input."""


class Symmetric(Map):
    """A map whose two directions are computed by one method."""

    @abstractmethod
    def _both(self, x: Tensor, context: Tensor | None, inverse: bool, *noise: Any) -> Pair:
        """Return the result of a direction."""

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._both(x, context, False, *noise)

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Any) -> Pair:
        return self._both(y, context, True, *noise)


def check_tensor(x: Tensor, event_shape: Event, dtype: torch.dtype | None, name: str) -> None:
    """Check that x is a finite floating-point tensor (..., *event_shape).

    Args:
        x: the value to check.
        event_shape: the sizes of the last axes, with None for any size.
        dtype: of the parameters, which x must have too outside autocast; None for any.
        name: of x, for the error.

    Raises:
        ValueError: naming what is wrong and what to do.
    """
    sizes = ["..."] + ["*" if size is None else str(size) for size in event_shape]
    expected = "(" + ", ".join(sizes) + ")"
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name} must be a tensor {expected}, got {type(x).__name__}; use torch.as_tensor"
        )
    if not x.is_floating_point():
        remedy = "dequantize discrete data"
        if name.endswith("context"):
            remedy = "one_hot(k, n).float() for classes"
        raise ValueError(
            f"{name} must be floating point, got {x.dtype}; use x.float(), or {remedy}"
        )
    if not _ends_with(tuple(x.shape), event_shape):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} but the last {len(event_shape)} axes must be "
            f"{expected}; move the event axes last, or build the transform with that size"
        )
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{name} is {x.dtype} but the parameters are {dtype}; call .to({dtype}) on one of them"
        )
    if read_flag(x.isfinite().all()) is False:
        count = (~x.isfinite()).sum().item()
        raise ValueError(
            f"{name} has {count} NaN or infinite values of {x.numel()}; remove or impute them first"
        )


def _ends_with(shape: tuple[int, ...], event_shape: Event) -> bool:
    """Return whether the last axes of a shape are those of an event, with None for any size."""
    if len(shape) < len(event_shape):
        return False
    event = shape[len(shape) - len(event_shape) :]
    return all(want in (None, got) for got, want in zip(event, event_shape, strict=True))


def check_integers(x: Tensor, levels: int | None, name: str) -> None:
    """Check that x consists of integers, in 0 .. levels − 1 if there are levels.

    Args:
        x: a floating-point tensor.
        levels: the number of levels; None for any integers.
        name: of the map, for the error.

    Raises:
        ValueError: with a number that is not valid.
    """
    if read_flag((x == x.floor()).all()) is False:
        fraction = x.flatten()[(x != x.floor()).flatten()][0]
        raise ValueError(f"{name} takes whole numbers as data, got {fraction:g}; round them first")
    if levels is not None and read_flag(((x >= 0) & (x < levels)).all()) is False:
        raise ValueError(
            f"{name} takes 0 to {levels - 1}, got {x.min():g} to {x.max():g}; use more levels, or "
            "shift the data"
        )


def clamp_inside(x: Tensor, interval: tuple[float, float]) -> Tensor:
    """Clamp x to an open interval.

    An endpoint becomes the nearest representable number inside it.

    Args:
        x: a floating-point tensor.
        interval: its two ends, which may be infinite.
    """
    limits = torch.finfo(x.dtype)
    low, high = interval
    least = None
    most = None
    if not math.isinf(low):
        least = low + max(abs(low) * limits.eps / 2, limits.tiny)
    if not math.isinf(high):
        most = high - max(abs(high) * limits.eps / 2, limits.tiny)
    if least is None and most is None:
        return x
    return x.clamp(least, most)


def wrap_angle(x: Tensor) -> Tensor:
    """Return x modulo 2π in [−π, π), up to rounding at the ends; values inside are unchanged.

    Args:
        x: angles.
    """
    return x - 2 * math.pi * torch.floor((x + math.pi) / (2 * math.pi))


def embed_angles(x: Tensor) -> Tensor:
    """Return angles as points (cos x, sin x) of circles.

    Args:
        x: angles (..., D).

    Returns:
        Cosine and sine of every angle, in pairs: (..., 2·D).
    """
    return torch.stack([x.cos(), x.sin()], -1).flatten(-2)


def batch_shape(x: Tensor, event: Event) -> torch.Size:
    """Return the shape of x without the axes of its event.

    Args:
        x: (..., *event).
        event: the shape of an event, of which only the number of axes is used.
    """
    return x.shape[: x.ndim - len(event)]


def broadcast_context(
    x: Tensor,
    context: Tensor | None,
    dims: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Expand x and its context to a common batch shape.

    Args:
        x: rows (..., *event).
        context: contexts (..., context_dim), or None.
        dims: the number of axes of the event; 1 by default.

    Returns:
        x (*batch, *event) and the context (*batch, context_dim), or None.
    """
    if context is None or x.shape[:-dims] == context.shape[:-1]:
        return x, context
    batch = torch.broadcast_shapes(x.shape[:-dims], context.shape[:-1])
    return x.expand(*batch, *x.shape[-dims:]), context.expand(*batch, -1)


def sum_event(x: Tensor, event_dims: int) -> Tensor:
    """Sum over the trailing event dimensions, for any memory format.

    Args:
        x: (..., *event).
        event_dims: the number of axes of the event.
    """
    return x.sum(tuple(range(-event_dims, 0)))


def common_event(first: Event, second: Event) -> Event | None:
    """Return the shape that two event shapes agree on, or None if they differ.

    Args:
        first: a shape, with None for a size that may vary.
        second: another one.

    Returns:
        The shape with the sizes that at least one of them has.
    """
    if len(first) != len(second):
        return None
    sizes: list[int | None] = []
    for a, b in zip(first, second, strict=True):
        if a is not None and b is not None and a != b:
            return None
        sizes.append(b if a is None else a)
    return tuple(sizes)
