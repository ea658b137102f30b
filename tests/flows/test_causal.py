"""Causal conditioners: the inputs they depend on, and steps that equal the whole pass."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bayou.core import rng
from bayou.flows import (
    Affine,
    Autoregressive,
    CausalTransformer,
    PixelCNN,
    WaveNet,
    pixelcnn,
    transformer_flow,
    wavenet,
)
from bayou.flows.models.transformer import MAX_UNFUSED
from tests.flows.tools import built, close, derivative, identical, perturb, refuses, standard

NETS = {
    "wavenet": lambda: WaveNet((9, 2), 3, 8),
    "wavenet, a vector": lambda: WaveNet(5, 2, 8, depth=1),
    "wavenet, backwards": lambda: WaveNet((7, 1), 3, 8, reverse=True, context_dim=2),
    "pixelcnn": lambda: PixelCNN((1, 4, 5), 2, 8, kernel=3),
    "pixelcnn, colors": lambda: PixelCNN((3, 3, 4), 2, 8, context_dim=2),
    "pixelcnn, backwards": lambda: PixelCNN((2, 3, 2), 2, 8, reverse=True),
    "transformer": lambda: CausalTransformer((6, 2), 3, 8, context_dim=2),
    "transformer, patches": lambda: CausalTransformer((2, 4, 6), 2, 32, patch=2),
    "transformer, backwards": lambda: CausalTransformer((1, 4, 4), 2, 8, patch=2, reverse=True),
    "transformer, long": lambda: CausalTransformer(MAX_UNFUSED + 3, 2, 8, depth=1),
}


def made(build, scale=0.3):
    """In float64, with all its parameters at random."""
    return perturb(built(build), scale)


def inputs(net, *batch):
    n = math.prod(batch)
    x = rng.normal(n, (net.dim,), net.place, 1).reshape(*batch, net.dim)
    c = (
        rng.normal(n, (net.context_dim,), net.place, 2).reshape(*batch, net.context_dim)
        if net.context_dim
        else None
    )
    return x, c


def stepped(net, x, context):
    steps, found = net.steps(x, context), {}
    for d in net.coordinates:
        found[d] = steps.params()
        steps.push(x[..., d])
    return torch.stack([found[d] for d in range(net.dim)], -2)


@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_steps_equal_the_whole_pass(name):
    net = made(NETS[name])
    x, context = inputs(net, 2, 3)
    whole = net(x, context)
    assert whole.shape == (2, 3, net.dim, net.out)
    assert whole.std() > 0.05
    close(stepped(net, x, context), whole, rtol=1e-10, atol=1e-10)


def seen(net):
    """(D, D) in order: whether the parameters of coordinate i depend on coordinate j, at one of
    three points.
    """
    x = (
        inputs(net, 3)[0].repeat_interleave(net.dim, 0).requires_grad_()
    )  # row i of a point: for coordinate i
    own = net(x).reshape(3, net.dim, net.dim, net.out).diagonal(dim1=1, dim2=2)
    gradient = derivative(own.sum(), x)
    found = (gradient.reshape(3, net.dim, net.dim) != 0).any(0)
    return found[list(net.coordinates)][:, list(net.coordinates)]


@pytest.mark.parametrize(
    "build",
    [
        lambda: PixelCNN((1, 8, 8), 1, 4, depth=8, kernel=3),
        lambda: PixelCNN((1, 8, 8), 1, 4),
        lambda: PixelCNN((1, 8, 8), 1, 4, reverse=True),
        lambda: PixelCNN((2, 4, 8), 1, 32, kernel=7),
        lambda: WaveNet((32, 2), 1, 32),
        lambda: CausalTransformer((1, 8, 8), 1, 32, patch=2),
    ],
)
def test_parameters_depend_on_all_predecessors_and_nothing_else(build):
    found = seen(made(build, 0.1))
    assert int(found.sum()) == 2016  # 64·63/2
    identical(found, torch.ones(64, 64, dtype=torch.bool).tril(-1))


def test_ten_dilations_see_1024_positions():
    net = made(lambda: WaveNet(1100, 1, 4), 0.05)
    assert net.dilations == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    x = inputs(net, 1)[0].requires_grad_()
    gradient = derivative(net(x)[0, 1080].sum(), x)
    assert gradient[0].nonzero().flatten().tolist() == list(range(1080 - 1024, 1080))


@pytest.mark.parametrize(
    "build",
    [
        lambda: WaveNet((32, 1), 2, 16),
        lambda: PixelCNN((1, 6, 6), 2, 16),
        lambda: CausalTransformer((1, 12, 12), 2, 16, patch=2),
    ],
)
@torch.no_grad()
def test_all_steps_together_take_the_operations_of_about_one_pass(build):
    net = build()
    x = torch.zeros(2, net.dim)
    counts = []
    for run in (lambda: net(x), lambda: stepped(net, x, None)):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[1] < 1.2 * counts[0]


def test_a_flow_learns_an_autoregressive_process():
    """x_t = .9·x_{t−1} + .4·ε: the least NLL is the entropy of eight Gaussians, above which a fit
    stays, but near.
    """
    noise = torch.randn(2000, 8)
    x = [noise[:, 0] * 0.4 / math.sqrt(1 - 0.81)]
    for t in range(1, 8):
        x.append(0.9 * x[-1] + 0.4 * noise[:, t])
    data = torch.stack(x, -1)[..., None]
    least = 4 * (1 + math.log(2 * math.pi)) + 8 * math.log(0.4) - 0.5 * math.log(1 - 0.81)
    flow = standard(wavenet((8, 1), layers=1, width=16))
    optimizer = torch.optim.Adam(flow.parameters(), 1e-2)
    for i in range(80):
        loss = -flow.log_prob(data[:1500][16 * i % 1500 :][:256]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    nll = -flow.log_prob(data[1500:]).detach()
    error = float(nll.std()) / math.sqrt(500)
    assert least - 4 * error < float(nll.mean()) < least + 0.25 + 4 * error


test_bad_input = refuses(
    (lambda: wavenet((1, 4, 4)), "WaveNet takes sequences"),
    (lambda: wavenet(4, depth=0), "at least 1, got 0"),
    (lambda: pixelcnn((4, 4)), r"PixelCNN takes images \(C, H, W\), got \(4, 4\)"),
    (lambda: pixelcnn((1, 4, 4), kernel=4), "must be odd and 3 or more, got 4"),
    (
        lambda: transformer_flow((1, 5, 4), patch=2),
        r"event \(1, 5, 4\) with patches of 2.*pad the image",
    ),
    (lambda: transformer_flow((8, 1), patch=2), r"\(L, C\) without patches"),
    (lambda: transformer_flow(4, width=10, heads=4), "multiple of its heads, got 10 and 4"),
    (lambda: Autoregressive(Affine(), WaveNet(4, 3)), "build it with params=2"),
    (lambda: wavenet((4, 2)).inverse(torch.zeros(3, 4)), r"last 2 axes must be \(..., 4, 2\)"),
)
