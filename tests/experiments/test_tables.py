"""The study of tables: scores against closed forms, readers of files, jobs in processes, the runner,
and the page.
"""

import functools
import json
import lzma
import math
import operator
from dataclasses import astuple, replace
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from bayou.data.columns import Column
from experiments import reproduce
from experiments.tables import censored, contestants, jobs, neural_peers, page, run, scores, sources
from experiments.tables.contestants import NotRun
from experiments.tables.jobs import Job
from experiments.tables.rows import encode_column, read_rows, row_numbers
from experiments.tables.sources import REPORTED, TABLES, TUNING
from experiments.tables.study import Tables, list_jobs

NORMAL = NormalDist()


def normal_crps(mean, std, y):
    """The CRPS of a Gaussian (Gneiting & Raftery 2007)."""
    z = (y - mean) / std
    law = stats.norm
    return std * (z * (2 * law.cdf(z) - 1) + 2 * law.pdf(z) - 1 / math.sqrt(math.pi))


# --- scores --------------------------------------------------------------------------------------


def test_scores_of_a_gaussian_are_those_in_closed_form():
    rng = np.random.default_rng(0)
    mean, std = 1e4 + 300 * rng.standard_normal(500), 50 + 100 * rng.uniform(size=500)
    y = mean + std * rng.standard_normal(500)
    found = scores.score(scores.gaussian(mean, std), y)
    assert found["nll"] == pytest.approx(-stats.norm.logpdf(y, mean, std).mean(), rel=1e-9)
    assert found["crps"] == pytest.approx(normal_crps(mean, std, y).mean(), rel=1e-6)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)), rel=1e-9)
    half = stats.norm.ppf(0.95) * std
    assert found["width"] == pytest.approx(2 * half.mean(), rel=1e-6)
    assert found["coverage"] == pytest.approx(np.mean(np.abs(y - mean) <= half))


def test_a_mixture_is_scored_by_its_density():
    y = np.array([0.5, -1.0])
    means, stds = np.array([[0.0, 0.0], [2.0, 1.0]]), np.array([[1.0, 2.0], [0.5, 1.0]])
    density = stats.norm.pdf(y, means, stds).mean(0)
    found = scores.score(scores.gaussian(means, stds), y)
    assert found["nll"] == pytest.approx(-np.log(density).mean(), rel=1e-9)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((means.mean(0) - y) ** 2)))


def test_quantiles_of_a_gaussian_have_its_scores_but_no_nll():
    """99 levels leave out the ends of the integral: under a hundredth of the CRPS."""
    rng = np.random.default_rng(1)
    mean, std = rng.standard_normal(400), 0.5 + rng.uniform(size=400)
    y = mean + std * rng.standard_normal(400)
    quantiles = mean + np.outer(stats.norm.ppf(scores.LEVELS), std)
    found = scores.score(scores.Forecast(mean=mean, quantiles=quantiles), y)
    exact = scores.score(scores.gaussian(mean, std), y)
    assert "nll" not in found
    assert found["crps"] == pytest.approx(exact["crps"], rel=0.01)
    for name in ("coverage", "width", "rmse"):
        assert found[name] == pytest.approx(exact[name], rel=1e-6)


def test_a_few_quantiles_of_a_gaussian_are_interpolated_exactly():
    levels = np.array([0.05, 0.25, 0.5, 0.95])
    mean, std = np.array([0.0, 10.0]), np.array([1.0, 3.0])
    few = mean + np.outer(stats.norm.ppf(levels), std)
    wanted = mean + np.outer(stats.norm.ppf(scores.LEVELS), std)
    assert np.allclose(scores.spread_levels(levels, few), wanted, atol=1e-12)


def test_residual_quantiles_cover_what_split_conformal_promises():
    """Over many draws of 39 residuals the 90 % interval covers 90 to 95 % (k/(M + 1) exactly)."""
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(400):
        forecast = scores.residual_quantiles(np.zeros(200), rng.standard_t(3, 39))
        covered.append(scores.score(forecast, rng.standard_t(3, 200))["coverage"])
    assert 0.89 < np.mean(covered) < 0.96


