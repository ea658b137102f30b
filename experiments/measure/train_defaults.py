"""What `bayou train FILE` gives without an option, and with each method that could be its default.

python -m experiments.measure.train_defaults --write

Ten generated tables go through the command's own path: a CSV file, its preprocessing, the default
network, the fit and its checks. The draws of ``CHOICE_SEEDS`` are for choosing a default and for
changing settings; those of ``REPORT_SEEDS`` are reported, and nothing may be chosen by looking at
them. Scores are on fresh rows of the same draw.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from bayou.app.runs.config import Config
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Run
from bayou.core.progress import BayouWarning

RESULTS = Path(__file__).parents[1] / "results" / "train-defaults.json"
CHOICE_SEEDS = (100,)
REPORT_SEEDS = (0,)
FRESH_ROWS = 2000  # of each draw, for the scores: coverage is known to .007
METHODS = ("laplace", "mnf", "ensemble", "map")
COVERAGE_LIMITS = (0.85, 0.95)  # of what an interval of 90 % may cover

INTRODUCTION = f"""Ten generated tables go through the path of `bayou train`: a CSV file, its preprocessing, the
default network, the fit and its checks. Scores are on {FRESH_ROWS:,} fresh rows, with NLL and RMSE in units of y. The
default was chosen on one draw of the tables; another draw is reported. The last column has what is outside the limits
({100 * COVERAGE_LIMITS[0]:.0f} to {100 * COVERAGE_LIMITS[1]:.0f} % of the rows in intervals of 90 %), checks that are
not ok, and warnings. Seconds are processor seconds of a busy machine."""
NOTES = """**The choice.** On the nine tables of the choice that both have, the mean NLL of `laplace` is .907 and
that of `mnf` .909: they predict equally well, and take 33 and 220 s in all. In `defaults.md` their means are 2.914 and
2.929 over 33 fits to numbers, .209 and .204 over 12 to classes.

- Rows of `mnf` on the draw of the choice were made before the layers of classes were compared with fits of a fixed
  length, and before methods by name standardized x and y themselves. `ensemble` was run on three tables only.
- The reported row of `mnf` on the table of 46 levels is not a test of its rule. An earlier fit of this draw, over all
  layers and with ten times the planned steps, had an NLL of .421, an RMSE of .411 and a warning after 195 s.
  After that result was seen, the rule became to fit the last layer if held-out rows reject a fit of the planned length:
  no warning, 42 s, and an NLL of 1.178, behind that of `laplace` (.594).
- Fresh rows of the table of 120 levels have levels that no training row has.
- Heavy tails: the noise has a Student distribution, so that the best Gaussian covers more than 90 %.
- `laplace` on 40 rows of two classes is overconfident on the reported draw (NLL .784). This is not solved here."""

Columns = dict[str, np.ndarray]
Draw = Callable[[np.random.Generator, int], Columns]


@final
@dataclass(frozen=True)
class Table:
    """A generated table.

    Args:
        rows: of the file that is trained on; the command holds a tenth of them out as its test
            rows.
        draw: makes columns of so many rows from a generator; the last column is the target.
    """

    rows: int
    draw: Draw


def _levels(rng: np.random.Generator, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Names of levels with unequal frequencies, and the effect of each row's level."""
    effects = np.random.default_rng(count).standard_normal(count)
    frequencies = 1 / np.arange(3, count + 3)
    level = rng.choice(count, rows, p=frequencies / frequencies.sum())
    return np.char.add("level ", level.astype(str)), effects[level]


def _few_rows(rng: np.random.Generator, rows: int) -> Columns:
    age, dose = rng.uniform(20, 80, rows), rng.uniform(0, 5, rows)
    return {"age": age, "dose": dose, "y": 0.05 * age - dose + 0.8 * rng.standard_normal(rows)}


def _skewed(rng: np.random.Generator, rows: int) -> Columns:
    income, years = rng.lognormal(10, 1.0, rows), rng.exponential(6.0, rows)
    price = 0.6 * np.log(income) + 0.8 * np.sqrt(years) + 0.5 * rng.standard_normal(rows)
    return {"income": income, "years": years, "other": rng.lognormal(0, 2.0, rows), "y": price}


