"""The truth that ``truth.py`` holds every method against: long HMC runs of two networks, and their
evidence.

    python -m experiments.truth_reference digits yacht --device cuda

makes ``truth_digits.safetensors`` and ``truth_yacht.safetensors`` beside this file. Chains go from
the prior to the posterior by annealing, which gives the evidence, and on from there by HMC, so that
no two of them share a start. With ``--size 0.01`` everything is a hundred times shorter: a trial.
The rows of yacht come from ``BAYOU_DATA`` and are kept in its file, so that nobody else needs them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.app.runs import nets
from bayou.core import rng
from bayou.core.params import flatten
from bayou.core.progress import Progress, Show
from bayou.data import load
from bayou.kernels import Joint, adaptation, hmc
from bayou.likelihoods import Likelihood
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.chains import rhat
from bayou.network import Network
from bayou.network.target import Target
from bayou.training.seeds import part_seed
from experiments.evidence import Evidence, evidence, prior_variance

HERE = Path(__file__).parent
PRIOR = bayou.Normal("fan_in", gain=3.0)  # N(0, 9/fan-in), weights and biases
LEVELS = 200  # quantiles of f that stand for its draws
ACCEPT, JITTER = 0.8, 0.2
Pair = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Lengths:
    """How long the chains are: annealing, then HMC."""

    chains: int
    temperatures: int
    annealing_leapfrogs: int
    warmup: int
    draws: int
    leapfrogs: int

    def scaled(self, size: float) -> Lengths:
        """Shorter or longer by the same factor, but for the number of chains."""
        times = {
            name: max(4, round(size * value))
            for name, value in vars(self).items()
            if name != "chains"
        }
        return replace(
            self, **times, chains=max(4, min(self.chains, round(10 * size * self.chains)))
        )


@final
@dataclass(frozen=True)
class Problem:
    """A network with its likelihood, whose posterior under ``PRIOR`` is the truth; how its chains
    run.
    """

    name: str
    net: str
    likelihood: Likelihood
    dtype: torch.dtype
    lengths: Lengths

    def path(self, folder: Path = HERE) -> Path:
        """Its file."""
        return folder / f"truth_{self.name}.safetensors"

    def build(self, x: Tensor, outputs: int, seed: int = 0) -> nn.Module:
        """The network with the first weights of a seed."""
        return nets.build(self.net, tuple(x.shape[1:]), outputs, seed=seed).to(x)


PROBLEMS = {
    one.name: one
    for one in (
        Problem(
            "digits",
            "digits",
            bayou.Categorical(),
            torch.float32,
            Lengths(48, 1500, 20, 150, 100, 200),
        ),
        Problem(
            "yacht",
            "relu-50",
            bayou.Gaussian(0.1),
            torch.float64,
            Lengths(192, 4000, 20, 150, 100, 500),
        ),
    )
}


@final
@dataclass(frozen=True)
class Reference:
    """What the chains say: the predictive at the test rows, the data, and numbers about them
    (``facts``).
    """

    problem: Problem
    predictive: Predictive
    train: Pair
    test: Pair
    facts: dict[str, Any]

    def build(self, seed: int) -> nn.Module:
        """The network that the truth is of."""
        outputs = (
            int(self.train[1].max()) + 1 if self.train[1].ndim == 1 else self.train[1].shape[1]
        )
        return self.problem.build(self.train[0], outputs, seed)

    @property
    def evidence(self) -> float:
        """log p(D), in nats."""
        return float(self.facts["log_evidence"])


@cache
def reference(name: str, folder: Path = HERE) -> Reference:
    """The reference of a problem from its file, in float32."""
    problem = PROBLEMS[name]
    path = problem.path(folder)
    if not path.exists():
        raise ValueError(
            f"there is no {path}; make it with `python -m experiments.truth_reference {name}`"
        )
    with safe_open(path, "pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        facts = json.loads(file.metadata()["facts"])
    if "x_train" in found:
        train, test = (found["x_train"], found["y_train"]), (found["x_test"], found["y_test"])
    else:
        data = load(name)
        train, test = data.train, data.test
        if not torch.equal(test[1], found["y_test"].long()):
            raise ValueError(
                f"the test rows of {name!r} are not those that {path.name} speaks of; make it again"
            )
    outputs = (
        found["log_probabilities"][None] if "log_probabilities" in found else found["quantiles"]
    )
    predictive = Predictive(problem.likelihood.bind(dtype=outputs.dtype), outputs)
    return Reference(problem, predictive, train, test, facts)


@torch.no_grad()
def hamiltonian(
    joint: Joint, batches: list[Pair], begin: Tensor, keep: Callable[[Tensor], Tensor], lengths: Lengths, seed: int,
    show: Show,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """HMC from ``begin`` (C, D): what ``keep`` makes of every draw, (C, K, ...), and how it went.

    The mass is the prior's precision; every chain learns its step size in the warm-up, by dual
    averaging.
    """
    inverse_mass, density = prior_variance(joint, seed), joint.density(batches, begin)
    chains, size = begin.shape

    def normal(step: int) -> Tensor:
        return rng.normal(chains, (size,), begin, part_seed(seed, "hmc", "momentum", step))

    state = hmc.init(begin, density)
    found = hmc.reasonable_step(
        state, density, normal(-1), torch.full_like(begin[:, 0], 0.01), inverse_mass
    )
    tuned = adaptation.init(begin, found)
    kept, rates, steps = [], torch.zeros_like(found), lengths.warmup + lengths.draws
    divergences = 0
    with Progress("HMC", steps, show) as progress:
        for step in range(steps):
            warming = step < lengths.warmup
            u = rng.uniform(chains, (2,), begin, part_seed(seed, "hmc", "accept", step))
            step_size = (tuned.log_step if warming else tuned.log_average).exp() * (
                1 + JITTER * (2 * u[:, 1] - 1)
            )
            state, info = hmc.step(
                state, density, normal(step), u[:, 0], step_size, inverse_mass, lengths.leapfrogs
            )
            if warming:
                tuned = adaptation.tune(tuned, info.accept, ACCEPT)
            else:
                kept.append(keep(state.position))
                rates, divergences = (
                    rates + info.accept / lengths.draws,
                    divergences + int(info.divergent.sum()),
                )
            progress.update(
                step + 1, accept=float(info.accept.mean()), log_joint=float(state.log_prob.mean())
            )
    how = {
        "accept": float(rates.mean()),
        "least_accept": float(rates.min()),
        "divergences": float(divergences),
    }
    return torch.stack(kept, 1), how | {"step_size": float(tuned.log_average.exp().mean())}


def make(
    problem: Problem, lengths: Lengths, path: Path, device: torch.device, seed: int, show: Show
) -> dict[str, Any]:
    """Run the chains and write the file; the facts."""
    data = load(problem.name)
    like = torch.empty((), dtype=problem.dtype, device=device)
    (x, y), (x_test, y_test) = (
        (x.to(like), y.to(device if y.dtype == torch.long else like))
        for x, y in (data.train, data.test)
    )
    target = Target.build(problem.build(x, data.output_size), problem.likelihood, PRIOR, len(x))
    started = time.monotonic()
    options: dict[str, Any] = {
        "chains": lengths.chains,
        "temperatures": lengths.temperatures,
        "seed": seed,
    }
    found: Evidence = evidence(
        target, (x, y), leapfrogs=lengths.annealing_leapfrogs, progress=show, **options
    )
    annealed = time.monotonic()
    print(f"{problem.name}: {found} ({annealed - started:.0f} s)", flush=True)
    joint = Joint(target, Network(target.net), target.start())
    begin = flatten(found.draws, 1)
    means, how = hamiltonian(
        joint, [(x, y)], begin, lambda w: joint.means(w, (x_test,)), lengths, seed, show
    )
    seconds = {
        "annealing": round(annealed - started, 1),
        "hmc": round(time.monotonic() - annealed, 1),
    }
    r_hat = rhat(means).flatten()
    r_hat = r_hat[r_hat.isfinite()]  # a probability that is 0 in every draw has none
    halves = [part.flatten(0, 1) for part in means.chunk(2)]  # of the chains, (C/2·K, B, ...)
    kinds = [_predictive(problem, part) for part in (*halves, means.flatten(0, 1))]
    tensors = {"y_test": y_test, **_summary(problem, means.flatten(0, 1))}
    if data.task == "regression":
        tensors |= {"x_train": x, "y_train": y, "x_test": x_test}
    scores = metrics.summary(kinds[2], y_test)
    facts = {
        "log_evidence": found.value, "log_evidence_error": found.standard_error, "log_weights": found.mean,
        "log_weights_spread": found.spread, "log_weights_ess": found.ess, "annealing_accept": found.accept,
        "rows": len(x), "r_hat_median": float(r_hat.median()), "r_hat_95": float(r_hat.quantile(0.95)),
        "r_hat_worst": float(r_hat.max()), "halves_total_variation": metrics.total_variation(*kinds[:2]),
        **how, **{f"test_{name}": value for name, value in scores.items()},
        "y_scale": data.y_scale, "lengths": vars(lengths), "seed": seed, "seconds": seconds, "where": _where(device),
    }  # fmt: skip
    floats = {
        name: value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    ready = {name: value.cpu().contiguous() for name, value in floats.items()}
    save_file(ready, str(path), {"facts": json.dumps(facts, indent=1)})
    return facts


def _summary(problem: Problem, means: Tensor) -> dict[str, Tensor]:
    """The draws (S, B, ...) in short: the mean of class probabilities, or quantiles of f row by
    row.
    """
    if isinstance(problem.likelihood, bayou.Categorical):
        return {"log_probabilities": means.double().mean(0).log().float()}
    middles = (torch.arange(LEVELS, dtype=means.dtype, device=means.device) + 0.5) / LEVELS
    return {"quantiles": torch.stack([means.quantile(q, 0) for q in middles])}


def _predictive(problem: Problem, means: Tensor) -> Predictive:
    (outputs,) = _summary(problem, means).values()
    outputs = outputs[None] if isinstance(problem.likelihood, bayou.Categorical) else outputs
    return Predictive(problem.likelihood.bind(dtype=outputs.dtype, device=outputs.device), outputs)


def _where(device: torch.device) -> str:
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    return f"bayou {bayou.__version__}, torch {torch.__version__}, {machine}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(PROBLEMS), help=f"of {', '.join(PROBLEMS)}; all by default"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--size", type=float, default=1.0, help="a factor for all lengths; 0.01 is a trial"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder of the files; beside this one by default"
    )
    for name in vars(PROBLEMS["digits"].lengths):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None)
    given = parser.parse_args()
    for name in given.names:
        if name not in PROBLEMS:
            parser.error(f"there is no problem {name!r}; the names are {', '.join(PROBLEMS)}")
        lengths = PROBLEMS[name].lengths.scaled(given.size)
        own = {key: getattr(given, key) for key in vars(lengths) if getattr(given, key) is not None}
        where = PROBLEMS[name].path(given.out)
        facts = make(
            PROBLEMS[name],
            replace(lengths, **own),
            where,
            torch.device(given.device),
            given.seed,
            "plain",
        )
        print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
