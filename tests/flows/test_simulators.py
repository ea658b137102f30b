"""The simulators of experiments/measure/sbi.py: moments of x given theta, and posteriors in closed form."""

import math

import torch

from experiments.measure.sbi import TASKS
from tests.flows.tools import close

N = 40_000


def test_slcp_has_the_mean_and_covariance_of_its_parameters():
    theta = torch.tensor([1.0, -2.0, 1.2, -0.8, 0.7])
    points = TASKS["slcp"].simulate(theta.expand(N, 5)).reshape(-1, 2)
    first, second, rho = 1.2**2, 0.8**2, math.tanh(0.7)
    expected = torch.tensor([[first**2, rho * first * second], [rho * first * second, second**2]])
    close(points.mean(0), theta[:2], atol=4 * first / math.sqrt(4 * N))
    close(points.T.cov(), expected, atol=4 * math.sqrt(2) * first**2 / math.sqrt(4 * N))


def test_two_moons_are_half_circles_at_two_parameters_of_one_place():
    simulate = TASKS["two_moons"].simulate
    for theta in ([0.3, 0.5], [-0.5, -0.3]):  # equal |θ₁ + θ₂| and θ₂ − θ₁
        x = simulate(torch.tensor(theta).expand(N, 2)) - torch.tensor(
            [0.25 - 0.8 / math.sqrt(2), 0.2 / math.sqrt(2)]
        )
        radius = x.norm(dim=-1)
        assert abs(radius.mean() - 0.1) < 4 * 0.01 / math.sqrt(N)
        assert x[:, 0].min() > -1e-6


def test_statistics_of_the_spikes_have_their_expectation():
    """The count of spikes is binomial with p = ½ at theta = 0, and the offset shifts its logit."""
    simulate = TASKS["bernoulli_glm"].simulate
    for offset in (0.0, 1.0):
        theta = torch.zeros(N, 10)
        theta[:, 0] = offset
        p = 1 / (1 + math.exp(-offset))
        assert abs(simulate(theta)[:, 0].mean() - 100 * p) < 4 * math.sqrt(100 * p * (1 - p) / N)


def test_the_linear_posterior_is_half_of_the_observation():
    """E[theta | x] = x/2 for prior and noise of equal variance: the regression of theta on x has
    the slope ½.
    """
    theta = TASKS["gaussian_linear"].prior(N)
    x = TASKS["gaussian_linear"].simulate(theta)
    slope = (theta * x).sum(0) / x.square().sum(0)
    close(slope, 0.5, atol=4 * 0.5 / math.sqrt(N))
