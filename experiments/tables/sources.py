"""The tables of the study by name: files as people have them, published sets and generated data.

``REPORTED`` are shown, ``TUNING`` are those on which settings may be chosen; no table is in both.
"""

from __future__ import annotations

import csv
import io
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from bayou.data import DataError
from bayou.data.catalogue import File, Task
from bayou.data.files import VARIABLE, folders, locate

Group = Literal["uci", "mile", "real", "sklearn", "generated", "large"]
Arrays = tuple[NDArray[Any], NDArray[Any]]
FRESH_ROWS = 2000  # test rows of generated data
MANY_FRESH_ROWS = 10_000  # test rows of large generated data
TUNING_SEED = 1000  # the first seed of the tables for tuning; those that are reported begin with 0


@final
@dataclass(frozen=True)
class Table:
    """A table, written to a file that ``bayou train`` reads.

    Args:
        name: of the table.
        group: the kind of table, by which the page summarizes.
        write: ``write(folder, split)`` returns the name of a built-in data set, or the path of the
            file that it wrote to the folder.
        task: "classification" or "regression".
        target: the target column of a CSV file.
        states_task: whether bayou is told the task; it infers it otherwise.
        drop: columns that repeat the target, or that are known only after it.
        event: the column that tells which targets were observed; the others are censored.
        split_by_time: the column by which the latest rows are tested on; None for random splits.
    """

    name: str
    group: Group
    write: Callable[[Path, int], Path | str]
    task: Task
    target: str | None = None
    states_task: bool = True
    drop: tuple[str, ...] = ()
    event: str | None = None
    split_by_time: str | None = None

    def settings(self, folder: Path, split: int) -> dict[str, Any]:
        """Write one split, and return the settings of ``bayou train`` about the data.

        Args:
            folder: where the file is written.
            split: the number of the split.
        """
        settings: dict[str, Any] = {"data": str(self.write(folder, split)), "split": split}
        if self.target is not None:
            settings["target"] = self.target
        if self.states_task:
            settings["task"] = self.task
        if self.drop:
            settings["drop"] = self.drop
        if self.split_by_time is not None:
            settings["split_by_time"] = self.split_by_time
        return settings


# --- files ---------------------------------------------------------------------------------------


def find_file(path: str) -> Path:
    """Return a file below a data folder.

    Args:
        path: below the folder, such as "tables/ames.csv.xz".

    Raises:
        DataError: it is in none of the folders.
    """
    found = locate(File(path, 0, ""))
    if found is None:
        searched = ", ".join(map(str, folders()))
        raise DataError(f"{path} is not in {searched}; set {VARIABLE} to the folder that has it")
    return found


def _builtin(name: str) -> Table:
    """Return a UCI set with its published splits."""
    return Table(name, "uci", lambda folder, split: name, "regression")


def _mile(name: str, task: Task) -> Table:
    """Return a table of the repository of MILE: separated by blanks, the last column is y."""

    def write(folder: Path, split: int) -> Path:
        text = find_file(f"mile/{name}.data").read_text().replace(",", " ")
        return write_columns(folder / f"{name}.csv", np.loadtxt(io.StringIO(text)))

    title = name.removesuffix("_proc").replace("_", " ")
    return Table(title, "mile", write, task, "y")


def write_columns(path: Path, values: NDArray[np.float64]) -> Path:
    """Write a matrix to a CSV file with the columns x1, x2, ..., y.

    Args:
        path: of the file.
        values: (N, features + 1).
    """
    names = [f"x{i + 1}" for i in range(values.shape[1] - 1)]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*names, "y"])
        writer.writerows([[f"{value:.10g}" for value in row] for row in values])
    return path


def _real(
    name: str,
    target: str,
    task: Task,
    *,
    file: str | None = None,
    drop: Sequence[str] = (),
    states_task: bool = False,
    event: str | None = None,
    keep: tuple[str, str] | None = None,
    split_by_time: str | None = None,
) -> Table:
    """Return a CSV file inside xz; ``keep`` = (column, value) selects rows."""

    def write(folder: Path, split: int) -> Path:
        source = find_file(f"tables/{file or name}.csv.xz")
        path = folder / f"{file or name}.csv"
        text = lzma.decompress(source.read_bytes()).decode()
        path.write_text(text if keep is None else select_rows(text, *keep))
        return path

    return Table(
        name,
        "real",
        write,
        task,
        target,
        states_task,
        tuple(drop),
        event,
        split_by_time,
    )


def select_rows(text: str, column: str, value: str) -> str:
    """Return the header and the rows of a CSV text that have a value in a column.

    Args:
        text: with a header.
        column: its name.
        value: as it is written.
    """
    rows = list(csv.reader(io.StringIO(text)))
    place = rows[0].index(column)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([rows[0], *(row for row in rows[1:] if row[place] == value)])
    return stream.getvalue()


