"""Checks on some training rows at the end of a fit: comparison with the mode and with a
constant.
"""

from __future__ import annotations

import math
import warnings
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from bayou.core.progress import BayouWarning, spell
from bayou.likelihoods import BoundLikelihood
from bayou.network import evaluating, forward_inputs, rows_of
from bayou.posteriors.gaussian import CLOSED, GaussianPosterior
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import Posterior
from bayou.training.data import Data
from bayou.training.inputs import Batch
from bayou.training.loop import move

CHECK_ROWS: Final = 256  # approximate number of rows
CHECK_DRAWS: Final = 50  # functions that predict them
MAX_OUTPUTS: Final = 2**28  # numbers that they predict at a time, at least those of one row
SURE: Final = 2.0  # standard errors of a significant difference
MAX_NUMBERS: Final = 2**24  # outputs of these rows up to which a constant is fitted to them
MIN_GAIN: Final = 0.05  # nats per row over a constant: a q that gains more has not collapsed
MIN_EXCESS, LARGE_EXCESS = 0.01, 0.1  # nats per row: worse than a mode, much worse


class WorseThanModeWarning(BayouWarning):
    """A posterior predicts worse than the network at its own mode."""


class CollapseWarning(BayouWarning):
    """A variational posterior predicts no better than a constant: as a rule it has collapsed to the
    prior.
    """


@torch.no_grad()
def compare_with_mode(
    posterior: GaussianPosterior, data: Data, *, learned: bool, seed: int
) -> dict[str, float]:
    """NLL of some rows and that of the mode, for the history; a ``WorseThanModeWarning`` if it is
    larger.

    On rows that the mode has ``learned`` from it is favored: the average over functions of a linear
    model is up to ½·log(1 + h) worse there, with the leverage h of a row, ≤ 1 and D/N on average.
    This much is tolerated.
    """
    params, network = posterior.mean(), posterior.network
    own, mode = list[Tensor](), list[Tensor]()
    with evaluating(network.net):
        for x, y in some_rows(data, posterior, next(iter(params.values()))):
            mode.append(
                -posterior.target.likelihood.log_prob(network.call(params, *forward_inputs(x)), y)
            )
            own.append(_nll(posterior, (x, y), seed))
    weights = sum(value.numel() for value in params.values())
    least = (
        max(LARGE_EXCESS, 0.5 * math.log1p(min(1.0, weights / data.n))) if learned else MIN_EXCESS
    )
    where = "training" if learned else "held-out"
    words = "the posterior is worse than its own mode", "the mode", where
    remedy = "its prior is too wide: " + spell(
        "use prior='validation' or where='last'", "use --method laplace-last"
    )
    return _compared(torch.cat(own), torch.cat(mode), least, words, remedy)


@torch.no_grad()
def compare_with_start(
    posterior: Posterior, start: Posterior, data: Data, *, seed: int
) -> dict[str, float]:
    """NLL of some rows and that of the start of a trajectory; a ``WorseThanModeWarning`` if it is
    much larger.
    """
    batches = some_rows(data, start, next(iter(start.target.start().values())))
    own, other = (
        torch.cat([_nll(one, batch, seed) for batch in batches]) for one in (posterior, start)
    )
    words = "the trajectory has moved from its start to worse points", "at its start", "training"
    return _compared(
        own, other, LARGE_EXCESS, words, spell("use a smaller lr", "use a smaller --lr")
    )


def _compared(
    own: Tensor, other: Tensor, least: float, words: tuple[str, str, str], remedy: str
) -> dict[str, float]:
    """Two NLLs of the same rows, for the history; a warning if the first is larger by more than
    ``least``.
    """
    nll, excess, error = _paired(own, other)
    found = {
        "nll": nll,
        "mode_nll": nll - excess,
        "nll_error": error,
        "mode_allowance": least + SURE * error,
    }
    if excess > found["mode_allowance"]:
        found["worse_than_mode"] = excess
        what, other_name, rows = words
        warnings.warn(
            f"{what}: NLL {nll:.3f}, {other_name} {nll - excess:.3f} (difference {excess:+.3f} ± {error:.3f}, "
            f"{len(own):,} {rows} rows); {remedy}",
            WorseThanModeWarning,
            stacklevel=6,
        )
    return found


