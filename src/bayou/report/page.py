"""From the results of runs to one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from typing import Any

from bayou import __version__
from bayou.extras import extra
from bayou.report.charts import SHAPES
from bayou.report.results import Result, Results, Section
from bayou.report.sections import sections
from bayou.report.tables import key_numbers
from bayou.report.verdict import best_label, verdict


class Report:
    """An HTML report on results: dicts as returned by ``bayou.report.judge``, one for each method,
    seed and split.

    ``config``: data (its name), facts (its sizes and shapes), command, notes, failures, reference
    (the label that the others are compared with), runs (their number, if there are several).
    ``best``: the method that the conclusion ``verdict`` is about, sentences of which the first can
    stand alone; ``key_numbers``: its three main scores.
    """

    def __init__(self, results: Sequence[Result], config: dict[str, Any]) -> None:
        self.config, facts, failures = config, config.get("facts", {}), config.get("failures", {})
        self.results = Results(results, facts, failures, config.get("reference", "MAP"))
        self.best, self.verdict = best_label(self.results), verdict(self.results)
        self.key_numbers = key_numbers(self.results, self.best) if self.best else []

    def html(self) -> str:
        """The page."""
        with extra("lab", "A report"):
            import jinja2
            from markupsafe import Markup as markup

        folder = resources.files("bayou.report")
        loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
        environment = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        notes = self.config.get("notes", [])
        return environment.get_template("page.html.j2").render(
            results=self.results,
            facts=self.results.facts,
            config=self.config,
            verdict=self.verdict,
            best=self.best,
            key=self.key_numbers,
            sections=sections(self.results) + ([Section("data", notes=notes)] if notes else []),
            shapes=SHAPES,
            style=markup((folder / "style.css").read_text(encoding="utf-8")),
            version=__version__,
            made=f"{datetime.now():%Y-%m-%d %H:%M}",
        )
