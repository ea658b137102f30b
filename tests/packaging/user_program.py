"""A program as a user writes it, for type checkers (``assert_type``) and to run: the interface of
the README.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import bayou


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def quantile(predictive: bayou.Predictive, level: float) -> Tensor:
    return assert_type(predictive.quantile(level), Tensor)


x = torch.linspace(-1, 1, 20)[:, None]
y = torch.sin(2 * x)
methods: dict[str, bayou.methods.Method] = {
    "map": bayou.MAP(steps=20, lr=0.01),
    "laplace": bayou.Laplace(start=bayou.MAP(steps=20)),
    "mnf": bayou.VI(bayou.MNF(), steps=20),
}
for name, method in methods.items():
    posterior = bayou.fit(
        net(), (x, y), method=method, likelihood=bayou.Gaussian(0.1), seed=0, progress=False
    )
    assert_type(posterior, bayou.Posterior)
    p = posterior.predict(x, samples=10, seed=0)
    low, high = p.interval(0.9)
    assert_type(low, Tensor)
    assert_type(p.mean, Tensor)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.bayou"
        posterior.save(path)
        again = assert_type(bayou.load(path, net()), bayou.Posterior)
    assert torch.equal(again.predict(x, samples=10, seed=0).mean, p.mean)
    assert bool((quantile(p, 0.05) <= high).all())
assert_type(bayou.list_methods(), dict[str, str])
flow = bayou.flows.Flow(bayou.flows.StandardNormal(2), bayou.flows.spline_coupling(2))
assert_type(flow.log_prob(flow.sample(3)), Tensor)
