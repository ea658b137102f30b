"""Local reparameterization: the moments of every operation, and which tensors get it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.core import rng
from bayou.guides.guide import Gain, Weight
from bayou.guides.local import sample_outputs

DOUBLE = torch.float64
ROWS = 4


def layer(kind, *args, **options):
    return kind(*args, **options, dtype=DOUBLE)


# name -> (layer, input)
OPERATIONS = {
    "linear": (lambda b: layer(nn.Linear, 5, 4, bias=b), (5,)),
    "linear, 3-D input": (lambda b: layer(nn.Linear, 5, 4, bias=b), (3, 5)),
    "conv1d, stride, padding": (
        lambda b: layer(nn.Conv1d, 2, 4, 3, stride=2, padding=1, bias=b),
        (2, 7),
    ),
    "conv1d, circular": (
        lambda b: layer(nn.Conv1d, 2, 4, 3, padding=2, padding_mode="circular", bias=b),
        (2, 6),
    ),
    "conv1d, groups": (lambda b: layer(nn.Conv1d, 4, 6, 3, groups=2, bias=b), (4, 5)),
    "conv2d": (lambda b: layer(nn.Conv2d, 2, 3, 3, bias=b), (2, 4, 5)),
    "conv2d, oblong": (
        lambda b: layer(
            nn.Conv2d, 2, 3, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1), bias=b
        ),
        (2, 5, 6),
    ),
    "conv2d, reflect": (
        lambda b: layer(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect", bias=b),
        (2, 4, 4),
    ),
    "conv2d, depthwise": (lambda b: layer(nn.Conv2d, 4, 4, 2, groups=4, bias=b), (4, 3, 3)),
    "conv3d": (
        lambda b: layer(nn.Conv3d, 2, 2, 2, stride=2, dilation=2, padding=1, bias=b),
        (2, 4, 3, 4),
    ),
    "transposed 1d, groups": (
        lambda b: layer(nn.ConvTranspose1d, 4, 6, 2, groups=2, bias=b),
        (4, 3),
    ),
    "transposed 2d": (
        lambda b: layer(
            nn.ConvTranspose2d, 2, 3, 3, stride=2, output_padding=1, dilation=2, bias=b
        ),
        (2, 2, 3),
    ),
    "transposed 3d": (lambda b: layer(nn.ConvTranspose3d, 2, 2, 2, bias=b), (2, 2, 2, 2)),
}


def out_axis(net):
    return int(isinstance(net, nn.modules.conv._ConvTransposeNd))


def example(net, shape):
    return rng.normal(ROWS, shape, next(net.parameters()), seed=1)


def exact_moments(net, x, parts, fixed):
    """Mean and variance of every output under sampled weights, row by row, from the Jacobian in the
    weights.

    The output is linear in (weight, bias), so E = f(E W) and Var = Σ (∂f/∂W)²·std², with the gains
    of each row.
    """

    def moments(row, factors):
        center = dict(fixed)
        for name, part in parts.items():
            center[name] = part.mean
            for gain, z in zip(part.gains, factors[name], strict=True):
                shape = [-1 if axis == gain.axis else 1 for axis in range(part.mean.ndim)]
                center[name] = center[name] * z.reshape(shape)

        def output(params):
            return torch.func.functional_call(net, params, (row.unsqueeze(0),))[0]

        mean, jacobian = output(center), torch.func.jacrev(output)(center)
        variance = torch.zeros_like(mean)
        for name, part in parts.items():
            axes = tuple(range(mean.ndim, mean.ndim + part.mean.ndim))
            variance = variance + (jacobian[name].square() * part.std.square()).sum(axes)
        return mean, variance

    rows = {
        name: [gain.z.expand(len(x), -1) for gain in part.gains] for name, part in parts.items()
    }
    return torch.func.vmap(moments)(x, rows)


def local_output(net, x, parts, fixed):
    return sample_outputs(lambda means: torch.func.functional_call(net, fixed | means, (x,)), parts)


def local_moments(monkeypatch, net, x, parts, fixed):
    """Mean and variance of the local draw: the output with noise 0, and what noise 1 adds,
    squared.
    """
    monkeypatch.setattr(rng, "normal_like", torch.zeros_like)
    mean = local_output(net, x, parts, fixed)
    monkeypatch.setattr(rng, "normal_like", torch.ones_like)
    variance = (local_output(net, x, parts, fixed) - mean).square()
    return mean, variance


GAINS = {
    "no gain": [],
    "input, batch": [("in", 1)],
    "both, example": [("in", ROWS), ("out", ROWS)],
    "both, mixed": [("in", ROWS), ("out", 1)],
}


@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_mean_and_variance_are_those_of_sampled_weights(operation, gains, monkeypatch):
    make, shape = OPERATIONS[operation]
    cases = (
        ("both", True, True),
        ("both", True, False),
        ("weight", True, False),
        ("weight", False, False),
    )
    for stochastic, has_bias, needs_grad in (*cases, ("bias", True, False)):
        net = make(has_bias)
        x = example(net, shape).requires_grad_(needs_grad)
        params = {name: p.detach() for name, p in net.named_parameters()}
        like = params["weight"]
        parts = {}
        for i, (name, value) in enumerate(params.items()):
            if stochastic in ("both", name):
                std = 0.1 + 0.5 * rng.uniform(1, value.shape, like, seed=2 + i)[0]
                factors = []
                for where, n in GAINS[gains] if name == "weight" else []:
                    axis = out_axis(net) if where == "out" else 1 - out_axis(net)
                    factors.append(
                        Gain(
                            axis, 1 + 0.5 * rng.normal(n, (value.shape[axis],), like, seed=7 + axis)
                        )
                    )
                parts[name] = Weight(value, std, tuple(factors))
        fixed = {name: value for name, value in params.items() if name not in parts}
        want_mean, want_variance = exact_moments(net, x.detach(), parts, fixed)
        mean, variance = local_moments(monkeypatch, net, x, parts, fixed)
        assert_close(mean.detach(), want_mean, rtol=1e-10, atol=1e-12)
        assert_close(variance.detach(), want_variance, rtol=1e-7, atol=1e-9)


def test_a_gain_on_the_bias_per_row(monkeypatch):
    for operation in ("linear", "conv2d", "transposed 2d"):
        make, shape = OPERATIONS[operation]
        net = make(True)
        x = example(net, shape)
        params = {name: p.detach() for name, p in net.named_parameters()}
        z = 1 + 0.5 * rng.normal(ROWS, params["bias"].shape, x, seed=5)
        parts = {
            "weight": Weight(params["weight"], torch.full_like(params["weight"], 0.2)),
            "bias": Weight(params["bias"], torch.full_like(params["bias"], 0.3), (Gain(0, z),)),
        }
        want = exact_moments(net, x, parts, {})
        got = local_moments(monkeypatch, net, x, parts, {})
        assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_an_input_without_a_batch_axis(kind, monkeypatch):
    net = kind(2, 3, 2, dtype=DOUBLE)
    spatial = net.weight.ndim - 2
    x = rng.normal(1, (2, *range(3, 3 + spatial)), net.weight, seed=0)
    bias = Weight(net.bias.detach(), torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE))
    fixed = {"weight": net.weight.detach()}
    batched = local_moments(monkeypatch, net, x, {"bias": bias}, fixed)
    alone = local_moments(monkeypatch, net, x[0], {"bias": bias}, fixed)
    assert_close(alone, tuple(part[0] for part in batched))


def test_noise_is_standard_normal_and_independent_per_row_and_position():
    """Monte Carlo: the moments of local draws and of weight samples agree, and only the latter
    correlate rows.
    """
    net = nn.Conv1d(2, 3, 2, dtype=DOUBLE)
    x = rng.normal(1, (2, 3), net.weight, seed=0).expand(2, -1, -1)  # two equal rows
    bnn = bayou.bayesianize(net, bayou.MeanField(std=0.3, local="positions"), example=x)
    n = 40_000
    torch.manual_seed(0)
    with torch.no_grad():
        local = bnn.draw(n)(x).flatten(1)  # (n, rows·channels·positions)
        parts = bnn.sample(n, seed=0)
        columns = F.unfold(x.unsqueeze(2), (1, 2))  # (rows, in·k, positions)
        weights = parts["weight"].flatten(2)  # (n, out, in·k)
        sampled = torch.einsum("noi,rip->nrop", weights, columns) + parts["bias"][:, None, :, None]
        sampled = sampled.flatten(1)
        mean = bnn.call(bnn.mean(), x).flatten()
    std = sampled.std(0)
    error = 5 / math.sqrt(n)
    assert ((local.mean(0) - mean).abs() < error * std).all()
    assert ((sampled.mean(0) - mean).abs() < error * std).all()
    assert ((local.std(0) / std - 1).abs() < error * math.sqrt(2)).all()
    correlations = torch.corrcoef(local.T) - torch.eye(local.shape[1], dtype=DOUBLE)
    assert correlations.abs().max() < error
    half = local.shape[1] // 2
    assert torch.corrcoef(sampled.T)[0, half] > 0.99


def gradient_variance(regression, local, repeats):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 3)).to(DOUBLE)
    x = torch.rand(128, 10, dtype=DOUBLE)
    target = (x - x.mean(0)) @ torch.randn(10, 3, dtype=DOUBLE)
    bnn = bayou.bayesianize(net, bayou.MeanField(std=0.1, local=local), example=x)
    gradients = []
    for _ in range(repeats):
        out = bnn.draw()(x)
        loss = F.mse_loss(out, target) if regression else F.cross_entropy(out, target.argmax(1))
        gradients.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(bnn.parameters()))])
        )
    stacked = torch.stack(gradients)
    return float(stacked.var(0).sum()), stacked.mean(0)


@pytest.mark.parametrize(("regression", "ratio"), [(True, 20), (False, 8)])  # measured: 35 and 16
def test_the_gradient_has_far_less_variance(regression, ratio):
    """Kingma 2015: local noise is independent per row, so a batch of 128 averages it out."""
    repeats = 100
    local, mean_local = gradient_variance(regression, True, repeats)
    sampled, mean_sampled = gradient_variance(regression, False, repeats)
    assert sampled / local > ratio
    # The same gradient in expectation: their distance is that of two means of as many draws.
    distance = float((mean_local - mean_sampled).square().sum())
    assert distance < 4 * (local + sampled) / repeats


# --- which tensors get local noise --------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.hidden(self.embedding(x)).tanh())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.step(self.step(x).tanh()).tanh())


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 3))
        self.b, self.scale = nn.Parameter(torch.randn(2)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return F.linear(self.scale * (x @ self.w.T), self.v, bias=self.b)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.Sequential(
            nn.Linear(4, 5), nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        )
        self.blocks = nn.ModuleDict({"a": inner, "b": nn.ModuleList([nn.Linear(5, 2)])})

    def forward(self, x):
        apply = lambda f, h: f(h).relu()  # noqa: E731
        return self.blocks["b"][0](apply(self.blocks["a"], x))


class AuxiliaryHead(nn.Module):
    """A head that only training uses, as in Inception."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head, self.aux = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        h = self.norm(self.body(x)).relu()
        return self.head(h) + self.aux(h) if self.training else self.head(h)


