"""Curves of an experiment on images, and their picture: a digit that turns, and how sure a method
is of what.

The figures of Louizos & Welling (2017). A row keeps its curves as short lists, so that the picture
can be drawn again.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayou.app.report.judge import rotation_curve, turn
from bayou.data import DataSet
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Posterior
from experiments import plots

DIGIT = "3"  # the one that turns
STEPS = 40  # of the grid of an entropy, from 0 to log(classes)
SHOWN = ("L2", "dropout", "MNF")  # whose digits are drawn, as in the paper
STRIP = 6  # pictures of the digit above its probabilities
LINES = ("-", "--", ":", "-.")
GRID, SOFT = "#eeeeea", "#5d6673"
COLORS = (  # those of the report
    "#8a919c", "#d1732f", "#3b75af", "#3f9b5f", "#c14545", "#8064ad", "#8c6d4f", "#d67fb4", "#b7a527", "#33a7b5",
)  # fmt: skip


def curves(
    posterior: Posterior,
    data: DataSet,
    p: Predictive,
    away: Predictive | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The distribution functions of the predictive entropy, and (of digits) the probabilities as
    one turns.
    """
    top = math.log(len(data.class_names))
    found: dict[str, Any] = {"entropy": {"top": top, data.name: distribution(p.entropy, top)}}
    if away is not None:
        found["entropy"][data.ood_name or "out of distribution"] = distribution(away.entropy, top)
    if DIGIT in data.class_names:
        turning = rotation_curve(posterior, data, DIGIT, options)
        found["rotation"] = {
            "degrees": turning["degrees"],
            "classes": turning["classes"],
            "probabilities": [
                [round(value, 4) for value in row] for row in turning["probabilities"]
            ],
            "image": turning["images"][0],
        }
    return found


def distribution(entropy: Tensor, top: float) -> list[float]:
    """The share of values up to each of 41 points between 0 and ``top``."""
    values = entropy.detach().double().cpu()
    grid = torch.linspace(0, top, STEPS + 1, dtype=torch.float64)
    grid[-1] = math.inf  # rounding must not put anything above log(classes)
    return [round(float((values <= point).double().mean()), 4) for point in grid]


