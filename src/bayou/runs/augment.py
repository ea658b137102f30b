"""Images moved at random while a network trains."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class FlipAndShift(nn.Module):
    """Each image (B, C, H, W) mirrored with probability ½ and shifted by up to ``pixels``, zeros filling in.

    Nothing happens in evaluation mode. The bound of a network that begins with it is one for images so moved.
    """

    def __init__(self, pixels: int = 2) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        count, _, *sides = x.shape  # drawn as nn.Dropout draws: from torch's stream, which training seeds every step
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
