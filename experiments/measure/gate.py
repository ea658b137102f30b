"""How often ``bayou.diagnostics.check`` is wrong: flags of fits that are right, and wrong fits
without a flag.

python experiments/measure/gate.py --write

Problems whose posterior is known: linear regressions with their conjugate posterior, y = x·w + ε
with w ~ N(0, 4/D·I) as in the prior and ε ~ N(0, 1), and logistic regressions whose posterior is
drawn by importance resampling. A right fit
is that posterior: as a Gaussian, as independent draws, as chains with autocorrelation. A wrong one
is so on purpose. Everything is drawn anew with every seed, and no table of
``experiments/defaults.py`` is among them.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.curvature.covariance import Full
from bayou.diagnostics import baselines, check
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical, GaussianPosterior, Posterior
from bayou.posteriors.checks import Checks

RESULTS = Path(__file__).parents[1] / "results" / "gate.md"
SIZES = (
    (40, 25, 2),
    (50, 1000, 20),
    (200, 50, 5),
    (200, 1000, 5),
    (1000, 250, 20),
)  # rows to learn, to test, inputs
F64 = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """y = x·w + ε, or classes with log-odds x·w: ``train`` rows, ``held`` rows, ``inputs`` D."""

    train: int
    held: int
    inputs: int
    seed: int
    classes: bool = False

    def noise(self, name: str, *shape: int) -> Tensor:
        """Standard normal numbers of this problem, (*shape,)."""
        place = rng.fold(self.seed, name, self.train, self.held, self.inputs, self.classes)
        return rng.normal(shape[0], shape[1:], F64, place)

    @cached_property
    def variance(self) -> float:
        """Of a weight under the prior."""
        return 4 / self.inputs

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """All x (N, D) and y (N, 1), or classes (N,)."""
        x = self.noise("x", self.train + self.held, self.inputs)
        f = x @ (math.sqrt(self.variance) * self.noise("w", self.inputs))  # (N,)
        if self.classes:
            u = rng.uniform(
                1, (len(x),), F64, rng.fold(self.seed, "y", self.train, self.held, self.inputs)
            )[0]
            return x, (u < torch.sigmoid(f)).long()
        return x, (f + self.noise("y", len(x))).unsqueeze(-1)

    @property
    def learned(self) -> tuple[Tensor, Tensor]:
        x, y = self.rows
        return x[: self.train], y[: self.train]

    @property
    def tested(self) -> tuple[Tensor, Tensor]:
        x, y = self.rows
        return x[self.train :], y[self.train :]

    def posterior(self, noise: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mean (D,) and precision (D, D) of the conjugate posterior; of classes those of a Gaussian
        at the mode.
        """
        x, y = self.learned
        prior = torch.eye(self.inputs, dtype=torch.float64) / self.variance
        if not self.classes:
            precision = prior + x.T @ x / noise**2
            return torch.linalg.solve(precision, x.T @ y[:, 0] / noise**2), precision
        w, precision = torch.zeros(self.inputs, dtype=torch.float64), prior
        for _ in range(
            50
        ):  # Newton steps on a concave function, half as long as they might be at first
            p = torch.sigmoid(x @ w)
            precision = prior + (x.T * (p * (1 - p))) @ x
            step = torch.linalg.solve(precision, x.T @ (y - p) - w / self.variance)
            w = w + step / max(1.0, float(step.norm()))
        return w, precision

    def draws(self, count: int) -> Tensor:
        """Independent draws of w, (count, D)."""
        mean, precision = self.posterior()
        root = torch.linalg.cholesky(torch.linalg.inv(precision))
        if not self.classes:
            return mean + self.noise("draws", count, self.inputs) @ root.T
        z = self.noise("proposals", 20 * count, self.inputs)
        wide = 1.3  # than the Gaussian at the mode, so that no tail is missed
        w = mean + wide * z @ root.T  # (20·count, D)
        x, y = self.learned
        f = w @ x.T  # (20·count, N)
        log_joint = (y * f - nn.functional.softplus(f)).sum(1) - w.square().sum(1) / (
            2 * self.variance
        )
        weights = torch.softmax(log_joint + z.square().sum(1) / 2, 0)
        u = (torch.arange(count) + 0.5).double() / count
        picked = w[torch.searchsorted(weights.cumsum(0), u).clamp_max(len(w) - 1)]
        return picked[rng.permutation(count, rng.fold(self.seed, "order"))]

    def target(self, noise: float = 1.0) -> Target:
        """A linear network without a bias; two classes have the logits 0 and x·w."""
        net = (
            Logits(self.inputs)
            if self.classes
            else nn.Linear(self.inputs, 1, bias=False, dtype=torch.float64)
        )
        likelihood = bayou.Categorical() if self.classes else bayou.Gaussian(noise)
        return Target.build(net, likelihood, bayou.Normal(math.sqrt(self.variance)), self.train)


