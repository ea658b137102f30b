"""Predictions that are as sure as they are right: one number, learned from rows that were held out."""

from __future__ import annotations

from typing import Any

from bayou import rng
from bayou.operations.rows import all_rows, check_held_out
from bayou.posteriors import Posterior
from bayou.posteriors.temperature import Calibration


def calibrate(
    posterior: Posterior, held: Any, *, samples: int | None = None, seed: rng.Seed = 0, train: Any = None
) -> Calibration:
    """``posterior.calibrate(x, y)`` with rows (x, y), a Dataset or a DataLoader: the posterior keeps what was learned.

    ``train``: the training data, where they are at hand, to see that no row is in both.
    """
    if train is not None:
        check_held_out(held, train)
    return posterior.calibrate(*all_rows(held), samples, seed=seed)