# --- generated data ------------------------------------------------------------------------------


def _drawn(
    name: str,
    rows: int,
    draw: Callable[[int, np.random.Generator], Arrays],
    *,
    group: Group = "generated",
    task: Task = "regression",
    first_seed: int = 0,
) -> Table:
    """Return generated data: every split has training rows and fresh test rows of its own."""
    fresh_rows = MANY_FRESH_ROWS if group == "large" else FRESH_ROWS

    def write(folder: Path, split: int) -> Path:
        x, y = draw(rows + fresh_rows, np.random.default_rng((first_seed + split, 44)))
        path = folder / "rows.npz"
        np.savez(path, x=x[:rows], y=y[:rows], x_test=x[rows:], y_test=y[rows:])
        return path

    return Table(name, group, write, task)


def _loaded(name: str, title: str, task: Task) -> Table:
    """Return a table that scikit-learn carries."""

    def write(folder: Path, split: int) -> Path:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        path = folder / "rows.npz"
        np.savez(path, x=x, y=y)
        return path

    return Table(title, "sklearn", write, task)


def friedman(number: int, noise: float, inputs: int = 5) -> Callable[..., Arrays]:
    """Return a function that draws rows of Friedman's regression 1, 2 or 3 (1991).

    Args:
        number: which of them.
        noise: the standard deviation of the Gaussian noise.
        inputs: of number 1; all after the fifth are irrelevant.
    """

    def draw(rows: int, rng: np.random.Generator) -> Arrays:
        from sklearn import datasets

        options: dict[str, Any] = {"n_features": inputs} if number == 1 else {}
        make = getattr(datasets, f"make_friedman{number}")
        seed = int(rng.integers(2**31))
        x, y = make(n_samples=rows, noise=noise, random_state=seed, **options)
        return x, y

    return draw


