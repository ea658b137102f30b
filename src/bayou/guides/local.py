"""Local reparameterization without layers: linear and convolution calls draw their *output* instead
of their weight.
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

from bayou import rng
from bayou.files import no_grad_state, restore_state
from bayou.guides.guide import Weight
from bayou.network import Call, Watch
from bayou.params import Params
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


class LocalReparameterization(TorchFunctionMode):
    """Inside: an operation on a weight with a ``Weight`` draws N(x·(gain ⊙ mean), x²·std²),
    independent per row.

    (Kingma et al. 2015; Louizos & Welling 2017.) This is the distribution of each row under one
    draw of the weight, if a row uses the weight once; the positions of a convolution or a sequence
    have separate noise, too, which is an approximation. ``weights`` is keyed by the mean tensors
    that the network is called with. A weight used by no operation, or more than one, is an error:
    its noise would be missing or drawn twice.
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
        weight, bias = self._find(call.weight), self._find(call.bias)
        if weight is None and bias is None:
            return func(*args, **kwargs)
        w: Tensor = call.given["weight"]
        settings = {k: v for k, v in call.given.items() if k not in ("input", "weight", "bias")}
        return noisy(
            lambda x, w, b: func(x, w, b, **settings), func, call.x, w, call.bias, weight, bias
        )

    def _find(self, tensor: Tensor | None) -> Weight | None:
        """The ``Weight`` of a mean, by identity: torch.compile does not support ``id`` of its own
        tensors.
        """
        for name, weight in self.weights.items():
            if weight.mean is tensor:
                self.used.append(name)
                return weight
        return None

    def finish(self) -> None:
        """Raise unless every weight was used by exactly one operation."""
        counts = Counter(self.used)
        odd = [name for name in self.weights if counts[name] != 1]
        if odd:
            raise ValueError(
                f"{', '.join(map(repr, odd))} is not passed whole to exactly one linear or convolution call: its noise "
                "cannot be drawn at the output; pass example= an input so that it is sampled as a weight instead"
            )


Operation = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def noisy(
    call: Operation,
    func: Any,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    weight: Weight | None,
    bias: Weight | None,
) -> Tensor:
    """One draw of the output of ``call(x, w, b)`` for a weight and a bias that are Gaussian given
    their gains.
    """
    linear = func in LINEAR
    out_axis = 1 if func in TRANSPOSED else 0
    std_w, std_b = (None if part is None else part.std for part in (weight, bias))
    center, outputs, shifts = x, [], []  # gains per row on the inputs, on the outputs, on the bias
    for gain in weight.gains if weight else ():
        if len(gain.z) == 1:
            w = w * gain.on(w)[0]
            std_w = std_w * gain.on(w)[0] if std_w is not None and weight.on_noise else std_w  # type: ignore[union-attr]
        elif gain.axis == out_axis:
            outputs.append(gain.z)
        elif gain.axis == 1 - out_axis:
            center = center * _rows(gain.z, x, linear)
        else:
            raise ValueError(
                f"a gain along axis {gain.axis} of a weight cannot differ per row; use axis 0 or 1, or local=False"
            )
    for gain in bias.gains if bias else ():
        if len(gain.z) == 1:
            b = None if b is None else b * gain.z[0]
            std_b = std_b * gain.z[0] if std_b is not None and bias.on_noise else std_b  # type: ignore[union-attr]
        else:
            shifts.append(gain.z)
    mean = _gained(call, center, w, b, outputs, shifts, linear)
    if std_w is None and std_b is None:
        return mean
    shifts = shifts if bias and bias.on_noise else []
    if std_w is None:
        return mean + _shift(std_b, w, mean, shifts, linear) * rng.normal_like(mean)  # type: ignore[arg-type]
    var_w, var_b, shifts = (
        squares(std_w),
        None if std_b is None else std_b.square(),
        [z.square() for z in shifts],
    )
    if weight and weight.on_noise:
        variance = _gained(
            call, center.square(), var_w, var_b, [z.square() for z in outputs], shifts, linear
        )
    else:
        variance = _gained(call, x.square(), var_w, var_b, [], shifts, linear)
    floor = max(1e-20, torch.finfo(variance.dtype).tiny)  # the root of 0 has no gradient
    return mean + variance.clamp_min(floor).sqrt() * rng.normal_like(mean)


