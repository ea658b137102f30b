"""The Laplace approximation of log p(D), and the prior scale and noise that make it largest (MacKay
1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou.constants import LOG_2PI
from bayou.curvature.structures import Curvature
from bayou.params import Params

MAX_LOG_MULTIPLIER = 10.0  # |log| of a multiplier, beyond which it may diverge to 0 or infinity


@dataclass(frozen=True)
class Hyper:
    """Multipliers of the prior precision of every tensor, and of the noise variance (1 where they
    stay).

    One number a tensor, or with as many axes as the tensor where its units have factors of their
    own.
    """

    multipliers: dict[str, Tensor]
    noise: Tensor

    @staticmethod
    def ones(names: Mapping[str, object], like: Tensor) -> Hyper:
        """All equal to 1."""
        one = torch.ones((), dtype=torch.float64, device=like.device)
        return Hyper(dict.fromkeys(names, one), one)

    @property
    def scale(self) -> Tensor:
        """The factor of the curvature of the data."""
        return 1 / self.noise


@dataclass(frozen=True)
class Evidence:
    """log p(D) ≈ log p(D | w*) + log p(w*) + D/2·log 2π − ½·log |Λ| as a function of ``Hyper``.

    ``distance``: w* − prior mean of the tensors of Λ; all others are constant. ``residual``:
    Σ (y − f)² of a Gaussian likelihood with standard deviation ``noise`` over ``count`` numbers,
    where that may change.
    """

    curvature: Curvature
    distance: Params
    log_likelihood: float
    residual: float = 0.0
    noise: float = 1.0
    count: int = 0

    def parts(self, hyper: Hyper) -> dict[str, Tensor]:
        """log p(D | w*), log p(w*), log |Λ| and their sum, the log evidence."""
        one, total = hyper.noise, torch.zeros((), dtype=torch.float64, device=hyper.noise.device)
        fit = (
            self.log_likelihood
            + 0.5 * self.residual / self.noise**2 * (1 - 1 / one)
            - 0.5 * self.count * one.log()
        )
        size = 0
        for name, d in self.distance.items():
            precision = hyper.multipliers[name] * self.curvature.prior[name].expand(d.shape)
            total = (
                total + 0.5 * (precision.log() - precision * d.double().square() - LOG_2PI).sum()
            )
            size += d.numel()
        log_det = self.curvature.log_det(hyper.multipliers, hyper.scale)
        evidence = fit + total + 0.5 * size * LOG_2PI - 0.5 * log_det
        return {
            "log_likelihood": fit,
            "log_prior": total,
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
        """The maximum of the evidence over one multiplier for every group of tensors and, if
        requested, the noise.

        ``units``: the axes along which a tensor of a group has factors too, one for each unit, of
        geometric mean 1 and between e^±MAX_LOG_MULTIPLIER: a unit whose weights are all 0 would
        have a scale of 0 (MacKay 1994).
        """
        first = Hyper.ones(self.distance, next(iter(self.distance.values())))
        axes = [(name, axis) for name, found in (units or {}).items() for axis in found]
        sizes = [self.distance[name].shape[axis] for name, axis in axes]
        theta = first.noise.new_zeros(len(groups) + noise + sum(sizes)).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [theta],
            max_iter=steps,
            tolerance_grad=1e-10,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def hyper(at: Tensor) -> Hyper:
            scales, *factors = at.split([len(groups) + noise, *sizes])
            values = scales.exp()
            chosen = {
                name: value for group, value in zip(groups, values, strict=False) for name in group
            }
            for (name, axis), log in zip(axes, factors, strict=True):
                shape = [-1 if k == axis else 1 for k in range(self.distance[name].ndim)]
                chosen[name] = chosen[name] * (
                    MAX_LOG_MULTIPLIER * torch.tanh((log - log.mean()) / MAX_LOG_MULTIPLIER)
                ).exp().reshape(shape)
            return Hyper(first.multipliers | chosen, values[-1] if noise else first.noise)

        def closure() -> float:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = -self.parts(hyper(theta))["log_evidence"]
                loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        found = theta.detach()
        best = self.parts(hyper(found))["log_evidence"]
        for number, what in enumerate([*(group[0] for group in groups), *["the noise"] * noise]):
            further = found.clone()
            further[number] += 3 * found[number].sign()
            far = not float(found[number].abs()) <= MAX_LOG_MULTIPLIER
            if far and not float(self.parts(hyper(further))["log_evidence"] - best) < -1e-4:
                raise ValueError(
                    f"the evidence has no maximum: the scale of {what!r} diverges to 0 or infinity (are its weights "
                    "all equal to their prior mean, or the data without noise?); keep it fixed, or tie it to the others"
                )
        return hyper(found)
