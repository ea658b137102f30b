"""Comparison of new rows with the training rows of a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from bayou.data.dates import Date
from bayou.data.encoders import Category, Number
from bayou.data.reading import is_frame, read_frame
from bayou.data.watched import compared_inputs, new_columns, training_columns
from bayou.diagnostics import InputColumn, ReferenceRows, ShiftReport, watch
from bayou.diagnostics.reference import MAX_ROWS

if TYPE_CHECKING:
    from bayou.adapters.estimator import BayesEstimator


def sample_rows(x: np.ndarray, seed: int) -> np.ndarray:
    """Return at most 2,000 random training rows, with which new rows are compared.

    Args:
        x: inputs of all training rows, (N, features).
        seed: of the choice.
    """
    if len(x) <= MAX_ROWS:
        return x.copy()
    rows = np.random.default_rng(seed).choice(len(x), MAX_ROWS, replace=False)
    sample: np.ndarray = x[np.sort(rows)]
    return sample


def watch_rows(
    estimator: BayesEstimator,
    X: ArrayLike,
    targets: np.ndarray | None,
    train: np.ndarray,
    alpha: float,
) -> ShiftReport:
    """Compare new rows with training rows; see ``bayou.diagnostics.watch``.

    Args:
        estimator: fitted.
        X: inputs (N, features).
        targets: in the form of the fit, codes of classes or numbers; None without any.
        train: inputs of training rows, encoded.
        alpha: the largest probability of a false alarm.
    """
    encoders = None if estimator.table_ is None else estimator.table_.columns
    encoded_rows = estimator._encode(X)
    columns, mistakes = _new_columns(encoders, X, encoded_rows)
    held_out = None
    if hasattr(estimator, "held_x_"):
        held_out = (
            estimator._inputs(estimator.held_x_),
            estimator._targets(estimator.held_y_),
        )
    inputs = estimator._inputs(train)
    if encoders is None:
        names = [str(name) for name in getattr(estimator, "feature_names_in_", [])]
        reference = ReferenceRows.of(inputs, held_out, names=names or None)
    else:
        encoded = torch.as_tensor(train)
        reference = ReferenceRows.of(
            inputs,
            held_out,
            names=[name for encoder in encoders for name in encoder.features],
            columns=training_columns(encoders, encoded),
            compared=compared_inputs(encoders),
        )
    x = estimator._inputs(encoded_rows)
    y = None if targets is None else estimator._targets(targets)
    samples: Any = estimator.posterior_.draws_to_average(int(estimator.samples))
    return watch(
        estimator.posterior_,
        reference,
        x,
        y,
        columns=columns,
        mistakes=mistakes,
        alpha=alpha,
        samples=samples,
        seed=estimator.seed_,
    )


def _new_columns(
    encoders: Sequence[Number | Category | Date] | None, X: ArrayLike, encoded_rows: np.ndarray
) -> tuple[Sequence[InputColumn] | None, list[str]]:
    """Return the columns of a table, and sentences about what is wrong with them for certain.

    The columns are None where there is no table, but an array of numbers.
    """
    if encoders is None:
        return None, []
    if is_frame(X):
        return new_columns(encoders, read_frame(X))
    return training_columns(encoders, torch.as_tensor(encoded_rows)), []
