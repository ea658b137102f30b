"""A map over draws, by vmap or by a loop, and attention in a form that supports both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bayou.params import shared


class PlainAttention(TorchFunctionMode):
    """Inside, attention is computed by products and a softmax, which support second derivatives and
    vmap.

    It does not change torch's global settings, which apply to all threads. An active mode also
    disables the fast path of transformer layers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            return func(*args, **(kwargs | {"need_weights": True}))[
                0
            ], None  # with weights it uses products
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """``F.scaled_dot_product_attention`` by its plain kernel, with a boolean mask as an additive
    one: −∞ for False.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, *rest, **named
    )[0]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of a GPU or of the machine ran out."""
    said = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


class VmapOrLoop:
    """function(*args) for every index of a leading axis, stacked: by vmap, or by a loop.

    ``axes``: 0 for an argument (a tensor, or a tree of them) that has the axis, None for one that
    all share. ``loop`` becomes true at the first operation without a batching rule; running out of
    memory is an error instead. ``vmap`` computes once what depends on no argument with the axis;
    expanded views (``shared``) count as such.
    """

    def __init__(
        self, function: Callable[..., Any], axes: tuple[int | None, ...], *, loop: bool = False
    ) -> None:
        self.function, self.axes, self.loop = function, axes, loop

    def __call__(self, *args: Any) -> Any:
        if not self.loop:
            given, axes = zip(*map(_without_shared, args, self.axes), strict=True)
            if 0 not in tree_leaves(axes):  # all draws are the same
                given, axes = args, self.axes
            mapped = vmap(self.function, axes, randomness="different")
            if torch.compiler.is_compiling():
                return mapped(*given)
            try:
                with PlainAttention():
                    return mapped(*given)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                self.loop = True
        pairs = zip(args, self.axes, strict=True)
        calls = list(
            zip(
                *(_apart(arg) if axis == 0 else itertools.repeat(arg) for arg, axis in pairs),
                strict=False,
            )
        )
        if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return tree_map(
                lambda *parts: torch.stack(parts), *[self.function(*each) for each in calls]
            )
        stacked = None
        for i, each in enumerate(calls):
            out = self.function(*each)
            if stacked is None:
                stacked = tree_map(lambda part: part.new_empty(len(calls), *part.shape), out)
            # Copied at once: a list of outputs would fragment the memory by the size of the
            # activations.
            for whole, part in zip(tree_leaves(stacked), tree_leaves(out), strict=True):
                whole[i] = part
        return stacked


def _without_shared(arg: Any, axis: int | None) -> tuple[Any, Any]:
    """An argument and the axes of its tensors; one that all draws share has none."""
    if axis is None:
        return arg, None
    leaves, spec = tree_flatten(arg)
    own = [value[0] if shared(value) else value for value in leaves]
    return tree_unflatten(own, spec), tree_unflatten(
        [None if shared(value) else 0 for value in leaves], spec
    )


def _apart(tree: Any) -> Iterable[Any]:
    """A tree of tensors (S, ...) as S trees; a tree without tensors is repeated."""
    leaves, spec = tree_flatten(tree)
    if not leaves:
        return itertools.repeat(tree)
    return [
        tree_unflatten(each, spec)
        for each in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    ]
