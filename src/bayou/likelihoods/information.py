"""The Fisher information of p(y | f) in f: the H of a Gauss-Newton matrix Σ_n J_nᵀ H_n J_n."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import final

import torch
from torch import Tensor

# Entries of one example's output up to which an H without a closed form is written out.
MAX_OUTPUTS = 4096


class Information(ABC):
    """H_n = Σ_m s_m·s_mᵀ (K, K) for every example of a batch, K the entries of its output f_n."""

    @abstractmethod
    def columns(self) -> Iterator[Tensor]:
        """Yield the vectors s_m, one for every example: (B, *out) each."""

    def total(self) -> Tensor | None:
        """Return Σ_n H_n over the examples, (K, K) in float64; None without a closed form."""
        return None


@final
class Softmax(Information):
    """H = diag(p) − p·pᵀ = S·Sᵀ for every position of a categorical y.

    S is the Cholesky factor (Tanabe & Sagae 1992), C × (C − 1): with the probabilities
    q_c = Σ_{k > c} p_k of the classes after c, S_cc = √(p_c·q_c/q_{c−1}) and
    S_ic = −p_i·√(p_c/(q_{c−1}·q_c)) for i > c. The column of the last class is zero.

    Args:
        f: logits, (B, *out).
        class_axis: the axis of the classes.
    """

    def __init__(self, f: Tensor, class_axis: int) -> None:
        self.axis = class_axis
        self.p: Tensor = f.movedim(class_axis, -1).softmax(-1)  # (B, *event, C)

    def columns(self) -> Iterator[Tensor]:
        probabilities = self.p.reshape(len(self.p), -1, self.p.shape[-1])  # (B, positions, C)
        rest = probabilities.flip(-1).cumsum(-1).flip(-1)  # Σ_{k ≥ c} p_k, without cancellation
        for position in range(probabilities.shape[1]):
            p = probabilities[:, position]
            for c in range(probabilities.shape[2] - 1):
                before = rest[:, position, c]
                after = rest[:, position, c + 1]
                # the conditional probability of a later class is at most 1
                root = (p[:, c] / before.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
                column = torch.zeros_like(probabilities)
                column[:, position, c] = root * after.sqrt()
                shares = p[:, c + 1 :] * after.clamp_min(torch.finfo(p.dtype).tiny).rsqrt()[:, None]
                column[:, position, c + 1 :] = -root[:, None] * shares
                yield column.reshape(self.p.shape).movedim(-1, self.axis)

    def total(self) -> Tensor | None:
        """Return diag(Σ_n p_n) − Σ_n p_n·p_nᵀ for outputs of one position."""
        if self.p.ndim != 2:
            return None
        p = self.p.double()
        return torch.diag(p.sum(0)) - p.mT @ p


@final
class Independent(Information):
    """H = diag(h).

    Args:
        h: the diagonal, (B, *out).
    """

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def columns(self) -> Iterator[Tensor]:
        root = self.h.sqrt().reshape(len(self.h), -1)
        for k in range(root.shape[1]):
            column = torch.zeros_like(root)
            column[:, k] = root[:, k]
            yield column.reshape(self.h.shape)


@final
class Weighted(Information):
    """diag(√a)·H·diag(√a): a·H_i for every coordinate i of y.

    Args:
        information: H.
        a: the weights, (B, *out), the same for all outputs of a coordinate.
    """

    def __init__(self, information: Information, a: Tensor) -> None:
        self.information = information
        self.root: Tensor = a.sqrt()

    def columns(self) -> Iterator[Tensor]:
        return (self.root * column for column in self.information.columns())


@final
class Scores(Information):
    """H = Σ_m s_m·s_mᵀ.

    Args:
        scores: the vectors s_m, (B, *out) each.
    """

    def __init__(self, scores: Sequence[Tensor]) -> None:
        self.scores = scores

    @staticmethod
    def of_squares(rows: Iterable[Tensor], shape: Sequence[int], name: str) -> Scores:
        """Compute H = Σ rowsᵀ·rows, by its K eigenvectors.

        Args:
            rows: blocks of vectors, (M, B, K).
            shape: the shape of the outputs, (B, *out).
            name: the name of the likelihood, for error messages.
        """
        size = torch.Size(shape[1:]).numel()
        if size > MAX_OUTPUTS:
            raise ValueError(
                f"the information of {name} in the {size:,} outputs of an example is too large to "
                "write out; use curvature='sampled' or 'fisher', or give the likelihood an "
                "`information` in closed form"
            )
        h = reduce(torch.add, (torch.einsum("mbk,mbl->bkl", block, block) for block in rows))
        values, vectors = torch.linalg.eigh(h)
        roots = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
        return Scores([root.reshape(tuple(shape)) for root in roots.unbind(-1)])

    def columns(self) -> Iterator[Tensor]:
        yield from self.scores


def score(log_prob: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """Compute ∇_f log p(y | f) of every example: (..., B, *out).

    Args:
        log_prob: computes log p(y | f) of (f, y).
        f: outputs, with or without sample axes.
        y: targets, with the sample axes of f.
    """
    with torch.enable_grad():
        leaf = f.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(log_prob(leaf, y).sum(), leaf)
    return gradient
