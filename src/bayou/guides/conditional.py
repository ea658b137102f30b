"""Guides that are Gaussian given their gains, as natural gradients need them."""

from __future__ import annotations

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
        locations: parameters of q(z) and r(z|W) in units of z, (..., D); () by default.
    """

    name: str
    center: nn.Parameter
    log_std: nn.Parameter
    prior: BoundPrior
    gain: GainFlow | None = None
    axis: int = 0
    locations: tuple[nn.Parameter, ...] = ()

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
    """Running means of z and z² over steps, in buffers, which are part of every checkpoint.

    Args:
        gain: q(z), of which seeded draws give the initial values.
        decay: the weight of the past in an update, 0.99 by default.
        draws: the number of these draws, 1,024 by default.
    """

    mean: Tensor
    square: Tensor

    def __init__(self, gain: GainFlow, decay: float = 0.99, draws: int = 1024) -> None:
        super().__init__()
        self.decay = decay
        with torch.no_grad():
            z, _ = gain.draw(draws, 0)
        self.register_buffer("mean", z.mean(0))
        self.register_buffer("square", z.square().mean(0))

    @torch.no_grad()
    def observe(self, mean: Tensor, square: Tensor) -> None:
        """Update with the means of a step.

        Args:
            mean: of z over its draws, (D,).
            square: of z², (D,).
        """
        self.mean.lerp_(mean, 1 - self.decay)
        self.square.lerp_(square, 1 - self.decay)
