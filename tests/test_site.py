"""The site: every method and every flow has its page with its rows, and no page asks for anything
from outside.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import bayou
from bayou.flows import registry
from docs import make_warps, pages

DOCS = Path(__file__).parents[1] / "docs"
SOURCES = [
    page for page in sorted(DOCS.rglob("*.md")) if not {"_build", "_generated"} & set(page.parts)
]
RESOURCE = re.compile(
    r"""(?:src|srcset|data|poster)\s*=\s*["']?(?:https?:)?//"""  # images, scripts, frames
    r"""|<link[^>]+href\s*=\s*["']?(?:https?:)?//"""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""  # of style sheets
    r"""|!\[[^\]]*\]\((?:https?:)?//|\{(?:image|figure)\}\s*(?:https?:)?//"""
    r"""|\bimport\(?\s*["']https?:|fetch\(\s*["']https?:""",
    re.IGNORECASE,
)


@pytest.mark.parametrize("name", bayou.list_methods())
def test_a_method_has_a_page_with_an_equation_and_every_section(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)", text, re.MULTILINE)
    assert text.count("$$") == 2
    assert {"When to use it", "Cost", "Pitfalls", "Measured"} <= set(heads)
    assert f"_generated/rows/{name}.md" in text
    assert f'"{name}"' in text, "the page does not show how to fit it by name"


