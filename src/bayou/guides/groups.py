"""Group sparsity by priors of scales: normal-Jeffreys and the horseshoe (Louizos et al. 2017)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params
from bayou.flows import Side
from bayou.guides.gaussian import Factorized, MeanField
from bayou.guides.guide import KL, Draw, Gain, GuideSpec, Local, TensorGuide, Tensors, Weight
from bayou.priors import BoundLogUniform


class GroupGuide(TensorGuide):
    """W = z ⊙ V, V ~ Π N(mean, std²), z along one axis; p(V) is the user's prior.

    KL of (z, V), an upper bound of that of W: KL(q(z) ‖ p(z)) + KL(q(V) ‖ p(V)).
    E[W] = E[z]·mean, Var[W] = Var[z]·(mean² + std²) + E[z]²·std².

    Args:
        tensors: the tensor with its prior.
        std: the initial standard deviation of V.
    """

    kl_side = Side.upper

    def __init__(self, tensors: Tensors, std: float) -> None:
        super().__init__(tensors)
        self.axis: int = tensors.gain_axis
        self.weight: Factorized = Factorized(tensors, std)

    @abstractmethod
    def gains(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        """Draw z n times: (n, D).

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """

    @abstractmethod
    def gain_kl(self) -> Tensor:
        """Compute KL(q(z) ‖ p(z))."""

    @abstractmethod
    def gain_moments(self) -> tuple[Tensor, Tensor]:
        """Return E[z] and Var[z], (D,) each."""

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        v = self.weight.draw(n, local=local, seed=rng.fold(seed, "weight"), start=start)
        factor = v.parts[self.name]
        z = self.gains(n, seed, start)
        product: Tensor | Weight
        if isinstance(factor, Weight):
            product = replace(factor, gains=(Gain(self.axis, z),), on_noise=True)
        else:
            product = self._align(z) * factor
        return Draw({self.name: product}, v.kl + self.gain_kl())

    def _align(self, z: Tensor) -> Tensor:
        """Return gains shaped to multiply stacked weights."""
        return Gain(self.axis, z).on(self.weight.center)

    def mean(self) -> Params:
        return {self.name: self._align(self.gain_moments()[0])[0] * self.weight.center}

    def std(self) -> Params:
        mean, variance = (self._align(moment)[0] for moment in self.gain_moments())
        square = self.weight.center.square()
        noise = (2 * self.weight.log_std).exp()
        return {self.name: (variance * (square + noise) + mean.square() * noise).sqrt()}


@final
class JeffreysGuide(GroupGuide):
    """z_i ~ N(m_i, s_i²), p(z_i) ∝ 1/|z_i|: the KL is up to the constant of p(z).

    Args:
        tensors: the tensor with its prior.
        std: the initial standard deviation of V.
        z_std: the initial standard deviation of z.
    """

    kl_kind = KL.constant
    scales: ClassVar[tuple[str, ...]] = ("log_std", "z_log_std")

    def __init__(self, tensors: Tensors, std: float, z_std: float) -> None:
        super().__init__(tensors, std)
        self.z_mean: nn.Parameter = nn.Parameter(
            tensors.value.new_ones(tensors.value.shape[self.axis])
        )
        self.z_prior: BoundLogUniform = BoundLogUniform(self.z_mean.shape)
        self.z_log_std: nn.Parameter = nn.Parameter(torch.full_like(self.z_mean, math.log(z_std)))

    def gains(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        noise = rng.normal(n, self.z_mean.shape, self.z_mean, rng.fold(seed, "gain"), start)
        return self.z_mean + self.z_log_std.exp() * noise

    def gain_kl(self) -> Tensor:
        return self.z_prior.kl(self.z_mean, self.z_log_std.exp())

    def gain_moments(self) -> tuple[Tensor, Tensor]:
        return self.z_mean, (2 * self.z_log_std).exp()


@final
class LogNormals(nn.Module):
    """q(a)·q(b) for a·b, the square of a half-Cauchy variable, with log-normal q.

    a ~ Gamma(½, scale k²) and b ~ inverse Gamma(½, 1). log a ~ N(m, s²) and log b ~ N(m', s'²), so
    log √(a·b) ~ N((m + m')/2, (s² + s'²)/4). It starts at √(a·b) = 1.

    Args:
        reference: a tensor with the dtype and device.
        size: the number of variables.
        scale: k.
        std: the initial s and s'.
    """

    def __init__(self, reference: Tensor, size: int, scale: float, std: float) -> None:
        super().__init__()
        self.scale = scale
        start = 2 * math.log(scale)
        # m of a, and of b.
        self.log_median: nn.Parameter = nn.Parameter(
            reference.new_tensor([[start], [-start]]).repeat(1, size)
        )
        self.log_std: nn.Parameter = nn.Parameter(reference.new_full((2, size), math.log(std)))

    def kl(self) -> Tensor:
        """Compute the KL of q(a)·q(b), a scalar.

        KL(q(a) ‖ Γ(½, k²)) = e^(m + s²/2)/k² + log k − m/2 − log s − ½·log 2e, and of b with
        m' → −m', k = 1.
        """
        log_a, log_b = self.log_median.unbind()
        log_k = math.log(self.scale)
        var_a, var_b = (2 * self.log_std).exp().unbind()
        size = (log_a + 0.5 * var_a - 2 * log_k).exp() + (0.5 * var_b - log_b).exp()
        log_std = self.log_std.sum(0)
        return (size + log_k + 0.5 * (log_b - log_a) - log_std - (math.log(2) + 1)).sum()

    def root(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of log √(a·b): (size,) each."""
        return 0.5 * self.log_median.sum(0), 0.25 * (2 * self.log_std).exp().sum(0)


