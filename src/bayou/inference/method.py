"""A method: a frozen dataclass whose ``fit`` turns a target and data into a posterior."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.core.specs import Checked, to_json
from bayou.network.target import Target
from bayou.posteriors.posterior import Posterior
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.seeds import as_int_seed
from bayou.training.settings import Settings

P = TypeVar("P", bound=Posterior)
MAX_FULL_BATCHES = 4  # up to which a method that starts at a mode takes all rows in every step


class Method(Checked, ABC):
    """The base class of methods: the constructor stores settings, ``fit`` does the work.

    A subclass implements ``fit``. The other attributes say what a method can do; selection of its
    settings (``bayou.select``) asks for them.
    """

    batch_size: int = 128

    def _check_start(self) -> None:
        """Raise a ValueError unless the field ``start`` is None or a method."""
        start = self.start  # type: ignore[attr-defined]
        if start is not None and not isinstance(start, Method):
            raise ValueError(
                f"{type(self).__name__} start must be a method such as MAP(), or None for a "
                f"trained network, got {start!r}"
            )

    def _check_interval(self, interval: str, *names: str) -> None:
        """Raise a ValueError unless these fields are None or numbers in an interval.

        Args:
            interval: for example "[0, 1)", without 1.
            names: of the fields.
        """
        low, high = (float(end) for end in interval[1:-1].split(","))
        excluded = set()
        if interval.startswith("("):
            excluded.add(low)
        if interval.endswith(")"):
            excluded.add(high)

        def is_valid(value: object) -> bool:
            if value is None:
                return True
            if not isinstance(value, int | float) or isinstance(value, bool):
                return False
            return low <= value <= high and value not in excluded

        self._check(names, is_valid, f"in {interval}")

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
        """Compute the posterior of a target given data.

        Args:
            target: network, likelihood and prior.
            data: the rows: tensors (x, y), a Dataset or a DataLoader.
            seed: of everything random in the fit; 0 by default.
            checkpoint: a file from which an interrupted fit continues, for an ensemble a folder;
                None (the default) for none. The run of a ``start`` has the file
                ``checkpoint``.start.
            progress: whether and how progress is shown.
        """

    def check_target(self, target: Target, data: Data) -> None:
        """Raise a ValueError where ``fit`` would refuse the network, before anything is trained.

        Args:
            target: network, likelihood and prior.
            data: the rows of a fit.
        """

    draws_all_weights: ClassVar[bool] = False  # whether every weight is random in its posterior

    @property
    def selects_narrow_priors(self) -> bool:
        """Whether held-out rows may select a posterior so narrow that it predicts as its mode."""
        return False

    @property
    def without_density(self) -> str | None:
        """The name of what has no density in its posterior.

        None if all weights have a density, together with auxiliary variables.
        """
        return type(self).__name__

    def at_mode(self, noise: float, data: Data) -> Method:
        """Return this method for a network at a mode, with fixed priors and noise.

        Args:
            noise: the noise of y at the mode.
            data: the rows of the mode.
        """
        return self

    def held_out_index(self, data: Data, seed: int) -> Tensor | None:
        """Return the indices of the rows that a fit holds out; None if it uses all of them.

        Args:
            data: the rows of the fit.
            seed: of the fit.
        """
        return None

    def with_planned_length(self, data: Data) -> Self:
        """Return this method with the length that it plans, whether or not it converges before.

        Args:
            data: the rows of a fit.
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

        Args:
            factor: of the length.
        """
        return self

    def narrowed_to(self, posterior: Posterior) -> Method:
        """Return this method with what a fit to most of the rows has decided: itself.

        Args:
            posterior: of that fit.
        """
        return self

    def starts(self, target: Target, seed: int) -> Params | None:
        """Return the initial weights of the modes that are its posterior, as a stack.

        None if its posterior is not made of modes.

        Args:
            target: network, likelihood and prior.
            seed: of the fit.
        """
        return None

    @property
    def spreads(self) -> tuple[float, ...]:
        """How far its modes may be randomized, from wide to narrow, for a selection."""
        return (0.0,)

    def with_spread(self, spread: float) -> Method:
        """Return this method with its modes randomized.

        Args:
            spread: 0 for not at all, 1 for draws of the posterior.
        """
        return self

    def randomize(self, target: Target, y: Tensor, seed: int) -> tuple[Params, Tensor] | None:
        """Draw prior means and targets for each of these modes, two stacks.

        None if the modes have those of the target.

        Args:
            target: with fixed Normal priors and a known noise.
            y: the targets of all rows.
            seed: the seed of the fit.
        """
        return None


@dataclass(frozen=True)
class FitArguments:
    """The arguments of ``Method.fit``, as methods use them.

    Args:
        target: network, likelihood and prior, with the number of rows.
        data: the rows in batches.
        seed: of everything random in the fit.
        checkpoint: a file from which an interrupted fit continues; None for none.
        progress: whether and how progress is shown.
    """

    target: Target
    data: Data
    seed: int
    checkpoint: StrPath | None
    progress: Show


class BatchedMethod(Method, Generic[P]):
    """A method that takes the rows in batches. A subclass implements ``_fit``."""

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> P:
        """Compute the posterior of a target given data.

        Args:
            target: network, likelihood and prior.
            data: the rows: tensors (x, y), a Dataset or a DataLoader.
            seed: of everything random in the fit; 0 by default.
            checkpoint: a file from which an interrupted fit continues, for an ensemble a folder;
                None (the default) for none. The run of a ``start`` has the file
                ``checkpoint``.start.
            progress: whether and how progress is shown.
        """
        return self._fit(self._arguments(target, data, seed, checkpoint, progress))

    def _arguments(
        self, target: Target, data: Any, seed: int, checkpoint: StrPath | None, progress: Show
    ) -> FitArguments:
        """Return the arguments with the rows in batches."""
        seed = as_int_seed(seed)
        batches = as_data(data, self.batch_size)
        return FitArguments(replace(target, n=batches.n), batches, seed, checkpoint, progress)

    @abstractmethod
    def _fit(self, arguments: FitArguments) -> P:
        """Compute the posterior."""


@dataclass(frozen=True, kw_only=True)
class Trained(Settings, BatchedMethod[P]):
    """A gradient-based method with the settings of ``training.Settings``."""

    def held_out_index(self, data: Data, seed: int) -> Tensor | None:
        """Return the indices of the rows for ``validation``."""
        if not self.validation or not isinstance(data, Rows):
            return None
        held_out_rows = self.split(data, as_int_seed(seed))[1]
        return held_out_rows.index if isinstance(held_out_rows, Rows) else None


def prefers_full_batch(data: Data, batch_size: int) -> bool:
    """Return whether a step over all rows costs little more than a batch, and has less noise.

    Args:
        data: all rows.
        batch_size: rows of a batch.
    """
    return data.n <= MAX_FULL_BATCHES * batch_size and data.targets() is not None


def open_checkpoint(
    path: StrPath | None, method: Checked, target: Target, data: Data, seed: int
) -> Checkpoint | None:
    """Return the checkpoint of a run; None without a file.

    Args:
        path: the file; None for none.
        method: with all settings.
        target: network, likelihood and prior.
        data: the rows.
        seed: of the fit.
    """
    if path is None:
        return None
    return Checkpoint(path, identity(method, target, data, seed))


def identity(method: Checked, target: Target, data: Data, seed: int) -> dict[str, Any]:
    """Return the identity of a run, by which a checkpoint knows that it belongs to it.

    Initial weights and the frequency of checkpoints are not part of it.

    Args:
        method: with all settings.
        target: network, likelihood and prior.
        data: the rows.
        seed: of the fit.
    """
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
