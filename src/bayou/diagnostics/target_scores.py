"""Scores of observed targets under a predictive distribution, whose expectation is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive

ENTROPY_DRAWS = 64  # of y for each row, to estimate the mean and std of its log score
MIN_STD = 1e-9  # of a log score: a prediction that is certain has none
MAX_SURPRISE = 1e30  # −log p of a number
MAX_LOG_SCORE = 20.0  # standard deviations; larger ones are clipped


@final
@dataclass(frozen=True, eq=False)
class TargetScores:
    """Scores of the targets of N rows, each with expectation 0 if the predictive is right.

    Args:
        location: PIT − 1/2 for numbers, 1[y is the most probable class] − its probability for
            classes: (N, D).
        spread: |PIT − 1/2| − 1/4 for numbers, 1[y = k] − p_k of every class: (N, K).
        log_score: (−log p(y) − H)/std, with entropy and standard deviation of −log p under the
            predictive itself, (N, 1); None for censored targets.
        pit: P(Y ≤ y), (N, D), with random numbers between P(Y < y) and P(Y ≤ y) for counts and
            above P(Y ≤ time) for censored times; None for classes.
        probabilities: of the classes, (N, K); None for numbers.
        y: the class of each row, (N,); None for numbers.
        surprises: −log p of the observed number and of 64 draws from the predictive of its row,
            (N, 65), less the observed one; None for classes, and where ``log_score`` is.
    """

    location: Tensor
    spread: Tensor
    log_score: Tensor | None
    pit: Tensor | None = None
    probabilities: Tensor | None = None
    y: Tensor | None = None
    surprises: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.location)


@torch.no_grad()
def target_scores(
    predictive: Predictive, y: Tensor, seed: rng.Seed = 0, *, has_log_score: bool = True
) -> TargetScores:
    """Compute the scores of targets.

    Args:
        predictive: predictions of N rows.
        y: their targets, (N, *event).
        seed: of the random numbers.
        has_log_score: whether the log scores of numbers are computed, which takes the most time.

    Raises:
        ValueError: for targets that do not suit the likelihood, or several classes in a row.
    """
    likelihood = predictive.likelihood
    y = y.to(predictive.outputs.device)
    likelihood.validate(predictive.outputs.shape[1:], y)
    if likelihood.support == "classes":
        return _scores_of_classes(predictive, y)
    return _scores_of_numbers(predictive, y, seed, has_log_score)


def _scores_of_classes(predictive: Predictive, y: Tensor) -> TargetScores:
    """Return the scores of classes, whose expectations are sums over the classes."""
    labels, is_label = predictive.likelihood.labels(y)
    labels = labels.reshape(len(labels), -1)
    if labels.shape[1] != 1:
        raise ValueError(
            f"watch compares one class for each row, got {labels.shape[1]}: reshape rows of "
            "several classes, such as tokens, to one row for each"
        )
    label = labels[:, 0].long().cpu()
    p = predictive.probabilities.detach().double().cpu().reshape(len(label), -1)
    if not bool(is_label.all()):
        raise ValueError("some targets are ignored by the likelihood; leave these rows out")
    confidence, mode = p.max(1)
    one_hot = torch.nn.functional.one_hot(label, p.shape[1]).double()
    return TargetScores(
        ((mode == label).double() - confidence)[:, None],
        one_hot - p,
        standardized_surprises(p).gather(1, label[:, None]),
        probabilities=p,
        y=label,
    )


def standardized_surprises(p: Tensor) -> Tensor:
    """Return (−log p_k − H)/std of every class, with their expectation 0: (N, K).

    Args:
        p: probabilities of the classes, (N, K) in float64.
    """
    surprise = -p.clamp_min(torch.finfo(p.dtype).tiny).log()
    entropy = (p * surprise).sum(1, keepdim=True)
    variance = (p * (surprise - entropy).square()).sum(1, keepdim=True)
    return _standardize(surprise, entropy, variance)


def _scores_of_numbers(
    predictive: Predictive, y: Tensor, seed: rng.Seed, has_log_score: bool
) -> TargetScores:
    """Return the scores of numbers, by the probability integral transform."""
    values, is_known = predictive.likelihood.labels(y)
    of_values = Predictive(*predictive.likelihood.for_targets(predictive.outputs, y))
    upper = of_values.cdf(values).double()
    lower = upper
    if of_values.likelihood.support == "counts":
        below = of_values.cdf((values - 1).clamp_min(0)).double()
        lower = torch.where(values > 0, below, torch.zeros_like(below))
    # An event after a censoring time: a random number above P(Y ≤ time).
    lower = torch.where(is_known, lower, upper)
    upper = torch.where(is_known, upper, torch.ones_like(upper))
    fraction = rng.uniform(len(upper), upper.shape[1:], upper, rng.fold(seed, "pit"))
    pit = (lower + fraction * (upper - lower)).clamp(0, 1).reshape(len(values), -1).cpu()
    log_score = None
    surprises = None
    if has_log_score and bool(is_known.all()):
        surprises = _surprises_of_numbers(of_values, values, seed)
        drawn = surprises[:, 1:]
        mean = drawn.mean(1, keepdim=True)
        log_score = _standardize(torch.zeros_like(mean), mean, drawn.var(1, keepdim=True))
    spread = (pit - 0.5).abs() - 0.25
    return TargetScores(pit - 0.5, spread, log_score, pit=pit, surprises=surprises)


def _surprises_of_numbers(predictive: Predictive, y: Tensor, seed: rng.Seed) -> Tensor:
    """Return −log p of y and of draws from the predictive, less that of y: (N, 65).

    Each draw of a row comes from a network of its own, so that errors of the estimates are
    independent between rows.
    """
    outputs = predictive.outputs
    first = -predictive.log_prob(y.to(outputs.dtype)).double()
    first = first.clamp_max(MAX_SURPRISE)  # infinite where p(y) underflows
    # The observed score is a good shift: it avoids the cancellation of large numbers.
    columns = [torch.zeros_like(first)]
    for k in range(ENTROPY_DRAWS):
        drawn_y = _draw_targets(predictive, rng.fold(seed, "entropy", k))
        columns.append(-predictive.log_prob(drawn_y).double() - first)
    return torch.stack(columns, 1).cpu()


def _draw_targets(predictive: Predictive, seed: rng.Seed) -> Tensor:
    """Draw y once for every row, each from a network of its own: (N, *event)."""
    outputs = predictive.outputs
    rows = torch.arange(outputs.shape[1], device=outputs.device)
    u = rng.uniform(len(rows), (), outputs, rng.fold(seed, "network"))
    index = (u * len(outputs)).long().clamp_max(len(outputs) - 1)
    likelihood = predictive.likelihood
    if not likelihood.needs_all_samples:
        return likelihood.sample(outputs[index, rows], seed=seed)
    # The mixture of a row does not depend on the order of its samples. A draw takes one sample for
    # all rows; after a rotation by a random number it is another one in each row.
    samples = torch.arange(len(outputs), device=outputs.device)[:, None]
    rotated = outputs[(samples + index) % len(outputs), rows]
    return likelihood.mixture_sample(rotated, 1, seed)[0]


def _standardize(observed: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return (observed − mean)/std; 0 for a row that is certain and right."""
    score = (observed - mean) / variance.sqrt().clamp_min(MIN_STD)
    return score.clamp(-MAX_LOG_SCORE, MAX_LOG_SCORE)
