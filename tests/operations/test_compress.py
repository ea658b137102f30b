"""Smaller networks: what is removed changes no output, whatever the layers between."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou.operations import unit_graph
from bayou.posteriors import Empirical

small = importlib.import_module("bayou.operations.compress")  # its name is the function's

# The rows are the outputs of networks as they are.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*far from unit scale:bayou.core.progress.BayouWarning"
)
ROWS = torch.Generator().manual_seed(0)
X = torch.randn(7, 6, generator=ROWS, dtype=torch.float64)
IMAGES = torch.randn(3, 2, 8, 8, generator=ROWS, dtype=torch.float64)


def compressed(make, x, spoil):
    """A network with weights that ``spoil`` sets to 0, and what compress makes of a posterior that
    is this point.
    """
    torch.manual_seed(1)
    net = make().double().eval()
    fitted = bayou.fit(
        net,
        (x, net(x).detach()),
        method=bayou.MAP(steps=1),
        likelihood=bayou.Gaussian(1.0),
        progress=False,
    )
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                    tensor.copy_(torch.rand_like(tensor) + 0.5)
        spoil(net)
    stack = {name: value[None] for name, value in net.state_dict().items()}
    return net.eval(), bayou.compress(Empirical(fitted.target, fitted.network, stack), example_x=x)


def same(a, b, x):
    assert torch.allclose(a(x), b(x), rtol=1e-12, atol=1e-12)


def test_units_that_nothing_reads_or_that_read_nothing_go():
    def spoil(net):
        net[2].weight[:, [0, 3]] = 0  # units 0 and 3 of the first layer are read by none
        net[0].weight[5] = 0  # unit 5 is the constant sigmoid(b)
        net[4].weight[:, 1] = 0

    def make():
        return nn.Sequential(
            nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)
        )

    before, after = compressed(make, X, spoil)
    same(before, after, X)
    assert after.compression.layers == {
        "0": ((8, 6), (5, 6)),
        "2": ((4, 8), (3, 5)),
        "4": ((2, 4), (2, 3)),
    }
    assert after.compression.multiply_adds == (48 + 32 + 8, 30 + 15 + 6)
    assert after.compression.numbers == (8 * 7 + 4 * 9 + 8, 5 * 7 + 3 * 6 + 6)
    assert after[0].out_features == 5 == after[2].in_features
    assert not after.compression.whole


def test_a_removal_makes_others_possible():
    def spoil(net):
        net[4].weight[:, 0] = (
            0  # so nothing reads unit 0 of layer 2, the only reader of unit 6 of layer 0
        )
        net[2].weight[1:, 6] = 0

    before, after = compressed(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)
        ),
        X,
        spoil,
    )
    same(before, after, X)
    assert after.compression.layers["0"][1] == (7, 6)


class Images(nn.Module):
    def __init__(self, padding):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(2, 6, 3, padding=padding, bias=False),
            nn.Conv2d(6, 5, 3, padding=padding),
        )
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(5 * (4 if padding else 2) ** 2, 3)

    def forward(self, x):
        x = self.b(F.silu(self.norm(self.a(x))))
        x = F.max_pool2d(F.silu(x), 2)
        return self.last(x.view(x.size(0), -1))


@pytest.mark.parametrize("padding", [0, 1])
def test_convolution_batch_norm_and_flattening(padding):
    def spoil(net):
        net.a.weight[[0, 4]] = 0  # constants behind the batch norm
        net.b.weight[:, 2] = 0
        net.last.weight.view(3, 5, -1)[:, [1, 3]] = 0

    before, after = compressed(lambda: Images(padding), IMAGES, spoil)
    same(before, after, IMAGES)
    # Zeros are padded behind the batch norm, whose constants then are none at the border.
    assert after.compression.layers["a"][1][0] == after.norm.num_features == (5 if padding else 3)
    assert after.compression.layers["b"][1][0] == 3
    assert after.last.in_features == 3 * (16 if padding else 4)
    adds = (
        64 * (5 * 2 * 9 + 3 * 5 * 9) + 3 * 48
        if padding
        else 36 * 3 * 2 * 9 + 16 * 3 * 3 * 9 + 3 * 12
    )
    assert after.compression.multiply_adds[1] == adds


class Space(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 5, 3), nn.ConvTranspose2d(5, 6, 3, stride=2)
        self.pool, self.c, self.last = (
            nn.AvgPool2d(3, padding=1),
            nn.Conv2d(6, 4, 1),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        x = self.pool(torch.sigmoid(self.b(self.a(x)) * 2))
        return self.last(torch.relu(self.c(x)).mean((2, 3)))


def test_transposed_convolution_and_means_over_space():
    def spoil(net):
        net.a.weight[0], net.a.bias[0] = 0, 0  # exactly 0
        net.a.weight[1] = 0  # a constant, which is none behind a transposed convolution
        net.b.weight[:, 2] = 0  # a constant, which is none behind a padded mean
        net.b.weight[3] = 0
        net.c.weight[:, 4] = 0
        net.last.weight[:, 1] = 0

    before, after = compressed(Space, IMAGES, spoil)
    same(before, after, IMAGES)
    sizes = {name: size for name, (_, size) in after.compression.layers.items()}
    assert sizes == {"a": (3, 2, 3, 3), "b": (3, 5, 3, 3), "c": (3, 5, 1, 1), "last": (2, 3)}
    assert after.compression.multiply_adds[1] == 36 * 3 * 2 * 9 + 36 * 3 * 5 * 9 + 25 * 15 + 6


def test_units_of_a_sequence_that_is_flattened():
    def spoil(net):
        net[3].weight.view(2, 4, 5)[:, :, [1, 2]] = 0

    x = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, after = compressed(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2)), x, spoil
    )
    same(before, after, x)
    assert after.compression.layers["3"][1] == (2, 12)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.outer = nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(F.relu(x + self.outer(F.gelu(self.inner(x)))))


def test_units_that_are_added_go_together():
    def spoil(net):
        net.last.weight[:, [0, 1]] = 0
        net.inner.weight[:, 0] = 0  # of unit 0 all readers are gone, of unit 1 only one
        net.first.weight[4] = 0  # unit 4 is constant before the sum, but not behind it
        net.outer.weight[3], net.first.weight[3] = 0, 0  # unit 3 is constant in both

    before, after = compressed(Residual, X, spoil)
    same(before, after, X)
    layers = after.compression.layers
    assert layers["first"][1] == (3, 6)
    assert layers["outer"][1] == (3, 7)
    assert layers["inner"][1] == (7, 3)
    assert layers["last"][1] == (2, 3)


class Skip(nn.Module):
    def __init__(self, inputs, units, stride):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(inputs, units, 3, stride, 1, bias=False),
            nn.Conv2d(units, units, 3, 1, 1, bias=False),
        )
        self.na, self.nb, self.relu = (
            nn.BatchNorm2d(units),
            nn.BatchNorm2d(units),
            nn.ReLU(inplace=True),
        )
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inputs, units, 1, stride)

    def forward(self, x):
        out = self.nb(self.b(self.relu(self.na(self.a(x)))))
        out += self.short(x)
        return self.relu(out)


def test_a_residual_network_with_zeros_anywhere():
    """Random filters, random readers: the outputs stay, and so do all sizes fit together."""

    def make():
        blocks = [Skip(5, 5, 1), Skip(5, 6, 2), Skip(6, 6, 1)]
        return nn.Sequential(
            nn.Conv2d(2, 5, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
        )

    def spoil(net):
        layers = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
        for layer in layers:
            layer.weight[torch.rand(len(layer.weight)) < 0.3] = 0
            layer.weight[:, torch.rand(layer.weight.shape[1]) < 0.3] = 0
        net[-1].weight[:, 0] = 0
        for layer in (net[3].a, net[3].b):  # whose unit 0 then is read by none
            layer.weight[:, 0] = 0

    before, after = compressed(make, IMAGES, spoil)
    same(before, after, IMAGES)
    found = after.compression
    assert found.numbers[1] < 0.9 * found.numbers[0]
    assert (
        found.layers["2.b"][1][0] == found.layers["2.short"][1][0] == found.layers["3.b"][1][0] < 6
    )
    assert not found.whole


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = (
            nn.Linear(6, 4),
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        )
        self.hidden, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(
            torch.relu(self.hidden(self.block(torch.relu(self.embed(x)).unsqueeze(1)).squeeze(1)))
        )


def test_a_transformer_block_is_left_whole_and_named():
    def spoil(net):
        net.embed.weight[0] = 0
        net.last.weight[:, 2] = 0

    before, after = compressed(Block, X, spoil)
    same(before, after, X)
    found = after.compression
    assert found.layers["embed"][1] == (4, 6)
    assert found.layers["hidden"][1] == (4, 4)
    assert "block" in found.whole
    assert "embed" in found.whole
    assert "hidden" not in found.whole
    assert "block left whole" in str(found)


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_branches_on_values():
    def make():
        return nn.Sequential(nn.Linear(6, 3), Branches(), nn.Linear(3, 2))

    before, after = compressed(make, X, lambda net: net[2].weight[:, 0].zero_())
    same(before, after, X)
    assert after.compression.layers["0"][1] == (3, 6)
    assert "1" in after.compression.whole["0"]


def test_tied_layers_stay():
    def make():
        shared = nn.Linear(6, 6)
        return nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(6, 2))

    before, after = compressed(make, X, lambda net: net[4].weight[:, 0].zero_())
    same(before, after, X)
    assert "0" in after.compression.whole


def separable(padding, bias=True):
    """Two blocks of a pointwise and a depthwise convolution, as in MobileNet."""

    def block(inputs, outputs):
        return (
            nn.Conv2d(inputs, outputs, 1),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
            nn.Conv2d(outputs, outputs, 3, padding=padding, groups=outputs, bias=bias),
            nn.BatchNorm2d(outputs),
            nn.Hardsigmoid(),
        )

    head = (nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(*block(2, 8), *block(8, 6), *head)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
def test_depthwise_network_shrinks(padding, bias):
    def spoil(net):
        net[0].weight[0] = (
            0  # the input of filter 0 is a constant: only without zeros around it is its output one
        )
        net[3].weight[[1, 2]] = 0  # the outputs of filters 1 and 2 are constants
        net[6].weight[:, 3] = 0  # the output of filter 3 is read by none
        net[9].weight[5] = 0
        net[12].weight[:, 0] = 0

    before, after = compressed(lambda: separable(padding, bias), IMAGES, spoil)
    same(before, after, IMAGES)
    assert after.compression.difference < 1e-12
    channels = 4 if padding == 0 else 5
    assert after.compression.layers["3"] == ((8, 1, 3, 3), (channels, 1, 3, 3))
    assert after.compression.layers["0"][1] == (channels, 2, 1, 1)
    assert after.compression.layers["6"][1] == (4, channels, 1, 1)
    assert after.compression.layers["9"][1] == (4, 1, 3, 3)
    assert after[3].groups == after[3].in_channels == after[3].out_channels == channels
    assert after[1].num_features == after[4].num_features == channels
    assert not after.compression.whole


class Inverted(nn.Module):
    """An inverted residual: the input of the block is added to its output."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 1)
        self.wide = nn.Conv2d(6, 9, 1)
        self.deep = nn.Conv2d(9, 9, 3, padding=1, groups=9)
        self.narrow = nn.Conv2d(9, 6, 1)
        self.again = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        x = self.first(x).sigmoid()
        x = x + self.narrow(torch.relu(self.deep(torch.relu(self.wide(x)))))
        return self.head(self.again(x) + x).mean((2, 3))


