"""Full, diagonal and Kronecker curvature of many networks against dense Jacobians, in float64."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import bayou
from bayou.curvature import sweep as sweep_module
from bayou.curvature.kronecker import MAX_FACTOR, KroneckerSum
from bayou.curvature.layers import windows
from bayou.curvature.structures import DiagonalSum, FullSum
from bayou.curvature.sweep import Sweep, make_plan
from bayou.network import Call, Network
from tests.curvature import dense

F64 = torch.float64
N = 5


class Function(nn.Module):
    """A network of a few modules and a function that calls them."""

    def __init__(self, call, **modules):
        super().__init__()
        self.parts, self.function = nn.ModuleDict(modules), call

    def forward(self, x):
        return self.function(x, **self.parts)


class Twice(nn.Module):
    """Weights used in two calls, in a call and a product, as a matrix alone, through a view."""

    def __init__(self):
        super().__init__()
        self.shared, self.free = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 3) / 2)
        self.first, self.wide = nn.Linear(6, 4), nn.Parameter(torch.randn(3, 3) / 2)
        self.mixed = nn.Linear(4, 4)

    def forward(self, x):
        x = self.shared(self.shared(self.first(x)).tanh()).tanh()
        x = self.mixed(x) @ self.mixed.weight
        return F.linear(x @ self.free, self.wide.T)


class Norm(nn.Module):
    """A norm of channels, whose result is kept, with a gain that is no layer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(2, 1, 1))

    def forward(self, x):
        return x * (self.gain * (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt())


def lstm(x, cell, head):
    return head(cell(x)[0][:, -1])


# name → network, input of one example, does every tensor have a layer of its own?
NETS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 3)), (6,), True),
    "two layers": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)), (6,), True),
    "relu in place": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), (6,), True),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), nn.Flatten(), nn.Linear(9, 3)), (3, 2), True,
    ),
    "outputs over sequences": (lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), (2, 2), True),
    "sequences first": (
        lambda: Function(lambda x, a, b: b(a(x.movedim(1, 0)).tanh().sum(0)), a=nn.Linear(2, 4), b=nn.Linear(4, 3)),
        (3, 2), True,
    ),
    "rows folded": (
        lambda: Function(
            lambda x, a, b: b(a(x.flatten(0, 1)).tanh().unflatten(0, (-1, 3)).sum(1)),
            a=nn.Linear(2, 4), b=nn.Linear(4, 3),
        ),
        (3, 2), True,
    ),
    "positions before rows": (  # (3·N, 2) with the examples inside: no layer may take these for rows side by side
        lambda: Function(
            lambda x, a, b: b(a(x.movedim(1, 0).flatten(0, 1)).tanh().unflatten(0, (3, -1)).sum(0)),
            a=nn.Linear(2, 4), b=nn.Linear(4, 3),
        ),
        (3, 2), False,
    ),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        (2, 4, 4), True,
    ),
    "conv2d, odd": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2), nn.ReLU(inplace=True),
            nn.Conv2d(4, 2, 2, padding="same", dilation=2, bias=False), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3),
        ),
        (2, 5, 4), True,
    ),
    "conv2d, valid, circular": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2, padding="valid"), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
            nn.Flatten(), nn.Linear(18, 3),
        ),
        (1, 4, 4), True,
    ),
    "conv2d, frames folded": (
        lambda: Function(
            lambda x, a, b: b(a(x.flatten(0, 1)).tanh().flatten(1).unflatten(0, (-1, 2)).sum(1)),
            a=nn.Conv2d(2, 2, 2), b=nn.Linear(8, 3),
        ),
        (2, 2, 3, 3), True,
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, padding=2, dilation=2), nn.Tanh(), nn.Conv1d(4, 4, 2, groups=4), nn.Flatten(),
            nn.LazyLinear(3),
        ),
        (2, 7), True,
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2, padding=(1, 0, 0)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)),
        (1, 2, 3, 3), True,
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.Flatten(),
            nn.Linear(16, 6), nn.LayerNorm(6), nn.Tanh(), nn.RMSNorm(6), nn.Linear(6, 3), nn.BatchNorm1d(3),
        ),
        (2, 3, 3), True,
    ),
    "norm over two axes": (
        lambda: nn.Sequential(nn.LayerNorm((3, 2)), nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)),
        (3, 2), True,
    ),
    "used twice": (Twice, (6,), False),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)), (1, 3, 3), False,
    ),
    "lstm": (lambda: Function(lstm, cell=nn.LSTM(2, 3, batch_first=True), head=nn.Linear(3, 3)), (3, 2), False),
    "attention": (
        lambda: Function(
            lambda x, a, b: b(a(x, x, x, need_weights=False)[0].sum(1)),
            a=nn.MultiheadAttention(4, 2, batch_first=True), b=nn.Linear(4, 3),
        ),
        (3, 4), False,
    ),
}  # fmt: skip