def test_scores_of_classes_are_those_in_closed_form():
    p = np.array([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4]])
    y = np.array([0, 1, 1])
    found = scores.score(scores.Forecast(probabilities=p), y)
    assert found["nll"] == pytest.approx(-np.log([0.7, 0.8, 0.4]).mean())
    assert found["brier"] == pytest.approx(np.mean([2 * 0.09, 2 * 0.04, 2 * 0.36]))
    assert found["error"] == pytest.approx(1 / 3)
    sure = scores.score(scores.Forecast(probabilities=np.array([[1.0, 0.0]])), np.array([1]))
    assert sure["nll"] == pytest.approx(-math.log(scores.MIN_PROBABILITY), rel=1e-6)


def test_a_forecast_without_a_prediction_is_an_error():
    with pytest.raises(ValueError, match="needs probabilities"):
        scores.score(scores.Forecast(mean=np.zeros(2)), np.zeros(2))


# --- tables --------------------------------------------------------------------------------------


def test_tables_for_tuning_are_none_that_are_reported():
    assert not set(TUNING) & set(REPORTED)
    assert set(TUNING) | set(REPORTED) == set(TABLES)
    assert len(TUNING) >= 8
    assert sum(table.group == "real" for table in REPORTED.values()) >= 14


def test_generated_rows_for_tuning_are_none_that_are_reported(tmp_path):
    kinds = [[name for name in names if "friedman1" in name] for names in (REPORTED, TUNING)]
    assert all(kinds)
    rows = []
    for name in (name for names in kinds for name in names):
        settings = TABLES[name].settings(tmp_path, 0)
        arrays = np.load(settings["data"])
        rows += [set(np.concatenate([arrays["y"], arrays["y_test"]]).tolist())]
    assert not rows[0] & rows[1]


def test_splits_of_generated_data_are_other_rows_and_stay_the_same(tmp_path):
    table = TABLES["steps"]
    draws = [np.load(table.settings(tmp_path, split)["data"])["y"] for split in (0, 0, 1)]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


PEOPLE = "when,city,size,left,price\n" + "".join(
    f"2020-01-{1 + i % 28:02d},{'ab'[i % 2]},{i if i % 5 else ''},{i},{1000 + 3 * i + i % 7}\n"
    for i in range(300)
)


@pytest.fixture
def people(tmp_path, monkeypatch):
    """A table of the kind of tables/: dates, categories, missing values, in xz below a folder."""
    folder = tmp_path / "data"
    (folder / "tables").mkdir(parents=True)
    (folder / "tables" / "people.csv.xz").write_bytes(lzma.compress(PEOPLE.encode()))
    monkeypatch.setenv("BAYOU_DATA", str(folder))
    table = sources._real("people", "price", "regression", drop=("left",))
    monkeypatch.setitem(TABLES, "people", table)
    return table


def test_peers_have_the_rows_and_all_columns_of_the_file(people, tmp_path):
    rows = read_rows(people.settings(tmp_path, 1))
    assert (len(rows.y), len(rows.y_test)) == (240, 60)
    assert rows.task == "regression"
    assert set(np.concatenate([rows.y, rows.y_test]).round(3)) <= set(range(1000, 2000))
    assert rows.mixed.shape[1] == 3  # when, city, size
    assert rows.categories == (1,)
    assert np.isnan(rows.mixed[:, 2]).sum() + np.isnan(rows.mixed_test[:, 2]).sum() == 60
    assert rows.mixed[:, 0].min() >= 18262  # days since 1970 of 2020-01-01
    assert not np.array_equal(rows.y, read_rows(people.settings(tmp_path, 2)).y)
    prices = [float(line.split(",")[-1]) for line in PEOPLE.splitlines()[1:]]
    train, test = row_numbers(people.settings(tmp_path, 1))
    assert sorted([*train, *test]) == list(range(300))
    assert np.allclose(np.array(prices)[train], rows.y, atol=1e-3)
    assert np.allclose(np.array(prices)[test], rows.y_test, atol=1e-3)


def test_a_part_of_the_training_rows_keeps_inputs_and_targets_together(people, tmp_path):
    rows = read_rows(people.settings(tmp_path, 0))
    part = rows.first(10, 3)
    assert len(part.y) == 10
    places = [rows.y.tolist().index(value) for value in part.y]
    assert np.array_equal(rows.x[places], part.x)
    assert np.array_equal(rows.mixed[places], part.mixed, equal_nan=True)
    assert rows.first(1000, 3) is rows


