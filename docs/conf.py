"""Sphinx configuration: Markdown pages, the API from docstrings, nothing from the network."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.metadata import version as installed_version
from inspect import getdoc
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

project = "bayou"
author = "bayou contributors"
copyright = "2026, bayou contributors"
version = release = installed_version("bayou")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_generated"]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "set_predict_request,set_score_request"}  # made by scikit-learn
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"bayou {release}"
html_show_sphinx = False
html_copy_source = False


def catalogue_table() -> str:
    """Every map as a Markdown table, read from the code so that it cannot fall behind it."""
    from bayou.flows import registry

    rows = ["| name | kind | what it is | x → y | forward | inverse | term |", "|---|---|---|---|---|---|---|"]
    for name, entry in registry().items():
        made, build = entry.build(2), entry.build
        costs = (made.forward_kind.name, made.inverse_kind.name, made.ladj_kind.name)
        events = " → ".join("×".join(str(size or "·") for size in event) for event in (made.event_in, made.event_out))
        function, keywords = (build.func, build.keywords) if isinstance(build, partial) else (build, {})
        options = {key: value for key, value in keywords.items() if isinstance(value, bool | int | str)}
        what = first_line(function) + "".join(f" `{key}={value!r}`" for key, value in options.items())
        rows.append(f"| `{name}` | {entry.kind} | {what} | {events} | " + " | ".join(costs) + " |")
    return "\n".join(rows) + "\n"


def first_line(documented: Any) -> str:
    """The first line of a docstring, as Markdown that may stand in a table."""
    line = (getdoc(documented) or "").partition("\n")[0]
    return re.sub(r"([|*_<>$])", r"\\\1", line.replace("``", "`"))


def api_of(package: str, first: Sequence[str]) -> str:
    """One section per file, with everything public that it defines; the files named first come first.

    What ``bayou`` itself has under the same name is described there.
    """
    home, top = import_module(package), import_module("bayou")
    sections: dict[str, list[str]] = {}
    for name in home.__all__:
        member = getattr(home, name)
        known = package != "bayou" and name in top.__all__ and getattr(top, name) is member
        if not known and (isinstance(member, type) or callable(member)):
            sections.setdefault(member.__module__, []).append(name)
    position = {f"{package}.{name}": i for i, name in enumerate(first)}
    lines = []
    for module in sorted(sections, key=lambda module: (position.get(module, len(position)), module)):
        leaf, room = module.rpartition(".")[2], package.rpartition(".")[2]
        title = leaf.capitalize() if package == "bayou" else f"{room.capitalize()}: {leaf}"  # once on the page
        lines += [title, "~" * len(title), "", getdoc(sys.modules[module]) or "", ""]
        lines += [f".. currentmodule:: {package}", ""]
        for name in sections[module]:
            member = getattr(home, name)
            if isinstance(member, type):
                lines += [f".. autoclass:: {name}", "   :members:", "   :show-inheritance:"]
                lines += ["   :undoc-members:", ""] if issubclass(member, Enum) else [""]
            else:
                lines += [f".. autofunction:: {name}", ""]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def measured(name: str, **pictures: str) -> str:
    """A table of ``benchmarks/results``, one heading down, with its pictures; or a word where it is not there yet."""
    path = HERE.parent / "benchmarks" / "results" / f"{name}.md"
    if not path.exists():
        return f"`python -m benchmarks.{name}` makes this table; it has not been run yet.\n"
    said = re.sub(r"^#", "##", path.read_text(encoding="utf-8").partition("\n")[2], flags=re.MULTILINE)
    drawn = [f"\n```{{image}} pictures/{picture}.png\n:alt: {alt}\n```\n"
             for picture, alt in pictures.items() if (HERE / "pictures" / f"{picture}.png").exists()]  # fmt: skip
    return said + "".join(drawn)


# Docstrings are plain sentences with formulas: outside ``literals`` and *emphasis*, * and | are arithmetic, not markup.
LITERAL = re.compile(r"(``.+?``|:\w+:`.+?`|(?<![\w(*])\*\w[^*]*\w\*(?![\w*]))")


def plain_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        parts = LITERAL.split(line)
        parts[::2] = [re.sub(r"(?<!\\)(?<!\*)([*|])(?!\*)", r"\\\1", part) for part in parts[::2]]
        lines[i] = "".join(parts)


def write_generated(app: Any) -> None:
    folder = HERE / "_generated"
    folder.mkdir(exist_ok=True)
    pages = {
        "catalogue.md": catalogue_table(),
        "continuous.md": measured(
            "continuous",
            **{
                "continuous": "densities in the plane by likelihood, by matching, by residual and spline flows",
                "continuous-draws": "draws of residual flows and flows in continuous time on MNIST and CIFAR-10",
            },
        ),
        "bayou.md": api_of("bayou", ["methods", "methods.vi", "methods.elbo", "posteriors", "posteriors.posterior"]),
        "likelihoods.md": api_of("bayou.likelihoods", ["base"]),
        "priors.md": api_of("bayou.priors", []),
        "select.md": api_of("bayou.select", ["named", "held_out", "auto"]),
        "metrics.md": api_of("bayou.metrics", ["scores"]),
        "diagnostics.md": api_of("bayou.diagnostics", ["bound", "modes"]),
        "flows.md": api_of(
            "bayou.flows",
            [
                "core.transform",
                "core.flow",
                "core.bases",
                "layers.builders",
                "checking.check",
                "checking.report",
                "fitting.fit",
            ],
        ),
    }
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # an unchanged file is not built again
            path.write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("builder-inited", write_generated)
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon adds markup
