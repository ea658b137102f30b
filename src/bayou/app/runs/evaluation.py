"""Scores of the methods of a run, on a file or on its test data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

import bayou
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import requested_samples
from bayou.core.files import StrPath
from bayou.data import CATALOGUE
from bayou.posteriors.checks import describe_flag

if TYPE_CHECKING:
    from bayou.diagnostics.baselines import Baseline


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
    test, ood, notes = _load_test_rows(run, source)
    scale = run.preprocessor().y_scale
    baselines = _fit_baselines(run)
    for job in jobs:
        posterior, _, _ = run.posterior(job.method, job.seed)
        notes += [note for note in run.describe_interruption(job, posterior) if note not in notes]
        options = prediction_options(posterior, requested_samples(samples, run), job.seed)
        predictive, _, scores = score(posterior, test, ood, scale, options)
        checks = bayou.diagnostics.check(
            posterior, None, test, scale=scale, against=baselines, predictive=predictive
        )
        for flag in checks.flags:
            notes.append(f"{job.name}: {describe_flag(flag.name, flag.status, flag.text)}")
        table.append({"method": job.name} | scores)
    return table, notes


def _load_test_rows(
    run: Run, source: str | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None, list[str]]:
    """Return x and y, out-of-distribution inputs and notes: of a file, or of the test data."""
    if source is None:
        data = run.load_data()
        return data.test, data.ood, []
    rows = run.preprocessor().rows(source, need_target=True)
    if rows.y is None:
        raise RunError(f"{source} has no target to evaluate on")
    return run.convert(rows.x, rows.y), None, rows.notes


def _fit_baselines(run: Run) -> dict[str, Baseline]:
    """Fit the baselines to the training data; none if these are no longer available."""
    try:
        return run.baselines(run.load_data())
    except ValueError:
        return {}
