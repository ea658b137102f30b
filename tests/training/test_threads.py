"""Threads by the size of the work, and the number of them put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.training import threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Asking(nn.Linear):
    """A layer that notes how many threads there are when it is called with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            SEEN.append(torch.get_num_threads())
        return super().forward(x)


SEEN: list[int] = []


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("small", "expected"), [(threads.SMALL, 1), (100, 2)])
@pytest.mark.parametrize(
    "method", [bayou.MAP(steps=2), bayou.VI(steps=2), bayou.SGLD(steps=2, draws=1)]
)
def test_small_work_has_one_thread(
    method: bayou.methods.Method, small: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SMALL", small)
    SEEN.clear()
    x = torch.randn(50, 4)
    bayou.fit(Asking(4, 3), (x, x.argmax(1) % 3), method=method, progress=False)
    assert set(SEEN[-2:]) == {expected}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_last_run_puts_the_threads_back() -> None:
    one, two = threads.suitable_threads(1), threads.suitable_threads(1)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    two.__exit__(None, None, None)
    assert torch.get_num_threads() == 2


def test_the_largest_product_of_a_network() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
    out, work = threads.largest_product(lambda: net(torch.zeros(2, 3, 8, 8)))
    assert out.shape == (2, 10)
    assert work == 2 * 8 * 4 * 4 * (3 * 5 * 5)  # the convolution: 256 numbers, 75 products each
