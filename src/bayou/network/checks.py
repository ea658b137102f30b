"""A check that a module is a network that bayou can work with."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from bayou.network.sharded import is_sharded, reshard


def check_network(net: object) -> None:
    """Raise a ValueError unless this is a module with parameters that are real, dense and filled.

    Args:
        net: the network; modules that ``fully_shard`` was applied to are resharded.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"net must be an nn.Module, got {type(net).__name__}; pass the network itself: Net(...)"
        )
    class_name = type(net).__name__
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError(
            f"{class_name} is compiled by torch.jit and cannot be given other weights; pass the "
            "module it is of"
        )
    if any(_is_exported(module) for module in net.modules()):
        raise ValueError(
            f"{class_name} is a program of torch.export, whose graph is fixed: it has no training "
            "mode and takes only as many rows as it was exported with; pass the module that was "
            "exported"
        )
    if next(net.parameters(), None) is None:
        raise ValueError(
            f"{class_name} has no parameters, so there is nothing to learn; give it a layer that "
            "has some"
        )
    reshard(net)
    for name, parameter in net.named_parameters():
        _check_parameter(name, parameter, class_name)
    for name, buffer in net.named_buffers():
        _check_has_values(name, buffer, class_name)


def _is_exported(module: nn.Module) -> bool:
    """Return whether a module is ``ExportedProgram.module()``, which replaces its ``train``."""
    return isinstance(module, fx.GraphModule) and "train" in vars(module)


def _check_parameter(name: str, parameter: nn.Parameter, class_name: str) -> None:
    """Raise a ValueError unless a parameter has values and is real, dense and, if free, whole."""
    if is_lazy(parameter):
        raise ValueError(
            f"{name!r} of {class_name} is lazy and has no shape yet; call the network once on a "
            "batch: net(x)"
        )
    if is_sharded(parameter) and parameter.requires_grad:
        raise ValueError(
            f"{name!r} of {class_name} is sharded (fully_shard); freeze it, or add it to "
            "ignored_params"
        )
    _check_has_values(name, parameter, class_name)
    if parameter.is_complex():
        raise ValueError(
            f"{name!r} of {class_name} is {parameter.dtype}; parameters must be real and dense "
            "tensors: keep its real and imaginary parts as two"
        )
    if parameter.layout != torch.strided:
        raise ValueError(
            f"{name!r} of {class_name} is {parameter.layout}; parameters must be real and dense "
            "tensors: use to_dense()"
        )


def _check_has_values(name: str, value: Tensor, class_name: str) -> None:
    """Raise a ValueError for a parameter or buffer on the meta device."""
    if value.is_meta:
        raise ValueError(
            f"{name!r} of {class_name} is on the meta device and has no values; use "
            "net.to_empty(device='cpu') and load_state_dict, or build the network on a device"
        )
