"""N(0, Σ) over named tensors, by the structure of Σ: the posteriors of Laplace and SWAG."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.params import Params
from bayou.curvature.rank_updates import (
    NOT_CONTAINED,
    add_rows,
    exceeds_prior,
    forget_root,
    remove_rows,
)

# By which a variance may exceed that of the prior, relative to it: S of VBLL comes from an
# optimizer. Rows that were never added exceed it by far where no other row has information.
PRIOR_TOLERANCE = 0.5


class Covariance(ABC):
    """The covariance Σ of a Gaussian over tensors of known shapes.

    It is made of ``tensors`` alone, so that a file can hold it.

    Args:
        shapes: of the named tensors.
        tensors: what Σ is made of, by the names that its class defines.
    """

    kind: ClassVar[str]
    adds_exactly: ClassVar[bool] = False  # whether ``with_rows`` is exact for any rows

    def __init__(self, shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
        self.shapes: dict[str, torch.Size] = {
            name: torch.Size(shape) for name, shape in shapes.items()
        }
        # Contiguous, as in a file: the rounding of products depends on the memory layout.
        self.tensors: dict[str, Tensor] = {
            name: value.detach().contiguous() for name, value in tensors.items()
        }

    @property
    def size(self) -> int:
        """Return D, the number of entries of all tensors."""
        return sum(shape.numel() for shape in self.shapes.values())

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from N(0, Σ): (n, *shape) each.

        Args:
            n: the number of draws, start .. start + n − 1.
            seed: with an int, draw i depends on it and i alone.
            start: the number of the first draw.
        """

    @abstractmethod
    def mahalanobis(self, deviation: Params) -> Tensor:
        """Return dᵀ Σ⁻¹ d: (...).

        Args:
            deviation: tensors (..., *shape).
        """

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """Return log |Σ|."""

    @abstractmethod
    def spread(self, rows: Params) -> Tensor:
        """Return R with R·Rᵀ = J·Σ·Jᵀ: (..., a number of columns).

        Args:
            rows: J, rows of a Jacobian, tensors (..., *shape).
        """

    @abstractmethod
    def variance(self) -> Params:
        """Return the diagonal of Σ, (*shape) of every tensor."""

    def marginal(self, names: Sequence[str]) -> Covariance:
        """Return Σ of some of the tensors, in this order.

        Args:
            names: the tensors.

        Raises:
            ValueError: if it does not have this structure.
        """
        raise ValueError(
            f"a {self.kind} covariance over {', '.join(self.shapes)} has no part over "
            f"{', '.join(names)} of its kind; "
            "use Laplace('full'), Laplace('kronecker'), or VI with MeanField or LowRank"
        )

    def with_independent(self, other: Covariance) -> Covariance:
        """Return Σ of these tensors and of others that are independent of them.

        Args:
            other: of the same structure.
        """
        raise ValueError(f"a {self.kind} covariance is not made of independent parts")

    def as_matrix(self) -> Covariance:
        """Return Σ in the structure from which Laplace of the next task continues."""
        return self

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same Σ in another dtype.

        Args:
            dtype: of all tensors.
        """
        cast = {name: value.to(dtype) for name, value in self.tensors.items()}
        return type(self)(self.shapes, cast)

    def product(self, rows: Params) -> Params:
        """Return Σ·a of every row a of a matrix, tensors of the same shapes.

        Args:
            rows: tensors (..., *shape).
        """
        raise ValueError(self._no_update())

    def with_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ + AᵀA)⁻¹, or the nearest Σ of this structure where it is not ``exact``.

        Args:
            rows: A, M rows, tensors (M, *shape).
            prior: the precision of the prior of every tensor; empty where it is not known.
        """
        raise ValueError(self._no_update())

    def without_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ − AᵀA)⁻¹.

        Args:
            rows: A, M rows, tensors (M, *shape).
            prior: the precision of the prior of every tensor; empty where it is not known.

        Raises:
            ValueError: where the result is not positive definite or less than the prior precision,
                and for a structure without an exact result.
        """
        raise ValueError(
            f"a {self.kind} covariance holds the rows only approximately, so that none can be "
            "removed exactly; use Laplace('full', where='last'), or fit again without these rows"
        )

    def forget_rows(self, forget: float, prior: Params) -> Covariance:
        """Return (λ·Σ⁻¹ + (1 − λ)·P)⁻¹, which tends to the prior.

        Args:
            forget: λ, in (0, 1].
            prior: P, the precision of every tensor.
        """
        raise ValueError(self._no_update())

    def _no_update(self) -> str:
        """Return a sentence that says that this structure cannot be updated."""
        return (
            f"a {self.kind} covariance cannot be updated by new rows; use Laplace('full', "
            "where='last') or VBLL, or fit again with all rows"
        )

    def _spread_prior(self, prior: Params) -> Tensor:
        """Return a precision for every weight, (D,) in float64."""
        expanded = {name: prior[name].double().expand(shape) for name, shape in self.shapes.items()}
        return self.to_vector(expanded)

    def log_prob(self, deviation: Params) -> Tensor:
        """Return log N(d; 0, Σ) = −½·(dᵀ Σ⁻¹ d + log |Σ| + D·log 2π).

        Args:
            deviation: d, tensors (..., *shape).
        """
        return -0.5 * (self.mahalanobis(deviation) + self.log_det + self.size * LOG_2PI)

    def sum(self, name: str, value: Tensor) -> Tensor:
        """Return the sum over the axes of one tensor: (..., *shape) to (...).

        Args:
            name: of the tensor.
            value: (..., *shape).
        """
        return flat_axes(value, len(self.shapes[name])).sum(-1)

    def to_vector(self, params: Params) -> Tensor:
        """Return all tensors one after another: (..., *shape) to (..., D).

        Args:
            params: tensors (..., *shape).
        """
        vectors = [flat_axes(params[name], len(shape)) for name, shape in self.shapes.items()]
        return torch.cat(vectors, -1)

    def from_vector(self, vector: Tensor) -> Params:
        """Return tensors (..., *shape), the inverse of ``to_vector``.

        Args:
            vector: (..., D).
        """
        vectors = vector.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            name: values.reshape((*values.shape[:-1], *shape))
            for (name, shape), values in zip(self.shapes.items(), vectors, strict=True)
        }


def flat_axes(x: Tensor, axes: int) -> Tensor:
    """Return a tensor with its last axes as one; a new one of length 1 for none.

    Args:
        x: of any shape.
        axes: their number.
    """
    return x.flatten(x.ndim - axes) if axes else x.unsqueeze(-1)


@final
class Diagonal(Covariance):
    """A diagonal Σ = diag(std²).

    ``tensors`` has the standard deviation of every tensor under its name.
    """

    kind = "diagonal"

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from N(0, Σ)."""
        draws = {}
        for name, shape in self.shapes.items():
            std = self.tensors[name]
            draws[name] = std * rng.normal(n, shape, std, rng.fold(seed, name), start)
        return draws

    def mahalanobis(self, deviation: Params) -> Tensor:
        """Return dᵀ Σ⁻¹ d."""
        terms = [
            self.sum(name, (deviation[name] / std).square()) for name, std in self.tensors.items()
        ]
        return torch.stack(terms).sum(0)

    @property
    def log_det(self) -> Tensor:
        """Return log |Σ|."""
        return torch.stack([2 * std.log().sum() for std in self.tensors.values()]).sum()

    def spread(self, rows: Params) -> Tensor:
        """Return R with R·Rᵀ = J·Σ·Jᵀ."""
        return self.to_vector({name: rows[name] * self.tensors[name] for name in self.shapes})

    def variance(self) -> Params:
        """Return the diagonal of Σ."""
        return {name: self.tensors[name].square() for name in self.shapes}

    def product(self, rows: Params) -> Params:
        """Return Σ·a of every row."""
        return {name: rows[name] * self.tensors[name].square() for name in self.shapes}

    def with_rows(self, rows: Params, prior: Params) -> Diagonal:
        """Return the Σ whose precision is the diagonal of Σ⁻¹ + AᵀA.

        It minimizes KL(q ‖ p) to the exact Gaussian p (VD-EKF, Chang et al. 2022).
        """
        stds = {}
        for name, std in self.tensors.items():
            stds[name] = (std**-2 + rows[name].square().sum(0)).rsqrt()
        return Diagonal(self.shapes, stds)

    def forget_rows(self, forget: float, prior: Params) -> Diagonal:
        """Return (λ·Σ⁻¹ + (1 − λ)·P)⁻¹."""
        stds = {}
        for name, std in self.tensors.items():
            stds[name] = (forget * std**-2 + (1 - forget) * prior[name].to(std)).rsqrt()
        return Diagonal(self.shapes, stds)

    def with_independent(self, other: Covariance) -> Diagonal:
        """Return Σ of these tensors and of others that are independent of them."""
        return Diagonal(self.shapes | other.shapes, self.tensors | other.tensors)

    def marginal(self, names: Sequence[str]) -> Diagonal:
        """Return Σ of some of the tensors."""
        return Diagonal({n: self.shapes[n] for n in names}, {n: self.tensors[n] for n in names})


