"""Local reparameterization without layers.

Linear and convolution calls draw their *output* instead of their weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bayou.core import rng
from bayou.core.files import no_grad_state, restore_state
from bayou.core.params import Params
from bayou.guides.guide import Weight
from bayou.network import Call, Watch
from bayou.priors.base import squares

LINEAR = {F.linear}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
OPERATIONS = LINEAR | CONVOLUTIONS | TRANSPOSED

# Layers that pass their whole weight and bias to one of the operations, once per call.
PLAIN_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
MIN_VARIANCE = 1e-20  # of an output, since the root of 0 has no gradient


class LocalReparameterization(TorchFunctionMode):
    """Draw the outputs of operations on a ``Weight``: N(x·(gain ⊙ mean), x²·std²) for every row.

    This is the distribution of each row under one draw of the weight, if a row uses the weight
    once; the positions of a convolution or a sequence have separate noise, too, which is an
    approximation (Kingma et al. 2015; Louizos & Welling 2017). A weight used by no operation, or
    by more than one, is an error: its noise would be missing or drawn twice.

    Args:
        weights: the weights by name; the network is called with their mean tensors.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__()
        self.weights = weights
        self.used: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in OPERATIONS:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        weight = self._find(call.weight)
        bias = self._find(call.bias)
        if weight is None and bias is None:
            return func(*args, **kwargs)
        w: Tensor = call.given["weight"]
        settings = {
            name: value
            for name, value in call.given.items()
            if name not in ("input", "weight", "bias")
        }
        operation = _Operation(lambda x, w, b: func(x, w, b, **settings), func)
        return draw_output(operation, call.x, w, call.bias, weight, bias)

    def _find(self, tensor: Tensor | None) -> Weight | None:
        """Return the ``Weight`` of a mean, by identity, and record that it is used.

        torch.compile does not support ``id`` of its own tensors.
        """
        for name, weight in self.weights.items():
            if weight.mean is tensor:
                self.used.append(name)
                return weight
        return None

    def finish(self) -> None:
        """Raise a ValueError unless every weight was used by exactly one operation."""
        counts = Counter(self.used)
        misused = [name for name in self.weights if counts[name] != 1]
        if misused:
            raise ValueError(
                f"{', '.join(map(repr, misused))} is not passed whole to exactly one linear or "
                "convolution call: its noise cannot be drawn at the output; pass example= an input "
                "so that it is sampled as a weight instead"
            )


@dataclass(frozen=True)
class _Operation:
    """A linear or convolution call with its settings.

    Args:
        call: computes the output of (x, w, b).
        func: the function of torch.
    """

    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    func: Any

    @property
    def is_linear(self) -> bool:
        """Return whether the features of x and of the output are on the last axis."""
        return self.func in LINEAR

    @property
    def out_axis(self) -> int:
        """Return the axis of output units of the weight."""
        return 1 if self.func in TRANSPOSED else 0


def draw_output(
    operation: _Operation,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    weight: Weight | None,
    bias: Weight | None,
) -> Tensor:
    """Draw the output of an operation for a weight and a bias that are Gaussian given their gains.

    Args:
        operation: the linear or convolution call.
        x: its input.
        w: its weight, or the mean of it.
        b: its bias, or the mean of it, if any.
        weight: the distribution of w; None if w is known.
        bias: the distribution of b; None if b is known or missing.
    """
    std_w = None if weight is None else weight.std
    std_b = None if bias is None else bias.std
    center = x
    output_gains: list[Tensor] = []  # per row
    bias_gains: list[Tensor] = []  # per row
    for gain in weight.gains if weight else ():
        if len(gain.z) == 1:
            w = w * gain.on(w)[0]
            if std_w is not None and weight.on_noise:  # type: ignore[union-attr]
                std_w = std_w * gain.on(w)[0]
        elif gain.axis == operation.out_axis:
            output_gains.append(gain.z)
        elif gain.axis == 1 - operation.out_axis:
            center = center * _align_rows(gain.z, x, operation.is_linear)
        else:
            raise ValueError(
                f"a gain along axis {gain.axis} of a weight cannot differ per row; "
                "use axis 0 or 1, or local=False"
            )
    for gain in bias.gains if bias else ():
        if len(gain.z) == 1:
            b = None if b is None else b * gain.z[0]
            if std_b is not None and bias.on_noise:  # type: ignore[union-attr]
                std_b = std_b * gain.z[0]
        else:
            bias_gains.append(gain.z)
    mean = _call_with_gains(operation, center, w, b, output_gains, bias_gains)
    noise_gains = bias_gains if bias and bias.on_noise else []
    if std_w is None:
        if std_b is None:
            return mean
        std = _shape_bias(std_b, w, mean, noise_gains, operation.is_linear)
        return mean + std * rng.normal_like(mean)
    var_w = squares(std_w)
    var_b = None if std_b is None else std_b.square()
    squared_noise_gains = [z.square() for z in noise_gains]
    if weight and weight.on_noise:
        squared_output_gains = [z.square() for z in output_gains]
        variance = _call_with_gains(
            operation, center.square(), var_w, var_b, squared_output_gains, squared_noise_gains
        )
    else:
        variance = _call_with_gains(operation, x.square(), var_w, var_b, [], squared_noise_gains)
    floor = max(MIN_VARIANCE, torch.finfo(variance.dtype).tiny)
    return mean + variance.clamp_min(floor).sqrt() * rng.normal_like(mean)


