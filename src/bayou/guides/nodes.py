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

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.flows import Side
from bayou.guides.gain import GainFlow, gained_moments, make_gain
from bayou.guides.gaussian import Delta
from bayou.guides.guide import KL, Draw, Gain, Guide, GuideSpec, TensorGuide, Tensors, Weight
from bayou.guides.joint import FlowName
from bayou.modules import Modules
from bayou.params import Params


class NodeGuide(TensorGuide):
    """W = z_out ⊙ M ⊙ z_in with M a point; KL = E[log q(z) − log p(z)] with the prior at the
    transformed z.

    p(z) = N(1, prior_std²) for every entry (Trinh et al. 2020, 2022).
    """

    def __init__(
        self, tensors: Tensors, gains: dict[int, GainFlow], prior_std: float, penalty: bool
    ) -> None:
        super().__init__(tensors)
        self.axes, self.prior_std, self.penalty = tuple(gains), prior_std, penalty
        self.gains: Modules[GainFlow] = nn.ModuleList(gains.values())  # type: ignore[assignment]
        self.center = nn.Parameter(tensors.value.clone())
        self.kl_kind = (
            KL.constant if penalty else KL.of(max(gain.label.kind for gain in self.gains))
        )
        self.kl_side = reduce(or_, (gain.label.forward for gain in self.gains))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        kl = (
            -self.prior.log_prob(self.center) if self.penalty else self.center.new_zeros(())
        ).expand(n)
        gains = []
        for axis, gain in zip(self.axes, self.gains, strict=True):
            z, log_q = gain.draw(n, rng.fold(seed, axis), start)
            eps = (z - 1) / self.prior_std
            log_p = -0.5 * (eps.square() + LOG_2PI + 2 * math.log(self.prior_std)).sum(-1)
            kl = kl + log_q - log_p
            gains.append(Gain(axis, z))
        weight = Weight(self.center, None, tuple(gains))
        return Draw({self.name: weight if local else weight.center(n)}, kl)

    def _moments(self) -> tuple[Tensor, Tensor] | None:
        return gained_moments(self.center, dict(zip(self.axes, self.gains, strict=True)))

    def mean(self) -> Params:
        moments = self._moments()
        return {self.name: self.center if moments is None else moments[0]}

    def std(self) -> Params | None:
        moments = self._moments()
        return None if moments is None else {self.name: moments[1].sqrt()}


