"""Properties that all maps of bayou have, in addition to those that ``flows.check`` measures.

Second derivatives, one compiled graph, vmap over parameters, half precision and saved states.
"""

import copy
import math
import types
import warnings
from dataclasses import dataclass
from functools import partial

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map, tree_map_only

from bayou.core import rng
from bayou.flows import Ladj
from bayou.flows.checking.case import DIRECTIONS, distance, pair_distance
from bayou.flows.checking.check import (
    PERTURB,
    measure,
    prepare_case,
    select_properties,
)
from bayou.flows.checking.derivatives import (
    INTEGER_NOTE,
    Inputs,
    JointFunction,
    has_no_gradient,
    joint_functions,
)
from bayou.flows.checking.properties import PROPERTIES
from bayou.flows.checking.report import Result
from bayou.flows.checking.terms import gradient
from bayou.flows.core.compose import Direction
from bayou.flows.core.implicit import SecondDerivativeError

VMAP_COPIES = 3
VMAP_PERTURBATION = 0.05  # the standard deviation of the differences of copies
STATE_PERTURBATION = 0.1  # of tensors that a saved state replaces
DTYPE_TOLERANCES = {
    torch.float64: 0.0,
    torch.float32: 2.0**10 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 2.0**6 * torch.finfo(torch.bfloat16).eps,
}
SECOND_DERIVATIVE_TOLERANCE = 1e-6  # relative, of differences of gradients
# Of finite differences of a gradient, whose error is of fourth order; smaller ones, where one
# crosses a kink of an activation function.
STEPS = (1e-4, 1e-5, 1e-6)
# An adaptive solver has errors of derivatives that are larger than those of values.
SOLVER_FACTOR = 100
# Of the entries that errors are relative to; their rounding errors are 1e-10 at the smallest step.
MIN_SCALE = 1e-2
# Weights of the values at multiples of the step.
STENCIL = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}


def check(
    transform,
    dim=None,
    *,
    only=None,
    skip=(),
    perturb=PERTURB,
    compile_backend="inductor",
    fresh=None,
    **options,
):
    """Measure the properties of ``flows.check`` and of this module, with the options of the former.

    Args:
        transform: the map.
        dim: the shape of an event of x, or its leading axis.
        only: the names of the properties to measure; all by default.
        skip: the names of properties to leave out.
        perturb: the standard deviation of the noise that is added to the parameters.
        compile_backend: of ``torch.compile``.
        fresh: builds a new map of the same architecture; None for a copy.
        options: of ``prepare_case``.
    """
    properties = select_properties(all_properties(compile_backend, fresh), only, skip)
    return measure(properties, prepare_case(transform, dim, **options), perturb)


def all_properties(compile_backend="inductor", fresh=None):
    """Return the properties of ``flows.check`` and those of this module, by name."""
    return PROPERTIES | {
        "gradgradcheck": gradgradcheck,
        "compile": partial(compile_graph, backend=compile_backend),
        "vmap": vmap_parameters,
        "dtype": dtype,
        "state_dict": partial(state_dict, build=fresh),
    }


def gradgradcheck(case):
    """Compare derivatives of gradients, along a random direction, with finite differences.

    Or they raise a ``SecondDerivativeError``. With L a random combination of all y and ladj, the
    product of its Hessian with a direction d of the input, the context and all parameters is
    compared entry by entry with differences of ∇L along d. The gradient of an estimate need not be
    that of a function, so that its Jacobian is not symmetric; then one random combination is
    compared.

    Args:
        case: the map to check.
    """
    if case.is_discrete:
        yield Result.skip("gradgradcheck", INTEGER_NOTE)
        return
    for f, inputs in joint_functions(case, 3):
        if has_no_gradient(inputs):
            yield Result.skip(f"gradgradcheck {f.name}", "integers, and no parameters")
        else:
            yield _check_second_derivative(case, f, inputs)


def _check_second_derivative(case, f, inputs):
    """Compare the second derivative of a direction with finite differences of its gradient."""
    name = f"gradgradcheck {f.name}"
    is_symmetric = case.transform.ladj_kind is not Ladj.estimate
    variables = [t for t in inputs if t is not None and t.requires_grad]
    point = torch.cat([t.detach().flatten() for t in variables])
    gradient = _Gradient(f, inputs, case.seed)
    direction = _random_direction(variables, rng.fold(case.seed, "direction", f.name))
    weights = direction
    if not is_symmetric:
        weights = _random_direction(variables, rng.fold(case.seed, "weights", f.name))
    try:
        product = gradient.vector_jacobian_product(point, weights)
    except SecondDerivativeError as error:
        return Result(name, True, note=f"raises SecondDerivativeError: {error}")
    if not is_symmetric:
        product = product @ direction
    limit = max(SECOND_DERIVATIVE_TOLERANCE, SOLVER_FACTOR * case.transform.accuracy)
    gap = math.inf
    for step in STEPS:
        difference = gradient.finite_difference(point, direction, step)
        if not is_symmetric:
            difference = difference @ weights
        scale = difference.abs().max().clamp_min(MIN_SCALE)
        gap = min(gap, distance(product / scale, difference / scale))
        if gap <= limit:
            break
    return Result.of(name, gap, limit, "relative to the largest entry")


