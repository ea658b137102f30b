"""Bits per dimension of image flows on MNIST, Fashion-MNIST and CIFAR-10, samples, speed and
memory.

    python -m experiments.measure.images --device cuda --jobs 3                     # all rows, each by its
    own clock python -m experiments.measure.images --device cuda --only mnist/flow++ --seconds 300
    python -m experiments.measure.images --small                                   # a trial on a CPU: tiny
    networks, 10 s
    python -m experiments.measure.images --redraw                                   # table and picture again
    python -m experiments.measure.images --speed                                    # a step and samples,
    beside normflows' Glow
    python -m experiments.measure.images --memory                                   # of a step of Glow on a
    CPU

Images are used as they are: 28×28 is kept (784 dimensions), nothing is padded, shifted or flipped.
A row trains until its seconds are over, the learning rate following the clock; then the whole test
set is judged with one dequantization sample an image, and with K = 20 importance samples as much of
it as ``--judge-seconds`` allow; the table says how much. ``--held``: the last 10,000 training
images judge instead of the test images, to choose settings by.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayou import flows
from bayou.core import rng
from bayou.data import load
from bayou.flows.fitting.fit import HistoryRow
from experiments.measure.images_speed import memory, speed
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "images.png"
PUBLISHED = {
    "mnist/glow": "Glow 1.05, RealNVP 1.06",
    "mnist/flow++": "FFJORD .99, Residual .970",
    "cifar10/glow": "Glow 3.35, RealNVP 3.49",
    "cifar10/flow++": "Flow++ 3.08",
}
IMPORTANCE = 20


@dataclass(frozen=True)
class Row:
    """A model, and how it is trained."""

    name: str  # data/model
    dequantize: str = "uniform"
    model: dict[str, Any] = field(default_factory=dict)
    seconds: float = 150.0
    batch: int = 256
    lr: float = 1e-3
    judge_seconds: float = 40.0
    device: str = "cpu"
    held: bool = False
    small: bool = False
    graph: bool = True
    half: bool | None = None  # by default on a GPU
    folder: Path = RESULTS

    @property
    def data(self) -> str:
        return self.name.partition("/")[0]

    def build(self, shape: tuple[int, ...], seed: int) -> flows.Flow:
        """The flow at its random start."""
        torch.manual_seed(seed)
        make = flows.flowpp_image if "flow++" in self.name else flows.glow_image
        half = self.device == "cuda" if self.half is None else self.half
        chain = make(shape, half=half, **self.model)
        q = flows.dequantizer(shape, half=half) if self.dequantize == "variational" else "uniform"
        return flows.image_flow(chain, 256, q).to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


# Chosen on held-out images: see ``MARGIN`` of flows.images; with learned dequantization 3.57 and
# 1.70 bits.
GLOW: dict[str, Any] = {"levels": 2, "steps": 16, "hidden": 256}
FLOWPP: dict[str, Any] = {"levels": 2, "steps": 4, "hidden": 96, "blocks": 2, "components": 8}
ROWS = {
    row.name: row
    for row in (
        Row("mnist/glow", model=GLOW),
        Row("mnist/glow, variational", "variational", GLOW),
        Row("mnist/flow++", "variational", FLOWPP, seconds=200, lr=7e-4),
        Row("fashion/glow", model=GLOW),
        Row("fashion/glow, variational", "variational", GLOW),
        Row("fashion/flow++", "variational", FLOWPP, seconds=200, lr=7e-4),
        Row("cifar10/glow", model=GLOW | {"levels": 3, "margin": 0.05}, seconds=240),
        Row(
            "cifar10/flow++",
            "variational",
            FLOWPP | {"margin": 0.05},
            seconds=240,
            batch=128,
            lr=7e-4,
        ),
    )
}
TINY: dict[str, dict[str, Any]] = {
    "glow": {"levels": 2, "steps": 2, "hidden": 16},
    "flow++": {"steps": 2, "hidden": 16, "blocks": 1},
}


def images(name: str, held: bool) -> tuple[Tensor, Tensor]:
    """Pixels 0 .. 255 to learn from and to judge by, (N, C, H, W) bytes."""
    data = load(name, ood="none")
    white: Any = data.preprocessor
    train, test = (
        (255 * white.pixels(x)).round().to(torch.uint8) for x, _ in (data.train, data.test)
    )
    return (train[:-10_000], train[-10_000:]) if held else (train, test)


def train(flow: flows.Flow, x: Tensor, row: Row, seed: int) -> dict[str, Any]:
    """Steps until the seconds are over, and what images that the fit holds out said on the way.

    Where a loss is not finite it goes on with the parameters of a little before, at half the rate;
    the table says so.
    """
    gpu, scale = row.device == "cuda", math.prod(flow.event_shape) * math.log(2)
    curve: list[list[float]] = []
    begun = time.monotonic()

    def note(check: HistoryRow) -> None:
        curve.append(
            [round(time.monotonic() - begun, 1), check.step, round(check.score / scale, 4)]
        )
        print(
            f"{row.name}: {curve[-1][0]:.0f} s, step {check.step}, {curve[-1][2]:.3f} bits",
            flush=True,
        )

    adam = partial(torch.optim.Adam, fused=True, capturable=gpu and row.graph)
    lr, steps, fallen = row.lr, 0, 0
    while (left := row.seconds - (time.monotonic() - begun)) > 0.02 * row.seconds:
        first = len(curve)
        try:
            steps += flows.fit(
                flow, x.float(), seconds=left, batch_size=row.batch, lr=lr, optimizer=adam, clip=scale, patience=None,
                check_every=100, seed=rng.fold(seed, fallen), progress=False, callback=note,
            ).steps  # fmt: skip
            break
        except FloatingPointError as error:
            print(f"{row.name}: {error}", flush=True)
            steps, fallen, lr = (
                steps + (int(curve[-1][1]) if len(curve) > first else 0),
                fallen + 1,
                lr / 2,
            )
    flow.eval()
    made = {
        "steps": steps,
        "epochs": steps * row.batch / len(x),
        "curve": curve[:: max(1, len(curve) // 100)],
    }
    return made | (
        {"stopped": f"{fallen} times not finite, from there at half the rate"} if fallen else {}
    )


def judged(
    flow: flows.Flow, x: Tensor, samples: int, seconds: float, batch: int = 500
) -> dict[str, float]:
    """Mean bits per dimension of as many images as the seconds allow, with its standard error."""
    found, begun = list[Tensor](), time.monotonic()
    for part in x.split(batch):
        found.append(
            flows.bits_per_dim(flow, part, samples, rng.fold(1, len(found)), batch).double().cpu()
        )
        if time.monotonic() - begun > seconds:
            break
    bits = torch.cat(found)
    return {
        "bits": float(bits.mean()),
        "error": float(bits.std() / len(bits) ** 0.5),
        "rows": len(bits),
    }


def work(name: str, seed: int, rows: dict[str, Row]) -> dict[str, Any]:
    """One row."""
    row = rows[name]
    torch.set_float32_matmul_precision("highest")  # 1×1 convolutions are part of the density
    x, test = (part.to(row.device) for part in images(row.data, row.held))
    if row.small:
        test = test[:100]
    flow = row.build(tuple(x.shape[1:]), seed)
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in flow.parameters()),
        "batch": row.batch,
        "lr": row.lr,
    }
    found |= {"model": row.model, "dequantize": row.dequantize, "held": row.held} | train(
        flow, x, row, seed
    )
    if row.device == "cuda":
        found["memory"] = torch.cuda.max_memory_allocated() / 2**30
    found["one"] = judged(flow, test, 1, math.inf)
    print(f"{name}: {found['one']['bits']:.4f} bits with one sample", flush=True)
    found["many"] = judged(flow, test, IMPORTANCE, row.judge_seconds)
    with suppress(ArithmeticError):  # an inversion that misses its tolerance in float32
        drawn = torch.cat([flow.sample(16, seed=0, start=16 * i) for i in range(4)])
        row.folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            samples_of(row.folder, name), samples=drawn.clamp(0, 255).to(torch.uint8).cpu().numpy()
        )
    return found


def samples_of(folder: Path, name: str) -> Path:
    return folder / f"images-{name.replace('/', '-').replace(', ', '-')}.npz"


# --- table and picture --------------------------------------------------------------------------

HEAD = """Bits per dimension on test images, as they are (28×28 is kept). All are upper bounds, from one dequantization
sample an image and from K = 20 importance samples; ± is the standard error over images. Published numbers are
those of the papers, with one sample; beside "flow++" on MNIST stand the best that were published for flows.

