"""The last layer of a trained vision transformer, random by several methods: the encoder runs once for all draws.

``where="last"`` freezes the rest: it is shared with the network, never copied, and no file has it. The network here is
made from a config and trained for a moment; one of timm or of ``from_pretrained`` works the same.

    python examples/vit.py --steps 100
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import bayou


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=3, **sizes))


def images(n: int = 96) -> dict[str, Tensor]:
    """A bright stripe in one of three places, and noise."""
    labels = torch.arange(n) % 3
    pixels = 0.3 * torch.randn(n, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for row, label in zip(pixels, labels, strict=True):
        row[:, 5 * label : 5 * label + 4] += 1.0
    return {"pixel_values": pixels, "labels": labels}


def main(steps: int = 100) -> dict[str, dict[str, float]]:
    batch, net = images(), network()
    net = bayou.fit(net, batch, bayou.MAP(steps=steps, lr=1e-3), progress=False).to_module()
    x, y = {"pixel_values": batch["pixel_values"]}, batch["labels"]
    other = {"pixel_values": torch.randn(96, 1, 16, 16, generator=torch.Generator().manual_seed(1))}
    methods: dict[str, Any] = {
        "Laplace": bayou.Laplace(start=None),
        "VI": bayou.VI(bayou.MeanField(), steps=steps),
        "SGLD": bayou.SGLD(steps=steps, draws=10, start=None),
        "SWAG": bayou.SWAG(steps=steps, start=bayou.MAP(steps=1)),
        "Ensemble": bayou.Ensemble(5, bayou.MAP(steps=steps), init="reset"),
    }
    started = time.process_time()
    with torch.no_grad():
        net(**x)
    one, found = time.process_time() - started, {}
    for name, method in methods.items():
        posterior = bayou.fit(net, batch, method, where="last", progress=False)
        p = posterior.predict(x, seed=0)
        started = time.process_time()
        away = posterior.predict(other, seed=0)
        found[name] = {
            "accuracy": bayou.metrics.accuracy(p, y),
            "forward_passes": (time.process_time() - started) / one,
            "auroc": bayou.metrics.auroc(p.entropy, away.entropy),
        }
        print(f"{name:9}", ", ".join(f"{key} {value:.2f}" for key, value in found[name].items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
