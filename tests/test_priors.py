import dataclasses
import math

import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.testing import assert_close

from bayou.priors import (
    BoundNormal,
    BoundPrior,
    BoundUnitNormal,
    DensityPrior,
    LogUniform,
    Normal,
    ScaleMixture,
    StudentT,
    UnitNormal,
)

F64 = torch.float64
PROPER = [
    Normal(0.7, mean=0.3),
    Normal("fan_in", gain=1.5),
    Normal(0.7, learn="units"),
    UnitNormal(0.7, mean=0.3),
    ScaleMixture(0.3, 1.2, 0.05),
    StudentT(3.5, 0.8),
]
CLOSED = [
    Normal(0.7, mean=0.3),
    Normal("fan_in"),
    Normal(0.7, learn="in"),
    LogUniform(),
]
LEARNED = [
    Normal(0.7, learn=True),
    Normal("fan_in", learn=True),
    Normal(0.7, learn="in"),
    Normal("fan_in", learn="units"),
    ScaleMixture(0.3, 1.2, 0.05, learn=True),
    StudentT(3.5, 0.8, learn=True),
]


def bind(spec, shape=(3, 2), fan_in=4):
    return spec.bind(shape, fan_in=fan_in, dtype=F64)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def reference(spec):
    match spec:
        case Normal() | UnitNormal():
            scale = spec.gain / 2 if isinstance(spec.scale, str) else spec.scale  # fan_in = 4
            return scipy.stats.norm(spec.mean, scale).pdf
        case ScaleMixture():
            return lambda w: (
                spec.pi * scipy.stats.norm(0, spec.scale1).pdf(w)
                + (1 - spec.pi) * scipy.stats.norm(0, spec.scale2).pdf(w)
            )
        case StudentT():
            return scipy.stats.t(spec.df, 0, spec.scale).pdf
    raise AssertionError(spec)


@pytest.mark.parametrize("spec", PROPER, ids=str)
def test_log_prob_is_scipys_and_sums_over_the_tensor_only(spec):
    w = 2 * noise(5, 4, 3, 2)
    expected = torch.as_tensor(reference(spec)(w.numpy())).log().sum((-2, -1))
    assert bind(spec).log_prob(w).shape == (5, 4)
    assert_close(bind(spec).log_prob(w), expected)
    assert_close(bind(spec, ()).log_prob(w).sum((-2, -1)), expected)


def test_the_scale_mixture_is_finite_far_out():
    """Both components underflow at |w| = 100 in float32; their log does not."""
    prior = ScaleMixture(0.5, 1.0, 0.0025).bind((), dtype=torch.float32)
    w = torch.tensor([0.0, 100.0], requires_grad=True)
    value = prior.log_prob(w)
    value.sum().backward()
    assert value[1].item() == pytest.approx(
        math.log(0.5) - 5000 - 0.5 * math.log(2 * math.pi), rel=1e-6
    )
    assert w.grad[1].item() == pytest.approx(-100.0, rel=1e-6)


@pytest.mark.parametrize("spec", CLOSED, ids=str)
def test_kl_broadcasts_sample_axes(spec):
    prior, mean, std = bind(spec), noise(5, 3, 2), noise(3, 2, seed=1).exp()
    kl = prior.kl(mean, std)
    full = prior.kl(mean, std.expand(5, 3, 2))
    assert kl.shape == (5,)
    assert_close(kl, full)
    scalar = prior.kl(mean, torch.tensor(0.3, dtype=F64))
    one = prior.kl(mean[0], std)
    assert scalar.shape == (5,)
    assert_close(one, kl[0])


@given(st.floats(-5, 5), st.floats(0.01, 5), st.floats(-3, 3), st.floats(0.01, 5))
def test_the_normal_kl_is_torchs_and_never_negative(m, s, mean, scale):
    kl = (
        Normal(scale, mean=mean)
        .bind((), dtype=F64)
        .kl(torch.tensor(m, dtype=F64), torch.tensor(s, dtype=F64))
    )
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(torch.tensor(m, dtype=F64), s), normal(torch.tensor(mean, dtype=F64), scale)
    )
    assert_close(kl, expected, rtol=1e-9, atol=1e-9)
    assert kl >= -1e-12


