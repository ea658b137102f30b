"""An experiment as a table: data sets × methods × seeds, each fitted and scored alike."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch

import bayou
from bayou.app.report.judge import prediction_options, score
from bayou.app.runs import nets
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.core.progress import Show
from bayou.data import CATALOGUE, DataSet, load
from bayou.inference.method import Method
from bayou.likelihoods import Likelihood
from bayou.network.target import PriorRules
from bayou.posteriors import Guided, Posterior
from bayou.select import Recipe
from experiments import figures, study
from experiments.study import Fit, Found


@final
@dataclass(frozen=True)
class Budget:
    """How long, and where: what every row of an experiment is given."""

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    lr: float = 1e-3
    schedule: str = "tail"
    compile: bool = False
    autocast: bool = False

    def settings(self, times: int = 1, **changes: Any) -> dict[str, Any]:
        """Settings of a method that descends a gradient; ``times`` as long as others."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {unit: times * given[unit] for unit in ("epochs", "steps") if given[unit]}
        return given | {"log_every": 100, "checkpoint_every": 10**9} | changes


@final
@dataclass(frozen=True)
class Row:
    """One line of a table: a method with its network and prior, and what was published for it.

    ``likelihood``: another than that of the experiment. ``rivals``: rows of which the one with the
    least NLL on a fifth of the training rows is fitted to all of them, in the place of this.
    """

    label: str
    method: Callable[[Budget], Method | Recipe]
    net: str
    prior: PriorRules = field(default_factory=lambda: bayou.Normal(1.0))
    published: str = ""
    likelihood: Likelihood | None = None
    rivals: tuple[Row, ...] = ()


