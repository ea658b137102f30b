"""Node-based networks: random gains of units and point weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.modules import Modules
from bayou.core.params import Params
from bayou.core.specs import later_field
from bayou.flows import Side
from bayou.guides.factors import GaussianFactor
from bayou.guides.gain import GainFlow, GainSpec, product_moments
from bayou.guides.gaussian import Delta
from bayou.guides.guide import (
    KL,
    Draw,
    Gain,
    Guide,
    GuideSpec,
    Local,
    TensorGuide,
    Tensors,
    Weight,
)
from bayou.guides.joint import FlowName


class NodeGuide(TensorGuide):
    """W = z_out ⊙ M ⊙ z_in with a point M; p(z) = N(1, prior_std²) for every entry.

    KL = E[log q(z) − log p(z)] with the prior at the transformed z (Trinh et al. 2020, 2022).

    Args:
        tensors: the tensor with its prior.
        gains: q(z) by axis.
        prior_std: the standard deviation of the prior of z.
        penalty: whether −log p(M) is added to the KL.
    """

    def __init__(
        self, tensors: Tensors, gains: dict[int, GainFlow], prior_std: float, penalty: bool
    ) -> None:
        super().__init__(tensors)
        self.axes: tuple[int, ...] = tuple(gains)
        self.prior_std = prior_std
        self.penalty = penalty
        self.gains: Modules[GainFlow] = nn.ModuleList(gains.values())  # type: ignore[assignment]
        self.center: nn.Parameter = nn.Parameter(tensors.value.clone())
        if penalty:
            self.kl_kind: KL = KL.constant
        else:
            self.kl_kind = KL.of(max(gain.label.kind for gain in self.gains))
        self.kl_side: Side = reduce(or_, (gain.label.forward for gain in self.gains))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        penalty = -self.prior.log_prob(self.center) if self.penalty else self.center.new_zeros(())
        kl = penalty.expand(n)
        gains = []
        for axis, gain in zip(self.axes, self.gains, strict=True):
            z, log_q = gain.draw(n, rng.fold(seed, axis), start)
            eps = (z - 1) / self.prior_std
            log_p = -0.5 * (eps.square() + LOG_2PI + 2 * math.log(self.prior_std)).sum(-1)
            kl = kl + log_q - log_p
            gains.append(Gain(axis, z))
        weight = Weight(self.center, None, tuple(gains))
        return Draw({self.name: weight if local else weight.center(n)}, kl)

    def gaussian_factors(self) -> tuple[GaussianFactor, ...]:
        return tuple(factor for gain in self.gains for factor in gain.factors)

    def _moments(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and variance of every weight; None with a flow."""
        return product_moments(self.center, dict(zip(self.axes, self.gains, strict=True)))

    def mean(self) -> Params:
        moments = self._moments()
        return {self.name: self.center if moments is None else moments[0]}

    def std(self) -> Params | None:
        moments = self._moments()
        return None if moments is None else {self.name: moments[1].sqrt()}


@dataclass(frozen=True)
class NodeFlow(GainSpec):
    """Node-based network with flow latents (Trinh et al. 2022).

    W = z_out ⊙ M ⊙ z_in, z = flow(z0), with points M and p(z) = N(1, prior_std²) for every entry.
    KL = E[log q(z) − log p(z)], at the transformed z.

    Args:
        flow: a name of ``flows.registry("vector")`` (default "gated"), a callable dim → Transform,
            or None.
        options: keyword arguments of a flow by name.
        where: the gains multiply the "input" (the default) or the "output" of a layer, or "both".
        z: one draw of the gains for each "batch" (the default) or each "example".
        z_std: the initial standard deviation of q(z) (default 0.1).
        prior_std: that of the prior of z (default 0.5).
        components: of q(z0) (default 1); more than one make it a mixture of Gaussians.
        penalty: add −log p of the weights to the KL (default False).
        mixing: gains of up to this many entries (default 256) are correlated by a triangular map
            after the flow.

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.NodeFlow()))
    """

    flow: FlowName = "gated"
    options: dict[str, Any] = field(default_factory=dict)
    where: Literal["input", "output", "both"] = "input"
    z: Literal["batch", "example"] = "batch"
    z_std: float = 0.1
    prior_std: float = 0.5
    components: int = 1
    penalty: bool = False
    mixing: int = 256
    local: ClassVar[bool] = True  # type: ignore[misc]
    noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_positive("z_std", "prior_std")
        self._check_choice("where", ("input", "output", "both"))
        self._check_choice("z", ("batch", "example"))

    def for_vectors(self) -> GuideSpec:
        return Delta(self.penalty)

    def for_natural_gradients(self, std: float, local: Local) -> NodeFlow | None:
        return self if self.components == 1 else None

    def build(self, tensors: Tensors) -> Guide:
        _, value, _, layout = tensors.single
        axes: Sequence[int] = (0,)
        if value.ndim > 1:
            axes_by_place = {
                "input": layout.axes[:1],
                "output": layout.axes[1:],
                "both": layout.axes,
            }
            axes = axes_by_place[self.where]
        gains = {axis: self.make_gain(value, axis) for axis in axes}
        return NodeGuide(tensors, gains, self.prior_std, self.penalty)


