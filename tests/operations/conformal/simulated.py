"""A forecast that is always N(x, 1), logits that are given, and checks of coverage."""

import math

import torch

import bayou
from bayou.likelihoods.predictive import Predictive

F64 = torch.float64


class Forecast:
    """Says N(0, 1) for every row, whatever x is: the noise of the truth may be another."""

    likelihood = bayou.Gaussian(1.0).bind(dtype=F64)

    def predict(self, x, samples=None, *, seed=0):
        return Predictive(self.likelihood, torch.zeros(1, len(x), 1, dtype=F64))


class Logits:
    """x are the logits of classes."""

    likelihood = bayou.Categorical().bind()

    def predict(self, x, samples=None, *, seed=0):
        return Predictive(self.likelihood, x.unsqueeze(0))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def covered(interval, y):
    low, high = interval
    return float(((low <= y) & (y <= high)).double().mean())


def contained(mask, y):
    return float(mask.gather(-1, y.unsqueeze(-1)).double().mean())


def assert_mean(values, low, high, sigmas=4.0):
    """The mean lies in [low, high] up to four standard errors of the repetitions."""
    values = torch.tensor(values, dtype=F64)
    error = float(values.std()) / math.sqrt(len(values))
    mean = float(values.mean())
    assert low - sigmas * error <= mean <= high + sigmas * error, (mean, error)
    assert error < 0.01
