import math

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from torch.testing import assert_close

from bayou.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    StudentT,
    mixtures,
)
from bayou.likelihoods.predictive import Predictive
from tests.test_likelihoods import CASES as ALL_CASES, F64, case, doubles, noise, predictive

CASES = {name: (spec, f, tuple(y.shape)) for name, (spec, f, y, _) in ALL_CASES.items()}


def made(name, dtype=F64):
    spec, outputs, _ = CASES[name]
    return predictive(spec, outputs.to(dtype))


def moments(p):
    return p.mean, p.std, p.entropy, p.mutual_information


@case
def test_shapes_dtypes_and_the_law_of_total_variance(name):
    for dtype in (torch.float32, F64):
        p, event = made(name, dtype), CASES[name][2]
        moment = (*event, 5) if name.startswith("categorical") else event
        for value in (p.mean, p.std, p.epistemic_std, p.aleatoric_std):
            assert (tuple(value.shape), value.dtype) == (moment, dtype)
        assert p.means.shape == (4, *moment)
        assert_close(p.mean, p.means.mean(0))
        assert_close(p.epistemic_std, p.means.std(0, correction=0))
        assert_close(p.std.square(), p.epistemic_std.square() + p.aleatoric_std.square())
        for value in (p.entropy, p.mutual_information):
            assert (tuple(value.shape), value.dtype) == ((6,), dtype)
            assert value.isfinite().all()
        assert p.quantile([0.2, 0.5]).shape == (2, *event)
        y = p.sample(3, seed=0)
        assert y.shape == (3, *event)
        assert (p.log_prob(y[0]).shape, p.log_prob(y[0]).dtype) == ((6,), dtype)


@case
def test_draws_of_y_have_the_mean_the_std_and_the_quantiles(name):
    p, n = made(name), 4000
    y = p.sample(n, seed=2)
    assert_close(p.sample(40, seed=2), y[:40])
    low, high = p.quantile([0.1, 0.9])
    for q, edge in ((0.1, low), (0.9, high)):
        slack = 4.5 * math.sqrt(q * (1 - q) / n)
        assert ((y <= edge + 1e-9).double().mean(0) > q - slack).all()
        assert ((y < edge - 1e-9).double().mean(0) < q + slack).all()
    if not name.startswith("categorical"):
        assert ((y.mean(0) - p.mean).abs() < 5 * p.std / math.sqrt(n)).all()
        assert_close(y.to(F64).std(0), p.std, rtol=0.35, atol=0.02)


@case
def test_the_expected_log_score_is_minus_the_entropy(name):
    """H[y] = −E log p(y), exactly so for one coordinate: entropy, sample and log_prob agree."""
    spec, outputs, event = CASES[name]
    if name == "categorical image":
        outputs = outputs[..., :1, :1]
    elif name == "categorical sequence":
        outputs = outputs[:, :, :1]
    elif "heteroscedastic" in name:
        outputs = outputs[..., ::2]
    elif len(event) > 1:
        outputs = outputs[..., :1]
    if name == "noise per output":
        spec = Gaussian((0.3,))
    p, n = predictive(spec, outputs), 600
    scores = torch.stack([p.log_prob(y) for y in p.sample(n, seed=4)])
    assert ((p.entropy + scores.mean(0)).abs() < 4.5 * scores.std(0) / math.sqrt(n)).all()


@case
def test_information_is_positive_zero_without_disagreement_and_bounded(name):
    p = made(name)
    coordinates = math.prod(CASES[name][2][1:])
    assert (p.mutual_information > 0).all()
    assert_close(p.aleatoric_entropy + p.mutual_information, p.entropy)
    assert (p.mutual_information <= coordinates * math.log(4) + 1e-9).all()
    if name.startswith(("categorical", "bernoulli", "poisson")):
        assert (p.mutual_information <= p.entropy).all()
    agreed = Predictive(p.likelihood, p.outputs[:1].expand(4, *p.outputs.shape[1:]))
    assert (agreed.mutual_information < 1e-7 * coordinates).all()
    assert (agreed.epistemic_std < 1e-12).all()


