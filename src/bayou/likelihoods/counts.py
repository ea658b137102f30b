"""Overdispersed counts: the negative binomial distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from bayou.core.rng import Seed
from bayou.likelihoods.discrete import check_counts, count_crps, count_entropy
from bayou.likelihoods.information import Independent, Information
from bayou.likelihoods.positive import Shaped, ShapedSpec
from bayou.likelihoods.special import betainc, log_beta_density


@final
class BoundNegativeBinomial(Shaped):
    """Counts with mean unit·exp(f) and variance mean + mean²/shape."""

    support: ClassVar[Literal["classes", "counts", "real"]] = "counts"

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None:
        check_counts(y)

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        log_mean, log_shape = self.log_location_shape(f)
        y = y.to(f.dtype)
        shape = log_shape.exp()
        logit = log_mean - log_shape  # of a further event before a stop
        log_rest = logsigmoid(logit)
        # Γ(y + shape)/(Γ(shape)·y!) = 1/(B(shape, y + 1)·(y + shape))
        density = log_beta_density(shape, y + 1, logsigmoid(-logit), log_rest)
        return density - log_rest - torch.log(y + shape)

    def expected_log_prob(self, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Compute a lower bound, by E log(1 + exp F) ≤ log(1 + E exp F) (Jensen).

        Args:
            f: the means of the outputs.
            variance: their variances.
            y: targets.
        """
        log_mean, log_shape = self.log_location_shape(f)
        logit = log_mean - log_shape
        raised = softplus(logit + variance / 2) - softplus(logit)
        return self.pointwise(f, y) - (y.to(f.dtype) + log_shape.exp()) * raised

    def mean(self, f: Tensor) -> Tensor:
        return self.log_location_shape(f)[0].exp()

    def variance(self, f: Tensor) -> Tensor:
        log_mean, log_shape = self.log_location_shape(f)
        return log_mean.exp() + torch.exp(2 * log_mean - log_shape)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute P(Y ≤ y) = I_p(shape, ⌊y⌋ + 1), p = shape/(shape + mean).

        Args:
            f: outputs, (..., B, *out).
            y: values, (B, *out).
        """
        shape, logit, count = self._double(f, y)
        value = betainc(
            shape, count.clamp_min(0.0) + 1, torch.sigmoid(-logit), torch.sigmoid(logit)
        )
        return torch.where(count < 0, 0.0, value).to(f.dtype)

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        shape, logit, count = self._double(f, y)
        value = betainc(
            count.clamp_min(0.0) + 1, shape, torch.sigmoid(logit), torch.sigmoid(-logit)
        )
        return torch.where(count < 0, 0.0, value.log()).to(f.dtype)

    def _double(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shape, the logit of a further event and the count in float64.

        The continued fraction of large shapes and counts cancels.
        """
        log_mean, log_shape = self.log_location_shape(f)
        log_shape = log_shape.double()
        return log_shape.exp(), log_mean.double() - log_shape, y.double().floor()

    def entropy(self, f: Tensor) -> Tensor:
        return count_entropy(self, f.unsqueeze(0))

    def mixture_entropy(self, f: Tensor) -> Tensor:
        return count_entropy(self, f)

    def mixture_crps(self, f: Tensor, y: Tensor) -> Tensor | None:
        return count_crps(self, f, y)

    def information(self, f: Tensor, seed: Seed = 0) -> Information:
        """Return mean·shape/(shape + mean), for every output.

        Args:
            f: outputs, (B, *out).
            seed: not used, since it is in closed form.
        """
        log_mean, log_shape = self.log_location_shape(f)
        return Independent(log_mean.exp() * torch.sigmoid(log_shape.detach() - log_mean))


@final
@dataclass(frozen=True)
class NegativeBinomial(ShapedSpec):
    """Counts that vary more than those of a Poisson: Var[y] = mean + dispersion·mean².

    p(y | f) = Γ(y + r)/(Γ(r)·y!)·(r/(r + mean))^r·(mean/(r + mean))^y with r = 1/dispersion and
    mean = unit·exp(f), for f and y = 0, 1, 2, ... (B, *out). A dispersion near 0 is a Poisson.

    Args:
        dispersion: the dispersion (default 1).
        learn: learn the dispersion (default False).
        unit: the mean of y at f = 0 (default 1). A method by name uses the mean of y.

    Example:
        >>> noise = bayou.likelihoods.NegativeBinomial(learn=True)
        >>> posterior = bayou.fit(net, (x, counts), "map", likelihood=noise)
    """

    dispersion: float = 1.0
    learn: bool = False
    unit: float = 1.0
    bound_class: ClassVar[type[Shaped]] = BoundNegativeBinomial

    def __post_init__(self) -> None:
        self._check_positive("dispersion", "unit")

    @property
    def parameter(self) -> str:
        return "dispersion"

    def _shape(self) -> float:
        return 1 / self.dispersion

    def _setting(self, shape: float) -> float:
        return 1 / shape
