"""References: what a long HMC run predicts for the test rows of a data set.

``hmc-digits`` is part of the package. ``hmc-cifar10`` is read from ``BAYOU_DATA`` or the cache: the
file that the competition of Wilson et al. (2022) published, or the same in canonical order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.core.specs import nearest
from bayou.data.catalogue import DataError, File
from bayou.data.files import VARIABLE, folders, locate
from bayou.data.reading import arrays

Floats = NDArray[Any]
Orders = Mapping[str, NDArray[np.int64]]
HERE = Path(__file__).parent
STARTER_KIT = "https://github.com/izmailovpavel/neurips_bdl_starter_kit"
HMC_FILE = File(
    "cifar10/hmc_resnet20_frn_swish.npz",
    379566,
    "f6c42ba7c5cecf66df9593612e41f89c3786279f09bd91be862e9cdbc89992e1",
    origin=f"data/cifar10/probs.csv of {STARTER_KIT}",
)
PUBLISHED_FILE = "cifar10/probs.csv"  # in the order of tensorflow_datasets
# Of the probabilities in canonical order, float32, row by row.
HMC_SHA256 = "08a678ba8f3cfcc7913bbeb55f1dbbdad76bdd160c3b3dc9dcb62348aed040e2"
TFDS = "tensorflow_datasets"


@final
@dataclass(frozen=True)
class Reference:
    """What is predicted by the run that all rows of a board are compared with.

    Args:
        name: for ``score``.
        log_probs: log P(class) of N test rows, (N, C) in float64.
        y: the classes of the test rows, (N,).
        order: of the rows, in words.
        other_orders: other orders in which the rows are known, by name: their indices in the order
            of the reference, (N,).
    """

    name: str
    log_probs: Tensor
    y: Tensor
    order: str
    other_orders: Orders = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Source:
    """How a reference is read, and one line about it.

    Args:
        summary: data, network and prior.
        read: from a folder (or None) to the reference.
    """

    summary: str
    read: Callable[[str | Path | None], Reference]


def tfds_order(rows: int) -> NDArray[np.int64]:
    """Return the indices of test rows in the order of ``tensorflow_datasets``, (N,).

    It sorts the rows by the MD5 of their names, "test0", "test1", ...

    Args:
        rows: N.
    """

    def key(row: int) -> str:
        return hashlib.md5(f"test{row}".encode(), usedforsecurity=False).hexdigest()

    return np.array(sorted(range(rows), key=key), np.int64)


def from_tfds_order(values: Floats) -> Floats:
    """Return rows of CIFAR-10's test set in canonical order.

    Args:
        values: of the test rows in the order of ``tensorflow_datasets``, (N, ...).
    """
    canonical = np.empty_like(values)
    canonical[tfds_order(len(values))] = values
    return canonical


def read_published(path: Path) -> NDArray[np.float32]:
    """Read the published predictions of HMC: (N, C), in canonical order, with rows that sum to 1.

    Args:
        path: ``probs.csv`` of the starter kit.

    Raises:
        DataError: it is no table of numbers.
    """
    try:
        text = path.read_text(encoding="ascii").replace(",", " ")  # an older version has blanks
        values = np.array([line.split() for line in text.splitlines() if line], np.float64)
    except ValueError as error:
        raise DataError(f"cannot read {path} as probabilities, (N, C): {error}") from error
    probs = values / values.sum(1, keepdims=True)
    return from_tfds_order(probs.astype(np.float32))


def _hmc_probs(root: str | Path | None) -> NDArray[np.float32]:
    """Return the predictions of HMC for the test images of CIFAR-10, (10000, 10)."""
    path = locate(HMC_FILE, root)
    probs: NDArray[Any]
    if path is not None:
        probs = arrays(path).get("probs", np.empty(0))
    else:
        path = locate(File(PUBLISHED_FILE, 0, ""), root)
        if path is None:
            searched = ", ".join(str(folder) for folder in folders(root))
            raise DataError(
                f"the reference hmc-cifar10 needs {HMC_FILE.path} or {PUBLISHED_FILE}, looked for "
                f"in {searched}; the second is {HMC_FILE.origin}: put it below one of these "
                f"folders, or set {VARIABLE} to the folder that has it"
            )
        probs = read_published(path)
    digest = hashlib.sha256(np.ascontiguousarray(probs, "<f4").tobytes()).hexdigest()
    if digest != HMC_SHA256:
        raise DataError(
            f"{path} does not have the published predictions of HMC (SHA-256 {digest[:12]}…, "
            f"expected {HMC_SHA256[:12]}…): damaged or another file; get {HMC_FILE.origin}"
        )
    return probs


def _read_cifar10(root: str | Path | None) -> Reference:
    """Return HMC of a residual network on CIFAR-10 (Izmailov et al. 2021)."""
    from bayou.data.images import cifar10_test_labels

    log_probs = torch.from_numpy(_hmc_probs(root)).double().log()
    y = torch.from_numpy(cifar10_test_labels(root).astype(np.int64))
    orders = {TFDS: tfds_order(len(y))}
    return Reference("hmc-cifar10", log_probs, y, "the canonical order of the test batch", orders)


def _read_digits(root: str | Path | None) -> Reference:
    """Return HMC of a small network on digits; its file is part of the package."""
    content = arrays(HERE / "hmc-digits.npz")
    log_probs = torch.from_numpy(content["log_probs"]).double()
    y = torch.from_numpy(content["y"].astype(np.int64))
    return Reference("hmc-digits", log_probs, y, 'the order of bayou.data.load("digits").test')


REFERENCES: dict[str, Source] = {
    "hmc-cifar10": Source(
        "CIFAR-10, ResNet-20 with filter response normalization and swish, prior N(0, 1/5): the "
        "HMC run of Izmailov et al. (2021)",
        _read_cifar10,
    ),
    "hmc-digits": Source(
        "8×8 digits, network 64-100-100-10 with ReLU, prior N(0, 9/fan-in): 4,800 draws of 48 "
        "chains; needs no files",
        _read_digits,
    ),
}


def find_source(name: str) -> Source:
    """Return the source of a reference; the error for an unknown name suggests the nearest.

    Args:
        name: of the reference.

    Raises:
        DataError: there is no such reference.
    """
    if name not in REFERENCES:
        raise DataError(
            f"there is no reference {name!r}{nearest(name, list(REFERENCES))}; the names are "
            f"{', '.join(REFERENCES)}"
        )
    return REFERENCES[name]


def reference(name: str, *, root: str | Path | None = None) -> Reference:
    """Read a reference.

    Args:
        name: "hmc-cifar10" or "hmc-digits".
        root: a folder in which files are looked for before ``$BAYOU_DATA`` and the cache.

    Raises:
        DataError: there is no such reference, or a file of it is missing or damaged.
    """
    return find_source(name).read(root)
