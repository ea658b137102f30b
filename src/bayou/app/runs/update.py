"""New rows for a finished run: its posteriors learn or forget them without a new fit."""

from __future__ import annotations

import shlex
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from bayou.app.runs.folder import LOCK, UPDATES, Run, RunError
from bayou.app.runs.jobs import Job
from bayou.app.runs.json_files import write_json
from bayou.app.runs.learned_rows import row_digests
from bayou.app.runs.new_rows import NewRows, check_known_rows, check_rows_of_fit
from bayou.app.runs.predictions import ROWS_PER_BATCH, network_dtype, requested_samples
from bayou.app.runs.staging import staged_folder
from bayou.core.files import StrPath
from bayou.data import DataSet, is_path
from bayou.data.preprocess import PreparedRows
from bayou.metrics import row_nll
from bayou.posteriors import Posterior
from bayou.training.inputs import digest

MAX_STANDARD_ERRORS = 2.5  # of an NLL from its expectation before a note says so
# Names for `bayou train` whose posteriors can be updated, and those from which rows can be removed.
UPDATABLE_METHODS = ("laplace-last", "vbll", "laplace", "ffg")
EXACT_METHODS = ("laplace-last", "vbll")
EXACT_METHOD_OF_NUMBERS = "wide"  # which cannot forget


@final
@dataclass(frozen=True)
class Surprise:
    """The NLL of rows before they were learned, and the NLL that the posterior expected.

    If the posterior is right, the mean of −log p(y_n | x_n) is that of the entropies H[y | x_n], up
    to its standard error.

    Args:
        nll: the mean of −log p(y_n | x_n), in nats and in the units of the file.
        expected: the mean of H[y | x_n] in the same units; None where targets are censored.
        error: the standard error of their difference, or of ``nll`` where nothing is expected; None
            for a single row.
    """

    nll: float
    expected: float | None
    error: float | None

    @property
    def is_high(self) -> bool:
        """Whether the NLL is higher than expected by more than 2.5 standard errors."""
        if self.expected is None or self.error is None:
            return False
        return self.nll - self.expected > MAX_STANDARD_ERRORS * self.error


@final
@dataclass(frozen=True)
class JobUpdate:
    """The updated posterior of one job.

    Args:
        job: the method and its seed.
        posterior: the posterior with the rows, or without those that were removed.
        rows_before: the number of rows that the posterior had learned.
        surprise: the score of the rows by the posterior as it was before.
        seconds: of the update alone.
    """

    job: Job
    posterior: Posterior
    rows_before: int
    surprise: Surprise
    seconds: float

    def to_row(self) -> dict[str, Any]:
        """Return the numbers that ``bayou update`` prints."""
        surprise = self.surprise
        return {
            "method": self.job.name,
            "rows_before": self.rows_before,
            "rows_after": self.posterior.target.n,
            "nll": surprise.nll,
            "expected": surprise.expected,
            "standard_error": surprise.error,
            "seconds": self.seconds,
        }


def update_run(
    folder: StrPath,
    source: StrPath,
    *,
    out: StrPath | None = None,
    method: str | None = None,
    forget: float | None = None,
    remove: bool = False,
    force: bool = False,
) -> tuple[Path, list[dict[str, Any]], list[str]]:
    """Update the posteriors of a run by the rows of a file, without a new fit.

    The rows are prepared as those of ``bayou predict``, by the statistics of the training rows of
    the run. Nothing is written before all posteriors are updated, and the new folder appears as a
    whole. In place the old folder is replaced as a whole, too: after Ctrl-C there is the old
    run or the new one.

    Args:
        folder: the run folder.
        source: a file of rows with their target.
        out: the folder of the updated run; by default ``folder`` with "-updated" at its end.
        method: only this method; by default all that can be updated.
        forget: the factor of the information in all rows before, for relations that drift; by
            default it stays.
        remove: remove the rows, which the posterior has learned, instead of learning them.
        force: update ``folder`` in place.

    Returns:
        The folder of the updated run; one dictionary for each updated job: its rows before and
        after, the NLL of the new rows before they were learned with its expectation and their
        standard error, and the seconds; and notes.

    Raises:
        RunError: the options contradict each other, the run is not finished, ``out`` exists, no
            method of the run can be updated, or rows to be removed were never learned.

    Example::

        folder, table, notes = update_run("run", "new.csv", out="run-2")
    """
    run = Run.open(folder)
    path = _output_folder(run, out, force)
    if remove and forget is not None:
        raise RunError("--forget is for rows that are learned; omit it with --remove")
    jobs = _finished_jobs(run, method, in_place=force)
    rows = run.preprocessor().rows(source, need_target=True)
    with run.lock() if force else nullcontext():
        new_rows, notes = _prepare_rows(run, rows, str(source), forget, remove)
        data = _load_data(run, notes)
        notes += check_known_rows(run, new_rows, data)
        updates, reasons = _update_jobs(run, jobs, new_rows, data)
        if not updates:
            raise RunError(_describe_refusals(run, reasons, new_rows))
        notes += _describe_updates(updates, reasons, new_rows, in_place=force)
        with staged_folder(path) as staged:
            _write_run(run, staged, updates, new_rows, data, in_place=force)
    return run.folder if force else path, [update.to_row() for update in updates], notes


