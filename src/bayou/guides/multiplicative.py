"""Families with a random gain per unit or filter: multiplicative normalizing flows and node-based networks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayou import flows, rng
from bayou.constants import LOG_2PI
from bayou.flows import Label, Ladj, Map, Side
from bayou.guides.gaussian import FFG, Delta, check_std
from bayou.guides.guide import (
    KL,
    Draw,
    Gain,
    Guide,
    GuideSpec,
    Local,
    Tensors,
    Weight,
    gaussian_log_prob,
)
from bayou.guides.joint import FlowName, make_transform, push
from bayou.modules import Modules
from bayou.network import Layout
from bayou.params import Params
from bayou.priors import BoundNormal, BoundPrior
from bayou.priors.base import squares

MOMENTS = 4096  # draws of a gain for its mean (to 1.6 % of its std) and its std (to 1.1 %)


class GainFlow(nn.Module):
    """q(z): z = c + s ⊙ L·T((z0 − c)/s), z0 from a learned Gaussian around 1 or a mixture of Gaussians.

    (c, s) is the Gaussian itself, (1, std) for a mixture: the flow T and the unit triangular L, which correlates all
    entries, work on numbers of size 1, and as the spread of z changes so does what a step of them does. Without a flow
    z = z0.
    """

    lower: nn.Parameter | None
    standardized: Tensor | None

    def __init__(self, dim: int, transform: Map | None, std: float, components: int = 1, mixing: bool = False) -> None:
        super().__init__()
        inner = dim if transform is None else transform.event_in[0] or dim  # None: any size
        self.std = std
        if components > 1:
            self.base: flows.Base = flows.GaussianMixture(inner, components, spread=std)
            with torch.no_grad():
                self.base.mean.add_(1.0)
                self.base.log_std.fill_(math.log(std))
        else:
            self.base = flows.DiagonalNormal(inner, mean=1.0, std=std)
        self.transform = transform
        self.label = Label() if transform is None else transform.label
        square = transform is not None and inner == dim
        self.lower = nn.Parameter(torch.zeros(dim, dim)) if square and mixing else None
        self.register_buffer("standardized", torch.ones(()) if square else None)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Files written before there was an L hold a flow that works on z0 itself."""
        if f"{prefix}standardized" not in state:
            self.lower = self.standardized = None
        super()._load_from_state_dict(state, prefix, *rest)

    def _frame(self) -> tuple[Tensor | float, Tensor | float]:
        """c and s."""
        if self.standardized is None:
            return 0.0, 1.0
        return (
            (self.base.mean, self.base.log_std.exp())
            if isinstance(self.base, flows.DiagonalNormal)
            else (1.0, self.std)
        )

    def draw(self, n: int, seed: rng.Seed = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """z (n, D) and log q(z) (n,)."""
        z0 = self.base.draw(n, (), seed, start)
        log_q = self.base.log_prob(z0)
        if self.transform is None:
            return z0, log_q
        center, std = self._frame()
        u, ladj = push(self.transform, (z0 - center) / std, seed, start)
        if self.lower is not None:
            u = u + u @ self.lower.tril(-1).mT
        return center + std * u, log_q - ladj

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """E[z] and Var[z], (D,) each; None behind a flow, where they have no closed form."""
        if self.transform is not None:
            return None
        base = self.base
        if isinstance(base, flows.GaussianMixture):
            share = base.logits.softmax(-1).unsqueeze(-1)
            mean = (share * base.mean).sum(0)
            return mean, (share * ((2 * base.log_std).exp() + (base.mean - mean).square())).sum(0)
        assert isinstance(base, flows.DiagonalNormal)
        return base.mean, (2 * base.log_std).exp()

    def log_prob(self, z: Tensor) -> Tensor:
        """log q(z) of any z (..., D): (...). Needs the inverse of the transform, which ``draw`` does not."""
        if self.transform is None:
            return self.base.log_prob(z)
        center, std = self._frame()
        u = (z - center) / std
        if self.lower is not None:
            flat = torch.linalg.solve_triangular(
                self.lower.mT, u.flatten(0, -2), upper=True, left=False, unitriangular=True
            )
            u = flat.reshape(u.shape)
        eps, ladj = push(self.transform, u, inverse=True)
        return self.base.log_prob(center + std * eps) + ladj


def make_gain(
    dim: int, flow: FlowName, options: dict[str, Any], std: float, components: int, mixing: int, like: Tensor
) -> GainFlow:
    """q(z) for a gain of ``dim`` entries. A coupling needs two, so a single entry gets a sigmoidal flow instead."""
    single = dim == 1 and isinstance(flow, str)
    transform = flows.naf(1, layers=1) if single else make_transform(flow, dim, options)
    return GainFlow(dim, transform, std, components, 1 < dim <= mixing).to(like)


def gained_moments(center: Tensor, gains: Mapping[int, GainFlow]) -> tuple[Tensor, Tensor] | None:
    """Mean and variance of M ⊙ z_1 ⊙ z_2 .., independent gains by their axis; None where one is behind a flow.

    E[XY] = E[X]·E[Y], Var[XY] = Var[X]·(Var[Y] + E[Y]²) + E[X]²·Var[Y].
    """
    mean, variance = center, torch.zeros_like(center)
    for axis, gain in gains.items():
        moments = gain.moments()
        if moments is None:
            return None
        m, v = (Gain(axis, moment).on(center)[0] for moment in moments)
        mean, variance = mean * m, variance * (v + m.square()) + mean.square() * v
    return mean, variance


def rows(weight: Tensor, axis: int) -> Tensor:
    """The weight as a matrix (D, J) whose rows run along ``axis``."""
    return weight.movedim(axis, 0).reshape(weight.shape[axis], -1)


class Auxiliary(nn.Module, ABC):
    """r(z|W), which bounds the entropy of q(W) = ∫ q(W|z) q(z) dz; ``forward`` gives −log r(z|W)."""

    label = Label()  # of log r

    @abstractmethod
    def forward(
        self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor | None, seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        """−log r(z|W) (n,), or its expectation over W given z, for z (n, D) and matrices mean, std (D, J)."""

    @abstractmethod
    def propose(
        self, k: int, mean: Tensor, std: Tensor, weight: Tensor, seed: rng.Seed = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """k draws of z ~ r(z|W) for each of the weights (n, D, J), with log r(z|W): (k, n, D) and (k, n)."""

    @abstractmethod
    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        """log r(z|W) at these very weights, no expectation: z (n, D), weight (n, D, J) to (n,)."""


class Conjugate(Auxiliary):
    """r(z|W) ∝ q(W|z)·N(z; a, s²): the posterior of z were q(z) the Gaussian N(a, s²), with a and s learned.

    With C = Σ_j M²/σ² and P = C + 1/s², E[−log r] = Σ_i ½·log 2π − ½·log P + ½·(C + ((a − z)/s²)²)/P exactly.
    """

    def __init__(self, dim: int, std: float) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.ones(dim))
        self.log_std = nn.Parameter(torch.full((dim,), math.log(std)))

    def forward(
        self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor | None, seed: rng.Seed = None, start: int = 0
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
        self, k: int, mean: Tensor, std: Tensor, weight: Tensor, seed: rng.Seed = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        center, spread = self.posterior(mean, std, weight)
        eps = rng.normal(k, center.shape, center, seed, start)
        log_scale = 0.5 * LOG_2PI * eps.shape[-1] + spread.log().sum()
        return center + spread * eps, -0.5 * torch.linalg.vector_norm(eps, dim=-1).square() - log_scale

    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        center, spread = self.posterior(mean, std, weight)
        return -0.5 * (((z - center) / spread).square() + LOG_2PI).sum(-1) - spread.log().sum()


class Published(Auxiliary):
    """The paper's r(z|W): a flow onto N(μ, e^v) with μ = b1·mean_j tanh(cᵀW)_j and v = b2·(the same)."""

    def __init__(self, dim: int, transform: Map | None) -> None:
        super().__init__()
        noise = 0.1 * rng.normal(3, (dim,), torch.zeros(()), seed=0)
        self.c, self.b1, self.b2 = (nn.Parameter(row.clone()) for row in noise)
        self.transform = transform
        self.label = Label() if transform is None else transform.opposite  # the flow of r runs backwards

    def forward(
        self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor | None, seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        if weight is None:  # cᵀW is Gaussian given z, so it is drawn instead of W
            center = (self.c * z) @ mean
            spread = (self.c.square() @ std.square()).sqrt()
            projection = center + spread * rng.normal(len(z), spread.shape, center, seed, start)
        else:
            projection = self.c @ weight  # (n, J)
        return -self.log_prob(z, projection, seed, start)

    def log_prob(self, z: Tensor, projection: Tensor, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """log r(z | cᵀW) (n,) from projections (n, J)."""
        summary = projection.tanh().mean(-1, keepdim=True)
        center, log_var = summary * self.b1, summary * self.b2
        v, ladj = (z, 0.0) if self.transform is None else push(self.transform, z, seed, start)
        each = -0.5 * (LOG_2PI + log_var + (v - center).square() * (-log_var).exp())
        return each.sum(-1) + ladj

    def propose(
        self, k: int, mean: Tensor, std: Tensor, weight: Tensor, seed: rng.Seed = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        summary = (self.c @ weight).tanh().mean(-1, keepdim=True)
        center, log_var = summary * self.b1, summary * self.b2
        eps = rng.normal(k, center.shape, center, seed, start)
        v = center + (0.5 * log_var).exp() * eps
        log_r = -0.5 * (eps.square() + LOG_2PI + log_var).sum(-1)
        if self.transform is None:
            return v, log_r
        z, ladj = push(self.transform, v, seed, start * v.shape[1:-1].numel(), inverse=True)
        return z, log_r - ladj

    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        return self.log_prob(z, self.c @ weight)


def gained_kl(prior: BoundNormal, mean: Tensor, std: Tensor, z: Tensor, axis: int) -> Tensor:
    """KL(Π N(z_i·M_ij, σ_ij²) ‖ Normal prior) for z (n, D), through Σ_j λM², Σ_j λMμ: O(|W| + n·D), no (n, *shape)."""
    inv_scale, fixed = (-prior.log_scale).exp(), prior.kl(std.new_zeros(()), std)  # at z = 0
    if inv_scale.numel() == prior.mean.numel() == 1:  # one λ and one μ multiply the sums
        weight, shift = inv_scale.square().reshape(()), prior.mean.reshape(())
        quadratic, linear = weight * rows(squares(mean), axis).sum(1), weight * shift * rows(mean, axis).sum(1)
    else:
        scaled = mean * inv_scale
        quadratic, linear = (rows(x, axis).sum(1) for x in (squares(scaled), scaled * (prior.mean * inv_scale)))
    return fixed + 0.5 * z.square() @ quadratic - z @ linear


class Multiplicative(Guide):
    """q(W) = ∫ q(z) Π N(W_ij; z_i·M_ij, σ_ij²) dz; its KL is a bound, closed by an auxiliary r(z|W)."""

    def __init__(
        self, name: str, value: Tensor, prior: BoundPrior, axis: int, std: float, gain: GainFlow, auxiliary: Auxiliary
    ) -> None:
        super().__init__()
        self.names, self.axis = (name,), axis
        self.prior, self.gain, self.auxiliary = prior, gain, auxiliary.to(value)
        self.kl_kind = KL.of(max(Ladj.bound, gain.label.kind, auxiliary.label.kind))
        self.kl_side = Side.upper | gain.label.forward | auxiliary.label.inverse.opposite  # of + log q(z) − log r(z|W)
        self.center = nn.Parameter(value.clone())
        self.log_std = nn.Parameter(torch.full_like(value, math.log(std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        z, log_q = self.gain.draw(n, rng.fold(seed, "gain"), start)
        std = self.log_std.exp()
        weight = Weight(self.center, std, (Gain(self.axis, z),))
        sampled = None if local else weight.sample(n, rng.fold(seed, "noise"), start)
        if isinstance(self.prior, BoundNormal):
            kl = gained_kl(self.prior, self.center, std, z, self.axis)
        else:  # Monte Carlo; one set of weights speaks for all rows of z when none were sampled
            one = Weight(self.center, std, (Gain(self.axis, z[:1]),))
            w = one.sample(1, rng.fold(seed, "noise"), start) if sampled is None else sampled
            center = (one if sampled is None else weight).center(len(w))
            kl = gaussian_log_prob(w, center, std.expand_as(w)) - self.prior.log_prob(w)
        matrices = rows(self.center, self.axis), rows(std, self.axis)
        flat = None if sampled is None else sampled.movedim(self.axis + 1, 1).reshape(n, *matrices[0].shape)
        minus_log_r = self.auxiliary(z, *matrices, flat, rng.fold(seed, "auxiliary"), start)
        return Draw({self.names[0]: weight if sampled is None else sampled}, kl + log_q + minus_log_r)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        z, _ = self.gain.draw(n, rng.fold(seed, "gain"), start)
        weight = Weight(self.center, self.log_std.exp(), (Gain(self.axis, z),))
        return {self.names[0]: weight.sample(n, rng.fold(seed, "noise"), start)}

    def mean(self) -> Params:
        moments = gained_moments(self.center, {self.axis: self.gain})
        return {self.names[0]: self.center if moments is None else moments[0]}

    def std(self) -> Params | None:
        moments = gained_moments(self.center, {self.axis: self.gain})
        return None if moments is None else {self.names[0]: (moments[1] + (2 * self.log_std).exp()).sqrt()}

    @torch.no_grad()
    def moments(self, draws: int = MOMENTS) -> tuple[Tensor, Tensor]:
        """Mean E[z]⊙M and std √(Var[z]⊙M² + σ²) of every weight by itself, z by seeded draws: (*shape) each."""
        z, _ = self.gain.draw(draws, 0)
        scaled, shift = (Gain(self.axis, part.unsqueeze(0)).on(self.center)[0] for part in (z.std(0), z.mean(0)))
        return shift * self.center, torch.hypot(scaled * self.center, self.log_std.exp())


@dataclass(frozen=True)
class MNF(GuideSpec):
    """Multiplicative normalizing flow (Louizos & Welling 2017): W = z ⊙ M + σ ⊙ ε, z = flow(z0).

    z has one entry per input unit of a dense layer and one per filter of a convolution (``axis`` overrides).
    ``flow``: a name of ``flows.catalogue()``, a callable dim → Transform, or None. ``components`` > 1 makes q(z0) a
    mixture. ``auxiliary``: "conjugate" (ours, exact statistics) or "paper". ``z``: one per "batch" or per "example".
    ``mixing``: a gain of up to this many entries is correlated by a triangular map behind its flow. ``std``, ``z_std``:
    where the noise and the spread of z start; the noise starts small, or it takes up the spread before the gain can.
    """

    flow: FlowName = "gated"
    options: dict[str, Any] = field(default_factory=dict)
    auxiliary: Literal["conjugate", "paper"] = "conjugate"
    z: Literal["batch", "example"] = "batch"
    std: float = 0.003
    z_std: float = 0.3
    components: int = 1
    axis: int | None = None
    local: Local = True
    mixing: int = 256

    def __post_init__(self) -> None:
        check_std(self.std, "MNF std")
        check_std(self.z_std, "MNF z_std")
        if self.auxiliary not in ("conjugate", "paper"):
            raise ValueError(f'MNF auxiliary must be "conjugate" or "paper", got {self.auxiliary!r}')
        if self.z not in ("batch", "example"):
            raise ValueError(f'MNF z must be "batch" or "example", got {self.z!r}')

    @property
    def per_example(self) -> bool:  # type: ignore[override]
        return self.z == "example"

    def for_vectors(self) -> GuideSpec:
        return FFG(self.std, self.local)

    def build(self, tensors: Tensors) -> Guide:
        name, value, prior, layout = tensors.single
        if self.axis is None:
            axis = 0 if value.ndim == 1 else layout.out_axis if layout.convolution else layout.in_axis
        elif -value.ndim <= self.axis < value.ndim:
            axis = self.axis % value.ndim
        else:
            raise ValueError(f"MNF axis {self.axis} is not an axis of {name!r}, which has {value.ndim}")
        dim = value.shape[axis]
        gain = make_gain(dim, self.flow, self.options, self.z_std, self.components, self.mixing, value)
        if self.auxiliary == "paper":
            flow = self.flow if dim > 1 else None
            auxiliary: Auxiliary = Published(dim, make_transform(flow, dim, self.options))
        else:
            auxiliary = Conjugate(dim, self.z_std)
        return Multiplicative(name, value, prior, axis, self.std, gain, auxiliary)


class NodeGuide(Guide):
    """W = z_out ⊙ M ⊙ z_in with M a point; KL = E[log q(z) − log p(z)] with the prior at the transformed z.

    p(z) = N(1, prior_std²) for every entry (Trinh et al. 2020, 2022).
    """

    def __init__(
        self, name: str, value: Tensor, prior: BoundPrior, gains: dict[int, GainFlow], prior_std: float, penalty: bool
    ) -> None:
        super().__init__()
        self.names, self.axes = (name,), tuple(gains)
        self.prior, self.prior_std, self.penalty = prior, prior_std, penalty
        self.gains: Modules[GainFlow] = nn.ModuleList(gains.values())  # type: ignore[assignment]
        self.center = nn.Parameter(value.clone())
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
        return Draw({self.names[0]: weight if local else weight.center(n)}, kl)

    def _moments(self) -> tuple[Tensor, Tensor] | None:
        return gained_moments(self.center, dict(zip(self.axes, self.gains, strict=True)))

    def mean(self) -> Params:
        moments = self._moments()
        return {self.names[0]: self.center if moments is None else moments[0]}

    def std(self) -> Params | None:
        moments = self._moments()
        return None if moments is None else {self.names[0]: moments[1].sqrt()}


@dataclass(frozen=True)
class NodeFlow(GuideSpec):
    """Node-based network with flow latents: z = flow(z0) multiplies a layer's inputs and/or outputs.

    The weights are points (``penalty`` adds −log p of them). ``components`` > 1: q(z0) is a mixture.
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
        check_std(self.z_std, "z_std")
        check_std(self.prior_std, "prior_std")
        if self.where not in ("input", "output", "both"):
            raise ValueError(f'where must be "input", "output" or "both", got {self.where!r}')

    @property
    def per_example(self) -> bool:  # type: ignore[override]
        return self.z == "example"

    def for_vectors(self) -> GuideSpec:
        return Delta(self.penalty)

    def build(self, tensors: Tensors) -> Guide:
        name, value, prior, layout = tensors.single
        gains = {
            axis: make_gain(value.shape[axis], self.flow, self.options, self.z_std, self.components, self.mixing, value)
            for axis in _axes(self.where, value, layout)
        }
        return NodeGuide(name, value, prior, gains, self.prior_std, self.penalty)


def _axes(where: str, value: Tensor, layout: Layout) -> list[int]:
    if value.ndim == 1:
        return [0]
    return {"input": [layout.in_axis], "output": [layout.out_axis], "both": [layout.in_axis, layout.out_axis]}[where]


@dataclass(frozen=True)
class NodeNoise(NodeFlow):
    """Node-based network with Gaussian latents, or a mixture of ``components`` Gaussians (Trinh et al. 2020)."""

    flow: FlowName = None