@dataclass(frozen=True)
class NodeNoise(NodeFlow):
    """Node-based network with Gaussian latents (Trinh et al. 2020).

    W = z_out ⊙ M ⊙ z_in with points M, q(z) a Gaussian or a mixture of ``components`` Gaussians,
    and p(z) = N(1, prior_std²). KL = E[log q(z) − log p(z)] at the draws of z.

    Args:
        flow: a name of ``flows.registry("vector")`` (default None), a callable dim → Transform, or
            None.
        options: keyword arguments of a flow by name.
        where: the gains multiply the "input" (the default) or the "output" of a layer, or "both".
        z: one draw of the gains for each "batch" (the default) or each "example".
        z_std: the initial standard deviation of q(z) (default 0.1).
        prior_std: that of the prior of z (default 0.5).
        components: of q(z0) (default 1); more than one make it a mixture of Gaussians.
        penalty: add −log p of the weights to the KL (default False).
        mixing: gains of up to this many entries (default 256) are correlated by a triangular map
            after the flow.
    """

    flow: FlowName = None


class MemberGain(nn.Module):
    """z of K members along one axis: points, or N(mean, std²): (K, D).

    Args:
        mean: the initial points or means.
        std: the initial standard deviation; None for points.
    """

    log_std: nn.Parameter | None

    def __init__(self, mean: Tensor, std: float | None) -> None:
        super().__init__()
        self.mean: nn.Parameter = nn.Parameter(mean)
        self.log_std = None if std is None else nn.Parameter(torch.full_like(mean, math.log(std)))

    @property
    def variance(self) -> Tensor:
        """Return the variance of every entry."""
        return torch.zeros_like(self.mean) if self.log_std is None else (2 * self.log_std).exp()


