"""The tutorial from a CSV file to a decision: what its page says is what its commands give."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayou.app.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "start" / "csv.md"
FIRST, SECOND = PAGE.read_text(encoding="utf-8").split(
    "## A second file, on which it does not help"
)
DEGREES_OF_THE_HOTTEST_EARLIER_BATCH = 100
LIMIT = 70
RMSE_OF_A_LINEAR_MODEL = 8.8  # of the page, on the same test rows


def code_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def commands(text):
    """The arguments of the commands of a page, without ``bayou``."""
    return [line.split()[1:] for line in re.findall(r"^    (bayou .+)$", text, re.MULTILINE)]


def printed_sentences(text):
    """The lines of a page that a command prints as its conclusion: from the scores to the next
    command.
    """
    return [
        line
        for line in re.findall(r"^    (.+)$", text, re.MULTILINE)
        if line.startswith(("Laplace:", "The "))
    ]


def words(text):
    """A text without its numbers, which depend on the machine in their last digits."""
    return re.sub(r"\d[\d.,]*", "#", text)


def decided_rows(text):
    """The rows of the table of decisions by its first column, the reason left out."""
    decisions = {}
    for label, rows in re.findall(
        r"^\| (run|skip|unsure)[^|]* \| ([\d, ]+) \|", text, re.MULTILINE
    ):
        decisions.setdefault(label, []).extend(int(row) for row in rows.split(","))
    return decisions


def test_the_second_file_comes_after_one_on_which_uncertainty_helps():
    assert "is better than a linear model" in FIRST
    assert "not better than a linear model" not in FIRST
    assert "not better than a linear model" in SECOND
    assert sorted(row for rows in decided_rows(FIRST).values() for row in rows) == list(
        range(1, 13)
    )


@pytest.mark.slow
def test_the_decisions_are_those_of_the_page_and_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    make_files, decide_function, *_ = code_blocks(FIRST)
    exec(compile(make_files, "csv.md", "exec"), namespace)
    exec(compile(decide_function, "csv.md", "exec"), namespace)
    printed = ""
    for arguments in commands(FIRST):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        printed += result.output
    shown = printed_sentences(FIRST)
    assert len(shown) == 2
    assert set(map(words, shown)) <= set(map(words, printed.splitlines()))

    (scores,) = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert scores["metrics"]["rmse"] < RMSE_OF_A_LINEAR_MODEL / 2
    # Other processors end at another mode: two standard errors of the test rows, as on the page.
    ((rmse, error),) = re.findall(r"Laplace: RMSE ([\d.]+) ± ([\d.]+)", FIRST)
    assert scores["metrics"]["rmse"] == pytest.approx(float(rmse), abs=2 * float(error))
    with open("predictions.csv", newline="") as file:
        predictions = list(csv.DictReader(file))
    decisions = {}
    for number, row in enumerate(predictions, 1):
        decisions.setdefault(namespace["decide"](row), []).append(number)
    assert decisions == decided_rows(FIRST)

    plan = namespace["plan"]
    assert all(plan[number - 1][-1] > LIMIT for number in decisions["run"])
    assert all(plan[number - 1][-1] < LIMIT for number in decisions["skip"])
    hot = [k for k, row in enumerate(plan) if row[0] > DEGREES_OF_THE_HOTTEST_EARLIER_BATCH]
    others = [float(row["epistemic_std"]) for k, row in enumerate(predictions) if k not in hot]
    for k in hot:  # the mean alone would have decided, and wrongly
        assert float(predictions[k]["mean"]) > LIMIT > plan[k][-1]
        assert float(predictions[k]["distance"]) > 1
        assert float(predictions[k]["epistemic_std"]) > 5 * max(others)
