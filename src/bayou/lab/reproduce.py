"""Published experiments, run again: ``bayou reproduce NAME``. Rows are written down as they finish, and run once."""

from __future__ import annotations

import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch

import bayou
from bayou import metrics
from bayou.lab import nets
from bayou.lab.data import CATALOGUE, DataSet, load
from bayou.lab.runs import read_json, write_json, write_text
from bayou.likelihoods import Likelihood
from bayou.methods.method import Method
from bayou.posteriors import Guided
from bayou.progress import Show
from bayou.target import PriorRules


@final
@dataclass(frozen=True)
class Budget:
    """How long, and where: what every row of an experiment is given."""

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    lr: float = 1e-3
    compile: bool = False

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Settings of a method that descends a gradient."""
        given = {"epochs": self.epochs, "steps": self.steps, "batch_size": self.batch_size, "lr": self.lr}
        return given | {"compile": self.compile, "log_every": 500, "checkpoint_every": 10**9} | changes


@final
@dataclass(frozen=True)
class Row:
    """One line of a table: a method with its network and prior, and what was published for it."""

    label: str
    method: Callable[[Budget], Method]
    net: str
    prior: PriorRules = field(default_factory=lambda: bayou.Normal(1.0))
    published: str = ""


@final
@dataclass(frozen=True)
class Experiment:
    """A table: data sets × rows × seeds. ``splits``: a seed is a published split of the data too.

    ``length`` of a run: epochs, or with ``in_steps`` optimizer steps, whatever the size of the data.
    """

    name: str
    title: str
    data: tuple[str, ...]
    rows: Callable[[str], tuple[Row, ...]]
    length: Callable[[str], int]
    likelihood: Callable[[str], Likelihood]
    columns: tuple[str, ...]
    seeds: int = 3
    splits: bool = False
    lr: float = 1e-3
    batch_size: int = 128
    in_steps: bool = False
    notes: str = ""

    @property
    def unit(self) -> str:
        """What a length counts."""
        return "steps" if self.in_steps else "epochs"


def _map(budget: Budget, **changes: Any) -> bayou.MAP:
    return bayou.MAP(**budget.settings(**changes))


def _vi(guide: Any, **changes: Any) -> Callable[[Budget], Method]:
    return lambda budget: bayou.VI(guide, **budget.settings(**changes))


def _lenet_rows(net: str, published: dict[str, str], prior: PriorRules, members: int = 5) -> tuple[Row, ...]:
    """L2, dropout, ensemble, FFG, FFLU, MNF, as in Louizos & Welling 2017."""
    flat: dict[str, Any] = {"l2": 1e-4}
    rows = (
        Row("L2", lambda b: _map(b, **flat), net),
        Row("dropout", lambda b: bayou.MCDropout(_map(b, **flat)), f"{net}-dropout"),
        Row(f"ensemble of {members}", lambda b: bayou.Ensemble(members, of=_map(b, **flat)), net),
        Row("FFG", _vi(bayou.FFG()), net, prior),
        Row("FFLU", _vi(bayou.SparseVD()), net, prior),
        Row("MNF", _vi(bayou.MNF()), net, prior),
    )
    return tuple(Row(r.label, r.method, r.net, r.prior, published.get(r.label.split(" of ")[0], "")) for r in rows)


def _mnist_fc(data: str) -> tuple[Row, ...]:
    """Plain, dropout, Bayes by Backprop with two priors (Blundell 2015), 400 units."""
    mixture = bayou.ScaleMixture(0.25, 1.0, math.exp(-6))
    return (
        Row("SGD", lambda b: bayou.MLE(**b.settings()), "mlp-400", published="1.83"),
        Row("dropout", lambda b: bayou.MCDropout(bayou.MLE(**b.settings())), "mlp-400-dropout", published="1.51"),
        Row("Bayes by Backprop, Gaussian", _vi(bayou.FFG()), "mlp-400", bayou.Normal(1.0), "1.82"),
        Row("Bayes by Backprop, scale mixture", _vi(bayou.FFG()), "mlp-400", mixture, "1.36"),
        Row("MNF", _vi(bayou.MNF()), "mlp-400", bayou.Normal(1.0)),
    )


UCI_PUBLISHED = {  # RMSE and NLL: deep ensembles (Lakshminarayanan 2017), MC dropout (Gal & Ghahramani 2016)
    "boston": ("3.28, 2.41", "2.97, 2.46"),
    "concrete": ("6.03, 3.06", "5.23, 3.04"),
    "energy": ("2.09, 1.38", "1.66, 1.99"),
    "kin8nm": ("0.09, −1.20", "0.10, −0.95"),
    "naval": ("0.00, −5.63", "0.01, −3.80"),
    "power": ("4.11, 2.79", "4.02, 2.80"),
    "protein": ("4.71, 2.83", "4.36, 2.89"),
    "wine": ("0.64, 0.94", "0.62, 0.93"),
    "yacht": ("1.58, 1.18", "1.11, 1.55"),
}


def _uci(data: str) -> tuple[Row, ...]:
    """One hidden layer; learned noise."""
    ensemble, dropout = UCI_PUBLISHED[data]
    net, thin = ("relu-100", "relu-100-dropout") if data == "protein" else ("relu-50", "relu-50-dropout")
    prior = bayou.Normal("fan_in", gain=3.0)
    return (
        Row("MAP", _map, net, prior),
        Row("dropout", lambda b: bayou.MCDropout(_map(b)), thin, prior, dropout),
        Row("ensemble of 5", lambda b: bayou.Ensemble(5, of=_map(b)), net, prior, ensemble),
        Row("Laplace", lambda b: bayou.Laplace("kronecker", start=_map(b)), net, prior),
        Row("FFG", _vi(bayou.FFG()), net, prior),
        Row("MNF", _vi(bayou.MNF()), net, prior),
    )


CLASSES = ("error", "nll", "ece", "auroc_entropy", "elbo", "kl")
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "mnist-fc",
            "MNIST, fully connected, 400 units: Bayes by Backprop (Blundell 2015)",
            ("mnist",),
            _mnist_fc,
            lambda data: 50,
            lambda data: bayou.Categorical(),
            CLASSES,
        ),
        Experiment(
            "mnist-lenet",
            "MNIST, LeNet 20-50-500, notMNIST out of distribution (Louizos & Welling 2017)",
            ("mnist",),
            lambda data: _lenet_rows(
                "lenet",
                {"L2": "0.6", "dropout": "0.5", "ensemble": "0.7", "FFG": "0.9", "FFLU": "0.9", "MNF": "0.7"},
                bayou.Normal(1.0),
            ),
            lambda data: 20,
            lambda data: bayou.Categorical(),
            CLASSES,
        ),
        Experiment(
            "cifar5",
            "CIFAR-5, LeNet 192-192-1000, classes 5–9 out of distribution (Louizos & Welling 2017)",
            ("cifar5",),
            lambda data: _lenet_rows(
                "lenet-cifar",
                {"L2": "24", "dropout": "16", "ensemble": "21", "FFG": "22", "FFLU": "23", "MNF": "16"},
                bayou.Normal("fan_in", gain=1.4142),
            ),
            lambda data: 40,
            lambda data: bayou.Categorical(),
            CLASSES,
            lr=3e-4,
        ),
        Experiment(
            "uci",
            "UCI regression with the published splits (Hernández-Lobato & Adams 2015)",
            tuple(UCI_PUBLISHED),
            _uci,
            lambda data: 10_000 if data in ("protein", "naval", "power", "kin8nm") else 5000,
            lambda data: bayou.Gaussian(0.5, learn=True),
            ("rmse", "nll", "coverage", "elbo"),
            seeds=5,
            splits=True,
            lr=5e-3,
            batch_size=64,
            in_steps=True,
            notes="RMSE and NLL in the units of the data.",
        ),
    )
}


def find(name: str) -> Experiment:
    """The experiment of a name, or a ValueError that lists them."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; the names are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def reproduce(
    name: str,
    folder: Path,
    *,
    seeds: int | None = None,
    length: int | None = None,
    only: Sequence[str] = (),
    data: Sequence[str] = (),
    device: str = "cpu",
    samples: int = 100,
    jobs: int = 1,
    show: Show = False,
    tell: Callable[[str], None] = print,
    command: str = "",
) -> Path:
    """Run an experiment, or what is left of it, and write its table to ``folder``/NAME.md; numbers beside it."""
    experiment = find(name)
    chosen = tuple(data) or experiment.data
    odd = [one for one in chosen if one not in experiment.data]
    if odd:
        raise ValueError(f"{name} has no data {odd[0]!r}; it has {', '.join(experiment.data)}")
    numbers_path, table_path = folder / f"{name}.json", folder / f"{name}.md"
    found: dict[str, Any] = read_json(numbers_path) if numbers_path.exists() else {"rows": []}
    done = {(r["data"], r["label"], r["seed"], r["length"]) for r in found["rows"]}
    fits = [fit for fit in _fits(experiment, chosen, only, seeds, length) if fit.key not in done]
    with ExitStack() as stack:
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=context))
            futures = [pool.submit(measure, fit, device, samples, threads=1) for fit in fits]
            results: Iterator[dict[str, Any]] = (future.result() for future in as_completed(futures))
        else:
            results = (measure(fit, device, samples, show) for fit in fits)
        for result in results:
            found["rows"].append(result)
            found |= {"command": command, "made": str(date.today()), "where": _where(torch.device(device))}
            write_json(numbers_path, found)
            write_text(table_path, render(experiment, found))
            known = {key: value for key, value in result.items() if value is not None}
            tell("  ".join(f"{key} {v:.4g}" if isinstance(v, float) else f"{v}" for key, v in known.items()))
    return table_path


