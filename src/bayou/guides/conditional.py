"""Guides that are Gaussian given their gains, as natural gradients need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayou.guides.gain import GainFlow
from bayou.guides.guide import Gain
from bayou.priors import BoundNormal, BoundPart, BoundPrior
from bayou.priors.base import squares


def rows(weight: Tensor, axis: int) -> Tensor:
    """Return the weight as a matrix (D, J) whose rows run along ``axis``.

    Args:
        weight: the weight.
        axis: an axis of size D.
    """
    return weight.movedim(axis, 0).reshape(weight.shape[axis], -1)


def gain_kl(prior: BoundNormal, mean: Tensor, std: Tensor, z: Tensor, axis: int) -> Tensor:
    """Compute KL(Π N(z_i·M_ij, σ_ij²) ‖ Normal prior) for gains z: (n,).

    With the precision λ and the mean μ of the prior it is a quadratic in z with coefficients
    Σ_j λM² and Σ_j λMμ: O(|W| + n·D), without a tensor (n, *shape).

    Args:
        prior: the prior.
        mean: M, (*shape).
        std: σ, (*shape).
        z: gains, (n, D).
        axis: the axis of the gains.
    """
    inv_scale = (-prior.log_scale).exp()
    kl_at_zero = prior.kl(std.new_zeros(()), std)
    if inv_scale.numel() == prior.mean.numel() == 1:  # one λ and one μ multiply the sums
        precision = inv_scale.square().reshape(())
        prior_mean = prior.mean.reshape(())
        quadratic = precision * rows(squares(mean), axis).sum(1)
        linear = precision * prior_mean * rows(mean, axis).sum(1)
    else:
        scaled = mean * inv_scale
        quadratic = rows(squares(scaled), axis).sum(1)
        linear = rows(scaled * (prior.mean * inv_scale), axis).sum(1)
    return kl_at_zero + 0.5 * z.square() @ quadratic - z @ linear


@dataclass(frozen=True, eq=False)
class ConditionalGaussian:
    """q(W|z) = Π N(z_i·M_ij, σ_ij²) of a guide over one tensor, with its parameters.

    Without gains z is 1.

    Args:
        name: the tensor.
        center: M.
        log_std: log σ.
        prior: p(W).
        gain: q(z); None (the default) for no gains.
        axis: the axis of M along which the gains run; 0 by default.
        moments_of_gains: parameters of r(z|W) whose best values are E[z] and log std(z), (D,)
            each; None by default.
    """

    name: str
    center: nn.Parameter
    log_std: nn.Parameter
    prior: BoundPrior
    gain: GainFlow | None = None
    axis: int = 0
    moments_of_gains: tuple[nn.Parameter, nn.Parameter] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of q(W|z), and those of r(z|W) that are moments of z."""
        return [self.center, self.log_std, *(self.moments_of_gains or ())]

    @property
    def normal_prior(self) -> BoundNormal:
        """Return the prior, which must be Normal.

        Raises:
            ValueError: for another prior, or one that is joint with other tensors.
        """
        if not isinstance(self.prior, BoundNormal) or isinstance(self.prior, BoundPart):
            raise ValueError(
                f"IVON needs Normal priors, but that of {self.name!r} is not; use VI instead"
            )
        return self.prior

    def gain_kl(self, z: Tensor) -> Tensor:
        """Compute KL(q(W|z) ‖ p) with a gradient in z alone: (n,).

        The gradients in M and log σ are left to the optimizer, which has them in closed form.

        Args:
            z: gains, (n, D).
        """
        std = self.log_std.detach().exp()
        return gain_kl(self.normal_prior, self.center.detach(), std, z, self.axis)

    def expand(self, value: Tensor) -> Tensor:
        """Return a value of every gain in the shape of the tensor.

        Args:
            value: (D,).
        """
        return Gain(self.axis, value).on(self.center)[0].expand_as(self.center)


class GainMoments(nn.Module):
    """Running means of v and v² over steps, for z = c + s·v, in buffers of every checkpoint.

    c and s are the mean and the standard deviation of a Gaussian q(z0) (``GainFlow.frame``), which
    can change by far in a step; the distribution of v changes slowly.

    Args:
        gain: q(z), of which seeded draws give the initial values.
        decay: the weight of the past in an update, 0.99 by default.
        draws: the number of these draws, 1,024 by default.
    """

    v_mean: Tensor
    v_square: Tensor

    def __init__(self, gain: GainFlow, decay: float = 0.99, draws: int = 1024) -> None:
        super().__init__()
        self.decay = decay
        self.frame: Callable[[], tuple[Tensor | float, Tensor | float]] = gain.frame
        with torch.no_grad():
            z, _ = gain.draw(draws, 0)
            v_mean, v_square = self.observation(z)
        if gain.transform is None and gain.factors:  # known, and then constant
            v_mean.zero_()
            v_square.fill_(1.0)
        self.register_buffer("v_mean", v_mean)
        self.register_buffer("v_square", v_square)

    @property
    def mean(self) -> Tensor:
        """Return E[z], (D,)."""
        center, std = self.frame()
        return center + std * self.v_mean

    @property
    def variance(self) -> Tensor:
        """Return Var[z], (D,)."""
        _, std = self.frame()
        return (self.v_square - self.v_mean.square()).clamp_min(0.0) * std**2

    @property
    def square(self) -> Tensor:
        """Return E[z²], (D,)."""
        return self.mean.square() + self.variance

    @torch.no_grad()
    def observation(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of v and v² over draws, (D,) each.

        Args:
            z: draws of the gains, (n, D).
        """
        center, std = self.frame()
        v = (z - center) / std
        return v.mean(0), v.square().mean(0)

    @torch.no_grad()
    def observe(self, mean: Tensor, square: Tensor) -> None:
        """Update with the means of a step.

        Args:
            mean: of v over its draws, (D,).
            square: of v², (D,).
        """
        self.v_mean.lerp_(mean, 1 - self.decay)
        self.v_square.lerp_(square, 1 - self.decay)
