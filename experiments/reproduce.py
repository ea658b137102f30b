"""Run published experiments again: ``python -m experiments.reproduce NAME``.

``published.py`` has their rows, ``experiment.py`` fits and scores one, ``study.py`` has the loop,
``toy.py`` is experiment 1, ``defaults.py`` has methods by name beside scikit-learn, ``networks.py``
methods as they come on networks, ``choice.py`` settings of presets on held-out rows, ``truth.py``
all methods beside long HMC runs, ``implicit.py`` implicit posteriors on densities of their papers,
``adapters.py`` posteriors over low-rank adapters, ``hmc_cifar`` a residual network beside a public
HMC run, ``tables`` bayou on tables beside other libraries.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayou.app.cli.process import terminate_like_ctrl_c
from bayou.core.progress import Show, command_line_spelling
from experiments import study
from experiments.adapters import Adapters
from experiments.choice import Choice
from experiments.defaults import Defaults
from experiments.hmc_cifar import HMCCifar
from experiments.implicit import Implicit
from experiments.networks import Networks
from experiments.published import EXPERIMENTS
from experiments.study import Fit, Study
from experiments.tables.study import Tables
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
        "tables": Tables(),
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
            raise ValueError(f"{folder / name}.json has no rows to draw; run the experiment first")
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


def main(words: Sequence[str] | None = None) -> None:
    """Run the experiment of a command line, and print the files that were written.

    Args:
        words: the arguments; those of the process by default.
    """
    words = sys.argv[1:] if words is None else words
    options = _parser().parse_args(words)
    if options.name is None:
        for name, experiment in studies().items():
            print(f"{name:<20}{experiment.title}")
        return
    executor = options.executor
    if not executor and options.jobs > 1:
        executor = f"processes:{options.jobs}"
    try:
        with command_line_spelling():
            paths = reproduce(
                options.name,
                options.out,
                seeds=options.seeds,
                length=options.length,
                only=options.only,
                data=options.data,
                device=options.device,
                samples=options.samples,
                executor=executor,
                again=options.again,
                redraw=options.redraw,
                show=not options.quiet,
                command=f"python -m experiments.reproduce {shlex.join(words)}",
            )
    except KeyboardInterrupt:
        print("interrupted; finished rows are kept, the same command continues", file=sys.stderr)
        raise SystemExit(130) from None
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    for path in paths:
        print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m experiments.reproduce",
        description="Run a published experiment and write its table and figure; existing rows are "
        "kept. Without a name, list the experiments.",
    )
    add = parser.add_argument
    add("name", nargs="?", help="toy, mnist-fc, mnist-lenet, cifar5, uci, ...")
    add("--out", type=Path, default=study.RESULTS, help="folder for table, figure and JSON")
    add("--seeds", type=int, help="seeds, or splits of UCI; by default as in the experiment")
    add("--length", type=int, help="epochs (steps for uci); by default as in the experiment")
    add("--jobs", type=int, default=1, help="--jobs 4 is short for --executor processes:4")
    add("--executor", help="parallel fits: processes, processes:N, or module:function of yours")
    add("--only", action="append", default=[], help="run the row with this label; repeatable")
    add("--data", action="append", default=[], help="use this data set only; repeatable")
    add("--device", default="cpu", help="cpu, cuda or auto")
    add("--samples", type=int, help="networks averaged for a prediction; 100, for toy 2,000")
    add("--again", action="store_true", help="run existing rows again")
    add("--redraw", action="store_true", help="only write table and figure from the JSON")
    add("--quiet", "-q", action="store_true", help="do not show progress")
    return parser


if __name__ == "__main__":
    from experiments import reproduce as module  # under its own name, so that workers can import it

    terminate_like_ctrl_c()
    module.main()
