"""The plan of a regression with a learned noise: noise and prior by held-out rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, final

from bayou.core.params import Params
from bayou.core.progress import stage
from bayou.core.specs import Checked
from bayou.inference.method import Method, identity
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import Stage
from bayou.select.beside_mode import ModeShare, has_not_converged, plan_beside_mode
from bayou.select.best_method import without_warnings
from bayou.select.budget import MIN_ROWS_OF_TWO_FOLDS, shares_passes, shortened_start
from bayou.select.ensemble_spread import find_members, select_ensemble_spread
from bayou.select.folds import Fold, describe_folds, split_folds
from bayou.select.full_batch import can_follow_path, initial_weights
from bayou.select.judgment import Residuals
from bayou.select.noise import (
    RAISED,
    UNITS_OF_FIT,
    correct_noise,
    least_noise,
    select_noise_of_modes,
)
from bayou.select.noise_and_prior import NoiseAndPrior
from bayou.select.plans import Fitted, Plan
from bayou.select.prior_scale import describe_scale
from bayou.select.ratio import select_ratio_and_shape
from bayou.select.search_run import (
    SearchRun,
    point_posterior,
    raise_if_stopped,
    stage_record,
    target_at,
)
from bayou.select.shared_searches import SearchKey, finished_searches, keep_search
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Rows

CORRECTION: Final = "noise of the method"  # the name of the stage


@final
@dataclass(frozen=True)
class MethodCorrection:
    """What held-out rows have decided about a method itself, beside its mode.

    Args:
        factor: of the noise and the prior scale that were selected at modes.
        spread: see ``NoiseAndPrior``.
        share: the weight of the method beside its mode.
    """

    factor: float
    spread: float = 0.0
    share: ModeShare = field(default_factory=ModeShare)

    @classmethod
    def of(cls, search: RegressionSearch) -> MethodCorrection | None:
        """Return the correction that a search has selected; None for a mode.

        Args:
            search: the search.
        """
        settings = search.settings
        if not settings.is_corrected:
            return None
        return cls(search.noise_factor, settings.spread, search.share)

    def apply(self, search: RegressionSearch) -> RegressionSearch:
        """Return a search of other rows of the same table with this correction.

        Args:
            search: at modes.
        """
        settings = replace(search.settings.scale_both(self.factor), spread=self.spread)
        return replace(search, settings=settings, share=self.share, noise_factor=self.factor)


@final
@dataclass(frozen=True)
class RegressionSearch:
    """The state of a search, as it is kept beside the checkpoint.

    Args:
        settings: those selected so far.
        modes: of the training rows of the first fold and of all rows, (2, ...); none where modes
            are found by minibatches.
        stages: the records of the stages.
        share: the weight of the method beside its mode.
        noise_factor: the noise of the method, divided by that of modes.
        is_raised: whether the noise is that of the rounding of y, and the selected one was below.
    """

    settings: NoiseAndPrior
    modes: Params
    stages: list[Stage]
    share: ModeShare = field(default_factory=ModeShare)
    noise_factor: float = 1.0
    is_raised: bool = False

    def save(self, file: Checkpoint | None) -> None:
        """Write the state to a file, if there is one.

        Args:
            file: beside the checkpoint; None for none.
        """
        if file is not None:
            record = {
                "settings": asdict(self.settings),
                "share": asdict(self.share),
                "stages": self.stages,
                "noise_factor": self.noise_factor,
            }
            file.write(self.modes, record)

    @classmethod
    def load(cls, file: Checkpoint | None) -> RegressionSearch | None:
        """Read the state of an earlier run, if there is one.

        Args:
            file: beside the checkpoint; None for none.
        """
        saved = None if file is None else file.read()
        if saved is None:
            return None
        modes, record = saved
        share = ModeShare(**record.get("share", {}))  # not in files of earlier versions
        return cls(
            NoiseAndPrior(**record["settings"]),
            modes,
            record["stages"],
            share,
            record.get("noise_factor", 1.0),
        )

    def with_noise_above(self, least: float) -> RegressionSearch:
        """Return the search with at least this noise; the ratio to the prior scale stays.

        Args:
            least: that of the rounding of y, 0 for none.
        """
        settings = self.settings
        if settings.noise >= least:
            return self
        settings = replace(settings, noise=least, scale=settings.scale * least / settings.noise)
        return replace(self, settings=settings, is_raised=True)

    def mode(self, number: int, run: SearchRun) -> Params:
        """Return the mode of the first fold, 0, or that of all rows, 1.

        Empty if there is none, or if the steps of ``run.start`` were given: it finds another one.

        Args:
            number: 0 for the first fold, 1 for all rows.
            run: of the search.
        """
        if not run.start.open_ended:
            return {}
        return {name: value[number] for name, value in self.modes.items()}


def plan_regression(
    method: Method,
    target: Target,
    rows: Rows,
    run: SearchRun,
    identified_by: Checked,
    *,
    mixes_with_mode: bool = False,
    correction: MethodCorrection | None = None,
) -> tuple[Plan, MethodCorrection | None]:
    """Select noise and prior on held-out rows, and plan the fit of a method to all rows.

    First the modes of four fifths of the rows decide on the ratio of noise and prior scale. Then
    the noise is corrected for the method itself, or the spread of an ensemble is selected.

    Args:
        method: the method, of this network.
        target: with a learned Gaussian noise and fixed Normal priors.
        rows: all rows.
        run: of the search.
        identified_by: the recipe, which identifies the file of the search.
        mixes_with_mode: whether a method that is worse than its mode becomes a mixture with it.
        correction: of the method, if a search of other rows of the same table has selected it.

    Returns:
        The plan, and the correction of the method; None where it needs none.

    Raises:
        SearchInterrupted: after Ctrl-C, with a mode so far.
    """
    file = _search_file(identified_by, target, rows, run)
    fixed = NoiseAndPrior(1.0).apply(target)  # with a fixed noise, as for all modes of the search
    follows_path = can_follow_path(run.start, fixed, rows)
    is_mode = method == run.start
    folds, trial_run = _plan_trials(method, fixed, rows, run, follows_path=follows_path)
    needs_fit_of_mode = not is_mode and not (follows_path and run.start.open_ended)
    count = (2 if is_mode else 3) + needs_fit_of_mode

    search = RegressionSearch.load(file)
    if search is None:
        with stage(1, count):
            if follows_path:
                search = _shared_search(target, rows, folds, run)
            else:
                search = _search_by_minibatches(target, folds, trial_run)
        search.save(file)
    if not search.settings.is_corrected and not is_mode:
        if correction is not None:
            search = correction.apply(search)
        else:
            with stage(2, count, "held out"):
                search = _correct_for_method(
                    search, method, target, rows, folds, trial_run, mixes_with_mode=mixes_with_mode
                )
        search.save(file)
    search = search.with_noise_above(least_noise(rows))
    with stage(count - needs_fit_of_mode, count, "mode" if needs_fit_of_mode else ""):
        plan = _plan_of_settings(search, method, target, rows, run)
        if mixes_with_mode and plan.start is not None:
            plan = plan_beside_mode(plan, search.share, plan.start)
    is_prior_given = not target.prior_selected
    settings = describe_settings(search, folds, method, is_prior_given=is_prior_given)
    plan = replace(
        plan,
        seed=run.seed,
        stages=(*search.stages, *plan.stages),
        decisions=(*settings, *plan.decisions),
        progress_stage=(count, count, ""),
    )
    return plan, MethodCorrection.of(search)


def _search_file(
    identified_by: Checked, target: Target, rows: Rows, run: SearchRun
) -> Checkpoint | None:
    """Return the file of the search beside the checkpoint, if there is a checkpoint."""
    if run.checkpoint is None:
        return None
    return Checkpoint(f"{run.checkpoint}.choice", identity(identified_by, target, rows, run.seed))


def _search_by_minibatches(
    target: Target, folds: Sequence[Fold], run: SearchRun
) -> RegressionSearch:
    """Return the noise of modes that are found by minibatches."""
    settings, record = select_noise_of_modes(target, folds, run)
    return RegressionSearch(settings, {}, [record])


def _shared_search(
    target: Target, rows: Rows, folds: Sequence[Fold], run: SearchRun
) -> RegressionSearch:
    """Return the ratio of noise and prior scale, which another method may have searched already."""
    key = SearchKey.of(target, rows, run, "ratio", len(folds))
    for shared in finished_searches(key):
        search: RegressionSearch = shared
        return search
    search = RegressionSearch(*select_ratio_and_shape(target, rows, folds, run))
    keep_search(key, search)
    return search


def _plan_trials(
    method: Method, fixed: Target, rows: Rows, run: SearchRun, *, follows_path: bool
) -> tuple[Sequence[Fold], SearchRun]:
    """Return the folds of the search, and the run of its fits: shorter where steps are minibatches.

    Args:
        method: the method that the search serves.
        fixed: the target with a fixed noise.
        rows: all rows.
        run: of the search.
        follows_path: whether L-BFGS finds the modes.
    """
    folds = split_folds(rows, run.part_seed("folds"), run.effort)
    if follows_path:
        return (folds if shares_passes(fixed, rows) else folds[:1]), run
    if rows.n >= MIN_ROWS_OF_TWO_FOLDS:
        folds = folds[:2]
    fits = len(folds) if method == run.start else len(folds) + 1
    return folds, replace(run, start=shortened_start(run.start, rows, fits))


def _correct_for_method(
    search: RegressionSearch,
    method: Method,
    target: Target,
    rows: Rows,
    folds: Sequence[Fold],
    run: SearchRun,
    *,
    mixes_with_mode: bool,
) -> RegressionSearch:
    """Select the noise of the method itself, or the spread of an ensemble of modes.

    The weight of the method beside its mode is that of a fit of its full length.
    """
    started = time.perf_counter()
    settings = replace(search.settings, input_scales=search.settings.fold_input_scales)
    share = ModeShare()
    starts = None
    if search.modes:
        starts = initial_weights(run.start, method, target, run.seed)
    if starts is not None and len(method.spreads) > 1:
        settings = select_ensemble_spread(settings, method, starts, target, rows, folds, run)
    else:
        training, held_out = folds[0]
        mode = search.mode(0, run)
        if starts is not None:
            posterior = find_members(settings, method, starts, target, mode, training, run)
            raise_if_stopped(posterior)
        else:
            point = _mode_for(settings, mode, target, training, run, "fold.mode")
            shorter = method.at_mode(settings.noise, training).with_planned_length(training)
            posterior = run.fit(shorter, target_at(point), training, "fold")
            seed = run.part_seed("check")
            if mixes_with_mode:
                judged = posterior
                longer = method.at_mode(settings.noise, training)
                if longer != shorter and has_not_converged(posterior):  # may leave the mode further
                    with without_warnings():
                        judged = run.fit(longer, target_at(point), training, "fold.longer")
                share = ModeShare.of_residuals(
                    Residuals.of(judged, held_out, seed), Residuals.of(point, held_out, seed)
                )
        settings = correct_noise(settings, posterior, held_out, run.part_seed("check"))
    settings = replace(settings, input_scales=search.settings.input_scales)
    trial = {"noise": settings.noise, "spread": settings.spread}
    record = stage_record(CORRECTION, started, [trial])
    factor = settings.noise / search.settings.noise
    return RegressionSearch(settings, search.modes, [*search.stages, record], share, factor)


def _plan_of_settings(
    search: RegressionSearch, method: Method, target: Target, rows: Rows, run: SearchRun
) -> Plan:
    """Plan the fit of the method to all rows, from their mode.

    The last mode of the search, and the members of an ensemble, are the posterior themselves.
    """
    settings = search.settings
    is_mode = method == run.start
    mode = search.mode(1, run)
    if is_mode and not mode:
        return Plan(settings.apply(target), method, rows)
    starts = None
    if mode and not is_mode:
        starts = initial_weights(run.start, method, target, run.seed)
    if starts is not None:
        members = find_members(settings, method, starts, target, mode, rows, run)
        return Fitted.plan(method.with_spread(settings.spread), members, rows, run.seed)
    point = _mode_for(settings, mode, target, rows, run, "mode")
    if is_mode:
        return Fitted.plan(method, point, rows, run.seed)
    return Plan(target_at(point), method.at_mode(settings.noise, rows), rows, start=point)


def _mode_for(
    settings: NoiseAndPrior,
    mode: Params,
    target: Target,
    rows: Rows,
    run: SearchRun,
    ending: str,
) -> Empirical:
    """Return the mode of some rows: that of the search if it has one, else one by minibatches."""
    selected = replace(settings.apply(target), n=rows.n)
    if mode:
        return point_posterior(selected, mode)
    point: Empirical = run.fit(run.start, selected, rows, ending)
    return point


def describe_settings(
    search: RegressionSearch, folds: Sequence[Fold], method: Method, *, is_prior_given: bool
) -> tuple[str, ...]:
    """Return the decisions of a search in words.

    Args:
        search: the search.
        folds: training and held-out rows.
        method: the method that it serves.
        is_prior_given: whether the scale is a factor of a prior of the user.
    """
    settings = search.settings
    held_out_rows = describe_folds(folds)
    if not search.modes:
        prior = "priors as given"
    else:
        trials = [stage["trials"] for stage in search.stages if stage["stage"] != CORRECTION][-1]
        scale = describe_scale(settings.scale, is_prior_given=is_prior_given)
        prior = f"{scale}, chosen from {len(trials)} {held_out_rows}"
    decisions = [prior]
    if settings.bias_factor != 1:
        decisions.append(f"biases with a prior {settings.bias_factor:g} times as wide")
    if settings.first_layer_divisor != 1:
        divisor = f"{settings.first_layer_divisor:g}"
        decisions.append(
            f"the prior of the first layer {divisor} times narrower, of the others {divisor} times "
            "wider"
        )
    if settings.input_scales:
        decisions.append("prior scales of the first layer by input")
    noise = f"noise {settings.noise:.3g} {UNITS_OF_FIT}, by the errors {held_out_rows}"
    if settings.is_corrected:
        noise += f" and by the predictive variance of {type(method).__name__}"
    decisions.append(f"{noise}, {RAISED}" if search.is_raised else noise)
    if settings.spread:
        decisions.append(f"members randomized with {settings.spread:g} of the full deviations")
    return tuple(decisions)
