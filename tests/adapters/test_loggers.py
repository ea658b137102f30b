"""Loggers: every update is on disk at once, a resumed run appends, several work at once."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayou
from bayou import progress
from bayou.adapters.loggers import JsonlLogger, TensorBoardLogger, write_history


def fit(steps: int = 30, **options: Any) -> bayou.Posterior:
    torch.manual_seed(0)
    x, y = torch.randn(40, 2), torch.arange(40) % 3
    method = options.pop("method", bayou.VI(steps=steps, log_every=5, checkpoint_every=5))
    return bayou.fit(nn.Linear(2, 3), (x, y), method=method, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW", 0.0)


def test_jsonl_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlLogger(path) as log:
        posterior = fit(progress=log)
    found = lines(path)
    assert [record["step"] for record in found] == list(range(1, 31))
    assert {(record["title"], record["total"]) for record in found} == {("VI(MeanField)", 30)}
    assert found[-1]["elbo"] == posterior.history[-1]["elbo"]
    assert found[0]["time"] <= found[-1]["time"]


def test_lines_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    log = JsonlLogger(tmp_path / "a.jsonl")
    for step in (1, 2):
        log("run", step, 2, {"loss": 0.5})
        assert len(lines(tmp_path / "a.jsonl")) == step
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log("run", 3, 3, {})


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "run.jsonl", tmp_path / "run.bayou"

    class Killed(BaseException):
        pass

    def log_until_17(title: str, step: int, total: int, numbers: dict[str, float]) -> None:
        log(title, step, total, numbers)
        if step == 17:
            raise Killed

    with pytest.raises(Killed), JsonlLogger(path) as log:
        fit(progress=log_until_17, checkpoint=checkpoint)
    with JsonlLogger(path) as log:
        fit(progress=log, checkpoint=checkpoint)
    assert [record["step"] for record in lines(path)] == [*range(1, 18), *range(16, 31)]  # saved at step 15


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with JsonlLogger(path) as log:
        log("run", 2, 2, {})
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 2


def test_numbers_that_json_cannot_hold(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path / "a.jsonl") as log:
        log("run", 1, 1, {"loss": math.nan, "kl": math.inf, "nll": 1.5})
    (record,) = lines(tmp_path / "a.jsonl")
    assert record["loss"] is None
    assert record["kl"] is None
    assert record["nll"] == 1.5


def test_history_is_complete(tmp_path: Path) -> None:
    posterior = fit(progress=False)
    write_history(posterior, tmp_path / "h.jsonl")
    assert lines(tmp_path / "h.jsonl") == posterior.history


def test_errors_help(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        JsonlLogger(tmp_path / "no" / "a.jsonl")


def test_tensorboard_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'bayou\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of tensorboard's own imports
def test_tensorboard_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars(run: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tb" / run)).Reload()
        return [(event.step, event.value) for event in events.Scalars("elbo")]

    with TensorBoardLogger(tmp_path / "tb") as log:
        posterior = fit(progress=log)
    found = scalars("VI(MeanField)")
    assert [step for step, _ in found] == list(range(1, 31))
    assert found[-1][1] == pytest.approx(posterior.history[-1]["elbo"], rel=1e-6)
    with TensorBoardLogger(tmp_path / "tb") as log:  # the run goes on from step 20
        for step in range(20, 26):
            log("VI(MeanField)", step, 30, {"elbo": float(step)})
        for step in (1, 2):  # and a second one begins
            log("VI(MeanField)", step, 2, {"elbo": float(step)})
    assert [step for step, _ in scalars("VI(MeanField)")] == list(range(1, 26))
    assert scalars("VI(MeanField)")[-1] == (25, 25.0)
    assert [step for step, _ in scalars("VI(MeanField)-2")] == [1, 2]
