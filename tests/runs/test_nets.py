"""Networks by name: shapes, sizes, errors, and one that learns the digits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bayou
from bayou.adapters.sklearn import BayesRegressor
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.app.runs.net_choice import choose_net
from bayou.app.runs.nets import NETS, TABLE_NET, build, default_net, is_compared, layout_for
from bayou.data import load


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shape", [(5,), (1, 8, 8), (3, 32, 32), (1, 17, 16)])
def test_every_network_is_built_or_refused(name, shape):
    smallest = NETS[name].smallest
    if NETS[name].reads_columns:
        message = "needs the columns" if len(shape) == 1 else "needs rows of numbers"
        with pytest.raises(ValueError, match=message):
            build(name, shape, 7)
    elif smallest is None or (len(shape) == 3 and min(shape[1:]) >= smallest):
        net = build(name, shape, 7)
        assert net.eval()(torch.zeros(2, *shape)).shape == (2, 7)
        assert all(parameter.requires_grad for parameter in net.parameters())
    else:
        message = "use mlp" if len(shape) == 1 else "these fit: linear, mlp"
        with pytest.raises(ValueError, match=message):
            build(name, shape, 7)


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("linear", (5,), 5 * 10 + 10),
        ("mlp", (5,), 5 * 50 + 50 + 50 * 50 + 50 + 510),
        ("mlp-400", (1, 28, 28), 784 * 400 + 400 + 400 * 400 + 400 + 4010),
        ("tanh-20", (1,), 20 + 20 + 200 + 10),
        # 20-50-500: (25 + 1)·20, (20·25 + 1)·50, (50·4·4 + 1)·500, 501·10
        ("lenet", (1, 28, 28), 520 + 25_050 + 400_500 + 5_010),
        ("lenet-dropout", (1, 28, 28), 431_080),
        # 192-192-1000 on 32×32: (75 + 1)·192, (192·25 + 1)·192, (192·5·5 + 1)·1000, 1001·10
        ("lenet-cifar", (3, 32, 32), 14_592 + 921_792 + 4_801_000 + 10_010),
    ],
)
def test_sizes_are_those_of_the_papers(name, shape, parameters):
    assert count(build(name, shape, 10)) == parameters


def test_rates_of_dropout():
    for name, rates in (("lenet-dropout", [0.25, 0.25, 0.5]), ("lenet", [])):
        layers = build(name, (1, 28, 28), 10).modules()
        assert [layer.p for layer in layers if isinstance(layer, nn.Dropout)] == rates


def test_images_are_moved_while_training_and_only_then():
    """Every moved image is the image or its mirror image, shifted by up to two pixels; all fifty
    ways occur.
    """
    first = build("lenet-cifar-moved", (3, 32, 32), 5)[0]
    x = torch.arange(1.0, 1 + 3 * 9 * 8).reshape(1, 3, 9, 8).repeat(2000, 1, 1, 1)
    assert first.eval()(x) is x
    torch.manual_seed(0)
    moved = first.train()(x)
    assert moved.shape == x.shape
    ways = {}
    for mirrored in (x[:1], x[:1].flip(-1)):
        padded = nn.functional.pad(mirrored, (2, 2, 2, 2))
        for down in range(5):
            for right in range(5):
                way = padded[0, :, down : down + 9, right : right + 8].contiguous()
                ways[way.numpy().tobytes()] = 0
    for image in moved:
        ways[image.contiguous().numpy().tobytes()] += (
            1  # a KeyError is an image that is none of them
        )
    assert len(ways) == 50
    assert min(ways.values()) > 0
    assert max(ways.values()) < 40 + 5 * 40**0.5


def test_first_weights_follow_from_the_seed_and_leave_the_stream_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (build("mlp", (3,), 2, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)


def test_the_network_of_the_hmc_reference_has_its_names():
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(build("tanh-20", (1,), 1).state_dict()) == names


@pytest.mark.parametrize(
    ("name", "shape", "rows", "task", "expected"),
    [
        ("digits", (1, 8, 8), 1438, "classification", "digits"),
        ("cubic", (1,), 20, "regression", "tanh-20"),
        ("moons", (2,), 400, "classification", "silu-50"),
        ("houses", (4,), 1999, "regression", "silu-50"),
        ("houses", (4,), 5000, "regression", "mlp"),
        ("houses", (4,), 5001, "regression", "mlp-128"),
        ("houses", (4,), 5001, "classification", "mlp"),
        ("photos", (3, 32, 32), 5001, "classification", "lenet-cifar"),
        ("photos", (1, 28, 28), 5001, "classification", "lenet"),
    ],
)
def test_default_networks(name, shape, rows, task, expected):
    data = SimpleNamespace(name=name, input_shape=shape, n=rows, task=task)
    assert default_net(data) == expected


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "message"),
    [
        ("lennet", (1, 28, 28), 10, "did you mean 'lenet'"),
        ("lenet", (1, 8, 8), 10, "at least 16×16, got 1×8×8"),
        ("mlp", (3,), 0, "0 outputs"),
    ],
)
def test_unusable_networks_are_errors(name, shape, outputs, message):
    with pytest.raises(ValueError, match=message):
        build(name, shape, outputs)


def test_every_network_describes_itself_in_a_line():
    for net in NETS.values():
        line = f"{net.name}  {net.describe()}"
        assert ("images of" in line) == (net.smallest is not None)
        assert "\n" not in line
        assert len(line) <= 120


def test_the_digits_network_learns_the_digits():
    """97 % or more after 20 epochs of Adam."""
    data = load("digits")
    (x, y), (x_test, y_test) = data.train, data.test
    net = build(default_net(data), data.input_shape, data.output_size, seed=0)
    optimizer, generator = (
        torch.optim.Adam(net.parameters(), 2e-3),
        torch.Generator().manual_seed(0),
    )
    for _ in range(20):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    assert float((net(x_test).argmax(-1) == y_test).double().mean()) >= 0.97


def test_only_large_tables_are_compared():
    assert is_compared((3,), 2000)
    assert not is_compared((3,), 1999)
    assert not is_compared((1, 8, 8), 5000)
    assert layout_for("mlp", torch.zeros(30, 2)) is None
    assert layout_for(TABLE_NET, torch.randn(30, 2)).columns == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_of_classes", [False, True])
def test_steps_choose_bins_and_the_lower_nll_decides(is_of_classes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 6, generator=generator)
    steps = (4 * x[:, :2]).floor().remainder(2).sum(1, keepdim=True)
    smooth = x.sum(1, keepdim=True)
    likelihood = bayou.Categorical() if is_of_classes else bayou.Gaussian(0.5, learn=True)
    for y, best in ((steps, TABLE_NET), (smooth[:400], None)):
        y = y - y.mean() + 0.3 * torch.randn(len(y), 1, generator=generator)
        outputs = 1
        if is_of_classes:
            y = (y[:, 0] > 0).long()
            outputs = 2
        y = y / y.std() if outputs == 1 else y
        choice = choose_net("mlp", x[: len(y)], y, outputs, likelihood, 0)
        nll = {trial["net"]: trial["nll"] for trial in choice.record["trials"]}
        assert choice.name == min(nll, key=nll.get) == (best or choice.name)
        assert "held-out training rows" in choice.note
        assert list(nll) == ["mlp", TABLE_NET]


def test_no_networks_are_compared_for_methods_that_have_their_own(tmp_path, monkeypatch):
    """As the network of infinite width has, in runs and in estimators."""

    def refuse(*arguments):
        raise AssertionError("networks were compared")

    monkeypatch.setattr("bayou.app.runs.net_choice.choose_net", refuse)
    monkeypatch.setattr("bayou.adapters.estimator.choose_net", refuse)
    monkeypatch.setattr("bayou.app.runs.nets.MIN_TABLE_NET_ROWS", 20)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 2))
    y = x[:, 0] + 0.1 * generator.normal(size=40)
    np.savez(tmp_path / "rows.npz", x=x, y=y[:, None])
    settings = {"data": str(tmp_path / "rows.npz"), "effort": 0.2}
    run = Run.create(tmp_path / "wide", Config(methods=("wide",), **settings))
    run.work()
    assert run.facts()["net"] == "silu-50"
    assert BayesRegressor("wide", effort=0.2).fit(x, y).net_ is None
    with pytest.raises(AssertionError, match="compared"):
        Run.create(tmp_path / "map", Config(methods=("map", "wide"), **settings)).work()
    with pytest.raises(AssertionError, match="compared"):
        BayesRegressor("map").fit(x, y)
