"""Independent jobs in the workers of an executor: process pools, dask, Slurm, Ray."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from bayou.progress import BayouWarning


@runtime_checkable
class Executor(Protocol):
    """What bayou needs of a ``concurrent.futures.Executor``: ``submit`` returns an object with ``result()``."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Start a job."""


class SentJob:
    """A job that leaves its result in a file. ``wait``: whether it has; otherwise its worker died, and it is not done.

    What the job raises is raised by ``wait``.
    """

    def __init__(self, executor: Executor, function: Callable[..., None], *arguments: Any) -> None:
        self.future: Any = None
        with suppress(BrokenExecutor):  # by a job before
            self.future = executor.submit(function, *arguments)

    def wait(self) -> bool:
        """Wait for the end of the job."""
        try:
            if self.future is not None:
                self.future.result()
                return True
        except BrokenExecutor as error:
            warnings.warn(f"a worker died ({error}); its jobs run in this process", BayouWarning, stacklevel=2)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if "pickle" not in str(error):
                raise
            raise ValueError(
                f"this fit cannot be sent to a worker: {error}; define the network and all functions at the top level "
                "of a module, or fit in this process"
            ) from error
        return False

    def cancel(self) -> None:
        """Do not start the job, if it has not been started."""
        if self.future is not None:
            self.future.cancel()
