"""The evidence of networks of infinite width, its maximum and draws around it."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from bayou.inference.wide_evidence import WideEvidence
from bayou.network.wide import JITTER, wide_kernel

F64 = torch.float64
LOG_STD = 2.0


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def table(rows=20, columns=5):
    """Two targets that depend on the first column only."""
    x = noise(rows, columns)
    y = torch.cat([(2 * x[:, :1]).sin(), x[:, :1].square() - 1], 1)
    return x, y + 0.1 * noise(rows, 2, seed=1)


@pytest.fixture
def masked():
    """Three networks of some of 20 rows: one scale for all inputs, one for each, and ReLU units."""
    x, y = table()
    masks = torch.ones(3, 20, dtype=torch.bool)
    masks[:, ::4] = False
    free = torch.tensor([False, True, True])
    return WideEvidence(x, y, LOG_STD, ("erf", "erf", "relu"), masks, free)


def dense(evidence, problem, logs):
    """The covariance, written out, and the rows of a network."""
    rows = evidence.masks[problem]
    scales = evidence.scales(logs, problem)
    units = evidence.units[problem]
    k = wide_kernel(units, evidence.x, evidence.x, scales)
    covariance = k[rows][:, rows] + (scales.noise.square() + JITTER) * torch.eye(15, dtype=F64)
    return covariance, k[:, rows], evidence.y[rows]


def test_values_gradients_and_errors_are_those_of_gaussian_processes(masked):
    points = masked.center + 0.3 * noise(3, 9, seed=2)
    values, gradients = masked.evaluate(points, torch.arange(3))
    errors = masked.errors(points)
    for problem in range(3):
        logs = points[problem].clone().requires_grad_()
        covariance, cross, y = dense(masked, problem, logs)
        normal = MultivariateNormal(torch.zeros(15, dtype=F64), covariance)
        prior = 0.5 * ((logs - masked.center) / LOG_STD).square().sum()
        loss = prior - normal.log_prob(y.T).sum()
        (gradient,) = torch.autograd.grad(loss, logs)
        constant = y.numel() / 2 * math.log(2 * math.pi)
        torch.testing.assert_close(values[problem], loss.detach() - constant)
        torch.testing.assert_close(gradients[problem], gradient)
        mean = cross @ torch.linalg.solve(covariance, y)
        torch.testing.assert_close(errors[problem], (masked.y - mean).square().mean(1).detach())


def test_the_log_evidence_has_its_constants_and_no_prior():
    x, y = table()
    evidence = WideEvidence(x, y, LOG_STD)
    point = evidence.center + 0.2 * noise(9, seed=3)
    scales = evidence.scales(point, 0)
    covariance = wide_kernel("erf", x, x, scales) + scales.noise_variance * torch.eye(20, dtype=F64)
    normal = MultivariateNormal(torch.zeros(20, dtype=F64), covariance)
    assert evidence.log_evidence(point) == pytest.approx(float(normal.log_prob(y.T).sum()))


def test_the_hessian_is_that_of_autograd():
    x, y = table(10, 2)
    evidence = WideEvidence(x, y, LOG_STD)
    point = evidence.center + 0.2 * noise(6, seed=3)

    def value(logs):
        scales = evidence.scales(logs, 0)
        covariance = wide_kernel("erf", x, x, scales)
        covariance = covariance + scales.noise_variance * torch.eye(10, dtype=F64)
        normal = MultivariateNormal(torch.zeros(10, dtype=F64), covariance)
        prior = ((logs - evidence.center) / LOG_STD).square().sum() / 2
        return prior - normal.log_prob(y.T).sum()

    expected = torch.autograd.functional.hessian(value, point)
    torch.testing.assert_close(evidence.hessian(point), expected, rtol=0.02, atol=0.02)


def test_the_maximum_leaves_out_inputs_without_effect():
    x, y = table(60)
    evidence = WideEvidence(x, y, LOG_STD)
    points, values = evidence.maximize(40)
    start, _ = evidence.evaluate(evidence.center[None], torch.zeros(1, dtype=torch.long))
    assert values[0] < start[0] - 20
    inputs = evidence.scales(points[0], 0).inputs
    assert inputs[0] > 3 * inputs[1:].max()
    _, gradients = evidence.evaluate(points, torch.zeros(1, dtype=torch.long))
    assert gradients.abs().max() < 1.0


def test_a_known_noise_stays_as_it_is():
    x, y = table()
    evidence = WideEvidence(x, y, LOG_STD, log_noise=math.log(0.3))
    points, _ = evidence.maximize(10)
    assert evidence.scales(points[0], 0).noise == pytest.approx(0.3)
    assert points[0, -1] == evidence.center[-1]


def test_inputs_of_a_group_share_a_scale_and_have_a_narrow_prior():
    x, y = table()
    groups = torch.tensor([0, 1, 1, 2, 2])
    evidence = WideEvidence(2 * x, y, LOG_STD, groups=groups)
    point = evidence.center + 0.2 * noise(12, seed=3)
    logs = point[:5] + point[5:8][groups] + point[8]
    torch.testing.assert_close(evidence.scales(point, 0).inputs, logs.exp())
    assert evidence.center[8] == pytest.approx(-0.5 * math.log(4 * x.var(0, correction=0).sum()))

    def loss(point):
        scales = evidence.scales(point, 0)
        covariance = wide_kernel("erf", 2 * x, 2 * x, scales)
        covariance = covariance + scales.noise_variance * torch.eye(20, dtype=F64)
        stds = torch.tensor([1.0] * 5 + [LOG_STD] * 6 + [1.0], dtype=F64)
        prior = 0.5 * ((point - evidence.center) / stds).square().sum()
        normal = MultivariateNormal(torch.zeros(20, dtype=F64), covariance)
        return prior - normal.log_prob(y.T).sum()

    logs = point.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logs), logs)
    values, gradients = evidence.evaluate(point[None], torch.zeros(1, dtype=torch.long))
    constant = y.numel() / 2 * math.log(2 * math.pi)
    torch.testing.assert_close(values[0], loss(point) - constant)
    torch.testing.assert_close(gradients[0], gradient)
    deviation = (point - evidence.center) / evidence.log_stds
    expected = -float(loss(point)) + 0.5 * float(deviation.square().sum())
    assert evidence.log_evidence(point) == pytest.approx(expected)


def test_scales_out_of_range_are_a_trial_that_is_too_far():
    x, y = table()
    evidence = WideEvidence(x, y, LOG_STD)
    values, gradients = evidence.evaluate(
        torch.full((1, 9), 400.0, dtype=F64), torch.zeros(1, dtype=torch.long)
    )
    assert values.isnan().all()
    assert (gradients == 0).all()


@pytest.mark.slow
def test_draws_of_the_scales_have_the_moments_of_their_posterior():
    """Means and deviations of all logs, beside 100,000 draws of the prior weighted by the evidence.

    Four errors; 400 draws of a chain with an autocorrelation of .15 count as 300 independent ones.
    """
    log_std = 1.0  # with a wider prior hardly any of its draws would have a weight
    x = noise(12, 1)
    y = x.sin() + 0.5 * noise(12, 1, seed=1)
    evidence = WideEvidence(x, y / y.std(), log_std)
    mode = evidence.maximize(60)[0][0]
    draws = evidence.draw(mode, 400, seed=0)
    torch.testing.assert_close(draws[:3], evidence.draw(mode, 3, seed=0))
    prior = evidence.center + log_std * noise(100_000, 5, seed=1)
    scales = evidence.scales(prior, 0)
    covariance = wide_kernel("erf", x, x, scales)
    covariance = covariance + torch.diag_embed(scales.noise_variance[:, None].expand(-1, 12))
    normal = MultivariateNormal(torch.zeros(12, dtype=F64), covariance, validate_args=False)
    weights = normal.log_prob(evidence.y[:, 0]).softmax(0)[:, None]
    effective = 1 / weights.square().sum()
    assert effective > 5000
    mean = (weights * prior).sum(0)
    std = (weights * (prior - mean).square()).sum(0).sqrt()
    error = (1 / effective + 1 / 300).sqrt()
    assert ((draws.mean(0) - mean).abs() < 4 * error * std).all()
    assert ((draws.std(0) / std - 1).abs() < 4 * error * math.sqrt(0.5)).all()
