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
from bayou.flows.core.transform import (
    Event,
    Ladj,
    Map,
    Pair,
    Rows,
    batch_shape,
    clamp_inside,
    read_flag,
    sum_event,
)
from bayou.flows.surjections.conditional import (
    ConditionalDistribution,
    ConditionalFlow,
    Surjection,
    as_conditional,
    normal,
    open_uniform,
)


class Slice(Surjection):
    r"""A surjection y = the first entries of x along its first axis.

    The inverse draws the other entries from q(rest | y), with the term −log q(rest | y).
    ``Inverse(Slice(...))`` adds entries in the direction to data and evaluates p(rest | kept) in
    the other one, exactly: the split of a multi-scale flow (Dinh et al. 2017, RealNVP).

    Args:
        event: the shape of x, a size or several.
        keep: the number of entries of the first axis that are kept.
        rest: q, a distribution of the other entries that may be conditional on y; by default a
            learned Gaussian, for vectors only.

    Shapes: x (..., \*event), y (..., keep, \*event[1:]), term (...).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.Slice(6, keep=4))
        >>> flow.sample(10, seed=0).shape
        torch.Size([10, 4])
    """

    def __init__(
        self,
        event: int | Sequence[int],
        keep: int,
        rest: ConditionalFlow | Flow | None = None,
    ) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = as_event(event)
        entries, *other_axes = self.event_in
        if not 0 < keep < entries:
            raise ValueError(
                f"Slice needs 0 < keep < {entries}, the number of entries, got keep={keep}"
            )
        self.event_out: tuple[int, ...] = (keep, *other_axes)
        rest_event = (entries - keep, *other_axes)
        if rest is None:
            rest = normal(rest_event)
        self.rest: ConditionalFlow = as_conditional(rest).accepts(
            rest_event, self.event_out, "Slice"
        )

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        return (self.rest.noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        keep = self.event_out[0]
        y, rest = x.split([keep, self.event_in[0] - keep], -len(self.event_in))
        return y, self.rest.log_prob(rest, y, len(self.event_out))

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        rest, log_q = self.rest.draw(noise, y, len(self.event_out))
        return torch.cat([y, rest], -len(self.event_in)), -log_q


class Abs(Surjection):
    r"""A surjection y = |x|, elementwise.

    The inverse draws the signs, with the term −Σ log q(sign | y). ``Inverse(Abs(...))`` draws signs
    in the direction to data (Nielsen et al. 2020, SurVAE flows).

    Args:
        event: the shape of x, a size or several.
        net: a network (..., \*event) → (..., \*event) from y to the logits of a positive sign; by
            default signs are equally likely.

    Shapes: x, y (..., \*event), term (...).
    """

    codomain: tuple[float, float] = (0.0, math.inf)

    def __init__(self, event: int | Sequence[int], net: nn.Module | None = None) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = as_event(event)
        self.event_out: tuple[int, ...] = self.event_in
        self.net = net

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(*self.event_in),)

    def _log_q(self, sign: Tensor, y: Tensor) -> Tensor:
        """Return log q(sign | y), summed over the event."""
        log_probs = torch.full_like(y, -math.log(2))
        if self.net is not None:
            log_probs = logsigmoid(sign * self.net(y))
        return sum_event(log_probs, len(self.event_in))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = clamp_inside(x.abs(), self.codomain)
        return y, self._log_q(torch.where(x < 0, -1.0, 1.0).to(x), y)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        positive_prob = 0.5 if self.net is None else self.net(y).sigmoid()
        sign = torch.where(u < positive_prob, 1.0, -1.0).to(y)
        return sign * y, -self._log_q(sign, y)


class Sort(Surjection):
    """A surjection y = the sorted entries of x.

    The inverse draws an order, with the term log n!. ``Chain(Sort(n), Inverse(Sort(n)))`` is a
    random order in both directions, which makes a density exchangeable (Nielsen et al. 2020,
    SurVAE flows).

    Args:
        n: the number of entries.
        features: the number of columns of events (n, features), whose rows are sorted by their
            first entry; None, the default, for events (n,).

    Shapes: x, y (..., n) or (..., n, features), term (...).
    """

    def __init__(self, n: int, features: int | None = None) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = as_event(n if features is None else (n, features))
        self.event_out: tuple[int, ...] = self.event_in

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(self.event_in[0]),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        order = self._sort_keys(x).argsort(-1)
        return _permute_entries(x, order), -self._log_orders(x)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor) -> Pair:
        return _permute_entries(y, u.argsort(-1)), self._log_orders(y)

    def _sort_keys(self, x: Tensor) -> Tensor:
        """Return the numbers (..., n) that determine the order."""
        if len(self.event_in) == 1:
            return x
        return x[..., 0]

    def in_image(self, y: Tensor) -> Tensor:
        """Return whether the entries are sorted.

        Args:
            y: (..., n) or (..., n, features).

        Returns:
            Booleans (...).
        """
        return (self._sort_keys(y).diff(dim=-1) >= 0).all(-1)

    def check_values(self, x: Tensor, inverse: bool) -> None:
        if inverse and read_flag(self.in_image(x).all()) is False:
            raise ValueError(
                "the data of Sort must be sorted; for data in any order use Inverse(Sort)"
            )

    def _log_orders(self, x: Tensor) -> Tensor:
        """Return log n! for every row."""
        return x.new_full(batch_shape(x, self.event_in), math.lgamma(self.event_in[0] + 1))


