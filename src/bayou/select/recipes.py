"""Recipes: what a method by name means before the data are seen, and the plans made of them.

A recipe has no ``fit``: ``bayou.select.plan`` turns it into a plan for a target and rows, and the
plan into one fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, final

from bayou.core import params
from bayou.core.files import StrPath
from bayou.core.progress import Show, stage
from bayou.core.specs import Checked, later_field
from bayou.guides import RankOne
from bayou.inference.method import Method
from bayou.inference.point import PointModel
from bayou.likelihoods.continuous import BoundHeteroscedastic
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.point import MAP
from bayou.methods.vi import VALIDATION, VI
from bayou.methods.wide import Wide
from bayou.network.target import Target
from bayou.posteriors.posterior import Stage
from bayou.select.beside_mode import compare_with_mode
from bayou.select.full_batch import (
    MAX_FULL_BATCH_ROWS,
    FullBatchModes,
    can_follow_path,
    initial_weights,
    is_judged_by_log_prob,
    prepare_search,
)
from bayou.select.kl_weight import plan_kl_weight
from bayou.select.likelihood_parameters import with_fixed_parameters
from bayou.select.many_rows import plan_many_rows, split_many_rows
from bayou.select.named import by_name
from bayou.select.noise import describe_rounding, has_noise_to_select
from bayou.select.noise_and_prior import with_default_prior
from bayou.select.plans import Fitted, Plan, SearchInterrupted
from bayou.select.prior_scale import (
    has_scale_of_many_rows,
    select_prior_scale,
    select_scale_of_many_rows,
)
from bayou.select.random_layers import (
    STAGES_BESIDE_TRIALS,
    LastLayer,
    candidate_layers,
    plan_random_layers,
)
from bayou.select.regression import MethodCorrection, plan_regression
from bayou.select.regularization_path import PathSpec, follow_path
from bayou.select.search_run import SearchRun, raise_if_stopped, target_at
from bayou.select.shared_members import (
    MembersLength,
    around_mode,
    begins_at_mode,
    describe_members,
    plan_shared_members,
)
from bayou.training.data import Data, Rows, as_data
from bayou.training.ranks import current
from bayou.training.seeds import as_int_seed

# Weights, up to which a full curvature matrix costs no more than the training.
MAX_FULL_WEIGHTS: Final = 3500
# Every process of torchrun computes this search by itself.
SEARCH: Final = "the search of noise and prior of a method by name"


class Recipe(Checked, ABC):
    """The base class of recipes.

    Attributes:
        selects_likelihood: whether ``bayou.fit`` selects the likelihood of real numbers on held-out
            rows if none is given (``bayou.select.likelihood_choice``).
    """

    selects_likelihood: ClassVar[bool] = False

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The batch size of the method."""

    def check_target(self, target: Target, data: Data) -> None:
        """Raise a ValueError if this is not for the target or so many rows.

        Args:
            target: network, likelihood and prior.
            data: the training data.
        """

    def suited_to(self, target: Target, data: Data) -> Recipe:
        """Return the recipe with what the target and the number of rows decide; here itself.

        ``Auto`` calls it with all rows, so that fits to some of them are of the same method.

        Args:
            target: network, likelihood and prior.
            data: all rows.
        """
        return self

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
    if isinstance(recipe, Method) and not selects_kl_weight(recipe):
        decisions = describe_rounding(target, data) if isinstance(recipe, Wide) else ()
        return Plan(target, recipe, data, seed, decisions=decisions)
    file = None if checkpoint is None else Path(checkpoint)
    run = SearchRun(as_int_seed(seed), file, progress)
    try:
        if isinstance(recipe, Method):
            return plan_method(recipe, target, data, run)
        return recipe.make_plan(target, data, run)
    except SearchInterrupted as stop:
        return Fitted.plan(None, stop.posterior, data, run.seed)


def selects_kl_weight(method: Method) -> bool:
    """Return whether β is to be selected on held-out rows.

    Args:
        method: any method.
    """
    return isinstance(method, VI) and method.beta == VALIDATION


