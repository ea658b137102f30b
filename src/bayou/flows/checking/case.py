"""The subject of a check: a map, its random inputs, and distances between results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows.core.bases import Base, StandardNormal, Uniform
from bayou.flows.core.compose import Direction
from bayou.flows.core.transform import Cost, Map, Pair, Side, Transform

DIRECTIONS = ("forward", "inverse")
Noise = tuple[Any, ...]  # of one pass of a map, as ``Map.noise`` returns it


@dataclass(frozen=True)
class Case:
    """A map in float64 and eval mode, with random inputs.

    Args:
        transform: the map.
        event: the shape of x.
        rows: the number of random inputs.
        seed: of inputs and noise.
        tolerances: by name; see ``check.TOLERANCES``.
        fixed_context: one context (context_dim,) or one for each row; None, the default, for random
            ones.
        fixed_base: the distribution of x; None, the default, for one that fits the domain.
    """

    transform: Map
    event: tuple[int, ...]
    rows: int
    seed: int
    tolerances: Mapping[str, float]
    fixed_context: Tensor | None = None
    fixed_base: Base | None = None

    @property
    def size(self) -> int:
        """Return the number of entries of x."""
        return math.prod(self.event)

    @property
    def is_bijective(self) -> bool:
        """Return whether the map is a bijection in both directions."""
        return isinstance(self.transform, Transform)

    @property
    def is_discrete(self) -> bool:
        """Return whether x and y are integers."""
        return self.transform.whole_in and self.transform.whole_out

    @property
    def is_iterative(self) -> bool:
        """Return whether a direction is computed by iteration, up to a tolerance."""
        return Cost.iterative in (self.transform.forward_kind, self.transform.inverse_kind)

    @property
    def reference(self) -> Tensor:
        """Return a scalar 0 in float64 on the device of the map."""
        for tensor in (*self.transform.parameters(), *self.transform.buffers()):
            if tensor.is_floating_point():
                return torch.zeros((), dtype=torch.float64, device=tensor.device)
        return torch.zeros((), dtype=torch.float64)

    @property
    def base(self) -> Base | None:
        """Return the distribution of x: the fixed one, normal, or uniform on a bounded domain.

        It is None on a half-line.
        """
        if self.fixed_base is not None:
            return self.fixed_base
        low, high = self.transform.domain
        if math.isfinite(low) != math.isfinite(high):
            return None
        base = Uniform(self.event, low, high) if math.isfinite(low) else StandardNormal(self.event)
        return base.to(self.reference)

    def inputs(self, direction: str, n: int | None = None, label: str = "") -> Tensor:
        """Draw points of the domain, or of the codomain for the inverse: (n, *event).

        Args:
            direction: "forward" or "inverse".
            n: the number of points; by default the rows of the case.
            label: points differ by label.
        """
        n = self.rows if n is None else n
        if direction == "inverse" and not self.is_bijective:
            return self._image_points(n, label)
        seed = rng.fold(self.seed, direction, label)
        if direction == "forward" and self.fixed_base is not None:
            return self.fixed_base.draw(n, seed=seed).detach()
        noise = rng.normal(n, self.event, self.reference, seed)
        interval = self.transform.domain
        if direction == "inverse":
            interval = self.transform.codomain
        return map_into(noise, interval)

    @torch.no_grad()
    def _image_points(self, n: int, label: str) -> Tensor:
        """Draw points of the image of forward: (n, *event_out)."""
        x = self.inputs("forward", n, f"image {label}")
        seed = rng.fold(self.seed, "image", label)
        return self.transform.forward(x, self.context(n), seed=seed)[0]

    def noise(self, direction: str, x: Tensor, context: Tensor | None) -> Noise:
        """Draw the noise of one pass over x.

        Args:
            direction: "forward" or "inverse".
            x: the input of the pass.
            context: (n, context_dim), or None.
        """
        seed = rng.fold(self.seed, "noise")
        return self.transform.noise(x, context, inverse=direction == "inverse", seed=seed)

    def run(self, direction: str, x: Tensor, context: Tensor | None) -> Pair:
        """Compute a direction at x, with its noise: (y, ladj).

        Args:
            direction: "forward" or "inverse".
            x: the input, (n, *event).
            context: (n, context_dim), or None.
        """
        noise = self.noise(direction, x, context)
        return Direction(self.transform, direction)(x, context, noise=noise)

    def round_trip(self, first: str, second: str) -> tuple[Pair, Pair] | None:
        """Run a direction and then the other.

        Args:
            first: the direction of the first step.
            second: the direction of the second step.

        Returns:
            (x, −term of the first step) and the result of the second, which should be equal; None
            if the second step is random.
        """
        label = self.transform.label if second == "inverse" else self.transform.opposite
        if label.inverse is not Side.equal and not self.is_bijective:
            return None
        x = self.inputs(first)
        context = self.context()
        y, term = self.run(first, x, context)
        return (x, -term), self.run(second, y, context)

    def context(self, n: int | None = None) -> Tensor | None:
        """Return contexts of n rows, fixed or random: (n, context_dim).

        It is None for a map without context.

        Args:
            n: the number of rows; by default the rows of the case.
        """
        if not self.transform.context_dim:
            return None
        n = self.rows if n is None else n
        width = self.transform.context_dim
        if self.fixed_context is None:
            return rng.normal(n, (width,), self.reference, rng.fold(self.seed, "context"))
        return self.fixed_context.to(self.reference).expand(max(n, self.rows), width)[:n]

    def single_context(self) -> Tensor | None:
        """Return the context of the first row, (context_dim,), or None."""
        contexts = self.context(1)
        return None if contexts is None else contexts[0]

    def tolerance(self, name: str) -> float:
        """Look up a tolerance, which is larger for a map that iterates.

        Args:
            name: of the tolerance: "inverse" or "equal".
        """
        return self.tolerances[f"{name} iterative" if self.is_iterative else name]

    def with_solver_error(self, limit: float) -> float:
        """Return the tolerance of two directions, or of a value and its Jacobian.

        It is at least the accuracy of the map's solver.

        Args:
            limit: the tolerance of a map without a solver.
        """
        return max(limit, self.transform.accuracy)

    def passes(
        self,
        n: int | None = None,
    ) -> Iterator[tuple[str, Direction, Tensor, Tensor | None, Noise]]:
        """Yield both directions: name, module, inputs, context, noise.

        Args:
            n: the number of rows; by default the rows of the case.
        """
        for name in DIRECTIONS:
            x = self.inputs(name, n)
            context = self.context(n)
            noise = self.noise(name, x, context)
            yield name, Direction(self.transform, name), x, context, noise


def map_into(numbers: Tensor, interval: tuple[float, float]) -> Tensor:
    """Map real numbers into an interval, by exp or a sigmoid where it is bounded.

    Args:
        numbers: real numbers of any shape.
        interval: the ends, which may be infinite.
    """
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return numbers
    if math.isinf(high):
        return low + numbers.exp()
    if math.isinf(low):
        return high - numbers.exp()
    return low + (high - low) * numbers.sigmoid()


def distance(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to magnitudes above 1.

    It is infinite for NaN or different shapes.

    Args:
        values: to compare.
        expected: with the same shape.
    """
    if values.shape != expected.shape:
        return math.inf
    if not values.numel():
        return 0.0
    gap = (values.double() - expected.double()).abs() / expected.double().abs().clamp_min(1.0)
    gap = torch.where(values == expected, 0.0, gap)  # equal infinities
    return torch.where(gap.isnan(), math.inf, gap).max().item()


def pair_distance(pair: Pair, expected: Pair) -> float:
    """Return the larger of the distances of values and ladjs.

    Args:
        pair: (y, ladj).
        expected: (y, ladj).
    """
    return max(distance(a, b) for a, b in zip(pair, expected, strict=True))
