"""Points and Gaussians: Delta, the factorized Gaussian, sparse variational dropout, low rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, flatten
from bayou.curvature.covariance import Covariance, Diagonal
from bayou.curvature.joint import JointNormal
from bayou.curvature.swag import LowRankPlusDiagonal
from bayou.guides.conditional import ConditionalGaussian
from bayou.guides.gaussian_terms import gaussian_terms, has_simple_prior
from bayou.guides.guide import (
    KL,
    Draw,
    DrawNoise,
    GuideSpec,
    Local,
    TensorGuide,
    Tensors,
    VectorGuide,
    Weight,
    gaussian_log_prob,
)
from bayou.priors import BoundNormal, DensityPrior, LogUniform, Prior, joint_rules


class PointGuide(TensorGuide):
    """q(W) = δ(W − mean), with KL 0, or −log p(mean) for a maximum a posteriori.

    Args:
        tensors: the tensor with its prior.
        penalty: whether the KL is −log p(mean).
        learn: whether the value is trained.
    """

    points: int | None = 1
    is_point = True

    def __init__(self, tensors: Tensors, penalty: bool, learn: bool) -> None:
        super().__init__(tensors)
        self.penalty = penalty
        self.kl_kind = KL.constant if penalty else KL.exact
        self.value: nn.Parameter = nn.Parameter(tensors.value.clone(), learn)

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        kl = -self.prior.log_prob(self.value) if self.penalty else self.value.new_zeros(())
        value = Weight(self.value) if local else self.value.expand(n, *self.value.shape)
        return Draw({self.name: value}, kl.expand(n))

    def mean(self) -> Params:
        return {self.name: self.value}

    def std(self) -> Params:
        return {self.name: torch.zeros_like(self.value)}

    def as_prior(self) -> dict[str, Prior]:
        """Return no prior, so that a point keeps the one it has."""
        return {}


@dataclass(frozen=True)
class Delta(GuideSpec):
    """A point q(W) = δ(W − mean): maximum likelihood, or the maximum a posteriori.

    Its KL is 0, as that of a parameter of the model, or −log p(mean) with ``penalty``.

    Args:
        penalty: the KL is −log p(mean), up to a constant, instead of 0 (default False).
        learn: False keeps the value that the network has (default True).
    """

    penalty: bool = False
    learn: bool = True

    def for_natural_gradients(self, std: float, local: Local) -> Delta:
        return self

    def build(self, tensors: Tensors) -> PointGuide:
        return PointGuide(tensors, self.penalty, self.learn)


class Factorized(TensorGuide):
    """q(W) = Π N(mean, std²).

    Args:
        tensors: the tensor with its prior.
        std: the initial standard deviation.
        kl_kind: how the KL is known.
    """

    factorized = True

    def __init__(self, tensors: Tensors, std: float, kl_kind: KL = KL.exact) -> None:
        super().__init__(tensors)
        self.kl_kind = kl_kind
        self.center: nn.Parameter = nn.Parameter(tensors.value.clone())
        self.log_std: nn.Parameter = nn.Parameter(torch.full_like(tensors.value, math.log(std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        if has_simple_prior(self.prior):
            eps = None if local else rng.normal(n, self.center.shape, self.center, seed, start)
            return self.draw_together([self], [DrawNoise(n, eps)])[0]
        std = self.log_std.exp()
        weight = Weight(self.center, std)
        kl = self.prior.kl(self.center, std)
        if local and kl is not None:
            return Draw({self.name: weight}, kl.expand(n))
        sampled = weight.sample(1 if local else n, seed, start)
        if kl is None:  # no closed form: Monte Carlo, with the sampled weights themselves
            kl = gaussian_log_prob(sampled, self.center, std) - self.prior.log_prob(sampled)
        return Draw({self.name: weight if local else sampled}, kl.expand(n))

    def draw_noise(
        self, n: int, local: bool, seed: rng.Seed = None, start: int = 0
    ) -> DrawNoise | None:
        if not has_simple_prior(self.prior):
            return None
        eps = None if local else rng.normal(n, self.center.shape, self.center, seed, start)
        return DrawNoise(n, eps)

    @classmethod
    def draw_together(cls, guides: Sequence[Factorized], noises: Sequence[DrawNoise]) -> list[Draw]:
        terms = gaussian_terms(
            [guide.center for guide in guides],
            [guide.log_std for guide in guides],
            [guide.prior for guide in guides if has_simple_prior(guide.prior)],
        )
        draws = []
        for guide, term, noise in zip(guides, terms, noises, strict=True):
            weight = Weight(term.center, term.std)
            value = weight if noise.weight is None else weight.at_noise(noise.n, noise.weight)
            draws.append(Draw({guide.name: value}, term.kl.expand(noise.n)))
        return draws

    def conditional_gaussian(self) -> ConditionalGaussian:
        return ConditionalGaussian(self.name, self.center, self.log_std, self.prior)

    def log_prob(self, params: Params) -> Tensor:
        w = params[self.name]
        batch = w.shape[: w.ndim - self.center.ndim]
        flat = w.reshape(-1, *self.center.shape)
        return gaussian_log_prob(flat, self.center, self.log_std.exp()).reshape(batch)

    @torch.no_grad()
    def as_gaussian(self) -> Covariance:
        std = self.log_std.exp()
        return Diagonal({self.name: std.shape}, {self.name: std})

    @torch.no_grad()
    def set_gaussian(self, mean: Params, covariance: Covariance) -> None:
        self.center.copy_(mean[self.name])
        self.log_std.copy_(covariance.variance()[self.name].log() / 2)

    @property
    def log_alpha(self) -> Tensor:
        """Return log std²/mean² of every weight.

        Those above about 3 can be pruned (Molchanov et al. 2017).
        """
        return 2 * (self.log_std - self.center.abs().log())

    def mean(self) -> Params:
        return {self.name: self.center}

    def std(self) -> Params:
        return {self.name: self.log_std.exp()}

    def as_prior(self) -> dict[str, Prior]:
        """Return q itself, a Normal with a mean and a scale of every weight."""
        normal = BoundNormal(self.center.shape, self.center, self.log_std)
        return {self.name: DensityPrior(normal)}


@dataclass(frozen=True)
class MeanField(GuideSpec):
    """Factorized Gaussian posterior (Blundell et al. 2015, arXiv:1505.05424).

    q(W) = Π_ij N(W_ij; mean_ij, std_ij²), with means that start at the values of the network. For
    a Normal prior N(m, s²) the KL is in closed form,
    Σ ½·(std² + (mean − m)²)/s² − ½ − log(std/s); for other priors it is estimated from the draws.

    Args:
        std: the initial standard deviation of q (default 0.01).
        local: local reparameterization (Kingma et al. 2015): the outputs of a layer are drawn
            instead of its weights, if an example uses the weights once. Weights of a convolution or
            along a sequence are sampled, since one draw is the same at all positions; "positions"
            draws noise at each, and the ELBO is an approximation. False samples all weights
            (default True).

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.MeanField()))
        >>> bnn = bayou.bayesianize(net, bayou.MeanField(std=0.1))
    """

    std: float = 0.01
    local: Local = True
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std")

    def for_natural_gradients(self, std: float, local: Local) -> MeanField:
        return replace(self, std=std, local=local)

    def build(self, tensors: Tensors) -> Factorized:
        return Factorized(tensors, self.std)


@dataclass(frozen=True)
class SparseVD(GuideSpec):
    """Sparse variational dropout: a factorized Gaussian with a log-uniform prior.

    q(W) = Π N(mean, std²), p(W) ∝ 1/|W|, so that α = std²/mean² is learned (Kingma et al. 2015;
    Molchanov et al. 2017, arXiv:1701.05369). The prior is improper, so that the KL, an
    approximation of −∫ q·log(q/p) as a function of log α, is up to a constant. Weights with a large
    ``log_alpha`` can be pruned.

    Args:
        std: the initial standard deviation of q (default 0.01).
        local: as for ``MeanField`` (default True).
        warmup: β of VI increases over at least this fraction of the steps (default 0.5); without
            it most weights are pruned at once.
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
    """q(w) = N(mean, diag(std²) + F·Fᵀ) over the tensors of a group as one vector w, F (D, rank).

    Args:
        tensors: the tensors with their priors.
        rank: the number of columns of F.
        std: the initial standard deviation.
    """

    def __init__(self, tensors: Tensors, rank: int, std: float) -> None:
        super().__init__(tensors)
        start = flatten(tensors.values)
        self.center: nn.Parameter = nn.Parameter(start.clone())
        self.log_std: nn.Parameter = nn.Parameter(torch.full_like(start, math.log(std)))
        # A column of F gains at most ½·log(1 + |column|²/std²) nats, and costs ½·|column|²/std²:
        # start at that size.
        noise = rng.normal(len(start), (rank,), start, seed=0)
        self.factor: nn.Parameter = nn.Parameter(noise * (std / math.sqrt(len(start))))

    def _log_det(self) -> Tensor:
        """Compute log det(diag(std²) + F·Fᵀ) by the determinant lemma, in O(D·rank²)."""
        scaled = self.factor * (-self.log_std).exp().unsqueeze(-1)
        identity = torch.eye(self.factor.shape[1], dtype=scaled.dtype, device=scaled.device)
        return 2 * self.log_std.sum() + torch.logdet(identity + scaled.mT @ scaled)

    def _closed_kl(self) -> Tensor | None:
        """Compute KL(q ‖ p) for Normal priors; None if a prior is not Normal.

        It is the Gaussian KL with the marginal variances and the log-determinant.
        """
        if not all(isinstance(prior, BoundNormal) for prior in self.priors):
            return None
        variance = (2 * self.log_std).exp() + self.factor.square().sum(-1)
        total = 0.5 * (variance.log().sum() - self._log_det())
        means = self.split(self.center)
        stds = self.split(variance.sqrt())
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

    def _covariance_tensors(self) -> Params:
        """Return the tensors of the covariance as a ``LowRankPlusDiagonal``."""
        std = self.split(self.log_std.exp())
        factor = self.split(self.factor.mT)
        tensors = {f"std.{name}": value for name, value in std.items()}
        return tensors | {f"factor.{name}": value for name, value in factor.items()}

    @torch.no_grad()
    def as_gaussian(self) -> Covariance:
        rank = self.center.new_tensor(float(self.factor.shape[1]))
        return LowRankPlusDiagonal(self.shapes, self._covariance_tensors() | {"rank": rank})

    @torch.no_grad()
    def set_gaussian(self, mean: Params, covariance: Covariance) -> None:
        tensors = covariance.tensors
        std = {name: tensors[f"std.{name}"] for name in self.names}
        factor = {name: tensors[f"factor.{name}"] for name in self.names}
        self.center.copy_(self.join(mean))
        self.log_std.copy_(self.join(std).log())
        self.factor.copy_(self.join(factor).mT)

    @torch.no_grad()
    def _as_joint_prior(self) -> dict[str, Prior]:
        """Return q itself, a Gaussian that has marginals in closed form."""
        mean = {name: value.detach().clone() for name, value in self.mean().items()}
        density = JointNormal(
            mean, LowRankPlusDiagonal(self.shapes, self._covariance_tensors()), {}
        )
        return joint_rules(density, mean, self.std(), self.names)


@dataclass(frozen=True)
class LowRank(GuideSpec):
    """One Gaussian with a low-rank covariance over all matched tensors as a vector w of D entries.

    q(w) = N(mean, diag(std²) + F·Fᵀ), F (D, rank) (Ong et al. 2018, arXiv:1701.03208). For Normal
    priors the KL is in closed form, KL(q ‖ p) = Σ KL(N(mean_i, v_i) ‖ p_i) + ½·(Σ log v_i − log
    det(diag(std²) + F·Fᵀ)) with the marginal variances v; for other priors it is estimated from the
    draws.

    Args:
        rank: the number of columns of F (default 8).
        std: the initial standard deviation of q (default 0.01).

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.LowRank(rank=4)))
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
