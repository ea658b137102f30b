"""Full-batch samplers with an accept step: HMC and NUTS, for small networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from bayou.kernels import hmc, nuts
from bayou.kernels.hmc import HamiltonianState, Info
from bayou.methods.hamiltonian import HamiltonianChains, HamiltonianSampler
from bayou.methods.mcmc import MarkovChains

STEP_JITTER = 0.2  # relative, of the step sizes of HMC with a given number of them
MIN_LENGTH = 0.5  # of a trajectory, in units of the length that is learned


class HMCChains(HamiltonianChains):
    """The chains of ``HMC``."""

    method: HMC

    def transition(
        self, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Return the chains after one trajectory."""
        u = self.uniform(step, "accept", count=2)
        leapfrogs: int | Tensor
        if self.method.leapfrogs is None:
            leapfrogs = self._learned_leapfrogs(step, step_size)
        else:
            leapfrogs = self.method.leapfrogs
            step_size = step_size * (1 + STEP_JITTER * (2 * u[:, 1] - 1))
        momentum = self.normal("momentum", step)
        return hmc.step(
            self.current, self.density, momentum, u[:, 0], step_size, inverse_mass, leapfrogs
        )

    def _learned_leapfrogs(self, step: int, step_size: Tensor) -> Tensor:
        """Return the number of steps for a fraction of the learned length, (C,).

        The fraction is the same for all chains, which therefore end together.
        """
        bits = f"{step + 1:b}"
        van_der_corput = int(bits[::-1], 2) / 2 ** len(bits)
        fraction = MIN_LENGTH + (1 - MIN_LENGTH) * van_der_corput
        log_length = self.adaptation.log_average_length
        if step < self.method.warmup:
            log_length = self.adaptation.log_length
        steps = fraction * log_length.exp() / step_size
        return steps.ceil().clamp(1, self.method.most_leapfrogs)


class NUTSChains(HamiltonianChains):
    """The chains of ``NUTS``."""

    method: NUTS

    def transition(
        self, step: int, step_size: Tensor, inverse_mass: Tensor
    ) -> tuple[HamiltonianState, Info]:
        """Return the chains after one tree."""

        def uniforms(depth: int) -> Tensor:
            return self.uniform(step, "tree", depth, count=2**depth + 2)

        momentum = self.normal("momentum", step)
        max_depth = self.method.max_depth
        return nuts.step(
            self.current, self.density, momentum, uniforms, step_size, inverse_mass, max_depth
        )


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

    chains_type: ClassVar[type[MarkovChains]] = HMCChains

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("most_leapfrogs", "leapfrogs")

    @property
    def _max_leapfrogs(self) -> int:
        """Return the largest number of leapfrog steps of one transition."""
        return self.leapfrogs or self.most_leapfrogs


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

    chains_type: ClassVar[type[MarkovChains]] = NUTSChains

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("max_depth")

    @property
    def _max_leapfrogs(self) -> int:
        """Return the largest number of leapfrog steps of one transition."""
        return 2**self.max_depth
