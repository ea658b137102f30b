"""Gradients of every example, from the input of a layer and the gradient at its output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from bayou.core.params import Params
from bayou.network import Call

MIN_BLOCKED_SIZE = 256  # from which on a symmetric product is computed by blocks
BLOCKS = 8  # of such a product along each side


class LayerCall(ABC):
    """One call of the network, y = layer(x; weight, bias), whose tensors are used nowhere else.

    Args:
        call: the call.
        weight: the name of the weight, None if there is none or if it is not needed.
        bias: the same of the bias.
        rows_axis: the axis of x that counts the examples, 0 by default. It is 0 also where x has
            several rows for an example, side by side.
    """

    def __init__(
        self, call: Call, weight: str | None, bias: str | None, rows_axis: int = 0
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.rows_axis = rows_axis
        tensors = {weight: call.weight, bias: call.bias}
        self.shapes: dict[str, torch.Size] = {
            name: value.shape
            for name, value in tensors.items()
            if name is not None and value is not None
        }

    @abstractmethod
    def inputs(self, call: Call, rows: int) -> Tensor:
        """Return the input in the shape that the gradients need: (rows, ...).

        Args:
            call: has the input.
            rows: the number of examples.
        """

    @abstractmethod
    def outputs(self, g: Tensor, rows: int) -> Tensor:
        """Return the gradient at the output of the call in a matching shape: (rows, ...).

        Args:
            g: the gradient.
            rows: the number of examples.
        """

    @abstractmethod
    def gradients(self, a: Tensor, g: Tensor) -> Params:
        """Return the gradient of every example, (rows, *shape) for each tensor.

        Args:
            a: of ``inputs``.
            g: of ``outputs``.
        """

    def squares(self, a: Tensor, g: Tensor) -> Params:
        """Return Σ_n (gradient of example n)², (*shape) for each tensor.

        Args:
            a: of ``inputs``.
            g: of ``outputs``.
        """
        return {name: value.square().sum(0) for name, value in self.gradients(a, g).items()}

    @abstractmethod
    def numbers(self, call: Call, rows: int) -> int:
        """Return the numbers in memory per example, in addition to the activations.

        Args:
            call: has the input.
            rows: the number of examples.
        """


@final
class AffineCall(LayerCall):
    """A linear layer or a convolution, y = W·a + b for patches a of the input.

    The gradient of an example is Σ_p g_p·a_pᵀ over its positions p (one for a linear layer on
    (rows, D)). Shapes: a (rows, groups, positions, I), g (rows, groups, positions, O).

    Args:
        call: the call.
        names: the other arguments of ``LayerCall``.
    """

    def __init__(self, call: Call, *names: Any) -> None:
        super().__init__(call, *names)
        self.is_linear: bool = call.func is F.linear
        self.groups: int = call.given.get("groups", 1)

    def inputs(self, call: Call, rows: int) -> Tensor:
        """Return the patches, (rows, groups, positions, I)."""
        x = call.x.detach()
        if self.is_linear:
            return x.movedim(self.rows_axis, 0).reshape(rows, 1, -1, x.shape[-1])
        patches = windows(x, call)
        positions = patches.shape[x.ndim :].numel()
        return _merge_positions(patches.reshape(len(x), self.groups, -1, positions), rows).mT

    def outputs(self, g: Tensor, rows: int) -> Tensor:
        """Return the gradient at the output, (rows, groups, positions, O)."""
        if self.is_linear:
            return g.movedim(self.rows_axis, 0).reshape(rows, 1, -1, g.shape[-1])
        by_group = g.reshape(len(g), self.groups, g.shape[1] // self.groups, -1)
        return _merge_positions(by_group, rows).mT

    def gradients(self, a: Tensor, g: Tensor) -> Params:
        """Return the gradient of every example."""
        gradients: Params = {}
        if self.weight is not None:
            gradients[self.weight] = (g.mT @ a).reshape(len(a), *self.shapes[self.weight])
        if self.bias is not None:
            gradients[self.bias] = g.sum(2).reshape(len(g), -1)
        return gradients

    def squares(self, a: Tensor, g: Tensor) -> Params:
        """Return sums of squares; with one position (Σ_p g_p·a_pᵀ)² = g²·(a²)ᵀ."""
        if a.shape[2] > 1:
            return super().squares(a, g)
        squares: Params = {}
        a_squared = a.squeeze(2).movedim(1, 0).square()  # (groups, rows, I)
        g_squared = g.squeeze(2).movedim(1, 0).square()  # (groups, rows, O)
        if self.weight is not None:
            squares[self.weight] = (g_squared.mT @ a_squared).reshape(self.shapes[self.weight])
        if self.bias is not None:
            squares[self.bias] = g_squared.sum(1).reshape(-1)
        return squares

    def input_factor(self, a: Tensor) -> Tensor:
        """Return Σ a·aᵀ over examples and positions: (groups, I, I).

        Args:
            a: of ``inputs``; it has a last entry 1 for the bias.
        """
        rows = a.movedim(1, 0).flatten(1, 2)  # (groups, rows·positions, I)
        if self.bias is None:
            return gram(rows)
        ones = torch.ones(len(rows), rows.shape[1], 1, dtype=a.dtype, device=a.device)
        if self.weight is None:
            return ones.mT @ ones
        edge = rows.sum(1, keepdim=True)  # (groups, 1, I)
        corner = ones.mT @ ones
        return torch.cat((torch.cat((gram(rows), edge.mT), 2), torch.cat((edge, corner), 2)), 1)

    def output_factor(self, g: Tensor) -> Tensor:
        """Return Σ g·gᵀ over examples and positions: (groups, O, O).

        Args:
            g: of ``outputs``.
        """
        return gram(g.movedim(1, 0).flatten(1, 2))

    def numbers(self, call: Call, rows: int) -> int:
        """Return the numbers of a gradient, and of the patches of a convolution."""
        a = self.inputs(call, rows)
        numbers = 0 if self.is_linear else a[0].numel()
        if self.weight is not None and a.shape[2] > 1:
            numbers += self.shapes[self.weight].numel()
        return numbers


@final
class ScaleCall(LayerCall):
    """A layer, batch (in eval mode), group or RMS norm, y = w ⊙ x̂ + b with x̂ normalized.

    Args:
        call: the call.
        names: the other arguments of ``LayerCall``.
    """

    def __init__(self, call: Call, *names: Any) -> None:
        super().__init__(call, *names)
        self.axes: int = 0  # last axes of the output that the scale has
        if call.func in (F.layer_norm, F.rms_norm):
            self.axes = len(next(iter(self.shapes.values())))

    def inputs(self, call: Call, rows: int) -> Tensor:
        """Return x̂, (rows, positions, *shape)."""
        arguments = {k: v for k, v in call.given.items() if k not in ("weight", "bias")}
        with torch.no_grad():
            normalized = call.func(**arguments)
        return self.outputs(normalized, rows)

    def outputs(self, g: Tensor, rows: int) -> Tensor:
        """Return the gradient at the output, (rows, positions, *shape)."""
        if self.axes:
            return g.reshape(rows, -1, *g.shape[g.ndim - self.axes :])
        return g.reshape(rows, -1, g.shape[1], math.prod(g.shape[2:])).mT.flatten(1, 2)

    def gradients(self, a: Tensor, g: Tensor) -> Params:
        """Return the gradient of every example."""
        gradients: Params = {}
        if self.weight is not None:
            gradients[self.weight] = (a * g).sum(1)
        if self.bias is not None:
            gradients[self.bias] = g.sum(1)
        return gradients

    def numbers(self, call: Call, rows: int) -> int:
        """Return the numbers of x̂ and of a gradient."""
        return 2 * call.x.numel() // rows


@final
class LookupCall(LayerCall):
    """An embedding, y = W[x].

    The gradient of row v is the sum of g over the positions where x = v.

    Args:
        call: the call.
        names: the other arguments of ``LayerCall``.
    """

    table: str

    def __init__(self, call: Call, *names: Any) -> None:
        super().__init__(call, *names)
        self.padding: int | None = call.given.get("padding_idx")
        (self.table,) = self.shapes  # the name of W

    def inputs(self, call: Call, rows: int) -> Tensor:
        """Return the indices, (rows, positions)."""
        return call.x.reshape(rows, -1)

    def outputs(self, g: Tensor, rows: int) -> Tensor:
        """Return the gradient at the output, (rows, positions, D)."""
        return g.reshape(rows, -1, g.shape[-1])

    def _sum_by_row(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of the rows of W that each example uses, and which they are.

        (U, D), and (U,) numbers n·V + v of row v in example n.
        """
        vocabulary = self.shapes[self.table][0]
        index = a + vocabulary * torch.arange(len(a), device=a.device).unsqueeze(1)
        if self.padding is not None:  # autograd leaves that row out
            is_token = a != self.padding % vocabulary
            index = index[is_token]
            g = g[is_token]
        index, position = index.flatten().unique(return_inverse=True)
        sums = g.new_zeros(len(index), g.shape[-1])
        return sums.index_add_(0, position, g.reshape(-1, g.shape[-1])), index

    def gradients(self, a: Tensor, g: Tensor) -> Params:
        """Return the gradient of every example."""
        shape = self.shapes[self.table]
        sums, index = self._sum_by_row(a, g)
        gradient = g.new_zeros(len(a) * shape[0], g.shape[-1]).index_copy_(0, index, sums)
        return {self.table: gradient.reshape(len(a), *shape)}

    def squares(self, a: Tensor, g: Tensor) -> Params:
        """Return sums of squares, without the gradient of every example."""
        shape = self.shapes[self.table]
        sums, index = self._sum_by_row(a, g)
        return {self.table: g.new_zeros(shape).index_add_(0, index % shape[0], sums.square())}

    def numbers(self, call: Call, rows: int) -> int:
        """Return the numbers of the sums and their indices, at most."""
        return 2 * call.x.numel() // rows


