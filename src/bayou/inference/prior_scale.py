"""A target with priors of another scale and another noise, and a choice among priors."""

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
from bayou.network.target import Target, prior_specs
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

MAX_EXCESS = 0.02  # nats per row over the lowest NLL that a prior with a higher evidence may cost


def rescale_priors(
    target: Target, multipliers: Mapping[str, float | Tensor], noise: float = 1.0
) -> Target:
    """Return a target with other prior precisions of some tensors and another noise variance.

    Args:
        target: with Normal priors of these tensors.
        multipliers: factors of the prior precision by tensor name, a number or one for each unit.
            These priors are fixed in the result.
        noise: a factor of the noise variance; 1 for the same noise.

    Raises:
        ValueError: if a prior is not Normal, or the likelihood has no noise of one size.
    """
    if multipliers:
        priors = require_normal(target.priors, multipliers)
        rescaled_priors = {
            name: _with_precision(priors[name], factor) for name, factor in multipliers.items()
        }
        target = _with_priors(target, rescaled_priors)
    if noise != 1.0:
        likelihood = copy.deepcopy(target.likelihood)
        if not isinstance(likelihood, BoundHomoscedastic):
            raise ValueError(f"{type(likelihood).__name__} has no noise of one size to rescale")
        with torch.no_grad():
            likelihood.log_scale += 0.5 * math.log(noise)
        target = replace(target, likelihood=likelihood)
    return target


def fix_learned_priors(posterior: Posterior) -> Target:
    """Return the target of a posterior with its learned noise and priors, fixed.

    Args:
        posterior: whose learned priors must be Normal.
    """
    target = posterior.target.copy()
    target.likelihood.requires_grad_(False)
    learned = require_normal(posterior.bound_priors(), target.learned_priors)
    if not learned:
        return target
    fixed = {name: _with_precision(prior, 1.0) for name, prior in learned.items()}
    return _with_priors(target, fixed)


def select_within_chance(
    nll: Sequence[Tensor], guess: Tensor, log_evidence: Sequence[float]
) -> int:
    """Select the prior of the highest evidence among those of nearly the lowest held-out NLL.

    On a few held-out rows of classes a posterior that is nearly a point often has the lowest NLL,
    by an amount that says nothing: rows on which it is certain and wrong are rarer than one in M.
    Within chance is one standard error of the lowest mean, as in the rule of Breiman et al. (1984),
    computed with one more row, which is guessed, and at most 0.02 nats: differences between priors
    on the same rows can be significant although each mean is uncertain.

    Args:
        nll: −log p of M held-out rows for each prior, (M,) each.
        guess: −log p of the same rows if all classes have the same probability, (M,).
        log_evidence: the log evidence of each prior.

    Returns:
        The index of the selected prior.
    """
    means = [float(values.double().mean()) for values in nll]
    best = min(range(len(nll)), key=means.__getitem__)
    with_guess = torch.cat([nll[best].double(), guess.double().mean().reshape(1)])
    limit = means[best] + min(standard_error(with_guess), MAX_EXCESS)
    candidates = [index for index, mean in enumerate(means) if mean <= limit]
    return max(candidates, key=log_evidence.__getitem__)


def require_normal(
    priors: Mapping[str, BoundPrior], names: Iterable[str]
) -> dict[str, BoundNormal]:
    """Return the priors of some tensors, all of which must be Normal.

    Args:
        priors: by tensor name.
        names: of the tensors.

    Raises:
        ValueError: if one of them is not Normal, so that it cannot be fixed at a learned value.
    """
    normal_priors: dict[str, BoundNormal] = {}
    for name in names:
        prior = priors[name]
        if not isinstance(prior, BoundNormal):
            raise ValueError(
                f"the learned prior of {name!r} can only be kept where it is Normal; fix its scale"
            )
        normal_priors[name] = prior
    return normal_priors


def _with_priors(target: Target, changed_priors: Mapping[str, Prior]) -> Target:
    """Return the target with other priors of some tensors, by name."""
    rules = {**prior_specs(target.prior, target.net), **changed_priors}
    return replace(target, prior={glob.escape(name): prior for name, prior in rules.items()})


def _with_precision(prior: BoundNormal, factor: float | Tensor) -> Prior:
    """Return the same prior, fixed, with its precision multiplied by one factor or one per unit."""
    log_scale = prior.log_scale.detach() - 0.5 * torch.as_tensor(factor).detach().log()
    if log_scale.numel() == prior.mean.numel() == 1:
        return Normal(math.exp(float(log_scale)), mean=float(prior.mean))
    if not isinstance(prior, BoundUnitNormal):
        return DensityPrior(BoundNormal(prior.shape, prior.mean, log_scale))
    full = log_scale.expand(prior.shape)
    factors: dict[str, tuple[float, ...]] = {}
    for side, axis in prior.axes.items():
        # The log scale is a sum of one term per axis: its means over the other axes are exact.
        other_axes = [index for index in range(full.ndim) if index != axis]
        log_factor = full.mean(other_axes) - full.mean()
        factors[f"{side}puts"] = tuple(log_factor.exp().tolist())
    return UnitNormal(math.exp(float(full.mean())), float(prior.mean), **factors)
