"""``bayou reproduce implicit``: SIVI and UIVI on the three densities of their papers, and on a small network.

A density is given as the prior of one tensor without data, so that the KL of a draw is KL(q ‖ p) itself. The densities are
table 1 of Titsias & Ruiz 2019, Unbiased Implicit Variational Inference; the network is that of ``toy``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

import bayou
from bayou import rng
from bayou.diagnostics import bound_gap
from bayou.posteriors import Guided
from bayou.priors import DensityPrior
from bayou.progress import Show
from experiments import figures, plots, study, toy
from experiments.study import Fit, Found

F64 = torch.float64


def _gaussian(w: Tensor, correlation: float, variance: float = 1.0) -> Tensor:
    """log N(w; 0, variance·[[1, ρ], [ρ, 1]]): (..., 2) to (...)."""
    a, b = w[..., 0], w[..., 1]
    square = (a.square() + b.square() - 2 * correlation * a * b) / (variance * (1 - correlation**2))
    return -0.5 * square - math.log(2 * math.pi * variance * math.sqrt(1 - correlation**2))


def banana(w: Tensor) -> Tensor:
    """(w₁, w₂ + w₁² + 1) ~ N(0, [[1, .9], [.9, 1]])."""
    return _gaussian(torch.stack([w[..., 0], w[..., 1] + w[..., 0].square() + 1], -1), 0.9)


def mixture(w: Tensor) -> Tensor:
    """½·N((−2, 0), I) + ½·N((2, 0), I)."""
    away = torch.tensor([2.0, 0.0], dtype=w.dtype, device=w.device)
    return torch.logaddexp(_gaussian(w - away, 0.0), _gaussian(w + away, 0.0)) - math.log(2)


def x_shape(w: Tensor) -> Tensor:
    """½·N(0, [[2, 1.8], [1.8, 2]]) + ½·N(0, [[2, −1.8], [−1.8, 2]])."""
    return torch.logaddexp(_gaussian(w, 0.9, 2.0), _gaussian(w, -0.9, 2.0)) - math.log(2)


DENSITIES: dict[str, Callable[[Tensor], Tensor]] = {"banana": banana, "mixture": mixture, "x-shape": x_shape}
AIMS = {"banana": 0.03, "mixture": 0.01, "x-shape": 0.02}
SHAPE: dict[str, Any] = {"latent": 4, "hidden": (64, 64), "std": 0.3}
FAMILIES: dict[str, bayou.GuideSpec] = {
    "FFG": bayou.FFG(std=0.3, local=False),
    "SIVI": bayou.SIVI(draws=300, **SHAPE),
    "UIVI": bayou.UIVI(draws=300, **SHAPE),
}


class Vector(nn.Module):
    """A network that is one vector, whose posterior without data is its prior."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=F64))


def fit_density(
    spec: bayou.GuideSpec, log_density: Callable[[Tensor], Tensor], *, steps: int, samples: int = 128, lr: float = 5e-3,
    seed: int = 0,
) -> bayou.Bayesian:  # fmt: skip
    """q fitted to a density of two numbers by reverse KL: Adam, a rate that falls along a cosine."""
    with rng.isolated(seed, torch.device("cpu")):
        bnn = bayou.bayesianize(Vector(2), {"w": spec}, prior=DensityPrior(log_density))
    optimizer = torch.optim.Adam(bnn.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        kl = bnn.draw(samples, seed=rng.fold(seed, step)).kl
        optimizer.zero_grad()
        kl.backward()
        optimizer.step()
        schedule.step()
    return bnn
