"""A Gaussian over several tensors as the prior of the next task, and its update by new data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Full
from bayou.curvature.kronecker import SEPARATOR, Kronecker, block_names, key
from bayou.curvature.kronecker_updates import factors_of


@final
@dataclass(frozen=True)
class JointNormal:
    """A Gaussian N(mean, Σ) over named tensors.

    Args:
        mean: of every tensor.
        covariance: Σ.
        base: the precision of the first prior, before any data, where it is known.
    """

    mean: Params
    covariance: Covariance
    base: Params

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors."""
        return tuple(self.covariance.shapes)

    def log_prob(self, params: Params) -> Tensor:
        """Return log N(w; mean, Σ): (...).

        Args:
            params: w, tensors (..., *shape).
        """
        deviation = {name: params[name] - self.mean[name] for name in self.names}
        return self.covariance.log_prob(deviation)

    def marginal(self, names: Sequence[str]) -> JointNormal:
        """Return the Gaussian of some of the tensors.

        Args:
            names: the tensors.
        """
        return JointNormal(self.mean, self.covariance.marginal(list(names)), self.base)


def add_past_curvature(
    shapes: Mapping[str, torch.Size], tensors: Params, prior: JointNormal
) -> Params:
    """Return the curvature of new data plus that of all earlier data, Σ⁻¹ − base.

    This is online Laplace (Ritter 2018). Full: the sum. Kronecker: the nearest A ⊗ G to A₁⊗G₁ +
    A₂⊗G₂ of each layer, in the Frobenius norm.

    Args:
        shapes: of the tensors of the new curvature.
        tensors: of the new curvature.
        prior: the posterior of earlier data.
    """
    covariance = prior.covariance
    if isinstance(covariance, Full):
        return _add_full(shapes, tensors, prior, covariance)
    if isinstance(covariance, Kronecker):
        return _add_kronecker(tensors, prior, covariance)
    raise ValueError(f"a {covariance.kind} covariance has no curvature to add to")


def _add_full(
    shapes: Mapping[str, torch.Size], tensors: Params, prior: JointNormal, covariance: Full
) -> Params:
    """Return the sum of two matrices, whose tensors may have other orders."""
    base = torch.cat(
        [
            prior.base[name].double().expand(shape).reshape(-1)
            for name, shape in covariance.shapes.items()
        ]
    )
    rows = torch.arange(len(tensors["matrix"]), device=base.device)
    rows_of_tensors = rows.split([shape.numel() for shape in shapes.values()])
    by_name = dict(zip(shapes, rows_of_tensors, strict=True))
    index = torch.cat([by_name[name] for name in covariance.shapes])
    past = covariance.precision() - torch.diag(base)
    matrix = tensors["matrix"].index_put((index.unsqueeze(1), index), past, accumulate=True)
    return tensors | {"matrix": matrix}


def _add_kronecker(tensors: Params, prior: JointNormal, covariance: Kronecker) -> Params:
    """Return the nearest Kronecker product of every layer, and sums of squares elsewhere."""
    updated = dict(tensors)
    for name in covariance.shapes:
        square = f"square{SEPARATOR}{name}"
        if square in tensors:
            std = covariance.tensors[f"std{SEPARATOR}{name}"].double()
            updated[square] = tensors[square] + std**-2 - prior.base[name].double()
    for names in block_names(covariance.shapes, covariance.tensors):
        past = past_factors(covariance, names, prior.base[names[0]])
        new = tensors[key("in", names)].double(), tensors[key("out", names)].double()
        a, g = nearest_product([past, new])
        updated[key("in", names)] = a
        updated[key("out", names)] = g
    return updated


def past_factors(covariance: Kronecker, names: list[str], base: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and G of a layer with Λ = A ⊗ G + D ⊗ 1.

    Args:
        covariance: of earlier data.
        names: the tensors of the layer.
        base: the precision of the first prior.
    """
    root, q, v, std = (
        covariance.tensors[key(factor, names)].double() for factor in ("root", "in", "out", "std")
    )
    return factors_of(root, q, v, std, base.double().reshape(-1)[0] * root[0].square())


def nearest_product(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return argmin ‖Σ_k A_k ⊗ G_k − A ⊗ G‖_F (Van Loan 1993).

    vec(A)·vec(G)ᵀ is the first singular pair of Σ_k vec(A_k)·vec(G_k)ᵀ, found in the few dimensions
    of the A_k, G_k.

    Args:
        pairs: A_k (groups, I, I) and G_k (groups, O, O).
    """
    a = torch.stack([pair[0].flatten(1) for pair in pairs], -1)  # (groups, I², K)
    g = torch.stack([pair[1].flatten(1) for pair in pairs], -1)  # (groups, O², K)
    qa, ra = torch.linalg.qr(a)
    qg, rg = torch.linalg.qr(g)
    u, size, vh = torch.linalg.svd(ra @ rg.mT)
    first = (qa @ u[..., :1]).reshape(pairs[0][0].shape)
    second = (qg @ vh.mT[..., :1] * size[..., :1, None]).reshape(pairs[0][1].shape)
    sign = first.diagonal(dim1=-2, dim2=-1).sum(-1).sign()[..., None, None]
    return sign * first, sign * second
