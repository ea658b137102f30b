"""The inputs of a network and one batch: arguments, rows, checks and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]  # x: all arguments of a network
Batch = tuple[Any, Tensor]  # x and y of some rows
InputsT = TypeVar("InputsT", Tensor, tuple[Any, ...])
LABELS = ("labels", "label", "y")  # the keys of y in a mapping


class Keywords(tuple[str, ...]):
    """The last item of a tuple of inputs: names of those before it that are keyword arguments."""


def forward_inputs(x: object) -> tuple[Any, ...]:
    """Return the arguments of a network.

    Args:
        x: a tensor, a tuple or list of arguments, or a mapping. A mapping gives its values, tensors
            first, and their ``Keywords``; its labels are left out, unless they are all it has.

    Raises:
        ValueError: for values of a mapping that a network cannot take, such as text.
    """
    if not isinstance(x, Mapping):
        return tuple(x) if isinstance(x, (tuple, list)) else (x,)
    names = [name for name in x if name not in LABELS] or list(x)
    for name in names:
        if not isinstance(x[name], Tensor | bool | int | float | None):
            raise ValueError(
                f"{name!r} of x is a {type(x[name]).__name__}, expected a tensor; use "
                "return_tensors='pt' of a tokenizer, with_format('torch') of a data set or a "
                "collate_fn that pads, and remove columns of text"
            )
    names.sort(key=lambda name: not isinstance(x[name], Tensor))
    return (*(x[name] for name in names), Keywords(names))


def tensors_of(x: object) -> list[Tensor]:
    """Return the tensors among the arguments of a network.

    Args:
        x: a tensor, a tuple or list of arguments, or a mapping.
    """
    return [item for item in forward_inputs(x) if isinstance(item, Tensor)]


def rows_of(inputs: InputsT, index: slice | Tensor) -> InputsT:
    """Return these rows of a tensor, or of all tensors among the arguments of a network.

    Args:
        inputs: a tensor, or a tuple of arguments; those that are no tensors are the same for all
            rows.
        index: a slice, or a tensor of row numbers.
    """
    if isinstance(inputs, Tensor):
        return inputs[index]
    return tuple(item[index] if isinstance(item, Tensor) else item for item in inputs)


def combine_inputs(
    function: Callable[[tuple[Tensor, ...]], Tensor], batches: Iterable[object]
) -> tuple[Any, ...]:
    """Combine the inputs of several batches into those of one.

    Args:
        function: combines tensors: torch.cat or torch.stack.
        batches: the inputs of each batch; those that are no tensors are taken from the first.
    """
    columns = zip(*map(forward_inputs, batches), strict=True)
    return tuple(
        function(column) if isinstance(column[0], Tensor) else column[0] for column in columns
    )


def pair(batch: object) -> Batch:
    """Return a batch as (x, y); the y of a mapping are its labels.

    Raises:
        ValueError: for anything else, with what it is.
    """
    if isinstance(batch, Mapping):
        label = next((name for name in LABELS if name in batch), None)
        if label is None:
            raise ValueError(
                f"a batch with the keys {', '.join(map(str, batch))} has no labels; give them the "
                "key 'labels', or give pairs (x, y)"
            )
        batch = (batch, batch[label])
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        description = type(batch).__name__
        if hasattr(batch, "__len__"):
            description = f"{description} of {len(batch)}"
        raise ValueError(
            "a Dataset or DataLoader must give pairs (x, y) with y a tensor or a number, got a "
            f"{description}; several inputs go into a tuple: ((x1, x2), y), or a dict with 'labels'"
        )
    x, y = batch
    for item in tensors_of(x):
        check_values("x", item)
    check_values("y", y)
    return forward_inputs(x) if isinstance(x, Mapping) else x, y


def inputs_of_batches(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return the inputs of all batches of a DataLoader as one; labels are left out.

    Args:
        loader: gives pairs (x, y), x alone, or mappings, in a fixed order.

    Raises:
        ValueError: for a DataLoader that shuffles, whose rows could not be told apart afterwards,
            for an empty one and for batches whose rows have different shapes.
    """
    if isinstance(loader.sampler, RandomSampler | SubsetRandomSampler):
        raise ValueError(
            "the DataLoader shuffles, so that it is not known which row a prediction belongs to; "
            "use shuffle=False"
        )
    batches = [_inputs_of_batch(batch) for batch in loader]
    if not batches:
        raise ValueError("the DataLoader gives no batch")
    try:
        return combine_inputs(torch.cat, batches)
    except RuntimeError as error:
        raise ValueError(
            f"the batches of the DataLoader have rows of different shapes ({error}); predict one "
            "batch at a time"
        ) from error


def _inputs_of_batch(batch: object) -> tuple[Any, ...]:
    """Return the inputs of a batch with or without labels."""
    if isinstance(batch, Tensor | Mapping):
        return forward_inputs(batch)
    if isinstance(batch, tuple | list) and len(batch) == 1:
        return forward_inputs(batch[0])
    return forward_inputs(pair(batch)[0])


def check_finite(batch: Batch) -> None:
    """Raise a ValueError where x or y has NaN or infinite values."""
    x, y = batch
    for item, name in (*((item, "x") for item in tensors_of(x)), (y, "y")):
        check_values(name, item)
        if item.is_floating_point() and not bool(item.isfinite().all()):
            count = int((~item.isfinite()).sum())
            raise ValueError(
                f"{name} has {count} NaN or infinite values; remove or impute them first"
            )


def check_values(name: str, value: Tensor) -> None:
    """Raise a ValueError for a tensor on the meta device, which has a shape and no values."""
    if value.is_meta:
        raise ValueError(
            f"{name} {tuple(value.shape)} is on the meta device and has no values; build it on a "
            "device: device='cpu'"
        )


def gather_shards(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, whose shards are on several processes.

    Any other tensor is returned as it is.
    """
    if hasattr(value, "full_tensor"):
        full: Tensor = value.full_tensor()
        return full
    return value


def digest(tree: object) -> str:
    """Return the SHA-256 (64 bits) of all tensors in nested tuples, with shapes and dtypes."""
    sha256 = hashlib.sha256()

    def walk(item: object) -> None:
        if isinstance(item, Tensor) and item.is_quantized:
            walk(item.dequantize())
        elif isinstance(item, Tensor):
            sha256.update(f"{tuple(item.shape)}{item.dtype}".encode())
            flat = gather_shards(item).detach().cpu().contiguous().reshape(-1)
            sha256.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(item, tuple | list):
            for child in item:
                walk(child)
        else:
            sha256.update(repr(type(item)).encode())

    walk(tree)
    return sha256.hexdigest()[:16]
