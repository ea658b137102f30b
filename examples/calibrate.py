"""Calibrate: as sure as it is right, by rows that were held out.

A network trained to the end is too sure. One number, a temperature, mends most of it (Guo 2017).

    python examples/calibrate.py --plot calibrate.png
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load


def main(steps: int = 1000, plot: str | None = None) -> dict[str, float]:
    data = load("digits")
    x, y = data.train[0].flatten(1), data.train[1]
    train, held, test = (x[:200], y[:200]), (x[200:500], y[200:500]), (data.test[0].flatten(1), data.test[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    posterior = bayou.fit(net, train, method=bayou.MLE(steps=steps, lr=0.01), progress=False)

    before = posterior.predict(test[0], seed=0)
    found = bayou.calibrate(posterior, held, train=train)
    after = posterior.predict(test[0], seed=0)
    print(f"NLL of held-out rows: {found.before:.3f} as it is, {found.after:.3f} with a temperature")
    report = {
        "before": metrics.nll(before, test[1]), "after": metrics.nll(after, test[1]), "temperature": found.temperature,
    }  # fmt: skip
    print(
        f"at a temperature of {report['temperature']:.2f} the NLL of test rows goes from {report['before']:.3f} to "
        f"{report['after']:.3f}"
    )
    posterior.save("calibrated.bayou")  # with its temperature
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.6, 3.4), layout="compressed")
        axis = figure.subplots()
        for name, p in (("before", before), ("after", after)):
            sure, right = p.mean.max(-1).values, (p.mean.argmax(-1) == test[1]).float()
            order = sure.argsort().tensor_split(6)
            axis.plot([sure[k].mean() for k in order], [right[k].mean() for k in order], marker="o", label=name)
        axis.plot([0, 1], [0, 1], color="0.7", linestyle=":")
        axis.set(xlabel="how sure", ylabel="how often right", xlim=(0.3, 1.02), ylim=(0.3, 1.02))
        axis.legend(frameon=False)
        figure.savefig(plot, dpi=130)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