def draw(title: str, labels: Sequence[str], rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """One picture of the rows that have curves: turning digits above, distributions of entropies
    below.

    Of several lengths of a row the longest counts. False, and no file, if no row has curves.
    """
    found: dict[str, dict[str, Any]] = {}
    for label in labels:
        mine = [row for row in rows if row["label"] == label and row.get("curves")]
        if mine:
            found[label] = max(mine, key=lambda row: row["length"])["curves"]
    if not found:
        return False
    import matplotlib

    turning = [label for label in found if "rotation" in found[label]]
    turning = [label for label in SHOWN if label in turning] or turning[: len(SHOWN)]
    with matplotlib.rc_context(plots.STYLE | {"font.size": 9.5, "axes.titlesize": 11}):
        figure = plots.canvas(11, 7.6 if turning else 4.2)
        figure.suptitle(title, fontsize=12.5, color=plots.INK, x=0.01, ha="left")
        parts: Any = (
            figure.subfigures(2, 1, height_ratios=(1.0, 1.05), hspace=0.04) if turning else [figure]
        )
        if turning:
            axes = parts[0].subplots(1, len(turning), sharey=True, squeeze=False)[0]
            for axis, label in zip(axes, turning, strict=True):
                _turning(axis, found[label]["rotation"], label)
            axes[0].set_ylabel("class probability")
        _entropies(parts[-1], found)
    plots.write(figure, path)
    return True


def _turning(axis: Any, found: dict[str, Any], label: str) -> None:
    """Stacked class probabilities over degrees, the digit above; a class is named where it is
    widest.
    """
    degrees, columns = found["degrees"], list(zip(*found["probabilities"], strict=True))
    axis.stackplot(
        degrees, *columns, colors=COLORS[: len(columns)], linewidth=0.4, edgecolor="white"
    )
    below = [0.0] * len(degrees)
    for name, column in zip(found["classes"], columns, strict=True):
        at = _widest(column)
        if column[at] > 0.08:
            middle = below[at] + column[at] / 2
            axis.text(
                degrees[at], middle, name, color="white", weight="bold", ha="center", va="center"
            )
        below = [low + value for low, value in zip(below, column, strict=True)]
    axis.set(xlim=(0, 180), ylim=(0, 1), xticks=range(0, 181, 36), yticks=(0, 0.5, 1))
    axis.set_xticks(range(0, 181, 36), [f"{tick}°" for tick in range(0, 181, 36)])
    axis.set_title(label, y=1.22)
    plain(axis, grid=False)
    image, size = _picture(found["image"]), 0.14
    for k in range(STRIP):
        turned = turn(image, 180 * k / (STRIP - 1)).clamp(0, 1)
        inset = axis.inset_axes([k / (STRIP - 1) - size / 2, 1.02, size, 0.2])
        inset.imshow(1 - turned.movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
        inset.set_axis_off()


def _widest(column: Sequence[float]) -> int:
    """The middle of the stretch around the peak of a curve, off its ends, where a name has most
    room.
    """
    inner = range(2, len(column) - 2)
    peak = max(inner, key=lambda i: min(column[i - 1 : i + 2]))
    level = 0.85 * column[peak]
    first = last = peak
    while first - 1 in inner and column[first - 1] > level:
        first -= 1
    while last + 1 in inner and column[last + 1] > level:
        last += 1
    return (first + last) // 2


def _entropies(part: Any, found: dict[str, dict[str, Any]]) -> None:
    """For each data set the share of inputs up to an entropy, a line a method."""
    names = [name for name in next(iter(found.values()))["entropy"] if name != "top"]
    axes = part.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for column, (axis, name) in enumerate(zip(axes, names, strict=True)):
        kinds: dict[
            str, list[str]
        ] = {}  # "MNF" and "MNF, moved" are of a kind: one color, two kinds of line
        for label, one in found.items():
            kind = kinds.setdefault(label.partition(", ")[0], [])
            kind.append(label)
            again, color = divmod([*kinds.values()].index(kind), len(COLORS))
            line = LINES[
                (len(kind) - 1 - again) % len(LINES)
            ]  # colors that come again have other lines
            values = one["entropy"].get(name)
            if values:
                grid = [one["entropy"]["top"] * i / (len(values) - 1) for i in range(len(values))]
                axis.plot(
                    grid, values, color=COLORS[color], linestyle=line, linewidth=1.8, label=label
                )
        axis.set(xlim=(0, None), ylim=(0, 1.01), xlabel="predictive entropy, nats")
        axis.set_title(
            f"{name}, {'test' if column == 0 else 'out of distribution: lower is better'}"
        )
        axis.margins(x=0)
        plain(axis)
    axes[0].set_ylabel("share of inputs up to it")
    handles, labels = axes[0].get_legend_handles_labels()
    room = max(1, 140 // (8 + max(map(len, labels))))  # columns of names that fit side by side
    ncols = min(len(labels), 6, room)
    part.legend(
        handles, labels, frameon=False, loc="outside lower center", ncols=ncols, fontsize=9.5
    )


def plain(axis: Any, grid: bool = True) -> None:
    """Two thin edges, quiet ticks, and perhaps a faint grid."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#c9ccd1")
    axis.tick_params(colors=SOFT, length=3, width=0.6)
    if grid:
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)


def _picture(url: str) -> Tensor:
    """The pixels of a data URL, in [0, 1]: (channels, height, width)."""
    import numpy as np
    from PIL import Image  # comes with matplotlib

    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))))
    tensor = torch.from_numpy(pixels).float() / 255
    return tensor.unsqueeze(0) if tensor.ndim == 2 else tensor.movedim(-1, 0)
