"""Data sets: by name, or from a file of the user.

>>> from bayou.data import load
>>> load("two-bumps")
DataSet('two-bumps': regression, inputs 1, 100 train, 200 test, 200 gap out of distribution)

Nothing here imports numpy or torch until data are loaded, so that listing the names is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bayou.data.catalogue import CATALOGUE, TABLE_SUFFIXES, DataError, Entry, Task, find
from bayou.data.dataset import DataSet
from bayou.data.files import available, cache_dir, download

__all__ = [
    "CATALOGUE",
    "DataError",
    "DataSet",
    "Entry",
    "Task",
    "available",
    "cache_dir",
    "download",
    "find",
    "load",
]


def load(
    name_or_path: str | Path,
    *,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    id: str | None = None,
    group: str | None = None,
    split_by_time: str | None = None,
    split: int = 0,
    seed: int = 0,
    test_fraction: float = 0.2,
    ood: str | None = None,
    observed: str | None = None,
    order: str | Sequence[str] | None = None,
    scale_target: bool = True,
    root: str | Path | None = None,
) -> DataSet:
    """Load a data set by name, or a file with a target column.

    Args:
        name_or_path: a name of ``CATALOGUE``, or the path of a CSV, TSV, Parquet or NPZ file.
        target: the target column of a file.
        task: "classification" or "regression"; by default inferred from the target.
        drop: columns of a file that are not used.
        id: the column of a file that identifies rows: not an input, copied to predictions.
        group: the column of a file that tells which rows belong together, such as a patient: all of
            them are test rows, or none. It is not an input.
        split_by_time: the column of a file, dates or numbers, by which the latest rows are the test
            rows.
        split: the number of one of the published splits, or of those generated from ``seed``.
        seed: of generated data and splits.
        test_fraction: of the rows of a file, which are held out; 0.2 by default.
        ood: another source of out-of-distribution images, or ``"none"``.
        observed: the column of a file that says which rows were observed: a column of two values,
            of which the larger one (1, true, yes) means that the event happened at the time of the
            target, and the other that the row was censored then. y is (N, 2), time and 1 or 0.
        order: the classes of an ordered target from low to high, a list or a text with commas.
        scale_target: whether the target of a regression is standardized (default True).
        root: a folder in which files are looked for before ``$BAYOU_DATA`` and the cache.

    Returns:
        Training and test rows as tensors, standardized by the training rows.

    Raises:
        DataError: there is no such data set, a file is missing, or the data cannot be used.

    Example:
        >>> from bayou.data import load
        >>> data = load("moons")
        >>> x, y = data.train
    """
    from bayou.data.options import Options, class_order

    options = Options(
        target,
        task,
        tuple(drop),
        id,
        split,
        seed,
        test_fraction,
        group,
        split_by_time,
        observed,
        class_order(order),
        scale_target,
    )
    if isinstance(name_or_path, Path) or is_path(name_or_path):
        if ood is not None:
            raise DataError(
                "--ood is for data sets by name; in an NPZ file, add an array x_ood to x and y"
            )
        from bayou.data.loading import load_table

        return load_table(name_or_path, options)
    entry = find(name_or_path)
    options.check_published(entry)
    return _load_by_name(entry, split, seed, ood, root)


def _load_by_name(
    entry: Entry, split: int, seed: int, ood: str | None, root: str | Path | None
) -> DataSet:
    """Load or generate a data set of the catalogue."""
    if entry.source == "images":
        if split:
            raise DataError(f"{entry.name!r} has one published split, 0; got {split}")
        from bayou.data.images import load_images

        return load_images(entry, ood, root)
    if entry.source == "uci":
        from bayou.data.uci import load_uci

        _check_no_ood(entry, ood)
        return load_uci(entry, split, root)
    from bayou.data import toys

    if entry.name.startswith("digits"):
        return toys.digits(entry, split, ood)
    _check_no_ood(entry, ood)
    generators: dict[str, Callable[[Entry, int], DataSet]] = {
        "moons": toys.moons,
        "cubic": toys.cubic,
    }
    if entry.splits is not None and split >= entry.splits:
        raise DataError(f"{entry.name!r} has one split, 0; got {split}")
    generate = generators.get(entry.name, toys.two_bumps)
    return generate(entry, seed + 1000 * split)


def is_path(text: str) -> bool:
    """Return whether a text names a file rather than a data set.

    It does by its suffix, a separator, or because the file exists.

    Args:
        text: a name or a path.
    """
    if text in CATALOGUE:
        return False
    if text.lower().endswith(TABLE_SUFFIXES) or "/" in text or "\\" in text:
        return True
    return Path(text).is_file()


def _check_no_ood(entry: Entry, ood: str | None) -> None:
    """Raise a DataError if another source is requested for a data set that cannot have one."""
    if ood not in (None, *entry.ood):
        raise DataError(f"ood of {entry.name!r} cannot be chosen; got {ood!r}")
