"""Calibration of predictions by one temperature, learned from held-out rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayou import rng
from bayou.methods import Laplace
from bayou.network import forward_inputs
from bayou.operations.module import to_module
from bayou.operations.rows import all_rows, check_held_out
from bayou.posteriors import Posterior
from bayou.posteriors.temperature import Calibration
from bayou.progress import Show
from bayou.target import Target
from bayou.training.data import as_data


def calibrate(
    posterior: Posterior, held: Any, *, samples: int | None = None, seed: rng.Seed = 0, train: Any = None
) -> Calibration:
    """``posterior.calibrate(x, y)`` with rows (x, y), a Dataset or a DataLoader: the posterior stores the temperature.

    Args:
        held: rows that the fit has not seen.
        train: the training data, where they are at hand, to see that no row is in both.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
    """
    if train is not None:
        check_held_out(held, train)
    return posterior.calibrate(*all_rows(held), samples, seed=seed)


class BestCalibration(NamedTuple):
    """The selected calibration, the NLL of held-out rows for each candidate, and the selected posterior."""

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
    """A temperature, a last-layer Laplace, or both: the candidate with the lowest NLL of held-out rows.

    "as it is"; "temperature"; for a posterior of one point also "last layer", ``Laplace(where="last")`` there, with the
    scale of its prior by held-out rows, and "last layer, temperature". Each half of the held-out rows judges what the
    other half taught. The winner is taught by all of them, and ``posterior`` itself stays as it is.

    Args:
        held: held-out rows (x, y), a Dataset or a DataLoader.
        train: the training data, which the last-layer Laplace is fitted to.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
        progress: whether to show progress.
    """
    check_held_out(held, train)
    x, y = all_rows(held)
    seed, halves = rng.integer(seed), torch.arange(len(y)) % 2 == 0
    makers: dict[str, Callable[[Any, Tensor], Posterior]] = {"": lambda x, y: _plain(posterior)}
    if posterior.stack is not None and posterior.draws == 1:
        makers["last layer"] = lambda x, y: _last_layer(posterior, train, (x, y), seed, progress)

    def taught(part: str, x: Any, y: Tensor) -> dict[str, Posterior]:
        """The candidates fitted to these rows, without and with a temperature."""
        made = makers[part](x, y)
        warm = copy.copy(made)
        warm.calibrate(x, y, samples, seed=seed)
        return {part or "as it is": made, f"{part}, temperature" if part else "temperature": warm}

    nll: dict[str, float] = {}
    for judge in (halves, ~halves):
        for name, way in [pair for part in makers for pair in taught(part, _picked(x, ~judge), y[~judge]).items()]:
            said = way.predict(_picked(x, judge), samples, seed=seed)
            total = -float(said.log_prob(y[judge].to(said.outputs.device)).double().sum())
            nll[name] = nll.get(name, 0.0) + total / len(y)
    best = min(nll, key=lambda name: nll[name])
    return BestCalibration(best, nll, taught("last layer" if "last" in best else "", x, y)[best])


def _picked(x: Any, rows: Tensor) -> Any:
    parts = tuple(item[rows.to(item.device)] for item in forward_inputs(x))
    return parts if len(parts) > 1 else parts[0]


def _plain(posterior: Posterior) -> Posterior:
    found = copy.copy(posterior)
    found.temperature = 1.0
    return found


def _last_layer(posterior: Posterior, train: Any, held: Any, seed: int, progress: Show) -> Posterior:
    """Laplace of the last layer at a point."""
    method, old = Laplace(where="last", start=None, prior="validation"), posterior.target
    rows = as_data(train, method.batch_size)
    target = Target.build(to_module(posterior), old.likelihood_spec, old.prior, rows.n)
    target.likelihood.load_state_dict(old.likelihood.state_dict())
    return method.fit_beside(target, rows, as_data(held, method.batch_size), seed=seed, progress=progress)
