"""Comparisons of a posterior with its mode, its start or a constant, on some rows of its data."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from bayou.core.progress import BayouWarning, spell
from bayou.likelihoods import BoundLikelihood
from bayou.metrics import standard_error
from bayou.network import evaluating, forward_inputs, rows_of
from bayou.posteriors.checks import LARGE_EXCESS
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import Posterior
from bayou.training.data import Data
from bayou.training.inputs import Batch
from bayou.training.loop import move

CHECK_ROWS: Final = 256  # approximate number of rows
CHECK_DRAWS: Final = 50  # functions that predict them
MAX_OUTPUTS: Final = 2**28  # numbers that they predict at a time, at least those of one row
SIGNIFICANT_ERRORS: Final = 2.0  # standard errors of a significant difference
MAX_FITTED_OUTPUTS: Final = 2**24  # outputs of these rows up to which a constant is fitted to them
MIN_GAIN: Final = 0.05  # nats per row over a constant: a q that gains more has not collapsed
MIN_EXCESS: Final = 0.01  # nats per row: a posterior whose excess is larger is worse than a mode


class WorseThanModeWarning(BayouWarning):
    """A posterior predicts worse than the network at its own mode."""


class CollapseWarning(BayouWarning):
    """A variational posterior predicts no better than a constant: it may be at the prior."""


@dataclass(frozen=True)
class Comparison:
    """The mean NLL of a posterior and its difference from another model on the same rows.

    Args:
        nll: mean negative log-likelihood of the posterior, in nats a row.
        excess: mean of its NLL minus that of the other model.
        error: standard error of ``excess``; infinite for one row.
        rows: the number of rows.
    """

    nll: float
    excess: float
    error: float
    rows: int

    @classmethod
    def of(cls, nll: Tensor, other_nll: Tensor) -> Comparison:
        """Compare the NLL of a posterior with that of another model, row by row: (N,) each.

        Args:
            nll: of each row under the posterior.
            other_nll: of each row under the other model.
        """
        difference = (nll - other_nll).double()
        error = standard_error(difference) if len(nll) > 1 else math.inf
        return cls(float(nll.double().mean()), float(difference.mean()), error, len(nll))

    @property
    def other_nll(self) -> float:
        """The mean NLL of the other model."""
        return self.nll - self.excess

    def allowance(self, tolerance: float) -> float:
        """Return the excess that is not judged as worse: a tolerance, and chance.

        Args:
            tolerance: nats by which the posterior may be worse.
        """
        return tolerance + SIGNIFICANT_ERRORS * self.error

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the posterior is worse by more than a tolerance and chance.

        Args:
            tolerance: nats by which the posterior may be worse.
        """
        return self.excess > self.allowance(tolerance)

    def judge(
        self, tolerance: float, *, problem: str, other_model: str, rows: str, remedy: str
    ) -> dict[str, float]:
        """Return the comparison as entries of the history, and warn if the excess is too large.

        Args:
            tolerance: nats by which the posterior may be worse, in addition to chance.
            problem: what is wrong if it is worse by more.
            other_model: what has the other NLL.
            rows: whether they are training or held-out rows.
            remedy: what to do.

        Returns:
            The entries "nll", "mode_nll", "nll_error", "mode_allowance" and, if the posterior is
            worse by more than that, "worse_than_mode".
        """
        record = {
            "nll": self.nll,
            "mode_nll": self.other_nll,
            "nll_error": self.error,
            "mode_allowance": self.allowance(tolerance),
        }
        if self.exceeds(tolerance):
            record["worse_than_mode"] = self.excess
            warnings.warn(
                f"{problem}: NLL {self.nll:.3f}, {other_model} {self.other_nll:.3f} "
                f"(difference {self.excess:+.3f} ± {self.error:.3f}, "
                f"{self.rows:,} {rows} rows); {remedy}",
                WorseThanModeWarning,
                stacklevel=6,
            )
        return record


@torch.no_grad()
def compare_with_mode(
    posterior: GaussianPosterior, data: Data, *, learned: bool, seed: int
) -> dict[str, float]:
    """Compare a posterior with its mode on some rows; warn if the mode is better.

    On rows that the mode has learned from it is favored: the average over functions of a linear
    model is up to ½·log(1 + h) worse there, with the leverage h of a row, ≤ 1 and D/N on average.
    This much is tolerated.

    Args:
        posterior: a Gaussian around the mode.
        data: the rows.
        learned: whether the mode was fitted to these rows.
        seed: of the draws.

    Returns:
        Entries of the history, see ``Comparison.judge``.
    """
    params = posterior.mean()
    network = posterior.network
    posterior_nll: list[Tensor] = []
    mode_nll: list[Tensor] = []
    with evaluating(network.net):
        for x, y in take_check_batches(data, posterior, next(iter(params.values()))):
            outputs = network.call(params, *forward_inputs(x))
            mode_nll.append(-posterior.target.likelihood.log_prob(outputs, y))
            posterior_nll.append(_row_nll(posterior, (x, y), seed))
    tolerance = MIN_EXCESS
    if learned:
        weights = sum(value.numel() for value in params.values())
        tolerance = max(LARGE_EXCESS, 0.5 * math.log1p(min(1.0, weights / data.n)))
    remedy = spell("use prior='validation' or where='last'", "use --method laplace-last")
    if posterior.covariance.shapes.keys() != params.keys():  # it has such a layer only
        remedy = spell("use prior='validation', or the mode", "use --method map")
    return Comparison.of(torch.cat(posterior_nll), torch.cat(mode_nll)).judge(
        tolerance,
        problem="the posterior is worse than its own mode",
        other_model="the mode",
        rows="training" if learned else "held-out",
        remedy=f"its prior is too wide: {remedy}",
    )


