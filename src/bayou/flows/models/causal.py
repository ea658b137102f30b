"""Causal networks as conditioners of sequences (L, C) and images (C, H, W).

Each is evaluated at all positions at once, or at one after another with a cache.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core.modules import Modules
from bayou.flows.core.arguments import check_size
from bayou.flows.core.compose import Chain, Inverse
from bayou.flows.core.nets import zero_init
from bayou.flows.layers.autoregressive import Autoregressive
from bayou.flows.layers.conditioners import MADE, Conditioner, CoordinateSteps
from bayou.flows.layers.elementwise import Affine, Elementwise

Shape = int | Sequence[int]
NextFeatures = Callable[[Tensor], Tensor]  # token t − 1 (N, C), first zeros, to h_t (N, width)


class Causal(Conditioner):
    """h_t = f(x_{<t}, context) by a network over positions t; entry c has parameters A_c·h_t +
    made_c(x_{t,<c}, h_t).

    A subclass implements ``features`` (h at all positions) and ``cached`` (one position after
    another).

    Args:
        event: (L,) or (L, C), or (C, H, W), whose positions are pixels or patches in raster order.
        params: the number of parameters per coordinate.
        width: the size of h.
        patch: the side of a patch.
        reverse: process the coordinates from the last to the first.
        context_dim: the size of the context, 0 for none.
    """

    back: Tensor  # back[d]: the position of coordinate d in the order

    def __init__(
        self,
        event: Shape,
        params: int,
        width: int,
        patch: int = 1,
        reverse: bool = False,
        context_dim: int = 0,
    ) -> None:
        name = type(self).__name__
        shape = (event,) if isinstance(event, int) else tuple(event)
        grid = token_indices(
            tuple(check_size(size, name) for size in shape), check_size(patch, "a patch")
        )
        order = grid.flatten().flip(0) if reverse else grid.flatten()
        super().__init__(grid.numel(), params, order, context_dim)
        self.event = shape
        self.register_buffer("back", self.order.argsort(), persistent=False)
        self.positions, self.channels = grid.shape
        self.width = check_size(width, f"the width of {name}")
        self.place = nn.Parameter(torch.zeros(self.positions, width))
        self.from_context = nn.Linear(context_dim, width, bias=False) if context_dim else None
        self.head = MADE(self.channels, params, (width,), context_dim=width)
        self.direct = zero_init(nn.Linear(width, self.channels * params, bias=False))

    @abstractmethod
    def features(self, tokens: Tensor, place: Tensor) -> Tensor:
        """Tokens (N, T, C) and embeddings of their positions (N or 1, T, width) to h (N, T,
        width).
        """

    @abstractmethod
    def cached(self, place: Tensor) -> NextFeatures:
        """A function that is called with token t − 1 (N, C), first with zeros, and returns h_t (N,
        width).
        """

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        batch = x.shape[:-1]
        # index_select: the gradient of x[:, order] sorts its indices on a GPU
        tokens = x.index_select(-1, self.order).reshape(
            math.prod(batch), self.positions, self.channels
        )
        h = self.features(tokens, self._places(context))
        out = self.head(tokens, h) + self._direct(h)  # (N, T, C, P)
        return out.flatten(1, 2).index_select(1, self.back).reshape(*batch, self.dim, self.out)

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        return _CausalSteps(self, like, context)

    def _direct(self, h: Tensor) -> Tensor:
        """A·h: (..., C, P)."""
        out: Tensor = self.direct(h)
        return out.unflatten(-1, (self.channels, self.out))

    def _places(self, context: Tensor | None) -> Tensor:
        if self.from_context is None or context is None:
            return self.place.unsqueeze(0)
        rows = context.reshape(math.prod(context.shape[:-1]), 1, context.shape[-1])
        return self.place + self.from_context(rows)


class _CausalSteps:
    """Positions by the cached network, and the entries of each by the steps of the head."""

    def __init__(self, net: Causal, like: Tensor, context: Tensor | None) -> None:
        self.net, self.batch, self.position = net, like.shape[:-1], 0
        self.next_features = net.cached(net._places(context))
        self._enter(like.new_zeros(math.prod(self.batch), net.channels))

    def _enter(self, before: Tensor) -> None:
        """Go to the next position, after the token ``before``."""
        self.token: list[Tensor] = []
        h = self.next_features(before)
        self.head, self.direct = self.net.head.steps(before, h), self.net._direct(h)

    def params(self) -> Tensor:
        out = self.head.params() + self.direct[:, len(self.token)]
        return out.reshape(*self.batch, out.shape[-1])

    def push(self, x: Tensor) -> None:
        self.token.append(x.reshape(math.prod(self.batch)))
        if len(self.token) < self.net.channels:
            self.head.push(self.token[-1])
            return
        self.position += 1
        if self.position < self.net.positions:
            self._enter(torch.stack(self.token, -1))


def token_indices(event: tuple[int, ...], patch: int = 1) -> Tensor:
    """Flat indices of the entries of every position, (T, C); those of a patch by rows, columns,
    channels.
    """
    index = torch.arange(math.prod(event)).reshape(event)
    if len(event) in (1, 2) and patch == 1:
        return index.reshape(event[0], -1)
    if len(event) != 3 or event[1] % patch or event[2] % patch:
        raise ValueError(
            f"got an event {event} with patches of {patch}; expected (L,) or (L, C) without patches, or (C, H, W) with "
            "H and W multiples of the patch; pad the image or use a patch that divides it"
        )
    c, h, w = event
    return (
        index.reshape(c, h // patch, patch, w // patch, patch)
        .permute(1, 3, 2, 4, 0)
        .reshape(-1, c * patch**2)
    )


def shifted(x: Tensor, by: int, dim: int = -2) -> Tensor:
    """x shifted along an axis, with zeros first."""
    size = x.shape[dim]
    by = min(by, size)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, by)), x.narrow(dim, 0, size - by)], dim)


def gate(x: Tensor) -> Tensor:
    """tanh(a)·sigmoid(b) of the two halves of x."""
    a, b = x.chunk(2, -1)
    return a.tanh() * b.sigmoid()


class _Dilated(nn.Module):
    """A gated causal convolution with two taps, at t and t − dilation: the next input, and a skip
    output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.taps = nn.Linear(2 * width, 2 * width)
        self.out = nn.Linear(width, 2 * width)

    def forward(self, now: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        more, skip = self.out(gate(self.taps(torch.cat([before, now], -1)))).chunk(2, -1)
        return now + more, skip


class WaveNet(Causal):
    """Dilated causal convolutions over a sequence, with kernel 2 and dilations 1, 2, 4, … (van den
    Oord et al. 2016).

    Args:
        event, params, width, reverse, context_dim: as for ``Causal``.
        depth: layers, with a receptive field of 2^depth positions; by default all positions, at
            most 1,024.
    """

    def __init__(
        self,
        event: Shape,
        params: int,
        width: int = 32,
        depth: int | None = None,
        reverse: bool = False,
        context_dim: int = 0,
    ) -> None:
        super().__init__(event, params, width, 1, reverse, context_dim)
        if len(self.event) > 2:
            raise ValueError(
                f"WaveNet takes sequences (L,) or (L, C), got {self.event}; use PixelCNN for images"
            )
        enough = min(max((self.positions - 1).bit_length(), 1), 10)
        depth = check_size(enough if depth is None else depth, "the depth of WaveNet")
        self.dilations = tuple(2**i for i in range(depth))
        self.embed = nn.Linear(self.channels, width)
        self.layers: Modules[_Dilated] = nn.ModuleList(_Dilated(width) for _ in range(depth))  # type: ignore[assignment]

    def features(self, tokens: Tensor, place: Tensor) -> Tensor:
        h = self.embed(shifted(tokens, 1)) + place
        skips = torch.zeros_like(h)
        for layer, dilation in zip(self.layers, self.dilations, strict=True):
            h, skip = layer(h, shifted(h, dilation))
            skips = skips + skip
        return F.relu(skips)

    def cached(self, place: Tensor) -> NextFeatures:
        positions = iter(place.unbind(1))
        inputs: list[list[Tensor]] = []  # of each layer, at the last ``dilation`` positions

        def next_features(token: Tensor) -> Tensor:
            h = self.embed(token) + next(positions)
            if not inputs:
                inputs.extend([torch.zeros_like(h)] * dilation for dilation in self.dilations)
            skips = torch.zeros_like(h)
            for layer, past in zip(self.layers, inputs, strict=True):
                past.append(h)
                h, skip = layer(h, past.pop(0))
                skips = skips + skip
            return F.relu(skips)

        return next_features


class _GatedPair(nn.Module):
    """One layer of both stacks: ``down`` over rows above, ``across`` over pixels to the left and
    that output.
    """

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.rows = nn.Conv2d(width, 2 * width, (reach + 1, 2 * reach + 1))
        self.link = nn.Linear(2 * width, 2 * width)
        self.taps = nn.Linear((reach + 1) * width, 2 * width)
        self.out = nn.Linear(width, 2 * width)

    def down(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """v (N, reach + R, W, width), past rows first, to the next v (N, R, W, width) and the input
        of ``across``.
        """
        sides = F.pad(v, (0, 0, self.reach, self.reach)).movedim(-1, 1)
        seen = F.conv2d(sides, self.rows.weight, self.rows.bias).movedim(1, -1)
        return v[:, self.reach :] + gate(seen), self.link(seen)

    def across(self, taps: list[Tensor], seen: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels from ``reach`` to the left up to here, each (..., width), to the next h and
        the skip.
        """
        more, skip = self.out(gate(self.taps(torch.cat(taps, -1)) + seen)).chunk(2, -1)
        return taps[-1] + more, skip


class PixelCNN(Causal):
    """Gated convolutions over an image in two stacks without a blind spot (van den Oord et al.
    2016, gated PixelCNN).

    v_ij depends on the rows above i, h_ij on those and on the pixels to the left of j.

    Args:
        event: (C, H, W).
        params, width, reverse, context_dim: as for ``Causal``.
        depth: layers; each extends the receptive field by kernel // 2, by default to all preceding
            pixels.
        kernel: the odd size of the kernels, at least 3.
    """

    def __init__(
        self,
        event: Sequence[int],
        params: int,
        width: int = 32,
        depth: int | None = None,
        kernel: int = 5,
        reverse: bool = False,
        context_dim: int = 0,
    ) -> None:
        if isinstance(event, int) or len(event) != 3:
            raise ValueError(
                f"PixelCNN takes images (C, H, W), got {event}; use WaveNet for sequences"
            )
        super().__init__(event, params, width, 1, reverse, context_dim)
        if kernel < 3 or kernel % 2 == 0:
            raise ValueError(f"the kernel of PixelCNN must be odd and 3 or more, got {kernel}")
        _, self.height, self.columns = self.event
        reach = kernel // 2
        enough = max(1, math.ceil(max(self.columns - 1, self.height - 2) / reach))
        depth = check_size(enough if depth is None else depth, "the depth of PixelCNN")
        self.embed_above, self.embed_left = (
            nn.Linear(self.channels, width),
            nn.Linear(self.channels, width),
        )
        self.layers: Modules[_GatedPair] = nn.ModuleList(
            _GatedPair(width, reach) for _ in range(depth)
        )  # type: ignore[assignment]

    def features(self, tokens: Tensor, place: Tensor) -> Tensor:
        pixels, place = (t.unflatten(1, (self.height, self.columns)) for t in (tokens, place))
        v = self.embed_above(shifted(pixels, 1, -3)) + place
        h = self.embed_left(shifted(pixels, 1, -2)) + place
        skips = torch.zeros_like(h)
        for layer in self.layers:
            v, seen = layer.down(F.pad(v, (0, 0, 0, 0, layer.reach, 0)))
            h, skip = layer.across([shifted(h, k) for k in range(layer.reach, -1, -1)], seen)
            skips = skips + skip
        return F.relu(skips).flatten(1, 2)

    def cached(self, place: Tensor) -> NextFeatures:
        return _PixelCNNCache(self, place.unflatten(1, (self.height, self.columns)))


class _PixelCNNCache:
    """The stack of rows advances when a row is complete and keeps its last rows; the other keeps
    its last pixels.
    """

    def __init__(self, net: PixelCNN, place: Tensor) -> None:
        self.net, self.place, self.position = net, place, 0
        self.row: list[Tensor] = []  # tokens of the row above, then of this one
        self.above: list[Tensor] = []  # inputs of each layer in the last rows, (N, reach, W, width)
        self.seen: list[Tensor] = []  # outputs of the row stack for this row, (N, W, 2·width)
        self.left: list[list[Tensor]] = []  # inputs of each layer at the last pixels of this row

    def __call__(self, token: Tensor) -> Tensor:
        net = self.net
        i, j = divmod(self.position, net.columns)
        if j == 0:
            self._enter_row(
                torch.stack([*self.row, token][1:] if i else [token] * net.columns, 1), i
            )
            self.row, token = [], torch.zeros_like(token)
        h = net.embed_left(token) + self.place[:, i, j]
        if j == 0:
            self.left = [[torch.zeros_like(h)] * layer.reach for layer in net.layers]
        self.row.append(token)
        skips = torch.zeros_like(h)
        for layer, seen, left in zip(net.layers, self.seen, self.left, strict=True):
            left.append(h)
            h, skip = layer.across(left, seen[:, j])
            left.pop(0)
            skips = skips + skip
        self.position += 1
        return F.relu(skips)

    def _enter_row(self, pixels: Tensor, i: int) -> None:
        """Advance the row stack by the pixels (N, W, C) of the row above row i, zeros above row
        0.
        """
        v = (self.net.embed_above(pixels) + self.place[:, i]).unsqueeze(1)
        self.seen = []
        for k, layer in enumerate(self.net.layers):
            if i == 0:
                self.above.append(torch.zeros_like(v).expand(-1, layer.reach, -1, -1))
            rows = torch.cat([self.above[k], v], 1)
            self.above[k] = rows[:, 1:]
            v, seen = layer.down(rows)
            self.seen.append(seen.squeeze(1))


def causal_flow(
    layers: int, elementwise: Elementwise | None, build: Callable[[int, bool], Causal]
) -> Chain:
    """Inverted autoregressive layers of alternating order: densities in one pass, draws step by
    step.
    """
    g = elementwise or Affine()
    parts = (
        Autoregressive(g, build(g.params, bool(i % 2)))
        for i in range(check_size(layers, "the number of layers"))
    )
    return Chain(*(Inverse(part) for part in parts))


def wavenet(
    shape: Shape,
    layers: int = 2,
    width: int = 32,
    depth: int | None = None,
    elementwise: Elementwise | None = None,
    context_dim: int = 0,
) -> Chain:
    """Autoregressive flow of sequences by dilated convolutions, with fast densities (van den Oord
    et al. 2016).
    """
    return causal_flow(
        layers,
        elementwise,
        lambda params, reverse: WaveNet(shape, params, width, depth, reverse, context_dim),
    )


def pixelcnn(
    shape: Sequence[int],
    layers: int = 1,
    width: int = 32,
    depth: int | None = None,
    kernel: int = 5,
    elementwise: Elementwise | None = None,
    context_dim: int = 0,
) -> Chain:
    """Autoregressive flow of images by a gated PixelCNN, with fast densities (van den Oord et al.
    2016).
    """
    return causal_flow(
        layers,
        elementwise,
        lambda params, reverse: PixelCNN(shape, params, width, depth, kernel, reverse, context_dim),
    )
