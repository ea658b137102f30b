"""Flows of images (C, H, W): Glow and Flow++ from squeezes, splits, 1×1 convolutions and couplings.

Data are whole numbers; ``Dequantize`` gives them a density, and bits per dimension are
−log p/(D·log 2).
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
    Cost,
    Map,
    Pair,
    Symmetric,
    Transform,
    broadcast_context,
    clamp_inside,
    read_flag,
    sum_event,
)
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
    r"""A coupling of images: y_kept = x_kept, y_rest = g(x_rest; net(x_kept, context)).

    The elementwise g is increasing, so that the map is a bijection with
    ladj = Σ log ∂y_rest/∂x_rest. Both directions cost one pass of the network (Dinh et al. 2017,
    RealNVP).

    Args:
        event: (C, H, W).
        elementwise: g.
        mask: the entries that are kept: "channel" (the default), the first C//2 channels, or
            "checkerboard", the pixels with even row + column, as 2C channels of (H/2, W/2).
        flip: whether to exchange kept and changed entries; False by default.
        net: a constructor of the conditioner: ``net((inputs, h, w), outputs)`` returns a network
            (..., inputs, h, w) → (..., outputs, h, w), whose outputs are all planes of g's first
            parameter, then of the second, ...; ``conv_net`` by default.
        context: the channels of a context that is an image (context, h, w), flattened; 0, the
            default, for none.
        context_dim: the size of a context that is a vector, such as a one-hot class; 0, the
            default, for none.

    Shapes: x, y (..., C, H, W), context (..., context_dim), ladj (...).

    Raises:
        ValueError: for an unknown mask, both kinds of context, a single channel with the mask
            "channel", or an odd height or width with "checkerboard".

    Example:
        >>> import torch
        >>> from bayou.flows import Affine, ImageCoupling
        >>> coupling = ImageCoupling((4, 8, 8), Affine())
        >>> y, ladj = coupling(torch.zeros(10, 4, 8, 8))
        >>> y.shape, ladj.shape
        (torch.Size([10, 4, 8, 8]), torch.Size([10]))
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
                f"ImageCoupling got context={context} and context_dim={context_dim}; pass at most "
                "one"
            )
        if mask == "channel" and shape[0] < 2:
            raise ValueError(
                f"a coupling of channels needs two, got {shape}; use Squeeze, or "
                "mask='checkerboard'"
            )
        self.event_shape: tuple[int | None, ...] = shape
        self.elementwise = elementwise
        self.inverse_kind: Cost = elementwise.inverse_kind
        self.is_checkerboard: bool = mask == "checkerboard"
        self.flip = flip
        channels = shape[0]
        size = shape[1:]
        if self.is_checkerboard:
            channels = 4 * shape[0]
            size = halve_size(shape, "a checkerboard")
        self.first_channels: int = channels // 2
        self.changed_channels: int = self.first_channels
        if not flip:
            self.changed_channels = channels - self.first_channels
        kept_channels = channels - self.changed_channels
        self.context_shape: tuple[int, int, int] = (
            (context, *size) if context else (context_dim, 1, 1)
        )
        self.context_dim: int = math.prod(self.context_shape)
        inputs = kept_channels + context + context_dim
        self.net: nn.Module = net((inputs, *size), elementwise.params * self.changed_channels)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept and the changed entries, (..., channels, h, w) each."""
        if self.is_checkerboard:
            blocks = x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # (..., C, h, 2, w, 2)
            first = torch.cat([blocks[..., 0, :, 0], blocks[..., 1, :, 1]], -3)
            second = torch.cat([blocks[..., 0, :, 1], blocks[..., 1, :, 0]], -3)
        else:
            sizes = [self.first_channels, x.shape[-3] - self.first_channels]
            first, second = x.split(sizes, -3)
        if self.flip:
            return second, first
        return first, second

    def _join(self, kept: Tensor, rest: Tensor) -> Tensor:
        """Return the image with these kept and changed entries."""
        first, second = (rest, kept) if self.flip else (kept, rest)
        if not self.is_checkerboard:
            return torch.cat([first, second], -3)
        top_left, bottom_right = first.chunk(2, -3)
        top_right, bottom_left = second.chunk(2, -3)
        top = torch.stack([top_left, top_right], -1)
        bottom = torch.stack([bottom_left, bottom_right], -1)
        blocks = torch.stack([top, bottom], -3)  # (..., C, h, 2, w, 2)
        return blocks.flatten(-2).flatten(-3, -2)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context, 3)
        kept, rest = self._split(x)
        inputs = kept
        if context is not None:
            image = context.unflatten(-1, self.context_shape)
            inputs = torch.cat([kept, image.expand(*image.shape[:-2], *kept.shape[-2:])], -3)
        planes: Tensor = self.net(inputs)
        params = planes.unflatten(-3, (self.elementwise.params, self.changed_channels))
        rest, log_slope = self.elementwise.either(rest, params.movedim(-4, -1), inverse)
        return self._join(kept, rest), sum_event(log_slope, 3)


class Pointwise(Symmetric, Transform):
    r"""A map y = g(x; context), elementwise, whose parameters are the context.

    Args:
        event: the shape of x and y.
        elementwise: g.

    Shapes: x, y (..., \*event), context (..., params·D): all D numbers of g's first parameter, then
        of the second, ...; ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import Affine, Pointwise
        >>> f = Pointwise((3, 4, 4), Affine())
        >>> f.context_dim  # log-scales and shifts of 48 numbers
        96
        >>> y, ladj = f(torch.zeros(10, 3, 4, 4), torch.zeros(10, 96))
        >>> y.shape
        torch.Size([10, 3, 4, 4])
    """

    def __init__(self, event: Sequence[int], elementwise: Elementwise) -> None:
        super().__init__()
        self.event_shape: tuple[int, ...] = tuple(check_size(size, "Pointwise") for size in event)
        self.elementwise = elementwise
        self.inverse_kind: Cost = elementwise.inverse_kind
        self.context_dim: int = elementwise.params * math.prod(self.event_shape)

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        dims = len(self.event_shape)
        params = context.unflatten(-1, (-1, *self.event_shape))  # type: ignore[union-attr]
        y, log_slope = self.elementwise.either(x, params.movedim(-dims - 1, -1), inverse)
        return y, sum_event(log_slope.expand_as(y), dims)


class Sigmoid(Transform):
    r"""A map y = (sigmoid(x) − margin)/(1 − 2·margin), elementwise, onto an interval.

    The interval is (0, 1) without a margin and slightly larger with one, so that the logits of
    black and white pixels are bounded. ladj = Σ log sigmoid(x)·sigmoid(−x) − D·log(1 − 2·margin)
    (Dinh et al. 2017, RealNVP).

    Args:
        event: the shape of x and y.
        margin: in [0, 0.5); 0 by default.

    Shapes: x, y (..., \*event), ladj (...).

    Raises:
        ValueError: for another margin.
    """

    def __init__(self, event: Sequence[int], margin: float = 0.0) -> None:
        super().__init__()
        if not 0 <= margin < 0.5:
            raise ValueError(f"the margin of Sigmoid lies in [0, 0.5), got {margin}")
        self.event_shape: tuple[int, ...] = tuple(check_size(size, "Sigmoid") for size in event)
        self.margin = margin
        self.width: float = 1 - 2 * margin
        overhang = margin / self.width
        self.codomain: tuple[float, float] = (0.0 - overhang, 1.0 + overhang)  # not −0
        self._log_volume = math.prod(self.event_shape) * math.log(self.width)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        log_slope = F.logsigmoid(x) + F.logsigmoid(-x)
        ladj = sum_event(log_slope, len(self.event_shape)) - self._log_volume
        return clamp_inside((x.sigmoid() - self.margin) / self.width, self.codomain), ladj

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        s = clamp_inside(self.margin + self.width * y, (0.0, 1.0))
        log_s = s.log()
        log_rest = torch.log1p(-s)
        ladj = self._log_volume - sum_event(log_s + log_rest, len(self.event_shape))
        return log_s - log_rest, ladj

    def check_values(self, x: Tensor, inverse: bool) -> None:
        low, high = self.codomain
        if inverse and read_flag(((x > low) & (x < high)).all()) is False:
            raise ValueError(
                f"the data of Sigmoid lie in ({low:.4g}, {high:.4g}), got {x.min():.4g} to "
                f"{x.max():.4g}; divide pixels by the number of levels, or append a "
                "Dequantize(event, levels)"
            )


def rotation(channels: int, seed: rng.Seed = None) -> Conv1x1:
    """Build a ``Conv1x1`` that starts at a random orthogonal matrix, as in Glow.

    Args:
        channels: the number of channels.
        seed: of the matrix; by default torch's generator.
    """
    conv = Conv1x1(channels)
    with torch.no_grad():
        template = torch.zeros((), dtype=torch.float64)
        q = torch.linalg.qr(rng.normal(channels, (channels,), template, seed))[0]
        # L·U is orthogonal without the permutation of rows, too, and with signs of columns that
        # make the pivots positive.
        _, lower, upper = torch.linalg.lu(q)
        upper = upper * upper.diagonal().sign()
        conv.weight.lower.copy_(lower.tril(-1))
        conv.weight.upper.copy_(upper.triu(1))
        conv.weight.log_diagonal.copy_(upper.diagonal().log())
    return conv


def split_channels(event: Sequence[int], keep: int | None = None) -> Map:
    """Build the split of a multi-scale flow.

    From base to data, it adds channels of Gaussian noise, rest ~ N(m(kept), s(kept)²), whose
    moments are a convolution of the kept channels. The term log p(rest | kept) is exact.

    Args:
        event: (C, H, W), the shape after the channels are added.
        keep: the number of kept channels, which are the input; by default C // 2.

    Returns:
        A map x (..., keep, H, W) → y (..., C, H, W).

    Raises:
        ValueError: unless 0 < keep < C.

    Example:
        >>> import torch
        >>> from bayou.flows import split_channels
        >>> y, term = split_channels((4, 8, 8))(torch.zeros(10, 2, 8, 8), seed=0)
        >>> y.shape, term.shape
        (torch.Size([10, 4, 8, 8]), torch.Size([10]))

    References:
        Dinh, Sohl-Dickstein & Bengio 2017, Density Estimation Using Real NVP.
        Kingma & Dhariwal 2018, Glow: Generative Flow with Invertible 1x1 Convolutions.
    """
    shape = image_shape(event, "split_channels")
    channels, height, width = shape
    kept = channels // 2 if keep is None else keep
    if not 0 < kept < channels:
        raise ValueError(
            f"split_channels needs 0 < keep < {channels}, the number of channels, got {kept}"
        )
    rest_shape = (channels - kept, height, width)
    elementwise = Affine()
    outputs = elementwise.params * (channels - kept)
    net = ImageNet(zero_init(nn.Conv2d(kept, outputs, 3, padding=1)))
    flow = Flow(StandardNormal(rest_shape), Pointwise(rest_shape, elementwise))
    rest = ConditionalFlow(flow, nn.Sequential(net, nn.Flatten(-3)))
    return Inverse(Slice(shape, kept, rest))


def glow_image(
    shape: Sequence[int],
    levels: int = 3,
    steps: int = 8,
    hidden: int = 64,
    half: bool = False,
    context_dim: int = 0,
) -> MapChain:
    """Build Glow: a multi-scale flow of images.

    A level consists of a squeeze and ``steps`` of act norm, 1×1 convolution and affine coupling,
    y_rest = s(x_kept) ⊙ x_rest + t(x_kept) with y_kept = x_kept; between levels half of the
    channels are split off.
    Densities and draws cost one pass of each network. The noise is
    (2^(levels+1)·C, H/2^levels, W/2^levels), pixels are in (0, 1);
    ``image_flow(glow_image(shape))`` has integers as data.

    Args:
        shape: (C, H, W), with H and W multiples of 2^levels.
        levels: the number of levels, 3 by default and as published.
        steps: the number of couplings per level, 8 by default; published are 32.
        hidden: the channels of the CNN of a coupling, 64 by default; published are 512.
        half: whether to compute the CNNs in bfloat16; False by default.
        context_dim: the size of a context of all couplings, such as a one-hot class; 0, the
            default, for none.

    Returns:
        A map from noise to pixels (..., C, H, W) in (0, 1).

    Raises:
        ValueError: for a height or width that is no multiple of 2^levels.

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.image_flow(flows.glow_image((1, 8, 8), levels=2, steps=2, hidden=16))
        >>> images = flow.sample(4, seed=0)
        >>> images.shape, flows.bits_per_dim(flow, images).shape
        (torch.Size([4, 1, 8, 8]), torch.Size([4]))

    References:
        Kingma & Dhariwal 2018, Glow: Generative Flow with Invertible 1x1 Convolutions.
    """
    event = image_shape(shape, "glow_image")
    net = partial(conv_net, hidden=check_size(hidden, "the CNN of a coupling"), half=half)
    maps: list[Map] = [Sigmoid(event, MARGIN)]  # from data to base
    for level in range(check_size(levels, "the number of levels")):
        if level:
            maps.append(split_channels(event))
            event = (event[0] // 2, *event[1:])
        squeeze = Squeeze(event)
        event = image_shape(squeeze.event_out, "glow_image")
        maps.append(Inverse(squeeze))
        for _ in range(check_size(steps, "the number of steps")):
            # The direction of training, from data to noise, multiplies; the other one solves.
            coupling = ImageCoupling(event, BoundedAffine(), net=net, context_dim=context_dim)
            maps += [ActNorm(event), Inverse(rotation(event[0])), coupling]
    return MapChain(*reversed(maps))


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
    """Build Flow++: mixture-of-logistics couplings of images, with attention in their CNNs.

    From data to noise, each coupling maps every changed entry by
    y = exp(s)·logit(Σ_j w_j·sigmoid(a_j·x + b_j)) + t, with all parameters from a CNN of the kept
    entries. The first level has checkerboard couplings, each further one a squeeze and couplings of
    channels; there are no splits. Densities are analytic, draws need root finding. The paper uses
    ``image_flow(flowpp_image(shape), dequantize="variational")``.

    Args:
        shape: (C, H, W), with H and W even and multiples of 2^(levels − 1).
        levels: the number of levels, 2 by default.
        steps: the number of couplings per level, 4 by default.
        hidden: the channels of the CNN of a coupling, 64 by default; published are 96.
        blocks: the blocks of a CNN, 2 by default; published are 10.
        components: the number of logistics in each mixture, 8 by default; published are 32.
        heads: the attention heads of a CNN, 4 by default; 0 for convolutions alone.
        half: whether to compute the CNNs in bfloat16; False by default.
        context_dim: the size of a context of all couplings, such as a one-hot class; 0, the
            default, for none.

    Returns:
        A map from noise (..., 4^(levels−1)·C, H/2^(levels−1), W/2^(levels−1)) to pixels
        (..., C, H, W) in (0, 1).

    Raises:
        ValueError: for a height or width that cannot be halved.

    Example:
        >>> import bayou.flows as flows
        >>> chain = flows.flowpp_image((1, 8, 8), steps=2, hidden=16, blocks=1, components=4)
        >>> flow = flows.image_flow(chain, levels=16)
        >>> flow.sample(4, seed=0).shape
        torch.Size([4, 1, 8, 8])

    References:
        Ho, Chen, Srinivas, Duan & Abbeel 2019, Flow++: Improving Flow-Based Generative Models with
        Variational Dequantization and Architecture Design.
    """
    event = image_shape(shape, "flowpp_image")
    net = partial(
        gated_net,
        hidden=check_size(hidden, "the CNN of a coupling"),
        blocks=blocks,
        heads=heads,
        half=half,
    )
    elementwise = logistic_mixture(components)
    maps: list[Map] = [Sigmoid(event, MARGIN)]  # from data to base
    for level in range(check_size(levels, "the number of levels")):
        mask: Mask = "checkerboard"
        if level:
            mask = "channel"
            squeeze = Squeeze(event)
            event = image_shape(squeeze.event_out, "flowpp_image")
            maps.append(Inverse(squeeze))
        for i in range(check_size(steps, "the number of steps")):
            maps.append(ActNorm(event))
            if event[0] > 1:
                maps.append(Inverse(rotation(event[0])))
            flip = i % 2 == 1
            coupling = ImageCoupling(event, elementwise, mask, flip, net, context_dim=context_dim)
            maps.append(Inverse(coupling))
    return MapChain(*reversed(maps))


def dequantizer(
    shape: Sequence[int],
    levels: int = 256,
    steps: int = 4,
    hidden: int = 32,
    half: bool = False,
) -> ConditionalFlow:
    """Build q(u | y) on (0, 1) for ``Dequantize(shape, levels, q)``: variational dequantization.

    It is a flow of checkerboard couplings, u = sigmoid(f(logit(ε); net(y))) with uniform ε, affine
    and conditional on the image y. It starts as uniform noise; trained with the density, it
    tightens the bound log p(y) ≥ E_q[log p((y + u)/L) − log q(u | y)] − D·log L.

    Args:
        shape: (C, H, W) of the images, with even H and W.
        levels: the number of levels L of the images, 256 by default.
        steps: the number of couplings, 4 by default.
        hidden: the channels of their CNNs, 32 by default.
        half: whether to compute the CNNs in bfloat16; False by default.

    Returns:
        A distribution of u (..., C, H, W), conditional on y (..., C, H, W).

    Example:
        >>> import bayou.flows as flows
        >>> shape = (1, 8, 8)
        >>> q = flows.dequantizer(shape, levels=16, steps=2, hidden=8)
        >>> chain = flows.glow_image(shape, levels=2, steps=2, hidden=16)
        >>> flow = flows.image_flow(chain, levels=16, dequantize=q)
        >>> flow.kind
        <Ladj.bound: 1>

    References:
        Ho, Chen, Srinivas, Duan & Abbeel 2019, Flow++: Improving Flow-Based Generative Models with
        Variational Dequantization and Architecture Design.
    """
    event = image_shape(shape, "dequantizer")
    elementwise = Affine()
    net = partial(gated_net, hidden=hidden, blocks=1, heads=0, half=half)
    couplings = [
        ImageCoupling(event, elementwise, "checkerboard", i % 2 == 1, net, context=hidden)
        for i in range(check_size(steps, "the number of steps"))
    ]
    flow = Flow(Uniform(event), Chain(Inverse(Sigmoid(event)), *couplings, Sigmoid(event)))
    features = feature_net(event, hidden, levels, half=half)
    return ConditionalFlow(flow, nn.Sequential(features, nn.Flatten(-3)))


def image_flow(
    chain: Map,
    levels: int = 256,
    dequantize: Literal["uniform", "variational"] | ConditionalFlow | Flow = "uniform",
) -> Flow:
    """Build a density of images with integers 0 .. levels − 1.

    It consists of standard normal noise, the chain, and dequantization: the log-density is the
    bound log p(y) ≥ E_q[log p((y + u)/L) − log q(u | y)] − D·log L.

    Args:
        chain: a map from noise to pixels in (0, 1), for example ``glow_image(shape)``.
        levels: the number of levels L, 256 by default.
        dequantize: "uniform" (the default) or "variational" noise, or a distribution q(u | y) on
            (0, 1).

    Returns:
        A flow of images (..., C, H, W).

    Raises:
        ValueError: for another name of the noise, or a q onto another interval.

    Example:
        >>> import bayou.flows as flows
        >>> chain = flows.glow_image((1, 8, 8), levels=2, steps=2, hidden=16)
        >>> flow = flows.image_flow(chain, levels=16)
        >>> images = flow.sample(4, seed=0)  # integers 0 .. 15, stored as floats
        >>> flow.log_prob(images, samples=8, seed=0).shape
        torch.Size([4])
    """
    shape = image_shape(chain.event_out, "image_flow")  # type: ignore[arg-type]
    q: ConditionalFlow | Flow | None = None
    if dequantize == "variational":
        q = dequantizer(shape, levels)
    elif not isinstance(dequantize, str):
        q = dequantize
    elif dequantize != "uniform":
        raise ValueError(
            f'dequantize must be "uniform", "variational" or a flow onto (0, 1), got {dequantize!r}'
        )
    base = StandardNormal(chain.event_in)  # type: ignore[arg-type]
    return Flow(base, Chain(chain, Dequantize(shape, levels, q)))


@torch.no_grad()
def bits_per_dim(
    flow: Flow,
    images: Tensor,
    samples: int = 1,
    seed: rng.Seed = 0,
    batch_size: int = 256,
    context: Tensor | None = None,
) -> Tensor:
    """Compute −log p(y | context)/(D·log 2) of every image, in eval mode.

    With dequantization it is an upper bound, whose gap shrinks with more samples (Hoogeboom et al.
    2020).

    Args:
        flow: a density of integers.
        images: (rows, *event), of any dtype and on any device.
        samples: the number of importance samples, 1 by default.
        seed: of the noise; 0 by default.
        batch_size: rows at a time, 256 by default; it has no effect on the result.
        context: one for all images, (context_dim,), or one for each, (rows, context_dim); None, the
            default, for a flow without context.

    Returns:
        Bits per dimension (rows,), on the device of the flow.

    Raises:
        ValueError: for a flow of real numbers, or images or contexts of another shape.

    Example:
        >>> import torch, bayou.flows as flows
        >>> chain = flows.glow_image((1, 8, 8), levels=2, steps=2, hidden=16)
        >>> images = torch.randint(0, 256, (10, 1, 8, 8))
        >>> flows.bits_per_dim(flows.image_flow(chain), images).shape
        torch.Size([10])
    """
    _check_images(flow, images, context)
    tensors = (*flow.parameters(), *flow.buffers())
    floating = (tensor for tensor in tensors if tensor.is_floating_point())
    template = next(floating, torch.zeros(()))
    if context is not None:
        context = context.to(template).expand(len(images), -1)
    was_training = flow.training
    flow.eval()  # act norm must not be initialized by these images
    log_probs = []
    try:
        for start in range(0, len(images), batch_size):
            rows = slice(start, start + batch_size)
            log_prob = flow.log_prob(
                images[rows].to(template),
                None if context is None else context[rows],
                samples=samples,
                seed=seed,
                start=start,
            )
            log_probs.append(log_prob)
    finally:
        flow.train(was_training)
    return -torch.cat(log_probs) / (math.prod(flow.event_shape) * math.log(2))


def _check_images(flow: Flow, images: Tensor, context: Tensor | None) -> None:
    """Raise a ValueError unless a flow of integers, its images and their contexts agree."""
    if not flow.transform.whole_out:
        raise ValueError(
            "bits per dimension need a flow of integers, and this one has a density of real "
            "numbers; end it with Dequantize, or build it with image_flow"
        )
    shape = flow.event_shape
    expected = f"images must be a tensor (rows, {', '.join(map(str, shape))})"
    if not isinstance(images, Tensor):
        raise ValueError(f"{expected}, got {type(images).__name__}")
    if images.ndim != len(shape) + 1 or tuple(images.shape[1:]) != shape:
        raise ValueError(f"{expected}, got {tuple(images.shape)}")
    if context is not None and context.shape[:-1] not in ((), (len(images),)):
        raise ValueError(
            f"got {len(images)} images and contexts of shape {tuple(context.shape)}; pass one for "
            "all, or one for each"
        )
