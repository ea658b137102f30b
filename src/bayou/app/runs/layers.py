"""Builders and layers of the networks of ``nets``.

A builder takes the shape of an input and the number of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.networks import TableLayout, TableNetwork

Shape = tuple[int, ...]
# Nearly linear for small inputs, a ReLU for large ones, and smooth, as second-order methods need.
SMOOTH = "SiLU"


def dense(
    shape: Shape,
    outputs: int,
    hidden: Sequence[int],
    activation: str = "ReLU",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build linear layers on flattened inputs.

    Args:
        shape: of one input.
        outputs: numbers for each row.
        hidden: units of the hidden layers.
        activation: the name of a class of ``torch.nn``.
        dropout: probability of a unit to be dropped after each hidden layer.
    """
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    width = prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, size), getattr(nn, activation)()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def table(shape: Shape, outputs: int, layout: TableLayout, hidden: Sequence[int]) -> TableNetwork:
    """Build the network of a table.

    Args:
        shape: of one input, (columns,).
        outputs: numbers for each row.
        layout: of the columns.
        hidden: units of the hidden layers.
    """
    if shape != (layout.columns,):
        raise ValueError(f"the layout has {layout.columns} columns, but inputs have shape {shape}")
    return TableNetwork(layout, outputs, hidden)


def lenet(
    shape: Shape,
    outputs: int,
    widths: tuple[int, int, int],
    dropout: bool = False,
    moved: bool = False,
) -> nn.Sequential:
    """Build two 5×5 convolutions, each max-pooled by 2, and one hidden dense layer.

    LeCun, Bottou, Bengio & Haffner (1998), *Gradient-based learning applied to document
    recognition*. The convolutions have no padding.

    Args:
        shape: (channels, height, width) of one image.
        outputs: numbers for each row.
        widths: channels of the convolutions, and units of the dense layer.
        dropout: 0.25 after convolutions and 0.5 after the dense layer.
        moved: mirror and shift images in training.
    """
    channels, height, width = shape
    first, second, hidden = widths
    size = second * prod(((side - 4) // 2 - 4) // 2 for side in (height, width))

    def drop(rate: float) -> list[nn.Module]:
        return [nn.Dropout(rate)] if dropout else []

    return nn.Sequential(
        *([FlipAndShift()] if moved else []),
        *(nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2), *drop(0.25)),
        *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), *drop(0.25)),
        *(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), *drop(0.5), nn.Linear(hidden, outputs)),
    )


@final
class FlipAndShift(nn.Module):
    """Images (B, C, H, W) mirrored with probability ½ and shifted, with zeros at the edges.

    The identity in evaluation mode. The ELBO of a network with this layer is that of the augmented
    images.

    Args:
        pixels: the largest shift in each direction.
    """

    def __init__(self, pixels: int = 2) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, x: Tensor) -> Tensor:
        """Return the images, in training each with its own change.

        The noise is drawn as by ``nn.Dropout``, from torch's stream, which training seeds at every
        step.
        """
        if not self.training:
            return x
        count, _, *sides = x.shape
        mirrored = torch.rand(count, 1, 1, 1, device=x.device) < 0.5
        x = F.pad(torch.where(mirrored, x.flip(-1), x), (self.pixels,) * 4)
        for axis, side in zip((2, 3), sides, strict=True):
            start = torch.randint(2 * self.pixels + 1, (count, 1), device=x.device)
            index = start + torch.arange(side, device=x.device)  # (B, side)
            shape = [count, 1, 1, 1]
            shape[axis] = side
            size = list(x.shape)
            size[axis] = side
            x = x.gather(axis, index.reshape(shape).expand(size))
        return x
