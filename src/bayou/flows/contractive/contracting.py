"""Contractive networks: layers whose Lipschitz constant is bounded for all weights.

A network computes its norms once per pass: ``freeze`` returns it as a function of explicit tensors,
with products with its Jacobian.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn.functional import conv2d, linear, sigmoid, softplus

from bayou.flows.core.arguments import promote
from bayou.flows.core.implicit import with_derivatives

# The Schatten norm of order p = 2·(2⁷ + 1) is within d^(1/258) of the largest singular value.
SQUARINGS = 7
SQUARINGS_PER_RESCALING = 3
MAX_SWISH_SLOPE = 1.0998393  # of x·sigmoid(x)
INITIAL_BETA = 10.0  # of LipSwish in a network: see ``_initialize``
INITIAL_BIAS_STD = 0.2
INITIAL_LAST_NORM = 0.1  # of the last layer, as a fraction of L
# Of hidden layers, as a fraction of L; at 1 the slope of min(1, L/‖W‖) is discontinuous.
INITIAL_NORM = 0.999
OUTER_KERNEL = 3  # of the first and the last convolution of a network
FREQUENCIES = 16  # per axis in the norm of a convolution: 4 % above the norm of a 3×3 kernel

PullbackStep = Tensor | Callable[[Tensor], Tensor]  # slopes, or the transpose of a linear layer


@dataclass
class FrozenLayer(ABC):
    """A layer as a function of explicit tensors, with products with its Jacobian."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the output of the layer."""

    @abstractmethod
    def pullback(self, x: Tensor) -> tuple[Tensor, PullbackStep]:
        """Return the output, and u ↦ uᵀ ∂/∂x as slopes to multiply by, or as a function."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the layer is a function of."""
        return [getattr(self, name) for name in self._tensor_names()]

    def with_tensors(self, values: Iterable[Tensor]) -> FrozenLayer:
        """Return the layer with the next values as its ``tensors``.

        An iterator is advanced by as many values as the layer has tensors.
        """
        return replace(self, **dict(zip(self._tensor_names(), values, strict=False)))

    def _tensor_names(self) -> list[str]:
        return [field.name for field in fields(self) if torch.is_tensor(getattr(self, field.name))]


@dataclass
class FrozenSwish(FrozenLayer):
    """The activation x·sigmoid(β·x)/1.1 with β = softplus(raw).

    Args:
        raw: ().
    """

    raw: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * sigmoid(softplus(self.raw) * x) / MAX_SWISH_SLOPE

    def pullback(self, x: Tensor) -> tuple[Tensor, PullbackStep]:
        beta = softplus(self.raw)
        s = sigmoid(beta * x)
        y = x * s / MAX_SWISH_SLOPE
        return y, torch.addcmul(s / MAX_SWISH_SLOPE, beta * y, 1 - s)


class FrozenTanh(FrozenLayer):
    """The activation tanh(x)."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def pullback(self, x: Tensor) -> tuple[Tensor, PullbackStep]:
        y = torch.tanh(x)
        return y, 1 - y.square()


@dataclass
class FrozenLinear(FrozenLayer):
    """The linear layer x·Wᵀ + b, with the transpose u·W.

    Args:
        weight: W (outputs, inputs).
        bias: b (outputs,).
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def pullback(self, x: Tensor) -> tuple[Tensor, PullbackStep]:
        return self(x), self.transpose

    def transpose(self, u: Tensor) -> Tensor:
        """Return uᵀ ∂/∂x."""
        return u @ self.weight


@dataclass
class FrozenConvolution(FrozenLayer):
    """A convolution of (..., C, H, W) that preserves H and W.

    Its transpose is the convolution with the flipped kernel.

    Args:
        weight: the kernel (outputs, inputs, size, size).
        bias: (outputs,), or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __post_init__(self) -> None:
        # here, since the first product may be under no_grad
        self.flipped: Tensor = self.weight.flip(-1, -2).transpose(0, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return _convolve(x, self.weight, self.bias)

    def pullback(self, x: Tensor) -> tuple[Tensor, PullbackStep]:
        return self(x), self.transpose

    def transpose(self, u: Tensor) -> Tensor:
        """Return uᵀ ∂/∂x."""
        return _convolve(u, self.flipped, None)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of (..., C, H, W) with zero padding that preserves H and W."""
    images = x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])
    y = conv2d(images, weight, bias, padding=weight.shape[-1] // 2)
    if x.ndim == 4:
        return y
    return y.reshape(*x.shape[:-3], *y.shape[1:])


@dataclass
class FrozenRearrangement(FrozenLayer):
    """A permutation of the numbers of an image, with its inverse, which is its transpose.

    Args:
        apply: the permutation.
        undo: its inverse.
    """

    apply: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x)

    def pullback(self, x: Tensor) -> tuple[Tensor, PullbackStep]:
        return self.apply(x), self.undo


