"""Smaller networks: LeNet-300-100 and LeNet-5 on MNIST by SparseVD, NormalJeffreys and HalfCauchy.

    python -m experiments.measure.compress --choose --epochs 40 --device cuda  # settings, on 5,000 training
    images held out
    python -m experiments.measure.compress --device cuda              # with these: test error, size, time;
    writes the table
    python -m experiments.measure.compress --small                    # a trial on a CPU: 1,000 images, no
    file

The fits run side by side, each in a process of its own (``--jobs``). What is written:
``results/compress.md``, and by ``--choose`` ``results/compress-choice.json``. Published: Molchanov
2017 (SparseVD, non-zero weights) and Louizos 2017.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import os
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayou
from bayou.app.runs.layers import dense, lenet
from bayou.data import load
from bayou.guides import GuideSpec

RESULTS = Path(__file__).parents[1] / "results"
TABLE, CHOICE = RESULTS / "compress.md", RESULTS / "compress-choice.json"
Pair = tuple[Tensor, Tensor]
NETS = ("LeNet-300-100", "LeNet-5")
FAMILIES: dict[str, GuideSpec] = {
    "SparseVD": bayou.SparseVD(local="positions"),
    "NormalJeffreys": bayou.guides.NormalJeffreys(local="positions", z="example"),
    "HalfCauchy": bayou.guides.HalfCauchy(local="positions", z="example"),
}
PUBLISHED = {
    "LeNet-300-100 SparseVD": "68×, 1.92 %",
    "LeNet-5 SparseVD": "280×, .75 %",
    "LeNet-5 NormalJeffreys": "8-13-88-13, 108×, 1.0 %",
    "LeNet-5 HalfCauchy": "5-10-76-16, 156×, 1.0 %",
}
RATES, QUICK = (1e-3, 3e-3), 5e-3
THRESHOLDS = tuple(math.exp(k / 2) for k in range(-6, 7))  # log E²/Var: −3 to 3
SLACK = 0.2  # points of held-out error that a smaller network may cost
HEAD = """# Smaller networks on MNIST

Made by `python -m experiments.measure.compress`. Error: of the 10,000 test images, at the posterior mean before and after `bayou.compress`, and after rounding
(`bits=True`). Left: filters or units, and inputs that are read (of LeNet-300-100: pixels-300-100, of LeNet-5: 20-50-800-500). Weights: all over those that are not 0.
Bits: 32-bit weights of the whole network over the bits of the small one. Disk: bytes of the float32 weights, and of the small network's codes and grid, deflated. Time: one row
and 256 on one thread of a CPU, whole over small network (rounded weights; CSR where it pays). Settings were chosen on 5,000 training images that were held out, by `--choose --epochs 40`.

| network | posterior | published | error before → after → rounded, % | left | weights | bits | multiply-adds | disk | ms, 1 row | ms, 256 rows |
|---|---|---|---|---|---:|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True)
class Fit:
    """One fit: a network, a family by name (or "plain"), its rate."""

    net: str
    family: str
    lr: float
    epochs: int
    batch: int
    device: str
    rows: int | None = None  # of the training images; None: all but the held-out ones
    held: int = 0

    @property
    def label(self) -> str:
        return f"{self.net} {self.family}"


def network(name: str) -> nn.Sequential:
    """The network at random weights."""
    torch.manual_seed(0)
    if name == "LeNet-5":
        return lenet((1, 28, 28), 10, (20, 50, 500))
    return dense((1, 28, 28), 10, (300, 100))


def images(held: int) -> tuple[Pair, Pair]:
    """Images to learn from, and to judge by: those of the test set, or the last training images;
    paper is 0, ink 1.
    """
    data = load("mnist")
    low, high = float(data.train[0].min()), float(data.train[0].max())
    train, test = (((x - low) / (high - low), y) for x, y in (data.train, data.test))
    if not held:
        return train, test
    return (train[0][:-held], train[1][:-held]), (train[0][-held:], train[1][-held:])


Tried = tuple[float, int, float, float, str]  # held-out error, bytes, rate, threshold, what is left


