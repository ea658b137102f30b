"""A map over draws, by vmap or by a loop, and attention in a form that supports both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bayou.core.interception import Intercept
from bayou.core.params import shared


class PlainAttention(Intercept):
    """Computes attention in its block by products and a softmax.

    These support second derivatives and vmap. Torch's global settings, which apply to all threads,
    do not change. An active mode also disables the fast path of transformer layers.
    """

    def __init__(self) -> None:
        super().__init__(_compute_attention_plainly)


def _compute_attention_plainly(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call an operation, attention by products and a softmax."""
    if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
        # With weights it uses products.
        outputs, _ = func(*args, **(kwargs | {"need_weights": True}))
        return outputs, None
    if func is F.scaled_dot_product_attention:
        return _attention(*args, **kwargs)
    return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: object,
    **kwargs: object,
) -> Any:
    """Compute ``F.scaled_dot_product_attention`` by its plain kernel.

    A boolean mask becomes an additive one: −∞ for False.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    outputs, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, *args, **kwargs
    )
    return outputs


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of a GPU or of the machine ran out.

    Args:
        error: the error.
    """
    is_of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_of_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


class VmapOrLoop:
    """function(*args) for every index of a leading axis, stacked: by vmap, or by a loop.

    ``vmap`` computes once what depends on no argument with the axis; expanded views (``shared``)
    count as such. ``loop`` becomes true at the first operation without a batching rule; running out
    of memory is an error instead.

    Args:
        function: the function of one index.
        axes: 0 for an argument (a tensor, or a tree of them) that has the axis, None for one that
            all indices share.
        loop: whether to use a loop from the start. Default: False.
    """

    def __init__(
        self, function: Callable[..., Any], axes: tuple[int | None, ...], *, loop: bool = False
    ) -> None:
        self.function = function
        self.axes = axes
        self.loop: bool = loop

    def __call__(self, *args: object) -> Any:
        """Return the stacked values of the function."""
        if not self.loop:
            mapped_args, axes = zip(*map(_without_shared, args, self.axes), strict=True)
            if 0 not in tree_leaves(axes):  # all draws are the same
                mapped_args = args
                axes = self.axes
            mapped = vmap(self.function, axes, randomness="different")
            if torch.compiler.is_compiling():
                return mapped(*mapped_args)
            try:
                with PlainAttention():
                    return mapped(*mapped_args)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                self.loop = True
        return self._loop(*args)

    def _loop(self, *args: object) -> Any:
        """Call the function with one index after the other."""
        columns = [
            _unbind(arg) if axis == 0 else itertools.repeat(arg)
            for arg, axis in zip(args, self.axes, strict=True)
        ]
        calls = list(zip(*columns, strict=False))
        if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            outputs = [self.function(*call) for call in calls]
            return tree_map(lambda *tensors: torch.stack(tensors), *outputs)
        stacked = None
        for i, call in enumerate(calls):
            output = self.function(*call)
            if stacked is None:
                stacked = tree_map(lambda leaf: leaf.new_empty(len(calls), *leaf.shape), output)
            # Copied at once: a list of outputs would fragment the memory by the size of the
            # activations.
            for target, leaf in zip(tree_leaves(stacked), tree_leaves(output), strict=True):
                target[i] = leaf
        return stacked


def _without_shared(arg: object, axis: int | None) -> tuple[Any, Any]:
    """Return an argument and the axes of its tensors; one that all draws share has none."""
    if axis is None:
        return arg, None
    leaves, tree = tree_flatten(arg)
    values = [leaf[0] if shared(leaf) else leaf for leaf in leaves]
    axes = [None if shared(leaf) else 0 for leaf in leaves]
    return tree_unflatten(values, tree), tree_unflatten(axes, tree)


def _unbind(tree: object) -> Iterable[Any]:
    """Return a tree of tensors (S, ...) as S trees; a tree without tensors is repeated."""
    leaves, structure = tree_flatten(tree)
    if not leaves:
        return itertools.repeat(tree)
    slices = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    return [tree_unflatten(tensors, structure) for tensors in slices]
