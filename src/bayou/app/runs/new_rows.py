"""The rows of ``bayou update``, and whether a run has learned them before."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import network_dtype
from bayou.data import DataSet
from bayou.posteriors import Posterior

DIGEST_BYTES = 8  # of a row in updates.json


@final
@dataclass(frozen=True)
class NewRows:
    """The rows of an update.

    Args:
        source: the file they are from.
        x: inputs in the precision of the run, (N, ...).
        y: targets, (N, ...).
        forget: the factor λ of the information in old rows; None to keep all of it.
        remove: whether the rows are removed instead of learned.
    """

    source: str
    x: Tensor
    y: Tensor
    forget: float | None
    remove: bool

    def apply(self, posterior: Posterior) -> Posterior:
        """Return the posterior that has learned these rows, or no longer has them.

        Args:
            posterior: of the run.
        """
        x = self.x.to(network_dtype(posterior))
        if self.remove:
            return posterior.downdate((x, self.y))
        return posterior.update((x, self.y), forget=self.forget)

    def describe(self) -> str:
        """Return the sentence of this update for the report."""
        count = f"{len(self.y):,} rows of {Path(self.source).name}"
        if self.remove:
            return f"{count} were removed from the posterior after the fit."
        factor = "" if self.forget is None else f", with --forget {self.forget:g}"
        return f"{count} were learned after the fit{factor}."


def row_digests(x: Tensor, y: Tensor) -> list[str]:
    """Return a digest of every row; numbers are compared in float32.

    Args:
        x: inputs, (N, ...).
        y: targets, (N, ...).
    """
    columns = [
        (values.float() if values.is_floating_point() else values.long()).cpu().numpy()
        for values in (x, y)
    ]
    return [
        hashlib.blake2b(
            b"".join(cell.tobytes() for cell in row), digest_size=DIGEST_BYTES
        ).hexdigest()
        for row in zip(*columns, strict=True)
    ]


def _learned_rows(run: Run, data: DataSet) -> Counter[str]:
    """Count the rows that the posteriors of a run have learned: training rows and updates."""
    learned = Counter(row_digests(*data.train))
    for record in run.updates():
        digests = Counter(record["rows"])
        learned = learned - digests if record["removed"] else learned + digests
    return learned


def check_known_rows(run: Run, new_rows: NewRows, data: DataSet | None) -> list[str]:
    """Compare the rows of an update with those that a run has learned.

    Args:
        run: the run folder.
        new_rows: the rows of the update.
        data: the data of the run; None if they are gone, and then nothing is compared.

    Returns:
        Notes about rows that were learned before, and about test rows.

    Raises:
        RunError: rows are to be removed that were not learned.
    """
    if data is None:
        return []
    digests = Counter(row_digests(new_rows.x, new_rows.y))
    learned = _learned_rows(run, data)
    unknown_count = (digests - learned).total()
    if new_rows.remove:
        if unknown_count:
            raise RunError(
                f"{unknown_count:,} of {digests.total():,} rows of {new_rows.source} are neither "
                f"training rows of {run.folder} nor rows that it learned later; only rows that "
                "were learned can be removed"
            )
        return []
    notes = []
    known_count = sum(count for row, count in digests.items() if row in learned)
    if known_count:
        notes.append(
            f"{known_count:,} of {digests.total():,} rows equal rows that were learned before; "
            "each of them counts once more now."
        )
    test_rows = set(row_digests(*data.test))
    test_count = sum(count for row, count in digests.items() if row in test_rows)
    if test_count:
        notes.append(
            f"{test_count:,} of {digests.total():,} rows equal test rows of the run: its scores on "
            "test rows are too good from now on."
        )
    return notes
