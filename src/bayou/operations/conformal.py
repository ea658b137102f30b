"""Conformal prediction: intervals and sets with guaranteed coverage for any posterior.

c = bayou.conformal(posterior, (x_held, y_held), level=0.9)
lower, upper = c.interval(x)        # numbers
mask = c.set(x)                     # classes

Held-out and new rows must be exchangeable. Then, with n held-out rows and no ties among scores,
level ≤ P(y in the interval or set) ≤ level + 1/(n + 1), on average over new and held-out rows (Vovk
2005).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.files import making, read_file, write_file
from bayou.params import under
from bayou.posteriors import Posterior, restore_any
from bayou.predictive import Predictive
from bayou.training.rows import all_rows, check_held_out

Kind = Literal["cqr", "split", "lac", "aps"]
INTERVALS, SETS = ("cqr", "split"), ("lac", "aps")
ROUNDING = 1e-9  # tolerance of (n + 1)·level, for whole numbers with rounding errors
Groups = Sequence[Any] | Tensor


class Predicts(Protocol):
    """A posterior, or any other object with ``predict``."""

    def predict(self, x: Any, samples: int | None = None, *, seed: rng.Seed = 0) -> Predictive:
        """The predictive of y for x."""


@dataclass(frozen=True)
class Score:
    """The nonconformity score of y under the predictive. See ``conformal`` for the kinds.

    ``randomized``: APS uses a random part of the probability of y itself.
    """

    kind: Kind
    level: float
    randomized: bool = True

    def ends(self, p: Predictive) -> tuple[Tensor, Tensor, Tensor]:
        """Two ends and a unit, (B, *event) each: the score is max(low − y, y − high)/unit."""
        if self.kind == "cqr":
            low, high = (end.double() for end in p.interval(self.level))
            return low, high, torch.ones_like(low)
        std = p.std.double()
        if not bool(std.isfinite().all()):
            raise ValueError(
                "the predictive has no finite standard deviation to scale residuals by; use score='cqr'"
            )
        return p.mean.double(), p.mean.double(), std.clamp_min(torch.finfo(std.dtype).tiny)

    def of_classes(self, p: Predictive, seed: rng.Seed) -> Tensor:
        """The score of every class, (B, *event, K)."""
        probability = p.probabilities.double()
        if self.kind == "lac":
            return 1 - probability
        ordered, order = probability.sort(stable=True, dim=-1, descending=True)
        share: Tensor | float = 1.0
        if self.randomized:
            share = rng.uniform(len(ordered), ordered.shape[1:-1], ordered, seed).unsqueeze(-1)
        score = ordered.cumsum(-1) - (1 - share) * ordered
        return torch.empty_like(score).scatter(-1, order, score)

    def of(self, p: Predictive, y: Tensor, seed: rng.Seed) -> Tensor:
        """The score of y: (B, *event)."""
        if self.kind in SETS:
            return self.of_classes(p, seed).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        low, high, unit = self.ends(p)
        return torch.maximum(low - y.double(), y.double() - high) / unit


@final
@dataclass(frozen=True, eq=False)
class Conformal:
    """The result of ``conformal``: a posterior and, for each group, the ``level`` quantile of the
    scores.

    ``thresholds`` (G, *event): one for each group and each coordinate of y. ``groups``: their
    labels, (None,) without
    groups. ``rows``: how many held-out rows each has. ``samples``, ``seed``: of the draws that
    predict.
    """

    posterior: Predicts
    score: Score
    thresholds: Tensor
    groups: tuple[Any, ...]
    rows: tuple[int, ...]
    samples: int | None
    seed: int

    @property
    def level(self) -> float:
        """The guaranteed coverage."""
        return self.score.level

    def interval(self, x: Any, groups: Groups | None = None) -> tuple[Tensor, Tensor]:
        """Lower and upper end of y, (B, *event) each; a single point if no y has such a small
        score.

        x: inputs of the network, or their ``posterior.predict(x, samples, seed=seed)``. ``groups``:
        one label for each row, if the guarantee is by group.
        """
        self._require(INTERVALS, "interval", "set")
        p = self._predictive(x)
        low, high, unit = self.score.ends(p)
        reach = self._threshold(groups, len(low)) * unit
        low, high = low - reach, high + reach
        crossed, middle = low > high, (low + high) / 2
        low, high = torch.where(crossed, middle, low), torch.where(crossed, middle, high)
        if p.likelihood.support == "counts":
            low = low.clamp_min(0.0)
        return low.to(p.outputs.dtype), high.to(p.outputs.dtype)

    def set(
        self, x: Any, groups: Groups | None = None, *, empty: bool = True, start: int = 0
    ) -> Tensor:
        """The set of classes, as a mask: bool (B, *event, K).

        If the accuracy of the posterior is above ``level``, some sets are empty. ``empty=False``
        adds the most probable class to those, and the coverage is then above ``level``. ``start``:
        the number of the first row, if rows are passed in parts and sets are randomized.
        """
        self._require(SETS, "set", "interval")
        p = self._predictive(x)
        scores = self.score.of_classes(p, rng.fold(self.seed, "new rows", start))
        mask = scores <= self._threshold(groups, len(scores)).unsqueeze(-1)
        if not empty:
            best = torch.zeros_like(mask).scatter(
                -1, p.probabilities.argmax(-1, keepdim=True), True
            )
            mask = mask | (best & ~mask.any(-1, keepdim=True))
        return mask

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write posterior and thresholds to one file for ``Conformal.load``: atomic, checksummed,
        without code.
        """
        if not isinstance(self.posterior, Posterior):
            raise ValueError(
                f"only a Posterior can be saved, got a {type(self.posterior).__name__}"
            )
        tensors, posterior = self.posterior.state()
        tensors = {f"posterior.{name}": value for name, value in tensors.items()} | {
            "thresholds": self.thresholds
        }
        config = {
            "kind": "conformal",
            "posterior": posterior,
            "score": asdict(self.score),
            "groups": list(self.groups),
        }
        write_file(
            path,
            tensors,
            config | {"rows": list(self.rows), "samples": self.samples, "seed": self.seed},
        )

    @staticmethod
    def load(path: str | os.PathLike[str], net: nn.Module, **options: Any) -> Conformal:
        """Load a file, given the network of its posterior; damaged or other files raise a
        FileError.
        """
        tensors, config = read_file(path, "conformal")
        with making("conformal prediction", path):
            state, score, thresholds = (
                config["posterior"] | {"path": str(path)},
                config["score"],
                tensors["thresholds"],
            )
            groups, rows, rest = (
                tuple(config["groups"]),
                tuple(config["rows"]),
                (config["samples"], config["seed"]),
            )
            rule = Score(**score)
        posterior = restore_any(under("posterior.", tensors), state, net, **options)
        device = next(iter(posterior.like().values())).device
        return Conformal(posterior, rule, thresholds.to(device), groups, rows, *rest)

    def _predictive(self, x: Any) -> Predictive:
        return (
            x
            if isinstance(x, Predictive)
            else self.posterior.predict(x, self.samples, seed=self.seed)
        )

    def _require(self, ways: tuple[str, ...], asked: str, other: str) -> None:
        if self.score.kind not in ways:
            what = "classes, which have no order" if asked == "interval" else "numbers"
            raise ValueError(
                f"this posterior predicts {what}: use {other}(x) instead of {asked}(x)"
            )

    def _threshold(self, groups: Groups | None, rows: int) -> Tensor:
        """The threshold of each row: (B, *event)."""
        labels = _labels(groups, rows, self.groups != (None,))
        places = {label: place for place, label in enumerate(self.groups)}
        unknown = [label for label in dict.fromkeys(labels) if label not in places]
        if unknown:
            known = ", ".join(map(str, self.groups))
            raise ValueError(
                f"no held-out row is in the group {unknown[0]!r}; the groups are {known}"
            )
        return self.thresholds[
            torch.tensor([places[label] for label in labels], dtype=torch.long).to(
                self.thresholds.device
            )
        ]


