"""Calls of the public interface at fixed seeds, whose results must not change while the code is
reorganized.

Each case returns named tensors. ``record.py`` writes them to a file, and compares them with such a
file of another state of the code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou import flows

Results = dict[str, Tensor]
SHORT: dict[str, Any] = {"steps": 12, "batch_size": 16, "validation": 0.0}


def regression_rows() -> tuple[Tensor, Tensor]:
    """Return 40 rows of two numbers, and a target with noise 0.3."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    return x, x[:, :1].sin() + 0.5 * x[:, 1:] + noise


def class_rows() -> tuple[Tensor, Tensor]:
    """Return 48 rows of two numbers, and one of three classes."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(48, 2, generator=generator, dtype=torch.float64)
    score = x @ torch.randn(2, 3, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(48, 3, generator=generator, dtype=torch.float64)
    return x, (score + noise).argmax(1)


def network(outputs: int, *extra: nn.Module) -> nn.Sequential:
    """Return a network 2-8-outputs in float64, with the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), *extra, nn.Linear(8, outputs)).double()


def image_network() -> nn.Sequential:
    """Return a network with a convolution for images of 4×4 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(12, 3)).double()


def image_rows() -> tuple[Tensor, Tensor]:
    """Return 20 images of noise and a class each."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(20, 1, 4, 4, generator=generator, dtype=torch.float64), torch.arange(20) % 3


def summarize(posterior: bayou.Posterior, x: Tensor) -> Results:
    """Return the predictions of a posterior, those after saving and loading it, and the end of its
    history.
    """
    results = {"outputs": posterior.predict(x, samples=3, seed=0).outputs}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "posterior.bayou"
        posterior.save(file)
        loaded = bayou.load(file, posterior.target.net)
    again = loaded.predict(x, samples=3, seed=0).outputs
    if not torch.equal(again, results["outputs"]):
        raise AssertionError("the loaded posterior predicts other numbers")
    tensors = [
        value.detach().double().flatten() for _, value in sorted(posterior.state()[0].items())
    ]
    state = torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
    weights = torch.cos(torch.arange(len(state), dtype=torch.float64))
    results["state"] = torch.stack([state.sum(), state @ weights, state.abs().sum()])
    if posterior.history:
        last = posterior.history[-1]
        numbers = [
            float(last[key])
            for key in sorted(last)
            if isinstance(last[key], float) and "second" not in key
        ]
        results["history"] = torch.tensor(numbers, dtype=torch.float64)
    return results


def fit_regression(
    method: Callable[[], Any], *extra: nn.Module, **options: Any
) -> Callable[[], Results]:
    """Return a case that fits the regression."""

    def case() -> Results:
        x, y = regression_rows()
        likelihood = bayou.Gaussian(0.3, learn=True)
        options_of_fit = {"likelihood": likelihood, "progress": False} | options
        return summarize(bayou.fit(network(1, *extra), (x, y), method(), **options_of_fit), x[:5])

    return case


def fit_classes(
    method: Callable[[], Any], *extra: nn.Module, **options: Any
) -> Callable[[], Results]:
    """Return a case that fits the classes."""

    def case() -> Results:
        x, y = class_rows()
        return summarize(
            bayou.fit(network(3, *extra), (x, y), method(), progress=False, **options), x[:5]
        )

    return case


def fit_images(method: Callable[[], Any], **options: Any) -> Callable[[], Results]:
    """Return a case that fits the images."""

    def case() -> Results:
        x, y = image_rows()
        return summarize(
            bayou.fit(image_network(), (x, y), method(), progress=False, **options), x[:3]
        )

    return case


def fit_by_name(
    name: str, rows: Callable[[], tuple[Tensor, Tensor]], outputs: int
) -> Callable[[], Results]:
    """Return a case that fits a method by its name, in the units of the rows."""

    def case() -> Results:
        x, y = rows()
        net = network(outputs)
        if outputs == 1:
            y = 100 * y + 7
        posterior = bayou.fit(net, (x, y), name, progress=False)
        return {"outputs": posterior.predict(x[:5], samples=3, seed=0).outputs}

    return case


def map_short() -> bayou.MAP:
    """Return the mode at which short methods start."""
    return bayou.MAP(**SHORT)


