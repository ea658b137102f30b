"""Loading the files of a user: tables, and arrays of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data import reading
from bayou.data.catalogue import DataError
from bayou.data.columns import Column
from bayou.data.dataset import DataSet
from bayou.data.options import Options
from bayou.data.preprocess import ImagePreprocessor, TablePreprocessor
from bayou.data.splits import split_rows
from bayou.data.tables import table_dataset
from bayou.data.targets import class_names_of


def load_table(path: str | Path, options: Options) -> DataSet:
    """Load a CSV, TSV, Parquet or NPZ file as a data set.

    Args:
        path: the file.
        options: the target, the task and the split.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        return _load_npz(path, options)
    known = () if options.target is None else (options.target,)
    return table_dataset(reading.read_file(path, known), options)


def _load_npz(path: Path, options: Options) -> DataSet:
    """Load arrays x and y, with optional x_test, y_test, x_ood; or columns by name."""
    arrays = reading.arrays(path)
    key = reading.input_key(arrays)
    if key is None:
        return table_dataset(reading.read_file(path), options)
    target = options.target
    if not target:
        target = next((name for name in reading.TARGET_KEYS if name in arrays), "y")
    if target not in arrays:
        names = ", ".join(map(repr, arrays))
        raise DataError(
            f"{path.name} has {key!r}, but no array {target!r} of targets; its arrays are {names}"
        )
    x = arrays[key]
    y = arrays[target]
    if y.size == len(y):
        y = y.reshape(-1)
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(
            f"{key!r} has {len(x)} rows, but {target!r} has shape {y.shape}; one target for each "
            "row is needed"
        )
    test_arrays = None
    if f"{key}_test" in arrays and f"{target}_test" in arrays:
        test_arrays = (arrays[f"{key}_test"], arrays[f"{target}_test"])
    x_ood = arrays.get(f"{key}_ood")
    if x.ndim > 2:
        return _image_dataset(path.name, x, y, test_arrays, x_ood, options)
    table = reading.npz_rows(path.name, x, {target: y})
    test = None
    if test_arrays is not None:
        test = reading.npz_rows(path.name, test_arrays[0], {target: test_arrays[1]})
    ood = None if x_ood is None else reading.npz_rows(path.name, x_ood, {})
    return table_dataset(table, replace(options, target=target), test, ood)


def _image_dataset(
    name: str,
    x: NDArray[Any],
    y: NDArray[Any],
    test: tuple[NDArray[Any], NDArray[Any]] | None,
    ood: NDArray[Any] | None,
    options: Options,
) -> DataSet:
    """Return arrays of images and their classes as a data set."""
    columns = (*options.drop, options.id, options.group, options.split_by_time)
    if any(column is not None for column in columns):
        raise DataError(
            f"{name} contains images; --drop, --id, --group and --split-by-time are for columns of "
            "a table"
        )
    notes: list[str] = []
    classes = class_names_of(Column.of(y), "y", notes)
    images = channels_first(x, name)
    target_encoder = TablePreprocessor((), "y", "classification", classes)
    codes, _ = target_encoder.targets(Column.of(y))
    if test is None:
        train_rows, test_rows = split_rows(
            codes,
            split=options.split,
            seed=options.seed,
            test_fraction=options.test_fraction,
            notes=notes,
        )
        train_pair = (images[train_rows], codes[train_rows])
        test_pair = (images[test_rows], codes[test_rows])
    else:
        train_pair = (images, codes)
        test_codes, _ = target_encoder.targets(Column.of(test[1].reshape(-1)))
        test_pair = (channels_first(test[0], name), test_codes)
    largest = float(x.max())
    white = largest or 1.0
    if x.dtype == np.uint8 or largest > 16:
        white = 255.0
    preprocessor = ImagePreprocessor.fit(train_pair[0], classes, white)
    notes.append(f"Pixels were divided by {white:g} and standardized by the training images.")
    ood_images = None if ood is None else channels_first(ood, name)
    return preprocessor.dataset(name, train_pair, test_pair, ood_images, "x_ood", notes)


def channels_first(x: NDArray[Any], name: str, channels: Sequence[int] = (1, 3, 4)) -> NDArray[Any]:
    """Return images (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W).

    Args:
        x: the images.
        name: of their file, for a message.
        channels: the numbers of channels that images can have.
    """
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] in channels:
        return x
    if x.ndim == 4 and x.shape[3] in channels:
        return x.transpose(0, 3, 1, 2)
    raise DataError(
        f"the images of {name} have shape {x.shape}; (N, H, W), (N, H, W, C) or (N, C, H, W) is "
        "needed"
    )
