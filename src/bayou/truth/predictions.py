"""The file of predictions: class probabilities of the test rows, with what is known of their cost.

It is an NPZ file of plain arrays (``numpy.savez_compressed``). One of the two is required:

- ``probs``: (N, C), probabilities in [0, 1] whose rows sum to 1;
- ``log_probs``: (N, C), their logarithms.

They have the dtype float16, float32 or float64, and their rows the order of the reference. These
are optional, scalars unless a shape is given: ``name`` and ``url`` (text), ``epochs`` and
``minutes`` (numbers, of all fits whose predictions were averaged), ``seeds`` (whole numbers, (K,)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bayou.core.specs import nearest
from bayou.data.catalogue import DataError
from bayou.data.reading import arrays
from bayou.likelihoods import Categorical
from bayou.likelihoods.predictive import Predictive

PROBS = "probs"
LOG_PROBS = "log_probs"
SEEDS = "seeds"
KEYS = (PROBS, LOG_PROBS, "name", "url", "epochs", "minutes", SEEDS)
# Of the sum of a row from 1: the rounding of float16 for ten classes.
MAX_SUM_ERROR = 2e-3
HOW_TO_WRITE = (
    "write predictions with bayou.truth.write_predictions or numpy.savez_compressed(path, "
    "probs=probs)"
)
MAX_TEXT = 200  # characters of a name or an address


class PredictionError(ValueError):
    """Predictions that cannot be scored; the message says what was got and what was expected."""


@final
@dataclass(frozen=True)
class Predictions:
    """Class probabilities of N rows, and what is known of their cost.

    Args:
        log_probs: log P(class), (N, C) in float64; each row sums to 1 in probabilities.
        name: of the method.
        url: where it is described.
        epochs: over the training rows, of all fits whose predictions were averaged.
        minutes: of the same fits.
        seeds: of the same fits.
    """

    log_probs: Tensor
    name: str = ""
    url: str = ""
    epochs: float | None = None
    minutes: float | None = None
    seeds: tuple[int, ...] = ()


def class_predictive(log_probs: Tensor) -> Predictive:
    """Return the predictive distribution with given class probabilities.

    Args:
        log_probs: log P(class), (N, C), up to a constant of each row.
    """
    return Predictive(Categorical().bind(), log_probs.double().unsqueeze(0))


def read_predictions(path: str | Path) -> Predictions:
    """Read and check a file of predictions; nothing in it is executed.

    Args:
        path: an NPZ file; the module describes its arrays.

    Returns:
        The predictions; without a ``name`` they have that of the file.

    Raises:
        PredictionError: an array is missing, unknown, or no class probabilities.
        DataError: the file is no NPZ file of plain arrays.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    with path.open("rb"):  # a missing file is an error of the system
        pass
    try:
        by_name = arrays(path)
    except DataError as error:
        raise DataError(f"{error}; {HOW_TO_WRITE}") from error
    unknown = [key for key in by_name if key not in KEYS]
    if unknown:
        hint = nearest(unknown[0], KEYS)
        raise PredictionError(
            f"{path.name} has an array {unknown[0]!r}{hint}, which is not part of the format: "
            f"{', '.join(KEYS)}"
        )
    predictions = check_predictions(path.name, by_name)
    if predictions.name:
        return predictions
    return Predictions(**(vars(predictions) | {"name": path.stem}))


def write_predictions(
    path: str | Path,
    probs: ArrayLike | Tensor,
    *,
    name: str = "",
    url: str = "",
    epochs: float | None = None,
    minutes: float | None = None,
    seeds: tuple[int, ...] = (),
) -> None:
    """Write a file of predictions, after the checks of ``read_predictions``.

    Args:
        path: the file; its name should end in ``.npz``.
        probs: class probabilities (N, C), in the order of the reference.
        name: of the method.
        url: where it is described.
        epochs: over the training rows, of all fits whose predictions were averaged.
        minutes: of the same fits.
        seeds: of the same fits.

    Raises:
        PredictionError: these are no class probabilities.

    Example:
        >>> p = posterior.predict(x_test)
        >>> truth.write_predictions("laplace.npz", p.probabilities, name="Laplace", epochs=50)
    """
    from bayou.core.files import writing

    if isinstance(probs, Tensor):
        probs = probs.detach().cpu().numpy()
    by_name: dict[str, NDArray[Any]] = {PROBS: np.asarray(probs)}
    values = {"name": name, "url": url, "epochs": epochs, "minutes": minutes, SEEDS: seeds}
    for key, value in values.items():
        if value not in ("", None, ()):
            by_name[key] = np.asarray(value)
    check_predictions(Path(path).name, by_name)
    with writing(path, folders=True) as stream:
        np.savez_compressed(stream, **by_name)  # type: ignore[arg-type]


