"""Multimodality of a posterior: in its weights or latents, coordinate by coordinate, and in its functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayou import rng
from bayou.diagnostics.clusters import MIN_MODE_FUNCTIONS, FunctionModes, function_modes
from bayou.diagnostics.dip import TINY, Array, Correction, adjust, antimode, dip_test
from bayou.diagnostics.sandwich import check_count
from bayou.guides.bayesian import Bayesian
from bayou.guides.multiplicative import Multiplicative
from bayou.guides.nodes import NodeGuide
from bayou.params import Params, match
from bayou.posteriors.posterior import Posterior

CHUNK_NUMBERS = 2**22  # numbers held at a time while sampling
Where = Literal["weights", "latents"]


@dataclass(frozen=True)
class Coordinate:
    """The dip test of one weight or latent, say "fc.weight[0, 3]" or "z of fc.weight[3]".

    ``adjusted``: the p-value corrected for all coordinates tested. A multimodal coordinate is cut at its ``antimode``,
    with a share ``left`` of the draws below; NaN for the others.
    """

    name: str
    dip: float
    p_value: float
    adjusted: float
    multimodal: bool
    antimode: float = math.nan
    left: float = math.nan


def _show(p: float) -> str:
    return f"{p:.2g}" if p >= TINY else f"<{TINY:g}"


@dataclass(frozen=True)
class Modes:
    """Coordinates, the least unimodal first, with their draws ``values`` (S, C) in that order; and the functions.

    ``print`` shows a summary; ``plot`` and ``plot_functions`` give figures (matplotlib).
    """

    what: Where
    coordinates: tuple[Coordinate, ...]
    values: Tensor
    functions: FunctionModes | None
    level: float
    correction: Correction
    total: int
    constant: int

    @property
    def multimodal(self) -> tuple[Coordinate, ...]:
        """The coordinates that are not unimodal at the given level."""
        return tuple(c for c in self.coordinates if c.multimodal)

    def draws(self, name: str) -> Tensor:
        """The draws of one coordinate by its name: (S,)."""
        for index, coordinate in enumerate(self.coordinates):
            if coordinate.name == name:
                return self.values[:, index]
        some = ", ".join(repr(c.name) for c in self.coordinates[:8])
        raise ValueError(f"{name!r} was not examined; pass it as names=; examined were {some}, ...")

    def __str__(self) -> str:
        examined = f"{len(self.coordinates):,} of {self.total:,} {self.what}"
        lines = [
            f"{examined}, {len(self.values):,} draws: {len(self.multimodal):,} multimodal "
            f"(dip test, {self.correction}, level {self.level:g})"
        ]
        if self.constant:
            lines[0] += f"; {self.constant:,} constant left out"
        shown = self.coordinates[:10]
        if shown:
            width = max(10, *(len(c.name) for c in shown))
            lines.append(f"{'coordinate':<{width}}     dip        p   adjusted   antimode   mass left | right")
        for c in shown:
            cut = f"{c.antimode:>9.4g}   {c.left:.3f} | {1 - c.left:.3f}" if c.multimodal else "unimodal".rjust(9)
            lines.append(f"{c.name:<{width}}  {c.dip:.4f}  {_show(c.p_value):>7}  {_show(c.adjusted):>9}  {cut}")
        if len(self.coordinates) > len(shown):
            lines.append(f"… {len(self.coordinates) - len(shown):,} more")
        return "\n".join([*lines, *([] if self.functions is None else [str(self.functions)])])

    def plot(self, *names: str) -> Any:
        """A matplotlib Figure of one coordinate, or of two with their joint; by default the two least unimodal."""
        from bayou.diagnostics import plots

        return plots.coordinates(self, names)

    def plot_functions(self) -> Any:
        """A matplotlib Figure of the functions by mode: curves over a single input, else principal components."""
        from bayou.diagnostics import plots

        if self.functions is None:
            raise ValueError("there are no functions to plot; call modes(posterior, x) with inputs x")
        return plots.functions(self.functions)


@torch.no_grad()
def modes(
    posterior: Posterior | Bayesian,
    x: Any = None,
    *,
    what: Where = "weights",
    names: str | Sequence[str] = "*",
    max_coordinates: int = 256,
    samples: int = 1000,
    level: float = 0.05,
    correction: Correction = "holm",
    max_modes: int = 8,
    seed: rng.Seed = 0,
) -> Modes:
    """Look for several modes in a posterior's weights or latents, and with inputs x in its functions.

    Every coordinate gets Hartigan's dip test on ``samples`` draws, corrected for their number. ``what``: "weights", or
    "latents", the gains z of MNF, NodeFlow and NodeNoise. ``names``: patterns on tensor names, or single entries such
    as "fc.weight[0, 3]"; of more than ``max_coordinates`` entries a random choice is examined. Functions, E[y | f_s] at
    x (B, ...), are split into modes by ``function_modes``. The draws are those of ``posterior.sample(samples, seed)``.
    """
    check_count(samples, "samples", 2 * MIN_MODE_FUNCTIONS)
    check_count(max_coordinates, "max_coordinates", 1)
    if what not in ("weights", "latents"):
        raise ValueError(f'what must be "weights" or "latents", got {what!r}')
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    seed = rng.integer(seed)
    source = _Source(posterior, what)
    picked, total = _pick(
        source.draw(1, seed, 0), [names] if isinstance(names, str) else list(names), max_coordinates, seed
    )
    size = max(1, CHUNK_NUMBERS // max(1, sum(v.numel() for v in source.draw(1, seed, 0).values())))
    parts = []
    for start in range(0, samples, size):
        stack = source.draw(min(size, samples - start), seed, start)
        parts.append(
            torch.cat([stack[name].flatten(1)[:, index.to(stack[name].device)] for name, index in picked.items()], 1)
        )
    values = torch.cat(parts).double().cpu()
    shapes = {name: value.shape[1:] for name, value in stack.items()}
    labels = [_label(name, int(i), shapes[name]) for name, index in picked.items() for i in index]
    keep = values.amax(0) > values.amin(0)
    found, order = _test(
        values[:, keep].numpy(), [n for n, k in zip(labels, keep.tolist(), strict=True) if k], level, correction
    )
    functions = (
        None if x is None else function_modes(source.functions(x, samples, seed), x, level=level, max_modes=max_modes)
    )
    return Modes(what, found, values[:, keep][:, order], functions, level, correction, total, int((~keep).sum()))


def _test(
    values: Array, labels: list[str], level: float, correction: Correction
) -> tuple[tuple[Coordinate, ...], Tensor]:
    """The coordinates, sorted by their dip, and that order."""
    tests = [dip_test(values[:, i]) for i in range(len(labels))]
    adjusted = adjust([p for _, p in tests], correction)
    found = []
    for i, (name, (dip, p)) in enumerate(zip(labels, tests, strict=True)):
        if adjusted[i] < level:
            cut = antimode(values[:, i])
            found.append(Coordinate(name, dip, p, float(adjusted[i]), True, cut, float((values[:, i] < cut).mean())))
        else:
            found.append(Coordinate(name, dip, p, float(adjusted[i]), False))
    order = np.argsort([-c.dip for c in found], kind="stable")
    return tuple(found[i] for i in order), torch.from_numpy(order)


class _Source:
    """Draws of weights, latents and functions."""

    def __init__(self, posterior: Posterior | Bayesian, what: Where) -> None:
        self.posterior, self.what = posterior, what
        self.bayesian = posterior.bayesian if isinstance(posterior, Posterior) else posterior
        if what == "latents":
            guides = self.bayesian.guides if isinstance(self.bayesian, Bayesian) else ()
            if not any(isinstance(guide, Multiplicative | NodeGuide) for guide in guides):
                raise ValueError(
                    'this posterior has no latents: only MNF, NodeFlow and NodeNoise do; use what="weights"'
                )

    def draw(self, n: int, seed: int, start: int) -> Params:
        """(n, *shape) for each tensor, or each tensor's latents."""
        if self.what == "weights":
            return self.posterior.sample(n, seed, start)
        assert isinstance(self.bayesian, Bayesian)
        found: Params = {}
        for guide in self.bayesian.guides:
            own, name = rng.fold(seed, *guide.names), guide.names[0]
            if isinstance(guide, Multiplicative):
                found[f"z of {name}"] = guide.gain.draw(n, rng.fold(own, "gain"), start)[0]
            elif isinstance(guide, NodeGuide):
                for axis, gain in zip(guide.axes, guide.gains, strict=True):
                    label = f"z of {name}" if len(guide.axes) == 1 else f"z of {name} axis {axis}"
                    found[label] = gain.draw(n, rng.fold(own, axis), start)[0]
        return found

    def functions(self, x: Any, samples: int, seed: int) -> Tensor:
        """(S, B, ...): E[y | f_s], or the bare outputs where there is no likelihood."""
        if isinstance(self.posterior, Posterior):
            return self.posterior.predict(x, samples, seed=seed).samples
        stack = self.posterior.sample(samples, seed)
        inputs = x if isinstance(x, tuple) else (x,)
        return torch.stack([self.posterior.call({k: v[s] for k, v in stack.items()}, *inputs) for s in range(samples)])


