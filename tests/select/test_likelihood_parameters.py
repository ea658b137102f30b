"""The prior scale and the noise or shape of likelihoods of counts, positive, heavy-tailed and
censored numbers, against independent searches on the same held-out rows.
"""

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import nn

import bayou
from bayou.likelihoods import (
    Censored,
    Gamma,
    Gaussian,
    KnownNoise,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Weibull,
)
from bayou.likelihoods.continuous import UnitGaussian
from bayou.network.target import Target
from bayou.posteriors import GaussianPosterior, Mixture
from bayou.select import by_name, plan
from bayou.select.folds import split_folds
from bayou.select.likelihood_parameters import (
    describe_parameters,
    likeliest_parameters,
    with_fixed_parameters,
)
from bayou.select.prior_scale import select_prior_scale
from bayou.select.search_run import SearchRun
from bayou.select.shared_searches import shared_searches
from bayou.training.data import as_data

pytestmark = pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")
F64 = torch.float64
SHAPE = 4.0


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def gamma_rows(rows, columns=2, seed=0, shape=SHAPE):
    """Positive numbers with the mean exp(x₁ − ½·x₂ + 1)."""
    x = draws(rows, columns, seed=seed)
    noise = np.random.default_rng(seed).gamma(shape, 1 / shape, (rows, 1))
    return x, torch.exp(x[:, :1] - 0.5 * x[:, 1:2] + 1) * torch.as_tensor(noise)


def line(columns=2, outputs=1):
    torch.manual_seed(0)
    return nn.Linear(columns, outputs).double()


def target_of(likelihood, rows, net=None, prior=bayou.Normal(1.0)):  # noqa: B008
    return Target.build(net or line(), likelihood, prior, len(rows[0]))


