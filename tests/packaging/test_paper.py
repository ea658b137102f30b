"""The paper has the form that JOSS asks for and its sources, and the figures that it names are in
the results.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
BIBLIOGRAPHY = (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8")
MEASURED = TEXT.partition("# Research impact statement")[2].partition("\n# ")[0]
# https://joss.readthedocs.io/en/latest/paper.html, read in November 2026.
SECTIONS = [
    "Summary",
    "Statement of need",
    "State of the field",
    "Software design",
    "Research impact statement",
    "AI usage disclosure",
    "Acknowledgements",
    "References",
]
PLACEHOLDER = "[to be filled by the authors: "
# What a paragraph names beside the figures of its tables.
OTHER_NUMBERS = {"10", "0.9", "0.02"}


def test_every_source_that_is_cited_is_listed_and_the_other_way_round():
    listed = re.findall(r"@\w+\{(\w+),", BIBLIOGRAPHY)
    assert len(listed) == len(set(listed))
    assert set(re.findall(r"@(\w+\d{4})", TEXT)) == set(listed)


@pytest.mark.parametrize("entry", BIBLIOGRAPHY.strip().split("\n@"), ids=lambda entry: entry[:30])
def test_a_source_has_authors_a_year_and_a_place_where_it_is_found(entry):
    fields = dict(re.findall(r"(\w+)=\{(.*?)\}(?=, \w+=|\}$)", entry))
    assert {"title", "author", "year"} <= set(fields)
    assert {"journal", "booktitle", "doi"} & set(fields), entry
    assert re.fullmatch(r"10\.\d{4,}/\S+", fields.get("doi", "10.1000/none"))
    assert "International Conference" in entry or not re.search(r"\b(ICML|ICLR|NeurIPS)\b", entry)


def test_the_paper_has_the_sections_and_the_length_that_joss_asks_for():
    assert re.findall(r"^# (.+)$", TEXT, re.MULTILINE) == SECTIONS
    assert 750 <= len(TEXT.partition("\n# Summary")[2].split()) <= 1750


def test_what_only_the_authors_can_fill_is_listed_for_them():
    assert TEXT.count(PLACEHOLDER) == 4
    releasing = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    assert f"`{PLACEHOLDER}" in releasing


def is_in(number, text):
    """Return whether a table has a number, or one that rounds to it."""
    digits = len(number.partition(".")[2])
    values = re.findall(r"\d[\d,]*\.?\d*", text)
    return any(
        f"{float(value.replace(',', '')):.{digits}f}" == number.replace(",", "") for value in values
    )


@pytest.mark.parametrize(
    "paragraph", [text for text in MEASURED.strip().split("\n\n") if text.startswith("*")]
)
def test_figures_are_in_the_tables_that_a_paragraph_names(paragraph):
    names = re.findall(r"`([\w-]+\.md)`", paragraph)
    assert names
    tables = "\n".join(
        (ROOT / "experiments" / "results" / name).read_text(encoding="utf-8") for name in names
    )
    numbers = set(re.findall(r"\d[\d,]*\.?\d*\b", re.sub(r"`[^`]*`|@\w+", "", paragraph)))
    missing = {n for n in numbers - OTHER_NUMBERS if not is_in(n.rstrip(","), tables)}
    assert not missing
