"""The scikit-learn estimators: scikit-learn's own checks, units, pipelines, and files without
pickle.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.app.runs.config import Config
from bayou.select.settings import TRAINING

# Neither a given prior nor, in a regression, a given noise is searched for.
NOISE = bayou.Gaussian(0.115)
QUICK = {"steps": 60, "lr": 0.02, "hidden": (10,), "samples": 5, "prior": 1.0}
RECIPE = bayou.select.by_name("map", steps=20)
X, KINDS = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[KINDS]
QUICKER = QUICK | {"steps": 25, "lr": 0.05}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [BayesClassifier("map", **QUICKER), BayesRegressor("map", likelihood=NOISE, **QUICKER)]
)
def test_sklearn_compatible(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::bayou.inference.baseline_checks.WorseThanModeWarning"
)  # after so few steps, of some ten rows
@parametrize_with_checks([BayesRegressor("laplace", likelihood=NOISE, **QUICKER)])
def test_sklearn_compatible_with_other_methods(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("estimator", [BayesClassifier, BayesRegressor])
def test_every_setting_of_training_is_a_parameter(estimator):
    """What ``bayou train`` takes, by the same names, under the same rules; None leaves it as it is
    there.
    """
    names = set(Config.settings(TRAINING))
    assert {"steps", "lr", "members", "warmup"} <= names < set(estimator().get_params())
    assert all(estimator().get_params()[name] is None for name in names)
    model = clone(estimator("ensemble", members=3, steps=7))
    assert (model.members, model.steps) == (3, 7)
    assert model._method().method.n == 3
    assert "``members``: networks of an ensemble" in estimator.__mro__[2].__doc__
    with pytest.raises(ValueError, match="members must be at least 1, got 0"):
        estimator("ensemble", members=0)._method()


def line(n=80, noise=20.0):
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (n, 1))
    return x, 1000 + 300 * x[:, 0] + noise * generator.standard_normal(n)


@pytest.fixture(scope="module")
def regressor():
    x, y = line()
    settings = QUICK | {"hidden": (20,), "steps": 200, "lr": 1e-2, "samples": 100}
    return BayesRegressor("ffg", likelihood=NOISE, **settings, random_state=0).fit(x, y)


def test_numbers_are_in_the_units_of_y(regressor):
    x, y = line()
    new = line(400)[0][80:]
    truth = 1000 + 300 * new[:, 0]
    mean, std = regressor.predict(new, return_std=True)
    assert mean.shape == std.shape == (320,)
    assert np.abs(mean - truth).max() < 60
    assert 15 < std.mean() < 35  # noise of 20, and some doubt
    lower, upper = regressor.predict_interval(new, level=0.9)
    assert upper - lower == pytest.approx(2 * 1.645 * std, rel=0.05)  # close to a Gaussian
    p = regressor.predictive(x)
    assert p.mean.numpy() == pytest.approx(regressor.predict(x))
    location, log_scale = p.likelihood.location_log_scale(p.outputs)
    densities = torch.distributions.Normal(location, log_scale.exp()).log_prob(torch.as_tensor(y))
    log_prob = p.log_prob(torch.as_tensor(y))
    torch.testing.assert_close(log_prob.exp(), densities.exp().mean(0), rtol=1e-6, atol=0)
    lower, upper = regressor.predict_interval(x, level=0.9)
    coverage = ((y > lower) & (y < upper)).mean()
    assert abs(coverage - 0.9) < 3 * (0.9 * 0.1 / len(y)) ** 0.5
    assert regressor.score(x, y) > 0.95


def test_doubt_grows_away_from_the_data(regressor):
    doubt = regressor.predictive(np.array([[0.0], [6.0]])).epistemic_std
    assert doubt[1] > 3 * doubt[0]


@pytest.mark.parametrize(
    "likelihood",
    [
        bayou.Gaussian(0.1),
        bayou.HeteroscedasticGaussian(),
        bayou.likelihoods.StudentT(),
        bayou.likelihoods.HeteroscedasticStudentT(),
    ],
)
def test_other_likelihoods_and_several_outputs(likelihood):
    x, y = line()
    two = np.stack([y, -y], 1)
    model = BayesRegressor("map", likelihood=likelihood, **QUICK, random_state=0).fit(x, two)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == two.shape
    assert model.score(x, two) > 0.8
    assert np.abs(mean.mean(0) - two.mean(0)).max() < 50


def test_counts_stay_counts():
    x = np.linspace(-1, 1, 60)[:, None]
    y = np.random.default_rng(0).poisson(np.exp(1 + x[:, 0]))
    model = BayesRegressor("map", likelihood=bayou.Poisson(), **QUICK, random_state=0).fit(x, y)
    assert np.corrcoef(model.predict(x), np.exp(1 + x[:, 0]))[0, 1] > 0.9
    lower, _ = model.predict_interval(x)
    assert (lower == lower.round()).all()


def test_without_standardizing():
    x, y = line()
    model = BayesRegressor("map", standardize=False, likelihood=NOISE, **QUICKER).fit(x, y)
    assert model.y_mean_ == 0
    assert model.x_scale_ == 1
    model = BayesRegressor("map", likelihood=NOISE, **QUICKER).fit(
        np.hstack([x, np.full_like(x, 7.0)]), y
    )
    assert np.isinf(model.x_scale_[1])  # new values of a constant column are ignored


def test_classes_may_be_words():
    model = BayesClassifier("ensemble", **QUICK, random_state=0).fit(X, NAMES)
    assert model.score(X, NAMES) > 0.85
    assert set(model.predict(X)) <= set(NAMES)
    proba = model.predict_proba(X)
    assert proba.sum(1) == pytest.approx(1.0)
    lower, upper = model.predict_interval(X, level=0.8)
    assert ((lower <= proba + 1e-9) & (proba <= upper + 1e-9)).mean() > 0.9
    assert (upper - lower).max() > 1e-3
    assert model.predictive(X).mutual_information.min() >= 0


def test_same_seed_same_model():
    first = BayesClassifier("ensemble", members=2, **QUICKER, random_state=3).fit(X, KINDS)
    again = clone(first).fit(X, KINDS)
    other = clone(first).set_params(random_state=4).fit(X, KINDS)
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    assert not np.array_equal(first.predict_proba(X), other.predict_proba(X))


@pytest.mark.slow
def test_pipeline_grid_search_and_cross_validation() -> None:
    x, y = line()
    model = make_pipeline(
        PolynomialFeatures(2), BayesRegressor("map", likelihood=NOISE, **QUICK, random_state=0)
    )
    assert cross_val_score(model, x, y, cv=2).min() > 0.5
    grid = {
        "bayesregressor__prior": [1e-3, 1.0],
        "bayesregressor__steps": np.array([80]),
    }  # numpy numbers, as grids are
    search = GridSearchCV(model, grid, cv=2).fit(x, y)
    assert search.best_params_["bayesregressor__prior"] == 1.0  # a prior of 0.001 leaves a constant
    mean, std = search.best_estimator_.predict(x, return_std=True)
    assert mean.shape == std.shape


@pytest.mark.parametrize(
    "net",
    [
        None,
        "mlp",
        "table",
        pytest.param("lenet", marks=pytest.mark.slow),
        lambda features, outputs: nn.Linear(features, outputs),
    ],
)
def test_networks(net, tmp_path):
    X = np.random.default_rng(0).standard_normal((40, 256))
    y = X[:, 0] > 0
    shape = (1, 16, 16) if net == "lenet" else None
    settings = {"steps": 30, "samples": 7, "prior": 1.0, "random_state": 0}
    model = BayesClassifier("map", net=net, input_shape=shape, **settings).fit(X, y)
    path = tmp_path / "model.bayou"
    model.save(path)
    if callable(net):
        with pytest.raises(bayou.posteriors.FileError, match="net="):
            BayesClassifier.load(path)
    again = BayesClassifier.load(path, **({"net": net} if callable(net) else {}))
    assert np.array_equal(model.predict_proba(X), again.predict_proba(X))
    assert again.classes_.dtype == bool
    assert again.get_params()["input_shape"] == shape


@pytest.mark.parametrize(
    "method",
    [
        "mnf",
        "laplace-last",
        "dropout",
        bayou.VI({"*.weight": bayou.MNF(), "*": bayou.Delta()}, steps=20),
        RECIPE,
    ],
)
def test_files_hold_everything(method, tmp_path):
    x, y = line()
    steps = 20 if isinstance(method, str) else None
    settings = {"prior": bayou.Normal(0.7), "likelihood": NOISE, "samples": 9, "random_state": 0}
    model = BayesRegressor(method, steps=steps, **settings).fit(x, y)
    model.save(tmp_path / "a.bayou")
    again = BayesRegressor.load(tmp_path / "a.bayou")
    for one, two in zip(
        model.predict(x, return_std=True), again.predict(x, return_std=True), strict=True
    ):
        assert np.array_equal(one, two)
    assert again.get_params()["prior"] == bayou.Normal(0.7)
    assert again.method == method
    assert again.fit(x, y).predict(x) == pytest.approx(
        model.predict(x)
    )  # the settings are all there
    with zipfile.ZipFile(tmp_path / "a.bayou") as archive:
        assert {Path(name).suffix for name in archive.namelist()} == {".json", ".safetensors"}
    with pytest.raises(bayou.posteriors.FileError, match="BayesRegressor.load"):
        BayesClassifier.load(tmp_path / "a.bayou")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "mfn"}, "did you mean 'mnf'"),
        ({"method": 3}, "must be a name"),
        ({"method": bayou.MAP(), "steps": 3}, r"MAP\(steps=3\)"),
        ({"dtype": "float16"}, "float32"),
        ({"input_shape": (2, 2)}, "has 1 features"),
        ({"net": lambda features, outputs: None}, "nn.Module"),
        ({"likelihood": "normal"}, "there is no likelihood .normal."),
    ],
)
def test_errors_help(settings, message):
    x, y = line()
    with pytest.raises(ValueError, match=message):
        BayesRegressor(**settings).fit(x, y)


def test_one_class_and_levels():
    with pytest.raises(ValueError, match="one class"):
        BayesClassifier().fit(X, np.zeros(len(KINDS)))
    model = BayesClassifier("map", **QUICK).fit(X, KINDS)
    with pytest.raises(ValueError, match="level"):
        model.predict_interval(X, level=1.5)


@pytest.mark.slow
def test_import_is_lazy_and_says_what_is_missing() -> None:
    code = (
        "import sys, bayou\n"
        "assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules), 'import bayou is not light'\n"
        "sys.modules['sklearn'] = None\n"
        "try:\n    bayou.BayesClassifier\n"
        "except ImportError as error:\n    assert 'pip install' in str(error), error\n"
        "else:\n    raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert bayou.BayesRegressor is BayesRegressor


def test_ctrl_c_ends_a_search_and_keeps_what_there_is(monkeypatch):
    from bayou.adapters import estimator

    plain = estimator.fit

    def cut(*args, **options):
        posterior = plain(*args, **options)
        posterior.stopped = "interrupted"
        return posterior

    monkeypatch.setattr(estimator, "fit", cut)
    model = BayesClassifier("map", **QUICK)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, KINDS)
    assert model.predict(X).shape == KINDS.shape


def test_the_activation_is_in_the_file(tmp_path):
    x, y = np.linspace(-1, 1, 20)[:, None], np.linspace(-1, 1, 20) ** 2
    model = BayesRegressor("map", activation="Tanh", likelihood=NOISE, prior=1.0, steps=5).fit(x, y)
    model.save(tmp_path / "a.bayou")
    assert np.array_equal(BayesRegressor.load(tmp_path / "a.bayou").predict(x), model.predict(x))
    with pytest.raises(ValueError, match="such as 'SiLU' or 'ReLU', got 'relu'"):
        BayesRegressor("map", activation="relu").fit(x, y)


def test_a_recipe_as_the_method_is_its_name():
    x, y = line(40)
    settings = {"likelihood": NOISE, "prior": 1.0, "random_state": 0}
    model = BayesRegressor(RECIPE, **settings).fit(x, y)
    by_name = BayesRegressor("map", steps=20, **settings).fit(x, y)
    assert np.array_equal(by_name.predict(x), model.predict(x))


def test_conformal_intervals_are_those_of_the_held_out_rows(tmp_path):
    """The fit is the same as one on the other rows."""
    x = np.linspace(-1, 1, 120)[:, None]
    new = np.linspace(-1, 1, 11)[:, None]
    y = 50 + 7 * x[:, 0] + np.random.default_rng(0).normal(size=120)
    settings = QUICKER | {"likelihood": NOISE, "random_state": 0}
    model = BayesRegressor("map", conformal=0.25, **settings).fit(x, y)
    assert model.held_x_.shape == (30, 1)
    is_fitted = ~np.isin(x[:, 0], model.held_x_[:, 0])
    assert is_fitted.sum() == 90
    other = BayesRegressor("map", **settings).fit(x[is_fitted], y[is_fitted])
    assert_array_equal(other.predict(x), model.predict(x))
    with pytest.raises(ValueError, match="no rows were held out .*: fit with conformal=0.2"):
        other.predict_interval(x, conformal=True)

    low, high = model.predict_interval(new, 0.8, conformal=True)
    lower, upper = model.predict_interval(x[~is_fitted], 0.8)
    errors = np.sort(np.maximum(lower - y[~is_fitted], y[~is_fitted] - upper))
    margin = errors[25 - 1]  # ⌈31·.8⌉
    plain_low, plain_high = model.predict_interval(new, 0.8)
    assert_allclose(low, plain_low - margin, rtol=1e-9)
    assert_allclose(high, plain_high + margin, rtol=1e-9)
    model.save(tmp_path / "m.bayou")
    again = BayesRegressor.load(tmp_path / "m.bayou").predict_interval(new, 0.8, conformal=True)
    assert_array_equal((low, high), again)
    with pytest.raises(ValueError, match="30 held-out rows are too few for level=0.99; it needs"):
        model.predict_interval(new, 0.99, conformal=True)
    assert not hasattr(model.set_params(conformal=None).fit(x, y), "held_x_")


def test_conformal_sets(tmp_path):
    model = BayesClassifier("map", conformal=0.4, random_state=0, **QUICKER).fit(X, NAMES)
    mask = model.predict_set(X, 0.9)
    assert (mask.shape, mask.dtype) == ((150, 3), np.dtype(bool))
    rows = [np.flatnonzero((row == X).all(1))[0] for row in model.held_x_]
    is_held_out = np.isin(np.arange(150), rows)
    assert mask[is_held_out, KINDS[is_held_out]].mean() >= 0.9  # ⌈61·.9⌉ of 60 at least
    assert model.predict_set(X, 0.9, score="aps", empty=False).any(1).all()
    model.save(tmp_path / "m.bayou")
    assert_array_equal(BayesClassifier.load(tmp_path / "m.bayou").predict_set(X), mask)
    for fraction in (1.5, True, 3):
        with pytest.raises(ValueError, match="conformal must be a fraction"):
            BayesClassifier("map", conformal=fraction).fit(X, KINDS)


@pytest.mark.parametrize(
    ("estimator", "settings"), [(BayesClassifier, {}), (BayesRegressor, {"likelihood": NOISE})]
)
def test_groups_and_times_decide_on_the_rows_held_out_for_a_guarantee(
    estimator: Any, settings: dict[str, Any]
) -> None:
    groups = np.array([f"plant {i}" for i in range(30)]).repeat(5)
    model = estimator("map", conformal=0.2, random_state=0, **settings, **QUICKER)
    model.fit(X, KINDS, groups=groups)
    assert len(model.held_x_) == 30
    marked = np.column_stack([X, np.arange(150.0)])
    model.fit(marked, KINDS, groups=groups)
    held_out = model.held_x_[:, -1].astype(int)
    kept = np.setdiff1d(np.arange(150), held_out)
    assert not set(groups[held_out]) & set(groups[kept])
    model.fit(marked, KINDS, times=-np.arange(150.0))
    assert_array_equal(model.held_x_[:, -1], np.arange(30))


def test_the_fit_gets_the_groups_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a cross-validation, which gives each fit those of its own training rows."""
    groups = np.arange(30).repeat(5)
    blocks = []
    with_blocks = bayou.training.data.Rows.with_blocks

    def record(rows: Any, given: Any) -> Any:
        blocks.append(given)
        return with_blocks(rows, given)

    monkeypatch.setattr(bayou.training.data.Rows, "with_blocks", record)
    model = BayesRegressor("map", likelihood=NOISE, random_state=0, **QUICKER)
    fit_only = {"params": {"groups": groups}}
    cross_val_score(model, X, KINDS, cv=GroupKFold(3), groups=groups, **fit_only)
    assert [given.count(torch.arange(100)) for given in blocks] == [20, 20, 20]