METHODS: dict[str, Callable[[], Any]] = {
    "mle": lambda: bayou.MLE(**SHORT),
    "map": map_short,
    "map-constrained": lambda: bayou.MAP(
        **SHORT, max_norm=1.0, input_noise=0.1, gradient_noise=0.1
    ),
    "map-lbfgs": lambda: bayou.MAP(),
    "map-validation": lambda: bayou.MAP(steps=12, batch_size=16, validation=0.2),
    "vi-meanfield": lambda: bayou.VI(bayou.MeanField(), **SHORT),
    "vi-mnf": lambda: bayou.VI(bayou.MNF(), **SHORT),
    "vi-mnf-gated": lambda: bayou.VI(bayou.MNF("gated", {"hidden": [6]}), **SHORT),
    "vi-mnf-example": lambda: bayou.VI(bayou.MNF(z="example"), **SHORT),
    "vi-lowrank": lambda: bayou.VI(bayou.LowRank(rank=3), **SHORT),
    "vi-nodenoise": lambda: bayou.VI(bayou.NodeNoise(), **SHORT),
    "vi-nodeflow": lambda: bayou.VI(bayou.NodeFlow(where="both"), **SHORT),
    "vi-dropout": lambda: bayou.VI(bayou.Dropout(0.2, rate="concrete"), **SHORT),
    "vi-sparse": lambda: bayou.VI(bayou.SparseVD(), **SHORT),
    "vi-jeffreys": lambda: bayou.VI(bayou.guides.NormalJeffreys(), **SHORT),
    "vi-halfcauchy": lambda: bayou.VI(bayou.guides.HalfCauchy(), **SHORT),
    "vi-rankone": lambda: bayou.VI(bayou.guides.RankOne(), **SHORT),
    "vi-jointflow": lambda: bayou.VI(
        bayou.JointFlow(options={"layers": 1, "hidden": [8]}), **SHORT
    ),
    "vi-inducing": lambda: bayou.VI(bayou.Inducing(points=4), **SHORT),
    "vi-sivi": lambda: bayou.VI(bayou.guides.SIVI(draws=20, latent=4, hidden=(6,)), **SHORT),
    "vi-uivi": lambda: bayou.VI(
        bayou.guides.UIVI(draws=20, latent=4, hidden=(6,), steps=2, leapfrogs=3), **SHORT
    ),
    "vi-patterns": lambda: bayou.VI({"0.*": bayou.Delta(), "*": bayou.MNF()}, **SHORT),
    "ivon": lambda: bayou.IVON(**SHORT),
    "ivon-local": lambda: bayou.IVON(**SHORT, local=True, samples=2),
    "ensemble": lambda: bayou.Ensemble(3, of=map_short()),
    "ensemble-vmap": lambda: bayou.Ensemble(3, of=map_short(), parallel="vmap"),
    "swag": lambda: bayou.SWAG(start=map_short(), **SHORT),
    "sgld": lambda: bayou.SGLD(steps=12, batch_size=16, draws=5),
    "psgld": lambda: bayou.PSGLD(steps=12, batch_size=16, draws=3, chains=2, lr=1e-3),
    "sghmc": lambda: bayou.SGHMC(steps=12, batch_size=16, draws=5, start=map_short(), lr=1e-3),
    "cyclical": lambda: bayou.SGLD(
        steps=12,
        batch_size=16,
        draws=4,
        lr=1e-3,
        schedule=bayou.methods.Cyclical(cycles=2, explore=0.5),
    ),
    "hmc": lambda: bayou.HMC(draws=5, warmup=10, most_leapfrogs=3),
    "nuts": lambda: bayou.NUTS(draws=5, warmup=10, max_depth=2, chains=2),
    "mclmc": lambda: bayou.MCLMC(draws=5, warmup=10, steps=2),
    "mclmc-stochastic": lambda: bayou.MCLMC(
        draws=5, warmup=10, steps=2, stochastic=True, batch_size=16
    ),
    "laplace-full": lambda: bayou.Laplace("full", start=map_short()),
    "laplace-diagonal": lambda: bayou.Laplace("diagonal", start=map_short()),
    "laplace-kronecker": lambda: bayou.Laplace("kronecker", start=map_short()),
    "laplace-last": lambda: bayou.Laplace(
        "full", where="last", start=map_short(), prior="evidence"
    ),
    "laplace-validation": lambda: bayou.Laplace("full", start=map_short(), prior="validation"),
    "vbll": lambda: bayou.methods.VBLL(**SHORT),
    "annealed": lambda: bayou.Annealed(
        bayou.VI(bayou.MeanField(), **SHORT), draws=4, temperatures=5, leapfrogs=2
    ),
}
LEARNED_PRIOR = bayou.Normal("fan_in", learn="units")


