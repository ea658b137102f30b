"""The linearization of a network in its weights: products with its Jacobian and its transpose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import jvp, vjp

from bayou.core.params import Params
from bayou.curvature.sweep import QUIET, keep_activations
from bayou.network import PlainAttention, VmapOrLoop, out_of_memory


def tangent(call: Callable[[Params], Tensor], at: Params, v: Params) -> tuple[Tensor, Tensor]:
    """Return f and J·v of a function of named tensors.

    If an operation has no forward mode, J·v takes two backward passes.

    Args:
        call: the function.
        at: its argument, where it is linearized.
        v: tensors of the same shapes.
    """
    try:
        with QUIET, PlainAttention():
            values: tuple[Tensor, Tensor] = jvp(call, (at,), (v,))  # type: ignore[assignment]
        return values
    except RuntimeError as error:
        if out_of_memory(error):
            raise
    f, push = _linear_map_by_transforms(call, at)
    return f, push(v)


def linear_map(
    call: Callable[[Params], Tensor], at: Params
) -> tuple[Tensor, Callable[[Params], Tensor]]:
    """Return f and v → J·v of a function of named tensors, for many v.

    u → Jᵀ·u is linear, and J is the transpose of its derivative: two backward passes through one
    graph. It is a graph of ``torch.autograd`` where that is possible, since ``torch.func.vjp``
    imports the compiler of torch, which takes as long as ``import torch``.

    Args:
        call: the function.
        at: its argument, where it is linearized.

    Returns:
        f and the map, without gradients.
    """
    try:
        return _linear_map_by_autograd(call, at)
    except RuntimeError as error:  # such as a checkpoint, or a block of inference_mode
        if out_of_memory(error):
            raise
    return _linear_map_by_transforms(call, at)


def _linear_map_by_autograd(
    call: Callable[[Params], Tensor], at: Params
) -> tuple[Tensor, Callable[[Params], Tensor]]:
    """Return f and v → J·v by a graph of ``torch.autograd``, or raise a RuntimeError.

    Every gradient is that of a scalar product, ∇_w ⟨f, u⟩ and ∇_u ⟨Jᵀ·u, v⟩: ``grad_outputs`` would
    import sympy.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    # A checkpoint would compute parts of the network again when it no longer has these tensors.
    without_checkpoints = disable_saved_tensors_hooks("a linearized network needs its whole graph")
    with torch.enable_grad():
        with PlainAttention(), without_checkpoints:
            f = call(leaves)
        u = torch.zeros_like(f, requires_grad=True)
        gradient = torch.autograd.grad(
            (f * u).sum(), list(leaves.values()), create_graph=True, allow_unused=True
        )
    reached = {
        name: value for name, value in zip(leaves, gradient, strict=True) if value is not None
    }

    def push(v: Params) -> Tensor:
        """Return J·v; a tensor that f does not depend on adds nothing."""
        with torch.enable_grad():
            products = [(value * v[name]).sum() for name, value in reached.items()]
            total = torch.stack(products).sum()
        (slope,) = torch.autograd.grad(total, u, retain_graph=True, materialize_grads=True)
        return slope

    return f.detach(), push


def _linear_map_by_transforms(
    call: Callable[[Params], Tensor], at: Params
) -> tuple[Tensor, Callable[[Params], Tensor]]:
    """Return f and v → J·v by ``torch.func``."""
    f, pull = linearize(call, at)
    _, push = linearize(lambda u: pull(u)[0], torch.zeros_like(f))
    return f.detach(), lambda v: push(v)[0].detach()


def linearize(call: Callable[[Any], Any], at: Any) -> tuple[Any, Callable[[Any], tuple[Any]]]:
    """Return the value of a function, and u → (Jᵀ·u,), as ``torch.func.vjp``.

    Args:
        call: a function of a tensor or of named tensors.
        at: its argument, where it is linearized.
    """
    try:
        with PlainAttention():
            values: tuple[Any, Any] = vjp(call, at)  # type: ignore[assignment]
        return values
    except RuntimeError as error:
        if out_of_memory(error) or isinstance(at, Tensor):
            raise
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    # torch.func does not support checkpointing
    with torch.enable_grad(), PlainAttention(), keep_activations(second_order=True):
        f = call(leaves)
    gradient = partial(
        torch.autograd.grad, f, list(leaves.values()), create_graph=True, materialize_grads=True
    )
    return f.detach(), lambda u: (dict(zip(leaves, gradient(u), strict=True)),)


def row_jacobians(
    call: Callable[[Params, tuple[Any, ...]], Tensor], at: Params, inputs: tuple[Any, ...]
) -> tuple[Tensor, Params]:
    """Return the outputs of every row, and their Jacobians in named tensors.

    Args:
        call: the outputs (B, *out) as a function of the tensors and of the inputs.
        at: the tensors, where the function is linearized.
        inputs: of B rows; items that are no tensors are the same for all.

    Returns:
        f (B, *out), and J by name, (B, K, *shape) for K outputs of a row.
    """
    positions = [index for index, item in enumerate(inputs) if isinstance(item, Tensor)]

    def jacobian_of_row(*row: Tensor) -> tuple[Tensor, Params]:
        batches = {i: item.unsqueeze(0) for i, item in zip(positions, row, strict=True)}
        row_inputs = tuple((dict(enumerate(inputs)) | batches).values())
        f, pull = linearize(lambda params: call(params, row_inputs).squeeze(0), at)
        eye = torch.eye(f.numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape)
        return f, VmapOrLoop(lambda u: pull(u)[0], (0,))(eye)

    tensors = [inputs[index] for index in positions]
    values: tuple[Tensor, Params] = VmapOrLoop(jacobian_of_row, (0,) * len(tensors))(*tensors)
    return values
