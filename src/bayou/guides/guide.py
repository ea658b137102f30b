"""The interface of guides: trainable distributions over one tensor of a network, or over a group of
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.flows import Ladj, Side
from bayou.modules import Modules
from bayou.network import Layout, Network
from bayou.params import Params, flatten, unflatten
from bayou.priors import BoundPrior, Prior
from bayou.specs import Checked

Local = bool | Literal["positions"]


class KL(Enum):
    """The kind of the KL of a guide, from the best to the worst; ``Guide.kl_side`` has the side of
    a bound.
    """

    exact = "exact"  # unbiased for KL(q ‖ p), from exact densities
    bound = "bound"  # unbiased for a bound of it
    estimate = (
        "estimate"  # from an unbiased estimate of log q, whose exp is biased: no importance weights
    )
    constant = "up to a constant"  # q or p has no density, so only differences are meaningful

    @classmethod
    def of(cls, kind: Ladj) -> KL:
        """The kind of a KL from log-densities of this kind."""
        return cls[kind.name]

    @classmethod
    def worst(cls, kinds: Iterable[KL]) -> KL:
        """The kind of a sum."""
        return max(kinds, key=list(cls).index)


@dataclass(frozen=True)
class Gain:
    """A factor z (n, D) along one axis of a weight, one row per draw or per example."""

    axis: int
    z: Tensor

    def on(self, weight: Tensor) -> Tensor:
        """z shaped to multiply stacked weights: (n, 1, ..., D, ..., 1)."""
        shape = [1] * weight.ndim
        shape[self.axis] = weight.shape[self.axis]
        return self.z.reshape(-1, *shape)


@dataclass(frozen=True)
class Weight:
    """A tensor that is Gaussian given its gains: W = gain ⊙ mean + std ⊙ ε, with mean and std
    (*shape).

    ``on_noise``: the gains multiply the noise too, W = gain ⊙ (mean + std ⊙ ε).
    """

    mean: Tensor
    std: Tensor | None = None  # None: no noise
    gains: tuple[Gain, ...] = ()
    on_noise: bool = False

    @property
    def is_point(self) -> bool:
        """Whether it is a point."""
        return (
            self.std is None and len(self.gains) == 0
        )  # torch.compile does not support `not` of a tuple of tensors

    def center(self, n: int) -> Tensor:
        """gain ⊙ mean: (n, *shape)."""
        return self._gained(self.mean.expand(n, *self.mean.shape))

    def with_gains(self, function: Callable[[Tensor], Tensor]) -> Weight:
        """The same tensor with other rows of its gains."""
        return replace(self, gains=tuple(Gain(gain.axis, function(gain.z)) for gain in self.gains))

    def _gained(self, value: Tensor) -> Tensor:
        for gain in self.gains:
            value = value * gain.on(self.mean)
        return value

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """n draws: (n, *shape)."""
        center = self.center(n)
        if self.std is None:
            return center
        noise = rng.normal(n, self.mean.shape, self.mean, seed, start)
        if self.on_noise:
            return center + self._gained(self.std * noise)
        if torch.is_grad_enabled():
            return torch.addcmul(center, self.std, noise)
        return noise.mul_(self.std).add_(center)  # in place, to save a second tensor (n, *shape)


@dataclass(frozen=True)
class Draw:
    """n draws of a guide's tensors with the KL of each.

    ``parts``: a tensor (n, *shape) of sampled weights, or a ``Weight`` whose noise is drawn later.
    ``kl`` (n,). ``score`` (n,): log-probability of discrete choices, for families trained by
    REINFORCE.
    """

    parts: dict[str, Tensor | Weight]
    kl: Tensor
    score: Tensor | None = None


class Unfolded(NamedTuple):
    """Tensors w (n, *shape) at coordinates v, log q(v) (n,), and ``extra`` (n,), with which log
    p(w) + extra is a log ratio: E_q[p(w)·exp(extra)] = ∫ p(w) dw.

    ``extra`` is −log q(w) if w has a density; with a latent z and r(z | w) it is log r(z | w) − log
    q(w, z).
    """

    params: Params
    log_q: Tensor
    extra: Tensor


class ParameterKind(Enum):
    """What a trained parameter is; the learning rates of VI depend on it."""

    location = "location"
    scale = "scale"  # a log scale or a logit, of q or of a learned prior
    triangular = "triangular"  # a matrix that mixes all entries of a vector
    factor = "factor"  # columns in units of the weights, each of which moves all of them
    network = "network"  # a parameter of the networks of a flow


class Guide(nn.Module, ABC):
    """A trainable distribution q over the tensors ``names``: draws and their KL.
    ``GuideSpec.build`` returns one.
    """

    kl_kind: KL = KL.exact
    kl_side: Side = Side.equal  # upper: E[kl] ≥ KL(q ‖ p), so that the ELBO stays a bound
    names: tuple[str, ...]
    points: int | None = None  # the number of different draws; None for a continuum
    given: tuple[
        str, ...
    ] = ()  # tensors of other guides, in q(names | given): its methods take their values
    scales: ClassVar[tuple[str, ...]] = ("log_std",)  # names of its parameters that are scales
    factorized: ClassVar[bool] = False  # whether q = Π N(mean, std²)

    @abstractmethod
    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        """Draws start .. start + n − 1; with ``local`` the noise is drawn by local
        reparameterization.
        """

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """n weights of every tensor: (n, *shape)."""
        parts = self.draw(n, seed=seed, start=start).parts
        return {
            name: part if isinstance(part, Tensor) else part.sample(n, seed, start)
            for name, part in parts.items()
        }

    def log_prob(self, params: Params) -> Tensor | None:
        """log q(params), tensors (..., *shape) to (...), of the kind ``kl_kind``; None where q has
        no density.
        """
        return None

    def coordinates(
        self, n: int, seed: rng.Seed = None, start: int = 0, **given: Any
    ) -> tuple[Params, Tensor]:
        """n draws of w, (n, *shape) each, and their coordinates v for ``unfold``, (n, K).

        By default the entries of w themselves.
        """
        drawn = self.sample(n, seed, start, **given)
        return drawn, flatten(drawn, 1)

    def unfold(self, v: Tensor, others: Params) -> Unfolded | None:
        """The tensors at coordinates (n, K), and the densities there; None if one is not known
        exactly.

        ``others``: tensors of other guides, for q(w | others).
        """
        like = {
            name: v.new_empty(prior.shape, device="meta")
            for name, prior in self.bound_priors().items()
        }
        params = unflatten(v, like)
        found = self.log_prob(params | others) if self.kl_kind is KL.exact else None
        return None if found is None else Unfolded(params, found, -found)

    @abstractmethod
    def mean(self) -> Params:
        """The mean of q, or its central point if the mean is not tractable."""

    def std(self) -> Params | None:
        """The standard deviation of every entry; None if it and the mean have no closed form."""
        return None

    @abstractmethod
    def bound_priors(self) -> dict[str, BoundPrior]:
        """The prior of every tensor, with its learned values."""

    def parameter_kinds(self) -> dict[nn.Parameter, ParameterKind]:
        """The kind of every parameter of q and of its learned priors; flows are in
        ``transform``.
        """
        scales, kinds = {*self.scales, *BoundPrior.scales}, {}
        for name, parameter in self.named_parameters():
            *owners, leaf = name.split(".")
            if leaf in ("lower", "upper"):
                kinds[parameter] = ParameterKind.triangular
            elif "transform" in owners:
                kinds[parameter] = ParameterKind.network
            elif leaf == "factor":
                kinds[parameter] = ParameterKind.factor
            else:
                kinds[parameter] = ParameterKind.scale if leaf in scales else ParameterKind.location
        return kinds


class TensorGuide(Guide):
    """A guide over one tensor ``name`` with its prior."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.name, _, self.prior, _ = tensors.single
        self.names = (self.name,)

    def bound_priors(self) -> dict[str, BoundPrior]:
        return {self.name: self.prior}