class Logits(nn.Module):
    """(0, x·w): (B, 2)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, inputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x @ self.weight.T, (1, 0))


def gaussian(
    problem: Problem, *, noise: float = 1.0, width: float = 1.0, shrink: float = 1.0
) -> Posterior:
    """The conjugate posterior for this noise, ``width`` as wide, its mean moved towards 0."""
    mean, precision = problem.posterior(noise)
    root = (
        torch.linalg.cholesky(precision).inverse().T.contiguous() * width
    )  # upper triangular, R·Rᵀ = Λ⁻¹
    target = problem.target(noise)
    shapes = {"weight": torch.Size([1, problem.inputs])}
    weight = {"weight": shrink * mean.unsqueeze(0)}
    return GaussianPosterior(target, Network(target.net), weight, Full(shapes, {"root": root}))


def points(problem: Problem, weights: Tensor, chains: int = 1, noise: float = 1.0) -> Posterior:
    """The posterior that is made of these weights, (K, D), those of a chain side by side."""
    target = problem.target(noise)
    return Empirical(target, Network(target.net), {"weight": weights.unsqueeze(1)}, chains=chains)


def chained(problem: Problem, correlation: float) -> Tensor:
    """Two stationary chains of 400 draws, z' = ρ·z + √(1 − ρ²)·ε in the coordinates of the
    posterior: (800, D).
    """
    mean, precision = problem.posterior()
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    noise = problem.noise("chain", 400, 2, problem.inputs)
    z = [noise[0]]
    for step in noise[1:]:
        z.append(correlation * z[-1] + math.sqrt(1 - correlation**2) * step)
    return mean + torch.stack(z, 1).flatten(0, 1) @ root.T


def plug_in(problem: Problem) -> Posterior:
    """Least squares, and the noise of its residuals with N − D degrees of freedom."""
    x, y = problem.learned
    w = torch.linalg.lstsq(x, y).solution
    noise = float(((y - x @ w).square().sum() / (len(x) - problem.inputs)).sqrt())
    return points(problem, w.T, noise=noise)


def one_stays(problem: Problem) -> Posterior:
    """One chain of two never leaves its first draw."""
    draws = problem.draws(800).clone()
    draws[400:] = draws[400]
    return points(problem, draws, 2)


def all_stay(problem: Problem) -> Posterior:
    """Four chains that never leave where they began."""
    return points(problem, problem.draws(4).repeat_interleave(100, 0), 4)


def crawl(problem: Problem) -> Posterior:
    """Two random walks from the mode whose steps are 1/100 of a standard deviation: 400 of them go
    a fifth of it.
    """
    mean, precision = problem.posterior()
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    walks = problem.noise("walk", 2, 400, problem.inputs).cumsum(1).flatten(0, 1)
    return points(problem, mean + 0.01 * walks @ root.T, 2)


def confident(problem: Problem) -> Posterior:
    """The mode, four times as sure of its classes as it should be."""
    return points(problem, 4 * problem.posterior()[0].unsqueeze(0))


def trained(problem: Problem, steps: int) -> Posterior:
    """MAP of ``bayou.fit`` that was stopped after so many steps."""
    target = problem.target()
    return bayou.fit(
        target.net, problem.learned, method=bayou.MAP(steps=steps, compile=False), seed=problem.seed, progress=False,
        likelihood=bayou.Categorical() if problem.classes else bayou.Gaussian(1.0),
        prior=bayou.Normal(math.sqrt(problem.variance)),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Fits of one kind, which are right or wrong."""

    kind: str
    name: str
    make: Callable[[Problem], Posterior]
    classes: bool = False
    least: int = 0  # rows to learn from that it needs