def _output_folder(run: Run, out: StrPath | None, force: bool) -> Path:
    """Return the folder to write, or raise a RunError if it is in use."""
    if force:
        if out is not None:
            raise RunError("give --out for a new run, or --force to update in place, not both")
        if run.config.splits > 1:
            raise RunError(
                f"{run.folder} has {run.config.splits} splits, of which only the first predicts "
                "new rows; give --out for a run of that split"
            )
        return run.folder.resolve()
    path = Path(out) if out is not None else run.folder.with_name(f"{run.folder.name}-updated")
    if path.exists() or path.is_symlink():
        raise RunError(
            f"{path} already exists; choose another --out, or update {run.folder} in place with "
            "--force"
        )
    if not path.parent.is_dir():
        raise RunError(f"the folder {path.parent} of {path.name} does not exist; create it first")
    return path


def _finished_jobs(run: Run, method: str | None, *, in_place: bool) -> list[Job]:
    """Return the jobs to update; a RunError if there are none, or the run is not finished."""
    unfinished = run.unfinished_jobs()
    if unfinished:
        names = ", ".join(job.name for job in unfinished)
        raise RunError(
            f"the run in {run.folder} is not finished: {names}; `bayou resume {run.folder}` "
            "continues it, and then it can be updated"
        )
    jobs = [job for job in run.finished_jobs() if method in (None, job.method)]
    if not jobs:
        raise RunError(run.describe_missing(method))
    return jobs


def _prepare_rows(
    run: Run, rows: PreparedRows, source: str, forget: float | None, remove: bool
) -> tuple[NewRows, list[str]]:
    """Return the rows in the precision of the run, and the notes about them."""
    if rows.y is None or not len(rows.y):
        raise RunError(f"{source} has no rows with a target")
    x, y = run.convert(rows.x, rows.y)
    return NewRows(source, x, y, forget, remove), list(rows.notes)


def _load_data(run: Run, notes: list[str]) -> DataSet | None:
    """Return the data of the run; None with a note if they are gone or have changed."""
    try:
        data = run.load_data()
    except ValueError:
        data = None
    if data is None or digest((data.train, data.test)) != run.facts()["sha256"]:
        notes.append(
            f"{run.config.data} is no longer there or has changed: the updated run has no scores "
            "on test rows and no report."
        )
        return None
    return data


# --- updates -----------------------------------------------------------------------------------


def _update_jobs(
    run: Run, jobs: list[Job], new_rows: NewRows, data: DataSet | None
) -> tuple[list[JobUpdate], dict[str, str]]:
    """Update the posteriors of jobs, and return the reasons of those that refuse, by name."""
    updates = []
    reasons = {}
    for job in jobs:
        posterior, _, _ = run.posterior(job.method, job.seed)
        surprise = _measure_surprise(run, posterior, new_rows)
        started = time.perf_counter()
        try:
            check_rows_of_fit(run, posterior, new_rows, data)
            updated = new_rows.apply(posterior)
        except ValueError as error:
            reasons[job.name] = str(error)
            continue
        seconds = time.perf_counter() - started
        updates.append(JobUpdate(job, updated, posterior.target.n, surprise, seconds))
    return updates, reasons


def _measure_surprise(run: Run, posterior: Posterior, new_rows: NewRows) -> Surprise:
    """Score the rows by a posterior, and compute the score that it expects."""
    preprocessor = run.preprocessor()
    samples = posterior.draws_to_average(requested_samples(None, run))
    x = new_rows.x.to(network_dtype(posterior))
    scores = []
    expectations = []
    for start in range(0, len(x), ROWS_PER_BATCH):
        batch = slice(start, start + ROWS_PER_BATCH)
        predictive = posterior.predict(x[batch], samples=samples, seed=0)
        scores.append(row_nll(predictive, new_rows.y[batch], preprocessor.y_scale))
        expectations.append(predictive.entropy.detach().double().cpu())
    nll = torch.cat(scores)
    difference = nll
    expected = None
    if run.config.observed is None:
        entropy = torch.cat(expectations) + torch.tensor(preprocessor.y_scale).double().log()
        expected = float(entropy.mean())
        difference = nll - entropy
    error = float(difference.std() / len(nll) ** 0.5) if len(nll) > 1 else None
    return Surprise(float(nll.mean()), expected, error)


