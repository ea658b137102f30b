"""The base class of full-batch samplers with momentum, and their chains."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.inference.chains import load_batches, mean_over_chains
from bayou.inference.probe import ChainProbe
from bayou.kernels import Joint, adaptation, hmc
from bayou.kernels.adaptation import AdaptationState
from bayou.kernels.hmc import HamiltonianState, Info
from bayou.methods.mcmc import MarkovChains, Sampler
from bayou.training.data import Data
from bayou.training.seeds import part_seed


class HamiltonianChains(MarkovChains):
    """Chains with the log density p(w, D)^(1/T) of all data.

    Args:
        method: the settings.
        joint: log p(w, D).
        data: all rows.
        start: the initial positions, (C, D).
        seed: of the noise.
        chains: the numbers of the chains.
    """

    window_ends: frozenset[int]
    mass_transitions: range

    method: HamiltonianSampler
    info: Info  # of the last transition

    def __init__(
        self,
        method: HamiltonianSampler,
        joint: Joint,
        data: Data,
        start: Tensor,
        seed: int,
        chains: range,
    ) -> None:
        super().__init__(method, joint, data, start, seed, chains)
        calls = method._gradients_of_all_rows(data)
        self._density = joint.density(load_batches(joint, data, start), start, calls=calls)
        self.probe: ChainProbe = ChainProbe(joint, data, seed, start)
        warmup = method.warmup if method.adapt else 0
        self.mass_transitions, self.window_ends = adaptation.windows(warmup)
        unknown = torch.full_like(start[:, 0], math.nan)
        self.current: HamiltonianState = HamiltonianState(start, unknown, start)
        self.has_started: bool = False  # if not, the density of the start is not evaluated yet
        step_size = torch.full_like(start[:, 0], method.step_size)
        self.adaptation: AdaptationState = adaptation.init(start, step_size)
        self.step_size: Tensor = self.adaptation.log_step.exp()  # of the last transition
        self.divergences: int = 0

    def density(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(w, D)/T and its gradient: (C,), (C, D).

        Args:
            w: (C, D).
        """
        value, gradient = self._density(w)
        temperature = self.method.temperature
        if temperature == 1:
            return value, gradient
        return value / temperature, gradient / temperature

    def uniform(self, step: int, name: str, *more: int, count: int = 1) -> Tensor:
        """Draw uniform noise of a step: (C, count).

        Args:
            step: the number of the step.
            name: of the noise, for the seed.
            more: further numbers of the seed.
            count: numbers for each chain.
        """
        seed = part_seed(self.seed, name, step, *more)
        return rng.uniform(len(self.chains), (count,), self.position, seed, self.chains.start)

    @property
    def position(self) -> Tensor:
        """Return the positions of the chains: (C, D)."""
        return self.current.position

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Make one transition, and adapt in the warm-up."""
        method = self.method
        is_warmup = method.adapt and step < method.warmup
        if not self.has_started:
            self._begin(step, is_warmup)
        averages = self.adaptation
        log_step = averages.log_step if is_warmup else averages.log_average
        self.step_size = log_step.exp()
        self.current, self.info = self.transition(step, self.step_size, averages.inverse_mass)
        if is_warmup:
            self._adapt(step)
        if step in self.window_ends:
            self.adaptation = adaptation.settle(self.adaptation)
            self._restart_adaptation(step)
        if step >= method.warmup:
            self.divergences += int(self.info.divergent.sum())

    @abstractmethod
    def transition(
        self, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Return the chains after a transition.

        Args:
            step: the number of the transition.
            step_size: ε, (C,).
            inverse_mass: M⁻¹, (C, D).
        """

    def _begin(self, step: int, is_warmup: bool) -> None:
        """Evaluate the density at the start."""
        self.current = hmc.init(self.position, self.density)
        self.has_started = True
        is_finite = self.current.log_prob.isfinite().tolist()
        if not all(is_finite):
            raise FloatingPointError(
                f"the log joint of chain {self.chains[is_finite.index(False)]} is not finite at "
                "its start; use start=MAP(), a smaller dispersal or standardized inputs"
            )
        if is_warmup:
            self._restart_adaptation(step)

    def _adapt(self, step: int) -> None:
        """Update the step sizes, the lengths and the running variance with a transition."""
        method = self.method
        averages = adaptation.tune(self.adaptation, self.info.accept, method.accept)
        if self.info.gain is not None:
            averages = adaptation.lengthen(averages, self.info.gain, method._max_leapfrogs)
        if step in self.mass_transitions:
            averages = adaptation.observe(averages, self.position)
        self.adaptation = averages

    def _restart_adaptation(self, step: int) -> None:
        """Restart the adaptation with step sizes for the current positions and mass."""
        noise = self.normal("restart", step)
        averages = self.adaptation
        state = hmc.init(self.position, self.density)  # of all rows
        step_size = hmc.reasonable_step(
            state, self.density, noise, averages.log_step.exp(), averages.inverse_mass
        )
        self.adaptation = adaptation.restart(averages, step_size)

    def record(self) -> dict[str, float]:
        """Return numbers of the last transition."""
        numbers = {}
        if self.info.gain is not None:
            numbers["length"] = mean_over_chains(self.adaptation.log_average_length.exp())
        return numbers | {
            "log_joint": mean_over_chains(self.current.log_prob) * self.method.temperature,
            "accept": mean_over_chains(self.info.accept),
            "step_size": mean_over_chains(self.step_size),
            "leapfrogs": mean_over_chains(self.info.leapfrogs),
            "divergences": float(self.divergences),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for the next transition."""
        return {
            "now": tuple(self.current),
            "tuned": tuple(self.adaptation),
            "divergences": self.divergences,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""
        self.current = HamiltonianState(*state["now"])
        self.has_started = True
        self.adaptation = AdaptationState(*state["tuned"])
        self.divergences = state["divergences"]


@dataclass(frozen=True, kw_only=True)
class HamiltonianSampler(Sampler):
    """The base class of exact samplers.

    In the warm-up each chain learns a step size (dual averaging) and a diagonal mass, as in Stan.
    All data stay in the memory of the device and count in every gradient. ``history`` has the log
    joint, the acceptance rate, the step size, the gradients per transition (means over chains) and
    the number of divergences after the warm-up: any are a sign that the draws miss a part of the
    posterior.

    Args:
        draws: how many draws of each chain to keep; 1,000 by default.
        warmup: transitions before the first draw; 1,000 by default.
        step_size: ε, or where its adaptation begins; 0.1 by default.
        adapt: learn step size and mass in the warm-up; True by default. Without it every step has
            ``step_size`` and unit mass.
        accept: the acceptance rate that the step size is adapted to; 0.8 by default.
        batch_size: rows that go through the network at a time, which affects memory alone; 65,536
            by default.
    """

    draws: int = 1000
    warmup: int = 1000
    step_size: float = 0.1
    adapt: bool = True
    accept: float = 0.8
    batch_size: int = 2**16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("draws")
        self._check_whole("warmup", least=0)
        self._check_positive("step_size")
        self._check_interval("(0, 1)", "accept")

    def _plan(self, data: Data) -> tuple[int, list[int]]:
        """Return the number of transitions, and those after which positions are kept."""
        steps = self.warmup + self.draws
        return steps, list(range(self.warmup, steps))

    def _mode_steps(self, data: Data) -> int:
        """Return the number of steps towards the mode before the chains start."""
        return 4 * self._plan(data)[0] if self.adapt else 0

    @property
    @abstractmethod
    def _max_leapfrogs(self) -> int:
        """Return the largest number of leapfrog steps of one transition."""

    def _gradients_of_all_rows(self, data: Data) -> int:
        """Return the largest number of gradients with all rows, which may be traced."""
        return self._plan(data)[0] * self._max_leapfrogs
