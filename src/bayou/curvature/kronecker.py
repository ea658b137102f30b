"""Kronecker-factored curvature: C ≈ A ⊗ G by layer (Martens & Grosse 2015, Ritter et al. 2018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Full, flat_axes
from bayou.curvature.kronecker_updates import add_rows_to_product, factors_of
from bayou.curvature.layers import AffineCall, LayerCall
from bayou.curvature.rank_updates import MAX_DENSE_WEIGHTS
from bayou.curvature.structures import Curvature, DiagonalSum, Multipliers, check_definite
from bayou.curvature.sweep import Plan, Shapes, Sum

SEPARATOR = "|"  # between the parts of a tensor's name in files: "in|fc.weight|fc.bias"
MAX_FACTOR = 16_384  # sides of a factor: 2 GiB, and minutes for its eigenvectors on a GPU


def block_names(shapes: Shapes, tensors: Params) -> list[list[str]]:
    """Return the tensors of every block, weight and bias of a layer or one of them.

    Args:
        shapes: of all tensors; blocks are in their order.
        tensors: of a Kronecker curvature or covariance.
    """
    blocks = [name.split(SEPARATOR)[1:] for name in tensors if name.startswith(f"in{SEPARATOR}")]
    return sorted(blocks, key=lambda names: list(shapes).index(names[0]))


def key(factor: str, names: list[str]) -> str:
    """Return the name of a factor of a block.

    Args:
        factor: "in", "out", "std", "root" or "square".
        names: the tensors of the block.
    """
    return SEPARATOR.join((factor, *names))


def to_blocks(shapes: Shapes, names: list[str], groups: int, params: Params) -> Tensor:
    """Return the tensors of a block as matrices (..., groups, O, I).

    Args:
        shapes: of all tensors.
        names: the tensors of the block; the bias is the last column.
        groups: of a convolution, else 1.
        params: tensors (..., *shape).
    """
    matrices = []
    for name in names:
        flat = flat_axes(params[name], len(shapes[name]))
        batch_shape = flat.shape[:-1]
        outputs = shapes[name][0]
        matrices.append(flat.reshape(*batch_shape, groups, outputs // groups, -1))
    return torch.cat(matrices, -1)


def from_blocks(shapes: Shapes, names: list[str], matrix: Tensor) -> Params:
    """Return the tensors of a matrix, the inverse of ``to_blocks``.

    Args:
        shapes: of all tensors.
        names: the tensors of the block.
        matrix: (..., groups, O, I).
    """
    batch_shape = matrix.shape[:-3]
    widths = [shapes[name].numel() // shapes[name][0] for name in names]
    columns = matrix.split(widths, -1)
    return {
        name: values.reshape(*batch_shape, *shapes[name])
        for name, values in zip(names, columns, strict=True)
    }


def largest_side(layer: LayerCall) -> int:
    """Return the larger one of the numbers of inputs and outputs.

    Args:
        layer: has the shapes.
    """
    return max(max(shape[0], shape.numel() // shape[0]) for shape in layer.shapes.values())


@final
class KroneckerSum(Sum):
    """The factors A = Σ a·aᵀ and G = Σ g·gᵀ of every layer, over examples and positions.

    C_layer = A ⊗ G / R for R examples times positions: exact for one linear layer with a Gaussian y
    or for one example, and else as if inputs and output gradients were independent, position by
    position ("expand", Eschenhagen 2023). Tensors elsewhere or too wide have squares.

    Args:
        shapes: of the tensors.
        plan: how their gradients are computed.
        like: a tensor of the network.
    """

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        self.layers: dict[AffineCall, AffineCall] = {
            layer: layer
            for layer in plan.layers.values()
            if isinstance(layer, AffineCall) and largest_side(layer) <= MAX_FACTOR
        }
        in_blocks = {name for layer in self.layers for name in layer.shapes}
        rest = {name: shape for name, shape in shapes.items() if name not in in_blocks}
        self.rest: DiagonalSum = DiagonalSum(rest, plan, like)
        self.inputs: dict[LayerCall, Tensor] = {}
        self.outputs: dict[LayerCall, Tensor] = {}
        self.positions: Counter[LayerCall] = Counter()

    def receive_input(self, layer: LayerCall, a: Tensor) -> Tensor:
        """Add to the factor A of a layer, whose gradients then need no input."""
        if layer not in self.layers:
            return a
        _add(self.inputs, layer, self.layers[layer].input_factor(a))
        self.positions[layer] += a.shape[0] * a.shape[2]
        return a.new_empty(0)

    def receive_gradient(self, layer: LayerCall, a: Tensor, g: Tensor) -> None:
        """Add to the factor G of a layer, or to the squares of other layers."""
        if layer not in self.layers:
            self.rest.receive_gradient(layer, a, g)
            return
        _add(self.outputs, layer, self.layers[layer].output_factor(g))

    def receive_information(self, layer: LayerCall, total: Tensor) -> bool:
        """Add Σ_n H_n to the factor G of a layer: Σ g·gᵀ over all columns of H."""
        if layer not in self.layers:
            return False
        _add(self.outputs, layer, total.unsqueeze(0))
        return True

    def receive_row_gradients(self, gradients: Params) -> None:
        """Add to the squares of tensors without a layer."""
        self.rest.receive_row_gradients(gradients)

    def tensors(self, factor: float = 1.0) -> Params:
        """Return A and G of every layer, and squares.

        Args:
            factor: multiplies C; 1 by default.
        """
        squares = self.rest.tensors(factor)
        tensors = {f"square{SEPARATOR}{name}": value for name, value in squares.items()}
        for layer in self.layers:
            names = list(layer.shapes)
            size = next(iter(layer.shapes.values()))[0] // layer.groups
            g = self.outputs.get(layer, self.zeros(layer.groups, size, size))
            tensors[key("in", names)] = self.inputs[layer] / max(1, self.positions[layer])
            tensors[key("out", names)] = factor * g
        return tensors


def _add(totals: dict[LayerCall, Tensor], layer: LayerCall, factor: Tensor) -> None:
    """Add a factor to that of a layer, in float64."""
    if layer in totals:
        totals[layer] += factor.double()
    else:
        totals[layer] = factor.double()


class Eigenbasis(NamedTuple):
    """The eigenvalues and eigenvectors of the factors of a layer."""

    root: Tensor  # D^{−½}, (I,)
    s: Tensor  # (groups, I)
    q: Tensor  # (groups, I, I)
    t: Tensor  # (groups, O)
    v: Tensor  # (groups, O, O)


@final
class KroneckerCurvature(Curvature):
    """Λ = scale·A ⊗ G + D ⊗ 1 for every layer, with D the prior precision of the columns.

    With D^{−½}·A·D^{−½} = Q·s·Qᵀ and G = V·t·Vᵀ, Λ = (D^½Q ⊗ V)·(scale·s ⊗ t + multiplier)·(...)ᵀ:
    the prior is added exactly, even if weight and bias (the last column), or the inputs of a layer,
    have different ones. They share one multiplier; separate multipliers of the inputs become part
    of D, and Q and s are computed again. A prior precision that differs by output has no such form
    and is an error. Other tensors have a diagonal Λ.
    """

    kind = "kronecker"

    def prepare(self) -> None:
        """Decompose the factors of every layer."""
        self.blocks: list[list[str]] = block_names(self.shapes, self.tensors)
        self.rest: list[str] = [
            name for name in self.shapes if f"square{SEPARATOR}{name}" in self.tensors
        ]
        self.bases: list[Any] = []
        for names in self.blocks:
            t, v = torch.linalg.eigh(self.tensors[key("out", names)])
            inputs = self._decompose_inputs(names, self.prior)
            self.bases.append(Eigenbasis(*inputs, t.clamp_min(0.0), v))

    @property
    def ties(self) -> list[list[str]]:
        """Return groups of tensors that share one multiplier."""
        return [*self.blocks, *([name] for name in self.rest)]

    def _decompose_inputs(
        self, names: list[str], precision: Params
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return D^{−½} (I,), s (groups, I) and Q (groups, I, I) for these prior precisions."""
        columns = []
        for name in names:
            rows = precision[name].expand(self.shapes[name]).reshape(self.shapes[name][0], -1)
            if not bool((rows == rows[0]).all()):
                raise ValueError(
                    "a Kronecker-factored posterior needs one prior scale for all of "
                    f"{name!r}, or one for each of its "
                    "inputs, and it has others; use structure='diagonal' or 'full'"
                )
            columns.append(rows[0])
        root = torch.cat(columns).rsqrt()
        s, q = torch.linalg.eigh(root.unsqueeze(1) * self.tensors[key("in", names)] * root)
        return root, s.clamp_min(0.0), q

    def _decompose(
        self, number: int, multipliers: Multipliers, scale: Tensor
    ) -> tuple[Eigenbasis, Tensor]:
        """Return the basis of a layer, and the eigenvalues of D^−½·Λ·D^−½, (groups, O, I)."""
        names = self.blocks[number]
        basis = self.bases[number]
        prior = multipliers[names[0]]
        if any(multipliers[name].numel() > 1 for name in names):
            precision = {name: multipliers[name] * self.prior[name] for name in names}
            basis = Eigenbasis(*self._decompose_inputs(names, precision), basis.t, basis.v)
            prior = torch.ones_like(scale)
        return basis, scale * basis.t.unsqueeze(-1) * basis.s.unsqueeze(-2) + prior

    def _diagonal(self, name: str, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return the diagonal Λ of a tensor without a layer."""
        squares = self.tensors[f"square{SEPARATOR}{name}"]
        return scale * squares + multipliers[name] * self.prior[name]

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        """Return log |Λ|."""
        log_dets = [self._diagonal(name, multipliers, scale).log().sum() for name in self.rest]
        for number in range(len(self.blocks)):
            basis, values = self._decompose(number, multipliers, scale)
            log_dets.append(values.log().sum() - 2 * basis.t.numel() * basis.root.log().sum())
        return torch.stack(log_dets).sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Kronecker:
        """Return Λ⁻¹."""
        tensors = {}
        for name in self.rest:
            precision = self._diagonal(name, multipliers, scale)
            check_definite(precision)
            tensors[f"std{SEPARATOR}{name}"] = precision.rsqrt().expand(self.shapes[name])
        for number, names in enumerate(self.blocks):
            basis, values = self._decompose(number, multipliers, scale)
            check_definite(values)
            tensors |= {
                key("root", names): basis.root,
                key("in", names): basis.q,
                key("out", names): basis.v,
                key("std", names): values.rsqrt(),
            }
        cast = {name: value.to(like.dtype) for name, value in tensors.items()}
        return Kronecker(self.shapes, cast)


class _Block(NamedTuple):
    """The tensors of one layer in a ``Kronecker``."""

    names: list[str]
    root: Tensor
    q: Tensor
    v: Tensor
    std: Tensor


@final
class Kronecker(Covariance):
    """Σ of every layer from W = V·(std ⊙ Z)·(root ⊙ Q)ᵀ, Z standard normal; std of the others.

    ``tensors``: "in|..." Q (groups, I, I), "out|..." V (groups, O, O), "std|..." (groups, O, I) and
    "root|..." (I,) for a layer's weight and bias, whose names follow; "std|name" for a tensor by
    itself.
    """

    kind = "kronecker"

    @property
    def adds_exactly(self) -> bool:  # type: ignore[override]
        """Whether updates make a matrix of it: one layer of up to 1,000 weights."""
        names = [name for block in self._blocks() for name in block.names]
        blocks = sum(1 for _ in self._blocks())
        return blocks == 1 and {*names} == {*self.shapes} and self.size <= MAX_DENSE_WEIGHTS

    def _blocks(self) -> Iterator[_Block]:
        """Yield the tensors of every layer."""
        for names in block_names(self.shapes, self.tensors):
            yield _Block(
                names,
                self.tensors[key("root", names)],
                self.tensors[key("in", names)],
                self.tensors[key("out", names)],
                self.tensors[key("std", names)],
            )

    def _diagonal_stds(self) -> dict[str, Tensor]:
        """Return the standard deviations of tensors without a layer."""
        in_blocks = {name for block in self._blocks() for name in block.names}
        return {
            name: self.tensors[f"std{SEPARATOR}{name}"]
            for name in self.shapes
            if name not in in_blocks
        }

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from N(0, Σ)."""
        draws = {}
        for name, std in self._diagonal_stds().items():
            draws[name] = std * rng.normal(n, std.shape, std, rng.fold(seed, name), start)
        for names, root, q, v, std in self._blocks():
            noise = std * rng.normal(n, std.shape, std, rng.fold(seed, *names), start)
            # one product for each draw, so that its rounding does not depend on n
            matrices = torch.stack([v @ z @ q.mT * root for z in noise]) if n else noise
            draws |= from_blocks(self.shapes, names, matrices)
        return {name: draws[name] for name in self.shapes}

    def mahalanobis(self, deviation: Params) -> Tensor:
        """Return dᵀ Σ⁻¹ d."""
        terms = [
            self.sum(name, (deviation[name] / std).square())
            for name, std in self._diagonal_stds().items()
        ]
        for names, root, q, v, std in self._blocks():
            d = to_blocks(self.shapes, names, len(q), deviation) / root
            terms.append((v.mT @ d @ q / std).square().sum((-3, -2, -1)))
        return torch.stack(terms).sum(0)

    @property
    def log_det(self) -> Tensor:
        """Return log |Σ|."""
        log_stds = [std.log().sum() for std in self._diagonal_stds().values()]
        for _, root, _, v, std in self._blocks():
            log_stds.append(std.log().sum() + len(v) * v.shape[-1] * root.log().sum())
        return 2 * torch.stack(log_stds).sum()

    def spread(self, rows: Params) -> Tensor:
        """Return R with R·Rᵀ = J·Σ·Jᵀ."""
        columns = [
            flat_axes(rows[name] * std, std.ndim) for name, std in self._diagonal_stds().items()
        ]
        for names, root, q, v, std in self._blocks():
            j = to_blocks(self.shapes, names, len(q), rows) * root
            columns.append((v.mT @ j @ q * std).flatten(-3))
        return torch.cat(columns, -1)

    def product(self, rows: Params) -> Params:
        """Return Σ·a of every row."""
        products = {name: rows[name] * std.square() for name, std in self._diagonal_stds().items()}
        for names, root, q, v, std in self._blocks():
            j = to_blocks(self.shapes, names, len(q), rows) * root
            matrix = v @ (v.mT @ j @ q * std.square()) @ q.mT * root
            products |= from_blocks(self.shapes, names, matrix)
        return products

    def with_rows(self, rows: Params, prior: Params) -> Covariance:
        """Return (Σ⁻¹ + AᵀA)⁻¹ as a matrix for one small layer, or the Σ of this structure near it.

        The precision of a layer is that of its prior and the Kronecker product nearest to the
        curvature before and that of the rows; other tensors have a diagonal.

        Args:
            rows: A, M rows, tensors (M, *shape).
            prior: the precision of the prior of every tensor.

        Raises:
            ValueError: without the precision of the prior.
        """
        if self.adds_exactly:
            return self._full().with_rows(rows, prior)
        if not prior:
            raise ValueError(
                "a Kronecker-factored covariance with a joint prior of earlier tasks cannot be "
                "updated; continue with bayou.continual, or use Laplace('full', where='last')"
            )
        tensors = {}
        for name, std in self._diagonal_stds().items():
            precision = std**-2 + rows[name].square().sum(0)
            tensors[f"std{SEPARATOR}{name}"] = precision.rsqrt()
        for names, root, q, v, std in self._blocks():
            multiplier = _multiplier(names, root, prior)
            a, g = factors_of(root, q, v, std, multiplier)
            a, g = add_rows_to_product(a, g, to_blocks(self.shapes, names, len(q), rows))
            s, new_q = torch.linalg.eigh(root.unsqueeze(1) * a * root)
            t, new_v = torch.linalg.eigh(g)
            products = t.clamp_min(0.0).unsqueeze(-1) * s.clamp_min(0.0).unsqueeze(-2)
            tensors |= {
                key("root", names): root,
                key("in", names): new_q,
                key("out", names): new_v,
                key("std", names): (products + multiplier).rsqrt(),
            }
        return Kronecker(self.shapes, tensors)

    def _full(self) -> Full:
        """Return the same Σ as a matrix."""
        eye = torch.eye(
            self.size, dtype=torch.float64, device=next(iter(self.tensors.values())).device
        )
        columns = self.spread(self.from_vector(eye))  # Σ = columns·columnsᵀ
        _, upper = torch.linalg.qr(columns.flip(0).mT)
        upper = upper * upper.diagonal().sign().unsqueeze(1)
        return Full(self.shapes, {"root": upper.mT.flip(0, 1)})

    def forget_rows(self, forget: float, prior: Params) -> Kronecker:
        """Return (λ·Σ⁻¹ + (1 − λ)·P)⁻¹."""
        tensors = dict(self.tensors)
        for name, std in self._diagonal_stds().items():
            precision = forget * std**-2 + (1 - forget) * prior[name].to(std)
            tensors[f"std{SEPARATOR}{name}"] = precision.rsqrt()
        for names, root, _, _, std in self._blocks():
            multiplier = _multiplier(names, root, prior)
            precision = forget * std**-2 + (1 - forget) * multiplier
            tensors[key("std", names)] = precision.rsqrt()
        return Kronecker(self.shapes, tensors)

    def with_independent(self, other: Covariance) -> Kronecker:
        """Return Σ of these tensors and of others that are independent of them."""
        return Kronecker(self.shapes | other.shapes, self.tensors | other.tensors)

    def marginal(self, names: Sequence[str]) -> Kronecker:
        """Return Σ of some tensors: layers are independent; weight and bias of a layer are not."""
        tensors = {
            name: value
            for name, value in self.tensors.items()
            if set(name.split(SEPARATOR)[1:]) <= set(names)
        }
        if set(names) != {name for block in tensors for name in block.split(SEPARATOR)[1:]}:
            return super().marginal(names)  # type: ignore[return-value]
        return Kronecker({name: self.shapes[name] for name in names}, tensors)

    def variance(self) -> Params:
        """Return the diagonal of Σ."""
        variances = {name: std.square() for name, std in self._diagonal_stds().items()}
        for names, root, q, v, std in self._blocks():
            matrix = v.square() @ std.square() @ q.square().mT * root.square()
            tensors = from_blocks(self.shapes, names, matrix.unsqueeze(0))
            variances |= {name: value[0] for name, value in tensors.items()}
        return {name: variances[name] for name in self.shapes}


def _multiplier(names: list[str], root: Tensor, prior: Params) -> Tensor:
    """Return the factor of root^−2 with which it is the prior precision of every input, ()."""
    return prior[names[0]].to(root).reshape(-1)[0] * root[0].square()
