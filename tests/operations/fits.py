"""Posteriors of classes and numbers, and random numbers, that several tests of operations share."""

import torch
from torch import nn

import bayou

START = bayou.MAP(steps=60, lr=0.05)
METHODS = {
    "map": START,
    "ensemble": bayou.Ensemble(3, START),
    "laplace": bayou.Laplace(start=START),
    "mixture": bayou.Ensemble(2, bayou.VI(steps=30)),
    "dropout": bayou.MCDropout(START),
}
LIKELIHOODS = {
    "classes": bayou.Categorical(),
    "numbers": bayou.Gaussian(0.05, learn=True),
    "heteroscedastic": bayou.HeteroscedasticGaussian(),
}


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fitted(method, task, seed=0, rows=160, train=40):
    """A posterior of the first rows, all rows, and the network."""
    torch.manual_seed(seed)
    x = torch.randn(rows, 2)
    noise = torch.randn(rows, 1)
    y = x[:, :1] + 0.5 * noise
    if task == "classes":
        y = (x[:, :1] * x[:, 1:] + 0.7 * noise > 0).long()[:, 0]
    outputs = 1 if task == "numbers" else 2
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Dropout(0.1), nn.Linear(30, outputs))
    options = {"likelihood": LIKELIHOODS[task], "progress": False, "seed": 0}
    posterior = bayou.fit(net, (x[:train], y[:train]), METHODS[method], **options)
    return posterior, x, y, net
