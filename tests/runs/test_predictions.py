"""The file of predictions is written in batches: in constant memory, whole or not at all."""

import csv
import signal
import subprocess
import sys
import tracemalloc

import pytest
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.runs import predictions
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run

ROWS = 500  # of a batch
NAMES = ("whole", "batches")


def write(path, batches):
    """Return the peak of the memory of Python while tables are written."""
    cells = [f"{index / 7:.8g}" for index in range(ROWS)]
    tracemalloc.start()
    predictions._write_csv(path, ({"row": cells, "mean": list(cells)} for _ in range(batches)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_the_memory_of_writing_does_not_grow_with_the_rows(tmp_path):
    short_peak = write(tmp_path / "short.csv", 5)
    assert write(tmp_path / "long.csv", 200) < 1.3 * short_peak
    lines = (tmp_path / "long.csv").read_text().splitlines()
    assert lines[0] == "row,mean"
    assert len(lines) == 200 * ROWS + 1


@pytest.fixture
def run(tmp_path):
    lines = [f"k{i},{i / 10},{i / 5 + i % 3}" for i in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["key,a,y", *lines]) + "\n")
    config = Config(
        str(tmp_path / "table.csv"), ("map",), target="y", steps=5, samples=2, id="key", gain=1.0
    )
    folder = Run.create(tmp_path / "run", config)
    folder.work()
    return folder


def test_batches_change_no_prediction(run, tmp_path, monkeypatch):
    """Numbers, ids and distances belong to their rows, whatever the size of a batch."""
    source = tmp_path / "table.csv"
    predictions.write_predictions(run.folder, source, tmp_path / "whole.csv")
    monkeypatch.setattr(predictions, "ROWS_PER_BATCH", 7)
    predictions.write_predictions(run.folder, source, tmp_path / "batches.csv")
    whole, batches = (
        list(csv.reader((tmp_path / f"{name}.csv").read_text().splitlines())) for name in NAMES
    )
    assert whole[0] == batches[0]
    assert [row[:2] for row in batches[1:]] == [[str(i + 1), f"k{i}"] for i in range(40)]
    numbers = [[float(cell) for row in rows[1:] for cell in row[2:]] for rows in (whole, batches)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_an_error_in_a_later_batch_leaves_the_old_file(run, tmp_path, monkeypatch):
    source, out = tmp_path / "table.csv", tmp_path / "out.csv"
    out.write_text("of the user")
    monkeypatch.setattr(predictions, "ROWS_PER_BATCH", 7)
    format_numbers = predictions._format_numbers
    calls = []

    def fail_later(values):
        calls.append(len(values))
        if len(calls) > 20:
            raise RuntimeError("no more")
        return format_numbers(values)

    monkeypatch.setattr(predictions, "_format_numbers", fail_later)
    with pytest.raises(RuntimeError, match="no more"):
        predictions.write_predictions(run.folder, source, out, force=True)
    assert out.read_text() == "of the user"
    assert not list(tmp_path.glob(".*.part"))


def test_notes_name_rows_of_the_file_whatever_the_batches(run, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "ROWS_PER_BATCH", 7)
    lines = (tmp_path / "table.csv").read_text().splitlines()
    for row in (12, 25, 31):
        lines[row] = f"k{row - 1},oops{row},0"
    lines[33] = "k32,99,0"
    source = tmp_path / "new.csv"
    source.write_text("\n".join(lines) + "\n")
    notes = predictions.write_predictions(run.folder, source, tmp_path / "out.csv")
    assert any("3 cells are not numbers (row 12: 'oops12')" in note for note in notes)
    assert any("1 of 40 rows lie more than a standard deviation" in note for note in notes)
    source.write_text("\n".join([*lines, "k40,1,2,3"]) + "\n")
    with pytest.raises(ValueError, match="row 41 of new.csv has 4 cells"):
        predictions.write_predictions(run.folder, source, tmp_path / "other.csv")
    assert not (tmp_path / "other.csv").exists()


def test_ctrl_c_leaves_no_file_and_the_old_one_unchanged(run, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "ROWS_PER_BATCH", 7)
    format_numbers = predictions._format_numbers
    calls = []

    def press_later(values):
        calls.append(len(values))
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        return format_numbers(values)

    monkeypatch.setattr(predictions, "_format_numbers", press_later)
    out = tmp_path / "folder" / "out.csv"
    command = ["predict", str(run.folder), "--input", str(tmp_path / "table.csv")]
    result = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert result.exit_code == 130
    assert "interrupted; nothing was written to" in result.output
    assert not out.parent.exists()
    calls.clear()
    old = tmp_path / "old.csv"
    old.write_text("of the user")
    assert CliRunner().invoke(app, [*command, "--out", str(old), "--force"]).exit_code == 130
    assert old.read_text() == "of the user"
    assert not list(tmp_path.glob(".*.part"))


def test_a_long_file_has_a_progress_line_with_the_time_left(run, tmp_path, monkeypatch):
    steps = []

    def show(title, step, total, numbers):
        steps.append((title, step, total, numbers["seconds_left"]))

    source, out = tmp_path / "table.csv", tmp_path / "out.csv"
    predictions.write_predictions(run.folder, source, out, progress=show)
    assert not steps  # a single batch
    monkeypatch.setattr(predictions, "ROWS_PER_BATCH", 7)
    monkeypatch.setattr("bayou.core.progress.REDRAW", 0.0)
    predictions.write_predictions(run.folder, source, out, progress=show, force=True)
    assert [step[:3] for step in steps] == [("predicting", min(7 * i, 40), 40) for i in range(1, 7)]
    assert steps[0][3] > 0
    assert steps[-1][3] == 0


# On Linux ru_maxrss is at least that of the process that started this one; VmHWM is not.
MEASURE = """
import resource, sys
from pathlib import Path
from bayou.app.runs.predictions import write_predictions
write_predictions(*sys.argv[1:4], samples=2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
status = Path("/proc/self/status")
if status.exists():
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    peak = int(line.split()[1]) / 1e3
print(peak)
"""


def peak_megabytes(run, source, out):
    """Return the largest resident memory of a process that predicts a file."""
    command = [sys.executable, "-c", MEASURE, str(run.folder), str(source), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="resource is a module of Unix")
@pytest.mark.parametrize("suffix", ["csv", pytest.param("parquet", marks=pytest.mark.peers)])
def test_the_memory_of_predicting_does_not_grow_with_the_rows(run, tmp_path, suffix):
    """The table of 200,000 rows more needs 80 MB where it is read as a whole; here, 15 at most."""
    peaks = []
    for count in (10_000, 210_000):
        source = tmp_path / f"{count}.csv"
        lines = (f"k{i},{i % 40 / 10},{i % 7}" for i in range(count))
        source.write_text("\n".join(["key,a,y", *lines]) + "\n")
        if suffix == "parquet":
            import pyarrow.csv
            import pyarrow.parquet

            table = pyarrow.csv.read_csv(source)
            source = source.with_suffix(".parquet")
            pyarrow.parquet.write_table(table, source, row_group_size=20_000)
        out = tmp_path / f"{count}-out.csv"
        peaks.append(peak_megabytes(run, source, out))
        with out.open() as stream:
            assert sum(1 for _ in stream) == count + 1
    assert peaks[1] - peaks[0] < 15, peaks
