"""Every method beside HMC, on the posterior of a 1-20-1 tanh network and
20 points of a cubic.

Known noise, prior N(0, 1) on all 61 weights, float64. The reference was made by other software
(``tests/reference/make_cubic_hmc.py``); ``cubic_hmc.json`` beside this file is the part that is
needed. The width of a method is the standard deviation of f(x) over its draws, without noise, as a
ratio to HMC's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

import bayou
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.core.progress import Show
from bayou.inference.method import Method
from bayou.posteriors import Posterior
from experiments import figures, plots, study
from experiments.study import Fit, Found

REFERENCE = Path(__file__).with_name("cubic_hmc.json")
POINTS = (-6.0, -4.0, 0.0, 4.0, 6.0)
DRAWS = 2000
INTRODUCTION = """\
A 1-20-1 tanh network, 20 points of a cubic, noise known, prior N(0, 1) on all 61 weights
(`tests/reference/make_cubic_hmc.py` states the problem and made the reference with other software). The
columns −6 … 6 are the standard deviation of f(x) over the draws of a method, divided by HMC's: 1 is right,
below 1 is overconfident; the data lie in [−4, 4]. Mean error: root mean square of (mean − HMC's mean)/(HMC's
sd) over a grid inside and outside the data. `cubic.md` has every variational family, with its ELBO."""


@final
@dataclass(frozen=True)
class Problem:
    """The target, in scaled units, and what HMC says about it on a grid, in original units."""

    u: Tensor
    t: Tensor
    noise: float
    x_scale: float
    y_scale: float
    x: Tensor
    mean: Tensor
    sd: Tensor

    @staticmethod
    @cache
    def load() -> Problem:
        """From the file of the package."""
        found = json.loads(REFERENCE.read_text(encoding="utf-8"))
        x_scale, y_scale = found["x_scale"], found["y_scale"]
        u, t = (
            torch.tensor(found["data"][name], dtype=torch.float64).unsqueeze(1) / scale
            for name, scale in (("x", x_scale), ("y", y_scale))
        )
        x, mean, sd = (
            torch.tensor(found["hmc"][name], dtype=torch.float64) for name in ("x", "mean", "sd")
        )
        return Problem(u, t, found["noise"], x_scale, y_scale, x, mean, sd)

    def fit(self, method: Method, net: nn.Module, seed: int = 0, show: Show = False) -> Posterior:
        """The posterior that a method gives."""
        likelihood, prior = bayou.Gaussian(self.noise), bayou.Normal(1.0)
        options: dict[str, Any] = {
            "likelihood": likelihood,
            "prior": prior,
            "seed": seed,
            "progress": show,
        }
        return raise_if_interrupted(bayou.fit(net, (self.u, self.t), method=method, **options))

    def functions(self, posterior: Posterior, draws: int) -> Tensor:
        """f on the grid for draws of the posterior, original units: (draws, len(x))."""
        predictive = posterior.predict((self.x / self.x_scale).unsqueeze(1), samples=draws, seed=1)
        return self.y_scale * predictive.means.squeeze(-1)

    def compare(self, mean: Tensor, sd: Tensor, points: Sequence[float] = POINTS) -> dict[str, Any]:
        """Ratios of standard deviations to HMC's, and the error of the mean function in units of
        them.
        """
        at = [self.x.tolist().index(point) for point in points]
        error, inside = (mean - self.mean) / self.sd, self.x.abs() <= 4
        return {
            "ratio": [round(float(sd[i] / self.sd[i]), 4) for i in at],
            "mean_error_inside": round(float(error[inside].square().mean().sqrt()), 4),
            "mean_error_outside": round(float(error[~inside].square().mean().sqrt()), 4),
        }


def network(seed: int = 0, between: nn.Module | None = None) -> nn.Sequential:
    """1-20-1 with tanh units, and perhaps one more layer between the hidden units and the
    output.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, last = nn.Linear(1, 20), nn.Linear(20, 1)
    return nn.Sequential(first, nn.Tanh(), *([] if between is None else [between]), last).double()


@final
@dataclass(frozen=True)
class Entry:
    """A method, how it goes with this problem, and the layer its network has between hidden units
    and output.
    """

    method: Method
    note: str = ""
    between: Callable[[], nn.Module] | None = None

    def net(self, seed: int) -> nn.Module:
        """The network with the weights of a seed."""
        return network(seed, None if self.between is None else self.between())


def vi(
    guide: Any, steps: int = 2000, lr: float = 0.02, scale_lr: float = 0.05, samples: int = 32
) -> bayou.VI:
    """The whole data in every step, and a rate that falls to 0 along a cosine."""
    return bayou.VI(
        guide, steps=steps, lr=lr, scale_lr=scale_lr, samples=samples, schedule="cosine"
    )


