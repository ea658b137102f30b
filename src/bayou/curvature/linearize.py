"""The linearization of a network in its weights: products with its Jacobian and with the
transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

from bayou.curvature.sweep import QUIET, Kept
from bayou.network import PlainAttention, out_of_memory
from bayou.params import Params


def tangent(call: Callable[[Params], Tensor], at: Params, v: Params) -> tuple[Tensor, Tensor]:
    """f and J·v of a function of named tensors; if an operation has no forward mode, by two
    backward passes.
    """
    try:
        with QUIET, PlainAttention():
            found: tuple[Tensor, Tensor] = jvp(call, (at,), (v,))  # type: ignore[assignment]
        return found
    except RuntimeError as error:
        if out_of_memory(error):
            raise
    f, pull = linearized(call, at)
    _, push = linearized(
        lambda u: pull(u)[0], torch.zeros_like(f)
    )  # u → Jᵀ·u is linear: its transpose is J
    return f.detach(), push(v)[0].detach()


def linearized(call: Callable[[Any], Any], at: Any) -> tuple[Any, Callable[[Any], tuple[Any]]]:
    """``torch.func.vjp`` without an auxiliary output: the value, and u → (Jᵀ·u,)."""
    try:
        with PlainAttention():
            found: tuple[Any, Any] = vjp(call, at)  # type: ignore[assignment]
        return found
    except RuntimeError as error:
        if out_of_memory(error) or isinstance(at, Tensor):
            raise
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    with (
        torch.enable_grad(),
        PlainAttention(),
        Kept(second_order=True),
    ):  # torch.func does not support checkpointing
        f = call(leaves)
    gradient = partial(
        torch.autograd.grad, f, list(leaves.values()), create_graph=True, materialize_grads=True
    )
    return f.detach(), lambda u: (dict(zip(leaves, gradient(u), strict=True)),)
