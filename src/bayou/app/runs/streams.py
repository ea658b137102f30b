"""Sequential comparison of a stream of rows: ``bayou watch --state`` and ``--every``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bayou.app.runs.json_files import RunError
from bayou.app.runs.watching import WatchedRows, WatchedRun
from bayou.core.progress import spell
from bayou.diagnostics import ShiftMartingale


def looks(
    watched: WatchedRun, rows: WatchedRows, alpha: float, state: Path | None, every: int | None
) -> Iterator[ShiftMartingale]:
    """Yield the state of a sequential test after each part of the rows, and save it.

    Args:
        watched: the run.
        rows: new rows, in their order.
        alpha: the largest probability of a false alarm, ever.
        state: a file that is read, if it exists, and written after each part; None for none.
        every: rows of a part; None for all at once.

    Raises:
        RunError: a column is missing, or the state has another alpha.
    """
    if rows.x is None:
        raise RunError(" ".join(rows.mistakes))
    if every is not None and every < 1:
        raise RunError(f"{spell('every', '--every')} must be at least 1, got {every}")
    if state is not None and state.exists():
        test = ShiftMartingale.load(state)
        if test.alpha != alpha:
            raise RunError(
                f"{state} was started with alpha {test.alpha:g}, got {alpha:g}; a sequential test "
                "keeps its level: give the same, or another --state"
            )
    else:
        test = ShiftMartingale.start(
            watched.posterior, watched.reference, alpha=alpha, samples=watched.samples
        )
    size = every or len(rows.x)
    for start in range(0, len(rows.x), size):
        part = slice(start, start + size)
        targets = None if rows.y is None else rows.y[part]
        test = test.update(watched.posterior, rows.x[part], targets)
        if state is not None:
            test.save(state)
        yield test


def look_row(test: ShiftMartingale) -> dict[str, Any]:
    """Return the state of a sequential test as a row of a table.

    Args:
        test: the state.
    """
    strongest = max(test.streams, key=test.evidence)
    return {
        "rows": str(test.rows),
        "verdict": test.verdict,
        "capital": test.evidence(strongest),
        "threshold": test.threshold,
        "of": strongest,
    }
