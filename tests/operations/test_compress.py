"""Smaller networks: what is removed changes no output, whatever the layers between."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou.posteriors import Empirical

# The rows are the outputs of networks as they are.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*far from unit scale:bayou.core.progress.BayouWarning"
)
ROWS = torch.Generator().manual_seed(0)
X = torch.randn(7, 6, generator=ROWS, dtype=torch.float64)
IMAGES = torch.randn(3, 2, 8, 8, generator=ROWS, dtype=torch.float64)
SEQUENCES = torch.randn(4, 8, 5, generator=ROWS, dtype=torch.float64)
GAUSSIAN = bayou.Gaussian(1.0)
fit = partial(bayou.fit, likelihood=GAUSSIAN, progress=False)


class Net(nn.Module):
    """A function of a network and its inputs, with modules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def compress_point(make, x, spoil):
    """Return a network with weights that ``spoil`` sets to 0, and the compressed one."""
    torch.manual_seed(1)
    net = make().double().eval()
    data = (x, net(x).detach())
    fitted = fit(net, data, bayou.MAP(steps=1))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                    tensor.copy_(torch.rand_like(tensor) + 0.5)
        spoil(net)
    stack = {name: value[None] for name, value in net.state_dict().items()}
    posterior = Empirical(fitted.target, fitted.network, stack)
    after = bayou.compress(posterior, example_x=x)
    assert_same_outputs(net, after, x)
    assert after.compression.difference < 1e-12
    return after


def sizes(after):
    return {name: size for name, (_, size) in after.compression.layers.items()}


def assert_same_outputs(a, b, x):
    assert torch.allclose(a.eval()(x), b(x), rtol=1e-12, atol=1e-12)


