"""Every method against HMC on the cubic: what holds of the committed table, and (slowly) that it
can be made again.
"""

from pathlib import Path

import pytest

from experiments import study
from experiments.study import Fit
from experiments.toy import METHODS, POINTS, Toy

HOME = Path(__file__).parents[2]
RESULTS = HOME / "experiments" / "results"
FOUND = study.read(Toy(), RESULTS)
ROWS = {row["label"]: row for row in FOUND["rows"]}


def at(name, point):
    return dict(zip(POINTS, ROWS[name]["ratio"], strict=True))[point]


def test_the_table_has_every_method_and_there_is_a_picture():
    assert len(ROWS) == len(FOUND["rows"])
    assert set(ROWS) == set(METHODS)
    assert (RESULTS / "toy.md").read_text() == Toy().render(FOUND)
    assert (RESULTS / "toy.png").stat().st_size > 50_000


@pytest.mark.parametrize("name", ["NUTS", "HMC", "SGHMC"])
def test_samplers_agree_with_the_reference(name):
    """2,000 draws of 8 chains; the effective number is smaller for SGHMC."""
    assert ROWS[name]["ratio"] == pytest.approx([1.0] * 5, abs=0.08)
    assert ROWS[name]["mean_error_outside"] < 0.15


def test_what_the_page_says_about_the_others():
    for name in ("MAP", "MLE"):
        assert ROWS[name]["ratio"] == [0.0] * 5
    for point in (-4.0, 0.0, 4.0):
        assert at("Laplace, full", point) == pytest.approx(1, abs=0.1)
        assert at("Laplace, full, sampled", point) > 10
    for side in (-6.0, 6.0):
        assert at("Laplace, full", side) > 1.3
        assert at("VI(FFG)", side) < 0.3 < at("VI(JointFlow)", side) < 1
        assert at("Ensemble(10)", side) < 0.3
    assert ROWS["SGLD"]["mean_error_outside"] > 2 * ROWS["SGHMC"]["mean_error_outside"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::bayou.inference.probe.MixingWarning",
    "ignore::bayou.inference.baseline_checks.WorseThanModeWarning",
)
@pytest.mark.parametrize("name", [name for name in METHODS if ROWS[name]["seconds"] < 20])
def test_a_row_of_less_than_20_seconds_is_reproduced(name):
    """The command reproduces the others; tests on smaller problems cover what they compute."""
    again = Toy().measure(Fit("toy", "cubic", name, 0), "cpu", None, False)
    assert again["ratio"] == pytest.approx(ROWS[name]["ratio"], rel=0.3, abs=0.05)
    if name == "MLE":  # a point of the same seed has the same mean function
        for key in ("mean_error_inside", "mean_error_outside", "mean"):
            assert again[key] == pytest.approx(ROWS[name][key], rel=0.02, abs=0.02), key
