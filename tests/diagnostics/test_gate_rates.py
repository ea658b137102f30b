"""How often the gate is wrong, on problems whose posterior is known: ``experiments/measure/gate.py`` makes
the whole table.
"""

import pytest
from scipy.stats import binom

from experiments.measure import gate

SEEDS = 10
HARD = (  # 50 rows to test on cannot tell these
    "weights 10 × as uncertain as they are",
    "weights halfway from 0 to the mode",
    "classes: the mode, logits 4 × too large",
)


def flagged(case, sizes, seeds=SEEDS):
    return [
        f"{size}, seed {seed}: {found}"
        for size in sizes
        for seed in range(seeds)
        if (found := gate.judged(gate.CASES[case], size, seed)).flags
    ]


def most(fits):
    """What is wrong of so many fits at a rate of 5 %, but for a probability of 0.005: 7 of 50, 5 of
    30.
    """
    return int(binom.isf(0.005, fits, 0.05))


LEFT_OUT = (  # a harder case of the same check is among the others
    "conjugate posterior, 4 chains of 100 independent draws",
    "classes: MAP after 50 steps",
    "four chains stay where they began",
    "the same, 2 chains of 400 draws, autocorrelation 0.5",
)


def numbers(kind):
    return [
        k for k, case in enumerate(gate.CASES) if case.kind == kind and case.name not in LEFT_OUT
    ]


def test_a_right_fit_is_hardly_ever_flagged():
    """20 fits at 5 %: more than 4 with probability 0.003; at the 10 % or 28 % of before, with 0.04
    or 0.7.
    """
    few = (200, 50, 5)
    assert len(found := flagged(0, [few], seeds=20)) <= 4, found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", numbers("right"), ids=lambda k: gate.CASES[k].name)
def test_of_right_fits_5_percent_are_flagged_at_most(case):
    sizes = [size for size in gate.SIZES if size[0] >= gate.CASES[case].least]
    assert len(found := flagged(case, sizes)) <= most(SEEDS * len(sizes)), found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", numbers("wrong"), ids=lambda k: gate.CASES[k].name)
def test_of_wrong_fits_95_percent_are_flagged_at_least(case):
    least = 200 if gate.CASES[case].name in HARD else 0
    sizes = [size for size in gate.SIZES if size[1] >= least]
    fits = SEEDS * len(sizes)
    assert fits - len(flagged(case, sizes)) <= most(fits)
