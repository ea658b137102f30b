"""The examples and the page for people who live elsewhere run, with fewer steps, and say what they promise."""

from __future__ import annotations

import math
import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from torch import nn

import bayou

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OPERATIONS = ["continual", "distill", "calibrate", "conformal", "acquire", "compress", "optimize"]
FLOWS = ["images", "vae", "codec"]
TRAINERS = ["trainer", "accelerate_loop", "lightning_vi", "vit"]
SCRIPTS = ["classification", "regression", "out_of_distribution", "pretrained", "own_loop", *FLOWS, *OPERATIONS]
SCRIPTS += TRAINERS


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_search: None) -> None:
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


@pytest.mark.slow
def test_images(tmp_path: Path) -> None:
    found = run("images", steps=25)
    assert found["equal shades"] == pytest.approx(math.log2(17), abs=1e-4)
    assert found["Glow, uniform noise, K = 20"] < found["Glow, uniform noise"] < math.log2(17)
    assert (tmp_path / "images.png").stat().st_size > 5_000


@pytest.mark.slow
def test_continual(tmp_path: Path) -> None:
    found = run("continual", epochs=8, tasks=2)
    assert list(found) == ["fine-tuning", "VCL", "online Laplace", "VCL, 20 rows kept"]
    assert [len(curve) for curve in found.values()] == [2, 2, 2, 1]
    assert found["online Laplace"][0][0] > 0.7
    assert (tmp_path / "continual.png").stat().st_size > 5_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning")
def test_distil(tmp_path: Path) -> None:
    found = run("distill", steps=150)
    assert list(found) == ["teacher", "student", "student, two variances", "student, online"]
    assert found["student"]["doubt"] < 1e-6 < found["student, two variances"]["doubt"]
    assert (tmp_path / "distill.png").stat().st_size > 5_000


def test_calibrate(tmp_path: Path) -> None:
    found = run("calibrate", steps=100)
    assert found["after"] < found["before"]
    assert bayou.load(tmp_path / "calibrated.bayou", _dense(64, 64, 10)).temperature == found["temperature"]
    assert (tmp_path / "calibrate.png").stat().st_size > 5_000


def _dense(*sizes: int) -> nn.Module:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def test_conformal(tmp_path: Path) -> None:
    found = run("conformal", steps=150)
    assert abs(found["conformal"]["all"] - 0.9) < 5 * (0.09 / 400) ** 0.5  # 400 rows held out
    assert abs(found["conformal, by group"]["outside"] - 0.9) < 5 * (0.09 / 180) ** 0.5
    assert found["posterior alone"]["outside"] < 0.8
    assert (tmp_path / "conformal.png").stat().st_size > 5_000


@pytest.mark.slow
def test_acquire(tmp_path: Path) -> None:
    found = run("acquire", steps=60, last=30)
    assert {how: len(curve) for how, curve in found.items()} == {"random": 2, "batchbald": 2}
    assert found["random"][0] == found["batchbald"][0]  # the same 20 labels
    assert all(curve[-1] > 0.5 for curve in found.values())
    assert (tmp_path / "acquire.png").stat().st_size > 5_000


@pytest.mark.slow
def test_classification(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("classification", steps=60, members=2)
    assert len(rows) == 4
    assert rows["MAP"]["error"] < 0.15
    assert all(row["nll"] < 2.4 for row in rows.values())
    assert "least sure of" in capsys.readouterr().out
    assert (tmp_path / "classification.png").stat().st_size > 10_000


@pytest.mark.slow
def test_regression(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("regression", steps=150)
    assert rows["MAP"]["gap"] < 1e-6  # a single network doubts nothing
    for name in ("Ensemble", "Laplace"):
        assert rows[name]["gap"] > 1.5 * rows[name]["here"]
        assert 0.6 < rows[name]["coverage"] <= 1.0
    assert "In the gap" in capsys.readouterr().out
    assert (tmp_path / "regression.png").stat().st_size > 10_000


@pytest.mark.slow
def test_compress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run("compress", steps=50, rows=200)
    for one in found.values():
        assert one["errors"][0] < 5  # the spread of y; so few steps learn little, and then little is kept
        assert one["bytes"][1] < one["bytes"][0] / 5
    assert "bits a number" in capsys.readouterr().out
    assert (tmp_path / "compress.png").stat().st_size > 10_000


@pytest.mark.slow
def test_codec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run("codec", steps=5, rows=40)
    assert torch.equal(found["again"], found["test"])
    assert 8 * found["bytes"]["flow"] < 1.001 * 8 * found["ideal"] + 8 * 40
    assert "bits a pixel" in capsys.readouterr().out
    assert (tmp_path / "codec.png").stat().st_size > 5_000


@pytest.mark.slow
def test_out_of_distribution(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("out_of_distribution", steps=60, members=2)
    assert rows["MAP"]["auroc"] > 0.7
    assert rows["Ensemble"]["auroc_mi"] > 0.7
    out = capsys.readouterr().out
    assert out.count("█") >= 6  # a highest bin in every histogram
    assert (tmp_path / "out_of_distribution.png").stat().st_size > 10_000


@pytest.mark.slow
def test_pretrained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run("pretrained", steps=80, samples=10)
    assert all(row["accuracy"] > 0.93 for row in rows.values())
    assert rows["MC dropout"]["auroc_mutual_information"] > 0.7
    assert "is unchanged" in capsys.readouterr().out
    assert (tmp_path / "pretrained.png").stat().st_size > 5_000


@pytest.mark.slow
def test_vae(tmp_path: Path) -> None:
    found = run("vae", steps=20, rows=10)
    for row in found.values():
        assert row["exact"] < row["elbo"]
        assert abs(row["samples"] - row["exact"]) < 0.1
        assert abs(row["elbo"] - row["exact"] - row["lost"]) < 1e-4
    assert (tmp_path / "vae.png").stat().st_size > 10_000


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::Warning:botorch")
@pytest.mark.filterwarnings("ignore::Warning:linear_operator")
def test_optimize(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    best = run("optimize", steps=60, then=4)
    assert len(best) == 5
    assert best == sorted(best)
    assert best[-1] > best[0]
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert (tmp_path / "optimize.png").stat().st_size > 5_000


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_of_other_libraries(name: str) -> None:
    options = {"trainer": {"steps": 40}, "vit": {"steps": 24}}.get(name, {"epochs": 4})
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)
    if name == "vit":
        assert list(found) == ["Laplace", "VI", "SGLD", "SWAG", "Ensemble"]
        assert all(row["accuracy"] > 0.6 for row in found.values())
    elif name == "trainer":
        assert found > 0.5  # of three classes
    else:
        assert all(value > 0.9 for key, value in found.items() if "mutual" not in key)


@pytest.mark.slow
def test_own_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run("own_loop", steps=100)
    assert found["accuracy"] > 0.75
    out = capsys.readouterr().out
    assert "predicts the same: True" in out
    assert (tmp_path / "own_loop.png").stat().st_size > 10_000


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of torch up to 2.11
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
