"""The choice of a map: calibrated predictions stay as they are, miscalibrated ones improve."""

import math

import pytest
import torch

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations.calibrate import MIN_ROWS, fit_map
from tests.operations.fits import fitted, normal

F64 = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning"),
]


def labels_of(logits, seed):
    """Draw a class of each row from softmax(logits)."""
    u = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (logits.softmax(-1).cumsum(-1) < u.unsqueeze(1)).sum(1).clamp_max(logits.shape[-1] - 1)


def classes(outputs):
    return Predictive(bayou.Categorical().bind(), outputs.unsqueeze(0))


@pytest.mark.slow
def test_calibrated_classes_are_left_alone_in_most_seeds():
    chosen = []
    for seed in range(8):
        logits = 2 * normal(120, 3, seed=seed)
        result, _ = fit_map(classes(logits), labels_of(logits, seed), "auto", seed=seed)
        chosen.append(result.map)
    assert chosen.count("none") >= 5


@pytest.mark.slow
def test_calibrated_numbers_are_left_alone_in_most_seeds():
    chosen = []
    for seed in range(8):
        p = Predictive(bayou.Gaussian(1.0).bind(dtype=F64), torch.zeros(1, 200, 1, dtype=F64))
        chosen.append(fit_map(p, normal(200, 1, seed=seed), "auto", seed=seed)[0].map)
    assert chosen.count("none") >= 5


@pytest.mark.slow
def test_overconfident_classes_get_a_temperature():
    logits = 2 * normal(400, 3)
    result, fitted_map = fit_map(classes(3 * logits), labels_of(logits, 1), "auto")
    assert result.map == "temperature"
    assert fitted_map.temperature == pytest.approx(3.0, rel=0.25)
    assert result.fresh.after < result.fresh.before - 3 * result.fresh.standard_error / 2
    assert result.fresh.rows == 100


@pytest.mark.slow
def test_shifted_classes_get_more_than_a_temperature():
    logits = 2 * normal(600, 3)
    shift = torch.tensor([0.0, 2.0, -1.0], dtype=F64)
    result, _ = fit_map(classes(logits + shift), labels_of(logits, 1), "auto")
    assert result.map not in ("none", "temperature")
    assert result.scores["vector"] < result.scores["temperature"]
    assert result.fresh.after < result.fresh.before


def test_skewed_numbers_get_a_map_of_quantiles():
    y = normal(500, 1).square() - 1
    p = Predictive(
        bayou.Gaussian(math.sqrt(2.0)).bind(dtype=F64), torch.zeros(1, 500, 1, dtype=F64)
    )
    result, _ = fit_map(p, y, "auto")
    assert result.map == "isotonic"
    assert result.fresh.after < result.fresh.before - 2 * result.fresh.standard_error


def test_the_change_on_fresh_rows_does_not_use_them():
    """Other targets of the fresh rows change their scores, but not the map that they score."""
    logits = 2 * normal(200, 3)
    y = labels_of(logits, 1)
    p = classes(3 * logits)
    from bayou.core import rng
    from bayou.operations.calibrate import fit_named

    order = rng.permutation(200, rng.fold(0, "fresh"))
    result, _ = fit_map(p, y, "vector")
    train, test = order[50:], order[:50]
    expected = fit_named("vector", Predictive(p.likelihood, p.outputs[:, train]), y[train])
    q = expected.apply(Predictive(p.likelihood, p.outputs[:, test]))
    assert result.fresh.after == pytest.approx(-float(q.log_prob(y[test]).mean()))
    assert result.fresh.map == "vector"


@pytest.mark.slow
def test_posteriors_by_auto_and_none():
    posterior, x, y, _ = fitted("ensemble", "classes")
    rows = (x[40:140], y[40:140])
    result = bayou.calibrate(posterior, rows, map="auto")
    assert set(result.scores) <= {
        "temperature",
        "vector",
        "matrix",
        "dirichlet",
        "isotonic",
        "spline",
    }
    assert result.map in {"none", *result.scores}
    assert str(round(result.fresh.before, 4)) in result.describe()
    bayou.calibrate(posterior, rows, map="vector")
    result = bayou.calibrate(posterior, rows, map="none")
    assert posterior.calibration_map is None
    assert posterior.temperature == 1.0
    assert result.before == result.after


def test_few_rows_and_other_names_are_refused():
    posterior, x, y, _ = fitted("map", "classes")
    with pytest.raises(ValueError, match=f"needs {MIN_ROWS} held-out rows"):
        bayou.calibrate(posterior, (x[40:60], y[40:60]), map="auto")
    with pytest.raises(ValueError, match="did you mean 'isotonic'"):
        bayou.calibrate(posterior, (x[40:], y[40:]), map="isotonik")
    result = bayou.calibrate(posterior, (x[40:70], y[40:70]))
    assert result.fresh is None
    assert "these rows" in result.describe()
    assert result.describe().startswith(f"temperature {result.temperature:.3g}; NLL")
