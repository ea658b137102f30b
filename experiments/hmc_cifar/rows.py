"""The methods of the table, and their fits: each leaves its predictions in a file, so that it is
made once.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

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
from bayou.operations import (
    Augment,
    Distilled,
    StoredPredictions,
    certify,
    feature_density,
    random_feature_head,
    spectral_normalized,
)
from bayou.posteriors import Posterior
from bayou.select import with_dropout
from experiments import study
from experiments.hmc_cifar.images import AWAY, Sizes, Task, read
from experiments.hmc_cifar.network import resnet
from experiments.hmc_cifar.scores import Saved

PRIOR = bayou.Normal(math.sqrt(1 / 5))
# Rates of dropout by row. On 5,000 held-out training images .1 is best after 50 epochs.
DROPOUT_RATES = {"MC dropout": 0.1, "MC dropout, rate .2": 0.2}
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

    def natural(guide: Any) -> Callable[[], Method]:
        return lambda: bayou.IVON(guide, **budget | {"lr": 0.2}, hessian=0.5)

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
        **dict.fromkeys(DROPOUT_RATES, lambda: bayou.MCDropout(bayou.MAP(**descent))),
        "SWAG": lambda: bayou.SWAG(start=None, **path),
        "Laplace, last layer": lambda: bayou.Laplace(
            where="last", start=None, batch_size=sizes.batch
        ),
        "Laplace, Kronecker": lambda: bayou.Laplace(start=None, batch_size=sizes.batch),
        "Laplace, Kronecker, prior by validation": lambda: bayou.Laplace(
            start=None, prior="validation", batch_size=sizes.batch
        ),
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
        "MNF, natural gradients": natural(bayou.MNF()),
        "MNF, natural, narrow start": natural(bayou.MNF(z_std=0.05)),
        "MNF, natural, no flow": natural(bayou.MNF(None)),
        "MNF, natural, input channels": natural(bayou.MNF(where="input")),
        "MNF, natural, input channels, no flow": natural(bayou.MNF(None, where="input")),
        "MNF, natural, points in norms": natural(
            {"*affine": bayou.Delta(penalty=True), "*": bayou.MNF(where="input")}
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
NATURAL = (
    "MNF, natural gradients",
    "MNF, natural, narrow start",
    "MNF, natural, no flow",
    "MNF, natural, input channels",
    "MNF, natural, input channels, no flow",
    "MNF, natural, points in norms",
)
FROM_SCRATCH = (
    POINT,
    *DROPOUT_RATES,
    "SNGP",
    "IVON",
    *OTHERWISE,
    *NATURAL,
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


@final
@dataclass(frozen=True)
class Part:
    """Fits of one label and length in a mixture.

    Args:
        label: of the fits.
        epochs: of each fit.
        count: how many there are; their seeds are 0 to count − 1.
    """

    label: str
    epochs: int
    count: int


# Fits of different lengths and rates. The weight of a fit is its number of epochs: a rule without a
# number that could be chosen by the distance to HMC.
MIXTURES = {
    "dropout .1, two lengths": (Part("MC dropout", 50, 15), Part("MC dropout", 200, 3)),
    "dropout .1 and .2, two lengths": (
        Part("MC dropout", 50, 15),
        Part("MC dropout", 200, 3),
        Part("MC dropout, rate .2", 200, 1),
    ),
}
TEACHER = "MC dropout, 5 runs"  # a row of MEANS
# One network that learns from the teacher, without a head for the epistemic part and with one.
STUDENTS: dict[str, Literal["epistemic"] | None] = {
    "student of 5 MC dropout runs": None,
    "student with a Dirichlet": "epistemic",
}
# Of the training images; without noise and blur, so that corrupted images stay new to students.
AUGMENT = Augment(copies=4, shift=4, flip=True)
LESSON_DRAWS = 20  # of each fit, at each image that students learn from
STUDENT_EFFORT = 2  # its epochs of the training images, beside those of one fit
LABELS = (REFERENCE, *methods(Sizes()), *MEANS, *MIXTURES, *STUDENTS)


def predictions(
    posterior: Posterior,
    inputs: Mapping[str, Tensor],
    samples: int,
    seed: int,
    squares: bool = False,
) -> Saved:
    """In float16; its logarithms have the small probabilities too. ``squares``: with E_s Σ_c p_s²,
    for students.
    """
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
        if squares:
            each = p.outputs.softmax(-1).square().sum(-1)
            found[f"{name} squares"] = each.mean(0)
    return {name: value.half().cpu().numpy() for name, value in found.items()}


def mixture(parts: Sequence[Saved], copies: Sequence[int] | None = None) -> Saved:
    """The predictions of several fits with equal weights, and the costs: their sums, and the mean
    s/epoch.

    Args:
        parts: predictions and costs of each fit.
        copies: how often each fit counts; once by default.
    """
    found: dict[str, Any] = {"said": np.unique([part["said"] for part in parts])}
    found |= {name: sum(part[name] for part in parts) for name in ("epochs", "minutes")}
    found["epoch_seconds"] = sum(part["epoch_seconds"] for part in parts) / len(parts)
    if copies is not None:
        parts = [part for part, count in zip(parts, copies, strict=True) for _ in range(count)]
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


def lesson(task: Task) -> Tensor:
    """The images that students learn from: those of training, and copies of them."""
    return AUGMENT.inputs(task.train[0], seed=0)


def stored(parts: Sequence[Saved], name: str) -> StoredPredictions:
    """The mixture of the predictions of several fits for inputs of a name."""
    return StoredPredictions.join(
        [
            StoredPredictions(
                torch.from_numpy(part[name]),
                None,
                torch.from_numpy(part[f"{name} squares"]) if f"{name} squares" in part else None,
                torch.from_numpy(part[f"{name} information"]),
            )
            for part in parts
        ]
    )


def answers(student: Posterior | Distilled, inputs: Mapping[str, Tensor]) -> Saved:
    """The predictions of a student, in the form of ``predictions``."""
    if isinstance(student, Posterior):
        return predictions(student, inputs, 1, 0)
    found: dict[str, Any] = {}
    for name, x in inputs.items():
        parts = [
            (student.probabilities(rows), student.mutual_information(rows))
            for rows in x.split(2000)
        ]
        p, information = (torch.cat(column) for column in zip(*parts, strict=True))
        found[name] = p.log().half().cpu().numpy()
        found[f"{name} information"] = information.half().cpu().numpy()
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
        words = re.sub("[^a-z0-9]+", "-", label.lower())
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

    def mixed(self, parts: Sequence[Part]) -> Saved:
        """Return the mixture of fits of several lengths, each with its epochs as its weight.

        Args:
            parts: labels with their lengths and numbers of fits.
        """
        saved: list[Saved] = []
        epochs: list[int] = []
        for part in parts:
            fits = replace(self, sizes=replace(self.sizes, epochs=part.epochs))
            saved += [fits.saved(part.label, seed) for seed in range(part.count)]
            epochs += [part.epochs] * part.count
        unit = math.gcd(*epochs)
        return mixture(saved, [count // unit for count in epochs])

    def lesson(self, label: str, seed: int) -> Saved:
        """What a fit predicts for the images that students learn from; a fit that was made before
        any student is made again, with the same result.
        """
        file = self.file(label, seed)
        images = file.with_suffix(".lesson")
        with study.locked(file):
            if not images.exists():
                self._make(label, seed, file)
        with np.load(images, allow_pickle=False) as found:
            return dict(found)

    def student(self, label: str, seed: int) -> Saved:
        """The predictions of a student, with its certificate as JSON."""
        file = self.file(label, seed)
        with study.locked(file):
            if not file.exists():
                self._distill(label, seed, file)
        with np.load(file, allow_pickle=False) as found:
            return dict(found)

    def _distill(self, label: str, seed: int, file: Path) -> None:
        """Train one network on the saved predictions of the teacher, and compare the two."""
        sizes, gpu = self.sizes, self.place.type == "cuda"
        one, count = MEANS[TEACHER]
        seeds = [count * seed + k for k in range(count)]
        taught = stored([self.lesson(one, k) for k in seeds], "lesson")
        parts = [self.saved(one, k) for k in seeds]
        x = lesson(self.task)
        steps = max(1, STUDENT_EFFORT * sizes.epochs * sizes.train // sizes.batch)
        torch.manual_seed(1000 + seed)
        net = resnet(sizes.width, sizes.blocks).to(self.place)
        start = time.monotonic()
        student = bayou.distill(
            taught, net, x, keep=STUDENTS[label], steps=steps, lr=2e-3, batch_size=sizes.batch,
            schedule="cosine", compile=gpu, autocast=gpu, seed=seed, progress=self.show,
        )  # fmt: skip
        minutes = (time.monotonic() - start) / 60
        point = student.point if isinstance(student, Distilled) else student
        raise_if_interrupted(point)
        inputs = {name: x for name, x in self.task.inputs.items() if all(name in p for p in parts)}
        teacher = {name: stored(parts, name) for name in inputs}
        certificate = certify(student, teacher, inputs, reference={"test": self.task.hmc.float()})
        point.save(file.with_suffix(".bayou"))
        cost = mixture(parts)
        write(
            file,
            {
                "epochs": cost["epochs"] + STUDENT_EFFORT * sizes.epochs,
                "minutes": cost["minutes"] + minutes,
                "student_minutes": minutes,
                "epoch_seconds": seconds_per_epoch(point.history, sizes.train / sizes.batch),
                "said": "",
                "certificate": json.dumps(certificate.to_json()),
                **answers(student, inputs),
            },
        )

    def _make(self, label: str, seed: int, file: Path) -> None:
        sizes, gpu, cost = self.sizes, self.place.type == "cuda", np.zeros(2)
        torch.manual_seed(seed)
        net: nn.Module = resnet(sizes.width, sizes.blocks)
        if label in DROPOUT_RATES:
            net = with_dropout(net, DROPOUT_RATES[label])
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
            or (sizes.epochs if label in (*DROPOUT_RATES, "MCLMC", "SNGP") else 1),
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
        if label == MEANS[TEACHER][0]:
            images = {"lesson": lesson(self.task)}
            draws = min(LESSON_DRAWS, sizes.samples)
            write(
                file.with_suffix(".lesson"),
                predictions(posterior, images, draws, seed, squares=True),
            )
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
