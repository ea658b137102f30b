"""The chains of samplers with minibatch gradients, and the step sizes of their burn-in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayou.inference.chains import check_data, load_batches, mean_over_chains
from bayou.inference.probe import ChainProbe, typical_fall
from bayou.inference.step_sizes import StepSizes
from bayou.kernels import Joint
from bayou.kernels.hmc import Density
from bayou.methods.mcmc import MarkovChains
from bayou.training.data import Data, Rows, batches_from, stack_batches
from bayou.training.graphs import Recorded
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.ranks import current
from bayou.training.seeds import part_seed

if TYPE_CHECKING:
    from bayou.methods.langevin import GradientSampler

Kernel = Callable[..., Any]


class GradientChains(MarkovChains):
    """Chains with one minibatch gradient per step.

    Args:
        method: the settings.
        joint: log p(w, D).
        data: all rows.
        start: the initial positions, (C, D).
        seed: of the batches and the noise.
        chains: the numbers of the chains.
    """

    kernel: Callable[..., Any]

    method: GradientSampler

    def __init__(
        self,
        method: GradientSampler,
        joint: Joint,
        data: Data,
        start: Tensor,
        seed: int,
        chains: range,
    ) -> None:
        super().__init__(method, joint, data, start, seed, chains)
        self.steps: int = method._plan(data)[0]
        self.sizes: StepSizes = method.step_sizes
        self.temperature: float = method.temperature
        init, self.kernel = method._kernel(data.n)
        self.current: Any = init(start)
        self.state_type: type = type(self.current)
        self.has_own_batches: bool = isinstance(data, Rows) and data.batches > 1
        self.check: Callable[[tuple[Any, Tensor]], None] | None = check_data(joint, data, start)
        self.probe: ChainProbe = ChainProbe(joint, data, seed, start)
        self.density: Density | None = None  # of all rows, where one batch has them
        if data.batches == 1 and data.targets() is not None and current().size == 1:
            self.density = joint.density(load_batches(joint, data, start), start, calls=self.steps)
        self._batches: Iterator[tuple[Batch, float]] | None = None
        self.minibatch_joint: Kernel = partial(joint, per_chain=self.has_own_batches)
        if method.compile or start.is_cuda:
            self.minibatch_joint = Recorded(self.minibatch_joint, method.compile)
        self.log_joint: Tensor = start.new_full((len(chains),), math.nan)
        self.lr: float | Tensor = method.rate / data.n if method.lr is None else method.lr
        self.h: float | Tensor = self.lr  # of the last step
        # the first step that was not finite, -1 for none
        self.lost_at: Tensor = torch.full((len(chains),), -1, device=start.device)
        burn_in = int(np.flatnonzero(method.draw_density(self.steps))[0])
        self.warm_up: WarmUp | None = None
        if method.lr is None and burn_in >= method.least_warm:
            self.warm_up = WarmUp(self, data, burn_in)

    @property
    def position(self) -> Tensor:
        """Return the positions of the chains: (C, D)."""
        position: Tensor = self.current.position
        return position

    def advance(self, step: int) -> None:
        """Take one step of all chains."""
        if self.warm_up is not None and step in self.warm_up.tuning_steps:
            self.warm_up.retune(step)
        if self.density is None:
            log_joint, gradient = self._minibatch_gradient(step)
        else:
            log_joint, gradient = self.density(self.position)
        noise = self.normal("noise", step)
        self.h = self.lr * self.sizes.factor(step, self.steps)
        temperature = self.temperature if self.sizes.noisy(step, self.steps) else 0.0
        kernel = self.kernel if self.warm_up is None else self.warm_up.kernel(step)
        state = kernel(self.current, gradient, noise, self.h, temperature)
        if self.warm_up is not None and step < self.warm_up.end:
            self.current = self.warm_up.rescue_divergent(state, log_joint)
            self.log_joint = log_joint
            return
        is_finite = (state.position.sum(-1) + log_joint).isfinite()
        self.lost_at = torch.where(~is_finite & (self.lost_at < 0), step, self.lost_at)
        self.current = state
        self.log_joint = log_joint

    def _minibatch_gradient(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the log joint and its gradient by the batches of a step."""
        if self._batches is None:
            self._batches = self._stream(step)
        (x, y), fraction = next(self._batches)
        log_joint, gradient = current().mean(self.minibatch_joint(self.position, x, y), fraction)
        return log_joint, gradient

    def _stream(self, step: int) -> Iterator[tuple[Batch, float]]:
        """Yield the batches from a step on, with their fraction of the rows of all processes.

        They are (C, M, ...) where each chain has its own.
        """
        like = self.position
        streams = len(self.chains) if self.has_own_batches else 1

        def seeds(epoch: int) -> list[int]:
            if not self.has_own_batches:
                return [part_seed(self.seed, "epoch", epoch)]
            return [part_seed(self.seed, "epoch", epoch, chain) for chain in self.chains]

        for batches in batches_from(step, [self.data] * streams, seeds, self.check):
            rows, fractions = zip(*map(current().rows, batches), strict=True)
            batch = stack_batches(rows) if self.has_own_batches else rows[0]
            yield move(batch, like), fractions[0]

    def record(self) -> dict[str, float]:
        """Return numbers of the last step."""
        h = mean_over_chains(self.h) if isinstance(self.h, Tensor) else self.h
        return {"log_joint": mean_over_chains(self.log_joint), "lr": h}

    def state(self) -> dict[str, Any]:
        """Return the state for the next step."""
        state = {"now": tuple(self.current), "log_joint": self.log_joint}
        if self.warm_up is None:
            return state
        return state | {"warm": self.warm_up.state(), "lr": self.lr}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""
        self.current = self.state_type(*state["now"])
        self.log_joint = state["log_joint"]
        if self.warm_up is not None:
            self.lr = state["lr"]
            self.warm_up.load(state["warm"])

    def lost(self) -> tuple[int, int] | None:
        """Return (chain, step) of the first that was not finite, by index; None if all are."""
        lost = [(step, chain) for chain, step in enumerate(self.lost_at.tolist()) if step >= 0]
        return min(lost)[::-1] if lost else None


