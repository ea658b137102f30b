"""The interface of guides: trainable distributions over one tensor, or over a group of them."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.modules import Modules
from bayou.core.params import Params, flatten, unflatten
from bayou.core.specs import Checked
from bayou.curvature import Covariance
from bayou.flows import Ladj, Side
from bayou.network import Layout, Network
from bayou.priors import BoundPrior, DensityPrior, Prior, joint_rules

if TYPE_CHECKING:
    from bayou.guides.conditional import ConditionalGaussian
    from bayou.guides.factors import GaussianFactor

Local = bool | Literal["positions"]

# Draws for the reference Normal of each tensor, which a joint density as a prior is relative to.
REFERENCE_DRAWS = 200


class KL(Enum):
    """How a guide knows its KL, from the best to the worst; ``Guide.kl_side`` has the side.

    ``exact``: unbiased for KL(q ‖ p), from exact densities. ``bound``: unbiased for a bound of it.
    ``estimate``: from an unbiased estimate of log q, whose exp is biased, so that there are no
    importance weights. ``constant``: q or p has no density, so that only differences are
    meaningful.
    """

    exact = "exact"
    bound = "bound"
    estimate = "estimate"
    constant = "up to a constant"

    @classmethod
    def of(cls, kind: Ladj) -> KL:
        """Return the kind of a KL from log-densities of this kind.

        Args:
            kind: how a flow knows its log-determinant.
        """
        return cls[kind.name]

    @classmethod
    def worst(cls, kinds: Iterable[KL]) -> KL:
        """Return the kind of a sum.

        Args:
            kinds: the kinds of its terms.
        """
        return max(kinds, key=list(cls).index)


@dataclass(frozen=True)
class Gain:
    """A random factor z along one axis of a weight.

    Args:
        axis: the axis of the weight, of size D.
        z: one row per draw or per example, (n, D).
    """

    axis: int
    z: Tensor

    def on(self, weight: Tensor) -> Tensor:
        """Return z shaped to multiply stacked weights: (n, 1, ..., D, ..., 1).

        Args:
            weight: a weight without an axis of draws.
        """
        shape = [1] * weight.ndim
        shape[self.axis] = weight.shape[self.axis]
        return self.z.reshape(-1, *shape)


@dataclass(frozen=True)
class Weight:
    """A tensor that is Gaussian given its gains: W = gain ⊙ mean + std ⊙ ε.

    Args:
        mean: the mean without gains, (*shape).
        std: the standard deviation, (*shape); None for no noise.
        gains: the factors of the mean.
        on_noise: whether the gains multiply the noise too, W = gain ⊙ (mean + std ⊙ ε).
    """

    mean: Tensor
    std: Tensor | None = None
    gains: tuple[Gain, ...] = ()
    on_noise: bool = False

    @property
    def is_point(self) -> bool:
        """Return whether it has neither noise nor gains."""
        # torch.compile does not support `not` of a tuple of tensors.
        return self.std is None and len(self.gains) == 0

    def center(self, n: int) -> Tensor:
        """Compute gain ⊙ mean for n draws: (n, *shape).

        Args:
            n: the number of draws.
        """
        return self._multiply_gains(self.mean.expand(n, *self.mean.shape))

    def with_gains(self, function: Callable[[Tensor], Tensor]) -> Weight:
        """Return the same tensor with other rows of its gains.

        Args:
            function: maps the rows of each gain to new rows.
        """
        return replace(self, gains=tuple(Gain(gain.axis, function(gain.z)) for gain in self.gains))

    def _multiply_gains(self, value: Tensor) -> Tensor:
        """Multiply stacked weights (n, *shape) by all gains."""
        for gain in self.gains:
            value = value * gain.on(self.mean)
        return value

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """Draw the tensor n times: (n, *shape).

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        noise = None
        if self.std is not None:
            noise = rng.normal(n, self.mean.shape, self.mean, seed, start)
        return self.at_noise(n, noise)

    def at_noise(self, n: int, noise: Tensor | None) -> Tensor:
        """Return the tensor at n draws of its noise ε: (n, *shape).

        Args:
            n: the number of draws.
            noise: ε, (n, *shape), which may be overwritten; None without noise.
        """
        center = self.center(n)
        if self.std is None or noise is None:
            return center
        if self.on_noise:
            return center + self._multiply_gains(self.std * noise)
        if torch.is_grad_enabled():
            return torch.addcmul(center, self.std, noise)
        return noise.mul_(self.std).add_(center)  # in place, to save a second tensor (n, *shape)


