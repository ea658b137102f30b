"""MC dropout: against the sum over all masks, and which dropout it finds."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import bayou
from bayou import MCDropout
from bayou.posteriors.masked import Masks
from tests.methods.draws import normal

F64 = torch.float64
SHORT = bayou.MAP(steps=6, batch_size=8, lr=0.01)
DRAWS = 1000
SIGMAS = 4.5  # a bound that a right answer misses once in 150,000 times


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def make_data(rows=20, *shape):
    x = torch.randn(rows, *(shape or (2,)), generator=torch.Generator().manual_seed(1), dtype=F64)
    return x, x.flatten(1).sum(1, keepdim=True)


def fitted(net, method, data=None, **options):
    options = {"likelihood": bayou.Gaussian(0.1), "progress": False} | options
    return bayou.fit(net.to(F64), make_data() if data is None else data, method=method, **options)


class Functional(nn.Module):
    """Dropout by a function, at a rate and in a mode that the network decides."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.last, self.options = nn.Linear(2, 8), nn.Linear(8, 1), options

    def forward(self, x):
        hidden = self.first(x)
        dropped = F.dropout(hidden, 0.5, self.training, **self.options)
        return self.last(hidden if self.options else dropped)  # in place: the result may be ignored


class Wrapped(nn.Module):
    """Some layer between two linear ones."""

    def __init__(self, layer, width=4, call=None, **attributes):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(2, width), layer, nn.Linear(width, 1)
        self.call = call or (lambda layer, x: layer(x))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.last(self.call(self.layer, self.first(x)).flatten(1))


def test_a_draw_is_one_function_of_all_rows():
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))
    posterior = fitted(net, MCDropout(SHORT))
    x, _ = make_data(7)
    outputs = posterior.predict(x, samples=9, seed=4).outputs
    assert len(outputs[:, 0, 0].unique()) > 5
    reversed_rows = posterior.predict(x.flip(0), samples=9, seed=4).outputs
    assert_close(reversed_rows.flip(1), outputs)
    sample = posterior.sample(9, seed=4)
    assert sample["dropout.seed"].dtype == torch.int64
    assert len(sample["dropout.seed"].unique()) == 9
    assert sample["0.weight"].stride(0) == 0  # one copy of the weights for all draws
    with bayou.network.evaluating(posterior.net):
        one = posterior.call({name: value[5] for name, value in sample.items()}, x)
    assert_close(one, outputs[5])


@pytest.mark.parametrize("options", [{}, {"inplace": True}])
def test_functional_dropout_is_found(options):
    posterior = fitted(Functional(**options), MCDropout(None))
    x, _ = make_data(4)
    before = x.clone()
    outputs = posterior.predict(x, samples=40, seed=0).outputs
    assert len(outputs[:, 0, 0].unique()) > 20
    assert torch.equal(x, before)
    point = fitted(posterior.target.net, bayou.MAP(steps=1, lr=1e-300))
    plain = point.predict(x).outputs[0]
    spread = outputs.std(0) / 40**0.5
    assert (
        (outputs.mean(0) - plain).abs() < 5 * spread
    ).all()  # the last layer is linear: dropout keeps its mean


@pytest.mark.parametrize("start", [SHORT, None])
def test_dropout_that_drops_nothing_is_refused(start):
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    with pytest.raises(
        ValueError, match=r"Sequential has only dropout with a rate of 0; put nn.Dropout"
    ):
        fitted(net, MCDropout(start))
    assert fitted(net, MCDropout(start, p=0.5)).p == 0.5
    net[1].p = 0.5
    fitted(net, MCDropout(start))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (
            nn.Sequential(nn.Linear(2, 1)),
            "Sequential calls no dropout in eval mode; put nn.Dropout",
        ),
        # with masks it would write at every draw, and the next draw would see what the last one left
        (
            nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(2, 1)),
            "modifies its input x",
        ),
        (
            Wrapped(nn.Dropout(0.5), call=lambda layer, x: layer(x.unsqueeze(0))[0]),
            r"dropout call 0 sees \(1, 8, 4\).*batch_first",
        ),
        (Wrapped(nn.Dropout1d(0.5)), r"dropout1d got an input \(8, 4\).*one example"),
    ],
)
def test_unsuitable_networks_are_refused(net, words):
    with pytest.raises(ValueError, match=words):
        fitted(net, MCDropout(SHORT))


class Hidden(nn.Module):
    """Attention that drops by a rate of its own, out of reach."""

    def __init__(self):
        super().__init__()
        self.attention_dropout = 0.2

    def forward(self, x):
        x = x.unsqueeze(1)
        p = self.attention_dropout if self.training else 0.0
        return F.scaled_dot_product_attention(x, x, x, dropout_p=p).squeeze(1)


def first_of(layer, x):
    return layer(x.unsqueeze(1))[0]


