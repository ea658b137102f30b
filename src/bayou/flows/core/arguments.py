"""Checks of sizes, and dtypes for linear algebra."""

from __future__ import annotations

import torch
from torch import Tensor


def positive(dim: int, what: str) -> int:
    """dim if it is a positive int, else a ValueError that names ``what``."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise ValueError(f"{what}: expected a whole number of at least 1, got {dim!r}")
    return dim


def wide(x: Tensor) -> Tensor:
    """x in a dtype that linear algebra supports: half precision becomes float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
