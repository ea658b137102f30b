"""Which settings presets should have: candidates, judged on a fifth of the training rows of data of
many kinds.

No row that is reported elsewhere is tested on: made tables are drawn anew, with seeds that
``defaults.py`` does not report; of real data only training rows are looked at, four fifths of them
to learn from and a fifth to judge by.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, cast, final

import numpy as np
import torch

import bayou
from bayou import metrics
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.core.progress import Show
from bayou.data import load
from bayou.inference.method import Method
from bayou.select import Recipe, Training
from bayou.select.auto import CANDIDATES
from bayou.select.named import find
from bayou.select.noise_and_prior import GAIN_OF_CLASSES, GAIN_OF_NUMBERS
from bayou.select.recipes import NamedMethod
from experiments import study
from experiments.defaults import COLUMNS, DIGITS, HEADS, LIMITS, TABLES, Arrays
from experiments.study import Fit, Found

FIRST = 100  # seed; those of defaults.py begin with 0
FIFTH = 5
LOADED = {
    "digits-few": True,
    "boston": False,
    "concrete": False,
    "energy": False,
    "yacht": False,
}  # whether classes
DATA = {name: table.classes for name, table in TABLES.items()} | LOADED


def _members(count: int) -> Callable[[Training], Method | Recipe]:
    return lambda config: find("ensemble").make(replace(config, members=count))


def _kronecker(config: Training) -> Method | Recipe:
    """Laplace of all weights with Kronecker factors, whatever the size of the network."""
    return _laplace("kronecker", config, curvature="ggn")


def _full(config: Training) -> Method | Recipe:
    return _laplace("full", config)


def _laplace(structure: Any, config: Training, **options: Any) -> Method | Recipe:
    """As the preset has it, with another structure."""
    recipe = cast(NamedMethod, find("laplace-last").make(config))
    laplace = bayou.Laplace(structure, start=recipe.start, prior="evidence", **options)
    return replace(recipe, method=laplace)


@final
@dataclass(frozen=True)
class Candidate:
    """A preset, with another ``gain`` of its prior or another method in its place."""

    method: str
    label: str
    gain: float | None = None
    make: Callable[[Training], Method | Recipe] | None = None

    @property
    def name(self) -> str:
        """The label of its rows."""
        return f"{self.method}, {self.label}"

    def built(self) -> Method | Recipe:
        """The method, with its settings."""
        made: Method | Recipe = (self.make or find(self.method).make)(Training())
        return made

    def settings(self, classes: bool) -> tuple[Any, ...]:
        """Return all that its rows depend on but data and seed.

        They are the method, the gain of the prior, and whether that is given, so that the scale of
        the prior is not searched.
        """
        gain = self.gain or (GAIN_OF_CLASSES if classes else GAIN_OF_NUMBERS)
        return self.built(), gain, self.gain is not None

    def present(self, classes: bool) -> bool:
        """Return whether it is what the preset does by itself."""
        return self.settings(classes) == Candidate(self.method, "").settings(classes)


def _varied(method: str, **options: Sequence[Any]) -> list[Candidate]:
    """One setting of the method at a time; its start keeps its own."""

    def make(name: str, value: Any) -> Callable[[Training], Method | Recipe]:
        def made(config: Training) -> Method | Recipe:
            recipe = cast(NamedMethod, find(method).make(config))
            chosen: Any = recipe.method  # a dataclass
            return replace(recipe, method=replace(chosen, **{name: value}))

        return made

    pairs = [(name, value) for name, values in options.items() for value in values]
    return [Candidate(method, f"{name} {value:g}", make=make(name, value)) for name, value in pairs]


@cache
def candidates(classes: bool) -> tuple[Candidate, ...]:
    """All of them; a preset that is none of the settings that were varied comes first, as it is.

    Rates, members and the gain of a prior are varied for classes alone, where a fit is short; for
    numbers, held-out rows of the fit itself say how wide a prior is.
    One that is given is kept, where a preset by itself may look for another.
    """
    found: list[Candidate] = []
    varied: dict[str, list[Candidate]] = {
        name: [] for name in ("map", "ensemble", "ffg", "mnf", "nodeflow")
    }
    if classes:
        varied["ensemble"] = [
            Candidate("ensemble", f"members {n}", make=_members(n)) for n in (3, 5, 10)
        ]
        varied["ffg"] = _varied("ffg", lr=(3e-3, 1e-2, 3e-2))
        varied["mnf"] = _varied("mnf", lr=(3e-3, 1e-2, 3e-2))
    varied["laplace"] = [
        Candidate("laplace", "full", make=_full),
        Candidate("laplace", "last layer", make=find("laplace-last").make),
        Candidate("laplace", "kronecker", make=_kronecker),
    ]
    for method, mine in varied.items():
        mine += [
            Candidate(method, f"gain {gain:g}", gain=gain)
            for gain in (1.0, 3.0, 10.0, 30.0)
            if classes
        ]
        if not any(one.present(classes) for one in mine):
            mine.insert(0, Candidate(method, "as it is"))
        found += mine
    return tuple(found)


def rows(name: str, seed: int) -> tuple[Arrays, Arrays]:
    """Training rows of a data set: four fifths to learn from, a fifth to judge by."""
    if name in TABLES:
        X, y = TABLES[name].split(FIRST + seed)[0]
    else:
        x, target = load(name).train
        X, y = x.flatten(1).double().numpy(), target.numpy().reshape(len(target))
    order = np.random.default_rng((FIRST, seed)).permutation(len(y))
    held, rest = np.sort(order[: len(y) // FIFTH]), np.sort(order[len(y) // FIFTH :])
    return (X[rest], y[rest]), (X[held], y[held])


@final
@dataclass(frozen=True)
class Choice:
    """Data sets × candidates × seeds."""

    name: str = "choice"
    title: str = "Settings of presets, by held-out training rows"
    seeds: int = 3

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Data sets × candidates × seeds."""
        if length is not None:
            raise ValueError(
                "choice runs every candidate as long as its settings say; leave out --length"
            )
        there = list(
            dict.fromkeys(one.name for classes in (False, True) for one in candidates(classes))
        )
        labels = study.chosen("choice has no row", only, there)
        chosen = {one: DATA[one] for one in study.chosen("choice has no data", data, list(DATA))}
        return [
            Fit(self.name, one, candidate.name, seed)
            for seed in range(seeds or self.seeds)
            for one, classes in chosen.items()
            for candidate in candidates(classes)
            if candidate.name in labels
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit a candidate, and score it on the fifth that it has not seen."""
        classes = DATA[fit.data]
        candidate = next(one for one in candidates(classes) if one.name == fit.label)
        train, (X, y) = rows(fit.data, fit.seed)
        kind = BayesClassifier if classes else BayesRegressor
        prior = None if candidate.gain is None else bayou.Normal("fan_in", gain=candidate.gain)
        options: dict[str, Any] = {"random_state": fit.seed, "device": device, "verbose": show}
        start = time.process_time()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            model = kind(
                candidate.built(), prior=prior, samples=samples or BayesRegressor.samples, **options
            ).fit(*train)
        seconds = time.process_time() - start
        p = model.predictive(X)
        known = np.searchsorted(model.classes_, y) if classes else y
        scores = metrics.summary(p, torch.as_tensor(known).to(p.outputs.device))
        if classes:
            scores["error"] = 100 * (1 - scores["accuracy"])
        return {name: scores[name] for name in COLUMNS[classes]} | {"seconds": round(seconds, 1)}

    def render(self, found: Found) -> str:
        """What to choose, over all data sets; the methods beside each other; every data set by
        itself.
        """
        lines = [f"# {self.title}", "", INTRODUCTION, ""]
        made: Made = {}
        for row in found["rows"]:
            made.setdefault((row["data"], row["label"]), {})[row["seed"]] = row
        for classes in (False, True):
            lines += _summary(made, classes) + _methods(made, classes) + _each(made, classes)
        return "\n".join([*lines, study.made_by(found), ""])

    def draw(self, found: Found, path: Path) -> bool:
        """Nothing."""
        return False


Made = dict[tuple[str, str], dict[int, dict[str, Any]]]  # rows by data and label, then by seed


def _score(made: Made, data: str, candidate: Candidate, name: str = "nll") -> dict[int, float]:
    """Return a score by seed."""
    mine = made.get((data, candidate.name), {})
    return {seed: row[name] for seed, row in mine.items() if row[name] is not None}


def _sets(classes: bool) -> list[str]:
    return [name for name, kind in DATA.items() if kind == classes]


def _preset(method: str, classes: bool) -> Candidate:
    return next(one for one in candidates(classes) if one.method == method and one.present(classes))


def _against(made: Made, one: Candidate, other: Candidate, classes: bool) -> list[float]:
    """Differences in NLL to another candidate, paired by seed: a mean for every data set that has
    both.
    """
    differences = []
    for data in _sets(classes):
        mine, theirs = _score(made, data, one), _score(made, data, other)
        if both := [mine[seed] - theirs[seed] for seed in mine if seed in theirs]:
            differences.append(fmean(both))
    return differences


def _summary(made: Made, classes: bool) -> list[str]:
    second, what = ("ece", "ECE") if classes else ("coverage", "90 % covers")
    head = f"| {'classes' if classes else 'numbers'} | setting | NLL less the preset's | better on | {what} |"
    lines = [
        f"{head}{'' if classes else ' sets outside |'} |",
        f"|---|---|---:|---:|---:|{'' if classes else '---:|'}---|",
    ]
    for one in candidates(classes):
        scores = [
            fmean(values)
            for data in _sets(classes)
            if (values := _score(made, data, one, second).values())
        ]
        if not scores:
            continue
        differences = _against(made, one, _preset(one.method, classes), classes)
        better = f"{sum(value < 0 for value in differences)} of {len(differences)}"
        now = one.present(classes)
        cells = [
            one.method,
            one.label,
            "" if now else study.cell(differences, 3),
            "" if now else better,
        ]
        cells.append(study.cell(scores, 3))
        if not classes:
            cells.append(
                f"{sum(not LIMITS[0] <= score <= LIMITS[1] for score in scores)} of {len(scores)}"
            )
        lines.append(f"| {' | '.join([*cells, '◂ the preset' if now else ''])} |")
    return [*lines, ""] if len(lines) > 2 else []


def _methods(made: Made, classes: bool) -> list[str]:
    """Presets as they are, beside MAP: what ``auto`` should choose from."""
    methods = list(dict.fromkeys(one.method for one in candidates(classes)))
    lines = ["| preset, as it is | NLL less MAP's | the best on | |", "|---|---:|---:|---|"]
    means = {
        data: {
            m: fmean(v) for m in methods if (v := _score(made, data, _preset(m, classes)).values())
        }
        for data in _sets(classes)
    }
    known = [mine for mine in means.values() if mine]
    for method in [method for method in methods if any(method in mine for mine in known)]:
        differences = _against(made, _preset(method, classes), _preset("map", classes), classes)
        wins = sum(min(mine, key=mine.__getitem__) == method for mine in known)
        tried = "◂ auto tries it" if method in CANDIDATES else ""
        cells = [
            method,
            "" if method == "map" else study.cell(differences, 3),
            f"{wins} of {len(known)}",
            tried,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if known else []


def _each(made: Made, classes: bool) -> list[str]:
    heads = [HEADS[name] for name in COLUMNS[classes]]
    lines = [
        f"| data | candidate | {' | '.join(heads)} | seeds | |",
        f"|---|---|{'---:|' * len(heads)}---:|---|",
    ]
    for data in _sets(classes):
        for one in candidates(classes):
            scores = {
                name: list(_score(made, data, one, name).values()) for name in COLUMNS[classes]
            }
            if scores["nll"]:
                cells = [study.cell(scores[name], DIGITS[name]) for name in COLUMNS[classes]]
                mark = "◂ the preset" if one.present(classes) else ""
                lines.append(
                    f"| {' | '.join([data, one.name, *cells, str(len(scores['nll'])), mark])} |"
                )
    return [*lines, ""] if len(lines) > 2 else []


INTRODUCTION = (
    "Estimators as in `defaults`, one setting changed at a time. Four fifths of the training rows of a data set are "
    "learned from, a fifth is judged by; no test row is looked at. Tables are those of `defaults`, drawn with the "
    f"seeds {FIRST}, {FIRST + 1}, ..., which it does not report; digits-few and the UCI sets give the training rows of "
    "their first split, whose held-out fifth changes with the seed. NLL less the preset's: paired by data set and "
    "seed, mean over data sets ± one standard error, in nats; below 0 is better than what the preset does now. "
    f"Coverage and ECE: means over data sets; a set is outside where its coverage is not within {LIMITS[0]} to "
    f"{LIMITS[1]}, which a fifth of a small table can be by chance."
)
