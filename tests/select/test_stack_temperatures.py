"""Temperatures of a stack: the optimum with the weights, and what becomes of it in a mixture."""

import itertools
import math
from dataclasses import dataclass
from typing import final

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.method import Method
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Empirical, Mixture
from bayou.select import Auto
from bayou.select.stack_temperatures import (
    TEMPERATURES,
    describe_temperatures,
    temper_stack,
    tempered_nll,
)
from bayou.select.stacking import mixture_loss, stacking_weights

F64 = torch.float64
ONE = TEMPERATURES.index(1.0)


def draw_logits(rows, scale, seed=0, classes=3):
    """Return logits, and classes that softmax(scale·logits) draws."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(rows, classes, generator=generator, dtype=F64)
    y = torch.multinomial((scale * logits).softmax(-1), 1, generator=generator)[:, 0]
    return logits, y


def losses_of(logits, y):
    """Return −log p of every row at each temperature, (T, N)."""
    return torch.stack(
        [-(logits / t).log_softmax(-1).gather(1, y[:, None])[:, 0] for t in TEMPERATURES]
    )


def two_components(rows, seed):
    """Return losses of two noisy copies of the logits, the second half as large."""
    logits, y = draw_logits(rows, 1.0, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    noise = torch.randn(2, *logits.shape, generator=generator, dtype=F64)
    first, second = logits + 0.5 * noise[0], 0.5 * (logits + 0.8 * noise[1])
    return {"first": losses_of(first, y), "second": losses_of(second, y)}


def objective(losses, weights, places, pull, spread):
    """Compute the sum that is maximized."""
    tempered = {name: losses[name][place] for name, place in places.items()}
    logs = [math.log(TEMPERATURES[place]) for place in places.values()]
    log_weights = sum(math.log(weight) for weight in weights.values())
    value = -float(mixture_loss(tempered, weights).sum()) + pull / len(weights) * log_weights
    return value - sum(log**2 for log in logs) / (2 * spread**2)


@pytest.mark.parametrize("spread", [0.1, 0.5])
@pytest.mark.parametrize("rows", [20, 150])
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_and_temperatures_are_the_best_of_all(rows, spread, seed):
    """All 441 pairs of temperatures, each with the best weights for it."""
    losses = two_components(rows, seed)
    stack = temper_stack(losses, 2.0, spread=spread)
    places = {name: TEMPERATURES.index(value) for name, value in stack.temperatures.items()}
    reached = objective(losses, stack.weights, places, 2.0, spread)

    def best_at(pair):
        places = dict(zip(losses, pair, strict=True))
        tempered = {name: losses[name][place] for name, place in places.items()}
        weights = dict(zip(losses, stacking_weights(tempered).tolist(), strict=True))
        return objective(losses, weights, places, 2.0, spread)

    best = max(map(best_at, itertools.product(range(len(TEMPERATURES)), repeat=2)))
    assert reached == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [(2.0, 0.5), (0.5, 2.0), (1.0, 1.0)])
def test_a_component_with_logits_of_a_wrong_scale_is_corrected(scale, expected):
    logits, y = draw_logits(4000, scale)
    stack = temper_stack({"only": losses_of(logits, y)})
    assert stack.temperatures["only"] == pytest.approx(expected, rel=0.11)
    assert stack.weights == {"only": 1.0}


def test_few_rows_and_a_small_spread_stay_at_one():
    logits, y = draw_logits(20, 2.0)
    stack = temper_stack({"only": losses_of(logits, y)}, spread=0.01)
    assert stack.temperatures == {"only": 1.0}


def test_what_is_left_out_does_not_set_the_temperatures_of_others():
    """They are those that the kept components have alone."""
    losses = two_components(150, 0)
    logits, y = draw_logits(150, 1.0)
    losses["opposite"] = losses_of(-3 * logits, y)
    stack = temper_stack(losses, least=0.1, most=2)
    alone = temper_stack({name: losses[name] for name in stack.weights})
    assert stack.weights == pytest.approx(alone.weights)
    assert stack.temperatures == alone.temperatures
    assert len(stack.weights) == 2


@pytest.mark.parametrize("spread", [0.0, -1.0, math.nan])
def test_a_spread_must_be_positive(spread):
    with pytest.raises(ValueError, match="spread"):
        temper_stack(two_components(20, 0), spread=spread)


def test_losses_are_those_of_a_posterior_with_the_temperature():
    logits, y = draw_logits(30, 1.0)
    outputs = torch.stack([logits, logits.flip(0)])
    net = nn.Linear(3, 3, dtype=F64)
    posterior = bayou.fit(net, (logits, y), bayou.MAP(steps=1), progress=False)
    likelihood = posterior.target.likelihood
    values = tempered_nll(Predictive(likelihood, outputs), y)
    assert values.shape == (len(TEMPERATURES), 30)
    for place in (0, ONE, -1):
        tempered = likelihood.temper(outputs, TEMPERATURES[place])
        torch.testing.assert_close(values[place], -Predictive(*tempered).log_prob(y))


def test_temperatures_are_stated_unless_all_are_one():
    assert describe_temperatures({"a": 1.0}) == ()
    assert describe_temperatures({"a": 1.0, "b": 0.5}) == (
        "temperatures of logits 1.00 of a, 0.50 of b",
    )


@final
@dataclass(frozen=True)
class Scaled(Method):
    """The point f = scale·(0, x) + shift, whatever the rows."""

    scale: float

    def fit(self, target, data, **options):
        weight = torch.tensor([[[0.0], [self.scale]]])
        posterior = Empirical(target, target.network, {"weight": weight}, [{"step": 0.0}])
        posterior.stopped = "finished"
        return posterior


def draw_classes(rows, seed):
    """Return x, and classes with the logit 2x."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, generator=generator)
    return x, (torch.rand(rows, generator=generator) < torch.sigmoid(2 * x[:, 0])).long()


