"""TFB: the spread of B·A is σ·U·Z, σ is the largest that the anchor rows tolerate, and adapters are
found by name.
"""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.methods import TFB

F64 = torch.float64

NOISE = 0.5


class Adapted(nn.Module):
    """(W₀ + B·A)·x with W₀ = 0."""

    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(rank, inputs, dtype=F64))
        self.lora_B = nn.Parameter(torch.randn(outputs, rank, dtype=F64))

    def forward(self, x):
        return x @ self.lora_A.T @ self.lora_B.T


def fitted(outputs=3, rank=2, **options):
    torch.manual_seed(0)
    net = Adapted(4, outputs, rank)
    x = torch.randn(30, 4, dtype=F64)
    data = x, net(x).detach() + NOISE * torch.randn(30, outputs, dtype=F64)
    method = TFB(start=None, **options)
    return net, data, bayou.fit(net, data, method, likelihood=bayou.Gaussian(NOISE), progress=False)


@pytest.mark.parametrize(
    ("outputs", "rank"), [(3, 2), (2, 3)]
)  # of B with full column rank, and without
def test_the_spread_is_isotropic_in_the_columns_of_b(outputs, rank):
    net, _, posterior = fitted(outputs, rank)
    std, mean = posterior.history[-1]["std"], posterior.mean()
    before = (net.lora_B @ net.lora_A).detach()
    assert_close(mean["lora_B"] @ mean["lora_A"], before, rtol=1e-12, atol=1e-12)
    assert not posterior.std()["lora_B"].any()
    u, d, _ = torch.linalg.svd(net.lora_B.detach(), full_matrices=False)
    known = d > 1e-8
    rows = (
        (mean["lora_B"].square().sum(0).sqrt() * posterior.std()["lora_A"][:, 0])
        .sort(descending=True)
        .values
    )
    assert_close(
        rows[known.sum() :], torch.zeros(rank - int(known.sum())).double(), atol=1e-3 * std, rtol=0
    )
    assert_close(rows[: known.sum()], torch.full_like(d[known], std))  # |b_i|·(σ/d_i) = σ
    draws = posterior.sample(4000, seed=0)
    change = draws["lora_B"] @ draws["lora_A"] - before
    covariance = torch.einsum("noi,npi->op", change, change) / (4000 * 4)
    expected = std**2 * u[:, known] @ u[:, known].T
    assert_close(covariance, expected, rtol=0, atol=5 * std**2 * math.sqrt(2 / 16000))


def test_the_std_of_a_linear_model_has_a_closed_form():
    """f ~ N(f̂, σ²·|x|²·u·uᵀ) with one output: y ~ N(f̂, noise² + σ²·|x|²), whose NLL may rise by
    the tolerance.
    """
    _, (x, y), posterior = fitted(outputs=1, rank=1, samples=200, tolerance=0.5)
    mean = posterior.mean()
    residual = y - x @ mean["lora_A"].T @ mean["lora_B"].T

    def nll(std):
        scale = (NOISE**2 + std**2 * x.square().sum(1, keepdim=True)).sqrt()
        return -float(torch.distributions.Normal(0.0, scale).log_prob(residual).mean())

    found = posterior.history[-1]
    assert found["point_nll"] == pytest.approx(nll(0.0), rel=1e-10)
    assert found["anchor_nll"] <= 1.5 * nll(0.0)
    # 200 draws, the same for all rows, each with a standard deviation of about 0.2 nats of the mean
    # NLL
    assert nll(found["std"]) - nll(0.0) == pytest.approx(
        0.5 * nll(0.0), abs=5 * 0.2 / math.sqrt(200)
    )


def test_a_convolution_has_adapters_and_anchors_are_held_out():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = nn.Conv2d(1, 3, 3), nn.Linear(12, 2)
            self.lora_A = nn.Conv2d(1, 2, 3, bias=False)
            self.lora_B = nn.Conv2d(2, 3, 1, bias=False)

        def forward(self, x):
            return self.head((self.base(x) + self.lora_B(self.lora_A(x))).flatten(1))

    torch.manual_seed(0)
    y = torch.arange(20) % 2
    data = torch.randn(20, 1, 4, 4).double() + 4 * y.view(-1, 1, 1, 1), y
    method = TFB(start=bayou.MAP(steps=40, lr=0.02), validation=0.25)
    posterior = bayou.fit(Convolution().double(), data, method, where="*lora_*", progress=False)
    assert posterior.target.n == 15
    assert set(posterior.mean()) == {"lora_A.weight", "lora_B.weight"}
    assert posterior.std()["lora_A.weight"].shape == (2, 1, 3, 3)
    assert posterior.history[-1]["step"] > posterior.history[-2]["step"]


def test_networks_without_trained_adapters_are_errors():
    data = torch.randn(10, 4, dtype=F64), torch.randn(10, 3, dtype=F64)
    options = {"method": TFB(start=None), "likelihood": bayou.Gaussian(NOISE), "progress": False}
    with pytest.raises(ValueError, match=r"'lora_A' and 'lora_B'.*got weight, bias; give names="):
        bayou.fit(nn.Linear(4, 3).double(), data, **options)
    net = Adapted(4, 3, 2)
    with pytest.raises(ValueError, match="'lora_B'.*got lora_A; give names="):
        bayou.fit(net, data, where="lora_A", **options)
    nn.init.zeros_(net.lora_B)
    with pytest.raises(ValueError, match="'lora_B' is zero, as before training"):
        bayou.fit(net, data, **options)
    nan = (data[0], data[1] * 1e200)
    nn.init.ones_(net.lora_B)
    with pytest.raises(ValueError, match="anchor rows of TFB"):
        bayou.fit(net, nan, **options)
