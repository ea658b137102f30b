"""Frozen parameters of which FSDP2 (``fully_shard``) keeps a part in each process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(value: Tensor) -> bool:
    """Whether this is a DTensor, of which a process may have only a part."""
    return hasattr(value, "device_mesh")


def resharded(net: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was applied to, with their parts: a call leaves some of them
    gathered.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and not needed if nobody did
    modules = (
        []
        if fsdp is None
        else [module for module in net.modules() if isinstance(module, fsdp.FSDPModule)]
    )
    for module in modules:
        module.reshard()
    return modules


def share_sharded(modules: list[Any], memo: dict[int, Any]) -> None:
    """Add copies of modules that ``fully_shard`` was applied to, which forbids ``deepcopy``, to its
    memo.

    The hooks of FSDP2 gather the parameters before a call, and again for the backward pass, and put
    them into the module they were made for. The copies keep these hooks and take the parameters
    from there.
    """
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if getattr(hook, "__self__", None) is module._get_fsdp_state():
                memo[id(hook)] = _called_with(module, hook)
        memo[id(module)] = object.__new__(
            type(module).__mro__[2]
        )  # of the class before fully_shard
    for module in reversed(modules):  # the inner ones first
        state = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("__composable_api")
        }
        memo[id(module)].__setstate__(copy.deepcopy(state, memo))
        _take_gathered(memo[id(module)], module)


def _called_with(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook with this module, as a function, which copies share."""

    def call(_: nn.Module, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "the backward pass of fully_shard has no rule for vmap and torch.func"
            )
        return hook(module, *arguments)

    return call


def _take_gathered(module: nn.Module, original: nn.Module) -> None:
    """Give a module the parameters of the original during a call, where they are gathered, and else
    the parts.
    """
    parts = {
        name: p for name, p in original.named_parameters(remove_duplicate=False) if is_sharded(p)
    }

    def put(module: nn.Module, gathered: bool) -> None:
        for name, part in parts.items():
            path, _, leaf = name.rpartition(".")
            own: Any = module.get_submodule(path)
            tensors = own._parameters if leaf in own._parameters else own._buffers
            tensors[leaf] = original.get_parameter(name) if gathered else part

    for name in parts:
        module.get_submodule(
            name.rpartition(".")[0]
        )._load_state_dict_post_hooks.clear()  # on parts of the original
    module.register_forward_pre_hook(lambda module, _: put(module, True))
    module.register_forward_hook(lambda module, *_: put(module, False), always_call=True)
