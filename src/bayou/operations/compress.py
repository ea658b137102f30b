"""Compression of a posterior to a smaller plain network without its irrelevant units.

small = bayou.compress(posterior)          # an nn.Module of torch alone, in eval mode
print(small.compression)                   # layers, weights and multiply-adds before and after
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params
from bayou.network import call_network, forward_inputs
from bayou.operations.prune import Pruning
from bayou.operations.unit_graph import LAYERS, TRANSPOSED
from bayou.posteriors import Posterior

THRESHOLD = math.exp(-3)  # log α = 3 (Molchanov 2017): the variance is 20 times the squared mean
MAX_ROUNDING_ERRORS = 1000  # times eps: the largest difference of outputs that is rounding
Shape = tuple[int, ...]


@final
@dataclass(frozen=True)
class Compression:
    """The sizes of a network before and after ``compress``; pairs are (before, after).

    Args:
        layers: the shape of each weight by the name of its layer.
        numbers: how many numbers all parameters have.
        zeros: how many weights of the smaller network are 0.
        multiply_adds: of linear layers and convolutions for one row; None without ``example_x``.
        whole: the layers whose units all stay because they could not be followed, and why.
        bits: how many bits a number of each rounded tensor needs.
        bytes: of all parameters. After: by their bits; zeros by a mask of one bit a number where
            that is less.
        difference: the largest difference between the outputs with units removed and those with
            their weights at 0, on ``example_x``; None if the network was not run.
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
        """Format the sizes as a text of several lines."""
        before, after = self.numbers
        lines = [
            f"{before:,} → {after:,} numbers ({before / after:.1f}×), {self.zeros:,} of them at 0"
        ]
        if self.multiply_adds is not None:
            lines.append("{:,} → {:,} multiply-adds for a row".format(*self.multiply_adds))
        ratio = self.bytes[0] / self.bytes[1]
        lines.append(f"{self.bytes[0]:,} → {self.bytes[1]:,} bytes ({ratio:.0f}×)")
        if self.difference is None:
            lines.append(
                "not run: pass example_x to compare its outputs with those of the network it was "
                "made from"
            )
        lines += [f"{name}: {before} → {after}" for name, (before, after) in self.layers.items()]
        lines += [f"{name}: {bits} bits a number" for name, bits in self.bits.items()]
        lines += [f"{name} left whole: {reason}" for name, reason in self.whole.items()]
        return "\n".join(lines)