def test_information_of_known_cases():
    """S certain and different answers: log S nats of entropy, all of them epistemic. S coin flips:
    none is.
    """
    certain = predictive(Categorical(), 1000 * torch.eye(4, dtype=F64)[:, None])
    assert certain.entropy.item() == pytest.approx(math.log(4))
    assert certain.mutual_information.item() == pytest.approx(math.log(4))
    coins = predictive(Bernoulli(), torch.zeros(4, 1, dtype=F64))
    assert coins.entropy.item() == pytest.approx(math.log(2))
    assert coins.mutual_information.item() == 0
    apart = predictive(Gaussian(0.1), doubles([[-9.0], [0.0], [7.0]]))
    assert apart.mutual_information.item() == pytest.approx(math.log(3), abs=1e-7)
    assert apart.entropy.item() == pytest.approx(
        math.log(3) + 0.5 * math.log(2 * math.pi * math.e * 0.01), abs=1e-7
    )


def test_a_class_that_is_ruled_out_makes_no_nan():
    logits = torch.tensor([[[0.0, -math.inf, 1.0]], [[2.0, -math.inf, -math.inf]]])
    p = predictive(Categorical(), logits)
    for value in (*moments(p), p.log_prob(torch.tensor([0]))):
        assert value.isfinite().all()
    assert p.log_prob(torch.tensor([1])).item() == -math.inf


def test_log_prob_survives_where_every_probability_underflows():
    p = predictive(Gaussian(0.01), torch.tensor([[0.0], [1.0]]))
    assert p.log_prob(torch.tensor([10.0])).item() == pytest.approx(
        -405000 - math.log(2) + 3.686, rel=1e-6
    )


@pytest.mark.parametrize("q", [1e-6, 0.3, 0.5, 0.95])
def test_quantiles_are_scipys_roots(q):
    f = 2 * noise(15, 4)
    for spec, family in ((Gaussian(0.5), scipy.stats.norm), (StudentT(3.0, 0.5), scipy.stats.t)):
        shape = (3.0,) if isinstance(spec, StudentT) else ()
        quantile = predictive(spec, f).quantile(q)
        for b in range(4):
            law = family(*shape, f[:, b].numpy(), 0.5)
            root = scipy.optimize.brentq(
                lambda y, law=law: law.cdf(y).mean() - q, -500, 500, xtol=1e-13
            )
            assert quantile[b].item() == pytest.approx(root, rel=1e-8)
        single = predictive(spec, f.float()).quantile(q)
        assert_close(single.double(), quantile, rtol=1e-4, atol=1e-4)


def test_discrete_quantiles_are_the_smallest_that_reach_the_level():
    levels = [0.01, 0.3, 0.5, 0.77, 0.999]
    for name, counts in (("poisson", 400), ("categorical", 5), ("bernoulli", 2)):
        p = made(name)
        event = CASES[name][2]
        cdf = torch.stack([p.cdf(torch.full(event, count, dtype=F64)) for count in range(counts)])
        for q in levels:
            assert_close(p.quantile(q).to(F64), (cdf < q).sum(0).to(F64))
    point = predictive(Poisson(), torch.full((1, 1), math.log(3e3), dtype=F64))
    assert point.interval(0.9) == tuple(scipy.stats.poisson.interval(0.9, 3e3))


