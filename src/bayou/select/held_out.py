"""Methods that select settings: noise and prior scale by held-out rows, or a method by the size of
the network.
"""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path as File
from statistics import fmean
from typing import Any, ClassVar, Final, Self, final

import torch
from torch import Tensor, nn

from bayou.core import params
from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Progress, Show, stage
from bayou.inference.baseline_checks import warn_worse_than_mode
from bayou.inference.method import Method, identity
from bayou.inference.point import PointModel
from bayou.inference.prior_scale import rescale_priors
from bayou.inference.start import network_at
from bayou.likelihoods import Gaussian
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.point import MAP
from bayou.metrics import standard_error
from bayou.network import Network
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE, Stage
from bayou.priors import BoundNormal, Normal, UnitNormal
from bayou.select.budget import affordable_folds, shares_passes, shortened_start
from bayou.select.folds import (
    FOLDS,
    MAX_FULL_BATCH_ROWS,
    MAX_SCALE_STEPS,
    MAX_UP_STEPS_RANDOM,
    Factors,
    Path,
    best_scale,
    fixed_normal,
    held_out,
    judged_by_log_prob,
    parts,
    path_passes,
    search,
)
from bayou.select.judgment import LEVEL, MAX_SHORTFALL, Residuals, judge
from bayou.select.relevance import Scales, input_scales
from bayou.select.rounding import round_initial_noise, round_rows
from bayou.target import Target, prior_specs
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.guards import Interrupt
from bayou.training.loop import move
from bayou.training.ranks import current
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.settings import Settings

MAX_FULL_WEIGHTS: Final = (
    3500  # weights, up to which a full curvature matrix costs no more than the training
)
NOISE_FACTOR: Final = 2.0  # between two candidates for the noise
NOISE_STEPS: Final = (2, 1, 0, -1, -2, -3, -4, -5, -6)  # such factors from the given noise
WIDE_BIAS_FACTOR: Final = 10.0  # of the candidate with a wider prior of biases
STRAIGHT: Final = (
    1.0,
    2.0,
    4.0,
)  # factors by which the first layer's priors are narrower and the others wider
WIDTH_DRAWS: Final = 64  # functions for the predictive variance of a method
# Initial gains of the fan-in prior where none was given. Regression targets are standardized, so
# that a function drawn from the prior should not be much wider than 1; logits of a certain class
# are far from 0.
GAIN_OF_CLASSES: Final = 3.0
GAIN_OF_NUMBERS: Final = 2.0
MORE_ROWS: Final = 0.64  # of a variance between functions, (4/5)²: with all rows it is smaller than with four fifths
MIN_TRAINING_ERROR: Final = (
    0.5  # of members with anchors, in that of the mode: below, they fit the noise
)
PSEUDO_ROWS: Final = 10  # prior count of rows on which a method is as good as its mode
# Of a regression with more rows than full passes allow: a step of 512 costs twice one of 128.
LARGE_BATCH: Final = 512
LARGE_EPOCHS: Final = 40
LARGE_STEPS: Final = (1500, 4000)  # the least and the most
LARGE_HELD_OUT: Final = (1000, 5000)  # rows, a tenth in between: the noise is known to 2 %
SEARCH: Final = "the search of noise and prior of a method by name"  # which each process of torchrun does as a whole


def weights(target: Target) -> int:
    """The number of trainable weights."""
    return sum(value.numel() for value in target.net.parameters() if value.requires_grad)


