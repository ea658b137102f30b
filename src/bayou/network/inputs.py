"""Inputs and outputs of a network: its arguments, their checks, and the output that is used."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bayou.network.mapping import out_of_memory
from bayou.training.inputs import Keywords, check_values, forward_inputs, inputs_of_batches

Select = str | int | Callable[[Any], Any] | None
DEFAULT_OUTPUT = "logits"  # some networks return these alone in eval mode
NetworkType = TypeVar("NetworkType", bound=nn.Module)


@final
@dataclass(frozen=True)
class Output:
    """A forward hook that returns the output of a network that the likelihood takes.

    Args:
        select: the name or the index of an output, or a function of all; by default ``logits``,
            where there are any.
    """

    select: Select = None

    def __call__(self, net: nn.Module, inputs: object, out: Any) -> Any:
        key = DEFAULT_OUTPUT if self.select is None else self.select
        if callable(key):
            return key(out)
        if isinstance(out, Tensor):
            if key not in (DEFAULT_OUTPUT, 0):
                raise ValueError(
                    f"output={key!r} selects one of several outputs, but {type(net).__name__} "
                    f"returns one tensor {tuple(out.shape)}; leave output= out, or give a function "
                    "of this tensor"
                )
            return out
        try:
            if isinstance(out, Mapping) or isinstance(key, int):
                return out[key]
            return getattr(out, key)
        except (LookupError, AttributeError, TypeError):
            return out  # check_tensor says what there is


def _by_keyword(
    net: nn.Module, inputs: tuple[Any, ...], keyword_arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return inputs that end with ``Keywords`` as arguments and keyword arguments.

    This is a forward pre-hook; None leaves other inputs as they are.
    """
    if not inputs or not isinstance(inputs[-1], Keywords):
        return None
    *values, names = inputs
    first = len(values) - len(names)
    return tuple(values[:first]), keyword_arguments | dict(zip(names, values[first:], strict=True))


def adapt(net: NetworkType) -> NetworkType:
    """Make a network take ``*forward_inputs(x)`` and give the tensor for the likelihood.

    Its embeddings get dense gradients: a prior has a gradient at every row, and draws of weights
    take dense ones.

    Args:
        net: the network, which is changed.

    Returns:
        The same network.
    """
    if _by_keyword not in net._forward_pre_hooks.values():
        net.register_forward_pre_hook(_by_keyword, with_kwargs=True)
    if not any(isinstance(hook, Output) for hook in net._forward_hooks.values()):
        net.register_forward_hook(Output())
    for module in net.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return net


def call_network(net: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the output that ``adapt(net)`` gives, without a change of the network.

    Args:
        net: the network.
        inputs: its arguments, which may end with ``Keywords``.
    """
    arguments, keyword_arguments = _by_keyword(net, inputs, {}) or (inputs, {})
    return Output()(net, arguments, net(*arguments, **keyword_arguments))


def output_of(net: nn.Module) -> Select:
    """Return the output that was selected; None for the default.

    Args:
        net: the network.
    """
    hooks = net._forward_hooks.values()
    return next((hook.select for hook in hooks if isinstance(hook, Output)), None)


def check_tensor(out: object) -> None:
    """Raise a ValueError unless a network gave one tensor.

    Args:
        out: the output of the network.
    """
    if not isinstance(out, Tensor):
        names = f" of {', '.join(map(str, out))}" if isinstance(out, Mapping) else ""
        raise ValueError(
            f"the network must return one tensor, got {type(out).__name__}{names}; select the one "
            "for the likelihood by output= of bayou.fit, its name, its index (output=0) or a "
            "function of all"
        )


def with_output(net: NetworkType, select: Select) -> NetworkType:
    """Return a network with a selected output: the same tensors and modules, other hooks.

    Args:
        net: the network; it is not changed.
        select: the name or the index of an output, or a function of all; None returns the network.
    """
    if select is None:
        return net
    if isinstance(select, bool) or not (isinstance(select, str | int) or callable(select)):
        raise ValueError(
            f"output must be a name, an index or a function of the outputs, got {select!r}"
        )
    net = copy.copy(net)
    hooks = net._forward_hooks.items()
    net._forward_hooks = OrderedDict(
        {key: hook for key, hook in hooks if not isinstance(hook, Output)}
    )
    net.register_forward_hook(Output(select))
    return net


@contextmanager
def clear_errors(x: object) -> Iterator[None]:
    """Turn errors of the network about its inputs into a ValueError that shows the inputs.

    Args:
        x: the inputs.
    """
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        inputs = forward_inputs(x)
        if "derivative for" in str(error):
            raise ValueError(
                "the network has an operation without the derivatives that this method needs: "
                f"{error}; freeze the layers below it (requires_grad_(False)) or select others by "
                "where=, or use a method without curvature, such as VI()"
            ) from error
        has_integers = any(
            isinstance(item, Tensor) and not item.is_floating_point() for item in inputs
        )
        advice = "; if x has numbers rather than indices, use x.float()" if has_integers else ""
        description = ", ".join(map(_describe_input, inputs))
        raise ValueError(f"the network cannot take x = {description}: {error}{advice}") from error


def _describe_input(item: object) -> str:
    """Return the dtype and shape of an input, or what else it is."""
    if isinstance(item, Tensor):
        return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
    if isinstance(item, Keywords):
        return f"named {', '.join(item)}"
    return type(item).__name__


def check_dtype(x: object, like: Tensor) -> None:
    """Raise a ValueError if the inputs have another floating-point type than the parameters.

    Args:
        x: the inputs.
        like: a parameter.
    """
    for item in forward_inputs(x):
        if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != like.dtype:
            raise ValueError(
                f"x is {item.dtype} but the network is {like.dtype}; use x.to({like.dtype})"
            )


def place_inputs(x: object, like: Tensor) -> tuple[Any, ...]:
    """Return the inputs on the device of a parameter.

    Args:
        x: a tensor, or a tuple or dict of them; a DataLoader stands for the rows of all its
            batches.
        like: the parameter.

    Raises:
        ValueError: unless they are finite rows of the dtype of the parameter.
    """
    inputs = inputs_of_batches(x) if isinstance(x, DataLoader) else forward_inputs(x)
    _check_has_rows(x, inputs)
    check_dtype(inputs, like)
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    for item in tensors:
        if item.ndim == 0 or len(item) != len(inputs[0]):
            shapes = [tuple(i.shape) for i in inputs]
            raise ValueError(f"the inputs have {shapes}: they need the same rows")
        check_values("x", item)
        if item.is_floating_point() and not bool(item.isfinite().all()):
            raise ValueError("x has NaN or infinite values; remove or impute them first")
    return tuple(item.to(like.device) if isinstance(item, Tensor) else item for item in inputs)


def _check_has_rows(x: object, inputs: tuple[Any, ...]) -> None:
    """Raise a ValueError unless the first input is a tensor with rows."""
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim > 0:
        return
    description = type(inputs[0]).__name__ if inputs else "an empty tuple"
    advice = "torch.as_tensor(x, dtype=torch.float32)"
    if isinstance(x, Dataset):
        advice = "DataLoader(x, batch_size=256), whose labels are left out"
    elif isinstance(x, list | tuple) and inputs and isinstance(inputs[0], list | tuple | Mapping):
        description = f"a {type(x).__name__} of batches or rows"
        advice = "the inputs alone, torch.cat([x for x, y in batches])"
    raise ValueError(
        "x must be a tensor whose first axis is the rows, or a tuple or dict of them, got "
        f"{description}; use {advice}"
    )
