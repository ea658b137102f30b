"""One fit in a process of its own, with a limit of time, and its largest memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, final

LIMIT = 600.0  # seconds of a fit
GRACE = 20.0  # seconds for reading the table, beside the limit
OK = "ok"
OVER_TIME = "over time"


@final
@dataclass(frozen=True)
class Job:
    """A row of the study for one split of one table.

    Args:
        table: its name.
        split: its number.
        label: of the row.
    """

    table: str
    split: int
    label: str


def run(job: Job, limit: float = LIMIT) -> dict[str, Any]:
    """Run a job in a new process, and return its row.

    Args:
        job: what to fit.
        limit: seconds; a fit that takes longer is stopped.

    Returns:
        ``status`` is "ok", "over time", "not run: ..." or "failed: ...". A row that is ok has the
        scores, ``seconds`` of the fit and ``megabytes`` above those of the imports.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.tables.contestants"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, sender))
    started = time.monotonic()
    process.start()
    sender.close()
    row = _receive(receiver, process, limit + GRACE)
    if "seconds" in row and row["seconds"] > limit:
        row = {"status": OVER_TIME, "seconds": row["seconds"]}
    return row | {"wall": round(time.monotonic() - started, 1)}


def _receive(receiver: Connection, process: Any, seconds: float) -> dict[str, Any]:
    """Return the row that a process sends; stop it if it sends none in time."""
    try:
        if receiver.poll(seconds):
            row: dict[str, Any] = receiver.recv()
            return row
        process.kill()
        return {"status": OVER_TIME}
    except EOFError:
        process.join()
        return {"status": f"failed: the process ended with exit code {process.exitcode}"}
    finally:
        process.join()
        receiver.close()


def _work(job: Job, sender: Connection) -> None:
    """Run a job, and send its row."""
    import torch

    from experiments.tables.contestants import NotRun, measure
    from experiments.tables.sources import TABLES

    silence()
    torch.set_num_threads(1)
    before = _megabytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = {"status": OK, **measure(TABLES[job.table], job.split, job.label)}
    except NotRun as reason:
        row = {"status": f"not run: {reason}"}
    except Exception as error:
        row = {"status": f"failed: {type(error).__name__}: {str(error)[:300]}"}
    row["megabytes"] = round(_megabytes() - before)
    sender.send(_rounded(row))
    sender.close()


def silence() -> None:
    """Send what this process prints, in Python and below, to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _megabytes() -> float:
    """Return the largest memory of this process so far."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**20 if sys.platform == "darwin" else 2**10)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with six digits of every number."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
