"""Base distributions of flows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.flows.core.arguments import as_event, check_size, promote
from bayou.flows.core.implicit import refuse_second_derivative
from bayou.flows.core.roots import solve_increasing
from bayou.flows.core.transform import Rows, clamp_inside, sum_event, wrap_angle

if TYPE_CHECKING:
    from bayou.flows.core.flow import Flow

MAX_KAPPA = 100.0  # of a von Mises distribution
CDF_TERMS = 100  # of a von Mises CDF; all further ones are below 1e-20 for κ < MAX_KAPPA

ONE_DERIVATIVE_OF_WEIGHTS = (
    "draws of GaussianMixture have only first derivatives in the weights of the components, and a "
    "second one was requested; keep the weights constant with logits.requires_grad_(False)"
)


class CodecError(ValueError):
    """A flow that cannot be used for coding, or bytes that it cannot decode.

    Bytes may be damaged, of another format, or from another model.
    """


class Base(nn.Module, ABC):
    """A distribution of events with reparameterized draws.

    A subclass implements ``draw`` and ``log_prob``.

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
        self,
        n: int,
        batch: Sequence[int] = (),
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        """Draw events that are differentiable in the parameters.

        Args:
            n: the number of draws for every element of the batch.
            batch: the batch shape; () by default.
            seed: an int, a generator, or None for torch's generator.
            start: the index of the first draw; 0 by default. Draw i depends on (seed, start + i).

        Returns:
            Draws (n, *batch, *event_shape).
        """

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log-density.

        Args:
            x: events (..., *event_shape).

        Returns:
            Log-densities (...).
        """

    def compress(self, flow: Flow, y: Tensor, context: Tensor | None = None) -> bytes:
        """Encode data with a flow of this base; see ``Flow.compress``.

        Args:
            flow: a flow with this base.
            y: data (..., *event) of the flow.
            context: (..., context_dim), for a flow with a context.

        Raises:
            CodecError: unless the base is discrete.
        """
        self._refuse_compression()

    def decompress(self, flow: Flow, data: bytes, context: Tensor | None = None) -> Tensor:
        """Decode data with a flow of this base; see ``Flow.decompress``.

        Args:
            flow: a flow with this base.
            data: the output of ``compress``.
            context: the context that was passed to ``compress``.

        Raises:
            CodecError: unless the base is discrete.
        """
        self._refuse_compression()

    def _refuse_compression(self) -> NoReturn:
        raise CodecError(
            f"this flow cannot be used for compression: its base, {type(self).__name__}, is not "
            "discrete; use DiscretizedLogistic or Categorical"
        )


class NoiseBase(Base):
    """A base whose draw i is a function of the noise of row i.

    A subclass implements ``_draw`` and ``log_prob``.

    Args:
        event: the size of a vector, or the shape of an event.
    """

    def draw(
        self,
        n: int,
        batch: Sequence[int] = (),
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        return self._draw(Rows((n,), self.anchor, seed, start), tuple(batch))

    @abstractmethod
    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        """Return draws (n, *batch, *event_shape).

        Args:
            rows: the source of the noise of the n draws.
            batch: the batch shape.
        """


def _normal_log_prob(eps: Tensor, event_dims: int) -> Tensor:
    """Return log N(eps; 0, I), summed over the event."""
    return -0.5 * sum_event(eps.square() + LOG_2PI, event_dims)


def normal_cdf(x: Tensor) -> Tensor:
    """Compute Φ(x), accurate in the lower tail.

    ``torch.special.ndtr`` is 0 below −5.6 in float32.

    Args:
        x: real numbers.
    """
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)


class StandardNormal(NoiseBase):
    """The standard normal distribution N(0, I).

    Args:
        event: the size of a vector, or the shape of an event.

    Example:
        >>> from bayou.flows import StandardNormal
        >>> x = StandardNormal(3).draw(5, seed=0)
        >>> x.shape, StandardNormal(3).log_prob(x).shape
        (torch.Size([5, 3]), torch.Size([5]))
    """

    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        return rows.normal(*batch, *self.event_shape)

    def log_prob(self, x: Tensor) -> Tensor:
        return _normal_log_prob(x, len(self.event_shape))


class DiagonalNormal(NoiseBase):
    """A normal distribution N(mean, diag(std²)) with learned mean and std.

    Args:
        event: the size of a vector, or the shape of an event.
        mean: the initial mean of every coordinate; 0 by default.
        std: the initial standard deviation of every coordinate; 1 by default.
    """

    def __init__(self, event: int | Sequence[int], mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__(event)
        if not 0 < std < math.inf or not math.isfinite(mean):
            raise ValueError(
                "DiagonalNormal needs a finite mean and a positive and finite std, got "
                f"mean={mean}, std={std}"
            )
        self.mean: nn.Parameter = nn.Parameter(torch.full(self.event_shape, float(mean)))
        self.log_std: nn.Parameter = nn.Parameter(torch.full(self.event_shape, math.log(std)))

    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        eps = rows.normal(*batch, *self.event_shape)
        return self.mean + self.log_std.exp() * eps

    def log_prob(self, x: Tensor) -> Tensor:
        dims = len(self.event_shape)
        eps = (x - self.mean) * (-self.log_std).exp()
        return _normal_log_prob(eps, dims) - sum_event(self.log_std, dims)


class Uniform(NoiseBase):
    """The uniform distribution on the box [low, high]; the log-density is −∞ outside.

    Args:
        event: the size of a vector, or the shape of an event.
        low: the lower end of every coordinate; 0 by default.
        high: the upper end of every coordinate; 1 by default.
    """

    def __init__(self, event: int | Sequence[int], low: float = 0.0, high: float = 1.0) -> None:
        super().__init__(event)
        if not low < high:
            raise ValueError(f"Uniform needs low < high, got low={low}, high={high}")
        self.low: float = float(low)
        self.high: float = float(high)

    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        u = rows.uniform(*batch, *self.event_shape)
        return clamp_inside(self.low + (self.high - self.low) * u, (self.low, self.high))

    def log_prob(self, x: Tensor) -> Tensor:
        is_inside = (x >= self.low) & (x <= self.high)
        log_density = torch.where(is_inside, -math.log(self.high - self.low), -torch.inf).to(x)
        return sum_event(log_density, len(self.event_shape))


class VonMises(NoiseBase):
    """Independent von Mises distributions of angles in [−π, π), with learned μ and κ.

    log p(x) = Σ κ·cos(x − μ) − log 2π·I₀(κ). A draw is μ + F⁻¹(u; κ) modulo 2π, with the CDF
    F(t) = ½ + t/2π + Σ_j I_j(κ)/I₀(κ)·sin(jt)/(jπ) inverted by root finding: draws are
    differentiable in μ and κ, whereas ``torch.distributions.VonMises`` draws by rejection.

    Args:
        event: the size of a vector, or the shape of an event.
        mean: the initial μ of every angle; 0 by default.
        kappa: the initial κ of every angle, below 100: the series needs a bound, and
            κ = 100·sigmoid(``logit``). 1 by default.
    """

    def __init__(self, event: int | Sequence[int], mean: float = 0.0, kappa: float = 1.0) -> None:
        super().__init__(event)
        if not 0 < kappa < MAX_KAPPA:
            raise ValueError(f"VonMises needs 0 < kappa < {MAX_KAPPA:g}, got {kappa}")
        self.mean: nn.Parameter = nn.Parameter(torch.full(self.event_shape, float(mean)))
        self.logit: nn.Parameter = nn.Parameter(
            torch.full(self.event_shape, math.log(kappa / (MAX_KAPPA - kappa)))
        )

    @property
    def kappa(self) -> Tensor:
        """κ, in a dtype that Bessel functions support."""
        return MAX_KAPPA * promote(self.logit).sigmoid()

    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        u = promote(rows.uniform(*batch, *self.event_shape))
        kappa = self.kappa
        coefficients = _sine_coefficients(kappa)
        end = torch.full_like(u, math.pi)
        t = solve_increasing(_von_mises_cdf_residual, -end, end, u, coefficients, kappa)
        return wrap_angle(self.mean + t.to(self.mean.dtype))

    def log_prob(self, x: Tensor) -> Tensor:
        log_density = _von_mises_log_density(promote(x - self.mean), self.kappa)
        return sum_event(log_density, len(self.event_shape)).to(x.dtype)


def _sine_coefficients(kappa: Tensor) -> Tensor:
    """Return I_j(κ)/(j·I₀(κ)) for j = 1, 2, ...: (CDF_TERMS, *event)."""
    # I_j/I_{j−1}, from the last j to the first, by their recurrence
    ratios = [torch.zeros_like(kappa)]
    for j in range(CDF_TERMS, 0, -1):
        ratios.append((2 * j / kappa + ratios[-1]).reciprocal())
    orders = torch.arange(1, CDF_TERMS + 1, dtype=kappa.dtype, device=kappa.device)
    products = torch.stack(ratios[:0:-1]).cumprod(0)
    return products / orders.reshape(-1, *[1] * kappa.ndim)


def _von_mises_cdf_residual(
    t: Tensor,
    u: Tensor,
    coefficients: Tensor,
    kappa: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return F(t) − u for angles t from the mean, and the density, which is its slope."""
    # Clenshaw's sum of a sine series
    current = torch.zeros_like(t)
    previous = torch.zeros_like(t)
    for coefficient in reversed(coefficients.unbind()):
        following = coefficient + 2 * t.cos() * current - previous
        previous = current
        current = following
    cdf = 0.5 + t / (2 * math.pi) + current * t.sin() / math.pi
    return cdf - u, _von_mises_log_density(t, kappa).exp()


