"""Predictions in little memory: some draws and rows at a time, fewer where it runs out, and the
same answer.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.network import VmapOrLoop, evaluation, out_of_memory

assert_same = partial(assert_close, rtol=1e-12, atol=1e-12)
ERRORS = [
    RuntimeError("alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
]
LINUX = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc"
)


def untrained(net, x):
    bnn = bayou.bayesianize(net, bayou.MeanField(0.1), example=x[:2])
    return bnn.posterior(bayou.Gaussian(0.1), len(x))


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@LINUX
def test_many_functions_of_many_rows_take_little_more_memory_than_their_outputs():
    """200 functions × 10,000 rows: 8 MB of outputs. They took 400 MB, one layer of every
    function.
    """
    net, x = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 1)), torch.randn(10_000, 4)
    posterior = untrained(net, x)
    posterior.predict(x, 2, seed=0)
    before, most = resident(), 0.0

    def look(*_):
        nonlocal most
        most = max(most, resident() - before)

    posterior.network._shells[0].net.register_forward_hook(look)
    assert posterior.predict(x, 200, seed=0).outputs.shape == (200, 10_000, 1)
    assert most < 100


def test_rows_are_cut_where_a_layer_makes_much_of_them_and_the_answer_stays(monkeypatch):
    monkeypatch.setitem(evaluation.ACTIVATIONS, "cpu", 5000)
    net = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 2)).double()
    x = torch.randn(301, 4, dtype=torch.float64)
    posterior = untrained(net, x)
    rows = []
    posterior.predict(x[:2], 1)
    posterior.network._shells[0].net.register_forward_pre_hook(
        lambda module, args: rows.append(len(args[0]))
    )
    cut = posterior.predict(x, 3, seed=0).outputs
    assert set(rows) == {76, 73}  # at most 5,000 numbers / 50 units, in equal parts
    whole = posterior.predict(x, 3, seed=0, batch_size=301).outputs
    assert_same(cut, whole)


def test_masks_are_shared_by_rows_that_are_cut():
    net = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.4), nn.Tanh(), nn.Linear(50, 2)).double()
    x = torch.randn(200, 4, dtype=torch.float64)
    method = bayou.MCDropout(None)
    posterior = bayou.fit(
        net, (x, x[:, :2]), method=method, likelihood=bayou.Gaussian(0.1), progress=False
    )
    whole = posterior.predict(x, 3, seed=0).outputs
    cut = posterior.predict(x, 3, seed=0, batch_size=70).outputs
    assert_same(cut, whole)


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("together", [nn.BatchNorm1d(5, track_running_stats=False), Centered()])
def test_rows_that_see_one_another_are_not_cut(together, monkeypatch):
    monkeypatch.setitem(evaluation.ACTIVATIONS, "cpu", 100)
    net = nn.Sequential(nn.Linear(4, 5), together, nn.Linear(5, 1))
    x = torch.randn(200, 4)
    posterior = untrained(net, x)
    params = {name: value[0] for name, value in posterior.sample(1, seed=0).items()}
    assert_close(posterior.predict(x, 1, seed=0).outputs[0], posterior.call(params, x))


@pytest.mark.parametrize("error", [*ERRORS, MemoryError()])
def test_rows_are_halved_where_memory_runs_out_whatever_it_is_called(error, monkeypatch):
    net, x = nn.Linear(2, 1).double(), torch.randn(9, 2, dtype=torch.float64)
    posterior = untrained(net, x)
    whole = posterior.predict(x, 3, seed=0).outputs
    plain = nn.Linear.forward

    def small(self, x):
        if len(x) > 2:
            raise error
        return plain(self, x)

    monkeypatch.setattr(nn.Linear, "forward", small)
    assert_same(posterior.predict(x, 3, seed=0).outputs, whole)

    def never(self, x):
        raise error

    monkeypatch.setattr(nn.Linear, "forward", never)
    with pytest.raises(
        torch.OutOfMemoryError, match="runs out of memory with one function and 1 rows of x"
    ):
        posterior.predict(x, 3, seed=0)


@pytest.mark.parametrize("error", ERRORS)
def test_running_out_of_memory_is_no_reason_for_the_loop(error):
    calls = []

    def full(x):
        calls.append(x)
        raise error

    assert out_of_memory(error)
    each = VmapOrLoop(full, (0,))
    with pytest.raises(type(error)):
        each(torch.zeros(3, 2))
    assert len(calls) == 1
    assert not each.loop


def test_what_vmap_cannot_do_is_done_one_by_one():
    def branch(x):
        return {"sign": x.abs() if x.sum() > 0 else -x, "sum": x.sum()}

    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    each = VmapOrLoop(branch, (0,))
    found = each(x)
    assert each.loop
    assert torch.equal(found["sum"], torch.stack([row.sum() for row in x]))
    assert torch.equal(found["sign"], torch.stack([branch(row)["sign"] for row in x]))
    (gradient,) = torch.autograd.grad(found["sum"].sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    with torch.no_grad():
        assert torch.equal(each(x)["sign"], found["sign"])
    mapped = VmapOrLoop(lambda a, b: a["w"] @ b, (0, None))
    w, b = torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    assert_close(mapped({"w": w}, b), w @ b)
    assert not mapped.loop
    looped = VmapOrLoop(lambda a, b: a["w"] @ b, (0, None), loop=True)
    assert_close(looped({"w": w}, b), w @ b)
