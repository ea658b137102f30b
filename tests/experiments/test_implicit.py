"""Implicit posteriors on the densities of their papers: integrals, fits, and the table."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import implicit, reproduce, study
from experiments.implicit import DENSITIES, Implicit

# An upper end of KL(q ‖ p), in nats, that tells an implicit family from a factorized one, which has
# .4 or more.
MAX_KL = {"banana": 0.03, "mixture": 0.01, "x-shape": 0.02}


@pytest.mark.parametrize("name", DENSITIES)
def test_the_densities_integrate_to_one(name: str) -> None:
    line = torch.linspace(-30, 12, 1051, dtype=torch.float64)
    w = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    assert float(DENSITIES[name](w).exp().sum()) * 0.04**2 == pytest.approx(1, abs=1e-5)


def test_the_rows_of_the_table_are_near_the_densities() -> None:
    rows = study.read(Implicit(), Path(__file__).parents[2] / "experiments" / "results")["rows"]
    found = {(row["data"], row["label"]): row for row in rows if row["label"] != "FFG"}
    assert set(found) == set(itertools.product(DENSITIES, ("SIVI", "UIVI")))
    for (name, _), row in found.items():
        assert row["upper"] < MAX_KL[name] + 2 * row["error"]


def test_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit, "LATENTS", 50)
    options: dict[str, Any] = {
        "length": 2,
        "samples": 20,
        "data": ["mixture"],
        "tell": lambda line: None,
    }
    page, _, picture = reproduce.reproduce("implicit", tmp_path, **options)
    for words in ("| mixture | SIVI |", "| mixture | UIVI |", "| mixture | FFG |", "| 1 | 2 |"):
        assert words in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="implicit has no row 'MNF'"):
        reproduce.reproduce("implicit", tmp_path, only=["MNF"])
