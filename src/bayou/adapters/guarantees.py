"""Conformal intervals and sets of the estimators, by held-out rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor

from bayou.likelihoods.predictive import check_level
from bayou.operations import conformal
from bayou.operations.conformal import ConformalPredictor, ScoreName, Shift
from bayou.operations.conformal.weights import check_weights
from bayou.posteriors import Posterior

# Of a file, beside the held-out rows themselves:
HELD_OUT_ARRAYS = ("held_x_", "held_y_", "held_weights_", "unlabeled_")
HELD_OUT_VALUES = ("held_groups_", "shift_")


class ConformalRows(ABC):
    """Held-out rows of an estimator, for intervals or sets with a guarantee.

    ``held_x_`` and ``held_y_`` are encoded rows, ``held_groups_`` their groups, ``held_weights_``
    their weights, ``unlabeled_`` encoded new rows and ``shift_`` how these differ.
    """

    posterior_: Posterior
    seed_: int
    samples: int
    held_x_: np.ndarray
    held_y_: np.ndarray

    def conformalize(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        shift: Shift | None = None,
        unlabeled: ArrayLike | None = None,
    ) -> Self:
        """Set the held-out rows of conformal intervals or sets, which must not be training rows.

        They replace those that a fit with ``conformal=0.2`` holds out.

        Args:
            X: inputs (N, features).
            y: targets, as in ``fit``.
            groups: the group of each row (N,), for a guarantee within each; by default none.
            weights: the weight of each row (N,), for new rows with other inputs; by default none.
            shift: "covariate" or "label" estimates weights from ``unlabeled``
                (``bayou.conformal``).
            unlabeled: inputs of new rows (M, features), for ``shift``.

        Returns:
            The estimator.
        """
        check_is_fitted(self, "posterior_")
        if (shift is None) != (unlabeled is None):
            raise ValueError("give both shift= and unlabeled=, or neither")
        if weights is not None and shift is not None:
            raise ValueError("weights= and shift= are two corrections of one shift; give one")
        x = self._encode(X)
        targets = self._encode_targets(y)
        check_consistent_length(x, targets, *(v for v in (groups, weights) if v is not None))
        self._forget_held_out()
        self.held_x_ = x
        self.held_y_ = targets
        if groups is not None:
            self.held_groups_ = np.asarray(groups).tolist()
        if weights is not None:
            self.held_weights_ = check_weights(np.asarray(weights), "held-out rows").numpy()
        if unlabeled is not None:
            self.shift_ = shift
            self.unlabeled_ = self._encode(unlabeled)
        return self

    def _forget_held_out(self) -> None:
        """Remove the held-out rows, before others take their place."""
        for name in (*HELD_OUT_ARRAYS, *HELD_OUT_VALUES):
            self.__dict__.pop(name, None)

    def _conformal(self, level: float, score: str) -> ConformalPredictor:
        """Compute the conformal guarantee by the held-out rows, for standardized y."""
        check_is_fitted(self, "posterior_")
        check_level(level)
        if not hasattr(self, "held_x_"):
            raise ValueError(
                "no rows were held out for a guarantee: fit with conformal=0.2, for example, or "
                "call conformalize(X, y)"
            )
        rows = (self._inputs(self.held_x_), self._targets(self.held_y_))
        score_name: ScoreName = score  # type: ignore[assignment]
        weights = getattr(self, "held_weights_", None)
        unlabeled = getattr(self, "unlabeled_", None)
        samples = self.samples
        return conformal(
            self.posterior_,
            rows,
            level,
            groups=getattr(self, "held_groups_", None),
            weights=None if weights is None else torch.as_tensor(weights),
            shift=getattr(self, "shift_", None),
            unlabeled=None if unlabeled is None else self._inputs(unlabeled),
            samples=samples.item() if isinstance(samples, np.generic) else samples,
            seed=self.seed_,
            score=score_name,
        )

    @abstractmethod
    def _encode(self, X: ArrayLike) -> np.ndarray:
        """Return the inputs of new rows, (N, features)."""

    @abstractmethod
    def _encode_targets(self, y: Any) -> np.ndarray:
        """Return targets as a fit sees them: numbers (N, D) or codes of classes (N,)."""

    @abstractmethod
    def _inputs(self, X: np.ndarray) -> Tensor:
        """Return standardized inputs."""

    @abstractmethod
    def _targets(self, y: np.ndarray) -> Tensor:
        """Return targets as the network expects them."""


def batch_of(values: ArrayLike | None, start: int, rows: int) -> Any:
    """Return the values of a batch of rows; None if there are none.

    Args:
        values: of all rows, (N,).
        start: the first row of the batch.
        rows: the number of its rows.
    """
    return None if values is None else np.asarray(values)[start : start + rows]


def check_rows_of(rows: int, groups: ArrayLike | None, weights: ArrayLike | None) -> None:
    """Raise a ValueError unless groups and weights have a value for each row.

    Args:
        rows: the number of rows.
        groups: of the rows, or None.
        weights: of the rows, or None.
    """
    for name, values in (("groups", groups), ("weights", weights)):
        if values is not None and np.shape(values)[:1] != (rows,):
            raise ValueError(f"{name} must have one value for each of {rows} rows")
