"""Ask: which rows to label next.

A pool of digits without labels, and a person who will label ten at a time. BatchBALD asks for rows whose labels would
say most about the weights, together: two that are alike are not both asked for (Kirsch 2019). Random rows are what it
must beat. The network has dropout, whose masks are the posterior (Gal 2017), and is fitted anew in every round.

    python examples/acquire.py --plot acquire.png
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import bayou
from bayou import rng
from bayou.data import load


def main(steps: int = 300, last: int = 120, plot: str | None = None) -> dict[str, list[float]]:
    data = load("digits")
    x, y = data.train[0].flatten(1), data.train[1]
    x_test, y_test = data.test[0].flatten(1), data.test[1]
    method = bayou.MCDropout(bayou.MAP(steps=steps, lr=3e-3))
    found: dict[str, list[float]] = {}
    for how in ("random", "batchbald"):
        known = torch.zeros(len(y), dtype=torch.bool)
        known[rng.permutation(len(y), 0)[:20]] = True
        curve = []
        while True:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
            posterior = bayou.fit(net, (x[known], y[known]), method=method, prior=bayou.Normal(1.0), progress=False)
            said = posterior.predict(x_test, 32, seed=0).mean.argmax(-1)
            curve.append(float((said == y_test).float().mean()))
            if known.sum() >= last:
                break
            pool = (~known).nonzero().flatten()
            asked = bayou.acquire(posterior, x[pool], 10, how, samples=32, seed=int(known.sum()))
            known[pool[asked.indices]] = True  # and here a person says what they are
        found[how] = curve
        print(f"{how:10s} {curve[0]:.1%} with 20 labels, {curve[-1]:.1%} with {int(known.sum())}")
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6, 3), layout="compressed")
        axis = figure.subplots()
        for how, curve in found.items():
            axis.plot([20 + 10 * k for k in range(len(curve))], [100 * value for value in curve], label=how, marker=".")
        axis.set(xlabel="labels", ylabel="test accuracy, %")
        axis.legend(frameon=False)
        figure.savefig(plot, dpi=130)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--last", type=int, default=120)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, options.last, plot=options.plot)
