"""Predictions of a run folder for the rows of a file."""

from __future__ import annotations

import codecs
import csv
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.app.runs.decisions import CostTable, Threshold
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.guarantees import Guarantee, GuaranteeRequest, fit_guarantee
from bayou.app.runs.json_files import check_output
from bayou.core.files import StrPath, writing
from bayou.core.progress import Progress, Show, spell
from bayou.data.preprocess import PreparedRows, Preprocessor
from bayou.likelihoods.predictive import Predictive, check_level
from bayou.posteriors import Posterior

if TYPE_CHECKING:
    from bayou.app.runs.unusual import UnusualColumn

ROWS_PER_BATCH = 2048
UNUSUAL = "unusual"  # the column of p-values
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
    conformal_shift: str | None = None,
    conformal_groups: str | None = None,
    ood: bool = False,
    exceeds: str | None = None,
    costs: StrPath | None = None,
    progress: Show = True,
) -> list[str]:
    """Predict the rows of a file and write a CSV file.

    Rows are read, predicted and written in batches, so that the memory does not grow with their
    number; what is written becomes the file ``out`` when it is complete, and nothing remains of it
    after an error or Ctrl-C. ``conformal_shift`` and ``conformal_groups`` need all rows at once.

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
        conformal_shift: "covariate" if the rows of ``source`` have other inputs than those of
            ``conformal``, "label" if they have other frequencies of classes; the held-out rows are
            then weighted. None: they are alike.
        conformal_groups: a column of both files, each of whose values has a guarantee of its own.
        ood: whether to add the column ``unusual``: the p-value of the input among the rows of the
            run (``bayou.ood.fit``). Small is unusual.
        exceeds: a threshold in the units of y (of ordered classes the name of one); it adds the
            column p(>...), the probability that y exceeds it.
        costs: a table with the names of actions in its first column and their costs for every
            class; it adds decision, the action of the lowest expected cost, expected_cost, and
            value_of_information, what it is worth to know the class.
        progress: how to show the number of rows that are done and the time left, of a file of more
            than one batch; see ``bayou.core.progress.Progress``.

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
    request = GuaranteeRequest(conformal, conformal_shift, conformal_groups)
    request.check()
    run = Run.open(folder)
    posterior, preprocessor, job = run.posterior(method, seed)
    samples = posterior.draws_to_average(requested_samples(samples, run))
    rows = preprocessor.blocks(source, ROWS_PER_BATCH)
    notes = run.describe_interruption(job, posterior)
    guarantee = None
    if conformal is not None:
        guarantee = fit_guarantee(request, run, posterior, preprocessor, source, level, samples)
    additions = _read_additions(exceeds, costs, preprocessor)
    unusual = None
    if ood:
        # Here, since it imports the operations.
        from bayou.app.runs.unusual import UnusualColumn, fit_detector

        unusual = UnusualColumn(fit_detector(run, posterior, samples))
    table = _PredictionTable(posterior, preprocessor, level, samples, guarantee, additions, unusual)
    show = progress if rows.rows > ROWS_PER_BATCH else False
    with closing(rows), Progress("predicting", rows.rows, show) as line:
        _write_csv(path, table.batches(rows, line))
    return [*notes, *rows.notes, *table.notes()]


@final
class DistanceNote:
    """How many rows of all batches lie far outside the range of the training data."""

    def __init__(self) -> None:
        self._far_count = 0
        self._rows = 0

    def add(self, distance: NDArray[np.float64]) -> None:
        """Count the rows of a batch.

        Args:
            distance: of each row, in standard deviations.
        """
        self._far_count += int((distance > 1).sum())
        self._rows += len(distance)

    def sentences(self) -> list[str]:
        """Return a sentence if there are such rows."""
        if not self._far_count:
            return []
        return [
            f"{self._far_count} of {self._rows} rows lie more than a standard deviation outside "
            "the range of the training data: see the column distance."
        ]


@final
@dataclass
class _PredictionTable:
    """The columns of a prediction file, batch by batch.

    Args:
        posterior: that predicts.
        preprocessor: of its data.
        level: the probability of the intervals.
        samples: the number of averaged networks.
        guarantee: gives the conformal columns; None for none.
        additions: the threshold and the costs that were asked for.
        unusual: gives the p-values of the inputs; None for none.
        distances: counts rows far outside the range of the training data.
    """

    posterior: Posterior
    preprocessor: Preprocessor
    level: float
    samples: int | None
    guarantee: Guarantee | None
    additions: list[CostTable | Threshold]
    unusual: UnusualColumn | None
    distances: DistanceNote = field(default_factory=DistanceNote)

    def batches(
        self, batches: Iterable[PreparedRows], line: Progress
    ) -> Iterator[dict[str, list[str]]]:
        """Predict the rows batch by batch, and yield the text of the columns of each.

        Args:
            batches: the rows of the file, in their order.
            line: shows the number of rows that are done.
        """
        dtype = network_dtype(self.posterior)
        done = 0
        for batch in batches:
            x = batch.x.to(dtype)
            columns = _as_text(self._columns(x, done))
            details: dict[str, list[str]] = {}
            if batch.distance is not None:
                details["distance"] = [f"{value:.4g}" for value in batch.distance]
                self.distances.add(batch.distance)
            if self.unusual is not None:
                details[UNUSUAL] = self.unusual.cells(x)
            yield _row_columns(batch, columns, self.preprocessor) | columns | details
            done += len(x)
            line.update(done)

    def notes(self) -> list[str]:
        """Return sentences about the guarantee and the rows, once all of them are written."""
        sentences = [] if self.guarantee is None else list(self.guarantee.notes)
        sentences += self.distances.sentences()
        return sentences if self.unusual is None else [*sentences, *self.unusual.notes()]

    def _columns(self, x: Tensor, start: int) -> dict[str, list[str] | Tensor]:
        """Return the columns that follow from the prediction of rows, the first of number start."""
        predictive = self.posterior.predict(x, samples=self.samples, seed=0)
        columns = prediction_columns(predictive, self.preprocessor, self.level)
        if self.guarantee is not None:
            columns |= self.guarantee.columns(predictive, start)
        for addition in self.additions:
            columns |= addition.columns(predictive)
        return columns


def _read_additions(
    exceeds: str | None, costs: StrPath | None, preprocessor: Preprocessor
) -> list[CostTable | Threshold]:
    """Return the threshold and the costs that a user asked for."""
    additions: list[CostTable | Threshold] = []
    if exceeds is not None:
        additions.append(Threshold.parse(exceeds, preprocessor))
    if costs is not None:
        additions.append(CostTable.read(costs, preprocessor))
    return additions


def _as_text(columns: dict[str, list[str] | Tensor]) -> dict[str, list[str]]:
    """Return columns whose numbers are text."""
    return {
        name: values if isinstance(values, list) else _format_numbers(values)
        for name, values in columns.items()
    }


def _row_columns(
    batch: PreparedRows, columns: Collection[str], preprocessor: Preprocessor
) -> dict[str, list[str]]:
    """Return the numbers of the rows in their file, and their ids.

    Args:
        batch: the rows.
        columns: the names of their predictions, which the id column must not have.
        preprocessor: has the name of the id column.
    """
    table = {"row": [str(index + 1) for index in batch.kept]}
    if batch.ids is not None:
        name = str(preprocessor.id)
        if name in ("row", "distance", UNUSUAL, *columns):
            name = f"{name} (id)"
        table[name] = batch.ids
    return table


def _write_csv(path: Path, tables: Iterable[dict[str, list[str]]]) -> None:
    """Write tables with the same columns, one below the other, as a CSV file.

    Each is written before the next is computed, so that the memory does not grow with the rows.
    """
    with writing(path, folders=True, through_links=False) as stream:
        writer = csv.writer(codecs.getwriter("utf-8")(stream), lineterminator="\n")
        for index, table in enumerate(tables):
            if index == 0:
                writer.writerow(map(escape_formula, table))
            writer.writerows(map(escape_formula, row) for row in zip(*table.values(), strict=True))


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


def _format_numbers(values: Tensor) -> list[str]:
    """Return numbers as text, to eight digits."""
    return [f"{value:.8g}" for value in values.double().tolist()]
