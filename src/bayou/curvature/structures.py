"""The curvature C = Σ_n J_nᵀ H_n J_n of the data by its structure, and the precision Λ = scale·C +
P.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Diagonal, Full
from bayou.curvature.layers import Layer
from bayou.curvature.sweep import Plan, Sink

Shapes = Mapping[str, torch.Size]
Multipliers = Mapping[str, Tensor]
MAX_FULL_WEIGHTS = 5_000  # weights that a full matrix may be over


class Curvature(ABC):
    """C over named tensors and the precision P of their prior: Λ = scale·C + multiplier·P.

    ``prior``: the precision of every tensor, one number or one for each weight. ``multipliers``
    (one number for each tensor, or what broadcasts to it; of a Kronecker structure, for each input)
    and ``scale`` (one for the data) let an evidence be maximized over the scales of the prior and
    the noise without another pass over the data; gradients flow through ``log_det``. Everything
    here is float64.
    """

    kind: ClassVar[str]

    def __init__(self, shapes: Shapes, tensors: Params, prior: Params) -> None:
        self.shapes, self.tensors = (
            dict(shapes),
            {name: value.double() for name, value in tensors.items()},
        )
        self.prior = {name: prior[name].double() for name in self.shapes}
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 (optional)
        """Compute what depends on neither multipliers nor scale."""

    @abstractmethod
    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """log |Λ|."""

    @abstractmethod
    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Covariance:
        """Λ⁻¹, with the dtype of ``like``."""

    @property
    def ties(self) -> list[list[str]]:
        """Groups of tensors that share one multiplier."""
        return [[name] for name in self.shapes]


class Sum(Sink, ABC):
    """Adds up C over the sweep of the data."""

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        self.shapes, self.plan, self.like = dict(shapes), plan, like

    @abstractmethod
    def tensors(self, factor: float = 1.0) -> Params:
        """The tensors of a ``Curvature``, C multiplied by a factor (all data / data seen)."""

    def zeros(self, *shape: int) -> Tensor:
        """In float64, for the accuracy of a long sum."""
        return torch.zeros(shape, dtype=torch.float64, device=self.like.device)


def definite(value: Tensor) -> None:
    """Raise a ValueError unless a precision is positive."""
    if not bool((value > 0).all()):
        raise ValueError(SINGULAR)


SINGULAR = (
    "the posterior precision is not positive definite: some direction of the weights is determined neither by the data "
    "nor by the prior; give the network a proper Normal prior of moderate scale, such as Normal(1.0)"
)


# --- full ------------------------------------------------------------------------------------------------------------


@final
class FullSum(Sum):
    """C itself, (D, D), by the gradients of every example."""

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        size = sum(shape.numel() for shape in shapes.values())
        self.total, self.rows = self.zeros(size, size), Params()

    def graded(self, layer: Layer, a: Tensor | None, g: Tensor) -> None:
        assert a is not None
        self.rows |= layer.gradients(a, g)

    def others(self, gradients: Params) -> None:
        self.rows |= gradients

    def column(self) -> None:
        rows = len(next(iter(self.rows.values())))
        zero = {
            name: self.like.new_zeros(rows, *s)
            for name, s in self.shapes.items()
            if name not in self.rows
        }
        jacobian = torch.cat(
            [(self.rows | zero)[name].reshape(rows, -1) for name in self.shapes], 1
        ).double()
        self.total += (
            jacobian.mT @ jacobian
        )  # rounded to float32 it could have eigenvalues below −prior precision
        self.rows = {}

    def tensors(self, factor: float = 1.0) -> Params:
        return {"matrix": factor * self.total}


@final
class FullCurvature(Curvature):
    """Λ as a matrix."""

    kind = "full"

    def prepare(self) -> None:
        self.precision = self._per_weight(self.prior)
        self.values: Tensor | None = None

    def _matrix(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        return scale * self.tensors["matrix"] + torch.diag(
            self._per_weight(multipliers) * self.precision
        )

    def _per_weight(self, values: Multipliers) -> Tensor:
        """The value of every weight, the tensors one after another: (D,)."""
        return torch.cat(
            [values[name].expand(shape).reshape(-1) for name, shape in self.shapes.items()]
        )

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        first = next(iter(multipliers.values()))
        if first.numel() == 1 and all(
            value is first for value in multipliers.values()
        ):  # the eigenvalues, once, serve every multiplier
            if self.values is None:
                root = self.precision.rsqrt()
                whitened = root.unsqueeze(1) * self.tensors["matrix"] * root
                self.values = torch.linalg.eigvalsh(whitened).clamp_min(0.0)
            return (scale * self.values + first).log().sum() + self.precision.log().sum()
        return 2 * cholesky(self._matrix(multipliers, scale)).diagonal().log().sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Full:
        lower = cholesky(self._matrix(multipliers, scale))
        eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower, eye, upper=False).mT
        return Full(self.shapes, {"root": root.to(like.dtype)})


def cholesky(matrix: Tensor) -> Tensor:
    """L with L·Lᵀ = the matrix; a ValueError if it is singular."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise ValueError(SINGULAR)
    return lower


# --- diagonal --------------------------------------------------------------------------------------------------------


@final
class DiagonalSum(Sum):
    """The diagonal of C: Σ_n Σ_m (J_nᵀ·s_m)²."""

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        self.totals = {name: self.zeros(*shape) for name, shape in shapes.items()}

    def graded(self, layer: Layer, a: Tensor | None, g: Tensor) -> None:
        assert a is not None
        for name, value in layer.squares(a, g).items():
            self.totals[name] += value

    def others(self, gradients: Params) -> None:
        for name, value in gradients.items():
            self.totals[name] += value.square().sum(0)

    def tensors(self, factor: float = 1.0) -> Params:
        return {name: factor * value for name, value in self.totals.items()}


@final
class DiagonalCurvature(Curvature):
    """Λ = diag(scale·C_ii + P_ii)."""

    kind = "diagonal"

    def _precisions(self, multipliers: Multipliers, scale: Tensor) -> Params:
        return {n: scale * self.tensors[n] + multipliers[n] * self.prior[n] for n in self.shapes}

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        return torch.stack(
            [p.log().sum() for p in self._precisions(multipliers, scale).values()]
        ).sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Diagonal:
        precisions = self._precisions(multipliers, scale)
        for value in precisions.values():
            definite(value)
        return Diagonal(
            self.shapes, {name: value.rsqrt().to(like.dtype) for name, value in precisions.items()}
        )
