"""Images from published files: the idx format of MNIST and its relatives, CIFAR-10 as binary
batches or as sheets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data import files
from bayou.data.catalogue import (
    CATALOGUE,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    DataError,
    Entry,
)
from bayou.data.dataset import DataSet, Pair
from bayou.data.preprocess import ImagePreprocessor
from bayou.data.reading import unpack, unpack_archive

Bytes = NDArray[np.uint8]
Images = tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]  # x and y, to train on and to test on
SIDE, CHANNELS = 32, 3
_RECORD = 1 + CHANNELS * SIDE * SIDE


def load_images(entry: Entry, ood: str | None = None, root: str | Path | None = None) -> DataSet:
    """A data set of images, standardized by its training images, with out-of-distribution inputs if
    available.
    """
    if not entry.classes:
        raise DataError(
            f"{entry.name!r} has no training images here; it serves as out-of-distribution data for others: "
            f"`bayou train mnist --ood {entry.name}`"
        )
    notes, apart = list[str](), entry.name == "cifar5"
    train, test = cifar10(entry, root) if entry.name.startswith("cifar") else idx_set(entry, root)
    away_name: str | None
    away: NDArray[Any] | None
    away_name = away = None
    if apart:
        train, test, away = classes_apart(train, test, range(5))
        away_name = entry.ood[0]
    if ood is not None or not apart:
        away_name, away = _elsewhere(entry, ood, root, notes) if ood != "none" else (None, None)
    preprocessor = ImagePreprocessor.fit(train[0], entry.classes)
    notes.append(
        "Pixels were divided by 255 and standardized by the mean and scale of the training images."
    )
    if away is not None and tuple(away.shape[1:]) != preprocessor.shape:
        raise DataError(
            f"{ood!r} has images of {away.shape[1:]}, {entry.name!r} of {preprocessor.shape}"
        )
    return preprocessor.dataset(entry.name, train, test, away, away_name, notes)


def classes_apart(train: Pair, test: Pair, kept: Iterable[int]) -> tuple[Pair, Pair, NDArray[Any]]:
    """Only the classes ``kept`` (the first ones), and the test inputs of all others."""
    keep = list(kept)
    first, second = np.isin(train[1], keep), np.isin(test[1], keep)
    return (train[0][first], train[1][first]), (test[0][second], test[1][second]), test[0][~second]


def _elsewhere(
    entry: Entry, ood: str | None, root: str | Path | None, notes: list[str]
) -> tuple[str | None, Bytes | None]:
    """Test images of another data set: the requested one, or the first available."""
    wanted = (
        ood
        if ood is not None
        else next((n for n in entry.ood if files.available(CATALOGUE[n], root)), None)
    )
    if wanted is None:
        if entry.ood:
            notes.append(
                f"No out-of-distribution data: none of {', '.join(entry.ood)} is available."
            )
        return None, None
    other = CATALOGUE.get(wanted)
    if other is None or other.source != "images":
        names = ", ".join(
            e.name for e in CATALOGUE.values() if e.source == "images" and e.name != entry.name
        )
        raise DataError(f"ood must be another set of images ({names}) or 'none', got {ood!r}")
    if wanted.startswith("cifar"):
        return wanted, cifar10(other, root)[1][0]
    paths = files.require(other, root)
    return wanted, read_idx(_ending(paths, TEST_IMAGES))[:, None]


def idx_set(entry: Entry, root: str | Path | None) -> Images:
    """Training and test images (N, 1, H, W) and labels of one of MNIST's relatives."""
    paths = files.require(entry, root)
    train, test = (
        (read_idx(_ending(paths, images))[:, None], read_idx(_ending(paths, labels)))
        for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS))
    )
    return train, test


def _ending(paths: Mapping[str, Path], stem: str) -> Path:
    return next(path for name, path in paths.items() if f"/{stem}" in name)


def read_idx(path: Path) -> Bytes:
    """An idx file of bytes, gzipped: 0, 0, 8, the number of axes; their lengths (big-endian); the
    bytes.
    """
    raw = unpack(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an idx file of bytes")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">i4", raw[3], 4))
    if len(raw) - 4 - 4 * raw[3] != int(np.prod(shape)):
        raise DataError(f"{path} should hold {shape} bytes, but has {len(raw) - 4 - 4 * raw[3]:,}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def cifar10(entry: Entry, root: str | Path | None) -> Images:
    """Training and test images (N, 3, 32, 32) and labels."""
    paths = files.require(entry, root)
    archive = next((path for name, path in paths.items() if name.endswith(".tar.gz")), None)
    return read_cifar_binary(archive) if archive is not None else read_cifar_sheets(paths)


def read_cifar_binary(path: Path) -> Images:
    """The canonical archive: in each record the class, then 32×32 red, green and blue bytes."""
    names = [
        f"cifar-10-batches-bin/{name}.bin"
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    ]
    found = unpack_archive(path, names)
    records = [np.frombuffer(found[name], np.uint8).reshape(-1, _RECORD) for name in names]
    train, test = np.concatenate(records[:-1]), records[-1]
    first, second = (
        (part[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), part[:, 0]) for part in (train, test)
    )
    return first, second


def read_cifar_sheets(paths: Mapping[str, Path]) -> Images:
    """Lossless sheets, images in rows of a grid, with the labels in an NPZ file. Needs Pillow."""
    by_stem = {name.rsplit("/", 1)[-1]: path for name, path in paths.items()}
    with np.load(by_stem["labels.npz"], allow_pickle=False) as labels:
        y_train, y_test = labels["train"], labels["test"]
    train = np.concatenate([read_sheet(by_stem[f"data_batch_{i}.webp"]) for i in range(1, 6)])
    return (train, y_train), (read_sheet(by_stem["test_batch.webp"]), y_test)


def read_sheet(path: Path) -> Bytes:
    """A grid of 32×32 color images, row by row: (N, 3, 32, 32)."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"reading {path.name} needs Pillow; `pip install 'bayou[lab]'`") from None
    with Image.open(path) as sheet:
        grid = np.asarray(sheet.convert("RGB"))
    rows, columns = grid.shape[0] // SIDE, grid.shape[1] // SIDE
    if grid.shape[:2] != (rows * SIDE, columns * SIDE):
        raise DataError(f"{path} is {grid.shape[:2]}, not a grid of {SIDE}×{SIDE} images")
    tiles = grid.reshape(rows, SIDE, columns, SIDE, CHANNELS).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles).reshape(-1, CHANNELS, SIDE, SIDE)
