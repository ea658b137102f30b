"""Step size schedules of samplers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final


class StepSizes(ABC):
    """The step size h of step t as a function of the first one, lr."""

    burn_in: ClassVar[float] = 0.5  # the default fraction of a run before the first draw
    peak: ClassVar[float] = 1.0  # the first step relative to those of the draws

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return h / lr at a step.

        Args:
            step: its number, from 0.
            steps: the number of all steps.
        """

    def weight(self, step: int, steps: int) -> float:
        """Return the density of the draws at a step: they are spread evenly over its sum.

        Args:
            step: its number, from 0.
            steps: the number of all steps.
        """
        return 1.0

    def noisy(self, step: int, steps: int) -> bool:
        """Return whether noise is added at a step.

        Args:
            step: its number, from 0.
            steps: the number of all steps.
        """
        return True


@final
@dataclass(frozen=True)
class Constant(StepSizes):
    """h = lr."""

    def factor(self, step: int, steps: int) -> float:
        """Return 1."""
        return 1.0


@final
@dataclass(frozen=True)
class Decaying(StepSizes):
    """h = a·(b + t)^−γ with lr = a·b^−γ, ½ < γ ≤ 1 (Welling & Teh 2011).

    Draws are kept at even distances of Σ h, the time of the diffusion, so that all of them count
    alike.

    Args:
        b: the number of steps after which the step size begins to fall.
        gamma: the exponent γ.
    """

    b: float = 1000.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        if not self.b > 0 or not 0 <= self.gamma <= 1:
            raise ValueError(
                f"Decaying needs b > 0 and 0 <= gamma <= 1, got b={self.b}, gamma={self.gamma}"
            )

    def factor(self, step: int, steps: int) -> float:
        """Return (1 + t/b)^−γ."""
        return (1 + step / self.b) ** -self.gamma

    def weight(self, step: int, steps: int) -> float:
        """Return the step size, so that draws are even in the time of the diffusion."""
        return self.factor(step, steps)


@final
@dataclass(frozen=True)
class Cyclical(StepSizes):
    """h = ½·lr·(cos(π·r) + 1), r the fraction of a cycle before a step (Zhang et al. 2020).

    Large steps reach a mode, small ones sample it: draws are kept where r ≥ ``explore``.

    Args:
        cycles: the number of cycles of one run; 4 by default.
        explore: the fraction of a cycle before its first draw.
        noise: whether noise is added in that fraction, too. False: gradient steps alone, as in the
            paper.
    """

    burn_in: ClassVar[float] = 0.0
    peak: ClassVar[float] = 4.0
    cycles: int = 4
    explore: float = 0.8
    noise: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int) or self.cycles < 1:
            raise ValueError(
                f"Cyclical cycles must be a whole number of at least 1, got {self.cycles!r}"
            )
        if not 0 <= self.explore < 1:
            raise ValueError(f"Cyclical needs 0 <= explore < 1, got {self.explore!r}")

    def _cycle_fraction(self, step: int, steps: int) -> float:
        """Return the fraction of its cycle that lies before a step."""
        length = -(-steps // self.cycles)
        return (step % length) / length

    def factor(self, step: int, steps: int) -> float:
        """Return ½·(cos(π·r) + 1)."""
        return 0.5 * (math.cos(math.pi * self._cycle_fraction(step, steps)) + 1)

    def weight(self, step: int, steps: int) -> float:
        """Return 1 where draws are kept and 0 elsewhere."""
        return float(self._cycle_fraction(step, steps) >= self.explore)

    def noisy(self, step: int, steps: int) -> bool:
        """Return whether noise is added: always, or only where draws are kept."""
        return self.noise or self._cycle_fraction(step, steps) >= self.explore


SCHEDULES: dict[str, StepSizes] = {
    "constant": Constant(),
    "decaying": Decaying(),
    "cyclical": Cyclical(),
}
