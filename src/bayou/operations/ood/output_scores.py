"""Scores of predictions: functions of the predictive distribution, which need no fit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.predictive import Predictive
from bayou.operations.ood.feature_scores import UnsupportedScore


def _per_row(values: Tensor) -> Tensor:
    """Sum over the coordinates of every row: (B, *event) to (B,)."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def entropy(p: Predictive) -> Tensor:
    """Compute the entropy of y in nats, differential for real y: (B,).

    Args:
        p: predictions of B rows.
    """
    return p.entropy


def mutual_information(p: Predictive) -> Tensor:
    """Compute the mutual information of y and the function in nats, (B,).

    Args:
        p: predictions of B rows.

    Raises:
        UnsupportedScore: for a prediction by one function, which has none.
    """
    if _is_one_function(p):
        raise UnsupportedScore(
            "the score 'mutual_information' needs several functions, and this posterior predicts "
            "by one; use 'entropy', or an ensemble"
        )
    return p.mutual_information


def max_probability(p: Predictive) -> Tensor:
    """Compute 1 − max_c p(c | x), (B,), without cancellation where it is small.

    Args:
        p: predictions of B rows.

    Raises:
        UnsupportedScore: for numbers.
    """
    _require_classes(p.likelihood, "max_probability")
    ordered = p.probabilities.sort(dim=-1).values
    return _per_row(ordered[..., :-1].sum(-1))


def energy(p: Predictive) -> Tensor:
    """Compute the energy −E_s logsumexp_c f_s(x)_c, (B,) (Liu et al. 2020).

    It is the mean of the energies of the functions. A constant that is added to all logits of one
    function changes none of its probabilities; it shifts this score by the same number for every
    row, so that no order of rows changes. The energy of the mixture of densities,
    −log Σ_s Σ_c exp f_s(x)_c, has not this property: functions with large logits outweigh the
    others. The energy of the mean logits would lose the disagreement of the functions.

    Args:
        p: predictions of B rows.

    Raises:
        UnsupportedScore: for a likelihood without logits of classes.
    """
    return -_per_row(_class_logits(p, "energy").logsumexp(-1).mean(0))


def max_logit(p: Predictive) -> Tensor:
    """Compute −E_s max_c f_s(x)_c, (B,) (Hendrycks et al. 2022), averaged as the energy.

    Args:
        p: predictions of B rows.

    Raises:
        UnsupportedScore: for a likelihood without logits of classes.
    """
    return -_per_row(_class_logits(p, "max_logit").amax(-1).mean(0))


def std(p: Predictive) -> Tensor:
    """Compute the standard deviation of y, the geometric mean over its coordinates: (B,).

    The order of the rows does not depend on the units of the coordinates.

    Args:
        p: predictions of B rows.

    Raises:
        UnsupportedScore: for classes.
    """
    return _geometric_mean(p, p.std, "std")


def epistemic_std(p: Predictive) -> Tensor:
    """Compute the standard deviation of E[y | f] over functions, as ``std`` does: (B,).

    Args:
        p: predictions of B rows.

    Raises:
        UnsupportedScore: for classes, and for a prediction by one function.
    """
    values = _geometric_mean(p, p.epistemic_std, "epistemic_std")
    if _is_one_function(p):
        raise UnsupportedScore(
            "the score 'epistemic_std' needs several functions, and this posterior predicts by "
            "one; use 'std', 'mahalanobis' or 'knn'"
        )
    return values


def _is_one_function(p: Predictive) -> bool:
    """Return whether the prediction is that of one function, without a variance of its own."""
    variance = torch.as_tensor(p.likelihood.function_variance(p.outputs))
    return len(p.outputs) == 1 and not bool((variance > 0).any())


def _geometric_mean(p: Predictive, values: Tensor, name: str) -> Tensor:
    """Return the geometric mean over the coordinates of every row."""
    if p.likelihood.support == "classes":
        raise UnsupportedScore(
            f"the score {name!r} is for numbers, and y are classes; use 'entropy' or 'energy'"
        )
    return values.flatten(1).log().mean(1).exp() if values.ndim > 1 else values


def _require_classes(likelihood: BoundLikelihood, name: str) -> None:
    """Raise an UnsupportedScore for y that are numbers."""
    if likelihood.support != "classes":
        raise UnsupportedScore(
            f"the score {name!r} is for classes, and y are numbers; use 'std', 'mahalanobis' or "
            "'knn'"
        )


def _class_logits(p: Predictive, name: str) -> Tensor:
    """Return the logits of every function, (S, B, *event, K)."""
    _require_classes(p.likelihood, name)
    try:
        return p.likelihood.class_logits(p.outputs)
    except ValueError as error:
        raise UnsupportedScore(f"{name!r}: {error}") from None


OUTPUT_SCORES: dict[str, Callable[[Predictive], Tensor]] = {
    "entropy": entropy,
    "mutual_information": mutual_information,
    "max_probability": max_probability,
    "energy": energy,
    "max_logit": max_logit,
    "std": std,
    "epistemic_std": epistemic_std,
}


@torch.no_grad()
def output_scores(p: Predictive, names: list[str]) -> dict[str, Tensor]:
    """Compute scores in float64.

    Args:
        p: predictions of B rows.
        names: of the scores, in ``OUTPUT_SCORES``.

    Returns:
        (B,) for each name.

    Raises:
        UnsupportedScore: if these predictions do not have a score.
    """
    likelihood = copy.deepcopy(p.likelihood).double()
    doubled = Predictive(likelihood, p.outputs.double())
    return {name: OUTPUT_SCORES[name](doubled).double() for name in names}
