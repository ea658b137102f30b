"""Conformal p-values of scores, and their combination with an exact calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

Rule = Literal["fisher", "stouffer", "minimum"]
RULES: tuple[Rule, ...] = ("fisher", "stouffer", "minimum")
CHUNK_NUMBERS = 2**22  # rows times held-out rows whose combinations are in memory
ROUNDING = 1e-9  # below which two combined statistics count as equal


@final
@dataclass(frozen=True, eq=False)
class ConformalRanks:
    """The scores of n held-out rows, beside which those of new rows have p-values.

    p(x) = (1 + #{i: s_i ≥ s(x)})/(n + 1). If x and the held-out rows are exchangeable, then
    P(p(x) ≤ u) ≤ u for all u, with equality at multiples of 1/(n + 1) where no scores are equal
    (Vovk 2005; Bates et al. 2023).

    Args:
        names: of the K scores.
        scores: of the held-out rows, (n, K) in float64; higher is more unusual.
    """

    names: tuple[str, ...]
    scores: Tensor

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or self.scores.shape[1] != len(self.names):
            raise ValueError(
                f"held-out scores must be (n, {len(self.names)}), got {tuple(self.scores.shape)}"
            )
        if bool(self.scores.isnan().any()):
            raise ValueError("a score of the held-out rows is NaN; check the posterior and x")

    @property
    def rows(self) -> int:
        """The number of held-out rows, n."""
        return len(self.scores)

    def p_values(self, scores: Tensor) -> Tensor:
        """Return the p-value of every score, (B, K).

        Args:
            scores: of new rows, (B, K).

        Raises:
            ValueError: if a score is NaN.
        """
        return (1 + self._counts(scores)).double() / (self.rows + 1)

    def _counts(self, scores: Tensor) -> Tensor:
        """Return how many held-out rows have at least this score, (B, K)."""
        if bool(scores.isnan().any()):
            raise ValueError("a score is NaN; check the posterior and x")
        ordered = self.scores.mT.contiguous().sort(dim=1).values
        below = torch.searchsorted(ordered, scores.mT.contiguous())
        return (self.rows - below).mT

    def combine(self, scores: Tensor, names: Sequence[str], rule: Rule) -> Tensor:
        """Return one p-value from those of several scores, (B,).

        With the rank r_k of a row among the n held-out rows and x together, from 1 for the largest
        score, and u_k = (r_k − ½)/(n + 1), the combined statistic is

        "fisher"    T = −Σ_k log u_k
        "stouffer"  T = Σ_k Φ⁻¹(1 − u_k)
        "minimum"   T = −min_k u_k

        and p(x) = (1 + #{i: T_i ≥ T(x)})/(n + 1). The scores depend on each other, so that T has
        no known distribution; it is that of the held-out rows instead. T_i is computed with x among
        the ranked rows, for every x. All n + 1 rows are thus treated alike, and the p-value is
        exactly as valid as that of one score.

        Args:
            scores: of new rows, (B, K).
            names: of the scores to combine.
            rule: "fisher", "stouffer" or "minimum".

        Raises:
            ValueError: for an unknown rule or score.
        """
        columns = self._columns(names, rule)
        new_counts = self._counts(scores)
        # Held-out row i counts itself, and x where x has at least its score.
        held_out_counts = self._counts(self.scores)
        statistics = torch.stack([self._statistic(1 + new_counts[:, k], rule) for k in columns])
        without = torch.stack([self._statistic(held_out_counts[:, k], rule) for k in columns])
        with_new = torch.stack([self._statistic(held_out_counts[:, k] + 1, rule) for k in columns])
        chunk = max(1, CHUNK_NUMBERS // self.rows)
        p_values = []
        for first in range(0, len(scores), chunk):
            index = slice(first, first + chunk)
            new_statistics = _join(statistics[:, index], rule)
            terms = []
            for position, k in enumerate(columns):
                is_exceeded = scores[index, k].unsqueeze(1) >= self.scores[:, k]
                terms.append(torch.where(is_exceeded, with_new[position], without[position]))
            combined = _join_terms(terms, rule)
            exceeds = combined >= new_statistics.unsqueeze(1) - ROUNDING
            p_values.append((1 + exceeds.sum(1)).double() / (self.rows + 1))
        return torch.cat(p_values)

    def _columns(self, names: Sequence[str], rule: str) -> list[int]:
        """Return the columns of some scores."""
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        unknown = [name for name in names if name not in self.names]
        if unknown or not names:
            raise ValueError(
                f"scores to combine must be some of {', '.join(self.names)}, got "
                f"{', '.join(map(repr, names)) or 'none'}"
            )
        return [self.names.index(name) for name in names]

    def _statistic(self, ranks: Tensor, rule: Rule) -> Tensor:
        """Return the term of a score with ranks from 1, for the largest, to n + 1."""
        u = (ranks.double() - 0.5) / (self.rows + 1)
        if rule == "fisher":
            return -u.log()
        if rule == "stouffer":
            return -torch.special.ndtri(u)
        return -u


def _join(terms: Tensor, rule: Rule) -> Tensor:
    """Return the sum, or the largest, of the terms (K, B)."""
    return terms.amax(0) if rule == "minimum" else terms.sum(0)


def _join_terms(terms: list[Tensor], rule: Rule) -> Tensor:
    """Return the sum, or the largest, of terms of one shape."""
    joined = terms[0]
    for term in terms[1:]:
        joined = torch.maximum(joined, term) if rule == "minimum" else joined + term
    return joined
