"""Speed of bayou's flows against zuko, nflows and normflows, in one interleaved run.

python experiments/measure/flows.py --write

Every library gets the same architecture: D = 32, 8 layers, ReLU conditioners with hidden layers of
64 and 64, 8 bins on [-5, 5], the same fused Adam. Contestants take turns within a round, so that a
busy machine slows all of them alike; on a very busy one use --threads 1 --clock cpu, since two
threads then mostly wait for each other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

DIM, LAYERS, HIDDEN, BINS, BOUND, BATCH = 32, 8, (64, 64), 8, 5.0, 512
PEERS = ("zuko", "nflows", "normflows")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
RESULTS = Path(__file__).parents[1] / "results" / "flows.md"


@dataclass(frozen=True)
class Model:
    """A flow of any library, seen through its two verbs."""

    module: nn.Module
    log_prob: Callable[[Tensor], Tensor]
    sample: Callable[[int], Tensor]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.module.parameters())


def bayou_model(kind: str) -> Model:
    from bayou import flows

    flow = flows.Flow(
        flows.StandardNormal(DIM), getattr(flows, kind)(DIM, layers=LAYERS, hidden=HIDDEN)
    )
    return Model(flow, flow.log_prob, flow.sample)


def zuko_model(kind: str) -> Model:
    import zuko

    size: dict[str, Any] = {"features": DIM, "transforms": LAYERS, "hidden_features": HIDDEN}
    spline = {
        "univariate": zuko.transforms.MonotonicRQSTransform,
        "shapes": [(BINS,), (BINS,), (BINS - 1,)],
    }
    flow = {
        "realnvp": lambda: zuko.flows.RealNVP(**size),
        "maf": lambda: zuko.flows.MAF(**size),
        "spline_autoregressive": lambda: zuko.flows.NSF(bins=BINS, **size),
        # NSF(passes=2) would spend half of its network on features that depend on nothing.
        "spline_coupling": lambda: zuko.flows.RealNVP(**size, **spline),
    }[kind]()
    return Model(flow, lambda x: flow().log_prob(x), lambda n: flow().sample((n,)))


class ContextMLP(nn.Sequential):
    """The conditioner for nflows and normflows couplings, whose own networks are residual, thus
    larger.
    """

    hidden_features = HIDDEN[0]  # they scale spline parameters by its root

    def __init__(self, inputs: int, outputs: int) -> None:
        first, second = HIDDEN
        super().__init__(
            nn.Linear(inputs, first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, outputs),
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x)


def nflows_model(kind: str) -> Model:
    from nflows import distributions, flows, transforms

    def mask(layer: int) -> Tensor:
        return (torch.arange(DIM) + layer) % 2

    net: dict[str, Any] = {"hidden_features": HIDDEN[0], "use_residual_blocks": False}
    spline: dict[str, Any] = {"num_bins": BINS, "tails": "linear", "tail_bound": BOUND}
    layer = {
        "realnvp": lambda i: [transforms.AffineCouplingTransform(mask(i), ContextMLP)],
        "spline_coupling": lambda i: [
            transforms.PiecewiseRationalQuadraticCouplingTransform(mask(i), ContextMLP, **spline)
        ],
        "spline_autoregressive": lambda i: [
            transforms.ReversePermutation(DIM),
            transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                DIM, num_blocks=1, **net, **spline
            ),
        ],
    }
    if kind == "maf":
        flow = flows.MaskedAutoregressiveFlow(DIM, num_layers=LAYERS, num_blocks_per_layer=1, **net)
    else:
        parts = [part for i in range(LAYERS) for part in layer[kind](i)]
        flow = flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([DIM]))
    return Model(flow, flow.log_prob, flow.sample)


def normflows_model(kind: str) -> Model:
    import normflows as nf
    from normflows.flows.neural_spline import autoregressive, coupling
    from normflows.utils.masks import create_alternating_binary_mask

    net: dict[str, Any] = {
        "hidden_features": HIDDEN[0],
        "num_blocks": 1,
        "use_residual_blocks": False,
    }
    spline: dict[str, Any] = {"num_bins": BINS, "tails": "linear", "tail_bound": BOUND}
    # Its autoregressive layers score slowly and sample fast unless reversed, and have one ReLU less
    # than the others.
    layer = {
        "realnvp": lambda i: [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([DIM // 2, *HIDDEN, DIM], init_zeros=True)),
            nf.flows.Permute(DIM, mode="swap"),
        ],
        "maf": lambda i: [
            nf.flows.Reverse(nf.flows.MaskedAffineAutoregressive(DIM, **net)),
            nf.flows.Permute(DIM),
        ],
        "spline_autoregressive": lambda i: [
            nf.flows.Reverse(
                autoregressive.MaskedPiecewiseRationalQuadraticAutoregressive(DIM, **net, **spline)
            ),
            nf.flows.Permute(DIM),
        ],
        "spline_coupling": lambda i: [
            nf.flows.Reverse(
                coupling.PiecewiseRationalQuadraticCoupling(
                    create_alternating_binary_mask(DIM, even=i % 2 == 0), ContextMLP, **spline
                )
            )
        ],
    }[kind]
    parts = [part for i in range(LAYERS) for part in layer(i)]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(DIM, trainable=False), parts)
    return Model(flow, flow.log_prob, lambda n: flow.sample(n)[0])


BUILDERS = {
    "bayou": bayou_model,
    "zuko": zuko_model,
    "nflows": nflows_model,
    "normflows": normflows_model,
}


def training_step(model: Model, compiled: bool) -> Callable[[], object]:
    x = torch.randn(BATCH, DIM)
    optimizer = torch.optim.Adam(model.module.parameters(), lr=1e-4, fused=True)

    def loss_of(x: Tensor) -> Tensor:
        return -model.log_prob(x).mean()

    loss = torch.compile(loss_of, fullgraph=True) if compiled else loss_of

    def step() -> None:
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()

    return step


def sampling(model: Model, compiled: bool) -> Callable[[], object]:
    draw = torch.compile(model.sample, fullgraph=True) if compiled else model.sample

    @torch.no_grad()
    def step() -> Tensor:
        return draw(BATCH)

    return step


ROWS: dict[str, tuple[str, Callable[[Model, bool], Callable[[], object]]]] = {
    "RealNVP training step": ("realnvp", training_step),
    "MAF training step": ("maf", training_step),
    "spline autoregressive training step": ("spline_autoregressive", training_step),
    "spline coupling training step": ("spline_coupling", training_step),
    "MAF sampling": ("maf", sampling),
    "spline autoregressive sampling": ("spline_autoregressive", sampling),
}


@dataclass
class Contestant:
    name: str
    step: Callable[[], object]
    parameters: int
    compile_s: float = 0.0
    times: list[float] = field(default_factory=list)  # milliseconds, one a round

    def run(self, clock: Callable[[], float]) -> float:
        start = clock()
        self.step()
        return (clock() - start) * 1e3


@dataclass
class Result:
    row: str
    contestants: dict[str, Contestant]
    absent: dict[str, str]  # name -> why

    @property
    def rounds(self) -> int:
        return min(len(c.times) for c in self.contestants.values())

    @property
    def fastest_peer(self) -> Contestant | None:
        peers = [c for name, c in self.contestants.items() if name in PEERS]
        return min(peers, key=lambda c: median(c.times), default=None)

    def speedup(self, name: str) -> float | None:
        """Median over rounds of the time of the fastest peer over that of the contestant."""
        peer, own = self.fastest_peer, self.contestants.get(name)
        if peer is None or own is None:
            return None
        return median(theirs / ours for theirs, ours in zip(peer.times, own.times, strict=True))


def progress(text: str, end: str = "") -> None:
    print(
        f"\r\033[K{text}" if sys.stderr.isatty() else text,
        file=sys.stderr,
        end=end or "",
        flush=True,
    )
    if not sys.stderr.isatty() and not end:
        print(file=sys.stderr)


def run_row(row: str, args: argparse.Namespace, label: str) -> Result:
    """Time every contestant of a row, round-robin, for so many rounds or seconds (but five rounds
    at least).
    """
    kind, task = ROWS[row]
    compile_it = not args.no_compile and (task is not sampling or args.compile_sampling)
    torch.compiler.reset()  # one row's graphs must not slow the guards of the next
    contestants: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    for name in ["bayou", *(["bayou compiled"] if compile_it else []), *PEERS]:
        progress(f"{label} {row}: building {name}")
        try:
            torch.manual_seed(0)
            model = BUILDERS[name.split()[0]](kind)
            entry = Contestant(name, task(model, name == "bayou compiled"), model.size)
            first = entry.run(time.perf_counter)
            warm = min(entry.run(time.perf_counter) for _ in range(2))
        except ModuleNotFoundError as error:
            absent[name] = "not installed" if error.name == name else f"failed: {error}"
        except (
            Exception
        ) as error:  # a contestant that fails is named in the table; the others run on
            absent[name] = (
                f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
            )
        else:
            entry.compile_s = max(0.0, first - warm) / 1e3 if name == "bayou compiled" else 0.0
            contestants[name] = entry
    order, start = list(contestants.values()), time.perf_counter()
    for done in range(args.rounds if order else 0):
        if done >= 5 and time.perf_counter() - start > args.seconds:
            break
        if sys.stderr.isatty() or done == 0:
            progress(f"{label} {row}: round {done + 1}/{args.rounds}")
        for entry in order[done % len(order) :] + order[: done % len(order)]:
            entry.times.append(entry.run(CLOCKS[args.clock]))
    return Result(row, contestants, absent)


def cpu() -> str:
    try:
        lines = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
    except (OSError, subprocess.CalledProcessError):
        names = []
    return f"{names[0] if names else platform.processor()} ({platform.machine()})"


def version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} (source tree)" if name == "bayou" else f"{name} **missing**"


def report(results: list[Result], args: argparse.Namespace, load: float) -> str:
    """The results as a page of Markdown."""
    command = shlex.join(["python", "experiments/measure/flows.py", *sys.argv[1:]])
    names = ["bayou", "bayou compiled", *PEERS]

    def cell(result: Result, name: str) -> str:
        entry = result.contestants.get(name)
        if entry is None:
            return "–" if name not in result.absent else result.absent[name].split(":")[0]
        low = min(entry.times)
        digits = 0 if low >= 100 else 1
        return f"{median(entry.times):.{digits}f} ({low:.{digits}f})"

    def ratio(result: Result, name: str) -> str:
        value = result.speedup(name)
        return "–" if value is None else f"{value:.2f}×"

    def row(*cells: str) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [
        "# Flows: bayou against its peers",
        "",
        f"`{command}` on {date.today()}: {cpu()}, threads: {args.threads}, load average "
        f"{load:.1f} at the start, Python {platform.python_version()}, float32;",
        ", ".join(version(name) for name in ("torch", "bayou", *PEERS)) + ".",
        "",
        f"D = {DIM}, {LAYERS} layers, hidden {HIDDEN[0]}×{HIDDEN[1]}, {BINS} bins, batch {BATCH}. Milliseconds of"
        f" {args.clock} time, median (minimum) over interleaved rounds. A training step",
        "is `zero_grad`, `-log_prob(x).mean().backward()` and a fused Adam step. Speed-up: median over rounds of the",
        "time of the fastest peer over bayou's in the same round; above 1 bayou is faster.",
        "",
        row("", *names, "fastest peer", "speed-up eager", "speed-up compiled", "rounds"),
        row("---", *["---:"] * len(names), "---", "---:", "---:", "---:"),
    ]
    for result in results:
        peer = result.fastest_peer
        cells = [cell(result, name) for name in names]
        ratios = ratio(result, "bayou"), ratio(result, "bayou compiled")
        rounds = str(result.rounds) if result.contestants else "0"
        lines.append(row(result.row, *cells, peer.name if peer else "–", *ratios, rounds))
    libraries = ["bayou", *PEERS]
    lines += ["", "Parameters, and seconds to compile (the first call less a warm one):", ""]
    lines += [row("", *libraries, "compile"), row("---", *["---:"] * (len(libraries) + 1))]
    for result in results:
        counts = [
            f"{e.parameters:,}" if (e := result.contestants.get(name)) else "–"
            for name in libraries
        ]
        compile_s = (
            f"{e.compile_s:.0f} s" if (e := result.contestants.get("bayou compiled")) else "–"
        )
        lines.append(row(result.row, *counts, compile_s))
    absent = [
        f"- {result.row}, {name}: {why}"
        for result in results
        for name, why in result.absent.items()
    ]
    lines += ["", "Missing:", "", *absent] if absent else []
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds of every row (default 60)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90,
        help="end a row after so long, not before 5 rounds (90)",
    )
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), metavar="ROW", help="rows whose name has this text"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out bayou compiled")
    parser.add_argument(
        "--compile-sampling",
        action="store_true",
        help="compile sampling too: every step is unrolled, which takes long",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to experiments/results/flows.md"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="wall or process time (default wall)"
    )
    args = parser.parse_args()
    rows = [row for row in ROWS if any(text.lower() in row.lower() for text in args.rows)]
    if not rows or args.rounds < 1 or args.threads < 1:
        parser.error(
            f"need at least one round, one thread and one row; the rows are: {', '.join(ROWS)}"
        )

    if (
        "BAYOU_BENCH" not in os.environ
    ):  # both variables are read once, before main runs; compile times start cold
        with tempfile.TemporaryDirectory() as cache:
            fixed = {
                "OMP_NUM_THREADS": str(args.threads),
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "BAYOU_BENCH": "1",
            }
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | fixed).returncode)
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")  # of the peers
    load, results = os.getloadavg()[0], []
    for i, row in enumerate(rows, 1):
        results.append(run_row(row, args, f"[{i}/{len(rows)}]"))
    progress("done", end="\n")
    page = report(results, args, load)
    print(page)
    if args.write:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(page)


if __name__ == "__main__":
    main()
