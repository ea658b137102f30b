"""The rows of the study: bayou by name, and the models of other libraries."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from bayou import likelihoods
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.data.preprocess import Preprocessor
from bayou.methods.wide import MAX_ROWS
from bayou.select.named import find
from bayou.select.settings import DEFAULT_METHOD_OF_FILES
from experiments.tables import censored, neural_peers, peers
from experiments.tables.rows import Rows, read_rows
from experiments.tables.scores import CLASS_SCORES, NUMBER_SCORES, Forecast, score
from experiments.tables.sources import Table

# Rows of bayou: settings of `bayou train`. A name or a setting that this version lacks is not run.
METHODS: dict[str, dict[str, Any]] = {
    "laplace": {"methods": ("laplace",)},
    "map": {"methods": ("map",)},
    "ensemble": {"methods": ("ensemble",)},
    "mnf": {"methods": ("mnf",)},
    "auto": {"methods": ("auto",)},
    "wide": {"methods": ("wide",)},
    "tabm": {"methods": ("tabm",)},
    "laplace, likelihood auto": {"methods": ("laplace",), "likelihood": "auto"},
}
WIDE = "wide"  # for regressions of up to MAX_ROWS training rows
MODE = "map"  # the method whose weights the others start from, or should not be worse than
OWN = "bayou "  # before the label of a method of bayou
CENSORED = tuple(OWN + name for name in ("laplace", "map", "ensemble", "mnf"))  # of bayou.fit
CENSORED_PEER = "NGBoost"


class NotRun(Exception):
    """A row that cannot be made here, with the reason."""


@final
@dataclass(frozen=True)
class Peer:
    """A model of another library.

    Args:
        fit: fits the training rows, and predicts the test rows: ``fit(rows, seed)``.
        needs: packages that it imports.
        tasks: that it is for.
        max_rows: training rows; it learns from a random part of a larger table.
        refused_rows: a table with more training rows is not run.
    """

    fit: Callable[[Rows, int], Forecast]
    needs: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("regression", "classification")
    max_rows: int | None = None
    refused_rows: int | None = None

    def check(self, rows: Rows) -> None:
        """Raise NotRun if the library is missing, or there are too many rows.

        Args:
            rows: of one split.
        """
        self.check_libraries()
        if self.refused_rows is not None and len(rows.y) > self.refused_rows:
            raise NotRun(f"more than {self.refused_rows:,} rows")

    def check_libraries(self) -> None:
        """Import what the model needs, which is no part of its time; raise NotRun without it."""
        for package in (*SCIKIT, *self.needs):
            try:
                importlib.import_module(package)
            except ImportError as problem:
                raise NotRun(f"no {problem.name or package}") from None


NUMBERS = ("regression",)
SLOW_ROWS = 60_000
SCIKIT = ("sklearn.model_selection", "sklearn.datasets")
PEERS: dict[str, Peer] = {
    "linear model": Peer(peers.fit_linear, ("sklearn.linear_model",)),
    "Gaussian process": Peer(
        peers.fit_process, ("sklearn.gaussian_process",), NUMBERS, max_rows=peers.PROCESS_ROWS
    ),
    "HistGB quantiles": Peer(peers.fit_boosted_quantiles, ("sklearn.ensemble",), NUMBERS),
    "HistGB conformal": Peer(peers.fit_boosted_conformal, ("sklearn.ensemble",), NUMBERS),
    "HistGB": Peer(peers.fit_boosted_classes, ("sklearn.ensemble",), ("classification",)),
    "CatBoost": Peer(peers.fit_catboost, ("catboost",)),
    "LightGBM": Peer(peers.fit_lightgbm, ("lightgbm",)),
    "NGBoost": Peer(peers.fit_ngboost, ("ngboost",), max_rows=SLOW_ROWS),
    "MLP": Peer(peers.fit_mlp, ("sklearn.neural_network",)),
    "TabM": Peer(neural_peers.fit_tabm, ("tabm", "rtdl_num_embeddings"), max_rows=SLOW_ROWS),
    "bde": Peer(neural_peers.fit_bde, ("jax", "bde"), refused_rows=neural_peers.BDE_ROWS),
}
DEFAULT = OWN + DEFAULT_METHOD_OF_FILES
MODELS = (DEFAULT, *PEERS)  # which the page compares
NAMES = tuple(OWN + name for name in METHODS if name != DEFAULT_METHOD_OF_FILES)
LABELS = (*MODELS, *NAMES)


def applies(label: str, table: Table) -> bool:
    """Return whether a row is for the task of a table.

    Args:
        label: of the row.
        table: of the study.
    """
    if label == OWN + WIDE:
        return table.task == "regression"
    return label not in PEERS or table.task in PEERS[label].tasks


def measure(table: Table, split: int, label: str) -> dict[str, Any]:
    """Fit a row to one split of a table, and score its predictions of the test rows.

    Args:
        table: of the study.
        split: its number, and the seed of the fit.
        label: of the row.

    Returns:
        The scores, with processor ``seconds`` of the fit, the number of training rows and inputs,
        and notes.

    Raises:
        NotRun: the row cannot be made here.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = table.settings(Path(folder), split)
        if table.event is not None:
            return _measure_censored(settings, table, label)
        if label.startswith(OWN):
            row = METHODS[label.removeprefix(OWN)]
            return _measure_bayou(settings, table, row, Path(folder))
        _check_known({**settings, "methods": ()})
        return _measure_peer(settings, PEERS[label], split)


