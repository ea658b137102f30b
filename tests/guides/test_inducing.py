"""The inducing posterior: exact for conjugate regression, its density, and the networks that it
supports.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn
from torch.testing import assert_close

import bayou
from bayou.core import rng
from bayou.guides.inducing import InducingGuide
from bayou.guides.regression import Regression, patches
from bayou.network import Call
from bayou.priors import BoundNormal, DensityPrior

DOUBLE = torch.float64
EVIDENCE = 6.465824  # of y = sin 3x under (1, x, x², x³), noise 0.1, prior N(0, I)
NOISE = 0.1


def randn(*shape, seed=0):
    return rng.normal(1, shape, torch.empty(0, dtype=DOUBLE), seed=seed)[0]


def shaken(bnn, scale=0.3):
    """With every parameter away from its start."""
    with torch.no_grad():
        for i, p in enumerate(bnn.parameters()):
            p.add_(scale * rng.normal(1, p.shape, p, seed=i)[0])
    return bnn


def make(net, x, rules=None, prior=None, points=3):
    torch.manual_seed(0)
    return shaken(
        bayou.bayesianize(net.to(DOUBLE), rules or bayou.Inducing(points), prior=prior, example=x)
    ).eval()


def guide_of(bnn):
    (guide,) = (guide for guide in bnn.guides if isinstance(guide, InducingGuide))
    return guide


def near(values, exact=0.0):
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - exact) <= 5 * error, (float(values.mean()), exact, error)


# --- one layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "dim"), [(7, 3), (3, 7), (4, 4)])
def test_a_regression_is_the_gaussian_of_its_formula(rows, dim):
    a, t = randn(2, rows, dim), randn(2, rows, 5, seed=1)
    q = Regression.fit(a, t)
    precision = torch.eye(dim, dtype=DOUBLE) + a.mT @ a
    covariance = torch.linalg.inv(precision)
    mean = covariance @ a.mT @ t
    assert_close(q.mean, mean)
    assert_close(q.variance.squeeze(-1), covariance.diagonal(dim1=-2, dim2=-1))
    exact = distributions.MultivariateNormal(
        mean.mT, precision_matrix=precision.unsqueeze(1)
    )  # (2, 5) of dim
    z = randn(2, dim, 5, seed=2)
    assert_close(q.log_prob(z), exact.log_prob(z.mT).sum())
    prior = distributions.MultivariateNormal(
        torch.zeros(dim, dtype=DOUBLE), torch.eye(dim, dtype=DOUBLE)
    )
    assert_close(q.kl(), distributions.kl_divergence(exact, prior).sum())
    eps = torch.zeros(
        dim, 2, dim, 5, dtype=DOUBLE
    )  # one unit of noise at a time: the columns of the root
    eps[range(dim), :, range(dim), :] = 1
    root = torch.stack([(q.draw(e) - mean)[..., 0] for e in eps], -1)
    assert_close(root @ root.mT, covariance)


CALLS = [
    (F.linear, (3, 5, 4), (2, 4), {}),
    (F.conv1d, (3, 2, 9), (4, 2, 4), {"padding": "same", "dilation": 2}),
    (F.conv1d, (2, 9), (4, 2, 3), {}),
    (F.conv2d, (3, 4, 6, 7), (6, 2, 3, 2), {"groups": 2, "padding": (1, 0)}),
    (F.conv2d, (3, 2, 8, 9), (3, 2, 3, 3), {"stride": (2, 1), "dilation": (1, 2)}),
    (F.conv3d, (2, 2, 4, 5, 4), (3, 2, 2, 3, 2), {"padding": (0, 1, 1), "stride": (1, 2, 1)}),
]


@pytest.mark.parametrize(("func", "x", "w", "options"), CALLS)
def test_an_output_is_a_product_of_its_patch(func, x, w, options):
    inputs, weight = randn(*x), randn(*w, seed=1)
    phi = patches(Call(func, (inputs, weight, None), options))  # (G, R, D)
    groups = options.get("groups", 1)
    product = phi @ weight.reshape(groups, w[0] // groups, -1).mT  # (G, R, out/G)
    out = func(inputs, weight, None, **options)
    if func is not F.linear:
        out = (out if len(x) == len(w) else out.unsqueeze(0)).movedim(1, -1)
    assert_close(product.movedim(0, 1).reshape(-1, w[0]), out.reshape(-1, w[0]))


# --- against the exact posterior ----------------------------------------------------------------


def cubic(which=slice(None), bias=False):
    x = torch.linspace(-1, 1, 21, dtype=DOUBLE)[which]
    powers = torch.stack([x**k for k in range(1 if bias else 0, 4)], 1)
    return (
        nn.Linear(powers.shape[1], 1, bias=bias, dtype=DOUBLE),
        powers,
        (3 * x).sin().unsqueeze(1),
    )


def at_the_data(net, x, y):
    """Inducing at the training rows: v = y and the precision of the noise."""
    bnn = bayou.bayesianize(net, bayou.Inducing(points=len(x)), example=x)
    layer = guide_of(bnn).layers[0]
    with torch.no_grad():
        layer.outputs.copy_(y)
        layer.log_precision.fill_(-2 * math.log(NOISE))
    return bnn


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "which", [slice(None), slice(3, 6)], ids=["more rows than weights", "fewer"]
)
def test_one_layer_at_the_data_is_the_exact_posterior(bias, which):
    """log p(y, w) − log q(w) is the evidence for every w, and so is the ELBO."""
    net, x, y = cubic(which, bias)
    bnn = at_the_data(net, x, y)
    phi = torch.cat([torch.ones_like(x[:, :1]), x], 1) if bias else x
    covariance = NOISE**2 * torch.eye(len(x), dtype=DOUBLE) + phi @ phi.T
    evidence = float(
        distributions.MultivariateNormal(torch.zeros(len(x), dtype=DOUBLE), covariance).log_prob(
            y[:, 0]
        )
    )
    if which == slice(None):
        assert evidence == pytest.approx(EVIDENCE, abs=1e-6)
    with torch.no_grad():
        stack = {name: randn(6, *p.shape, seed=5) for name, p in net.named_parameters()}
        w = torch.cat(
            [value.reshape(6, -1) for name, value in sorted(stack.items())], 1
        )  # the bias first
        noise = distributions.Normal(w @ phi.T, NOISE).log_prob(y[:, 0]).sum(1)
        log_joint = noise + distributions.Normal(0.0, 1.0).log_prob(w).sum(1)
        assert_close(log_joint - bnn.log_prob(stack), torch.full((6,), evidence, dtype=DOUBLE))
        covariance = torch.linalg.inv(torch.eye(4, dtype=DOUBLE) + phi.T @ phi / NOISE**2)
        mean = covariance @ phi.T @ y[:, 0] / NOISE**2
        misfit = (y[:, 0] - phi @ mean).square().sum() + (phi @ covariance @ phi.T).trace()
        fit = -0.5 * misfit / NOISE**2 - len(x) * math.log(NOISE * math.sqrt(2 * math.pi))
        assert float(fit - bnn.draw(2, seed=0).kl) == pytest.approx(evidence, abs=1e-8)


def test_the_bound_of_a_fit_stays_below_the_evidence():
    """With five points it comes close to the evidence from below, where a factorized Gaussian ends
    at 5.146.
    """
    net, x, y = cubic()
    method = bayou.VI(bayou.Inducing(points=5), steps=250, lr=0.05, schedule="cosine")
    posterior = bayou.fit(
        net, (x, y), method=method, likelihood=bayou.Gaussian(NOISE), seed=0, progress=False
    )
    assert bayou.elbo(posterior, (x, y), samples=2, seed=0).kind == "exact"
    stack = posterior.sample(2000, seed=0)
    w = stack["weight"].squeeze(1)
    log_p = distributions.Normal(w @ x.T, NOISE).log_prob(y[:, 0]).sum(1) + distributions.Normal(
        0, 1
    ).log_prob(w).sum(1)
    with torch.no_grad():
        each = log_p - posterior.log_prob(
            stack
        )  # constant where q is the posterior, so that its mean has little noise
    assert 6.0 < float(each.mean()) < EVIDENCE + 4 * float(each.std()) / math.sqrt(2000)


# --- several layers -----------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer that is used twice, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.step, self.tied, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.tied.weight = self.step.weight

    def forward(self, x):
        return self.head(self.step(self.step(x).tanh()).tanh() + x)


class Tokens(nn.Module):
    """Embedding, layer norm, a dense layer along a sequence, a second input."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 3), nn.LayerNorm(3)
        self.dense, self.head = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)

    def forward(self, tokens, x):
        return self.head(self.dense(self.norm(self.embedding(tokens))).tanh().mean(1)) + x


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, stride=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2, bias=False),
        nn.Flatten(),
        nn.Linear(2, 2),
    )


