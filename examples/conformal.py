"""Guarantee: intervals that hold y as often as they say, whatever the posterior.

Noise that grows with |x|, and a network that knows only one noise for all: its 90 % intervals are too narrow, most of
all outside. Held-out rows widen or narrow them until 90 % of new rows are inside (CQR, Romano 2019), or until that is
so within each group (Mondrian).

    python examples/conformal.py --plot conformal.png
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import bayou


def far(x: Tensor) -> list[bool]:
    return (x[:, 0].abs() > 1.5).tolist()


def main(steps: int = 1000, plot: str | None = None) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    x = torch.rand(2600, 1) * 6 - 3
    y = torch.sin(2 * x) + 0.15 * x.abs() * torch.randn(2600, 1)
    train, held, new, y_new = (x[:200], y[:200]), (x[200:600], y[200:600]), x[600:], y[600:]
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    method = bayou.Ensemble(3, bayou.MAP(steps=steps, lr=0.01))
    noise = bayou.Gaussian(0.1)  # too small outside
    posterior = bayou.fit(net, train, method=method, likelihood=noise, prior=bayou.Normal(1.0), progress=False)

    all_rows = bayou.conformal(posterior, held, level=0.9, train=train)
    by_group = bayou.conformal(posterior, held, level=0.9, groups=far(held[0]))
    intervals = {
        "posterior alone": posterior.predict(new, seed=0).interval(0.9),
        "conformal": all_rows.interval(new),
        "conformal, by group": by_group.interval(new, groups=far(new)),
    }
    outside = torch.tensor(far(new))
    report = {}
    for name, (low, high) in intervals.items():
        inside = ((low <= y_new) & (y_new <= high))[:, 0].float()
        report[name] = {
            "all": float(inside.mean()), "middle": float(inside[~outside].mean()),
            "outside": float(inside[outside].mean()),
        }  # fmt: skip
        print(f"{name:20s} holds " + ", ".join(f"{value:.1%} of {where}" for where, value in report[name].items()))
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 2.8), layout="compressed")
        order = new[:, 0].argsort()
        for axis, (name, (low, high)) in zip(figure.subplots(1, 3, sharey=True), intervals.items(), strict=True):
            axis.scatter(new[::5], y_new[::5], s=2, color="0.5", linewidths=0)
            axis.plot(new[order, 0], low[order, 0], color="C0")
            axis.plot(new[order, 0], high[order, 0], color="C0")
            axis.set(title=f"{name}: {report[name]['all']:.1%}")
        figure.savefig(plot, dpi=130)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
