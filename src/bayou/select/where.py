"""Which weights are random: those of all layers or of the last one, by held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from bayou.files import StrPath
from bayou.guides import Delta
from bayou.inference.first_batch import last_layer
from bayou.inference.method import Method
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.vi import VI
from bayou.posteriors import Posterior
from bayou.progress import Show
from bayou.select.auto import Auto
from bayou.select.folds import FOLDS
from bayou.target import Target
from bayou.training.data import Data, Rows, as_data

ALL, LAST = "all layers", "last layer"


@final
@dataclass(frozen=True)
class Where(Method):
    """A variational family over all layers, or over the last one with a body of points, for classes.

    With few rows for many weights the best bound of a factorized or multiplicative family over all weights is near
    the prior, and its predictions ignore the data. The same family over the last layer, with the weights below it
    learned as points under the same bound, predicts well. Both are fitted to four fifths of the rows; the one with the
    lower NLL on the rest is fitted to all. ``posterior.choice`` states which. The bound of the last layer is that of
    another model: points have no KL.

    In a regression a body of points overfits, and all layers are random.

    Args:
        method: VI with one family for all weights.

    Cost: for classes three fits of half the usual length, for numbers one.
    """

    method: VI
    draws_all_weights: ClassVar[bool] = True

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.method.batch_size

    def at_mode(self, noise: float, data: Data) -> Method:
        return self.method.at_mode(noise, data)

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Posterior:
        """The posterior of the selected layers."""
        rows = as_data(data, self.batch_size)
        method, guide = self.method, self.method.guide
        try:
            last = last_layer(target, rows)
        except ValueError:  # it is frozen, or the network has no such layer
            last = []
        applies = isinstance(target.likelihood, FiniteLikelihood) and 0 < len(last) < len(target.free)
        applies &= not target.learned_priors  # points have no bound to learn a prior from
        if not applies or isinstance(guide, Mapping) or not isinstance(rows, Rows) or rows.n < 2 * FOLDS:
            return method.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)
        if method.open_ended:
            method = replace(method, steps=method.total_steps(rows) // 2)
        only = replace(method, guide=dict.fromkeys(last, guide) | {"*": Delta()})
        several = Auto({ALL: method, LAST: only})
        return several.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)
