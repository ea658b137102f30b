"""What an experiment is, and the loop that runs one: rows are kept as they finish, and run once.

``NAME.json`` holds the rows, and the runs that they came from; ``NAME.md`` and ``NAME.png`` are
made of it alone.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, final

import torch

import bayou
from bayou import metrics
from bayou.app.cli.process import workers
from bayou.app.runs.json_files import read_json
from bayou.core.files import write_text
from bayou.core.progress import Show

Found = dict[str, Any]  # what NAME.json holds
RESULTS = Path("experiments/results")


@final
@dataclass(frozen=True)
class Fit:
    """One fit of an experiment, by names, and the folder of its results: what a process of its own
    needs to know.
    """

    experiment: str
    data: str
    label: str
    seed: int
    length: int | None = None
    folder: str = ""

    @property
    def key(self) -> tuple[str, str, int, int | None]:
        """What tells one row from another."""
        return self.data, self.label, self.seed, self.length


def key(row: dict[str, Any]) -> tuple[str, str, int, int | None]:
    """The ``Fit.key`` that a row was made by."""
    return row["data"], row["label"], row["seed"], row["length"]


class Study(Protocol):
    """A published experiment by its ``name`` at the command line and the ``title`` of its page.

    ``fits``: those that were asked for, or a ValueError that says what there is. ``measure``: the
    row of a fit, without
    its key: numbers, lists of numbers, None. ``render``: the page, in markdown. ``draw``: the
    picture; False if there is nothing to draw.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]: ...
    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]: ...
    def render(self, found: Found) -> str: ...
    def draw(self, found: Found, path: Path) -> bool: ...


def chosen(what: str, asked: Sequence[str], there: Sequence[str]) -> list[str]:
    """Those of ``there`` that were asked for, or all; a ValueError names what is not there."""
    for one in asked:
        if one not in there:
            raise ValueError(f"{what} {one!r}; it has {', '.join(map(repr, there))}")
    return [one for one in there if not asked or one in asked]


def run(
    study: Study,
    folder: Path,
    fits: Sequence[Fit],
    measure: Callable[..., dict[str, Any]],
    *,
    device: str = "cpu",
    samples: int | None = None,
    executor: str | None = None,
    again: bool = False,
    show: Show = False,
    tell: Callable[[str], None] = print,
    command: str = "",
) -> list[Path]:
    """Make the rows that are not there yet (all with ``again``), and return what was written.

    ``measure(fit, device, samples, show, threads)`` is called here, or in the workers of an
    executor; here again if its worker died. A fit that fails does not stop the others; a StudyError
    names it when they are done.
    """
    found = read(study, folder)
    fits = [replace(fit, folder=str(folder)) for fit in fits]
    present = {key(row) for row in found["rows"]}
    left = [fit for fit in fits if again or fit.key not in present]
    this = {
        "command": command,
        "commit": commit(),
        "made": str(date.today()),
        "where": where(device),
    }
    with workers(executor) as pool:
        if pool is None:
            results: Iterator[Tried] = (_tried(measure, fit, device, samples, show) for fit in left)
        else:
            results = _in_workers(pool, measure, left, device, samples)
        failed: list[str] = []
        for fit, result, problem in results:
            if result is None:
                failed.append(f"{fit.label} on {fit.data}, seed {fit.seed}: {problem}")
                tell(f"failed: {failed[-1]}")
                continue
            if this not in found["runs"]:
                found["runs"].append(this)
            result["run"] = found["runs"].index(this)
            found["rows"] = [row for row in found["rows"] if key(row) != key(result)] + [result]
            _keep(study, folder, found)
            tell(
                "  ".join(
                    _said(name, value) for name, value in result.items() if _sayable(name, value)
                )
            )
    written = write(study, folder, found) if found["rows"] else []
    if failed:
        raise StudyError(
            f"{len(failed)} of {len(left)} fits failed; what the others gave is kept. {failed[0]}"
        )
    return written


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """A block that no other process enters for this file, so that the first makes it and the others
    find it.
    """
    import fcntl  # on Linux and macOS

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class StudyError(ValueError):
    """Some fits of an experiment failed; the rows of the others are written."""


Tried = tuple[Fit, dict[str, Any] | None, str]


