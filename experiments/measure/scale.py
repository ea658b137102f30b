"""What a posterior costs on larger networks, as multiples of plain training: time of a step,
memory, file.

    python experiments/measure/scale.py --write             # on a GPU
    python experiments/measure/scale.py --nets mlp          # a minute on a CPU

Random weights and data; AdamW in float32, with bf16 products (autocast) on a GPU; medians of steps.
Memory is the peak of a step on the device, with the network and its optimizer. "File" is the size
of what ``save`` writes, from the
tensors. Laplace has no step: its number is the time of a fit to 32 rows at the given network.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayou
from bayou.methods import IVONOptimizer

RESULTS = Path(__file__).parents[1] / "results"
N, CLASSES = 50_000, 10


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        self.short = (
            nn.Identity()
            if inputs == outputs
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.short(x) + self.norms[1](self.second(h)))


def resnet18() -> nn.Module:
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in zip((64, *widths), widths, strict=False)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )


class Attention(nn.Module):
    """Self-attention and a perceptron, each after a layer norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Of patches of an image (one label) or of tokens (the next token at every position)."""

    def __init__(self, width: int, depth: int, length: int, tokens: int | None) -> None:
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Embedding(tokens, width) if tokens else nn.Linear(3 * 16 * 16, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(Attention(width, width // 64, bool(tokens)) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens or CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.blocks(self.embed(x) + self.position))
        return self.head(h if self.tokens else h.mean(1))


def mlp(width: int = 512, depth: int = 3, classes: int = CLASSES) -> nn.Module:
    sizes = [64] + [width] * depth
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, classes))


class Net(NamedTuple):
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    tokens: int | None = None


NETS = {
    "mlp": Net(mlp, lambda: torch.randn(256, 64)),
    "ResNet-18": Net(resnet18, lambda: torch.randn(256, 3, 32, 32)),
    "ViT-S": Net(partial(Transformer, 384, 12, 196, None), lambda: torch.randn(128, 196, 768)),
    "GPT-S": Net(
        partial(Transformer, 768, 12, 512, 32_000), lambda: torch.randint(32_000, (16, 512)), 32_000
    ),
    "GPT-L": Net(
        partial(Transformer, 2048, 18, 512, 32_000), lambda: torch.randint(32_000, (8, 512)), 32_000
    ),
}
ROWS: dict[str, Any] = {
    "plain": None,
    "mean field": bayou.MeanField(),
    "mean field, last layer": "last",
    "MNF": bayou.MNF(),
    "node noise": bayou.guides.NodeNoise(),
    "IVON": IVONOptimizer,
    "Laplace, last layer": bayou.Laplace,
}


class Cost(NamedTuple):
    """Of one row: ``call`` does one step, ``numbers`` are the bytes of a file."""

    call: Callable[[], object]
    numbers: Callable[[], int]


def likelihood_of(net: Net) -> bayou.Categorical:
    return bayou.Categorical(class_axis=-1) if net.tokens else bayou.Categorical()


def contestant(net: Net, row: str, device: torch.device, draws: int = 1) -> Cost:
    """A row on a network that was just made."""
    torch.manual_seed(0)
    with device:
        model, x, spec = net.make(), net.x(), ROWS[row]
    with torch.no_grad():
        y = torch.randint(
            net.tokens or model(x).shape[-1], x.shape[: 2 if net.tokens else 1], device=device
        )

    def loss_of(f: Tensor) -> Tensor:
        return F.cross_entropy(f.float().flatten(0, -2), y.flatten())

    def stored(tensors: dict[str, Tensor]) -> int:
        return sum(value.nbytes for value in tensors.values())

    if spec is bayou.Laplace:
        few = (x[:32], y[:32])
        method = bayou.Laplace(where="last", start=None)
        found: list[Any] = []

        def curvature() -> None:
            options = {"likelihood": likelihood_of(net), "prior": bayou.Normal(), "progress": False}
            found[:] = [bayou.fit(model, few, method, **options)]

        return Cost(curvature, lambda: stored(found[0].state()[0]))
    if spec is None or spec is IVONOptimizer:
        params = list(model.parameters())
        optimizer = (
            torch.optim.AdamW(params, 1e-4) if spec is None else IVONOptimizer(params, 1e-3, n=N)
        )

        def plain() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(model(x))
            loss.backward()
            return loss

        def step() -> None:
            if spec is None:
                plain()
                optimizer.step()
            else:
                with optimizer.sampled_params(train=True):
                    plain()
                optimizer.step()

        copies = 1 if spec is None else 2
        return Cost(step, lambda: copies * stored(dict(model.named_parameters())))
    rules: Any = spec
    if spec == "last":
        names = [name for name, _ in model.named_parameters()][-2:]
        rules = {name: bayou.MeanField() for name in names} | {"*": bayou.Delta()}
    bnn = bayou.bayesianize(model, rules, example=x[:2])
    adam = torch.optim.AdamW(bnn.parameters(), 1e-4)

    def bayesian() -> None:
        adam.zero_grad()
        for _ in range(draws):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                draw = bnn.draw(examples=len(x) if bnn.per_example else None)
                loss = loss_of(draw(x)) + draw.kl / N
            (loss / draws).backward()
        adam.step()

    return Cost(bayesian, lambda: stored(bnn.posterior(likelihood_of(net), N).state()[0]))


def measured(
    net: Net, row: str, device: torch.device, rounds: int, draws: int = 1
) -> dict[str, float]:
    """Seconds of a step, peak bytes and bytes of the file."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cost, times = contestant(net, row, device, draws), []
    for _ in range(2 if ROWS[row] is bayou.Laplace else rounds + 2):
        start = time.perf_counter()
        cost.call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": median(times[2:] or times[1:]), "peak": peak, "file": cost.numbers()}


