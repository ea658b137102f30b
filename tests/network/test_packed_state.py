"""Networks whose ``state_dict`` holds more than parameters and buffers: extra state and quantized
layers.
"""

import pytest
import torch
from torch import nn

import bayou
from bayou import MAP, SGHMC, VI, Ensemble, Gaussian, Laplace
from bayou.core.files import FileError

X = torch.linspace(-1, 1, 60).reshape(20, 3)
Y = X.sum(1, keepdim=True)

METHODS = {
    "map": MAP(steps=3),
    "vi": VI(steps=3),
    "laplace": Laplace(start=MAP(steps=3)),
    "ensemble": Ensemble(2, MAP(steps=3)),
    "sghmc": SGHMC(chains=1, draws=2, steps=8),
}


class WithExtraState(nn.Module):
    """A network with a state that is no tensor, and that it need not be able to read again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.version = 7

    def forward(self, x):
        out = self.layer(x)
        return out

    def get_extra_state(self):
        return {"version": self.version}


class WithTensorState(WithExtraState):
    """A network with an extra state that is a tensor."""

    def get_extra_state(self):
        return torch.tensor(self.version)

    def set_extra_state(self, state):
        self.version = int(state)


class Quantized(nn.Module):
    """A statically quantized layer below a head of ordinary numbers."""

    def __init__(self, scale=0.05):
        super().__init__()
        quantized = torch.ao.nn.quantized
        layer = quantized.Linear(3, 8)
        weight = torch.linspace(-1, 1, 24).reshape(8, 3)
        packed = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
        layer.set_weight_bias(packed, torch.zeros(8))
        layer.scale = 0.05
        layer.zero_point = 64
        self.body = nn.Sequential(
            quantized.Quantize(0.02, 64, torch.quint8), layer, quantized.DeQuantize()
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        out = self.head(self.body(x))
        return out


@pytest.fixture
def engine(monkeypatch):
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch cannot pack quantized weights")
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")


def fit(net, method, **options):
    likelihood = Gaussian(0.3)
    return bayou.fit(net, (X, Y), method, likelihood=likelihood, progress=False, **options)


def check_round_trip(net, method, path):
    posterior = fit(net, method)
    posterior.save(path)
    loaded = bayou.load(path, net)
    before = posterior.predict(X, samples=3, seed=0).outputs
    assert torch.equal(loaded.predict(X, samples=3, seed=0).outputs, before)
    single = posterior.to_module(seed=0)
    assert type(single) is type(net)
    assert single(X).isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_network_with_extra_state_is_fitted_and_saved(name, tmp_path):
    check_round_trip(WithExtraState(), METHODS[name], tmp_path / "posterior")


def test_extra_state_that_is_a_tensor_belongs_to_the_network(tmp_path):
    net = WithTensorState()
    check_round_trip(net, METHODS["map"], tmp_path / "posterior")
    other = WithTensorState()
    other.version = 3
    assert bayou.load(tmp_path / "posterior", other).target.net.version == 3


@pytest.mark.parametrize("name", METHODS)
def test_network_with_quantized_layers_below_a_head_is_fitted_and_saved(name, tmp_path, engine):
    check_round_trip(Quantized(), METHODS[name], tmp_path / "posterior")


def test_posterior_on_quantized_layers_refuses_other_packed_weights(tmp_path, engine):
    posterior = fit(Quantized(), METHODS["map"])
    posterior.save(tmp_path / "posterior")
    with pytest.raises(FileError, match="packed_params"):
        bayou.load(tmp_path / "posterior", Quantized(scale=0.02))


@pytest.mark.parametrize(("make", "kind"), [(WithExtraState, VI), (Quantized, MAP)])
def test_interrupted_run_resumes_with_packed_state(kind, make, tmp_path, engine):
    """A checkpoint holds the tensors, and the best epoch of a validation split is restored."""
    torch.manual_seed(0)
    net = make()
    method = kind(steps=8, batch_size=8, validation=0.2, checkpoint_every=2)
    whole = fit(net, method)
    _, again = (fit(net, method, checkpoint=tmp_path / "run") for _ in range(2))
    expected = whole.sample(2, seed=0)
    for name, value in again.sample(2, seed=0).items():
        assert torch.equal(value, expected[name])
