"""The roles of the tensors of a network in their layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Layout:
    """The axes of a weight that count inputs and outputs.

    Args:
        in_axis: the axis of inputs. Default: 1.
        out_axis: the axis of outputs. Default: 0.
        convolution: whether the weight belongs to a convolution. Default: False.
        groups: the number of groups of the convolution. Default: 1.
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
    """Return the layout of each weight, by the type of the module that has it.

    Args:
        net: the network.
        names: the names of the weights.
    """
    modules = dict(net.named_modules())
    layout_of: dict[str, Layout] = {}
    for name in names:
        owner = modules.get(_plain(name).rpartition(".")[0], net)
        # The Conv1D of transformers is a linear layer with its weight stored (inputs, outputs).
        is_conv1d = type(owner).__name__ == "Conv1D" and hasattr(owner, "nf")
        is_transposed = is_conv1d or isinstance(owner, nn.modules.conv._ConvTransposeNd)
        layout_of[name] = Layout(
            in_axis=int(not is_transposed),
            out_axis=int(is_transposed),
            convolution=isinstance(owner, nn.modules.conv._ConvNd),
            groups=getattr(owner, "groups", 1),
        )
    return layout_of


def fan_ins(net: nn.Module) -> dict[str, int]:
    """Return how many inputs feed one output of each tensor; a bias counts those of its weight.

    Args:
        net: the network.
    """
    shapes = {_plain(name): parameter.shape for name, parameter in net.named_parameters()}
    axes = layouts(net, shapes)

    def fan_in(name: str) -> int:
        shape = shapes[name]
        if len(shape) >= 2:
            layout = axes[name]
            groups = layout.groups if layout.in_axis == 0 else 1
            return shape.numel() // shape[layout.out_axis] // groups
        weight = name.rpartition(".")[0] + ".weight" if "." in name else "weight"
        if weight != name and len(shapes.get(weight, ())) >= 2:
            return fan_in(weight)
        return 1

    return {name: fan_in(_plain(name)) for name, _ in net.named_parameters()}


def _plain(name: str) -> str:
    """Return the name without a parametrization (``torch.nn.utils.parametrize``): "0.weight"."""
    if "parametrizations." not in name:
        return name
    return name.replace("parametrizations.", "").removesuffix(".original")