def test_groups_of_another_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="groups must have one value for each of 150 rows"):
        BayesClassifier("map", **QUICKER).fit(X, KINDS, groups=[1, 2])


def test_rows_of_conformalize_give_groups_weights_and_shifts(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 1))
    y = 50 + 7 * x[:, 0] + (1 + x[:, 0] ** 2) * generator.normal(size=400)
    model = BayesRegressor("map", likelihood=NOISE, random_state=0, **QUICKER)
    model.fit(x[:100], y[:100])
    held_out, new = (x[100:300], y[100:300]), x[300:]
    groups = (x[:, 0] > 0).astype(int)
    model.conformalize(*held_out, groups=groups[100:300])
    options = {"conformal": True, "score": "split"}
    low, high = model.predict_interval(new, 0.8, groups=groups[300:], **options)
    for group in (0, 1):
        is_held_out = groups[100:300] == group
        rows = (held_out[0][is_held_out], held_out[1][is_held_out])
        alone = model.conformalize(*rows).predict_interval(new, 0.8, **options)
        is_new = groups[300:] == group
        assert_allclose(low[is_new], alone[0][is_new])
        assert_allclose(high[is_new], alone[1][is_new])

    plain = model.conformalize(*held_out).predict_interval(new, 0.8, **options)
    model.conformalize(*held_out, weights=np.full(200, 2.0))
    weighted = model.predict_interval(new, 0.8, weights=np.full(100, 2.0), **options)
    assert_allclose(weighted, plain)
    with pytest.raises(ValueError, match="those of new rows must be given|prediction was passed"):
        model.predict_interval(new, 0.8, **options)
    with pytest.raises(ValueError, match="weights must have one value for each of 100 rows"):
        model.predict_interval(new, 0.8, weights=[1.0], **options)

    shifted = 0.8 * new + 0.6
    model.conformalize(*held_out, shift="covariate", unlabeled=shifted)
    intervals = model.predict_interval(shifted, 0.8, **options)
    width = np.median(intervals[1] - intervals[0])
    assert width > np.median(plain[1] - plain[0])  # the noise is larger there
    model.save(tmp_path / "m.bayou")
    again = BayesRegressor.load(tmp_path / "m.bayou").predict_interval(shifted, 0.8, **options)
    assert_array_equal(intervals, again)
    with pytest.raises(ValueError, match="both shift= and unlabeled="):
        model.conformalize(*held_out, shift="covariate")


