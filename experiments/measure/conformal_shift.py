"""Coverage of conformal prediction where new rows are not like the held-out ones.

    python -m experiments.measure.conformal_shift            # all studies, about two minutes on a core
    python -m experiments.measure.conformal_shift labels     # one of them, printed only

Each study has a truth that is known, a posterior fitted to rows before the shift (or, for streams, a
fixed forecast), held-out rows before the shift and new rows after it. A repetition draws held-out
and new rows; the standard error is over repetitions. The level is .9.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations import (
    OnlineConformal,
    control_risk,
    density_ratio,
    label_ratio,
    recency_weights,
)
from experiments.study import commit, where

RESULTS = Path(__file__).parents[1] / "results" / "conformal-shift.md"
COMMAND = "python -m experiments.measure.conformal_shift"
LEVEL = 0.9
NEW_ROWS = 2000
Result = tuple[str, float, float]  # of a repetition: the row of the table, coverage, size
Study = Callable[[torch.Generator, int], Iterator[Result]]


def covers(interval: tuple[Tensor, Tensor], y: Tensor) -> tuple[float, float]:
    """The coverage of intervals and the median of their widths."""
    low, high = interval
    covered = ((low <= y) & (y <= high)).double().mean()
    return float(covered), float((high - low).median())


def contains(mask: Tensor, y: Tensor) -> tuple[float, float]:
    """The coverage of sets and their mean size."""
    covered = mask.gather(-1, y.unsqueeze(-1)).double().mean()
    return float(covered), float(mask.sum(-1).double().mean())


# --- shift of the inputs ------------------------------------------------------------------------


def numbers(x: Tensor, generator: torch.Generator) -> Tensor:
    """y = sin(2 x_0) + x_1/2 + noise whose standard deviation grows with |x_0|."""
    noise = (0.1 + 0.5 * x[:, :1].abs()) * torch.randn(len(x), 1, generator=generator)
    return torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:] + noise


def fit_numbers() -> bayou.Posterior:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 2, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 50), nn.SiLU(), nn.Linear(50, 1))
    return bayou.fit(
        net,
        (x, numbers(x, generator)),
        bayou.MAP(steps=600, lr=0.01),
        likelihood=bayou.Gaussian(0.5),
        progress=False,
    )


def covariate(
    posterior: bayou.Posterior,
    name: str,
    draw: Callable[[torch.Generator], Tensor],
    log_ratio: Callable[[Tensor], Tensor],
) -> Study:
    """Inputs from N(0, I) before and from ``draw`` after the shift."""

    def study(generator: torch.Generator, repetition: int) -> Iterator[Result]:
        x = torch.randn(1500, 2, generator=generator)
        held_out = (x, numbers(x, generator))
        new = draw(generator)
        unlabeled = draw(generator)
        y = numbers(new, generator)
        weights = {
            "plain": None,
            "weights known": lambda rows: log_ratio(rows).exp(),
            "weights by logistic regression": density_ratio(x, unlabeled, seed=repetition),
        }
        if repetition < SLOW_REPETITIONS:
            for by in ("network", "flows"):
                ratio = density_ratio(x, unlabeled, by=by, seed=repetition)
                weights[f"weights by {by}"] = ratio
        for label, row_weights in weights.items():
            c = bayou.conformal(posterior, held_out, LEVEL, score="split", weights=row_weights)
            yield (f"{name}: {label}", *covers(c.interval(new), y))

    return study


def moved(generator: torch.Generator) -> Tensor:
    return torch.randn(NEW_ROWS, 2, generator=generator) + torch.tensor([1.4, 0.0])


def moved_log_ratio(x: Tensor) -> Tensor:
    return 1.4 * x[:, 0] - 1.4**2 / 2


def spread(generator: torch.Generator) -> Tensor:
    """x_0 from two bumps at ±1.5 with a standard deviation of .5."""
    x = torch.randn(NEW_ROWS, 2, generator=generator)
    sign = 2.0 * (torch.rand(NEW_ROWS, generator=generator) < 0.5) - 1
    x[:, 0] = 1.5 * sign + 0.5 * x[:, 0]
    return x


def spread_log_ratio(x: Tensor) -> Tensor:
    bumps = torch.stack([-2 * (x[:, 0] - center).square() for center in (-1.5, 1.5)])
    return bumps.logsumexp(0) + x[:, 0].square() / 2  # log 2 − log 2: two bumps of std 1/2


# --- shift of the labels ------------------------------------------------------------------------

CENTERS = torch.tensor([[0.0, 0.0], [1.8, 0.0], [0.0, 1.8]])
BEFORE = torch.tensor([0.75, 0.2, 0.05])
AFTER = torch.tensor([0.15, 0.3, 0.55])


def classes(rows: int, frequencies: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.multinomial(frequencies, rows, replacement=True, generator=generator)
    return CENTERS[y] + torch.randn(rows, 2, generator=generator), y


def fit_classes() -> bayou.Posterior:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 3))
    data = classes(600, BEFORE, generator)
    return bayou.fit(net, data, bayou.MAP(steps=400, lr=0.01), progress=False)


def labels(generator: torch.Generator, repetition: int) -> Iterator[Result]:
    posterior = MODELS["classes"]
    held_out = classes(1000, BEFORE, generator)
    new, y = classes(NEW_ROWS, AFTER, generator)
    unlabeled, _ = classes(NEW_ROWS, AFTER, generator)
    options = {
        "plain": {},
        "weights known": {"label_weights": AFTER / BEFORE},
        "weights by a confusion matrix": {
            "label_weights": label_ratio(posterior, held_out, unlabeled)
        },
        "threshold by class": {"by_class": True},
    }
    for name, arguments in options.items():
        c = bayou.conformal(posterior, held_out, LEVEL, **arguments)
        yield (f"labels: {name}", *contains(c.set(new), y))


# --- groups -------------------------------------------------------------------------------------


def groups(generator: torch.Generator, repetition: int) -> Iterator[Result]:
    """One row in five is of a group whose noise is three times that of the others."""

    def draw(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(rows, 2, generator=generator)
        is_noisy = torch.rand(rows, generator=generator) < 0.2
        noise = torch.randn(rows, 1, generator=generator) * (0.3 + 0.6 * is_noisy.unsqueeze(1))
        return x, torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:] + noise, is_noisy

    posterior = MODELS["numbers"]
    x, y, is_noisy = draw(1000)
    new, y_new, is_new_noisy = draw(NEW_ROWS)
    plain = bayou.conformal(posterior, (x, y), LEVEL).interval(new)
    c = bayou.conformal(posterior, (x, y), LEVEL, groups=is_noisy)
    by_group = c.interval(new, is_new_noisy)
    for name, interval in (("plain", plain), ("by group", by_group)):
        low, high = (end[is_new_noisy] for end in interval)
        yield (f"noisy group: {name}", *covers((low, high), y_new[is_new_noisy]))


# --- time ---------------------------------------------------------------------------------------


class Forecast:
    """Says N(x, 1) for every row."""

    likelihood = bayou.Gaussian(1.0).bind(dtype=torch.float64)

    def predict(self, x: Tensor, samples: int | None = None, *, seed: int = 0) -> Predictive:
        return Predictive(self.likelihood, x.unsqueeze(0))


def blocks(generator: torch.Generator, repetition: int) -> Iterator[Result]:
    """The noise of the last 250 of 1,000 held-out rows is twice that of the others, as of new rows."""
    scale = torch.ones(1000 + NEW_ROWS, 1, dtype=torch.float64)
    scale[750:] = 2.0
    noise = torch.randn(len(scale), 1, generator=generator, dtype=torch.float64)
    x = torch.zeros_like(scale)
    y = scale * noise
    held_out = (x[:1000], y[:1000])
    for name, weights in (
        ("plain", None),
        ("recency weights, half-life 60", recency_weights(1000, 60.0)),
    ):
        c = bayou.conformal(Forecast(), held_out, LEVEL, score="split", weights=weights)
        yield (f"time blocks: {name}", *covers(c.interval(x[1000:]), y[1000:]))


def drift(generator: torch.Generator, repetition: int) -> Iterator[Result]:
    """The scale of the noise grows to four times over 1,000 rows of 40 streams, each with its α_t."""
    steps = 1000
    shape = {"generator": generator, "dtype": torch.float64}
    held = torch.randn(300, REPETITIONS, **shape)
    scale = torch.exp2(2 * torch.arange(steps, dtype=torch.float64) / steps).unsqueeze(1)
    y = scale * torch.randn(steps, REPETITIONS, **shape)
    p_held = Forecast().predict(torch.zeros_like(held))
    p = Forecast().predict(torch.zeros(1, REPETITIONS, dtype=torch.float64))
    c = bayou.conformal(Forecast(), (torch.zeros_like(held), held), LEVEL, score="split")
    low, high = c.interval(p)
    for stream in range(REPETITIONS):
        interval = (low[:, stream], high[:, stream])
        yield ("drift online: plain", *covers(interval, y[:, stream]))
    settings = {
        "adaptive, γ = .05": {"step_size": 0.05},
        "adaptive, six γ": {"step_size": OnlineConformal.STEP_SIZES},
        "window of 50 rows, γ = 0": {"step_size": 0.0, "window": 50},
    }
    for name, options in settings.items():
        online = OnlineConformal(LEVEL, score="split", **options)
        online.calibrate(p_held, held)
        widths = []
        for row in y.split(1):
            low, high = online.interval(p)
            widths.append(high - low)
            online.observe(row)
        width = torch.cat(widths).median(0).values
        for coverage, size in zip(online.coverage.tolist(), width.tolist(), strict=True):
            yield (f"drift online: {name}", coverage, size)


# --- risk ---------------------------------------------------------------------------------------


def risk(generator: torch.Generator, repetition: int) -> Iterator[Result]:
    """The fraction of true labels that are found, 1 − false negative rate, of eight labels."""
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 4, generator=generator)
        return x, (torch.rand(rows, 8, generator=generator) < torch.sigmoid(x @ weight - 1)).float()

    class Labels:
        """Probabilities that are too small."""

        likelihood = bayou.likelihoods.Bernoulli().bind()

        def predict(self, x: Tensor, samples: int | None = None, *, seed: int = 0) -> Predictive:
            return Predictive(self.likelihood, (0.5 * x @ weight - 1).unsqueeze(0))

    posterior = Labels()
    held_out = draw(500)
    new, y = draw(NEW_ROWS)
    control = control_risk(posterior, held_out, "false negatives", 1 - LEVEL)
    masks = {"p ≥ 1/2": posterior.predict(new).mean >= 0.5, "risk control": control.predict(new)}
    for name, mask in masks.items():
        rate = ((y > 0) & ~mask).sum(-1) / y.sum(-1).clamp_min(1)
        yield (f"labels found: {name}", 1 - float(rate.mean()), float(mask.sum(-1).float().mean()))


MODELS: dict[str, bayou.Posterior] = {}
SLOW_REPETITIONS = 6  # of networks and flows, which are fitted in each
REPETITIONS = 40


def studies() -> dict[str, tuple[Study, int]]:
    """Every study with its number of repetitions."""
    MODELS["numbers"] = fit_numbers()
    MODELS["classes"] = fit_classes()
    numbers_posterior = MODELS["numbers"]
    return {
        "moved": (
            covariate(numbers_posterior, "inputs moved", moved, moved_log_ratio),
            REPETITIONS,
        ),
        "spread": (
            covariate(numbers_posterior, "inputs spread", spread, spread_log_ratio),
            REPETITIONS,
        ),
        "labels": (labels, REPETITIONS),
        "groups": (groups, REPETITIONS),
        "blocks": (blocks, REPETITIONS),
        "drift": (drift, 1),
        "risk": (risk, REPETITIONS),
    }


def table(results: dict[str, list[tuple[float, float]]]) -> str:
    """The rows of the table: coverage and size, means ± standard errors."""
    lines = ["| shift: method | repetitions | coverage | size |", "|---|---:|---:|---:|"]
    for name, values in results.items():
        coverage, size = torch.tensor(values, dtype=torch.float64).T
        error = float(coverage.std()) / len(coverage) ** 0.5
        lines.append(
            f"| {name} | {len(coverage)} | {coverage.mean():.3f} ± {error:.3f} | {size.mean():.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write it if all studies ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", nargs="*", help="moved, spread, labels, groups, blocks, drift, risk"
    )
    chosen = parser.parse_args().study
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", bayou.BayouWarning)
    source = f"`{COMMAND}`, commit {commit()}, {date.today()}, {where('cpu')}."
    begin = time.process_time()
    results: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, (study, repetitions) in studies().items():
        if chosen and name not in chosen:
            continue
        for repetition in range(repetitions):
            generator = torch.Generator().manual_seed(1000 + repetition)
            for row, coverage, size in study(generator, repetition):
                results[row].append((coverage, size))
    text = table(results)
    print(text, f"\n{time.process_time() - begin:.0f} s of processor time")
    if not chosen:
        RESULTS.write_text(f"{HEAD}{text}\n\n{source}\n")


HEAD = f"""# Coverage under shift

Conformal prediction at level {LEVEL:g} where new rows are not like the held-out ones: means ± standard errors over
repetitions with new held-out and new rows each. *Size*: the median width of an interval, or the mean number of classes or
labels in a set. `experiments/measure/conformal_shift.py` has the simulations.

"""


if __name__ == "__main__":
    main()
