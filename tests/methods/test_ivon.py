"""IVON, as a method and as an optimizer: its fixed point is the best factorized Gaussian."""

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn
from torch.testing import assert_close

import bayou
from bayou import IVON
from bayou.methods import IVONOptimizer
from bayou.methods.ivon import OnlineNewton
from tests.methods.draws import normal
from tests.proofs.regression import F64, MEAN_FIELD, NOISE, X, Y, linear, posterior_of, rows

# ΦᵀΦ = 21·I: a well-conditioned problem
PHI = torch.linalg.qr(torch.from_numpy(np.stack([X**k for k in range(4)], 1))).Q * 21**0.5
TARGETS = torch.from_numpy(Y).unsqueeze(1)


def fitted(method, **options):
    options = {"likelihood": bayou.Gaussian(NOISE), "progress": False} | options
    return bayou.fit(linear(np.zeros(4)), rows(), method, **options)


def check_mean_field(posterior, scale, center):
    """Compare with the mean of the posterior and the diagonal of its precision."""
    mean, precision = posterior_of(np.eye(4) / scale**2, mean=center)
    guide = posterior.bayesian.guides[0]
    assert_allclose(
        guide.log_std.detach().exp().numpy()[0], 1 / np.sqrt(np.diag(precision)), rtol=0.02
    )
    assert_allclose(guide.center.detach().numpy()[0], mean, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "scale", "center"),
    [
        ({"steps": 1500, "samples": 16, "lr": 0.2}, 1.0, 0.0),
        ({"steps": 1500, "samples": 16, "lr": 0.4, "warmup": 0.4}, 1.0, 0.0),
        ({"steps": 1000, "samples": 64, "lr": 0.2}, 0.15, 0.5),
    ],
)
def test_ivon_reaches_the_mean_field_posterior(options, scale, center):
    prior = bayou.Normal(scale, mean=center)
    posterior = fitted(IVON(local=True, **options), prior=prior)
    check_mean_field(posterior, scale, center)
    if scale == 1.0:
        bound = bayou.elbo(posterior, rows(), samples=500, seed=0)
        assert bound.value == pytest.approx(MEAN_FIELD, abs=0.02 + 4 * bound.standard_error)


@pytest.mark.parametrize("local", [False, True])
def test_a_start_with_far_too_little_curvature_is_stable(local):
    """The curvature of the mean loss is 100: lr·100 = 20 Newton steps, were they not bounded."""
    method = IVON(steps=200, samples=4, lr=0.2, hessian=0.1, warmup=0.4, local=local)
    net = linear(np.zeros(4))
    likelihood = bayou.Gaussian(NOISE)
    posterior = bayou.fit(net, (PHI, TARGETS), method, likelihood=likelihood, progress=False)
    guide = posterior.bayesian.guides[0]
    precision = 1 + 21 / NOISE**2
    mean = PHI.T @ TARGETS / NOISE**2 / precision
    std = torch.full((1, 4), precision**-0.5, dtype=F64)
    assert_close(guide.log_std.detach().exp(), std, rtol=0.15, atol=0)
    assert ((guide.center.detach() - mean.mT) / std).abs().max() < 1


def test_a_prior_is_learned_where_the_bound_is_largest():
    """For q = Π N(m, σ²) the best scale is s² = mean(m² + σ²), and q is the best mean field under
    it.
    """
    method = IVON(steps=300, samples=64, lr=0.4, local=True, plain_lr=0.006)
    posterior = fitted(method, prior=bayou.Normal(0.3, learn=True))
    guide = posterior.bayesian.guides[0]
    square = float((guide.center.square() + (2 * guide.log_std).exp()).mean().detach())
    scale = float(guide.prior.log_scale.detach().exp())
    assert scale == pytest.approx(square**0.5, rel=0.02)
    assert scale > 0.6
    check_mean_field(posterior, scale, 0.0)


def test_noise_and_normalization_layers_are_learned():
    method = IVON(steps=350, samples=16, lr=0.4, local=True, plain_lr=0.02)
    posterior = fitted(method, likelihood=bayou.Gaussian(1.0, learn=True))
    assert 0.05 < posterior.target.likelihood.log_scale.detach().exp() < 0.15
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = bayou.fit(net, (x, torch.arange(20) % 2), method=IVON(steps=30), progress=False)
    assert not torch.equal(found.sample(1, seed=0)["1.weight"][0], net[1].weight)


def test_priors_must_be_normal():
    with pytest.raises(ValueError, match="Normal priors"):
        fitted(IVON(steps=3), prior=bayou.priors.ScaleMixture())


