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
    """The value of the first rule whose pattern matches each name, in the order of ``names``.

    Patterns are shell-style and case-sensitive (``"*.weight"``, ``"conv?.*"``, ``"[!a]*"``); ``*``
    crosses dots. A pattern that matches no name is an error, and so is a name that no pattern
    matches, unless a ``default`` is given. Those of the names that are ``frozen`` need no pattern
    and get no value.

    >>> match(["conv.weight", "fc.weight", "fc.bias"], {"conv.*": 1, "*.weight": 2}, default=0)
    {'conv.weight': 1, 'fc.weight': 2, 'fc.bias': 0}
    """
    names = list(names)
    idle = [pattern for pattern in rules if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        raise ValueError(f"pattern {_listed(idle)} matches no name; the names are {_listed(names)}")
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
    bare = [name for name in names if name not in matched]
    if bare:
        raise ValueError(
            f"no pattern covers {_listed(bare)}; the patterns are {_listed(rules)}; a last '*' would cover the rest"
        )
    return matched


def stack(draws: Sequence[Params]) -> Params:
    """S dicts of tensors (*shape) as one dict of tensors (S, *shape)."""
    if not draws:
        raise ValueError("cannot stack an empty list of params")
    first = draws[0]
    for index, draw in enumerate(draws):
        if draw.keys() != first.keys():
            odd = sorted(draw.keys() ^ first.keys())
            raise ValueError(
                f"params {index} and params 0 have different names: {_listed(odd)} is only in one of them"
            )
        for name, tensor in draw.items():
            got, expected = tuple(tensor.shape), tuple(first[name].shape)
            if got != expected:
                raise ValueError(
                    f"{name!r} has shape {got} in params {index} but {expected} in params 0"
                )
    return {name: torch.stack([draw[name] for draw in draws]) for name in first}


def shared(value: Tensor) -> bool:
    """Whether all draws of a stack share this tensor: an expanded view, with stride 0."""
    return len(value) > 1 and value.stride(0) == 0


def size(stacked: Params) -> int:
    """S, the length of the leading sample axis that all tensors of a stack share."""
    if not stacked:
        raise ValueError("a stack without tensors has no size")
    scalars = [name for name, tensor in stacked.items() if tensor.ndim == 0]
    if scalars:
        raise ValueError(f"not a stack: {_listed(scalars)} has no sample axis")
    sizes = {name: tensor.shape[0] for name, tensor in stacked.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"not a stack: the leading axes differ: {sizes}")
    return next(iter(sizes.values()))


def flatten(params: Params, sample_dims: int = 0) -> Tensor:
    """All tensors as one vector, in the sorted order of their names.

    Tensors (*samples, *shape) with ``sample_dims`` leading sample axes become one tensor (*samples,
    D).
    """
    if not params:
        raise ValueError("cannot flatten params without tensors")
    parts = []
    for name in sorted(params):
        shape = params[name].shape
        parts.append(params[name].reshape((*shape[:sample_dims], shape[sample_dims:].numel())))
    return torch.cat(parts, dim=sample_dims)


def unflatten(vector: Tensor, like: Params) -> Params:
    """The inverse of ``flatten``: (*samples, D) becomes tensors (*samples, *shape).

    Names, their order in the dict, shapes (without sample axes) and dtypes follow ``like``; the
    device is the vector's.
    """
    counts = {name: like[name].numel() for name in sorted(like)}
    total = sum(counts.values())
    if vector.ndim == 0 or vector.shape[-1] != total:
        raise ValueError(
            f"the params have {total} entries, the vector has shape {tuple(vector.shape)}: (..., {total})?"
        )
    parts = dict(zip(counts, vector.split(list(counts.values()), dim=-1), strict=True))
    return {
        name: parts[name].reshape((*vector.shape[:-1], *tensor.shape)).to(tensor.dtype)
        for name, tensor in like.items()
    }


def under(prefix: str, tensors: Params) -> Params:
    """The tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "(none)"
