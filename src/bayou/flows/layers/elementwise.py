"""Increasing functions of one variable, for coupling and autoregressive flows.

All take x (...) and parameters (..., P), and are at or near the identity when the parameters are
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
from bayou.flows.core.transform import Cost, Pair, wrap_angle

UNIT_SOFTPLUS = math.log(math.e - 1)  # softplus of it is 1
MIN_WIDTH = 1e-3  # of a bin of a spline, as a fraction of the box
MIN_SLOPE = 1e-3  # of a spline at a knot
LOG_SCALE_BOUND = 3.0  # of log a in a mixture of logistics
OFFSET_BOUND = 6.0  # of b in a mixture of logistics


class Elementwise(ABC):
    """An increasing function of one variable, y = g(x; p), with log ∂y/∂x.

    A subclass has ``params``, ``forward`` and ``inverse``; it holds settings and no tensors, since
    a conditioner computes the parameters p.

    Shapes: x, y and the log-slope (...), p (..., params).
    """

    inverse_kind: Cost = Cost.analytic
    # whether x and y are angles in [−π, π), which conditioners read as (cos, sin)
    circular: bool = False

    @property
    @abstractmethod
    def params(self) -> int:
        """The number of parameters per coordinate."""

    @abstractmethod
    def forward(self, x: Tensor, p: Tensor) -> Pair:
        """Return y and the log-slope log ∂y/∂x.

        Args:
            x: values (...).
            p: parameters (..., params).
        """

    @abstractmethod
    def inverse(self, y: Tensor, p: Tensor) -> Pair:
        """Return x and the log-slope of the inverse, log ∂x/∂y.

        Args:
            y: values (...).
            p: parameters (..., params).
        """

    def either(self, x: Tensor, p: Tensor, inverse: bool) -> Pair:
        """Return the result of ``inverse`` or of ``forward``.

        Args:
            x: values (...).
            p: parameters (..., params).
            inverse: whether to compute the inverse.
        """
        if inverse:
            return self.inverse(x, p)
        return self.forward(x, p)


def _limit(raw: Tensor, bound: float) -> Tensor:
    """Return bound·tanh(raw/bound), which is about raw near 0 and at most the bound."""
    return bound * torch.tanh(raw / bound)


@dataclass(frozen=True)
class Additive(Elementwise):
    """A shift, y = x + p (Dinh et al. 2015, NICE)."""

    params = 1

    def forward(self, x: Tensor, p: Tensor) -> Pair:
        return x + p[..., 0], torch.zeros_like(x)

    def inverse(self, y: Tensor, p: Tensor) -> Pair:
        return y - p[..., 0], torch.zeros_like(y)


@dataclass(frozen=True)
class Affine(Elementwise):
    """An affine map with a bounded scale, y = exp(s)·x + t with s = bound·tanh(p/bound).

    Dinh et al. 2017, RealNVP.

    Args:
        bound: the largest |s|; 3 by default.
    """

    bound: float = 3.0

    params = 2

    def _log_scale(self, p: Tensor) -> Tensor:
        return _limit(p[..., 1], self.bound)

    def forward(self, x: Tensor, p: Tensor) -> Pair:
        log_scale = self._log_scale(p)
        return torch.addcmul(p[..., 0], x, log_scale.exp()), log_scale

    def inverse(self, y: Tensor, p: Tensor) -> Pair:
        log_scale = -self._log_scale(p)
        return (y - p[..., 0]) * log_scale.exp(), log_scale


@dataclass(frozen=True)
class BoundedAffine(Affine):
    """An affine map whose inverse has a scale of at most 1/sigmoid(bias).

    y = exp(s)·x + t with s = softplus(−q − bias) − softplus(−bias), q = bound·tanh(p/bound). The
    scale of the inverse is sigmoid(q + bias)/sigmoid(bias), at most 1.14 for a bias of 2 (Kingma &
    Dhariwal 2018), so that densities of long chains stay finite; the bound of q does the same for
    draws.

    Args:
        bound: the largest |q|; 8 by default.
        bias: the bias of the sigmoid; 2 by default.
    """

    bound: float = 8.0
    bias: float = 2.0

    def _log_scale(self, p: Tensor) -> Tensor:
        return F.softplus(-super()._log_scale(p) - self.bias) - math.log1p(math.exp(-self.bias))


@dataclass(frozen=True)
class Gate(Elementwise):
    """A gate between x and a value, y = γ·x + (1 − γ)·μ with γ = sigmoid(s + bias).

    s = bound·tanh(p/bound) keeps γ away from 0, where the map has no inverse (Kingma et al. 2016,
    IAF; Louizos & Welling 2017, MNF).

    Args:
        bias: the bias of the gate; with 2, the default, γ is 0.88 for p = 0.
        bound: the largest |s|; 8 by default.
    """

    bias: float = 2.0
    bound: float = 8.0

    params = 2

    def _logit(self, p: Tensor) -> Tensor:
        """Return logit γ."""
        return _limit(p[..., 1], self.bound) + self.bias

    def forward(self, x: Tensor, p: Tensor) -> Pair:
        logit = self._logit(p)
        return p[..., 0] + logit.sigmoid() * (x - p[..., 0]), F.logsigmoid(logit)

    def inverse(self, y: Tensor, p: Tensor) -> Pair:
        log_gate = F.logsigmoid(self._logit(p))
        return p[..., 0] + (y - p[..., 0]) * (-log_gate).exp(), -log_gate


@dataclass
class _Bin:
    """The bin of a spline that each number falls in.

    Attributes:
        start, length: of the axis of the numbers.
        image_start, image_length: of the other axis.
        first_slope, last_slope: ∂y/∂x at the two ends.
    """

    start: Tensor
    length: Tensor
    image_start: Tensor
    image_length: Tensor
    first_slope: Tensor
    last_slope: Tensor


@dataclass(frozen=True)
class Spline(Elementwise):
    """A monotone rational-quadratic spline on [−bound, bound], the identity outside.

    With the fraction t of a bin, its mean slope s = height/width and the slopes d₀, d₁ at its ends,
    y = y₀ + height·(s·t² + d₀·t(1 − t)) / (s + (d₀ + d₁ − 2s)·t(1 − t)) (Durkan et al. 2019).

    Args:
        bins: the number of bins, from 2 to 999; 8 by default.
        bound: the half-width of the box; 5 by default.
        circular: whether the spline is one of the circle [−π, π), with equal slopes at both ends,
            followed by a shift modulo 2π (Rezende et al. 2020, Normalizing Flows on Tori and
            Spheres); it has ``bound=math.pi``. False by default.
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
                f"a circular Spline has bound=math.pi, got {self.bound}; scale the angles to "
                "radians"
            )

    @property
    def params(self) -> int:
        """The number of parameters: widths, heights and slopes; for a circle also the shift."""
        if self.circular:
            return 3 * self.bins + 1
        return 3 * self.bins - 1

    @property
    def _limit(self) -> float:
        """The distance from 0 at which the identity begins."""
        if self.circular:
            return math.inf
        return self.bound

    def forward(self, x: Tensor, p: Tensor) -> Pair:
        if self.circular:
            x = wrap_angle(x)
        is_inside = x.abs() < self._limit
        clamped = x.clamp(-self.bound, self.bound)
        widths, heights = self._lengths(p)
        bin_ = self._find_bin(clamped, widths, heights, p)
        slope = bin_.image_length / bin_.length
        t = _clamp_fraction((clamped - bin_.start) / bin_.length)
        u = t * (1 - t)
        denominator = slope + (bin_.first_slope + bin_.last_slope - 2 * slope) * u
        numerator = slope * t * t + bin_.first_slope * u
        y = bin_.image_start + bin_.image_length * numerator / denominator
        log_slope = _log_slope(bin_, slope, t, 1 - t, denominator)
        if self.circular:
            y = wrap_angle(y + p[..., -1])
        return torch.where(is_inside, y, x), torch.where(is_inside, log_slope, 0.0)

    def inverse(self, y: Tensor, p: Tensor) -> Pair:
        if self.circular:
            y = wrap_angle(y - p[..., -1])
        is_inside = y.abs() < self._limit
        clamped = y.clamp(-self.bound, self.bound)
        widths, heights = self._lengths(p)
        bin_ = self._find_bin(clamped, heights, widths, p)
        slope = bin_.length / bin_.image_length
        t, rest = _solve_bin(bin_, slope, clamped)
        denominator = slope + (bin_.first_slope + bin_.last_slope - 2 * slope) * t * rest
        log_slope = _log_slope(bin_, slope, t, rest, denominator)
        x = bin_.image_start + t * bin_.image_length
        return torch.where(is_inside, x, y), torch.where(is_inside, -log_slope, 0.0)

    def _lengths(self, p: Tensor) -> Pair:
        """Return the widths and the heights of the bins: (..., bins), summing to 2·bound each."""
        box = 2 * self.bound
        raw_widths = p[..., : self.bins]
        raw_heights = p[..., self.bins : 2 * self.bins]
        free = box * (1 - MIN_WIDTH * self.bins)
        widths = torch.softmax(raw_widths, -1) * free + box * MIN_WIDTH
        heights = torch.softmax(raw_heights, -1) * free + box * MIN_WIDTH
        return widths, heights

    def _find_bin(self, x: Tensor, lengths: Tensor, image_lengths: Tensor, p: Tensor) -> _Bin:
        """Return the bin of each x.

        Args:
            x: numbers (...) in [−bound, bound].
            lengths: of the bins on the axis of x (..., bins).
            image_lengths: of the bins on the other axis (..., bins).
            p: parameters (..., params), of which the slopes are used.
        """
        inner_edges = lengths.detach().cumsum(-1)[..., :-1] - self.bound
        index = (x.unsqueeze(-1) >= inner_edges).sum(-1, keepdim=True)
        is_below = (torch.arange(self.bins, device=x.device) < index).to(x.dtype)
        raw_slopes = self._raw_slopes(p)
        return _Bin(
            start=(lengths * is_below).sum(-1) - self.bound,
            length=lengths.gather(-1, index).squeeze(-1),
            image_start=(image_lengths * is_below).sum(-1) - self.bound,
            image_length=image_lengths.gather(-1, index).squeeze(-1),
            first_slope=_slope(raw_slopes.gather(-1, index).squeeze(-1)),
            last_slope=_slope(raw_slopes.gather(-1, index + 1).squeeze(-1)),
        )

    def _raw_slopes(self, p: Tensor) -> Tensor:
        """Return the slopes at all knots before their softplus: (..., bins + 1)."""
        raw = p[..., 2 * self.bins :]
        if self.circular:
            return torch.cat([raw[..., :-1], raw[..., :1]], -1)
        # The outermost slopes are 1, as in the tails: raw value 0.
        return F.pad(raw, (1, 1), value=0.0)