def test_depthwise_convolutions_in_residual_networks_with_zeros_anywhere():
    for seed in range(8):

        def spoil(net, seed=seed):
            generator = torch.Generator().manual_seed(seed)
            for module in net.modules():
                if isinstance(module, nn.Conv2d):
                    for axis in (0, 1):
                        zero = torch.rand(module.weight.shape[axis], generator=generator) < 0.3
                        module.weight.index_fill_(axis, zero.nonzero()[:, 0], 0.0)

        before, after = compressed(Inverted, IMAGES, spoil)
        same(before, after, IMAGES)
        assert after.compression.difference < 1e-12
        assert not after.compression.whole


class Shared(nn.Module):
    """A grouped convolution, and two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.grouped(self.conv(x).relu()).relu().mean((2, 3))
        return self.head(self.two(self.one(x).tanh()).tanh())


@pytest.mark.parametrize("bits", [False, True])
def test_irrelevant_weights_of_every_layer_are_set_to_zero(bits):
    """Weights whose spread is large are 0 in grouped, depthwise and tied layers, too; units that
    stay are named.
    """
    torch.manual_seed(0)
    for net in (Shared(), separable(1)):
        net = net.eval()
        data = (IMAGES.float(), torch.zeros(3, 2))
        posterior = bayou.fit(
            net,
            data,
            method=bayou.VI(steps=1, batch_size=3),
            likelihood=bayou.Gaussian(1.0),
            progress=False,
        )
        expected = {}
        with torch.no_grad():
            for guide in posterior.bayesian.guides:
                if not hasattr(guide, "log_std"):
                    continue  # normalization layers are points
                guide.center.uniform_(0.5, 1.0)
                guide.log_std.fill_(-4.0)
                if guide.center.ndim > 1:
                    irrelevant = torch.rand(guide.center.shape) < 0.4
                    guide.log_std[irrelevant] = 4.0
                    expected[guide.names[0]] = irrelevant
        after = bayou.compress(posterior, example_x=IMAGES.float(), bits=bits)
        kept = {name: value for name, value in after.named_parameters() if value.ndim > 1}
        assert expected.keys() == kept.keys()
        for name, irrelevant in expected.items():
            if kept[name].shape == irrelevant.shape:
                assert torch.equal(kept[name] == 0, irrelevant), name
        assert after.compression.zeros == sum(int((value == 0).sum()) for value in kept.values())
        assert after.compression.difference < 1e-4
        if bits:
            assert kept.keys() <= after.compression.bits.keys()
    whole = bayou.compress(
        bayou.fit(
            Shared(), data, method=bayou.VI(steps=1), likelihood=bayou.Gaussian(1.0), progress=False
        )
    ).compression.whole
    assert "grouped" in whole
    assert "one" in whole


def problem():
    x = torch.randn(600, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, (x[:, :1] * x[:, 1:2]).tanh()


@pytest.mark.slow
def test_sparse_vd_shrinks_and_keeps_what_it_learned():
    x, y = problem()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    method = bayou.VI(bayou.SparseVD(), steps=400, lr=0.03)
    posterior = bayou.fit(
        net, (x[:300], y[:300]), method=method, likelihood=bayou.Gaussian(0.1), progress=False
    )
    small, full, pruned = bayou.compress(posterior), posterior.to_module(), posterior.to_module()
    with torch.no_grad():
        for guide in posterior.bayesian.guides:
            if guide.names[0].endswith("weight"):
                pruned.get_parameter(guide.names[0])[guide.log_alpha > 3] = 0
    same(pruned, small, x)
    before, after = small.compression.numbers
    assert after < before / 3
    kept = (small[0].weight != 0).double()
    assert (
        float(kept[:, :2].mean()) > float(kept[:, 2:].mean()) + 0.3
    )  # two inputs say all there is
    error = [(f(x[300:]) - y[300:]).square().mean().item() for f in (full, small)]
    assert error[1] < error[0] + 0.01 * float(y.var())


@pytest.mark.parametrize(
    "family",
    [bayou.MNF(), bayou.NodeNoise(), bayou.MeanField(0.1)],
    ids=["MNF", "node", "MeanField"],
)
def test_units_of_any_family(family):
    x, y = problem()
    net = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    posterior = bayou.fit(
        net,
        (x, y),
        method=bayou.VI(family, steps=5),
        likelihood=bayou.Gaussian(0.1),
        progress=False,
    )
    small = bayou.compress(posterior, 1e9, samples=20)
    assert small(x).shape == (600, 1)
    assert small[0].out_features == 1  # at least one


START = bayou.MAP(steps=5)
METHODS = {
    "Laplace": bayou.Laplace("diagonal", start=START),
    "SWAG": bayou.SWAG(start=START, epochs=5),
    "IVON": bayou.IVON(steps=5),
    "HalfCauchy": bayou.VI(bayou.guides.HalfCauchy(), steps=5),
}


@pytest.mark.parametrize("name", METHODS)
def test_any_method_with_a_mean_and_a_spread(name):
    x, y = problem()
    net = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    posterior = bayou.fit(
        net, (x, y), method=METHODS[name], likelihood=bayou.Gaussian(0.1), progress=False
    )
    small = bayou.compress(posterior, 0.0, bits=True)
    assert 1 <= small[0].out_features <= 10  # rounding may empty some
    assert {*small.compression.bits} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert small.compression.bytes[1] < small.compression.bytes[0] / 2


def spread_over(sizes=(12, 10, 1), seed=0):
    """A mean-field posterior whose means and stds are given numbers: (posterior, x)."""
    torch.manual_seed(seed)
    x = torch.randn(50, sizes[0], dtype=torch.float64)
    y = x[:, :1]
    net = nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])).double()
    method = bayou.VI(bayou.MeanField(), steps=1, start="network")
    posterior = bayou.fit(
        net, (x, y), method=method, likelihood=bayou.Gaussian(0.1), progress=False
    )
    with torch.no_grad():
        for guide in posterior.bayesian.guides:
            guide.center.copy_(torch.randn_like(guide.center))
            guide.log_std.copy_(torch.randn_like(guide.log_std) - 2)
    return posterior, x


def test_bits_round_to_a_grid_as_fine_as_the_posterior_is_sure():
    posterior, x = spread_over()
    mean, std = posterior.mean(), posterior.std()
    full, small = posterior.to_module(), bayou.compress(posterior, 0.0, bits=True, example_x=x[:1])
    size = 0
    for name, value in small.named_parameters():
        step = std[name].square().reciprocal().mean().rsqrt()
        steps = value / step
        assert torch.allclose(steps, steps.round(), atol=1e-9)
        assert bool(((value - mean[name]).abs() <= step / 2 + 1e-12).all())
        bits = small.compression.bits[name]
        most = int(steps.abs().max().round())
        assert 2 ** (bits - 2) <= most < 2 ** (bits - 1) or (bits, most) == (1, 0)
        size += 64 + min(bits * value.numel(), value.numel() + bits * int((value != 0).sum()))
    assert small.compression.bytes == (8 * (12 * 10 + 10 + 10 + 1), -(-size // 8))
    assert "bits a number" in str(small.compression)
    far = ((full(x) - small(x)).square().mean().sqrt() / full(x).std()).item()
    assert 0 < far < 0.1
    assert small.compression.bytes[1] < small.compression.bytes[0] / 5


def test_rounding_to_zero_removes_units_and_points_are_not_rounded():
    posterior, x = spread_over()
    with torch.no_grad():
        reads = next(g for g in posterior.bayesian.guides if g.names[0] == "2.weight")
        reads.log_std.fill_(-1)
        reads.center[0, 3] = 0.1  # a step is 0.37: unit 3 is then read by none
    plain, small = (bayou.compress(posterior, 0.0, bits=bits) for bits in (False, True))
    assert plain[0].out_features == 10
    assert small[0].out_features < 10
    assert plain.compression.bits == {}
    fitted = bayou.fit(
        posterior.to_module(),
        (x, x[:, :1]),
        method=bayou.MAP(steps=1),
        likelihood=bayou.Gaussian(0.1),
        progress=False,
    )
    point = bayou.compress(fitted, bits=True)
    same(fitted.to_module(), point, x)
    assert point.compression.bits == {}


def test_errors_say_the_way_out():
    x, y = problem()
    net = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    posterior = bayou.fit(
        net, (x, y), method=bayou.MAP(steps=1), likelihood=bayou.Gaussian(0.1), progress=False
    )
    with pytest.raises(ValueError, match="threshold"):
        bayou.compress(posterior, -1.0)


class Between(nn.Module):
    """A function between layers, with modules of its own."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


