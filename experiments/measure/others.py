"""What ``bayou.flows.check`` finds in zuko, nflows and normflows.

    python -m experiments.measure.others                      # all of them: writes results/others.md and
    results/others.json
    python -m experiments.measure.others --only zuko          # rows whose name has this word; the file keeps
    the others
    python -m experiments.measure.others --show "zuko CNF"    # one report, in full

Their default settings, small networks, in float64 and eval mode. A row is stopped after
``--seconds``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import signal
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nflows.transforms as nft
import normflows as nf
import numpy as np
import torch
import zuko
from torch import nn

from bayou.flows import Cost, Ladj, Report
from experiments.measure.adapt import adapt
from experiments.measure.others_faults import FAULTS, lipschitz, moved, resnet
from tests.conformance.training import check_trained

RESULTS = Path(__file__).parents[1] / "results"
HIDDEN, STEPS = (16, 16), 30
ITERATIVE = {"inverse_kind": Cost.iterative}
SOLVED = {"forward_kind": Cost.iterative, "inverse_kind": Cost.iterative}
CIRCLE = (-math.pi, math.pi)
COLUMNS = {
    "inverse": ("inverse",),
    "ladj": ("ladj",),
    "density": ("density",),
    "gradients": ("gradcheck",),
    "tails": ("tails",),
    "rows": ("batch forward rows", "batch inverse rows"),
    "batch shapes": ("batch forward shapes", "batch inverse shapes"),
    "compile": ("compile",),
    "vmap": ("vmap",),
    "dtype": ("float64", "float32", "bfloat16", "dtype"),
    "state_dict": ("state_dict",),
}


@dataclass(frozen=True)
class Row:
    """One transform: how it is built, on which events, what is said of it, what of it is
    checked.
    """

    build: Callable[[], nn.Module]
    event: Any = 2
    said: dict[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    train_steps: int = STEPS
    tolerances: dict[str, float] = field(default_factory=dict)
    note: str = ""


def mlp(*sizes: int) -> nn.Module:
    return nf.nets.MLP(list(sizes), init_zeros=False)


def zuko_flow(name: str, said: dict[str, Any] | None = None, **options: Any) -> Row:
    build = getattr(zuko.flows, name)
    return Row(lambda: build(2, transforms=2, hidden_features=HIDDEN), said=said or {}, **options)


def bisected(name: str, note: str = "inside [−10, 10], as its page says; bisection to 1e-6") -> Row:
    tolerances = {"inverse iterative": 1e-5, "ladj": 1e-5, "equal iterative": 1e-5}
    return zuko_flow(
        name, ITERATIVE, tolerances=tolerances, skip=("gradcheck",), train_steps=5, note=note
    )


def spline(kind: str) -> Row:
    build = getattr(nft, f"Piecewise{kind}CouplingTransform")
    return Row(lambda: build([1, 0], resnet, tails="linear", tail_bound=3.0))


def glow_coupling(scale: str) -> Row:
    return Row(lambda: nf.flows.AffineCouplingBlock(mlp(1, 16, 2), scale_map=scale))


def circle(build: Callable[[], nn.Module]) -> Row:
    return Row(build, said={"domain": CIRCLE, "codomain": CIRCLE})


def masked() -> nn.Module:
    return nf.flows.MaskedAffineFlow(torch.tensor([1.0, 0.0]), mlp(2, 16, 2), mlp(2, 16, 2))


def model() -> nn.Module:
    layers = [nf.flows.AffineCouplingBlock(mlp(1, 16, 2)), nf.flows.LULinearPermute(2)]
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers)


def cnf(**options: Any) -> nn.Module:
    return moved(zuko.flows.CNF(2, hidden_features=HIDDEN, **options))


RANDOM = (
    "compile",
    "vmap",
    "dtype",
    "batch",
    "density",
    "tails",
)  # what a ladj from the global stream cannot keep
SOLVER = {"inverse iterative": 1e-4, "ladj": 1e-4, "equal iterative": 1e-4, "tails": 1e-3}
ESTIMATE = {"ladj_kind": Ladj.estimate}
ROWS: dict[str, Row] = {
    "zuko NICE": zuko_flow("NICE"),
    "zuko RealNVP": zuko_flow("RealNVP"),
    "zuko MAF": zuko_flow("MAF"),
    "zuko NSF": zuko_flow("NSF"),
    "zuko NCSF": circle(zuko_flow("NCSF").build),
    "zuko SOSPF": bisected("SOSPF"),
    "zuko BPF": bisected("BPF", "bisection to 1e-6"),
    "zuko NAF": bisected("NAF"),
    "zuko UNAF": replace(bisected("UNAF"), skip=("gradcheck", "density")),
    "zuko GF": replace(bisected("GF"), build=lambda: zuko.flows.GF(2, transforms=2)),
    "zuko CNF": Row(
        cnf,
        2,
        SOLVED,
        ("density", "compile", "gradcheck", "tails", "vmap", "dtype"),
        0,
        SOLVER,
        "atol 1e-6, rtol 1e-5; allowed 1e-4",
    ),
    "nflows AdditiveCouplingTransform": Row(lambda: nft.AdditiveCouplingTransform([1, 0], resnet)),
    "nflows AffineCouplingTransform": Row(lambda: nft.AffineCouplingTransform([1, 0], resnet)),
    "nflows PiecewiseLinearCouplingTransform": spline("Linear"),
    "nflows PiecewiseQuadraticCouplingTransform": spline("Quadratic"),
    "nflows PiecewiseCubicCouplingTransform": spline("Cubic"),
    "nflows PiecewiseRationalQuadraticCouplingTransform": spline("RationalQuadratic"),
    "nflows MaskedAffineAutoregressiveTransform": Row(
        lambda: nft.MaskedAffineAutoregressiveTransform(2, 16)
    ),
    "nflows MaskedPiecewiseRationalQuadraticAutoregressiveTransform": Row(
        lambda: nft.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
            2, 16, tails="linear", tail_bound=3.0
        )
    ),
    "nflows NaiveLinear": Row(lambda: nft.NaiveLinear(2)),
    "nflows LULinear": Row(lambda: nft.LULinear(2)),
    "nflows QRLinear": Row(lambda: nft.QRLinear(2, 2)),
    "nflows SVDLinear": Row(lambda: nft.SVDLinear(2, 2)),
    "nflows HouseholderSequence": Row(lambda: nft.HouseholderSequence(2, 2)),
    "nflows RandomPermutation": Row(lambda: nft.RandomPermutation(2)),
    "nflows OneByOneConvolution": Row(lambda: moved(nft.OneByOneConvolution(2)), (2, 2, 3)),
    "nflows ActNorm": Row(lambda: moved(nft.ActNorm(2))),
    "nflows BatchNorm": Row(
        lambda: nft.BatchNorm(2), skip=("state_dict",), note="one way only in training, as it says"
    ),
    "nflows LeakyReLU": Row(nft.LeakyReLU),
    "nflows LogTanh": Row(nft.LogTanh),
    "nflows Tanh": Row(nft.Tanh, said={"codomain": (-1.0, 1.0)}),
    "nflows Sigmoid": Row(nft.Sigmoid, said={"codomain": (0.0, 1.0)}),
    "nflows CompositeCDFTransform": Row(
        lambda: nft.CompositeCDFTransform(nft.Sigmoid(), nft.PiecewiseRationalQuadraticCDF([2])),
        note="of Sigmoid and PiecewiseRationalQuadraticCDF",
    ),
    "normflows MaskedAffineFlow": Row(masked),
    "normflows AffineCouplingBlock": glow_coupling("exp"),
    "normflows AffineCouplingBlock, sigmoid": glow_coupling("sigmoid"),
    "normflows AffineCouplingBlock, sigmoid_inv": glow_coupling("sigmoid_inv"),
    "normflows MaskedAffineAutoregressive": Row(lambda: nf.flows.MaskedAffineAutoregressive(2, 16)),
    "normflows CoupledRationalQuadraticSpline": Row(
        lambda: nf.flows.CoupledRationalQuadraticSpline(2, 1, 16)
    ),
    "normflows AutoregressiveRationalQuadraticSpline": Row(
        lambda: nf.flows.AutoregressiveRationalQuadraticSpline(2, 1, 16)
    ),
    "normflows CircularCoupledRationalQuadraticSpline": circle(
        lambda: nf.flows.CircularCoupledRationalQuadraticSpline(
            2, 1, 16, [0, 1], tail_bound=math.pi
        )
    ),
    "normflows LULinearPermute": Row(lambda: nf.flows.LULinearPermute(2)),
    "normflows InvertibleAffine": Row(lambda: nf.flows.InvertibleAffine(2)),
    "normflows Invertible1x1Conv": Row(
        lambda: nf.flows.Invertible1x1Conv(2, use_lu=True), (2, 2, 3)
    ),
    "normflows GlowBlock": Row(lambda: nf.flows.GlowBlock(4, 8, init_zeros=False), (4, 2, 2)),
    "normflows Permute": Row(lambda: nf.flows.Permute(2)),
    "normflows Planar": Row(
        lambda: nf.flows.Planar((2,)), note="no inverse, as it says; forward its ladj is right"
    ),
    "normflows Planar, leaky_relu": Row(lambda: nf.flows.Planar((2,), act="leaky_relu")),
    "normflows Radial": Row(
        lambda: nf.flows.Radial((2,)), note="no inverse, as it says; forward its ladj is right"
    ),
    "normflows AffineConstFlow": Row(lambda: moved(nf.flows.AffineConstFlow((2,)))),
    "normflows AffineConstFlow, images": Row(
        lambda: moved(nf.flows.AffineConstFlow((2, 1, 1))), (2, 2, 3)
    ),
    "normflows ActNorm": Row(lambda: nf.flows.ActNorm((2,))),
    "normflows Residual": Row(
        lambda: nf.flows.Residual(lipschitz(2), reverse=False),
        2,
        ITERATIVE,
        ("compile", "density"),
        0,
        {},
        "its ladj is exact in two dimensions",
    ),
    "normflows Residual, 3-D": Row(
        lambda: nf.flows.Residual(lipschitz(3), reverse=False),
        3,
        {**ITERATIVE, **ESTIMATE},
        RANDOM,
        0,
        {},
        "an estimate",
    ),
    "normflows Residual, 3-D, training": Row(
        lambda: nf.flows.Residual(lipschitz(3)),
        3,
        {**ESTIMATE, "training": True},
        (*RANDOM, "state_dict", "inverse", "gradcheck"),
        0,
        {},
        "an estimate, in training mode",
    ),
    "normflows NormalizingFlow": Row(model, note="of AffineCouplingBlock and LULinearPermute"),
}


def measure(row: Row) -> Report:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = adapt(row.build(), row.event, **row.said)
        options: dict[str, Any] = {
            "skip": row.skip,
            "tolerances": row.tolerances,
            "compile_backend": "aot_eager",
        }
        return check_trained(theirs, train_steps=row.train_steps, perturb=0.0, **options)


def cells(report: Report) -> dict[str, str]:
    found = {}
    for name, starts in COLUMNS.items():
        mine = [r for r in report.results if r.name.startswith(starts) or r.name == name.split()[0]]
        mine = [r for r in mine if "stopped by the clock" not in r.note]
        failed = [r for r in mine if not r.passed]
        numbers = [r.value for r in failed if r.value is not None]
        if failed:
            found[name] = (
                f"{max(numbers):.0e}"
                if numbers
                else "error"
                if any("Error" in r.note for r in failed)
                else "no"
            )
        else:
            found[name] = "ok" if any(not r.note.startswith("skipped") for r in mine) else "–"
    return found


HEAD = """# What check finds in zuko, nflows and normflows

