"""Cost of being Bayesian: a training step and a 20-sample prediction of a LeNet, relative to the
plain network.

python experiments/measure/posteriors.py --write

LeNet 20-50-500 on 28×28 inputs, batch 128, float32, Adam. Contestants take turns within a round, so
that a busy machine slows all of them alike; the ratio is the number to read. Peak memory is that of
a process of its own. bayesian-torch is among them where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou.guides.gaussian import Factorized
from bayou.methods.ivon import OnlineNewton
from bayou.network.target import Target
from bayou.posteriors import Guided

BATCH, SAMPLES, N = 128, 20, 60_000
RESULTS = Path(__file__).parents[1] / "results" / "posteriors.md"
FAMILIES: dict[str, bayou.guides.GuideSpec | None] = {
    "plain network": None,
    "FFG": bayou.MeanField(),
    "FFG, noise per position": bayou.MeanField(local="positions"),
    "FFG, weight sampling": bayou.MeanField(local=False),
    "MNF, z per batch": bayou.MNF(),
    "MNF, noise per position": bayou.MNF(local="positions"),
    "MNF, z per example": bayou.MNF(z="example"),
    "MNF, paper's auxiliary": bayou.MNF(auxiliary="paper"),
    "NodeFlow": bayou.NodeFlow(),
    "Dropout": bayou.Dropout(),
    "SparseVD": bayou.SparseVD(),
    "IVON": bayou.MeanField(local=False),
}
PEERS = {f"bayesian-torch, {kind.lower()}": kind for kind in ("Reparameterization", "Flipout")}
INSTALLED = importlib.util.find_spec("bayesian_torch") is not None


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def as_peer(net: nn.Module, kind: str) -> Callable[[nn.Module], torch.Tensor]:
    """The network with the layers of bayesian-torch, and its KL."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    start = {
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    dnn_to_bnn(net, {"prior_mu": 0.0, "prior_sigma": 1.0, "type": kind} | start)
    found: Callable[[nn.Module], torch.Tensor] = get_kl_loss
    return found


def contestant(name: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A training step and a prediction."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    net, spec = lenet(), FAMILIES.get(name)
    if spec is None:
        kl = as_peer(net, PEERS[name]) if name in PEERS else None
        optimizer = torch.optim.Adam(net.parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            (loss if kl is None else loss + kl(net) / N).backward()
            optimizer.step()

        @torch.no_grad()
        def predict() -> torch.Tensor:
            return torch.stack([net(x) for _ in range(SAMPLES)])

        return step, predict
    bnn = bayou.bayesianize(net, spec, example=x)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(bnn.parameters())
    if name == "IVON":
        optimizer = OnlineNewton(
            [g for g in bnn.guides if isinstance(g, Factorized)], [], N, bayou.IVON(), 0.999
        )
    posterior = Guided(Target.build(net, bayou.Categorical(), None, N), bnn)

    def bayesian_step() -> None:
        optimizer.zero_grad()
        draw = bnn.draw(examples=BATCH if bnn.per_example else None)
        loss = F.cross_entropy(draw(x), y)
        (
            loss if name == "IVON" else loss + draw.kl / N
        ).backward()  # IVON has the prior in its update
        optimizer.step()

    return bayesian_step, lambda: posterior.predict(x, samples=SAMPLES, seed=0)


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def peak_memory(name: str) -> float:
    """MiB above the start, of a fresh process that takes three steps and one prediction."""
    out = subprocess.run(
        [sys.executable, __file__, "--memory", name], capture_output=True, text=True, check=True
    )
    return float(out.stdout)


def peak() -> float:
    """The most memory this process has held, in MiB (Linux; ru_maxrss would count that of the
    parent too).
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure_memory(name: str) -> None:
    before = peak()
    step, predict = contestant(name)
    for _ in range(3):
        step()
    predict()
    print(peak() - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns that every contestant takes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor seconds instead of wall seconds"
    )
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    parser.add_argument("--memory", choices=[*FAMILIES, *PEERS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(options.memory)
        return
    clock = time.process_time if options.cpu_time else time.perf_counter
    contestants = {name: contestant(name) for name in (*FAMILIES, *(PEERS if INSTALLED else ()))}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contestants}
    for turn in range(options.rounds + 1):
        print(f"\rround {turn}/{options.rounds}", end="", file=sys.stderr, flush=True)
        for name, calls in contestants.items():
            for call, found in zip(calls, times[name], strict=True):
                seconds = timed(call, clock)
                if turn:  # the first turn warms up
                    found.append(seconds)
    plain_step, plain_predict = (median(found) for found in times["plain network"])
    command = "python experiments/measure/posteriors.py " + " ".join(sys.argv[1:])
    lines = [
        "# What it costs to be Bayesian",
        "",
        f"LeNet 20-50-500, batch {BATCH}, float32, Adam; times are medians of {options.rounds} interleaved rounds, ",
        "ratios are to the plain network. Prediction: 20 function samples against 20 plain passes.",
        "",
        "| family | step, ms | step, ratio | prediction, ms | prediction, ratio | peak memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, (steps, predictions) in times.items():
        step, predict = median(steps), median(predictions)
        lines.append(
            f"| {name} | {step * 1e3:.1f} | ×{step / plain_step:.2f} | {predict * 1e3:.0f} | "
            f"×{predict / plain_predict:.2f} | {peak_memory(name):.0f} |"
        )
    lines += [
        "",
        f"`{command.strip()}`, {date.today()}, bayou {bayou.__version__}, torch {importlib.metadata.version('torch')}, "
        f"Python {platform.python_version()}, {platform.machine()}, {options.threads} threads, "
        f"{'processor' if options.cpu_time else 'wall'} time.",
    ]
    text = "\n".join(lines) + "\n"
    print("\r" + text)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
