"""Lightning trains a posterior: ``BayesianModule`` for VI, or your own LightningModule with IVON as its optimizer.

Lightning passes a closure to ``optimizer.step``, which ``IVONOptimizer`` calls at a draw of the weights: nothing else
changes in the module.

    python examples/lightning_vi.py --epochs 20
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.adapters.lightning import BayesianModule
from bayou.methods import IVONOptimizer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))


class Classifier(LightningModule):
    """A plain module, as it was before, with another optimizer."""

    def __init__(self, net: nn.Module, n: int, steps: int) -> None:
        super().__init__()
        self.net, self.n, self.steps = net, n, steps

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> IVONOptimizer:
        return IVONOptimizer(self.net.parameters(), lr=0.1, n=self.n, beta2=1 - 1 / max(2, self.steps))


def main(epochs: int = 20) -> dict[str, float]:
    torch.manual_seed(0)
    y = torch.arange(300) % 3
    x = torch.tensor([[0.0, 3.0], [-3.0, -2.0], [3.0, -2.0]])[y] + torch.randn(300, 2)
    loader = DataLoader(TensorDataset(x, y), 50, shuffle=True)

    def trainer() -> Trainer:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        return Trainer(max_epochs=epochs, accelerator="cpu", enable_progress_bar=False, **quiet)

    vi = BayesianModule(network(), bayou.MeanField(), bayou.Categorical(), n=len(y), lr=1e-2)
    trainer().fit(vi, loader, loader)

    ivon = Classifier(network(), len(y), epochs * len(loader))
    trainer().fit(ivon, loader)
    optimizer = ivon.optimizers(use_pl_optimizer=False)
    posteriors = {"VI": vi.posterior(), "IVON": optimizer.posterior(ivon.net, bayou.Categorical())}

    found = {name: bayou.metrics.accuracy(q.predict(x, seed=0), y) for name, q in posteriors.items()}
    print(", ".join(f"accuracy of {name} {value:.1%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
