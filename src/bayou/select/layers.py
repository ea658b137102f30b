"""Networks with the layers that a method by name needs."""

from __future__ import annotations

import copy

from torch import nn

ACTIVATIONS = (
    nn.ReLU,
    nn.Tanh,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.ReLU6,
    nn.Hardswish,
    nn.Mish,
    nn.SELU,
)


def with_dropout(net: nn.Module, p: float = 0.2) -> nn.Module:
    """Return a copy of the network with dropout after its activations.

    A network that has dropout is returned as it is.

    Args:
        net: if it is an ``nn.Sequential`` with activations among its own layers, dropout follows
            these only.
        p: the probability of a zero.

    Raises:
        ValueError: for a network without activation layers; functions such as ``F.relu`` are not
            seen.
    """
    if any(isinstance(module, nn.Dropout) for module in net.modules()):
        return net
    net = copy.deepcopy(net)
    # named_children() would omit the second name of a layer that has two
    places = [(parent, name) for parent in net.modules() for name, child in parent._modules.items()
              if isinstance(child, ACTIVATIONS)]  # fmt: skip
    if not places:
        raise ValueError(
            f"{type(net).__name__} has no layer like nn.ReLU to add dropout to; "
            "put nn.Dropout(p) into it"
        )
    if isinstance(net, nn.Sequential):
        places = [place for place in places if place[0] is net] or places
    for parent, name in places:
        setattr(parent, name, nn.Sequential(parent.get_submodule(name), nn.Dropout(p)))
    return net
