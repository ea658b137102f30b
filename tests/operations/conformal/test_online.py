"""Adaptive levels: the bound for every sequence, states that continue bit for bit."""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations import OnlineConformal
from tests.operations.conformal.simulated import F64, Forecast, Logits, assert_mean, generator

STEPS = 1000
GAMMA = 0.05
BOUND = (0.9 + GAMMA) / (GAMMA * STEPS)  # .019


def forecast(streams, rows=1):
    likelihood = bayou.Gaussian(1.0).bind(dtype=F64)
    return Predictive(likelihood, torch.zeros(1, rows, streams, dtype=F64))


def adversaries():
    """Sequences of y, some of which depend on the interval that was just issued."""
    noise = torch.randn(STEPS, generator=generator(0), dtype=F64)
    time = torch.arange(STEPS, dtype=F64)
    return [
        lambda t, low, high: noise[t],
        lambda t, low, high: noise[t] * torch.exp2(time[t] / 50),  # explodes
        lambda t, low, high: noise[t] * torch.exp2(-time[t] / 50),
        lambda t, low, high: noise[t] + 100.0 * (t // 100 % 2),  # jumps
        lambda t, low, high: 1e9 * (-1) ** t,  # never near
        lambda t, low, high: torch.tensor(0.0),  # always the same
        lambda t, low, high: high + 1 if high.isfinite() else torch.tensor(0.0),  # always outside
        lambda t, low, high: (low + high) / 2 if high.isfinite() else torch.tensor(1e6),
        lambda t, low, high: time[t],
    ]


def test_the_error_rate_of_any_sequence_is_within_the_bound():
    sequences = adversaries()
    online = OnlineConformal(0.9, step_size=GAMMA, window=100, score="split")
    p = forecast(len(sequences))
    for t in range(STEPS):
        low, high = online.interval(p)
        ends = zip(sequences, low[0], high[0], strict=True)
        y = torch.stack([torch.as_tensor(draw(t, a, b), dtype=F64) for draw, a, b in ends])
        online.observe(y.unsqueeze(0))
    assert pytest.approx(0.019) == BOUND
    assert float((online.coverage - 0.9).abs().max()) <= BOUND + 1e-12
    assert online.rows == STEPS


@pytest.mark.parametrize("rows", [1, 4])
def test_updates_by_hand(rows):
    """α_{t+1} = α_t + γ·Σ(α − err); thresholds are ranks of the scores at 1 − α_t."""
    online = OnlineConformal(0.8, step_size=0.1, score="split")
    online.calibrate(forecast(1, 9), torch.arange(1.0, 10.0, dtype=F64).unsqueeze(1))
    low, high = online.interval(forecast(1, rows))
    assert_close(high, torch.full((rows, 1), 8.0, dtype=F64))  # ⌈10·.8⌉
    y = torch.full((rows, 1), 8.5, dtype=F64)
    assert not bool(online.observe(y).any())
    assert_close(online.alpha, torch.tensor([0.2 + rows * 0.1 * (0.2 - 1)], dtype=F64))
    assert float(online.coverage) == 0.0
    if rows == 1:
        assert_close(online.interval(forecast(1))[1], torch.tensor([[9.0]], dtype=F64))  # ⌈11·.88⌉
        online.observe(torch.zeros(1, 1))
        assert_close(online.alpha, torch.tensor([0.12 + 0.02], dtype=F64))
    else:  # α < 0
        low, high = online.interval(forecast(1))
        assert bool(low.isinf() & high.isinf())


def test_a_window_without_steps_is_the_quantile_of_the_last_scores():
    online = OnlineConformal(0.8, step_size=0.0, window=19, score="split")
    y = torch.randn(50, 1, generator=generator(0), dtype=F64)
    for row in y.split(1):
        online.interval(forecast(1))
        online.observe(row)
    expected = y[-19:].abs().sort(0).values[15]  # ⌈20·.8⌉ = 16
    assert_close(online.interval(forecast(1))[1][0], expected)


@pytest.mark.parametrize("step_size", [0.05, OnlineConformal.STEP_SIZES])
def test_streams_with_a_drift_keep_their_coverage(step_size):
    streams = 100
    scale = torch.exp2(2 * torch.arange(300, dtype=F64) / 300).unsqueeze(1)
    y = scale * torch.randn(300, streams, generator=generator(0), dtype=F64)
    held_out = torch.randn(200, streams, generator=generator(1), dtype=F64)
    online = OnlineConformal(0.9, step_size=step_size, score="split")
    online.calibrate(forecast(streams, 200), held_out)
    fixed = float((y.abs() <= held_out.abs().quantile(0.9, dim=0)).double().mean())
    for row in y.split(1):
        online.interval(forecast(streams))
        online.observe(row)
    assert fixed < 0.7
    assert_mean(online.coverage.tolist(), 0.88, 0.92, sigmas=0.0)


@pytest.mark.parametrize("task", ["numbers", "classes"])
@pytest.mark.parametrize("between", [False, True])
def test_a_loaded_state_continues_bit_for_bit(task, between, tmp_path):
    posterior, score = (Forecast(), "split") if task == "numbers" else (Logits(), "aps")
    x = torch.randn(60, 3, generator=generator(0), dtype=F64)
    y = x[:, :1] if task == "numbers" else x.argmax(-1)
    path = tmp_path / "online.bayou"

    def predict(online, rows):
        p = posterior.predict(rows)
        return online.interval(p)[1] if task == "numbers" else online.set(p)

    def run(online, first, last, interrupted=None):
        results = []
        for t in range(first, last):
            results.append(predict(online, x[t : t + 1]))
            if t == interrupted:
                online.save(path)
                online = OnlineConformal.load(path)
            online.observe(y[t : t + 1])
        return online, results

    settings = {"step_size": (0.02, 0.1), "window": 20, "score": score, "seed": 5}
    straight, expected = run(OnlineConformal(0.8, **settings), 0, 60)
    if between:
        resumed, results = run(OnlineConformal(0.8, **settings), 0, 60, interrupted=30)
    else:
        online, results = run(OnlineConformal(0.8, **settings), 0, 30)
        online.save(path)
        resumed, rest = run(OnlineConformal.load(path), 30, 60)
        results += rest
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert torch.equal(resumed.alpha, straight.alpha)
    assert torch.equal(resumed.coverage, straight.coverage)
    assert resumed.rows == straight.rows == 60


def test_sets_of_classes_keep_their_coverage():
    g = generator(0)
    online = OnlineConformal(0.9, step_size=0.05)
    for t in range(600):
        x = (1 + t / 200) * torch.randn(1, 4, generator=g, dtype=F64)  # ever more confident
        gumbel = -torch.empty(1, 4, dtype=F64).exponential_(generator=g).log()
        mask = online.set(Logits().predict(x))
        assert mask.shape == (1, 4)
        y = (0.5 * x + gumbel).argmax(-1)
        assert bool(online.observe(y)[0]) == bool(mask[0, y[0]])
    assert abs(float(online.coverage) - 0.9) <= 0.95 / (0.05 * 600)


def test_invalid_arguments_raise(tmp_path):
    online = OnlineConformal()
    p = forecast(2)
    for call, message in {
        lambda: OnlineConformal(1.0): "strictly between 0 and 1",
        lambda: OnlineConformal(step_size=-0.1): "step_size must be a number ≥ 0",
        lambda: OnlineConformal(step_size=()): "or several",
        lambda: OnlineConformal(window=0): "window must be a number of rows",
        lambda: online.alpha: "no state yet",
        lambda: online.coverage: "no rows were observed",
        lambda: online.observe(torch.zeros(1, 2)): "call interval",
        lambda: online.interval(p) and online.observe(torch.zeros(2)): r"\(1, 2\), got \(2,\)",
        lambda: online.observe(torch.full((1, 2), math.nan)): "y must be finite",
        lambda: online.set(p): "predicts numbers: use interval",
        lambda: online.interval(forecast(3)): r"had the shape \(2,\) before, got \(3,\)",
        lambda: online.interval(Logits().predict(torch.zeros(1, 3))): "score must be one of",
        lambda: (
            online.save(tmp_path / "o.bayou")
            or bayou.load(tmp_path / "o.bayou", torch.nn.Linear(1, 1))
        ): "holds a 'online conformal'",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
