"""Maps that lose something on one of their ways (SurVAE flows, Nielsen et al. 2020).

All are written from base to data, y = f(x) with x ~ q(x|y) on the way back: log p(y) ≥ E_q[log p(x) − log q(x|y)], a
bound. ``Inverse`` of one loses on the way back instead: data y are drawn, y ~ p(y|x), and x = f(y) is known, so that
log p(y) = log p(x) + log p(y|x) is exact, where the density below lives on what f gives (positive, ordered) and nowhere
else; on a wider one it is a lower bound only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot, softplus
from torch.special import erfcx, ndtri

from bayou.constants import LOG_2PI
from bayou.flows.bases import StandardNormal
from bayou.flows.flow import Flow
from bayou.flows.given import ConditionalDistribution, Given, as_given, open_uniform
from bayou.flows.linear import positive, wide
from bayou.flows.transform import Label, Ladj, Map, Pair, Rows, known, sum_event


class Surjection(Map):
    """y = f(x), many to one; back, x ~ q(x|y), and the term is −log q(x|y): a bound."""

    takes_noise = True
    ladj_kind = Ladj.bound
    opposite = Label()  # Inverse(self): exact
    event_in: tuple[int, ...]
    event_out: tuple[int, ...]

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return self._draws(rows) if inverse else ()

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        """The noise of x ~ q(x|y)."""
        raise NotImplementedError


def _event(size: int | Sequence[int]) -> tuple[int, ...]:
    return (positive(size, "the size"),) if isinstance(size, int) else tuple(positive(s, "a size") for s in size)


class Dequantize(Surjection):
    r"""y = ⌊x⌋, or with ``levels`` L ⌊L·x⌋ of x in [0, 1); back, x = (y + u)/L with u ~ q(u|y) on the unit cube.

    V = −log q(u|y) − D·log L. ``q``: a flow onto (0, 1) with y as context, by default uniform (Theis et al. 2016; Ho et
    al. 2019 for one that is learned; ``Flow.log_prob(samples=K)`` for K importance samples, Hoogeboom et al. 2020).
    """

    whole_out = True

    def __init__(self, event: int | Sequence[int], levels: int | None = None, q: Given | Flow | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = _event(event)
        self.levels = None if levels is None else positive(levels, "the number of levels")
        self.q = None if q is None else as_given(q).accepts(self.event_in, self.event_out, "Dequantize")
        if self.q is not None and self.q.flow.transform.codomain != (0.0, 1.0):
            low, high = self.q.flow.transform.codomain
            raise ValueError(
                f"Dequantize needs q on (0, 1), got one on ({low:g}, {high:g}); end it with Inverse(InverseCDF)"
            )

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(*self.event_in) if self.q is None else self.q.noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = (x if self.levels is None else self.levels * x).floor()
        term = x.new_zeros(x.shape[: x.ndim - len(self.event_in)])
        if self.q is not None:
            u = (x if self.levels is None else self.levels * x) - y
            tiny = torch.finfo(u.dtype).eps
            term = self.q.log_prob(u.clamp(tiny, 1 - tiny), y, len(self.event_out))
        return y, term + self._scale

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        if self.q is None:
            u, log_q = noise, y.new_zeros(y.shape[: y.ndim - len(self.event_in)])
        else:
            u, log_q = self.q.draw(noise, y, len(self.event_out))
        return (y + u) / (self.levels or 1), -log_q - self._scale

    @property
    def _scale(self) -> float:
        return 0.0 if self.levels is None else math.prod(self.event_in) * math.log(self.levels)

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Data are whole numbers, from 0 to levels − 1."""
        super().validate(x, context, inverse)
        if inverse:
            check_whole(x, self.levels, "Dequantize")


def check_whole(y: Tensor, levels: int | None, who: str) -> None:
    """Raise a ValueError unless y has whole numbers, in 0 .. levels − 1 where levels are given."""
    if known((y == y.floor()).all()) is False:
        raise ValueError(
            f"{who} takes whole numbers as data, got {y.flatten()[(y != y.floor()).flatten()][0]:g}; round them first"
        )
    if levels is not None and known(((y >= 0) & (y < levels)).all()) is False:
        raise ValueError(
            f"{who} takes 0 to {levels - 1}, got {y.min():g} to {y.max():g}; give more levels, or shift the data"
        )