@final
@dataclass(frozen=True)
class Fit:
    """One fit of an experiment, by names: what a process of its own needs to know."""

    experiment: str
    data: str
    label: str
    seed: int
    length: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.data, self.label, self.seed, self.length


def _fits(
    experiment: Experiment, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
) -> list[Fit]:
    found = []
    for one in data:
        labels = [row.label for row in experiment.rows(one)]
        odd = [label for label in only if label not in labels]
        if odd:
            raise ValueError(f"{experiment.name} has no row {odd[0]!r}; it has {', '.join(labels)}")
        count = seeds or experiment.seeds
        if experiment.splits:
            count = min(count, CATALOGUE[one].splits or count)
        found += [
            Fit(experiment.name, one, label, seed, length or experiment.length(one))
            for seed in range(count)
            for label in labels
            if not only or label in only
        ]
    return found


@lru_cache(maxsize=1)
def _load(name: str, split: int) -> DataSet:
    return load(name, split=split)


def measure(fit: Fit, device: str, samples: int, show: Show = False, threads: int | None = None) -> dict[str, Any]:
    """Fit one row with one seed, and score it."""
    if threads is not None:
        torch.set_num_threads(threads)
    experiment, place = find(fit.experiment), torch.device(device)
    row = next(row for row in experiment.rows(fit.data) if row.label == fit.label)
    data = _load(fit.data, fit.seed if experiment.splits else 0)
    how_long = {experiment.unit: fit.length}
    budget = Budget(batch_size=experiment.batch_size, lr=experiment.lr, compile=place.type == "cuda", **how_long)
    net = nets.build(row.net, data.input_shape, data.output_size, seed=fit.seed).to(place)
    train = (data.train[0].to(place), data.train[1].to(place))
    start = time.monotonic()
    posterior = bayou.fit(
        net,
        train,
        method=row.method(budget),
        likelihood=experiment.likelihood(data.name),
        prior=row.prior,
        seed=fit.seed,
        progress=show,
    )
    seconds = time.monotonic() - start
    options: dict[str, Any] = {
        "samples": min(samples, posterior.draws or samples),
        "seed": fit.seed,
        "batch_size": 2048,
    }
    p = posterior.predict(data.test[0], **options)
    away = None if data.ood is None else posterior.predict(data.ood, **options)
    scores = metrics.summary(p, data.test[1].to(p.outputs.device), away, scale=data.y_scale)
    if "accuracy" in scores:
        scores["error"] = 100 * (1 - scores["accuracy"])
    elbo = kl = None
    if isinstance(posterior, Guided):
        bound = bayou.elbo(posterior, train, samples=4, seed=0)
        elbo, kl = bound.value / data.n, bound.kl
    names = {"data": fit.data, "label": fit.label, "seed": fit.seed, "length": fit.length}
    numbers = {name: scores[name] for name in experiment.columns if name in scores}
    return names | numbers | {"elbo": elbo, "kl": kl, "seconds": round(seconds, 1)}


