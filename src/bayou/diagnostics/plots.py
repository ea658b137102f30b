"""Plots of the modes of a posterior, with matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bayou.diagnostics.clusters import FunctionModes
from bayou.diagnostics.dip import Array, antimode, density
from bayou.extras import extra

if TYPE_CHECKING:
    from bayou.diagnostics.modes import Modes

INK, FAINT = "#2b2333", "#b9b3c2"
COLORS = ("#3b5b92", "#d9743c", "#3f8f6b", "#9a4f96", "#c9a227", "#5aa7b8", "#a23b3b", "#7a7a7a")
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
}


def _figure(width: float, height: float) -> Any:
    """An empty figure that belongs to no window: it needs no display and no closing."""
    with extra("lab", "A plot"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def coordinates(modes: Modes, names: Sequence[str] = ()) -> Any:
    """One coordinate: its marginal. Two: both marginals around their joint draws."""
    with extra("lab", "A plot"):
        import matplotlib

    if len(names) > 2:
        raise ValueError(f"plot shows one or two coordinates, got {len(names)}")
    if not modes.coordinates:
        raise ValueError("there is no coordinate to plot: all are constant")
    chosen = list(names) or [c.name for c in modes.coordinates[:2]]
    draws = [modes.draws(name).numpy() for name in chosen]
    about = {c.name: c for c in modes.coordinates}
    several = [about[name].multimodal for name in chosen]
    with matplotlib.rc_context(STYLE):
        if len(chosen) == 1:
            figure = _figure(5.2, 3.2)
            axis = figure.subplots()
            _marginal(axis, draws[0], several[0])
            axis.set(xlabel=chosen[0], yticks=[])
            axis.spines["left"].set_visible(False)
            axis.set_title(_verdict(about[chosen[0]]))
            return figure
        figure = _figure(5.6, 5.6)
        grid = figure.add_gridspec(2, 2, width_ratios=(4, 1.1), height_ratios=(1.1, 4), wspace=0.02, hspace=0.02)
        joint = figure.add_subplot(grid[1, 0])
        _joint(joint, draws[0], draws[1], several)
        joint.set(xlabel=chosen[0], ylabel=chosen[1])
        top = figure.add_subplot(grid[0, 0], sharex=joint)
        side = figure.add_subplot(grid[1, 1], sharey=joint)
        _marginal(top, draws[0], several[0])
        _marginal(side, draws[1], several[1], upright=False)
        for axis in (top, side):
            axis.tick_params(labelbottom=False, labelleft=False, length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
        figure.suptitle(
            "\n".join(f"{name}: {_verdict(about[name])}" for name in chosen), x=0.02, ha="left", fontsize=10
        )
    return figure


def _verdict(coordinate: Any) -> str:
    p = "p < 0.0001" if coordinate.adjusted < 1e-4 else f"p = {coordinate.adjusted:.2g}"
    if coordinate.multimodal:
        return f"multimodal, masses {coordinate.left:.2f} | {1 - coordinate.left:.2f} (dip {coordinate.dip:.3f}, {p})"
    return f"no sign of a second mode (dip {coordinate.dip:.3f}, {p})"


def _bandwidth(x: Array, multimodal: bool) -> float | None:
    """Silverman's rule for each side of the antimode, if there is one: for the whole it oversmooths both modes."""
    if not multimodal:
        return None
    cut = antimode(x)
    parts = [part for part in (x[x < cut], x[x >= cut]) if len(part) > 1]
    spread = min(float(part.std()) for part in parts if len(part) >= 0.05 * len(x))
    return 0.9 * (spread or float(x.std())) * len(x) ** -0.2


def _marginal(axis: Any, x: Array, multimodal: bool, upright: bool = True) -> None:
    """A histogram with a smooth density over it."""
    grid, p = density(x, bandwidth=_bandwidth(x, multimodal))
    axis.hist(
        x, bins=60, density=True, color=COLORS[0], alpha=0.28, linewidth=0,
        orientation="vertical" if upright else "horizontal",
    )  # fmt: skip
    axis.plot(*((grid, p) if upright else (p, grid)), color=COLORS[0], linewidth=1.6)
    (axis.set_ylim if upright else axis.set_xlim)(0, None)


