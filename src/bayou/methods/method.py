"""A method: a frozen dataclass whose ``fit`` turns a target and data into a posterior."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from bayou.posteriors.posterior import Posterior
from bayou.progress import Show
from bayou.target import Target


class Method(ABC):
    """Nothing happens in the constructor of a method; ``fit`` does the work."""

    batch_size: int = 128

    @abstractmethod
    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of ``target`` given ``data``."""
