"""Networks and flows of ``experiments.measure.codec``: images pixel after pixel or in groups, text letter
after letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.flows import (
    MADE,
    Autoregressive,
    BinaryArgmax,
    Categorical,
    Chain,
    Conditioner,
    DiscretizedLogistic,
    Flow,
    Groups,
    IntegerIdentity,
    Inverse,
    ModuloAutoregressive,
    OneHot,
    PixelCNN,
    StandardNormal,
    Transform,
    integer,
    logistic_mixture,
    quincunx,
)
from bayou.flows.discrete.bijections import Modulo

LETTERS = " abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Setting:
    """Sizes of networks and data."""

    seconds: float
    device: str
    threads: int
    seed: int = 0
    width: int = 24  # of the networks of an integer flow: float64 convolutions on a CPU are what coding waits for
    depth: int = 2
    levels: int = 3  # of groups of pixels
    couplings: int = 2
    components: int = 5
    hidden: int = 800  # of MADE
    pixel_width: int = 16  # of PixelCNN
    pixel_depth: int = 6
    channels: int = 160  # of the causal network of text
    dilations: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8)
    length: int = 500
    batch: int = 128
    images: int = 10_000
    characters: int = 1_000_000


SMALL: dict[str, Any] = {
    "width": 8, "depth": 1, "levels": 2, "couplings": 2, "components": 2, "hidden": 32, "pixel_width": 4,
    "pixel_depth": 2, "channels": 16, "dilations": (1, 2, 4), "length": 50, "batch": 16, "images": 100,
    "characters": 5_000,
}  # fmt: skip


class Residual(nn.Module):
    """3×3 convolutions, each added to what it gets: (n, inputs, H, W) → (n, outputs, H, W), 0 at
    first.
    """

    def __init__(self, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 5, padding=2)
        self.inner = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.last = nn.Conv2d(width, outputs, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.inner:
            h = h + layer(F.relu(h))
        return self.last(F.relu(h))


class Causal(Conditioner):
    """Dilated causal convolutions over rows (..., L, inputs) → (..., L, params), each seeing the
    rows before it.
    """

    def __init__(
        self,
        length: int,
        inputs: int,
        params: int,
        channels: int,
        dilations: Sequence[int],
        dropout: float = 0.1,
    ) -> None:
        super().__init__(length, params)
        self.dilations = tuple(dilations)
        self.first = nn.Linear(inputs, channels)
        self.here = nn.ModuleList(nn.Linear(channels, channels) for _ in dilations)
        self.back = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in dilations)
        self.mix = nn.ModuleList(nn.Linear(channels, channels) for _ in dilations)
        self.norm = nn.ModuleList(nn.LayerNorm(channels) for _ in dilations)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(channels, params)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def layers(self) -> Any:
        """Dilation, norm and the three maps of each layer."""
        return zip(self.dilations, self.norm, self.here, self.back, self.mix, strict=True)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(F.pad(x, (0, 0, 1, 0))[..., :-1, :])
        for dilation, norm, here, back, mix in self.layers():
            seen = norm(h)
            before = F.pad(back(seen), (0, 0, dilation, 0))[..., : h.shape[-2], :]
            h = h + self.drop(mix(F.relu(here(seen) + before)))
        return self.last(F.relu(h))

    def steps(self, like: Tensor, context: Tensor | None = None) -> _CausalSteps:
        return _CausalSteps(self, like)


class _CausalSteps:
    """One row after another; what the dilations look back at is kept."""

    def __init__(self, net: Causal, like: Tensor) -> None:
        self.net, self.row = net, torch.zeros_like(like[..., 0, :])
        self.seen: list[list[Tensor]] = [[] for _ in net.dilations]

    def params(self) -> Tensor:
        h = self.net.first(self.row)
        for (dilation, norm, here, back, mix), seen in zip(
            self.net.layers(), self.seen, strict=True
        ):
            seen.append(norm(h))
            inner = here(seen[-1])
            if len(seen) > dilation:
                inner = inner + back(seen.pop(0))
            h = h + mix(F.relu(inner))
        return self.net.last(F.relu(h))

    def push(self, x: Tensor) -> None:
        self.row = x


class Sequence5(Transform):
    """Five numbers a letter, (L, bits): each by a mixture of logistics from the letters before and
    the bits before.
    """

    def __init__(self, length: int, bits: int, channels: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.event_shape = (length, bits)
        elementwise = logistic_mixture(6)
        self.causal = Causal(length, 2 * bits, channels, channels, dilations)
        self.inner = Autoregressive(
            elementwise, MADE(bits, elementwise.params, (128,), context_dim=channels)
        )
        nn.init.normal_(self.causal.last.weight, std=0.05)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("it scores, and does not draw")

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        h = F.relu(self.causal(torch.cat([y.sign(), y], -1)))
        x, ladj = self.inner._forward(y, h)
        return x, ladj.sum(-1)


class Guess(Conditioner):
    """The shifts of a modulo flow read as logits of the letter that they take to 0: of r those of
    −r.

    Likelihood alone stays where such a flow starts, at the identity: shifts that are worse by
    themselves, until the base expects 0, have softmax weights, and so gradients, of almost nothing.
    So the network first learns letters.
    """

    def __init__(self, net: Conditioner, classes: int) -> None:
        super().__init__(net.dim, classes)
        self.net, self.shift = net, [-k % classes for k in range(classes)]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        out: Tensor = self.net(x)
        return out[..., self.shift]


def guesser(flow: Flow) -> Flow:
    """The flow whose network is that of a modulo flow, for letters themselves."""
    net = flow.transform.transforms[0].transform.conditioner
    base = Categorical(net.dim, len(LETTERS), Guess(net, len(LETTERS)))
    return Flow(base, flow.transform.transforms[-1]).to(next(flow.parameters()).device)


def build(data: str, kind: str, setting: Setting) -> Flow:
    """The flow of a row."""
    torch.manual_seed(setting.seed)
    event, k = (1, 28, 28), setting.components
    if (data, kind) == ("text", "argmax flow"):
        bits = (len(LETTERS) - 1).bit_length()
        inner = Sequence5(setting.length, bits, setting.channels, setting.dilations)
        return Flow(
            StandardNormal((setting.length, bits)),
            Chain(inner, BinaryArgmax(setting.length, len(LETTERS))),
        )
    if data == "text":
        classes, modulo = len(LETTERS), kind == "modulo flow"
        params = Modulo(classes).params if modulo else classes
        net = Causal(setting.length, classes, params, setting.channels, setting.dilations)
        last = OneHot(setting.length, classes)
        if modulo:
            return Flow(
                Categorical(setting.length, classes),
                Chain(Inverse(ModuloAutoregressive(net, classes)), last),
            )
        return Flow(Categorical(setting.length, classes, net), last)
    if kind != "integer flow":  # a base alone, pixel after pixel
        masked: Conditioner = MADE(784, 3 * k, (setting.hidden, setting.hidden), residual=True)
        net = (
            masked
            if kind == "MADE"
            else PixelCNN(event, 3 * k, setting.pixel_width, setting.pixel_depth)
        )
        return Flow(
            DiscretizedLogistic(event, 256, k, net, bounded=True), IntegerIdentity(event, 256)
        )
    groups = quincunx(event, setting.levels)
    nets = [Residual(2, setting.width, setting.depth, 3 * k) for _ in range(2 * setting.levels + 1)]
    chain = integer(event, 256, setting.couplings, (16, 16), wrap=True)
    return Flow(DiscretizedLogistic(event, 256, k, Groups(groups, nets), bounded=True), chain)
