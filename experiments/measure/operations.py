"""What one does with a posterior, measured: guarantees, calibration, active learning.

    python -m experiments.measure.operations guarantee --seeds 20          # coverage and size, before and
    with conformal
    python -m experiments.measure.operations calibrate --seeds 10          # a temperature beside last-layer
    Laplace
    python -m experiments.measure.operations ask --prior 1 --seeds 5       # a learning curve for every way
    to choose rows
    python -m experiments.measure.operations tables                        # table and picture again, from
    the JSON

on the tables and 8×8 digits that come with scikit-learn. Seeds that are in
``results/operations.json`` already are not run again, so that a long study can be run in parts
(``--first``, ``--seeds``).
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.core import rng

RESULTS = Path(__file__).parents[1] / "results"
FOUND, TABLE, PICTURE = (
    RESULTS / "operations.json",
    RESULTS / "operations.md",
    RESULTS / "operations.png",
)
PRIOR = {"digits": bayou.Normal("fan_in", gain=3.0), "diabetes": bayou.Normal("fan_in", gain=2.0)}
START = bayou.MAP(steps=300, lr=0.01)
METHODS: dict[str, bayou.methods.Method] = {
    "MAP": START,
    "Ensemble(5)": bayou.Ensemble(5, START),
    "VI(MeanField())": bayou.VI(bayou.MeanField(), steps=3000, lr=0.01),
    "Laplace()": bayou.Laplace(start=START),
}
WAYS = ("random", "entropy", "variance", "bald", "batchbald")
ASKED: dict[str, tuple[bayou.methods.Method, bayou.priors.Prior, tuple[str, ...]]] = {
    "Laplace(), prior std 3/√fan-in": (METHODS["Laplace()"], PRIOR["digits"], WAYS),
    "Laplace(), prior std 1": (
        METHODS["Laplace()"],
        bayou.Normal(1.0),
        ("random", "entropy", "bald", "batchbald"),
    ),
}
HEAD = """# What one does with a posterior

Made by `python -m experiments.measure.operations`; means ± standard errors over seeds (splits and networks). Data of
scikit-learn: digits (200 rows to train, network 64-64-10) and diabetes (200 rows, 10-50-1, y in standard
deviations).""".splitlines()
GUARANTEE = """
Size: the width of an interval, the number of classes in a set. *Alone*: `p.interval`, `p.prediction_set`.

| data | method | how | coverage | size |
|---|---|---|---:|---:|""".splitlines()
CALIBRATE = """
*300 rows*: without calibration, what is held out trains instead. The other two train with 200.

| data | method | 300 rows | 200 rows | 200, calibrated by 100 | temperature |
|---|---|---:|---:|---:|---:|""".splitlines()
ASK = """
*Labels to 90 %*: where the mean curve reaches it. *Area*: the mean of the curve.

![curves](operations.png)""".splitlines()
FIRST, EACH, LAST = 20, 10, 150  # labels: at the start, in a round, at the end


def load(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Rows in the order of a seed; inputs, and numbers to predict, have a standard deviation of 1
    or so.
    """
    x, y = load_digits(return_X_y=True) if name == "digits" else load_diabetes(return_X_y=True)
    order = rng.permutation(len(x), seed)
    inputs = torch.as_tensor(x / 16 if name == "digits" else x / x.std(0), dtype=torch.float32)[
        order
    ]
    if name == "digits":
        return inputs, torch.as_tensor(y)[order]
    return inputs, torch.as_tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)[
        order
    ]


def fit(
    name: str,
    rows: tuple[Tensor, Tensor],
    method: bayou.methods.Method,
    seed: int,
    prior: bayou.priors.Prior | None = None,
) -> bayou.Posterior:
    """A network of one hidden layer, 64-64-10 or 10-50-1."""
    torch.manual_seed(seed)
    digits = name == "digits"
    net = nn.Sequential(*((nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)) if digits else
                          (nn.Linear(10, 50), nn.SiLU(), nn.Linear(50, 1))))  # fmt: skip
    likelihood = bayou.Categorical() if digits else bayou.Gaussian(0.5, learn=True)
    options: Any = {
        "likelihood": likelihood,
        "prior": prior or PRIOR[name],
        "seed": seed,
        "progress": False,
    }
    return bayou.fit(net, rows, method=method, **options)


