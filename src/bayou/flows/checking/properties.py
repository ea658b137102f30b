"""The properties that ``check`` measures, each a generator of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
        pair = run(x, context)
        yield _check_rows(case, name, run, x, context, pair)
        yield _check_shapes(case, name, run, x, context, pair)
        if context is not None:
            yield _check_context(case, name, run, x, context)


def _check_rows(
    case: Case,
    name: str,
    run: Callable[..., Pair],
    x: Tensor,
    context: Tensor | None,
    pair: Pair,
) -> Result:
    """Compare each row alone with its result in the batch."""
    y, log_det = pair
    gap = 0.0
    for i in range(len(x)):
        row_pair = run(x[i], None if context is None else context[i], start=i)
        gap = max(gap, pair_distance(row_pair, (y[i], log_det[i])))
    limit = case.tolerance("equal")
    return Result.of(f"batch {name} rows", gap, limit, "each row alone and in the batch")


def _check_shapes(
    case: Case,
    name: str,
    run: Callable[..., Pair],
    x: Tensor,
    context: Tensor | None,
    pair: Pair,
) -> Result:
    """Compare batches of several axes with one of a single axis."""
    problems = []
    for shape in BATCH_SHAPES:
        problem = _find_shape_problem(case, name, run, x, context, pair, shape)
        if problem is not None:
            problems.append(f"batch {shape} {problem}")
    return Result(f"batch {name} shapes", not problems, note="; ".join(problems))


def _find_shape_problem(
    case: Case,
    name: str,
    run: Callable[..., Pair],
    x: Tensor,
    context: Tensor | None,
    pair: Pair,
    shape: tuple[int, ...],
) -> str | None:
    """Return what is wrong with the result of a batch of this shape, or None."""
    n = math.prod(shape)
    input_event = case.input_event(name)
    output_event = case.input_event("inverse" if name == "forward" else "forward")
    if context is not None:
        context = context[:n].reshape(*shape, context.shape[-1])
    try:
        y, log_det = run(x[:n].reshape(*shape, *input_event), context)
    except Exception as error:  # the other shapes are still measured
        return f"raised {type(error).__name__}: {error}"
    if y.shape != (*shape, *output_event) or log_det.shape != shape:
        return f"gave y {tuple(y.shape)}, ladj {tuple(log_det.shape)}"
    rows = (y.reshape(n, *output_event), log_det.reshape(n))
    if pair_distance(rows, (pair[0][:n], pair[1][:n])) > case.tolerance("equal"):
        return "gave other values"
    return None


def _check_context(
    case: Case,
    name: str,
    run: Callable[..., Pair],
    x: Tensor,
    context: Tensor,
) -> Result:
    """Compare the broadcast of (2, 1) events with 3 contexts with every combination."""
    pair = run(x[:2, None], context[:3])
    grid = [run(x[i], context[j], start=3 * i + j) for i in range(2) for j in range(3)]
    y = torch.stack([y for y, _ in grid])
    log_det = torch.stack([log_det for _, log_det in grid])
    expected = (y.reshape(2, 3, *y.shape[1:]), log_det.reshape(2, 3, *log_det.shape[1:]))
    gap = pair_distance(pair, expected)
    return Result.of(f"batch {name} context", gap, case.tolerance("equal"), "broadcast")


PROPERTIES: dict[str, Property] = {
    "inverse": inverse,
    "ladj": ladj,
    "density": density,
    "gradcheck": gradcheck,
    "tails": tails,
    "batch": batch,
}