class Slice(Surjection):
    """y = the first ``keep`` entries of x along its first axis; back, the rest is drawn from q(rest | y): V = −log q.

    ``Inverse(Slice(...))`` is augmentation: on the way to data, entries are added; on the way back they are scored by
    p(rest | kept), exactly, which is how a multi-scale flow lets go of half of its channels (Dinh et al. 2017).
    """

    def __init__(self, event: int | Sequence[int], keep: int, rest: Given | Flow | None = None) -> None:
        super().__init__()
        self.event_in = _event(event)
        if not 0 < keep < self.event_in[0]:
            raise ValueError(
                f"Slice keeps some of the {self.event_in[0]} entries, not all and not none; got keep={keep}"
            )
        self.event_out = (keep, *self.event_in[1:])
        dropped = (self.event_in[0] - keep, *self.event_in[1:])
        self.rest = (as_given(rest) if rest is not None else Given(normal(dropped))).accepts(
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


def normal(event: tuple[int, ...]) -> Flow:
    """N(mean, std²), both learned, over an event: what is drawn where nothing is said."""
    from bayou.flows.linear import DiagonalAffine

    if len(event) != 1:
        raise ValueError(f"say which distribution the dropped events {event} have: pass a flow over them")
    return Flow(StandardNormal(event), DiagonalAffine(*event))


class Abs(Surjection):
    """y = abs(x); back, every sign is drawn, + with probability ½, or by the logits of ``net``: V = −Σ log q(sign).

    ``Inverse(Abs)`` draws signs on the way to data: V = Σ log p(sign), −D·log 2 without a net.
    """

    codomain = (0.0, math.inf)

    def __init__(self, event: int | Sequence[int], net: nn.Module | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = _event(event)
        self.net = net

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return (rows.uniform(*self.event_in),)

    def _log_q(self, sign: Tensor, y: Tensor) -> Tensor:
        each = torch.full_like(y, -math.log(2)) if self.net is None else logsigmoid(sign * self.net(y))
        return sum_event(each, len(self.event_in))

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = x.abs()
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
        self.event_in = self.event_out = _event(n if features is None else (n, features))

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

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Data are in order."""
        super().validate(x, context, inverse)
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
        self.event_in = self.event_out = _event(n if features is None else (n, features))
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
        if n < 2:
            raise ValueError(f"Max takes two entries or more, got {n}")
        self.event_in, self.event_out = (n,), (1,)
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


class Argmax(Surjection):
    """y = argmax_k x_k, (D, K) → (D,); back, Gumbel variables with locations φ whose largest is the y-th: V = −log q.

    The largest is Gumbel(log Σ exp φ), the others Gumbel(φ_k) below it (Hoogeboom et al. 2021). φ is learned, one for
    every entry and class. Classes are whole numbers 0 .. K − 1.
    """

    whole_out = True

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(f"Argmax needs two classes or more, got {classes}")
        self.classes = classes
        self.event_in, self.event_out = (positive(dim, "the size"), classes), (dim,)
        self.location = nn.Parameter(torch.zeros(dim, classes))

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return open_uniform(rows, self.event_in[0]), open_uniform(rows.fold("others"), *self.event_in)

    def _log_q(self, x: Tensor, hot: Tensor) -> Tensor:
        top = (x * hot).sum(-1)
        first = _gumbel(top, self.location.logsumexp(-1))
        others = _gumbel(x, self.location) + _steep(self.location - top.unsqueeze(-1))
        return (first + (others * (1 - hot)).sum(-1)).sum(-1)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = x.argmax(-1)
        return y.to(x), self._log_q(x, one_hot(y, self.classes).to(x))

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor, v: Tensor) -> Pair:
        hot = one_hot(y.long(), self.classes).to(y)
        top = (self.location.logsumexp(-1) - (-u.log()).log()).unsqueeze(-1)
        # F(x) = v·F(top): −log v + exp(φ − top) = exp(φ − x)
        below = self.location - (-v.log() + (self.location - top).exp()).log()
        x = torch.where(hot > 0, top, below)
        return x, -self._log_q(x, hot)

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Data are classes."""
        super().validate(x, context, inverse)
        if inverse:
            check_whole(x, self.classes, "Argmax")


def _gumbel(x: Tensor, location: Tensor) -> Tensor:
    away = location - x
    return away - _steep(away)


def _steep(x: Tensor) -> Tensor:
    """exp(x), finite: where the density of a Gumbel variable is e^(−e^80) it need not fall further."""
    return x.clamp_max(80.0).exp()


class BinaryArgmax(Surjection):
    """y = the class whose binary code the signs of x spell, (D, bits) → (D,); back, sizes are drawn: V = −log q(x|y).

    Codes beyond the last class spell the first ones a second time (with 27 classes 5 of 32), and the way back draws
    between the two, so that nothing is lost and the bound is that of the whole event. Sizes: softplus(u), u from ``q``
    given the code (±1), by default a learned Gaussian (Hoogeboom et al. 2021).
    """

    whole_out = True

    def __init__(self, dim: int, classes: int, q: Given | Flow | None = None) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(f"BinaryArgmax needs two classes or more, got {classes}")
        self.classes, self.bits = classes, (classes - 1).bit_length()
        self.event_in, self.event_out = (positive(dim, "the size"), self.bits), (dim,)
        size = dim * self.bits
        self.q = (as_given(q) if q is not None else Given(normal((size,)))).accepts((size,), (size,), "BinaryArgmax")

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return self.q.noise(rows), rows.fold("code").uniform(self.event_in[0])

    def _weights(self, like: Tensor) -> Tensor:
        return 2 ** torch.arange(self.bits, device=like.device)

    def _twice(self, y: Tensor) -> Tensor:
        """Whether a class has two codes."""
        return y + self.classes < 2**self.bits

    def _log_q(self, u: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
        return log_q - logsigmoid(u).sum(-1) - math.log(2) * self._twice(y).to(u).sum(-1)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        code = ((x > 0).long() * self._weights(x)).sum(-1)
        y = torch.where(code < self.classes, code, code - self.classes)
        size = x.abs().clamp_min(torch.finfo(x.dtype).tiny).flatten(-2)
        u = size + (-torch.expm1(-size)).log()  # softplus backwards
        signs = torch.where(x > 0, 1.0, -1.0).to(x).flatten(-2)
        return y.to(x), self._log_q(u, self.q.log_prob(u, signs, 1), y)

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor, which: Tensor) -> Pair:
        second = self._twice(y) & (which < 0.5)
        code = y.long() + self.classes * second.long()
        signs = (2 * (code.unsqueeze(-1) // self._weights(y) % 2) - 1).to(y)
        u, log_q = self.q.draw(noise, signs.flatten(-2), 1)
        return signs * softplus(u).reshape(signs.shape), -self._log_q(u, log_q, y)

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Data are classes."""
        super().validate(x, context, inverse)
        if inverse:
            check_whole(x, self.classes, "BinaryArgmax")


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
        self.whole_in, self.whole_out = self.encoder.levels is not None, self.decoder.levels is not None

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        return ((self.encoder if inverse else self.decoder).noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        y, log_p = self.decoder.draw(noise, x, len(self.event_in))
        return y, self.encoder.log_prob(x, y, len(self.event_out)) - log_p

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        x, log_q = self.encoder.draw(noise, y, len(self.event_out))
        return x, self.decoder.log_prob(y, x, len(self.event_in)) - log_q

    def validate(self, x: Tensor, context: Tensor | None = None, inverse: bool = False) -> None:
        """Discrete data are whole numbers."""
        super().validate(x, context, inverse)
        if inverse and self.decoder.levels is not None:
            check_whole(x, self.decoder.levels, type(self.decoder).__name__)
