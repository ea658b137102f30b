"""Labels and decisions on the command line: rows of a pool, training files that grow, columns for a
threshold and for costs.
"""

import csv
import random
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bayou
from bayou.app.cli.app import app
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.labeling import add_labels, choose_rows
from bayou.app.runs.predictions import write_predictions
from bayou.data import load

QUICK = {"steps": 20, "samples": 8, "members": 3, "gain": 1.0}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def value(a, b, c):
    return 3.0 * a - b + (2.0 if c == "red" else 0.0)


def write_rows(path, count, seed, target=None, delimiter=","):
    """Write rows of two numbers and a color, with a target of numbers or of classes."""
    source = random.Random(seed)
    decimal = "," if delimiter == ";" else "."
    lines = [delimiter.join(["key", "a", "b", "c"] + [target] * bool(target))]
    for i in range(count):
        a, b, c = source.gauss(0, 1), source.uniform(0, 9), source.choice(["red", "green"])
        y = value(a, b, c) + source.gauss(0, 0.3)
        cells = [f"k{seed}-{i}", f"{a:.5f}", f"{b:.5f}", c]
        if target == "grade":
            cells.append("high" if y > -3 else "low")
        elif target:
            cells.append(f"{y:.5f}")
        lines.append(delimiter.join(cell.replace(".", decimal) for cell in cells))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(path, delimiter=","):
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, delimiter=delimiter))


def train(folder, data, target, method="ensemble", **settings):
    config = Config(str(data), (method,), target=target, id="key", **(QUICK | settings))
    run = Run.create(folder, config)
    run.work()
    assert not run.failures()
    return run


@pytest.fixture(scope="module")
def prices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prices")
    data = write_rows(folder / "houses.csv", 80, 0, "price")
    return train(folder / "run", data, "price")


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grades")
    data = write_rows(folder / "grades.csv", 80, 0, "grade")
    return train(folder / "run", data, "grade")


def label_file(path, target="price", leave_empty=(), delimiter=","):
    """Fill in the target of chosen rows, as a person would."""
    rows = read(path, delimiter)
    for i, row in enumerate(rows):
        if i not in leave_empty:
            row[target] = "high" if target == "grade" else f"{20 + i}"
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


@pytest.mark.parametrize("score", [None, "epig", "determinant", "variance"])
def test_chosen_rows_are_rows_of_the_pool(prices, tmp_path, score):
    pool = write_rows(tmp_path / "pool.csv", 40, 1)
    selection = choose_rows(prices.folder, pool, tmp_path / "out.csv", 6, score)
    rows = read(selection.path)
    pool_rows = read(pool)
    assert list(rows[0]) == ["key", "a", "b", "c", "price", "pool_row", "label_score"]
    assert len({row["key"] for row in rows}) == 6
    for row in rows:
        assert row["price"] == ""
        assert pool_rows[int(row["pool_row"]) - 1].items() <= row.items()
        assert float(row["label_score"]) >= 0
    again = choose_rows(prices.folder, pool, tmp_path / "again.csv", 6, score)
    assert again.path.read_text() == selection.path.read_text()
    assert any("6 of 40 unlabeled rows" in note for note in selection.notes)


def test_a_mixture_with_closed_forms_scores_rows_alone_unless_told_otherwise(tmp_path):
    data = write_rows(tmp_path / "houses.csv", 60, 0, "price")
    pool = write_rows(tmp_path / "pool.csv", 20, 1)
    run = train(tmp_path / "run", data, "price", "wide", gain=None)
    wide, _, job = run.posterior("wide")
    bayou.Mixture([wide, wide], torch.tensor([0.5, 0.5])).save(
        run.job_folder(job) / "posterior.bayou"
    )
    selection = choose_rows(run.folder, pool, tmp_path / "out.csv", 4)
    assert any("chosen by variance" in note for note in selection.notes)
    assert any("lcmd needs functions" in note for note in selection.notes)
    with pytest.raises(ValueError, match="lcmd needs functions at all rows"):
        choose_rows(run.folder, pool, tmp_path / "again.csv", 4, "lcmd")


