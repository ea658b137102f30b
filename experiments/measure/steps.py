"""The time of a training step on a GPU: eager, and compiled and replayed as one CUDA graph with its
optimizer.

    python experiments/measure/steps.py --write
    python experiments/measure/steps.py --second-fit    # when a first and a second compiled run are under
    way

LeNet 20-50-500, batch 128 and 1024, TF32, Adam, data on the device; the time is that of
``bayou.fit`` itself, data and bookkeeping included, from the difference of two points of its
history.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayou

RESULTS = Path(__file__).parents[1] / "results" / "steps.md"
N = 60_000 // 128 * 128


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


METHODS: dict[str, Any] = {
    "plain (MLE)": bayou.MLE(),
    "MAP": bayou.MAP(),
    "FFG": bayou.VI(bayou.MeanField()),
    "MNF": bayou.VI(bayou.MNF()),
    "MNF, no flow": bayou.VI(bayou.MNF(None)),
    "MNF, paper's auxiliary": bayou.VI(bayou.MNF(auxiliary="paper")),
}


def measure(method: Any, batch: int, compiled: bool, steps: int) -> float:
    """Milliseconds a step."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 1, 28, 28, device="cuda"), torch.randint(10, (N,), device="cuda")
    torch.compiler.reset()
    warm = 100
    method = replace(
        method, steps=warm + steps + 1, batch_size=batch, compile=compiled, log_every=warm
    )
    history = bayou.fit(lenet().cuda(), (x, y), method=method, progress=False).history
    first, last = history[1], history[-1]
    return 1e3 * (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])


def start(method: Any, device: str) -> tuple[float, float]:
    """Seconds that a compiled run of ten steps takes, most of them before the steps, and its
    processor seconds.
    """
    torch.manual_seed(0)
    x, y = torch.randn(1280, 1, 28, 28, device=device), torch.randint(10, (1280,), device=device)
    began, used = time.perf_counter(), time.process_time()
    bayou.fit(
        lenet().to(device), (x, y), method=replace(method, steps=10, compile=True), progress=False
    )
    return time.perf_counter() - began, time.process_time() - used


def second_fit(names: list[str]) -> None:
    """Print when the first and the second compiled run of the same network and method in a process
    are under way.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"| method, {device} | first run, s | second run, s | processor seconds of it |",
        "|---|---:|---:|---:|",
        sep="\n",
    )
    for name in names:
        (first, _), (second, used) = start(METHODS[name], device), start(METHODS[name], device)
        print(f"| {name} | {first:.1f} | {second:.2f} | {used:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--second-fit",
        action="store_true",
        help="time the start of a first and a second run instead",
    )
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="write the table")
    args = parser.parse_args()
    if args.second_fit:
        second_fit(args.only)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    lines = [
        "# The time of a training step on a GPU",
        "",
        "LeNet 20-50-500, TF32, Adam: milliseconds a step of `bayou.fit`, data and bookkeeping included; in brackets",
        "the ratio to the plain network's replayed step.",
        "",
        "| method | batch | eager | compiled, one CUDA graph |",
        "|---|---:|---:|---:|",
    ]
    for batch in args.batches:
        plain = None
        for name in args.only:
            eager = measure(METHODS[name], batch, False, max(100, args.steps // 10))
            graph = measure(METHODS[name], batch, True, args.steps)
            plain = graph if plain is None else plain
            lines.append(f"| {name} | {batch} | {eager:.2f} | {graph:.3f} (×{graph / plain:.2f}) |")
            print(lines[-1], flush=True)
    lines += [
        "",
        f"`python experiments/measure/steps.py {shlex.join(sys.argv[1:])}`, {date.today()}, bayou {bayou.__version__}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, {torch.cuda.get_device_name()}.",
        "",
    ]
    if args.write:
        args.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
