"""Scores of unusual inputs on Fashion-MNIST: for a point, an ensemble and MNF, near and far.

    python -m experiments.measure.ood --out trial

A small convolutional network learns 10,000 images. Detectors are fitted to them, with p-values
from 2,000 other training images that the posteriors have not seen. Each cell has the AUROC in
percent and, behind the bar, the percentage of unusual images that are accepted where 95 % of the
test images are. *Rejected*: the percentage of test images with a p-value of .05 at most, which
should be 5; its standard error is about .7, of the 2,000 test images and the 2,000 held-out ones.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.data import load
from bayou.operations.ood import UnusualRows

RESULTS = Path(__file__).parents[1] / "results"
NAME = "ood"
TRAIN, HELD_OUT, TEST = 10_000, 2_000, 2_000
SAMPLES = 20
POINT = bayou.MAP(epochs=8, batch_size=128, lr=1e-3)
POSTERIORS: dict[str, bayou.methods.Method] = {
    "point": POINT,
    "ensemble of 5": bayou.Ensemble(5, POINT),
    "MNF": bayou.VI(bayou.MNF(), epochs=12, batch_size=128, lr=1e-3),
}
FEW = ("entropy", "energy", "mahalanobis", "knn", "vim")
FEW_FEATURES = ("mahalanobis", "knn", "vim")
MIXED = ("energy", "mahalanobis")


def network() -> nn.Module:
    """A LeNet with 8 and 16 channels and 64 features."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def corrupted(x: Tensor) -> Tensor:
    """A third each with noise, a blur and a lower contrast."""
    low, high = float(x.min()), float(x.max())
    index = torch.arange(len(x)) % 3
    noise = 0.3 * (high - low) * rng.normal(len(x), x.shape[1:], x, 1)
    blurred = F.avg_pool2d(x, 5, stride=1, padding=2, count_include_pad=False)
    faint = low + 0.3 * (x - low)
    stacked = torch.stack([(x + noise).clamp(low, high), blurred, faint])
    return stacked[index, torch.arange(len(x))]


def textures(count: int, like: Tensor) -> Tensor:
    """A quarter each of gratings, checkerboards, clouds and noise, over the range of the pixels."""
    size = like.shape[-1]
    u = rng.uniform(count, (3, 1, 1), like, 2)
    grid = torch.arange(size, dtype=like.dtype) / size
    angle = torch.pi * u[:, 0]
    position = grid[None, :, None] * angle.sin() + grid[None, None] * angle.cos()
    grating = 0.5 + 0.5 * (2 * torch.pi * (2 + 8 * u[:, 1]) * position + 6 * u[:, 2]).sin()
    cells = (2 + (6 * u[:, 1]).floor()) * grid
    boards = ((cells.mT.floor() + cells.floor()) % 2).expand(count, size, size)
    noise = rng.uniform(count, (size, size), like, 3)
    clouds = F.avg_pool2d(noise.unsqueeze(1), 7, stride=1, padding=3).squeeze(1)
    low, high = clouds.amin((1, 2), keepdim=True), clouds.amax((1, 2), keepdim=True)
    stacked = torch.stack([grating, boards, (clouds - low) / (high - low), noise])
    images = stacked[torch.arange(count) % 4, torch.arange(count)].unsqueeze(1)
    return like.min() + (like.max() - like.min()) * images


def unusual_inputs(test: Tensor) -> dict[str, Tensor]:
    """Inputs of other kinds, 2,000 of each."""
    inputs = {}
    for title, name in (("letters", "notmnist"), ("KMNIST", "kmnist"), ("MNIST", "mnist")):
        other = load("fashion", ood=name).ood
        if other is None:
            raise ValueError(f"there are no images of {name}; set BAYOU_DATA")
        order = rng.permutation(len(other), 0)
        inputs[title] = other[order[:TEST]]
    inputs["corrupted"] = corrupted(test)
    inputs["textures"] = textures(TEST, test)
    return inputs


