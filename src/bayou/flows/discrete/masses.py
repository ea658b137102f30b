"""Discrete base distributions: the probability of every symbol given the preceding ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot

from bayou.core import rng
from bayou.core.modules import Modules
from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.bases import Base
from bayou.flows.core.flow import Flow
from bayou.flows.discrete import codec
from bayou.flows.layers.conditioners import Conditioner

Choose = Callable[[list[int], Tensor], Tensor]
Floats = NDArray[np.float64]
MIN_LOG_SCALE = -5.0  # the probability of one integer is then 1 up to 1e-32


class Groups(nn.Module):
    r"""Parameters of a group of symbols from the preceding groups, with one pass of a network per
    group.

    The input of a network is x with unknown symbols set to 0, and the mask of known symbols,
    concatenated along the
    first axis: (..., 2·C, ...) → (..., C·P, ...) for events (C, ...).

    Args:
        groups: the index of the group of each symbol (\*event), for example from ``quincunx``.
        nets: one network for all groups, or one for each.
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
        self.members = [(groups.flatten() == g).nonzero()[:, 0].tolist() for g in range(count)]

    def group(self, x: Tensor, g: int) -> Tensor:
        """Parameters (..., D, P), valid for the symbols of group g, from x (..., *event)."""
        where, dims = self.known[g].to(x), self.known.ndim - 1
        seen = torch.cat([x * where, where.expand_as(x)], -dims)
        batch = x.shape[: x.ndim - dims]
        out: Tensor = self.nets[g % len(self.nets)](seen.reshape(-1, *seen.shape[len(batch) :]))
        out = out.unflatten(1, (x.shape[-dims], -1)).movedim(2, -1).flatten(1, -2)
        return out.reshape(*batch, *out.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Parameters of all symbols: (..., D, P)."""
        out = self.group(x, 0)
        for g in range(1, len(self.members)):
            out = torch.where(self.known[g].flatten().unsqueeze(-1), out, self.group(x, g))
        return out


def quincunx(event: Sequence[int], levels: int) -> Tensor:
    """Groups of the pixels of (C, H, W), from coarse to fine.

    Group 0 has every 2^levels-th pixel of every 2^levels-th row; each further group doubles the
    number of pixels.
    """
    channels, height, width = event
    row, column = torch.arange(height)[:, None], torch.arange(width)[None]
    group = torch.zeros(height, width, dtype=torch.long)
    for level in range(levels):
        step = 2 ** (levels - level)
        odd_row, odd_column = row % step == step // 2, column % step == step // 2
        on_row, on_column = row % step == 0, column % step == 0
        group[odd_row & odd_column] = 2 * level + 1
        group[(odd_row & on_column) | (on_row & odd_column)] = 2 * level + 2
    return group.expand(channels, height, width).clone()


class DiscreteBase(Base):
    r"""A distribution of integers, log p(x) = Σ_d log p(x_d | x_{<d}), which ``Flow.compress`` can
    code.

    A ``conditioner`` computes the parameters (..., D, P) of all D symbols from preceding ones: a
    ``Conditioner``, one symbol after another, or ``Groups``. Without one the symbols are
    independent, with learned parameters.
    """

    symbols: int  # D
    window: tuple[int, int] | None = (
        None  # the least and the largest symbol; None: all whole numbers
    )
    first: Tensor

    def __init__(
        self,
        event: int | Sequence[int],
        symbols: int,
        first: Tensor,
        conditioner: Conditioner | Groups | None,
    ) -> None:
        super().__init__(event)
        self.symbols, self.conditioner = symbols, conditioner
        self.register_buffer("first", first)  # parameters (P,) before anything is learned
        if conditioner is None:
            self.table = nn.Parameter(torch.zeros(symbols, len(first)))
        elif isinstance(conditioner, Conditioner) and (conditioner.dim, conditioner.out) != (
            symbols,
            len(first),
        ):
            raise ValueError(
                f"{type(self).__name__} has {symbols} symbols of {len(first)} parameters, its conditioner gives "
                f"{conditioner.dim} of {conditioner.out}; build it with dim={symbols}, params={len(first)}"
            )

    @abstractmethod
    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        """log p of symbols (...), or of one-hot rows (..., K), with parameters (..., P)."""

    @abstractmethod
    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        """The arguments of ``below`` from parameters (n, P): tensors (..., n)."""

    @staticmethod
    @abstractmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        """P(symbol < k): (..., n). In numpy and elementwise, so that it does not depend on the
        batch.
        """

    @abstractmethod
    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        """Symbols (...) from uniform noise (..., 2)."""

    @abstractmethod
    def see(self, symbols: Tensor) -> Tensor:
        """The input of the conditioner for these symbols."""

    def as_symbols(self, x: Tensor) -> Tensor:
        """Symbols (..., D) of events (..., *event)."""
        return x.flatten(-len(self.event_shape))

    def as_event(self, symbols: Tensor) -> Tensor:
        """Events of symbols."""
        return symbols.reshape(*symbols.shape[:-1], *self.event_shape)

    def params(self, x: Tensor) -> Tensor:
        """Parameters (..., D, P) of all symbols of x."""
        if self.conditioner is None:
            return self.first + self.table
        seen = self._seen(x)
        return self.first + self.conditioner(seen)

    def _seen(self, x: Tensor) -> Tensor:
        return self.see(
            x if isinstance(self.conditioner, Groups) else x.flatten(-len(self.event_shape))
        )

    def unroll(self, batch: Sequence[int], choose: Choose) -> Tensor:
        """Symbols (*batch, D), stage by stage: ``choose(indices, parameters (*batch, n, P))``
        returns (*batch, n).
        """
        x = self.anchor.new_zeros(*batch, self.symbols)
        if self.conditioner is None:
            every = list(range(self.symbols))
            return choose(every, (self.first + self.table).expand(*batch, -1, -1))
        if isinstance(self.conditioner, Groups):
            for g, members in enumerate(self.conditioner.members):
                found = self.conditioner.group(self.see(self.as_event(x)), g)[..., members, :]
                x[..., members] = choose(members, self.first + found)
            return x
        steps = self.conditioner.steps(self.see(x))
        for d in self.conditioner.coordinates:
            x[..., d : d + 1] = choose([d], (self.first + steps.params()).unsqueeze(-2))
            steps.push(self.see(x[..., d]))
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        return self.log_mass(self.as_symbols(x), self.params(x)).sum(-1)

    def compress(self, flow: Flow, y: Tensor, context: Tensor | None = None) -> bytes:
        """Encode data with a flow of this base; see ``Flow.compress``."""
        return codec.compress(flow, y, context)

    def decompress(self, flow: Flow, data: bytes, context: Tensor | None = None) -> Tensor:
        """Decode data with a flow of this base; see ``Flow.decompress``."""
        return codec.decompress(flow, data, context)

    @torch.no_grad()
    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        u = rng.uniform(n, (*batch, self.symbols, 2), self.anchor, seed, start)
        symbols = self.unroll(
            (n, *batch), lambda members, params: self.pick(u[..., members, :], params)
        )
        return self.as_event(symbols)


def logistic_log_mass(
    x: Tensor, mean: Tensor, steep: Tensor, window: tuple[int, int] | None
) -> Tensor:
    """log[σ(b) − σ(a)], a, b = (x ∓ ½ − mean)·steep; the first and last integer of a window include
    the tails.

    It is log σ(b) + log σ(−a) + log(1 − exp(−steep)), which is accurate in both tails.
    """
    a = (x - 0.5 - mean) * steep
    below, above = logsigmoid(a + steep), logsigmoid(-a)
    each = below + above + (-torch.expm1(-steep)).log()
    if window is None:
        return each
    low, high = window
    each = torch.where(x == low, below, torch.where(x == high, above, each))
    return each.masked_fill((x < low) | (x > high), -torch.inf)


class DiscretizedLogistic(DiscreteBase):
    r"""p(x) = Σ_k w_k·[σ(b_k) − σ(a_k)], a, b = (x ∓ ½ − mean_k)/scale_k: a mixture of discretized
    logistics.

    Args:
        event: the shape of an event.
        levels: L; means are learned in units of L/2.
        components: the number of logistics.
        conditioner: a network from preceding symbols to 3·components parameters per symbol.
        bounded: x is in 0 .. L − 1, and the first and last level include the tails (Salimans et al.
            2017); otherwise x is any integer (Hoogeboom et al. 2019).
        mean, scale: initial values, by default (L − 1)/2 and L/12.
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
        self.levels, self.unit = (
            check_size(levels, "the levels of DiscretizedLogistic", 2),
            levels / 2,
        )
        check_size(components, "the components of DiscretizedLogistic")
        self.center = (levels - 1) / 2 if mean is None else float(mean)
        self.log_scale = math.log(levels / 12 if scale is None else scale)
        apart = torch.linspace(-0.8, 0.8, components) if components > 1 else torch.zeros(1)
        first = torch.cat([torch.zeros(components), apart, torch.zeros(components)])
        super().__init__(event, math.prod(as_event(event)), first, conditioner)
        self.window = (0, levels - 1) if bounded else None

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log w, mean and 1/scale, each (..., K)."""
        logits, mean, log_scale = params.unflatten(-1, (3, -1)).unbind(-2)
        narrow = (self.log_scale + log_scale).clamp_min(MIN_LOG_SCALE)
        return logits.log_softmax(-1), self.center + self.unit * mean, (-narrow).exp()

    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        log_w, mean, steep = self._parts(params)
        return (log_w + logistic_log_mass(x.unsqueeze(-1), mean, steep, self.window)).logsumexp(-1)

    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        log_w, mean, steep = (part.mT for part in self._parts(params))
        return log_w.exp(), mean + 0.5, steep / 2

    @staticmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        w, edge, steep = (t[(slice(None), *[None] * (k.ndim - 1))] for t in tables)
        return (w * (0.5 + 0.5 * np.tanh((k - edge) * steep))).sum(0)

    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        log_w, mean, steep = self._parts(params)
        k = (u[..., :1] >= log_w.exp().cumsum(-1)[..., :-1]).sum(-1, keepdim=True)
        mean, steep = (
            mean.expand(*u.shape[:-1], -1).gather(-1, k),
            steep.expand(*u.shape[:-1], -1).gather(-1, k),
        )
        x = (mean + u[..., 1:].clamp(1e-6, 1 - 1e-6).logit() / steep).squeeze(-1).round()
        return x if self.window is None else x.clamp(*self.window)

    def see(self, symbols: Tensor) -> Tensor:
        return (symbols - self.center) / self.unit


class Categorical(DiscreteBase):
    """D symbols of K classes as one-hot rows (D, K): log p(x) = Σ_d x_d · log softmax(logits_d).

    ``Flow(Categorical(D, K), OneHot(D, K))`` is a distribution of class indices.

    Args:
        dim: D.
        classes: K.
        conditioner: a network (..., D, K) → (..., D, K) from preceding rows to logits; by default
            these are learned.
    """

    def __init__(self, dim: int, classes: int, conditioner: Conditioner | None = None) -> None:
        super().__init__(
            (dim, check_size(classes, "the classes of Categorical", 2)),
            dim,
            torch.zeros(classes),
            conditioner,
        )
        self.classes, self.window = classes, (0, classes - 1)

    def _seen(self, x: Tensor) -> Tensor:
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        return self.log_mass(x, self.params(x)).sum(-1)

    def as_symbols(self, x: Tensor) -> Tensor:
        return x.argmax(-1).to(x)

    def as_event(self, symbols: Tensor) -> Tensor:
        return self.see(symbols)

    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        return (x * params.log_softmax(-1)).sum(-1)

    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        return (torch.nn.functional.pad(params.softmax(-1).cumsum(-1), (1, 0)).mT,)

    @staticmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        return tables[0][k, np.arange(k.shape[-1])]

    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        return (u[..., :1] >= params.softmax(-1).cumsum(-1)[..., :-1]).sum(-1).to(u)

    def see(self, symbols: Tensor) -> Tensor:
        return one_hot(symbols.long(), self.classes).to(self.anchor)
