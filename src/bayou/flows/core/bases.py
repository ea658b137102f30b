"""Base distributions of flows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.flows.core.arguments import as_event, positive, promote
from bayou.flows.core.implicit import refuse_second_derivative
from bayou.flows.core.roots import solve_increasing
from bayou.flows.core.transform import clamp_inside, sum_event, wrap_angle

MAX_KAPPA, CDF_TERMS = (
    100.0,
    100,
)  # of a von Mises distribution: all further terms of its CDF are below 1e-20

ONE_DERIVATIVE_OF_WEIGHTS = (
    "draws of GaussianMixture have only first derivatives in the weights of the components, and a second one was "
    "requested; keep the weights constant with logits.requires_grad_(False)"
)


class Base(nn.Module, ABC):
    """A distribution of events with reparameterized draws.

    Args:
        event: the size of a vector, or the shape of an event.

    Shapes: ``draw`` returns (n, *batch, *event_shape), ``log_prob`` maps (..., *event_shape) to
    (...).
    """

    event_shape: tuple[int, ...]
    anchor: Tensor

    def __init__(self, event: int | Sequence[int]) -> None:
        super().__init__()
        self.event_shape = as_event(event, type(self).__name__)
        # Noise follows the dtype and device of this buffer, whether or not the base has parameters.
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    @abstractmethod
    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        """Draws start .. start + n − 1 for every element of the batch, differentiable in the
        parameters.
        """

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of x."""


def _normal_log_prob(eps: Tensor, event_dims: int) -> Tensor:
    return -0.5 * sum_event(eps.square() + LOG_2PI, event_dims)


def normal_cdf(x: Tensor) -> Tensor:
    """Φ(x), accurate in the lower tail; ``torch.special.ndtr`` is 0 below −5.6 in float32."""
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)


class StandardNormal(Base):
    """N(0, I)."""

    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        return rng.normal(n, (*batch, *self.event_shape), self.anchor, seed, start)

    def log_prob(self, x: Tensor) -> Tensor:
        return _normal_log_prob(x, len(self.event_shape))


