"""``bayou reproduce hmc-cifar10``: methods beside a public HMC run of a ResNet-20 on CIFAR-10 (Izmailov et al. 2021).

Every fit leaves its predictions in a file of ``OUT/hmc-cifar10/``, so that it is made once: ensembles and several
chains are means of such files, and methods that begin at a point take its weights from there.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.data import CATALOGUE
from bayou.data.images import cifar10, read_idx
from bayou.guides import RankOne
from bayou.inference.method import Method
from bayou.methods import VBLL
from bayou.methods.langevin import Cyclical, GradientSampler
from bayou.operations import feature_density, random_feature_head, spectral_normalized
from bayou.posteriors import Posterior
from bayou.predictive import Predictive
from bayou.progress import Show
from bayou.runs.interrupt import raise_if_interrupted
from bayou.select import with_dropout
from experiments import figures, plots, study
from experiments.adapters import FOLDERS, path_of
from experiments.digest import digest
from experiments.study import Fit, Found

PRIOR = bayou.Normal(math.sqrt(1 / 5))
MEAN, SCALE = (0.49, 0.48, 0.44), 0.2  # of the pixels
AWAY = ("fashion", "letters")  # what is out of distribution
DROPOUT = 0.1
ROUNDING = 1e-3  # of a mutual information, in nats
CORRUPTED = 1500  # test images, a third for each kind, at every strength
CORRUPTIONS = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.1),  # its standard deviation, of pixels in [0, 1]
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # the standard deviation of its kernel, in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # what remains of the distance from the mean of a channel
}  # about those of CIFAR-10-C (Hendrycks & Dietterich 2019)
STRENGTHS = len(CORRUPTIONS["noise"])
SNGP: dict[str, Any] = {"bound": 6.0, "features": 1024, "length_scale": 2.0}


@final
@dataclass(frozen=True)
class Sizes:
    """All numbers of a run: of the network, of the rows and of a fit."""

    width: int = 16
    blocks: int = 3  # of each of the three stages
    train: int = 50_000
    test: int = 10_000
    away: int = 2000  # of each of AWAY
    batch: int = 250
    epochs: int = 100
    samples: int = 50


class FilterResponseNorm(nn.Module):
    """max(γ·x/√(mean_hw x² + 1e-6) + β, τ) of every channel of x (B, C, H, W) (Singh & Krishnan 2020).

    γ, β and τ are one vector (3·C,), since the cost of a step is partly that of its number of tensors. The norm keeps
    their precision under autocast.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine = nn.Parameter(torch.cat([torch.ones(channels), torch.zeros(2 * channels)]))

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta, tau = self.affine.view(3, -1, 1, 1)
        x = x.to(gamma.dtype)
        scale = (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt()
        return torch.maximum(x * (gamma * scale) + beta, tau)


class Convolution(nn.Conv2d):
    """Casts its tensors itself under autocast where ``vmap`` maps over weights: autocast has no effect there."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(self.weight):
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        return self._conv_forward(input.to(dtype), weight, bias)


def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    """A convolution with the padding SAME of JAX (at stride 2 none before and one after), and its normalization."""
    pad = [nn.ZeroPad2d((0, 1, 0, 1))] if kernel == 3 and stride == 2 else []
    conv = Convolution(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0)
    return [*pad, conv, FilterResponseNorm(outputs)]


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1×1 convolution where the channels change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        first, second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
        self.body = nn.Sequential(*first, nn.SiLU(), *second)
        self.shortcut = nn.Sequential(*(convolution(inputs, outputs, 1, stride) if stride > 1 else ()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def resnet(width: int = 16, blocks: int = 3) -> nn.Sequential:
    """ResNet-(6·blocks + 2) of images (B, 3, 32, 32): logits (B, 10)."""
    channels = [width] + [width * 2**stage for stage in range(3) for _ in range(blocks)]
    stages = (layer for pair in pairwise(channels) for layer in (Block(*pair), nn.SiLU()))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))
    return nn.Sequential(*convolution(3, width, 3, 1), nn.SiLU(), *stages, *head)


class Task(NamedTuple):
    """Images to train on, to test on and out of distribution; P(class) of HMC and of people at the test images."""

    train: tuple[Tensor, Tensor]
    inputs: dict[str, Tensor]  # "test", AWAY, and "corrupted": the first test images at every strength
    y: Tensor
    hmc: Tensor
    people: Tensor


def corrupted(pixels: np.ndarray, kind: str, strength: int) -> np.ndarray:
    """Images (N, 3, H, W) of 8 bits with noise, blur or less contrast; noise is a function of the strength and N."""
    amount = CORRUPTIONS[kind][strength]
    x = torch.from_numpy(pixels).double() / 255
    if kind == "noise":
        x = x + amount * torch.from_numpy(np.random.default_rng(strength).normal(size=x.shape))
    elif kind == "blur":
        reach = math.ceil(4 * amount)
        kernel = torch.softmax(-torch.arange(-reach, reach + 1).double().square() / (2 * amount**2), 0)
        padded = nn.functional.pad(x, (reach,) * 4, mode="reflect").flatten(0, 1).unsqueeze(1)
        x = nn.functional.conv2d(padded, kernel.outer(kernel)[None, None]).view_as(x)
    else:
        mean = x.mean((-2, -1), keepdim=True)
        x = mean + amount * (x - mean)
    return (255 * x.clamp(0, 1)).round().to(torch.uint8).numpy()


@lru_cache(maxsize=1)
def read(sizes: Sizes, place: torch.device) -> Task:
    """The files of ``BAYOU_DATA``; gray images have a frame of two pixels."""
    (x, y), (x_test, y_test) = cifar10(CATALOGUE["cifar10"], None)
    gray = {name: read_idx(path_of(f"{FOLDERS[name]}/t10k-images-idx3-ubyte.gz")) for name in AWAY}
    frames = {name: np.pad(one, ((0, 0), (2, 2), (2, 2)))[:, None].repeat(3, 1) for name, one in gray.items()}
    mean = torch.tensor(MEAN, device=place).view(3, 1, 1)

    def images(pixels: Any) -> Tensor:
        return (torch.from_numpy(pixels).to(place).float() / 255 - mean) / SCALE

    def probabilities(name: str, key: str) -> Tensor:
        with np.load(path_of(f"cifar10/{name}.npz"), allow_pickle=False) as file:
            counts = torch.from_numpy(file[key][: sizes.test].astype(np.float64))
        return counts / counts.sum(1, keepdim=True)

    parts = list(zip(CORRUPTIONS, np.array_split(x_test[: min(CORRUPTED, sizes.test)], len(CORRUPTIONS)), strict=True))
    worse = np.concatenate([corrupted(part, kind, strength) for strength in range(STRENGTHS) for kind, part in parts])
    return Task(
        (images(x[: sizes.train]), torch.from_numpy(y[: sizes.train].astype(np.int64)).to(place)),
        {"test": images(x_test[: sizes.test]), "corrupted": images(worse)}
        | {name: images(one[: sizes.away]) for name, one in frames.items()},
        torch.from_numpy(y_test[: sizes.test].astype(np.int64)),
        probabilities("hmc_resnet20_frn_swish", "probs"),
        probabilities("human_labels", "cifar10h_test_counts"),
    )


def momentum(groups: list[dict[str, Any]]) -> torch.optim.SGD:
    """SGD with momentum 0.9; fused, it reads its rates on the device, so that its steps can be recorded there."""
    recorded = [{**group, "capturable": True} for group in groups]
    return torch.optim.SGD(recorded, momentum=0.9, fused=groups[0]["params"][0].is_cuda)


POINT, REFERENCE = "point", "HMC"


def methods(sizes: Sizes, gpu: bool = False) -> dict[str, Callable[[], Any]]:
    """The rows that are fitted. Rates of chains are those of SGD on the mean loss: h = 2·rate/N."""
    often: dict[str, Any] = {"log_every": 100, "checkpoint_every": 10 * sizes.train // sizes.batch}
    budget: dict[str, Any] = {"epochs": sizes.epochs, "batch_size": sizes.batch, "schedule": "cosine", **often}
    budget |= {"compile": gpu, "autocast": gpu}
    descent = budget | {"lr": 0.1, "optimizer": momentum}
    path = descent | {"lr": 0.01, "schedule": "constant", "epochs": max(2, sizes.epochs // 4)}

    def variational(guide: Any) -> Callable[[], Method]:
        return lambda: bayou.VI(guide, start="network", **budget)

    def chain(kind: type[GradientSampler], rate: float, **options: Any) -> Callable[[], Method]:
        length = {"epochs": sizes.epochs, "batch_size": sizes.batch, "draws": sizes.samples, "compile": gpu, **often}
        start: dict[str, Any] = {"chains": 1, "start": None, "dispersal": 0.0, "lr": 2 * rate / sizes.train}
        return lambda: kind(**start, **length, **options)

    def microcanonical() -> Method:
        draws, warmup = sizes.samples, math.ceil(sizes.samples / 4)
        steps = max(1, sizes.epochs * sizes.train // sizes.batch // (GRADIENTS * (draws + warmup)))
        at: dict[str, Any] = {"chains": 1, "start": None, "dispersal": 0.0, "adapt": False, "step_size": 4e-4}
        length: dict[str, Any] = {"draws": draws, "warmup": warmup, "steps": steps, "length": 0.02}
        return bayou.MCLMC(stochastic=True, batch_size=sizes.batch, compile=gpu, **at, **length, log_every=1)

    return {
        POINT: lambda: bayou.MAP(**descent),
        "MC dropout": lambda: bayou.MCDropout(bayou.MAP(**descent)),
        "SWAG": lambda: bayou.SWAG(start=None, **path),
        "Laplace, last layer": lambda: bayou.Laplace(where="last", start=None, batch_size=sizes.batch),
        "Laplace, Kronecker": lambda: bayou.Laplace(start=None, batch_size=sizes.batch),
        **dict.fromkeys(("mean field", *BY_UNIT), variational(bayou.MeanField())),
        "MNF": variational(bayou.MNF()),
        "node noise": variational(bayou.NodeNoise(where="both", penalty=True)),
        "node noise, 4 components": variational(bayou.NodeNoise(where="both", components=4, penalty=True)),
        "VBLL": lambda: VBLL(**path | {"schedule": "cosine"}),
        "BatchEnsemble of 4": variational(RankOne(4)),
        "rank-1 of 4": variational(RankOne(4, std=0.1)),
        **dict.fromkeys(("IVON", *OTHERWISE), lambda: bayou.IVON(**budget | {"lr": 0.2}, hessian=0.5)),
        "SGLD": chain(bayou.SGLD, 0.075),
        "PSGLD": chain(bayou.PSGLD, 3e-4),
        "SGHMC": chain(bayou.SGHMC, 7.5e-3),
        "SGHMC, cyclical": chain(bayou.SGHMC, 0.03, schedule=Cyclical()),
        "MCLMC": microcanonical,
        "SNGP": lambda: bayou.Laplace(where="last", start=bayou.MAP(**descent), batch_size=sizes.batch),
        "DDU": lambda: feature_density,
    }


OTHERWISE: dict[str, dict[str, Any]] = {
    "IVON, prior N(0, 5)": {"prior": bayou.Normal(math.sqrt(5))},
    "IVON, prior N(0, 1/50)": {"prior": bayou.Normal(math.sqrt(1 / 50))},
    "IVON, 40,960 images": {"train": 40_960},
}  # other models: which one the reference has is not said
BY_UNIT = {"mean field, by unit": bayou.Normal(math.sqrt(1 / 5), learn="units")}  # with a learned factor for each unit
FROM_SCRATCH = (POINT, "MC dropout", "SNGP", "IVON", *OTHERWISE)  # all others begin at the point of their seed
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
    "MC dropout, 5 runs": ("MC dropout", 5),
    "MC dropout, 10 runs": ("MC dropout", 10),
    "MCLMC, 5 members": ("MCLMC", 5),
}  # fits of one label, whose predictions are averaged
LABELS = (REFERENCE, *methods(Sizes()), *MEANS)
# rows with colors of their own; the others are in the table
DRAWN = (POINT, "ensemble of 5", "MNF", "SGHMC, cyclical", "IVON", "MC dropout", "IVON, 8 runs")
UNSURE = 0.3  # the confidence below which a bin has too few images to be drawn

Saved = Mapping[str, Any]  # log P(class) (N, 10) and mutual information (N,) of all inputs, and the cost


def predictive(log_p: Any) -> Predictive:
    """Predictions of log P(class), (N, 10), up to constants of the rows."""
    return Predictive(bayou.Categorical().bind(), torch.as_tensor(log_p, dtype=torch.float64).unsqueeze(0))


def predictions(posterior: Posterior, inputs: Mapping[str, Tensor], samples: int, seed: int) -> Saved:
    """In float16; its logarithms have the small probabilities too."""
    found: dict[str, Tensor] = {}
    for name, x in inputs.items():
        # one draw at a time: the convolutions of several would be grouped ones, which are slow
        p = posterior.predict(x, min(samples, posterior.draws or samples), seed=seed, chunk=1, batch_size=2000)
        log_p = p.outputs.double().log_softmax(-1).logsumexp(0)
        found |= {name: log_p - math.log(len(p.outputs)), f"{name} information": p.mutual_information}
    return {name: value.half().cpu().numpy() for name, value in found.items()}


def mixture(parts: Sequence[Saved]) -> Saved:
    """The predictions of several fits with equal weights, and the costs: their sums, and the mean s/epoch."""
    found: dict[str, Any] = {"said": np.unique([part["said"] for part in parts])}
    found |= {name: sum(part[name] for part in parts) for name in ("epochs", "minutes")}
    found["epoch_seconds"] = sum(part["epoch_seconds"] for part in parts) / len(parts)
    for name in ("test", *AWAY, "corrupted"):
        if not all(name in part for part in parts):  # files that were made before it was added
            continue
        log_p = torch.stack([torch.from_numpy(part[name]).double().log_softmax(-1) for part in parts])
        information = torch.stack([torch.from_numpy(part[f"{name} information"]).double() for part in parts])
        whole = Predictive(bayou.Categorical().bind(), log_p)
        found[name] = log_p.logsumexp(0)
        found[f"{name} information"] = whole.mutual_information + information.mean(0)
    return found


def scores(found: Saved, task: Task) -> dict[str, Any]:
    """Scores at the test images, distances from HMC, and what the pictures need."""
    p, truth = predictive(found["test"]), predictive(task.hmc.log())
    bins = metrics.reliability(p, task.y)
    numbers: dict[str, Any] = {
        "accuracy": 100 * metrics.accuracy(p, task.y),
        "nll": metrics.nll(p, task.y),
        "ece": bins.ece,
        "agreement": metrics.agreement(p, truth),
        "total_variation": metrics.total_variation(p, truth),
        "people": spearman(p.entropy, torch.special.entr(task.people).sum(-1)),
        "entropy": float(p.entropy.mean()),
    }
    for name in AWAY:
        if name in found:
            numbers[f"{name}_entropy"] = metrics.auroc(p.entropy, predictive(found[name]).entropy)
            inside, outside = found["test information"], found[f"{name} information"]
            if abs(inside).max() > ROUNDING:  # a point has none
                numbers[f"{name}_information"] = metrics.auroc(inside, outside)
    if "corrupted" in found:
        numbers |= corrupted_scores(found, task)
    order = truth.entropy.argsort().tensor_split(10)
    curves = {
        "confidence": bins.confidence.tolist(),
        "hits": bins.accuracy.tolist(),
        "entropies": [float(p.entropy[part].mean()) for part in order],  # in tenths by the entropy of HMC
    }
    return numbers | curves


def corrupted_scores(found: Saved, task: Task) -> dict[str, Any]:
    """Scores at each strength of corruption; AUROC of the test images against those of the strongest."""
    by_strength = [predictive(part) for part in torch.as_tensor(found["corrupted"]).tensor_split(STRENGTHS)]
    y, strongest = task.y[: len(by_strength[0].entropy)], by_strength[-1]
    numbers: dict[str, Any] = {
        "corrupted_accuracy": [100 * metrics.accuracy(p, y) for p in by_strength],
        "corrupted_nll": [metrics.nll(p, y) for p in by_strength],
        "corrupted_ece": [metrics.reliability(p, y).ece for p in by_strength],
        "corrupted_entropy": metrics.auroc(predictive(found["test"]).entropy, strongest.entropy),
    }
    inside, outside = found["test information"], found["corrupted information"][-len(y) :]
    return numbers | ({"corrupted_information": metrics.auroc(inside, outside)} if abs(inside).max() > ROUNDING else {})


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks; equal values share the mean of theirs."""

    def ranks(values: Tensor) -> Tensor:
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        return (count.cumsum(0) - (count - 1) / 2)[place].double()

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def seconds_per_epoch(history: Sequence[dict[str, float]], batches: float) -> float:
    """Of the second half of a run, after all that is compiled; NaN without a history."""
    timed = [record for record in history if "seconds" in record and "step" in record]
    if len(timed) < 2:
        return math.nan
    first, last = timed[len(timed) // 2 - 1], timed[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]) * batches


@final
@dataclass(frozen=True)
class HMCCifar:
    """Methods × seeds × lengths beside HMC. ``--length`` counts the epochs of one fit."""

    name: str = "hmc-cifar10"
    title: str = "A residual network on CIFAR-10 beside HMC"
    seeds: int = 1
    sizes: Sizes = Sizes()

    def fits(self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None) -> list[Fit]:
        """Methods × seeds; there is one HMC."""
        study.chosen("hmc-cifar10 has no data", data, ["cifar10"])
        return [
            Fit(self.name, "cifar10", label, seed, long, self.settings(label, long))
            for label in study.chosen("hmc-cifar10 has no row", only, LABELS)
            for seed in range(1 if label == REFERENCE else seeds or self.seeds)
            for long in [None if label == REFERENCE else length or self.sizes.epochs]
        ]

    def settings(self, label: str, length: int | None) -> str:
        """A digest of all that a row depends on but seed and device."""
        sizes = replace(self.sizes, epochs=length or self.sizes.epochs)
        made = [] if label == REFERENCE else [MEANS.get(label, (label, 1))[0]]
        made += [POINT] if made and made[0] not in FROM_SCRATCH else []
        other: list[Any] = [part[label] for part in (OTHERWISE, BY_UNIT, {"SNGP": SNGP}) if label in part]
        return digest(sizes, MEAN, SCALE, PRIOR, DROPOUT, *other, *(methods(sizes)[one]() for one in made))

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """The scores of a row, and its cost with that of the point that it begins at."""
        sizes = replace(self.sizes, epochs=fit.length or 0, samples=samples or self.sizes.samples)
        run = Fits(replace(self, sizes=sizes), Path(fit.folder) / self.name, torch.device(device), show)
        if fit.label == REFERENCE:
            return scores({"test": run.task.hmc.log()}, run.task)
        label, count = MEANS.get(fit.label, (fit.label, 1))
        found = mixture([run.saved(label, count * fit.seed + member) for member in range(count)])
        cost = {name: float(found[name]) for name in ("epochs", "minutes", "epoch_seconds")}
        return scores(found, run.task) | cost | {"said": [str(word) for word in found["said"] if word]}

    def render(self, found: Found) -> str:
        """The table: means over seeds ± one standard error, a line for every length."""
        lines = [f"# {self.title}", "", INTRODUCTION, ""]
        if any(line[0]["label"] in ("SNGP", "DDU") for line in self.lines(found)):
            lines += [DISTANCE, ""]
        lines += [f"![Distance, calibration, entropy]({self.name}.png)", ""] if self.drawn(found) else []
        lines += [f"| method | {' | '.join(HEADS.values())} | seeds | |", f"|---|{'---:|' * (len(HEADS) + 1)}---|"]
        for mine in self.lines(found):
            cells = [study.cell([row.get(name) for row in mine], DIGITS.get(name, 3)) for name in HEADS]
            said = ", ".join(sorted({word for row in mine for word in row.get("said", ())}))
            lines.append(f"| {' | '.join([mine[0]['label'], *cells, str(len(mine)), said])} |")
        lines += self.corruptions(found)
        return "\n".join([*lines, "", study.made_by(found), ""])

    def corruptions(self, found: Found) -> list[str]:
        """The table of the rows that were scored on corrupted images."""
        columns = {"accuracy": "accuracy, %", "nll": "NLL", "ece": "ECE"}
        heads = [f"{head} at 1" if k == 1 else str(k) for head in columns.values() for k in range(1, STRENGTHS + 1)]
        heads += ["AUROC at 5: entropy", "information", "seeds"]
        lines = ["", CORRUPTED_INTRODUCTION, "", f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
        for mine in self.lines(found):
            rows = [row for row in mine if "corrupted_nll" in row]
            scored = [([row[f"corrupted_{name}"][k] for row in rows], 1 if name == "accuracy" else 3)
                      for name in columns for k in range(STRENGTHS)]  # fmt: skip
            scored += [([row.get(f"corrupted_{name}") for row in rows], 3) for name in ("entropy", "information")]
            cells = [study.cell(values, digits) for values, digits in scored]
            lines += [f"| {' | '.join([mine[0]['label'], *cells, str(len(rows))])} |"] if rows else []
        return lines if len(lines) > 5 else []

    def lines(self, found: Found) -> list[list[dict[str, Any]]]:
        """Rows of one label and length, in the order of the table; none with other settings."""
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in found["rows"]:
            label, length = row["label"], row["length"]
            if label in LABELS and row["settings"] == self.settings(label, length):
                groups.setdefault((LABELS.index(label), length or 0), []).append(row)
        return [groups[key] for key in sorted(groups)]

    def drawn(self, found: Found) -> bool:
        """Whether there are a row of HMC and another one."""
        labels = [line[0]["label"] for line in self.lines(found)]
        return REFERENCE in labels and len(labels) > 1

    def draw(self, found: Found, path: Path) -> bool:
        """The distance to HMC and its cost; calibration; the entropy beside that of HMC, by tenths of the images."""
        if not self.drawn(found):
            return False
        (hmc, *_), *lines = self.lines(found)
        import matplotlib

        shown = [line for line in lines if line[0]["label"] in DRAWN]
        colors = dict(zip(DRAWN, matplotlib.colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
        with matplotlib.rc_context(plots.STYLE | {"font.size": 9.5, "axes.titlesize": 11}):
            figure = plots.canvas(12, 4.6)
            axes = figure.subplots(1, 3)
            for line in [*(line for line in lines if line not in shown), *shown]:
                color, points = colors.get(line[0]["label"], "#c8ccd0"), np.array(
                    [(row["epochs"], row["total_variation"]) for row in line]
                ).mean(0)  # fmt: skip
                axes[0].plot(*points, "o", color=color, markersize=7 if line in shown else 5)
            for line in {line[0]["label"]: line for line in shown}.values():
                row, color = line[0], colors[line[0]["label"]]
                axes[1].plot(*bins(row), ".-", color=color)
                axes[2].plot(hmc["entropies"], row["entropies"], color=color)
                axes[0].plot([], [], "o-", color=color, label=row["label"])
            axes[0].plot([], [], "o", color="#c8ccd0", label="other rows")
            axes[1].plot(*bins(hmc), "--", color=plots.INK)
            axes[0].set(xscale="log", xlabel="epochs", ylabel="total variation to HMC", ylim=(0, None))
            axes[0].xaxis.set_major_formatter("{x:g}")
            axes[0].xaxis.set_minor_formatter("")
            axes[0].set_xticks(sorted({50, 100, 200, 400} & {round(line[0]["epochs"]) for line in lines}) or [1, 10])
            for axis, top in ((axes[1], 1.0), (axes[2], max(hmc["entropies"]))):
                axis.plot([0, top], [0, top], color="#9aa0a6", linewidth=0.8)
            axes[1].set(xlabel="confidence", ylabel="accuracy; HMC is dashed")
            axes[2].set(xlabel="entropy of HMC, nats", ylabel="entropy")
            for axis in axes:
                figures.plain(axis)
            figure.legend(frameon=False, loc="outside lower center", ncols=8)
        plots.write(figure, path)
        return True


def bins(row: Mapping[str, Any]) -> np.ndarray:
    """The confidence and the accuracy of bins that have images, (2, bins), from ``UNSURE`` on."""
    pairs = [(c, h) for c, h in zip(row["confidence"], row["hits"], strict=True) if (c or 0.0) > UNSURE]
    return np.array(pairs).reshape(-1, 2).T


def write(file: Path, found: Saved) -> None:
    """Write a file whole, or not at all."""
    with file.with_suffix(".part").open("wb") as part:
        np.savez(part, **found)
    file.with_suffix(".part").rename(file)


@final
@dataclass(frozen=True)
class Fits:
    """The files of a folder, made where they are not there."""

    study: HMCCifar
    folder: Path
    place: torch.device
    show: Show

    @property
    def task(self) -> Task:
        """The data on the device."""
        return read(replace(self.study.sizes, epochs=0, samples=0), self.place)

    def file(self, label: str, seed: int) -> Path:
        """Where a fit is kept."""
        epochs, words = self.study.sizes.epochs, re.sub("[^a-z]+", "-", label.lower())
        return self.folder / f"{words}-{epochs}-{seed}-{self.study.settings(label, epochs)}.npz"

    def saved(self, label: str, seed: int) -> Saved:
        """The predictions of a fit; the first process that needs them makes them, and the others wait."""
        file = self.file(label, seed)
        with study.locked(file):
            if not file.exists():
                self._make(label, seed, file)
        with np.load(file, allow_pickle=False) as found:
            return dict(found)

    def _make(self, label: str, seed: int, file: Path) -> None:
        sizes, gpu, cost = self.study.sizes, self.place.type == "cuda", np.zeros(2)
        torch.manual_seed(seed)
        net: nn.Module = resnet(sizes.width, sizes.blocks)
        net = with_dropout(net, DROPOUT) if label == "MC dropout" else net
        if label == "SNGP":
            net = random_feature_head(
                spectral_normalized(net, SNGP["bound"]), SNGP["features"], SNGP["length_scale"], seed=seed
            )
        if label not in FROM_SCRATCH:
            point = self.saved(POINT, seed)
            cost += point["epochs"], point["minutes"]
            net.load_state_dict(load_file(self.file(POINT, seed).with_suffix(".safetensors")))
        if label == "DDU":  # what the point predicts, with −log p of its features in place of the information
            start = time.monotonic()
            density = feature_density(net.to(self.place), self.task.train)
            cost[1] += (time.monotonic() - start) / 60
            known = {name: x for name, x in self.task.inputs.items() if name in point}
            scored = {f"{name} information": -density(x).cpu().numpy() for name, x in known.items()}
            return write(file, {**point, **scored, "minutes": cost[1], "epoch_seconds": math.nan, "said": ""})
        method = methods(sizes, gpu)[label]()
        run = file.with_suffix(".run")  # so that a fit that was ended continues
        cast: Any = nullcontext()  # other methods have a setting, whose cast weights a block around it would keep
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
            getattr(method, "epochs", None) or (sizes.epochs if label in ("MC dropout", "MCLMC", "SNGP") else 1),
            (time.monotonic() - start) / 60,
        )
        batches = sizes.train / method.batch_size
        pace = seconds_per_epoch(
            posterior.history, batches / (GRADIENTS * method.steps) if isinstance(method, bayou.MCLMC) else batches
        )
        said = sorted({one.category.__name__ for one in caught if one.category.__module__.startswith("bayou")})
        found = predictions(posterior, self.task.inputs, sizes.samples, seed)
        if label == POINT:
            save_file(posterior.to_module().state_dict(), file.with_suffix(".safetensors"))
        write(file, {"epochs": cost[0], "minutes": cost[1], "epoch_seconds": pace, "said": ", ".join(said), **found})
        for old in self.folder.glob(f"{run.name}*"):
            old.unlink()


HEADS = {
    "epochs": "epochs", "total_variation": "total variation", "agreement": "agreement", "nll": "NLL",
    "accuracy": "accuracy, %", "ece": "ECE", "entropy": "entropy", "people": "rank correlation with people",
    "fashion_entropy": "AUROC Fashion: entropy", "fashion_information": "information",
    "letters_entropy": "letters: entropy", "letters_information": "information", "minutes": "minutes",
    "epoch_seconds": "s/epoch",
}  # fmt: skip
DIGITS = {"epochs": 0, "accuracy": 2, "nll": 4, "ece": 4, "agreement": 4, "total_variation": 4, "minutes": 1}
INTRODUCTION = (
    "ResNet-20 with filter response normalization and swish, 274,042 weights, prior N(0, 1/5), 50,000 training images "
    "without augmentation; the reference is the predictive mean of the HMC run of Izmailov et al. (2021). Agreement: "
    "the fraction of test images with the same most probable class as HMC; total variation: the mean of "
    "½·Σ|p − p_HMC|; entropy: its mean; rank correlation (Spearman) of the entropy with that of the labels that people "
    "gave (CIFAR-10H); AUROC: test images against Fashion-MNIST and notMNIST (letters), by entropy and by mutual "
    "information. Epochs and minutes are those of all fits of a row, with the point that it begins at; "
    "s/epoch: of the second half of a fit."
)
DISTANCE = (
    "DDU predicts as the point, and its information is −log p of the features. SNGP: 1,024 random features; the bound "
    "of its weights has little effect here, since the normalization behind each convolution rescales what it gives."
)
CORRUPTED_INTRODUCTION = (
    "Corrupted images: 1,500 test images at each of five strengths, 500 each with Gaussian noise, blur and less "
    "contrast; accuracy, NLL and ECE at each strength, and AUROC of all test images against those of the fifth."
)