@torch.no_grad()
def compare_with_start(
    posterior: Posterior, start: Posterior, data: Data, *, seed: int
) -> dict[str, float]:
    """Compare the posterior of a trajectory with its start; warn if the start is much better.

    Args:
        posterior: made of the points of the trajectory.
        start: the point at which it began.
        data: the rows.
        seed: of the draws.

    Returns:
        Entries of the history, see ``Comparison.judge``.
    """
    batches = take_check_batches(data, start, next(iter(start.target.start().values())))
    posterior_nll = torch.cat([_row_nll(posterior, batch, seed) for batch in batches])
    start_nll = torch.cat([_row_nll(start, batch, seed) for batch in batches])
    return Comparison.of(posterior_nll, start_nll).judge(
        LARGE_EXCESS,
        problem="the trajectory has moved from its start to worse points",
        other_model="at its start",
        rows="training",
        remedy=spell("use a smaller lr", "use a smaller --lr"),
    )


@torch.no_grad()
def compare_with_constant(posterior: Guided, data: Data, *, seed: int) -> dict[str, float]:
    """Compare a variational posterior with the best constant outputs; warn if it has collapsed.

    Args:
        posterior: of a variational method.
        data: its training rows.
        seed: of the draws.

    Returns:
        Entries of the history: "nll", "constant_nll", "nll_error" and, if the posterior is not
        better, "collapsed". None of them where the rows have no common constant.
    """
    batches = take_check_batches(data, posterior, next(posterior.bayesian.parameters()))
    nll = torch.cat([_row_nll(posterior, batch, seed) for batch in batches])
    x, y = batches[0]
    outputs = posterior.predict(x, 1, seed=seed).outputs[0]
    is_large = outputs[0].numel() * len(nll) > MAX_FITTED_OUTPUTS
    has_several_shapes = any(targets.shape[1:] != y.shape[1:] for _, targets in batches)
    if is_large or has_several_shapes or outputs.shape[0] != len(y):
        return {}  # rows of various shapes have no common constant
    targets = [targets for _, targets in batches]
    comparison = Comparison.of(nll, constant_nll(posterior.target.likelihood, outputs, targets))
    record = {
        "nll": comparison.nll,
        "constant_nll": comparison.other_nll,
        "nll_error": comparison.error,
    }
    if comparison.excess > -min(SIGNIFICANT_ERRORS * comparison.error, MIN_GAIN):
        record["collapsed"] = 1.0
        remedy = spell(
            "use a prior learned per unit (Normal('fan_in', learn='units')) and warmup=0.4, "
            "cold=True or beta < 1, fewer weights, or Ensemble()",
            "use --warmup 0.4 or a --beta below 1, a smaller --net, or --method ensemble",
        )
        warnings.warn(
            f"q predicts no better than a constant: NLL {comparison.nll:.3f} on "
            f"{comparison.rows:,} training rows, a constant {comparison.other_nll:.3f}. Unless y "
            "is independent of x, q has collapsed to the prior, because the KL of all weights "
            f"outweighs the likelihood: {remedy}",
            CollapseWarning,
            stacklevel=5,
        )
    return record


def constant_nll(likelihood: BoundLikelihood, outputs: Tensor, targets: list[Tensor]) -> Tensor:
    """Compute −log p(y_n | f) at the constant outputs f that minimize its sum.

    Args:
        likelihood: p(y | f).
        outputs: of some rows, (B, *out), whose mean is the first f.
        targets: y of all N rows, batch by batch.

    Returns:
        The NLL of each row, (N,).
    """
    y = torch.cat(targets)
    f = outputs.detach().double().mean(0).requires_grad_()
    optimizer = torch.optim.LBFGS([f], max_iter=100, line_search_fn="strong_wolfe")

    def row_nll() -> Tensor:
        constant = f.to(outputs.dtype).expand(len(y), *f.shape)
        return -likelihood.log_prob(constant, y).double()

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = row_nll().mean()
            loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return row_nll().detach()


def take_check_batches(data: Data, posterior: Posterior, parameter: Tensor) -> list[Batch]:
    """Return the first rows, about ``CHECK_ROWS``, in batches that all draws can predict at a time.

    Args:
        data: the rows.
        posterior: predicts them.
        parameter: a tensor on the device of the network.
    """
    batches: list[Batch] = []
    count = max(1, CHECK_ROWS * data.batches // max(data.n, 1))
    for batch in islice(data.epoch(), count):
        x, y = move(batch, parameter)
        inputs = forward_inputs(x)
        dry_run = posterior.dry_run(inputs)
        rows = len(y)
        if dry_run.rows_apart:
            rows = max(1, MAX_OUTPUTS // (CHECK_DRAWS * dry_run.numbers))
        for first in range(0, len(y), rows):
            batches.append((rows_of(inputs, slice(first, first + rows)), y[first : first + rows]))
    return batches


def _row_nll(posterior: Posterior, batch: Batch, seed: int) -> Tensor:
    """Compute the negative log predictive density of every row of a batch."""
    x, y = batch
    samples = posterior.draws_to_average(CHECK_DRAWS)
    return -posterior.predict(x, samples, seed=seed).log_prob(y)
