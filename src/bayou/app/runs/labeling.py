"""Choosing rows of a file to label next, and adding labeled rows to the training file.

No file is changed: the chosen rows and the larger training file are new files. What was labeled
so far is in the training file of the run, so that nothing else has to be remembered.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.json_files import check_output
from bayou.app.runs.predictions import network_dtype, requested_samples
from bayou.core.files import StrPath, write_text
from bayou.core.progress import spell
from bayou.data import is_path, reading
from bayou.data.columns import Column, has_decimal_commas, quote
from bayou.data.preprocess import Preprocessor
from bayou.data.reading import RawTable
from bayou.operations.acquire import Acquired, Score, acquire
from bayou.operations.batch_scores import ClosedFormError
from bayou.posteriors import Posterior

# Columns of the file of chosen rows, which are left out when it comes back.
POOL_ROW = "pool_row"
SCORE = "label_score"


@final
@dataclass(frozen=True)
class Selection:
    """A file that was written, and how to go on.

    Args:
        path: the file.
        command: the next command.
        notes: sentences about the rows.
    """

    path: Path
    command: str
    notes: list[str]


def choose_rows(
    folder: StrPath,
    pool: StrPath,
    out: StrPath,
    n: int,
    score: str | None = None,
    *,
    method: str | None = None,
    seed: int | None = None,
    samples: int | None = None,
    force: bool = False,
) -> Selection:
    """Choose rows of a pool to label, and write them with an empty target column.

    The file has the columns of the pool, the target without values, the number of each row in the
    pool (``pool_row``) and its score (``label_score``). Rows of the pool that have a target, and
    those whose inputs are those of a training or test row of the run, count as labeled and are left
    out.

    Args:
        folder: the run folder, of a table.
        pool: the file of rows.
        out: the CSV file to write; one with labels in it is never overwritten.
        n: how many rows to choose.
        score: of ``bayou.acquire``; None for "batchbald" of classes and "lcmd" of numbers, or
            "variance" of a mixture with closed forms, which have no functions at all rows.
        method: which method of the run; by default that of the first finished job.
        seed: which seed of the run; by default the first.
        samples: networks drawn; by default as in the run.
        force: overwrite ``out`` unless it has labels.

    Raises:
        RunError: ``out`` exists, or the run is none of a table.
    """
    run = Run.open(folder)
    posterior, preprocessor, job = run.posterior(method, seed)
    target = _target_of(preprocessor)
    path = Path(out)
    _check_unlabeled(path, target)
    check_output(path, force)
    table = reading.read(Path(pool), [*_input_names(preprocessor), target])
    rows = preprocessor.rows(table)
    notes = [*run.describe_interruption(job, posterior), *rows.notes]
    candidates = _unlabeled_rows(run, rows.x, table, target, notes)
    if len(candidates) < n:
        raise RunError(
            f"{table.name} has {len(candidates)} rows without a label, fewer than "
            f"{spell('n', '--n')} {n}; give more rows or choose fewer"
        )
    x = rows.x[torch.from_numpy(candidates)].to(network_dtype(posterior))
    count = posterior.draws_to_average(requested_samples(samples, run))
    if score is not None:
        acquired = acquire(posterior, x, n, score, samples=count, seed=0)  # type: ignore[arg-type]
    else:
        default: Score = "batchbald" if preprocessor.task == "classification" else "lcmd"
        acquired, score = _acquire_or_variance(posterior, x, n, default, count, notes)
    chosen = candidates[acquired.indices.cpu().numpy()]
    columns = _text_columns(table, chosen, leave_out=(target, POOL_ROW, SCORE))
    columns[target] = [""] * n
    columns[POOL_ROW] = [str(row + 1) for row in chosen.tolist()]
    columns[SCORE] = [f"{value:.6g}" for value in acquired.scores.double().tolist()]
    _write_table(path, columns, _has_decimal_commas(table))
    notes.append(
        f"{n} of {len(candidates)} unlabeled rows, chosen by {score}. Fill in the column "
        f"{target!r}; rows that stay empty are left out later."
    )
    command = ["bayou", "label", str(folder), "--labeled", str(path)]
    return Selection(path, shlex.join(command), notes)


def _acquire_or_variance(
    posterior: Posterior, x: Tensor, n: int, score: Score, samples: int | None, notes: list[str]
) -> tuple[Acquired, Score]:
    """Choose n rows of x by a score, by the variance where the posterior does not have the score.

    A mixture with closed forms has no functions at all rows; a note says so.
    """
    try:
        return acquire(posterior, x, n, score, samples=samples, seed=0), score
    except ClosedFormError:
        pass
    notes.append(
        f"{score} needs functions at all rows, which this mixture does not have; variance scores "
        "each row alone, so that the rows can be alike."
    )
    return acquire(posterior, x, n, "variance", samples=samples, seed=0), "variance"


def add_labels(
    folder: StrPath, labeled: StrPath, out: StrPath | None = None, *, force: bool = False
) -> Selection:
    """Write a training file with the rows of a run and newly labeled rows.

    Rows that are in the training file already are not added again, and the files that were read
    stay as they are.

    Args:
        folder: the run folder, of a table.
        labeled: rows with their targets.
        out: the CSV file to write; by default the name of the training file with the next number,
            houses-2.csv after houses.csv.
        force: overwrite ``out``.

    Raises:
        RunError: ``out`` exists, no row is new, or a target is invalid.
    """
    run = Run.open(folder)
    preprocessor = run.preprocessor()
    target = _target_of(preprocessor)
    source = Path(run.config.data)
    if not is_path(run.config.data):
        raise RunError(
            f"the rows of this run are the data set {run.config.data!r}, to which no rows can be "
            "added; train on a file"
        )
    path = _next_path(source) if out is None else Path(out)
    for file in (source, Path(labeled)):
        if path.exists() and file.exists() and path.resolve() == file.resolve():
            raise RunError(f"{path} is one of the files to read; choose another --out")
    check_output(path, force)
    train = reading.read(source, [target])
    new = reading.read(Path(labeled), list(train.columns))
    for option, name in (
        ("--group", run.config.group),
        ("--split-by-time", run.config.split_by_time),
    ):
        if name is not None and name not in new.columns:
            raise RunError(f"{new.name} has no column {name!r}, which the run needs for {option}")
    rows = preprocessor.rows(new, need_target=True)  # which checks the inputs and the targets
    notes = list(rows.notes)
    added = _new_rows(train, new, rows.kept)
    if not len(added):
        raise RunError(f"all labeled rows of {new.name} are in {source.name} already")
    if len(added) < len(rows.kept):
        notes.append(f"{len(rows.kept) - len(added)} labeled rows are in {source.name} already.")
    _write_table(path, *_join(train, new, added))
    notes.append(
        f"{len(added)} rows were added to the {train.rows} of {source.name}. They were chosen, not "
        "drawn at random: to compare runs keep random labeled rows aside for `bayou evaluate`."
    )
    next_run = _next_path(run.folder)
    command = replace(run.config, data=str(path.resolve())).command()
    return Selection(path, f"{command} --out {shlex.quote(str(next_run))}", notes)


def _target_of(preprocessor: Preprocessor) -> str:
    """Return the name of the target column, or raise a RunError for data without columns."""
    target = getattr(preprocessor, "target", None)
    if target is None:
        raise RunError(
            "bayou label is for tables, whose rows have columns; for images use bayou.acquire in "
            "Python"
        )
    return str(target)


def _input_names(preprocessor: Preprocessor) -> list[str]:
    """Return the names of the columns that are inputs."""
    return list(preprocessor.describe()["columns"])


def _check_unlabeled(path: Path, target: str) -> None:
    """Raise a RunError if a file that would be overwritten has labels."""
    if not path.is_file():
        return
    try:
        column = reading.read(path, [target]).columns.get(target)
    except ValueError:  # no table
        return
    count = 0 if column is None else sum(level != "" for level in column.levels)
    if count:
        raise RunError(
            f"{path} has {count} labels, which would be lost; add them to the training rows with "
            "`bayou label RUN --labeled`, or choose another --out"
        )


def _unlabeled_rows(
    run: Run, x: torch.Tensor, table: RawTable, target: str, notes: list[str]
) -> NDArray[np.int64]:
    """Return the numbers of the rows that have no target and equal no row of the run."""
    is_unlabeled = np.ones(table.rows, dtype=bool)
    if target in table.columns:
        is_unlabeled = np.array([level == "" for level in table.columns[target].levels])
        if not is_unlabeled.all():
            notes.append(f"{int((~is_unlabeled).sum())} rows have a target already; left out.")
    try:
        data = run.load_data()
    except ValueError as error:
        notes.append(f"Not compared with the rows of the run, which cannot be read: {error}")
        return np.flatnonzero(is_unlabeled)
    known = {
        row.tobytes() for x_of_run, _ in (data.train, data.test) for row in x_of_run.float().numpy()
    }
    is_new = np.array([row.tobytes() not in known for row in x.float().numpy()], dtype=bool)
    known_count = int((is_unlabeled & ~is_new).sum())
    if known_count:
        notes.append(f"{known_count} rows have the inputs of a row of the run; left out.")
    return np.flatnonzero(is_unlabeled & is_new)


def _new_rows(train: RawTable, new: RawTable, kept: Sequence[int]) -> list[int]:
    """Return the numbers of the labeled rows that are not in the training file."""
    names = [name for name in train.columns if name in new.columns]
    seen = {tuple(train.columns[name].text(row) for name in names) for row in range(train.rows)}
    added = []
    for row in kept:
        cells = tuple(new.columns[name].text(row) for name in names)
        if cells not in seen:
            seen.add(cells)
            added.append(row)
    return added


def _join(
    train: RawTable, new: RawTable, added: Sequence[int]
) -> tuple[dict[str, list[str]], bool]:
    """Return the columns of the larger training file, and whether numbers have decimal commas.

    A RunError is raised if the text of a number would mean another number in the joined file.
    """
    columns = {}
    for name, column in train.columns.items():
        cells = [column.text(row) for row in range(train.rows)]
        labeled = new.columns.get(name)
        cells += [labeled.text(row) if labeled is not None else "" for row in added]
        columns[name] = cells
    uses_semicolons = _has_decimal_commas(train)
    decimal_comma = uses_semicolons or has_decimal_commas(columns.values())
    for name, cells in columns.items():
        joined = Column(cells, decimal_comma).values
        before = train.columns[name].values
        labeled = new.columns.get(name)
        after = labeled.values[added] if labeled is not None else np.full(len(added), np.nan)
        if not np.array_equal(joined, np.concatenate((before, after)), equal_nan=True):
            raise RunError(
                f"column {quote(name)} of {new.name} writes numbers in another way than "
                f"{train.name} (decimal commas or separators of thousands); use the same in both"
            )
    return columns, uses_semicolons


def _has_decimal_commas(table: RawTable) -> bool:
    """Return whether a table was read with decimal commas."""
    return any(column.decimal_comma for column in table.columns.values())


def _text_columns(
    table: RawTable, rows: NDArray[np.int64], leave_out: Sequence[str]
) -> dict[str, list[str]]:
    """Return the text of some rows by column."""
    return {
        name: [column.text(row) for row in rows.tolist()]
        for name, column in table.columns.items()
        if name not in leave_out
    }


def _write_table(path: Path, columns: Mapping[str, list[str]], decimal_comma: bool) -> None:
    """Write columns as a CSV file, with semicolons where numbers have decimal commas.

    Cells stay as they are, so that the file means the same when it is read again: a text that a
    spreadsheet would run as a formula has no quote before it, unlike in files of predictions.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=";" if decimal_comma else ",", lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_text(path, stream.getvalue(), through_links=False)


def _next_path(path: Path) -> Path:
    """Return a path beside it with the next number: houses-2.csv after houses.csv."""
    stem = path.name.split(".", 1)[0] if path.suffix else path.name
    suffix = ".csv" if path.suffix else ""
    match = re.fullmatch(r"(.+)-(\d+)", stem)
    if match is None:
        return path.with_name(f"{stem}-2{suffix}")
    return path.with_name(f"{match[1]}-{int(match[2]) + 1}{suffix}")
