"""A trained network made Bayesian afterwards, without training it again.

Two ways that need only the weights and the training data, each with ``start=None``, "the network as it is":

* Laplace of the last layer: a Gaussian around the trained weights, with the inverse curvature of the loss as its
  covariance. The network came without a prior: of a few widths, rows that it never saw pick one. (Rows that it was
  trained on would pick the narrowest: it knows them already.)
* MC dropout: the dropout that the network was trained with stays on when it predicts.

    python examples/pretrained.py --plot pretrained.png
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.data import load


def pretrained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Stands for a network from elsewhere: trained by a plain loop that knows nothing of bayou."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    return net.eval()


def main(steps: int = 600, samples: int = 50, plot: str | None = None) -> dict[str, dict[str, float]]:
    data = load("digits")
    x, y = data.test
    unseen = torch.arange(len(data.train[1])) % 5 == 0
    seen, held = (tuple(part[rows] for part in data.train) for rows in (~unseen, unseen))
    net = pretrained(*seen, steps)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    plain = bayou.Predictive(bayou.Categorical().bind(), net(x).detach().unsqueeze(0))
    away = bayou.Predictive(bayou.Categorical().bind(), net(data.ood).detach().unsqueeze(0))
    found: dict[str, Any] = {"as it was": (plain, away, 0.0)}
    laplace = bayou.Laplace(start=None, where="last", structure="full")
    tried = {}
    for std in (0.01, 0.03, 0.1, 0.3, 1.0):
        posterior = bayou.fit(net, seen, method=laplace, prior=bayou.Normal(std), progress=False)
        tried[std] = metrics.nll(posterior.predict(held[0], samples, seed=0), held[1])
    best = min(tried, key=lambda std: tried[std])
    methods: dict[str, Any] = {
        f"Laplace, N(0, {best}²)": laplace,
        "MC dropout": bayou.MCDropout(start=None),
    }
    for name, method in methods.items():
        start = time.perf_counter()
        posterior = bayou.fit(net, seen, method=method, prior=bayou.Normal(best), progress=False)
        seconds = time.perf_counter() - start
        found[name] = (*(posterior.predict(part, samples, seed=0) for part in (x, data.ood)), seconds)

    print(f"{data!r}\n\n{'network':<20} {'error':>7} {'NLL':>7} {'ECE':>7} {'AUROC':>7} {'seconds':>8}")
    rows = {}
    for name, (p, q, seconds) in found.items():
        rows[name] = row = metrics.summary(p, y, q)
        error, auroc = 1 - row["accuracy"], row["auroc_entropy"]
        print(f"{name:<20} {error:7.2%} {row['nll']:7.4f} {row['ece']:7.4f} {auroc:7.3f} {seconds:8.2f}")
    same = all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    print(f"\nUnseen rows, NLL by width of the prior: {', '.join(f'{k}: {v:.4f}' for k, v in tried.items())}.")
    print(f"AUROC: letters against digits, by entropy. The network itself {'is unchanged' if same else 'HAS CHANGED'}.")
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.4), layout="compressed")
        axis = figure.subplots()
        for name, (_, q, _) in found.items():
            axis.ecdf(q.entropy.numpy(), label=name)
        axis.set(xlabel="entropy of letters in nats", ylabel="share below")
        axis.legend(frameon=False)
        figure.savefig(plot, dpi=130)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
