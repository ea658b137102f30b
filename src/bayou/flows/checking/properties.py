"""The properties that ``check`` measures, each a generator of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows.checking.case import DIRECTIONS, Case, distance, pair_distance
from bayou.flows.checking.derivatives import gradcheck
from bayou.flows.checking.integral import density
from bayou.flows.checking.report import Result
from bayou.flows.checking.tails import tails
from bayou.flows.checking.terms import ladj
from bayou.flows.contractive.residual import Residual
from bayou.flows.core.transform import Pair

Property = Callable[[Case], Iterator[Result]]

BATCH_ROWS = 6
BATCH_SHAPES = ((6,), (2, 3), (1, 2, 1, 3), (0,), (2, 0))  # of at most BATCH_ROWS


@torch.no_grad()
def inverse(case: Case) -> Iterator[Result]:
    """Compare f⁻¹(f(x)) with x and f(f⁻¹(y)) with y, if the second step is not random.

    Args:
        case: the map to check.
    """
    yield from _check_lipschitz(case)
    limit = case.with_solver_error(case.tolerance("inverse"))
    for first, second in (DIRECTIONS, DIRECTIONS[::-1]):
        name = f"{second} of {first}"
        trip = case.round_trip(first, second)
        if trip is None:
            yield Result.skip(name, f"{second} is random")
            continue
        start, end = trip
        yield Result.of(name, distance(end[0], start[0]), limit)


def _check_lipschitz(case: Case) -> Iterator[Result]:
    """Compare the Jacobians of the residual layers, if there are any, with their bound."""
    norms = []
    for layer in case.transform.modules():
        if isinstance(layer, Residual):
            event = layer.event_shape
            seed = rng.fold(case.seed, "norm")
            x = rng.normal(case.rows, event, case.reference, seed)  # type: ignore[arg-type]
            norms.append(layer.jacobian_norm(x).max().item() / layer.lipschitz)
    if norms:
        note = f"the largest ‖∂g/∂x‖/L of {len(norms)} layers"
        yield Result.of("lipschitz", max(norms), 1.0, note)


@torch.no_grad()
def batch(case: Case) -> Iterator[Result]:
    """Check batches with any axes, also none or empty ones.

    Rows are independent, with their noise, and contexts broadcast.

    Args:
        case: the map to check.
    """
    for name, f, x, context, _ in case.passes(BATCH_ROWS):
        run = partial(f, seed=case.seed)
        direction = _BatchedDirection(case, name, run, x, context, run(x, context))
        yield direction.check_rows()
        yield direction.check_shapes()
        if context is not None:
            yield direction.check_context(context)


@dataclass(frozen=True)
class _BatchedDirection:
    """A direction of a map, and its results for a batch with one axis.

    Args:
        case: the map.
        name: of the direction.
        run: computes (y, ladj) of (x, context) with the noise of the case, from row ``start`` on.
        x: the inputs, (n, *event).
        context: (n, context_dim), or None.
        pair: (y, ladj) of the batch.
    """

    case: Case
    name: str
    run: Callable[..., Pair]
    x: Tensor
    context: Tensor | None
    pair: Pair

    def _compare(self, row: str, gap: float, note: str) -> Result:
        """Return a row that passes if results are equal up to rounding."""
        return Result.of(f"batch {self.name} {row}", gap, self.case.tolerance("equal"), note)

    def check_rows(self) -> Result:
        """Compare each row alone with its result in the batch."""
        y, log_det = self.pair
        gap = 0.0
        for i in range(len(self.x)):
            context = None if self.context is None else self.context[i]
            row_pair = self.run(self.x[i], context, start=i)
            gap = max(gap, pair_distance(row_pair, (y[i], log_det[i])))
        return self._compare("rows", gap, "each row alone and in the batch")

    def check_shapes(self) -> Result:
        """Compare batches of several axes with one of a single axis."""
        problems = []
        for shape in BATCH_SHAPES:
            problem = self._find_shape_problem(shape)
            if problem is not None:
                problems.append(f"batch {shape} {problem}")
        return Result(f"batch {self.name} shapes", not problems, note="; ".join(problems))

    def _find_shape_problem(self, shape: tuple[int, ...]) -> str | None:
        """Return what is wrong with the result of a batch of this shape, or None."""
        n = math.prod(shape)
        y, log_det = (tensor[:n].reshape(*shape, *tensor.shape[1:]) for tensor in self.pair)
        x = self.x[:n].reshape(*shape, *self.x.shape[1:])
        context = self.context
        if context is not None:
            context = context[:n].reshape(*shape, context.shape[-1])
        try:
            pair = self.run(x, context)
        except Exception as error:  # the other shapes are still measured
            return f"raised {type(error).__name__}: {error}"
        if pair[0].shape != y.shape or pair[1].shape != log_det.shape:
            return f"gave y {tuple(pair[0].shape)}, ladj {tuple(pair[1].shape)}"
        if pair_distance(pair, (y, log_det)) > self.case.tolerance("equal"):
            return "gave other values"
        return None

    def check_context(self, context: Tensor) -> Result:
        """Compare the broadcast of (2, 1) events with 3 contexts with every combination.

        Args:
            context: of all rows.
        """
        pairs = [
            self.run(self.x[i], context[j], start=3 * i + j) for i in range(2) for j in range(3)
        ]
        y, log_det = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
        expected = (y.unflatten(0, (2, 3)), log_det.unflatten(0, (2, 3)))
        gap = pair_distance(self.run(self.x[:2, None], context[:3]), expected)
        return self._compare("context", gap, "broadcast")


PROPERTIES: dict[str, Property] = {
    "inverse": inverse,
    "ladj": ladj,
    "density": density,
    "gradcheck": gradcheck,
    "tails": tails,
    "batch": batch,
}