class MemberGuide(TensorGuide):
    """W_k = z_out,k ⊙ M ⊙ z_in,k with a point M that all members share.

    Draw i is of member i mod K in every tensor.

    Args:
        tensors: the tensor with its prior.
        axes: the axes of the gains.
        spec: the settings.
    """

    requires_local = True

    def __init__(self, tensors: Tensors, axes: Sequence[int], spec: RankOne) -> None:
        super().__init__(tensors)
        name, value, _, _ = tensors.single
        self.axes: tuple[int, ...] = tuple(axes)
        self.spec = spec
        self.members: int = spec.members
        self.points: int | None = None if spec.std else spec.members
        self.center: nn.Parameter = nn.Parameter(value.clone())
        gains = []
        for axis in self.axes:
            noise = rng.normal(spec.members, (value.shape[axis],), value, rng.fold(0, name, axis))
            gains.append(MemberGain(1 + spec.spread * noise, spec.std))
        self.gains: Modules[MemberGain] = nn.ModuleList(gains)  # type: ignore[assignment]
        if spec.penalty or spec.std is None:
            self.kl_kind: KL = KL.constant
            self.kl_side: Side = Side.equal
        else:
            self.kl_kind = KL.bound
            self.kl_side = Side.upper

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        member = torch.arange(start, start + n, device=self.center.device) % self.members
        kl = -self.prior.log_prob(self.center) if self.spec.penalty else self.center.new_zeros(())
        gains = []
        for axis, gain in zip(self.axes, self.gains, strict=True):
            z = gain.mean[member]
            variance = gain.variance
            if gain.log_std is not None:
                noise = rng.normal(n, z.shape[1:], z, rng.fold(seed, axis), start)
                z = z + gain.log_std.exp()[member] * noise
                ratio = variance / self.spec.prior_std**2
                distance = ((gain.mean - 1) / self.spec.prior_std).square()
                kl = kl + 0.5 * (ratio + distance - 1 - ratio.log()).sum() / self.members
            gains.append(Gain(axis, z))
        weight = Weight(self.center, None, tuple(gains))
        return Draw({self.name: weight if local else weight.center(n)}, kl.expand(n))

    def gaussian_factors(self) -> tuple[GaussianFactor, ...]:
        weight = 1 / self.members
        return tuple(
            GaussianFactor(gain.mean, gain.log_std, weight)
            for gain in self.gains
            if gain.log_std is not None
        )

    def moment(self, *factors: Tensor) -> Tensor:
        """Compute 1/K Σ_k of the product of factors along the axes: (*shape).

        Args:
            factors: one for each axis, (K, D).
        """
        gains = tuple(Gain(axis, factor) for axis, factor in zip(self.axes, factors, strict=True))
        return Weight(torch.ones_like(self.center), None, gains).center(self.members).mean(0)

    def mean(self) -> Params:
        return {self.name: self.center * self.moment(*(gain.mean for gain in self.gains))}

    def std(self) -> Params:
        square = self.moment(*(gain.mean.square() + gain.variance for gain in self.gains))
        variance = self.center.square() * square - self.mean()[self.name].square()
        return {self.name: variance.clamp_min(0.0).sqrt()}


@dataclass(frozen=True)
class RankOne(GuideSpec):
    """An ensemble of K members at the cost of one network: W_k = M ∘ (s_k·r_kᵀ).

    M is a shared point. BatchEnsemble (Wen et al. 2020, arXiv:2002.06715) where r and s are points;
    with ``std`` they are Gaussians, a mixture of K of them (rank-1 BNN, Dusenberry et al. 2020,
    arXiv:2005.07186), and the KL is the mean over members,
    1/K Σ_k KL(q(r_k, s_k) ‖ p(r, s)), an upper bound of that of the mixture. In a step of VI row i
    of a batch is passed through member i mod K. Draw i of the posterior is of member i mod K, so
    that ``predict`` has each of K points once. For weights of linear layers and convolutions, and
    with ``biases`` for their biases, b_k = b ∘ s'_k; by default biases are shared.

    Args:
        members: K (default 4).
        std: the initial standard deviation of r and s; None (the default) for points.
        spread: the standard deviation around 1 of their initial values (default 0.5).
        prior_std: that of their prior N(1, prior_std²), for Gaussians (default 0.5).
        penalty: add −log p of the weights to the KL (default True).
        biases: whether biases have members, too (default False).

    Example:
        >>> family = bayou.guides.RankOne(members=8)
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(family))
    """

    members: int = 4
    std: float | None = None
    spread: float = 0.5
    prior_std: float = 0.5
    penalty: bool = True
    biases: bool = later_field(False)
    local: ClassVar[bool] = True  # type: ignore[misc]
    noise: ClassVar[bool] = False
    z: ClassVar[Literal["batch", "example"]] = "example"  # type: ignore[misc]

    def __post_init__(self) -> None:
        self._check_whole("members")
        self._check_positive("std", "spread", "prior_std")

    def for_vectors(self) -> GuideSpec:
        return self if self.biases else Delta(self.penalty)

    def for_natural_gradients(self, std: float, local: Local) -> RankOne | None:
        return self if self.std is not None else None

    def build(self, tensors: Tensors) -> Guide:
        _, value, _, layout = tensors.single
        return MemberGuide(tensors, layout.axes if value.ndim > 1 else (0,), self)
