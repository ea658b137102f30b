"""`bayou watch` on the command line, rows kept by runs, pages, streams and metrics of the service."""

import csv
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.service import Service
from bayou.app.runs.service_metrics import ServiceMetrics
from bayou.app.runs.watching import WatchedRun
from bayou.data import load
from bayou.data.reading import read
from bayou.data.watched import new_columns, reference_of, training_columns

EFFECTS = {"A": 0.0, "B": 20.0, "C": -10.0, "Z": 0.0}


def write_houses(path, count, seed, *, shift=0.0, scale=1.0, noise=1.0, levels="ABC", drop=()):
    generator = np.random.default_rng(seed)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        names = ["day", "area", "city", "age", "price"]
        writer.writerow([name for name in names if name not in drop])
        for i in range(count):
            area = generator.normal(100 + 20 * shift, 20)
            city = generator.choice(list(levels))
            age = "" if generator.uniform() < 0.1 else round(generator.exponential(20), 3)
            price = 2 * area + EFFECTS[city] + 10 * noise * generator.normal()
            cells = {
                "day": f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}",
                "area": round(area * scale, 4),
                "city": city,
                "age": age,
                "price": round(price, 4),
            }
            writer.writerow([cells[name] for name in names if name not in drop])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on a table of 500 rows."""
    place = tmp_path_factory.mktemp("watch")
    write_houses(place / "houses.csv", 500, 0)
    config = Config(str(place / "houses.csv"), ("map",), target="price", steps=200)
    run = Run.create(place / "run", config)
    run.work()
    return run.folder


def command(*arguments):
    result = CliRunner().invoke(app, ["watch", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, 0, "as expected (200 rows)"),
        ({"shift": 1.0}, 1, "inputs have shifted"),
        ({"noise": 4.0}, 1, "the relation has changed"),
        ({"levels": "ABCZ"}, 1, "category of no training row ('Z')"),
        ({"scale": 0.01}, 1, "about 100 times smaller than in training"),
        ({"drop": ("age",)}, 1, "Column 'age' is missing."),
        ({"drop": ("price",)}, 0, "cannot be tested without targets"),
    ],
)
def test_the_command_says_what_has_shifted(folder, tmp_path, changes, code, words):
    new = write_houses(tmp_path / "new.csv", 200, 3, **changes)
    exit_code, output = command(folder, "--input", new)
    assert exit_code == code, output
    assert words in output
    assert "next: bayou" in output


def test_targets_in_another_unit_are_named_and_not_to_be_learned(folder, tmp_path):
    path = write_houses(tmp_path / "new.csv", 60, 3)
    header, *rows = csv.reader(path.read_text().splitlines())
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([header, *([*r, float(y) / 1000] for *r, y in rows)])
    exit_code, output = command(folder, "--input", path)
    assert (exit_code, "relation has changed" in output) == (1, True)
    assert "Column 'price' looks as if it had another unit: its values are about 1,000" in output
    assert f"next: bayou watch {folder} --input {path}  # after correcting the targets" in output
    assert "bayou update" not in output


def test_the_next_command_updates_only_what_can_be_updated(tmp_path):
    data = write_houses(tmp_path / "houses.csv", 200, 0)
    noisy = write_houses(tmp_path / "noisy.csv", 100, 3, noise=4.0)
    config = Config(str(data), ("laplace-last", "map"), target="price", effort=0.1)
    run = Run.create(tmp_path / "run", config)
    run.work()
    for method, is_updatable in (("laplace-last", True), ("map", False)):
        _, output = command(run.folder, "--input", noisy, "--method", method)
        assert "the relation has changed" in output
        assert (f"next: bayou update {run.folder} --input {noisy}" in output) == is_updatable
        assert f"--out {run.folder}-new" in output


def test_few_held_out_rows_are_not_called_a_comparison(tmp_path):
    data = write_houses(tmp_path / "houses.csv", 100, 0)
    run = Run.create(tmp_path / "run", Config(str(data), ("map",), target="price", steps=200))
    run.work()
    _, output = command(run.folder, "--input", write_houses(tmp_path / "new.csv", 60, 3))
    assert "fewer than 50 held-out rows" in output
    assert output.count("coverage of 90% intervals") == 1
    assert "Targets, against the predictions alone (p adjusted for 4 tests)" in output
    assert "held-out rows of similar inputs" not in output


def test_few_rows_have_an_exit_code_of_their_own(folder, tmp_path):
    exit_code, output = command(folder, "--input", write_houses(tmp_path / "n.csv", 12, 3))
    assert exit_code == 3
    assert "cannot tell (12 rows)" in output


def test_text_in_a_column_of_numbers_is_named(folder, tmp_path):
    path = write_houses(tmp_path / "new.csv", 60, 3)
    rows = list(csv.reader(path.read_text().splitlines()))
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([rows[0], *([d, "large", *r] for d, _, *r in rows[1:])])
    _, output = command(folder, "--input", path)
    assert "Column 'area' has text where training has numbers: 60 of 60 cells" in output


def test_json_has_every_test_and_a_page_is_written(folder, tmp_path):
    new = write_houses(tmp_path / "new.csv", 200, 3, noise=4.0)
    exit_code, output = command(folder, "--input", new, "--json", "--time", "day")
    result = json.loads(output)
    assert (exit_code, result["verdict"]) == (1, "the relation has changed")
    assert "trend of location of y" in [test["subject"] for test in result["tests"]]
    page = tmp_path / "watch.html"
    command(folder, "--input", new, "--out", page)
    text = page.read_text()
    assert "The relation has changed." in text
    assert text.count("<figure>") >= 3
    assert "P(Y ≤ y)" in text
    assert command(folder, "--input", new, "--out", page)[0] == 2  # exists


def test_a_stream_adds_up_its_evidence(folder, tmp_path):
    state = tmp_path / "state.bayou"
    clean = write_houses(tmp_path / "clean.csv", 80, 4)
    noisy = write_houses(tmp_path / "noisy.csv", 100, 5, noise=4.0)
    code, output = command(folder, "--input", clean, "--state", state)
    assert (code, output.split()[5]) == (0, "80")
    code, output = command(folder, "--input", noisy, "--state", state, "--every", "50", "--json")
    looks = json.loads(output)
    assert [look["rows"] for look in looks] == ["130", "180"]
    assert (code, looks[-1]["verdict"], looks[-1]["of"]) == (
        1,
        "the relation has changed",
        "spread",
    )
    code, output = command(folder, "--input", clean, "--state", state, "--alpha", "0.2")
    assert code == 2
    assert "started with alpha 0.01" in output


def test_a_run_keeps_rows_or_reads_the_file_again(folder, tmp_path):
    watched = WatchedRun.open(folder)
    assert len(watched.reference.x) == 400
    assert [column.name for column in watched.reference.columns] == ["area", "city", "age"]
    config = Config(
        str(write_houses(tmp_path / "houses.csv", 120, 0)),
        ("map",),
        target="price",
        steps=5,
        keep_rows=0,
    )
    run = Run.create(tmp_path / "run", config)
    run.work()
    assert run.saved_reference() is None
    assert run.reference().rows == 96
    (tmp_path / "houses.csv").unlink()
    with pytest.raises(RunError, match="--keep-rows 2000"):
        run.reference()


def test_columns_of_training_rows_and_of_the_file_are_the_same(tmp_path):
    path = write_houses(tmp_path / "houses.csv", 60, 0)
    data = load(path, target="price", test_fraction=0.2)
    reference = reference_of(data, 1000)
    columns, mistakes = new_columns(data.preprocessor.columns, read(path))
    assert mistakes == []
    for known, new in zip(reference.columns, columns, strict=True):
        assert known.name == new.name
        present = new.present
        assert set(known.present.tolist()) <= set(present.tolist())
        assert known.levels == new.levels
    # Dates are no columns, and their inputs are not compared.
    names = [data.feature_names[j] for j in reference.compared]
    assert names == ["area", "city=A", "city=B", "city=C", "age", "age is missing"]


def test_the_service_has_metrics(folder, tmp_path):
    service = Service.of(folder)
    metrics = ServiceMetrics(service)
    assert "bayou_rows_total 0" in metrics.render()
    rows = [{"day": "2024-03-01", "area": 150 + i % 7, "city": "A", "age": 10} for i in range(150)]
    query = service.read(json.dumps({"rows": rows}).encode())
    metrics.record(200, 0.02, query.inputs.x)
    metrics.record(422, 0.0)
    lines = metrics.render().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["bayou_rows_total"] == "150"
    assert values['bayou_requests_total{status="422"}'] == "1"
    assert values['bayou_request_seconds_bucket{le="0.01"}'] == "0"
    assert values['bayou_request_seconds_bucket{le="+Inf"}'] == "1"
    assert values["bayou_watch_shifted"] == "1"
    assert float(values['bayou_input_shift{input="area"}']) > 2
    p = values['bayou_watch_p_value{family="columns",subject="area",test="Kolmogorov-Smirnov"}']
    assert float(p) < 1e-6
    assert len(lines) == len(set(lines))


def test_images_are_watched(tmp_path):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 260)
    images = generator.integers(0, 80, (260, 6, 6)) + 100 * labels[:, None, None]
    np.savez(tmp_path / "train.npz", x=images[:200].astype(np.uint8), y=labels[:200])
    np.savez(tmp_path / "new.npz", x=images[200:].astype(np.uint8), y=labels[200:])
    np.savez(tmp_path / "dark.npz", x=(images[200:] // 4).astype(np.uint8))
    run = Run.create(tmp_path / "run", Config(str(tmp_path / "train.npz"), ("map",), steps=30))
    run.work()
    watched = WatchedRun.open(run.folder)
    assert watched.compare(watched.read(tmp_path / "new.npz")).inputs == "as expected"
    dark = watched.compare(watched.read(tmp_path / "dark.npz"))
    assert dark.verdict == "inputs have shifted"
    assert torch.is_tensor(watched.reference.held_x)


def test_unknown_categories_are_decoded_as_unknown(folder, tmp_path):
    # The service keeps the inputs of the network only, which are all 0 for such a category.
    watched = WatchedRun.open(folder)
    encoders = watched.preprocessor.columns
    path = write_houses(tmp_path / "new.csv", 50, 3, levels="Z")
    (city,) = [
        column
        for column in training_columns(encoders, watched.preprocessor.rows(path).x)
        if column.name == "city"
    ]
    (expected,) = [
        column for column in new_columns(encoders, read(path))[0] if column.name == "city"
    ]
    assert city.values.tolist() == expected.values.tolist() == [3.0] * 50


@pytest.mark.slow
def test_later_dates_are_no_shift(tmp_path):
    # The posterior is less certain of later dates, and nothing else has changed.
    def write(path, rows, seed, year, columns):
        generator = np.random.default_rng(seed)
        with open(path, "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(columns)
            for i in range(rows):
                area = generator.normal(100, 20)
                cells = {
                    "day": f"{year}-{1 + i % 12:02d}-{1 + i % 28:02d}",
                    "area": round(area, 4),
                    "price": round(2 * area + 10 * generator.normal(), 4),
                }
                writer.writerow([cells[name] for name in columns])
        return path

    for columns, method in ((("day", "area", "price"), "laplace"), (("day", "price"), "map")):
        name = "-".join(columns)
        data = write(tmp_path / f"{name}.csv", 400, 0, 2024, columns)
        run = Run.create(tmp_path / name, Config(str(data), (method,), target="price", steps=100))
        run.work()
        later = write(tmp_path / f"{name}-later.csv", 100, 1, 2026, columns)
        report = watch_file(run.folder, later)
        assert report.inputs == "as expected", report
        assert "epistemic uncertainty" not in {test.subject for test in report.tests}
        code, output = command(run.folder, "--input", later, "--state", tmp_path / f"{name}.state")
        assert code == 0, output


def watch_file(folder, path):
    watched = WatchedRun.open(folder)
    return watched.compare(watched.read(path))
