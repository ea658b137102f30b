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
from bayou.methods.mcmc import Sampler
from bayou.training.data import Data
from bayou.training.seeds import part_seed

JITTER = 0.2  # of the step sizes of HMC with a given number of them
SHORTEST = 0.5  # trajectory, in units of the length that is learned


@dataclass(frozen=True, kw_only=True)
class HamiltonianSampler(Sampler):
    """The base class of exact samplers; the other settings are those of ``Sampler``.

    In the warm-up each chain learns a step size (dual averaging) and a diagonal mass, as in Stan.
    All data stay in the memory of the device and count in every gradient.
    ``history`` has the log joint, the acceptance rate, the step size, the gradients per transition
    (means over chains) and the number of divergences after the warm-up: any are a sign that the
    draws miss a part of the posterior.

    Args:
        draws: how many draws of each chain to keep.
        warmup: transitions before the first draw.
        step_size: ε, or where its adaptation begins.
        adapt: learn step size and mass in the warm-up; without it every step has ``step_size`` and
            unit mass.
        accept: the acceptance rate that the step size is adapted to.
        batch_size: rows that go through the network at a time, which affects memory alone.
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
        steps = self.warmup + self.draws
        return steps, list(range(self.warmup, steps))

    def _mode_steps(self, data: Data) -> int:
        return 4 * self._plan(data)[0] if self.adapt else 0

    def _sampling(
        self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> HamiltonianChains:
        return HamiltonianChains(self, joint, data, start, seed, chains)

    @property
    @abstractmethod
    def _most_leapfrogs(self) -> int:
        """Of one transition."""

    def _gradients_of_all_rows(self, data: Data) -> int:
        """The largest number of gradients with all rows, which decides whether they are traced."""
        return self._plan(data)[0] * self._most_leapfrogs

    @abstractmethod
    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[hmc.State, hmc.Info]:
        """One transition of all chains."""


class HamiltonianChains(Sampling):
    """Chains with the log density p(w, D)^(1/T) of all data."""

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
        self.adapting, self.window_ends = adaptation.windows(method.warmup if method.adapt else 0)
        self.begin = start
        self.now: hmc.State | None = None
        self.tuned = adaptation.init(start, torch.full_like(start[:, 0], method.step_size))
        self.info: hmc.Info | None = None
        self.used = self.tuned.log_step.exp()
        self.divergences = 0

    def density(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """log p(w, D)/T and its gradient: (C,), (C, D)."""
        value, gradient = self._density(w)
        hot = self.method.temperature
        return (value, gradient) if hot == 1 else (value / hot, gradient / hot)

    def uniform(self, step: int, name: str, *more: int, count: int = 1) -> Tensor:
        """Uniform noise of a step: (C, count)."""
        seed = part_seed(self.seed, name, step, *more)
        return rng.uniform(len(self.chains), (count,), self.begin, seed, self.chains.start)

    @property
    def position(self) -> Tensor:
        return self.begin if self.now is None else self.now.position

    @torch.no_grad()
    def advance(self, step: int) -> None:
        method, tuned = self.method, self.tuned
        warming = method.adapt and step < method.warmup
        if self.now is None:
            self.now = hmc.init(self.begin, self.density)
            bad = [c for c, chain in enumerate(self.now.log_prob.isfinite().tolist()) if not chain]
            if bad:
                raise FloatingPointError(
                    f"the log joint of chain {self.chains[bad[0]]} is not finite at its start; use start=MAP(), a "
                    "smaller dispersal or standardized inputs"
                )
            if warming:
                self.tuned = tuned = self._restarted(step)
        step_size = (tuned.log_step if warming else tuned.log_average).exp()
        now, info = self.method._transition(self, step, step_size, tuned.inverse_mass)
        if warming:
            tuned = adaptation.tune(tuned, info.accept, method.accept)
            if info.gain is not None:
                tuned = adaptation.lengthen(tuned, info.gain, method._most_leapfrogs)
            if step in self.adapting:
                tuned = adaptation.observe(tuned, now.position)
        self.now, self.info, self.tuned, self.used = now, info, tuned, step_size
        if step in self.window_ends:
            self.tuned = adaptation.settle(tuned)
            self.tuned = self._restarted(step)
        if step >= method.warmup:
            self.divergences += int(info.divergent.sum())

    def _restarted(self, step: int) -> adaptation.State:
        """The adaptation with step sizes for the current positions and mass of the chains."""
        noise, tuned = self.normal("restart", step), self.tuned
        now = hmc.init(self.position, self.density)  # of all rows
        found = hmc.reasonable_step(
            now, self.density, noise, tuned.log_step.exp(), tuned.inverse_mass
        )
        return adaptation.restart(tuned, found)

    def record(self) -> dict[str, float]:
        assert self.now is not None
        assert self.info is not None
        learned = (
            {}
            if self.info.gain is None
            else {"length": mean_over_chains(self.tuned.log_average_length.exp())}
        )
        return learned | {
            "log_joint": mean_over_chains(self.now.log_prob) * self.method.temperature,
            "accept": mean_over_chains(self.info.accept),
            "step_size": mean_over_chains(self.used),
            "leapfrogs": mean_over_chains(self.info.leapfrogs),
            "divergences": float(self.divergences),
        }

    def state(self) -> dict[str, Any]:
        assert self.now is not None
        return {"now": tuple(self.now), "tuned": tuple(self.tuned), "divergences": self.divergences}

    def load(self, state: dict[str, Any]) -> None:
        self.now, self.tuned = hmc.State(*state["now"]), adaptation.State(*state["tuned"])
        self.divergences = state["divergences"]


@final
@dataclass(frozen=True)
class HMC(HamiltonianSampler):
    """Hamiltonian Monte Carlo (Neal 2011): trajectories of steps ε, accepted with probability
    min(1, e^(H − H')).

    A trajectory has u·T/ε steps, where u is a van der Corput sequence on (½, 1), which avoids
    periodic trajectories. In the warm-up each chain learns the length T by a stochastic gradient,
    as in ChEES (Hoffman et al. 2021), here of E[a·J]·T^(−π/2) with the acceptance probability a and
    the squared jump J = (w' − w)ᵀM(w' − w): largest for independent draws in a normal distribution.
    ``history`` has the mean of T over chains as ``length``.

    Args:
        leapfrogs: None: a length that is learned; without ``adapt`` it is 20·ε. A number: this many
            steps of ε·(1 + 0.2·u), u uniform on [−1, 1].
        most_leapfrogs: the most steps of a trajectory if ``leapfrogs`` is None.
    """

    draws: int = field(default=500, kw_only=True)
    warmup: int = field(default=500, kw_only=True)
    leapfrogs: int | None = field(default=None, kw_only=True)
    most_leapfrogs: int = field(default=200, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("most_leapfrogs", *(() if self.leapfrogs is None else ("leapfrogs",)))

    @property
    def _most_leapfrogs(self) -> int:
        return self.leapfrogs or self.most_leapfrogs

    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[hmc.State, hmc.Info]:
        assert chains.now is not None
        u, leapfrogs = chains.uniform(step, "accept", count=2), self.leapfrogs
        if leapfrogs is None:
            tuned, bits = chains.tuned, f"{step + 1:b}"
            share = SHORTEST + (1 - SHORTEST) * int(bits[::-1], 2) / 2 ** len(
                bits
            )  # of all chains: they end together
            length = (tuned.log_length if step < self.warmup else tuned.log_average_length).exp()
            leapfrogs = (share * length / step_size).ceil().clamp(1, self.most_leapfrogs)
        else:
            step_size = step_size * (1 + JITTER * (2 * u[:, 1] - 1))
        momentum = chains.normal("momentum", step)
        return hmc.step(
            chains.now, chains.density, momentum, u[:, 0], step_size, inverse_mass, leapfrogs
        )


@final
@dataclass(frozen=True)
class NUTS(HamiltonianSampler):
    """The no-U-turn sampler (Hoffman & Gelman 2014), multinomial as in Stan: at most
    2^``max_depth`` steps each.

    With much data and little noise a trajectory makes a U-turn after a thousand steps or more: the
    stiffest direction is hundreds of times narrower than the prior and varies with the position,
    which a constant mass does not correct. By default trees therefore end at 255 steps, and 250
    draws of each chain follow 250 transitions of warm-up: a network of 151 weights on 200 rows
    takes two or three minutes. If ``posterior.mixing`` is poor, increase them.
    """

    draws: int = field(default=250, kw_only=True)
    warmup: int = field(default=250, kw_only=True)
    max_depth: int = field(default=8, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("max_depth")

    @property
    def _most_leapfrogs(self) -> int:
        return 2**self.max_depth

    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[hmc.State, hmc.Info]:
        assert chains.now is not None

        def uniforms(depth: int) -> Tensor:
            return chains.uniform(step, "tree", depth, count=2**depth + 2)

        momentum = chains.normal("momentum", step)
        return nuts.step(
            chains.now, chains.density, momentum, uniforms, step_size, inverse_mass, self.max_depth
        )
