"""A posterior as the prior of the next task."""

from __future__ import annotations

from bayou.posteriors import Posterior
from bayou.priors import Prior


def as_prior(posterior: Posterior) -> dict[str, Prior]:
    """A prior for every tensor: ``fit(..., prior=as_prior(posterior))`` (VCL, Nguyen 2018)."""
    return posterior.as_prior()
