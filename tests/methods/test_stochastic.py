"""MC dropout: what it reaches, what it refuses, and what a draw depends on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.posteriors import Masked

F64 = torch.float64
SHORT = bayou.MAP(steps=6, batch_size=8, lr=0.01)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def make_data(rows: int = 20, *shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, *(shape or (2,)), generator=torch.Generator().manual_seed(1), dtype=F64)
    return x, x.flatten(1).sum(1, keepdim=True)


def fitted(net: nn.Module, method: Any, data: Any = None, **options: Any) -> Any:
    options = {"likelihood": bayou.Gaussian(0.1), "progress": False} | options
    return bayou.fit(net.to(F64), make_data() if data is None else data, method=method, **options)


class Functional(nn.Module):
    """Dropout by a function, at a rate and in a mode that the network decides."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last, self.options = nn.Linear(2, 8), nn.Linear(8, 1), options

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        dropped = F.dropout(hidden, 0.5, self.training, **self.options)
        return self.last(hidden if self.options else dropped)  # in place: the result may be ignored


class Wrapped(nn.Module):
    """Some layer between two linear ones."""

    def __init__(self, layer: nn.Module, width: int = 4, call: Any = None, **attributes: Any) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(2, width), layer, nn.Linear(width, 1)
        self.call = call or (lambda layer, x: layer(x))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.layer, self.first(x)).flatten(1))


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_a_draw_is_one_function_whatever_the_batch_and_the_chunk() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))
    posterior = fitted(net, bayou.MCDropout(SHORT))
    x, _ = make_data(7)
    outputs = posterior.predict(x, samples=9, seed=4).outputs
    assert len(outputs[:, 0, 0].unique()) > 5
    twice = posterior.predict(torch.cat([x.flip(0), x]), samples=9, seed=4).outputs
    torch.testing.assert_close(twice[:, :7].flip(1), outputs)
    torch.testing.assert_close(twice[:, 7:], outputs)
    sample = posterior.sample(9, seed=4)
    assert sample["dropout.seed"].dtype == torch.int64
    assert len(sample["dropout.seed"].unique()) == 9
    assert sample["0.weight"].stride(0) == 0  # one copy of the weights for all draws
    with bayou.network.evaluating(posterior.net):
        one = posterior.call({name: value[5] for name, value in sample.items()}, x)
    torch.testing.assert_close(one, outputs[5])


@pytest.mark.parametrize("options", [{}, {"inplace": True}])
def test_functions_are_reached_too(options: dict[str, Any]) -> None:
    posterior = fitted(Functional(**options), bayou.MCDropout(None))
    x, _ = make_data(4)
    before = x.clone()
    outputs = posterior.predict(x, samples=40, seed=0).outputs
    assert len(outputs[:, 0, 0].unique()) > 20
    assert torch.equal(x, before)
    plain = bayou.fit(posterior.target.net, make_data(), method=bayou.MAP(steps=1, lr=1e-300),
                      likelihood=bayou.Gaussian(0.1), progress=False).predict(x).outputs[0]  # fmt: skip
    spread = outputs.std(0) / 40**0.5
    assert bool(
        ((outputs.mean(0) - plain).abs() < 5 * spread).all()
    )  # the last layer is linear: dropout keeps its mean


def test_builtin_functions_are_reached_too() -> None:
    call = lambda layer, x: torch.feature_dropout(torch.dropout(x, 0.5, False), 0.5, False)  # noqa: E731
    posterior = fitted(Wrapped(nn.Identity(), 8, call), bayou.MCDropout(None))
    outputs = posterior.predict(make_data(3)[0], samples=30, seed=0).outputs
    assert len(outputs[:, 0, 0].unique()) > 10


def test_a_network_without_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential calls no dropout in eval mode; put nn.Dropout"):
        fitted(nn.Sequential(nn.Linear(2, 1)), bayou.MCDropout(SHORT))


@pytest.mark.parametrize("start", [SHORT, None])
def test_dropout_that_drops_nothing_is_refused(start: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"Sequential has only dropout with a rate of 0; put nn.Dropout"):
        fitted(net, bayou.MCDropout(start))
    assert fitted(net, bayou.MCDropout(start, p=0.5)).p == 0.5
    net[1].p = 0.5
    fitted(net, bayou.MCDropout(start))


