"""Multiplicative normalizing flows: a random gain per unit or filter, and Gaussian noise of every
weight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.flows import Label, Ladj, Map, Side
from bayou.guides.gain import GainFlow, gained_moments, make_gain
from bayou.guides.gaussian import MeanField
from bayou.guides.guide import (
    KL,
    Draw,
    Gain,
    Guide,
    GuideSpec,
    Local,
    TensorGuide,
    Tensors,
    Unfolded,
    Weight,
    gaussian_log_prob,
)
from bayou.guides.joint import FlowName, make_transform, push
from bayou.params import Params
from bayou.priors import BoundNormal
from bayou.priors.base import squares

MOMENTS = 4096  # draws of a gain for its mean (within 1.6 % of its std) and its std (within 1.1 %)


def rows(weight: Tensor, axis: int) -> Tensor:
    """The weight as a matrix (D, J) whose rows run along ``axis``."""
    return weight.movedim(axis, 0).reshape(weight.shape[axis], -1)


class Auxiliary(nn.Module, ABC):
    """r(z|W), which bounds the entropy of q(W) = ∫ q(W|z) q(z) dz; ``forward`` gives −log
    r(z|W).
    """

    label = Label()  # of log r

    @abstractmethod
    def forward(
        self,
        z: Tensor,
        mean: Tensor,
        std: Tensor,
        weight: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        """−log r(z|W) (n,), or its expectation over W given z, for z (n, D) and matrices mean, std
        (D, J).
        """

    @abstractmethod
    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        """log r(z|W) at given weights: z (n, D), weight (n, D, J) to (n,)."""


class Conjugate(Auxiliary):
    """r(z|W) ∝ q(W|z)·N(z; a, s²) with learned a and s: the posterior of z if q(z) is the Gaussian
    N(a, s²).

    With C = Σ_j M²/σ² and P = C + 1/s², E[−log r] = Σ_i ½·log 2π − ½·log P + ½·(C + ((a −
    z)/s²)²)/P exactly.
    """

    def __init__(self, dim: int, std: float) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.ones(dim))
        self.log_std = nn.Parameter(torch.full((dim,), math.log(std)))

    def forward(
        self,
        z: Tensor,
        mean: Tensor,
        std: Tensor,
        weight: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        information = (mean / std).square().sum(1)  # C
        inv_var = (-2 * self.log_std).exp()
        precision = information + inv_var
        pull = (self.center - z) * inv_var
        return 0.5 * (LOG_2PI - precision.log() + (information + pull.square()) / precision).sum(-1)

    def posterior(self, mean: Tensor, std: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of r(z|W) for weights (n, D, J): (n, D) and (D,)."""
        inv_var = (-2 * self.log_std).exp()
        precision = (mean / std).square().sum(1) + inv_var
        evidence = (weight * (mean / std.square())).sum(-1)  # B
        return (evidence + self.center * inv_var) / precision, precision.rsqrt()

    def propose(
        self,
        k: int,
        mean: Tensor,
        std: Tensor,
        weight: Tensor,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """k draws of z ~ r(z|W) for each of the weights (n, D, J), with log r(z|W): (k, n, D) and
        (k, n).
        """
        center, spread = self.posterior(mean, std, weight)
        eps = rng.normal(k, center.shape, center, seed, start)
        log_scale = 0.5 * LOG_2PI * eps.shape[-1] + spread.log().sum()
        return center + spread * eps, -0.5 * torch.linalg.vector_norm(
            eps, dim=-1
        ).square() - log_scale

    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        center, spread = self.posterior(mean, std, weight)
        return -0.5 * (((z - center) / spread).square() + LOG_2PI).sum(-1) - spread.log().sum()


class Published(Auxiliary):
    """The paper's r(z|W): a flow onto N(μ, e^v) with μ = b1·mean_j tanh(cᵀW)_j and v = b2·(the
    same).
    """

    def __init__(self, dim: int, transform: Map | None) -> None:
        super().__init__()
        noise = 0.1 * rng.normal(3, (dim,), torch.zeros(()), seed=0)
        self.c, self.b1, self.b2 = (nn.Parameter(row.clone()) for row in noise)
        self.transform = transform
        self.label = (
            Label() if transform is None else transform.opposite
        )  # the flow of r is used inverted

    def forward(
        self,
        z: Tensor,
        mean: Tensor,
        std: Tensor,
        weight: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        if weight is None:  # cᵀW is Gaussian given z, so it is drawn instead of W
            center = (self.c * z) @ mean
            spread = (self.c.square() @ std.square()).sqrt()
            projection = center + spread * rng.normal(len(z), spread.shape, center, seed, start)
        else:
            projection = self.c @ weight  # (n, J)
        return -self.log_prob(z, projection, seed, start)

    def log_prob(
        self, z: Tensor, projection: Tensor, seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        """log r(z | cᵀW) (n,) from projections (n, J)."""
        summary = projection.tanh().mean(-1, keepdim=True)
        center, log_var = summary * self.b1, summary * self.b2
        v, ladj = (z, 0.0) if self.transform is None else push(self.transform, z, seed, start)
        each = -0.5 * (LOG_2PI + log_var + (v - center).square() * (-log_var).exp())
        return each.sum(-1) + ladj

    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        return self.log_prob(z, self.c @ weight)


def gained_kl(prior: BoundNormal, mean: Tensor, std: Tensor, z: Tensor, axis: int) -> Tensor:
    """KL(Π N(z_i·M_ij, σ_ij²) ‖ Normal prior) for z (n, D), through Σ_j λM², Σ_j λMμ: O(|W| + n·D),
    no (n, *shape).
    """
    inv_scale, fixed = (-prior.log_scale).exp(), prior.kl(std.new_zeros(()), std)  # at z = 0
    if inv_scale.numel() == prior.mean.numel() == 1:  # one λ and one μ multiply the sums
        weight, shift = inv_scale.square().reshape(()), prior.mean.reshape(())
        quadratic, linear = (
            weight * rows(squares(mean), axis).sum(1),
            weight * shift * rows(mean, axis).sum(1),
        )
    else:
        scaled = mean * inv_scale
        quadratic, linear = (
            rows(x, axis).sum(1) for x in (squares(scaled), scaled * (prior.mean * inv_scale))
        )
    return fixed + 0.5 * z.square() @ quadratic - z @ linear


class Multiplicative(TensorGuide):
    """q(W) = ∫ q(z) Π N(W_ij; z_i·M_ij, σ_ij²) dz; its KL is a bound by an auxiliary r(z|W)."""

    def __init__(
        self, tensors: Tensors, axis: int, std: float, gain: GainFlow, auxiliary: Auxiliary
    ) -> None:
        super().__init__(tensors)
        value = tensors.value
        self.axis, self.gain, self.auxiliary = axis, gain, auxiliary.to(value)
        self.kl_kind = KL.of(max(Ladj.bound, gain.label.kind, auxiliary.label.kind))
        self.kl_side = (
            Side.upper | gain.label.forward | auxiliary.label.inverse.opposite
        )  # of + log q(z) − log r(z|W)
        self.center = nn.Parameter(value.clone())
        self.log_std = nn.Parameter(torch.full_like(value, math.log(std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        z, log_q = self.gain.draw(n, rng.fold(seed, "gain"), start)
        std = self.log_std.exp()
        weight = Weight(self.center, std, (Gain(self.axis, z),))
        sampled = None if local else weight.sample(n, rng.fold(seed, "noise"), start)
        if isinstance(self.prior, BoundNormal):
            kl = gained_kl(self.prior, self.center, std, z, self.axis)
        else:  # Monte Carlo; one set of weights for all rows of z if none were sampled
            one = Weight(self.center, std, (Gain(self.axis, z[:1]),))
            w = one.sample(1, rng.fold(seed, "noise"), start) if sampled is None else sampled
            center = (one if sampled is None else weight).center(len(w))
            kl = gaussian_log_prob(w, center, std.expand_as(w)) - self.prior.log_prob(w)
        matrices = rows(self.center, self.axis), rows(std, self.axis)
        flat = (
            None
            if sampled is None
            else sampled.movedim(self.axis + 1, 1).reshape(n, *matrices[0].shape)
        )
        minus_log_r = self.auxiliary(z, *matrices, flat, rng.fold(seed, "auxiliary"), start)
        return Draw({self.name: weight if sampled is None else sampled}, kl + log_q + minus_log_r)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        z, _ = self.gain.draw(n, rng.fold(seed, "gain"), start)
        weight = Weight(self.center, self.log_std.exp(), (Gain(self.axis, z),))
        return {self.name: weight.sample(n, rng.fold(seed, "noise"), start)}

    def coordinates(
        self, n: int, seed: rng.Seed = None, start: int = 0, **given: Any
    ) -> tuple[Params, Tensor]:
        """v = (z0, ε), the noise of the gain and of the weights: independent of each other under q,
        as w and z are not.

        The noise of ``sample``.
        """
        z0 = self.gain.base.draw(n, (), rng.fold(seed, "gain"), start)
        eps = rng.normal(n, self.center.shape, self.center, rng.fold(seed, "noise"), start)
        v = torch.cat((z0, eps.flatten(1)), 1)
        return self._at(v)[0], v

    def unfold(self, v: Tensor, others: Params) -> Unfolded | None:
        """log q(v) = log q(z0) + log N(ε), and log r(z | W) − log q(W, z) with q(W, z) = q(v)/|∂(W,
        z)/∂v|.
        """
        if max(self.gain.label.kind, self.auxiliary.label.kind) is not Ladj.exact:
            return None
        params, z, ladj, eps = self._at(v)
        log_q = self.gain.base.log_prob(v[:, : -eps[0].numel()])
        log_q = log_q - 0.5 * (eps.square() + LOG_2PI).flatten(1).sum(1)
        mean, std = rows(self.center, self.axis), rows(self.log_std.exp(), self.axis)
        flat = params[self.name].movedim(self.axis + 1, 1).reshape(len(v), *mean.shape)
        log_r = self.auxiliary.log_density(z, mean, std, flat)
        return Unfolded(params, log_q, log_r - (log_q - ladj - self.log_std.sum()))

    def _at(self, v: Tensor) -> tuple[Params, Tensor, Tensor, Tensor]:
        """W, z, log |∂z/∂z0| and ε at coordinates v."""
        z0, eps = (
            v[:, : -self.center.numel()],
            v[:, -self.center.numel() :].unflatten(1, self.center.shape),
        )
        z, ladj = self.gain.push(z0)
        center = Weight(self.center, None, (Gain(self.axis, z),)).center(len(v))
        return {self.name: torch.addcmul(center, self.log_std.exp(), eps)}, z, ladj, eps

    def mean(self) -> Params:
        moments = gained_moments(self.center, {self.axis: self.gain})
        return {self.name: self.center if moments is None else moments[0]}

    def std(self) -> Params | None:
        moments = gained_moments(self.center, {self.axis: self.gain})
        return (
            None if moments is None else {self.name: (moments[1] + (2 * self.log_std).exp()).sqrt()}
        )

    @torch.no_grad()
    def moments(self, draws: int = MOMENTS) -> tuple[Tensor, Tensor]:
        """Mean E[z]⊙M and std √(Var[z]⊙M² + σ²) of every weight by itself, z by seeded draws:
        (*shape) each.
        """
        z, _ = self.gain.draw(draws, 0)
        scaled, shift = (
            Gain(self.axis, part.unsqueeze(0)).on(self.center)[0] for part in (z.std(0), z.mean(0))
        )
        return shift * self.center, torch.hypot(scaled * self.center, self.log_std.exp())


@dataclass(frozen=True)
class MNF(GuideSpec):
    """Multiplicative normalizing flow (Louizos & Welling 2017): W = z ⊙ M + σ ⊙ ε, z = flow(z0).

    z has one entry per input unit of a dense layer and one per filter of a convolution.

    Args:
        flow: a name of ``flows.registry("vector")``, a callable dim → Transform, or None.
        options: keyword arguments of a flow by name, such as ``{"layers": 4}``.
        auxiliary: r(z | W), "conjugate" (exact statistics) or "paper".
        z: one draw of the gains for each "batch" or each "example".
        std: the initial σ; it is small, so that the gains and not the noise learn the spread of the
            weights.
        z_std: the initial standard deviation of z.
        components: of q(z0); more than one make it a mixture of Gaussians.
        local: as for ``MeanField``.
        mixing: gains of up to this many entries are correlated by a triangular map after the flow.
    """

    flow: FlowName = "gated"
    options: dict[str, Any] = field(default_factory=dict)
    auxiliary: Literal["conjugate", "paper"] = "conjugate"
    z: Literal["batch", "example"] = "batch"
    std: float = 0.003
    z_std: float = 0.3
    components: int = 1
    local: Local = True
    mixing: int = 256
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std", "z_std")
        self._check_choice("auxiliary", ("conjugate", "paper"))
        self._check_choice("z", ("batch", "example"))

    def for_vectors(self) -> GuideSpec:
        return MeanField(self.std, self.local)

    def build(self, tensors: Tensors) -> Guide:
        value, axis = tensors.value, tensors.gain_axis
        dim = value.shape[axis]
        gain = make_gain(
            dim, self.flow, self.options, self.z_std, self.components, self.mixing, value
        )
        if self.auxiliary == "paper":
            flow = self.flow if dim > 1 else None
            auxiliary: Auxiliary = Published(dim, make_transform(flow, dim, self.options))
        else:
            auxiliary = Conjugate(dim, self.z_std)
        return Multiplicative(tensors, axis, self.std, gain, auxiliary)
