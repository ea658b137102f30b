"""The recipe "auto": several methods and the weights of their mixture, by held-out rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from bayou.core.progress import stage
from bayou.inference.method import Method
from bayou.likelihoods.continuous import BoundHeteroscedastic
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.select.best_method import FIT_ERRORS, HELD_OUT_FRACTION, compare_fits
from bayou.select.folds import SINGLE_FOLD_ROWS, Fold, split_folds
from bayou.select.full_batch import MAX_FULL_BATCH_ROWS
from bayou.select.likelihood_choice import has_frequent_value
from bayou.select.many_rows import split_many_rows
from bayou.select.plans import Fitted, Plan
from bayou.select.recipes import Recipe, plan
from bayou.select.search_run import SearchRun, raise_if_stopped, stage_record
from bayou.select.shared_searches import shared_searches
from bayou.select.stack_temperatures import (
    MIN_TEMPERED_ROWS,
    SPREAD,
    TemperedStack,
    describe_temperatures,
    temper_stack,
    tempered_held_out_nll,
)
from bayou.select.stacked import Stacked, leave_out_failures
from bayou.select.stacking import (
    PULL,
    describe_stack,
    keep_largest,
    mixture_loss,
    stack_trials,
    stacking_weights,
)
from bayou.training.data import Data, Rows
from bayou.training.rows import all_rows

CANDIDATES: Final = (
    "ensemble",
    "laplace",
    "wide",
    "wide-noise",
    "bins",
    "tabm",
    "tabm-noise",
    "mnf",
    "linear",
)
# Of these, left out where they take longer than all others together.
MAX_ROWS_OF_ENSEMBLE: Final = 20_000
SLOW_METHODS: Final = ("mnf",)  # only for classes, and few rows
MAX_ROWS_OF_SLOW_METHODS: Final = 2000
MAX_ROWS_OF_BINS: Final = 5000
MIN_ROWS_OF_PREDICTED_NOISE: Final = 1500  # fewer say too little about the noise
MIN_ROWS_OF_VARIED_NOISE: Final = 100
METHODS_OF_VARIED_NOISE: Final = ("wide-noise", "tabm-noise")
MAX_COMPONENTS: Final = 3  # which are fitted again to all rows
MIN_KEPT_WEIGHT: Final = 0.05  # of a method that is fitted again
MIN_ROWS: Final = 2  # so that one can be held out
FEW_ROWS_FOLDS: Final = 2  # fifths held out below SINGLE_FOLD_ROWS


@final
@dataclass(frozen=True)
class Auto(Recipe):
    """A mixture of the methods that predict held-out rows best together, fitted again to all rows.

    Every method is fitted to four fifths of the rows. The weights of the mixture maximize the
    density of the rows that were held out, with a pull toward equal weights (``bayou.stack``); the
    methods with the largest weights are fitted to all rows. Below 500 rows two fifths are held out,
    one after the other; above 5,000 rows a tenth is, and no method is fitted again. For
    classes the same rows, if there are at least 100, also select a temperature for each component.
    If one method keeps all the weight, the result is its posterior. ``posterior.choice`` states the
    weights, the temperatures and the NLL of every method.

    Args:
        methods: name → method or recipe; one that raises an error on these data is left out, with a
            warning if its fit to all rows does. Of the
            default ones, so are "mnf" in a regression or with more than 2,000 rows, "bins" with
            more than 5,000, and "ensemble" with more than 20,000 rows, or more than 5,000 of other
            than Gaussian noise, which take as long as the others together; "tabm-noise" with fewer
            than 1,500; and both with noise that depends on x with fewer than 100 rows, or where
            more than a twentieth of the rows have one value of y. Where rows have groups or times
            "wide-noise" is left out, too; "linear" is left out unless they have times.
        pull: held-out rows that the pull toward equal weights counts for; 2 by default.
        most: how many methods the mixture has at most; 3 by default, and 1 for the method with the
            largest weight alone.
        spread: the standard deviation of the logarithm of a temperature before the held-out rows
            are seen; .3 by default, and None for temperatures of 1.

    >>> list(bayou.select.by_name("auto").methods)
    ['ensemble', 'laplace', 'wide', 'wide-noise', 'bins', 'tabm', 'tabm-noise', 'mnf', 'linear']
    """

    methods: Mapping[str, Method | Recipe]
    pull: float = PULL
    most: int = MAX_COMPONENTS
    spread: float | None = SPREAD
    selects_likelihood = True

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping) or not self.methods:
            raise ValueError(f"Auto needs a dict of names and methods, got {self.methods!r}")
        self._check_positive("pull")
        self._check_whole("most")
        self._check_positive("spread")

    @property
    def batch_size(self) -> int:
        """The batch size of the first method."""
        return next(iter(self.methods.values())).batch_size

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Compare the methods, and plan those with the largest weights for all rows."""
        started = time.perf_counter()
        rows = _rows_to_hold_out(data)
        folds = _stacking_folds(rows, run)
        suitable = self._suitable_for(target, rows)
        is_final = rows.n > MAX_FULL_BATCH_ROWS
        count = len(folds) * len(suitable.methods) + 1 + (0 if is_final else self.most)
        losses, tempered, failures, fitted = suitable._held_out_losses(target, folds, run, count)
        stacked = self._stack(losses, tempered)
        weights, temperatures = stacked.weights, stacked.temperatures
        record = stage_record("method", started, stack_trials(losses))
        choice = describe_stack(losses, weights, mixture_loss(stacked.losses, weights))
        choice += "".join(f"; {text}" for text in describe_temperatures(temperatures))
        if is_final:
            plans = {name: fitted[name] for name in weights}
        else:
            choice += "; then fitted to all rows"
            with shared_searches():
                narrowed = suitable.narrowed_by(fitted)
                plans, left_out = narrowed._plans_of_all_rows(weights, target, rows, run, count)
            if left_out:
                choice += f"; {left_out}"
                weights = keep_largest({name: weights[name] for name in plans}, 0.0)
                temperatures = dict.fromkeys(plans, 1.0)
        choice += "".join(f"; {name} failed: {why}" for name, why in failures.items())
        decision = f"{_list_weights(weights)}, chosen from {len(losses)} methods on held-out rows"
        if len(plans) == 1 and not describe_temperatures(temperatures):
            selected = plans[next(iter(plans))]
        else:
            fitted_rows = folds[0][0] if is_final else rows
            selected = Stacked.plan(
                plans,
                weights,
                target,
                fitted_rows,
                run.seed,
                temperatures,
                leaves_out_failures=True,
            )
        return replace(
            selected,
            stages=(record, *selected.stages),
            decisions=(decision, *describe_temperatures(temperatures), *selected.decisions),
            choice=choice,
            progress_stage=(count, count, "" if is_final else "all rows"),
        )

    def _suitable_for(self, target: Target, rows: Rows) -> Auto:
        """Return this recipe with methods that are for all the rows and do not take too long.

        Args:
            target: network, likelihood and prior.
            rows: all rows.
        """
        names = [name for name, method in self.methods.items() if _suits(method, target, rows)]
        if tuple(self.methods) == CANDIDATES:
            names = [name for name in names if not _takes_too_long(name, target, rows)]
            if not isinstance(target.likelihood, FiniteLikelihood):
                names = [name for name in names if name not in _left_out_for_noise(rows)]
            if rows.n < MIN_ROWS_OF_PREDICTED_NOISE:
                names = [name for name in names if name != "tabm-noise"]
            if rows.blocks is None or not rows.blocks.are_ordered:
                names = [name for name in names if name != "linear"]
        names = names or list(self.methods)  # whose errors say what is wrong
        methods = {}
        for name in names:
            method = self.methods[name]
            if isinstance(method, Recipe):
                method = method.suited_to(target, rows)
            methods[name] = method
        return replace(self, methods=methods)

    def _stack(self, losses: Mapping[str, Tensor], tempered: Mapping[str, Tensor]) -> TemperedStack:
        """Return the weights of methods, and their temperatures where all can have one.

        Fewer than 100 held-out rows select no temperatures.

        Args:
            losses: −log p of all held-out rows by name.
            tempered: the same at each temperature, of the methods that can have one.
        """
        least, most = MIN_KEPT_WEIGHT, self.most
        has_enough_rows = min(map(len, losses.values())) >= MIN_TEMPERED_ROWS
        can_be_tempered = has_enough_rows and all(name in tempered for name in losses)
        if self.spread is not None and can_be_tempered:
            of_these = {name: tempered[name] for name in losses}
            return temper_stack(of_these, self.pull, spread=self.spread, least=least, most=most)
        weights = dict(zip(losses, stacking_weights(losses, self.pull).tolist(), strict=True))
        weights = keep_largest(weights, least, most)
        return TemperedStack(weights, dict.fromkeys(weights, 1.0), dict(losses))

    def narrowed_by(self, fitted: Mapping[str, Plan]) -> Auto:
        """Return this recipe with what fits to most of the rows have decided.

        Args:
            fitted: plans of these fits, by name.
        """
        methods = dict(self.methods)
        for name, selected in fitted.items():
            method = methods[name]
            if selected.narrowed is not None:
                methods[name] = selected.narrowed
            elif isinstance(method, Method) and isinstance(selected.method, Fitted):
                methods[name] = method.narrowed_to(selected.method.posterior)
        return replace(self, methods=methods)

    def _plans_of_all_rows(
        self, weights: Mapping[str, float], target: Target, data: Rows, run: SearchRun, count: int
    ) -> tuple[dict[str, Plan], str]:
        """Return the plans of the methods with the largest weights for all rows.

        A method whose search raises an error is left out, unless none is left.

        Args:
            weights: of these methods, by name.
            target: network, likelihood and prior.
            data: all rows.
            run: of the search.
            count: of all stages, for the progress.

        Returns:
            The plans by name, and what was left out in words.

        Raises:
            SearchInterrupted: after Ctrl-C, with the posterior so far.
        """
        first = count - self.most
        plans = {}
        errors: dict[str, Exception] = {}
        for number, name in enumerate(weights):
            ending = f"{name}.all" if len(weights) > 1 else ""
            try:
                with stage(first + number, count, f"{name}, all rows"):
                    selected = plan(self.methods[name], target.copy(), data, **run.options(ending))
            except FIT_ERRORS as error:
                errors[name] = error
                continue
            if isinstance(selected.method, Fitted):
                raise_if_stopped(selected.method.posterior)
            plans[name] = selected
        return plans, leave_out_failures(errors, plans)

    def _held_out_losses(
        self, target: Target, folds: Sequence[Fold], run: SearchRun, count: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str], dict[str, Plan]]:
        """Fit every method without the held-out rows of each fold, and return their −log p.

        Args:
            target: network, likelihood and prior.
            folds: training and held-out rows.
            run: of the search.
            count: of all stages, for the progress.

        Returns:
            −log p of all held-out rows by name, of the methods that could be fitted; the same at
            each temperature, of classes; why the others could not; and plans with the posteriors of
            the last fold.
        """
        fitted: dict[str, Plan] = {}
        tempered: dict[str, list[Tensor]] = {}

        def fit(name: str, training: Rows, held_out: Rows, ending: str) -> Posterior:
            selected = plan(
                self.narrowed_by(fitted).methods[name],
                target.copy(training.n),
                training,
                **run.options(ending),
            )
            posterior = selected.fit(checkpoint=run.file(ending), progress=run.progress)
            raise_if_stopped(posterior)
            posterior.held_out_index = held_out.index
            if self.spread is not None and posterior.target.likelihood.logits:
                of_rows = tempered_held_out_nll(posterior, held_out, run.seed)
                tempered.setdefault(name, []).append(of_rows)
            fitted_plan = Fitted.plan(selected.method, posterior, selected.rows, run.seed)
            fitted[name] = replace(
                fitted_plan,
                stages=selected.stages,
                decisions=selected.decisions,
                narrowed=selected.narrowed,
            )
            return posterior

        comparisons = []
        for number, (training, held_out) in enumerate(folds):
            suffix = f".{number + 1}" if number else ""
            fits = {
                name: partial(fit, name, training, held_out, name + suffix) for name in self.methods
            }
            stages = (1 + number * len(self.methods), count)
            with shared_searches():
                comparisons.append(compare_fits(fits, held_out, run.seed, stages=stages))
        failures = comparisons[0].failures
        for comparison in comparisons[1:]:
            failures = failures | comparison.failures
        losses = {
            name: torch.cat([comparison.nll[name] for comparison in comparisons])
            for name in self.methods
            if name not in failures
        }
        if not losses:
            raise ValueError(f"no method could be fitted to all parts of the rows: {failures}")
        losses, unjudged = _leave_out_unjudged(losses)
        of_folds = {name: torch.cat(values, 1) for name, values in tempered.items()}
        return losses, of_folds, failures | unjudged, fitted


