"""Modes by L-BFGS over all rows, where the loss is smooth and there are few rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from bayou.core import params
from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.inference.method import Method
from bayou.inference.point import PointModel
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.priors import BoundNormal
from bayou.select.folds import FOLDS
from bayou.select.regularization_path import PathSpec, follow_path
from bayou.select.rounding import round_initial_noise, round_rows
from bayou.select.search_run import SearchRun
from bayou.training.data import Data, Rows, as_data
from bayou.training.seeds import as_int_seed

MAX_FULL_BATCH_ROWS: Final = 5000  # rows, above which full passes cost more than the training
MIN_SEARCH_ROWS: Final = FOLDS  # below, settings are not selected on held-out rows


@final
@dataclass(frozen=True)
class FullBatchModes(Method):
    """The modes that a MAP or an ensemble of it consists of, by L-BFGS over all rows.

    Where L-BFGS is not applicable (dropout, batch norm, many rows, other likelihoods and priors),
    the method is fitted by minibatches as it is.

    Args:
        start: finds one mode by minibatches; its effort multiplies the passes.
        ensemble: the method whose posterior are several modes; None for the mode of ``start``.
    """

    start: MAP
    ensemble: Method | None = None

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The batch size of the method."""
        return self.method.batch_size

    @property
    def method(self) -> Method:
        """The method that is fitted by minibatches."""
        return self.start if self.ensemble is None else self.ensemble

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Find the modes from the initial weights."""
        seed = as_int_seed(seed)
        data = as_data(data, self.batch_size)
        prepared = prepare_search(self.method, target, data)
        if prepared is not None:
            target, rows = prepared
            data = rows
            starts = initial_weights(self.start, self.method, target, seed)
            if (
                is_judged_by_log_prob(target)
                and can_follow_path(self.start, target, rows)
                and starts is not None
            ):
                run = SearchRun(seed, progress=progress, start=self.start)
                return follow_path(PathSpec(target), target, rows, starts, run)
        return self.method.fit(target, data, seed=seed, checkpoint=checkpoint, progress=progress)


def prepare_search(method: Method, target: Target, data: Data) -> tuple[Target, Rows] | None:
    """Return target and rows for a search, rounded so that it does not depend on their last digits.

    Args:
        method: checks the network.
        target: network, likelihood and prior.
        data: the training data.

    Returns:
        None where no settings can be selected: for data without an index of rows, for few rows, and
        where there is no noise to learn, since all y are the same.
    """
    if not isinstance(data, Rows) or data.n < MIN_SEARCH_ROWS:
        return None
    y = data.targets()
    if y is not None and bool((y == y[:1]).all()):
        return None
    method.check_target(target, data)
    return round_initial_noise(target), round_rows(data)


def can_follow_path(start: MAP, target: Target, rows: Rows) -> bool:
    """Return whether L-BFGS can find the modes.

    Args:
        start: the method of one mode.
        target: the network, whose loss must be a smooth and deterministic function of its weights.
        rows: all rows.
    """
    return (
        PointModel(start, target).smooth and not start.validation and rows.n <= MAX_FULL_BATCH_ROWS
    )


def has_fixed_normal_priors(target: Target) -> bool:
    """Return whether all priors are Normal with fixed scales.

    Args:
        target: has the priors.
    """
    return all(
        isinstance(prior, BoundNormal) and not any(True for _ in prior.parameters())
        for prior in target.priors.values()
    )


def is_judged_by_log_prob(target: Target) -> bool:
    """Return whether −log p of held-out rows selects the scale of Normal priors.

    It does where the likelihood has nothing to learn, except for one Gaussian noise of all rows.

    Args:
        target: has the likelihood and the priors.
    """
    learns_likelihood = any(True for _ in target.likelihood.parameters())
    has_one_noise = target.likelihood.gaussian_noise is not None
    return has_fixed_normal_priors(target) and not has_one_noise and not learns_likelihood


def initial_weights(start: MAP, method: Method, target: Target, seed: int) -> Params | None:
    """Return the initial weights of the modes that are the posterior of a method, a stack.

    Args:
        start: the method of one mode.
        method: the method, which may be ``start`` itself.
        target: the network.
        seed: of the members of an ensemble.

    Returns:
        None if the posterior is not made of modes, or if their number of steps was given.
    """
    if not start.open_ended:
        return None
    if method == start:
        return params.stack([target.start()])
    return method.starts(target, seed)