def build(name):
    make, shape, _ = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = make().double(), torch.randn(N, *shape, dtype=F64)
        with torch.no_grad():
            net(x)  # lazy layers, and running statistics that are not 0 and 1
            for parameter in net.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return net.eval(), x


def labels(f):
    return torch.arange(f[..., 0].numel()).reshape(f.shape[:-1]) % f.shape[-1]


def swept(net, x, y, structure, kind="ggn", likelihood=None, batch=2, names=None, rows=None):
    """The curvature of all data, in batches, of which so many rows are passed at a time."""
    network = Network(net)
    params = {name: value.detach() for name, value in net.named_parameters()}
    plan = make_plan(network.call, params, names or list(params), (x,))
    sums = structure({name: params[name].shape for name in plan.wanted}, plan, x)
    likelihood = bayou.Categorical().bind(dtype=F64) if likelihood is None else likelihood
    sweep = Sweep(network.call, params, plan, likelihood, kind, 1, 0)
    sweep.rows = rows or sweep.rows
    for number, (inputs, targets) in enumerate(zip(x.split(batch), y.split(batch), strict=True)):
        outputs, labels = zip(*sweep.batch((inputs,), targets, number, sums), strict=True)
        assert_close(torch.cat(outputs), net(inputs).detach())
        assert torch.equal(torch.cat(labels), targets)
    return sums


def reference(net, x, y, kind, names=None):
    """(D, D), by dense Jacobians."""
    likelihood = bayou.Categorical().bind(dtype=F64)
    names = names or [name for name, _ in net.named_parameters()]
    jacobian, f = dense.jacobians(net, x, names), net(x).detach()
    if kind == "ggn":
        return dense.ggn(jacobian, dense.hessians(likelihood.log_prob, f, y))
    gradients = torch.einsum("nk,nkd->nd", dense.scores(likelihood.log_prob, f, y), jacobian)
    return gradients.mT @ gradients


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "ggn") for name in NETS), ("norms", "fisher"), ("used twice", "fisher")],
)
def test_full_and_diagonal_are_those_of_dense_jacobians(name, kind):
    net, x = build(name)
    y = labels(net(x))
    expected = reference(net, x, y, kind)
    full = swept(net, x, y, FullSum, kind)
    assert_close(full.tensors()["matrix"], expected, rtol=1e-8, atol=1e-10)
    assert set(full.plan.layers) | set(full.plan.other) == {n for n, _ in net.named_parameters()}
    assert (not full.plan.other) == NETS[name][2]
    diagonal = swept(net, x, y, DiagonalSum, kind).tensors()
    flat = torch.cat([diagonal[n].reshape(-1) for n, _ in net.named_parameters()])
    assert_close(flat, expected.diagonal(), rtol=1e-8, atol=1e-10)


class Shift(TorchFunctionMode):
    """Adds a tensor to the output of the call on one weight, and keeps the call."""

    def __init__(self, weight, shift):
        super().__init__()
        self.weight, self.shift, self.call = weight, shift, ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if len(args) < 2 or args[1] is not self.weight:
            return out
        self.call = (func, args, kwargs or {}, out)
        return out if self.shift is None else out + self.shift