def annealed(of: bayou.VI, temperatures: int = 500) -> bayou.Annealed:
    """Long ways, since 61 weights cost little."""
    return bayou.Annealed(of, draws=500, temperatures=temperatures, adapt=True)


MAP = bayou.MAP(steps=3000, lr=0.02, schedule="cosine")
CHAINS: dict[str, Any] = {"start": MAP, "chains": 8}
LONG: dict[str, Any] = CHAINS | {"steps": 40_000, "draws": 250}
METHODS: dict[str, Entry] = {
    "NUTS": Entry(
        bayou.NUTS(draws=250, warmup=250, max_depth=10, **CHAINS), "8 chains of 250 draws"
    ),
    "HMC": Entry(
        bayou.HMC(draws=250, warmup=250, leapfrogs=100, **CHAINS), "8 chains of 250 draws"
    ),
    "Annealed, Inducing": Entry(annealed(vi(bayou.Inducing(20)), 100), "500 draws"),
    "Annealed, MNF": Entry(annealed(vi(bayou.MNF(std=0.05))), "500 draws, 500 temperatures"),
    "Annealed, FFG": Entry(annealed(vi(bayou.MeanField(std=0.05), lr=0.05)), "the same"),
    "SGHMC": Entry(bayou.SGHMC(lr=2e-5, **LONG), "40,000 steps, full batch"),
    "SGLD": Entry(bayou.SGLD(lr=2e-5, **LONG), "40,000 steps, full batch"),
    "SGLD, cyclical": Entry(
        bayou.SGLD(lr=4e-5, schedule=bayou.methods.Cyclical(cycles=8), **LONG), "8 cycles"
    ),
    "PSGLD": Entry(bayou.PSGLD(lr=2e-6, **LONG), "40,000 steps, full batch"),
    "Ensemble(10)": Entry(bayou.Ensemble(10, of=MAP, parallel="vmap"), "of MAP"),
    "Laplace, full": Entry(bayou.Laplace("full", start=MAP), "linearized"),
    "Laplace, full, sampled": Entry(
        bayou.Laplace("full", start=MAP, predictive="sampled"),
        "the same Gaussian without linearizing",
    ),
    "Laplace, kronecker": Entry(bayou.Laplace("kronecker", start=MAP), "linearized"),
    "Laplace, diagonal": Entry(bayou.Laplace("diagonal", start=MAP), "linearized"),
    "Laplace, last layer": Entry(bayou.Laplace("full", where="2.*", start=MAP), "linearized"),
    "VI(JointFlow)": Entry(
        vi(bayou.JointFlow(std=0.02), steps=10_000, lr=0.005, scale_lr=0.01, samples=8),
        "IAF and a full linear map; not converged: a run of 4,000 steps ended at −77.2",
    ),
    "VI(LowRank)": Entry(
        vi(bayou.LowRank(rank=16, std=0.02), steps=12_000, lr=0.005, scale_lr=0.01, samples=16),
        "rank 16",
    ),
    "VI(MNF)": Entry(vi(bayou.MNF(std=0.05)), "gated flow, conjugate r"),
    "VI(FFG)": Entry(vi(bayou.MeanField(std=0.05), lr=0.05), "local reparameterization"),
    "IVON": Entry(
        bayou.IVON(steps=6000, samples=8, hessian=50.0, lr=0.02, schedule="cosine"),
        "the family of VI(FFG); it ended elsewhere, not looked into",
    ),
    "SWAG": Entry(
        bayou.SWAG(start=replace(MAP, batch_size=5), steps=8000, every=40, lr=4e-4, batch_size=5),
        "batches of 5; lr sets the width",
    ),
    "MCDropout": Entry(
        bayou.MCDropout(start=MAP), "p = 0.05 on hidden units", lambda: nn.Dropout(0.05)
    ),
    "MAP": Entry(MAP, "a point"),
    "MLE": Entry(bayou.MLE(steps=3000, lr=0.02, schedule="cosine"), "a point"),
}


