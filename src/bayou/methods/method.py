"""A method: a frozen dataclass whose ``fit`` turns a target and data into a posterior."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from bayou.files import StrPath
from bayou.posteriors.posterior import Posterior
from bayou.progress import Show
from bayou.specs import Checked, to_json
from bayou.target import Target
from bayou.training.data import Data
from bayou.training.settings import Settings


class Method(Checked, ABC):
    """Nothing happens in the constructor of a method; ``fit`` does the work."""

    batch_size: int = 128

    @abstractmethod
    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Posterior:
        """The posterior of ``target`` given ``data``."""

    # What a method that wraps this one (``bayou.select``) may ask of it.

    chooses_prior: ClassVar[bool] = False  # whether it chooses a prior where none was given
    draws_all_weights: ClassVar[bool] = False  # whether every weight is random in its posterior

    def at_mode(self, noise: float) -> Self:
        """This method for a network that is at a mode already, with priors and this noise fixed."""
        return self

    def shortened(self, data: Data) -> Self:
        """This method without the extension of an open-ended run: enough to compare the widths of posteriors."""
        return self


@dataclass(frozen=True, kw_only=True)
class Trained(Settings, Method):
    """A method that descends a gradient: its settings are those of ``training.Settings``."""


def identity(method: Method, target: Target, data: Data, seed: int) -> dict[str, Any]:
    """What tells a run from others; where its weights start and how often it is saved do not."""
    spec = to_json(method)
    spec["fields"].pop("checkpoint_every", None)
    return {
        "method": spec,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "network": [
            re.sub("0x[0-9a-f]+", "", repr(target.net)),
            {name: list(value.shape) for name, value in target.net.named_parameters()},
        ],
        "data": data.fingerprint(),
        "seed": seed,
    }
