"""Which weights are random: those of all layers or of the last one, by held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, final

from bayou.core.files import StrPath
from bayou.core.progress import Show
from bayou.guides import Delta
from bayou.inference.data_checks import last_layer
from bayou.inference.method import Method
from bayou.inference.prior_scale import rescale_priors
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.annealed import Annealed
from bayou.methods.ivon import IVON
from bayou.methods.langevin import GradientSampler
from bayou.methods.point import MAP
from bayou.methods.vi import VI, Variational
from bayou.network import shared_copy
from bayou.posteriors import Empirical, Posterior
from bayou.select.auto import Auto
from bayou.select.folds import FOLDS, SCALE_FACTOR
from bayou.target import Target
from bayou.training.data import Data, Rows, as_data

TRIAL_LENGTH: Final = 0.5  # of the fits that are compared


@final
@dataclass(frozen=True)
class Where(Method):
    """A variational family or chains over all layers, or over the last one with a body of points,
    for classes.

    With few rows for many weights the best q over all of them is near the prior, and draws of the
    posterior itself are far less certain than its mode. Candidates: the last layer with the weights
    below at the mode; this with a prior √3 times as wide, since a mean over draws is less certain
    than a mode (unless the prior was given); for VI, points below that are learned under the bound,
    without a prior; all layers. Each is fitted to four fifths of the rows, from their mode, with
    half of the default steps (not chains), and judged on the rest: for VI the lowest NLL, else see
    ``Auto`` with one standard error. The bound of the last layer is that of another model: points
    have no entropy. In a
    regression they overfit: all are random.

    Args:
        method: VI with one family, IVON, Annealed, or SGLD and the like, for classes with half the
            default length.
        start: finds the modes of four fifths of the rows and of all. Four fits start there, five of
            VI.
    """

    method: VI | IVON | Annealed | GradientSampler
    start: Method = field(default_factory=MAP)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.method.batch_size

    @property
    def draws_all_weights(self) -> bool:  # type: ignore[override]
        return isinstance(
            self.method, VI
        )  # its points would leave the mode of a wide prior for worse

    def at_mode(self, noise: float, data: Data) -> Method:
        return self.method.at_mode(noise, data)

    def over_last_layer(self) -> Method:
        return LastLayer(self.method)

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of the selected layers."""
        rows, method = as_data(data, self.batch_size), self.method
        try:
            last = last_layer(target, rows)
        except ValueError:  # it is frozen, or the network has no such layer
            last = []
        applies = isinstance(target.likelihood, FiniteLikelihood) and 0 < len(last) < len(
            target.free
        )
        applies &= not target.learned_priors  # points have no bound to learn a prior from
        applies &= not isinstance(getattr(method, "guide", None), Mapping)
        if not applies or not isinstance(rows, Rows) or rows.n < 2 * FOLDS:
            return method.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)
        if isinstance(method, GradientSampler):
            method = replace(method, effort=method.effort / 2)
        methods: dict[str, Method] = {"last layer": LastLayer(method)}
        if target.prior_selected:
            methods["last layer, with a wider prior"] = LastLayer(method, scale=SCALE_FACTOR)
        if isinstance(method, VI):
            methods["last layer, without a prior of the others"] = LastLayer(method, learn=True)
        methods["all layers"] = method
        short = {name: _shortened(one) for name, one in methods.items()}
        several = Auto(methods, self.start, 0.0 if isinstance(method, VI) else 1.0, short)
        return several.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)


def _shortened(method: Any) -> Any:
    """The method for a comparison. Chains keep their length: near the mode they would seem as good
    as it.
    """
    if isinstance(method, LastLayer):
        return replace(method, method=_shortened(method.method))
    if isinstance(method, Annealed):
        count = max(2, round(TRIAL_LENGTH * method.temperatures))
        return replace(method, of=_shortened(method.of), temperatures=count)
    return (
        replace(method, effort=TRIAL_LENGTH * method.effort)
        if isinstance(method, Variational)
        else method
    )


@final
@dataclass(frozen=True)
class LastLayer(Method):
    """A method over the last layer, with its prior scales multiplied; others keep their values, or
    VI learns them.
    """

    method: VI | IVON | Annealed | GradientSampler
    scale: float = 1.0
    learn: bool = False

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, method=self.method.at_mode(noise, data))

    def with_planned_length(self, data: Data) -> Self:
        return replace(self, method=self.method.with_planned_length(data))

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of all weights."""
        last, method = last_layer(target, as_data(data, self.batch_size)), self.method
        target = part = rescale_priors(
            target, {} if self.scale == 1 else dict.fromkeys(last, self.scale**-2)
        )
        if isinstance(method, VI):
            method = replace(
                method, guide=dict.fromkeys(last, method.specs[0]) | {"*": Delta(learn=self.learn)}
            )
        elif isinstance(method, IVON):
            method = replace(method, where=tuple(last))
        else:
            part = replace(target, net=shared_copy(target.net, last))
        found = method.fit(part, data, seed=seed, checkpoint=checkpoint, progress=progress)
        if isinstance(found, Empirical):  # draws of the last layer alone
            fixed = {
                name: value.expand(found.draws, *value.shape)
                for name, value in target.start().items()
            }
            found.target, found.network, found.stack = target, target.network, fixed | found.stack
        return found
