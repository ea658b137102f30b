"""VI: the defaults of large networks, and score-function gradients of the rates of dropout."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou import VI
from bayou.likelihoods import Categorical
from bayou.methods.vi import BY_UNIT
from bayou.network.target import Target
from bayou.training.convergence import cell_width
from tests.training.runs import make_objective, small

F64 = torch.float64

ONE = torch.ones((), dtype=F64)


def rows(n, seed):
    """Three classes."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def classes(net, prior=None):
    return Target.build(net, Categorical(), prior, 200)


def deep(width=50):
    torch.manual_seed(0)
    hidden = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), *hidden, nn.Linear(width, 3))


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")  # so short
@pytest.mark.slow
@pytest.mark.parametrize("method", [VI(effort=0.25), bayou.IVON(effort=0.25)])
def test_a_large_network_with_few_rows_learns(method):
    data, test = rows(200, 1), rows(500, 2)
    found = bayou.fit(deep(), data, method=method, progress=False)
    assert float(-found.predict(test[0], seed=0).log_prob(test[1]).mean()) < 0.7  # a constant: 1.04
    bound = bayou.elbo(found, data, 20, seed=0)
    assert bound.value > -200 * 1.0  # what no constant has: −N·1.04
    assert found.target.prior == BY_UNIT
    assert found.history[-1]["warmup"] == 0.4
    assert bound.value == pytest.approx(bound.log_likelihood - bound.kl)


@pytest.mark.parametrize(
    ("net", "prior", "options"),
    [
        (deep(40), None, {}),
        (deep(), bayou.Normal(1.0), {}),
        (deep(), None, {"steps": 3000}),
        (deep(), None, {"epochs": 100}),
        (deep(), None, {"schedule": "cosine"}),
    ],
)
def test_small_networks_and_given_settings_are_not_adapted(net, prior, options):
    target = classes(net, prior)
    for method in (VI(**options), bayou.IVON(**options)):
        same, still = method.adapt_to_size(target)
        assert same is method
        assert still is target


def test_given_settings_of_a_large_network_stay():
    target = classes(deep())
    method, changed = VI(lr=0.002, warmup=0.1, start=bayou.MAP(steps=2)).adapt_to_size(target)
    assert (method.lr, method.scale_lr, method.warmup, method.start) == (
        0.002,
        0.01,
        0.1,
        bayou.MAP(steps=2),
    )
    assert changed.prior == BY_UNIT
    assert VI(cold=True, samples=3).adapt_to_size(target)[0].cold


def test_wide_layers_have_a_smaller_learning_rate():
    wide = nn.Sequential(nn.Linear(10, 800), nn.ReLU(), nn.Linear(800, 10))
    for net, lr in ((deep(), 0.01), (wide, 0.0032)):
        method, _ = VI().adapt_to_size(classes(net))
        assert method.lr == pytest.approx(lr)
        assert method.scale_lr == 0.01
    wide[2].requires_grad_(False)
    assert VI().adapt_to_size(classes(wide))[0].lr == 0.01


def test_frozen_weights_are_not_counted():
    net = deep()
    net[2].requires_grad_(False)
    target = classes(net)
    assert VI().adapt_to_size(target)[1] is target


