"""Every method beside HMC: the posterior of a 1-20-1 tanh network on a cubic, as a table and a picture.

    python benchmarks/methods.py --write                  # all methods, one after the other
    python benchmarks/methods.py --write --only SWAG MAP  # some of them again; the rest of the table is kept
    python benchmarks/methods.py --draw                   # the picture again, from the committed numbers

The target and its HMC reference are those of tests/reference/cubic_hmc.json, the problem is that of cubic.py. The width
of a method is the standard deviation of f(x) over its draws, without noise, as a ratio to HMC's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayou
from bayou.methods.method import Method

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cubic import FAMILIES, Problem, network  # noqa: E402

NUMBERS, TABLE = HERE / "results" / "methods.json", HERE / "results" / "methods.md"
PICTURE = HERE.parent / "docs" / "pictures" / "methods.png"
POINTS = (-6.0, -4.0, 0.0, 4.0, 6.0)
DRAWS = 2000
MAP = bayou.MAP(steps=3000, lr=0.02, schedule="cosine")


def with_layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The network with one more layer between the hidden units and the output."""

    def build() -> nn.Module:
        first, tanh, last = network()
        return nn.Sequential(first, tanh, make().double(), last)

    return build


@dataclass(frozen=True)
class Entry:
    """A method, and how it goes with this problem."""

    method: Callable[[], Method]
    note: str = ""
    net: Callable[[], nn.Module] = network
    options: tuple[tuple[str, Any], ...] = ()


def vi(name: str) -> Callable[[], Method]:
    setting = FAMILIES[name]
    rates = {"lr": setting.lr, "scale_lr": setting.scale_lr, "samples": setting.samples}
    return lambda: bayou.VI(setting.guide, steps=setting.steps, schedule="cosine", **rates)


CHAINS: dict[str, Any] = {"start": MAP, "chains": 8}
METHODS: dict[str, Entry] = {
    "NUTS": Entry(lambda: bayou.NUTS(draws=250, warmup=250, **CHAINS), "8 chains of 250 draws"),
    "HMC": Entry(lambda: bayou.HMC(draws=250, warmup=250, leapfrogs=100, **CHAINS), "8 chains of 250 draws"),
    "SGHMC": Entry(lambda: bayou.SGHMC(steps=40_000, lr=2e-5, draws=250, **CHAINS), "40,000 steps, full batch"),
    "SGLD": Entry(lambda: bayou.SGLD(steps=40_000, lr=2e-5, draws=250, **CHAINS), "40,000 steps, full batch"),
    "SGLD, cyclical": Entry(
        lambda: bayou.SGLD(steps=40_000, lr=4e-5, draws=250, schedule=bayou.Cyclical(cycles=8), **CHAINS),
        "8 cycles",
    ),
    "pSGLD": Entry(lambda: bayou.pSGLD(steps=40_000, lr=2e-6, draws=250, **CHAINS), "40,000 steps, full batch"),
    "Ensemble(10)": Entry(lambda: bayou.Ensemble(10, of=MAP, how="vmap"), "of MAP"),
    "Laplace, full": Entry(lambda: bayou.Laplace("full", start=MAP), "linearised"),
    "Laplace, full, sampled": Entry(
        lambda: bayou.Laplace("full", start=MAP, predictive="sampled"), "the same Gaussian without linearising"
    ),
    "Laplace, kronecker": Entry(lambda: bayou.Laplace("kronecker", start=MAP), "linearised"),
    "Laplace, lowrank": Entry(lambda: bayou.Laplace("lowrank", start=MAP, rank=10), "rank 10, linearised"),
    "Laplace, diagonal": Entry(lambda: bayou.Laplace("diagonal", start=MAP), "linearised"),
    "Laplace, last layer": Entry(lambda: bayou.Laplace("full", where="2.*", start=MAP), "linearised"),
    "VI(JointFlow)": Entry(vi("JointFlow"), FAMILIES["JointFlow"].note),
    "VI(LowRank)": Entry(vi("LowRank, rank 16"), "rank 16"),
    "VI(MNF)": Entry(vi("MNF"), FAMILIES["MNF"].note),
    "VI(FFG)": Entry(vi("FFG"), FAMILIES["FFG"].note),
    "IVON": Entry(
        lambda: bayou.IVON(steps=6000, samples=8, hessian=50.0, lr=0.02, schedule="cosine"),
        "the family of VI(FFG); it ended elsewhere, not looked into",
    ),
    "SWAG": Entry(
        lambda: bayou.SWAG(start=MAP, steps=8000, every=40, lr=4e-4, batch_size=5), "batches of 5; lr sets the width"
    ),
    "MCDropout": Entry(
        lambda: bayou.MCDropout(start=MAP), "p = 0.05 on hidden units", with_layer(lambda: nn.Dropout(0.05))
    ),
    "MCBatchNorm": Entry(
        lambda: bayou.MCBatchNorm(start=bayou.MAP(steps=3000, lr=0.02, schedule="cosine", batch_size=10), draws=200),
        "batches of 10; another network, with batch norm",
        with_layer(lambda: nn.BatchNorm1d(20)),
    ),
    "MAP": Entry(lambda: MAP, "a point"),
    "MLE": Entry(lambda: bayou.MLE(steps=3000, lr=0.02, schedule="cosine"), "a point"),
}


def fit(problem: Problem, name: str, seed: int = 0) -> bayou.Posterior:
    entry = METHODS[name]
    return bayou.fit(
        entry.net(),
        (problem.u, problem.t),
        method=entry.method(),
        likelihood=problem.likelihood,
        prior=bayou.Normal(1.0),
        seed=seed,
        progress=False,
    )


