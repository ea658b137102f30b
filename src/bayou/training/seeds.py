"""Seeds of a run and of its parts."""

from __future__ import annotations

import operator
from typing import Any

from bayou.core import rng


def as_int_seed(seed: Any) -> int:
    """Return the seed of a run as an int.

    Args:
        seed: a whole number; numpy's and torch's count, booleans do not.

    Raises:
        ValueError: for anything else.
    """
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"the seed of a run must be a whole number, got {seed!r}") from None


def part_seed(seed: int, *names: str | int) -> int:
    """Return the seed of a named part of a run.

    Args:
        seed: the seed of the run.
        names: the name of the part, and numbers in it.
    """
    return rng.integer(rng.fold(seed, *names))
