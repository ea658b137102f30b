"""What a run says while it works: a line with step, total, a few numbers and the time left; and its warnings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Literal, Self

Sink = Callable[[str, int, int, dict[str, float]], None]
Show = bool | Literal["plain"] | Sink

REDRAW = 0.1  # seconds between two redraws of the bar
LINE = 10.0  # seconds between two plain lines
_PREFIX: ContextVar[str] = ContextVar("prefix", default="")


class BayouWarning(UserWarning):
    """Every warning of bayou is one of these, so that one filter has them all."""


@contextmanager
def prefixed(text: str) -> Iterator[None]:
    """Inside, titles start with a text, such as the member of an ensemble."""
    token = _PREFIX.set(f"{_PREFIX.get()}{text} ")
    try:
        yield
    finally:
        _PREFIX.reset(token)


class Progress:
    """A progress line on stderr, as a context manager.

    ``show=True`` draws a bar where stderr is a terminal and rich is installed, plain lines on a terminal without rich,
    and nothing elsewhere (logs, tests, notebooks run by a machine); ``"plain"`` writes a line every ten seconds
    anywhere; ``False`` is silent. A function is called with (title, step, total, numbers) instead, at most ten times
    per second.

        with Progress("fitting", total=100) as progress:
            for step in range(100):
                progress.update(step + 1, loss=loss)
    """

    def __init__(self, title: str, total: int, show: Show = True) -> None:
        self._sink = show if callable(show) else None
        if self._sink is None and show not in (True, False, "plain"):
            raise ValueError(f"progress must be True, False, 'plain' or a function, got {show!r}")
        self.title, self.total = f"{_PREFIX.get()}{title}", total
        terminal = sys.stderr is not None and sys.stderr.isatty()  # pythonw has no stderr
        self._lines = show == "plain" or (show is True and terminal)
        self._bar: Any = None
        if show is True and terminal and find_spec("rich") is not None:
            self._bar, self._lines = _rich_bar(), False
        self._task: Any = None
        self._start = self._last = 0.0

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        if self._bar is not None:
            try:
                self._bar.start()
            except Exception:  # rich allows one live display at a time; a second one must not raise
                self._bar = None
            else:
                self._task = self._bar.add_task(self.title, total=self.total, fields="")
        return self

    def update(self, step: int, **fields: float) -> None:
        """Report that ``step`` steps are done; cheap enough for every step."""
        now = time.monotonic()
        last = step >= self.total
        if self._sink is not None:
            if last or now - self._last >= REDRAW:
                self._last = now
                self._sink(self.title, step, self.total, fields)
        elif self._bar is not None and (last or now - self._last >= REDRAW):
            self._last = now
            self._bar.update(self._task, completed=step, fields=_format(fields))
        elif self._lines and (last or now - self._last >= LINE):
            self._last = now
            left = (now - self._start) / max(step, 1) * (self.total - step)
            parts = [f"{self.title} {step}/{self.total}", _format(fields), f"{left:.0f} s left"]
            sys.stderr.write("  ".join(part for part in parts if part) + "\n")
            sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _format(fields: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in fields.items())


def _rich_bar() -> Any:
    # Imported here because rich belongs to the lab extra, not to the core.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Rich, TextColumn, TimeRemainingColumn

    return Rich(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[fields]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
