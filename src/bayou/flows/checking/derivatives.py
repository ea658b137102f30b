"""Checks of derivatives: gradients, and derivatives of gradients, agree with finite differences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from bayou import rng
from bayou.flows.checking.case import Case, distance
from bayou.flows.checking.report import Result
from bayou.flows.core.compose import Direction
from bayou.flows.core.implicit import SecondDerivativeError
from bayou.flows.core.transform import Ladj, Pair

# Of finite differences of a gradient, whose error is of fourth order; smaller ones, where one
# crosses a kink of an activation function.
STEPS = (1e-4, 1e-5, 1e-6)
SOLVER_FACTOR = (
    100  # an adaptive solver has errors of derivatives that are larger than those of values
)
MIN_SCALE = 1e-2  # of the entries that errors are relative to; their rounding errors are 1e-10 at the smallest step
STENCIL = {
    1: 8 / 12,
    -1: -8 / 12,
    2: -1 / 12,
    -2: 1 / 12,
}  # weights of the values at multiples of the step

Inputs = tuple[Tensor | None, ...]  # the input, the context, and all parameters as one vector


@dataclass(frozen=True)
class JointFunction:
    """A direction of a map as a function of its input, its context and its parameters as one
    vector.
    """

    name: str
    direction: Direction
    noise: Any

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.direction.named_parameters())

    def __call__(self, x: Tensor, context: Tensor | None, values: Tensor | None) -> Pair:
        parameters = self.parameters
        pieces = () if values is None else values.split([p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), pieces, strict=True)
        named = {key: piece.reshape(p.shape) for (key, p), piece in pairs}
        pair: Pair = functional_call(self.direction, named, (x, context), {"noise": self.noise})
        return pair


def joint_functions(case: Case, rows: int) -> Iterator[tuple[JointFunction, Inputs]]:
    """Yield both directions as functions, with inputs; those that have no derivative require no
    gradient.
    """
    for name, direction, x, context, noise in case.pairs(rows):
        parameters = [p.detach().flatten() for p in direction.parameters()]
        values = torch.cat(parameters) if parameters else None
        is_whole = case.transform.whole_in if name == "forward" else case.transform.whole_out
        inputs = tuple(
            None if tensor is None else tensor.detach().clone().requires_grad_(takes_gradient)
            for tensor, takes_gradient in ((x, not is_whole), (context, True), (values, True))
        )
        yield JointFunction(name, direction, noise), inputs


def has_no_gradient(inputs: Inputs) -> bool:
    """Return whether no input requires a gradient: x consists of integers, and there is nothing
    else.
    """
    return not any(tensor is not None and tensor.requires_grad for tensor in inputs)


def gradcheck(case: Case) -> Iterator[Result]:
    """Gradients in the input, the context and all parameters agree with finite differences."""
    if case.whole:
        yield Result.skipped(
            "gradcheck", "integers: gradients are straight-through and not derivatives"
        )
        return
    estimated = (
        case.transform.ladj_kind is Ladj.estimate
    )  # its gradient need not be that of its value: see ladj
    atol = (
        1e-6 if case.iterative else 1e-7
    )  # a root has an error of 1e-12, which differences divide by 1e-6
    for f, inputs in joint_functions(case, 2):
        if has_no_gradient(inputs):
            yield Result.skipped(f"gradcheck {f.name}", "integers, and no parameters")
            continue

        def joint(*inputs: Tensor | None, f: JointFunction = f) -> Tensor:
            y, ladj = f(*inputs)  # type: ignore[arg-type]
            # One tensor, since gradcheck ignores an output without gradient.
            return y.flatten() if estimated else torch.cat([y.flatten(), ladj.flatten()])

        try:
            torch.autograd.gradcheck(
                joint,
                inputs,  # type: ignore[arg-type]
                eps=1e-6,
                atol=atol,
                rtol=case.tolerances["gradcheck"],
                fast_mode=True,
            )
            yield Result(f"gradcheck {f.name}", True)
        except GradcheckError as error:
            yield Result(f"gradcheck {f.name}", False, note=str(error))


def gradgradcheck(case: Case) -> Iterator[Result]:
    """Derivatives of gradients, along a random direction, agree with finite differences, or raise
    an error.

    With L a random combination of all y and ladj, the product of its Hessian with a direction d of
    the input, the context and all parameters is compared entry by entry with differences of ∇L
    along d. The gradient of an estimate need not be that of a function, so that its Jacobian is not
    symmetric; then one random combination is compared.
    """
    if case.whole:
        note = "integers: gradients are straight-through and not derivatives"
        yield Result.skipped("gradgradcheck", note)
        return
    is_symmetric = case.transform.ladj_kind is not Ladj.estimate
    for f, inputs in joint_functions(case, 3):
        name = f"gradgradcheck {f.name}"
        if has_no_gradient(inputs):
            yield Result.skipped(name, "integers, and no parameters")
            continue
        differentiated = [t for t in inputs if t is not None and t.requires_grad]
        at = torch.cat([t.detach().flatten() for t in differentiated])
        gradient = _Gradient(f, inputs, case.seed)
        direction = _random_direction(differentiated, rng.fold(case.seed, "direction", f.name))
        weights = direction
        if not is_symmetric:
            weights = _random_direction(differentiated, rng.fold(case.seed, "weights", f.name))
        try:
            product = gradient.vector_jacobian_product(at, weights)
        except SecondDerivativeError as error:
            yield Result(name, True, note=f"raises SecondDerivativeError: {error}")
            continue
        if not is_symmetric:
            product = product @ direction
        limit = max(case.tolerances["gradgradcheck"], SOLVER_FACTOR * case.transform.accuracy)
        gap = math.inf
        for step in STEPS:
            difference = gradient.finite_difference(at, direction, step)
            if not is_symmetric:
                difference = difference @ weights
            scale = difference.abs().max().clamp_min(MIN_SCALE)
            gap = min(gap, distance(product / scale, difference / scale))
            if gap <= limit:
                break
        yield Result.of(name, gap, limit, "relative to the largest entry")


def _random_direction(tensors: list[Tensor], seed: rng.Seed) -> Tensor:
    """Return a random vector of all entries of the tensors, with norm 1 for each tensor."""
    parts = []
    for position, tensor in enumerate(tensors):
        noise = rng.normal(1, (tensor.numel(),), tensor.detach(), rng.fold(seed, position))[0]
        parts.append(noise / noise.norm())
    return torch.cat(parts)


@dataclass(frozen=True)
class _Gradient:
    """∇L as a function of one vector of all inputs that have a gradient, L a random combination of
    y and ladj.
    """

    f: JointFunction
    inputs: Inputs
    seed: int

    def __call__(self, at: Tensor, create_graph: bool = False) -> Tensor:
        """Return the gradient at a vector."""
        y, ladj = self.f(*self._split(at))  # type: ignore[arg-type]
        loss = 0 * at.sum()  # a constant has a gradient, too
        for name, output in (("y", y), ("ladj", ladj)):
            weights = rng.normal(
                1, output.shape, output.detach(), rng.fold(self.seed, "loss", name)
            )[0]
            loss = loss + (weights * output).sum()
        return torch.autograd.grad(loss, at, create_graph=create_graph)[0]

    def _split(self, at: Tensor) -> Inputs:
        """Return the inputs of f, with the values of a vector."""
        inputs: list[Tensor | None] = []
        start = 0
        for tensor in self.inputs:
            if tensor is None or not tensor.requires_grad:
                inputs.append(tensor)
                continue
            inputs.append(at[start : start + tensor.numel()].reshape(tensor.shape))
            start += tensor.numel()
        return tuple(inputs)

    def vector_jacobian_product(self, at: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of weights·∇L, by autograd."""
        at = at.clone().requires_grad_()
        inner = self(at, create_graph=True) @ weights + 0 * at.sum()
        return torch.autograd.grad(inner, at)[0]

    def finite_difference(self, at: Tensor, direction: Tensor, step: float) -> Tensor:
        """Return the derivative of ∇L along a direction, by differences of fourth order."""
        total = torch.zeros_like(at)
        for multiple, weight in STENCIL.items():
            moved = (at + multiple * step * direction).requires_grad_()
            total += weight / step * self(moved)
        return total
