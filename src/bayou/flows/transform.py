"""The contract that every map of random variables keeps, and the three ways to compose such maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayou.flows.nets import mlp
from bayou.modules import Modules


class Ladj(IntEnum):
    """What the log-absolute-determinant of a transform is; a chain is as exact as its worst link."""

    exact = 0
    bound = 1
    estimate = 2


class Cost(IntEnum):
    """How a direction of a transform is computed; a chain is as costly as its worst link."""

    analytic = 0
    autoregressive = 1  # one step per dimension
    iterative = 2  # root finding to a tolerance


class InversionError(ArithmeticError):
    """A root was not found to the tolerance of its dtype; the message has the residual."""


def known(flag: Tensor) -> bool | None:
    """The truth of a scalar, or None where Python may not look (inside compile, vmap or a CUDA graph)."""
    if torch.compiler.is_compiling() or (flag.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        return bool(flag)
    except RuntimeError:  # a batched tensor of vmap has no single truth
        return None


class Transform(nn.Module, ABC):
    r"""A bijection y = f(x) from base to data, with ladj = log|det ∂y/∂x|.

    Shapes: x, y (..., \*event_shape); context (..., context_dim); ladj (...). Any batch dimensions; those of x and
    context broadcast. A subclass writes ``_forward`` and ``_inverse``; validation happens once, at the outer door.
    """

    event_shape: tuple[int | None, ...]  # None stands for any size
    context_dim: int = 0  # 0: takes no context
    ladj_kind: Ladj = Ladj.exact
    forward_kind: Cost = Cost.analytic
    inverse_kind: Cost = Cost.analytic
    domain: tuple[float, float] = (-torch.inf, torch.inf)
    codomain: tuple[float, float] = (-torch.inf, torch.inf)
    many_small_operations = True  # for the compiler: see training.graphs

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Base to data: (y, ladj)."""
        self.validate(x, context)
        return self._forward(x, context)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Data to base: (x, ladj of the inverse)."""
        self.validate(y, context)
        return self._inverse(y, context)

    @abstractmethod
    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def validate(self, x: Tensor, context: Tensor | None = None) -> None:
        """Raise a ValueError that says what was got, what was expected and what to do."""
        name = type(self).__name__
        tensor = next(self.parameters(), None)
        dtype = None if tensor is None else tensor.dtype
        check_tensor(x, self.event_shape, dtype, f"{name} input")
        if self.context_dim == 0 and context is not None:
            raise ValueError(
                f"{name} takes no context but got one of shape {tuple(context.shape)}; "
                "build it with context_dim=..., or wrap it in Conditional"
            )
        if self.context_dim > 0:
            if context is None:
                raise ValueError(f"{name} needs a context (..., {self.context_dim}) but got none; pass context=")
            check_tensor(context, (self.context_dim,), dtype, f"{name} context")
            batch, context_batch = x.shape[: x.ndim - len(self.event_shape)], context.shape[:-1]
            try:
                torch.broadcast_shapes(batch, context_batch)
            except RuntimeError:
                raise ValueError(
                    f"{name} got batch {tuple(batch)} but a context with batch {tuple(context_batch)}; "
                    "make the two broadcast"
                ) from None


def check_tensor(x: Tensor, event_shape: tuple[int | None, ...], dtype: torch.dtype | None, what: str) -> None:
    """Raise a ValueError unless x is floating, of that dtype, finite and shaped (..., *event_shape)."""
    expected = "(" + ", ".join(["..."] + ["*" if size is None else str(size) for size in event_shape]) + ")"
    if not isinstance(x, Tensor):
        raise ValueError(f"{what} must be a tensor {expected}, got {type(x).__name__}; use torch.as_tensor")
    if not x.is_floating_point():
        raise ValueError(f"{what} must be floating point, got {x.dtype}; use x.float(), or dequantize discrete data")
    trailing = x.shape[x.ndim - len(event_shape) :] if x.ndim >= len(event_shape) else None
    if trailing is None or any(want not in (None, got) for got, want in zip(trailing, event_shape, strict=True)):
        raise ValueError(
            f"{what} has shape {tuple(x.shape)} but the last {len(event_shape)} axes must be {expected}; "
            "move the event axes last, or build the transform with that size"
        )
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{what} is {x.dtype} but the parameters are {dtype}; call .to({dtype}) on one of them")
    if known(x.isfinite().all()) is False:
        bad = (~x.isfinite()).sum().item()
        raise ValueError(f"{what} has {bad} NaN or infinite values of {x.numel()}; remove or impute them first")


def sum_event(x: Tensor, event_dims: int) -> Tensor:
    """Sum over the trailing event dimensions."""
    return x.flatten(-event_dims).sum(-1) if event_dims > 1 else x.sum(-1)


def _common_context(transforms: list[Transform]) -> int:
    sizes = {t.context_dim for t in transforms if t.context_dim > 0}
    if len(sizes) > 1:
        raise ValueError(f"the transforms of a chain take contexts of different sizes {sorted(sizes)}; use one size")
    return sizes.pop() if sizes else 0


class Chain(Transform):
    """y = f_T(... f_1(x)); ladj is the sum."""

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        if not transforms:
            raise ValueError("Chain got no transforms; pass at least one")
        flat: list[Transform] = []
        for t in transforms:
            flat += t.transforms if isinstance(t, Chain) else [t]
        shapes = {t.event_shape for t in flat}
        if len(shapes) > 1:
            raise ValueError(f"the transforms of a chain act on different events {sorted(map(str, shapes))}; use one")
        self.transforms: Modules[Transform] = nn.ModuleList(flat)  # type: ignore[assignment]
        self.event_shape = flat[0].event_shape
        self.context_dim = _common_context(flat)
        self.ladj_kind = max(t.ladj_kind for t in flat)
        self.forward_kind = max(t.forward_kind for t in flat)
        self.inverse_kind = max(t.inverse_kind for t in flat)
        self.domain, self.codomain = flat[0].domain, flat[-1].codomain

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        ladjs = []
        for t in self.transforms:
            x, ladj = t._forward(x, context if t.context_dim else None)
            ladjs.append(ladj)
        return x, sum(ladjs[1:], ladjs[0])

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        ladjs = []
        for t in reversed(self.transforms):
            y, ladj = t._inverse(y, context if t.context_dim else None)
            ladjs.append(ladj)
        return y, sum(ladjs[1:], ladjs[0])


class Inverse(Transform):
    """The same bijection with its two directions exchanged."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform
        self.event_shape = transform.event_shape
        self.context_dim = transform.context_dim
        self.ladj_kind = transform.ladj_kind
        self.forward_kind, self.inverse_kind = transform.inverse_kind, transform.forward_kind
        self.domain, self.codomain = transform.codomain, transform.domain

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.transform._inverse(x, context)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.transform._forward(y, context)


