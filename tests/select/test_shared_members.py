"""The name tabm: its plan, its guides and its fit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import bayou
from bayou.guides import Delta, RankOne
from bayou.network.target import Target
from bayou.select import by_name
from bayou.select.recipes import SharedMembers
from bayou.select.shared_members import (
    LARGE_STEPS,
    MIN_ROWS_WITHOUT_MODE,
    STEPS_AT_MODE,
    begins_at_mode,
    best_epoch,
    share_members,
    with_early_stopping,
    with_length_of_many,
)
from bayou.training.data import as_data


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    noise = 0.2 * torch.randn(200, 1, generator=generator, dtype=torch.float64)
    return x, x[:, :1].sin() + noise


def make_net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, outputs)).double()


def test_weights_of_layers_have_members_and_all_else_is_a_point():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 2))
    target = Target.build(net, bayou.Categorical(), None, 10)
    family = RankOne(3)
    rules = share_members(family, target)
    assert rules["*"] == family
    assert set(rules) == {"0.weight", "2.weight", "2.bias", "3.bias", "*"}
    assert all(spec == Delta(True) for name, spec in rules.items() if name != "*")
    assert "3.bias" not in share_members(replace(family, biases=True), target)
    bayou.bayesianize(net, rules, example=torch.zeros(2, 2, dtype=torch.long))


def test_the_plan_is_a_fit_to_all_rows_for_the_best_epochs_with_the_noise_of_held_out_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MIN_ROWS_WITHOUT_MODE, 2, generator=generator, dtype=torch.float64)
    method = by_name("tabm", members=4, effort=0.01)
    posterior = bayou.fit(make_net(), (x, x[:, :1].sin()), method, progress=False)
    assert posterior.draws == 4
    assert posterior.target.n == 2000
    assert "4 members that share their weights" in posterior.plan
    assert "400 held-out rows" in posterior.plan
    (stage,) = posterior.selection[-1:]
    assert stage["trials"] == [{"epochs": int(posterior.history[-1]["step"] + 1) // 8}]
    outputs = posterior.predict(x).outputs
    assert outputs.shape == (4, 2000, 1)
    assert outputs.std(0).mean() > 1e-3  # members differ


def test_members_of_few_rows_are_fitted_around_a_mode_with_its_noise_and_prior(rows):
    posterior = bayou.fit(make_net(), rows, by_name("tabm", members=4, effort=0.1), progress=False)
    assert posterior.draws == 4
    assert posterior.target.n == 200
    assert "4 members that share their weights, around a mode" in posterior.plan
    assert "prior scale" in posterior.plan
    assert posterior.history[-1]["step"] == STEPS_AT_MODE // 10 - 1
    assert 0.15 < posterior.target.likelihood.gaussian_noise < 0.3
    assert posterior.predict(rows[0]).outputs.std(0).mean() > 1e-3  # members differ


@pytest.mark.slow
def test_few_rows_of_a_narrow_function_are_learned():
    """Early stopping from random weights left an error of .9 standard deviations of sin(6x)."""
    x = torch.linspace(-1, 1, 250, dtype=torch.float64).unsqueeze(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 20), nn.SiLU(), nn.Linear(20, 1)).double()
    posterior = bayou.fit(net, (x, (6 * x).sin()), "tabm", progress=False)
    x_test = torch.linspace(-0.95, 0.95, 100, dtype=torch.float64).unsqueeze(1)
    errors = posterior.predict(x_test).mean - (6 * x_test).sin()
    assert float(errors.square().mean().sqrt()) < 0.1


@pytest.mark.parametrize(
    "settings", [{"steps": 7}, {"validation": 0.3}], ids=["length", "held-out rows"]
)
def test_given_lengths_and_fractions_do_not_begin_at_a_mode(rows, settings):
    target = Target.build(make_net(), bayou.Gaussian(0.5, learn=True), None, 200)
    data = as_data(rows)
    assert begins_at_mode(by_name("tabm").method, target, data)
    assert not begins_at_mode(by_name("tabm", **settings).method, target, data)


@pytest.mark.slow
def test_members_learn_a_function_and_its_noise(rows):
    posterior = bayou.fit(make_net(), rows, "tabm", progress=False)
    p = posterior.predict(rows[0])
    assert float((p.mean - rows[1]).square().mean()) < 0.1
    assert 0.1 < float(p.std.mean()) < 0.4


def test_classes_and_given_lengths_are_fitted(rows):
    y = (rows[1][:, 0] > 0).long()
    posterior = bayou.fit(
        make_net(2), (rows[0], y), by_name("tabm", steps=150, members=2), progress=False
    )
    assert posterior.history[-1]["step"] == 149
    assert len(posterior.held_out_index) == 40
    assert float((posterior.predict(rows[0]).mean.argmax(1) == y).double().mean()) > 0.8


@pytest.mark.parametrize("count", [5, 25])
def test_few_rows_are_fitted(rows, count):
    few = tuple(value[:count] for value in rows)
    posterior = bayou.fit(make_net(), few, by_name("tabm", effort=0.1), progress=False)
    assert posterior.predict(few[0]).mean.isfinite().all()


def test_early_stopping_keeps_given_settings():
    rows = as_data((torch.zeros(1000, 1), torch.zeros(1000, 1)), 100)
    recipe = by_name("tabm", validation=0.3, patience=3)
    method = with_early_stopping(recipe.method, rows)
    assert (method.validation, method.patience, method.epochs) == (0.3, 3, 400)
    few_steps = with_early_stopping(by_name("tabm").method, rows)  # 8 steps in an epoch
    assert few_steps.patience == 38
    many = as_data((torch.zeros(10_000, 1), torch.zeros(10_000, 1)), 100)
    assert with_early_stopping(by_name("tabm").method, many).patience == 16
    given = with_early_stopping(by_name("tabm", steps=7).method, rows)
    assert (given.steps, given.patience) == (7, None)
    with pytest.raises(ValueError, match=r"VI\(RankOne"):
        SharedMembers(bayou.VI())


def test_many_rows_have_a_planned_length_and_a_tenth_is_held_out():
    rows = as_data((torch.zeros(60_000, 1), torch.zeros(60_000, 1)), 512)
    method = with_length_of_many(by_name("tabm", effort=0.5).method, rows)
    assert (method.steps, method.validation, method.schedule) == (LARGE_STEPS // 2, 0.1, "tail")
    assert with_length_of_many(by_name("tabm", epochs=3).method, rows).epochs == 3


def test_the_best_epoch_is_that_of_the_lowest_loss():
    losses = {4: 2.0, 9: 1.0, 14: 1.5}

    class Fitted:
        history = [
            {"step": 2.0},
            *({"step": step, "validation": value} for step, value in losses.items()),
        ]

    assert best_epoch(Fitted(), 5) == 2