def run(fit: Fit, folder: str) -> tuple[str, float, list[Tried]]:
    """Fit and save; the file, the seconds it took, and what held-out images say of each
    threshold.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun = time.monotonic()
    (x, y), judges = images(fit.held)
    part = len(x) if fit.rows is None else fit.rows
    whole = len(x)
    x, y = x[:part].to(fit.device), y[:part].to(fit.device)
    settings: dict[str, Any] = {
        "epochs": fit.epochs,
        "lr": fit.lr,
        "batch_size": fit.batch,
        "compile": fit.device != "cpu",
    }
    if fit.family == "plain":
        method: bayou.methods.Method = bayou.MLE(**settings)
    else:  # fewer images stand for all: their KL is weighed as if all were there
        method = bayou.VI(FAMILIES[fit.family], beta=part / whole, start="network", **settings)
    options: Any = {"method": method, "prior": bayou.Normal(1.0), "seed": 0, "progress": False}
    posterior = bayou.fit(network(fit.net).to(fit.device), (x, y), **options)
    path = f"{folder}/{fit.net}-{fit.family}-{fit.lr:g}.bayou"
    posterior.save(path)
    tried: list[Tried] = []
    if fit.held:
        posterior, judges = (
            bayou.load(path, network(fit.net)),
            (judges[0].to(fit.device), judges[1].to(fit.device)),
        )
        for threshold in THRESHOLDS:
            small: Any = bayou.compress(posterior, threshold, bits=True)
            rest = left(fit.net, small)
            tried.append(
                (error(small, judges), small.compression.bytes[1], fit.lr, threshold, rest)
            )
    return path, time.monotonic() - begun, tried


def together(fits: list[Fit], jobs: int, folder: str) -> dict[Fit, tuple[str, list[Tried]]]:
    """All fits, side by side: the file of each, and what was tried with it."""
    found = {}
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", "1"
    )  # of each process; they compile side by side
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for fit, (path, seconds, tried) in zip(
            fits, pool.map(run, fits, [folder] * len(fits)), strict=True
        ):
            print(f"{fit.label}, lr {fit.lr:g}: {seconds:.0f} s", flush=True)
            found[fit] = path, tried
    return found


@torch.no_grad()
def error(net: nn.Module, rows: Pair) -> float:
    """In percent; in double precision, so that no order of sums decides between two classes."""
    net = copy.deepcopy(net).to(rows[0].device).double()
    wrong = [
        (net(x.double()).argmax(-1) != y).sum()
        for x, y in zip(rows[0].split(1000), rows[1].split(1000), strict=True)
    ]
    return 100 * float(sum(wrong)) / len(rows[1])


def masked(posterior: bayou.Posterior, threshold: float) -> nn.Module:
    """The whole network with weights of E²/Var < threshold at 0: what compress must agree with."""
    net, mean, std = posterior.to_module(), posterior.mean(), posterior.std()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if value.ndim > 1:
                value[mean[name].square() / std[name].square() < threshold] = 0.0
    return net


def left(name: str, net: Any) -> str:
    """Filters, units, and inputs of dense layers that something reads."""
    layers = [module for module in net if isinstance(module, nn.Linear | nn.Conv2d)]
    reads = [int((layer.weight != 0).flatten(2).any(2).any(0).sum() if layer.weight.ndim > 2
                 else (layer.weight != 0).any(0).sum()) for layer in layers]  # fmt: skip
    if name == "LeNet-5":
        return f"{layers[0].out_channels}-{layers[1].out_channels}-{reads[2]}-{reads[3]}"
    return "-".join(map(str, reads))


def weights(net: nn.Module) -> int:
    """Numbers of weights that are not 0; biases are not counted, as in the papers."""
    return sum(int((p != 0).sum()) for p in net.parameters() if p.ndim > 1)


def on_disk(net: nn.Module, codes: bool) -> int:
    """Bytes of a file: numbers as they are, or of each tensor its values and which of them each
    number is, deflated.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, p in net.named_parameters():
        values, index = np.unique(p.detach().numpy(), return_inverse=True)
        if codes and len(values) <= 2**16:
            arrays |= {
                f"{name}.values": values,
                name: index.reshape(-1).astype(np.min_scalar_type(len(values))),
            }
        else:
            arrays[name] = p.detach().numpy()
    stream = io.BytesIO()
    (np.savez_compressed if codes else np.savez)(stream, **arrays)  # type: ignore[arg-type]
    return len(stream.getvalue())


@torch.no_grad()
def milliseconds(nets: list[nn.Module], x: Tensor) -> list[float]:
    """The best of seven rounds of each network, in turn."""
    torch.set_num_threads(1)
    times = 200 if len(x) == 1 else 5
    best = [math.inf] * len(nets)
    for _ in range(7):
        for k, net in enumerate(nets):
            net(x)
            begun = time.perf_counter()
            for _ in range(times):
                net(x)
            best[k] = min(best[k], 1000 * (time.perf_counter() - begun) / times)
    return best


def with_sparse_rows(net: nn.Module) -> nn.Module:
    """The network with the weights of large linear layers with 98 % zeros as compressed sparse
    rows.
    """
    for layer in net.modules():
        if (
            isinstance(layer, nn.Linear)
            and layer.weight.numel() >= 2**15
            and (layer.weight == 0).float().mean() >= 0.98
        ):
            layer.weight = nn.Parameter(layer.weight.detach().to_sparse_csr(), requires_grad=False)
    return net


