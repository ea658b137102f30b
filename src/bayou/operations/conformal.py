"""Conformal prediction: intervals and sets with guaranteed coverage for any posterior.

c = bayou.conformal(posterior, (x_held, y_held), level=0.9)
lower, upper = c.interval(x)        # numbers
mask = c.set(x)                     # classes

Held-out and new rows must be exchangeable. Then, with n held-out rows and no ties among scores,
level ≤ P(y in the interval or set) ≤ level + 1/(n + 1), on average over new and held-out rows
(Vovk 2005).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import making, read_file, write_file
from bayou.core.params import under
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import restore_posterior
from bayou.posteriors.state import SavedState
from bayou.training.rows import all_rows, check_held_out

Kind = Literal["cqr", "split", "lac", "aps"]
INTERVALS: tuple[Kind, ...] = ("cqr", "split")
SETS: tuple[Kind, ...] = ("lac", "aps")
ROUNDING = 1e-9  # tolerance of (n + 1)·level, for whole numbers with rounding errors
Label = bool | int | float | str | None
Groups = Sequence[Any] | Tensor


class Predicts(Protocol):
    """A posterior, or any other object with ``predict``."""

    def predict(self, x: object, samples: int | None = None, *, seed: rng.Seed = 0) -> Predictive:
        """Predict y for x.

        Args:
            x: inputs (B, ...).
            samples: draws of the weights.
            seed: of the draws.
        """


@dataclass(frozen=True)
class Score:
    """The nonconformity score of y under the predictive; ``conformal`` has the formulas.

    Args:
        kind: "cqr" or "split" for numbers, "lac" or "aps" for classes.
        level: the guaranteed coverage, which "cqr" takes the quantiles for.
        randomized: whether "aps" uses a random fraction of the probability of y itself.
    """

    kind: Kind
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


@final
@dataclass(frozen=True, eq=False)
class Conformal:
    """A posterior with a threshold of the score for each group: the result of ``conformal``.

    Args:
        posterior: what predicts y.
        score: the nonconformity score, with the guaranteed level.
        thresholds: the ``level`` quantile of the scores for each group and coordinate of y,
            (G, *event).
        groups: the labels of the groups; (None,) without groups.
        rows: how many held-out rows each group has.
        samples: draws of the weights in a prediction.
        seed: of these draws.
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

    def interval(self, x: object, groups: Groups | None = None) -> tuple[Tensor, Tensor]:
        """Return the interval of y; a single point if no y has such a small score.

        Args:
            x: inputs of the network, or their ``posterior.predict(x, samples, seed=seed)``.
            groups: a label for each row, if the guarantee is by group.

        Returns:
            Lower and upper end, (B, *event) each.

        Raises:
            ValueError: if y are classes, or a group has no held-out rows.
        """
        if self.score.kind not in INTERVALS:
            raise ValueError(
                "this posterior predicts classes, which have no order: use set(x) instead of "
                "interval(x)"
            )
        p = self._predictive(x)
        low, high, unit = self.score.ends(p)
        margin = self._row_thresholds(groups, len(low)) * unit
        low = low - margin
        high = high + margin
        is_crossed = low > high
        middle = (low + high) / 2
        low = torch.where(is_crossed, middle, low)
        high = torch.where(is_crossed, middle, high)
        if p.likelihood.support == "counts":
            low = low.clamp_min(0.0)
        return low.to(p.outputs.dtype), high.to(p.outputs.dtype)

    def set(
        self, x: object, groups: Groups | None = None, *, empty: bool = True, start: int = 0
    ) -> Tensor:
        """Return the set of classes as a mask.

        If the accuracy of the posterior is above ``level``, some sets are empty.

        Args:
            x: inputs of the network, or their ``posterior.predict(x, samples, seed=seed)``.
            groups: a label for each row, if the guarantee is by group.
            empty: whether sets may be empty. If not, those have the most probable class, and the
                coverage is above ``level``.
            start: the number of the first row, if rows are passed in several calls and sets are
                randomized.

        Returns:
            A mask, (B, *event, K).

        Raises:
            ValueError: if y are numbers, or a group has no held-out rows.
        """
        if self.score.kind not in SETS:
            raise ValueError("this posterior predicts numbers: use interval(x) instead of set(x)")
        p = self._predictive(x)
        scores = self.score.of_classes(p, rng.fold(self.seed, "new rows", start))
        mask = scores <= self._row_thresholds(groups, len(scores)).unsqueeze(-1)
        if not empty:
            best_class = p.probabilities.argmax(-1, keepdim=True)
            is_best = torch.zeros_like(mask).scatter(-1, best_class, True)
            mask = mask | (is_best & ~mask.any(-1, keepdim=True))
        return mask

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save posterior and thresholds to one file: atomic, checksummed, without code.

        Args:
            path: the file, for ``Conformal.load``.

        Raises:
            ValueError: if the posterior is not a ``Posterior``.
        """
        if not isinstance(self.posterior, Posterior):
            raise ValueError(
                f"only a Posterior can be saved, got a {type(self.posterior).__name__}"
            )
        state, posterior = self.posterior.state()
        tensors = {f"posterior.{name}": value for name, value in state.items()}
        tensors["thresholds"] = self.thresholds
        config = {
            "kind": "conformal",
            "posterior": posterior,
            "score": asdict(self.score),
            "groups": list(self.groups),
            "rows": list(self.rows),
            "samples": self.samples,
            "seed": self.seed,
        }
        write_file(path, tensors, config)

    @staticmethod
    def load(path: str | os.PathLike[str], net: nn.Module, **options: Any) -> Conformal:
        """Load a saved file.

        Args:
            path: the file.
            net: the network of its posterior.
            **options: as ``bayou.load`` takes them, for what a file cannot store.

        Raises:
            FileError: if the file is damaged or of another type.
        """
        tensors, config = read_file(path, "conformal")
        with making("conformal prediction", path):
            posterior_tensors = under("posterior.", tensors)
            saved = SavedState(posterior_tensors, config["posterior"], path, options)
            score = Score(**config["score"])
            thresholds = tensors["thresholds"]
            groups = tuple(config["groups"])
            rows = tuple(config["rows"])
            samples = config["samples"]
            seed = config["seed"]
        posterior = restore_posterior(saved, net)
        device = next(iter(posterior.template().values())).device
        return Conformal(posterior, score, thresholds.to(device), groups, rows, samples, seed)

    def _predictive(self, x: object) -> Predictive:
        """Return the predictive of inputs, or the one that was passed."""
        if isinstance(x, Predictive):
            return x
        return self.posterior.predict(x, self.samples, seed=self.seed)

    def _row_thresholds(self, groups: Groups | None, rows: int) -> Tensor:
        """Return the threshold of each row: (B, *event)."""
        if self.groups == (None,):
            if groups is not None:
                raise ValueError(
                    "groups were given, but not for the held-out rows; pass "
                    "conformal(..., groups=...)"
                )
            labels: list[Label] = [None] * rows
        elif groups is None:
            raise ValueError("the guarantee is by group; pass the group of each row as groups=...")
        else:
            labels = _row_labels(groups, rows)
        positions = {label: position for position, label in enumerate(self.groups)}
        unknown = [label for label in dict.fromkeys(labels) if label not in positions]
        if unknown:
            known = ", ".join(map(str, self.groups))
            raise ValueError(
                f"no held-out row is in the group {unknown[0]!r}; the groups are {known}"
            )
        index = torch.tensor([positions[label] for label in labels], dtype=torch.long)
        return self.thresholds[index.to(self.thresholds.device)]


@torch.no_grad()
def conformal(
    posterior: Predicts,
    held_out: object,
    level: float = 0.9,
    *,
    score: Kind | None = None,
    groups: Groups | None = None,
    randomized: bool = True,
    samples: int | None = None,
    seed: int = 0,
    train: object = None,
) -> Conformal:
    """Compute intervals or sets that contain y with probability ``level``, from held-out rows.

    With scores s_1 .. s_n of the held-out rows and t the ⌈(n + 1)·level⌉-th smallest, they are
    {y: s(x, y) ≤ t}. The scores of numbers and counts:

    "cqr"    s = max(q_low − y, y − q_high), with the posterior's own quantiles
    "split"  s = |y − mean|/std

    and of classes, with p_(1) ≥ p_(2) ≥ ..., r the rank of y and u uniform on [0, 1] (1 unless
    ``randomized``):

    "lac"    s = 1 − p_y, the smallest sets
    "aps"    s = p_(1) + ... + p_(r − 1) + u·p_(r), larger where the posterior is uncertain

    With several coordinates of y the guarantee holds for each of them.

    Args:
        posterior: a posterior, or any object with ``predict``.
        held_out: rows (x, y), a Dataset or a DataLoader; they must not be training rows.
        level: the probability, strictly between 0 and 1.
        score: by default "cqr" for numbers and counts, "lac" for classes.
        groups: a label for each held-out row; the guarantee then holds within each group
            (Mondrian, Vovk 2003).
        randomized: whether "aps" uses a random fraction of the probability of y itself; without it
            the coverage is above ``level``.
        samples: draws of the weights in a prediction; None: as many as ``predict`` takes.
        seed: of these draws, the same for held-out and new rows.
        train: the training data, where they are at hand, to see that no row is in both.

    Returns:
        A ``Conformal`` with ``interval(x)`` for numbers and ``set(x)`` for classes.

    Raises:
        ValueError: if the score does not fit y, a label is missing, or a group has fewer than
            level/(1 − level) rows.

    Example:
        >>> c = bayou.conformal(posterior, (x_held, y_held), level=0.9)
        >>> lower, upper = c.interval(x)  # numbers
        >>> mask = c.set(x)  # classes

    References:
        Vovk, Gammerman, Shafer: Algorithmic learning in a random world, 2005. Romano, Patterson,
        Candès: Conformalized quantile regression, NeurIPS 2019 ("cqr"). Lei et al.:
        Distribution-free predictive inference for regression, JASA 2018 ("split"). Sadinle, Lei,
        Wasserman: Least ambiguous set-valued classifiers, JASA 2019 ("lac"). Romano, Sesia,
        Candès: Classification with valid and adaptive coverage, NeurIPS 2020 ("aps").
    """
    if isinstance(level, bool) or not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}")
    if train is not None:
        check_held_out(held_out, train)
    x, y = all_rows(held_out)
    seed = rng.integer(seed)
    p = posterior.predict(x, samples, seed=seed)
    p.likelihood.validate(p.outputs.shape[1:], y)
    if not bool(p.likelihood.labels(y)[1].all()):
        raise ValueError(
            "a guarantee needs every label of the held-out rows, but some are ignored, shifted out "
            "or censored"
        )
    if p.likelihood.support == "real":
        y = p.likelihood.labels(y)[0]
    rule = Score(_choose_score(score, p), float(level), randomized)
    scores = rule.of(p, y.to(p.outputs.device), rng.fold(seed, "held-out rows"))
    row_labels: list[Label] = [None] * len(scores)
    if groups is not None:
        row_labels = _row_labels(groups, len(scores))
    names = tuple(dict.fromkeys(row_labels))
    thresholds: list[Tensor] = []
    row_counts: list[int] = []
    for name in names:
        is_member = torch.tensor([label == name for label in row_labels], device=scores.device)
        group_scores = scores[is_member]
        thresholds.append(_quantile(group_scores, level, name))
        row_counts.append(len(group_scores))
    return Conformal(
        posterior, rule, torch.stack(thresholds), names, tuple(row_counts), samples, seed
    )


def _choose_score(score: Kind | None, p: Predictive) -> Kind:
    """Return the score, or the default one of this prediction."""
    is_class = p.likelihood.support == "classes"
    scores = SETS if is_class else INTERVALS
    if score is None:
        return scores[0]
    if score not in scores:
        targets = "classes" if is_class else "numbers"
        raise ValueError(
            f"score must be one of {', '.join(scores)} where y are {targets}, got {score!r}"
        )
    return score


def _quantile(scores: Tensor, level: float, group: Label) -> Tensor:
    """Return the ⌈(n + 1)·level⌉-th smallest of the scores (n, *event): (*event,)."""
    rank = math.ceil((len(scores) + 1) * level - ROUNDING)
    if rank > len(scores):
        of_group = "" if group is None else f" of the group {group!r}"
        min_rows = math.ceil(level / (1 - level) - ROUNDING)
        raise ValueError(
            f"{len(scores)} held-out rows{of_group} are too few for level={level:g}; it needs at "
            f"least {min_rows}, or a lower level"
        )
    return scores.sort(0).values[rank - 1]


def _row_labels(groups: Groups, rows: int) -> list[Label]:
    """Return the label of the group of each row, as a number or a string of Python."""
    values: Iterable[Any] = groups.tolist() if hasattr(groups, "tolist") else groups
    labels = list(values)
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} labels for {rows} rows; it needs one for each")
    for label in labels:
        if not isinstance(label, bool | int | float | str):
            raise ValueError(f"a group's label must be a number or a string, got {label!r:.60}")
    return labels
