"""Discrete base distributions: the probability of every symbol given the preceding ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot

from bayou.core.modules import Modules
from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.bases import NoiseBase
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Rows
from bayou.flows.discrete import codec
from bayou.flows.layers.conditioners import Conditioner

Choose = Callable[[list[int], Tensor], Tensor]
Floats = NDArray[np.float64]
MIN_LOG_SCALE = -5.0  # of a logistic, with which the probability of one integer is 1 up to 1e-32
MAX_COMPONENT_OFFSET = 0.8  # of initial means, in units of L/2
MIN_PROBABILITY = 1e-6  # of the uniform noise of a draw


class Groups(nn.Module):
    r"""A conditioner of a ``DiscreteBase`` by groups: one pass of a network for each group.

    The parameters of a group of symbols depend on the preceding groups. The input of a network is x
    with unknown symbols set to 0, and the mask of known symbols, concatenated along the first axis:
    (n, 2·C, ...) → (n, C·P, ...) for events (C, ...) and P parameters per symbol. G groups cost G
    passes, where a ``Conditioner`` that takes one symbol after another costs D.

    Args:
        groups: the index of the group of each symbol, (\*event), from 0 to G − 1; for example from
            ``quincunx``.
        nets: one network for all groups, or one for each.

    Raises:
        ValueError: if the number of networks is neither 1 nor the number of groups.

    Example:
        >>> import torch
        >>> from bayou.flows import DiscretizedLogistic, Groups, quincunx
        >>> nets = [torch.nn.Conv2d(2, 3, 3, padding=1)]  # one channel, 3 parameters per pixel
        >>> groups = Groups(quincunx((1, 4, 4), levels=1), nets)
        >>> base = DiscretizedLogistic((1, 4, 4), levels=16, conditioner=groups, bounded=True)
        >>> base.draw(5, seed=0).shape
        torch.Size([5, 1, 4, 4])
    """

    known: Tensor

    def __init__(self, groups: Tensor, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        count = int(groups.max()) + 1
        if len(nets) not in (1, count):
            raise ValueError(
                f"Groups takes one network, or one for each of {count} groups; got {len(nets)}"
            )
        self.nets: Modules[nn.Module] = nn.ModuleList(nets)  # type: ignore[assignment]
        self.register_buffer("known", torch.stack([groups < g for g in range(count)]))
        self.members: list[list[Any]] = [
            (groups.flatten() == g).nonzero()[:, 0].tolist() for g in range(count)
        ]

    def group(self, x: Tensor, g: int) -> Tensor:
        """Compute parameters (..., D, P), valid for the symbols of group g.

        Args:
            x: events (..., *event), whose symbols of group g and later ones are ignored.
            g: the index of the group.
        """
        is_known = self.known[g].to(x)
        event_dims = self.known.ndim - 1
        inputs = torch.cat([x * is_known, is_known.expand_as(x)], -event_dims)
        batch = x.shape[: x.ndim - event_dims]
        net = self.nets[g % len(self.nets)]
        params: Tensor = net(inputs.reshape(-1, *inputs.shape[len(batch) :]))
        params = params.unflatten(1, (x.shape[-event_dims], -1)).movedim(2, -1).flatten(1, -2)
        return params.reshape(*batch, *params.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Compute the parameters of all symbols, (..., D, P).

        Args:
            x: events (..., *event).
        """
        params = self.group(x, 0)
        for g in range(1, len(self.members)):
            is_known = self.known[g].flatten().unsqueeze(-1)
            params = torch.where(is_known, params, self.group(x, g))
        return params