def _where(device: torch.device) -> str:
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    return f"bayou {bayou.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {machine}"


DIGITS = {"error": 2, "nll": 4, "ece": 4, "auroc_entropy": 3, "elbo": 3, "kl": 0, "rmse": 3, "coverage": 3}
HEADS = {
    "error": "error, %", "nll": "NLL", "ece": "ECE", "auroc_entropy": "AUROC, entropy", "elbo": "ELBO/N", "kl": "KL",
    "rmse": "RMSE", "coverage": "90 % intervals cover",
}  # fmt: skip


def render(experiment: Experiment, found: dict[str, Any]) -> str:
    """The table in markdown: means over seeds or splits, ± one standard error."""
    heads = [HEADS[name] for name in experiment.columns]
    lines = [
        f"# {experiment.title}",
        "",
        f"| data | method | {' | '.join(heads)} | published | {'splits' if experiment.splits else 'seeds'} | s |",
        f"|---|---|{'---:|' * len(heads)}---:|---:|---:|",
    ]
    lengths: set[int] = set()
    for one in experiment.data:
        for row in experiment.rows(one):
            mine = [r for r in found["rows"] if r["data"] == one and r["label"] == row.label]
            if not mine:
                continue
            longest = max(r["length"] for r in mine)
            mine = [r for r in mine if r["length"] == longest]
            lengths.add(longest)
            cells = [_cell([r.get(name) for r in mine], DIGITS[name]) for name in experiment.columns]
            seconds = sum(r["seconds"] for r in mine) / len(mine)
            parts = [one, row.label, *cells, row.published, str(len(mine)), f"{seconds:.0f}"]
            lines.append(f"| {' | '.join(parts)} |")
    lengths_text = " or ".join(f"{length:,}" for length in sorted(lengths))
    lines += [
        "",
        f"{experiment.notes} {lengths_text} {experiment.unit}, Adam at {experiment.lr:g}, batches of "
        f"{experiment.batch_size}; means ± one standard error; published: {_published(experiment)}.".strip(),
        "",
        f"`{found.get('command', '')}`, {found.get('made', '')}, {found.get('where', '')}.",
        "",
    ]
    return "\n".join(lines)


def _published(experiment: Experiment) -> str:
    return "RMSE, NLL" if experiment.splits else "test error in %"


def _cell(values: list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = sum(known) / len(known)
    text = f"{mean:,.{digits}f}"
    if len(known) > 1:
        text += f" ± {metrics.standard_error(known):,.{digits}f}"
    return text
