"""Curvature in the space of outputs: the H of a generalised Gauss-Newton Σ_n J_nᵀ H_n J_n, as a sum of squares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, Literal, final

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from bayou import rng
from bayou.likelihoods import (
    BoundBernoulli,
    BoundCategorical,
    BoundHeteroscedastic,
    BoundHomoscedastic,
    BoundLikelihood,
    BoundPoisson,
    UnitStudentT,
)

Kind = Literal["ggn", "fisher", "sampled"]
KINDS: Final[tuple[Kind, ...]] = ("ggn", "fisher", "sampled")
OUTPUTS = 4096  # entries of one example's output up to which a Hessian without a closed form is written out


class Information(ABC):
    """H_n (K, K) for every example of a batch, K the entries of its output f_n: H_n = Σ_m s_m·s_mᵀ."""

    @abstractmethod
    def columns(self) -> Iterator[Tensor]:
        """The vectors s_m, one for every example: (B, *out) each."""

    @abstractmethod
    def product(self, u: Tensor) -> Tensor:
        """H_n·u_n: (B, *out) to (B, *out)."""


@final
class Softmax(Information):
    """H = diag(p) − p·pᵀ = S·Sᵀ for every position of a categorical y, S = (diag(1) − p·1ᵀ)·diag(√p)."""

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

    def product(self, u: Tensor) -> Tensor:
        u = u.movedim(self.axis, -1)
        return (self.p * (u - (self.p * u).sum(-1, keepdim=True))).movedim(-1, self.axis)


@final
class Independent(Information):
    """H = diag(h): every entry of the output is a parameter of its own."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def columns(self) -> Iterator[Tensor]:
        root = self.h.sqrt().flatten(1) if self.h.ndim > 1 else self.h.sqrt().unsqueeze(1)
        for k in range(root.shape[1]):
            s = torch.zeros_like(root)
            s[:, k] = root[:, k]
            yield s.reshape(self.h.shape)

    def product(self, u: Tensor) -> Tensor:
        return self.h * u


@final
class Dense(Information):
    """H written out, (B, K, K), of a likelihood without a closed form; it must not be indefinite."""

    def __init__(self, h: Tensor, shape: Sequence[int], name: str) -> None:
        values, vectors = torch.linalg.eigh(h)
        if bool((values < -1e-6 * values.abs().amax(-1, keepdim=True)).any()):
            raise ValueError(
                f"−log p(y | f) of {name} is not convex in f, so that its Hessian gives no Gaussian; "
                "use curvature='sampled' or 'fisher', which are never indefinite"
            )
        self.h, self.shape = h, shape
        self.roots = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)

    def columns(self) -> Iterator[Tensor]:
        for s in self.roots.unbind(-1):
            yield s.reshape(tuple(self.shape))

    def product(self, u: Tensor) -> Tensor:
        return (self.h @ u.reshape(len(u), -1, 1)).reshape(u.shape)


@final
class Scores(Information):
    """H = Σ_m s_m·s_mᵀ of given vectors."""

    def __init__(self, scores: Sequence[Tensor]) -> None:
        self.scores = scores

    def columns(self) -> Iterator[Tensor]:
        yield from self.scores

    def product(self, u: Tensor) -> Tensor:
        total = torch.zeros_like(u)
        for s in self.scores:
            total += s * (s * u).reshape(len(u), -1).sum(1).reshape(-1, *[1] * (u.ndim - 1))
        return total


def information(
    likelihood: BoundLikelihood, f: Tensor, y: Tensor, kind: Kind = "ggn", samples: int = 1, seed: rng.Seed = None
) -> Information:
    """H_n for outputs f (B, *out) and targets y.

    * ``"ggn"``: the Fisher information of p(y | f) in f, E_y[∇log p·∇log pᵀ] (Martens 2020). For a categorical,
      Bernoulli, Poisson or Gaussian y it *is* the Hessian of −log p(y | f), whatever y. For Student's t,
      (df + 1)/(df + 3)/scale², and for a heteroscedastic Gaussian, (1/σ², ½·(∂log σ²/∂s)²), it differs from the
      Hessian, which is indefinite far from the data. Any other likelihood gets its Hessian.
    * ``"fisher"``: ∇log p(y_n | f_n)·(...)ᵀ with the labels of the data, the empirical Fisher.
    * ``"sampled"``: the same with ``samples`` labels drawn from p(y | f), an unbiased estimate of the Fisher.
    """
    f = f.detach()
    if kind == "fisher":
        return Scores([score(likelihood, f, y)])
    if kind == "sampled":
        drawn = likelihood.sample(f, samples, rng.fold(seed, "labels"))
        return Scores(score(likelihood, f.expand(samples, *f.shape), drawn).div_(samples**0.5).unbind())
    if isinstance(likelihood, BoundCategorical):
        return Softmax(f, likelihood.class_axis)
    if isinstance(likelihood, BoundBernoulli):
        return Independent(f.sigmoid() * (-f).sigmoid())
    if isinstance(likelihood, BoundPoisson):
        return Independent(f.exp())
    if isinstance(likelihood, BoundHomoscedastic):
        unit = likelihood.unit
        peak = (unit.df + 1) / (unit.df + 3) if isinstance(unit, UnitStudentT) else 1.0
        return Independent((peak * torch.exp(-2 * likelihood.log_scale.detach())).expand_as(f))
    if isinstance(likelihood, BoundHeteroscedastic):
        _, log_scale = likelihood.location_log_scale(f)
        variance = torch.exp(2 * log_scale)
        share = f.chunk(2, -1)[1].exp() / variance  # ∂log σ²/∂s: 1 without min_std
        return Independent(torch.cat((1 / variance, 0.5 * share.square()), -1))
    return _hessian(likelihood, f, y)


def score(likelihood: BoundLikelihood, f: Tensor, y: Tensor) -> Tensor:
    """∇_f log p(y | f) of every example, with or without sample axes on both: (..., B, *out)."""
    with torch.enable_grad():
        leaf = f.detach().requires_grad_()
        (found,) = torch.autograd.grad(likelihood.log_prob(leaf, y).sum(), leaf)
    return found


def _hessian(likelihood: BoundLikelihood, f: Tensor, y: Tensor) -> Dense:
    name, size = type(likelihood).__name__, f[0].numel()
    if size > OUTPUTS:
        raise ValueError(
            f"the Hessian of {name} in the {size:,} outputs of an example is too large to write out; use "
            "curvature='sampled' or 'fisher'"
        )

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return -likelihood.log_prob(f.unsqueeze(0), y.unsqueeze(0)).sum()

    h: Tensor = vmap(jacrev(jacrev(loss)))(f, y)
    return Dense(h.detach().reshape(len(f), size, size), f.shape, name)