def quincunx(event: Sequence[int], levels: int) -> Tensor:
    """Assign the pixels of an image to groups, from coarse to fine.

    Group 0 has every 2^levels-th pixel of every 2^levels-th row; each further group doubles the
    number of pixels.

    Args:
        event: (C, H, W).
        levels: the number of times that the distance of known pixels is halved.

    Returns:
        The index of the group of every pixel, 0 .. 2·levels, of shape (C, H, W).

    Example:
        >>> from bayou.flows import quincunx
        >>> quincunx((1, 2, 4), levels=1)[0]
        tensor([[0, 2, 0, 2],
                [2, 1, 2, 1]])
    """
    channels, height, width = event
    row = torch.arange(height)[:, None]
    column = torch.arange(width)[None]
    group = torch.zeros(height, width, dtype=torch.long)
    for level in range(levels):
        step = 2 ** (levels - level)
        is_odd_row = row % step == step // 2
        is_odd_column = column % step == step // 2
        is_even_row = row % step == 0
        is_even_column = column % step == 0
        group[is_odd_row & is_odd_column] = 2 * level + 1
        group[(is_odd_row & is_even_column) | (is_even_row & is_odd_column)] = 2 * level + 2
    return group.expand(channels, height, width).clone()


class DiscreteBase(NoiseBase):
    r"""A distribution of integers, log p(x) = Σ_d log p(x_d | x_{<d}), which a codec can use.

    A ``conditioner`` computes the parameters (..., D, P) of all D symbols from preceding ones: a
    ``Conditioner``, one symbol after another, or ``Groups``. Without one the symbols are
    independent, with learned parameters. ``Flow.compress`` codes data of a flow with such a base.

    Args:
        event: the shape of an event.
        symbols: the number of symbols of an event, D.
        first: the parameters (P,) of a symbol before anything is learned, to which those that are
            learned are added.
        conditioner: a network of all symbols, or None for independent symbols.

    Raises:
        ValueError: if the conditioner has other numbers of symbols or parameters.
    """

    symbols: int  # D
    # The least and the largest symbol; None for all integers.
    window: tuple[int, int] | None = None
    first: Tensor

    def __init__(
        self,
        event: int | Sequence[int],
        symbols: int,
        first: Tensor,
        conditioner: Conditioner | Groups | None,
    ) -> None:
        super().__init__(event)
        self.symbols = symbols
        self.conditioner = conditioner
        self.register_buffer("first", first)
        if conditioner is None:
            self.table: nn.Parameter = nn.Parameter(torch.zeros(symbols, len(first)))
        elif isinstance(conditioner, Conditioner):
            sizes = (symbols, len(first))
            if (conditioner.dim, conditioner.out) != sizes:
                raise ValueError(
                    f"{type(self).__name__} has {symbols} symbols of {len(first)} parameters, its "
                    f"conditioner gives {conditioner.dim} of {conditioner.out}; build it with "
                    f"dim={symbols}, params={len(first)}"
                )

    @abstractmethod
    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        """Compute log p of symbols (...), or one-hot rows (..., K), from parameters (..., P).

        Args:
            x: symbols, or one-hot rows if events consist of these.
            params: the parameters of each symbol, from ``params``.
        """

    @abstractmethod
    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of ``below`` for parameters (n, P): tensors (..., n).

        Args:
            params: the parameters of n symbols.
        """

    @staticmethod
    @abstractmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        """Compute P(symbol < k), (..., n).

        This is elementwise and in numpy, so that it does not depend on the batch.

        Args:
            k: symbols (..., n).
            tables: from ``tables``, for the n symbols.
        """

    @abstractmethod
    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        """Draw symbols (...) from uniform noise (..., 2) and parameters (..., P).

        Args:
            u: uniform noise in [0, 1).
            params: the parameters of each symbol.
        """

    @abstractmethod
    def encode_symbols(self, symbols: Tensor) -> Tensor:
        """Return the input of the conditioner for these symbols.

        Args:
            symbols: symbols of any shape.
        """

    def as_symbols(self, x: Tensor) -> Tensor:
        """Return the symbols (..., D) of events (..., *event).

        Args:
            x: events.
        """
        return x.flatten(-len(self.event_shape))

    def as_event(self, symbols: Tensor) -> Tensor:
        """Return the events (..., *event) of symbols (..., D).

        Args:
            symbols: all D symbols of each event.
        """
        return symbols.reshape(*symbols.shape[:-1], *self.event_shape)

    def params(self, x: Tensor) -> Tensor:
        """Compute the parameters (..., D, P) of all symbols of events x.

        Args:
            x: events (..., *event).
        """
        if self.conditioner is None:
            return self.first + self.table
        inputs = self._conditioner_inputs(x)
        return self.first + self.conditioner(inputs)

    def _conditioner_inputs(self, x: Tensor) -> Tensor:
        """Return the input of the conditioner for events, in the shape that it takes."""
        if not isinstance(self.conditioner, Groups):
            x = x.flatten(-len(self.event_shape))
        return self.encode_symbols(x)

    def unroll(self, batch: Sequence[int], choose: Choose) -> Tensor:
        """Choose symbols stage by stage, so that parameters depend on the ones before.

        Args:
            batch: the batch shape.
            choose: called as ``choose(indices, parameters)`` with the indices of n symbols and
                their parameters (*batch, n, P); returns the symbols, (*batch, n).

        Returns:
            Symbols (*batch, D).
        """
        x = self.anchor.new_zeros(*batch, self.symbols)
        if self.conditioner is None:
            params = (self.first + self.table).expand(*batch, -1, -1)
            return choose(list(range(self.symbols)), params)
        if isinstance(self.conditioner, Groups):
            for g, members in enumerate(self.conditioner.members):
                params = self.conditioner.group(self.encode_symbols(self.as_event(x)), g)[
                    ..., members, :
                ]
                x[..., members] = choose(members, self.first + params)
            return x
        steps = self.conditioner.steps(self.encode_symbols(x))
        for d in self.conditioner.coordinates:
            x[..., d : d + 1] = choose([d], (self.first + steps.params()).unsqueeze(-2))
            steps.push(self.encode_symbols(x[..., d]))
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log-probability.

        Args:
            x: events (..., *event_shape) of integers, as floats.

        Returns:
            Log-probabilities (...).
        """
        return self.log_mass(self.as_symbols(x), self.params(x)).sum(-1)

    def compress(self, flow: Flow, y: Tensor, context: Tensor | None = None) -> bytes:
        """Encode data with a flow of this base; see ``Flow.compress``.

        Args:
            flow: a flow with this base.
            y: data (..., *event) of the flow.
            context: (..., context_dim), for a flow with a context.
        """
        return codec.compress(flow, y, context)

    def decompress(self, flow: Flow, data: bytes, context: Tensor | None = None) -> Tensor:
        """Decode data with a flow of this base; see ``Flow.decompress``.

        Args:
            flow: a flow with this base.
            data: the output of ``compress``.
            context: the context that was passed to ``compress``.
        """
        return codec.decompress(flow, data, context)

    @torch.no_grad()
    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        """Return draws (n, *batch, *event_shape), which have no gradient."""
        u = rows.uniform(*batch, self.symbols, 2)

        def choose(members: list[int], params: Tensor) -> Tensor:
            return self.pick(u[..., members, :], params)

        return self.as_event(self.unroll((*rows.batch, *batch), choose))


