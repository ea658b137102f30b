"""Multiplicative normalizing flows: random gains per unit or filter, and noise of every weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.params import Params
from bayou.core.specs import later_field
from bayou.flows import Label, Ladj, Map, Side
from bayou.guides.conditional import ConditionalGaussian, gain_kl, rows
from bayou.guides.factors import GaussianFactor
from bayou.guides.gain import (
    GainFlow,
    GainSpec,
    gains_at_noise,
    product_moments,
    sum_pieces,
)
from bayou.guides.gaussian import MeanField
from bayou.guides.gaussian_terms import gain_terms, has_simple_prior
from bayou.guides.guide import (
    KL,
    Draw,
    DrawNoise,
    Gain,
    GainDraw,
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
from bayou.priors import BoundNormal, DensityPrior, Prior

# Draws of a gain for its mean (within 1.6 % of its std) and its std (within 1.1 %).
MOMENT_DRAWS = 4096


class Auxiliary(nn.Module, ABC):
    """r(z|W), which bounds the entropy of q(W) = ∫ q(W|z) q(z) dz; ``forward`` gives −log r(z|W).

    Attributes:
        label: how log r is known.
    """

    label: Label = Label()

    @property
    def moments_of_gains(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """Return the parameters that are E[z] and log std(z) where the bound is largest.

        It is None unless r(z|W) has such parameters.
        """
        return None

    @abstractmethod
    def forward(
        self,
        z: Tensor,
        mean: Tensor,
        std: Tensor,
        weight: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
        information: Tensor | None = None,
    ) -> Tensor:
        """Compute −log r(z|W), or its expectation over W given z: (n,).

        Args:
            z: gains, (n, D).
            mean: M as a matrix, (D, J).
            std: σ as a matrix, (D, J).
            weight: W as matrices, (n, D, J), if it was sampled.
            seed: the seed of noise; None uses torch's global stream.
            start: the index of the first row.
            information: Σ_j M²/σ², (D,), where it is known; None by default.
        """

    @abstractmethod
    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        """Compute log r(z|W) at sampled weights: (n,).

        Args:
            z: gains, (n, D).
            mean: M as a matrix, (D, J).
            std: σ as a matrix, (D, J).
            weight: W as matrices, (n, D, J).
        """


def conjugate_entropy(z: Tensor, information: Tensor, center: Tensor, log_std: Tensor) -> Tensor:
    """Compute E[−log r(z_i|W)] of every entry under ``Conjugate``: (n, D).

    Args:
        z: gains, (n, D).
        information: C, (D,).
        center: a, (D,).
        log_std: log s, (D,).
    """
    inv_var = (-2 * log_std).exp()
    precision = information + inv_var
    pull = (center - z) * inv_var
    return 0.5 * (LOG_2PI - precision.log() + (information + pull.square()) / precision)


class Conjugate(Auxiliary):
    """r(z|W) ∝ q(W|z)·N(z; a, s²) with learned a and s.

    It is the posterior of z if q(z) is the Gaussian N(a, s²). With C = Σ_j M²/σ² and P = C + 1/s²,
    E[−log r] = Σ_i ½·log 2π − ½·log P + ½·(C + ((a − z)/s²)²)/P exactly.

    Args:
        dim: the number D of gains.
        std: the initial s.
    """

    def __init__(self, dim: int, std: float) -> None:
        super().__init__()
        self.center: nn.Parameter = nn.Parameter(torch.ones(dim))
        self.log_std: nn.Parameter = nn.Parameter(torch.full((dim,), math.log(std)))

    @property
    def moments_of_gains(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return a and log s.

        E[−log r] over q(z) depends on mean and variance of z alone, and for any C is smallest at
        a = E[z] and s² = Var[z].
        """
        return self.center, self.log_std

    def forward(
        self,
        z: Tensor,
        mean: Tensor,
        std: Tensor,
        weight: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
        information: Tensor | None = None,
    ) -> Tensor:
        if information is None:
            information = (mean / std).square().sum(1)  # C
        return conjugate_entropy(z, information, self.center, self.log_std).sum(-1)

    def posterior(self, mean: Tensor, std: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std of r(z|W): (n, D) and (D,).

        Args:
            mean: M as a matrix, (D, J).
            std: σ as a matrix, (D, J).
            weight: W as matrices, (n, D, J).
        """
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
        """Draw z ~ r(z|W) k times for each of n weights, with log r(z|W): (k, n, D) and (k, n).

        Args:
            k: the number of draws.
            mean: M as a matrix, (D, J).
            std: σ as a matrix, (D, J).
            weight: W as matrices, (n, D, J).
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        center, spread = self.posterior(mean, std, weight)
        eps = rng.normal(k, center.shape, center, seed, start)
        log_scale = 0.5 * LOG_2PI * eps.shape[-1] + spread.log().sum()
        log_r = -0.5 * torch.linalg.vector_norm(eps, dim=-1).square() - log_scale
        return center + spread * eps, log_r

    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        center, spread = self.posterior(mean, std, weight)
        return -0.5 * (((z - center) / spread).square() + LOG_2PI).sum(-1) - spread.log().sum()


class Published(Auxiliary):
    """The paper's r(z|W): a flow onto N(μ, e^v), μ = b1·mean_j tanh(cᵀW)_j, v = b2·(the same).

    Args:
        dim: the number of gains.
        transform: the flow; None for none.
    """

    b2: nn.Parameter
    b1: nn.Parameter
    c: nn.Parameter

    def __init__(self, dim: int, transform: Map | None) -> None:
        super().__init__()
        noise = 0.1 * rng.normal(3, (dim,), torch.zeros(()), seed=0)
        self.c, self.b1, self.b2 = (nn.Parameter(row.clone()) for row in noise)
        self.transform = transform
        # The flow of r is used inverted.
        self.label: Label = Label() if transform is None else transform.opposite

    def forward(
        self,
        z: Tensor,
        mean: Tensor,
        std: Tensor,
        weight: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
        information: Tensor | None = None,
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
        """Compute log r(z | cᵀW): (n,).

        Args:
            z: gains, (n, D).
            projection: cᵀW, (n, J).
            seed: the seed of the flow's noise; None uses torch's global stream.
            start: the index of the first row.
        """
        summary = projection.tanh().mean(-1, keepdim=True)
        center = summary * self.b1
        log_var = summary * self.b2
        v: Tensor = z
        ladj: Tensor | float = 0.0
        if self.transform is not None:
            v, ladj = push(self.transform, z, seed, start)
        log_density = -0.5 * (LOG_2PI + log_var + (v - center).square() * (-log_var).exp())
        return log_density.sum(-1) + ladj

    def log_density(self, z: Tensor, mean: Tensor, std: Tensor, weight: Tensor) -> Tensor:
        return self.log_prob(z, self.c @ weight)


class Multiplicative(TensorGuide):
    """q(W) = ∫ q(z) Π N(W_ij; z_i·M_ij, σ_ij²) dz; its KL is a bound by an auxiliary r(z|W).

    Args:
        tensors: the tensor with its prior.
        axis: the axis of the gains.
        std: the initial σ.
        gain: q(z).
        auxiliary: r(z|W).
    """

    def __init__(
        self, tensors: Tensors, axis: int, std: float, gain: GainFlow, auxiliary: Auxiliary
    ) -> None:
        super().__init__(tensors)
        value = tensors.value
        self.axis = axis
        self.gain = gain
        self.auxiliary: Auxiliary = auxiliary.to(value)
        self.kl_kind: KL = KL.of(max(Ladj.bound, gain.label.kind, auxiliary.label.kind))
        # Of + log q(z) − log r(z|W).
        self.kl_side: Side = Side.upper | gain.label.forward | auxiliary.label.inverse.opposite
        self.center: nn.Parameter = nn.Parameter(value.clone())
        self.log_std: nn.Parameter = nn.Parameter(torch.full_like(value, math.log(std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        z, log_q = self.gain.draw(n, rng.fold(seed, "gain"), start)
        eps = None if local else self._weight_noise(n, seed, start)
        return self._draw_at(z, log_q, eps, seed, start)

    def draw_noise(
        self, n: int, local: bool, seed: rng.Seed = None, start: int = 0
    ) -> DrawNoise | None:
        has_conjugate = isinstance(self.auxiliary, Conjugate)  # which draws no noise
        has_normal_prior = isinstance(self.prior, BoundNormal)
        if not (self.gain.is_standardized and has_conjugate and has_normal_prior):
            return None
        if torch.compiler.is_compiling():  # a compiler merges operations itself
            return None
        gain_eps = self.gain.noise(n, rng.fold(seed, "gain"), start)
        weight_eps = None if local else self._weight_noise(n, seed, start)
        return DrawNoise(n, weight_eps, gain_eps)

    @classmethod
    def draw_together(
        cls, guides: Sequence[Multiplicative], noises: Sequence[DrawNoise]
    ) -> list[Draw]:
        gains, log_q = gains_at_noise(
            [guide.gain for guide in guides],
            [noise.gain for noise in noises if noise.gain is not None],
        )
        auxiliaries = [g.auxiliary for g in guides if isinstance(g.auxiliary, Conjugate)]
        priors = [guide.prior for guide in guides if has_simple_prior(guide.prior)]
        if len(priors) < len(guides):
            one_by_one = zip(guides, gains, log_q, noises, strict=True)
            return [guide._draw_at(z, term, noise.weight) for guide, z, term, noise in one_by_one]
        terms = [
            gain_terms(guide.center, guide.log_std, prior, guide.axis)
            for guide, prior in zip(guides, priors, strict=True)
        ]
        sizes = [z.shape[-1] for z in gains]
        z = torch.cat(list(gains), -1)
        quadratic = torch.cat([term.quadratic for term in terms])
        minus_log_r = conjugate_entropy(
            z,
            torch.cat([term.information for term in terms]),
            torch.cat([auxiliary.center for auxiliary in auxiliaries]),
            torch.cat([auxiliary.log_std for auxiliary in auxiliaries]),
        )
        per_entry = torch.stack((0.5 * z.square() * quadratic, minus_log_r))
        quadratic_kls, auxiliary_terms = sum_pieces(per_entry, sizes).unbind(1)  # (G, n)
        gain_kls = log_q + auxiliary_terms
        kls_at_zero = torch.stack([term.kl_at_zero for term in terms])
        kls = kls_at_zero.unsqueeze(-1) + quadratic_kls + gain_kls
        draws = []
        for index, (guide, term, noise) in enumerate(zip(guides, terms, noises, strict=True)):
            weight = Weight(term.center, term.std, (Gain(guide.axis, gains[index]),))
            value = weight if noise.weight is None else weight.at_noise(noise.n, noise.weight)
            gain_draw = GainDraw(gains[index], gain_kls[index])
            draws.append(Draw({guide.name: value}, kls[index], gains=gain_draw))
        return draws

    def _weight_noise(self, n: int, seed: rng.Seed, start: int) -> Tensor:
        """Draw ε of sampled weights, (n, *shape)."""
        return rng.normal(n, self.center.shape, self.center, rng.fold(seed, "noise"), start)

    def _draw_at(
        self,
        z: Tensor,
        log_q: Tensor,
        eps: Tensor | None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Draw:
        """Return the draws with given gains, and noise of the weights unless it is local."""
        terms = None
        center: Tensor = self.center
        if has_simple_prior(self.prior):
            terms = gain_terms(center, self.log_std, self.prior, self.axis)
            center, std = terms.center, terms.std
        else:
            std = self.log_std.exp()
        weight = Weight(center, std, (Gain(self.axis, z),))
        sampled = None if eps is None else weight.at_noise(len(z), eps)
        if terms is not None:
            kl = terms.kl_at_zero + 0.5 * z.square() @ terms.quadratic
        elif isinstance(self.prior, BoundNormal):
            kl = gain_kl(self.prior, self.center, std, z, self.axis)
        elif sampled is not None:
            kl = self._sampled_kl(sampled, weight, std)
        else:  # one set of weights for all rows of z
            first = Weight(self.center, std, (Gain(self.axis, z[:1]),))
            drawn = first.sample(1, rng.fold(seed, "noise"), start)
            kl = self._sampled_kl(drawn, first, std)
        minus_log_r = self.auxiliary(
            z,
            rows(center, self.axis),
            rows(std, self.axis),
            None if sampled is None else self._matrices(sampled),
            rng.fold(seed, "auxiliary"),
            start,
            None if terms is None else terms.information,
        )
        value = weight if sampled is None else sampled
        gains = GainDraw(z, log_q + minus_log_r)
        return Draw({self.name: value}, kl + log_q + minus_log_r, gains=gains)

    def conditional_gaussian(self) -> ConditionalGaussian:
        return ConditionalGaussian(
            self.name,
            self.center,
            self.log_std,
            self.prior,
            self.gain,
            self.axis,
            self.auxiliary.moments_of_gains,
        )

    def gaussian_factors(self) -> tuple[GaussianFactor, ...]:
        return self.gain.factors

    def _sampled_kl(self, w: Tensor, weight: Weight, std: Tensor) -> Tensor:
        """Compute log q(W|z) − log p(W) at draws W (k, *shape) of a weight: (k,)."""
        log_q = gaussian_log_prob(w, weight.center(len(w)), std.expand_as(w))
        return log_q - self.prior.log_prob(w)

    def _matrices(self, w: Tensor) -> Tensor:
        """Return stacked weights (n, *shape) as matrices (n, D, J)."""
        size = self.center.shape[self.axis]
        return w.movedim(self.axis + 1, 1).reshape(len(w), size, self.center.numel() // size)

    def coordinates(
        self, n: int, seed: rng.Seed = None, start: int = 0, **parents: Any
    ) -> tuple[Params, Tensor]:
        """Draw w and v = (z0, ε), the noise of the gain and of the weights in ``sample``.

        They are independent of each other under q, as w and z are not.

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
            parents: not used, since q depends on no other tensors.
        """
        z0 = self.gain.base.draw(n, (), rng.fold(seed, "gain"), start)
        eps = rng.normal(n, self.center.shape, self.center, rng.fold(seed, "noise"), start)
        v = torch.cat((z0, eps.flatten(1)), 1)
        return self._at(v)[0], v

    def unfold(self, v: Tensor, context: Params) -> Unfolded | None:
        """Return W at v with log q(v) = log q(z0) + log N(ε), and log r(z | W) − log q(W, z).

        q(W, z) = q(v)/|∂(W, z)/∂v|.

        Args:
            v: coordinates (z0, ε), (n, K).
            context: not used, since q depends on no other tensors.
        """
        if max(self.gain.label.kind, self.auxiliary.label.kind) is not Ladj.exact:
            return None
        params, z, ladj, eps = self._at(v)
        log_q = self.gain.base.log_prob(v[:, : -eps[0].numel()])
        log_q = log_q - 0.5 * (eps.square() + LOG_2PI).flatten(1).sum(1)
        mean = rows(self.center, self.axis)
        std = rows(self.log_std.exp(), self.axis)
        log_r = self.auxiliary.log_density(z, mean, std, self._matrices(params[self.name]))
        return Unfolded(params, log_q, log_r - (log_q - ladj - self.log_std.sum()))

    def _at(self, v: Tensor) -> tuple[Params, Tensor, Tensor, Tensor]:
        """Return W, z, log |∂z/∂z0| and ε at coordinates v."""
        size = self.center.numel()
        z0 = v[:, :-size]
        eps = v[:, -size:].unflatten(1, self.center.shape)
        z, ladj = self.gain.push(z0)
        center = Weight(self.center, None, (Gain(self.axis, z),)).center(len(v))
        return {self.name: torch.addcmul(center, self.log_std.exp(), eps)}, z, ladj, eps

    def mean(self) -> Params:
        moments = product_moments(self.center, {self.axis: self.gain})
        return {self.name: self.center if moments is None else moments[0]}

    def std(self) -> Params | None:
        moments = product_moments(self.center, {self.axis: self.gain})
        if moments is None:
            return None
        return {self.name: (moments[1] + (2 * self.log_std).exp()).sqrt()}

    @torch.no_grad()
    def moments(self, draws: int = MOMENT_DRAWS) -> tuple[Tensor, Tensor]:
        """Return mean E[z]⊙M and std √(Var[z]⊙M² + σ²) of every weight by itself, (*shape) each.

        Args:
            draws: the number of seeded draws of z.
        """
        z, _ = self.gain.draw(draws, 0)
        gain_std = Gain(self.axis, z.std(0).unsqueeze(0)).on(self.center)[0]
        gain_mean = Gain(self.axis, z.mean(0).unsqueeze(0)).on(self.center)[0]
        std = torch.hypot(gain_std * self.center, self.log_std.exp())
        return gain_mean * self.center, std

    def as_prior(self) -> dict[str, Prior]:
        """Return the Normal with the mean and the variance of each weight.

        It leaves out the correlation of the weights of a unit that its gain causes.
        """
        mean, std = self.moments()
        return {self.name: DensityPrior(BoundNormal(mean.shape, mean, std.log()))}


@dataclass(frozen=True)
class MNF(GainSpec):
    """Multiplicative normalizing flow posterior (Louizos & Welling 2017, arXiv:1703.01961).

    W = z ⊙ M + σ ⊙ ε, z = flow(z0), with one entry of z per input unit of a dense layer and one per
    filter of a convolution: q(W) = ∫ q(z) Π N(W_ij; z_i·M_ij, σ_ij²) dz. An auxiliary r(z | W)
    gives an upper bound of the KL,
    E[KL(q(W | z) ‖ p(W)) + log q(z) − log r(z | W)] ≥ KL(q(W) ‖ p(W)), tight if r is q(z | W).

    Args:
        flow: a name of ``flows.registry("vector")`` (default "gated"), a callable dim → Transform,
            or None.
        options: keyword arguments of a flow by name, such as ``{"layers": 4}``.
        auxiliary: r(z | W), "conjugate" (exact statistics; the default) or "paper".
        z: one draw of the gains for each "batch" (the default) or each "example".
        std: the initial σ (default 0.003); it is small, so that the gains and not the noise learn
            the spread of the weights.
        z_std: the initial standard deviation of z (default 0.3).
        components: of q(z0) (default 1); more than one make it a mixture of Gaussians.
        local: local reparameterization, as for ``MeanField`` (default True).
        mixing: gains of up to this many entries (default 256) are correlated by a triangular map
            after the flow.
        where: the gains multiply the "input" units or channels of a layer, or its "output" units or
            filters; None (the default) is the input units of a dense layer and the filters of a
            convolution. A normalization layer after a convolution removes the gains of its filters.

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.MNF()))
        >>> bnn = bayou.bayesianize(net, bayou.MNF(flow="iaf", options={"layers": 4}))
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
    where: Literal["input", "output"] | None = later_field(None)
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std", "z_std")
        self._check_choice("auxiliary", ("conjugate", "paper"))
        if self.where is not None:
            self._check_choice("where", ("input", "output"))
        self._check_choice("z", ("batch", "example"))

    def for_vectors(self) -> GuideSpec:
        return MeanField(self.std, self.local)

    def for_natural_gradients(self, std: float, local: Local) -> MNF:
        return replace(self, std=std, local=local or self.local)

    def build(self, tensors: Tensors) -> Guide:
        _, value, _, layout = tensors.single
        axis = tensors.gain_axis
        if self.where is not None and value.ndim > 1:
            axis = layout.in_axis if self.where == "input" else layout.out_axis
        dim = value.shape[axis]
        gain = self.make_gain(value, axis)
        if self.auxiliary == "paper":
            flow = self.flow if dim > 1 else None
            auxiliary: Auxiliary = Published(dim, make_transform(flow, dim, self.options))
        else:
            auxiliary = Conjugate(dim, self.z_std)
        return Multiplicative(tensors, axis, self.std, gain, auxiliary)
