"""Comparison of new rows of a file with the rows of a run: the command ``bayou watch``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.json_files import check_output
from bayou.app.runs.predictions import requested_samples
from bayou.core.files import StrPath
from bayou.core.progress import spell
from bayou.data import reading
from bayou.data.preprocess import PreparedRows, Preprocessor, TablePreprocessor
from bayou.data.reading import RawTable, quote_names
from bayou.data.times import times_of
from bayou.data.watched import new_columns
from bayou.diagnostics import InputColumn, ReferenceRows, ShiftReport, watch
from bayou.diagnostics.input_columns import describe_mistakes
from bayou.posteriors import Posterior

EXIT_CODES = {"as expected": 0, "cannot tell": 3}  # 1 for every other verdict


@final
@dataclass(frozen=True, eq=False)
class WatchedRows:
    """New rows of a file, in the order of time if one was named.

    Args:
        x: inputs of the network; None if a column is missing.
        y: targets; None if some are missing.
        columns: of a table; None for images.
        mistakes: sentences about what is wrong for certain.
        notes: about the rows.
        in_order: whether they are in the order of time.
        target_findings: sentences about targets that look like mistakes.
    """

    x: Tensor | None
    y: Tensor | None
    columns: list[InputColumn] | None
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    in_order: bool = False
    target_findings: tuple[str, ...] = ()


@final
@dataclass(frozen=True, eq=False)
class WatchedRun:
    """A posterior of a run with the rows that new rows are compared with.

    Args:
        run: the run folder.
        posterior: of one of its jobs.
        preprocessor: of new rows.
        reference: training rows and test rows.
        samples: number of averaged networks; None for a closed form.
        notes: about the run.
    """

    run: Run
    posterior: Posterior
    preprocessor: Preprocessor
    reference: ReferenceRows
    samples: int | None
    notes: tuple[str, ...] = ()

    @classmethod
    def open(
        cls,
        folder: StrPath,
        *,
        method: str | None = None,
        seed: int | None = None,
        samples: int | None = None,
    ) -> WatchedRun:
        """Load a posterior of a run folder and its reference rows.

        Args:
            folder: the run folder.
            method: which method of the run; by default the first.
            seed: which seed of the run; by default the first.
            samples: number of averaged networks; by default as in the run.

        Raises:
            RunError: there is no such posterior, or no rows to compare with.
        """
        run = Run.open(folder)
        posterior, preprocessor, job = run.posterior(method, seed)
        return cls(
            run,
            posterior,
            preprocessor,
            run.reference(),
            posterior.draws_to_average(requested_samples(samples, run)),
            tuple(run.describe_interruption(job, posterior)),
        )

    def read(self, source: StrPath, time: str | None = None) -> WatchedRows:
        """Read the rows of a file; a missing column is a mistake and no error.

        Args:
            source: the file.
            time: the column by which the rows are ordered; None for the order of the file, which
                does not count as that of time.
        """
        if not isinstance(self.preprocessor, TablePreprocessor):
            if time is not None:
                raise RunError(f"{spell('time', '--time')} is for the columns of a table")
            return self._new_rows(self.preprocessor.rows(source), None, (), in_order=False)
        names = [column.name for column in self.preprocessor.columns]
        table = reading.read(source, [*names, self.preprocessor.target])
        if time is not None:
            table = _sort_by(table, time)
        columns, mistakes = new_columns(self.preprocessor.columns, table)
        if any(name not in table.columns for name in names):
            return WatchedRows(None, None, columns, tuple(mistakes), tuple(table.notes))
        rows = self.preprocessor.rows(table)
        return self._new_rows(rows, columns, mistakes, in_order=time is not None)

    def _new_rows(
        self,
        rows: PreparedRows,
        columns: list[InputColumn] | None,
        mistakes: Sequence[str],
        *,
        in_order: bool,
    ) -> WatchedRows:
        """Return rows in the precision of the run."""
        no_target = torch.zeros(len(rows.x))
        x, y = self.run.convert(rows.x, no_target if rows.y is None else rows.y)
        notes = list(rows.notes)
        if rows.y is None:
            notes.append(
                "Not every row has a target, so the relation of inputs and target is not tested."
            )
        targets = None if rows.y is None else y
        findings = () if targets is None else tuple(self._check_targets(targets))
        return WatchedRows(x, targets, columns, tuple(mistakes), tuple(notes), in_order, findings)

    def _check_targets(self, y: Tensor) -> list[str]:
        """Return sentences about numbers that look like mistakes, such as another unit."""
        held_y = self.reference.held_y
        if self.preprocessor.task != "regression" or held_y is None or y[0].numel() != 1:
            return []
        reference, new = (
            InputColumn(
                self.run.config.target or "y",
                values.cpu().double().flatten() * self.preprocessor.y_scale
                + self.preprocessor.y_mean,
            )
            for values in (held_y, y)
        )
        return describe_mistakes(reference, new)

    def compare(self, rows: WatchedRows, alpha: float = 0.01, seed: int = 0) -> ShiftReport:
        """Compare new rows with those of the run.

        Args:
            rows: new rows.
            alpha: the largest probability of a false alarm.
            seed: of draws and permutations.
        """
        report = watch(
            self.posterior,
            self.reference,
            rows.x,
            rows.y,
            columns=rows.columns,
            mistakes=rows.mistakes,
            in_order=rows.in_order,
            alpha=alpha,
            samples=self.samples,
            seed=seed,
        )
        return replace(report, findings=(*report.findings, *rows.target_findings))

    def can_learn(self, rows: WatchedRows) -> bool:
        """Return whether ``bayou update`` can give rows to the posterior.

        Args:
            rows: new rows with their targets.
        """
        if rows.x is None or rows.y is None:
            return False
        try:
            self.posterior.update((rows.x[:1], rows.y[:1]))
        except ValueError:
            return False
        return True


def _sort_by(table: RawTable, time: str) -> RawTable:
    """Return a table whose rows are in the order of a column."""
    if time not in table.columns:
        raise RunError(
            f"{table.name} has no column {time!r}; its columns are {quote_names(table.columns)}"
        )
    order = np.argsort(times_of(table.columns[time], time), kind="stable").astype(np.int64)
    columns = {name: column.take(order) for name, column in table.columns.items()}
    return replace(table, columns=columns)


def next_commands(
    report: ShiftReport, watched: WatchedRun, rows: WatchedRows, source: StrPath
) -> list[str]:
    """Return commands to continue with, each with a comment that says what it does.

    Args:
        report: of the new rows.
        watched: the posterior and its run.
        rows: the new rows.
        source: the file with the new rows.
    """
    folder = shlex.quote(str(watched.run.folder))
    file = shlex.quote(str(source))
    predict = f"bayou predict {folder} --input {file}"
    if report.verdict == "the relation has changed":
        if rows.target_findings:
            return [f"bayou watch {folder} --input {file}  # after correcting the targets"]
        train = watched.run.config.command()
        commands = [f"{train} --out {folder}-new  # after adding {file} to its data"]
        if watched.can_learn(rows):
            commands.insert(0, f"bayou update {folder} --input {file}  # learn the new rows")
        return commands
    if report.verdict == "inputs have shifted":
        if report.relation == "as expected":
            shifted = "--conformal labeled.csv --conformal-shift covariate"
            return [f"{predict} {shifted}  # intervals with a guarantee"]
        return [f"bayou watch {folder} --input labeled.csv  # some of the rows with targets"]
    if any(test.is_significant and test.family == "calibration" for test in report.tests):
        return [f"bayou calibrate {folder} --input {file}"]
    return [predict]


def exit_code(verdict: str) -> int:
    """Return 0 if all is as expected, 1 if something shifted or changed, 3 for too few rows.

    Args:
        verdict: on new rows.
    """
    return EXIT_CODES.get(verdict, 1)


def check_options(source: Path, out: Path | None, *, is_stream: bool, force: bool) -> None:
    """Raise a RunError unless the input exists and the page can be written.

    Args:
        source: the file of new rows.
        out: the page, if any.
        is_stream: whether evidence is added up over calls, of which there is no page.
        force: overwrite the page.
    """
    if not source.is_file():
        raise RunError(
            f"there is no file {source}; give --input a file with the columns of the run"
        )
    if out is not None and is_stream:
        raise RunError("--out is for one comparison; leave out --state and --every, or --out")
    if out is not None:
        check_output(out, force)
