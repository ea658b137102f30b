"""The nine UCI regression sets.

They are split as by Hernández-Lobato & Adams (2015) and Gal & Ghahramani (2016).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data import files
from bayou.data.catalogue import UCI_ARCHIVE, DataError, Entry
from bayou.data.dataset import DataSet, Pair
from bayou.data.encoders import Number
from bayou.data.preprocess import TablePreprocessor
from bayou.data.reading import unpack_archive


def load_uci(entry: Entry, split: int = 0, root: str | Path | None = None) -> DataSet:
    """Load a published split; inputs and target are standardized by its training rows.

    The rows keep their published order.

    Args:
        entry: of the catalogue.
        split: its number.
        root: a folder with the archive.
    """
    if entry.splits is None:
        raise DataError(f"{entry.name!r} has no published splits")
    if not 0 <= split < entry.splits:
        raise DataError(f"{entry.name!r} has the splits 0 to {entry.splits - 1}, got {split}")
    path = files.require(entry, root)[UCI_ARCHIVE.path]
    x_train, y_train, x_test, y_test = read_split(path, entry.folder, split)
    columns = tuple(Number.fit(f"x{i + 1}", values) for i, values in enumerate(x_train.T))
    preprocessor = TablePreprocessor(
        columns, "y", "regression", y_mean=float(y_train.mean()), y_scale=float(y_train.std())
    )
    notes = [
        f"Published split {split} of {entry.splits}; inputs and target standardized by its "
        "training rows."
    ]
    constant = [column.name for column in columns if column.low == column.high]
    if constant:
        names = ", ".join(constant)
        notes.append(f"Constant inputs are kept, as published, and become 0: {names}.")

    def pair(x: NDArray[Any], y: NDArray[Any]) -> Pair:
        values = {column.name: x[:, i] for i, column in enumerate(columns)}
        return preprocessor.pair(values | {"y": y})

    train = pair(x_train, y_train)
    test = pair(x_test, y_test)
    return DataSet.of(entry.name, preprocessor, train, test, None, None, notes)


def read_split(
    path: Path,
    folder: str,
    split: int,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return x and y of the training rows, then x and y of the test rows.

    Args:
        path: the archive, with ``UCI_Datasets/<folder>/data/*.txt``.
        folder: of the data set.
        split: its number.
    """
    stems = (
        "data",
        "index_features",
        "index_target",
        f"index_train_{split}",
        f"index_test_{split}",
    )
    names = {stem: f"UCI_Datasets/{folder}/data/{stem}.txt" for stem in stems}
    texts = unpack_archive(path, names.values())
    arrays = {stem: np.loadtxt(io.BytesIO(texts[name]), ndmin=1) for stem, name in names.items()}
    data = np.atleast_2d(arrays["data"])
    features = arrays["index_features"].astype(int)
    target = int(arrays["index_target"][0])
    train = arrays[f"index_train_{split}"].astype(int)
    test = arrays[f"index_test_{split}"].astype(int)
    return (
        data[train][:, features],
        data[train, target],
        data[test][:, features],
        data[test, target],
    )
