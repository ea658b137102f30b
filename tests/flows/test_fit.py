"""``fit`` against closed-form optima, all ways to stop, and errors for bad input."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch

from bayou.core import rng
from bayou.flows import (
    ActNorm,
    Chain,
    DiagonalAffine,
    DiagonalNormal,
    Flow,
    LULinear,
    realnvp,
)
from bayou.flows.core.transform import Ladj
from bayou.flows.fitting.fit import fit
from bayou.flows.fitting.objectives import elbo
from tests.flows.tools import LIKE, built, double, identical, item_is, seeded, standard


def normal_log_density(x):
    return -0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)


def gaussian_flow():
    return standard(LULinear(2)).double()


def coupling_flow(context_dim=0):
    transform = built(lambda: realnvp(2, layers=2, hidden=(16,), context_dim=context_dim))
    return standard(transform).double()


def parameters(flow):
    """All of them, as one vector."""
    return torch.cat([p.detach().flatten() for p in flow.parameters()])


def correlated(n):
    mean = double([1.0, -2.0])
    root = double([[1.5, 0.0], [-0.8, 0.6]])
    return mean + rng.normal(n, (2,), LIKE, seed=1) @ root.mT, mean, root @ root.mT


# --- the optimum --------------------------------------------------------------------------------


def test_maximum_likelihood_recovers_a_gaussian():
    n = 1000
    data, mean, covariance = correlated(n)
    flow = gaussian_flow()
    result = fit(flow, data, steps=300, batch_size=n, lr=0.05, validation=0)
    # The best Gaussian has the sample's own mean and covariance: NLL = ½ log det(2πe Σ̂).
    optimum = 0.5 * torch.logdet(2 * math.pi * math.e * torch.cov(data.mT, correction=0)).item()
    assert result.measure == "training NLL"
    assert result.best == pytest.approx(optimum, abs=1e-6)
    with torch.no_grad():
        shift, _ = flow.transform(torch.zeros(2, dtype=torch.float64))
        columns, _ = flow.transform(torch.eye(2, dtype=torch.float64))
    fitted = (columns - shift).mT @ (columns - shift)
    # Four standard errors of a mean, √(Σ_ii/n), and of a covariance, √((Σ_ii Σ_jj + Σ_ij²)/n).
    variances = covariance.diagonal()
    assert ((shift - mean).abs() < 4 * (variances / n).sqrt()).all()
    error = ((variances[:, None] * variances + covariance.square()) / n).sqrt()
    assert ((fitted - covariance).abs() < 4 * error).all()


def test_maximum_likelihood_learns_the_dependence_on_the_context():
    n = 2000
    context = rng.normal(n, (1,), LIKE, seed=2)
    data = torch.cat([context, -context], -1) + 0.1 * rng.normal(n, (2,), LIKE, seed=3)
    flow = coupling_flow(context_dim=1)
    result = fit(flow, data, context=context, steps=150, lr=0.02)
    # The entropy of the noise is the best there is; ignoring the context costs ½ log 101 ≈ 2.3 nats
    # a coordinate.
    floor = 2 * 0.5 * math.log(2 * math.pi * math.e * 0.01)
    assert floor - 0.1 < result.best < floor + 0.5


def test_reverse_kl_of_a_known_gaussian():
    # z = 2ε + 1 against N(0, 1): KL = ½(4 + 1 − 1) − log 2 = 1.306853, and log Z = 0.
    flow = Flow(DiagonalNormal(1, mean=1.0, std=2.0), DiagonalAffine(1)).double()
    value, standard_error = elbo(flow, normal_log_density, n=40_000)
    assert value == pytest.approx(-1.306853, abs=4 * standard_error)
    assert standard_error == pytest.approx(
        math.sqrt(8.5 / 40_000), rel=0.05
    )  # Var[1.5ε² + 2ε] = 4.5 + 4
    result = fit(flow, normal_log_density, steps=300, lr=0.05)
    assert abs(result.bound) < 3e-4  # twice the worst of 12 seeds, 1.4e-4
    assert result.bound <= 3 * result.standard_error + 1e-12
    assert "≤ log Z" in str(result)


def test_conditional_reverse_kl():
    context = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None]

    def log_density(x, c):  # N(c, 1) in both coordinates: log Z = 0
        assert x.shape[1:] == (len(c), 2)
        return normal_log_density(x - c)

    result = fit(
        coupling_flow(context_dim=1), log_density, context=context, steps=150, samples=8, lr=0.02
    )
    assert -0.05 < result.bound <= 3 * result.standard_error


def test_act_norm_starts_at_the_first_batch():
    data = 3 + 5 * rng.normal(512, (2,), LIKE, seed=4)
    flow = standard(Chain(LULinear(2), ActNorm(2))).double()
    result = fit(flow, data, steps=10, lr=1e-4)
    assert result.history[0].loss < math.log(5) * 2 + math.log(2 * math.pi * math.e) + 0.2


# --- the ways to stop ---------------------------------------------------------------------------


def test_early_stopping_restores_the_best_parameters():
    data = rng.normal(40, (2,), LIKE, seed=5)  # so few rows that a flow overfits them
    flow = coupling_flow()
    result = fit(
        flow,
        data,
        steps=1000,
        lr=0.05,
        schedule="constant",
        validation=0.5,
        patience=5,
        check_every=10,
    )
    assert result.stopped == "patience"
    assert result.steps == result.best_step + 5 * 10
    scores = {row.step: row.score for row in result.history}
    assert result.best == min(scores.values()) == scores[result.best_step]
    held = rng.permutation(40, rng.fold(0, "split"))[:20]
    with torch.no_grad():
        assert -flow.log_prob(data[held]).mean().item() == pytest.approx(result.best, abs=1e-12)
    assert not flow.training


def test_interrupt_returns_the_best_parameters_so_far():
    seen = []
    flow = coupling_flow()

    def callback(row):
        seen.append((row, parameters(flow)))
        if row.step >= 50:
            raise KeyboardInterrupt

    result = fit(flow, correlated(500)[0], steps=500, check_every=10, callback=callback)
    assert result.stopped == "interrupted"
    assert result.steps == 50
    best, kept = min(seen, key=lambda pair: pair[0].score)
    assert result.best_step == best.step
    identical(parameters(flow), kept)


def test_interrupt_inside_the_density():
    calls = 0

    def log_density(x):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return normal_log_density(x)

    result = fit(coupling_flow(), log_density, steps=100)
    assert (result.stopped, result.steps, result.history) == ("interrupted", 2, ())
    assert result.bound is not None


class Poisoned(DiagonalAffine):
    """Gives NaN in its value, or an infinite gradient, from its n-th training pass on."""

    def __init__(self, after, fault):
        super().__init__(2)
        self.after, self.fault, self.passes = after, fault, 0

    def _inverse(self, y, context):
        self.passes += self.training
        if self.passes > self.after:
            zero = self.shift - self.shift.detach()
            y = y * math.nan if self.fault == "value" else y + zero.sqrt()
        return super()._inverse(y, context)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("value", r"step 8: log q is nan at row \d+ .* lower lr"),
        ("gradient", r"step 8: the gradient of '.*shift' has"),
    ],
)
def test_nan_keeps_the_last_good_parameters(fault, message):
    data = correlated(100)[0]
    reference, poisoned = (standard(Poisoned(after, fault)).double() for after in (999, 7))
    kept = []
    fit(
        reference,
        data,
        steps=7,
        validation=0,
        schedule="constant",
        check_every=1,
        callback=lambda row: kept.append(parameters(reference)),
    )
    with pytest.raises(FloatingPointError, match=message):
        fit(poisoned, data, steps=20, validation=0, schedule="constant")
    # Six updates were followed by a finite loss; the seventh was not.
    identical(parameters(poisoned), kept[5])
    assert not torch.equal(parameters(poisoned), kept[6])
    assert all(p.grad is None for p in poisoned.parameters())


def test_a_failed_first_step_leaves_act_norm_waiting():
    flow = standard(ActNorm(2))
    with pytest.raises(FloatingPointError, match="step 1: log_density"):
        fit(flow, lambda x: x.sum(-1) * math.nan, steps=5)
    assert not flow.transform.initialized
    fit(flow, correlated(100)[0], steps=1)
    assert flow.transform.initialized


def test_density_that_is_zero_somewhere():
    def log_density(x):
        return torch.where(x[..., 0] > 0, normal_log_density(x), -torch.inf)

    with pytest.raises(
        FloatingPointError, match=r"log_density\(x\) is -inf at sample \d+, x = \[-.*soft edges"
    ):
        fit(coupling_flow(), log_density, steps=5)


def test_other_errors_pass_with_a_note():
    def log_density(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        fit(coupling_flow(), log_density, steps=5)
    assert "step 1" in caught.value.__notes__[0]


# --- seeds, devices, settings -------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [correlated(300)[0], normal_log_density], ids=["data", "density"]
)
def test_seeds_repeat_bit_for_bit_and_leave_the_global_stream_alone(target):
    def run(seed):
        flow = coupling_flow()
        result = fit(flow, target, steps=10, seed=seed)
        return (result.history, result.best, result.bound), parameters(flow)

    before = torch.get_rng_state()
    (first, a), (again, b), (other, c) = run(3), run(3), run(4)
    assert first == again
    identical(a, b)
    assert first != other
    assert not torch.equal(a, c)
    identical(before, torch.get_rng_state())
    streams = [run(seeded(7))[1] for _ in range(2)]
    identical(*streams)


def test_a_density_with_noise_of_its_own_repeats_too():
    def noisy(x):
        return normal_log_density(x + 0.1 * torch.randn_like(x))

    results = [fit(coupling_flow(), noisy, steps=20).bound for _ in range(2)]
    assert results[0] == results[1]


def test_data_follow_the_parameters():
    flow = coupling_flow().float()
    fit(flow, correlated(100)[0], steps=2)  # float64 data, float32 parameters
    assert {p.dtype for p in flow.parameters()} == {torch.float32}


def test_schedule_clip_and_optimizer_are_used():
    data = correlated(200)[0] * 100
    flow = gaussian_flow()
    before = parameters(flow)
    result = fit(
        flow, data, steps=1, optimizer=torch.optim.SGD, lr=1.0, clip=0.5, schedule=lambda done: 0.1
    )
    moved = (before - parameters(flow)).norm()
    assert result.history[0].gradient_norm > 100
    assert result.history[0].lr == pytest.approx(0.1)
    item_is(moved, 0.1 * 0.5, rel=1e-4)


def test_a_clock_ends_a_run_and_lowers_the_rate():
    found = fit(
        gaussian_flow(),
        correlated(200)[0],
        seconds=0.5,
        check_every=5,
        patience=None,
        validation=0,
        progress=False,
    )
    assert found.stopped == "finished"
    assert 0.5 <= found.seconds < 5
    assert found.history[-1].lr < 0.2 * max(check.lr for check in found.history)
    with pytest.raises(ValueError, match="seconds must be positive and finite, got 0"):
        fit(gaussian_flow(), correlated(200)[0], seconds=0)


@pytest.mark.parametrize("length", [{"steps": 40}, {"seconds": 1.0}])
def test_warmup_tempers_the_density(length, monkeypatch):
    ticks = itertools.count(0.0, 0.005)
    monkeypatch.setattr(
        "bayou.flows.fitting.fit.time", SimpleNamespace(monotonic=lambda: next(ticks))
    )
    rows = []
    fit(gaussian_flow(), lambda x: normal_log_density(x) - 100, **length, warmup=0.5, check_every=1,
        callback=rows.append, lr=1e-6, patience=None)  # fmt: skip
    assert rows[0].loss < 5  # β = 0.01 of a constant 100
    assert rows[-1].loss > 95


def test_result_reads_well():
    result = fit(gaussian_flow(), correlated(300)[0], steps=20)
    assert re.fullmatch(
        r"maximum likelihood: held-out NLL \d\.\d{4} nats per row; best at step \d+ of 20, finished after \d+\.\d s",
        str(result),
    )
    assert result.bound is None
    assert result.ladj is Ladj.exact


# --- bad input ----------------------------------------------------------------------------------

GOOD = torch.zeros(20, 2)


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (torch.zeros(20, 3), {}, r"the data has shape \(20, 3\)"),
        (torch.zeros(4, 5, 2), {}, r"expected \(rows, 2\)"),
        (torch.zeros(20, 2, dtype=torch.long), {}, "floating point, got torch.int64"),
        (torch.full((20, 2), math.nan), {}, "40 NaN or infinite values"),
        (torch.zeros(0, 2), {}, "no rows"),
        (torch.zeros(3, 2), {}, "validation=0.1 of 3 rows holds out 0"),
        (GOOD.numpy(), {}, "target is ndarray; pass data as a tensor"),
        (GOOD, {"context": torch.zeros(20, 1)}, "takes no context"),
        (lambda x: x, {}, r"returned shape \(256, 2\).*expected \(256,\)"),
        (lambda x: 0.0, {}, "returned float"),
        (lambda x: x.detach().sum(-1), {}, "is not differentiable in x"),
        (GOOD, {"steps": 0}, "steps must be a whole number"),
        (GOOD, {"lr": -1.0}, "lr must be positive"),
        (GOOD, {"clip": 0.0}, "pass None"),
        (GOOD, {"validation": 1.0}, r"fraction in \[0, 1\)"),
        (GOOD, {"schedule": "linear"}, "'cosine', 'constant'"),
        (GOOD, {"progress": "loud"}, "'plain'"),
        (GOOD, {"seed": "one"}, "seed must be an int"),
    ],
)  # fmt: skip
def test_bad_input(target, settings, message):
    with pytest.raises(ValueError, match=message):
        fit(coupling_flow().float(), target, **{"steps": 2, **settings})


@pytest.mark.parametrize(
    ("flow", "context", "message"),
    [
        (coupling_flow(context_dim=1), None, r"conditional; pass context= of shape \(rows, 1\)"),
        (coupling_flow(context_dim=1), torch.zeros(19, 1), "20 rows but the context has shape"),
        (realnvp(2), None, "got Chain; wrap"),
        (gaussian_flow().requires_grad_(False), None, "nothing to fit"),
    ],
)
def test_bad_contexts_and_flows(flow, context, message):
    with pytest.raises(ValueError, match=message):
        fit(flow, GOOD, context=context)
