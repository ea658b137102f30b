"""What a user gets without tuning: every method by name, as it comes, on small tables, beside
scikit-learn.

No setting may be chosen by looking at these splits: methods and baselines have their defaults.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

import numpy as np
import torch

from bayou import metrics
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.core.progress import Show
from bayou.likelihoods import Categorical, HeteroscedasticGaussian
from bayou.likelihoods.predictive import Predictive
from experiments import study
from experiments.study import Fit, Found

Arrays = tuple[np.ndarray, np.ndarray]
FRESH = 1000  # rows of made data to test on: coverage is known to .01
LIMITS = (0.85, 0.95)  # of what an interval of 90 % may cover
MARGIN = 0.1  # nats that a method may lose to BayesianRidge on linear data


@final
@dataclass(frozen=True)
class Table:
    """A small data set: ``make(rows, seed)`` draws rows of a made one; a real one has all its
    ``rows`` in any case.
    """

    rows: int
    make: Callable[[int, int], Arrays]
    made: bool = True
    classes: bool = False
    linear: bool = False

    def split(self, seed: int) -> tuple[Arrays, Arrays]:
        """Four fifths of the rows to learn from; to test on the others, or FRESH more of made
        data.
        """
        train = self.rows * 4 // 5
        X, y = self.make(train + FRESH if self.made else self.rows, seed)
        order = np.random.default_rng(seed).permutation(len(y))
        first, rest = order[:train], order[train:]
        return (X[first], y[first]), (X[rest], y[rest])


def _made(name: str, **options: Any) -> Callable[[int, int], Arrays]:
    def make(rows: int, seed: int) -> Arrays:
        from sklearn import datasets

        X, y = getattr(datasets, f"make_{name}")(n_samples=rows, random_state=seed, **options)
        return X, y

    return make


def _real(name: str, most: int | None = None) -> Callable[[int, int], Arrays]:
    def make(rows: int, seed: int) -> Arrays:
        from sklearn import datasets

        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        some = np.random.default_rng(0).permutation(len(y))[:most]
        return X[some], y[some]

    return make


def _drawn(
    f: Callable[[np.ndarray], np.ndarray],
    noise: Callable[[np.ndarray, np.random.Generator], np.ndarray],
    d: int = 1,
) -> Callable[[int, int], Arrays]:
    """y = f(x) + noise, x uniform in [−1, 1]^d."""

    def make(rows: int, seed: int) -> Arrays:
        rng = np.random.default_rng((seed, d))
        X = rng.uniform(-1, 1, (rows, d))
        return X, f(X) + noise(X, rng)

    return make


def _wave(X: np.ndarray) -> np.ndarray:
    return np.sin(4 * X[:, 0])


def _linear(features: int, informative: int, noise: float) -> Callable[[int, int], Arrays]:
    return _made("regression", n_features=features, n_informative=informative, noise=noise)


# fmt: off
TABLES: dict[str, Table] = {
    "linear, 300 × 20": Table(300, _linear(20, 5, 20.0), linear=True),
    "linear, 200 × 20": Table(200, _linear(20, 5, 20.0), linear=True),
    "linear, 100 × 8": Table(100, _linear(8, 4, 20.0), linear=True),
    "linear, 40 × 3": Table(40, _linear(3, 3, 30.0), linear=True),
    "friedman1, 300": Table(300, _made("friedman1", noise=1.0)),
    "friedman2, 300": Table(300, _made("friedman2", noise=100.0)),
    "friedman3, 300": Table(300, _made("friedman3", noise=0.1)),
    "diabetes": Table(442, _real("diabetes"), made=False),
    "sine, 120": Table(120, _drawn(_wave, lambda X, rng: 0.3 * rng.standard_normal(len(X)))),
    "sine, noise of varied size": Table(
        200, _drawn(_wave, lambda X, rng: (0.1 + 0.4 * np.abs(X[:, 0])) * rng.standard_normal(len(X)))),
    "sine, heavy tails": Table(200, _drawn(_wave, lambda X, rng: 0.25 * rng.standard_t(3, len(X)))),
    "breast cancer": Table(569, _real("breast_cancer"), made=False, classes=True),
    "wine": Table(178, _real("wine"), made=False, classes=True),
    "digits, 600": Table(600, _real("digits", 600), made=False, classes=True),
    "moons that overlap": Table(200, _made("moons", noise=0.3), classes=True),
    "clusters, a tenth mislabeled": Table(
        400, _made("classification", n_features=20, n_informative=5, flip_y=0.1), classes=True),
}
METHODS = (
    "map", "ensemble", "dropout", "ffg", "mnf", "nodeflow", "ivon", "laplace", "vbll", "swag", "sgld", "sghmc",
    "annealed", "auto",
)
# fmt: on


def _ridge(train: Arrays, X: np.ndarray, seed: int) -> Arrays:
    from sklearn.linear_model import BayesianRidge

    mean, std = _standardized(BayesianRidge()).fit(*train).predict(X, return_std=True)
    return mean, std


def _process(train: Arrays, X: np.ndarray, seed: int) -> Arrays:
    """A Gaussian process with a length for every input."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    lengths = RBF(np.full(X.shape[1], 3.0), (0.1, 1e3))
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * lengths + WhiteKernel(0.2, (1e-6, 10.0))
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    mean, std = _standardized(model).fit(*train).predict(X, return_std=True)
    return mean, std


