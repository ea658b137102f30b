"""Kronecker-factored curvature: layer by layer C ≈ A ⊗ G (Martens & Grosse 2015, Ritter et al.
2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from bayou import rng
from bayou.curvature.covariance import Covariance, flat_axes
from bayou.curvature.layers import Affine, Layer
from bayou.curvature.structures import Curvature, DiagonalSum, Multipliers, Shapes, Sum, definite
from bayou.curvature.sweep import Plan
from bayou.params import Params

SEPARATOR = "|"  # between the parts of a tensor's name in files: "in|fc.weight|fc.bias"
MAX_FACTOR = 16_384  # sides of a factor: 2 GiB, and minutes for its eigenvectors on a GPU


def block_names(shapes: Shapes, tensors: Params) -> list[list[str]]:
    """The tensors of every block, weight and bias of a layer or one of them, in the order of the
    shapes.
    """
    found = [key.split(SEPARATOR)[1:] for key in tensors if key.startswith(f"in{SEPARATOR}")]
    return sorted(found, key=lambda names: list(shapes).index(names[0]))


def key(part: str, names: list[str]) -> str:
    """The name of a part of a block."""
    return SEPARATOR.join((part, *names))


def to_blocks(shapes: Shapes, names: list[str], groups: int, params: Params) -> Tensor:
    """The tensors of a block as matrices (..., groups, O, I): the bias is the last column."""
    parts = []
    for name in names:
        flat = flat_axes(params[name], len(shapes[name]))
        lead = flat.shape[:-1]
        outputs = shapes[name][0]
        parts.append(flat.reshape(*lead, groups, outputs // groups, -1))
    return torch.cat(parts, -1)


def from_blocks(shapes: Shapes, names: list[str], matrix: Tensor) -> Params:
    """The inverse of ``to_blocks``."""
    found, lead = {}, matrix.shape[:-3]
    widths = [shapes[name].numel() // shapes[name][0] for name in names]
    for name, part in zip(names, matrix.split(widths, -1), strict=True):
        found[name] = part.reshape(*lead, *shapes[name])
    return found


def widest(layer: Layer) -> int:
    """The larger one of the numbers of inputs and outputs."""
    return max(max(shape[0], shape.numel() // shape[0]) for shape in layer.shapes.values())


@final
class KroneckerSum(Sum):
    """A = Σ a·aᵀ, G = Σ g·gᵀ over examples and positions of every layer; the squares of tensors
    elsewhere or too wide.

    C_layer = A ⊗ G / R for R examples times positions: exact for one linear layer with a Gaussian y
    or for one example, and else as if inputs and output gradients were independent, position by
    position ("expand", Eschenhagen 2023).
    """

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        super().__init__(shapes, plan, like)
        layers = list(dict.fromkeys(plan.layers.values()))
        self.layers = [
            layer for layer in layers if isinstance(layer, Affine) and widest(layer) <= MAX_FACTOR
        ]
        blocked = {name for layer in self.layers for name in layer.shapes}
        self.rest = DiagonalSum(
            {name: shape for name, shape in shapes.items() if name not in blocked}, plan, like
        )
        self.inputs: dict[Layer, Tensor] = {}
        self.outputs: dict[Layer, Tensor] = {}
        self.positions = dict.fromkeys(self.layers, 0)

    def seen(self, layer: Layer, a: Tensor) -> Tensor | None:
        if layer not in self.positions or not isinstance(layer, Affine):
            return a
        found = layer.input_factor(a).double()
        self.inputs[layer] = self.inputs[layer].add_(found) if layer in self.inputs else found
        self.positions[layer] += a.shape[0] * a.shape[2]
        return None

    def graded(self, layer: Layer, a: Tensor | None, g: Tensor) -> None:
        if layer not in self.positions or not isinstance(layer, Affine):
            self.rest.graded(layer, a, g)
            return
        found = layer.output_factor(g).double()
        self.outputs[layer] = self.outputs[layer].add_(found) if layer in self.outputs else found

    def others(self, gradients: Params) -> None:
        self.rest.others(gradients)

    def tensors(self, factor: float = 1.0) -> Params:
        found = {
            f"square{SEPARATOR}{name}": value for name, value in self.rest.tensors(factor).items()
        }
        for layer in self.layers:
            names, a = list(layer.shapes), self.inputs[layer]
            size = next(iter(layer.shapes.values()))[0] // layer.groups
            g = self.outputs.get(layer, self.zeros(layer.groups, size, size))
            found[key("in", names)] = a / max(1, self.positions[layer])
            found[key("out", names)] = factor * g
        return found


class Parts(NamedTuple):
    """A layer decomposed: D^{−½} (I,), s (groups, I), Q (groups, I, I), t (groups, O), V (groups,
    O, O).
    """

    root: Tensor
    s: Tensor
    q: Tensor
    t: Tensor
    v: Tensor


@final
class KroneckerCurvature(Curvature):
    """Λ = scale·A ⊗ G + D ⊗ 1 for every layer, D the prior precision of the columns (the bias is
    the last one).

    With D^{−½}·A·D^{−½} = Q·s·Qᵀ and G = V·t·Vᵀ, Λ = (D^½Q ⊗ V)·(scale·s ⊗ t + multiplier)·(...)ᵀ:
    the prior is added exactly, even if weight and bias, or the inputs of a layer, have different
    ones. They share one multiplier; separate multipliers of the inputs become part of D, and Q and
    s are computed again. A prior precision that differs by output has no such form and is an error.
    Other tensors have a diagonal Λ.
    """

    kind = "kronecker"

    def prepare(self) -> None:
        self.blocks = block_names(self.shapes, self.tensors)
        self.rest = [name for name in self.shapes if f"square{SEPARATOR}{name}" in self.tensors]
        self.parts = []
        for names in self.blocks:
            t, v = torch.linalg.eigh(self.tensors[key("out", names)])
            self.parts.append(Parts(*self._inputs(names, self.prior), t.clamp_min(0.0), v))

    @property
    def ties(self) -> list[list[str]]:
        return [*self.blocks, *([name] for name in self.rest)]

    def _inputs(self, names: list[str], precision: Params) -> tuple[Tensor, Tensor, Tensor]:
        """D^{−½} (I,), s (groups, I) and Q (groups, I, I) for these prior precisions."""
        columns = []
        for name in names:
            rows = precision[name].expand(self.shapes[name]).reshape(self.shapes[name][0], -1)
            if not bool((rows == rows[0]).all()):
                raise ValueError(
                    f"a Kronecker-factored posterior needs one prior scale for all of {name!r}, or one for each of its "
                    "inputs, and it has others; use structure='diagonal' or 'full'"
                )
            columns.append(rows[0])
        root = torch.cat(columns).rsqrt()
        s, q = torch.linalg.eigh(root.unsqueeze(1) * self.tensors[key("in", names)] * root)
        return root, s.clamp_min(0.0), q

    def _parts(self, number: int, multipliers: Multipliers, scale: Tensor) -> tuple[Parts, Tensor]:
        """A layer decomposed, and the eigenvalues of Λ beside D, (groups, O, I)."""
        names, parts = self.blocks[number], self.parts[number]
        more = multipliers[names[0]]
        if any(multipliers[name].numel() > 1 for name in names):
            inputs = self._inputs(
                names, {name: multipliers[name] * self.prior[name] for name in names}
            )
            parts, more = Parts(*inputs, parts.t, parts.v), torch.ones_like(scale)
        return parts, scale * parts.t.unsqueeze(-1) * parts.s.unsqueeze(-2) + more

    def _rest(self, name: str, multipliers: Multipliers, scale: Tensor) -> Tensor:
        return (
            scale * self.tensors[f"square{SEPARATOR}{name}"] + multipliers[name] * self.prior[name]
        )

    def log_det(self, multipliers: Multipliers, scale: Tensor) -> Tensor:
        found = [self._rest(name, multipliers, scale).log().sum() for name in self.rest]
        for number in range(len(self.blocks)):
            parts, values = self._parts(number, multipliers, scale)
            found.append(values.log().sum() - 2 * parts.t.numel() * parts.root.log().sum())
        return torch.stack(found).sum()

    def covariance(self, multipliers: Multipliers, scale: Tensor, like: Tensor) -> Kronecker:
        found = {}
        for name in self.rest:
            precision = self._rest(name, multipliers, scale)
            definite(precision)
            found[f"std{SEPARATOR}{name}"] = precision.rsqrt().expand(self.shapes[name])
        for number, names in enumerate(self.blocks):
            parts, values = self._parts(number, multipliers, scale)
            definite(values)
            found |= {
                key("root", names): parts.root,
                key("in", names): parts.q,
                key("out", names): parts.v,
                key("std", names): values.rsqrt(),
            }
        return Kronecker(self.shapes, {name: value.to(like.dtype) for name, value in found.items()})


@final
class Kronecker(Covariance):
    """Σ of every layer from W = V·(std ⊙ Z)·(root ⊙ Q)ᵀ, Z standard normal; std of all other
    tensors.

    ``tensors``: "in|..." Q (groups, I, I), "out|..." V (groups, O, O), "std|..." (groups, O, I) and
    "root|..." (I,) for a layer's weight and bias, whose names follow; "std|name" for a tensor by
    itself.
    """

    kind = "kronecker"

    def _blocks(self) -> Iterator[tuple[list[str], Tensor, Tensor, Tensor, Tensor]]:
        for names in block_names(self.shapes, self.tensors):
            root, q, v, std = (
                self.tensors[key(part, names)] for part in ("root", "in", "out", "std")
            )
            yield names, root, q, v, std

    def _rest(self) -> dict[str, Tensor]:
        blocked = {name for names, *_ in self._blocks() for name in names}
        return {
            name: self.tensors[f"std{SEPARATOR}{name}"]
            for name in self.shapes
            if name not in blocked
        }

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        found = {}
        for name, std in self._rest().items():
            found[name] = std * rng.normal(n, std.shape, std, rng.fold(seed, name), start)
        for names, root, q, v, std in self._blocks():
            noise = std * rng.normal(n, std.shape, std, rng.fold(seed, *names), start)
            # one product for each draw, so that its rounding does not depend on n
            drawn = torch.stack([v @ z @ q.mT * root for z in noise]) if n else noise
            found |= from_blocks(self.shapes, names, drawn)
        return {name: found[name] for name in self.shapes}

    def mahalanobis(self, deviation: Params) -> Tensor:
        found = [
            self.sum(name, (deviation[name] / std).square()) for name, std in self._rest().items()
        ]
        for names, root, q, v, std in self._blocks():
            d = to_blocks(self.shapes, names, len(q), deviation) / root
            found.append((v.mT @ d @ q / std).square().sum((-3, -2, -1)))
        return torch.stack(found).sum(0)

    @property
    def log_det(self) -> Tensor:
        found = [std.log().sum() for std in self._rest().values()]
        for _, root, _, v, std in self._blocks():
            found.append(std.log().sum() + len(v) * v.shape[-1] * root.log().sum())
        return 2 * torch.stack(found).sum()

    def spread(self, rows: Params) -> Tensor:
        found = [flat_axes(rows[name] * std, std.ndim) for name, std in self._rest().items()]
        for names, root, q, v, std in self._blocks():
            j = to_blocks(self.shapes, names, len(q), rows) * root
            found.append((v.mT @ j @ q * std).flatten(-3))
        return torch.cat(found, -1)

    def beside(self, other: Covariance) -> Kronecker:
        return Kronecker(self.shapes | other.shapes, self.tensors | other.tensors)

    def marginal(self, names: Sequence[str]) -> Kronecker:
        """Layers are independent; weight and bias of a layer are not."""
        kept = {
            key: value
            for key, value in self.tensors.items()
            if set(key.split(SEPARATOR)[1:]) <= set(names)
        }
        if set(names) != {name for key in kept for name in key.split(SEPARATOR)[1:]}:
            return super().marginal(names)  # type: ignore[return-value]
        return Kronecker({name: self.shapes[name] for name in names}, kept)

    def variance(self) -> Params:
        found = {name: std.square() for name, std in self._rest().items()}
        for names, root, q, v, std in self._blocks():
            each = v.square() @ std.square() @ q.square().mT * root.square()
            found |= {
                name: value[0]
                for name, value in from_blocks(self.shapes, names, each.unsqueeze(0)).items()
            }
        return {name: found[name] for name in self.shapes}