def _gained(
    call: Operation,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    outputs: list[Tensor],
    shifts: list[Tensor],
    linear: bool,
) -> Tensor:
    """The call with factors for each row on the product with the weight and on the bias."""
    if not outputs and not shifts:
        return call(x, w, b)
    out = call(x, w, None)
    for z in outputs:
        out = out * _rows(z, out, linear)
    return out if b is None else out + _shift(b, w, out, shifts, linear)


def _shift(b: Tensor, w: Tensor, out: Tensor, shifts: list[Tensor], linear: bool) -> Tensor:
    """The contribution of a bias to the output, with factors for each row."""
    shift = b if linear else b.reshape(-1, *[1] * (w.ndim - 2))
    for z in shifts:
        shift = shift * _rows(z, out, linear)
    return shift


def _rows(z: Tensor, x: Tensor, linear: bool) -> Tensor:
    """z (rows, D) shaped to multiply x: (rows, ..., D) for a linear call, (rows, D, ...) for a
    convolution.

    The groups of a convolution share one axis of the weight, so z repeats for each of them.
    """
    if len(z) != len(x) or x.ndim < 2:
        raise ValueError(
            f"there are {len(z)} gains for {len(x)} rows of input; draw with examples={len(x)}"
        )
    ones = [1] * (x.ndim - 2)
    if linear:
        return z.reshape(len(z), *ones, -1)
    return z.repeat(1, x.shape[1] // z.shape[1]).reshape(len(z), -1, *ones)


def _whole(call: Call) -> bool:
    return call.func in OPERATIONS and call.weight is not None and call.weight.ndim >= 2


@dataclass(frozen=True)
class Trace:
    """The result of a dry run: tensors passed whole to exactly one operation, and tensors used at
    all.

    ``shared``: those of ``local`` that a row of the input uses at several positions.
    """

    local: frozenset[str]
    shared: frozenset[str]
    used: frozenset[str]


def trace(
    net: nn.Module, params: Params, inputs: tuple[Any, ...], call: Callable[..., Any]
) -> Trace:
    """One dry run of ``call(params, *inputs)``.

    It runs in eval mode, so that running statistics do not change; tensors that are not used then
    are looked for in training mode (auxiliary heads), after which the statistics are restored.
    Torch's global stream is restored, too.
    """
    fresh = {name: tensor.detach().clone() for name, tensor in params.items()}
    device = next(iter(fresh.values())).device
    run = partial(_watch, net, fresh, lambda given: call(given, *inputs), device)
    first = run()
    local, other = first.uses, set(first.other)
    if set(local) | other != set(fresh):
        state = {name: buffer.clone() for name, buffer in no_grad_state(net).items()}
        try:
            again = run(training=True)
        finally:
            restore_state(net, state)
        # Tensors used in training only must be sampled: at the output their noise would be missing
        # in eval mode.
        other |= again.other | {
            name for name, count in again.uses.items() if count != 1 or name not in local
        }
    rows = next(
        (len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), None
    )
    shared = set()
    for seen, *names in first.calls:
        if len(seen.x) != rows:  # rows are not examples: (B, T, D) became (B·T, D), say
            other.update(name for name in names if name is not None)
        elif seen.func not in LINEAR or seen.x.ndim != 2:
            shared.update(names)
    whole = frozenset(name for name, count in local.items() if count == 1 and name not in other)
    return Trace(whole, whole & shared, frozenset(set(local) | other))


def _watch(
    net: nn.Module,
    params: Params,
    call: Callable[[Params], Any],
    device: torch.device,
    training: bool = False,
) -> Watch:
    watch = Watch(params, _whole)
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
    """Without a dry run: weights and biases of plain linear and convolution layers, by the type of
    their owner.
    """
    wanted, found = set(names), {}
    for prefix, module in net.named_modules():
        for leaf in ("weight", "bias") if type(module) in PLAIN_LAYERS else ():
            found[f"{prefix}.{leaf}" if prefix else leaf] = not isinstance(module, nn.Linear)
    local = frozenset(found) & wanted
    return Trace(local, frozenset(name for name in local if found[name]), frozenset(wanted))
