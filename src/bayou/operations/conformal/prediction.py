"""Conformal prediction: intervals and sets with guaranteed coverage for any posterior.

c = bayou.conformal(posterior, (x_held, y_held), level=0.9)
lower, upper = c.interval(x)        # numbers
mask = c.set(x)                     # classes

Held-out and new rows must be exchangeable. Then, with n held-out rows and no ties among scores,
level ≤ P(y in the interval or set) ≤ level + 1/(n + 1), on average over new and held-out rows
(Vovk 2005). Weights correct for a shift of the inputs or of the labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.operations.conformal.covariate_shift import density_ratio
from bayou.operations.conformal.groups import (
    ONE_GROUP,
    Groups,
    Label,
    group_phrase,
    held_out_labels,
)
from bayou.operations.conformal.label_shift import check_label_weights, label_ratio
from bayou.operations.conformal.predictors import (
    Conformal,
    ConformalPredictor,
    Predicts,
    WeightedConformal,
)
from bayou.operations.conformal.quantiles import check_rows, rank_quantile, weighted_quantile
from bayou.operations.conformal.scores import SETS, Score, ScoreName, choose_score
from bayou.operations.conformal.weights import (
    RowWeights,
    WeightFunction,
    as_row_weights,
    check_weights,
    effective_rows,
    warn_if_few,
)
from bayou.training.rows import all_rows, check_held_out

Shift = Literal["covariate", "label"]


@final
@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out rows with their scores.

    Args:
        x: inputs, (n, ...).
        y: targets, (n, *event).
        score: the nonconformity score.
        scores: of the rows, (n, *event).
        classes: the number of classes K; None for numbers.
    """

    x: Any
    y: Tensor
    score: Score
    scores: Tensor
    classes: int | None

    @property
    def level(self) -> float:
        """The coverage."""
        return self.score.level


