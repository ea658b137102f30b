"""The number of torch threads during a run."""

import pytest
import torch
from torch import nn

import bayou
from bayou.training import threads


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Watched(nn.Linear):
    """A layer that records the number of threads when it is called with gradients."""

    counts: list[int]

    def forward(self, x):
        if torch.is_grad_enabled():
            self.counts.append(torch.get_num_threads())
        return super().forward(x)


@pytest.mark.parametrize(
    ("method", "width", "expected"),
    [
        (bayou.MAP(steps=2), 3, 1),
        (bayou.VI(steps=2), 3, 1),
        (bayou.VI(steps=2), 420, 2),
        (bayou.SGLD(steps=2, draws=1), 3, 1),
    ],
)
def test_small_products_are_computed_by_one_thread(method, width, expected):
    x = torch.randn(50, 4)
    layer = Watched(width, width)
    Watched.counts = []
    net = nn.Sequential(nn.Linear(4, width), layer, nn.Linear(width, 3))
    bayou.fit(net, (x, x.argmax(1) % 3), method)
    assert set(Watched.counts[-2:]) == {expected}
    assert torch.get_num_threads() == 2


def test_the_last_of_two_runs_restores_the_number_of_threads():
    first = threads.suitable_threads(1)
    second = threads.suitable_threads(1)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == 2


def test_the_largest_product_of_a_network():
    net = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
    out, work = threads.largest_product(lambda: net(torch.zeros(2, 3, 8, 8)))
    assert out.shape == (2, 10)
    assert work == 2 * 8 * 4 * 4 * (3 * 5 * 5)  # the convolution: 256 numbers, 75 products each