@torch.no_grad()
def conformal(
    posterior: Predicts,
    held: Any,
    level: float = 0.9,
    *,
    score: Kind | None = None,
    groups: Groups | None = None,
    randomized: bool = True,
    samples: int | None = None,
    seed: int = 0,
    train: Any = None,
) -> Conformal:
    """Intervals or sets that contain y with probability ``level``; ``held`` = (x, y) must not be
    training rows.

    With scores s_1 .. s_n of the held-out rows and t the ⌈(n + 1)·level⌉-th smallest, they are {y:
    s(x, y) ≤ t}. ``score``, for numbers and counts:
    "cqr"    s = max(q_low − y, y − q_high), with the posterior's own quantiles (Romano 2019); the
    default
    "split"  s = |y − mean|/std (Lei 2018)
    for classes, with p_(1) ≥ p_(2) ≥ ..., r the rank of y and u uniform on [0, 1] (1 unless
    ``randomized``):
    "lac"    s = 1 − p_y, the smallest sets (Sadinle 2019); the default
    "aps"    s = p_(1) + ... + p_(r − 1) + u·p_(r), larger where the posterior is uncertain (Romano
    2020)

    ``groups``: a label for each held-out row; the guarantee then holds within each group (Mondrian,
    Vovk 2003). With several coordinates of y it holds for each of them. ``samples``, ``seed``: the
    draws for predictions, the same for held-out and new rows. ``train``: the training data, if
    available, to check that no row is in both.
    """
    if isinstance(level, bool) or not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}")
    if train is not None:
        check_held_out(held, train)
    x, y = all_rows(held)
    seed = rng.integer(seed)
    p = posterior.predict(x, samples, seed=seed)
    p.likelihood.validate(p.outputs.shape[1:], y)
    if not bool(p.likelihood.labels(y)[1].all()):
        raise ValueError(
            "a guarantee needs every label of the held-out rows, but some are ignored or shifted out"
        )
    ways = SETS if p.likelihood.support == "classes" else INTERVALS
    if score is None:
        score = ways[0]  # type: ignore[assignment]
    elif score not in ways:
        what = "classes" if ways is SETS else "numbers"
        raise ValueError(
            f"score must be one of {', '.join(ways)} where y are {what}, got {score!r}"
        )
    assert score is not None
    rule = Score(score, float(level), randomized)
    scores = rule.of(p, y.to(p.outputs.device), rng.fold(seed, "held-out rows"))
    labels = _labels(groups, len(scores), groups is not None)
    names = tuple(dict.fromkeys(labels))
    parts = [
        scores[torch.tensor([label == name for label in labels], device=scores.device)]
        for name in names
    ]
    thresholds = [_threshold(part, level, name) for part, name in zip(parts, names, strict=True)]
    return Conformal(
        posterior, rule, torch.stack(thresholds), names, tuple(map(len, parts)), samples, seed
    )


