import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch.testing import assert_close

from bayou.core.specs import from_json, to_json
from bayou.likelihoods import (
    Bernoulli,
    BoundLikelihood,
    Categorical,
    FiniteLikelihood,
    Gamma,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Likelihood,
    Log,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    UnitStudentT,
    Weibull,
)
from bayou.likelihoods.predictive import Predictive

F64 = torch.float64
D = torch.distributions


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def doubles(values):
    return torch.tensor(values, dtype=F64)


def predictive(spec, outputs):
    return Predictive(spec.bind(dtype=outputs.dtype), outputs)


def labels(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


OUTPUTS, WIDE, Y = noise(4, 6, 2), noise(4, 6, 4), noise(6, 2, seed=1)
DF = doubles(3.5)
# (spec, outputs (S, B, *out), y (B, *event), the same as a torch.distributions object)
CASES = {
    "gaussian": (Gaussian(0.3), OUTPUTS, Y, lambda f: D.Normal(f, 0.3)),
    "gaussian flat": (Gaussian(2), noise(4, 6), noise(6, seed=1), lambda f: D.Normal(f, 2.0)),
    "student": (StudentT(3.5, 0.4), OUTPUTS, Y, lambda f: D.StudentT(DF, f, 0.4)),
    "heteroscedastic": (
        HeteroscedasticGaussian(),
        WIDE,
        Y,
        lambda f: D.Normal(f[..., :2], (0.5 * f[..., 2:]).exp()),
    ),
    "heteroscedastic student": (
        HeteroscedasticStudentT(3.5),
        WIDE,
        Y,
        lambda f: D.StudentT(DF, f[..., :2], (0.5 * f[..., 2:]).exp()),
    ),
    "heteroscedastic with a floor": (
        HeteroscedasticGaussian(0.5),
        WIDE,
        Y,
        lambda f: D.Normal(f[..., :2], (f[..., 2:].exp() + 0.25).sqrt()),
    ),
    "categorical": (
        Categorical(),
        3 * noise(4, 6, 5),
        labels(5, 6),
        lambda f: D.Categorical(logits=f),
    ),
    "categorical sequence": (
        Categorical(),
        3 * noise(4, 6, 3, 5),
        labels(5, 6, 3),
        lambda f: D.Categorical(logits=f),
    ),
    "categorical image": (
        Categorical(class_axis=-3),
        noise(4, 6, 5, 2, 3),
        labels(5, 6, 2, 3),
        lambda f: D.Categorical(logits=f.movedim(-3, -1)),
    ),
    "bernoulli": (Bernoulli(), 3 * OUTPUTS, labels(2, 6, 2), lambda f: D.Bernoulli(logits=f)),
    "poisson": (Poisson(), OUTPUTS, labels(7, 6, 2), lambda f: D.Poisson(f.exp())),
    "noise per output": (
        Gaussian((0.3, 2.0)),
        OUTPUTS,
        Y,
        lambda f: D.Normal(f, doubles([0.3, 2])),
    ),
    "heteroscedastic softplus": (
        HeteroscedasticGaussian(transform="softplus", units=2.0),
        WIDE,
        Y,
        lambda f: D.Normal(f[..., :2], 2 * (torch.nn.functional.softplus(f[..., 2:]) + 1e-6)),
    ),
    "lognormal": (LogNormal(0.5), OUTPUTS, Y.exp(), lambda f: D.LogNormal(f, 0.5)),
    "heteroscedastic lognormal": (
        Log(HeteroscedasticGaussian()),
        0.5 * WIDE,
        Y.exp(),
        lambda f: D.LogNormal(f[..., :2], (0.5 * f[..., 2:]).exp()),
    ),
    "gamma": (
        Gamma(2.5, unit=3.0),
        OUTPUTS,
        Y.exp(),
        lambda f: D.Gamma(doubles(2.5), 2.5 * (-f).exp() / 3),
    ),
    "gamma of a small shape": (
        Gamma(0.4),
        OUTPUTS,
        Y.exp(),
        lambda f: D.Gamma(doubles(0.4), 0.4 * (-f).exp()),
    ),
    "weibull": (
        Weibull(1.7, unit=3.0),
        OUTPUTS,
        Y.exp(),
        lambda f: D.Weibull(3 * f.exp(), doubles(1.7)),
    ),
    "negative binomial": (
        NegativeBinomial(0.5, unit=2.0),
        OUTPUTS,
        labels(7, 6, 2),
        lambda f: D.NegativeBinomial(doubles(2.0), logits=f),
    ),
    "categorical ordered": (
        Ordinal(5, (-1.0, 0.0, 0.5, 2.0)),
        2 * noise(4, 6, 1),
        labels(5, 6),
        lambda f: D.Categorical(
            torch.diff(
                (doubles([-1e9, -1.0, 0.0, 0.5, 2.0, 1e9]) - f).sigmoid(),
            )
        ),
    ),
}
case = pytest.mark.parametrize("name", CASES)


def bound(name):
    spec, f, y, distribution = CASES[name]
    return spec.bind(dtype=F64), f, y, distribution(f)


@case
def test_log_prob_is_torchs_one_number_per_example(name):
    likelihood, f, y, distribution = bound(name)
    likelihood.validate(f.shape[1:], y)
    value = likelihood.log_prob(f, y)
    assert value.shape == (4, 6)
    assert_close(value, distribution.log_prob(y.to(F64)).reshape(4, 6, -1).sum(-1))
    assert_close(likelihood.log_prob(f[0], y), value[0])
    assert_close(likelihood.log_prob(f[None], y), value[None])


@case
def test_moments_and_entropy_are_torchs(name):
    likelihood, f, y, distribution = bound(name)
    mean, variance = likelihood.mean(f), likelihood.variance(f)
    if isinstance(distribution, D.Categorical):
        assert_close(mean, distribution.probs)
        assert_close(variance, distribution.probs * (1 - distribution.probs))
    else:
        assert_close(mean, distribution.mean)
        assert_close(variance, distribution.variance)
    if not isinstance(distribution, D.Poisson | D.NegativeBinomial):
        assert_close(likelihood.entropy(f), distribution.entropy())
    assert likelihood.entropy(f).shape == (4, *y.shape)


@case
def test_draws_have_the_moments_and_depend_on_their_index_alone(name):
    likelihood, f, y, _ = bound(name)
    n = 4000
    draws = likelihood.sample(f[0], n, seed=5)
    assert draws.shape == (n, *y.shape)
    assert_close(likelihood.sample(f[0], 50, seed=5), draws[:50])
    assert likelihood.sample(f, seed=5).shape == (4, *y.shape)
    assert_close(likelihood.sample(f[:2], seed=5), likelihood.sample(f, seed=5)[:2])
    mean, std = likelihood.mean(f[0]), likelihood.variance(f[0]).sqrt()
    if isinstance(likelihood, FiniteLikelihood) and mean.ndim > y.ndim:
        draws = torch.nn.functional.one_hot(draws, mean.shape[-1]).to(F64)
    likelihood.validate(f.shape[1:], likelihood.sample(f[0], seed=1))
    assert ((draws.mean(0) - mean).abs() < 5 * std / math.sqrt(n) + 1e-9).all()


@case
def test_log_prob_in_vmap_and_float32(name):
    likelihood, f, y, _ = bound(name)
    expected = likelihood.log_prob(f, y)
    assert_close(torch.vmap(likelihood.log_prob, in_dims=(0, None))(f, y), expected)
    leaf = f.clone().requires_grad_()
    (grad,) = torch.autograd.grad(likelihood.log_prob(leaf, y).sum(), [leaf])
    assert grad.isfinite().all()
    f32 = CASES[name][0].bind(dtype=torch.float32).log_prob(f.float(), y)
    assert f32.dtype == torch.float32
    assert_close(f32.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["student", "heteroscedastic with a floor", "categorical image"])
def test_log_prob_compiles_to_one_graph(name):
    torch.compiler.reset()  # every case is a recompilation of one method, whose number is limited
    likelihood, f, y, _ = bound(name)
    compiled = torch.compile(likelihood.log_prob, fullgraph=True, backend="eager")
    assert_close(compiled(f, y), likelihood.log_prob(f, y))


NODES, MASSES = (torch.tensor(part) for part in np.polynomial.hermite_e.hermegauss(80))
MASSES /= MASSES.sum()


@pytest.mark.parametrize(
    ("spec", "exact"),
    [
        (Gaussian(0.3), True),
        (Poisson(), True),
        (Bernoulli(), False),
        (StudentT(3.5, 0.4), False),
        (Categorical(), False),
        (Categorical(ignore_index=0, label_smoothing=0.2, weight=(1.0, 2.0, 0.5)), False),
        (Categorical(class_axis=-2), False),
    ],
    ids=str,
)
def test_the_expected_log_prob_is_exact_or_a_lower_bound(spec, exact):
    """Against quadrature over F ~ N(f, v): of classes over one logit, the others have a variance of
    0.
    """
    likelihood, f, variance = spec.bind(dtype=F64), noise(5, 3, 2), torch.zeros(5, 3, 2, dtype=F64)
    if isinstance(spec, Categorical):
        axis = -1 if spec.class_axis is None else spec.class_axis
        f, variance = (part.transpose(1, 2) if axis == -1 else part for part in (f, variance))
        variance.select(axis, 1).fill_(0.7)
    else:
        variance = variance + 0.7
    y = likelihood.sample(f, seed=0)
    each = torch.stack([likelihood.pointwise(f + z * variance.sqrt(), y) for z in NODES])
    truth = torch.tensordot(MASSES, each, 1)
    found = likelihood.expected_log_prob(f, variance, y)
    assert_close(likelihood.log_prob(f, y, variance), found.flatten(1).sum(1))
    assert_close(likelihood.expected_log_prob(f, 0 * variance, y), likelihood.pointwise(f, y))
    if exact:
        assert_close(found, truth)
    else:
        assert (found <= truth + 1e-9).all()
        assert (found < truth - 1e-3).any()


def test_the_bound_of_bernoulli_is_that_of_jensen():
    """−log(1 + E exp(∓F)), with the expectation by quadrature."""
    likelihood = Bernoulli().bind()
    f = doubles([[0.3, -1.2]])
    variance = doubles([[0.5, 1.5]])
    draws = f.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * NODES
    for sign, label in ((1, 1.0), (-1, 0.0)):
        mean = (-sign * draws).exp() @ MASSES
        found = likelihood.expected_log_prob(f, variance, torch.full_like(f, label))
        assert_close(found, -mean.log1p())


def test_the_sampled_entropy_of_a_mixture_is_close_to_the_integral():
    """The entropy that a likelihood without a closed form has, within 0.1 nats; log 4 = 1.4."""
    likelihood = HeteroscedasticGaussian().bind()
    f = noise(4, 3, 2)
    sampled = BoundLikelihood.mixture_entropy(likelihood, f)
    assert_close(sampled, likelihood.mixture_entropy(f), rtol=0, atol=0.1)


def test_the_bound_of_two_classes_has_known_values():
    f, v = doubles([[1.0, -0.5]]), doubles([[0.25, 0.09]])
    likelihood, y = Categorical().bind(), torch.tensor([0])
    assert float(likelihood.expected_log_prob(f, v, y)) == pytest.approx(-0.312288, abs=1e-6)
    assert float(likelihood.log_prob(f, y)) == pytest.approx(-0.201413, abs=1e-6)
    margin = Bernoulli().bind().pointwise(1.5 + NODES * math.sqrt(0.34), torch.ones(1, dtype=F64))
    assert float(margin @ MASSES) == pytest.approx(-0.226910, abs=1e-6)


@pytest.mark.parametrize("df", [1.05, 4, 200])
def test_the_student_cdf_is_scipys_to_the_far_tail(df):
    unit = UnitStudentT(df)
    z = torch.cat([-torch.logspace(-8, 6, 100, dtype=F64), torch.linspace(-6, 6, 101, dtype=F64)])
    expected = scipy.stats.t.cdf(z.numpy(), df)
    seen = expected > 1e-270
    np.testing.assert_allclose(unit.cdf(z).numpy()[seen], expected[seen], rtol=1e-9)
    assert unit.entropy == pytest.approx(scipy.stats.t.entropy(df), rel=1e-9)
    p = predictive(StudentT(df, 1.0), torch.zeros(1, 1, 1, dtype=F64))
    for q in (1e-9, 0.4, 0.999):
        assert p.quantile(q).item() == pytest.approx(scipy.stats.t.ppf(q, df), rel=1e-8, abs=1e-12)


def test_cdfs_are_scipys():
    loc = OUTPUTS.numpy()
    for spec, at, expected in (
        (Gaussian(0.3), Y, scipy.stats.norm.cdf(Y, loc, 0.3)),
        (StudentT(2.5, 0.3), Y, scipy.stats.t.cdf(Y, 2.5, loc, 0.3)),
        (Poisson(), torch.full_like(Y, 2.5), scipy.stats.poisson.cdf(2.5, np.exp(loc))),
        (Bernoulli(), 0 * Y, scipy.stats.bernoulli.cdf(0, 1 / (1 + np.exp(-loc)))),
    ):
        np.testing.assert_allclose(
            spec.bind(dtype=F64).cdf(OUTPUTS, at).numpy(), expected, rtol=1e-9
        )
    categorical = Categorical().bind()
    k = torch.tensor([0, 1, 2, 3, 4, -1])
    f = noise(2, 6, 5)
    expected = f.softmax(-1).cumsum(-1)
    value = categorical.cdf(f, k)
    assert_close(value[:, :5], expected[:, range(5), range(5)])
    assert (value[:, 5] == 0).all()


def test_the_poisson_entropy_is_scipys_on_both_sides_of_50():
    rates = doubles([0.01, 1.0, 20.0, 49.9, 50.1, 400.0])
    np.testing.assert_allclose(
        Poisson().bind().entropy(rates.log()), scipy.stats.poisson.entropy(rates), atol=1e-7
    )


@pytest.mark.parametrize("logit", [-1e4, -100.0, 1e4])
def test_extreme_logits_stay_finite(logit):
    f = torch.tensor([[logit, 0.0, -logit]])
    for y in range(3):
        assert Categorical().bind().log_prob(f, torch.tensor([y])).isfinite().all()
    assert Bernoulli().bind().log_prob(f, torch.tensor([[1, 0, 0]])).isfinite().all()
    for spec in (Bernoulli(), Categorical()):
        assert (spec.bind().entropy(f) >= 0).all()


@pytest.mark.parametrize(
    "spec", [Gaussian(0.3, learn=True), StudentT(4.0, 0.3, learn=True)], ids=str
)
def test_a_learned_scale_receives_the_analytic_gradient(spec):
    """∂ log N / ∂ log σ = z² − 1; ∂ log t / ∂ log s = (df + 1)·z²/(df + z²) − 1."""
    likelihood, f = spec.bind(dtype=F64), OUTPUTS[0]
    (name, parameter), *more = likelihood.named_parameters()
    assert (name, more) == ("log_scale", [])
    (grad,) = torch.autograd.grad(likelihood.log_prob(f, Y).sum(), [parameter])
    z2 = ((Y - f) / 0.3).square()
    expected = z2 - 1 if isinstance(spec, Gaussian) else 5 * z2 / (4 + z2) - 1
    assert_close(grad, expected.sum())
    assert not list(dataclasses.replace(spec, learn=False).bind().parameters())


@case
def test_specs_are_plain_values(name):
    spec = CASES[name][0]
    assert from_json(json.loads(json.dumps(to_json(spec))), Likelihood) == spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(0.0), "noise must be positive and finite, got 0.0"),
        (lambda: StudentT(df=1.0), "must exceed 1"),
        (lambda: HeteroscedasticStudentT(1.0), "HeteroscedasticStudentT df must exceed 1"),
        (lambda: HeteroscedasticGaussian(-1.0), "min_std"),
        (lambda: Categorical(class_axis=1), "counts from the end"),
    ],
)
def test_invalid_specs_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("spec", "f_shape", "y", "message"),
    [
        (Gaussian(), (6, 1), torch.zeros(6), r"need \(6, 1\); use y.unsqueeze\(-1\)"),
        (Gaussian(), (6,), torch.zeros(6, 1), r"use y.squeeze\(-1\)"),
        (Gaussian(), (6,), torch.tensor([math.nan] * 6), "finite"),
        (HeteroscedasticGaussian(), (6, 3), torch.zeros(6, 1), "even"),
        (HeteroscedasticGaussian(), (6, 4), torch.zeros(6, 4), r"need \(6, 2\)"),
        (Categorical(), (6,), torch.zeros(6).long(), "no batch axis"),
        (Categorical(), (6, 3), torch.zeros(6), r"class indices .* classes pass y.long\(\)"),
        (Categorical(), (6, 1), torch.rand(6, 1), r"for numbers pass likelihood=bayou.Gaussian\("),
        (Categorical(), (3, 3), torch.eye(3), r"one-hot vectors pass y.argmax\(-1\)"),
        (Categorical(), (3, 3), torch.eye(3).long(), "not one-hot"),
        (
            Categorical(),
            (6, 3),
            torch.tensor([0, 1, 2, 3, 0, 0]),
            r"0 \.\. 2 for 3 classes, got 0 \.\. 3",
        ),
        (Categorical(), (2, 3), torch.tensor([-100, 0]), "got -100"),
        (Categorical(), (6, 3, 4, 5), torch.zeros(6, 4, 5).long(), r"class_axis=-3"),
        (Bernoulli(), (2,), torch.tensor([0.0, 0.5]), "must be 0 or 1"),
        (Poisson(), (2,), torch.tensor([0, 1.5]), "counts"),
    ],
)
def test_invalid_targets_are_errors(spec, f_shape, y, message):
    with pytest.raises(ValueError, match=message):
        spec.bind().validate(f_shape, y)


