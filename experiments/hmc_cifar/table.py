"""The study: what is run, its tables and its picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from bayou.core.progress import Show
from experiments import figures, plots, study
from experiments.hmc_cifar.images import STRENGTHS, Sizes
from experiments.hmc_cifar.rows import (
    AUGMENT,
    LABELS,
    LESSON_DRAWS,
    MEANS,
    MIXTURES,
    POINT,
    REFERENCE,
    STUDENTS,
    TEACHER,
    Fits,
    mixture,
)
from experiments.hmc_cifar.scores import scores
from experiments.study import Fit, Found

# rows with colors of their own; the others are in the table
DRAWN = (POINT, "ensemble of 5", "MNF", "SGHMC, cyclical", "IVON", "MC dropout", "IVON, 8 runs",
         "MC dropout, 3 runs", "MC dropout, 5 runs")  # fmt: skip
SINGLE = (REFERENCE, *MIXTURES)  # one row each, without a length of its own
UNSURE = 0.3  # the confidence below which a bin has too few images to be drawn


@final
@dataclass(frozen=True)
class HMCCifar:
    """Methods × seeds × lengths beside HMC. ``--length`` counts the epochs of one fit."""

    name: str = "hmc-cifar10"
    title: str = "A residual network on CIFAR-10 beside HMC"
    seeds: int = 1
    sizes: Sizes = field(default_factory=Sizes)

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Methods × seeds; there is one HMC."""
        study.chosen("hmc-cifar10 has no data", data, ["cifar10"])
        return [
            Fit(self.name, "cifar10", label, seed, long)
            for label in study.chosen("hmc-cifar10 has no row", only, LABELS)
            for seed in range(1 if label in SINGLE else seeds or self.seeds)
            for long in [None if label in SINGLE else length or self.sizes.epochs]
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """The scores of a row, and its cost with that of the point that it begins at."""
        sizes = replace(self.sizes, epochs=fit.length or 0, samples=samples or self.sizes.samples)
        run = Fits(sizes, Path(fit.folder) / self.name, torch.device(device), show)
        if fit.label == REFERENCE:
            return scores({"test": run.task.hmc.log()}, run.task)
        if fit.label in MIXTURES:
            found = run.mixed(MIXTURES[fit.label])
        elif fit.label in STUDENTS:
            student = run.student(fit.label, fit.seed)
            found = mixture([student])
        else:
            one, count = MEANS.get(fit.label, (fit.label, 1))
            found = mixture([run.saved(one, count * fit.seed + k) for k in range(count)])
        cost = {name: float(found[name]) for name in ("epochs", "minutes", "epoch_seconds")}
        row = scores(found, run.task) | cost
        row["said"] = [str(word) for word in found["said"] if word]
        if fit.label in STUDENTS:
            row["certificate"] = json.loads(str(student["certificate"]))
            row["student_minutes"] = float(student["student_minutes"])
        return row

    def render(self, found: Found) -> str:
        """The table: means over seeds ± one standard error, a line for every length."""
        lines = [f"# {self.title}", "", INTRODUCTION, ""]
        if any(line[0]["label"] in ("SNGP", "DDU") for line in self.lines(found)):
            lines += [DISTANCE, ""]
        lines += (
            [f"![Distance, calibration, entropy]({self.name}.png)", ""] if self.drawn(found) else []
        )
        lines += [
            f"| method | {' | '.join(HEADS.values())} | seeds | |",
            f"|---|{'---:|' * (len(HEADS) + 1)}---|",
        ]
        for mine in self.lines(found):
            cells = [
                study.cell([row.get(name) for row in mine], DIGITS.get(name, 3)) for name in HEADS
            ]
            said = ", ".join(sorted({word for row in mine for word in row.get("said", ())}))
            lines.append(f"| {' | '.join([mine[0]['label'], *cells, str(len(mine)), said])} |")
        lines += self.corruptions(found)
        lines += self.certificates(found)
        return "\n".join([*lines, "", study.made_by(found), ""])

    def corruptions(self, found: Found) -> list[str]:
        """The table of the rows that were scored on corrupted images."""
        columns = {"accuracy": "accuracy, %", "nll": "NLL", "ece": "ECE"}
        heads = [
            f"{head} at 1" if k == 1 else str(k)
            for head in columns.values()
            for k in range(1, STRENGTHS + 1)
        ]
        heads += ["AUROC at 5: entropy", "information", "seeds"]
        lines = [
            "",
            CORRUPTED_INTRODUCTION,
            "",
            f"| method | {' | '.join(heads)} |",
            f"|---|{'---:|' * len(heads)}",
        ]
        for mine in self.lines(found):
            rows = [row for row in mine if "corrupted_nll" in row]
            scored = [([row[f"corrupted_{name}"][k] for row in rows], 1 if name == "accuracy" else 3)
                      for name in columns for k in range(STRENGTHS)]  # fmt: skip
            scored += [
                ([row.get(f"corrupted_{name}") for row in rows], 3)
                for name in ("entropy", "information")
            ]
            cells = [study.cell(values, digits) for values, digits in scored]
            lines += (
                [f"| {' | '.join([mine[0]['label'], *cells, str(len(rows))])} |"] if rows else []
            )
        return lines if len(lines) > 5 else []

    def certificates(self, found: Found) -> list[str]:
        """The table of students beside their teacher, by kind of inputs: means over seeds."""
        heads = ["inputs", "total variation to the teacher", "90 %", "bound", "agreement",
                 "information", "teacher's", "to HMC", "teacher's", "farther", "minutes", "seeds"]  # fmt: skip
        lines = ["", STUDENTS_INTRODUCTION, "", f"| student | {' | '.join(heads)} |",
                 f"|---|---|{'---:|' * (len(heads) - 1)}"]  # fmt: skip
        for mine in self.lines(found):
            rows = [row for row in mine if "certificate" in row]
            for name in rows[0]["certificate"] if rows else ():
                parts = [row["certificate"][name] for row in rows]
                taught = [part["to_teacher"] for part in parts]
                to_hmc = [
                    [None if part[key] is None else part[key]["mean"] for part in parts]
                    for key in ("to_reference", "teacher_to_reference")
                ]
                values = [[one["mean"] for one in taught], [one["quantiles"][1] for one in taught],
                          [one["bound"] for one in taught], [part["agreement"] for part in parts],
                          [part["information"] for part in parts],
                          [part["teacher_information"] for part in parts], *to_hmc,
                          [part["farther"] for part in parts]]  # fmt: skip
                cells = [study.cell(one, 4) for one in values]
                cells += [study.cell([row["student_minutes"] for row in rows], 1), str(len(rows))]
                lines.append(f"| {mine[0]['label']} | {name} | {' | '.join(cells)} |")
        return lines if len(lines) > 5 else []

    def lines(self, found: Found) -> list[list[dict[str, Any]]]:
        """Rows of one label and length, in the order of the table."""
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in found["rows"]:
            label, length = row["label"], row["length"]
            if label in LABELS:
                groups.setdefault((LABELS.index(label), length or 0), []).append(row)
        return [groups[key] for key in sorted(groups)]

    def drawn(self, found: Found) -> bool:
        """Whether there are a row of HMC and another one."""
        labels = [line[0]["label"] for line in self.lines(found)]
        return REFERENCE in labels and len(labels) > 1

    def draw(self, found: Found, path: Path) -> bool:
        """The distance to HMC and its cost; calibration; the entropy beside that of HMC, by tenths
        of the images.
        """
        if not self.drawn(found):
            return False
        (hmc, *_), *lines = self.lines(found)
        import matplotlib

        shown = [line for line in lines if line[0]["label"] in DRAWN]
        ten = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
        colors = dict(
            zip(DRAWN, (*ten[:7], *ten[8:]), strict=False)
        )  # the eighth is gray, as the other rows are
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
            axes[0].set(
                xscale="log", xlabel="epochs", ylabel="total variation to HMC", ylim=(0, None)
            )
            axes[0].xaxis.set_major_formatter("{x:g}")
            axes[0].xaxis.set_minor_formatter("")
            axes[0].set_xticks(
                sorted({50, 100, 200, 400} & {round(line[0]["epochs"]) for line in lines})
                or [1, 10]
            )
            for axis, top in ((axes[1], 1.0), (axes[2], max(hmc["entropies"]))):
                axis.plot([0, top], [0, top], color="#9aa0a6", linewidth=0.8)
            axes[1].set(xlabel="confidence", ylabel="accuracy; HMC is dashed")
            axes[2].set(xlabel="entropy of HMC, nats", ylabel="entropy")
            for axis in axes:
                figures.plain(axis)
            figure.legend(frameon=False, loc="outside lower center", ncols=5)
        plots.write(figure, path)
        return True


def bins(row: Mapping[str, Any]) -> np.ndarray:
    """The confidence and the accuracy of bins that have images, (2, bins), from ``UNSURE`` on."""
    pairs = [
        (c, h) for c, h in zip(row["confidence"], row["hits"], strict=True) if (c or 0.0) > UNSURE
    ]
    return np.array(pairs).reshape(-1, 2).T


HEADS = {
    "epochs": "epochs", "total_variation": "total variation", "agreement": "agreement", "nll": "NLL",
    "accuracy": "accuracy, %", "ece": "ECE", "entropy": "entropy", "people": "rank correlation with people",
    "fashion_entropy": "AUROC Fashion: entropy", "fashion_information": "information",
    "letters_entropy": "letters: entropy", "letters_information": "information", "minutes": "minutes",
    "epoch_seconds": "s/epoch",
}  # fmt: skip
DIGITS = {
    "epochs": 0,
    "accuracy": 2,
    "nll": 4,
    "ece": 4,
    "agreement": 4,
    "total_variation": 4,
    "minutes": 1,
}
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
STUDENTS_INTRODUCTION = (
    f"Students: one network that learns the mean prediction of {TEACHER}, or a Dirichlet with their mean and variance, from "
    f"the training images and {AUGMENT.copies} copies of each (mixup, shifts, mirror images) that the teacher labels with "
    f"{LESSON_DRAWS} draws of each fit. Total variation to the teacher: its mean, its .9 quantile over images, and a "
    "bound of its expectation that holds with probability .95; farther: the distance of the student to HMC less that of "
    "its teacher; minutes: of the student alone."
)
