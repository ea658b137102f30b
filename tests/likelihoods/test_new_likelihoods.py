"""Likelihoods of positive numbers, counts, ordered classes, censored and weighted targets, against
scipy, Monte Carlo, autograd and closed forms.
"""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch.testing import assert_close

from bayou import metrics
from bayou.likelihoods import (
    Censored,
    Gamma,
    Gaussian,
    HeteroscedasticGaussian,
    KnownNoise,
    Log,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Weibull,
)
from bayou.likelihoods.joined import join_samples
from bayou.likelihoods.predictive import Predictive
from bayou.likelihoods.special import betainc

F64 = torch.float64
OUTPUTS = torch.randn(3, 5, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
# of scipy with the location exp(f)
SCIPY = {
    "lognormal": (LogNormal(0.6), lambda m: scipy.stats.lognorm(0.6, scale=m)),
    "gamma": (Gamma(2.5, unit=2.0), lambda m: scipy.stats.gamma(2.5, scale=2 * m / 2.5)),
    "gamma of shape 0.3": (Gamma(0.3), lambda m: scipy.stats.gamma(0.3, scale=m / 0.3)),
    "weibull": (Weibull(1.7), lambda m: scipy.stats.weibull_min(1.7, scale=m)),
    "negative binomial": (
        NegativeBinomial(0.5),
        lambda m: scipy.stats.nbinom(2.0, 2 / (2 + m)),
    ),
}
continuous = pytest.mark.parametrize(
    "name", ["lognormal", "gamma", "gamma of shape 0.3", "weibull"]
)
every = pytest.mark.parametrize("name", SCIPY)


def laws(name, f):
    """The scipy distribution of every sample of the outputs of a row."""
    return [SCIPY[name][1](math.exp(value)) for value in f.flatten().tolist()]


def predictive(spec, f=OUTPUTS):
    return Predictive(spec.bind(dtype=F64), f)


@every
def test_cdfs_and_survivals_are_scipys(name):
    likelihood = SCIPY[name][0].bind(dtype=F64)
    y = torch.tensor([[0.05], [0.5], [1.0], [3.0], [20.0]], dtype=F64)
    law = SCIPY[name][1](OUTPUTS.exp().numpy())
    np.testing.assert_allclose(likelihood.cdf(OUTPUTS, y), law.cdf(y.numpy()), rtol=1e-9)
    expected = law.logsf(y.numpy())
    np.testing.assert_allclose(likelihood.log_survival(OUTPUTS, y), expected, rtol=1e-7, atol=1e-9)


@every
@pytest.mark.parametrize("q", [0.01, 0.5, 0.95])
def test_quantiles_of_mixtures_are_roots_of_scipys_cdf(name, q):
    p = predictive(SCIPY[name][0])
    quantile = p.quantile(q)
    for row in range(5):
        components = laws(name, OUTPUTS[:, row])
        mass = np.mean([law.cdf(float(quantile[row])) for law in components])
        if name == "negative binomial":
            below = np.mean([law.cdf(float(quantile[row]) - 1) for law in components])
            assert below < q <= mass
        else:
            assert mass == pytest.approx(q, rel=1e-8)


@every
def test_intervals_cover_their_share_of_scipys_draws(name):
    p = predictive(SCIPY[name][0])
    low, high = p.interval(0.9)
    draws = 4000
    generator = np.random.default_rng(0)
    for row in range(5):
        sets = [law.rvs(draws, random_state=generator) for law in laws(name, OUTPUTS[:, row])]
        y = np.concatenate(sets)
        share = ((y >= float(low[row])) & (y <= float(high[row]))).mean()
        slack = 4.5 * math.sqrt(0.09 / len(y))
        if name == "negative binomial":
            assert share > 0.9 - slack
        else:
            assert abs(share - 0.9) < slack


@every
def test_the_crps_of_a_mixture_is_that_of_its_definition(name):
    """∫ (F(t) − 1[t ≥ y])² dt with scipy's cdf on a fine grid, or its sum over the counts."""
    spec = SCIPY[name][0]
    y = torch.tensor([[1.0], [2.0], [4.0], [1.0], [9.0]], dtype=F64)
    crps = spec.bind(dtype=F64).mixture_crps(OUTPUTS, y)
    for row in range(5):
        components = laws(name, OUTPUTS[:, row])
        if name == "negative binomial":
            t = np.arange(400.0)
            step = np.ones_like(t)
        else:
            edges = np.exp(np.linspace(-80, 12, 400_001))
            edges = np.sort(np.append(edges, float(y[row])))
            t = (edges[1:] + edges[:-1]) / 2
            step = np.diff(edges)
        mass = np.mean([law.cdf(t) for law in components], 0)
        expected = (step * (mass - (t >= float(y[row]))) ** 2).sum()
        assert float(crps[row]) == pytest.approx(expected, rel=2e-4)
    score = metrics.crps(predictive(spec), y)
    assert score == pytest.approx(float(crps.mean()))


@every
def test_the_information_is_minus_the_expected_hessian(name):
    """By draws of y and autograd; the mean of 20,000 draws."""
    likelihood = SCIPY[name][0].bind(dtype=F64)
    f = OUTPUTS[0].clone().requires_grad_()
    y = likelihood.sample(f.detach(), 20_000, seed=0)
    expected, errors = [], []
    for row in range(len(f)):
        leaf = f[row].detach().expand(len(y), 1).clone().requires_grad_()
        log_prob = likelihood.pointwise(leaf, y[:, row])
        (slope,) = torch.autograd.grad(log_prob.sum(), leaf)
        squares = slope.square()
        expected.append(squares.mean())
        errors.append(squares.std() / math.sqrt(len(y)))
    gap = likelihood.information(f).h.flatten() - torch.stack(expected)
    assert (gap.abs() < 5 * torch.stack(errors)).all()


@pytest.mark.parametrize(
    ("spec", "is_exact"),
    [
        (LogNormal(0.6), True),
        (Gamma(2.5), True),
        (Weibull(1.7), True),
        (NegativeBinomial(0.5), False),
        (Ordinal(4), False),
    ],
    ids=str,
)
def test_the_expected_log_prob_is_exact_or_a_lower_bound(spec, is_exact):
    likelihood = spec.bind(dtype=F64)
    f = OUTPUTS[0]
    variance = torch.full_like(f, 0.5)
    nodes, masses = np.polynomial.hermite_e.hermegauss(80)
    y = likelihood.sample(f, seed=0)
    values = [likelihood.pointwise(f + node * math.sqrt(0.5), y) for node in nodes]
    masses = torch.as_tensor(masses / masses.sum())
    truth = torch.tensordot(masses, torch.stack(values), 1)
    bound = likelihood.expected_log_prob(f, variance, y)
    if is_exact:
        assert_close(bound, truth)
    else:
        assert (bound <= truth + 1e-9).all()
        assert (bound < truth - 1e-4).any()
    assert_close(likelihood.expected_log_prob(f, 0 * variance, y), likelihood.pointwise(f, y))


def test_the_log_normal_of_a_random_location_has_the_moments_of_draws():
    """E y, and Var y split into that of the noise and that of the function."""
    likelihood, f = (
        LogNormal(0.4)
        .bind(dtype=F64)
        .marginal(torch.tensor([[0.3]], dtype=F64), torch.tensor([[0.2]], dtype=F64))
    )
    n = 400_000
    generator = np.random.default_rng(0)
    location = 0.3 + math.sqrt(0.2) * generator.standard_normal(n)
    y = np.exp(location + 0.4 * generator.standard_normal(n))
    p = Predictive(likelihood, f[None])
    assert float(p.mean) == pytest.approx(y.mean(), rel=0.01)
    assert float(p.std) == pytest.approx(y.std(), rel=0.02)
    of_functions = np.exp(location + 0.08)
    assert float(p.epistemic_std) == pytest.approx(of_functions.std(), rel=0.02)


def test_the_incomplete_beta_function_is_scipys():
    a, b, x = np.meshgrid([0.3, 2.0, 50.0, 900.0], [0.4, 3.0, 700.0], [1e-6, 0.1, 0.5, 0.97])
    tensors = [torch.as_tensor(values) for values in (a, b, x)]
    value = betainc(*tensors, 1 - tensors[2])
    expected = scipy.special.betainc(a, b, x)
    np.testing.assert_allclose(value, expected, rtol=1e-8, atol=1e-300)


@pytest.mark.parametrize(
    ("dispersion", "mean"), [(1e-5, 3.0), (1e-8, 30.0), (0.5, 1e6), (0.5, 1e8)], ids=str
)
def test_negative_binomials_of_large_shapes_and_counts_are_scipys_in_float32(dispersion, mean):
    """A learned dispersion of counts of a Poisson tends to 0, its inverse to infinity."""
    likelihood = NegativeBinomial(dispersion).bind(dtype=torch.float32)
    f = torch.full((1, 1), math.log(mean))
    law = scipy.stats.nbinom(1 / dispersion, 1 / (1 + dispersion * mean))
    for q in (0.05, 0.5, 0.95):
        y = torch.full((1, 1), law.ppf(q))
        count = float(y)
        assert float(likelihood.pointwise(f, y)) == pytest.approx(law.logpmf(count), abs=1e-4)
        assert float(likelihood.cdf(f, y)) == pytest.approx(law.cdf(count), abs=1e-5)
        assert float(likelihood.log_survival(f, y)) == pytest.approx(law.logsf(count), abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "mean"), [(0.02, 1.0), (0.1, 1.0), (1.0, 1e-6), (1e5, 1.0), (1e7, 5.0)], ids=str
)
def test_gammas_of_extreme_shapes_and_units_are_scipys_in_float32(shape, mean):
    likelihood = Gamma(shape).bind(dtype=torch.float32)
    f = torch.full((1, 1), math.log(mean))
    law = scipy.stats.gamma(shape, scale=math.exp(float(f)) / shape)
    assert float(likelihood.entropy(f)) == pytest.approx(law.entropy(), rel=1e-3)
    assert float(likelihood.mixture_entropy(f[None])) == pytest.approx(law.entropy(), rel=1e-2)
    for q in (0.05, 0.5, 0.95):
        quantile = float(likelihood.mixture_quantile(f[None], q))
        assert quantile == pytest.approx(law.ppf(q), rel=1e-3, abs=1e-30)
        assert quantile >= 0
    y = torch.full((1, 1), law.ppf(0.7))
    assert float(likelihood.pointwise(f, y)) == pytest.approx(law.logpdf(float(y)), abs=1e-2)
    draws = likelihood.sample(f, 200, seed=0)
    assert (draws > 0).all()
    for q in (0.3, 0.7):
        assert float((draws <= law.ppf(q)).double().mean()) == pytest.approx(q, abs=0.12)


