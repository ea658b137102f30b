"""From the results of runs to one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from bayou.extras import extra
from bayou.report.results import Result, Results, Section
from bayou.report.sections import sections
from bayou.report.verdict import verdict

NAMED = 3  # methods that a title can hold


class Report:
    """The page of some results: dicts as ``bayou.report.judge`` makes them, one for each method, seed and split.

    ``config``: data (its name), facts (what is known about it), command, notes, failures.
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
            sections=sections(self.results) + self._data() + self._verdict(),
            markup=markup,
            style=markup((folder / "style.css").read_text(encoding="utf-8")),
            version=self.version,
            made=self.made,
            command=self.config.get("command", ""),
        )

    def _title(self) -> str:
        labels, data = self.results.labels, self.config.get("data", "data")
        if len(labels) == 1:
            return f"{data}: what {labels[0]} knows, and what it does not"
        named = " and ".join([", ".join(labels[:-1]), labels[-1]])
        return f"{data}: what {named if len(labels) <= NAMED else f'{len(labels)} methods'} know, and what they do not"

    def _lead(self) -> str:
        what = "classes" if self.results.classes else "a number"
        count = len(self.results.labels)
        net = " with the same network" if "," not in str(self.results.facts.get("net", "")) else ""
        ways = (
            f"One way to learn {what}, judged on data that it has not seen."
            if count == 1
            else f"{count} ways to learn {what} from the same data{net}, judged on data that none of them has seen."
        )
        return f"{ways} A good method is right, says how sure it is, and is right about that too."

    def _facts(self) -> list[str]:
        facts, found = self.results.facts, []
        if facts.get("train"):
            found.append(f"{facts['train']:,} examples to learn from, {facts.get('test', 0):,} to judge by")
        if facts.get("input_shape"):
            shape = facts["input_shape"]
            outputs = f"{facts['output_size']} classes" if self.results.classes else "one number"
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

    def _verdict(self) -> list[Section]:
        said = verdict(self.results)
        return [Section("The verdict", " ".join(said))] if said else []

    def _data(self) -> list[Section]:
        notes = self.config.get("notes", [])
        return [Section("What was done to the data", notes=notes)] if notes else []