def _with_residuals(model: str) -> Callable[[Arrays, np.ndarray, int], Arrays]:
    """Predictions with one Gaussian noise: the residuals of five folds."""

    def predict(train: Arrays, X: np.ndarray, seed: int) -> Arrays:
        from sklearn import ensemble
        from sklearn.model_selection import cross_val_predict

        trees = getattr(ensemble, model)(random_state=seed)
        std = float(np.sqrt(np.mean((train[1] - cross_val_predict(trees, *train, cv=5)) ** 2)))
        return trees.fit(*train).predict(X), np.full(len(X), std)

    return predict


def _classifier(make: Callable[[int], Any]) -> Callable[[Arrays, np.ndarray, int], np.ndarray]:
    return lambda train, X, seed: _standardized(make(seed)).fit(*train).predict_proba(X)


def _logistic(seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=2000)


def _trees(name: str) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        from sklearn import ensemble

        return getattr(ensemble, name)(random_state=seed)

    return make


def _standardized(model: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model)


RIDGE, LOGISTIC = "BayesianRidge", "logistic regression"
NUMBERS: dict[str, Callable[[Arrays, np.ndarray, int], Arrays]] = {
    RIDGE: _ridge,
    "Gaussian process": _process,
    "random forest": _with_residuals("RandomForestRegressor"),
    "gradient boosting": _with_residuals("GradientBoostingRegressor"),
}
CLASSES: dict[str, Callable[[Arrays, np.ndarray, int], np.ndarray]] = {
    LOGISTIC: _classifier(_logistic),
    "random forest": _classifier(_trees("RandomForestClassifier")),
    "gradient boosting": _classifier(_trees("HistGradientBoostingClassifier")),
}


def _baseline(table: Table, label: str, train: Arrays, X: np.ndarray, seed: int) -> Predictive:
    """What a model of scikit-learn says, as a Predictive of one draw."""
    if table.classes:
        p = torch.as_tensor(CLASSES[label](train, X, seed)).clamp_min(1e-12)
        return Predictive(Categorical().bind(), p.log().unsqueeze(0))
    mean, std = map(torch.as_tensor, NUMBERS[label](train, X, seed))
    return Predictive(
        HeteroscedasticGaussian().bind(), torch.stack([mean, 2 * std.log()], -1).unsqueeze(0)
    )


