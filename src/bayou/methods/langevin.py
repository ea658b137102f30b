"""Stochastic-gradient samplers: SGLD, its preconditioned form, SGHMC; with decaying or cyclical
step sizes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.inference.chains import Sampling, check_data, load_batches, mean_over_chains
from bayou.inference.method import prefers_full_batch
from bayou.inference.probe import ChainProbe, typical_fall
from bayou.inference.restricted import RestrictedMethod
from bayou.inference.step_sizes import SCHEDULES, Constant, Cyclical, Decaying, StepSizes
from bayou.kernels import Joint, psgld, sghmc, sgld
from bayou.kernels.hmc import Density
from bayou.methods.mcmc import Sampler
from bayou.training.data import Data, Rows, batches_from, stack_batches
from bayou.training.graphs import Recorded
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.ranks import current
from bayou.training.seeds import part_seed

__all__ = [
    "PSGLD",
    "SGHMC",
    "SGLD",
    "Constant",
    "Cyclical",
    "Decaying",
    "GradientSampler",
    "StepSizes",
]

Kernel = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class GradientSampler(Sampler):
    """The base class of samplers with minibatch gradients; the other settings are those of
    ``Sampler``.

    Each chain has batches of its own, except from a DataLoader, which all chains share. No step is
    rejected, so the draws have a bias that grows with the step size h.

    Without ``lr``, every chain adapts its own in the burn-in (of cyclical steps: before the first
    draw):

        h = min(½, α·M/(N − M))/λ,

    λ the largest curvature of −log p(w, D), by power iterations where the chain starts and again at
    ⅛, ¼, ½ and the end of the burn-in; α the friction (1 for SGLD), M the rows of a batch. In the
    stiffest direction the step itself widens the variance by 1/(1 − hλ/4), 14 % at most, and the
    noise of the batches by hλ(N − M)/(4αM), 25 % at most, where the model fits; elsewhere less.
    Cyclical steps begin at four times that. A chain that diverges in the burn-in continues where λ
    was last measured, with half the step. After the burn-in only the schedule changes it.

    Args:
        epochs: how many passes over the data, burn-in included; this or ``steps``.
        steps: how many steps, burn-in included. Unless one of the two is given, 10,000 or 20
            epochs, whichever is more.
        effort: multiplies this default length.
        batch_size: rows M of a minibatch.
        lr: the first step size h; None finds it in the burn-in (see
            ``methods.langevin.GradientSampler``).
        schedule: "constant", "decaying", "cyclical", or ``Decaying(...)``, ``Cyclical(...)``.
        burn_in: steps before the first draw, as a number or as a fraction of all; None is half of
            them, none for cyclical steps.
        draws: how many draws of each chain to keep, evenly spread after the burn-in; None is 100.
        compile: use torch.compile for the gradient. On a GPU it is one CUDA graph in any case.
    """

    shares_rows: ClassVar[bool] = True

    epochs: int | None = None
    steps: int | None = None
    effort: float = 1.0
    batch_size: int = 128
    lr: float | None = None
    schedule: str | StepSizes = "constant"
    burn_in: float | None = None
    draws: int | None = None
    compile: bool = field(default=False, compare=False)

    without_noise: ClassVar[bool] = True
    rate: ClassVar[float]  # N·lr without adaptation of the step size
    least_warm: ClassVar[int] = 0  # steps of burn-in needed for adaptation

    def __post_init__(self) -> None:
        super().__post_init__()
        me = type(self).__name__
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}"
            )
        self._check_whole("epochs", "steps", "draws")
        self._check_positive("lr")
        self._check_positive("effort")
        if isinstance(self.schedule, str):
            self._check_choice("schedule", list(SCHEDULES))
        elif not isinstance(self.schedule, StepSizes):
            raise ValueError(
                f"{me} schedule must be a name or Cyclical() and the like, got {self.schedule!r}"
            )
        burn_in = self.burn_in
        whole = isinstance(burn_in, int) and not isinstance(burn_in, bool) and burn_in >= 0
        if (
            burn_in is not None
            and not whole
            and not (isinstance(burn_in, float) and 0 <= burn_in < 1)
        ):
            raise ValueError(
                f"{me} burn_in must be a number of steps or a fraction below 1, got {burn_in!r}"
            )

    def at_mode(self, noise: float, data: Data) -> Self:
        own = super().at_mode(noise, data)
        if self.epochs or self.steps:
            return own
        whole = data.n if prefers_full_batch(data, self.batch_size) else self.batch_size
        return replace(
            own, steps=self._plan(data)[0] // 3, batch_size=whole
        )  # a mode needs a shorter burn-in

    def restricted_to(
        self, names: Sequence[str], *, learns_others: bool = False
    ) -> RestrictedMethod | None:
        return None if learns_others else RestrictedMethod(self, tuple(names))

    @property
    def step_sizes(self) -> StepSizes:
        """The schedule, if it was given by name."""
        return SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule

    def _plan(self, data: Data) -> tuple[int, list[int]]:
        usual = max(1, round(self.effort * max(10_000, 20 * data.batches)))
        steps = self.steps or (usual if self.epochs is None else self.epochs * data.batches)
        return steps, self._kept(steps)

    def _weights(self, steps: int) -> NDArray[np.float64]:
        """The density of the draws over the steps; 0 before the end of the burn-in."""
        sizes = self.step_sizes
        burn_in = sizes.burn_in if self.burn_in is None else self.burn_in
        first = burn_in if isinstance(burn_in, int) else int(burn_in * steps)
        return np.array([sizes.weight(t, steps) if t >= first else 0.0 for t in range(steps)])

    def _kept(self, steps: int) -> list[int]:
        """The steps after which the chains' positions are kept."""
        me, weights = type(self).__name__, self._weights(steps)
        burn_in = self.step_sizes.burn_in if self.burn_in is None else self.burn_in
        usable = np.flatnonzero(weights)
        draws = 100 if self.draws is None else self.draws
        if draws > len(usable):
            if self.draws is None and len(usable):
                return [int(t) for t in usable]
            raise ValueError(
                f"{me} has {len(usable)} steps for {draws} draws (steps={steps}, burn_in={burn_in}); run longer "
                "or request fewer"
            )
        time = np.cumsum(weights[usable]) / weights[usable].sum()
        at = np.searchsorted(time, np.arange(1, draws + 1) / draws - 1e-9)
        k = np.arange(
            draws
        )  # no step twice: where the draws are denser than the steps, adjacent ones
        at = np.minimum(np.maximum.accumulate(at - k) + k, len(usable) - draws + k)
        return [int(t) for t in usable[at]]

    @abstractmethod
    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        """``init`` and ``step`` for n data."""

    def _warm_kernels(self, n: int) -> tuple[Kernel, Kernel]:
        """The kernels during adaptation of the step size: of the first half of the burn-in, and of
        the rest.
        """
        _, step = self._kernel(n)
        return step, step

    def _metric(self, state: Any) -> Tensor | None:
        """The preconditioner G (C, D) of the second kernel, if it has one."""
        return None

    @property
    def _damping(self) -> float:
        """α: the noise of a step is √(α·h)·ξ."""
        return 1.0

    def _mode_steps(self, data: Data) -> int:
        return self._plan(data)[0] if self.lr is None else 0

    def _sampling(
        self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> GradientChains:
        return GradientChains(self, joint, data, start, seed, chains, self._plan(data)[0])


class GradientChains(Sampling):
    """Chains with one minibatch gradient per step."""

    def __init__(
        self,
        method: GradientSampler,
        joint: Joint,
        data: Data,
        start: Tensor,
        seed: int,
        chains: range,
        steps: int,
    ) -> None:
        super().__init__(method, joint, seed, chains)
        self.data, self.steps, self.sizes, self.temperature = (
            data,
            steps,
            method.step_sizes,
            method.temperature,
        )
        begin, self.kernel = method._kernel(data.n)
        self.now = begin(start)
        self.kind = type(self.now)
        self.own = isinstance(data, Rows) and data.batches > 1
        self.check = check_data(joint, data, start)
        self.probe = ChainProbe(joint, data, seed, start)
        self.density: Density | None = None  # of all rows, where one batch has them
        if data.batches == 1 and data.targets() is not None and current().size == 1:
            self.density = joint.density(load_batches(joint, data, start), start, calls=steps)
        self._batches: Iterator[tuple[Batch, float]] | None = None
        self.graded: Kernel = partial(joint, own=self.own)
        if method.compile or start.is_cuda:
            self.graded = Recorded(self.graded, method.compile)
        self.log_joint = start.new_full((len(chains),), math.nan)
        self.lr: float | Tensor = method.rate / data.n if method.lr is None else method.lr
        self.h: float | Tensor = self.lr
        self.bad = torch.full(
            (len(chains),), -1, device=start.device
        )  # the first step that was not finite
        burn_in = int(np.flatnonzero(method._weights(steps))[0])
        self.warm = (
            WarmUp(self, data, burn_in)
            if method.lr is None and burn_in >= method.least_warm
            else None
        )

    @property
    def position(self) -> Tensor:
        position: Tensor = self.now.position
        return position

    def advance(self, step: int) -> None:
        if self.warm is not None and step in self.warm.points:
            self.warm.tune(step)
        log_joint, gradient = (
            self._graded(step) if self.density is None else self.density(self.position)
        )
        noise = self.normal("noise", step)
        self.h = self.lr * self.sizes.factor(step, self.steps)
        hot = self.temperature if self.sizes.noisy(step, self.steps) else 0.0
        kernel = self.kernel if self.warm is None else self.warm.kernel(step)
        now = kernel(self.now, gradient, noise, self.h, hot)
        if self.warm is not None and step < self.warm.end:
            self.now, self.log_joint = self.warm.guarded(now, log_joint), log_joint
            return
        lost = ~(now.position.sum(-1) + log_joint).isfinite() & (self.bad < 0)
        self.bad = torch.where(lost, step, self.bad)
        self.now, self.log_joint = now, log_joint

    def _graded(self, step: int) -> tuple[Tensor, Tensor]:
        """The log joint and its gradient by the batches of a step."""
        if self._batches is None:
            self._batches = self._stream(step)
        (x, y), share = next(self._batches)
        log_joint, gradient = current().mean(self.graded(self.position, x, y), share)
        return log_joint, gradient

    def _stream(self, step: int) -> Iterator[tuple[Batch, float]]:
        """The batches from a step on, (C, M, ...) where each chain has its own; with their share of
        all rows.
        """
        like = self.position
        runs: range | tuple[()] = self.chains if self.own else ()

        def seeds(epoch: int) -> list[int]:
            return [part_seed(self.seed, "epoch", epoch, c) for c in runs] or [
                part_seed(self.seed, "epoch", epoch)
            ]

        for batches in batches_from(step, [self.data] * max(1, len(runs)), seeds, self.check):
            own, shares = zip(*map(current().rows, batches), strict=True)
            yield move(stack_batches(own) if self.own else own[0], like), shares[0]

    def record(self) -> dict[str, float]:
        h = mean_over_chains(self.h) if isinstance(self.h, Tensor) else self.h
        return {"log_joint": mean_over_chains(self.log_joint), "lr": h}

    def state(self) -> dict[str, Any]:
        found = {"now": tuple(self.now), "log_joint": self.log_joint}
        return found if self.warm is None else found | {"warm": self.warm.state(), "lr": self.lr}

    def load(self, state: dict[str, Any]) -> None:
        self.now, self.log_joint = self.kind(*state["now"]), state["log_joint"]
        if self.warm is not None:
            self.lr = state["lr"]
            self.warm.load(state["warm"])

    def lost(self) -> tuple[int, int] | None:
        bad = [(step, chain) for chain, step in enumerate(self.bad.tolist()) if step >= 0]
        return min(bad)[::-1] if bad else None


class WarmUp:
    """The step sizes of chains in the burn-in: see ``GradientSampler``."""

    def __init__(self, chains: GradientChains, data: Data, end: int) -> None:
        self.of, method = chains, chains.method
        self.end, self.half = end, end // 2
        more = {self.end // 8, self.end // 4, self.end} if self.end >= 64 else set()
        self.points = frozenset({0, self.half} | more)
        self.kernels = method._warm_kernels(data.n)
        rows = data.n / data.batches
        few = method._damping * rows / (data.n - rows) if data.batches > 1 else math.inf
        self.share = chains.sizes.peak * min(0.5, few)
        like = chains.position
        self.shrink = torch.ones_like(like[:, :1])
        self.floor = torch.full_like(like[:, 0], -math.inf)
        self.good = chains.now

    def kernel(self, step: int) -> Kernel:
        """The kernel of a step."""
        return self.kernels[step >= self.half]

    def tune(self, step: int) -> None:
        """h = share/λ at the current positions, to which a chain returns if it diverges."""
        of = self.of
        metric = of.method._metric(of.now) if step >= self.half else None
        size = of.probe.curvature(of.position, of.chains.start, metric).unsqueeze(-1)
        usable = size.isfinite() & (size > 0)
        of.lr = torch.where(usable, self.shrink * self.share / size, of.lr)
        value, _, spread = of.probe(of.position)
        self.floor = value - 10 * (of.temperature * typical_fall(of.position.shape[1]) + spread)
        self.good = of.now

    def guarded(self, now: Any, log_joint: Tensor) -> Any:
        """The state after a step; for a divergent chain the last finite one, with half the step
        from then on.
        """
        lost = ~(
            (now.position.sum(-1) + log_joint).isfinite() & (log_joint >= self.floor)
        ).unsqueeze(-1)
        self.shrink = torch.where(lost, 0.5 * self.shrink, self.shrink)
        self.of.lr = torch.where(lost, 0.5 * self.of.lr, self.of.lr)
        parts = zip(self.good, now, strict=True)
        return type(now)(
            *(torch.where(lost, a, b) if isinstance(b, Tensor) else b for a, b in parts)
        )

    def state(self) -> dict[str, Any]:
        return {"shrink": self.shrink, "floor": self.floor, "good": tuple(self.good)}

    def load(self, state: dict[str, Any]) -> None:
        self.shrink, self.floor, self.good = (
            state["shrink"],
            state["floor"],
            self.of.kind(*state["good"]),
        )


@final
@dataclass(frozen=True)
class SGLD(GradientSampler):
    """w ← w + ½·h·∇log p(w, D) + √h·ξ, the minibatch gradient scaled by N/M (Welling & Teh 2011).

    h = ``lr``; stable where h < 4/λ, λ the largest curvature of −log p(w, D).
    """

    rate = 0.01

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        return sgld.init, sgld.step


@final
@dataclass(frozen=True)
class PSGLD(GradientSampler):
    """SGLD with the preconditioner of RMSprop (Li et al. 2016): w ← w + ½·h·G·∇log p(w, D) +
    √(h·G)·ξ.

    G = 1/(``floor`` + √V), V the running mean of (∇log p / N)² with weight ``decay``. The drift Γ
    of a changing G is dropped, as in the paper's experiments (see ``kernels.psgld``): with a given
    ``lr`` the draws have that bias. Without ``lr``, V is estimated by plain SGLD in the first half
    of the burn-in and then fixed, so that Γ = 0 and ``decay`` has no effect.
    """

    decay: float = field(default=0.99, kw_only=True)
    floor: float = field(default=1e-5, kw_only=True)
    rate = 0.001
    least_warm = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("floor")
        if not 0 <= self.decay < 1:
            raise ValueError(f"PSGLD needs 0 <= decay < 1, got {self.decay!r}")

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        return psgld.init, partial(psgld.step, n=n, decay=self.decay, floor=self.floor)

    def _warm_kernels(self, n: int) -> tuple[Kernel, Kernel]:
        return partial(psgld.learn, n=n), partial(psgld.fixed, floor=self.floor)

    def _metric(self, state: Any) -> Tensor | None:
        return psgld.preconditioner(state, self.floor)


@final
@dataclass(frozen=True)
class SGHMC(GradientSampler):
    """v ← (1 − α)·v + ½·h·∇log p(w, D) + √(α·h)·ξ;  w ← w + v (Chen, Fox & Guestrin 2014).

    α = ``friction`` (1 is SGLD). h = ``lr``; the chain moves like SGLD with h/α, and is stable
    where h < 4·(2 − α)/λ.
    """

    friction: float = field(default=0.1, kw_only=True)
    rate = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction <= 1:
            raise ValueError(f"SGHMC needs 0 < friction <= 1, got {self.friction!r}")

    @property
    def _damping(self) -> float:
        return self.friction

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        return sghmc.init, partial(sghmc.step, friction=self.friction)
