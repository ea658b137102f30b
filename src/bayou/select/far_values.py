"""Numbers that stand for something else, such as 999999999 for a missing value."""

from __future__ import annotations

import warnings
from typing import Any, Final, TypeGuard

import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.core.progress import BayouWarning
from bayou.training.sentinels import MIN_JUMP_OF_CODES, find_sentinels

MAX_NUMBERS: Final = 2**23  # of a tensor, beyond which it is not searched
MIN_IMAGE_PIXELS: Final = 64  # columns of a flattened image
MIN_SHARE_OF_PIXELS: Final = 0.25  # of the columns, whose largest value is that of all pixels


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


def replace_sentinels(
    inputs: tuple[Any, ...], y: object, *, refuses_targets: bool
) -> tuple[Any, ...]:
    """Return inputs with the median of a column in place of values absurdly far from all others.

    A warning names them. Targets are not replaced.

    Args:
        inputs: the inputs of the network; tables (N, D) of real numbers but images are searched.
        y: the targets; real numbers (N,) or (N, D) are searched.
        refuses_targets: whether such a target is an error, rather than a warning.

    Returns:
        The inputs; those without such values are the same objects.

    Raises:
        ValueError: for such a target.
    """
    replaced = list(inputs)
    for number, values in enumerate(inputs):
        if not is_table(values) or is_flattened_image(values):
            continue
        columns = values.detach().reshape(len(values), -1)
        flags = flag_sentinels(columns)
        if not bool(flags.any()):
            continue
        medians = torch.where(flags, torch.nan, columns).nanmedian(0).values
        replaced[number] = torch.where(flags, medians, columns).reshape(values.shape)
        name = "x" if len(inputs) == 1 else f"input {number} of x"
        warnings.warn(
            f"{_describe(columns, flags, name)}; counted as missing and replaced by the median of "
            "the others for the fit: replace them so in x yourself, here and for predictions, and "
            "add a 0/1 column that marks them; if they are right, use the logarithm",
            SentinelWarning,
            stacklevel=4,
        )
    _check_targets(y, refuses_targets)
    return tuple(replaced)


def replace_in_array(x: NDArray[Any], y: NDArray[Any], *, refuses_targets: bool) -> NDArray[Any]:
    """Do as ``replace_sentinels`` for arrays.

    Args:
        x: one table, (N, D).
        y: the targets.
        refuses_targets: whether a target far from all others is an error.
    """
    inputs = (torch.tensor(x),)
    table: Tensor = replace_sentinels(inputs, torch.tensor(y), refuses_targets=refuses_targets)[0]
    return table.numpy()


def _check_targets(y: object, refuses_targets: bool) -> None:
    """Raise a ValueError, or warn, for targets that are absurdly far from all others."""
    if not is_table(y):
        return
    columns = y.detach().reshape(len(y), -1)
    flags = flag_sentinels(columns)
    if not bool(flags.any()):
        return
    text = _describe(columns, flags, "y")
    if refuses_targets:
        raise ValueError(
            f"{text}: beside them the others would all be the same; leave out these rows if they "
            "stand for missing values, or predict the logarithm of y if they are right"
        )
    warnings.warn(
        f"{text}: the fit depends mostly on them; leave out these rows if they stand for missing "
        "values",
        SentinelWarning,
        stacklevel=5,
    )


def is_table(values: object) -> TypeGuard[Tensor]:
    """Return whether values are a tensor of real numbers, (N,) or (N, D).

    Args:
        values: an input or the targets.
    """
    return isinstance(values, Tensor) and values.is_floating_point() and values.ndim in (1, 2)


def is_flattened_image(x: Tensor) -> bool:
    """Return whether the columns of x (N, D) are pixels: many, none negative, most with the same
    largest value.

    Args:
        x: an input of the network.
    """
    if x.ndim != 2 or x.shape[1] < MIN_IMAGE_PIXELS or bool((x < 0).any()):
        return False
    largest = x.amax(0)
    share = (largest == largest.max()).double().mean()
    return bool(largest.max() > 0) and float(share) >= MIN_SHARE_OF_PIXELS


def _describe(columns: Tensor, flags: Tensor, name: str) -> str:
    """Return a description of the values that are flagged.

    Args:
        columns: all numbers, (N, D).
        flags: which of them are flagged, at least one.
        name: of the table.
    """
    row, number = flags.nonzero()[0].tolist()
    column = columns[:, number]
    others = column[~flags[:, number] & column.isfinite()]
    position = f"in row {row}"
    if columns.shape[1] > 1:
        position = f"{position} of column {number}"
    count = int(flags.sum())
    more = f" ({count:,} such values)" if count > 1 else ""
    limits = f"{float(others.min()):g} to {float(others.max()):g}"
    return f"{name} is {float(column[row]):.9g} {position}{more}, far from all others ({limits})"
