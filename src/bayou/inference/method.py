"""A method: a frozen dataclass whose ``fit`` turns a target and data into a posterior."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.core.specs import Checked, to_json
from bayou.posteriors.posterior import Posterior
from bayou.target import Target
from bayou.training.data import Data, Rows
from bayou.training.seeds import as_int_seed
from bayou.training.settings import Settings

WHOLE = 4  # batches, up to which a method that starts at a mode takes all rows in every step


class Method(Checked, ABC):
    """The base class of methods. The constructor stores settings; ``fit`` does the work."""

    batch_size: int = 128

    def _check_start(self) -> None:
        """A ValueError unless the field ``start`` is None or a method."""
        start = self.start  # type: ignore[attr-defined]
        if start is not None and not isinstance(start, Method):
            me = type(self).__name__
            raise ValueError(
                f"{me} start must be a method such as MAP(), or None for a trained network, got {start!r}"
            )

    @abstractmethod
    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of ``target`` given ``data``."""

    # Capabilities that ``bayou.select`` uses.

    def check_target(self, target: Target, data: Data) -> None:
        """Raise a ValueError where ``fit`` would refuse the network, before anything is trained for
        it.
        """

    draws_all_weights: ClassVar[bool] = False  # whether every weight is random in its posterior

    @property
    def without_density(self) -> str | None:
        """What has no density in its posterior; None if all weights have one (together with
        auxiliary variables).
        """
        return type(self).__name__

    def at_mode(self, noise: float, data: Data) -> Method:
        """This method for a network at a mode of these data, with fixed priors and this fixed
        noise.
        """
        return self

    def held_out_index(self, data: Data, seed: int) -> Tensor | None:
        """Return the indices of the rows that a fit with this seed holds out; None if it uses all
        of them.
        """
        return None

    def with_planned_length(self, data: Data) -> Self:
        """This method with the length that it plans for these data, whether or not it has converged
        then.
        """
        return self

    def restricted_to(self, names: Sequence[str], *, learns_others: bool = False) -> Method | None:
        """Return this method over some tensors, with the others as points; None if it cannot.

        Args:
            names: of the tensors that stay random.
            learns_others: whether the points are learned, without a prior, if the method can do
                that; otherwise they keep their values.
        """
        return None

    def shortened(self, factor: float) -> Method:
        """Return this method with its default length multiplied, for a comparison with others.

        Chains keep their length: near the mode they would seem as good as it.
        """
        return self

    def starts(self, target: Target, seed: int) -> Params | None:
        """The initial weights of several modes that are its posterior, a stack; None if it is not
        made of modes.
        """
        return None

    @property
    def spreads(self) -> tuple[float, ...]:
        """How far its modes may be randomized, from wide to narrow, for a selection on held-out
        rows.
        """
        return (0.0,)

    def with_spread(self, spread: float) -> Method:
        """Return this method with its modes randomized so far: 0 for not at all, 1 for draws of the
        posterior.
        """
        return self

    def randomize(self, target: Target, y: Tensor, seed: int) -> tuple[Params, Tensor] | None:
        """Draw prior means and targets for each of these modes, two stacks; None if they have those
        of the target.

        Args:
            target: with fixed Normal priors and a known noise.
            y: the targets of all rows.
            seed: the seed of the fit.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Trained(Settings, Method):
    """A gradient-based method with the settings of ``training.Settings``."""

    def held_out_index(self, data: Data, seed: int) -> Tensor | None:
        if not self.validation or not isinstance(data, Rows):
            return None
        held = self.split(data, as_int_seed(seed))[1]
        return held.index if isinstance(held, Rows) else None


def few(data: Data, batch_size: int) -> bool:
    """Whether a step over all rows costs little more than one over a batch, and has less noise."""
    return data.n <= WHOLE * batch_size and data.targets() is not None


def identity(method: Checked, target: Target, data: Data, seed: int) -> dict[str, Any]:
    """The identity of a run, without its initial weights and the frequency of checkpoints."""
    spec = to_json(method)
    spec["fields"].pop("checkpoint_every", None)
    return {
        "method": spec,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "network": [
            re.sub("0x[0-9a-f]+", "", repr(target.net)),
            {name: list(value.shape) for name, value in target.net.named_parameters()},
            target.free,
        ],
        "base": target.base(),
        "data": data.fingerprint(),
        "seed": seed,
    }
