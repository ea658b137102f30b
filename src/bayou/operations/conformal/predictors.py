"""What ``conformal`` returns: a posterior with thresholds of the nonconformity score."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import making, read_file, write_file
from bayou.core.params import under
from bayou.likelihoods.predictive import Predictive
from bayou.operations.conformal.groups import Groups, new_positions
from bayou.operations.conformal.quantiles import weighted_quantile
from bayou.operations.conformal.scores import (
    Score,
    check_has_classes,
    check_has_order,
    probability_rounding,
)
from bayou.operations.conformal.weights import (
    GivenWeights,
    RecencyWeights,
    RowWeights,
    check_weights,
    effective_rows,
)
from bayou.posteriors import Posterior
from bayou.posteriors.loading import restore_posterior
from bayou.posteriors.state import SavedState


class Predicts(Protocol):
    """A posterior, or any other object with ``predict``."""

    def predict(self, x: object, samples: int | None = None, *, seed: rng.Seed = 0) -> Predictive:
        """Predict y for x.

        Args:
            x: inputs (B, ...).
            samples: draws of the weights.
            seed: of the draws.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class ConformalPredictor(ABC):
    """A posterior with a threshold of the score for each row: the result of ``conformal``.

    Args:
        posterior: what predicts y.
        score: the nonconformity score, with the guaranteed level.
        groups: the labels of the groups; (None,) without groups.
        rows: how many held-out rows each group has.
        samples: draws of the weights in a prediction.
        seed: of these draws.
    """

    posterior: Predicts
    score: Score
    groups: tuple[Any, ...]
    rows: tuple[int, ...]
    samples: int | None
    seed: int

    @property
    def level(self) -> float:
        """The guaranteed coverage."""
        return self.score.level

    @property
    def effective_rows(self) -> tuple[float, ...]:
        """The effective sample size of each group: without weights its number of rows."""
        return tuple(map(float, self.rows))

    def weights_of(self, x: Any) -> Tensor | None:
        """Return the weights of new rows for ``interval`` and ``set``; None without weights.

        Args:
            x: inputs of the network, (B, ...).
        """
        return None

    def interval(
        self, x: object, groups: Groups | None = None, *, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the interval of y; a single point if no y has such a small score.

        Args:
            x: inputs of the network, or their ``posterior.predict(x, samples, seed=seed)``.
            groups: a label for each row, if the guarantee is by group.
            weights: the weight of each row (B,), if the held-out rows have weights and those of new
                rows are not a function of x.

        Returns:
            Lower and upper end, (B, *event) each; infinite where the held-out rows say too little
            about a row.

        Raises:
            ValueError: if y are classes, or a group has no held-out rows.
        """
        check_has_order(self.score.kind)
        p = self._predictive(x)
        thresholds = self._thresholds(x, p, groups, weights)
        return self.score.interval(p, thresholds[..., 0])

    def set(
        self,
        x: object,
        groups: Groups | None = None,
        *,
        weights: Tensor | None = None,
        empty: bool = True,
        start: int = 0,
    ) -> Tensor:
        """Return the set of classes as a mask.

        If the accuracy of the posterior is above ``level``, some sets are empty.

        Args:
            x: inputs of the network, or their ``posterior.predict(x, samples, seed=seed)``.
            groups: a label for each row, if the guarantee is by group.
            weights: the weight of each row (B,), if the held-out rows have weights and those of new
                rows are not a function of x.
            empty: whether sets may be empty. If not, those have the most probable class, and the
                coverage is above ``level``.
            start: the number of the first row, if rows are passed in several calls and sets are
                randomized.

        Returns:
            A mask, (B, *event, K).

        Raises:
            ValueError: if y are numbers, or a group has no held-out rows.
        """
        check_has_classes(self.score.kind)
        p = self._predictive(x)
        scores = self.score.of_classes(p, rng.fold(self.seed, "new rows", start))
        mask = scores <= self._thresholds(x, p, groups, weights) + probability_rounding(p)
        if not empty:
            best_class = p.probabilities.argmax(-1, keepdim=True)
            is_best = torch.zeros_like(mask).scatter(-1, best_class, True)
            mask = mask | (is_best & ~mask.any(-1, keepdim=True))
        return mask

    @abstractmethod
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to one file: atomic, checksummed, without code.

        Args:
            path: the file.
        """

    @abstractmethod
    def _thresholds(
        self, x: object, p: Predictive, groups: Groups | None, weights: Tensor | None
    ) -> Tensor:
        """Return the thresholds of all classes in their order, or one: (B, *event, K or 1)."""

    def _predictive(self, x: object) -> Predictive:
        """Return the predictive of inputs, or the one that was passed."""
        if isinstance(x, Predictive):
            return x
        return self.posterior.predict(x, self.samples, seed=self.seed)

    def _write(
        self, path: str | os.PathLike[str], tensors: dict[str, Tensor], config: dict[str, Any]
    ) -> None:
        """Write posterior, score and groups with these tensors and values to a file."""
        if not isinstance(self.posterior, Posterior):
            raise ValueError(
                f"only a Posterior can be saved, got a {type(self.posterior).__name__}"
            )
        state, posterior = self.posterior.state()
        named = {f"posterior.{name}": value for name, value in state.items()}
        shared = {
            "posterior": posterior,
            "score": asdict(self.score),
            "groups": list(self.groups),
            "rows": list(self.rows),
            "samples": self.samples,
            "seed": self.seed,
        }
        write_file(path, named | tensors, config | shared)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Conformal(ConformalPredictor):
    """A posterior with thresholds that do not depend on x: exchangeable rows, or a label shift.

    Args:
        posterior: what predicts y.
        score: the nonconformity score, with the guaranteed level.
        groups: the labels of the groups; (None,) without groups.
        rows: how many held-out rows each group has.
        samples: draws of the weights in a prediction.
        seed: of these draws.
        thresholds: the ``level`` quantile of the scores for each group, or with ``by_class`` for
            each class, and each coordinate of y: (G, *event) or (K, *event).
        by_class: whether every class has a threshold of its own.
    """

    thresholds: Tensor
    by_class: bool = False

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save posterior and thresholds to one file: atomic, checksummed, without code.

        Args:
            path: the file, for ``Conformal.load``.

        Raises:
            ValueError: if the posterior is not a ``Posterior``.
        """
        config = {"kind": "conformal", "by_class": self.by_class}
        self._write(path, {"thresholds": self.thresholds}, config)

    @staticmethod
    def load(path: str | os.PathLike[str], net: nn.Module, **options: Any) -> Conformal:
        """Load a saved file.

        Args:
            path: the file.
            net: the network of its posterior.
            **options: as ``bayou.load`` takes them, for what a file cannot store.

        Raises:
            FileError: if the file is damaged or of another type.
        """
        tensors, config = read_file(path, "conformal")
        with making("conformal prediction", path):
            fields = _shared_fields(tensors, config, path, options)
            thresholds = tensors["thresholds"]
            by_class = config.get("by_class", False)
        posterior, device = _restore(fields.pop("saved"), net)
        return Conformal(
            posterior=posterior, thresholds=thresholds.to(device), by_class=by_class, **fields
        )

    def _thresholds(
        self, x: object, p: Predictive, groups: Groups | None, weights: Tensor | None
    ) -> Tensor:
        if weights is not None:
            raise ValueError(
                "weights were given, but not for the held-out rows; pass "
                "conformal(..., weights=...)"
            )
        rows = p.outputs.shape[1]
        positions = new_positions(self.groups, groups, rows)
        if self.by_class:
            return self.thresholds.movedim(0, -1).unsqueeze(0).expand(rows, *self._class_shape)
        return self.thresholds[positions.to(self.thresholds.device)].unsqueeze(-1)

    @property
    def _class_shape(self) -> tuple[int, ...]:
        """The shape (*event, K) of the thresholds of classes."""
        return (*self.thresholds.shape[1:], len(self.thresholds))


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class WeightedConformal(ConformalPredictor):
    """A posterior with weighted held-out scores: thresholds depend on the weight of the new row.

    The threshold of a row with the weight w is the ``level`` quantile of
    Σ_i p_i·δ(s_i) + p·δ(∞), p_i = w_i/(Σ_j w_j + w) and p = w/(Σ_j w_j + w), over the held-out rows
    of its group (Tibshirani et al. 2019).

    Args:
        posterior: what predicts y.
        score: the nonconformity score, with the guaranteed level.
        groups: the labels of the groups; (None,) without groups.
        rows: how many held-out rows each group has.
        samples: draws of the weights in a prediction.
        seed: of these draws.
        held_out_scores: s_i, (n, *event).
        held_out_groups: the position of the group of each held-out row, (n,).
        weights: w_i, and the function w(x) of new rows.
    """

    held_out_scores: Tensor
    held_out_groups: Tensor
    weights: RowWeights

    @property
    def effective_rows(self) -> tuple[float, ...]:
        """The effective sample size (Σ w)²/Σ w² of each group."""
        held_out_weights = self.weights.held_out.to(self.held_out_groups.device)
        return tuple(
            effective_rows(held_out_weights[self.held_out_groups == position])
            for position in range(len(self.groups))
        )

    def weights_of(self, x: Any) -> Tensor | None:
        """Return the weights of new rows for ``interval`` and ``set``, (B,).

        Args:
            x: inputs of the network, (B, ...).
        """
        return check_weights(self.weights(x), "new rows", len(x))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save posterior, scores and weights to one file: atomic, checksummed, without code.

        The function of the weights of new rows is not saved. After ``load`` their weights are
        passed to ``interval`` or ``set``, or the function to ``load``.

        Args:
            path: the file, for ``WeightedConformal.load``.

        Raises:
            ValueError: if the posterior is not a ``Posterior``.
        """
        tensors = {
            "held_out_scores": self.held_out_scores,
            "held_out_groups": self.held_out_groups,
            "held_out_weights": self.weights.held_out,
        }
        is_constant = self.weights.constant() is not None
        self._write(path, tensors, {"kind": "weighted conformal", "is_constant": is_constant})

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        net: nn.Module,
        *,
        weights: Any = None,
        **options: Any,
    ) -> WeightedConformal:
        """Load a saved file.

        Args:
            path: the file.
            net: the network of its posterior.
            weights: the function of the weights of new rows, such as a ``DensityRatio``; None if
                they are passed with the rows.
            **options: as ``bayou.load`` takes them, for what a file cannot store.

        Raises:
            FileError: if the file is damaged or of another type.
        """
        tensors, config = read_file(path, "weighted conformal")
        with making("weighted conformal prediction", path):
            fields = _shared_fields(tensors, config, path, options)
            held_out_weights = tensors["held_out_weights"]
            row_weights: RowWeights = GivenWeights(held_out_weights, weights)
            if weights is None and config["is_constant"]:
                row_weights = RecencyWeights(held_out_weights)
            scores = tensors["held_out_scores"]
            group_positions = tensors["held_out_groups"]
        posterior, device = _restore(fields.pop("saved"), net)
        return WeightedConformal(
            posterior=posterior,
            held_out_scores=scores.to(device),
            held_out_groups=group_positions.to(device),
            weights=row_weights,
            **fields,
        )

    def _thresholds(
        self, x: object, p: Predictive, groups: Groups | None, weights: Tensor | None
    ) -> Tensor:
        scores = self.held_out_scores
        rows = p.outputs.shape[1]
        new_weights = self._new_weights(x, rows, weights).to(scores.device)
        positions = new_positions(self.groups, groups, rows).to(scores.device)
        held_out_weights = self.weights.held_out.to(scores.device)
        thresholds = scores.new_empty((rows, *scores.shape[1:]))
        for position in positions.unique():
            is_new = positions == position
            is_held_out = self.held_out_groups == position
            thresholds[is_new] = weighted_quantile(
                scores[is_held_out], held_out_weights[is_held_out], new_weights[is_new], self.level
            )
        return thresholds.unsqueeze(-1)

    def _new_weights(self, x: object, rows: int, weights: Tensor | None) -> Tensor:
        """Return the weights of new rows, (B,)."""
        if weights is not None:
            return check_weights(weights, "new rows", rows)
        constant = self.weights.constant()
        if constant is not None:
            return torch.full((rows,), constant, dtype=torch.float64)
        if isinstance(x, Predictive):
            raise ValueError(
                "the weights of new rows are a function of x, but a prediction was passed; pass x, "
                "or weights=... for each row"
            )
        return check_weights(self.weights(x), "new rows", rows)


def _shared_fields(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    path: str | os.PathLike[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the fields that all predictors have, and the saved posterior."""
    return {
        "saved": SavedState(under("posterior.", tensors), config["posterior"], path, options),
        "score": Score(**config["score"]),
        "groups": tuple(config["groups"]),
        "rows": tuple(config["rows"]),
        "samples": config["samples"],
        "seed": config["seed"],
    }


def _restore(saved: SavedState, net: nn.Module) -> tuple[Posterior, torch.device]:
    """Return a saved posterior and its device."""
    posterior = restore_posterior(saved, net)
    return posterior, next(iter(posterior.template().values())).device
