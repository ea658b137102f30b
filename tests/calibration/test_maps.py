"""Calibration maps of classes: special cases of each other, exact means, gradients, files, programs."""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.calibration import (
    DirichletMap,
    IsotonicMap,
    MatrixMap,
    SplineMap,
    VectorMap,
    isotonic_regression,
    map_named,
    restore_map,
)
from bayou.calibration.curves import SPLINE, replace_mean
from bayou.likelihoods.predictive import Predictive
from bayou.operations.calibrate import fit_map
from bayou.operations.export import export, export_onnx
from tests.operations.fits import fitted, normal

F64 = torch.float64
CATEGORICAL = bayou.Categorical().bind()
LEARNED = (VectorMap, MatrixMap, DirichletMap, IsotonicMap, SplineMap)
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning"),
]


def mixture(samples=5, rows=40, classes=4, scale=2.0):
    """Predictions of classes by several functions."""
    return Predictive(CATEGORICAL, scale * normal(samples, rows, classes))


def biased_rows(rows=400, classes=3, samples=1):
    """Predictions that are too sure and whose classes are shifted, and labels of the truth."""
    logits = 2 * normal(rows, classes, seed=1)
    u = torch.rand(rows, generator=torch.Generator().manual_seed(2), dtype=F64)
    y = (logits.softmax(-1).cumsum(-1) < u.unsqueeze(1)).sum(1).clamp_max(classes - 1)
    shift = torch.arange(classes, dtype=F64)
    outputs = 2.5 * logits + shift + 0.3 * normal(samples, rows, classes, seed=3)
    return Predictive(CATEGORICAL, outputs), y


def diagonal(classes, factor):
    return torch.full((classes,), factor, dtype=F64)


@pytest.mark.parametrize("temperature", [2.5, 1.0, 0.4])
def test_a_temperature_is_a_vector_map_is_a_matrix_map(temperature):
    p = mixture()
    expected = Predictive(*CATEGORICAL.temper(p.outputs, temperature))
    vector = VectorMap(diagonal(4, 1 / temperature), torch.zeros(4, dtype=F64))
    matrix = MatrixMap(torch.diag(vector.weight), vector.bias)
    assert_close(vector(p).means, expected.means)
    assert_close(matrix(p).means, expected.means)


def test_a_vector_map_is_a_diagonal_matrix_map():
    p = mixture()
    weight = torch.tensor([0.3, 1.7, -0.4, 1.0], dtype=F64)
    bias = normal(4, seed=7)
    assert_close(VectorMap(weight, bias)(p).means, MatrixMap(torch.diag(weight), bias)(p).means)


def test_a_matrix_map_of_one_function_is_softmax_of_linear_logits():
    p = mixture(samples=1)
    weight = normal(4, 4, seed=4)
    bias = normal(4, seed=5)
    logits = p.outputs[0] - p.outputs[0].mean(-1, keepdim=True)
    expected = torch.einsum("dc,bc->bd", weight, logits) + bias
    assert_close(MatrixMap(weight, bias)(p).mean, expected.softmax(-1))


def test_a_dirichlet_map_of_one_function_is_softmax_of_linear_log_probabilities():
    p = mixture(samples=1)
    weight = normal(4, 4, seed=4)
    bias = normal(4, seed=5)
    expected = torch.einsum("dc,bc->bd", weight, p.mean.log()) + bias
    assert_close(DirichletMap(weight, bias)(p).mean, expected.softmax(-1))


def test_maps_with_identity_parameters_change_nothing():
    p = mixture()
    eye = torch.eye(4, dtype=F64)
    zero = torch.zeros(4, dtype=F64)
    knots = torch.tensor([1e-9, 1 - 1e-9], dtype=F64).repeat(4)
    identities = (
        VectorMap(torch.ones(4, dtype=F64), zero),
        MatrixMap(eye, zero),
        DirichletMap(eye, zero),
        IsotonicMap(knots, knots, torch.full((4,), 2)),
        SplineMap(torch.zeros(2, dtype=F64), torch.zeros(SPLINE.params, dtype=F64)),
    )
    for identity in identities:
        assert_close(identity(p).means, p.means, atol=2e-6, rtol=0)


@pytest.mark.parametrize("cls", LEARNED)
@pytest.mark.parametrize("samples", [1, 4])
def test_probabilities_are_normalized_and_the_nll_improves(cls, samples):
    p, y = biased_rows(samples=samples)
    calibrated = cls.fit(p, y)(p)
    assert_close(calibrated.probabilities.sum(-1), torch.ones(400, dtype=F64))
    assert_close(calibrated.means.sum(-1), torch.ones(samples, 400, dtype=F64))
    assert calibrated.log_prob(y).mean() > p.log_prob(y).mean() + 0.2


