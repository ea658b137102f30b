"""The Lightning module trains what bayou.fit trains, and ends in a posterior."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayou

# Warnings of the Trainer: few workers, no logger, deprecations of its parts.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def bayesian(*arguments: Any, **options: Any) -> Any:
    from bayou.adapters.lightning import BayesianModule

    return BayesianModule(*arguments, **options)


def blobs(n: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    centers = torch.tensor([[0.0, 3.0], [-3.0, -2.0], [3.0, -2.0]])
    return centers[y] + 0.5 * torch.randn(n, 2, generator=generator), y


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, outputs))


class ByKeyword(nn.Module):
    """Takes its input by keyword, and gives its logits by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.net(features)}


def trainer(**options: Any) -> Any:
    import lightning.pytorch as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**quiet, **{"enable_checkpointing": False} | options)


def test_trains_with_mappings() -> None:
    x, y = blobs()
    rows: Any = [{"features": a, "labels": b} for a, b in zip(x, y, strict=True)]
    module = bayesian(ByKeyword(), bayou.MeanField(), bayou.Categorical(), n=len(rows), lr=2e-2)
    run = trainer(max_epochs=15)
    run.fit(module, DataLoader(rows, 40, shuffle=True), DataLoader(rows, 40))
    assert run.callback_metrics["val_accuracy"] > 0.9
    assert run.predict(module, DataLoader(rows, 40))[0].mean.shape == (40, 3)


@pytest.mark.parametrize("guide", [bayou.MeanField(), bayou.MNF(), bayou.Dropout(0.1, rate="reinforce")])
def test_trains_to_a_posterior(guide: Any, tmp_path: Path) -> None:
    x, y = blobs()
    data = TensorDataset(x, y)
    module = bayesian(mlp(), guide, bayou.Categorical(), n=len(data), lr=2e-2)
    run = trainer(max_epochs=25)
    run.fit(module, DataLoader(data, 40, shuffle=True), DataLoader(data, 40))
    assert run.callback_metrics["val_nll"] < 0.5
    assert run.callback_metrics["val_accuracy"] > 0.95
    assert len(module.history) == 25
    assert module.history[-1]["elbo"] > module.history[0]["elbo"]
    posterior = module.posterior()
    p = posterior.predict(x, samples=50, seed=0)
    assert (p.mean.argmax(-1) == y).float().mean() > 0.95
    posterior.save(tmp_path / "a.bayou")
    again = bayou.load(tmp_path / "a.bayou", mlp()).predict(x, samples=50, seed=0)
    assert torch.equal(p.outputs, again.outputs)
    kept = p.outputs.clone()
    with torch.no_grad():
        next(module.bayesian.parameters()).add_(1.0)
    assert torch.equal(posterior.predict(x, samples=50, seed=0).outputs, kept), "the posterior is no copy"


def test_loss_is_the_negative_elbo_per_example() -> None:
    """−ELBO/N on the full batch of a point: the mean cross entropy, plus the KL over N."""
    x, y = blobs()
    net = mlp()
    module = bayesian(net, bayou.Delta(penalty=True), bayou.Categorical(), len(y), beta=0.5)
    module.log_dict = lambda *args, **kwargs: None  # no Trainer here
    loss = module.training_step([x, y], 0)
    nll = nn.functional.cross_entropy(net(x), y)
    log_prior = sum(torch.distributions.Normal(0.0, 1.0).log_prob(w).sum() for w in net.parameters())
    assert float(loss) == pytest.approx(float(nll - 0.5 * log_prior / len(y)), rel=1e-5)


def test_validation_is_the_nll_of_averaged_predictions() -> None:
    x, y = blobs()
    module = bayesian(mlp(), bayou.MeanField(std=0.5), bayou.Categorical(), len(y), validation_samples=5)
    seen: dict[str, float] = {}
    module.log_dict = lambda numbers, **kwargs: seen.update(numbers)
    with torch.no_grad():
        module.eval().validation_step((x, y), 0)
        p = module.predict_step([x, y], 0)
    averaged = p.outputs.softmax(-1).mean(0)[torch.arange(len(y)), y]
    assert float(seen["val_nll"]) == pytest.approx(float(-averaged.log().mean()), rel=1e-5)
    assert len(p.outputs) == 5


def test_scales_have_their_own_rate_and_noise_is_learned() -> None:
    x, _ = blobs()
    y = x.sum(1, keepdim=True) + 0.1
    module = bayesian(mlp(1), bayou.MeanField(), bayou.Gaussian(1.0, learn=True), n=len(y), lr=1e-2)
    groups = module.configure_optimizers().param_groups
    assert [group["lr"] for group in groups] == [1e-2, 1e-1]
    assert any(p is module.likelihood.log_scale for p in groups[1]["params"])
    trainer(max_epochs=60).fit(module, DataLoader(TensorDataset(x, y), 60))
    posterior = module.posterior()
    assert math.exp(float(posterior.target.likelihood.log_scale.detach())) < 0.5
    assert posterior.target.likelihood is not module.likelihood
