"""A transform on trial: its random inputs, and how answers are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows.transform import Cost, Transform

Pair = tuple[Tensor, Tensor]
DIRECTIONS = ("forward", "inverse")


class Direction(nn.Module):
    """One direction of a transform as a module of its own, which is what ``functional_call`` takes."""

    def __init__(self, transform: Transform, name: str) -> None:
        super().__init__()
        self.transform, self.name = transform, name

    def forward(self, x: Tensor, context: Tensor | None = None) -> Pair:
        return self.transform.inverse(x, context) if self.name == "inverse" else self.transform.forward(x, context)


@dataclass(frozen=True)
class Case:
    """A transform in float64 and eval mode, with the random inputs that every property is measured on."""

    transform: Transform
    event: tuple[int, ...]
    rows: int
    seed: int
    tolerances: Mapping[str, float]
    backend: str
    fresh: Callable[[], Transform] | None = None
    given_context: Tensor | None = None

    @property
    def size(self) -> int:
        return math.prod(self.event)

    @property
    def iterative(self) -> bool:
        return Cost.iterative in (self.transform.forward_kind, self.transform.inverse_kind)

    @property
    def like(self) -> Tensor:
        tensors = (t for t in (*self.transform.parameters(), *self.transform.buffers()) if t.is_floating_point())
        found = next(tensors, None)
        return torch.zeros((), dtype=torch.float64, device=None if found is None else found.device)

    def inputs(self, direction: str, n: int | None = None, part: str = "") -> Tensor:
        """Random points of the domain, or of the codomain for the inverse: (n, *event)."""
        noise = rng.normal(self.rows if n is None else n, self.event, self.like, rng.fold(self.seed, direction, part))
        return within(noise, self.transform.domain if direction == "forward" else self.transform.codomain)

    def context(self, n: int | None = None) -> Tensor | None:
        """A context for each of n rows, the given one or random; None for a transform that takes none."""
        if not self.transform.context_dim:
            return None
        n, width = self.rows if n is None else n, self.transform.context_dim
        if self.given_context is None:
            return rng.normal(n, (width,), self.like, rng.fold(self.seed, "context"))
        given = self.given_context.to(self.like).expand(max(n, self.rows), width)
        return given[:n]

    def tolerance(self, name: str) -> float:
        return self.tolerances[f"{name} iterative" if self.iterative else name]

    def pairs(self, n: int | None = None) -> Iterator[tuple[str, Direction, Tensor, Tensor | None]]:
        """For both directions: name, module, inputs, context."""
        for name in DIRECTIONS:
            yield name, Direction(self.transform, name), self.inputs(name, n), self.context(n)


def within(noise: Tensor, interval: tuple[float, float]) -> Tensor:
    """Real numbers carried into an interval."""
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return noise
    if math.isinf(high):
        return low + noise.exp()
    if math.isinf(low):
        return high - noise.exp()
    return low + (high - low) * noise.sigmoid()


def distance(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to magnitudes above 1; infinite where one is NaN or shapes differ."""
    if got.shape != expected.shape:
        return math.inf
    if not got.numel():
        return 0.0
    gap = (got.double() - expected.double()).abs() / expected.double().abs().clamp_min(1.0)
    gap = torch.where(got == expected, 0.0, gap)  # equal infinities
    return torch.where(gap.isnan(), math.inf, gap).max().item()


def distances(got: Pair, expected: Pair) -> float:
    """The larger of the distances of values and of ladjs."""
    return max(distance(a, b) for a, b in zip(got, expected, strict=True))