`python -m experiments.measure.others`: {versions}. Their transforms in float64 and eval mode, small networks, after {steps}
steps of training (5 where an inverse is bisected; none for residual flows and for continuous ones, moved at random).
A number is the largest error of a row that
failed (of an estimated ladj in standard errors), "error" an exception, "no" a failure without a number, – what was not
measured. The last five columns are what bayou asks of its own transforms; these libraries promise none of it. Notes say
what was allowed where it is more than for bayou's own.
"""


def page(kept: dict[str, Any], faults: dict[str, str]) -> str:
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "zuko", "nflows", "normflows")
    )
    lines = [
        HEAD.format(versions=versions, steps=STEPS),
        f"| transform | {' | '.join(COLUMNS)} | note |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for name in ROWS:
        if name in kept:
            row = kept[name]
            lines.append(
                f"| {name} | {' | '.join(row['cells'].get(column, '–') for column in COLUMNS)} | {row['note']} |"
            )
    lines += ["", "## Faults, each by a few lines", ""]
    for fault in FAULTS:
        body = textwrap.dedent(inspect.getsource(fault).split('"""')[2]).strip()
        lines += [f"**{fault.__doc__}**: {faults[fault.__name__]}.", "", "```py", body, "```", ""]
    return "\n".join(lines)


