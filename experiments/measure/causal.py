"""Autoregressive flows over images by causal networks: bits per dimension, draws, and what a draw
costs.

    python -m experiments.measure.causal --device cuda --jobs 4 --seconds 200     # MNIST and Fashion, every
    model
    python -m experiments.measure.causal --speed --device cuda                    # draws with a cache beside
    the whole pass
    python -m experiments.measure.causal --redraw                                 # table and picture again
    python -m experiments.measure.causal --small                                  # a trial on a CPU: every
    second pixel
    python -m experiments.measure.causal --choose --small                         # elementwise maps, on
    held-out training images

Each row trains for ``--seconds`` of wall clock, its learning rate falling with the clock, and keeps
the parameters that were best on 5,000 training images held out; the 10,000 test images are looked
at once. Bounds: one dequantization a test image, and what 20 importance samples gain on as many of
them as a third of the training time allows ("weighed").
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.data import load
from bayou.flows import (
    Affine,
    Autoregressive,
    CausalTransformer,
    Chain,
    Dequantize,
    DiagonalAffine,
    Flow,
    PixelCNN,
    Spline,
    StandardNormal,
    Transform,
    WaveNet,
    fit,
    logistic_mixture,
    pixelcnn,
    transformer_flow,
)
from bayou.flows.fitting.fit import HistoryRow
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "causal.png"
HELD, SPAN, DRAWS = 5000, 3.0, 40  # rows held out; pixels are in ±SPAN; images in the picture
PUBLISHED = (
    "MNIST, bits per dimension as published: RealNVP 1.06, Glow 1.05, FFJORD .99, Residual .970."
)
Event = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """A flow over images and how it is trained."""

    build: Callable[[Event], Transform]
    lr: float
    batch: int
    says: str


SPLINE = Spline(16, 4.0)


def _models(small: bool) -> dict[str, Model]:
    if small:
        deep = {"width": 32, "depth": 2}
        return {
            "transformer": Model(
                lambda e: transformer_flow(e, 2, **deep, patch=2, elementwise=SPLINE), 4e-3, 64, "small"),
            "pixelcnn": Model(lambda e: pixelcnn(e, 1, 16, 3, elementwise=SPLINE), 4e-3, 64, "small"),
            "tarflow": Model(lambda e: transformer_flow(e, 4, **deep, patch=2), 4e-3, 64, "small"),
            "transformer, mixture": Model(
                lambda e: transformer_flow(e, 2, **deep, patch=2, elementwise=logistic_mixture(8)), 4e-3, 64, "small"),
        }  # fmt: skip
    return {
        "transformer": Model(
            lambda e: transformer_flow(e, 2, 192, 5, 6, 2, SPLINE), 1.5e-3, 128,
            "2 layers of 5 blocks, width 192, patches 2×2, splines of 16 bins"),
        "pixelcnn": Model(
            lambda e: pixelcnn(e, 1, 64, None, 7, SPLINE), 3e-3, 128,
            "1 layer of 9 gated pairs, width 64, kernel 7, splines of 16 bins"),
        "tarflow": Model(
            lambda e: transformer_flow(e, 6, 192, 2, 6, 2, Affine()), 1.5e-3, 128,
            "6 layers of 2 blocks, width 192, patches 2×2, affine maps"),
    }  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What all rows share."""

    device: str = "cpu"
    seconds: float = 200.0
    small: bool = False
    held: bool = False  # judge by held-out training images
    seed: int = 0
    rows: int | None = None  # of the test images; None: all
    changed: dict[str, float] = field(default_factory=dict)

    def model(self, name: str) -> Model:
        """The model with what the command changes."""
        changed: dict[str, Any] = self.changed
        return replace(_models(self.small)[name], **changed)

    def images(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels 0 to 255 to learn from, to choose by and to judge by, uint8 (rows, 1, H, W)."""
        data = load(name)
        low, high = float(data.train[0].min()), float(data.train[0].max())
        train, test = (
            (255 * (x - low) / (high - low)).round().to(torch.uint8)
            for x in (data.train[0], data.test[0])
        )
        if self.small:
            train, test = train[..., ::2, ::2], test[:500, :, ::2, ::2]
        held = train[-HELD:][: 500 if self.small else HELD]
        judges = (held if self.held else test)[: self.rows]
        return train[:-HELD].to(self.device), held.to(self.device), judges.to(self.device)


def flow_of(model: Model, event: Event, study: Study) -> Flow:
    """Base, autoregressive layers, [−SPAN, SPAN] to [0, 1], 256 levels."""
    torch.manual_seed(study.seed)
    scale = DiagonalAffine(event)
    scale.requires_grad_(False)
    scale.shift.fill_(0.5)
    scale.log_scale.fill_(-math.log(2 * SPAN))
    chain = Chain(model.build(event), scale, Dequantize(event, levels=256))
    return Flow(StandardNormal(event), chain).to(study.device)


def bits(
    flow: Flow, images: Tensor, samples: int = 1, limit: float = math.inf, rows: int = 500
) -> Tensor:
    """Of each image, as far as ``limit`` seconds go: bits per dimension of the bound, (rows,)."""
    flow.eval()
    found: list[Tensor] = []
    begun = time.monotonic()
    with torch.no_grad():
        for start in range(0, len(images), rows):
            if time.monotonic() - begun > limit:
                break
            y = images[start : start + rows].float()
            found.append(
                -flow.log_prob(y, samples=samples, seed=rng.fold(0, "bits"), start=start).cpu()
            )
    return torch.cat(found) / (images[0].numel() * math.log(2))


def train(
    flow: Flow, data: Tensor, held: Tensor, model: Model, study: Study, row: str
) -> dict[str, Any]:
    """Adam by the clock; the parameters that were best on rows that the fit holds out."""
    cuda, scale = study.device == "cuda", data[0].numel()
    adam = partial(
        torch.optim.AdamW, betas=(0.9, 0.98), weight_decay=1e-3, fused=True, capturable=cuda
    )

    def say(check: HistoryRow) -> None:
        print(
            f"  {row}: step {check.step}: held out {check.score / scale / math.log(2):.4f}",
            flush=True,
        )

    with (
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        if cuda
        else contextlib.nullcontext()
    ):
        found = fit(
            flow, data.float(), seconds=study.seconds, batch_size=model.batch, lr=model.lr, optimizer=adam, clip=scale,
            patience=None, seed=study.seed, progress=False, callback=say,
        )  # fmt: skip
    chosen = float(bits(flow, held[: study.rows or 2000]).mean())
    return {"steps": found.steps, "held": chosen, "epochs": found.steps * model.batch / len(data)}


def work(name: str, label: str, study: Study) -> dict[str, Any]:
    """One row: bits per dimension of the test images, and draws."""
    model = study.model(label)
    data, held, test = study.images(name)
    flow = flow_of(model, tuple(data.shape[1:]), study)  # type: ignore[arg-type]
    found = train(flow, data, held, model, study, f"{name}/{label}")
    begun = time.monotonic()
    one, many = bits(flow, test), bits(flow, test, 20, study.seconds / 3)
    gain = float((one[: len(many)] - many).mean())
    found |= {
        "bits": float(one.mean()),
        "error": float(one.std()) / math.sqrt(len(one)),
        "rows": len(test),
    }
    found |= {
        "importance": found["bits"] - gain,
        "weighed": len(many),
        "judging": time.monotonic() - begun,
    }
    begun = time.monotonic()
    drawn = flow.sample(DRAWS, seed=1).clamp(0, 255).to(torch.uint8).cpu()
    return found | {
        "drawing": time.monotonic() - begun,
        "side": drawn.shape[-1],
        "draws": base64.b64encode(zlib.compress(drawn.numpy().tobytes(), 9)).decode(),
        "parameters": sum(p.numel() for p in flow.parameters() if p.requires_grad),
        "says": model.says,
        "device": torch.cuda.get_device_name() if study.device == "cuda" else "CPU",
        "limit": study.seconds,
    }


def table(found: dict[str, Any]) -> str:
    """Bits per dimension, a line a row."""
    said = [
        "| data | model | parameters | bits/dim, one sample | 20 samples | images, weighed | held out | epochs "
        f"| s training | s for {DRAWS} draws |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, row in sorted(found.items()):
        name, label = key.split("/")
        said.append(
            f"| {name} | {label}: {row['says']} | {row['parameters'] / 1e6:.1f} M "
            f"| {row['bits']:.3f} ± {row['error']:.3f} | {row['importance']:.3f} | {row['rows']:,}, {row['weighed']:,} "
            f"| {row['held']:.3f} | {row['epochs']:.3g} | {row['limit']:.0f} | {row['drawing']:.1f} |"
        )
    return "\n".join([*said, "", PUBLISHED])


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws of every row."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(found), 1, figsize=(9, 1.35 * len(found)), squeeze=False)
    for axis, (key, row) in zip(axes[:, 0], sorted(found.items()), strict=True):
        side, across = row["side"], DRAWS // 2
        pixels = np.frombuffer(zlib.decompress(base64.b64decode(row["draws"])), np.uint8)
        sheet = (
            pixels.reshape(2, across, side, side).swapaxes(1, 2).reshape(2 * side, across * side)
        )
        axis.imshow(sheet, cmap="gray_r", interpolation="nearest")
        axis.set_title(f"{key.replace('/', ', ')}: {row['importance']:.2f} bits/dim", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# --- what a draw costs --------------------------------------------------------------------------


def seconds(run: Callable[[], object], device: str) -> float:
    """The least of two runs, after one to warm up."""
    times = []
    for _ in range(3):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


@torch.no_grad()
def speed(device: str, sides: list[int], batch: int) -> str:
    """All steps of an inverse, with a cache, beside one pass, and beside a pass for every step."""
    said = [
        "| network | D | steps | one pass, ms | all steps with a cache, ms | steps / pass | "
        "a pass for every coordinate, ms | gain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for side in sides:
        event = (1, side, side)
        nets = {
            "WaveNet, width 64": WaveNet((side * side, 1), 2, 64),
            "PixelCNN, width 64, 8 pairs": PixelCNN(event, 2, 64, 8),
            "Transformer, width 128, 4 blocks": CausalTransformer(event, 2, 128, 4),
            "Transformer, patches 2×2": CausalTransformer(event, 2, 128, 4, patch=2),
        }
        for name, net in nets.items():
            layer = Autoregressive(Affine(), net).to(device)
            x = torch.randn(batch, *net.event, device=device)
            one, steps = (seconds(partial(f, x), device) for f in (layer.forward, layer.inverse))
            said.append(
                f"| {name} | {net.dim} | {net.positions} | {1e3 * one:.1f} | {1e3 * steps:.0f} | {steps / one:.1f} | "
                f"{1e3 * net.dim * one:.0f} | {net.dim * one / steps:.0f}× |"
            )
            print(said[-1], flush=True)
    return "\n".join(said)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, help="of training, a row; 200, or 30 with --small")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--only", nargs="*", default=["mnist", "fashion"], choices=["mnist", "fashion"]
    )
    parser.add_argument(
        "--models", nargs="*", default=["transformer", "pixelcnn"], help="or tarflow"
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--choose", action="store_true", help="judge by held-out training images, and keep nothing"
    )
    parser.add_argument("--speed", action="store_true")
    parser.add_argument(
        "--sides", type=int, nargs="*", default=[8, 16, 28], help="of the images of --speed"
    )
    parser.add_argument("--rows", type=int, help="of the test images; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument(
        "--redraw", action="store_true", help="make table and picture again and run nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.speed:
        torch.set_num_threads(1)
        batch = given.batch or 64
        said = speed(given.device, given.sides, batch)
        head = f"Batch {batch}. One pass scores; all steps draw.\n\n"
        if not given.small:
            (given.out / f"causal-speed-{given.device}.md").write_text(
                f"{head}{said}\n\n{made(given.device)}\n"
            )
        return
    changed = {
        key: value for key, value in (("lr", given.lr), ("batch", given.batch)) if value is not None
    }
    limit = given.seconds or (30.0 if given.small else 200.0)
    study = Study(given.device, limit, given.small, given.choose, given.seed, given.rows, changed)
    path = given.out / "causal.json"
    jobs = [] if given.redraw else [(name, label) for label in given.models for name in given.only]
    tried: dict[str, Any] = {}
    for job, found in spread(work, jobs, study, given.jobs):
        tried["/".join(job)] = found
        print(
            f"  {found['bits']:.4f} bits/dim, {found['importance']:.4f} with 20 samples", flush=True
        )
        if not (given.small or given.choose):
            keep(path, job, found | {"command": made(given.device)})
    found = tried if given.small or given.choose else kept(path)
    print(table(found))
    if given.choose or not found or (given.small and given.out == RESULTS):
        return
    draw(found, PICTURE if given.out == RESULTS and not given.small else given.out / "causal.png")
    if not given.small:
        commands = "\n".join(sorted({row["command"] for row in found.values()}))
        path.with_suffix(".md").write_text(f"{table(found)}\n\n{commands}\n")


if __name__ == "__main__":
    main()
