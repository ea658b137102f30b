"""Groups of rows, each with its own guarantee (Mondrian, Vovk 2003)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Label = bool | int | float | str | None
Groups = Sequence[Any] | Tensor
ONE_GROUP: tuple[Label, ...] = (None,)  # the labels of rows without groups


def row_labels(groups: Groups, rows: int) -> list[Label]:
    """Return the label of the group of each row, as a number or a string of Python.

    Args:
        groups: one label for each row.
        rows: the number of rows.

    Raises:
        ValueError: for another number of labels, or a label of another type.
    """
    values: Iterable[Any] = groups.tolist() if hasattr(groups, "tolist") else groups
    labels = list(values)
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} labels for {rows} rows; it needs one for each")
    for label in labels:
        if not isinstance(label, bool | int | float | str) or label != label:
            raise ValueError(
                f"a group's label must be a number or a string and not NaN, got {label!s:.60}"
            )
    return labels


def held_out_labels(groups: Groups | None, rows: int) -> list[Label]:
    """Return the label of each held-out row; None for all without groups.

    Args:
        groups: one label for each row, or None.
        rows: the number of rows.
    """
    return [None] * rows if groups is None else row_labels(groups, rows)


def new_positions(known: tuple[Label, ...], groups: Groups | None, rows: int) -> Tensor:
    """Return the position of the group of each new row among the known groups: (B,).

    Args:
        known: the groups of the held-out rows; (None,) without groups.
        groups: the label of each new row; None without groups.
        rows: the number of new rows B.

    Raises:
        ValueError: for labels that are missing, superfluous or unknown.
    """
    if known == ONE_GROUP:
        if groups is not None:
            raise ValueError(
                "groups were given, but not for the held-out rows; pass conformal(..., groups=...)"
            )
        return torch.zeros(rows, dtype=torch.long)
    if groups is None:
        raise ValueError("the guarantee is by group; pass the group of each row as groups=...")
    labels = row_labels(groups, rows)
    positions = {label: position for position, label in enumerate(known)}
    unknown = [label for label in dict.fromkeys(labels) if label not in positions]
    if unknown:
        names = ", ".join(map(str, known))
        raise ValueError(f"no held-out row is in the group {unknown[0]!r}; the groups are {names}")
    return torch.tensor([positions[label] for label in labels], dtype=torch.long)


def group_phrase(group: Label) -> str:
    """Return " of the group 'a'" for a message, or nothing without groups.

    Args:
        group: its label.
    """
    return "" if group is None else f" of the group {group!r}"