@pytest.mark.parametrize(
    ("layer", "call", "words"),
    [
        (lambda: Hidden(), None, r"layer \(Hidden, attention_dropout=0.2\)"),
        (
            lambda: nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True),
            first_of,
            r"layer \(LSTM, dropout=0.3\)",
        ),
        (
            lambda: nn.Dropout(0.4),
            lambda layer, x: layer(x) if layer.training else x,
            r"layer \(Dropout, p=0.4\)",
        ),
    ],
)
def test_inaccessible_dropout_is_an_error_with_its_name(layer, call, words):
    with pytest.raises(ValueError, match=f"no dropout in eval mode: {words}"):
        fitted(Wrapped(layer(), call=call), MCDropout(SHORT))
    both = nn.Sequential(nn.Dropout(0.5), Wrapped(layer(), call=call))
    with pytest.raises(ValueError, match=rf"not accessible: 1.{words}; MCDropout\(strict=False\)"):
        fitted(both, MCDropout(SHORT))
    posterior = fitted(both, MCDropout(None, strict=False))
    assert len(posterior.predict(make_data(3)[0], samples=20, seed=0).outputs[:, 0, 0].unique()) > 1


def test_unused_rates_are_no_error():
    net = Wrapped(nn.Dropout(0.5), dropout_rate=0.5)  # the parent keeps the rate that its part has
    fitted(net, MCDropout(None))
    single = nn.Sequential(
        nn.Dropout(0.5), Wrapped(nn.LSTM(4, 4, 1, batch_first=True), call=first_of)
    )
    single[1].layer.dropout = 0.3  # between layers, of which there is one
    fitted(single, MCDropout(None))


def test_dropout_of_attention_is_found(tmp_path):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    net = Wrapped(layer, call=lambda layer, x: layer(x.unsqueeze(1)))
    posterior = fitted(net, MCDropout(SHORT, p=0.3))
    x = make_data(3)[0]
    outputs = posterior.predict(x, samples=20, seed=0).outputs
    assert len(outputs[:, 0, 0].unique()) > 10
    posterior.save(tmp_path / "p.bayou")
    again = bayou.load(tmp_path / "p.bayou", net)
    assert again.p == 0.3
    assert torch.equal(again.predict(x, samples=20, seed=0).outputs, outputs)


ATTENTION = {
    "plain": {},
    "rows second": {"batch_first": False},
    "without bias": {"bias": False},
    "bias of keys and zeros": {"add_bias_kv": True, "add_zero_attn": True},
    "sizes of keys and values": {"kdim": 3, "vdim": 5},
}


def attend(layer, need_weights):
    """The attention of 6 rows with 4 queries and 5 keys, with the rows first."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (6, 4, 8), "key": (6, 5, layer.kdim), "value": (6, 5, layer.vdim)}
    parts = {
        name: torch.randn(size, generator=generator, dtype=F64) for name, size in sizes.items()
    }
    if not layer.batch_first:
        parts = {name: part.transpose(0, 1) for name, part in parts.items()}
    padding = torch.zeros(6, 5, dtype=torch.bool)
    padding[:, 4] = True
    out, weights = layer(**parts, key_padding_mask=padding, need_weights=need_weights)
    return (out if layer.batch_first else out.transpose(0, 1)), weights


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention_with_masks_of_ones_is_that_of_torch(
    options,
):
    torch.manual_seed(0)
    layer = (
        nn.MultiheadAttention(8, 2, dropout=0.5, **{"batch_first": True} | options).double().eval()
    )
    expected, expected_weights = attend(layer, need_weights=True)
    keys = expected_weights.shape[-1]
    keep_all = torch.ones(2, 4, keys, dtype=torch.bool)
    with Masks(0, masks=[keep_all]) as mode:
        out, weights = attend(layer, need_weights=True)
    assert mode.rates == [0.5]
    assert_close(weights, 2 * expected_weights)  # m/(1 − p) = 2
    bias = torch.zeros(8).double() if layer.out_proj.bias is None else layer.out_proj.bias
    assert_close((out - bias) / 2 + bias, expected)


def test_mask_of_attention_is_the_same_for_all_rows_and_drops_at_its_rate():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True).double().eval()
    _, full = layer(*[torch.zeros(6, 50, 8, dtype=F64)] * 3, average_attn_weights=False)
    with Masks(3):
        x = torch.zeros(6, 50, 8, dtype=F64)
        _, weights = layer(x, x, x, average_attn_weights=False)
        _, average = layer(x, x, x)
    dropped = weights == 0
    assert torch.equal(dropped, dropped[:1].expand_as(dropped))
    rate = float(dropped[0].double().mean())
    assert abs(rate - 0.25) < 4 * (0.25 * 0.75 / 5000) ** 0.5  # 2·50·50 entries
    assert_close(weights[~dropped], full[~dropped] / 0.75)
    assert average.shape == (6, 50, 50)
    with Masks(3):
        out, none = attend(
            nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True).double(), need_weights=False
        )
    assert none is None
    assert out.shape == (6, 4, 8)
    with Masks(0), pytest.raises(ValueError, match="takes for one example"):
        layer(x[0], x[0], x[0])


def dropout_network():
    """With weights that stand for trained ones."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = nn.Dropout(0.2), nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 1)
        net = nn.Sequential(*layers).to(F64)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_()
        return net