def test_inputs_of_tabm_are_standardized_and_have_codes_from_one(people, tmp_path):
    rows = read_rows(people.settings(tmp_path, 0))
    train, test, sizes = neural_peers.tabm_inputs(rows)
    assert train.numbers.shape == (240, 2)
    assert train.numbers.mean(0).abs().max() < 1e-5
    assert bool(test.numbers.isfinite().all())
    assert sizes == [3]  # unknown, a and b
    assert set(train.codes.flatten().tolist()) == {1, 2}
    assert train.at(slice(3))[1].shape == (3, 1)


def test_draws_are_thinned_to_equal_distances():
    assert neural_peers.thin(5).tolist() == [0, 1, 2, 3, 4]
    kept = neural_peers.thin(10_000)
    assert (len(kept), kept[0], kept[-1]) == (1000, 0, 9999)


def test_categories_that_no_training_row_has_are_unknown():
    column = Column(["b", "a", "c", ""])
    values, is_category = encode_column(column, np.array([0, 1]))
    assert is_category
    assert values.tolist() == [1.0, 0.0, -1.0, -1.0]
    assert encode_column(Column(["1", "", "3"]), np.array([0, 1]))[1] is False


def test_rows_of_one_value_are_selected_by_their_column():
    text = sources.select_rows('id,kind\n1,2\n"2, b",1\n3,2\n', "kind", "2")
    assert text == "id,kind\n1,2\n3,2\n"


def test_a_missing_file_is_said_with_the_variable_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYOU_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="set BAYOU_DATA"):
        sources.find_file("tables/ames.csv.xz")


def test_a_censored_time_counts_by_the_probability_to_exceed_it():
    law = stats.lognorm(0.8, scale=3.0)
    time, observed = np.array([2.0, 5.0]), np.array([1, 0])
    found = censored.censored_nll(law.logpdf(time), law.logsf(time), observed)
    assert found == pytest.approx(-(law.logpdf(2.0) + law.logsf(5.0)) / 2)


def test_the_column_of_events_is_no_input(people, tmp_path):
    table = replace(people, event="size", drop=())
    rows = censored.read_censored(table.settings(tmp_path, 0), "size")
    plain = read_rows(table.settings(tmp_path, 0))
    assert rows.x.shape[1] < plain.x.shape[1]
    assert np.allclose(rows.time, plain.y, atol=1e-3)
    with pytest.raises(NotRun, match="not for censored"):
        contestants.measure(table, 0, "linear model")


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["linear model", "HistGB conformal", "MLP", "Gaussian process"])
def test_peers_of_scikit_learn_predict_a_linear_table(people, label):
    found = contestants.measure(people, 0, label)
    assert found["rows"] == 240
    assert found["rmse"] < found["scale"] * (1.2 if label == "MLP" else 0.8)
    assert found["crps"] > 0


@pytest.mark.slow
def test_a_method_of_bayou_is_what_the_command_line_gives(people, tmp_path):
    from bayou.app.runs.config import Config
    from bayou.app.runs.folder import Run

    found = contestants.measure(people, 0, "bayou map")
    settings = people.settings(tmp_path, 0)
    straight = Run.create(tmp_path / "run", Config(methods=("map",), **settings))
    (result,) = straight.work()
    assert {name: found[name] for name in scores.NUMBER_SCORES} == pytest.approx(
        {name: result["metrics"][name] for name in scores.NUMBER_SCORES}
    )
    assert found["scale"] == pytest.approx(float(np.std(read_rows(settings).y)), rel=1e-5)
    assert any("'when'" in note for note in found["notes"]) == any(
        "'when'" in note for note in straight.facts()["notes"]
    )


@pytest.mark.parametrize(
    ("label", "change", "words"),
    [
        ("bayou other", {}, "no method 'no-such'"),
        ("bayou option", {}, "no setting --no-such-option"),
        ("missing", {"needs": ("no_such_library",)}, "no no_such_library"),
        ("missing", {"refused_rows": 10}, "more than 10 rows"),
    ],
)
def test_a_row_that_cannot_be_made_is_said(people, monkeypatch, label, change, words):
    peer = contestants.Peer(lambda rows, seed: None, **change)
    monkeypatch.setitem(contestants.PEERS, "missing", peer)
    monkeypatch.setitem(contestants.METHODS, "other", {"methods": ("no-such",)})
    option = {"methods": ("map",), "no_such_option": 1}
    monkeypatch.setitem(contestants.METHODS, "option", option)
    with pytest.raises(NotRun, match=words):
        contestants.measure(people, 0, label)


