"""Squeeze: blocks of pixels as channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bayou.flows.core.arguments import check_size
from bayou.flows.core.transform import Map, Pair

Shape = tuple[int, int, int]


def image_shape(event: Sequence[int], name: str) -> Shape:
    """Return the shape (C, H, W) of images.

    Args:
        event: the shape that a caller gave.
        name: of the map, for the error.

    Raises:
        ValueError: unless the shape is three positive numbers.
    """
    shape = tuple(event) if isinstance(event, Sequence) else (event,)
    if len(shape) != 3:
        raise ValueError(
            f"{name} takes images (channels, height, width), got {shape}; (1, 28, 28) for grayscale"
        )
    channels, height, width = (check_size(size, f"an image of {name}") for size in shape)
    return channels, height, width


def halve_size(shape: Shape, name: str) -> tuple[int, int]:
    """Return half the height and half the width of images.

    Args:
        shape: (C, H, W).
        name: of the map, for the error.

    Raises:
        ValueError: for an odd height or width.
    """
    _, height, width = shape
    if height % 2 or width % 2:
        raise ValueError(
            f"{name} needs an even height and width, got {height}×{width} of {shape}; pad or crop "
            "the images, or use fewer levels"
        )
    return height // 2, width // 2


def squeeze_blocks(x: Tensor) -> Tensor:
    """Return every 2×2 block of pixels as four channels.

    This is ``pixel_unshuffle``, which fails on an empty batch.

    Args:
        x: images (..., C, H, W).

    Returns:
        Images (..., 4C, H/2, W/2).
    """
    height, width = x.shape[-2:]
    x = x.unflatten(-1, (width // 2, 2)).unflatten(-3, (height // 2, 2))  # (..., C, h, 2, w, 2)
    return x.movedim((-3, -1), (-4, -3)).flatten(-5, -3)


class Squeeze(Map):
    """A map (C, H, W) → (4C, H/2, W/2): each 2×2 block of pixels becomes four channels.

    It permutes the numbers of an image, with term 0 (Dinh et al. 2017, RealNVP).

    Args:
        event: (C, H, W) with even H and W.

    Shapes: x (..., C, H, W), y (..., 4C, H/2, W/2), term (...).
    """

    def __init__(self, event: Sequence[int]) -> None:
        super().__init__()
        shape = image_shape(event, "Squeeze")
        self.event_in: tuple[int, ...] = shape
        self.event_out: tuple[int, ...] = (4 * shape[0], *halve_size(shape, "Squeeze"))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return squeeze_blocks(x), x.new_zeros(x.shape[:-3])

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        blocks = y.unflatten(-3, (y.shape[-3] // 4, 2, 2))  # (..., C, 2, 2, h, w)
        x = blocks.movedim((-4, -3), (-3, -1))  # (..., C, h, 2, w, 2)
        return x.flatten(-2).flatten(-3, -2), y.new_zeros(y.shape[:-3])
