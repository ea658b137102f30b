"""Networks with the layers that a method by name needs."""

from __future__ import annotations

from torch import nn

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU)


def with_dropout(net: nn.Module, p: float = 0.2) -> nn.Module:
    """A Sequential of the layers of ``net`` with dropout after every activation.

    Args:
        net: an ``nn.Sequential``. Any network that has dropout already is returned as it is.
        p: the probability of a zero.

    Raises:
        ValueError: for another network without dropout, and one without activations.
    """
    if any(isinstance(module, nn.Dropout) for module in net.modules()):
        return net
    if not isinstance(net, nn.Sequential):
        raise ValueError(f"{type(net).__name__} has no dropout layers, and they can be added to a Sequential only")
    layers = [one for layer in net for one in ([layer, nn.Dropout(p)] if isinstance(layer, ACTIVATIONS) else [layer])]
    if len(layers) == len(net):
        raise ValueError("the network has no hidden units to add dropout to; choose another method")
    return nn.Sequential(*layers)
