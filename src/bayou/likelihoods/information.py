"""The Fisher information of p(y | f) in f, as a sum of squares: the H of a Gauss-Newton matrix Σ_n
J_nᵀ H_n J_n.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import final

import torch
from torch import Tensor

OUTPUTS = (
    4096  # entries of one example's output up to which an H without a closed form is written out
)


class Information(ABC):
    """H_n (K, K) for every example of a batch, K the entries of its output f_n: H_n = Σ_m
    s_m·s_mᵀ.
    """

    @abstractmethod
    def columns(self) -> Iterator[Tensor]:
        """The vectors s_m, one for every example: (B, *out) each."""


@final
class Softmax(Information):
    """H = diag(p) − p·pᵀ = S·Sᵀ for every position of a categorical y, S = (diag(1) −
    p·1ᵀ)·diag(√p).
    """

    def __init__(self, f: Tensor, class_axis: int) -> None:
        self.axis, self.p = class_axis, f.movedim(class_axis, -1).softmax(-1)  # (B, *event, C)

    def columns(self) -> Iterator[Tensor]:
        p = self.p.reshape(len(self.p), -1, self.p.shape[-1])  # (B, positions, C)
        for position in range(p.shape[1]):
            here = p[:, position]
            for c in range(p.shape[2]):
                s = torch.zeros_like(p)
                s[:, position] = -here * here[:, c : c + 1].sqrt()
                s[:, position, c] += here[:, c].sqrt()
                yield s.reshape(self.p.shape).movedim(-1, self.axis)


@final
class Independent(Information):
    """H = diag(h)."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def columns(self) -> Iterator[Tensor]:
        root = self.h.sqrt().reshape(len(self.h), -1)
        for k in range(root.shape[1]):
            s = torch.zeros_like(root)
            s[:, k] = root[:, k]
            yield s.reshape(self.h.shape)


@final
class Weighted(Information):
    """diag(√a)·H·diag(√a): a·H_i for every coordinate i of y, a (B, *out) the same for all outputs
    of a coordinate.
    """

    def __init__(self, information: Information, a: Tensor) -> None:
        self.information, self.root = information, a.sqrt()

    def columns(self) -> Iterator[Tensor]:
        return (self.root * s for s in self.information.columns())


@final
class Scores(Information):
    """H = Σ_m s_m·s_mᵀ."""

    def __init__(self, scores: Sequence[Tensor]) -> None:
        self.scores = scores

    @staticmethod
    def of_squares(rows: Iterable[Tensor], shape: Sequence[int], name: str) -> Scores:
        """H = Σ rows of squares, (M, B, K) at a time, by its K eigenvectors: outputs of this shape
        (B, *out).
        """
        size = torch.Size(shape[1:]).numel()
        if size > OUTPUTS:
            raise ValueError(
                f"the information of {name} in the {size:,} outputs of an example is too large to write out; use "
                "curvature='sampled' or 'fisher', or give the likelihood an `information` in closed form"
            )
        h = reduce(torch.add, (torch.einsum("mbk,mbl->bkl", s, s) for s in rows))
        values, vectors = torch.linalg.eigh(h)
        roots = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
        return Scores([s.reshape(tuple(shape)) for s in roots.unbind(-1)])

    def columns(self) -> Iterator[Tensor]:
        yield from self.scores


def score(log_prob: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """∇_f log p(y | f) of every example, with or without sample axes on both: (..., B, *out)."""
    with torch.enable_grad():
        leaf = f.detach().requires_grad_()
        (found,) = torch.autograd.grad(log_prob(leaf, y).sum(), leaf)
    return found
