"""What the pages take from the code and the committed tables: rows of a method, commands, settings,
API, catalog.

``write`` is called by ``conf.py`` before a build. It fills ``docs/_generated``, which the pages
include.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from html import escape
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any

from bayou.app.report.truth import row_cells
from bayou.core.specs import args_entries
from bayou.truth import REFERENCES, committed_rows

HERE = Path(__file__).parent
RESULTS = HERE.parent / "experiments" / "results"
GENERATED = HERE / "_generated"
COMMAND = re.compile(r"^`((?:bayou|python) [^`]+)`(?:, (\d{4}-\d\d-\d\d))?")
DATE = re.compile(r"\d{4}-\d\d-\d\d")


# --- tables of experiments/results --------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One table of a file of results, as text; ``title`` is the heading above it, if there is
    one.
    """

    stem: str
    title: str
    header: list[str]
    rows: list[list[str]]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@cache
def tables() -> tuple[Table, ...]:
    """Every table of every file of results.

    The Markdown files are read, not the JSON files beside them: they hold means over seeds, in one
    format, and the tests of each experiment compare them with the JSON file.
    """
    return tuple(table for path in sorted(RESULTS.glob("*.md")) for table in tables_of(path))


def tables_of(path: Path) -> Iterator[Table]:
    heading, rows = "", list[str]()
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
            continue
        if len(rows) > 2:
            yield Table(path.stem, heading, cells(rows[0]), [cells(row) for row in rows[2:]])
        rows = []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# --- methods ------------------------------------------------------------------------------------

