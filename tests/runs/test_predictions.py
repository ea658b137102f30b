"""The file of predictions is written in batches: in constant memory, whole or not at all."""

import csv
import tracemalloc

import pytest

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
