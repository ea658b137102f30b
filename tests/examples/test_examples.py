"""The examples and the page for people who live elsewhere run, with fewer steps, and say what they promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import bayou

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ["classification", "regression", "out_of_distribution", "pretrained", "own_loop", "compress"]


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")


def run(name: str, **options: Any) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](plot=f"{name}.png", **options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short_and_explain_themselves(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100
    assert text.startswith('"""')
    assert f"python examples/{name}.py" in text


def test_classification(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("classification", steps=60, members=2)
    assert len(rows) == 4
    assert rows["MAP"]["error"] < 0.15
    assert all(row["nll"] < 2.4 for row in rows.values())
    assert "least sure of" in capsys.readouterr().out
    assert (tmp_path / "classification.png").stat().st_size > 10_000


def test_regression(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("regression", steps=150)
    assert rows["MAP"]["gap"] < 1e-6  # a single network doubts nothing
    for name in ("Ensemble", "Laplace"):
        assert rows[name]["gap"] > 1.5 * rows[name]["here"]
        assert 0.6 < rows[name]["coverage"] <= 1.0
    assert "In the gap" in capsys.readouterr().out
    assert (tmp_path / "regression.png").stat().st_size > 10_000


def test_compress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run("compress", steps=50, rows=200)
    for one in found.values():
        assert one["errors"][0] < 5  # the spread of y; so few steps learn little, and then little is kept
        assert one["bytes"][1] < one["bytes"][0] / 5
    assert "bits a number" in capsys.readouterr().out
    assert (tmp_path / "compress.png").stat().st_size > 10_000


def test_out_of_distribution(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("out_of_distribution", steps=60, members=2)
    assert rows["MAP"]["auroc"] > 0.7
    assert rows["Ensemble"]["auroc_mi"] > 0.7
    out = capsys.readouterr().out
    assert out.count("█") >= 6  # a highest bin in every histogram
    assert (tmp_path / "out_of_distribution.png").stat().st_size > 10_000


def test_pretrained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("pretrained", steps=80, samples=10)
    assert all(row["accuracy"] > 0.93 for row in rows.values())
    assert rows["MC dropout"]["auroc_mutual_information"] > 0.7
    assert "is unchanged" in capsys.readouterr().out
    assert (tmp_path / "pretrained.png").stat().st_size > 5_000


def test_own_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run("own_loop", steps=100)
    assert found["accuracy"] > 0.75
    out = capsys.readouterr().out
    assert "predicts the same: True" in out
    assert (tmp_path / "own_loop.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_notebooks(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "notebooks" / f"{name}.py"
    monkeypatch.setenv("BAYOU_EXAMPLE_STEPS", "40")
    space = runpy.run_path(str(path))
    assert capsys.readouterr().out
    assert space["STEPS"] == 40
    cells = re.findall(r"^# %%.*$", path.read_text(), re.MULTILINE)
    assert cells[0] == "# %% [markdown]"
    assert cells.count("# %%") >= 4


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of torch up to 2.10
def test_page_for_people_who_live_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks marked ``python`` run as written, but for the number of steps; ``py`` ones need what is not installed."""
    for method in (bayou.VI, bayou.MAP):
        monkeypatch.setattr(method, "total_steps", lambda self, data: 10)
    page = (ROOT / "docs" / "elsewhere.md").read_text(encoding="utf-8")
    space: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "elsewhere.md", "exec"), space)
    assert set(re.findall(r"`(\w+)\.py`", page)) >= set(SCRIPTS)