def kronecker_reference(net, x, y, weight):
    """(A, G, positions) of a layer without groups: A by unfold, G by autograd on the output."""
    likelihood = bayou.Categorical().bind(dtype=F64)
    tensor = dict(net.named_parameters())[weight]
    a_total, g_total, positions = torch.zeros(()), torch.zeros(()), 0
    for n in range(len(x)):
        with Shift(tensor, None) as watch:
            f = net(x[n : n + 1]).detach()
        func, args, options, out = watch.call
        inputs = args[0].detach()
        if func is F.linear:
            a = inputs.reshape(-1, inputs.shape[-1])
        else:  # one column of the identity after another through the very convolution
            size = tensor[0].numel()
            eye = torch.eye(size, dtype=F64).reshape(size, *tensor.shape[1:])
            a = func(inputs, eye, None, *args[3:], **options).movedim(1, -1).reshape(-1, size)

        def shifted(shift, n=n):
            with Shift(tensor, shift):
                return net(x[n : n + 1]).reshape(-1)

        rows = torch.autograd.functional.jacobian(shifted, torch.zeros_like(out))  # (K, *out)
        rows = rows.reshape(len(rows), *out.shape)
        rows = rows if func is F.linear else rows.movedim(2, -1)
        g = rows.reshape(len(rows), -1, tensor.shape[0])  # (K, positions, O)
        h = dense.hessians(likelihood.log_prob, f, y[n : n + 1])[0]
        a_total, positions = a_total + a.mT @ a, positions + len(a)
        g_total = g_total + torch.einsum("kpo,kl,lpq->oq", g, h, g)
    return a_total, g_total, positions


@pytest.mark.parametrize(
    "name",
    [
        "two layers",
        "sequences",
        "sequences first",
        "rows folded",
        "conv2d",
        "conv1d",
        "conv3d",
        "norms",
    ],
)
def test_kronecker_factors_are_sums_over_inputs_and_output_gradients(name):
    net, x = build(name)
    y = labels(net(x))
    found = swept(net, x, y, KroneckerSum).tensors()
    checked = 0
    for weight, tensor in net.named_parameters():
        keys = [key for key in found if key.startswith(f"in|{weight}")]
        if not keys or (
            name == "conv1d" and tensor.ndim == 3 and tensor.shape[1] == 1
        ):  # its groups: below
            continue
        a, g, positions = kronecker_reference(net, x, y, weight)
        factor = found[keys[0]][0]
        assert_close(factor[: len(a), : len(a)], a / positions, rtol=1e-8, atol=1e-10)
        if keys[0].count("|") == 2:  # the bias is an input that is always 1
            assert float(factor[-1, -1]) == pytest.approx(1.0)
        assert_close(found[keys[0].replace("in|", "out|", 1)][0], g, rtol=1e-8, atol=1e-10)
        checked += 1
    assert checked >= 2


def test_the_groups_of_a_convolution_are_blocks_of_their_own():
    """A convolution of two groups has the factors of two convolutions."""
    net, x = build("conv2d, odd")
    y = labels(net(x))
    found = swept(net, x, y, KroneckerSum).tensors()
    conv = net[0]
    halves = [nn.Conv2d(1, 2, (3, 2), (1, 2), (2, 1), (2, 1)).double() for _ in range(2)]
    for half, weight, bias in zip(halves, conv.weight.chunk(2), conv.bias.chunk(2), strict=True):
        half.weight.data, half.bias.data = weight.detach().clone(), bias.detach().clone()
    split = Function(
        lambda x, a, b, rest: rest(torch.cat((a(x[:, :1]), b(x[:, 1:])), 1)),
        a=halves[0], b=halves[1], rest=net[1:],
    ).eval()  # fmt: skip
    assert_close(split(x), net(x))
    apart = swept(split, x, y, KroneckerSum).tensors()
    for part in ("in", "out"):
        blocks = found[f"{part}|0.weight|0.bias"]
        for block, half in zip(blocks, "ab", strict=True):
            assert_close(block, apart[f"{part}|parts.{half}.weight|parts.{half}.bias"][0])


def kron(found, names):
    """A ⊗ G in the order (outputs, inputs) of a weight with its bias as the last column."""
    return torch.kron(found[f"out|{names}"][0].contiguous(), found[f"in|{names}"][0].contiguous())


def columns_last(matrix, outputs, inputs):
    """A matrix over (weight, bias) in the order of ``kron``."""
    place = torch.arange(outputs * inputs).reshape(outputs, inputs)
    order = torch.cat((place, (outputs * inputs + torch.arange(outputs)).unsqueeze(1)), 1).reshape(
        -1
    )
    return matrix[order][:, order]


