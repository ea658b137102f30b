"""How far the predictions of one model are from those of another, on several kinds of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from bayou.likelihoods.predictive import Predictive
from bayou.metrics.distance import agreement, row_total_variation
from bayou.metrics.scores import standard_error

LEVELS = (0.5, 0.9, 0.99)  # of the quantiles of a distance over rows
RISK = 0.05  # 1 − the probability of an upper bound
COLUMNS = ("inputs", "rows", "to teacher", "50 %", "90 %", "99 %", "bound", "agreement")
INFORMATION_COLUMNS = ("information", "teacher's", "|difference|")
REFERENCE_COLUMNS = ("to reference", "teacher's", "farther")


class Answers(NamedTuple):
    """What a model predicts for some rows.

    Args:
        predictive: its predictions of B rows.
        information: the mutual information of each row in nats, (B,); None if it is not known.
    """

    predictive: Predictive
    information: Tensor | None = None


@final
@dataclass(frozen=True)
class Distance:
    """The total variation between two predictions, over rows.

    Args:
        mean: of the rows.
        standard_error: of the mean.
        bound: an upper bound of the expectation over such rows, with probability .95.
        quantiles: .5, .9 and .99 of the rows.
    """

    mean: float
    standard_error: float
    bound: float
    quantiles: tuple[float, float, float]

    @classmethod
    def between(cls, a: Predictive, b: Predictive) -> Distance:
        """Measure the distance of two predictions of the same rows.

        Args:
            a: predictions of B rows.
            b: other predictions of them.
        """
        rows = row_total_variation(a, b).cpu()
        levels = torch.tensor(LEVELS, dtype=rows.dtype)
        median, ninth, last = (float(value) for value in rows.quantile(levels))
        return cls(
            float(rows.mean()),
            standard_error(rows),
            upper_bound(rows),
            (median, ninth, last),
        )


@final
@dataclass(frozen=True)
class Comparison:
    """A student beside its teacher, on inputs of one kind.

    Args:
        rows: the number of inputs.
        to_teacher: the distance of the student to the teacher.
        agreement: the fraction of rows with the same most probable class; None for numbers.
        information: the mean mutual information of the student in nats; None if it, or that of the
            teacher, is not known.
        teacher_information: that of the teacher.
        information_error: the mean absolute difference of the two.
        to_reference: the distance of the student to the reference; None without a reference.
        teacher_to_reference: that of the teacher.
        farther: the mean over rows of the difference of these two distances.
        farther_error: its standard error, of the paired differences.
    """

    rows: int
    to_teacher: Distance
    agreement: float | None = None
    information: float | None = None
    teacher_information: float | None = None
    information_error: float | None = None
    to_reference: Distance | None = None
    teacher_to_reference: Distance | None = None
    farther: float | None = None
    farther_error: float | None = None


@final
@dataclass(frozen=True)
class Certificate:
    """What is measured of a student beside its teacher; ``str`` is a table.

    Distances are total variations, 0 to 1. ``bound`` is an upper bound of the expected distance to
    the teacher on new inputs of the same distribution: it holds with probability .95 for rows that
    were drawn independently and were not used to choose the student (Maurer & Pontil 2009). It
    says nothing about inputs of another distribution.

    Args:
        inputs: a ``Comparison`` for each kind of inputs, by name.
    """

    inputs: dict[str, Comparison]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for ``from_json``."""
        return {name: asdict(comparison) for name, comparison in self.inputs.items()}

    @staticmethod
    def from_json(value: Any) -> Certificate:
        """Return the certificate that ``to_json`` described.

        Args:
            value: plain values.

        Raises:
            ValueError: for anything else.
        """
        if not isinstance(value, dict):
            raise ValueError(f"a certificate must be a dict, got {type(value).__name__}")
        comparisons = {}
        for name, entry in value.items():
            fields = dict(entry)
            for key in ("to_teacher", "to_reference", "teacher_to_reference"):
                if fields.get(key) is not None:
                    distance = dict(fields[key])
                    distance["quantiles"] = tuple(distance["quantiles"])
                    fields[key] = Distance(**distance)
            comparisons[name] = Comparison(**fields)
        return Certificate(comparisons)

    def __str__(self) -> str:
        comparisons = self.inputs.values()
        has_information = any(c.information is not None for c in comparisons)
        has_reference = any(c.to_reference is not None for c in comparisons)
        header = list(COLUMNS)
        if has_information:
            header += INFORMATION_COLUMNS
        if has_reference:
            header += REFERENCE_COLUMNS
        lines = [header]
        for name, comparison in self.inputs.items():
            cells = _distance_cells(name, comparison)
            if has_information:
                cells += _information_cells(comparison)
            if has_reference:
                cells += _reference_cells(comparison)
            lines.append(cells)
        widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
        rows = []
        for line in lines:
            first = line[0].ljust(widths[0])
            others = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            rows.append("  ".join([first, *others]))
        return "\n".join(rows)


