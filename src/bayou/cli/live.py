"""The live table of a run: the status of every method, and the scores of the finished ones."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from bayou.progress import describe

LINE = 30.0  # seconds between two lines about a job, without a terminal
SHOWN = ("error", "rmse", "nll", "beside_map", "ece", "coverage", "auroc_entropy", "r_hat", "ess", "seconds")


class LiveTable:
    """A live table on a terminal; a line for every event elsewhere; nothing if ``quiet``."""

    def __init__(self, names: list[str], quiet: bool = False) -> None:
        self.names = names
        self.rows: dict[str, dict[str, Any]] = {name: {"status": "waiting"} for name in names}
        self.quiet = quiet
        self.console = Console(stderr=True)
        self.live = None if quiet or not sys.stderr.isatty() else Live(console=self.console, refresh_per_second=8)
        self.at = ""
        self.last = 0.0

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.update(self.table())
            self.live.stop()

    def tell(self, name: str, what: str, numbers: dict[str, Any]) -> None:
        """Show an event of a job."""
        self.at, self.last = name, time.monotonic()
        flags = numbers.get("flags", [])
        if flags:
            worst = "failed a check" if any(flag["status"] == "failed" for flag in flags) else "done, with a warning"
            what = f"{worst}: {', '.join(flag['name'] for flag in flags)}"
        self.rows[name] = self.rows.get(name, {}) | {"status": what, "flagged": bool(flags)}
        known = [key for key, value in numbers.items() if key in SHOWN and not isinstance(value, str | None)]
        shown = {key: _cell(key, numbers) for key in known}
        self.rows[name] |= shown
        if self.live is not None:
            self.live.update(self.table())
        elif not self.quiet and what != "judging":
            words = "  ".join(f"{_head(key)} {cell}" for key, cell in shown.items())
            self._line(f"{name}: {what}  {words}".rstrip())

    def show(self, title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        """Show the progress of the current job."""
        status = f"{title} {describe(step, total, numbers, most=2)}"
        if self.live is not None:
            self.rows[self.at]["status"] = status
            self.live.update(self.table())
        elif not self.quiet and time.monotonic() - self.last > LINE:
            self.last = time.monotonic()
            which = f" ({self.names.index(self.at) + 1} of {len(self.names)})" if len(self.names) > 1 else ""
            self._line(f"{self.at}{which}: {status}")

    def note(self, text: str) -> None:
        """Show a note about the data; not suppressed by ``quiet``."""
        self._line(f"note: {text}")

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def table(self) -> Table:
        """The current table."""
        table = Table(box=None, header_style="bold", padding=(0, 1))
        used = [name for name in SHOWN if any(name in row for row in self.rows.values())]
        table.add_column("method")
        table.add_column("", min_width=30)
        for name in used:
            table.add_column(_head(name), justify="right")
        for name, row in self.rows.items():
            cells = [_marked(row.get(key, "")) for key in used]
            style = {"done": "green", "failed": "red", "waiting": "dim", "baseline": "dim"}.get(row["status"], "")
            if row.get("flagged"):
                style = "red" if row["status"].startswith("failed") else "yellow"
            table.add_row(name, f"[{style}]{row['status']}[/]" if style else row["status"], *cells)
        return table


def _head(key: str) -> str:
    return {"beside_map": "NLL minus MAP", "r_hat": "R-hat", "ess": "ESS"}.get(key, key.replace("_", " "))


def _cell(key: str, numbers: dict[str, Any]) -> str:
    """A number as text, with "worse" for a method worse than MAP and "not mixed" for its chains."""
    value = numbers[key]
    if not isinstance(value, float | int):  # difference to MAP
        return f"{value} {value.comparison}"
    text = f"{value:.4g}"
    return f"{text} not mixed" if key == "r_hat" and numbers.get("mixed") is False else text


def _marked(text: str) -> str:
    bad = text.endswith((" worse", " not mixed"))
    return f"[yellow]{text}[/]" if bad else text
