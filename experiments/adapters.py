"""Posteriors over low-rank adapters of a small transformer: of text, and of images from few
examples.

A base is trained once on one text (wiki27) or on CIFAR-10 and kept as a file in the cache; its
adapters (LoRA on the queries and values of every block, Hu et al. 2021) are fitted to other data by
every method.
"""

from __future__ import annotations

import lzma
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import bayou
from bayou import metrics
from bayou.core.progress import Show
from bayou.data import DataError
from bayou.data.files import cache_dir, folders
from bayou.data.images import read_idx, read_sheet
from bayou.inference.method import Method
from bayou.likelihoods.predictive import Predictive
from bayou.methods import TFB
from bayou.metrics.scores import By, uncertainties
from bayou.network.target import PriorRules
from bayou.posteriors import Posterior
from experiments import study
from experiments.study import Fit, Found

LETTERS = " abcdefghijklmnopqrstuvwxyz"
IMAGES = {
    "fashion": "kmnist",
    "kmnist": "letters",
    "letters": "fashion",
}  # and what is out of distribution for each
FOLDERS = {"fashion": "fashion_mnist", "kmnist": "kmnist", "letters": "notmnist"}
CIFAR = ("data_batch_1", "data_batch_2")  # files of 10,000 images to train the base
WHERE = ("*lora_*", "head.*")


