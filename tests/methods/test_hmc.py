"""HMC, NUTS and adjusted MCLMC against posteriors known in closed form.

Tolerances are 4.5 Monte-Carlo standard errors, from the effective sample size of what is averaged.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from tests.methods.chains import check_moments, conjugate_draws, measures
from tests.proofs.regression import COVARIANCE, MEAN

F64 = torch.float64


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            bayou.HMC(chains=24, draws=100, warmup=150, leapfrogs=8, dispersal=0.5), id="HMC"
        ),
        pytest.param(bayou.HMC(chains=24, draws=250, warmup=150, dispersal=0.5), id="HMC, adapted"),
        pytest.param(
            bayou.MCLMC(chains=32, draws=100, warmup=150, adjusted=True, dispersal=0.1),
            id="MCLMC, adjusted",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            bayou.NUTS(chains=16, draws=250, warmup=300, dispersal=1.0),
            id="NUTS, long",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exact_samplers_find_the_conjugate_posterior(method):
    """Chains begin apart, far out in the tails of the posterior."""
    draws = conjugate_draws(method)
    check_moments(draws, MEAN, COVARIANCE)
    assert measures.ess_bulk(draws).min() > 1000
    assert measures.ess_tail(draws).min() > 1000
    assert measures.rhat(draws).max() < 1.03


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayou.MixingWarning")
def test_learned_length_has_more_independent_draws_than_twenty_steps():
    """The sum of two weights has a standard deviation 50 times that of their difference."""
    net, noise = nn.Linear(2, 1, bias=False, dtype=F64), math.sqrt(2 / 2499)
    nn.init.zeros_(net.weight)
    data = torch.tensor([[1.0, -1.0]], dtype=F64), torch.zeros(1, 1, dtype=F64)
    covariance = np.linalg.inv(np.eye(2) + np.array([[1, -1], [-1, 1]]) / noise**2)
    assert np.linalg.cond(covariance) == pytest.approx(2500)
    ess = {}
    for leapfrogs in (None, 20):
        method = bayou.HMC(
            chains=16, draws=40, warmup=100, leapfrogs=leapfrogs, start=None, log_every=1
        )
        posterior = bayou.fit(
            net,
            data,
            method,
            likelihood=bayou.Gaussian(noise),
            prior=bayou.Normal(1.0),
            progress=False,
        )
        draws = posterior.by_chain()["weight"][:, :, 0]
        ess[leapfrogs] = float(measures.ess_mean(draws).min())
        if leapfrogs is None:
            check_moments(draws, np.zeros(2), covariance, min_ess=200)
            lengths = [record["length"] for record in posterior.history]
            assert 1.5 < lengths[-1] < 4  # a quarter of the period is 2.2 in units of the mass
            assert len(set(lengths[99:])) == 1  # fixed after the warm-up
        else:
            assert "length" not in posterior.history[-1]
    assert ess[None] > 5 * ess[20]


def test_temperature_multiplies_the_covariance():
    """p^(1/T) of a Gaussian has T times its covariance."""
    method = bayou.HMC(chains=24, draws=100, warmup=150, leapfrogs=8, temperature=0.25)
    check_moments(conjugate_draws(method), MEAN, 0.25 * COVARIANCE)
