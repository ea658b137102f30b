"""Networks with the layers that a method by name needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU)


def with_dropout(net: nn.Module, p: float = 0.2) -> nn.Module:
    """A Sequential of the layers of ``net`` with dropout after every activation.

    Args:
        net: an ``nn.Sequential``. Any network that has dropout already is returned as it is.
        p: the probability of a zero.

    Raises:
        ValueError: for another network without dropout, and one without activations.
    """
    return _beside_activations(net, nn.Dropout, lambda layer: nn.Dropout(p), "dropout")


def with_batch_norm(net: nn.Module) -> nn.Module:
    """A Sequential of the layers of ``net`` with batch norm before every activation.

    Args:
        net: an ``nn.Sequential``. Any network that has batch norm already is returned as it is.

    Raises:
        ValueError: for another network without batch norm, and one without activations.
    """

    def norm(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Conv2d):
            return nn.BatchNorm2d(layer.out_channels)
        assert isinstance(layer, nn.Linear)
        return nn.BatchNorm1d(layer.out_features)

    return _beside_activations(net, _BatchNorm, norm, "batch norm")


def _beside_activations(net: nn.Module, kind: Any, make: Callable[[Any], nn.Module], what: str) -> nn.Module:
    if any(isinstance(module, kind) for module in net.modules()):
        return net
    if not isinstance(net, nn.Sequential):
        raise ValueError(f"{type(net).__name__} has no {what} layers, and they can be added to a Sequential only")
    layers: list[nn.Module] = []
    last: nn.Module | None = None
    for layer in net:
        if isinstance(layer, ACTIVATIONS):
            layers += [make(last), layer] if what == "batch norm" else [layer, make(last)]
        else:
            layers.append(layer)
        last = layer if isinstance(layer, nn.Linear | nn.Conv2d) else last
    if len(layers) == len(net):
        raise ValueError(f"the network has no hidden units to add {what} to; choose another method")
    return nn.Sequential(*layers)
