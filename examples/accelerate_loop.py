"""A training loop of accelerate with a posterior: the loop stays as it is, the loss has KL/N, the end is a posterior.

``accelerator.accumulate`` makes one step of two batches; ``accelerate launch`` runs the same file on several devices.

    python examples/accelerate_loop.py --epochs 20
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayou


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))


def main(epochs: int = 20) -> dict[str, float]:
    torch.manual_seed(0)
    y = torch.arange(300) % 3
    x = torch.tensor([[0.0, 3.0], [-3.0, -2.0], [3.0, -2.0]])[y] + torch.randn(300, 2)
    loader = DataLoader(TensorDataset(x, y), 25, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bnn = bayou.bayesianize(network(), bayou.MNF(), prior=bayou.Normal("fan_in"), example=x[:2])
    optimizer = torch.optim.Adam(bnn.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(bnn, optimizer, loader)
    for _ in range(epochs):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                logits, kl = model(inputs)  # forward of one draw, which DistributedDataParallel wraps
                accelerator.backward(F.cross_entropy(logits, labels) + kl / len(y))
                optimizer.step()
                optimizer.zero_grad()

    posterior = accelerator.unwrap_model(model).posterior(bayou.Categorical(), len(y))
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(f"{folder}/blobs.bayou")
        posterior = bayou.load(f"{folder}/blobs.bayou", network())
    p, away = posterior.predict(x, seed=0), posterior.predict(torch.tensor([[0.0, -30.0]]), seed=0)
    found = {
        "accuracy": bayou.metrics.accuracy(p, y),
        "mutual_information": float(p.mutual_information.mean()),
        "mutual_information_away": float(away.mutual_information),
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
