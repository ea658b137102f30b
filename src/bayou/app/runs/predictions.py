"""Predictions of a run folder for the rows of a file."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import bayou
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.json_files import check_output
from bayou.core.files import StrPath, write_text
from bayou.core.progress import spell
from bayou.data.preprocess import PreparedRows, Preprocessor
from bayou.likelihoods.predictive import Predictive, check_level
from bayou.posteriors import Posterior

if TYPE_CHECKING:
    from bayou.operations import Conformal

ROWS_PER_BATCH = 2048
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_predictions(
    folder: StrPath,
    source: StrPath,
    out: StrPath,
    *,
    method: str | None = None,
    seed: int | None = None,
    samples: int | None = None,
    level: float = 0.9,
    force: bool = False,
    conformal: StrPath | None = None,
) -> list[str]:
    """Predict the rows of a file and write a CSV file.

    Classes: row, class, probability, entropy, mutual_information, p(...) of every class, of ordered
    ones also both ends of the central interval. Numbers: row, mean (and median where y is skewed:
    prices, times, counts), std, epistemic_std, lower, upper (the central interval of probability
    ``level``), entropy, epistemic_share_of_variance. Both have the id of a row, if the run has an
    id column, and for a table its ``distance`` beyond the range of the training data, in standard
    deviations (``bayou.data.preprocess.PreparedRows``). A text that a spreadsheet would run as a
    formula (it begins with =, +, -, @, a tab or a carriage return) has a quote before it.

    Args:
        folder: the run folder.
        source: the file with the rows.
        out: the CSV file to write. A symbolic link there counts as a file that exists, and with
            ``force`` it is replaced; its target stays as it is.
        method: which method of the run; by default that of the first finished job.
        seed: which seed of the run; by default the first.
        samples: number of averaged networks: by default as in the run, and at most as many as there
            are.
        level: probability of the intervals.
        force: overwrite ``out``.
        conformal: a file of rows with their target that were not used in training. It adds
            conformal_lower and conformal_upper, or conformal_set (classes separated by |), which
            contain y for a fraction ``level`` of all rows, whether or not the posterior is
            calibrated.

    Returns:
        Notes about the files and the run.

    Raises:
        RunError: ``out`` exists, or the run has no such posterior.
    """
    path = Path(out)
    if path.exists() and path.resolve() == Path(source).resolve():
        raise RunError(f"{path} is the input file; choose another --out")
    check_output(path, force)
    check_level(level)
    run = Run.open(folder)
    posterior, preprocessor, job = run.posterior(method, seed)
    samples = posterior.draws_to_average(requested_samples(samples, run))
    rows = preprocessor.rows(source)
    notes = [*run.describe_interruption(job, posterior), *rows.notes]
    guarantee = None
    if conformal is not None:
        held_out_rows = preprocessor.rows(conformal, need_target=True)
        guarantee = _calibrate(run, posterior, held_out_rows, level, samples)
        notes += [f"{conformal}: {note}" for note in held_out_rows.notes]
    columns = _predict_columns(posterior, preprocessor, rows, samples, level, guarantee)
    table = _row_columns(rows, preprocessor, columns) | columns
    if rows.distance is not None:
        table["distance"] = [f"{value:.4g}" for value in rows.distance]
        notes += _describe_distance(rows.distance)
    _write_csv(path, table)
    return notes


def _predict_columns(
    posterior: Posterior,
    preprocessor: Preprocessor,
    rows: PreparedRows,
    samples: int | None,
    level: float,
    guarantee: Conformal | None,
) -> dict[str, list[str]]:
    """Predict rows in batches and return the text of every column."""
    x = rows.x.to(network_dtype(posterior))
    columns: dict[str, list[str]] = {}
    for start in range(0, len(x), ROWS_PER_BATCH):
        batch = x[start : start + ROWS_PER_BATCH]
        predictive = posterior.predict(batch, samples=samples, seed=0)
        values = prediction_columns(predictive, preprocessor, level)
        if guarantee is not None:
            values |= _conformal_columns(guarantee, predictive, preprocessor)
        for name, cells in values.items():
            text = cells if isinstance(cells, list) else _format_numbers(cells)
            columns.setdefault(name, []).extend(text)
    return columns


def _row_columns(
    rows: PreparedRows,
    preprocessor: Preprocessor,
    columns: dict[str, list[str]],
) -> dict[str, list[str]]:
    """Return the columns that say which row of the file this is: its number and its id."""
    row_columns = {"row": [str(index + 1) for index in rows.kept]}
    if rows.ids is not None:
        name = str(preprocessor.id)
        if name in ("row", "distance", *columns):
            name = f"{name} (id)"
        row_columns[name] = rows.ids
    return row_columns


def _describe_distance(distance: NDArray[np.float64]) -> list[str]:
    """Return a note if rows lie far outside the range of the training data."""
    far_count = int((distance > 1).sum())
    if not far_count:
        return []
    return [
        f"{far_count} of {len(distance)} rows lie more than a standard deviation outside the range "
        "of the training data: see the column distance."
    ]


def _write_csv(path: Path, table: dict[str, list[str]]) -> None:
    """Write columns by name as a CSV file."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(escape_formula, table))
    writer.writerows(map(escape_formula, row) for row in zip(*table.values(), strict=True))
    write_text(path, stream.getvalue(), through_links=False)


