"""Images from published files: MNIST and its relatives, and CIFAR-10."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data import files
from bayou.data.catalogue import (
    CATALOGUE,
    CIFAR_LABELS,
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
SIDE = 32  # pixels of an image of CIFAR-10
CHANNELS = 3
TEST_BATCH = "test_batch"  # of the archive
_RECORD_BYTES = 1 + CHANNELS * SIDE * SIDE


def load_images(entry: Entry, ood: str | None = None, root: str | Path | None = None) -> DataSet:
    """Load a data set of images, standardized by its training images.

    Args:
        entry: of the catalogue.
        ood: another data set of images, or "none"; by default the first available one.
        root: a folder with the files.

    Raises:
        DataError: a file is missing or damaged, or the images do not fit.
    """
    if not entry.classes:
        raise DataError(
            f"{entry.name!r} has no training images here; it serves as out-of-distribution data "
            f"for others: `bayou train mnist --ood {entry.name}`"
        )
    notes: list[str] = []
    holds_out_classes = entry.name == "cifar5"
    read = cifar10 if entry.name.startswith("cifar") else idx_set
    train, test = read(entry, root)
    ood_name: str | None = None
    ood_images: NDArray[Any] | None = None
    if holds_out_classes:
        train, test, ood_images = hold_out_classes(train, test, range(5))
        ood_name = entry.ood[0]
    if ood == "none":
        ood_name = None
        ood_images = None
    elif ood is not None or not holds_out_classes:
        ood_name, ood_images = _load_ood(entry, ood, root, notes)
    preprocessor = ImagePreprocessor.fit(train[0], entry.classes)
    notes.append(
        "Pixels were divided by 255 and standardized by the mean and scale of the training images."
    )
    if ood_images is not None and tuple(ood_images.shape[1:]) != preprocessor.shape:
        raise DataError(
            f"{ood!r} has images of {ood_images.shape[1:]}, {entry.name!r} of {preprocessor.shape}"
        )
    return preprocessor.dataset(entry.name, train, test, ood_images, ood_name, notes)


def hold_out_classes(
    train: Pair,
    test: Pair,
    kept: Iterable[int],
) -> tuple[Pair, Pair, NDArray[Any]]:
    """Return the rows of some classes, and the test inputs of all other classes.

    Args:
        train: x and y.
        test: x and y.
        kept: the first classes.
    """
    classes = list(kept)
    is_kept = np.isin(train[1], classes)
    is_kept_in_test = np.isin(test[1], classes)
    return (
        (train[0][is_kept], train[1][is_kept]),
        (test[0][is_kept_in_test], test[1][is_kept_in_test]),
        test[0][~is_kept_in_test],
    )


def _load_ood(
    entry: Entry,
    ood: str | None,
    root: str | Path | None,
    notes: list[str],
) -> tuple[str | None, Bytes | None]:
    """Return test images of another data set: the requested one, or the first available."""
    name = ood
    if name is None:
        candidates = (name for name in entry.ood if files.available(CATALOGUE[name], root))
        name = next(candidates, None)
    if name is None:
        if entry.ood:
            notes.append(
                f"No out-of-distribution data: none of {', '.join(entry.ood)} is available."
            )
        return None, None
    source = CATALOGUE.get(name)
    if source is None or source.source != "images":
        names = ", ".join(
            candidate.name
            for candidate in CATALOGUE.values()
            if candidate.source == "images" and candidate.name != entry.name
        )
        raise DataError(f"ood must be another set of images ({names}) or 'none', got {ood!r}")
    if name.startswith("cifar"):
        _, test = cifar10(source, root)
        return name, test[0]
    paths = files.require(source, root)
    return name, read_idx(_path_of(paths, TEST_IMAGES))[:, None]


def idx_set(entry: Entry, root: str | Path | None) -> Images:
    """Load training and test images (N, 1, H, W) and labels of one of MNIST's relatives.

    Args:
        entry: of the catalogue.
        root: a folder with the files.
    """
    paths = files.require(entry, root)
    train_images = read_idx(_path_of(paths, TRAIN_IMAGES))[:, None]
    train_labels = read_idx(_path_of(paths, TRAIN_LABELS))
    test_images = read_idx(_path_of(paths, TEST_IMAGES))[:, None]
    test_labels = read_idx(_path_of(paths, TEST_LABELS))
    return (train_images, train_labels), (test_images, test_labels)


def _path_of(paths: Mapping[str, Path], stem: str) -> Path:
    """Return the path of the file whose published name begins with a stem."""
    return next(path for name, path in paths.items() if f"/{stem}" in name)


def read_idx(path: Path) -> Bytes:
    """Read an idx file of bytes, gzipped.

    It has 0, 0, 8 and the number of axes, their lengths (big-endian), and the bytes.

    Args:
        path: the file.
    """
    raw = unpack(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an idx file of bytes")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">i4", raw[3], 4))
    if len(raw) - 4 - 4 * raw[3] != int(np.prod(shape)):
        raise DataError(f"{path} should hold {shape} bytes, but has {len(raw) - 4 - 4 * raw[3]:,}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def cifar10(entry: Entry, root: str | Path | None) -> Images:
    """Load training and test images (N, 3, 32, 32) and labels.

    Args:
        entry: of the catalogue.
        root: a folder with the files.
    """
    paths = files.require(entry, root)
    archive = next((path for name, path in paths.items() if name.endswith(".tar.gz")), None)
    if archive is not None:
        return read_cifar_binary(archive)
    return read_cifar_sheets(paths)


def cifar10_test_labels(root: str | Path | None) -> Bytes:
    """Load the classes of the 10,000 test images of CIFAR-10, in canonical order.

    The labels of the sheets are enough; the images are not read.

    Args:
        root: a folder with the files.

    Raises:
        DataError: there are neither the labels nor the archive.
    """
    if files.locate(CIFAR_LABELS, root) is not None:
        with np.load(files.require_file(CIFAR_LABELS, root), allow_pickle=False) as labels:
            test: Bytes = labels["test"]
        return test
    (path,) = files.require(CATALOGUE["cifar10"], root).values()
    (records,) = _read_records(path, [TEST_BATCH])
    return _split_records(records)[1]


def read_cifar_binary(path: Path) -> Images:
    """Read the canonical archive: in each record the class, then red, green and blue bytes.

    Args:
        path: the archive.
    """
    *train, test = _read_records(path, [*(f"data_batch_{i}" for i in range(1, 6)), TEST_BATCH])
    return _split_records(np.concatenate(train)), _split_records(test)


def _read_records(path: Path, stems: Sequence[str]) -> list[Bytes]:
    """Return the records of some files of the archive, (N, 3073) each."""
    names = [f"cifar-10-batches-bin/{stem}.bin" for stem in stems]
    contents = unpack_archive(path, names)
    return [np.frombuffer(contents[name], np.uint8).reshape(-1, _RECORD_BYTES) for name in names]


def _split_records(records: Bytes) -> tuple[Bytes, Bytes]:
    """Return the images and the classes of records."""
    return records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), records[:, 0]


def read_cifar_sheets(paths: Mapping[str, Path]) -> Images:
    """Read lossless sheets, images in rows of a grid, with the labels in an NPZ file.

    It needs Pillow.

    Args:
        paths: by published path.
    """
    by_stem = {name.rsplit("/", 1)[-1]: path for name, path in paths.items()}
    with np.load(by_stem["labels.npz"], allow_pickle=False) as labels:
        y_train = labels["train"]
        y_test = labels["test"]
    train = np.concatenate([read_sheet(by_stem[f"data_batch_{i}.webp"]) for i in range(1, 6)])
    return (train, y_train), (read_sheet(by_stem["test_batch.webp"]), y_test)


def read_sheet(path: Path) -> Bytes:
    """Read a grid of 32×32 color images, row by row: (N, 3, 32, 32).

    Args:
        path: the sheet.
    """
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"reading {path.name} needs Pillow; `pip install 'bayou[lab]'`") from None
    with Image.open(path) as sheet:
        grid = np.asarray(sheet.convert("RGB"))
    rows = grid.shape[0] // SIDE
    columns = grid.shape[1] // SIDE
    if grid.shape[:2] != (rows * SIDE, columns * SIDE):
        raise DataError(f"{path} is {grid.shape[:2]}, not a grid of {SIDE}×{SIDE} images")
    tiles = grid.reshape(rows, SIDE, columns, SIDE, CHANNELS).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles).reshape(-1, CHANNELS, SIDE, SIDE)
