"""Held-out rows of a regression: the noise of a posterior, its coverage, and its mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from bayou.inference.baseline_checks import MIN_EXCESS, Comparison
from bayou.posteriors import Posterior
from bayou.training.data import Rows
from bayou.training.loop import move

FUNCTIONS: Final = 64  # drawn for the predictive variance of a posterior
LEVEL: Final = 0.9  # of the central intervals whose coverage is measured
QUANTILE: Final = 1.6448536  # of a standard normal: ±QUANTILE has the probability LEVEL
MAX_SHORTFALL: Final = 0.05  # of the coverage below LEVEL, in addition to two standard errors
SURE: Final = 2.0  # standard errors of a significant difference
# Of the mean squared residual, below which the variance of the noise is not set.
MIN_NOISE_SHARE: Final = 1e-4
# Noise variances that are compared before the bisection between the neighbors of the best.
CANDIDATES: Final = 65
BISECTIONS: Final = 50


@final
@dataclass(frozen=True)
class Residuals:
    """Squared residuals of the mean function and variances of the functions of rows.

    There is one of each per number of y.

    Args:
        squares: squared residuals, (M, D) for M held-out rows of D numbers.
        variances: of the functions of a posterior, (M, D); 0 for a point.
    """

    squares: Tensor
    variances: Tensor

    @staticmethod
    @torch.no_grad()
    def of(posterior: Posterior, held_out: Rows, seed: int) -> Residuals:
        """Predict the held-out rows with at most ``FUNCTIONS`` draws.

        Args:
            posterior: predicts the rows.
            held_out: the rows.
            seed: of the draws.
        """
        weight = next(iter(posterior.sample(1).values()))
        count = min(FUNCTIONS, posterior.draws or FUNCTIONS)
        squares = []
        variances = []
        for batch in held_out.epoch():
            x, y = move(batch, weight)
            outputs = posterior.predict(x, count, seed=seed).outputs
            squares.append((outputs.mean(0) - y).square().flatten(1))
            variances.append(outputs.var(0, correction=0).flatten(1))
        return Residuals(torch.cat(squares).double(), torch.cat(variances).double())

    def log_density_loss(self, noise: float) -> Tensor:
        """Return −log N(residual; 0, variance + noise²), a mean over the numbers of a row, (M,).

        Args:
            noise: the standard deviation of the noise.
        """
        total = self.variances + noise**2
        losses = 0.5 * (self.squares / total + total.log() + math.log(2 * math.pi))
        return losses.mean(1)

    def by_row(self) -> tuple[Tensor, Tensor]:
        """Return squared residuals and variances, means over the numbers of a row, (M,) each."""
        return self.squares.mean(1), self.variances.mean(1)

    def coverage(self, noise: float) -> float:
        """Return the fraction of y in central intervals of probability ``LEVEL``.

        Args:
            noise: the standard deviation of the noise.
        """
        is_inside = self.squares <= QUANTILE**2 * (self.variances + noise**2)
        return float(is_inside.double().mean())

    def covers_too_little(self, noise: float) -> bool:
        """Return whether the intervals contain clearly less than they claim.

        Args:
            noise: the standard deviation of the noise.
        """
        chance = SURE * math.sqrt(LEVEL * (1 - LEVEL) / len(self.squares))
        return self.coverage(noise) < LEVEL - MAX_SHORTFALL - chance

    def likeliest_noise(self) -> float:
        """Return the noise σ that maximizes Σ log N(residual; 0, variance + σ²).

        A σ² that makes the *mean* predictive variance equal to the mean squared residual is too
        small where few rows have most of the variance, such as those of rare levels of a category:
        intervals of all others are too narrow.
        """
        return _search_noise(self.squares, self.log_density_loss, self._is_below_likeliest)

    def _is_below_likeliest(self, noise_variance: float) -> bool:
        """Return whether the log density rises with the variance of the noise."""
        total = self.variances + noise_variance
        return float(((self.squares - total) / total.square()).mean()) > 0

    def covering_noise(self) -> float:
        """Return the smallest noise whose intervals contain a fraction ``LEVEL`` of y."""
        needed = (self.squares / QUANTILE**2 - self.variances).flatten()
        least = MIN_NOISE_SHARE * float(self.squares.mean())
        return math.sqrt(max(least, float(needed.quantile(LEVEL))))


@final
@dataclass(frozen=True)
class MemberErrors:
    """Squared residuals of every point of a finite posterior, whose prediction is their mixture.

    Where the points differ by more than the noise, the mixture has gaps between them that a
    Gaussian with the same mean and variance (``Residuals``) does not have.

    Args:
        squares: (S, M, D) for S points and M held-out rows of D numbers.
    """

    squares: Tensor

    @staticmethod
    @torch.no_grad()
    def of(posterior: Posterior, held_out: Rows, seed: int) -> MemberErrors:
        """Predict the held-out rows with at most ``FUNCTIONS`` points.

        Args:
            posterior: predicts the rows.
            held_out: the rows.
            seed: of the choice of points.
        """
        weight = next(iter(posterior.sample(1).values()))
        count = min(FUNCTIONS, posterior.draws or FUNCTIONS)
        squares = []
        for batch in held_out.epoch():
            x, y = move(batch, weight)
            outputs = posterior.predict(x, count, seed=seed).outputs
            squares.append((outputs - y).square().flatten(2))
        return MemberErrors(torch.cat(squares, 1).double())

    def log_density_loss(self, noise: float) -> Tensor:
        """Return −log 1/S Σ_s N(y; f_s, noise²) for every row, (M,).

        Args:
            noise: the standard deviation of the noise.
        """
        count, _, numbers = self.squares.shape
        exponent = -0.5 * self.squares.sum(2) / noise**2
        constant = 0.5 * numbers * math.log(2 * math.pi * noise**2) + math.log(count)
        return constant - exponent.logsumexp(0)

    def likeliest_noise(self) -> float:
        """Return the noise σ that maximizes the log density of the mixture."""
        return _search_noise(self.squares, self.log_density_loss, self._is_below_likeliest)

    def _is_below_likeliest(self, noise_variance: float) -> bool:
        """Return whether the log density rises with the variance of the noise."""
        responsibility = (-0.5 * self.squares.sum(2) / noise_variance).softmax(0)
        mean_square = (responsibility * self.squares.mean(2)).sum(0).mean()
        return float(mean_square) > noise_variance


def _search_noise(
    squares: Tensor, loss: Callable[[float], Tensor], is_below: Callable[[float], bool]
) -> float:
    """Return the noise σ with the lowest mean loss; 0 for residuals that are all 0.

    Args:
        squares: the squared residuals, which bound σ².
        loss: from a noise to −log density of every row.
        is_below: whether the density rises with a variance σ².
    """
    mean_square = float(squares.mean())
    if mean_square == 0:
        return 0.0
    low = math.log(MIN_NOISE_SHARE * mean_square)
    high = math.log(float(squares.max()))
    candidates = torch.linspace(low, high, CANDIDATES, dtype=torch.float64).tolist()
    losses = [float(loss(math.sqrt(math.exp(log))).mean()) for log in candidates]
    best = losses.index(min(losses))
    low = candidates[max(best - 1, 0)]
    high = candidates[min(best + 1, CANDIDATES - 1)]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if is_below(math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 4)


def judge(posterior: Residuals, mode: Residuals) -> tuple[Comparison, bool]:
    """Compare a posterior with its mode, each with the noise that is likeliest for it.

    Args:
        posterior: residuals of the posterior on the held-out rows.
        mode: residuals of the mode on the same rows.

    Returns:
        The comparison, and whether the posterior is neither worse than its mode, beyond chance, nor
        overconfident.
    """
    noise = posterior.likeliest_noise()
    comparison = Comparison.of(
        posterior.log_density_loss(noise), mode.log_density_loss(mode.likeliest_noise())
    )
    is_acceptable = not comparison.exceeds(MIN_EXCESS) and not posterior.covers_too_little(noise)
    return comparison, is_acceptable
