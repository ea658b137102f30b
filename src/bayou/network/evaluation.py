"""Evaluation of many functions on many rows, in chunks that fit into memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core.params import Params
from bayou.network.dry_run import DryRun, channels_last
from bayou.network.inputs import clear_errors
from bayou.network.mapping import out_of_memory
from bayou.training.inputs import rows_of

Map = Callable[..., Tensor]  # (stack, *inputs) -> (S, B, *out)
# Numbers in the largest tensor that a layer makes, by the type of the device.
ACTIVATIONS = {"cpu": 2**22}
DEFAULT_ACTIVATIONS = 2**28
MIN_CHUNK_ROWS = 128  # rows that are never split


@dataclass
class _Evaluation:
    """The modes of the modules of a network before it was set to eval mode, and who needs that."""

    modes: list[tuple[nn.Module, bool]]
    holders: int = field(default=0)


_LOCK = threading.Lock()
_EVALUATIONS: dict[int, _Evaluation] = {}  # by the id of the network


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set all submodules to eval mode in the block.

    Their modes are restored when no thread needs it any more.

    Args:
        module: the network.
    """
    with _LOCK:
        if id(module) not in _EVALUATIONS:
            modes = [(submodule, submodule.training) for submodule in module.modules()]
            _EVALUATIONS[id(module)] = _Evaluation(modes)
        evaluation = _EVALUATIONS[id(module)]
        evaluation.holders += 1
        for submodule, _ in evaluation.modes:
            submodule.training = False
    try:
        yield
    finally:
        with _LOCK:
            evaluation.holders -= 1
            if not evaluation.holders:
                del _EVALUATIONS[id(module)]
                for submodule, mode in evaluation.modes:
                    submodule.training = mode


def by_rows(
    function: Map,
    stack: Params,
    inputs: tuple[Any, ...],
    dry_run: DryRun,
    rows: int | None = None,
    together: int = 1,
) -> Tensor:
    """Return the outputs of a stack of functions, (S, B, *out), computed for some rows at a time.

    Half the rows are taken, or half the draws, if memory runs out.

    Args:
        function: maps a stack of tensors and inputs to outputs.
        stack: the tensors of S functions.
        inputs: the arguments of the network, for B rows.
        dry_run: the result of a dry run with such inputs.
        rows: the number of rows at a time; None: as many as need moderate memory.
        together: the number of draws that are computed at the same time. Default: 1.

    Raises:
        ValueError: if the outputs have another number of rows.
        torch.OutOfMemoryError: if one function on the smallest number of rows needs too much.
    """
    draw_count = len(next(iter(stack.values())))
    row_count = len(inputs[0])
    chunk = rows or _moderate_rows(inputs, together, dry_run)
    if dry_run.channels_last:
        inputs = channels_last(inputs)
    outputs = torch.empty(0)
    first = 0
    while first < max(row_count, 1):
        chunk_inputs = rows_of(inputs, slice(first, first + chunk))
        chunk_rows = len(chunk_inputs[0])
        try:
            with clear_errors(inputs):
                chunk_outputs = function(stack, *chunk_inputs)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if chunk > 1 and dry_run.rows_apart:
                chunk = -(-min(chunk, row_count) // 2)
                continue
            if draw_count > 1:
                halves = _halves(stack, draw_count)
                return torch.cat(
                    [by_rows(function, half, inputs, dry_run, rows, together) for half in halves]
                )
            raise torch.OutOfMemoryError(
                f"predict runs out of memory with one function and {chunk_rows} rows of x at a "
                f"time: {error}"
            ) from error
        if chunk_outputs.ndim < 2 or chunk_outputs.shape[1] != chunk_rows:
            raise ValueError(
                f"the network gives outputs {tuple(chunk_outputs.shape[1:])} for {chunk_rows} rows "
                "of x; the first axis of x must be the rows: x.unsqueeze(0) for one"
            )
        if chunk_rows == row_count:
            return chunk_outputs
        if first == 0:
            outputs = chunk_outputs.new_empty(draw_count, row_count, *chunk_outputs.shape[2:])
        outputs[:, first : first + chunk] = chunk_outputs
        first += chunk
    return outputs


def _halves(stack: Params, draw_count: int) -> list[Params]:
    """Split a stack into two of half the draws."""
    middle = draw_count // 2
    return [
        {name: value[half] for name, value in stack.items()}
        for half in (slice(middle), slice(middle, None))
    ]


def _moderate_rows(inputs: tuple[Any, ...], together: int, dry_run: DryRun) -> int:
    """Return the number of rows to compute at a time, so that activations need moderate memory."""
    row_count = len(inputs[0])
    if row_count <= MIN_CHUNK_ROWS or not dry_run.rows_apart:
        return max(row_count, 1)
    max_numbers = ACTIVATIONS.get(inputs[0].device.type, DEFAULT_ACTIVATIONS)
    max_rows = max(1, max_numbers // (dry_run.numbers * together))
    chunk_count = -(-row_count // max_rows)
    return -(-row_count // chunk_count)  # chunks of equal size
