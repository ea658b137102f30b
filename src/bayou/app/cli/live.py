"""The output of a run: a line for every event of a job, and the progress of the current one."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from bayou.app.report.tables import format_number
from bayou.core.progress import DONE, describe
from bayou.posteriors.checks import concern

LINE = 30.0  # seconds between two lines about a job, without a terminal
MIN_READABLE = 1e4  # numbers from which on a line has "61,234" or "1.26 million"
SHOWN = (
    "error",
    "rmse",
    "nll",
    "difference_from_map",
    "ece",
    "coverage",
    "auroc_entropy",
    "r_hat",
    "ess",
    "seconds",
)
HEADS = {"difference_from_map": "NLL minus MAP", "r_hat": "R-hat", "ess": "ESS"}
COLORS = {"done": "green", "failed": "red", "fitting": "dim", "baseline": "dim"}


class FitBoard:
    """Lines about the jobs of a run, and on a terminal a line of progress below them.

    Args:
        names: of the jobs.
        quiet: print notes about the data only.
    """

    def __init__(self, names: list[str], quiet: bool = False) -> None:
        self.names = names
        self.quiet = quiet
        self.console: Console = Console(stderr=True)
        self.status: Status | None = (
            None if quiet or not sys.stderr.isatty() else self.console.status("")
        )
        self.current_job: str = ""
        self.last_line: float = 0.0
        self.ended_jobs: set[str] = set()

    def __enter__(self) -> Self:
        """Start the line of progress."""
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the line of progress."""
        if self.status is not None:
            self.status.stop()

    def tell(self, name: str, event: str, numbers: dict[str, Any]) -> None:
        """Show an event of a job.

        Args:
            name: of the job.
            event: baseline, fitting, judging, done or failed.
            numbers: scores, the time, the checks that are not ok.
        """
        self.current_job = name
        self.last_line = time.monotonic()
        if name in self.names and event in ("done", "failed"):
            self.ended_jobs.add(name)
        if self.quiet or event == "judging":
            return
        color = COLORS.get(event, "")
        flags = numbers.get("flags", [])
        if flags:
            has_failed = any(flag["status"] == "failed" for flag in flags)
            color = "red" if has_failed else "yellow"
            worst = "failed a check" if has_failed else "done, with a warning"
            event = f"{worst}: it {', '.join(concern(flag['name']) for flag in flags)}"
        cells = []
        for key, value in numbers.items():
            if key in SHOWN and not isinstance(value, str | None):
                head = HEADS.get(key, key.replace("_", " "))
                cells.append(f"{head} {_cell(key, numbers)}")
        self._print(f"{name}: {event}  {'  '.join(cells)}".rstrip(), color)

    def show(self, title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        """Show the progress of the current job; the part that is done is that of all jobs.

        Args:
            title: of the fit.
            step: that was taken.
            total: the number of steps.
            numbers: the objective, the seconds left, the part that is done.
        """
        position = ""
        if len(self.names) > 1:
            position = f" ({len(self.ended_jobs) + 1} of {len(self.names)})"
        if DONE in numbers:
            numbers = numbers | {DONE: (len(self.ended_jobs) + numbers[DONE]) / len(self.names)}
        progress = describe(step, total, numbers, most=2)
        text = f"{self.current_job}{position}: {title} {progress}"
        if self.status is not None:
            self.status.update(Text(text))
        elif not self.quiet and time.monotonic() - self.last_line > LINE:
            self.last_line = time.monotonic()
            self._print(text)

    def note(self, text: str) -> None:
        """Show a note about the data; not suppressed by ``quiet``.

        Args:
            text: the note.
        """
        self._print(f"note: {text}")

    def announce(self, text: str) -> None:
        """Show how long the run will take.

        Args:
            text: a sentence.
        """
        self._print(text)

    def _print(self, text: str, color: str = "") -> None:
        """Print a line as it is."""
        self.console.print(text, style=color, highlight=False, markup=False, soft_wrap=True)


def _cell(key: str, numbers: dict[str, Any]) -> str:
    """Return a number as text, and whether it is worse than MAP or of chains that did not mix."""
    value = numbers[key]
    if not isinstance(value, float | int):  # difference to MAP
        return f"{value} {value.comparison}"
    text = f"{value:.4g}" if abs(value) < MIN_READABLE else format_number(value, 0)[0]
    if key == "r_hat" and numbers.get("mixed") is False:
        return f"{text} not mixed"
    return text
