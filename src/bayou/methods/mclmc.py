"""Microcanonical Langevin Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from bayou.kernels import Joint, hmc, mclmc
from bayou.kernels.hmc import Density
from bayou.methods.hmc import HamiltonianChains, HamiltonianSampler
from bayou.metrics.chains import MIN_DRAWS, ess_mean
from bayou.training.data import Data, batches_from
from bayou.training.graphs import Recorded
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.seeds import part_seed

TUNED_COORDINATES = 64  # whose effective sample size determines the decoherence length
NOISE_BATCHES = 32  # minibatches that estimate the noise of a gradient
MAX_NOISE = 0.1  # h²·λ, to which the step size h = ε/√D is limited; λ the largest variance of a scaled gradient
MAX_NOISE_RATIO = (
    1.0  # noise of gradients in its largest direction, in units of that of the refreshments
)
LENGTHS_PER_ESS = 0.4  # L in units of the path between two independent draws (Robnik et al. 2023)


@final
@dataclass(frozen=True)
class MCLMC(HamiltonianSampler):
    """Microcanonical Langevin Monte Carlo (Robnik et al. 2023; ``bayou.kernels.mclmc``).

    A direction turns along the gradient while the position moves at constant speed; each of
    ``steps`` steps refreshes it partially, so that it is new after the decoherence length L.
    Without a Metropolis test the draws have a bias that
    grows with the energy error: the warm-up finds the step size whose variance per dimension,
    Var(ΔE)/D, is ``energy_error``. ``start=Ensemble(chains)`` starts one chain at each member
    (MILE, Sommer et al. 2025).

    With ``stochastic`` each step has a new minibatch of ``batch_size`` rows, its log likelihood
    scaled to all N. Noise of the gradient that is equal in all directions is a further refreshment.
    Any other makes the directions with more noise too wide and the others too narrow: a bias that
    falls with ``step_size`` and is no part of ``energy_error``. With λ the largest variance of a
    scaled gradient, the warm-up therefore limits h = ``step_size`` to h²·λ ≤ 0.1, and an L that is
    not given so that noise of refreshments is at least as large. ``history`` has h²·λ as
    ``gradient_noise``, and ``posterior.checks`` warns where it is large.

    The other settings are those of ``HamiltonianSampler``; ``step_size`` is ε/√D, the distance that
    a coordinate moves.

    Args:
        adjusted: each draw is a whole trajectory of length L with a Metropolis test: exact, with
            the step size adapted to the acceptance rate ``accept``.
        steps: steps between two draws, with two gradients each; unused if ``adjusted``.
        length: L/√D in coordinates scaled by the adapted standard deviations. None: 2 if
            ``adjusted``, else from the effective sample size in the warm-up.
        energy_error: the target of Var(ΔE)/D; unused if ``adjusted``. 5e-4, as published, is for
            long chains.
        stochastic: gradients of minibatches, three in a step; not with ``adjusted``.
        compile: use torch.compile for these. On a GPU each is one CUDA graph in any case.

    Raises:
        ValueError: for fewer than two weights, where a direction cannot turn.

    >>> MCLMC(chains=2, draws=500).adjusted
    False
    """

    adjusted: bool = field(default=False, kw_only=True)
    steps: int = field(default=10, kw_only=True)
    length: float | None = field(default=None, kw_only=True)
    energy_error: float = field(default=0.02, kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    compile: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("steps")
        self._check_positive("energy_error")
        if self.length is not None:
            self._check_positive("length")
        if self.stochastic and self.adjusted:
            raise ValueError(
                "a Metropolis test needs the gradients of all rows: stochastic or adjusted, not both"
            )

    @property
    def _most_leapfrogs(self) -> int:
        return (mclmc.GRADIENTS + self.stochastic) * self.steps

    def _gradients_of_all_rows(self, data: Data) -> int:
        return 0 if self.stochastic else super()._gradients_of_all_rows(data)

    def _sampling(
        self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> MicrocanonicalChains:
        return MicrocanonicalChains(self, joint, data, start, seed, chains)

    def _transition(
        self, chains: HamiltonianChains, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[hmc.State, hmc.Info]:
        assert isinstance(chains, MicrocanonicalChains)
        assert chains.now is not None
        state, scales = mclmc.State(*chains.now, chains.velocity), inverse_mass.sqrt()
        root = state.position.shape[-1] ** 0.5
        if self.adjusted:
            u = chains.uniform(step, "accept", count=2)
            # a random number of steps avoids periodic trajectories; in the warm-up they can be much
            # shorter than L
            steps = (2 * u[:, 1] * chains.length / step_size).ceil().clamp(1, 10 * self.steps)
            state, info = mclmc.adjusted_step(
                state,
                chains.density,
                chains.normal("velocity", step),
                u[:, 0],
                root * step_size,
                scales,
                steps,
            )
        else:
            length = chains.length
            if self.stochastic and self.adapt:
                step_size = torch.minimum(step_size, chains.most_step_size())
                length = chains.limited_length(step_size)
            parts = self.steps if self.stochastic else 1  # with a density each
            error, divergent = (
                torch.zeros_like(step_size),
                torch.zeros_like(step_size, dtype=torch.bool),
            )
            for part in range(parts):
                density: Density = chains.density
                if self.stochastic:
                    density = chains.minibatch(step * parts + part)
                    state = mclmc.State(*hmc.init(state.position, density), state.velocity)
                state, each, lost = mclmc.step(
                    state, density, chains.noise(step, part), root * step_size, scales, root * length,
                    self.steps // parts,
                )  # fmt: skip
                error, divergent = error + each / parts, divergent | lost
            # dual averaging drives a quantity that falls with the step size to ``accept``: it is
            # that at the target
            quality = self.accept ** (error / self.energy_error)
            info = hmc.Info(quality, divergent, torch.full_like(error, self._most_leapfrogs))
        chains.velocity = state.velocity
        return hmc.State(*state[:3]), info


class MicrocanonicalChains(HamiltonianChains):
    """Chains with directions (C, D) and decoherence lengths L/√D (C,)."""

    def __init__(
        self, method: MCLMC, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> None:
        if start.shape[-1] < 2:
            raise ValueError(f"MCLMC needs two weights or more, got {start.shape[-1]}; use HMC()")
        super().__init__(method, joint, data, start, seed, chains)
        self.tunes = method.length is None and not method.adjusted
        self.velocity = mclmc.unit(self.normal("direction", 0))
        self.length = torch.full_like(start[:, 0], 2.0 if method.length is None else method.length)
        self.trail: list[Tensor] = []  # some coordinates of a window of the warm-up
        self.data = data
        self.graded: Callable[..., tuple[Tensor, ...]] = joint
        if method.stochastic and (method.compile or start.is_cuda):
            self.graded = Recorded(joint, method.compile)
        self._batches: Iterator[tuple[Batch, ...]] | None = None
        self.gradient_variance: Tensor | None = (
            None  # λ (C,), of the scaled gradient in its noisiest direction
        )

    def noise(self, step: int, first: int) -> Callable[[int], Tensor]:
        """The noise of the refreshments in a transition, from the ``first`` on."""
        return lambda i: self.normal(f"velocity{first + i}", step)

    def minibatch(self, number: int) -> Density:
        """The log density with the likelihood of one minibatch, scaled to all rows."""
        if self._batches is None:
            seed = self.seed
            self._batches = batches_from(
                number, [self.data], lambda epoch: [part_seed(seed, "epoch", epoch)], None
            )
        return self._density_of(next(self._batches)[0])

    def _density_of(self, batch: Batch) -> Density:
        x, y = move(batch, self.position)

        def density(w: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = self.graded(w, x, y)
            return value / self.method.temperature, gradient / self.method.temperature

        return density

    @torch.no_grad()
    def advance(self, step: int) -> None:
        variance = self.tuned.inverse_mass
        if self.method.stochastic and (
            self.gradient_variance is None or step == self.method.warmup
        ):
            self.gradient_variance = self.measure_gradient_noise(step)
        super().advance(step)
        if self.method.stochastic and self.method.adapt:
            self.used = torch.minimum(self.used, self.most_step_size())
        if self.method.stochastic and step in self.window_ends:
            self.gradient_variance = self.measure_gradient_noise(step + 1)
        if self.tunes and step in self.adapting:
            stride = max(1, self.position.shape[-1] // TUNED_COORDINATES)
            self.trail.append(self.position[:, ::stride])
        if self.tunes and step in self.window_ends and len(self.trail) >= MIN_DRAWS:
            self._tune((variance / self.tuned.inverse_mass).mean(-1).sqrt())

    def measure_gradient_noise(self, step: int) -> Tensor:
        """Return λ = max_v Var[v·g] of the scaled gradients g of minibatches at the positions of
        the chains: (C,).

        The direction v comes from one half of the minibatches and the variance from the other, so
        that λ is not too large where there are more weights than minibatches.
        """
        gradients: list[Tensor] = []
        epoch = 0
        while len(gradients) < NOISE_BATCHES:
            for batch in self.data.epoch(part_seed(self.seed, "gradient noise", step, epoch)):
                gradients.append(self._density_of(batch)(self.position)[1])
                if len(gradients) == NOISE_BATCHES:
                    break
            epoch += 1
        scaled = torch.stack(gradients, 1) * self.tuned.inverse_mass.sqrt().unsqueeze(
            1
        )  # (C, batches, D)
        halves = scaled[:, ::2], scaled[:, 1::2]
        centered = [half - half.mean(1, keepdim=True) for half in halves]
        variances = []
        for known, other in (centered, centered[::-1]):
            coefficients = torch.linalg.eigh(known @ known.mT).eigenvectors[..., -1:]
            direction = mclmc.unit((known.mT @ coefficients).squeeze(-1))
            along = (other @ direction.unsqueeze(-1)).squeeze(-1)
            variances.append(along.square().sum(1) / (along.shape[1] - 1))
        mean = torch.stack(variances).mean(0).nan_to_num(0.0)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny)

    def most_step_size(self) -> Tensor:
        """Return the step size h at which h²·λ is MAX_NOISE: (C,)."""
        assert self.gradient_variance is not None
        return (MAX_NOISE / self.gradient_variance).sqrt()

    def limited_length(self, step_size: Tensor) -> Tensor:
        """Return L/√D, at most so long that refreshments have MAX_NOISE_RATIO⁻¹ times the noise of
        gradients: (C,).

        A step of length ε = √D·h changes the direction by ν² = 2ε/(L·D) in every coordinate, and
        noise of the gradient by ε²·λ/(D − 1)² along its largest direction. A given length is not
        changed.
        """
        assert self.gradient_variance is not None
        if self.method.length is not None:
            return self.length
        size = self.position.shape[-1]
        most = 2 * MAX_NOISE_RATIO * ((size - 1) / size) ** 2 / (self.gradient_variance * step_size)
        return torch.maximum(torch.minimum(self.length, most), step_size)

    def _tune(self, units: Tensor) -> None:
        """L = 0.4·ε·steps·K/ESS, chain by chain, with the mean ESS of the window of K transitions.

        ``units`` (C,): a length in the scales of the window, in those that follow.
        """
        draws = torch.stack(self.trail, 1)
        ess = torch.stack([ess_mean(chain.unsqueeze(0)).nanmean() for chain in draws]).to(self.used)
        path = self.used * units * self.method.steps * len(self.trail)
        self.length = torch.maximum(LENGTHS_PER_ESS * path / ess, self.used * units)
        self.trail = []

    def record(self) -> dict[str, float]:
        found = super().record()
        if not self.method.adjusted:
            del found["accept"]  # there is no Metropolis test
        if self.gradient_variance is None:
            return found | {"length": float(self.length.mean())}
        length = self.limited_length(self.used) if self.method.adapt else self.length
        noise = self.used.square() * self.gradient_variance
        return found | {"length": float(length.mean()), "gradient_noise": float(noise.max())}

    def state(self) -> dict[str, Any]:
        own = {"velocity": self.velocity, "length": self.length, "trail": tuple(self.trail)}
        return super().state() | own | {"gradient_variance": self.gradient_variance}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.velocity, self.length, self.trail = (
            state["velocity"],
            state["length"],
            list(state["trail"]),
        )
        self.gradient_variance = state["gradient_variance"]
