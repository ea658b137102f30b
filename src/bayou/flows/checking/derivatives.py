"""Checks of derivatives: gradients, and derivatives of gradients, agree with finite differences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from bayou.core import rng
from bayou.flows.checking.case import Case, Noise, distance
from bayou.flows.checking.report import Result
from bayou.flows.core.compose import Direction
from bayou.flows.core.implicit import SecondDerivativeError
from bayou.flows.core.transform import Ladj, Pair

# Of finite differences of a gradient, whose error is of fourth order; smaller ones, where one
# crosses a kink of an activation function.
STEPS = (1e-4, 1e-5, 1e-6)
# An adaptive solver has errors of derivatives that are larger than those of values.
SOLVER_FACTOR = 100
# Of the entries that errors are relative to; their rounding errors are 1e-10 at the smallest step.
MIN_SCALE = 1e-2
# Weights of the values at multiples of the step.
STENCIL = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}
FIRST_STEP = 1e-6  # of the finite differences of first derivatives
# A root has an error of 1e-12, which differences divide by 1e-6.
ABSOLUTE_TOLERANCE = 1e-7
ABSOLUTE_TOLERANCE_ITERATIVE = 1e-6
INTEGER_NOTE = "integers: gradients are straight-through and not derivatives"

Inputs = tuple[Tensor | None, ...]  # the input, the context, and all parameters as one vector


@dataclass(frozen=True)
class JointFunction:
    """A direction of a map as a function of its input, its context and a vector of parameters.

    Args:
        name: of the direction.
        direction: the direction as a module.
        noise: of the pass.
    """

    name: str
    direction: Direction
    noise: Noise

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return dict(self.direction.named_parameters())

    def __call__(self, x: Tensor, context: Tensor | None, values: Tensor | None) -> Pair:
        """Compute (y, ladj) with the parameters replaced by these values."""
        parameters = self.parameters
        pieces = () if values is None else values.split([p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), pieces, strict=True)
        replacements = {key: piece.reshape(p.shape) for (key, p), piece in pairs}
        pair: Pair = functional_call(
            self.direction,
            replacements,
            (x, context),
            {"noise": self.noise},
        )
        return pair


def joint_functions(case: Case, rows: int) -> Iterator[tuple[JointFunction, Inputs]]:
    """Yield both directions as functions, with their inputs.

    Inputs that have no derivative require no gradient.

    Args:
        case: the map to check.
        rows: the number of random inputs.
    """
    for name, direction, x, context, noise in case.passes(rows):
        parameters = [p.detach().flatten() for p in direction.parameters()]
        values = torch.cat(parameters) if parameters else None
        is_integer = case.transform.whole_in if name == "forward" else case.transform.whole_out
        inputs = (
            x.detach().clone().requires_grad_(not is_integer),
            _differentiable_copy(context),
            _differentiable_copy(values),
        )
        yield JointFunction(name, direction, noise), inputs


def _differentiable_copy(tensor: Tensor | None) -> Tensor | None:
    """Return a leaf with the same values that requires a gradient, or None for None."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def has_no_gradient(inputs: Inputs) -> bool:
    """Return whether no input requires a gradient: x is integer, and there is nothing else.

    Args:
        inputs: of a ``JointFunction``.
    """
    return not any(tensor is not None and tensor.requires_grad for tensor in inputs)


def gradcheck(case: Case) -> Iterator[Result]:
    """Compare gradients in the input, the context and all parameters with finite differences.

    Args:
        case: the map to check.
    """
    if case.is_discrete:
        yield Result.skip("gradcheck", INTEGER_NOTE)
        return
    for f, inputs in joint_functions(case, 2):
        if has_no_gradient(inputs):
            yield Result.skip(f"gradcheck {f.name}", "integers, and no parameters")
        else:
            yield _check_gradient(case, f, inputs)


def _check_gradient(case: Case, f: JointFunction, inputs: Inputs) -> Result:
    """Compare the gradients of a direction with finite differences."""
    # The gradient of an estimate need not be that of its value; the ladj rows compare it.
    is_estimate = case.transform.ladj_kind is Ladj.estimate

    def outputs(x: Tensor, context: Tensor | None, values: Tensor | None) -> Tensor:
        # One tensor, since gradcheck ignores an output without gradient.
        y, ladj = f(x, context, values)
        return y.flatten() if is_estimate else torch.cat([y.flatten(), ladj.flatten()])

    try:
        torch.autograd.gradcheck(
            outputs,
            inputs,  # type: ignore[arg-type]
            eps=FIRST_STEP,
            atol=ABSOLUTE_TOLERANCE_ITERATIVE if case.is_iterative else ABSOLUTE_TOLERANCE,
            rtol=case.tolerances["gradcheck"],
            fast_mode=True,
        )
    except GradcheckError as error:
        return Result(f"gradcheck {f.name}", False, note=str(error))
    return Result(f"gradcheck {f.name}", True)


def gradgradcheck(case: Case) -> Iterator[Result]:
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


def _check_second_derivative(case: Case, f: JointFunction, inputs: Inputs) -> Result:
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
    limit = max(case.tolerances["gradgradcheck"], SOLVER_FACTOR * case.transform.accuracy)
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


def _random_direction(tensors: list[Tensor], seed: rng.Seed) -> Tensor:
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

    def __call__(self, point: Tensor, create_graph: bool = False) -> Tensor:
        """Return the gradient at a vector."""
        y, ladj = self.f(*self._split(point))  # type: ignore[arg-type]
        loss = 0 * point.sum()  # a constant has a gradient, too
        for name, output in (("y", y), ("ladj", ladj)):
            seed = rng.fold(self.seed, "loss", name)
            weights = rng.normal(1, output.shape, output.detach(), seed)[0]
            loss = loss + (weights * output).sum()
        return torch.autograd.grad(loss, point, create_graph=create_graph)[0]

    def _split(self, point: Tensor) -> Inputs:
        """Return the inputs of f, with the values of a vector."""
        inputs: list[Tensor | None] = []
        start = 0
        for tensor in self.inputs:
            if tensor is None or not tensor.requires_grad:
                inputs.append(tensor)
                continue
            inputs.append(point[start : start + tensor.numel()].reshape(tensor.shape))
            start += tensor.numel()
        return tuple(inputs)

    def vector_jacobian_product(self, point: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of weights·∇L, by autograd."""
        point = point.clone().requires_grad_()
        inner = self(point, create_graph=True) @ weights + 0 * point.sum()
        return torch.autograd.grad(inner, point)[0]

    def finite_difference(self, point: Tensor, direction: Tensor, step: float) -> Tensor:
        """Return the derivative of ∇L along a direction, by differences of fourth order."""
        total = torch.zeros_like(point)
        for multiple, weight in STENCIL.items():
            nearby = (point + multiple * step * direction).requires_grad_()
            total += weight / step * self(nearby)
        return total
