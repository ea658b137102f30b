"""Tables as people bring them: each is fitted well in its own units, or refused in one sentence.

A good fit has finite predictions, 90 % intervals that cover a sane share of 500 fresh rows, and an
NLL there that is not clearly worse than that of N(mean, variance) of y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.data import load
from bayou.select.far_values import SentinelWarning
from bayou.select.shared_searches import shared_searches
from tests.data.errors import refused

Numbers = NDArray[np.float64]
FRESH_ROWS: Final = 500
MARGIN: Final = 0.2  # nats, by which the NLL may be above that of a constant


def unchanged(values: Numbers, is_training: bool) -> Numbers:
    """Return the same numbers."""
    return values


def with_outlier(values: Numbers, is_training: bool) -> Numbers:
    """Put one number of 10⁶ standard deviations among those of the training rows."""
    values = values.copy()
    if is_training:
        values[3, 0] = 1e6
    return values


def with_heavy_tails(values: Numbers, is_training: bool) -> Numbers:
    """Add noise with a Student-t distribution of 2 degrees of freedom, without a variance."""
    return values + np.random.default_rng(int(is_training)).standard_t(2, size=values.shape)


@final
@dataclass(frozen=True)
class Table:
    """A regression y = x₀ + sin(2·x₁)/2 + N(0, 0.3²) and what is odd about it.

    Args:
        rows: training rows.
        columns: inputs, of which the first two matter.
        x: changes the inputs, of training rows or of fresh ones.
        y: changes the targets.
        coverage: the least and the largest share of fresh rows inside their 90 % intervals. The
            noise of 200 rows, known to 5 %, alone gives 87 to 93 %, and 500 rows add ± 2.7 %.
        margin: nats by which the NLL may exceed that of a constant; a good fit of a plain table is
            1.2 nats below it.
        effort: of the slow fits; .3 is the least with two folds, whose 40 % of the rows decide on
            the settings.
        steps: of the slow variational fits, which then do not go on until their bound has
            converged.
    """

    rows: int = 200
    columns: int = 3
    x: Callable[[Numbers, bool], Numbers] = unchanged
    y: Callable[[Numbers, bool], Numbers] = unchanged
    coverage: tuple[float, float] = (0.82, 0.98)
    margin: float = -0.7
    effort: float = 0.3
    steps: int = 150

    def draw(self, *, is_training: bool) -> tuple[Numbers, Numbers]:
        """Return x and y of training rows, or of fresh rows."""
        random = np.random.default_rng(0 if is_training else 1)
        x = random.normal(size=(self.rows if is_training else FRESH_ROWS, self.columns))
        noise = 0.3 * random.normal(size=len(x))
        y = x[:, 0] + 0.5 * np.sin(2 * x[:, 1]) + noise
        return self.x(x, is_training), self.y(y[:, None], is_training)


TABLES: dict[str, Table] = {
    "constant column": Table(x=lambda x, is_training: np.c_[x, np.full(len(x), 2024.0)]),
    "constant column that changes later": Table(
        x=lambda x, is_training: np.c_[x, np.full(len(x), 7.0 if is_training else 7.5)],
        coverage=(0.82, 1.0),
        margin=2.0,  # the weights of this column have their prior, so that intervals are wide
    ),
    "duplicated column": Table(x=lambda x, is_training: np.c_[x, x[:, 0]]),
    # 25 rows have five held-out rows at a time.
    "25 rows": Table(25, coverage=(0.7, 0.99), margin=MARGIN),
    # Two folds of ten rows say too little, and MNF is far from its bound after 150 steps.
    "10 rows": Table(10, coverage=(0.5, 1.0), margin=0.7, effort=1.0, steps=400),
    # Five rows tell the noise to a factor of two: they are fitted, not well.
    "5 rows": Table(5, coverage=(0.4, 1.0), margin=2.0),
    "y in units of 1e9": Table(y=lambda y, is_training: 1e9 * y + 5e9),
    "y in units of 1e-9": Table(y=lambda y, is_training: 1e-9 * y),
    "x with an offset of 1e6": Table(x=lambda x, is_training: x + 1e6),
    "y with an offset of 1e6": Table(y=lambda y, is_training: y + 1e6),
    "y of a few whole numbers": Table(y=lambda y, is_training: y.round()),
    "y with heavy tails": Table(y=with_heavy_tails, margin=MARGIN),
    "y of a log-normal": Table(
        y=lambda y, is_training: np.exp(2 * y), coverage=(0.82, 1.0), margin=MARGIN
    ),
    "x with heavy tails": Table(x=lambda x, is_training: np.sinh(3 * x), margin=MARGIN),
}


def tensors(x: Numbers, y: Numbers) -> tuple[Tensor, Tensor]:
    """Return x and y as tensors."""
    return torch.from_numpy(x), torch.from_numpy(y)


def network(inputs: int, outputs: int = 1, hidden: int = 20) -> nn.Module:
    """Return a small network with the same weights at every call."""
    torch.manual_seed(0)
    layers = (nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
    return nn.Sequential(*layers).double()


def check_predictions(
    table: Table, y: Tensor, fresh_y: Tensor, predictive: bayou.Predictive
) -> None:
    """Check that a fit of a regression is good, or as good as can be expected."""
    low, high = predictive.interval(0.9)
    for values in (predictive.mean, predictive.std, low, high):
        assert bool(values.isfinite().all())
    covered = float(((low <= fresh_y) & (fresh_y <= high)).double().mean())
    assert table.coverage[0] <= covered <= table.coverage[1]
    nll = -float(predictive.log_prob(fresh_y).mean())
    constant = torch.distributions.Normal(y.mean(), y.std(correction=0))
    assert nll <= -float(constant.log_prob(fresh_y).mean()) + table.margin


def fit_and_check(table: Table, name: str, effort: float, **settings: Any) -> None:
    """Fit a method by name to an odd table, and check it on fresh rows."""
    x, y = tensors(*table.draw(is_training=True))
    fresh_x, fresh_y = tensors(*table.draw(is_training=False))
    method = bayou.select.by_name(name, effort=effort, **settings)
    posterior = bayou.fit(network(x.shape[1]), (x, y), method, progress=False)
    check_predictions(table, y, fresh_y, posterior.predict(fresh_x, seed=0))


@pytest.mark.parametrize("oddity", TABLES)
def test_map_fits_an_odd_table(oddity: str) -> None:
    fit_and_check(TABLES[oddity], "map", 0.4)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::bayou.inference.baseline_checks.WorseThanModeWarning"
)  # a right warning for five rows
@pytest.mark.filterwarnings(
    "ignore::bayou.training.convergence.ConvergenceWarning"
)  # MNF says that its bound still rises
@pytest.mark.parametrize("oddity", TABLES)
def test_other_methods_fit_an_odd_table(oddity: str) -> None:
    """They share the search of prior and noise, as in ``auto``."""
    table = TABLES[oddity]
    with shared_searches():
        for name in ("laplace", "ffg", "mnf", "ensemble"):
            steps = {"steps": table.steps} if name in ("ffg", "mnf") else {}
            members = {"members": 2} if name == "ensemble" else {}
            fit_and_check(table, name, table.effort, **steps, **members)


@pytest.mark.slow
@pytest.mark.parametrize("oddity", TABLES)
def test_the_estimator_fits_an_odd_table(oddity: str) -> None:
    table = TABLES[oddity]
    x, y = table.draw(is_training=True)
    fresh_x, fresh_y = table.draw(is_training=False)
    model = BayesRegressor("laplace", effort=table.effort, random_state=0).fit(x, y)
    check_predictions(
        table, torch.from_numpy(y), torch.from_numpy(fresh_y), model.predictive(fresh_x)
    )


def test_one_input_far_from_all_others_is_replaced() -> None:
    table = Table(x=with_outlier)
    with pytest.warns(SentinelWarning, match="x is 1000000 in row 3 of column 0"):
        fit_and_check(table, "map", 0.4)


def test_one_target_far_from_all_others_is_refused() -> None:
    x, y = Table(y=with_outlier).draw(is_training=True)
    words = "y is 1000000 in row 3, far from all others .*; leave out these rows if they stand"
    with pytest.raises(ValueError, match=words):
        bayou.fit(network(3), tensors(x, y), "map", progress=False)
    with pytest.raises(ValueError, match=words):
        BayesRegressor("map").fit(x, y[:, 0])


def test_a_constant_target_is_predicted() -> None:
    x, y = Table(60, y=lambda y, is_training: np.full_like(y, 3.0)).draw(is_training=True)
    method = bayou.select.by_name("map", steps=200)
    posterior = bayou.fit(network(3), tensors(x, y), method, progress=False)
    predictive = posterior.predict(torch.from_numpy(x), seed=0)
    assert bool(predictive.std.isfinite().all())
    assert float((predictive.mean - 3).abs().max()) < 0.1


def test_a_missing_column_is_refused_by_its_row() -> None:
    x, y = Table(50, x=lambda x, is_training: np.c_[x, np.full(len(x), np.nan)]).draw(
        is_training=True
    )
    with pytest.raises(ValueError, match="x .* not finite|x has .*(nan|finite)"):
        bayou.fit(network(4), tensors(x, y), "map", progress=False)
    with pytest.raises(ValueError, match="contains NaN"):
        BayesRegressor("map").fit(x, y[:, 0])


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
@pytest.mark.slow
def test_5000_columns_are_fitted() -> None:
    table = Table(200, 5000, coverage=(0.8, 0.98), margin=-0.2)
    with shared_searches():
        for name in ("map", "laplace", "mnf"):
            fit_and_check(table, name, 0.2)


# --- classes -------------------------------------------------------------------------------------


def class_rows(kind: str, rows: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """Return x, y and the number of classes: one of 99:1, or one with a class of a single row."""
    random = np.random.default_rng(seed)
    number = np.arange(rows)
    y = (number % 100 == 0).astype(np.int64)
    if kind == "single":
        y = np.where(number == 5, 2, number % 2)
    x = random.normal(size=(rows, 3)) + 1.5 * y[:, None]
    return torch.from_numpy(x), torch.from_numpy(y), int(y.max()) + 1


def frequencies_nll(y: Tensor, fresh_y: Tensor, classes: int) -> float:
    """Return the NLL of the frequencies of classes, with one more row of each."""
    frequencies = (y.bincount(minlength=classes) + 1.0) / (len(y) + classes)
    return -float(frequencies[fresh_y].log().mean())


@pytest.mark.parametrize("name", ["map", "laplace"])
@pytest.mark.parametrize(("kind", "rows"), [("99:1", 300), ("single", 60)])
def test_rare_classes_are_fitted(kind: str, rows: int, name: str) -> None:
    x, y, classes = class_rows(kind, rows, 0)
    fresh_x, fresh_y, _ = class_rows(kind, 1000, 1)
    method = bayou.select.by_name(name, effort=0.4)
    posterior = bayou.fit(network(3, classes), (x, y), method, progress=False)
    predictive = posterior.predict(fresh_x, seed=0)
    assert bool(predictive.mean.isfinite().all())
    assert -float(predictive.log_prob(fresh_y).mean()) < frequencies_nll(y, fresh_y, classes)


@pytest.mark.slow
def test_1000_classes_are_a_fit_of_seconds() -> None:
    centers = np.random.default_rng(9).normal(size=(1000, 8))
    y = np.arange(3000) % 1000
    x = centers[y] + 0.3 * np.random.default_rng(0).normal(size=(3000, 8))
    fresh_x = centers + 0.3 * np.random.default_rng(1).normal(size=(1000, 8))
    model = BayesClassifier("map", net="mlp", random_state=0, effort=0.2).fit(x, y)
    probability = model.predict_proba(fresh_x)[np.arange(1000), np.arange(1000)]
    assert -float(np.log(probability).mean()) < 0.5 * math.log(1000)


# --- files ---------------------------------------------------------------------------------------


def write_table(path: Path, x: Numbers, y: Any) -> Path:
    """Write inputs and a target as a CSV file; missing numbers are empty cells."""
    header = [*(f"x{i}" for i in range(x.shape[1])), "y"]
    lines = [",".join(header)]
    for row, target in zip(x.tolist(), y, strict=True):
        cells = ["" if value != value else repr(value) for value in row]
        lines.append(",".join([*cells, str(target)]))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda x: np.c_[x, np.full(len(x), np.nan)], "Column 'x3' is empty; dropped."),
        (lambda x: np.c_[x, np.full(len(x), 7.0)], "Column 'x3' is constant in training; dropped."),
    ],
)
def test_a_run_drops_columns_that_say_nothing(
    tmp_path: Path, change: Callable[[Numbers], Numbers], note: str
) -> None:
    x, y = Table(60).draw(is_training=True)
    path = write_table(tmp_path / "t.csv", change(x), y[:, 0].tolist())
    run = Run.create(tmp_path / "run", Config(str(path), ("map",), target="y", effort=0.1))
    (result,) = run.work()
    assert math.isfinite(result["metrics"]["nll"])
    assert note in run.facts()["notes"]


def test_a_file_of_1000_classes_needs_the_task(tmp_path: Path) -> None:
    x, _ = Table(3000).draw(is_training=True)
    labels = [f"k{i % 1000}" for i in range(3000)]
    path = write_table(tmp_path / "t.csv", x, labels)
    with refused(
        "1000 different values in 3000 rows, too many for classes .*--task classification"
    ):
        load(path, target="y")
    data = load(path, target="y", task="classification")
    assert len(data.class_names) == 1000
    assert len(data.test[1].unique()) == 1000


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([3.5] * 40, "the target 'y' is 3.5 in every row; it must vary"),
        (["a"] * 40, "the target 'y' has only one class, 'a'"),
    ],
)
def test_a_file_whose_target_does_not_vary_is_refused(
    tmp_path: Path, targets: list[Any], words: str
) -> None:
    x, _ = Table(40).draw(is_training=True)
    with refused(words):
        task = "regression" if targets[0] == 3.5 else None
        load(write_table(tmp_path / "t.csv", x, targets), target="y", task=task)
