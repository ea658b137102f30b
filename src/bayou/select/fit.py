"""``bayou.fit``: from a network and data to a posterior, by a method or its name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import StrPath
from bayou.core.progress import BayouWarning, Show
from bayou.diagnostics.checks import MAX_BASELINE_ROWS, MAX_CHECKED_ROWS, check_after_fit
from bayou.inference.data_checks import LAST, check_gradients_enabled, first_inputs, last_layer
from bayou.inference.method import Method, identity
from bayou.likelihoods import Categorical, Gaussian, Likelihood
from bayou.likelihoods.named import AUTO, NOISE, find_likelihood
from bayou.methods.vi import VI
from bayou.network import check_tensor, clear_errors, rows_of, with_output
from bayou.network.inputs import Select
from bayou.network.target import PriorRules, Target
from bayou.network.units import Units, with_units
from bayou.posteriors.checks import Checks
from bayou.posteriors.posterior import Posterior
from bayou.select import Recipe, by_name, plan
from bayou.select.full_batch import MAX_FULL_BATCH_ROWS
from bayou.select.likelihood_choice import (
    LikelihoodChoice,
    likelihood_candidates,
    select_likelihood,
)
from bayou.select.noise import UNITS_OF_FIT
from bayou.select.plans import SearchInterrupted
from bayou.select.standardize import (
    apply_units,
    choose_units,
    sampled_rows,
    warn_if_far_from_unit_scale,
    without_sentinels,
)
from bayou.select.target_units import describe_targets
from bayou.training.blocks import Blocks
from bayou.training.checkpoints import fingerprint
from bayou.training.data import Data, Rows, as_data
from bayou.training.inputs import digest
from bayou.training.ranks import Ranks, sharing
from bayou.training.rows import some_rows
from bayou.training.seeds import as_int_seed

CANDIDATE_EFFORT = 0.3  # of the fits that compare likelihoods


def fit(
    net: nn.Module,
    data: Any,
    method: Method | Recipe | str | None = None,
    *,
    likelihood: Likelihood | str | None = None,
    prior: PriorRules | None = None,
    output: Select = None,
    where: str | Sequence[str] | None = None,
    groups: Any = None,
    times: Any = None,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    progress: Show = True,
) -> Posterior:
    """Fit the posterior over a network's weights, p(w | D) ∝ p(w)·Π_n p(y_n | x_n, w).

    Several processes of torchrun share a fit: each takes its rows of every batch and gets the
    posterior of one process.

    Args:
        net: the network f(x; w), outputs (B, *out). It is not changed.
        data: a pair of tensors (x, y), a Dataset, a DataLoader or a list of batches (x, y). x is a
            tensor, a tuple of them, or a mapping (a dict, a ``BatchEncoding``), which the network
            takes as keyword arguments; a mapping with "labels" is x and y.
        method: a name of ``bayou.list_methods()``, such as "laplace" or "mnf": noise and prior
            scale are selected on held-out rows (``bayou.select.plan``), x and y are standardized
            for the fit, and the posterior takes and predicts data in your units. Or a method object
            such as ``VI(MNF())`` or ``Laplace()``, which means exactly what its fields say and fits
            data as they are: standardize them. ``VI()`` by default.
        likelihood: p(y | f), or a name of ``bayou.likelihoods.list_likelihoods()`` such as
            "lognormal" or "negative-binomial", which starts at the scale of y and learns its
            parameters, or "auto": "gaussian" unless "student-t", (for y > 0) "lognormal" or (for
            counts) "negative-binomial" predicts held-out rows better by two standard errors. By
            default ``Categorical()`` for whole numbers y, and for real numbers ``Gaussian`` with a
            learned noise that starts at half the standard deviation of y ("auto" with the method
            "auto").
        prior: a prior such as ``Normal(1.0)``, or patterns → priors. By default a method by name
            selects the scale of a fan-in prior; VI and IVON learn one per unit in networks of 5,000
            weights or more if no length is given; other methods use N(0, 1).
        output: which output of a network with several the likelihood takes: a name, an index, or a
            function of them; by default its ``logits``.
        where: a pattern of parameter names (``"head.*"``, ``"*lora*"``), a list of them, or
            ``"last"`` for the last layer: only these are random, trained and stored, by every
            method. All other parameters are frozen, as are those with ``requires_grad=False``: they
            are shared with ``net`` and never copied, so it must not change while the posterior is
            used.
        groups: the group of each row, such as a patient or a shop: numbers or texts (N,). Rows that
            the fit holds out, to select settings or to stop, are whole groups then, as rows of new
            groups will be. None (the default): held-out rows are random.
        times: the time of each row, numbers or datetime64 (N,). Rows that the fit holds out are the
            latest then, with ties together. None (the default): held-out rows are random.
        seed: the same seed gives the same posterior.
        checkpoint: a file from which an interrupted run continues bit for bit; of several processes
            the first writes.
        progress: whether to show progress, or a function that is called with it.

    Raises:
        ValueError: for an unknown name (with the nearest one), or inconsistent data, networks or
            priors.
    """
    chosen = _resolve_method(method)
    check_gradients_enabled()
    rows = _with_blocks(as_data(data, chosen.batch_size), groups, times)
    if likelihood is None:
        warn_of_binary_targets(rows)
    net = with_output(net, output)
    standardizes = isinstance(method, str | Recipe)
    if not standardizes:
        warn_if_far_from_unit_scale(net, rows)
    try:
        is_open = likelihood is None and isinstance(chosen, Recipe) and chosen.selects_likelihood
        choice = None
        if likelihood == AUTO or (is_open and likelihood_candidates(rows.targets())):
            choice = _choose_likelihood(net, prior, where, rows, seed, progress)
    except SearchInterrupted as stop:
        return stop.posterior
    if choice is not None:
        likelihood = choice.name
    problem = _Problem.of(net, rows, likelihood, standardizes=standardizes and where is None)
    target = _build_target(problem.net, problem.likelihood, prior, problem.fitted_rows, where)
    posterior = _fit_by_all_ranks(chosen, target, problem.fitted_rows, seed, checkpoint, progress)
    problem.restore_units(posterior)
    if choice is not None and choice.stage is not None:
        posterior.selection = [choice.stage, *posterior.selection]
        posterior.plan = "; ".join(filter(None, (choice.decision, posterior.plan)))
    if posterior.stopped != "interrupted":
        index = posterior.held_out_index
        if index is None and isinstance(chosen, Method):
            index = chosen.held_out_index(problem.fitted_rows, seed)
        check = _deferred_check(problem.rows, index, as_int_seed(seed))
        posterior.check_when_read(check)
    return posterior


@final
@dataclass(frozen=True)
class _Problem:
    """What is fitted: the network, the likelihood and the rows, in the units of the fit.

    Args:
        net: the network, with the units.
        likelihood: for the rows of the fit.
        rows: the data in the user's units.
        fitted_rows: the data in the units of the fit.
        units: the standardization; None for data as they are.
    """

    net: nn.Module
    likelihood: Likelihood
    rows: Data
    fitted_rows: Data
    units: Units | None

    @classmethod
    def of(
        cls,
        net: nn.Module,
        rows: Data,
        likelihood: Likelihood | str | None,
        *,
        standardizes: bool,
    ) -> _Problem:
        """Return the problem of fitting rows, standardized or as they are.

        Args:
            net: the network.
            rows: the data in the user's units.
            likelihood: as for ``fit``.
            standardizes: whether x and y are standardized.
        """
        is_named = isinstance(likelihood, str)
        likelihood = _resolve_likelihood(likelihood, rows)
        units = None
        if standardizes:
            rows = without_sentinels(rows, likelihood)
            units = choose_units(net, rows, likelihood, shares_scale=not is_named)
            if likelihood is not None:
                likelihood = likelihood.starting_at(sampled_rows(rows)[1])
        elif is_named and likelihood is not None:
            likelihood = _scaled_to(likelihood, sampled_rows(rows)[1])
        fitted_rows = rows
        if units is not None:
            net = with_units(net, units)
            fitted_rows = apply_units(units, rows)
        likelihood = _likelihood_in_units(likelihood, fitted_rows, units, is_named=is_named)
        return cls(net, likelihood, rows, fitted_rows, units)

    def restore_units(self, posterior: Posterior) -> None:
        """Convert a posterior of the problem to the units of the user."""
        if self.units is None:
            return
        self.units.activate(next(posterior.target.net.parameters()))
        posterior.take_units(self.units)
        if self.units.output is not None:
            values = "log y" if self.units.is_log else "y"
            posterior.plan = posterior.plan.replace(
                UNITS_OF_FIT, f"standard deviations of {values}"
            )


def _choose_likelihood(
    net: nn.Module,
    prior: PriorRules | None,
    where: str | Sequence[str] | None,
    rows: Data,
    seed: int,
    progress: Show,
) -> LikelihoodChoice:
    """Select a likelihood on held-out rows."""
    seed = as_int_seed(seed)

    def fit_method(recipe: Method | Recipe, name: str, training: Rows) -> Posterior:
        options: dict[str, Any] = {"prior": prior, "where": where, "seed": seed}
        return fit(net, training, recipe, likelihood=name, progress=progress, **options)

    def fit_candidate(name: str, training: Rows) -> Posterior:
        # Modes by L-BFGS are quick, and with less effort they would seem worse than they are.
        is_quick = name != "student-t" and training.n <= MAX_FULL_BATCH_ROWS
        recipe = by_name("map", effort=1.0 if is_quick else CANDIDATE_EFFORT)
        return fit_method(recipe, name, training)

    def fit_varied_noise(training: Rows) -> Posterior:
        return fit_method(by_name("wide-noise"), "gaussian", training)

    return select_likelihood(fit_candidate, rows, seed, fit_varied_noise=fit_varied_noise)


def _resolve_method(method: Method | Recipe | str | None) -> Method | Recipe:
    """Return the method or recipe that the user means, ``VI()`` by default."""
    if method is None:
        return VI()
    if isinstance(method, str):
        return by_name(method)
    if not isinstance(method, Method | Recipe):
        called = f"; call it: {method.__name__}()" if isinstance(method, type) else ""
        raise ValueError(
            "method must be a name such as 'mnf' or a Method such as VI(MNF()), got "
            f"{method!r}{called}"
        )
    return method


def _with_blocks(rows: Data, groups: Any, times: Any) -> Data:
    """Return the data with the rows that are held out together, by groups or by times."""
    if groups is None and times is None:
        return rows
    if not isinstance(rows, Rows):
        raise ValueError(
            "groups and times need rows in a fixed order: give tensors (x, y) or a Dataset, not "
            "batches"
        )
    return rows.with_blocks(Blocks.of(rows.n, groups, times))


def _resolve_likelihood(likelihood: Likelihood | str | None, rows: Data) -> Likelihood | None:
    """Return the likelihood that the user means; None for the default one.

    A likelihood by name is that of targets of unit scale.
    """
    if not isinstance(likelihood, str):
        return likelihood
    named = find_likelihood(likelihood)
    y = sampled_rows(rows)[1]
    if likelihood == "gaussian" and y.is_floating_point():
        return None
    return named.make(y)


def _scaled_to(likelihood: Likelihood, y: Tensor) -> Likelihood:
    """Return a likelihood by name for targets as they are: its noise, its unit, its cut points."""
    likelihood = likelihood.starting_at(y)
    units = describe_targets(y, likelihood)
    if units is None:
        return likelihood
    scale = units.values.scale
    of_log = likelihood.of_log()
    if of_log is not None:
        of_log = of_log.in_units(scale)
        return likelihood if of_log is None else of_log.of_exp()
    return likelihood.in_units(scale) or likelihood


def _likelihood_in_units(
    likelihood: Likelihood | None, rows: Data, units: Units | None, *, is_named: bool
) -> Likelihood:
    """Return the likelihood for the rows of the fit.

    By default it is Categorical for whole numbers y and, for real ones, Gaussian with a learned
    noise that starts at half the standard deviation of y.

    Args:
        likelihood: as given, for y in the user's units.
        rows: in the units of the fit.
        units: the standardization, if there is one.
        is_named: whether the likelihood is that of targets of unit scale already.
    """
    output = None if units is None else units.output
    if likelihood is not None and units is not None and units.is_log:
        likelihood = likelihood.of_log()
    if likelihood is not None and output is not None and not is_named:
        likelihood = likelihood.in_units(1 / output.scale)
    if likelihood is not None:
        return likelihood
    if output is not None:
        return Gaussian(NOISE, learn=True)
    y = sampled_rows(rows)[1]
    if not y.is_floating_point():
        return Categorical()
    spread = float(y.std(0, correction=0).mean())
    return Gaussian(NOISE * spread if spread > 0 else NOISE, learn=True)


def _build_target(
    net: nn.Module,
    likelihood: Likelihood,
    prior: PriorRules | None,
    rows: Data,
    where: str | Sequence[str] | None,
) -> Target:
    """Build the target, with the last layer and the axis of the classes found in a first batch."""
    target = Target.build(net, likelihood, prior, rows.n, None if where == LAST else where)
    if where == LAST:
        where = [escape(name) for name in last_layer(target, rows)]
        target = Target.build(net, likelihood, prior, rows.n, where)
    if not isinstance(likelihood, Categorical) or likelihood.class_axis is not None:
        return target
    y = next(rows.epoch())[1]
    if y.ndim < 2:
        return target
    inputs = rows_of(first_inputs(target, rows), slice(2))
    with torch.no_grad(), clear_errors(inputs), rng.isolated(0, inputs[0].device):
        f = target.network.evaluate(target.start(), *inputs)
    check_tensor(f)
    likelihood = likelihood.for_shapes(f.shape, y[:2].shape)
    return Target.build(net, likelihood, prior, rows.n, where)


def _deferred_check(
    rows: Data, held_out_index: Tensor | None, seed: int
) -> Callable[[Posterior], Checks]:
    """Return a check of the posterior: a comparison with baselines, on held-out rows if possible.

    Some rows of tensors are kept for it. Rows of other data are read when the check is made.

    Args:
        rows: the data, in the units of the user.
        held_out_index: the rows that the fit did not use; None for none.
        seed: the seed of the fit.
    """
    held_out: Any = None
    train: Any = rows
    if held_out_index is not None and isinstance(rows, Rows):
        held_out = rows.at(held_out_index)
        train = rows.without(held_out_index)
    if isinstance(rows, Rows) and isinstance(rows.source, tuple):
        train = some_rows(train, MAX_BASELINE_ROWS, seed)
        held_out = None if held_out is None else some_rows(held_out, MAX_CHECKED_ROWS, seed)
    return partial(check_after_fit, train=train, held_out=held_out, seed=seed)


def _fit_by_all_ranks(
    method: Method | Recipe,
    target: Target,
    rows: Data,
    seed: int,
    checkpoint: StrPath | None,
    progress: Show,
) -> Posterior:
    """Plan and fit in this process, or in all processes of torchrun together.

    Of several processes the results must agree.
    """
    with sharing(checkpoint=checkpoint) as ranks:
        if ranks.size > 1:
            _check_same(ranks, method, target, rows, seed)
            progress = ranks.rank == 0 and progress
        selected = plan(method, target, rows, seed=seed, checkpoint=checkpoint, progress=progress)
        posterior = selected.fit(checkpoint=checkpoint, progress=progress)
        if ranks.size > 1 and ranks.differing(
            {"result": digest(tuple(posterior.state()[0].values()))},
            next(target.net.parameters()).device,
        ):
            raise RuntimeError(
                f"the {ranks.size} processes ended with different posteriors: not only the seed "
                "determines the result, but, say, numbers that the network draws from numpy, or "
                "processors of different kinds"
            )
        return posterior


def _check_same(
    ranks: Ranks, method: Method | Recipe, target: Target, data: Data, seed: int
) -> None:
    """Raise a ValueError if the processes of torchrun were given different arguments."""
    arguments = identity(method, target, data, seed)
    arguments["weights"] = digest(tuple(target.net.state_dict().values()))
    codes = {name: fingerprint(value) for name, value in arguments.items()}
    differing = ranks.differing(codes, next(target.net.parameters()).device)
    if differing:
        raise ValueError(
            f"the {ranks.size} processes of torchrun disagree on the "
            f"{' and the '.join(differing)}; give each of them all data (no DistributedSampler), "
            "of which it takes its rows of every batch, and the same initial weights, by "
            "torch.manual_seed(0) before the network is built; or fit in each alone: "
            "training.ranks.sharing(False)"
        )


def warn_of_binary_targets(data: Data) -> None:
    """Warn that real numbers y which are all 0 or 1 are fitted as numbers, not as labels.

    Args:
        data: the training data.
    """
    y = data.targets()
    if y is None or not y.is_floating_point():
        return
    is_binary = bool(((y == 0) | (y == 1)).all())
    if not is_binary or bool((y == y.flatten()[0]).all()):
        return
    advice = "pass likelihood=bayou.Bernoulli() for labels, one logit each"
    is_one_hot = y.ndim > 1 and y.shape[1] > 1 and bool((y.sum(1) == 1).all())
    if is_one_hot:
        advice = (
            "pass class indices, y.argmax(1), for one class a row, or "
            "likelihood=bayou.Bernoulli() for labels"
        )
    warnings.warn(
        f"y {tuple(y.shape)} is {y.dtype} and has only 0 and 1, and is fitted as numbers with "
        f"Gaussian noise; {advice}, or likelihood=bayou.Gaussian(0.5, learn=True) for numbers, "
        "without this warning",
        BayouWarning,
        stacklevel=3,
    )