def compare(
    student: Mapping[str, Answers],
    teacher: Mapping[str, Answers],
    reference: Mapping[str, Predictive] | None = None,
) -> Certificate:
    """Measure the distances of a student to its teacher and of both to a reference.

    Args:
        student: its answers by the name of the inputs.
        teacher: those of the teacher for the same inputs.
        reference: predictions to measure the distance of both to, for all or some of the inputs.

    Returns:
        The certificate.

    Raises:
        ValueError: if the predictions are not of the same rows.
    """
    reference = reference or {}
    comparisons = {}
    for name, answers in student.items():
        comparisons[name] = _compare_answers(answers, teacher[name], reference.get(name))
    return Certificate(comparisons)


def upper_bound(values: Tensor, risk: float = RISK) -> float:
    """Compute an upper bound of the expectation of values in [0, 1].

    mean + √(2·V·log(2/δ)/n) + 7·log(2/δ)/(3·(n − 1)) with the sample variance V, the empirical
    Bernstein bound: it holds with probability 1 − δ for n independent values (Maurer & Pontil
    2009, Empirical Bernstein bounds and sample variance penalization).

    Args:
        values: n numbers in [0, 1].
        risk: δ.

    Returns:
        The bound; 1 if there is only one value, or the bound exceeds 1.
    """
    n = values.numel()
    if n < 2:
        return 1.0
    values = values.double()
    log_risk = math.log(2 / risk)
    deviation = math.sqrt(2 * float(values.var(correction=1)) * log_risk / n)
    return min(1.0, float(values.mean()) + deviation + 7 * log_risk / (3 * (n - 1)))


def _compare_answers(
    student: Answers, teacher: Answers, reference: Predictive | None
) -> Comparison:
    """Return the comparison for inputs of one kind."""
    numbers: dict[str, Any] = {}
    if student.predictive.likelihood.support == "classes":
        numbers["agreement"] = agreement(student.predictive, teacher.predictive)
    if student.information is not None and teacher.information is not None:
        own = student.information.double().cpu()
        taught = teacher.information.double().cpu()
        numbers["information"] = float(own.mean())
        numbers["teacher_information"] = float(taught.mean())
        numbers["information_error"] = float((own - taught).abs().mean())
    if reference is not None:
        numbers["to_reference"] = Distance.between(student.predictive, reference)
        numbers["teacher_to_reference"] = Distance.between(teacher.predictive, reference)
        farther = row_total_variation(student.predictive, reference).cpu()
        farther = farther - row_total_variation(teacher.predictive, reference).cpu()
        numbers["farther"] = float(farther.mean())
        numbers["farther_error"] = standard_error(farther)
    return Comparison(
        student.predictive.outputs.shape[1],
        Distance.between(student.predictive, teacher.predictive),
        **numbers,
    )


def _distance_cells(name: str, comparison: Comparison) -> list[str]:
    """Return the cells of the distance to the teacher."""
    distance = comparison.to_teacher
    share = "" if comparison.agreement is None else f"{comparison.agreement:.4f}"
    quantiles = [f"{value:.4f}" for value in distance.quantiles]
    return [
        name,
        f"{comparison.rows:,}",
        f"{distance.mean:.4f} ± {distance.standard_error:.4f}",
        *quantiles,
        f"{distance.bound:.4f}",
        share,
    ]


def _information_cells(comparison: Comparison) -> list[str]:
    """Return the cells of the mutual information, empty ones if it is not known."""
    values = (
        comparison.information,
        comparison.teacher_information,
        comparison.information_error,
    )
    return ["" if value is None else f"{value:.4f}" for value in values]


def _reference_cells(comparison: Comparison) -> list[str]:
    """Return the cells of the distances to the reference, empty ones without a reference."""
    student = comparison.to_reference
    teacher = comparison.teacher_to_reference
    if student is None or teacher is None:
        return ["", "", ""]
    return [
        f"{student.mean:.4f}",
        f"{teacher.mean:.4f}",
        f"{comparison.farther:+.4f} ± {comparison.farther_error:.4f}",
    ]
