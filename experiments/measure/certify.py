"""One small LeNet from several with dropout: how far the student is from its teacher, by the rows that it
learns from.

    python -m experiments.measure.certify --jobs 2 --out trial

The teacher is a mixture of three MC dropout fits to 8×8 digits; the reference is a mixture of ten
other fits by the same method, which stands for what the teacher estimates. Students differ in the
copies of the training images that the teacher labels (``Augment``), at the same number of steps.
Settings are chosen by the distance to the teacher on held-out images and corrupted ones of them;
the other columns are of test images, corrupted test images and letters.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.data import load
from bayou.operations import Augment, StoredPredictions, certify
from bayou.select import with_dropout
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
NAME = "certify"
DROPOUT = 0.2
AUGMENTATIONS: dict[str, Augment | None] = {
    "none": None,
    "4: noise .5": Augment(noise=0.5, mixup=False),
    "4: shift 1": Augment(shift=1, mixup=False),
    "4: mixup": Augment(),
    "16: mixup, noise .5": Augment(copies=16, noise=0.5),
    "16: mixup, shift 1, noise .5": Augment(copies=16, shift=1, noise=0.5),
}
KEEPS = {"student": None, "student, Dirichlet": "epistemic"}


@dataclass(frozen=True)
class Study:
    """Sizes of the fits."""

    train: int = 600
    held_out: int = 300
    epochs: int = 60
    fits: int = 3
    reference_fits: int = 10
    draws: int = 30
    steps: int = 4000
    folder: Path = RESULTS

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Images and labels of each part, and those of inputs to certify on."""
        data = load("digits")
        x, y = data.train
        order = rng.permutation(len(x), 0)
        train, held = order[: self.train], order[self.train :][: self.held_out]
        test = torch.cat([x[order[self.train + self.held_out :]], data.test[0]])
        letters = data.ood[0] if isinstance(data.ood, tuple) else data.ood
        return {
            "x": x[train],
            "y": y[train],
            "held out": x[held],
            "held out, corrupted": corrupted(x[held]),
            "test": test,
            "corrupted": corrupted(test),
            "letters": letters,
        }

    def network(self, seed: int) -> nn.Module:
        """Return a LeNet, that of the teacher and of the student."""
        torch.manual_seed(seed)
        convolutions = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1))
        dense = (nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
        return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *dense)


def corrupted(x: Tensor) -> Tensor:
    """Return images with noise, blur and rotation, a third each."""
    noisy, blurred, turned = x.tensor_split(3)
    noisy = noisy + 0.6 * x.std() * rng.normal(len(noisy), noisy.shape[1:], x, 0)
    blurred = nn.functional.avg_pool2d(blurred, 3, 1, 1)
    angle = torch.tensor(0.4)
    matrix = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0]])
    grid = nn.functional.affine_grid(
        matrix.expand(len(turned), 2, 3), list(turned.shape), align_corners=False
    )
    turned = nn.functional.grid_sample(turned, grid, padding_mode="border", align_corners=False)
    return torch.cat([noisy, blurred, turned])


def fit(study: Study, seed: int) -> bayou.Posterior:
    """Fit one dropout network."""
    method = bayou.MCDropout(bayou.MAP(epochs=study.epochs, lr=2e-3))
    net = with_dropout(study.network(seed), DROPOUT)
    rows = study.rows
    return bayou.fit(net, (rows["x"], rows["y"]), method, seed=seed, progress=False)


def mixture(study: Study, seeds: range) -> bayou.Posterior:
    """Return the mixture of several fits, from files where they are there."""
    fits = []
    for seed in seeds:
        path = study.folder / f"{NAME}-{study.train}-{study.epochs}-{seed}.bayou"
        if not path.exists():
            fit(study, seed).save(path)
        fits.append(bayou.load(path, with_dropout(study.network(seed), DROPOUT)))
    return bayou.Mixture(fits)


def stored(study: Study, posterior: bayou.Posterior, names: list[str]) -> dict[str, Any]:
    """Return the predictions of a mixture for inputs by name."""
    draws = study.draws * len(posterior.components)
    return {name: StoredPredictions.of(posterior, study.rows[name], draws) for name in names}


def work(label: str, name: str, seed: int, study: Study) -> dict[str, Any]:
    """Distill with one kind of copies, and measure the distances."""
    teacher = mixture(study, range(study.fits))
    student = bayou.distill(
        teacher,
        study.network(100 + seed),
        study.rows["x"],
        keep=KEEPS[label],
        augment=AUGMENTATIONS[name],
        samples=study.draws * study.fits,
        steps=study.steps,
        lr=2e-3,
        schedule="cosine",
        seed=seed,
        progress=False,
    )
    names = ["held out", "held out, corrupted", "test", "corrupted", "letters"]
    inputs = {name: study.rows[name] for name in names}
    answers = stored(study, teacher, names)
    reference = stored(study, mixture(study, range(10, 10 + study.reference_fits)), names)
    return certify(student, answers, inputs, reference=reference).to_json()


def table(found: dict[str, Any], study: Study) -> str:
    """Return the table: distances on held-out rows, and the certificate on the others."""
    lines = [
        f"Digits of 8×8, {study.train} images, a small LeNet; teacher: {study.fits} MC dropout fits, "
        f"{study.draws} draws each; reference: {study.reference_fits} others. Total variation to the "
        "teacher, and in brackets the distance of the student to the reference less that of the "
        f"teacher. {study.steps:,} steps of 128 rows. *Information*: mean mutual information in "
        "nats, of the student and of the teacher.",
        "",
        "| copies | | held out | held out, corrupted | test | corrupted | letters | information, "
        "letters |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for label in KEEPS:
        for name in AUGMENTATIONS:
            runs = [run for key, run in found.items() if key.startswith(f"{label}/{name}/")]
            if not runs:
                continue
            cells = []
            for part in ("held out", "held out, corrupted", "test", "corrupted", "letters"):
                mean = sum(run[part]["to_teacher"]["mean"] for run in runs) / len(runs)
                farther = sum(run[part]["farther"] for run in runs) / len(runs)
                cells.append(f"{mean:.4f} ({farther:+.4f})")
            numbers = [
                sum(run["letters"][key] for run in runs) / len(runs)
                for key in ("information", "teacher_information")
            ]
            information = f"{numbers[0]:.3f} of {numbers[1]:.3f}"
            lines.append(f"| {name} | {label} | {' | '.join(cells)} | {information} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", nargs="*", default=list(AUGMENTATIONS))
    parser.add_argument("--keep", nargs="*", default=list(KEEPS))
    parser.add_argument("--steps", type=int, default=Study.steps)
    parser.add_argument("--train", type=int, default=Study.train)
    parser.add_argument("--epochs", type=int, default=Study.epochs)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    study = Study(given.train, epochs=given.epochs, steps=given.steps, folder=given.out)
    path = given.out / f"{NAME}.json"
    jobs = [
        (label, name, seed)
        for seed in range(given.seeds)
        for label in given.keep
        for name in given.only
    ]
    for job, found in spread(work, jobs, study, given.jobs):
        keep(path, job, found)
        print(table(kept(path), study), flush=True)
    path.with_suffix(".md").write_text(f"{table(kept(path), study)}\n{made('cpu')}\n")


if __name__ == "__main__":
    main()