CASES = (
    Case("right", "conjugate posterior, a Gaussian", gaussian),
    Case("right", "conjugate posterior, 4 chains of 100 independent draws", lambda p: points(p, p.draws(400), 4)),
    Case("right", "the same, 2 chains of 400 draws, autocorrelation 0.5", lambda p: points(p, chained(p, 0.5), 2)),
    Case("right", "least squares, noise of N − D degrees of freedom", plug_in, least=200),
    Case("right", "logistic regression, 4 chains of 100 draws", lambda p: points(p, p.draws(400), 4), classes=True),
    Case("wrong", "noise 3 × too small", lambda p: gaussian(p, noise=1 / 3)),
    Case("wrong", "noise 3 × too large", lambda p: gaussian(p, noise=3.0)),
    Case("wrong", "weights 10 × as uncertain as they are", lambda p: gaussian(p, width=10.0)),
    Case("wrong", "weights halfway from 0 to the mode", lambda p: gaussian(p, shrink=0.5)),
    Case("wrong", "MAP after 50 steps", lambda p: trained(p, 50)),
    Case("wrong", "one of two chains stays where it began", one_stays),
    Case("wrong", "four chains stay where they began", all_stay),
    Case("wrong", "two chains crawl from the mode", crawl),
    Case("wrong", "classes: the mode, logits 4 × too large", confident, classes=True),
    Case("wrong", "classes: MAP after 50 steps", lambda p: trained(p, 50), classes=True),
)  # fmt: skip


def judged(case: Case, size: tuple[int, int, int], seed: int) -> Checks:
    """What the gate says about one fit."""
    problem = Problem(*size, seed, case.classes)
    return check(
        case.make(problem),
        problem.learned,
        problem.tested,
        against=against(problem),
        seed=seed,
        samples=100,
    )


def against(problem: Problem) -> dict[str, bayou.diagnostics.baselines.Baseline]:
    outputs = (2,) if problem.classes else (1,)
    return baselines(problem.target().likelihood, *problem.learned, outputs, problem.seed)


def rates(number: int, seeds: int) -> tuple[list[float | None], Counter[str]]:
    """Of a case: the share of flagged fits by size, None where it needs more rows; how often every
    check flagged.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case, shares, names = CASES[number], list[float | None](), Counter[str]()
    for size in SIZES:
        if size[0] < case.least:
            shares.append(None)
            continue
        flagged = 0
        for seed in range(seeds):
            flags = judged(case, size, seed).flags
            flagged += bool(flags)
            names.update(one.name for one in flags)
        shares.append(flagged / seeds)
    return shares, names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=100, help="fits of every case and size (%(default)s)"
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    chosen = [k for k, case in enumerate(CASES) if options.only in f"{case.kind}: {case.name}"]
    sizes = " | ".join(f"{n:,} + {m:,}, D = {d}" for n, m, d in SIZES)
    lines = [
        "# How often the gate is wrong",
        "",
        f"Share of fits, in %, that `bayou.diagnostics.check` flags: {options.seeds} of every case and size (rows to "
        "learn from + rows to test on, inputs), problems whose posterior is known. Of right fits at most 5 % should be "
        "flagged, of wrong ones at least 95 %. Last: which check, as a share of all fits of the case.",
        "",
        f"| fit | {sizes} | all | by |",
        f"|---|{'---:|' * (len(SIZES) + 1)}---|",
    ]
    print("\n".join(lines), flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(rates, chosen, [options.seeds] * len(chosen))
        for k, (shares, names) in zip(chosen, results, strict=True):
            known = [share for share in shares if share is not None]
            cells = ["" if share is None else f"{100 * share:.0f}" for share in shares]
            by = ", ".join(
                f"{name} {100 * n / (options.seeds * len(known)):.1f}"
                for name, n in names.most_common(5)
            )
            title = f"{CASES[k].kind}: {CASES[k].name}"
            lines.append(
                f"| {title} | {' | '.join(cells)} | {100 * sum(known) / len(known):.1f} | {by} |"
            )
            print(lines[-1], flush=True)
    command = " ".join(["python experiments/measure/gate.py", *sys.argv[1:]])
    made = f"`{command}`, {date.today()}, bayou {bayou.__version__}, torch {torch.__version__}, {platform.machine()}."
    lines += ["", made, ""]
    if options.write:
        RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