@final
@dataclass(frozen=True)
class Defaults:
    """Tables × methods by name and baselines × splits."""

    name: str = "defaults"
    title: str = "Every method by name, as it comes, on small tables"
    seeds: int = 3

    @staticmethod
    def labels(table: Table) -> list[str]:
        """The lines of a table."""
        return [*METHODS, *(CLASSES if table.classes else NUMBERS)]

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Tables × methods × splits."""
        if length is not None:
            raise ValueError(
                "defaults runs every method as long as it would by itself; leave out --length"
            )
        there = list(
            dict.fromkeys(label for table in TABLES.values() for label in self.labels(table))
        )
        labels = study.chosen("defaults has no row", only, there)
        return [
            Fit(self.name, one, label, seed)
            for seed in range(seeds or self.seeds)
            for one in study.chosen("defaults has no data", data, list(TABLES))
            for label in self.labels(TABLES[one])
            if label in labels
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit one method to one split, and score it on the other rows; its warnings are part of the
        row.
        """
        table = TABLES[fit.data]
        train, (X, y) = table.split(fit.seed)
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if fit.label in METHODS:
                kind = BayesClassifier if table.classes else BayesRegressor
                options: dict[str, Any] = {
                    "random_state": fit.seed,
                    "device": device,
                    "verbose": show,
                }
                model = kind(fit.label, samples=samples or BayesRegressor.samples, **options).fit(
                    *train
                )
                seconds, p = time.process_time() - start, model.predictive(X)
            else:
                p = _baseline(table, fit.label, train, X, fit.seed)
                seconds = time.process_time() - start
        goal = torch.as_tensor(y if table.classes or fit.label in METHODS else y[:, None]).to(
            p.outputs.device
        )
        scores = metrics.summary(p, goal)
        if table.classes:
            scores["error"] = 100 * (1 - scores["accuracy"])
        said = sorted(
            {one.category.__name__ for one in caught if one.category.__module__.startswith("bayou")}
        )
        return {name: scores[name] for name in COLUMNS[table.classes]} | {
            "said": said,
            "seconds": round(seconds, 1),
        }

    def render(self, found: Found) -> str:
        """Two tables, numbers and classes: means over splits ± one standard error, and what is
        outside the limits.
        """
        lines = [f"# {self.title}", "", INTRODUCTION, ""]
        for classes in (False, True):
            heads = [HEADS[name] for name in COLUMNS[classes]]
            lines += [
                f"| data | method | {' | '.join(heads)} | splits | s | |",
                f"|---|---|{'---:|' * 5}---|",
            ]
            for one, table in TABLES.items():
                for label in self.labels(table) if table.classes == classes else ():
                    mine = _rows(found, one, label)
                    if mine:
                        cells = [
                            study.cell([row[name] for row in mine], DIGITS[name])
                            for name in COLUMNS[classes]
                        ]
                        seconds = fmean(row["seconds"] for row in mine)
                        parts = [
                            one,
                            label,
                            *cells,
                            str(len(mine)),
                            f"{seconds:.1f}",
                            _flags(found, one, label),
                        ]
                        lines.append(f"| {' | '.join(parts)} |")
            lines.append("")
        return "\n".join([*lines, study.made_by(found), ""])

    def draw(self, found: Found, path: Path) -> bool:
        """Nothing."""
        return False


def _rows(found: Found, data: str, label: str) -> list[dict[str, Any]]:
    """Return the splits of a line."""
    return [row for row in found["rows"] if (row["data"], row["label"]) == (data, label)]


def _flags(found: Found, data: str, label: str) -> str:
    """What is wrong with a line: its coverage, its NLL on linear data, what its fits warned of."""
    table, mine = TABLES[data], _rows(found, data, label)
    said = sorted({word for row in mine for word in row["said"]})
    flags = []
    if not table.classes:
        covered = fmean(row["coverage"] for row in mine)
        if not LIMITS[0] <= covered <= LIMITS[1]:
            flags.append("covers too little" if covered < LIMITS[0] else "covers too much")
    linear = LOGISTIC if table.classes else RIDGE
    base = {row["seed"]: row["nll"] for row in _rows(found, data, linear)}
    both = [row["nll"] - base[row["seed"]] for row in mine if row["seed"] in base]
    if (table.linear or table.classes) and both and fmean(both) > MARGIN:
        flags.append(f"{fmean(both):.2f} nats behind {linear}")
    return ", ".join([*flags, *said])


INTRODUCTION = (
    "Estimators with their default settings: `BayesRegressor(name)` and `BayesClassifier(name)`, one hidden layer of "
    "50 units, beside models of scikit-learn with theirs. Four fifths of the rows of a table are learned from; real "
    f"data are tested on the others, made ones on {FRESH:,} fresh rows, every split another draw. NLL and RMSE are in "
    "units of y. Forests and boosting have one noise, the residuals of five folds. The last column says what is "
    f"outside the limits: intervals of 90 % that cover less than {100 * LIMITS[0]:.0f} or more than "
    f"{100 * LIMITS[1]:.0f} % of the rows, an NLL more than {MARGIN} behind that of BayesianRidge on linear data, or "
    "of logistic regression on classes; and what the fits warned of. Networks of one's own: "
    "`python -m experiments.reproduce networks`, in `networks.md`."
)
COLUMNS = {False: ("coverage", "nll", "rmse"), True: ("error", "nll", "ece")}
HEADS = {"coverage": "90 % covers", "nll": "NLL", "rmse": "RMSE", "error": "error, %", "ece": "ECE"}
DIGITS = {"coverage": 3, "nll": 3, "rmse": 3, "error": 2, "ece": 3}
