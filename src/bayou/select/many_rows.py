"""The plan of a regression with many rows: one fit, without the rows that decide on the noise."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from bayou.core.progress import stage
from bayou.core.specs import Checked
from bayou.inference.baseline_checks import warn_worse_than_mode
from bayou.inference.data_checks import last_layer as last_layer_names
from bayou.inference.method import Method
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.select.judgment import Judgment, Residuals, judge
from bayou.select.noise import match_noise
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
    training, held_out = split_many_rows(rows, run.part_seed("folds"))
    is_of_modes = method == run.start or method.starts(target, run.seed) is not None
    method = with_large_steps(method, training)
    run = run.with_start(with_large_steps(run.start, training))
    if is_of_modes:  # each mode learns its own noise
        with stage(1, 1):
            posterior = _fit_planned(method.at_mode(1.0, training), target, training, run)
        match_noise(posterior, held_out, run.seed)
    else:
        with stage(1, 2):
            mode = run.start.fit(
                target,
                training,
                seed=run.seed,
                checkpoint=run.file("mode"),
                progress=run.progress,
            )
        noise = match_noise(mode, held_out, run.seed)
        raise_if_stopped(mode)
        at_mode = target_at(mode)
        with stage(2, 2):
            posterior = _fit_planned(method.at_mode(noise, training), at_mode, training, run)
        if posterior.stopped == "interrupted":
            match_noise(posterior, held_out, run.seed)
        else:
            last_layer = None
            if tries_last_layer:
                last_layer = method.restricted_to(last_layer_names(at_mode, training))
            posterior = _improve(
                posterior, mode, held_out, method, last_layer, at_mode, training, run
            )
    posterior.held_out_index = held_out.index
    noise = posterior.target.likelihood.gaussian_noise or 0.0
    plan = Fitted.plan(method, posterior, training, run.seed)
    decision = (
        f"noise {noise:.3g} in the units of the fit, the likeliest for {held_out.n:,} held-out rows"
    )
    return replace(plan, decisions=(decision, "priors as given"))


def split_many_rows(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Split rows into those that a method learns from and those that decide on its noise."""
    least, most = LARGE_HELD_OUT
    training, held_out = rows.split(max(least, min(most, rows.n / 10)) / rows.n, seed)
    return training, held_out


def _fit_planned(method: Method, target: Target, rows: Rows, run: SearchRun) -> Posterior:
    """Fit a method with its planned length, whether or not it has converged then."""
    planned = method.with_planned_length(rows)
    file = run.checkpoint if planned == method else run.file("planned")
    return planned.fit(target, rows, seed=run.seed, checkpoint=file, progress=run.progress)


def _improve(
    posterior: Posterior,
    mode: Posterior,
    held_out: Rows,
    method: Method,
    last_layer: Method | None,
    target: Target,
    training: Rows,
    run: SearchRun,
) -> Posterior:
    """Return the posterior, a longer fit, or one of the last layer alone if that one is better.

    ``posterior`` is a fit of the planned length. One that is worse than its mode on the held-out
    rows, or whose intervals contain too little, is fitted again over the last layer, if the method
    can do that: over all layers of a large network ten times the length may not be enough. One that
    is acceptable but has not converged is fitted again until it has. Intervals that are still too
    narrow are widened.
    """
    of_mode = Residuals.of(mode, held_out, run.seed)
    noise = of_mode.likeliest_noise()
    judgment = judge(Residuals.of(posterior, held_out, run.seed), of_mode)
    if judgment.is_acceptable and has_not_converged(posterior):
        with stage(2, 2, "longer"):
            posterior = method.at_mode(noise, training).fit(
                target,
                training,
                seed=run.seed,
                checkpoint=run.checkpoint,
                progress=run.progress,
            )
        if posterior.stopped == "interrupted":
            match_noise(posterior, held_out, run.seed)
            return posterior
        judgment = judge(Residuals.of(posterior, held_out, run.seed), of_mode)
    if not judgment.is_acceptable and last_layer is not None:
        with stage(2, 2, "last layer"):
            other = last_layer.at_mode(noise, training).fit(
                target,
                training,
                seed=run.seed,
                checkpoint=run.file("last"),
                progress=run.progress,
            )
        if other.stopped == "interrupted":
            match_noise(posterior, held_out, run.seed)
            posterior.stopped = "interrupted"
            return posterior
        of_other = judge(Residuals.of(other, held_out, run.seed), of_mode)
        if of_other.nll < judgment.nll:
            other.choice = (
                f"the last layer is random: over all layers the NLL of {held_out.n:,} held-out "
                f"rows is {judgment.nll:.3f}, over the last {of_other.nll:.3f}, at the mode "
                f"{of_other.mode_nll:.3f}"
            )
            posterior, judgment = other, of_other
    match_noise(posterior, held_out, run.seed)
    _record_judgment(posterior, judgment, held_out)
    return posterior


def _record_judgment(posterior: Posterior, judgment: Judgment, held_out: Rows) -> None:
    """Add a judgment to the history of a posterior, and warn if it is worse than its mode."""
    if posterior.history and "collapsed" not in posterior.history[-1]:
        posterior.history[-1] |= judgment.history()
    if judgment.is_worse_than_mode:
        warn_worse_than_mode(judgment.nll, judgment.mode_nll, judgment.error, held_out.n)


def has_not_converged(posterior: Posterior) -> bool:
    """Return whether the objective of the last run was still rising at its end."""
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
