"""Maps of classes that are linear in logits or in log-probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from bayou.calibration.maps import CalibrationMap, check_classes, class_log_pmf, labeled_log_pmf
from bayou.calibration.minimize import minimize
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.predictive import Predictive

# Standard deviations of normal priors of the parameters, by which a map is pulled to a temperature.
OFF_DIAGONAL_STD = 0.1
DIAGONAL_STD = 0.3  # of the differences of factors from their mean
BIAS_STD = 1.0
START_LOG_TEMPERATURES = tuple(0.5 * k for k in range(-4, 7))


def spectral_norm(weight: Tensor) -> Tensor:
    """Return the largest singular value of W.

    Args:
        weight: W, (C, C), or its diagonal (C,).
    """
    if weight.ndim == 1:
        return weight.abs().amax()
    norm: Tensor = torch.linalg.matrix_norm(weight, ord=2)
    return norm


def map_features(
    features: Tensor, weight: Tensor, bias: Tensor, shrinkage: Tensor | float
) -> Tensor:
    """Compute log softmax(W·z̄ + W·(z_s − z̄)/max(1, ‖W‖) + b) for every sample.

    z̄ is the mean over the samples. Their deviations from it are never enlarged: a map that sharpens
    the mixture must not sharpen the disagreement. For W = 1/T it is the rule of a temperature
    (``BoundLikelihood.temper``).

    Args:
        features: z, (S, ..., C).
        weight: W, (C, C), or its diagonal (C,).
        bias: b, (C,).
        shrinkage: max(1, ‖W‖).
    """
    center = features.mean(0)
    deviation = features - center
    if weight.ndim == 1:
        mapped_center = center * weight
        mapped_deviation = deviation * weight
    else:
        mapped_center = center @ weight.mT
        mapped_deviation = deviation @ weight.mT
    logits = mapped_center + mapped_deviation / shrinkage + bias
    return logits.log_softmax(-1)


def mapped_nll(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the mean NLL of N rows after a map of their features.

    Args:
        features: z, (S, N, C).
        labels: classes, (N,).
        weight: W, (C, C), or its diagonal (C,).
        bias: b, (C,).
    """
    shrinkage = spectral_norm(weight).clamp_min(1.0)
    return mixture_nll(map_features(features, weight, bias, shrinkage), labels)


