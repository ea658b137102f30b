"""Maps that lose something on one of their ways (SurVAE flows, Nielsen et al. 2020).

All are written from base to data, y = f(x) with x ~ q(x|y) in the inverse: log p(y) ≥ E_q[log p(x) − log q(x|y)], a
bound. ``Inverse`` of one loses in the inverse instead: data y are drawn, y ~ p(y|x), and x = f(y) is known, so that
log p(y) = log p(x) + log p(y|x) is exact, where the density below lives on what f gives (positive, ordered) and nowhere
else; on a wider one it is a lower bound only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.special import erfcx, ndtri

from bayou.constants import LOG_2PI
from bayou.flows.core.arguments import as_event, positive, wide
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj, Map, Pair, Rows, inside, known, sum_event
from bayou.flows.surjections.conditional import (
    ConditionalDistribution,
    ConditionalFlow,
    Surjection,
    as_given,
    normal,
    open_uniform,
)


class Slice(Surjection):
    """y = the first ``keep`` entries of x along its first axis; back, the rest is drawn from q(rest | y): V = −log q.

    ``Inverse(Slice(...))`` is augmentation: forward, entries are added; in the inverse they are scored by
    p(rest | kept), exactly, which is how a multi-scale flow lets go of half of its channels (Dinh et al. 2017).
    """

    def __init__(self, event: int | Sequence[int], keep: int, rest: ConditionalFlow | Flow | None = None) -> None:
        super().__init__()
        self.event_in = as_event(event)
        if not 0 < keep < self.event_in[0]:
            raise ValueError(
                f"Slice keeps some of the {self.event_in[0]} entries, not all and not none; got keep={keep}"
            )
        self.event_out = (keep, *self.event_in[1:])
        dropped = (self.event_in[0] - keep, *self.event_in[1:])
        self.rest = (as_given(rest) if rest is not None else ConditionalFlow(normal(dropped))).accepts(
            dropped, self.event_out, "Slice"
        )

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (self.rest.noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, rest = x.split([self.event_out[0], self.event_in[0] - self.event_out[0]], -len(self.event_in))
        return y, self.rest.log_prob(rest, y, len(self.event_out))

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        rest, log_q = self.rest.draw(noise, y, len(self.event_out))
        return torch.cat([y, rest], -len(self.event_in)), -log_q


class Abs(Surjection):
    """y = abs(x); back, every sign is drawn, + with probability ½, or by the logits of ``net``: V = −Σ log q(sign).

    ``Inverse(Abs)`` draws signs forward: V = Σ log p(sign), −D·log 2 without a net.
    """

    codomain = (0.0, math.inf)

    def __init__(self, event: int | Sequence[int], net: nn.Module | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(event)
        self.net = net

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(*self.event_in),)

    def _log_q(self, sign: Tensor, y: Tensor) -> Tensor:
        each = torch.full_like(y, -math.log(2)) if self.net is None else logsigmoid(sign * self.net(y))
        return sum_event(each, len(self.event_in))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = inside(x.abs(), self.codomain)
        return y, self._log_q(torch.where(x < 0, -1.0, 1.0).to(x), y)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        plus = 0.5 if self.net is None else self.net(y).sigmoid()
        sign = torch.where(u < plus, 1.0, -1.0).to(y)
        return sign * y, -self._log_q(sign, y)


class Sort(Surjection):
    """y = the entries of x in order; back, they are in any order: V = log n!. ``Inverse(Sort(n))``: exact, −log n!.

    ``features``: events (n, features), whole rows ordered by their first entry (tied permutations, for sets of points).
    """

    def __init__(self, n: int, features: int | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(n if features is None else (n, features))

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(self.event_in[0]),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        key = x if len(self.event_in) == 1 else x[..., 0]
        return self._taken(x, key.argsort(-1)), -self._orders(x)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        return self._taken(y, u.argsort(-1)), self._orders(y)

    def in_image(self, y: Tensor) -> Tensor:
        """Whether the entries are in order."""
        key = y if len(self.event_in) == 1 else y[..., 0]
        return (key.diff(dim=-1) >= 0).all(-1)

    def check_values(self, x: Tensor, inverse: bool) -> None:
        if inverse and known(self.in_image(x).all()) is False:
            raise ValueError(
                "Sort gives entries in order, and takes such data; for data in any order use Inverse(Sort)"
            )

    def _taken(self, x: Tensor, order: Tensor) -> Tensor:
        return x.gather(-1, order) if len(self.event_in) == 1 else x.gather(-2, order.unsqueeze(-1).expand(x.shape))

    def _orders(self, x: Tensor) -> Tensor:
        return x.new_full(x.shape[: x.ndim - len(self.event_in)], math.lgamma(self.event_in[0] + 1))


class StochasticPermutation(Map):
    """The rows of x in an order that is drawn both ways: V = 0 (a density through it is made exchangeable)."""

    takes_noise = True
    ladj_kind = Ladj.bound

    def __init__(self, n: int, features: int | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(n if features is None else (n, features))
        self._sort = (Sort(n, features),)  # a tuple: it has no parameters, and is no part of the state

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return (rows.uniform(self.event_out[0]),)  # type: ignore[arg-type]

    def _forward(self, x: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        return self._sort[0]._taken(x, u.argsort(-1)), x.new_zeros(x.shape[: x.ndim - len(self.event_in)])

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        return self._forward(y, context, u)


class Max(Surjection):
    """y = max x, (n,) → (1,); back, one of n entries is y and the others lie below: V = log n − Σ log q(rest | y).

    q(rest | y): N(mean, std²) below y, both learned, 0 and 1 at first. ``Inverse(Max(n))`` pools data of n entries into
    their largest one, exactly.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.event_in, self.event_out = (positive(n, "the entries of Max", 2),), (1,)
        self.mean, self.log_std = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return open_uniform(rows, self.event_in[0] - 1), rows.uniform(1)

    def _log_q(self, rest: Tensor, y: Tensor) -> Tensor:
        std = self.log_std.exp()
        eps, top = (rest - self.mean) / std, (y - self.mean) / std
        inside = -0.5 * (eps.square() + LOG_2PI) - self.log_std - log_ndtr(top).to(y.dtype)
        return inside.sum(-1) - math.log(self.event_in[0])

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, index = x.max(-1, keepdim=True)
        others = torch.arange(self.event_in[0] - 1, device=x.device).expand(*x.shape[:-1], -1)
        rest = x.gather(-1, others + (others >= index))
        return y, self._log_q(rest, y)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor, which: Tensor) -> Pair:
        std = self.log_std.exp()
        top = (y - self.mean) / std
        mass = (wide(u) * log_ndtr(top).exp()).clamp_min(torch.finfo(torch.float32).tiny)
        below = ndtri(mass).to(y.dtype)
        rest = torch.minimum(self.mean + std * below, y)
        index = (which * self.event_in[0]).floor().long()
        place = torch.arange(self.event_in[0], device=y.device)
        spread = torch.cat([rest, y], -1).gather(
            -1, torch.where(place == index, self.event_in[0] - 1, place - (place > index).long())
        )
        return spread, -self._log_q(rest, y)