def check_predictions(file: str, by_name: dict[str, NDArray[Any]]) -> Predictions:
    """Return predictions from arrays.

    Args:
        file: its name, for messages.
        by_name: the arrays.

    Raises:
        PredictionError: they are not what the format says.
    """
    given = [key for key in (PROBS, LOG_PROBS) if key in by_name]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        raise PredictionError(
            f"{file} must have one of the arrays {PROBS} and {LOG_PROBS}, (N, C), got {got}; "
            f"{HOW_TO_WRITE}"
        )
    (key,) = given
    values = _float_matrix(f"{key} of {file}", by_name[key])
    if key == PROBS:
        _check_range(f"{key} of {file}", values, 0.0, 1.0, "probabilities in [0, 1]")
        with np.errstate(divide="ignore"):
            log_probs = np.log(values)
    else:
        _check_range(f"{key} of {file}", values, -math.inf, 0.0, "logarithms of probabilities")
        log_probs = values
    log_sums = np.logaddexp.reduce(log_probs, axis=1)
    _check_sums(f"{key} of {file}", np.exp(log_sums))
    return Predictions(
        torch.from_numpy(log_probs - log_sums[:, None]),
        name=_text(file, "name", by_name.get("name")),
        url=_text(file, "url", by_name.get("url")),
        epochs=_number(file, "epochs", by_name.get("epochs")),
        minutes=_number(file, "minutes", by_name.get("minutes")),
        seeds=_whole_numbers(file, by_name.get(SEEDS)),
    )


def _float_matrix(what: str, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return finite class probabilities (N, C) in float64; logarithms may be −∞."""
    if values.dtype.kind != "f":
        raise PredictionError(
            f"{what} must be floating point, got {values.dtype}; class probabilities are needed, "
            "not labels"
        )
    if values.ndim == 3:
        raise PredictionError(
            f"{what} must have the shape (N, C), got {values.shape}; average the probabilities of "
            "the draws first, such as probs.mean(0)"
        )
    if values.ndim != 2 or values.shape[0] == 0 or values.shape[1] < 2:
        raise PredictionError(
            f"{what} must have the shape (N, C), one row for each test row and one column for "
            f"each class, got {values.shape}"
        )
    is_nan = np.isnan(values).any(1)
    if is_nan.any():
        raise PredictionError(
            f"{what} must have numbers only, got NaN in {is_nan.sum():,} of {len(values):,} rows, "
            f"the first is row {is_nan.argmax()}"
        )
    return values.astype(np.float64)


def _check_range(
    what: str, values: NDArray[np.float64], low: float, high: float, expected: str
) -> None:
    """Raise a PredictionError unless all values are in a range, up to the rounding of a sum."""
    margin = MAX_SUM_ERROR
    is_wrong = (values < low) | (values > high + margin)
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0]
        raise PredictionError(
            f"{what} must be {expected}, got {values[row, column]:.6g} in row {row}; apply a "
            "softmax to logits, and use log_probs for logarithms"
        )


def _check_sums(what: str, sums: NDArray[np.float64]) -> None:
    """Raise a PredictionError unless probabilities sum to 1, up to the rounding of float16."""
    is_wrong = ~(np.abs(sums - 1) <= MAX_SUM_ERROR)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise PredictionError(
            f"{what} must be probabilities that sum to 1 in every row, got {sums[row]:.6g} in row "
            f"{row} ({is_wrong.sum():,} of {len(sums):,} rows are wrong); apply a softmax to "
            "logits, and divide counts by their sum"
        )


def _text(file: str, key: str, value: NDArray[Any] | None) -> str:
    """Return a text, "" where there is none."""
    if value is None:
        return ""
    text = str(value.item()) if value.dtype.kind == "U" and value.size == 1 else ""
    if not text or len(text) > MAX_TEXT or not text.isprintable():
        raise PredictionError(
            f"{key} of {file} must be one line of text of at most {MAX_TEXT} characters, got an "
            f"array of {value.dtype} with the shape {value.shape}; write {key}=numpy.array('...')"
        )
    if key == "url" and not text.startswith(("https://", "http://")):
        raise PredictionError(f"url of {file} must begin with https:// or http://, got {text!r}")
    return text


def _number(file: str, key: str, value: NDArray[Any] | None) -> float | None:
    """Return a number of at least 0, None where there is none."""
    if value is None:
        return None
    number = float(value.item()) if value.dtype.kind in "iuf" and value.size == 1 else math.nan
    if not 0 <= number < math.inf:
        raise PredictionError(
            f"{key} of {file} must be one number of at least 0, of all fits whose predictions were "
            f"averaged, got {_describe(value)}"
        )
    return number


def _whole_numbers(file: str, value: NDArray[Any] | None) -> tuple[int, ...]:
    """Return the seeds, () where there are none."""
    if value is None:
        return ()
    if value.dtype.kind not in "iu" or value.ndim > 1:
        raise PredictionError(
            f"{SEEDS} of {file} must be the seeds of the fits, whole numbers (K,), got "
            f"{_describe(value)}"
        )
    return tuple(int(seed) for seed in np.atleast_1d(value))


def _describe(value: NDArray[Any]) -> str:
    """Return a single value, or the dtype and the shape of an array."""
    if value.size == 1:
        return repr(value.item())
    return f"an array of {value.dtype} with the shape {value.shape}"
