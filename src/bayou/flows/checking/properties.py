"""The properties that ``check`` measures, each a generator of rows."""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map, tree_map_only

from bayou.core import rng
from bayou.flows.checking.case import DIRECTIONS, Case, Noise, distance, pair_distance
from bayou.flows.checking.derivatives import gradcheck, gradgradcheck
from bayou.flows.checking.integral import density
from bayou.flows.checking.report import Result
from bayou.flows.checking.tails import tails
from bayou.flows.checking.terms import gradient, ladj
from bayou.flows.contractive.residual import Residual
from bayou.flows.core.compose import Direction
from bayou.flows.core.transform import Map, Pair

VMAP_COPIES = 3
VMAP_PERTURBATION = 0.05  # the standard deviation of the differences of copies
STATE_PERTURBATION = 0.1  # of tensors that a saved state replaces
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


def compile_graph(case: Case) -> Iterator[Result]:
    """Compare one compiled graph without breaks with eager mode: values and gradients.

    Args:
        case: the map to check.
    """
    limit = case.tolerance("equal")
    for name, f, x, context, noise in case.passes():
        leaves = [x.requires_grad_(), *(p for p in f.parameters() if p.requires_grad)]
        with warnings.catch_warnings():  # of the compiler, also in the backward pass
            warnings.simplefilter("ignore")
            run = torch.compile(
                _fresh_function(f),
                fullgraph=True,
                dynamic=False,
                backend=case.backend,
            )
            y, log_det = run(x, context, noise)
            compiled_gradient = gradient(y.sum() + log_det.sum(), leaves)
        expected_y, expected_log_det = f(x, context, noise=noise)
        gap = pair_distance(
            (y.detach(), log_det.detach()),
            (expected_y.detach(), expected_log_det.detach()),
        )
        yield Result.of(f"compile {name}", gap, limit, case.backend)
        eager_gradient = gradient(expected_y.sum() + expected_log_det.sum(), leaves)
        gap = distance(compiled_gradient, eager_gradient)
        yield Result.of(f"compile {name} gradient", gap, limit, case.backend)


def _fresh_function(f: Direction) -> Callable[[Tensor, Tensor | None, Noise], Pair]:
    """Return a function that runs f, with a code object of its own.

    Compiled code is cached by code object: a new one evicts nothing from the caller's cache.
    """

    def run(x: Tensor, context: Tensor | None, noise: Noise, f: Direction = f) -> Pair:
        return f(x, context, noise=noise)

    code = run.__code__.replace()
    return types.FunctionType(code, run.__globals__, run.__name__, run.__defaults__)


@torch.no_grad()
def vmap_parameters(case: Case) -> Iterator[Result]:
    """Compare ``vmap`` over stacked parameters and inputs with a loop.

    Args:
        case: the map to check.
    """
    for name, f, _, context, _ in case.passes():
        stack = {}
        for key, p in f.named_parameters():
            difference = rng.normal(VMAP_COPIES, p.shape, p, rng.fold(case.seed, "vmap", key))
            stack[key] = p + VMAP_PERTURBATION * difference
        x = torch.stack([case.inputs(name, label=f"copy {i}") for i in range(VMAP_COPIES)])
        noises = [case.noise(name, row, context) for row in x]

        def call(
            values: dict[str, Tensor],
            x: Tensor,
            noise: Noise,
            f: Direction = f,
            context: Tensor | None = context,
        ) -> Pair:
            pair: Pair = functional_call(f, values, (x, context), {"noise": noise})
            return pair

        noise_stack = tree_map(lambda *tensors: torch.stack(tensors), *noises)
        pair = vmap(call)(stack, x, noise_stack)
        loop = [
            call({key: p[i] for key, p in stack.items()}, x[i], noises[i])
            for i in range(VMAP_COPIES)
        ]
        expected = (torch.stack([y for y, _ in loop]), torch.stack([ladj for _, ladj in loop]))
        note = "" if stack else "no parameters: over inputs only"
        gap = pair_distance(pair, expected)
        yield Result.of(f"vmap {name}", gap, case.tolerance("equal"), note)


