"""A density of several tensors together as their prior: what one task leaves to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from torch import Tensor

from bayou.params import Params
from bayou.priors.base import BoundPrior, Prior
from bayou.priors.normal import BoundNormal


class JointDensity(Protocol):
    """log p of the tensors ``names`` together."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors."""

    def log_prob(self, params: Params) -> Tensor:
        """log p of tensors (..., *shape): (...)."""

    def marginal(self, names: Sequence[str]) -> JointDensity:
        """The density of some of them; a ValueError where there is none in closed form."""


@final
class BoundPart(BoundNormal):
    """One tensor's N(mean, std²) inside a joint density.

    By itself it is that Normal. Beside the others of its density ``Coupling`` adds what they have in common, so that
    the sum is the joint log-density whatever the Normals are.
    """

    def __init__(self, shape: Sequence[int], mean: Tensor, log_scale: Tensor, density: JointDensity) -> None:
        super().__init__(shape, mean, log_scale)
        self._shared = (density,)  # in a tuple: a density that is a module is no part of this one

    @property
    def density(self) -> JointDensity:
        """The density that it is a part of."""
        return self._shared[0]


@final
@dataclass(frozen=True)
class JointPrior(Prior):
    """The part of one tensor in a joint density; every tensor of it has one. ``mean``, ``std``: of the tensor alone."""

    density: JointDensity
    mean: Tensor
    std: Tensor
    jsonable: ClassVar[bool] = False

    def _bind(self, shape: Sequence[int], like: Tensor, fan_in: int | None, axes: tuple[int, int]) -> BoundPart:
        return BoundPart(shape, self.mean.to(like), self.std.to(like).log(), self.density)

    def __deepcopy__(self, memo: object) -> JointPrior:
        return self  # frozen, and parts are told to be of one density by its identity


class Coupling:
    """log p(w_1 .. w_k) − Σ_i log N(w_i; mean_i, std_i²): what a joint density adds to the Normals of its tensors."""

    def __init__(self, density: JointDensity, parts: Mapping[str, BoundPart]) -> None:
        self.density = density if set(parts) == set(density.names) else density.marginal(list(parts))
        self.parts = dict(parts)

    def __call__(self, params: Params) -> Tensor:
        """Of tensors (..., *shape): (...)."""
        missing = [name for name in self.parts if name not in params]
        if missing:
            raise ValueError(
                f"the prior of {missing[0]!r} and {len(self.parts) - 1} other tensors is one density of all of them: "
                "none may be frozen or left out"
            )
        alone = [part.log_prob(params[name]) for name, part in self.parts.items()]
        return self.density.log_prob({name: params[name] for name in self.parts}) - sum(alone)


def couplings(priors: Mapping[str, BoundPrior]) -> list[Coupling]:
    """One for every joint density among the priors."""
    found: dict[int, dict[str, BoundPart]] = {}
    for name, prior in priors.items():
        if isinstance(prior, BoundPart):
            found.setdefault(id(prior.density), {})[name] = prior
    return [Coupling(next(iter(parts.values())).density, parts) for parts in found.values()]


def joint_rules(density: JointDensity, mean: Params, std: Params, names: Iterable[str]) -> dict[str, Prior]:
    """The priors of all tensors of a density, by name."""
    return {name: JointPrior(density, mean[name].detach(), std[name].detach()) for name in names}