BETWEEN = {
    "divisor": lambda: nn.AvgPool2d(2, divisor_override=1),
    "divisor of a call": lambda: Between(lambda _, x: F.avg_pool2d(x, 2, divisor_override=3)),
    "windows over the edge": lambda: nn.AvgPool2d(4, ceil_mode=True),
    "zeros in the mean": lambda: nn.AvgPool2d(3, padding=1),
    "zeros not counted": lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "layer norm": lambda: nn.LayerNorm(6),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "slopes": lambda: nn.PReLU(6),
    "softmax": lambda: nn.Softmax(1),
    "groups": lambda: nn.Conv2d(6, 6, 3, groups=2),
    "reflected": lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"),
    "same": lambda: nn.Conv2d(6, 6, 3, padding="same"),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 3, stride=2, output_padding=1),
    "gated": lambda: nn.Sequential(nn.Conv2d(6, 12, 1), nn.GLU(1)),
    "padded": lambda: nn.ConstantPad2d(1, 2.0),
    "cosine": lambda: Between(lambda _, x: x.cos()),
    "centered": lambda: Between(lambda _, x: x - x.mean(1, keepdim=True)),
    "scaled sum": lambda: Between(lambda _, x: torch.sub(x, x, alpha=3)),
    "called twice": lambda: Between(
        lambda net, x: net.c(torch.relu(net.c(x))), c=nn.Conv2d(6, 6, 1)
    ),
    "concatenated": lambda: Between(
        lambda net, x: net.d(torch.cat([x, net.c(x)], 1)),
        c=nn.Conv2d(6, 3, 1),
        d=nn.Conv2d(9, 6, 1),
    ),
    "added": lambda: Between(lambda net, x: x + net.c(x), c=nn.Conv2d(6, 6, 3, padding=1)),
    "one plane for all": lambda: Between(lambda net, x: x * net.c(x), c=nn.Conv2d(6, 1, 1)),
    "turned": lambda: Between(lambda _, x: x.flip(1)),
}


