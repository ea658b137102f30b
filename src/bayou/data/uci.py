"""The nine UCI regression sets, split as by Hernández-Lobato & Adams 2015 and Gal & Ghahramani
2016.
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
    """One published split; inputs and target standardized by its training rows, which keep their
    published order.
    """
    assert entry.splits is not None
    if not 0 <= split < entry.splits:
        raise DataError(f"{entry.name!r} has the splits 0 to {entry.splits - 1}, got {split}")
    path = files.require(entry, root)[UCI_ARCHIVE.path]
    x_train, y_train, x_test, y_test = read_split(path, entry.folder, split)
    columns = tuple(Number.fit(f"x{i + 1}", values) for i, values in enumerate(x_train.T))
    preprocessor = TablePreprocessor(
        columns, "y", "regression", y_mean=float(y_train.mean()), y_scale=float(y_train.std())
    )
    notes = [
        f"Published split {split} of {entry.splits}; inputs and target standardized by its training rows."
    ]
    if still := [column.name for column in columns if column.low == column.high]:
        notes.append(f"Constant inputs are kept, as published, and become 0: {', '.join(still)}.")

    def pair(x: NDArray[Any], y: NDArray[Any]) -> Pair:
        return preprocessor.pair(
            {column.name: values for column, values in zip(columns, x.T, strict=True)} | {"y": y}
        )

    return DataSet.of(
        entry.name, preprocessor, pair(x_train, y_train), pair(x_test, y_test), None, None, notes
    )


def read_split(
    path: Path, folder: str, split: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """x and y of the training and of the test rows, from ``UCI_Datasets/<folder>/data/*.txt`` in
    the archive.
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
    found = {stem: np.loadtxt(io.BytesIO(texts[name]), ndmin=1) for stem, name in names.items()}
    data = np.atleast_2d(found["data"])
    features, target = found["index_features"].astype(int), int(found["index_target"][0])
    train, test = (found[f"index_{part}_{split}"].astype(int) for part in ("train", "test"))
    return (
        data[train][:, features],
        data[train, target],
        data[test][:, features],
        data[test, target],
    )