@final
@dataclass(frozen=True)
class Sizes:
    """All numbers of a run: of the transformer, of its adapters, of the rows and of the base."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    rank: int = 4
    length: int = 64  # characters in a row
    train: int = 200
    held: int = 200
    test: int = 1000
    batch: int = 50
    base_steps: int = 3000
    base_batch: int = 256
    steps: int = 200
    samples: int = 32


class LoRA(nn.Module):
    """W·x + b + 2·B·A·x: W and b are frozen, B begins at 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """B = 0, so that every member of an ensemble begins at the base."""
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.lora_B(self.lora_A(x))
        return out


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a sum."""

    future: Tensor

    def __init__(self, width: int, heads: int, length: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.register_buffer("future", torch.ones(length, length).triu(1) > 0, persistent=False)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores.masked_fill(self.future, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.second(x))
        return out


class Transformer(nn.Module):
    """Of characters (B, T), causal, with outputs (B, T, 27); or of 4 × 4 patches of images (B, 3,
    32, 32): (B, 10).
    """

    def __init__(self, sizes: Sizes, text: bool) -> None:
        super().__init__()
        self.text, width = text, sizes.width
        self.embed = nn.Embedding(len(LETTERS), width) if text else nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(sizes.length if text else 64, width))
        self.blocks = nn.Sequential(
            *(Block(width, sizes.heads, sizes.length, text) for _ in range(sizes.layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS) if text else 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = self.blocks((h if self.text else h.flatten(2).transpose(1, 2)) + self.place)
        out: Tensor = self.head(self.norm(h if self.text else h.mean(1)))
        return out


def adapted(base: Transformer, rank: int) -> Transformer:
    """The base, frozen, with adapters; new classes also have a new head."""
    base.requires_grad_(False)
    for block in base.blocks:
        for name in ("query", "value"):
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            setattr(block, name, LoRA(layer, rank))
    if not base.text:
        base.head.requires_grad_(True)
        base.head.reset_parameters()
    return base


def path_of(name: str) -> Path:
    """A file of ``BAYOU_DATA``, or a DataError."""
    found = next((path for folder in folders() if (path := folder / name).is_file()), None)
    if found is None:
        raise DataError(
            f"there is no {name} in {', '.join(map(str, folders()))}; set BAYOU_DATA to its folder"
        )
    return found


@lru_cache(maxsize=3)
def read_text(name: str) -> Tensor:
    """The 27 characters of text8 by number: of a file, or of Python's reference, which every
    installation has.
    """
    if name == "python":
        from pydoc_data.topics import topics

        raw = " ".join(topics[topic] for topic in sorted(topics))
    else:
        raw = lzma.decompress(path_of(f"text/{name}.txt.xz").read_bytes()).decode()
    plain = re.sub("[^a-z]+", " ", raw.lower()).encode()
    return (
        torch.from_numpy(np.frombuffer(plain, np.uint8).astype(np.int64))
        .sub(ord("a") - 1)
        .clamp_min(0)
    )


@lru_cache(maxsize=4)
def read_images(name: str) -> tuple[Tensor, Tensor]:
    """Images as (N, 3, 32, 32) and their classes; gray ones have a frame of two pixels."""
    if name == "cifar10":
        with np.load(path_of("cifar10/labels.npz"), allow_pickle=False) as labels:
            y = labels["train"][: 10_000 * len(CIFAR)]
        x = torch.from_numpy(
            np.concatenate([read_sheet(path_of(f"cifar10/{part}.webp")) for part in CIFAR])
        )
    else:
        files = (
            path_of(f"{FOLDERS[name]}/t10k-{part}-ubyte.gz")
            for part in ("images-idx3", "labels-idx1")
        )
        images, y = (read_idx(file) for file in files)
        x = F.pad(torch.from_numpy(images.copy()).unsqueeze(1), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return (x.float() / 255 - 0.5) / 0.25, torch.from_numpy(y.astype(np.int64))


def rows_of_text(name: str, count: int, length: int, seed: int) -> Tensor:
    """Passages that do not overlap, (count, length), in an order of their own for every seed."""
    text = read_text(name)
    starts = torch.randperm(len(text) // length, generator=torch.Generator().manual_seed(seed))[
        :count
    ]
    return text.unfold(0, length, length)[starts]


class Task(NamedTuple):
    """Rows (x, y) to fit, to choose settings and to test, and inputs that are out of
    distribution.
    """

    train: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    away: Tensor


def task(data: str, sizes: Sizes, seed: int, device: torch.device) -> Task:
    """The rows of a data set, other ones for every seed."""
    parts = [sizes.train, sizes.held, sizes.test]
    if data == "text":
        x = y = rows_of_text("tinyshakespeare", sum(parts), sizes.length, seed)
        away = rows_of_text("python", sizes.test, sizes.length, seed)
    else:
        x, y = read_images(data)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: sum(parts)]
        x, y, away = x[order], y[order], read_images(IMAGES[data])[0][: sizes.test]
    train, held, test = zip(x.to(device).split(parts), y.to(device).split(parts), strict=True)
    return Task(train, held, test, away.to(device))


def train_base(text: bool, sizes: Sizes, device: torch.device) -> Transformer:
    """Adam on wiki27 or CIFAR-10 (mirrored at random), with a rate that falls to 0."""
    torch.manual_seed(0)
    net = Transformer(sizes, text).to(device)
    draw = torch.Generator().manual_seed(0)
    source, labels = (read_text("wiki27"),) * 2 if text else read_images("cifar10")
    source, labels = source.to(device), labels.to(device)
    window, last = torch.arange(sizes.length, device=device), len(source) - sizes.length * text
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(sizes.base_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(
                1.0, 30 * (step + 1) / sizes.base_steps, 2 * (1 - step / sizes.base_steps)
            )
        index = torch.randint(last, (sizes.base_batch, 1), generator=draw).to(device)
        if text:
            x = source[index + window]
            loss = F.cross_entropy(net(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        else:
            x = source[index[:, 0]]
            x = torch.where((index % 2 == 0).view(-1, 1, 1, 1) ^ (step % 2 == 0), x, x.flip(-1))
            loss = F.cross_entropy(net(x), labels[index[:, 0]])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net


def kept(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of a file in the cache; the first process that needs them makes them, and the others
    wait.
    """
    file = cache_dir() / f"adapters-{name}.safetensors"
    with study.locked(file):
        if not file.exists():
            part = file.with_suffix(".part")
            save_file(make(), part)
            part.rename(file)
    return load_file(file)


