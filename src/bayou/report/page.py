"""From the results of runs to one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from bayou.extras import extra
from bayou.report.results import Result, Results, Section
from bayou.report.sections import sections
from bayou.report.verdict import verdict

MAX_TITLE_METHODS = 3  # methods named in the title


class Report:
    """An HTML report on results: dicts as returned by ``bayou.report.judge``, one for each method, seed and split.

    ``config``: data (its name), facts (its sizes and shapes), command, notes, failures.
    """

    def __init__(self, results: Sequence[Result], config: dict[str, Any], *, version: str, made: str) -> None:
        self.config, self.version, self.made = config, version, made
        self.results = Results(results, config.get("facts", {}), config.get("failures", {}))

    def html(self) -> str:
        """The page."""
        with extra("lab", "A report"):
            import jinja2
            from markupsafe import Markup as markup

        folder = resources.files("bayou.report")
        loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        return environment.get_template("page.html.j2").render(
            title=self._title(),
            lead=self._lead(),
            facts=self._facts(),
            sections=sections(self.results) + self._closing(),
            markup=markup,
            style=markup((folder / "style.css").read_text(encoding="utf-8")),
            version=self.version,
            made=self.made,
            command=self.config.get("command", ""),
        )

    def _title(self) -> str:
        labels, data = self.results.labels, self.config.get("data", "data")
        if len(labels) == 1:
            return f"{data}: predictive uncertainty of {labels[0]}"
        named = " and ".join([", ".join(labels[:-1]), labels[-1]])
        which = named if len(labels) <= MAX_TITLE_METHODS else f"{len(labels)} methods"
        return f"{data}: predictive uncertainty of {which}"

    def _lead(self) -> str:
        what, count = "classification" if self.results.classes else "regression", len(self.results.labels)
        net = " with the same network" if "," not in str(self.results.facts.get("net", "")) else ""
        methods = f"One method for {what}" if count == 1 else f"{count} methods for {what} on the same data{net}"
        return f"{methods}, evaluated on held-out test data: accuracy, predictive uncertainty and its calibration."

    def _facts(self) -> list[str]:
        facts, found = self.results.facts, []
        if facts.get("train"):
            found.append(f"{facts['train']:,} training examples, {facts.get('test', 0):,} test examples")
        if facts.get("input_shape"):
            shape = facts["input_shape"]
            outputs = f"{facts['output_size']} classes" if self.results.classes else "one output"
            images = f"images {'×'.join(map(str, shape))}"
            inputs = images if len(shape) > 1 else f"{shape[0]} input{'s' * (shape[0] > 1)}"
            found.append(f"{inputs}, {outputs}")
        if facts.get("ood"):
            found.append(f"out of distribution: {facts['ood']}")
        if facts.get("net"):
            size = f", {facts['weights']:,} weights" if facts.get("weights") else ""
            found.append(f"network {facts['net']}{size}")
        counts = {"seed": self.results.seeds, "split": len(self.results.splits)}
        return [*found, *(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items())]

    def _closing(self) -> list[Section]:
        notes, said = self.config.get("notes", []), verdict(self.results)
        found = Section("Preprocessing of the data", notes=notes), Section("Conclusion", " ".join(said))
        return [section for section in found if section.notes or section.text]
