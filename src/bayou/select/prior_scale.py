"""The prior scale where rows have no one Gaussian noise, and of many rows.

Such targets are classes, counts, positive and censored numbers, numbers with heavy tails, and those
of networks that predict their own noise. The parameters of the likelihood are selected with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from bayou.core.params import Params
from bayou.core.progress import Progress
from bayou.inference.prior_scale import rescale_priors
from bayou.likelihoods.continuous import BoundHeteroscedastic
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors import Empirical
from bayou.posteriors.posterior import Stage
from bayou.select.budget import affordable_passes, shares_passes, shortened_start
from bayou.select.folds import Fold, describe_folds, split_folds
from bayou.select.judgment import Residuals
from bayou.select.likelihood_parameters import (
    describe_parameters,
    has_parameters_to_select,
    likeliest_parameters,
    outputs_of_rows,
    with_fixed_parameters,
)
from bayou.select.noise import has_noise_to_select
from bayou.select.regularization_path import Multipliers, PathSearch, path_passes, search_paths
from bayou.select.search_run import SearchRun, stage_record, stop_at_network
from bayou.select.shared_searches import SearchKey, finished_searches, keep_search
from bayou.training.data import Rows
from bayou.training.guards import Interrupt
from bayou.training.loop import move

SCALE_FACTOR: Final = math.sqrt(3)  # between two candidate prior scales of classes
MAX_SCALE_STEPS: Final = 2  # such factors from the given scale
MAX_UP_STEPS_RANDOM: Final = 1  # such factors upwards for methods with random weights throughout
MAX_DOWN_STEPS_OF_NUMBERS: Final = 4  # such factors downwards for other y than classes
MAX_ROUNDS: Final = 4  # of prior scale and parameters of the likelihood in turn
# The change of the logarithm of a parameter, below which another round would select the same prior.
MIN_CHANGE: Final = 0.1

# Modes of many rows, which cost a fit by minibatches each.
COARSE_FACTOR: Final = 3.0  # between two candidate prior scales
MAX_COARSE_STEPS: Final = 4  # such factors from the given scale
# Nats a row that P weights gain on N training rows by their noise alone, P/2N, from which a prior
# is worth its search.
MIN_OPTIMISM: Final = 0.01
FITS_OF_SEARCH: Final = 4  # so many modes cost as much as two fits


@final
@dataclass(frozen=True)
class ScaleCandidates:
    """The candidates for a factor of all prior scales, and the folds that compare them.

    Args:
        scales: the factors.
        folds: training and held-out rows.
        passes: over the rows for each mode.
    """

    scales: Sequence[float]
    folds: Sequence[Fold]
    passes: int

    @classmethod
    def of(
        cls,
        target: Target,
        rows: Rows,
        run: SearchRun,
        *,
        draws_all_weights: bool,
        keeps_prior: bool,
    ) -> ScaleCandidates:
        """Return the search that a network and its rows can afford.

        Args:
            target: with a likelihood that has nothing to learn.
            rows: all rows.
            run: of the search.
            draws_all_weights: see ``select_prior_scale``.
            keeps_prior: whether the priors are kept as they are.
        """
        is_of_classes = isinstance(target.likelihood, FiniteLikelihood)
        is_known = is_of_classes or isinstance(target.likelihood, BoundHeteroscedastic)
        max_down = MAX_SCALE_STEPS if is_known else MAX_DOWN_STEPS_OF_NUMBERS
        max_up = MAX_UP_STEPS_RANDOM if draws_all_weights else MAX_SCALE_STEPS
        scales = [SCALE_FACTOR**step for step in range(-max_down, max_up + 1)]
        folds = split_folds(rows, run.part_seed("folds"), run.effort)
        passes = path_passes(target, run.effort)
        if not shares_passes(target, rows):
            scales = sorted({min(scales), 1.0, max(scales)})
            folds = folds[:1]
            passes = affordable_passes(passes, len(scales))
        return cls([1.0] if keeps_prior else scales, folds, passes)

    def find(self, target: Target, rows: Rows, line: Progress) -> PathSearch:
        """Return the best scale, with its modes.

        Args:
            target: with a likelihood that has nothing to learn.
            rows: all rows.
            line: the progress line.
        """
        multipliers = [[self.factor(target, scale)] * len(self.folds) for scale in self.scales]
        return search_paths(target, rows, self.folds, multipliers, [1.0], line, self.passes)

    def factor(self, target: Target, scale: float) -> Multipliers:
        """Return the multipliers of all prior precisions of a factor of their scales.

        Args:
            target: has the priors.
            scale: the factor.
        """
        return dict.fromkeys(target.free, scale**-2)

    def held_out_outputs(self, target: Target, search: PathSearch) -> tuple[Tensor, Tensor]:
        """Return the outputs of the best modes at the rows that they have not seen, and y.

        Args:
            target: has the network.
            search: has the modes.
        """
        pairs = []
        for number, (_, held_out) in enumerate(self.folds):
            weights = {name: value[number] for name, value in search.modes.items()}
            pairs.append(outputs_of_rows(target, held_out, weights))
        return torch.cat([outputs for outputs, _ in pairs]), torch.cat([y for _, y in pairs])


def select_prior_scale(
    target: Target,
    rows: Rows,
    run: SearchRun,
    *,
    draws_all_weights: bool,
    keeps_prior: bool = False,
) -> tuple[Target, Stage, tuple[str, ...]]:
    """Select a factor of all prior scales by the held-out −log p of modes.

    All modes start at the initial weights, in one batch: those that followed a path of scales
    predicted worse. A wide prior overfits classes that overlap, and a narrow one is underconfident
    for classes that do not.

    The parameters θ of a likelihood, such as a shape, are selected in turn with the scale: θ
    becomes the likeliest for the held-out rows at the modes, and modes are found again with this
    θ, until it stays. Learned with the weights, θ would be that of the training rows, to which a
    network can come too close.

    Args:
        target: the target, with Normal priors.
        rows: all rows.
        run: of the search.
        draws_all_weights: whether every weight is random in the posterior of the method. Such a
            posterior has logits of a hundred under a prior that is adequate for a mode.
        keeps_prior: whether only the parameters of the likelihood are selected.

    Returns:
        The target with this prior and these parameters, which are fixed; the record of the stage
        and the decisions in words.

    Raises:
        SearchInterrupted: after Ctrl-C, with the network as given.
    """
    started = time.perf_counter()
    learned = target
    target = with_fixed_parameters(learned)
    candidates = ScaleCandidates.of(
        target, rows, run, draws_all_weights=draws_all_weights, keeps_prior=keeps_prior
    )
    outcome = _shared_outcome(learned, target, rows, run, candidates)
    losses = {scale: outcome.losses[scale] for scale in candidates.scales}
    scale = min(losses, key=losses.__getitem__)
    trials = [{"scale": scale, "nll": nll} for scale, nll in losses.items()]
    how = describe_folds(candidates.folds)
    decisions = []
    if not keeps_prior:
        decisions.append(f"{describe_scale(scale)}, chosen from {len(trials)} {how}")
    if target is not learned:
        target = with_fixed_parameters(learned, outcome.parameters)
        decisions.append(f"{describe_parameters(target.likelihood_spec)}, the likeliest {how}")
    if scale != 1:
        target = rescale_priors(target, candidates.factor(target, scale))
    return target, stage_record("prior scale", started, trials), tuple(decisions)


@final
@dataclass(frozen=True)
class ScaleOutcome:
    """What a search of the prior scale has found.

    Args:
        losses: −log p of held-out rows by prior scale.
        parameters: of the likelihood, by name; none if it has nothing to learn.
    """

    losses: Mapping[float, float]
    parameters: Params

    def has_scales(self, scales: Sequence[float]) -> bool:
        """Return whether the outcome answers for these prior scales.

        Losses of more scales do; parameters of a likelihood are those of the best of all scales.

        Args:
            scales: the candidates.
        """
        if self.parameters:
            return set(scales) == set(self.losses)
        return set(scales) <= set(self.losses)


def _search_scale(
    learned: Target, target: Target, rows: Rows, run: SearchRun, candidates: ScaleCandidates
) -> ScaleOutcome:
    """Search the prior scale, and the parameters of the likelihood in turn with it.

    Args:
        learned: with the parameters to learn, if there are any.
        target: with their initial values, fixed.
        rows: all rows.
        run: of the search.
        candidates: the prior scales.
    """
    with Interrupt(), Progress("choosing the prior", candidates.passes, run.progress) as line:
        try:
            line.announce()
            search = candidates.find(target, rows, line)
            parameters: Params = {}
            if target is not learned:
                parameters, search = _alternate(learned, target, rows, candidates, search, line)
        except KeyboardInterrupt:
            raise stop_at_network(target) from None
    losses = {candidates.scales[prior]: nll for (prior, _), nll in search.trials.items()}
    return ScaleOutcome(losses, parameters)


def _alternate(
    learned: Target,
    target: Target,
    rows: Rows,
    candidates: ScaleCandidates,
    search: PathSearch,
    line: Progress,
) -> tuple[Params, PathSearch]:
    """Select the parameters of the likelihood and the prior scale in turn.

    Args:
        learned: with the parameters to learn.
        target: with their initial values, fixed.
        rows: all rows.
        candidates: the prior scales.
        search: of the scale with the initial values.
        line: the progress line.

    Returns:
        The parameters by name, and the last search of the scale.
    """
    parameters: Params = {}
    for _ in range(MAX_ROUNDS):
        outputs, y = candidates.held_out_outputs(target, search)
        before = dict(target.likelihood.named_buffers())
        parameters = likeliest_parameters(learned.likelihood, outputs, y)
        target = with_fixed_parameters(learned, parameters)
        changes = [float((parameters[name] - before[name]).abs().max()) for name in parameters]
        if max(changes) < MIN_CHANGE:
            break
        search = candidates.find(target, rows, line)
    return parameters, search


def _shared_outcome(
    learned: Target, target: Target, rows: Rows, run: SearchRun, candidates: ScaleCandidates
) -> ScaleOutcome:
    """Return the outcome of a search that another method has made, or search and keep it."""
    key = SearchKey.of(learned, rows, run, candidates.passes, len(candidates.folds))
    for shared in finished_searches(key):
        outcome: ScaleOutcome = shared
        if outcome.has_scales(candidates.scales):
            return outcome
    outcome = _search_scale(learned, target, rows, run, candidates)
    keep_search(key, outcome)
    return outcome


def has_scale_of_many_rows(start: MAP, target: Target, rows: Rows) -> bool:
    """Return whether the prior scale of many rows is worth a search by minibatches.

    It is for tables, unless there are so many rows for each weight that the prior hardly matters:
    P weights fit the noise of N rows by P/2N nats.

    Args:
        start: the method of one mode; one that holds out rows stops before it overfits.
        target: the network and its priors.
        rows: all rows.
    """
    x: Any = next(rows.with_batch_size(1).epoch())[0]
    is_table = isinstance(x, Tensor) and x.ndim == 2
    has_convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in target.net.modules())
    weights = sum(value.numel() for value in target.start().values())
    is_worth_it = weights / (2 * rows.n) > MIN_OPTIMISM
    return is_table and not has_convolutions and is_worth_it and not start.validation


def select_scale_of_many_rows(
    target: Target,
    training: Rows,
    held_out: Rows,
    run: SearchRun,
    *,
    draws_all_weights: bool,
) -> tuple[Target, Stage, tuple[str, ...]]:
    """Select a factor of all prior scales by the held-out −log p of modes found by minibatches.

    The factors 1 and 1/3 are compared first. The search continues in the direction that is better,
    by factors of 3, until a mode is worse than the one before. Modes learn the parameters of their
    likelihood; other ones than the noise of a regression are fixed in the end at those that are
    likeliest for the held-out rows.

    Args:
        target: the target of all rows, with Normal priors.
        training: the rows of the modes.
        held_out: the rows that judge them.
        run: of the search; its ``start`` finds a mode, in half of its length.
        draws_all_weights: whether every weight is random in the posterior of the method. Such a
            posterior is not given a wider prior, as in ``select_prior_scale``.

    Returns:
        The target with this prior, the record of the stage and the decisions in words.

    Raises:
        SearchInterrupted: after Ctrl-C, with the mode so far.
    """
    started = time.perf_counter()
    start = shortened_start(run.start, training, FITS_OF_SEARCH)
    losses: dict[int, float] = {}
    modes: dict[int, Empirical] = {}

    def evaluate(steps: int) -> float:
        """Return the loss of the mode under priors that are 3^steps times as wide."""
        factors: Multipliers = dict.fromkeys(target.free, COARSE_FACTOR ** (-2 * steps))
        candidate = rescale_priors(target.copy(training.n), factors)
        mode = run.fit(start, candidate, training, f"prior{steps}")
        losses[steps] = _held_out_loss(mode, held_out, run.seed)
        modes[steps] = mode
        return losses[steps]

    evaluate(0)
    for direction in (-1,) if draws_all_weights else (-1, 1):
        steps = direction
        while abs(steps) <= MAX_COARSE_STEPS and evaluate(steps) < losses[steps - direction]:
            steps += direction
        if losses[direction] < losses[0]:
            break
    best = min(losses, key=losses.__getitem__)
    scale = COARSE_FACTOR**best
    if best:
        target = rescale_priors(target, dict.fromkeys(target.free, scale**-2))
    trials = [{"scale": COARSE_FACTOR**steps, "nll": nll} for steps, nll in sorted(losses.items())]
    how = f"{held_out.n:,} held-out rows"
    decisions = [f"{describe_scale(scale)}, chosen from {len(trials)} on {how}"]
    if not has_noise_to_select(target) and has_parameters_to_select(target):
        weights = {name: modes[best].stack[name][0] for name in target.free}
        outputs, y = outputs_of_rows(target, held_out, weights)
        target = with_fixed_parameters(target, likeliest_parameters(target.likelihood, outputs, y))
        decisions.append(f"{describe_parameters(target.likelihood_spec)}, the likeliest for {how}")
    return target, stage_record("prior scale", started, trials), tuple(decisions)


def _held_out_loss(mode: Empirical, held_out: Rows, seed: int) -> float:
    """Return the mean −log p of held-out rows, in a regression with the likeliest noise."""
    if has_noise_to_select(mode.target):
        residuals = Residuals.of(mode, held_out, seed)
        return float(residuals.log_density_loss(residuals.likeliest_noise()).mean())
    weight = next(iter(mode.sample(1).values()))
    total = 0.0
    for batch in held_out.epoch():
        x, y = move(batch, weight)
        total -= float(mode.predict(x, seed=seed).log_prob(y).double().sum())
    return total / held_out.n


def describe_scale(scale: float, *, is_prior_given: bool = False) -> str:
    """Return a factor of the prior scales in words.

    Args:
        scale: the factor.
        is_prior_given: whether it is a factor of a prior of the user.
    """
    prior = "given prior" if is_prior_given else "default"
    return f"prior scale {scale:.3g} of the {prior}"