def base(text: bool, sizes: Sizes, device: torch.device) -> Transformer:
    """The trained base."""
    made = [
        sizes.width,
        sizes.layers,
        sizes.heads,
        sizes.length,
        sizes.base_steps,
        sizes.base_batch,
        *CIFAR,
    ]
    name = f"{'text' if text else 'images'}-{device.type}-{'-'.join(map(str, made))}"
    net = Transformer(sizes, text)
    net.load_state_dict(kept(name, lambda: train_base(text, sizes, device).state_dict()))
    return net.to(device)


POINT, TEMPERATURE = "point", "temperature"
SCALES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of priors of a Laplace approximation
BETAS = (1.0, 0.1, 0.01)  # weights of the KL
PRIOR = {
    "*lora_A*": bayou.Normal(0.1),
    "*": bayou.Normal(1.0),
}  # A begins with a standard deviation of 0.05


def on_a(family: Any) -> dict[str, Any]:
    """A family of A, and points for the rest."""
    return {"*lora_A*": family, "*": bayou.Delta()}


class Candidate(NamedTuple):
    """A setting of a row: its name, its method and its prior."""

    name: str
    method: Method
    prior: PriorRules = PRIOR


def candidates(label: str, sizes: Sizes, lr: float = 3e-3) -> list[Candidate]:
    """The settings of a row, of which held-out rows choose one; ``lr``: the rate of the point."""
    budget: dict[str, Any] = {"steps": sizes.steps, "batch_size": sizes.batch, "log_every": 100}

    def variational(guide: Any) -> list[Candidate]:
        return [
            Candidate(f"β {beta:g}", bayou.VI(guide, beta=beta, lr=lr, **budget)) for beta in BETAS
        ]

    rows: Mapping[str, Callable[[], list[Candidate]]] = {
        POINT: lambda: [
            Candidate(f"lr {rate:g}", bayou.MAP(lr=rate, **budget)) for rate in (3e-3, 1e-2, 3e-2)
        ],
        TEMPERATURE: lambda: [],
        "TFB": lambda: [Candidate("", TFB(start=None))],
        "Laplace-LoRA": lambda: [
            Candidate(
                f"prior {scale:g}",
                bayou.Laplace(start=None, batch_size=sizes.batch),
                bayou.Normal(scale),
            )
            for scale in SCALES
        ],
        "mean field on A (BLoB)": lambda: variational(on_a(bayou.MeanField())),
        "mean field on A and B": lambda: variational(bayou.MeanField()),
        "MNF on A": lambda: variational(on_a(bayou.MNF())),
        "IVON": lambda: [
            Candidate(f"lr {rate:g}", bayou.IVON(lr=rate, cold=True, **budget))
            for rate in (0.03, 0.1, 0.3)
        ],
        "ensemble of 5": lambda: [
            Candidate("", bayou.Ensemble(5, bayou.MAP(lr=lr, **budget), init="reset"))
        ],
    }
    return rows[label]()


LABELS = (
    POINT, TEMPERATURE, "TFB", "Laplace-LoRA", "mean field on A (BLoB)", "mean field on A and B", "MNF on A", "IVON",
    "ensemble of 5",
)  # fmt: skip
POST_HOC = (TEMPERATURE, "TFB", "Laplace-LoRA")  # rows that begin with the point


class Fitted(NamedTuple):
    """A posterior, the setting that was chosen, and the seconds of its fit."""

    posterior: Posterior
    chosen: Candidate
    seconds: float


def best(
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
    among: list[Candidate],
    seed: int,
    show: Show,
) -> Fitted:
    """The posterior with the least NLL on held-out rows."""
    fitted = list[tuple[float, Fitted]]()
    likelihood = bayou.Categorical(shift=1) if data[1].ndim > 1 else bayou.Categorical()
    for one in among:
        start = time.monotonic()
        posterior = bayou.fit(
            net,
            data,
            one.method,
            likelihood=likelihood,
            prior=one.prior,
            where=_where(net),
            seed=seed,
            progress=show,
        )
        if data[0].is_cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
        nll = metrics.nll(posterior.predict(held[0], _draws(posterior, 16), seed=seed), held[1])
        fitted.append((nll if math.isfinite(nll) else math.inf, Fitted(posterior, one, seconds)))
    return min(fitted, key=lambda pair: pair[0])[1]


