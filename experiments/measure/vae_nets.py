"""Encoders of VAEs by name; networks from images to features, and from z to the parameters of
pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from bayou.flows import (
    AmortizedAffine,
    Chain,
    Flow,
    Gate,
    Planar,
    StandardNormal,
    Sylvester,
    Transform,
    continuous,
    iaf,
)
from bayou.flows.core.arguments import check_size
from bayou.flows.layers.squeeze import image_shape

KINDS: dict[str, Callable[..., Transform]] = {  # the maps after the Gaussian
    "planar": partial(Planar, layers=10),
    "sylvester_orthogonal": partial(Sylvester, layers=4, form="orthogonal"),
    "sylvester_householder": partial(Sylvester, layers=4, form="householder"),
    "sylvester_triangular": partial(Sylvester, layers=4, form="triangular"),
    "iaf": partial(iaf, elementwise=Gate()),
    "continuous": partial(continuous, hidden=(64,), steps=4),
}


def amortized(kind: str, dim: int, context_dim: int, **options: Any) -> Flow:
    """q(z | context): a Gaussian, followed by a flow unless ``kind`` is "gaussian"."""
    first: Transform = AmortizedAffine(dim, context_dim)
    if kind != "gaussian":
        first = Chain(first, KINDS[kind](dim, context_dim=context_dim, **options))
    return Flow(StandardNormal(dim), first)


class Maxout(nn.Linear):
    """The elementwise maximum of ``pieces`` linear maps (Goodfellow et al. 2013)."""

    def __init__(self, inputs: int, outputs: int, pieces: int = 4) -> None:
        super().__init__(inputs, outputs * check_size(pieces, "Maxout"))
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (-1, self.pieces)).amax(-1)


class Features(nn.Module):
    r"""A network of images (..., \*event) with values 0 .. levels − 1, scaled to [−1, 1]: (...,
    features).
    """

    def __init__(self, event: Sequence[int], levels: int, net: nn.Module) -> None:
        super().__init__()
        self.event, self.levels, self.net = tuple(event), levels, net

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[: x.ndim - len(self.event)]
        out: Tensor = self.net((2 * x / (self.levels - 1) - 1).reshape(batch.numel(), *self.event))
        return out.to(x.dtype).flatten(1).reshape(*batch, out.shape[1:].numel())


class Gated(nn.Module):
    """A convolution, or a transposed one, times the sigmoid of another (Dauphin et al. 2017).

    The initialization preserves the variance; with torch's default six layers would reduce it to
    1e-6.
    """

    def __init__(
        self,
        layer: type[nn.Conv2d] | type[nn.ConvTranspose2d],
        inputs: int,
        outputs: int,
        *how: Any,
    ) -> None:
        super().__init__()
        self.layer = layer(inputs, 2 * outputs, *how)
        reach: float = math.prod(self.layer.kernel_size)  # inputs of an output, per channel
        if layer is nn.ConvTranspose2d:  # without padding from a single pixel
            reach = reach / math.prod(self.layer.stride) if any(self.layer.padding) else 1
        std = 1 / math.sqrt(inputs * reach)
        value, gate = self.layer.weight.detach().chunk(2, 1 if layer is nn.ConvTranspose2d else 0)
        nn.init.normal_(value, std=2 * std)  # the gates start at ½
        nn.init.normal_(gate, std=std)
        nn.init.zeros_(self.layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.glu(self.layer(x), 1)


def dense_encoder(event: Sequence[int], features: int = 400, levels: int = 2) -> nn.Module:
    """From images to features, by two maxout layers with 4 pieces (Rezende & Mohamed 2015)."""
    return Features(
        event,
        levels,
        nn.Sequential(nn.Flatten(), Maxout(math.prod(event), features), Maxout(features, features)),
    )


def dense_decoder(event: Sequence[int], dim: int, params: int = 1, hidden: int = 400) -> nn.Module:
    """From z to the parameters of pixels, by two maxout layers."""
    return nn.Sequential(
        Maxout(dim, hidden), Maxout(hidden, hidden), nn.Linear(hidden, params * math.prod(event))
    )


def conv_encoder(event: Sequence[int], features: int = 256, levels: int = 2) -> nn.Module:
    """From images (C, H, W) to features, by gated convolutions (van den Berg et al. 2018); H and W
    multiples of 4.
    """
    channels, height, width = _image(event)
    sizes: list[Any] = [(channels, 32, 5, 1, 2), (32, 32, 5, 2, 2), (32, 64, 5, 1, 2), (64, 64, 5, 2, 2),
                        (64, 64, 5, 1, 2), (64, features, (height // 4, width // 4), 1, 0)]  # fmt: skip
    return Features(event, levels, nn.Sequential(*(Gated(nn.Conv2d, *size) for size in sizes)))


def conv_decoder(event: Sequence[int], dim: int, params: int = 1) -> nn.Module:
    """From z to the parameters of pixels, by gated transposed convolutions: (N, params·C, H, W)."""
    channels, height, width = _image(event)
    sizes: list[Any] = [(dim, 64, (height // 4, width // 4), 1, 0), (64, 64, 5, 1, 2), (64, 32, 5, 2, 2, 1),
                        (32, 32, 5, 1, 2), (32, 32, 5, 2, 2, 1), (32, 32, 5, 1, 2)]  # fmt: skip
    layers: list[nn.Module] = [Gated(nn.ConvTranspose2d, *size) for size in sizes]
    last = nn.Conv2d(32, params * channels, 1)
    if params > 2:  # for 256 levels: a wide layer before the last one, as published
        layers.append(nn.Conv2d(32, 256, 5, 1, 2))
        last = nn.Conv2d(256, params * channels, 1)
    return nn.Sequential(nn.Unflatten(-1, (dim, 1, 1)), *layers, last)


def _image(event: Sequence[int]) -> tuple[int, int, int]:
    channels, height, width = image_shape(event, "the convolutions")
    if height % 4 or width % 4:
        raise ValueError(
            f"the convolutions take images with H and W multiples of 4, got {tuple(event)}; pad them"
        )
    return channels, height, width
