"""A curve with a gap in the data: what the noise is, and what is not known.

Var[y] = E_s Var[y | f_s] + Var_s E[y | f_s]: the noise that stays, and the doubt about the function, which grows where
there are no data. A single network has no second part and is as sure in the gap as elsewhere.

    python examples/regression.py --plot curve.png
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load

NOISE = 0.1  # of these data, taken as known; Gaussian(0.5, learn=True) would learn it


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


def main(steps: int = 1500, plot: str | None = None) -> dict[str, dict[str, float]]:
    data = load("two-bumps")
    x, y = data.test
    point = bayou.MAP(steps=steps, lr=1e-2)
    methods: dict[str, Any] = {
        "MAP": point,
        "Ensemble": bayou.Ensemble(5, of=point),
        "Laplace": bayou.Laplace(start=point, structure="full"),
        "VI": bayou.VI(bayou.MeanField(std=0.01), steps=steps, lr=1e-2, warmup=0.5),
    }
    print(f"{data!r}\n\n{'method':<10} {'RMSE':>6} {'NLL':>7} {'in 90 %':>8} {'doubt: data':>12} {'gap':>6}")
    rows, bands = {}, {}
    line = torch.linspace(-2.2, 2.2, 221).unsqueeze(1)
    for name, method in methods.items():
        posterior = bayou.fit(network(), data.train, method=method, likelihood=bayou.Gaussian(NOISE / data.y_scale))
        p, gap = posterior.predict(x, seed=0), posterior.predict(data.ood, seed=0)
        rows[name] = row = {
            "rmse": metrics.rmse(p, y, data.y_scale),
            "nll": metrics.nll(p, y, data.y_scale),
            "coverage": metrics.coverage(p, y, 0.9),
            "here": data.y_scale * float(p.epistemic_std.mean()),
            "gap": data.y_scale * float(gap.epistemic_std.mean()),
        }
        fit = f"{row['rmse']:6.3f} {row['nll']:7.3f} {row['coverage']:8.1%}"
        print(f"{name:<10} {fit} {row['here']:12.3f} {row['gap']:6.3f}")
        bands[name] = posterior.predict(line, seed=0)
    print(f"\nNo RMSE can be below the noise, {NOISE}. In the gap an honest posterior doubts more than at the data.")
    if plot:
        draw(line[:, 0], bands, *data.train).savefig(plot, dpi=130)
        print(f"picture: {plot}")
    return rows


def draw(line: torch.Tensor, bands: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Mean, doubt (dark) and doubt with noise (light), two standard deviations each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(bands), 3.2), layout="compressed")
    for axis, (name, p) in zip(figure.subplots(1, len(bands), sharey=True), bands.items(), strict=True):
        mean = p.mean[:, 0]
        for std, alpha in ((p.std[:, 0], 0.18), (p.epistemic_std[:, 0], 0.35)):
            axis.fill_between(line, mean - 2 * std, mean + 2 * std, color="#3b5b92", alpha=alpha, linewidth=0)
        axis.plot(line, mean, color="#3b5b92")
        axis.scatter(x[:, 0], y[:, 0], s=8, color="#d9743c", linewidths=0)
        axis.set(title=name, xlabel="x (standardized)", ylim=(-4, 4))
    figure.axes[0].set_ylabel("y (standardized)")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