@torch.no_grad()
def conformal(
    posterior: Predicts,
    held_out: object,
    level: float = 0.9,
    *,
    score: ScoreName | None = None,
    groups: Groups | None = None,
    by_class: bool = False,
    weights: RowWeights | Tensor | WeightFunction | None = None,
    label_weights: Tensor | None = None,
    shift: Shift | None = None,
    unlabeled: object = None,
    randomized: bool = True,
    samples: int | None = None,
    seed: int = 0,
    train: object = None,
) -> ConformalPredictor:
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

    Where new rows are distributed differently, weights restore the guarantee: t is then the
    ``level`` quantile of Σ_i p_i·δ(s_i) + p·δ(∞) with p_i = w_i/(Σ_j w_j + w). With p the density
    of held-out rows and q that of new ones, w(x) = q(x)/p(x) if p(y | x) is the same for both
    (covariate shift), and w(y) = q(y)/p(y) if p(x | y) is (label shift). With estimated weights
    the guarantee is as good as they are.

    Args:
        posterior: a posterior, or any object with ``predict``.
        held_out: rows (x, y), a Dataset or a DataLoader; they must not be training rows.
        level: the probability, strictly between 0 and 1.
        score: by default "cqr" for numbers and counts, "lac" for classes.
        groups: a label for each held-out row; the guarantee then holds within each group
            (Mondrian, Vovk 2003).
        by_class: whether the guarantee holds within each class; by default it does not. It then
            also holds under any label shift.
        weights: for a covariate shift: numbers w(x_i) of the held-out rows (n,), a function from
            inputs to w, or the result of ``density_ratio`` or ``recency_weights``.
        label_weights: for a label shift: w(y) of every class (K,), as of ``label_ratio``.
        shift: "covariate" or "label" estimates the weights from ``unlabeled``, by
            ``density_ratio`` or ``label_ratio`` with their default settings.
        unlabeled: inputs of new rows, for ``shift``.
        randomized: whether "aps" uses a random fraction of the probability of y itself; without it
            the coverage is above ``level``.
        samples: draws of the weights in a prediction; None: as many as ``predict`` takes.
        seed: of these draws, the same for held-out and new rows.
        train: the training data, where they are at hand, to see that no row is in both.

    Returns:
        A ``Conformal`` with ``interval(x)`` for numbers and ``set(x)`` for classes; with weights of
        rows a ``WeightedConformal``, which has the same methods.

    Raises:
        ValueError: if the score does not fit y, a label is missing, a group or class has fewer than
            level/(1 − level) rows, or arguments exclude each other.

    Example:
        >>> c = bayou.conformal(posterior, (x_held, y_held), level=0.9)
        >>> lower, upper = c.interval(x)  # numbers
        >>> mask = c.set(x)  # classes
        >>> c = bayou.conformal(posterior, (x_held, y_held), shift="covariate", unlabeled=x)

    References:
        Vovk, Gammerman, Shafer: Algorithmic learning in a random world, 2005. Romano, Patterson,
        Candès: Conformalized quantile regression, NeurIPS 2019 ("cqr"). Lei et al.:
        Distribution-free predictive inference for regression, JASA 2018 ("split"). Sadinle, Lei,
        Wasserman: Least ambiguous set-valued classifiers, JASA 2019 ("lac"). Romano, Sesia,
        Candès: Classification with valid and adaptive coverage, NeurIPS 2020 ("aps"). Tibshirani,
        Barber, Candès, Ramdas: Conformal prediction under covariate shift, NeurIPS 2019. Podkopaev,
        Ramdas: Distribution-free uncertainty quantification for classification under label shift,
        UAI 2021.
    """
    check_coverage(level)
    _check_options(groups, by_class, weights, label_weights, shift, unlabeled)
    if train is not None:
        check_held_out(held_out, train)
    seed = rng.integer(seed)
    rows = score_rows(posterior, held_out, level, score, randomized, samples, seed)
    if shift == "covariate":
        weights = density_ratio(rows.x, unlabeled, seed=seed)
    if shift == "label":
        label_weights = label_ratio(
            posterior, (rows.x, rows.y), unlabeled, samples=samples, seed=seed
        )
    settings: dict[str, Any] = {
        "posterior": posterior,
        "score": rows.score,
        "samples": samples,
        "seed": seed,
    }
    if weights is not None:
        return _weight_rows(rows, groups, as_row_weights(weights, rows.x), settings)
    if by_class or label_weights is not None:
        thresholds = _class_thresholds(rows, label_weights)
        count = (len(rows.scores),)
        return Conformal(
            thresholds=thresholds, groups=ONE_GROUP, rows=count, by_class=True, **settings
        )
    return _split_groups(rows, groups, settings)


def check_coverage(level: float) -> None:
    """Raise a ValueError unless a level lies strictly between 0 and 1.

    Args:
        level: the coverage.
    """
    is_number = isinstance(level, Real) and not isinstance(level, bool)
    if not is_number or not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}")


def _check_options(
    groups: Groups | None,
    by_class: bool,
    weights: object,
    label_weights: object,
    shift: Shift | None,
    unlabeled: object,
) -> None:
    """Raise a ValueError for arguments that exclude each other."""
    if shift not in (None, "covariate", "label"):
        raise ValueError(f"shift must be 'covariate', 'label' or None, got {shift!r}")
    if (shift is None) != (unlabeled is None):
        raise ValueError(
            "shift='covariate' or 'label' estimates weights from the inputs of new rows: give both "
            "shift= and unlabeled=, or neither"
        )
    corrections = {
        "weights=": weights is not None,
        "label_weights=": label_weights is not None,
        "shift=": shift is not None,
    }
    chosen = [name for name, is_chosen in corrections.items() if is_chosen]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are two corrections of one shift; give one")
    if by_class and (groups is not None or chosen):
        raise ValueError(
            "by_class=True has one threshold for each class, which holds under any label shift; "
            "leave out groups, weights and shift"
        )
    if groups is not None and (label_weights is not None or shift == "label"):
        raise ValueError("weights of labels cannot be combined with groups; leave out one of them")


def score_rows(
    posterior: Predicts,
    held_out: object,
    level: float,
    score: ScoreName | None,
    randomized: bool,
    samples: int | None,
    seed: int,
) -> HeldOut:
    """Predict held-out rows and return them with their scores.

    Args:
        posterior: a posterior, or any object with ``predict``.
        held_out: rows (x, y), a Dataset or a DataLoader.
        level: the coverage.
        score: the kind of score; None for the default of y.
        randomized: whether "aps" is randomized.
        samples: draws of the weights in a prediction.
        seed: of these draws.

    Raises:
        ValueError: if the score does not fit y, or a label is missing.
    """
    x, y = all_rows(held_out)
    p = posterior.predict(x, samples, seed=seed)
    p.likelihood.validate(p.outputs.shape[1:], y)
    if not bool(p.likelihood.labels(y)[1].all()):
        raise ValueError(
            "a guarantee needs every label of the held-out rows, but some are ignored, shifted out "
            "or censored"
        )
    if p.likelihood.support == "real":
        y = p.likelihood.labels(y)[0]
    rule = Score(choose_score(score, p), float(level), randomized)
    y = y.to(p.outputs.device)
    scores = rule.of(p, y, rng.fold(seed, "held-out rows"))
    classes = p.probabilities.shape[-1] if rule.kind in SETS else None
    return HeldOut(x, y, rule, scores, classes)


def _split_groups(rows: HeldOut, groups: Groups | None, settings: dict[str, Any]) -> Conformal:
    """Return a threshold for each group."""
    labels = held_out_labels(groups, len(rows.scores))
    names = tuple(dict.fromkeys(labels))
    thresholds: list[Tensor] = []
    row_counts: list[int] = []
    for name in names:
        is_member = torch.tensor([label == name for label in labels], device=rows.scores.device)
        group_scores = rows.scores[is_member]
        check_rows(len(group_scores), rows.level, group_phrase(name))
        thresholds.append(rank_quantile(group_scores, rows.level))
        row_counts.append(len(group_scores))
    return Conformal(
        thresholds=torch.stack(thresholds), groups=names, rows=tuple(row_counts), **settings
    )


def _weight_rows(
    rows: HeldOut, groups: Groups | None, weights: RowWeights, settings: dict[str, Any]
) -> WeightedConformal:
    """Return the weighted scores of each group; warn if their effective sample is small."""
    scores = rows.scores
    held_out_weights = check_weights(weights.held_out, "held-out rows", len(scores))
    labels: list[Label] = held_out_labels(groups, len(scores))
    names = tuple(dict.fromkeys(labels))
    positions = torch.tensor([names.index(label) for label in labels], device=scores.device)
    row_counts: list[int] = []
    for position, name in enumerate(names):
        group_weights = held_out_weights[(positions == position).to(held_out_weights.device)]
        count = len(group_weights)
        check_rows(count, rows.level, group_phrase(name))
        if not bool((group_weights > 0).any()):
            raise ValueError(
                f"all held-out rows{group_phrase(name)} have the weight 0: none is like new rows"
            )
        warn_if_few(effective_rows(group_weights), count, group_phrase(name))
        row_counts.append(count)
    return WeightedConformal(
        held_out_scores=scores,
        held_out_groups=positions,
        weights=weights,
        groups=names,
        rows=tuple(row_counts),
        **settings,
    )


def _class_thresholds(rows: HeldOut, label_weights: Tensor | None) -> Tensor:
    """Return the threshold of every class, (K, *event), from its rows or by weights of labels."""
    if rows.classes is None:
        name = "by_class=True" if label_weights is None else "a label shift"
        raise ValueError(f"{name} is for classes, but y are numbers; use groups= or weights=")
    scores = rows.scores
    y = rows.y.long()
    if label_weights is not None:
        by_class = check_label_weights(label_weights, rows.classes).to(scores.device)
        row_weights = by_class[y]
        if not bool((row_weights.sum(0) > 0).all()):
            raise ValueError("all held-out rows have labels of the weight 0: none is like new rows")
        warn_if_few(effective_rows(row_weights.flatten()), row_weights.numel())
        return weighted_quantile(scores, row_weights, by_class, rows.level)
    unit_weight = torch.ones(1, dtype=scores.dtype, device=scores.device)
    thresholds: list[Tensor] = []
    for k in range(rows.classes):
        is_member = y == k
        fewest = int(is_member.sum(0).min())
        check_rows(fewest, rows.level, f" of the class {k}")
        thresholds.append(weighted_quantile(scores, is_member, unit_weight, rows.level)[0])
    return torch.stack(thresholds)
