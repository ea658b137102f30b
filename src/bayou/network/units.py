"""The units of x and y of a network that was fitted to standardized data."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from bayou.network.inputs import Output

NetworkType = TypeVar("NetworkType", bound=nn.Module)


@final
@dataclass(frozen=True)
class Standardization:
    """Standardization of the trailing axes of a tensor, z = (v − shift)/scale, and its inverse.

    Args:
        shift: the location of v, broadcastable to one row of it.
        scale: the positive scale of v, of the same shape or one number.
    """

    shift: Tensor
    scale: Tensor

    def standardize(self, value: Tensor) -> Tensor:
        """Return (value − shift)/scale.

        Args:
            value: v.
        """
        return (value - self.shift.to(value)) / self.scale.to(value)

    def restore(self, value: Tensor) -> Tensor:
        """Return shift + scale·value.

        Args:
            value: z.
        """
        return self.shift.to(value) + self.scale.to(value) * value

    def to(self, like: Tensor) -> Standardization:
        """Return the same map on the device of a tensor, in its dtype.

        Args:
            like: the tensor.
        """
        return Standardization(self.shift.to(like), self.scale.to(like))

    def to_json(self) -> dict[str, Any]:
        """Return shift and scale as plain values."""
        return {"shift": self.shift.double().tolist(), "scale": self.scale.double().tolist()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Standardization:
        """Return the map that ``to_json`` described.

        Args:
            value: the plain values.

        Raises:
            ValueError: unless all numbers are finite and scales positive.
        """
        shift = torch.tensor(value["shift"], dtype=torch.float64)
        scale = torch.tensor(value["scale"], dtype=torch.float64)
        is_finite = bool(shift.isfinite().all()) and bool(scale.isfinite().all())
        if scale.shape not in (shift.shape, ()) or not is_finite or not bool((scale > 0).all()):
            raise ValueError("units need finite shifts and positive, finite scales of one shape")
        return Standardization(shift, scale)


@final
@dataclass(frozen=True)
class TargetMap:
    """The map of y to standard units where it is not that of the network's outputs.

    z = (v − shift)/scale, where v is y with the logarithm of its first columns.

    Args:
        affine: the standardization of every number of v.
        log_columns: of how many numbers of the last axis of y the logarithm is taken.
        log_scale: the mean of −Σ log|dz/dy| over the training rows: how much the map adds to
            −log p(y) of a row.
    """

    affine: Standardization
    log_columns: int
    log_scale: float

    def apply(self, y: Tensor) -> Tensor:
        """Return y in standard units.

        Args:
            y: the targets.
        """
        if self.log_columns:
            logarithms = y[..., : self.log_columns].log()
            y = torch.cat((logarithms, y[..., self.log_columns :]), -1)
        return self.affine.standardize(y)

    def to_json(self) -> dict[str, Any]:
        """Return the map as plain values."""
        numbers = {"log_columns": self.log_columns, "log_scale": self.log_scale}
        return {"affine": self.affine.to_json()} | numbers

    @staticmethod
    def from_json(value: dict[str, Any]) -> TargetMap:
        """Return the map that ``to_json`` described.

        Args:
            value: the plain values.
        """
        affine = Standardization.from_json(value["affine"])
        return TargetMap(affine, value["log_columns"], value["log_scale"])


@final
class Units:
    """The standardization of a network's inputs and of y, shared by all copies of the network.

    A fit works on standardized rows and leaves the units switched off. Afterwards ``activate``
    makes every copy of the network take inputs in the user's units and return outputs in the units
    of y.

    Args:
        inputs: for each positional argument of the network its standardization, or None to leave it
            as it is.
        output: the standardization of y, or None.
        log_variances: how many blocks of log-variances follow the block of locations in the
            outputs.
        axis: the axis of the outputs with these blocks.
        target_size: how many numbers the y of one row has.
        target: the map of y, where it is not ``output``: of log y, or of values with a flag or a
            noise each.
        keeps_scales: whether the second half of the outputs describes scales in units that the
            likelihood has, so that it is not converted.
    """

    def __init__(
        self,
        inputs: Sequence[Standardization | None],
        output: Standardization | None = None,
        log_variances: int = 0,
        axis: int = -1,
        target_size: int = 1,
        target: TargetMap | None = None,
        keeps_scales: bool = False,
    ) -> None:
        self.inputs: tuple[Standardization | None, ...] = tuple(inputs)
        self.output = output
        self.log_variances = log_variances
        self.axis = axis
        self.target_size = target_size
        self.target = target
        self.keeps_scales = keeps_scales
        self.is_active: bool = False
        self.derived: list[Units] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Units:
        """Return the object itself: copies of a network are switched together."""
        return self

    def activate(self, like: Tensor) -> None:
        """Switch the conversion on.

        Args:
            like: a parameter of the network, whose device and dtype the constants get.
        """
        self.inputs = tuple(None if item is None else item.to(like) for item in self.inputs)
        if self.output is not None:
            self.output = self.output.to(like)
        self.is_active = True
        for units in self.derived:
            units.activate(like)

    @property
    def is_log(self) -> bool:
        """Whether the outputs are those of log y."""
        return self.target is not None and self.target.log_columns > 0

    @property
    def log_scale(self) -> float:
        """Σ log scale over the coordinates of y: how much the units add to −log p(y) of a row."""
        if self.target is not None:
            return self.target.log_scale
        if self.output is None:
            return 0.0
        return self.target_size * float(self.output.scale.double().log().mean())

    def convert_inputs(self, net: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Standardize the arguments of a network that have units: a forward pre-hook.

        Args:
            net: the network.
            inputs: its arguments.

        Returns:
            The arguments; None, which changes nothing, as long as the units are switched off.
        """
        if self.is_active:
            return self.standardize_inputs(inputs)
        return None

    def standardize_inputs(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the network with those that have units standardized.

        Args:
            inputs: the arguments.
        """
        missing = len(inputs) - len(self.inputs)
        maps = (*self.inputs, *[None] * missing)
        return tuple(
            item if standardization is None else standardization.standardize(item)
            for item, standardization in zip(inputs, maps, strict=False)
        )

    def standardize_targets(self, y: Tensor) -> Tensor:
        """Return y in standard units.

        Args:
            y: the targets.
        """
        if self.target is not None:
            return self.target.apply(y)
        if self.output is None:
            return y
        return self.output.standardize(y)

    def convert_outputs(self, net: nn.Module, inputs: object, outputs: object) -> object:
        """Return outputs in the units of y once the units are active: a forward hook.

        Args:
            net: the network.
            inputs: its arguments.
            outputs: its outputs for standardized y.
        """
        if self.is_active and isinstance(outputs, Tensor):
            return self.restore_outputs(outputs)
        return outputs

    def restore_outputs(self, outputs: Tensor) -> Tensor:
        """Return the outputs for standardized y as outputs for y.

        Args:
            outputs: the outputs of the network.
        """
        if self.output is None:
            return outputs
        if self.keeps_scales:
            location, scales = outputs.chunk(2, self.axis)
            return torch.cat((self.output.restore(location), scales), self.axis)
        if not self.log_variances:
            return self.output.restore(outputs)
        location, *log_variances = outputs.chunk(1 + self.log_variances, self.axis)
        shift = 2 * self.output.scale.to(outputs).log()
        blocks = [self.output.restore(location), *(block + shift for block in log_variances)]
        return torch.cat(blocks, self.axis)

    def with_scales(self, *, has_logs: bool) -> Units:
        """Return units of a network of the same data that predicts a scale beside each location.

        The scales are the second half of the last axis of the outputs. These units are activated
        together with those of the object.

        Args:
            has_logs: whether the scales are log-variances; otherwise the likelihood has their
                units, and they are not converted.
        """
        units = Units(
            self.inputs,
            self.output,
            log_variances=int(has_logs),
            target_size=self.target_size,
            target=self.target,
            keeps_scales=not has_logs,
        )
        self.derived.append(units)
        return units

    def for_student(self, log_variances: int) -> Units:
        """Return active units for another network of the same data.

        Args:
            log_variances: how many blocks of log-variances its outputs have on the last axis, after
                the locations.
        """
        units = Units(self.inputs, self.output, log_variances, target_size=self.target_size)
        units.is_active = True
        return units

    def to_json(self) -> dict[str, Any]:
        """Return the units as plain values."""
        values = {
            "inputs": [None if item is None else item.to_json() for item in self.inputs],
            "output": None if self.output is None else self.output.to_json(),
            "log_variances": self.log_variances,
            "axis": self.axis,
            "target_size": self.target_size,
        }
        if self.target is not None:
            values["target"] = self.target.to_json()
        if self.keeps_scales:
            values["keeps_scales"] = True
        return values

    @staticmethod
    def from_json(value: dict[str, Any]) -> Units:
        """Return the units that ``to_json`` described.

        Args:
            value: the plain values.
        """
        inputs = [
            None if item is None else Standardization.from_json(item) for item in value["inputs"]
        ]
        output = None if value["output"] is None else Standardization.from_json(value["output"])
        target = TargetMap.from_json(value["target"]) if "target" in value else None
        return Units(
            inputs,
            output,
            value["log_variances"],
            value["axis"],
            value["target_size"],
            target,
            value.get("keeps_scales", False),
        )


def with_units(net: NetworkType, units: Units) -> NetworkType:
    """Return a network with these units: the same tensors and modules, other hooks.

    Args:
        net: the network; it is not changed.
        units: the units.
    """
    net = copy.copy(net)
    net._forward_pre_hooks = OrderedDict(net._forward_pre_hooks)
    net._forward_hooks = OrderedDict(net._forward_hooks)
    if not any(isinstance(hook, Output) for hook in net._forward_hooks.values()):
        # The units are those of the tensor that the likelihood takes.
        net.register_forward_hook(Output())
    net.register_forward_pre_hook(units.convert_inputs)
    net.register_forward_hook(units.convert_outputs)
    return net


def units_of(net: nn.Module) -> Units | None:
    """Return the units of a network; None if it takes and returns data as they are.

    Args:
        net: the network.
    """
    for hook in net._forward_hooks.values():
        units = getattr(hook, "__self__", None)
        if isinstance(units, Units):
            return units
    return None
