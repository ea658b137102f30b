"""More inputs for a student, made from those that there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayou.core import rng


@final
@dataclass(frozen=True)
class Augment:
    """Copies of the inputs, changed at random, for which a student asks its teacher too.

    A teacher is more certain of the rows that it was fitted to than of new ones, so a student of
    these rows alone does not learn where its teacher doubts. The teacher labels the copies, so
    that they may be far from the data. Each copy is mixed, then flipped, then shifted, then gets
    noise, by the settings that are not zero; its random numbers are a function of the seed.

    Args:
        copies: the number of copies of each row; 4 by default.
        noise: the standard deviation of normal noise, in the units of x; 0 by default.
        mixup: whether a copy is λ·x + (1 − λ)·x' with another row x' and λ ~ U(0, 1); True by
            default.
        shift: the largest shift in pixels, of images (B, C, H, W), whose edges are repeated; 0 by
            default.
        flip: whether half of the images are mirrored left to right; False by default.

    Raises:
        ValueError: for numbers that are not valid.

    References:
        Beyer, Zhai, Royer, Markeeva, Anil, Kolesnikov: Knowledge distillation: a good teacher is
        patient and consistent, CVPR 2022. Zhang et al.: mixup, ICLR 2018.
    """

    copies: int = 4
    noise: float = 0.0
    mixup: bool = True
    shift: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.copies < 1 or self.noise < 0 or self.shift < 0:
            raise ValueError(
                "Augment needs at least one copy, and a noise and a shift of at least 0, got "
                f"copies={self.copies}, noise={self.noise}, shift={self.shift}"
            )
        if not (self.noise or self.mixup or self.shift or self.flip):
            raise ValueError("Augment would repeat all rows unchanged; set noise, mixup or shift")

    @torch.no_grad()
    def inputs(self, x: Tensor, seed: int = 0) -> Tensor:
        """Return the rows and, behind them, their copies.

        Args:
            x: inputs (B, ...).
            seed: of the random numbers.

        Returns:
            Inputs ((1 + copies)·B, ...), the first B of which are x.

        Raises:
            ValueError: for inputs that are not one tensor of floating-point numbers, and for
                shifts and flips of anything but images (B, C, H, W).
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"Augment takes one tensor of floating-point inputs, got {kind}")
        if (self.shift or self.flip) and x.ndim != 4:
            raise ValueError(
                f"shift and flip are for images (B, C, H, W), got inputs {tuple(x.shape)}"
            )
        copies = [self._copy(x, rng.fold(seed, "copy", number)) for number in range(self.copies)]
        return torch.cat([x, *copies])

    def _copy(self, x: Tensor, seed: rng.Seed) -> Tensor:
        """Return one changed copy of every row."""
        rows = len(x)
        if self.mixup:
            others = rng.permutation(rows, rng.fold(seed, "others")).to(x.device)
            share = rng.uniform(rows, (1,) * (x.ndim - 1), x, rng.fold(seed, "share"))
            x = share * x + (1 - share) * x[others]
        if self.flip:
            is_flipped = rng.uniform(rows, (1, 1, 1), x, rng.fold(seed, "flip")) < 0.5
            x = torch.where(is_flipped, x.flip(-1), x)
        if self.shift:
            x = _shifted(x, self.shift, rng.fold(seed, "shift"))
        if self.noise:
            x = x + self.noise * rng.normal(rows, x.shape[1:], x, rng.fold(seed, "noise"))
        return x


def _shifted(x: Tensor, largest: int, seed: rng.Seed) -> Tensor:
    """Return images, each moved by up to ``largest`` pixels in both directions."""
    rows, channels, height, width = x.shape
    offsets = rng.uniform(rows, (2,), x, seed) * (2 * largest + 1)
    offsets = offsets.long().clamp_max(2 * largest)
    padded = pad(x, (largest,) * 4, mode="replicate")
    at_row = offsets[:, :1] + torch.arange(height, device=x.device)  # (B, H)
    at_column = offsets[:, 1:] + torch.arange(width, device=x.device)  # (B, W)
    image = torch.arange(rows, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return padded[image, channel, at_row[:, None, :, None], at_column[:, None, None, :]]