class Conditional(Transform):
    """Any transform, with parameters θ + h(context) from a small network h (a hypernetwork, starting at h = 0).

    Made of the property that every transform can be ``vmap``-ed over stacked parameters. Memory grows with
    batch × number of parameters; coupling and autoregressive flows take a context themselves, more cheaply.
    """

    def __init__(self, transform: Transform, context_dim: int, hidden: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        if transform.context_dim:
            raise ValueError(f"{type(transform).__name__} already takes a context; use it without Conditional")
        self.shapes = {name: p.shape for name, p in transform.named_parameters()}
        if not self.shapes:
            raise ValueError(f"{type(transform).__name__} has no parameters for a context to change")
        self.transform = transform
        # A tuple hides the two views from the module tree, so that their parameters are not saved three times.
        self._directions = (_Direction(transform, False), _Direction(transform, True))
        self.hypernet = mlp(context_dim, hidden, sum(s.numel() for s in self.shapes.values()))
        self.event_shape, self.context_dim = transform.event_shape, context_dim
        self.ladj_kind = transform.ladj_kind
        self.forward_kind, self.inverse_kind = transform.forward_kind, transform.inverse_kind
        self.domain, self.codomain = transform.domain, transform.codomain

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._conditioned(self._directions[0], x, context)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._conditioned(self._directions[1], y, context)

    def _conditioned(self, direction: nn.Module, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        batch = torch.broadcast_shapes(x.shape[: x.ndim - len(self.event_shape)], context.shape[:-1])  # type: ignore[union-attr]
        event = x.shape[x.ndim - len(self.event_shape) :]
        if 0 in batch:  # vmap over no rows at all is refused by some operations
            return x.expand(*batch, *event), x.new_zeros(batch)
        flat = self.hypernet(context).expand(*batch, -1).flatten(0, -2) if batch else self.hypernet(context)[None]
        deltas = flat.split([s.numel() for s in self.shapes.values()], -1)
        params = {
            f"transform.{name}": p + delta.reshape(-1, *p.shape)
            for (name, p), delta in zip(self.transform.named_parameters(), deltas, strict=True)
        }
        call = vmap(lambda values, row: functional_call(direction, values, (row,)))
        y, ladj = call(params, x.expand(*batch, *event).reshape(-1, *event))
        if known(ladj.isfinite().all()) is False:  # inside vmap a failed inversion could only answer NaN
            raise InversionError(
                "a conditional inversion did not converge: its answer has NaN; check the input's range"
            )
        return y.reshape(*batch, *event), ladj.reshape(batch)


class _Direction(nn.Module):
    """One direction of a transform as a module of its own, which is what ``functional_call`` takes."""

    def __init__(self, transform: Transform, inverse: bool) -> None:
        super().__init__()
        self.transform, self.inverse = transform, inverse

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.transform._inverse(x, None) if self.inverse else self.transform._forward(x, None)
