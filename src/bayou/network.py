"""A network as a function of its named tensors, and what its tensors are to their layers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from bayou.params import Params

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Network:
    """f(w, x): a copy of the network without weights of its own, called with named tensors.

    ``net`` is the copy; its parameters are empty placeholders, its buffers (running statistics) are its own. ``call``
    takes the parameters and, if wanted, other values for some of the buffers. Tied weights have one name.
    """

    def __init__(self, net: nn.Module) -> None:
        self.names = [name for name, _ in net.named_parameters()]
        self.net, self.aliases = skeleton(net)
        blanks = dict(self.net.named_buffers(remove_duplicate=False))
        seen = {id(blanks[name]) for name in self.names}
        self._tied: dict[str, str] = {}  # aliases that are tensors of their own; those of a module used twice are not
        for alias, name in self.aliases.items():
            if id(blanks[alias]) not in seen:
                seen.add(id(blanks[alias]))
                self._tied[alias] = name
        self._recurrent = tuple(module for module in self.net.modules() if isinstance(module, nn.RNNBase))

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The outputs with these tensors."""
        tied = {alias: params[name] for alias, name in self._tied.items()}
        out: Tensor = functional_call(self.net, params | tied, inputs, tie_weights=False)
        for rnn in self._recurrent:
            forget(rnn)
        return out

    def buffers(self) -> Params:
        """The persistent buffers of the network, without the placeholders of parameters."""
        known = {*self.names, *self.aliases}
        return {name: value for name, value in self.net.state_dict().items() if name not in known}


def skeleton(net: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """A copy of the network whose parameters are empty placeholders, and its tied names: alias → name."""
    net = copy.deepcopy(net)
    canonical = {id(parameter): name for name, parameter in net.named_parameters()}
    aliases = {
        name: canonical[id(parameter)]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if canonical[id(parameter)] != name
    }
    for module in net.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[leaf]
                module.register_buffer(leaf, parameter.detach().new_empty(0), persistent=False)
        if isinstance(module, nn.RNNBase):
            forget(module)
    return net, aliases


def forget(rnn: nn.RNNBase) -> None:
    """Let go of the weights of the last call: a recurrent layer keeps a list of them, graph and all."""
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    rnn._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in rnn._flat_weights]


@dataclass(frozen=True)
class Layout:
    """What a weight is to its layer: which axis counts its inputs and which its outputs, and whether it convolves."""

    in_axis: int = 1
    out_axis: int = 0
    convolution: bool = False
    groups: int = 1


def layouts(net: nn.Module, names: Iterable[str]) -> dict[str, Layout]:
    """Which axis of each weight counts inputs and which outputs, by the type of its owner."""
    modules = dict(net.named_modules())
    found = {}
    for name in names:
        owner = modules.get(name.rpartition(".")[0], net)
        transposed = isinstance(owner, nn.modules.conv._ConvTransposeNd)
        convolution = isinstance(owner, nn.modules.conv._ConvNd)
        found[name] = Layout(int(not transposed), int(transposed), convolution, getattr(owner, "groups", 1))
    return found


def fan_ins(net: nn.Module) -> dict[str, int]:
    """How many inputs feed one output of each tensor; a bias counts those of its weight."""
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    axes = layouts(net, shapes)

    def fan_in(name: str) -> int:
        shape = shapes[name]
        if len(shape) >= 2:
            layout = axes[name]
            return shape.numel() // shape[layout.out_axis] // (layout.groups if layout.in_axis == 0 else 1)
        sibling = name.rpartition(".")[0] + ".weight" if "." in name else "weight"
        return fan_in(sibling) if sibling != name and len(shapes.get(sibling, ())) >= 2 else 1

    return {name: fan_in(name) for name in shapes}
