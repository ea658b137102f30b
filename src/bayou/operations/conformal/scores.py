"""Nonconformity scores: how unusual y is under a predictive distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive

ScoreName = Literal["cqr", "split", "lac", "aps"]
INTERVALS: tuple[ScoreName, ...] = ("cqr", "split")
SETS: tuple[ScoreName, ...] = ("lac", "aps")
# Multiples of eps. A row of a small batch has another rounding than the same row of a large one, so
# that equal scores (of equal x, or of y on a grid) would miss a threshold that is one of them.
PROBABILITY_ROUNDING: Final = 64
END_ROUNDING: Final = 4


@final
@dataclass(frozen=True)
class Score:
    """The nonconformity score of y under the predictive; ``conformal`` has the formulas.

    Args:
        kind: "cqr" or "split" for numbers, "lac" or "aps" for classes.
        level: the guaranteed coverage, which "cqr" takes the quantiles for.
        randomized: whether "aps" uses a random fraction of the probability of y itself.
    """

    kind: ScoreName
    level: float
    randomized: bool = True

    def ends(self, p: Predictive) -> tuple[Tensor, Tensor, Tensor]:
        """Return two ends and a unit: the score of y is max(low − y, y − high)/unit.

        Args:
            p: predictions of B rows; the results are (B, *event) each.
        """
        if self.kind == "cqr":
            low, high = (end.double() for end in p.interval(self.level))
            return low, high, torch.ones_like(low)
        std = p.std.double()
        if not bool(std.isfinite().all()):
            raise ValueError(
                "the predictive has no finite standard deviation to scale residuals by; "
                "use score='cqr'"
            )
        return p.mean.double(), p.mean.double(), std.clamp_min(torch.finfo(std.dtype).tiny)

    def of_classes(self, p: Predictive, seed: rng.Seed) -> Tensor:
        """Return the score of every class, (B, *event, K).

        Args:
            p: predictions of B rows.
            seed: of the random fractions of "aps".
        """
        probability = p.probabilities.double()
        if self.kind == "lac":
            return 1 - probability
        ordered, order = probability.sort(stable=True, dim=-1, descending=True)
        fraction: Tensor | float = 1.0
        if self.randomized:
            fraction = rng.uniform(len(ordered), ordered.shape[1:-1], ordered, seed).unsqueeze(-1)
        score = ordered.cumsum(-1) - (1 - fraction) * ordered
        return torch.empty_like(score).scatter(-1, order, score)

    def of(self, p: Predictive, y: Tensor, seed: rng.Seed) -> Tensor:
        """Return the score of y, (B, *event).

        Args:
            p: predictions of B rows.
            y: their targets, (B, *event).
            seed: of the random fractions of "aps".
        """
        if self.kind in SETS:
            return self.of_classes(p, seed).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        low, high, unit = self.ends(p)
        return torch.maximum(low - y.double(), y.double() - high) / unit

    def interval(self, p: Predictive, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of {y: score ≤ threshold}; a single point if no y has such a score.

        They are rounded outward, so that a y whose score is the threshold is inside.

        Args:
            p: predictions of B rows of numbers.
            thresholds: of each row, (B, *event); ±∞ are allowed.

        Returns:
            Lower and upper end, (B, *event) each, in the dtype of the predictions.
        """
        low, high, unit = self.ends(p)
        middle = (low + high) / 2
        margin = thresholds * unit
        size = torch.maximum(low.abs(), high.abs()) + margin.abs()
        margin = margin + END_ROUNDING * torch.finfo(p.outputs.dtype).eps * size.nan_to_num(0.0)
        low = low - margin
        high = high + margin
        is_crossed = low > high
        low = torch.where(is_crossed, middle, low)
        high = torch.where(is_crossed, middle, high)
        if p.likelihood.support == "counts":
            low = low.clamp_min(0.0)
        return low.to(p.outputs.dtype), high.to(p.outputs.dtype)


def probability_rounding(p: Predictive) -> float:
    """Return by how much a probability of the same row may differ between two predictions.

    Args:
        p: a prediction, whose dtype counts.
    """
    return PROBABILITY_ROUNDING * torch.finfo(p.outputs.dtype).eps


def choose_score(name: ScoreName | None, p: Predictive) -> ScoreName:
    """Return the kind of score, or the default one of this prediction.

    Args:
        name: the name that a user wants; None for the default.
        p: a prediction, of numbers or of classes.

    Raises:
        ValueError: the name does not fit y.
    """
    is_class = p.likelihood.support == "classes"
    names = SETS if is_class else INTERVALS
    if name is None:
        return names[0]
    if name not in names:
        targets = "classes" if is_class else "numbers"
        raise ValueError(
            f"score must be one of {', '.join(names)} where y are {targets}, got {name!r}"
        )
    return name


def check_has_order(name: ScoreName) -> None:
    """Raise a ValueError if this is a score of classes, which have sets and no intervals.

    Args:
        name: the kind of score.
    """
    if name not in INTERVALS:
        raise ValueError(
            "this posterior predicts classes, which have no order: use set(x) instead of "
            "interval(x)"
        )


def check_has_classes(name: ScoreName) -> None:
    """Raise a ValueError if this is a score of numbers, which have intervals and no sets.

    Args:
        name: the kind of score.
    """
    if name not in SETS:
        raise ValueError("this posterior predicts numbers: use interval(x) instead of set(x)")
