"""The one-dimensional inverse-CDF flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from bayou.flows.core.arguments import as_event, promote
from bayou.flows.core.bases import normal_cdf
from bayou.flows.core.transform import Transform, clamp_inside, sum_event


class _Normal(Normal):
    """N(loc, scale²) whose CDF and inverse CDF are accurate in the lower tail; those of torch are 0
    beyond −5.6σ.
    """

    def cdf(self, value: Tensor) -> Tensor:
        return normal_cdf((value - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        return self.loc + self.scale * torch.special.ndtri(promote(value)).to(value.dtype)


class InverseCDF(Transform):
    r"""y = F⁻¹(u) for u in (0, 1), elementwise; ladj = −Σ log p(y). Inverse transform sampling as a
    flow.

    Values that round to 0 or 1 are moved to the nearest number inside, so that they can be
    inverted.

    Args:
        event: the size of a vector, or the shape of an event.
        family: ``family(loc, scale)``, a ``torch.distributions`` class with ``cdf`` and ``icdf``;
            loc and scale are learned.

    Shapes: u, y (..., \*event), ladj (...).
    """

    domain = (0.0, 1.0)

    def __init__(
        self, event: int | Sequence[int] = 1, family: Callable[..., Distribution] = Normal
    ) -> None:
        super().__init__()
        self.event_shape = shape = as_event(event, "InverseCDF")
        self.family = _Normal if family is Normal else family
        self.loc = nn.Parameter(torch.zeros(shape))
        self.log_scale = nn.Parameter(torch.zeros(shape))

    def _distribution(self) -> Distribution:
        return self.family(self.loc, self.log_scale.exp(), validate_args=False)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        distribution = self._distribution()
        # Other families compute 1 − u or u − ½, which does not distinguish a u below eps/2 from 0.
        half = 0.0 if isinstance(distribution, _Normal) else torch.finfo(x.dtype).eps / 2
        y = distribution.icdf(clamp_inside(x, (0.0, 1.0)).clamp_min(half))
        return y, -sum_event(distribution.log_prob(y), len(self.event_shape))

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        distribution = self._distribution()
        log_prob = sum_event(distribution.log_prob(y), len(self.event_shape))
        return clamp_inside(distribution.cdf(y), self.domain), log_prob
