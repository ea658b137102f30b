"""The board: the scores of predictions beside a reference, among the committed rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

from torch import Tensor

from bayou import metrics
from bayou.likelihoods.predictive import Predictive
from bayou.truth.predictions import (
    PredictionError,
    Predictions,
    class_predictive,
    read_predictions,
)
from bayou.truth.references import HERE, TFDS, Reference, find_source, reference

SCORES = ("total_variation", "agreement", "nll", "ece", "accuracy")
DIGITS = 5  # of the scores of committed rows
MAX_CHANCE = 5.0  # standard errors above chance, up to which an accuracy says nothing


@final
@dataclass(frozen=True)
class Row:
    """The scores of a method beside a reference, means over seeds.

    Args:
        label: the method.
        total_variation: the mean of ½·Σ|p − q| over the test rows: 0 is the reference.
        agreement: the fraction of rows with the same most probable class.
        nll: −log p of the observed class, in nats.
        ece: the expected calibration error, 15 bins.
        accuracy: the fraction of rows whose most probable class is the observed one.
        epochs: of all fits that a prediction averages; None where there are none, or not known.
        minutes: of the same fits.
        seeds: the number of predictions over which the row is a mean.
        total_variation_error: the standard error of that mean; None for one prediction.
        url: where the row is described; "" for those of bayou.
    """

    label: str
    total_variation: float
    agreement: float
    nll: float
    ece: float
    accuracy: float
    epochs: float | None = None
    minutes: float | None = None
    seeds: int = 1
    total_variation_error: float | None = None
    url: str = ""


@final
@dataclass(frozen=True)
class ScoredFile:
    """A file of predictions that was scored.

    Args:
        name: of the file.
        sha256: of its bytes.
        seeds: of the fits, if it says so.
    """

    name: str
    sha256: str
    seeds: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Board:
    """A scored row among the committed rows of a reference.

    Args:
        against: the name of the reference.
        row: the row that was scored.
        files: whose scores are averaged in it.
        others: the committed rows.
    """

    against: str
    row: Row
    files: tuple[ScoredFile, ...]
    others: tuple[Row, ...]

    @property
    def rows(self) -> list[Row]:
        """All rows, sorted by total variation."""
        return sorted((self.row, *self.others), key=lambda row: row.total_variation)

    @property
    def rank(self) -> int:
        """The place of the scored row among the methods, from 1; the reference is none of them."""
        return 1 + sum(0 < row.total_variation < self.row.total_variation for row in self.others)

    def entry(self) -> dict[str, Any]:
        """Return the scored row as an entry: plain values, with the SHA-256 of its files."""
        return {
            "against": self.against,
            "row": asdict(self.row),
            "files": [asdict(file) for file in self.files],
        }

    @property
    def methods(self) -> int:
        """The number of methods, with the scored one."""
        return 1 + sum(row.total_variation > 0 for row in self.others)


def fidelity(predictive: Predictive, truth: Predictive, y: Tensor) -> dict[str, float]:
    """Return the distance of predictions from a reference, and their scores.

    Args:
        predictive: predictions of N rows.
        truth: those of the reference.
        y: the observed classes, (N,).

    Returns:
        ``total_variation``, ``agreement``, ``nll``, ``ece`` and ``accuracy``, of ``bayou.metrics``.
    """
    return {
        "total_variation": metrics.total_variation(predictive, truth),
        "agreement": metrics.agreement(predictive, truth),
        "nll": metrics.nll(predictive, y),
        "ece": metrics.ece(predictive, y),
        "accuracy": metrics.accuracy(predictive, y),
    }


def mean_row(label: str, scores: Sequence[Mapping[str, Any]], url: str = "") -> Row:
    """Return the row of several predictions: means over all.

    Args:
        label: the method.
        scores: those of ``fidelity`` for each prediction, with ``epochs`` and ``minutes`` where
            they are known.
        url: where the row is described.
    """
    distances = [float(one["total_variation"]) for one in scores]
    means: dict[str, Any] = {
        name: round(fmean(float(one[name]) for one in scores), DIGITS) for name in SCORES
    }
    for name in ("epochs", "minutes"):
        known = [float(one[name]) for one in scores if one.get(name) is not None]
        means[name] = round(fmean(known), 2) if len(known) == len(scores) else None
    error = metrics.standard_error(distances)
    return Row(
        label,
        **means,
        seeds=len(scores),
        total_variation_error=None if math.isnan(error) else round(error, DIGITS),
        url=url,
    )


def committed_rows(against: str) -> tuple[Row, ...]:
    """Return the committed rows of a reference, from a file of the package.

    Args:
        against: the name of the reference.

    Raises:
        DataError: there is no such reference.
    """
    find_source(against)
    content = json.loads((HERE / f"{against}.json").read_text(encoding="utf-8"))
    return tuple(Row(**row) for row in content["rows"])


def rows_json(rows: Sequence[Row]) -> str:
    """Return the text of a file of committed rows: a row on each line, without what is not known.

    Args:
        rows: of a board.
    """
    lines = []
    for row in rows:
        known = {key: value for key, value in asdict(row).items() if value not in (None, "")}
        lines.append(json.dumps(known, ensure_ascii=False))
    return '{"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def score(
    files: str | Path | Sequence[str | Path],
    against: str,
    *,
    root: str | Path | None = None,
) -> Board:
    """Score predictions beside a reference, among its committed rows.

    Args:
        files: a file of predictions, or several of one method, whose scores are averaged: one for
            each repetition with other seeds.
        against: "hmc-cifar10" or "hmc-digits".
        root: a folder in which files of the reference are looked for before ``$BAYOU_DATA`` and the
            cache.

    Returns:
        The row and all others.

    Raises:
        PredictionError: a file has no probabilities of the test rows in the order of the reference.
        DataError: there is no such reference, or a file is missing or damaged.

    Example:
        >>> board = truth.score("laplace.npz", "hmc-cifar10")
        >>> board.row.total_variation, board.rank
    """
    paths = [Path(path) for path in ([files] if isinstance(files, str | Path) else files)]
    if not paths:
        raise PredictionError("there are no files to score")
    find_source(against)
    predictions = [read_predictions(path) for path in paths]
    truth = reference(against, root=root)
    scores = []
    scored_files = []
    for path, one in zip(paths, predictions, strict=True):
        numbers = _score_one(path.name, one, truth)
        scores.append({**numbers, "epochs": one.epochs, "minutes": one.minutes})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        scored_files.append(ScoredFile(path.name, digest, one.seeds))
    first = predictions[0]
    row = mean_row(first.name, scores, first.url)
    return Board(against, row, tuple(scored_files), committed_rows(against))


def _score_one(file: str, predictions: Predictions, truth: Reference) -> dict[str, float]:
    """Return the scores of one file, after checks of its rows."""
    shape = tuple(predictions.log_probs.shape)
    expected = tuple(truth.log_probs.shape)
    if shape != expected:
        raise PredictionError(
            f"{file} has predictions of the shape {shape}, the reference {truth.name} has "
            f"{expected}: {expected[0]:,} test rows in {truth.order}, and {expected[1]} classes"
        )
    predictive = class_predictive(predictions.log_probs)
    is_impossible = predictions.log_probs.gather(1, truth.y[:, None]).squeeze(1).isneginf()
    _check_order(file, predictive, predictions.log_probs, truth)
    if bool(is_impossible.any()):
        count = int(is_impossible.sum())
        raise PredictionError(
            f"{file} gives the observed class the probability 0 in {count:,} rows, the first is "
            f"row {int(is_impossible.int().argmax())}, so that the NLL is infinite; store "
            "log_probs, or probabilities in float32"
        )
    return fidelity(predictive, class_predictive(truth.log_probs), truth.y)


def _check_order(file: str, predictive: Predictive, log_probs: Tensor, truth: Reference) -> None:
    """Raise a PredictionError if the accuracy is at chance: the rows are in another order."""
    chance = float(truth.y.bincount().max()) / len(truth.y)
    limit = chance + MAX_CHANCE * math.sqrt(chance * (1 - chance) / len(truth.y))
    accuracy = metrics.accuracy(predictive, truth.y)
    if accuracy > limit:
        return
    for name, order in truth.other_orders.items():
        other = metrics.accuracy(predictive, truth.y[order])
        if other > limit:
            hint = "probs = bayou.truth.from_tfds_order(probs)" if name == TFDS else "reorder them"
            raise PredictionError(
                f"{file} has its rows in the order of {name}: the accuracy is {other:.1%} there "
                f"and {accuracy:.1%} in {truth.order}, which is expected; {hint}"
            )
    raise PredictionError(
        f"{file} has an accuracy of {accuracy:.1%}, which is that of chance: expected are rows in "
        f"{truth.order} (no shuffling in the loader), and columns in the order of the classes"
    )