def test_the_entropy_of_a_weibull_of_a_small_shape_is_finite_in_float32():
    likelihood = Weibull(0.1).bind(dtype=torch.float32)
    entropy = float(likelihood.mixture_entropy(torch.zeros(1, 1, 1)))
    assert entropy == pytest.approx(scipy.stats.weibull_min(0.1).entropy(), rel=1e-3)


def test_the_crps_of_log_normals_of_large_noise_does_not_cancel():
    """The mean is 1e31, and the score 1e-16 of it."""
    s = 12.0
    p = predictive(LogNormal(s), torch.zeros(1, 1, 1, dtype=F64))
    tails = scipy.stats.norm.sf(s / math.sqrt(2)) - scipy.stats.norm.cdf(-s)
    expected = 2 * math.exp(s**2 / 2) * tails
    assert metrics.crps(p, torch.ones(1, 1, dtype=F64)) == pytest.approx(expected, rel=1e-9)


def test_units_do_not_count_for_noises_and_censored_values():
    """log p in the units of y is smaller by log scale for each density."""
    f = torch.zeros(1, 3, 1, dtype=F64)
    values = torch.tensor([[0.5], [1.0], [2.0]], dtype=F64)
    y = torch.cat((values, torch.full_like(values, 0.3)), 1)
    p = predictive(KnownNoise(), f)
    in_units = predictive(KnownNoise(), 10 * f)
    assert metrics.nll(p, y, scale=10) == pytest.approx(metrics.nll(in_units, 10 * y))
    observed = torch.tensor([[1.0], [0.0], [1.0]], dtype=F64)
    p = predictive(Censored(Weibull()), f)
    in_units = predictive(Censored(Weibull(unit=10.0)), f)
    times = torch.cat((values, observed), 1)
    times_in_units = torch.cat((10 * values, observed), 1)
    assert metrics.nll(p, times, scale=10) == pytest.approx(metrics.nll(in_units, times_in_units))


