"""What a user gets without tuning: every method as it comes, on small networks of one's own, beside
plain training.

No setting may be chosen by looking at these splits: methods have their defaults.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayou
from bayou import metrics
from bayou.core.progress import Show
from bayou.diagnostics import check
from bayou.inference.method import Method
from bayou.likelihoods import Categorical
from bayou.likelihoods.predictive import Predictive
from experiments import study
from experiments.study import Fit, Found

Rows = tuple[Any, Tensor]  # inputs, a tensor or a tuple of them, and classes
TEST = 500  # fresh rows of made data


class Digits(nn.Sequential):
    """A convolutional network with batch norm, for 8 × 8 digits."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


class Transformer(nn.Module):
    """One block of attention over tokens; the classes are read off the last one."""

    def __init__(
        self, tokens: int = 24, length: int = 9, width: int = 32, classes: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()
        self.block = nn.TransformerEncoderLayer(
            width, 2, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, classes)

    def reset_parameters(self) -> None:
        """Places, drawn anew for every member of an ensemble; the layers have such a method of
        their own.
        """
        nn.init.normal_(self.place, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embed(x) + self.place)[:, -1])
        return out


class Recurrent(nn.Module):
    """A GRU; the classes are read off its last state."""

    def __init__(self, width: int = 40, classes: int = 4) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(x)[0][:, -1])
        return out


class TwoInputs(nn.Module):
    """Numbers, and a category that says how to read them."""

    def __init__(self, numbers: int = 8, categories: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.numbers = nn.Linear(numbers, 64)
        self.category = nn.Embedding(categories, 64)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor, category: Tensor) -> Tensor:
        out: Tensor = self.body(self.numbers(x) * (1 + self.category(category)))
        return out


