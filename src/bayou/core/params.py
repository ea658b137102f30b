"""Named tensors: ``Params``, patterns that select names, and stacks with a leading sample axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]
T = TypeVar("T")


def match(
    names: Iterable[str],
    rules: Mapping[str, T],
    default: T | None = None,
    *,
    frozen: Collection[str] = (),
) -> dict[str, T]:
    """Return the value of the first rule whose pattern matches each name, in the order of names.

    Patterns are shell-style and case-sensitive (``"*.weight"``, ``"conv?.*"``, ``"[!a]*"``); ``*``
    crosses dots.

    Args:
        names: the names to match.
        rules: pattern → value.
        default: the value of names that no pattern matches; None makes them an error.
        frozen: those of the names that need no pattern and get no value. Default: none.

    Raises:
        ValueError: for a pattern that matches no name, and for a name that no pattern matches.

    >>> match(["conv.weight", "fc.weight", "fc.bias"], {"conv.*": 1, "*.weight": 2}, default=0)
    {'conv.weight': 1, 'fc.weight': 2, 'fc.bias': 0}
    """
    names = list(names)
    unused = [pattern for pattern in rules if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise ValueError(f"pattern {_quote(unused)} matches no name; the names are {_quote(names)}")
    matched: dict[str, T] = {}
    names = [name for name in names if name not in frozen]
    for name in names:
        for pattern, value in rules.items():
            if fnmatchcase(name, pattern):
                matched[name] = value
                break
        else:
            if default is not None:
                matched[name] = default
    unmatched = [name for name in names if name not in matched]
    if unmatched:
        raise ValueError(
            f"no pattern covers {_quote(unmatched)}; the patterns are {_quote(rules)}; a last '*' "
            "would cover the rest"
        )
    return matched


def stack(draws: Sequence[Params]) -> Params:
    """Stack S dicts of tensors (*shape) to one dict of tensors (S, *shape).

    Args:
        draws: the dicts, with the same names and shapes.

    Raises:
        ValueError: for different names or shapes, and for no dicts.
    """
    if not draws:
        raise ValueError("cannot stack an empty list of params")
    first = draws[0]
    for index, draw in enumerate(draws):
        if draw.keys() != first.keys():
            differing = sorted(draw.keys() ^ first.keys())
            raise ValueError(
                f"params {index} and params 0 have different names: {_quote(differing)} is only "
                "in one of them"
            )
        for name, tensor in draw.items():
            shape = tuple(tensor.shape)
            expected = tuple(first[name].shape)
            if shape != expected:
                raise ValueError(
                    f"{name!r} has shape {shape} in params {index} but {expected} in params 0"
                )
    return {name: torch.stack([draw[name] for draw in draws]) for name in first}


def shared(value: Tensor) -> bool:
    """Return whether all draws of a stack share this tensor: an expanded view, with stride 0.

    Args:
        value: the tensor, (S, *shape).
    """
    return len(value) > 1 and value.stride(0) == 0


def size(stacked: Params) -> int:
    """Return S, the length of the leading sample axis that all tensors of a stack share.

    Args:
        stacked: tensors (S, *shape) by name.

    Raises:
        ValueError: for no tensors, and for tensors without one common leading axis.
    """
    if not stacked:
        raise ValueError("a stack without tensors has no size")
    scalars = [name for name, tensor in stacked.items() if tensor.ndim == 0]
    if scalars:
        raise ValueError(f"not a stack: {_quote(scalars)} has no sample axis")
    sizes = {name: tensor.shape[0] for name, tensor in stacked.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"not a stack: the leading axes differ: {sizes}")
    return next(iter(sizes.values()))


def flatten(params: Params, sample_dims: int = 0) -> Tensor:
    """Return all tensors as one vector, in the sorted order of their names.

    Args:
        params: tensors (*samples, *shape) by name.
        sample_dims: the number of leading sample axes. Default: 0.

    Returns:
        A tensor (*samples, D).
    """
    if not params:
        raise ValueError("cannot flatten params without tensors")
    vectors = []
    for name in sorted(params):
        shape = params[name].shape
        vectors.append(params[name].reshape((*shape[:sample_dims], shape[sample_dims:].numel())))
    return torch.cat(vectors, dim=sample_dims)


def unflatten(vector: Tensor, like: Params) -> Params:
    """Invert ``flatten``: (*samples, D) becomes tensors (*samples, *shape).

    Args:
        vector: the tensor (*samples, D), whose device the tensors have.
        like: tensors (*shape), whose names, order in the dict, shapes and dtypes the result has.
    """
    counts = {name: like[name].numel() for name in sorted(like)}
    total = sum(counts.values())
    if vector.ndim == 0 or vector.shape[-1] != total:
        raise ValueError(
            f"the params have {total} entries, the vector has shape {tuple(vector.shape)}: "
            f"(..., {total})?"
        )
    vectors = dict(zip(counts, vector.split(list(counts.values()), dim=-1), strict=True))
    sample_shape = vector.shape[:-1]
    return {
        name: vectors[name].reshape((*sample_shape, *tensor.shape)).to(tensor.dtype)
        for name, tensor in like.items()
    }


def under(prefix: str, tensors: Params) -> Params:
    """Return the tensors whose names begin with a prefix, without it.

    Args:
        prefix: the prefix, with its dot.
        tensors: the tensors by name.
    """
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _quote(names: Iterable[str]) -> str:
    """Return names in quotes, separated by commas."""
    return ", ".join(repr(name) for name in names) or "(none)"
