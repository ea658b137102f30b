"""Checks of sizes; the dtype of linear algebra."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def positive(size: int, what: str, least: int = 1) -> int:
    """``size``, or a ValueError that names ``what`` unless it is an int of at least ``least``."""
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise ValueError(f"{what}: expected a whole number of at least {least}, got {size!r}")
    return size


def as_event(size: int | Sequence[int], what: str = "the size") -> tuple[int, ...]:
    """One size or several as the shape of an event."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not sizes:
        raise ValueError(f"{what}: expected an event with at least one axis, got {size!r}")
    return tuple(positive(each, what) for each in sizes)


def promote(x: Tensor) -> Tensor:
    """x in a dtype that linear algebra supports: half precision is promoted to float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