def alarm(*_: Any) -> None:
    raise TimeoutError("stopped by the clock")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="rows whose name has this word; 'faults' for none"
    )
    parser.add_argument("--show", help="print the whole report of this row, and write nothing")
    parser.add_argument("--seconds", type=int, default=120, help="for one row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.show:
        print(measure(ROWS[args.show]))
        return
    args.out.mkdir(exist_ok=True)
    file = args.out / "others.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    signal.signal(signal.SIGALRM, alarm)
    for name, row in ROWS.items():
        if args.only not in name:
            continue
        began = time.perf_counter()
        signal.setitimer(
            signal.ITIMER_REAL, args.seconds, 5
        )  # again, since every property goes on after one that raised
        try:
            report = measure(row)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        failures = [
            [r.name, r.value, r.tolerance, " ".join(r.note.split())[:70]] for r in report.failures
        ]
        seconds = round(time.perf_counter() - began, 1)
        kept[name] = {
            "cells": cells(report),
            "note": row.note,
            "failures": failures,
            "seconds": seconds,
        }
        print(f"{name}, {seconds} s", *failures, sep="\n    ", flush=True)
        lines = (
            f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in kept.items()
        )
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faults = {fault.__name__: fault() for fault in FAULTS}
    (args.out / "others.md").write_text(page(kept, faults))


if __name__ == "__main__":
    main()