def test_sets_of_conformalize_follow_a_label_shift(tmp_path):
    model = BayesClassifier("map", random_state=0, **QUICKER).fit(X[::2], NAMES[::2])
    held_out, names = X[1::2], NAMES[1::2]
    model.conformalize(held_out, names, groups=names)
    mask = model.predict_set(held_out, 0.8, groups=names)
    assert mask[np.arange(75), KINDS[1::2]].mean() >= 0.8
    is_new = KINDS[1::2] != 0
    model.conformalize(held_out, names, shift="label", unlabeled=held_out[is_new])
    mask = model.predict_set(held_out, 0.8)
    model.save(tmp_path / "m.bayou")
    assert_array_equal(BayesClassifier.load(tmp_path / "m.bayou").predict_set(held_out, 0.8), mask)
    with pytest.raises(ValueError, match="y has the label 'tree', which is none of"):
        model.conformalize(held_out, np.full(75, "tree"))


@pytest.mark.filterwarnings("ignore::bayou.operations.ood.InexactRanksWarning")
@pytest.mark.parametrize("conformal", [None, 0.4])
def test_unusual_inputs_have_small_p_values(conformal, tmp_path):
    settings = QUICKER | {"random_state": 0, "ood": True, "conformal": conformal}
    classifier = BayesClassifier("map", **settings).fit(X, NAMES)
    y = 50 + 7 * X[:, 0] + np.random.default_rng(0).normal(size=len(X))
    regressor = BayesRegressor("map", likelihood=NOISE, **settings).fit(X, y)
    for model in (classifier, regressor):
        assert model.detector_.is_exact == (conformal is not None)
        p_values = model.ood_p_value(X)
        assert p_values.shape == (150,)
        assert float(model.ood_p_value(X + 10).max()) < 0.1 < float(np.median(p_values))
        model.save(tmp_path / "m.bayou")
        assert_array_equal(type(model).load(tmp_path / "m.bayou").ood_p_value(X), p_values)
    with pytest.raises(ValueError, match="has no detector .*: fit with ood=True"):
        classifier.set_params(ood=False).fit(X, NAMES).ood_p_value(X)


