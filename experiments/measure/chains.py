"""Effective draws per gradient of the exact samplers: HMC, NUTS, MCLMC, and MCLMC with a Metropolis
test.

    python -m experiments.measure.chains --write                              # all problems and samplers
    python -m experiments.measure.chains --write --only MCLMC --data yacht    # some of them again; the rest
    of the table is kept
    python -m experiments.measure.chains --out rows.json --only MCLMC         # rows alone, by a process
    among others
    python -m experiments.measure.chains --write --join rows.json             # such rows into the table, and
    no run

Bulk ESS and split R-hat of E[y | x, w] at up to 64 rows and of the log joint, as
``posterior.mixing`` has them, after the warm-up; gradients of all chains after the warm-up, each of
all rows. ESS counts how independent draws are and not whether they are right, so that the table has
an error beside it where the posterior is known.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.methods.hamiltonian import HamiltonianSampler
from bayou.posteriors import Empirical
from experiments import toy, truth_reference

HERE = Path(__file__).parents[1] / "results"
NUMBERS, TABLE = HERE / "chains.json", HERE / "chains.md"


@dataclass(frozen=True)
class Problem:
    """A network, its rows, noise and prior; the transitions of each chain in the warm-up, and after
    it.
    """

    text: str
    net: nn.Module
    data: tuple[Tensor, Tensor]
    likelihood: Any
    prior: Any
    warmup: int = 150
    draws: int = 100
    chains: int = 16
    error: Callable[[Empirical], float] | None = None
    error_text: str = ""


def conjugate() -> Problem:
    """METHODS 1: polynomials of degree 3, 21 points of a sine, noise 0.1, N(0, 1) weights."""
    x = np.linspace(-1, 1, 21)
    features = np.stack([x**k for k in range(4)], 1)
    covariance = np.linalg.inv(np.eye(4) + features.T @ features / 0.1**2)

    def error(posterior: Empirical) -> float:
        variances = posterior.stack["weight"][:, 0].var(0).numpy()
        return float(np.abs(variances / np.diag(covariance) - 1).max())

    data = torch.from_numpy(features), torch.from_numpy(np.sin(3 * x)).unsqueeze(1)
    net = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    text = "conjugate regression, 4 weights, 21 rows"
    return Problem(
        text, net, data, bayou.Gaussian(0.1), bayou.Normal(1.0), error=error, error_text="variances"
    )


def logistic() -> Problem:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    data = torch.from_numpy((x - x.mean(0)) / x.std(0)), torch.from_numpy(y).long()
    net = nn.Linear(30, 2, dtype=torch.float64)
    text = "logistic regression of the breast cancer data, 62 weights, 569 rows"
    return Problem(text, net, data, bayou.Categorical(), bayou.Normal(1.0))


def cubic() -> Problem:
    found = toy.Problem.load()

    def error(posterior: Empirical) -> float:
        sd = found.functions(posterior, posterior.draws).std(0)
        return float((sd / found.sd - 1).abs().mean())

    text = "the cubic of `experiments.reproduce toy`, 1-20-1 tanh, 61 weights, 20 rows"
    data, noise = (found.u, found.t), bayou.Gaussian(found.noise)
    return Problem(
        text, toy.network(), data, noise, bayou.Normal(1.0), error=error, error_text="sd of f(x)"
    )


def readme() -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.cat([torch.rand(20, 1) - 2, torch.rand(20, 1) + 0.5])
        y = torch.sin(2 * x) + 0.05 * torch.randn(40, 1)
        net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    text = "the example of the README, 1-50-1 tanh, 151 weights, 40 rows"
    return Problem(text, net, (x, y), bayou.Gaussian(0.05), None)


def known(name: str, text: str, *sizes: int) -> Problem:
    """A problem of `experiments.reproduce truth`."""
    found = truth_reference.reference(name)

    def error(posterior: Empirical) -> float:
        return float(metrics.total_variation(posterior.predict(found.test[0]), found.predictive))

    options: Any = (
        found.problem.likelihood,
        truth_reference.PRIOR,
        *sizes,
        error,
        "total variation",
    )
    return Problem(text, found.build(0), found.train, *options)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "conjugate": conjugate,
    "logistic": logistic,
    "cubic": cubic,
    "README": readme,
    "README, long": lambda: replace(
        readme(), text="the same in longer runs", warmup=500, draws=500
    ),
    "yacht": lambda: known(
        "yacht",
        "yacht of `experiments.reproduce truth`, 6-50-1, 401 weights, 277 rows",
        150,
        100,
        16,
    ),
    "digits": lambda: known(
        "digits", "digits of `experiments.reproduce truth`, 17,610 weights, 1,438 rows", 40, 40, 2
    ),
}


SAMPLERS: dict[str, HamiltonianSampler] = {
    "HMC": bayou.HMC(),
    "HMC(leapfrogs=20)": bayou.HMC(leapfrogs=20),
    "NUTS": bayou.NUTS(),
    "MCLMC": bayou.MCLMC(),
    "MCLMC, adjusted": bayou.MCLMC(adjusted=True),
    "MCLMC(steps=50, energy_error=5e-4)": bayou.MCLMC(steps=50, energy_error=5e-4),
}


def measure(problem: Problem, method: HamiltonianSampler, seed: int) -> dict[str, Any]:
    sizes = {"warmup": problem.warmup, "draws": problem.draws, "chains": problem.chains}
    method = replace(method, **sizes, log_every=1)
    options: dict[str, Any] = {
        "likelihood": problem.likelihood,
        "prior": problem.prior,
        "progress": False,
    }
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bayou.MixingWarning)  # R-hat is in the table
        posterior = bayou.fit(problem.net, problem.data, method, seed=seed, **options)
    seconds = time.process_time() - started
    assert isinstance(posterior, Empirical)
    assert posterior.mixing is not None
    since = [record["leapfrogs"] for record in posterior.history if record["step"] >= method.warmup]
    gradients = fmean(since) * method.draws * method.chains
    found = {key: posterior.mixing[key] for key in ("ess", "ess_median", "r_hat", "r_hat_median")}
    return found | {
        "gradients": round(gradients),
        "error": None if problem.error is None else problem.error(posterior),
        "seconds": round(seconds, 1),
        "where": f"{platform.machine()}, torch {torch.__version__.partition('+')[0]}",
    }


def render(found: dict[str, Any]) -> str:
    lines = [
        "# Effective draws per gradient",
        "",
        "Bulk ESS for 1,000 gradients of all rows, of the worst and the median of the functions E[y | x, w] at up to",
        "64 rows and the log joint; R-hat of the worst and the median. Where R-hat is over 1.1 the chains have not",
        "mixed and an ESS is no more than an order of magnitude. Gradients of the warm-up are not counted. Defaults of",
        "all samplers but for what labels state and the numbers of chains and transitions. One seed; the last column",
        "has the machine.",
        "",
    ]
    for name, make in PROBLEMS.items():
        rows = [row for row in found["rows"] if row["data"] == name]
        if not rows:
            continue
        problem = make()
        head = f" | error, {problem.error_text}" if problem.error else ""
        lines += [
            f"## {problem.text[0].upper()}{problem.text[1:]}",
            "",
            f"{problem.chains} chains of {problem.draws} draws after {problem.warmup} transitions of warm-up.",
            "",
            "| sampler | ESS per 1,000 gradients: worst | median | R-hat: worst | median"
            f"{head} | gradients | sec | machine |",
            f"|---|---:|---:|---:|---:|{'---:|' if problem.error else ''}---:|---:|---|",
        ]
        for row in rows:
            per = [1000 * row[key] / row["gradients"] for key in ("ess", "ess_median")]
            error = f" | {row['error']:.3f}" if problem.error else ""
            cells = f"{per[0]:.2f} | {per[1]:.2f} | {row['r_hat']:.2f} | {row['r_hat_median']:.2f}{error}"
            lines.append(
                f"| {row['label']} | {cells} | {row['gradients']:,} | {row['seconds']:.0f} | {row['where']} |"
            )
        lines.append("")
    foot = (
        "`python -m experiments.measure.chains --write`, its parts in parallel by `--out` and `--join`; CPUs, one thread; "
        "seconds of the processor, warm-up included."
    )
    return "\n".join([*lines, foot, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the results folder")
    parser.add_argument("--only", nargs="*", default=list(SAMPLERS), choices=SAMPLERS)
    parser.add_argument("--data", nargs="*", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="write the rows of this run to a file of their own"
    )
    parser.add_argument(
        "--join", type=Path, nargs="*", default=(), help="files of --out, instead of a run"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    made: list[dict[str, Any]] = [row for file in args.join for row in json.loads(file.read_text())]
    for data in () if args.join else args.data:
        torch.manual_seed(0)  # of the network where chains start
        problem = PROBLEMS[data]()
        for label in args.only:
            made.append(
                {"data": data, "label": label} | measure(problem, SAMPLERS[label], args.seed)
            )
            print(json.dumps(made[-1]), file=sys.stderr, flush=True)
            if args.out:
                args.out.write_text(json.dumps(made, indent=1) + "\n")
            if args.write:
                write(made)
    if args.write:
        write(made)


def write(made: list[dict[str, Any]]) -> None:
    """Put rows into the table in place of those of the same problem and sampler."""
    kept = json.loads(NUMBERS.read_text())["rows"] if NUMBERS.exists() else []
    rows = {(row["data"], row["label"]): row for row in [*kept, *made]}
    order = [(data, label) for data in PROBLEMS for label in SAMPLERS]
    found = {"rows": [rows[key] for key in order if key in rows]}
    NUMBERS.write_text(json.dumps(found, indent=1) + "\n")
    TABLE.write_text(render(found))


if __name__ == "__main__":
    main()