@final
@dataclass(frozen=True)
class BySize(Method):
    """One method for small networks and another for large ones, without a search.

    Args:
        small: the method for a network of at most ``limit`` trainable weights.
        large: the method for others.
        limit: by default the size up to which a full curvature matrix costs no more than training.

    >>> BySize(Laplace("full"), Laplace("kronecker", where="last")).limit
    3500
    """

    small: Method
    large: Method
    limit: int = MAX_FULL_WEIGHTS

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.large.batch_size

    @property
    def draws_all_weights(self) -> bool:  # type: ignore[override]
        return self.large.draws_all_weights

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of the method for this size."""
        chosen = self.small if weights(target) <= self.limit else self.large
        return chosen.fit(target, data, seed=seed, checkpoint=checkpoint, progress=progress)

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(
            self, small=self.small.at_mode(noise, data), large=self.large.at_mode(noise, data)
        )


@final
@dataclass(frozen=True)
class Choice:
    """Settings selected on held-out rows: the noise, a factor for all prior scales, another for
    those of biases.

    ``straight``: the factor by which priors of the first layer are narrower, and all others wider:
    units with small inputs are nearly linear. ``checked``: whether the method itself was evaluated
    on held-out rows, not only its mode.
    ``fold``: the mean squared residual of the mode on the first fold. ``inputs``: factors of the
    prior scales of the first layer by input, none for equal ones; ``fold_inputs``: those without
    the rows that the first fold holds out.
    ``spread``: how far the anchors of an ensemble and the noise of its targets spread
    (``Method.with_spread``).
    """

    noise: float
    scale: float = 1.0
    biases: float = 1.0
    straight: float = 1.0
    fold: float = 1.0
    checked: bool = False
    inputs: tuple[float, ...] = ()
    fold_inputs: tuple[float, ...] = ()
    spread: float = 0.0

    def precisions(self, target: Target) -> Factors:
        """Multipliers of the prior precisions by tensor."""
        first = first_layer(target)
        wider = {
            name: self.scale
            * (self.biases if is_bias(name, target.net) else 1.0)
            * (1 / self.straight if name in first else self.straight)
            for name in target.free
        }
        factors: Factors = {name: factor**-2 for name, factor in wider.items()}
        if self.inputs:
            weight = first_weight(target)
            factors[weight] *= target.net.get_parameter(weight).new_tensor(self.inputs) ** -2
        return factors

    def applied(self, target: Target) -> Target:
        """The target with this noise and these priors, all of them fixed."""
        equal = replace(self, inputs=()).precisions(target)
        fixed = Target.build(target.net, Gaussian(self.noise), target.prior, target.n)
        fixed = rescale_priors(
            fixed, {name: factor for name, factor in equal.items() if factor != 1.0}
        )
        if not self.inputs:
            return fixed
        weight = first_weight(target)
        prior = fixed.priors[weight]
        assert isinstance(prior, BoundNormal)
        scale = math.exp(float(prior.log_scale) + fmean(map(math.log, self.inputs)))
        spec = UnitNormal(
            scale, float(prior.mean), inputs=self.inputs
        )  # of factors with a geometric mean of 1
        rules = prior_specs(fixed.prior, fixed.net) | {weight: spec}
        return replace(fixed, prior={glob.escape(name): one for name, one in rules.items()})


# the settings; where L-BFGS found them, the modes of the training rows of the first fold and of all
# rows, (2, ...)
Selected = tuple[Choice, Params, list[Stage]]


@final
@dataclass(frozen=True)
class HeldOut(Method):
    """``method`` started at the mode found by ``start``, with noise and prior scale selected on
    held-out rows.

    This is what a method by name means: ``fit(net, data, "mnf")`` is
    ``HeldOut(VI(MNF(), ...), start=MAP(...))``.

    Args:
        method: the method fitted to all rows in the end.
        start: finds the modes that are compared, and the mode at which ``method`` starts. Its
            ``effort`` is also that of the search: below 1 there are fewer folds and passes.

    Cost: the search makes some 5,000 passes of single modes over the rows (a tenth of that from 500
    rows on), in one batch; a regression fits ``method`` once more to four fifths of the rows; then
    mode and method are fitted to all.

    Where ``fit`` was given no prior, it is ``Normal("fan_in", gain)`` with gain 3 for classes and 2
    for numbers, and its scale is part of the search. A prior that was given keeps its scale, except
    in a regression with a learned noise, where the ratio of noise and scale is searched around it,
    and scales of the inputs of the first layer are those of ``bayou.select.relevance.input_scales``
    where they predict held-out rows better than equal ones.

    The mode of a regression depends on noise²/scale² only. Modes of four fifths of the rows follow
    a path of falling ratios, each from the last (``bayou.select.folds.Path``), for six shapes of
    the prior (biases as given or ten times wider; first layer one, two or four times narrower) in
    five folds below 500 rows, by one batched L-BFGS. Shape and ratio with the lowest squared error
    on the rest are selected, and the noise is this error. The mode of all rows is found along the
    same path, and the members of an ensemble are such modes from other initial weights. Then the
    method itself is fitted to four fifths. With residuals r and variances v of its functions on the
    rest, in units of the noise σ found so far, the noise becomes σ²·mean(r²/(1 +
    0.64·v))/mean(r₀²), with the residuals r₀ of the mode on the
    same rows: at a fixed ratio the width of a posterior is proportional to its noise, and with all
    rows its variance is about (4/5)² of that with four fifths, so that the predictive variance
    matches the held-out error.

    A model that can interpolate has no residuals on its training rows, so that neither the ELBO,
    which can err in either direction (Turner & Sahani 2011), nor the evidence of a Laplace
    approximation (MacKay 1992) identifies the noise there. For classes, and for a network with its
    own noise output, the same folds select the prior scale by −log p of modes that all start at the
    initial weights; ``MAP``, and an ensemble of it, consist of such modes of all rows. Any other
    target (a known noise, priors that are not Normal) is passed to ``method`` unchanged. Rows in
    float64 are rounded to eight digits (``bayou.select.rounding``), so that rows which differ in
    their last digits have the same search and the same modes. Where L-BFGS is not applicable (batch
    norm, dropout) the modes of a regression learn their noise, the priors are kept, and the noise
    is their held-out error.

    A regression with more than 5,000 rows keeps its priors and is fitted once, without a tenth of
    the rows (1,000 to 5,000): the noise is the likeliest one there, and a posterior that is worse
    than its mode there is fitted again over the last layer (``bayou.select.judgment``). Default
    steps have 512 rows, and the mode takes 40 epochs, at least 1,500 and at most 4,000 steps,
    however far it has converged.

    Where modes do not share passes (``bayou.select.budget``), the search has fewer folds, scales
    and shapes: it costs at most two fits.
    """

    method: Method
    start: MAP
    chooses_prior: ClassVar[bool] = True

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.method.batch_size

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of the method. Ctrl-C before its fit returns the mode so far."""
        seed, rows = as_int_seed(seed), as_data(data, self.batch_size)
        path = None if checkpoint is None else File(checkpoint)
        searched, target = not target.prior_given, with_default_prior(target)
        if not isinstance(rows, Rows) or rows.n < 2 * FOLDS or constant(rows):
            return self.method.fit(
                target, data, seed=seed, checkpoint=checkpoint, progress=progress
            )
        self.method.check_target(target, rows)
        rows = round_rows(rows)
        target = round_initial_noise(target)
        if applies(target):
            current().note_unshared(SEARCH)
            return self._regression(target, rows, seed, path, progress)
        if judged_by_log_prob(target) and self._follows(target, rows):
            log, starts = list[Stage](), self._starts(target, seed)
            if searched:
                current().note_unshared(SEARCH)
                began, effort = time.perf_counter(), self.start.effort
                PointModel(self.start, target).check_first_batch(rows)
                most = MAX_UP_STEPS_RANDOM if self.method.draws_all_weights else MAX_SCALE_STEPS
                folds = parts(rows, part_seed(seed, "folds"), effort)
                try:
                    with stage(1, 2), Interrupt():
                        target, trials = best_scale(target, rows, folds, progress, most, effort)
                except KeyboardInterrupt:
                    return interrupted(target)
                log = [record("prior scale", began, trials)]
            with stage(1 + searched, 1 + searched):
                if starts is not None:
                    posterior: Posterior = self._modes(
                        target, target, [{}], [1.0], rows, starts, progress
                    )
                elif self.method.draws_all_weights and not isinstance(
                    target.likelihood, FiniteLikelihood
                ):
                    posterior = self._from_found_mode(target, rows, seed, path, progress)
                else:
                    posterior = self.method.fit(
                        target, rows, seed=seed, checkpoint=checkpoint, progress=progress
                    )
            posterior.selection = [*log, *posterior.selection]
            return posterior
        return self.method.fit(target, rows, seed=seed, checkpoint=checkpoint, progress=progress)

    def _from_found_mode(
        self, target: Target, rows: Rows, seed: int, path: File | None, progress: Show
    ) -> Posterior:
        """Return the posterior of the method from the mode of all rows, found by L-BFGS."""
        first = params.stack([target.start()])
        mode = self._modes(target, target, [{}], [1.0], rows, first, progress)
        if mode.stopped == "interrupted":
            return mode
        at_mode = replace(mode.target, net=network_at(mode))
        return self.method.at_mode(1.0, rows).fit(
            at_mode, rows, seed=seed, checkpoint=path, progress=progress
        )

    def _regression(
        self, target: Target, rows: Rows, seed: int, path: File | None, progress: Show
    ) -> Posterior:
        """Fit with the noise and the priors selected on held-out rows."""
        if rows.n > MAX_FULL_BATCH_ROWS:
            return self._large(target, rows, seed, path, progress)
        file = (
            None
            if path is None
            else Checkpoint(f"{path}.choice", identity(self, target, rows, seed))
        )
        saved = None if file is None else file.read()
        folds = parts(rows, part_seed(seed, "folds"), self.start.effort)
        count = 2 if self.method == self.start else 3
        fixed = Choice(1.0).applied(target)  # with a fixed noise, as for all modes of the search
        follows = self._follows(fixed, rows)
        if follows and not shares_passes(fixed, rows):
            folds = folds[:1]
        if not follows:
            folds = affordable_folds(rows, folds)
        trial = self if follows else self._with_trial_steps(rows, len(folds))
        if saved is None:
            with stage(1, count):
                if follows:
                    found = self._searched(target, rows, folds, seed, progress)
                else:
                    found = trial._learned(target, folds, seed, path, progress)
            if isinstance(found, Posterior):
                return found
            choice, modes, log = found
            if file is not None:
                file.write(modes, {"choice": asdict(choice), "log": log})
        else:
            choice, modes, log = Choice(**saved[1]["choice"]), saved[0], saved[1]["log"]
        if not choice.checked and self.method != self.start:
            learned, held = folds[0]
            with stage(2, count, "held out"):
                began, mode = time.perf_counter(), {name: value[0] for name, value in modes.items()}
                own = replace(choice, inputs=choice.fold_inputs)
                if (
                    modes
                    and len(self.method.spreads) > 1
                    and self._starts(target, seed) is not None
                ):
                    selected = self._select_spread(target, own, rows, folds, seed, progress)
                    if isinstance(selected, Posterior):
                        return selected
                    choice = replace(selected, inputs=choice.inputs)
                else:
                    fold = _beside(path, "fold")
                    posterior = trial._from_mode(
                        target, own, mode, learned, seed, fold, progress, is_trial=True
                    )
                    if posterior.stopped == "interrupted":
                        return posterior
                    choice = checked(choice, posterior, held, part_seed(seed, "check"))
            log = [
                *log,
                record(
                    "noise of the method", began, [{"noise": choice.noise, "spread": choice.spread}]
                ),
            ]
            if file is not None:
                file.write(modes, {"choice": asdict(choice), "log": log})
        with stage(count, count):
            mode = {name: value[1] for name, value in modes.items()}
            posterior = self._from_mode(target, choice, mode, rows, seed, path, progress)
        posterior.selection = [*log, *posterior.selection]
        return posterior

    def _select_spread(
        self,
        target: Target,
        choice: Choice,
        rows: Rows,
        folds: list[tuple[Rows, Rows]],
        seed: int,
        progress: Show,
    ) -> Choice | Posterior:
        """Select how far the members of an ensemble spread, by the rows that each fold holds out.

        The members of all folds are found together, once for each spread.

        Returns:
            The choice with this spread and the noise for it, or the members so far if interrupted.
        """
        starts = self.method.starts(target, seed)
        if starts is None:
            raise ValueError(f"{type(self.method).__name__} is not made of modes that can spread")
        members = params.size(starts)
        is_held = held_out(rows, folds)[:-1]  # (F, N)
        masks = (~is_held).repeat_interleave(members, 0)
        every_start = {name: repeat_rows(value, len(folds)) for name, value in starts.items()}
        own = choice.applied(target)
        fixed, factors, steps = self._path_to(choice, target)
        y = next(rows.cut(rows.n).ordered())[1]
        trials: list[SpreadTrial] = []
        for spread in self.method.spreads:
            drawn = self.method.with_spread(spread).randomize(own, y, seed)
            if drawn is not None:
                anchors, targets = drawn
                every_anchor = {
                    name: value.repeat(len(folds), *[1] * (value.ndim - 1))
                    for name, value in anchors.items()
                }
                drawn = every_anchor, targets.repeat(len(folds), *[1] * (targets.ndim - 1))
            found = self._modes(
                fixed, own, factors, steps, rows, every_start, progress, drawn, masks
            )
            if found.stopped == "interrupted":
                return found
            parts = []
            for fold, (_, held) in enumerate(folds):
                stack = {
                    name: value[fold * members : (fold + 1) * members]
                    for name, value in found.stack.items()
                }
                parts.append(
                    residuals(
                        Empirical(own, found.network, stack, []), held, part_seed(seed, "check")
                    )
                )
            squares = torch.cat([part[0] for part in parts])
            variances = torch.cat([part[1] for part in parts])
            trials.append(SpreadTrial(spread, squares, variances))
        return select_spread(choice, trials)

    def _path_to(self, choice: Choice, target: Target) -> tuple[Target, list[Factors], list[float]]:
        """Return the target, the factors and the steps of a path of modes that ends at the selected
        settings.
        """
        first = target.likelihood.gaussian_noise
        assert first is not None
        noises = [first * NOISE_FACTOR**step for step in NOISE_STEPS]
        steps = _steps(
            [noise for noise in noises if noise > 0.99 * choice.noise / choice.scale], first
        )
        factors = [replace(choice, scale=1.0).precisions(target)]
        return Choice(first).applied(target), factors, steps

    def _large(
        self, target: Target, rows: Rows, seed: int, path: File | None, progress: Show
    ) -> Posterior:
        """One fit without a tenth of the rows, whose error is the noise: with many rows a second
        fit gains little.
        """
        least, most = LARGE_HELD_OUT
        learned, held = rows.split(
            max(least, min(most, rows.n / 10)) / rows.n, part_seed(seed, "folds")
        )
        own = with_large_steps(self, learned)
        modes = (
            self.method == self.start or self.method.starts(target, seed) is not None
        )  # each learns its own noise
        noise, count = 1.0, 1 if modes else 2
        if not modes:
            with stage(1, count):
                mode = own.start.fit(
                    target, learned, seed=seed, checkpoint=_beside(path, "mode"), progress=progress
                )
            noise = match_noise(mode, held, seed)
            if mode.stopped == "interrupted":
                return mode
            target = replace(mode.target, net=network_at(mode))
        with stage(count, count):
            method: Method = own.method.at_mode(noise, learned)
            planned = method.with_planned_length(learned)
            file = path if planned == method else _beside(path, "planned")
            posterior = planned.fit(target, learned, seed=seed, checkpoint=file, progress=progress)
        if modes or posterior.stopped == "interrupted":
            match_noise(posterior, held, seed)
            posterior.held_out_index = held.index
            return posterior
        return own._judged(posterior, mode, held, target, learned, seed, path, progress)

    def _judged(
        self,
        posterior: Posterior,
        mode: Posterior,
        held: Rows,
        target: Target,
        learned: Rows,
        seed: int,
        path: File | None,
        progress: Show,
    ) -> Posterior:
        """Return the posterior with its noise, a longer fit, or one of the last layer alone if that
        one is better.

        ``posterior`` is a fit of the planned length. One that is worse than its mode on the
        held-out rows, or whose intervals contain too little, is fitted again over the last layer,
        if the method can do that: over all layers of a large network ten times the length may not
        be enough. One that is acceptable but has not converged is fitted again until it has.
        Intervals that are still too narrow are widened.
        """
        at_mode = Residuals.of(mode, held, seed)
        judgment = judge(Residuals.of(posterior, held, seed), at_mode)
        if judgment.is_acceptable and has_not_converged(posterior):
            with stage(2, 2, "longer"):
                method = self.method.at_mode(at_mode.likeliest_noise(), learned)
                posterior = method.fit(
                    target, learned, seed=seed, checkpoint=path, progress=progress
                )
            if posterior.stopped == "interrupted":
                match_noise(posterior, held, seed)
                return posterior
            judgment = judge(Residuals.of(posterior, held, seed), at_mode)
        narrower = None if judgment.is_acceptable else self.method.over_last_layer()
        if narrower is not None:
            noise = at_mode.likeliest_noise()
            with stage(2, 2, "last layer"):
                method = narrower.at_mode(noise, learned)
                other = method.fit(
                    target, learned, seed=seed, checkpoint=_beside(path, "last"), progress=progress
                )
            if other.stopped == "interrupted":
                match_noise(posterior, held, seed)
                posterior.stopped = "interrupted"
                return posterior
            again = judge(Residuals.of(other, held, seed), at_mode)
            if again.nll < judgment.nll:
                other.choice = (
                    f"the last layer is random: over all layers the NLL of {held.n:,} held-out rows is "
                    f"{judgment.nll:.3f}, over the last {again.nll:.3f}, at the mode {again.mode_nll:.3f}"
                )
                posterior, judgment = other, again
        match_noise(posterior, held, seed)
        posterior.held_out_index = held.index
        if posterior.history and "collapsed" not in posterior.history[-1]:
            posterior.history[-1] |= judgment.history()
        if judgment.is_worse_than_mode:
            warn_worse_than_mode(judgment.nll, judgment.mode_nll, judgment.error, held.n)
        return posterior

    def _with_trial_steps(self, rows: Rows, folds: int) -> HeldOut:
        """Return this method for its fits to parts of the rows: the modes of the folds, and that of
        the check.
        """
        checks = 0 if self.method == self.start else 1
        shorter = shortened_start(self.start, rows, folds + checks)
        return replace(
            self, start=shorter, method=shorter if self.method == self.start else self.method
        )

    def _follows(self, target: Target, rows: Rows) -> bool:
        """Whether L-BFGS can find the modes."""
        return (
            PointModel(self.start, target).smooth
            and not self.start.validation
            and rows.n <= MAX_FULL_BATCH_ROWS
        )

    def _from_mode(
        self,
        target: Target,
        choice: Choice,
        mode: Params,
        rows: Rows,
        seed: int,
        path: File | None,
        progress: Show,
        is_trial: bool = False,
    ) -> Posterior:
        """The method with the selected settings, from the mode of these rows: that of the search,
        where it has one.

        ``is_trial``: a fit that selects the noise, of the planned length whether or not it has
        converged then.
        """
        own = replace(choice.applied(target), n=rows.n)
        if mode and self.start.open_ended:
            if self.method != self.start and (starts := self._starts(target, seed)) is not None:
                fixed, factors, steps = self._path_to(choice, target)
                method = self.method.with_spread(choice.spread)
                randomized = method.randomize(own, next(rows.cut(rows.n).ordered())[1], seed)
                members = self._modes(
                    fixed, own, factors, steps, rows, starts, progress, randomized
                )
                if randomized is None or members.stopped == "interrupted":
                    return members
                point = at_point(own, mode)
                if not overfits(members, point, rows, seed):
                    return members
                return self._modes(fixed, own, factors, steps, rows, starts, progress)
            point = at_point(own, mode)
        else:
            point = self.start.fit(
                own, rows, seed=seed, checkpoint=_beside(path, "mode"), progress=progress
            )
        if self.method == self.start or point.stopped == "interrupted":
            return point
        target = replace(point.target, net=network_at(point))
        method = self.method.at_mode(choice.noise, rows)
        if is_trial:
            method = method.with_planned_length(rows)
        return method.fit(target, rows, seed=seed, checkpoint=path, progress=progress)

    def _learned(
        self,
        target: Target,
        folds: list[tuple[Rows, Rows]],
        seed: int,
        path: File | None,
        progress: Show,
    ) -> Selected | Posterior:
        """The held-out error as noise, with modes that learn their own noise, and unchanged
        priors.
        """
        began, errors = time.perf_counter(), []
        for number, (learned, held) in enumerate(folds):
            with stage(number + 1, len(folds), unit="fold"):
                place = _beside(path, f"first{number}")
                mode = self.start.fit(
                    target, learned, seed=seed, checkpoint=place, progress=progress
                )
            if mode.stopped == "interrupted":
                return mode
            errors.append(float(residuals(mode, held, seed)[0].mean()))
        noise = math.sqrt(sum(errors) / len(errors))
        return Choice(noise, fold=errors[0]), {}, [record("noise", began, [{"noise": noise}])]

    def _searched(
        self, target: Target, rows: Rows, folds: list[tuple[Rows, Rows]], seed: int, progress: Show
    ) -> Selected | Posterior:
        """The ratio of noise and prior scale whose modes predict held-out rows best; the network if
        interrupted.
        """
        began, first = time.perf_counter(), target.likelihood.gaussian_noise
        assert first is not None
        PointModel(self.start, target).check_first_batch(rows)
        deep = len(first_layer(target)) < len(target.free)
        noises = [first * NOISE_FACTOR**step for step in NOISE_STEPS]
        held, (x, y) = held_out(rows, folds), next(rows.cut(rows.n).ordered())
        inputs, log = Scales([()]) * len(held), list[Stage]()
        with Progress("choosing noise and prior", len(noises), progress) as line, Interrupt():
            line.announce()
            try:
                if deep and takes_columns(target, x):
                    inputs, trials = input_scales(x, y, held, part_seed(seed, "inputs"))
                    log, began = [record("prior by input", began, trials)], time.perf_counter()
                given = Choice(first, inputs=inputs[-1], fold_inputs=inputs[0])
                shapes = prior_shapes(given, deep) if shares_passes(target, rows) else [given]
                factors = [
                    [replace(shape, inputs=each).precisions(target) for each in inputs]
                    for shape in shapes
                ]
                fixed, steps = Choice(first).applied(target), _steps(noises, first)
                found = search(fixed, rows, folds, factors, steps, line, self.start.effort)
            except KeyboardInterrupt:
                return interrupted(target)
        noise = math.sqrt(float(found.errors.mean()))
        fold = float(found.errors[: folds[0][1].n].mean())
        choice = replace(
            shapes[found.which], noise=noise, scale=noise / noises[found.when], fold=fold
        )
        trials = [
            {
                "straight": shapes[which].straight,
                "biases": shapes[which].biases,
                "ratio": noises[step],
                "mse": error,
            }
            for (which, step), error in found.trials.items()
        ]
        ends = {name: value[[0, -1]] for name, value in found.modes.items()}
        return choice, ends, [*log, record("noise and prior", began, trials)]

    def _starts(self, target: Target, seed: int) -> Params | None:
        """The initial weights of the modes that are the posterior of the method; None if it is not
        made of modes.
        """
        if not self.start.open_ended:
            return None
        return (
            params.stack([target.start()])
            if self.method == self.start
            else self.method.starts(target, seed)
        )

    def _modes(
        self,
        fixed: Target,
        own: Target,
        factors: list[Factors],
        steps: list[float],
        rows: Rows,
        starts: Params,
        progress: Show,
        randomized: tuple[Params, Tensor] | None = None,
        masks: Tensor | None = None,
    ) -> Empirical:
        """The modes of all rows from each of the starts (K, ...), at the end of a path like those
        of the search.

        ``fixed``: the target of the path, with multipliers ``factors`` and ``steps`` of its prior
        precisions; ``own``: that of the posterior, with the same modes. ``randomized``: see
        ``Method.randomize``. ``masks``: the rows of each mode, (K, N), if not all.
        """
        count = params.size(starts)
        if masks is None:
            masks = torch.ones(count, rows.n, dtype=torch.bool)
        passes = path_passes(fixed, self.start.effort)
        path = Path(
            fixed,
            rows,
            masks,
            factors * count,
            steps,
            starts,
            self.start.effort,
            randomized,
            passes_per_step=passes,
        )
        stack = {name: value.expand(count, *value.shape) for name, value in fixed.start().items()}
        stopped = "finished"
        title = f"{count} mode{'s' if count > 1 else ''}"
        with Progress(title, len(steps) * passes, progress) as line, Interrupt():
            line.announce()
            path.report = line.update
            try:
                for step, errors in enumerate(path.walk()):
                    line.update((step + 1) * passes, error=float(errors.mean()))
            except KeyboardInterrupt:
                stopped = "interrupted"
        posterior = Empirical(own, Network(own.net), stack | (path.stack or {}), [])
        posterior.stopped = stopped
        return posterior


