"""Tests of targets: whether y given x is as in held-out rows, and as the posterior predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.diagnostics.findings import ShiftTest
from bayou.diagnostics.hypothesis import (
    Significance,
    binomial,
    normal_p,
    uniform_ks,
)
from bayou.diagnostics.permutations import (
    MAX_ENTRIES,
    ROUNDING,
    largest_differences,
    normal_scores,
)
from bayou.diagnostics.propensity import propensity_strata
from bayou.diagnostics.target_scores import MIN_STD, TargetScores, standardized_surprises

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
    if features.shape[1]:
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
            text = f"largest difference to held-out rows along {input_name}"
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


def calibration_tests(
    scores: TargetScores, simulations: int = 999, seed: rng.Seed = 0
) -> list[ShiftTest]:
    """Test targets by what the posterior predicts of them, without other rows.

    Numbers: coverage of 50 and 90 % intervals (exact binomial test), uniformity of P(Y ≤ y)
    (Kolmogorov-Smirnov) and the mean log score. Classes: accuracy and mean confidence, frequencies
    of the classes and the mean log score. The statistics without an exact distribution are compared
    with those of targets that are drawn from the predictive, so that p-values hold for few rows
    and for probabilities near 0 and 1, too. Rows are independent under the null hypothesis. Of
    several coordinates of y the one with the smallest p-value counts (Bonferroni).

    Args:
        scores: of rows.
        simulations: how often targets of all rows are drawn. Default: 999.
        seed: of the draws.
    """
    if scores.probabilities is not None:
        return _class_tests(scores, scores.probabilities, simulations, seed)
    if scores.pit is None:
        raise ValueError("scores have neither probabilities of classes nor P(Y ≤ y) of numbers")
    tests = [*_coverage_tests(scores.pit), _uniformity_test(scores.pit)]
    if scores.log_score is not None and scores.surprises is not None:
        p = _exchange_p(scores.surprises, simulations, seed)
        tests.append(_log_score_test(scores.log_score, p))
    return tests


def _log_score_test(log_score: Tensor, p: float) -> ShiftTest:
    """Return the test that the mean log score is its own expectation."""
    mean = float(log_score.mean())
    text = f"mean −log p(y) minus its expectation: {mean:+.3g} standard deviations of a row"
    evidence = Significance(mean * math.sqrt(len(log_score)), p)
    return ShiftTest.of("calibration", "log score", "simulation", evidence, text)


def _exchange_p(surprises: Tensor, simulations: int, seed: rng.Seed) -> float:
    """Return the p-value of Σ_i z_i0, with z_i the standardized scores of y and of its draws.

    If the predictive is right, all 65 scores of a row are exchangeable: the sum is compared with
    those of scores that are chosen at random in every row.

    Args:
        surprises: −log p of y, and of its draws, (N, 65).
        simulations: how many sums it is compared with.
        seed: of the choices.
    """
    centered = surprises - surprises.mean(1, keepdim=True)
    z = centered / centered.square().mean(1, keepdim=True).sqrt().clamp_min(MIN_STD)
    rows, columns = z.shape
    observed = float(z[:, 0].sum().abs()) * (1 - ROUNDING)
    extreme_count = 0
    for start, count in _chunks(simulations, rows):
        like = torch.empty(0, dtype=torch.float64)
        u = rng.uniform(count, (rows,), like, rng.fold(seed, "exchange", start))
        index = (u * columns).long().clamp_max(columns - 1)
        sums = z.gather(1, index.T).sum(0)
        extreme_count += int((sums.abs() >= observed).sum())
    return (1 + extreme_count) / (1 + simulations)


def _chunks(simulations: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first number and the number of simulations of each part that fits into memory."""
    chunk = max(1, MAX_ENTRIES // max(rows, 1))
    for start in range(0, simulations, chunk):
        yield start, min(chunk, simulations - start)


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


def _class_tests(
    scores: TargetScores, p: Tensor, simulations: int, seed: rng.Seed
) -> list[ShiftTest]:
    """Return the tests of classes: accuracy, frequencies and the mean log score.

    Accuracy: |Σ_i (1[y_i is the most probable class] − its probability)|. Frequencies: dᵀ·V⁺·d with
    d = Σ_i (1[y_i = k] − p_ik) and V = Σ_i (diag(p_i) − p_i·p_iᵀ). Log score: |Σ_i z_i|. Each is
    compared with the same of classes that are drawn from the probabilities.
    """
    rows, classes = p.shape
    confidence, mode = p.max(1)
    log_score = standardized_surprises(p)
    expected = p.sum(0)
    precision = torch.linalg.pinv(torch.diag(expected) - p.T @ p, rtol=1e-9, hermitian=True)
    cumulative = p.cumsum(1)
    cumulative = cumulative / cumulative[:, -1:]

    def statistics(labels: Tensor) -> Tensor:
        """Return the three statistics of labels (N, B): (3, B)."""
        accuracy = ((labels == mode[:, None]).double() - confidence[:, None]).sum(0)
        counts = torch.zeros(labels.shape[1], classes, dtype=p.dtype)
        counts.scatter_add_(1, labels.T, torch.ones_like(labels.T, dtype=p.dtype))
        difference = counts - expected
        chi_square = ((difference @ precision) * difference).sum(1)
        return torch.stack((accuracy.abs(), chi_square, log_score.gather(1, labels).sum(0).abs()))

    if scores.y is None:
        raise ValueError("scores of classes need the class of each row")
    observed = statistics(scores.y[:, None])[:, 0]
    # Statistics that are 0 up to rounding are equal to all others.
    threshold = observed * (1 - ROUNDING) - ROUNDING
    extreme_counts = torch.zeros(3, dtype=torch.long)
    for start, count in _chunks(simulations, max(rows, classes)):
        u = rng.uniform(count, (rows,), p, rng.fold(seed, "classes", start))
        labels = torch.searchsorted(cumulative, u.T.contiguous(), right=True)
        labels = labels.clamp_max(classes - 1)
        extreme_counts += (statistics(labels) >= threshold[:, None]).sum(1)
    accuracy_p, frequency_p, score_p = ((1 + extreme_counts) / (1 + simulations)).tolist()
    total = float(scores.location.sum())
    accuracy = float(confidence.mean()) + total / rows
    text = f"accuracy {accuracy:.1%}, mean confidence {float(confidence.mean()):.1%}"
    evidence = Significance(total, accuracy_p)
    tests = [
        ShiftTest.of("calibration", "accuracy and confidence", "simulation", evidence, text),
        _frequency_test(scores, p, Significance(float(observed[1]), frequency_p)),
    ]
    if scores.log_score is not None:
        tests.append(_log_score_test(scores.log_score, score_p))
    return tests


def _frequency_test(scores: TargetScores, p: Tensor, evidence: Significance) -> ShiftTest:
    """Return the test of the class frequencies, with the class that differs most."""
    difference = scores.spread.mean(0)
    k = int(difference.abs().argmax())
    mean = float(p[:, k].mean())
    text = f"class {k}: {float(difference[k]) + mean:.1%} of rows, mean probability {mean:.1%}"
    subject = "frequencies of the classes"
    return ShiftTest.of("calibration", subject, "simulation", evidence, text)