TOKENS = (torch.arange(8).reshape(4, 2) % 5, randn(4, 2))
MODELS = {  # net, inputs, rules, what else it is given
    "dense": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        randn(4, 3),
        None,
        set(),
    ),
    "convolutions": (convolutions, randn(3, 2, 4, 4), None, set()),
    "tokens": (Tokens, TOKENS, None, {"embedding.weight", "norm.weight", "norm.bias"}),
    "points for biases": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        randn(4, 3),
        {"*.bias": bayou.MeanField(), "*": bayou.Inducing(3)},
        {"0.bias", "2.bias"},
    ),
    "head only": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)),
        randn(4, 3),
        {"3.*": bayou.Inducing(3), "*": bayou.MeanField()},
        {"0.weight", "0.bias", "1.weight", "1.bias"},
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_log_prob_is_the_density_of_the_draws(model):
    """log q(w) = log N(ε) − log|∂w/∂ε| with the Jacobian of autograd, for the w that noise ε
    makes.
    """
    make_net, x, rules, given = MODELS[model]
    bnn = make(make_net(), x, rules, bayou.Normal("fan_in", gain=1.5))
    guide = guide_of(bnn)
    assert set(guide.parents) == given
    others = {name: value.detach() for name, value in bnn.mean().items() if name in given}

    def weights(flat):
        parts = dict(
            zip(
                guide.names,
                flat.split([shape.numel() for shape in guide.shapes.values()]),
                strict=True,
            )
        )
        eps = {name: part.reshape(guide.shapes[name]) for name, part in parts.items()}
        drawn, _ = guide._draw({"eps": eps, "parents": others})
        return torch.cat([drawn[name].flatten() for name in guide.names])

    eps = randn(sum(shape.numel() for shape in guide.shapes.values()), seed=9)
    w, jacobian = weights(eps).detach(), torch.autograd.functional.jacobian(weights, eps)
    want = (
        distributions.Normal(0.0, 1.0).log_prob(eps).sum()
        - torch.linalg.slogdet(jacobian).logabsdet
    )
    parts = w.split([shape.numel() for shape in guide.shapes.values()])
    params = {
        name: part.reshape(guide.shapes[name])
        for name, part in zip(guide.names, parts, strict=True)
    } | others
    with torch.no_grad():
        assert_close(guide.log_prob(params), want)
    stack = {
        name: torch.stack([value, value, value + 0.1]).unsqueeze(0)
        for name, value in params.items()
    }
    found = guide.log_prob(stack).detach()
    assert found.shape == (1, 3)
    assert_close(found[0, :2], want.expand(2))
    assert float(found[0, 2]) != pytest.approx(float(want))