@torch.no_grad()
def dtype(case: Case) -> Iterator[Result]:
    """Check that float64, float32 and bfloat16 are preserved, with results close to float64.

    Args:
        case: the map to check.
    """
    for precision in (torch.float64, torch.float32, torch.bfloat16):
        if case.is_discrete:
            yield _check_discrete_dtype(case, precision)
        else:
            for name in DIRECTIONS:
                yield _check_dtype(case, precision, name)


def _check_discrete_dtype(case: Case, precision: torch.dtype) -> Result:
    """Check that a bijection of integers is exact; half precision may round a shift."""
    transform = copy.deepcopy(case.transform).to(precision)
    x = case.inputs("forward").to(precision)
    context = case.context()
    if context is not None:
        context = context.to(precision)
    y, term = transform.forward(x, context)
    is_preserved = {y.dtype, term.dtype} == {precision} and torch.equal(y, y.round())
    is_inverted = torch.equal(transform.inverse(y, context)[0], x)
    note = "" if is_preserved else "other dtype, or not integers"
    return Result(_dtype_name(precision), is_preserved and is_inverted, note=note)


def _check_dtype(case: Case, precision: torch.dtype, name: str) -> Result:
    """Compare a direction in some precision with float64, with the same rounded parameters."""
    row_name = f"{_dtype_name(precision)} {name}"
    transform = copy.deepcopy(case.transform).to(precision)
    exact = copy.deepcopy(transform).to(torch.float64)
    x = case.inputs(name)
    context = case.context()
    inputs = (x, context, case.noise(name, x, context))
    inputs = tree_map_only(Tensor, partial(Tensor.to, dtype=precision), inputs)
    x, context, noise = inputs
    pair = Direction(transform, name)(x, context, noise=noise)
    if not all(tensor.dtype == precision for tensor in pair):
        dtypes = ", ".join(str(tensor.dtype) for tensor in pair)
        return Result(row_name, False, note=f"{precision} in gave (y, ladj) of {dtypes}")
    if not all(tensor.isfinite().all() for tensor in pair):
        return Result(row_name, False, note=f"{precision} in gave values that are not finite")
    x, context, noise = tree_map_only(Tensor, Tensor.double, inputs)
    expected = Direction(exact, name)(x, context, noise=noise)
    limit = 0.0 if precision is torch.float64 else case.tolerances[_dtype_name(precision)]
    return Result.of(row_name, pair_distance(pair, expected), limit)


def _dtype_name(precision: torch.dtype) -> str:
    """Return the name of a dtype without its package."""
    return str(precision).removeprefix("torch.")


@torch.no_grad()
def state_dict(case: Case) -> Iterator[Result]:
    """Check that a saved state, loaded into a copy with other values, gives bitwise equal results.

    The copy runs in training mode before, which may change running statistics or initialize from
    data.

    Args:
        case: the map to check.
    """
    state = case.transform.state_dict()
    file = save({key: tensor.contiguous().clone() for key, tensor in state.items()})
    restored = _build_copy(case)
    restored.train()
    for name in DIRECTIONS:
        Direction(restored, name)(case.inputs(name, label="other"), case.context())
    for key, tensor in restored.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seed = rng.fold(case.seed, "perturb", key)
            tensor.add_(STATE_PERTURBATION * rng.normal(1, tensor.shape, tensor, seed)[0])
    restored.load_state_dict(load(file))
    restored.eval()
    for name, f, x, context, noise in case.passes():
        pair = Direction(restored, name)(x, context, noise=noise)
        expected = f(x, context, noise=noise)
        is_equal = all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))
        note = "" if is_equal else f"differs by {pair_distance(pair, expected):.1e}"
        yield Result(f"state_dict {name}", is_equal, note=note)


def _build_copy(case: Case) -> Map:
    """Build a new map of the same architecture, or copy the map."""
    if case.build is None:
        return copy.deepcopy(case.transform)
    return case.build().to(case.reference)


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


PROPERTIES: dict[str, Callable[[Case], Iterator[Result]]] = {
    "inverse": inverse,
    "ladj": ladj,
    "density": density,
    "gradcheck": gradcheck,
    "gradgradcheck": gradgradcheck,
    "compile": compile_graph,
    "vmap": vmap_parameters,
    "dtype": dtype,
    "state_dict": state_dict,
    "tails": tails,
    "batch": batch,
}
