"""Distill: one plain network that says in one pass what a posterior says with a hundred.

Chains on a curve with a gap know where they do not know. A student with a mean and a log-variance learns its
predictions (Balan 2015, Bulò 2016); one with a second log-variance keeps doubt and noise apart. And a chain that is
distilled while it runs stores no draw at all.

    python examples/distill.py --plot distill.png
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import bayou


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, outputs))


def main(steps: int = 3000, plot: str | None = None) -> dict[str, dict[str, float]]:
    torch.manual_seed(1)
    x = torch.cat([-1 - 2 * torch.rand(60, 1), 1 + 2 * torch.rand(60, 1)])
    y = torch.sin(2 * x) + 0.1 * torch.randn(120, 1)
    rows = torch.linspace(-4, 4, 1000)[:, None]  # the teacher answers anywhere; no y is needed
    options = {"likelihood": bayou.Gaussian(0.1), "prior": bayou.Normal(1.0)}
    chain = bayou.SGHMC(steps=steps, chains=4, batch_size=120)
    teacher = bayou.fit(network(1), (x, y), method=chain, progress=False, **options)

    learn = {"steps": steps, "lr": 5e-3, "progress": False}
    found = {
        "teacher": teacher,
        "student": bayou.distill(teacher, network(2), rows, **learn),
        "student, two variances": bayou.distill(teacher, network(3), rows, keep="epistemic", **learn),
        "student, online": bayou.distill(
            chain, network(2), (x, y), net=network(1), rows=rows, lr=5e-3, progress=False, **options
        ),
    }
    report, curves = {}, {}
    for name, posterior in found.items():
        begun = time.monotonic()
        p = posterior.predict(rows, seed=0)
        mean, std = p.mean[:, 0], p.std[:, 0]
        seconds = time.monotonic() - begun
        doubt = p.epistemic_std[:, 0]
        inner, gap = rows[:, 0].abs() > 1, rows[:, 0].abs() < 0.5
        inner &= rows[:, 0].abs() < 3
        curves[name] = mean, std, doubt
        report[name] = {
            "here": float(std[inner].mean()), "gap": float(std[gap].mean()), "doubt": float(doubt[gap].mean()),
            "seconds": seconds, "off": float((mean - curves["teacher"][0]).abs().mean()),
        }  # fmt: skip
        print(
            f"{name:24s} std {report[name]['here']:.2f} at the data, {report[name]['gap']:.2f} in the gap, doubt alone "
            f"{report[name]['doubt']:.2f}; {1000 * seconds:6.1f} ms"
        )
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 2.6), layout="compressed")
        axes = figure.subplots(1, len(found), sharey=True)
        for axis, (name, (mean, std, _)) in zip(axes, curves.items(), strict=True):
            axis.fill_between(rows[:, 0], mean - 2 * std, mean + 2 * std, alpha=0.3, linewidth=0)
            axis.plot(rows[:, 0], mean)
            axis.scatter(x, y, s=3, color="black", linewidths=0)
            axis.set(title=name, ylim=(-4, 4))
        figure.savefig(plot, dpi=130)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
