"""Removal of units from a network whose units are followed, by the ratios E²/Var of its weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.operations.follow import LAYERS, Constants, Depthwise, Group, Layer, Value, follow
from bayou.params import Params


@final
class Pruning:
    """The network, the ratios E²/Var of its weights as matrices (out, in), and which units stay."""

    def __init__(
        self, net: nn.Module, mean: Params, std: Params, matrices: Collection[str] = ()
    ) -> None:
        self.net, self.std = net, std
        self.followed = follow(net, self._constant_outputs, matrices)
        self.layers = self.followed.layers
        self.depthwise = self.followed.depthwise
        self.others = _other_weights(net, self.layers)
        self.full: dict[str, Tensor] = {}
        for name, weight in self._weights().items():
            value = mean.get(name, weight)
            spread = std.get(name, torch.zeros_like(value))
            self.full[name] = torch.where(value == 0, 0.0, value.square() / spread.square())
        self.ratios = {
            name: _matrix(layer, self.full[f"{name}.weight"]).amax(2)
            for name, layer in self.layers.items()
        }
        like = next(net.parameters())
        self.dtype, self.device = like.dtype, like.device
        self.stays = {layer.units: self._all(layer.units.n) for layer in self.layers.values()}

    def _all(self, n: int) -> Tensor:
        return torch.ones(n, dtype=torch.bool, device=self.device)

    def zero(self, threshold: float) -> None:
        """Set weights with a smaller ratio to 0, also of layers that are not followed."""
        for name, weight in self._weights().items():
            weight.masked_fill_(self.full[name] < threshold, 0.0)
        for name, ratio in self.ratios.items():
            self.ratios[name] = ratio.masked_fill(ratio < threshold, 0.0)

    def _weights(self) -> Params:
        """Return the weights of all linear layers and convolutions by the name of the tensor, tied
        ones once.
        """
        followed = {f"{name}.weight": layer.module.weight for name, layer in self.layers.items()}
        return followed | self.others

    def count_zeros(self) -> int:
        """Return the number of weights at 0."""
        weights = [layer.module.weight for layer in self.layers.values()]
        weights += _other_weights(self.net, self.layers).values()
        return sum(int((weight == 0).sum()) for weight in weights)

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

    def _constant_outputs(self, layer: Layer, constants: Constants) -> Tensor:
        """Return the outputs of a layer that read nothing which stays, and NaN for the others."""
        reads = torch.where(self._inputs(layer), self.ratios[layer.name], 0.0).amax(1)
        return torch.where(reads > 0, torch.nan, self._bias(layer, constants))

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
        """Remove the units that every layer which reads them can do without; whether there were
        any.

        A layer can do without a constant that is added to its bias. A depthwise convolution has the
        units that it reads, and needs none for itself.
        """
        constants = self._constants()
        read_by = {
            group: torch.zeros_like(mask, dtype=self.dtype) for group, mask in self.stays.items()
        }
        needed_by = {group: torch.zeros_like(score) for group, score in read_by.items()}
        for name, layer in self.layers.items():
            if layer.source is None or layer.read is None:
                continue
            stays = self.stays[layer.units][:, None] & self._inputs(layer)
            ratio = torch.where(stays, self.ratios[name], 0.0).amax(0)
            group, columns = self._reads(layer.read, layer.inputs)
            read = torch.zeros_like(read_by[group]).scatter_reduce(0, columns, ratio, "amax")
            constant = constants[layer.source]
            can_move = constant.isfinite() if layer.folds else constant == 0
            read_by[group] = torch.maximum(read_by[group], read)
            needed_by[group] = torch.maximum(needed_by[group], torch.where(can_move, 0.0, read))
        changed = False
        for group, mask in self.stays.items():
            if group.whole:
                continue
            stay = (needed_by[group] > 0) & mask
            if not bool(stay.any()):
                stay[torch.where(mask, read_by[group], -1.0).argmax()] = True
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
                self.ratios[name] = self.ratios[name].masked_fill(
                    (_matrix(layer, weight) == 0).all(2), 0.0
                )
        filters = {
            f"{name}.weight": self._stays_of(layer) for name, layer in self.depthwise.items()
        }
        for name, weight in self.others.items():
            used = weight != 0
            if name in filters:
                used &= filters[name].reshape(-1, *[1] * (weight.ndim - 1))
            width = _round(weight, self.std.get(name), used, used)
            if width is not None:
                found[name] = width
        return found

    def _stays_of(self, layer: Depthwise) -> Tensor:
        """Which units of a depthwise convolution stay."""
        return self.stays[layer.value.group.find()]

    def round_biases(self) -> dict[str, int]:
        """Put the biases on a grid too, after removed constants were added to them; the bits of a
        number of each.
        """
        stays = {
            name: (layer.module.bias, self.stays[layer.units])
            for name, layer in self.layers.items()
        }
        stays |= {
            name: (layer.module.bias, self._stays_of(layer))
            for name, layer in self.depthwise.items()
        }
        found = {
            f"{name}.bias": _round(bias, self.std.get(f"{name}.bias"), stay, ...)
            for name, (bias, stay) in stays.items()
            if bias is not None
        }
        return {name: width for name, width in found.items() if width is not None}

    def shrink(self) -> None:
        """Cut the tensors; the new biases depend on the weights before the cut."""
        constants = self._constants()
        biases = {name: self._bias(layer, constants) for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            module, bias, out, inputs = (
                layer.module,
                biases[name],
                self.stays[layer.units],
                self._inputs(layer),
            )
            for axis, stay in zip(layer.axes, (out, inputs), strict=True):
                module.weight = _fixed(module.weight.index_select(axis, stay.nonzero()[:, 0]))
            if module.bias is not None or bool(bias.any()):
                module.bias = _fixed(bias[out])
            sizes = int(inputs.sum()), int(out.sum())
            if isinstance(module, nn.Linear):
                module.in_features, module.out_features = sizes
            else:
                module.in_channels, module.out_channels = sizes
        for channelwise in self.depthwise.values():
            module, stay = channelwise.module, self._stays_of(channelwise)
            module.weight = _fixed(module.weight[stay])
            if module.bias is not None:
                module.bias = _fixed(module.bias[stay])
            module.in_channels = module.out_channels = module.groups = int(stay.sum())
        for name, value in self.followed.norms.items():
            norm: Any = self.net.get_submodule(name)
            group, columns = self._reads(value, norm.num_features)
            stay = self.stays[group][columns]
            for key in ("weight", "bias", "running_mean", "running_var"):
                old = getattr(norm, key)
                if old is not None:
                    setattr(
                        norm, key, _fixed(old[stay]) if isinstance(old, nn.Parameter) else old[stay]
                    )
            norm.num_features = int(stay.sum())

    def whole(self) -> dict[str, str]:
        """The layers whose units all stay, and why."""
        reasons = {name: layer.units.whole for name, layer in self.layers.items()}
        reasons |= {name: layer.value.group.find().whole for name, layer in self.depthwise.items()}
        return self.followed.whole | {
            n: why for n, why in reasons.items() if why not in ("", "the output of the network")
        }


def _other_weights(net: nn.Module, followed: Collection[str]) -> Params:
    """Return the weights of linear layers and convolutions that are depthwise or not followed, by
    name.
    """
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    weights: Params = {}
    for name, module in net.named_modules():
        if isinstance(module, LAYERS) and name not in followed and "weight" in module._parameters:
            weights[names[id(module.weight)]] = module.weight
    return weights


def _matrix(layer: Layer, weight: Tensor) -> Tensor:
    """A weight as (out, in, positions)."""
    return weight.movedim(layer.axes, (0, 1)).reshape(
        weight.shape[layer.axes[0]], weight.shape[layer.axes[1]], -1
    )


def _outer(layer: Layer, out: Tensor, inputs: Tensor) -> Tensor:
    """Which numbers of a weight have one of these outputs and one of these inputs, in a shape that
    broadcasts.
    """
    shapes = [
        [-1 if axis == own else 1 for axis in range(layer.module.weight.ndim)] for own in layer.axes
    ]
    return out.reshape(shapes[0]) & inputs.reshape(shapes[1])


def _round(tensor: Tensor, std: Tensor | None, used: Tensor, counted: Any) -> int | None:
    """Round a tensor to multiples of Δ = σ, 1/σ² the mean precision of the ``used`` numbers; bits
    of the ``counted``.

    None, and no rounding, where one of them is a point or there are none. The bits are of signed
    whole numbers.
    """
    if std is None or not bool(used.any()) or not bool((std[used] > 0).all()):
        return None
    step = std[used].square().reciprocal().mean().rsqrt()
    steps = (tensor / step).round()
    tensor.copy_(steps * step)
    return int(steps[counted].abs().max()).bit_length() + 1


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