def test_a_layer_may_be_used_twice_and_weights_tied():
    """The weights are drawn at the first call; the second has the same. (The bias of ``tied`` is
    never used.)
    """
    net = Twice()
    net.tied.bias.requires_grad_(False)
    bnn = make(net, randn(4, 3))
    guide = guide_of(bnn)
    assert set(guide.names) == {"step.weight", "step.bias", "head.weight", "head.bias"}
    draw = bnn.draw(500, seed=0)
    with torch.no_grad():
        sample = bnn.sample(500, seed=0)
        log_p = sum(
            distributions.Normal(0.0, 1.0).log_prob(sample[n]).flatten(1).sum(1)
            for n in guide.names
        )
        near(guide.log_prob(sample) - log_p - draw.draws[-1].kl)


def by_weight(shape, rank_one):
    """A scale for every weight, as a posterior that became a prior has it: by unit in and out, or
    any.
    """
    log_scale = randn(shape[0], *[1] * (len(shape) - 1)) + (
        randn(*shape[1:], seed=1) if len(shape) > 1 else 0.0
    )
    noise = 0.0 if rank_one else 0.5 * randn(*shape, seed=2)
    return DensityPrior(BoundNormal(shape, 0.3 * randn(*shape, seed=3), 0.4 * log_scale + noise))