def _describe_refusals(run: Run, reasons: dict[str, str], new_rows: NewRows) -> str:
    """Return the error message for a run none of whose posteriors can be updated."""
    sentences = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    is_regression = run.preprocessor().task == "regression"
    names = list(UPDATABLE_METHODS)
    if new_rows.remove:
        names = list(EXACT_METHODS) if is_regression else []
    if is_regression and new_rows.forget is None:
        names.append(EXACT_METHOD_OF_NUMBERS)
    refused = {name.rpartition("-")[0] for name in reasons}  # a mixture with the mode, for example
    names = [name for name in names if name not in refused]
    ways = []
    if not new_rows.remove and is_path(run.config.data):
        command = shlex.join(["bayou", "label", str(run.folder), "--labeled", new_rows.source])
        ways.append(
            f"to fit {run.config.methods[0]} again to old and new rows, `{command}` writes them to "
            "one file and prints the command"
        )
    if names:
        verb = "lose rows" if new_rows.remove else "be updated"
        ways.append(
            "for updates without a fit train with `--method NAME`: posteriors of "
            f"{', '.join(names)} can {verb}"
        )
    if not ways:
        ways.append("fit again without these rows" if new_rows.remove else "fit again")
    return f"{sentences}. {_sentence('; '.join(ways))}"


def _sentence(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _describe_updates(
    updates: list[JobUpdate], reasons: dict[str, str], new_rows: NewRows, *, in_place: bool
) -> list[str]:
    """Return notes about posteriors that were not updated and rows that were not expected."""
    consequence = "stays as it was" if in_place else "is not in the updated run"
    notes = [f"{name} {consequence}: {reason}" for name, reason in reasons.items()]
    for update in updates:
        if update.surprise.is_high and not new_rows.remove:
            notes.append(
                f"{update.job.name}: the NLL of the new rows is higher than expected by more than "
                f"{MAX_STANDARD_ERRORS:g} standard errors; if the relation has changed, --forget "
                "0.99 gives old rows less weight, or fit again."
            )
    return notes


# --- the folder --------------------------------------------------------------------------------


def _write_run(
    run: Run,
    staged: Path,
    updates: list[JobUpdate],
    new_rows: NewRows,
    data: DataSet | None,
    *,
    in_place: bool,
) -> None:
    """Write the files of the updated run to a folder."""
    config = run.config
    facts = run.facts()
    facts["notes"] = [*facts.get("notes", []), new_rows.describe()]
    if in_place:
        # A copy of what links point to: nothing is written through them.
        shutil.copytree(run.folder, staged, ignore=_is_not_copied, dirs_exist_ok=True)
    else:
        updated_methods = {update.job.method for update in updates}
        methods = tuple(name for name in config.methods if name in updated_methods)
        config = replace(config, methods=methods, splits=1)
        facts["splits"] = {}
    write_json(staged / "config.json", config.to_json())
    write_json(staged / "data.json", facts)
    write_json(staged / UPDATES, {"updates": [*run.updates(), _record(updates, new_rows)]})
    updated_run = Run(staged, config)
    for name, error in run.failures().items():
        if not in_place and name.rpartition("-")[0] in config.methods:
            write_json(staged / name / "error.json", {"error": error})
    baselines = {} if data is None else run.baselines(data)
    for update in updates:
        _write_job(run, updated_run, update, data, baselines)
    updated_run.write_summary()


def _is_not_copied(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that an updated run does not have: locks and reports."""
    return set(names) & {LOCK, "report.html", "metrics.json"}


def _record(updates: list[JobUpdate], new_rows: NewRows) -> dict[str, Any]:
    """Return what updates.json says about this update."""
    return {
        "input": new_rows.source,
        "removed": new_rows.remove,
        "forget": new_rows.forget,
        "jobs": [update.to_row() for update in updates],
        "rows": row_digests(new_rows.x, new_rows.y),
    }


def _write_job(
    run: Run,
    updated_run: Run,
    update: JobUpdate,
    data: DataSet | None,
    baselines: dict[str, Any],
) -> None:
    """Write the posterior of a job and its evaluation on the test rows."""
    from bayou.app.report.judge import judge

    folder = updated_run.job_folder(update.job)
    folder.mkdir(exist_ok=True)
    update.posterior.save(folder / "posterior.bayou")
    result = run.result(update.job)
    if data is None or result is None:
        (folder / "result.json").unlink(missing_ok=True)
        return
    evaluation = judge(
        update.posterior,
        data,
        samples=run.config.samples,
        seed=update.job.seed,
        baselines=baselines,
    )
    write_json(folder / "result.json", result | evaluation)
