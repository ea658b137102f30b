"""Networks by name, built for the shape of an input and the number of outputs. Torch is imported when one is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch import nn

    from bayou.data.dataset import DataSet

Shape = tuple[int, ...]


def _dense(shape: Shape, outputs: int, hidden: tuple[int, ...], activation: str = "ReLU", dropout: float = 0.0) -> Any:
    """Linear layers on flattened inputs."""
    from torch import nn

    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    width = prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, size), getattr(nn, activation)()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _lenet(shape: Shape, outputs: int, widths: tuple[int, int, int], dropout: bool = False, moved: bool = False) -> Any:
    """Two 5×5 convolutions without padding, each max-pooled by 2, and one hidden dense layer (LeCun et al. 1998)."""
    from torch import nn

    from bayou.runs.augment import FlipAndShift

    channels, height, width = shape
    first, second, hidden = widths
    size = second * prod(((side - 4) // 2 - 4) // 2 for side in (height, width))

    def drop(rate: float) -> list[nn.Module]:
        return [nn.Dropout(rate)] if dropout else []

    return nn.Sequential(
        *([FlipAndShift()] if moved else []),
        *(nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2), *drop(0.25)),
        *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), *drop(0.25)),
        *(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), *drop(0.5), nn.Linear(hidden, outputs)),
    )


def _conv(shape: Shape, outputs: int) -> Any:
    """Two 3×3 convolutions with padding, one pooling, one dense layer: quick on small images."""
    from torch import nn

    channels, height, width = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * (height // 2) * (width // 2), 64), nn.ReLU(), nn.Linear(64, outputs)),
    )


def _resnet(shape: Shape, outputs: int) -> Any:
    """Three residual blocks of two 3×3 convolutions with batch norm (He et al. 2016)."""
    from bayou.runs.residual import resnet

    return resnet(shape[0], (16, 32, 64), outputs)


@final
@dataclass(frozen=True)
class Net:
    """A named network: what it is, how it is built, and the smallest image it can take (None: any input)."""

    name: str
    summary: str
    builder: Callable[[Shape, int], Any]
    smallest: int | None = None

    def describe(self) -> str:
        """One line for a list."""
        needs = "" if self.smallest is None else f"; images of {self.smallest}×{self.smallest} or more"
        return f"{self.name}: {self.summary}{needs}"

    def build(self, shape: Shape, outputs: int, seed: int | None = None) -> nn.Module:
        """The network for inputs (N, *shape) and ``outputs`` numbers; with a seed, its first weights follow from it."""
        self._check(tuple(shape), outputs)
        if seed is None:
            return self.builder(tuple(shape), outputs)
        import torch

        from bayou import rng

        with rng.isolated(seed, torch.device("cpu")):
            return self.builder(tuple(shape), outputs)

    def _check(self, shape: Shape, outputs: int) -> None:
        if outputs < 1 or not shape or min(shape) < 1:
            raise ValueError(f"a network needs inputs and outputs, got inputs of shape {shape} and {outputs} outputs")
        if self.smallest is None:
            return
        size = "×".join(map(str, shape))
        if len(shape) != 3:
            raise ValueError(f"{self.name} needs images (channels, height, width), got inputs of {size}; use mlp")
        if min(shape[1:]) < self.smallest:
            fits = [net.name for net in NETS.values() if (net.smallest or 0) <= min(shape[1:])]
            raise ValueError(
                f"{self.name} needs images of at least {self.smallest}×{self.smallest}, got {size}; "
                f"these fit: {', '.join(fits)}"
            )


def _mlp(units: int) -> tuple[Net, Net]:
    what, hidden = f"two hidden layers of {units} units, ReLU", (units, units)
    return (
        Net(f"mlp-{units}", what, partial(_dense, hidden=hidden)),
        Net(f"mlp-{units}-dropout", f"{what}, dropout 0.5", partial(_dense, hidden=hidden, dropout=0.5)),
    )


_LENET, _LENET_CIFAR = (20, 50, 500), (192, 192, 1000)
_NETS = (
    Net("linear", "one linear layer: logistic or linear regression", partial(_dense, hidden=())),
    Net("mlp", "two hidden layers of 50 units, ReLU", partial(_dense, hidden=(50, 50))),
    Net(
        "mlp-dropout",
        "two hidden layers of 50 units, ReLU, dropout 0.1",
        partial(_dense, hidden=(50, 50), dropout=0.1),
    ),
    *(
        net
        for units in (50, 100)
        for net in (
            Net(f"relu-{units}", f"one hidden layer of {units} units, ReLU", partial(_dense, hidden=(units,))),
            Net(
                f"relu-{units}-dropout",
                f"one hidden layer of {units} units, ReLU, dropout 0.05",
                partial(_dense, hidden=(units,), dropout=0.05),
            ),
        )
    ),
    *(net for units in (400, 800, 1200) for net in _mlp(units)),
    Net(
        "tanh-20",
        "one hidden layer of 20 tanh units: the network of the HMC reference on cubic",
        partial(_dense, hidden=(20,), activation="Tanh"),
    ),
    Net(
        "digits",
        "two hidden layers of 100 units, ReLU: for the 8×8 digits",
        partial(_dense, hidden=(100, 100)),
    ),
    Net("conv", "3×3 convolutions 16 and 32, 64 units: for small images", _conv, 4),
    Net("lenet", "5×5 convolutions 20 and 50, 500 units", partial(_lenet, widths=_LENET), 16),
    Net(
        "lenet-dropout",
        "lenet with dropout: 0.25 on convolutions, 0.5 on units",
        partial(_lenet, widths=_LENET, dropout=True),
        16,
    ),
    *(
        Net(
            f"lenet-cifar{'-moved' * moved}{'-dropout' * dropout}",
            "5×5 convolutions 192 and 192, 1000 units" + ", dropout" * dropout + ", moved in training" * moved,
            partial(_lenet, widths=_LENET_CIFAR, dropout=dropout, moved=moved),
            16,
        )
        for moved in (False, True)
        for dropout in (False, True)
    ),
    Net("resnet-small", "three residual blocks (16, 32, 64 channels) with batch norm", _resnet, 8),
)
NETS: dict[str, Net] = {net.name: net for net in _NETS}


def build(name: str, shape: Shape, outputs: int, seed: int | None = None) -> nn.Module:
    """The network of a name for inputs (N, *shape) and ``outputs`` numbers."""
    if name not in NETS:
        close = get_close_matches(name, list(NETS), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no network {name!r}{hint}; the names are {', '.join(NETS)}")
    return NETS[name].build(shape, outputs, seed)


def default_net(dataset: DataSet) -> str:
    """The name of the network that a data set is usually tried with."""
    shape = dataset.input_shape
    if dataset.name == "cubic":
        return "tanh-20"
    if len(shape) != 3 or min(shape[1:]) < 4:
        return "mlp" if dataset.n >= 2000 or len(shape) == 3 else "relu-50"
    if min(shape[1:]) < 16:
        return "digits"
    return "lenet" if shape[0] == 1 else "lenet-cifar"
