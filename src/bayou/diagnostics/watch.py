"""Comparison of new rows with training rows and with the posterior's own expectations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.diagnostics.findings import ShiftReport, ShiftTest, Status, Verdict, adjust
from bayou.diagnostics.input_columns import (
    InputColumn,
    columns_of,
    compare_column,
    describe_mistakes,
)
from bayou.diagnostics.permutations import count_permutations
from bayou.diagnostics.reference import ReferenceRows, check_rows
from bayou.diagnostics.row_comparison import MIN_ROWS, PredictsRows, RowComparison


@final
@dataclass(frozen=True)
class _Levels:
    """The levels of the families of tests, whose sum is the rate of false alarms."""

    columns: float
    joint: float
    relation: float

    @classmethod
    def of(cls, alpha: float, *, has_targets: bool) -> _Levels:
        """Return the levels: half for targets, if there are any, and half for inputs."""
        inputs = alpha / 2 if has_targets else alpha
        return cls(inputs / 2, inputs / 2, alpha / 2)


@torch.no_grad()
def watch(
    posterior: PredictsRows,
    reference: ReferenceRows,
    x: Tensor | None,
    y: Tensor | None = None,
    *,
    columns: Sequence[InputColumn] | None = None,
    mistakes: Sequence[str] = (),
    in_order: bool = False,
    alpha: float = 0.01,
    samples: int | None = None,
    seed: int = 0,
) -> ShiftReport:
    """Compare new rows with training rows, and their targets with what the posterior predicts.

    The verdict is one of

    - "the relation has changed": y given x is not as in held-out rows, and the inputs do not
      explain it;
    - "inputs have shifted": x is not distributed as in training;
    - "as expected": no test is significant;
    - "cannot tell": fewer than 20 rows, and nothing that is wrong for certain.

    Inputs are tested column by column (Kolmogorov-Smirnov, chi-square, Fisher), and jointly: by the
    energy distance, by the correlations of all pairs of inputs, and by the epistemic uncertainty of
    new rows against held-out rows. Arrays such as images are compared by what the network makes of
    them, its outputs, against those of held-out rows (Rabanser et al. 2019).

    Targets are compared with held-out rows by their location, spread and log score under the
    predictive, and by their residuals along each input. Rows are compared within strata of similar
    inputs (propensity score), so that a shift of the inputs alone is not taken for a change of
    the relation; new rows in strata without held-out rows are left out. Fewer than 50 held-out rows
    cannot be compared; then the posterior's own predictions decide (coverage, uniformity of
    P(Y ≤ y), log score), which assumes that it was calibrated. With held-out rows these
    tests are reported as "calibration" and do not decide.

    P-values are adjusted by Holm. If nothing has changed, and rows are independent, the verdict
    is neither "shifted" nor "changed" with a probability of at least 1 − alpha: the columns have
    alpha/4, the joint tests alpha/4 and the relation alpha/2 (alpha/2, alpha/2 and 0 without
    targets).

    Args:
        posterior: what predicts y.
        reference: training rows and held-out rows.
        x: inputs of new rows, (N, *shape); None where a missing column leaves no inputs of
            the network: then only ``columns`` are compared.
        y: their targets; None without any.
        columns: of new rows, with names from ``reference.columns``; by default those of x.
        mistakes: sentences about what is wrong for certain, such as a missing column.
        in_order: whether the rows are in the order of time; then a trend is tested, too.
        alpha: the largest probability of a false alarm. Default: 0.01.
        samples: draws of the weights in a prediction; None: as many as ``predict`` takes.
        seed: of draws and permutations.

    Returns:
        The verdict with all tests, sentences that explain it, and what to do next.

    Raises:
        ValueError: for rows that do not match the reference, or targets without inputs.

    Example:
        >>> reference = ReferenceRows.of(x_train, (x_held, y_held))
        >>> report = bayou.diagnostics.watch(posterior, reference, x_new, y_new)
        >>> report.verdict
        'inputs have shifted'

    References:
        Rabanser, Günnemann, Lipton: Failing loudly, NeurIPS 2019. Rosenbaum, Rubin: The central
        role of the propensity score in observational studies for causal effects, Biometrika 1983.
        Székely, Rizzo: Testing for equal distributions in high dimension, InterStat 2004.
    """
    _check(reference, x, y, columns, alpha)
    if columns is None:
        names = tuple(column.name for column in reference.columns)
        is_table = x is not None and x.ndim == 2
        columns = () if x is None else columns_of(x, names if is_table else None)
    rows = len(columns[0] if x is None else x)
    levels = _Levels.of(alpha, has_targets=y is not None)
    pairs = _match(reference.columns, columns)
    sentences = [
        *mistakes,
        *(sentence for pair in pairs for sentence in describe_mistakes(*pair)),
    ]
    if rows < MIN_ROWS:
        return _too_few(rows, alpha, sentences, is_wrong=bool(mistakes))
    draws = count_permutations(2 * len(pairs), levels.columns)
    tests = [
        test
        for number, pair in enumerate(pairs)
        for test in compare_column(*pair, draws, rng.integer(rng.fold(seed, "column", number)))
    ]
    tests = adjust(tests, levels.columns)
    relation: Status = "cannot tell"
    reason = "The relation cannot be tested without targets."
    if x is not None:
        is_known = torch.ones(rows, dtype=torch.bool)
        for known, column in pairs:
            is_known &= column.is_known(known)
        comparison = RowComparison(posterior, reference, x, y, is_known, samples, seed)
        tests += adjust(comparison.joint_tests(levels.joint), levels.joint)
        if y is not None:
            relation_tests, relation, reason = comparison.relation(levels.relation, in_order)
            tests += relation_tests
            if comparison.held is not None:  # otherwise they are the tests of the relation
                tests += adjust(comparison.calibration_tests(alpha), alpha)
    is_shifted = bool(mistakes) or _any_significant(tests, "columns", "joint")
    inputs: Status = "shifted" if is_shifted else "as expected"
    verdict = _verdict(inputs, relation)
    reasons = tuple(_reasons(reason, tests))
    advice = tuple(_advice(verdict, relation, tests))
    return ShiftReport(
        verdict, inputs, relation, rows, alpha, tuple(tests), tuple(sentences), reasons, advice
    )


def _any_significant(tests: Sequence[ShiftTest], *families: str) -> bool:
    """Return whether a test of some families is significant."""
    return any(test.is_significant and test.family in families for test in tests)


def _check(
    reference: ReferenceRows,
    x: Tensor | None,
    y: Tensor | None,
    columns: Sequence[InputColumn] | None,
    alpha: float,
) -> None:
    """Raise a ValueError for arguments that do not match."""
    if isinstance(alpha, bool) or not 0 < alpha < 1:
        raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha!r}")
    if x is None:
        if y is not None or not columns:
            raise ValueError("without x only columns can be compared: give columns, and no y")
        return
    check_rows(x, "x", y)
    if x.shape[1:] != reference.x.shape[1:]:
        raise ValueError(
            f"x has rows of shape {tuple(x.shape[1:])}, those of the reference have "
            f"{tuple(reference.x.shape[1:])}"
        )
    for column in columns or ():
        if len(column) != len(x):
            raise ValueError(f"the column {column.name!r} has {len(column)} rows, x has {len(x)}")


def _match(
    reference: Sequence[InputColumn], new: Sequence[InputColumn]
) -> list[tuple[InputColumn, InputColumn]]:
    """Return the columns of training rows and of new rows with the same name."""
    by_name = {column.name: column for column in new}
    unknown = set(by_name) - {column.name for column in reference}
    if unknown:
        raise ValueError(f"the reference has no columns {', '.join(sorted(unknown))}")
    return [(column, by_name[column.name]) for column in reference if column.name in by_name]


def _too_few(rows: int, alpha: float, sentences: list[str], *, is_wrong: bool) -> ShiftReport:
    """Return the report on too few rows, which may have a missing column all the same."""
    reason = f"{rows} rows are too few for a test; {MIN_ROWS} or more are needed."
    verdict: Verdict = "inputs have shifted" if is_wrong else "cannot tell"
    inputs: Status = "shifted" if is_wrong else "cannot tell"
    advice = ("Collect more rows, or pass them to a sequential test (ShiftMartingale).",)
    return ShiftReport(
        verdict, inputs, "cannot tell", rows, alpha, (), tuple(sentences), (reason,), advice
    )


def _verdict(inputs: Status, relation: Status) -> Verdict:
    """Return the verdict: a changed relation counts more than shifted inputs."""
    if relation == "changed":
        return "the relation has changed"
    if inputs == "shifted":
        return "inputs have shifted"
    return "as expected"


def _reasons(relation_reason: str, tests: Sequence[ShiftTest]) -> list[str]:
    """Return sentences about the tests, the most significant one first."""
    sentences = []
    for families, name in ((("columns", "joint"), "inputs"), (("relation",), "relation")):
        count = sum(test.family in families for test in tests)
        significant = [test for test in tests if test.is_significant and test.family in families]
        if significant:
            best = min(significant, key=lambda test: test.adjusted_p)
            sentences.append(
                f"{len(significant)} of {count} tests of the {name} are significant, first "
                f"{best.subject} ({best.name}, adjusted p = {best.adjusted_p:.2g}): {best.text}."
            )
        elif count:
            sentences.append(f"None of {count} tests of the {name} is significant.")
    sentences.append(relation_reason)
    return sentences


def _advice(verdict: Verdict, relation: Status, tests: Sequence[ShiftTest]) -> list[str]:
    """Return what to do next."""
    is_miscalibrated = any(test.is_significant and test.family == "calibration" for test in tests)
    if verdict == "the relation has changed":
        return [
            "Fit again with the new rows (bayou.fit), or on them alone if the old relation no "
            "longer holds; until then do not rely on the intervals."
        ]
    sentences = []
    if verdict == "inputs have shifted":
        sentences.append("Look at the columns named above: a unit, a code or a filter may differ.")
        if relation == "as expected":
            sentences.append(
                "The relation holds where it can be compared: intervals can be corrected by "
                "held-out rows (bayou.conformal)."
            )
        else:
            sentences.append(
                "Label some of the new rows (bayou.acquire chooses them) and watch them again with "
                "their targets."
            )
    elif is_miscalibrated:
        sentences.append(
            "The targets are not as the posterior predicts, although they are as in held-out rows: "
            "calibrate it (bayou.calibrate, bayou.conformal)."
        )
    return sentences or ["Nothing has to be done."]
