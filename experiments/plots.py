"""Pictures of two-dimensional densities. Needs matplotlib, of the lab extra."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLORS = "magma"
INK = "#2b2333"  # text
POINTS = "#f6a97a"  # a light tone of the colormap, for samples
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.titlesize": 12,
    "axes.titlepad": 7,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "figure.facecolor": "white",
}


@torch.no_grad()
def on_grid(
    log_density: Callable[[Tensor], Tensor],
    reach: float,
    points: int = 240,
    like: Tensor | None = None,
) -> Tensor:
    """exp(log_density) at the centres of the cells of [−reach, reach]²: (points, points), y along
    the first axis.
    """
    like = torch.zeros(()) if like is None else like
    line = ((torch.arange(points).to(like) + 0.5) / points * 2 - 1) * reach
    y, x = torch.meshgrid(line, line, indexing="ij")
    rows = torch.stack([x, y], -1).reshape(-1, 2)
    return (
        torch.cat([log_density(part) for part in rows.split(8192)])
        .exp()
        .reshape(points, points)
        .cpu()
    )


def canvas(width: float, height: float) -> Any:
    """An empty figure for a file: no window, and no change of the backend that a session draws
    with.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(rows: int, columns: int, size: float = 2.3) -> tuple[Any, Any]:
    """A matplotlib figure and its (rows, columns) axes: square, without ticks."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = canvas(size * columns + 0.3, size * rows + 0.5)
        axes = figure.subplots(rows, columns, squeeze=False)
    ground = matplotlib.colormaps[COLORS](0.0)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], aspect="equal", facecolor=ground)
        for spine in axis.spines.values():
            spine.set_visible(False)
    return figure, axes


def show_density(
    axis: Any, density: Tensor, reach: float, peak: float | None = None, gamma: float = 1.0
) -> None:
    """A density on its grid, from dark (zero) to light (``peak``, by default the 99.8 % quantile).

    The color is (density/peak)^gamma: below 1, faint parts are lifted.
    """
    peak = peak or density.flatten().double().quantile(0.998).item()
    axis.imshow(
        (density / peak).clamp(0, 1).pow(gamma).numpy(),
        origin="lower",
        extent=(-reach, reach, -reach, reach),
        cmap=COLORS,
        vmin=0.0,
        vmax=1.0,
        interpolation="bilinear",
    )


def show_points(axis: Any, x: Tensor, reach: float, size: float = 1.2) -> None:
    """Samples as small light points on the dark ground."""
    x = x.detach().cpu()
    axis.scatter(x[:, 0].numpy(), x[:, 1].numpy(), s=size, c=POINTS, alpha=0.55, linewidths=0)
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach))


def write(figure: Any, path: Path, dpi: int = 130) -> Path:
    """Save a figure as a PNG of few colors (small enough for a repository)."""
    from PIL import Image  # comes with matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi)
    Image.open(picture).convert("RGB").quantize(200).save(path, optimize=True)
    return path


def label_rows(axes: Any, names: Sequence[str]) -> None:
    """Names to the left of each row of panels."""
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.set_ylabel(name, color=INK, fontsize=12, labelpad=8)
