"""A Gaussian over several tensors as the prior of the next task, and the update of its curvature by
new data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Full
from bayou.curvature.kronecker import SEPARATOR, Kronecker, block_names, key


@final
@dataclass(frozen=True)
class JointNormal:
    """N(mean, Σ) over named tensors. ``base``: the precision of the first prior, before any data,
    where it is known.
    """

    mean: Params
    covariance: Covariance
    base: Params

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors."""
        return tuple(self.covariance.shapes)

    def log_prob(self, params: Params) -> Tensor:
        """log N(w; mean, Σ) of tensors (..., *shape): (...)."""
        return self.covariance.log_prob(
            {name: params[name] - self.mean[name] for name in self.names}
        )

    def marginal(self, names: Sequence[str]) -> JointNormal:
        """Of some of the tensors."""
        return JointNormal(self.mean, self.covariance.marginal(list(names)), self.base)


def add_past_curvature(shapes: Mapping[str, torch.Size], tensors: Params, prior: JointNormal) -> Params:
    """The curvature C of new data plus that of all earlier data, Σ⁻¹ − base: online Laplace (Ritter
    2018).

    Full: the sum. Kronecker: the nearest A ⊗ G to A₁⊗G₁ + A₂⊗G₂ of each layer, in the Frobenius
    norm.
    """
    old, found = prior.covariance, dict(tensors)
    if isinstance(old, Full):
        base = torch.cat(
            [prior.base[n].double().expand(shape).reshape(-1) for n, shape in old.shapes.items()]
        )
        places = torch.arange(len(tensors["matrix"]), device=base.device).split(
            [s.numel() for s in shapes.values()]
        )
        own = torch.cat([dict(zip(shapes, places, strict=True))[name] for name in old.shapes])
        found["matrix"] = tensors["matrix"].index_put(
            (own.unsqueeze(1), own), old.precision() - torch.diag(base), accumulate=True
        )
        return found
    assert isinstance(old, Kronecker)
    for name in old.shapes:
        if (square := f"square{SEPARATOR}{name}") in tensors:
            std = old.tensors[f"std{SEPARATOR}{name}"].double()
            found[square] = tensors[square] + std**-2 - prior.base[name].double()
    for names in block_names(old.shapes, old.tensors):
        a, g = past_factors(old, names, prior.base[names[0]])
        pairs = [(a, g), (tensors[key("in", names)].double(), tensors[key("out", names)].double())]
        found[key("in", names)], found[key("out", names)] = nearest_product(pairs)
    return found


def past_factors(old: Kronecker, names: list[str], base: Tensor) -> tuple[Tensor, Tensor]:
    """A and G of a layer with Λ = A ⊗ G + D ⊗ 1: 1/std² = s ⊗ t + multiplier of rank one but for
    the multiplier.
    """
    root, q, v, std = (
        old.tensors[key(part, names)].double() for part in ("root", "in", "out", "std")
    )
    data = (std**-2 - base.double().reshape(-1)[0] * root[0].square()).clamp_min(
        0.0
    )  # (groups, O, I)
    t, s = data.sum(-1), data.sum(-2)
    s = s / t.sum(-1, keepdim=True).clamp_min(torch.finfo(t.dtype).tiny)
    wide = q / root.unsqueeze(-1)
    return wide * s.unsqueeze(-2) @ wide.mT, v * t.unsqueeze(-2) @ v.mT


def nearest_product(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """argmin ‖Σ_k A_k ⊗ G_k − A ⊗ G‖_F of stacks of matrices (groups, I, I), (groups, O, O) (Van
    Loan 1993).

    vec(A)·vec(G)ᵀ is the first singular pair of Σ_k vec(A_k)·vec(G_k)ᵀ, found in the few dimensions
    of the A_k, G_k.
    """
    a, g = (
        torch.stack([pair[k].flatten(1) for pair in pairs], -1) for k in (0, 1)
    )  # (groups, I², K), (groups, O², K)
    (qa, ra), (qg, rg) = torch.linalg.qr(a), torch.linalg.qr(g)
    u, size, vh = torch.linalg.svd(ra @ rg.mT)
    first = (qa @ u[..., :1]).reshape(pairs[0][0].shape)
    second = (qg @ vh.mT[..., :1] * size[..., :1, None]).reshape(pairs[0][1].shape)
    sign = first.diagonal(dim1=-2, dim2=-1).sum(-1).sign()[..., None, None]
    return sign * first, sign * second
