"""The record of rows that were added to and removed from a posterior, and checks of such calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Updates:
    """What ``update`` and ``downdate`` did to a posterior since its fit.

    Args:
        calls: how many calls there were; 0 by default.
        added: how many rows were added; 0 by default.
        removed: how many rows were removed; 0 by default.
        kept: the weight of the rows of the fit, the product of all ``forget``; 1 by default.
    """

    calls: int = 0
    added: int = 0
    removed: int = 0
    kept: float = 1.0

    def after(self, added: int = 0, removed: int = 0, forget: float = 1.0) -> Updates:
        """Return the record after another call.

        Args:
            added: rows that it added.
            removed: rows that it removed.
            forget: the weight that it left to earlier rows.
        """
        return Updates(
            self.calls + 1, self.added + added, self.removed + removed, self.kept * forget
        )

    def to_json(self) -> dict[str, float]:
        """Return the record as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Updates:
        """Return the record that ``to_json`` described.

        Args:
            value: the plain values.
        """
        return Updates(**value)


def check_forget(forget: float | None) -> float:
    """Return the weight of earlier rows, 1 for None.

    Args:
        forget: of ``update``.

    Raises:
        ValueError: unless it is in (0, 1].
    """
    if forget is None:
        return 1.0
    is_number = isinstance(forget, int | float) and not isinstance(forget, bool)
    if not is_number or not 0 < forget <= 1:
        raise ValueError(
            "forget must be the weight of earlier rows, above 0 and at most 1, such as 0.99, got "
            f"{forget!r}; None keeps all of them"
        )
    return float(forget)


def check_removal(rows: int, n: int, updates: Updates) -> None:
    """Raise a ValueError if rows cannot be removed from a posterior, whatever they are.

    Args:
        rows: how many are to be removed.
        n: how many the posterior has.
        updates: what was done to it.
    """
    if updates.kept < 1:
        raise ValueError(
            "rows cannot be removed exactly after an update with forget, since the weight that "
            "they still have is not known; fit again without them"
        )
    if rows >= n:
        raise ValueError(
            f"{rows:,} of {n:,} rows are to be removed, and at least one must remain; without any "
            "the posterior is the prior"
        )