def _where(net: nn.Module) -> list[str]:
    return list(WHERE[: 1 if net.text else 2])


def _draws(posterior: Posterior, samples: int) -> int:
    return min(samples, posterior.draws or samples)


def by_token(p: Predictive, y: Tensor) -> tuple[Predictive, Tensor]:
    """Predictions of a text as rows of their own: outputs (S, B·(T − 1), 27) and the characters
    that follow.
    """
    if p.outputs.ndim < 4:
        return p, y
    return Predictive(bayou.Categorical().bind(), p.outputs[:, :, :-1].flatten(1, 2)), y[
        :, 1:
    ].flatten()


def scores(posterior: Posterior, task: Task, samples: int, seed: int) -> dict[str, float]:
    """Scores of characters or images; the AUROC is of passages or images."""
    draws, (x, y) = _draws(posterior, samples), task.test
    options: dict[str, Any] = {
        "seed": seed,
        "batch_size": 200,
    }  # several processes share the memory of a GPU
    p, labels = by_token(posterior.predict(x, draws, **options), y)
    away, _ = by_token(posterior.predict(task.away, draws, **options), y)
    found = {
        "accuracy": 100 * metrics.accuracy(p, labels),
        "nll": metrics.nll(p, labels),
        "ece": metrics.ece(p, labels),
    }
    measures: tuple[By, ...] = ("entropy", "mutual_information")
    for name in measures:
        inside, outside = (uncertainties(q, name).view(len(x), -1).mean(1) for q in (p, away))
        found[f"auroc_{name}"] = metrics.auroc(inside, outside)
    return found


@final
@dataclass(frozen=True)
class Adapters:
    """Data sets × methods × seeds. ``--length`` counts the steps of a fit."""

    name: str = "adapters"
    title: str = "Posteriors over low-rank adapters"
    seeds: int = 3
    sizes: Sizes = Sizes()

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Data sets × methods × seeds."""
        return [
            Fit(
                self.name,
                one,
                label,
                seed,
                length or self.sizes.steps,
            )
            for label in study.chosen(
                "adapters has no row", only, LABELS
            )  # first, so that processes share few points
            for seed in range(seeds or self.seeds)
            for one in study.chosen("adapters has no data", data, ["text", *IMAGES])
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit the point, then the row, and score it; a cost is in multiples of the point beside
        it.
        """
        sizes = replace(self.sizes, steps=fit.length or self.sizes.steps)
        place = torch.device(device)
        rows = task(fit.data, sizes, fit.seed, place)
        net = base(fit.data == "text", sizes, place)
        torch.manual_seed(fit.seed)
        net = adapted(net, sizes.rank).to(place).eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rates = {one.name: one for one in candidates(POINT, sizes)}
            best(
                net,
                rows.train,
                rows.held,
                candidates(POINT, replace(sizes, steps=2))[:1],
                fit.seed,
                show,
            )  # warm-up

            def choose() -> dict[str, Tensor]:
                chosen = best(
                    net, rows.train, rows.held, list(rates.values()), fit.seed, show
                ).chosen.name
                return {chosen: torch.empty(0)}

            name = f"rate-{fit.data}-{fit.seed}-{place.type}-{sizes.steps}"
            (rate,) = kept(name, choose)  # the same for all rows
            point = best(net, rows.train, rows.held, [rates[rate]], fit.seed, show)
            row, cost = self._row(fit, sizes, net, rows, point, show)
        with TemporaryDirectory() as folder:
            row.posterior.save(Path(folder) / "adapter.bayou")
            size = (Path(folder) / "adapter.bayou").stat().st_size / 1000
        said = sorted(
            {one.category.__name__ for one in caught if one.category.__module__.startswith("bayou")}
        )
        found = scores(row.posterior, rows, samples or sizes.samples, fit.seed)
        return found | {"cost": cost, "kilobytes": size, "chosen": row.chosen.name, "said": said}

    def _row(
        self, fit: Fit, sizes: Sizes, net: nn.Module, rows: Task, point: Fitted, show: Show
    ) -> tuple[Fitted, float]:
        """The row, and its cost in multiples of the point."""
        if fit.label == POINT:
            return point, 1.0
        own, after = (
            candidates(fit.label, sizes, getattr(point.chosen.method, "lr", 0.0)),
            fit.label in POST_HOC,
        )
        start = time.monotonic()
        if fit.label == TEMPERATURE:
            bayou.calibrate(point.posterior, rows.held)
            row = point._replace(seconds=time.monotonic() - start)
        else:
            trained = _at(point.posterior, net) if after else net
            data = rows.held if fit.label == "TFB" else rows.train
            row = best(trained, data, rows.held, own, fit.seed, show)
        return row, row.seconds / point.seconds + after

    def render(self, found: Found) -> str:
        """The table: means over seeds ± one standard error."""
        lines = [
            f"# {self.title}",
            "",
            INTRODUCTION,
            "",
            f"| data | method | {' | '.join(HEADS.values())} | seeds | chosen |",
        ]
        lines.append(f"|---|---|{'---:|' * (len(HEADS) + 1)}---|")
        for one in ("text", *IMAGES):
            for label in LABELS:
                mine = [row for row in found["rows"] if (row["data"], row["label"]) == (one, label)]
                longest = max((row["length"] for row in mine), default=None)
                mine = [row for row in mine if row["length"] == longest]
                if mine:
                    cells = [
                        study.cell([row[name] for row in mine], DIGITS[name]) for name in HEADS
                    ]
                    chosen = ", ".join(row["chosen"] for row in mine) if mine[0]["chosen"] else ""
                    said = sorted({word for row in mine for word in row["said"]})
                    lines.append(
                        f"| {' | '.join([one, label, *cells, str(len(mine)), '; '.join([chosen, *said])])} |"
                    )
        return "\n".join([*lines, "", study.made_by(found), ""])

    def draw(self, found: Found, path: Path) -> bool:
        """Nothing."""
        return False


