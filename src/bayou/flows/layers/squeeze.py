"""Squeeze: blocks of pixels as channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bayou.flows.core.arguments import positive
from bayou.flows.core.transform import Map

Shape = tuple[int, int, int]


def image_shape(event: Sequence[int], who: str) -> Shape:
    """(C, H, W), or a ValueError."""
    shape = tuple(event) if isinstance(event, Sequence) else (event,)
    if len(shape) != 3:
        raise ValueError(
            f"{who} takes images (channels, height, width), got {shape}; (1, 28, 28) for grayscale"
        )
    channels, height, width = (positive(size, f"an image of {who}") for size in shape)
    return channels, height, width


def halved(shape: Shape, who: str) -> tuple[int, int]:
    """Half the height and width, or a ValueError."""
    if shape[1] % 2 or shape[2] % 2:
        raise ValueError(
            f"{who} needs an even height and width, got {shape[1]}×{shape[2]} of {shape}; pad or crop the images, or "
            "use fewer levels"
        )
    return shape[1] // 2, shape[2] // 2


def squeezed(x: Tensor) -> Tensor:
    """(..., C, H, W) to (..., 4C, H/2, W/2): ``pixel_unshuffle``, which fails on an empty batch."""
    height, width = x.shape[-2:]
    x = x.unflatten(-1, (width // 2, 2)).unflatten(-3, (height // 2, 2))  # (..., C, h, 2, w, 2)
    return x.movedim((-3, -1), (-4, -3)).flatten(-5, -3)


class Squeeze(Map):
    """(C, H, W) → (4C, H/2, W/2): each 2×2 block of pixels becomes four channels; term 0 (Dinh et
    al. 2017, RealNVP).

    Args:
        event: (C, H, W) with even H and W.
    """

    def __init__(self, event: Sequence[int]) -> None:
        super().__init__()
        shape = image_shape(event, "Squeeze")
        self.event_in: tuple[int, ...] = shape
        self.event_out: tuple[int, ...] = (4 * shape[0], *halved(shape, "Squeeze"))

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return squeezed(x), x.new_zeros(x.shape[:-3])

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        x = y.unflatten(-3, (y.shape[-3] // 4, 2, 2)).movedim(
            (-4, -3), (-3, -1)
        )  # (..., C, h, 2, w, 2)
        return x.flatten(-2).flatten(-3, -2), y.new_zeros(y.shape[:-3])
