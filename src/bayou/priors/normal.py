"""Normal priors: one scale for a tensor, optionally with a factor for each unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.rng import Seed
from bayou.priors.base import BoundPrior, Prior, log_of, squares

Unit = Literal["in", "out"]


class BoundNormal(BoundPrior):
    """p(w) = Π N(w; mean, scale²); mean and log_scale are tensors that broadcast to the shape.

    A spec binds scalars; full tensors make a mean-field posterior the prior of the next task (VCL,
    Nguyen et al. 2018).

    Args:
        shape: the shape of the tensor.
        mean: the mean.
        log_scale: the logarithm of the standard deviation.
        learn: whether ``log_scale`` is a parameter.
    """

    mean: Tensor
    log_scale: Tensor

    def __init__(
        self, shape: Sequence[int], mean: Tensor, log_scale: Tensor, learn: bool = False
    ) -> None:
        super().__init__(shape, learn, log_scale=log_scale)
        self.register_buffer("mean", mean.detach().clone())

    def log_prob(self, w: Tensor) -> Tensor:
        log_scale = self.log_scale
        z = (self._event(w) - self.mean) * torch.exp(-log_scale)
        return self._sum(-0.5 * z.square() - log_scale - 0.5 * LOG_2PI)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """Compute KL = Σ ½(std² + (mean − m)²)/scale² − ½ − log(std/scale).

        The sums are separate: for S means and one std there is no (S, *shape) copy of the std.

        Args:
            mean: the mean of every entry.
            std: the standard deviation of every entry.
        """
        mean = self._event(mean)
        std = self._event(std)
        log_scale = self.log_scale
        size = self.shape.numel()
        if log_scale.numel() == 1:  # one scale for all multiplies the sum
            log_scale = log_scale.reshape(())
            square_sum = self._sum(squares(mean, self.mean)) + self._sum(squares(std))
            quadratic = (-2 * log_scale).exp() * square_sum
            log_scale_sum = size * log_scale
        else:
            inv_scale = torch.exp(-log_scale)
            mean_term = self._sum(squares(mean * inv_scale, self.mean * inv_scale))
            quadratic = mean_term + self._sum(squares(std * inv_scale))
            log_scale_sum = log_scale.sum() * (size / log_scale.numel())
        return 0.5 * quadratic - self._sum(std.log()) + (log_scale_sum - 0.5 * size)

    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        log_scale = self.log_scale
        return self.mean + log_scale.exp() * rng.normal(n, self.shape, log_scale, seed, start)


@final
class BoundUnitNormal(BoundNormal):
    """p(w_ji) = N(w_ji; mean, (s·a_i·b_j)²): a scale of the tensor, factors of its units.

    The mean of log a and of log b is subtracted, so that the factors have a geometric mean of 1.
    With q = N(m, σ²) and fixed other factors, the optimal a_i² is
    mean_j (m_ji² + σ_ji²)/(s·b_j)² (automatic relevance determination, MacKay 1994, Neal 1996).

    Args:
        shape: the shape of the tensor.
        mean: the mean.
        log_base: log s.
        factors: by unit the axis and log a or log b, one or both.
        learn: whether s and the factors are parameters.
    """

    log_base: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        mean: Tensor,
        log_base: Tensor,
        factors: Mapping[Unit, tuple[int, Tensor]],
        learn: bool,
    ) -> None:
        logs = {f"log_{unit}": log for unit, (_, log) in factors.items()}
        BoundPrior.__init__(self, shape, learn, log_base=log_base, **logs)
        self.register_buffer("mean", mean.detach().clone())
        self.axes: dict[Unit, int] = {unit: axis for unit, (axis, _) in factors.items()}

    def log_factor(self, unit: Unit) -> Tensor | None:
        """Return log a or log b, of mean 0: (units,); None where these units have no factors.

        Args:
            unit: "in" or "out".
        """
        if unit not in self.axes:
            return None
        log: Tensor = getattr(self, f"log_{unit}")
        return log - log.mean()

    @property
    def log_scale(self) -> Tensor:  # type: ignore[override]
        """Compute log s + log a_i + log b_j, with as many axes as the tensor."""
        total = self.log_base
        for unit, axis in self.axes.items():
            log_factor = self.log_factor(unit)
            if log_factor is not None:
                shape = [1] * len(self.shape)
                shape[axis] = -1
                total = total + log_factor.reshape(shape)
        return total


@final
@dataclass(frozen=True)
class Normal(Prior):
    """A Normal prior with one scale for a tensor, or with a factor for each unit.

    p(w) = N(w; mean, scale²) for every weight, or p(w_ji) = N(w_ji; mean, (scale·a_i·b_j)²) with
    learned factors of input units i and output units j (automatic relevance determination, MacKay
    1994, Neal 1996). Its KL from a Gaussian q = N(m, std²) is closed,
    Σ ½·(std² + (m − mean)²)/scale² − ½ − log(std/scale).

    Args:
        scale: the standard deviation (default 1), or "fan_in" for gain/√fan_in (Neal 1996).
        mean: the mean (default 0).
        gain: the factor of "fan_in" (default 1).
        learn: True for the scale of a tensor; "in", "out" or "units" also for a factor of every
            input unit, output unit or both, where the tensor has two or more axes (channels and
            filters of a convolution). False (the default) keeps the scale.

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(), prior=bayou.Normal(0.5))
        >>> prior = {"*.weight": bayou.Normal("fan_in", gain=2.0), "*": bayou.Normal(1.0)}
    """

    scale: float | str = 1.0
    # Normal("fan_in", 2.0) reads as a gain, Normal(0.0, 1.0) as torch's mean and scale.
    _: KW_ONLY
    mean: float = 0.0
    gain: float = 1.0
    learn: bool | Literal["in", "out", "units"] = False

    def __post_init__(self) -> None:
        self._check_positive("gain")
        if not math.isfinite(self.mean):
            raise ValueError(f"Normal mean must be finite, got {self.mean!r}")
        if self.learn not in (True, False, "in", "out", "units"):
            raise ValueError(
                f'Normal learn must be True, False, "in", "out" or "units", got {self.learn!r}'
            )
        if isinstance(self.scale, str):
            if self.scale != "fan_in":
                raise ValueError(
                    f"Normal scale must be a positive number or 'fan_in', got {self.scale!r}"
                )
            return
        self._check_positive("scale")
        if self.gain != 1.0:
            raise ValueError(
                f"Normal gain={self.gain} multiplies 'fan_in' only; "
                f"write it into scale={self.scale}"
            )

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundNormal:
        if not isinstance(self.scale, str):
            scale = self.scale
        elif fan_in is None or fan_in < 1:
            tensor = f"a tensor of shape {tuple(shape)}"
            raise ValueError(
                f"Normal('fan_in'): {tensor} has fan_in={fan_in}; give it a number for a scale"
            )
        else:
            scale = self.gain / math.sqrt(fan_in)
        mean = torch.full_like(reference, self.mean)
        log_scale = log_of(scale, reference)
        units: dict[Unit, tuple[int, int]] = {}
        if not isinstance(self.learn, bool):
            units = unit_sizes(shape, axes, "" if self.learn == "units" else self.learn)
        if not units:
            return BoundNormal(shape, mean, log_scale, bool(self.learn))
        factors = {unit: (axis, reference.new_zeros(size)) for unit, (axis, size) in units.items()}
        return BoundUnitNormal(shape, mean, log_scale, factors, learn=True)


@final
@dataclass(frozen=True)
class UnitNormal(Prior):
    """A Normal prior of one tensor with fixed factors by unit.

    p(w_ji) = N(w_ji; mean, (scale·a_i·b_j)²). ``Laplace`` returns it for a learned prior by unit.

    Args:
        scale: the common scale (default 1).
        mean: the mean (default 0).
        inputs: a_i, which are divided by their geometric mean; empty (the default) for 1.
        outputs: b_j, likewise.
    """

    scale: float = 1.0
    mean: float = 0.0
    inputs: tuple[float, ...] = ()
    outputs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check_positive("scale")
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(0 < value < math.inf for value in getattr(self, name)):
                raise ValueError(
                    f"UnitNormal {name} must be positive factors, got {getattr(self, name)!r:.80}"
                )

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundUnitNormal:
        units = unit_sizes(shape, axes)
        values_by_unit: dict[Unit, tuple[float, ...]] = {"in": self.inputs, "out": self.outputs}
        factors: dict[Unit, tuple[int, Tensor]] = {}
        for unit, values in values_by_unit.items():
            axis, size = units.get(unit, (0, 1))
            if values and len(values) != size:
                raise ValueError(
                    f"UnitNormal has {len(values)} factors of {unit}put units, and a tensor of "
                    f"shape {tuple(shape)} has {size}; it is a prior of one tensor: "
                    "prior={'first.weight': UnitNormal(...), '*': ...}"
                )
            if values:
                factor = torch.tensor(values, dtype=reference.dtype, device=reference.device)
                factors[unit] = (axis, factor.log())
        mean = torch.full_like(reference, self.mean)
        return BoundUnitNormal(shape, mean, log_of(self.scale, reference), factors, learn=False)


def unit_sizes(
    shape: Sequence[int], axes: tuple[int, int], only: str = ""
) -> dict[Unit, tuple[int, int]]:
    """Return the axes of input and output units with their sizes.

    A vector has none, and an axis of size 1 is left out.

    Args:
        shape: the shape of the tensor.
        axes: its axes of input and output units.
        only: "in" or "out" for one of them; empty for both.
    """
    if len(shape) < 2:
        return {}
    axis_by_unit: dict[Unit, int] = {"in": axes[0], "out": axes[1]}
    return {
        unit: (axis, shape[axis])
        for unit, axis in axis_by_unit.items()
        if only in ("", unit) and shape[axis] > 1
    }