def some_zeros(net):
    generator = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
            for axis in (0, 1):
                zero = (
                    torch.rand(module.weight.shape[axis], generator=generator) < 0.35
                ).nonzero()[:, 0]
                module.weight.index_fill_(axis, zero, 0.0)


def around(name):
    """Units that are constants other than 0 before what is in between."""
    head = (
        nn.Conv2d(6, 4, 1),
        nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Sigmoid(), BETWEEN[name](), *head)


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_is_between_layers_the_outputs_stay(name):
    before, after = compressed(lambda: around(name), IMAGES, some_zeros)
    same(before, after, IMAGES)
    assert after.compression.difference < 1e-12
    assert not any(
        "differ" in why or "raises" in why for why in after.compression.whole.values()
    )  # known, not tried


SEQUENCES = torch.randn(4, 8, 5, generator=ROWS, dtype=torch.float64)


def norm_of_places():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 3))


def test_a_batch_norm_of_places_is_no_batch_norm_of_units():
    before, after = compressed(norm_of_places, SEQUENCES, some_zeros)
    same(before, after, SEQUENCES)
    assert after[1].num_features == 8
    assert after.compression.whole == {
        "0": "read by 1",
        "1": "BatchNorm1d is not followed, but for (N, units): pass an example_x of such",
    }
    rows = SEQUENCES[:, 0]
    before, after = compressed(norm_of_places, rows, some_zeros)
    same(before, after, rows)
    assert after[1].num_features < 8


