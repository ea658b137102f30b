"""Point estimates: maximum likelihood and maximum a posteriori."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, final

from bayou.inference.point import PointMethod
from bayou.priors import Normal
from bayou.target import Target


@final
@dataclass(frozen=True)
class MLE(PointMethod):
    """Maximum likelihood: max_w Σ_n log p(y_n | x_n, w); the loss is its negative, divided by N."""

    _penalized: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class MAP(PointMethod):
    """Maximum a posteriori: max_w Σ_n log p(y_n | x_n, w) + log p(w); the loss is its negative,
    divided by N.

    ``l2``: weight decay as other libraries count it, ½·l2·‖w‖² on the mean loss, instead of the
    prior: this *is* the prior N(0, 1/(N·l2)), which the posterior then carries.
    """

    l2: float | None = None
    _penalized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("l2")

    def _prior(self, target: Target) -> Target:
        return (
            target
            if self.l2 is None
            else replace(target, prior=Normal(1 / math.sqrt(target.n * self.l2)))
        )
