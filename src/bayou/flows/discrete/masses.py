"""Base distributions of integers: a mass for every symbol, given the symbols before it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot

from bayou import rng
from bayou.flows.core.arguments import as_event, positive
from bayou.flows.core.bases import Base
from bayou.flows.layers.conditioners import Conditioner
from bayou.modules import Modules

Choose = Callable[[list[int], Tensor], Tensor]
Floats = NDArray[np.float64]
SMALLEST = -5.0  # log of the smallest scale: the mass of one bin is then 1 within 1e-32


class Groups(nn.Module):
    r"""Parameters of a group of symbols from the groups before it, a pass of a network for each group.

    ``groups`` (\*event): the number of the group of each symbol. A network of it gets x where it is known, 0 elsewhere,
    and where that is, stacked on the first axis: (..., 2·C, ...) → (..., C·P, ...) for events (C, ...). Coarse pixels
    first, then those between them (``quincunx``), is the prior of a multi-scale flow in a few passes.
    """

    known: Tensor

    def __init__(self, groups: Tensor, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        count = int(groups.max()) + 1
        if len(nets) not in (1, count):
            raise ValueError(f"Groups takes one network, or one for each of {count} groups; got {len(nets)}")
        self.nets: Modules[nn.Module] = nn.ModuleList(nets)  # type: ignore[assignment]
        self.register_buffer("known", torch.stack([groups < g for g in range(count)]))
        self.members = [(groups.flatten() == g).nonzero()[:, 0].tolist() for g in range(count)]

    def group(self, x: Tensor, g: int) -> Tensor:
        """Parameters (..., D, P), true for the symbols of group g; x (..., *event)."""
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
    """Groups of (C, H, W): every 2^levels-th pixel of every 2^levels-th row, then twice as many, and so on."""
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
    r"""Whole numbers, log p(x) = Σ_d log p(x_d | x_{<d}), or independent ones: what ``Flow.compress`` can code.

    A ``conditioner`` gives the parameters (..., D, P) of all D symbols, each from those before it: a ``Conditioner``,
    one symbol after another, or ``Groups``. Without one they are learned, a set for every symbol.
    """

    symbols: int  # D
    window: tuple[int, int] | None = None  # the least and the largest symbol; None: all whole numbers
    first: Tensor

    def __init__(
        self, event: int | Sequence[int], symbols: int, first: Tensor, conditioner: Conditioner | Groups | None
    ) -> None:
        super().__init__(event)
        self.symbols, self.conditioner = symbols, conditioner
        self.register_buffer("first", first)  # parameters (P,) before anything is learned
        if conditioner is None:
            self.table = nn.Parameter(torch.zeros(symbols, len(first)))
        elif isinstance(conditioner, Conditioner) and (conditioner.dim, conditioner.out) != (symbols, len(first)):
            raise ValueError(
                f"{type(self).__name__} has {symbols} symbols of {len(first)} parameters, its conditioner gives "
                f"{conditioner.dim} of {conditioner.out}; build it with dim={symbols}, params={len(first)}"
            )

    @abstractmethod
    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        """log p of symbols (...), as ``as_symbols`` or straight from an event, with parameters (..., P)."""

    @abstractmethod
    def tables(self, params: Tensor) -> tuple[Tensor, ...]:
        """What ``below`` needs of parameters (n, P): tensors (..., n)."""

    @staticmethod
    @abstractmethod
    def below(k: NDArray[np.int64], *tables: Floats) -> Floats:
        """P(symbol < k): (..., n). In numpy, number by number, so that it is the same however rows are cut."""

    @abstractmethod
    def pick(self, u: Tensor, params: Tensor) -> Tensor:
        """Symbols (...) from uniform noise (..., 2)."""

    @abstractmethod
    def see(self, symbols: Tensor) -> Tensor:
        """What the conditioner gets to see of symbols."""

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
        return self.see(x if isinstance(self.conditioner, Groups) else x.flatten(-len(self.event_shape)))

    def unroll(self, batch: Sequence[int], choose: Choose) -> Tensor:
        """Symbols (*batch, D), stage by stage: ``choose(which, their parameters (*batch, n, P))`` says (*batch, n)."""
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
        for d in self.conditioner._order:
            x[..., d : d + 1] = choose([d], (self.first + steps.params()).unsqueeze(-2))
            steps.push(self.see(x[..., d]))
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        return self.log_mass(self.as_rows(x), self.params(x)).sum(-1)

    def as_rows(self, x: Tensor) -> Tensor:
        """Events as ``log_mass`` takes them."""
        return self.as_symbols(x)

    @torch.no_grad()
    def draw(self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0) -> Tensor:
        u = rng.uniform(n, (*batch, self.symbols, 2), self.anchor, seed, start)
        symbols = self.unroll((n, *batch), lambda members, params: self.pick(u[..., members, :], params))
        return self.as_event(symbols)


class DiscretizedLogistic(DiscreteBase):
    r"""Σ_k w_k·[σ(b_k) − σ(a_k)], a, b = (x ∓ ½ − mean_k)/scale_k: a mixture of logistic masses on whole numbers.

    log[σ(b) − σ(a)] = log σ(b) + log σ(−a) + log(1 − exp(−1/scale)), which is true in both tails. ``levels`` L is the
    unit of what is learned, and where it is ``bounded`` the least and the largest of 0 .. L − 1 have all that is beyond
    them (Salimans et al. 2017); else x is any whole number, as behind an integer discrete flow (Hoogeboom et al. 2019).
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
        self.levels, self.unit = positive(levels, "the levels of DiscretizedLogistic", 2), levels / 2
        positive(components, "the components of DiscretizedLogistic")
        self.centre = (levels - 1) / 2 if mean is None else float(mean)
        self.log_scale = math.log(levels / 12 if scale is None else scale)
        apart = torch.linspace(-0.8, 0.8, components) if components > 1 else torch.zeros(1)
        first = torch.cat([torch.zeros(components), apart, torch.zeros(components)])
        super().__init__(event, math.prod(as_event(event)), first, conditioner)
        self.window = (0, levels - 1) if bounded else None

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log w, mean and 1/scale, each (..., K)."""
        logits, mean, log_scale = params.unflatten(-1, (3, -1)).unbind(-2)
        narrow = (self.log_scale + log_scale).clamp_min(SMALLEST)
        return logits.log_softmax(-1), self.centre + self.unit * mean, (-narrow).exp()

    def log_mass(self, x: Tensor, params: Tensor) -> Tensor:
        log_w, mean, steep = self._parts(params)
        a = (x.unsqueeze(-1) - 0.5 - mean) * steep
        below, above = logsigmoid(a + steep), logsigmoid(-a)
        each = below + above + (-torch.expm1(-steep)).log()
        if self.window is not None:
            low, high = self.window
            least, most = x.unsqueeze(-1) == low, x.unsqueeze(-1) == high
            each = torch.where(least, below, torch.where(most, above, each))
            outside = (x < low) | (x > high)
            return (log_w + each).logsumexp(-1).masked_fill(outside, -torch.inf)
        return (log_w + each).logsumexp(-1)

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
        mean, steep = mean.expand(*u.shape[:-1], -1).gather(-1, k), steep.expand(*u.shape[:-1], -1).gather(-1, k)
        x = (mean + u[..., 1:].clamp(1e-6, 1 - 1e-6).logit() / steep).squeeze(-1).round()
        return x if self.window is None else x.clamp(*self.window)

    def see(self, symbols: Tensor) -> Tensor:
        return (symbols - self.centre) / self.unit


class Categorical(DiscreteBase):
    """D symbols of K classes as rows of one-hot numbers, events (D, K): log p(x) = Σ_d x_d · log softmax(logits_d).

    With a ``conditioner`` (..., D, K) → (..., D, K) the logits of a row come from the rows before it. ``OneHot`` turns
    rows into class numbers: ``Flow(Categorical(D, K), OneHot(D, K))``.
    """

    def __init__(self, dim: int, classes: int, conditioner: Conditioner | None = None) -> None:
        super().__init__(
            (dim, positive(classes, "the classes of Categorical", 2)), dim, torch.zeros(classes), conditioner
        )
        self.classes, self.window = classes, (0, classes - 1)

    def _seen(self, x: Tensor) -> Tensor:
        return x

    def as_rows(self, x: Tensor) -> Tensor:
        return x

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