def _slope(raw: Tensor) -> Tensor:
    """Return the slope at a knot, which is 1 for a raw value of 0."""
    shift = math.log(math.expm1(1 - MIN_SLOPE))
    return F.softplus(raw + shift) + MIN_SLOPE


def _clamp_fraction(t: Tensor) -> Tensor:
    """Return t clamped to [0, 1], with the gradient of t.

    Rounding puts numbers at a knot just outside of their bin, where the slope may be negative.
    """
    return t + (t.clamp(0, 1) - t).detach()


def _solve_bin(bin_: _Bin, slope: Tensor, y: Tensor) -> Pair:
    """Return the fraction t of its width at which a bin has the value y, and 1 − t.

    With θ the fraction of the height below y and φ = 1 − θ, z = t/(1 − t) solves
    s·φ·z² + b·z − s·θ = 0. Both roots are real by a sum of positive terms; t and 1 − t are
    quotients of such sums, and nothing cancels.
    """
    theta = _clamp_fraction((y - bin_.start) / bin_.length)
    phi = _clamp_fraction((bin_.start + bin_.length - y) / bin_.length)
    b = bin_.first_slope * phi - bin_.last_slope * theta
    is_early = b >= 0
    size_b = torch.where(is_early, b, -b)
    p_term = 2 * slope * torch.where(is_early, theta, phi)
    q_term = size_b + (b * b + 4 * slope * slope * (theta * phi)).sqrt()
    total = p_term + q_term
    t = torch.where(is_early, p_term, q_term) / total
    rest = torch.where(is_early, q_term, p_term) / total
    return t, rest


