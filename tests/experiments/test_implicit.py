"""Implicit posteriors on the densities of their papers: integrals, fits, and the table."""

import itertools
from pathlib import Path

import pytest
import torch

from experiments import study
from experiments.implicit import DENSITIES, Implicit

# An upper end of KL(q ‖ p), in nats, that tells an implicit family from a factorized one, which has
# .4 or more.
MAX_KL = {"banana": 0.03, "mixture": 0.01, "x-shape": 0.02}


@pytest.mark.parametrize("name", DENSITIES)
def test_the_densities_integrate_to_one(name):
    line = torch.linspace(-30, 12, 1051, dtype=torch.float64)
    w = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    assert float(DENSITIES[name](w).exp().sum()) * 0.04**2 == pytest.approx(1, abs=1e-5)


def test_the_rows_of_the_table_are_near_the_densities():
    rows = study.read(Implicit(), Path(__file__).parents[2] / "experiments" / "results")["rows"]
    found = {(row["data"], row["label"]): row for row in rows if row["label"] != "FFG"}
    assert set(found) == set(itertools.product(DENSITIES, ("SIVI", "UIVI")))
    for (name, _), row in found.items():
        assert row["upper"] < MAX_KL[name] + 2 * row["error"]
