"""The budget of a search for noise and prior, in units of the fit that it serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from bayou.likelihoods.continuous import BoundHeteroscedastic
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.training.data import Rows

SEARCH_FITS: Final = 2  # a search costs at most so many times the fit that it serves
# Multiply-adds of one pass over all rows, up to which modes share passes.
MAX_SHARED_PRODUCTS: Final = 2**25
# Rows, from which on fits by minibatches have two folds instead of five.
MIN_ROWS_OF_TWO_FOLDS: Final = 100


def shares_passes(target: Target, rows: Rows) -> bool:
    """Return whether many modes that are found together cost little more than one.

    This holds for a small network of linear layers on rows of numbers: its batched products take
    less time than the calls themselves. Convolutions, recurrent layers and attention cost as much
    for every mode.

    Args:
        target: the network, whose free tensors must all belong to ``nn.Linear``, and its
            likelihood. The modes of a network that predicts its own noise converge late, so that
            they share nothing.
        rows: all rows; x must be a tensor (N, d).
    """
    x: Any = next(rows.with_batch_size(1).epoch())[0]
    if not isinstance(x, Tensor) or x.ndim != 2:
        return False
    if isinstance(target.likelihood, BoundHeteroscedastic):
        return False
    modules = target.net.named_modules()
    layers = {name for name, module in modules if isinstance(module, nn.Linear)}
    if any(name.rpartition(".")[0] not in layers for name in target.free):
        return False
    weights = sum(value.numel() for value in target.start().values())
    return rows.n * weights <= MAX_SHARED_PRODUCTS


def affordable_passes(fit_passes: int, modes: int) -> int:
    """Return the passes over all rows for each of some modes, at the cost of ``SEARCH_FITS`` fits.

    Args:
        fit_passes: passes over all rows of the fit that the search serves.
        modes: the number of modes that are compared.
    """
    return max(1, SEARCH_FITS * fit_passes // modes)


def shortened_start(start: MAP, rows: Rows, fits: int) -> MAP:
    """Return the method that finds modes by minibatches, short enough for a search.

    Some fits of it cost as much as ``SEARCH_FITS`` of the fit that the search serves.

    Args:
        start: the method of the fit that the search serves.
        rows: all rows, which set the steps of that fit.
        fits: the number of fits of the search.
    """
    steps = SEARCH_FITS * start.total_steps(rows) // fits
    return replace(start, epochs=None, steps=max(1, min(steps, start.total_steps(rows))))