def _log_slope(bin_: _Bin, slope: Tensor, t: Tensor, rest: Tensor, denominator: Tensor) -> Tensor:
    """Return log ∂y/∂x at the fraction t of a bin, with rest = 1 − t."""
    ends = bin_.last_slope * t.square() + bin_.first_slope * rest.square()
    numerator = slope * slope * (ends + 2 * slope * t * rest)
    return torch.log(numerator / (denominator * denominator))


def _logit_mixture(x: Tensor, p: Tensor, offsets: Tensor) -> Pair:
    """Return logit Σ_j w_j·sigmoid(a_j·x + b_j) and its log-slope, all in log space.

    Args:
        x: numbers (...).
        p: parameters (..., 3K) of w, a and b.
        offsets: the b (K,) of p = 0.
    """
    log_w, log_a, a, b = _mixture_params(p, offsets)
    u = a * x.unsqueeze(-1) + b
    log_sigmoid = F.logsigmoid(u)
    log_complement = F.logsigmoid(-u)
    log_below = torch.logsumexp(log_w + log_sigmoid, -1)
    log_above = torch.logsumexp(log_w + log_complement, -1)
    log_density = torch.logsumexp(log_w + log_a + log_sigmoid + log_complement, -1)
    return log_below - log_above, log_density - log_below - log_above


