"""Node-based networks: random gains of units and point weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.guides.gain import GainFlow, gained_moments, make_gain
from bayou.guides.gaussian import Delta
from bayou.guides.guide import KL, Draw, Gain, Guide, GuideSpec, TensorGuide, Tensors, Weight
from bayou.guides.joint import FlowName
from bayou.modules import Modules
from bayou.params import Params


class NodeGuide(TensorGuide):
    """W = z_out ⊙ M ⊙ z_in with M a point; KL = E[log q(z) − log p(z)] with the prior at the transformed z.

    p(z) = N(1, prior_std²) for every entry (Trinh et al. 2020, 2022).
    """

    def __init__(self, tensors: Tensors, gains: dict[int, GainFlow], prior_std: float, penalty: bool) -> None:
        super().__init__(tensors)
        self.axes, self.prior_std, self.penalty = tuple(gains), prior_std, penalty
        self.gains: Modules[GainFlow] = nn.ModuleList(gains.values())  # type: ignore[assignment]
        self.center = nn.Parameter(tensors.value.clone())
        self.kl_kind = KL.constant if penalty else KL.of(max(gain.label.kind for gain in self.gains))
        self.kl_side = reduce(or_, (gain.label.forward for gain in self.gains))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        kl = (-self.prior.log_prob(self.center) if self.penalty else self.center.new_zeros(())).expand(n)
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
    """Node-based network with flow latents (Trinh et al. 2022): W = z_out ⊙ M ⊙ z_in, z = flow(z0), with points M.

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
        self._check_positive("z_std", "prior_std", finite=True)
        self._check_choice("where", ("input", "output", "both"))
        self._check_choice("z", ("batch", "example"))

    def for_vectors(self) -> GuideSpec:
        return Delta(self.penalty)

    def build(self, tensors: Tensors) -> Guide:
        _, value, _, layout = tensors.single
        axes = {"input": layout.axes[:1], "output": layout.axes[1:], "both": layout.axes}[self.where]
        gains = {
            axis: make_gain(value.shape[axis], self.flow, self.options, self.z_std, self.components, self.mixing, value)
            for axis in (axes if value.ndim > 1 else (0,))
        }
        return NodeGuide(tensors, gains, self.prior_std, self.penalty)


@dataclass(frozen=True)
class NodeNoise(NodeFlow):
    """Node-based network with Gaussian latents, or a mixture of ``components`` Gaussians (Trinh et al. 2020)."""

    flow: FlowName = None
