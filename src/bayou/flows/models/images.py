"""Flows of images (C, H, W): Glow and Flow++ from squeezes, splits, 1×1 convolutions and couplings
with CNNs.

Data are whole numbers; ``Dequantize`` gives them a density, and bits per dimension are −log
p/(D·log 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows.core.arguments import check_size
from bayou.flows.core.bases import StandardNormal, Uniform
from bayou.flows.core.compose import Chain, Inverse, MapChain
from bayou.flows.core.flow import Flow
from bayou.flows.core.nets import zero_init
from bayou.flows.core.transform import (
    Map,
    Pair,
    Symmetric,
    Transform,
    clamp_inside,
    read_flag,
    sum_event,
)
from bayou.flows.layers.coupling import broadcast_context
from bayou.flows.layers.elementwise import Affine, BoundedAffine, Elementwise, logistic_mixture
from bayou.flows.layers.linear import Conv1x1
from bayou.flows.layers.normalization import ActNorm
from bayou.flows.layers.squeeze import Squeeze, halve_size, image_shape
from bayou.flows.models.image_nets import ImageNet, NetFactory, conv_net, feature_net, gated_net
from bayou.flows.surjections.conditional import ConditionalFlow
from bayou.flows.surjections.maps import Slice
from bayou.flows.surjections.quantization import Dequantize

Mask = Literal["channel", "checkerboard"]
# Pixels in (0, 1) are mapped to logits of (margin, 1 − margin). With the margin .05 of RealNVP the
# noise of black and white pixels is narrow and training slow: a small Glow of MNIST has 3.63 bits
# on held-out images after 120 steps, and 1.83 with 1e-3; for CIFAR-10 the margins do not differ.
MARGIN = 1e-3


class ImageCoupling(Symmetric, Transform):
    r"""y_kept = x_kept, y_rest = g(x_rest; net(x_kept, context)) for images (C, H, W) and an
    elementwise g.

    Args:
        event: (C, H, W).
        elementwise: g.
        mask: "channel" keeps the first C//2 channels; "checkerboard" keeps the pixels with even row
            + column, as 2C channels of (H/2, W/2).
        flip: exchange kept and changed entries.
        net: ``net((inputs, h, w), outputs)`` returns the conditioner, (..., inputs, h, w) → (...,
            outputs, h, w); its outputs are all planes of g's first parameter, then of the second,
            ...
        context: the channels of a context that is an image (context, h, w), flattened.
        context_dim: the size of a context that is a vector, such as a one-hot class.

    Shapes: x, y (..., C, H, W), ladj (...).
    """

    def __init__(
        self,
        event: Sequence[int],
        elementwise: Elementwise,
        mask: Mask = "channel",
        flip: bool = False,
        net: NetFactory = conv_net,
        context: int = 0,
        context_dim: int = 0,
    ) -> None:
        super().__init__()
        shape = image_shape(event, "ImageCoupling")
        if mask not in ("channel", "checkerboard"):
            raise ValueError(f'mask must be "channel" or "checkerboard", got {mask!r}')
        if (context and context_dim) or context < 0 or context_dim < 0:
            raise ValueError(
                f"ImageCoupling got context={context} and context_dim={context_dim}; pass at most one"
            )
        if mask == "channel" and shape[0] < 2:
            raise ValueError(
                f"a coupling of channels needs two, got {shape}; use Squeeze, or mask='checkerboard'"
            )
        self.event_shape: tuple[int | None, ...] = shape
        self.elementwise, self.inverse_kind = elementwise, elementwise.inverse_kind
        self.checkerboard, self.flip = mask == "checkerboard", flip
        if self.checkerboard:
            size, self.first, second = (
                halve_size(shape, "a checkerboard"),
                2 * shape[0],
                2 * shape[0],
            )
        else:
            size, self.first, second = shape[1:], shape[0] // 2, shape[0] - shape[0] // 2
        kept, self.changed = (second, self.first) if flip else (self.first, second)
        self.context_shape = (context, *size) if context else (context_dim, 1, 1)
        self.context_dim = math.prod(self.context_shape)
        self.net = net((kept + context + context_dim, *size), elementwise.params * self.changed)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Kept and changed entries."""
        if self.checkerboard:
            x = x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # (..., C, h, 2, w, 2)
            parts = [torch.cat([x[..., 0, :, j], x[..., 1, :, 1 - j]], -3) for j in (0, 1)]
        else:
            parts = list(x.split([self.first, x.shape[-3] - self.first], -3))
        return (parts[1], parts[0]) if self.flip else (parts[0], parts[1])

    def _join(self, kept: Tensor, rest: Tensor) -> Tensor:
        first, second = (rest, kept) if self.flip else (kept, rest)
        if not self.checkerboard:
            return torch.cat([first, second], -3)
        (a, d), (b, c) = first.chunk(2, -3), second.chunk(2, -3)
        blocks = torch.stack(
            [torch.stack([a, b], -1), torch.stack([c, d], -1)], -3
        )  # (..., C, h, 2, w, 2)
        return blocks.flatten(-2).flatten(-3, -2)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context, 3)
        kept, rest = self._split(x)
        seen = kept
        if context is not None:
            image = context.unflatten(-1, self.context_shape)
            seen = torch.cat([kept, image.expand(*image.shape[:-2], *kept.shape[-2:])], -3)
        planes: Tensor = self.net(seen)
        p = planes.unflatten(-3, (self.elementwise.params, self.changed)).movedim(-4, -1)
        rest, log_slope = self.elementwise.either(rest, p, inverse)
        return self._join(kept, rest), sum_event(log_slope, 3)