class WarmUp:
    """The step sizes of chains in the burn-in: see ``GradientSampler``.

    Args:
        chains: have the step sizes.
        data: all rows.
        end: the number of steps of the burn-in.
    """

    def __init__(self, chains: GradientChains, data: Data, end: int) -> None:
        method = chains.method
        self.chains = chains
        self.end = end
        self.half: int = end // 2
        more = {self.end // 8, self.end // 4, self.end} if self.end >= 64 else set()
        self.tuning_steps: frozenset[int] = frozenset({0, self.half} | more)
        self.kernels: tuple[Callable[..., Any], Callable[..., Any]] = method._warm_kernels(data.n)
        noise_limit = math.inf
        if data.batches > 1:
            rows = data.n / data.batches
            noise_limit = method._damping * rows / (data.n - rows)
        self.stability_fraction: float = chains.sizes.peak * min(0.5, noise_limit)
        like = chains.position
        self.backoff: Tensor = torch.ones_like(like[:, :1])
        self.min_log_joint: Tensor = torch.full_like(like[:, 0], -math.inf)
        self.last_tuned: Any = chains.current

    def kernel(self, step: int) -> Kernel:
        """Return the kernel of a step.

        Args:
            step: the number of the step.
        """
        return self.kernels[step >= self.half]

    def retune(self, step: int) -> None:
        """Set each chain's step size to stability_fraction / λ and remember its state.

        A chain that diverges later returns to this state (``rescue_divergent``).

        Args:
            step: the number of the step.
        """
        chains = self.chains
        preconditioner = None
        if step >= self.half:
            preconditioner = chains.method._preconditioner(chains.current)
        first_chain = chains.chains.start
        curvature = chains.probe.curvature(chains.position, first_chain, preconditioner)
        curvature = curvature.unsqueeze(-1)
        is_usable = curvature.isfinite() & (curvature > 0)
        step_size = self.backoff * self.stability_fraction / curvature
        chains.lr = torch.where(is_usable, step_size, chains.lr)
        log_joint, _, spread = chains.probe(chains.position)
        fall = chains.temperature * typical_fall(chains.position.shape[1]) + spread
        self.min_log_joint = log_joint - 10 * fall
        self.last_tuned = chains.current

    def rescue_divergent(self, state: Any, log_joint: Tensor) -> Any:
        """Return the state after a step, with divergent chains where they were last tuned.

        These have half the step from then on.

        Args:
            state: after a step.
            log_joint: before the step, (C,).
        """
        is_finite = (state.position.sum(-1) + log_joint).isfinite()
        diverges = ~(is_finite & (log_joint >= self.min_log_joint)).unsqueeze(-1)
        self.backoff = torch.where(diverges, 0.5 * self.backoff, self.backoff)
        self.chains.lr = torch.where(diverges, 0.5 * self.chains.lr, self.chains.lr)
        values = [
            torch.where(diverges, earlier, later) if isinstance(later, Tensor) else later
            for earlier, later in zip(self.last_tuned, state, strict=True)
        ]
        return type(state)(*values)

    def state(self) -> dict[str, Any]:
        """Return the state for the next step."""
        return {
            "shrink": self.backoff,
            "floor": self.min_log_joint,
            "good": tuple(self.last_tuned),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``.

        Args:
            state: of a checkpoint.
        """
        self.backoff = state["shrink"]
        self.min_log_joint = state["floor"]
        self.last_tuned = self.chains.state_type(*state["good"])
