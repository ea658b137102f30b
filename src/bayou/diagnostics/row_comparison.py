"""Tests of new rows that need predictions: of all inputs together, and of targets."""

from __future__ import annotations

import math
from typing import Protocol, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.diagnostics.findings import ShiftTest, Status, adjust
from bayou.diagnostics.hypothesis import two_sample_ks
from bayou.diagnostics.permutations import (
    count_permutations,
    energy_test,
    largest_differences,
    normal_scores,
    products_of_pairs,
)
from bayou.diagnostics.reference import ReferenceRows
from bayou.diagnostics.relation import (
    ScoredRows,
    calibration_tests,
    compare_relation,
    order_tests,
)
from bayou.diagnostics.target_scores import target_scores
from bayou.likelihoods.predictive import Predictive

MIN_ROWS = 20  # new rows, below which nothing can be told
MIN_HELD_OUT_ROWS = 50  # with which targets of new rows are compared
MAX_NEW_ROWS = 5000  # that are predicted
MAX_JOINT_ROWS = 1000  # of each sample in the test of correlations
MAX_ENERGY_ROWS = 400  # of each sample in the test of the energy distance
MAX_FEATURES = 40  # of the inputs in joint tests; more are projected to so many
MAX_JOINT_TESTS = 3
MAX_RELATION_TESTS = 6
MIN_EPISTEMIC_SHARE = 1e-6  # of the standard deviation: a single network has no epistemic part


class PredictsRows(Protocol):
    """A posterior, or any other object with ``predict``."""

    def predict(self, x: object, samples: int | None = None, *, seed: rng.Seed = 0) -> Predictive:
        """Predict y for x.

        Args:
            x: inputs (B, ...).
            samples: draws of the weights.
            seed: of the draws.
        """


