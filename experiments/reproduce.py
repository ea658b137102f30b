"""``bayou reproduce NAME``: published experiments, run again.

``published.py`` has their rows, ``experiment.py`` fits and scores one, ``study.py`` has the loop,
``toy.py`` is experiment 1, ``defaults.py`` has methods by name beside scikit-learn, ``networks.py``
methods as they come on networks, ``choice.py`` settings of presets on held-out rows, ``truth.py``
all methods beside long HMC runs, ``implicit.py`` implicit posteriors on densities of their papers,
``adapters.py`` posteriors over low-rank adapters, ``hmc_cifar`` a residual network beside a public
HMC run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayou.progress import Show
from experiments import study
from experiments.adapters import Adapters
from experiments.choice import Choice
from experiments.defaults import Defaults
from experiments.hmc_cifar import HMCCifar
from experiments.implicit import Implicit
from experiments.networks import Networks
from experiments.published import EXPERIMENTS
from experiments.study import Fit, Study
from experiments.toy import Toy
from experiments.truth import Truth


def studies() -> dict[str, Study]:
    """All experiments by name."""
    own: dict[str, Study] = {
        "defaults": Defaults(),
        "networks": Networks(),
        "choice": Choice(),
        "truth": Truth(),
        "implicit": Implicit(),
        "adapters": Adapters(),
        "hmc-cifar10": HMCCifar(),
    }
    return {"toy": Toy(), **own, **EXPERIMENTS}


def find(name: str) -> Study:
    """The experiment of a name, or a ValueError that lists them."""
    found = studies()
    if name not in found:
        raise ValueError(f"there is no experiment {name!r}; the names are {', '.join(found)}")
    return found[name]


def reproduce(
    name: str,
    folder: Path,
    *,
    seeds: int | None = None,
    length: int | None = None,
    only: Sequence[str] = (),
    data: Sequence[str] = (),
    device: str = "cpu",
    samples: int | None = None,
    executor: str | None = None,
    again: bool = False,
    redraw: bool = False,
    show: Show = False,
    tell: Callable[[str], None] = print,
    command: str = "",
) -> list[Path]:
    """Run an experiment, or what is left of it: NAME.md, NAME.json and, if there is something to
    draw, NAME.png.

    ``again``: run the rows that were asked for even if they are there. ``redraw``: run nothing,
    write page and picture
    from the numbers. ``executor``: as of the command line. Gives back the paths of what was
    written.
    """
    experiment = find(name)
    if redraw:
        found = study.read(experiment, folder)
        if not found["rows"]:
            raise ValueError(
                f"{folder / name}.json has no rows to draw; run `bayou reproduce {name}` first"
            )
        return study.write(experiment, folder, found)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; use --device cpu")
    fits = experiment.fits(data, only, seeds, length)
    command = re.sub(r" --out ('[^']*'|\S+)", "", command)  # a place on one machine
    how: dict[str, Any] = {
        "device": device,
        "samples": samples,
        "executor": executor,
        "again": again,
    }
    return study.run(experiment, folder, fits, work, **how, show=show, tell=tell, command=command)


def work(
    fit: Fit, device: str, samples: int | None, show: Show = False, threads: int | None = None
) -> dict[str, Any]:
    """One row of an experiment, with its key; may run in a process of its own."""
    if threads is not None:
        torch.set_num_threads(threads)
    names = {"data": fit.data, "label": fit.label, "seed": fit.seed, "length": fit.length}
    return names | find(fit.experiment).measure(fit, device, samples, show)
