"""Which layers are random, and which of several methods is selected, by held-out rows."""

import math
from dataclasses import dataclass
from functools import partial
from typing import final

import pytest
import torch
from torch import nn

import bayou
from bayou.core import params
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Empirical
from bayou.select import NamedMethod, by_name, plan, regularization_path
from bayou.select.best_method import compare_fits
from bayou.select.random_layers import LastLayer
from bayou.training.data import as_data


def several_classes():
    """240 rows of four classes, and a network of 1,264 weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long() + 2 * (x[:, 3] > 0).long()
    torch.manual_seed(0)
    return (
        x,
        y,
        nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)),
    )


START = bayou.MAP(steps=100, lr=5e-3)


def fit_layers(
    method,
    net,
    rows,
    prior=None,
    likelihood=None,
):
    """Fit a method over the layers that held-out rows select, to rows as they are."""
    target = Target.build(
        net, likelihood or bayou.Categorical(), prior or bayou.Normal(1.0), len(rows[1])
    )
    recipe = NamedMethod(method, START, selects_layers=True)
    return plan(recipe, target, rows).fit()


@pytest.mark.parametrize(
    "name", ["ffg", "ivon", "sgld", pytest.param("mnf", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning")
def test_the_last_layer_is_random_where_all_layers_predict_worse(name, tmp_path):
    """Forty rows for 1,264 weights: over all of them a family collapses, and chains lose what the
    mode has learned.
    """
    x, y, net = several_classes()
    named = by_name(name, steps=80, chains=2)
    prior = bayou.Normal("fan_in", gain=3.0)
    posterior = fit_layers(named.method, net, (x[:40], y[:40]), prior)
    assert (posterior.choice or "").startswith("last layer")
    learned = ["last layer, without a prior of the others"] if name in ("ffg", "mnf") else []
    tried = ["last layer", *learned, "all layers", "mode"]  # and no wider prior than the given one
    assert [trial["method"] for trial in posterior.selection[0]["trials"]] == tried
    draws = posterior.sample(4, seed=0)
    assert {name for name, value in draws.items() if bool((value.std(0) > 0).any())} == {
        "4.weight",
        "4.bias",
    }
    if name in ("ivon", "sgld"):
        mode = bayou.fit(net, (x[:40], y[:40]), START, prior=prior).sample(1)
        assert all(
            torch.equal(draws[name][:1], mode[name])
            for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        )
    p = posterior.predict(x[40:], samples=50)
    assert -float(p.log_prob(y[40:]).mean()) < math.log(4) - 0.3
    posterior.save(tmp_path / "p.bayou")
    again = bayou.load(tmp_path / "p.bayou", net)  # whose weights are the initial ones
    assert torch.equal(again.predict(x[40:], samples=50).mean, p.mean)


def test_a_choice_of_layers_starts_at_the_mode_of_all_rows():
    """A family that does not move from its start."""
    x, y, net = several_classes()
    still = bayou.VI(bayou.MeanField(), steps=1, lr=1e-12, scale_lr=1e-12)
    posterior = fit_layers(still, net, (x[:40], y[:40]))
    mode = bayou.fit(net, (x[:40], y[:40]), START).sample(1)
    expected = {name: value[0] for name, value in mode.items()}
    torch.testing.assert_close(posterior.mean(), expected, rtol=0, atol=1e-6)
    numbers = fit_layers(still, net, (x[:40], x[:40, :4]), likelihood=bayou.Gaussian(0.3))
    assert not numbers.choice


def test_a_wider_prior_is_that_of_the_last_layer():
    x, y, net = several_classes()
    target = Target.build(net, bayou.Categorical(), bayou.Normal("fan_in", gain=3.0), 40)
    still = bayou.VI(bayou.MeanField(), start="network", steps=1)
    method, wider_target = LastLayer(("4.weight", "4.bias"), scale=2.0).restrict(still, target)
    posterior = method.fit(wider_target, (x[:40], y[:40]))
    for name, prior in posterior.target.priors.items():
        wider = prior.log_scale - target.priors[name].log_scale
        assert float(wider.detach()) == pytest.approx(
            math.log(2.0) if name[0] == "4" else 0.0, abs=1e-6
        )


def at_start(target):
    """Return the network as it is as a posterior."""
    return Empirical(target, target.network, params.stack([target.start()]))


TRIALS = [
    # chains at a mode have a third of 10,000 steps: half of that where layers are selected
    (bayou.SGLD(start=None), [(1666, False)] * 3),
    # from a mode 300 steps over all rows, and more until convergence; 150 for each candidate
    (bayou.VI(), [(150, False)] * 3 + [(300, True)]),
    (bayou.IVON(), [(150, False)] * 2 + [(300, True)]),
    (bayou.VI(steps=60), [(60, False)] * 4),  # a number that was given is kept
    # half of the temperatures
    (bayou.Annealed(temperatures=30), [(15, False)] * 2 + [(30, True)]),
]


@pytest.mark.parametrize(("method", "expected"), TRIALS, ids=lambda value: type(value).__name__)
def test_fits_that_are_compared_are_shorter(method, expected, monkeypatch):
    x, y, net = several_classes()
    lengths = []

    def fit(self, target, data, **options):
        if isinstance(self, bayou.SGLD):
            lengths.append((self.steps, False))
        elif isinstance(self, bayou.Annealed):
            lengths.append((self.temperatures, self.of.open_ended))
        else:
            steps = self.total_steps(as_data(data, self.batch_size))
            lengths.append((steps, self.open_ended))
        return at_start(target)

    monkeypatch.setattr(type(method), "fit", fit)
    posterior = fit_layers(method, net, (x, y))
    assert lengths == expected
    assert len(posterior.sample(1)) == 6  # with the points below


@pytest.mark.parametrize(("name", "modes"), [("map", 1), ("ffg", 2)])
def test_modes_of_classes_are_found_by_full_passes(name, modes, monkeypatch):
    """The price of a selection, by count: 30 passes for each of five gains in one batch and for
    each further mode, no steps.
    """
    x, y, _ = several_classes()
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    walked = []
    plain = regularization_path.Path.__init__

    def recorded(self, *args, **options):
        plain(self, *args, **options)
        walked.append((self, len(self.masks)))

    monkeypatch.setattr(regularization_path.Path, "__init__", recorded)
    monkeypatch.setattr(bayou.MAP, "fit", None)
    posterior = bayou.fit(net, (x[:60], y[:60]), by_name(name, effort=0.05))
    scales = [3 ** (k / 2) for k in range(-2, 3 if name == "map" else 2)]
    assert [trial["scale"] for trial in posterior.selection[0]["trials"]] == pytest.approx(scales)
    assert [problems for _, problems in walked] == [len(scales)] + [1] * modes
    tried = [trial.get("method") for stage in posterior.selection[1:] for trial in stage["trials"]]
    assert ("last layer, with a wider prior" in tried) == (modes == 2)  # no prior was given
    passes = regularization_path.LOG_PROB_PASSES / 4
    assert sum(path.passes for path, _ in walked) <= (5 + modes) * passes


@final
@dataclass(frozen=True)
class Sure(Method):
    """A network whose second class has the given logits in even and in odd rows, x = ±1."""

    even: float
    odd: float

    def fit(self, target, data, **options):
        half, middle = (self.even - self.odd) / 2, (self.even + self.odd) / 2
        stack = {"weight": torch.tensor([[[0.0], [half]]]), "bias": torch.tensor([[0.0, middle]])}
        return Empirical(target, target.network, stack)


def test_the_first_method_within_the_standard_errors_is_selected():
    """Both rows have class 1; the second method is better in even rows and worse in odd ones."""
    x = torch.tensor([1.0, -1.0]).repeat(50).unsqueeze(1)
    rows = (x, torch.ones(100, dtype=torch.long))
    held_out = as_data(rows, 128)

    def choice(methods, errors):
        fits = {
            name: partial(bayou.fit, nn.Linear(1, 2), rows, method)
            for name, method in methods.items()
        }
        return compare_fits(fits, held_out, 0, stages=(1, len(fits)), errors=errors).best

    methods = {
        "equal": Sure(1.0, 1.0),
        "better on average": Sure(5.0, 0.8),
        "bad": Sure(-9.0, -9.0),
    }
    assert choice(methods, 0.0) == "better on average"
    # by .12 ± .04 nats, with as many even as odd rows
    assert choice(methods, 1.0) == "better on average"
    assert choice(methods, 100.0) == "equal"
    # "varied" has the lowest NLL and large errors; "better" is better than "equal" in every row, by
    # as much
    methods = {"equal": Sure(1.0, 1.0), "better": Sure(1.2, 1.2), "varied": Sure(9.0, 0.4)}
    assert choice(methods, 2.0) == "better"
