"""Tests of targets: whether y given x is as in held-out rows, and as the posterior predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.diagnostics.findings import ShiftTest
from bayou.diagnostics.hypothesis import (
    Significance,
    binomial,
    chi_square_survival,
    normal_p,
    uniform_ks,
)
from bayou.diagnostics.permutations import largest_differences, normal_scores
from bayou.diagnostics.propensity import propensity_strata
from bayou.diagnostics.target_scores import ENTROPY_DRAWS, TargetScores

LEVELS = (0.5, 0.9)  # of intervals whose coverage is tested
MIN_SAMPLE = 10  # rows of each sample, to estimate a propensity score


@final
@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Rows with the scores of their targets.

    Args:
        features: functions of the inputs, (N, D).
        names: of the D features.
        scores: of the targets.
        is_covered: whether the inputs of a row lie in the range of the training rows, without
            unknown categories and values that were never missing in training, (N,).
    """

    features: Tensor
    names: tuple[str, ...]
    scores: TargetScores
    is_covered: Tensor


@final
@dataclass(frozen=True, eq=False)
class RelationTests:
    """Tests of y given x, and how many new rows they could compare.

    Args:
        tests: not adjusted yet.
        rows: new rows in strata that have held-out rows.
    """

    tests: list[ShiftTest]
    rows: int


def compare_relation(
    held_out: ScoredRows, new: ScoredRows, permutations: int, seed: rng.Seed
) -> RelationTests:
    """Compare the scores of new rows with those of held-out rows that have similar inputs.

    Labels (held-out or new) are permuted within strata of the estimated propensity score, so that
    a shift of the inputs alone does not make the tests significant, even if the posterior is worse
    in one region than in another. New rows in strata without held-out rows are left out, as are
    rows that are not covered.

    Args:
        held_out: rows that the fit has not seen.
        new: new rows.
        permutations: of each test.
        seed: of the strata and permutations.

    Returns:
        Tests of the location, the spread, the log score and of the residuals by input.
    """
    covered = torch.cat((held_out.is_covered, new.is_covered))
    is_new = (torch.arange(len(covered)) >= len(held_out.is_covered))[covered]
    features = torch.cat((held_out.features, new.features))[covered]
    if not MIN_SAMPLE <= int(is_new.sum()) <= len(is_new) - MIN_SAMPLE:
        return RelationTests([], 0)
    features = normal_scores(features)
    strata = propensity_strata(features, is_new, rng.fold(seed, "strata"))
    kept = strata >= 0
    rows = int((kept & is_new).sum())
    if not rows:
        return RelationTests([], 0)

    def join_rows(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first, second))[covered][kept]

    location = join_rows(held_out.scores.location, new.scores.location)
    statistics = {
        "location": location,
        "spread": join_rows(held_out.scores.spread, new.scores.spread),
    }
    if held_out.scores.log_score is not None and new.scores.log_score is not None:
        statistics["log score"] = join_rows(held_out.scores.log_score, new.scores.log_score)
    residuals = location[:, :, None] * features[kept][:, None, :]
    statistics["by input"] = residuals.flatten(1)
    results = largest_differences(
        list(statistics.values()),
        is_new[kept],
        permutations,
        rng.fold(seed, "permutations"),
        strata[kept],
    )
    subjects = _subjects(new.scores)
    tests = []
    for name, result in zip(statistics, results, strict=True):
        if name == "by input":
            subject = "residuals by input"
            input_name = new.names[result.column % len(new.names)]
            text = f"they depend on {input_name} otherwise than in held-out rows"
        else:
            subject, meaning = subjects[name]
            text = f"mean difference to held-out rows {result.difference:+.3g} ({meaning})"
        tests.append(ShiftTest.of("relation", subject, "permutation", result.evidence, text))
    return RelationTests(tests, rows)


def _subjects(scores: TargetScores) -> dict[str, tuple[str, str]]:
    """Return what each statistic measures, and how its difference is read."""
    log_score = ("log score", "in standard deviations; positive: less likely than predicted")
    if scores.pit is None:
        return {
            "location": ("accuracy beyond confidence", "negative: less often right"),
            "spread": ("frequencies of the classes", "largest difference to their probability"),
            "log score": log_score,
        }
    return {
        "location": ("location of y", "of P(Y ≤ y); positive: y is larger than predicted"),
        "spread": ("spread of y", "of |P(Y ≤ y) − 1/2|; positive: more noise than predicted"),
        "log score": log_score,
    }


def order_tests(scores: TargetScores) -> list[ShiftTest]:
    """Test whether the scores change with the order of the rows, by Spearman's correlation.

    z = ρ·√(n − 1), for the location and the spread, each the coordinate of y with the largest |z|
    (Bonferroni).

    Args:
        scores: of new rows, in the order of time.
    """
    subjects = _subjects(scores)
    tests = []
    for name, values in (("location", scores.location), ("spread", scores.spread)):
        z = _spearman(values) * math.sqrt(len(values) - 1)
        largest = float(z[z.abs().argmax()])
        p = min(1.0, normal_p(largest) * len(z))
        text = f"correlation with the order of the rows {largest / math.sqrt(len(values) - 1):+.2f}"
        tests.append(
            ShiftTest.of(
                "relation",
                f"trend of {subjects[name][0]}",
                "Spearman",
                Significance(largest, p),
                text,
            )
        )
    return tests