class Residual(nn.Module):
    """x ← x + f(norm(x)), three times."""

    def __init__(self, inputs: int = 20, width: int = 64, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
            )
            for _ in range(3)
        )
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def _digits(rows: int, seed: int) -> Rows:
    from sklearn.datasets import load_digits

    images, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))[:rows]
    return torch.tensor(images[order] / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(
        y[order]
    )


def _recall(rows: int, seed: int) -> Rows:
    """Tokens 4·key + value of four keys, shuffled among others, then 16 + key: the class is its
    value, mostly.
    """
    draw = np.random.default_rng((seed, 1))
    keys = np.argsort(draw.random((rows, 4)), axis=1)
    values = draw.integers(0, 4, (rows, 4))
    asked = draw.integers(0, 4, rows)
    x = np.concatenate([4 * keys + values, draw.integers(20, 24, (rows, 4))], axis=1)
    x = np.take_along_axis(x, np.argsort(draw.random(x.shape), axis=1), axis=1)
    here = np.arange(rows)
    x = np.concatenate([x, 16 + keys[here, asked][:, None]], axis=1)
    wrong = draw.random(rows) < 0.1
    return torch.tensor(x), torch.tensor(
        np.where(wrong, draw.integers(0, 4, rows), values[here, asked])
    )


def _waves(rows: int, seed: int) -> Rows:
    """Twelve values of a sine in noise; the class is its frequency."""
    draw = np.random.default_rng((seed, 2))
    y = draw.integers(0, 4, rows)
    time, phase = np.arange(12) / 12, draw.uniform(0, 2 * np.pi, (rows, 1))
    x = np.sin(2 * np.pi * (1 + y[:, None]) * time + phase) + 0.5 * draw.standard_normal((rows, 12))
    return torch.tensor(x, dtype=torch.float32).unsqueeze(-1), torch.tensor(y)


def _categories(rows: int, seed: int) -> Rows:
    """The largest of three combinations of the numbers, which the category has chosen, with some
    noise.
    """
    draw = np.random.default_rng((seed, 3))
    mixes = np.random.default_rng(3).standard_normal((10, 8, 3))
    x, category = draw.standard_normal((rows, 8)), draw.integers(0, 10, rows)
    scores = np.einsum("nd,ndk->nk", x, mixes[category]) + 0.7 * draw.standard_normal((rows, 3))
    return (torch.tensor(x, dtype=torch.float32), torch.tensor(category)), torch.tensor(
        scores.argmax(1)
    )


def _clusters(rows: int, seed: int) -> Rows:
    """Three classes of four clusters each in twenty numbers, of which half say nothing."""
    draw = np.random.default_rng((seed, 4))
    centres = 1.5 * np.random.default_rng(4).standard_normal((12, 10))
    which = draw.integers(0, 12, rows)
    x = np.concatenate(
        [centres[which] + draw.standard_normal((rows, 10)), draw.standard_normal((rows, 10))], 1
    )
    return torch.tensor(x, dtype=torch.float32), torch.tensor(which % 3)


@final
@dataclass(frozen=True)
class Task:
    """A network and its data: ``rows`` to learn from, and TEST more of made ones, or what is left
    of real ones.
    """

    net: Callable[[], nn.Module]
    make: Callable[[int, int], Rows]
    rows: int
    total: int | None = None  # rows that there are

    def split(self, seed: int) -> tuple[Rows, Rows]:
        """Rows to learn from and rows to test on; every seed is another draw."""
        x, y = self.make(self.total or self.rows + TEST, seed)
        some = tuple(item[: self.rows] for item in x) if isinstance(x, tuple) else x[: self.rows]
        rest = tuple(item[self.rows :] for item in x) if isinstance(x, tuple) else x[self.rows :]
        return (some, y[: self.rows]), (rest, y[self.rows :])


TASKS: dict[str, Task] = {
    "CNN with batch norm, digits": Task(Digits, _digits, 400, 1797),
    "Transformer, recall": Task(Transformer, _recall, 1000),
    "GRU, waves": Task(Recurrent, _waves, 300),
    "two inputs, categories": Task(TwoInputs, _categories, 1000),
    "residual MLP, clusters": Task(Residual, _clusters, 600),
}
PLAIN, TRAINED = "plain", "Laplace(start=None)"
METHODS: dict[str, Callable[[], Method]] = {
    "MAP()": bayou.MAP,
    "Ensemble(3)": lambda: bayou.Ensemble(3, init="reset"),
    "VI(FFG())": lambda: bayou.VI(bayou.MeanField()),
    "VI(MNF())": lambda: bayou.VI(bayou.MNF()),
    "IVON()": bayou.IVON,
    "Laplace()": bayou.Laplace,
    TRAINED: lambda: bayou.Laplace(start=None),
    "SWAG()": bayou.SWAG,
    "SGLD()": bayou.SGLD,
}
LABELS = (PLAIN, *METHODS)
EPOCHS, BATCH = 40, 32  # of plain training


def train(net: nn.Module, data: Rows, seed: int) -> nn.Module:
    """What everybody writes: Adam on the cross-entropy."""
    x, y = data
    inputs = x if isinstance(x, tuple) else (x,)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y), generator=order).split(BATCH):
            loss = cross_entropy(net(*(item[batch] for item in inputs)), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


@final
@dataclass(frozen=True)
class Networks:
    """Networks × methods × splits."""

    name: str = "networks"
    title: str = "Every method, as it comes, on small networks"
    seeds: int = 3

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Networks × methods × splits."""
        if length is not None:
            raise ValueError(
                "networks runs every method as long as it would by itself; leave out --length"
            )
        return [
            Fit(self.name, one, label, seed)
            for seed in range(seeds or self.seeds)
            for one in study.chosen("networks has no network", data, list(TASKS))
            for label in study.chosen("networks has no row", only, LABELS)
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit one method to one split, and score it on the other rows; what it warned of is part of
        the row.
        """
        task, place = TASKS[fit.data], torch.device(device)
        rows, test = (_on(part, place) for part in task.split(fit.seed))
        torch.manual_seed(fit.seed)
        net = task.net().to(place)
        if fit.label == TRAINED:
            train(net, rows, fit.seed)
        flags, start = list[str](), time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if fit.label == PLAIN:
                train(net, rows, fit.seed)
                seconds, p = time.process_time() - start, plain(net, test[0])
            else:
                posterior = bayou.fit(
                    net, rows, method=METHODS[fit.label](), seed=fit.seed, progress=show
                )
                seconds, p = (
                    time.process_time() - start,
                    posterior.predict(test[0], samples, seed=fit.seed),
                )
                flags = [
                    one.name
                    for one in check(posterior, rows, test, predictive=p, seed=fit.seed).flags
                ]
        scores = metrics.summary(p, test[1])
        scores["error"] = 100 * (1 - scores["accuracy"])
        said = {
            one.category.__name__ for one in caught if one.category.__module__.startswith("bayou")
        }
        numbers = {name: scores[name] for name in COLUMNS}
        return numbers | {"said": sorted(said), "flags": flags, "seconds": round(seconds, 1)}

    def render(self, found: Found) -> str:
        """The table: means over splits ± one standard error, and what was warned of."""
        heads = " | ".join(HEADS[name] for name in COLUMNS)
        lines = [
            f"# {self.title}",
            "",
            INTRODUCTION,
            "",
            f"| network | method | {heads} | splits | s | |",
        ]
        lines.append(f"|---|---|{'---:|' * 5}---|")
        for one in TASKS:
            for label in LABELS:
                mine = [row for row in found["rows"] if (row["data"], row["label"]) == (one, label)]
                if mine:
                    cells = [
                        study.cell([row[name] for row in mine], DIGITS[name]) for name in COLUMNS
                    ]
                    seconds = fmean(row["seconds"] for row in mine)
                    said = sorted({word for row in mine for word in (*row["said"], *row["flags"])})
                    parts = [one, label, *cells, str(len(mine)), f"{seconds:.0f}", ", ".join(said)]
                    lines.append(f"| {' | '.join(parts)} |")
        return "\n".join([*lines, "", study.made_by(found), ""])

    def draw(self, found: Found, path: Path) -> bool:
        """Nothing."""
        return False


def plain(net: nn.Module, x: Any) -> Predictive:
    """What a trained network says, as a Predictive of one draw."""
    with torch.no_grad():
        outputs = net(*x) if isinstance(x, tuple) else net(x)
    return Predictive(Categorical().bind(), outputs.unsqueeze(0))


def _on(rows: Rows, place: torch.device) -> Rows:
    x, y = rows
    return (tuple(item.to(place) for item in x) if isinstance(x, tuple) else x.to(place)), y.to(
        place
    )


INTRODUCTION = (
    "Networks of some 10⁴ weights, written as anybody would, with `bayou.fit(net, data, method=...)` and nothing told "
    "beside the method. `plain` is the network trained "
    f"by Adam for {EPOCHS} epochs of batches of {BATCH}, and the network that `Laplace(start=None)` is "
    "given. Every split is another draw of the rows. s: seconds of one core. The "
    "last column has what the fits warned of, and what `bayou.diagnostics.check` flags on training and test rows."
)
COLUMNS = ("error", "nll", "ece")
HEADS = {"error": "error, %", "nll": "NLL", "ece": "ECE"}
DIGITS = {"error": 2, "nll": 3, "ece": 3}
