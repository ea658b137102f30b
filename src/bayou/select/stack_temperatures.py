"""Temperatures of the components of a stack, selected on the rows that select its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from bayou.likelihoods.predictive import Predictive
from bayou.metrics import row_nll
from bayou.posteriors import Posterior
from bayou.select.stacking import PULL, keep_largest, stacking_weights
from bayou.training.data import Rows

# T from .37 to 2.7 in steps of a tenth, which is finer than 200 rows can tell.
TEMPERATURES: Final = tuple(math.exp(k / 10) for k in range(-10, 11))
SPREAD: Final = 0.3  # of log T, by simulation with 40 to 200 rows
# Held-out rows; with fewer, temperatures raise the NLL of fresh rows as often as they lower it.
MIN_TEMPERED_ROWS: Final = 100
MAX_SWEEPS: Final = 50


@final
@dataclass(frozen=True)
class TemperedStack:
    """The weights and temperatures of a mixture.

    Args:
        weights: by name, of the components that were kept; with the sum 1.
        temperatures: by name, of the same components.
        losses: −log p of every row at its temperature, (N,), by name, of all posteriors.
    """

    weights: dict[str, float]
    temperatures: dict[str, float]
    losses: dict[str, Tensor]


@torch.no_grad()
def tempered_nll(p: Predictive, y: Tensor) -> Tensor:
    """Return −log p(y_n | x_n, T) of every row at each of ``TEMPERATURES``, (T, N) in float64.

    A density that is not a number is 0.

    Args:
        p: predictions of N rows, without a temperature.
        y: their targets.
    """
    likelihood = copy.deepcopy(p.likelihood).double()
    outputs = p.outputs.double()
    losses = [
        row_nll(Predictive(*likelihood.temper(outputs, temperature)), y)
        for temperature in TEMPERATURES
    ]
    return torch.stack(losses).nan_to_num(nan=torch.inf)


def tempered_held_out_nll(posterior: Posterior, held_out: Rows, seed: int) -> Tensor:
    """Return −log p of every held-out row at each of ``TEMPERATURES``, (T, N).

    Args:
        posterior: predicts the rows; it has no temperature.
        held_out: the rows.
        seed: of the draws.
    """
    losses = [tempered_nll(posterior.predict(x, seed=seed), y) for x, y in held_out.epoch()]
    return torch.cat(losses, 1)


def temper_stack(
    losses: Mapping[str, Tensor],
    pull: float = PULL,
    *,
    spread: float = SPREAD,
    least: float = 0.0,
    most: int | None = None,
) -> TemperedStack:
    """Select the weights of a mixture and the temperatures of its components together.

    They maximize Σ_i log Σ_k w_k p_k(y_i | x_i, T_k) + pull/K·Σ_k log w_k − Σ_k (log T_k)²/2s² over
    weights and ``TEMPERATURES``, by turns: the temperature of each component with all others fixed,
    then all weights. Every turn raises the sum, which may have several maxima; the first turn
    begins at T = 1. Those of the largest weights are then selected again, without the others: a
    component at a low temperature is safe only beside one that has what it excludes.

    Args:
        losses: −log p of every row at each of ``TEMPERATURES``, (T, N), by name.
        pull: pseudo-rows with equal weights, as of ``bayou.stack``.
        spread: s, the standard deviation of log T under its prior.
        least: the smallest weight to keep; the largest one is always kept.
        most: how many components to keep; None for all.

    Raises:
        ValueError: as ``stacking_weights`` does, or for a spread that is not positive.
    """
    if not spread > 0:
        raise ValueError(f"the spread of log T must be positive, got {spread!r}")
    start = dict.fromkeys(losses, TEMPERATURES.index(1.0))
    weights, places = _maximize(losses, start, pull, spread)
    kept = keep_largest(weights, least, most)
    if len(kept) < len(weights):
        beside = {name: losses[name] for name in kept}
        kept, kept_places = _maximize(beside, start, pull, spread)
        places |= kept_places
    return TemperedStack(
        kept,
        {name: TEMPERATURES[places[name]] for name in kept},
        {name: losses[name][place] for name, place in places.items()},
    )


def _maximize(
    losses: Mapping[str, Tensor], start: Mapping[str, int], pull: float, spread: float
) -> tuple[dict[str, float], dict[str, int]]:
    """Return weights, and the places of temperatures, that no turn of either improves."""
    penalty = torch.tensor([math.log(t) ** 2 for t in TEMPERATURES], dtype=torch.float64)
    penalty /= 2 * spread**2
    places = {name: start[name] for name in losses}
    weights = _weights_at(losses, places, pull)
    for _ in range(MAX_SWEEPS):
        before = dict(places)
        for name in losses:
            mixed = _mix_with_others(losses, places, weights, name)
            places[name] = int((mixed.sum(1) - penalty).argmax())
        if places == before:
            break
        weights = _weights_at(losses, places, pull)
    return weights, places


def _weights_at(
    losses: Mapping[str, Tensor], places: Mapping[str, int], pull: float
) -> dict[str, float]:
    """Return the best weights at some temperatures."""
    tempered = {name: losses[name][place] for name, place in places.items()}
    return dict(zip(tempered, stacking_weights(tempered, pull).tolist(), strict=True))


def _mix_with_others(
    losses: Mapping[str, Tensor],
    places: Mapping[str, int],
    weights: Mapping[str, float],
    name: str,
) -> Tensor:
    """Return log p of every row under the mixture, for each temperature of one component."""
    terms = [math.log(weights[name]) - losses[name]]
    for other, place in places.items():
        if other != name:
            values = math.log(weights[other]) - losses[other][place]
            terms.append(values.expand_as(terms[0]))
    return torch.stack(terms).logsumexp(0)


def describe_temperatures(temperatures: Mapping[str, float]) -> tuple[str, ...]:
    """Return a phrase that states the temperatures, or none if all are 1.

    Args:
        temperatures: by name.
    """
    if all(temperature == 1.0 for temperature in temperatures.values()):
        return ()
    listed = ", ".join(f"{value:.2f} of {name}" for name, value in temperatures.items())
    return (f"temperatures of logits {listed}",)
