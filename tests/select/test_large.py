"""Regressions of more than 5,000 rows: one fit without the rows that select the noise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.select import by_name
from bayou.select.held_out import LARGE_BATCH, HeldOut, match_noise, residuals, with_large_steps
from bayou.training.data import Rows, as_data
from bayou.training.seeds import part_seed

NOISE = 0.5


def table(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, 3, dtype=torch.float64)
    return x, x @ x.new_tensor([[1.0], [-0.5], [0.0]]) + NOISE * torch.randn(rows, 1, dtype=torch.float64)


@pytest.mark.parametrize("name", ["map", "laplace", "ensemble", "ensemble of default length"])
def test_the_predictive_variance_is_the_error_on_held_out_rows(name: str) -> None:
    x, y = table(6000)
    length = {"effort": 0.03} if name.endswith("length") else {"steps": 80}
    method = by_name(name.split()[0], lr=0.05, members=2, **length)
    posterior = bayou.fit(nn.Linear(3, 1).double(), (x, y), method, seed=3, progress=False)
    assert posterior.target.n == 5000
    data = as_data((x, y))
    assert isinstance(data, Rows)
    _, held = data.split(1 / 6, part_seed(3, "folds"))
    squares, spread = (float(value.mean()) for value in residuals(posterior, held, 3))
    noise = posterior.target.likelihood.gaussian_noise
    assert noise is not None
    assert noise**2 + spread == pytest.approx(squares, rel=1e-9)
    assert abs(noise - NOISE) < 5 * NOISE / math.sqrt(2 * 1000)  # 1,000 held-out rows
    assert posterior.predict(x[:4], seed=0).aleatoric_std.square().mean().item() == pytest.approx(noise**2, rel=1e-9)
    assert match_noise(posterior, held, 3) == pytest.approx(noise, rel=1e-9)


def test_default_settings_are_those_for_many_rows_and_given_ones_are_kept() -> None:
    data = as_data(table(20_000))
    assert isinstance(data, Rows)
    method = with_large_steps(by_name("ensemble"), data)
    assert isinstance(method, HeldOut)
    assert method.start == method.method.of  # type: ignore[attr-defined]
    assert (method.start.batch_size, method.start.steps) == (LARGE_BATCH, 40 * math.ceil(20_000 / LARGE_BATCH))
    short = with_large_steps(by_name("map", effort=0.1), data)
    assert short.start.steps == method.start.steps // 10
    for name, settings in (("map", {"steps": 7}), ("ffg", {"epochs": 2}), ("mnf", {"batch_size": 32})):
        given = by_name(name, **settings)
        assert with_large_steps(given, data) == given


@pytest.mark.parametrize(("rows", "large"), [(5000, False), (5001, True)])
def test_the_default_network_grows_with_the_rows_of_a_regression(rows: int, large: bool, tmp_path: Path) -> None:
    x, y = (value.numpy() for value in table(rows))
    model = BayesRegressor("mle", steps=2, random_state=0).fit(x, y[:, 0])
    widths = [len(value) for name, value in model.posterior_.target.net.named_parameters() if name.endswith("weight")]
    assert widths == ([128, 128, 1] if large else [50, 1])
    model.save(tmp_path / "model.bayou")
    again = BayesRegressor.load(tmp_path / "model.bayou")
    assert np.array_equal(model.predict(x[:5]), again.predict(x[:5]))
    for given in ({"hidden": (7,)}, {"activation": "Tanh"}):
        own = BayesRegressor("mle", steps=1, random_state=0, **given).fit(x, y[:, 0]).posterior_.target.net
        assert next(own.parameters()).shape == (given.get("hidden", (50,))[0], 3)
    classes = BayesClassifier("mle", steps=1, random_state=0).fit(x, y[:, 0] > 0)
    assert next(classes.posterior_.target.net.parameters()).shape == (50, 3)
