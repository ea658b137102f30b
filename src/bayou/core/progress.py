"""The progress line of a run, with step, total, numbers and the time left; and its warnings."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Literal, Self

Sink = Callable[[str, int, int, dict[str, float]], None]
Show = bool | Literal["plain"] | Sink

REDRAW = 0.1  # seconds between two redraws of the bar
LINE = 10.0  # seconds between two plain lines
LEFT = "seconds_left"  # the name of a number of every line
DONE = "done"  # the name of a number of the lines inside a stage
# The fraction of the rest of a stage that a line covers: whether more lines follow is not known.
SHARE = 0.75
MAX_DONE = 0.99  # the largest fraction of all work: no line knows that it is the last one
MAX_SECONDS = 99  # durations up to this are in seconds, and up to as many minutes in minutes


class BayouWarning(UserWarning):
    """Every warning of bayou is one of these, so that one filter has them all."""


_SPEAKS_COMMAND_LINE: ContextVar[bool] = ContextVar("speaks_command_line", default=False)


@contextmanager
def command_line_spelling() -> Iterator[None]:
    """Name settings in messages as options of a command, ``--steps``, and not as arguments."""
    token = _SPEAKS_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _SPEAKS_COMMAND_LINE.reset(token)


def spell(python: str, command: str) -> str:
    """Choose the words of a message that its reader can use.

    Args:
        python: for a program.
        command: for the terminal and the report of a command.
    """
    return command if _SPEAKS_COMMAND_LINE.get() else python


def setting_name(name: str) -> str:
    """Return a setting as its reader types it: ``batch_size=`` or ``--batch-size``.

    Args:
        name: the name of the argument.
    """
    return spell(f"{name}=", f"--{name.replace('_', '-')}")


class _Stage:
    """A stage of all work: fractions of it from ``begin`` to ``end``, and the prefix of titles."""

    def __init__(self, prefix: str = "", begin: float = 0.0, end: float = 1.0) -> None:
        self.prefix = prefix
        self.at = begin  # what is reached
        self.end = end
        self.limit = begin  # the end of the stages inside, which the first of them sets


_STAGE: ContextVar[_Stage | None] = ContextVar("stage", default=None)


@contextmanager
def stage(number: int, count: int, name: str = "", *, unit: str = "") -> Iterator[None]:
    """Begin titles with a stage, such as "2 of 3: held out, " or "member 2 of 5: ".

    All stages count as equally long in the fraction of all work that is done. A stage can have
    stages inside, which cover a share of what is left of it: whether more lines or stages follow is
    not known.

    Args:
        number: the number of the stage, from 1.
        count: the number of stages.
        name: its name. Default: none.
        unit: what the number counts. Default: nothing.
    """
    outer = _STAGE.get()
    if outer is None:
        outer = _Stage(begin=(number - 1) / count)
        outer.limit = 1.0
    elif number == 1 or outer.limit <= outer.at:
        outer.limit = outer.at + SHARE * (outer.end - outer.at)
    prefix = f"{number} of {count}: "
    if unit:
        prefix = f"{unit} {prefix}"
    if name:
        prefix = f"{prefix}{name}, "
    length = (outer.limit - outer.at) / (count - number + 1)
    inner = _Stage(outer.prefix + prefix, outer.at, outer.at + length)
    token = _STAGE.set(inner)
    try:
        yield
    finally:
        _STAGE.reset(token)
        outer.at = inner.end


class Progress:
    """A progress line on stderr, as a context manager.

    Args:
        title: what is being done.
        total: the number of steps.
        show: True draws a bar where stderr is a terminal and rich is installed, plain lines on a
            terminal without rich, and nothing elsewhere (logs, tests, notebooks run by a machine);
            "plain" writes a line every ten seconds anywhere; False is silent. A function is called
            with (title, step, total, numbers) instead, at most ten times per second. Default: True.

    "seconds_left" in the numbers is estimated by the pace of this line; inside a ``stage``, "done"
    is the fraction of all work that is done, which never decreases and never is 1: no line knows
    that it is the last one. ``describe`` makes a text of them.

        with Progress("fitting", total=100) as progress:
            for step in range(100):
                progress.update(step + 1, loss=loss)
    """

    def __init__(self, title: str, total: int, show: Show = True) -> None:
        self._sink = show if callable(show) else None
        if self._sink is None and show not in (True, False, "plain"):
            raise ValueError(f"progress must be True, False, 'plain' or a function, got {show!r}")
        self._stage = _STAGE.get()
        self.title: str = title
        self._begin = 0.0
        if self._stage:
            self.title = f"{self._stage.prefix}{title}"
            self._begin = self._stage.at
        self.total: int = total
        is_terminal = sys.stderr is not None and sys.stderr.isatty()  # pythonw has no stderr
        self._bar: Any = None
        if show is True and is_terminal and find_spec("rich") is not None:
            self._bar = _rich_bar()
        self._interval: float | None = None  # seconds between two lines; None: no lines
        if self._sink or self._bar:
            self._interval = REDRAW
        elif show == "plain" or (show is True and is_terminal):
            self._interval = LINE
        self._task: Any = None
        self._start = 0.0
        self._last = 0.0
        # The step at the start, which is not 0 in a run that is resumed.
        self._first: int | None = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._last = self._start
        if self._bar is not None:
            try:
                self._bar.start()
            except Exception:  # rich allows one live display at a time; a second one must not raise
                self._bar = None
                self._interval = None
            else:
                self._task = self._bar.add_task(self.title, total=self.total, text="")
        return self

    def announce(self) -> None:
        """Show the title at once, before the first step is done."""
        if self._bar is None and self._interval is not None:
            self._show(0, {})

    def start_clock(self, total: int) -> None:
        """Count the time of steps from now on.

        The time of a preparation under the same title belongs to none of them.

        Args:
            total: the number of steps, which is known now.
        """
        self.total = total
        self._first = 0
        self._start = time.monotonic()

    def update(self, step: int, **fields: float) -> None:
        """Report that ``step`` steps are done; cheap enough for every step.

        Args:
            step: the number of steps.
            fields: numbers to show.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = step - 1
        if self._interval is None or (step < self.total and now - self._last < self._interval):
            return
        self._last = now
        seconds_per_step = (now - self._start) / max(step - self._first, 1)
        fields[LEFT] = seconds_per_step * max(self.total - step, 0)
        stage = self._stage
        if stage is not None:
            covered = SHARE * (stage.end - self._begin) * min(1.0, step / max(self.total, 1))
            stage.at = max(stage.at, self._begin + covered)
            fields[DONE] = min(stage.at, MAX_DONE)
        self._show(step, fields)

    def _show(self, step: int, numbers: dict[str, float]) -> None:
        """Call the function, move the bar or write a line."""
        if self._sink is not None:
            self._sink(self.title, step, self.total, numbers)
            return
        text = describe(step, self.total, numbers)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self.total, text=text)
        else:
            sys.stderr.write(f"{self.title} {text}\n")
            sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(step: int, total: int, numbers: dict[str, float], most: int | None = None) -> str:
    """Return the text of a line: "300/2,000  loss 1.5  about 6 s  40 % of the whole".

    Args:
        step: the number of steps that are done.
        total: the number of steps.
        numbers: the numbers to show.
        most: the largest number of those that are not the time left and the fraction done; None:
            all.
    """
    texts = [f"{name} {value:.4g}" for name, value in numbers.items() if name not in (LEFT, DONE)]
    words = [f"{step:,}/{total:,}", *texts[:most]]
    if LEFT in numbers and step < total:
        words.append(f"about {duration(numbers[LEFT])}")
    if DONE in numbers:
        words.append(f"{math.floor(100 * min(numbers[DONE], MAX_DONE))} % of the whole")
    return "  ".join(words)


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours, without decimals.

    Args:
        seconds: the duration.
    """
    if seconds < MAX_SECONDS:
        return f"{seconds:.0f} s"
    if seconds < MAX_SECONDS * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _rich_bar() -> Any:
    """Return a progress bar of rich, which belongs to the lab extra and is imported here."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Rich, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
    return Rich(*columns, console=Console(stderr=True))
