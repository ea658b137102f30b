"""A method by name that predicts held-out rows worse than its mode is mixed with the mode."""

from dataclasses import dataclass
from typing import final

import pytest
import torch
from scipy import optimize
from torch import nn

import bayou
from bayou.inference.method import Method
from bayou.likelihoods import FiniteLikelihood
from bayou.posteriors import Empirical, Mixture
from bayou.select import NamedMethod, by_name
from bayou.select.beside_mode import MAX_SHARE, MIN_FINAL_ROWS, MIN_SHARE, ModeShare
from bayou.select.full_batch import FullBatchModes
from bayou.select.judgment import Residuals

F64 = torch.float64


@final
@dataclass(frozen=True)
class Wide(Method):
    """Two functions at a distance from the mode."""

    distance: float

    def fit(self, target, data, **options):
        start = target.start()  # of a regression this is the mode
        if isinstance(target.likelihood, FiniteLikelihood):
            mode = FullBatchModes(bayou.MAP()).fit(target, data, progress=False)
            start = {name: value[0] for name, value in mode.stack.items()}
        stack = {}
        for name, value in start.items():
            signs = torch.tensor([1.0, -1.0])[: len(value)].reshape(-1, *[1] * (value.ndim - 1))
            shift = self.distance * signs
            stack[name] = torch.stack([value - shift, value + shift])
        return Empirical(target, target.network, stack)

    def at_mode(self, noise, data):
        return self


def test_a_method_that_is_no_worse_than_its_mode_stays_alone():
    losses = torch.randn(100, dtype=F64)
    assert ModeShare.of(losses, losses).weight == 1
    assert ModeShare.of(losses, losses + 0.1).weight == 1
    assert ModeShare.of(losses + 0.009, losses).weight == 1


def test_the_share_maximizes_the_density_of_the_mixture():
    """Against a scalar search, with a pull of .2 rows to equal weights; bounded below."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(100, generator=generator, dtype=F64)
    of_mode = torch.randn(100, generator=generator, dtype=F64) - 0.3

    def nll(w):
        total = (w * (-losses).exp() + (1 - w) * (-of_mode).exp()).log().sum()
        return -float(total) - 0.1 * float(torch.tensor([w, 1 - w], dtype=F64).log().sum())

    best = optimize.minimize_scalar(nll, bounds=(1e-6, 1 - 1e-6), method="bounded")
    share = ModeShare.of(losses, of_mode)
    assert share.weight == pytest.approx(best.x, abs=1e-4)
    assert share.rows == 100
    assert ModeShare.of(of_mode + 50, of_mode).weight == MIN_SHARE
    assert MAX_SHARE < 1


def test_in_a_regression_each_has_its_likeliest_noise():
    """A mode that is as good with a smaller noise is not better: only the noises differ."""
    generator = torch.Generator().manual_seed(0)
    residuals = 0.3 * torch.randn(200, 1, generator=generator, dtype=F64)
    of_mode = Residuals(residuals.square(), torch.zeros_like(residuals))
    wide = Residuals(residuals.square(), torch.full_like(residuals, 0.5))
    share = ModeShare.of_residuals(wide, of_mode)
    assert share.mode_noise == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-3)
    assert share.weight < 0.1
    assert ModeShare.of_residuals(of_mode, of_mode).weight == 1


def tables(rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    f = 2 * x[:, :1] - x[:, 1:]
    y = f + 0.3 * torch.randn(rows, 1, generator=generator)
    return x, y, (f[:, 0] + torch.randn(rows, generator=generator) > 0).long()


def fit(net, rows, distance, *, mixes=True):
    recipe = NamedMethod(Wide(distance), bayou.MAP(), mixes_with_mode=mixes)
    return bayou.fit(net, rows, recipe, progress=False)


@pytest.mark.slow
def test_a_regression_is_mixed_with_its_mode(tmp_path):
    """Functions far from the mode are worse than it; the mixture is nearly as good, says so, and is
    saved in the units of the user.
    """
    x, y, _ = tables(120)
    train = (x, 100 + 10 * y)
    x_new, y_new, _ = tables(400)
    y_new = 100 + 10 * y_new
    posterior = fit(nn.Linear(2, 1), train, 2.0)
    assert isinstance(posterior, Mixture)
    assert "a mixture of 0.0" in posterior.choice
    assert "nats worse than its mode on 24 held-out rows" in posterior.choice
    assert posterior.choice in posterior.plan
    alone = fit(nn.Linear(2, 1), train, 2.0, mixes=False)
    mode = posterior.components[1]
    nll = {
        name: -float(p.predict(x_new).log_prob(y_new).mean())
        for name, p in (("mixture", posterior), ("alone", alone), ("mode", mode))
    }
    assert nll["alone"] > nll["mode"] + 0.5
    assert nll["mixture"] < nll["mode"] + 0.02
    posterior.save(tmp_path / "mixed.bayou")
    loaded = bayou.load(tmp_path / "mixed.bayou", nn.Linear(2, 1))
    assert torch.equal(loaded.predict(x_new).outputs, posterior.predict(x_new).outputs)


def test_classes_are_mixed_with_their_mode():
    x, _, y = tables(150)
    posterior = fit(nn.Linear(2, 2), (x, y), 5.0)
    assert isinstance(posterior, Mixture)
    assert "30 held-out rows" in posterior.choice
    assert float(posterior.weights[0]) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("distance", [0.0, 1e-3])
def test_a_method_at_its_mode_stays_alone(distance):
    x, y, labels = tables(150)
    assert isinstance(fit(nn.Linear(2, 1), (x, y), distance), Empirical)
    assert isinstance(fit(nn.Linear(2, 2), (x, labels), distance), Empirical)


def test_methods_that_prune_stay_alone():
    """``bayou.compress`` takes no mixture."""
    assert not by_name("sparse").mixes_with_mode
    assert by_name("ffg").mixes_with_mode


@pytest.mark.parametrize(("distance", "kind"), [(5.0, Mixture), (1e-3, Empirical)])
def test_of_many_rows_the_compared_fit_is_the_result(distance, kind):
    """A twentieth is held out, and nothing is fitted to all rows."""
    x, _, y = tables(MIN_FINAL_ROWS)
    posterior = fit(nn.Linear(2, 2), (x, y), distance)
    assert isinstance(posterior, kind)
    assert len(posterior.held_out_index) == MIN_FINAL_ROWS // 20
    assert posterior.target.n == MIN_FINAL_ROWS - MIN_FINAL_ROWS // 20