@pytest.mark.parametrize("batches", [1, 3, 7, 50, 199, 1000])
def test_the_warm_up_ends_before_the_first_test_of_convergence(
    batches,
):
    plan = max(2000, 10 * batches)
    width, turn = cell_width(plan, batches), VI().turn(plan)
    cells = turn // width
    first = (cells - 2 * (cells // 5)) * width
    assert first >= VI().large_network_settings(64)["warmup"] * plan


def test_the_start_of_a_large_network_has_the_original_prior():
    start = bayou.MAP(steps=2)  # which cannot learn a prior
    for method in (VI(start=start, effort=0.002), bayou.IVON(start=start, effort=0.002)):
        found = bayou.fit(deep(), rows(50, 1), method=method, progress=False)
        assert found.target.prior == BY_UNIT


def enumerated(monkeypatch, loss, bayesian, x, y, masks):
    """E[gradient of the rates] over every mask, each with its probability: exact, no Monte Carlo.

    ``masks``: guide → shape (n, *units) of the uniforms that one loss draws for it.
    """
    sizes = [math.prod(shape) for shape in masks.values()]
    rates = [torch.sigmoid(guide.logit_p.detach()) for guide in masks]
    order, drawn = list(masks), []

    def uniform(n, event, like, seed=None, start=0):
        shape = (n, *event)
        guide = order[len(drawn)]
        assert shape == masks[guide]
        drawn.append(guide)
        begin = sum(sizes[: len(drawn) - 1])
        return torch.tensor(bits[begin : begin + sizes[len(drawn) - 1]], dtype=F64).reshape(shape)

    monkeypatch.setattr("bayou.guides.dropout.rng.uniform", uniform)
    mean, second = 0.0, 0.0
    for bits in itertools.product([0.0, 1.0], repeat=sum(sizes)):  # u = 0 keeps, u = 1 drops
        drawn.clear()
        prob, begin = 1.0, 0
        for size, rate in zip(sizes, rates, strict=True):
            dropped = sum(bits[begin : begin + size])
            prob *= float(rate**dropped * (1 - rate) ** (size - dropped))
            begin += size
        bayesian.zero_grad()
        loss(x, y, ONE)[0].backward()
        gradient = torch.stack([guide.logit_p.grad for guide in order])
        mean, second = mean + prob * gradient, second + prob * gradient.square()
    return mean, second - mean.square()


def exact(loss, bayesian, guides, value):
    """The gradient of −ELBO/N in the rates, through E[log-likelihood] = Σ_masks
    P(mask)·log-likelihood(mask).

    ``value(masks, kept)``: the log-likelihood of all data for one mask (units,) per guide.
    """
    logits = [guide.logit_p.detach().clone().requires_grad_() for guide in guides]
    kept = [torch.sigmoid(-logit) for logit in logits]
    units = [
        guide.center.numel() if guide.axis is None else guide.center.shape[guide.axis]
        for guide in guides
    ]
    total = 0.0
    for bits in itertools.product([0.0, 1.0], repeat=sum(units)):
        masks = torch.tensor(bits, dtype=F64).split(units)
        prob = math.prod(
            torch.prod(k**m * (1 - k) ** (1 - m)) for k, m in zip(kept, masks, strict=True)
        )
        total = total + prob * value(masks, kept)
    kl = sum(guide._kl(count) for guide, count in zip(guides, units, strict=True))
    of_kl = torch.stack(torch.autograd.grad(kl, [guide.logit_p for guide in guides]))
    return (of_kl - torch.stack(torch.autograd.grad(total, logits))) / loss.target.n


def dropped(per, samples, rows=8, features=3):
    loss, bayesian, x, y = make_objective(
        bayou.Dropout(0.3, per=per, rate="reinforce"), samples, net=nn.Linear(features, 1)
    )
    x, y = x[:rows], y[:rows]
    guide, bias = bayesian.guides

    def value(masks, kept):
        weight = guide.center.detach() * masks[0] / kept[0]
        return loss.target.log_likelihood(
            bayesian.call({"weight": weight, "bias": bias.value.detach()}, x), y
        )

    return loss, bayesian, x, y, exact(loss, bayesian, [guide], value)


@pytest.mark.parametrize(
    ("per", "samples", "rows"),
    [("weight", 1, 8), ("weight", 2, 8), ("unit", 1, 2), ("unit", 2, 1), ("unit", 1, 1)],
)
def test_the_score_function_gradient_of_the_rate_is_unbiased(per, samples, rows, monkeypatch):
    """Rows are independent, so a mask for each unit and row is the same on average."""
    loss, bayesian, x, y, truth = dropped(per, samples, rows)
    assert bayesian.per_example == (per == "unit")
    loss.baseline.observe(torch.tensor(-2.0, dtype=F64))
    shape = (samples * rows, 3) if bayesian.per_example else (samples, 1, 3)
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {bayesian.guides[0]: shape})
    assert_close(mean, truth, atol=1e-12, rtol=0)
    assert truth.abs() > 1e-3


def test_masks_per_example_and_per_draw_are_unbiased_together(monkeypatch):
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    rules = {
        "0.weight": bayou.Dropout(0.3, per="unit", rate="reinforce"),
        "2.weight": bayou.Dropout(0.4, per="weight", rate="reinforce"),
        "*": bayou.Delta(),
    }
    loss, bayesian, x, y = make_objective(rules, 2, net=net, features=1)
    x, y = x[:2], y[:2]
    means = {name: value.detach() for name, value in bayesian.mean().items()}

    def value(masks, kept):
        first, last = means["0.weight"] * masks[0] / kept[0], means["2.weight"] * masks[1] / kept[1]
        return loss.target.log_likelihood(
            bayesian.call(means | {"0.weight": first, "2.weight": last}, x), y
        )

    one, two = bayesian.guides[0], bayesian.guides[2]
    truth = exact(loss, bayesian, [one, two], value)
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {one: (4, 1), two: (2, 1, 2)})
    assert_close(mean, truth, atol=1e-12, rtol=0)


def test_rows_that_depend_on_each_other_share_their_reward(monkeypatch):
    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=False))
    rules = {"0.weight": bayou.Dropout(0.3, per="unit", rate="reinforce"), "*": bayou.Delta()}
    loss, bayesian, x, y = make_objective(rules, net=net, features=2)
    x, y = x[:3], y[:3]
    guide = bayesian.guides[0]
    logit = guide.logit_p.detach().clone().requires_grad_()
    kept, total = torch.sigmoid(-logit), 0.0
    for bits in itertools.product([0.0, 1.0], repeat=6):
        mask = torch.tensor(bits, dtype=F64).reshape(3, 2)
        prob = torch.prod(kept**mask * (1 - kept) ** (1 - mask))
        f = (x * mask / kept) @ guide.center.detach().T + bayesian.guides[1].value.detach()
        f = (f - f.mean(0)) / (f.var(0, unbiased=False) + 1e-5).sqrt()
        total = total + prob * loss.target.log_likelihood(f, y)
    truth = (
        -torch.autograd.grad(total, logit)[0] / 8
        + torch.autograd.grad(guide._kl(2), guide.logit_p)[0] / 8
    )
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {guide: (3, 2)})
    assert_close(mean.reshape(truth.shape), truth, atol=1e-10, rtol=0)


def test_the_baseline_lowers_the_variance(monkeypatch):
    def variance(samples, settled):
        loss, bayesian, x, y, _ = dropped("weight", samples)
        if settled:
            with torch.no_grad():
                rewards = [loss(x, y, ONE)[1]["reward"] for _ in range(50)]
            for reward in rewards:
                loss.baseline.observe(reward)
        with monkeypatch.context() as patch:
            return float(
                enumerated(patch, loss, bayesian, x, y, {bayesian.guides[0]: (samples, 1, 3)})[1]
            )

    assert variance(1, True) < 0.5 * variance(1, False)
    assert variance(2, False) < 0.5 * variance(1, False)


def test_a_learned_rate_moves_and_the_reward_is_not_in_the_history():
    posterior = small(guide=bayou.Dropout(0.5, rate="reinforce"), steps=60, lr=0.01)
    moved = posterior.bayesian.guides[0].logit_p.detach()
    assert abs(float(moved)) > 0.1
    assert "reward" not in posterior.history[0]