def test_priors_without_a_closed_form_return_none():
    for spec in (ScaleMixture(), StudentT()):
        assert bind(spec).kl(noise(3, 2), noise(3, 2).exp()) is None


def exact_negative_kl(log_alpha):
    """−KL = ½·log α − E log|1 + √α·ε| − (γ + log 2)/2, by quadrature.

    With t = |ε + 1/√α| = e^u the singular logarithm becomes a smooth integrand, and the trapezoidal
    rule is exact.
    """
    pole = math.exp(-log_alpha / 2)
    u = torch.linspace(-40, math.log(pole + 12), 8_001, dtype=F64)
    t = u.exp()
    density = torch.exp(-0.5 * (t - pole) ** 2) + torch.exp(-0.5 * (t + pole) ** 2)
    log_t = torch.trapezoid(u * t * density, u).item() / math.sqrt(2 * math.pi)
    return 0.5 * log_alpha - (0.5 * log_alpha + log_t) - 0.5 * (0.5772156649015329 + math.log(2))


def test_log_uniform_kl_reproduces_methods_number_6():
    prior = LogUniform().bind((), dtype=F64)

    def approximate(log_alpha, mean=-0.7):
        std = math.exp(log_alpha / 2) * abs(mean)
        return -float(prior.kl(torch.tensor(mean, dtype=F64), torch.tensor(std, dtype=F64)))

    assert exact_negative_kl(0.0) == pytest.approx(-0.42669, abs=5e-6)
    assert approximate(0.0) == pytest.approx(-0.43124, abs=5e-6)
    grid = [-8 + 16 * i / 320 for i in range(321)]
    worst = max(abs(exact_negative_kl(a) - approximate(a)) for a in grid)
    assert worst == pytest.approx(0.0094, abs=1e-4)


def test_log_uniform_kl_has_a_finite_gradient_at_a_mean_of_zero():
    for dtype in (torch.float32, F64):
        mean = torch.zeros(3, dtype=dtype, requires_grad=True)
        kl = LogUniform().bind((3,)).kl(mean, torch.ones(3, dtype=dtype))
        kl.backward()
        assert kl.item() == pytest.approx(0.0, abs=1e-6)
        assert mean.grad.abs().max() == 0


@pytest.mark.parametrize("spec", PROPER, ids=str)
def test_draws_follow_the_density_and_depend_on_their_index_alone(spec):
    prior = bind(spec, (2,))
    draws = prior.sample(20_000, seed=3)
    assert draws.shape == (20_000, 2)
    assert_close(prior.sample(10, seed=3, start=100), draws[100:110])
    density = reference(spec)
    for low, high in ((-0.5, 0.0), (0.0, 0.5), (0.5, 3.0)):
        p = scipy.integrate.quad(density, low, high, points=[0.01, -0.01])[0]
        share = ((draws > low) & (draws < high)).double().mean().item()
        assert abs(share - p) < 4.5 * math.sqrt(p * (1 - p) / draws.numel())


@pytest.mark.parametrize("spec", LEARNED, ids=str)
def test_learned_hyperparameters_are_parameters_with_the_right_gradient(spec):
    prior = bind(spec)
    w = noise(5, 3, 2)
    assert dict(prior.named_parameters()).keys() <= {"logit_pi", *BoundPrior.scales}
    assert len(list(prior.parameters())) > 0

    def value(*hyper):
        named = dict(zip(dict(prior.named_parameters()), hyper, strict=True))
        return torch.func.functional_call(
            _Call(prior), {f"prior.{k}": v for k, v in named.items()}, (w,)
        )

    assert torch.autograd.gradcheck(value, tuple(prior.parameters()))
    frozen = bind(dataclasses.replace(spec, learn=False))
    assert not list(frozen.parameters())
    if not isinstance(prior, BoundUnitNormal):
        assert frozen.state_dict().keys() == prior.state_dict().keys()