def _permute_entries(x: Tensor, order: Tensor) -> Tensor:
    """Return the entries of x (..., n), or its rows (..., n, features), in the order (..., n)."""
    if x.ndim == order.ndim:
        return x.gather(-1, order)
    return x.gather(-2, order.unsqueeze(-1).expand(x.shape))


class Max(Surjection):
    """A surjection y = max x, (n,) → (1,).

    The inverse draws the position of y and the other entries, with the term
    log n − Σ log q(rest | y), where q(rest | y) is N(mean, std²) truncated to values below y, with
    learned mean and std. ``Inverse(Max(n))`` is max pooling of data with n entries (Nielsen et al.
    2020, SurVAE flows).

    Args:
        n: the number of entries, at least 2.

    Shapes: x (..., n), y (..., 1), term (...).
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = (check_size(n, "the entries of Max", 2),)
        self.event_out: tuple[int, ...] = (1,)
        self.mean: nn.Parameter = nn.Parameter(torch.zeros(()))
        self.log_std: nn.Parameter = nn.Parameter(torch.zeros(()))

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        return open_uniform(rows, self.event_in[0] - 1), rows.uniform(1)

    def _log_q(self, rest: Tensor, y: Tensor) -> Tensor:
        """Return log q of the position and of the other entries."""
        std = self.log_std.exp()
        eps = (rest - self.mean) / std
        largest_eps = (y - self.mean) / std
        log_normal = -0.5 * (eps.square() + LOG_2PI) - self.log_std
        log_truncated = log_normal - log_ndtr(largest_eps).to(y.dtype)
        return log_truncated.sum(-1) - math.log(self.event_in[0])

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y, index = x.max(-1, keepdim=True)
        rest_index = torch.arange(self.event_in[0] - 1, device=x.device).expand(*x.shape[:-1], -1)
        rest = x.gather(-1, rest_index + (rest_index >= index))
        return y, self._log_q(rest, y)

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor, position: Tensor) -> Pair:
        n = self.event_in[0]
        std = self.log_std.exp()
        largest_eps = (y - self.mean) / std
        mass = promote(u) * log_ndtr(largest_eps).exp()
        eps = ndtri(mass.clamp_min(torch.finfo(torch.float32).tiny)).to(y.dtype)
        rest = torch.minimum(self.mean + std * eps, y)
        y_index = (position * n).floor().long()
        index = torch.arange(n, device=y.device)
        rest_index = index - (index > y_index).long()
        source = torch.where(index == y_index, n - 1, rest_index)
        x = torch.cat([rest, y], -1).gather(-1, source)
        return x, -self._log_q(rest, y)


def log_ndtr(x: Tensor) -> Tensor:
    """Compute log Φ(x), accurately in both tails.

    ``torch.special.log_ndtr`` supports neither vmap nor half precision.

    Args:
        x: a floating-point tensor.
    """
    x = promote(x) / math.sqrt(2)
    low = x.clamp_max(0)
    high = x.clamp_min(0)
    log_lower = (erfcx(-low) / 2).log() - low.square()
    log_upper = torch.log1p(-torch.erfc(high) / 2)
    return torch.where(x < 0, log_lower, log_upper)


class Autoencoder(Map):
    """A stochastic map y ~ p(y|x) with the inverse x ~ q(x|y).

    Its term of the inverse is log p(y|x) − log q(x|y), which gives the bound of a VAE,
    log p(y) ≥ E_q[log p(x) + log p(y|x) − log q(x|y)] (Kingma & Welling 2014).

    Args:
        decoder: p(y|x).
        encoder: q(x|y).

    Shapes: those of the encoder for x, those of the decoder for y, term (...).

    Raises:
        ValueError: if the shapes of the two do not agree.
    """

    takes_noise = True
    ladj_kind = Ladj.bound

    def __init__(
        self,
        decoder: ConditionalDistribution | Flow,
        encoder: ConditionalDistribution | Flow,
    ) -> None:
        super().__init__()
        self.decoder: ConditionalDistribution = as_conditional(decoder)
        self.encoder: ConditionalDistribution = as_conditional(encoder)
        self.event_in: Event = self.encoder.event
        self.event_out: Event = self.decoder.event
        self.decoder.accepts(self.event_out, self.event_in, "Autoencoder")
        self.encoder.accepts(self.event_in, self.event_out, "Autoencoder")
        self.levels_in: int | None = self.encoder.levels
        self.levels_out: int | None = self.decoder.levels
        self.whole_in: bool = self.levels_in is not None
        self.whole_out: bool = self.levels_out is not None

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        distribution = self.encoder if inverse else self.decoder
        return (distribution.noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        y, log_p = self.decoder.draw(noise, x, len(self.event_in))
        return y, self.encoder.log_prob(x, y, len(self.event_out)) - log_p

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        x, log_q = self.encoder.draw(noise, y, len(self.event_out))
        return x, self.decoder.log_prob(y, x, len(self.event_in)) - log_q