def test_dropout_that_writes_into_the_input_of_the_network_is_refused() -> None:
    """With masks it would write at every draw, and the next draw would see what the last one left."""
    net = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="modifies its input x"):
        fitted(net, bayou.MCDropout(None))


class Hidden(nn.Module):
    """Attention that drops by a rate of its own, out of reach."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.2

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        p = self.attention_dropout if self.training else 0.0
        return F.scaled_dot_product_attention(x, x, x, dropout_p=p).squeeze(1)


def first_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.unsqueeze(1))[0]


@pytest.mark.parametrize(
    ("layer", "call", "words"),
    [
        (lambda: Hidden(), None, r"layer \(Hidden, attention_dropout=0.2\)"),
        (lambda: nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True), first_of, r"layer \(LSTM, dropout=0.3\)"),
        (
            lambda: nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
            lambda layer, x: layer(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))[0],
            r"layer \(MultiheadAttention, dropout=0.1\)",
        ),
        (lambda: nn.Dropout(0.4), lambda layer, x: layer(x) if layer.training else x, r"layer \(Dropout, p=0.4\)"),
    ],
)
def test_dropout_out_of_reach_is_named(layer: Any, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"no dropout in eval mode: {words}"):
        fitted(Wrapped(layer(), call=call), bayou.MCDropout(SHORT))
    both = nn.Sequential(nn.Dropout(0.5), Wrapped(layer(), call=call))
    with pytest.raises(ValueError, match=rf"not accessible: 1.{words}; MCDropout\(strict=False\)"):
        fitted(both, bayou.MCDropout(SHORT))
    posterior = fitted(both, bayou.MCDropout(None, strict=False))
    assert len(posterior.predict(make_data(3)[0], samples=20, seed=0).outputs[:, 0, 0].unique()) > 1


def test_rates_that_are_used_by_a_part_or_not_at_all_are_no_error() -> None:
    net = Wrapped(nn.Dropout(0.5), dropout_rate=0.5)  # the parent keeps the rate that its part has
    fitted(net, bayou.MCDropout(None))
    single = nn.Sequential(nn.Dropout(0.5), Wrapped(nn.LSTM(4, 4, 1, batch_first=True), call=first_of))
    single[1].layer.dropout = 0.3  # between layers, of which there is one
    fitted(single, bayou.MCDropout(None))


def test_a_transformer_drops_all_but_its_attention() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    net = Wrapped(layer, call=lambda layer, x: layer(x.unsqueeze(1)))
    with pytest.raises(ValueError, match="MultiheadAttention"):
        fitted(net, bayou.MCDropout(None))
    posterior = fitted(net, bayou.MCDropout(None, strict=False))
    assert len(posterior.predict(make_data(3)[0], samples=20, seed=0).outputs[:, 0, 0].unique()) > 10


def test_rows_must_come_first() -> None:
    call = lambda layer, x: layer(x.unsqueeze(0))[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"dropout call 0 sees \(1, 20, 4\).*batch_first"):
        fitted(Wrapped(nn.Dropout(0.5), call=call), bayou.MCDropout(SHORT), DataLoader(TensorDataset(*make_data()), 20))
    with pytest.raises(ValueError, match=r"dropout1d got an input \(8, 4\).*one example"):
        fitted(Wrapped(nn.Dropout1d(0.5)), bayou.MCDropout(SHORT))


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 1.0}, {"p": "half"}, {"start": "MAP"}])
def test_settings_of_dropout_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="MCDropout"):
        bayou.MCDropout(**options)


def test_rate_masks_noise_and_statistics_survive_a_file(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1))
    posterior = fitted(net, bayou.MCDropout(SHORT, p=0.7), likelihood=bayou.Gaussian(0.3, learn=True))
    assert isinstance(posterior, Masked)
    x, y = make_data(5)
    p = posterior.predict(x, samples=8, seed=2)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", net)
    assert isinstance(loaded, Masked)
    assert loaded.p == 0.7
    again = loaded.predict(x, samples=8, seed=2)
    assert torch.equal(again.outputs, p.outputs)
    assert torch.equal(again.log_prob(y), p.log_prob(y))
    assert loaded.target.likelihood.log_scale.item() != pytest.approx(torch.tensor(0.3).log().item(), abs=1e-4)
