"""Draws of a fitted posterior annealed to the exact one by HMC (annealed importance sampling)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.files import StrPath
from bayou.core.params import Params, flatten, unflatten
from bayou.core.progress import Show
from bayou.guides.bayesian import parent_arguments
from bayou.guides.guide import Guide
from bayou.inference.chains import ChainRun, Sampling, load_batches, mean_over_chains
from bayou.inference.method import Method, identity
from bayou.inference.prior_scale import fix_learned_priors, require_normal
from bayou.inference.restricted import RestrictedMethod
from bayou.kernels import Joint
from bayou.kernels.annealing import Annealing, pilots_of, weighed
from bayou.kernels.hmc import Density
from bayou.methods.vi import VI
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import Posterior
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, as_data
from bayou.training.ranks import current
from bayou.training.seeds import as_int_seed, part_seed

MASS = 1000  # draws of q for its standard deviations, where they have no closed form


@final
@dataclass(frozen=True)
class Annealed(Method):
    """Draws of q annealed to the posterior through p_β(w) ∝ q(w)^(1−β)·p(w, D)^β with β from 0 to
    1.

    ``of`` finds q: VI with MeanField, LowRank, JointFlow, Inducing or MNF, IVON, or Laplace of all
    weights. Each of ``draws`` chains starts at a draw of q and makes a trajectory of ``leapfrogs``
    HMC steps at each of ``temperatures`` values of β. Its importance weight is log w = Σ_t (β_t −
    β_{t−1})·log p(w_{t−1}, D)/q(w_{t−1}), and E[w] = p(D) (annealed importance sampling, Neal
    2001). So E[log w] is an ELBO, that of q itself for one temperature, and the distribution q_1 of
    the final states has KL(q_1 ‖ p(w | D)) ≤ log p(D) − E[log w] (Salimans 2015). MNF has a joint
    density with its gains z only: there both are annealed, from q(w, z) to p(w, D)·r(z | w), in the
    coordinates of their noise.

    ``posterior.mixing`` has this "elbo" in nats with its "elbo_error", "log_evidence" = log 1/C Σ
    w, also a lower bound in expectation, and tighter, the "spread" of log w, "ess" = (Σw)²/Σw², and
    the acceptance rate "accept". All draws have equal weights in predictions.

    The step size is adapted to the acceptance rate ``accept`` by further chains, a quarter as many,
    so that it does not depend on the draws. The mass is that of q; with ``adapt`` it is the
    variance of the further chains: on a cubic with 61 weights, this had the effect of five times as
    many temperatures. Every gradient is that of all data,
    ``batch_size`` rows at a time: for networks and data of a size suitable for HMC, at the cost of
    draws · temperatures · leapfrogs gradients. A noise and a prior that ``of`` has learned are
    fixed, and the evidence is that of the network with these. Ctrl-C returns q, with
    ``stopped="interrupted"``; with a checkpoint the same call continues the run. The history has a
    record every ``log_every`` temperatures; a checkpoint is saved every ``checkpoint_every`` of
    them.
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
        if not 0 < self.accept < 1:
            raise ValueError(f"Annealed needs 0 < accept < 1, got {self.accept!r}")
        without = self.of.without_density if isinstance(self.of, Method) else repr(self.of)
        if without is not None:
            raise ValueError(
                f"Annealed of must be a method whose posterior has a density, {without} has none; use {FAMILIES}"
            )

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, of=self.of.at_mode(noise, data))

    def shortened(self, factor: float) -> Self:
        count = max(2, round(factor * self.temperatures))
        return replace(self, of=self.of.shortened(factor), temperatures=count)

    def restricted_to(
        self, names: Sequence[str], *, learns_others: bool = False
    ) -> RestrictedMethod | None:
        return None if learns_others else RestrictedMethod(self, tuple(names))

    def with_planned_length(self, data: Data) -> Self:
        return replace(self, of=self.of.with_planned_length(data))

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The final states of all chains. ``checkpoint``.start is the file of the run that finds
        q.
        """
        current().note_unshared("the chains of Annealed")
        seed, batches = as_int_seed(seed), as_data(data, self.batch_size)
        target = replace(target, n=batches.n)
        if not target.free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to sample"
            )
        require_normal(target.priors, target.learned_priors)
        file = begin = None
        if checkpoint is not None:
            who = identity(self, target, batches, seed)
            who["method"]["fields"]["of"]["fields"].pop("checkpoint_every", None)
            file, begin = Checkpoint(checkpoint, who), Path(f"{os.fspath(checkpoint)}.start")
        found = self.of.fit(
            target, batches, seed=part_seed(seed, "start"), checkpoint=begin, progress=progress
        )
        if found.stopped == "interrupted":
            return found
        assert isinstance(found, Guided | GaussianPosterior)  # by __post_init__
        joint = Joint(
            fix_learned_priors(found),
            found.network,
            {name: value.detach() for name, value in found.like().items()},
        )
        steps, device = self.temperatures, joint.start.device
        with torch.no_grad():
            make = partial(AnnealingRun, self, joint, found, batches, seed)
            run = ChainRun(self, make, seed, device, steps, [steps - 1], file, progress)
            try:
                return run.run()
            except KeyboardInterrupt:  # return q
                found.stopped = "interrupted"
                return found


FAMILIES = "VI with MeanField, LowRank, JointFlow, Inducing or MNF, IVON, or Laplace with where='*'"


class AnnealingRun(Sampling):
    """The chains of one run between q and the posterior."""

    draws_are_independent = True

    def __init__(
        self,
        method: Annealed,
        joint: Joint,
        found: Guided | GaussianPosterior,
        data: Data,
        seed: int,
    ) -> None:
        super().__init__(method, joint, seed, range(method.draws))
        self.count, self.pilots = method.draws, pilots_of(method.draws)
        family = Family(found, joint)
        begin = torch.cat([family.draw(n, part_seed(seed, who)) for who, n in self._names()])
        calls = method.temperatures * (method.leapfrogs + 1)
        weights = family.weights(begin)
        log_joint = joint.density(load_batches(joint, data, weights), weights, calls=calls)
        mass = family.variance(part_seed(seed, "mass"))
        self.family, self.annealing = (
            family,
            Annealing(lambda v: family(v, log_joint), mass, self.pilots, method.adapt),
        )
        self.annealing.start(begin)
        self.rate = 0.0
        self.info = begin.new_full((self.count,), math.nan)

    def _names(self) -> tuple[tuple[str, int], ...]:
        return ("draws", self.count), ("pilots", self.pilots)

    def _noise(self, kind: Any, name: str, step: int, *event: int) -> Tensor:
        like = self.annealing.position
        return torch.cat(
            [
                kind(n, event, like, part_seed(self.seed, who, name, step))
                for who, n in self._names()
            ]
        )

    @property
    def width(self) -> int:
        return self.count + self.pilots

    @property
    def position(self) -> Tensor:
        return self.family.weights(self.annealing.position[: self.count])

    def advance(self, step: int) -> None:
        method, annealing, last = self.method, self.annealing, self.method.temperatures
        annealing.warm(schedule(step / last), schedule((step + 1) / last))
        momentum = self._noise(rng.normal, "momentum", step, annealing.position.shape[1])
        if step == 0:
            annealing.find_step(momentum)
        uniform = self._noise(rng.uniform, "accept", step, 2)
        accepted = annealing.move(momentum, uniform, method.leapfrogs, method.accept, last)
        self.info = accepted[: self.count]
        self.rate += mean_over_chains(self.info) / last

    def record(self) -> dict[str, float]:
        return {
            "beta": self.annealing.beta,
            "log_weight": mean_over_chains(self.annealing.log_weights[: self.count]),
            "accept": mean_over_chains(self.info),
            "step_size": float(self.annealing.log_step.exp()),
        }

    def mixing(self, draws: Tensor) -> dict[str, Any]:
        found = weighed(self.annealing.log_weights[: self.count])
        return {
            "draws": self.count,
            "elbo": found["mean"],
            "elbo_error": found["spread"] / math.sqrt(self.count),
            "log_evidence": found["value"],
            "log_evidence_error": found["standard_error"],
            "spread": found["spread"],
            "ess": found["ess"],
            "accept": self.rate,
        }

    def state(self) -> dict[str, Any]:
        a = self.annealing
        tuned = {"log_step": a.log_step, "inverse_mass": a.inverse_mass}
        return {"position": a.position, "log_weights": a.log_weights, "rate": self.rate} | tuned

    def load(self, state: dict[str, Any]) -> None:
        a = self.annealing
        a.position, a.log_weights, self.rate = (
            state["position"],
            state["log_weights"],
            state["rate"],
        )
        a.log_step, a.inverse_mass = state["log_step"], state["inverse_mass"]


def schedule(share: float) -> float:
    """β after a fraction of the temperatures; its last steps, in which a too narrow q widens, are
    the smallest.
    """
    return 1 - (1 - share) ** 2


class Family:
    """q of a posterior over coordinates v of its tensors, (n, K): the weights themselves, or their
    noise.
    """

    def __init__(self, posterior: Guided | GaussianPosterior, joint: Joint) -> None:
        self.posterior, self.like = posterior, joint.like
        self.guides = list[Guide]()
        if isinstance(posterior, Guided):
            self.guides = list(posterior.bayesian.eval().guides)
        self.plain: tuple[Tensor, ...] | None = None
        if self.guides and all(guide.factorized for guide in self.guides):
            mean, std = posterior.mean(), posterior.std()
            self.plain = tuple(
                flatten({name: part[name] for name in self.like}) for part in (mean, std)
            )
        self.sizes = [part.shape[1] for part in self._parts(2, 0)]
        if self.plain is None:
            self._unfold(self.draw(2, 0))  # raises before any work if there is no density

    def draw(self, n: int, seed: int) -> Tensor:
        """Draws of q: (n, K)."""
        return torch.cat(self._parts(n, seed), 1)

    def _parts(self, n: int, seed: int) -> list[Tensor]:
        """The same per guide, or all in one if the coordinates are the weights."""
        if self.plain is not None or not self.guides:
            weights = self.posterior.sample(n, seed)
            return [flatten({name: weights[name] for name in self.like}, 1).detach()]
        drawn, parts = Params(), list[Tensor]()
        for guide in self.guides:
            made, v = guide.coordinates(
                n, rng.fold(seed, *guide.names), **parent_arguments(guide, drawn, n)
            )
            drawn |= made
            parts.append(v.detach())
        return parts

    def variance(self, seed: int) -> Tensor:
        """Var[v] of each coordinate: (K,)."""
        return self.draw(MASS, seed).var(0) if self.plain is None else self.plain[1].square()

    def weights(self, v: Tensor) -> Tensor:
        """The tensors at v, as flat vectors (n, D)."""
        return v if self.plain is not None else self._unfold(v)[0].detach()

    def __call__(self, v: Tensor, log_joint: Density) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log q(v) and its gradient, log p(w, D)·r(z | w)/q(w, z) and its gradient: (n,) and (n,
        K).
        """
        if self.plain is not None:
            mean, std = self.plain
            u = (v - mean) / std
            log_q = -0.5 * (u.square().sum(-1) + LOG_2PI * len(mean)) - std.log().sum()
            slope = -u / std
            value, gradient = log_joint(v)
            return log_q, slope, value - log_q, gradient - slope
        with torch.enable_grad():
            v = v.detach().requires_grad_()
            w, log_q, extra = self._unfold(v)
            value, gradient = log_joint(w.detach())
            (slope,) = torch.autograd.grad(log_q.sum(), v, retain_graph=True)
            (climb,) = torch.autograd.grad((torch.linalg.vecdot(w, gradient) + extra).sum(), v)
        return log_q.detach(), slope, value + extra.detach(), climb

    def _unfold(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w (n, D), log q(v) and the terms added to log p(w, D), (n,) each."""
        if not self.guides:
            log_q = self.posterior.log_prob(unflatten(v, self.like))
            return v, log_q, -log_q
        params = Params()
        log_q = extra = v.new_zeros(len(v))
        for guide, part in zip(self.guides, v.split(self.sizes, 1), strict=True):
            found = guide.unfold(part, params)
            if found is None:
                raise ValueError(
                    f"{self.posterior!r} has no density that is known exactly; Annealed takes {FAMILIES}"
                )
            params |= found.params
            log_q, extra = log_q + found.log_q, extra + found.extra
        return flatten({name: params[name] for name in self.like}, 1), log_q, extra
