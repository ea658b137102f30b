"""The plan of a regression with many rows: one fit, without the rows that decide on the noise."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from bayou.core.progress import stage
from bayou.core.specs import Checked
from bayou.inference.baseline_checks import MIN_EXCESS
from bayou.inference.data_checks import last_layer as last_layer_names
from bayou.inference.method import Method
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors import Empirical, Posterior
from bayou.select.judgment import Residuals, judge
from bayou.select.noise import UNITS_OF_FIT, match_noise
from bayou.select.plans import Fitted, Plan
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

    Returns:
        A plan with the posterior.

    Raises:
        SearchInterrupted: after Ctrl-C, with the mode or the posterior so far.
    """
    least, most = LARGE_HELD_OUT
    held_out_rows = max(least, min(most, rows.n / 10))
    training, held_out = rows.split(held_out_rows / rows.n, run.part_seed("folds"))
    is_of_modes = method == run.start or method.starts(target, run.seed) is not None
    method = with_large_steps(method, training)
    run = replace(run, start=with_large_steps(run.start, training))
    if is_of_modes:  # each mode learns its own noise
        with stage(1, 1):
            posterior = _fit_planned(method.at_mode(1.0, training), target, training, run)
    else:
        with stage(1, 2):
            mode = run.start.fit(target, training, **run.options("mode"))
        noise = match_noise(mode, held_out, run.seed)
        raise_if_stopped(mode)
        with stage(2, 2):
            posterior = _fit_planned(
                method.at_mode(noise, training), target_at(mode), training, run
            )
        if posterior.stopped != "interrupted":
            posterior = _improve(posterior, mode, method, training, held_out, run, tries_last_layer)
    noise = match_noise(posterior, held_out, run.seed)
    posterior.held_out_index = held_out.index
    plan = Fitted.plan(method, posterior, training, run.seed)
    decision = f"noise {noise:.3g} {UNITS_OF_FIT}, the likeliest for {held_out.n:,} held-out rows"
    return replace(plan, decisions=(decision, "priors as given"))


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


def has_not_converged(posterior: Posterior) -> bool:
    """Return whether the objective of the last run was still rising at its end.

    Args:
        posterior: has the history.
    """
    return bool(posterior.history) and posterior.history[-1].get("rising") is not None


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