def guarantee(seed: int) -> dict[str, Any]:
    """Level .9: coverage and mean size of what the posterior says by itself, and with 100 rows held
    out.
    """
    found: dict[str, Any] = {}
    for name, train in (("diabetes", 200), ("digits", 200)):
        x, y = load(name, seed)
        held, test = slice(train, train + 100), slice(train + 100, None)
        for label, method in METHODS.items():
            posterior = fit(name, (x[:train], y[:train]), method, seed)
            p = posterior.predict(x[test], seed=0)
            ways = ("cqr", "split") if name == "diabetes" else ("lac",)
            for how in ("alone", *ways):
                c = (
                    None
                    if how == "alone"
                    else bayou.conformal(posterior, (x[held], y[held]), score=how, seed=seed)
                )  # type: ignore[arg-type]
                if name == "diabetes":
                    low, high = p.interval(0.9) if c is None else c.interval(x[test])
                    pair = (low <= y[test]) & (y[test] <= high), high - low
                else:
                    mask = p.prediction_set(0.9) if c is None else c.set(x[test])
                    pair = mask.gather(-1, y[test].unsqueeze(-1)), mask.sum(-1)
                found[f"{name}/{label}/{how}"] = [float(part.double().mean()) for part in pair]
    return found


def calibrate(seed: int) -> dict[str, Any]:
    """NLL of test rows with and without what 100 held-out rows teach; without, they train too."""
    found: dict[str, Any] = {}
    last = bayou.Laplace(start=START, where="last")
    rest = {
        label: method for label, method in METHODS.items() if label != "VI(MeanField())"
    }  # which takes minutes
    methods = {"MLE": bayou.MLE(steps=300, lr=0.01), **rest, "Laplace(where='last')": last}
    for name, train in (("diabetes", 200), ("digits", 200)):
        x, y = load(name, seed)
        test = slice(train + 100, None)
        for label, method in methods.items():
            posterior = fit(name, (x[:train], y[:train]), method, seed)
            more = fit(name, (x[: train + 100], y[: train + 100]), method, seed)
            numbers = [
                metrics.nll(one.predict(x[test], seed=0), y[test]) for one in (more, posterior)
            ]
            bayou.calibrate(posterior, (x[train : train + 100], y[train : train + 100]))
            numbers.append(metrics.nll(posterior.predict(x[test], seed=0), y[test]))
            found[f"{name}/{label}"] = [*numbers, posterior.temperature]
    return found


def ask(seed: int, label: str) -> dict[str, Any]:
    """Test accuracy on 500 digits after every round of 10 labels, from 20 that are the same for all
    ways.
    """
    x, y = load("digits", seed)
    x_test, y_test, x, y = x[:500], y[:500], x[500:], y[500:]
    found: dict[str, Any] = {}
    for how in ASKED[label][2]:
        known = torch.zeros(len(x), dtype=torch.bool)
        known[:FIRST] = True
        curve = []
        for labels in range(FIRST, LAST + 1, EACH):
            posterior = fit("digits", (x[known], y[known]), ASKED[label][0], seed, ASKED[label][1])
            curve.append(metrics.accuracy(posterior.predict(x_test, seed=0), y_test))
            if labels < LAST:
                pool = (~known).nonzero().flatten()
                chosen = bayou.acquire(posterior, x[pool], EACH, how, seed=seed * 1000 + labels)  # type: ignore[arg-type]
                known[pool[chosen.indices]] = True
        found[f"{label}/{how}"] = curve
    return found


def kept() -> dict[str, dict[str, Any]]:
    """What was measured so far: by study, then by seed."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def words(values: list[float], digits: int = 3) -> str:
    """Mean ± its standard error."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{np.mean(values):.{digits}f} ± {error:.{digits}f}"


