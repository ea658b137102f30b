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
TRIANGULAR_BLOCK = 256  # sides of triangular matrices that are inverted at once


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
        self.shapes: dict[str, torch.Size] = dict(shapes)
        self.tensors: dict[str, Tensor] = {name: value.double() for name, value in tensors.items()}
        self.prior: dict[str, Tensor] = {name: prior[name].double() for name in self.shapes}
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


class RowGradients:
    """The gradients of every example in all tensors, for one column of H.

    Args:
        shapes: of the named tensors.
        like: a tensor of the network.
    """

    def __init__(self, shapes: Shapes, like: Tensor) -> None:
        self.shapes = shapes
        self.like = like
        self.gradients: dict[str, Tensor] = Params()  # (rows, *shape) each

    def add(self, gradients: Params) -> None:
        """Keep the gradients of some tensors.

        Args:
            gradients: (rows, *shape) each.
        """
        self.gradients |= gradients

    def take(self) -> Tensor:
        """Return the gradients of all tensors, (rows, D) in float64, and forget them."""
        rows = len(next(iter(self.gradients.values())))
        columns = []
        for name, shape in self.shapes.items():
            gradient = self.gradients.get(name)
            if gradient is None:
                gradient = self.like.new_zeros(rows, *shape)
            columns.append(gradient.reshape(rows, -1))
        self.gradients = {}
        return torch.cat(columns, 1).double()


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
        self.total: Tensor = self.zeros(size, size)
        self.gradients: RowGradients = RowGradients(shapes, like)

    def receive_gradient(self, layer: LayerCall, a: Tensor, g: Tensor) -> None:
        """Compute the gradients of every example."""
        self.gradients.add(layer.gradients(a, g))

    def receive_row_gradients(self, gradients: Params) -> None:
        """Keep the gradients of every example."""
        self.gradients.add(gradients)

    def finish_column(self) -> None:
        """Add the products of the gradients of a column.

        Rounded to float32 the sum could have eigenvalues below −prior precision.
        """
        jacobian = self.gradients.take()
        self.total += jacobian.mT @ jacobian

    def tensors(self, factor: float = 1.0) -> Params:
        """Return C as "matrix"."""
        return {"matrix": factor * self.total}


def per_weight(values: Multipliers, shapes: Shapes) -> Tensor:
    """Return the value of every weight, the tensors one after another: (D,).

    Args:
        values: of every tensor, one number or what broadcasts to it.
        shapes: of the tensors.
    """
    vectors = [values[name].expand(shape).reshape(-1) for name, shape in shapes.items()]
    return torch.cat(vectors)


def common_multiplier(multipliers: Multipliers) -> Tensor | None:
    """Return the one multiplier of all tensors; None if they have several.

    Args:
        multipliers: by tensor.
    """
    first = next(iter(multipliers.values()))
    if first.numel() > 1:
        return None
    if all(value is first for value in multipliers.values()):
        return first
    if any(value.requires_grad or value.numel() > 1 for value in multipliers.values()):
        return None
    return first if all(bool(value == first) for value in multipliers.values()) else None


@final
class FullCurvature(Curvature):
    """The precision Λ as a matrix."""

    kind = "full"

    def prepare(self) -> None:
        """Compute the prior precision of every weight."""
        self.precision: Tensor = per_weight(self.prior, self.shapes)
        self.eigenvalues: Tensor | None = None  # of P^−½·C·P^−½
        self._last: tuple[Tensor, Tensor, Tensor] | None = None  # precision, scale, Cholesky factor

    def _cholesky(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return L with L·Lᵀ = Λ; that of the last call is kept."""
        precision = per_weight(multipliers, self.shapes) * self.precision
        if precision.requires_grad or scale.requires_grad:
            return cholesky(scale * self.tensors["matrix"] + torch.diag(precision))
        if self._last is not None:
            last_precision, last_scale, lower = self._last
            if torch.equal(last_scale, scale) and torch.equal(last_precision, precision):
                return lower
        matrix = scale * self.tensors["matrix"]
        matrix.diagonal().add_(precision)
        lower = cholesky(matrix)
        self._last = (precision, scale, lower)
        return lower

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return log |Λ|; where one multiplier is learned, by eigenvalues that are kept."""
        common = common_multiplier(multipliers)
        needs_gradient = any(value.requires_grad for value in (*multipliers.values(), scale))
        if common is not None and (needs_gradient or self.eigenvalues is not None):
            if self.eigenvalues is None:
                root = self.precision.rsqrt()
                whitened = root.unsqueeze(1) * self.tensors["matrix"] * root
                self.eigenvalues = torch.linalg.eigvalsh(whitened).clamp_min(0.0)
            log_det = (scale * self.eigenvalues + common).log().sum()
            return log_det + self.precision.log().sum()
        return 2 * self._cholesky(multipliers, scale).diagonal().log().sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Full:
        """Return Λ⁻¹."""
        root = invert_triangular(self._cholesky(multipliers, scale)).mT
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


def invert_triangular(lower: Tensor) -> Tensor:
    """Return L⁻¹ of a lower triangular matrix, by halves: D³/3 operations in place of D³.

    Args:
        lower: L, (D, D).
    """
    size = len(lower)
    if size <= TRIANGULAR_BLOCK:
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, eye, upper=False)
    half = size // 2
    inverse = torch.zeros_like(lower)
    inverse[:half, :half] = invert_triangular(lower[:half, :half])
    inverse[half:, half:] = invert_triangular(lower[half:, half:])
    inverse[half:, :half] = -inverse[half:, half:] @ (lower[half:, :half] @ inverse[:half, :half])
    return inverse


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
        self.totals: dict[str, Tensor] = {
            name: self.zeros(*shape) for name, shape in shapes.items()
        }

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
