"""A target with priors of another scale, and another noise."""

from __future__ import annotations

import copy
import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayou.likelihoods import BoundHomoscedastic
from bayou.metrics import standard_error
from bayou.posteriors.posterior import Posterior
from bayou.priors import (
    BoundNormal,
    BoundPrior,
    BoundUnitNormal,
    DensityPrior,
    Normal,
    Prior,
    UnitNormal,
)
from bayou.target import Target, prior_specs

MAX_EXCESS = 0.02  # nats per row over the lowest NLL that a prior with a higher evidence may cost


def rescaled(
    target: Target, multipliers: Mapping[str, float | Tensor], noise: float = 1.0
) -> Target:
    """A target with other prior precisions of some tensors, all fixed, and another noise
    variance.
    """
    if multipliers:
        changed = require_normal(target.priors, multipliers)
        target = _with_priors(
            target, {name: _wider(changed[name], by) for name, by in multipliers.items()}
        )
    if noise != 1.0:
        likelihood = copy.deepcopy(target.likelihood)
        assert isinstance(likelihood, BoundHomoscedastic)
        with torch.no_grad():
            likelihood.log_scale += 0.5 * math.log(noise)
        target = replace(target, likelihood=likelihood)
    return target


def settled(posterior: Posterior) -> Target:
    """Its target with the learned noise and priors, fixed."""
    target = posterior.target.copy()
    target.likelihood.requires_grad_(False)
    learned = require_normal(posterior.bound_priors(), target.learned_priors)
    return (
        _with_priors(target, {name: _wider(prior, 1.0) for name, prior in learned.items()})
        if learned
        else target
    )


def select_within_chance(
    nll: Sequence[Tensor], guess: Tensor, log_evidence: Sequence[float]
) -> int:
    """Select the prior with the highest evidence among those whose mean NLL is within chance of the
    lowest.

    On a few held-out rows of classes a posterior that is nearly a point often has the lowest NLL,
    by an amount that
    says nothing: rows on which it is certain and wrong are rarer than one in M. Within chance is
    one standard error of the lowest mean, as in the rule of Breiman et al. (1984), computed with
    one more row, which is guessed, and at most
    0.02 nats: differences between priors on the same rows can be significant although each mean is
    uncertain.

    Args:
        nll: −log p of M held-out rows for each prior, (M,) each.
        guess: −log p of the same rows if all classes have the same probability, (M,).
        log_evidence: the log evidence of each prior.

    Returns:
        The index of the selected prior.
    """
    means = [float(each.double().mean()) for each in nll]
    best = min(range(len(nll)), key=means.__getitem__)
    with_guess = torch.cat([nll[best].double(), guess.double().mean().reshape(1)])
    limit = means[best] + min(standard_error(with_guess), MAX_EXCESS)
    candidates = [k for k, mean in enumerate(means) if mean <= limit]
    return max(candidates, key=log_evidence.__getitem__)


def require_normal(
    priors: Mapping[str, BoundPrior], learned: Iterable[str]
) -> dict[str, BoundNormal]:
    """The learned priors, fixed; a ValueError if one cannot be fixed at its learned value."""
    found: dict[str, BoundNormal] = {}
    for name in learned:
        prior = priors[name]
        if not isinstance(prior, BoundNormal):
            raise ValueError(
                f"the learned prior of {name!r} can only be kept where it is Normal; fix its scale"
            )
        found[name] = prior
    return found


def _with_priors(target: Target, changed: Mapping[str, Prior]) -> Target:
    """The target with other priors of some tensors, by name."""
    rules = {**prior_specs(target.prior, target.net), **changed}
    return replace(target, prior={glob.escape(name): prior for name, prior in rules.items()})


def _wider(prior: BoundNormal, multiplier: float | Tensor) -> Prior:
    """The same prior with its precision multiplied, by a number or by one for each unit, and
    fixed.
    """
    log_scale = prior.log_scale.detach() - 0.5 * torch.as_tensor(multiplier).detach().log()
    if log_scale.numel() == prior.mean.numel() == 1:
        return Normal(math.exp(float(log_scale)), mean=float(prior.mean))
    if not isinstance(prior, BoundUnitNormal):
        return DensityPrior(BoundNormal(prior.shape, prior.mean, log_scale))
    full, factors = log_scale.expand(prior.shape), {}
    for (
        unit,
        axis,
    ) in prior.axes.items():  # the log of a product of factors: means over the other axes are exact
        log = full.mean([k for k in range(full.ndim) if k != axis]) - full.mean()
        factors[f"{unit}puts"] = tuple(log.exp().tolist())
    return UnitNormal(math.exp(float(full.mean())), float(prior.mean), **factors)
