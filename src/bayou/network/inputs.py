"""Inputs of a network: as a tuple of arguments, checked before the call, and described in the errors of the call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bayou.network.mapping import out_of_memory


def forward_inputs(x: Any) -> tuple[Any, ...]:
    """The arguments of the network: a tuple of inputs unchanged, anything else as one argument."""
    if isinstance(x, Mapping):
        raise ValueError(
            f"x is a {type(x).__name__} with the keys {', '.join(map(str, x))}; the inputs of a network are a tensor "
            "or a tuple of them, in the order of its arguments: tuple(x.values()) of a dict"
        )
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


@contextmanager
def clear_errors(x: Any) -> Iterator[None]:
    """Errors of the network about its inputs, as a ValueError that shows the inputs."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        inputs = ", ".join(
            f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
            if isinstance(item, Tensor)
            else type(item).__name__
            for item in forward_inputs(x)
        )
        whole = any(isinstance(item, Tensor) and not item.is_floating_point() for item in forward_inputs(x))
        way = "; if x has numbers rather than indices, use x.float()" if whole else ""
        raise ValueError(f"the network cannot take x = {inputs}: {error}{way}") from error


def check_dtype(x: Any, like: Tensor) -> None:
    """A ValueError if the inputs have another floating-point type than the parameters."""
    for item in forward_inputs(x):
        if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != like.dtype:
            raise ValueError(f"x is {item.dtype} but the network is {like.dtype}; use x.to({like.dtype})")


def placed(x: Any, like: Tensor) -> tuple[Any, ...]:
    """The inputs on the device of the parameter ``like``; a ValueError unless they are finite rows of its dtype."""
    inputs = forward_inputs(x)
    if not inputs or not isinstance(inputs[0], Tensor) or inputs[0].ndim == 0:
        what = type(inputs[0]).__name__ if inputs else "an empty tuple"
        raise ValueError(
            f"x must be a tensor whose first axis is the rows, or a tuple of them, got {what}; use "
            "torch.as_tensor(x, dtype=torch.float32)"
        )
    check_dtype(inputs, like)
    for item in inputs:
        if isinstance(item, Tensor):
            if item.ndim == 0 or len(item) != len(inputs[0]):
                raise ValueError(f"the inputs have {[tuple(i.shape) for i in inputs]}: they need the same rows")
            if item.is_floating_point() and not bool(item.isfinite().all()):
                raise ValueError("x has NaN or infinite values; remove or impute them first")
    return tuple(item.to(like.device) if isinstance(item, Tensor) else item for item in inputs)


def rows_of(inputs: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    """These rows of all inputs that are tensors: ``index`` is a slice or a tensor of numbers."""
    return tuple(item[index] if isinstance(item, Tensor) else item for item in inputs)
