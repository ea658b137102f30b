"""The paper has its length and its sources, and the figures that it names are in the results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
MEASURED = TEXT.partition("# What was measured")[2].partition("\n# ")[0]
# What a paragraph names beside the figures of its tables.
OTHER_NUMBERS = {"10", "0.9", "0.02"}


def test_every_source_that_is_cited_is_listed_and_the_other_way_round():
    listed = re.findall(r"@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text("utf-8"))
    assert len(listed) == len(set(listed))
    assert set(re.findall(r"@(\w+\d{4})", TEXT)) == set(listed)


def test_the_paper_has_about_a_thousand_words():
    assert 750 <= len(TEXT.split()) <= 1500  # with the table and the header


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
    numbers = set(re.findall(r"\d[\d,]*\.?\d*\b", re.sub(r"`[^`]*`", "", paragraph)))
    missing = {n for n in numbers - OTHER_NUMBERS if not is_in(n.rstrip(","), tables)}
    assert not missing