@pytest.mark.parametrize(
    ("make", "x", "wrong", "fault"),
    [
        (
            lambda: around("divisor"),
            IMAGES,
            ("_changes_constant_means", lambda module: False),
            "the outputs differ by 0.0",
        ),
        (norm_of_places, SEQUENCES, None, "the network raises RuntimeError: "),
    ],
)
def test_a_layer_without_whose_units_the_outputs_are_others_stays_whole(
    make, x, wrong, fault, monkeypatch
):
    if wrong is not None:
        monkeypatch.setattr(unit_graph, *wrong)
    else:
        monkeypatch.setattr(small, "_find_matrix_norms", lambda net, x: {"1"})
    before, after = compressed(make, x, some_zeros)
    same(before, after, x)
    assert after.compression.whole["0"].startswith(f"without its units {fault}")
    assert list(after.compression.whole) == ["0"]
    assert f"0 left whole: without its units {fault}" in str(after.compression)


def test_without_rows_a_network_of_images_is_not_run_and_says_so():
    images = bayou.fit(
        around("batch norm"), (IMAGES.float(), torch.zeros(3, 2)), method=bayou.MAP(steps=1),
        likelihood=bayou.Gaussian(1.0), progress=False,
    )  # fmt: skip
    found = bayou.compress(images).compression
    assert found.difference is None
    assert "not run: pass example_x" in str(found)
