"""Annealed importance sampling (Neal 2001): weighted chains from one density to another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayou.kernels import hmc

Parts = Callable[
    [Tensor], tuple[Tensor, Tensor, Tensor, Tensor]
]  # w (C, D) -> two values (C,) and gradients (C, D)
JITTER = 0.2  # relative, of the step size of every trajectory, against periodic orbits
FORGET = 0.2  # weight of the new variance in the mass, at every temperature
STEP_SIZE_TEMPERATURES = 100.0  # temperatures in which the step size changes by at most a factor e


class Annealing:
    """Chains from p_0 to p_1 by p_β(w) ∝ exp(base(w) + β·rise(w)), with their log weights: (C, D),
    (C,).

    ``parts`` returns base, ∇base, rise, ∇rise. log w = Σ_t (β_t − β_{t−1})·rise(w_{t−1}), and E[w]
    = Z_1/Z_0 if the moves leave p_β invariant and do not adapt to the chain itself. The last
    ``pilots`` chains therefore have no weight: their acceptance adapts the step size and, with
    ``adapt``, their variance the mass.
    """

    def __init__(
        self, parts: Parts, inverse_mass: Tensor, pilots: int, adapt: bool = False
    ) -> None:
        self.parts, self.inverse_mass, self.pilots, self.adapt = parts, inverse_mass, pilots, adapt
        self.beta = 0.0

    def start(self, position: Tensor) -> None:
        """At draws from p_0."""
        self.position = position
        self.log_weights = torch.zeros(len(position), dtype=torch.float64, device=position.device)
        self.log_step = torch.zeros((), dtype=position.dtype, device=position.device)

    def density(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """log p_β up to a constant, and its gradient."""
        base, slope, rise, climb = self.parts(w)
        return torch.add(base, rise, alpha=self.beta), torch.add(slope, climb, alpha=self.beta)

    def warm(self, before: float, beta: float) -> None:
        """The next temperature: update the weights at the current positions."""
        base, slope, rise, climb = self.parts(self.position)
        self.log_weights = self.log_weights + (beta - before) * rise.double()
        self.beta = beta
        self.state = hmc.State(self.position, base + beta * rise, slope + beta * climb)

    def find_step(self, momentum: Tensor) -> None:
        """A first step size, by the pilots."""
        found = hmc.reasonable_step(
            self.state,
            self.density,
            momentum,
            self.log_step.exp().expand(len(momentum)),
            self.inverse_mass,
        )
        self.log_step = found[-self.pilots :].log().mean()

    def move(
        self, momentum: Tensor, uniform: Tensor, leapfrogs: int, accept: float, temperatures: int
    ) -> Tensor:
        """One trajectory of all chains, then an update of the step size towards the acceptance rate
        ``accept``; the acceptance probability of each chain, (C,)."""
        step = self.log_step.exp() * (1 + JITTER * (2 * uniform[:, 1] - 1))
        self.state, info = hmc.step(
            self.state, self.density, momentum, uniform[:, 0], step, self.inverse_mass, leapfrogs
        )
        self.position = self.state.position
        if self.adapt:
            self.inverse_mass = self.inverse_mass.lerp(self.position[-self.pilots :].var(0), FORGET)
        self.log_step = self.log_step + min(1.0, STEP_SIZE_TEMPERATURES / temperatures) * (
            info.accept[-self.pilots :].mean() - accept
        )
        return info.accept


def pilots_of(chains: int) -> int:
    """The number of chains without weight for this many chains with weight."""
    return max(4, chains // 4)


def weighed(log_weights: Tensor) -> dict[str, float]:
    """The estimate of log Z_1/Z_0 from the weights of C chains.

    ``value`` = log 1/C Σ w with its ``standard_error`` (delta method, √(1/ess − 1/C)), the ``mean``
    and the ``spread`` of log w, and ``ess`` = (Σw)²/Σw².
    """
    each, count = log_weights.double(), len(log_weights)
    ess = math.exp(2 * float(each.logsumexp(0)) - float((2 * each).logsumexp(0)))
    return {
        "value": float(each.logsumexp(0)) - math.log(count),
        "standard_error": math.sqrt(max(count / ess - 1, 0.0) / (count - 1)),
        "mean": float(each.mean()),
        "spread": float(each.std()),
        "ess": ess,
    }
