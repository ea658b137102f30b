"""Removal of units from a network by the ratios E[w]²/Var[w] of its weights."""

from __future__ import annotations

from collections.abc import Collection
from types import EllipsisType
from typing import final

import torch
from torch import Tensor, nn

from bayou.core.params import Params
from bayou.operations.unit_graph import (
    LAYERS,
    NORMS,
    BatchNorm,
    Constants,
    DepthwiseLayer,
    UnitGraph,
    UnitGroup,
    UnitLayer,
    UnitTensor,
    build_unit_graph,
)


@final
class Pruning:
    """A network with the ratios E[w]²/Var[w] of its weights and the units that stay.

    Args:
        net: the network at the posterior mean. Its tensors change.
        std: the standard deviation of each tensor by name; 0 for tensors without one.
        matrix_norms: names of the batch norms that are known to read (N, units).
    """

    def __init__(self, net: nn.Module, std: Params, matrix_norms: Collection[str] = ()) -> None:
        self.net = net
        self.std = std
        self.graph: UnitGraph = build_unit_graph(net, self._constant_outputs, matrix_norms)
        self.layers: dict[str, UnitLayer] = self.graph.layers
        self.depthwise: dict[str, DepthwiseLayer] = self.graph.depthwise
        self.weight_ratios: dict[str, Tensor] = {}  # in the shape of the weight
        for name, weight in _weights(net).items():
            spread = std.get(name, torch.zeros_like(weight))
            self.weight_ratios[name] = weight.square() / spread.square()
        self.bits: dict[str, int] = {}  # of a number of each rounded tensor
        reference = next(net.parameters())
        self.dtype: torch.dtype = reference.dtype
        self.device: torch.device = reference.device
        self.stays: dict[UnitGroup, Tensor] = {
            layer.units: self._full_mask(layer.units.size) for layer in self.layers.values()
        }

    def _full_mask(self, size: int) -> Tensor:
        """Return a mask of True."""
        return torch.ones(size, dtype=torch.bool, device=self.device)

    def prune(self, threshold: float, round_weights: bool, reason_to_stay: str) -> None:
        """Set weights to 0, and determine which units stay.

        Args:
            threshold: the ratio below which a weight is set to 0.
            round_weights: whether to round the other weights, which may set some to 0, too.
            reason_to_stay: why all units stay, so that weights are set to 0 only; empty if units
                go.
        """
        for layer in self.layers.values():
            layer.units.reason_to_stay = layer.units.reason_to_stay or reason_to_stay
        self._zero_weights(threshold)
        self._remove_units()
        if round_weights:
            self._round_weights()
            self._remove_units()

    def _zero_weights(self, threshold: float) -> None:
        """Set weights with a smaller ratio to 0, also those of layers whose units all stay."""
        for name, weight in _weights(self.net).items():
            weight.masked_fill_(self.weight_ratios[name] < threshold, 0.0)

    def _ratios(self, layer: UnitLayer) -> Tensor:
        """Return the largest ratio between an output and an input, (outputs, inputs).

        It is 0 without a weight other than 0 between them.
        """
        ratio = self.weight_ratios[f"{layer.name}.weight"]
        return _as_matrix(layer, torch.where(layer.module.weight == 0, 0.0, ratio)).amax(2)

    def count_zeros(self) -> int:
        """Return the number of weights at 0."""
        return sum(int((weight == 0).sum()) for weight in _weights(self.net).values())

    def _unit_of_features(self, read: UnitTensor, total: int) -> tuple[UnitGroup, Tensor]:
        """Return the group of the units that are read, and the unit of each of the features."""
        group = read.group.root()
        return group, read.units_of_features(total).to(self.device)

    def _input_mask(self, layer: UnitLayer) -> Tensor:
        """Return which inputs of a layer stay."""
        if layer.read is None:
            return self._full_mask(layer.inputs)
        group, columns = self._unit_of_features(layer.read, layer.inputs)
        return self.stays[group][columns]

    def _bias(self, layer: UnitLayer, constants: Constants) -> Tensor:
        """Return the bias plus what the removed inputs, which are constants, add to it."""
        weight = _as_matrix(layer, layer.module.weight).sum(2)
        bias = layer.module.bias
        bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
        if layer.read is None or not layer.can_absorb_constants:
            return bias
        group, columns = self._unit_of_features(layer.read, layer.inputs)
        constant = torch.where(self.stays[group], 0.0, constants[layer.read.node]).nan_to_num()
        return bias + weight @ constant[columns]

    def _constant_outputs(self, layer: UnitLayer, constants: Constants) -> Tensor:
        """Return the outputs of a layer that read no unit which stays, and NaN for the others."""
        largest_ratio = torch.where(self._input_mask(layer), self._ratios(layer), 0.0).amax(1)
        return torch.where(largest_ratio > 0, torch.nan, self._bias(layer, constants))

    def _remove_units(self) -> None:
        """Remove the units that read nothing or that nothing reads, until there are none."""
        while self._remove_units_once():
            pass

    def _remove_units_once(self) -> bool:
        """Remove the units that no layer needs, and return whether there were any."""
        read_ratios, needed_ratios = self._unit_ratios()
        has_changed = False
        for group, mask in self.stays.items():
            if group.reason_to_stay:
                continue
            stay = (needed_ratios[group] > 0) & mask
            if not bool(stay.any()):
                stay[torch.where(mask, read_ratios[group], -1.0).argmax()] = True
            has_changed |= not torch.equal(stay, mask)
            self.stays[group] = stay
        return has_changed

    def _unit_ratios(self) -> tuple[dict[UnitGroup, Tensor], dict[UnitGroup, Tensor]]:
        """Return for each unit the largest ratio with which a layer reads it, and needs it.

        A layer does not need a constant that can be added to its bias. A depthwise convolution has
        the units that it reads, and needs none for itself.
        """
        constants = self.graph.constants()
        read_ratios = {
            group: torch.zeros_like(mask, dtype=self.dtype) for group, mask in self.stays.items()
        }
        needed_ratios = {group: torch.zeros_like(ratio) for group, ratio in read_ratios.items()}
        for layer in self.layers.values():
            if layer.read is None:
                continue
            stays = self.stays[layer.units][:, None] & self._input_mask(layer)
            ratio = torch.where(stays, self._ratios(layer), 0.0).amax(0)
            group, columns = self._unit_of_features(layer.read, layer.inputs)
            unit_ratio = torch.zeros_like(read_ratios[group]).scatter_reduce(
                0, columns, ratio, "amax"
            )
            constant = constants[layer.read.node]
            is_removable = constant.isfinite() if layer.can_absorb_constants else constant == 0
            needed = torch.where(is_removable, 0.0, unit_ratio)
            read_ratios[group] = torch.maximum(read_ratios[group], unit_ratio)
            needed_ratios[group] = torch.maximum(needed_ratios[group], needed)
        return read_ratios, needed_ratios

    def _round_weights(self) -> None:
        """Round the weights of each layer to a grid."""
        masks = {
            f"{name}.weight": _outer_mask(layer, self.stays[layer.units], self._input_mask(layer))
            for name, layer in self.layers.items()
        }
        for name, depthwise in self.depthwise.items():
            ones = [1] * (depthwise.module.weight.ndim - 1)
            masks[f"{name}.weight"] = self.stays[depthwise.units].reshape(-1, *ones)
        for name, weight in _weights(self.net).items():
            is_used = weight != 0
            if name in masks:
                is_used &= masks[name]
            self._round_tensor(name, weight, is_used, is_used)

    def round_biases(self) -> None:
        """Round the biases, with the removed constants in them."""
        for layer in self._all_layers():
            bias = layer.module.bias
            if bias is not None:
                self._round_tensor(f"{layer.name}.bias", bias, self.stays[layer.units], ...)

    def _round_tensor(
        self, name: str, tensor: Tensor, is_used: Tensor, is_counted: Tensor | EllipsisType
    ) -> None:
        """Round a tensor to multiples of Δ = σ, with 1/σ² the mean precision of the used numbers.

        ``bits`` gets the size of a signed whole number that holds each counted number. The tensor
        is left as it is if a used number has no spread or no number is used.

        Args:
            name: the name of the tensor.
            tensor: the numbers, which change.
            is_used: mask of the numbers that determine Δ.
            is_counted: mask of the numbers that must fit into the bits.
        """
        std = self.std.get(name)
        if std is None or not bool(is_used.any()) or not bool((std[is_used] > 0).all()):
            return
        step = std[is_used].square().reciprocal().mean().rsqrt()
        steps = (tensor / step).round()
        tensor.copy_(steps * step)
        self.bits[name] = int(steps[is_counted].abs().max()).bit_length() + 1

    def _all_layers(self) -> list[UnitLayer | DepthwiseLayer]:
        """Return the layers and the depthwise convolutions."""
        return [*self.layers.values(), *self.depthwise.values()]

    def shrink(self) -> None:
        """Cut the tensors to the units that stay."""
        constants = self.graph.constants()
        # All biases first: they depend on the weights before the cut.
        biases = {name: self._bias(layer, constants) for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            self._shrink_layer(layer, biases[name])
        for depthwise in self.depthwise.values():
            self._shrink_depthwise(depthwise)
        for name, module in self.net.named_modules():
            if isinstance(module, NORMS) and name in self.graph.norms:
                self._shrink_norm(module, self.graph.norms[name])

    def _shrink_layer(self, layer: UnitLayer, bias: Tensor) -> None:
        """Cut the weight and the bias of a linear layer or a convolution."""
        module = layer.module
        outputs = self.stays[layer.units]
        inputs = self._input_mask(layer)
        for axis, stay in zip(layer.axes, (outputs, inputs), strict=True):
            module.weight.data = module.weight.index_select(axis, stay.nonzero()[:, 0])
        if module.bias is not None or bool(bias.any()):
            module.bias = nn.Parameter(bias[outputs])
        if isinstance(module, nn.Linear):
            module.in_features = int(inputs.sum())
            module.out_features = int(outputs.sum())
        else:
            module.in_channels = int(inputs.sum())
            module.out_channels = int(outputs.sum())

    def _shrink_depthwise(self, layer: DepthwiseLayer) -> None:
        """Cut the filters of a depthwise convolution."""
        module = layer.module
        stay = self.stays[layer.units]
        for value in module.parameters():
            value.data = value[stay]
        channels = int(stay.sum())
        module.in_channels = channels
        module.out_channels = channels
        module.groups = channels

    def _shrink_norm(self, norm: BatchNorm, tensor: UnitTensor) -> None:
        """Cut the tensors of a batch norm."""
        group, columns = self._unit_of_features(tensor, norm.num_features)
        stay = self.stays[group][columns]
        for value in (*norm.parameters(), *norm.buffers()):
            if value.ndim:  # the number of batches has none
                value.data = value[stay]
        norm.num_features = int(stay.sum())

    def unchanged_layers(self) -> dict[str, str]:
        """Return the layers whose units all stay, and why."""
        reasons = dict(self.graph.unchanged)
        for layer in self._all_layers():
            reason = layer.units.reason_to_stay
            if reason not in ("", "the output of the network"):
                reasons[layer.name] = reason
        return reasons


def _weights(net: nn.Module) -> Params:
    """Return the weights of linear layers and convolutions by name, tied ones once."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    weights: Params = {}
    for module in net.modules():
        if isinstance(module, LAYERS) and "weight" in module._parameters:
            weights[names[id(module.weight)]] = module.weight
    return weights


def _as_matrix(layer: UnitLayer, weight: Tensor) -> Tensor:
    """Return a weight as (outputs, inputs, positions of the kernel)."""
    output_axis, input_axis = layer.axes
    shape = (weight.shape[output_axis], weight.shape[input_axis], -1)
    return weight.movedim(layer.axes, (0, 1)).reshape(shape)


def _outer_mask(layer: UnitLayer, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return which numbers of a weight belong to outputs and inputs that stay; it broadcasts."""
    mask = (outputs[:, None] & inputs).movedim((0, 1), layer.axes)
    return mask.reshape(*mask.shape, *[1] * (layer.module.weight.ndim - 2))
