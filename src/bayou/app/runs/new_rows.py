"""The rows of ``bayou update``, and whether a run has learned them before."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.learned_rows import learned_by_updates, row_digests
from bayou.app.runs.predictions import network_dtype
from bayou.data import DataSet
from bayou.posteriors import Posterior


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
    learned = learned_by_updates(run, Counter(row_digests(*data.train)))
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


def check_rows_of_fit(
    run: Run, posterior: Posterior, new_rows: NewRows, data: DataSet | None
) -> None:
    """Raise a ValueError if rows to remove may be training rows that a fit has held out.

    A fit to many rows holds some of them out for good; which ones is not in the file.

    Args:
        run: the run folder.
        posterior: of the run.
        new_rows: the rows of the update.
        data: the data of the run; None if they are gone, and then nothing is compared.
    """
    if not new_rows.remove or data is None:
        return
    updates = posterior.updates
    rows = len(data.train[1])
    held_out_count = rows - (posterior.target.n - updates.added + updates.removed)
    digests = Counter(row_digests(new_rows.x, new_rows.y))
    if held_out_count > 0 and digests - learned_by_updates(run, Counter()):
        raise ValueError(
            f"its fit held out {held_out_count:,} of the {rows:,} training rows, and the file does "
            "not say which, so that only rows of earlier updates can be removed exactly"
        )
