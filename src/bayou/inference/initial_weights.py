"""New initial weights of a network, and a check whether its weights are as they were drawn."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from bayou.core.params import Params

SIGNIFICANT_ERRORS = 4.0  # standard errors of a significant difference
MIN_NUMBERS = 8  # in a tensor for a statement about their distribution


@torch.no_grad()
def reset(net: nn.Module) -> None:
    """Draw new initial weights by ``reset_parameters`` of every module, children before parents.

    Frozen parameters (``requires_grad=False``) are kept. Every other one is set to NaN before, so
    that one which no module resets is detected: a bare ``nn.Parameter``, such as a positional
    embedding. Its new values are its old ones in random order if these look like independent draws;
    a constant or a table with a structure keeps its values.

    Args:
        net: the network, which is changed in place.

    Raises:
        ValueError: if no module resets any parameter, or a parameter that is not bare remains.
    """
    values: Params = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            values[name] = parameter.detach().clone()
            parameter.fill_(math.nan)
    for module in reversed(list(net.modules())):
        _reset_module(module)
    parameters = dict(net.named_parameters())
    stale = [name for name, p in parameters.items() if p.requires_grad and bool(p.isnan().any())]
    not_bare = [name for name in stale if not is_bare(net, name)]
    if not_bare or (stale and len(stale) == len(values)):
        first = (not_bare or stale)[0]
        owner = type(net.get_submodule(first.rpartition(".")[0])).__name__
        raise ValueError(
            f"no reset_parameters() gives {first!r} (of a {owner}) new initial weights; write one, "
            "or pass Ensemble(init=function), which is called with the network and changes it in "
            "place, or init='keep' to start every member at the weights the network has"
        )
    for name in stale:
        value = values[name]
        if look_independent(value):
            order = torch.randperm(value.numel(), device=value.device)
            value = value.flatten()[order].view_as(value)
        net.get_parameter(name).copy_(value)


def _reset_module(module: nn.Module) -> None:
    """Call ``reset_parameters`` of a module, if it has one, and keep its frozen parameters."""
    parameters = list(module.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        return
    reset_parameters = getattr(module, "reset_parameters", None)
    reset_parameters = reset_parameters or getattr(module, "_reset_parameters", None)
    if not callable(reset_parameters):
        return
    frozen = [(p, p.data) for p in parameters if not p.requires_grad]
    for parameter, value in frozen:
        parameter.data = value.clone()  # a frozen tensor is shared, and must not change
    reset_parameters()
    for parameter, value in frozen:
        parameter.data = value


def is_bare(net: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to a module that cannot reset it.

    Those of a parametrization are not bare.

    Args:
        net: has the module.
        name: of the parameter.
    """
    owner = net.get_submodule(name.rpartition(".")[0])
    can_reset = hasattr(owner, "reset_parameters") or hasattr(owner, "_reset_parameters")
    return not can_reset and not isinstance(owner, ParametrizationList)


def look_independent(values: Tensor) -> bool:
    """Return whether the entries of a tensor may be independent draws from one distribution.

    They differ from each other, and the correlation of neighbors along every axis is within
    ``SIGNIFICANT_ERRORS`` standard errors of 0.

    Args:
        values: a tensor of any shape.
    """
    count = values.numel()
    if count < MIN_NUMBERS or values.unique().numel() < count / 2:
        return False
    centered = values.double() - values.double().mean()
    variance = centered.square().mean()
    for axis, size in enumerate(values.shape):
        if size > 1:
            products = centered.narrow(axis, 0, size - 1) * centered.narrow(axis, 1, size - 1)
            correlation = float(products.mean() / variance)
            if abs(correlation) > SIGNIFICANT_ERRORS / math.sqrt(products.numel()):
                return False
    return True


@torch.no_grad()
def check_fresh(net: nn.Module, drawn: nn.Module) -> None:
    """Raise a ValueError if a tensor of a network may be trained: it is not as drawn by a reset.

    Args:
        net: the network of the user.
        drawn: a copy of it after a reset.
    """
    fresh = dict(drawn.named_parameters()) | dict(drawn.named_buffers())
    free = [(name, value) for name, value in net.named_parameters() if value.requires_grad]
    for name, value in (*free, *net.named_buffers()):
        if not have_similar_scale(value.flatten(), fresh[name].flatten()):
            raise ValueError(
                f"{name!r} is not as drawn by reset_parameters(): the network was trained, loaded "
                "or given other initial weights. Choose where the members start: "
                "Ensemble(init='keep') at the current weights, init='reset' at new ones, or "
                "init=function, which changes each member's copy in place"
            )


def have_similar_scale(values: Tensor, drawn: Tensor) -> bool:
    """Return whether two vectors may have the same distribution.

    They may if both are constant and equal, or of the same root mean square.

    Args:
        values: a vector, (M,).
        drawn: a vector of the same size that was drawn from the distribution.
    """
    count = values.numel()
    if count < 2 or torch.equal(values, drawn):
        return True
    if _is_constant(values) or _is_constant(drawn):
        return False
    if count < MIN_NUMBERS:
        return True
    squares = values.double().square()
    drawn_squares = drawn.double().square()
    # The relative variance of a square: 2 if it is that of a Gaussian number.
    variance = float(drawn_squares.square().mean() / drawn_squares.mean().square()) - 1
    error = math.sqrt(2 * max(2.0, variance) / count)
    log_ratio = math.log(float(squares.mean() / drawn_squares.mean()))
    return abs(log_ratio) < SIGNIFICANT_ERRORS * error


def _is_constant(vector: Tensor) -> bool:
    """Return whether all entries of a vector are equal."""
    return bool((vector == vector[0]).all())
