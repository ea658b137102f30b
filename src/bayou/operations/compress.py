"""Compression of a posterior to a smaller plain network without its irrelevant units.

small = bayou.compress(posterior)          # an nn.Module of torch alone, in eval mode
print(small.compression)                   # layers, weights and multiply-adds before and after
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params
from bayou.network import call_network, forward_inputs
from bayou.operations.follow import LAYERS, TRANSPOSED, Followed
from bayou.operations.prune import Pruning
from bayou.posteriors import Posterior

THRESHOLD = math.exp(-3)  # log α = 3 (Molchanov 2017): the variance is 20 times the squared mean
ROUNDING = 1000  # times eps: differences of outputs beyond it are no rounding
Shape = tuple[int, ...]


@final
@dataclass(frozen=True)
class Compression:
    """What ``compress`` did: pairs are before and after.

    ``layers``: the shape of each weight. ``numbers``: of all parameters. ``zeros``: weights at 0 in
    what remains.
    ``multiply_adds``: of linear layers and convolutions for one row; None without ``example_x``.
    ``whole``: what was left unchanged because its units could not be followed, and why. ``bits``:
    of a number of each rounded tensor.
    ``bytes``: of all parameters, after: by their bits, zeros by a mask of one bit a number where
    that is less.
    ``difference``: the largest one between outputs with units removed and with their weights at 0,
    on ``example_x``; None without inputs.
    """

    layers: dict[str, tuple[Shape, Shape]]
    numbers: tuple[int, int]
    zeros: int
    multiply_adds: tuple[int, int] | None
    whole: dict[str, str]
    bits: dict[str, int]
    bytes: tuple[int, int]
    difference: float | None = None

    def __str__(self) -> str:
        before, after = self.numbers
        lines = [
            f"{before:,} → {after:,} numbers ({before / after:.1f}×), {self.zeros:,} of them at 0"
        ]
        if self.multiply_adds is not None:
            lines.append("{:,} → {:,} multiply-adds for a row".format(*self.multiply_adds))
        lines.append(
            "{:,} → {:,} bytes ({:.0f}×)".format(*self.bytes, self.bytes[0] / self.bytes[1])
        )
        if self.difference is None:
            lines.append(
                "not run: pass example_x to compare its outputs with those of the network it was made from"
            )
        lines += [f"{name}: {before} → {after}" for name, (before, after) in self.layers.items()]
        lines += [f"{name}: {bits} bits a number" for name, bits in self.bits.items()]
        return "\n".join(lines + [f"{name} left whole: {why}" for name, why in self.whole.items()])


@torch.no_grad()
def compress(
    posterior: Posterior,
    threshold: float = THRESHOLD,
    *,
    bits: bool = False,
    example_x: Any = None,
    samples: int = 256,
    seed: rng.Seed = 0,
) -> nn.Module:
    """A network at the posterior mean without the units and filters that are irrelevant (Molchanov
    2017, Louizos 2017).

    A weight of a linear layer or a convolution with E[w]²/Var[w] < ``threshold`` (e⁻³: log α > 3
    for SparseVD) is set to 0. A unit is removed if then no layer uses it, or if it has no inputs:
    it is then a constant, which is added to the biases of the next layer. So removing units changes
    no output beyond the effect of the zeros. Each layer keeps at least one unit.

    Units are followed through linear layers, convolutions (depthwise ones too), batch norm,
    element-wise functions, pooling, flattening; units that are added are tied. Other grouped
    convolutions and layers that share their weights have zeros, but keep their units. What cannot
    be followed stays whole: ``.compression`` of the network names it. The
    smaller network is run once: layers whose removal changes the outputs stay whole, too.
    Where moments have no closed form (gains: the ratio of a weight is at most that of its gain, and
    is that where nothing else is random) they come from ``samples`` draws, by ``seed``.
    ``example_x``: a batch, to run the smaller network on and to count multiply-adds.

    ``bits``: round the numbers of each tensor to multiples of a step Δ = σ, 1/σ² their mean
    posterior precision. The error has variance Δ²/12, which costs ½·Δ²/12σ², 1/24 nats a number,
    were the posterior Gaussian.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is a ratio E[w]²/Var[w] ≥ 0, got {threshold}")
    if posterior.members > 1:
        raise ValueError(
            f"{posterior!r} has no one network to compress: the mean of its weights is none of them; distill it into "
            "one, or fit VI(NormalJeffreys()), which empties units"
        )
    mean, std = _moments(posterior, samples, seed)
    net = posterior.to_module(mean).requires_grad_(False)
    sample = _made_up(net) if example_x is None else example_x
    matrices = () if example_x is None else _matrices(net, example_x)

    def prune(work: Pruning) -> dict[str, int]:
        work.zero(threshold)
        work.remove()
        widths = work.round() if bits else {}
        work.remove()
        return widths

    def attempt(whole: Mapping[str, str]) -> _Attempt:
        return _Attempt(Pruning(copy.deepcopy(net), mean, std, matrices), whole, prune, sample)

    made = attempt({})
    if made.fault:  # find the layers that cause it, one at a time
        cut = made.cut
        alone = {
            name: attempt({other: "not yet" for other in cut if other != name}).fault
            for name in cut
        }
        faults = {name: f"without its units {fault}" for name, fault in alone.items() if fault}
        made = attempt(faults)
        if made.fault:
            made = attempt(
                dict.fromkeys(cut, f"without units of it and of others {made.fault}") | faults
            )
    work, small = made.work, made.work.net
    before = _sizes(net, work.followed, example_x)
    widths = made.widths | (work.round_biases() if bits else {})
    after = _sizes(small, work.followed, example_x)
    adds = None if before[2] is None or after[2] is None else (before[2], after[2])
    layers = {name: (before[0][name], after[0][name]) for name in before[0]}
    zeros = work.count_zeros()
    found = sum(_bits(p, widths.get(name)) for name, p in small.named_parameters())
    size = before[1] * next(net.parameters()).element_size(), math.ceil(found / 8)
    small.requires_grad_(True)
    small.compression = Compression(  # type: ignore[assignment]
        layers, (before[1], after[1]), zeros, adds, work.whole(), widths, size, made.difference
    )
    return small


