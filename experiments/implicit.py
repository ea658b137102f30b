"""SIVI and UIVI on the three densities of their papers.

A density is given as the prior of one tensor without data, so that the KL of a draw is KL(q ‖ p)
itself. The densities are table 1 of Titsias & Ruiz 2019, Unbiased Implicit Variational Inference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.core.progress import Show
from bayou.diagnostics import bound_gap
from bayou.guides import GuideSpec
from bayou.priors import DensityPrior
from experiments import figures, plots, study
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


DENSITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "banana": banana,
    "mixture": mixture,
    "x-shape": x_shape,
}
STEPS = {"banana": 3000, "mixture": 1000, "x-shape": 1500}
RATES = {"banana": 1e-2, "mixture": 5e-3, "x-shape": 5e-3}
SHAPE: dict[str, Any] = {"draws": 300, "latent": 4, "hidden": (64, 64), "std": 0.3}
FAMILIES: dict[str, GuideSpec] = {
    "FFG": bayou.MeanField(std=0.3, local=False),
    "SIVI": bayou.guides.SIVI(**SHAPE),
    "UIVI": bayou.guides.UIVI(**SHAPE),
}
LATENTS, DRAWS, SHOWN = 4000, 2000, 400
INTRODUCTION = """\
KL(q ‖ p) in nats, bracketed with 4,000 fresh latents for each of 2,000 draws (`bayou.diagnostics.bound_gap`); of
FFG it is the KL itself. The densities are those of Titsias & Ruiz (2019), the network of
noise is 4-64-64-4, K = 300, 128 draws a step."""


class Vector(nn.Module):
    """A network that is one vector, whose posterior without data is its prior."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=F64))


def fit_density(
    spec: GuideSpec, log_density: Callable[[Tensor], Tensor], *, steps: int, samples: int = 128, lr: float = 5e-3,
    seed: int = 0,
) -> bayou.posteriors.Bayesian:  # fmt: skip
    """q fitted to a density of two numbers by reverse KL: Adam, a rate that falls along a
    cosine.
    """
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


@final
@dataclass(frozen=True)
class Implicit:
    """Implicit posteriors against densities that are known."""

    name: str = "implicit"
    title: str = "Implicit posteriors: a banana, two modes, an X"

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Densities × families × seeds; one seed unless told. ``length``: steps."""
        densities = study.chosen("implicit has no data", data, list(DENSITIES))
        labels = study.chosen("implicit has no row", only, list(FAMILIES))
        return [
            Fit("implicit", one, label, seed, length or STEPS[one])
            for seed in range(seeds or 1)
            for one in densities
            for label in labels
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit a family; the bracket of its KL, and some draws for the picture."""
        if device != "cpu":
            raise ValueError(
                f"implicit fits two numbers and runs on the CPU, not on {device!r}; leave out --device"
            )
        assert fit.length is not None
        begin = time.process_time()
        spec, density = FAMILIES[fit.label], DENSITIES[fit.data]
        bnn = fit_density(spec, density, steps=fit.length, lr=RATES[fit.data], seed=fit.seed)
        seconds = time.process_time() - begin
        kl = bound_gap(bnn, draws=LATENTS, samples=samples or DRAWS, seed=1).total
        with torch.no_grad():
            shown = bnn.sample(SHOWN, seed=2)["w"]
        return {
            "bound": round(kl.bound.value, 4),
            "lower": round(kl.lower.value, 4),
            "upper": round(kl.upper.value, 4),
            "error": round(kl.upper.standard_error, 4),
            "seconds": round(seconds, 1),
            "draws": [[round(value, 2) for value in row] for row in shown.tolist()],
        }

    def render(self, found: Found) -> str:
        """The table: one line for a family and a density, means over seeds."""
        lines = [
            f"# {self.title}",
            "",
            INTRODUCTION,
            "",
            "| density | family | KL, from | to | ± of a run | training | seeds | steps | processor s |",
            f"|---|---|{'---:|' * 7}",
        ]
        for data in DENSITIES:
            for label in FAMILIES:
                rows = [
                    row for row in found["rows"] if (row["data"], row["label"]) == (data, label)
                ]
                if rows:
                    numbers = [
                        study.cell([row[key] for row in rows], 4)
                        for key in ("lower", "upper", "error", "bound")
                    ]
                    seconds = sum(row["seconds"] for row in rows) / len(rows)
                    last = [str(len(rows)), f"{rows[0]['length']:,}", f"{seconds:.0f}"]
                    lines.append(f"| {' | '.join([data, label, *numbers, *last])} |")
        return "\n".join(
            [*lines, "", "![Draws of every family](implicit.png)", "", study.made_by(found), ""]
        )

    def draw(self, found: Found, path: Path) -> bool:
        """Draws of each family (its first seed) over the lines of the density."""
        import matplotlib

        rows = {(row["data"], row["label"]): row for row in reversed(found["rows"])}
        labels = [label for label in FAMILIES if any(key[1] == label for key in rows)]
        if not labels:
            return False
        line = torch.linspace(-6, 6, 200, dtype=F64)
        y, x = torch.meshgrid(line, line, indexing="ij")
        with matplotlib.rc_context(plots.STYLE | {"font.size": 9}):
            figure = plots.canvas(2.4 * len(DENSITIES), 2.3 * len(labels) + 0.3)
            axes = figure.subplots(len(labels), len(DENSITIES), squeeze=False)
            for axis, (label, data) in zip(
                axes.flat, [(a, b) for a in labels for b in DENSITIES], strict=True
            ):
                density = DENSITIES[data](torch.stack([x, y], -1)).exp()
                levels = [share * float(density.max()) for share in (0.05, 0.2, 0.4, 0.6, 0.8)]
                axis.contour(x, y, density, levels=levels, colors=figures.COLORS[4], linewidths=0.7)
                if (data, label) in rows:
                    points = torch.tensor(rows[data, label]["draws"])
                    axis.plot(
                        points[:, 0], points[:, 1], ".", color=figures.COLORS[2], ms=2, alpha=0.6
                    )
                axis.set(
                    xlim=(-4.5, 4.5),
                    ylim=(-6 if data == "banana" else -4.5, 4.5 if data != "banana" else 3),
                )
                axis.set(title=f"{label}, {data}", xticks=[], yticks=[])
        plots.write(figure, path)
        return True