def draw_varied_noise(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw y = sin(3x₁) + x₂ + ε with Std[ε] = .05 + .45·|x₃|, five uniform inputs.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.uniform(-1, 1, (rows, 5))
    std = 0.05 + 0.45 * np.abs(x[:, 2])
    return x, np.sin(3 * x[:, 0]) + x[:, 1] + std * rng.standard_normal(rows)


def draw_heavy_tails(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw y = sin(3x₁) + x₂·x₃ + .2·t with two degrees of freedom, five uniform inputs.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.uniform(-1, 1, (rows, 5))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.2 * rng.standard_t(2, rows)


def draw_steps(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw a piecewise constant function of four of eight inputs, with noise of .2.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.uniform(0, 1, (rows, 8))
    level = 2.0 * (x[:, 0] > 0.5) + 1.5 * (x[:, 1] > 0.3) * (x[:, 2] > 0.6)
    level -= 1.0 * (x[:, 3] > 0.8) * (x[:, 0] < 0.5)
    return x, level + 0.2 * rng.standard_normal(rows)


def draw_skewed(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw a positive y = exp(1 + x₁ + sin(2x₂) + .5·ε), five normal inputs.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.standard_normal((rows, 5))
    return x, np.exp(1 + x[:, 0] + np.sin(2 * x[:, 1]) + 0.5 * rng.standard_normal(rows))


def draw_rare_class(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw two classes, the second in about 3 % of the rows, of ten normal inputs.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.standard_normal((rows, 10))
    score = 1.5 * x[:, 0] + x[:, 1] * x[:, 2] - 5.0
    probability = 1 / (1 + np.exp(-score))
    return x, (rng.uniform(size=rows) < probability).astype(np.int64)


def draw_mislabeled(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw four classes by the signs of x₁ + x₂ and x₃·x₄, a tenth of them replaced at random.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.standard_normal((rows, 8))
    label = 2 * (x[:, 0] + x[:, 1] > 0) + (x[:, 2] * x[:, 3] > 0)
    is_replaced = rng.uniform(size=rows) < 0.1
    return x, np.where(is_replaced, rng.integers(0, 4, rows), label).astype(np.int64)


def draw_many(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw a smooth function with one step of twelve inputs, with noise that grows with x₁.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.uniform(-1, 1, (rows, 12))
    mean = np.sin(4 * x[:, 0] * x[:, 1]) + 2 * x[:, 2] ** 2 + (x[:, 3] > 0.2) * x[:, 4]
    return x, mean + (0.2 + 0.2 * (x[:, 0] + 1)) * rng.standard_normal(rows)


def draw_waves(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw y = cos(5x₁)·x₂ + |x₃| + .3·ε, six uniform inputs: a table for tuning.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.uniform(-1, 1, (rows, 6))
    mean = np.cos(5 * x[:, 0]) * x[:, 1] + np.abs(x[:, 2])
    return x, mean + 0.3 * rng.standard_normal(rows)


def draw_blocks(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw the checkerboard of two of six inputs, with noise of .3: a table for tuning.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.uniform(0, 3, (rows, 6))
    parity = (np.floor(x[:, 0]) + np.floor(x[:, 1])) % 2
    return x, parity + 0.3 * rng.standard_normal(rows)


def draw_rings(rows: int, rng: np.random.Generator) -> Arrays:
    """Draw three classes by the radius of two of five normal inputs: a table for tuning.

    Args:
        rows: how many.
        rng: the generator.
    """
    x = rng.standard_normal((rows, 5))
    radius = np.hypot(x[:, 0], x[:, 1]) + 0.2 * rng.standard_normal(rows)
    return x, np.digitize(radius, [0.8, 1.6])


# --- the lists -----------------------------------------------------------------------------------

UCI = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
# wine_red is the wine of UCI.
MILE: tuple[tuple[str, Task], ...] = (
    ("airfoil", "regression"),
    ("bikesharing", "regression"),
    ("wine_white_proc", "regression"),
    ("australian_proc", "classification"),
    ("glass_proc", "classification"),
    ("heart_proc", "classification"),
    ("ionosphere", "classification"),
    ("sonar_proc", "classification"),
)
REAL = (
    _real("ad_data", "Class", "classification"),
    _real("ames", "Sale_Price", "regression"),
    _real("attrition", "Attrition", "classification"),
    _real("car_prices", "Price", "regression"),
    _real("caravan", "Purchase", "classification"),
    # Deaths: a row of every patient has etype 2.
    _real(
        "colon",
        "time",
        "regression",
        drop=("id", "study", "etype"),
        event="status",
        keep=("etype", "2"),
    ),
    _real("concrete mix", "compressive_strength", "regression", file="concrete"),
    _real("creditcard", "card", "classification", drop=("expenditure", "share")),
    _real(
        "creditcard reports",
        "reports",
        "regression",
        file="creditcard",
        drop=("card", "expenditure", "share"),
        states_task=True,
    ),
    _real("diamonds", "price", "regression"),
    # At departure: the time of arrival and the time in the air are known later.
    _real("flights", "arr_delay", "regression", drop=("arr_time", "air_time")),
    _real(
        "flights, later days",
        "arr_delay",
        "regression",
        file="flights",
        drop=("arr_time", "air_time"),
        split_by_time="time_hour",
    ),
    _real("hotel_rates", "avg_price_per_room", "regression"),
    _real(
        "hotel_rates, later days",
        "avg_price_per_room",
        "regression",
        file="hotel_rates",
        split_by_time="arrival_date",
    ),
    _real("lending_club", "Class", "classification"),
    _real("quine", "Days", "regression"),
    _real("wage", "wage", "regression", drop=("logwage",)),
)
GENERATED = (
    _drawn("friedman1", 240, friedman(1, 1.0, 10)),
    _drawn("friedman2", 500, friedman(2, 100.0)),
    _drawn("friedman3", 500, friedman(3, 0.1)),
    _drawn("varied noise", 1000, draw_varied_noise),
    _drawn("heavy tails", 1000, draw_heavy_tails),
    _drawn("steps", 1000, draw_steps),
    _drawn("skewed", 1000, draw_skewed),
    _drawn("rare class", 2000, draw_rare_class, task="classification"),
    _drawn("mislabeled", 1000, draw_mislabeled, task="classification"),
)
LARGE = (
    _drawn("100,000 rows", 100_000, draw_many, group="large"),
    _drawn("500,000 rows", 500_000, draw_many, group="large"),
)
SKLEARN = (
    _loaded("diabetes", "diabetes", "regression"),
    _loaded("breast_cancer", "breast cancer", "classification"),
    _loaded("wine", "wine cultivars", "classification"),
    _loaded("digits", "digits", "classification"),
)
FOR_TUNING = (
    _drawn("friedman1 for tuning", 240, friedman(1, 1.0, 8), first_seed=TUNING_SEED),
    _drawn("friedman2 for tuning", 300, friedman(2, 150.0), first_seed=TUNING_SEED),
    _drawn("waves", 600, draw_waves, first_seed=TUNING_SEED),
    _drawn("blocks", 1500, draw_blocks, first_seed=TUNING_SEED),
    _drawn("rings", 600, draw_rings, task="classification", first_seed=TUNING_SEED),
)


def _by_name(tables: Sequence[Table]) -> dict[str, Table]:
    """Return tables by name; two with one name are an error."""
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"two tables have the same name: {sorted(names)}")
    return {table.name: table for table in tables}


_PUBLISHED = (*(_builtin(name) for name in UCI), *(_mile(name, task) for name, task in MILE))
REPORTED = _by_name((*_PUBLISHED, *REAL, *GENERATED, *LARGE))
TUNING = _by_name((*SKLEARN, *FOR_TUNING))
TABLES = _by_name((*REPORTED.values(), *TUNING.values()))
