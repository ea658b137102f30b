"""Recipes: what a method by name means before the data are seen, and the plans made of them.

A recipe has no ``fit``: ``bayou.select.plan`` turns it into a plan for a target and rows, and the
plan into one fit.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from bayou.core import params
from bayou.core.files import StrPath
from bayou.core.progress import Show, stage
from bayou.core.specs import Checked
from bayou.inference.method import Method
from bayou.inference.point import PointModel
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.point import MAP
from bayou.methods.vi import VI
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import Stage
from bayou.select.best_method import HELD_OUT_FRACTION, compare_fits
from bayou.select.full_batch import (
    MAX_FULL_BATCH_ROWS,
    FullBatchModes,
    can_follow_path,
    initial_weights,
    is_judged_by_log_prob,
    prepare_search,
)
from bayou.select.many_rows import plan_many_rows
from bayou.select.named import by_name
from bayou.select.noise import has_noise_to_select
from bayou.select.noise_and_prior import with_default_prior
from bayou.select.plans import Fitted, Plan, SearchInterrupted
from bayou.select.prior_scale import select_prior_scale
from bayou.select.random_layers import (
    STAGES_BESIDE_TRIALS,
    LastLayer,
    candidate_layers,
    plan_random_layers,
)
from bayou.select.regression import plan_regression
from bayou.select.regularization_path import PathSpec, follow_path
from bayou.select.search_run import SearchRun, raise_if_stopped, stage_record, target_at
from bayou.training.data import Data, Rows, as_data
from bayou.training.ranks import current
from bayou.training.seeds import as_int_seed

CANDIDATES: Final = ("map", "ensemble", "laplace", "nodeflow", "mnf")  # of "auto", simplest first
# Weights, up to which a full curvature matrix costs no more than the training.
MAX_FULL_WEIGHTS: Final = 3500
# Every process of torchrun computes this search by itself.
SEARCH: Final = "the search of noise and prior of a method by name"


class Recipe(Checked, ABC):
    """The base class of recipes."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The batch size of the method."""

    @abstractmethod
    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Select settings on held-out rows.

        Args:
            target: network, likelihood and prior.
            data: the training data.
            run: seed, files and progress of the search and the fit.

        Raises:
            SearchInterrupted: after Ctrl-C, with the posterior so far.
        """


def plan(
    name: str | Recipe | Method,
    target: Target,
    rows: Any,
    *,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    progress: Show = True,
) -> Plan:
    """Select the settings of a method by name on held-out rows, without the final fit.

    Depending on the data these are the noise, the prior scale, the scales of the inputs, the random
    layers, the spread of an ensemble, or the method. ``bayou.fit(net, data, "mnf")`` standardizes
    the data, makes this plan and fits it; here x and y are taken as they are.

    Args:
        name: a name of ``bayou.list_methods()``, the result of ``bayou.select.by_name``, or a
            method object, which means exactly what its fields say.
        target: network, likelihood and prior, by ``Target.build``; ``prior=None`` lets the search
            select one.
        rows: a pair of tensors (x, y), or other data as of ``bayou.fit``.
        seed: of the search and of the fit.
        checkpoint: a file of the fit; the search writes beside it and continues from there.
        progress: whether to show progress, or a function that is called with it.

    Returns:
        The plan. After Ctrl-C its method is fitted already: ``fit`` returns the posterior so far,
        whose ``stopped`` is "interrupted".

    >>> print(plan("laplace", target, (x, y), seed=0))  # doctest: +SKIP
    """
    recipe = by_name(name) if isinstance(name, str) else name
    data = as_data(rows, recipe.batch_size)
    if isinstance(recipe, Method):
        return Plan(target, recipe, data, seed)
    file = None if checkpoint is None else Path(checkpoint)
    run = SearchRun(as_int_seed(seed), file, progress)
    try:
        return recipe.make_plan(target, data, run)
    except SearchInterrupted as stop:
        return Fitted.plan(None, stop.posterior, data, run.seed)


@final
@dataclass(frozen=True)
class NamedMethod(Recipe):
    """A method whose noise, prior scale and random layers are selected on held-out rows.

    Args:
        method: the method fitted to all rows in the end.
        start: finds the modes that are compared, and the mode at which ``method`` starts. Its
            ``effort`` is also that of the search: below 1 there are fewer folds and passes.
        large: another method for a network of more weights; None for the same.
        max_weights: the number of trainable weights above which ``large`` is taken, by default the
            size up to which a full curvature matrix costs no more than training.
        selects_layers: whether the random layers are selected, for classes.
    """

    method: Method
    start: MAP
    large: Method | None = None
    max_weights: int = MAX_FULL_WEIGHTS
    selects_layers: bool = False

    @property
    def batch_size(self) -> int:
        """The batch size of the method for large networks."""
        return (self.large or self.method).batch_size

    def method_for(self, target: Target) -> Method:
        """Return the method for the size of a network.

        Args:
            target: has the network.
        """
        weights = sum(value.numel() for value in target.net.parameters() if value.requires_grad)
        if self.large is None or weights <= self.max_weights:
            return self.method
        return self.large

    @property
    def draws_all_weights(self) -> bool:
        """Whether every weight is random in the posterior."""
        method = self.large or self.method
        if self.selects_layers:
            # the points of other methods would leave the mode of a wide prior for worse
            return isinstance(method, VI)
        return method.draws_all_weights

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Select the settings that the target and the rows admit."""
        run = replace(run, start=self.start)
        rows = as_data(data, self.batch_size)
        is_prior_given = target.prior_given
        target = with_default_prior(target)
        method = self.method_for(target)
        prepared = prepare_search(method, target, rows)
        if prepared is None:
            return self._plan_fit(method, target, rows, run)
        target, rows = prepared
        if has_noise_to_select(target):
            current().note_unshared(SEARCH)
            if rows.n > MAX_FULL_BATCH_ROWS:
                tries_last_layer = self.selects_layers and self.large is None
                return plan_many_rows(method, target, rows, run, tries_last_layer=tries_last_layer)
            return plan_regression(method, target, rows, run, self)
        follows_path = is_judged_by_log_prob(target) and can_follow_path(self.start, target, rows)
        return self._plan_fit(
            method,
            target,
            rows,
            run,
            follows_path=follows_path,
            selects_prior=follows_path and not is_prior_given,
        )

    def _plan_fit(
        self,
        method: Method,
        target: Target,
        rows: Data,
        run: SearchRun,
        *,
        follows_path: bool = False,
        selects_prior: bool = False,
    ) -> Plan:
        """Plan a fit without a noise to select: its prior scale, its random layers and its start.

        Args:
            method: the method, of this network.
            target: with its initial prior.
            rows: all rows.
            run: of the search.
            follows_path: whether L-BFGS can find the modes.
            selects_prior: whether the prior scale is selected, by modes.
        """
        if not isinstance(rows, Rows):
            return Plan(target, method, rows, run.seed, progress_stage=(1, 1, ""))
        is_of_modes = (
            follows_path and initial_weights(self.start, method, target, run.seed) is not None
        )
        is_of_classes = isinstance(target.likelihood, FiniteLikelihood)
        starts_at_mode = (
            follows_path and not is_of_modes and self.draws_all_weights and not is_of_classes
        )
        layers: dict[str, LastLayer | None] = {}
        if self.selects_layers and not is_of_modes and not starts_at_mode:
            layers = candidate_layers(method, target, rows)
        count = 1 + selects_prior + starts_at_mode
        if layers:
            count = selects_prior + len(layers) + STAGES_BESIDE_TRIALS
        stages: tuple[Stage, ...] = ()
        decisions: tuple[str, ...] = ()
        if selects_prior:
            current().note_unshared(SEARCH)
            PointModel(self.start, target).check_first_batch(rows)
            with stage(1, count):
                target, record, decision = select_prior_scale(
                    target, rows, run, draws_all_weights=self.draws_all_weights
                )
            stages = (record,)
            decisions = (decision,)
        plan = Plan(target, method, rows, run.seed, progress_stage=(count, count, ""))
        if layers:
            plan = plan_random_layers(method, target, rows, layers, run, int(selects_prior))
        elif is_of_modes:
            ensemble = None if method == self.start else method
            plan = replace(plan, method=FullBatchModes(self.start, ensemble))
        elif starts_at_mode:
            with stage(count - 1, count, "mode"):
                plan = _start_at_mode(plan, rows, run)
        return replace(
            plan, stages=(*stages, *plan.stages), decisions=(*decisions, *plan.decisions)
        )


