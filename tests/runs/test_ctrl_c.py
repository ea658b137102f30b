"""Ctrl-C at every stage of a run: nothing is lost, and what goes on ends as if nothing had
happened.
"""

import signal
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from bayou.app.cli.app import app
from bayou.app.cli.live import FitBoard
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Interrupted, Run
from bayou.core import progress
from bayou.core.files import read_file

QUICK = {"steps": 12, "samples": 4, "members": 2, "chains": 2}
QUICK_OPTIONS = ("--steps", "12", "--samples", "4")
pytestmark = pytest.mark.usefixtures("short_search")


def same(*runs):
    """Scores and tensors of two runs of one job are equal to the bit."""
    (first, tensors), (second, others) = (
        (run.results()[0]["metrics"], read_file(run.job_folder(run.jobs[0]) / "posterior.bayou")[0])
        for run in runs
    )
    assert first == second
    assert tensors.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())


@pytest.mark.parametrize(
    "method",
    ["sgld", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mnf", "ensemble", "laplace"))],
)
def test_ctrl_c_at_any_stage_of_a_regression_by_name(method, tmp_path, monkeypatch):
    """The evidence, its start, the method and its start: each is interrupted once, at its second
    step.
    """
    monkeypatch.setattr(progress, "REDRAW", 0.0)
    config = Config("two-bumps", (method,), **QUICK)
    stages = []
    plain = Run.create(tmp_path / "plain", config)
    plain.work(
        show=lambda title, step, total, numbers: (
            stages.append(title) if step == min(2, total) else None
        )
    )
    run = Run.create(tmp_path / "run", config)

    def press(at, title, step, total, numbers):
        if title == at and step == min(2, total):
            signal.raise_signal(signal.SIGINT)

    for stage in stages:
        with pytest.raises(Interrupted):
            run.work(show=partial(press, stage))
    run.work()
    assert not run.failures()
    assert len(stages) >= 2
    same(plain, run)


def test_the_command_names_resume_which_continues_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "REDRAW", 0.0)
    words = ["train", "two-bumps", "--method", "sgld", *QUICK_OPTIONS, "-q", "--out"]
    assert CliRunner().invoke(app, [*words, str(tmp_path / "plain")]).exit_code == 0

    def press(self, name, event, numbers):
        if event == "judging":
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(FitBoard, "tell", press)
        result = CliRunner().invoke(app, [*words, str(tmp_path / "run")])
    assert result.exit_code == 130
    assert f"interrupted; `bayou resume {tmp_path / 'run'}` continues" in result.stderr
    assert not (tmp_path / "run" / "sgld-0" / "result.json").exists()
    assert CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "-q"]).exit_code == 0
    same(*(Run.open(tmp_path / name) for name in ("plain", "run")))
