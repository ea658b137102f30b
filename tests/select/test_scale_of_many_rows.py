"""The prior scale of more rows than L-BFGS takes: by modes of minibatches on held-out rows."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.select.prior_scale import has_scale_of_many_rows
from bayou.training.data import as_data

F64 = torch.float64


def rare_classes(rows, columns=20):
    """One class in ten, which hardly depends on x: a network under a wide prior fits the noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator, dtype=F64)
    probability = (0.5 * x[:, 0] - 2.3).sigmoid()
    y = (torch.rand(rows, generator=generator, dtype=F64) < probability).long()
    return x, y


def network(columns=20, outputs=2, hidden=30):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, outputs)).double()


def factor(posterior):
    """Return the factor of the prior scales that the search selected."""
    (record,) = [stage for stage in posterior.selection if stage["stage"] == "prior scale"]
    return min(record["trials"], key=lambda trial: trial["nll"])["scale"]


def test_noisy_classes_get_a_narrow_prior_and_beat_a_constant():
    x, y = rare_classes(5200)
    x_test, y_test = rare_classes(9000)
    x_test, y_test = x_test[5200:], y_test[5200:]
    method = bayou.select.by_name("map", steps=500)
    posterior = bayou.fit(network(), (x, y), method, seed=0, progress=False)
    assert factor(posterior) < 1
    assert "held-out rows" in posterior.plan
    rate = float(y.double().mean())
    share = float(y_test.double().mean())
    constant = -share * math.log(rate) - (1 - share) * math.log(1 - rate)
    assert -float(posterior.predict(x_test).log_prob(y_test).mean()) < constant


@pytest.mark.parametrize("likelihood", [None, "gamma"])
def test_few_rows_of_a_network_with_dropout_hold_out_a_fifth(likelihood):
    x, y = rare_classes(100, columns=3)
    if likelihood is not None:
        y = 1.0 + x[:, :1].square()
    torch.manual_seed(0)
    outputs = 2 if likelihood is None else 1
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, outputs)).double()
    method = bayou.select.by_name("dropout", steps=20)
    posterior = bayou.fit(net, (x, y), method, likelihood=likelihood, progress=False)
    assert "on 20 held-out rows" in posterior.plan
    assert ("shape" in posterior.plan) == (likelihood == "gamma")


def test_a_prior_that_was_given_is_kept():
    x, y = rare_classes(5200)
    posterior = bayou.fit(
        network(),
        (x, y),
        bayou.select.by_name("map", steps=5),
        prior=bayou.Normal(1.0),
        progress=False,
    )
    assert not [stage for stage in posterior.selection if stage["stage"] == "prior scale"]


def test_a_regression_of_many_rows_selects_its_prior_scale():
    """Of 40 columns one has a small effect: under the default prior the network fits the noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5200, 40, generator=generator, dtype=F64)
    y = x[:, :1] + 3.0 * torch.randn(5200, 1, generator=generator, dtype=F64)
    posterior = bayou.fit(
        network(40, 1), (x, y), bayou.select.by_name("map", steps=400), seed=0, progress=False
    )
    assert factor(posterior) < 1
    assert "prior scale" in posterior.plan


@pytest.mark.parametrize(
    ("rows", "net", "start", "is_searched"),
    [
        (6000, network(), MAP(), True),
        (80_000, network(), MAP(), False),  # 692 weights: 0.004 nats
        (6000, network(), MAP(validation=0.1), False),
        (
            6000,
            nn.Sequential(
                nn.Unflatten(1, (1, 20)), nn.Conv1d(1, 50, 3), nn.Flatten(), nn.Linear(900, 2)
            ).double(),
            MAP(),
            False,
        ),
    ],
)
def test_the_search_is_for_tables_whose_noise_a_network_can_fit(rows, net, start, is_searched):
    x, y = rare_classes(rows)
    target = Target.build(net, bayou.Categorical(), bayou.Normal(1.0), rows)
    assert has_scale_of_many_rows(start, target, as_data((x, y))) is is_searched