@final
class RowComparison:
    """Predictions of new rows and of held-out rows, and the tests that need them.

    Args:
        posterior: what predicts y.
        reference: training rows and held-out rows.
        x: inputs of new rows, (N, *shape).
        y: their targets; None without any.
        is_known: whether a row has no unknown category and no new kind of missing value, (N,).
        samples: draws of the weights in a prediction.
        seed: of draws and permutations.
    """

    def __init__(
        self,
        posterior: PredictsRows,
        reference: ReferenceRows,
        x: Tensor,
        y: Tensor | None,
        is_known: Tensor,
        samples: int | None,
        seed: int,
    ) -> None:
        index = torch.arange(len(x))
        if len(x) > MAX_NEW_ROWS:  # in their order, which may be that of time
            index = rng.permutation(len(x), rng.fold(seed, "new rows"))[:MAX_NEW_ROWS].sort().values
        self.seed = seed
        self.reference = reference
        self.x = x.cpu()[index]
        self.is_known = is_known[index]
        self.new = posterior.predict(self.x, samples, seed=seed)
        held_x = reference.held_x
        self.held_x: Tensor | None = None
        self.held: Predictive | None = None
        if held_x is not None and len(held_x) >= MIN_HELD_OUT_ROWS:
            self.held_x = held_x
            self.held = posterior.predict(held_x, samples, seed=seed)
        if y is not None:
            scores_seed = rng.fold(seed, "new scores")
            self.new_scores = target_scores(self.new, y.cpu()[index], scores_seed)

    def joint_tests(self, level: float) -> list[ShiftTest]:
        """Test all inputs together.

        Args:
            level: of these tests.
        """
        permutations = count_permutations(MAX_JOINT_TESTS, level)
        tests = []
        first = self._joint_features(self.reference.x, None)
        second = self._joint_features(self.x, None)
        subject = "all inputs"
        if self.x.ndim > 2:
            subject = "outputs of the network"
            if self.held is None or self.held_x is None:
                return []
            first = self._joint_features(self.held_x, self.held)
            second = self._joint_features(self.x, self.new)
        if not first.shape[1]:
            return []
        samples = [
            self._some(rows, MAX_JOINT_ROWS, name) for rows, name in ((first, "a"), (second, "b"))
        ]
        pooled = normal_scores(torch.cat(samples))
        is_new = torch.arange(len(pooled)) >= len(samples[0])
        evidence = energy_test(
            pooled[~is_new][:MAX_ENERGY_ROWS],
            pooled[is_new][:MAX_ENERGY_ROWS],
            permutations,
            rng.fold(self.seed, "energy"),
        )
        text = f"energy distance {evidence.statistic:.3g}"
        tests.append(ShiftTest.of("joint", subject, "energy distance", evidence, text))
        if pooled.shape[1] > 1:
            tests.append(self._correlation_test(pooled, is_new, permutations))
        uncertainty = self._uncertainty_test()
        return [*tests, uncertainty] if uncertainty is not None else tests

    def _correlation_test(self, pooled: Tensor, is_new: Tensor, permutations: int) -> ShiftTest:
        """Return the test of the correlations of all pairs of inputs."""
        products, pairs = products_of_pairs(pooled)
        seed = rng.fold(self.seed, "correlations")
        (result,) = largest_differences([products], is_new, permutations, seed)
        names = self._feature_names(pooled.shape[1])
        a, b = pairs[result.column]
        text = (
            f"largest difference at {names[a]} and {names[b]}: correlation of normal scores "
            f"{result.difference:+.2f}"
        )
        return ShiftTest.of("joint", "correlations", "permutation", result.evidence, text)

    def _uncertainty_test(self) -> ShiftTest | None:
        """Return the test of the epistemic uncertainty.

        None for a single network, and where inputs are left out: it depends on these, and is higher
        for later dates.
        """
        if self.reference.leaves_out_inputs:
            return None
        if self.held is None:
            return None
        first = _epistemic(self.held)
        second = _epistemic(self.new)
        if first is None or second is None:
            return None
        evidence = two_sample_ks(first, second)
        text = (
            f"median {float(first.median()):.3g} in held-out rows, {float(second.median()):.3g} in "
            "new rows"
        )
        return ShiftTest.of("joint", "epistemic uncertainty", "Kolmogorov-Smirnov", evidence, text)

    def relation(self, level: float, in_order: bool) -> tuple[list[ShiftTest], Status, str]:
        """Test the targets; return the tests, the status and a sentence.

        Args:
            level: of these tests.
            in_order: whether the rows are in the order of time.
        """
        trend = order_tests(self.new_scores) if in_order else []
        if self.held is None or self.held_x is None or self.reference.held_y is None:
            tests = [
                ShiftTest("relation", test.subject, test.name, test.statistic, test.p, test.text)
                for test in self.calibration_tests(level)
            ]
            tests = adjust([*tests, *trend], level)
            changed = any(test.is_significant for test in tests)
            reason = (
                f"There are fewer than {MIN_HELD_OUT_ROWS} held-out rows, so that targets are "
                "compared with the predictions alone: a posterior that was never calibrated fails, "
                "too."
            )
            return tests, "changed" if changed else "as expected", reason
        scores_seed = rng.fold(self.seed, "held-out scores")
        held_scores = target_scores(self.held, self.reference.held_y, scores_seed)
        first = self._joint_features(self.held_x, self.held)
        second = self._joint_features(self.x, self.new)
        seen = first if self.x.ndim > 2 else self._joint_features(self.reference.x, None)
        low = seen.amin(0)
        high = seen.amax(0)
        names = self._feature_names(first.shape[1])
        first_in_range = ((low <= first) & (first <= high)).all(1)
        second_in_range = ((low <= second) & (second <= high)).all(1) & self.is_known
        result = compare_relation(
            ScoredRows(first, names, held_scores, first_in_range),
            ScoredRows(second, names, self.new_scores, second_in_range),
            count_permutations(MAX_RELATION_TESTS, level),
            rng.fold(self.seed, "relation"),
        )
        if result.rows < MIN_ROWS:
            reason = (
                f"Only {result.rows} new rows have inputs as held-out rows have them; the relation "
                "cannot be tested where there was no data."
            )
            return [], "cannot tell", reason
        tests = adjust([*result.tests, *trend], level)
        changed = any(test.is_significant for test in tests)
        covered = f"{result.rows:,} of {len(self.x):,} new rows"
        reason = f"Targets were compared with held-out rows of similar inputs: {covered}."
        return tests, "changed" if changed else "as expected", reason

    def calibration_tests(self, level: float) -> list[ShiftTest]:
        """Test the targets by the predictions alone; the tests are not adjusted yet.

        Args:
            level: of these tests.
        """
        simulations = count_permutations(MAX_RELATION_TESTS, level)
        return calibration_tests(self.new_scores, simulations, rng.fold(self.seed, "calibration"))

    def _joint_features(self, x: Tensor, predictive: Predictive | None) -> Tensor:
        """Return functions of the inputs of each row: the inputs, or outputs for arrays."""
        features = x.reshape(len(x), -1).double()
        if x.ndim > 2 and predictive is not None:
            features = predictive.outputs.double().mean(0).reshape(len(x), -1).cpu()
        elif self.reference.compared is not None:
            features = features[:, list(self.reference.compared)]
        if features.shape[1] <= MAX_FEATURES:
            return features
        # The same random directions for all rows.
        shape = (features.shape[1],)
        directions = rng.normal(MAX_FEATURES, shape, features, rng.fold(0, "directions"))
        return features @ directions.T / math.sqrt(features.shape[1])

    def _feature_names(self, count: int) -> tuple[str, ...]:
        """Return the names of the features."""
        if self.x.ndim > 2:
            return tuple(f"output {j + 1}" for j in range(count))
        names = self.reference.names
        if names is None:
            names = tuple(f"x{j + 1}" for j in range(self.x.shape[1]))
        if self.reference.compared is not None:
            names = tuple(names[j] for j in self.reference.compared)
        if count == len(names):
            return names
        return tuple(f"projection {j + 1} of the inputs" for j in range(count))

    def _some(self, features: Tensor, count: int, name: str) -> Tensor:
        """Return at most ``count`` random rows, in random order."""
        order = rng.permutation(len(features), rng.fold(self.seed, "joint", name))
        return features[order[:count]]


def _epistemic(predictive: Predictive) -> Tensor | None:
    """Return the epistemic uncertainty of each row; None where all draws predict the same."""
    if predictive.likelihood.support == "classes":
        information = predictive.mutual_information.detach().double().cpu()
        return information if float(information.max()) > MIN_EPISTEMIC_SHARE else None
    epistemic = predictive.epistemic_std.detach().double().cpu().flatten(1).mean(1)
    std = predictive.std.detach().double().cpu().flatten(1).mean(1)
    is_random = bool(epistemic.isfinite().all()) and bool(
        (epistemic > MIN_EPISTEMIC_SHARE * std).any()
    )
    return epistemic if is_random else None