# --- ordered classes ---


def test_the_ranked_probability_score_and_intervals_of_ordered_classes():
    p = predictive(Ordinal(4, (-1.0, 0.5, 2.0), learn=False))
    y = torch.tensor([0, 1, 2, 3, 0])
    cumulative = p.probabilities.cumsum(-1)
    reached = (torch.arange(4) >= y[:, None]).double()
    expected = (cumulative - reached).square().sum(-1).mean()
    assert metrics.crps(p, y) == pytest.approx(float(expected))
    low, high = p.interval(0.8)
    for row in range(5):
        assert cumulative[row, low[row]] >= 0.1
        assert cumulative[row, high[row]] >= 0.9
    inside = ((low <= y) & (y <= high)).double().mean()
    assert metrics.coverage(p, y, 0.8) == pytest.approx(float(inside))


def test_ordered_classes_are_those_of_a_latent_logistic_variable():
    likelihood = Ordinal(4, (-1.0, 0.5, 2.0), learn=False).bind(dtype=F64)
    f = torch.tensor([[0.7]], dtype=F64)
    latent = scipy.stats.logistic(0.7)
    edges = latent.cdf([-np.inf, -1.0, 0.5, 2.0, np.inf])
    np.testing.assert_allclose(likelihood.log_pmf(f)[0].exp(), np.diff(edges), rtol=1e-12)


