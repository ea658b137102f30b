"""Maps of classes that change each probability by an increasing function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayou.calibration.maps import CalibrationMap, check_classes, class_log_pmf, labeled_log_pmf
from bayou.calibration.minimize import minimize
from bayou.calibration.pooling import isotonic_regression
from bayou.flows.layers.elementwise import Spline
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.piecewise import interpolate
from bayou.likelihoods.predictive import Predictive

SPLINE = Spline(bins=4, bound=6.0)  # of log-odds
SPLINE_STD = 1.0  # of the normal prior of its parameters
MARGIN = 1e-6  # share of a probability that the deviations of samples leave


def log_mean(log_pmf: Tensor) -> Tensor:
    """Compute log 1/S Σ_s p_s: (..., C).

    Args:
        log_pmf: log-probabilities of S samples, (S, ..., C).
    """
    return log_pmf.logsumexp(0) - math.log(len(log_pmf))


def replace_mean(log_pmf: Tensor, log_target: Tensor) -> Tensor:
    """Return log-probabilities of samples whose mean is another distribution.

    p'_s = q + λ·(p_s − p̄), with p̄ the mean of p_s and λ ≤ 1 the largest factor of a row for which
    all p'_s are positive: the mean is q exactly, and the samples keep their deviations from it.

    Args:
        log_pmf: log p_s, (S, ..., C).
        log_target: log q, (..., C).
    """
    target = log_target.exp()
    p = log_pmf.exp()
    deviation = p - p.mean(0)
    tiny = torch.finfo(p.dtype).tiny
    ratio = torch.where(deviation < 0, target / (-deviation).clamp_min(tiny), 1.0)
    factor = ratio.amin(0).amin(-1, keepdim=True).clamp_max(1.0) * (1 - MARGIN)
    mixed = (target + factor * deviation).clamp_min(tiny).log()
    return mixed if len(p) > 1 else log_target.unsqueeze(0)


def log_odds(log_p: Tensor) -> Tensor:
    """Compute log p − log(1 − p).

    Args:
        log_p: log-probabilities.
    """
    eps = torch.finfo(log_p.dtype).eps
    return log_p - (-torch.expm1(log_p.clamp_max(-eps))).log()


@final
@dataclass(frozen=True, eq=False, repr=False)
class IsotonicMap(CalibrationMap):
    """q_c ∝ g_c(p_c) with increasing g_c, by isotonic regression of 1[y = c] on p_c.

    One class against the others, then normalized (Zadrozny & Elkan 2002). p is the mean of the
    samples, which keep their deviations from it (``replace_mean``). g_c is piecewise linear and
    lies in [1/(n + 1), n/(n + 1)], since n rows cannot tell a probability from 0.

    Args:
        knots: of all g_c, one after the other, (Σ K_c,).
        values: g_c at the knots, (Σ K_c,).
        counts: K_c, (C,), whole numbers.

    Raises:
        ValueError: for tensors that do not fit together.
    """

    knots: Tensor
    values: Tensor
    counts: Tensor
    name = "isotonic"
    key = "isotonic"
    support = "classes"

    def __post_init__(self) -> None:
        count = int(self.counts.sum())
        if self.knots.shape != (count,) or self.values.shape != (count,) or len(self.counts) < 2:
            raise ValueError(
                f"IsotonicMap needs {count} knots and values of 2 classes or more, got "
                f"{tuple(self.knots.shape)} and {tuple(self.values.shape)}"
            )
        if not bool((self.values > 0).all() & (self.values < 1).all()):
            raise ValueError("IsotonicMap needs values between 0 and 1")

    def apply(self, likelihood: BoundLikelihood, outputs: Tensor) -> tuple[BoundLikelihood, Tensor]:
        finite, log_pmf = class_log_pmf(likelihood, outputs)
        check_classes(len(self.counts), log_pmf, self.name)
        p = log_mean(log_pmf).exp()
        sizes = self.counts.tolist()
        curves = zip(self.knots.split(sizes), self.values.split(sizes), strict=True)
        columns = [interpolate(p[..., c], *curve) for c, curve in enumerate(curves)]
        q = torch.stack(columns, -1)
        log_target = (q / q.sum(-1, keepdim=True)).log()
        return finite, finite.outputs_of(replace_mean(log_pmf, log_target))

    @classmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        log_pmf, labels = labeled_log_pmf(p, y)
        probabilities = log_mean(log_pmf).exp().cpu()
        rows = len(labels)
        curves = []
        for c in range(probabilities.shape[-1]):
            is_class = (labels == c).double().cpu()
            knots, values = isotonic_regression(probabilities[:, c], is_class)
            curves.append((knots, values.clamp(1 / (rows + 1), rows / (rows + 1))))
        counts = torch.tensor([len(knots) for knots, _ in curves])
        all_knots = torch.cat([knots for knots, _ in curves])
        return cls(all_knots, torch.cat([values for _, values in curves]), counts)


@final
@dataclass(frozen=True, eq=False, repr=False)
class SplineMap(CalibrationMap):
    """q_c ∝ sigmoid(h(log-odds of p_c)) with one increasing spline h of all classes.

    h(z) = spline(a·z + b), a monotone rational-quadratic spline with 4 bins on [−6, 6] that is the
    identity outside (Durkan et al. 2019), in place of the cubic spline of Gupta et al. (2021). p is
    the mean of the samples, which keep their deviations from it (``replace_mean``). The fit is
    penalized by standard normal priors. For a = 1, b = 0 and parameters 0 the map changes nothing.

    Args:
        affine: log a and b, (2,).
        parameters: of the spline, (11,).

    Raises:
        ValueError: for tensors of other shapes.
    """

    affine: Tensor
    parameters: Tensor
    name = "spline"
    key = "spline"
    support = "classes"

    def __post_init__(self) -> None:
        if self.affine.shape != (2,) or self.parameters.shape != (SPLINE.params,):
            raise ValueError(
                f"SplineMap needs tensors (2,) and ({SPLINE.params},), got "
                f"{tuple(self.affine.shape)} and {tuple(self.parameters.shape)}"
            )

    def apply(self, likelihood: BoundLikelihood, outputs: Tensor) -> tuple[BoundLikelihood, Tensor]:
        finite, log_pmf = class_log_pmf(likelihood, outputs)
        log_p = log_mean(log_pmf)
        log_target = _bend(log_p, self.affine.to(log_p), self.parameters.to(log_p))
        return finite, finite.outputs_of(replace_mean(log_pmf, log_target))

    @classmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        log_pmf, labels = labeled_log_pmf(p, y)
        log_p = log_mean(log_pmf)

        def objective(parameters: Tensor) -> Tensor:
            bent = _bend(log_p, parameters[:2], parameters[2:])
            penalty = parameters.square().sum() / (2 * SPLINE_STD**2)
            log_likelihood = bent.gather(-1, labels.unsqueeze(-1)).mean()
            return penalty / len(labels) - log_likelihood

        parameters = minimize(objective, log_p.new_zeros(2 + SPLINE.params))
        return cls(parameters[:2], parameters[2:])


def _bend(log_p: Tensor, affine: Tensor, parameters: Tensor) -> Tensor:
    """Return normalized log-probabilities after the spline of their log-odds."""
    z = affine[0].exp() * log_odds(log_p) + affine[1]
    bent, _ = SPLINE.forward(z, parameters.expand(*z.shape, -1))
    return logsigmoid(bent).log_softmax(-1)
