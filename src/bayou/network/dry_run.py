"""A dry run of a network on two and on three rows: its memory, and whether rows interact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bayou.core import rng
from bayou.core.interception import Intercept
from bayou.network.mapping import PlainAttention
from bayou.training.inputs import rows_of

ROUNDING = 1e4  # relative difference of equal tensors, in units of the machine precision


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run in eval mode.

    Args:
        numbers: the size of the largest tensor per input row. Default: 1.
        rows_apart: whether rows do not interact, as they do in a batch norm without running
            statistics. Default: True.
        random: whether the network draws random numbers. Default: False.
        channels_last: whether it supports images in this memory format, up to three times as fast
            on a CPU. Default: False.
        writes: whether it changes its input in place. Default: False.
    """

    numbers: int = 1
    rows_apart: bool = True
    random: bool = False
    channels_last: bool = False
    writes: bool = False


class SizeRecorder(Intercept):
    """Notes how large the tensors are that operations make."""

    def __init__(self) -> None:
        super().__init__(self._record)
        self.sizes: list[int] = []
        self.drawn_size: int = 0  # the total size of those that depend on a draw, inside vmap

    def _record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and note the sizes of its outputs."""
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.sizes += [tensor.numel() for tensor in tensors]
        self.drawn_size += sum(
            tensor.numel() for tensor in tensors if torch._C._functorch.is_batchedtensor(tensor)
        )
        return out


@torch.no_grad()
def run_dry(call: Callable[..., Tensor], inputs: tuple[Any, ...], has_images: bool) -> DryRun:
    """Call a network with two rows and with three.

    The sizes that grow from one to the other are those of activations; the rest are weights.

    Args:
        call: the network in eval mode.
        inputs: its arguments.
        has_images: whether the network has convolutions of images.
    """
    device = inputs[0].device
    sizes: list[list[int]] = []
    outputs: list[Tensor] = []
    with rng.isolated(0, device):
        states_before = rng.states(device)
        for row_count in (2, 3):
            rows = sample_rows(inputs, row_count)
            versions = _versions(rows)
            with SizeRecorder() as recorder, PlainAttention():  # which shows its weights
                outputs.append(call(*rows))
            sizes.append(recorder.sizes)
        writes = versions != _versions(rows)
        is_random = not all(map(torch.equal, states_before, rng.states(device)))
    may_be_faster = has_images and device.type == "cpu" and not is_random
    is_unknown = is_random or not bool(outputs[0].isfinite().all())
    return DryRun(
        numbers=max([1, *_growth(*sizes)]),
        rows_apart=is_unknown or close(outputs[0], outputs[1][:2]),
        random=is_random,
        channels_last=may_be_faster and _takes_channels_last(call, rows, outputs[1]),
        writes=writes,
    )


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    """Return the version counters of the inputs, which grow when they are written to."""
    return [item._version for item in inputs if isinstance(item, Tensor)]


def _growth(two_rows: list[int], three_rows: list[int]) -> list[int]:
    """Return by how much the sizes of tensors grow with one more row."""
    if len(two_rows) == len(three_rows):
        return [larger - size for size, larger in zip(two_rows, three_rows, strict=True)]
    return [sum(three_rows) - sum(two_rows)]


def _takes_channels_last(
    call: Callable[..., Tensor], inputs: tuple[Any, ...], outputs: Tensor
) -> bool:
    """Return whether the outputs are the same in channels-last memory format.

    A ``view`` raises an error there.
    """
    try:
        return close(call(*channels_last(inputs)), outputs)
    except RuntimeError:
        return False


def channels_last(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs with images (B, C, H, W) in the order of memory B, H, W, C.

    Args:
        inputs: the arguments of a network.
    """
    return tuple(map(_image_channels_last, inputs))


def _image_channels_last(item: object) -> object:
    if not isinstance(item, Tensor) or item.ndim != 4:
        return item
    # A copy has the strides of this format where C = 1, too.
    return torch.empty_like(item, memory_format=torch.channels_last).copy_(item)


def input_format(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shapes of one row and the dtypes of the inputs.

    Args:
        inputs: the arguments of a network.
    """
    return tuple(
        (item.shape[1:], item.dtype) if isinstance(item, Tensor) else repr(item) for item in inputs
    )


def sample_rows(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return copies of the first row, the last and the middle one: the first ``count`` of these.

    Args:
        inputs: the arguments of a network.
        count: the number of rows, at most three.
    """
    numbers = [0, -1, len(inputs[0]) // 2]
    return rows_of(inputs, torch.tensor(numbers[:count], device=inputs[0].device))


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding.

    Args:
        a: a tensor.
        b: another one of its shape.
    """
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not a.numel():
        return True
    return bool((a - b).abs().max() <= ROUNDING * torch.finfo(a.dtype).eps * a.abs().max())
