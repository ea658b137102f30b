"""Derivatives of all orders for values whose computation is not recorded.

Such values are solutions of equations, and results of iterations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.func import vjp

NEWTON_STEPS_WITH_GRAPH = 2  # in compiled code; k steps have exact derivatives up to order 2ᵏ − 1

Pull = Callable[..., tuple[Tensor, ...]]  # (value, gradient, *theta) → gradients of theta


class SecondDerivativeError(NotImplementedError):
    """A second derivative was requested of a value that has only a first one.

    The message names the setting with which it is not needed.
    """


def with_derivatives(first: Tensor, pull: Pull, *theta: Tensor) -> Tensor:
    """Return a value that has derivatives of all orders in θ.

    A cheap graph of the value often has the right first derivative and wrong second ones, since it
    holds constant what depends on θ. That graph is used unless the derivative is to be
    differentiated again (``create_graph=True`` and ``torch.func``); then the derivative is computed
    by ``pull``. Compiled code always uses the graph; compilers refuse second derivatives
    themselves.

    Args:
        first: the value, with a graph to θ that has the right first derivative.
        pull: maps (value, gradient of the value, *θ) to the gradients of θ. It is linear in the
            gradient and uses no other tensor that depends on θ.
        theta: the tensors that the value depends on.
    """
    if torch.compiler.is_compiling():
        return first
    value: Tensor = _WithDerivatives.apply(first, pull, *theta)  # type: ignore[no-untyped-call]
    return value


class _WithDerivatives(torch.autograd.Function):
    """The identity of ``first``, with the derivatives of ``with_derivatives``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, pull: Pull, *theta: Tensor) -> Tensor:
        return first.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.pull, *theta = inputs
        # the output depends on θ, and so do derivatives at it
        ctx.save_for_backward(output, *theta)
        ctx.save_for_forward(output, *theta)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, *theta = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return gradient, None, *(None for _ in theta)
        return None, None, *ctx.pull(value, gradient, *theta)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        value, *theta = (unpack_dual(saved).primal for saved in ctx.saved_tensors)
        theta_tangents = tuple(
            torch.zeros_like(primal) if tangent is None else tangent
            for primal, tangent in zip(theta, tangents[2:], strict=True)
        )
        # torch disables forward mode here; without this the tangents of an outer jvp would be
        # dropped.
        with _set_fwd_grad_enabled(True):
            linear: Any = vjp(lambda u: tuple(ctx.pull(value, u, *theta)), torch.zeros_like(value))
            (value_tangent,) = linear[1](theta_tangents)
        result: Tensor = value_tangent
        return result


class Equation(ABC):
    """An equation F(x, θ) = 0 with one solution x(θ), for tensors θ.

    ``linearize`` is a pure function of its arguments: a tensor that it used without taking it as an
    argument would have no derivative.
    """

    @abstractmethod
    def linearize(self, x: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return F(x, θ), and ∂F/∂x as a tensor that ``solve`` takes.

        Args:
            x: the solution.
            theta: the tensors that the equation depends on.
        """

    @abstractmethod
    def solve(self, derivative: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        """Return (∂F/∂x)⁻¹·right, or (∂F/∂x)⁻ᵀ·right.

        Args:
            derivative: ∂F/∂x, from ``linearize``.
            right: the right-hand side, in the shape of x.
            transposed: whether to solve with the transposed derivative; False by default.
        """


def attach_solution(equation: Equation, x: Tensor, *theta: Tensor) -> Tensor:
    """Return the solution of an equation with its derivatives of all orders in θ.

    By the implicit function theorem, ∂x/∂θ = −(∂F/∂x)⁻¹·∂F/∂θ. A first derivative costs one
    evaluation of F and one linear solve.

    Args:
        equation: F.
        x: the solution, without a graph.
        theta: the tensors that the solution depends on.
    """
    if torch.compiler.is_compiling():  # compilers do not trace torch.func in a backward pass
        for _ in range(NEWTON_STEPS_WITH_GRAPH):
            residual, derivative = equation.linearize(x, *theta)
            x = x - equation.solve(derivative, residual)
        return x

    def pull(value: Tensor, gradient: Tensor, *theta: Tensor) -> tuple[Tensor, ...]:
        linear: Any = vjp(lambda *values: equation.linearize(value, *values), *theta, has_aux=True)
        _, pull_residual, derivative = linear
        gradients: tuple[Tensor, ...] = pull_residual(
            -equation.solve(derivative, gradient, transposed=True)
        )
        return gradients

    first = x
    if torch.is_grad_enabled():
        residual, derivative = equation.linearize(x, *theta)
        # The second term is zero; its derivative is that of x, as long as x and ∂F/∂x are taken as
        # constants.
        first = x - equation.solve(derivative.detach(), residual - residual.detach())
    return with_derivatives(first, pull, *theta)


def refuse_second_derivative(value: Tensor, message: str, *sources: Tensor) -> Tensor:
    """Return a value whose gradient has no derivative in the sources.

    For a value with a right first derivative and a wrong second one that cannot be corrected. First
    derivatives do not change, nor do second ones in other tensors than the sources.

    Args:
        value: the value, with its graph.
        message: of the ``SecondDerivativeError`` that the second derivative raises.
        sources: the tensors.
    """

    def pull(_: Tensor, gradient: Tensor, *theta: Tensor) -> tuple[Tensor, ...]:
        _, *sources = theta
        gradient = gradient + _zero_without_derivative(message, sources)
        return gradient, *(torch.zeros_like(source) for source in sources)

    return with_derivatives(value, pull, value, *sources)


def _zero_without_derivative(message: str, sources: Sequence[Tensor]) -> Tensor:
    """Return a zero whose derivative in any source raises an error."""
    zero: Any = _WithoutDerivative.apply
    zeros = [zero(source, message) for source in sources]
    return torch.stack(zeros).sum()


class _WithoutDerivative(torch.autograd.Function):
    """A zero, whose derivative raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(source: Tensor, message: str) -> Tensor:
        return source.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.message = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        raise SecondDerivativeError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise SecondDerivativeError(ctx.message)
