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
NextFeatures = Callable[[Tensor], Tensor]  # from token t − 1 (N, C), first zeros, to h_t (N, width)
MAX_DEFAULT_WAVENET_LAYERS = 10  # with a receptive field of 1,024 positions


class Causal(Conditioner):
    """A conditioner of sequences or images by a causal network over positions t.

    Position t has a token x_t of C numbers. The network computes h_t = f(x_{<t}, context), and
    entry c of the token has the parameters A_c·h_t + made_c(x_{t,<c}, h_t). A subclass implements
    ``features`` (h at all positions) and ``start_features`` (one position after another).

    Args:
        event: (L,) or (L, C), or (C, H, W), whose positions are pixels or patches in raster order.
        params: the number of parameters P per coordinate.
        width: the size of h.
        patch: the side of a patch of an image; 1 by default.
        reverse: whether to process the coordinates from the last to the first; False by default.
        context_dim: the size of the context; 0, the default, for none.

    Attributes:
        positions: the number T of positions.
        channels: the number C of entries of a token.

    Shapes: x (..., D) with D = T·C, context (..., context_dim), output (..., D, P).
    """

    channels: int
    positions: int

    back: Tensor  # back[d]: the index of coordinate d in the order

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
        sizes = tuple(check_size(size, name) for size in shape)
        indices = token_indices(sizes, check_size(patch, "a patch"))
        order = indices.flatten()
        if reverse:
            order = order.flip(0)
        super().__init__(indices.numel(), params, order, context_dim)
        self.event: tuple[int, ...] = shape
        self.register_buffer("back", self.order.argsort(), persistent=False)
        self.positions, self.channels = indices.shape
        self.width: int = check_size(width, f"the width of {name}")
        self.place: nn.Parameter = nn.Parameter(
            torch.zeros(self.positions, width)
        )  # embeddings of positions
        self.from_context: nn.Linear | None = (
            nn.Linear(context_dim, width, bias=False) if context_dim else None
        )
        self.head: MADE = MADE(self.channels, params, (width,), context_dim=width)
        self.direct: nn.Linear = zero_init(nn.Linear(width, self.channels * params, bias=False))

    @abstractmethod
    def features(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """Return h (N, T, width) at all positions.

        Args:
            tokens: (N, T, C).
            embeddings: those of the positions, (N or 1, T, width).
        """

    @abstractmethod
    def start_features(self, embeddings: Tensor) -> NextFeatures:
        """Return a function that returns h_t (N, width), one position after another.

        It is called with token t − 1 (N, C), first with zeros, and keeps what later positions need.

        Args:
            embeddings: those of the positions, (N or 1, T, width).
        """

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        batch = x.shape[:-1]
        # index_select: the gradient of x[:, order] sorts its indices on a GPU
        in_order = x.index_select(-1, self.order)
        tokens = in_order.reshape(math.prod(batch), self.positions, self.channels)
        h = self.features(tokens, self.position_embeddings(context))
        out = self.head(tokens, h) + self.direct_params(h)  # (N, T, C, P)
        params = out.flatten(1, 2).index_select(1, self.back)
        return params.reshape(*batch, self.dim, self.out)

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        return _CausalSteps(self, like, context)

    def direct_params(self, h: Tensor) -> Tensor:
        """Return A·h.

        Args:
            h: (..., width).

        Returns:
            Parameters (..., C, P).
        """
        out: Tensor = self.direct(h)
        return out.unflatten(-1, (self.channels, self.out))

    def position_embeddings(self, context: Tensor | None) -> Tensor:
        """Return the embeddings of positions (N or 1, T, width), which include the context.

        Args:
            context: (..., context_dim), or None.
        """
        if self.from_context is None or context is None:
            return self.place.unsqueeze(0)
        rows = context.reshape(math.prod(context.shape[:-1]), 1, context.shape[-1])
        return self.place + self.from_context(rows)


class _CausalSteps:
    """The evaluation of a ``Causal`` network one coordinate at a time.

    Positions are evaluated by the network with its cache, the entries of a token by the steps of
    the head.

    Attributes:
        token: the known entries of the token at the current position, (N,) each.
    """

    def __init__(self, net: Causal, template: Tensor, context: Tensor | None) -> None:
        self.net = net
        self.batch = template.shape[:-1]
        self.position = 0
        self.next_features = net.start_features(net.position_embeddings(context))
        self._enter_position(template.new_zeros(math.prod(self.batch), net.channels))

    def _enter_position(self, previous_token: Tensor) -> None:
        """Compute h of the next position, after its previous token (N, C)."""
        self.token: list[Tensor] = []
        h = self.next_features(previous_token)
        self.head = self.net.head.steps(previous_token, h)
        self.direct = self.net.direct_params(h)

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
            self._enter_position(torch.stack(self.token, -1))


def token_indices(event: tuple[int, ...], patch: int = 1) -> Tensor:
    """Return the flat indices of the entries of every position.

    The entries of a patch are ordered by rows, columns and channels.

    Args:
        event: (L,), (L, C) or (C, H, W).
        patch: the side of a patch of an image; 1 by default.

    Returns:
        Indices (T, C).

    Raises:
        ValueError: for another event, or a patch that does not divide the image.
    """
    index = torch.arange(math.prod(event)).reshape(event)
    if len(event) in (1, 2) and patch == 1:
        return index.reshape(event[0], -1)
    if len(event) != 3 or event[1] % patch or event[2] % patch:
        raise ValueError(
            f"got an event {event} with patches of {patch}; expected (L,) or (L, C) without "
            "patches, or (C, H, W) with H and W multiples of the patch; pad the image or use a "
            "patch that divides it"
        )
    channels, height, width = event
    patches = index.reshape(channels, height // patch, patch, width // patch, patch)
    return patches.permute(1, 3, 2, 4, 0).reshape(-1, channels * patch**2)


def shift(x: Tensor, distance: int, dim: int = -2) -> Tensor:
    """Return x shifted to higher indices along an axis, with zeros first.

    Args:
        x: any tensor.
        distance: the number of indices.
        dim: the axis, −2 by default.
    """
    size = x.shape[dim]
    distance = min(distance, size)
    zeros = torch.zeros_like(x.narrow(dim, 0, distance))
    return torch.cat([zeros, x.narrow(dim, 0, size - distance)], dim)


def gate(x: Tensor) -> Tensor:
    """Compute tanh(a)·sigmoid(b) of the two halves (a, b) of x.

    Args:
        x: (..., 2·width).
    """
    a, b = x.chunk(2, -1)
    return a.tanh() * b.sigmoid()


class _DilatedConv(nn.Module):
    """A gated causal convolution with two taps, at t and t − dilation.

    It returns the input of the next layer and a skip output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.taps = nn.Linear(2 * width, 2 * width)
        self.out = nn.Linear(width, 2 * width)

    def forward(self, current: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
        hidden = gate(self.taps(torch.cat([earlier, current], -1)))
        update, skip = self.out(hidden).chunk(2, -1)
        return current + update, skip


class WaveNet(Causal):
    """A conditioner of sequences by dilated causal convolutions.

    Layer i has a kernel of two taps, at t and t − 2^i, and the gate tanh(a)·sigmoid(b); the skip
    outputs of all layers are summed to h_t. Draws are computed with a cache of each layer's last
    inputs (van den Oord et al. 2016, WaveNet).

    Args:
        event: (L,) or (L, C).
        params: the number of parameters P per coordinate.
        width: the number of channels of each layer, 32 by default.
        depth: the number of layers, with a receptive field of 2^depth positions; by default as many
            as see all positions, at most 10 (1,024 positions).
        reverse: whether to process the coordinates from the last to the first; False by default.
        context_dim: the size of the context; 0, the default, for none.

    Shapes: x (..., D) with D = L·C, context (..., context_dim), output (..., D, P).

    Raises:
        ValueError: for images.

    Example:
        >>> import torch
        >>> from bayou.flows import WaveNet
        >>> WaveNet((16, 2), params=2)(torch.zeros(10, 32)).shape
        torch.Size([10, 32, 2])
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
        if depth is None:
            depth = max((self.positions - 1).bit_length(), 1)
            depth = min(depth, MAX_DEFAULT_WAVENET_LAYERS)
        check_size(depth, "the depth of WaveNet")
        self.dilations: tuple[int, ...] = tuple(2**i for i in range(depth))
        self.embed: nn.Linear = nn.Linear(self.channels, width)
        self.layers: Modules[_DilatedConv] = nn.ModuleList(  # type: ignore[assignment]
            _DilatedConv(width) for _ in range(depth)
        )

    def features(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        h = self.embed(shift(tokens, 1)) + embeddings
        skips = torch.zeros_like(h)
        for layer, dilation in zip(self.layers, self.dilations, strict=True):
            h, skip = layer(h, shift(h, dilation))
            skips = skips + skip
        return F.relu(skips)

    def start_features(self, embeddings: Tensor) -> NextFeatures:
        position_embeddings = iter(embeddings.unbind(1))
        cache: list[list[Tensor]] = []  # inputs of each layer, at the last ``dilation`` positions

        def next_features(token: Tensor) -> Tensor:
            h = self.embed(token) + next(position_embeddings)
            if not cache:
                cache.extend([torch.zeros_like(h)] * dilation for dilation in self.dilations)
            skips = torch.zeros_like(h)
            for layer, past_inputs in zip(self.layers, cache, strict=True):
                past_inputs.append(h)
                h, skip = layer(h, past_inputs.pop(0))
                skips = skips + skip
            return F.relu(skips)

        return next_features


class _GatedPair(nn.Module):
    """A layer of both stacks of a PixelCNN.

    ``down`` reads the rows above, ``across`` the pixels to the left and the output of ``down``.
    """

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.rows = nn.Conv2d(width, 2 * width, (reach + 1, 2 * reach + 1))
        self.link = nn.Linear(2 * width, 2 * width)
        self.taps = nn.Linear((reach + 1) * width, 2 * width)
        self.out = nn.Linear(width, 2 * width)

    def down(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next v (N, R, W, width) and the input of ``across`` (N, R, W, 2·width).

        Args:
            v: (N, reach + R, W, width), past rows first.
        """
        padded = F.pad(v, (0, 0, self.reach, self.reach)).movedim(-1, 1)
        summary = F.conv2d(padded, self.rows.weight, self.rows.bias).movedim(1, -1)
        return v[:, self.reach :] + gate(summary), self.link(summary)

    def across(self, taps: list[Tensor], rows_above: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next h (..., width) and the skip output.

        Args:
            taps: h at the pixels from ``reach`` to the left up to this one, (..., width) each.
            rows_above: the output of ``down`` (..., 2·width).
        """
        hidden = gate(self.taps(torch.cat(taps, -1)) + rows_above)
        update, skip = self.out(hidden).chunk(2, -1)
        return taps[-1] + update, skip


class PixelCNN(Causal):
    """A conditioner of images by gated convolutions in two stacks, without a blind spot.

    v_ij depends on the rows above i, h_ij on those and on the pixels to the left of j; both use
    the gate tanh(a)·sigmoid(b) (van den Oord et al. 2016, Conditional Image Generation with
    PixelCNN Decoders).

    Args:
        event: (C, H, W).
        params: the number of parameters P per coordinate.
        width: the number of channels of each layer, 32 by default.
        depth: the number of layers, each of which extends the receptive field by kernel // 2; by
            default as many as see all preceding pixels.
        kernel: the odd size of the kernels, at least 3; 5 by default.
        reverse: whether to process the coordinates from the last to the first; False by default.
        context_dim: the size of the context; 0, the default, for none.

    Shapes: x (..., D) with D = C·H·W, context (..., context_dim), output (..., D, P).

    Raises:
        ValueError: for sequences, or an even or smaller kernel.

    Example:
        >>> import torch
        >>> from bayou.flows import PixelCNN
        >>> PixelCNN((1, 6, 6), params=2)(torch.zeros(10, 36)).shape
        torch.Size([10, 36, 2])
    """

    height: int
    columns: int

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
        if depth is None:
            depth = max(1, math.ceil(max(self.columns - 1, self.height - 2) / reach))
        check_size(depth, "the depth of PixelCNN")
        self.embed_above: nn.Linear = nn.Linear(self.channels, width)
        self.embed_left: nn.Linear = nn.Linear(self.channels, width)
        self.layers: Modules[_GatedPair] = nn.ModuleList(  # type: ignore[assignment]
            _GatedPair(width, reach) for _ in range(depth)
        )

    def features(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        grid = (self.height, self.columns)
        pixels = tokens.unflatten(1, grid)
        embeddings = embeddings.unflatten(1, grid)
        v = self.embed_above(shift(pixels, 1, -3)) + embeddings
        h = self.embed_left(shift(pixels, 1, -2)) + embeddings
        skips = torch.zeros_like(h)
        for layer in self.layers:
            v, rows_above = layer.down(F.pad(v, (0, 0, 0, 0, layer.reach, 0)))
            taps = [shift(h, distance) for distance in range(layer.reach, -1, -1)]
            h, skip = layer.across(taps, rows_above)
            skips = skips + skip
        return F.relu(skips).flatten(1, 2)

    def start_features(self, embeddings: Tensor) -> NextFeatures:
        return _PixelCNNCache(self, embeddings.unflatten(1, (self.height, self.columns)))


class _PixelCNNCache:
    """The evaluation of a ``PixelCNN`` one pixel at a time.

    The stack of rows advances when a row is complete and keeps its last rows; the other stack keeps
    its last pixels.

    Attributes:
        row: tokens of the row above after its first pixel, then of this row.
        past_rows: inputs of each layer in the last rows, (N, reach, W, width).
        rows_above: outputs of the row stack for this row, (N, W, 2·width).
        past_pixels: inputs of each layer at the last pixels of this row.
    """

    def __init__(self, net: PixelCNN, embeddings: Tensor) -> None:
        self.net = net
        self.embeddings = embeddings
        self.position = 0
        self.row: list[Tensor] = []
        self.past_rows: list[Tensor] = []
        self.rows_above: list[Tensor] = []
        self.past_pixels: list[list[Tensor]] = []

    def __call__(self, token: Tensor) -> Tensor:
        net = self.net
        i, j = divmod(self.position, net.columns)
        if j == 0:
            self._enter_row(token, i)
            token = torch.zeros_like(token)
        h = net.embed_left(token) + self.embeddings[:, i, j]
        if j == 0:
            self.past_pixels = [[torch.zeros_like(h)] * layer.reach for layer in net.layers]
        self.row.append(token)
        skips = torch.zeros_like(h)
        layers = zip(net.layers, self.rows_above, self.past_pixels, strict=True)
        for layer, rows_above, past_pixels in layers:
            past_pixels.append(h)
            h, skip = layer.across(past_pixels, rows_above[:, j])
            past_pixels.pop(0)
            skips = skips + skip
        self.position += 1
        return F.relu(skips)

    def _enter_row(self, last_token: Tensor, i: int) -> None:
        """Advance the row stack to row i, after the last token of the row above."""
        row_above = [last_token] * self.net.columns  # zeros
        if i > 0:
            row_above = [*self.row[1:], last_token]
        self.row = []
        pixels = torch.stack(row_above, 1)  # (N, W, C)
        v = (self.net.embed_above(pixels) + self.embeddings[:, i]).unsqueeze(1)
        self.rows_above = []
        for k, layer in enumerate(self.net.layers):
            if i == 0:
                self.past_rows.append(torch.zeros_like(v).expand(-1, layer.reach, -1, -1))
            rows = torch.cat([self.past_rows[k], v], 1)
            self.past_rows[k] = rows[:, 1:]
            v, rows_above = layer.down(rows)
            self.rows_above.append(rows_above.squeeze(1))


def causal_flow(
    conditioner: Callable[..., Causal],
    layers: int,
    elementwise: Elementwise | None,
    **options: object,
) -> Chain:
    """Build inverted autoregressive layers of alternating order.

    Densities take one pass of each network, draws one step per position.

    Args:
        conditioner: a class of causal networks.
        layers: the number of layers.
        elementwise: the map of a coordinate; ``Affine()`` for None.
        options: of the networks, besides ``params`` and ``reverse``.
    """
    g = elementwise or Affine()
    maps = []
    for i in range(check_size(layers, "the number of layers")):
        net = conditioner(params=g.params, reverse=i % 2 == 1, **options)
        maps.append(Inverse(Autoregressive(g, net)))
    return Chain(*maps)


def wavenet(
    shape: Shape,
    layers: int = 2,
    width: int = 32,
    depth: int | None = None,
    elementwise: Elementwise | None = None,
    context_dim: int = 0,
) -> Chain:
    """Build an autoregressive flow of sequences by dilated convolutions, with fast densities.

    Each layer maps from data to base by x_t = g(y_t; net(y_{<t})), by default the affine
    x_t = exp(s_t)·y_t + m_t, with ladj = Σ_t log ∂x_t/∂y_t; every second layer reverses the order.
    The density costs one pass of each ``WaveNet``, a draw L steps with a cache.

    Args:
        shape: (L,) or (L, C) of the sequences.
        layers: the number of autoregressive layers, 2 by default.
        width: the number of channels of each convolution, 32 by default.
        depth: the number of convolutions of a layer, with a receptive field of 2^depth positions;
            by default as many as see all positions, at most 10.
        elementwise: the map g of a coordinate; ``Affine()`` by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., L) or (..., L, C).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal((16, 2)), flows.wavenet((16, 2)))
        >>> flow.log_prob(flow.sample(10, seed=0)).shape
        torch.Size([10])

    References:
        van den Oord et al. 2016, WaveNet: A Generative Model for Raw Audio.
    """

    return causal_flow(
        WaveNet,
        layers,
        elementwise,
        event=shape,
        width=width,
        depth=depth,
        context_dim=context_dim,
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
    """Build an autoregressive flow of images by a gated PixelCNN, with fast densities.

    Each layer maps from data to base by x_d = g(y_d; net(y_{<d})) in raster order, by default the
    affine x_d = exp(s_d)·y_d + m_d, with ladj = Σ_d log ∂x_d/∂y_d; every second layer reverses the
    order. The density costs one pass of each ``PixelCNN``, a draw H·W steps with a cache.

    Args:
        shape: (C, H, W) of the images.
        layers: the number of autoregressive layers, 1 by default.
        width: the number of channels of each convolution, 32 by default.
        depth: the number of convolutions of a layer; by default as many as see all preceding
            pixels.
        kernel: the odd size of the kernels, at least 3; 5 by default.
        elementwise: the map g of a coordinate; ``Affine()`` by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., C, H, W).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal((1, 6, 6)), flows.pixelcnn((1, 6, 6), width=8))
        >>> flow.log_prob(flow.sample(10, seed=0)).shape
        torch.Size([10])

    References:
        van den Oord et al. 2016, Conditional Image Generation with PixelCNN Decoders.
    """

    return causal_flow(
        PixelCNN,
        layers,
        elementwise,
        event=shape,
        width=width,
        depth=depth,
        kernel=kernel,
        context_dim=context_dim,
    )
