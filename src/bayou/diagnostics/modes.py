"""Multimodality of a posterior in its weights, coordinate by coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayou import rng
from bayou.diagnostics.dip import TINY, Array, antimode, dip_test, holm
from bayou.guides.bayesian import Bayesian
from bayou.params import Params, match
from bayou.posteriors.posterior import Posterior, check_count

CHUNK_NUMBERS = 2**22  # numbers held at a time while sampling
MIN_SAMPLES = 40


@dataclass(frozen=True)
class Coordinate:
    """The dip test of one weight, say "fc.weight[0, 3]".

    ``adjusted``: the p-value corrected for all coordinates tested (Holm). A multimodal coordinate is cut at its
    ``antimode``, with a share ``left`` of the draws below; NaN for the others.
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
    """Coordinates, the least unimodal first, with their draws ``values`` (S, C) in that order.

    ``total``: the number of weights that the names cover; ``constant``: of the examined ones, those that never vary.
    ``print`` shows a summary.
    """

    coordinates: tuple[Coordinate, ...]
    values: Tensor
    level: float
    total: int
    constant: int

    @property
    def multimodal(self) -> tuple[Coordinate, ...]:
        """The coordinates that are not unimodal at the given level."""
        return tuple(c for c in self.coordinates if c.multimodal)

    def __str__(self) -> str:
        examined = f"{len(self.coordinates):,} of {self.total:,} weights"
        lines = [
            f"{examined}, {len(self.values):,} draws: {len(self.multimodal):,} multimodal "
            f"(dip test, holm, level {self.level:g})"
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
        return "\n".join(lines)


@torch.no_grad()
def modes(
    posterior: Posterior | Bayesian,
    *,
    names: str | Sequence[str] = "*",
    max_coordinates: int = 256,
    samples: int = 1000,
    level: float = 0.05,
    seed: rng.Seed = 0,
) -> Modes:
    """Look for several modes in the weights of a posterior.

    Every coordinate gets Hartigan's dip test on ``samples`` draws, corrected for their number (Holm 1979). ``names``:
    patterns on tensor names; of more than ``max_coordinates`` entries a random choice is examined. The draws are those
    of ``posterior.sample(samples, seed)``.
    """
    check_count(samples, "samples", MIN_SAMPLES)
    check_count(max_coordinates, "max_coordinates", 1)
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    seed = rng.integer(seed)
    first = posterior.sample(1, seed, 0)
    picked, total = _pick(first, [names] if isinstance(names, str) else names, max_coordinates, seed)
    size = max(1, CHUNK_NUMBERS // max(1, sum(value.numel() for value in first.values())))
    parts = []
    for start in range(0, samples, size):
        stack = posterior.sample(min(size, samples - start), seed, start)
        each = [stack[name].flatten(1)[:, index.to(stack[name].device)] for name, index in picked.items()]
        parts.append(torch.cat(each, 1))
    values = torch.cat(parts).double().cpu()
    labels = [_label(name, int(i), first[name].shape[1:]) for name, index in picked.items() for i in index]
    keep = values.amax(0) > values.amin(0)
    values, labels = values[:, keep], [label for label, kept in zip(labels, keep.tolist(), strict=True) if kept]
    found, order = _test(values.numpy(), labels, level)
    return Modes(found, values[:, order], level, total, int((~keep).sum()))


def _test(values: Array, labels: list[str], level: float) -> tuple[tuple[Coordinate, ...], Tensor]:
    """The coordinates, sorted by their dip, and that order."""
    tests = [dip_test(values[:, i]) for i in range(len(labels))]
    adjusted = holm([p for _, p in tests])
    found = []
    for i, (name, (dip, p)) in enumerate(zip(labels, tests, strict=True)):
        if adjusted[i] < level:
            cut = antimode(values[:, i])
            found.append(Coordinate(name, dip, p, float(adjusted[i]), True, cut, float((values[:, i] < cut).mean())))
        else:
            found.append(Coordinate(name, dip, p, float(adjusted[i]), False))
    order = np.argsort([-c.dip for c in found], kind="stable")
    return tuple(found[i] for i in order), torch.from_numpy(order)


def _label(name: str, index: int, shape: torch.Size) -> str:
    """fc.weight[0, 3] for a flat index."""
    if not shape:
        return name
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(index, tuple(shape)))}]"


def _pick(stack: Params, patterns: Sequence[str], most: int, seed: int) -> tuple[dict[str, Tensor], int]:
    """Flat indices of the entries to examine, per tensor, and how many entries the patterns cover."""
    chosen = match(stack, dict.fromkeys(patterns, True), default=False)
    entries = [(name, i) for name, value in stack.items() if chosen[name] for i in range(value.numel())]
    picked: dict[str, list[int]] = {}
    for name, index in sorted(entries[i] for i in rng.permutation(len(entries), rng.fold(seed, "coordinates"))[:most]):
        picked.setdefault(name, []).append(index)
    return {name: torch.tensor(index) for name, index in picked.items()}, len(entries)