def test_classes_are_chosen_and_added(grades, tmp_path):
    pool = write_rows(tmp_path / "pool.csv", 30, 1)
    selection = choose_rows(grades.folder, pool, tmp_path / "out.csv", 4)
    assert any("chosen by batchbald" in note for note in selection.notes)
    label_file(selection.path, "grade")
    added = add_labels(grades.folder, selection.path, tmp_path / "more.csv")
    assert [row["grade"] for row in read(added.path)[80:]] == ["high"] * 4
    rows = label_file(selection.path, "grade")
    text = selection.path.read_text().replace("high", "hihg")
    (tmp_path / "typo.csv").write_text(text)
    with pytest.raises(ValueError, match="'hihg' is not one of the classes 'high', 'low'"):
        add_labels(grades.folder, tmp_path / "typo.csv", tmp_path / "x.csv")
    assert len(rows) == 4
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.slow
def test_a_loop_of_labels_never_asks_for_a_row_twice(tmp_path):
    data = write_rows(tmp_path / "houses.csv", 60, 0, "price")
    run = train(tmp_path / "run", data, "price", "map", steps=5)
    original = data.read_bytes()
    pool = write_rows(tmp_path / "pool.csv", 20, 1)
    keys = []
    for round_number in (2, 3):
        chosen = choose_rows(run.folder, pool, tmp_path / f"r{round_number}.csv", 5, "entropy")
        rows = label_file(chosen.path, leave_empty=(4,))
        keys += [row["key"] for row in rows[:4]]
        added = add_labels(run.folder, chosen.path)
        assert added.path == tmp_path / f"houses-{round_number}.csv"
        assert len(read(added.path)) == 60 + 4 * (round_number - 1)
        words = shlex.split(added.command)
        assert words[:3] == ["bayou", "train", str(added.path)]
        assert words[words.index("--target") + 1] == "price"
        assert words[-1] == str(tmp_path / f"run-{round_number}")
        run = train(words[-1], added.path, "price", "map", steps=5)
    assert len(set(keys)) == 8
    assert data.read_bytes() == original
    with pytest.raises(RunError, match=r"has 12 rows without a label, fewer than n 13"):
        choose_rows(run.folder, pool, tmp_path / "last.csv", 13, "entropy")
    merged = load(str(added.path), target="price")
    assert len(merged.train[1]) + len(merged.test[1]) == 68


def test_labels_are_never_lost(prices, tmp_path):
    pool = write_rows(tmp_path / "pool.csv", 20, 1)
    out = tmp_path / "out.csv"
    choose_rows(prices.folder, pool, out, 3)
    with pytest.raises(RunError, match="already exists"):
        choose_rows(prices.folder, pool, out, 3)
    choose_rows(prices.folder, pool, out, 4, force=True)  # nothing was labeled yet
    label_file(out, leave_empty=(0, 1, 2))
    labeled = out.read_bytes()
    with pytest.raises(RunError, match="has 1 labels, which would be lost"):
        choose_rows(prices.folder, pool, out, 3, force=True)
    assert out.read_bytes() == labeled
    first = add_labels(prices.folder, out, tmp_path / "more.csv")
    with pytest.raises(RunError, match="already exists"):
        add_labels(prices.folder, out, tmp_path / "more.csv")
    with pytest.raises(RunError, match="is one of the files to read"):
        add_labels(prices.folder, out, out, force=True)
    source = prices.config.data
    with pytest.raises(RunError, match="is one of the files to read"):
        add_labels(prices.folder, out, source, force=True)
    assert any("3 rows without a target were left out" in note for note in first.notes)
    first_lines = Path(source).read_text(encoding="utf-8").splitlines()[:9]
    (tmp_path / "old.csv").write_text("\n".join(first_lines) + "\n")
    with pytest.raises(RunError, match="are in houses.csv already"):
        add_labels(prices.folder, tmp_path / "old.csv", tmp_path / "none.csv")


