"""Copies of a network's modules that share its values, or have placeholders for them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core.params import Params
from bayou.network.inputs import adapt
from bayou.network.sharded import reshard, share_sharded


def is_constant(buffer: Tensor) -> bool:
    """Return whether a buffer is a mask or a quantized weight.

    These are bools, and integers below 64 bits, which count nothing.

    Args:
        buffer: a buffer of a network.
    """
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.int64)


def shared_copy(
    net: nn.Module, free: Collection[str] | None = None, *, clone: bool = False
) -> nn.Module:
    """Return a copy of the modules of a network that shares the values of its parameters.

    Constants are shared, too; other buffers, which may be running statistics, are copied.

    Args:
        net: the network; it is not changed.
        free: the names of the parameters that require gradients in the copy, by default those that
            do in ``net``.
        clone: copy the free parameters; only frozen ones are shared.
    """
    sharded = reshard(net)
    memo: dict[int, Any] = {
        id(value): value.detach() for value in net.buffers() if is_constant(value)
    }
    for name, value in net.named_parameters():
        is_free = value.requires_grad if free is None else name in free
        is_of_other_library = type(value) is not nn.Parameter  # which has attributes of its own
        if is_of_other_library and not is_free:
            memo[id(value)] = value
        elif not (is_free and clone):
            memo[id(value)] = nn.Parameter(value.detach(), is_free)
    share_sharded(sharded, memo)
    return copy.deepcopy(net, memo)


def skeleton(net: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Return a copy of a network with empty placeholders for its free parameters.

    Frozen parameters become buffers that share their values. Neither they nor constants are in its
    ``state_dict``.

    Args:
        net: the network; it is not changed.

    Returns:
        The copy, and the tied names: alias → name.
    """
    net = adapt(shared_copy(net))
    names = {
        id(parameter): name for name, parameter in net.named_parameters() if parameter.requires_grad
    }
    aliases = {
        alias: names[id(parameter)]
        for alias, parameter in net.named_parameters(remove_duplicate=False)
        if names.get(id(parameter), alias) != alias
    }
    for module in net.modules():
        _replace_parameters(module)
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None and is_constant(buffer):
                module.register_buffer(leaf, buffer, persistent=False)
        if isinstance(module, nn.RNNBase):
            release_weights(module)
    return net, aliases


def _replace_parameters(module: nn.Module) -> None:
    """Replace the parameters of a module by buffers, which are empty for free parameters."""
    for leaf, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        del module._parameters[leaf]
        value: Tensor = parameter
        if type(parameter) is nn.Parameter:
            value = parameter.detach()
        if parameter.requires_grad:
            value = value.new_empty(0)
        module.register_buffer(leaf, value, persistent=False)


def release_weights(rnn: nn.RNNBase) -> None:
    """Release the weights of the last call, which a recurrent layer keeps with their graph.

    Args:
        rnn: the recurrent layer, which is changed.
    """
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    rnn._flat_weight_refs = [
        None if weight is None else weakref.ref(weight) for weight in rnn._flat_weights
    ]


class Shell:
    """A copy of the modules of a skeleton in eval mode that one caller fills and empties.

    It has the same tensors. A call is that of ``functional_call`` without the name lookups of every
    call, on private modules.

    Args:
        net: the skeleton.
        aliases: the tied names: alias → name.
    """

    def __init__(self, net: nn.Module, aliases: dict[str, str]) -> None:
        tensors = [
            value
            for module in net.modules()
            for value in (*vars(module).values(), *module._buffers.values())
            if isinstance(value, Tensor)
        ]
        self.net: nn.Module = copy.deepcopy(net, {id(value): value for value in tensors}).eval()
        module_pairs = zip(self.net.modules(), net.modules(), strict=True)
        self.buffer_pairs: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = [
            (mine._buffers, original._buffers)
            for mine, original in module_pairs
            if original._buffers
        ]
        # The dicts of buffers, and the keys in them, that hold the tensor of a name.
        self.slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for prefix, module in self.net.named_modules(remove_duplicate=False):
            for leaf in module._buffers:
                name = f"{prefix}.{leaf}" if prefix else leaf
                self.slots.setdefault(aliases.get(name, name), []).append((module._buffers, leaf))
        self.recurrent: list[nn.RNNBase] = [
            module for module in self.net.modules() if isinstance(module, nn.RNNBase)
        ]

    def fill(self, params: Params) -> None:
        """Set these tensors, and the current buffers of the network.

        Args:
            params: the tensors by name.
        """
        for mine, original in self.buffer_pairs:
            mine.update(original)
        for name, value in params.items():
            for buffers, leaf in self.slots[name]:
                buffers[leaf] = value

    def empty(self) -> None:
        """Release the tensors."""
        for mine, original in self.buffer_pairs:
            mine.update(original)
        for rnn in self.recurrent:
            release_weights(rnn)