def test_peers_are_asked_only_for_their_task():
    labels = {job.label for job in list_jobs(["rare class"], (), 1)}
    assert "HistGB" in labels
    assert not labels & {"Gaussian process", "HistGB quantiles"}
    with pytest.raises(ValueError, match="no row 'XGBoost'"):
        list_jobs((), ["XGBoost"], 1)
    with pytest.raises(ValueError, match="leave out --length"):
        Tables().fits((), (), 1, 5)


# --- the runner ----------------------------------------------------------------------------------

ROW = {"status": "ok", "nll": 1.0, "seconds": 0.5, "megabytes": 10, "wall": 1.0}
JOBS = [Job("yacht", split, label) for split in (0, 1) for label in ("linear model", "MLP")]


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    made = []

    def fake(job, limit):
        made.append(job)
        return ROW if job.label == "MLP" else {"status": "over time"}

    monkeypatch.setattr(run, "run", fake)
    path = tmp_path / "rows.jsonl"
    assert run.run_jobs(JOBS[:2], path) == 0
    with path.open("a") as stream:
        stream.write('{"data": "yacht", "seed": 1, "label": "ML')  # a run that was killed
    assert run.run_jobs(JOBS, path, processes=2) == 0
    assert sorted(map(astuple, made)) == sorted(map(astuple, JOBS))
    assert set(run.read_lines(path)) == set(map(astuple, JOBS))
    assert run.run_jobs(JOBS, path, again=True) == 0
    assert [job.label for job in made[4:]] == ["linear model", "linear model"]
    assert run.run_jobs([*JOBS, Job("wine", 0, "MLP")], path, minutes=-1) == 1


def test_parts_of_the_jobs_are_disjoint_and_complete():
    parts = [run.select_part(JOBS, f"{k}/3") for k in range(3)]
    assert sorted(map(astuple, functools.reduce(operator.iadd, parts, []))) == sorted(
        map(astuple, JOBS)
    )
    for part in ("3/3", "1", "a/b", "-1/3"):
        with pytest.raises(ValueError, match="part must be k/n"):
            run.select_part(JOBS, part)


@pytest.mark.slow
def test_a_job_runs_in_a_process_of_its_own_within_its_time(monkeypatch):
    row = jobs.run(Job("friedman1", 0, "linear model"), 60)
    assert row["status"] == "ok"
    assert 0 < row["megabytes"] < 2000
    assert 0.7 < row["coverage"] <= 1
    assert jobs.run(Job("friedman1", 0, "bayou map"), -jobs.GRACE)["status"] == "over time"
    failed = jobs.run(Job("no such table", 0, "linear model"), 60)
    assert failed["status"].startswith("failed: KeyError")


# --- the page ------------------------------------------------------------------------------------


def found_rows():
    """Two tables, two splits, four rows, one of which took too long once."""
    behind = {"bayou auto": 0.0, "linear model": 0.5, "bayou map": 0.2, "bayou laplace": 0.3}
    rows = []
    for data, base in (("yacht", 1.0), ("energy", 2.0)):
        for seed in (0, 1):
            for label, more in behind.items():
                key = {"data": data, "seed": seed, "label": label, "length": None, "run": 0}
                nll = base + more + 0.01 * seed
                numbers = {"nll": nll, "crps": nll, "rmse": nll, "coverage": 0.9, "width": 2.0}
                rows.append(key | ROW | numbers | {"scale": 1.0})
    late = {"status": "over time", "wall": 300.0, "nll": None}
    kept = ("data", "seed", "label", "length", "run")
    last = next(row for row in reversed(rows) if row["label"] == "linear model")
    rows[rows.index(last)] = {name: last[name] for name in kept} | late
    command = {"command": "python -m experiments.tables.run", "made": "2026-11-19", "where": ""}
    return {"runs": [command], "rows": rows}


