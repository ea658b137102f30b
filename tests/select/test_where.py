"""Which layers are random, and which of several methods is selected, by held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.inference.method import Method
from bayou.posteriors import Empirical, Posterior
from bayou.select import by_name
from bayou.target import Target


def several_classes() -> tuple[Tensor, Tensor, nn.Module]:
    """240 rows of four classes, and a network of 1,264 weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long() + 2 * (x[:, 3] > 0).long()
    torch.manual_seed(0)
    return x, y, nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))


START = bayou.MAP(steps=100, lr=5e-3)


@pytest.mark.parametrize("name", ["ffg", "sgld", pytest.param("mnf", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning")
def test_the_last_layer_is_random_where_all_layers_predict_worse(name: str, tmp_path: Path) -> None:
    """Forty rows for 1,264 weights: over all of them a family collapses, and chains lose what the mode has learned."""
    x, y, net = several_classes()
    named: Any = by_name(name, steps=80, chains=2)
    method, prior = replace(named.method, start=START), bayou.Normal("fan_in", gain=3.0)
    posterior = bayou.fit(net, (x[:40], y[:40]), method, prior=prior, progress=False)
    assert (posterior.choice or "").startswith("last layer")
    tried = ["last layer", "last layer, without a prior of the others", "all layers", "mode"]
    if name == "sgld":
        tried.pop(1)  # its points are at the mode
    assert [trial["method"] for trial in posterior.selection[0]["trials"]] == tried
    draws = posterior.sample(4, seed=0)
    assert {name for name, value in draws.items() if bool((value.std(0) > 0).any())} == {"4.weight", "4.bias"}
    p = posterior.predict(x[40:], samples=50, seed=0)
    assert -float(p.log_prob(y[40:]).mean()) < math.log(4) - 0.3
    posterior.save(tmp_path / "p.bayou")
    again = bayou.load(tmp_path / "p.bayou", net)  # whose weights are the initial ones
    assert torch.equal(again.predict(x[40:], samples=50, seed=0).mean, p.mean)


def test_a_choice_of_layers_starts_at_the_mode_of_all_rows() -> None:
    """A family that does not move from its start."""
    x, y, net = several_classes()
    still = bayou.VI(bayou.MeanField(), steps=1, lr=1e-12, scale_lr=1e-12)
    method = bayou.select.Where(still, start=START)
    posterior = bayou.fit(net, (x[:40], y[:40]), method, progress=False)
    mode = bayou.fit(net, (x[:40], y[:40]), START, progress=False).sample(1)
    for name, value in posterior.mean().items():
        assert torch.allclose(value, mode[name][0], atol=1e-6)
    numbers = bayou.fit(net, (x[:40], x[:40, :4]), method, likelihood=bayou.Gaussian(0.3), progress=False)
    assert not numbers.choice


@final
@dataclass(frozen=True)
class Sure(Method):
    """A network whose second class has the given logits in even and in odd rows, x = ±1."""

    even: float
    odd: float

    def fit(self, target: Target, data: Any, **options: Any) -> Posterior:
        half, middle = (self.even - self.odd) / 2, (self.even + self.odd) / 2
        stack = {"weight": torch.tensor([[[0.0], [half]]]), "bias": torch.tensor([[0.0, middle]])}
        return Empirical(target, target.network, stack)


def test_the_first_method_within_the_standard_errors_is_selected() -> None:
    """Both rows have class 1; the second method is better in even rows and worse in odd ones."""
    x = torch.tensor([1.0, -1.0]).repeat(50).unsqueeze(1)
    rows = (x, torch.ones(100, dtype=torch.long))
    methods = {"equal": Sure(1.0, 1.0), "better on average": Sure(5.0, 0.8), "bad": Sure(-9.0, -9.0)}

    def choice(errors: float) -> str:
        auto = bayou.select.Auto(methods, errors=errors)
        return (bayou.fit(nn.Linear(1, 2), rows, auto, progress=False).choice or "").partition(" was")[0]

    assert choice(0.0) == "better on average"
    assert choice(1.0) == "better on average"  # by .12 ± .04 nats, with as many even as odd rows
    assert choice(100.0) == "equal"
