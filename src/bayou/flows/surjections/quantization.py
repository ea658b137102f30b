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
from bayou.flows.core.transform import Pair, Rows, batch_shape, clamp_inside
from bayou.flows.surjections.conditional import (
    ConditionalFlow,
    Surjection,
    as_conditional,
    normal,
    open_uniform,
)

MAX_EXPONENT = 80.0  # of ``_bounded_exp``


class Dequantize(Surjection):
    r"""A surjection y = ⌊L·x⌋ onto integers, which gives discrete data a density.

    The inverse is x = (y + u)/L with u ~ q(u | y), with the term −log q(u | y) − D·log L for D
    coordinates. ``Flow.log_prob(samples=K)`` tightens the bound with K importance samples
    (Hoogeboom et al. 2020).

    Args:
        event: the shape of x and y, a size or several.
        levels: L, with x in [0, 1) and y in 0 .. L − 1; None, the default, for y = ⌊x⌋, unbounded.
        q: a flow onto (0, 1) with y as context (Ho et al. 2019, Flow++); by default uniform noise
            (Theis et al. 2016).

    Shapes: x, y (..., \*event), term (...).

    Raises:
        ValueError: for a q onto another interval than (0, 1).

    Example:
        >>> import torch, bayou.flows as flows
        >>> to_counts = flows.Chain(flows.realnvp(2), flows.Dequantize(2))
        >>> flow = flows.Flow(flows.StandardNormal(2), to_counts)
        >>> counts = torch.tensor([[0.0, 3.0], [2.0, 1.0]])
        >>> flow.log_prob(counts, samples=10, seed=0).shape
        torch.Size([2])
    """

    whole_out = True

    def __init__(
        self,
        event: int | Sequence[int],
        levels: int | None = None,
        q: ConditionalFlow | Flow | None = None,
    ) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = as_event(event)
        self.event_out: tuple[int, ...] = self.event_in
        self.levels: int | None = None
        self._scale = 0.0  # ladj of x ↦ L·x
        if levels is not None:
            self.levels = check_size(levels, "the number of levels")
            self._scale = math.prod(self.event_in) * math.log(levels)
        self.levels_out: int | None = self.levels
        self.q: ConditionalFlow | None = None
        if q is not None:
            self.q = as_conditional(q).accepts(self.event_in, self.event_out, "Dequantize")
            low, high = self.q.flow.transform.codomain
            if (low, high) != (0.0, 1.0):
                raise ValueError(
                    f"Dequantize needs q on (0, 1), got one on ({low:g}, {high:g}); end it with "
                    "Inverse(InverseCDF)"
                )

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        if self.q is None:
            return (rows.uniform(*self.event_in),)
        return (self.q.noise(rows),)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        scaled = x if self.levels is None else self.levels * x
        y = scaled.floor()
        if self.levels is not None:
            y = y.clamp(0, self.levels - 1)  # pixels are rounded to 0 and 1, and beyond
        if self.q is None:
            log_q = x.new_zeros(batch_shape(x, self.event_in))
        else:
            log_q = self.q.log_prob(clamp_inside(scaled - y, (0.0, 1.0)), y, len(self.event_out))
        return y, log_q + self._scale

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor) -> Pair:
        if self.q is None:
            u = noise
            log_q = y.new_zeros(batch_shape(y, self.event_in))
        else:
            u, log_q = self.q.draw(noise, y, len(self.event_out))
        # y + u must not be rounded to the next integer.
        edge = (torch.finfo(y.dtype).eps * (1 + y.abs())).clamp_max(0.5)
        x = y + torch.minimum(torch.maximum(u, edge), 1 - edge)
        if self.levels is not None:
            x = clamp_inside(x / self.levels, (0.0, 1.0))
        return x, -log_q - self._scale