@pytest.mark.parametrize("cls", LEARNED)
def test_maps_of_binary_outcomes(cls):
    f = 3 * normal(2, 300, 1)
    y = (torch.rand(300, 1, generator=torch.Generator().manual_seed(1)) < (f[0] / 3).sigmoid()).to(
        F64
    )
    p = Predictive(bayou.Bernoulli().bind(), f)
    q = cls.fit(p, y)(p)
    assert q.outputs.shape == f.shape
    assert q.log_prob(y).mean() > p.log_prob(y).mean() + 0.03


def test_classes_on_another_axis_and_ignored_labels():
    f = normal(2, 50, 3, 6)  # (S, B, C, T)
    y = torch.randint(0, 3, (50, 6), generator=torch.Generator().manual_seed(0))
    y[:, -1] = -100
    likelihood = bayou.Categorical(class_axis=-2, ignore_index=-100).bind()
    last = bayou.Categorical().bind()
    fitted_map = VectorMap.fit(Predictive(likelihood, f), y)
    rows = f.movedim(-2, -1)[:, :, :-1].reshape(2, 250, 3)
    expected = VectorMap.fit(Predictive(last, rows), y[:, :-1].flatten())
    assert_close(fitted_map.weight, expected.weight, atol=1e-4, rtol=0)
    q = fitted_map(Predictive(likelihood, f))
    assert q.outputs.shape == f.shape
    assert_close(q.probabilities.sum(-1), torch.ones(50, 6, dtype=F64))


def test_maps_do_not_depend_on_a_shift_of_all_logits():
    p = mixture()
    weight = normal(4, 4, seed=4)
    shifted = Predictive(CATEGORICAL, p.outputs + 7.0)
    for linear in (MatrixMap(weight, weight[0]), DirichletMap(weight, weight[0])):
        assert_close(linear(shifted).means, linear(p).means)


def test_replaced_mean_is_exact_and_samples_stay_distributions():
    p = mixture(samples=6, rows=100)
    target = normal(100, 4, seed=9).log_softmax(-1)
    mixed = replace_mean(p.outputs.log_softmax(-1), target).exp()
    assert_close(mixed.mean(0), target.exp(), atol=1e-12, rtol=0)
    assert_close(mixed.sum(-1), torch.ones(6, 100, dtype=F64))
    assert bool((mixed >= 0).all())
    same = replace_mean(p.outputs.log_softmax(-1), p.mean.log()).exp()
    assert_close(same, p.means, atol=2e-6, rtol=0)


@pytest.mark.parametrize("cls", LEARNED)
def test_gradients_against_finite_differences(cls):
    p, y = biased_rows(samples=3)
    fitted_map = cls.fit(p, y)
    f = p.outputs[:, :4] + 0.01 * normal(3, 4, 3, seed=8)  # no probability is a knot
    f.requires_grad_()

    def log_prob(outputs):
        return fitted_map(Predictive(CATEGORICAL, outputs)).log_prob(y[:4])

    assert torch.autograd.gradcheck(log_prob, (f,), eps=1e-7, atol=1e-5)


def test_vector_fit_is_stationary():
    """The penalized NLL written out has no slope at the fit."""
    p, y = biased_rows()
    fitted_map = VectorMap.fit(p, y)
    parameters = torch.stack((fitted_map.weight, fitted_map.bias)).requires_grad_()
    z = p.outputs[0] - p.outputs[0].mean(-1, keepdim=True)
    log_p = (parameters[0] * z + parameters[1]).log_softmax(-1)
    spread = parameters[0] - parameters[0].mean()
    penalty = spread.square().sum() / 0.18 + parameters[1].square().sum() / 2
    loss = (penalty - log_p[torch.arange(len(y)), y].sum()) / len(y)
    (gradient,) = torch.autograd.grad(loss, parameters)
    assert gradient.abs().max() < 1e-5


def brute_force_isotonic(x, y):
    """max over a ≤ i of min over b ≥ i of the mean of y_a .. y_b (x sorted, no ties)."""
    y = y[x.argsort()]
    n = len(y)
    return torch.tensor(
        [
            max(min(float(y[a : b + 1].mean()) for b in range(i, n)) for a in range(i + 1))
            for i in range(n)
        ],
        dtype=F64,
    )


@pytest.mark.parametrize("seed", range(4))
def test_isotonic_regression_is_the_max_min_formula(seed):
    x = normal(30, seed=seed)
    y = x + normal(30, seed=seed + 10)
    knots, values = isotonic_regression(x, y)
    expected = brute_force_isotonic(x, y)
    places = x.sort().values
    cell = torch.searchsorted(knots, places, right=True) - 1
    assert_close(values[cell], expected)
    assert bool((knots.diff() > 0).all())
    assert bool((values.diff() >= 0).all())


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(5))
def test_isotonic_regression_is_that_of_scikit_learn(seed):
    from sklearn.isotonic import IsotonicRegression

    from bayou.likelihoods.piecewise import interpolate

    x = (4 * normal(200, seed=seed)).round() / 4  # with ties
    y = (x + normal(200, seed=seed + 10) > 0).to(F64)
    new = 2 * normal(500, seed=seed + 20)
    expected = IsotonicRegression(out_of_bounds="clip").fit(x.numpy(), y.numpy()).predict(new)
    found = interpolate(new, *isotonic_regression(x, y))
    assert_close(found, torch.as_tensor(expected, dtype=F64))