class Adapted(nn.Module):
    """A low-rank adapter with more weights than rows, B = 0 at first, of a frozen layer."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(16, 32, bias=False), nn.Linear(32, 32, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return 4 * self.head((self.base(x) + self.lora_B(self.lora_A(x))).tanh())


@pytest.mark.parametrize("cold", [False, True])
def test_an_adapter_with_more_weights_than_rows_learns_if_q_is_cold(cold):
    """With the whole KL, q stays as wide as the prior and predicts as without data, log 4 nats."""
    torch.manual_seed(0)
    net, x = Adapted(), torch.randn(350, 16)
    y = x[:, :4].argmax(1)
    method = IVON(steps=100, batch_size=50, cold=cold)
    posterior = bayou.fit(net, (x[:50], y[:50]), method, progress=False)
    nll = bayou.metrics.nll(posterior.predict(x[50:], 16, seed=0), y[50:])
    assert nll < 0.9 if cold else nll > 1.1


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_narrow_prior_does_not_make_it_diverge(scale):
    """A step is lr·(h₀ + δ) natural gradients, and δ grows with 1/scale²: it ends at one Newton
    step.
    """
    x = normal(50, 2)
    prior = bayou.priors.UnitNormal(1.0, inputs=(1.0, scale))
    method = IVON(steps=100, start="network")
    net = torch.nn.Linear(2, 1, bias=False, dtype=F64)
    p = bayou.fit(
        net, (x, x[:, :1]), method, likelihood=bayou.Gaussian(0.5), prior=prior, progress=False
    )
    mean = p.mean()["weight"].flatten()
    assert abs(float(mean[1])) < 0.3
    assert mean.isfinite().all()
    assert mean[0] > 0.5


def loss(net, x=PHI, y=TARGETS):
    return 0.5 * ((net(x) - y) / NOISE).square().mean()  # the mean of −log p, up to a constant


def test_steps_of_the_optimizer_are_those_of_the_method():
    """The method has the gradients in m and log σ of the loss at m + σ·ε: ĝ, and σ·ĝ·ε."""
    net, settings = linear(np.zeros(4)), {"hessian": 0.3, "beta1": 0.8}
    optimizer = IVONOptimizer(net.parameters(), 0.1, n=21, prior_std=0.5, beta2=0.9, **settings)
    bnn = bayou.bayesianize(linear(np.zeros(4)), bayou.MeanField(), prior=bayou.Normal(0.5))
    guide = bnn.guides[0]
    gaussian = guide.conditional_gaussian()
    reference = OnlineNewton([gaussian], {}, 21, IVON(lr=0.1, **settings), 0.9)
    for _ in range(5):
        mean = net.weight.detach().clone()
        with optimizer.sampled_params(train=True):
            drawn = net.weight.detach().clone()
            loss(net).backward()
        assert torch.equal(net.weight, mean)
        weight = guide.center + guide.log_std.exp() * (
            (drawn - mean) / guide.log_std.detach().exp()
        )
        reference.zero_grad()
        loss(lambda phi: phi @ weight.mT).backward()  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        assert_close(net.weight, guide.center, rtol=1e-12, atol=1e-12)
    posterior = optimizer.posterior(net, bayou.Gaussian(NOISE))
    assert torch.equal(posterior.mean()["weight"], net.weight.detach())
    assert_close(posterior.std()["weight"], guide.log_std.detach().exp(), rtol=1e-12, atol=0)
    assert posterior.bound_priors()["weight"].log_scale.exp() == pytest.approx(0.5)


def test_the_optimizer_reaches_the_mean_field_posterior():
    net, steps, blocks = linear(np.zeros(4)), 200, 4
    optimizer = IVONOptimizer(net.parameters(), 0.2, n=21, beta2=1 - 5 / steps)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        for _ in range(blocks):
            with optimizer.sampled_params(train=True):
                (loss(net) / blocks).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    posterior = optimizer.posterior(net, bayou.Gaussian(NOISE))
    precision = torch.eye(4, dtype=F64) + PHI.T @ PHI / NOISE**2
    std = precision.diagonal().rsqrt()
    # ĥ has the variance of (ĝ·ε/σ), about 2·h², averaged over 1/(1 − β₂) steps of 4 blocks: std
    # within 5 % · ½
    assert_close(posterior.std()["weight"][0], std, rtol=0.15, atol=0)
    error = (
        posterior.mean()["weight"][0]
        - torch.linalg.solve(precision, PHI.T @ TARGETS[:, 0] / NOISE**2)
    ) / std
    assert error.abs().max() < 1.0


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)


def groups(net):
    return [
        {"params": net[0].parameters(), "lr": 0.01},
        {"params": net[2].parameters(), "prior_std": 0.3},
    ]


def trained(net, optimizer, steps, closure=False):
    def run():
        optimizer.zero_grad()
        value = loss(net)
        value.backward()
        return value

    for _ in range(steps):
        if closure:
            assert optimizer.step(run).shape == ()
        else:
            with optimizer.sampled_params(train=True):
                run()
            optimizer.step()
    return net


def same(one, two):
    assert_close(dict(one.named_parameters()), dict(two.named_parameters()), rtol=0, atol=0)


def test_a_closure_is_called_at_a_draw():
    nets = [
        trained(net := small(), IVONOptimizer(groups(net), n=21), 4, closure)
        for closure in (True, False)
    ]
    same(*nets)


def test_the_state_of_the_optimizer_resumes_bit_for_bit():
    net = small()
    optimizer = IVONOptimizer(groups(net), n=21)
    trained(net, optimizer, 3)
    again = copy.deepcopy(net)
    other = IVONOptimizer(groups(again), n=1)  # settings are those of the state
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same(trained(net, optimizer, 3), trained(again, other, 3))


def test_parameters_without_the_optimizer_are_points():
    net = small()
    net[0].requires_grad_(False)
    optimizer = IVONOptimizer([net[2].weight], n=21)
    trained(net, optimizer, 2)
    posterior = optimizer.posterior(net, bayou.Gaussian(NOISE))
    std = posterior.std()
    assert list(std) == ["2.weight", "2.bias"]
    assert float(std["2.bias"].max()) == 0 < float(std["2.weight"].min())


def test_misuse_of_the_optimizer_is_an_error():
    net = small()
    with pytest.raises(ValueError, match="n >= 1"):
        IVONOptimizer(net.parameters(), n=0)
    with pytest.raises(ValueError, match="beta1"):
        IVONOptimizer(net.parameters(), n=1, beta1=1.0)
    optimizer = IVONOptimizer(net.parameters(), n=21)
    loss(net).backward()
    with pytest.raises(RuntimeError, match="inside a block of sampled_params"):
        optimizer.step()
    with (
        optimizer.sampled_params(train=True),
        pytest.raises(RuntimeError, match=r"step\(\) after it"),
    ):
        optimizer.step()