@final
class HorseshoeGuide(GroupGuide):
    """z_i = s·t_i, with priors s ~ C⁺(0, scale) and t_i ~ C⁺(0, 1).

    q of each is √(a·b) with log-normal a and b.

    Args:
        tensors: the tensor with its prior.
        std: the initial standard deviation of V.
        z_std: the initial standard deviation of log a and log b.
        scale: the scale of s.
    """

    kl_kind = KL.bound

    def __init__(self, tensors: Tensors, std: float, z_std: float, scale: float) -> None:
        super().__init__(tensors, std)
        self.each: LogNormals = LogNormals(
            tensors.value, tensors.value.shape[self.axis], 1.0, z_std
        )
        self.all: LogNormals = LogNormals(tensors.value, 1, scale, z_std)

    def gains(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        log_z = torch.zeros_like(self.all.log_median[0])
        for name, variables in (("each", self.each), ("all", self.all)):
            mean, variance = variables.root()
            noise = rng.normal(n, mean.shape, mean, rng.fold(seed, name), start)
            log_z = log_z + mean + variance.sqrt() * noise
        return log_z.exp()

    def gain_kl(self) -> Tensor:
        return self.each.kl() + self.all.kl()

    def gain_moments(self) -> tuple[Tensor, Tensor]:
        mean_each, variance_each = self.each.root()
        mean_all, variance_all = self.all.root()
        mean = mean_each + mean_all
        variance = variance_each + variance_all
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
    """Bayesian compression with normal-Jeffreys priors (Louizos et al. 2017, arXiv:1705.08665).

    W = z ⊙ V with one gain for each input unit or filter, q(z) = Π N(m_i, s_i²), p(z_i) ∝ 1/|z_i|
    and q(V) = Π N(mean, std²). KL = KL(q(z) ‖ p(z)) + KL(q(V) ‖ p(V)), an upper bound of that of W,
    up to the constant of p(z). ``bayou.compress`` removes the units whose gain is close to 0.

    Args:
        std: the initial standard deviation of the weights V (default 0.01).
        z_std: the initial standard deviation of the gains (default 0.01).
        warmup: β of VI increases over at least this fraction of the steps (default 0.5); without
            it most units are pruned at once.
        local: local reparameterization, as for ``MeanField`` (default True).
        z: one draw of the gains for each "batch" (the default) or, where noise is local, each
            "example".

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.guides.NormalJeffreys()))
        >>> small = bayou.compress(posterior, example_x=x)
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
    """The horseshoe for groups of weights (Louizos et al. 2017, arXiv:1705.08665).

    W = z ⊙ V, z_i = s·t_i, s ~ C⁺(0, scale) of a layer, t_i ~ C⁺(0, 1) of an input unit or filter.
    s and t_i are √(a·b) with a ~ Gamma(½, scale²), b ~ inverse Gamma(½, 1) and log-normal q(a),
    q(b); the KL is KL(q(a) ‖ p(a)) + KL(q(b) ‖ p(b)) for each of them, plus KL(q(V) ‖ p(V)): an
    upper bound of that of W. With p(V) = N(0, 1), the default prior, W has a horseshoe prior by
    unit: a density with a pole at 0 and heavy tails.

    Args:
        scale: the scale of s (default 1e-5); a smaller one prunes more units.
        std: the initial standard deviation of the weights V (default 0.01).
        z_std: the initial standard deviation of log a and log b (default 0.01).
        warmup: β of VI increases over at least this fraction of the steps (default 0.5).
        local: local reparameterization, as for ``MeanField`` (default True).
        z: one draw of the gains for each "batch" (the default) or, where noise is local, each
            "example".
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