class GainDraw(NamedTuple):
    """Draws of random gains z, given which the tensor is Gaussian.

    Args:
        z: (n, D).
        kl: the terms of the KL besides KL(q(W|z) ‖ p): log q(z) − log r(z|W), (n,).
    """

    z: Tensor
    kl: Tensor


class DrawNoise(NamedTuple):
    """All noise of n draws of a tensor that is Gaussian given its gains.

    Args:
        n: the number of draws.
        weight: ε of the weights, (n, *shape); None if it is drawn later.
        gain: ε of the gains, (n, D); None without gains.
    """

    n: int
    weight: Tensor | None
    gain: Tensor | None = None


@dataclass(frozen=True)
class Draw:
    """n draws of a guide's tensors with the KL of each.

    Args:
        parts: by name a tensor of sampled weights, (n, *shape), or a ``Weight`` whose noise is
            drawn later.
        kl: the KL of each draw in nats, (n,).
        score: log-probability of discrete choices, (n,), for families trained by REINFORCE.
        gains: of a tensor that is Gaussian given them; None without.
    """

    parts: dict[str, Tensor | Weight]
    kl: Tensor
    score: Tensor | None = None
    gains: GainDraw | None = None


class Unfolded(NamedTuple):
    """Tensors at coordinates v, with the densities there.

    E_q[p(w)·exp(extra)] = ∫ p(w) dw, so that log p(w) + extra is a log ratio.

    Args:
        params: the tensors w, (n, *shape) each.
        log_q: log q(v), (n,).
        extra: −log q(w) if w has a density, (n,); with a latent z and r(z | w) it is
            log r(z | w) − log q(w, z).
    """

    params: Params
    log_q: Tensor
    extra: Tensor


class ParameterKind(Enum):
    """What a trained parameter is; the learning rates of VI depend on it.

    ``location``: a mean or a point. ``scale``: a log scale or a logit, of q or of a learned prior.
    ``triangular``: a matrix that mixes all entries of a vector. ``factor``: columns in units of the
    weights, each of which moves all of them. ``network``: a parameter of the networks of a flow.
    """

    location = "location"
    scale = "scale"
    triangular = "triangular"
    factor = "factor"
    network = "network"

    def learning_rate(self, parameter: nn.Parameter, lr: float, scale_lr: float) -> float:
        """Return the learning rate of a parameter of this kind.

        The noise of D entries that are moved at once adds up: a triangular map has scale_lr/√D; a
        factor, which is in units of the weights, and a matrix of a flow's networks, D its inputs,
        have that but no more than ``lr``.

        Args:
            parameter: the parameter.
            lr: the learning rate of locations.
            scale_lr: the learning rate of scales.
        """
        if self is ParameterKind.scale:
            return scale_lr
        if self is ParameterKind.triangular:
            return scale_lr / math.sqrt(len(parameter))
        if self is ParameterKind.factor:
            return min(lr, scale_lr / math.sqrt(len(parameter)))
        if self is ParameterKind.network and parameter.ndim > 1:
            return min(lr, scale_lr / math.sqrt(parameter[0].numel()))
        return lr


