"""Searches that methods share: what does not depend on the method is searched once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou.network.target import Target
from bayou.select.search_run import SearchRun
from bayou.training.data import Rows


@final
@dataclass(frozen=True)
class SearchKey:
    """What a search depends on: its settings, its rows and the initial weights.

    Args:
        settings: plain values, which are compared by ``==``; among them a digest of x and y.
        rows: the numbers of the rows.
        start: the initial weights by name.
    """

    settings: tuple[object, ...]
    rows: Tensor
    start: Mapping[str, Tensor]

    @classmethod
    def of(cls, target: Target, rows: Rows, run: SearchRun, *settings: object) -> SearchKey:
        """Return the key of a search.

        Args:
            target: network, likelihood and prior.
            rows: the rows.
            run: its seed and the method that finds modes.
            *settings: further settings that decide on the outcome.
        """
        start = {name: value.detach().clone() for name, value in target.start().items()}
        problem = (repr(target.likelihood_spec), repr(target.prior), target.n)
        data = tuple(rows.fingerprint())
        return cls((run.seed, run.start, *problem, data, *settings), rows.index, start)

    def equals(self, other: SearchKey) -> bool:
        """Return whether another search has the same settings, rows and weights.

        Args:
            other: its key.
        """
        if self.settings != other.settings or self.start.keys() != other.start.keys():
            return False
        return torch.equal(self.rows, other.rows) and all(
            torch.equal(value, other.start[name]) for name, value in self.start.items()
        )


_SEARCHES: ContextVar[list[tuple[SearchKey, Any]] | None] = ContextVar("searches", default=None)


@contextmanager
def shared_searches() -> Iterator[None]:
    """Inside, methods that are compared on the same data make the same search once."""
    token = _SEARCHES.set([])
    try:
        yield
    finally:
        _SEARCHES.reset(token)


def finished_searches(key: SearchKey) -> Iterator[Any]:
    """Yield the outcomes of the same search, that other methods have made.

    Args:
        key: of the search.
    """
    for other, outcome in _SEARCHES.get() or ():
        if key.equals(other):
            yield outcome


def keep_search(key: SearchKey, outcome: object) -> None:
    """Keep the outcome of a search for other methods, inside ``shared_searches``.

    Args:
        key: of the search.
        outcome: what was found.
    """
    searches = _SEARCHES.get()
    if searches is not None:
        searches.append((key, outcome))