def flow_case(name: str, entry: Any) -> Callable[[], Results]:
    """Return a case with the densities and samples of a map by its registered name."""

    def case() -> Results:
        size = 3 if entry.kind == "vector" else 2
        with torch.random.fork_rng():
            torch.manual_seed(6)
            transform = entry.build(size).double()
            for value in transform.parameters():
                if value.requires_grad and value.is_floating_point():
                    value.data.add_(0.1 * torch.randn_like(value))
        if entry.kind == "vector":
            flow = flows.Flow(flows.StandardNormal(size), transform).double()
            y, log_prob = flow.sample_and_log_prob(7, seed=0)
            results = {"sample": y, "log_prob": log_prob}
            if transform.inverse_kind != "iterative":
                results["inverse"] = flow.log_prob(y)
            return results
        base = entry.base(size) if entry.base else None
        shape = transform.event_in
        generator = torch.Generator().manual_seed(7)
        if base is not None:
            x = flows.Flow(base, transform).double().base.draw(5, seed=0).double()
        else:
            x = torch.randn(
                5, *[side or 2 for side in shape], generator=generator, dtype=torch.float64
            )
        options: dict[str, Any] = {"seed": 0} if transform.takes_noise else {}
        if transform.context_dim > 0:
            options["context"] = torch.randn(
                5, transform.context_dim, generator=generator, dtype=torch.float64
            )
        y, term = transform.forward(x, **options)
        return {"forward": y, "term": term}

    return case


def run_case() -> Results:
    """Train a run folder from the command line's functions, and return its scores and the shape of
    its report.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = Path(folder) / "run"
        arguments = [
            "compare",
            "digits-few",
            "--methods",
            "map,ffg",
            "--steps",
            "20",
            "--quiet",
            "--out",
            str(out),
        ]
        subprocess.run([sys.executable, "-m", "bayou", *arguments], check=True)
        scores = json.loads((out / "metrics.json").read_text())
        page = (out / "report.html").read_text()
    text = re.sub(
        r"<svg.*?</svg>|<script.*?</script>|<style.*?</style>|<[^>]*>|data:[^\"]*",
        " ",
        page,
        flags=re.S,
    )
    words = re.findall(r"[A-Za-z]+", text)
    return {
        "scores": torch.tensor(numbers_of(scores)),
        "words": torch.tensor([len(words), len(set(words))]),
    }


def numbers_of(value: Any, name: str = "") -> list[float]:
    """Return all numbers of nested lists and dictionaries but times and sizes, in the order of
    their keys.
    """
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers_of(value[key], key)]
    if isinstance(value, list):
        return [number for each in value for number in numbers_of(each, name)]
    is_measured = re.search("second|time|memory|minutes|speed", name) is not None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_measured:
        return [float(value)]
    return []


CASES: dict[str, Callable[[], Results]] = {
    **{f"regression/{name}": fit_regression(method) for name, method in METHODS.items()},
    **{f"classes/{name}": fit_classes(method) for name, method in METHODS.items()},
    "regression/mcdropout": fit_regression(lambda: bayou.MCDropout(map_short()), nn.Dropout(0.3)),
    "classes/mcdropout": fit_classes(lambda: bayou.MCDropout(map_short()), nn.Dropout(0.3)),
    "classes/ensemble-mcdropout": fit_classes(
        lambda: bayou.Ensemble(2, of=bayou.MCDropout(map_short())), nn.Dropout(0.3)
    ),
    "classes/learned-prior-vi": fit_classes(METHODS["vi-mnf"], prior=LEARNED_PRIOR),
    "classes/learned-prior-laplace": fit_classes(METHODS["laplace-full"], prior=LEARNED_PRIOR),
    "images/mnf": fit_images(METHODS["vi-mnf"]),
    "images/laplace-kronecker": fit_images(METHODS["laplace-kronecker"]),
    "images/ivon": fit_images(METHODS["ivon"]),
    **{f"flows/{name}": flow_case(name, entry) for name, entry in flows.registry().items()},
    "run/compare": run_case,
    **{
        f"names/regression/{name}": fit_by_name(name, regression_rows, 1)
        for name in bayou.list_methods()
    },
    **{
        f"names/classes/{name}": fit_by_name(name, class_rows, 3)
        for name in bayou.list_methods()
        if name not in ("wide", "wide-noise", "tabm-noise")  # for numbers only
    },
}
