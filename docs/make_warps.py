"""The pictures of ``docs/flows``: ``python -m docs.make_warps`` draws what every map does to a
square grid.

A map is built as in the registry, with seeded noise added to its parameters, since most start at
the identity. Of a map of more than two numbers the picture shows the first two of y where the first
two of x change and the others are 0.
"""

from __future__ import annotations

import argparse
import math
from io import BytesIO
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from bayou import rng
from bayou.flows import registry
from bayou.flows.core.transform import ANGLES, Map
from docs.pages import FLOWS

FOLDER = Path(__file__).parent / "pictures" / "warps"
CPU = torch.device("cpu")
REACH, LINES, POINTS = 2.0, 13, 61
SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03)
# Drawn as y over the plane of x.
PLANE = {
    "abs",
    "sort",
    "max",
    "slice",
    "argmax",
    "binary_argmax",
    "dequantize",
    "random_order",
    "autoencoder",
}


def built(name: str) -> Map:
    """The map of the registry at size 2, with as much noise on its parameters as keeps a grid
    legible.
    """
    for scale in SCALES:
        made = perturbed(name, scale)
        if registry()[name].kind == "discrete" or name in PLANE or legible(made):
            break
    return made


def perturbed(name: str, scale: float) -> Map:
    with rng.isolated(0, CPU), torch.no_grad():
        made = registry()[name].build(2).double()
        for parameter in made.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
        if name == "batch_norm":  # scales and shifts by statistics of data
            made.inverse(torch.randn(500, 2).double() * torch.tensor([1.5, 0.7]).double() + 0.5)
    return made.eval()


def legible(made: Map) -> bool:
    """Whether a grid stays near its place and no part of it is squeezed too much."""
    x = grid(made)
    context = torch.ones(*x.shape[:2], made.context_dim).double() if made.context_dim else None
    with torch.no_grad(), rng.isolated(0, CPU):
        y, ladj = made.forward(x, context)
    return bool(y.abs().max() < 1.6 * REACH and ladj.min() > -2.5 and ladj.std() < 1.0)


def grid(made: Map) -> Tensor:
    """Two families of lines (2·LINES, POINTS, *event) in the first two coordinates of x."""
    at, along = torch.linspace(-REACH, REACH, LINES), torch.linspace(-REACH, REACH, POINTS)
    across = torch.stack([at[:, None].expand(LINES, POINTS), along.expand(LINES, POINTS)], -1)
    plane = torch.cat([across, across.flip(-1)]).double()
    event = tuple(size or 1 for size in made.event_in)  # of images of any size, one pixel
    if made.domain == (0.0, 1.0):
        plane = 0.5 + 0.49 * plane / REACH
    lines = torch.zeros(2 * LINES, POINTS, math.prod(event)).double()
    lines[..., :2] = plane[..., : lines.shape[-1]]
    return lines.reshape(2 * LINES, POINTS, *event)


def draw_warp(
    axes: Axes, made: Map, context: Tensor | None = None, color: str = "tab:blue"
) -> None:
    x = grid(made)
    given = None if context is None else context.expand(*x.shape[:2], -1)
    with torch.no_grad(), rng.isolated(0, CPU):
        y = made.forward(x, given)[0]
    before, after = x.flatten(2), y.flatten(2)
    if made.codomain == ANGLES:  # no line from one end of the circle to the other
        after[:, 1:][after.diff(dim=1).abs().amax(-1) > math.pi] = torch.nan
    for i in range(len(x)):
        axes.plot(before[i, :, 0], before[i, :, 1], color="0.85", linewidth=0.7, zorder=0)
        axes.plot(
            after[i, :, 0],
            after[i, :, 1],
            color=color if i < LINES else "tab:orange",
            linewidth=0.8,
        )


def draw_plane(axes: Axes, made: Map, name: str) -> None:
    """y over the plane of x, as colors; the first entry where y has several."""
    side = torch.linspace(-REACH, REACH, 240).double()
    x = torch.zeros(240, 240, math.prod(made.event_in)).double()
    x[..., 0], x[..., 1] = side[None], side[:, None]
    with torch.no_grad(), rng.isolated(0, CPU):
        y = made.forward(x.reshape(240, 240, *made.event_in))[0].reshape(240, 240, -1)
    value = y.sum(-1) if name == "dequantize" else y[..., 0]
    reach = float(side[0]), float(side[-1])
    axes.imshow(value, origin="lower", extent=(*reach, *reach), cmap="viridis")


def draw_integers(axes: Axes, made: Map, name: str) -> None:
    """Where a map moves the pairs of integers: a line from x to y, with the color of x."""
    size = 4 if "integer" in name or name == "whole" else 3
    pairs = torch.cartesian_prod(torch.arange(size), torch.arange(size)).double()
    x = torch.nn.functional.one_hot(pairs.long(), 3).double() if len(made.event_in) == 2 else pairs
    with torch.no_grad():
        y = made.forward(x)[0]
    y = y.argmax(-1).double() if y.dim() == 3 else y
    for i, (start, end) in enumerate(zip(pairs.tolist(), y.tolist(), strict=True)):
        color = f"C{i % 10}"
        axes.plot([start[0], end[0]], [start[1], end[1]], color=color, linewidth=1.2, alpha=0.7)
        axes.plot(*start, "o", color=color, markersize=3)
        axes.plot(*end, "s", color=color, markersize=6, fillstyle="none")


def draw(page: str, folder: Path) -> Path:
    """Draw the maps of a page side by side."""
    names = FLOWS[page][0].split()
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.2 * columns, 2.4 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in places:
        axes.set_axis_off()
    for axes, name in zip(places, names, strict=False):
        made = built(name)
        if registry()[name].kind == "discrete":
            draw_integers(axes, made, name)
        elif name in PLANE:
            draw_plane(axes, made, name)
        elif made.context_dim:
            for angle, color in ((0.0, "tab:blue"), (2.1, "tab:green"), (4.2, "tab:red")):
                context = torch.tensor(
                    [math.cos(angle), math.sin(angle)] * made.context_dim
                ).double()
                draw_warp(axes, made, context[: made.context_dim], color)
        else:
            draw_warp(axes, made)
        axes.set_title(name, fontsize=8)
        axes.set_aspect("equal", adjustable="datalim")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{page}.png"
    with BytesIO() as buffer:
        figure.savefig(buffer, dpi=110)
        Image.open(buffer).convert("RGB").quantize(64).save(
            path, optimize=True
        )  # a third of the bytes
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", nargs="*", default=list(FLOWS))
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    for page in options.pages:
        print(draw(page, options.out))


if __name__ == "__main__":
    main()