class _Call(nn.Module):
    def __init__(self, prior):
        super().__init__()
        self.prior = prior

    def forward(self, w):
        return self.prior.log_prob(w)


@pytest.mark.parametrize("spec", [PROPER[0], PROPER[4], LogUniform()], ids=str)
def test_log_prob_and_kl_go_through_vmap_and_compile(spec):
    prior, w, std = bind(spec), noise(5, 3, 2), noise(5, 3, 2, seed=1).exp()
    expected = prior.log_prob(w)
    assert_close(torch.vmap(prior.log_prob)(w), expected)
    assert_close(torch.compile(prior.log_prob, fullgraph=True, backend="eager")(w), expected)
    kl = prior.kl(w, std)
    if kl is not None:
        assert_close(torch.vmap(prior.kl)(w, std), kl)
        assert_close(torch.compile(prior.kl, fullgraph=True, backend="eager")(w, std), kl)


def test_fan_in_scales_the_prior():
    prior = Normal("fan_in", gain=2.0).bind((3, 9), fan_in=9, dtype=F64)
    assert prior.log_scale.exp().item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normal(0.0), "scale must be positive and finite, got 0.0"),
        (lambda: Normal(math.nan), "scale must be positive and finite"),
        (lambda: Normal("fan_out"), "'fan_in', got 'fan_out'"),
        (lambda: Normal(learn="inputs"), 'learn must be .*"units", got'),
        (lambda: Normal("fan_in").bind((3,)), r"\(3,\) has fan_in=None"),
        (lambda: LogUniform().bind((3,)).sample(2), "improper"),
        (lambda: UnitNormal(inputs=(1.0, 0.0)), "inputs must be positive factors"),
        (
            lambda: UnitNormal(inputs=(1.0, 2.0, 4.0)).bind((4, 2)),
            r"3 factors of input units, and a tensor of shape \(4, 2\) has 2",
        ),
        (lambda: bind(Normal()).log_prob(noise(2, 3)), r"\(\.\.\., \*\(3, 2\)\)"),
        (lambda: bind(Normal()).log_prob(noise(5, 3, 4)), r"\(\.\.\., \*\(3, 2\)\)"),
        (lambda: Normal(2.0, gain=3.0), "multiplies"),
        (lambda: Normal(True), "finite, got True"),
        (lambda: ScaleMixture(pi=1.0), "between 0 and 1"),
        (lambda: ScaleMixture(scale2=-1.0), "scale2"),
        (lambda: StudentT(df=0), "df must be positive"),
        (lambda: DensityPrior(3), "log_prob or a function"),
    ],
)
def test_invalid_arguments_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mean_field_posterior_becomes_a_prior():
    """KL(q ‖ q) = 0, elementwise means and scales, the posterior left alone and the copy frozen."""
    mean, std = noise(3, 2), noise(3, 2, seed=1).exp()
    posterior = BoundNormal((3, 2), mean, std.log(), learn=True)
    spec = DensityPrior(posterior)
    prior = bind(spec)
    kl = prior.kl(mean, std)
    assert abs(kl) < 1e-12
    assert_close(prior.log_prob(mean + std), posterior.log_prob(mean + std).detach())
    assert_close(prior.sample(3, seed=1), posterior.sample(3, seed=1).detach())
    assert not any(p.requires_grad for p in prior.parameters())
    assert posterior.log_scale.requires_grad
    with torch.no_grad():
        posterior.log_scale.zero_()
    assert_close(prior.kl(mean, std), kl)


def test_any_function_becomes_a_prior():
    prior = bind(DensityPrior(lambda w: -0.5 * w.square().sum((-2, -1))))
    w = noise(5, 3, 2)
    assert_close(prior.log_prob(w), -0.5 * w.square().sum((-2, -1)))
    assert_close(
        torch.compile(prior.log_prob, fullgraph=True, backend="eager")(w), prior.log_prob(w)
    )
    assert prior.kl(w, w.exp()) is None
    with pytest.raises(ValueError, match="no sample"):
        prior.sample(3)
    with pytest.raises(ValueError, match=r"must sum over the trailing axes \(3, 2\)"):
        bind(DensityPrior(lambda w: -w.square())).log_prob(w)