def line(
    fit: Fit, posterior: bayou.Posterior, plain: bayou.Posterior, threshold: float, test: Pair
) -> str:
    """A line of the table."""
    x = test[0][:256].cpu()
    whole, mean = plain.to_module().eval(), posterior.to_module()
    small = bayou.compress(posterior, threshold, example_x=x[:1])
    rounded = bayou.compress(posterior, threshold, bits=True, example_x=x[:1])
    fast = with_sparse_rows(bayou.compress(posterior, threshold, bits=True))
    errors = [error(net, test) for net in (mean, small, rounded)]
    if (same := error(masked(posterior, threshold), test)) != errors[1]:
        raise SystemExit(
            f"{fit.label}: {errors[1]} % after compress, but {same} % with the same weights at 0"
        )
    found: Any = rounded.compression
    times = [milliseconds([whole, fast], rows) for rows in (x[:1], x)]
    cells = [
        fit.net,
        fit.family,
        PUBLISHED.get(fit.label, ""),
        " → ".join(f"{value:.2f}" for value in errors),
        left(fit.net, small),
        f"{weights(whole) / max(1, weights(small)):.0f}×",
        f"{found.bytes[0] / found.bytes[1]:.0f}×",
        "{:,} → {:,}".format(*found.multiply_adds),
        f"{on_disk(whole, False):,} → {on_disk(rounded, True):,}",
        *(f"{a:.3f} → {b:.3f} ({a / b:.1f}×)" for a, b in times),
    ]
    return f"| {' | '.join(cells)} |"


def choose(done: dict[Fit, tuple[str, list[Tried]]]) -> dict[str, dict[str, float]]:
    """Of each network and family, the smallest of all whose held-out error is within ``SLACK`` of
    the best.
    """
    chosen: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(fit.label for fit in done):
        tried = [one for fit, (_, here) in done.items() if fit.label == label for one in here]
        for wrong, size, lr, threshold, rest in tried:
            print(
                f"{label}, lr {lr:g}, log threshold {math.log(threshold):+.1f}: {wrong:.2f} %, {size:,} bytes, {rest}"
            )
        best = min(tried)[0]
        wrong, size, lr, threshold, _ = min(
            (one for one in tried if one[0] <= best + SLACK), key=lambda one: one[1]
        )
        chosen[label] = {"lr": lr, "threshold": threshold, "held-out error": wrong, "bytes": size}
        print(f"{label}: {chosen[label]}", flush=True)
    return chosen


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=60, help="published: 200 or more")
    parser.add_argument("--batch", type=int, default=250, help="divides 60,000 and 55,000")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=list(NETS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, held = 1000 if given.small else None, 5000 if given.choose else 0
    if given.small:
        given.batch, given.jobs = 50, 1
    options: Any = {
        "epochs": given.epochs,
        "batch": given.batch,
        "device": given.device,
        "rows": rows,
        "held": held,
    }
    known = json.loads(CHOICE.read_text()) if CHOICE.exists() and not given.small else {}
    fits = []
    for net in given.nets:
        if given.small:  # a step of LeNet-5 takes ten times as long
            options["epochs"] = 5 if net == "LeNet-5" else 25
        for family in given.only:
            rates = (
                RATES if given.choose else (known.get(f"{net} {family}", {}).get("lr", RATES[-1]),)
            )
            rates = (QUICK,) if given.small else rates
            fits += [Fit(net, family, lr, **options) for lr in rates]
        if not given.choose:
            fits.append(
                Fit(net, "plain", 1e-3, **(options | {"epochs": min(30, options["epochs"])}))
            )
    with tempfile.TemporaryDirectory() as folder:
        done = together(fits, given.jobs, folder)
        if given.choose:
            chosen = known | choose(done)
            if not given.small:
                CHOICE.write_text(json.dumps(chosen, indent=1) + "\n")
            return
        posteriors = {fit: bayou.load(path, network(fit.net)) for fit, (path, _) in done.items()}
    x, y = (part[: 1000 if given.small else None].to(given.device) for part in images(0)[1])
    test = x, y
    plain = {fit.net: posterior for fit, posterior in posteriors.items() if fit.family == "plain"}
    said = HEAD
    for net, posterior in plain.items():
        point = posterior.to_module()
        size = f"{on_disk(point, False):,}"
        said += f"| {net} | a point (MLE) | | {error(point, test):.2f} | | | | | {size} | | |\n"
    for fit, posterior in posteriors.items():
        if fit.family != "plain":
            threshold = known.get(fit.label, {}).get("threshold", math.exp(-3))
            said += line(fit, posterior, plain[fit.net], threshold, test) + "\n"
    print(said)
    if not given.small:
        TABLE.write_text(said)


if __name__ == "__main__":
    main()
