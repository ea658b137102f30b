"""Runs on groups and on times: what is held out, what the report says, and that they resume."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from bayou.app.runs.config import Config
from bayou.app.runs.folder import Interrupted, Run
from bayou.app.runs.predictions import write_predictions

QUICK = {"steps": 12, "samples": 4, "effort": 0.1}


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    """A file of 12 shops with ten days each."""
    random = np.random.default_rng(0)
    levels = random.normal(size=12)
    with (tmp_path / "shops.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["shop_id", "day", "visitors", "price", "sales"])
        for row in random.permutation(120):
            shop, day = divmod(int(row), 10)
            visitors, price = random.normal(size=2).round(4)
            sales = visitors + levels[shop] + 0.1 * random.normal()
            writer.writerow([f"S{shop}", f"2024-03-{day + 1:02d}", visitors, price, sales])
    return tmp_path / "shops.csv"


def config(path: Path, **options: str | int) -> Config:
    """Return the settings of a quick run on a file."""
    return Config(str(path), ("map",), target="sales", **(QUICK | options))


def test_a_run_selects_its_settings_on_whole_groups(shops: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config(shops, group="shop_id", drop=("day",)))
    (result,) = run.work()
    assert "of whole groups" in result["plan"]
    page = (run.folder / "report.html").read_text()
    assert "<h2>Test rows</h2>" in page
    assert "of 12 groups of &#39;shop_id&#39;" in page
    assert "Split at random, the RMSE of a reference model" in page
    assert "--group shop_id" in page  # the command that repeats it
    assert Config.read(run.folder / "config.json").group == "shop_id"


def test_new_rows_need_no_group(shops: Path, tmp_path: Path) -> None:
    settings = config(shops, group="shop_id", id="shop_id", drop=("day",))
    run = Run.create(tmp_path / "run", settings)
    run.work()
    new = tmp_path / "new.csv"
    new.write_text("visitors,price,shop_id\n0.1,0.2,S99\n")
    assert write_predictions(run.folder, new, tmp_path / "p.csv") == []
    with (tmp_path / "p.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["shop_id"] == "S99"
    new.write_text("visitors,price\n0.1,0.2\n")
    (note,) = write_predictions(run.folder, new, tmp_path / "q.csv")
    assert "'shop_id', the id column" in note


def test_a_run_by_time_is_resumed_with_its_rows(shops: Path, tmp_path: Path) -> None:
    settings = config(shops, split_by_time="day", drop=("shop_id", "day"), seeds=2)
    expected = Run.create(tmp_path / "plain", settings).work()
    run = Run.create(tmp_path / "run", settings)

    def interrupt(name: str, event: str, numbers: object) -> None:
        if (name, event) == ("map-1", "fitting"):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run.work(tell=interrupt)
    resumed = Run.open(run.folder)
    assert resumed.config == settings
    results = resumed.work()
    assert [result["metrics"] for result in results] == [result["metrics"] for result in expected]
    assert "on the latest" in results[0]["plan"]
    data = resumed.load_data()
    assert data.times is not None
    assert torch.equal(data.times.unique(), torch.arange(8))  # of ten days, two are test rows
    assert "the latest by &#39;day&#39;" in (run.folder / "report.html").read_text()


def test_a_random_split_of_groups_tells_what_another_would_change(
    shops: Path, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", config(shops))
    notes: list[str] = []
    run.work(note=notes.append)
    assert any("Split by group (--group shop_id)" in note for note in notes)
    assert any("Split by time (--split-by-time day)" in note for note in notes)