def prior_shapes(given: Choice, deep: bool) -> list[Choice]:
    """Return the shapes of the prior that a search compares: wider biases, and narrower first
    layers.

    Args:
        given: the prior as it is.
        deep: whether there are layers after the first.
    """
    return [
        replace(given, biases=biases, straight=straight)
        for straight in (STRAIGHT if deep else (1.0,))
        for biases in (WIDE_BIAS_FACTOR, 1.0)
    ]


def with_large_steps(method: Any, rows: Rows) -> Any:
    """A method with default settings for many rows: of its own and of the methods in its fields,
    unless given.
    """
    own = {one.name: getattr(method, one.name) for one in fields(method)}
    changed = {
        name: with_large_steps(value, rows)
        for name, value in own.items()
        if isinstance(value, Method)
    }
    if (
        isinstance(method, Settings)
        and method.open_ended
        and method.batch_size == Settings.batch_size
    ):
        changed["batch_size"] = LARGE_BATCH
        if isinstance(method, MAP):
            least, most = LARGE_STEPS
            steps = max(least, min(most, LARGE_EPOCHS * rows.cut(LARGE_BATCH).batches))
            changed["steps"] = max(1, round(method.effort * steps))
    return replace(method, **changed)


def with_default_prior(target: Target) -> Target:
    """The target itself if its prior was given, else with the initial prior of the search."""
    if target.prior_given:
        return target
    gain = GAIN_OF_CLASSES if isinstance(target.likelihood, FiniteLikelihood) else GAIN_OF_NUMBERS
    return replace(target, prior=Normal("fan_in", gain=gain), prior_given=True, prior_selected=True)