# The columns that name what a row is about.
LABELS = {"method", "family", "candidate", "posterior", "row", "curvature", "classes", "preset, as it is", "permuted",
          "split", "branin, regret after", "digits"}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page of ``docs/methods``: the labels of its rows, whole tables that are about it, and its
    classes.
    """

    labels: str = "(?!)"
    titles: str = "(?!)"
    classes: tuple[str, ...] = ()


PAGES = {
    "mle": Page(r"MLE|plain\b|SGD, |a point \(MLE\)|point$", classes=("bayou.MLE",)),
    "map": Page(r"MAP\b|map\b|L2\b|Delta \(MAP\)", classes=("bayou.MAP",)),
    "dropout": Page(
        r"dropout|MC ?dropout|Dropout|MCDropout", classes=("bayou.MCDropout", "bayou.Dropout")
    ),
    "ensemble": Page(r"(?i:ensemble)", classes=("bayou.Ensemble",)),
    "rankone": Page(
        r"BatchEnsemble|rank-1|\d+ snapshots|sub-ensemble", classes=("bayou.guides.RankOne",)
    ),
    "tabm": Page(r"TabM(?!, own)|tabm(?!-noise)"),
    "tabm-noise": Page(r"tabm-noise|TabM, own noise"),
    "bins": Page(r"(?i:bins)\b"),
    "vi": Page(classes=("bayou.VI",)),
    "ffg": Page(
        r"(?!.*annealed)(FFG|ffg|VI\(FFG|(?i:mean field)|VI\(MeanField|Bayes by Backprop|scale mixture|VCL)",
        classes=("bayou.MeanField",),
    ),
    "mnf": Page(r"(?!.*annealed)(MNF|mnf|VI\(MNF|100 draws of MNF)", classes=("bayou.MNF",)),
    "lowrank": Page(r"LowRank|VI\(LowRank|lowrank", classes=("bayou.LowRank",)),
    "jointflow": Page(r"JointFlow|VI\(JointFlow", classes=("bayou.JointFlow",)),
    "inducing": Page(r"Inducing(?!.*annealed)", "Inducing on digits", ("bayou.Inducing",)),
    "implicit": Page(r"SIVI|UIVI", classes=("bayou.guides.SIVI", "bayou.guides.UIVI")),
    "nodeflow": Page(r"NodeFlow|nodeflow", "Prior of the gains in the preset", ("bayou.NodeFlow",)),
    "nodenoise": Page(r"NodeNoise|node noise", classes=("bayou.NodeNoise",)),
    "sparse": Page(r"SparseVD|FFLU", classes=("bayou.SparseVD",)),
    "jeffreys": Page(r"NormalJeffreys", classes=("bayou.guides.NormalJeffreys",)),
    "horseshoe": Page(r"HalfCauchy", classes=("bayou.guides.HalfCauchy",)),
    "ivon": Page(r"IVON|ivon", classes=("bayou.IVON",)),
    "laplace": Page(
        r"Laplace|laplace|online Laplace", "What Laplace costs|Ask: .*Laplace", ("bayou.Laplace",)
    ),
    "laplace-last": Page(r"(Laplace|laplace|kronecker).*last", classes=("bayou.Laplace",)),
    "sngp": Page(r"SNGP|DDU"),
    "vbll": Page(r"VBLL|vbll", classes=("bayou.methods.VBLL",)),
    "wide": Page(r"wide(?!-)\b|Wide\b", classes=("bayou.methods.Wide",)),
    "wide-noise": Page(r"wide-noise"),
    "linear": Page(r"bayou linear"),
    "tfb": Page(r"TFB", classes=("bayou.methods.TFB",)),
    "swag": Page(r"(multi-)?SWAG|swag", classes=("bayou.SWAG",)),
    "samplers": Page(),
    "sgld": Page(r"(SGLD|sgld)(?!.*cyclical)", classes=("bayou.SGLD",)),
    "psgld": Page(r"PSGLD|psgld", classes=("bayou.PSGLD",)),
    "sghmc": Page(r"SGHMC|sghmc", classes=("bayou.SGHMC",)),
    "csgld": Page(r"SGLD, cyclical|csgld", classes=("bayou.methods.Cyclical",)),
    "hmc": Page(r"HMC|hmc", classes=("bayou.HMC",)),
    "nuts": Page(r"NUTS|nuts", classes=("bayou.NUTS",)),
    "mclmc": Page(r"MCLMC|mclmc", classes=("bayou.MCLMC",)),
    "annealed": Page(
        r"Annealed|annealed|.*, annealed", "Settings of Annealed", ("bayou.Annealed",)
    ),
    "auto": Page(r"bayou auto|auto\b", classes=("bayou.select.Auto",)),
}


def rows_of(page: Page) -> list[Table]:
    """The rows of every committed table that are about a method, without columns that are empty
    there.
    """
    found = []
    for table in tables():
        named = [i for i, name in enumerate(table.header) if name in LABELS]
        whole = re.search(page.titles, table.title) is not None

        def about(row: list[str], named: list[int] = named) -> bool:
            return any(
                re.match(page.labels, row[i].replace("*", "")) for i in named if i < len(row)
            )

        rows = [row for row in table.rows if whole or about(row)]
        if rows:
            kept = [
                i
                for i in range(len(table.header))
                if any(row[i : i + 1] not in ([], [""]) for row in rows)
            ]
            rows = [[row[i] if i < len(row) else "" for i in kept] for row in rows]
            found.append(Table(table.stem, table.title, [table.header[i] for i in kept], rows))
    return found


def measured(page: Page) -> str:
    """The rows of a method as Markdown, one table for each file, with a link to its page."""
    found = rows_of(page)
    if not found:
        return "No committed table has a row of this method yet.\n"
    count = sum(len(table.rows) for table in found)
    text = [
        f'{count} rows of {len(found)} tables. A click on a column sorts.\n\n<div class="table-filter"></div>\n'
    ]
    for table in found:
        where = shown().get(table.stem, "benchmarks")
        title = table.title or f"`{table.stem}`"
        text.append(f"**{title}** ([all rows and the command](/{where}.md))\n")
        text.append(markdown_table(table.header, table.rows))
    return "\n".join(text)


def settings(page: Page) -> str:
    """The arguments of the classes of a page, with defaults and what their docstrings say."""
    parts = []
    for path in page.classes:
        module, _, name = path.rpartition(".")
        cls = getattr(import_module(module), name)
        about = dict[str, str]()
        for base in reversed(cls.__mro__[:-1]):
            about |= arguments(base)
        shared = shared_arguments(cls)
        rows = []
        for field, parameter in inspect.signature(cls).parameters.items():
            if field in shared:
                continue
            default = (
                ""
                if parameter.default is inspect.Parameter.empty
                else f"`{shorten(parameter.default)}`"
            )
            rows.append([f"`{field}`", default, cell(about.get(field, ""))])
        where = module.rpartition(".")[2]
        columns = 3 if any(row[2] for row in rows) else 2
        table = markdown_table(
            ["setting", "default", "meaning"][:columns], [row[:columns] for row in rows]
        )
        parts.append(f"`{path}` ([API](/api/{where}.md)):\n\n{table}")
        if shared:
            parts.append(f"and the settings of {'training' if 'epochs' in shared else 'chains'} that "
                         f"[{'VI' if 'epochs' in shared else 'all samplers'}]"
                         f"(/methods/{'vi' if 'epochs' in shared else 'samplers'}.md) lists.\n")  # fmt: skip
    return "\n".join(parts)


def shared_arguments(cls: type) -> set[str]:
    """Arguments that a page lists once: those of training with VI, those of chains with the
    samplers.
    """
    bases = {base.__name__: base for base in cls.__mro__[1:]}
    base = bases.get("Trained") if cls.__name__ != "VI" else None
    return set(inspect.signature(base).parameters) if base else set()


def arguments(cls: type) -> dict[str, str]:
    """The entries of the section Args of a docstring: the text of each argument."""
    return {
        name: " ".join(entry.partition(": ")[2].split())
        for name, entry in args_entries(getdoc(cls)).items()
    }


def shorten(default: Any) -> str:
    text = repr(default)
    if "factory" in text or " at 0x" in text:
        return "..."
    return re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "()", text) if len(text) > 24 else text


def cell(text: str) -> str:
    """A sentence of a docstring for a Markdown table."""
    parts = re.split(r"(``.+?``)", text)
    parts[::2] = [re.sub(r"([|*_<>$])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("``", "`")


def names_table() -> str:
    """The methods by name, each with a link to its page."""
    from bayou import list_methods

    rows = [
        [f"[`{name}`](/methods/{name}.md)", summary] for name, summary in list_methods().items()
    ]
    return markdown_table(["name", "method"], rows)


# --- which method? ------------------------------------------------------------------------------


def tree() -> str:
    """The decision tree of ``docs/which.toml`` as nested ``details``, which a keyboard opens
    without a script.
    """
    return (
        '<div class="tree">\n'
        + branch(tomllib.loads((HERE / "which.toml").read_text("utf-8")), True)
        + "</div>\n"
    )


def leaves(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for answer in node.get("answers", []):
        yield from leaves(answer)
    if "page" in node:
        yield node


def branch(node: dict[str, Any], top: bool = False) -> str:
    inside = ""
    if "question" in node:
        inside += f'<p class="question">{inline(node["question"])}</p>\n'
    inside += "".join(branch(answer) for answer in node.get("answers", []))
    if "page" in node:
        inside += f"<p>{inline(node['because'])}</p>\n"
        inside += f"<pre><code>{escape(node['code'])}</code></pre>\n" if "code" in node else ""
        inside += f'<p><a href="{node["page"]}.html">{inline(node["title"])}</a></p>\n'
    return (
        inside
        if top
        else f"<details><summary>{inline(node['answer'])}</summary>\n{inside}</details>\n"
    )


def inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


# --- pages of tables ----------------------------------------------------------------------------


@cache
def shown() -> dict[str, str]:
    """Which page shows a file of results: its name without ``.md``, from ``docs``."""
    found = {}
    for page in sorted(HERE.rglob("*.md")):
        if GENERATED not in page.parents and "_build" not in page.parts:
            for stem in re.findall(
                r"_generated/tables/([\w-]+)\.md", page.read_text(encoding="utf-8")
            ):
                found[stem] = page.relative_to(HERE).with_suffix("").as_posix()
    return found


@cache
def remarks() -> dict[str, dict[str, str]]:
    """What a file of results does not say itself: what it does not show and, of a few, the command
    and the date.
    """
    return tomllib.loads((HERE / "benchmarks" / "remarks.toml").read_text(encoding="utf-8"))


def runs(stem: str) -> list[tuple[str, str]]:
    """The commands that made a file of results, with their dates."""
    path, said = RESULTS / f"{stem}.md", remarks().get(stem, {})
    if (raw := path.with_suffix(".json")).exists():
        found = json.loads(raw.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("runs"), list):
            return [(run["command"], run["made"]) for run in found["runs"]]
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"`((?:bayou|python) [^`]+)`[^`|]{0,80}?(\d{4}-\d\d-\d\d)", text)
    if not found:
        inside = re.search(r"`(python [^`]+)`", text)
        found = [(said.get("command") or (inside.group(1) if inside else ""), "")]
    dated = said.get("date") or (DATE.search(text) or [""])[0]
    return [(command, date or dated) for command, date in found]


def table_page(stem: str) -> str:
    """A file of results for a page: headings two levels down, commands folded, and what it does not
    show.
    """
    text = (RESULTS / f"{stem}.md").read_text(encoding="utf-8")
    text = "\n".join(
        line
        for line in text.splitlines()
        if not (match := COMMAND.match(line)) or not match.group(2)
    )
    text = re.sub(r"^#", "###", re.sub(r"\A# .*\n", "", text), flags=re.MULTILINE)
    text = re.sub(r"^###(#+)", r"##\1", text, flags=re.MULTILINE)
    text = re.sub(r"!\[([^\]]*)\]\(([\w.-]+)\)", r"![\1](../../experiments/results/\2)", text)
    made = sorted(set(runs(stem)), key=lambda run: run[::-1])
    dates = sorted({date for _, date in made})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    items = "".join(f"<li><code>{escape(command)}</code>, {date}</li>" for command, date in made)
    many = f"{len(made)} commands" if len(made) > 1 else "one command"
    fold = (
        f'<details class="made"><summary>Made {when} by {many}</summary><ul>{items}</ul></details>'
    )
    missed = remarks().get(stem, {}).get("missed", "")
    return f"{text.strip()}\n\n{fold}\n\n**Limits.** {missed}\n"


def results_table() -> str:
    """All files of results: where they are shown, when they were made and what they do not show."""
    rows = []
    for path in sorted(RESULTS.glob("*.md")):
        stem, said = path.stem, remarks()[path.stem]
        made = runs(stem)
        command = (
            f"`{made[-1][0]}`"
            if len(made) == 1
            else f"`{made[-1][0].split(' --')[0]} ...`, {len(made)} runs"
        )
        rows.append(
            [
                f"[{said['title']}](/{shown()[stem]}.md)",
                max(date for _, date in made),
                command,
                said["missed"],
            ]
        )
    return markdown_table(["table", "date", "command", "limits"], rows)


def board_table(against: str) -> str:
    """The committed rows of a reference, sorted by total variation."""
    rows = sorted(committed_rows(against), key=lambda row: row.total_variation)
    found = [row_cells(row) for row in rows]
    return markdown_table(list(found[0]), [list(row.values()) for row in found])


# --- flows --------------------------------------------------------------------------------------


def catalog_table(names: Sequence[str] | None = None) -> str:
    """The maps of the registry, or those with the given names."""
    from bayou.flows import registry

    header = ["name", "kind", "what it is", "x → y", "forward", "inverse", "term"]
    rows = []
    for name, entry in registry().items():
        if names is not None and name not in names:
            continue
        made, build = entry.build(2), entry.build
        costs = (made.forward_kind.name, made.inverse_kind.name, made.ladj_kind.name)
        events = " → ".join(
            "×".join(str(size or "·") for size in event)
            for event in (made.event_in, made.event_out)
        )
        function, keywords = (
            (build.func, build.keywords) if isinstance(build, partial) else (build, {})
        )
        options = {
            key: value for key, value in keywords.items() if isinstance(value, bool | int | str)
        }
        what = first_line(function) + "".join(
            f" `{key}={value!r}`" for key, value in options.items()
        )
        rows.append([f"`{name}`", entry.kind, what, events, *costs])
    return markdown_table(header, rows)


# The maps of each page of docs/flows, and the labels of its rows in committed tables (columns of
# FLOW_LABELS).
FLOWS = {
    "linear": ("diagonal_affine lu_linear householder reverse shuffle conv1x1", "(?!)"),
    "normalization": ("batch_norm act_norm", "(?!)"),
    "planar": (
        "planar radial sylvester_orthogonal sylvester_householder sylvester_triangular",
        "planar|Sylvester",
    ),
    "coupling": ("nice realnvp gated gated_resampled glow flowpp", "RealNVP|(flow: )?RealNVP"),
    "splines": ("spline_coupling spline_autoregressive inverse_cdf", "(flow: )?spline"),
    "angles": ("circular_coupling circular_autoregressive", "circular|plane: spline"),
    "autoregressive": ("maf maf_residual iaf naf tan", "(flow: )?MAF|IAF"),
    "sequences": ("wavenet transformer_flow pixelcnn", "(?i:wavenet|transformer|pixelcnn)"),
    "continuous": ("continuous", "continuous|matching"),
    "residual": ("residual", "residual"),
    "images": (
        "squeeze sigmoid pointwise image_coupling flowpp_image split_channels glow_image",
        r"glow|flow\+\+",
    ),
    "surjections": ("dequantize slice abs sort max argmax binary_argmax random_order", "argmax"),
    "vae": (
        "amortized_affine amortized_planar amortized_sylvester autoencoder",
        r"Gaussian \(VAE|IAF, |Sylv|planar",
    ),
    "discrete": (
        "whole integer_coupling integer one_hot modulo_coupling modulo modulo_autoregressive",
        "integer flow|modulo flow",
    ),
}
FLOW_LABELS = {"model", "network", "posterior", "fitted by", "step", "file", "row", "flow", ""}
FLOW_FILES = {"causal", "causal-speed-cpu", "codec", "continuous", "continuous-speed", "flows", "images", "sbi",
              "torus", "trees", "vae"}  # fmt: skip


def flow_rows(labels: str) -> str:
    """The rows of committed tables about a kind of flow."""
    text = []
    for table in tables():
        named = [i for i, name in enumerate(table.header) if name in FLOW_LABELS]
        rows = [row for row in table.rows if any(re.match(labels, row[i]) for i in named)]
        if table.stem in FLOW_FILES and rows:
            text.append(
                f"**{table.title or table.stem}** ([all rows and the command](/{shown()[table.stem]}.md))\n"
            )
            text.append(markdown_table(table.header, rows))
    return (
        "\n## Measured\n\n" + '<div class="table-filter"></div>\n\n' + "\n".join(text)
        if text
        else "\n"
    )


# --- API ----------------------------------------------------------------------------------------

API = {
    "bayou": ["select.fit", "posteriors.posterior", "likelihoods.predictive",
              "methods.vi", "inference.elbo", "posteriors.guided"],
    "bayou.guides": ["guide"],
    "bayou.methods": ["method"],
    "bayou.operations": ["conformal.predictors", "conformal.weights"],
    "bayou.operations.ood": ["fitting", "detector"],
    "bayou.calibration": ["maps"],
    "bayou.posteriors": ["guided", "network_draw"],
    "bayou.likelihoods": ["base"],
    "bayou.priors": [],
    "bayou.select": ["plans", "named", "recipes"],
    "bayou.networks": ["table", "embeddings"],
    "bayou.metrics": ["scores"],
    "bayou.truth": ["board", "predictions"],
    "bayou.diagnostics": ["bound", "modes"],
    "bayou.data": [],
    "bayou.flows": ["core.transform", "core.flow", "core.bases", "layers.builders", "checking.check",
                    "checking.report", "fitting.fit"],
}  # fmt: skip


def first_line(documented: Any) -> str:
    """The first line of a docstring, escaped for a Markdown table."""
    return cell((getdoc(documented) or "").partition("\n")[0])


def api_of(package: str, first: Sequence[str]) -> str:
    """One section per module with the public names it defines; the modules in ``first`` come first.

    Names that ``bayou`` itself exports are described in its own section.
    """
    home, top = import_module(package), import_module("bayou")
    sections: dict[str, list[str]] = {}
    for name in home.__all__:
        member = getattr(home, name)
        known = package != "bayou" and name in top.__all__ and getattr(top, name) is member
        ours = getattr(member, "__module__", "").startswith("bayou")  # not Task, a Literal
        if ours and not known and callable(member):
            sections.setdefault(member.__module__, []).append(name)
    lines = []

    def position(module: str) -> int:
        return next((i for i, name in enumerate(first) if module.endswith(f".{name}")), len(first))

    for module in sorted(sections, key=lambda module: (position(module), module)):
        leaf, parent = module.rpartition(".")[2].strip("_"), package.rpartition(".")[2]
        words = leaf.replace("_", " ")
        named = [name for name in sections[module] if name.lower() == leaf.replace("_", "")]
        title = named[0] if named else words.capitalize() if package == "bayou" else words
        if package != "bayou":
            title = f"{parent.capitalize()}: {title}"  # unique on the page
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


# --- all of it ----------------------------------------------------------------------------------


def generated() -> dict[str, str]:
    """Every generated file: its path in ``docs/_generated``, and its text."""
    return {
        "catalog.md": catalog_table(),
        "names.md": names_table(),
        "tree.md": tree(),
        "results.md": results_table(),
        **{
            f"tables/{path.stem}.md": table_page(path.stem) for path in sorted(RESULTS.glob("*.md"))
        },
        **{f"board/{name}.md": board_table(name) for name in REFERENCES},
        **{f"rows/{name}.md": measured(page) for name, page in PAGES.items()},
        **{f"settings/{name}.md": settings(page) for name, page in PAGES.items()},
        **{
            f"flows/{name}.md": catalog_table(maps.split()) + flow_rows(labels)
            for name, (maps, labels) in FLOWS.items()
        },
        **{
            f"api/{package.rpartition('.')[2]}.md": api_of(package, first)
            for package, first in API.items()
        },
    }


def write() -> None:
    """Write the generated files; those that did not change keep their time, so that their pages are
    not built again.
    """
    for name, text in generated().items():
        path = GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