def test_pages_are_those_of_the_folder_and_of_the_toctree() -> None:
    files = {page.stem for page in (DOCS / "methods").glob("*.md")}
    listed = set(
        re.findall(
            r"^methods/([\w-]+)$", (DOCS / "methods.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert files == set(pages.PAGES) == listed
    assert set(bayou.list_methods()) <= files


def named(label: str) -> set[str]:
    return {name for name, page in pages.PAGES.items() if re.match(page.labels, label)}


@pytest.mark.parametrize(
    ("label", "page"),
    [
        ("FFG, by unit", {"ffg"}),
        ("FFG, annealed", {"annealed"}),
        ("Annealed, MNF", {"annealed"}),
        ("MNF twice as long, β = 0.1", {"mnf"}),
        ("VI(MNF())", {"mnf"}),
        ("SGLD, cyclical", {"csgld"}),
        ("Laplace, last layer", {"laplace", "laplace-last"}),
        ("NodeNoise, 4 components", {"nodenoise"}),
        ("MC dropout", {"dropout"}),
        ("ensemble of 5", {"ensemble"}),
        ("mean field on A (BLoB)", {"ffg"}),
        ("gradient boosting", set()),
        ("wine", set()),
        ("moons that overlap", set()),
    ],
)
def test_a_label_belongs_to_its_method(label: str, page: set[str]) -> None:
    assert named(label) == page


def test_rows_of_a_method_are_those_of_the_committed_table() -> None:
    """Counted in the file itself, by another rule than the one that makes the pages."""
    for stem, column, label, name in (
        ("uci", 2, "MNF", "mnf"),
        ("defaults", 2, "ivon", "ivon"),
        ("toy", 1, "NUTS", "nuts"),
        ("adapters", 2, "TFB", "tfb"),
        ("truth", 1, "SWAG", "swag"),
    ):
        lines = (pages.RESULTS / f"{stem}.md").read_text(encoding="utf-8").splitlines()
        cells = [line.split("|") for line in lines if line.startswith("|")]
        expected = [cell for cell in cells if len(cell) > column and cell[column].strip() == label]
        found = [table for table in pages.rows_of(pages.PAGES[name]) if table.stem == stem]
        assert sum(len(table.rows) for table in found) == len(expected) > 0
        assert expected[0][-4].strip() in pages.measured(pages.PAGES[name])


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_shows_its_rows(name: str) -> None:
    rows = sum(len(table.rows) for table in pages.rows_of(pages.PAGES[name]))
    shown = pages.measured(pages.PAGES[name])
    if rows:
        assert shown.startswith(f"{rows} rows of ")
        assert sum(line.startswith("|") for line in shown.splitlines()) == rows + 2 * shown.count(
            "|\n| --- "
        )
    else:
        assert "No committed table" in shown


def test_no_row_of_a_method_is_lost() -> None:
    """Labels in the columns of methods that no page has: other libraries, baselines and what is not
    a method.
    """
    others = re.compile(
        r"BayesianRidge|Gaussian process|GP |.*boosting|random forest|logistic|random points|fine-tuning"
        r"|joint training|temperature|mixture of|forward \+|flow: |bayesian-torch|a point|kronecker|diagonal|the whole"
        r"|Gaussian \(VAE|IAF|planar|Sylvester|continuous|as the first|a mixture|HMC"
    )
    lost = set()
    for table in pages.tables():
        for i, head in enumerate(table.header):
            if head in pages.LABELS and table.stem not in pages.FLOW_FILES:
                labels = {row[i].replace("*", "") for row in table.rows if i < len(row)}
                lost |= {label for label in labels if not named(label) and not others.match(label)}
    assert not lost


def test_every_flow_of_the_registry_is_on_a_page_with_its_picture() -> None:
    listed = [name for maps, _ in pages.FLOWS.values() for name in maps.split()]
    assert sorted(listed) == sorted(registry())
    for page, (maps, _) in pages.FLOWS.items():
        text = (DOCS / "flows" / f"{page}.md").read_text(encoding="utf-8")
        assert f"_generated/flows/{page}.md" in text
        assert "$$" in text.partition("pictures/warps")[0], (
            f"the page {page} does not begin with an equation"
        )
        assert f"pictures/warps/{page}.png" in text
        assert (make_warps.FOLDER / f"{page}.png").stat().st_size < 100_000
        assert all(f"`{name}`" in pages.catalog_table(maps.split()) for name in maps.split())


def test_a_warp_is_drawn(tmp_path: Path) -> None:
    assert make_warps.draw("normalization", tmp_path).stat().st_size > 1_000


def test_every_table_is_shown_with_command_date_and_its_limits() -> None:
    stems = {path.stem for path in pages.RESULTS.glob("*.md")}
    assert set(pages.remarks()) == stems
    assert set(pages.shown()) == stems
    for stem in stems:
        for command, date in pages.runs(stem):
            assert re.match(r"(bayou|python) ", command), stem
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), stem
        assert len(pages.remarks()[stem]["missed"]) > 10
        assert "**Limits.**" in pages.table_page(stem)


def test_the_tree_ends_in_pages_and_code_that_exists() -> None:
    root = tomllib.loads((DOCS / "which.toml").read_text(encoding="utf-8"))
    leaves = list(pages.leaves(root))
    assert len(leaves) > 20
    for leaf in leaves:
        assert (DOCS / f"{leaf['page']}.md").exists()
        for name in re.findall(r"bayou\.([\w.]+)\(", leaf.get("code", "")):
            found = bayou
            for part in name.split("."):
                found = getattr(found, part)
        for name in re.findall(r'data, "([\w-]+)"', leaf.get("code", "")):
            assert name in bayou.list_methods()
    html = pages.tree()
    assert html.count("<details>") == html.count("</details>") >= len(leaves)


def test_settings_are_those_of_the_class() -> None:
    text = pages.settings(pages.PAGES["mnf"])
    assert "| `z_std` | `0.3` | the initial standard deviation of z (default 0.3). |" in text
    assert "`epochs`" in pages.settings(pages.PAGES["vi"])
    assert "`epochs`" not in pages.settings(pages.PAGES["swag"])


def written_for_readers() -> list[Path]:
    """Every page that a reader of the results meets."""
    root = DOCS.parent
    results = [*(root / "experiments" / "results").glob("*.md"), *(DOCS / "benchmarks").iterdir()]
    return [
        *results,
        *DOCS.glob("*.md"),
        *(DOCS / "guide").glob("*.md"),
        root / "README.md",
        root / "CHANGELOG.md",
    ]


# Words of those who made a table, and distances to HMC that no source confirms.
INSIDE = re.compile(
    r"\bthe aims?\b(?! is the posterior)|\baims? (?:were|was|of|for|\.\d)|\(aims?\b|\| aim\b"
    r"|\bday before\b|\bsessions? (?:before|earlier)\b"
    r"|\bnot at hand\b|published for 50|published ensemble of 50",
    re.IGNORECASE,
)


def test_results_are_written_for_readers_who_were_not_there() -> None:
    pages_of_results = written_for_readers()
    assert len(pages_of_results) > 60
    found = {
        page.name: INSIDE.findall(page.read_text(encoding="utf-8")) for page in pages_of_results
    }
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_source_names_an_external_resource(page: Path) -> None:
    assert not RESOURCE.findall(page.read_text(encoding="utf-8"))


def test_the_pattern_finds_resources_and_leaves_links_alone() -> None:
    for bad in ('<img src="https://x.org/a.png">', "![a](https://x.org/a.svg)", '<script src="//cdn.x.org/a.js">',
                "@import 'https://x.org'", "{image} https://x.org/a.png", "url(https://x.org/f.woff)"):  # fmt: skip
        assert RESOURCE.search(bad), bad
    assert not RESOURCE.search(
        '[paper](https://arxiv.org) <a href="https://x.org">x</a> data: https'
    )
    for file in (DOCS / "static").iterdir():
        assert not RESOURCE.findall(file.read_text(encoding="utf-8"))
