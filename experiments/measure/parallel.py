"""Jobs of a benchmark side by side in processes, and what they found in a file as soon as it is
there.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

import torch

import bayou

Job = tuple[Any, ...]


def run(work: Callable[..., Any], job: Job, options: Any) -> tuple[Job, Any, float]:
    """One job, with its seconds; an error comes back as its last line, so that the others go on."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    begun = time.monotonic()
    try:
        found = work(*job, options)
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    return job, found, time.monotonic() - begun


def spread(
    work: Callable[..., Any], jobs: Iterable[Job], options: Any, processes: int
) -> Iterator[tuple[Job, Any]]:
    """Results as they come, {"seconds": ...} with them; a job that fails says so and is left
    out.
    """
    if processes == 1:
        results: Iterable[tuple[Job, Any, float]] = (run(work, job, options) for job in jobs)
    else:
        pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        futures = [pool.submit(run, work, job, options) for job in jobs]
        results = (future.result() for future in as_completed(futures))
    for job, found, seconds in results:
        failed = isinstance(found, str)
        print(
            f"{'/'.join(map(str, job))}: {found if failed else 'done'}, {seconds:.0f} s", flush=True
        )
        if not failed:
            yield job, {**found, "seconds": seconds}


def kept(path: Path) -> dict[str, Any]:
    """What a file has so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, job: Job, found: dict[str, Any]) -> None:
    """Add what a job found; the same job again replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept(path) | {"/".join(map(str, job)): found}, indent=1) + "\n")


def made(device: str) -> str:
    """The last line of a table: the command, the day, the machine."""
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    command = " ".join([f"python -m experiments.measure.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    return f"`{command}`, {date.today()}, bayou {bayou.__version__}, torch {torch.__version__}, {where}."