def _leave_out_unjudged(
    losses: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Leave out methods without a finite −log p of some held-out row, unless all are such.

    Args:
        losses: −log p of all held-out rows by name.

    Returns:
        The losses of the others, and why each method was left out.
    """
    counts = {name: int((~values.isfinite()).sum()) for name, values in losses.items()}
    judged = {name: values for name, values in losses.items() if not counts[name]}
    if not judged:
        return dict(losses), {}
    why = {
        name: f"{count:,} of {len(losses[name]):,} held-out rows have no finite density"
        for name, count in counts.items()
        if count
    }
    return judged, why


def _rows_to_hold_out(data: Data) -> Rows:
    """Return the data as rows, some of which can be held out, or raise a ValueError."""
    if not isinstance(data, Rows):
        raise ValueError(
            f"auto holds out some of the rows, which {type(data).__name__} does not support; "
            "give (x, y)"
        )
    if data.n < MIN_ROWS:
        raise ValueError(
            f"auto holds out some of the rows, and there is {data.n} row; give at least "
            f"{MIN_ROWS}, or use ensemble"
        )
    return data


def _takes_too_long(name: str, target: Target, rows: Rows) -> bool:
    """Return whether a method by name takes as long as all others of "auto" together.

    The modes of an ensemble are found by L-BFGS, slowly where a network predicts its own noise, and
    by minibatches of many rows.
    """
    is_of_classes = isinstance(target.likelihood, FiniteLikelihood)
    if name in SLOW_METHODS and (not is_of_classes or rows.n > MAX_ROWS_OF_SLOW_METHODS):
        return True
    if name == "bins" and rows.n > MAX_ROWS_OF_BINS:
        return True
    if name != "ensemble":
        return False
    if is_of_classes or target.likelihood.gaussian_noise is not None:
        return rows.n > MAX_ROWS_OF_ENSEMBLE
    predicts_noise = isinstance(target.likelihood, BoundHeteroscedastic)
    return predicts_noise or rows.n > MAX_FULL_BATCH_ROWS


def _left_out_for_noise(rows: Rows) -> tuple[str, ...]:
    """Return the methods with noise that depends on x, where rows cannot tell the noise.

    A few rows say too little about it. Where one value of y is frequent, as of ratings, the noise
    of rows that repeat goes down to that of rounding. Leave-one-out residuals are too small where
    rows of a group or a time depend on each other.
    """
    _, y = all_rows(rows)
    if rows.n < MIN_ROWS_OF_VARIED_NOISE or has_frequent_value(y):
        return METHODS_OF_VARIED_NOISE
    return () if rows.blocks is None else ("wide-noise",)


def _stacking_folds(rows: Rows, run: SearchRun) -> list[Fold]:
    """Return what is held out: two fifths of few rows, one of more, and a tenth of many."""
    seed = run.part_seed("auto")
    if rows.n > MAX_FULL_BATCH_ROWS:
        return [split_many_rows(rows, run)]
    if rows.n < SINGLE_FOLD_ROWS:
        return split_folds(rows, seed)[:FEW_ROWS_FOLDS]
    return [rows.split(HELD_OUT_FRACTION, seed)]


def _suits(method: Method | Recipe, target: Target, rows: Rows) -> bool:
    """Return whether a method is for this target and so many rows, before anything is fitted."""
    try:
        method.check_target(target, rows)
    except ValueError:
        return False
    return True


def _list_weights(weights: Mapping[str, float]) -> str:
    """Return names with their weights, or the name that has all the weight."""
    if len(weights) == 1:
        return next(iter(weights))
    return " + ".join(f"{weight:.2f} {name}" for name, weight in weights.items())
