"""Posterior estimation with conditional flows on tasks of sbibm, judged by its reference
posteriors.

    pip download --no-deps sbibm && unzip sbibm-*.whl -d wheel       # observations and reference
    draws, MIT licence
    python -m experiments.measure.sbi prepare --wheel wheel --data DATA       # one npz for each task
    python -m experiments.measure.sbi run --data DATA --out OUT --jobs 10     # sbi.json
    python -m experiments.measure.sbi table --out experiments/results          # sbi.md of sbi.json

Neural posterior estimation: draw (theta, x) from prior and simulator, and maximize the likelihood
of a flow q(theta | x) on 90 % of the draws. The other 10 % stop each fit and select one of
``CANDIDATES``, so that the budget has all simulations and nothing is chosen by a reference. C2ST is
the accuracy of a classifier between draws of q and of the reference at ten observations: .5 if it
cannot tell them apart (Lueckmann et al. 2021, Benchmarking Simulation-Based Inference). Simulators
are written here from the descriptions there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayou import flows

OBSERVATIONS = range(1, 11)
BUDGETS = (1_000, 10_000)
DRAWS = 10_000  # of q and of the reference, for each observation
Draw = Callable[[int], Tensor]


@dataclass(frozen=True)
class Task:
    """A prior and a simulator, theta (n, D) to x (n, K); the half-width of the box of a uniform
    prior.
    """

    prior: Draw
    simulate: Callable[[Tensor], Tensor]
    box: float = math.inf


def uniform(dim: int, box: float) -> Draw:
    return lambda n: box * (2 * torch.rand(n, dim) - 1)


def mixture(theta: Tensor) -> Tensor:
    """x ~ ½·N(theta, I) + ½·N(theta, 0.01·I)."""
    scale = torch.where(torch.rand(len(theta), 1) < 0.5, 1.0, 0.1)
    return theta + scale * torch.randn_like(theta)


def moon(theta: Tensor) -> Tensor:
    """A half circle of radius N(0.1, 0.01²), moved by (−|θ₁ + θ₂|, θ₂ − θ₁)/√2 + (0.25, 0)."""
    angle, radius = math.pi * (torch.rand(len(theta)) - 0.5), 0.1 + 0.01 * torch.randn(len(theta))
    a, b = theta.unbind(-1)
    shift = torch.stack([0.25 - (a + b).abs() / math.sqrt(2), (b - a) / math.sqrt(2)], -1)
    return shift + radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)


def four_points(theta: Tensor) -> Tensor:
    """Four points of N((θ₁, θ₂), S) with standard deviations θ₃² and θ₄² and correlation tanh
    θ₅.
    """
    noise = torch.randn(len(theta), 4, 2)
    first, second, rho = (
        theta[:, 2, None].square(),
        theta[:, 3, None].square(),
        theta[:, 4, None].tanh(),
    )
    x = theta[:, 0, None] + first * noise[..., 0]
    y = theta[:, 1, None] + second * (
        rho * noise[..., 0] + (1 - rho.square()).sqrt() * noise[..., 1]
    )
    return torch.stack([x, y], -1).flatten(1)


def bernoulli() -> Task:
    """100 spikes of a filter of length 9 on white noise with an offset; x are the sufficient
    statistics.
    """
    stimulus = torch.from_numpy(
        np.random.RandomState(42).randn(100).astype(np.float32)
    )  # the stimulus of sbibm
    design = torch.ones(100, 10)
    for lag in range(9):
        design[:, 1 + lag] = torch.cat([torch.zeros(lag), stimulus[: 100 - lag]])
    differences = torch.diag(
        1 + (torch.arange(9) / 9).sqrt()
    )  # second differences are small: the filter is smooth
    differences += torch.diag(torch.full((8,), -2.0), -1) + torch.diag(torch.ones(7), -2)
    factor = torch.block_diag(
        torch.tensor([[math.sqrt(2.0)]]), torch.linalg.inv(differences)
    )  # of the covariance

    def simulate(theta: Tensor) -> Tensor:
        p = (theta @ design.T).sigmoid()
        return (torch.rand_like(p) < p).float() @ design

    return Task(lambda n: torch.randn(n, 10) @ factor.T, simulate)


def linear(theta: Tensor) -> Tensor:
    """x ~ N(theta, 0.1·I)."""
    return theta + math.sqrt(0.1) * torch.randn_like(theta)


TASKS: dict[str, Task] = {
    "gaussian_linear": Task(lambda n: math.sqrt(0.1) * torch.randn(n, 10), linear),
    "gaussian_linear_uniform": Task(uniform(10, 1.0), linear, 1.0),
    "gaussian_mixture": Task(uniform(2, 10.0), mixture, 10.0),
    "two_moons": Task(uniform(2, 1.0), moon, 1.0),
    "slcp": Task(uniform(5, 3.0), four_points, 3.0),
    "bernoulli_glm": bernoulli(),
}
Build = Callable[[int, int], flows.Chain]
CANDIDATES: dict[str, Build] = {
    "spline_autoregressive": lambda dim, context: flows.spline_autoregressive(
        dim, 3, (64, 64), context_dim=context
    ),
    "spline_coupling": lambda dim, context: flows.spline_coupling(
        dim, 5, (64, 64), context_dim=context
    ),
    "maf": lambda dim, context: flows.maf(dim, 5, (64, 64), context_dim=context),
}


# C2ST of NPE with a neural spline flow at observations 1 to 10, from 10,000 draws: "NPE-NSF" of
# supplement_hyperparameters_snpe.csv in github.com/sbi-benchmark/results. The mixture is of
# gaussian_mixture_rerun there, since the task was corrected after the paper, in the release whose
# references are used here.
PUBLISHED: dict[tuple[str, int], tuple[float, ...]] = {
    ("gaussian_linear", 1_000): (
        0.707,
        0.674,
        0.698,
        0.758,
        0.662,
        0.649,
        0.665,
        0.713,
        0.646,
        0.772,
    ),
    ("gaussian_linear", 10_000): (
        0.565,
        0.531,
        0.534,
        0.592,
        0.523,
        0.532,
        0.534,
        0.620,
        0.534,
        0.558,
    ),
    ("gaussian_linear_uniform", 1_000): (
        0.708,
        0.681,
        0.803,
        0.659,
        0.661,
        0.676,
        0.683,
        0.733,
        0.709,
        0.650,
    ),
    ("gaussian_linear_uniform", 10_000): (
        0.557,
        0.556,
        0.587,
        0.534,
        0.537,
        0.552,
        0.542,
        0.559,
        0.567,
        0.545,
    ),
    ("gaussian_mixture", 1_000): (
        0.789,
        0.703,
        0.687,
        0.699,
        0.735,
        0.684,
        0.732,
        0.678,
        0.692,
        0.763,
    ),
    ("gaussian_mixture", 10_000): (
        0.661,
        0.560,
        0.670,
        0.607,
        0.647,
        0.570,
        0.585,
        0.585,
        0.671,
        0.596,
    ),
    ("two_moons", 1_000): (0.666, 0.696, 0.677, 0.700, 0.748, 0.711, 0.805, 0.751, 0.719, 0.780),
    ("two_moons", 10_000): (0.542, 0.571, 0.646, 0.674, 0.588, 0.576, 0.617, 0.599, 0.616, 0.634),
    ("slcp", 1_000): (0.988, 0.975, 0.965, 0.985, 0.966, 0.960, 0.992, 0.989, 0.961, 0.971),
    ("slcp", 10_000): (0.944, 0.938, 0.799, 0.916, 0.849, 0.883, 0.950, 0.898, 0.932, 0.897),
    ("bernoulli_glm", 1_000): (
        0.873,
        0.775,
        0.913,
        0.886,
        0.875,
        0.831,
        0.854,
        0.864,
        0.887,
        0.872,
    ),
    ("bernoulli_glm", 10_000): (
        0.675,
        0.659,
        0.759,
        0.683,
        0.630,
        0.639,
        0.660,
        0.650,
        0.743,
        0.686,
    ),
}


class Estimator:
    """q(theta | x) of a candidate, fitted to simulations; theta and x are standardized by them."""

    def __init__(
        self, task: Task, theta: Tensor, x: Tensor, name: str, steps: int, seed: int
    ) -> None:
        self.task = task
        self.center, self.scale = theta.mean(0), theta.std(0)
        self.x_center, self.x_scale = x.mean(0), x.std(0)
        torch.manual_seed(seed)
        flow = flows.Flow(
            flows.StandardNormal(theta.shape[1]), CANDIDATES[name](theta.shape[1], x.shape[1])
        )
        data, context = (theta - self.center) / self.scale, (x - self.x_center) / self.x_scale
        options: Any = {
            "steps": steps,
            "lr": 1e-3,
            "patience": 20,
            "check_every": max(steps // 100, 20),
        }
        self.fitted = flows.fit(
            flow, data, context=context, batch_size=128, seed=seed, progress=False, **options
        )
        self.flow = flow
        self.nll = self.fitted.best + float(self.scale.log().sum())

    def sample(self, n: int, x: Tensor, seed: int) -> tuple[Tensor, float]:
        """n draws inside the support of the prior, and the fraction of all draws that fell
        there.
        """
        context = ((x - self.x_center) / self.x_scale).unsqueeze(0)
        inside, drawn = torch.zeros(0, len(self.center)), 0
        while len(inside) < n:
            theta = (
                self.center
                + self.scale * self.flow.sample(n, context, seed=seed, start=drawn)[:, 0]
            )
            inside, drawn = (
                torch.cat([inside, theta[(theta.abs() < self.task.box).all(-1)]]),
                drawn + n,
            )
        return inside[:n], len(inside) / drawn


def c2st(reference: Tensor, draws: Tensor) -> float:
    """Accuracy in five folds of an MLP with two layers of 10·D units, on data standardized by the
    reference.
    """
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neural_network import MLPClassifier

    center, scale = reference.mean(0), reference.std(0)
    data = torch.cat([(reference - center) / scale, (draws - center) / scale]).numpy()
    labels = np.repeat([0, 1], [len(reference), len(draws)])
    units = 10 * reference.shape[1]
    classifier = MLPClassifier(
        (units, units), activation="relu", solver="adam", max_iter=10_000, random_state=1
    )
    folds = KFold(5, shuffle=True, random_state=1)
    return float(cross_val_score(classifier, data, labels, cv=folds, scoring="accuracy").mean())


def fit_candidate(name: str, budget: int, candidate: str, steps: int, data: Path) -> dict[str, Any]:
    """Fit one flow, and draw at the ten observations."""
    torch.set_num_threads(1)
    task, started = TASKS[name], time.process_time()
    torch.manual_seed(budget)  # the same simulations for all candidates
    theta = task.prior(budget)
    estimator = Estimator(task, theta, task.simulate(theta), candidate, steps, seed=0)
    observations = torch.from_numpy(np.load(data / f"{name}.npz")["observations"])
    draws = [estimator.sample(DRAWS, x, seed=i) for i, x in enumerate(observations)]
    return {
        "task": name,
        "budget": budget,
        "flow": candidate,
        "nll": estimator.nll,
        "steps": estimator.fitted.best_step,
        "inside": fmean(inside for _, inside in draws),
        "seconds": time.process_time() - started,
        "draws": np.stack([theta.numpy() for theta, _ in draws]),
    }


def judge(name: str, draws: np.ndarray[Any, Any], observation: int, size: int, data: Path) -> float:
    """C2ST at one observation, with ``size`` draws of each."""
    torch.set_num_threads(1)
    reference = torch.from_numpy(np.load(data / f"{name}.npz")["reference"][observation])
    return c2st(reference[:size], torch.from_numpy(draws[observation])[:size])


def run(args: argparse.Namespace) -> None:
    """Fit all candidates, then judge the selected ones; sbi.json is written after every result."""
    tasks = "" if args.tasks == list(TASKS) else f" --tasks {' '.join(args.tasks)}"
    command = f"python -m experiments.measure.sbi run --data DATA --out OUT --jobs {args.jobs}{tasks} --seconds {args.seconds}"
    where = (
        f"torch {torch.__version__}, {platform.machine()} CPU, {args.jobs} processes of one thread"
    )
    found: dict[str, Any] = {
        "runs": [{"command": command, "made": f"{date.today()}", "where": where}],
        "fits": [],
        "rows": [],
    }
    started = time.monotonic()

    def write() -> None:
        (args.out / "sbi.json").write_text(json.dumps(found, indent=1) + "\n")

    args.out.mkdir(parents=True, exist_ok=True)
    scores: dict[tuple[str, int, int], dict[int, float]] = {}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        jobs: dict[Any, Any] = {}
        keys = [
            (name, budget) for budget in sorted(args.budgets, reverse=True) for name in args.tasks
        ]
        waiting, best = (
            dict.fromkeys(keys, len(CANDIDATES)),
            dict[tuple[str, int], dict[str, Any]](),
        )
        for name, budget in keys:
            for candidate in CANDIDATES:
                steps = min(args.steps, 3 * budget // 2)
                jobs[pool.submit(fit_candidate, name, budget, candidate, steps, args.data)] = (
                    name,
                    budget,
                    0,
                    0,
                )

        def compare(name: str, budget: int, size: int) -> None:
            for i in range(args.observations):
                draws = best[name, budget]["draws"][:, :size]
                jobs[pool.submit(judge, name, draws, i, size, args.data)] = (name, budget, size, i)

        while jobs:
            future = next(as_completed(jobs))
            name, budget, size, observation = jobs.pop(future)
            key, result = (name, budget), future.result()
            if size:
                values = scores.setdefault((*key, size), {})
                values[observation] = result
                if len(values) == args.observations:
                    row = {"task": name, "budget": budget, "draws": size, "flow": best[key]["flow"]}
                    found["rows"].append(row | {"c2st": [values[i] for i in sorted(values)]})
                    print(found["rows"][-1], flush=True)
            else:
                if key not in best or result["nll"] < best[key]["nll"]:
                    best[key] = result
                found["fits"].append({k: v for k, v in result.items() if k != "draws"})
                print(found["fits"][-1], flush=True)
                waiting[key] -= 1
                if waiting[key] == 0:
                    compare(name, budget, min(1_000, args.most))
                if not any(
                    waiting.values()
                ):  # the longest comparisons last: they may not all end in time
                    for other, given in keys if args.most > 1_000 else ():
                        compare(other, given, args.most)
            write()
            if time.monotonic() - started > args.seconds:
                jobs = {job: about for job, about in jobs.items() if not job.cancel()}


def prepare(args: argparse.Namespace) -> None:
    """Observations and reference draws of an unpacked wheel of sbibm, as one npz for each task."""
    args.data.mkdir(parents=True, exist_ok=True)
    for name in TASKS:
        folders = [
            args.wheel / "sbibm" / "tasks" / name / "files" / f"num_observation_{i}"
            for i in OBSERVATIONS
        ]
        observations = [
            np.loadtxt(folder / "observation.csv", delimiter=",", skiprows=1) for folder in folders
        ]
        files = [folder / "reference_posterior_samples.csv.bz2" for folder in folders]
        reference = [np.loadtxt(file, delimiter=",", skiprows=1, max_rows=DRAWS) for file in files]
        arrays = {"observations": np.float32(observations), "reference": np.float32(reference)}
        np.savez_compressed(args.data / f"{name}.npz", **arrays)


def mean(values: Sequence[float]) -> str:
    """The mean and its standard error over observations."""
    return f"{fmean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of one fit."""
    return (one["task"], one["budget"]) == (other["task"], other["budget"])