def mixture_nll(log_pmf: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean of −log 1/S Σ_s p_s(y_n) over N rows.

    Args:
        log_pmf: log-probabilities, (S, N, C).
        labels: classes, (N,).
    """
    index = labels.expand(len(log_pmf), -1).unsqueeze(-1)
    terms = log_pmf.gather(-1, index).squeeze(-1)
    return math.log(len(log_pmf)) - terms.logsumexp(0).mean()


def center_logits(log_pmf: Tensor) -> Tensor:
    """Return logits whose mean over the classes is 0.

    Args:
        log_pmf: log-probabilities, (..., C).
    """
    return log_pmf - log_pmf.mean(-1, keepdim=True)


def _diagonal_penalty(diagonal: Tensor) -> Tensor:
    """Return −log prior of the factors, whose mean is free."""
    return (diagonal - diagonal.mean()).square().sum() / (2 * DIAGONAL_STD**2)


def _bias_penalty(bias: Tensor) -> Tensor:
    """Return −log prior of the shifts."""
    return bias.square().sum() / (2 * BIAS_STD**2)


def _start_factor(features: Tensor, labels: Tensor) -> float:
    """Return the factor of all logits, of a few, with the lowest NLL."""
    zero = features.new_zeros(features.shape[-1])

    def nll(log_temperature: float) -> float:
        weight = torch.full_like(zero, math.exp(-log_temperature))
        return float(mapped_nll(features, labels, weight, zero))

    return math.exp(-min(START_LOG_TEMPERATURES, key=nll))


def _check_not_separated(features: Tensor, labels: Tensor) -> None:
    """Raise a ValueError if the largest logit of every row, or the smallest, is that of its class.

    The mean of the factors is not penalized: the likelihood of such rows increases with it forever.
    """
    center = features.mean(0)
    others = torch.nn.functional.one_hot(labels, center.shape[-1]).bool()
    own = center.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    is_largest = own > center.masked_fill(others, -math.inf).amax(-1)
    is_smallest = own < center.masked_fill(others, math.inf).amin(-1)
    if bool(is_largest.all()) or bool(is_smallest.all()):
        rows = "right" if bool(is_largest.all()) else "wrong"
        raise ValueError(
            f"all {len(labels):,} held-out rows are predicted {rows}, for which the best map is "
            "infinitely sure; hold out more rows, or use map='isotonic' or 'spline', which cannot "
            "be"
        )


def _fit_diagonal(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and the shifts of a vector map."""
    _check_not_separated(features, labels)
    classes = features.shape[-1]
    start = features.new_zeros(2 * classes)
    start[:classes] = _start_factor(features, labels)

    def objective(parameters: Tensor) -> Tensor:
        weight, bias = parameters.split(classes)
        penalty = _diagonal_penalty(weight) + _bias_penalty(bias)
        return mapped_nll(features, labels, weight, bias) + penalty / len(labels)

    weight, bias = minimize(objective, start).split(classes)
    return weight, bias


def _fit_matrix(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix and the shifts of a map, regularized off the diagonal and in the shift."""
    classes = features.shape[-1]
    diagonal, shift = _fit_diagonal(features, labels)
    start = torch.cat((torch.diag(diagonal).flatten(), shift))

    def objective(parameters: Tensor) -> Tensor:
        weight = parameters[: classes**2].reshape(classes, classes)
        bias = parameters[classes**2 :]
        off_diagonal = weight - torch.diag(weight.diagonal())
        penalty = off_diagonal.square().sum() / (2 * OFF_DIAGONAL_STD**2)
        penalty = penalty + _diagonal_penalty(weight.diagonal()) + _bias_penalty(bias)
        return mapped_nll(features, labels, weight, bias) + penalty / len(labels)

    parameters = minimize(objective, start)
    return parameters[: classes**2].reshape(classes, classes), parameters[classes**2 :]


@dataclass(frozen=True, eq=False, repr=False)
class LinearMap(CalibrationMap):
    """The base class of softmax(W·h + b) of features h of the class probabilities.

    Args:
        weight: W, (C, C), or its diagonal (C,).
        bias: b, (C,).

    Attributes:
        axes: how many axes W has.
        shrinkage: max(1, ‖W‖), by which the differences of draws are divided.
    """

    weight: Tensor
    bias: Tensor
    shrinkage: float = field(init=False)
    support = "classes"
    axes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        weight = self.weight
        bias = self.bias
        name = type(self).__name__
        classes = len(bias) if bias.ndim == 1 else 0
        if weight.shape != (classes,) * self.axes or classes < 2:
            raise ValueError(
                f"{name} needs a weight of {self.axes} axes of C classes and a bias (C,), got "
                f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            )
        if not bool(weight.isfinite().all() & bias.isfinite().all()):
            raise ValueError(f"{name} needs finite numbers, got NaN or infinity")
        shrinkage = max(1.0, float(spectral_norm(weight)))
        object.__setattr__(self, "shrinkage", shrinkage)  # a number, so that a program can have it

    @staticmethod
    def features(log_pmf: Tensor) -> Tensor:
        """Return h, here the centered logits z − mean_c z_c.

        Args:
            log_pmf: log-probabilities of the classes, (..., C).
        """
        return center_logits(log_pmf)

    def apply(self, likelihood: BoundLikelihood, outputs: Tensor) -> tuple[BoundLikelihood, Tensor]:
        finite, log_pmf = class_log_pmf(likelihood, outputs)
        check_classes(len(self.bias), log_pmf, self.name)
        weight = self.weight.to(outputs)
        bias = self.bias.to(outputs)
        mapped = map_features(self.features(log_pmf), weight, bias, self.shrinkage)
        return finite, finite.outputs_of(mapped)


@final
@dataclass(frozen=True, eq=False, repr=False)
class VectorMap(LinearMap):
    """softmax(w ∘ z + b) of the logits z: a factor and a shift for each class (Guo 2017).

    Logits are centered, z − mean_c z_c. The fit is penalized by normal priors: differences of the
    factors from their mean have a standard deviation of 0.3, shifts one of 1. Without them the map
    is a temperature; w = 1 and b = 0 change nothing.

    Args:
        weight: w, (C,).
        bias: b, (C,).

    Raises:
        ValueError: for tensors of other shapes.
    """

    name = "vector"
    key = "vector"
    axes = 1

    @classmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        log_pmf, labels = labeled_log_pmf(p, y)
        return cls(*_fit_diagonal(center_logits(log_pmf), labels))


@final
@dataclass(frozen=True, eq=False, repr=False)
class MatrixMap(LinearMap):
    """softmax(W·z + b) of the logits z (Guo 2017), regularized off the diagonal (ODIR).

    Logits are centered, z − mean_c z_c. Normal priors penalize the entries off the diagonal
    (standard deviation 0.1), differences of the diagonal from its mean (0.3) and shifts (1) (Kull
    et al. 2019). A diagonal W is a vector map.

    Args:
        weight: W, (C, C).
        bias: b, (C,).

    Raises:
        ValueError: for tensors of other shapes.
    """

    name = "matrix"
    key = "matrix"

    @classmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        log_pmf, labels = labeled_log_pmf(p, y)
        return cls(*_fit_matrix(center_logits(log_pmf), labels))


@final
@dataclass(frozen=True, eq=False, repr=False)
class DirichletMap(LinearMap):
    """softmax(W·log p + b) of the probabilities p (Kull et al. 2019).

    It is the posterior of the class if p has a Dirichlet distribution within each class. The fit is
    regularized as that of a matrix map. W = 1 and b = 0 change nothing.

    Args:
        weight: W, (C, C).
        bias: b, (C,).

    Raises:
        ValueError: for tensors of other shapes.
    """

    name = "dirichlet"
    key = "dirichlet"

    @staticmethod
    def features(log_pmf: Tensor) -> Tensor:
        """Return h, here the log-probabilities.

        Args:
            log_pmf: log-probabilities of the classes, (..., C).
        """
        return log_pmf

    @classmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        return cls(*_fit_matrix(*labeled_log_pmf(p, y)))