def test_sampled_cut_points_give_the_probabilities_of_each_sample():
    specs = [Ordinal(3, (-0.5, 1.0)), Ordinal(3, (0.0, 0.3))]
    parts = [spec.bind(dtype=F64) for spec in specs]
    parameters = {"free_cuts": torch.stack([part.free_cuts.detach() for part in parts])}
    likelihood, outputs = parts[0].per_sample(OUTPUTS[:2], parameters)
    for index, part in enumerate(parts):
        assert_close(likelihood.log_pmf(outputs[index]), part.log_pmf(OUTPUTS[index]))
        k = torch.tensor([0, 1, 2, 0, 1])
        assert_close(likelihood.cdf(outputs, k)[index], part.cdf(OUTPUTS[index], k))


def test_cut_points_start_at_the_frequencies_of_the_classes():
    y = torch.tensor([0] * 10 + [1] * 70 + [2] * 20)
    spec = Ordinal(3).starting_at(y)
    p = spec.bind(dtype=F64).log_pmf(torch.zeros(1, 1, dtype=F64)).exp()[0].detach()
    np.testing.assert_allclose(p, [0.1, 0.7, 0.2], atol=0.01)


# --- censored times ---

TIMES = torch.tensor([[0.5, 1.0], [2.0, 0.0], [1.0, 1.0], [4.0, 0.0], [3.0, 1.0]], dtype=F64)
censored = pytest.mark.parametrize(
    ("spec", "name"), [(LogNormal(0.6), "lognormal"), (Weibull(1.7), "weibull")], ids=str
)


@censored
def test_a_censored_time_has_the_log_survival_of_scipy(spec, name):
    likelihood = Censored(spec).bind(dtype=F64)
    likelihood.validate((5, 1), TIMES)
    log_prob = likelihood.log_prob(OUTPUTS, TIMES)
    for row, (time, is_observed) in enumerate(TIMES.tolist()):
        for sample, law in enumerate(laws(name, OUTPUTS[:, row])):
            expected = law.logpdf(time) if is_observed else law.logsf(time)
            assert float(log_prob[sample, row]) == pytest.approx(expected, rel=1e-9)


@censored
def test_the_curvature_of_censored_rows_is_the_hessian(spec, name):
    """That of −log P(T > t) is positive; observed rows have the information of T."""
    likelihood = Censored(spec).bind(dtype=F64)
    f = OUTPUTS[0]
    of, share = likelihood.without_weights(f, TIMES)
    curvature = of.information(f).h * share
    hessian = torch.autograd.functional.hessian(
        lambda f: -likelihood.log_prob(f, TIMES).sum(), f
    ).flatten()[:: len(f) + 1]
    is_censored = TIMES[:, 1] == 0
    assert_close(curvature.flatten()[is_censored], hessian[is_censored], rtol=1e-6, atol=1e-9)
    assert (share[~is_censored] == 1).all()