class Pointwise(Symmetric, Transform):
    """y = g(x; context), elementwise, where the context holds the parameters, (params, *event)
    flattened.

    Args:
        event: the shape of x and y.
        elementwise: g.
    """

    def __init__(self, event: Sequence[int], elementwise: Elementwise) -> None:
        super().__init__()
        self.event_shape: tuple[int, ...] = tuple(check_size(size, "Pointwise") for size in event)
        self.elementwise, self.inverse_kind = elementwise, elementwise.inverse_kind
        self.context_dim = elementwise.params * math.prod(self.event_shape)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        dims = len(self.event_shape)
        p = context.unflatten(-1, (-1, *self.event_shape)).movedim(-dims - 1, -1)  # type: ignore[union-attr]
        y, log_slope = self.elementwise.either(x, p, inverse)
        return y, sum_event(log_slope.expand_as(y), dims)


class Sigmoid(Transform):
    """y = (sigmoid(x) − margin)/(1 − 2·margin), onto an interval slightly larger than (0, 1) (Dinh
    et al. 2017).

    Args:
        event: the shape of x and y.
        margin: in [0, 0.5).
    """

    def __init__(self, event: Sequence[int], margin: float = 0.0) -> None:
        super().__init__()
        if not 0 <= margin < 0.5:
            raise ValueError(f"the margin of Sigmoid lies in [0, 0.5), got {margin}")
        self.event_shape: tuple[int, ...] = tuple(check_size(size, "Sigmoid") for size in event)
        self.margin, self.width = margin, 1 - 2 * margin
        self.codomain = (0.0 - margin / self.width, 1.0 + margin / self.width)  # not −0
        self._constant = math.prod(self.event_shape) * math.log(self.width)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        ladj = sum_event(F.logsigmoid(x) + F.logsigmoid(-x), len(self.event_shape)) - self._constant
        return clamp_inside((x.sigmoid() - self.margin) / self.width, self.codomain), ladj

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        s = clamp_inside(self.margin + self.width * y, (0.0, 1.0))
        log_s, log_rest = s.log(), torch.log1p(-s)
        return log_s - log_rest, self._constant - sum_event(log_s + log_rest, len(self.event_shape))

    def check_values(self, x: Tensor, inverse: bool) -> None:
        low, high = self.codomain
        if inverse and read_flag(((x > low) & (x < high)).all()) is False:
            raise ValueError(
                f"the data of Sigmoid lie in ({low:.4g}, {high:.4g}), got {x.min():.4g} to {x.max():.4g}; divide "
                "pixels by the number of levels, or append a Dequantize(event, levels)"
            )


def rotation(channels: int, seed: rng.Seed = None) -> Conv1x1:
    """A ``Conv1x1`` that starts at a random orthogonal matrix, as in Glow, rather than at the
    identity.
    """
    conv = Conv1x1(channels)
    with torch.no_grad():
        q = torch.linalg.qr(
            rng.normal(channels, (channels,), torch.zeros((), dtype=torch.float64), seed)
        )[0]
        _, lower, upper = torch.linalg.lu(
            q
        )  # L·U without the permutation of rows is orthogonal, too
        upper = (
            upper * upper.diagonal().sign()
        )  # and with signs of columns that make the pivots positive
        conv.weight.lower.copy_(lower.tril(-1))
        conv.weight.upper.copy_(upper.triu(1))
        conv.weight.log_diagonal.copy_(upper.diagonal().log())
    return conv


