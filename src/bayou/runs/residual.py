"""A small residual network with batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn


@final
class Residual(nn.Module):
    """x + f(x), f two 3×3 convolutions with batch norm; a 1×1 convolution takes x along where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet(channels: int, widths: Sequence[int], outputs: int) -> nn.Sequential:
    """A 3×3 convolution, a residual block for each width (halving the image from the second on), mean, linear."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    width = widths[0]
    for number, size in enumerate(widths):
        layers.append(Residual(width, size, 1 if number == 0 else 2))
        width = size
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))
