"""Run the jobs of the study, or a part of them, into a file of JSON lines that goes on growing.

    python -m experiments.tables.run rows.jsonl --jobs 14                     # all that is left
    python -m experiments.tables.run rows.jsonl --jobs 14 --minutes 9         # stop after nine minutes
    python -m experiments.tables.run part0.jsonl --part 0/3                   # a third, elsewhere
    python -m experiments.tables.run rows.jsonl part0.jsonl --join            # into experiments/results

A line is one row. A job that has a line in the file is not run again; with ``--again`` those that
failed or took too long are. Several processes may write to one file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple
from pathlib import Path
from typing import Any

from experiments.study import RESULTS
from experiments.tables.jobs import LIMIT, OK, Job, run

Row = dict[str, Any]


def key(row: Row) -> tuple[str, int, str]:
    """Return the job of a row: the table, the split and the label."""
    return row["data"], row["seed"], row["label"]


def read_lines(path: Path) -> dict[tuple[str, int, str], Row]:
    """Return the rows of a file, the last of each job; a line that was cut off is left out.

    Args:
        path: of JSON lines; it may not exist yet.
    """
    rows: dict[tuple[str, int, str], Row] = {}
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[key(row)] = row
    return rows


def append_line(path: Path, row: Row) -> None:
    """Add a row to a file in one write, under a lock, on a line of its own.

    Args:
        path: of JSON lines.
        row: JSON-able.
    """
    line = json.dumps(row, ensure_ascii=False) + "\n"
    with path.open("ab+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        end = stream.seek(0, 2)
        if end:
            stream.seek(end - 1)
            if stream.read(1) != b"\n":
                line = "\n" + line
        stream.write(line.encode())


def select_part(jobs: Sequence[Job], part: str) -> list[Job]:
    """Return every n-th job.

    Args:
        jobs: all of them.
        part: "k/n", with k from 0.

    Raises:
        ValueError: it is not such a part.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"part must be k/n with 0 ≤ k < n, such as 0/3, got {part!r}")
    return list(jobs)[int(number) :: int(count)]


def run_jobs(
    jobs: Sequence[Job],
    path: Path,
    *,
    processes: int = 1,
    limit: float = LIMIT,
    minutes: float | None = None,
    again: bool = False,
) -> int:
    """Run the jobs that have no line yet, and return how many are left.

    Args:
        jobs: of the study.
        path: the file of JSON lines.
        processes: at a time.
        limit: seconds of a fit.
        minutes: no job begins later than this.
        again: whether to run jobs that failed, were not run or took too long.
    """
    done = read_lines(path)
    if again:
        done = {name: row for name, row in done.items() if row["status"] == OK}
    waiting = [job for job in jobs if astuple(job) not in done]
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    is_stopped = threading.Event()

    def work(job: Job) -> bool:
        if is_stopped.is_set() or (deadline is not None and time.monotonic() > deadline):
            return False
        row = {"data": job.table, "seed": job.split, "label": job.label} | run(job, limit)
        append_line(path, row)
        print(f"{job.table}, split {job.split}, {job.label}: {_summary(row)}", flush=True)
        return True

    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(work, job) for job in waiting]
        try:
            return sum(not future.result() for future in as_completed(futures))
        except KeyboardInterrupt:
            is_stopped.set()
            raise


def _summary(row: Row) -> str:
    """Return a row in a few words."""
    if row["status"] != OK:
        return str(row["status"])
    names = ("nll", "rmse", "error", "coverage", "seconds")
    return ", ".join(f"{name} {row[name]:.4g}" for name in names if row.get(name) is not None)


def main() -> None:
    """Run the jobs of a command line."""
    from experiments.tables.study import join, list_jobs

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="of JSON lines; the first is continued")
    parser.add_argument("--join", action="store_true", help="put their rows into the results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--where", help="with --join: what made the rows; by default this machine")
    parser.add_argument("--data", nargs="*", default=(), help="tables; all by default")
    parser.add_argument("--only", nargs="*", default=(), help="labels of rows; all by default")
    parser.add_argument("--splits", type=int, default=None, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th job")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a fit")
    parser.add_argument("--minutes", type=float, help="no job begins later")
    parser.add_argument("--again", action="store_true", help="run again what failed")
    options = parser.parse_args()
    if options.join:
        rows = {name: row for path in options.files for name, row in read_lines(path).items()}
        command = "python -m experiments.tables.run rows.jsonl"
        for path in join(list(rows.values()), options.out, command, options.where):
            print(path)
        return
    jobs = list_jobs(options.data, options.only, options.splits)
    left = run_jobs(
        select_part(jobs, options.part),
        options.files[0],
        processes=options.jobs,
        limit=options.limit,
        minutes=options.minutes,
        again=options.again,
    )
    print(f"{left} jobs are left" if left else "all jobs are done")


if __name__ == "__main__":
    main()
