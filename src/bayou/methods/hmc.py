"""Full-batch samplers with an accept step: HMC and NUTS, for small networks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.inference.chains import Sampling, load_batches, mean_over_chains
from bayou.inference.probe import ChainProbe
from bayou.kernels import Joint, adaptation, hmc, nuts
from bayou.kernels.adaptation import AdaptationState
from bayou.kernels.hmc import HamiltonianState, Info
from bayou.methods.mcmc import Sampler
from bayou.training.data import Data
from bayou.training.seeds import part_seed

STEP_JITTER = 0.2  # relative, of the step sizes of HMC with a given number of them
MIN_LENGTH = 0.5  # of a trajectory, in units of the length that is learned


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
        if not 0 < self.accept < 1:
            raise ValueError(f"{type(self).__name__} needs 0 < accept < 1, got {self.accept!r}")

    def _plan(self, data: Data) -> tuple[int, list[int]]:
        """Return the number of transitions, and those after which positions are kept."""
        steps = self.warmup + self.draws
        return steps, list(range(self.warmup, steps))

    def _mode_steps(self, data: Data) -> int:
        """Return the number of steps towards the mode before the chains start."""
        return 4 * self._plan(data)[0] if self.adapt else 0

    def _sampling(
        self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> HamiltonianChains:
        """Return the chains at their start (C, D)."""
        return HamiltonianChains(self, joint, data, start, seed, chains)

    @property
    @abstractmethod
    def _max_leapfrogs(self) -> int:
        """Return the largest number of leapfrog steps of one transition."""

    def _gradients_of_all_rows(self, data: Data) -> int:
        """Return the largest number of gradients with all rows, which may be traced."""
        return self._plan(data)[0] * self._max_leapfrogs

    @abstractmethod
    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Make one transition of all chains."""