@final
class _Attempt:
    """Units removed from a copy of a network, and the difference from the outputs with their
    weights at 0.
    """

    def __init__(
        self,
        work: Pruning,
        whole: Mapping[str, str],
        prune: Callable[[Pruning], dict[str, int]],
        sample: Any,
    ) -> None:
        self.work, self.difference, self.fault = work, None, ""
        groups = {name: layer.units for name, layer in work.layers.items()}
        for name, why in whole.items():
            groups[name].whole = groups[name].whole or why
        self.widths = prune(work)
        self.cut = list(
            {
                group: name for name, group in groups.items() if not bool(work.stays[group].all())
            }.values()
        )
        masked = copy.deepcopy(work.net)
        work.shrink()
        if sample is None:
            return
        expected = _call(masked, sample)
        try:
            found = _call(work.net, sample)
            gap = (found - expected).abs().nan_to_num(nan=0.0)  # infinite values must agree
            if found.shape != expected.shape or not torch.equal(
                found.isfinite(), expected.isfinite()
            ):
                gap = torch.full_like(gap, torch.inf)
        except RuntimeError as error:
            self.fault = f"the network raises {type(error).__name__}: {str(error).splitlines()[0]}"
            return
        self.difference = float(gap.max()) if gap.numel() else 0.0
        allowed = (
            ROUNDING
            * torch.finfo(found.dtype).eps
            * (1 + float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        )
        if not self.difference <= allowed:
            self.fault = f"the outputs differ by {self.difference:.2g}"


def _call(net: nn.Module, x: Any) -> Tensor:
    out: Tensor = call_network(
        net, tuple(item.clone() if isinstance(item, Tensor) else item for item in forward_inputs(x))
    )
    return out


def _made_up(net: nn.Module) -> Tensor | None:
    """Rows for a network that begins with a linear layer and takes them; None for others."""
    first = next((module for module in net.modules() if isinstance(module, LAYERS)), None)
    if not isinstance(first, nn.Linear):
        return None
    x = rng.normal(2, (first.in_features,), first.weight, 0)
    try:
        return x if isinstance(_call(net, x), Tensor) else None
    except Exception:  # it needs other inputs
        return None


def _hooked(
    net: nn.Module, kinds: Any, hook: Callable[[str, Any, Any, Tensor], None], x: Any
) -> None:
    """Run the network on x with ``hook(name, module, inputs, output)`` after each module of these
    kinds.
    """
    handles = [
        module.register_forward_hook(partial(hook, name))
        for name, module in net.named_modules()
        if isinstance(module, kinds)
    ]
    try:
        _call(net, x)
    finally:
        for handle in handles:
            handle.remove()


def _matrices(net: nn.Module, x: Any) -> Collection[str]:
    """The batch norms that read (N, units)."""
    found: set[str] = set()

    def note(name: str, module: Any, inputs: Any, out: Tensor) -> None:
        if inputs[0].ndim == 2:
            found.add(name)

    _hooked(net, nn.BatchNorm1d, note, x)
    return found


def _moments(posterior: Posterior, samples: int, seed: rng.Seed) -> tuple[Params, Params]:
    try:
        return dict(posterior.mean()), dict(posterior.std())
    except ValueError:  # no closed form
        if samples < 2:
            raise ValueError(f"moments need at least 2 draws, got samples={samples}") from None
    mean: Params = {}
    spread: Params = {}
    count, seed = 0, rng.integer(seed)
    while count < samples:  # Welford's updates: one draw at a time in memory
        count += 1
        for name, (value,) in posterior.sample(1, seed, count - 1).items():
            old = mean.get(name, torch.zeros_like(value))
            mean[name] = old + (value - old) / count
            spread[name] = spread.get(name, torch.zeros_like(value)) + (value - old) * (
                value - mean[name]
            )
    return mean, {name: (value / (samples - 1)).sqrt() for name, value in spread.items()}


def _bits(p: Tensor, width: int | None) -> int:
    """Of a tensor: as it is, or a mask of zeros and the others; a rounded one has its step beside
    it.
    """
    each = 8 * p.element_size()
    found = min(p.numel() * (width or each), p.numel() + int((p != 0).sum()) * (width or each))
    return found + (0 if width is None else each)


def _sizes(net: nn.Module, followed: Followed, x: Any) -> tuple[dict[str, Shape], int, int | None]:
    """Shapes of weights, all numbers, and multiply-adds for a row."""
    adds: list[int] = []

    def count(name: str, module: Any, inputs: Any, out: Tensor) -> None:
        at = (
            inputs[0] if isinstance(module, TRANSPOSED) else out
        )  # where each weight is used once for every position
        units = at.shape[-1 if isinstance(module, nn.Linear) else 1]
        adds.append(module.weight.numel() * at.numel() // (units * len(out)))

    if x is not None:
        _hooked(net, LAYERS, count, x)
    names = [*followed.layers, *followed.depthwise]
    shapes = {name: tuple(net.get_submodule(name).weight.shape) for name in names}  # type: ignore
    return shapes, sum(p.numel() for p in net.parameters()), sum(adds) if x is not None else None