class Guide(nn.Module, ABC):
    """A trainable distribution q over named tensors: draws and their KL.

    ``GuideSpec.build`` returns one. A new family implements ``draw``, ``mean`` and
    ``bound_priors``, and as many of ``log_prob``, ``std`` and ``unfold`` as it has in closed form.

    Attributes:
        names: the tensors.
        kl_kind: whether the KL is exact, a bound, an estimate or known up to a constant.
        kl_side: upper if E[kl] ≥ KL(q ‖ p), so that the ELBO stays a bound.
        points: the number of different draws; None for a continuum.
        members: the number of members, in turn, of which draw i is one (``RankOne``).
        parents: tensors of other guides, in q(names | parents); the methods take their values.
        scales: names of its parameters that are scales.
        factorized: whether q = Π N(mean, std²).
        is_point: whether q is one value, so that the tensors need no draw.
        requires_local: whether its noise can only be drawn at the outputs of layers.
    """

    kl_kind: KL = KL.exact
    kl_side: Side = Side.equal
    names: tuple[str, ...]
    points: int | None = None
    members: int = 1
    parents: tuple[str, ...] = ()
    scales: ClassVar[tuple[str, ...]] = ("log_std",)
    factorized: ClassVar[bool] = False
    is_point: ClassVar[bool] = False
    requires_local: ClassVar[bool] = False

    @abstractmethod
    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        """Return draws start .. start + n − 1 with their KL.

        Args:
            n: the number of draws.
            local: whether noise may be drawn later, by local reparameterization.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0, **parents: Any) -> Params:
        """Draw every tensor n times: (n, *shape) each.

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
            parents: ``parents=`` the values of other tensors, for a guide that depends on them.
        """
        params: Params = {}
        for name, value in self.draw(n, seed=seed, start=start, **parents).parts.items():
            params[name] = value if isinstance(value, Tensor) else value.sample(n, seed, start)
        return params

    def draw_noise(
        self, n: int, local: bool, seed: rng.Seed = None, start: int = 0
    ) -> DrawNoise | None:
        """Draw the noise of draws start .. start + n − 1, for ``draw_together``.

        None (the default) for a guide that is drawn by itself, with ``draw``.

        Args:
            n: the number of draws.
            local: whether the noise of the weights is drawn later.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        return None

    @classmethod
    def draw_together(cls, guides: Sequence[Any], noises: Sequence[DrawNoise]) -> list[Draw]:
        """Return the draws of several guides of this class, in fewer operations than one by one.

        Args:
            guides: the guides.
            noises: what their ``draw_noise`` returned, of equally many draws.
        """
        raise NotImplementedError(f"{cls.__name__} draws its tensors one by one")

    def log_prob(self, params: Params) -> Tensor | None:
        """Compute log q(params), of the kind ``kl_kind``; None where q has no density.

        Args:
            params: tensors (..., *shape).

        Returns:
            The log-density, (...).
        """
        return None

    def coordinates(
        self, n: int, seed: rng.Seed = None, start: int = 0, **parents: Any
    ) -> tuple[Params, Tensor]:
        """Draw w n times, with the coordinates v for ``unfold``: by default the entries of w.

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
            parents: ``parents=`` the values of other tensors, for a guide that depends on them.

        Returns:
            The tensors, (n, *shape) each, and v, (n, K).
        """
        params = self.sample(n, seed, start, **parents)
        return params, flatten(params, 1)

    def parent_arguments(self, values: Mapping[str, Tensor | Weight], n: int = 1) -> dict[str, Any]:
        """Return ``{"parents": ...}`` for the methods of a guide with parents, or nothing.

        Args:
            values: draws of the tensors so far; a point is the same in all n draws.
            n: the number of draws.
        """
        if not self.parents:
            return {}
        parents: Params = {}
        for name in self.parents:
            value = values[name]
            if isinstance(value, Tensor):
                parents[name] = value
            else:
                parents[name] = value.mean.expand(n, *value.mean.shape)
        return {"parents": parents}

    def unfold(self, v: Tensor, context: Params) -> Unfolded | None:
        """Return the tensors at coordinates v with the densities there; None if one is not exact.

        Args:
            v: coordinates, (n, K).
            context: tensors of other guides, for q(w | context).
        """
        if self.kl_kind is not KL.exact:
            return None
        reference = {
            name: v.new_empty(prior.shape, device="meta")
            for name, prior in self.bound_priors().items()
        }
        params = unflatten(v, reference)
        log_q = self.log_prob(params | context)
        return None if log_q is None else Unfolded(params, log_q, -log_q)

    def conditional_gaussian(self) -> ConditionalGaussian | None:
        """Return q(W|z) with its parameters; None unless it is a factorized Gaussian.

        z are the gains of one tensor W, if it has any.
        """
        return None

    def gaussian_factors(self) -> tuple[GaussianFactor, ...]:
        """Return Gaussians with natural gradients besides ``conditional_gaussian``: none."""
        return ()

    @abstractmethod
    def mean(self) -> Params:
        """Return the mean of q, or its central point if the mean is not tractable."""

    def std(self) -> Params | None:
        """Return the standard deviation of every entry, or None.

        It is None if it and the mean have no closed form.
        """
        return None

    @abstractmethod
    def bound_priors(self) -> dict[str, BoundPrior]:
        """Return the prior of every tensor, with its learned values."""

    def as_prior(self) -> dict[str, Prior] | None:
        """Return q as the prior of a next task, by name; None if q has no density of its own.

        Tensors that are left out keep their prior.
        """
        if self.parents or self.log_prob(self.mean()) is None:
            return None
        if len(self.names) == 1:
            return {self.names[0]: DensityPrior(TensorDensity(self))}
        return self._as_joint_prior()

    def as_gaussian(self) -> Covariance | None:
        """Return the covariance of q, whose center is ``mean``; None if q is not Gaussian.

        A posterior whose guides are all Gaussian or points can be updated by further rows.
        """
        return None

    def set_gaussian(self, mean: Params, covariance: Covariance) -> None:
        """Give q another mean and a covariance of the structure of ``as_gaussian``.

        Args:
            mean: of the tensors.
            covariance: of them.
        """
        raise ValueError(f"{type(self).__name__} is not Gaussian")

    @torch.no_grad()
    def _as_joint_prior(self) -> dict[str, Prior]:
        """Return q over several tensors as their joint prior, relative to Normals from draws."""
        draws = self.sample(REFERENCE_DRAWS, 0)
        mean = {name: value.mean(0) for name, value in draws.items()}
        std = {name: value.std(0) for name, value in draws.items()}
        return joint_rules(GroupDensity(self), mean, std, self.names)

    def parameter_kinds(self) -> dict[nn.Parameter, ParameterKind]:
        """Return the kind of every parameter of q and of its learned priors.

        Flows are in ``transform``.
        """
        scales = {*self.scales, *BoundPrior.scales}
        kinds = {}
        for name, parameter in self.named_parameters():
            *owners, leaf = name.split(".")
            if leaf in ("lower", "upper"):
                kinds[parameter] = ParameterKind.triangular
            elif "transform" in owners:
                kinds[parameter] = ParameterKind.network
            elif leaf == "factor":
                kinds[parameter] = ParameterKind.factor
            elif leaf in scales:
                kinds[parameter] = ParameterKind.scale
            else:
                kinds[parameter] = ParameterKind.location
        return kinds

    def learning_rates(self, lr: float, scale_lr: float) -> dict[nn.Parameter, float]:
        """Return the learning rate of every parameter of q and of its learned priors.

        Args:
            lr: the learning rate of locations.
            scale_lr: the learning rate of scales.
        """
        return {
            parameter: kind.learning_rate(parameter, lr, scale_lr)
            for parameter, kind in self.parameter_kinds().items()
        }

    def parameter_groups(self, lr: float, scale_lr: float) -> list[dict[str, Any]]:
        """Return the trained parameters by learning rate, for an optimizer of torch.

        Args:
            lr: the learning rate of locations.
            scale_lr: the learning rate of scales.
        """
        groups: dict[float, list[nn.Parameter]] = {lr: [], scale_lr: []}
        for parameter, rate in self.learning_rates(lr, scale_lr).items():
            if parameter.requires_grad:
                groups.setdefault(rate, []).append(parameter)
        return [{"params": group, "lr": rate} for rate, group in groups.items() if group]


