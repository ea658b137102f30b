"""Samplers that follow minibatch gradients: SGLD, its preconditioned form, SGHMC; step sizes that fall or cycle."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from bayou import rng
from bayou.kernels import Joint, psgld, sghmc, sgld
from bayou.methods.first_batch import check_first_batch
from bayou.methods.mcmc import Sampler, Sampling, mean_of
from bayou.training.data import Batch, Data, Rows
from bayou.training.loop import move
from bayou.training.seeds import part_seed


class StepSizes(ABC):
    """How the step size h of step t follows from the first one, lr."""

    burn_in: ClassVar[float] = 0.5  # the fraction of a run that is not kept, unless told

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """h / lr at a step of so many."""

    def weight(self, step: int, steps: int) -> float:
        """How much of the draws belongs to a step: they are spread evenly over the sum of these."""
        return 1.0

    def noisy(self, step: int, steps: int) -> bool:
        """Whether noise is added at a step."""
        return True


@final
@dataclass(frozen=True)
class Constant(StepSizes):
    """h = lr."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0


@final
@dataclass(frozen=True)
class Decaying(StepSizes):
    """h = a·(b + t)^−γ with lr = a·b^−γ, ½ < γ ≤ 1 (Welling & Teh 2011).

    Draws are kept at even distances of Σ h, the time of the diffusion, so that all of them count alike.
    """

    b: float = 1000.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        if not self.b > 0 or not 0 <= self.gamma <= 1:
            raise ValueError(f"Decaying needs b > 0 and 0 <= gamma <= 1, got b={self.b}, gamma={self.gamma}")

    def factor(self, step: int, steps: int) -> float:
        return (1 + step / self.b) ** -self.gamma

    def weight(self, step: int, steps: int) -> float:
        return self.factor(step, steps)


