"""Points and Gaussians: Delta, the factorized Gaussian, sparse variational dropout, low rank plus
diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.guides.guide import (
    KL,
    Draw,
    GuideSpec,
    Local,
    TensorGuide,
    Tensors,
    VectorGuide,
    Weight,
    gaussian_log_prob,
)
from bayou.params import Params, flatten
from bayou.priors import BoundNormal, LogUniform, Prior


class Point(TensorGuide):
    """q(W) = δ(W − mean): a parameter of the model, with KL 0, or a maximum a posteriori with KL
    −log p(mean).
    """

    points = 1

    def __init__(self, tensors: Tensors, penalty: bool, learn: bool) -> None:
        super().__init__(tensors)
        self.penalty, self.kl_kind = penalty, KL.constant if penalty else KL.exact
        self.value = nn.Parameter(tensors.value.clone(), learn)

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        kl = -self.prior.log_prob(self.value) if self.penalty else self.value.new_zeros(())
        part = Weight(self.value) if local else self.value.expand(n, *self.value.shape)
        return Draw({self.name: part}, kl.expand(n))

    def mean(self) -> Params:
        return {self.name: self.value}

    def std(self) -> Params:
        return {self.name: torch.zeros_like(self.value)}


@dataclass(frozen=True)
class Delta(GuideSpec):
    """A point q(W) = δ(W − mean): maximum likelihood, or the maximum a posteriori.

    Args:
        penalty: the KL is −log p(mean), up to a constant, instead of 0.
        learn: False keeps the value that the network has.
    """

    penalty: bool = False
    learn: bool = True

    def build(self, tensors: Tensors) -> Point:
        return Point(tensors, self.penalty, self.learn)


class Factorized(TensorGuide):
    """q(W) = Π N(mean, std²)."""

    factorized = True

    def __init__(self, tensors: Tensors, std: float, kl_kind: KL = KL.exact) -> None:
        super().__init__(tensors)
        self.kl_kind = kl_kind
        self.center = nn.Parameter(tensors.value.clone())
        self.log_std = nn.Parameter(torch.full_like(tensors.value, math.log(std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        weight = Weight(self.center, self.log_std.exp())
        kl = self.prior.kl(weight.mean, weight.std)  # type: ignore[arg-type]
        sampled = (
            None if local and kl is not None else weight.sample(1 if local else n, seed, start)
        )
        if (
            kl is None
        ):  # no closed form: Monte Carlo, with the sampled weights themselves if there are any
            kl = gaussian_log_prob(sampled, self.center, weight.std) - self.prior.log_prob(sampled)  # type: ignore[arg-type]
        return Draw({self.name: weight if local else sampled}, kl.expand(n))  # type: ignore[dict-item]

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        return {self.name: Weight(self.center, self.log_std.exp()).sample(n, seed, start)}

    def log_prob(self, params: Params) -> Tensor:
        w = params[self.name]
        batch = w.shape[: w.ndim - self.center.ndim]
        flat = w.reshape(-1, *self.center.shape)
        return gaussian_log_prob(flat, self.center, self.log_std.exp()).reshape(batch)

    @property
    def log_alpha(self) -> Tensor:
        """log std²/mean² of every weight; those above about 3 can be pruned (Molchanov 2017)."""
        return 2 * (self.log_std - self.center.abs().log())

    def mean(self) -> Params:
        return {self.name: self.center}

    def std(self) -> Params:
        return {self.name: self.log_std.exp()}


@dataclass(frozen=True)
class MeanField(GuideSpec):
    """Fully factorized Gaussian q(W) = Π N(mean, std²) (Blundell et al. 2015).

    Args:
        std: the initial standard deviation of q.
        local: local reparameterization (Kingma et al. 2015): the outputs of a layer are drawn
            instead of its weights, if an example uses the weights once. Weights of a convolution or
            along a sequence are sampled, since one draw is the same at all positions; "positions"
            draws noise at each, and the ELBO is an approximation.
    """

    std: float = 0.01
    local: Local = True
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std")

    def build(self, tensors: Tensors) -> Factorized:
        return Factorized(tensors, self.std)


@dataclass(frozen=True)
class SparseVD(GuideSpec):
    """Variational dropout with a log-uniform prior, FFLU (Kingma 2015; Molchanov 2017): α =
    std²/mean² is learned.

    The prior is improper, so that the KL is up to a constant. Weights with a large ``log_alpha``
    can be pruned.

    Args:
        std: the initial standard deviation of q.
        local: as for ``MeanField``.
        warmup: β of VI increases over at least this fraction of the steps; without it most weights
            are pruned at once.
    """

    std: float = 0.01
    local: Local = True
    warmup: float = 0.5

    def __post_init__(self) -> None:
        self._check_positive("std")
        self._check_warmup()

    def prior(self, prior: Prior) -> Prior:
        return LogUniform()

    def build(self, tensors: Tensors) -> Factorized:
        return Factorized(tensors, self.std, KL.constant)


class LowRankGaussian(VectorGuide):
    """q(w) = N(mean, diag(std²) + F·Fᵀ) over all tensors of the group as one vector w, F (D,
    rank).
    """

    def __init__(self, tensors: Tensors, rank: int, std: float) -> None:
        super().__init__(tensors)
        start = flatten(tensors.values)
        self.center = nn.Parameter(start.clone())
        self.log_std = nn.Parameter(torch.full_like(start, math.log(std)))
        # A column of F gains at most ½·log(1 + |column|²/std²) nats, and costs ½·|column|²/std²:
        # start at that size.
        noise = rng.normal(len(start), (rank,), start, seed=0)
        self.factor = nn.Parameter(noise * (std / math.sqrt(len(start))))

    def _log_det(self) -> Tensor:
        """log det(diag(std²) + F·Fᵀ) by the determinant lemma: O(D·rank²)."""
        scaled = self.factor * (-self.log_std).exp().unsqueeze(-1)
        one = torch.eye(self.factor.shape[1], dtype=scaled.dtype, device=scaled.device)
        return 2 * self.log_std.sum() + torch.logdet(one + scaled.mT @ scaled)

    def _closed_kl(self) -> Tensor | None:
        """KL(q ‖ p) for Normal priors: Gaussian KL with the marginal variances and the
        log-determinant.
        """
        if not all(isinstance(prior, BoundNormal) for prior in self.priors):
            return None
        variance = (2 * self.log_std).exp() + self.factor.square().sum(-1)
        total = 0.5 * (variance.log().sum() - self._log_det())
        means, stds = (self.split(v) for v in (self.center, variance.sqrt()))
        for name, prior in zip(self.names, self.priors, strict=True):
            total = total + prior.kl(means[name], stds[name])  # type: ignore[operator]
        return total

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        dim, rank = self.factor.shape
        eps = rng.normal(n, (dim,), self.center, rng.fold(seed, "diagonal"), start)
        low = rng.normal(n, (rank,), self.center, rng.fold(seed, "factor"), start)
        w = self.center + self.log_std.exp() * eps + low @ self.factor.mT
        params = self.split(w)
        kl = self._closed_kl()
        if kl is None:
            kl = self.log_prob(params) - self.log_prior(params)
        return Draw(dict(params), kl.expand(n))

    def log_prob(self, params: Params) -> Tensor:
        w = self.join(params)
        distribution = torch.distributions.LowRankMultivariateNormal(
            self.center, self.factor, (2 * self.log_std).exp(), validate_args=False
        )
        return distribution.log_prob(w)

    def mean(self) -> Params:
        return self.split(self.center)

    def std(self) -> Params:
        return self.split(((2 * self.log_std).exp() + self.factor.square().sum(-1)).sqrt())


@dataclass(frozen=True)
class LowRank(GuideSpec):
    """One Gaussian over all matched tensors as a vector w: q(w) = N(mean, diag(std²) + F·Fᵀ) (Ong
    et al. 2018).

    Args:
        rank: the number of columns of F.
        std: the initial standard deviation of q.
    """

    rank: int = 8
    std: float = 0.01
    joint: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std")
        self._check_whole("rank")

    def build(self, tensors: Tensors) -> LowRankGaussian:
        return LowRankGaussian(tensors, self.rank, self.std)