class TensorDensity(nn.Module):
    """q of a guide over one tensor as a density of that tensor.

    Args:
        guide: the guide, which has a density.
    """

    def __init__(self, guide: Guide) -> None:
        super().__init__()
        self.guide = guide

    def log_prob(self, w: Tensor) -> Tensor:
        """Compute log q(w): (..., *shape) to (...).

        Args:
            w: values of the tensor.
        """
        log_q = self.guide.log_prob({self.guide.names[0]: w})
        return log_q  # type: ignore[return-value]

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """Return draws start .. start + n − 1: (n, *shape).

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        return self.guide.sample(n, seed, start)[self.guide.names[0]]


class GroupDensity(nn.Module):
    """q of a guide over several tensors as their joint density.

    Args:
        guide: the guide, which has a density; it is copied.
    """

    def __init__(self, guide: Guide) -> None:
        super().__init__()
        self.guide: Guide = copy.deepcopy(guide).requires_grad_(False)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors."""
        return self.guide.names

    def log_prob(self, params: Params) -> Tensor:
        """Compute log q of tensors (..., *shape): (...).

        Args:
            params: a value of every tensor.
        """
        return self.guide.log_prob(params)  # type: ignore[return-value]

    def marginal(self, names: Sequence[str]) -> GroupDensity:
        """Raise a ValueError, since there is no marginal in closed form.

        Args:
            names: some of the tensors.
        """
        raise ValueError(
            f"{type(self.guide).__name__} over {', '.join(self.names)} has no density of "
            f"{', '.join(names)} alone, as heads and frozen tensors need; use MeanField or LowRank"
        )