def table(names: list[str], device: torch.device, rounds: int) -> list[str]:
    lines = [
        "| network | row | step, ms | × plain | memory, GiB | × plain | file, MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        plain: dict[str, float] = {}
        with torch.device("meta"):
            count = sum(value.numel() for value in NETS[name].make().parameters()) / 1e6
        for row in ROWS:
            try:
                found = measured(NETS[name], row, device, rounds)
            except (RuntimeError, ValueError) as error:
                lines.append(
                    f"| {name}, {count:.1f}M | {row} | {' '.join(str(error).split())[:120]} | | | | |"
                )
                print(lines[-1], flush=True)
                continue
            plain = plain or found
            memory = f"{found['peak'] / 2**30:.2f} | ×{found['peak'] / max(plain['peak'], 1):.2f}"
            ratio, file = found["seconds"] / plain["seconds"], f"{found['file'] / 1e6:,.1f}"
            lines.append(
                f"| {name}, {count:.1f}M | {row} | {1e3 * found['seconds']:.1f} | ×{ratio:.2f} | {memory} | {file} |"
            )
            print(lines[-1], flush=True)
    return lines


def growth(device: torch.device, rounds: int) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The ratio of a step to a plain one, along width, depth, classes and draws of a perceptron."""
    axes = {
        "width": [
            (w, Net(partial(mlp, w), lambda: torch.randn(256, 64)), 1)
            for w in (128, 512, 2048, 8192)
        ],
        "depth": [
            (d, Net(partial(mlp, 512, d), lambda: torch.randn(256, 64)), 1) for d in (1, 4, 16, 64)
        ],
        "classes": [
            (c, Net(partial(mlp, 512, 3, c), lambda: torch.randn(256, 64)), 1)
            for c in (10, 100, 1000, 32_000)
        ],
        "draws": [(s, Net(mlp, lambda: torch.randn(256, 64)), s) for s in (1, 2, 4, 8)],
    }
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for axis, points in axes.items():
        for number, net, draws in points:
            plain = measured(net, "plain", device, rounds)["seconds"]
            for row in ("mean field", "MNF", "node noise", "IVON", "Laplace, last layer"):
                if axis == "draws" and row in ("IVON", "Laplace, last layer"):
                    continue
                seconds = measured(net, row, device, rounds, draws)["seconds"]
                found.setdefault(axis, {}).setdefault(row, []).append((number, seconds / plain))
    return found


def draw(found: dict[str, dict[str, list[tuple[int, float]]]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), sharey=True, layout="constrained")
    for axis, (name, rows) in zip(axes, found.items(), strict=True):
        for row, points in rows.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=row)
        numbers = [number for number, _ in points]
        axis.set(xscale="log", yscale="log", xlabel=name)
        axis.set_xticks(numbers, [f"{number:,}" for number in numbers])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time of a step, × plain")
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", default=",".join(NETS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--write", action="store_true", help="write scale.md and scale.png, with the growth"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    lines = table(options.nets.split(","), device, options.rounds)
    if options.write:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        head = (
            "# What a posterior costs on larger networks\n\n" + (__doc__ or "").split("\n\n", 2)[2]
        )
        found = growth(device, options.rounds)
        options.out.mkdir(exist_ok=True)
        draw(found, options.out / "scale.png")
        rows = [
            f"| {axis} | {row} | " + ", ".join(f"{number:,}: ×{ratio:.2f}" for number, ratio in points) + " |"
            for axis, each in found.items() for row, points in each.items()
        ]  # fmt: skip
        command = shlex.join(["python", "experiments/measure/scale.py", *sys.argv[1:]])
        foot = f"`{command}`, {date.today()}, torch {torch.__version__}, {machine}."
        grown = [
            "",
            "![growth](scale.png)",
            "",
            "| along | row | time of a step |",
            "|---|---|---|",
            *rows,
            "",
            foot,
        ]
        (options.out / "scale.md").write_text(
            "\n".join([head, *lines, *grown]) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