def by_unit(learn, shape=(4, 3), axes=(1, 0)):
    """With factors that are not 1."""
    prior = Normal(0.7, mean=0.3, learn=learn).bind(shape, dtype=F64, axes=axes)
    with torch.no_grad():
        for number, p in enumerate(prior.parameters()):
            p.add_(noise(*p.shape, seed=number))
    return prior


def test_a_prior_by_unit_is_its_formula():
    """p(w_ji) = N(w_ji; mean, (s·a_i·b_j)²) with factors of geometric mean 1, whatever constant is
    added to a log.
    """
    prior = by_unit("units")
    a, b = (prior.log_factor(unit).exp() for unit in ("in", "out"))
    assert (a.shape, b.shape) == ((3,), (4,))
    for factors in (a, b):
        assert float(factors.detach().log().mean()) == pytest.approx(0, abs=1e-12)
    scale = prior.log_base.exp() * a * b.unsqueeze(1)
    w, std = noise(5, 4, 3), noise(4, 3, seed=1).exp()
    normal = torch.distributions.Normal(torch.tensor(0.3, dtype=F64), scale)
    assert_close(prior.log_prob(w), normal.log_prob(w).sum((1, 2)))
    want = torch.distributions.kl_divergence(torch.distributions.Normal(w, std), normal).sum((1, 2))
    assert_close(prior.kl(w, std), want)
    draws = prior.sample(20_000, seed=0).detach()
    assert_close(draws.std(0), scale.detach(), rtol=0.03, atol=0)
    before = prior.log_prob(w).detach()
    with torch.no_grad():
        prior.log_in.add_(3.0)
    assert_close(prior.log_prob(w), before)


@pytest.mark.parametrize("learn", ["in", "out", "units"])
def test_the_best_factors_are_in_closed_form(learn):
    """a_i² = mean_j (m² + σ²)/(s·b_j)² and likewise b: where they hold, the gradient of the KL is
    zero.
    """
    prior = by_unit(learn)
    mean, std = noise(4, 3), noise(4, 3, seed=1).exp()
    second = (mean - 0.3).square() + std.square()
    a, b = torch.ones(3, dtype=F64), torch.ones(4, 1, dtype=F64)
    for _ in range(100):
        a = (
            (second / b.square()).mean(0).sqrt()
            if learn != "out"
            else (second / b.square()).mean().sqrt().expand(3)
        )
        b = (second / a.square()).mean(1, keepdim=True).sqrt() if learn != "in" else b
    with torch.no_grad():
        prior.log_base.copy_(a.log().mean() + b.log().mean())
        for log, best in (("log_in", a), ("log_out", b.flatten())):
            if hasattr(prior, log):
                getattr(prior, log).copy_(best.log())
    gradients = torch.autograd.grad(prior.kl(mean, std), list(prior.parameters()))
    for gradient in gradients:
        assert float(gradient.abs().max()) < 1e-9


def test_which_tensors_have_factors():
    """Axes with several units, of tensors with two axes or more; the axes of a layer are those of
    its inputs.
    """
    assert by_unit("units", (4, 3, 5, 5)).axes == {"in": 1, "out": 0}
    assert by_unit("units", (4, 3, 5), axes=(0, 1)).axes == {"in": 0, "out": 1}
    assert by_unit("units", (1, 3)).axes == {"in": 1}
    for shape in ((4,), (), (4, 1)):
        plain = Normal(learn="in").bind(shape)
        assert type(plain) is BoundNormal
        assert plain.log_scale.requires_grad


def test_known_factors_of_units():
    prior = UnitNormal(0.5, inputs=(1.0, 2.0, 4.0)).bind((4, 3), dtype=F64)
    assert_close(prior.log_scale.exp(), torch.tensor([[0.25, 0.5, 1.0]], dtype=F64))
    assert not list(prior.parameters())