def interrupted(target: Target) -> Posterior:
    """The network as given."""
    posterior = Empirical(
        target, target.network, {name: value.unsqueeze(0) for name, value in target.start().items()}
    )
    posterior.stopped = "interrupted"
    return posterior


def at_point(target: Target, weights: Params) -> Empirical:
    """Return the posterior that is one point."""
    stack = {name: value.unsqueeze(0) for name, value in weights.items()}
    return Empirical(target, Network(target.net), stack, [])


def overfits(members: Posterior, mode: Posterior, rows: Rows, seed: int) -> bool:
    """Return whether members with anchors have a far smaller error on their training rows than the
    mode.

    The mode follows a path from a narrow prior, along which units stay alike. Anchors can lead away
    from it to modes that fit the noise.
    """
    error = float(residuals(members, rows, seed)[0].mean())
    return error < MIN_TRAINING_ERROR * float(residuals(mode, rows, seed)[0].mean())


def repeat_rows(stack: Tensor, times: int) -> Tensor:
    """Return a stack (K, ...) several times one after the other, (times·K, ...)."""
    return stack.repeat(times, *[1] * (stack.ndim - 1))


@final
@dataclass(frozen=True)
class SpreadTrial:
    """Held-out rows under an ensemble with one spread of its members.

    Args:
        spread: of anchors and targets.
        squares: squared residuals of the mean function, (M,).
        variances: of the functions, (M,).
    """

    spread: float
    squares: Tensor
    variances: Tensor


