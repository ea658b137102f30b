"""The plan of a regression with many rows: one fit, without the rows that decide on the noise."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from bayou.core.progress import stage
from bayou.core.specs import Checked
from bayou.inference.baseline_checks import MIN_EXCESS, WorseThanModeWarning
from bayou.inference.data_checks import last_layer as last_layer_names
from bayou.inference.method import Method
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors import Empirical, Posterior
from bayou.posteriors.posterior import Stage
from bayou.select.beside_mode import ModeShare, has_not_converged, plan_beside_mode
from bayou.select.judgment import Residuals, judge
from bayou.select.noise import describe_likeliest, match_noise
from bayou.select.plans import Fitted, Plan
from bayou.select.prior_scale import select_scale_of_many_rows
from bayou.select.search_run import SearchRun, raise_if_stopped, target_at
from bayou.training.data import Rows
from bayou.training.settings import Settings

# A step of 512 rows costs twice one of 128.
LARGE_BATCH: Final = 512
LARGE_EPOCHS: Final = 40
LARGE_STEPS: Final = (1500, 4000)  # the least and the most
# Rows, a tenth in between: the noise is known to 2 %.
LARGE_HELD_OUT: Final = (1000, 5000)

Spec = TypeVar("Spec", bound=Checked)


def plan_many_rows(
    method: Method,
    target: Target,
    rows: Rows,
    run: SearchRun,
    *,
    tries_last_layer: bool = False,
    mixes_with_mode: bool = False,
    selects_prior: bool = False,
) -> Plan:
    """Fit a method to nine tenths of the rows, and match its noise to the others.

    With many rows a second fit, to all of them, would gain little. A posterior that is worse than
    its mode on the held-out rows is fitted again over the last layer.

    Args:
        method: the method, of this network.
        target: with a learned Gaussian noise and fixed Normal priors.
        rows: all rows.
        run: of the search.
        tries_last_layer: whether a method that is worse than its mode is fitted again over the last
            layer, if it can do that.
        mixes_with_mode: whether one that is still worse becomes a mixture with the mode.
        selects_prior: whether the scale of the priors is selected.

    Returns:
        A plan with the posterior.

    Raises:
        SearchInterrupted: after Ctrl-C, with the mode or the posterior so far.
    """
    training, held_out = split_many_rows(rows, run)
    is_of_modes = method == run.start or method.starts(target, run.seed) is not None
    method = with_large_steps(method, training)
    run = replace(run, start=with_large_steps(run.start, training))
    stages: tuple[Stage, ...] = ()
    prior_decisions: tuple[str, ...] = ("priors as given",)
    if selects_prior:
        target, record, prior_decisions = select_scale_of_many_rows(
            target, training, held_out, run, draws_all_weights=method.draws_all_weights
        )
        stages = (record,)
    mode = None
    if is_of_modes:  # each mode learns its own noise
        with stage(1, 1):
            posterior = _fit_planned(method.at_mode(1.0, training), target, training, run)
    else:
        with stage(1, 2):
            mode = run.start.fit(target, training, **run.options("mode"))
        noise = match_noise(mode, held_out, run.seed)
        raise_if_stopped(mode)
        with warnings.catch_warnings():
            if mixes_with_mode:  # what is worse than its mode is mixed with it below
                warnings.simplefilter("ignore", WorseThanModeWarning)
            posterior = _fit_at_mode(
                method, mode, noise, training, held_out, run, tries_last_layer=tries_last_layer
            )
    share = _mode_share(posterior, mode if mixes_with_mode else None, held_out, run)
    noise = match_noise(posterior, held_out, run.seed)
    plan = _plan_with_mode(
        Fitted.plan(method, posterior, training, run.seed), posterior, mode, share, held_out
    )
    return replace(
        plan,
        decisions=(describe_likeliest(noise, held_out), *prior_decisions, *plan.decisions),
        stages=(*stages, *plan.stages),
    )


def _mode_share(
    posterior: Posterior, mode: Empirical | None, held_out: Rows, run: SearchRun
) -> ModeShare:
    """Return the share of the mode in the mixture that predicts held-out rows best.

    It is 0 without a mode, and for a posterior that Ctrl-C has stopped.
    """
    if mode is None or posterior.stopped == "interrupted":
        return ModeShare()
    return ModeShare.of_residuals(
        Residuals.of(posterior, held_out, run.seed), Residuals.of(mode, held_out, run.seed)
    )


def _plan_with_mode(
    plan: Plan, posterior: Posterior, mode: Empirical | None, share: ModeShare, held_out: Rows
) -> Plan:
    """Return the plan of a posterior, beside its mode where that has a share of the weight."""
    posterior.held_out_index = held_out.index
    if mode is None or share.weight == 1:
        return plan
    mode.held_out_index = held_out.index
    return plan_beside_mode(plan, share, mode)


def _fit_at_mode(
    method: Method,
    mode: Empirical,
    noise: float,
    training: Rows,
    held_out: Rows,
    run: SearchRun,
    *,
    tries_last_layer: bool,
) -> Posterior:
    """Fit a method from its mode, and improve it where the held-out rows say so.

    Args:
        method: with the settings for many rows.
        mode: of the training rows.
        noise: that is likeliest for the mode.
        training: the rows that are fitted.
        held_out: the rows that judge the fit.
        run: of the search.
        tries_last_layer: see ``plan_many_rows``.
    """
    with stage(2, 2):
        posterior = _fit_planned(method.at_mode(noise, training), target_at(mode), training, run)
    if posterior.stopped == "interrupted":
        return posterior
    return _improve(posterior, mode, method, training, held_out, run, tries_last_layer)


def split_many_rows(rows: Rows, run: SearchRun) -> tuple[Rows, Rows]:
    """Return the rows of the fits of a search, and those that judge them.

    Of few rows, whose modes L-BFGS cannot find, a fifth is held out.

    Args:
        rows: all rows.
        run: of the search.
    """
    least, most = LARGE_HELD_OUT
    held_out_rows = max(min(least, rows.n / 5), min(most, rows.n / 10))
    return rows.split(held_out_rows / rows.n, run.part_seed("folds"))


def _fit_planned(method: Method, target: Target, rows: Rows, run: SearchRun) -> Posterior:
    """Fit a method with its planned length, whether or not it has converged then."""
    planned = method.with_planned_length(rows)
    return planned.fit(target, rows, **run.options("" if planned == method else "planned"))


def _improve(
    posterior: Posterior,
    mode: Empirical,
    method: Method,
    training: Rows,
    held_out: Rows,
    run: SearchRun,
    tries_last_layer: bool,
) -> Posterior:
    """Return the posterior, a longer fit, or one of the last layer alone if that one is better.

    ``posterior`` is a fit of the planned length. One that is worse than its mode on the held-out
    rows, or whose intervals contain too little, is fitted again over the last layer, if the method
    can do that: over all layers of a large network ten times the length may not be enough. One that
    is acceptable but has not converged is fitted again until it has.
    """
    target = target_at(mode)
    of_mode = Residuals.of(mode, held_out, run.seed)
    noise = of_mode.likeliest_noise()
    comparison, is_acceptable = judge(Residuals.of(posterior, held_out, run.seed), of_mode)
    if is_acceptable and has_not_converged(posterior):
        with stage(2, 2, "longer"):
            posterior = method.at_mode(noise, training).fit(target, training, **run.options())
        if posterior.stopped == "interrupted":
            return posterior
        comparison, is_acceptable = judge(Residuals.of(posterior, held_out, run.seed), of_mode)
    last_layer = None
    if tries_last_layer and not is_acceptable:
        last_layer = method.restricted_to(last_layer_names(target, training))
    if last_layer is not None:
        with stage(2, 2, "last layer"):
            restricted = last_layer.at_mode(noise, training).fit(
                target, training, **run.options("last")
            )
        if restricted.stopped == "interrupted":
            posterior.stopped = "interrupted"
            return posterior
        of_restricted, _ = judge(Residuals.of(restricted, held_out, run.seed), of_mode)
        if of_restricted.nll < comparison.nll:
            restricted.choice = (
                f"the last layer is random: over all layers the NLL of {held_out.n:,} held-out "
                f"rows is {comparison.nll:.3f}, over the last {of_restricted.nll:.3f}, at the mode "
                f"{of_restricted.other_nll:.3f}"
            )
            posterior = restricted
            comparison = of_restricted
    record = comparison.judge(
        MIN_EXCESS,
        problem="the posterior is worse than its own mode",
        other_model="the mode",
        rows="held-out",
        remedy="give more steps, or use laplace",
    )
    if posterior.history and "collapsed" not in posterior.history[-1]:
        posterior.history[-1] |= record
    return posterior


def with_large_steps(spec: Spec, rows: Rows) -> Spec:
    """Return a method with default settings for many rows, also those of methods in its fields.

    Settings that were given are kept.

    Args:
        spec: a method or a recipe.
        rows: the rows that it is fitted to.
    """
    changed: dict[str, Any] = {}
    for field in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if isinstance(value, Method):
            changed[field.name] = with_large_steps(value, rows)
    if isinstance(spec, Settings) and spec.open_ended and spec.batch_size == Settings.batch_size:
        changed["batch_size"] = LARGE_BATCH
        if isinstance(spec, MAP):
            least, most = LARGE_STEPS
            steps = max(least, min(most, LARGE_EPOCHS * rows.with_batch_size(LARGE_BATCH).batches))
            changed["steps"] = max(1, round(spec.effort * steps))
    return replace(spec, **changed)  # type: ignore[type-var]
