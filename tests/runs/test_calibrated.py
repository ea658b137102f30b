"""``bayou train --calibrate``: the temperature is in the posterior of the run, and the report says what it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bayou import metrics
from bayou.runs.config import Config
from bayou.runs.folder import Run
from bayou.select.settings import ConfigError


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")
@pytest.mark.parametrize(("data", "what"), [("moons", "temperature"), ("cubic", "factor of the noise")])
def test_a_run_calibrates_by_rows_that_it_leaves_out(data: str, what: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Config(data=data, methods=("mle",), steps=300, calibrate=0.3))
    run.work()
    (result,) = run.results()
    posterior, _, job = run.posterior()
    found = result["calibration"]
    assert posterior.temperature == found["temperature"] != 1.0
    assert found["rows"] == round(0.3 * len(run.load_data().train[0]))
    assert posterior.target.n == len(run.load_data().train[0]) - found["rows"]
    assert found["after"] == pytest.approx(result["metrics"]["nll"], rel=1e-6)
    x, y = run.load_data().test
    p = posterior.predict(x, 1, seed=job.seed)
    assert metrics.nll(p, y, run.load_data().y_scale) == pytest.approx(found["after"], rel=1e-5)
    posterior.temperature = 1.0
    p = posterior.predict(x, 1, seed=job.seed)
    assert metrics.nll(p, y, run.load_data().y_scale) == pytest.approx(found["before"], rel=1e-5)
    page = (tmp_path / "run/report.html").read_text()
    assert f"a {what} of {found['temperature']:.3g}, learned from {found['rows']:,} held-out rows" in page
    assert json.loads((tmp_path / "run/config.json").read_text())["calibrate"] == 0.3
    assert "--calibrate 0.3" in run.config.command()


def test_what_cannot_be_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibrate must be a fraction from 0 to below 1, got 1"):
        Config(data="moons", calibrate=1.0)
    run = Run.create(tmp_path / "run", Config(data="moons", methods=("map",), steps=2, calibrate=1e-6))
    run.work()
    assert "leaves none on one side" in next(iter(run.failures().values()))
