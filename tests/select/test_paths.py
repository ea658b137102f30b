"""Regularization paths: modes of many priors and folds at once, and the selection among them."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.core.progress import Progress
from bayou.inference.modes import Modes
from bayou.network.target import Target
from bayou.select import regularization_path
from bayou.select.folds import held_out_masks, split_folds
from bayou.select.regularization_path import Path, search_paths
from bayou.training.data import as_data
from bayou.training.lbfgs import Lbfgs

F64 = torch.float64


def ridge(count=60):
    """A linear regression, whose modes have a closed form."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator, dtype=F64)
    y = x[:, :2].sum(1, keepdim=True) + 0.5 * torch.randn(count, 1, generator=generator, dtype=F64)
    net = nn.Linear(8, 1, bias=False, dtype=F64)
    return Target.build(net, bayou.Gaussian(0.5), bayou.Normal(0.7), count), (x, y)


def ridge_mode(x, y, precision):
    """The weights (8, 1) of the largest posterior density, by their closed form."""
    gram = x.T @ x / 0.25 + precision / 0.7**2 * torch.eye(8, dtype=F64)
    return torch.linalg.solve(gram, x.T @ y / 0.25)


def test_many_rosenbrock_valleys_are_minimized_at_once():
    """From starts of very different difficulty, each to its own minimum (a, a²)."""
    a = torch.tensor([1.0, 0.5, 2.0, -1.0], dtype=F64)

    def function(points, problems):
        x = points.detach().requires_grad_()
        with torch.enable_grad():
            values = (a[problems] - x[:, 0]).square() + 100 * (x[:, 1] - x[:, 0].square()).square()
            (gradient,) = torch.autograd.grad(values.sum(), x)
        return values.detach(), gradient

    start = torch.tensor([[-1.2, 1.0], [0.5, 0.25], [30.0, -30.0], [0.0, 0.0]], dtype=F64)
    optimizer = Lbfgs(function, start, torch.full((4,), 1e-20, dtype=F64))
    torch.testing.assert_close(
        optimizer.run(1000), torch.stack([a, a.square()], 1), rtol=1e-5, atol=1e-6
    )
    assert optimizer.evaluations < 4 * 400  # ended problems take part no longer
    assert torch.equal(optimizer.points[1], start[1])  # it began at its minimum


def test_modes_are_those_of_ridge_regression():
    target, (x, y) = ridge()
    masks = torch.ones(4, len(y), dtype=torch.bool)
    masks[1, ::3] = masks[2, 5:] = False
    by_input = torch.linspace(0.1, 5.0, 8, dtype=F64)
    factors = [
        {},
        {"weight": 4.0},
        {"weight": 0.01},
        {"weight": by_input},
    ]
    modes = Modes(target, (x, y), masks, factors, 1e-12)
    weights = modes.run(300)["weight"]
    for mask, factor, weight in zip(masks, factors, weights, strict=True):
        exact = ridge_mode(x[mask], y[mask], factor.get("weight", 1.0))
        torch.testing.assert_close(weight, exact.T, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(modes.errors()[1], (x @ weights[1].T - y).square().squeeze(1))


def test_frozen_tensors_stay_and_a_network_that_vmap_cannot_take_is_looped_over():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 4, dtype=F64), nn.Linear(4, 1, dtype=F64)

        def forward(self, x):
            h = self.first(x).tanh()
            return self.last(
                h if float(h.sum()) > -1e9 else -h
            )  # a branch on data: no batching rule

    _, (x, y) = ridge()
    net = Branching()
    net.first.weight.requires_grad_(False)
    target = Target.build(net, bayou.Gaussian(0.5), bayou.Normal(0.7), len(y))
    stack = Modes(target, (x, y), torch.ones(2, len(y)), [{}, {}], 1e-3).run(60)
    assert set(stack) == {"first.bias", "last.weight", "last.bias"}
    torch.testing.assert_close(stack["last.weight"][0], stack["last.weight"][1])


def test_the_search_finds_the_best_ridge_of_leave_some_out():
    """The same choice as a closed form at every step; clearly worse factors are dropped on the
    way.
    """
    target, (x, y) = ridge()
    rows = as_data((x, y), 32)
    several = split_folds(rows, 0)
    held = held_out_masks(rows, several)
    assert (held.sum(0) == 1).all()  # every row is held out once, and the last mode holds out none
    assert not held[-1].any()
    steps = [4.0**k for k in range(5, -6, -1)]
    factors = [[{}] * 6, [{"weight": 1e4}] * 6]  # the second keeps the weights at zero far too long
    with Progress("search", len(steps), False) as line:
        found = search_paths(
            target, rows, several, factors, steps, line, regularization_path.PASSES
        )
    exact = []
    for step in steps:
        squares = []
        for mask in held[:-1]:
            w = ridge_mode(x[~mask], y[~mask], step)
            squares.append((x[mask] @ w - y[mask]).square().flatten())
        exact.append(torch.cat(squares).mean())
    assert found.prior == 0
    assert found.step == int(torch.stack(exact).argmin())
    assert float(found.errors.mean()) == pytest.approx(float(exact[found.step]), rel=1e-3)
    assert found.trials[0, found.step] == pytest.approx(float(found.errors.mean()))
    whole = ridge_mode(x, y, steps[found.step])  # the last mode is that of all rows
    torch.testing.assert_close(found.modes["weight"][-1], whole.T, rtol=1e-3, atol=1e-4)


def test_passes_over_the_rows_are_few(monkeypatch):
    """The price of a selection, by count and not by the clock: at most 40 passes of a mode at a
    step of a path.
    """
    _, (x, y) = ridge()
    walked = []
    plain = Path.__init__

    def recorded(self, *args, **options):
        plain(self, *args, **options)
        walked.append(self)

    monkeypatch.setattr(Path, "__init__", recorded)
    net = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 1)).double()
    posterior = bayou.fit(net, (x, y), bayou.select.by_name("map", effort=0.4))
    (path,) = walked  # it has the mode of all rows, too
    # shapes of the prior × (folds + all rows) × steps
    assert path.passes <= 6 * 3 * 9 * 0.4 * regularization_path.PASSES
    inputs, stage = posterior.selection
    assert inputs["stage"] == "prior by input"
    assert stage["stage"] == "noise and prior"
    assert len(stage["trials"]) >= 6 + 5  # all shapes at the first step, and some steps of the best
    assert min(trial["mse"] for trial in stage["trials"]) > 0
    assert math.isfinite(float(posterior.predict(x).log_prob(y).mean()))


def test_a_network_that_collapsed_under_a_narrow_prior_begins_again():
    """Three layers at zero have no gradient; the next step of the path must not stay there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator, dtype=F64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    torch.manual_seed(1)
    layers = [nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)]
    target = Target.build(
        nn.Sequential(*layers).double(), bayou.Categorical(), bayou.Normal("fan_in", gain=3.0), 80
    )
    rows = as_data((x, y), 80)
    factors = [dict.fromkeys(target.free, 1.0)]
    masks = torch.ones(1, 80, dtype=torch.bool)
    path = Path(target, rows, masks, factors, [1e4, 1e3, 1.0], regularization_path.LOG_PROB_PASSES)
    first, second, last = (float(errors.mean()) for errors in path.walk())
    assert first == pytest.approx(math.log(2), abs=1e-3)
    assert second == pytest.approx(math.log(2), abs=1e-3)
    assert last < 0.3
