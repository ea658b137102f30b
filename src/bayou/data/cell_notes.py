"""Sentences about unusual cells, whose counts add up over blocks of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import final

import numpy as np

from bayou.data.columns import Flags, quote

MAX_EXAMPLES = 3  # values that a sentence names


@final
class CellNotes:
    """Counts of unusual cells by column and kind, as sentences.

    A kind is registered by the first block of rows, also if that has none, so that the sentences of
    many blocks have the order of those of one.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._firsts: dict[tuple[str, str], str] = {}
        self._examples: dict[tuple[str, str], list[str]] = {}
        self._sentences: dict[tuple[str, str], Callable[[int, str], str]] = {}

    def add(
        self,
        column: str,
        kind: str,
        flags: Flags,
        sentence: Callable[[int, str], str],
        describe_first: Callable[[Flags], str] | None = None,
    ) -> None:
        """Count the cells of a block.

        Args:
            column: its name.
            kind: what is unusual about them, a word.
            flags: which cells are so.
            sentence: a function of the number of all such cells and the text about the first.
            describe_first: gives that text; None for no text.
        """
        key = (column, kind)
        count = int(np.count_nonzero(flags))
        if count and not self._counts[key]:
            self._sentences[key] = sentence
            self._firsts[key] = "" if describe_first is None else describe_first(flags)
        self._counts[key] += count

    def add_values(
        self,
        column: str,
        kind: str,
        count: int,
        values: Collection[str],
        sentence: Callable[[int, str], str],
    ) -> None:
        """Count cells of a block by their values, of which the sentence names a few.

        Args:
            column: its name.
            kind: what is unusual about them, a word.
            count: the number of cells.
            values: their different values; the first in alphabetical order are named.
            sentence: a function of the number of all such cells and of the text of the values.
        """
        key = (column, kind)
        examples = sorted({*self._examples.get(key, ()), *values})[: MAX_EXAMPLES + 1]
        self._examples[key] = examples
        self._firsts[key] = ", ".join(map(quote, examples[:MAX_EXAMPLES]))
        if len(examples) > MAX_EXAMPLES:
            self._firsts[key] += ", ..."
        self._sentences[key] = sentence
        self._counts[key] += count

    def sentences(self) -> list[str]:
        """Return a sentence for each column and kind that has any cells."""
        return [
            self._sentences[key](count, self._firsts[key])
            for key, count in self._counts.items()
            if count
        ]
