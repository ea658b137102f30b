"""What has to hold on a GPU of Apple (MPS): there is no float64, and its stream is one of its own.

The tests of seeds run everywhere, with a stream that stands for that of the device.
"""

import types

import pytest
import torch
from torch import nn

import bayou
from bayou.core import rng

needs_mps = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an MPS device")
X = torch.linspace(-1, 1, 40)[:, None]
Y = X.sin()


@pytest.fixture
def stream(monkeypatch):
    """A generator in the place of the global stream of MPS."""
    generator = torch.Generator().manual_seed(5)
    fake = types.SimpleNamespace(_get_default_mps_generator=lambda: generator)
    monkeypatch.setattr(torch, "mps", fake)
    return generator


def test_a_block_seeds_and_restores_the_stream_of_the_device(stream):
    before = stream.get_state()
    draws = []
    for _ in range(2):
        with rng.isolated(3, torch.device("mps")):
            draws.append(torch.rand(4, generator=stream))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(stream.get_state(), before)
    assert len(rng.states(torch.device("mps"))) == 2


@needs_mps
def test_a_draw_on_the_device_is_a_function_of_seed_and_index():
    like = torch.zeros((), device="mps")
    all_draws = rng.normal(10, (3,), like, seed=4)
    assert all_draws.device.type == "mps"
    assert torch.equal(rng.normal(4, (3,), like, seed=4, start=6), all_draws[6:])


@needs_mps
@pytest.mark.parametrize(
    "method",
    [
        bayou.MAP(steps=50),
        bayou.VI(bayou.MeanField(), steps=50),
        bayou.VI(bayou.MNF(), steps=50),
        bayou.Ensemble(2, bayou.MAP(steps=20)),
        bayou.SGLD(steps=100),
    ],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")  # so few steps
def test_a_fit_on_the_device_repeats_itself_and_is_loaded_on_the_cpu(method, tmp_path):
    def fit():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).to("mps")
        data = (X.to("mps"), Y.to("mps"))
        return net, bayou.fit(
            net, data, method, likelihood=bayou.Gaussian(0.1), seed=0, progress=False
        )

    net, posterior = fit()
    mean = posterior.predict(X.to("mps"), 20, seed=0).mean
    assert mean.isfinite().all()
    assert torch.equal(fit()[1].predict(X.to("mps"), 20, seed=0).mean, mean)
    posterior.save(tmp_path / "model.bayou")
    loaded = bayou.load(tmp_path / "model.bayou", net.cpu())
    predictive = loaded.predict(X, 2000, seed=0)
    assert bayou.metrics.rmse(predictive, Y) < 1.0  # in float64, on the CPU
    torch.testing.assert_close(predictive.mean, mean.cpu(), rtol=0, atol=0.2)