def test_labeled_rows_and_rows_of_the_run_are_left_out(prices, tmp_path):
    known = read(prices.config.data)[:5]
    pool = write_rows(tmp_path / "pool.csv", 10, 1, "price")
    rows = read(pool)
    for row in rows[3:]:
        row["price"] = ""
    with open(pool, "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows + [row | {"price": ""} for row in known])
    selection = choose_rows(prices.folder, pool, tmp_path / "out.csv", 7)
    assert {row["pool_row"] for row in read(selection.path)} == {str(k) for k in range(4, 11)}
    assert any("3 rows have a target already" in note for note in selection.notes)
    assert any("5 rows have the inputs of a row of the run" in note for note in selection.notes)


@pytest.mark.slow
def test_decimal_commas_stay_what_they_are(tmp_path):
    data = write_rows(tmp_path / "houses.csv", 60, 0, "price", ";")
    run = train(tmp_path / "run", data, "price", "map", steps=5)
    pool = write_rows(tmp_path / "pool.csv", 20, 1, delimiter=";")
    chosen = choose_rows(run.folder, pool, tmp_path / "out.csv", 4, "entropy")
    label_file(chosen.path, delimiter=";")
    added = add_labels(run.folder, chosen.path)
    rows = read(added.path, ";")
    assert len(rows) == 64
    assert rows[0]["a"] == read(data, ";")[0]["a"]
    plain = tmp_path / "plain.csv"
    plain.write_text('key,a,b,c,price\nnew,1,2,red,"1,234"\n')
    with pytest.raises(RunError, match="writes numbers in another way"):
        add_labels(run.folder, plain, tmp_path / "x.csv")


# --- decisions ----------------------------------------------------------------------------------


def test_a_threshold_has_the_units_of_the_file(prices, tmp_path):
    new = write_rows(tmp_path / "new.csv", 12, 2)
    write_predictions(prices.folder, new, tmp_path / "p.csv", exceeds="-2.5")
    rows = read(tmp_path / "p.csv")
    posterior, preprocessor, _ = prices.posterior()
    predictive = posterior.predict(preprocessor.transform(new), samples=3, seed=0)
    y = predictive.sample(4000, seed=0) * preprocessor.y_scale + preprocessor.y_mean
    share = (y[..., 0] > -2.5).double().mean(0)
    got = torch.tensor([float(row["p(>-2.5)"]) for row in rows], dtype=torch.float64)
    assert float((got - share).abs().max()) < 4.5 * 0.5 / 4000**0.5
    with pytest.raises(RunError, match="exceeds must be a number in the units of y, got 'dear'"):
        write_predictions(prices.folder, new, tmp_path / "q.csv", exceeds="dear")
    with pytest.raises(RunError, match="costs is a table of costs for each class"):
        write_predictions(prices.folder, new, tmp_path / "q.csv", costs=new)


def test_costs_choose_an_action_for_each_row(grades, tmp_path):
    new = write_rows(tmp_path / "new.csv", 25, 2)
    costs = tmp_path / "costs.csv"
    costs.write_text("action,low,high\nkeep,8,0\nsell,0,1\nask,0.4,0.4\n")
    write_predictions(grades.folder, new, tmp_path / "p.csv", costs=costs)
    decisions = set()
    for row in read(tmp_path / "p.csv"):
        low, high = float(row["p(low)"]), float(row["p(high)"])
        expected = {"keep": 8 * low, "sell": high, "ask": 0.4}
        assert expected[row["decision"]] == pytest.approx(min(expected.values()), abs=1e-5)
        assert float(row["expected_cost"]) == pytest.approx(min(expected.values()), abs=1e-5)
        assert float(row["value_of_information"]) == pytest.approx(
            min(expected.values()), abs=1e-5
        )  # with the class known nothing is lost
        decisions.add(row["decision"])
    assert len(decisions) > 1
    for text, message in {
        "action,low\nkeep,1\n": "no column 'high'",
        "action,low,high,middle\nkeep,1,2,3\n": "a column 'middle', which is no class",
        "action,low,high\nkeep,1,much\n": "a cost must be a number, got row 1: 'much'",
        "action,low,high\nkeep,1,2\nkeep,1,2\n": "every action needs its own name",
    }.items():
        costs.write_text(text)
        with pytest.raises(RunError, match=message):
            write_predictions(grades.folder, new, tmp_path / "q.csv", costs=costs)
    with pytest.raises(ValueError, match="classes have no order"):
        write_predictions(grades.folder, new, tmp_path / "q.csv", exceeds="low")


def test_the_commands(prices, grades, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    pool = write_rows(tmp_path / "pool.csv", 20, 1)
    result = runner.invoke(app, ["label", str(prices.folder), "--pool", str(pool), "--n", "3"])
    assert result.exit_code == 0, result.output
    assert "wrote to_label.csv" in result.output
    label_file(tmp_path / "to_label.csv")
    command = ["label", str(prices.folder), "--labeled", "to_label.csv", "--out", "more.csv"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "next: bayou train" in result.output
    assert runner.invoke(app, ["label", str(prices.folder)]).exit_code == 2
    unknown = [
        "label",
        str(prices.folder),
        "--pool",
        str(pool),
        "--score",
        "best",
        "--out",
        "z.csv",
    ]
    assert runner.invoke(app, unknown).exit_code == 2
    costs = tmp_path / "costs.csv"
    costs.write_text("action,low,high\nkeep,8,0\nsell,0,1\n")
    predict = ["predict", str(grades.folder), "--input", str(pool), "--costs", str(costs)]
    result = runner.invoke(app, predict)
    assert result.exit_code == 0, result.output
    assert "decision" in read(tmp_path / "predictions.csv")[0]


def test_reports_have_the_costs_of_decisions(prices, grades):
    page = (prices.folder / "report.html").read_text(encoding="utf-8")
    assert "Costs of decisions" in page
    assert "planning with the 90 % quantile costs" in page
    page = (grades.folder / "report.html").read_text(encoding="utf-8")
    assert "Costs of decisions" in page
    assert "% of the rows and miss" in page