@torch.no_grad()
def compress(
    posterior: Posterior,
    threshold: float = THRESHOLD,
    *,
    bits: bool = False,
    example_x: object = None,
    samples: int = 256,
    seed: rng.Seed = 0,
) -> nn.Module:
    """Compress a posterior to a plain network at its mean, without irrelevant units and filters.

    A weight of a linear layer or a convolution is set to 0 if E[w]²/Var[w] < ``threshold``. A unit
    is removed if no layer uses it then, or if it has no inputs: it is then a constant, which is
    added to the biases of the next layer. Removing units therefore changes no output beyond the
    effect of the zeros. Each layer keeps at least one unit.

    Units are followed through linear layers, convolutions (depthwise ones too), batch norm,
    element-wise functions, pooling and flattening; units that are added are removed together. Other
    grouped convolutions and layers that share their weights have zeros, but keep their units. The
    smaller network is run once, and no units are removed if its outputs are others.
    ``compression.whole`` of the network names all layers that keep their units.

    Args:
        posterior: what to compress: VI with a sparse family, or any other posterior with one mean.
        threshold: the ratio E[w]²/Var[w] below which a weight is set to 0, by default e⁻³
            (log α > 3 for ``SparseVD``).
        bits: whether to round the numbers of each tensor to multiples of a step Δ = σ, with 1/σ²
            their mean posterior precision. The error has variance Δ²/12, which costs ½·Δ²/12σ² =
            1/24 nats a number, were the posterior Gaussian.
        example_x: inputs (B, ...) to run the smaller network on and to count multiply-adds. By
            default random rows, if the network begins with a linear layer.
        samples: draws that estimate moments without a closed form (for gains the ratio of a weight
            is at most that of its gain).
        seed: of these draws.

    Returns:
        A network of torch alone in eval mode, with a ``Compression`` as ``.compression``.

    Raises:
        ValueError: if the threshold is negative, or the posterior has several networks (an
            ensemble), so that the mean of the weights is none of them.

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.SparseVD()))
        >>> small = bayou.compress(posterior, bits=True)
        >>> print(small.compression)

    References:
        Molchanov, Ashukha, Vetrov: Variational dropout sparsifies deep neural networks, ICML 2017.
        Louizos, Ullrich, Welling: Bayesian compression for deep learning, NeurIPS 2017.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is a ratio E[w]²/Var[w] ≥ 0, got {threshold}")
    if posterior.members > 1:
        raise ValueError(
            f"{posterior!r} has no one network to compress: the mean of its weights is none of "
            "them; distill it into one, or fit VI(NormalJeffreys()), which empties units"
        )
    mean, std = _moments(posterior, samples, seed)
    net = posterior.to_module(mean).requires_grad_(False)
    calls: list[_LayerCall] = []
    if example_x is None:
        rows: object = _draw_inputs(net)
    else:
        rows = example_x
        calls = _layer_calls(net, example_x)
    matrix_norms = {call.name for call in calls if call.reads_matrix}

    def prune(reason_to_stay: str) -> tuple[Pruning, nn.Module]:
        """Return a pruned network, and one with the same weights and all units."""
        pruning = Pruning(copy.deepcopy(net), std, matrix_norms)
        pruning.prune(threshold, bits, reason_to_stay)
        unshrunk = copy.deepcopy(pruning.net)
        pruning.shrink()
        return pruning, unshrunk

    pruning, unshrunk = prune("")
    difference, fault = _compare(pruning.net, unshrunk, rows)
    if fault:
        pruning, unshrunk = prune(f"without its units {fault}")
        difference, _ = _compare(pruning.net, unshrunk, rows)
    if bits:
        pruning.round_biases()
    small = pruning.net
    multiply_adds = None
    if example_x is not None:
        multiply_adds = (_multiply_adds(calls), _multiply_adds(_layer_calls(small, example_x)))
    small.compression = _describe(net, pruning, multiply_adds, difference)  # type: ignore[assignment]
    return small.requires_grad_(True)


def _describe(
    net: nn.Module,
    pruning: Pruning,
    multiply_adds: tuple[int, int] | None,
    difference: float | None,
) -> Compression:
    """Return the sizes of a network and of the one that pruning made of it."""
    small = pruning.net
    numbers = _count_numbers(net)
    return Compression(
        layers={
            name: (_weight_shape(net, name), _weight_shape(small, name))
            for name in (*pruning.layers, *pruning.depthwise)
        },
        numbers=(numbers, _count_numbers(small)),
        zeros=pruning.count_zeros(),
        multiply_adds=multiply_adds,
        whole=pruning.unchanged_layers(),
        bits=pruning.bits,
        bytes=(
            numbers * next(net.parameters()).element_size(),
            _count_bytes(small, pruning.bits),
        ),
        difference=difference,
    )


def _compare(net: nn.Module, unshrunk: nn.Module, x: object) -> tuple[float | None, str]:
    """Compare the outputs of a network with those of the same weights and all units.

    Args:
        net: the network without units.
        unshrunk: the network with all units.
        x: the inputs; None if the networks are not run.

    Returns:
        The largest difference, None without one, and what is wrong if the outputs are not the same.
    """
    if x is None:
        return None, ""
    expected = _evaluate(unshrunk, x)
    try:
        outputs = _evaluate(net, x)
        gap = (outputs - expected).abs().nan_to_num(nan=0.0)  # infinite values must agree
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        return None, f"the network raises {type(error).__name__}: {message}"
    has_same_shape = outputs.shape == expected.shape
    if not has_same_shape or not torch.equal(outputs.isfinite(), expected.isfinite()):
        gap = torch.full_like(gap, torch.inf)
    difference = float(gap.max()) if gap.numel() else 0.0
    largest_output = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
    rounding = MAX_ROUNDING_ERRORS * torch.finfo(outputs.dtype).eps * (1 + largest_output)
    if difference <= rounding:
        return difference, ""
    return difference, f"the outputs differ by {difference:.2g}"


def _evaluate(net: nn.Module, x: object) -> Tensor:
    """Return the outputs for a copy of x, which the network may change in place."""
    inputs = tuple(item.clone() if isinstance(item, Tensor) else item for item in forward_inputs(x))
    outputs: Tensor = call_network(net, inputs)
    return outputs


def _draw_inputs(net: nn.Module) -> Tensor | None:
    """Return random rows for a network that begins with a linear layer; None for others."""
    first_layer = next((module for module in net.modules() if isinstance(module, LAYERS)), None)
    if not isinstance(first_layer, nn.Linear):
        return None
    x = rng.normal(2, (first_layer.in_features,), first_layer.weight, 0)
    try:
        return x if isinstance(_evaluate(net, x), Tensor) else None
    except Exception:  # it needs other inputs
        return None


class _LayerCall(NamedTuple):
    """A call of a layer, or of a batch norm: its name and module, and the shapes of its tensors."""

    name: str
    module: nn.Module
    inputs: torch.Size
    outputs: torch.Size

    @property
    def reads_matrix(self) -> bool:
        """Whether this is a batch norm of (N, units)."""
        return isinstance(self.module, nn.BatchNorm1d) and len(self.inputs) == 2


def _layer_calls(net: nn.Module, x: object) -> list[_LayerCall]:
    """Run the network on x and return the calls of its layers."""
    calls: list[_LayerCall] = []

    def record(name: str, module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        calls.append(_LayerCall(name, module, inputs[0].shape, outputs.shape))

    handles = [
        module.register_forward_hook(partial(record, name))
        for name, module in net.named_modules()
        if isinstance(module, (*LAYERS, nn.BatchNorm1d))
    ]
    try:
        _evaluate(net, x)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _multiply_adds(calls: list[_LayerCall]) -> int:
    """Return the multiply-adds of linear layers and convolutions for one row."""
    count = 0
    for _, module, inputs, outputs in calls:
        if isinstance(module, LAYERS):
            # The shape of the tensor in whose every position each weight is used once.
            shape = inputs if isinstance(module, TRANSPOSED) else outputs
            units = shape[-1 if isinstance(module, nn.Linear) else 1]
            count += module.weight.numel() * shape.numel() // (units * outputs[0])
    return count


def _moments(posterior: Posterior, samples: int, seed: rng.Seed) -> tuple[Params, Params]:
    """Return mean and standard deviation of each tensor, from draws if they have no closed form."""
    try:
        return dict(posterior.mean()), dict(posterior.std())
    except ValueError:  # no closed form
        if samples < 2:
            raise ValueError(f"moments need at least 2 draws, got samples={samples}") from None
    seed = rng.integer(seed)
    mean: Params = {}
    squares: Params = {}  # Σ (w − mean)²
    for count in range(1, samples + 1):  # Welford's updates: one draw at a time in memory
        for name, (value,) in posterior.sample(1, seed, count - 1).items():
            zeros = torch.zeros_like(value)
            old_mean = mean.get(name, zeros)
            mean[name] = old_mean + (value - old_mean) / count
            square = (value - old_mean) * (value - mean[name])
            squares[name] = squares.get(name, zeros) + square
    return mean, {name: (square / (samples - 1)).sqrt() for name, square in squares.items()}


def _count_bytes(net: nn.Module, bits: Mapping[str, int]) -> int:
    """Return the bytes of all parameters, given the bits of a number of each rounded tensor."""
    total = sum(_count_bits(value, bits.get(name)) for name, value in net.named_parameters())
    return math.ceil(total / 8)


def _count_bits(value: Tensor, width: int | None) -> int:
    """Return the bits of a tensor: dense, or as a mask of zeros with the other numbers.

    ``width``: the bits of a rounded number; a rounded tensor has its step, too.
    """
    full_width = 8 * value.element_size()
    number_width = width or full_width
    dense = value.numel() * number_width
    sparse = value.numel() + int((value != 0).sum()) * number_width
    step = 0 if width is None else full_width
    return min(dense, sparse) + step


def _count_numbers(net: nn.Module) -> int:
    """Return how many numbers all parameters have."""
    return sum(value.numel() for value in net.parameters())


def _weight_shape(net: nn.Module, name: str) -> Shape:
    """Return the shape of the weight of a layer."""
    return tuple(net.get_parameter(f"{name}.weight").shape)
