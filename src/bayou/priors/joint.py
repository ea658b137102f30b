"""A joint density of several tensors as their prior."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

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
    """One tensor of a joint density, as N(mean, std²); ``Coupling`` adds the difference to the
    joint log-density.
    """

    def __init__(
        self, shape: Sequence[int], mean: Tensor, log_scale: Tensor, density: JointDensity
    ) -> None:
        super().__init__(shape, mean, log_scale)
        self._shared = (
            density,
        )  # in a tuple, so that a density that is a module is not registered

    @property
    def density(self) -> JointDensity:
        """The joint density."""
        return self._shared[0]


@final
@dataclass(frozen=True)
class JointPrior(Prior):
    """The prior of one tensor of a joint density. ``mean``, ``std``: moments of the tensor."""

    density: JointDensity
    mean: Tensor
    std: Tensor

    def _bind(
        self, shape: Sequence[int], like: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundPart:
        return BoundPart(shape, self.mean.to(like), self.std.to(like).log(), self.density)

    def __deepcopy__(self, memo: object) -> JointPrior:
        return self  # the identity of the density relates its parts


class Coupling:
    """log p(w_1 .. w_k) − Σ_i log N(w_i; mean_i, std_i²) of a joint density."""

    def __init__(self, density: JointDensity, parts: Mapping[str, BoundPart]) -> None:
        self.density = (
            density if set(parts) == set(density.names) else density.marginal(list(parts))
        )
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
    """The coupling of every joint density among the priors."""
    found: dict[int, dict[str, BoundPart]] = {}
    for name, prior in priors.items():
        if isinstance(prior, BoundPart):
            found.setdefault(id(prior.density), {})[name] = prior
    return [Coupling(next(iter(parts.values())).density, parts) for parts in found.values()]


def joint_rules(
    density: JointDensity, mean: Params, std: Params, names: Iterable[str]
) -> dict[str, Prior]:
    """The priors of all tensors of a density, by name."""
    return {name: JointPrior(density, mean[name].detach(), std[name].detach()) for name in names}
