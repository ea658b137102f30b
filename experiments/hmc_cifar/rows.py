"""The methods of the table, and their fits: each leaves its predictions in a file, so that it is
made once.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayou
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.core.progress import Show
from bayou.guides import RankOne
from bayou.inference.method import Method
from bayou.likelihoods.predictive import Predictive
from bayou.methods import VBLL
from bayou.methods.langevin import Cyclical, GradientSampler
from bayou.operations import feature_density, random_feature_head, spectral_normalized
from bayou.posteriors import Posterior
from bayou.select import with_dropout
from experiments import study
from experiments.hmc_cifar.images import AWAY, Sizes, Task, read
from experiments.hmc_cifar.network import resnet
from experiments.hmc_cifar.scores import Saved

PRIOR = bayou.Normal(math.sqrt(1 / 5))
DROPOUT = 0.1
SNGP: dict[str, Any] = {"bound": 6.0, "features": 1024, "length_scale": 2.0}


def momentum(groups: list[dict[str, Any]]) -> torch.optim.SGD:
    """SGD with momentum 0.9; fused, it reads its rates on the device, so that its steps can be
    recorded there.
    """
    recorded = [{**group, "capturable": True} for group in groups]
    return torch.optim.SGD(recorded, momentum=0.9, fused=groups[0]["params"][0].is_cuda)


POINT, REFERENCE = "point", "HMC"


def methods(sizes: Sizes, gpu: bool = False) -> dict[str, Callable[[], Any]]:
    """The rows that are fitted. Rates of chains are those of SGD on the mean loss: h = 2·rate/N."""
    often: dict[str, Any] = {"log_every": 100, "checkpoint_every": 10 * sizes.train // sizes.batch}
    budget: dict[str, Any] = {
        "epochs": sizes.epochs,
        "batch_size": sizes.batch,
        "schedule": "cosine",
        **often,
    }
    budget |= {"compile": gpu, "autocast": gpu}
    descent = budget | {"lr": 0.1, "optimizer": momentum}
    path = descent | {"lr": 0.01, "schedule": "constant", "epochs": max(2, sizes.epochs // 4)}

    def variational(guide: Any) -> Callable[[], Method]:
        return lambda: bayou.VI(guide, start="network", **budget)

    def chain(kind: type[GradientSampler], rate: float, **options: Any) -> Callable[[], Method]:
        length = {
            "epochs": sizes.epochs,
            "batch_size": sizes.batch,
            "draws": sizes.samples,
            "compile": gpu,
            **often,
        }
        start: dict[str, Any] = {
            "chains": 1,
            "start": None,
            "dispersal": 0.0,
            "lr": 2 * rate / sizes.train,
        }
        return lambda: kind(**start, **length, **options)

    def microcanonical() -> Method:
        draws, warmup = sizes.samples, math.ceil(sizes.samples / 4)
        steps = max(1, sizes.epochs * sizes.train // sizes.batch // (GRADIENTS * (draws + warmup)))
        at: dict[str, Any] = {
            "chains": 1,
            "start": None,
            "dispersal": 0.0,
            "adapt": False,
            "step_size": 4e-4,
        }
        at["energy_error"] = 5e-4  # of a step size that is given, it is not used
        length: dict[str, Any] = {"draws": draws, "warmup": warmup, "steps": steps, "length": 0.02}
        return bayou.MCLMC(
            stochastic=True, batch_size=sizes.batch, compile=gpu, **at, **length, log_every=1
        )

    return {
        POINT: lambda: bayou.MAP(**descent),
        "MC dropout": lambda: bayou.MCDropout(bayou.MAP(**descent)),
        "SWAG": lambda: bayou.SWAG(start=None, **path),
        "Laplace, last layer": lambda: bayou.Laplace(
            where="last", start=None, batch_size=sizes.batch
        ),
        "Laplace, Kronecker": lambda: bayou.Laplace(start=None, batch_size=sizes.batch),
        **dict.fromkeys(("mean field", *BY_UNIT), variational(bayou.MeanField())),
        "MNF": variational(bayou.MNF()),
        "node noise": variational(bayou.NodeNoise(where="both", penalty=True)),
        "node noise, 4 components": variational(
            bayou.NodeNoise(where="both", components=4, penalty=True)
        ),
        "VBLL": lambda: VBLL(**path | {"schedule": "cosine"}),
        "BatchEnsemble of 4": variational(RankOne(4)),
        "rank-1 of 4": variational(RankOne(4, std=0.1)),
        **dict.fromkeys(
            ("IVON", *OTHERWISE), lambda: bayou.IVON(**budget | {"lr": 0.2}, hessian=0.5)
        ),
        "SGLD": chain(bayou.SGLD, 0.075),
        "PSGLD": chain(bayou.PSGLD, 3e-4),
        "SGHMC": chain(bayou.SGHMC, 7.5e-3),
        "SGHMC, cyclical": chain(bayou.SGHMC, 0.03, schedule=Cyclical()),
        "MCLMC": microcanonical,
        "SNGP": lambda: bayou.Laplace(
            where="last", start=bayou.MAP(**descent), batch_size=sizes.batch
        ),
        "DDU": lambda: feature_density,
    }


OTHERWISE: dict[str, dict[str, Any]] = {
    "IVON, prior N(0, 5)": {"prior": bayou.Normal(math.sqrt(5))},
    "IVON, prior N(0, 1/50)": {"prior": bayou.Normal(math.sqrt(1 / 50))},
    "IVON, 40,960 images": {"train": 40_960},
}  # other models: which one the reference has is not said
BY_UNIT = {
    "mean field, by unit": bayou.Normal(math.sqrt(1 / 5), learn="units")
}  # with a learned factor for each unit
FROM_SCRATCH = (
    POINT,
    "MC dropout",
    "SNGP",
    "IVON",
    *OTHERWISE,
)  # all others begin at the point of their seed
CHAINS = ("SGLD", "PSGLD", "SGHMC", "SGHMC, cyclical", "MCLMC")
GRADIENTS = 3  # of one step of MCLMC with minibatches
MEANS = {
    "ensemble of 2": (POINT, 2),
    "ensemble of 5": (POINT, 5),
    "ensemble of 10": (POINT, 10),
    "multi-SWAG of 5": ("SWAG", 5),
    "IVON, 2 runs": ("IVON", 2),
    "IVON, 4 runs": ("IVON", 4),
    "IVON, 8 runs": ("IVON", 8),
    "MC dropout, 2 runs": ("MC dropout", 2),
    "MC dropout, 3 runs": ("MC dropout", 3),
    "MC dropout, 5 runs": ("MC dropout", 5),
    "MC dropout, 10 runs": ("MC dropout", 10),
    "MCLMC, 5 members": ("MCLMC", 5),
}  # predictions of several fits of a label are averaged
LABELS = (REFERENCE, *methods(Sizes()), *MEANS)


def predictions(
    posterior: Posterior, inputs: Mapping[str, Tensor], samples: int, seed: int
) -> Saved:
    """In float16; its logarithms have the small probabilities too."""
    found: dict[str, Tensor] = {}
    # one draw at a time: the convolutions of several would be grouped ones, which are slow; linear
    # ones share a graph
    chunk = 1 if getattr(posterior, "predictive", "sampled") == "sampled" else None
    for name, x in inputs.items():
        p = posterior.predict(
            x, min(samples, posterior.draws or samples), seed=seed, chunk=chunk, batch_size=2000
        )
        log_p = p.outputs.double().log_softmax(-1).logsumexp(0)
        found |= {
            name: log_p - math.log(len(p.outputs)),
            f"{name} information": p.mutual_information,
        }
    return {name: value.half().cpu().numpy() for name, value in found.items()}


def mixture(parts: Sequence[Saved]) -> Saved:
    """The predictions of several fits with equal weights, and the costs: their sums, and the mean
    s/epoch.
    """
    found: dict[str, Any] = {"said": np.unique([part["said"] for part in parts])}
    found |= {name: sum(part[name] for part in parts) for name in ("epochs", "minutes")}
    found["epoch_seconds"] = sum(part["epoch_seconds"] for part in parts) / len(parts)
    for name in ("test", *AWAY, "corrupted"):
        if not all(name in part for part in parts):  # files that were made before it was added
            continue
        log_p = torch.stack(
            [torch.from_numpy(part[name]).double().log_softmax(-1) for part in parts]
        )
        information = torch.stack(
            [torch.from_numpy(part[f"{name} information"]).double() for part in parts]
        )
        whole = Predictive(bayou.Categorical().bind(), log_p)
        found[name] = log_p.logsumexp(0)
        found[f"{name} information"] = whole.mutual_information + information.mean(0)
    return found


def seconds_per_epoch(history: Sequence[dict[str, float]], batches: float) -> float:
    """Of the second half of a run, after all that is compiled; NaN without a history."""
    timed = [record for record in history if "seconds" in record and "step" in record]
    if len(timed) < 2:
        return math.nan
    first, last = timed[len(timed) // 2 - 1], timed[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]) * batches


def write(file: Path, found: Saved) -> None:
    """Write a file whole, or not at all."""
    with file.with_suffix(".part").open("wb") as part:
        np.savez(part, **found)
    file.with_suffix(".part").rename(file)


@final
@dataclass(frozen=True)
class Fits:
    """The files of a folder, made where they are not there."""

    sizes: Sizes
    folder: Path
    place: torch.device
    show: Show

    @property
    def task(self) -> Task:
        """The data on the device."""
        return read(replace(self.sizes, epochs=0, samples=0), self.place)

    def file(self, label: str, seed: int) -> Path:
        """Where a fit is kept."""
        words = re.sub("[^a-z]+", "-", label.lower())
        return self.folder / f"{words}-{self.sizes.epochs}-{seed}.npz"

    def saved(self, label: str, seed: int) -> Saved:
        """The predictions of a fit; the first process that needs them makes them, and the others
        wait.
        """
        file = self.file(label, seed)
        with study.locked(file):
            if not file.exists():
                self._make(label, seed, file)
        with np.load(file, allow_pickle=False) as found:
            return dict(found)

    def _make(self, label: str, seed: int, file: Path) -> None:
        sizes, gpu, cost = self.sizes, self.place.type == "cuda", np.zeros(2)
        torch.manual_seed(seed)
        net: nn.Module = resnet(sizes.width, sizes.blocks)
        net = with_dropout(net, DROPOUT) if label == "MC dropout" else net
        if label == "SNGP":
            net = random_feature_head(
                spectral_normalized(net, SNGP["bound"]),
                SNGP["features"],
                SNGP["length_scale"],
                seed=seed,
            )
        if label not in FROM_SCRATCH:
            point = self.saved(POINT, seed)
            cost += point["epochs"], point["minutes"]
            net.load_state_dict(load_file(self.file(POINT, seed).with_suffix(".safetensors")))
        if (
            label == "DDU"
        ):  # what the point predicts, with −log p of its features in place of the information
            start = time.monotonic()
            density = feature_density(net.to(self.place), self.task.train)
            cost[1] += (time.monotonic() - start) / 60
            known = {name: x for name, x in self.task.inputs.items() if name in point}
            scored = {f"{name} information": -density(x).cpu().numpy() for name, x in known.items()}
            return write(
                file, {**point, **scored, "minutes": cost[1], "epoch_seconds": math.nan, "said": ""}
            )
        method = methods(sizes, gpu)[label]()
        run = file.with_suffix(".run")  # so that a fit that was ended continues
        cast: Any = (
            nullcontext()
        )  # other methods have a setting, whose cast weights a block around it would keep
        if gpu and label in CHAINS:
            cast = torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        start = time.monotonic()
        with warnings.catch_warnings(record=True) as caught, cast:
            warnings.simplefilter("always")
            other = OTHERWISE.get(label, {})
            rows = [part[: other.get("train")] for part in self.task.train]
            prior = other.get("prior", BY_UNIT.get(label, PRIOR))
            posterior = bayou.fit(
                net.to(self.place), (rows[0], rows[1]), method, prior=prior, seed=seed, checkpoint=run,
                progress=self.show,
            )  # fmt: skip
        raise_if_interrupted(posterior)
        cost += (
            getattr(method, "epochs", None)
            or (sizes.epochs if label in ("MC dropout", "MCLMC", "SNGP") else 1),
            (time.monotonic() - start) / 60,
        )
        batches = sizes.train / method.batch_size
        pace = seconds_per_epoch(
            posterior.history,
            batches / (GRADIENTS * method.steps) if isinstance(method, bayou.MCLMC) else batches,
        )
        said = sorted(
            {one.category.__name__ for one in caught if one.category.__module__.startswith("bayou")}
        )
        found = predictions(posterior, self.task.inputs, sizes.samples, seed)
        if label == POINT:
            save_file(posterior.to_module().state_dict(), file.with_suffix(".safetensors"))
        write(
            file,
            {
                "epochs": cost[0],
                "minutes": cost[1],
                "epoch_seconds": pace,
                "said": ", ".join(said),
                **found,
            },
        )
        for old in self.folder.glob(f"{run.name}*"):
            old.unlink()