@censored
def test_the_survival_crps_ends_at_the_time_of_censoring(spec, name):
    crps = Censored(spec).bind(dtype=F64).mixture_crps(OUTPUTS, TIMES)
    for row, (time, is_observed) in enumerate(TIMES.tolist()):
        edges = np.sort(np.append(np.exp(np.linspace(-60, 8, 400_001)), time))
        t = (edges[1:] + edges[:-1]) / 2
        mass = np.mean([law.cdf(t) for law in laws(name, OUTPUTS[:, row])], 0)
        height = np.where(t < time, mass, (1 - mass) * is_observed) ** 2
        assert float(crps[row]) == pytest.approx((np.diff(edges) * height).sum(), rel=1e-3)


def test_a_mixture_of_censored_likelihoods_uses_the_flags():
    """The CRPS of y is E|T − y| − ½·E|T − T'|, and E max(y − max(T, T'), 0) if y was censored.

    Within five standard errors of 200,000 pairs of scipy's draws; densities and quantiles are
    those of scipy, too.
    """
    f = OUTPUTS[:2]
    specs = (LogNormal(0.6), Weibull(1.7), LogNormal(0.2))
    samples = [(Censored(spec).bind(dtype=F64), f) for spec in specs]
    p = Predictive(*join_samples(samples))
    components = [
        [*laws("lognormal", f[:, row]), *laws("weibull", f[:, row])]
        + [scipy.stats.lognorm(0.2, scale=math.exp(value)) for value in f[:, row, 0].tolist()]
        for row in range(5)
    ]
    crps = p.likelihood.mixture_crps(p.outputs, TIMES)
    log_prob = p.log_prob(TIMES)
    median = p.quantile(0.5)
    generator = np.random.default_rng(0)
    for row, (time, is_observed) in enumerate(TIMES.tolist()):
        number = generator.integers(len(components[row]), size=(2, 200_000))
        draws = np.zeros_like(number, dtype=float)
        for k, law in enumerate(components[row]):
            draws[number == k] = law.rvs((number == k).sum(), random_state=generator)
        first, second = draws
        terms = np.maximum(time - np.maximum(first, second), 0)
        if is_observed:
            terms = np.abs(first - time) - np.abs(first - second) / 2
        assert abs(float(crps[row]) - terms.mean()) < 5 * terms.std() / math.sqrt(200_000)
        scores = [law.pdf(time) if is_observed else law.sf(time) for law in components[row]]
        assert float(log_prob[row]) == pytest.approx(math.log(np.mean(scores)), rel=1e-9)
        below = np.mean([law.cdf(float(median[row])) for law in components[row]])
        assert below == pytest.approx(0.5, abs=1e-8)
    assert metrics.crps(p, TIMES) == pytest.approx(float(crps.mean()))


def test_scores_of_values_use_the_observed_rows():
    p = predictive(Censored(Weibull(1.7)))
    values = predictive(Weibull(1.7), OUTPUTS[:, [0, 2, 4]])
    y = TIMES[[0, 2, 4], :1]
    for score in (metrics.rmse, metrics.coverage):
        assert score(p, TIMES) == pytest.approx(score(values, y))
    assert set(metrics.summary(p, TIMES)) == {
        "rmse", "nll", "crps", "coverage", "width", "std", "epistemic_std"
    }  # fmt: skip


# --- known noise ---


def test_known_noise_is_that_of_each_row_in_scores_and_none_in_predictions():
    p = predictive(KnownNoise())
    value = torch.tensor([0.1, -1.0, 0.5, 2.0, 0.0], dtype=F64)
    std = torch.tensor([0.1, 1.0, 0.5, 2.0, 0.3], dtype=F64)
    y = torch.stack((value, std), 1)
    densities = scipy.stats.norm.pdf(value.numpy(), OUTPUTS[..., 0].numpy(), std.numpy())
    np.testing.assert_allclose(p.log_prob(y), np.log(densities.mean(0)), rtol=1e-9)
    assert_close(p.std, OUTPUTS.std(0, correction=0))
    assert_close(p.quantile(0.5), OUTPUTS.sort(0).values[1])
    with_noise = Predictive(*p.likelihood.for_targets(OUTPUTS, y))
    assert metrics.coverage(p, y) == metrics.coverage(with_noise, value[:, None])
    assert metrics.crps(p, y) == pytest.approx(metrics.crps(with_noise, value[:, None]), abs=1e-12)