def select_spread(choice: Choice, trials: Sequence[SpreadTrial]) -> Choice:
    """Select the widest spread whose negative log-likelihood of held-out rows is within chance of
    the lowest.

    Each spread has the noise that suits it, as in ``checked``. Within chance: by at most one
    standard error of the paired difference.

    Args:
        choice: the settings so far, whose noise is the error of modes on the same rows.
        trials: the widest spread first.

    Returns:
        The choice with this spread, and with the noise for it.
    """
    pseudo = PSEUDO_ROWS / len(trials[0].squares)
    choices = []
    losses = []
    for trial in trials:
        squares = trial.squares / choice.noise**2
        variances = MORE_ROWS * trial.variances / choice.noise**2
        factor = math.sqrt(float(((squares + pseudo) / (1 + variances)).mean()) / (1 + pseudo))
        choices.append(
            replace(
                choice,
                noise=factor * choice.noise,
                scale=factor * choice.scale,
                spread=trial.spread,
                checked=True,
            )
        )
        total = factor**2 + variances
        losses.append(0.5 * (total.log() + squares / total))
    best = min(losses, key=lambda loss: float(loss.mean()))
    for candidate, loss in zip(choices, losses, strict=True):
        excess = loss - best
        if float(excess.mean()) <= standard_error(excess):
            return candidate
    return choices[-1]


