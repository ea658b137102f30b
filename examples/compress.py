"""A network that is too large for its problem, and what its posteriors say it needs.

y = 10·sin(π·x1·x2) + 20·(x3 − ½)² + 10·x4 + 5·x5 + noise (Friedman 1991), and five more inputs that say nothing. A
prior can ask every weight (``SparseVD``), or every unit with all of its weights (``NormalJeffreys``, and the horseshoe
``HalfCauchy``), whether the data need it. What they do not need becomes noise, E[w]²/Var[w] → 0, and
``bayou.compress`` builds the network without it: plain torch, smaller layers, and numbers with as few bits as the
posterior is sure of.

    python examples/compress.py --plot units.png
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import bayou

FAMILIES = {
    "SparseVD": bayou.SparseVD(),
    "NormalJeffreys": bayou.guides.NormalJeffreys(z="example"),
    "HalfCauchy": bayou.guides.HalfCauchy(z="example"),
}
THRESHOLD = 1.0  # a weight must be as large as its noise


def make_data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs around 0, and y in units of its own standard deviation, 5; the noise is .2 of it."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.rand(rows, 10, generator=generator), torch.randn(rows, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + noise
    return 4 * x - 2, (y.unsqueeze(1) - 14.4) / 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 100), nn.SiLU(), nn.Linear(100, 50), nn.SiLU(), nn.Linear(50, 1))


def units(net: Any) -> list[int]:
    """Inputs that are read, and units of both hidden layers."""
    return [int((net[0].weight != 0).any(0).sum()), net[0].out_features, net[2].out_features]


def main(steps: int = 3000, rows: int = 2000, plot: str | None = None) -> dict[str, dict[str, Any]]:
    train, (x, y) = make_data(rows, 0), make_data(1000, 1)
    print(f"{'posterior':<16} {'RMSE':>7} {'small':>7} {'rounded':>8} {'inputs, units':>16} {'bytes':>16}")
    found: dict[str, dict[str, Any]] = {}
    for name, family in FAMILIES.items():
        method = bayou.VI(family, steps=steps, lr=5e-3)
        posterior = bayou.fit(network(), train, method=method, likelihood=bayou.Gaussian(0.2, learn=True))
        small: Any = bayou.compress(posterior, THRESHOLD)
        rounded: Any = bayou.compress(posterior, THRESHOLD, bits=True, example_x=x[:1])
        with torch.no_grad():
            nets = posterior.to_module(), small, rounded
            errors = [5 * (net(x) - y).square().mean().sqrt().item() for net in nets]
        before, after = rounded.compression.bytes
        left = "-".join(map(str, units(small)))
        print(f"{name:<16} {errors[0]:7.3f} {errors[1]:7.3f} {errors[2]:8.3f} {left:>16} {before:>8,} → {after:,}")
        found[name] = {"errors": errors, "units": units(small), "bytes": (before, after), "net": small}
    print(f"\nthe last one:\n{rounded.compression}")
    if plot:
        draw(found).savefig(plot, dpi=130)
        print(f"picture: {plot}")
    return found


def draw(found: dict[str, dict[str, Any]]) -> Any:
    """Units that are left, and how strongly each input is read: the last five say nothing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="compressed")
    left, right = figure.subplots(1, 2)
    left.bar(range(3), (10, 100, 50), color="0.9", label="whole")
    for k, (name, one) in enumerate(found.items()):
        read = one["net"][0].weight.detach().norm(dim=0)
        for axis, heights in ((left, one["units"]), (right, (read / read.max()).tolist())):
            places = [place - 0.25 + 0.25 * k for place in range(len(heights))]
            axis.bar(places, heights, 0.23, color=f"C{k}", label=name)
    left.set(xticks=range(3), xticklabels=["inputs", "layer 1", "layer 2"], ylabel="units left")
    right.set(xticks=range(10), xticklabels=[f"$x_{{{k}}}$" for k in range(1, 11)], ylabel="how strongly it is read")
    left.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="a file for the picture")
    main(plot=parser.parse_args().plot)
