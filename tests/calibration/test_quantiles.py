"""The map of quantile levels: densities, quantiles, moments and draws against quadrature on a grid."""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou import metrics
from bayou.calibration import QuantileMap
from bayou.likelihoods.predictive import Predictive
from bayou.likelihoods.recalibrated import BoundRecalibrated
from bayou.operations.export import export
from tests.operations.fits import fitted, normal

F64 = torch.float64
KNOTS = torch.tensor([0.0, 0.1, 0.4, 0.8, 1.0], dtype=F64)
VALUES = torch.tensor([0.0, 0.2, 0.35, 0.7, 1.0], dtype=F64)
MAP = QuantileMap(KNOTS, VALUES)
IDENTITY = QuantileMap(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning"),
]


def numbers(samples=3, rows=2, outputs=1):
    return Predictive(bayou.Gaussian(0.5).bind(dtype=F64), normal(samples, rows, outputs))


def on_grid(p, row=0):
    """A grid of y of one row, and the density of the prediction on it, by ``log_prob``."""
    y = torch.linspace(-8, 8, 40001, dtype=F64)
    single = Predictive(p.likelihood, p.outputs[:, row : row + 1].expand(-1, len(y), -1))
    return y, single.log_prob(y.unsqueeze(1)).exp(), single


def integral(values, y):
    return torch.trapezoid(values, y)


def test_the_density_is_normalized_and_the_slope_of_the_cdf():
    y, density, single = on_grid(MAP(numbers()))
    assert integral(density, y) == pytest.approx(1.0, abs=2e-4)
    cdf = single.cdf(y.unsqueeze(1))[:, 0]
    gap = (cdf.diff() / y.diff() - (density[1:] + density[:-1]) / 2).abs()
    assert int((gap > 1e-5).sum()) <= 3  # the density jumps at three quantiles


def test_the_cdf_is_the_map_of_the_cdf():
    p = numbers()
    y = normal(2, 1, seed=5)
    u = p.cdf(y)
    expected = torch.empty_like(u)
    for row in range(2):
        k = int((u[row] >= KNOTS).sum()) - 1
        share = (u[row] - KNOTS[k]) / (KNOTS[k + 1] - KNOTS[k])
        expected[row] = VALUES[k] + share * (VALUES[k + 1] - VALUES[k])
    assert_close(MAP(p).cdf(y), expected)


@pytest.mark.parametrize("q", [0.03, 0.2, 0.5, 0.69, 0.97])
def test_quantiles_invert_the_cdf(q):
    p = MAP(numbers())
    assert_close(p.cdf(p.quantile(q)), torch.full((2, 1), q, dtype=F64))
    low, high = p.interval(0.8)
    assert_close(p.cdf(high) - p.cdf(low), torch.full((2, 1), 0.8, dtype=F64))


def test_moments_entropy_and_crps_by_quadrature():
    p = MAP(numbers())
    y, density, single = on_grid(p)
    mean = integral(density * y, y)
    variance = integral(density * (y - mean).square(), y)
    entropy = -integral(torch.special.xlogy(density, density), y)
    assert float(p.mean[0, 0]) == pytest.approx(float(mean), abs=5e-4)
    assert float(p.std[0, 0]) == pytest.approx(float(variance.sqrt()), abs=5e-4)
    assert float(p.entropy[0]) == pytest.approx(float(entropy), abs=1e-3)
    cdf = single.cdf(y.unsqueeze(1))[:, 0]
    observed = 0.3
    crps = integral((cdf - (y >= observed).to(F64)).square(), y)
    first = Predictive(p.likelihood, p.outputs[:, :1])
    found = metrics.crps(first, torch.full((1, 1), observed, dtype=F64))
    assert found == pytest.approx(float(crps), abs=1e-3)


def test_draws_have_the_distribution():
    p = MAP(numbers(rows=1))
    draws = p.sample(4000, seed=0)
    assert_close(draws[:7], p.sample(7, seed=0))
    expanded = Predictive(p.likelihood, p.outputs.expand(-1, 4000, -1))
    levels = expanded.cdf(draws[:, 0])
    distance, p_value = metrics.uniformity(levels)
    assert distance < 2.2 / math.sqrt(4000)
    assert p_value > 1e-4


def test_the_identity_changes_nothing():
    p = numbers()
    q = IDENTITY(p)
    y = normal(2, 1, seed=3)
    names = ("mean", "std", "epistemic_std", "aleatoric_std", "entropy", "mutual_information")
    for name in (*names, "means", "aleatoric_entropy"):
        assert_close(getattr(q, name), getattr(p, name))
    assert_close(q.log_prob(y), p.log_prob(y))
    assert_close(q.quantile([0.05, 0.9]), p.quantile([0.05, 0.9]))
    assert metrics.crps(q, y) == pytest.approx(metrics.crps(p, y), abs=1e-5)
    assert_close(q.sample(3, seed=1), p.sample(3, seed=1), atol=1e-9, rtol=0)


def test_the_parts_of_the_uncertainty_add_up():
    p = numbers()
    q = MAP(p)
    assert_close(q.means.mean(0), q.mean)
    total = q.epistemic_std.square() + q.aleatoric_std.square()
    assert_close(total, q.std.square())
    assert_close(q.epistemic_std / q.std, p.epistemic_std / p.std)
    assert_close(q.mutual_information, p.mutual_information)
    assert_close(q.entropy - q.aleatoric_entropy, q.mutual_information)