class HamiltonianChains(Sampling):
    """Chains with the log density p(w, D)^(1/T) of all data.

    Args:
        method: the settings.
        joint: log p(w, D).
        data: all rows.
        start: the initial positions, (C, D).
        seed: of the noise.
        chains: the numbers of the chains.
    """

    def __init__(
        self,
        method: HamiltonianSampler,
        joint: Joint,
        data: Data,
        start: Tensor,
        seed: int,
        chains: range,
    ) -> None:
        super().__init__(method, joint, seed, chains)
        calls = method._gradients_of_all_rows(data)
        self._density = joint.density(load_batches(joint, data, start), start, calls=calls)
        self.probe = ChainProbe(joint, data, seed, start)
        warmup = method.warmup if method.adapt else 0
        self.mass_transitions, self.window_ends = adaptation.windows(warmup)
        self.start = start
        self._last_state: HamiltonianState | None = None  # before the first transition
        self._last_info: Info | None = None
        step_size = torch.full_like(start[:, 0], method.step_size)
        self.adaptation = adaptation.init(start, step_size)
        self.step_size = self.adaptation.log_step.exp()  # of the last transition
        self.divergences = 0

    @property
    def current(self) -> HamiltonianState:
        """Return the state of the chains, which have started."""
        if self._last_state is None:
            raise RuntimeError("the chains have not started")
        return self._last_state

    @property
    def info(self) -> Info:
        """Return the statistics of the last transition."""
        if self._last_info is None:
            raise RuntimeError("the chains have made no transition")
        return self._last_info

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
        return rng.uniform(len(self.chains), (count,), self.start, seed, self.chains.start)

    @property
    def position(self) -> Tensor:
        """Return the positions of the chains: (C, D)."""
        return self.start if self._last_state is None else self._last_state.position

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Make one transition, and adapt in the warm-up."""
        method = self.method
        is_warmup = method.adapt and step < method.warmup
        if self._last_state is None:
            self._begin(step, is_warmup)
        averages = self.adaptation
        log_step = averages.log_step if is_warmup else averages.log_average
        step_size = log_step.exp()
        state, info = method._transition(self, step, step_size, averages.inverse_mass)
        if is_warmup:
            averages = self._adapt(averages, state, info, step)
        self._last_state = state
        self._last_info = info
        self.adaptation = averages
        self.step_size = step_size
        if step in self.window_ends:
            self.adaptation = adaptation.settle(averages)
            self.adaptation = self._restart_adaptation(step)
        if step >= method.warmup:
            self.divergences += int(info.divergent.sum())

    def _begin(self, step: int, is_warmup: bool) -> None:
        """Evaluate the density at the start."""
        state = hmc.init(self.start, self.density)
        self._last_state = state
        for chain, is_finite in zip(self.chains, state.log_prob.isfinite().tolist(), strict=True):
            if not is_finite:
                raise FloatingPointError(
                    f"the log joint of chain {chain} is not finite at its start; use start=MAP(), "
                    "a smaller dispersal or standardized inputs"
                )
        if is_warmup:
            self.adaptation = self._restart_adaptation(step)

    def _adapt(
        self, averages: AdaptationState, state: HamiltonianState, info: Info, step: int
    ) -> AdaptationState:
        """Update the step sizes, the lengths and the running variance with a transition."""
        averages = adaptation.tune(averages, info.accept, self.method.accept)
        if info.gain is not None:
            averages = adaptation.lengthen(averages, info.gain, self.method._max_leapfrogs)
        if step in self.mass_transitions:
            averages = adaptation.observe(averages, state.position)
        return averages

    def _restart_adaptation(self, step: int) -> AdaptationState:
        """Return the adaptation with step sizes for the current positions and mass."""
        noise = self.normal("restart", step)
        averages = self.adaptation
        state = hmc.init(self.position, self.density)  # of all rows
        step_size = hmc.reasonable_step(
            state, self.density, noise, averages.log_step.exp(), averages.inverse_mass
        )
        return adaptation.restart(averages, step_size)

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
        self._last_state = HamiltonianState(*state["now"])
        self.adaptation = AdaptationState(*state["tuned"])
        self.divergences = state["divergences"]


@final
@dataclass(frozen=True)
class HMC(HamiltonianSampler):
    """Hamiltonian Monte Carlo: trajectories with momentum and a Metropolis test.

        H(w, p) = −log p(w, D) + ½·pᵀM⁻¹p,    accepted with probability min(1, e^(H − H'))

    A trajectory has u·T/ε leapfrog steps, where u is a van der Corput sequence on (½, 1), which
    avoids periodic trajectories. In the warm-up each chain learns the step size ε, the mass M and
    the length T, this by a stochastic gradient, as in ChEES (Hoffman et al. 2021), here of
    E[a·J]·T^(−π/2) with the acceptance probability a and the squared jump J = (w' − w)ᵀM(w' − w):
    largest for independent draws in a normal distribution. ``history`` has the mean of T over
    chains as ``length``.

    Args:
        draws: how many draws of each chain to keep; 500 by default.
        warmup: transitions before the first draw; 500 by default.
        leapfrogs: None (default): a length that is learned; without ``adapt`` it is 20·ε. A number:
            this many steps of ε·(1 + 0.2·u), u uniform on [−1, 1].
        most_leapfrogs: the most steps of a trajectory if ``leapfrogs`` is None; 200 by default.
        step_size: ε, or where its adaptation begins; 0.1 by default.
        accept: the acceptance rate that the step size is adapted to; 0.8 by default.
        chains: the number of parallel chains; 4 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of chains · draws functions, with diagnostics in
        ``posterior.mixing``.

    Raises:
        DivergenceError: if a chain is not finite.
        ValueError: for settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.HMC(draws=5, warmup=5, chains=2)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    10

    Paper: Neal 2011, https://arxiv.org/abs/1206.1901.
    """

    draws: int = field(default=500, kw_only=True)
    warmup: int = field(default=500, kw_only=True)
    leapfrogs: int | None = field(default=None, kw_only=True)
    most_leapfrogs: int = field(default=200, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("most_leapfrogs", "leapfrogs")

    @property
    def _max_leapfrogs(self) -> int:
        """Return the largest number of leapfrog steps of one transition."""
        return self.leapfrogs or self.most_leapfrogs

    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Make one trajectory of all chains."""
        u = chains.uniform(step, "accept", count=2)
        leapfrogs: int | Tensor
        if self.leapfrogs is None:
            leapfrogs = self._learned_leapfrogs(chains, step, step_size)
        else:
            leapfrogs = self.leapfrogs
            step_size = step_size * (1 + STEP_JITTER * (2 * u[:, 1] - 1))
        momentum = chains.normal("momentum", step)
        return hmc.step(
            chains.current, chains.density, momentum, u[:, 0], step_size, inverse_mass, leapfrogs
        )

    def _learned_leapfrogs(self, chains: HamiltonianChains, step: int, step_size: Tensor) -> Tensor:
        """Return the number of steps for a fraction of the learned length, (C,).

        The fraction is the same for all chains, which therefore end together.
        """
        bits = f"{step + 1:b}"
        van_der_corput = int(bits[::-1], 2) / 2 ** len(bits)
        fraction = MIN_LENGTH + (1 - MIN_LENGTH) * van_der_corput
        averages = chains.adaptation
        is_warmup = step < self.warmup
        log_length = averages.log_length if is_warmup else averages.log_average_length
        steps = fraction * log_length.exp() / step_size
        return steps.ceil().clamp(1, self.most_leapfrogs)


@final
@dataclass(frozen=True)
class NUTS(HamiltonianSampler):
    """The no-U-turn sampler: HMC whose trajectories end where they turn back.

    Trajectories grow by doubling, to at most 2^``max_depth`` steps, and the draw is one of their
    points, with probability ∝ e^(−H) (multinomial, as in Stan). So there is no length to choose.

    With much data and little noise a trajectory makes a U-turn after a thousand steps or more: the
    stiffest direction is hundreds of times narrower than the prior and varies with the position,
    which a constant mass does not correct. By default trees therefore end at 255 steps. If
    ``posterior.mixing`` is poor, increase ``draws``, ``warmup`` and ``max_depth``.

    Args:
        draws: how many draws of each chain to keep; 250 by default.
        warmup: transitions before the first draw; 250 by default.
        max_depth: at most 2^max_depth − 1 steps of a trajectory; 8 by default.
        step_size: ε, or where its adaptation begins; 0.1 by default.
        accept: the acceptance rate that the step size is adapted to; 0.8 by default.
        chains: the number of parallel chains; 4 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of chains · draws functions, with diagnostics in
        ``posterior.mixing``.

    Raises:
        DivergenceError: if a chain is not finite.
        ValueError: for settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.NUTS(draws=5, warmup=5, chains=2, max_depth=4)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    10

    Paper: Hoffman & Gelman 2014, https://arxiv.org/abs/1111.4246.
    """

    draws: int = field(default=250, kw_only=True)
    warmup: int = field(default=250, kw_only=True)
    max_depth: int = field(default=8, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("max_depth")

    @property
    def _max_leapfrogs(self) -> int:
        """Return the largest number of leapfrog steps of one transition."""
        return 2**self.max_depth

    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Grow one tree of all chains."""

        def uniforms(depth: int) -> Tensor:
            return chains.uniform(step, "tree", depth, count=2**depth + 2)

        return nuts.step(
            chains.current,
            chains.density,
            chains.normal("momentum", step),
            uniforms,
            step_size,
            inverse_mass,
            self.max_depth,
        )