class DiagonalNormal(Base):
    """N(mean, diag(std²)) with learned mean and std.

    Args:
        event: the size of a vector, or the shape of an event.
        mean, std: initial values.
    """

    def __init__(self, event: int | Sequence[int], mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__(event)
        if not 0 < std < math.inf or not math.isfinite(mean):
            raise ValueError(
                f"DiagonalNormal needs a finite mean and a positive and finite std, got mean={mean}, std={std}"
            )
        self.mean = nn.Parameter(torch.full(self.event_shape, float(mean)))
        self.log_std = nn.Parameter(torch.full(self.event_shape, math.log(std)))

    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        return self.mean + self.log_std.exp() * rng.normal(
            n, (*batch, *self.event_shape), self.anchor, seed, start
        )

    def log_prob(self, x: Tensor) -> Tensor:
        dims = len(self.event_shape)
        return _normal_log_prob((x - self.mean) * (-self.log_std).exp(), dims) - sum_event(
            self.log_std, dims
        )


class Uniform(Base):
    """The uniform distribution on the box [low, high]; the log-density is −∞ outside.

    Args:
        event: the size of a vector, or the shape of an event.
        low, high: the ends of every coordinate.
    """

    def __init__(self, event: int | Sequence[int], low: float = 0.0, high: float = 1.0) -> None:
        super().__init__(event)
        if not low < high:
            raise ValueError(f"Uniform needs low < high, got low={low}, high={high}")
        self.low, self.high = float(low), float(high)

    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        u = rng.uniform(n, (*batch, *self.event_shape), self.anchor, seed, start)
        return clamp_inside(self.low + (self.high - self.low) * u, (self.low, self.high))

    def log_prob(self, x: Tensor) -> Tensor:
        inside = (x >= self.low) & (x <= self.high)
        return sum_event(
            torch.where(inside, -math.log(self.high - self.low), -torch.inf).to(x),
            len(self.event_shape),
        )


class VonMises(Base):
    """Independent angles in [−π, π), log p(x) = Σ κ·cos(x − μ) − log 2π·I₀(κ), with learned μ and
    κ.

    A draw is μ + F⁻¹(u; κ) modulo 2π, with the CDF F(t) = ½ + t/2π + Σ_j I_j(κ)/I₀(κ)·sin(jt)/(jπ)
    inverted by root
    finding: draws are differentiable in μ and κ, whereas ``torch.distributions.VonMises`` draws by
    rejection.

    Args:
        event: the size of a vector, or the shape of an event.
        mean: the initial μ.
        kappa: the initial κ, below 100: the series needs a bound, and κ = 100·sigmoid(``logit``).
    """

    def __init__(self, event: int | Sequence[int], mean: float = 0.0, kappa: float = 1.0) -> None:
        super().__init__(event)
        if not 0 < kappa < MAX_KAPPA:
            raise ValueError(f"VonMises needs 0 < kappa < {MAX_KAPPA:g}, got {kappa}")
        self.mean = nn.Parameter(torch.full(self.event_shape, float(mean)))
        self.logit = nn.Parameter(
            torch.full(self.event_shape, math.log(kappa / (MAX_KAPPA - kappa)))
        )

    @property
    def kappa(self) -> Tensor:
        """κ, in a dtype that Bessel functions support."""
        return MAX_KAPPA * promote(self.logit).sigmoid()

    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        u = promote(rng.uniform(n, (*batch, *self.event_shape), self.anchor, seed, start))
        kappa = self.kappa
        ratios = [
            torch.zeros_like(kappa)
        ]  # I_j/I_{j−1}, from the last j to the first, by their recurrence
        for j in range(CDF_TERMS, 0, -1):
            ratios.append((2 * j / kappa + ratios[-1]).reciprocal())
        orders = torch.arange(1, CDF_TERMS + 1, dtype=kappa.dtype, device=kappa.device)
        products = torch.stack(ratios[:0:-1]).cumprod(0)
        terms = products / orders.reshape(-1, *[1] * kappa.ndim)  # (CDF_TERMS, *event)

        def f(t: Tensor, u: Tensor, terms: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
            this, last = torch.zeros_like(t), torch.zeros_like(t)
            for term in reversed(terms.unbind()):  # Clenshaw's sum of a sine series
                this, last = term + 2 * t.cos() * this - last, this
            cdf = 0.5 + t / (2 * math.pi) + this * t.sin() / math.pi
            return cdf - u, _von_mises_log_density(t, kappa).exp()

        end = torch.full_like(u, math.pi)
        root = solve_increasing(f, -end, end, u, terms, kappa)
        return wrap_angle(self.mean + root.to(self.mean.dtype))

    def log_prob(self, x: Tensor) -> Tensor:
        log_density = _von_mises_log_density(promote(x - self.mean), self.kappa)
        return sum_event(log_density, len(self.event_shape)).to(x.dtype)


def _von_mises_log_density(t: Tensor, kappa: Tensor) -> Tensor:
    """Return log p of angles t from the mean."""
    return kappa * (t.cos() - 1) - torch.log(2 * math.pi * torch.special.i0e(kappa))


class GaussianMixture(Base):
    """Σ_k π_k N(mean_k, diag(std_k²)), for densities with several modes; all parameters are
    learned.

    A draw is mean_k + std_k·ε, which is differentiable in means and stds. Gradients of the weights
    come from the distributional transform u_d = F(x_d | x_{<d}) (Figurnov et al. 2018, Implicit
    Reparameterization Gradients), by one triangular solve (D, D) per draw; frozen ``logits`` need
    none. All gradients are unbiased. The transform is not used for means and stds, since its
    gradients there are heavy-tailed in high dimensions. The gradients of a draw are no longer
    unbiased if they are differentiated again in the weights, or those of the weights in anything;
    both raise a ``SecondDerivativeError``.

    Args:
        dim: D.
        components: K.
        spread: the initial distance of every coordinate of a mean from 0.
    """

    def __init__(self, dim: int, components: int = 2, spread: float = 2.0) -> None:
        super().__init__(dim)
        positive(components, "the components of GaussianMixture")
        # Random sign vectors in ± pairs.
        signs = rng.normal((components + 1) // 2, (dim,), torch.zeros(()), seed=0).sign()
        means = torch.cat([signs, -signs])[:components] * (spread if components > 1 else 0.0)
        self.mean = nn.Parameter(means)
        self.log_std = nn.Parameter(torch.zeros(components, dim))
        self.logits = nn.Parameter(torch.zeros(components))

    def draw(
        self, n: int, batch: Sequence[int] = (), seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        batch = tuple(batch)
        dim = self.event_shape[0]
        eps = rng.normal(n, (*batch, dim), self.anchor, rng.fold(seed, "noise"), start)
        u = rng.uniform(n, (*batch, 1), self.anchor, rng.fold(seed, "component"), start)
        edges = self.logits.detach().softmax(-1).cumsum(-1)[:-1]
        k = (u >= edges).sum(-1)  # (n, *batch)
        x = self.mean[k] + self.log_std[k].exp() * eps
        if not (torch.is_grad_enabled() and self.logits.requires_grad):
            return x
        shift = self._implicit(x.detach(), self.mean.detach(), self.log_std.detach())
        shift = refuse_second_derivative(shift, ONE_DERIVATIVE_OF_WEIGHTS, self.mean, self.log_std)
        return refuse_second_derivative(x - shift, ONE_DERIVATIVE_OF_WEIGHTS, self.logits)

    def _implicit(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Zero, with the gradient of −x that keeps every conditional CDF F(x_d | x_{<d}) constant.

        dx = −J⁻¹·dF at fixed x, where J = ∂F/∂x is lower triangular.
        """
        eps = (x[..., None, :] - mean) * (-log_std).exp()  # (..., K, D)
        log_pdf = -0.5 * (eps.square() + LOG_2PI) - log_std
        # Exclusive sums; subtracting the last term would cancel where a narrow component is far
        # away.
        before = self.logits.unsqueeze(-1) + pad(log_pdf[..., :-1].cumsum(-1), (1, 0))
        weight = before.softmax(-2)  # p(k | x_{<d})
        below = normal_cdf(eps)
        cdf = (weight * below).sum(-2)  # (..., D)
        with torch.no_grad():
            density = (weight * log_pdf.exp()).sum(-2).clamp_min(torch.finfo(x.dtype).tiny)
            pull = weight * (below - cdf.unsqueeze(-2)) / density.unsqueeze(-2)
            slope = -eps * (-log_std).exp()  # ∂ log p(x_j | k)/∂x_j
            jacobian = (pull.mT @ slope).tril(-1)  # (..., D, D), each row over its density
        shift = ((cdf - cdf.detach()) / density).unsqueeze(-1)
        moved = torch.linalg.solve_triangular(
            promote(jacobian), promote(shift), upper=False, unitriangular=True
        )
        return moved.squeeze(-1).to(x.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        eps = (x[..., None, :] - self.mean) * (-self.log_std).exp()
        joint = _normal_log_prob(eps, 1) - self.log_std.sum(-1) + self.logits.log_softmax(-1)
        return joint.logsumexp(-1)
