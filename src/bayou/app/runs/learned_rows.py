"""Which rows the posteriors of a run have learned, by their digests in updates.json."""

from __future__ import annotations

import hashlib
from collections import Counter

from torch import Tensor

from bayou.app.runs.folder import Run, RunError
from bayou.core.files import StrPath

DIGEST_BYTES = 8  # of a row in updates.json


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


def learned_by_updates(run: Run, learned: Counter[str]) -> Counter[str]:
    """Count the rows that the posteriors of a run have learned after ``bayou update``.

    Args:
        run: the run folder.
        learned: the digests of the rows before all updates.
    """
    for record in run.updates():
        digests = Counter(record["rows"])
        learned = learned - digests if record["removed"] else learned + digests
    return learned


def check_not_learned(run: Run, x: Tensor, y: Tensor, source: StrPath) -> None:
    """Raise a RunError if held-out rows are rows that ``bayou update`` has added to a run.

    As many of them are tolerated as duplicates among the added rows explain.

    Args:
        run: the run folder.
        x: inputs in the precision of the run, (N, ...).
        y: targets, (N, ...).
        source: the file of the rows.
    """
    learned = learned_by_updates(run, Counter())
    if not learned:
        return
    digests = row_digests(x, y)
    count = sum(row in learned for row in digests)
    duplicates = sum(number for number in learned.values() if number > 1)
    if count > 1 + 2 * duplicates / learned.total() * len(digests):
        raise RunError(
            f"{count:,} of {len(digests):,} rows of {source} were learned by `bayou update`, and a "
            "posterior is better on these than on new ones; give rows that it has not learned"
        )
