"""Increasing functions of one variable, for coupling and autoregressive flows.

All take x (...) and parameters (..., P), and start at or near the identity when the parameters are
zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayou.flows.core.arguments import promote
from bayou.flows.core.roots import solve_increasing
from bayou.flows.core.transform import Cost, wrap_angle

UNIT_SOFTPLUS = math.log(math.e - 1)  # softplus of it is 1
MIN_WIDTH, MIN_SLOPE = 1e-3, 1e-3  # of a spline: of a bin as a fraction of the box, and at a knot
LOG_SCALE_BOUND, OFFSET_BOUND = 3.0, 6.0  # of log a and b in a mixture of logistics


class Elementwise(ABC):
    """y = g(x; p), increasing in x, with log ∂y/∂x. Shapes: x, y and the log-slope (...), p (...,
    params).
    """

    inverse_kind: Cost = Cost.analytic
    circular: bool = (
        False  # whether x and y are angles in [−π, π), which conditioners read as (cos, sin)
    )

    @property
    @abstractmethod
    def params(self) -> int:
        """The number of parameters per coordinate."""

    @abstractmethod
    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """(y, log-slope)."""

    @abstractmethod
    def inverse(self, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """(x, log-slope of the inverse)."""

    def either(self, x: Tensor, p: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """The result of a direction."""
        return self.inverse(x, p) if inverse else self.forward(x, p)


@dataclass(frozen=True)
class Additive(Elementwise):
    """y = x + p (Dinh et al. 2015, NICE)."""

    params = 1

    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return x + p[..., 0], torch.zeros_like(x)

    def inverse(self, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return y - p[..., 0], torch.zeros_like(y)


@dataclass(frozen=True)
class Affine(Elementwise):
    """y = exp(s)·x + t with s = bound·tanh(p/bound), so that scales are bounded (Dinh et al. 2017,
    RealNVP).
    """

    bound: float = 3.0

    params = 2

    def _log_scale(self, p: Tensor) -> Tensor:
        return self.bound * torch.tanh(p[..., 1] / self.bound)

    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        s = self._log_scale(p)
        return torch.addcmul(p[..., 0], x, s.exp()), s

    def inverse(self, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        s = -self._log_scale(p)
        return (y - p[..., 0]) * s.exp(), s


@dataclass(frozen=True)
class BoundedAffine(Affine):
    """y = exp(s)·x + t with s = softplus(−q − bias) − softplus(−bias), q = bound·tanh(p/bound).

    The scale of the inverse is sigmoid(q + bias)/sigmoid(bias), at most 1.14 for a bias of 2
    (Kingma & Dhariwal 2018), so that densities of long chains stay finite; the bound of q does the
    same for draws.
    """

    bound: float = 8.0
    bias: float = 2.0

    def _log_scale(self, p: Tensor) -> Tensor:
        return F.softplus(-super()._log_scale(p) - self.bias) - math.log1p(math.exp(-self.bias))


@dataclass(frozen=True)
class Gate(Elementwise):
    """y = γ·x + (1 − γ)·μ with γ = sigmoid(s + bias) (Kingma et al. 2016, IAF; Louizos & Welling
    2017, MNF).

    s = bound·tanh(p/bound) keeps γ away from 0, where the map has no inverse.
    """

    bias: float = 2.0
    bound: float = 8.0

    params = 2

    def _gate(self, p: Tensor) -> Tensor:
        return self.bound * torch.tanh(p[..., 1] / self.bound) + self.bias

    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        gate = self._gate(p)
        return p[..., 0] + gate.sigmoid() * (x - p[..., 0]), F.logsigmoid(gate)

    def inverse(self, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        log_gate = F.logsigmoid(self._gate(p))
        return p[..., 0] + (y - p[..., 0]) * (-log_gate).exp(), -log_gate


@dataclass(frozen=True)
class Spline(Elementwise):
    """Monotone rational-quadratic spline on [−bound, bound], the identity outside (Durkan et al.
    2019).

    Args:
        bins: the number of bins.
        bound: the half-width of the box.
        circular: a spline of the circle [−π, π) with equal slopes at both ends, then a shift modulo
            2π (Rezende et al. 2020, Normalizing Flows on Tori and Spheres). The bound is π.
    """

    bins: int = 8
    bound: float = 5.0
    circular: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bins < 1 / MIN_WIDTH or self.bound <= 0:
            raise ValueError(
                f"Spline needs 2 <= bins < {1 / MIN_WIDTH:g} and bound > 0, got {self}"
            )
        if self.circular and self.bound != math.pi:
            raise ValueError(
                f"a circular Spline has bound=math.pi, got {self.bound}; scale the angles to radians"
            )

    @property
    def params(self) -> int:
        return 3 * self.bins + (1 if self.circular else -1)

    @property
    def _end(self) -> float:
        return math.inf if self.circular else self.bound

    def _lengths(self, p: Tensor) -> Tensor:
        """Widths or heights of the bins: (..., bins), summing to 2·bound."""
        box = 2 * self.bound
        return torch.softmax(p, -1) * (box * (1 - MIN_WIDTH * self.bins)) + box * MIN_WIDTH

    def _bin(self, x: Tensor, searched: Tensor, other: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        """Of the bin that x falls in along ``searched``: left edge, length (of both axes), and the
        two slopes.
        """
        index = (x.unsqueeze(-1) >= searched.detach().cumsum(-1)[..., :-1] - self.bound).sum(
            -1, keepdim=True
        )
        below = (torch.arange(self.bins, device=x.device) < index).to(x.dtype)
        left, other_left = ((lengths * below).sum(-1) - self.bound for lengths in (searched, other))
        length, other_length = (
            lengths.gather(-1, index).squeeze(-1) for lengths in (searched, other)
        )
        raw = p[..., 2 * self.bins :]
        # On a line the outermost slopes are 1, as in the tails: raw value 0.
        raw = (
            torch.cat([raw[..., :-1], raw[..., :1]], -1)
            if self.circular
            else F.pad(raw, (1, 1), value=0.0)
        )
        shift = math.log(math.expm1(1 - MIN_SLOPE))
        slopes = (
            F.softplus(raw.gather(-1, index + k).squeeze(-1) + shift) + MIN_SLOPE for k in (0, 1)
        )
        return left, length, other_left, other_length, *slopes

    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        x = wrap_angle(x) if self.circular else x
        inside, clamped = x.abs() < self._end, x.clamp(-self.bound, self.bound)
        widths, heights = (
            self._lengths(p[..., k * self.bins : (k + 1) * self.bins]) for k in (0, 1)
        )
        x0, width, y0, height, d0, d1 = self._bin(clamped, widths, heights, p)
        slope, t = height / width, (clamped - x0) / width
        u = t * (1 - t)
        below = slope + (d0 + d1 - 2 * slope) * u
        y = y0 + height * (slope * t * t + d0 * u) / below
        log_slope = self._log_slope(slope, t, 1 - t, d0, d1, below)
        if self.circular:
            y = wrap_angle(y + p[..., -1])
        return torch.where(inside, y, x), torch.where(inside, log_slope, 0.0)

    def inverse(self, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        y = wrap_angle(y - p[..., -1]) if self.circular else y
        inside, clamped = y.abs() < self._end, y.clamp(-self.bound, self.bound)
        widths, heights = (
            self._lengths(p[..., k * self.bins : (k + 1) * self.bins]) for k in (0, 1)
        )
        y0, height, x0, width, d0, d1 = self._bin(clamped, heights, widths, p)
        slope = height / width
        # With θ the share of the bin below y and φ = 1 − θ, z = t/(1 − t) solves s·φ·z² + b·z − s·θ
        # = 0. Both roots are real by a sum of positive terms; t and 1 − t are quotients of such
        # sums, and nothing cancels.
        theta = (clamped - y0) / height
        phi = (y0 + height - clamped) / height
        b = d0 * phi - d1 * theta
        is_early = b >= 0
        size_b = torch.where(is_early, b, -b)
        p_term = 2 * slope * torch.where(is_early, theta, phi)
        q_term = size_b + (b * b + 4 * slope * slope * (theta * phi).clamp_min(0)).sqrt()
        t = torch.where(is_early, p_term, q_term) / (p_term + q_term)
        rest = torch.where(is_early, q_term, p_term) / (p_term + q_term)
        below = slope + (d0 + d1 - 2 * slope) * t * rest
        log_slope = self._log_slope(slope, t, rest, d0, d1, below)
        return torch.where(inside, x0 + t * width, y), torch.where(inside, -log_slope, 0.0)

    @staticmethod
    def _log_slope(
        slope: Tensor, t: Tensor, rest: Tensor, d0: Tensor, d1: Tensor, below: Tensor
    ) -> Tensor:
        """log ∂y/∂x at the fraction t of a bin, with rest = 1 − t."""
        ends = d1 * t.square() + d0 * rest.square()
        return torch.log(slope * slope * (ends + 2 * slope * t * rest) / (below * below))


def _logit_mixture(x: Tensor, p: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """logit Σ_j w_j·sigmoid(a_j·x + b_j) and its log-slope, all in log space; p is (..., 3K) of w,
    a, b.
    """
    log_w, log_a, a, b = _mixture_params(p, offsets)
    u = a * x.unsqueeze(-1) + b
    log_s, log_1ms = F.logsigmoid(u), F.logsigmoid(-u)
    below, above = torch.logsumexp(log_w + log_s, -1), torch.logsumexp(log_w + log_1ms, -1)
    log_slope = torch.logsumexp(log_w + log_a + log_s + log_1ms, -1) - below - above
    return below - above, log_slope


def _mixture_params(p: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log w, log a, a and b. log a and b are bounded: far from the data the slope would explode, or
    vanish between distant components; large changes of location and scale are left to the affine
    map."""
    w, raw_a, raw_b = p.chunk(3, -1)
    log_a = LOG_SCALE_BOUND * torch.tanh(raw_a / LOG_SCALE_BOUND)
    return (
        w.log_softmax(-1),
        log_a,
        log_a.exp(),
        OFFSET_BOUND * torch.tanh(raw_b / OFFSET_BOUND) + offsets,
    )