def accepted_at_95(inside: Tensor, outside: Tensor) -> float:
    """The fraction of unusual rows below the score that 95 % of the others do not exceed."""
    threshold = inside.sort().values[-(-95 * len(inside) // 100) - 1]
    return float((outside <= threshold).double().mean())


Statistic = Callable[[UnusualRows], tuple[Tensor, Tensor]]


def statistics(names: tuple[str, ...]) -> dict[str, Statistic]:
    """The scores and the combinations: of some rows the score and the p-value."""

    def single(name: str) -> Statistic:
        return lambda rows: (rows.scores[name], rows.p_values[name])

    def joined(parts: tuple[str, ...], rule: str) -> Statistic:
        def compute(rows: UnusualRows) -> tuple[Tensor, Tensor]:
            p_value = rows.combine(parts, rule)  # type: ignore[arg-type]
            return -p_value, p_value

        return compute

    table = {f"`{name}`": single(name) for name in names}
    without_flow = tuple(name for name in names if name != "typicality")
    for rule in ("fisher", "stouffer", "minimum"):
        table[f"all, {rule}"] = joined(without_flow, rule)
    table["entropy, energy, mahalanobis, knn, vim, fisher"] = joined(FEW, "fisher")
    table["mahalanobis, knn, vim, fisher"] = joined(FEW_FEATURES, "fisher")
    table["energy, mahalanobis, fisher"] = joined(MIXED, "fisher")
    return table


def measure(label: str, parts: dict[str, tuple[Tensor, Tensor]], far: dict[str, Tensor]) -> str:
    """The lines of the table of one posterior."""
    start = time.perf_counter()
    method = POSTERIORS[label]
    posterior = bayou.fit(network(), parts["train"], method, seed=0, progress=False)
    seconds = time.perf_counter() - start
    x, y = parts["test"]
    accuracy = float((posterior.predict(x, SAMPLES).mean.argmax(-1) == y).double().mean())
    start = time.perf_counter()
    defaults = bayou.ood.fit(posterior, parts["train"], held_out=parts["held out"], samples=SAMPLES)
    fit_seconds = time.perf_counter() - start
    names = (*defaults.names, "typicality")
    detector = bayou.ood.fit(
        posterior, parts["train"], held_out=parts["held out"], samples=SAMPLES, scores=names
    )
    inside = detector.score(x)
    outside = {title: detector.score(rows) for title, rows in far.items()}
    print(
        f"{label}: accuracy {accuracy:.3f}, fit {seconds:.0f} s, detector {fit_seconds:.1f} s, "
        f"all {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    lines = [
        f"| **{label}**, accuracy {100 * accuracy:.1f} % |" + " |" * (len(far) + 2),
    ]
    for title, compute in statistics(names).items():
        near, p_value = compute(inside)
        rejected = 100 * float((p_value <= 0.05).double().mean())
        areas, cells = [], []
        for rows in outside.values():
            score, _ = compute(rows)
            areas.append(100 * bayou.metrics.auroc(near, score))
            cells.append(f"{areas[-1]:.1f} \\| {100 * accepted_at_95(near, score):.0f}")
        mean = sum(areas) / len(areas)
        lines.append(f"| {title} | {' | '.join(cells)} | {mean:.1f} | {rejected:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all posteriors and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", choices=[*POSTERIORS], default=[*POSTERIORS])
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    start = time.perf_counter()
    data = load("fashion")
    order = rng.permutation(len(data.train[0]), 0)
    held_out = order[TRAIN : TRAIN + HELD_OUT]
    test = rng.permutation(len(data.test[0]), 0)[:TEST]
    parts = {
        "train": tuple(item[order[:TRAIN]] for item in data.train),
        "held out": tuple(item[held_out] for item in data.train),
        "test": tuple(item[test] for item in data.test),
    }
    far = unusual_inputs(parts["test"][0])
    head = ["score", *far, "mean AUROC", "rejected, %"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    lines += [measure(label, parts, far) for label in args.only]  # type: ignore[arg-type]
    text = (
        f"Fashion-MNIST, {TRAIN:,} training images, a small LeNet; {HELD_OUT:,} held-out images for "
        f"the p-values; {TEST:,} test images and {TEST:,} of every other kind. AUROC in percent \\| "
        "percentage of unusual images accepted where 95 % of the test images are. *Rejected*: "
        "percentage of test images with p ≤ .05. *Corrupted*: noise, a blur or a third of the "
        "contrast; *textures*: gratings, checkerboards, clouds, noise. *All*: all scores above but "
        "`typicality`. One seed.\n\n"
    )
    minutes = (time.perf_counter() - start) / 60
    command = "python -m experiments.measure.ood"
    if args.only != [*POSTERIORS]:
        command += " --only " + " ".join(f'"{label}"' for label in args.only)
    footer = (
        f"\n\n`{command}`, {minutes:.1f} minutes, commit {commit}, {date.today()}, bayou "
        f"{bayou.__version__}, torch {torch.__version__}, {torch.get_num_threads()} thread(s).\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{NAME}.md").write_text(text + "\n".join(lines) + footer)


if __name__ == "__main__":
    main()