def test_decisions_and_thresholds_of_estimators():
    """They are those of the predictive, in the units of y and the order of the classes."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 2))
    numbers = 100.0 + 20.0 * X[:, 0]
    regressor = BayesRegressor("map", likelihood=NOISE, random_state=0, **QUICKER).fit(X, numbers)
    predictive = regressor.predictive(X)
    newsvendor = bayou.likelihoods.Newsvendor(9.0, 1.0)
    assert torch.equal(regressor.decide(X, newsvendor).action, predictive.quantile(0.9))
    chosen = regressor.decide(X, lambda a, y: -(a - y).abs(), [80.0, 100.0, 120.0]).action
    assert set(chosen.tolist()) <= {80.0, 100.0, 120.0}
    above = regressor.exceeds(X, 100.0)
    assert above.shape == (60,)
    np.testing.assert_allclose(above, predictive.exceeds(100.0).numpy())

    names = np.array(["low", "mid", "high"])
    labels = names[np.digitize(X[:, 0], [-0.5, 0.5])]
    utilities = np.array([[1.0, 0.0, -4.0], [0.3, 0.3, 0.3]])
    for settings in ({}, {"likelihood": "ordinal", "order": names.tolist()}):
        classifier = BayesClassifier("map", random_state=0, **QUICKER, **settings).fit(X, labels)
        p = classifier.predict_proba(X)
        decision = classifier.decide(X, utilities, names=["act", "wait"])
        np.testing.assert_array_equal(decision.action.numpy(), (p @ utilities.T).argmax(1))
        assert set(decision.labels) <= {"act", "wait"}
    column = classifier.classes_.tolist().index("high")
    np.testing.assert_allclose(classifier.exceeds(X, "mid"), p[:, column], rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="threshold must be one of"):
        classifier.exceeds(X, "middle")
    with pytest.raises(ValueError, match=r"utilities must be \(actions, 3\)"):
        classifier.decide(X, np.eye(2))
