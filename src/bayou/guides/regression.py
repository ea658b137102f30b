"""Bayesian linear regression with Gaussian noise: the exact posterior, and a convolution as one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import solve_triangular

from bayou.core.constants import LOG_2PI
from bayou.curvature.layers import windows
from bayou.network import Call


@dataclass(frozen=True)
class Regression:
    """The posterior of T = A·Z + noise with Z ~ N(0, I) and standard normal noise.

    q(Z) = Π_o N(Z_o; mean_o, Σ), Σ = (I + AᵀA)⁻¹, mean = Σ·Aᵀ·T, for G independent groups.

    Args:
        a: the inputs A, (G, R, D).
        mean: the mean of Z, (G, D, out).
        factor: the Cholesky factor L of the smaller of I + AᵀA and I + A·Aᵀ, whose eigenvalues are
            all at least 1.
    """

    a: Tensor
    mean: Tensor
    factor: Tensor

    @classmethod
    def fit(cls, a: Tensor, t: Tensor) -> Regression:
        """Compute the posterior.

        Args:
            a: the inputs A, (G, R, D).
            t: the outputs T, (G, R, out).
        """
        is_wide = a.shape[-2] < a.shape[-1]
        gram = a @ a.mT if is_wide else a.mT @ a
        identity = torch.eye(gram.shape[-1], dtype=a.dtype, device=a.device)
        # Without a check, which would wait for the GPU.
        factor = torch.linalg.cholesky_ex(gram + identity).L
        half = solve_triangular(factor, t if is_wide else a.mT @ t, upper=False)
        solution = solve_triangular(factor.mT, half, upper=True)
        return cls(a, a.mT @ solution if is_wide else solution, factor)

    @property
    def is_wide(self) -> bool:
        """Return whether there are fewer rows than weights."""
        return self.a.shape[-2] < self.a.shape[-1]

    @property
    def log_det(self) -> Tensor:
        """Compute Σ_g log|Σ|: a scalar."""
        return -2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum()

    @property
    def variance(self) -> Tensor:
        """Compute the diagonal of Σ: (G, D, 1)."""
        if self.is_wide:
            half = solve_triangular(self.factor, self.a, upper=False)
            return 1 - half.square().sum(-2).unsqueeze(-1)
        half = solve_triangular(self.factor, self._identity(), upper=False)
        return half.square().sum(-2).unsqueeze(-1)

    def _identity(self) -> Tensor:
        """Return the identity of the size of the Cholesky factor."""
        return torch.eye(self.factor.shape[-1], dtype=self.a.dtype, device=self.a.device)

    def draw(self, eps: Tensor) -> Tensor:
        """Compute mean + S·ε with S·Sᵀ = Σ.

        For few rows S = I − Aᵀ·L⁻ᵀ·(L + I)⁻¹·A, so that ε always has the size of Z.

        Args:
            eps: standard normal noise, (G, D, out).
        """
        if not self.is_wide:
            return self.mean + solve_triangular(self.factor.mT, eps, upper=True)
        half = solve_triangular(self.factor + self._identity(), self.a @ eps, upper=False)
        return self.mean + eps - self.a.mT @ solve_triangular(self.factor.mT, half, upper=True)

    def log_prob(self, z: Tensor) -> Tensor:
        """Compute log q(Z): a scalar.

        Args:
            z: weights, (G, D, out).
        """
        deviation = z - self.mean
        outputs = z.shape[-1]
        return -0.5 * (
            deviation.square().sum()
            + (self.a @ deviation).square().sum()
            + z.numel() * LOG_2PI
            + outputs * self.log_det
        )

    def kl(self) -> Tensor:
        """Compute KL(q ‖ N(0, I)), a scalar: ½·Σ[variance + mean² − 1] − ½·out·log|Σ|."""
        return 0.5 * (
            (self.variance + self.mean.square() - 1).sum() - self.mean.shape[-1] * self.log_det
        )


def patches(call: Call) -> Tensor:
    """Return the inputs of each output of a linear or convolution call: (G, R, D).

    There is one row per position of an example.

    Args:
        call: the call.
    """
    x = call.x
    weight = call.weight
    if weight is None or call.func is F.linear:
        return x.reshape(1, -1, x.shape[-1])
    dims = weight.ndim - 2
    groups = call.given.get("groups", 1)
    x = windows(x.unsqueeze(0) if x.ndim == weight.ndim - 1 else x, call)
    x = x.unflatten(1, (groups, -1))  # (B, G, C, *kernel, *positions)
    kernel = range(3, 3 + dims)
    x = x.permute(1, 0, *(axis + dims for axis in kernel), 2, *kernel)
    return x.reshape(groups, x.shape[1 : 2 + dims].numel(), -1)


def columns(tensor: Tensor, groups: int) -> Tensor:
    """Return a weight (out, ...) or a bias (out,) as (G, D, out/G).

    Args:
        tensor: the weight or the bias.
        groups: the number of groups of the convolution.
    """
    return tensor.reshape(groups, len(tensor) // groups, -1).mT
