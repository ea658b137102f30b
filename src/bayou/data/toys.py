"""Data without files: scikit-learn's digits, letters drawn like them, moons, and two curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayou.data.catalogue import DataError, Entry
from bayou.data.dataset import DataSet, Pair
from bayou.data.encoders import Number
from bayou.data.images import hold_out_classes
from bayou.data.preprocess import ImagePreprocessor, TablePreprocessor
from bayou.data.splits import split_rows

Floats = NDArray[np.float64]
Stroke = tuple[tuple[float, float], ...]

# Letters that no digit resembles, as strokes in the unit square, y upwards.
LETTERS: dict[str, tuple[Stroke, ...]] = {
    "A": (((0, 0), (0.5, 1), (1, 0)), ((0.2, 0.4), (0.8, 0.4))),
    "E": (((1, 1), (0, 1), (0, 0), (1, 0)), ((0, 0.5), (0.8, 0.5))),
    "F": (((1, 1), (0, 1), (0, 0)), ((0, 0.5), (0.8, 0.5))),
    "H": (((0, 0), (0, 1)), ((1, 0), (1, 1)), ((0, 0.5), (1, 0.5))),
    "K": (((0, 0), (0, 1)), ((1, 1), (0, 0.5), (1, 0))),
    "M": (((0, 0), (0, 1), (0.5, 0.35), (1, 1), (1, 0)),),
    "N": (((0, 0), (0, 1), (1, 0), (1, 1)),),
    "R": (((0, 0), (0, 1), (0.8, 1), (1, 0.8), (0.8, 0.55), (0, 0.5)), ((0.4, 0.5), (1, 0))),
    "T": (((0, 1), (1, 1)), ((0.5, 1), (0.5, 0))),
    "W": (((0, 1), (0.25, 0), (0.5, 0.65), (0.75, 0), (1, 1)),),
    "X": (((0, 0), (1, 1)), ((0, 1), (1, 0))),
}
DIGITS_SEED = 20  # of the split into training and test rows
TEST_FRACTION = 0.2
FEW_TEST_FRACTION = 0.9  # of digits-few


def letters(n: int, seed: int = 0) -> Floats:
    """Draw capital letters, made as the digits were: 0 to 16, (n, 1, 8, 8).

    Strokes with random position, size, slant, rotation and width are drawn on a 32×32 bitmap; a
    pixel is the number of set cells in its 4×4 block. Letters alternate, so that all are equally
    frequent.

    Args:
        n: how many.
        seed: of their variation.
    """
    generator = np.random.default_rng([seed, 8])
    centers = (np.arange(32) + 0.5) / 32
    # (32, 32, 2): x to the right, y upwards
    grid = np.stack(np.meshgrid(centers, centers[::-1]), -1)
    shapes = list(LETTERS.values())
    bitmaps = [_draw_letter(shapes[i % len(shapes)], grid, generator) for i in range(n)]
    images = np.array(bitmaps, bool).reshape(n, 1, 8, 4, 8, 4)
    return images.sum((3, 5)).astype(np.float64)


def _draw_letter(
    strokes: Sequence[Stroke],
    grid: Floats,
    generator: np.random.Generator,
) -> NDArray[np.bool_]:
    """Draw the strokes of a letter with random changes on a bitmap."""
    angle = generator.normal(0, 0.12)
    slant = generator.normal(0, 0.15)
    size = np.array([generator.uniform(0.45, 0.7), generator.uniform(0.8, 0.9)])
    width = generator.uniform(0.055, 0.085)
    position = 0.5 + generator.normal(0, 0.02, 2)
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    shear = np.array([[1.0, slant], [0.0, 1.0]])
    bitmap = np.zeros(grid.shape[:2], bool)
    for stroke in strokes:
        points = np.array(stroke) + generator.normal(0, 0.03, (len(stroke), 2))
        points = ((points - 0.5) * size) @ (rotation @ shear).T + position
        for start, end in pairwise(points):
            bitmap |= _distance(grid, start, end) < width
    return bitmap


def _distance(grid: Floats, start: Floats, end: Floats) -> Floats:
    """Return the distance of points to a segment."""
    direction = end - start
    share = np.clip(((grid - start) @ direction) / max(float(direction @ direction), 1e-12), 0, 1)
    return np.asarray(np.linalg.norm(grid - start - share[..., None] * direction, axis=-1))


def digits(entry: Entry, split: int = 0, ood: str | None = None) -> DataSet:
    """Load the 1,797 digits of scikit-learn, (1, 8, 8), in training and test rows.

    Args:
        entry: digits, digits-few or digits5 of the catalogue.
        split: its number; split 0 never changes.
        ood: "letters" or "none"; by default that of the entry.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn; `pip install 'bayou[lab]'`") from None
    bunch = load_digits()
    x = np.asarray(bunch.images, np.float64)[:, None]
    y = np.asarray(bunch.target, np.int64)
    fraction = FEW_TEST_FRACTION if entry.name == "digits-few" else TEST_FRACTION
    train_rows, test_rows = split_rows(y, split=split, seed=DIGITS_SEED, test_fraction=fraction)
    train = (x[train_rows], y[train_rows])
    test = (x[test_rows], y[test_rows])
    notes = [
        f"Split {split}: {fraction:.0%} of each digit held out. Pixels 0 to 16 were standardized "
        "together."
    ]
    ood_name = entry.ood[0]
    ood_images: NDArray[Any] | None
    if entry.name == "digits5":
        train, test, ood_images = hold_out_classes(train, test, range(5))
    else:
        ood_images = letters(len(test[1]))
        notes.append(
            f"Out of distribution: the letters {' '.join(LETTERS)}, generated and binned like the "
            "digits."
        )
    if ood == "none":
        ood_images = None
    elif ood == "letters":
        ood_images = letters(len(test[1]))
        ood_name = "letters"
    elif ood not in (None, ood_name):
        raise DataError(
            f"ood of {entry.name} must be {ood_name!r}, 'letters' or 'none', got {ood!r}"
        )
    preprocessor = ImagePreprocessor.fit(train[0], entry.classes, white=16.0)
    return preprocessor.dataset(entry.name, train, test, ood_images, ood_name, notes)