FLOATS, TOKENS = torch.randn(6, 4), torch.arange(12).reshape(6, 2) % 7

# name -> (network, input, the tensors whose noise is local: those that a row meets once)
NETWORKS = {
    "attention": (Attention, torch.randn(6, 3, 4), {"head.weight", "head.bias"}),
    "tied": (Tied, TOKENS, set()),
    "twice": (Twice, FLOATS, {"head.weight", "head.bias"}),
    "two names": (TwoNames, FLOATS, {"head.weight", "head.bias"}),
    "functional": (Functional, FLOATS, {"v", "b"}),
    "nested": (
        Nested,
        FLOATS,
        {f"blocks.{n}.{p}" for n in ("a.0", "a.2.0", "b.0") for p in ("weight", "bias")},
    ),
    "bilinear": (lambda: Pair(), (FLOATS, FLOATS), set()),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        torch.randn(6, 3, 4),
        set(),
    ),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
        FLOATS,
        {"bias"},
    ),
    "auxiliary head": (
        AuxiliaryHead,
        FLOATS,
        {f"{n}.{p}" for n in ("body", "head") for p in ("weight", "bias")},
    ),
}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Bilinear(4, 4, 2)

    def forward(self, a, b):
        return self.f(a, b)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_dry_run_finds_where_noise_can_be_local(name):
    make, x, local = NETWORKS[name]
    inputs = x if isinstance(x, tuple) else (x,)
    bnn = bayou.bayesianize(make(), bayou.MeanField(std=0.3), example=x)
    assert bnn.local_names == local
    torch.manual_seed(0)
    draw = bnn.draw()
    out = draw(*inputs)
    assert not torch.equal(out, bnn.draw()(*inputs))
    (out.square().mean() + draw.kl).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters())
    assert bnn.draw(3)(*inputs).shape == (3, *out.shape)
    for family in (bayou.MeanField(std=0.3), bayou.NodeNoise(z="example")):
        bnn = bayou.bayesianize(make(), family)  # the first call is the dry run
        assert bnn.draw(examples=len(inputs[0]))(*inputs).isfinite().all()
        assert bnn.local_names == bayou.bayesianize(make(), family, example=x).local_names