def checked(choice: Choice, posterior: Posterior, held: Rows, seed: int) -> Choice:
    """The choice with the noise of a method, by the residuals and variances of its functions on
    held-out rows.
    """
    squares, spread = (value / choice.noise**2 for value in residuals(posterior, held, seed))
    spread = spread * MORE_ROWS
    more = PSEUDO_ROWS / len(squares)
    factor = math.sqrt(
        float(((squares + more) / (1 + spread)).mean()) / (choice.fold / choice.noise**2 + more)
    )
    return replace(choice, noise=factor * choice.noise, scale=factor * choice.scale, checked=True)


def has_not_converged(posterior: Posterior) -> bool:
    """Return whether the objective of the last run was still rising at its end."""
    return bool(posterior.history) and posterior.history[-1].get("rising") is not None


def match_noise(posterior: Posterior, held: Rows, seed: int) -> float:
    """Set the noise that is likeliest for held-out rows or, if its intervals contain too little,
    one that covers.
    """
    began = time.perf_counter()
    if isinstance(posterior, Empirical):
        posterior.stack = {
            name: value for name, value in posterior.stack.items() if not name.startswith(NOISE)
        }
    found = Residuals.of(posterior, held, seed)
    noise = found.likeliest_noise()
    chance = 2 * math.sqrt(LEVEL * (1 - LEVEL) / held.n)
    if found.coverage(noise) < LEVEL - MAX_SHORTFALL - chance:
        noise = found.covering_noise()
    posterior.target = Choice(noise).applied(posterior.target)
    posterior.selection = [record("noise", began, [{"noise": noise}]), *posterior.selection]
    return noise