def plan_method(method: Method, target: Target, data: Data, run: SearchRun) -> Plan:
    """Plan the fit of a method object; nothing but the β of ``VI(beta="validation")`` is selected.

    Args:
        method: the method.
        target: network, likelihood and prior.
        data: the training data.
        run: of the search and the fit.
    """
    if not isinstance(method, VI) or method.beta != VALIDATION:
        return Plan(target, method, data, run.seed)

    def plan_of(beta: float, target: Target, rows: Data, run: SearchRun) -> Plan:
        return Plan(target, replace(method, beta=beta), rows, run.seed)

    return plan_kl_weight(plan_of, target, data, run)


@final
@dataclass(frozen=True)
class Standardized(Recipe):
    """A method object for which ``bayou.fit`` standardizes x and y, as it does for a name.

    Args:
        method: the method; nothing but the β of ``VI(beta="validation")`` is selected.
    """

    method: Method

    @property
    def batch_size(self) -> int:
        """The batch size of the method."""
        return self.method.batch_size

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Plan the fit of the method."""
        return plan_method(self.method, target, data, run)


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
        mixes_with_mode: whether a method that predicts held-out rows worse than its mode becomes a
            mixture with the mode; False by default.
        layers: the name of the random layers, if a search of other rows of the same table has
            selected them; None (default) to select them.
        correction: of the noise and the prior scale for the method itself, if such a search has
            selected it; None (default) to select it.
    """

    method: Method
    start: MAP
    large: Method | None = None
    max_weights: int = MAX_FULL_WEIGHTS
    selects_layers: bool = False
    mixes_with_mode: bool = False
    layers: str | None = later_field(None)
    correction: MethodCorrection | None = later_field(None)

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
        if selects_kl_weight(self.method):
            return plan_kl_weight(self._plan_with_kl_weight, target, data, run)
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
                selects_prior = not is_prior_given
                return self._plan_many_rows(method, target, rows, run, selects_prior=selects_prior)
            plan, correction = plan_regression(
                method,
                target,
                rows,
                run,
                self,
                mixes_with_mode=self.mixes_with_mode,
                correction=self.correction,
            )
            return replace(plan, narrowed=replace(self, correction=correction))
        fixed = with_fixed_parameters(target)
        is_judged = is_judged_by_log_prob(fixed)
        follows_path = is_judged and can_follow_path(self.start, fixed, rows)
        keeps_prior = is_prior_given or self._is_wide_for_counts(method, target, run)
        return self._plan_fit(
            method,
            target,
            rows,
            run,
            follows_path=follows_path,
            keeps_prior=keeps_prior,
            selects_prior=follows_path and (not keeps_prior or fixed is not target),
            selects_scale_of_many_rows=(
                not follows_path
                and not keeps_prior
                and is_judged
                and has_scale_of_many_rows(self.start, target, rows)
            ),
        )

    def _plan_with_kl_weight(self, beta: float, target: Target, data: Data, run: SearchRun) -> Plan:
        """Return the plan of this recipe with another β."""
        method = self.method
        if isinstance(method, VI):
            method = replace(method, beta=beta)
        recipe = replace(self, method=method)
        selected = recipe.make_plan(target, data, run)
        return replace(selected, narrowed=selected.narrowed or recipe)

    def _plan_many_rows(
        self, method: Method, target: Target, rows: Rows, run: SearchRun, *, selects_prior: bool
    ) -> Plan:
        """Plan the fit of a regression to more rows than L-BFGS is for.

        Args:
            method: the method, of this network.
            target: with its initial prior.
            rows: all rows.
            run: of the search.
            selects_prior: whether the prior scale is selected, if it matters.
        """
        return plan_many_rows(
            method,
            target,
            rows,
            run,
            tries_last_layer=self.selects_layers and self.large is None,
            selects_prior=selects_prior and has_scale_of_many_rows(self.start, target, rows),
            mixes_with_mode=self.mixes_with_mode,
        )

    def _is_wide_for_counts(self, method: Method, target: Target, run: SearchRun) -> bool:
        """Return whether a method keeps the default prior because y are counts.

        Counts vary more than a likelihood says more often than not. A posterior under the default
        prior is wide enough for them; the prior that suits a mode, which is not, is too narrow.
        """
        is_mode = method == self.start or method.starts(target, run.seed) is not None
        return target.likelihood.support == "counts" and not is_mode

    def _full_batch_modes(self, method: Method) -> FullBatchModes:
        """Return what finds the mode, or the members of an ensemble, by L-BFGS."""
        return FullBatchModes(self.start, None if method == self.start else method)

    def _mix_with_mode(
        self, plan: Plan, method: Method, target: Target, rows: Rows, run: SearchRun, count: int
    ) -> Plan:
        """Return a plan that may become a mixture with the mode; of a mode the plan itself."""
        is_mode = method == self.start or method.starts(target, run.seed) is not None
        if is_mode or not self.mixes_with_mode:
            return plan
        with stage(count, count, "beside the mode"):
            return compare_with_mode(plan, target, rows, run)

    def _plan_fit(
        self,
        method: Method,
        target: Target,
        rows: Data,
        run: SearchRun,
        *,
        follows_path: bool = False,
        keeps_prior: bool = False,
        selects_prior: bool = False,
        selects_scale_of_many_rows: bool = False,
    ) -> Plan:
        """Plan a fit other than that of a regression with one noise, which is selected elsewhere.

        Its prior scale, the parameters of its likelihood, its random layers and its start.

        Args:
            method: the method, of this network.
            target: with its initial prior.
            rows: all rows.
            run: of the search.
            follows_path: whether L-BFGS can find the modes.
            keeps_prior: whether the prior was given.
            selects_prior: whether the prior scale, or the parameters of the likelihood with a given
                prior, are selected, by modes.
            selects_scale_of_many_rows: whether they are selected by modes of minibatches.
        """
        if not isinstance(rows, Rows):
            return Plan(target, method, rows, run.seed, progress_stage=(1, 1, ""))
        is_of_modes = (
            follows_path and initial_weights(self.start, method, target, run.seed) is not None
        )
        starts_at_mode = follows_path and not is_of_modes and self._starts_at_mode(target)
        layers: dict[str, LastLayer | None] = {}
        if self.selects_layers and not is_of_modes and not starts_at_mode:
            layers = self._candidate_layers(method, target, rows)
        count = 1 + selects_prior + starts_at_mode
        if layers:
            count = selects_prior + len(layers) + STAGES_BESIDE_TRIALS
        target, stages, decisions = self._select_prior(
            target, rows, run, count, keeps_prior, selects_prior, selects_scale_of_many_rows
        )
        plan = Plan(target, method, rows, run.seed, progress_stage=(count, count, ""))
        if layers:
            plan, selected_layers = plan_random_layers(
                method,
                target,
                rows,
                layers,
                run,
                int(selects_prior),
                mixes_with_mode=self.mixes_with_mode,
            )
            plan = replace(plan, narrowed=replace(self, layers=selected_layers))
        if is_of_modes:
            plan = replace(plan, method=self._full_batch_modes(method))
        if starts_at_mode:
            with stage(count - 1, count, "mode"):
                plan = _start_at_mode(plan, rows, run)
        if not layers and not is_of_modes:
            plan = self._mix_with_mode(plan, method, target, rows, run, count)
        return replace(
            plan, stages=(*stages, *plan.stages), decisions=(*decisions, *plan.decisions)
        )

    def _candidate_layers(
        self, method: Method, target: Target, rows: Rows
    ) -> dict[str, LastLayer | None]:
        """Return the random layers that are compared, or those that were selected already."""
        layers = candidate_layers(method, target, rows)
        if self.layers in layers:
            return {self.layers: layers[self.layers]}
        return layers

    def _select_prior(
        self,
        target: Target,
        rows: Rows,
        run: SearchRun,
        count: int,
        keeps_prior: bool,
        selects_prior: bool,
        selects_scale_of_many_rows: bool,
    ) -> tuple[Target, tuple[Stage, ...], tuple[str, ...]]:
        """Select the prior scale where it is selected, and return the target with it.

        Args:
            target: with its initial prior.
            rows: all rows.
            run: of the search.
            count: of all stages, for the progress.
            keeps_prior: whether the prior was given.
            selects_prior: see ``_plan_fit``.
            selects_scale_of_many_rows: see ``_plan_fit``.

        Returns:
            The target, the record of the stage and the decisions, if there are any.
        """
        if not selects_prior and not selects_scale_of_many_rows:
            return target, (), ()
        current().note_unshared(SEARCH)
        if selects_prior:
            PointModel(self.start, target).check_first_batch(rows)
            with stage(1, count):
                target, record, decisions = select_prior_scale(
                    target,
                    rows,
                    run,
                    draws_all_weights=self.draws_all_weights,
                    keeps_prior=keeps_prior,
                )
        else:
            training, held_out = split_many_rows(rows, run)
            target, record, decisions = select_scale_of_many_rows(
                target, training, held_out, run, draws_all_weights=self.draws_all_weights
            )
        return target, (record,), decisions

    def _starts_at_mode(self, target: Target) -> bool:
        """Return whether a fit begins at a mode by L-BFGS, as all do in a regression.

        Of classes it does not; where a network predicts its own noise, if all weights are random.
        """
        if isinstance(target.likelihood, FiniteLikelihood):
            return False
        return self.draws_all_weights or not isinstance(target.likelihood, BoundHeteroscedastic)