@pytest.mark.parametrize("name", ["vector", "matrix", "dirichlet", "isotonic", "spline"])
@pytest.mark.parametrize("method", ["map", "mixture"])
def test_files_and_predictions_have_the_map(name, method, tmp_path):
    posterior, x, y, net = fitted(method, "classes", seed=1)
    before = posterior.predict(x[100:], seed=0)
    result = bayou.calibrate(posterior, (x[40:100], y[40:100]), map=name)
    assert result.map == name
    assert posterior.temperature == 1.0
    p = posterior.predict(x[100:], seed=0)
    assert_close(p.probabilities, posterior.calibration_map(before).probabilities)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", net)
    assert loaded.calibration_map == posterior.calibration_map
    assert torch.equal(loaded.predict(x[100:], seed=0).log_prob(y[100:]), p.log_prob(y[100:]))
    posterior.calibration_map = None
    assert torch.equal(posterior.predict(x[100:], seed=0).outputs, before.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vector", "dirichlet", "isotonic", "spline"])
def test_exported_programs_have_the_map(name):
    posterior, x, y, _ = fitted("ensemble", "classes")
    bayou.calibrate(posterior, (x[40:100], y[40:100]), map=name)
    program = export(posterior, x[:3]).module()(x)
    p = posterior.predict(x, seed=0)
    assert_close(program["mean"], p.mean, atol=1e-5, rtol=1e-4)


def test_files_with_other_tensors_are_refused():
    with pytest.raises(ValueError, match="must be one of"):
        restore_map("quadratic", {})
    with pytest.raises(ValueError, match="has the tensors"):
        restore_map("vector", {"weight": torch.ones(2)})
    with pytest.raises(ValueError, match="needs a weight"):
        restore_map("matrix", {"weight": torch.ones(2), "bias": torch.ones(2)})
    with pytest.raises(ValueError, match="finite"):
        VectorMap(torch.tensor([1.0, math.nan]), torch.zeros(2))
    with pytest.raises(ValueError, match="needs 3 knots"):
        IsotonicMap(torch.ones(2), torch.ones(2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="SplineMap needs"):
        SplineMap(torch.zeros(2), torch.zeros(3))


def test_maps_refuse_what_they_are_not_for():
    numbers = Predictive(bayou.Gaussian(0.1).bind(), normal(1, 5, 1))
    with pytest.raises(ValueError, match="is for classes"):
        VectorMap.fit(numbers, normal(5, 1))
    ordered = Predictive(bayou.likelihoods.Ordinal(3).bind(), normal(1, 5, 1).float())
    with pytest.raises(ValueError, match="Categorical and Bernoulli"):
        VectorMap.fit(ordered, torch.zeros(5).long())
    with pytest.raises(ValueError, match="has 3 classes"):
        VectorMap(torch.ones(3), torch.zeros(3))(mixture())
    with pytest.raises(ValueError, match="did you mean 'vector'"):
        map_named("vektor", "classes")
    with pytest.raises(ValueError, match="for numbers"):
        map_named("vector", "real")
    assert map_named("temperature", "real") is None


@pytest.mark.peers
@pytest.mark.parametrize("name", ["matrix", "isotonic"])
def test_onnx_programs_have_the_map(name, tmp_path):
    import onnxruntime

    posterior, x, y, _ = fitted("ensemble", "classes")
    bayou.calibrate(posterior, (x[40:100], y[40:100]), map=name)
    path = export_onnx(posterior, tmp_path / "p.onnx", x[:3], answers=("mean",))
    session = onnxruntime.InferenceSession(str(path))
    (mean,) = session.run(["mean"], {"x": x.numpy()})
    assert_close(torch.as_tensor(mean), posterior.predict(x, seed=0).mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["vector", "matrix", "dirichlet"])
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_that_are_all_right_or_all_wrong_do_not_make_a_map_infinitely_sure(name, sign):
    y = torch.arange(90) % 2
    logits = sign * 4 * torch.nn.functional.one_hot(y, 2).double()
    p = Predictive(bayou.Categorical().bind(), logits.unsqueeze(0))
    with pytest.raises(ValueError, match=f"predicted {'right' if sign > 0 else 'wrong'}"):
        fit_map(p, y, name)
    result, fitted = fit_map(p, y, "auto")
    assert result.map not in ("vector", "matrix", "dirichlet")
    assert float(fitted.apply(p).probabilities.min()) > 1e-4


def test_a_temperature_of_constant_predictions_says_that_it_changes_nothing():
    p = Predictive(bayou.Categorical().bind(), torch.zeros(1, 60, 3))
    with pytest.raises(ValueError, match="changes nothing: every row"):
        fit_map(p, torch.arange(60) % 3, "temperature")
