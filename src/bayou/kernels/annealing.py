"""Annealed importance sampling (Neal 2001): weighted chains from one density to another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayou.kernels import hmc
from bayou.kernels.hmc import HamiltonianState

# w (C, D) -> log p_0 (C,), its gradient (C, D), log p_1/p_0 (C,) and its gradient (C, D)
Terms = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
JITTER = 0.2  # relative, of the step size of every trajectory, against periodic orbits
MASS_UPDATE = 0.2  # weight of the new variance in the mass, at every temperature
STEP_SIZE_TEMPERATURES = 100.0  # temperatures in which the step size changes by at most a factor e


class Annealing:
    """Chains from p_0 to p_1 by p_β(w) ∝ p_0(w)·(p_1(w)/p_0(w))^β, with their log weights.

    log weight = Σ_t (β_t − β_{t−1})·log p_1(w_{t−1})/p_0(w_{t−1}), and E[weight] = Z_1/Z_0 if the
    moves leave p_β invariant and do not adapt to the chain itself. The last ``pilots`` chains
    therefore have no weight: their acceptance adapts the step size and, with ``adapt``, their
    variance the mass.

    Args:
        terms: returns log p_0, its gradient, log p_1/p_0 and its gradient, each up to a constant.
        inverse_mass: M⁻¹, (D,).
        pilots: the number of chains without weight.
        adapt: whether the pilots adapt the mass; False by default.
    """

    def __init__(
        self, terms: Terms, inverse_mass: Tensor, pilots: int, adapt: bool = False
    ) -> None:
        self.terms = terms
        self.inverse_mass: Tensor = inverse_mass
        self.pilots = pilots
        self.adapt = adapt
        self.beta: float = 0.0

    def start(self, position: Tensor) -> None:
        """Set the chains to draws from p_0.

        Args:
            position: (C, D).
        """
        self.position: Tensor = position
        self.log_weights: Tensor = torch.zeros(
            len(position), dtype=torch.float64, device=position.device
        )
        self.log_step: Tensor = torch.zeros((), dtype=position.dtype, device=position.device)

    def density(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p_β up to a constant, and its gradient.

        Args:
            w: (C, D).
        """
        base, base_gradient, log_ratio, ratio_gradient = self.terms(w)
        value = torch.add(base, log_ratio, alpha=self.beta)
        return value, torch.add(base_gradient, ratio_gradient, alpha=self.beta)

    def warm(self, before: float, beta: float) -> None:
        """Set the next temperature and update the weights at the current positions.

        Args:
            before: the current β.
            beta: the next β.
        """
        base, base_gradient, log_ratio, ratio_gradient = self.terms(self.position)
        self.log_weights = self.log_weights + (beta - before) * log_ratio.double()
        self.beta = beta
        value = base + beta * log_ratio
        self.state: HamiltonianState = hmc.HamiltonianState(
            self.position, value, base_gradient + beta * ratio_gradient
        )

    def find_step(self, momentum: Tensor) -> None:
        """Find a first step size, by the pilots.

        Args:
            momentum: normal noise, (C, D).
        """
        step_sizes = hmc.reasonable_step(
            self.state,
            self.density,
            momentum,
            self.log_step.exp().expand(len(momentum)),
            self.inverse_mass,
        )
        self.log_step = step_sizes[-self.pilots :].log().mean()

    def move(
        self, momentum: Tensor, uniform: Tensor, leapfrogs: int, accept: float, temperatures: int
    ) -> Tensor:
        """Make one trajectory of all chains, then update the step size.

        Args:
            momentum: normal noise, (C, D).
            uniform: uniform noise, (C, 2).
            leapfrogs: steps of the trajectory.
            accept: the acceptance rate that the step size is adapted to.
            temperatures: the number of temperatures of the run.

        Returns:
            The acceptance probability of each chain, (C,).
        """
        step_size = self.log_step.exp() * (1 + JITTER * (2 * uniform[:, 1] - 1))
        self.state, info = hmc.step(
            self.state,
            self.density,
            momentum,
            uniform[:, 0],
            step_size,
            self.inverse_mass,
            leapfrogs,
        )
        self.position = self.state.position
        if self.adapt:
            variance = self.position[-self.pilots :].var(0)
            self.inverse_mass = self.inverse_mass.lerp(variance, MASS_UPDATE)
        excess = info.accept[-self.pilots :].mean() - accept
        self.log_step = self.log_step + min(1.0, STEP_SIZE_TEMPERATURES / temperatures) * excess
        return info.accept


def pilot_chains(chains: int) -> int:
    """Return the number of chains without weight for this many chains with weight.

    Args:
        chains: with weight.
    """
    return max(4, chains // 4)


def estimate_log_ratio(log_weights: Tensor) -> dict[str, float]:
    """Estimate log Z_1/Z_0 from the weights of C chains.

    Args:
        log_weights: (C,).

    Returns:
        "value" = log 1/C Σ w with its "standard_error" (delta method, √(1/ess − 1/C)), the "mean"
        and the "spread" of log w, and "ess" = (Σw)²/Σw².
    """
    log_w = log_weights.double()
    count = len(log_weights)
    ess = math.exp(2 * float(log_w.logsumexp(0)) - float((2 * log_w).logsumexp(0)))
    return {
        "value": float(log_w.logsumexp(0)) - math.log(count),
        "standard_error": math.sqrt(max(count / ess - 1, 0.0) / (count - 1)),
        "mean": float(log_w.mean()),
        "spread": float(log_w.std()),
        "ess": ess,
    }