PRIORS = {
    "normal, mean": bayou.Normal(0.7, mean=0.3),
    "learned, by unit": bayou.Normal("fan_in", gain=3.0, learn="units"),
    "by unit": {
        "0.*": bayou.Normal(0.5),
        "2.weight": by_weight((2, 4), True),
        "2.bias": by_weight((2,), True),
    },
    "by weight": {
        "0.*": bayou.Normal(0.5),
        "2.weight": by_weight((2, 4), False),
        "2.bias": by_weight((2,), False),
    },
}


@pytest.mark.parametrize(
    ("prior", "points"),
    [("normal, mean", 3), ("normal, mean", 9), ("by unit", 3), ("by weight", 9)],
)
def test_the_kl_is_that_of_the_densities(prior, points):
    """E[kl] = E[log q − log p]; the kl of a draw is its expectation given the layers before, where
    p is Gaussian.
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    bnn = make(net, randn(9, 3), prior=PRIORS[prior], points=points)
    guide = guide_of(bnn)
    with torch.no_grad():
        draw = guide.draw(4000, seed=1)
        log_p = sum(
            p.log_prob(draw.parts[name]) for name, p in zip(guide.names, guide.priors, strict=True)
        )
        each = guide.log_prob(draw.parts) - log_p
        near(draw.kl - each)
        assert float(draw.kl.std()) < 0.9 * float(each.std())


def test_directions_without_points_keep_the_prior():
    """With vanishing precision q is the prior, whatever its scales, and the KL is 0."""
    for prior in PRIORS:
        bnn = make(
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
            randn(9, 3),
            prior=PRIORS[prior],
        )
        with torch.no_grad():
            for layer in guide_of(bnn).layers:
                layer.log_precision.fill_(-60.0)
            assert float(bnn.draw(seed=0).kl.abs()) < 1e-9


def test_float32_is_safe_where_precisions_are_large():
    """At a precision of 1e9, beyond what a Cholesky factor in float32 survives, draws are close to
    those in float64.
    """
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
    double = make(net, randn(30, 3), points=30)
    with torch.no_grad():
        for layer in guide_of(double).layers:
            layer.log_precision.fill_(math.log(1e9))
    single = make(
        nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)), randn(30, 3), points=30
    )
    single.load_state_dict(double.state_dict())
    single.float()
    with torch.no_grad():
        noise = {
            name: randn(*shape, seed=i)
            for i, (name, shape) in enumerate(guide_of(double).shapes.items())
        }
        want, kl = guide_of(double)._draw({"eps": noise, "parents": {}})
        found, kl32 = guide_of(single)._draw(
            {"eps": {k: v.float() for k, v in noise.items()}, "parents": {}}
        )
    assert found["0.weight"].dtype == torch.float32
    for name in ("0.weight", "0.bias"):
        assert_close(found[name].double(), want[name], rtol=1e-3, atol=1e-3)
    assert kl32.isfinite()
    assert float(kl32) == pytest.approx(float(kl), rel=0.2)


# --- what a network may be ----------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_run_on_the_points_is_in_eval_mode(compiled):
    """Batch norm and dropout see the points as they see test rows: no statistic moves, no unit is
    dropped.
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    bnn = make(net, randn(9, 3))
    before = {name: buffer.clone() for name, buffer in bnn.net.named_buffers()}

    def draw():
        drawn = bnn.draw()
        weight = drawn.parts["3.weight"]
        return drawn.kl, weight

    torch.manual_seed(1)
    expected = draw()
    bnn.train()
    torch.manual_seed(1)
    torch._dynamo.reset()
    run = torch.compile(draw, fullgraph=True, backend="aot_eager") if compiled else draw
    assert_close(run(), expected)
    torch._dynamo.reset()
    assert all(torch.equal(buffer, before[name]) for name, buffer in bnn.net.named_buffers())


