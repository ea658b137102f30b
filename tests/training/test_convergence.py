"""Runs without a given length: they go on until their objective is flat, and say so where it was
not.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.inference.point import PointModel
from bayou.training import newton
from bayou.training.convergence import (
    ConvergenceWarning,
    Trend,
    cell_width,
    fall_from_maximum,
    trend,
)
from bayou.training.settings import Settings

F64 = torch.float64
CASES = {
    "plain": (1.0, 1.0, 2.0, -3.0, 1.0, 0.5),
    "little noise": (1.0, 1.0, 2.0, -3.0, 1.0, 0.1),
    "large weights": (1.0, 1.0, 8.0, -5.0, -4.0, 0.5),
    "other units": (10.0, 0.3, 2.0, -3.0, 1.0, 1.0),
}


def cases(*quick: str) -> pytest.MarkDecorator:
    """Runs of thousands of steps: some cases stand for all, the others are slow."""
    return pytest.mark.parametrize(
        "case",
        [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    )


class Linear:
    """A regression with three weights: its exact posterior and the ELBO of any factorized
    Gaussian.
    """

    def __init__(self, case: str) -> None:
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

    def fit(self, method: bayou.methods.Method) -> bayou.Posterior:
        torch.manual_seed(0)
        return bayou.fit(
            nn.Linear(2, 1),
            self.data,
            method=method,
            likelihood=bayou.Gaussian(self.noise),
            progress=False,
        )

    def off(self, w: Tensor) -> float:
        """The largest distance of weights (..., 3) from the exact mean, in posterior standard
        deviations.
        """
        return float(((w - self.mean) / self.sd).abs().max())

    def elbo(self, mean: Tensor, std: Tensor) -> float:
        residual = self.y - self.features @ mean
        square = residual.square().sum() + (self.features.square() @ std.square()).sum()
        log_likelihood = (
            -0.5 * len(self.y) * math.log(2 * math.pi * self.noise**2)
            - 0.5 * square / self.noise**2
        )
        return float(
            log_likelihood - 0.5 * (mean.square() + std.square() - 1).sum() + std.log().sum()
        )


def vector(params: dict[str, Tensor]) -> Tensor:
    """Weights and bias of stacks as (S, 3)."""
    return torch.cat([params["weight"].flatten(1), params["bias"]], 1).detach().double()


@cases("other units")
def test_a_point_ends_at_the_mode(case: str) -> None:
    problem = Linear(case)
    assert problem.off(vector(problem.fit(bayou.MAP()).sample(1))) < 0.02


@pytest.mark.slow
def test_members_end_at_the_mode_too() -> None:
    problem = Linear("large weights")
    assert problem.off(vector(problem.fit(bayou.Ensemble(1)).sample(1))) < 0.1


@cases()
def test_laplace_is_the_exact_posterior(case: str) -> None:
    problem = Linear(case)
    posterior = problem.fit(bayou.Laplace("full"))
    assert isinstance(posterior, bayou.posteriors.GaussianPosterior)
    assert (
        problem.off(vector({name: value.unsqueeze(0) for name, value in posterior.mean().items()}))
        < 0.02
    )
    draws = vector(posterior.sample(40_000, seed=0))
    assert problem.off(draws.mean(0)) < 0.12
    torch.testing.assert_close(draws.std(0), problem.sd, rtol=0.05, atol=0)


@cases()
def test_mean_field_ends_at_the_best_mean_field(case: str) -> None:
    problem = Linear(case)
    posterior = problem.fit(bayou.VI())
    assert isinstance(posterior, bayou.posteriors.Guided)
    mean = vector({name: value.unsqueeze(0) for name, value in posterior.bayesian.mean().items()})[
        0
    ]
    stds = {guide.names[0]: guide.log_std.exp().unsqueeze(0) for guide in posterior.bayesian.guides}
    best = problem.elbo(problem.mean, problem.precision.diag().rsqrt())
    assert best - 0.1 < problem.elbo(mean, vector(stds)[0]) <= best


def test_the_finish_is_for_functions_of_the_weights_alone() -> None:
    target = bayou.network.target.Target.build(nn.Linear(2, 1), bayou.Gaussian(1.0), None, 10)
    assert PointModel(bayou.MAP(), target).smooth
    noisy = bayou.network.target.Target.build(
        nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.1)), bayou.Gaussian(1.0), None, 10
    )
    assert not PointModel(bayou.MAP(), noisy).smooth
    assert not PointModel(bayou.MAP(input_noise=0.1), target).smooth
    learned = bayou.network.target.Target.build(
        nn.Linear(2, 1), bayou.Gaussian(1.0, learn=True), None, 10
    )
    assert not PointModel(bayou.MAP(), learned).smooth  # a noise of 0 has no bound


def test_a_budget_that_ends_too_early_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three iterations of L-BFGS, of a problem that needs many."""
    monkeypatch.setattr(newton, "ROUND", 1)
    monkeypatch.setattr(newton, "passes_for", lambda settings, data: 3)
    monkeypatch.setattr("bayou.inference.point.passes_for", lambda settings, data: 3)
    monkeypatch.setattr(Settings, "total_steps", lambda self, data: 2)
    with pytest.warns(
        ConvergenceWarning, match=r"MAP used up its budget of 3 passes .* rising by .* nats"
    ):
        posterior = Linear("large weights").fit(bayou.MAP())
    assert posterior.history[-1]["rising"] > 0


