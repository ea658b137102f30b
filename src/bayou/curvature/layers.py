"""Gradients of every example from one backward pass: the input of a layer and the gradient at its
output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from bayou.network import Call
from bayou.params import Params

BLOCKS, BLOCKED = (
    8,
    256,
)  # a symmetric product of this size or more is made of blocks on and above its diagonal


class Layer(ABC):
    """One call of the network, y = layer(x; weight, bias), whose tensors are used nowhere else.

    ``weight`` and ``bias`` are their names, None if there is none or if it is not needed.
    ``rows_axis``: the axis of x that counts the examples. It is 0 also where x has several rows for
    an example, side by side.
    """

    def __init__(
        self, call: Call, weight: str | None, bias: str | None, rows_axis: int = 0
    ) -> None:
        self.weight, self.bias, self.rows_axis = weight, bias, rows_axis
        given = {weight: call.weight, bias: call.bias}
        self.shapes = {
            name: value.shape
            for name, value in given.items()
            if name is not None and value is not None
        }

    @abstractmethod
    def inputs(self, call: Call, rows: int) -> Tensor:
        """The input in the shape that the gradients need: (rows, ...)."""

    @abstractmethod
    def outputs(self, g: Tensor, rows: int) -> Tensor:
        """The gradient at the output of the call in a matching shape: (rows, ...)."""

    @abstractmethod
    def gradients(self, a: Tensor, g: Tensor) -> Params:
        """The gradient of every example, (rows, *shape) for each tensor."""

    def squares(self, a: Tensor, g: Tensor) -> Params:
        """Σ_n (gradient of example n)², (*shape) for each tensor."""
        return {name: value.square().sum(0) for name, value in self.gradients(a, g).items()}

    @abstractmethod
    def numbers(self, call: Call, rows: int) -> int:
        """The numbers in memory per example, in addition to the activations."""


@final
class Affine(Layer):
    """y = W·a + b for patches a of the input: linear layers and convolutions.

    The gradient of an example is Σ_p g_p·a_pᵀ over its positions p (one for a linear layer on
    (rows, D)). Shapes: a (rows, groups, positions, I), g (rows, groups, positions, O).
    """

    def __init__(self, call: Call, *names: Any) -> None:
        super().__init__(call, *names)
        self.linear, self.groups = call.func is F.linear, call.given.get("groups", 1)

    def inputs(self, call: Call, rows: int) -> Tensor:
        x = call.x.detach()
        if self.linear:
            return x.movedim(self.rows_axis, 0).reshape(rows, 1, -1, x.shape[-1])
        seen = windows(x, call)
        size = seen.shape[x.ndim :].numel()
        return _merged(
            seen.reshape(len(x), self.groups, -1, size), rows
        ).mT  # of (·, groups, I, positions)

    def outputs(self, g: Tensor, rows: int) -> Tensor:
        if self.linear:
            return g.movedim(self.rows_axis, 0).reshape(rows, 1, -1, g.shape[-1])
        return _merged(g.reshape(len(g), self.groups, g.shape[1] // self.groups, -1), rows).mT

    def gradients(self, a: Tensor, g: Tensor) -> Params:
        found: Params = {}
        if self.weight is not None:
            found[self.weight] = (g.mT @ a).reshape(len(a), *self.shapes[self.weight])
        if self.bias is not None:
            found[self.bias] = g.sum(2).reshape(len(g), -1)
        return found

    def squares(self, a: Tensor, g: Tensor) -> Params:
        if a.shape[2] > 1:
            return super().squares(a, g)
        found: Params = {}  # with one position (Σ_p g_p·a_pᵀ)² = g²·(a²)ᵀ
        a2, g2 = (part.squeeze(2).movedim(1, 0).square() for part in (a, g))  # (groups, rows, ·)
        if self.weight is not None:
            found[self.weight] = (g2.mT @ a2).reshape(self.shapes[self.weight])
        if self.bias is not None:
            found[self.bias] = g2.sum(1).reshape(-1)
        return found

    def input_factor(self, a: Tensor) -> Tensor:
        """Σ a·aᵀ over examples and positions, a with a last entry 1 for the bias: (groups, I,
        I).
        """
        flat = a.movedim(1, 0).flatten(1, 2)  # (groups, rows·positions, I)
        if self.bias is None:
            return gram(flat)
        total = torch.ones(len(flat), flat.shape[1], 1, dtype=a.dtype, device=a.device)
        if self.weight is None:
            return total.mT @ total
        edge = flat.sum(1, keepdim=True)  # (groups, 1, I)
        corner = total.mT @ total
        return torch.cat((torch.cat((gram(flat), edge.mT), 2), torch.cat((edge, corner), 2)), 1)

    def output_factor(self, g: Tensor) -> Tensor:
        """Σ g·gᵀ over examples and positions: (groups, O, O)."""
        return gram(g.movedim(1, 0).flatten(1, 2))

    def numbers(self, call: Call, rows: int) -> int:
        a = self.inputs(call, rows)
        weights = 0 if self.weight is None or a.shape[2] == 1 else self.shapes[self.weight].numel()
        return weights + (0 if self.linear else a[0].numel())


@final
class Scale(Layer):
    """y = w ⊙ x̂ + b with x̂ normalized: layer, batch (in eval mode), group and RMS norm."""

    def __init__(self, call: Call, *names: Any) -> None:
        super().__init__(call, *names)
        self.axes = (
            len(next(iter(self.shapes.values()))) if call.func in (F.layer_norm, F.rms_norm) else 0
        )

    def inputs(self, call: Call, rows: int) -> Tensor:
        with torch.no_grad():
            plain = call.func(
                **{k: v for k, v in call.given.items() if k not in ("weight", "bias")}
            )
        return self.outputs(plain, rows)

    def outputs(self, g: Tensor, rows: int) -> Tensor:
        """(rows, positions, *shape)."""
        if self.axes:
            return g.reshape(rows, -1, *g.shape[g.ndim - self.axes :])
        return g.reshape(rows, -1, g.shape[1], math.prod(g.shape[2:])).mT.flatten(1, 2)

    def gradients(self, a: Tensor, g: Tensor) -> Params:
        parts = (
            ((self.weight, a * g), (self.bias, g)) if self.weight is not None else ((self.bias, g),)
        )
        return {name: value.sum(1) for name, value in parts if name is not None}

    def numbers(self, call: Call, rows: int) -> int:
        return 2 * call.x.numel() // rows


@final
class Lookup(Layer):
    """y = W[x]: an embedding. The gradient of row v is the sum of g over the positions where x =
    v.
    """

    def __init__(self, call: Call, *names: Any) -> None:
        super().__init__(call, *names)
        self.padding = call.given.get("padding_idx")

    def inputs(self, call: Call, rows: int) -> Tensor:
        return call.x.reshape(rows, -1)

    def outputs(self, g: Tensor, rows: int) -> Tensor:
        return g.reshape(rows, -1, g.shape[-1])

    def _summed(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the rows of W that each example uses, and which they are: (U, D), (U,) of
        n·V + v.
        """
        assert self.weight is not None
        vocabulary = self.shapes[self.weight][0]
        key = a + vocabulary * torch.arange(len(a), device=a.device).unsqueeze(1)
        if self.padding is not None:  # autograd leaves that row out
            keep = a != self.padding % vocabulary
            key, g = key[keep], g[keep]
        key, place = key.flatten().unique(return_inverse=True)
        return g.new_zeros(len(key), g.shape[-1]).index_add_(
            0, place, g.reshape(-1, g.shape[-1])
        ), key

    def gradients(self, a: Tensor, g: Tensor) -> Params:
        assert self.weight is not None
        summed, key = self._summed(a, g)
        found = g.new_zeros(len(a) * self.shapes[self.weight][0], g.shape[-1]).index_copy_(
            0, key, summed
        )
        return {self.weight: found.reshape(len(a), *self.shapes[self.weight])}

    def squares(self, a: Tensor, g: Tensor) -> Params:
        assert self.weight is not None
        summed, key = self._summed(a, g)
        shape = self.shapes[self.weight]
        return {self.weight: g.new_zeros(shape).index_add_(0, key % shape[0], summed.square())}

    def numbers(self, call: Call, rows: int) -> int:
        return 2 * call.x.numel() // rows


