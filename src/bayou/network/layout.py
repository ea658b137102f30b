"""The roles of the tensors of a network in their layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Layout:
    """The axes of a weight that count inputs and outputs, and whether it belongs to a
    convolution.
    """

    in_axis: int = 1
    out_axis: int = 0
    convolution: bool = False
    groups: int = 1

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of inputs and outputs."""
        return self.in_axis, self.out_axis


def layouts(net: nn.Module, names: Iterable[str]) -> dict[str, Layout]:
    """Which axis of each weight counts inputs and which outputs, by the type of its owner."""
    modules = dict(net.named_modules())
    found = {}
    for name in names:
        owner = modules.get(_plain(name).rpartition(".")[0], net)
        # The Conv1D of transformers is a linear layer with its weight stored (inputs, outputs).
        conv1d = type(owner).__name__ == "Conv1D" and hasattr(owner, "nf")
        transposed = conv1d or isinstance(owner, nn.modules.conv._ConvTransposeNd)
        convolution = isinstance(owner, nn.modules.conv._ConvNd)
        found[name] = Layout(
            int(not transposed), int(transposed), convolution, getattr(owner, "groups", 1)
        )
    return found


def fan_ins(net: nn.Module) -> dict[str, int]:
    """How many inputs feed one output of each tensor; a bias counts those of its weight."""
    shapes = {_plain(name): parameter.shape for name, parameter in net.named_parameters()}
    axes = layouts(net, shapes)

    def fan_in(name: str) -> int:
        shape = shapes[name]
        if len(shape) >= 2:
            layout = axes[name]
            return (
                shape.numel()
                // shape[layout.out_axis]
                // (layout.groups if layout.in_axis == 0 else 1)
            )
        sibling = name.rpartition(".")[0] + ".weight" if "." in name else "weight"
        return fan_in(sibling) if sibling != name and len(shapes.get(sibling, ())) >= 2 else 1

    return {name: fan_in(_plain(name)) for name, _ in net.named_parameters()}


def _plain(name: str) -> str:
    """The name without a parametrization (``torch.nn.utils.parametrize``): "0.weight"."""
    return (
        name.replace("parametrizations.", "").removesuffix(".original")
        if "parametrizations." in name
        else name
    )