class TensorGuide(Guide):
    """A guide over one tensor ``name`` with its prior.

    Args:
        tensors: the tensor with its prior.
    """

    name: str
    prior: BoundPrior

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.name, _, self.prior, _ = tensors.single
        self.names: tuple[str, ...] = (self.name,)

    def bound_priors(self) -> dict[str, BoundPrior]:
        return {self.name: self.prior}


class JointGuide(Guide):
    """A guide over the tensors of a group with their priors.

    Args:
        tensors: the tensors with their priors.
        names: the names of the tensors, in the order of the guide.
    """

    def __init__(self, tensors: Tensors, names: Iterable[str]) -> None:
        super().__init__()
        self.names: tuple[str, ...] = tuple(names)
        self.shapes: dict[str, torch.Size] = {
            name: tensors.values[name].shape for name in self.names
        }
        priors = [tensors.priors[name] for name in self.names]
        self.priors: Modules[BoundPrior] = nn.ModuleList(priors)  # type: ignore[assignment]

    def bound_priors(self) -> dict[str, BoundPrior]:
        return dict(zip(self.names, self.priors, strict=True))


class VectorGuide(JointGuide):
    """A guide over all tensors of a group as one vector w (D,), in the order of their names.

    Args:
        tensors: the tensors with their priors; their names are sorted.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors, sorted(tensors.values))

    def split(self, vector: Tensor) -> Params:
        """Split vectors (..., D) into named tensors (..., *shape).

        Args:
            vector: one or more vectors.
        """
        reference = {
            name: vector.new_empty(shape, device="meta") for name, shape in self.shapes.items()
        }
        return unflatten(vector, reference)

    def join(self, params: Params) -> Tensor:
        """Join named tensors (..., *shape) into vectors (..., D); other names are ignored.

        Args:
            params: a value of every tensor.
        """
        first = self.names[0]
        batch_axes = params[first].ndim - len(self.shapes[first])
        return flatten({name: params[name] for name in self.names}, batch_axes)

    def log_prior(self, params: Params) -> Tensor:
        """Compute Σ log p over the tensors: (...).

        Args:
            params: a value of every tensor, (..., *shape).
        """
        terms = [
            prior.log_prob(params[name])
            for name, prior in zip(self.names, self.priors, strict=True)
        ]
        return torch.stack(terms).sum(0)


@dataclass(frozen=True)
class Tensors:
    """The arguments of ``GuideSpec.build``: tensors with their priors and layouts.

    Args:
        values: initial values by name.
        priors: the bound prior of every tensor.
        layouts: the axes of inputs and outputs of weights.
        network: the network, if available.
        start: the initial values of all tensors of the network.
        inputs: some rows of data, if available.
    """

    values: Params
    priors: dict[str, BoundPrior]
    layouts: dict[str, Layout] = field(default_factory=dict)
    network: Network | None = None
    start: Params = field(default_factory=dict)
    inputs: tuple[Any, ...] | None = None

    @property
    def single(self) -> tuple[str, Tensor, BoundPrior, Layout]:
        """Return name, value, prior and layout of the only tensor."""
        ((name, value),) = self.values.items()
        return name, value, self.priors[name], self.layouts.get(name, Layout())

    @property
    def value(self) -> Tensor:
        """Return the initial value of the only tensor."""
        return self.single[1]

    @property
    def gain_axis(self) -> int:
        """Return the axis along which units have gains.

        It is that of the inputs of a dense layer, and of the filters of a convolution.
        """
        _, value, _, layout = self.single
        if value.ndim == 1:
            return 0
        return layout.out_axis if layout.convolution else layout.in_axis


class GuideSpec(Checked, ABC):
    """The spec of a family: a frozen dataclass of plain values; ``build`` returns its guide.

    Attributes:
        joint: one guide over all matched tensors, instead of one guide for each tensor.
        local: whether noise is drawn at the output of a layer: where that is exact (True), or at
            every position of a convolution or a sequence too ("positions"), although one draw of
            the weight is the same at all of them.
        dense: whether q has a density, or one together with its gains.
        noise: whether a weight has noise besides its gains, which are the same at all positions.
        z: one draw of the gains for all rows of a "batch", or for each "example".
        rows: the number of rows of data for its initial values.
        warmup: the minimum fraction of a run over which the weight of the KL increases.
    """

    joint: ClassVar[bool] = False
    local: Local = False
    dense: ClassVar[bool] = False
    noise: ClassVar[bool] = True
    z: Literal["batch", "example"] = "batch"
    rows: int = 0
    warmup: float = 0.0

    @property
    def per_example(self) -> bool:
        """Return whether the gains are drawn for each example."""
        return self.z == "example"

    @abstractmethod
    def build(self, tensors: Tensors) -> Guide:
        """Build a guide over these tensors, starting at their values.

        Args:
            tensors: initial values, priors and layouts.
        """

    def prior(self, prior: Prior) -> Prior:
        """Return the prior to use if the user chose ``prior``.

        Args:
            prior: the prior of the user.
        """
        return prior

    def reach(
        self, network: Network, values: Params, inputs: tuple[Any, ...] | None
    ) -> Collection[str]:
        """Return the tensors that the family can cover.

        If the user chose only one family, ``for_vectors`` covers the others.

        Args:
            network: the network.
            values: initial values by name.
            inputs: some rows of data, if available.
        """
        return network.names

    def for_natural_gradients(self, std: float, local: Local) -> GuideSpec | None:
        """Return this family for natural gradients; None where they are not possible.

        A family has them if it is a point, a factorized Gaussian given its gains, or a point given
        gains that are Gaussian.

        Args:
            std: the initial standard deviation.
            local: whether noise is drawn at the output of a layer.
        """
        return None

    def for_vectors(self) -> GuideSpec:
        """Return the family of biases with this family of weights, if the user chose only one."""
        return self

    def _check_warmup(self) -> None:
        """Raise a ValueError unless ``warmup`` is a fraction."""
        if not 0 <= self.warmup <= 1:
            raise ValueError(
                f"{type(self).__name__} warmup must lie between 0 and 1, got {self.warmup!r}"
            )


def gaussian_log_prob(w: Tensor, center: Tensor, std: Tensor) -> Tensor:
    """Compute Σ log N(w; center, std²) over all but the leading axis: (n, *shape) to (n,).

    Args:
        w: values, (n, *shape).
        center: means, which broadcast to w.
        std: standard deviations, which broadcast to w.
    """
    eps = (w - center) / std
    log_density = -0.5 * (eps.square() + LOG_2PI) - std.log()
    return log_density.reshape(len(log_density), -1).sum(1)
