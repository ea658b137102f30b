"""The result of ``check``, with one row per property."""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = ("check", "", "error", "allowed", "")


@dataclass(frozen=True)
class Result:
    """One property, which passed if ``value`` (an error) is at most ``tolerance``.

    Args:
        name: of the property, for example "ladj forward".
        passed: whether the map has the property.
        value: the error; None, the default, if the property is true or false.
        tolerance: the largest error that passes; None, the default, if there is no error.
        note: details, for example why the property was skipped.
    """

    name: str
    passed: bool
    value: float | None = None
    tolerance: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, value: float, tolerance: float, note: str = "") -> Result:
        """Return a row that passes if value ≤ tolerance; NaN does not.

        Args:
            name: of the property.
            value: the error.
            tolerance: the largest error that passes.
            note: details; empty by default.
        """
        return cls(name, value <= tolerance, value, tolerance, note)

    @classmethod
    def skip(cls, name: str, reason: str) -> Result:
        """Return a row for a property that this transform does not have.

        Args:
            name: of the property.
            reason: why it is not measured.
        """
        return cls(name, True, note=f"skipped: {reason}")

    def _cells(self) -> tuple[str, str, str, str, str]:
        """Return the cells of the row in a table."""
        verdict = "ok" if self.passed else "FAILED"
        note = " ".join(self.note.split())
        return self.name, verdict, _format(self.value), _format(self.tolerance), note


@dataclass(frozen=True)
class Report:
    """The rows of one run of ``check``.

    It prints as a table with the error and the allowed error of every property, and is true if all
    rows passed; ``report[name]`` is one row, with ``name``, ``passed``, ``value``, ``tolerance``
    and ``note``.

    Args:
        subject: what was checked: the class, the shape of its events, and the perturbation.
        results: one row per property.

    Example:
        >>> import bayou.flows as flows
        >>> report = flows.check(flows.realnvp(2), only=["ladj"])
        >>> bool(report), report["ladj forward"].passed
        (True, True)
        >>> report.failures
        ()
    """

    subject: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Return whether every row passed."""
        return all(result.passed for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """Return the rows that did not pass."""
        return tuple(result for result in self.results if not result.passed)

    def __bool__(self) -> bool:
        """Return whether every row passed."""
        return self.passed

    def __getitem__(self, name: str) -> Result:
        """Look up a row by name.

        Args:
            name: of the row, for example "ladj forward".

        Raises:
            KeyError: if there is no such row; the message lists all.
        """
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(
            f"no row {name!r}; the report has {[result.name for result in self.results]}"
        )

    def __str__(self) -> str:
        """Format the rows as a table, after a line that counts those that failed."""
        rows = [COLUMNS, *(result._cells() for result in self.results)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"{self.subject}: {self._verdict()}"]
        for name, verdict, value, tolerance, note in rows:
            row_start = f"{name:<{widths[0]}}  {verdict:<{widths[1]}}"
            numbers = f"{value:>{widths[2]}}  {tolerance:>{widths[3]}}"
            lines.append(f"{row_start}  {numbers}  {note}".rstrip())
        return "\n".join(lines)

    def _verdict(self) -> str:
        """Return how many rows failed, or that all passed."""
        if self.passed:
            return f"all {len(self.results)} passed"
        return f"{len(self.failures)} of {len(self.results)} FAILED"

    def raise_if_failed(self) -> None:
        """Raise an AssertionError with the table unless every row passed.

        Raises:
            AssertionError: if a row failed.
        """
        if not self.passed:
            raise AssertionError(str(self))


def _format(value: float | None) -> str:
    """Format an error with two digits, and a missing one as "-"."""
    return "-" if value is None else f"{value:.1e}"
