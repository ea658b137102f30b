"""Bayesian optimization with the posterior of a network: BoTorch asks where the next experiment is worth most.

An experiment costs; fifteen are allowed. After each, an ensemble is fitted to what is known, its functions become a
BoTorch model, and expected improvement picks the next point: where they promise much, or do not agree.

    pip install "bayou[botorch]"
    python examples/optimize.py --plot optimize.png
"""

from __future__ import annotations

import argparse
import warnings

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from torch import Tensor, nn

import bayou
from bayou.adapters.botorch import PosteriorModel


def experiment(x: Tensor) -> Tensor:
    """Unknown to the optimizer: Branin's function on the unit square, turned over; its top is −0.398."""
    a, b = 15 * x[:, :1] - 5, 15 * x[:, 1:]
    return -((b - 0.1292 * a.square() + 1.5915 * a - 6).square() + 9.602 * torch.cos(a) + 10)


def fitted(x: Tensor, y: Tensor, steps: int) -> PosteriorModel:
    """An ensemble in standardized units; the model is in those of y again."""
    scale = Standardize(1)
    standard, _ = scale(y)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    posterior = bayou.fit(
        net,
        (x, standard),
        method=bayou.Ensemble(5, bayou.MAP(steps=steps, lr=0.02), parallel="vmap"),
        likelihood=bayou.Gaussian(0.05),
        prior=bayou.Normal("fan_in", gain=3.0),
        progress=False,
    )
    return PosteriorModel(posterior, x, outcome_transform=scale.eval())


def main(steps: int = 200, first: int = 6, then: int = 9, plot: str | None = None) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(first, 2, generator=generator, dtype=torch.float64)
    y = experiment(x)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    best = [float(y.max())]
    print(f"{'experiment':>10} {'x':>12} {'y':>9} {'best':>9}")
    for _ in range(then):
        torch.manual_seed(len(x))  # BoTorch draws its starting points
        acquisition = qLogExpectedImprovement(fitted(x, y, steps), best_f=y.max())
        new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=128, options={"maxiter": 50})
        x, y = torch.cat([x, new]), torch.cat([y, experiment(new)])
        best.append(float(y.max()))
        place = ", ".join(f"{value:.2f}" for value in new[0].tolist())
        print(f"{len(x):>10} {place:>12} {float(y[-1]):9.2f} {best[-1]:9.2f}")
    if plot:
        from matplotlib.figure import Figure

        grid = torch.cartesian_prod(*[torch.linspace(0, 1, 60, dtype=torch.float64)] * 2)
        figure = Figure(figsize=(5, 4), layout="compressed")
        axis = figure.subplots()
        axis.tricontourf(*grid.T.numpy(), experiment(grid)[:, 0].numpy(), levels=30)
        axis.scatter(*x[:first].T.numpy(), color="white", label="given")
        axis.scatter(*x[first:].T.numpy(), color="red", label="asked for")
        axis.legend()
        figure.savefig(plot, dpi=130)
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of BoTorch, about its own optimizer
    main(options.steps, plot=options.plot)
