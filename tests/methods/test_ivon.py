"""IVON: its fixed point is the best factorized Gaussian, for any Normal prior; and what it
refuses.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.posteriors import Guided

F64 = torch.float64
NOISE = 0.1
X = np.linspace(-1, 1, 21)
PHI, Y = np.stack([X**k for k in range(4)], 1), np.sin(3 * X)


def fitted(method: bayou.IVON, **options: object) -> Guided:
    net = nn.Linear(4, 1, bias=False, dtype=F64)
    nn.init.zeros_(net.weight)
    data = torch.from_numpy(PHI), torch.from_numpy(Y).unsqueeze(1)
    options = {"likelihood": bayou.Gaussian(NOISE), "progress": False} | options
    posterior = bayou.fit(net, data, method=method, **options)  # type: ignore[arg-type]
    assert isinstance(posterior, Guided)
    return posterior


def check_mean_field(posterior: Guided, scale: float, center: float) -> None:
    """Conjugate regression (METHODS number 1): mean of the exact posterior, the diagonal of its
    precision.
    """
    precision = np.eye(4) / scale**2 + PHI.T @ PHI / NOISE**2
    mean = np.linalg.solve(precision, center / scale**2 * np.ones(4) + PHI.T @ Y / NOISE**2)
    guide = posterior.bayesian.guides[0]
    np.testing.assert_allclose(
        guide.log_std.detach().exp().numpy()[0], 1 / np.sqrt(np.diag(precision)), rtol=0.02
    )
    np.testing.assert_allclose(guide.center.detach().numpy()[0], mean, atol=0.02)


@pytest.mark.slow
def test_it_reaches_the_mean_field_posterior() -> None:
    posterior = fitted(bayou.IVON(steps=1500, samples=16, lr=0.2, local=True))
    check_mean_field(posterior, 1.0, 0.0)
    bound = bayou.elbo(
        posterior, (torch.from_numpy(PHI), torch.from_numpy(Y).unsqueeze(1)), samples=500, seed=0
    )
    assert bound.value == pytest.approx(5.145762, abs=0.02 + 4 * bound.standard_error)


@pytest.mark.slow
def test_another_prior() -> None:
    posterior = fitted(
        bayou.IVON(steps=1000, samples=64, lr=0.2, local=True), prior=bayou.Normal(0.15, mean=0.5)
    )
    check_mean_field(posterior, 0.15, 0.5)


@pytest.mark.slow
def test_a_warm_up_ends_in_the_same_posterior() -> None:
    posterior = fitted(bayou.IVON(steps=1500, samples=16, lr=0.4, local=True, warmup=0.4))
    check_mean_field(posterior, 1.0, 0.0)


def test_a_prior_is_learned_where_the_bound_is_largest() -> None:
    """For q = Π N(m, σ²) the best scale is s² = mean(m² + σ²), and q is the best mean field under
    it.
    """
    method = bayou.IVON(steps=500, samples=64, lr=0.4, local=True, plain_lr=0.004)
    posterior = fitted(method, prior=bayou.Normal(0.3, learn=True))
    guide = posterior.bayesian.guides[0]
    square = float((guide.center.square() + (2 * guide.log_std).exp()).mean().detach())
    scale = float(guide.prior.log_scale.detach().exp())
    assert scale == pytest.approx(square**0.5, rel=0.02)
    assert scale > 0.6
    check_mean_field(posterior, scale, 0.0)


@pytest.mark.slow
def test_it_reaches_the_mean_field_posterior_with_sampled_weights() -> None:
    check_mean_field(fitted(bayou.IVON(steps=6000, samples=16)), 1.0, 0.0)


def test_noise_and_normalization_layers_are_learned_beside_it() -> None:
    method = bayou.IVON(steps=500, samples=16, lr=0.4, local=True, plain_lr=0.02)
    posterior = fitted(method, likelihood=bayou.Gaussian(1.0, learn=True))
    assert 0.05 < float(posterior.target.likelihood.log_scale.detach().exp()) < 0.15
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = bayou.fit(net, (x, torch.arange(20) % 2), method=bayou.IVON(steps=30), progress=False)
    assert not torch.equal(found.sample(1, seed=0)["1.weight"][0], net[1].weight)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ({"where": ()}, {}, r"where must be a pattern or a tuple of patterns, got \(\)"),
        ({"beta2": 1.0}, {}, "beta2"),
        ({"hessian": 0.0}, {}, "hessian"),
        ({"clip": 1.0}, {}, "is an optimizer"),
        ({}, {"prior": bayou.priors.ScaleMixture()}, "Normal priors"),
        ({"warmup": 2.0}, {}, "warmup"),
    ],
)
def test_bad_settings(method: dict[str, object], options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fitted(bayou.IVON(steps=3, **method), **options)  # type: ignore[arg-type]


class Adapted(nn.Module):
    """A low-rank adapter with more weights than rows, B = 0 at first, of a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = (
            nn.Linear(16, 32).requires_grad_(False),
            nn.Linear(32, 4).requires_grad_(False),
        )
        self.lora_A, self.lora_B = nn.Linear(16, 32, bias=False), nn.Linear(32, 32, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 4 * self.head((self.base(x) + self.lora_B(self.lora_A(x))).tanh())
        return out


@pytest.mark.parametrize("cold", [False, True])
def test_an_adapter_with_more_weights_than_rows_learns_if_q_is_cold(cold: bool) -> None:
    """With the whole KL, q stays as wide as the prior and predicts as without data, log 4 nats."""
    torch.manual_seed(0)
    net, x = Adapted(), torch.randn(350, 16)
    y = x[:, :4].argmax(1)
    method = bayou.IVON(steps=100, batch_size=50, cold=cold)
    posterior = bayou.fit(net, (x[:50], y[:50]), method, progress=False)
    nll = bayou.metrics.nll(posterior.predict(x[50:], 16, seed=0), y[50:])
    assert nll < 0.9 if cold else nll > 1.1


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_narrow_prior_does_not_make_it_diverge(scale: float) -> None:
    """A step is lr·(h₀ + δ) natural gradients, and δ grows with 1/scale²: it ends at one Newton
    step.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    prior = bayou.priors.UnitNormal(1.0, inputs=(1.0, scale))
    method = bayou.IVON(steps=300, start="network")
    net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    p = bayou.fit(
        net, (x, x[:, :1]), method, likelihood=bayou.Gaussian(0.5), prior=prior, progress=False
    )
    mean = p.mean()["weight"].flatten()
    assert abs(float(mean[1])) < 0.3
    assert mean.isfinite().all()
    assert float(mean[0]) > 0.5
