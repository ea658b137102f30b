"""Independent jobs in the workers of an executor: process pools, dask, Slurm, Ray."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any, Protocol, runtime_checkable

from bayou.core.progress import BayouWarning
from bayou.training.ranks import current

# Of the errors of pickle: PicklingError, AttributeError and TypeError; since Python 3.13 also
# without its name.
UNSENDABLE = ("pickle", "Can't get local object")


class PendingResult(Protocol):
    """A job that was sent to a worker: a future of any library."""

    def result(self) -> Any:
        """Wait for the job, and return what it returned or raise what it raised."""

    def cancel(self) -> Any:
        """Cancel the job, unless it has started."""


@runtime_checkable
class Executor(Protocol):
    """What bayou needs of a ``concurrent.futures.Executor``."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Start a job and return its ``PendingResult``."""


def send(executor: Executor, function: Callable[..., None], *arguments: Any) -> PendingResult:
    """Start a job that leaves its result in a file.

    Args:
        executor: has the workers.
        function: what the worker calls.
        arguments: its arguments.

    Returns:
        The job, which raises the error of an executor that broke before.
    """
    if current().size > 1:
        raise ValueError(
            "torchrun started several processes, which share this fit; use them or an executor, "
            "not both"
        )
    try:
        job: PendingResult = executor.submit(function, *arguments)
        return job
    except BrokenExecutor as error:  # by a job before
        future: Future[None] = Future()
        future.set_exception(error)
        return future


def wait_for(job: PendingResult) -> bool:
    """Wait for a job, and raise what it raises.

    Returns:
        False if its worker died, so that it must be done in this process.
    """
    try:
        job.result()
    except BrokenExecutor as error:
        warnings.warn(
            f"a worker died ({error}); its jobs run in this process", BayouWarning, stacklevel=2
        )
        return False
    except Exception as error:
        if isinstance(error, RuntimeError) and "fork" in str(error):
            spawn = 'ProcessPoolExecutor(4, multiprocessing.get_context("spawn"))'
            raise ValueError(
                f"a forked worker cannot use the threads or the GPU of torch; use {spawn}"
            ) from error
        if any(words in str(error) for words in UNSENDABLE):
            advice = "define the network and all functions at the top level of a module"
            raise ValueError(
                f"this fit cannot be sent to a worker: {error}; {advice}, or fit in this process"
            ) from error
        raise
    return True
