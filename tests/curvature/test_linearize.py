"""The linearization of a network by plain autograd, against the Jacobian by forward mode."""

import pytest
import torch
from torch import nn
from torch.func import jvp
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from bayou.curvature import linearize
from bayou.curvature.linearize import linear_map
from bayou.network import Network, PlainAttention

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x).tanh()
        outputs = checkpoint(self.second, hidden, use_reentrant=self.reentrant)
        return outputs.tanh()


class WithUnused(nn.Module):
    """Has a parameter that no output depends on."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3))
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x)


torch.manual_seed(0)
NETS = {
    "perceptron": (
        nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2)),
        random(7, 3),
    ),
    "convolution": (
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)
        ),
        random(4, 1, 8, 8),
    ),
    "lstm": (Recurrent(nn.LSTM), random(4, 3, 3)),
    "gru": (Recurrent(nn.GRU), random(4, 3, 3)),
    "attention": (
        nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 2)
        ),
        random(4, 3, 4),
    ),
    "unused": (WithUnused(), random(5, 3)),
}


@pytest.mark.parametrize("name", NETS)
def test_the_map_is_the_jacobian_of_forward_mode(name):
    net, x = NETS[name]
    network = Network(net.double().eval())
    at = {key: value.detach() for key, value in net.named_parameters()}

    def call(params):
        return network.evaluate(params, x)

    f, push = linear_map(call, at)
    assert not f.requires_grad
    for _ in range(2):
        v = {key: random(*value.shape) for key, value in at.items()}
        with PlainAttention():  # a fused kernel has no forward mode
            expected, slope = jvp(call, (at,), (v,))
        found = push(v)
        assert not found.requires_grad
        assert_close(f, expected.detach(), rtol=1e-12, atol=1e-12)
        assert_close(found, slope.detach(), rtol=1e-10, atol=1e-11)


def test_plain_autograd_is_enough_for_common_networks(monkeypatch):
    """None of them needs the transforms of torch.func, whose import is slow."""
    monkeypatch.setattr(linearize, "_linear_map_by_transforms", None)
    for net, x in NETS.values():
        network = Network(net.double().eval())
        at = {key: value.detach() for key, value in net.named_parameters()}
        _, push = linear_map(lambda params, network=network, x=x: network.evaluate(params, x), at)
        push(at)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_network_with_checkpoints_has_the_same_map(reentrant):
    net = Checkpointed(reentrant).double().eval()
    x = random(5, 3)
    network = Network(net)
    at = {key: value.detach() for key, value in net.named_parameters()}
    v = {key: random(*value.shape) for key, value in at.items()}

    def plain(params):
        hidden = (x @ params["first.weight"].T + params["first.bias"]).tanh()
        return (hidden @ params["second.weight"].T + params["second.bias"]).tanh()

    expected, slope = jvp(plain, (at,), (v,))
    try:
        f, push = linear_map(lambda params: network.evaluate(params, x), at)
        found = push(v)
    except RuntimeError:  # a reentrant checkpoint has one derivative; ``tangent`` uses forward mode
        assert reentrant
        return
    assert_close(f, expected, rtol=1e-12, atol=1e-12)
    assert_close(found, slope, rtol=1e-10, atol=1e-11)


def test_a_block_of_inference_mode_has_the_same_map():
    weight = random(4, 3)
    at = {"weight": weight}
    v = {"weight": random(4, 3)}
    x = random(3)
    expected, slope = jvp(lambda params: (params["weight"] @ x).tanh(), (at,), (v,))
    with torch.inference_mode():
        f, push = linear_map(lambda params: (params["weight"] @ x).tanh(), at)
        found = push(v)
    assert_close(f.clone(), expected, rtol=1e-12, atol=1e-12)
    assert_close(found.clone(), slope, rtol=1e-10, atol=1e-11)
