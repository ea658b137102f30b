"""Checks of sizes; the dtype of linear algebra."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_size(size: int, name: str, least: int = 1) -> int:
    """Return a size, or raise an error unless it is a whole number.

    Args:
        size: the number that a caller gave.
        name: what the number is, for the error.
        least: the smallest valid number; 1 by default.

    Raises:
        ValueError: unless the size is an int of at least ``least``.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {size!r}")
    return size


def as_event(size: int | Sequence[int], name: str = "the size") -> tuple[int, ...]:
    """Return a size, or several, as the shape of an event.

    Args:
        size: the size of a vector, or the sizes of the axes of an event.
        name: what the size is, for the error.

    Raises:
        ValueError: unless there is at least one size and all are positive.
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not sizes:
        raise ValueError(f"{name}: expected an event with at least one axis, got {size!r}")
    return tuple(check_size(axis_size, name) for axis_size in sizes)


def promote(x: Tensor) -> Tensor:
    """Return x in a dtype that linear algebra supports: half precision becomes float32.

    Args:
        x: a floating-point tensor.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x
