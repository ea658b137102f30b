"""How MNF starts, and what follows: ELBO and held-out NLL of its starts beside mean field, on small
problems.

    python experiments/measure/mnf.py                                    # everything: an hour on one core
    python experiments/measure/mnf.py --problems conjugate --seeds 1     # a part; rows that are there
    already are kept

Writes experiments/results/mnf.json and mnf.md. Settings are compared on these problems, so none of
them is a test.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import bayou
from bayou import flows
from bayou.guides.guide import GuideSpec

HERE = Path(__file__).parents[1] / "results"
Rows = tuple[Tensor, Tensor]

CANDIDATES: dict[str, Callable[[], GuideSpec]] = {
    "FFG": bayou.MeanField,
    "MNF, start .01 / .1, no mixing (before)": lambda: bayou.MNF(std=0.01, z_std=0.1, mixing=0),
    "MNF, start .01 / .1": lambda: bayou.MNF(std=0.01, z_std=0.1),
    "MNF, start .003 / .3, no mixing": lambda: bayou.MNF(mixing=0),
    "MNF, start .003 / .3 (default)": bayou.MNF,
    "MNF, start .003 / .3, mixing alone": lambda: bayou.MNF(
        lambda dim: flows.Permutation(range(dim))
    ),
}


class Problem(NamedTuple):
    net: Callable[[], nn.Module]
    likelihood: Any
    prior: Any
    data: Callable[[int], tuple[Rows, Rows]]  # seed to rows to learn from, rows held out
    options: dict[str, Any]


def cubic(seed: int) -> tuple[Rows, Rows]:
    """sin 3x on 21 points by four powers of x: evidence 6.465824, best mean field 5.145762. Held
    out: between them.
    """
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    phi, y = torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)
    return (phi[::2], y[::2]), (phi[1::2], y[1::2])


def table(
    name: str, classes: bool, scale: float | None = None
) -> Callable[[int], tuple[Rows, Rows]]:
    """Four fifths of a table of scikit-learn and the rest; inputs over ``scale``, or
    standardized.
    """

    def split(seed: int) -> tuple[Rows, Rows]:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(y))
        cut = round(0.8 * len(y))
        learn, held = order[:cut], order[cut:]
        spread = x[learn].std(0)
        x = x / scale if scale else (x - x[learn].mean(0)) / np.where(spread > 0, spread, 1)
        if not classes:
            y = ((y - y[learn].mean()) / y[learn].std())[:, None]
        inputs = torch.tensor(x, dtype=torch.float32)
        targets = torch.tensor(y, dtype=torch.int64 if classes else torch.float32)
        return (inputs[learn], targets[learn]), (inputs[held], targets[held])

    return split


def mlp(*sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return make


FAN_IN = bayou.Normal("fan_in", gain=3.0)
SHORT = {"steps": 2000, "lr": 5e-3}
PROBLEMS = {
    "conjugate": Problem(
        lambda: nn.Linear(4, 1, bias=False, dtype=torch.float64),
        bayou.Gaussian(0.1),
        None,
        cubic,
        {},
    ),
    "digits": Problem(mlp(64, 100, 100, 10), None, FAN_IN, table("digits", True, 16.0), SHORT),
    "diabetes": Problem(
        mlp(10, 50, 1), bayou.Gaussian(0.7), FAN_IN, table("diabetes", False), SHORT
    ),
    "breast cancer": Problem(mlp(30, 50, 2), None, FAN_IN, table("breast_cancer", True), SHORT),
}


def measure(problem: Problem, spec: GuideSpec, seed: int, steps: int | None) -> dict[str, float]:
    """One fit: the ELBO for all rows with its standard error, the NLL of a held-out row, steps and
    seconds.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    net = problem.net().to(device)
    learn, held = ((x.to(device), y.to(device)) for x, y in problem.data(seed))
    options = problem.options | ({"steps": steps} if steps and problem.options else {})
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a short run says that it is short
        posterior = bayou.fit(
            net, learn, method=bayou.VI(spec, **options), likelihood=problem.likelihood, prior=problem.prior,
            seed=seed, progress=False,
        )  # fmt: skip
    seconds = time.process_time() - start
    bound = bayou.elbo(posterior, learn, samples=200, seed=1)
    x, y = held
    nll = -float(posterior.predict(x, samples=200, seed=1).log_prob(y).mean())
    return {
        "elbo": bound.value, "error": bound.standard_error, "rows": len(learn[1]), "nll": nll,
        "steps": posterior.history[-1]["step"] + 1, "seconds": round(seconds, 1),
    }  # fmt: skip


def render(rows: list[dict[str, Any]]) -> str:
    """A line for every problem and candidate: means over seeds, and each seed's ELBO."""
    lines = [
        "# How MNF starts, and what follows",
        "",
        "`VI(family)` on a conjugate regression at its default settings (log evidence 6.466, best mean field 5.146)",
        "and, for 2,000 steps at lr 5e-3 with a fan-in prior of gain 3, on digits (64-100-100-10) and two tables (one",
        "hidden layer of 50). *Start*: of the noise σ and of the spread of z. *Mixing*: the triangular map that",
        "correlates the gains behind the gated flow. *Before*: but for the flow, which now works on standardized",
        "numbers. ELBO in nats for all rows (± from its draws), NLL of a held-out row. Digits are not converged:",
        "compare lines, and seed with seed: a line with one has seed 0. Made by `python experiments/measure/mnf.py`.",
        "",
        "| problem | family | ELBO | by seed | NLL | steps | s |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for problem in PROBLEMS:
        for label in CANDIDATES:
            mine = [row for row in rows if (row["problem"], row["candidate"]) == (problem, label)]
            if mine:
                mean = {
                    key: float(np.mean([row[key] for row in mine]))
                    for key in ("elbo", "nll", "steps", "seconds")
                }
                by_seed = ", ".join(f"{row['elbo']:.2f} ± {row['error']:.2f}" for row in mine)
                lines.append(
                    f"| {problem} | {label} | {mean['elbo']:.2f} | {by_seed} | {mean['nll']:.4f} | "
                    f"{mean['steps']:,.0f} | {mean['seconds']:.0f} |"
                )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument(
        "--candidates", nargs="*", default=list(CANDIDATES), help="parts of their names"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, help="instead of 2,000, where a length is given at all"
    )
    parser.add_argument("--out", type=Path, default=HERE / "mnf.json")
    asked = parser.parse_args()
    rows = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for seed in range(asked.seeds):
        for problem in asked.problems:
            for label, make in CANDIDATES.items():
                key = {"problem": problem, "candidate": label, "seed": seed}
                there = any(key.items() <= row.items() for row in rows)
                if there or not any(part in label for part in asked.candidates):
                    continue
                rows.append(key | measure(PROBLEMS[problem], make(), seed, asked.steps))
                print(rows[-1], flush=True)
                asked.out.write_text(json.dumps(rows, indent=1) + "\n")
                asked.out.with_suffix(".md").write_text(render(rows))


if __name__ == "__main__":
    main()