NORMS = (F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def layer_of(call: Call, weight: str | None, bias: str | None, axis: int) -> LayerCall:
    """Return the layer of a call, for its named tensors.

    Args:
        call: a supported one.
        weight: the name of the weight.
        bias: the name of the bias.
        axis: of the input, which counts the examples.
    """
    if call.func in NORMS:
        return ScaleCall(call, weight, bias)
    if call.func is F.embedding:
        return LookupCall(call, weight, bias)
    return AffineCall(call, weight, bias, axis)


def is_supported(call: Call) -> bool:
    """Return whether there is a layer with exact gradients for a call.

    Args:
        call: of a function of torch.
    """
    if call.func is F.embedding:
        return call.given.get("max_norm") is None and not call.given.get("scale_grad_by_freq")
    if call.func in NORMS:
        return not call.given.get("training") and not call.given.get("use_input_stats")
    if call.func is not F.linear and call.func not in CONVOLUTIONS:
        return False
    weight = call.weight
    dims = 2 if call.func is F.linear else 3 + CONVOLUTIONS.index(call.func)
    if weight is None or weight.ndim != dims:
        return False
    return call.x.ndim >= dims if dims == 2 else call.x.ndim == dims


def windows(x: Tensor, call: Call) -> Tensor:
    """Return the part of x under the kernel at each position of a convolution.

    Args:
        x: (B, C, *size).
        call: the convolution.

    Returns:
        (B, C, *kernel, *positions).
    """
    kernel = call.given["weight"].shape[2:]
    stride = per_axis(call.given.get("stride", 1), len(kernel))
    padding = per_axis(call.given.get("padding", 0), len(kernel))
    dilation = per_axis(call.given.get("dilation", 1), len(kernel))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = [_padding_sides(pad, span) for pad, span in zip(padding, spans, strict=True)]
    pads = [pad for side in reversed(sides) for pad in side]
    if any(pads):
        x = F.pad(x, pads)
    for axis, span in enumerate(spans):
        x = x.unfold(axis + 2, span, stride[axis])[..., :: dilation[axis]]
    positions = range(2, 2 + len(kernel))
    return x.permute(0, 1, *(axis + len(kernel) for axis in positions), *positions)


def _padding_sides(padding: int | str, span: int) -> tuple[int, int]:
    """Return the padding before and after an axis."""
    if isinstance(padding, int):
        return padding, padding
    if padding == "same":
        return (span - 1) // 2, span // 2
    return 0, 0


def per_axis(value: Any, axes: int) -> list[Any]:
    """Return a setting of a convolution for every spatial axis.

    Args:
        value: one for all axes, or one for each.
        axes: their number.
    """
    values = [value] if isinstance(value, int | str) else list(value)
    return values * axes if len(values) == 1 else values


def gram(x: Tensor) -> Tensor:
    """Return Σ_r x_r·x_rᵀ, (groups, I, I); a large one by blocks, using its symmetry.

    Args:
        x: (groups, R, I).
    """
    size = x.shape[-1]
    if size < MIN_BLOCKED_SIZE:
        return x.mT @ x
    step = -(-size // BLOCKS)
    product = x.new_empty(len(x), size, size)
    for first in range(0, size, step):
        last = min(first + step, size)
        product[:, first:last, :last] = x[..., first:last].mT @ x[..., :last]
        product[:, :first, first:last] = product[:, first:last, :first].mT
    return product


def _merge_positions(x: Tensor, rows: int) -> Tensor:
    """Return (rows·T, groups, C, P) as (rows, groups, C, T·P)."""
    if len(x) == rows:
        return x
    x = x.reshape(rows, -1, *x.shape[1:])
    return x.permute(0, 2, 3, 1, 4).flatten(3)