class JointGuide(Guide):
    """A guide over the tensors of a group with their priors."""

    def __init__(self, tensors: Tensors, names: Iterable[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.shapes = {name: tensors.values[name].shape for name in self.names}
        bound = [tensors.priors[name] for name in self.names]
        self.priors: Modules[BoundPrior] = nn.ModuleList(bound)  # type: ignore[assignment]

    def bound_priors(self) -> dict[str, BoundPrior]:
        return dict(zip(self.names, self.priors, strict=True))


class VectorGuide(JointGuide):
    """A guide over all tensors of a group as one vector w (D,), in the sorted order of their
    names.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors, sorted(tensors.values))

    def split(self, vector: Tensor) -> Params:
        """Vectors (..., D) as named tensors (..., *shape)."""
        return unflatten(
            vector,
            {name: vector.new_empty(shape, device="meta") for name, shape in self.shapes.items()},
        )

    def join(self, params: Params) -> Tensor:
        """Named tensors (..., *shape) as vectors (..., D); other names are ignored."""
        first = self.names[0]
        return flatten(
            {name: params[name] for name in self.names},
            params[first].ndim - len(self.shapes[first]),
        )

    def log_prior(self, params: Params) -> Tensor:
        """Σ log p over the tensors: (...)."""
        return torch.stack(
            [p.log_prob(params[name]) for name, p in zip(self.names, self.priors, strict=True)]
        ).sum(0)


@dataclass(frozen=True)
class Tensors:
    """The arguments of ``build``: names, initial values, priors and layouts of tensors.

    ``network`` and ``start``: the network with the initial values of all its tensors; ``inputs``:
    some rows of data, if available.
    """

    values: Params
    priors: dict[str, BoundPrior]
    layouts: dict[str, Layout] = field(default_factory=dict)
    network: Network | None = None
    start: Params = field(default_factory=dict)
    inputs: tuple[Any, ...] | None = None

    @property
    def single(self) -> tuple[str, Tensor, BoundPrior, Layout]:
        """The one tensor of a guide over one tensor."""
        ((name, value),) = self.values.items()
        return name, value, self.priors[name], self.layouts.get(name, Layout())

    @property
    def value(self) -> Tensor:
        """The initial value of the one tensor."""
        return self.single[1]

    @property
    def gain_axis(self) -> int:
        """The axis along which units have gains: the inputs of a dense layer, the filters of a
        convolution.
        """
        _, value, _, layout = self.single
        return 0 if value.ndim == 1 else layout.out_axis if layout.convolution else layout.in_axis


class GuideSpec(Checked, ABC):
    """The spec of a family: a frozen dataclass of plain values; ``build`` returns its guide."""

    joint: ClassVar[bool] = False  # one guide over all matched tensors, instead of one each
    # Whether noise is drawn at the output of a layer: where that is exact (True), or at every
    # position of a convolution or a sequence too ("positions"), although one draw of the weight is
    # the same at all of them.
    local: Local = False
    dense: ClassVar[bool] = False  # whether q has a density, or one together with its gains
    noise: ClassVar[bool] = (
        True  # whether a weight has noise besides its gains, which are the same at all positions
    )
    z: Literal["batch", "example"] = (
        "batch"  # one draw of the gains for all rows of a batch, or for each
    )
    rows: int = 0  # the number of rows of data for its initial values
    warmup: float = 0.0  # the minimum fraction of a run over which the weight of the KL increases

    @property
    def per_example(self) -> bool:
        """Whether the gains are drawn for each example."""
        return self.z == "example"

    @abstractmethod
    def build(self, tensors: Tensors) -> Guide:
        """A guide over these tensors, starting at their values."""

    def prior(self, prior: Prior) -> Prior:
        """The prior to use if the user gave ``prior``."""
        return prior

    def reach(
        self, network: Network, values: Params, inputs: tuple[Any, ...] | None
    ) -> Collection[str]:
        """The tensors that it can cover; if the user gave only one family, ``for_vectors`` covers
        the others.
        """
        return network.names

    def for_vectors(self) -> GuideSpec:
        """The family of biases with this family of weights, if the user gave only one."""
        return self

    def _check_warmup(self) -> None:
        if not 0 <= self.warmup <= 1:
            raise ValueError(
                f"{type(self).__name__} warmup must lie between 0 and 1, got {self.warmup!r}"
            )


def gaussian_log_prob(w: Tensor, center: Tensor, std: Tensor) -> Tensor:
    """Σ log N(w; center, std²) over all but the leading axis: (n, *shape) to (n,)."""
    eps = (w - center) / std
    each = -0.5 * (eps.square() + LOG_2PI) - std.log()
    return each.reshape(len(each), -1).sum(1)
