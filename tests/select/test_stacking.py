"""Weights of a stack: the optimum of a concave problem, and what becomes of it in a mixture."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn

import bayou
from bayou.posteriors import Empirical, Mixture
from bayou.select.stacking import keep_largest, mixture_loss, stacking_weights

F64 = torch.float64


def make_losses(rows, shifts, seed=0):
    """−log p of methods that are equally good but for a shift, and differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, len(shifts), generator=generator, dtype=F64)
    values = noise + torch.tensor(shifts, dtype=F64)
    return {f"method {k}": values[:, k] for k in range(len(shifts))}


def gradient(losses, weights, pull):
    """∂/∂w_k of Σ log Σ w p + pull/K Σ log w, by autograd."""
    weights = weights.clone().requires_grad_()
    density = torch.exp(-torch.stack(list(losses.values()), 1))
    total = (density @ weights).log().sum() + pull / len(weights) * weights.log().sum()
    return torch.autograd.grad(total, weights)[0]


@pytest.mark.parametrize("pull", [0.01, 2.0, 50.0])
@pytest.mark.parametrize("shifts", [(0.0, 0.0), (0.0, 0.5, 2.0), (0.0, 6.0, 0.1, 0.2)])
@pytest.mark.parametrize("rows", [1, 40, 3000])
def test_weights_satisfy_the_conditions_of_the_optimum(rows, shifts, pull):
    """All weights are positive, so that every partial derivative is the Lagrange multiplier, which
    is Σ_k w_k ∂_k = N + pull.
    """
    losses = make_losses(rows, shifts)
    weights = stacking_weights(losses, pull)
    assert float(weights.sum()) == pytest.approx(1)
    assert bool((weights > 0).all())
    slopes = gradient(losses, weights, pull)
    torch.testing.assert_close(
        weights * slopes, weights * (rows + pull), rtol=1e-5, atol=1e-7 * rows
    )


def test_weights_are_those_of_a_general_optimizer():
    """SLSQP from several starts: the problem is concave, and all end in the same weights."""
    losses = make_losses(60, (0.0, 0.3, 1.0))
    pull = 2.0
    density = np.exp(-torch.stack(list(losses.values()), 1).numpy())

    def loss(w):
        return -(np.log(density @ w).sum() + pull / 3 * np.log(w).sum())

    weights = stacking_weights(losses, pull).numpy()
    for start in ([1 / 3] * 3, [0.9, 0.05, 0.05], [0.01, 0.01, 0.98]):
        result = optimize.minimize(
            loss,
            start,
            method="SLSQP",
            bounds=[(1e-9, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert loss(weights) <= result.fun + 1e-9
        np.testing.assert_allclose(weights, result.x, atol=1e-4)


def test_a_better_method_gets_all_the_weight_as_rows_are_added():
    """Its density is e times that of the other at every row: w → N/(N + pull) + pull/2/(N+pull)."""
    shares = []
    for rows in (5, 50, 5000):
        better = torch.zeros(rows, dtype=F64)
        shares.append(float(stacking_weights({"a": better, "b": better + 9.0})[0]))
    assert shares == sorted(shares)
    assert shares[0] < 0.9
    assert shares[-1] > 0.999


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_methods_have_equal_weights(count):
    values = make_losses(30, (0.0,))["method 0"]
    weights = stacking_weights({str(k): values for k in range(count)})
    torch.testing.assert_close(weights, torch.full((count,), 1 / count, dtype=F64))


def test_few_rows_stay_near_equal_weights():
    """With the pull of P rows, one row cannot move a weight below P/K/(1 + P)."""
    one = {"a": torch.tensor([0.0]), "b": torch.tensor([math.inf])}
    weights = stacking_weights(one, pull=4.0)
    torch.testing.assert_close(weights, torch.tensor([0.6, 0.4], dtype=F64))


@pytest.mark.parametrize(
    ("losses", "pull", "message"),
    [
        ({"a": torch.empty(0)}, 2.0, "needs held-out rows"),
        ({"a": torch.tensor([math.inf]), "b": torch.tensor([math.inf])}, 2.0, "no density"),
        ({"a": torch.tensor([math.nan])}, 2.0, "no density"),
        ({"a": torch.ones(2)}, 0.0, "pull must be a positive"),
    ],
)
def test_rows_and_pulls_that_cannot_be_used(losses, pull, message):
    with pytest.raises(ValueError, match=message):
        stacking_weights(losses, pull)


def test_the_largest_weights_are_kept_in_their_order():
    weights = {"a": 0.5, "b": 0.02, "c": 0.3, "d": 0.18}
    assert keep_largest(weights, 0.05, 2) == pytest.approx({"a": 0.625, "c": 0.375})
    assert keep_largest(weights, 0.9) == {"a": 1.0}
    assert list(keep_largest(weights, 0.0)) == ["a", "b", "c", "d"]


def test_the_loss_of_a_mixture_does_not_underflow():
    losses = {"a": torch.tensor([1000.0, 1.0]), "b": torch.tensor([1001.0, 2.0])}
    expected = torch.tensor([1000.0, 1.0], dtype=F64) - math.log(0.5 + 0.5 * math.exp(-1))
    torch.testing.assert_close(mixture_loss(losses, {"a": 0.5, "b": 0.5}), expected)


def test_a_stack_is_the_mixture_with_these_weights(tmp_path):
    """Three lines of which two are wrong on one side each: the stack is better than all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, generator=generator, dtype=F64)
    y = x + 0.3 * torch.randn(400, 1, generator=generator, dtype=F64)
    net = nn.Linear(1, 1, bias=False, dtype=F64)
    target = bayou.fit(
        net, (x, y), bayou.MAP(steps=1), likelihood=bayou.Gaussian(0.3), progress=False
    ).target
    lines = {
        name: Empirical(target, target.network, {"weight": torch.full((1, 1, 1), slope, dtype=F64)})
        for name, slope in (("low", 0.8), ("high", 1.2), ("far", 9.0))
    }
    stacked = bayou.stack(lines, (x, y))
    assert isinstance(stacked, Mixture)
    assert stacked.members == 2  # "far" has a weight of less than .005
    losses = {name: -line.predict(x).log_prob(y) for name, line in lines.items()}
    weights = stacking_weights(losses)
    torch.testing.assert_close(stacked.weights, weights[:2] / weights[:2].sum())
    nll = -float(stacked.predict(x).log_prob(y).mean())
    assert nll < min(float(values.mean()) for values in losses.values())
    assert f"the mixture {float(stacked.weights[0]):.2f} low + " in stacked.choice
    trials = stacked.selection[0]["trials"]
    assert [trial["method"] for trial in trials] == ["low", "high", "far"]
    assert bayou.stack(list(lines.values()), (x, y)).members == 2
    with pytest.raises(ValueError, match="at least one posterior"):
        bayou.stack([], (x, y))
