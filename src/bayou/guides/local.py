"""Local reparameterization without layers.

Linear and convolution calls draw their *output* instead of their weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from bayou.guides.guide import Gain, Weight
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


class TensorCalls(TorchFunctionMode):
    """Computes linear and convolution calls that take some tensors as weight or bias.

    Args:
        tensors: by name; a call has one of them if it is the same object.
        compute: the output of a call, from the call and the names of its weight and of its bias;
            None for a tensor that is none of them.
    """

    def __init__(
        self, tensors: Params, compute: Callable[[Call, str | None, str | None], Tensor]
    ) -> None:
        super().__init__()
        self.tensors = tensors
        self.compute = compute

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in OPERATIONS:
            call = Call(func, args, kwargs or {})
            weight = self._name(call.weight)
            bias = self._name(call.bias)
            if weight is not None or bias is not None:
                return self.compute(call, weight, bias)
        return func(*args, **(kwargs or {}))

    def _name(self, tensor: Tensor | None) -> str | None:
        """Return the name of a tensor.

        torch.compile does not support ``id`` of its own tensors.
        """
        for name, candidate in self.tensors.items():
            if candidate is tensor:
                return name
        return None


def sample_outputs(function: Callable[[Params], Tensor], weights: Mapping[str, Weight]) -> Tensor:
    """Call a function of tensors, with outputs drawn: N(x·(gain ⊙ mean), x²·std²) for every row.

    This is the distribution of each row under one draw of the weight, if a row uses the weight
    once; the positions of a convolution or a sequence have separate noise, too, which is an
    approximation (Kingma et al. 2015; Louizos & Welling 2017).

    Args:
        function: the network, which is called with the means of the weights.
        weights: the weights by name.

    Raises:
        ValueError: unless every weight is used by exactly one operation, since its noise would be
            missing or drawn twice.
    """
    used: list[str] = []

    def compute(call: Call, weight: str | None, bias: str | None) -> Tensor:
        used.extend(name for name in (weight, bias) if name is not None)
        return draw_output(
            call,
            None if weight is None else weights[weight],
            None if bias is None else weights[bias],
        )

    means = {name: weight.mean for name, weight in weights.items()}
    with TensorCalls(means, compute):
        output = function(means)
    counts = Counter(used)
    misused = [name for name in weights if counts[name] != 1]
    if misused:
        raise ValueError(
            f"{', '.join(map(repr, misused))} is not passed whole to exactly one linear or "
            "convolution call: its noise cannot be drawn at the output; pass example= an input "
            "so that it is sampled as a weight instead"
        )
    return output


def draw_output(call: Call, weight: Weight | None, bias: Weight | None) -> Tensor:
    """Draw the output of an operation for a weight and a bias that are Gaussian given their gains.

    Args:
        call: the linear or convolution call, with the means of the weight and the bias.
        weight: the distribution of the weight; None if it is known.
        bias: the distribution of the bias; None if it is known or missing.
    """
    w, std_w, weight_gains = _apply_shared_gains(call.weight, weight)
    b, std_b, bias_gains = _apply_shared_gains(call.bias, bias)
    out_axis = 1 if call.func in TRANSPOSED else 0
    center = call.x
    output_rows: list[Tensor] = []
    for gain in weight_gains:
        if gain.axis == out_axis:
            output_rows.append(gain.z)
        elif gain.axis == 1 - out_axis:
            center = center * _align_rows(gain.z, call.x, call)
        else:
            raise ValueError(
                f"a gain along axis {gain.axis} of a weight cannot differ per row; "
                "use axis 0 or 1, or local=False"
            )
    bias_rows = [gain.z for gain in bias_gains]
    mean = _call_with_gains(call, center, w, b, output_rows, bias_rows)
    noise_rows = bias_rows if bias is not None and bias.on_noise else []
    if weight is None or std_w is None:
        if std_b is None:
            return mean
        return mean + _shape_bias(call, std_b, mean, noise_rows) * rng.normal_like(mean)
    variance = _call_with_gains(
        call,
        center.square() if weight.on_noise else call.x.square(),
        squares(std_w),
        None if std_b is None else std_b.square(),
        [z.square() for z in output_rows] if weight.on_noise else [],
        [z.square() for z in noise_rows],
    )
    floor = max(MIN_VARIANCE, torch.finfo(variance.dtype).tiny)
    return mean + variance.clamp_min(floor).sqrt() * rng.normal_like(mean)


def _apply_shared_gains(
    value: Tensor | None, weight: Weight | None
) -> tuple[Tensor | None, Tensor | None, list[Gain]]:
    """Return mean and std with the gains that all rows share, and the gains that differ by row.

    Args:
        value: the tensor itself, if it has no distribution.
        weight: its distribution, if it has one.
    """
    if weight is None:
        return value, None, []
    mean = weight.mean
    std = weight.std
    row_gains: list[Gain] = []
    for gain in weight.gains:
        if len(gain.z) > 1:
            row_gains.append(gain)
            continue
        factor = gain.on(mean)[0]
        mean = mean * factor
        if std is not None and weight.on_noise:
            std = std * factor
    return mean, std, row_gains


def _call_with_gains(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    output_rows: list[Tensor],
    bias_rows: list[Tensor],
) -> Tensor:
    """Compute the output with factors for each row on the product with the weight and the bias."""
    has_gains = len(output_rows) + len(bias_rows) > 0
    arguments = {"input": x, "weight": w, "bias": None if has_gains else b}
    output: Tensor = call.func(**(call.given | arguments))
    for z in output_rows:
        output = output * _align_rows(z, output, call)
    if b is None or not has_gains:
        return output
    return output + _shape_bias(call, b, output, bias_rows)


def _shape_bias(call: Call, b: Tensor, output: Tensor, bias_rows: list[Tensor]) -> Tensor:
    """Return the contribution of a bias to the output, with factors for each row."""
    shift = b
    if call.func not in LINEAR:
        shift = b.reshape(-1, *[1] * (call.given["weight"].ndim - 2))
    for z in bias_rows:
        shift = shift * _align_rows(z, output, call)
    return shift


def _align_rows(z: Tensor, x: Tensor, call: Call) -> Tensor:
    """Shape z (rows, D) to multiply x: (rows, ..., D) if linear, (rows, D, ...) if a convolution.

    The groups of a convolution share one axis of the weight, so z repeats for each of them.
    """
    if len(z) != len(x) or x.ndim < 2:
        raise ValueError(
            f"there are {len(z)} gains for {len(x)} rows of input; draw with examples={len(x)}"
        )
    ones = [1] * (x.ndim - 2)
    if call.func in LINEAR:
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
