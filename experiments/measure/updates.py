"""How long an update by new rows takes beside a new fit, and how far the two predictions are.

    python -m experiments.measure.updates            # a minute on a CPU
    python -m experiments.measure.updates --small    # a trial

A network of two layers of 50 units on 1,000 rows of a smooth function of 8 columns with Gaussian
noise. Times are medians of calls in milliseconds of one CPU core (OMP_NUM_THREADS=1), whatever
else the machine does; the refit is the same method from the same initial weights with all rows. NLL
is of 500 test rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bayou

NOISE = 0.1
COLUMNS = 8
NEW = (1, 100)  # rows of an update


def data(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of a smooth function, with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, COLUMNS, generator=generator)
    y = torch.sin(x[:, :1]) + 0.3 * x[:, 1:2] * x[:, 2:3]
    return x, y + NOISE * torch.randn(rows, 1, generator=generator)


def network() -> nn.Module:
    """Two layers of 50 units, the same each time."""
    torch.manual_seed(0)
    layers = nn.Linear(COLUMNS, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 1)
    return nn.Sequential(*layers)


def methods(steps: int) -> dict[str, Any]:
    """The methods by the labels of their rows."""
    start = bayou.MAP(steps=steps)
    return {
        "Laplace, last layer, full": bayou.Laplace("full", where="last", start=start),
        "Laplace, last layer, Kronecker": bayou.Laplace("kronecker", where="last", start=start),
        "VBLL": bayou.methods.VBLL(steps=steps),
        "VI, mean field, all weights": bayou.VI(steps=steps),
        "Laplace, all weights, full": bayou.Laplace("full", start=start),
        "Laplace, all weights, Kronecker": bayou.Laplace("kronecker", start=start),
        "Laplace, all weights, diagonal": bayou.Laplace("diagonal", start=start),
        "wide": "wide",
    }


def median(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call in milliseconds of the CPU, after one call that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        times.append(1000 * (time.process_time() - begin))
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few rows and steps")
    small = parser.parse_args().small
    warnings.simplefilter("ignore")
    rows, steps = (100, 50) if small else (1000, 1000)
    x, y = data(rows + max(NEW) + 500)
    test = x[-500:], y[-500:]
    old = x[:rows], y[:rows]
    print(
        "| posterior | fit, ms | update by 1 row, ms | by 100 rows, ms | NLL before | after | refit |"
    )
    print("|---|---|---|---|---|---|---|")
    for label, method in methods(steps).items():
        options = {} if method == "wide" else {"prior": bayou.Normal("fan_in")}
        likelihood = bayou.Gaussian(NOISE)
        options |= {"likelihood": likelihood} if method != "wide" else {}

        def fit(count: int) -> Any:
            pair = x[:count], y[:count]
            return bayou.fit(network(), pair, method, progress=False, **options)  # noqa: B023

        begin = time.process_time()
        posterior = fit(rows)
        seconds = 1000 * (time.process_time() - begin)
        posterior.predict(old[0][:1])
        times = []
        for count in NEW:
            new = x[rows : rows + count], y[rows : rows + count]
            times.append(median(lambda: posterior.update(new), 3 if small else 9))  # noqa: B023
        updated = posterior.update((x[rows : rows + 100], y[rows : rows + 100]))
        scores = [
            float(-p.predict(test[0]).log_prob(test[1]).mean())
            for p in (posterior, updated, fit(rows + 100))
        ]
        numbers = [f"{seconds:,.0f}", *(f"{value:.1f}" for value in times)]
        print(
            "|",
            " | ".join([label, *numbers, *(f"{score:.3f}" for score in scores)]),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
