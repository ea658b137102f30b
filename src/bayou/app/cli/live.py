"""What a run shows: a line for every event of a job, and the progress of the current one."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
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


class Board:
    """Lines about the jobs of a run, and on a terminal a line of progress below them; nothing if
    ``quiet``.
    """

    def __init__(self, names: list[str], quiet: bool = False) -> None:
        self.names, self.quiet = names, quiet
        self.console = Console(stderr=True)
        self.status = None if quiet or not sys.stderr.isatty() else self.console.status("")
        self.at = ""
        self.last = 0.0
        self.ended: set[str] = set()

    def __enter__(self) -> Self:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.status is not None:
            self.status.stop()

    def tell(self, name: str, what: str, numbers: dict[str, Any]) -> None:
        """Show an event of a job."""
        self.at, self.last = name, time.monotonic()
        if name in self.names and what in ("done", "failed"):
            self.ended.add(name)
        if self.quiet or what == "judging":
            return
        color = COLORS.get(what, "")
        if flags := numbers.get("flags", []):
            failed = any(flag["status"] == "failed" for flag in flags)
            worst, color = (
                ("failed a check", "red") if failed else ("done, with a warning", "yellow")
            )
            what = f"{worst}: it {', '.join(concern(flag['name']) for flag in flags)}"
        known = [
            key
            for key, value in numbers.items()
            if key in SHOWN and not isinstance(value, str | None)
        ]
        words = "  ".join(
            f"{HEADS.get(key, key.replace('_', ' '))} {_cell(key, numbers)}" for key in known
        )
        self._line(f"{name}: {what}  {words}".rstrip(), color)

    def show(self, title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        """Show the progress of the current job; the part that is done is that of all jobs."""
        which = f" ({len(self.ended) + 1} of {len(self.names)})" if len(self.names) > 1 else ""
        if DONE in numbers:
            numbers = numbers | {DONE: (len(self.ended) + numbers[DONE]) / len(self.names)}
        text = f"{self.at}{which}: {title} {describe(step, total, numbers, most=2)}"
        if self.status is not None:
            self.status.update(Text(text))
        elif not self.quiet and time.monotonic() - self.last > LINE:
            self.last = time.monotonic()
            self._line(text)

    def note(self, text: str) -> None:
        """Show a note about the data; not suppressed by ``quiet``."""
        self._line(f"note: {text}")

    def announce(self, text: str) -> None:
        """Show how long the run will take."""
        self._line(text)

    def _line(self, text: str, color: str = "") -> None:
        self.console.print(text, style=color, highlight=False, markup=False, soft_wrap=True)


def _cell(key: str, numbers: dict[str, Any]) -> str:
    """A number as text, with "worse" for a method worse than MAP and "not mixed" for its chains."""
    value = numbers[key]
    if not isinstance(value, float | int):  # difference to MAP
        return f"{value} {value.comparison}"
    text = f"{value:.4g}" if abs(value) < MIN_READABLE else format_number(value, 0)[0]
    return f"{text} not mixed" if key == "r_hat" and numbers.get("mixed") is False else text
