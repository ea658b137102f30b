"""Groups of weights that a prior without a scale takes away: normal-Jeffreys (Louizos 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows import Side
from bayou.guides.gaussian import FFG, Factorized, check_std
from bayou.guides.guide import KL, Draw, Gain, Guide, GuideSpec, Tensors
from bayou.params import Params
from bayou.priors import BoundPrior, LogUniform


class JeffreysGuide(Guide):
    """W = z ⊙ V, V ~ Π N(mean, std²), z_i ~ N(m_i, s_i²) along one axis; p(z_i) ∝ 1/|z_i|, p(V) the user's prior.

    KL of (z, V), an upper bound of that of W: Σ KL(q(z_i) ‖ p(z_i)) + KL(q(V) ‖ p(V)), up to the constant of p(z).
    E[W] = m·mean, Var[W] = s²·(mean² + std²) + m²·std².
    """

    kl_kind, kl_side = KL.constant, Side.upper

    def __init__(self, name: str, value: Tensor, prior: BoundPrior, axis: int, std: float, z_std: float) -> None:
        super().__init__()
        self.names, self.axis, self.prior = (name,), axis, prior
        self.weight = Factorized(name, value, prior, std)
        self.z_mean = nn.Parameter(value.new_ones(value.shape[axis]))
        self.z_prior = LogUniform().bind(self.z_mean.shape)
        self.z_log_std = nn.Parameter(torch.full_like(self.z_mean, math.log(z_std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        v, z = self.weight.draw(n, seed=rng.fold(seed, "weight"), start=start), self._gain(n, seed, start)
        kl = self.z_prior.kl(self.z_mean, self.z_log_std.exp())
        assert kl is not None
        part = v.parts[self.names[0]]
        assert isinstance(part, Tensor)
        return Draw({self.names[0]: z.on(self.weight.center) * part}, v.kl + kl)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        v = self.weight.sample(n, rng.fold(seed, "weight"), start)[self.names[0]]
        return {self.names[0]: self._gain(n, seed, start).on(self.weight.center) * v}

    def _gain(self, n: int, seed: rng.Seed, start: int) -> Gain:
        noise = rng.normal(n, self.z_mean.shape, self.z_mean, rng.fold(seed, "gain"), start)
        return Gain(self.axis, self.z_mean + self.z_log_std.exp() * noise)

    def _on(self, z: Tensor) -> Tensor:
        return Gain(self.axis, z).on(self.weight.center)[0]

    def mean(self) -> Params:
        return {self.names[0]: self._on(self.z_mean) * self.weight.center}

    def std(self) -> Params:
        square, noise = self.weight.center.square(), (2 * self.weight.log_std).exp()
        spread = self._on((2 * self.z_log_std).exp()) * (square + noise) + self._on(self.z_mean.square()) * noise
        return {self.names[0]: spread.sqrt()}


@dataclass(frozen=True)
class NormalJeffreys(GuideSpec):
    """Bayesian compression (Louizos 2017): a gain for each input unit or filter, with p(z) ∝ 1/|z|, empties groups.

    ``bayou.compress`` then removes them. Weights are sampled, one set a step, since their noise has the gain as a
    factor; so it may take more steps than ``SparseVD``.
    ``std``, ``z_std``: where the noise of weights and gains starts. ``warmup``: as of ``SparseVD``.
    """

    std: float = 0.01
    z_std: float = 0.01
    warmup: float = 0.5

    def __post_init__(self) -> None:
        check_std(self.std, "NormalJeffreys std")
        check_std(self.z_std, "NormalJeffreys z_std")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"NormalJeffreys warmup must lie between 0 and 1, got {self.warmup!r}")

    def for_vectors(self) -> GuideSpec:
        return FFG(self.std)

    def build(self, tensors: Tensors) -> JeffreysGuide:
        name, value, prior, layout = tensors.single
        axis = 0 if value.ndim == 1 else layout.out_axis if layout.convolution else layout.in_axis
        return JeffreysGuide(name, value, prior, axis, self.std, self.z_std)
