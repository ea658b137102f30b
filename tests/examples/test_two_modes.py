"""The example with two modes runs, and says what its docstring proves."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_modes.py"


@pytest.mark.parametrize("steps", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_two_modes(steps: int, tmp_path: Path) -> None:
    """Few steps find no mode, but what is proven holds at any time."""
    picture = tmp_path / "two_modes.png"
    rows = runpy.run_path(str(EXAMPLE))["main"](steps=steps, picture=str(picture), samples=steps // 2 + 40)
    for row in rows.values():  # log Z − ELBO ≥ log 2 − h(ε)
        assert row["short"] > row["least"] - 4 * row["error"]
    assert picture.stat().st_size > 10_000
    assert len(EXAMPLE.read_text().splitlines()) < 100
    if steps < 600:
        return
    for name in ("MeanField", "MNF, one component"):
        assert rows[name]["right"] in (0.0, 1.0)
        assert rows[name]["short"] > math.log(2) - 4 * rows[name]["error"]
    both = rows["MNF, two components"]
    assert 0.3 < both["right"] < 0.7
    assert both["short"] < 0.6