def _at(point: Posterior, net: nn.Module) -> nn.Module:
    """The network with the adapters of a point."""
    trained = point.to_module()
    for name, parameter in net.named_parameters():
        trained.get_parameter(name).requires_grad_(parameter.requires_grad)
    return trained


HEADS = {
    "accuracy": "accuracy, %",
    "nll": "NLL",
    "ece": "ECE",
    "auroc_entropy": "AUROC, entropy",
    "auroc_mutual_information": "AUROC, mutual information",
    "cost": "cost, × point",
    "kilobytes": "file, kB",
}
DIGITS = {"accuracy": 1, "nll": 3, "ece": 3, "cost": 1, "kilobytes": 0}
DIGITS |= {"auroc_entropy": 3, "auroc_mutual_information": 3}
INTRODUCTION = (
    f"A transformer of {Sizes.layers} blocks of width {Sizes.width} is trained on one set of data and frozen; LoRA of "
    f"rank {Sizes.rank} on its queries and values (and, for images, a new head) is fitted to another. Text: from "
    f"Wikipedia (wiki27) to {Sizes.train} passages of {Sizes.length} characters of Shakespeare; passages of Python's "
    "reference manual are out of distribution. All are reduced to 26 letters and the space, and scores are those of "
    f"the next character. Images: from {10_000 * len(CIFAR):,} of CIFAR-10 to {Sizes.train} of Fashion-MNIST, KMNIST "
    f"or notMNIST (letters), each with another of the three out of distribution. {Sizes.test:,} test rows. Settings "
    f"(the last column, by seed), the temperature and the anchor rows of TFB: {Sizes.held} further rows, others for "
    "every seed. AUROC: of the mean entropy or mutual information of a row. Cost: seconds of the chosen fit over those "
    "of the point in the same process; rows that begin with the point include it. "
    f"{Sizes.steps} steps of batches of {Sizes.batch}, {Sizes.samples} draws; β: the weight of the KL."
)
