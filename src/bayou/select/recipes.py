"""Recipes: what a method by name means before the data are seen.

A recipe has no ``fit``: ``bayou.select.plan`` turns it into a plan for a target and rows, and the
plan into one fit.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

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
from bayou.select.best_method import HELD_OUT_FRACTION, compare_fits
from bayou.select.full_batch import (
    MAX_FULL_BATCH_ROWS,
    MIN_SEARCH_ROWS,
    FullBatchModes,
    can_follow_path,
    has_constant_targets,
    initial_weights,
    is_judged_by_log_prob,
    modes_at_target,
)
from bayou.select.many_rows import plan_many_rows
from bayou.select.noise import has_noise_to_select
from bayou.select.noise_and_prior import with_default_prior
from bayou.select.plans import Plan
from bayou.select.prior_scale import select_prior_scale
from bayou.select.random_layers import (
    STAGES_BESIDE_TRIALS,
    candidate_layers,
    plan_random_layers,
)
from bayou.select.regression import plan_regression
from bayou.select.rounding import round_initial_noise, round_rows
from bayou.select.search_run import SearchRun, raise_if_stopped, stage_record, target_at
from bayou.training.data import Data, Rows, as_data
from bayou.training.ranks import current
from bayou.training.seeds import as_int_seed, part_seed

CANDIDATES: Final = ("map", "ensemble", "laplace", "nodeflow", "mnf")  # of "auto", simplest first
# Weights, up to which a full curvature matrix costs no more than the training.
MAX_FULL_WEIGHTS: Final = 3500
# Each process of torchrun does the whole of it.
SEARCH: Final = "the search of noise and prior of a method by name"


class Recipe(Checked, ABC):
    """The base class of recipes."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The batch size of the method."""

    @abstractmethod
    def make_plan(
        self,
        target: Target,
        data: Data,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Plan:
        """Select settings on held-out rows.

        Args:
            target: network, likelihood and prior.
            data: the training data.
            seed: of the search and the fit.
            checkpoint: the file of the fit; those of the search lie beside it.
            progress: whether to show progress.

        Raises:
            SearchInterrupted: after Ctrl-C, with the posterior so far.
        """


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
        if self.large is None or count_weights(target) <= self.max_weights:
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

    def make_plan(
        self,
        target: Target,
        data: Data,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Plan:
        """Select the settings that the target and the rows admit."""
        seed = as_int_seed(seed)
        run = SearchRun(
            self.start, seed, None if checkpoint is None else Path(checkpoint), progress
        )
        rows = as_data(data, self.batch_size)
        is_prior_given = target.prior_given
        target = with_default_prior(target)
        method = self.method_for(target)
        if not isinstance(rows, Rows) or rows.n < MIN_SEARCH_ROWS or has_constant_targets(rows):
            return self._plan_layers(method, target, rows, run)
        method.check_target(target, rows)
        rows = round_rows(rows)
        target = round_initial_noise(target)
        if has_noise_to_select(target):
            current().note_unshared(SEARCH)
            if rows.n > MAX_FULL_BATCH_ROWS:
                tries_last_layer = self.selects_layers and self.large is None
                return plan_many_rows(method, target, rows, run, tries_last_layer=tries_last_layer)
            return plan_regression(method, target, rows, run, self)
        if not is_judged_by_log_prob(target) or not can_follow_path(self.start, target, rows):
            return self._plan_layers(method, target, rows, run)
        if is_prior_given:
            return self._plan_from_modes(method, target, rows, run)
        current().note_unshared(SEARCH)
        PointModel(self.start, target).check_first_batch(rows)
        with stage(1, 1 + self._count_stages(method, target, rows, seed)):
            target, record, decision = select_prior_scale(
                target, rows, run, draws_all_weights=self.draws_all_weights
            )
        plan = self._plan_from_modes(method, target, rows, run, stages_before=1)
        return replace(plan, stages=(record, *plan.stages), decisions=(decision, *plan.decisions))

    def _count_stages(self, method: Method, target: Target, rows: Rows, seed: int) -> int:
        """Return the number of stages of a fit after the search of the prior."""
        if initial_weights(self.start, method, target, seed) is not None:
            return 1
        if self.draws_all_weights and not isinstance(target.likelihood, FiniteLikelihood):
            return 2
        layers = candidate_layers(method, target, rows) if self.selects_layers else {}
        return len(layers) + STAGES_BESIDE_TRIALS if layers else 1

    def _plan_from_modes(
        self, method: Method, target: Target, rows: Rows, run: SearchRun, stages_before: int = 0
    ) -> Plan:
        """Plan a method whose modes L-BFGS can find."""
        count = stages_before + 1
        last = (count, count, "")
        if initial_weights(self.start, method, target, run.seed) is not None:
            ensemble = None if method == self.start else method
            modes = FullBatchModes(self.start, ensemble)
            return Plan(target, modes, rows, run.seed, progress_stage=last)
        is_of_classes = isinstance(target.likelihood, FiniteLikelihood)
        if self.draws_all_weights and not is_of_classes:
            starts = {name: value.unsqueeze(0) for name, value in target.start().items()}
            with stage(count, count + 1, "mode"):
                mode = modes_at_target(target, rows, starts, run.effort, run.progress)
            raise_if_stopped(mode)
            at_mode = method.at_mode(1.0, rows)
            last = (count + 1, count + 1, "")
            return Plan(target_at(mode), at_mode, rows, run.seed, start=mode, progress_stage=last)
        return self._plan_layers(method, target, rows, run, stages_before)

    def _plan_layers(
        self, method: Method, target: Target, rows: Data, run: SearchRun, stages_before: int = 0
    ) -> Plan:
        """Plan the method with its random layers selected, or as it is if there is no choice."""
        if self.selects_layers and isinstance(rows, Rows):
            layers = candidate_layers(method, target, rows)
            if layers:
                return plan_random_layers(method, target, rows, layers, run, stages_before)
        count = stages_before + 1
        return Plan(target, method, rows, run.seed, progress_stage=(count, count, ""))


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

    def make_plan(
        self,
        target: Target,
        data: Data,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Plan:
        """Compare the methods, and plan the best one for all rows."""
        if not isinstance(data, Rows):
            raise ValueError(
                f"auto holds out some of the rows, which {type(data).__name__} does not support; "
                "give (x, y)"
            )
        started = time.perf_counter()
        training, held_out = data.split(HELD_OUT_FRACTION, part_seed(seed, "auto"))
        own = target.copy(training.n)
        count = len(self.methods) + 2

        def fit(number: int, name: str) -> Posterior:
            file = None if checkpoint is None else f"{checkpoint}.{name}"
            options: dict[str, Any] = {"seed": seed, "checkpoint": file, "progress": progress}
            with stage(number, count, name):
                return plan_method(self.methods[name], own.copy(), training, **options).fit(
                    checkpoint=file, progress=progress
                )

        fits: dict[str, Callable[[], Posterior]] = {
            name: partial(fit, number, name) for number, name in enumerate(self.methods, 1)
        }
        comparison = compare_fits(fits, held_out, as_int_seed(seed), errors=self.errors)
        best = comparison.best
        record = stage_record("method", started, comparison.trials)
        with stage(count - 1, count, f"{best}, all rows"):
            plan = plan_method(
                self.methods[best],
                target,
                data,
                seed=seed,
                checkpoint=checkpoint,
                progress=progress,
            )
        decision = f"{best}, chosen from {len(self.methods)} methods on held-out rows"
        return replace(
            plan,
            stages=(record, *plan.stages),
            decisions=(decision, *plan.decisions),
            choice=comparison.describe(),
            progress_stage=(count, count, f"{best}, all rows"),
        )


def plan_method(
    method: Method | Recipe,
    target: Target,
    data: Data,
    *,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    progress: Show = True,
) -> Plan:
    """Return the plan of a recipe, or of a method as it is.

    Args:
        method: a recipe or a method.
        target: network, likelihood and prior.
        data: the training data.
        seed: of the search and the fit.
        checkpoint: the file of the fit; those of the search lie beside it.
        progress: whether to show progress.
    """
    if isinstance(method, Recipe):
        return method.make_plan(target, data, seed=seed, checkpoint=checkpoint, progress=progress)
    return Plan(target, method, data, seed)


def HeldOut(method: Method, start: MAP) -> NamedMethod:
    """Return the recipe that selects the noise and the prior scale for any method.

    Args:
        method: the method fitted to all rows in the end.
        start: finds the modes that are compared, and the mode at which ``method`` starts.

    >>> HeldOut(VI(MNF()), start=MAP()).method
    VI(...)
    """
    return NamedMethod(method, start)


def count_weights(target: Target) -> int:
    """Return the number of trainable weights."""
    return sum(value.numel() for value in target.net.parameters() if value.requires_grad)
