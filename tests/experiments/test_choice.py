"""Settings of presets by held-out rows: what is judged was not learned, and the table says what is
the preset's.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bayou
from bayou.select.recipes import CANDIDATES
from experiments import choice, reproduce
from experiments.choice import DATA, Candidate, Choice, candidates, rows
from experiments.defaults import TABLES, Defaults


def lines(table: tuple[np.ndarray, np.ndarray]) -> set[bytes]:
    return set(map(bytes, np.hstack([table[0], table[1][:, None]])))


@pytest.mark.slow
def test_candidates_are_judged_on_training_rows_that_they_have_not_learned() -> None:
    for name in [*TABLES, "digits-few"]:
        learned, held = rows(name, 1)
        assert len(held[1]) == (len(learned[1]) + len(held[1])) // 5
        assert not lines(learned) & lines(held)
        if name in TABLES:
            assert lines(held) <= lines(TABLES[name].split(choice.FIRST + 1)[0])
    held = rows("digits-few", 1)[1]
    assert np.array_equal(rows("digits-few", 1)[1][0], held[0])
    assert not np.array_equal(rows("digits-few", 2)[1][0], held[0])
    assert max(fit.seed for fit in Defaults().fits([], [], None, None)) < choice.FIRST


def test_every_preset_is_one_candidate_and_auto_tries_no_others() -> None:
    for classes in (False, True):
        now = [one.method for one in candidates(classes) if one.present(classes)]
        assert sorted(now) == sorted({one.method for one in candidates(classes)})
        assert set(CANDIDATES) <= set(now)
        settings = [one.settings(classes) for one in candidates(classes)]
        assert all(a != b for a, b in itertools.combinations(settings, 2))
    labels = {one.name for one in candidates(True)}
    assert {
        "map, gain 1",
        "map, gain 10",
        "mnf, gain 1",
        "laplace, kronecker",
        "ensemble, members 10",
    } <= labels
    assert len(set(DATA) - set(TABLES) - {"digits-few"}) == 4  # UCI


def quick(classes: bool) -> tuple[Candidate, ...]:
    slow = Candidate("map", "slow", make=lambda config: bayou.MAP(steps=60, lr=0.05))
    return (slow, Candidate("map", "idle", make=lambda config: bayou.MAP(steps=1, lr=1e-6)))


def test_rows_are_made_kept_and_compared_with_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "candidates", quick)
    monkeypatch.setattr(Candidate, "present", lambda self, classes: self.label == "slow")
    told: list[str] = []
    options: dict[str, Any] = {
        "data": ["wine", "sine, 120"],
        "seeds": 1,
        "samples": 5,
        "tell": told.append,
    }
    page, numbers = reproduce.reproduce("choice", tmp_path, **options)
    reproduce.reproduce("choice", tmp_path, **options)
    assert len(told) == 4
    made = json.loads(numbers.read_text())["rows"]
    nll = {row["label"]: row["nll"] for row in made if row["data"] == "wine"}
    worse = nll["map, idle"] - nll["map, slow"]
    assert worse > 0.1
    cells = [[cell.strip() for cell in line.split("|")] for line in page.read_text().splitlines()]
    assert ["", "map", "idle", f"{worse:.3f}", "0 of 1"] in [row[:5] for row in cells]
    assert ["", "map", "slow", "", ""] in [row[:5] for row in cells]
    assert [row[-2] for row in cells if row[1:3] == ["wine", "map, slow"]] == ["◂ the preset"]
    with pytest.raises(ValueError, match="leave out --length"):
        Choice().fits([], [], None, 3)
