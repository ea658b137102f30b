"""Surjections onto integers: dequantization and argmax flows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot, softplus

from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Pair, Rows, clamp_inside
from bayou.flows.surjections.conditional import (
    ConditionalFlow,
    Surjection,
    as_conditional,
    normal,
    open_uniform,
)


class Dequantize(Surjection):
    r"""y = ⌊L·x⌋; the inverse is x = (y + u)/L with u ~ q(u|y), term −log q(u|y) − D·log L.

    ``Flow.log_prob(samples=K)`` uses K importance samples (Hoogeboom et al. 2020).

    Args:
        event: the shape of x and y.
        levels: L, with x in [0, 1) and y in 0 .. L − 1; by default y = ⌊x⌋, unbounded.
        q: a flow onto (0, 1) with y as context (Ho et al. 2019), by default uniform noise (Theis et
            al. 2016).
    """

    whole_out = True

    def __init__(
        self,
        event: int | Sequence[int],
        levels: int | None = None,
        q: ConditionalFlow | Flow | None = None,
    ) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(event)
        self.levels = self.levels_out = (
            None if levels is None else check_size(levels, "the number of levels")
        )
        self._scale = 0.0 if levels is None else math.prod(self.event_in) * math.log(levels)
        self.q = (
            None
            if q is None
            else as_conditional(q).accepts(self.event_in, self.event_out, "Dequantize")
        )
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
            term = self.q.log_prob(clamp_inside(u, (0.0, 1.0)), y, len(self.event_out))
        return y, term + self._scale

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        if self.q is None:
            u, log_q = noise, y.new_zeros(y.shape[: y.ndim - len(self.event_in)])
        else:
            u, log_q = self.q.draw(noise, y, len(self.event_out))
        # y + u must not be rounded to the next integer.
        edge = (torch.finfo(y.dtype).eps * (1 + y.abs())).clamp_max(0.5)
        x = y + torch.minimum(torch.maximum(u, edge), 1 - edge)
        return x if self.levels is None else clamp_inside(
            x / self.levels, (0.0, 1.0)
        ), -log_q - self._scale


class Argmax(Surjection):
    """y = argmax_k x_k, (D, K) → (D,); the inverse draws Gumbel variables with this argmax, term
    −log q(x|y).

    The largest is Gumbel(log Σ exp φ), the others Gumbel(φ_k) truncated below it, with learned
    locations φ (D, K) (Hoogeboom et al. 2021).

    Args:
        dim: D.
        classes: K; y is in 0 .. K − 1.
    """

    whole_out = True

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.classes = self.levels_out = check_size(classes, "the classes of Argmax", 2)
        self.event_in, self.event_out = (check_size(dim, "the size"), classes), (dim,)
        self.location = nn.Parameter(torch.zeros(dim, classes))

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return open_uniform(rows, self.event_in[0]), open_uniform(
            rows.fold("others"), *self.event_in
        )

    def _log_q(self, x: Tensor, hot: Tensor) -> Tensor:
        top = (x * hot).sum(-1)
        first = _gumbel(top, self.location.logsumexp(-1))
        others = _gumbel(x, self.location) + _bounded_exp(self.location - top.unsqueeze(-1))
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


def _gumbel(x: Tensor, location: Tensor) -> Tensor:
    away = location - x
    return away - _bounded_exp(away)


def _bounded_exp(x: Tensor) -> Tensor:
    """exp(x) with a finite maximum: a Gumbel density of e^(−e^80) need not decrease further."""
    return x.clamp_max(80.0).exp()


class BinaryArgmax(Surjection):
    """y = the class whose binary code is given by the signs of x, (D, bits) → (D,) (Hoogeboom et
    al. 2021).

    The inverse draws magnitudes softplus(u), u ~ q(u | code), term −log q(x|y). Codes beyond the
    last class (5 of 32 for 27 classes) are second codes of the first classes; the inverse draws one
    of the two.

    Args:
        dim: D.
        classes: K; y is in 0 .. K − 1.
        q: a distribution of u (D·bits,), conditional on the code as ±1; by default a learned
            Gaussian.
    """

    whole_out = True

    def __init__(self, dim: int, classes: int, q: ConditionalFlow | Flow | None = None) -> None:
        super().__init__()
        self.classes = self.levels_out = check_size(classes, "the classes of BinaryArgmax", 2)
        self.bits = (classes - 1).bit_length()
        self.event_in, self.event_out = (check_size(dim, "the size"), self.bits), (dim,)
        size = dim * self.bits
        self.q = (as_conditional(q) if q is not None else ConditionalFlow(normal((size,)))).accepts(
            (size,), (size,), "BinaryArgmax"
        )

    def _draws(self, rows: Rows) -> tuple[Any, ...]:
        return self.q.noise(rows), rows.fold("code").uniform(self.event_in[0])

    def _weights(self, like: Tensor) -> Tensor:
        return 2 ** torch.arange(self.bits, device=like.device)

    def _has_two_codes(self, y: Tensor) -> Tensor:
        """Whether a class has two codes."""
        return y + self.classes < 2**self.bits

    def _log_q(self, u: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
        return log_q - logsigmoid(u).sum(-1) - math.log(2) * self._has_two_codes(y).to(u).sum(-1)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        code = ((x > 0).long() * self._weights(x)).sum(-1)
        y = torch.where(code < self.classes, code, code - self.classes)
        size = x.abs().clamp_min(torch.finfo(x.dtype).tiny).flatten(-2)
        u = size + (-torch.expm1(-size)).log()  # inverse softplus
        signs = torch.where(x > 0, 1.0, -1.0).to(x).flatten(-2)
        return y.to(x), self._log_q(u, self.q.log_prob(u, signs, 1), y)

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor, which: Tensor) -> Pair:
        second = self._has_two_codes(y) & (which < 0.5)
        code = y.long() + self.classes * second.long()
        signs = (2 * (code.unsqueeze(-1) // self._weights(y) % 2) - 1).to(y)
        u, log_q = self.q.draw(noise, signs.flatten(-2), 1)
        return signs * softplus(u).reshape(signs.shape), -self._log_q(u, log_q, y)
