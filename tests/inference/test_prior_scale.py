"""The scale of the prior of a Laplace posterior of classes, selected on held-out rows."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.prior_scale import select_within_chance
from bayou.metrics import standard_error

GUESS = torch.full((30,), math.log(2))


def constant(value):
    return torch.full((30,), value, dtype=torch.float64)


def test_among_priors_within_chance_the_evidence_decides():
    """Thirty rows of .01 nats and one of .69 have a standard error of .022, of which .02 count."""
    nll = [constant(0.010), constant(0.011), constant(0.025), constant(0.029), constant(0.2)]
    assert select_within_chance(nll, GUESS, [-9.0, -8.0, -7.0, -6.0, -5.0]) == 3
    assert select_within_chance(nll, GUESS, [-9.0, -8.0, -5.0, -6.0, -4.0]) == 2
    assert select_within_chance(nll, GUESS, [0.0, -8.0, -5.0, -6.0, -4.0]) == 0


def test_a_prior_that_predicts_better_by_more_than_chance_is_selected():
    nll = [constant(0.9), constant(0.4), constant(0.9)]
    assert select_within_chance(nll, GUESS, [0.0, -100.0, 0.0]) == 1


def moons():
    from sklearn.datasets import make_moons

    x, y = make_moons(1200, noise=0.2, random_state=0)
    return x, y


def rare_class():
    """95 % of the rows have one class."""
    from sklearn.datasets import make_classification

    x, y = make_classification(1300, n_features=8, n_informative=4, weights=[0.95], random_state=0)
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize(("make", "rows"), [(moons, 200), (rare_class, 300)])
def test_laplace_by_name_of_classes_is_not_a_point(make, rows):
    """Before, the mutual information was below 1e-4 nats; fresh rows have the NLL of the mode up to
    its error.
    """
    assert callable(make)
    x, y = make()
    x = (x - x[:rows].mean(0)) / x[:rows].std(0)
    inputs = torch.as_tensor(x, dtype=torch.float32)
    labels = torch.as_tensor(y)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs.shape[1], 50), nn.Tanh(), nn.Linear(50, 2))
    train = (inputs[:rows], labels[:rows])
    mode = bayou.fit(net, train, "map")
    posterior = bayou.fit(net, train, "laplace")
    far = posterior.predict(4 * inputs[rows : rows + 300], 200)
    assert far.mutual_information.mean() > 0.02
    nll_of_mode = -mode.predict(inputs[rows:]).log_prob(labels[rows:])
    nll = -posterior.predict(inputs[rows:], 200).log_prob(labels[rows:])
    assert nll.mean() < float(nll_of_mode.mean()) + standard_error(nll_of_mode)
