"""The negative ELBO whose Gaussian KL is left to an optimizer with natural gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bayou.core.modules import Modules
from bayou.guides.conditional import ConditionalGaussian, GainMoments
from bayou.guides.factors import GaussianFactor
from bayou.methods.evidence_bound import EvidenceBound
from bayou.network.target import Target
from bayou.posteriors.guided import Bayesian
from bayou.posteriors.network_draw import NetworkDraw

if TYPE_CHECKING:
    from bayou.methods.ivon import IVON

GAIN_MOMENTS = "gain moments"  # of a step, for the running means


class NaturalBound(EvidenceBound):
    """The objective of ``IVON``: −ELBO/N, without the gradient of the KL in centers and log σ.

    A guide with gains has KL(q(W|z) ‖ p) + log q(z) − log r(z|W) in the loss. The gradient of the
    first term in M and log σ is that of a Gaussian KL, which the optimizer has in closed form with
    E[z] and E[z²]; its gradient in z, and all gradients of the other terms, are in the loss.

    Args:
        method: has the number of draws, β and the optimizer.
        target: the likelihood, prior and number of rows N.
        bayesian: the network with its guides.
        cold: the factor of the KL, N/D or 1.

    Attributes:
        gaussians: q(W|z) of every guide; None for points.
        factors: other Gaussians of the guides, such as q(z₀).
        moments: of the gains of every guide that has any.
    """

    def __init__(self, method: IVON, target: Target, bayesian: Bayesian, cold: float) -> None:
        super().__init__(method, target, bayesian, cold)
        self.gaussians: list[ConditionalGaussian | None] = [
            guide.conditional_gaussian() for guide in bayesian.guides
        ]
        self.factors: list[GaussianFactor] = [
            factor for guide in bayesian.guides for factor in guide.gaussian_factors()
        ]
        moments = [
            GainMoments(gaussian.gain)
            for gaussian in self.gaussians
            if gaussian is not None and gaussian.gain is not None
        ]
        self.moments: Modules[GainMoments] = nn.ModuleList(moments)  # type: ignore[assignment]

    @property
    def moments_of_tensors(self) -> dict[ConditionalGaussian, GainMoments]:
        """Return the Gaussians with natural gradients that have gains, with their moments."""
        with_gains = [g for g in self.gaussians if g is not None and g.gain is not None]
        return dict(zip(with_gains, self.moments, strict=True))

    def differentiable_kl(self, draw: NetworkDraw, kl: Tensor) -> Tensor:
        """Return the KL of points and gains, without its gradients in centers and log σ.

        Args:
            draw: the draws of a step.
            kl: their KL, a scalar.
        """
        total = torch.zeros_like(kl)
        for gaussian, part in zip(self.gaussians, draw.draws, strict=True):
            if gaussian is None:
                total = total + part.kl.mean()
            elif part.gains is not None:
                total = total + (gaussian.gain_kl(part.gains.z) + part.gains.kl).mean()
        return total

    @torch.no_grad()
    def observations(self, draw: NetworkDraw) -> dict[str, Tensor]:
        """Return what the running means of the gains observe in a step, as one vector.

        Args:
            draw: the draws of the step.
        """
        gains = [part.gains.z for part in draw.draws if part.gains is not None]
        if not gains:
            return {}
        pairs = zip(self.moments, gains, strict=True)
        return {
            GAIN_MOMENTS: torch.cat([v for moments, z in pairs for v in moments.observation(z)])
        }

    def after_step(self, numbers: dict[str, Tensor]) -> None:
        """Update the running means of the gains and of the reward."""
        super().after_step(numbers)
        means = numbers.pop(GAIN_MOMENTS, None)
        if means is None:
            return
        sizes = [len(moments.v_mean) for moments in self.moments for _ in range(2)]
        pieces = means.split(sizes)
        for index, moments in enumerate(self.moments):
            moments.observe(pieces[2 * index], pieces[2 * index + 1])

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        """Return what is monitored: without random gains, the log-likelihood alone."""
        return super().objective(numbers) if self.factors else numbers["log_likelihood"]
