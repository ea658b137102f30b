"""What the tensors of a network are to their layers: which axis counts inputs, and how many feed an
output.
"""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.network import fan_ins, layouts
from bayou.network.target import Target


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in transformers, whose weight is stored (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


LAYERS = {
    "linear": (nn.Linear(12, 3), 12),
    "Conv1D": (Conv1D(3, 12), 12),
    "convolution": (nn.Conv2d(4, 6, 3, groups=2), 18),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2), 18),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_fan_in_counts_the_inputs_of_one_output(name):
    layer, expected = LAYERS[name]
    assert fan_ins(nn.Sequential(layer)) == {"0.weight": expected, "0.bias": expected}


def test_a_conv1d_has_the_prior_of_the_linear_layer_that_it_is():
    layer = Conv1D(3, 12)
    layout = layouts(nn.Sequential(layer), ["0.weight"])["0.weight"]
    assert layout.axes == (0, 1)
    assert not layout.convolution
    target = Target.build(nn.Sequential(layer), bayou.Gaussian(0.1), bayou.Normal("fan_in"), 5)
    draws = target.priors["0.weight"].sample(2000, seed=0)
    assert float(draws.std()) == pytest.approx(1 / math.sqrt(12), rel=0.02)


def test_linear_layer_named_conv1d_is_a_linear_layer():
    other = type("Conv1D", (nn.Linear,), {})(12, 3)
    assert fan_ins(nn.Sequential(other))["0.weight"] == 12