def test_trend() -> None:
    assert trend([0.0] * 14, 5) is None
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(300, generator=generator, dtype=F64)
    flat, rising = noise.tolist(), (noise + 0.02 * torch.arange(300)).tolist()
    found = trend(rising, 10)
    assert found is not None
    assert (found.gain, found.error) == (
        pytest.approx(1.2, abs=0.55),
        pytest.approx(math.sqrt(2 / 60), rel=0.25),
    )
    assert found.steps == 600
    assert found.rate == pytest.approx(found.gain / 0.6)
    assert not found.is_flat(3)
    assert found.is_flat(
        2000
    )  # the log joint of so many weights varies by more than ten times as much
    still = trend(flat, 10)
    assert still is not None
    assert still.is_flat(3)
    assert Trend(1.0, 0.6, 10).is_flat(1)


@pytest.mark.parametrize(
    ("plan", "epoch", "width"),
    [(2000, 1, 41), (2000, 12, 36), (2000, 100, 100), (2000, 200, 41), (20, 3, 1)],
)
def test_cells_hold_whole_epochs(plan: int, epoch: int, width: int) -> None:
    assert cell_width(plan, epoch) == width


class Slow(nn.Module):
    """A weight far from where the data want it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def slow_fit(checkpoint: Path | None = None) -> bayou.Posterior:
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    rows = Listed(
        list(zip(x, 2 * x, strict=True))
    )  # a Dataset, whose rows might change: no finish by L-BFGS
    return bayou.fit(
        Slow(), rows, method=bayou.MAP(lr=0.01, batch_size=10, log_every=10, checkpoint_every=7),
        likelihood=bayou.Gaussian(0.5), progress=False, checkpoint=checkpoint,
    )  # fmt: skip


class Listed(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows of a list."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.rows[i]


def test_a_run_goes_on_until_it_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "total_steps", lambda self, data: 100)
    monkeypatch.setattr("bayou.training.monitors.MAX_BUDGET_RATIO", 100)
    x, posterior = torch.linspace(-1, 1, 40), slow_fit()
    assert 200 < posterior.history[-1]["step"] < 3000  # 0.01 a step to go 2 far
    precision = float(x.square().sum()) / 0.25 + 1
    assert abs(float(posterior.sample(1)["w"]) - 2 * (1 - 1 / precision)) < 0.1 / precision**0.5
    assert "rising" not in posterior.history[-1]


def test_a_run_that_used_up_its_budget_says_how_fast_it_was_rising(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Settings, "total_steps", lambda self, data: 100)
    monkeypatch.setattr("bayou.training.monitors.MAX_BUDGET_RATIO", 2)
    with pytest.warns(
        ConvergenceWarning,
        match=r"budget of 200 steps .* rising by [0-9.e+]+ nats in a thousand steps",
    ):
        posterior = slow_fit()
    assert posterior.history[-1]["step"] == 199
    assert posterior.history[-1]["rising"] > 100


def test_a_run_that_planned_more_goes_on_where_it_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Settings, "total_steps", lambda self, data: 100)
    whole, calls, plain = slow_fit(), 0, PointModel.loss

    def dies(self: PointModel, x: Tensor, y: Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls == 140:
            raise SystemExit
        return plain(self, x, y)

    with monkeypatch.context() as patch:
        patch.setattr(PointModel, "loss", dies)
        with pytest.raises(SystemExit):
            slow_fit(tmp_path / "run")
    again = slow_fit(tmp_path / "run")
    assert [r["step"] for r in again.history] == [r["step"] for r in whole.history]
    assert torch.equal(again.sample(1)["w"], whole.sample(1)["w"])


def test_a_given_length_is_kept() -> None:
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    posterior = bayou.fit(
        Slow(),
        (x, 3 * x),
        method=bayou.MAP(steps=60),
        likelihood=bayou.Gaussian(0.1),
        progress=False,
    )
    assert posterior.history[-1]["step"] == 59
    assert posterior.history[-1]["rising"] > 0


@pytest.mark.parametrize(("steps", "rising"), [(5, False), (12, True), (50, True), (1000, False)])
def test_a_run_of_a_given_length_says_whether_it_was_still_rising(steps: int, rising: bool) -> None:
    """Five steps are too few to tell, and are not called flat."""
    posterior = Linear("plain").fit(bayou.MAP(steps=steps, lr=0.01 if steps < 100 else 0.1))
    assert ("rising" in posterior.history[-1]) == rising
    assert posterior.checks["converged"].status == ("ok" if steps == 1000 else "warning")


def test_what_a_short_run_gains_counts_at_its_rate() -> None:
    """A nat in 7 steps of 10,000 weights is not flat; in 300 steps it is."""
    assert not Trend(1.0, 0.0, 7).is_flat(10_000)
    assert Trend(1.0, 0.0, 300).is_flat(10_000)
    assert Trend(1.0, 1.0, 7).is_flat(10_000)  # within its noise


def test_an_objective_has_fallen_where_noise_cannot_have_done_it() -> None:
    noise = torch.randn(200, 100, generator=torch.Generator().manual_seed(0)).double()
    assert sum(fall_from_maximum(row.tolist()) > 0 for row in noise) == 0
    rises = torch.linspace(-50, 0, 100) + noise
    assert sum(fall_from_maximum(row.tolist()) > 0 for row in rises) == 0
    lost = rises.clone()
    lost[:, 60:] -= 60 + 5 * noise[:, 60:].abs()
    found = torch.tensor([fall_from_maximum(row.tolist()) for row in lost])
    assert torch.all((found > 30) & (found < 60))
    rises[:, ::25] -= 1e4  # single bad draws are no fall
    assert sum(fall_from_maximum(row.tolist()) > 0 for row in rises) == 0
    assert fall_from_maximum([0.0] * 30 + [-100.0] * 9) == 0  # too few to tell


def test_a_variational_run_that_was_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayou.methods.vi.MIN_COLLAPSE_STEPS", 100)
    case = Linear("plain")

    def rates(later: float) -> bayou.VI:
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