def _start_at_mode(plan: Plan, rows: Rows, run: SearchRun) -> Plan:
    """Return a plan that begins at the mode of its target, found by L-BFGS."""
    starts = params.stack([plan.target.start()])
    mode = follow_path(PathSpec(plan.target), plan.target, rows, starts, run)
    raise_if_stopped(mode)
    return replace(plan, target=target_at(mode), method=plan.method.at_mode(1.0, rows), start=mode)


@final
@dataclass(frozen=True)
class SharedMembers(Recipe):
    """An ensemble whose members share most weights, stopped early by held-out rows.

    TabM (Gorishniy et al. 2024, https://arxiv.org/abs/2410.24210) with priors in place of weight
    decay; a row of a batch is passed through one member instead of all. In a regression of fewer
    than 2,000 rows the members are fitted around a mode, whose noise and prior scale are selected
    as those of other methods by name are (``NamedMethod``).

    Args:
        method: VI with the family of the members, ``RankOne``.
        start: finds the mode at which the members of few rows begin.
        correction: see ``NamedMethod``; of few rows of a regression.
        length: the number of epochs and the noise, if a search of other rows of the same table has
            selected them; None (default) to select them.
    """

    method: VI
    start: MAP = field(default_factory=MAP)
    correction: MethodCorrection | None = later_field(None)
    length: MembersLength | None = later_field(None)

    def __post_init__(self) -> None:
        self._family()

    @property
    def batch_size(self) -> int:
        """The batch size of the method."""
        return self.method.batch_size

    def _family(self) -> RankOne:
        """Return the family of the members."""
        family = self.method.guide
        if not isinstance(family, RankOne):
            raise ValueError(f"SharedMembers needs VI(RankOne(...)), got a guide {family!r}")
        return family

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Fit the members with rows held out, or plan their fit around a mode."""
        family = self._family()
        rows = as_data(data, self.batch_size)
        if not begins_at_mode(self.method, target, rows):
            plan, length = plan_shared_members(
                self.method, family, target, data, run, length=self.length
            )
            return replace(plan, narrowed=replace(self, length=length))
        method = around_mode(self.method, family, target)
        recipe = NamedMethod(method, self.start, correction=self.correction)
        plan = recipe.make_plan(target, rows, run)
        decision = f"{describe_members(family)}, around a mode"
        narrowed = self
        if isinstance(plan.narrowed, NamedMethod):
            narrowed = replace(self, correction=plan.narrowed.correction)
        return replace(plan, decisions=(decision, *plan.decisions), narrowed=narrowed)


def HeldOut(method: Method, start: MAP) -> NamedMethod:
    """Return the recipe that selects the noise and the prior scale for any method.

    Args:
        method: the method fitted to all rows in the end.
        start: finds the modes that are compared, and the mode at which ``method`` starts.

    >>> HeldOut(VI(MNF()), start=MAP()).method
    VI(...)
    """
    return NamedMethod(method, start)
