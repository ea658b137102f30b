"""The result of ``check``, with one row per property."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One property, which passed if ``value`` (an error) is at most ``tolerance``."""

    name: str
    passed: bool
    value: float | None = None  # None if the property is true or false
    tolerance: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, value: float, tolerance: float, note: str = "") -> Result:
        """A row that passes if value ≤ tolerance; NaN does not."""
        return cls(name, value <= tolerance, value, tolerance, note)

    @classmethod
    def skipped(cls, name: str, why: str) -> Result:
        """A row for a property that this transform does not have."""
        return cls(name, True, note=f"skipped: {why}")


@dataclass(frozen=True)
class Report:
    """The rows of one run of ``check``; it prints as a table and is true if all rows passed."""

    subject: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if not result.passed)

    def __bool__(self) -> bool:
        return self.passed

    def __getitem__(self, name: str) -> Result:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(
            f"no row {name!r}; the report has {[result.name for result in self.results]}"
        )

    def __str__(self) -> str:
        rows = [("check", "", "error", "allowed", "")]
        for r in self.results:
            verdict = "ok" if r.passed else "FAILED"
            rows.append(
                (r.name, verdict, _number(r.value), _number(r.tolerance), " ".join(r.note.split()))
            )
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = []
        for name, verdict, value, tolerance, note in rows:
            left = f"{name:<{widths[0]}}  {verdict:<{widths[1]}}"
            lines.append(f"{left}  {value:>{widths[2]}}  {tolerance:>{widths[3]}}  {note}".rstrip())
        failed = len(self.failures)
        verdict = (
            f"{failed} of {len(self.results)} FAILED"
            if failed
            else f"all {len(self.results)} passed"
        )
        return "\n".join([f"{self.subject}: {verdict}", *lines])

    def raise_if_failed(self) -> None:
        """Raise an AssertionError with the table unless every row passed."""
        if not self.passed:
            raise AssertionError(str(self))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
