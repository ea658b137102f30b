"""Draws of a fitted posterior annealed to the exact one by HMC (annealed importance sampling)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.inference.chains import ChainRun, Sampling, load_batches, mean_over_chains
from bayou.inference.method import BatchedMethod, FitArguments, Method, identity
from bayou.inference.prior_scale import fix_learned_priors, require_normal
from bayou.inference.restricted import RestrictedMethod
from bayou.kernels import Joint
from bayou.kernels.annealing import Annealing, estimate_log_ratio, pilot_chains
from bayou.methods.annealed_family import FAMILIES, InitialFamily
from bayou.methods.vi import VI
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import Posterior
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data
from bayou.training.ranks import current
from bayou.training.seeds import part_seed


@final
@dataclass(frozen=True)
class Annealed(BatchedMethod[Posterior]):
    """Draws of a fitted q annealed to the exact posterior by HMC (annealed importance sampling).

        p_β(w) ∝ q(w)^(1−β)·p(w, D)^β,  β from 0 to 1
        log weight = Σ_t (β_t − β_{t−1})·log p(w_{t−1}, D)/q(w_{t−1}),  E[weight] = p(D)

    Each of ``draws`` chains starts at a draw of q and makes a trajectory of ``leapfrogs`` HMC steps
    at each of ``temperatures`` values of β. E[log weight] is an ELBO, that of q itself for one
    temperature, and the distribution q_1 of the final states has KL(q_1 ‖ p(w | D)) ≤ log p(D) −
    E[log weight] (Salimans 2015). All draws have equal weights in predictions. MNF has a joint
    density with its gains z only: both are annealed, from q(w, z) to p(w, D)·r(z | w), in the
    coordinates of their noise.

    The step size is adapted to the acceptance rate by further chains, a quarter as many, so that it
    does not depend on the draws. Every gradient is that of all data: for networks and data of a
    size suitable for HMC, at the cost of draws · temperatures · leapfrogs gradients. A noise and a
    prior that ``of`` has learned are fixed, and the evidence is that of the network with these.

    ``posterior.mixing`` has this "elbo" in nats with its "elbo_error", "log_evidence" = log 1/C Σ
    weight, also a lower bound in expectation, and tighter, the "spread" of log weight, "ess" = (Σ
    weight)²/Σ weight², and the acceptance rate "accept".

    Args:
        of: the method that finds q, ``VI()`` by default: VI with MeanField, LowRank, JointFlow,
            Inducing or MNF, IVON, or Laplace of all weights.
        draws: the number of chains C, 50 by default.
        temperatures: the number of values of β, 100 by default.
        leapfrogs: steps of a trajectory, 20 by default.
        accept: the acceptance rate that the step size is adapted to, 0.65 by default.
        adapt: whether the mass is the variance of the further chains, instead of that of q; False
            by default.
        log_every: temperatures between two records of the history, 10 by default.
        checkpoint_every: temperatures between two checkpoints, 50 by default.
        batch_size: rows that go through the network at a time, 4,096 by default.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of the final states. Ctrl-C returns q, with
        ``stopped="interrupted"``; with a checkpoint the same call continues the run.

    Raises:
        ValueError: for a method without a density, priors that are not Normal but learned, and
            settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.Annealed(bayou.Laplace("full"), draws=4, temperatures=2, leapfrogs=2)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    4

    Papers: Neal 2001, https://arxiv.org/abs/physics/9803008; Salimans et al. 2015,
    https://arxiv.org/abs/1410.6460.
    """

    of: Method = field(default_factory=VI)
    draws: int = field(default=50, kw_only=True)
    temperatures: int = field(default=100, kw_only=True)
    leapfrogs: int = field(default=20, kw_only=True)
    accept: float = field(default=0.65, kw_only=True)
    adapt: bool = field(default=False, kw_only=True)
    log_every: int = field(default=10, kw_only=True)
    checkpoint_every: int = field(default=50, kw_only=True)
    batch_size: int = field(default=2**12, kw_only=True)
    draws_all_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_whole(
            "temperatures", "leapfrogs", "log_every", "checkpoint_every", "batch_size"
        )
        self._check_whole("draws", least=2)
        self._check_interval("(0, 1)", "accept")
        without = self.of.without_density if isinstance(self.of, Method) else repr(self.of)
        if without is not None:
            raise ValueError(
                "Annealed of must be a method whose posterior has a density, "
                f"{without} has none; use {FAMILIES}"
            )

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method with an ``of`` that starts at the network as it is."""
        return replace(self, of=self.of.at_mode(noise, data))

    def with_planned_length(self, data: Data) -> Self:
        """Return this method with the number of steps that ``of`` plans for these data."""
        return replace(self, of=self.of.with_planned_length(data))

    def shortened(self, factor: float) -> Self:
        """Return this method with a fraction of the temperatures and of the length of ``of``.

        Args:
            factor: the fraction.
        """
        count = max(2, round(factor * self.temperatures))
        return replace(self, of=self.of.shortened(factor), temperatures=count)

    def restricted_to(
        self, names: Sequence[str], *, learns_others: bool = False
    ) -> RestrictedMethod | None:
        """Return this method over some tensors, with the others as they are.

        Args:
            names: the tensors.
            learns_others: whether the others are learned as points, which is not possible.
        """
        return None if learns_others else RestrictedMethod(self, tuple(names))

    def _fit(self, arguments: FitArguments) -> Posterior:
        """Find q and return the final states of all chains."""
        current().note_unshared("the chains of Annealed")
        target = arguments.target
        batches = arguments.data
        seed = arguments.seed
        checkpoint = arguments.checkpoint
        progress = arguments.progress
        if not target.free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to sample"
            )
        require_normal(target.priors, target.learned_priors)
        file = None
        start_path = None
        if checkpoint is not None:
            run_identity = identity(self, target, batches, seed)
            run_identity["method"]["fields"]["of"]["fields"].pop("checkpoint_every", None)
            file = Checkpoint(checkpoint, run_identity)
            start_path = Path(f"{os.fspath(checkpoint)}.start")
        start_seed = part_seed(seed, "start")
        initial = self.of.fit(
            target, batches, seed=start_seed, checkpoint=start_path, progress=progress
        )
        if initial.stopped == "interrupted":
            return initial
        if not isinstance(initial, Guided | GaussianPosterior):
            raise TypeError(f"Annealed needs {FAMILIES}, got {initial!r}")
        point = {name: value.detach() for name, value in initial.template().items()}
        joint = Joint(fix_learned_priors(initial), initial.network, point)
        steps = self.temperatures
        with torch.no_grad():
            make = partial(AnnealingRun, self, joint, initial, batches, seed)
            run = ChainRun(self, make, seed, joint.start.device, steps, [steps - 1], file, progress)
            try:
                return run.run()
            except KeyboardInterrupt:  # return q
                initial.stopped = "interrupted"
                return initial