def _threshold(scores: Tensor, level: float, group: Any) -> Tensor:
    """The ⌈(n + 1)·level⌉-th smallest of (n, *event): (*event,)."""
    rank = math.ceil((len(scores) + 1) * level - ROUNDING)
    if rank > len(scores):
        where = "" if group is None else f" of the group {group!r}"
        raise ValueError(
            f"{len(scores)} held-out rows{where} are too few for level={level:g}; it needs at least "
            f"{math.ceil(level / (1 - level) - ROUNDING)}, or a lower level"
        )
    return scores.sort(0).values[rank - 1]


def _labels(groups: Groups | None, rows: int, wanted: bool) -> list[Any]:
    """One plain label for each row; None for all without groups."""
    if not wanted:
        if groups is not None:
            raise ValueError(
                "groups were given, but not for the held-out rows; pass conformal(..., groups=...)"
            )
        return [None] * rows
    if groups is None:
        raise ValueError("the guarantee is by group; pass the group of each row as groups=...")
    found: Iterable[Any] = groups.tolist() if hasattr(groups, "tolist") else groups
    labels = list(found)
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} labels for {rows} rows; it needs one for each")
    odd = next((label for label in labels if not isinstance(label, bool | int | float | str)), "")
    if odd != "":
        raise ValueError(f"a group's label must be a number or a string, got {odd!r:.60}")
    return labels