def residuals(posterior: Posterior, held: Rows, seed: int) -> tuple[Tensor, Tensor]:
    """Squared residuals of the mean function, and the variance of functions, (M,) each: means over
    the outputs.
    """
    squares, spread = [], []
    like = next(iter(posterior.sample(1).values()))
    for raw in held.ordered():
        x, y = move(raw, like)
        f = posterior.predict(
            x, min(WIDTH_DRAWS, posterior.draws or WIDTH_DRAWS), seed=seed
        ).outputs
        squares.append((f.mean(0) - y).square().flatten(1).mean(1))
        spread.append(f.var(0, correction=0).flatten(1).mean(1))
    return torch.cat(squares).double(), torch.cat(spread).double()


def is_bias(name: str, net: nn.Module) -> bool:
    """Whether a tensor is a bias."""
    return name.rpartition(".")[2] == "bias" and net.get_parameter(name).ndim == 1


def first_layer(target: Target) -> frozenset[str]:
    """The tensors of the layer with the first weight matrix."""
    for name in target.free:
        if target.net.get_parameter(name).ndim > 1:
            layer = name.rpartition(".")[0]
            return frozenset(one for one in target.free if one.rpartition(".")[0] == layer)
    return frozenset()


def first_weight(target: Target) -> str:
    """The name of the first weight matrix."""
    return next(name for name in target.free if target.net.get_parameter(name).ndim > 1)


