"""Settings of presets by held-out rows: what is judged was not learned, and the table says what is
the preset's.
"""

import itertools

import numpy as np
import pytest

from bayou.select.auto import CANDIDATES
from experiments import choice
from experiments.choice import DATA, candidates, rows
from experiments.defaults import TABLES, Defaults


def lines(table):
    return set(map(bytes, np.hstack([table[0], table[1][:, None]])))


@pytest.mark.slow
def test_candidates_are_judged_on_training_rows_that_they_have_not_learned():
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


def test_every_preset_is_one_candidate_and_auto_tries_no_others():
    for classes in (False, True):
        now = [one.method for one in candidates(classes) if one.present(classes)]
        assert sorted(now) == sorted({one.method for one in candidates(classes)})
        # networks of their own and tabm have no presets to compare
        assert set(CANDIDATES) - {
            "wide",
            "wide-noise",
            "bins",
            "tabm",
            "tabm-noise",
            "linear",
        } <= set(now)
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
