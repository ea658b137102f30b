"""Evaluation of many functions on many rows: eval mode, parts that fit into memory, halves where it
runs out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayou.network.function import DryRun, channels_last
from bayou.network.inputs import clear_errors
from bayou.network.mapping import out_of_memory
from bayou.params import Params
from bayou.training.data import rows_of

Map = Callable[..., Tensor]  # (stack, *inputs) -> (S, B, *out)
ACTIVATIONS = {
    "cpu": 2**22
}  # numbers in the largest tensor that a layer makes, by the type of the device
MIN_CHUNK_ROWS = 128  # rows that are never split

_LOCK = threading.Lock()
_EVALUATING: dict[
    int, tuple[list[tuple[nn.Module, bool]], list[None]]
] = {}  # modes before, and one for each holder


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set all submodules to eval mode, and restore their modes when no thread needs it any more."""
    with _LOCK:
        modes, holders = _EVALUATING.setdefault(
            id(module), ([(m, m.training) for m in module.modules()], [])
        )
        holders.append(None)
        for part, _ in modes:
            part.training = False
    try:
        yield
    finally:
        with _LOCK:
            holders.pop()
            if not holders:
                del _EVALUATING[id(module)]
                for part, mode in modes:
                    part.training = mode


def by_rows(
    function: Map,
    stack: Params,
    inputs: tuple[Any, ...],
    seen: DryRun,
    rows: int | None = None,
    together: int = 1,
) -> Tensor:
    """Outputs of a stack, (S, B, *out), some rows at a time; half the rows or draws if memory runs
    out.

    ``seen``: a dry run with such inputs. ``rows``: at a time, instead of as many as need moderate
    memory with the largest tensors of ``together`` draws.
    """
    count, total = len(next(iter(stack.values()))), len(inputs[0])
    size = rows or _moderate(inputs, together, seen)
    if seen.channels_last:
        inputs = channels_last(inputs)
    outputs, first = torch.empty(0), 0
    while first < max(total, 1):
        some = rows_of(inputs, slice(first, first + size))
        try:
            with clear_errors(inputs):
                part = function(stack, *some)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if size > 1 and seen.rows_apart:
                size = -(-min(size, total) // 2)
                continue
            if count > 1:
                halves = (slice(count // 2), slice(count // 2, None))
                stacks = ({name: value[half] for name, value in stack.items()} for half in halves)
                return torch.cat(
                    [by_rows(function, half, inputs, seen, rows, together) for half in stacks]
                )
            raise torch.OutOfMemoryError(
                f"predict runs out of memory with one function and {len(some[0])} rows of x at a time: {error}"
            ) from error
        if part.ndim < 2 or part.shape[1] != len(some[0]):
            raise ValueError(
                f"the network gives outputs {tuple(part.shape[1:])} for {len(some[0])} rows of x; the first axis "
                "of x must be the rows: x.unsqueeze(0) for one"
            )
        if len(some[0]) == total:
            return part
        if first == 0:
            outputs = part.new_empty(count, total, *part.shape[2:])
        outputs[:, first : first + size] = part
        first += size
    return outputs


def _moderate(inputs: tuple[Any, ...], together: int, seen: DryRun) -> int:
    """The number of rows of x to compute at a time, so that activations need moderate memory."""
    total = len(inputs[0])
    if total <= MIN_CHUNK_ROWS or not seen.rows_apart:
        return max(total, 1)
    most = max(1, ACTIVATIONS.get(inputs[0].device.type, 2**28) // (seen.numbers * together))
    return -(-total // -(-total // most))  # equal parts