def _heavy_tails(rng: np.random.Generator, rows: int) -> Columns:
    x = rng.standard_t(2.5, (rows, 3))
    y = np.tanh(x[:, 0]) + 0.5 * np.abs(np.clip(x[:, 1], -3, 3)) + 0.4 * rng.standard_t(4, rows)
    return {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y}


def _repeated_columns(rng: np.random.Generator, rows: int) -> Columns:
    x = rng.standard_normal((rows, 2))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.3 * rng.standard_normal(rows)
    same = np.full(rows, 7.0)
    return {
        "a": x[:, 0],
        "a again": x[:, 0],
        "b": x[:, 1],
        "twice b": 2 * x[:, 1],
        "constant": same,
        "y": y,
    }


def _interactions(rng: np.random.Generator, rows: int) -> Columns:
    x = rng.uniform(0, 1, (rows, 8))
    y = (
        10 * np.sin(np.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5) ** 2
        + 10 * x[:, 3]
        + rng.standard_normal(rows)
    )
    return {f"x{k}": x[:, k] for k in range(8)} | {"y": y}


def _category(levels: int, noise: float) -> Draw:
    def draw(rng: np.random.Generator, rows: int) -> Columns:
        name, effect = _levels(rng, rows, levels)
        x = rng.uniform(-2, 2, (rows, 2))
        income = rng.lognormal(0, 2.0, rows)
        y = effect + np.sin(2 * x[:, 0]) + 0.5 * np.log(income) + noise * rng.standard_normal(rows)
        return {"where": name, "a": x[:, 0], "b": x[:, 1], "income": income, "y": y}

    return draw


def _rare_class(rng: np.random.Generator, rows: int) -> Columns:
    x = rng.standard_normal((rows, 6))
    logit = -4.3 + 1.5 * x[:, 0] + x[:, 1] * x[:, 2]
    label = np.where(rng.uniform(size=rows) < 1 / (1 + np.exp(-logit)), "fault", "fine")
    return {f"x{k}": x[:, k] for k in range(6)} | {"y": label}


