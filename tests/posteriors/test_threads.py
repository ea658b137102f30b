"""Any number of threads may predict at once, and a fit gives in a thread what it gives alone."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bayou
from bayou.core import rng
from bayou.network import Network, evaluating

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + X[:, 1] > 0).long()
START = bayou.MAP(steps=20)
THREADS, CALLS = 3, 6


def net(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), *extra, nn.Linear(6, 2))


class Random(nn.Module):
    """Draws from torch's global stream in eval mode too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x + 0.3 * torch.randn_like(x))


KINDS = {
    "VI": (bayou.VI(bayou.MeanField(0.3), steps=5), net),
    "MNF": (bayou.VI(bayou.MNF(), steps=5), net),
    "ensemble": (bayou.Ensemble(3, START), net),
    "mixture": (bayou.Ensemble(2, bayou.VI(bayou.MeanField(0.3), steps=5)), net),
    "linearized": (bayou.Laplace(start=START), net),
    "dropout": (bayou.MCDropout(START), lambda: net(nn.Dropout(0.3))),
    "recurrent": (bayou.VI(bayou.MeanField(0.3), steps=2), lambda: Recurrent()),
    "random": (bayou.VI(bayou.MeanField(0.3), steps=5), Random),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.rnn(x.unsqueeze(-1))[0][:, -1])


@pytest.fixture
def busy():
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_in_threads_are_the_serial_ones_to_the_bit(kind, busy):
    method, make = KINDS[kind]
    posterior = bayou.fit(make(), (X, Y), method=method, progress=False)
    x = X[:5]
    state = torch.get_rng_state()
    expected = [posterior.predict(x, 4, seed=seed).outputs for seed in range(CALLS)]

    def work(thread):
        order = [(seed + 7 * thread) % CALLS for seed in range(CALLS)]
        return all(
            torch.equal(posterior.predict(x, 4, seed=seed).outputs, expected[seed])
            for seed in order
        )

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))
    assert torch.equal(torch.get_rng_state(), state)
    assert kind != "random" or not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize(
    ("method", "extra"),
    [
        (bayou.VI(bayou.MNF(), steps=6), (nn.Dropout(0.3),)),  # masks of torch's global stream
        (bayou.SGLD(steps=8, draws=4), ()),
    ],
    ids=["MNF, dropout", "SGLD"],
)
def test_fits_in_threads_are_the_serial_ones_to_the_bit(method, extra, busy):
    def fit(seed):
        posterior = bayou.fit(networks[seed], (X, Y), method=method, seed=seed, progress=False)
        return posterior.sample(3, seed=0)

    networks = [net(*extra) for _ in range(2)]
    serial = [fit(seed) for seed in range(2)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(fit, range(2)))
    for one, two in zip(serial, together, strict=True):
        assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fit_is_not_moved_by_unseeded_draws_beside_it_nor_moves_them(busy):
    method, drawn = bayou.VI(bayou.MNF(), steps=30), []
    alone = bayou.fit(net(), (X, Y), method=method, progress=False).sample(2, seed=0)
    with ThreadPoolExecutor(1) as pool:
        network = net()
        torch.manual_seed(5)
        fit = pool.submit(bayou.fit, network, (X, Y), method=method, progress=False)
        while not fit.done():
            drawn.append(rng.integer(None))
        beside = fit.result().sample(2, seed=0)
    torch.manual_seed(5)
    assert drawn == [rng.integer(None) for _ in drawn]
    assert all(torch.equal(value, beside[name]) for name, value in alone.items())


def test_nested_blocks_hand_on_the_stream_and_get_it_back():
    """The outer stream is what others see while a block waits; each block goes on where it was."""
    cpu, seen = torch.device("cpu"), []
    torch.manual_seed(1)
    expected = [float(torch.rand(())) for _ in range(2)]
    torch.manual_seed(1)
    inside = threading.Event()

    def other():
        inside.wait()
        seen.append(float(rng.uniform(1, (), torch.zeros(()))))

    thread = threading.Thread(target=other)
    thread.start()
    with rng.isolated(7, cpu):
        outer = float(torch.rand(()))
        with rng.isolated(8, cpu):
            inner = [float(torch.rand(()))]
            inside.set()
            while not rng._TURNS.waiting:
                pass
            rng.normal(1, (), torch.zeros(()), 0)  # a draw by index: a place to hand on
            inner.append(float(torch.rand(())))
        outer = [outer, float(torch.rand(()))]
    thread.join()
    assert [*seen, float(torch.rand(()))] == expected
    for seed, drawn in ((7, outer), (8, inner)):
        torch.manual_seed(seed)
        assert drawn == [float(torch.rand(())) for _ in range(2)]


def test_eval_mode_lasts_until_the_last_thread_leaves_it():
    module = net()
    first, second = evaluating(module), evaluating(module)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(part.training for part in module.modules())
    second.__exit__(None, None, None)
    assert all(part.training for part in module.modules())


def test_a_shell_shares_the_tensors_and_leaves_the_network_alone():
    network = Network(net())
    params = {name: value.detach() for name, value in net().named_parameters()}
    network.net.train()
    before = {name: value.clone() for name, value in network.buffers().items()}
    x = X[:4]
    expected = net().eval()(x)
    assert torch.equal(network.evaluate(params, x), expected)
    assert network.net.training
    assert all(torch.equal(value, before[name]) for name, value in network.buffers().items())
    shell = network._shells[0].net
    assert shell[1].running_mean is network.net[1].running_mean
    assert shell[0].weight.numel() == 0  # the weights are let go
    network.net.double()  # buffers that are exchanged are seen
    double = {name: value.double() for name, value in params.items()}
    torch.testing.assert_close(
        network.evaluate(double, x.double()), expected.double(), rtol=1e-5, atol=1e-6
    )
    network.net[1].running_mean.fill_(1.0)
    assert not torch.allclose(network.evaluate(double, x.double()), expected.double(), atol=1e-2)


def test_modules_kept_in_lists_and_methods_kept_as_attributes_go_along():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
            self.order, self.twist = [self.a, self.b], self._twist

        def _twist(self, x):
            return x @ self.a.weight

        def forward(self, x):
            for layer in self.order:
                x = layer(x)
            return x + self.twist(x.new_ones(1, 3))[:, :2]

    torch.manual_seed(0)
    odd = Odd().eval()
    params = {name: value.detach() for name, value in odd.named_parameters()}
    assert torch.equal(Network(odd).evaluate(params, X), odd(X))
