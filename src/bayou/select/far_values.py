"""Numbers that stand for something else, such as 999999999 for a missing value."""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.core.progress import BayouWarning
from bayou.training.sentinels import MIN_JUMP_OF_CODES, find_sentinels

MAX_NUMBERS: Final = 2**23  # of a tensor, beyond which it is not searched


class SentinelWarning(BayouWarning):
    """Values of x or y are so far from all others of their column that they cannot be real."""


def flag_sentinels(columns: Tensor) -> Tensor:
    """Return which numbers of a table are far from all others of their column, (N, D).

    They are those of ``find_sentinels``.

    Args:
        columns: numbers, (N, D).
    """
    flags = torch.zeros(columns.shape, dtype=torch.bool, device=columns.device)
    if not 0 < columns.numel() <= MAX_NUMBERS:
        return flags
    distances = (columns.double() - columns.double().median(0).values).abs()
    is_candidate = distances.amax(0) >= MIN_JUMP_OF_CODES * distances.median(0).values
    for column in is_candidate.nonzero().flatten().tolist():
        is_far = find_sentinels(columns[:, column].detach().double().cpu().numpy())
        flags[:, column] = torch.as_tensor(is_far, device=flags.device)
    return flags


def check_sentinels(inputs: tuple[Any, ...], y: Any, refuses_targets: bool) -> None:
    """Warn of values of x, and refuse values of y, that are absurdly far from all others.

    Args:
        inputs: the inputs of the network; tables (N, D) of real numbers are searched.
        y: the targets; real numbers (N,) or (N, D) are searched.
        refuses_targets: whether such a target is an error, rather than a warning.
    """
    for number, item in enumerate(inputs):
        name = "x" if len(inputs) == 1 else f"input {number} of x"
        if text := _describe(item, name):
            warnings.warn(
                f"{text}; counted as missing and replaced by the median of the others for the fit: replace them so in "
                "x yourself, here and for predictions, and add a 0/1 column that marks them; if they are right, use "
                "the logarithm",
                SentinelWarning,
                stacklevel=4,
            )
    text = _describe(y, "y")
    if not text:
        return
    if refuses_targets:
        raise ValueError(
            f"{text}: beside them the others would all be the same; leave out these rows if they stand for missing "
            "values, or predict the logarithm of y if they are right"
        )
    warnings.warn(
        f"{text}: the fit depends mostly on them; leave out these rows if they stand for missing values",
        SentinelWarning,
        stacklevel=4,
    )


def replace_sentinels(values: Any) -> Any:
    """Return a table of real numbers with the median of a column in place of its sentinels; others
    as they are.

    Args:
        values: one input of the network.
    """
    if not _is_table(values):
        return values
    columns = values.detach().reshape(len(values), -1)
    flags = flag_sentinels(columns)
    if not bool(flags.any()):
        return values
    medians = torch.where(flags, torch.nan, columns).nanmedian(0).values
    return torch.where(flags, medians, columns).reshape(values.shape)


def check_arrays(x: NDArray[Any], y: NDArray[Any], refuses_targets: bool) -> None:
    """Do as ``check_sentinels`` for arrays.

    Args:
        x: one table, (N, D).
        y: the targets.
        refuses_targets: whether a target far from all others is an error.
    """
    check_sentinels((torch.tensor(x),), torch.tensor(y), refuses_targets)


def _is_table(values: Any) -> bool:
    """Return whether values are a tensor of real numbers, (N,) or (N, D)."""
    return isinstance(values, Tensor) and values.is_floating_point() and values.ndim in (1, 2)


def _describe(values: Any, name: str) -> str:
    """Return a description of the sentinels of a tensor; an empty string for none."""
    if not _is_table(values):
        return ""
    columns = values.detach().reshape(len(values), -1)
    flags = flag_sentinels(columns)
    count = int(flags.sum())
    if not count:
        return ""
    row, place = flags.nonzero()[0].tolist()
    column = columns[:, place]
    others = column[~flags[:, place] & column.isfinite()]
    where = f"in row {row}"
    if columns.shape[1] > 1:
        where = f"{where} of column {place}"
    more = f" ({count:,} such values)" if count > 1 else ""
    limits = f"{float(others.min()):g} to {float(others.max()):g}"
    return f"{name} is {float(column[row]):.9g} {where}{more}, far from all others ({limits})"