def _call_with_gains(
    operation: _Operation,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    output_gains: list[Tensor],
    bias_gains: list[Tensor],
) -> Tensor:
    """Compute the output with factors for each row on the product with the weight and the bias."""
    if not output_gains and not bias_gains:
        return operation.call(x, w, b)
    output = operation.call(x, w, None)
    for z in output_gains:
        output = output * _align_rows(z, output, operation.is_linear)
    if b is None:
        return output
    return output + _shape_bias(b, w, output, bias_gains, operation.is_linear)


def _shape_bias(
    b: Tensor, w: Tensor, output: Tensor, bias_gains: list[Tensor], is_linear: bool
) -> Tensor:
    """Return the contribution of a bias to the output, with factors for each row."""
    shift = b if is_linear else b.reshape(-1, *[1] * (w.ndim - 2))
    for z in bias_gains:
        shift = shift * _align_rows(z, output, is_linear)
    return shift


def _align_rows(z: Tensor, x: Tensor, is_linear: bool) -> Tensor:
    """Shape z (rows, D) to multiply x: (rows, ..., D) if linear, (rows, D, ...) if a convolution.

    The groups of a convolution share one axis of the weight, so z repeats for each of them.
    """
    if len(z) != len(x) or x.ndim < 2:
        raise ValueError(
            f"there are {len(z)} gains for {len(x)} rows of input; draw with examples={len(x)}"
        )
    ones = [1] * (x.ndim - 2)
    if is_linear:
        return z.reshape(len(z), *ones, -1)
    return z.repeat(1, x.shape[1] // z.shape[1]).reshape(len(z), -1, *ones)


def _takes_weight(call: Call) -> bool:
    """Return whether a call is an operation on a weight of two or more axes."""
    return call.func in OPERATIONS and call.weight is not None and call.weight.ndim >= 2


@dataclass(frozen=True)
class Trace:
    """How a network uses its tensors, as a dry run shows it.

    Args:
        local: tensors passed whole to exactly one operation.
        shared: those of ``local`` that a row of the input uses at several positions.
        used: tensors used at all.
    """

    local: frozenset[str]
    shared: frozenset[str]
    used: frozenset[str]


def trace(
    net: nn.Module, params: Params, inputs: tuple[Any, ...], call: Callable[..., Any]
) -> Trace:
    """Run ``call(params, *inputs)`` once and return how it uses the tensors.

    It runs in eval mode, so that running statistics do not change; tensors that are not used then
    are looked for in training mode (auxiliary heads), after which the statistics are restored.
    Torch's global stream is restored, too.

    Args:
        net: the network whose mode is set.
        params: the tensors, by name.
        inputs: inputs of the network.
        call: evaluates the network with parameters.
    """
    fresh = {name: tensor.detach().clone() for name, tensor in params.items()}
    device = next(iter(fresh.values())).device
    run = partial(_watch, net, fresh, lambda tensors: call(tensors, *inputs), device)
    watch = run()
    uses = watch.uses
    non_local = set(watch.other)
    if set(uses) | non_local != set(fresh):
        state = {name: buffer.clone() for name, buffer in no_grad_state(net).items()}
        try:
            training_watch = run(training=True)
        finally:
            restore_state(net, state)
        # Tensors used in training only must be sampled: at the output their noise would be missing
        # in eval mode.
        non_local |= training_watch.other
        non_local |= {
            name for name, count in training_watch.uses.items() if count != 1 or name not in uses
        }
    leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim)
    rows = next((len(leaf) for leaf in leaves), None)
    shared: set[str | None] = set()
    for operation, *names in watch.calls:
        if len(operation.x) != rows:  # rows are not examples: (B, T, D) became (B·T, D), say
            non_local.update(name for name in names if name is not None)
        elif operation.func not in LINEAR or operation.x.ndim != 2:
            shared.update(names)
    local = frozenset(name for name, count in uses.items() if count == 1 and name not in non_local)
    return Trace(local, local & shared, frozenset(set(uses) | non_local))


def _watch(
    net: nn.Module,
    params: Params,
    call: Callable[[Params], Any],
    device: torch.device,
    training: bool = False,
) -> Watch:
    """Record the operations of one call in the mode ``training``; the mode is restored."""
    watch = Watch(params, _takes_weight)
    was_training = {module: module.training for module in net.modules()}
    net.train(training)
    try:
        with torch.no_grad(), rng.isolated(0, device), watch:
            call(params)
    finally:
        for module, mode in was_training.items():
            module.training = mode
    return watch


def guess_trace(net: nn.Module, names: Iterable[str]) -> Trace:
    """Return how plain layers use their weights and biases, by their type and without a dry run.

    Args:
        net: the network.
        names: the tensors that have guides.
    """
    candidates = set(names)
    is_shared: dict[str, bool] = {}
    for prefix, module in net.named_modules():
        if type(module) not in PLAIN_LAYERS:
            continue
        for leaf in ("weight", "bias"):
            is_shared[f"{prefix}.{leaf}" if prefix else leaf] = not isinstance(module, nn.Linear)
    local = frozenset(is_shared) & candidates
    return Trace(local, frozenset(name for name in local if is_shared[name]), frozenset(candidates))
