"""Numbers that several rooms need, and checks of numbers that a user writes."""

from __future__ import annotations

import math
from typing import Final

LOG_2PI: Final = math.log(2 * math.pi)


def finite(name: str, value: float) -> None:
    """A ValueError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def positive(name: str, value: float) -> None:
    """A ValueError unless the value is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
