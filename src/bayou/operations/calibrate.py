"""Predictions that are as sure as they are right: one number, learned from rows that were held out."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayou import rng
from bayou.methods import Laplace
from bayou.methods.start import network_at
from bayou.operations.rows import all_rows, check_held_out
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.temperature import Calibration
from bayou.progress import Show
from bayou.target import Target, forward_inputs
from bayou.training.data import as_data

FOLDS = 2  # of the held-out rows: each judges a temperature that the others taught


def calibrate(
    posterior: Posterior, held: Any, *, samples: int | None = None, seed: rng.Seed = 0, train: Any = None
) -> Calibration:
    """``posterior.calibrate(x, y)`` with rows (x, y), a Dataset or a DataLoader: the posterior keeps what was learned.

    ``train``: the training data, where they are at hand, to see that no row is in both.
    """
    if train is not None:
        check_held_out(held, train)
    return posterior.calibrate(*all_rows(held), samples, seed=seed)


class BestCalibration(NamedTuple):
    """Which way won, the NLL of held-out rows by each way, and the posterior that predicts that way."""

    best: str
    nll: dict[str, float]
    posterior: Posterior


def best_calibration(
    posterior: Posterior,
    held: Any,
    train: Any,
    *,
    samples: int | None = None,
    seed: rng.Seed = 0,
    progress: Show = True,
) -> BestCalibration:
    """A temperature, a last-layer Laplace, or both: the one under which held-out rows are likeliest.

    "as it is"; "temperature", judged on rows that did not teach it (two folds); for a posterior of one point also
    "last layer", ``Laplace(where="last")`` there with the prior scale of the evidence of ``train``, and "last layer,
    temperature". The winner has a temperature that all held-out rows taught; ``posterior`` itself stays as it is.
    """
    check_held_out(held, train)
    x, y = all_rows(held)
    plain = copy.copy(posterior)
    plain.temperature = 1.0
    ways: dict[str, Posterior] = {"as it is": plain}
    if isinstance(posterior, Empirical) and posterior.draws == 1:
        old = posterior.target
        target = Target.build(network_at(posterior), old.likelihood_spec, old.prior, as_data(train).n)
        target.likelihood.load_state_dict(old.likelihood.state_dict())
        method = Laplace(where="last", start=None, prior="evidence")
        ways["last layer"] = method.fit(target, train, seed=rng.integer(seed), progress=progress)
    nll: dict[str, float] = {}
    for name, way in ways.items():
        nll[name] = _nll(way, x, y, samples, seed)
        nll["temperature" if way is plain else f"{name}, temperature"] = _cross_fitted(way, x, y, samples, seed)
    best = min(nll, key=lambda name: nll[name])
    winner = ways["last layer" if best.startswith("last layer") else "as it is"]
    if best.endswith("temperature"):
        winner.calibrate(x, y, samples, seed=seed)
    return BestCalibration(best, nll, winner)


def _nll(posterior: Posterior, x: Any, y: Tensor, samples: int | None, seed: rng.Seed) -> float:
    said = posterior.predict(x, samples, seed=seed)
    return -float(said.log_prob(y.to(said.outputs.device)).double().mean())


def _cross_fitted(posterior: Posterior, x: Any, y: Tensor, samples: int | None, seed: rng.Seed) -> float:
    """The NLL of all rows, each with a temperature that the other fold taught."""
    total, one = 0.0, copy.copy(posterior)
    for fold in range(FOLDS):
        judge = torch.arange(len(y)) % FOLDS == fold
        pick = [tuple(item[side] for item in forward_inputs(x)) for side in (~judge, judge)]
        teach, new = (part if len(part) > 1 else part[0] for part in pick)
        one.temperature = 1.0
        one.calibrate(teach, y[~judge], samples, seed=seed)
        total += _nll(one, new, y[judge], samples, seed) * int(judge.sum())
    return total / len(y)