def _three_classes(rng: np.random.Generator, rows: int) -> Columns:
    name, effect = _levels(rng, rows, 12)
    x = rng.standard_normal((rows, 3))
    logits = np.stack([effect + x[:, 0], 1.5 * x[:, 1], -x[:, 0] * x[:, 1]], 1) + rng.gumbel(
        size=(rows, 3)
    )
    label = np.array(["red", "green", "blue"])[logits.argmax(1)]
    return {"group": name, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": label}


def _few_rows_of_classes(rng: np.random.Generator, rows: int) -> Columns:
    x = rng.standard_normal((rows, 4))
    label = np.where(x[:, 0] + 0.7 * x[:, 1] + 0.7 * rng.standard_normal(rows) > 0, "yes", "no")
    return {f"x{k}": x[:, k] for k in range(4)} | {"y": label}


TABLES: dict[str, Table] = {
    "few rows, 25": Table(25, _few_rows),
    "skewed columns, 80": Table(80, _skewed),
    "repeated and constant columns, 150": Table(150, _repeated_columns),
    "heavy tails, 250": Table(250, _heavy_tails),
    "interactions, 600": Table(600, _interactions),
    "category of 120 levels, 1,500": Table(1500, _category(120, 0.5)),
    "category of 46 levels, 7,500": Table(7500, _category(46, 0.3)),
    "classes, few rows, 40": Table(40, _few_rows_of_classes),
    "three classes with a category, 400": Table(400, _three_classes),
    "rare class, 800": Table(800, _rare_class),
}


def write_files(table: Table, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write the rows to train on and the fresh rows of a draw as CSV files, and return their
    paths.
    """
    columns = table.draw(np.random.default_rng(seed), table.rows + FRESH_ROWS)
    paths = folder / "table.csv", folder / "fresh.csv"
    for path, part in zip(paths, (slice(table.rows), slice(table.rows, None)), strict=True):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(
                zip(*(values[part].tolist() for values in columns.values()), strict=True)
            )
    return paths


def measure(name: str, method: str | None, seed: int) -> dict[str, Any]:
    """Train on one draw of a table as the command does, and score the fresh rows.

    Args:
        name: of ``TABLES``.
        method: a method by name; None for what the command takes without an option.
        seed: of the draw.
    """
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = Path(place)
        train, fresh = write_files(TABLES[name], seed, folder)
        chosen: dict[str, Any] = {} if method is None else {"methods": (method,)}
        run = Run.create(folder / "run", Config(data=str(train), target="y", **chosen))
        start = time.process_time()
        (result,) = run.work()
        seconds = time.process_time() - start
        ((scores,), _) = evaluate_run(folder / "run", str(fresh))
    flags = [check["name"] for check in result["checks"] if check["status"] != "ok"]
    said = sorted(
        {one.category.__name__ for one in caught if issubclass(one.category, BayouWarning)}
    )
    score_names = [key for key in ("coverage", "nll", "rmse", "accuracy", "ece") if key in scores]
    numbers = {key: round(scores[key], 4) for key in score_names}
    key = {"data": name, "method": result["method"], "seed": seed}
    return key | numbers | {"flags": flags, "said": said, "seconds": round(seconds, 1)}


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page: one table for the draws of the choice, one for those that are reported."""
    lines = ["# The default of `bayou train` on ten generated tables", "", INTRODUCTION, ""]
    for title, seeds in (("Reported draws", REPORT_SEEDS), ("Draws of the choice", CHOICE_SEEDS)):
        lines += [f"## {title}", ""]
        lines += [
            "| table | method | 90 % covers | NLL | RMSE | error, % | s | |",
            "|---|---|" + "---:|" * 5 + "---|",
        ]
        for row in rows:
            if row["seed"] in seeds:
                lines.append(_line(row))
        lines.append("")
    return "\n".join([*lines, NOTES, ""])


def _line(row: dict[str, Any]) -> str:
    """Return a line of the page; its last cell says what is outside the limits or was warned of."""
    remarks = [*row["flags"], *row["said"]]
    covered = row.get("coverage")
    if covered is not None and not COVERAGE_LIMITS[0] <= covered <= COVERAGE_LIMITS[1]:
        remarks.insert(
            0, "covers too little" if covered < COVERAGE_LIMITS[0] else "covers too much"
        )
    cells = [row["data"], row["method"]]
    cells.append("" if covered is None else f"{covered:.3f}")
    cells.append(f"{row['nll']:.3f}")
    cells.append(f"{row['rmse']:.3f}" if "rmse" in row else "")
    cells.append(f"{100 * (1 - row['accuracy']):.1f}" if "accuracy" in row else "")
    cells += [f"{row['seconds']:.0f}", ", ".join(remarks)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the rows that were asked for; with --write keep them in the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", default="|".join(TABLES), help="names, separated by |")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default=",".join(map(str, CHOICE_SEEDS + REPORT_SEEDS)))
    parser.add_argument(
        "--write", action="store_true", help=f"write the rows to {RESULTS.name} and its page"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for name in options.tables.split("|"):
            for method in options.methods.split(","):
                row = measure(name, method, seed)
                print(_line(row), flush=True)
                key = (row["data"], row["method"], row["seed"])
                rows = [old for old in rows if (old["data"], old["method"], old["seed"]) != key] + [
                    row
                ]
                if options.write:
                    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Write all rows, in the order of the tables, and their page."""
    order = list(TABLES)
    rows.sort(key=lambda row: (row["seed"], order.index(row["data"]), METHODS.index(row["method"])))
    made = f"{date.today()}, torch {torch.__version__}, {platform.machine()}, one thread"
    RESULTS.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    page = f"{render(rows)}\n`python -m experiments.measure.train_defaults --write`, {made}.\n"
    RESULTS.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