def freeze(layer: nn.Module) -> FrozenLayer:
    """Return a layer as a function of its current tensors.

    Args:
        layer: a layer of this module, a linear layer, tanh, or a pixel shuffle of torch.

    Raises:
        TypeError: for another layer.
    """
    if isinstance(layer, Freezable):
        return layer.freeze()
    if isinstance(layer, nn.Linear):
        return FrozenLinear(layer.weight, layer.bias)
    if isinstance(layer, nn.Tanh):
        return FrozenTanh()
    if isinstance(layer, nn.PixelUnshuffle):
        return FrozenRearrangement(layer, nn.PixelShuffle(layer.downscale_factor))
    if isinstance(layer, nn.PixelShuffle):
        return FrozenRearrangement(layer, nn.PixelUnshuffle(layer.upscale_factor))
    raise TypeError(f"a contractive network has no layers of {type(layer).__name__}")


class Freezable(nn.Module, ABC):
    """A layer or network that is computed from its current weights in every call."""

    @abstractmethod
    def freeze(self) -> FrozenLayer:
        """Return the module as a function, with its norms computed once for many calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of the module.

        Args:
            x: its inputs.
        """
        return self.freeze()(x)


class LipSwish(Freezable):
    """The activation x·sigmoid(β·x)/1.1, with slopes in [−1, 1] and a learned β > 0.

    Chen et al. 2019.

    Args:
        beta: the initial β; 1 by default.

    Shapes: any.
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        raw = beta + math.log(-math.expm1(-beta))  # softplus(raw) = β
        self.raw: nn.Parameter = nn.Parameter(torch.tensor(raw))

    def freeze(self) -> FrozenSwish:
        return FrozenSwish(self.raw)


class Contracting(Freezable, nn.Linear):
    """A linear layer x·Wᵀ·min(1, L/‖W‖) + b, whose Lipschitz constant is L at most.

    ‖W‖ is the Schatten norm (Σ σ^258)^(1/258), an upper bound of the largest singular value σ,
    tight to a factor d^(1/258), 1.6 % for d = 64. Power iteration is cheaper for large layers but
    gives a lower bound.

    Args:
        inputs: the size of the last axis of the input.
        outputs: the size of the last axis of the output.
        lipschitz: L.

    Shapes: (..., inputs) to (..., outputs).

    Example:
        >>> import torch
        >>> from bayou.flows import Contracting
        >>> Contracting(3, 5, lipschitz=0.9)(torch.zeros(10, 3)).shape
        torch.Size([10, 5])
    """

    def __init__(self, inputs: int, outputs: int, lipschitz: float) -> None:
        super().__init__(inputs, outputs)
        self.lipschitz = lipschitz

    def bound(self) -> Tensor:
        """Return an upper bound () of the norm of the unscaled weights."""
        return schatten(self.weight)

    def freeze(self) -> FrozenLinear:
        return FrozenLinear(_scale_weight(self.weight, self.bound(), self.lipschitz), self.bias)


class ContractingConv(Freezable, nn.Conv2d):
    """A convolution with the kernel K·min(1, L/‖K‖), whose Lipschitz constant is L at most.

    It pads images with zeros to preserve their size. ‖K‖ bounds the norm of the convolution for
    images of any size: the largest Schatten norm of the matrices K(ω) on a grid of M×M frequencies,
    divided by cos²(π·d/M), d = half the kernel, to cover the frequencies in between (near its
    maximum a trigonometric polynomial of degree d decreases no faster than a cosine, M. Riesz
    1914).

    Args:
        inputs: the number of channels of the input.
        outputs: the number of channels of the output.
        kernel: the odd size of the kernel.
        lipschitz: L.
        grid: M, at least twice the kernel; 16 by default.

    Shapes: (..., inputs, H, W) to (..., outputs, H, W).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        lipschitz: float,
        grid: int = FREQUENCIES,
    ) -> None:
        if kernel % 2 == 0 or grid < 2 * kernel:
            raise ValueError(
                "ContractingConv needs an odd kernel and a grid of twice its size or more, got "
                f"kernel={kernel}, grid={grid}"
            )
        super().__init__(inputs, outputs, kernel, padding=kernel // 2)
        self.lipschitz = lipschitz
        self.grid = grid

    def bound(self) -> Tensor:
        """Return an upper bound () of the norm of the convolution with the unscaled weights."""
        half = self.kernel_size[0] // 2
        if half == 0:
            return schatten(self.weight[..., 0, 0])
        waves = torch.fft.rfft2(promote(self.weight), s=(self.grid, self.grid))
        waves = waves.permute(2, 3, 0, 1)  # (M, M/2 + 1, O, I)
        return schatten(waves).amax() / math.cos(math.pi * half / self.grid) ** 2

    def freeze(self) -> FrozenConvolution:
        weight = _scale_weight(self.weight, self.bound(), self.lipschitz)
        return FrozenConvolution(weight, self.bias)


class ContractingNet(Freezable, nn.Sequential):
    """A sequence of layers that computes their norms once per pass."""

    def freeze(self) -> FrozenNet:
        return FrozenNet([freeze(layer) for layer in self])


@dataclass
class FrozenNet(FrozenLayer):
    """A network as a function of explicit tensors, with products with its Jacobian.

    Args:
        layers: its layers, in order.
    """

    layers: Sequence[FrozenLayer]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors()]

    def with_tensors(self, values: Iterable[Tensor]) -> FrozenNet:
        values = iter(values)
        return FrozenNet([layer.with_tensors(values) for layer in self.layers])

    def pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Return g(x), and u ↦ uᵀ ∂g/∂x for u with any additional leading dimensions.

        Args:
            x: the input of the network.
        """
        steps: list[PullbackStep] = []
        for layer in self.layers:
            x, step = layer.pullback(x)
            steps.append(step)
        return x, Pullback(steps[::-1])


@dataclass
class Pullback:
    """The product u ↦ uᵀ ∂g/∂x at the rows of x.

    Args:
        steps: transposed layers and slopes of the activations, from the last layer to the first.
    """

    steps: Sequence[PullbackStep]

    def __call__(self, u: Tensor) -> Tensor:
        for step in self.steps:
            u = u * step if isinstance(step, Tensor) else step(u)
        return u

    def rows(self, index: Tensor | slice) -> Pullback:
        """Return the product at some of the rows, without gradients.

        Args:
            index: of the rows.
        """
        return Pullback(
            [step.detach()[index] if isinstance(step, Tensor) else step for step in self.steps]
        )


def schatten(weight: Tensor) -> Tensor:
    """Compute the Schatten norm n = (Σ σ_i^p)^(1/p), p = 2^(SQUARINGS + 1) + 2.

    It is an upper bound of the largest singular value. With G = WWᵀ and Q = G^(2^SQUARINGS),
    n = tr(QG)^(1/p) and ∂n/∂W = n·QW/tr(QG), so that a first derivative needs no graph of the
    powers.

    Args:
        weight: matrices W (..., O, I).

    Returns:
        Norms (...).
    """
    w = promote(weight)
    if torch.compiler.is_compiling():
        return _schatten_with_graph(w)
    gram = _gram_matrix(w)
    with torch.no_grad():
        power, log_scale = _high_power(gram)
    trace = _trace_of_product(power, gram)
    with torch.no_grad():
        norm = _norm_from_trace(trace, log_scale)
    first = norm + norm / 2 * (trace - trace.detach()) / trace.detach()
    return with_derivatives(
        first, lambda _, gradient, w: vjp(_schatten_with_graph, w)[1](gradient), w
    )


def _schatten_with_graph(w: Tensor) -> Tensor:
    """Return the norm of ``schatten`` with the graph of all powers."""
    gram = _gram_matrix(w)
    power, log_scale = _high_power(gram)
    return _norm_from_trace(_trace_of_product(power, gram), log_scale)


def _gram_matrix(w: Tensor) -> Tensor:
    """Return the smaller one of WWᵀ and WᵀW."""
    if w.shape[-2] <= w.shape[-1]:
        return w @ w.mH
    return w.mH @ w


def _high_power(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return G^(2^SQUARINGS)/exp(log_scale), and log_scale."""
    power = gram
    log_scale = torch.zeros((), dtype=gram.real.dtype, device=gram.device)
    tiny = torch.finfo(gram.dtype).tiny
    for i in range(SQUARINGS):
        # Rescaled to a largest eigenvalue of at least 1/d, hence d^−8 three squarings later.
        if i % SQUARINGS_PER_RESCALING == 0:
            trace = power.diagonal(dim1=-2, dim2=-1).sum(-1).real.clamp_min(tiny)
            log_scale = log_scale + 2 ** (SQUARINGS - i) * trace.log()
            power = power / trace[..., None, None]
        power = power @ power
    return power, log_scale