def _measure_bayou(
    settings: Mapping[str, Any], table: Table, row: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Run `bayou train` with the settings of a row, and return its scores."""
    settings = {**settings, **row}
    _check_known(settings)
    config = Config(seed=settings["split"], **settings)
    run = Run.create(folder / "run", config)
    times: dict[str, float] = {}

    def note_time(name: str, event: str, numbers: dict[str, Any]) -> None:
        times.setdefault(event, time.process_time())

    run.work(tell=note_time)
    job = run.jobs[0]
    result = run.result(job)
    facts = run.facts()
    if result is None and job.method == WIDE and facts["train"] > MAX_ROWS:
        raise NotRun(f"more than {MAX_ROWS:,} rows")
    if result is None:
        raise RuntimeError(run.failures().get(job.name, "no result"))
    if facts["task"] != table.task:
        raise RuntimeError(f"the target was read for {facts['task']}, not {table.task}")
    flags = [check["name"] for check in result["checks"] if check["status"] != "ok"]
    names = CLASS_SCORES if facts["task"] == "classification" else NUMBER_SCORES
    scores = {name: result["metrics"].get(name) for name in names}
    return scores | {
        "task": facts["task"],
        "rows": facts["train"],
        "inputs": facts["input_shape"][0],
        "scale": _target_scale(run, config.split) if facts["task"] == "regression" else 1.0,
        "seconds": round(times["judging"] - times["fitting"], 2),
        "chosen": result["choice"] or facts["net"],
        "flags": flags,
        "notes": facts["notes"],
    }


def _target_scale(run: Run, split: int) -> float:
    """Return the standard deviation of the training targets, in their own units.

    Args:
        run: the run, whose fit is to standardized targets or to targets as they are.
        split: of the run.
    """
    y = run.load_data(split).train[1].double()
    return Preprocessor.from_json(run.facts()["preprocessor"]).y_scale * float(y.std(correction=0))


def _check_known(settings: Mapping[str, Any]) -> None:
    """Raise NotRun if this version of bayou lacks a method or a setting."""
    for method in settings["methods"]:
        try:
            find(method)
        except ValueError:
            raise NotRun(f"no method {method!r}") from None
    for name in settings:
        if name not in ("data", "methods", *Config.settings()):
            raise NotRun(f"no setting --{name.replace('_', '-')}")


def _measure_censored(settings: Mapping[str, Any], table: Table, label: str) -> dict[str, Any]:
    """Fit a row to a table with censored targets, and return its scores."""
    if label not in CENSORED and label != CENSORED_PEER:
        raise NotRun("not for censored targets")
    rows = censored.read_censored(settings, table.event or "")
    if label == CENSORED_PEER:
        PEERS[label].check_libraries()
        return censored.fit_ngboost(rows, settings["split"]) | censored.describe(rows, table)
    if not hasattr(likelihoods, "Censored"):
        raise NotRun("no censored targets")
    method = label.removeprefix(OWN)
    _check_known({"methods": (method,)})
    return censored.fit_bayou(rows, method, settings["split"]) | censored.describe(rows, table)


def _measure_peer(settings: Mapping[str, Any], peer: Peer, seed: int) -> dict[str, Any]:
    """Fit a model of another library to the same rows, and return its scores."""
    rows = read_rows(settings)
    peer.check(rows)
    fitted = rows
    if peer.max_rows is not None:
        fitted = rows.first(peer.max_rows, seed)
    started = time.process_time()
    forecast = peer.fit(fitted, seed)
    seconds = time.process_time() - started
    return score(forecast, rows.y_test) | {
        "task": rows.task,
        "rows": len(fitted.y),
        "inputs": rows.x.shape[1],
        "scale": float(np.std(rows.y)),
        "seconds": round(seconds, 2),
        "chosen": f"{len(fitted.y):,} rows" if len(fitted.y) < len(rows.y) else None,
    }


def title(label: str) -> str:
    """Return the label of a row as the page shows it.

    Args:
        label: of the row.
    """
    return f"{label} (default)" if label == DEFAULT else label