def moons(entry: Entry, seed: int = 0, n: int = 400, noise: float = 0.15) -> DataSet:
    """Generate two half circles of radius 1 around (±½, ±¼) with Gaussian noise.

    Out of distribution: points of the square |x| ≤ 4 further than 1 from every training point.

    Args:
        entry: moons of the catalogue.
        seed: of the points.
        n: training points, and as many test points.
        noise: its standard deviation.
    """
    generator = np.random.default_rng([seed, 2])
    y = np.arange(2 * n) % 2
    angle = math.pi * generator.random(2 * n)
    sign = np.where(y == 0, 1.0, -1.0)
    arc = np.stack([np.cos(angle) - 0.5, np.sin(angle) - 0.25], 1) * sign[:, None]
    x = arc + noise * generator.standard_normal((2 * n, 2))
    far = generator.uniform(-4, 4, (8 * n, 2))
    far = far[np.linalg.norm(far[:, None] - x[None, :n], axis=-1).min(1) > 1][:n]
    columns = tuple(Number.fit(f"x{i + 1}", x[:n, i]) for i in range(2))
    preprocessor = TablePreprocessor(columns, "y", "classification", entry.classes)
    train = (preprocessor.transform(x[:n]), y[:n])
    test = (preprocessor.transform(x[n:]), y[n:])
    ood_inputs = preprocessor.transform(far)
    notes = [f"Generated from seed {seed}; Gaussian noise of {noise:g}."]
    return DataSet.of(entry.name, preprocessor, train, test, ood_inputs, entry.ood[0], notes)


def cubic(entry: Entry, seed: int = 0, n_test: int = 200) -> DataSet:
    """Return 20 points of y = x³ + ε on [−4, 4], ε of standard deviation 3.

    The problem of Hernández-Lobato & Adams (2015). The training points are always those of the HMC
    reference: x_i evenly spaced, ε_i = 3·Φ⁻¹((r_i + ½)/20) with r_i = (7i + 3) mod 20. The network
    sees x/4 and y/32.

    Args:
        entry: cubic of the catalogue.
        seed: of the test points.
        n_test: how many test points.
    """
    x = np.linspace(-4.0, 4.0, 20)
    noise = np.array([3 * NormalDist().inv_cdf(((7 * i + 3) % 20 + 0.5) / 20) for i in range(20)])
    generator = np.random.default_rng([seed, 3])
    x_test = generator.uniform(-4, 4, n_test)
    y_test = x_test**3 + 3 * generator.standard_normal(n_test)
    outside = np.concatenate([np.linspace(-6, -4.02, 100), np.linspace(4.02, 6, 100)])
    columns = (Number("x", 0.0, 4.0, low=-4.0, high=4.0),)
    preprocessor = TablePreprocessor(columns, "y", "regression", (), 0.0, 32.0)
    notes = [
        "The training points are fixed (those of the HMC reference); the network is fitted to x/4 "
        "and y/32. Noise: 3."
    ]
    return _curve(entry, preprocessor, (x, x**3 + noise), (x_test, y_test), outside, notes)


def two_bumps(entry: Entry, seed: int = 0, n: int = 100) -> DataSet:
    """Generate y = cos(4x + 0.8) + ε for x in [−1, −0.5] and [0.5, 1], without data in between.

    The problem of Foong et al. (2019). ε has standard deviation 0.1; that of two-bumps-hetero
    grows, 0.05 + 0.3·(x + 1)/2.

    Args:
        entry: two-bumps or two-bumps-hetero of the catalogue.
        seed: of the points.
        n: training points, and twice as many test points.
    """
    growth = 0.3 if entry.name == "two-bumps-hetero" else 0.0
    generator = np.random.default_rng([seed, 4])
    x = generator.uniform(0.5, 1.0, 3 * n) * np.where(np.arange(3 * n) % 2 == 0, -1.0, 1.0)
    std = 0.05 + growth * (x + 1) / 2 if growth else np.full_like(x, 0.1)
    y = np.cos(4 * x + 0.8) + std * generator.standard_normal(3 * n)
    columns = (Number.fit("x", x[:n]),)
    y_mean = float(y[:n].mean())
    y_scale = float(y[:n].std())
    preprocessor = TablePreprocessor(columns, "y", "regression", (), y_mean, y_scale)
    noise = f"noise 0.05 at x = -1 to {0.05 + growth:g} at x = 1" if growth else "noise 0.1"
    notes = [f"Generated from seed {seed}; {noise} in y. The gap is -0.45 < x < 0.45."]
    gap = np.linspace(-0.45, 0.45, 200)
    return _curve(entry, preprocessor, (x[:n], y[:n]), (x[n:], y[n:]), gap, notes)


def _curve(
    entry: Entry,
    preprocessor: TablePreprocessor,
    train: Pair,
    test: Pair,
    ood: Floats,
    notes: list[str],
) -> DataSet:
    """Return points of a curve as a data set."""
    train_pair = preprocessor.pair({"x": train[0], "y": train[1]})
    test_pair = preprocessor.pair({"x": test[0], "y": test[1]})
    ood_inputs = preprocessor.transform({"x": ood})
    return DataSet.of(
        entry.name, preprocessor, train_pair, test_pair, ood_inputs, entry.ood[0], notes
    )