def escape_formula(cell: str) -> str:
    """Put a quote before a text that a spreadsheet would run as a formula.

    Numbers stay as they are.

    Args:
        cell: the text of a cell.
    """
    if not cell.startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def requested_samples(samples: int | None, run: Run) -> int:
    """Return the number of networks that a user wants to average.

    Args:
        samples: the number that was asked for; None for that of the run.
        run: its settings have the default.

    Raises:
        RunError: the number is below 1.
    """
    count = run.config.samples if samples is None else samples
    if count < 1:
        raise RunError(f"{spell('samples', '--samples')} must be at least 1, got {count}")
    return count


def network_dtype(posterior: Posterior) -> torch.dtype:
    """Return the dtype of the network's tensors, which its inputs must have.

    Args:
        posterior: over the tensors of the network.
    """
    return next(iter(posterior.template().values())).dtype


def prediction_columns(
    predictive: Predictive,
    preprocessor: Preprocessor,
    level: float,
) -> dict[str, list[str] | Tensor]:
    """Return the columns of the prediction file, in the units of the input file.

    Args:
        predictive: predictions of N rows, in standardized units.
        preprocessor: holds the task, the class names and the scale of y.
        level: probability of the interval, for example 0.9.

    Returns:
        Column names with N values each. Classification: class, probability, entropy, mutual
        information and one p(name) per class. Regression: mean, std, epistemic_std, both ends of
        the interval, entropy and the epistemic share of the variance.
    """
    if preprocessor.task == "classification":
        return _class_columns(predictive, preprocessor.class_names, level)
    return _number_columns(predictive, preprocessor.y_scale, preprocessor.y_mean, level)


def _class_columns(
    predictive: Predictive,
    class_names: tuple[str, ...],
    level: float,
) -> dict[str, list[str] | Tensor]:
    """Return the columns of a classification."""
    probabilities = predictive.mean
    columns: dict[str, list[str] | Tensor] = {
        "class": [class_names[k] for k in probabilities.argmax(-1).tolist()],
        "probability": probabilities.max(-1).values,
        "entropy": predictive.entropy,
        "mutual_information": predictive.mutual_information,
    }
    if predictive.likelihood.is_ordered:
        for q, end in zip(_end_levels(level), predictive.interval(level), strict=True):
            columns[f"{100 * q:g}%"] = [class_names[k] for k in end.tolist()]
    for k, name in enumerate(class_names):
        columns[f"p({name})"] = probabilities[:, k]
    return columns


def _number_columns(
    predictive: Predictive,
    scale: float,
    shift: float,
    level: float,
) -> dict[str, list[str] | Tensor]:
    """Return the columns of a regression of y = scale · standardized y + shift."""

    def position(values: Tensor) -> Tensor:
        return values[:, 0].double() * scale + shift

    def width(values: Tensor) -> Tensor:
        return values[:, 0].double() * scale

    low, high = predictive.interval(level)
    low_level, high_level = _end_levels(level)
    columns: dict[str, list[str] | Tensor] = {"mean": position(predictive.mean)}
    if not predictive.likelihood.is_linear_in_y:  # skewed, so that the mean is not the middle
        columns["median"] = position(predictive.quantile(0.5))
    # Not the mutual information: the entropy of a density can be negative, so that a comparison of
    # the two says little.
    return columns | {
        "std": width(predictive.std),
        "epistemic_std": width(predictive.epistemic_std),
        f"{100 * low_level:g}%": position(low),
        f"{100 * high_level:g}%": position(high),
        "entropy": predictive.entropy + math.log(scale),
        "epistemic_share_of_variance": _epistemic_share(predictive),
    }


def _end_levels(level: float) -> tuple[float, float]:
    """Return the levels of the quantiles at the ends of a central interval."""
    return 0.5 - level / 2, 0.5 + level / 2


def _epistemic_share(predictive: Predictive) -> Tensor:
    """Return the share of each row's variance that more data would reduce, from 0 to 1.

    A row without any variance has 0.
    """
    std = predictive.std[:, 0].double()
    share = (predictive.epistemic_std[:, 0].double() / std).square().clamp(0.0, 1.0)
    return torch.where(std == 0, torch.zeros_like(share), share)


def _calibrate(
    run: Run,
    posterior: Posterior,
    held_out_rows: PreparedRows,
    level: float,
    samples: int | None,
) -> Conformal:
    """Return the conformal guarantee by rows of a file, which must not be training rows."""
    if held_out_rows.y is None:
        raise RunError("conformal rows need the target column")
    try:
        train = run.load_data().train
    except ValueError:  # no longer available
        train = None
    rows = run.convert(held_out_rows.x, held_out_rows.y)
    return bayou.operations.conformal(posterior, rows, level, samples=samples, seed=0, train=train)


def _conformal_columns(
    guarantee: Conformal,
    predictive: Predictive,
    preprocessor: Preprocessor,
) -> dict[str, list[str] | Tensor]:
    """Return the ends of conformal intervals, or conformal sets as text."""
    if preprocessor.task == "classification":
        sets = []
        for memberships in guarantee.set(predictive).tolist():
            pairs = zip(preprocessor.class_names, memberships, strict=True)
            sets.append("|".join(name for name, is_member in pairs if is_member))
        return {"conformal_set": sets}
    low, high = guarantee.interval(predictive)
    return {
        "conformal_lower": preprocessor.original(low[:, 0].double()),
        "conformal_upper": preprocessor.original(high[:, 0].double()),
    }


def _format_numbers(values: Tensor) -> list[str]:
    """Return numbers as text, to eight digits."""
    return [f"{value:.8g}" for value in values.double().tolist()]
