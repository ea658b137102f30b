"""Flows in continuous time and residual flows as densities: in the plane, of UCI rows, of MNIST and
CIFAR-10.

    python -m experiments.measure.continuous --only plane uci --seconds 60 --jobs 2           # on a CPU
    python -m experiments.measure.continuous --only mnist cifar --device cuda --seconds 200 --jobs 4
    python -m experiments.measure.continuous --speed                                          # beside other
    libraries
    python -m experiments.measure.continuous --redraw                                         # table and
    picture again
    python -m experiments.measure.continuous --small                                          # a trial of
    everything on a CPU

Each row learns for ``--seconds`` at most (the rate falls with the clock) and is judged for
``--judge`` seconds at most, on test rows in their order; how many that were is said. Settings were
set before any test row was seen.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayou import flows
from bayou.core import rng
from bayou.data import load
from bayou.flows import Chain, Continuous, Flow, Inverse, StandardNormal, Transform
from experiments.densities import SAMPLERS
from experiments.measure.continuous_images import Options, image, packed, unpacked
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "continuous.png"
PLANE = ("continuous", "matching", "residual", "spline_autoregressive")
UCI = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
TABLES = ("maf", "spline_autoregressive", "continuous", "matching", "residual")
IMAGES = {"mnist": ("residual", "continuous", "matching"), "cifar": ("matching",)}
REACH = {"two moons": 1.9, "rings": 3.7, "checkerboard": 4.4}
GRID = 64
PUBLISHED = {
    "mnist": "RealNVP 1.06, Glow 1.05, FFJORD .99, Residual .970",
    "cifar": "RealNVP 3.49, FFJORD 3.40, Glow 3.35, Residual 3.28, flow matching 3.11 (K = 1), 2.99 (K = 50)",
}


# --- in the plane, and rows of tables -----------------------------------------------------------


def vector_flow(model: str, dim: int) -> tuple[Flow, dict[str, Any]]:
    """A flow and how it is fitted. A residual flow runs backwards: data → base is then its direct
    way.
    """
    how: dict[str, Any] = {"lr": 5e-3 if model in ("residual", "continuous") else 2e-3}
    made: Transform
    if model == "residual":
        made = Chain(Inverse(flows.residual(dim, layers=8)), flows.DiagonalAffine(dim))
    elif model in ("maf", "spline_autoregressive"):
        made = flows.registry("vector")[model].build(dim)
    else:
        narrow = (
            model == "continuous"
        )  # a likelihood asks it 16 times a step or more, with a product a dimension
        made = Continuous(
            dim, flows.TimeMLP(dim, (64, 64) if narrow else (128, 128)), steps=4 if narrow else 8
        )
    if model.startswith("matching"):
        how["matching"] = True
    return Flow(StandardNormal(dim), made), how


def fitted(
    flow: Flow, data: Tensor, how: dict[str, Any], options: Options, seed: int
) -> dict[str, Any]:
    """Until the clock says stop, or held-out rows do: the best parameters by 10 % held-out rows."""
    begun = time.monotonic()

    def watch(_: Any) -> None:
        if time.monotonic() - begun > options.seconds:
            raise KeyboardInterrupt

    def rate(_: float) -> float:
        done = min(1.0, (time.monotonic() - begun) / options.seconds)
        return min(1.0, 0.1 + done / 0.02) * 0.5 * (1 + math.cos(math.pi * done))

    found = flows.fit(
        flow, data, steps=10**6, schedule=rate, patience=None, check_every=25, callback=watch, progress=False,
        seed=seed, **how,
    )  # fmt: skip
    return {"steps": found.steps, "best step": found.best_step, "learned": time.monotonic() - begun}


def judged(flow: Flow, data: Tensor, chunk: int = 500) -> dict[str, Any]:
    """Nats a row on test rows, its standard error, and how often the field was asked for one
    row.
    """
    if isinstance(flow.transform, Continuous):
        flow.transform.steps = max(32, flow.transform.steps)  # finer than it may have learned with
    with torch.no_grad():
        scores = torch.cat(
            [
                flow.log_prob(rows, seed=0, start=i * chunk)
                for i, rows in enumerate(data.split(chunk))
            ]
        )
    found = {
        "nll": -scores.mean().item(),
        "error": (scores.std() / math.sqrt(len(scores))).item(),
        "rows": len(data),
    }
    if isinstance(flow.transform, Continuous):
        found["evaluations"] = flow.transform.evaluations
    return found


def plane(name: str, model: str, seed: int, options: Options) -> dict[str, Any]:
    """One density of the gallery."""
    torch.manual_seed(seed)
    rows = 2000 if options.small else 20_000
    data, test = SAMPLERS[name](rows, seed=seed), SAMPLERS[name](5000, seed=1000 + seed)
    flow, how = vector_flow(model, 2)
    found = fitted(flow, data, how, options, seed) | judged(flow, test)
    if isinstance(
        flow.transform, Continuous
    ):  # the same field by a solver that adapts its steps, row by row
        flow.transform.solver, flow.transform.tolerance = "dopri5", 1e-5
        found |= {
            f"{key}, adaptive": value
            for key, value in judged(flow, test[:1000]).items()
            if key != "rows"
        }
        flow.transform.solver = "rk4"
    axis = torch.linspace(-REACH[name], REACH[name], GRID)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
    with torch.no_grad():
        density = (
            torch.cat([flow.log_prob(part, seed=0) for part in points.split(1024)])
            .exp()
            .reshape(GRID, GRID)
        )
    found["grid"] = packed(255 * (density / density.max()))
    return found


def uci(name: str, model: str, seed: int, options: Options) -> dict[str, Any]:
    """The joint density of inputs and target, standardized, with noise of .01 on discrete columns
    and all others.
    """
    data = load(name, split=seed)
    parts = [torch.cat([x, y], -1).float() for x, y in (data.train, data.test)]
    mean, std = parts[0].mean(0), parts[0].std(0)
    alive = std > 1e-6
    parts = [((x - mean) / std)[:, alive] + 0.01 * rng.normal(len(x), (int(alive.sum()),), x, i)
             for i, x in enumerate(parts)]  # fmt: skip
    torch.manual_seed(seed)
    flow, how = vector_flow(model, parts[0].shape[1])
    return (
        {"dim": parts[0].shape[1]}
        | fitted(flow, parts[0], how, options, seed)
        | judged(flow, parts[1])
    )


# --- tables and pictures ------------------------------------------------------------------------


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "plane": plane,
    "uci": uci,
    "mnist": image,
    "cifar": image,
}


def work(part: str, name: str, model: str, seed: int, options: Options) -> dict[str, Any]:
    """One row."""
    return WORK[part](name, model, seed, options) | {
        "limit": options.seconds,
        "device": options.device,
    }


def jobs(parts: list[str], seeds: int) -> list[tuple[str, str, str, int]]:
    """Parts, names, models and seeds; those of images first, since they take longest."""
    every: list[tuple[str, str, str, int]] = []
    for part in sorted(parts, key=["cifar", "mnist", "plane", "uci"].index):
        names = {"plane": tuple(SAMPLERS), "uci": UCI}.get(part, (part,))
        models = {"plane": PLANE, "uci": TABLES}.get(part, IMAGES.get(part, ()))
        every += [
            (part, name, model, seed) for seed in range(seeds) for name in names for model in models
        ]
    return every


def rows_of(found: dict[str, Any], part: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs of every (name, model), over seeds."""
    each: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, run in sorted(found.items()):
        own, name, model, _ = key.split("/")
        if own == part:
            each.setdefault((name, model), []).append(run)
    return each


