"""Inputs and outputs of a network: arguments checked before the call and described in its errors;
one output tensor.
"""

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
from bayou.training.data import Keywords, check_values, forward_inputs, inputs_of_batches

Select = str | int | Callable[[Any], Any] | None
DEFAULT_OUTPUT = "logits"  # some networks return these alone in eval mode
N = TypeVar("N", bound=nn.Module)


@final
@dataclass(frozen=True)
class Output:
    """A forward hook: the tensor among the outputs of a network that the likelihood takes.

    ``select``: the name or the index of an output, or a function of all; by default ``logits``,
    where there are any.
    """

    select: Select = None

    def __call__(self, net: nn.Module, inputs: Any, out: Any) -> Any:
        key = DEFAULT_OUTPUT if self.select is None else self.select
        if callable(key):
            return key(out)
        if isinstance(out, Tensor):
            if key not in (DEFAULT_OUTPUT, 0):
                raise ValueError(
                    f"output={key!r} selects one of several outputs, but {type(net).__name__} returns one tensor "
                    f"{tuple(out.shape)}; leave output= out, or give a function of this tensor"
                )
            return out
        try:
            return (
                out[key] if isinstance(out, Mapping) or isinstance(key, int) else getattr(out, key)
            )
        except (LookupError, AttributeError, TypeError):
            return out  # check_tensor says what there is


def _by_keyword(net: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A forward pre-hook: inputs that end with ``Keywords`` as arguments and keyword arguments."""
    if not inputs or not isinstance(inputs[-1], Keywords):
        return None
    *given, names = inputs
    first = len(given) - len(names)
    return tuple(given[:first]), named | dict(zip(names, given[first:], strict=True))


def adapted(net: N) -> N:
    """The network, which is changed: it takes ``*forward_inputs(x)`` and gives the tensor for the
    likelihood.

    Its embeddings have dense gradients.
    """
    if _by_keyword not in net._forward_pre_hooks.values():
        net.register_forward_pre_hook(_by_keyword, with_kwargs=True)
    if not any(isinstance(hook, Output) for hook in net._forward_hooks.values()):
        net.register_forward_hook(Output())
    for module in net.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = (
                False  # a prior has a gradient at every row, and draws of weights take dense ones
            )
    return net


def called(net: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The output that ``adapted(net)`` gives, without a change of the network."""
    args, named = _by_keyword(net, inputs, {}) or (inputs, {})
    return Output()(net, args, net(*args, **named))


def output_of(net: nn.Module) -> Select:
    """The output that was selected; None for the default."""
    return next(
        (hook.select for hook in net._forward_hooks.values() if isinstance(hook, Output)), None
    )


def check_tensor(out: Any) -> None:
    """A ValueError unless a network gave one tensor."""
    if not isinstance(out, Tensor):
        names = f" of {', '.join(map(str, out))}" if isinstance(out, Mapping) else ""
        raise ValueError(
            f"the network must return one tensor, got {type(out).__name__}{names}; select the one for the likelihood "
            "by output= of bayou.fit, its name, its index (output=0) or a function of all"
        )


def selecting(net: N, select: Select) -> N:
    """The network with this output, for all that is made of it: the same tensors and modules, other
    hooks.
    """
    if select is None:
        return net
    if isinstance(select, bool) or not (isinstance(select, str | int) or callable(select)):
        raise ValueError(
            f"output must be a name, an index or a function of the outputs, got {select!r}"
        )
    net = copy.copy(net)
    others = {key: hook for key, hook in net._forward_hooks.items() if not isinstance(hook, Output)}
    net._forward_hooks = OrderedDict(others)
    net.register_forward_hook(Output(select))
    return net


@contextmanager
def clear_errors(x: Any) -> Iterator[None]:
    """Errors of the network about its inputs, as a ValueError that shows the inputs."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        inputs = ", ".join(
            f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
            if isinstance(item, Tensor)
            else f"named {', '.join(item)}"
            if isinstance(item, Keywords)
            else type(item).__name__
            for item in forward_inputs(x)
        )
        if "derivative for" in str(error):
            raise ValueError(
                f"the network has an operation without the derivatives that this method needs: {error}; freeze the "
                "layers below it (requires_grad_(False)) or select others by where=, or use a method without "
                "curvature, such as VI()"
            ) from error
        whole = any(
            isinstance(item, Tensor) and not item.is_floating_point() for item in forward_inputs(x)
        )
        way = "; if x has numbers rather than indices, use x.float()" if whole else ""
        raise ValueError(f"the network cannot take x = {inputs}: {error}{way}") from error


def check_dtype(x: Any, like: Tensor) -> None:
    """A ValueError if the inputs have another floating-point type than the parameters."""
    for item in forward_inputs(x):
        if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != like.dtype:
            raise ValueError(
                f"x is {item.dtype} but the network is {like.dtype}; use x.to({like.dtype})"
            )


def placed(x: Any, like: Tensor) -> tuple[Any, ...]:
    """The inputs on the device of the parameter ``like``; a ValueError unless they are finite rows
    of its dtype.

    Those of a DataLoader are the rows of all its batches.
    """
    inputs = inputs_of_batches(x) if isinstance(x, DataLoader) else forward_inputs(x)
    if not inputs or not isinstance(inputs[0], Tensor) or inputs[0].ndim == 0:
        what = type(inputs[0]).__name__ if inputs else "an empty tuple"
        way = "torch.as_tensor(x, dtype=torch.float32)"
        if isinstance(x, Dataset):
            way = "DataLoader(x, batch_size=256), whose labels are left out"
        elif (
            inputs and isinstance(x, list | tuple) and isinstance(inputs[0], list | tuple | Mapping)
        ):
            what = f"a {type(x).__name__} of batches or rows"
            way = "the inputs alone, torch.cat([x for x, y in batches])"
        raise ValueError(
            f"x must be a tensor whose first axis is the rows, or a tuple or dict of them, got {what}; use {way}"
        )
    check_dtype(inputs, like)
    for item in inputs:
        if isinstance(item, Tensor):
            if item.ndim == 0 or len(item) != len(inputs[0]):
                raise ValueError(
                    f"the inputs have {[tuple(i.shape) for i in inputs]}: they need the same rows"
                )
            check_values("x", item)
            if item.is_floating_point() and not bool(item.isfinite().all()):
                raise ValueError("x has NaN or infinite values; remove or impute them first")
    return tuple(item.to(like.device) if isinstance(item, Tensor) else item for item in inputs)
