"""``make demo``: fit a flow to a two-dimensional density and write a picture of it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from bayou import rng
from bayou.flows import Flow, StandardNormal, realnvp
from bayou.flows.fit import fit
from bayou.lab import plots
from bayou.lab.densities import POTENTIALS


def run(density: str, steps: int, seed: int, out: Path) -> Path:
    """Fit RealNVP to a potential by reverse KL, draw target, flow and samples, and say how it went."""
    target, reach, start = POTENTIALS[density], 4.8, time.monotonic()
    print(f"Fitting RealNVP, 6 affine couplings, to the potential {target.name} of Rezende & Mohamed (2015).")
    with rng.isolated(seed, torch.device("cpu")):
        flow = Flow(StandardNormal(2), realnvp(2, layers=6, hidden=(32,)))
    result = fit(flow, target.log_density, steps=steps, lr=0.01, warmup=0.3, patience=None, seed=seed)

    truth = plots.on_grid(target.log_density, reach) / torch.tensor(target.log_z).exp()
    peak = truth.max().item()
    figure, axes = plots.panels(1, 3, size=3.0)
    plots.show_density(axes[0, 0], truth, reach, peak)
    plots.show_density(axes[0, 1], plots.on_grid(flow.log_prob, reach), reach, peak)
    plots.show_points(axes[0, 2], flow.sample(6000, seed=rng.fold(seed, "picture")), reach)
    for axis, title in zip(axes[0], ("target", "learned density", "samples"), strict=True):
        axis.set_title(title)
    path = plots.write(figure, out / "flow.png")

    if result.bound is not None:  # None only after a second Ctrl-C
        print(f"bound   {result.bound:.4f} ± {result.standard_error:.4f}")
        gap = target.log_z - result.bound
        print(f"log Z   {target.log_z:.4f}   the bound is below it by KL(flow ‖ target) = {gap:.4f}")
    print(f"picture {path}   ({time.monotonic() - start:.0f} s in all)")
    others = ", ".join(name for name in POTENTIALS if name != density)
    print(f"\nTry another density (--density {others}), more steps (--steps {4 * steps}) or another --seed;")
    print("bayou.flows.fit(flow, data) fits a flow to data of your own, and README.md has ten lines to start from.")
    return path


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bayou.lab.demo",
        description="Fit a normalizing flow to a two-dimensional density and write a picture of it.",
    )
    parser.add_argument("--density", choices=tuple(POTENTIALS), default="u1", help="which potential (%(default)s)")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the fit (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="repeats the run exactly (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder to write to (%(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    run(options.density, options.steps, options.seed, options.out)


if __name__ == "__main__":
    main()