def _trace_of_product(a: Tensor, b: Tensor) -> Tensor:
    """Return tr(A·B) of Hermitian matrices with a positive product."""
    return (a * b.conj()).real.sum((-2, -1)).clamp_min(torch.finfo(a.dtype).tiny)


def _norm_from_trace(trace: Tensor, log_scale: Tensor) -> Tensor:
    """Return (trace·exp(log_scale))^(1/p)."""
    return ((log_scale + trace.log()) / (2 ** (SQUARINGS + 1) + 2)).exp()


def _scale_weight(weight: Tensor, norm: Tensor, lipschitz: float) -> Tensor:
    """Return the weights, scaled to a norm of L at most."""
    return weight * (lipschitz / norm).clamp_max(1.0).to(weight.dtype)


@torch.no_grad()
def _initialize(layers: Sequence[Contracting | ContractingConv], orthogonal: bool) -> None:
    """Scale hidden layers to just below their Lipschitz constant.

    The last one is scaled to a tenth of it: the network is small, and a flow starts near the
    identity. The inputs of a hidden unit have
    magnitude 1/√width, where a swish with β = 1 is almost linear and learns slowly; therefore β
    starts at 10, with biases of matching size.

    Args:
        layers: all layers with weights, in order.
        orthogonal: whether all singular values of a weight start at the same value.
    """
    for layer in layers:
        is_last = layer is layers[-1]
        if orthogonal:
            nn.init.orthogonal_(layer.weight)
        initial_norm = INITIAL_LAST_NORM if is_last else INITIAL_NORM
        layer.weight.mul_(layer.lipschitz / layer.bound() * initial_norm)
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=0.0 if is_last else INITIAL_BIAS_STD)