def numbers(net):
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}


def pretrained(net, method):
    """The posterior of a network as it is, which must not be touched."""
    before, modes = numbers(net), [module.training for module in net.modules()]
    posterior = fitted(net, method, make_data(6))
    for name, value in net.state_dict().items():
        assert value.numpy().tobytes() == before[name].tobytes(), name
    assert [module.training for module in net.modules()] == modes
    for name, parameter in net.named_parameters():
        assert torch.equal(posterior.template()[name], parameter)
    assert posterior.stopped == "finished"
    return posterior


def moments_agree(outputs, values, weights, effective):
    """Mean and variance of (draws, rows) against values (outcomes, rows) with probabilities, within
    their errors.
    """
    mean = weights @ values
    central = values - mean
    variance, fourth = weights @ central**2, weights @ central**4
    assert (variance > 1e-3).all()
    np.testing.assert_array_less(
        abs(outputs.mean(0) - mean), SIGMAS * np.sqrt(variance / effective)
    )
    error = np.sqrt((fourth - variance**2) / effective)
    np.testing.assert_array_less(
        abs(outputs.var(0) - variance), SIGMAS * error + variance / effective
    )


def nearest(outputs, values):
    """Which outcome each draw is, all rows at once; an error if it is none."""
    distance = abs(outputs[:, None] - values[None]).max(2)
    assert distance.min(1).max() < 1e-12
    return distance.argmin(1)


def by_hand(x, rates):
    """The outputs for all 2⁶ masks over two inputs and four hidden units, (64, rows), and their
    probabilities.
    """
    w = numbers(dropout_network())
    values, weights = [], []
    for mask in itertools.product((0.0, 1.0), repeat=6):
        rate = np.repeat(rates, (2, 4))
        keep = np.array(mask)
        gain = keep / (1 - rate)
        hidden = np.tanh((x * gain[:2]) @ w["1.weight"].T + w["1.bias"])
        values.append(((hidden * gain[2:]) @ w["4.weight"].T + w["4.bias"])[:, 0])
        weights.append(np.prod(np.where(keep == 1, 1 - rate, rate)))
    return np.stack(values), np.array(weights)


@pytest.mark.parametrize("rate", [None, 0.6])
def test_mc_dropout_is_the_sum_over_all_masks(rate):
    """Every draw is the network with one mask, as often as its probability (Gal & Ghahramani)."""
    posterior = pretrained(dropout_network(), MCDropout(start=None, p=rate))
    x, _ = make_data(5)
    rates = (0.2, 0.4) if rate is None else (rate, rate)
    values, weights = by_hand(x.numpy(), rates)
    outputs = posterior.predict(x, samples=DRAWS, seed=0).outputs[..., 0].numpy()
    which = nearest(outputs, values)
    moments_agree(outputs, values, weights, DRAWS)
    dead = (
        np.arange(64) % 16 == 0
    )  # without any hidden unit the inputs do not matter: four masks, one outcome
    which[dead[which]] = 0
    weights = (
        np.where(dead, np.arange(64) == 0, 1) * weights
        + (np.arange(64) == 0) * weights[dead][1:].sum()
    )
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    frequency = np.bincount(which, minlength=64) / DRAWS
    np.testing.assert_array_less(
        abs(frequency - weights), SIGMAS * np.sqrt(weights * (1 - weights) / DRAWS) + 1 / DRAWS
    )


@pytest.mark.parametrize(
    ("layer", "shape", "outcomes"),
    [
        (nn.Dropout(0.5), (4,), 16),
        (nn.Dropout1d(0.5), (3, 2), 8),
        (nn.Dropout2d(0.5), (3, 2, 2), 8),
        (nn.Dropout3d(0.5), (3, 1, 2, 2), 8),
    ],
)
def test_every_dropout_layer_has_the_outcomes_that_torch_has(layer, shape, outcomes):
    """Torch's own layer in training mode, many times on one row, against the draws of the
    posterior.
    """
    count = int(np.prod(shape))
    net = nn.Sequential(
        nn.Unflatten(1, shape), layer, nn.Flatten(), nn.Linear(count, count, bias=False, dtype=F64)
    )
    with torch.no_grad():
        net[3].weight.copy_(torch.eye(count))
    x = normal(2, count)
    posterior = fitted(net, MCDropout(start=None), (x, x))

    def outcomes_of(outputs):
        return outputs.mul(1e9).round().unique(dim=0)

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        theirs = outcomes_of(torch.stack([net.train()(x[:1])[0] for _ in range(800)]))
    ours = outcomes_of(posterior.predict(x[:1], samples=800, seed=0).outputs[:, 0])
    assert len(theirs) == outcomes
    assert torch.equal(ours, theirs)