class AnnealingRun(Sampling):
    """The chains of one run between q and the posterior.

    Args:
        method: the settings.
        joint: log p(w, D).
        initial: q.
        data: all rows.
        seed: decides the draws of q and the noise.
    """

    draws_are_independent = True
    method: Annealed

    def __init__(
        self,
        method: Annealed,
        joint: Joint,
        initial: Guided | GaussianPosterior,
        data: Data,
        seed: int,
    ) -> None:
        super().__init__(method, joint, seed, range(method.draws))
        self.count: int = method.draws
        self.pilots: int = pilot_chains(method.draws)
        family = InitialFamily(initial, joint)
        start = torch.cat([family.draw(n, part_seed(seed, name)) for name, n in self._groups()])
        calls = method.temperatures * (method.leapfrogs + 1)
        weights = family.weights(start)
        log_joint = joint.density(load_batches(joint, data, weights), weights, calls=calls)
        variance = family.variance(part_seed(seed, "mass"))
        self.family = family
        self.annealing: Annealing = Annealing(
            lambda v: family.terms(v, log_joint), variance, self.pilots, method.adapt
        )
        self.annealing.start(start)
        self.acceptance_rate: float = 0.0
        self.accept: Tensor = start.new_full((self.count,), math.nan)

    def _groups(self) -> tuple[tuple[str, int], ...]:
        """Return the names, for seeds, and the numbers of chains with and without weight."""
        return ("draws", self.count), ("pilots", self.pilots)

    def _noise(
        self, draw: Callable[..., Tensor], name: str, step: int, shape: tuple[int, ...]
    ) -> Tensor:
        """Draw noise for a step of all chains, of this shape for each."""
        like = self.annealing.position
        return torch.cat(
            [
                draw(n, shape, like, part_seed(self.seed, group, name, step))
                for group, n in self._groups()
            ]
        )

    @property
    def width(self) -> int:
        """Return the number of positions that a step evaluates together."""
        return self.count + self.pilots

    @property
    def position(self) -> Tensor:
        """Return the weights of the chains with weight: (C, D)."""
        return self.family.weights(self.annealing.position[: self.count])

    def advance(self, step: int) -> None:
        """Change the temperature and make one trajectory."""
        method = self.method
        annealing = self.annealing
        last = method.temperatures
        annealing.warm(beta_schedule(step / last), beta_schedule((step + 1) / last))
        momentum = self._noise(rng.normal, "momentum", step, (annealing.position.shape[1],))
        if step == 0:
            annealing.find_step(momentum)
        uniform = self._noise(rng.uniform, "accept", step, (2,))
        accept = annealing.move(momentum, uniform, method.leapfrogs, method.accept, last)
        self.accept = accept[: self.count]
        self.acceptance_rate += mean_over_chains(self.accept) / last

    def record(self) -> dict[str, float]:
        """Return numbers of the last step."""
        return {
            "beta": self.annealing.beta,
            "log_weight": mean_over_chains(self.annealing.log_weights[: self.count]),
            "accept": mean_over_chains(self.accept),
            "step_size": float(self.annealing.log_step.exp()),
        }

    def mixing(self, draws: Tensor) -> dict[str, Any]:
        """Return the ELBO, the evidence and the effective number of draws."""
        ratio = estimate_log_ratio(self.annealing.log_weights[: self.count])
        return {
            "draws": self.count,
            "elbo": ratio["mean"],
            "elbo_error": ratio["spread"] / math.sqrt(self.count),
            "log_evidence": ratio["value"],
            "log_evidence_error": ratio["standard_error"],
            "spread": ratio["spread"],
            "ess": ratio["ess"],
            "accept": self.acceptance_rate,
        }

    def state(self) -> dict[str, Any]:
        """Return the state for the next step."""
        return {
            "position": self.annealing.position,
            "log_weights": self.annealing.log_weights,
            "rate": self.acceptance_rate,
            "log_step": self.annealing.log_step,
            "inverse_mass": self.annealing.inverse_mass,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""
        self.annealing.position = state["position"]
        self.annealing.log_weights = state["log_weights"]
        self.acceptance_rate = state["rate"]
        self.annealing.log_step = state["log_step"]
        self.annealing.inverse_mass = state["inverse_mass"]


def beta_schedule(fraction: float) -> float:
    """Return β after a fraction of the temperatures, 1 − (1 − fraction)².

    Its last steps, in which a too narrow q widens, are the smallest.

    Args:
        fraction: between 0 and 1.
    """
    return 1 - (1 - fraction) ** 2
