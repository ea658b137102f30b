"""The study of tables as an experiment: ``python -m experiments.reproduce tables``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, final

from bayou.core.progress import Show
from experiments import study
from experiments.study import Fit, Found
from experiments.tables import page
from experiments.tables.contestants import LABELS, applies
from experiments.tables.jobs import LIMIT, Job, run
from experiments.tables.sources import TABLES

SPLITS = 5


def list_jobs(data: Sequence[str], only: Sequence[str], splits: int | None) -> list[Job]:
    """Return the jobs: splits × tables × rows. A split by time is one split.

    Args:
        data: names of tables; all by default.
        only: labels of rows; all by default.
        splits: the first of them; five by default.

    Raises:
        ValueError: there is no such table or row.
    """
    names = study.chosen("tables has no data", data, list(TABLES))
    labels = study.chosen("tables has no row", only, list(LABELS))
    return [
        Job(name, split, label)
        for split in range(splits or SPLITS)
        for name in names
        for label in labels
        if applies(label, TABLES[name]) and (split == 0 or TABLES[name].split_by_time is None)
    ]


@final
@dataclass(frozen=True)
class Tables:
    """Tables × models × splits."""

    name: str = "tables"
    title: str = "Tables: bayou as it comes beside the models that people use"

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Return the fits: splits × tables × rows.

        Args:
            data: names of tables; all by default.
            only: labels of rows; all by default.
            seeds: how many splits; five by default.
            length: not for this study.
        """
        if length is not None:
            raise ValueError(
                "tables runs every model as long as it would by itself; leave out --length"
            )
        jobs = list_jobs(data, only, seeds)
        return [Fit(self.name, job.table, job.label, job.split) for job in jobs]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Return the row of a fit, which runs in a process of its own.

        Args:
            fit: its table, label and split.
            device: "cpu".
            samples: as of `bayou train`, so None.
            show: unused: the process prints nothing.
        """
        if device != "cpu" or samples is not None:
            raise ValueError("tables runs as `bayou train` does: leave out --device and --samples")
        return short_row(run(Job(fit.data, fit.seed, fit.label), LIMIT))

    def render(self, found: Found) -> str:
        """Return the page.

        Args:
            found: rows and runs.
        """
        return page.render(self.title, found)

    def draw(self, found: Found, path: Path) -> bool:
        """Draw what every row loses to the best row of a table.

        Args:
            found: rows and runs.
            path: of the picture.
        """
        return page.draw(found, path)


def short_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the notes about the preprocessing, which are long.

    Args:
        row: of one job.
    """
    return {name: value for name, value in row.items() if name != "notes"}


def join(
    rows: Sequence[dict[str, Any]], folder: Path, command: str, where: str | None = None
) -> list[Path]:
    """Put rows of files of JSON lines into the results, and return what was written.

    Args:
        rows: of ``experiments.tables.run``; they replace rows of the same job.
        folder: of the results.
        command: that made the rows.
        where: the versions and the machine that made the rows; those of this process by default.
    """
    experiment = Tables()
    found = study.read(experiment, folder)
    described = {"command": command, "commit": study.commit(), "made": str(date.today())}
    described["where"] = where or study.where("cpu")
    found["runs"].append(described)
    kept = {study.key(row): row for row in found["rows"]}
    for row in rows:
        complete = short_row(row) | {"length": None, "run": len(found["runs"]) - 1}
        kept[study.key(complete)] = complete
    order = {job: place for place, job in enumerate(list_jobs((), (), None))}
    found["rows"] = sorted(
        kept.values(),
        key=lambda row: order.get(Job(row["data"], row["seed"], row["label"]), len(order)),
    )
    return study.write(experiment, folder, found)
