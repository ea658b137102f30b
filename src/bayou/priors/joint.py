"""A joint density of several tensors as their prior."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from bayou.core.params import Params
from bayou.priors.base import BoundPrior, Prior
from bayou.priors.normal import BoundNormal


class JointDensity(Protocol):
    """A density of several tensors together."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors."""

    def log_prob(self, params: Params) -> Tensor:
        """Compute log p of tensors (..., *shape): (...).

        Args:
            params: a value of every tensor.
        """

    def marginal(self, names: Sequence[str]) -> JointDensity:
        """Return the density of some of them; a ValueError where there is no closed form.

        Args:
            names: the tensors to keep.
        """


@final
class BoundPart(BoundNormal):
    """One tensor of a joint density, as N(mean, std²).

    ``JointCorrection`` adds the difference to the joint log-density.

    Args:
        shape: the shape of the tensor.
        mean: its mean.
        log_scale: the logarithm of its standard deviation.
        density: the joint density.
    """

    def __init__(
        self, shape: Sequence[int], mean: Tensor, log_scale: Tensor, density: JointDensity
    ) -> None:
        super().__init__(shape, mean, log_scale)
        # In a tuple, so that a density that is a module is not registered.
        self._density = (density,)

    @property
    def density(self) -> JointDensity:
        """Return the joint density."""
        return self._density[0]


@final
@dataclass(frozen=True)
class JointPrior(Prior):
    """The prior of one tensor of a joint density.

    By itself it is N(w; mean, std²); ``JointCorrection`` adds
    log p(w_1 .. w_k) − Σ_i log N(w_i; ..).

    Args:
        density: the joint density of all its tensors.
        mean: the mean of this tensor, (*shape).
        std: the standard deviation of this tensor, (*shape).
    """

    density: JointDensity
    mean: Tensor
    std: Tensor

    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundPart:
        return BoundPart(shape, self.mean.to(reference), self.std.to(reference).log(), self.density)

    def __deepcopy__(self, memo: object) -> JointPrior:
        return self  # the identity of the density relates its tensors


class JointCorrection:
    """The term log p(w_1 .. w_k) − Σ_i log N(w_i; mean_i, std_i²) of a joint density.

    Args:
        density: the joint density.
        parts: the priors of its tensors by name; of some of them the marginal density is used.
    """

    def __init__(self, density: JointDensity, parts: Mapping[str, BoundPart]) -> None:
        has_all_tensors = set(parts) == set(density.names)
        self.density: JointDensity = density if has_all_tensors else density.marginal(list(parts))
        self.parts: dict[str, BoundPart] = dict(parts)

    def __call__(self, params: Params) -> Tensor:
        """Compute the term of tensors (..., *shape): (...).

        Args:
            params: a value of every tensor.
        """
        missing = [name for name in self.parts if name not in params]
        if missing:
            raise ValueError(
                f"the prior of {missing[0]!r} and {len(self.parts) - 1} other tensors is one "
                "density of all of them: none may be frozen or left out"
            )
        marginals = [prior.log_prob(params[name]) for name, prior in self.parts.items()]
        return self.density.log_prob({name: params[name] for name in self.parts}) - sum(marginals)


def couplings(priors: Mapping[str, BoundPrior]) -> list[JointCorrection]:
    """Return the coupling of every joint density among the priors.

    Args:
        priors: the priors of all tensors, by name.
    """
    groups: dict[int, dict[str, BoundPart]] = {}
    for name, prior in priors.items():
        if isinstance(prior, BoundPart):
            groups.setdefault(id(prior.density), {})[name] = prior
    return [JointCorrection(next(iter(parts.values())).density, parts) for parts in groups.values()]


def joint_rules(
    density: JointDensity, mean: Params, std: Params, names: Iterable[str]
) -> dict[str, Prior]:
    """Return the priors of all tensors of a density, by name.

    Args:
        density: the joint density.
        mean: the mean of every tensor.
        std: the standard deviation of every tensor.
        names: the tensors.
    """
    return {name: JointPrior(density, mean[name].detach(), std[name].detach()) for name in names}