def table(args: argparse.Namespace) -> None:
    """sbi.md of sbi.json."""
    found = json.loads((args.out / "sbi.json").read_text())
    fits = {(fit["task"], fit["budget"], fit["flow"]): fit for fit in found["fits"]}
    lines = [
        "# Posterior estimation on tasks of sbibm",
        "",
        "C2ST between draws of a conditional flow and reference draws, the mean and its standard error over ten",
        "observations; .5 is the best and 1 the worst. Published: NPE with a neural spline flow at the same number of",
        "simulations, a fit for each observation, from 10,000 draws (Lueckmann et al. 2021, files named in",
        "`experiments/measure/sbi.py`). A classifier of 1,000 draws finds fewer differences, so that only rows of 10,000 draws",
        "are comparable. Here one fit is for all observations, and the standard error has no variance of fits. Flows",
        "and the end of their fits are chosen by the NLL of a tenth of the simulations. Inside: the fraction of draws",
        "in the support of the prior; the others are rejected, as they are by NPE.",
        "",
        "| task | simulations | flow | inside | draws | C2ST | lowest | highest | published |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(
        found["rows"], key=lambda row: (list(TASKS).index(row["task"]), row["budget"], row["draws"])
    ):
        fit, values = fits[row["task"], row["budget"], row["flow"]], row["c2st"]
        published = mean(PUBLISHED[row["task"], row["budget"]]) + (
            " (10,000 draws)" if row["draws"] < 10_000 else ""
        )
        if any(other["draws"] > row["draws"] for other in found["rows"] if same(other, row)):
            published = "–"
        lines.append(
            f"| {row['task']} | {row['budget']:,} | {row['flow']} | {fit['inside']:.2f} | {row['draws']:,} | "
            f"{mean(values)} | {min(values):.2f} | {max(values):.2f} | {published} |"
        )
    lines += [
        "",
        "## Held-out NLL of the candidates",
        "",
        f"| task | simulations | {' | '.join(CANDIDATES)} |",
    ]
    lines.append("|---|---:|" + "---:|" * len(CANDIDATES))
    for name, budget in dict.fromkeys((name, budget) for name in TASKS for budget in BUDGETS):
        scores = [
            f"{fits[name, budget, flow]['nll']:.3f}"
            for flow in CANDIDATES
            if (name, budget, flow) in fits
        ]
        if len(scores) == len(CANDIDATES):
            lines.append(f"| {name} | {budget:,} | {' | '.join(scores)} |")
    lines += [
        line
        for run in found["runs"]
        for line in ("", f"`{run['command']}`, {run['made']}, {run['where']}.")
    ]
    (args.out / "sbi.md").write_text("\n".join([*lines, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("prepare", "run", "table"))
    parser.add_argument("--wheel", type=Path, help="the unpacked wheel of sbibm")
    parser.add_argument("--data", type=Path, help="the folder of the npz files")
    parser.add_argument("--out", type=Path, help="the folder of sbi.json and sbi.md")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--budgets", nargs="*", type=int, default=BUDGETS)
    parser.add_argument("--observations", type=int, default=len(OBSERVATIONS))
    parser.add_argument(
        "--seconds", type=int, default=10**6, help="start no comparison after this time"
    )
    parser.add_argument(
        "--most", type=int, default=DRAWS, help="the largest number of draws that are compared"
    )
    args = parser.parse_args()
    {"prepare": prepare, "run": run, "table": table}[args.action](args)


if __name__ == "__main__":
    main()