def test_other_tensors_are_left_to_their_rules():
    bnn = make(Tokens(), TOKENS)
    families = {name: type(spec).__name__ for name, spec in bnn.specs.items()}
    assert families == {
        "embedding.weight": "MeanField", "norm.weight": "Delta", "norm.bias": "Delta",
        "dense.weight": "Inducing", "dense.bias": "Inducing", "head.weight": "Inducing",
    }  # fmt: skip
    assert not guide_of(bnn).input0.is_floating_point()
    assert isinstance(guide_of(bnn).input1, nn.Parameter)
    sample = bnn.sample(3, seed=0)
    assert torch.equal(bnn.sample(3, seed=0)["dense.weight"], sample["dense.weight"])
    out = bnn.draw(2)(*TOKENS)
    assert out.shape == (2, 4, 2)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 2)

    def forward(self, x):
        return self.dense(x + torch.randn_like(x))


def dense():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


FAMILY = bayou.Inducing(3)
ROWS = torch.randn(5, 3)


@pytest.mark.parametrize(
    ("net", "rules", "x", "message"),
    [
        (
            Tokens().double(),
            {"*": FAMILY},
            TOKENS,
            "cannot cover 'embedding.weight', 'norm.weight'",
        ),
        (
            dense(),
            {"0.weight": bayou.MeanField(), "*": FAMILY},
            ROWS,
            "cannot cover '0.bias'.*together with their weights",
        ),
        (
            nn.ConvTranspose1d(2, 2, 3, bias=False),
            {"*": FAMILY},
            torch.randn(5, 2, 4),
            "cannot cover 'weight'",
        ),
        (nn.LSTM(3, 4), FAMILY, torch.randn(5, 2, 3), "no linear or convolution layer"),
        (dense(), {"0.*": FAMILY, "*": bayou.Inducing(2)}, ROWS, "the same family object"),
        (Noisy(), FAMILY, ROWS, "draws random numbers"),
        (dense(), FAMILY, None, "pass example="),
    ],
)
def test_unsupported_networks_and_tensors_are_errors(net, rules, x, message):
    with pytest.raises(ValueError, match=message):
        bayou.bayesianize(net, rules, example=x).draw()


def test_wrong_settings_are_errors():
    rules = {"*.bias": bayou.MeanField(), "*": FAMILY}
    guide = guide_of(bayou.bayesianize(dense(), rules, example=ROWS))
    with pytest.raises(ValueError, match=r"q\(0.weight, 2.weight \| 0.bias, 2.bias\)"):
        guide.draw(1)
    with pytest.raises(ValueError, match="points must be a whole number"):
        bayou.Inducing(0)
    with pytest.raises(ValueError, match="Inducing needs Normal priors, .* is a StudentT"):
        bayou.bayesianize(dense(), FAMILY, prior=bayou.priors.StudentT(), example=ROWS)


def test_the_points_start_at_rows_of_the_data(tmp_path):
    """Any of them, not the first, however small the batches; as many as there are, where they are
    few.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.arange(120.0).reshape(40, 3) / 120
    y = torch.arange(40) % 2
    for batch_size, points, want in ((8, 20, 20), (8, 100, 40)):
        method = bayou.VI(bayou.Inducing(points), steps=1, lr=1e-12, batch_size=batch_size)
        posterior = bayou.fit(net, (x, y), method=method, seed=0, progress=False)
        found = guide_of(posterior.bayesian).input0.detach()
        index = (found.unsqueeze(1) - x).abs().sum(-1).argmin(1)
        assert len(index.unique()) == len(found) == want
        assert_close(found, x[index])
        assert (index[:20] != torch.arange(20)).any()


def test_a_file_restores_the_sizes(tmp_path):
    """Points, tokens and given tensors come back from a file, although nothing there runs the
    network.
    """
    torch.manual_seed(0)
    net, y = Tokens().double(), torch.arange(4) % 2
    method = bayou.VI(bayou.Inducing(3), steps=2)
    posterior = bayou.fit(net, (TOKENS, y), method=method, seed=0, progress=False)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", Tokens().double())
    one, other = posterior.sample(3, seed=1), loaded.sample(3, seed=1)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert repr(loaded).startswith(
        "Guided(Tokens: MeanField over 15 + Delta over 6 + Inducing over 12 of 33 weights"
    )
    assert bayou.diagnostics.bound_gap(loaded, draws=2, samples=20, seed=0).total.kind == "exact"
