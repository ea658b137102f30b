"""What the tests of new rows return: each with its p-value, and the verdict of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

from bayou.diagnostics.hypothesis import Significance, holm

Family = Literal["columns", "joint", "relation", "calibration"]
Status = Literal["as expected", "shifted", "changed", "cannot tell"]
Verdict = Literal["as expected", "inputs have shifted", "the relation has changed", "cannot tell"]
VERDICTS: tuple[Verdict, ...] = (
    "as expected",
    "inputs have shifted",
    "the relation has changed",
    "cannot tell",
)


@final
@dataclass(frozen=True)
class ShiftTest:
    """One test of new rows.

    Args:
        family: "columns", "joint" (all inputs together), "relation" (y given x, compared with
            held-out rows) or "calibration" (y, compared with what the posterior predicts).
        subject: the column, or the property of the rows, that is tested.
        name: of the test.
        statistic: its value.
        p: the p-value of this test alone.
        adjusted_p: adjusted by Holm for the number of tests that share a level.
        is_significant: whether the adjusted p-value is below the level of the family.
        text: the difference in words and numbers.
    """

    family: Family
    subject: str
    name: str
    statistic: float
    p: float
    text: str = ""
    adjusted_p: float = 1.0
    is_significant: bool = False

    @classmethod
    def of(
        cls, family: Family, subject: str, name: str, evidence: Significance, text: str = ""
    ) -> ShiftTest:
        """Return a test that is not adjusted yet.

        Args:
            family: see the class.
            subject: what is tested.
            name: of the test.
            evidence: its statistic and p-value.
            text: the difference in words.
        """
        return cls(family, subject, name, evidence.statistic, evidence.p, text)


def adjust(tests: list[ShiftTest], level: float) -> list[ShiftTest]:
    """Return tests with p-values adjusted by Holm, and which of them are significant.

    Args:
        tests: those that share a level.
        level: the largest probability of one or more false alarms among them.
    """
    adjusted_p = holm([test.p for test in tests])
    return [
        replace(test, adjusted_p=p, is_significant=p <= level)
        for test, p in zip(tests, adjusted_p, strict=True)
    ]


@final
@dataclass(frozen=True)
class ShiftReport:
    """The comparison of new rows with training rows: the result of ``watch``.

    Args:
        verdict: "as expected", "inputs have shifted", "the relation has changed" or "cannot tell".
        inputs: "as expected", "shifted" or "cannot tell".
        relation: "as expected", "changed" or "cannot tell", of y given x.
        rows: the number of new rows.
        alpha: the largest probability of a false alarm.
        tests: all of them, of every family.
        findings: sentences about what is wrong for certain, such as a missing column.
        reasons: sentences that say why the verdict is as it is.
        advice: what to do next: sentences with commands.
    """

    verdict: Verdict
    inputs: Status
    relation: Status
    rows: int
    alpha: float
    tests: tuple[ShiftTest, ...] = ()
    findings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def significant(self) -> tuple[ShiftTest, ...]:
        """The tests that are significant, the smallest p-value first."""
        tests = [test for test in self.tests if test.is_significant]
        return tuple(sorted(tests, key=lambda test: test.adjusted_p))

    @property
    def is_expected(self) -> bool:
        """Whether nothing has shifted or changed."""
        return self.verdict == "as expected"

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the fields, and the tests as objects."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the verdict, its reasons, the significant tests and the advice, one on a line."""
        lines = [f"{self.verdict} ({self.rows:,} rows; inputs {self.inputs}, relation "]
        lines[0] += f"{self.relation}; at most {self.alpha:.0%} false alarms)"
        lines += self.reasons
        lines += self.findings
        lines += [
            f"{test.subject}: {test.name}, p = {test.adjusted_p:.2g}. {test.text}".rstrip()
            for test in self.significant
        ]
        lines += [f"next: {sentence}" for sentence in self.advice]
        return "\n".join(lines)
