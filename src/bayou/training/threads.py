"""The number of CPU threads for small training steps.

Threads synchronize after every operation. For small operations this costs more than it saves, and
far more if other
programs use the cores: a step of 64-100-100-10 with 128 rows took 4 ms with one thread and 30 to
170 ms with two on two busy cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
SMALL = 2**23  # multiply-adds of the largest product of a step, up to which one thread is used
PRODUCTS = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
}
PRODUCTS |= {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.einsum,
}

_lock, _here = threading.Lock(), threading.local()
_threads, _before = (
    0,
    1,
)  # the number of threads with such runs; the previous number of torch threads


class _Largest(TorchFunctionMode):
    """The multiply-adds of the largest product inside: output entries × terms of each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [item for item in args if isinstance(item, Tensor)]
        if isinstance(out, Tensor):
            sums = (
                tensors[1][0].numel()
                if func in PRODUCTS and len(tensors) > 1 and tensors[1].ndim > 1
                else 1
            )
            self.found = max(self.found, out.numel() * sums)
        return out


def largest_product(call: Callable[[], T]) -> tuple[T, int]:
    """The result of a call, and the multiply-adds of its largest product."""
    with _Largest() as mode:
        out = call()
    return out, mode.found


@contextmanager
def suitable_threads(work: int | None) -> Iterator[None]:
    """Inside, one thread if ``work``, the multiply-adds of the largest product, is small; None
    changes nothing.

    Torch has a setting for each thread, which a new thread inherits: the first run of a thread sets
    it, the last restores the value from before any thread had such a run.
    """
    global _threads, _before
    if work is None or work > SMALL:
        yield
        return
    _here.runs = getattr(_here, "runs", 0) + 1
    if _here.runs == 1:
        with _lock:
            _before = _before if _threads else torch.get_num_threads()
            _threads += 1
            torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.runs -= 1
        if _here.runs == 0:
            with _lock:
                _threads -= 1
                torch.set_num_threads(_before)
