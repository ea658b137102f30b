"""Handwritten digits: a plain network beside Bayesian ones, and the digits that they are unsure of.

Every method starts from the same network and gives back the same kind of object, a posterior. Its prediction averages
over functions, p(y | x) = 1/S Σ_s softmax(f(x; w_s)), and can say how unsure it is: ``entropy`` is all of the doubt,
``mutual_information`` the part of it that more data would take away.

    python examples/classification.py --plot digits.png
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def main(steps: int = 1500, members: int = 5, plot: str | None = None) -> dict[str, dict[str, float]]:
    data = load("digits")
    x, y = data.test
    methods: dict[str, Any] = {
        "MAP": bayou.MAP(steps=steps),
        f"Ensemble of {members}": bayou.Ensemble(members, of=bayou.MAP(steps=steps)),
        "VI, Gaussian": bayou.VI(bayou.MeanField(), steps=steps),
        "VI, MNF": bayou.VI(bayou.MNF(), steps=steps),
    }
    print(f"{data!r}\n\n{'method':<16} {'error':>7} {'NLL':>7} {'ECE':>7} {'seconds':>8}")
    rows = {}
    for name, method in methods.items():
        start = time.perf_counter()
        posterior = bayou.fit(network(), data.train, method=method, progress=True)
        seconds = time.perf_counter() - start
        p = posterior.predict(x, seed=0)
        row = {"error": 1 - metrics.accuracy(p, y), "nll": metrics.nll(p, y), "ece": metrics.ece(p, y)}
        print(f"{name:<16} {row['error']:7.2%} {row['nll']:7.4f} {row['ece']:7.4f} {seconds:8.1f}")
        rows[name] = row

    doubt, order = p.entropy.sort(descending=True)  # of the last method
    print("\nthe digits that it is least sure of:")
    for entropy, index in zip(doubt[:5].tolist(), order[:5].tolist(), strict=True):
        best = p.mean[index].topk(2)
        says = " or ".join(f"{c} ({q:.0%})" for q, c in zip(best.values.tolist(), best.indices.tolist(), strict=True))
        print(f"  number {index:3d} is a {int(y[index])}: {says}, entropy {entropy:.2f} nats")
    half = order[len(order) // 2 :]
    kept = float((p.mean[half].argmax(-1) != y[half]).float().mean())
    print(f"of the half that it is surest of, {kept:.2%} are wrong")
    if plot:
        draw(x[order[:10]], y[order[:10]], p.mean[order[:10]]).savefig(plot, dpi=130)
        print(f"picture: {plot}")
    return rows


def draw(images: torch.Tensor, labels: torch.Tensor, probabilities: torch.Tensor) -> Any:
    """The images, and under each what the posterior says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2), layout="compressed")
    axes = figure.subplots(2, len(images), height_ratios=(1, 1))
    for column, (image, label, p) in enumerate(zip(images, labels.tolist(), probabilities, strict=True)):
        axes[0, column].imshow(image[0].numpy(), cmap="gray_r")
        axes[0, column].set_title(f"a {label}", fontsize=10)
        axes[0, column].axis("off")
        axes[1, column].bar(range(10), p.tolist(), color=["#d9743c" if c == label else "#3b5b92" for c in range(10)])
        axes[1, column].set(ylim=(0, 1), xticks=range(0, 10, 3), yticks=[])
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
