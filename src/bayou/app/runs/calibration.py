"""Calibration of a run: the map of a posterior is learned from labeled rows of a file."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

import bayou
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.jobs import Job
from bayou.app.runs.json_files import write_json
from bayou.app.runs.learned_rows import check_not_learned
from bayou.app.runs.predictions import requested_samples
from bayou.core.files import StrPath
from bayou.data import DataSet
from bayou.operations import Calibration
from bayou.operations.calibrate import check_map
from bayou.posteriors import Posterior
from bayou.training.rows import check_held_out

CALIBRATION_FILE = "calibration.json"  # in the folder of a job
MAX_USUAL_TEMPERATURE = 5.0  # of numbers, above which a note asks for their units


def calibrate_run(
    folder: StrPath,
    source: StrPath,
    *,
    map: str = "temperature",
    method: str | None = None,
    seed: int | None = None,
    samples: int | None = None,
) -> list[str]:
    """Calibrate a posterior of a run by the labeled rows of a file, and update the run.

    The posterior is replaced by the calibrated one, which ``predict``, ``serve`` and ``evaluate``
    use from then on; a later calibration, or the map "none", replaces the map. The scores on the
    test rows and the report are made again, if the data of the run are still available.
    calibration.json in the folder of the job says what was learned.

    Args:
        folder: the run folder.
        source: a file of rows with their target that were not used in training.
        map: of ``bayou.calibrate``, "temperature" by default.
        method: which method of the run; by default that of the first finished job.
        seed: which seed of the run; by default the first.
        samples: number of averaged networks; by default as in the run.

    Returns:
        Sentences: notes about the rows, and what was learned.

    Raises:
        RunError: the run has no such posterior, or the file no targets or rows that an update of
            the run learned.
        ValueError: rows of the file are training rows, or too few for the map.
    """
    check_map(map)
    run = Run.open(folder)
    with run.lock():
        posterior, preprocessor, job = run.posterior(method, seed)
        rows = preprocessor.rows(source, need_target=True)
        if rows.y is None:
            raise RunError(f"{source} has no target, which a calibration needs")
        x, y = run.convert(rows.x, rows.y)
        check_not_learned(run, x, y, source)
        notes = [*run.describe_interruption(job, posterior), *rows.notes]
        data = _available_data(run)
        result = bayou.calibrate(
            posterior,
            (x, y),
            map=map,
            samples=posterior.draws_to_average(requested_samples(samples, run)),
            seed=0,
            train=None if data is None else data.train,
        )
        if preprocessor.task == "regression" and result.temperature > MAX_USUAL_TEMPERATURE:
            notes.append(
                f"A temperature of {result.temperature:.3g} means that the targets are farther "
                "from the predictions than the posterior expects by about this factor: are they "
                f"in the units of the training rows? `bayou calibrate {run.folder} --input "
                f"{source} --map none` undoes it."
            )
        if preprocessor.task == "regression" and run.config.observed is None:
            result = _in_data_units(result, preprocessor.y_scale)
        posterior.save(run.job_folder(job) / "posterior.bayou")
        record = {"rows": len(y), "source": str(source)} | asdict(result)
        if result.fresh is not None:
            record["fresh"] = result.fresh._asdict()
        write_json(run.job_folder(job) / CALIBRATION_FILE, record)
        if data is None:
            notes.append("the data of the run are not available, so that its report stays as it is")
        else:
            notes += _note_test_rows((x, y), data)
            _evaluate_again(run, job, posterior, data, result)
    return [*notes, f"{job.name}: {result.describe()}"]


def _in_data_units(calibration: Calibration, y_scale: float) -> Calibration:
    """Return the NLL of standardized targets as that of targets in the units of the file."""
    shift = math.log(y_scale)
    fresh = calibration.fresh
    if fresh is not None:
        fresh = fresh._replace(before=fresh.before + shift, after=fresh.after + shift)
    return replace(
        calibration,
        before=calibration.before + shift,
        after=calibration.after + shift,
        fresh=fresh,
    )


def _available_data(run: Run) -> DataSet | None:
    """Return the data of a run; None if they are no longer available."""
    try:
        return run.load_data()
    except ValueError:
        return None


def _note_test_rows(rows: tuple[Tensor, Tensor], data: DataSet) -> list[str]:
    """Return a note if some of the rows are test rows of the run."""
    try:
        check_held_out(rows, data.test)
    except ValueError:
        return [
            "some of these rows are test rows of the run: its scores are better than on new rows"
        ]
    return []


def _evaluate_again(
    run: Run, job: Job, posterior: Posterior, data: DataSet, calibration: Calibration
) -> None:
    """Replace the evaluation of a job, and write the report of the run."""
    from bayou.app.report.judge import judge

    result: dict[str, Any] | None = run.result(job)
    if result is None:  # the run is not finished
        return
    evaluation = judge(
        posterior,
        data,
        samples=run.config.samples,
        seed=job.seed,
        baselines=run.baselines(data),
    )
    result |= {"calibration": calibration.describe()}
    write_json(run.job_folder(job) / "result.json", result | evaluation)
    run.write_summary()
