"""The pictures of the docs: ``python -m docs.make_pictures``.

``potentials.png`` fits planar flows and RealNVP to Rezende & Mohamed's four potentials by reverse
KL, ``densities.png`` fits spline couplings to two moons, rings and a checkerboard by maximum
likelihood. (``report.png`` is made by ``docs.report_picture``.)
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bayou import rng
from bayou.flows import Flow, StandardNormal, Transform, planar, realnvp, spline_coupling
from bayou.flows.fitting.fit import FitResult, fit
from experiments import plots
from experiments.densities import POTENTIALS, SAMPLERS

REACH = {"two moons": 1.9, "rings": 3.7, "checkerboard": 4.4}
POTENTIAL_REACH = 4.8
ROWS = 20_000


@dataclass(frozen=True)
class Job:
    """One flow, fitted to one target."""

    target: str
    family: str
    steps: int
    seed: int = 0
    device: str = "cpu"


FAMILIES: dict[str, Callable[[], Transform]] = {
    "planar": partial(planar, 2, layers=32),
    "RealNVP": partial(realnvp, 2, layers=8),
    "spline": partial(spline_coupling, 2, layers=6, bins=12),
}


def work(job: Job) -> tuple[FitResult, Tensor]:
    """Fit, and evaluate the learned density on the grid of the picture."""
    torch.set_num_threads(
        1
    )  # a process for each flow uses the cores better than threads within one
    with rng.isolated(job.seed, torch.device("cpu")):
        flow = Flow(StandardNormal(2), FAMILIES[job.family]()).to(job.device)
    anchor = next(flow.parameters())
    if job.target in POTENTIALS:
        log_density = POTENTIALS[job.target].log_density
        result = fit(
            flow,
            log_density,
            steps=job.steps,
            samples=512,
            warmup=0.4,
            patience=None,
            seed=job.seed,
        )
        return result, plots.on_grid(flow.log_prob, POTENTIAL_REACH, like=anchor)
    data = SAMPLERS[job.target](ROWS, seed=job.seed)
    result = fit(flow, data, steps=job.steps, batch_size=512, patience=None, seed=job.seed)
    return result, plots.on_grid(flow.log_prob, REACH[job.target], like=anchor)


def draw_potentials(answers: dict[tuple[str, str], tuple[FitResult, Tensor]], path: Path) -> Path:
    """Target, planar and RealNVP, one column a potential, the bounds in the titles."""
    families = ("planar", "RealNVP")
    figure, axes = plots.panels(1 + len(families), len(POTENTIALS))
    for column, (name, potential) in enumerate(POTENTIALS.items()):
        target = (
            plots.on_grid(potential.log_density, POTENTIAL_REACH)
            / torch.tensor(potential.log_z).exp()
        )
        peak = target.max().item()
        plots.show_density(axes[0, column], target, POTENTIAL_REACH, peak)
        axes[0, column].set_title(f"{potential.name}   log Z = {potential.log_z:.3f}")
        for row, family in enumerate(families, start=1):
            result, density = answers[name, family]
            plots.show_density(axes[row, column], density, POTENTIAL_REACH, peak)
            axes[row, column].set_title(f"bound {result.bound:.3f}")
    plots.label_rows(axes, ("target", "planar, 32 layers", "RealNVP, 8 layers"))
    return plots.write(figure, path)


def draw_densities(answers: dict[tuple[str, str], tuple[FitResult, Tensor]], path: Path) -> Path:
    """Data above, the density learned from it below."""
    figure, axes = plots.panels(2, len(SAMPLERS), size=3.0)
    for column, (name, sampler) in enumerate(SAMPLERS.items()):
        plots.show_points(axes[0, column], sampler(6000, seed=0), REACH[name])
        axes[0, column].set_title(name)
        plots.show_density(axes[1, column], answers[name, "spline"][1], REACH[name], gamma=0.6)
    plots.label_rows(axes, ("data", "learned density"))
    return plots.write(figure, path)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.make_pictures", description="Make the pictures of the docs."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/pictures"), help="folder to write to (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=4000, help="steps of every fit (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="fits at a time (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where to fit (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="repeats the pictures exactly (%(default)s)"
    )
    options = parser.parse_args(arguments)
    pairs = [(name, "spline") for name in SAMPLERS]
    pairs += [(name, family) for family in ("planar", "RealNVP") for name in POTENTIALS]
    jobs = [
        Job(name, family, options.steps, options.seed, options.device) for name, family in pairs
    ]
    answers = {}
    # spawn, because a forked child of a process that has used torch's threads can hang
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, answer in zip(jobs, pool.map(work, jobs), strict=True):
            answers[job.target, job.family] = answer
            print(f"{job.target}, {job.family}: {answer[0]}", flush=True)
    print(f"wrote {draw_densities(answers, options.out / 'densities.png')}")
    print(f"wrote {draw_potentials(answers, options.out / 'potentials.png')}")


if __name__ == "__main__":
    main()
