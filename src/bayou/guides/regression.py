"""Bayesian linear regression with Gaussian noise: the exact posterior, and a convolution as one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import solve_triangular

from bayou.constants import LOG_2PI
from bayou.curvature.layers import windows
from bayou.network import Call


@dataclass(frozen=True)
class Regression:
    """q(Z) = Π_o N(Z_o; mean_o, Σ), Σ = (I + AᵀA)⁻¹, mean = Σ·Aᵀ·T: the posterior of T = A·Z +
    noise, Z ~ N(0, I).

    A (G, R, D), T (G, R, out), Z (G, D, out), for G independent groups. ``factor`` is the Cholesky
    factor L of the smaller of I + AᵀA and I + A·Aᵀ, whose eigenvalues are all at least 1.
    """

    a: Tensor
    mean: Tensor
    factor: Tensor

    @classmethod
    def of(cls, a: Tensor, t: Tensor) -> Regression:
        """From inputs and outputs."""
        wide = a.shape[-2] < a.shape[-1]
        gram = a @ a.mT if wide else a.mT @ a
        one = torch.eye(gram.shape[-1], dtype=a.dtype, device=a.device)
        factor = torch.linalg.cholesky_ex(
            gram + one
        ).L  # without a check, which would wait for the GPU
        half = solve_triangular(factor, t if wide else a.mT @ t, upper=False)
        found = solve_triangular(factor.mT, half, upper=True)
        return cls(a, a.mT @ found if wide else found, factor)

    @property
    def wide(self) -> bool:
        """Whether there are fewer rows than weights."""
        return self.a.shape[-2] < self.a.shape[-1]

    @property
    def log_det(self) -> Tensor:
        """Σ_g log|Σ|: a scalar."""
        return -2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum()

    @property
    def variance(self) -> Tensor:
        """The diagonal of Σ: (G, D, 1)."""
        if self.wide:
            return 1 - solve_triangular(self.factor, self.a, upper=False).square().sum(
                -2
            ).unsqueeze(-1)
        one = torch.eye(self.factor.shape[-1], dtype=self.a.dtype, device=self.a.device)
        return solve_triangular(self.factor, one, upper=False).square().sum(-2).unsqueeze(-1)

    def draw(self, eps: Tensor) -> Tensor:
        """mean + S·ε with S·Sᵀ = Σ; for few rows S = I − Aᵀ·L⁻ᵀ·(L + I)⁻¹·A, so that ε always has
        the size of Z.
        """
        if not self.wide:
            return self.mean + solve_triangular(self.factor.mT, eps, upper=True)
        one = torch.eye(self.factor.shape[-1], dtype=self.a.dtype, device=self.a.device)
        half = solve_triangular(self.factor + one, self.a @ eps, upper=False)
        return self.mean + eps - self.a.mT @ solve_triangular(self.factor.mT, half, upper=True)

    def log_prob(self, z: Tensor) -> Tensor:
        """log q(Z): a scalar."""
        d, out = z - self.mean, z.shape[-1]
        return -0.5 * (
            d.square().sum()
            + (self.a @ d).square().sum()
            + z.numel() * LOG_2PI
            + out * self.log_det
        )

    def kl(self) -> Tensor:
        """KL(q ‖ N(0, I)), a scalar: ½·Σ[variance + mean² − 1] − ½·out·log|Σ|."""
        return 0.5 * (
            (self.variance + self.mean.square() - 1).sum() - self.mean.shape[-1] * self.log_det
        )


def patches(call: Call) -> Tensor:
    """The inputs of each output of a linear or convolution call: (G, R, D), one row per position of
    an example.
    """
    x, weight, given = call.x, call.weight, call.given
    if weight is None or call.func is F.linear:
        return x.reshape(1, -1, x.shape[-1])
    dims, groups = weight.ndim - 2, given.get("groups", 1)
    x = windows(x.unsqueeze(0) if x.ndim == weight.ndim - 1 else x, call)
    x = x.unflatten(1, (groups, -1))  # (B, G, C, *kernel, *positions)
    kernel = range(3, 3 + dims)
    x = x.permute(1, 0, *(axis + dims for axis in kernel), 2, *kernel)
    return x.reshape(groups, x.shape[1 : 2 + dims].numel(), -1)


def columns(tensor: Tensor, groups: int) -> Tensor:
    """A weight (out, ...) or bias (out,) as (G, D, out/G)."""
    return tensor.reshape(groups, len(tensor) // groups, -1).mT