def _random_direction(tensors, seed):
    """Return a random vector of all entries of the tensors, with norm 1 for each tensor."""
    directions = []
    for i, tensor in enumerate(tensors):
        noise = rng.normal(1, (tensor.numel(),), tensor.detach(), rng.fold(seed, i))[0]
        directions.append(noise / noise.norm())
    return torch.cat(directions)


@dataclass(frozen=True)
class _Gradient:
    """∇L as a function of one vector of all inputs that have a gradient.

    L is a random combination of y and ladj.

    Args:
        f: computes y and ladj.
        inputs: of f.
        seed: of the combination.
    """

    f: JointFunction
    inputs: Inputs
    seed: int

    def __call__(self, point, create_graph=False):
        """Return the gradient at a vector."""
        y, ladj = self.f(*self._split(point))
        loss = 0 * point.sum()  # a constant has a gradient, too
        for name, output in (("y", y), ("ladj", ladj)):
            seed = rng.fold(self.seed, "loss", name)
            weights = rng.normal(1, output.shape, output.detach(), seed)[0]
            loss = loss + (weights * output).sum()
        return torch.autograd.grad(loss, point, create_graph=create_graph)[0]

    def _split(self, point):
        """Return the inputs of f, with the values of a vector."""
        inputs = []
        start = 0
        for tensor in self.inputs:
            if tensor is None or not tensor.requires_grad:
                inputs.append(tensor)
                continue
            inputs.append(point[start : start + tensor.numel()].reshape(tensor.shape))
            start += tensor.numel()
        return tuple(inputs)

    def vector_jacobian_product(self, point, weights):
        """Return the gradient of weights·∇L, by autograd."""
        point = point.clone().requires_grad_()
        inner = self(point, create_graph=True) @ weights + 0 * point.sum()
        return torch.autograd.grad(inner, point)[0]

    def finite_difference(self, point, direction, step):
        """Return the derivative of ∇L along a direction, by differences of fourth order."""
        total = torch.zeros_like(point)
        for multiple, weight in STENCIL.items():
            nearby = (point + multiple * step * direction).requires_grad_()
            total += weight / step * self(nearby)
        return total


def compile_graph(case, backend):
    """Compare one compiled graph without breaks with eager mode: values and gradients.

    Args:
        case: the map to check.
        backend: of ``torch.compile``.
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
                backend=backend,
            )
            y, log_det = run(x, context, noise)
            compiled_gradient = gradient(y.sum() + log_det.sum(), leaves)
        expected_y, expected_log_det = f(x, context, noise=noise)
        gap = pair_distance(
            (y.detach(), log_det.detach()),
            (expected_y.detach(), expected_log_det.detach()),
        )
        yield Result.of(f"compile {name}", gap, limit, backend)
        eager_gradient = gradient(expected_y.sum() + expected_log_det.sum(), leaves)
        gap = distance(compiled_gradient, eager_gradient)
        yield Result.of(f"compile {name} gradient", gap, limit, backend)


def _fresh_function(f):
    """Return a function that runs f, with a code object of its own.

    Compiled code is cached by code object: a new one evicts nothing from the caller's cache.
    """

    def run(x, context, noise, f=f):
        return f(x, context, noise=noise)

    code = run.__code__.replace()
    return types.FunctionType(code, run.__globals__, run.__name__, run.__defaults__)


@torch.no_grad()
def vmap_parameters(case):
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

        def call(values, x, noise, f=f, context=context):
            pair = functional_call(f, values, (x, context), {"noise": noise})
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
def dtype(case):
    """Check that float64, float32 and bfloat16 are preserved, with results close to float64.

    Args:
        case: the map to check.
    """
    for precision in DTYPE_TOLERANCES:
        if case.is_discrete:
            yield _check_discrete_dtype(case, precision)
        else:
            for name in DIRECTIONS:
                yield _check_dtype(case, precision, name)


def _check_discrete_dtype(case, precision):
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


def _check_dtype(case, precision, name):
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
    return Result.of(row_name, pair_distance(pair, expected), DTYPE_TOLERANCES[precision])


def _dtype_name(precision):
    """Return the name of a dtype without its package."""
    return str(precision).removeprefix("torch.")


@torch.no_grad()
def state_dict(case, build):
    """Check that a saved state, loaded into a copy with other values, gives bitwise equal results.

    The copy runs in training mode before, which may change running statistics or initialize from
    data.

    Args:
        case: the map to check.
        build: builds a new map of the same architecture; None to copy the map.
    """
    state = case.transform.state_dict()
    file = save({key: tensor.contiguous().clone() for key, tensor in state.items()})
    restored = copy.deepcopy(case.transform) if build is None else build().to(case.reference)
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