def test_kronecker_is_exact_for_one_example_and_for_one_layer_with_a_gaussian():
    net, x = build("linear")
    y = labels(net(x))[:1]
    found = swept(net, x[:1], y, KroneckerSum).tensors()
    expected = columns_last(reference(net, x[:1], y, "ggn"), 3, 6)
    assert_close(kron(found, "0.weight|0.bias"), expected, rtol=1e-10, atol=1e-12)
    likelihood = bayou.Gaussian(0.3).bind(dtype=F64)
    found = swept(net, x, net(x).detach(), KroneckerSum, "ggn", likelihood).tensors()
    jacobian = dense.jacobians(net, x, ["0.weight", "0.bias"])
    expected = columns_last(torch.einsum("nkd,nke->de", jacobian, jacobian) / 0.09, 3, 6)
    assert_close(kron(found, "0.weight|0.bias"), expected, rtol=1e-10, atol=1e-12)


def test_tensors_without_a_factor_have_a_diagonal_block():
    net, x = build("norms")
    y = labels(net(x))
    found = swept(net, x, y, KroneckerSum).tensors()
    diagonal = swept(net, x, y, DiagonalSum).tensors()
    rest = [key for key in found if key.startswith("square|")]
    assert {key.removeprefix("square|") for key in rest} == {
        f"{n}.{leaf}" for n in (1, 3, 6, 10) for leaf in ("weight", "bias")
    } | {"8.weight"}
    for key in rest:
        assert_close(found[key], diagonal[key.removeprefix("square|")])
        assert float(found[key].max()) > 0


def test_an_embedding_counts_each_row_once_per_example():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 3, padding_idx=2), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.tensor([[1, 1, 2, 5], [0, 1, 0, 1], [2, 2, 2, 2], [3, 4, 5, 5], [5, 4, 3, 1]])
    y = labels(net(x))
    expected = reference(net, x, y, "ggn")
    assert_close(swept(net, x, y, FullSum).tensors()["matrix"], expected, rtol=1e-8, atol=1e-10)
    found = swept(net, x, y, DiagonalSum).tensors()
    flat = torch.cat([found[n].reshape(-1) for n, _ in net.named_parameters()])
    assert_close(flat, expected.diagonal(), rtol=1e-8, atol=1e-10)