@pytest.mark.parametrize(
    ("spread", "wobble", "samples"), [(0.3, 0.0, 1), (1.0, 0.3, 5), (30.0, 1.0, 5), (3.0, 0.5, 300)]
)
def test_the_entropy_of_a_mixture_is_the_integral(spread, wobble, samples):
    f = torch.cat([spread * noise(samples, 2, 1), wobble * noise(samples, 2, 1, seed=1)], -1)
    entropy = predictive(HeteroscedasticGaussian(), f).entropy
    for b in range(2):
        means, stds = f[:, b, 0].numpy(), np.exp(0.5 * f[:, b, 1].numpy())
        grid = np.linspace((means - 10 * stds).min(), (means + 10 * stds).max(), 20_001)
        density = np.zeros_like(grid)
        for mean, std in zip(means, stds, strict=True):
            density += scipy.stats.norm.pdf(grid, mean, std) / samples
        expected = scipy.integrate.trapezoid(scipy.special.entr(density), grid)
        assert entropy[b].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "rates", [[0.5], [3.0, 40.0], [900.0], [1100.0], [1.0, 800.0, 1300.0], [5000.0, 6000.0]]
)
def test_the_entropy_of_a_poisson_mixture_is_the_sum(rates):
    counts = np.arange(10_000)
    pmf = np.mean([scipy.stats.poisson.pmf(counts, rate) for rate in rates], axis=0)
    p = predictive(Poisson(), doubles(rates).log()[:, None])
    assert p.entropy.item() == pytest.approx(scipy.special.entr(pmf).sum(), abs=3e-5)


@pytest.mark.parametrize("name", ["gaussian", "categorical image", "poisson"])
def test_chunks_change_nothing(name, monkeypatch):
    p = made(name)
    y = p.sample(1, seed=0)[0]

    def values():
        return *moments(p), p.log_prob(y), *p.quantile([0.05, 0.95])

    whole = values()
    monkeypatch.setattr(mixtures, "CHUNK", 50)
    assert_close(values(), whole)


def test_classes_have_a_set_and_no_interval():
    """.5, .3, .2 and .3, .6, .1 (after averaging): the fewest classes that reach the level, and yes
    or no too.
    """
    p = doubles([[[0.6, 0.2, 0.2], [0.2, 0.7, 0.1]], [[0.4, 0.4, 0.2], [0.4, 0.5, 0.1]]])
    classes = predictive(Categorical(), p.log())
    assert_close(classes.probabilities, p.mean(0))
    assert classes.prediction_set(0.55).tolist() == [[True, True, False], [False, True, False]]
    assert classes.prediction_set(0.75).tolist() == [[True, True, False], [True, True, False]]
    assert classes.prediction_set(0.95).all()
    coin = predictive(Bernoulli(), doubles([[2.0, -0.1]]))
    assert coin.prediction_set(0.8).tolist() == [[False, True], [True, True]]
    for one in (classes, coin):
        with pytest.raises(ValueError, match=r"no order.*prediction_set\(0.8\)"):
            one.interval(0.8)
    with pytest.raises(ValueError, match="for classes"):
        made("gaussian").prediction_set()


def test_bad_inputs_fail_at_the_door():
    for spec, outputs, message in (
        (Gaussian(), torch.zeros(3), r"\(samples, batch, \*out\).*\(3,\)"),
        (Gaussian(), torch.zeros(0, 3), "1 sample or more"),
        (Gaussian(), torch.zeros(2, 3).long(), "floating point"),
        (Categorical(), torch.zeros(2, 3), "no batch axis"),
    ):
        with pytest.raises(ValueError, match=message):
            Predictive(spec.bind(), outputs)
    p = predictive(Gaussian(), torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match="unsqueeze"):
        p.log_prob(torch.zeros(3))
    for level in (0, 1, 1.5, math.nan):
        for ask in (p.quantile, p.interval):
            with pytest.raises(ValueError, match="strictly between 0 and 1"):
                ask(level)
    assert "(2, 3, 1)" in repr(p)


def test_gradients_reach_the_outputs():
    for name, (spec, outputs, _) in CASES.items():
        leaf = outputs.clone().requires_grad_()
        p = predictive(spec, leaf)
        for value in moments(p):
            (grad,) = torch.autograd.grad(value.sum(), [leaf], retain_graph=True)
            assert grad.isfinite().all(), name


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), HeteroscedasticGaussian(), Categorical()])
def test_what_is_traced_is_computed_without_a_look_at_values_and_the_same(likelihood, monkeypatch):
    p = predictive(likelihood, noise(7, 5, 4))
    before = moments(p)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("a branch on a value"))
    after = moments(p)
    monkeypatch.undo()
    assert_close(after, before, rtol=1e-10, atol=1e-10)
    assert p.likelihood.traceable == ("entropy", "mutual_information")