def _start_at_mode(plan: Plan, rows: Rows, run: SearchRun) -> Plan:
    """Return a plan that begins at the mode of its target, found by L-BFGS."""
    starts = params.stack([plan.target.start()])
    mode = follow_path(PathSpec(plan.target), plan.target, rows, starts, run)
    raise_if_stopped(mode)
    return replace(plan, target=target_at(mode), method=plan.method.at_mode(1.0, rows), start=mode)


@final
@dataclass(frozen=True)
class Auto(Recipe):
    """The method with the lowest NLL on a fifth of the rows, fitted again to all of them.

    Cost: one fit of every method to four fifths of the rows, and one of the best to all rows.
    ``posterior.choice`` states the selected method and the paired differences of the others.

    Args:
        methods: name → method or recipe, the simplest first; one that raises an error on these data
            is left out.
        errors: the first method that none is better than by so many paired standard errors is
            selected.

    >>> list(bayou.select.by_name("auto").methods)
    ['map', 'ensemble', 'laplace', 'nodeflow', 'mnf']
    """

    methods: Mapping[str, Method | Recipe]
    errors: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping) or not self.methods:
            raise ValueError(f"Auto needs a dict of names and methods, got {self.methods!r}")

    @property
    def batch_size(self) -> int:
        """The batch size of the first method."""
        return next(iter(self.methods.values())).batch_size

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Compare the methods, and plan the best one for all rows."""
        if not isinstance(data, Rows):
            raise ValueError(
                f"auto holds out some of the rows, which {type(data).__name__} does not support; "
                "give (x, y)"
            )
        started = time.perf_counter()
        training, held_out = data.split(HELD_OUT_FRACTION, run.part_seed("auto"))
        training_target = target.copy(training.n)
        count = len(self.methods) + 2

        def fit(name: str) -> Posterior:
            file = run.file(name)
            selected = plan(
                self.methods[name], training_target.copy(), training, **run.options(name)
            )
            return selected.fit(checkpoint=file, progress=run.progress)

        fits = {name: partial(fit, name) for name in self.methods}
        comparison = compare_fits(fits, held_out, run.seed, stages=(1, count), errors=self.errors)
        best = comparison.best
        record = stage_record("method", started, comparison.trials)
        title = f"{best}, all rows"
        with stage(count - 1, count, title):
            selected = plan(self.methods[best], target, data, **run.options())
        decision = f"{best}, chosen from {len(self.methods)} methods on held-out rows"
        return replace(
            selected,
            stages=(record, *selected.stages),
            decisions=(decision, *selected.decisions),
            choice=comparison.describe(),
            progress_stage=(count, count, title),
        )


def HeldOut(method: Method, start: MAP) -> NamedMethod:
    """Return the recipe that selects the noise and the prior scale for any method.

    Args:
        method: the method fitted to all rows in the end.
        start: finds the modes that are compared, and the mode at which ``method`` starts.

    >>> HeldOut(VI(MNF()), start=MAP()).method
    VI(...)
    """
    return NamedMethod(method, start)