def split_channels(event: Sequence[int], keep: int | None = None) -> Map:
    """A split: from base to data, it adds channels of Gaussian noise, with moments by a convolution
    of the kept ones.

    log p(rest | kept) is exact (Dinh et al. 2017; Kingma & Dhariwal 2018).

    Args:
        event: (C, H, W) after the channels are added.
        keep: the number of kept channels, by default C // 2.
    """
    channels, height, width = image_shape(event, "split_channels")
    kept, g = channels // 2 if keep is None else keep, Affine()
    if not 0 < kept < channels:
        raise ValueError(
            f"split_channels needs 0 < keep < {channels}, the number of channels, got {kept}"
        )
    rest = (channels - kept, height, width)
    net = ImageNet(zero_init(nn.Conv2d(kept, g.params * rest[0], 3, padding=1)))
    flow = Flow(StandardNormal(rest), Pointwise(rest, g))
    return Inverse(
        Slice(
            (channels, height, width),
            kept,
            ConditionalFlow(flow, nn.Sequential(net, nn.Flatten(-3))),
        )
    )


def glow_image(
    shape: Sequence[int],
    levels: int = 3,
    steps: int = 8,
    hidden: int = 64,
    half: bool = False,
    context_dim: int = 0,
) -> MapChain:
    """Glow (Kingma & Dhariwal 2018), from noise (2^(levels+1)·C, H/2^levels, W/2^levels) to pixels
    in (0, 1).

    A level consists of a squeeze and ``steps`` of act norm, 1×1 convolution and affine coupling;
    between levels half of the channels are split off.
    ``Chain(glow_image(shape), Dequantize(shape, 256))`` has integers as data.

    Args:
        shape: (C, H, W), with H and W multiples of 2^levels.
        levels, steps: published are 3 levels of 32 steps.
        hidden: channels of the CNN of a coupling; published are 512.
        half: compute the CNNs in bfloat16.
        context_dim: the size of a context of all couplings, such as a one-hot class.
    """
    event = image_shape(shape, "glow_image")
    net = partial(conv_net, hidden=check_size(hidden, "the CNN of a coupling"), half=half)
    parts: list[Map] = [Sigmoid(event, MARGIN)]  # from data to base
    for level in range(check_size(levels, "the number of levels")):
        if level:
            parts.append(split_channels(event))
            event = (event[0] // 2, *event[1:])
        squeeze = Squeeze(event)
        event = squeeze.event_out  # type: ignore[assignment]
        parts.append(Inverse(squeeze))
        for _ in range(check_size(steps, "the number of steps")):
            # The direction of training, from data to noise, multiplies; the other one solves.
            coupling = ImageCoupling(event, BoundedAffine(), net=net, context_dim=context_dim)
            parts += [ActNorm(event), Inverse(rotation(event[0])), coupling]
    return MapChain(*reversed(parts))


def flowpp_image(
    shape: Sequence[int],
    levels: int = 2,
    steps: int = 4,
    hidden: int = 64,
    blocks: int = 2,
    components: int = 8,
    heads: int = 4,
    half: bool = False,
    context_dim: int = 0,
) -> MapChain:
    """Flow++ (Ho et al. 2019): mixture-of-logistics couplings, with gates and attention in their
    CNNs, without splits.

    The first level has checkerboard couplings, each further one a squeeze and couplings of
    channels. Densities are analytic, draws need root finding. The paper uses
    ``image_flow(flowpp_image(shape), dequantize="variational")``.

    Args:
        shape, half, context_dim: as for ``glow_image``.
        levels, steps: the number of levels and of couplings per level.
        hidden, blocks, heads: channels, blocks and attention heads of a CNN; published are 96
            channels and 10 blocks.
        components: of the mixture; published are 32.
    """
    event = image_shape(shape, "flowpp_image")
    net = partial(
        gated_net,
        hidden=check_size(hidden, "the CNN of a coupling"),
        blocks=blocks,
        heads=heads,
        half=half,
    )
    g = logistic_mixture(components)
    parts: list[Map] = [Sigmoid(event, MARGIN)]
    for level in range(check_size(levels, "the number of levels")):
        if level:
            squeeze = Squeeze(event)
            event = squeeze.event_out  # type: ignore[assignment]
            parts.append(Inverse(squeeze))
        for i in range(check_size(steps, "the number of steps")):
            parts.append(ActNorm(event))
            if event[0] > 1:
                parts.append(Inverse(rotation(event[0])))
            mask: Mask = "channel" if level else "checkerboard"
            parts.append(
                Inverse(ImageCoupling(event, g, mask, bool(i % 2), net, context_dim=context_dim))
            )
    return MapChain(*reversed(parts))


def dequantizer(
    shape: Sequence[int], levels: int = 256, steps: int = 4, hidden: int = 32, half: bool = False
) -> ConditionalFlow:
    """q(u | y) on (0, 1) for ``Dequantize(shape, levels, q)``: affine couplings conditional on the
    image y.

    It starts as uniform noise (Ho et al. 2019, variational dequantization).

    Args:
        shape, levels: of the images.
        steps: the number of couplings.
        hidden, half: channels of their CNNs, and whether these compute in bfloat16.
    """
    event = image_shape(shape, "dequantizer")
    g, net = Affine(), partial(gated_net, hidden=hidden, blocks=1, heads=0, half=half)
    couplings = [
        ImageCoupling(event, g, "checkerboard", bool(i % 2), net, context=hidden)
        for i in range(check_size(steps, "the number of steps"))
    ]
    flow = Flow(Uniform(event), Chain(Inverse(Sigmoid(event)), *couplings, Sigmoid(event)))
    return ConditionalFlow(
        flow, nn.Sequential(feature_net(event, hidden, levels, half=half), nn.Flatten(-3))
    )


def image_flow(
    chain: Map,
    levels: int = 256,
    dequantize: Literal["uniform", "variational"] | ConditionalFlow | Flow = "uniform",
) -> Flow:
    """A density of images with integers 0 .. levels − 1: standard normal noise, the chain,
    dequantization.

    Args:
        chain: from noise to pixels in (0, 1), for example ``glow_image(shape)``.
        levels: the number of levels.
        dequantize: "uniform" or "variational" noise, or a distribution q(u | y) on (0, 1).
    """
    shape = image_shape(chain.event_out, "image_flow")  # type: ignore[arg-type]
    if isinstance(dequantize, str):
        if dequantize not in ("uniform", "variational"):
            raise ValueError(
                f'dequantize must be "uniform", "variational" or a flow onto (0, 1), got {dequantize!r}'
            )
        q = dequantizer(shape, levels) if dequantize == "variational" else None
    else:
        q = dequantize  # type: ignore[assignment]
    return Flow(StandardNormal(chain.event_in), Chain(chain, Dequantize(shape, levels, q)))  # type: ignore[arg-type]


@torch.no_grad()
def bits_per_dim(
    flow: Flow,
    images: Tensor,
    samples: int = 1,
    seed: rng.Seed = 0,
    batch_size: int = 256,
    context: Tensor | None = None,
) -> Tensor:
    """−log p(y | context)/(D·log 2) of every image, in eval mode: (rows,). With dequantization, an
    upper bound.

    Args:
        flow: a density of integers.
        images: (rows, *event), of any dtype and on any device.
        samples: K importance samples, which tighten the bound (Hoogeboom et al. 2020).
        seed: of the noise.
        batch_size: rows at a time, without effect on the result.
        context: one for all images, or one for each.
    """
    if not flow.transform.whole_out:
        raise ValueError(
            "bits per dimension need a flow of integers, and this one has a density of real numbers; end it with "
            "Dequantize, or build it with image_flow"
        )
    shape = flow.event_shape
    if (
        not isinstance(images, Tensor)
        or images.ndim != len(shape) + 1
        or tuple(images.shape[1:]) != shape
    ):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a tensor (rows, {', '.join(map(str, shape))}), got {got}")
    like = next(
        (t for t in (*flow.parameters(), *flow.buffers()) if t.is_floating_point()), torch.zeros(())
    )
    if context is not None and context.shape[:-1] not in ((), (len(images),)):
        raise ValueError(
            f"got {len(images)} images and contexts of shape {tuple(context.shape)}; pass one for all, or one for each"
        )
    training = flow.training
    flow.eval()  # act norm must not be initialized by these images
    try:
        found = []
        for i in range(0, len(images), batch_size):
            own = (
                None
                if context is None
                else context.to(like).expand(len(images), -1)[i : i + batch_size]
            )
            part = images[i : i + batch_size].to(like)
            found.append(flow.log_prob(part, own, samples=samples, seed=seed, start=i))
    finally:
        flow.train(training)
    return -torch.cat(found) / (math.prod(shape) * math.log(2))