def warn_worse_than_mode(nll: float, mode_nll: float, error: float, rows: int) -> None:
    """Warn that a posterior is worse than its mode on held-out rows.

    Args:
        nll: of the posterior, in nats a row.
        mode_nll: of the mode.
        error: the standard error of their difference.
        rows: the number of held-out rows.
    """
    warnings.warn(
        f"the posterior is worse than its own mode: NLL {nll:.3f}, the mode {mode_nll:.3f} (difference "
        f"{nll - mode_nll:+.3f} ± {error:.3f}, {rows:,} held-out rows); give more steps, or use laplace",
        WorseThanModeWarning,
        stacklevel=6,
    )


@torch.no_grad()
def compare_with_constant(posterior: Guided, data: Data, *, seed: int) -> dict[str, float]:
    """NLL of some rows and that of the best constant outputs, for the history; a
    ``CollapseWarning`` if not lower.
    """
    batches = some_rows(data, posterior, next(posterior.bayesian.parameters()))
    own = torch.cat([_nll(posterior, batch, seed) for batch in batches])
    x, y = batches[0]
    outputs = posterior.predict(x, 1, seed=seed).outputs[0]
    large = outputs[0].numel() * len(own) > MAX_NUMBERS
    if large or any(b.shape[1:] != y.shape[1:] for _, b in batches) or outputs.shape[0] != len(y):
        return {}  # rows of various shapes have no common constant
    nll, excess, error = _paired(
        own, constant_nll(posterior.target.likelihood, outputs, [y for _, y in batches])
    )
    found = {"nll": nll, "constant_nll": nll - excess, "nll_error": error}
    if excess > -min(SURE * error, MIN_GAIN):
        found["collapsed"] = 1.0
        warnings.warn(
            f"q predicts no better than a constant: NLL {nll:.3f} on {len(own):,} training rows, a constant "
            f"{nll - excess:.3f}. Unless y is independent of x, q has collapsed to the prior, because the KL of all "
            "weights outweighs the likelihood: "
            + spell(
                "use a prior learned per unit (Normal('fan_in', learn='units')) and warmup=0.4, cold=True or "
                "beta < 1, fewer weights, or Ensemble()",
                "use --warmup 0.4 or a --beta below 1, a smaller --net, or --method ensemble",
            ),
            CollapseWarning,
            stacklevel=5,
        )
    return found


def constant_nll(likelihood: BoundLikelihood, like: Tensor, targets: list[Tensor]) -> Tensor:
    """−log p(y_n | f) at the constant outputs f that minimize its sum: (N,)."""
    y = torch.cat(targets)
    f = like.detach().double().mean(0).requires_grad_()
    optimizer = torch.optim.LBFGS([f], max_iter=100, line_search_fn="strong_wolfe")

    def each() -> Tensor:
        return -likelihood.log_prob(f.to(like.dtype).expand(len(y), *f.shape), y).double()

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = each().mean()
            loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return each().detach()


def some_rows(data: Data, posterior: Posterior, like: Tensor) -> list[Batch]:
    """The first batches, of ``CHECK_ROWS`` rows or so, in parts that all draws can predict at a
    time.
    """
    count, found = max(1, CHECK_ROWS * data.batches // max(data.n, 1)), list[Batch]()
    for x, y in (move(batch, like) for batch in islice(data.ordered(), count)):
        inputs = forward_inputs(x)
        seen = posterior.dry_run(inputs)
        rows = max(1, MAX_OUTPUTS // (CHECK_DRAWS * seen.numbers)) if seen.rows_apart else len(y)
        found += [
            (rows_of(inputs, slice(i, i + rows)), y[i : i + rows]) for i in range(0, len(y), rows)
        ]
    return found


def _nll(posterior: Posterior, batch: Batch, seed: int) -> Tensor:
    x, y = batch
    closed = getattr(posterior, "predictive", None) in CLOSED
    return -posterior.predict(x, None if closed else CHECK_DRAWS, seed=seed).log_prob(y)


def _paired(own: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Mean of the first, and the mean difference with its standard error."""
    difference = (own - other).double()
    error = float(difference.std()) / math.sqrt(len(own)) if len(own) > 1 else math.inf
    return float(own.double().mean()), float(difference.mean()), error
