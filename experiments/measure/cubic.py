"""How wide every variational family is beside HMC: the posterior of a 1-20-1 tanh network on a
cubic.

    python experiments/measure/cubic.py --write                 # all families, one after the other
    python experiments/measure/cubic.py --write --only FFG MNF  # some of them again; the rest of the table
    is kept

The problem and its HMC reference are those of `experiments.reproduce toy`, which has every method. Here
every family is fitted with the whole data set in every step and a rate that falls to 0 along a
cosine; its epistemic standard deviation, from function draws without noise, is given as a ratio to
HMC's, and its ELBO beside.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import bayou
from bayou.posteriors import Guided
from experiments.toy import METHODS, Problem, network, vi

HERE = Path(__file__).parents[1]
NUMBERS, TABLE = HERE / "results" / "cubic.json", HERE / "results" / "cubic.md"
KEY_POINTS = (-6.0, -5.0, -4.0, 0.0, 4.0, 5.0, 6.0)


@dataclass(frozen=True)
class Setting:
    """A family and how it is trained."""

    method: bayou.VI
    note: str = ""


def shared(label: str, note: str = "") -> Setting:
    """A family of `experiments.reproduce toy`, with its settings there."""
    entry = METHODS[label]
    assert isinstance(entry.method, bayou.VI)
    return Setting(entry.method, note or entry.note)


POINT = bayou.Delta(penalty=True)
FAMILIES: dict[str, Setting] = {
    "Delta (MAP)": Setting(vi(POINT, samples=1), "a point"),
    "FFG": shared("VI(FFG)"),
    "FFG, sampled weights": Setting(
        vi(bayou.MeanField(std=0.05, local=False), steps=4000, scale_lr=0.02, samples=8)
    ),
    "MNF": shared("VI(MNF)"),
    "MNF, paper": Setting(vi(bayou.MNF(std=0.05, auxiliary="paper")), "gated flow, the paper's r"),
    "MNF, spread in the gain": Setting(
        vi(
            bayou.MNF(flow="iaf", options={"layers": 2}, std=0.005, z_std=0.3),
            steps=3000,
            lr=0.01,
            scale_lr=0.01,
        ),
        "IAF; the noise starts small and learns slowly",
    ),
    "NodeNoise": Setting(
        vi(bayou.NodeNoise(penalty=True)), "weights are points, gains have a prior of their own"
    ),
    "NodeFlow": Setting(vi(bayou.NodeFlow(penalty=True)), "the same with a gated flow"),
    "Dropout, p = 0.05": Setting(
        vi({"2.weight": bayou.Dropout(p=0.05), "*": POINT}),
        "hidden units; p sets the width, not data",
    ),
    "Dropout, concrete": Setting(
        vi({"2.weight": bayou.Dropout(p=0.05, rate="concrete"), "*": POINT}),
        "p is learned, and falls below 0.0001",
    ),
    "SparseVD": Setting(vi(bayou.SparseVD(std=0.05)), "log-uniform prior: another target"),
    "LowRank, rank 16": shared("VI(LowRank)", "not converged: a run of 6,000 steps ended at −88.1"),
    "JointFlow": shared("VI(JointFlow)"),
}


def fit(problem: Problem, method: bayou.VI, seed: int = 0) -> Guided:
    posterior = problem.fit(method, network(seed), seed)
    assert isinstance(posterior, Guided)
    return posterior


def judge(problem: Problem, posterior: Guided, draws: int = 2000) -> dict[str, Any]:
    """Ratios of standard deviations to HMC's, the error of the mean function, and the ELBO."""
    f = problem.functions(posterior, draws)
    bound = bayou.elbo(posterior, (problem.u, problem.t), samples=500, seed=2)
    return problem.compare(f.mean(0), f.std(0), KEY_POINTS) | {
        "elbo": round(bound.value, 3),
        "elbo_standard_error": round(bound.standard_error, 3),
        "log_likelihood": round(bound.log_likelihood, 3),
        "kl": round(bound.kl, 3),
        "kind": bound.kind,
    }


def measure(problem: Problem, name: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    method = FAMILIES[name].method
    method = method if steps is None else replace(method, steps=steps)
    start = time.perf_counter()
    posterior = fit(problem, method, seed)
    seconds = time.perf_counter() - start
    return judge(problem, posterior) | {
        "seconds": round(seconds, 1),
        "steps": method.steps,
        "seed": seed,
    }


def render(numbers: dict[str, Any]) -> str:
    """The table in markdown."""
    problem = Problem.load()
    sds = dict(zip(problem.x.tolist(), problem.sd.tolist(), strict=True))
    heads = [f"{point:+.0f}" if point else "0" for point in KEY_POINTS]
    lines = [
        "# The width of every family beside HMC",
        "",
        "A 1-20-1 tanh network, 20 points of a cubic, noise known, prior N(0, 1) on all 61 weights",
        "(`tests/reference/make_cubic_hmc.py` states the problem). The columns −6 … 6 are the epistemic standard",
        "deviation of f(x), divided by HMC's: 1 is right, below 1 is overconfident; the data lie in [−4, 4].",
        "Mean error: root mean square of (mean − HMC's mean)/(HMC's sd) over a grid inside and outside the data.",
        "The ELBO is comparable only where its kind is exact or bound; the others have no density beside the prior.",
        "One seed a family.",
        "",
        f"| family | {' | '.join(heads)} | mean error inside, outside | ELBO | kind | note |",
        f"|---|{'---:|' * (len(heads) + 2)}---|---|",
        f"| HMC, sd itself | {' | '.join(f'{sds[point]:.2f}' for point in KEY_POINTS)} | | | | the reference |",
    ]
    for name, setting in FAMILIES.items():
        for row in numbers["rows"].get(name, {}).values():
            label = name if row["seed"] == 0 else f"{name}, seed {row['seed']}"
            ratios = " | ".join(f"{value:.2f}" for value in row["ratio"])
            errors = f"{row['mean_error_inside']:.2f}, {row['mean_error_outside']:.2f}"
            bound = f"{row['elbo']:.2f} ± {row['elbo_standard_error']:.2f}"
            lines.append(
                f"| {label} | {ratios} | {errors} | {bound} | {row['kind']} | {setting.note} |"
            )
    versions = ", ".join(f"{name} {version}" for name, version in numbers["versions"].items())
    lines += [
        "",
        f"Made by `{numbers['command']}`: {versions}; one CPU thread, float64. Each family: 20 rows a step, Adam with",
        "a cosine to 0, and the steps, rates and draws a step of `FAMILIES` in the script; 2,000 function draws for",
        "the standard deviations (2 % Monte-Carlo error), 500 for the ELBO.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the results folder")
    parser.add_argument(
        "--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="instead of each family's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem.load()
    for name in args.only:
        for seed in args.seeds:
            row = measure(problem, name, seed, args.steps)
            print(name, json.dumps(row), flush=True)
            if args.write:
                numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {"rows": {}}
                numbers["command"] = "python experiments/measure/cubic.py --write"
                numbers["versions"] = {
                    "bayou": bayou.__version__,
                    "torch": importlib.metadata.version("torch"),
                    "python": platform.python_version(),
                }
                numbers["rows"].setdefault(name, {})[str(seed)] = row
                NUMBERS.parent.mkdir(exist_ok=True)
                NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
                TABLE.write_text(render(numbers))


if __name__ == "__main__":
    main()
