"""Runs with a likelihood by name: prices, censored times, counts, ordered classes."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

import bayou
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import write_predictions
from bayou.app.runs.service import Service
from bayou.data import DataError, load

pytestmark = pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")
ROWS = 60


@pytest.fixture
def table(tmp_path):
    """Write a table with one target of every kind."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=ROWS)
    time = np.exp(x + 3)
    is_dead = generator.random(ROWS) < 0.7
    columns = {
        "x": x,
        "price": np.exp(x + 8),
        "time": np.where(is_dead, time, 0.5 * time),
        "status": np.where(is_dead, "dead", "alive"),
        "visits": generator.poisson(np.exp(x)),
        "rating": np.array(["Good", "Fair", "Very Good"])[np.digitize(x, [-0.5, 0.5])],
    }
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def config(table, target, likelihood, **settings):
    targets = ("price", "time", "status", "visits", "rating")
    others = tuple(name for name in targets if name not in (target, settings.get("observed")))
    return Config(
        str(table),
        ("map",),
        target=target,
        drop=others,
        likelihood=likelihood,
        steps=30,
        samples=5,
        **settings,
    )


def predict(folder, table):
    out = folder.parent / "predictions.csv"
    write_predictions(folder, table, out)
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("target", "likelihood", "settings"),
    [
        ("price", "lognormal", {}),
        ("price", "gamma", {}),
        ("time", "weibull", {"observed": "status"}),
        ("time", "lognormal", {"observed": "status"}),
        ("visits", "negative-binomial", {}),
        ("price", "auto", {}),
    ],
)
def test_predictions_of_numbers_have_the_units_of_the_file(
    table, tmp_path, target, likelihood, settings
):
    run = Run.create(tmp_path / "run", config(table, target, likelihood, **settings))
    (result,) = run.work()
    assert result["metrics"]["nll"] < 20
    rows = predict(run.folder, table)
    with table.open(newline="") as file:
        largest = max(float(row[target]) for row in csv.DictReader(file))
    for row in rows:
        middle = float(row.get("median", row["mean"]))
        assert float(row["5%"]) <= middle <= float(row["95%"])
        assert likelihood == "auto" or float(row["5%"]) >= 0
        assert float(row["mean"]) < 100 * largest
    means = [float(row["mean"]) for row in rows]
    assert 0.01 * largest < max(means)


def test_ordered_classes_have_an_interval(table, tmp_path):
    settings = config(table, "rating", "ordinal", order="Fair,Good,Very Good")
    run = Run.create(tmp_path / "run", settings)
    (result,) = run.work()
    assert {"accuracy", "crps"} <= set(result["metrics"])
    order = ["Fair", "Good", "Very Good"]
    for row in predict(run.folder, table):
        assert order.index(row["5%"]) <= order.index(row["class"]) <= order.index(row["95%"])
        total = sum(float(row[f"p({name})"]) for name in order)
        assert total == pytest.approx(1.0, abs=1e-5)


def test_the_larger_value_means_that_an_event_was_observed(table):
    data = load(table, target="time", drop=("price", "visits", "rating"), observed="status")
    assert data.train[1].shape[1] == 2
    assert any("status = dead were observed" in note for note in data.notes)
    assert data.feature_names == ("x",)
    assert (data.y_mean, data.y_scale) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "time", "observed": "x"}, "must have two values"),
        ({"target": "time", "observed": "time"}, "another column"),
        ({"target": "time", "observed": "state"}, "did you mean 'status'"),
        ({"target": "rating", "order": "Fair,Good"}, "every class of 'rating' once"),
    ],
)
def test_wrong_columns_and_orders_are_errors(table, options, message):
    with pytest.raises(DataError, match=message):
        load(table, **options)