NORMS = (F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def layer_of(call: Call, weight: str | None, bias: str | None, axis: int) -> Layer:
    """The layer of a call, for its named tensors."""
    if call.func in NORMS:
        return Scale(call, weight, bias)
    return (
        Lookup(call, weight, bias) if call.func is F.embedding else Affine(call, weight, bias, axis)
    )


def supported(call: Call) -> bool:
    """Whether there is a layer with exact gradients for this call."""
    if call.func is F.embedding:
        return call.given.get("max_norm") is None and not call.given.get("scale_grad_by_freq")
    if call.func in NORMS:
        return not call.given.get("training") and not call.given.get("use_input_stats")
    if call.func is not F.linear and call.func not in CONVOLUTIONS:
        return False
    weight = call.weight
    dims = 2 if call.func is F.linear else 3 + CONVOLUTIONS.index(call.func)
    return (
        weight is not None
        and weight.ndim == dims
        and call.x.ndim >= dims
        and (dims == 2 or call.x.ndim == dims)
    )


def windows(x: Tensor, call: Call) -> Tensor:
    """The part of x (B, C, *size) under the kernel at each position of a convolution: (B, C,
    *kernel, *positions).
    """
    assert call.weight is not None
    kernel = call.weight.shape[2:]
    stride, padding, dilation = [
        per_axis(call.given.get(name, default), len(kernel))
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = [
        (pad, pad)
        if isinstance(pad, int)
        else ((span - 1) // 2, span // 2)
        if pad == "same"
        else (0, 0)
        for pad, span in zip(padding, spans, strict=True)
    ]
    pads = [pad for side in reversed(sides) for pad in side]
    if any(pads):
        x = F.pad(x, pads)
    for axis, span in enumerate(spans):
        x = x.unfold(axis + 2, span, stride[axis])[..., :: dilation[axis]]
    positions = range(2, 2 + len(kernel))
    return x.permute(0, 1, *(axis + len(kernel) for axis in positions), *positions)


def per_axis(value: Any, axes: int) -> list[Any]:
    """A setting of a convolution for every spatial axis."""
    values = [value] if isinstance(value, int | str) else list(value)
    return values * axes if len(values) == 1 else values


def gram(x: Tensor) -> Tensor:
    """Σ_r x_r·x_rᵀ for x (groups, R, I): (groups, I, I); a large one by blocks, using its
    symmetry.
    """
    size = x.shape[-1]
    if size < BLOCKED:
        return x.mT @ x
    step = -(-size // BLOCKS)
    out = x.new_empty(len(x), size, size)
    for first in range(0, size, step):
        last = min(first + step, size)
        out[:, first:last, :last] = x[..., first:last].mT @ x[..., :last]
        out[:, :first, first:last] = out[:, first:last, :first].mT
    return out


def _merged(x: Tensor, rows: int) -> Tensor:
    """(rows·T, groups, C, P) to (rows, groups, C, T·P)."""
    if len(x) == rows:
        return x
    x = x.reshape(rows, -1, *x.shape[1:])
    return x.permute(0, 2, 3, 1, 4).flatten(3)