@pytest.mark.parametrize("name", NETWORKS)
def test_a_function_sample_is_the_network_with_those_weights(name):
    make, x, _ = NETWORKS[name]
    inputs = x if isinstance(x, tuple) else (x,)
    net = make().eval()
    bnn = bayou.bayesianize(net, bayou.MeanField(std=0.3), example=x).eval()
    weights = {key: value[0] for key, value in bnn.sample(1, seed=3).items()}
    got = bnn.call(weights, *inputs)
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            parameter.copy_(weights[key])
    assert_close(got, net(*inputs), rtol=1e-5, atol=1e-6)
    left = [key for key, p in bnn.net.named_buffers() if key in bnn.names and p.numel()]
    assert not left, "weights were left behind"


def test_normalization_stays_a_point():
    bnn = bayou.bayesianize(Nested(), bayou.MNF())
    points = {name for name, spec in bnn.specs.items() if isinstance(spec, bayou.Delta)}
    assert points == {f"blocks.a.{n}.{p}" for n in ("1", "2.1") for p in ("weight", "bias")}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bidirectional": True}),
    ],
)
def test_recurrent_layers(kind, options):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, batch_first=True, dtype=DOUBLE, **options)
            width = options.get("proj_size", 4) * (2 if options.get("bidirectional") else 1)
            self.head = nn.Linear(width, 2, dtype=DOUBLE)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    x = torch.randn(5, 6, 3, dtype=DOUBLE)
    bnn = bayou.bayesianize(Net(), bayou.MeanField(std=0.2), example=x)
    assert bnn.local_names == {"head.weight", "head.bias"}
    sample = bnn.sample(2, seed=0)
    for s in range(2):
        one = {name: value[s] for name, value in sample.items()}
        other = Net()
        other.load_state_dict(one)
        for _ in range(2):  # twice with the very same tensors
            assert_close(bnn.call(one, x), other(x))
    draw = bnn.draw()
    (draw(x).square().sum() + draw.kl).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters())
    copy.deepcopy(bnn)  # fails where a weight of the last draw is kept, graph and all


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)


