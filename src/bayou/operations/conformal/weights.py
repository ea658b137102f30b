"""Weights of rows for conformal prediction: given, by a function, or by the age of a row."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor

from bayou.core.progress import BayouWarning

WeightFunction = Callable[[Any], Tensor]
MIN_EFFECTIVE_ROWS = 30.0  # below it the coverage of one data set varies too much to be useful
MIN_EFFECTIVE_FRACTION = 0.9  # of few rows, below which weights are to blame


class EffectiveRowsWarning(BayouWarning):
    """Few held-out rows resemble the new ones: the weighted quantile rests on few rows."""


class RowWeights(ABC):
    """Weights of the held-out rows, and a function that gives the weights of new rows.

    Args:
        held_out: the weights of the held-out rows, (n,).
    """

    def __init__(self, held_out: Tensor) -> None:
        self.held_out = check_weights(held_out, "held-out rows")

    @abstractmethod
    def __call__(self, x: Any) -> Tensor:
        """Return the weights of new rows, (B,).

        Args:
            x: their inputs, (B, ...).
        """

    def constant(self) -> float | None:
        """Return the weight of every new row if it does not depend on x, else None."""
        return None

    @property
    def effective_rows(self) -> float:
        """The effective sample size of the held-out rows, (Σ w)²/Σ w²."""
        return effective_rows(self.held_out)


@final
class GivenWeights(RowWeights):
    """Weights that the user gives.

    Args:
        held_out: the weights of the held-out rows, (n,).
        function: the weights of new rows from their inputs; None if they are passed with the rows.
    """

    def __init__(self, held_out: Tensor, function: WeightFunction | None = None) -> None:
        super().__init__(held_out)
        self.function = function

    def __call__(self, x: Any) -> Tensor:
        if self.function is None:
            raise ValueError(
                "the weights of the held-out rows were given as numbers, so those of new rows "
                "must be given, too: interval(x, weights=...) or set(x, weights=...)"
            )
        return self.function(x)


@final
class RecencyWeights(RowWeights):
    """Weights that decay with the age of a held-out row: w_i = 2^(−age_i/half_life), 1 if new.

    Args:
        held_out: the weights of the held-out rows, (n,).
    """

    def __call__(self, x: Any) -> Tensor:
        return torch.ones(len(x), dtype=torch.float64)

    def constant(self) -> float | None:
        return 1.0


def recency_weights(rows: int | Tensor, half_life: float) -> RecencyWeights:
    """Compute weights that decay with the age of a row, for time series that drift.

    w_i = 2^(−age_i/half_life) for held-out rows and 1 for new ones. For any distribution of the
    rows the coverage is at least level − Σ_i p_i·d_TV(R, R^i), where p_i = w_i/(Σ_j w_j + 1) and
    R^i are the scores with row i and the new row exchanged: old rows may differ much, recent ones
    should differ little (Barber et al. 2023).

    Args:
        rows: the number of held-out rows, in the order of time with the latest last; or their
            times (n,), from which ages are counted to the latest.
        half_life: the age at which the weight is 1/2, in rows or in the unit of the times. The
            effective sample size is about 2.9·half_life.

    Returns:
        Weights for ``conformal(..., weights=...)``.

    Raises:
        ValueError: for a half-life that is not positive, or times that are not finite.

    Example:
        >>> c = bayou.conformal(posterior, (x_held, y_held), weights=recency_weights(500, 60))

    References:
        Barber, Candès, Ramdas, Tibshirani: Conformal prediction beyond exchangeability, Annals of
        Statistics 2023.
    """
    if isinstance(half_life, bool) or not 0 < half_life < math.inf:
        raise ValueError(f"half_life must be a positive number, got {half_life!r}")
    if isinstance(rows, int):
        if isinstance(rows, bool) or rows < 1:
            raise ValueError(f"rows must be the number of held-out rows or their times, got {rows}")
        times = torch.arange(rows, dtype=torch.float64)
    else:
        times = torch.as_tensor(rows).double()
        if times.ndim != 1 or not len(times) or not bool(times.isfinite().all()):
            raise ValueError(
                f"times must be finite numbers (n,), one for each row, got {tuple(times.shape)}"
            )
    return RecencyWeights(torch.exp2((times - times.max()) / half_life))


def as_row_weights(weights: RowWeights | Tensor | WeightFunction, x: Any) -> RowWeights:
    """Return weights of any form as ``RowWeights``.

    Args:
        weights: numbers (n,), a function of inputs, or ``RowWeights``.
        x: the inputs of the held-out rows.
    """
    if hasattr(weights, "held_out"):
        return cast(RowWeights, weights)
    if callable(weights):
        return GivenWeights(weights(x), weights)
    return GivenWeights(torch.as_tensor(weights))


def check_weights(weights: object, owner: str, rows: int | None = None) -> Tensor:
    """Return weights as float64 (rows,), or raise a ValueError.

    Args:
        weights: finite numbers ≥ 0, not all 0 for held-out rows.
        owner: what the weights are of, for the message.
        rows: how many there must be; None for any number.
    """
    values = torch.as_tensor(weights).detach().double()
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or (rows is not None and len(values) != rows):
        needed = "(rows,)" if rows is None else f"({rows},)"
        raise ValueError(
            f"weights of {owner} must have the shape {needed}, got {tuple(values.shape)}; give "
            "one number for each row"
        )
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError(f"weights of {owner} must be finite and not negative")
    return values


def effective_rows(weights: Tensor) -> float:
    """Return the effective sample size (Σ w)²/Σ w²; 0 if all weights are 0.

    Args:
        weights: of the rows, (n,).
    """
    largest = weights.max() if len(weights) else 0.0
    if not largest > 0:
        return 0.0
    scaled = weights / largest  # without overflow
    return float(scaled.sum().square() / scaled.square().sum())


def warn_if_few(count: float, rows: int, owner: str = "") -> None:
    """Warn if the effective sample size is small.

    Args:
        count: the effective sample size.
        rows: the number of held-out rows.
        owner: a text after "held-out rows", such as " of the group 'a'".
    """
    if count < min(MIN_EFFECTIVE_ROWS, MIN_EFFECTIVE_FRACTION * rows):
        warnings.warn(
            f"the weights leave an effective sample of {count:.1f} of {rows} held-out rows{owner}: "
            "the coverage varies much from one held-out set to another, and intervals or sets may "
            "be infinite; hold out more rows like the new ones",
            EffectiveRowsWarning,
            stacklevel=3,
        )
