"""The one-dimensional inverse-CDF flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from bayou.flows.core.arguments import as_event, promote
from bayou.flows.core.bases import normal_cdf
from bayou.flows.core.transform import Event, Pair, Transform, clamp_inside, sum_event


class _AccurateNormal(Normal):
    """N(loc, scale²) whose CDF and inverse CDF are accurate in the lower tail.

    Those of torch are 0 beyond −5.6σ.
    """

    def cdf(self, value: Tensor) -> Tensor:
        return normal_cdf((value - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        return self.loc + self.scale * torch.special.ndtri(promote(value)).to(value.dtype)


class InverseCDF(Transform):
    r"""Inverse transform sampling as a flow: y = F⁻¹(u) for u in (0, 1), elementwise.

    ladj = −Σ log p(y), with the density p = F′ of a family with learned location and scale. Values
    that round to 0 or 1 are moved to the nearest number inside, so that they can be inverted.

    Args:
        event: the size of a vector, or the shape of an event; 1 by default.
        family: ``family(loc, scale)``, a ``torch.distributions`` class with ``cdf`` and ``icdf``;
            ``Normal`` by default. loc and scale are learned.

    Shapes: u, y (..., \*event), ladj (...).

    Example:
        >>> from torch.distributions import Laplace
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.Uniform(2), flows.InverseCDF(2, Laplace))
        >>> flow.sample(100, seed=0).shape
        torch.Size([100, 2])
    """

    domain: tuple[float, float] = (0.0, 1.0)

    def __init__(
        self,
        event: int | Sequence[int] = 1,
        family: Callable[..., Distribution] = Normal,
    ) -> None:
        super().__init__()
        shape = as_event(event, "InverseCDF")
        self.event_shape: Event = shape
        self.family: Callable[..., Distribution] = _AccurateNormal if family is Normal else family
        self.loc: nn.Parameter = nn.Parameter(torch.zeros(shape))
        self.log_scale: nn.Parameter = nn.Parameter(torch.zeros(shape))

    def _distribution(self) -> Distribution:
        return self.family(self.loc, self.log_scale.exp(), validate_args=False)

    def _smallest_input(self, dtype: torch.dtype) -> float:
        """Return the least u that the family distinguishes from 0.

        Families of torch compute 1 − u or u − ½, which rounds a u below eps/2.
        """
        if self.family is _AccurateNormal:
            return 0.0
        return torch.finfo(dtype).eps / 2

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        distribution = self._distribution()
        u = clamp_inside(x, self.domain).clamp_min(self._smallest_input(x.dtype))
        y = distribution.icdf(u)
        return y, -sum_event(distribution.log_prob(y), len(self.event_shape))

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        distribution = self._distribution()
        log_prob = sum_event(distribution.log_prob(y), len(self.event_shape))
        return clamp_inside(distribution.cdf(y), self.domain), log_prob
