"""Which weights are random: those of all layers or of the last one, by held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

from bayou.core.progress import stage
from bayou.inference.data_checks import last_layer
from bayou.inference.method import Method
from bayou.inference.prior_scale import rescale_priors
from bayou.inference.start import starting_point
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.langevin import GradientSampler
from bayou.methods.vi import VI
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.select.beside_mode import ModeShare, plan_beside_mode
from bayou.select.best_method import HELD_OUT_FRACTION, compare_fits, without_warnings
from bayou.select.full_batch import MIN_SEARCH_ROWS, FullBatchModes
from bayou.select.plans import Plan
from bayou.select.prior_scale import SCALE_FACTOR
from bayou.select.search_run import SearchRun, raise_if_stopped, stage_record, target_at
from bayou.training.data import Rows

TRIAL_LENGTH: Final = 0.5  # of the fits that are compared
STAGES_BESIDE_TRIALS: Final = 3  # the modes of four fifths of the rows and of all, and the last fit


@final
@dataclass(frozen=True)
class LastLayer:
    """The last layer is random, and the layers below are points.

    Args:
        names: the tensors of the last layer.
        scale: the factor of its prior scales.
        learns_others: whether the points are learned under the bound, without a prior; otherwise
            they stay at the mode.
    """

    names: tuple[str, ...]
    scale: float = 1.0
    learns_others: bool = False

    def restrict(self, method: Method, target: Target) -> tuple[Method, Target]:
        """Return the method over the last layer, and the target with its prior.

        Args:
            method: the method over all layers.
            target: network, likelihood and prior.
        """
        restricted = method.restricted_to(self.names, learns_others=self.learns_others)
        if restricted is None:
            raise ValueError(f"{type(method).__name__} cannot be fitted to the last layer alone")
        multipliers = {} if self.scale == 1 else dict.fromkeys(self.names, self.scale**-2)
        return restricted, rescale_priors(target, multipliers)


def candidate_layers(method: Method, target: Target, rows: Rows) -> dict[str, LastLayer | None]:
    """Return the layers that are compared, by name; None for all layers.

    The candidates are:

    - the last layer, with the other weights at the mode;
    - the same with a prior √3 times as wide, unless the prior was given: a mean over draws is less
      certain than a mode;
    - for VI, the last layer, with the other weights learned as points under the bound;
    - all layers.

    There is nothing to compare in a regression, where other layers without uncertainty overfit, for
    few rows, and for networks and methods without such a choice.

    Args:
        method: VI with one family, IVON, Annealed, or SGLD and the like.
        target: the target, with its prior.
        rows: all rows.
    """
    is_of_classes = isinstance(target.likelihood, FiniteLikelihood)
    if rows.n < MIN_SEARCH_ROWS or not is_of_classes or target.learned_priors:
        return {}  # points have no bound to learn a prior from
    try:
        names = tuple(last_layer(target, rows))
    except ValueError:  # it is frozen, or the network has no such layer
        return {}
    if not 0 < len(names) < len(target.free) or method.restricted_to(names) is None:
        return {}
    layers: dict[str, LastLayer | None] = {"last layer": LastLayer(names)}
    if target.prior_selected:
        layers["last layer, with a wider prior"] = LastLayer(names, scale=SCALE_FACTOR)
    if method.restricted_to(names, learns_others=True) is not None:
        layers["last layer, without a prior of the others"] = LastLayer(names, learns_others=True)
    layers["all layers"] = None
    return layers


def plan_random_layers(
    method: Method,
    target: Target,
    rows: Rows,
    layers: dict[str, LastLayer | None],
    run: SearchRun,
    stages_before: int = 0,
    *,
    mixes_with_mode: bool = False,
) -> tuple[Plan, str]:
    """Select the random layers on held-out rows, and plan the fit to all rows, from their mode.

    With few rows for many weights the best q over all of them is near the prior, and draws of the
    posterior itself are far less certain than its mode. Each candidate is fitted to four fifths of
    the rows, from their mode, for half of the default length (chains: all of it), and judged on the
    rest: for VI by the lowest NLL, for others the first that none is better than by more than one
    standard error. A single candidate is not compared.

    Args:
        method: the method over all layers.
        target: with a likelihood of classes.
        rows: all rows.
        layers: see ``candidate_layers``.
        run: of the search.
        stages_before: stages of the whole that precede, for the progress lines.
        mixes_with_mode: whether candidates that are all worse than their mode become a mixture with
            it.

    Returns:
        The plan, and the name of the layers.

    Raises:
        SearchInterrupted: after Ctrl-C, with the posterior so far.
    """
    if isinstance(method, GradientSampler):
        method = replace(method, effort=method.effort / 2)
    count = stages_before + len(layers) + STAGES_BESIDE_TRIALS
    if len(layers) == 1:
        (best,) = layers
        decision = f"random weights: {best}, as for other rows of this table"
        plan = _plan_layers(best, layers, method, target, rows, run, count)
        return replace(plan, decisions=(decision,)), best
    started = time.perf_counter()
    training, held_out = rows.split(HELD_OUT_FRACTION, run.part_seed("auto"))
    with stage(stages_before + 1, count, "held out"), without_warnings():
        mode = find_start(target.copy(training.n), training, run, "mode")
    comparison = compare_fits(
        _trial_fits(layers, method, mode, training, run),
        held_out,
        run.seed,
        stages=(stages_before + 2, count),
        errors=0.0 if isinstance(method, VI) else 1.0,
        mode=mode,
    )
    record = stage_record("method", started, comparison.trials)
    best = comparison.best
    plan = replace(
        _plan_layers(best, layers, method, target, rows, run, count),
        stages=(record,),
        decisions=(f"random weights: {best}, chosen from {len(layers)} on held-out rows",),
        choice=comparison.describe(),
    )
    if mixes_with_mode and comparison.mode is not None and plan.start is not None:
        share = ModeShare.of(comparison.nll[best], comparison.mode)
        plan = plan_beside_mode(plan, share, plan.start)
    return plan, best


def _plan_layers(
    name: str,
    layers: dict[str, LastLayer | None],
    method: Method,
    target: Target,
    rows: Rows,
    run: SearchRun,
    count: int,
) -> Plan:
    """Return the plan of the fit of some layers to all rows, from their mode."""
    title = f"{name}, all rows"
    with stage(count - 1, count, title):
        start = find_start(target, rows, run, "start")
    final, selected = _restrict(layers[name], method.at_mode(1.0, rows), target_at(start))
    return Plan(selected, final, rows, run.seed, start, progress_stage=(count, count, title))


def _trial_fits(
    layers: dict[str, LastLayer | None],
    method: Method,
    mode: Empirical,
    training: Rows,
    run: SearchRun,
) -> dict[str, Callable[[], Posterior]]:
    """Return the short fit of each candidate to the training rows, from their mode."""
    at_mode = target_at(mode)
    trial = method.shortened(TRIAL_LENGTH).at_mode(1.0, training).with_planned_length(training)
    fits: dict[str, Callable[[], Posterior]] = {}
    for name, layer in layers.items():
        restricted, selected = _restrict(layer, trial, at_mode.copy())
        fits[name] = partial(restricted.fit, selected, training, **run.options(name))
    return fits


def find_start(target: Target, rows: Rows, run: SearchRun, ending: str) -> Empirical:
    """Find the mode of some rows at which all candidates start.

    Args:
        target: the target.
        rows: the rows.
        run: of the search.
        ending: of the file of the mode, beside the checkpoint.
    """
    mode = starting_point(FullBatchModes(run.start), target, rows, **run.options(ending))
    raise_if_stopped(mode)
    return mode


def _restrict(layer: LastLayer | None, method: Method, target: Target) -> tuple[Method, Target]:
    """Return the method and the target for some layers."""
    return (method, target) if layer is None else layer.restrict(method, target)
