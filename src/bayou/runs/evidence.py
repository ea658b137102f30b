"""Methods that look at the task first: noise and prior scale by the evidence, and a choice by the network's size."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from bayou.curvature.evidence import NoMaximum
from bayou.likelihoods import BoundHomoscedastic
from bayou.methods.ivon import IVON
from bayou.methods.laplace import Laplace
from bayou.methods.method import Method
from bayou.methods.passes import gaussian
from bayou.methods.start import network_at
from bayou.methods.swag import SWAG
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import Empirical
from bayou.priors import BoundNormal
from bayou.progress import Show
from bayou.target import Target

SMALL = 3500  # weights, up to which a full curvature matrix costs no more than the training


def weights(target: Target) -> int:
    """How many weights there are to learn."""
    sizes = {name: parameter.numel() for name, parameter in target.net.named_parameters()}
    return sum(sizes[name] for name in target.free)


@final
@dataclass(frozen=True)
class BySize(Method):
    """``small`` for a network of at most ``limit`` weights, ``large`` for others."""

    small: Method
    large: Method
    limit: int = SMALL

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.large.batch_size

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of the one that suits."""
        chosen = self.small if weights(target) <= self.limit else self.large
        return chosen.fit(target, data, seed=seed, checkpoint=checkpoint, progress=progress)


@final
@dataclass(frozen=True)
class AtEvidence(Method):
    """``method`` from the mode that ``start`` finds, with the noise and the prior scale of the largest evidence there.

    The ELBO of a regression, maximised over its noise too, drives the noise up: the more the data say of the weights,
    the looser is the bound, so that a flat function in much noise can have the best one though the evidence is against
    it (Turner & Sahani 2011; wide factorized networks: Coker et al. 2022). The evidence of a Laplace approximation
    (MacKay 1992) has no such bias. It sets a learned Gaussian noise, which then stays, and one factor for all prior
    scales. Any other target (classes, a known noise, priors that are not Normal) goes to ``method`` as it is.
    """

    method: Method
    start: Method

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.method.batch_size

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of the method. Ctrl-C before it begins gives the Gaussian at the mode so far."""
        method = self.method
        if applies(target):
            structure = "full" if weights(target) <= SMALL else "kronecker"
            laplace = Laplace(structure, start=self.start, prior="evidence")  # type: ignore[arg-type]
            file = None if checkpoint is None else Path(f"{os.fspath(checkpoint)}.evidence")
            try:
                found = laplace.fit(target, data, seed=seed, checkpoint=file, progress=progress)
            except NoMaximum:  # data without noise, say: the method learns what it can
                return method.fit(target, data, seed=seed, checkpoint=checkpoint, progress=progress)
            if found.stopped == "interrupted":
                return found
            target = found.target
            stack = {name: value.unsqueeze(0) for name, value in found.mean.items()}
            point = Empirical(target, found.network, stack)
            likelihood = target.likelihood.requires_grad_(False)
            assert isinstance(likelihood, BoundHomoscedastic)
            target = replace(target, net=network_at(point))
            method = in_units(self.method, float(likelihood.log_scale.exp()))
        return method.fit(target, data, seed=seed, checkpoint=checkpoint, progress=progress)


def in_units(method: Method, noise: float) -> Method:
    """Rates of plain gradient steps, for a loss in units of the noise variance; SWAG is at its start already."""
    if isinstance(method, IVON):
        return replace(method, lr=method.lr * noise**2, hessian=method.hessian / noise**2)
    if isinstance(method, SWAG):
        return replace(method, lr=method.lr * noise**2, start=None)
    return method


def applies(target: Target) -> bool:
    """Whether there is a Gaussian noise to learn, and an evidence to learn it by."""
    likelihood, priors = target.likelihood, target.priors.values()
    fixed = all(isinstance(p, BoundNormal) and not any(True for _ in p.parameters()) for p in priors)
    return fixed and gaussian(likelihood) and any(True for _ in likelihood.parameters())
