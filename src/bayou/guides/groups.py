"""Group sparsity by priors of scales: normal-Jeffreys and the horseshoe (Louizos 2017)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows import Side
from bayou.guides.gaussian import Factorized, MeanField
from bayou.guides.guide import KL, Draw, Gain, GuideSpec, Local, TensorGuide, Tensors, Weight
from bayou.params import Params
from bayou.priors import LogUniform


class GroupGuide(TensorGuide):
    """W = z ⊙ V, V ~ Π N(mean, std²), z along one axis; p(V) the user's prior.

    KL of (z, V), an upper bound of that of W: KL(q(z) ‖ p(z)) + KL(q(V) ‖ p(V)).
    E[W] = E[z]·mean, Var[W] = Var[z]·(mean² + std²) + E[z]²·std².
    """

    kl_side = Side.upper

    def __init__(self, tensors: Tensors, std: float) -> None:
        super().__init__(tensors)
        self.axis = tensors.gain_axis
        self.weight = Factorized(tensors, std)

    @abstractmethod
    def gains(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        """n draws of z: (n, D)."""

    @abstractmethod
    def gain_kl(self) -> Tensor:
        """KL(q(z) ‖ p(z))."""

    @abstractmethod
    def gain_moments(self) -> tuple[Tensor, Tensor]:
        """E[z] and Var[z], (D,) each."""

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        v = self.weight.draw(n, local=local, seed=rng.fold(seed, "weight"), start=start)
        part, z = v.parts[self.name], self.gains(n, seed, start)
        if isinstance(part, Weight):
            whole: Tensor | Weight = replace(part, gains=(Gain(self.axis, z),), on_noise=True)
        else:
            whole = self._on(z) * part
        return Draw({self.name: whole}, v.kl + self.gain_kl())

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        v = self.weight.sample(n, rng.fold(seed, "weight"), start)[self.name]
        return {self.name: self._on(self.gains(n, seed, start)) * v}

    def _on(self, z: Tensor) -> Tensor:
        return Gain(self.axis, z).on(self.weight.center)

    def mean(self) -> Params:
        return {self.name: self._on(self.gain_moments()[0])[0] * self.weight.center}

    def std(self) -> Params:
        mean, variance = (self._on(moment)[0] for moment in self.gain_moments())
        square, noise = self.weight.center.square(), (2 * self.weight.log_std).exp()
        return {self.name: (variance * (square + noise) + mean.square() * noise).sqrt()}


@final
class JeffreysGuide(GroupGuide):
    """z_i ~ N(m_i, s_i²), p(z_i) ∝ 1/|z_i|: the KL is up to the constant of p(z)."""

    kl_kind = KL.constant
    scales = ("log_std", "z_log_std")

    def __init__(self, tensors: Tensors, std: float, z_std: float) -> None:
        super().__init__(tensors, std)
        self.z_mean = nn.Parameter(tensors.value.new_ones(tensors.value.shape[self.axis]))
        self.z_prior = LogUniform().bind(self.z_mean.shape)
        self.z_log_std = nn.Parameter(torch.full_like(self.z_mean, math.log(z_std)))

    def gains(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        noise = rng.normal(n, self.z_mean.shape, self.z_mean, rng.fold(seed, "gain"), start)
        return self.z_mean + self.z_log_std.exp() * noise

    def gain_kl(self) -> Tensor:
        kl = self.z_prior.kl(self.z_mean, self.z_log_std.exp())
        assert kl is not None
        return kl

    def gain_moments(self) -> tuple[Tensor, Tensor]:
        return self.z_mean, (2 * self.z_log_std).exp()


@final
class LogNormals(nn.Module):
    """q(a)·q(b) for a·b, the square of a half-Cauchy variable: a ~ Gamma(½, scale k²), b ~ inverse
    Gamma(½, 1).

    log a ~ N(m, s²) and log b ~ N(m', s'²), so log √(a·b) ~ N((m + m')/2, (s² + s'²)/4). It starts
    at √(a·b) = 1.
    """

    def __init__(self, like: Tensor, size: int, scale: float, std: float) -> None:
        super().__init__()
        self.scale = scale
        start = 2 * math.log(scale)
        self.log_median = nn.Parameter(
            like.new_tensor([[start], [-start]]).repeat(1, size)
        )  # m of a, and of b
        self.log_std = nn.Parameter(like.new_full((2, size), math.log(std)))

    def kl(self) -> Tensor:
        """KL(q(a) ‖ Γ(½, k²)) = e^(m + s²/2)/k² + log k − m/2 − log s − ½·log 2e, and of b with m'
        → −m', k = 1.
        """
        (a, b), log_k = self.log_median.unbind(), math.log(self.scale)
        var_a, var_b = (2 * self.log_std).exp().unbind()
        size = (a + 0.5 * var_a - 2 * log_k).exp() + (0.5 * var_b - b).exp()
        return (size + log_k + 0.5 * (b - a) - self.log_std.sum(0) - (math.log(2) + 1)).sum()

    def root(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of log √(a·b): (size,) each."""
        return 0.5 * self.log_median.sum(0), 0.25 * (2 * self.log_std).exp().sum(0)


