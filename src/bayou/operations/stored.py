"""Predictions of a teacher at given inputs, with which a student is trained without the teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods import BoundCategorical, Categorical
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Posterior
from bayou.training.rows import as_unlabeled_data

TEACHER_ROWS = 1024  # rows per evaluation of a teacher


@final
@dataclass(frozen=True)
class StoredPredictions:
    """Class probabilities of K fits at B inputs, which stand for the mixture of these fits.

    p(c | x) = Σ_k w_k p_k(c | x). Each fit is one function, or the mean of many draws; then
    ``square_sums`` and ``information`` hold what the mean does not tell of its draws. Three small
    tensors for each fit are all that has to be kept: ``StoredPredictions.of`` makes them, ``join``
    mixes those of several fits.

    Args:
        log_probabilities: log p_k(c | x), (K, B, C), or (B, C) of one fit, up to constants of the
            rows; float16 is enough.
        weights: w_k, (K,), which are divided by their sum; None (the default) for equal ones.
        square_sums: E_s Σ_c p_s(c | x)² over the draws s of each fit, (K, B) or (B,); None (the
            default) if each fit is one function.
        information: the mutual information of each fit in nats, of the same shape; None (the
            default) if each fit is one function.

    Raises:
        ValueError: for tensors whose shapes do not match, and for weights that are not valid.

    Example::

        parts = [StoredPredictions.of(posterior, x) for posterior in fits]
        student = bayou.distill(StoredPredictions.join(parts), net, x)
    """

    log_probabilities: Tensor
    weights: Tensor | Sequence[float] | None = None
    square_sums: Tensor | None = None
    information: Tensor | None = None

    def __post_init__(self) -> None:
        log_p = torch.as_tensor(self.log_probabilities)
        if log_p.ndim == 2:
            log_p = log_p.unsqueeze(0)
        if log_p.ndim != 3 or not log_p.is_floating_point() or 0 in log_p.shape:
            raise ValueError(
                "stored predictions are log-probabilities (fits, rows, classes), got "
                f"{tuple(log_p.shape)} {log_p.dtype}"
            )
        if bool(log_p.isnan().any()):
            raise ValueError("stored predictions have log-probabilities that are NaN")
        # Stored in few bits, they no longer sum to one.
        object.__setattr__(self, "log_probabilities", log_p.float().log_softmax(-1))
        object.__setattr__(self, "weights", self._checked_weights(len(log_p)))
        for name in ("square_sums", "information"):
            values = getattr(self, name)
            if values is not None:
                values = torch.as_tensor(values).float().reshape(-1, log_p.shape[1])
                if values.shape != log_p.shape[:2]:
                    raise ValueError(
                        f"{name} has one number for each fit and row, {tuple(log_p.shape[:2])}, "
                        f"got {tuple(values.shape)}"
                    )
                object.__setattr__(self, name, values)

    def _checked_weights(self, count: int) -> Tensor:
        """Return the weights with the sum 1."""
        if self.weights is None:
            return torch.full((count,), 1 / count)
        weights = torch.as_tensor(self.weights, dtype=torch.float64)
        total = float(weights.sum())
        is_valid = weights.shape == (count,) and bool((weights >= 0).all())
        if not is_valid or not 0 < total < math.inf:
            raise ValueError(
                f"{count} fits need {count} weights that are not negative, with a positive sum, "
                f"got {weights.tolist()}"
            )
        return (weights / total).float()

    @classmethod
    @torch.no_grad()
    def of(
        cls, posterior: Posterior, x: object, samples: int | None = None, *, seed: rng.Seed = 0
    ) -> StoredPredictions:
        """Evaluate a posterior of classes, and keep what a student needs.

        Args:
            posterior: of ``Categorical()``, with one y for each row.
            x: inputs (B, ...), or rows as ``bayou.fit`` takes them.
            samples: the number of draws; by default as many as ``predict`` takes.
            seed: of the draws.

        Raises:
            ValueError: for a posterior of anything but classes.
        """
        parts = []
        for rows, _ in as_unlabeled_data(x, TEACHER_ROWS).epoch():
            p = posterior.predict(rows, samples, seed=seed)
            likelihood = p.likelihood
            if not isinstance(likelihood, BoundCategorical) or p.probabilities.ndim != 2:
                raise ValueError(
                    "stored predictions are of one class for each row, Categorical() and y (B,), "
                    f"got {type(likelihood).__name__} with {tuple(p.mean.shape)}"
                )
            squares = likelihood.log_pmf(p.outputs).exp().square().sum(-1).mean(0)
            tiny = torch.finfo(p.outputs.dtype).tiny
            log_p = p.probabilities.clamp_min(tiny).log()
            parts.append((log_p, squares, p.mutual_information))
        log_p, squares, information = (torch.cat(column) for column in zip(*parts, strict=True))
        return cls(log_p, None, squares, information)

    @classmethod
    def join(
        cls,
        parts: Sequence[StoredPredictions],
        weights: Tensor | Sequence[float] | None = None,
    ) -> StoredPredictions:
        """Mix the predictions of several fits at the same inputs.

        Args:
            parts: the predictions of each fit.
            weights: of the fits; None (the default) for equal ones.

        Raises:
            ValueError: for no parts, or parts of other inputs.
        """
        shapes = {tuple(part.log_probabilities.shape[1:]) for part in parts}
        if len(shapes) != 1:
            raise ValueError(
                f"parts have the same rows and classes, got {sorted(shapes) or 'no parts'}"
            )
        given = torch.full((len(parts),), 1.0) if weights is None else torch.as_tensor(weights)
        joined = [float(weight) * part._weights for weight, part in zip(given, parts, strict=True)]
        return cls(
            torch.cat([part.log_probabilities for part in parts]),
            torch.cat(joined),
            torch.cat([part._square_sums for part in parts]),
            torch.cat([part._information for part in parts]),
        )

    @property
    def rows(self) -> int:
        """The number of inputs, B."""
        return self.log_probabilities.shape[1]

    @property
    def _weights(self) -> Tensor:
        """The weights as a tensor of the device of the predictions, (K,)."""
        return torch.as_tensor(self.weights).to(self.log_probabilities)

    @property
    def _square_sums(self) -> Tensor:
        """E_s Σ_c p_s(c)² of every fit, (K, B)."""
        if self.square_sums is None:
            return self.log_probabilities.exp().square().sum(-1)
        return self.square_sums.to(self.log_probabilities)

    @property
    def _information(self) -> Tensor:
        """The mutual information of every fit, (K, B)."""
        if self.information is None:
            return torch.zeros_like(self.log_probabilities[..., 0])
        return self.information.to(self.log_probabilities)

    @property
    def probabilities(self) -> Tensor:
        """P(c | x) of the mixture, (B, C)."""
        return torch.einsum("k,kbc->bc", self._weights, self.log_probabilities.exp())

    @property
    def square_sum(self) -> Tensor:
        """E Σ_c p(c | x)² over the draws of all fits, (B,)."""
        return torch.einsum("k,kb->b", self._weights, self._square_sums)

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of the mixture in nats, (B,): Σ_k w_k (KL(p_k ‖ p) + I_k)."""
        log_p = self.log_probabilities
        tiny = torch.finfo(log_p.dtype).tiny
        log_mean = self.probabilities.clamp_min(tiny).log()
        divergence = (log_p.exp() * (log_p.clamp_min(math.log(tiny)) - log_mean)).sum(-1)
        return torch.einsum("k,kb->b", self._weights, divergence + self._information).clamp_min(0)

    @property
    def is_one_function(self) -> bool:
        """Whether there is one fit without draws, which has no epistemic uncertainty."""
        return len(self.log_probabilities) == 1 and self.square_sums is None

    def predictive(self) -> Predictive:
        """Return the mean prediction as a predictive of one function, (1, B, C)."""
        return class_predictive(self.probabilities)


def class_predictive(probabilities: Tensor) -> Predictive:
    """Return class probabilities as a predictive of one function.

    Args:
        probabilities: (B, *event, C), up to constants of the rows.
    """
    tiny = torch.finfo(probabilities.dtype).tiny
    log_p = probabilities.clamp_min(tiny).log()
    return Predictive(Categorical().bind(), log_p.unsqueeze(0))
