"""Images are predicted in the order of memory that suits a CPU, wherever the network takes it."""

import pytest
import torch
from torch import nn

import bayou


class Viewed(nn.Sequential):
    """A network that wants its maps in one piece."""

    def forward(self, x):
        maps = self[1](self[0](x))
        return self[2](maps.view(len(maps), -1))


class Random(nn.Sequential):
    """A network whose noise would come in another order."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, training=True))


def layers():
    torch.manual_seed(0)
    return [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Linear(4 * 3 * 3, 2)]


def flat():
    conv, pool, dense = layers()
    return nn.Sequential(conv, pool, nn.Flatten(), dense)


@pytest.mark.parametrize(
    ("net", "takes"), [(flat(), True), (Viewed(*layers()), False), (Random(*flat()), False)]
)
def test_images_are_laid_out_channels_last_where_the_network_takes_them(net, takes):
    x = torch.randn(5, 1, 8, 8)
    orders = []

    def note(module, inputs):
        orders.append((len(inputs[0]), inputs[0].stride(1) == 1))

    next(
        module for module in net.modules() if isinstance(module, nn.Conv2d)
    ).register_forward_pre_hook(note)
    posterior = bayou.bayesianize(net, bayou.MeanField(), example=x).posterior(
        bayou.Categorical(), 100
    )
    posterior.predict(x, samples=3, seed=0)
    assert [last for rows, last in orders if rows == len(x)][-3:] == [takes] * 3


def test_the_order_of_memory_changes_no_output():
    net, x = flat().double(), torch.randn(5, 1, 8, 8, dtype=torch.float64)
    posterior = bayou.bayesianize(net, bayou.MeanField(), example=x).posterior(
        bayou.Categorical(), 100
    )
    outputs = posterior.predict(x, samples=3, seed=0).outputs
    stack = posterior.sample(3, seed=0)
    for s, out in enumerate(outputs):
        expected = torch.func.functional_call(
            net, {name: value[s] for name, value in stack.items()}, x
        )
        assert torch.allclose(out, expected.detach(), rtol=0, atol=1e-12)
