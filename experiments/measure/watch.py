"""How often ``bayou.diagnostics.watch`` raises a false alarm, and how often it finds a shift.

python -m experiments.measure.watch --sets 100

Ten inputs, 1,000 training rows, 300 held-out rows and 300 new rows, drawn anew for every set. The
truth is y = x·w + c·(x_1² − 1) + noise, of which the posterior knows x·w alone: with c > 0 its
predictions are too low where |x_1| is large. The exit code is 0.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

import bayou
from bayou.core import rng
from bayou.diagnostics import ReferenceRows, watch
from bayou.likelihoods.predictive import Predictive

COLUMNS = 10
DRAWS = 20
NOISE = 0.5
Rows = tuple[Tensor, Tensor]


class LinearPosterior:
    """w ~ N(w0, 0.02²), with a noise that has the variance of the residuals."""

    def __init__(self, weights: Tensor, misfit: float) -> None:
        std = math.sqrt(NOISE**2 + 2 * misfit**2)
        self.weights = weights
        self.likelihood = bayou.Gaussian(std).bind(dtype=torch.float64)

    def predict(self, x: Tensor, samples: int | None = None, *, seed: rng.Seed = 0) -> Predictive:
        noise = rng.normal(DRAWS, self.weights.shape, self.weights, rng.fold(seed, "weights"))
        outputs = x @ (self.weights + 0.02 * noise).T
        return Predictive(self.likelihood, outputs.T[..., None])


class World:
    """Draws rows from the truth."""

    def __init__(self, seed: int, misfit: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = torch.linspace(-1, 1, COLUMNS, dtype=torch.float64)
        self.misfit = misfit

    def inputs(self, rows: int) -> Tensor:
        return torch.randn(rows, COLUMNS, generator=self.generator, dtype=torch.float64)

    def targets(self, x: Tensor, weights: Tensor | None = None, noise: float = NOISE) -> Tensor:
        mean = x @ (self.weights if weights is None else weights)
        mean = mean + self.misfit * (x[:, 0].square() - 1)
        draws = torch.randn(len(x), generator=self.generator, dtype=torch.float64)
        return (mean + noise * draws)[:, None]


def nothing(world: World, x: Tensor) -> Rows:
    return x, world.targets(x)


def mean_of_one_column(world: World, x: Tensor) -> Rows:
    x[:, 3] += 0.5
    return x, world.targets(x)


def mean_of_a_misfit_column(world: World, x: Tensor) -> Rows:
    x[:, 0] += 1.0
    return x, world.targets(x)


def correlation(world: World, x: Tensor) -> Rows:
    x[:, 1] = 0.5 * x[:, 0] + math.sqrt(0.75) * x[:, 1]
    return x, world.targets(x)


def units(world: World, x: Tensor) -> Rows:
    y = world.targets(x)
    x[:, 2] *= 1000
    return x, y


def doubled_noise(world: World, x: Tensor) -> Rows:
    return x, world.targets(x, noise=2 * NOISE)


def slope(world: World, x: Tensor) -> Rows:
    weights = world.weights.clone()
    weights[0] += 0.3
    return x, world.targets(x, weights)


def constant(world: World, x: Tensor) -> Rows:
    return x, world.targets(x) + 0.2


CASES: dict[str, tuple[Callable[[World, Tensor], Rows], float, int]] = {
    "nothing changed": (nothing, 0.0, 1),
    "nothing changed, posterior misfit": (nothing, 0.3, 1),
    "mean +1 std of a column, posterior misfit there": (mean_of_a_misfit_column, 0.3, 2),
    "mean +0.5 std of one column": (mean_of_one_column, 0.0, 5),
    "correlation 0.5 of two columns": (correlation, 0.0, 5),
    "a column in other units": (units, 0.0, 5),
    "noise doubled": (doubled_noise, 0.0, 5),
    "a slope changed by 0.3": (slope, 0.0, 5),
    "y + 0.2": (constant, 0.0, 5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--alpha", type=float, default=0.01)
    options = parser.parse_args()
    print("| change | sets | as expected | inputs have shifted | the relation has changed |")
    print("|---|---|---|---|---|")
    start = time.perf_counter()
    total = 0
    for name, (change, misfit, divisor) in CASES.items():
        verdicts: Counter[str] = Counter()
        sets = max(options.sets // divisor, 1)
        for seed in range(sets):
            world = World(seed, misfit)
            posterior = LinearPosterior(world.weights, misfit)
            held_x = world.inputs(300)
            held_out = (held_x, world.targets(held_x))
            reference = ReferenceRows.of(world.inputs(1000), held_out)
            x, y = change(world, world.inputs(300))
            report = watch(posterior, reference, x, y, alpha=options.alpha, seed=seed)
            verdicts[report.verdict] += 1
        total += sets
        counts = [
            verdicts[v] for v in ("as expected", "inputs have shifted", "the relation has changed")
        ]
        print(f"| {name} | {sets} | {' | '.join(map(str, counts))} |", flush=True)
    print(f"{(time.perf_counter() - start) / total:.2f} s for a set")


if __name__ == "__main__":
    main()
