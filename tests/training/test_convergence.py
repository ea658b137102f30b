"""Runs without a given length, which continue until their objective is flat, or warn."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.point import PointModel
from bayou.network.target import Target
from bayou.training.convergence import (
    ConvergenceWarning,
    Trend,
    cell_width,
    fall_from_maximum,
    trend,
)
from tests.training.runs import die_at_call

F64 = torch.float64
CASES = {
    "plain": (1.0, 1.0, 2.0, -3.0, 1.0, 0.5),
    "large weights": (1.0, 1.0, 8.0, -5.0, -4.0, 0.5),
    "other units": (10.0, 0.3, 2.0, -3.0, 1.0, 1.0),
}


class Linear:
    """A regression with three weights: its exact posterior, and the ELBO of a Gaussian."""

    def __init__(self, case):
        a, b, u, v, bias, self.noise = CASES[case]
        generator = torch.Generator().manual_seed(len(case))
        x = torch.randn(60, 2, generator=generator) * torch.tensor([a, b])
        y = (
            x @ torch.tensor([[u], [v]])
            + bias
            + self.noise * torch.randn(60, 1, generator=generator)
        )
        self.data = x, y
        self.features = torch.cat([x, torch.ones(60, 1)], 1).double()
        self.y = y.double().squeeze(1)
        self.precision = self.features.T @ self.features / self.noise**2 + torch.eye(3, dtype=F64)
        self.mean = torch.linalg.solve(self.precision, self.features.T @ self.y / self.noise**2)
        self.sd = torch.linalg.inv(self.precision).diag().sqrt()

    def fit(self, method):
        likelihood = bayou.Gaussian(self.noise)
        return bayou.fit(nn.Linear(2, 1), self.data, method, likelihood=likelihood)

    def distance(self, w):
        """Return the largest distance of weights (..., 3) from the mean, in standard deviations."""
        return float(((w - self.mean) / self.sd).abs().max())

    def elbo(self, mean, std):
        residual = self.y - self.features @ mean
        square = residual.square().sum() + (self.features.square() @ std.square()).sum()
        log_likelihood = (
            -0.5 * len(self.y) * math.log(2 * math.pi * self.noise**2)
            - 0.5 * square / self.noise**2
        )
        return float(
            log_likelihood - 0.5 * (mean.square() + std.square() - 1).sum() + std.log().sum()
        )


def vector(params):
    """Weights and bias of stacks as (S, 3)."""
    return torch.cat([params["weight"].flatten(1), params["bias"]], 1).detach().double()


@pytest.mark.parametrize(
    "case", ["other units", pytest.param("large weights", marks=pytest.mark.slow)]
)
def test_a_point_ends_at_the_mode(case):
    problem = Linear(case)
    assert problem.distance(vector(problem.fit(bayou.MAP()).sample(1))) < 0.02


@pytest.mark.slow
def test_laplace_is_the_exact_posterior():
    problem = Linear("large weights")
    posterior = problem.fit(bayou.Laplace("full"))
    draws = vector(posterior.sample(40_000, seed=0))
    assert problem.distance(draws.mean(0)) < 0.04
    torch.testing.assert_close(draws.std(0), problem.sd, rtol=0.05, atol=0)


@pytest.mark.slow
def test_mean_field_ends_at_the_best_mean_field():
    problem = Linear("large weights")
    posterior = problem.fit(bayou.VI())
    mean = vector({name: value.unsqueeze(0) for name, value in posterior.bayesian.mean().items()})[
        0
    ]
    stds = {guide.names[0]: guide.log_std.exp().unsqueeze(0) for guide in posterior.bayesian.guides}
    best = problem.elbo(problem.mean, problem.precision.diag().rsqrt())
    assert best - 0.1 < problem.elbo(mean, vector(stds)[0]) <= best


@pytest.mark.parametrize(
    ("layers", "noise", "method", "smooth"),
    [
        ([], bayou.Gaussian(1.0), bayou.MAP(), True),
        ([nn.Dropout(0.1)], bayou.Gaussian(1.0), bayou.MAP(), False),
        ([], bayou.Gaussian(1.0), bayou.MAP(input_noise=0.1), False),
        ([], bayou.Gaussian(1.0, learn=True), bayou.MAP(), False),  # a noise of 0 has no bound
    ],
)
def test_the_finish_needs_a_deterministic_bounded_objective(layers, noise, method, smooth):
    target = Target.build(nn.Sequential(nn.Linear(2, 1), *layers), noise, None, 10)
    assert PointModel(method, target).smooth == smooth


def test_a_finish_with_too_few_passes_warns():
    """50 passes, of a network that needs many."""
    x, y = Linear("plain").data
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    with pytest.warns(
        ConvergenceWarning, match=r"MAP used up its budget of 50 passes .* rising by .* nats"
    ):
        posterior = bayou.fit(
            net,
            (x, y),
            bayou.MAP(effort=0.05, batch_size=30),
            likelihood=bayou.Gaussian(0.05),
        )
    assert posterior.history[-1]["rising"] > 0


def test_trend():
    assert trend([0.0] * 14, 5) is None
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(300, generator=generator, dtype=F64)
    flat, rising = noise.tolist(), (noise + 0.02 * torch.arange(300)).tolist()
    change = trend(rising, 10)
    assert change.gain == pytest.approx(1.2, abs=0.55)
    assert change.error == pytest.approx(math.sqrt(2 / 60), rel=0.25)
    assert change.steps == 600
    assert change.rate == pytest.approx(change.gain / 0.6)
    assert not change.is_flat(3)
    assert change.is_flat(2000)  # whose log joint varies by more than ten times as much
    no_change = trend(flat, 10)
    assert no_change.is_flat(3)


@pytest.mark.parametrize(
    ("plan", "epoch", "width"),
    [(2000, 1, 41), (2000, 12, 36), (2000, 100, 100), (2000, 200, 41), (20, 3, 1)],
)
def test_cells_have_whole_epochs_if_there_are_enough(plan, epoch, width):
    assert cell_width(plan, epoch) == width


class Slow(nn.Module):
    """A network with one weight."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.w


