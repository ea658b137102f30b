"""The Laplace approximation of log p(D), and its maximum over prior scale and noise.

MacKay 1992.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou.core.constants import LOG_2PI
from bayou.core.params import Params
from bayou.curvature.structures import Curvature

MAX_LOG_MULTIPLIER = 10.0  # |log| of a multiplier, beyond which it may diverge to 0 or infinity


@dataclass(frozen=True)
class Hyper:
    """Multipliers of prior precisions and of the noise variance, 1 where they stay.

    Args:
        multipliers: of the prior precision of every tensor; one number, or with as many axes as the
            tensor where its units have factors of their own.
        noise: of the noise variance.
    """

    multipliers: dict[str, Tensor]
    noise: Tensor

    @staticmethod
    def ones(names: Mapping[str, object], like: Tensor) -> Hyper:
        """Return multipliers that are all 1.

        Args:
            names: of the tensors.
            like: a tensor on the device.
        """
        one = torch.ones((), dtype=torch.float64, device=like.device)
        return Hyper(dict.fromkeys(names, one), one)

    @property
    def scale(self) -> Tensor:
        """Return the factor of the curvature of the data."""
        return 1 / self.noise


@dataclass(frozen=True)
class Evidence:
    """The evidence of a model by the Laplace approximation, as a function of ``Hyper``.

        log p(D) ≈ log p(D | w*) + log p(w*) + D/2·log 2π − ½·log |Λ|

    Args:
        curvature: Λ as a function of the multipliers.
        distance: w* − prior mean of the tensors of Λ; all others are constant.
        log_likelihood: log p(D | w*).
        residual: Σ (y − f)² of a Gaussian likelihood whose noise may change; 0 by default.
        noise: its standard deviation; 1 by default.
        count: the numbers y; 0 by default.
    """

    curvature: Curvature
    distance: Params
    log_likelihood: float
    residual: float = 0.0
    noise: float = 1.0
    count: int = 0

    def parts(self, hyper: Hyper) -> dict[str, Tensor]:
        """Return log p(D | w*), log p(w*), log |Λ| and their sum, the log evidence.

        Args:
            hyper: the multipliers.
        """
        noise = hyper.noise
        log_prior = torch.zeros((), dtype=torch.float64, device=noise.device)
        log_likelihood = (
            self.log_likelihood
            + 0.5 * self.residual / self.noise**2 * (1 - 1 / noise)
            - 0.5 * self.count * noise.log()
        )
        size = 0
        for name, d in self.distance.items():
            precision = hyper.multipliers[name] * self.curvature.prior[name].expand(d.shape)
            terms = precision.log() - precision * d.double().square() - LOG_2PI
            log_prior = log_prior + 0.5 * terms.sum()
            size += d.numel()
        log_det = self.curvature.log_det(hyper.multipliers, hyper.scale)
        evidence = log_likelihood + log_prior + 0.5 * size * LOG_2PI - 0.5 * log_det
        return {
            "log_likelihood": log_likelihood,
            "log_prior": log_prior,
            "log_det": log_det,
            "log_evidence": evidence,
        }

    def maximize(
        self,
        groups: list[list[str]],
        noise: bool,
        steps: int = 200,
        units: Mapping[str, Sequence[int]] | None = None,
    ) -> Hyper:
        """Return the maximum of the evidence over multipliers of groups of tensors.

        Args:
            groups: of tensors with one multiplier each.
            noise: whether the noise has one, too.
            steps: the largest number of L-BFGS steps; 200 by default.
            units: the axes along which a tensor of a group has factors too, one for each unit, of
                geometric mean 1 and between e^±MAX_LOG_MULTIPLIER: a unit whose weights are all 0
                would have a scale of 0 (MacKay 1994). None by default.

        Raises:
            ValueError: if the evidence has no maximum.
        """
        tensor_axes = [(name, axis) for name, axes in (units or {}).items() for axis in axes]
        space = _LogMultipliers(self.distance, groups, noise, tensor_axes)
        theta = space.ones.noise.new_zeros(sum(space.sizes)).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [theta],
            max_iter=steps,
            tolerance_grad=1e-10,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def closure() -> float:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = -self.parts(space.hyper(theta))["log_evidence"]
                loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        maximum = theta.detach()
        self._check_maximum(space, maximum)
        return space.hyper(maximum)

    def _check_maximum(self, space: _LogMultipliers, maximum: Tensor) -> None:
        """Raise a ValueError if the evidence still rises where a multiplier is extreme."""
        evidence = self.parts(space.hyper(maximum))["log_evidence"]
        names = [group[0] for group in space.groups]
        if space.noise:
            names.append("the noise")
        for number, name in enumerate(names):
            if float(maximum[number].abs()) <= MAX_LOG_MULTIPLIER:
                continue
            further = maximum.clone()
            further[number] += 3 * maximum[number].sign()
            further_evidence = self.parts(space.hyper(further))["log_evidence"]
            if not float(further_evidence - evidence) < -1e-4:
                raise ValueError(
                    f"the evidence has no maximum: the scale of {name!r} diverges to 0 or infinity "
                    "(are its weights all equal to their prior mean, or the data without noise?); "
                    "keep it fixed, or tie it to the others"
                )


@dataclass(frozen=True)
class _LogMultipliers:
    """The logarithms of multipliers as one vector: of groups, of the noise, and of units."""

    distance: Params
    groups: list[list[str]]
    noise: bool
    tensor_axes: list[tuple[str, int]]

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of multipliers: of groups and noise, and of units along every axis."""
        units = [self.distance[name].shape[axis] for name, axis in self.tensor_axes]
        return [len(self.groups) + self.noise, *units]

    @property
    def ones(self) -> Hyper:
        """Return multipliers that are all 1."""
        return Hyper.ones(self.distance, next(iter(self.distance.values())))

    def hyper(self, theta: Tensor) -> Hyper:
        """Return the multipliers of a vector."""
        ones = self.ones
        log_scales, *log_factors = theta.split(self.sizes)
        scales = log_scales.exp()
        multipliers = {
            name: scale for group, scale in zip(self.groups, scales, strict=False) for name in group
        }
        for (name, axis), log in zip(self.tensor_axes, log_factors, strict=True):
            shape = [-1 if k == axis else 1 for k in range(self.distance[name].ndim)]
            limited = MAX_LOG_MULTIPLIER * torch.tanh((log - log.mean()) / MAX_LOG_MULTIPLIER)
            multipliers[name] = multipliers[name] * limited.exp().reshape(shape)
        return Hyper(ones.multipliers | multipliers, scales[-1] if self.noise else ones.noise)