# --- specs ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Log(StudentT()), "whose E.y. exists"),
        (lambda: Gamma(0.0), "shape must be positive"),
        (lambda: NegativeBinomial(-1.0), "dispersion must be positive"),
        (lambda: Ordinal(1), "at least 2"),
        (lambda: Ordinal(3, (1.0, 0.0)), "2 increasing, finite numbers"),
        (lambda: Censored(Poisson()), "real numbers, not for Poisson"),
        (lambda: Censored(KnownNoise()), "needs a likelihood of times"),
        (lambda: Gaussian((0.1, -1.0)), "one for each output"),
        (lambda: HeteroscedasticGaussian(transform="square"), "one of exp, softplus"),
        (lambda: HeteroscedasticGaussian(units=2.0), "transform='softplus' only"),
    ],
)
def test_invalid_specs_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("spec", "f_shape", "y", "message"),
    [
        (LogNormal(), (2, 1), [[1.0], [0.0]], "needs y > 0.*use Gaussian"),
        (Gamma(), (2, 1), [[1.0], [-2.0]], "Gamma needs y > 0"),
        (NegativeBinomial(), (2, 1), [[1.0], [0.5]], "counts 0, 1, 2"),
        (Ordinal(3), (2, 1), [0, 3], r"lie in 0 .. 2 for 3 ordered classes"),
        (Ordinal(3), (2, 4), [0, 3], "end the network with one unit"),
        (Censored(Weibull()), (2, 1), [[1.0], [2.0]], "1 if it was observed"),
        (Censored(Weibull()), (2, 1), [[1.0, 2.0], [2.0, 1.0]], "1 .observed. or 0"),
        (Censored(Weibull()), (2, 1), [[1.0, 0.0], [2.0, 0.0]], "all targets are censored"),
        (KnownNoise(), (2, 1), [[1.0, 0.0], [2.0, 1.0]], "above 0"),
        (Gaussian((0.1, 0.2)), (2, 1), [[1.0], [2.0]], "2 noises or units"),
    ],
)
def test_invalid_targets_are_errors(spec, f_shape, y, message):
    with pytest.raises(ValueError, match=message):
        spec.bind().validate(f_shape, torch.tensor(y))


@pytest.mark.parametrize(
    "spec",
    [
        Gaussian((0.3, 0.5), learn=True),
        LogNormal(0.3, learn=True),
        Gamma(2.0, learn=True),
        Weibull(2.0, learn=True),
        NegativeBinomial(2.0, learn=True),
    ],
    ids=str,
)
def test_a_sampled_parameter_gives_the_likelihood_of_each_sample(spec):
    """``per_sample`` with two values of the parameter: the log-probabilities under each."""
    bound = spec.bind(dtype=F64)
    ((name, parameter),) = bound.named_parameters()
    values = torch.stack((parameter.detach(), parameter.detach() + 0.4))
    f = OUTPUTS[:2].expand(2, 5, 2)
    y = bound.sample(f[0], seed=0)
    likelihood, outputs = bound.per_sample(f, {name: values})
    joint = likelihood.log_prob(outputs, y)
    for index, value in enumerate(values):
        with torch.no_grad():
            parameter.copy_(value)
        assert_close(joint[index], bound.log_prob(f[index], y).detach())


@pytest.mark.parametrize("spec", [LogNormal(0.5), Gamma(2.0), Weibull(2.0)], ids=str)
def test_a_temperature_widens_the_distribution(spec):
    p = predictive(spec)
    wide = Predictive(*p.likelihood.temper(p.outputs, 1.5))
    low, high = p.interval(0.9)
    wide_low, wide_high = wide.interval(0.9)
    assert (wide_low < low).all()
    assert (wide_high > high).all()