def _von_mises_log_density(t: Tensor, kappa: Tensor) -> Tensor:
    """Return log p of angles t from the mean."""
    return kappa * (t.cos() - 1) - torch.log(2 * math.pi * torch.special.i0e(kappa))


class GaussianMixture(NoiseBase):
    """A mixture of normal distributions, Σ_k π_k N(mean_k, diag(std_k²)), with several modes.

    Means, stds and weights are learned. A draw is mean_k + std_k·ε, which is differentiable in
    means and stds. Gradients of the weights come from the distributional transform
    u_d = F(x_d | x_{<d}) (Figurnov et al. 2018, Implicit Reparameterization Gradients), by one
    triangular solve (D, D) per draw; frozen ``logits`` need none. All gradients are unbiased. The
    transform is not used for means and stds, since its gradients there are heavy-tailed in high
    dimensions. The gradients of a draw are no longer unbiased if they are differentiated again in
    the weights, or those of the weights in anything; both raise a ``SecondDerivativeError``.

    Args:
        dim: the number of coordinates D.
        components: the number of components K; 2 by default.
        spread: the initial distance of every coordinate of a mean from 0; 2 by default.
    """

    def __init__(self, dim: int, components: int = 2, spread: float = 2.0) -> None:
        super().__init__(dim)
        check_size(components, "the components of GaussianMixture")
        # Random sign vectors in ± pairs.
        signs = rng.normal((components + 1) // 2, (dim,), torch.zeros(()), seed=0).sign()
        means = torch.cat([signs, -signs])[:components] * (spread if components > 1 else 0.0)
        self.mean: nn.Parameter = nn.Parameter(means)
        self.log_std: nn.Parameter = nn.Parameter(torch.zeros(components, dim))
        self.logits: nn.Parameter = nn.Parameter(torch.zeros(components))

    def _draw(self, rows: Rows, batch: tuple[int, ...]) -> Tensor:
        eps = rows.fold("noise").normal(*batch, *self.event_shape)
        u = rows.fold("component").uniform(*batch, 1)
        edges = self.logits.detach().softmax(-1).cumsum(-1)[:-1]
        k = (u >= edges).sum(-1)  # (n, *batch)
        x = self.mean[k] + self.log_std[k].exp() * eps
        if not (torch.is_grad_enabled() and self.logits.requires_grad):
            return x
        shift = self._weight_gradient(x.detach(), self.mean.detach(), self.log_std.detach())
        shift = refuse_second_derivative(shift, ONE_DERIVATIVE_OF_WEIGHTS, self.mean, self.log_std)
        return refuse_second_derivative(x - shift, ONE_DERIVATIVE_OF_WEIGHTS, self.logits)

    def _weight_gradient(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return zero, with the gradient of −x that keeps every CDF F(x_d | x_{<d}) constant.

        dx = −J⁻¹·dF at fixed x, where J = ∂F/∂x is lower triangular.
        """
        eps = (x[..., None, :] - mean) * (-log_std).exp()  # (..., K, D)
        log_pdf = -0.5 * (eps.square() + LOG_2PI) - log_std
        # Exclusive sums; subtracting the last term would cancel where a narrow component is far
        # away.
        log_joint = self.logits.unsqueeze(-1) + pad(log_pdf[..., :-1].cumsum(-1), (1, 0))
        weight = log_joint.softmax(-2)  # p(k | x_{<d})
        component_cdf = normal_cdf(eps)
        cdf = (weight * component_cdf).sum(-2)  # (..., D)
        with torch.no_grad():
            density = (weight * log_pdf.exp()).sum(-2).clamp_min(torch.finfo(x.dtype).tiny)
            cdf_by_log_weight = weight * (component_cdf - cdf.unsqueeze(-2)) / density.unsqueeze(-2)
            slope = -eps * (-log_std).exp()  # ∂ log p(x_j | k)/∂x_j
            jacobian = (cdf_by_log_weight.mT @ slope).tril(-1)  # (..., D, D), rows over density
        cdf_change = ((cdf - cdf.detach()) / density).unsqueeze(-1)
        shift = torch.linalg.solve_triangular(
            promote(jacobian), promote(cdf_change), upper=False, unitriangular=True
        )
        return shift.squeeze(-1).to(x.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        eps = (x[..., None, :] - self.mean) * (-self.log_std).exp()
        log_joint = _normal_log_prob(eps, 1) - self.log_std.sum(-1) + self.logits.log_softmax(-1)
        return log_joint.logsumexp(-1)