def _in_workers(
    pool: Any, measure: Callable[..., dict[str, Any]], left: Sequence[Fit], *args: Any
) -> Iterator[Tried]:
    """The rows of fits as they finish; those whose worker died at the end, made here."""
    sent = {pool.submit(_tried, measure, fit, *args, threads=1): fit for fit in left}
    dead = []
    for future in as_completed(sent):
        try:
            yield future.result()
        except BrokenExecutor:
            dead.append(sent[future])
    yield from (_tried(measure, fit, *args) for fit in dead)


def _tried(measure: Callable[..., dict[str, Any]], fit: Fit, *args: Any, **kwargs: Any) -> Tried:
    """A fit and its row, or why there is none: in words, since not every error can leave the
    process it was made in.
    """
    try:
        return fit, measure(fit, *args, **kwargs), ""
    except Exception as error:
        return fit, None, f"{type(error).__name__}: {error}"


def read(study: Study, folder: Path) -> Found:
    """The rows of NAME.json and the runs they came from, or none."""
    path = folder / f"{study.name}.json"
    found: Found = read_json(path) if path.exists() else {"rows": []}
    if (
        "runs" not in found
    ):  # a file of the first kind: one run made, or at least renewed, all that is there
        one = {name: found.pop(name, "") for name in ("command", "made", "where")}
        found["runs"] = [one] if found["rows"] else []
        for row in found["rows"]:
            row["run"] = 0
    return found


def write(study: Study, folder: Path, found: Found) -> list[Path]:
    """Numbers, page and, if there is something to draw, the picture; their paths."""
    _keep(study, folder, found)
    page, numbers, picture = (folder / f"{study.name}.{kind}" for kind in ("md", "json", "png"))
    return [page, numbers, picture] if study.draw(read(study, folder), picture) else [page, numbers]


def _keep(study: Study, folder: Path, found: Found) -> None:
    """Numbers, every row on a line of its own, and the page; runs of which no row is left are
    forgotten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    used = sorted({row["run"] for row in found["rows"]})
    found["runs"] = [found["runs"][index] for index in used]
    for row in found["rows"]:
        row["run"] = used.index(row["run"])
    rows = ",\n".join(_json(row) for row in found["rows"])
    runs = ",\n".join(_json(one) for one in found["runs"])
    write_text(folder / f"{study.name}.json", f'{{"runs": [\n{runs}\n],\n"rows": [\n{rows}\n]}}\n')
    write_text(folder / f"{study.name}.md", study.render(read(study, folder)))


def made_by(found: Found) -> str:
    """Which command made which rows, when and where: the last lines of a page."""
    lines = []
    for index, one in enumerate(found["runs"]):
        labels = list(dict.fromkeys(row["label"] for row in found["rows"] if row["run"] == index))
        which = f" ({', '.join(labels)})" if len(found["runs"]) > 1 else ""
        commit = f"commit {one['commit']}, " if one.get("commit") else ""
        lines.append(
            f"`{one.get('command', '')}`, {commit}{one.get('made', '')}, "
            f"{one.get('where', '')}{which}."
        )
    return "\n\n".join(lines)


def cell(values: Sequence[float | None], digits: int) -> str:
    """Mean ± one standard error of what is known; nothing where nothing is, a setting (``digits`` <
    0) as it is.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = fmean(known)  # exact: plain sums differ between versions of Python
    if digits < 0:
        return f"{mean:g}"
    digits += (
        2 if digits > 2 and 0 < abs(mean) < 10.0 ** (1 - digits) else 0
    )  # so that something is left to see
    text = f"{mean:,.{digits}f}"
    return f"{text} ± {metrics.standard_error(known):,.{digits}f}" if len(known) > 1 else text


def _json(value: Any) -> str:
    """One line of JSON; what is not finite becomes null."""
    return json.dumps(
        json.loads(json.dumps(value), parse_constant=lambda _: None), ensure_ascii=False
    )


def _sayable(name: str, value: Any) -> bool:
    return value is not None and name != "run" and not isinstance(value, (list, dict))


def _said(name: str, value: Any) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else str(value)


def commit() -> str:
    """Return the commit of the clone with "+" if files have changed; empty without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def where(device: str) -> str:
    """Return the versions and the machine, for the page."""
    machine = (
        torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    )
    return f"bayou {bayou.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {machine}"