LEARNED = {
    "gaussian": (Gaussian((0.5, 0.5), learn=True, units=(2.0, 3.0)), 2),
    "student-t": (StudentT(scale=0.5, learn=True), 1),
    "lognormal": (LogNormal(0.5, learn=True), 1),
    "gamma": (Gamma(learn=True, unit=3.0), 1),
    "weibull": (Weibull(learn=True, unit=3.0), 1),
    "negative-binomial": (NegativeBinomial(learn=True, unit=3.0), 1),
    "censored-weibull": (Censored(Weibull(learn=True)), 2),
    "censored-lognormal": (Censored(LogNormal(0.5, learn=True)), 2),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_likelihood_is_fixed_at_values_of_its_parameters(name):
    spec, numbers = LEARNED[name]
    learned = spec.bind(dtype=F64)
    with torch.no_grad():
        for value in learned.parameters():
            value.copy_(0.3 + 0.1 * torch.arange(value.numel(), dtype=F64).reshape(value.shape))
    fixed_spec = spec.fixed_at(dict(learned.named_parameters()))
    fixed = fixed_spec.bind(dtype=F64)
    assert not list(fixed.parameters())
    y = torch.tensor([[1.0, 1.0], [2.0, 0.0]], dtype=F64)[:, :numbers]
    f = draws(2, 2 if name == "gaussian" else 1)
    assert torch.allclose(fixed.log_prob(f, y), learned.log_prob(f, y))
    expected = math.exp(-0.3 if name == "negative-binomial" else 0.3)
    assert describe_parameters(fixed_spec).startswith(f"{spec.parameter} {expected:.3g}")


def test_cut_points_stay_learned():
    target = target_of(Ordinal(3), gamma_rows(9))
    assert with_fixed_parameters(target) is target
    poisson = target_of(Poisson(), gamma_rows(9))
    assert with_fixed_parameters(poisson) is poisson


@pytest.mark.parametrize(
    "spec",
    [Gamma(learn=True), Weibull(learn=True), NegativeBinomial(learn=True), StudentT(learn=True)],
)
def test_the_likeliest_parameter_is_that_of_a_scalar_search(spec):
    x, y = gamma_rows(80)
    y = y.round() if isinstance(spec, NegativeBinomial) else y
    outputs = x[:, :1] - 0.5 * x[:, 1:] + 1
    learned = spec.bind(dtype=F64)
    ((name, value),) = likeliest_parameters(learned, outputs, y).items()

    def loss(log):
        fixed = spec.fixed_at({name: torch.tensor(log, dtype=F64)}).bind(dtype=F64)
        return -float(fixed.log_prob(outputs, y).mean())

    best = optimize.minimize_scalar(loss, bounds=(-6, 6), method="bounded")
    assert float(value) == pytest.approx(best.x, abs=2e-3)


def test_the_likeliest_noises_are_the_errors_of_the_outputs():
    f = draws(50, 2)
    y = f + draws(50, 2, seed=1) * torch.tensor([0.2, 3.0], dtype=F64)
    learned = Gaussian((0.5, 0.5), learn=True).bind(dtype=F64)
    noises = likeliest_parameters(learned, f, y)["log_scale"].exp()
    assert torch.allclose(noises, (y - f).square().mean(0).sqrt(), rtol=1e-3)


def test_counts_without_overdispersion_have_a_bounded_shape():
    y = torch.full((30, 1), 4.0, dtype=F64)
    learned = NegativeBinomial(learn=True).bind(dtype=F64)
    shape = likeliest_parameters(learned, torch.full_like(y, math.log(4)), y)["log_shape"].exp()
    assert 100 < float(shape) < 1001


def mode_of_fold(x, y, shape, scale):
    """The weights of log E[y] = w·x + b under N(0, scale²), by another optimizer."""
    design = np.column_stack((x.numpy(), np.ones(len(x))))
    values = y.numpy()[:, 0]

    def loss(w):
        f = design @ w
        data = shape * (f + values * np.exp(-f))
        gradient = design.T @ (shape * (1 - values * np.exp(-f))) + w / scale**2
        return data.sum() + 0.5 * w @ w / scale**2, gradient

    return optimize.minimize(loss, np.zeros(design.shape[1]), jac=True, method="BFGS").x, design


def gamma_losses(f, values, shape):
    return (
        special.gammaln(shape)
        - shape * np.log(shape)
        + shape * (f + values * np.exp(-f))
        - (shape - 1) * np.log(values)
    )


def held_out_search(rows, run, shape, scale):
    """Outputs and y of the rows that each fold holds out."""
    outputs, targets = [], []
    for training, held_out in split_folds(rows, run.part_seed("folds"), run.effort):
        x, y = next(training.with_batch_size(training.n).epoch())
        w, _ = mode_of_fold(x, y, shape, scale)
        x, y = next(held_out.with_batch_size(held_out.n).epoch())
        outputs.append(np.column_stack((x.numpy(), np.ones(len(x)))) @ w)
        targets.append(y.numpy()[:, 0])
    return np.concatenate(outputs), np.concatenate(targets)


def test_scale_and_shape_are_those_of_a_search_by_another_optimizer():
    """Of a linear network whose prior is far too narrow: modes by BFGS, one by one."""
    x, y = gamma_rows(60)
    rows = as_data((x, y))
    run = SearchRun(progress=False, start=bayou.MAP())
    target = target_of(Gamma(learn=True), (x, y), prior=bayou.Normal(0.1))
    selected, record, decisions = select_prior_scale(target, rows, run, draws_all_weights=False)
    shape = selected.likelihood_spec.shape
    nlls = []
    for trial in record["trials"]:
        f, values = held_out_search(rows, run, shape, 0.1 * trial["scale"])
        nlls.append(float(gamma_losses(f, values, shape).mean()))
        # the shape that the last search had is within a tenth
        assert trial["nll"] == pytest.approx(nlls[-1], abs=0.05)
    best = int(np.argmin(nlls))
    scale = record["trials"][best]["scale"]
    assert scale > 2
    assert float(selected.priors["weight"].log_scale.exp()) == pytest.approx(0.1 * scale)
    f, values = held_out_search(rows, run, shape, 0.1 * scale)
    grid = np.exp(np.linspace(-1, 3, 401))
    likeliest = grid[np.argmin([gamma_losses(f, values, k).mean() for k in grid])]
    assert shape == pytest.approx(likeliest, rel=0.1)
    assert decisions[0].startswith(f"prior scale {scale:.3g} of the default, chosen from 7 by")
    assert decisions[1] == f"shape {shape:.3g}, the likeliest by 5-fold cross-validation"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_shape_of_generated_rows_is_recovered(seed):
    """Within two standard errors: the information of log k in a row is k²·ψ'(k) − k."""
    rows = gamma_rows(400, seed=seed)
    posterior = bayou.fit(line(), rows, "map", likelihood="gamma", progress=False)
    error = math.sqrt(1 / (400 * (SHAPE**2 * special.polygamma(1, SHAPE) - SHAPE)))
    shape = posterior.target.likelihood_spec.shape
    assert abs(math.log(shape / SHAPE)) < 2 * error
    assert f"shape {shape:.3g}, the likeliest by 5-fold cross-validation" in posterior.plan


def test_a_given_prior_is_kept_and_the_shape_is_selected():
    prior = bayou.Normal(0.7)
    posterior = bayou.fit(
        line(), gamma_rows(60), "map", likelihood="gamma", prior=prior, progress=False
    )
    assert posterior.target.prior == prior
    assert posterior.plan.startswith("shape ")


def test_laplace_starts_at_the_mode_with_the_selected_prior():
    rows = gamma_rows(60)
    target = target_of(Gamma(learn=True), rows, prior=None)
    target = replace(target, prior_given=False)
    made = plan(by_name("laplace"), target, rows, progress=False)
    assert made.start is not None
    assert made.method.start is None
    assert made.method.prior is None
    posterior = made.fit(progress=False)
    assert isinstance(posterior, GaussianPosterior)
    mode = made.target.start()
    assert all(torch.equal(posterior.mean()[name], mode[name]) for name in mode)
    weights = {name: value.requires_grad_() for name, value in mode.items()}
    joint = made.target.log_joint(weights, *rows)
    gradients = torch.autograd.grad(joint, list(weights.values()))
    assert max(float(g.abs().max()) for g in gradients) < 0.05


def test_components_of_other_shapes_are_mixed_saved_and_loaded(tmp_path):
    rows = gamma_rows(20)
    components = [
        bayou.fit(line(), rows, bayou.MAP(steps=3), likelihood=Gamma(shape), progress=False)
        for shape in (1.0, 5.0)
    ]
    x, y = rows
    mixture = Mixture(components, [0.25, 0.75])
    densities = torch.stack([c.predict(x).log_prob(y) for c in components])
    weights = torch.tensor([[0.25], [0.75]], dtype=F64).log()
    expected = (densities + weights).logsumexp(0)
    assert torch.allclose(mixture.predict(x, 100).log_prob(y), expected)
    mixture.save(tmp_path / "mixture.bayou")
    loaded = bayou.load(tmp_path / "mixture.bayou", line())
    assert torch.equal(loaded.predict(x, 100).log_prob(y), mixture.predict(x, 100).log_prob(y))


def test_the_survival_of_a_normal_is_that_of_torch_and_is_mapped():
    z = torch.linspace(-40, 40, 401, dtype=F64, requires_grad=True)
    expected = torch.special.log_ndtr(-z)
    value = UnitGaussian().log_survival(z)
    assert torch.allclose(value, expected, rtol=1e-13, atol=0)
    (slope,) = torch.autograd.grad(value.sum(), z)
    (expected_slope,) = torch.autograd.grad(expected.sum(), z)
    assert torch.allclose(slope, expected_slope, rtol=1e-10)
    mapped = torch.vmap(UnitGaussian().log_survival)(z.detach().reshape(-1, 1))
    assert torch.equal(mapped[:, 0], value.detach())


def generated(name, rows, seed):
    """Targets with more noise than a network under the default prior needs to be fitted."""
    x = draws(rows, 4, seed=seed)
    f = torch.sin(1.5 * x[:, :1]) + 0.4 * x[:, 1:2]
    generator = np.random.default_rng(seed)
    positive = 30 * torch.exp(f) * torch.as_tensor(generator.gamma(3.0, 1 / 3.0, (rows, 1)))
    heavy = f + 0.5 * torch.as_tensor(generator.standard_t(3.0, (rows, 1)))
    count = torch.as_tensor(generator.poisson(positive.numpy() / 3), dtype=F64)
    known = torch.cat((f + 0.8 * draws(rows, 1, seed=seed + 9), torch.full_like(f, 0.8)), 1)
    limit = 40.0 + 0 * positive
    censored = torch.cat((torch.minimum(positive, limit), (positive <= limit).to(F64)), 1)
    several = torch.cat((f + 0.1 * draws(rows, 1, seed=seed + 5), heavy), 1)
    return x, {
        "gamma": positive,
        "weibull": positive,
        "student-t": heavy,
        "poisson": count,
        "negative-binomial": count,
        "known-noise": known,
        "censored-weibull": censored,
        "censored-lognormal": censored,
        "gaussian-per-output": several,
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gamma",
        "weibull",
        "student-t",
        "poisson",
        "negative-binomial",
        "known-noise",
        "censored-weibull",
        "censored-lognormal",
        "gaussian-per-output",
    ],
)
def test_fits_by_name_are_no_worse_than_the_default_scale(name):
    """On 1,000 new rows of three tables, where the default has its noise or shape selected too.

    The counts have more variance than a Poisson. Both methods share a search, as in ``auto``.
    """
    outputs = 2 if name == "gaussian-per-output" else 1
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, outputs)).double()
    differences = {"map": [], "laplace": []}
    for seed in range(3):
        x, y = generated(name, 1120, seed)

        def nll(method, prior, x=x, y=y):
            posterior = bayou.fit(
                net, (x[:120], y[:120]), method, likelihood=name, prior=prior, progress=False
            )
            return -float(posterior.predict(x[120:]).log_prob(y[120:]).mean())

        with shared_searches():
            for method, found in differences.items():
                found.append(nll(method, None) - nll(method, bayou.Normal("fan_in", gain=2.0)))
    for method, found in differences.items():
        assert fmean(found) < 0.05, method


@pytest.mark.slow
def test_many_rows_have_their_shape_selected_too():
    x, y = gamma_rows(5200, columns=20)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 1)).double()
    posterior = bayou.fit(
        net, (x, y), by_name("map", steps=300), likelihood="gamma", progress=False
    )
    assert "held-out rows; shape " in posterior.plan
    assert not posterior.target.likelihood_spec.learn


def test_known_noises_have_their_prior_scale_selected():
    x, y = generated("known-noise", 60, 0)
    net = line(4)
    posterior = bayou.fit(net, (x, y), "map", likelihood=KnownNoise(), progress=False)
    assert posterior.plan.startswith("prior scale ")