@final
@dataclass(frozen=True)
class Cyclical(StepSizes):
    """h = ½·lr·(cos(π·r) + 1), r the fraction done of one of ``cycles`` (Zhang et al. 2020).

    Large steps find a mode, small ones sample it: draws are kept where r ≥ ``explore``. ``noise=False``: no noise
    before that, plain gradient steps as in the paper.
    """

    burn_in: ClassVar[float] = 0.0
    cycles: int = 4
    explore: float = 0.8
    noise: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int) or self.cycles < 1:
            raise ValueError(f"Cyclical cycles must be a whole number of at least 1, got {self.cycles!r}")
        if not 0 <= self.explore < 1:
            raise ValueError(f"Cyclical needs 0 <= explore < 1, got {self.explore!r}")

    def _done(self, step: int, steps: int) -> float:
        length = -(-steps // self.cycles)
        return (step % length) / length

    def factor(self, step: int, steps: int) -> float:
        return 0.5 * (math.cos(math.pi * self._done(step, steps)) + 1)

    def weight(self, step: int, steps: int) -> float:
        return float(self._done(step, steps) >= self.explore)

    def noisy(self, step: int, steps: int) -> bool:
        return self.noise or self._done(step, steps) >= self.explore


SCHEDULES: dict[str, StepSizes] = {"constant": Constant(), "decaying": Decaying(), "cyclical": Cyclical()}
Kernel = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class GradientSampler(Sampler):
    """What samplers with minibatch gradients have in common; the other settings are those of ``Sampler``.

    ``epochs`` or ``steps``: how long, burn-in included; 10,000 steps or 20 epochs, whichever is more, unless told.
    ``burn_in``: the steps that come before the first draw, as a number or as a fraction of all; half of them unless
    told, none for cyclical steps. ``draws`` of each chain are kept, evenly spread over the rest (100 unless told), or
    with ``thin`` every so many steps. ``lr``: the first step size h; ``schedule``: "constant", "decaying", "cyclical"
    or ``Decaying(...)``, ``Cyclical(...)``. Each chain has batches of its own, except from a DataLoader, which all
    chains share. No step is rejected, so the draws have a bias that grows with h.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    lr: float | None = None
    schedule: str | StepSizes = "constant"
    burn_in: float | None = None
    draws: int | None = None
    thin: int | None = None

    rate: ClassVar[float]  # N·lr, unless told

    def __post_init__(self) -> None:
        super().__post_init__()
        me = type(self).__name__
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}")
        if self.draws is not None and self.thin is not None:
            raise ValueError(f"give draws or thin, not both: got draws={self.draws}, thin={self.thin}")
        self._check_whole("epochs", "steps", "draws", "thin")
        self._check_positive("lr")
        if isinstance(self.schedule, str):
            self._check_choice("schedule", list(SCHEDULES))
        elif not isinstance(self.schedule, StepSizes):
            raise ValueError(f"{me} schedule must be a name or Cyclical() and the like, got {self.schedule!r}")
        burn_in = self.burn_in
        whole = isinstance(burn_in, int) and not isinstance(burn_in, bool) and burn_in >= 0
        if burn_in is not None and not whole and not (isinstance(burn_in, float) and 0 <= burn_in < 1):
            raise ValueError(f"{me} burn_in must be a number of steps or a fraction below 1, got {burn_in!r}")

    @property
    def step_sizes(self) -> StepSizes:
        """The schedule, if it was given by name."""
        return SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule

    def _plan(self, data: Data) -> tuple[int, list[int]]:
        epochs = 20 if self.epochs is None else self.epochs
        steps = self.steps or (epochs * data.batches if self.epochs is not None else max(10_000, 20 * data.batches))
        return steps, self._kept(steps)

    def _kept(self, steps: int) -> list[int]:
        """The steps after which the chains' positions are kept."""
        me, sizes = type(self).__name__, self.step_sizes
        burn_in = sizes.burn_in if self.burn_in is None else self.burn_in
        first = burn_in if isinstance(burn_in, int) else int(burn_in * steps)
        weights = np.array([sizes.weight(t, steps) if t >= first else 0.0 for t in range(steps)])
        room = np.flatnonzero(weights)
        if self.thin is not None:
            room = room[self.thin - 1 :: self.thin]
            if not len(room):
                raise ValueError(f"{me} keeps no draw: thin={self.thin}, steps={steps}, burn_in={burn_in}; run longer")
            return [int(t) for t in room]
        draws = 100 if self.draws is None else self.draws
        if draws > len(room):
            if self.draws is None and len(room):
                return [int(t) for t in room]
            raise ValueError(
                f"{me} has {len(room)} steps to take {draws} draws from (steps={steps}, burn_in={burn_in}); run longer "
                "or ask for fewer"
            )
        time = np.cumsum(weights[room]) / weights[room].sum()
        at = np.searchsorted(time, np.arange(1, draws + 1) / draws - 1e-9)
        k = np.arange(draws)  # no step twice: where the draws are denser than the steps, neighbours
        at = np.minimum(np.maximum.accumulate(at - k) + k, len(room) - draws + k)
        return [int(t) for t in room[at]]

    @abstractmethod
    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        """``init`` and ``step`` for n data."""

    def _sampling(self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range) -> GradientChains:
        steps, _ = self._plan(data)
        lr = self.rate / data.n if self.lr is None else self.lr
        return GradientChains(self, joint, data, start, seed, chains, steps, lr)


class GradientChains(Sampling):
    """Chains that take one minibatch gradient a step."""

    def __init__(
        self, method: GradientSampler, joint: Joint, data: Data, start: Tensor, seed: int, chains: range, steps: int,
        lr: float,
    ) -> None:  # fmt: skip
        self.joint, self.data, self.seed, self.chains = joint, data, seed, chains
        self.steps, self.lr, self.sizes, self.temperature = steps, lr, method.step_sizes, method.temperature
        begin, self.kernel = method._kernel(data.n)
        self.now = begin(start)
        self.kind = type(self.now)
        self.own = isinstance(data, Rows) and data.batches > 1
        with_start = {name: value[0] for name, value in joint.tensors(start[:1]).items() if name in joint.network.names}
        self.check = check_first_batch(joint.target, data, lambda *inputs: joint.network.call(with_start, *inputs))
        self._batches: Iterator[tuple[Any, Tensor]] | None = None
        self.log_joint = start.new_full((len(chains),), math.nan)
        self.h = lr
        self.bad = torch.full((len(chains),), -1, device=start.device)  # the first step that was not finite

    @property
    def position(self) -> Tensor:
        position: Tensor = self.now.position
        return position

    def advance(self, step: int) -> None:
        if self._batches is None:
            self._batches = self._stream(step)
        x, y = next(self._batches)
        before = self.position
        log_joint, gradient = self.joint(before, x, y, own=self.own)
        noise = rng.normal(
            len(self.chains), before.shape[1:], before, part_seed(self.seed, "noise", step), self.chains.start
        )
        self.h = self.lr * self.sizes.factor(step, self.steps)
        hot = self.temperature if self.sizes.noisy(step, self.steps) else 0.0
        now = self.kernel(self.now, gradient, noise, self.h, hot)
        lost = ~(now.position.sum(-1) + log_joint).isfinite() & (self.bad < 0)
        self.bad = torch.where(lost, step, self.bad)
        self.now, self.log_joint = now, log_joint

    def _stream(self, step: int) -> Iterator[tuple[Any, Tensor]]:
        """The batches from a step on; (C, M, ...) where each chain has its own."""
        like = self.position
        while True:
            epoch, done = divmod(step, self.data.batches)
            seeds = [part_seed(self.seed, "epoch", epoch, c) for c in self.chains] if self.own else None
            if seeds is None:
                found = ([batch] for batch in self.data.epoch(part_seed(self.seed, "epoch", epoch), done))
            else:
                found = (list(batches) for batches in zip(*(self.data.epoch(s, done) for s in seeds), strict=True))
            before = step
            for batches in found:
                if self.check is not None and epoch == 0:
                    for batch in batches:
                        self.check(batch)
                yield move(_stacked(batches) if self.own else batches[0], like)
                step += 1
            if step == before:
                raise ValueError(f"the data gave {done} batches in an epoch, but said they have {self.data.batches}")

    def record(self) -> dict[str, float]:
        return {"log_joint": mean_of(self.log_joint), "lr": self.h}

    def state(self) -> dict[str, Any]:
        return {"now": tuple(self.now), "log_joint": self.log_joint}

    def load(self, state: dict[str, Any]) -> None:
        self.now, self.log_joint = self.kind(*state["now"]), state["log_joint"]

    def lost(self) -> tuple[int, int] | None:
        bad = [(step, chain) for chain, step in enumerate(self.bad.tolist()) if step >= 0]
        return min(bad)[::-1] if bad else None


def _stacked(batches: list[Batch]) -> Batch:
    """The batches of C chains as one, (C, M, ...)."""
    xs, ys = zip(*batches, strict=True)
    if isinstance(xs[0], tuple | list):
        parts = zip(*xs, strict=True)
        return tuple(torch.stack(part) if isinstance(part[0], Tensor) else part[0] for part in parts), torch.stack(ys)
    return torch.stack(xs), torch.stack(ys)


@final
@dataclass(frozen=True)
class SGLD(GradientSampler):
    """w ← w + ½·h·∇log p(w, D) + √h·ξ, the minibatch gradient scaled by N/M (Welling & Teh 2011).

    h = ``lr``, 0.01/N unless told; stable where h < 4/λ, λ the largest curvature of −log p(w, D).
    """

    rate = 0.01

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        return sgld.init, sgld.step


@final
@dataclass(frozen=True)
class pSGLD(GradientSampler):
    """SGLD with the preconditioner of RMSprop (Li et al. 2016): w ← w + ½·h·G·∇log p(w, D) + √(h·G)·ξ.

    G = 1/(``floor`` + √V), V the running mean of (∇log p / N)² with weight ``decay``. The drift Γ of a changing G is
    dropped, as in the paper's experiments (see ``kernels.psgld``). h = ``lr``, 0.001/N unless told.
    """

    decay: float = field(default=0.99, kw_only=True)
    floor: float = field(default=1e-5, kw_only=True)
    rate = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("floor")
        if not 0 <= self.decay < 1:
            raise ValueError(f"pSGLD needs 0 <= decay < 1, got {self.decay!r}")

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        return psgld.init, partial(psgld.step, n=n, decay=self.decay, floor=self.floor)


@final
@dataclass(frozen=True)
class SGHMC(GradientSampler):
    """v ← (1 − α)·v + ½·h·∇log p(w, D) + √((α − β̂)·h)·ξ;  w ← w + v (Chen, Fox & Guestrin 2014).

    α = ``friction`` (1 is SGLD), β̂ = ``noise_estimate``, the part of the noise that the minibatches bring. h = ``lr``,
    0.001/N unless told; the chain moves as SGLD with h/α does.
    """

    friction: float = field(default=0.1, kw_only=True)
    noise_estimate: float = field(default=0.0, kw_only=True)
    rate = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction <= 1 or not 0 <= self.noise_estimate <= self.friction:
            raise ValueError(
                "SGHMC needs 0 < friction <= 1 and 0 <= noise_estimate <= friction, got "
                f"friction={self.friction!r}, noise_estimate={self.noise_estimate!r}"
            )

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        return sghmc.init, partial(sghmc.step, friction=self.friction, noise_estimate=self.noise_estimate)
