"""Martingales of p-values: Ville's bound, exact p-values, and a state that is resumed."""

import math

import pytest
import scipy.stats
import torch

from bayou.diagnostics import ReferenceRows, ShiftMartingale
from bayou.diagnostics.martingale import Bets, ConformalBets
from tests.diagnostics.watched_worlds import LinearPosterior, LogisticPosterior, World


def test_the_capital_has_mean_one_and_rarely_becomes_large():
    generator = torch.Generator().manual_seed(0)
    peaks = []
    for _ in range(200):
        bets = Bets()
        for p in torch.rand(100, generator=generator).tolist():
            bets = bets.bet(p)
        peaks.append(math.exp(bets.log_peak))
    for threshold in (2, 5, 20):
        count = sum(peak >= threshold for peak in peaks)
        assert count <= scipy.stats.binom.ppf(0.999, 200, 1 / threshold)
    # One step by hand, and its mean over p by integration.
    p = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    capital = [math.exp(Bets().bet(0.1).bet(float(q)).log_capital) for q in p]
    assert sum(capital) / 1000 == pytest.approx(math.exp(Bets().bet(0.1).log_capital), rel=1e-9)


def test_small_p_values_make_the_capital_grow():
    bets = Bets()
    for _ in range(40):
        bets = bets.bet(0.05)
    assert bets.log_capital > 10
    assert sum(bets.shares) == pytest.approx(1.0)


def test_ranks_of_exchangeable_scores_are_uniform_and_independent():
    generator = torch.Generator().manual_seed(0)
    p = []
    for _ in range(300):
        scores = torch.randint(0, 4, (12,), generator=generator).tolist()  # with ties
        stream = ConformalBets(torch.tensor(sorted(scores[:10]), dtype=torch.float64))
        for score, tau in zip(
            scores[10:], torch.rand(2, generator=generator).tolist(), strict=True
        ):
            above = sum(old > score for old in stream.scores.tolist())
            same = sum(old == score for old in stream.scores.tolist())
            p.append((above + tau * (same + 1)) / (len(stream.scores) + 1))
            expected = stream.bets.bet(p[-1])
            stream = stream.update(
                torch.tensor([score], dtype=torch.float64), torch.tensor([tau], dtype=torch.float64)
            )
            assert stream.bets == expected
    pairs = torch.tensor(p).reshape(-1, 2)
    assert scipy.stats.kstest(p, "uniform").pvalue > 0.001
    assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 4 / 300**0.5


def test_many_scores_at_once_are_the_same_bets_as_one_after_another():
    generator = torch.Generator().manual_seed(1)
    old = torch.randint(0, 300, (80,), generator=generator).double().sort().values
    new = torch.randint(0, 300, (1200,), generator=generator).double()  # more than a block
    ties = torch.rand(1200, generator=generator, dtype=torch.float64)
    at_once = ConformalBets(old).update(new, ties)
    single = ConformalBets(old)
    for k in range(1200):
        single = single.update(new[k : k + 1], ties[k : k + 1])
    assert at_once.bets == single.bets
    assert torch.equal(at_once.scores, torch.cat((old, new)).sort().values)
    assert at_once.count == single.count == 1200


def test_another_posterior_is_an_error(tmp_path):
    # Its scores differ from those of held-out rows, which would be taken for a shift.
    world = World(0)
    test = ShiftMartingale.start(world.posterior, world.reference)
    test.save(tmp_path / "state.bayou")
    loaded = ShiftMartingale.load(tmp_path / "state.bayou")
    x = world.inputs(50)
    for other in (LinearPosterior(world.weights, 0.6), LogisticPosterior(world.weights)):
        with pytest.raises(ValueError, match="belongs to another posterior"):
            loaded.update(other, x)
    assert loaded.update(world.posterior, x).rows == 50


def stream_of(world, rows, noise=None, shift=0.0):
    x = world.inputs(rows)
    x[:, 1] += shift
    return x, world.targets(x, noise=noise)


@pytest.mark.slow
def test_repeated_looks_keep_the_rate_of_false_alarms():
    false_alarms = 0
    for seed in range(100):
        world = World(seed, held_out=60, columns=2)
        test = ShiftMartingale.start(world.posterior, world.reference, alpha=0.1, seed=seed)
        looks = []
        for _ in range(6):
            test = test.update(world.posterior, *stream_of(world, 30))
            looks.append(test.verdict)
        false_alarms += any(look != "as expected" for look in looks)
    assert false_alarms <= scipy.stats.binom.ppf(0.999, 100, 0.1)


def test_a_change_is_found_and_stays():
    world = World(0)
    test = ShiftMartingale.start(world.posterior, world.reference)
    test = test.update(world.posterior, *stream_of(world, 50))
    assert test.verdict == "as expected"
    test = test.update(world.posterior, *stream_of(world, 150, noise=1.2))
    assert test.verdict == "the relation has changed"
    assert test.significant == ("spread",)
    test = test.update(world.posterior, *stream_of(world, 100))
    assert (test.verdict, test.rows) == ("the relation has changed", 300)


def test_shifted_inputs_are_found_without_targets():
    world = World(1)
    test = ShiftMartingale.start(world.posterior, world.reference)
    test = test.update(world.posterior, stream_of(world, 150, shift=1.0)[0])
    assert test.verdict == "inputs have shifted"
    assert "input x2" in test.significant
    assert test.streams["location"].count == 0


def test_a_state_is_saved_and_resumed(tmp_path):
    world = World(2)
    x, y = stream_of(world, 60)
    test = ShiftMartingale.start(world.posterior, world.reference, alpha=0.02)
    first = test.update(world.posterior, x[:20], y[:20])
    first.save(tmp_path / "state.bayou")
    loaded = ShiftMartingale.load(tmp_path / "state.bayou")
    for state in (first, loaded):
        last = state.update(world.posterior, x[20:], y[20:])
        assert last.rows == 60
        assert last.evidence("spread") == first.update(world.posterior, x[20:], y[20:]).evidence(
            "spread"
        )
    assert loaded.threshold == first.threshold == len(first.streams) / 0.02


def test_it_needs_held_out_rows_and_rows_of_the_same_shape():
    world = World(0)
    with pytest.raises(ValueError, match="50 held-out rows"):
        ShiftMartingale.start(world.posterior, ReferenceRows.of(world.inputs(100)))
    test = ShiftMartingale.start(world.posterior, world.reference)
    with pytest.raises(ValueError, match="5 numbers in a row"):
        test.update(world.posterior, torch.ones(3, 5))
