"""The one-dimensional inverse-CDF flow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from bayou.flows.linear import positive
from bayou.flows.transform import Transform


class InverseCDF(Transform):
    """y = F⁻¹(u) for u in (0, 1), coordinate by coordinate; ladj = −Σ log p(y). Inverse transform sampling as a flow.

    ``family(loc, scale)`` is a ``torch.distributions`` class with ``cdf`` and ``icdf``; loc and log_scale are learned.
    """

    domain = (0.0, 1.0)

    def __init__(self, dim: int = 1, family: Callable[..., Distribution] = Normal) -> None:
        super().__init__()
        self.event_shape = (positive(dim, "InverseCDF"),)
        self.family = family
        self.loc = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))

    def _distribution(self) -> Distribution:
        return self.family(self.loc, self.log_scale.exp(), validate_args=False)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        distribution = self._distribution()
        y = distribution.icdf(x)
        return y, -distribution.log_prob(y).sum(-1)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        distribution = self._distribution()
        return distribution.cdf(y), distribution.log_prob(y).sum(-1)
