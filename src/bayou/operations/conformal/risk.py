"""Conformal risk control: sets whose expected loss is bounded, for monotone losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.operations.conformal.predictors import Predicts
from bayou.operations.conformal.quantiles import ROUNDING
from bayou.operations.conformal.scores import probability_rounding
from bayou.training.rows import all_rows, check_held_out

LossName = Literal["false negatives", "miscoverage", "size"]
Loss = Callable[[Any, Tensor], Tensor]
Family = Callable[[Predictive, float], Any]
MONOTONE_CHECKS = 25  # thresholds at which losses are compared
MONOTONE_TOLERANCE = 1e-9  # of the bound of the loss
LOSS_NAMES = ("false negatives", "miscoverage", "size")


@final
@dataclass(frozen=True, eq=False)
class RiskControl:
    """A posterior with a threshold λ at which the expected loss is bounded; see ``control_risk``.

    Args:
        posterior: what predicts y.
        threshold: λ.
        risk: the bound of the expected loss.
        held_out_risk: the mean loss of the held-out rows at λ.
        family: the prediction at a threshold; a larger threshold has a smaller loss.
        samples: draws of the weights in a prediction.
        seed: of these draws.
    """

    posterior: Predicts
    threshold: float
    risk: float
    held_out_risk: float
    family: Family
    samples: int | None
    seed: int

    @torch.no_grad()
    def predict(self, x: object) -> Any:
        """Return the prediction at λ: of built-in losses a mask of classes or labels.

        Args:
            x: inputs of the network, or their ``posterior.predict(x, samples, seed=seed)``.

        Returns:
            What the family returns; a mask (B, K) of built-in families.
        """
        if not isinstance(x, Predictive):
            x = self.posterior.predict(x, self.samples, seed=self.seed)
        return self.family(x, self.threshold)


@torch.no_grad()
def control_risk(
    posterior: Predicts,
    held_out: object,
    loss: LossName | Loss,
    risk: float = 0.1,
    *,
    bound: float | None = None,
    family: Family | None = None,
    thresholds: Tensor | None = None,
    samples: int | None = None,
    seed: int = 0,
    train: object = None,
) -> RiskControl:
    """Choose the threshold of predictions so that their expected loss is at most ``risk``.

    A family of predictions C_λ(x) has a loss L(C_λ(x), y) ≤ B that does not increase with λ. With R
    the mean loss of n held-out rows,

        λ = the smallest λ with n/(n + 1)·R(λ) + B/(n + 1) ≤ risk,

    and E L(C_λ(x), y) ≤ risk for a new row that is exchangeable with the held-out ones. Conformal
    prediction is the case of the loss 1[y outside C].

    Losses by name, of sets {k: p_k ≥ 1 − λ} of classes, or of labels if y are several 0 or 1:

    - "false negatives": the fraction of true labels that are not in the set;
    - "miscoverage": 1 if any true label is not in the set;
    - "size": the number of labels in the set {k: p_k > λ}: the largest sets whose expected size is
      at most ``risk``.

    Args:
        posterior: a posterior, or any object with ``predict``.
        held_out: rows (x, y), a Dataset or a DataLoader; they must not be training rows.
        loss: a name, or a function (prediction, y) → (n,) that does not increase with λ.
        risk: the bound of the expected loss, in the unit of the loss. Default: 0.1.
        bound: B ≥ every loss; by default 1, and for "size" the number of labels.
        family: a function (predictive, λ) → prediction, with ``thresholds``; by default the sets
            above.
        thresholds: candidates for λ, (T,); by default every λ at which a set of a held-out row
            changes.
        samples: draws of the weights in a prediction; None: as many as ``predict`` takes.
        seed: of these draws, the same for held-out and new rows.
        train: the training data, where they are at hand, to see that no row is in both.

    Returns:
        A ``RiskControl`` with ``predict(x)`` and ``threshold``.

    Raises:
        ValueError: if the loss increases with λ, leaves [−∞, B], the rows are fewer than
            B/risk − 1, or no threshold has so small a risk.

    Example:
        >>> control = bayou.operations.control_risk(posterior, held, "false negatives", risk=0.1)
        >>> mask = control.predict(x)
        >>> excess = lambda limit, y: (y - limit)[:, 0].clamp(0, 5)
        >>> limit = lambda p, k: p.mean + k * p.std
        >>> grid = torch.linspace(0, 9, 91)
        >>> control = bayou.operations.control_risk(
        ...     posterior, held, excess, 0.2, bound=5.0, family=limit, thresholds=grid
        ... )

    References:
        Angelopoulos, Bates, Fisch, Lei, Schuster: Conformal risk control, ICLR 2024.
    """
    if isinstance(risk, bool) or not 0 < risk < math.inf:
        raise ValueError(f"risk must be a positive number, got {risk!r}")
    if (family is None) != (thresholds is None):
        raise ValueError("a family of predictions needs thresholds to choose from; give both")
    if isinstance(loss, str) and family is not None:
        raise ValueError("losses by name are of sets; with a family give a function as the loss")
    if train is not None:
        check_held_out(held_out, train)
    x, y = all_rows(held_out)
    seed = rng.integer(seed)
    p = posterior.predict(x, samples, seed=seed)
    p.likelihood.validate(p.outputs.shape[1:], y)
    y = y.to(p.outputs.device)
    if family is None:
        family = sets_of_more_than if loss == "size" else sets_above
        thresholds = _set_thresholds(p, family)
    default_bound = 1.0
    if isinstance(loss, str):
        function, default_bound = _named_loss(loss, p)
    else:
        function = loss
    bound = default_bound if bound is None else float(bound)
    if not 0 < bound < math.inf:
        raise ValueError(f"bound must be a positive number, got {bound!r}")
    search = RiskSearch(p, y, family, function, bound, _check_thresholds(thresholds))
    search.check_monotone()
    threshold, held_out_risk = search.smallest(risk)
    return RiskControl(posterior, threshold, float(risk), held_out_risk, family, samples, seed)


@final
@dataclass(frozen=True, eq=False)
class RiskSearch:
    """The risk of held-out rows as a function of the threshold.

    Args:
        p: predictions of the held-out rows.
        y: their targets.
        family: the prediction at a threshold.
        loss: of predictions and targets, (n,).
        bound: the largest loss.
        thresholds: candidates in ascending order, (T,).
    """

    p: Predictive
    y: Tensor
    family: Family
    loss: Loss
    bound: float
    thresholds: Tensor

    def losses(self, position: int) -> Tensor:
        """Return the losses of all rows at a candidate, float64 (n,).

        Args:
            position: of the candidate.
        """
        prediction = self.family(self.p, float(self.thresholds[position]))
        losses = torch.as_tensor(self.loss(prediction, self.y)).double()
        if losses.shape != self.y.shape[:1]:
            raise ValueError(
                f"the loss must return one number for each of {len(self.y)} rows, got "
                f"{tuple(losses.shape)}"
            )
        if not bool((losses <= self.bound).all()):  # also for NaN
            raise ValueError(
                f"the loss must be a number of at most bound={self.bound:g}, got "
                f"{float(losses.max()):g}; give its largest value as bound="
            )
        return losses

    def check_monotone(self) -> None:
        """Raise a ValueError if the loss of a row increases between some of the candidates."""
        count = min(MONOTONE_CHECKS, len(self.thresholds))
        positions = torch.linspace(0, len(self.thresholds) - 1, count).round().long().tolist()
        losses = torch.stack([self.losses(position) for position in positions])
        increase = float((losses[1:] - losses[:-1]).max()) if count > 1 else 0.0
        if increase > MONOTONE_TOLERANCE * self.bound:
            raise ValueError(
                f"the loss of a row increases by {increase:g} with the threshold; risk control "
                "needs a loss that never increases as predictions become larger"
            )

    def smallest(self, risk: float) -> tuple[float, float]:
        """Return the smallest candidate with the risk, and the mean loss there.

        Args:
            risk: the bound of the expected loss.
        """
        rows = len(self.y)
        if self.bound / (rows + 1) > risk + ROUNDING:
            needed = math.ceil(self.bound / risk - 1 - ROUNDING)
            raise ValueError(
                f"{rows} held-out rows are too few for risk={risk:g} of a loss of up to "
                f"{self.bound:g}; it needs at least {needed}, or a larger risk"
            )
        limit = (risk * (rows + 1) - self.bound) / rows + ROUNDING * self.bound
        last = len(self.thresholds) - 1
        smallest_risk = float(self.losses(last).mean())
        if smallest_risk > limit:
            raise ValueError(
                f"the largest threshold {float(self.thresholds[last]):g} has the risk "
                f"{smallest_risk:g} on held-out rows, above the {limit:g} that risk={risk:g} "
                "allows; give larger thresholds or a larger risk"
            )
        low = 0
        high = last
        while low < high:
            middle = (low + high) // 2
            if float(self.losses(middle).mean()) <= limit:
                high = middle
            else:
                low = middle + 1
        return float(self.thresholds[low]), float(self.losses(low).mean())


def label_probabilities(p: Predictive) -> Tensor:
    """Return the probability of every class, or that each of several labels is 1: (B, K).

    Args:
        p: predictions of classes, or of several coordinates 0 or 1.

    Raises:
        ValueError: for numbers, or sequences of classes.
    """
    if p.likelihood.support != "classes":
        raise ValueError(
            "sets are for classes, but this posterior predicts numbers; give family= and "
            "thresholds="
        )
    probabilities = p.probabilities.double()
    if probabilities.ndim == 3 and probabilities.shape[-1] == 2:  # labels 0 or 1
        return probabilities[..., 1]
    if probabilities.ndim != 2:
        raise ValueError(
            "sets need one class or several labels 0 or 1 for each row, got probabilities "
            f"{tuple(probabilities.shape)}; give family= and thresholds="
        )
    return probabilities


def sets_above(p: Predictive, threshold: float) -> Tensor:
    """Return the sets {k: 1 − p_k ≤ λ}, which grow with λ: a mask (B, K).

    Args:
        p: predictions of classes or labels.
        threshold: λ.
    """
    return 1 - label_probabilities(p) <= threshold + probability_rounding(p)


def sets_of_more_than(p: Predictive, threshold: float) -> Tensor:
    """Return the sets {k: p_k > λ}, which shrink with λ: a mask (B, K).

    Args:
        p: predictions of classes or labels.
        threshold: λ.
    """
    return label_probabilities(p) > threshold + probability_rounding(p)


def _set_thresholds(p: Predictive, family: Family) -> Tensor:
    """Return every threshold at which a set of a held-out row changes."""
    probabilities = label_probabilities(p)
    if family is sets_above:
        return torch.cat([(1 - probabilities).flatten(), torch.ones(1).to(probabilities)])
    return torch.cat([probabilities.flatten(), torch.zeros(1).to(probabilities)])


def _check_thresholds(thresholds: Tensor | None) -> Tensor:
    """Return the candidates in ascending order, each once."""
    values = torch.as_tensor(thresholds).double().flatten()
    if not len(values) or not bool(values.isfinite().all()):
        raise ValueError("thresholds must be finite numbers (T,), one or more")
    return values.unique()


def _named_loss(name: str, p: Predictive) -> tuple[Loss, float]:
    """Return a loss of sets by name, and its largest value."""
    if name not in LOSS_NAMES:
        raise ValueError(f"loss must be one of {', '.join(LOSS_NAMES)} or a function, got {name!r}")
    labels = label_probabilities(p).shape[-1]
    has_several_labels = p.probabilities.ndim == 3

    def is_true_label(y: Tensor) -> Tensor:
        if has_several_labels:
            return y.bool()
        return torch.nn.functional.one_hot(y.long(), labels).bool()

    def false_negatives(mask: Tensor, y: Tensor) -> Tensor:
        is_true = is_true_label(y)
        return (is_true & ~mask).sum(-1) / is_true.sum(-1).clamp_min(1)

    def miscoverage(mask: Tensor, y: Tensor) -> Tensor:
        return (is_true_label(y) & ~mask).any(-1).double()

    def size(mask: Tensor, y: Tensor) -> Tensor:
        return mask.sum(-1).double()

    losses = {"false negatives": false_negatives, "miscoverage": miscoverage, "size": size}
    return losses[name], float(labels) if name == "size" else 1.0
