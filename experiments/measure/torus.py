"""Flows of angles and flows of the plane on a density of two angles, beside its entropy.

    python -m experiments.measure.torus --write

The density is a mixture of three bivariate von Mises densities with correlation, exp(κ₁·cos u +
κ₂·cos v + λ·sin u·sin v) with u = φ − μ, v = ψ − ν (the sine model of Singh et al. 2002), with
modes at the ends of [−π, π) as the dihedral angles of proteins have. Entropy and cross-entropies
are sums over a grid, exact but for rounding since the integrand is smooth and periodic; where it is
not (a flow of the plane at the ends) the grid is fine enough.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bayou import flows

# weight, μ, ν, κ₁, κ₂, λ
COMPONENTS = torch.tensor([[0.5, -3.0, 2.9, 8.0, 8.0, 6.0], [0.3, -1.1, -0.7, 20.0, 20.0, -14.0],
                           [0.2, 1.0, 3.1, 10.0, 4.0, 0.0]]).double()  # fmt: skip
GRID = 512
FLOWS: dict[str, Callable[[], flows.Flow]] = {
    "circular, autoregressive": lambda: flows.Flow(
        flows.VonMises(2), flows.circular_spline(2, coupling=False)
    ),
    "circular, coupling": lambda: flows.Flow(flows.VonMises(2), flows.circular_spline(2)),
    "plane: spline, autoregressive": lambda: flows.Flow(
        flows.StandardNormal(2), flows.spline_autoregressive(2)
    ),
    "plane: spline, coupling": lambda: flows.Flow(
        flows.StandardNormal(2), flows.spline_coupling(2)
    ),
}


def unnormalized(x: Tensor) -> Tensor:
    """The components at angles (..., 2) without weights and constants: (..., 3)."""
    _, mu, nu, first, second, correlation = COMPONENTS.unbind(-1)
    u, v = x[..., :1] - mu, x[..., 1:] - nu
    return first * u.cos() + second * v.cos() + correlation * u.sin() * v.sin()


def grid() -> Tensor:
    angles = -math.pi + 2 * math.pi * (torch.arange(GRID).double() + 0.5) / GRID
    return torch.stack(torch.meshgrid(angles, angles, indexing="ij"), -1).reshape(-1, 2)


def log_density(x: Tensor) -> Tensor:
    area = (2 * math.pi / GRID) ** 2
    constants = unnormalized(grid()).logsumexp(0) + math.log(area)
    return (unnormalized(x) - constants + COMPONENTS[:, 0].log()).logsumexp(-1)


def draws(n: int, seed: int) -> Tensor:
    """n draws by rejection from the uniform distribution."""
    generator, bound = torch.Generator().manual_seed(seed), log_density(grid()).max() + 0.01
    found = torch.zeros(0, 2).double()
    while len(found) < n:
        x = math.pi * (2 * torch.rand(100_000, 2, generator=generator).double() - 1)
        u = torch.rand(100_000, generator=generator).double()
        found = torch.cat([found, x[u.log() < log_density(x) - bound]])
    return found[:n]


def measure(name: str, seed: int, rows: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    flow = FLOWS[name]()
    fitted = flows.fit(
        flow,
        draws(rows, seed).float(),
        steps=steps,
        lr=2e-3,
        patience=None,
        seed=seed,
        progress=False,
    )
    x, area = grid(), (2 * math.pi / GRID) ** 2
    flow.double()
    with torch.no_grad():
        p, log_q = (
            log_density(x).exp() * area,
            torch.cat([flow.log_prob(part) for part in x.split(2**14)]),
        )
    return {
        "flow": name,
        "seed": seed,
        "nll": -float(p @ log_q),
        "mass": float(log_q.exp().sum() * area),
        "seconds": round(fitted.seconds, 1),
    }


def render(found: dict[str, Any]) -> str:
    lines = [
        "# A density of two angles",
        "",
        f"Cross-entropy −E[log q] in nats under the true density, by a grid; the entropy is {found['entropy']:.4f}. "
        f"Fits to {found['rows_of_data']:,} draws in {found['steps']:,} steps; mean of {found['seeds']} seeds, "
        "with the smallest and the largest.",
        "",
        "| flow | −E[log q] | above the entropy | mass of q in [−π, π)² |",
        "|---|---:|---:|---:|",
    ]
    for name in FLOWS:
        rows = [row for row in found["rows"] if row["flow"] == name]
        nll, mass = [row["nll"] for row in rows], fmean(row["mass"] for row in rows)
        above = fmean(nll) - found["entropy"]
        lines.append(
            f"| {name} | {fmean(nll):.4f} ({min(nll):.4f} to {max(nll):.4f}) | {above:.4f} | {mass:.4f} |"
        )
    return "\n".join([*lines, "", f"`{found['command']}`, {found['where']}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write torus.json and torus.md")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    p = log_density(grid())
    found: dict[str, Any] = {
        "command": "python -m experiments.measure.torus --write",
        "where": f"torch {torch.__version__}, {platform.machine()} CPU, one thread",
        "entropy": -float(p.exp() @ p) * (2 * math.pi / GRID) ** 2,
        "rows_of_data": args.rows,
        "steps": args.steps,
        "seeds": args.seeds,
        "rows": [],
    }
    for seed in range(args.seeds):
        for name in FLOWS:
            found["rows"].append(measure(name, seed, args.rows, args.steps))
            print(found["rows"][-1], flush=True)
    text = render(found)
    print(text)
    if args.write:
        (args.out / "torus.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "torus.md").write_text(text)


if __name__ == "__main__":
    main()
