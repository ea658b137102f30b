"""Methods by name on tables of 2,000 to 500,000 rows, beside gradient boosting and a plain network.

python experiments/measure/large.py --write [--jobs 8] [--data <folder with the UCI archive>]

Every row has a process of its own with one thread. HistGradientBoostingRegressor and MLPRegressor
(one hidden layer of 50 units, early stopping) have their defaults; their Gaussian noise is the
error on a tenth of the training rows that is held out for it. Methods by name have the defaults of
BayesRegressor, and choose their noise themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parents[1] / "results" / "large.md"
TABLES = ("friedman1 2,000", "kin8nm", "protein", "friedman1 20,000", "friedman1 500,000")
METHODS = ("map", "laplace", "ensemble", "ffg", "mnf", "ivon", "sgld")
PEERS = ("boosting", "plain network")
FRESH = 5000  # test rows of made tables: coverage is known to .004
LEVEL, QUANTILE = 0.9, 1.6448536  # of central intervals

Arrays = tuple[np.ndarray, np.ndarray]


def table(name: str, root: str | None) -> tuple[Arrays, Arrays]:
    """Training and test rows."""
    if not name.startswith("friedman1"):
        from bayou.data import load

        data = load(name, root=root)
        train, test = (
            (x.double().numpy(), y.double().numpy().ravel()) for x, y in (data.train, data.test)
        )
        return train, test
    from sklearn.datasets import make_friedman1

    rows = int(name.split()[1].replace(",", ""))
    X, y = make_friedman1(rows + FRESH, n_features=10, noise=1.0, random_state=0)
    return (X[:rows], y[:rows]), (X[rows:], y[rows:])


def run(name: str, method: str, root: str | None) -> dict[str, float]:
    """Seconds, RMSE, NLL, coverage of 90 % intervals, MiB of one row."""
    import torch

    torch.set_num_threads(1)
    (X, y), (X_test, y_test) = table(name, root)
    mean, scale = y.mean(), y.std()
    before, start = peak(), time.process_time()
    if method in PEERS:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from sklearn.neural_network import MLPRegressor
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        own = HistGradientBoostingRegressor(random_state=0)
        if method == "plain network":
            own = make_pipeline(
                StandardScaler(),
                MLPRegressor(hidden_layer_sizes=(50,), early_stopping=True, random_state=0),
            )
        held = np.random.default_rng(0).permutation(len(y)) < len(y) // 10
        own.fit(X[~held], (y[~held] - mean) / scale)
        noise = math.sqrt(np.mean((own.predict(X[held]) * scale + mean - y[held]) ** 2))
        middle = own.predict(X_test) * scale + mean
        error = y_test - middle
        nll = float(
            np.mean(0.5 * (error / noise) ** 2 + math.log(noise) + 0.5 * math.log(2 * math.pi))
        )
        covered = float(np.mean(np.abs(error) <= QUANTILE * noise))
    else:
        from bayou.adapters.sklearn import BayesRegressor

        model = BayesRegressor(method, random_state=0).fit(X, y)
        p = model.predictive(X_test)
        middle = p.mean.numpy().ravel()
        low, high = (bound.numpy().ravel() for bound in p.interval(LEVEL))
        covered = float(np.mean((low <= y_test) & (y_test <= high)))
        nll = -float(
            p.log_prob(torch.as_tensor(y_test, dtype=p.mean.dtype).reshape(p.mean.shape)).mean()
        )
    rmse = float(np.sqrt(np.mean((y_test - middle) ** 2)))
    return {
        "seconds": time.process_time() - start, "rmse": rmse, "nll": nll, "covered": covered, "mib": peak() - before,
    }  # fmt: skip


def peak() -> float:
    """The most memory this process has held, in MiB (Linux)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def job(name: str, method: str, root: str | None, limit: float) -> dict[str, float] | str:
    command = [sys.executable, __file__, "--row", name, method] + (["--data", root] if root else [])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"not done after {limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1][:100]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tables", default="|".join(TABLES), help="names, separated by |")
    parser.add_argument("--methods", default=",".join((*PEERS, *METHODS)))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for a row")
    parser.add_argument("--data", help="the folder with the UCI archive")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(run(*options.row, options.data)))
        return
    pairs = [
        (name, method)
        for name in options.tables.split("|")
        for method in options.methods.split(",")
    ]
    lines = [
        "| table | method | processor seconds | RMSE | NLL | 90 % covers | MiB |",
        "|---|---|" + "---:|" * 5,
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(job, name, method, options.data, options.limit) for name, method in pairs
        ]
        for (name, method), each in zip(pairs, jobs, strict=True):
            found = each.result()
            cells = found if isinstance(found, str) else (
                f"{found['seconds']:.0f} | {found['rmse']:.4g} | {found['nll']:.3f} | {found['covered']:.3f} | "
                f"{found['mib']:.0f}"
            )  # fmt: skip
            lines.append(f"| {name} | {method} | {cells} |")
            print(lines[-1], flush=True)
    if options.write:
        command = "python experiments/measure/large.py " + " ".join(sys.argv[1:])
        head = f"# Larger tables\n\n`{command}`, {date.today()}, {platform.machine()}, one thread a row.\n\n"
        RESULTS.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