def test_a_layer_that_is_too_wide_for_factors_is_diagonal():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(MAX_FACTOR + 1, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    x = torch.randn(2, MAX_FACTOR + 1, dtype=F64)
    y = labels(net(x))
    found = swept(net, x, y, KroneckerSum).tensors()
    assert {key for key in found if key.startswith("in|")} == {"in|2.weight|2.bias"}
    jacobian = dense.jacobians(net, x, ["0.weight", "0.bias"])
    h = dense.hessians(bayou.Categorical().bind(dtype=F64).log_prob, net(x).detach(), y)
    expected = torch.einsum("nkd,nkl,nld->d", jacobian, h, jacobian)
    wide = torch.cat([found[f"square|0.{name}"].reshape(-1) for name in ("weight", "bias")])
    assert_close(wide, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("names", [["2.weight"], ["2.bias"], ["0.bias", "2.weight"]])
def test_some_of_the_tensors(names):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(N, 6, dtype=F64)
    y = labels(net(x))
    full = swept(net, x, y, FullSum, names=names).tensors()["matrix"]
    assert_close(full, reference(net, x, y, "ggn", names), rtol=1e-8, atol=1e-10)
    blocks = swept(net, x, y, KroneckerSum, names=names).tensors()
    assert {key for key in blocks if key.startswith("in|")} == {f"in|{name}" for name in names}


@pytest.mark.parametrize("rows", [1, 3])
def test_the_sum_is_independent_of_the_rows_in_a_pass(rows):
    net, x = build("conv2d")
    y = labels(net(x))
    expected = reference(net, x, y, "ggn")
    full = swept(net, x, y, FullSum, batch=4, rows=rows).tensors()["matrix"]
    assert_close(full, expected, rtol=1e-8, atol=1e-10)


def test_equal_rows_are_passed_one_by_one():
    """With one row, or many equal ones, no dry run can find the axis of the examples."""
    net, x = build("positions before rows")
    same = x[:1].expand(4, -1, -1).contiguous()
    y = labels(net(same))
    assert_close(swept(net, same, y, FullSum).tensors()["matrix"], reference(net, same, y, "ggn"))


def test_an_input_that_is_changed_in_place_later_is_copied():
    def call(x, a, b):
        hidden = a(x)
        out = b(hidden)
        hidden.mul_(0.0)  # the input of b, after the call
        return out

    torch.manual_seed(0)
    net = Function(call, a=nn.Linear(6, 4), b=nn.Linear(4, 3)).double()
    x = torch.randn(N, 6, dtype=F64)
    y = labels(net(x))
    names = ["parts.b.weight"]
    plain = nn.Sequential(net.parts["a"], net.parts["b"])
    expected = reference(plain, x, y, "ggn", ["1.weight"])
    assert_close(swept(net, x, y, FullSum, names=names).tensors()["matrix"], expected)


def patches(x, kernel, **settings):
    """The columns of ``F.unfold``: (B, C·Π kernel, positions)."""
    call = Call(F.conv2d, (x, x.new_empty(1, x.shape[1], *kernel)), settings)
    return windows(x, call).flatten(-2).flatten(1, 3)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_patches_are_those_of_unfold():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 6, dtype=F64)
    for kernel, stride, padding, dilation in (
        ((3, 3), 1, 0, 1),
        ((2, 3), (2, 1), (1, 2), (1, 2)),
        ((1, 4), 3, 2, 1),
    ):
        expected = F.unfold(x, kernel, dilation, padding, stride)
        found = patches(x, kernel, stride=stride, padding=padding, dilation=dilation)
        assert_close(found, expected, rtol=0, atol=0)
    for kernel, dilation in (((2, 3), 1), ((4, 2), (1, 3))):  # an odd number of zeros
        eye = torch.eye(3 * kernel[0] * kernel[1], dtype=F64).unflatten(1, (3, *kernel))
        expected = F.conv2d(x, eye, padding="same", dilation=dilation).flatten(2)
        found = patches(x, kernel, padding="same", dilation=dilation)
        assert_close(found, expected, rtol=0, atol=1e-15)
    strided = x.movedim(1, -1).contiguous().movedim(-1, 1)  # channels last in memory
    assert_close(patches(strided, (3, 3)), F.unfold(x, (3, 3)), rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The most numbers that a tensor had which an operation made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf._is_view():
                self.numbers = max(
                    self.numbers, leaf.untyped_storage().nbytes() // leaf.element_size()
                )
        return out


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


@pytest.mark.parametrize("structure", [DiagonalSum, KroneckerSum])
def test_memory_is_bounded_at_a_large_batch(structure):
    """Gradients of 512 images of a LeNet are 2·10⁸ numbers; no tensor has more than 2²²."""
    torch.manual_seed(0)
    net, x, y = lenet(), torch.randn(512, 1, 28, 28), torch.arange(512) % 10
    network, params = Network(net), {n: p.detach() for n, p in net.named_parameters()}
    plan = make_plan(network.call, params, list(params), (x,))
    sums = structure({n: p.shape for n, p in params.items()}, plan, x)
    sweep = Sweep(network.call, params, plan, bayou.Categorical().bind(), "fisher")
    with Largest() as largest:
        list(sweep.batch((x,), y, 0, sums))
    assert 2**18 < largest.numbers <= sweep_module.BUDGET[0]


@pytest.mark.parametrize("classes", [2, 9])
def test_columns_share_one_pass_of_tensors_without_a_layer(classes):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), Norm(), nn.Flatten(), nn.Linear(8, classes))
    x = torch.randn(4, 1, 4, 4)
    params = {n: p.detach() for n, p in net.named_parameters()}
    network = Network(net)
    calls = []

    def counted(own, *inputs):
        calls.append(len(calls))
        return network.call(own, *inputs)

    plan = make_plan(network.call, params, list(params), (x,))
    assert plan.other == ["1.gain"]
    sums = DiagonalSum({n: p.shape for n, p in params.items()}, plan, x)
    sweep = Sweep(counted, params, plan, bayou.Categorical().bind())
    list(sweep.batch((x,), labels(net(x)), 0, sums))
    assert len(calls) == 2  # of the layers, and of the others


def test_the_activations_of_a_batch_are_freed():
    """A graph that kept its own tensors held those of all batches: 130 GB of a ResNet once."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), Norm(), nn.Flatten(), nn.Linear(8, 3))

    def tensors(batches):
        data = torch.randn(4 * batches, 1, 4, 4), torch.arange(4 * batches) % 3
        posterior = bayou.fit(
            net, data, bayou.Laplace("diagonal", start=None, batch_size=4), progress=False
        )
        gc.collect()
        count = sum(type(one) is Tensor for one in gc.get_objects())
        del posterior
        return count

    tensors(1)
    assert tensors(16) == tensors(2)