def test_the_joint_density_of_two_coordinates_is_normalized():
    """The mean of its ratio to the density of the draws is 1. The coordinates share the samples, so
    that the product of two maps of levels would be no density.
    """
    p = numbers(rows=1, outputs=2)
    y = p.sample(20_000, seed=0)[:, 0]
    rows = Predictive(p.likelihood, p.outputs.expand(-1, len(y), -1))
    ratio = (MAP(rows).log_prob(y) - rows.log_prob(y)).exp()
    assert abs(float(ratio.mean()) - 1) < 4 * metrics.standard_error(ratio)
    product = MAP(rows).likelihood.log_slope(rows.cdf(y)).sum(1).exp()
    assert abs(float(product.mean()) - 1) > 3 * metrics.standard_error(product)


@pytest.mark.parametrize("outputs", [1, 2])
def test_gradients_of_the_log_density_against_finite_differences(outputs):
    p = numbers(rows=3, outputs=outputs)
    y = normal(3, outputs, seed=3).requires_grad_()
    f = p.outputs.clone().requires_grad_()

    def log_prob(f, y):
        return MAP(Predictive(p.likelihood, f)).log_prob(y)

    assert torch.autograd.gradcheck(log_prob, (f, y), eps=1e-6, atol=1e-5)


def test_other_units_move_the_distribution():
    q = MAP(numbers())
    likelihood, outputs = q.likelihood.rescale(
        q.outputs, torch.tensor([2.0], dtype=F64), torch.tensor([3.0], dtype=F64)
    )
    moved = Predictive(likelihood, outputs)
    assert_close(moved.quantile(0.3), 3 * q.quantile(0.3) + 2)
    assert_close(moved.mean, 3 * q.mean + 2)
    assert_close(moved.std, 3 * q.std)


def test_values_at_the_knots_are_shares_of_levels():
    """The slopes times the widths are (n_k + a/K)/(n + a), near the empirical cdf for many rows."""
    rows = 3000
    f = torch.zeros(1, rows, 1, dtype=F64)
    y = normal(rows, 4).square().sum(1, keepdim=True) - 4  # of variance 8, skewed
    p = Predictive(bayou.Gaussian(math.sqrt(8.0)).bind(dtype=F64), f)
    fitted_map = QuantileMap.fit(p, y)
    levels = p.cdf(y).flatten()
    shares = torch.tensor([float((levels <= knot).to(F64).mean()) for knot in fitted_map.knots])
    assert_close(fitted_map.values, shares.to(F64), atol=0.02, rtol=0)
    q = fitted_map(p)
    assert q.log_prob(y).mean() > p.log_prob(y).mean() + 0.05
    for level in (0.5, 0.8, 0.9):
        assert metrics.coverage(q, y, level) == pytest.approx(level, abs=0.03)


def test_calibrated_predictions_get_the_identity_or_nearly_so():
    found = []
    for seed in range(10):
        y = normal(200, 1, seed=seed)
        p = Predictive(bayou.Gaussian(1.0).bind(dtype=F64), torch.zeros(1, 200, 1, dtype=F64))
        found.append(float((QuantileMap.fit(p, y).slopes - 1).abs().max()))
    assert sum(change < 0.15 for change in found) >= 6


@pytest.mark.parametrize("method", ["map", "ensemble", "laplace"])
def test_files_predictions_and_programs(method, tmp_path):
    posterior, x, y, net = fitted(method, "numbers")
    result = bayou.calibrate(posterior, (x[40:120], y[40:120]), map="isotonic")
    assert result.map == "isotonic"
    p = posterior.predict(x[120:], seed=0)
    assert isinstance(p.likelihood, BoundRecalibrated)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", net)
    assert torch.equal(loaded.predict(x[120:], seed=0).log_prob(y[120:]), p.log_prob(y[120:]))
    with pytest.raises(ValueError, match="a program cannot apply"):
        export(posterior, x[:3])
    guarantee = bayou.conformal(posterior, (x[40:120], y[40:120]), 0.8)
    low, high = guarantee.interval(x[120:])
    assert bool((low < high).all())


def test_counts_and_censored_targets_are_refused():
    counts = Predictive(bayou.Poisson().bind(), normal(1, 5, 1))
    with pytest.raises(ValueError, match="no density with a cdf"):
        QuantileMap.fit(counts, torch.ones(5, 1))
    censored = bayou.likelihoods.Censored(bayou.likelihoods.Weibull()).bind()
    times = torch.ones(5, 2)
    with pytest.raises(ValueError, match="more than their values"):
        QuantileMap.fit(Predictive(censored, normal(1, 5, 1).float()), times)
    with pytest.raises(ValueError, match="increase from 0 to 1"):
        QuantileMap(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 1.0]))


def test_a_component_with_a_map_of_quantiles_is_refused():
    posterior, x, _, _ = fitted("mixture", "numbers")
    posterior.components[0].calibration_map = MAP
    with pytest.raises(ValueError, match="calibrate the mixture instead"):
        posterior.predict(x)
