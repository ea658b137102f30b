"""The subject of a check: a map, its random inputs, and distances between results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayou import rng
from bayou.flows.core.bases import Base, StandardNormal, Uniform
from bayou.flows.core.compose import Direction
from bayou.flows.core.transform import Cost, Map, Pair, Side, Transform

DIRECTIONS = ("forward", "inverse")


@dataclass(frozen=True)
class Case:
    """A map in float64 and eval mode, with random inputs."""

    transform: Map
    event: tuple[int, ...]  # of x
    rows: int
    seed: int
    tolerances: Mapping[str, float]
    backend: str
    fresh: Callable[[], Map] | None = None
    given_context: Tensor | None = None
    given_base: Base | None = None

    @property
    def size(self) -> int:
        return math.prod(self.event)

    @property
    def bijective(self) -> bool:
        return isinstance(self.transform, Transform)

    @property
    def whole(self) -> bool:
        """Whether x and y are integers."""
        return self.transform.whole_in and self.transform.whole_out

    def events(self, direction: str) -> tuple[int, ...]:
        """The shape of an input event of a direction."""
        return self.event if self.bijective or direction == "forward" else self.transform.event_out  # type: ignore[return-value]

    @property
    def iterative(self) -> bool:
        return Cost.iterative in (self.transform.forward_kind, self.transform.inverse_kind)

    @property
    def like(self) -> Tensor:
        tensors = (
            t
            for t in (*self.transform.parameters(), *self.transform.buffers())
            if t.is_floating_point()
        )
        found = next(tensors, None)
        return torch.zeros((), dtype=torch.float64, device=None if found is None else found.device)

    @property
    def base(self) -> Base | None:
        """The distribution of x: the given one, normal, or uniform on a bounded domain; None on a
        half-line.
        """
        low, high = self.transform.domain
        if self.given_base is None and math.isfinite(low) == math.isfinite(high):
            bounded = math.isfinite(low)
            return (Uniform(self.event, low, high) if bounded else StandardNormal(self.event)).to(
                self.like
            )
        return self.given_base

    def inputs(self, direction: str, n: int | None = None, part: str = "") -> Tensor:
        """Random points of the domain, or of the codomain for the inverse: (n, *event)."""
        n = self.rows if n is None else n
        if direction == "inverse" and not self.bijective:  # points of the image of f
            x = self.inputs("forward", n, f"image {part}")
            with torch.no_grad():
                return self.transform.forward(
                    x, self.context(n), seed=rng.fold(self.seed, "image", part)
                )[0]
        if direction == "forward" and self.given_base is not None:
            return self.given_base.draw(n, seed=rng.fold(self.seed, direction, part)).detach()
        noise = rng.normal(n, self.event, self.like, rng.fold(self.seed, direction, part))
        return within(
            noise, self.transform.domain if direction == "forward" else self.transform.codomain
        )

    def noise(self, direction: str, x: Tensor, context: Tensor | None) -> tuple[Any, ...]:
        """The noise of one pass."""
        return self.transform.noise(
            x, context, inverse=direction == "inverse", seed=rng.fold(self.seed, "noise")
        )

    def result(self, direction: str, x: Tensor, context: Tensor | None) -> Pair:
        """The result of a direction at x."""
        return Direction(self.transform, direction)(
            x, context, noise=self.noise(direction, x, context)
        )

    def round_trip(self, first: str, second: str) -> tuple[Pair, Pair] | None:
        """(x, −term of the first step) and the result of the second; None if the second step is
        random.
        """
        label = self.transform.label if second == "inverse" else self.transform.opposite
        if label.inverse is not Side.equal and not self.bijective:
            return None
        x, context = self.inputs(first), self.context()
        y, term = self.result(first, x, context)
        return (x, -term), self.result(second, y, context)

    def context(self, n: int | None = None) -> Tensor | None:
        """A context for each of n rows, the given one or random; None for a transform without
        context.
        """
        if not self.transform.context_dim:
            return None
        n, width = self.rows if n is None else n, self.transform.context_dim
        if self.given_context is None:
            return rng.normal(n, (width,), self.like, rng.fold(self.seed, "context"))
        given = self.given_context.to(self.like).expand(max(n, self.rows), width)
        return given[:n]

    def tolerance(self, name: str) -> float:
        return self.tolerances[f"{name} iterative" if self.iterative else name]

    def with_solver_error(self, limit: float) -> float:
        """The tolerance of comparisons of the two directions, or of a value and its Jacobian."""
        return max(limit, self.transform.accuracy)

    def pairs(
        self, n: int | None = None
    ) -> Iterator[tuple[str, Direction, Tensor, Tensor | None, Any]]:
        """For both directions: name, module, inputs, context, noise."""
        for name in DIRECTIONS:
            x, context = self.inputs(name, n), self.context(n)
            yield name, Direction(self.transform, name), x, context, self.noise(name, x, context)


def within(noise: Tensor, interval: tuple[float, float]) -> Tensor:
    """Real numbers mapped into an interval."""
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return noise
    if math.isinf(high):
        return low + noise.exp()
    if math.isinf(low):
        return high - noise.exp()
    return low + (high - low) * noise.sigmoid()


def distance(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to magnitudes above 1; infinite for NaN or different
    shapes.
    """
    if got.shape != expected.shape:
        return math.inf
    if not got.numel():
        return 0.0
    gap = (got.double() - expected.double()).abs() / expected.double().abs().clamp_min(1.0)
    gap = torch.where(got == expected, 0.0, gap)  # equal infinities
    return torch.where(gap.isnan(), math.inf, gap).max().item()


def distances(got: Pair, expected: Pair) -> float:
    """The larger of the distances of values and ladjs."""
    return max(distance(a, b) for a, b in zip(got, expected, strict=True))
