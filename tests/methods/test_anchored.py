"""Anchored ensembles: members around draws of the prior, fitted to draws of the noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.inference.members import draw_anchor, draw_targets, member_seed
from bayou.inference.modes import Modes
from bayou.network.target import Target

F64 = torch.float64
NOISE = 0.4
PRIOR = 0.8


def linear(rows: int = 12) -> tuple[Target, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    y = x[:, :1] + NOISE * torch.randn(rows, 1, generator=generator, dtype=F64)
    torch.manual_seed(0)
    net = nn.Linear(3, 1, bias=False, dtype=F64)
    return Target.build(net, bayou.Gaussian(NOISE), bayou.Normal(PRIOR), rows), (x, y)


def test_members_of_a_linear_model_are_draws_of_its_posterior() -> None:
    count = 4000
    target, (x, y) = linear()
    randomized = bayou.Ensemble(count, anchored=True).randomize(target, y, 0)
    assert randomized is not None
    masks = torch.ones(count, len(y), dtype=torch.bool)
    modes = Modes(target, (x, y), masks, [{}] * count, 1e-12, None, *randomized)
    weights = modes.run(200)["weight"].squeeze(1)
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(3, dtype=F64) / PRIOR**2)
    mean = (covariance @ x.T @ y / NOISE**2).squeeze(1)
    std = covariance.diagonal().sqrt()
    errors = 5 / math.sqrt(count)  # five standard errors of a standardized mean
    assert float(((weights.mean(0) - mean) / std).abs().max()) < errors
    ratio = weights.T.cov() / torch.outer(std, std) - covariance / torch.outer(std, std)
    assert float(ratio.abs().max()) < math.sqrt(2) * errors


def test_the_mean_of_few_members_is_that_of_the_posterior() -> None:
    count = 3
    target, (x, y) = linear()
    randomized = bayou.Ensemble(count, anchored=0.5).randomize(target, y, 0)
    assert randomized is not None
    masks = torch.ones(count, len(y), dtype=torch.bool)
    weights = (
        Modes(target, (x, y), masks, [{}] * count, 1e-14, None, *randomized)
        .run(300)["weight"]
        .squeeze(1)
    )
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(3, dtype=F64) / PRIOR**2)
    mean = (covariance @ x.T @ y / NOISE**2).squeeze(1)
    assert torch.allclose(weights.mean(0), mean, atol=1e-4)
    assert float((weights - mean).abs().max()) > 0.01


@pytest.mark.slow
def test_an_ensemble_by_name_is_unsure_outside_the_data() -> None:
    """The curve of the README: 40 points between −2 and 1.5, and the function at 4."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(20, 1, generator=generator, dtype=F64) - 2
    right = torch.rand(20, 1, generator=generator, dtype=F64) + 0.5
    x = torch.cat([left, right])
    y = torch.sin(2 * x) + 0.05 * torch.randn(40, 1, generator=generator, dtype=F64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    posterior = bayou.fit(net, (x, y), "ensemble", progress=False)
    predictive = posterior.predict(torch.tensor([[4.0], [1.0]], dtype=F64))
    far, near = predictive.epistemic_std.flatten().tolist()
    assert far > 1.0
    assert near < 0.1
    assert abs(float(predictive.mean[0]) - math.sin(8.0)) < 3 * far


def test_a_member_is_the_mode_around_its_anchor() -> None:
    target, (x, y) = linear()
    method = bayou.Ensemble(2, of=bayou.MAP(steps=400, lr=0.05), init="keep", anchored=True)
    posterior = method.fit(target, (x, y), seed=3, progress=False)
    weights = posterior.sample(2, seed=0)["weight"]
    precision = x.T @ x / NOISE**2 + torch.eye(3, dtype=F64) / PRIOR**2
    expected = []
    for member in range(2):
        seed = member_seed(3, member)
        anchor = draw_anchor(target, seed)["weight"].T / PRIOR**2
        expected.append(
            torch.linalg.solve(precision, x.T @ draw_targets(target, y, seed) / NOISE**2 + anchor).T
        )
    distance = torch.cdist(weights.flatten(1), torch.stack(expected).flatten(1)).amin(0)
    assert float(distance.max()) < 1e-2
    assert float((expected[0] - expected[1]).norm()) > 0.05
    assert (
        float(posterior.target.priors["weight"].mean.abs().max()) == 0.0
    )  # that of the posterior is not moved


def test_classes_have_anchors_and_keep_their_labels() -> None:
    target = Target.build(nn.Linear(2, 2), bayou.Categorical(), bayou.Normal(1.0), 6)
    labels = torch.arange(6) % 2
    randomized = bayou.Ensemble(2, anchored=True).randomize(target, labels, 0)
    assert randomized is not None
    anchors, targets = randomized
    assert torch.equal(targets, torch.stack([labels, labels]))
    assert not torch.equal(anchors["weight"][0], anchors["weight"][1])
    assert bayou.Ensemble(2).randomize(target, labels, 0) is None


def test_what_cannot_be_anchored_is_named() -> None:
    target, (x, y) = linear()
    with pytest.raises(ValueError, match=r"anchored=True is for MAP\(\)"):
        bayou.Ensemble(2, of=bayou.MLE(), anchored=True)
    with pytest.raises(ValueError, match="anchored must be True, False or between 0 and 1"):
        bayou.Ensemble(2, anchored=1.5)
    method = bayou.Ensemble(2, of=bayou.MAP(steps=2), init="keep", anchored=True)
    learned = Target.build(
        target.net, bayou.Gaussian(NOISE, learn=True), bayou.Normal(PRIOR), len(y)
    )
    with pytest.raises(ValueError, match="whose size must be known"):
        method.fit(learned, (x, y), progress=False)
    with pytest.raises(ValueError, match=r"needs tensors \(x, y\)"):
        method.fit(target, DataLoader(TensorDataset(x, y), 4), progress=False)
