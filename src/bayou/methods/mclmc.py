"""Microcanonical Langevin Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from bayou.kernels import Joint, hmc, mclmc
from bayou.kernels.hmc import Density, HamiltonianState, Info
from bayou.kernels.mclmc import MicrocanonicalState
from bayou.methods.hamiltonian import HamiltonianChains, HamiltonianSampler
from bayou.methods.mcmc import MarkovChains
from bayou.metrics.chains import MIN_DRAWS, ess_mean
from bayou.training.data import Data, batches_from
from bayou.training.graphs import Recorded
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.seeds import part_seed

LENGTH_COORDINATES = 64  # whose effective sample size determines the decoherence length
NOISE_BATCHES = 32  # minibatches that estimate the noise of a gradient
# h²·λ, to which the step size h = ε/√D is limited; λ is the largest variance of a scaled gradient
MAX_NOISE = 0.1
# noise of gradients in its largest direction, in units of that of the refreshments
MAX_NOISE_RATIO = 1.0
LENGTHS_PER_ESS = 0.4  # L in units of the path between two independent draws (Robnik et al. 2023)


class MicrocanonicalChains(HamiltonianChains):
    """Chains with directions (C, D) and decoherence lengths L/√D (C,).

    Args:
        method: the settings.
        joint: log p(w, D).
        data: all rows.
        start: the initial positions, (C, D).
        seed: of the noise.
        chains: the numbers of the chains.
    """

    method: MCLMC

    def __init__(
        self, method: MCLMC, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> None:
        if start.shape[-1] < 2:
            raise ValueError(f"MCLMC needs two weights or more, got {start.shape[-1]}; use HMC()")
        super().__init__(method, joint, data, start, seed, chains)
        self.root_dimension: float = start.shape[-1] ** 0.5
        self.learns_length: bool = method.length is None and not method.adjusted
        self.velocity: Tensor = mclmc.unit(self.normal("direction", 0))
        self.length: Tensor = torch.full_like(
            start[:, 0], 2.0 if method.length is None else method.length
        )
        self.trail: list[Tensor] = []  # some coordinates of a window of the warm-up
        self.log_joint: Callable[..., tuple[Tensor, ...]] = joint
        if method.stochastic and (method.compile or start.is_cuda):
            self.log_joint = Recorded(joint, method.compile)
        self._batches: Iterator[tuple[Batch, ...]] | None = None
        # λ (C,), of the scaled gradient in its noisiest direction
        self.gradient_variance: Tensor | None = None

    def transition(
        self, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Return the chains after the steps between two draws."""
        scales = inverse_mass.sqrt()
        state = MicrocanonicalState(*self.current, self.velocity)
        if self.method.adjusted:
            state, info = self._adjusted_transition(state, step, step_size, scales)
        else:
            state, info = self._unadjusted_transition(state, step, step_size, scales)
        self.velocity = state.velocity
        return HamiltonianState(*state[:3]), info

    def _adjusted_transition(
        self, state: MicrocanonicalState, step: int, step_size: Tensor, scales: Tensor
    ) -> tuple[MicrocanonicalState, Info]:
        """Make a trajectory with a Metropolis test.

        A random number of steps avoids periodic trajectories; in the warm-up they can be much
        shorter than L.
        """
        u = self.uniform(step, "accept", count=2)
        max_steps = 10 * self.method.steps
        steps = (2 * u[:, 1] * self.length / step_size).ceil().clamp(1, max_steps)
        noise = self.normal("velocity", step)
        distance = self.root_dimension * step_size
        return mclmc.adjusted_step(state, self.density, noise, u[:, 0], distance, scales, steps)

    def _unadjusted_transition(
        self, state: MicrocanonicalState, step: int, step_size: Tensor, scales: Tensor
    ) -> tuple[MicrocanonicalState, Info]:
        """Make ``steps`` steps, on one minibatch each if ``stochastic``.

        Dual averaging drives a quantity that falls with the step size to ``accept``: the info has
        one that is equal to it at the target of the energy error.
        """
        method = self.method
        length = self.length
        if method.stochastic and method.adapt:
            step_size = torch.minimum(step_size, self.max_step_size())
            length = self.limit_length(step_size)
        densities = method.steps if method.stochastic else 1
        error = torch.zeros_like(step_size)
        is_divergent = torch.zeros_like(step_size, dtype=torch.bool)
        density: Density = self.density
        for number in range(densities):
            if method.stochastic:
                density = self.minibatch(step * densities + number)
                state = MicrocanonicalState(*hmc.init(state.position, density), state.velocity)
            state, density_error, diverges = mclmc.step(
                state,
                density,
                self.noise(step, number),
                self.root_dimension * step_size,
                scales,
                self.root_dimension * length,
                method.steps // densities,
            )
            error = error + density_error / densities
            is_divergent = is_divergent | diverges
        quality = method.accept ** (error / method.energy_error)
        gradients = torch.full_like(error, method._max_leapfrogs)
        return state, Info(quality, is_divergent, gradients)

    def noise(self, step: int, first: int) -> Callable[[int], Tensor]:
        """Return the noise of the refreshments in a transition, by their numbers.

        Args:
            step: the number of the transition.
            first: the number of its first refreshment.
        """
        return lambda i: self.normal(f"velocity{first + i}", step)

    def minibatch(self, number: int) -> Density:
        """Return the log density with the likelihood of one minibatch, scaled to all rows.

        Args:
            number: of the first minibatch, where a run continues; the next one follows.
        """
        if self._batches is None:
            seed = self.seed
            self._batches = batches_from(
                number, [self.data], lambda epoch: [part_seed(seed, "epoch", epoch)], None
            )
        return self._density_of(next(self._batches)[0])

    def _density_of(self, batch: Batch) -> Density:
        """Return the log density with the likelihood of a batch, scaled to all rows."""
        x, y = move(batch, self.position)

        def density(w: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = self.log_joint(w, x, y)
            return value / self.method.temperature, gradient / self.method.temperature

        return density

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Make one transition, and learn the length in the warm-up."""
        method = self.method
        variance = self.adaptation.inverse_mass
        is_first = self.gradient_variance is None or step == method.warmup
        if method.stochastic and is_first:
            self.gradient_variance = self.measure_gradient_noise(step)
        super().advance(step)
        if method.stochastic and method.adapt:
            self.step_size: Tensor = torch.minimum(self.step_size, self.max_step_size())
        if method.stochastic and step in self.window_ends:
            self.gradient_variance = self.measure_gradient_noise(step + 1)
        if self.learns_length and step in self.mass_transitions:
            stride = max(1, self.position.shape[-1] // LENGTH_COORDINATES)
            self.trail.append(self.position[:, ::stride])
        if self.learns_length and step in self.window_ends and len(self.trail) >= MIN_DRAWS:
            self._learn_length((variance / self.adaptation.inverse_mass).mean(-1).sqrt())

    def measure_gradient_noise(self, step: int) -> Tensor:
        """Return λ = max_v Var[v·g] of the scaled gradients g of minibatches: (C,).

        The direction v comes from one half of the minibatches and the variance from the other, so
        that λ is not too large where there are more weights than minibatches.

        Args:
            step: decides the minibatches.
        """
        gradients = torch.stack(self._minibatch_gradients(step), 1)
        scaled = gradients * self.adaptation.inverse_mass.sqrt().unsqueeze(1)  # (C, batches, D)
        halves = scaled[:, ::2], scaled[:, 1::2]
        centered = [half - half.mean(1, keepdim=True) for half in halves]
        variances = []
        for first, second in (centered, centered[::-1]):
            coefficients = torch.linalg.eigh(first @ first.mT).eigenvectors[..., -1:]
            direction = mclmc.unit((first.mT @ coefficients).squeeze(-1))
            projections = (second @ direction.unsqueeze(-1)).squeeze(-1)
            variances.append(projections.square().sum(1) / (projections.shape[1] - 1))
        mean = torch.stack(variances).mean(0).nan_to_num(0.0)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny)

    def _minibatch_gradients(self, step: int) -> list[Tensor]:
        """Return the gradients of some minibatches at the positions of the chains, (C, D) each."""
        gradients: list[Tensor] = []
        epoch = 0
        while True:
            for batch in self.data.epoch(part_seed(self.seed, "gradient noise", step, epoch)):
                gradients.append(self._density_of(batch)(self.position)[1])
                if len(gradients) == NOISE_BATCHES:
                    return gradients
            epoch += 1

    def _variance(self) -> Tensor:
        """Return λ, which has been measured."""
        if self.gradient_variance is None:
            raise RuntimeError("the noise of the gradients has not been measured")
        return self.gradient_variance

    def max_step_size(self) -> Tensor:
        """Return the step size h at which h²·λ is MAX_NOISE: (C,)."""
        return (MAX_NOISE / self._variance()).sqrt()

    def limit_length(self, step_size: Tensor) -> Tensor:
        """Return L/√D, short enough that refreshments have the noise of gradients or more: (C,).

        A step of length ε = √D·h changes the direction by ν² = 2ε/(L·D) in every coordinate, and
        noise of the gradient by ε²·λ/(D − 1)² along its largest direction. A given length is not
        changed.

        Args:
            step_size: h, (C,).
        """
        variance = self._variance()
        if self.method.length is not None:
            return self.length
        size = self.position.shape[-1]
        max_length = 2 * MAX_NOISE_RATIO * ((size - 1) / size) ** 2 / (variance * step_size)
        return torch.maximum(torch.minimum(self.length, max_length), step_size)

    def _learn_length(self, units: Tensor) -> None:
        """Set L = 0.4·ε·steps·K/ESS for each chain, by the mean ESS of a window of K transitions.

        Args:
            units: a length in the scales of the window, in those that follow, (C,).
        """
        draws = torch.stack(self.trail, 1)
        chain_ess = [ess_mean(chain.unsqueeze(0)).nanmean() for chain in draws]
        ess = torch.stack(chain_ess).to(self.step_size)
        path = self.step_size * units * self.method.steps * len(self.trail)
        self.length = torch.maximum(LENGTHS_PER_ESS * path / ess, self.step_size * units)
        self.trail = []

    def record(self) -> dict[str, float]:
        """Return numbers of the last transition."""
        numbers = super().record()
        if not self.method.adjusted:
            del numbers["accept"]  # there is no Metropolis test
        if self.gradient_variance is None:
            return numbers | {"length": float(self.length.mean())}
        length = self.limit_length(self.step_size) if self.method.adapt else self.length
        noise = self.step_size.square() * self.gradient_variance
        return numbers | {"length": float(length.mean()), "gradient_noise": float(noise.max())}

    def state(self) -> dict[str, Any]:
        """Return the state for the next transition."""
        return super().state() | {
            "velocity": self.velocity,
            "length": self.length,
            "trail": tuple(self.trail),
            "gradient_variance": self.gradient_variance,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""
        super().load(state)
        self.velocity = state["velocity"]
        self.length = state["length"]
        self.trail = list(state["trail"])
        self.gradient_variance = state["gradient_variance"]


@final
@dataclass(frozen=True)
class MCLMC(HamiltonianSampler):
    """Microcanonical Langevin Monte Carlo: a direction of constant speed that follows the gradient.

        dw/dt = u,   du/dt = (I − u·uᵀ)·∇log p(w, D)/(D − 1),   ‖u‖ = 1

    Each of ``steps`` steps refreshes the direction u partially, so that it is new after the
    decoherence length L (``bayou.kernels.mclmc``). Without a Metropolis test the draws have a bias
    that grows with the energy error: the warm-up finds the step size whose variance per dimension,
    Var(ΔE)/D, is ``energy_error``. ``start=Ensemble(chains)`` starts one chain at each member
    (MILE, Sommer et al. 2025). ``step_size`` is ε/√D, the distance that a coordinate moves.

    With ``stochastic`` each step has a new minibatch of ``batch_size`` rows, its log likelihood
    scaled to all N. Noise of the gradient that is equal in all directions is a further refreshment.
    Any other makes the directions with more noise too wide and the others too narrow: a bias that
    falls with ``step_size`` and is no part of ``energy_error``. With λ the largest variance of a
    scaled gradient, the warm-up therefore limits h = ``step_size`` to h²·λ ≤ 0.1, and an L that is
    not given so that noise of refreshments is at least as large. ``history`` has h²·λ as
    ``gradient_noise``, and ``posterior.checks`` warns where it is large.

    Args:
        adjusted: each draw is a whole trajectory of length L with a Metropolis test: exact, with
            the step size adapted to the acceptance rate ``accept``; False by default.
        steps: steps between two draws, with two gradients each; unused if ``adjusted``; 10 by
            default.
        length: L/√D in coordinates scaled by the adapted standard deviations. None (default): 2 if
            ``adjusted``, else from the effective sample size in the warm-up.
        energy_error: the target of Var(ΔE)/D; unused if ``adjusted``; 0.02 by default. 5e-4, as
            published, is for long chains.
        stochastic: gradients of minibatches, three in a step; not with ``adjusted``; False by
            default.
        compile: use torch.compile for these; False by default. On a GPU each is one CUDA graph in
            any case.
        draws: how many draws of each chain to keep; 1,000 by default.
        warmup: transitions before the first draw; 1,000 by default.
        chains: the number of parallel chains; 4 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of chains · draws functions, with diagnostics in
        ``posterior.mixing``.

    Raises:
        DivergenceError: if a chain is not finite.
        ValueError: for fewer than two weights, where a direction cannot turn.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.MCLMC(draws=5, warmup=5, chains=2)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    10

    Paper: Robnik et al. 2023, https://arxiv.org/abs/2212.08549.
    """

    adjusted: bool = field(default=False, kw_only=True)
    steps: int = field(default=10, kw_only=True)
    length: float | None = field(default=None, kw_only=True)
    energy_error: float = field(default=0.02, kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    compile: bool = field(default=False, kw_only=True, compare=False)

    chains_type: ClassVar[type[MarkovChains]] = MicrocanonicalChains

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("steps")
        self._check_positive("energy_error", "length")
        if self.stochastic and self.adjusted:
            raise ValueError(
                "a Metropolis test needs the gradients of all rows: "
                "stochastic or adjusted, not both"
            )

    @property
    def _max_leapfrogs(self) -> int:
        """Return the number of gradients of one transition."""
        return (mclmc.GRADIENTS + self.stochastic) * self.steps

    def _gradients_of_all_rows(self, data: Data) -> int:
        """Return the largest number of gradients with all rows, which may be traced."""
        return 0 if self.stochastic else super()._gradients_of_all_rows(data)
