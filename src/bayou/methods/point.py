"""Point estimates: maximum likelihood and maximum a posteriori."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, final

from bayou.inference.point import PointMethod
from bayou.network.target import Target
from bayou.priors import Normal


@final
@dataclass(frozen=True)
class MLE(PointMethod):
    """Maximum likelihood: the weights under which the data are most probable.

        max_w Σ_n log p(y_n | x_n, w)

    The loss is the negative of this, divided by N. It has the settings of ``MAP`` except ``l2``.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of one point.

    >>> import bayou
    >>> bayou.MLE(steps=100, lr=1e-2).steps
    100
    """

    _penalized: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class MAP(PointMethod):
    """Maximum a posteriori: the weights of highest posterior density.

        max_w Σ_n log p(y_n | x_n, w) + log p(w)

    The loss is the negative of this, divided by N. A Normal prior is weight decay.

    Args:
        l2: weight decay as other libraries count it, ½·l2·‖w‖² on the mean loss, instead of the
            prior: this *is* the prior N(0, 1/(N·l2)), which the posterior then carries. None
            (default) takes the prior of the fit.
        epochs: how many passes over the data; this or ``steps``.
        steps: how many optimizer steps. Unless one of the two is given, 2,000 steps or 10 epochs,
            whichever is more, and on until the objective has flattened (see ``convergence``), up to
            ten times as many.
        lr: the learning rate; 1e-3 by default.
        batch_size: rows in a step; 128 by default.
        validation: a fraction of the rows to hold out; their negative log-likelihood selects the
            best epoch. 0 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of one point.

    Raises:
        ValueError: for settings out of range, and a prior with a scale to learn.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.MAP(steps=10)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    1
    """

    l2: float | None = None
    _penalized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("l2")

    def _prior(self, target: Target) -> Target:
        """Return the target with the prior of the objective."""
        if self.l2 is None:
            return target
        return replace(target, prior=Normal(1 / math.sqrt(target.n * self.l2)))