class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.run = lambda x: self.fc(x)

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize(
    ("net", "rules", "message"),
    [
        (Unused(), bayou.MeanField(), "'spare.weight', 'spare.bias' is never used by Unused"),
        (Unused(), bayou.Delta(), "'spare.weight', 'spare.bias' is never used by Unused"),
        (Closure(), bayou.MeanField(), "lambda that refers to the network"),
        (
            Unused(),
            {"conv*": bayou.MeanField(), "*": bayou.Delta()},
            r"'conv\*'.*'fc.weight', 'fc.bias', 'spare.weight'",
        ),
        (Unused(), {"*.weight": bayou.MeanField()}, "no pattern covers 'fc.bias', 'spare.bias'"),
    ],
)
def test_unused_weights_and_wrong_patterns_are_errors(net, rules, message):
    with pytest.raises(ValueError, match=message):
        bayou.bayesianize(net, rules, example=FLOATS)
    with pytest.raises(ValueError, match=message):  # at the first call, without an example
        bayou.bayesianize(net, rules).draw()(FLOATS)


def test_the_dry_run_changes_nothing():
    net = Nested().train()
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    bnn = bayou.bayesianize(net, bayou.MeanField())
    built = torch.get_rng_state()
    bnn.trace(FLOATS)
    assert torch.equal(built, state)
    assert torch.equal(torch.get_rng_state(), state)
    assert bnn.net.training
    aux = AuxiliaryHead()
    bnn = bayou.bayesianize(aux, bayou.MeanField(), example=FLOATS)
    assert torch.equal(bnn.net.norm.running_mean, aux.norm.running_mean)
    assert int(bnn.net.norm.num_batches_tracked) == 0
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


def test_gains_along_a_kernel_axis():
    """One z per draw multiplies the weight; per example it cannot be local, which is an error."""
    x, w, z = (
        torch.randn(3, 2, 8, dtype=DOUBLE),
        torch.randn(4, 2, 3, dtype=DOUBLE),
        torch.randn(3, 3, dtype=DOUBLE),
    )

    def convolve(params):
        return F.conv1d(x, params["weight"])

    shared = {"weight": Weight(w, None, (Gain(2, z[:1]),))}
    assert_close(sample_outputs(convolve, shared), F.conv1d(x, w * z[0]))
    with pytest.raises(ValueError, match="axis 2 of a weight cannot differ per row"):
        sample_outputs(convolve, {"weight": Weight(w, None, (Gain(2, z),))})


def test_S_draws_at_once_have_the_moments_of_one():
    """Rows tiled for S draws (all noise local) and looped ones (some weights sampled) are the same
    distribution.
    """
    x = torch.randn(3, 2, dtype=DOUBLE)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(DOUBLE)
    n = 3000
    torch.manual_seed(0)
    rules = {
        "*.weight": bayou.NodeNoise(z_std=0.5, where="both"),
        "*.bias": bayou.MeanField(std=0.3),
    }
    tiled = bayou.bayesianize(net, rules, example=x)
    looped = bayou.bayesianize(
        net, {**rules, "*.bias": bayou.MeanField(std=0.3, local=False)}, example=x
    )
    with torch.no_grad():
        a, b = (bnn.draw(n)(x).flatten(1) for bnn in (tiled, looped))
    scale = torch.maximum(a.std(0), b.std(0))
    assert ((a.mean(0) - b.mean(0)).abs() < 5 * scale * math.sqrt(2 / n)).all()
    assert ((a.std(0) / b.std(0) - 1).abs() < 0.15).all()
