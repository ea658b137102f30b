"""Rows of tables with censored targets: times of which some are known only to exceed a value.

The score is −1/N Σ [e·log p(t) + (1 − e)·log P(T > t)], in nats, with e = 1 for an observed time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

import bayou
from bayou.app.runs import nets
from bayou.data import load
from bayou.data.reading import read_file
from experiments.tables.peers import HELD_OUT, PATIENCE
from experiments.tables.rows import Floats, row_numbers
from experiments.tables.sources import Table

LIKELIHOOD = "censored-weibull"
NET = "silu-50"  # the network of `bayou train` for small tables


@final
@dataclass(frozen=True)
class CensoredRows:
    """One split of a table with censored targets.

    Args:
        x: training inputs as of bayou, (N, features).
        time: times or, if censored, values that they exceed (N,).
        observed: 1 or 0 for censored (N,).
        x_test: test inputs.
        time_test: of the test rows.
        observed_test: of the test rows.
    """

    x: Floats
    time: Floats
    observed: Floats
    x_test: Floats
    time_test: Floats
    observed_test: Floats


def read_censored(settings: Mapping[str, Any], event: str) -> CensoredRows:
    """Return one split of a table, without the column of events among the inputs.

    Args:
        settings: as ``sources.Table.settings`` returns them.
        event: the column that is 1 for an observed target.
    """
    settings = {**settings, "drop": (*settings.get("drop", ()), event)}
    train, test = row_numbers(settings)
    table = read_file(Path(settings["data"]), (settings["target"],))
    times, events = (table.columns[name].values for name in (settings["target"], event))
    options = dict(settings)
    data = load(options.pop("data"), **options)
    x, x_test = (part[0].double().numpy() for part in (data.train, data.test))
    return CensoredRows(x, times[train], events[train], x_test, times[test], events[test])


def censored_nll(log_density: Floats, log_survival: Floats, observed: NDArray[Any]) -> float:
    """Return the mean of −log p(t) of observed rows and −log P(T > t) of censored ones.

    Args:
        log_density: log p(t), (N,).
        log_survival: log P(T > t), (N,).
        observed: 1 or 0 for censored (N,).
    """
    return -float(np.where(observed == 1, log_density, log_survival).mean())


def fit_bayou(rows: CensoredRows, method: str, seed: int) -> dict[str, Any]:
    """Fit a method of bayou by name with a censored Weibull, and return its scores.

    Args:
        rows: of one split.
        method: its name.
        seed: of network and fit.
    """

    def targets(times: Floats, observed: Floats) -> torch.Tensor:
        return torch.as_tensor(np.stack([times, observed], axis=1), dtype=torch.float32)

    x, x_test = (torch.as_tensor(part, dtype=torch.float32) for part in (rows.x, rows.x_test))
    y = targets(rows.time, rows.observed)
    net = nets.build(NET, tuple(x.shape[1:]), 1, seed=seed)
    options: dict[str, Any] = {"likelihood": LIKELIHOOD, "seed": seed, "progress": False}
    started = time.process_time()
    posterior = bayou.fit(net, (x, y), method, **options)
    seconds = time.process_time() - started
    predictive = posterior.predict(x_test, seed=seed)
    nll = -float(predictive.log_prob(targets(rows.time_test, rows.observed_test)).mean())
    return {"nll": nll, "seconds": round(seconds, 2), "chosen": LIKELIHOOD}


def fit_ngboost(rows: CensoredRows, seed: int) -> dict[str, Any]:
    """Fit NGBoost with a censored log-normal, and return its scores.

    Args:
        rows: of one split.
        seed: of the split for early stopping and of the model.
    """
    from ngboost import NGBSurvival
    from sklearn.model_selection import train_test_split

    places = np.arange(len(rows.time))
    options: dict[str, Any] = {"test_size": HELD_OUT, "stratify": rows.observed}
    fitted, held = train_test_split(places, random_state=seed, **options)
    started = time.process_time()
    model = NGBSurvival(random_state=seed, verbose=False)
    model.fit(
        rows.x[fitted],
        rows.time[fitted],
        rows.observed[fitted],
        X_val=rows.x[held],
        T_val=rows.time[held],
        E_val=rows.observed[held],
        early_stopping_rounds=PATIENCE,
    )
    law = model.pred_dist(rows.x_test).dist
    seconds = time.process_time() - started
    density, survival = law.logpdf(rows.time_test), law.logsf(rows.time_test)
    nll = censored_nll(density, survival, rows.observed_test)
    return {"nll": nll, "seconds": round(seconds, 2), "chosen": "log-normal"}


def describe(rows: CensoredRows, table: Table) -> dict[str, Any]:
    """Return the sizes of a table for its row.

    Args:
        rows: of one split.
        table: of the study.
    """
    return {
        "task": table.task,
        "rows": len(rows.time),
        "inputs": rows.x.shape[1],
        "scale": float(rows.time.std()),
    }
