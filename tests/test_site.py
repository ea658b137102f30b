"""The site: every method and every flow has its page with its rows, and no page asks for anything
from outside.
"""

import re
import tomllib
from operator import attrgetter
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
def test_a_method_has_a_page_with_an_equation_and_every_section(name):
    text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)", text, re.MULTILINE)
    assert text.count("$$") == 2
    assert {"When to use it", "Cost", "Pitfalls", "Measured"} <= set(heads)
    assert f"_generated/rows/{name}.md" in text
    assert f'"{name}"' in text, "the page does not show how to fit it by name"


def test_pages_are_those_of_the_folder_and_of_the_toctree():
    files = {page.stem for page in (DOCS / "methods").glob("*.md")}
    toctree = (DOCS / "methods.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^methods/([\w-]+)$", toctree, re.MULTILINE))
    assert files == set(pages.PAGES) == listed
    assert set(bayou.list_methods()) <= files


def named(label):
    return {name for name, page in pages.PAGES.items() if re.match(page.labels, label)}


def test_no_row_of_a_method_is_lost():
    """Labels in the columns of methods that no page has: other libraries, baselines and what is not
    a method.
    """
    others = re.compile(
        r"BayesianRidge|Gaussian process|GP |.*boosting|random forest|logistic|random points|fine-tuning"
        r"|joint training|temperature|mixture of|forward \+|flow: |bayesian-torch|a point|kronecker|diagonal|the whole"
        r"|CatBoost|LightGBM|linear model|bde|HistGB|TabPFN|Gaussian \(VAE|IAF|planar|Sylvester|continuous|as the first|a mixture|HMC"
    )
    lost = set()
    for table in pages.tables():
        for i, head in enumerate(table.header):
            if head in pages.LABELS and table.stem not in pages.FLOW_FILES:
                labels = {row[i].replace("*", "") for row in table.rows if i < len(row)}
                lost |= {label for label in labels if not named(label) and not others.match(label)}
    assert not lost


def test_every_flow_of_the_registry_is_on_a_page_with_its_picture():
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


def test_every_table_is_shown_with_command_date_and_its_limits():
    stems = {path.stem for path in pages.RESULTS.glob("*.md")}
    assert set(pages.remarks()) == stems
    assert set(pages.shown()) == stems
    for stem in stems:
        for command, date in pages.runs(stem):
            assert re.match(r"(bayou|python) ", command), stem
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), stem
        assert len(pages.remarks()[stem]["missed"]) > 10
        assert "**Limits.**" in pages.table_page(stem)


def test_the_tree_ends_in_pages_and_code_that_exists():
    root = tomllib.loads((DOCS / "which.toml").read_text(encoding="utf-8"))
    leaves = list(pages.leaves(root))
    assert len(leaves) > 20
    for leaf in leaves:
        assert (DOCS / f"{leaf['page']}.md").exists()
        for name in re.findall(r"bayou\.([\w.]+)\(", leaf.get("code", "")):
            attrgetter(name)(bayou)
        for name in re.findall(r'data, "([\w-]+)"', leaf.get("code", "")):
            assert name in bayou.list_methods()
    html = pages.tree()
    assert html.count("<details>") == html.count("</details>") >= len(leaves)


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_source_names_an_external_resource(page):
    assert not RESOURCE.findall(page.read_text(encoding="utf-8"))
