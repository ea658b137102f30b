"""Features of a posterior: what the last layer of each of its functions reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.interception import Intercept
from bayou.network import call_network, rows_of
from bayou.network.watch import Call
from bayou.posteriors import Posterior

BATCH_ROWS = 1000  # whose features are computed at a time
INPUTS = "inputs"  # the name of the inputs of the network as a layer
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
LAYERS = (F.linear, *CONVOLUTIONS)


@final
@dataclass(frozen=True, eq=False)
class Features:
    """What a layer of one function reads at B rows.

    Args:
        values: z, (B, D) in float64.
        weight: of the layer, (O, D), if it is a linear layer that reads one vector for each row
            and is the last one; None of any other.
        bias: of this layer, (O,); None without one.
    """

    values: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


class _LastCall(Intercept):
    """Keeps the last call of a linear layer or a convolution in its block."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__(self._handle)
        self.weight = weight
        self.call: Call | None = None
        self.is_last = False  # whether no other layer was called after it

    def _handle(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and keep it if it is one of the layer."""
        if func in LAYERS:
            call = Call(func, args, kwargs)
            self.is_last = self.weight is None or call.weight is self.weight
            if self.is_last:
                self.call = call
        return func(*args, **kwargs)


def feature_networks(posterior: Posterior, functions: int, seed: int) -> Iterator[nn.Module]:
    """Yield the networks whose features are used.

    A posterior with one representative set of weights (``to_module()``: the point of MAP, the mode
    of Laplace, the mean of VI, MC dropout without masks) has one network. All others (ensembles,
    chains, mixtures, families such as MNF whose mean has no closed form) have draws: features of
    different draws belong to different bases, so that they are never averaged; scores of them are.

    Args:
        posterior: the posterior.
        functions: the largest number of draws.
        seed: of the draws.
    """
    network = _representative(posterior)
    if network is not None:
        yield network
        return
    count = min(functions, posterior.draws or functions)
    for index in range(count):
        stack = posterior.sample(1, seed, index)
        yield posterior.to_module({name: value[0] for name, value in stack.items()})


def _representative(posterior: Posterior) -> nn.Module | None:
    """Return the network with the representative weights; None if there are none."""
    if posterior.members > 1:
        return None
    try:
        return posterior.to_module()
    except ValueError:  # the mean has no closed form
        return None


@torch.no_grad()
def compute_features(
    posterior: Posterior,
    network: nn.Module,
    inputs: tuple[Any, ...],
    layer: str | None,
    seed: rng.Seed = 0,
) -> Features:
    """Compute the features of all rows in one function.

    z is the input of the last call of a linear layer or a convolution; its axes between the first
    and the last one (those of positions, behind the channels of a convolution) are averaged. A
    network without such a call, for example one of infinite width, has its inputs as features.

    Args:
        posterior: of the network.
        network: one of ``feature_networks``.
        inputs: the arguments of the network, for B rows.
        layer: the name of another layer; "inputs": the inputs of the network.
        seed: of a network that draws random numbers.

    Raises:
        ValueError: if there is no such layer, or it does not read one row for each row of x.
    """
    if layer == INPUTS:
        return Features(_flatten_inputs(inputs))
    weight = None if layer is None else _layer_weight(network, layer)
    batches = []
    for first in range(0, len(inputs[0]), BATCH_ROWS):
        batch = rows_of(inputs, slice(first, first + BATCH_ROWS))
        last = _LastCall(weight)
        with posterior.seed_network(batch, seed), last:
            call_network(network, batch)
        if last.call is None and layer is None:
            return Features(_flatten_inputs(inputs))
        batches.append(_features_of(last, len(batch[0]), layer))
    values = torch.cat([features.values for features in batches])
    return Features(values, batches[0].weight, batches[0].bias)


def _features_of(last: _LastCall, rows: int, layer: str | None) -> Features:
    """Return the input of a call as (rows, D), with the weights of a last linear layer."""
    call = last.call
    if call is None:
        raise ValueError(f"the network does not call the layer {layer!r} with its weight")
    x = call.x.detach()
    if x.ndim == 1 or not len(x) or len(x) % rows:
        raise ValueError(
            f"features need one row for each of {rows} rows of x, but the layer reads "
            f"{tuple(x.shape)}; name another layer: layer='...', or layer='inputs'"
        )
    if call.func in CONVOLUTIONS:
        x = x.movedim(1, -1)
    is_one_vector = call.func is F.linear and x.ndim == 2 and len(x) == rows
    values = x.double().reshape(rows, -1, x.shape[-1]).mean(1)
    if not (is_one_vector and last.is_last) or call.weight is None:
        return Features(values)
    bias = None if call.bias is None else call.bias.detach().double()
    return Features(values, call.weight.detach().double(), bias)


def _layer_weight(network: nn.Module, layer: str) -> Tensor:
    """Return the weight of a layer by its name."""
    modules = dict(network.named_modules())
    weight = getattr(modules.get(layer), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        names = [
            name
            for name, module in modules.items()
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim > 1
        ]
        raise ValueError(
            f"layer must name a linear layer or a convolution of the network ({', '.join(names)}), "
            f"or be {INPUTS!r}, got {layer!r}"
        )
    return weight


def _flatten_inputs(inputs: tuple[Any, ...]) -> Tensor:
    """Return the numbers of all inputs of every row, (B, D) in float64."""
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    if not all(item.is_floating_point() for item in tensors):
        raise ValueError(
            "inputs are features only if they are real numbers; name a layer: layer='...'"
        )
    return torch.cat([item.double().flatten(1) for item in tensors], 1)
