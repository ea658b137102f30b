"""Surjections and stochastic maps (Nielsen et al. 2020, SurVAE flows).

All are written from base to data, y = f(x) with x ~ q(x|y) in the inverse: log p(y) ≥ E_q[log p(x)
− log q(x|y)]. The ``Inverse`` of one draws data y ~ p(y|x) and computes x = f(y), so that log p(y)
= log p(x) + log p(y|x) is exact if p(x) is supported on the range of f only (positive or ordered
numbers, say), and a lower bound otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.special import erfcx, ndtri

from bayou.core.constants import LOG_2PI
from bayou.flows.core.arguments import as_event, check_size, promote
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj, Map, Pair, Rows, clamp_inside, read_flag, sum_event
from bayou.flows.surjections.conditional import (
    ConditionalDistribution,
    ConditionalFlow,
    Surjection,
    as_conditional,
    normal,
    open_uniform,
)


class Slice(Surjection):
    """y = the first entries of x along its first axis; the inverse draws the rest from q(rest | y),
    term −log q.

    ``Inverse(Slice(...))`` adds entries in the direction to data and evaluates p(rest | kept) in
    the other, exactly: the split of a multi-scale flow (Dinh et al. 2017).

    Args:
        event: the shape of x.
        keep: the number of entries that are kept.
        rest: q, a distribution of the other entries that may be conditional on y; by default a
            learned Gaussian.
    """

    def __init__(
        self, event: int | Sequence[int], keep: int, rest: ConditionalFlow | Flow | None = None
    ) -> None:
        super().__init__()
        self.event_in = as_event(event)
        if not 0 < keep < self.event_in[0]:
            raise ValueError(
                f"Slice needs 0 < keep < {self.event_in[0]}, the number of entries, got keep={keep}"
            )
        self.event_out = (keep, *self.event_in[1:])
        dropped = (self.event_in[0] - keep, *self.event_in[1:])
        self.rest = (
            as_conditional(rest) if rest is not None else ConditionalFlow(normal(dropped))
        ).accepts(dropped, self.event_out, "Slice")

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (self.rest.noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, rest = x.split(
            [self.event_out[0], self.event_in[0] - self.event_out[0]], -len(self.event_in)
        )
        return y, self.rest.log_prob(rest, y, len(self.event_out))

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        rest, log_q = self.rest.draw(noise, y, len(self.event_out))
        return torch.cat([y, rest], -len(self.event_in)), -log_q


class Abs(Surjection):
    """y = |x|; the inverse draws the signs, term −Σ log q(sign). ``Inverse(Abs)`` draws signs in
    the forward direction.

    Args:
        event: the shape of x.
        net: from y to the logits of a positive sign; by default signs are equally likely.
    """

    codomain = (0.0, math.inf)

    def __init__(self, event: int | Sequence[int], net: nn.Module | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(event)
        self.net = net

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(*self.event_in),)

    def _log_q(self, sign: Tensor, y: Tensor) -> Tensor:
        each = (
            torch.full_like(y, -math.log(2)) if self.net is None else logsigmoid(sign * self.net(y))
        )
        return sum_event(each, len(self.event_in))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = clamp_inside(x.abs(), self.codomain)
        return y, self._log_q(torch.where(x < 0, -1.0, 1.0).to(x), y)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        plus = 0.5 if self.net is None else self.net(y).sigmoid()
        sign = torch.where(u < plus, 1.0, -1.0).to(y)
        return sign * y, -self._log_q(sign, y)


class Sort(Surjection):
    """y = the sorted entries of x; the inverse draws an order, term log n!.

    ``Chain(Sort(n), Inverse(Sort(n)))`` is a random order in both directions, which makes a density
    exchangeable.

    Args:
        n: the number of entries.
        features: events are (n, features) with rows sorted by their first entry; by default (n,).
    """

    def __init__(self, n: int, features: int | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(n if features is None else (n, features))

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(self.event_in[0]),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        key = x if len(self.event_in) == 1 else x[..., 0]
        return _permuted(x, key.argsort(-1)), -self._log_orders(x)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        return _permuted(y, u.argsort(-1)), self._log_orders(y)

    def in_image(self, y: Tensor) -> Tensor:
        """Whether the entries are sorted."""
        key = y if len(self.event_in) == 1 else y[..., 0]
        return (key.diff(dim=-1) >= 0).all(-1)

    def check_values(self, x: Tensor, inverse: bool) -> None:
        if inverse and read_flag(self.in_image(x).all()) is False:
            raise ValueError(
                "the data of Sort must be sorted; for data in any order use Inverse(Sort)"
            )

    def _log_orders(self, x: Tensor) -> Tensor:
        return x.new_full(x.shape[: x.ndim - len(self.event_in)], math.lgamma(self.event_in[0] + 1))


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """The entries of x (..., n), or its rows (..., n, features), in the order (..., n)."""
    return (
        x.gather(-1, order)
        if x.ndim == order.ndim
        else x.gather(-2, order.unsqueeze(-1).expand(x.shape))
    )


class Max(Surjection):
    """y = max x, (n,) → (1,); the inverse draws the position of y and the rest, term log n − Σ log
    q(rest | y).

    q(rest | y) is N(mean, std²) truncated to values below y, with learned mean and std.
    ``Inverse(Max(n))`` is max pooling of data with n entries.

    Args:
        n: the number of entries, at least 2.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.event_in, self.event_out = (check_size(n, "the entries of Max", 2),), (1,)
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
        mass = (promote(u) * log_ndtr(top).exp()).clamp_min(torch.finfo(torch.float32).tiny)
        below = ndtri(mass).to(y.dtype)
        rest = torch.minimum(self.mean + std * below, y)
        index = (which * self.event_in[0]).floor().long()
        place = torch.arange(self.event_in[0], device=y.device)
        spread = torch.cat([rest, y], -1).gather(
            -1, torch.where(place == index, self.event_in[0] - 1, place - (place > index).long())
        )
        return spread, -self._log_q(rest, y)


def log_ndtr(x: Tensor) -> Tensor:
    """log Φ(x), accurate in both tails; ``torch.special.log_ndtr`` does not support vmap or half
    precision.
    """
    x = promote(x) / math.sqrt(2)
    low, high = x.clamp_max(0), x.clamp_min(0)
    return torch.where(
        x < 0, (erfcx(-low) / 2).log() - low.square(), torch.log1p(-torch.erfc(high) / 2)
    )


class Autoencoder(Map):
    """y ~ p(y|x) with inverse x ~ q(x|y), term log p(y|x) − log q(x|y): the bound of a VAE (Kingma
    & Welling 2014).

    Args:
        decoder: p(y|x).
        encoder: q(x|y).
    """

    takes_noise = True
    ladj_kind = Ladj.bound

    def __init__(
        self, decoder: ConditionalDistribution | Flow, encoder: ConditionalDistribution | Flow
    ) -> None:
        super().__init__()
        self.decoder, self.encoder = as_conditional(decoder), as_conditional(encoder)
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
