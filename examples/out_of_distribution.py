"""Digits it knows, letters it has never seen: does the network notice?

A network that is trained on digits has to call every letter a digit. The entropy of an averaged prediction tells the
two apart; how well is the area under the ROC curve: the chance that a letter gets a higher entropy than a digit
(½ for a coin). Mutual information asks only whether the sampled functions disagree, so it is 0 for a single network.

    python examples/out_of_distribution.py --plot entropy.png
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.data import load


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def bar(entropy: Tensor, bins: int = 24) -> str:
    """A histogram of entropies between 0 and log 10, one character for each bin."""
    counts = torch.histc(entropy.float(), bins, 0.0, math.log(10))
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * share)] for share in (counts / counts.max()).tolist())


def main(steps: int = 1500, members: int = 5, plot: str | None = None) -> dict[str, dict[str, float]]:
    data = load("digits")
    x, y = data.test
    letters = data.ood
    methods: dict[str, Any] = {
        "MAP": bayou.MAP(steps=steps),
        "Ensemble": bayou.Ensemble(members, of=bayou.MAP(steps=steps)),
        "VI, MNF": bayou.VI(bayou.MNF(), steps=steps),
    }
    print(f"{data!r}\n")
    rows, entropies = {}, {}
    for name, method in methods.items():
        posterior = bayou.fit(network(), data.train, method=method)
        p, away = posterior.predict(x, seed=0), posterior.predict(letters, seed=0)
        rows[name] = row = {
            "error": 1 - metrics.accuracy(p, y),
            "auroc": metrics.auroc(p.entropy, away.entropy),
            "auroc_mi": metrics.auroc(p.mutual_information, away.mutual_information),
            "sure": float((away.mean.amax(-1) > 0.9).float().mean()),
        }
        entropies[name] = (p.entropy, away.entropy)
        disagree = "" if posterior.draws == 1 else f", by mutual information {row['auroc_mi']:.3f}"
        print(
            f"{name:<9} error {row['error']:.2%}, AUROC by entropy {row['auroc']:.3f}{disagree}; "
            f"{row['sure']:.0%} of the letters are some digit with over 90 %"
        )
        print(
            f"  entropy of digits  0 |{bar(p.entropy)}| log 10\n  entropy of letters 0 |{bar(away.entropy)}| log 10\n"
        )
    if plot:
        draw(entropies).savefig(plot, dpi=130)
        print(f"picture: {plot}")
    return rows


def draw(entropies: dict[str, tuple[Tensor, Tensor]]) -> Any:
    """Histograms of the entropies, a panel for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.8 * len(entropies), 3), layout="compressed")
    for axis, (name, (inside, outside)) in zip(figure.subplots(1, len(entropies)), entropies.items(), strict=True):
        for values, label, color in ((inside, "digits", "#3b5b92"), (outside, "letters", "#d9743c")):
            axis.hist(values, bins=24, range=(0, math.log(10)), density=True, alpha=0.6, label=label, color=color)
        axis.set(title=name, xlabel="entropy in nats")
    figure.axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
