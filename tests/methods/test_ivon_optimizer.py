"""IVON as an optimizer of other training loops: its update is that of the method."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.guides.gaussian import Factorized
from bayou.methods.ivon import IVONOptimizer, OnlineNewton

F64 = torch.float64
X = torch.linspace(-1, 1, 21, dtype=F64)
PHI = (
    torch.linalg.qr(torch.stack([X**k for k in range(4)], 1)).Q * 21**0.5
)  # ΦᵀΦ = 21·I: a well-conditioned problem
Y = torch.sin(3 * X).unsqueeze(1)
NOISE = 0.1


def linear() -> nn.Linear:
    net = nn.Linear(4, 1, bias=False, dtype=F64)
    nn.init.zeros_(net.weight)
    return net


def loss(net: nn.Module, x: Tensor = PHI, y: Tensor = Y) -> Tensor:
    return 0.5 * ((net(x) - y) / NOISE).square().mean()  # the mean of −log p, up to a constant


def test_its_steps_are_those_of_the_method() -> None:
    """The method has the gradients in m and log σ of the loss at m + σ·ε: ĝ, and σ·ĝ·ε."""
    net, settings = linear(), {"hessian": 0.3, "beta1": 0.8}
    optimizer = IVONOptimizer(net.parameters(), 0.1, n=21, prior_std=0.5, beta2=0.9, **settings)
    bnn = bayou.bayesianize(linear(), bayou.MeanField(), prior=bayou.Normal(0.5))
    guide = bnn.guides[0]
    assert isinstance(guide, Factorized)
    reference = OnlineNewton([guide], [], 21, bayou.IVON(lr=0.1, **settings), 0.9)
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
        (0.5 * ((PHI @ weight.mT - Y) / NOISE).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        torch.testing.assert_close(net.weight, guide.center, rtol=1e-12, atol=1e-12)
    posterior = optimizer.posterior(net, bayou.Gaussian(NOISE))
    assert torch.equal(posterior.mean()["weight"], net.weight.detach())
    torch.testing.assert_close(
        posterior.std()["weight"], guide.log_std.detach().exp(), rtol=1e-12, atol=0
    )
    assert posterior.bound_priors()["weight"].log_scale.exp() == pytest.approx(0.5)


def test_it_reaches_the_mean_field_posterior_and_is_saved_as_one(tmp_path: Path) -> None:
    net, steps, blocks = linear(), 300, 4
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
    torch.testing.assert_close(posterior.std()["weight"][0], std, rtol=0.15, atol=0)
    error = (
        posterior.mean()["weight"][0] - torch.linalg.solve(precision, PHI.T @ Y[:, 0] / NOISE**2)
    ) / std
    assert float(error.abs().max()) < 1.0
    posterior.save(tmp_path / "a.bayou")
    again = bayou.load(tmp_path / "a.bayou", linear()).predict(PHI, 5, seed=0)
    assert torch.equal(again.outputs, posterior.predict(PHI, 5, seed=0).outputs)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)


def groups(net: Any) -> list[dict[str, Any]]:
    return [
        {"params": net[0].parameters(), "lr": 0.01},
        {"params": net[2].parameters(), "prior_std": 0.3},
    ]


def trained(
    net: nn.Module, optimizer: IVONOptimizer, steps: int, closure: bool = False
) -> nn.Module:
    def run() -> Tensor:
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


def test_a_closure_is_called_at_a_draw() -> None:
    nets = [
        trained(net := small(), IVONOptimizer(groups(net), n=21), 4, closure)
        for closure in (True, False)
    ]
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)


def test_its_state_resumes_bit_for_bit() -> None:
    net = small()
    optimizer = IVONOptimizer(groups(net), n=21)
    trained(net, optimizer, 3)
    again = copy.deepcopy(net)
    other = IVONOptimizer(groups(again), n=1)  # settings are those of the state
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(
        trained(net, optimizer, 3).parameters(), trained(again, other, 3).parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_parameters_that_it_does_not_have_are_points_and_frozen_ones_stay() -> None:
    net = small()
    net[0].requires_grad_(False)  # type: ignore[index]
    optimizer = IVONOptimizer([net[2].weight], n=21)  # type: ignore[index]
    trained(net, optimizer, 2)
    posterior = optimizer.posterior(net, bayou.Gaussian(NOISE))
    std = posterior.std()
    assert list(std) == ["2.weight", "2.bias"]
    assert float(std["2.bias"].max()) == 0 < float(std["2.weight"].min())


def test_misuse_is_an_error() -> None:
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