def _logit_mixture_inverse(y: Tensor, p: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse by root finding, bracketed by min a_j·x + b_j ≤ logit of the mixture ≤ max a_j·x
    + b_j.
    """
    dtype = y.dtype
    y, p = promote(y), promote(p)  # half precision has too few digits for root finding
    _, _, a, b = _mixture_params(p.detach(), offsets)
    ends = (y.detach().unsqueeze(-1) - b) / a

    def f(x: Tensor, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        value, log_slope = _logit_mixture(x, p, offsets)
        return value - y, log_slope.exp()

    x = solve_increasing(f, ends.amin(-1), ends.amax(-1), y, p)
    return x.to(dtype), -_logit_mixture(x, p, offsets)[1].to(dtype)


def _offsets(components: int, like: Tensor) -> Tensor:
    """Distinct initial offsets, since components with equal parameters would have equal
    gradients.
    """
    if components == 1:
        return like.new_zeros(1)
    return torch.linspace(-1.0, 1.0, components, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class DeepSigmoid(Elementwise):
    """``depth`` maps y = logit(Σ_j w_j·sigmoid(a_j·x + b_j)), then an affine map (Huang et al.
    2018, NAF).

    Args:
        units: sigmoids per map.
        depth: the number of maps.
    """

    units: int = 8
    depth: int = 2

    inverse_kind = Cost.iterative

    def __post_init__(self) -> None:
        if self.units < 1 or self.depth < 1:
            raise ValueError(f"DeepSigmoid needs units >= 1 and depth >= 1, got {self}")

    @property
    def params(self) -> int:
        return 2 + 3 * self.units * self.depth

    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        log_slopes = []
        for layer in p[..., 2:].chunk(self.depth, -1):
            x, log_slope = _logit_mixture(x, layer, _offsets(self.units, layer))
            log_slopes.append(log_slope)
        y, log_slope = Affine().forward(x, p)
        return y, sum(log_slopes, log_slope)

    def inverse(self, y: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        x, log_slope = Affine().inverse(y, p)
        log_slopes = [log_slope]
        for layer in reversed(p[..., 2:].chunk(self.depth, -1)):
            x, log_slope = _logit_mixture_inverse(x, layer, _offsets(self.units, layer))
            log_slopes.append(log_slope)
        return x, sum(log_slopes[1:], log_slopes[0])


def logistic_mixture(components: int = 8) -> DeepSigmoid:
    """y = exp(s)·logit(Σ_j w_j·sigmoid(a_j·x + b_j)) + t: mixture-of-logistics CDF (Ho et al. 2019,
    Flow++).
    """
    return DeepSigmoid(components, depth=1)