def takes_columns(target: Target, x: Any) -> bool:
    """Whether the first layer has a weight for every column of x, and there are two or more, with
    one prior scale.
    """
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] < 2:
        return False
    prior = target.priors[first_weight(target)]
    assert isinstance(prior, BoundNormal)
    return (
        len(prior.shape) == 2
        and prior.shape[1] == x.shape[1]
        and prior.log_scale.numel() == prior.mean.numel() == 1
    )


def constant(rows: Rows) -> bool:
    """Whether there is no noise to learn: all y are the same."""
    y = rows.targets()
    return y is not None and bool((y == y[:1]).all())


def applies(target: Target) -> bool:
    """Whether there are a Gaussian noise to learn and Normal priors to scale with it."""
    likelihood = target.likelihood
    learned = likelihood.gaussian_noise is not None and any(True for _ in likelihood.parameters())
    return learned and fixed_normal(target)


def record(name: str, began: float, trials: list[dict[str, float]]) -> Stage:
    """The entry of a stage in ``Posterior.selection``."""
    return {"stage": name, "seconds": time.perf_counter() - began, "trials": trials}


def _steps(noises: Sequence[float], first: float) -> list[float]:
    """Multipliers of prior precisions with the modes of these noises at the noise ``first``."""
    return [(noise / first) ** 2 for noise in noises]


def _beside(path: File | None, ending: str) -> File | None:
    return None if path is None else File(f"{path}.{ending}")
