"""The search for noise and prior costs at most two fits, counted in passes of a network, and says
what it does.
"""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.modes import Modes
from bayou.network.target import Target
from bayou.select import by_name
from bayou.select.budget import (
    SEARCH_FITS,
    affordable_passes,
    shares_passes,
    shortened_start,
)
from bayou.select.ratio import NOISE_STEPS
from bayou.select.regularization_path import LOG_PROB_PASSES, PASSES
from bayou.training import loop
from bayou.training.data import as_data

ROWS = 225
STEPS = 60  # of fits by minibatches


class Recurrent(nn.Module):
    """An LSTM over the second axis of x (N, 6, 3)."""

    def __init__(self):
        super().__init__()
        self.body = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        states, _ = self.body(x)
        return self.head(states[:, -1])


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def convolutional():
    pooled = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), pooled, nn.Flatten(), nn.Linear(12, 3))


def two_outputs():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def numbers(*shape):
    """Inputs (ROWS, *shape), and one number y for each that depends on them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, *shape, generator=generator)
    y = x.flatten(1)[:, :2].sum(1, keepdim=True) + 0.3 * torch.randn(ROWS, 1, generator=generator)
    return x, y


def classes(*shape):
    """The same with three classes."""
    x, y = numbers(*shape)
    return x, (y[:, 0] > -0.5).long() + (y[:, 0] > 0.8).long()


class Counter:
    """Counts what a fit does: passes over all rows of every search by L-BFGS, and steps of every
    run by minibatches.
    """

    def __init__(self, monkeypatch):
        self.searches = []
        self.runs = []
        self.titles = []
        self.titles_at_first_pass = None
        plain_modes = Modes.__init__
        plain_step = loop.TrainingRun.step

        def made(modes, *args):
            self.note_pass()
            self.searches.append(modes)
            plain_modes(modes, *args)

        def step(run, x, y):
            self.note_pass()
            if run.state.step == 0:
                self.runs.append(0)
            self.runs[-1] += 1
            plain_step(run, x, y)

        monkeypatch.setattr(Modes, "__init__", made)
        monkeypatch.setattr(loop.TrainingRun, "step", step)

    def note_pass(self):
        if self.titles_at_first_pass is None:
            self.titles_at_first_pass = len(self.titles)

    def show(self, title, step, total, fields):
        self.titles.append(title)

    def passes(self):
        """Passes over all rows, of one network, of every batch of modes."""
        return [modes.passes for modes in self.searches]


def test_the_search_of_an_expensive_network_on_classes_costs_at_most_two_fits(monkeypatch):
    counter = Counter(monkeypatch)
    method = by_name("laplace", effort=0.5)
    posterior = bayou.fit(convolutional(), classes(1, 6, 6), method, progress=counter.show)
    search, fit = counter.passes()
    assert fit <= LOG_PROB_PASSES / 2
    assert search <= SEARCH_FITS * LOG_PROB_PASSES / 2
    scales = [trial["scale"] for trial in posterior.selection[0]["trials"]]
    assert scales == pytest.approx([1 / 3, 1.0, 3.0])
    assert counter.titles_at_first_pass == 1  # the first line is there before the first pass
    assert "choosing the prior" in counter.titles[0]


def test_the_search_of_an_expensive_network_on_numbers_costs_at_most_two_fits(monkeypatch):
    counter = Counter(monkeypatch)
    method = by_name("laplace", effort=0.25)
    bayou.fit(Recurrent(), numbers(6, 3), method, progress=counter.show)
    # the mode of all rows, at the end of its path, which is part of the search
    fit = len(NOISE_STEPS) * PASSES / 4
    assert sum(counter.passes()) <= SEARCH_FITS * fit
    assert counter.titles_at_first_pass == 1
    assert "choosing noise and prior" in counter.titles[0]


@pytest.mark.parametrize("method", ["laplace", "dropout"])
def test_the_search_with_batch_norm_costs_at_most_two_fits(method, monkeypatch):
    net = with_batch_norm()
    if method == "dropout":
        net = bayou.select.with_dropout(net)
    counter = Counter(monkeypatch)
    bayou.fit(net, numbers(4), by_name(method, steps=STEPS), progress=counter.show)
    *search, fit = counter.runs
    assert fit == STEPS
    assert sum(search) <= SEARCH_FITS * STEPS
    assert len(search) == 3  # two folds, and the check of the method
    assert not counter.searches


def test_the_search_with_a_heteroscedastic_head_costs_at_most_two_fits(monkeypatch):
    """MNF starts at the mode that L-BFGS found. Besides, it and a mode of minibatches are fitted to
    four fifths of the rows, which decide on the mixture of both.
    """
    counter = Counter(monkeypatch)
    method = by_name("mnf", steps=STEPS)
    likelihood = bayou.HeteroscedasticGaussian()
    bayou.fit(two_outputs(), numbers(4), method, likelihood=likelihood, progress=counter.show)
    search, mode = counter.passes()
    assert mode <= LOG_PROB_PASSES
    assert search <= SEARCH_FITS * LOG_PROB_PASSES
    assert counter.runs == [STEPS] * 3
    assert counter.titles_at_first_pass == 1


def share(net, data, likelihood=None):
    likelihood = likelihood or bayou.Categorical()
    target = Target.build(net, likelihood, bayou.Normal("fan_in"), len(data[1]))
    return shares_passes(target, as_data(data))


def test_only_modes_of_small_linear_layers_share_passes():
    small = nn.Sequential(nn.Linear(4, 50), nn.SiLU(), nn.Linear(50, 3))
    assert share(small, classes(4))
    wide = nn.Sequential(nn.Linear(4, 40_000), nn.SiLU(), nn.Linear(40_000, 3))
    assert not share(wide, classes(4))
    assert not share(convolutional(), classes(1, 6, 6))
    assert not share(two_outputs(), numbers(4), bayou.HeteroscedasticGaussian())


def test_what_a_search_can_afford():
    assert affordable_passes(120, 3) == 80
    assert affordable_passes(1, 30) == 1
    rows = as_data(numbers(4))
    start = bayou.MAP()
    assert shortened_start(start, rows, 3).steps == math.floor(2 * start.total_steps(rows) / 3)
    assert shortened_start(start, rows, 1).steps == start.total_steps(
        rows
    )  # never more than the fit
    assert shortened_start(bayou.MAP(epochs=30), rows, 3).steps == 2 * 30 * rows.batches // 3
