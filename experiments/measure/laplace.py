"""Cost of Laplace: the pass over the data for every structure, in epochs of plain training of a
LeNet.

python experiments/measure/laplace.py --write

LeNet 20-50-500 (5×5 valid convolutions, 431,080 weights), 28×28 inputs, 10 classes, float32. One
unit is an epoch of forward + backward of the same network on the same data and batch size, without
an optimizer. Contestants take turns within a round, in processor seconds, so that a busy machine
slows all of them alike; the ratio is the number to read. Peak memory is that of a process of its
own (resource.getrusage), above the network and data it started with.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayou
from bayou.curvature.kronecker import KroneckerSum
from bayou.curvature.structures import DiagonalSum
from bayou.curvature.sweep import Sum, Sweep, make_plan
from bayou.network import Network

RESULTS = Path(__file__).parents[1] / "results" / "laplace.md"
CONTESTANTS: dict[str, tuple[type[Sum], str, str] | None] = {
    "forward + backward": None,
    "kronecker, sampled Fisher (default)": (KroneckerSum, "sampled", "*"),
    "kronecker, empirical Fisher": (KroneckerSum, "fisher", "*"),
    "kronecker, GGN": (KroneckerSum, "ggn", "*"),
    "diagonal, sampled Fisher": (DiagonalSum, "sampled", "*"),
    "diagonal, empirical Fisher": (DiagonalSum, "fisher", "*"),
    "diagonal, GGN (default)": (DiagonalSum, "ggn", "*"),
    "kronecker, GGN, last layer": (KroneckerSum, "ggn", "last"),
    "the whole of Laplace(start=None)": None,  # the default: the pass, eigenvalues, evidence, covariance
}
TARGETS = {
    "kronecker, sampled Fisher (default)": 3,
    "kronecker, empirical Fisher": 3,
    "diagonal, sampled Fisher": 3,
    "diagonal, empirical Fisher": 3,
    "diagonal, GGN (default)": 12,
    "the whole of Laplace(start=None)": 3,
}


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def contestant(name: str, batch: int, images: int) -> Callable[[], object]:
    """One pass over the data."""
    torch.manual_seed(0)
    x, y = torch.randn(images, 1, 28, 28), torch.randint(10, (images,))
    net = lenet()
    batches: list[tuple[Tensor, Tensor]] = list(zip(x.split(batch), y.split(batch), strict=True))
    given = CONTESTANTS[name]
    if name.startswith("the whole"):
        method = bayou.Laplace(start=None, batch_size=batch)
        return lambda: bayou.fit(net, (x, y), method=method, progress=False)
    if given is None:

        def epoch() -> None:
            for inputs, labels in batches:
                net.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()

        return epoch
    structure, kind, where = given
    network, params = Network(net), {n: p.detach() for n, p in net.named_parameters()}
    likelihood = bayou.Categorical().bind()

    def curvature() -> dict[str, Tensor]:
        plan = make_plan(
            network.call, params, None if where == "last" else list(params), (batches[0][0],)
        )
        total = structure({n: params[n].shape for n in plan.wanted}, plan, x)
        sweep = Sweep(network.call, params, plan, likelihood, kind, 1, 0)  # type: ignore[arg-type]
        for number, (inputs, labels) in enumerate(batches):
            list(sweep.batch((inputs,), labels, number, total))
        return total.tensors()

    return curvature


def peak() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(name: str, batch: int, images: int) -> float:
    """MiB above the start, of a fresh process that makes one pass."""
    command = [
        sys.executable,
        __file__,
        "--memory",
        name,
        "--batch",
        str(batch),
        "--images",
        str(images),
    ]
    # A shell in between, since a child begins with the peak of its parent.
    out = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *command], capture_output=True, text=True, check=True
    )
    return float(out.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns that every contestant takes")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    parser.add_argument("--memory", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        call = contestant(options.memory, options.batch[0], options.images)
        before = peak()
        call()
        print(peak() - before)
        return
    ratios: dict[tuple[str, int], float] = {}
    seconds: dict[tuple[str, int], float] = {}
    for batch in options.batch:
        calls = {name: contestant(name, batch, options.images) for name in CONTESTANTS}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(options.rounds + 1):
            print(
                f"\rbatch {batch}, round {turn}/{options.rounds} ",
                end="",
                file=sys.stderr,
                flush=True,
            )
            for name, call in calls.items():
                start = time.process_time()
                call()
                if turn:  # the first turn warms up
                    times[name].append(time.process_time() - start)
        for name, found in times.items():
            seconds[name, batch] = median(found)
            ratios[name, batch] = median(found) / median(times["forward + backward"])
    head = " | ".join(f"batch {b}, s | ratio | peak memory, MiB" for b in options.batch)
    lines = [
        "# What Laplace costs",
        "",
        f"LeNet 20-50-500, {options.images:,} images of 28×28, 10 classes, float32: processor seconds of one pass over",
        f"the data, medians of {options.rounds} interleaved rounds; ratios are to an epoch of forward + backward. Peak",
        "memory is above the network and data, in a process of its own.",
        "",
        f"| curvature | {head} | target |",
        "|---|" + "---|" * (3 * len(options.batch) + 1),
    ]
    for name in CONTESTANTS:
        cells = " | ".join(
            f"{seconds[name, b]:.2f} | ×{ratios[name, b]:.2f} | {memory(name, b, options.images):.0f}"
            for b in options.batch
        )
        target = f"≤ ×{TARGETS[name]}" if name in TARGETS else ""
        lines.append(f"| {name} | {cells} | {target} |")
    command = " ".join(["python experiments/measure/laplace.py", *sys.argv[1:]])
    lines += [
        "",
        f"`{command}`, {date.today()}, bayou {bayou.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, {options.threads} thread(s).",
        "",
    ]
    print("\n" + "\n".join(lines))
    if options.write:
        RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
