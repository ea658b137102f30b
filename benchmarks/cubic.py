"""How wide every family is beside HMC: the posterior of a 1-20-1 tanh network on a cubic.

    python benchmarks/cubic.py --write                 # all families, one after the other
    python benchmarks/cubic.py --write --only FFG MNF  # some of them again; the rest of the table is kept

The target and its HMC reference are those of tests/reference/cubic_hmc.json (make_cubic_hmc.py says how it was made).
Every family is fitted with the whole data set in every step and a rate that falls to 0 along a cosine; its epistemic
standard deviation, from function draws without noise, is given as a ratio to HMC's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou.guides.bayesian import Rules
from bayou.posteriors import Guided

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "tests" / "reference" / "cubic_hmc.json"
NUMBERS, TABLE = HERE / "results" / "cubic.json", HERE / "results" / "cubic.md"
KEY_POINTS = (-6.0, -5.0, -4.0, 0.0, 4.0, 5.0, 6.0)
WEIGHTS = ("0.weight", "0.bias", "2.weight", "2.bias")


@dataclass(frozen=True)
class Setting:
    """A family and how it is trained."""

    guide: Rules
    steps: int = 2000
    lr: float = 0.02
    scale_lr: float = 0.05
    samples: int = 32
    note: str = ""


@dataclass(frozen=True)
class Problem:
    """The target, in scaled units, and what HMC says about it, in original units."""

    u: Tensor
    t: Tensor
    noise: float
    x_scale: float
    y_scale: float
    reference: dict[str, Any] = field(repr=False)

    @staticmethod
    def load() -> Problem:
        found = json.loads(REFERENCE.read_text())
        model, data = found["model"], found["data"]
        x, y = (torch.tensor(data[name], dtype=torch.float64).unsqueeze(1) for name in ("x", "y"))
        x_scale, y_scale = model["x_scale"], model["y_scale"]
        return Problem(x / x_scale, y / y_scale, model["noise_sd_scaled"], x_scale, y_scale, found)

    @property
    def likelihood(self) -> bayou.Gaussian:
        return bayou.Gaussian(self.noise)

    def grid(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, and HMC's mean and standard deviation there."""
        rows = self.reference["nuts"]["grid"]
        return tuple(torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("x", "mean", "sd"))  # type: ignore[return-value]

    def functions(self, posterior: Guided, x: Tensor, draws: int) -> Tensor:
        """f(x) of draws of the posterior, original units: (draws, len(x))."""
        predictive = posterior.predict((x / self.x_scale).unsqueeze(1), samples=draws, seed=1)
        return self.y_scale * predictive.samples.squeeze(-1)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()


POINT = bayou.Delta(penalty=True)
FAMILIES: dict[str, Setting] = {
    "Delta (MAP)": Setting(POINT, samples=1, note="a point"),
    "FFG": Setting(bayou.FFG(std=0.05), lr=0.05, note="local reparameterization"),
    "FFG, sampled weights": Setting(bayou.FFG(std=0.05, local=False), steps=4000, scale_lr=0.02, samples=8),
    "MNF": Setting(bayou.MNF(std=0.05), note="gated flow, conjugate r"),
    "MNF, paper": Setting(bayou.MNF(std=0.05, auxiliary="paper"), note="gated flow, the paper's r"),
    "MNF, spread in the gain": Setting(
        bayou.MNF(flow="iaf", options={"layers": 2}, std=0.005, z_std=0.3),
        steps=3000,
        lr=0.01,
        scale_lr=0.01,
        note="IAF; the noise starts small and learns slowly",
    ),
    "NodeNoise": Setting(bayou.NodeNoise(penalty=True), note="weights are points, gains have a prior of their own"),
    "NodeFlow": Setting(bayou.NodeFlow(penalty=True), note="the same with a gated flow"),
    "Dropout, p = 0.05": Setting(
        {"2.weight": bayou.Dropout(p=0.05), "*": POINT}, note="hidden units; p sets the width, not data"
    ),
    "Dropout, concrete": Setting(
        {"2.weight": bayou.Dropout(p=0.05, rate="concrete"), "*": POINT}, note="p is learned, and falls below 0.0001"
    ),
    "SparseVD": Setting(bayou.SparseVD(std=0.05), note="log-uniform prior: another target"),
    "LowRank, rank 16": Setting(
        bayou.LowRank(rank=16, std=0.02),
        steps=12_000,
        lr=0.005,
        scale_lr=0.01,
        samples=16,
        note="not converged: a run of 6,000 steps ended at −88.1",
    ),
    "JointFlow": Setting(
        bayou.JointFlow(std=0.02),
        steps=10_000,
        lr=0.005,
        scale_lr=0.01,
        samples=8,
        note="IAF and a full linear map; not converged: a run of 4,000 steps ended at −77.2",
    ),
}


def fit(problem: Problem, setting: Setting, seed: int = 0) -> Guided:
    method = bayou.VI(
        setting.guide,
        steps=setting.steps,
        lr=setting.lr,
        scale_lr=setting.scale_lr,
        samples=setting.samples,
        schedule="cosine",
    )
    posterior = bayou.fit(
        network(seed),
        (problem.u, problem.t),
        method=method,
        likelihood=problem.likelihood,
        prior=bayou.Normal(1.0),
        seed=seed,
        progress=False,
    )
    assert isinstance(posterior, Guided)
    return posterior


def judge(problem: Problem, posterior: Guided, draws: int = 2000) -> dict[str, Any]:
    """Ratios of standard deviations to HMC's, the error of the mean function, and the ELBO."""
    x, mean, sd = problem.grid()
    f = problem.functions(posterior, x, draws)
    ratio = f.std(0) / sd
    at = [x.tolist().index(point) for point in KEY_POINTS]
    inside = x.abs() <= 4
    error = (f.mean(0) - mean) / sd
    bound = bayou.elbo(posterior, (problem.u, problem.t), samples=500, seed=2)
    return {
        "ratio": [round(float(ratio[i]), 4) for i in at],
        "mean_error_inside": round(float(error[inside].square().mean().sqrt()), 4),
        "mean_error_outside": round(float(error[~inside].square().mean().sqrt()), 4),
        "elbo": round(bound.value, 3),
        "elbo_standard_error": round(bound.standard_error, 3),
        "log_likelihood": round(bound.log_likelihood, 3),
        "kl": round(bound.kl, 3),
        "kind": bound.kind,
    }


def measure(problem: Problem, name: str, seed: int) -> dict[str, Any]:
    setting = FAMILIES[name]
    start = time.perf_counter()
    posterior = fit(problem, setting, seed)
    seconds = time.perf_counter() - start
    return judge(problem, posterior) | {"seconds": round(seconds, 1), "steps": setting.steps, "seed": seed}


def render(numbers: dict[str, Any]) -> str:
    """The table in markdown."""
    reference = Problem.load().reference
    sds = {row["x"]: row["sd"] for row in reference["nuts"]["key_points"]}
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
            lines.append(f"| {label} | {ratios} | {errors} | {bound} | {row['kind']} | {setting.note} |")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the results folder")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="instead of each family's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem.load()
    for name in args.only:
        if args.steps:
            FAMILIES[name] = replace(FAMILIES[name], steps=args.steps)
        for seed in args.seeds:
            row = measure(problem, name, seed)
            print(name, json.dumps(row), flush=True)
            if args.write:
                numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {"rows": {}}
                numbers["command"] = "python benchmarks/cubic.py --write"
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