def test_booleans_and_empty_batches_are_valid():
    Bernoulli().bind().validate((2,), torch.tensor([True, False]))
    none = torch.zeros(0).long()
    Categorical().bind().validate((0, 3), none)
    assert Categorical().bind().log_prob(torch.zeros(4, 0, 3), torch.zeros(0).long()).shape == (
        4,
        0,
    )


def test_a_likelihood_needs_a_density_and_a_cdf_only():
    """An exponential y with the rate exp(f): moments, draws and quantiles follow."""

    class Exponential(BoundLikelihood):
        def pointwise(self, f, y):
            return torch.where(y > 0, f - f.exp() * y, -math.inf)

        def cdf(self, f, y):
            return -torch.expm1(-f.exp() * y.clamp_min(0.0))

    likelihood, f = Exponential(), doubles([[0.0, 1.5]])
    draws = likelihood.sample(f[0], 4000, seed=0)
    assert_close(likelihood.sample(f[0], 9, seed=0), draws[:9])
    mean = (-f[0]).exp()
    assert ((draws.mean(0) - mean).abs() < 5 * mean / math.sqrt(4000)).all()
    p = Predictive(likelihood, f)
    assert_close(p.mean, mean, rtol=0.1, atol=0)
    assert_close(p.quantile(0.3), -mean * math.log(0.7))
