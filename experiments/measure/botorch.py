"""Expected improvement on Branin with posteriors of networks, a Gaussian process and random points.

    python -m experiments.measure.botorch --seeds 3 --out experiments/results/botorch.md

Every run begins with the same 6 random points and asks for one more, 15 times. y is standardized
before every fit. The network has two layers of 30 units; none of its settings was searched for.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import bayou
from bayou.adapters.botorch import PosteriorModel

START = bayou.MAP(steps=200, lr=0.02)
FUNCTIONS = {"branin": Branin(negate=True), "hartmann3": Hartmann(3, negate=True)}


def gp(x: Tensor, y: Tensor, seed: int) -> Any:
    model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def network(method: bayou.methods.Method) -> Callable[[Tensor, Tensor, int], PosteriorModel]:
    def fit(x: Tensor, y: Tensor, seed: int) -> PosteriorModel:
        scale = Standardize(1)
        target = scale(y)[0]
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(x.shape[1], 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)
        ).double()
        prior, noise = bayou.Normal("fan_in", gain=3.0), bayou.Gaussian(0.05)
        data = (2 * x - 1, target)
        posterior = bayou.fit(
            net, data, method=method, prior=prior, likelihood=noise, seed=seed, progress=False
        )
        return PosteriorModel(
            posterior, x, 64, outcome_transform=scale.eval(), input_transform=Centered()
        )

    return fit


class Centered(nn.Module):
    """From [0, 1] to [−1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x - 1


MODELS: dict[str, Callable[[Tensor, Tensor, int], Any] | None] = {
    "random points": None,
    "GP (Matérn, BoTorch's defaults)": gp,
    "Ensemble(5)": network(bayou.Ensemble(5, START, parallel="vmap")),
    "Laplace()": network(bayou.Laplace("full", start=START)),
}


def run(
    fit: Callable[[Tensor, Tensor, int], Any] | None, function: Any, steps: int, seed: int
) -> np.ndarray:
    """The regret of the best point after each step."""
    generator, dim = torch.Generator().manual_seed(seed), function.dim
    low, high = function.bounds.double()
    x = torch.rand(6, dim, generator=generator, dtype=torch.float64)
    bounds = torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64)
    regret = []
    for step in range(steps + 1):
        y = function(low + (high - low) * x).unsqueeze(-1)
        regret.append(float(function.optimal_value - y.max()))
        if fit is None:
            new = torch.rand(1, dim, generator=generator, dtype=torch.float64)
        else:
            torch.manual_seed(1000 * seed + step)
            acquisition = qLogExpectedImprovement(fit(x, y, seed), best_f=y.max())
            new, _ = optimize_acqf(
                acquisition, bounds, q=1, num_restarts=4, raw_samples=128, options={"maxiter": 50}
            )
        x = torch.cat([x, new])
    return np.array(regret)


def main(
    seeds: int = 3, steps: int = 15, function: str = "branin", out: str | None = None
) -> list[str]:
    lines = [
        f"| {function}, regret after | 0 | {steps // 3} | {2 * steps // 3} | {steps} points | s a point |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    print(*lines, sep="\n", flush=True)
    for name, fit in MODELS.items():
        start = time.process_time()
        found = np.stack([run(fit, FUNCTIONS[function], steps, seed) for seed in range(seeds)])
        seconds = (time.process_time() - start) / seeds / steps
        cells = (
            f"{found[:, k].mean():.2f} ± {found[:, k].std(ddof=1) / seeds**0.5:.2f}"
            if seeds > 1
            else f"{found[0, k]:.2f}"
            for k in (0, steps // 3, 2 * steps // 3, steps)
        )
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:.1f} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        f"Mean ± standard error over {seeds} seeds; expected improvement (qLogEI), one point at a time; CPU seconds.",
    ]
    if out:
        Path(out).write_text("\n".join(lines) + "\n")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--function", choices=FUNCTIONS, default="branin")
    parser.add_argument("--out", metavar="FILE.md")
    warnings.simplefilter("ignore")
    main(**vars(parser.parse_args()))
