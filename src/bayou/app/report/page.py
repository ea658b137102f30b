"""From the results of runs to one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from typing import Any

from bayou import __version__
from bayou.app.report.charts import SHAPES
from bayou.app.report.results import Cell, Head, Result, Results, Section
from bayou.app.report.sections import sections
from bayou.app.report.tables import key_numbers
from bayou.app.report.verdict import best_label, verdict
from bayou.core.extras import extra


class RunReport:
    """An HTML report on results of one run or of several.

    ``best`` is the method that the conclusion ``verdict`` is about, sentences of which the first
    can stand alone; ``key_numbers`` are its three main scores.

    Args:
        results: dictionaries as returned by ``bayou.app.report.judge``, one for each method, seed
            and split.
        config: data (its name), facts (its sizes and shapes), command, notes, split_notes,
            failures, reference (the label that the rest is compared with), runs (their number, if
            there are several).
    """

    def __init__(self, results: Sequence[Result], config: dict[str, Any]) -> None:
        self.config = config
        self.results: Results = Results(
            results,
            config.get("facts", {}),
            config.get("failures", {}),
            config.get("reference", "MAP"),
        )
        self.best: str | None = best_label(self.results)
        self.verdict: list[str] = verdict(self.results)
        self.key_numbers: list[tuple[Head, Cell]] = (
            key_numbers(self.results, self.best) if self.best else []
        )

    def html(self) -> str:
        """Return the page."""
        with extra("lab", "A report"):
            import jinja2
            from markupsafe import Markup as markup

        folder = resources.files("bayou.app.report")
        loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
        environment = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        all_sections = sections(self.results)
        for name, key in (("split", "split_notes"), ("data", "notes")):
            notes = self.config.get(key, [])
            if notes:
                all_sections.append(Section(name, notes=notes))
        return environment.get_template("page.html.j2").render(
            results=self.results,
            facts=self.results.facts,
            config=self.config,
            verdict=self.verdict,
            best=self.best,
            key=self.key_numbers,
            sections=all_sections,
            shapes=SHAPES,
            style=markup((folder / "style.css").read_text(encoding="utf-8")),
            version=__version__,
            made=f"{datetime.now():%Y-%m-%d %H:%M}",
        )