def test_ranks_share_the_mean_of_equal_scores():
    assert page.ranks({"a": 1.0, "b": 2.0, "c": 1.0, "d": math.inf}) == {
        "a": 1.5,
        "b": 3.0,
        "c": 1.5,
        "d": 4.0,
    }


def test_the_page_counts_losses_and_says_what_has_no_scores():
    text = page.render("Tables", found_rows())
    assert "| bayou auto (default) | 2 | 1.00 | 2 | 0 of 2 | 1.00 | 2 | 0.5 |" in text
    assert "| linear model | 2 | 2.00 | 0 | 2 of 2 | 2.00 | 0 | 0.5 | 1 |" in text
    assert "is behind the best model" not in text
    assert "- linear model: over time (energy)" in text
    assert "| yacht | linear model | 1.505 ± 0.005 |" in text
    assert "| energy | linear model | 2.500 |" in text


def test_single_methods_stand_beside_their_mode_and_in_no_summary():
    text = page.render("Tables", found_rows())
    assert "| data | auto (default) | laplace | map |" in text
    assert "- `laplace`: energy (+0.10), yacht (+0.10)" in text
    assert "- `auto`" not in text
    assert "| yacht | bayou laplace |" not in text
    assert "| bayou map |" not in text


def test_the_page_names_the_model_that_is_better_than_the_default():
    """The difference is that of each split, so that its error is not that of the two means."""
    found = found_rows()
    for row in found["rows"]:
        if row["label"] == "linear model" and row["data"] == "yacht":
            row["nll"] = 0.9 + 0.03 * row["seed"]
    text = page.render("Tables", found)
    assert "## Where bayou auto (default) is behind the best model by more than 0.02 nats" in text
    assert "| yacht | linear model | 0.090 ± 0.010 | 2 |" in text


def rows_of_splits(tried):
    """Rows of boston: label, split, status and NLL."""
    rows = [
        {"data": "boston", "label": label, "seed": seed, "status": status, "nll": nll}
        for label, seed, status, nll in tried
    ]
    return {"rows": rows, "runs": []}


def test_a_row_of_fewer_splits_counts_by_its_difference_on_them():
    """CatBoost is 1 behind on split 0, which is easy; a row that failed once has no mean."""
    found = rows_of_splits(
        [
            ("bayou auto", 0, "ok", 2.0),
            ("bayou auto", 1, "ok", 6.0),
            ("CatBoost", 0, "ok", 3.0),
            ("CatBoost", 7, "ok", 99.0),
            ("linear model", 0, "failed: no", None),
            ("linear model", 1, "ok", 0.0),
            ("MLP", 1, "not run: no sklearn", None),
        ]
    )
    assert page.mean_scores(found, "boston", "nll") == {"bayou auto": 4.0, "CatBoost": 5.0}


def test_without_the_default_means_are_over_common_splits():
    found = rows_of_splits(
        [
            ("CatBoost", 0, "ok", 1.0),
            ("CatBoost", 1, "ok", 9.0),
            ("LightGBM", 0, "ok", 2.0),
            ("linear model", 0, "failed: no", None),
            ("linear model", 1, "ok", 0.0),
        ]
    )
    assert page.common_splits(found, "boston") == {0}
    assert page.mean_scores(found, "boston", "nll") == {"CatBoost": 1.0, "LightGBM": 2.0}


def test_rows_of_files_are_joined_into_the_results(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(run, "run", lambda job, limit: ROW | {"coverage": 0.9, "notes": ["long"]})
    run.run_jobs(JOBS, path)
    command = ["run", str(path), "--join", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    run.main()
    found = json.loads((tmp_path / "tables.json").read_text())
    assert len(found["rows"]) == len(JOBS)
    assert all("notes" not in row for row in found["rows"])
    assert (tmp_path / "tables.md").read_text() == page.render(Tables().title, found)
    told = []
    options = {"data": ["yacht"], "only": ["MLP"], "seeds": 1, "tell": told.append}
    reproduce.reproduce("tables", tmp_path, **options)
    assert not told  # the row is there


def test_the_picture_has_a_line_for_every_row(tmp_path):
    path = tmp_path / "tables.png"
    assert page.draw(found_rows(), path)
    assert path.stat().st_size > 5000
    assert not page.draw({"runs": [], "rows": []}, path)