| data | model | dequantization | bits/dim | K = 20 | published | parameters | epochs | steps of batch | s |
|---|---|---|---:|---:|---|---:|---:|---:|---:|
"""


def table(found: dict[str, Any]) -> str:
    """A line for every row and seed."""
    said = HEAD
    for name in ROWS:
        for key, run in found.items():
            if key.rpartition("/")[0] != name:
                continue
            one, many = run["one"], run["many"]
            part = "" if many["rows"] == one["rows"] else f" (first {many['rows']:,})"
            cells = [
                name.partition("/")[0],
                name.partition("/")[2].partition(",")[0],
                run["dequantize"],
            ]
            cells += [
                f"{one['bits']:.3f} ± {one['error']:.3f}",
                f"{many['bits']:.3f} ± {many['error']:.3f}{part}",
            ]
            cells += [PUBLISHED.get(name, ""), f"{run['parameters']:,}", f"{run['epochs']:.1f}"]
            stopped = f", {run['stopped']}" if "stopped" in run else ""
            cells += [f"{run['steps']:,} of {run['batch']}{stopped}", f"{run['seconds']:.0f}"]
            said += f"| {' | '.join(cells)} |\n"
    return said + "\n"


def draw(folder: Path, path: Path, found: dict[str, Any]) -> None:
    """Samples of every row, with data beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in ROWS if samples_of(folder, name).exists()]
    if not names:
        return
    figure, axes = pyplot.subplots(1, len(names), figsize=(2.9 * len(names), 3.2), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        x = np.load(samples_of(folder, name))["samples"][:64]  # (64, C, H, W)
        _, c, h, w = x.shape
        grid = x.reshape(8, 8, c, h, w).transpose(0, 3, 1, 4, 2).reshape(8 * h, 8 * w, c)
        axis.imshow(grid[..., 0] if c == 1 else grid, cmap="gray", interpolation="nearest")
        runs = [run for key, run in found.items() if key.rpartition("/")[0] == name]
        axis.set_title(
            name.replace("/", ", ") + (f"\n{runs[0]['one']['bits']:.2f} bits/dim" if runs else ""),
            fontsize=9,
        )
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(ROWS),
        choices=list(ROWS),
        metavar="ROW",
        help=", ".join(ROWS),
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="of training, for every row")
    parser.add_argument("--judge-seconds", type=float, help="of judging with K = 20")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--margin", type=float, help="of the logits")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    parser.add_argument("--no-half", action="store_true", help="no bfloat16 in networks")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.speed or given.memory:
        said = speed(given.device) if given.speed else memory()
        print(said)
        where = "-cuda" if given.device == "cuda" else ""
        path = given.out / f"images-{'speed' if given.speed else 'memory'}{where}.md"
        path.write_text(said + made(given.device) + "\n")
        return
    out = (
        given.out
        if not (given.small or given.held)
        else Path(tempfile.gettempdir()) / "bayou-images"
    )
    out.mkdir(parents=True, exist_ok=True)
    changed: dict[str, Any] = {
        "device": given.device,
        "held": given.held,
        "graph": not given.no_graph,
        "folder": out,
    }
    changed |= {"half": False} if given.no_half else {}
    changed |= {
        k: v
        for k in ("seconds", "judge_seconds", "batch", "lr")
        if (v := getattr(given, k)) is not None
    }
    rows = {name: replace(ROWS[name], **changed) for name in given.only}
    if given.small:
        quick: dict[str, Any] = {
            "small": True,
            "batch": 32,
            "judge_seconds": 2,
            "seconds": given.seconds or 10,
        }
        rows = {
            name: replace(
                row, model=row.model | TINY["flow++" if "flow++" in name else "glow"], **quick
            )
            for name, row in rows.items()
        }
    if given.margin is not None:
        rows = {
            name: replace(row, model=row.model | {"margin": given.margin})
            for name, row in rows.items()
        }
    path = out / "images.json"
    jobs = [] if given.redraw else [(name, seed) for seed in range(given.seeds) for name in rows]
    for job, found in spread(work, jobs, rows, given.jobs):
        keep(path, job, found)
        print(
            f"  {job[0]}: {found['one']['bits']:.4f}, K = 20: {found['many']['bits']:.4f} bits/dim",
            flush=True,
        )
    found = kept(path)
    said = table(found)
    print(said)
    if not (given.held or given.small) and found:
        commands = path.with_suffix(".md")
        last = made(given.device) if jobs else commands.read_text().rstrip().rpartition("\n")[2]
        commands.write_text(said + last + "\n")
    with suppress(ImportError):
        draw(out, PICTURE if given.redraw and out == RESULTS else out / "images.png", found)


if __name__ == "__main__":
    main()