def slow_fit(effort, lr, batch_size=10, checkpoint=None):
    """Fit the weight 2, far from its start 0; the first plan has 2,000·effort steps."""
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    rows = list(zip(x, 2 * x, strict=True))  # might change, so that there is no finish by L-BFGS
    method = bayou.MAP(
        lr=lr, effort=effort, batch_size=batch_size, log_every=10, checkpoint_every=7
    )
    return bayou.fit(
        Slow(),
        rows,
        method,
        likelihood=bayou.Gaussian(0.5),
        checkpoint=checkpoint,
    )


def test_a_run_continues_until_it_is_flat():
    x = torch.linspace(-1, 1, 40)
    posterior = slow_fit(effort=0.05, lr=0.03)
    assert 100 < posterior.history[-1]["step"] < 999
    precision = float(x.square().sum()) / 0.25 + 1
    assert abs(float(posterior.sample(1)["w"]) - 2 * (1 - 1 / precision)) < 0.1 / precision**0.5
    assert "rising" not in posterior.history[-1]


def test_a_run_that_used_up_its_budget_warns_with_its_rate():
    with pytest.warns(
        ConvergenceWarning,
        match=r"budget of 500 steps .* rising by [0-9.e+]+ nats in a thousand steps",
    ):
        posterior = slow_fit(effort=0.025, lr=0.002, batch_size=40)
    assert posterior.history[-1]["step"] == 499
    assert posterior.history[-1]["rising"] > 10


def test_a_killed_run_resumes_with_its_longer_plan(tmp_path):
    whole = slow_fit(0.05, 0.02)
    die_at_call(140, slow_fit, 0.05, 0.02, checkpoint=tmp_path / "run", of=PointModel)
    again = slow_fit(0.05, 0.02, checkpoint=tmp_path / "run")
    assert [r["step"] for r in again.history] == [r["step"] for r in whole.history]
    assert torch.equal(again.sample(1)["w"], whole.sample(1)["w"])


@pytest.mark.parametrize(("steps", "rising"), [(5, False), (12, True), (50, True), (1000, False)])
def test_a_run_of_a_given_length_records_whether_it_was_rising(steps, rising):
    """Five steps are too few to tell, and are not called flat."""
    posterior = Linear("plain").fit(bayou.MAP(steps=steps, lr=0.01 if steps < 100 else 0.1))
    assert posterior.history[-1]["step"] == steps - 1
    assert ("rising" in posterior.history[-1]) == rising
    assert posterior.checks["converged"].status == ("ok" if steps == 1000 else "warning")


def test_the_gain_of_a_short_run_counts_at_its_rate():
    """A nat in 7 steps of 10,000 weights is not flat; in 300 steps it is."""
    assert not Trend(1.0, 0.0, 7).is_flat(10_000)
    assert Trend(1.0, 0.0, 300).is_flat(10_000)
    assert Trend(1.0, 1.0, 7).is_flat(10_000)  # within its noise


def falls(rows):
    return torch.tensor([fall_from_maximum(row.tolist()) for row in rows])


def test_a_fall_from_the_maximum_is_told_from_noise():
    noise = torch.randn(200, 100, generator=torch.Generator().manual_seed(0)).double()
    assert not falls(noise).any()
    rises = torch.linspace(-50, 0, 100) + noise
    assert not falls(rises).any()
    lost = rises.clone()
    lost[:, 60:] -= 60 + 5 * noise[:, 60:].abs()
    assert 30 < falls(lost).min() < falls(lost).max() < 60
    rises[:, ::25] -= 1e4  # single bad draws are no fall
    assert not falls(rises).any()
    assert fall_from_maximum([0.0] * 30 + [-100.0] * 9) == 0  # too few to tell


def test_a_variational_run_that_ends_below_its_maximum_warns(monkeypatch):
    monkeypatch.setattr("bayou.methods.vi.MIN_COLLAPSE_STEPS", 100)
    case = Linear("plain")

    def rates(later):
        return bayou.VI(
            steps=160,
            lr=0.1,
            scale_lr=0.02,
            schedule=lambda done: 1.0 if done < 0.625 else later,
            log_every=3,
        )

    assert "fallen" not in case.fit(rates(1.0)).history[-1]
    with pytest.warns(
        ConvergenceWarning,
        match=r"VI\(MeanField\) ended .* nats below the maximum of its objective",
    ):
        posterior = case.fit(rates(-0.5))  # uphill
    assert posterior.checks["converged"].status == "failed"
    assert "nats below" in posterior.checks["converged"].text