def _joint(axis: Any, x: Array, y: Array, several: Sequence[bool]) -> None:
    """Draws as points, under lines that hold 50 % and 90 % of a smoothed histogram."""
    axis.scatter(x, y, s=7, color=COLORS[0], alpha=0.28, linewidths=0, rasterized=True)
    widths = [_bandwidth(v, s) or 0.9 * float(v.std()) * len(v) ** -0.2 for v, s in zip((x, y), several, strict=True)]
    edges = [np.linspace(v.min() - 4 * h, v.max() + 4 * h, 161) for v, h in zip((x, y), widths, strict=True)]
    counts, _, _ = np.histogram2d(x, y, bins=(edges[0], edges[1]))
    for along, h in enumerate(widths):
        step = edges[along][1] - edges[along][0]
        reach = np.arange(-79, 80) * step
        kernel = np.exp(-0.5 * (reach / (1.6 * max(h, step / 2))) ** 2)
        counts = np.apply_along_axis(np.convolve, along, counts, kernel / kernel.sum(), "same")
    ranked = np.sort(counts.ravel())[::-1]
    held = np.cumsum(ranked) / ranked.sum()
    levels = sorted({float(ranked[np.searchsorted(held, share)]) for share in (0.9, 0.5)})
    centers = [(e[1:] + e[:-1]) / 2 for e in edges]
    axis.contour(*centers, counts.T, levels=levels, colors=INK, linewidths=(0.9, 1.4)[: len(levels)])
    axis.set(xlim=(edges[0][0], edges[0][-1]), ylim=(edges[1][0], edges[1][-1]))


def functions(found: FunctionModes) -> Any:
    """Functions of one input as curves, colored by mode, with the mean function of each; else principal components."""
    with extra("lab", "A plot"):
        import matplotlib

    line = _single_input(found)
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.4, 3.8)
        axis = figure.subplots()
        names = [f"mode {k + 1}: {w:.0%}" for k, w in enumerate(found.weights.tolist())]
        if line is None:
            _scores(axis, found, names)
        else:
            order = np.argsort(line)
            curves = found.functions.detach().cpu().double().flatten(1).numpy()[:, order]
            labels = found.labels.cpu().numpy()
            for s in range(0, len(curves), max(1, len(curves) // 150)):
                color = COLORS[labels[s] % len(COLORS)]
                axis.plot(line[order], curves[s], color=color, alpha=0.13, linewidth=0.8)
            for k, mean in enumerate(found.means.detach().cpu().double().flatten(1).numpy()[:, order]):
                axis.plot(line[order], mean, color="white", linewidth=4.2)
                axis.plot(line[order], mean, color=COLORS[k % len(COLORS)], linewidth=2.2, label=names[k])
            axis.set(xlabel="x", ylabel="E[y | f]", xlim=(line.min(), line.max()))
        axis.legend(frameon=False, loc="best")
        axis.set_title("one mode of functions" if found.count == 1 else f"{found.count} modes of functions")
    return figure


def _scores(axis: Any, found: FunctionModes, names: list[str]) -> None:
    """The first two principal components, or the first against a histogram where there is only one."""
    scores, shares = found.scores.numpy(), found.explained.tolist()
    labels = found.labels.cpu().numpy()
    axis.set_xlabel(f"principal component 1 ({shares[0]:.0%} of the variance)")
    for k, name in enumerate(names):
        own, color = scores[labels == k], COLORS[k % len(COLORS)]
        if scores.shape[1] == 1:
            axis.hist(own[:, 0], bins=40, color=color, alpha=0.6, label=name)
        else:
            axis.scatter(own[:, 0], own[:, 1], s=9, color=color, alpha=0.45, linewidths=0, label=name, rasterized=True)
            axis.set_ylabel(f"principal component 2 ({shares[1]:.0%})")


def _single_input(found: FunctionModes) -> Array | None:
    """The inputs as numbers (B,) where x is one number per row and the output is one number, else None."""
    x = found.x[0] if isinstance(found.x, tuple) and len(found.x) == 1 else found.x
    one_output = found.functions[0].numel() == found.functions.shape[1]
    if not isinstance(x, Tensor) or x.numel() != len(x) or len(x) < 3 or not one_output:
        return None
    flat: Array = x.detach().cpu().double().flatten().numpy()
    return flat
