"""N(0, Σ) over named tensors, by the structure of Σ: the posteriors of Laplace and SWAG."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from bayou import rng
from bayou.constants import LOG_2PI
from bayou.params import Params


class Covariance(ABC):
    """Σ of a Gaussian over tensors of known shapes, made of ``tensors`` alone, so that a file can
    hold it.
    """

    kind: ClassVar[str]

    def __init__(self, shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        # Contiguous, as in a file: the rounding of products depends on the memory layout.
        self.tensors = {name: value.detach().contiguous() for name, value in tensors.items()}

    @property
    def size(self) -> int:
        """D, the number of entries of all tensors."""
        return sum(shape.numel() for shape in self.shapes.values())

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws start .. start + n − 1 from N(0, Σ), (n, *shape) each; with an int seed, draw i
        depends on it alone.
        """

    @abstractmethod
    def mahalanobis(self, deviation: Params) -> Tensor:
        """dᵀ Σ⁻¹ d for tensors (..., *shape): (...)."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """log |Σ|."""

    @abstractmethod
    def spread(self, rows: Params) -> Tensor:
        """R with R·Rᵀ = J·Σ·Jᵀ for rows J of a Jacobian, tensors (..., *shape): (..., a number of
        columns).
        """

    @abstractmethod
    def variance(self) -> Params:
        """The diagonal of Σ, (*shape) of every tensor."""

    def marginal(self, names: Sequence[str]) -> Covariance:
        """Σ of some of the tensors, in this order; a ValueError if it does not have this
        structure.
        """
        raise ValueError(
            f"a {self.kind} covariance over {', '.join(self.shapes)} has no part over {', '.join(names)} of its kind; "
            "use Laplace('full'), Laplace('kronecker'), or VI with MeanField or LowRank"
        )

    def beside(self, other: Covariance) -> Covariance:
        """Σ of these tensors and of others that are independent of them, of the same kind."""
        raise ValueError(f"a {self.kind} covariance is not made of independent parts")

    def log_prob(self, deviation: Params) -> Tensor:
        """log N(d; 0, Σ) = −½·(dᵀ Σ⁻¹ d + log |Σ| + D·log 2π)."""
        return -0.5 * (self.mahalanobis(deviation) + self.log_det + self.size * LOG_2PI)

    def sum(self, name: str, value: Tensor) -> Tensor:
        """The sum over the axes of one tensor: (..., *shape) to (...)."""
        return flat_axes(value, len(self.shapes[name])).sum(-1)

    def flat(self, params: Params) -> Tensor:
        """All tensors one after another: (..., *shape) to (..., D)."""
        return torch.cat(
            [flat_axes(params[name], len(shape)) for name, shape in self.shapes.items()], -1
        )

    def named(self, vector: Tensor) -> Params:
        """The inverse of ``flat``: (..., D) to tensors (..., *shape)."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            name: part.reshape((*part.shape[:-1], *shape))
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def flat_axes(x: Tensor, axes: int) -> Tensor:
    """The last ``axes`` axes as one; a new one of length 1 for none."""
    return x.flatten(x.ndim - axes) if axes else x.unsqueeze(-1)


@final
class Diagonal(Covariance):
    """Σ = diag(std²); ``tensors`` has the standard deviation of every tensor under its name."""

    kind = "diagonal"

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        return {
            name: std * rng.normal(n, shape, std, rng.fold(seed, name), start)
            for name, shape in self.shapes.items()
            for std in (self.tensors[name],)
        }

    def mahalanobis(self, deviation: Params) -> Tensor:
        parts = [
            self.sum(name, (deviation[name] / std).square()) for name, std in self.tensors.items()
        ]
        return torch.stack(parts).sum(0)

    @property
    def log_det(self) -> Tensor:
        return torch.stack([2 * std.log().sum() for std in self.tensors.values()]).sum()

    def spread(self, rows: Params) -> Tensor:
        return self.flat({name: rows[name] * self.tensors[name] for name in self.shapes})

    def variance(self) -> Params:
        return {name: self.tensors[name].square() for name in self.shapes}

    def beside(self, other: Covariance) -> Diagonal:
        return Diagonal(self.shapes | other.shapes, self.tensors | other.tensors)

    def marginal(self, names: Sequence[str]) -> Diagonal:
        return Diagonal({n: self.shapes[n] for n in names}, {n: self.tensors[n] for n in names})


@final
class Full(Covariance):
    """Σ = R·Rᵀ over all tensors together; ``tensors["root"]`` is R, (D, D), upper triangular."""

    kind = "full"

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        root = self.tensors["root"]
        noise = rng.normal(n, (len(root),), root, rng.fold(seed, "full"), start)
        # one product for each draw, so that its rounding does not depend on n
        return self.named(torch.stack([root @ z for z in noise]) if n else noise)

    def mahalanobis(self, deviation: Params) -> Tensor:
        d = self.flat(deviation).unsqueeze(-1)
        return (
            torch.linalg.solve_triangular(self.tensors["root"], d, upper=True)
            .square()
            .sum((-2, -1))
        )

    @property
    def log_det(self) -> Tensor:
        return 2 * self.tensors["root"].diagonal().log().sum()

    def spread(self, rows: Params) -> Tensor:
        return self.flat(rows) @ self.tensors["root"]

    def variance(self) -> Params:
        return self.named(self.tensors["root"].square().sum(-1))

    def beside(self, other: Covariance) -> Full:
        root = torch.block_diag(self.tensors["root"], other.tensors["root"])
        return Full(self.shapes | other.shapes, {"root": root})

    def precision(self) -> Tensor:
        """Σ⁻¹ in float64: (D, D), the tensors in the order of ``shapes``."""
        root = self.tensors["root"].double()
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=True)
        return inverse.mT @ inverse

    def marginal(self, names: Sequence[str]) -> Full:
        root, shapes = self.tensors["root"], {name: self.shapes[name] for name in names}
        places = self.named(torch.arange(len(root), device=root.device))
        rows = root.double()[torch.cat([places[name].flatten() for name in names])]
        flipped = torch.linalg.cholesky((rows @ rows.mT).flip(0, 1)).flip(
            0, 1
        )  # upper triangular, R·Rᵀ = Σ
        return Full(shapes, {"root": flipped.to(root)})
