"""Loggers for ``progress=``, to follow a run in files or TensorBoard.

    with JsonlLogger("run.jsonl") as log:
        posterior = bayou.fit(net, data, progress=log)

A run reports its progress at most ten times per second, with the numbers of the last record (``log_every`` of the
method), so a log does not have all steps. All records are in ``posterior.history``: ``write_history``.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from bayou.extras import extra
from bayou.files import StrPath, writing
from bayou.posteriors import Posterior

CLOSED = "the log is closed: its with-block has ended; open a new one"


class Logger(ABC):
    """A sink for ``progress=``; a context manager that closes its files."""

    @abstractmethod
    def __call__(self, title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        """Step ``step`` of ``total`` of the run ``title`` is done."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@final
class JsonlLogger(Logger):
    """A line of JSON for every update: {"title", "step", "total", "time", numbers...}; NaN and infinity become null.

    Lines are appended and flushed immediately, so that another process can follow (``tail -f``). A resumed run
    appends, too: repeated steps occur twice, and the later line is valid.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"cannot write {path}: the folder {self.path.parent} does not exist; create it first")
        self._stream: Any = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        if self._stream.tell():
            self._stream.seek(-1, os.SEEK_END)
            if self._stream.read(1) != b"\n":  # end an incomplete line left by a crash
                self._stream.write(b"\n")

    def __call__(self, title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        if self._stream is None:
            raise ValueError(CLOSED)
        record = {"title": title, "step": step, "total": total, "time": round(time.time(), 3)} | finite(numbers)
        self._stream.write(line(record))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@final
class TensorBoardLogger(Logger):
    """Scalars for ``tensorboard --logdir FOLDER``: every title is a separate run, FOLDER/title.

    A title whose steps restart (the next member of an ensemble) is a new run, FOLDER/title-2. A resumed run replaces
    the later steps of the first process.
    """

    def __init__(self, folder: StrPath) -> None:
        with extra("tensorboard", "TensorBoardLogger"):
            from torch.utils.tensorboard import SummaryWriter
        self.folder = Path(folder)
        self._make: Any = SummaryWriter
        self._writers: dict[str, Any] | None = {}
        self._last: dict[str, tuple[int, int]] = {}  # title → (which run of this title, its last step)

    def __call__(self, title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        if self._writers is None:
            raise ValueError(CLOSED)
        run, last = self._last.get(title, (1, -1))
        run += step < last
        self._last[title] = (run, step)
        name = re.sub(r"[^\w.=,()-]+", "_", title) + (f"-{run}" if run > 1 else "")
        if name not in self._writers:
            self._writers[name] = self._make(str(self.folder / name), purge_step=step)
        for key, value in numbers.items():
            self._writers[name].add_scalar(key, value, step)
        self._writers[name].flush()

    def close(self) -> None:
        for writer in (self._writers or {}).values():
            writer.close()
        self._writers = None


def write_history(posterior: Posterior, path: StrPath) -> None:
    """Write every record of ``posterior.history`` to a new JSONL file, atomically."""
    with writing(path) as stream:
        stream.writelines(line(finite(record)) for record in posterior.history)


def finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Numbers that JSON can hold."""
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def line(record: dict[str, Any]) -> bytes:
    """One record in one write, so that no reader sees part of it."""
    return (json.dumps(record, allow_nan=False) + "\n").encode()
