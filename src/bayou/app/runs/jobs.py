"""The jobs of a run: one method with one seed on one split of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Job:
    """One method with one seed on one split.

    Args:
        method: its name.
        seed: of its initial weights, its fit and its predictions.
        split: the number of the split; None for the first of the run.
    """

    method: str
    seed: int
    split: int | None = None

    @property
    def name(self) -> str:
        """The name of the job's folder, such as mnf-0 or mnf-0-split-2."""
        return f"{self.method}-{self.seed}{split_suffix(self.split)}"


def split_suffix(split: int | None) -> str:
    """Return the suffix of names that belong to another split than the first.

    Args:
        split: the number of the split; None for the first of the run.
    """
    return "" if split is None else f"-split-{split}"