def log_ndtr(x: Tensor) -> Tensor:
    """log Φ(x), true in both tails; torch's own has no rule for vmap, and none of these is there in half precision."""
    x = wide(x) / math.sqrt(2)
    low, high = x.clamp_max(0), x.clamp_min(0)
    return torch.where(x < 0, (erfcx(-low) / 2).log() - low.square(), torch.log1p(-torch.erfc(high) / 2))


class Autoencoder(Map):
    """y ~ p(y|x), back x ~ q(x|y): V = log p(y|x) − log q(x|y), the bound of a VAE as a map (Kingma & Welling 2014)."""

    takes_noise = True
    ladj_kind = Ladj.bound

    def __init__(self, decoder: ConditionalDistribution | Flow, encoder: ConditionalDistribution | Flow) -> None:
        super().__init__()
        self.decoder, self.encoder = as_given(decoder), as_given(encoder)
        self.event_in, self.event_out = self.encoder.event, self.decoder.event
        self.decoder.accepts(self.event_out, self.event_in, "Autoencoder")
        self.encoder.accepts(self.event_in, self.event_out, "Autoencoder")
        self.levels_in, self.levels_out = self.encoder.levels, self.decoder.levels
        self.whole_in, self.whole_out = self.levels_in is not None, self.levels_out is not None

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return ((self.encoder if inverse else self.decoder).noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        y, log_p = self.decoder.draw(noise, x, len(self.event_in))
        return y, self.encoder.log_prob(x, y, len(self.event_out)) - log_p

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        x, log_q = self.encoder.draw(noise, y, len(self.event_out))
        return x, self.decoder.log_prob(y, x, len(self.event_in)) - log_q