class Argmax(Surjection):
    """A surjection y = argmax_k x_k, (D, K) → (D,).

    The inverse draws Gumbel variables with this argmax, with the term −log q(x | y): the largest is
    Gumbel(log Σ exp φ), the others are Gumbel(φ_k) truncated below it, with learned locations
    φ (D, K) (Hoogeboom et al. 2021, argmax flows).

    Args:
        dim: the number of coordinates D.
        classes: the number of classes K; y is in 0 .. K − 1.

    Shapes: x (..., D, K), y (..., D), term (...).
    """

    whole_out = True

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.classes: int = check_size(classes, "the classes of Argmax", 2)
        self.levels_out: int | None = self.classes
        self.event_in: tuple[int, ...] = (check_size(dim, "the size"), classes)
        self.event_out: tuple[int, ...] = (dim,)
        self.location: nn.Parameter = nn.Parameter(torch.zeros(dim, classes))

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        largest_u = open_uniform(rows, self.event_in[0])
        return largest_u, open_uniform(rows.fold("others"), *self.event_in)

    def _log_q(self, x: Tensor, hot: Tensor) -> Tensor:
        """Return log q(x | y), for y as a one-hot code."""
        largest = (x * hot).sum(-1)
        log_largest = _gumbel_log_prob(largest, self.location.logsumexp(-1))
        log_mass_below = _bounded_exp(self.location - largest.unsqueeze(-1))
        log_truncated = _gumbel_log_prob(x, self.location) + log_mass_below
        return (log_largest + (log_truncated * (1 - hot)).sum(-1)).sum(-1)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        y = x.argmax(-1)
        return y.to(x), self._log_q(x, one_hot(y, self.classes).to(x))

    def _inverse(self, y: Tensor, context: Tensor | None, u: Tensor, v: Tensor) -> Pair:
        hot = one_hot(y.long(), self.classes).to(y)
        largest = (self.location.logsumexp(-1) - (-u.log()).log()).unsqueeze(-1)
        # F(x) = v·F(largest): −log v + exp(φ − largest) = exp(φ − x)
        below = self.location - (-v.log() + (self.location - largest).exp()).log()
        x = torch.where(hot > 0, largest, below)
        return x, -self._log_q(x, hot)


def _gumbel_log_prob(x: Tensor, location: Tensor) -> Tensor:
    """Compute the log-density of a Gumbel distribution with scale 1."""
    difference = location - x
    return difference - _bounded_exp(difference)


def _bounded_exp(x: Tensor) -> Tensor:
    """Compute exp(x) with a finite maximum.

    A Gumbel density of e^(−e^80) need not decrease further.
    """
    return x.clamp_max(MAX_EXPONENT).exp()


class BinaryArgmax(Surjection):
    """A surjection y = the class whose binary code is given by the signs of x, (D, bits) → (D,).

    The inverse draws magnitudes softplus(u), u ~ q(u | code), with the term −log q(x | y). Codes
    beyond the last class (5 of 32 for 27 classes) are second codes of the first classes; the
    inverse draws one of the two (Hoogeboom et al. 2021, argmax flows).

    Args:
        dim: the number of coordinates D.
        classes: the number of classes K; y is in 0 .. K − 1.
        q: a distribution of u (D·bits,), conditional on the code as ±1; by default a learned
            Gaussian.

    Shapes: x (..., D, bits) with bits = ⌈log₂ K⌉, y (..., D), term (...).
    """

    whole_out = True

    def __init__(self, dim: int, classes: int, q: ConditionalFlow | Flow | None = None) -> None:
        super().__init__()
        self.classes: int = check_size(classes, "the classes of BinaryArgmax", 2)
        self.levels_out: int | None = self.classes
        self.bits: int = (classes - 1).bit_length()
        self.event_in: tuple[int, ...] = (check_size(dim, "the size"), self.bits)
        self.event_out: tuple[int, ...] = (dim,)
        size = dim * self.bits
        if q is None:
            q = normal((size,))
        self.q: ConditionalFlow = as_conditional(q).accepts((size,), (size,), "BinaryArgmax")

    def _inverse_noise(self, rows: Rows) -> tuple[Any, ...]:
        return self.q.noise(rows), rows.fold("code").uniform(self.event_in[0])

    def _bit_values(self, device: torch.device) -> Tensor:
        """Return 1, 2, 4, ..., the values of the bits."""
        return 2 ** torch.arange(self.bits, device=device)

    def _has_two_codes(self, y: Tensor) -> Tensor:
        """Return whether a class has two codes."""
        return y + self.classes < 2**self.bits

    def _log_q(self, u: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
        """Return log q(x | y), from log q(u | code)."""
        return log_q - logsigmoid(u).sum(-1) - math.log(2) * self._has_two_codes(y).to(u).sum(-1)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        code = ((x > 0).long() * self._bit_values(x.device)).sum(-1)
        y = torch.where(code < self.classes, code, code - self.classes)
        magnitude = x.abs().clamp_min(torch.finfo(x.dtype).tiny).flatten(-2)
        u = magnitude + (-torch.expm1(-magnitude)).log()  # inverse softplus
        signs = torch.where(x > 0, 1.0, -1.0).to(x).flatten(-2)
        return y.to(x), self._log_q(u, self.q.log_prob(u, signs, 1), y)

    def _inverse(self, y: Tensor, context: Tensor | None, noise: Tensor, choice: Tensor) -> Pair:
        has_second_code = self._has_two_codes(y) & (choice < 0.5)
        code = y.long() + self.classes * has_second_code.long()
        bits = code.unsqueeze(-1) // self._bit_values(y.device) % 2
        signs = (2 * bits - 1).to(y)
        u, log_q = self.q.draw(noise, signs.flatten(-2), 1)
        return signs * softplus(u).reshape(signs.shape), -self._log_q(u, log_q, y)
