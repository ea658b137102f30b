"""A traced density equals the density, at other points too."""

import pytest
import torch
from torch import nn

import bayou
from bayou.kernels import Joint
from bayou.kernels.trace import trace_density
from bayou.network import Network
from bayou.network.target import Target

F64 = torch.float64


def points(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def graded(log_prob):
    def density(w):
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            value = torch.func.vmap(log_prob)(w)
            return value.detach(), torch.autograd.grad(value.sum(), w)[0]

    return density


def writing(w):
    """Computed constants, and a tensor that is changed in place: it must be new in every call."""
    total = torch.zeros(3, dtype=F64) + torch.arange(3, dtype=F64).exp()
    moved = w * 2
    moved.add_(total)
    return -moved.square().sum()


def folding(w):
    scale = torch.arange(1, 4, dtype=F64).log1p().neg().exp()
    return -(w * scale).view(3).expand(3).square().sum() + scale.sum()


@pytest.mark.parametrize("function", [writing, folding])
def test_a_trace_is_exact_at_other_points(function):
    density = graded(function)
    run = trace_density(density, points(4, 3))
    assert run is not density
    for seed in (1, 2, 1):
        w = points(4, 3, seed=seed)
        for found, expected in zip(run(w), density(w), strict=True):
            assert torch.equal(found, expected)
            assert not found.requires_grad


def test_a_trace_of_a_network_with_convolutions_and_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3, 2),
    ).to(F64)
    net(points(5, 1, 4, 4))  # statistics of its own
    target = Target.build(net, bayou.Categorical(), None, 6)
    joint = Joint(target, Network(net), target.start())
    x, y, w = (
        points(6, 1, 4, 4),
        torch.arange(6) % 2,
        joint.start + 0.1 * points(3, len(joint.start)),
    )
    run = joint.density([(x, y)], w)
    for shift in (0.0, 0.3):
        for found, expected in zip(run(w + shift), joint(w + shift, x, y), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_function_that_cannot_be_traced_is_returned_unchanged():
    def branching(w):
        raise RuntimeError("no trace")

    assert trace_density(branching, points(2, 3)) is branching