def columns(runs: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each row, over seeds."""
    keys = dict.fromkeys(key for run in runs.values() for key in run)
    return {key: [run[key] for run in runs.values() if key in run] for key in keys}


def tables(found: dict[str, dict[str, Any]]) -> str:
    """The page of results."""
    said = [*HEAD]
    if "guarantee" in found:
        said += [
            "",
            f"## Guarantee: level .9, 100 rows held out, {len(found['guarantee'])} seeds",
            *GUARANTEE,
        ]
        for key, values in columns(found["guarantee"]).items():
            cells = [words([value[k] for value in values]) for k in (0, 1)]
            said.append(f"| {' | '.join([*key.split('/'), *cells])} |")
    if "calibrate" in found:
        said += [
            "",
            f"## Calibrate: NLL of a test row, {len(found['calibrate'])} seeds",
            *CALIBRATE,
        ]
        for key, values in columns(found["calibrate"]).items():
            cells = [words([value[k] for value in values]) for k in range(4)]
            said.append(f"| {' | '.join([*key.split('/'), *cells])} |")
    asked = {study: runs for study, runs in found.items() if study.startswith("ask")}
    for runs in asked.values():
        table = columns(runs)
        label = next(iter(table)).rsplit("/", 1)[0]
        places = list(range(FIRST, LAST + 1, EACH))
        shown = [50, 100, 150]
        said += ["", f"## Ask: accuracy on 500 digits, {label}, {len(runs)} seeds", "",
                 f"| how | {' | '.join(f'{labels} labels' for labels in shown)} | labels to 90 % | area |",
                 "|---|" + "---:|" * (len(shown) + 2)]  # fmt: skip
        for key, values in table.items():
            curves = np.array(values)
            cells = [words(list(curves[:, places.index(labels)])) for labels in shown]
            reached = curves.mean(0) >= 0.9
            until = str(places[int(reached.argmax())]) if reached.any() else f"over {LAST}"
            area = words(list(curves.mean(1)))
            said.append(f"| {' | '.join([key.rsplit('/', 1)[1], *cells, until, area])} |")
    if asked:
        draw(asked)
        said += [*ASK]
    return "\n".join(said) + "\n"


def draw(asked: dict[str, dict[str, Any]]) -> None:
    """Learning curves: means and their standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(asked), figsize=(5.2 * len(asked), 3.6), squeeze=False, sharey=True
    )
    for axis, runs in zip(axes[0], asked.values(), strict=True):
        places = list(range(FIRST, LAST + 1, EACH))
        for key, values in columns(runs).items():
            label, how = key.rsplit("/", 1)
            mean = np.mean(values, 0)
            error = np.std(values, 0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0 * mean
            color = "0.5" if how == "random" else f"C{WAYS.index(how) - 1}"
            axis.plot(
                places,
                100 * mean,
                color=color,
                label=how,
                linestyle="--" if how == "random" else "-",
            )
            axis.fill_between(
                places,
                100 * (mean - error),
                100 * (mean + error),
                color=color,
                alpha=0.15,
                linewidth=0,
            )
            axis.set_title(label, fontsize=10)
        axis.set_xlabel("labels")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("test accuracy, %")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("guarantee", "calibrate", "ask", "tables"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--prior", default="1", choices=("1", "3"), help="of ask: std 1, or 3/√fan-in"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore", bayou.training.convergence.ConvergenceWarning)
    label = next(label for label in ASKED if f"std {given.prior}" in label)
    name = f"ask {given.prior}" if given.study == "ask" else given.study
    for seed in range(given.first, given.first + given.seeds) if given.study != "tables" else ():
        found = kept()
        if str(seed) not in found.setdefault(name, {}):
            studies = {
                "guarantee": guarantee,
                "calibrate": calibrate,
                "ask": lambda seed: ask(seed, label),
            }
            found[name][str(seed)] = studies[given.study](seed)
            FOUND.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: seed {seed}", flush=True)
    TABLE.write_text(tables(kept()))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