def contracting_mlp(dim: int, hidden: Sequence[int], lipschitz: float) -> ContractingNet:
    """Build a contractive network of vectors.

    Args:
        dim: the size of its input and output.
        hidden: the widths of the hidden layers.
        lipschitz: the largest Lipschitz constant of the network; that of each layer is the same.
    """
    layer_lipschitz = lipschitz ** (1 / (len(hidden) + 1))
    layers = [
        Contracting(fan_in, fan_out, layer_lipschitz)
        for fan_in, fan_out in pairwise([dim, *hidden, dim])
    ]
    _initialize(layers, orthogonal=True)
    return ContractingNet(*_with_activations(layers))


def contracting_cnn(
    channels: int,
    hidden: Sequence[int],
    lipschitz: float,
    squeeze: int = 1,
) -> ContractingNet:
    """Build a contractive network of images: hidden 1×1 convolutions between two convolutions.

    Args:
        channels: the number of channels of its input and output.
        hidden: the channels of the hidden layers.
        lipschitz: the largest Lipschitz constant of the network; that of each layer is the same.
        squeeze: the network takes blocks of ``squeeze``² pixels as channels; 1 by default.
    """
    width = channels * squeeze**2
    layer_lipschitz = lipschitz ** (1 / (len(hidden) + 1))
    layers: list[ContractingConv] = []
    for i, (fan_in, fan_out) in enumerate(pairwise([width, *hidden, width])):
        is_outer = i in (0, len(hidden))
        layers.append(
            ContractingConv(fan_in, fan_out, OUTER_KERNEL if is_outer else 1, layer_lipschitz)
        )
    _initialize(layers, orthogonal=False)
    modules = _with_activations(layers)
    if squeeze > 1:
        modules = [nn.PixelUnshuffle(squeeze), *modules, nn.PixelShuffle(squeeze)]
    return ContractingNet(*modules)


def _with_activations(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers with an activation between every two of them."""
    modules = [layers[0]]
    for layer in layers[1:]:
        modules += [LipSwish(INITIAL_BETA), layer]
    return modules