def set_random_zeros(net):
    """Set filters, and the weights of inputs, to 0 at random."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            for axis in (0, 1):
                zero = torch.rand(module.weight.shape[axis]) < 0.35
                module.weight.index_fill_(axis, zero.nonzero()[:, 0], 0.0)


def chain(*widths, activation=nn.Tanh, bias=True):
    layers = []
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:], bias=bias))


def test_units_without_inputs_or_readers_are_removed():
    def spoil(net):
        net[2].weight[:, [0, 3]] = 0  # units 0 and 3 of the first layer are read by none
        net[0].weight[5] = 0  # unit 5 is the constant sigmoid(b)
        net[4].weight[:, 1] = 0

    after = compress_point(lambda: chain(6, 8, 4, 2, activation=nn.Sigmoid, bias=False), X, spoil)
    assert after.compression.layers == {
        "0": ((8, 6), (5, 6)),
        "2": ((4, 8), (3, 5)),
        "4": ((2, 4), (2, 3)),
    }
    assert after.compression.multiply_adds == (48 + 32 + 8, 30 + 15 + 6)
    assert after.compression.numbers == (8 * 7 + 4 * 9 + 8, 5 * 7 + 3 * 6 + 6)
    assert after[0].out_features == 5 == after[2].in_features
    assert not after.compression.whole


def test_removed_unit_makes_its_only_input_removable():
    def spoil(net):
        net[4].weight[:, 0] = 0  # so nothing reads unit 0 of layer 2,
        net[2].weight[1:, 6] = 0  # the only reader of unit 6 of layer 0

    after = compress_point(lambda: chain(6, 8, 4, 2, activation=nn.ReLU), X, spoil)
    assert sizes(after)["0"] == (7, 6)


def images(padding):
    def forward(net, x):
        x = net.b(F.silu(net.norm(net.a(x))))
        x = F.max_pool2d(F.silu(x), 2)
        return net.last(x.view(x.size(0), -1))

    return Net(
        forward,
        a=nn.Conv2d(2, 6, 3, padding=padding, bias=False),
        b=nn.Conv2d(6, 5, 3, padding=padding),
        norm=nn.BatchNorm2d(6),
        last=nn.Linear(5 * (4 if padding else 2) ** 2, 3),
    )


@pytest.mark.parametrize("padding", [0, 1])
def test_convolutions_with_batch_norm_and_flattening(padding):
    def spoil(net):
        net.a.weight[[0, 4]] = 0  # constants behind the batch norm
        net.b.weight[:, 2] = 0
        net.last.weight.view(3, 5, -1)[:, [1, 3]] = 0

    after = compress_point(lambda: images(padding), IMAGES, spoil)
    # Zeros are padded behind the batch norm, whose constants then are none at the border.
    assert sizes(after)["a"][0] == after.norm.num_features == (5 if padding else 3)
    assert sizes(after)["b"][0] == 3
    assert after.last.in_features == 3 * (16 if padding else 4)
    multiply_adds = 36 * 3 * 2 * 9 + 16 * 3 * 3 * 9 + 3 * 12
    if padding:
        multiply_adds = 64 * (5 * 2 * 9 + 3 * 5 * 9) + 3 * 48
    assert after.compression.multiply_adds[1] == multiply_adds


def space():
    def forward(net, x):
        x = net.pool(torch.sigmoid(net.b(net.a(x)) * 2))
        return net.last(torch.relu(net.c(x)).mean((2, 3)))

    return Net(
        forward,
        a=nn.Conv2d(2, 5, 3),
        b=nn.ConvTranspose2d(5, 6, 3, stride=2),
        pool=nn.AvgPool2d(3, padding=1),
        c=nn.Conv2d(6, 4, 1),
        last=nn.Linear(4, 2),
    )


def test_transposed_convolutions_and_means_over_space():
    def spoil(net):
        net.a.weight[0], net.a.bias[0] = 0, 0  # exactly 0
        net.a.weight[1] = 0  # a constant, which is none behind a transposed convolution
        net.b.weight[:, 2] = 0  # a constant, which is none behind a padded mean
        net.b.weight[3] = 0
        net.c.weight[:, 4] = 0
        net.last.weight[:, 1] = 0

    after = compress_point(space, IMAGES, spoil)
    assert sizes(after) == {"a": (3, 2, 3, 3), "b": (3, 5, 3, 3), "c": (3, 5, 1, 1), "last": (2, 3)}
    assert after.compression.multiply_adds[1] == 36 * 3 * 2 * 9 + 36 * 3 * 5 * 9 + 25 * 15 + 6


def test_units_of_flattened_sequences():
    def spoil(net):
        net[3].weight.view(2, 8, 6)[:, :, [1, 2]] = 0

    after = compress_point(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)),
        SEQUENCES,
        spoil,
    )
    assert sizes(after)["3"] == (2, 32)


def residual():
    def forward(net, x):
        x = torch.tanh(net.first(x))
        return net.last(F.relu(x + net.outer(F.gelu(net.inner(x)))))

    return Net(
        forward,
        first=nn.Linear(6, 5),
        inner=nn.Linear(5, 7),
        outer=nn.Linear(7, 5),
        last=nn.Linear(5, 2),
    )


def test_added_units_are_removed_together():
    def spoil(net):
        net.last.weight[:, [0, 1]] = 0
        net.inner.weight[:, 0] = 0  # of unit 0 all readers are gone, of unit 1 only one
        net.first.weight[4] = 0  # unit 4 is constant before the sum, but not behind it
        net.outer.weight[3], net.first.weight[3] = 0, 0  # unit 3 is constant in both

    after = compress_point(residual, X, spoil)
    assert sizes(after) == {"first": (3, 6), "outer": (3, 7), "inner": (7, 3), "last": (2, 3)}


def skip(inputs, units, stride):
    def forward(net, x):
        out = net.nb(net.b(net.relu(net.na(net.a(x)))))
        out += net.short(x)
        return net.relu(out)

    return Net(
        forward,
        a=nn.Conv2d(inputs, units, 3, stride, 1, bias=False),
        b=nn.Conv2d(units, units, 3, 1, 1, bias=False),
        na=nn.BatchNorm2d(units),
        nb=nn.BatchNorm2d(units),
        relu=nn.ReLU(inplace=True),
        short=nn.Identity() if stride == 1 else nn.Conv2d(inputs, units, 1, stride),
    )


def block():
    def forward(net, x):
        x = net.block(torch.relu(net.embed(x)).unsqueeze(1))
        return net.last(torch.relu(net.hidden(x.squeeze(1))))

    return Net(
        forward,
        embed=nn.Linear(6, 4),
        block=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        hidden=nn.Linear(4, 5),
        last=nn.Linear(5, 2),
    )


def test_transformer_block_is_left_whole_and_named():
    def spoil(net):
        net.embed.weight[0] = 0
        net.last.weight[:, 2] = 0

    compression = compress_point(block, X, spoil).compression
    assert compression.layers["embed"][1] == (4, 6)
    assert compression.layers["hidden"][1] == (4, 4)
    assert compression.whole.keys() >= {"block", "embed"}
    assert "hidden" not in compression.whole
    assert "block left whole" in str(compression)


def tied_layers():
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: nn.Sequential(
                nn.Linear(6, 3), Net(lambda _, x: x if x.sum() > 0 else -x), nn.Linear(3, 2)
            ),
            "read by 1",
        ),
        (tied_layers, "Linear with groups, tied or reparametrized weights"),
    ],
)
def test_layers_that_cannot_be_followed_keep_their_units(make, reason):
    after = compress_point(make, X, lambda net: net[-1].weight[:, 0].zero_())
    assert after[0].out_features == after[-1].in_features
    assert after.compression.whole["0"] == reason


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


@pytest.mark.parametrize(("padding", "bias"), [(0, True), (1, False)])
def test_depthwise_network_shrinks(padding, bias):
    def spoil(net):
        # The input of filter 0 is a constant: without zeros around it its output is one, too.
        net[0].weight[0] = 0
        net[3].weight[[1, 2]] = 0  # the outputs of filters 1 and 2 are constants
        net[6].weight[:, 3] = 0  # the output of filter 3 is read by none
        net[9].weight[5] = 0
        net[12].weight[:, 0] = 0

    after = compress_point(lambda: separable(padding, bias), IMAGES, spoil)
    channels = 4 if padding == 0 else 5
    assert after.compression.layers["3"] == ((8, 1, 3, 3), (channels, 1, 3, 3))
    assert sizes(after)["0"] == (channels, 2, 1, 1)
    assert sizes(after)["6"] == (4, channels, 1, 1)
    assert sizes(after)["9"] == (4, 1, 3, 3)
    assert after[3].groups == after[3].in_channels == after[3].out_channels == channels
    assert after[1].num_features == after[4].num_features == channels
    assert not after.compression.whole


def inverted():
    """An inverted residual: the input of the block is added to its output."""

    def forward(net, x):
        x = net.first(x).sigmoid()
        x = x + net.narrow(torch.relu(net.deep(torch.relu(net.wide(x)))))
        return net.head(net.again(x) + x).mean((2, 3))

    return Net(
        forward,
        first=nn.Conv2d(2, 6, 1),
        wide=nn.Conv2d(6, 9, 1),
        deep=nn.Conv2d(9, 9, 3, padding=1, groups=9),
        narrow=nn.Conv2d(9, 6, 1),
        again=nn.Conv2d(6, 6, 3, padding=1, groups=6),
        head=nn.Conv2d(6, 3, 1),
    )


def residual_network():
    blocks = [skip(5, 5, 1), skip(5, 6, 2), skip(6, 6, 1)]
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )


@pytest.mark.parametrize("make", [residual_network, inverted])
@pytest.mark.parametrize("seed", range(2))
def test_residual_networks_with_random_zeros(make, seed):
    def spoil(net):
        torch.manual_seed(seed)
        set_random_zeros(net)

    compression = compress_point(make, IMAGES, spoil).compression
    assert compression.numbers[1] < compression.numbers[0]
    assert not compression.whole


def shared():
    """A grouped convolution, and two layers with one weight."""

    def forward(net, x):
        x = net.grouped(net.conv(x).relu()).relu().mean((2, 3))
        return net.head(net.two(net.one(x).tanh()).tanh())

    net = Net(
        forward,
        conv=nn.Conv2d(2, 4, 3),
        grouped=nn.Conv2d(4, 4, 3, groups=2),
        one=nn.Linear(4, 4),
        two=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )
    net.two.weight = net.one.weight
    return net


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("make", [shared, lambda: separable(1)])
def test_weights_with_small_ratios_are_zero_in_layers_of_every_kind(make, bits):
    torch.manual_seed(0)
    x = IMAGES.float()
    posterior = fit(make().eval(), (x, torch.zeros(3, 2)), bayou.VI(steps=1, batch_size=3))
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
    after = bayou.compress(posterior, example_x=x, bits=bits)
    weights = {name: value for name, value in after.named_parameters() if value.ndim > 1}
    assert expected.keys() == weights.keys()
    for name, irrelevant in expected.items():
        if weights[name].shape == irrelevant.shape:
            assert torch.equal(weights[name] == 0, irrelevant), name
    zeros = sum(int((value == 0).sum()) for value in weights.values())
    assert after.compression.zeros == zeros
    assert after.compression.difference < 1e-4
    if bits:
        assert weights.keys() <= after.compression.bits.keys()
    if make is shared:
        assert after.compression.whole.keys() >= {"grouped", "one"}


def problem():
    x = torch.randn(600, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, (x[:, :1] * x[:, 1:2]).tanh()


@pytest.mark.slow
def test_sparse_vd_shrinks_and_predicts_as_before():
    x, y = problem()
    torch.manual_seed(0)
    method = bayou.VI(bayou.SparseVD(), steps=400, lr=0.03)
    posterior = fit(
        chain(12, 40, 1).double(), (x[:300], y[:300]), method, likelihood=bayou.Gaussian(0.1)
    )
    small = bayou.compress(posterior)
    full = posterior.to_module()
    pruned = posterior.to_module()
    with torch.no_grad():
        for guide in posterior.bayesian.guides:
            if guide.names[0].endswith("weight"):
                pruned.get_parameter(guide.names[0])[guide.log_alpha > 3] = 0
    assert_same_outputs(pruned, small, x)
    before, after = small.compression.numbers
    assert after < before / 3
    kept = (small[0].weight != 0).double()  # y depends on the first two inputs
    assert float(kept[:, :2].mean()) > float(kept[:, 2:].mean()) + 0.3
    full_error, error = ((net(x[300:]) - y[300:]).square().mean().item() for net in (full, small))
    assert error < full_error + 0.01 * float(y.var())


START = bayou.MAP(steps=5)
METHODS = {
    "MNF": bayou.VI(bayou.MNF(), steps=5),
    "NodeNoise": bayou.VI(bayou.NodeNoise(), steps=5),
    "HalfCauchy": bayou.VI(bayou.guides.HalfCauchy(), steps=5),
    "Laplace": bayou.Laplace("diagonal", start=START),
    "SWAG": bayou.SWAG(start=START, epochs=5),
    "IVON": bayou.IVON(steps=5),
}


@pytest.mark.parametrize("name", METHODS)
def test_posteriors_of_every_method_with_a_mean_and_a_spread(name):
    posterior = fit(chain(12, 10, 1).double(), problem(), METHODS[name])
    smallest = bayou.compress(posterior, 1e9, samples=20)
    assert smallest[0].out_features == 1  # at least one
    small = bayou.compress(posterior, 0.0, bits=True, samples=20)
    assert 1 <= small[0].out_features <= 10  # rounding may empty some
    assert small.compression.bytes[1] < small.compression.bytes[0] / 2


def spread_over():
    """A mean-field posterior whose means and stds are given numbers: (posterior, x)."""
    torch.manual_seed(0)
    x = torch.randn(50, 12, dtype=torch.float64)
    y = x[:, :1]
    net = chain(12, 10, 1).double()
    method = bayou.VI(bayou.MeanField(), steps=1, start="network")
    posterior = fit(net, (x, y), method)
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
    fitted = fit(posterior.to_module(), (x, x[:, :1]), bayou.MAP(steps=1))
    point = bayou.compress(fitted, bits=True)
    assert_same_outputs(fitted.to_module(), point, x)
    assert point.compression.bits == {}


def test_negative_threshold_raises():
    with pytest.raises(ValueError, match="threshold"):
        bayou.compress(spread_over()[0], -1.0)


BETWEEN = {
    "divisor": lambda: nn.AvgPool2d(2, divisor_override=1),
    "windows over the edge": lambda: nn.AvgPool2d(4, ceil_mode=True),
    "zeros not counted": lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "softmax": lambda: nn.Softmax(1),
    "reflected": lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 3, stride=2, output_padding=1),
    "gated": lambda: nn.Sequential(nn.Conv2d(6, 12, 1), nn.GLU(1)),
    "centered": lambda: Net(lambda _, x: x - x.mean(1, keepdim=True)),
    "scaled sum": lambda: Net(lambda _, x: torch.sub(x, x, alpha=3)),
    "called twice": lambda: Net(lambda net, x: net.c(torch.relu(net.c(x))), c=nn.Conv2d(6, 6, 1)),
    "concatenated": lambda: Net(
        lambda net, x: net.d(torch.cat([x, net.c(x)], 1)),
        c=nn.Conv2d(6, 3, 1),
        d=nn.Conv2d(9, 6, 1),
    ),
    "one plane for all": lambda: Net(lambda net, x: x * net.c(x), c=nn.Conv2d(6, 1, 1)),
    "turned": lambda: Net(lambda _, x: x.flip(1)),
}


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
def test_outputs_do_not_change_whatever_is_between_layers(name):
    def spoil(net):
        torch.manual_seed(3)
        set_random_zeros(net)

    after = compress_point(lambda: around(name), IMAGES, spoil)
    reasons = after.compression.whole.values()
    assert not any("differ" in reason or "raises" in reason for reason in reasons)


def norm_of_places():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 3))


def test_batch_norm_of_positions_is_no_batch_norm_of_units():
    after = compress_point(norm_of_places, SEQUENCES, set_random_zeros)
    assert after[1].num_features == 8
    assert after.compression.whole == {
        "0": "read by 1",
        "1": "BatchNorm1d is not followed, but for (N, units): pass an example_x of such",
    }
    after = compress_point(norm_of_places, SEQUENCES[:, 0], set_random_zeros)
    assert after[1].num_features < 8


@pytest.mark.parametrize(
    ("hook", "fault"),
    [
        (lambda layer, inputs, outputs: outputs.flip(-1), "the outputs differ by "),
        (
            lambda layer, inputs, outputs: outputs * torch.ones(8).to(outputs),
            "the network raises RuntimeError: ",
        ),
    ],
)
def test_units_stay_if_their_removal_changes_the_outputs(hook, fault):
    def make():
        net = chain(6, 8, 2)
        net[0].register_forward_hook(hook)  # which torch.fx does not trace
        return net

    after = compress_point(make, X, lambda net: net[2].weight[:, 0].zero_())
    assert after[0].out_features == 8
    assert after.compression.whole["0"].startswith(f"without its units {fault}")


def test_network_of_images_is_not_run_without_example_x():
    posterior = fit(around("batch norm"), (IMAGES.float(), torch.zeros(3, 2)), bayou.MAP(steps=1))
    compression = bayou.compress(posterior).compression
    assert compression.difference is None
    assert "not run: pass example_x" in str(compression)
