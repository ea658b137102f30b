"""Removal of units from a network whose units are followed, by the ratios E²/Var of its weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.operations.follow import Constants, Group, Layer, Value, follow
from bayou.params import Params


@final
class Pruning:
    """The network, the ratios E²/Var of its weights as matrices (out, in), and which units stay."""

    def __init__(self, net: nn.Module, mean: Params, std: Params, matrices: Collection[str] = ()) -> None:
        self.net, self.std = net, std
        self.followed = follow(net, self._bias, matrices)
        self.layers = self.followed.layers
        self.full: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            value = mean.get(f"{name}.weight", layer.module.weight)
            spread = std.get(f"{name}.weight", torch.zeros_like(value))
            self.full[name] = torch.where(value == 0, 0.0, value.square() / spread.square())
        self.ratios = {name: _matrix(self.layers[name], ratio).amax(2) for name, ratio in self.full.items()}
        like = next(net.parameters())
        self.dtype, self.device = like.dtype, like.device
        self.stays = {layer.units: self._all(layer.units.n) for layer in self.layers.values()}

    def _all(self, n: int) -> Tensor:
        return torch.ones(n, dtype=torch.bool, device=self.device)

    def zero(self, threshold: float) -> None:
        """Set weights with a smaller ratio to 0."""
        for name, layer in self.layers.items():
            layer.module.weight.masked_fill_(self.full[name] < threshold, 0.0)
            self.ratios[name] = self.ratios[name].masked_fill(self.ratios[name] < threshold, 0.0)

    def _reads(self, read: Value, total: int) -> tuple[Group, Tensor]:
        """The group of the units that are read, and the unit of each of ``total`` features."""
        group = read.group.find()
        return group, read.columns(total).to(self.device)

    def _inputs(self, layer: Layer) -> Tensor:
        """Which inputs of a layer stay."""
        if layer.read is None:
            return self._all(layer.inputs)
        group, columns = self._reads(layer.read, layer.inputs)
        return self.stays[group][columns]

    def _bias(self, layer: Layer, constants: Constants) -> Tensor:
        """The bias with what removed inputs, as constants, add to it."""
        weight, bias = _matrix(layer, layer.module.weight).sum(2), layer.module.bias
        bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
        if layer.source is None or layer.read is None or not layer.folds:
            return bias
        group, columns = self._reads(layer.read, layer.inputs)
        constant = torch.where(self.stays[group], 0.0, constants[layer.source]).nan_to_num()
        return bias + weight @ constant[columns]

    def _constants(self) -> Constants:
        found: Constants = {}
        for node, rule in self.followed.rules:
            found[node] = rule(found)
        return found

    def remove(self) -> None:
        """Remove the units that read nothing or that nothing reads, until there are none."""
        while self._remove():
            pass

    def _remove(self) -> bool:
        constants = self._constants()
        reads = {group: torch.zeros_like(mask, dtype=self.dtype) for group, mask in self.stays.items()}
        read_by = {group: torch.zeros_like(score) for group, score in reads.items()}
        for name, layer in self.layers.items():
            ratio = torch.where(self.stays[layer.units][:, None] & self._inputs(layer), self.ratios[name], 0.0)
            reads[layer.units] = torch.maximum(reads[layer.units], ratio.amax(1))
            if layer.source is not None and layer.read is not None:
                group, columns = self._reads(layer.read, layer.inputs)
                read_by[group] = read_by[group].scatter_reduce(0, columns, ratio.amax(0), "amax")
                c = constants[layer.source]
                movable = c.isfinite() if layer.folds else c == 0
                reads[group] = torch.where(movable, reads[group], torch.inf)
        changed = False
        for group, mask in self.stays.items():
            if group.whole:
                continue
            scores = torch.minimum(reads[group], read_by[group])
            stay = (scores > 0) & mask
            if not bool(stay.any()):
                stay[torch.where(mask, scores, -1.0).argmax()] = True
            changed |= not torch.equal(stay, mask)
            self.stays[group] = stay
        return changed

    def round(self) -> dict[str, int]:
        """Put the weights of each layer on a grid; the bits of a number of each."""
        found: dict[str, int] = {}
        for name, layer in self.layers.items():
            weight = layer.module.weight
            used = (weight != 0) & _outer(layer, self.stays[layer.units], self._inputs(layer))
            width = _round(weight, self.std.get(f"{name}.weight"), used, used)
            if width is not None:
                found[f"{name}.weight"] = width
                self.ratios[name] = self.ratios[name].masked_fill((_matrix(layer, weight) == 0).all(2), 0.0)
        return found

    def round_biases(self) -> dict[str, int]:
        """Put the biases on a grid too, after removed constants were added to them; the bits of a number of each."""
        found = {
            f"{name}.bias": _round(layer.module.bias, self.std.get(f"{name}.bias"), self.stays[layer.units], ...)
            for name, layer in self.layers.items()
            if layer.module.bias is not None
        }
        return {name: width for name, width in found.items() if width is not None}

    def shrink(self) -> None:
        """Cut the tensors; the new biases depend on the weights before the cut."""
        constants = self._constants()
        biases = {name: self._bias(layer, constants) for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            module, bias, out, inputs = layer.module, biases[name], self.stays[layer.units], self._inputs(layer)
            for axis, stay in zip(layer.axes, (out, inputs), strict=True):
                module.weight = _fixed(module.weight.index_select(axis, stay.nonzero()[:, 0]))
            if module.bias is not None or bool(bias.any()):
                module.bias = _fixed(bias[out])
            sizes = int(inputs.sum()), int(out.sum())
            if isinstance(module, nn.Linear):
                module.in_features, module.out_features = sizes
            else:
                module.in_channels, module.out_channels = sizes
        for name, value in self.followed.norms.items():
            norm: Any = self.net.get_submodule(name)
            group, columns = self._reads(value, norm.num_features)
            stay = self.stays[group][columns]
            for key in ("weight", "bias", "running_mean", "running_var"):
                old = getattr(norm, key)
                if old is not None:
                    setattr(norm, key, _fixed(old[stay]) if isinstance(old, nn.Parameter) else old[stay])
            norm.num_features = int(stay.sum())

    def whole(self) -> dict[str, str]:
        """The layers whose units all stay, and why."""
        reasons = {name: layer.units.whole for name, layer in self.layers.items()}
        return self.followed.whole | {
            n: why for n, why in reasons.items() if why not in ("", "the output of the network")
        }


def _matrix(layer: Layer, weight: Tensor) -> Tensor:
    """A weight as (out, in, positions)."""
    return weight.movedim(layer.axes, (0, 1)).reshape(weight.shape[layer.axes[0]], weight.shape[layer.axes[1]], -1)


def _outer(layer: Layer, out: Tensor, inputs: Tensor) -> Tensor:
    """Which numbers of a weight have one of these outputs and one of these inputs, in a shape that broadcasts."""
    shapes = [[-1 if axis == own else 1 for axis in range(layer.module.weight.ndim)] for own in layer.axes]
    return out.reshape(shapes[0]) & inputs.reshape(shapes[1])


def _round(tensor: Tensor, std: Tensor | None, used: Tensor, counted: Any) -> int | None:
    """Round a tensor to multiples of Δ = σ, 1/σ² the mean precision of the ``used`` numbers; bits of the ``counted``.

    None, and no rounding, where one of them is a point or there are none. The bits are of signed whole numbers.
    """
    if std is None or not bool(used.any()) or not bool((std[used] > 0).all()):
        return None
    step = std[used].square().reciprocal().mean().rsqrt()
    steps = (tensor / step).round()
    tensor.copy_(steps * step)
    return int(steps[counted].abs().max()).bit_length() + 1


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