def logistic_log_mass(
    x: Tensor,
    mean: Tensor,
    steep: Tensor,
    window: tuple[int, int] | None,
) -> Tensor:
    """Compute log[σ(b) − σ(a)] with a, b = (x ∓ ½ − mean)·steep, the log-probability of integers.

    It is log σ(b) + log σ(−a) + log(1 − exp(−steep)), which is accurate in both tails. The first
    and the last integer of a window include the tails; outside of it the probability is 0.

    Args:
        x: integers, as floats.
        mean: of the logistic distribution.
        steep: 1/scale of it.
        window: the first and the last integer, or None for all integers.
    """
    a = (x - 0.5 - mean) * steep
    below = logsigmoid(a + steep)
    above = logsigmoid(-a)
    log_mass = below + above + (-torch.expm1(-steep)).log()
    if window is None:
        return log_mass
    low, high = window
    log_mass = torch.where(x == low, below, torch.where(x == high, above, log_mass))
    return log_mass.masked_fill((x < low) | (x > high), -torch.inf)


class DiscretizedLogistic(DiscreteBase):
    r"""A distribution of integers: a mixture of discretized logistic distributions.

    p(x) = Σ_k w_k·[σ(b_k) − σ(a_k)] with a_k, b_k = (x ∓ ½ − mean_k)/scale_k for every symbol, the
    mass of a mixture of logistic distributions between x − ½ and x + ½. It is the usual base of
    integer discrete flows.

    Args:
        event: the shape of an event.
        levels: L, the number of values of the data, 256 by default; means are learned in units of
            L/2.
        components: the number of logistic distributions, 1 by default.
        conditioner: a network from preceding symbols to 3·components parameters per symbol, a
            ``Conditioner`` or ``Groups``; None, the default, for independent symbols.
        bounded: whether x is in 0 .. L − 1, and the first and last level include the tails
            (Salimans et al. 2017); by default x is any integer (Hoogeboom et al. 2019).
        mean: the initial mean, (L − 1)/2 by default.
        scale: the initial scale, L/12 by default.

    Raises:
        ValueError: if there are fewer than 2 levels or 1 component, or the conditioner does not
            have the parameters of all symbols.

    Shapes: ``draw`` returns (n, *batch, *event), ``log_prob`` maps (..., *event) to (...).

    Example:
        >>> import bayou.flows as flows
        >>> base = flows.DiscretizedLogistic(4, levels=16, components=2, bounded=True)
        >>> flow = flows.Flow(base, flows.integer(4, levels=16, wrap=True))
        >>> y = flow.sample(10, seed=0)
        >>> y.shape, flow.log_prob(y).shape
        (torch.Size([10, 4]), torch.Size([10]))

    References:
        Salimans, Karpathy, Chen & Kingma 2017, PixelCNN++.
        Hoogeboom, Peters, van den Berg & Welling 2019, Integer Discrete Flows and Lossless
        Compression.
    """

    def __init__(
        self,
        event: int | Sequence[int],
        levels: int = 256,
        components: int = 1,
        conditioner: Conditioner | Groups | None = None,
        bounded: bool = False,
        mean: float | None = None,
        scale: float | None = None,
    ) -> None:
        self.levels: int = check_size(levels, "the levels of DiscretizedLogistic", 2)
        self.unit: float = levels / 2
        check_size(components, "the components of DiscretizedLogistic")
        self.center: float = (levels - 1) / 2 if mean is None else float(mean)
        self.log_scale: float = math.log(levels / 12 if scale is None else scale)
        offsets = torch.zeros(1)
        if components > 1:
            offsets = torch.linspace(-MAX_COMPONENT_OFFSET, MAX_COMPONENT_OFFSET, components)
        first = torch.cat([torch.zeros(components), offsets, torch.zeros(components)])
        super().__init__(event, math.prod(as_event(event)), first, conditioner)
        self.window: tuple[int, int] | None = (0, levels - 1) if bounded else None

    def _mixture(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log w, mean and 1/scale of the components, (..., K) each."""
        logits, mean, log_scale = params.unflatten(-1, (3, -1)).unbind(-2)
        log_scale = (self.log_scale + log_scale).clamp_min(MIN_LOG_SCALE)
        return logits.log_softmax(-1), self.center + self.unit * mean, (-log_scale).exp()

    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        """Compute log p of symbols (...) from parameters (..., 3·K)."""
        log_w, mean, steep = self._mixture(params)
        return (log_w + logistic_log_mass(x.unsqueeze(-1), mean, steep, self.window)).logsumexp(-1)

    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        """Return w, mean + ½ and 1/(2·scale), (K, n) each, from parameters (n, 3·K)."""
        log_w, mean, steep = (tensor.mT for tensor in self._mixture(params))
        return log_w.exp(), mean + 0.5, steep / 2

    @staticmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        """Compute P(symbol < k) = Σ w·(½ + ½ tanh((k − edge)·steep)), (..., n)."""
        w, edge, steep = (t[(slice(None), *[None] * (k.ndim - 1))] for t in tables)
        return (w * (0.5 + 0.5 * np.tanh((k - edge) * steep))).sum(0)

    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        """Draw symbols from uniform noise (..., 2): one for the component, one for its value."""
        log_w, means, steeps = self._mixture(params)
        component = torch.zeros_like(u[..., :1], dtype=torch.long)
        if log_w.shape[-1] > 1:  # graphs of ONNX cannot sum over no edges
            edges = log_w.exp().cumsum(-1)[..., :-1]
            component = (u[..., :1] >= edges).sum(-1, keepdim=True)
        mean = means.expand(*u.shape[:-1], -1).gather(-1, component)
        steep = steeps.expand(*u.shape[:-1], -1).gather(-1, component)
        logits = u[..., 1:].clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY).logit()
        x = (mean + logits / steep).squeeze(-1).round()
        return x if self.window is None else x.clamp(*self.window)

    def encode_symbols(self, symbols: Tensor) -> Tensor:
        """Return the symbols in units of L/2, around their initial mean."""
        return (symbols - self.center) / self.unit


class Categorical(DiscreteBase):
    """A distribution of D symbols of K classes, as one-hot rows: the base of modulo flows.

    log p(x) = Σ_d x_d · log softmax(logits_d) with logits that are learned, or that a conditioner
    computes from the preceding rows. ``Flow(Categorical(D, K), OneHot(D, K))`` is a distribution of
    class indices.

    Args:
        dim: the number of symbols D.
        classes: the number of classes K, at least 2.
        conditioner: a network (..., D, K) → (..., D, K) from preceding rows to logits, such as
            ``OneHotMADE``; None, the default, for independent symbols with learned logits.

    Raises:
        ValueError: if there are fewer than 2 classes, or the conditioner has other sizes.

    Shapes: ``draw`` returns (n, *batch, D, K), ``log_prob`` maps (..., D, K) to (...).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.Categorical(4, 3), flows.modulo(4, classes=3))
        >>> y = flow.sample(10, seed=0)
        >>> y.shape, flow.log_prob(y).shape
        (torch.Size([10, 4]), torch.Size([10]))

    References:
        Tran, Vafa, Agrawal, Dinh & Poole 2019, Discrete Flows: Invertible Generative Models of
        Discrete Data.
    """

    def __init__(self, dim: int, classes: int, conditioner: Conditioner | None = None) -> None:
        event = (dim, check_size(classes, "the classes of Categorical", 2))
        super().__init__(event, dim, torch.zeros(classes), conditioner)
        self.classes = classes
        self.window: tuple[int, int] | None = (0, classes - 1)

    def _conditioner_inputs(self, x: Tensor) -> Tensor:
        """Return one-hot rows, which the conditioner takes as they are."""
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log-probability.

        Args:
            x: one-hot rows (..., D, K).

        Returns:
            Log-probabilities (...).
        """
        return self.log_mass(x, self.params(x)).sum(-1)

    def as_symbols(self, x: Tensor) -> Tensor:
        """Return the class indices (..., D) of one-hot rows."""
        return x.argmax(-1).to(x)

    def as_event(self, symbols: Tensor) -> Tensor:
        """Return one-hot rows (..., D, K) of class indices."""
        return self.encode_symbols(symbols)

    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        """Compute log p of one-hot rows (..., K) from logits (..., K)."""
        return (x * params.log_softmax(-1)).sum(-1)

    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        """Return the cumulative probabilities (K + 1, n), from 0, of logits (n, K)."""
        return (torch.nn.functional.pad(params.softmax(-1).cumsum(-1), (1, 0)).mT,)

    @staticmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        """Look up P(class < k), (..., n)."""
        return tables[0][k, np.arange(k.shape[-1])]

    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        """Draw class indices from uniform noise (..., 2), of which the first number is used."""
        return (u[..., :1] >= params.softmax(-1).cumsum(-1)[..., :-1]).sum(-1).to(u)

    def encode_symbols(self, symbols: Tensor) -> Tensor:
        """Return one-hot rows (..., K) of class indices (...)."""
        return one_hot(symbols.long(), self.classes).to(self.anchor)