def fit(methods, **settings):
    """Fit methods to such classes."""
    x, y = draw_classes(600, seed=0)
    net = nn.Linear(1, 2, bias=False)
    return net, x, bayou.fit(net, (x, y), Auto(methods, **settings), progress=False)


def test_flat_components_are_sharpened_in_the_mixture_of_auto(tmp_path):
    """Logits of half the scale: fresh rows are predicted better, also by a copy from a file."""
    methods = {"flat": Scaled(0.8), "flatter": Scaled(0.7)}
    net, _, posterior = fit(methods)
    assert isinstance(posterior, Mixture)
    assert posterior.components[0].temperature < 0.6
    assert f"{posterior.components[0].temperature:.2f} of flat" in posterior.choice
    assert "temperatures of logits" in posterior.plan
    _, _, without = fit(methods, spread=None)
    assert all(component.temperature == 1.0 for component in without.components)
    assert "temperature" not in without.choice
    x, y = draw_classes(2000, seed=1)
    nll = {
        name: -float(p.predict(x).log_prob(y).mean())
        for name, p in {"with": posterior, "without": without}.items()
    }
    assert nll["with"] < nll["without"] - 0.03
    posterior.save(tmp_path / "auto.bayou")
    loaded = bayou.load(tmp_path / "auto.bayou", net)
    for component, copied in zip(posterior.components, loaded.components, strict=True):
        assert component.temperature == copied.temperature
    assert torch.equal(loaded.predict(x).outputs, posterior.predict(x).outputs)


def test_one_method_alone_has_a_temperature_too():
    _, _, posterior = fit({"flat": Scaled(1.0)})
    assert isinstance(posterior, Empirical)
    assert posterior.temperature == pytest.approx(0.5, rel=0.25)
    assert posterior.choice.startswith("flat was selected")
    assert "temperatures of logits" in posterior.choice
    assert [record["stage"] for record in posterior.selection] == ["method"]


def test_numbers_have_no_temperatures():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 1, generator=generator)
    methods = {"map": bayou.MAP(steps=5), "other": bayou.MAP(steps=9)}
    posterior = bayou.fit(
        nn.Linear(1, 1), (x, x), Auto(methods), likelihood=bayou.Gaussian(0.5), progress=False
    )
    assert "temperature" not in posterior.choice


def test_fewer_than_a_hundred_held_out_rows_select_no_temperatures():
    """Two fifths of 240 rows are 96."""
    x, y = draw_classes(240, seed=0)
    net = nn.Linear(1, 2, bias=False)
    posterior = bayou.fit(net, (x, y), Auto({"flat": Scaled(1.0)}), progress=False)
    assert posterior.temperature == 1
    assert "temperature" not in posterior.choice
