"""The curvature C = Σ_n J_nᵀ H_n J_n of the data by its structure, and Λ = scale·C + P."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Diagonal, Full
from bayou.curvature.layers import LayerCall
from bayou.curvature.sweep import Plan, Shapes, Sum

Multipliers = Mapping[str, Tensor]
MAX_FULL_WEIGHTS = 5_000  # weights that a full matrix may be over


class Curvature(ABC):
    """The precision Λ = scale·C + multiplier·P of a posterior, with the precision P of the prior.

    ``multipliers`` (one number for each tensor, or what broadcasts to it; of a Kronecker structure,
    for each input) and ``scale`` (one for the data) let an evidence be maximized over the scales of
    the prior and the noise without another pass over the data; gradients flow through ``log_det``.
    Everything here is float64.

    Args:
        shapes: of the named tensors.
        tensors: C, by the names that the class defines.
        prior: the precision of every tensor, one number or one for each weight.
    """

    kind: ClassVar[str]

    def __init__(self, shapes: Shapes, tensors: Params, prior: Params) -> None:
        self.shapes = dict(shapes)
        self.tensors = {name: value.double() for name, value in tensors.items()}
        self.prior = {name: prior[name].double() for name in self.shapes}
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 (optional)
        """Compute what depends on neither multipliers nor scale."""

    @abstractmethod
    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return log |Λ|.

        Args:
            multipliers: of the prior precision of every tensor.
            scale: of C.
        """

    @abstractmethod
    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Covariance:
        """Return Λ⁻¹.

        Args:
            multipliers: of the prior precision of every tensor.
            scale: of C.
            like: a tensor of the dtype.
        """

    @property
    def ties(self) -> list[list[str]]:
        """Return groups of tensors that share one multiplier."""
        return [[name] for name in self.shapes]


def check_definite(value: Tensor) -> None:
    """Raise a ValueError unless a precision is positive.

    Args:
        value: eigenvalues or a diagonal.
    """
    if not bool((value > 0).all()):
        raise ValueError(SINGULAR)


SINGULAR = (
    "the posterior precision is not positive definite: some direction of the weights is "
    "determined neither by the data nor by the prior; "
    "give the network a proper Normal prior of moderate scale, such as Normal(1.0)"
)


@final
class FullSum(Sum):
    """The matrix C itself, (D, D), by the gradients of every example.

    Args:
        shapes: of the named tensors.
        plan: how their gradients are computed.
        like: a tensor of the network.
    """

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        size = sum(shape.numel() for shape in shapes.values())
        self.total = self.zeros(size, size)
        self.gradients = Params()  # of the current column, (rows, *shape) each

    def receive_gradient(self, layer: LayerCall, a: Tensor, g: Tensor) -> None:
        """Compute the gradients of every example."""
        self.gradients |= layer.gradients(a, g)

    def receive_row_gradients(self, gradients: Params) -> None:
        """Keep the gradients of every example."""
        self.gradients |= gradients

    def finish_column(self) -> None:
        """Add the products of the gradients of a column.

        Rounded to float32 the sum could have eigenvalues below −prior precision.
        """
        rows = len(next(iter(self.gradients.values())))
        columns = []
        for name, shape in self.shapes.items():
            gradient = self.gradients.get(name)
            if gradient is None:
                gradient = self.like.new_zeros(rows, *shape)
            columns.append(gradient.reshape(rows, -1))
        jacobian = torch.cat(columns, 1).double()
        self.total += jacobian.mT @ jacobian
        self.gradients = {}

    def tensors(self, factor: float = 1.0) -> Params:
        """Return C as "matrix"."""
        return {"matrix": factor * self.total}


@final
class FullCurvature(Curvature):
    """The precision Λ as a matrix."""

    kind = "full"

    def prepare(self) -> None:
        """Compute the prior precision of every weight."""
        self.precision = self._per_weight(self.prior)
        self.eigenvalues: Tensor | None = None  # of P^−½·C·P^−½

    def _matrix(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return Λ."""
        precision = self._per_weight(multipliers) * self.precision
        return scale * self.tensors["matrix"] + torch.diag(precision)

    def _per_weight(self, values: Multipliers) -> Tensor:
        """Return the value of every weight, the tensors one after another: (D,)."""
        vectors = [values[name].expand(shape).reshape(-1) for name, shape in self.shapes.items()]
        return torch.cat(vectors)

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return log |Λ|; for one multiplier of all tensors by eigenvalues that are kept."""
        first = next(iter(multipliers.values()))
        if first.numel() == 1 and all(value is first for value in multipliers.values()):
            if self.eigenvalues is None:
                root = self.precision.rsqrt()
                whitened = root.unsqueeze(1) * self.tensors["matrix"] * root
                self.eigenvalues = torch.linalg.eigvalsh(whitened).clamp_min(0.0)
            log_det = (scale * self.eigenvalues + first).log().sum()
            return log_det + self.precision.log().sum()
        return 2 * cholesky(self._matrix(multipliers, scale)).diagonal().log().sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Full:
        """Return Λ⁻¹."""
        lower = cholesky(self._matrix(multipliers, scale))
        eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower, eye, upper=False).mT
        return Full(self.shapes, {"root": root.to(like.dtype)})


def cholesky(matrix: Tensor) -> Tensor:
    """Return L with L·Lᵀ = the matrix; raise a ValueError if it is singular.

    Args:
        matrix: (D, D).
    """
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise ValueError(SINGULAR)
    return lower


@final
class DiagonalSum(Sum):
    """The diagonal of C: Σ_n Σ_m (J_nᵀ·s_m)².

    Args:
        shapes: of the named tensors.
        plan: how their gradients are computed.
        like: a tensor of the network.
    """

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        self.totals = {name: self.zeros(*shape) for name, shape in shapes.items()}

    def receive_gradient(self, layer: LayerCall, a: Tensor, g: Tensor) -> None:
        """Add the squares of the gradients of every example."""
        for name, value in layer.squares(a, g).items():
            self.totals[name] += value

    def receive_row_gradients(self, gradients: Params) -> None:
        """Add the squares of the gradients of every example."""
        for name, value in gradients.items():
            self.totals[name] += value.square().sum(0)

    def tensors(self, factor: float = 1.0) -> Params:
        """Return the diagonal of C."""
        return {name: factor * value for name, value in self.totals.items()}


@final
class DiagonalCurvature(Curvature):
    """The diagonal precision Λ = diag(scale·C_ii + P_ii)."""

    kind = "diagonal"

    def _precisions(self, multipliers: Multipliers, scale: Tensor) -> Params:
        """Return the diagonal of Λ."""
        return {n: scale * self.tensors[n] + multipliers[n] * self.prior[n] for n in self.shapes}

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return log |Λ|."""
        precisions = self._precisions(multipliers, scale).values()
        return torch.stack([precision.log().sum() for precision in precisions]).sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Diagonal:
        """Return Λ⁻¹."""
        precisions = self._precisions(multipliers, scale)
        for value in precisions.values():
            check_definite(value)
        stds = {name: value.rsqrt().to(like.dtype) for name, value in precisions.items()}
        return Diagonal(self.shapes, stds)
