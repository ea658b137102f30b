"""Frozen parameters of which FSDP2 (``fully_shard``) keeps a shard in each process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(value: Tensor) -> bool:
    """Return whether this is a DTensor, of which a process may have only a shard.

    Args:
        value: a parameter or buffer.
    """
    return hasattr(value, "device_mesh")


def reshard(net: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to, with their shards.

    A call of the network leaves some of them gathered.

    Args:
        net: the network.
    """
    # Slow to import, and not needed if nobody did.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules = [module for module in net.modules() if isinstance(module, fsdp.FSDPModule)]
    for module in modules:
        module.reshard()
    return modules


def share_sharded(modules: list[Any], memo: dict[int, Any]) -> None:
    """Add copies of modules to the memo of ``deepcopy``, which ``fully_shard`` forbids for them.

    The hooks of FSDP2 gather the parameters before a call, and again for the backward pass, and put
    them into the module they were made for. The copies keep these hooks and take the parameters
    from there.

    Args:
        modules: those that ``fully_shard`` was applied to.
        memo: the memo, which is changed.
    """
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if getattr(hook, "__self__", None) is module._get_fsdp_state():
                memo[id(hook)] = _bind_hook(module, hook)
        original_class = type(module).__mro__[2]  # before fully_shard
        memo[id(module)] = object.__new__(original_class)
    for module in reversed(modules):  # the inner ones first
        state = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("__composable_api")
        }
        memo[id(module)].__setstate__(copy.deepcopy(state, memo))
        _take_gathered(memo[id(module)], module)


def _bind_hook(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that gets this module, as a function, which copies share."""

    def call(_: nn.Module, *arguments: object) -> Any:
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "the backward pass of fully_shard has no rule for vmap and torch.func"
            )
        return hook(module, *arguments)

    return call


def _take_gathered(module: nn.Module, original: nn.Module) -> None:
    """Give a module the gathered parameters of the original during a call, and else the shards."""
    shards = {
        name: parameter
        for name, parameter in original.named_parameters(remove_duplicate=False)
        if is_sharded(parameter)
    }

    def put(module: nn.Module, is_gathered: bool) -> None:
        for name, shard in shards.items():
            path, _, leaf = name.rpartition(".")
            owner: Any = module.get_submodule(path)
            tensors = owner._parameters if leaf in owner._parameters else owner._buffers
            tensors[leaf] = original.get_parameter(name) if is_gathered else shard

    for name in shards:
        owner = module.get_submodule(name.rpartition(".")[0])
        owner._load_state_dict_post_hooks.clear()  # which act on the shards of the original
    module.register_forward_pre_hook(lambda module, _: put(module, True))
    module.register_forward_hook(lambda module, *_: put(module, False), always_call=True)
