"""The fits of a search: their seed, files and progress, and what happens at Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.inference.method import Method
from bayou.inference.start import network_at
from bayou.methods.point import MAP
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical, Posterior
from bayou.posteriors.posterior import Stage
from bayou.select.plans import SearchInterrupted
from bayou.training.data import Data
from bayou.training.seeds import part_seed


@final
@dataclass(frozen=True)
class SearchRun:
    """What all fits of one search share.

    Args:
        seed: of the fit that the search serves.
        checkpoint: the file of that fit; those of the search lie beside it.
        progress: whether to show progress.
        start: the method that finds modes; its effort is that of the search.
    """

    seed: int = 0
    checkpoint: Path | None = None
    progress: Show = True
    start: MAP = field(default_factory=MAP)

    @property
    def effort(self) -> float:
        """What multiplies folds and passes of the search."""
        return self.start.effort

    def part_seed(self, name: str) -> int:
        """Return the seed of a part of the search.

        Args:
            name: of the part.
        """
        return part_seed(self.seed, name)

    def file(self, ending: str) -> Path | None:
        """Return the file beside the checkpoint with this ending, if there is a checkpoint.

        Args:
            ending: what follows the name of the checkpoint.
        """
        return None if self.checkpoint is None else Path(f"{self.checkpoint}.{ending}")

    def options(self, ending: str = "") -> dict[str, Any]:
        """Return the options of a fit, in the file with this ending or in that of the final fit.

        Args:
            ending: of the file beside the checkpoint; none for the checkpoint itself.
        """
        file = self.file(ending) if ending else self.checkpoint
        return {"seed": self.seed, "checkpoint": file, "progress": self.progress}

    def fit(self, method: Method, target: Target, rows: Data, ending: str) -> Any:
        """Fit a method, in the file with this ending; Ctrl-C ends the search.

        Args:
            method: the method.
            target: network, likelihood and prior.
            rows: the rows.
            ending: of the file beside the checkpoint.

        Raises:
            SearchInterrupted: with the posterior so far.
        """
        posterior = method.fit(target, rows, **self.options(ending))
        raise_if_stopped(posterior)
        return posterior


def raise_if_stopped(posterior: Posterior) -> None:
    """Raise a SearchInterrupted with a posterior whose fit was interrupted.

    Args:
        posterior: of a fit of the search.
    """
    if posterior.stopped == "interrupted":
        raise SearchInterrupted(posterior)


def stop_at_network(target: Target) -> SearchInterrupted:
    """Return the interruption of a search that has no mode yet: the posterior is the network.

    Args:
        target: has the network.
    """
    weights = {name: value.unsqueeze(0) for name, value in target.start().items()}
    posterior = Empirical(target, target.network, weights)
    posterior.stopped = "interrupted"
    return SearchInterrupted(posterior)


def point_posterior(target: Target, weights: Params) -> Empirical:
    """Return the posterior that is one point.

    Args:
        target: network, likelihood and prior.
        weights: the point.
    """
    stack = {name: value.unsqueeze(0) for name, value in weights.items()}
    return Empirical(target, Network(target.net), stack, [])


def target_at(mode: Empirical) -> Target:
    """Return the target of a mode with the network at its weights.

    Args:
        mode: a posterior of one point.
    """
    return replace(mode.target, net=network_at(mode))


def stage_record(name: str, started: float, trials: list[dict[str, Any]]) -> Stage:
    """Return the record of a stage for ``Posterior.selection``.

    Args:
        name: of the stage.
        started: the time of its beginning, by ``time.perf_counter``.
        trials: the settings that were compared, with their scores.
    """
    return {"stage": name, "seconds": time.perf_counter() - started, "trials": trials}