@final
@dataclass(frozen=True)
class Toy:
    """Experiment 1: toy regression with uncertainty bands, all methods, HMC beside."""

    name: str = "toy"
    title: str = "Toy regression with uncertainty bands: every method beside HMC"

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Methods × seeds; one seed unless told."""
        if length is not None:
            raise ValueError("every method of toy has a length of its own; leave out --length")
        study.chosen("toy has no data", data, ("cubic",))
        labels = study.chosen("toy has no row", only, list(METHODS))
        return [Fit("toy", "cubic", label, seed) for seed in range(seeds or 1) for label in labels]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit a method; ratios, errors of the mean, and both functions on the grid."""
        if device != "cpu":
            raise ValueError(
                f"toy has 61 weights and runs on the CPU, not on {device!r}; leave out --device"
            )
        problem, entry = Problem.load(), METHODS[fit.label]
        start = time.process_time()
        posterior = problem.fit(entry.method, entry.net(fit.seed), fit.seed, show)
        seconds = time.process_time() - start
        count = min(samples or DRAWS, posterior.draws or DRAWS)
        f = problem.functions(posterior, count)
        mean, sd = f.mean(0), f.std(0, correction=0)
        return problem.compare(mean, sd) | {
            "draws": count,
            "seconds": round(seconds, 1),
            "mean": [round(value, 3) for value in mean.tolist()],
            "sd": [round(value, 3) for value in sd.tolist()],
        }

    def render(self, found: Found) -> str:
        """The table: means over seeds, ± one standard error where there are several."""
        problem = Problem.load()
        sds = dict(zip(problem.x.tolist(), problem.sd.tolist(), strict=True))
        heads = [f"{point:+.0f}" if point else "0" for point in POINTS]
        lines = [
            f"# {self.title}",
            "",
            INTRODUCTION,
            "",
            f"| method | {' | '.join(heads)} | mean error inside, outside | seeds | processor s | note |",
            f"|---|{'---:|' * (len(heads) + 3)}---|",
            f"| HMC, sd itself | {' | '.join(f'{sds[point]:.2f}' for point in POINTS)} | | | | the reference |",
        ]
        for label, entry in METHODS.items():
            rows = [row for row in found["rows"] if row["label"] == label]
            if rows:
                ratios = [
                    study.cell(values, 2)
                    for values in zip(*(row["ratio"] for row in rows), strict=True)
                ]
                errors = [
                    study.cell([row[f"mean_error_{side}"] for row in rows], 2)
                    for side in ("inside", "outside")
                ]
                seconds = sum(row["seconds"] for row in rows) / len(rows)
                parts = [
                    label,
                    *ratios,
                    ", ".join(errors),
                    str(len(rows)),
                    f"{seconds:.0f}",
                    entry.note,
                ]
                lines.append(f"| {' | '.join(parts)} |")
        lines += [
            "",
            "![Bands of every method, HMC's beside](toy.png)",
            "",
            f"float64, the settings of `METHODS` in `experiments.toy`; up to {DRAWS:,} function draws for the standard",
            "deviations (2 % Monte-Carlo error).",
            "",
            study.made_by(found),
            "",
        ]
        return "\n".join(lines)

    def draw(self, found: Found, path: Path) -> bool:
        """Mean and two standard deviations of every method (its first seed), HMC's as dashed
        lines.
        """
        import matplotlib

        rows: dict[str, Any] = {}
        for row in sorted(found["rows"], key=lambda row: row["seed"]):
            rows.setdefault(row["label"], row)
        shown = [label for label in METHODS if label in rows]
        if not shown:
            return False
        columns = min(6, len(shown))
        height = -(-len(shown) // columns)
        with matplotlib.rc_context(plots.STYLE | {"font.size": 8.5, "axes.titlesize": 10}):
            figure = plots.canvas(2.3 * columns, 1.95 * height + 0.4)
            axes = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
            for axis in axes.flat[len(shown) :]:
                axis.set_axis_off()
            for axis, label in zip(axes.flat, shown, strict=False):
                _bands(axis, Problem.load(), rows[label])
                axis.set_title(label)
            for axis in axes.flat[max(len(shown) - columns, 0) : len(shown)]:
                axis.tick_params(labelbottom=True)
            handles, names = axes.flat[0].get_legend_handles_labels()
            place = (
                {"loc": "outside lower right", "ncols": len(names)}
                if columns > 3
                else {"loc": "outside lower center"}
            )
            figure.legend(handles, names, frameon=False, fontsize=9, **place)
        plots.write(figure, path)
        return True


def _bands(axis: Any, problem: Problem, row: dict[str, Any]) -> None:
    """One method, HMC and the data."""
    x, color = problem.x.numpy(), figures.COLORS[2]
    mean, sd = (torch.tensor(row[name]).numpy() for name in ("mean", "sd"))
    axis.fill_between(
        x,
        mean - 2 * sd,
        mean + 2 * sd,
        color=color,
        alpha=0.3,
        lw=0,
        label="± 2 standard deviations of f",
    )
    axis.plot(x, mean, color=color, lw=1.3, label="mean")
    for side in (-2, 2):
        edge = (problem.mean + side * problem.sd).numpy()
        axis.plot(
            x,
            edge,
            color=figures.COLORS[4],
            lw=0.9,
            ls=(0, (3, 2)),
            label="HMC, ± 2" if side > 0 else None,
        )
    points = problem.u * problem.x_scale, problem.t * problem.y_scale
    axis.plot(
        *(value.flatten().numpy() for value in points), ".", color="#1d2129", ms=2.5, label="data"
    )
    axis.set(xlim=(-6, 6), ylim=(-190, 190), xticks=(-6, -4, 0, 4, 6), yticks=(-100, 0, 100))
    figures.plain(axis, grid=False)