def _spearman(values: Tensor) -> Tensor:
    """Return the rank correlation of each column with the row number, (K,)."""
    ordered = values.T.contiguous().sort(1).values
    columns = values.T.contiguous()
    rank = torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)
    rank = rank.double() - rank.double().mean(1, keepdim=True)
    time = torch.arange(len(values), dtype=torch.float64)
    time = time - time.mean()
    norm = rank.norm(dim=1) * time.norm()
    return (rank @ time) / norm.clamp_min(1e-12)


def calibration_tests(scores: TargetScores) -> list[ShiftTest]:
    """Test targets by what the posterior predicts of them, without other rows.

    Numbers: coverage of 50 and 90 % intervals (exact binomial test), uniformity of P(Y ≤ y)
    (Kolmogorov-Smirnov) and the mean log score with its own expectation (z). Classes: accuracy and
    mean confidence (z), frequencies of the classes (chi-square) and the mean log score. Rows are
    independent under the null hypothesis. Of several coordinates of y the one with the smallest
    p-value counts (Bonferroni).

    Args:
        scores: of rows.
    """
    if scores.pit is None:
        tests = [_confidence_test(scores), _frequency_test(scores)]
    else:
        tests = [*_coverage_tests(scores.pit), _uniformity_test(scores.pit)]
    if scores.log_score is not None:
        rows = len(scores)
        # The expectation is estimated from draws for numbers, and is exact for classes.
        inflation = 1 + 1 / ENTROPY_DRAWS if scores.pit is not None else 1.0
        z = float(scores.log_score.mean()) * math.sqrt(rows / inflation)
        text = (
            f"mean −log p(y) minus its expectation: {float(scores.log_score.mean()):+.3g} "
            "standard deviations of a row"
        )
        evidence = Significance(z, normal_p(z))
        tests.append(ShiftTest.of("calibration", "log score", "z", evidence, text))
    return tests


def _coverage_tests(pit: Tensor) -> list[ShiftTest]:
    """Return the binomial tests of the coverage of central intervals."""
    tests = []
    rows, coordinates = pit.shape
    for level in LEVELS:
        inside = ((pit - 0.5).abs() <= level / 2).sum(0).tolist()
        results = [binomial(int(count), rows, level) for count in inside]
        best = min(results, key=lambda evidence: evidence.p)
        evidence = Significance(best.statistic, min(1.0, best.p * coordinates))
        text = f"{best.statistic:.1%} of y are inside the {level:.0%} intervals"
        subject = f"coverage of {level:.0%} intervals"
        tests.append(ShiftTest.of("calibration", subject, "binomial", evidence, text))
    return tests


def _uniformity_test(pit: Tensor) -> ShiftTest:
    """Return the test that P(Y ≤ y) is uniform."""
    results = [uniform_ks(pit[:, d]) for d in range(pit.shape[1])]
    best = min(results, key=lambda evidence: evidence.p)
    evidence = Significance(best.statistic, min(1.0, best.p * pit.shape[1]))
    text = f"largest distance of its distribution from a uniform one {best.statistic:.3g}"
    return ShiftTest.of("calibration", "P(Y ≤ y)", "Kolmogorov-Smirnov", evidence, text)


def _confidence_test(scores: TargetScores) -> ShiftTest:
    """Return the test that the accuracy is the mean confidence."""
    p = scores.probabilities
    if p is None:
        raise ValueError("the confidence of numbers cannot be tested; classes are needed")
    confidence = p.max(1).values
    variance = float((confidence * (1 - confidence)).sum())
    total = float(scores.location.sum())
    z = 0.0
    if total:
        z = total / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, total)
    accuracy = float(confidence.mean()) + total / len(scores)
    text = f"accuracy {accuracy:.1%}, mean confidence {float(confidence.mean()):.1%}"
    evidence = Significance(z, normal_p(z))
    return ShiftTest.of("calibration", "accuracy and confidence", "z", evidence, text)


def _frequency_test(scores: TargetScores) -> ShiftTest:
    """Return the chi-square test of the class frequencies and their mean probabilities.

    dᵀ·V⁺·d with d = Σ_i (1[y_i = k] − p_ik) and V = Σ_i (diag(p_i) − p_i·p_iᵀ).
    """
    p = scores.probabilities
    if p is None:
        raise ValueError("the frequencies of numbers cannot be tested; classes are needed")
    covariance = torch.diag(p.sum(0)) - p.T @ p
    difference = scores.spread.sum(0)
    values, vectors = torch.linalg.eigh(covariance)
    is_random = values > 1e-9 * values.max().clamp_min(1e-12)
    projected = (vectors.T @ difference)[is_random]
    statistic = float((projected.square() / values[is_random]).sum())
    degrees = max(int(is_random.sum()), 1)
    evidence = Significance(statistic, chi_square_survival(statistic, degrees))
    k = int(difference.abs().argmax())
    text = (
        f"class {k}: {float(difference[k]) / len(scores) + float(p[:, k].mean()):.1%} of rows, "
        f"mean probability {float(p[:, k].mean()):.1%}"
    )
    return ShiftTest.of("calibration", "frequencies of the classes", "chi-square", evidence, text)
