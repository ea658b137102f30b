"""Gaussian factors of a guide, whose natural gradients need the gradient of the loss alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class GaussianFactor:
    """A Gaussian N(mean, diag(std²)) in a guide, such as q(z₀) of its gains.

    The KL of the guide has −weight·Σ log std, and other terms in mean and std. At a maximum of the
    ELBO 1/std² = N·k/(weight·β), where std²·k is the gradient of the loss −ELBO/N in log std
    without that term, for any family: k is the expected curvature of the loss if the noise is
    Gaussian.

    Args:
        mean: its mean.
        log_std: log std, of the shape of the mean.
        weight: of the entropy in the KL, 1 by default; 1/K for one of K members.
    """

    mean: nn.Parameter
    log_std: nn.Parameter
    weight: float = 1.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return mean and log std."""
        return [self.mean, self.log_std]