def _label(name: str, index: int, shape: torch.Size) -> str:
    """fc.weight[0, 3] for a flat index."""
    if not shape:
        return name
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(index, tuple(shape)))}]"


def _pick(stack: Params, patterns: list[str], most: int, seed: int) -> tuple[dict[str, Tensor], int]:
    """Flat indices of the entries to examine, per tensor, and how many entries the patterns cover."""
    shapes = {name: tuple(value.shape[1:]) for name, value in stack.items()}
    owners = {name: name.removeprefix("z of ").partition(" axis ")[0] for name in shapes}
    single: set[tuple[str, int]] = set()
    broad: dict[str, bool] = {}
    for pattern in patterns:
        entry = re.fullmatch(r"(.+)\[(\d+(?:, *\d+)*)\]", pattern)
        named = [] if entry is None else [name for name in shapes if entry[1] in (name, owners[name])]
        if entry is None or not named:
            broad[pattern] = True
            continue
        place, shape = tuple(int(i) for i in entry[2].split(",")), shapes[named[0]]
        if len(place) != len(shape) or any(i >= size for i, size in zip(place, shape, strict=True)):
            raise ValueError(f"{pattern!r} is no entry of {named[0]!r}, whose shape is {shape}")
        single.add((named[0], int(np.ravel_multi_index(place, shape))))
    chosen = match(dict.fromkeys(owners.values()), broad, default=False)
    entries = [(name, i) for name in shapes if chosen[owners[name]] for i in range(math.prod(shapes[name]))]
    entries = [entry for entry in entries if entry not in single]
    kept = rng.permutation(len(entries), rng.fold(seed, "coordinates"))[: max(0, most - len(single))]
    picked: dict[str, list[int]] = {}
    for name, index in sorted([*single, *(entries[i] for i in kept.tolist())]):
        picked.setdefault(name, []).append(index)
    return {name: torch.tensor(index) for name, index in picked.items()}, len(entries) + len(single)
