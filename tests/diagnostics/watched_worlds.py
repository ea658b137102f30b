"""A posterior in closed form and rows whose truth is known, to simulate shifts."""

import torch

import bayou
from bayou.core import rng
from bayou.diagnostics import ReferenceRows
from bayou.likelihoods.predictive import Predictive

DRAWS = 10


class LinearPosterior:
    """w ~ N(w0, spread²), y = x·w + noise."""

    def __init__(self, weights, noise, spread=0.02):
        self.weights = weights
        self.spread = spread
        self.likelihood = bayou.Gaussian(noise).bind(dtype=torch.float64)

    def predict(self, x, samples=None, *, seed=0):
        noise = rng.normal(DRAWS, self.weights.shape, self.weights, rng.fold(seed, "weights"))
        weights = self.weights + self.spread * noise
        return Predictive(self.likelihood, (x @ weights.T).T[..., None])


class LogisticPosterior(LinearPosterior):
    """P(y = 1) = sigmoid(x·w)."""

    def __init__(self, weights):
        super().__init__(weights, 1.0)
        self.likelihood = bayou.Categorical().bind()

    def predict(self, x, samples=None, *, seed=0):
        logit = super().predict(x, samples, seed=seed).outputs
        return Predictive(self.likelihood, torch.cat((torch.zeros_like(logit), logit), -1))


class World:
    """Rows with y = x·w + misfit·(x_1² − 1) + noise, of which the posterior knows x·w."""

    def __init__(self, seed, columns=4, train=200, held_out=150, misfit=0.0, noise=0.5):
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = torch.linspace(-1, 1, columns, dtype=torch.float64)
        self.misfit = misfit
        self.noise = noise
        self.posterior = LinearPosterior(self.weights, (noise**2 + 2 * misfit**2) ** 0.5)
        x_train = self.inputs(train)
        x_held = self.inputs(held_out)
        self.reference = ReferenceRows.of(x_train, (x_held, self.targets(x_held)))

    def inputs(self, rows):
        shape = (rows, len(self.weights))
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def targets(self, x, weights=None, noise=None):
        weights = self.weights if weights is None else weights
        draws = torch.randn(len(x), generator=self.generator, dtype=torch.float64)
        curve = self.misfit * (x[:, 0].square() - 1)
        return (x @ weights + curve + (noise or self.noise) * draws)[:, None]
