"""One map over many draws: vmap where it can go, a loop where it cannot, and attention in a form that both can take."""

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


class PlainAttention(TorchFunctionMode):
    """Inside: attention as products and a softmax, which have second derivatives and can be mapped; fused it has not.

    Nothing global is switched, as torch's own switches would be for all threads. That a mode is active keeps the fast
    path of transformer layers off, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            return func(*args, **(kwargs | {"need_weights": True}))[0], None  # to have the weights it makes them
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> Any:
    """``F.scaled_dot_product_attention`` by its plain kernel, to which a mask is what is added: −∞ for False."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *rest, **named)[0]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a GPU or of the machine."""
    said = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


class VmapOrLoop:
    """function(*args) for every index of a leading axis, stacked: by vmap, or one by one where vmap cannot go.

    ``axes``: 0 for an argument (a tensor, or a tree of them) that has the axis, None for one that all share. ``loop``
    turns true at the first operation that has no batching rule; running out of memory is an error and no such reason.
    """

    def __init__(self, function: Callable[..., Any], axes: tuple[int | None, ...], *, loop: bool = False) -> None:
        self.function, self.axes, self.loop = function, axes, loop

    def __call__(self, *args: Any) -> Any:
        if not self.loop:
            mapped = vmap(self.function, self.axes, randomness="different")
            if torch.compiler.is_compiling():
                return mapped(*args)
            try:
                with PlainAttention():
                    return mapped(*args)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                self.loop = True
        pairs = zip(args, self.axes, strict=True)
        calls = list(zip(*(_apart(arg) if axis == 0 else itertools.repeat(arg) for arg, axis in pairs), strict=False))
        if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return tree_map(lambda *parts: torch.stack(parts), *[self.function(*each) for each in calls])
        stacked = None
        for i, each in enumerate(calls):
            out = self.function(*each)
            if stacked is None:
                stacked = tree_map(lambda part: part.new_empty(len(calls), *part.shape), out)
            # Each in its place at once: a list of them would leave holes between them, as large as the activations.
            for whole, part in zip(tree_leaves(stacked), tree_leaves(out), strict=True):
                whole[i] = part
        return stacked


def _apart(tree: Any) -> Iterable[Any]:
    """A tree of tensors (S, ...) as S trees; one without any, over and over."""
    leaves, spec = tree_flatten(tree)
    if not leaves:
        return itertools.repeat(tree)
    return [tree_unflatten(each, spec) for each in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]
