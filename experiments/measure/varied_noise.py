"""Noise that depends on x, on generated tables: one noise for all rows, and ``wide-noise``.

python -m experiments.measure.varied_noise                       # 300 and 1,000 rows, wide, wide-noise
python -m experiments.measure.varied_noise 3000 --methods tabm tabm-noise

A line has the NLL of 2,000 fresh rows under the true density and by each method, the fraction that
its 90 % intervals cover, and processor seconds.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import bayou
from bayou import metrics

Floats = NDArray[np.float64]
FRESH_ROWS = 2000


def growing(x: Floats) -> tuple[Floats, Floats]:
    """Return mean and standard deviation exp(−2.5 + 1.5·x₄) at rows of six inputs."""
    mean = np.cos(3 * x[:, 0]) + x[:, 1] * x[:, 2]
    return mean, np.exp(-2.5 + 1.5 * x[:, 3])


def proportional(x: Floats) -> tuple[Floats, Floats]:
    """Return a positive mean, and 3 % of it."""
    mean = np.exp(1.5 * (x[:, 0] + 1) + 0.5 * (x[:, 1] + 1))
    return mean, 0.03 * mean


def absolute(x: Floats) -> tuple[Floats, Floats]:
    """Return a mean, and a standard deviation with an edge at x₃ = .3."""
    mean = np.sin(2 * x[:, 0]) + x[:, 1] ** 2
    return mean, 0.05 + 0.4 * np.abs(x[:, 2] - 0.3)


def constant(x: Floats) -> tuple[Floats, Floats]:
    """Return a mean, and a standard deviation of .3."""
    mean = np.cos(5 * x[:, 0]) * x[:, 1] + np.abs(x[:, 2])
    return mean, np.full(len(x), 0.3)


TABLES: dict[str, Callable[[Floats], tuple[Floats, Floats]]] = {
    "exp(−2.5 + 1.5·x₄)": growing,
    "3 % of the mean": proportional,
    ".05 + .4·|x₃ − .3|": absolute,
    ".3": constant,
}


def main() -> None:
    """Print a line for each table and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[300, 1000])
    parser.add_argument("--methods", nargs="*", default=["wide", "wide-noise"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for title, law in TABLES.items():
        for count in options.rows:
            print(measure(title, law, count, options.methods), flush=True)


def measure(
    title: str, law: Callable[[Floats], tuple[Floats, Floats]], count: int, methods: list[str]
) -> str:
    """Return the line of a table.

    Args:
        title: of the noise.
        law: mean and standard deviation at rows of six inputs.
        count: training rows.
        methods: names.
    """
    generator = np.random.default_rng((count, 45))
    x = generator.uniform(-1, 1, (count + FRESH_ROWS, 6))
    mean, std = law(x)
    y = mean + std * generator.standard_normal(len(x))
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y, dtype=torch.float32).unsqueeze(1)
    fresh = slice(count, None)
    z = (y[fresh] - mean[fresh]) / std[fresh]
    truth = float(np.mean(0.5 * math.log(2 * math.pi) + np.log(std[fresh]) + 0.5 * z**2))
    cells = [title, f"{count:,} rows", f"true {truth:.3f}"]
    for name in methods:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 1))
        started = time.process_time()
        data = inputs[:count], targets[:count]
        posterior = bayou.fit(net, data, name, progress=False, seed=0)
        p = posterior.predict(inputs[fresh])
        low, high = p.interval(0.9)
        covered = ((targets[fresh] >= low) & (targets[fresh] <= high)).double().mean()
        seconds = time.process_time() - started
        nll = metrics.nll(p, targets[fresh])
        cells.append(f"{name} {nll:.3f}, covers {float(covered):.3f}, {seconds:.0f} s")
    return "; ".join(cells)


if __name__ == "__main__":
    main()