@dataclass(frozen=True)
class NodeFlow(GuideSpec):
    """Node-based network with flow latents (Trinh et al. 2022): W = z_out ⊙ M ⊙ z_in, z = flow(z0),
    with points M.

    p(z) = N(1, prior_std²) for every entry.

    Args:
        flow: a name of ``flows.registry("vector")``, a callable dim → Transform, or None.
        options: keyword arguments of a flow by name.
        where: the gains multiply the "input" or the "output" of a layer, or "both".
        z: one draw of the gains for each "batch" or each "example".
        z_std: the initial standard deviation of q(z).
        prior_std: that of the prior of z.
        components: of q(z0); more than one make it a mixture of Gaussians.
        penalty: add −log p of the weights to the KL.
        mixing: gains of up to this many entries are correlated by a triangular map after the flow.
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

    def build(self, tensors: Tensors) -> Guide:
        _, value, _, layout = tensors.single
        axes = {"input": layout.axes[:1], "output": layout.axes[1:], "both": layout.axes}[
            self.where
        ]
        gains = {
            axis: make_gain(
                value.shape[axis],
                self.flow,
                self.options,
                self.z_std,
                self.components,
                self.mixing,
                value,
            )
            for axis in (axes if value.ndim > 1 else (0,))
        }
        return NodeGuide(tensors, gains, self.prior_std, self.penalty)


@dataclass(frozen=True)
class NodeNoise(NodeFlow):
    """Node-based network with Gaussian latents, or a mixture of ``components`` Gaussians (Trinh et
    al. 2020).
    """

    flow: FlowName = None


class MemberGain(nn.Module):
    """z of K members along one axis: points, or N(mean, std²): (K, D)."""

    log_std: nn.Parameter | None

    def __init__(self, mean: Tensor, std: float | None) -> None:
        super().__init__()
        self.mean = nn.Parameter(mean)
        self.log_std = None if std is None else nn.Parameter(torch.full_like(mean, math.log(std)))

    @property
    def variance(self) -> Tensor:
        """That of every entry."""
        return torch.zeros_like(self.mean) if self.log_std is None else (2 * self.log_std).exp()


class MemberGuide(TensorGuide):
    """W_k = z_out,k ⊙ M ⊙ z_in,k with a point M that all members share; draw i is of member i mod K
    in every tensor.
    """

    def __init__(self, tensors: Tensors, axes: Sequence[int], spec: RankOne) -> None:
        super().__init__(tensors)
        name, value, _, _ = tensors.single
        self.axes, self.spec, self.members = tuple(axes), spec, spec.members
        self.points = None if spec.std else spec.members
        self.center = nn.Parameter(value.clone())
        starts = [
            rng.normal(spec.members, (value.shape[a],), value, rng.fold(0, name, a))
            for a in self.axes
        ]
        self.gains: Modules[MemberGain] = nn.ModuleList(
            MemberGain(1 + spec.spread * z, spec.std) for z in starts
        )  # type: ignore[assignment]
        constant = spec.penalty or spec.std is None
        self.kl_kind, self.kl_side = (
            (KL.constant, Side.equal) if constant else (KL.bound, Side.upper)
        )

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        member = torch.arange(start, start + n, device=self.center.device) % self.members
        kl = -self.prior.log_prob(self.center) if self.spec.penalty else self.center.new_zeros(())
        gains = []
        for axis, gain in zip(self.axes, self.gains, strict=True):
            z, variance = gain.mean[member], gain.variance
            if gain.log_std is not None:
                noise = rng.normal(n, z.shape[1:], z, rng.fold(seed, axis), start)
                z, ratio = z + gain.log_std.exp()[member] * noise, variance / self.spec.prior_std**2
                far = ((gain.mean - 1) / self.spec.prior_std).square()
                kl = kl + 0.5 * (ratio + far - 1 - ratio.log()).sum() / self.members
            gains.append(Gain(axis, z))
        weight = Weight(self.center, None, tuple(gains))
        return Draw({self.name: weight if local else weight.center(n)}, kl.expand(n))

    def moment(self, *factors: Tensor) -> Tensor:
        """1/K Σ_k of the product of factors (K, D) along the axes: (*shape)."""
        gains = tuple(Gain(axis, factor) for axis, factor in zip(self.axes, factors, strict=True))
        return Weight(torch.ones_like(self.center), None, gains).center(self.members).mean(0)

    def mean(self) -> Params:
        return {self.name: self.center * self.moment(*(gain.mean for gain in self.gains))}

    def std(self) -> Params:
        square = self.moment(*(gain.mean.square() + gain.variance for gain in self.gains))
        return {
            self.name: (self.center.square() * square - self.mean()[self.name].square())
            .clamp_min(0.0)
            .sqrt()
        }


@dataclass(frozen=True)
class RankOne(GuideSpec):
    """An ensemble of K members at the cost of one network: W_k = M ∘ (s_k·r_kᵀ), with a shared
    point M.

    BatchEnsemble (Wen et al. 2020) where r and s are points; with ``std`` they are Gaussians, a
    mixture of K of them (rank-1 BNN, Dusenberry et al. 2020), and the KL is the mean over members,
    an upper bound of that of the mixture. In a step of VI row i of a batch is passed through member
    i mod K. Draw i of the posterior is of member i mod K, so that ``predict`` has each of K points
    once. For weights of linear layers and convolutions; biases are shared.

    Args:
        members: K.
        std: the initial standard deviation of r and s; None: points.
        spread: the standard deviation around 1 of their initial values.
        prior_std: that of their prior N(1, prior_std²), for Gaussians.
        penalty: add −log p of the weights to the KL.
    """

    members: int = 4
    std: float | None = None
    spread: float = 0.5
    prior_std: float = 0.5
    penalty: bool = True
    local: ClassVar[bool] = True  # type: ignore[misc]
    noise: ClassVar[bool] = False
    z: ClassVar[Literal["batch", "example"]] = "example"  # type: ignore[misc]

    def __post_init__(self) -> None:
        self._check_whole("members")
        self._check_positive("std", "spread", "prior_std")

    def for_vectors(self) -> GuideSpec:
        return Delta(self.penalty)

    def build(self, tensors: Tensors) -> Guide:
        _, value, _, layout = tensors.single
        return MemberGuide(tensors, layout.axes if value.ndim > 1 else (0,), self)