def judge(problem: Problem, posterior: bayou.Posterior, draws: int = DRAWS) -> dict[str, Any]:
    """Ratios of standard deviations to HMC's, the error of the mean function, and both functions on a grid."""
    x, mean, sd = problem.grid()
    count = min(draws, posterior.draws or draws)
    f = problem.functions(posterior, x, count)
    width = f.std(0, correction=0) if count > 1 else torch.zeros_like(x)
    error = (f.mean(0) - mean) / sd
    inside = x.abs() <= 4
    at = [x.tolist().index(point) for point in POINTS]
    return {
        "ratio": [round(float(width[i] / sd[i]), 4) for i in at],
        "mean_error_inside": round(float(error[inside].square().mean().sqrt()), 4),
        "mean_error_outside": round(float(error[~inside].square().mean().sqrt()), 4),
        "draws": count,
        "mean": [round(float(value), 3) for value in f.mean(0)],
        "sd": [round(float(value), 3) for value in width],
    }


def measure(problem: Problem, name: str, seed: int = 0) -> dict[str, Any]:
    start = time.process_time()
    posterior = fit(problem, name, seed)
    seconds = time.process_time() - start
    return judge(problem, posterior) | {"seconds": round(seconds, 1), "seed": seed}


def render(numbers: dict[str, Any]) -> str:
    """The table in markdown."""
    sds = {row["x"]: row["sd"] for row in Problem.load().reference["nuts"]["grid"]}
    heads = [f"{point:+.0f}" if point else "0" for point in POINTS]
    lines = [
        "# Every method beside HMC",
        "",
        "A 1-20-1 tanh network, 20 points of a cubic, noise known, prior N(0, 1) on all 61 weights",
        "(`tests/reference/make_cubic_hmc.py` states the problem and made the reference with other software). The",
        "columns −6 … 6 are the standard deviation of f(x) over the draws of a method, divided by HMC's: 1 is right,",
        "below 1 is overconfident; the data lie in [−4, 4]. Mean error: root mean square of (mean − HMC's mean)/(HMC's",
        "sd) over a grid inside and outside the data. One seed a method. `cubic.md` has every variational family, with",
        "its ELBO.",
        "",
        f"| method | {' | '.join(heads)} | mean error inside, outside | processor s | note |",
        f"|---|{'---:|' * (len(heads) + 2)}---|",
        f"| HMC, sd itself | {' | '.join(f'{sds[point]:.2f}' for point in POINTS)} | | | the reference |",
    ]
    for name, entry in METHODS.items():
        row = numbers["rows"].get(name)
        if row is not None:
            ratios = " | ".join(f"{value:.2f}" for value in row["ratio"])
            errors = f"{row['mean_error_inside']:.2f}, {row['mean_error_outside']:.2f}"
            lines.append(f"| {name} | {ratios} | {errors} | {row['seconds']:.0f} | {entry.note} |")
    versions = ", ".join(f"{name} {version}" for name, version in numbers["versions"].items())
    lines += [
        "",
        f"Made by `{numbers['command']}`: {versions}; one CPU thread, float64, the settings of `METHODS` in the",
        f"script; up to {DRAWS:,} function draws for the standard deviations (2 % Monte-Carlo error).",
        "",
    ]
    return "\n".join(lines)


def draw(numbers: dict[str, Any], path: Path) -> None:
    """All methods side by side: mean and two standard deviations, HMC's as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problem = Problem.load()
    x, mean, sd = problem.grid()
    names = [name for name in METHODS if name in numbers["rows"]]
    columns = 6
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.3 * columns, 2.0 * rows), sharex=True, sharey=True)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        row = numbers["rows"][name]
        center, width = (torch.tensor(row[key]) for key in ("mean", "sd"))
        axis.fill_between(x, center - 2 * width, center + 2 * width, color="#4477aa", alpha=0.35, lw=0)
        axis.plot(x, center, color="#4477aa", lw=1.2)
        for side in (-2, 2):
            axis.plot(x, mean + side * sd, color="#cc6677", lw=0.9, ls=(0, (3, 2)))
        axis.plot(problem.u * problem.x_scale, problem.t * problem.y_scale, ".", color="black", ms=2.5)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(-190, 190)
        axis.tick_params(labelsize=7)
        for edge in ("top", "right"):
            axis.spines[edge].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def work(name: str) -> tuple[str, dict[str, Any]]:
    """One method in a process of its own."""
    torch.set_num_threads(1)
    return name, measure(Problem.load(), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the results folder and the picture")
    parser.add_argument("--draw", action="store_true", help="draw the picture from the committed numbers, and stop")
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time")
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    args = parser.parse_args()
    pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
    for future in as_completed([pool.submit(work, name) for name in ([] if args.draw else args.only)]):
        name, row = future.result()
        shown = {key: value for key, value in row.items() if key not in ("mean", "sd")}
        print(name, json.dumps(shown), flush=True)
        if args.write:
            numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {"rows": {}}
            numbers["command"] = "python benchmarks/methods.py --write"
            numbers["versions"] = {
                "bayou": bayou.__version__,
                "torch": importlib.metadata.version("torch"),
                "python": platform.python_version(),
            }
            numbers["rows"][name] = row
            NUMBERS.write_text(json.dumps(numbers) + "\n")
            TABLE.write_text(render(numbers))
    if args.draw or args.write:
        draw(json.loads(NUMBERS.read_text()), PICTURE)


if __name__ == "__main__":
    main()