@final
class HorseshoeGuide(GroupGuide):
    """z_i = s·t_i, with priors s ~ C⁺(0, scale) and t_i ~ C⁺(0, 1); q of each is √(a·b) with
    log-normal a and b.
    """

    kl_kind = KL.bound

    def __init__(self, tensors: Tensors, std: float, z_std: float, scale: float) -> None:
        super().__init__(tensors, std)
        self.each = LogNormals(tensors.value, tensors.value.shape[self.axis], 1.0, z_std)
        self.all = LogNormals(tensors.value, 1, scale, z_std)

    def gains(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        log_z: Tensor | float = 0.0
        for name, part in (("each", self.each), ("all", self.all)):
            mean, variance = part.root()
            log_z = (
                log_z
                + mean
                + variance.sqrt() * rng.normal(n, mean.shape, mean, rng.fold(seed, name), start)
            )
        assert isinstance(log_z, Tensor)
        return log_z.exp()

    def gain_kl(self) -> Tensor:
        return self.each.kl() + self.all.kl()

    def gain_moments(self) -> tuple[Tensor, Tensor]:
        mean, variance = (
            one + all_ for one, all_ in zip(self.each.root(), self.all.root(), strict=True)
        )
        center = (mean + 0.5 * variance).exp()
        return center, center.square() * variance.expm1()


class _Groups(GuideSpec):
    """Settings of both families.

    Args:
        std: the initial standard deviation of the weights.
        z_std: the initial standard deviation of the gains.
        warmup: as for ``SparseVD``.
        local: as for ``MeanField``.
        z: one draw of the gains for each "batch" or, where noise is local, each "example".
    """

    std: float
    z_std: float
    warmup: float
    local: Local
    z: Literal["batch", "example"]

    def __post_init__(self) -> None:
        self._check_positive("std", "z_std")
        self._check_warmup()
        self._check_choice("z", ("batch", "example"))

    def for_vectors(self) -> GuideSpec:
        return MeanField(self.std, self.local)


@final
@dataclass(frozen=True)
class NormalJeffreys(_Groups):
    """Bayesian compression (Louizos 2017): W = z ⊙ V with one gain for each input unit or filter
    and p(z) ∝ 1/|z|.

    ``bayou.compress`` removes the units whose gain is close to 0.
    """

    std: float = 0.01
    z_std: float = 0.01
    warmup: float = 0.5
    local: Local = True
    z: Literal["batch", "example"] = "batch"

    def build(self, tensors: Tensors) -> JeffreysGuide:
        return JeffreysGuide(tensors, self.std, self.z_std)


@final
@dataclass(frozen=True)
class HalfCauchy(_Groups):
    """The horseshoe for groups (Louizos 2017): z_i = s·t_i, s ~ C⁺(0, scale) of a layer, t_i ~
    C⁺(0, 1) of a unit.

    With p(V) = N(0, 1), the default prior, W = z ⊙ V has a horseshoe prior by input unit or filter:
    a density with a pole at 0 and heavy tails.

    Args:
        scale: the scale of s; a smaller one prunes more units.
    """

    scale: float = 1e-5
    std: float = 0.01
    z_std: float = 0.01
    warmup: float = 0.5
    local: Local = True
    z: Literal["batch", "example"] = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("scale")

    def build(self, tensors: Tensors) -> HorseshoeGuide:
        return HorseshoeGuide(tensors, self.std, self.z_std, self.scale)
