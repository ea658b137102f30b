"""Ordered classes: the cumulative logit model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from bayou.core.rng import Seed
from bayou.likelihoods.base import BoundLikelihood, Likelihood
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.likelihoods.information import Independent, Information
from bayou.likelihoods.mixtures import crps_sum


@final
class BoundOrdinal(FiniteLikelihood):
    """Classes 0 .. K − 1 with P(y ≤ k | f) = sigmoid(cut_k − f), f on a last axis of length 1.

    A last axis of length K has f and the K − 1 cut points of every y.

    Args:
        cuts: the increasing cut points, (K − 1,).
        learn: whether to learn them.
    """

    is_ordered = True
    free_cuts: Tensor  # the first cut point, then the logarithms of the differences

    def __init__(self, cuts: Tensor, learn: bool = True) -> None:
        super().__init__()
        free_cuts = torch.cat((cuts[:1], cuts.diff().log()))
        if learn:
            self.free_cuts = nn.Parameter(free_cuts)
        else:
            self.register_buffer("free_cuts", free_cuts)

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return len(self.free_cuts) + 1

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        if len(f_shape) < 2 or f_shape[-1] not in (1, self.classes):
            raise ValueError(
                f"Ordinal needs one output for each y on a last axis, (B, 1), got "
                f"{tuple(f_shape)}; end the network with one unit"
            )
        return torch.Size(f_shape[:-1])

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        is_whole = not y.is_floating_point() or bool((y == y.round()).all())
        low = float(y.min())
        high = float(y.max())
        if not is_whole or low < 0 or high >= self.classes:
            raise ValueError(
                f"y must lie in 0 .. {self.classes - 1} for {self.classes} ordered classes, got "
                f"{low:g} .. {high:g}; number the classes in their order, from 0"
            )

    def _ends(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return cut_k − f and cut_{k − 1} − f of every class, (..., K), infinite at the ends."""
        score, cuts = self._score_cuts(f)
        gaps = cuts - score.unsqueeze(-1)
        return pad(gaps, (0, 1), value=math.inf), pad(gaps, (1, 0), value=-math.inf)

    def _score_cuts(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs without their last axis, and the cut points, (K − 1,) or more."""
        if f.shape[-1] > 1:
            return f[..., 0], f[..., 1:]
        return f[..., 0], _increasing(self.free_cuts)

    def log_pmf(self, f: Tensor) -> Tensor:
        """Compute log(σ(a) − σ(b)) = log σ(a) + log σ(−b) + log(1 − exp(b − a)).

        Args:
            f: outputs, (..., B, *out, 1).
        """
        high, low = self._ends(f)
        return logsigmoid(high) + logsigmoid(-low) + _log_difference(high, low)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute a lower bound, by E log σ(A) ≥ log σ(a − ½·variance) (Jensen).

        Args:
            f: the means of the outputs.
            variance: their variances.
            y: classes.
        """
        high, low = self._ends(f)
        half = variance / 2  # (..., 1)
        bound = logsigmoid(high - half) + logsigmoid(-low - half) + _log_difference(high, low)
        return self.at(bound, y)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        score, cuts = self._score_cuts(f)
        k = y.long().clamp(-1, self.classes - 1) + 1
        padded = pad(pad(cuts, (1, 0), value=-math.inf), (0, 1), value=math.inf)
        if padded.ndim == 1:
            return torch.sigmoid(padded[k] - score)
        k, score = torch.broadcast_tensors(k, score)
        index = k.unsqueeze(-1)
        cut = padded.expand(*k.shape, -1).gather(-1, index).squeeze(-1)
        return torch.sigmoid(cut - score)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Return Σ_k p_k·(∂log p_k/∂f)², ∂log p_k/∂f = σ(cut_{k − 1} − f) − σ(f − cut_k).

        Args:
            f: outputs, (B, *out, 1).
            seed: not used, since it is in closed form.
        """
        high, low = self._ends(f.detach())
        scores = low.sigmoid() - (-high).sigmoid()
        information = (self.log_pmf(f.detach()).exp() * scores.square()).sum(-1, keepdim=True)
        return Independent(information.detach().expand_as(f))

    def marginal(self, f: Tensor, variance: Tensor) -> tuple[BoundLikelihood, Tensor]:
        shrinkage = (1 + math.pi / 8 * variance).rsqrt()
        score, cuts = self._score_cuts(f)
        return self, self._paired(score * shrinkage[..., 0], cuts * shrinkage)

    def temper(self, f: Tensor, temperature: float) -> tuple[BoundLikelihood, Tensor]:
        """Return the likelihood with logits (cut − f)/T, as those of classes are sharpened.

        Args:
            f: outputs, (S, B, *out, 1).
            temperature: T.
        """
        score, cuts = self._score_cuts(f)
        if temperature >= 1:
            score = score / temperature
        else:
            score = score + (1 / temperature - 1) * score.mean(0)
        return self, self._paired(score, cuts / temperature)

    def per_sample(
        self, outputs: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[BoundLikelihood, Tensor]:
        cuts = _increasing(parameters["free_cuts"].to(outputs))
        middle_axes = [1] * (outputs.ndim - 2)
        cuts = cuts.reshape(len(cuts), *middle_axes, cuts.shape[-1])
        return self, self._paired(outputs[..., 0], cuts)

    def _paired(self, score: Tensor, cuts: Tensor) -> Tensor:
        """Return outputs with the cut points of every y on the last axis."""
        cuts = cuts.expand(*score.shape, cuts.shape[-1])
        return torch.cat((score.unsqueeze(-1), cuts), -1)

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the ranked probability score Σ_k (F(k) − 1[k ≥ y])².

        Args:
            f: outputs, (S, B, *out, 1).
            y: classes, (B, *out).
        """
        return crps_sum(self.cdf, f, y, self.classes - 1)


def _increasing(free_cuts: Tensor) -> Tensor:
    """Return cut points from the first and the logarithms of their differences."""
    return torch.cat((free_cuts[..., :1], free_cuts[..., 1:].exp()), -1).cumsum(-1)


def _log_difference(high: Tensor, low: Tensor) -> Tensor:
    """Compute log(1 − exp(low − high)), 0 at infinite ends."""
    is_finite = high.isfinite() & low.isfinite()
    gap = torch.where(is_finite, high - low, 1.0)
    return torch.where(is_finite, torch.log(-torch.expm1(-gap)), 0.0)


@final
@dataclass(frozen=True)
class Ordinal(Likelihood):
    """Ordered classes: P(y ≤ k | f) = sigmoid(cut_k − f) (McCullagh 1980).

    For one output f (B, 1) and whole numbers y (B,) from 0 to K − 1, in the order of the classes.
    All classes share one score f, so that quantiles, intervals and the ranked probability score
    mean something, and few weights are needed.

    Args:
        classes: K, 2 or more.
        cuts: the initial cut points, K − 1 increasing numbers; None (default): classes of equal
            probability at f = 0. A method by name uses the frequencies of the classes.
        learn: learn the cut points (default True).

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 50), torch.nn.ReLU(),
        ...                           torch.nn.Linear(50, 1))
        >>> noise = bayou.likelihoods.Ordinal(classes=5)
        >>> posterior = bayou.fit(net, (x, ratings), "laplace", likelihood=noise)
        >>> low, high = posterior.predict(x_new).interval(0.9)
    """

    classes: int
    cuts: tuple[float, ...] | None = None
    learn: bool = True

    def __post_init__(self) -> None:
        self._check_whole("classes", least=2)
        if self.cuts is None:
            return
        object.__setattr__(self, "cuts", tuple(map(float, self.cuts)))
        cuts = self.cuts or ()
        is_increasing = all(low < high for low, high in pairwise(cuts))
        if len(cuts) != self.classes - 1 or not is_increasing or not all(map(math.isfinite, cuts)):
            raise ValueError(
                f"Ordinal cuts must be {self.classes - 1} increasing, finite numbers for "
                f"{self.classes} classes, got {self.cuts!r:.60}"
            )

    def bind(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> BoundOrdinal:
        cuts = self.cuts
        if cuts is None:
            shares = torch.arange(1, self.classes, dtype=torch.float64) / self.classes
            cuts = tuple(torch.logit(shares).tolist())
        return BoundOrdinal(torch.tensor(cuts, dtype=dtype, device=device), self.learn)

    def starting_at(self, y: Tensor) -> Ordinal:
        """Return the likelihood with cut points at the frequencies of the classes.

        Args:
            y: classes, (N, *event).
        """
        if self.cuts is not None:
            return self
        codes = y.flatten().long().clamp(0, self.classes - 1).cpu()
        counts = torch.bincount(codes, minlength=self.classes).double() + 0.5
        shares = counts.cumsum(0)[:-1] / counts.sum()
        return replace(self, cuts=tuple(torch.logit(shares).tolist()))
