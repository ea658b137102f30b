"""Scores of the methods of a run, on a file or on its test data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import bayou
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import network_dtype, sample_count
from bayou.core.files import StrPath
from bayou.data import CATALOGUE
from bayou.data.preprocess import Preprocessor
from bayou.posteriors.checks import describe_flag

if TYPE_CHECKING:
    from bayou.diagnostics.baselines import Baseline


@dataclass(frozen=True)
class _TestRows:
    """The rows that methods are evaluated on, before a conversion to the dtype of a network."""

    x: Tensor
    y: Tensor
    ood: Tensor | None
    notes: list[str]

    def convert(self, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return the test rows and the out-of-distribution inputs in a dtype."""
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        ood = None if self.ood is None else self.ood.to(dtype)
        return (self.x.to(dtype), y), ood


def evaluate_run(
    folder: StrPath,
    source: str | None,
    *,
    method: str | None = None,
    samples: int | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Score the finished methods of a run on a file or on the run's test data.

    Args:
        folder: the run folder.
        source: a file of rows with their target; None for the test data of the run.
        method: only this method.
        samples: number of averaged networks; by default as in the run.

    Returns:
        One dictionary of scores for each finished job, and notes: about the rows, and every result
        of ``bayou.diagnostics.check`` that is not ok.

    Raises:
        RunError: no such method is finished, or the source is another built-in data set.
    """
    from bayou.app.report.judge import prediction_options, score

    run = Run.open(folder)
    jobs = [job for job in run.finished_jobs() if method in (None, job.method)]
    if not jobs:
        raise RunError(run.describe_missing(method))
    if source == run.config.data and source in CATALOGUE:
        source = None
    elif source in CATALOGUE:
        raise RunError(
            f"{folder} was trained on {run.config.data}, not {source}; give --data a file, or "
            "omit it"
        )
    table: list[dict[str, Any]] = []
    notes: list[str] = []
    test_rows = None
    baselines = _fit_baselines(run)
    for job in jobs:
        posterior, preprocessor, _ = run.posterior(job.method, job.seed)
        if test_rows is None:
            test_rows = _load_test_rows(run, source, preprocessor)
            notes += test_rows.notes
        notes += [note for note in run.describe_interruption(job, posterior) if note not in notes]
        test, ood = test_rows.convert(network_dtype(posterior))
        scale = preprocessor.y_scale
        options = prediction_options(posterior, sample_count(posterior, samples, run), job.seed)
        predictive, _, scores = score(posterior, test, ood, scale, options)
        checks = bayou.diagnostics.check(
            posterior, None, test, scale=scale, against=baselines, predictive=predictive
        )
        for flag in checks.flags:
            notes.append(f"{job.name}: {describe_flag(flag.name, flag.status, flag.text)}")
        table.append({"method": job.name} | scores)
    return table, notes


def _load_test_rows(run: Run, source: str | None, preprocessor: Preprocessor) -> _TestRows:
    """Return the rows of a file, or the test rows of the run."""
    if source is None:
        data = run.load_data()
        return _TestRows(*data.test, data.ood, [])
    rows = preprocessor.rows(source, need_target=True)
    if rows.y is None:
        raise RunError(f"{source} has no target to evaluate on")
    return _TestRows(rows.x, rows.y, None, rows.notes)


def _fit_baselines(run: Run) -> dict[str, Baseline]:
    """Fit the baselines to the training data; none if these are no longer available."""
    try:
        return run.baselines(run.load_data())
    except ValueError:
        return {}
