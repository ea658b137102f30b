"""Local reparameterization without layers: linear and convolution calls draw their *output* instead of their weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from bayou import rng
from bayou.guides.guide import Layout, Weight
from bayou.params import Params

LINEAR = {F.linear}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
OPERATIONS = LINEAR | CONVOLUTIONS | TRANSPOSED

# Layers whose weight and bias reach one of the operations whole, each once per call.
PLAIN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Any, Any]:
    """Input, weight, bias of a linear or convolution call, and its other arguments."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, w, b = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    return x, w, b, args[3:], given


class LocalReparameterization(TorchFunctionMode):
    """Inside: an operation on a weight with a ``Weight`` draws N(x·(gain ⊙ mean), x²·std²), independent per row.

    (Kingma et al. 2015; Louizos & Welling 2017.) ``weights`` is keyed by the mean tensors that the network is called
    with. A weight that reaches no operation, or more than one, is an error: it would lose its noise or draw it twice.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__()
        self.weights = {id(weight.mean): weight for weight in weights.values()}
        self.names = {id(weight.mean): name for name, weight in weights.items()}
        self.used: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in OPERATIONS:
            return func(*args, **kwargs)
        x, w, b, rest, named = _arguments(args, kwargs)
        weight, bias = self.weights.get(id(w)), self.weights.get(id(b))
        if weight is None and bias is None:
            return func(*args, **kwargs)
        self.used += [id(tensor) for tensor, known in ((w, weight), (b, bias)) if known is not None]
        return noisy(lambda i, m, c: func(i, m, c, *rest, **named), func, x, w, b, weight, bias)

    def finish(self) -> None:
        """Raise unless every weight met exactly one operation."""
        counts = Counter(self.used)
        odd = [name for key, name in self.names.items() if counts[key] != 1]
        if odd:
            raise ValueError(
                f"{', '.join(map(repr, odd))} did not reach exactly one linear or convolution call whole, so its noise "
                "cannot be drawn at the output; pass example= an input so that it is sampled as a weight instead"
            )


def noisy(
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    func: Any,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    weight: Weight | None,
    bias: Weight | None,
) -> Tensor:
    """One draw of the output of ``call(x, w, b)`` for a weight and a bias that are Gaussian given their gains."""
    linear = func in LINEAR
    out_axis = 1 if func in TRANSPOSED else 0
    center, outputs = x, []
    for gain in weight.gains if weight else ():
        if len(gain.z) == 1:
            w = w * gain.on(w)[0]
        elif gain.axis == out_axis:
            outputs.append(gain.z)
        else:
            center = center * _rows(gain.z, x, linear)
    for gain in bias.gains if bias else ():
        if len(gain.z) != 1:
            raise ValueError("a bias cannot have a gain per example; use z='batch' for it, or Delta()")
        b = None if b is None else b * gain.z[0]
    if outputs:
        mean = call(center, w, None)
        for z in outputs:
            mean = mean * _rows(z, mean, linear)
        if b is not None:
            mean = mean + (b if linear else b.reshape(-1, *[1] * (mean.ndim - 2)))
    else:
        mean = call(center, w, b)
    std_w, std_b = (None if part is None else part.std for part in (weight, bias))
    if std_w is None and std_b is None:
        return mean
    var_b = None if std_b is None else std_b.square()
    if std_w is not None:
        variance = call(x.square(), std_w.square(), var_b)
        return mean + variance.clamp_min(1e-20).sqrt() * rng.normal_like(mean)
    spread = var_b.sqrt()  # type: ignore[union-attr]
    return mean + (spread if linear else spread.reshape(-1, *[1] * (mean.ndim - 2))) * rng.normal_like(mean)


def _rows(z: Tensor, x: Tensor, linear: bool) -> Tensor:
    """z (rows, D) shaped to multiply x: (rows, ..., D) for a linear call, (rows, D, ...) for a convolution."""
    if len(z) != len(x):
        raise ValueError(f"there are {len(z)} gains for {len(x)} rows of input; draw with examples={len(x)}")
    ones = [1] * (x.ndim - 2)
    return z.reshape(len(z), *ones, -1) if linear else z.reshape(len(z), -1, *ones)


class _Watch(TorchFunctionMode):
    """Records which tensors an operation takes whole as weight or bias, and which reach anything else."""

    def __init__(self, tensors: Params) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.local: Counter[str] = Counter()
        self.other: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # reading .shape or .dtype uses nothing
            if func in OPERATIONS:
                x, w, b, rest, named = _arguments(args, kwargs)
                self.local.update(self.names[id(t)] for t in (w, b) if id(t) in self.names)
                self.other.update(self._named((x, rest, named)))
            else:
                self.other.update(self._named((args, kwargs)))
        return func(*args, **kwargs)

    def _named(self, tree: Any) -> Iterable[str]:
        leaves, _ = torch.utils._pytree.tree_flatten(tree)
        return [self.names[id(leaf)] for leaf in leaves if id(leaf) in self.names]


def trace(net: nn.Module, params: Params, aliases: Mapping[str, str], x: Any) -> tuple[set[str], set[str]]:
    """One dry run: the tensors that reach exactly one operation whole, and those that are used at all."""
    fresh = {name: tensor.detach().clone() for name, tensor in params.items()}
    watch = _Watch(fresh)
    everything = fresh | {alias: fresh[name] for alias, name in aliases.items()}
    was_training = {module: module.training for module in net.modules()}
    net.eval()  # a dry run must not move running statistics
    try:
        with torch.no_grad(), watch:
            functional_call(net, everything, x if isinstance(x, tuple) else (x,))
    finally:
        for module, training in was_training.items():
            module.training = training
    local = {name for name, count in watch.local.items() if count == 1 and name not in watch.other}
    return local, set(watch.local) | watch.other


def guess_local(net: nn.Module, names: Iterable[str]) -> set[str]:
    """Without a dry run: weights and biases of plain linear and convolution layers, by the type of their owner."""
    wanted = set(names)
    return {
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, module in net.named_modules()
        if type(module) in PLAIN_LAYERS
        for leaf in ("weight", "bias")
        if (f"{prefix}.{leaf}" if prefix else leaf) in wanted
    }


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
