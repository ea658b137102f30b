"""The number of CPU threads for small training steps.

Threads synchronize after every operation. For small operations this costs more than it saves, and
far more if other programs use the cores: a step of 64-100-100-10 with 128 rows took 4 ms with one
thread and 30 to 170 ms with two on two busy cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bayou.core.interception import Intercept

Result = TypeVar("Result")
SMALL = 2**23  # multiply-adds of the largest product of a step, up to which one thread is used
PRODUCTS = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.einsum,
}

_lock = threading.Lock()
_this_thread = threading.local()
_threads_with_runs = 0  # the number of threads with runs on one torch thread
_threads_before = 1  # the number of torch threads before the first of these runs


def _terms(func: Callable[..., Any], args: Sequence[Any]) -> int:
    """Return the number of terms of each sum of an operation."""
    tensors = [item for item in args if isinstance(item, Tensor)]
    if func in PRODUCTS and len(tensors) > 1 and tensors[1].ndim > 1:
        return tensors[1][0].numel()
    return 1


def largest_product(call: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of a call, and the multiply-adds of its largest product.

    These are the entries of the output × the terms of each of them.

    Args:
        call: a function without arguments.
    """
    largest = 0

    def measure(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal largest
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            largest = max(largest, out.numel() * _terms(func, args))
        return out

    with Intercept(measure):
        result = call()
    return result, largest


@contextmanager
def suitable_threads(work: int | None) -> Iterator[None]:
    """Use one torch thread in the block if its products are small.

    Torch has a setting for each thread, which a new thread inherits: the first run of a thread sets
    it, the last restores the value from before any thread had such a run.

    Args:
        work: the multiply-adds of the largest product; None changes nothing.
    """
    global _threads_with_runs, _threads_before
    if work is None or work > SMALL:
        yield
        return
    _this_thread.runs = getattr(_this_thread, "runs", 0) + 1
    if _this_thread.runs == 1:
        with _lock:
            if not _threads_with_runs:
                _threads_before = torch.get_num_threads()
            _threads_with_runs += 1
            torch.set_num_threads(1)
    try:
        yield
    finally:
        _this_thread.runs -= 1
        if _this_thread.runs == 0:
            with _lock:
                _threads_with_runs -= 1
                torch.set_num_threads(_threads_before)
