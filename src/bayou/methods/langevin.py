"""Stochastic-gradient samplers: SGLD, its preconditioned form, and SGHMC."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bayou.inference.method import prefers_full_batch
from bayou.inference.restricted import RestrictedMethod
from bayou.inference.step_sizes import SCHEDULES, Constant, Cyclical, Decaying, StepSizes
from bayou.kernels import psgld, sghmc, sgld
from bayou.methods.gradient_chains import GradientChains, Kernel
from bayou.methods.mcmc import MarkovChains, Sampler
from bayou.training.data import Data

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


@dataclass(frozen=True, kw_only=True)
class GradientSampler(Sampler):
    """The base class of samplers with minibatch gradients.

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
        effort: multiplies this default length; 1 by default.
        batch_size: rows M of a minibatch; 128 by default.
        lr: the first step size h; None (default) finds it in the burn-in (see
            ``methods.langevin.GradientSampler``).
        schedule: "constant" (default), "decaying", "cyclical", or ``Decaying(...)``,
            ``Cyclical(...)``.
        burn_in: steps before the first draw, as a number or as a fraction of all; None (default) is
            half of them, none for cyclical steps.
        draws: how many draws of each chain to keep, evenly spread after the burn-in; None (default)
            is 100.
        compile: use torch.compile for the gradient; False by default. On a GPU it is one CUDA graph
            in any case.
    """

    epochs: int | None = None
    steps: int | None = None
    effort: float = 1.0
    batch_size: int = 128
    lr: float | None = None
    schedule: str | StepSizes = "constant"
    burn_in: float | None = None
    draws: int | None = None
    compile: bool = field(default=False, compare=False)

    chains_type: ClassVar[type[MarkovChains]] = GradientChains
    shares_rows: ClassVar[bool] = True
    without_noise: ClassVar[bool] = True
    rate: ClassVar[float]  # N·lr without adaptation of the step size
    least_warm: ClassVar[int] = 0  # steps of burn-in needed for adaptation

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}"
            )
        self._check_whole("epochs", "steps", "draws")
        self._check_positive("lr", "effort")
        if isinstance(self.schedule, str):
            self._check_choice("schedule", list(SCHEDULES))
        elif not isinstance(self.schedule, StepSizes):
            raise ValueError(
                f"{name} schedule must be a name or Cyclical() and the like, got {self.schedule!r}"
            )
        if isinstance(self.burn_in, int):
            self._check_whole("burn_in", least=0)
        else:  # a fraction of the steps
            self._check_interval("[0, 1)", "burn_in")

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method from the network as it is, with a shorter burn-in."""
        method = super().at_mode(noise, data)
        if self.epochs or self.steps:
            return method
        batch_size = data.n if prefers_full_batch(data, self.batch_size) else self.batch_size
        return replace(method, steps=self._plan(data)[0] // 3, batch_size=batch_size)

    def restricted_to(
        self, names: Sequence[str], *, learns_others: bool = False
    ) -> RestrictedMethod | None:
        """Return this method over some tensors, with the others as they are.

        Args:
            names: the tensors.
            learns_others: whether the others are learned as points, which is not possible.
        """
        return None if learns_others else RestrictedMethod(self, tuple(names))

    @property
    def step_sizes(self) -> StepSizes:
        """Return the schedule, also if it was given by name."""
        return SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule

    @property
    def _burn_in(self) -> float:
        """Return the burn-in, or that of the schedule."""
        return self.step_sizes.burn_in if self.burn_in is None else self.burn_in

    def _plan(self, data: Data) -> tuple[int, list[int]]:
        """Return the number of steps, and those after which positions are kept."""
        if self.steps:
            steps = self.steps
        elif self.epochs is not None:
            steps = self.epochs * data.batches
        else:
            steps = max(1, round(self.effort * max(10_000, 20 * data.batches)))
        return steps, self._draw_steps(steps)

    def draw_density(self, steps: int) -> NDArray[np.float64]:
        """Return the density of the draws over the steps; 0 before the end of the burn-in.

        Args:
            steps: the number of steps.
        """
        sizes = self.step_sizes
        burn_in = self._burn_in
        first = burn_in if isinstance(burn_in, int) else int(burn_in * steps)
        return np.array([sizes.weight(t, steps) if t >= first else 0.0 for t in range(steps)])

    def _draw_steps(self, steps: int) -> list[int]:
        """Return the steps after which the positions of the chains are kept.

        No step is kept twice: where the draws are denser than the steps, adjacent ones are kept.
        """
        density = self.draw_density(steps)
        usable = np.flatnonzero(density)
        draws = 100 if self.draws is None else self.draws
        if draws > len(usable):
            if self.draws is None and len(usable):
                return [int(t) for t in usable]
            raise ValueError(
                f"{type(self).__name__} has {len(usable)} steps for {draws} draws (steps={steps}, "
                f"burn_in={self._burn_in}); run longer or request fewer"
            )
        time = np.cumsum(density[usable]) / density[usable].sum()
        index = np.searchsorted(time, np.arange(1, draws + 1) / draws - 1e-9)
        k = np.arange(draws)
        index = np.minimum(np.maximum.accumulate(index - k) + k, len(usable) - draws + k)
        return [int(t) for t in usable[index]]

    @abstractmethod
    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        """Return ``init`` and ``step`` for n data."""

    def _warm_kernels(self, n: int) -> tuple[Kernel, Kernel]:
        """Return the kernels of the first and the second half of an adaptive burn-in."""
        _, step = self._kernel(n)
        return step, step

    def _preconditioner(self, state: Any) -> Tensor | None:
        """Return the preconditioner G (C, D) of the second kernel, if it has one."""
        return None

    @property
    def _damping(self) -> float:
        """Return α: the noise of a step is √(α·h)·ξ."""
        return 1.0

    def _mode_steps(self, data: Data) -> int:
        """Return the number of steps towards the mode before the chains start."""
        return self._plan(data)[0] if self.lr is None else 0


@final
@dataclass(frozen=True)
class SGLD(GradientSampler):
    """Stochastic gradient Langevin dynamics: gradient steps with noise, which sample the posterior.

        w ← w + ½·h·∇log p(w, D) + √h·ξ,    ξ ~ N(0, I)

    The gradient of a minibatch of M rows is scaled by N/M. There is no Metropolis test: the bias of
    the draws grows with h. h = ``lr``; stable where h < 4/λ, λ the largest curvature of
    −log p(w, D). Without ``lr`` every chain adapts h in its burn-in.

    Args:
        steps: how many steps, burn-in included; None (default): 10,000 or 20 epochs, whichever is
            more.
        lr: the first step size h; None (default) finds it in the burn-in.
        schedule: "constant" (default), "decaying", "cyclical", or ``Decaying(...)``,
            ``Cyclical(...)``.
        batch_size: rows M of a minibatch; 128 by default.
        burn_in: steps before the first draw, as a number or as a fraction of all; None (default) is
            half of them, none for cyclical steps.
        draws: how many draws of each chain to keep, evenly spread after the burn-in; None (default)
            is 100.
        chains: the number of parallel chains; 4 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of chains · draws functions, with diagnostics in
        ``posterior.mixing``.

    Raises:
        DivergenceError: if a chain is not finite.
        ValueError: for more draws than steps after the burn-in, and settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.SGLD(steps=40, draws=5, chains=2)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    10

    Paper: Welling & Teh 2011, https://www.stats.ox.ac.uk/~teh/research/compstats/WelTeh2011a.pdf.
    """

    rate: ClassVar[float] = 0.01

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        """Return ``init`` and ``step``."""
        return sgld.init, sgld.step


@final
@dataclass(frozen=True)
class PSGLD(GradientSampler):
    """Preconditioned SGLD, with the preconditioner of RMSprop.

        w ← w + ½·h·G·∇log p(w, D) + √(h·G)·ξ,    G = 1/(floor + √V)

    V is the running mean of (∇log p / N)². The drift Γ of a changing G is dropped, as in the
    paper's experiments (see ``kernels.psgld``): with a given ``lr`` the draws have that bias.
    Without ``lr``, V is estimated by plain SGLD in the first half of the burn-in and then fixed, so
    that Γ = 0 and ``decay`` has no effect.

    Args:
        decay: the weight of the past in V; 0.99 by default.
        floor: a number added to √V; 1e-5 by default.
        steps: how many steps, burn-in included; None (default): 10,000 or 20 epochs, whichever is
            more.
        lr: the first step size h; None (default) finds it in the burn-in.
        draws: how many draws of each chain to keep; None (default) is 100.
        chains: the number of parallel chains; 4 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of chains · draws functions.

    Raises:
        DivergenceError: if a chain is not finite.
        ValueError: for settings out of range.

    Paper: Li et al. 2016, https://arxiv.org/abs/1512.07666.
    """

    decay: float = field(default=0.99, kw_only=True)
    floor: float = field(default=1e-5, kw_only=True)
    rate: ClassVar[float] = 0.001
    least_warm = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("floor")
        self._check_interval("[0, 1)", "decay")

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        """Return ``init`` and ``step`` for n data."""
        return psgld.init, partial(psgld.step, n=n, decay=self.decay, floor=self.floor)

    def _warm_kernels(self, n: int) -> tuple[Kernel, Kernel]:
        """Return the kernels that estimate V, and that keep it."""
        return partial(psgld.learn, n=n), partial(psgld.step_with_fixed_scale, floor=self.floor)

    def _preconditioner(self, state: Any) -> Tensor | None:
        """Return G (C, D)."""
        return psgld.preconditioner(state, self.floor)


@final
@dataclass(frozen=True)
class SGHMC(GradientSampler):
    """Stochastic gradient Hamiltonian Monte Carlo: SGLD with momentum.

        v ← (1 − α)·v + ½·h·∇log p(w, D) + √(α·h)·ξ,    w ← w + v

    h = ``lr``; the chain moves like SGLD with h/α, and is stable where h < 4·(2 − α)/λ.

    Args:
        friction: α, 0.1 by default; 1 is SGLD.
        steps: how many steps, burn-in included; None (default): 10,000 or 20 epochs, whichever is
            more.
        lr: the first step size h; None (default) finds it in the burn-in.
        draws: how many draws of each chain to keep; None (default) is 100.
        chains: the number of parallel chains; 4 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of chains · draws functions.

    Raises:
        DivergenceError: if a chain is not finite.
        ValueError: for settings out of range.

    Paper: Chen, Fox & Guestrin 2014, https://arxiv.org/abs/1402.4102.
    """

    friction: float = field(default=0.1, kw_only=True)
    rate: ClassVar[float] = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_interval("(0, 1]", "friction")

    @property
    def _damping(self) -> float:
        """Return α."""
        return self.friction

    def _kernel(self, n: int) -> tuple[Kernel, Kernel]:
        """Return ``init`` and ``step``."""
        return sghmc.init, partial(sghmc.step, friction=self.friction)