def _mixture_params(p: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log w, log a, a and b of a mixture of logistics.

    log a and b are bounded: far from the data the slope would explode, or vanish between distant
    components; large changes of location and scale are left to the affine map.
    """
    raw_w, raw_a, raw_b = p.chunk(3, -1)
    log_a = _limit(raw_a, LOG_SCALE_BOUND)
    b = _limit(raw_b, OFFSET_BOUND) + offsets
    return raw_w.log_softmax(-1), log_a, log_a.exp(), b


def _invert_logit_mixture(y: Tensor, p: Tensor, offsets: Tensor) -> Pair:
    """Return the x with ``_logit_mixture`` equal to y, and the log-slope of the inverse.

    The root is bracketed by min_j a_j·x + b_j ≤ logit of the mixture ≤ max_j a_j·x + b_j.
    """
    dtype = y.dtype
    # half precision has too few digits for root finding
    y = promote(y)
    p = promote(p)
    _, _, a, b = _mixture_params(p.detach(), offsets)
    ends = (y.detach().unsqueeze(-1) - b) / a

    def residual(x: Tensor, y: Tensor, p: Tensor) -> Pair:
        value, log_slope = _logit_mixture(x, p, offsets)
        return value - y, log_slope.exp()

    x = solve_increasing(residual, ends.amin(-1), ends.amax(-1), y, p)
    return x.to(dtype), -_logit_mixture(x, p, offsets)[1].to(dtype)


def _initial_offsets(components: int, template: Tensor) -> Tensor:
    """Return distinct offsets, since components with equal parameters have equal gradients."""
    if components == 1:
        return template.new_zeros(1)
    return torch.linspace(-1.0, 1.0, components, dtype=template.dtype, device=template.device)


@dataclass(frozen=True)
class DeepSigmoid(Elementwise):
    """Maps y = logit(Σ_j w_j·sigmoid(a_j·x + b_j)), one after another, then an affine map.

    A deep sigmoidal flow (Huang et al. 2018, NAF). The inverse finds one root per map.

    Args:
        units: the number of sigmoids per map; 8 by default.
        depth: the number of maps; 2 by default.
    """

    units: int = 8
    depth: int = 2

    inverse_kind = Cost.iterative

    def __post_init__(self) -> None:
        if self.units < 1 or self.depth < 1:
            raise ValueError(f"DeepSigmoid needs units >= 1 and depth >= 1, got {self}")

    @property
    def params(self) -> int:
        """The number of parameters: two of the affine map, three of every sigmoid."""
        return 2 + 3 * self.units * self.depth

    def forward(self, x: Tensor, p: Tensor) -> Pair:
        log_slopes = []
        for map_params in p[..., 2:].chunk(self.depth, -1):
            offsets = _initial_offsets(self.units, map_params)
            x, log_slope = _logit_mixture(x, map_params, offsets)
            log_slopes.append(log_slope)
        y, log_slope = Affine().forward(x, p)
        return y, sum(log_slopes, log_slope)

    def inverse(self, y: Tensor, p: Tensor) -> Pair:
        x, log_slope = Affine().inverse(y, p)
        log_slopes = [log_slope]
        for map_params in reversed(p[..., 2:].chunk(self.depth, -1)):
            offsets = _initial_offsets(self.units, map_params)
            x, log_slope = _invert_logit_mixture(x, map_params, offsets)
            log_slopes.append(log_slope)
        return x, sum(log_slopes[1:], log_slopes[0])


def logistic_mixture(components: int = 8) -> DeepSigmoid:
    """Return the CDF of a mixture of logistics as an elementwise map.

    y = exp(s)·logit(Σ_j w_j·sigmoid(a_j·x + b_j)) + t (Ho et al. 2019, Flow++).

    Args:
        components: the number of logistics; 8 by default.

    Returns:
        A ``DeepSigmoid`` of depth 1.
    """
    return DeepSigmoid(components, depth=1)