@final
class Full(Covariance):
    """A full Σ = R·Rᵀ over all tensors together.

    ``tensors["root"]`` is R, (D, D), upper triangular.
    """

    kind = "full"
    adds_exactly = True

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from N(0, Σ)."""
        root = self.tensors["root"]
        noise = rng.normal(n, (len(root),), root, rng.fold(seed, "full"), start)
        # one product for each draw, so that its rounding does not depend on n
        return self.from_vector(torch.stack([root @ z for z in noise]) if n else noise)

    def mahalanobis(self, deviation: Params) -> Tensor:
        """Return dᵀ Σ⁻¹ d."""
        d = self.to_vector(deviation).unsqueeze(-1)
        whitened = torch.linalg.solve_triangular(self.tensors["root"], d, upper=True)
        return whitened.square().sum((-2, -1))

    @property
    def log_det(self) -> Tensor:
        """Return log |Σ|."""
        return 2 * self.tensors["root"].diagonal().log().sum()

    def spread(self, rows: Params) -> Tensor:
        """Return R with R·Rᵀ = J·Σ·Jᵀ."""
        return self.to_vector(rows) @ self.tensors["root"]

    def variance(self) -> Params:
        """Return the diagonal of Σ."""
        return self.from_vector(self.tensors["root"].square().sum(-1))

    def product(self, rows: Params) -> Params:
        """Return Σ·a of every row."""
        root = self.tensors["root"]
        return self.from_vector(self.to_vector(rows) @ root @ root.mT)

    def with_rows(self, rows: Params, prior: Params) -> Full:
        """Return (Σ⁻¹ + AᵀA)⁻¹."""
        return Full(self.shapes, {"root": add_rows(self.tensors["root"], self.to_vector(rows))})

    def without_rows(self, rows: Params, prior: Params) -> Full:
        """Return (Σ⁻¹ − AᵀA)⁻¹."""
        root = remove_rows(self.tensors["root"], self.to_vector(rows))
        if prior and exceeds_prior(root, self._spread_prior(prior), PRIOR_TOLERANCE):
            raise ValueError(NOT_CONTAINED)
        return Full(self.shapes, {"root": root})

    def forget_rows(self, forget: float, prior: Params) -> Full:
        """Return (λ·Σ⁻¹ + (1 − λ)·P)⁻¹."""
        root = forget_root(self.tensors["root"], forget, self._spread_prior(prior))
        return Full(self.shapes, {"root": root})

    def with_independent(self, other: Covariance) -> Full:
        """Return Σ of these tensors and of others that are independent of them."""
        root = torch.block_diag(self.tensors["root"], other.tensors["root"])
        return Full(self.shapes | other.shapes, {"root": root})

    def precision(self) -> Tensor:
        """Return Σ⁻¹ in float64: (D, D), the tensors in the order of ``shapes``."""
        root = self.tensors["root"].double()
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=True)
        return inverse.mT @ inverse

    def marginal(self, names: Sequence[str]) -> Full:
        """Return Σ of some of the tensors."""
        root = self.tensors["root"]
        shapes = {name: self.shapes[name] for name in names}
        index = self.from_vector(torch.arange(len(root), device=root.device))
        rows = root.double()[torch.cat([index[name].flatten() for name in names])]
        # upper triangular, R·Rᵀ = Σ
        marginal_root = torch.linalg.cholesky((rows @ rows.mT).flip(0, 1)).flip(0, 1)
        return Full(shapes, {"root": marginal_root.to(root)})
