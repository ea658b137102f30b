"""Which weights are random: those of all layers or of the last one, by held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, final

from bayou.files import StrPath
from bayou.guides import Delta
from bayou.inference.first_batch import last_layer
from bayou.inference.method import Method
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.langevin import GradientSampler
from bayou.methods.point import MAP
from bayou.methods.vi import VI
from bayou.network.function import shared_copy
from bayou.posteriors import Posterior
from bayou.progress import Show
from bayou.select.auto import Auto
from bayou.select.folds import FOLDS
from bayou.target import Target
from bayou.training.data import Data, Rows, as_data

ALL, LAST, FREE = "all layers", "last layer", "last layer, without a prior of the others"


@final
@dataclass(frozen=True)
class Where(Method):
    """A variational family or chains over all layers, or over the last one with a body of points, for classes.

    With few rows for many weights the best q over all of them is near the prior, and draws of the posterior itself are
    far less certain than its mode. Over the last layer both predict well; the weights below are points, learned under
    the bound by VI, with or without their prior, and at the mode for chains. All are fitted to four fifths of the rows,
    from their mode. The first of these (last layer, without a prior of the others, all layers) whose NLL on the rest is
    within a standard error of the lowest, paired over rows, is selected.
    ``posterior.choice`` states it. The bound of the last layer is that of another model: points have no entropy.
    In a regression a body of points overfits, and all layers are random.

    Args:
        method: VI with one family for all weights, or SGLD and the like, for classes with half the default length.
        start: finds the modes, of four fifths of the rows and of all.

    Cost: for classes two modes and four fits from there (chains: three), for numbers one fit.
    """

    method: VI | GradientSampler
    start: MAP = field(default_factory=MAP)
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
        rows, method = as_data(data, self.batch_size), self.method
        guide: Any = getattr(method, "guide", None)
        try:
            last = last_layer(target, rows)
        except ValueError:  # it is frozen, or the network has no such layer
            last = []
        applies = isinstance(target.likelihood, FiniteLikelihood) and 0 < len(last) < len(target.free)
        applies &= not target.learned_priors  # points have no bound to learn a prior from
        if not applies or isinstance(guide, Mapping) or not isinstance(rows, Rows) or rows.n < 2 * FOLDS:
            return method.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)
        methods: dict[str, Method] = {}
        if isinstance(method, VI):
            for name, penalty in ((LAST, True), (FREE, False)):
                methods[name] = replace(method, guide=dict.fromkeys(last, guide) | {"*": Delta(penalty=penalty)})
        else:
            methods[LAST] = LastLayer(method := replace(method, effort=method.effort / 2))
        several = Auto(methods | {ALL: method}, self.start, errors=1.0)
        return several.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)


@final
@dataclass(frozen=True)
class LastLayer(Method):
    """Chains over the last layer of the network as given; all other weights stay."""

    method: GradientSampler

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, method=self.method.at_mode(noise, data))

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Posterior:
        """The draws, with the other weights in each of them."""
        part = replace(target, net=shared_copy(target.net, last_layer(target, as_data(data, self.batch_size))))
        found = self.method.fit(part, data, seed=seed, checkpoint=checkpoint, progress=progress)
        fixed = {name: value.expand(found.draws, *value.shape) for name, value in target.start().items()}
        found.target, found.network, found.stack = target, target.network, fixed | found.stack
        return found