@pytest.mark.parametrize(
    ("target", "likelihood", "settings", "message"),
    [
        ("price", "log-normal", {}, "did you mean 'lognormal'"),
        ("price", "ordinal", {"task": "regression"}, "not for regression"),
        ("rating", "gamma", {"task": "classification"}, "not for classification"),
        ("time", "censored-weibull", {}, "--observed"),
        ("time", "gamma", {"observed": "status"}, "--observed"),
        ("price", "gamma", {"heteroscedastic": True}, "not both"),
        ("price", "known-noise", {}, "in Python"),
        ("price", None, {"order": "1,2"}, "--order is for classes"),
        ("rating", None, {"order": "Fair,Good,Very Good"}, "--likelihood ordinal"),
    ],
)
def test_a_likelihood_that_does_not_fit_the_target_is_an_error(
    table, tmp_path, target, likelihood, settings, message
):
    run = Run.create(tmp_path / "run", config(table, target, likelihood, **settings))
    with pytest.raises((RunError, ValueError), match=message):
        run.work()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.json"))


@pytest.mark.parametrize(
    ("likelihood", "settings", "message"),
    [
        ("student-t", {}, "--noise 0.3 .* no effect with student-t"),
        (None, {"heteroscedastic": True}, "no effect with heteroscedastic"),
        ("auto", {}, "--likelihood auto chooses"),
        (None, {"methods": ("auto",)}, "--method auto chooses .* give --likelihood gaussian"),
    ],
)
def test_a_noise_without_effect_is_an_error_before_the_file_is_read(
    tmp_path, likelihood, settings, message
):
    made = replace(config("missing.csv", "price", likelihood), noise=0.3, **settings)
    with pytest.raises(RunError, match=message):
        Run.create(tmp_path / "run", made)
    Run.create(tmp_path / "run", replace(made, noise=0.5))


def test_a_noise_of_classes_is_an_error(table, tmp_path):
    made = replace(config(table, "rating", None), noise=0.3)
    with pytest.raises(RunError, match="--noise 0.3 .* the target has classes"):
        Run.create(tmp_path / "run", made).work()


@pytest.mark.parametrize("likelihood", [None, "gaussian"])
def test_a_noise_is_the_initial_one_of_a_gaussian(table, tmp_path, likelihood):
    run = Run.create(tmp_path / "run", replace(config(table, "price", likelihood), noise=0.3))
    assert run.likelihood(run.load_data()) == bayou.Gaussian(0.3, learn=True)


def test_negative_counts_are_an_error_that_says_so(table, tmp_path):
    settings = replace(config(table, "x", "negative-binomial"), drop=())
    with pytest.raises(ValueError, match="counts 0, 1, 2"):
        Run.create(tmp_path / "run", settings).work()


def test_a_run_tells_the_order_of_classes_that_no_option_gives(table, tmp_path):
    run = Run.create(tmp_path / "run", config(table, "rating", "ordinal"))
    note = run.load_data().notes[-1]
    assert "from low to high: 'Fair', 'Good', 'Very Good'" in note
    assert "--order" in note
    ordered = config(table, "rating", "ordinal", order="Very Good,Good,Fair")
    assert not any("alphabet" in text for text in Run("run", ordered).load_data().notes)


def test_a_service_takes_rows_with_the_column_of_observed_rows(table):
    data = load(table, target="time", drop=("price", "visits", "rating"), observed="status")
    service = Service(None, data.preprocessor, "run", 1)
    row = {"x": 0.5, "time": 3.0, "status": "dead"}
    assert len(service.read(json.dumps({"rows": [row]}).encode())) == 1


def test_flags_of_observed_rows_do_not_count_in_the_error_of_a_split(tmp_path):
    generator = np.random.default_rng(0)
    lines = [
        f"g{row % 9},{x:.4f},{np.exp(x):.4f},{row % 2}"
        for row, x in enumerate(generator.normal(size=60))
    ]
    path = tmp_path / "times.csv"
    path.write_text("\n".join(["group,x,time,died", *lines]))
    censored = load(path, target="time", group="group", observed="died")
    plain = load(path, target="time", group="group", drop=["died"])
    assert "RMSE" in plain.split_notes[1]
    assert censored.split_notes == plain.split_notes
