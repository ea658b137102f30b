"""The log evidence log p(D) of a network, which every ELBO bounds, by annealed importance
sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, flatten
from bayou.core.progress import Progress, Show
from bayou.inference.chains import load_batches
from bayou.kernels import Joint
from bayou.kernels.annealing import Annealing, estimate_log_ratio, pilot_chains
from bayou.kernels.trace import trace_density
from bayou.likelihoods import Categorical, Likelihood
from bayou.network import Network
from bayou.network.target import PriorRules, Target
from bayou.posteriors.posterior import Posterior, check_count
from bayou.priors import BoundNormal, BoundPrior
from bayou.training.data import as_data
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.threads import largest_product, suitable_threads

ROBUST = 1.4826  # the standard deviation of a Gaussian in units of its median absolute deviation


@final
@dataclass(frozen=True)
class Evidence:
    """log p(D) in nats, estimated from below.

    ``value`` = log 1/C Σ_c w_c of C independent chains, with its ``standard_error`` (delta method,
    √(1/ess − 1/C)). E[w] = p(D) exactly, so that E[value] ≤ log p(D): it is a **lower bound in
    expectation**, and exceeds log p(D) by b nats with a probability below e^−b. ``mean`` = 1/C Σ_c
    log w_c is a looser one. ``spread``: the standard deviation of the log weights; ``ess`` =
    (Σw)²/Σw², of C. With a spread far above 1 nat, or few effective chains, the standard error is
    unreliable; use more temperatures. ``accept``: the acceptance rate. ``draws``: the final states
    of the chains, a stack; with the ``log_weights`` (C,) they are weighted draws of the posterior.
    """

    value: float
    standard_error: float
    mean: float
    spread: float
    ess: float
    accept: float
    log_weights: Tensor = field(repr=False)
    draws: Params = field(repr=False)

    @staticmethod
    def of(log_weights: Tensor, accept: float, draws: Params) -> Evidence:
        """From the log weights (C,) of the chains."""
        return Evidence(
            **estimate_log_ratio(log_weights),
            accept=accept,
            log_weights=log_weights.double(),
            draws=draws,
        )

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return (
            f"log evidence {self.value:.4f} ± {self.standard_error:.4f} nats, a lower bound in expectation; log "
            f"weights {self.mean:.4f} on average with a spread of {self.spread:.4f}, {self.ess:.1f} effective of "
            f"{len(self.log_weights)} chains, {self.accept:.0%} accepted"
        )


@torch.no_grad()
def evidence(
    net: nn.Module | Target | Posterior,
    data: Any,
    *,
    likelihood: Likelihood | None = None,
    prior: PriorRules | None = None,
    chains: int = 16,
    temperatures: int = 1000,
    first: float = 1e-6,
    leapfrogs: int = 20,
    accept: float = 0.8,
    seed: int = 0,
    progress: Show = True,
    batch_size: int = 2**16,
) -> Evidence:
    """log p(D) = log ∫ p(w)·p(D|w) dw of a network: annealed importance sampling (Neal 2001) with
    HMC moves.

    Every chain starts at a draw from the prior and goes through p_t(w) ∝ p(w)·p(D|w)^β_t, β from
    ``first`` to 1 in equal steps of log β, with one trajectory of ``leapfrogs`` steps at each; its
    weight is log w = Σ_t (β_t − β_{t−1})·log p(D|w_{t−1}), and E[w] = p(D) for all moves that leave
    p_t invariant and are not adapted to the chain itself. So a quarter as many auxiliary chains
    without weights run in parallel: their acceptance rate adapts the step size of all chains
    towards ``accept``. The mass is the prior's precision.

    ``net``: a network (with likelihood and prior as in ``bayou.fit``), or a target or posterior
    that has them. The chains are evaluated in parallel; every gradient uses all data. 48 chains of
    a network of 17,610 weights with 1,438 rows and 1,500 temperatures took 65 s on an H200, with a
    spread of 2.7 nats. The noise and the
    prior must be fixed: learned ones have no evidence.
    """
    check_count(chains, "chains", 2)
    check_count(temperatures, "temperatures", 2)
    check_count(leapfrogs, "leapfrogs", 1)
    if not 0 < first < 1 or not 0 < accept < 1:
        raise ValueError(
            f"first and accept must lie strictly between 0 and 1, got {first} and {accept}"
        )
    seed, batches = as_int_seed(seed), as_data(data, batch_size)
    target = _target(net, likelihood, prior, batches.n)
    joint = Joint(target, Network(target.net), target.start())
    if joint.noisy:
        raise ValueError(
            "a learned noise has a flat prior, and so no evidence; fix it, as in Gaussian(0.1)"
        )
    pilots = pilot_chains(chains)
    like = joint.start
    begin = torch.cat(
        [_prior_draws(joint, n, part_seed(seed, who)) for who, n in _names(chains, pilots)]
    )
    with rng.isolated(part_seed(seed, "run"), like.device):
        (log_likelihood, log_prior), work = largest_product(
            lambda: (
                joint.density(load_batches(joint, batches, begin), begin, prior=False),
                trace_density(lambda w: joint.log_prior(w), begin),
            )
        )
        mass = prior_variance(joint, part_seed(seed, "scale"))
        annealing = Annealing(lambda w: (*log_prior(w), *log_likelihood(w)), mass, pilots)
        betas = [
            0.0,
            *torch.logspace(math.log10(first), 0, temperatures, dtype=torch.float64).tolist(),
        ]
        betas[-1] = 1.0
        with (
            suitable_threads(len(begin) * work),
            Progress("evidence", temperatures, progress) as shown,
        ):

            def noise(kind: Callable[..., Tensor], name: str, step: int, *event: int) -> Tensor:
                parts = [
                    kind(n, event, like, part_seed(seed, who, name, step))
                    for who, n in _names(chains, pilots)
                ]
                return torch.cat(parts)

            annealing.start(begin)
            rate = 0.0
            try:
                for step, (before, beta) in enumerate(pairwise(betas)):
                    annealing.warm(before, beta)
                    momentum = noise(rng.normal, "momentum", step, len(like))
                    uniform = noise(rng.uniform, "accept", step, 2)
                    if step == 0:
                        annealing.find_step(momentum)
                    accepted = annealing.move(momentum, uniform, leapfrogs, accept, temperatures)
                    rate += float(accepted[:chains].mean()) / temperatures
                    shown.update(
                        step + 1, beta=beta, log_weight=float(annealing.log_weights[:chains].mean())
                    )
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"evidence was interrupted at β = {beta:.2g} and has no estimate"
                ) from None
    weights, position = annealing.log_weights[:chains], annealing.position[:chains]
    if bool(weights.isnan().any()):
        raise FloatingPointError(
            "the log-likelihood is not a number at a draw from the prior; use standardized inputs"
        )
    return Evidence.of(weights, rate, joint.tensors(position))


def _target(
    net: nn.Module | Target | Posterior,
    likelihood: Likelihood | None,
    prior: PriorRules | None,
    n: int,
) -> Target:
    """Network, likelihood and prior for n rows."""
    if isinstance(net, Posterior | Target):
        if likelihood is not None or prior is not None:
            raise ValueError(f"a {type(net).__name__} has its likelihood and prior; leave them out")
        target = replace(net.target if isinstance(net, Posterior) else net, n=n)
    else:
        target = Target.build(net, Categorical() if likelihood is None else likelihood, prior, n)
    target.require_fixed_priors("evidence")
    if not target.free:
        raise ValueError(
            "every parameter of the network is frozen (requires_grad=False): nothing to integrate over"
        )
    return target


def _names(chains: int, pilots: int) -> tuple[tuple[str, int], ...]:
    return ("chains", chains), ("pilots", pilots)


def _prior_draws(joint: Joint, count: int, seed: int) -> Tensor:
    """Independent draws from the prior: (count, D)."""
    priors = joint.target.priors
    return flatten(
        {name: priors[name].sample(count, part_seed(seed, name)).detach() for name in joint.like}, 1
    )


def prior_variance(joint: Joint, seed: int) -> Tensor:
    """Var[w] under the prior, weight by weight where it is Normal, one robust number a tensor
    elsewhere: (D,).
    """

    def variance(name: str, prior: BoundPrior) -> Tensor:
        if isinstance(prior, BoundNormal):
            return (2 * prior.log_scale).exp().expand(prior.shape)
        drawn = prior.sample(64, part_seed(seed, name)).detach()
        scale = ROBUST * (drawn - drawn.median()).abs().median()
        return scale.square().expand(prior.shape)

    return flatten(
        {name: variance(name, joint.target.priors[name]).detach() for name in joint.like}
    )