def mean(runs: list[dict[str, Any]], key: str, form: str = ".3f") -> str:
    """Over seeds; nothing where there is no such number."""
    return format(sum(run[key] for run in runs) / len(runs), form) if key in runs[0] else ""


def columns(head: list[str], rows: list[list[str]], words: int) -> list[str]:
    """A table whose first columns have words, and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


ABOUT = {
    "plane": "Test NLL, nats a row (5,000 rows; 20,000 to learn from). Evaluations of the field for one log-density: "
    "in equal steps of RK4, and where Dormand and Prince adapt them to 1e-5, row by row (1,000 rows).",
    "uci": "Nine UCI sets in the place of POWER and its kin, which bayou does not read. NLL of test rows, nats a row: "
    "inputs and target together, standardized, with Gaussian noise of .01 (some columns are discrete, and a density "
    "of those alone has no bound). The best parameters by 10 % held-out rows.",
    "images": "Bits a dimension of test images with uniform dequantization (one draw: an upper bound). “Twice the "
    "steps”: what the solver's error does to the number. K = 20: the log of a mean of 20 weights, less what the noise "
    "of the trace alone gains by it; without that correction, as published, in brackets.",
}


def table(found: dict[str, Any]) -> str:
    """All parts that there are."""
    said = ["# Continuous and residual flows as densities", ""]
    if each := rows_of(found, "plane"):
        keys = {"NLL": "nll", "±": "error", "evaluations": "evaluations", "NLL, adaptive": "nll, adaptive",
                "evaluations, adaptive": "evaluations, adaptive", "steps": "steps", "s": "learned"}  # fmt: skip
        forms = [".3f", ".3f", ".0f", ".3f", ".0f", ".0f", ".0f"]
        rows = [[name, model, *(mean(runs, key, form) for key, form in zip(keys.values(), forms, strict=True))]
                for (name, model), runs in each.items()]  # fmt: skip
        said += [
            "## In the plane",
            "",
            ABOUT["plane"],
            "",
            *columns(["density", "fitted by", *keys], rows, 2),
            "",
        ]
    if each := rows_of(found, "uci"):
        rows = []
        for name in UCI:
            own = {model: runs for (set_, model), runs in each.items() if set_ == name}
            if own:
                values = [
                    mean(own[model], "nll", ".2f") if model in own else "" for model in TABLES
                ]
                best = min((v for v in values if v), key=float)
                first = next(iter(own.values()))
                values = [f"**{v}**" if v == best else v for v in values]
                rows.append(
                    [
                        name,
                        str(first[0]["dim"]),
                        *values,
                        str(len(first)),
                        f"{first[0]['limit']:.0f}",
                    ]
                )
        head = ["set", "D", *TABLES, "splits", "s a row"]
        said += ["## Rows of tables", "", ABOUT["uci"], "", *columns(head, rows, 1), ""]
    for part in IMAGES:
        if not (each := rows_of(found, part)):
            continue
        rows = []
        for (_, model), runs in each.items():
            honest = mean(runs, "bits K honest")
            rows.append([
                model, mean(runs, "bits"), mean(runs, "error"), mean(runs, "rows", ",.0f"),
                honest and f"{honest} ({mean(runs, 'bits K')})", mean(runs, "bits 1 same rows"),
                mean(runs, "rows K", ",.0f"), mean(runs, "evaluations", ".0f"), mean(runs, "twice the steps", "+.3f"),
                mean(runs, "parameters", ",.0f"), mean(runs, "steps", ",.0f"), mean(runs, "learned", ".0f"),
            ])  # fmt: skip
        head = ["fitted by", "bits/dim", "±", "rows", "K = 20", "K = 1, same rows", "these rows", "evaluations",
                "twice the steps", "parameters", "steps", "s"]  # fmt: skip
        about = f"{ABOUT['images']} Published: {PUBLISHED[part]}."
        said += [f"## {part.upper()}", "", about, "", *columns(head, rows, 1), ""]
    return "\n".join(said)


def draw(found: dict[str, Any], path: Path) -> None:
    """Densities in the plane, and draws of images."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    each = rows_of(found, "plane")
    if not each:
        return
    names = [name for name in SAMPLERS if any(n == name for n, _ in each)]
    models = [model for model in PLANE if any(m == model for _, m in each)]
    figure, axes = pyplot.subplots(
        len(names),
        len(models) + 1,
        figsize=(1.9 * (len(models) + 1), 2.05 * len(names)),
        squeeze=False,
    )
    for row, name in zip(axes, names, strict=True):
        data, reach = SAMPLERS[name](4000, seed=5), REACH[name]
        row[0].scatter(*data.T, s=0.4, color="0.2", linewidths=0)
        row[0].set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        for axis, model in zip(row[1:], models, strict=True):
            if runs := each.get((name, model)):
                axis.imshow(
                    unpacked(runs[0]["grid"]),
                    origin="lower",
                    cmap="magma",
                    extent=(-reach, reach) * 2,
                )
                axis.set_xlabel(f"{runs[0]['nll']:.3f} nats", fontsize=8)
    for axis, title in zip(axes[0], ["data", *models], strict=True):
        axis.set_title(
            title.replace("spline_autoregressive", "spline (autoregressive)"), fontsize=8
        )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    images = [
        (part, model, runs[0])
        for part in IMAGES
        for (_, model), runs in rows_of(found, part).items()
    ]
    if not images:
        return
    figure, axes = pyplot.subplots(len(images), 1, figsize=(7, 1.1 * len(images)), squeeze=False)
    for axis, (part, model, run) in zip(axes[:, 0], images, strict=True):
        draws = unpacked(run["draws"]) / 255
        axis.imshow(torch.cat(list(draws), -1).movedim(0, -1).squeeze(-1), cmap="gray")
        axis.set_title(
            f"{part}, {model}: {run['bits']:.2f} bits a dimension after {run['learned']:.0f} s",
            fontsize=8,
        )
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path.with_name(f"{path.stem}-draws.png"), dpi=120)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--models", nargs="*", help="rows of these models alone")
    parser.add_argument("--names", nargs="*", help="rows of these data alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="that a row may learn")
    parser.add_argument(
        "--judge",
        type=float,
        default=40.0,
        help="that a row of images may be judged, each number of it",
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--speed", action="store_true", help="time steps beside other libraries, and nothing else"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="with --speed: also one compiled graph (minutes)"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="table and picture again, and run nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.speed:
        from experiments.measure.continuous_speed import speed

        speed(given.out, given.device, given.small, given.compiled)
        return
    options = Options(given.device, given.seconds, given.judge, given.small)
    path = given.out / ("continuous-small.json" if given.small else "continuous.json")
    every = [] if given.redraw else jobs(given.only, given.seeds)
    every = [
        job
        for job in every
        if job[2] in (given.models or [job[2]]) and job[1] in (given.names or [job[1]])
    ]
    for job, found in spread(work, every, options, given.jobs):
        keep(path, job, found)
        print(
            {key: value for key, value in found.items() if key not in ("grid", "draws")}, flush=True
        )
    found = kept(path)
    said = table(found)
    print(said)
    commands = path.with_suffix(".commands")
    if not given.small:
        if every:
            with commands.open("a") as file:
                file.write(made(given.device) + "\n")
        lines = commands.read_text().splitlines() if commands.exists() else []
        path.with_suffix(".md").write_text(
            said + "".join(f"\n{line}\n" for line in dict.fromkeys(lines))
        )
        draw(found, PICTURE if given.out == RESULTS else path.with_suffix(".png"))


if __name__ == "__main__":
    main()