@final
@dataclass(frozen=True)
class Experiment:
    """A table: data sets × rows × seeds. ``splits``: a seed is a published split of the data too.

    ``length`` of a run: epochs, or with ``in_steps`` optimizer steps, whatever the size of the
    data. ``held_out``: one in so many training rows is scored on, and neither test rows nor those
    out of distribution are looked at.
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
    schedule: str = "tail"
    autocast: bool = False  # on a GPU
    in_steps: bool = False
    held_out: int | None = None
    notes: str = ""

    @property
    def unit(self) -> str:
        """What a length counts."""
        return "steps" if self.in_steps else "epochs"

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Data sets × rows × seeds."""
        found = []
        for one in study.chosen(f"{self.name} has no data", data, self.data):
            labels = study.chosen(
                f"{self.name} has no row", only, [row.label for row in self.rows(one)]
            )
            count = seeds or self.seeds
            if self.splits:
                count = min(count, CATALOGUE[one].splits or count)
            long = length or self.length(one)
            found += [
                Fit(self.name, one, row.label, seed, long)
                for seed in range(count)
                for row in self.rows(one)
                if row.label in labels
            ]
        return found

    def budget(self, length: int, gpu: bool = False) -> Budget:
        """What a row is given."""
        rates: dict[str, Any] = {"lr": self.lr, "schedule": self.schedule, self.unit: length}
        return Budget(
            batch_size=self.batch_size, compile=gpu, autocast=gpu and self.autocast, **rates
        )

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit one row with one seed, and score it."""
        place = torch.device(device)
        row = next(row for row in self.rows(fit.data) if row.label == fit.label)
        data = _load(fit.data, fit.seed if self.splits else 0)
        if self.held_out is not None:
            data = hold_out(data, self.held_out)
        start = time.monotonic()
        told = {}
        if row.rivals:
            row = self._best(row, data, fit, place, show)
            told["chosen"] = row.label
        posterior, method = self._fitted(row, data, fit, place, show)
        seconds = time.monotonic() - start
        options = prediction_options(posterior, samples or 100, fit.seed)
        p, away, scores = score(posterior, data.test, data.ood, data.y_scale, options)
        if "accuracy" in scores:
            scores["error"] = 100 * (1 - scores["accuracy"])
        found: dict[str, float | None] = dict(scores) | {"elbo": None, "kl": None}
        if isinstance(posterior, Guided) and isinstance(method, bayou.VI):
            train = (data.train[0].to(place), data.train[1].to(place))
            bound = bayou.elbo(posterior, train, samples=4, seed=0)
            found["beta"] = method.kl_weight
            if bound.kind != "up to a constant":  # as with points that have a prior
                found |= {"elbo": bound.value / data.n, "kl": bound.kl}
            found["rise"] = rise(posterior.history, method.kl_weight) / data.n
        numbers = {name: found[name] for name in self.columns if name in found}
        curves = {}
        if (
            fit.seed == 0
            and self.held_out is None
            and data.task == "classification"
            and len(data.input_shape) == 3
        ):
            curves["curves"] = figures.curves(posterior, data, p, away, options)
        return numbers | told | {"seconds": round(seconds, 1)} | curves

    def _fitted(
        self, row: Row, data: DataSet, fit: Fit, place: torch.device, show: Show
    ) -> tuple[Posterior, Method | Recipe]:
        """The posterior of a row, and the method that made it."""
        assert fit.length is not None
        method = row.method(self.budget(fit.length, place.type == "cuda"))
        likelihood = row.likelihood or self.likelihood(data.name)
        net = nets.build(
            row.net, data.input_shape, likelihood.outputs(data.output_size), seed=fit.seed
        ).to(place)
        train = (data.train[0].to(place), data.train[1].to(place))
        options: dict[str, Any] = {
            "likelihood": likelihood,
            "prior": row.prior,
            "seed": fit.seed,
            "progress": show,
        }
        return raise_if_interrupted(bayou.fit(net, train, method=method, **options)), method

    def _best(self, row: Row, data: DataSet, fit: Fit, place: torch.device, show: Show) -> Row:
        """The rival with the least NLL on a fifth of the training rows."""
        held = hold_out(data, RIVALS)

        def nll(one: Row) -> float:
            posterior, _ = self._fitted(one, held, fit, place, show)
            return score(
                posterior,
                held.test,
                None,
                held.y_scale,
                prediction_options(posterior, 100, fit.seed),
            )[2]["nll"]

        return min(row.rivals, key=nll)

    def render(self, found: Found) -> str:
        """The table in markdown: means over seeds or splits, ± one standard error."""
        heads = [HEADS[name] for name in self.columns]
        lines = [
            f"# {self.title}",
            "",
            f"| data | method | {' | '.join(heads)} | published | {'splits' if self.splits else 'seeds'} | s |",
            f"|---|---|{'---:|' * len(heads)}---:|---:|---:|",
        ]
        lengths: set[int] = set()
        drawn = False
        for one in self.data:
            for row in self.rows(one):
                mine = self.line(row, one, found)
                if not mine:
                    continue
                lengths.add(mine[0]["length"])
                drawn = drawn or any(made.get("curves") for made in mine)
                cells = [
                    study.cell([r.get(name) for r in mine], DIGITS[name]) for name in self.columns
                ]
                seconds = fmean(r["seconds"] for r in mine)
                label = row.label + _said([made["chosen"] for made in mine if "chosen" in made])
                parts = [one, label, *cells, row.published, str(len(mine)), f"{seconds:.0f}"]
                lines.append(f"| {' | '.join(parts)} |")
        lengths_text = " or ".join(f"{length:,}" for length in sorted(lengths))
        lines += [
            "",
            f"{self.notes} {lengths_text} {self.unit}, Adam at {self.lr:g} ({self.schedule}), "
            f"batches of {self.batch_size}; means ± one standard error{self._published()}.".strip(),
            "",
            *([f"![Entropies, and a digit that turns]({self.name}.png)", ""] if drawn else []),
            study.made_by(found),
            "",
        ]
        return "\n".join(lines)

    def _published(self) -> str:
        if not any(row.published for one in self.data for row in self.rows(one)):
            return ""
        return "; published: RMSE, NLL" if self.splits else "; published: test error in %"

    def draw(self, found: Found, path: Path) -> bool:
        """A digit that turns and the entropies, of the rows that have them."""
        lines = [(one, row) for one in self.data for row in self.rows(one)]
        rows = [made for one, row in lines for made in self.line(row, one, found)]
        return figures.draw(
            self.title, list(dict.fromkeys(row.label for _, row in lines)), rows, path
        )

    def line(self, row: Row, data: str, found: Found) -> list[dict[str, Any]]:
        """Return the longest fits of a row, of which a line of the table is made."""
        mine = [
            made for made in found["rows"] if made["data"] == data and made["label"] == row.label
        ]
        longest = max((made["length"] for made in mine), default=self.length(data))
        return [made for made in mine if made["length"] == longest]


def _said(chosen: Sequence[str]) -> str:
    """Which rivals were chosen, and how often."""
    often = ", ".join(f"{count} × {label}" for label, count in sorted(Counter(chosen).items()))
    return f" ({often})" if often else ""


RIVALS = 5  # one in so many training rows is held out where rows are rivals


@lru_cache(maxsize=1)
def _load(name: str, split: int) -> DataSet:
    return load(name, split=split)


def hold_out(data: DataSet, every: int) -> DataSet:
    """Every so-manyeth training row in the place of the test rows; nothing is out of
    distribution.
    """
    held = torch.arange(data.n) % every == 0
    x, y = data.train
    return replace(
        data, train=(x[~held], y[~held]), test=(x[held], y[held]), ood=None, ood_name=None
    )


def rise(history: Sequence[dict[str, float]], beta: float) -> float:
    """How far E[log p(D|w)] − β·KL still rose: its mean over the last tenth less that over the
    tenth before 3/4.
    """
    last = history[-1]["step"] or 1.0

    def mean(start: float, stop: float) -> float:
        values = [
            r["log_likelihood"] - beta * r["kl"]
            for r in history
            if start <= r["step"] / last <= stop
        ]
        return fmean(values) if values else math.nan

    return mean(0.9, 1.0) - mean(0.65, 0.75)


DIGITS = {
    "error": 2, "nll": 4, "ece": 4, "auroc_entropy": 3, "beta": -1, "elbo": 3, "kl": 0, "rise": 3, "rmse": 3,
    "coverage": 3,
}  # fmt: skip
HEADS = {
    "error": "error, %", "nll": "NLL", "ece": "ECE", "auroc_entropy": "AUROC, entropy", "beta": "β", "elbo": "ELBO/N",
    "kl": "KL", "rise": "still rising", "rmse": "RMSE", "coverage": "90 % intervals cover",
}  # fmt: skip
