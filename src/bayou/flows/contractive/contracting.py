"""Contractive networks: layers whose Lipschitz constant is bounded for all weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn.functional import conv2d, linear, pixel_shuffle, pixel_unshuffle, sigmoid, softplus

from bayou.flows.core.arguments import promote
from bayou.flows.core.implicit import with_derivatives

ORDER = 7  # squarings: the Schatten norm of order p = 2·(2⁷ + 1) is within d^(1/258) of the largest singular value
SWISH = 1.0998393  # the largest slope of x·sigmoid(x)
INITIAL_BETA, INITIAL_BIAS_STD, INITIAL_LAST_NORM = 10.0, 0.2, 0.1  # see ``_initialized``
INITIAL_NORM = 0.999  # of the bound L, where the slope of min(1, L/‖W‖) is discontinuous
GRID = 16  # frequencies per axis in the norm of a convolution: a bound 4 % above the norm of a 3×3 kernel


class LipSwish(nn.Module):
    """x·sigmoid(β·x)/1.1 with slopes in [−1, 1] and a learned β > 0 (Chen et al. 2019).

    Args:
        beta: the initial β.
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.raw = nn.Parameter(
            torch.tensor(beta + math.log(-math.expm1(-beta)))
        )  # softplus(raw) = β

    def fixed(self) -> Swish:
        """Return the activation as a function of its current parameter."""
        return Swish(self.raw)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed()(x)


@dataclass
class Swish:
    """x·sigmoid(β·x)/1.1 with β = softplus(raw)."""

    raw: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * sigmoid(softplus(self.raw) * x) / SWISH

    def with_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value, and ∂/∂x."""
        beta = softplus(self.raw)
        s = sigmoid(beta * x)
        y = x * s / SWISH
        return y, torch.addcmul(s / SWISH, beta * y, 1 - s)


@dataclass
class Linear:
    """x ↦ x·Wᵀ + b, and its transpose u ↦ u·W."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def transpose(self, u: Tensor) -> Tensor:
        """uᵀ ∂/∂x."""
        return u @ self.weight


@dataclass
class Convolution:
    """A convolution of (..., C, H, W) that preserves H and W, and its transpose, with the flipped
    kernel.
    """

    weight: Tensor
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.flipped = self.weight.flip(-1, -2).transpose(
            0, 1
        )  # here: the first product may be under no_grad

    def __call__(self, x: Tensor) -> Tensor:
        return self._convolved(x, self.weight, self.bias)

    def transpose(self, u: Tensor) -> Tensor:
        """uᵀ ∂/∂x."""
        return self._convolved(u, self.flipped, None)

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])
        y = conv2d(rows, weight, bias, padding=weight.shape[-1] // 2)
        return y if x.ndim == 4 else y.reshape(*x.shape[:-3], *y.shape[1:])


class Contracting(nn.Linear):
    """x·Wᵀ·min(1, L/‖W‖) + b: its Lipschitz constant is L at most.

    ‖W‖ is the Schatten norm (Σ σ^258)^(1/258), an upper bound of the largest singular value σ,
    tight to a factor d^(1/258), 1.6 % for d = 64. Power iteration is cheaper for large layers but
    gives a lower bound.

    Args:
        inputs, outputs: sizes of the last axis.
        lipschitz: L.
    """

    def __init__(self, inputs: int, outputs: int, lipschitz: float) -> None:
        super().__init__(inputs, outputs)
        self.lipschitz = lipschitz

    def fixed(self) -> Linear:
        """The layer with its norm computed once, for many calls."""
        return Linear(_scaled(self.weight, schatten(self.weight), self.lipschitz), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed()(x)


class ContractingConv(nn.Conv2d):
    """A zero-padded convolution of (..., C, H, W) with the kernel K·min(1, L/‖K‖): its Lipschitz
    constant is L at most.

    ‖K‖ bounds the norm of the convolution for images of any size: the largest Schatten norm of the
    matrices K(ω) on a grid of M×M frequencies, divided by cos²(π·d/M), d = half the kernel, to
    cover the frequencies in between (near its maximum a trigonometric polynomial of degree d
    decreases no faster than a cosine, M. Riesz 1914).

    Args:
        inputs, outputs: channels.
        kernel: the odd size of the kernel.
        lipschitz: L.
        grid: M.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, lipschitz: float, grid: int = GRID
    ) -> None:
        if kernel % 2 == 0 or grid < 2 * kernel:
            raise ValueError(
                f"ContractingConv needs an odd kernel and a grid of twice its size or more, got kernel={kernel}, "
                f"grid={grid}"
            )
        super().__init__(inputs, outputs, kernel, padding=kernel // 2)
        self.lipschitz, self.grid = lipschitz, grid

    def bound(self) -> Tensor:
        """An upper bound of the norm of the convolution with the unscaled weights: ()."""
        half = self.kernel_size[0] // 2
        if half == 0:
            return schatten(self.weight[..., 0, 0])
        waves = torch.fft.rfft2(promote(self.weight), s=(self.grid, self.grid))
        waves = waves.permute(2, 3, 0, 1)  # (M, M/2 + 1, O, I)
        return schatten(waves).amax() / math.cos(math.pi * half / self.grid) ** 2

    def fixed(self) -> Convolution:
        """The layer with its norm computed once, for many calls."""
        return Convolution(_scaled(self.weight, self.bound(), self.lipschitz), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed()(x)


LAYERS = (Contracting, ContractingConv)  # a tuple: torch 2.9 does not compile isinstance of a union
WITH_TENSORS = (Linear, Convolution, Swish)


class ContractingNet(nn.Sequential):
    """A sequence of layers; ``fixed`` computes their norms once, for many calls."""

    def fixed(self) -> FixedNet:
        """The network as a function, with its current weights."""
        return FixedNet(
            [part.fixed() if isinstance(part, (*LAYERS, LipSwish)) else part for part in self]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed()(x)


def _tensor_names(part: Linear | Convolution | Swish) -> list[str]:
    return [field.name for field in fields(part) if getattr(part, field.name) is not None]


@dataclass
class FixedNet:
    """A network with fixed norms, and products with its Jacobian."""

    parts: Sequence[Any]

    def __call__(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the network is a function of."""
        found = []
        for part in self.parts:
            if isinstance(part, WITH_TENSORS):
                found += [getattr(part, name) for name in _tensor_names(part)]
        return found

    def with_tensors(self, tensors: Sequence[Tensor]) -> FixedNet:
        """Return the network with other values of its ``tensors``."""
        values = iter(tensors)
        parts = []
        for part in self.parts:
            if isinstance(part, WITH_TENSORS):
                changes: dict[str, Any] = {name: next(values) for name in _tensor_names(part)}
                part = replace(part, **changes)
            parts.append(part)
        return FixedNet(parts)

    def pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """g(x), and u ↦ uᵀ ∂g/∂x for u with any additional leading dimensions."""
        back: list[Any] = []
        for part in self.parts:
            if isinstance(part, (Swish, nn.Tanh)):
                x, slope = (
                    part.with_slope(x)
                    if isinstance(part, Swish)
                    else (y := torch.tanh(x), 1 - y.square())
                )
                back.append(slope)
                continue
            if isinstance(part, (Linear, Convolution)):
                back.append(part.transpose)
            elif isinstance(part, nn.PixelUnshuffle):
                back.append(partial(pixel_shuffle, upscale_factor=part.downscale_factor))
            else:
                back.append(partial(pixel_unshuffle, downscale_factor=part.upscale_factor))
            x = part(x)
        return x, Pullback(back[::-1])


@dataclass
class Pullback:
    """u ↦ uᵀ ∂g/∂x at the rows of x: transposed layers and slopes of the activations."""

    steps: Sequence[Any]

    def __call__(self, u: Tensor) -> Tensor:
        for step in self.steps:
            u = u * step if isinstance(step, Tensor) else step(u)
        return u

    def rows(self, which: Tensor | slice) -> Pullback:
        """The pullback at some of the rows, without gradients."""
        return Pullback(
            [step.detach()[which] if isinstance(step, Tensor) else step for step in self.steps]
        )


def schatten(weight: Tensor) -> Tensor:
    """Return n = (Σ σ_i^p)^(1/p), p = 2^(ORDER + 1) + 2, of the singular values of matrices (...,
    O, I).

    It is an upper bound of the largest singular value. With G = WWᵀ and Q = G^(2^ORDER), n =
    tr(QG)^(1/p) and ∂n/∂W = n·QW/tr(QG), so that a first derivative needs no graph of the powers.
    """
    w = promote(weight)
    if torch.compiler.is_compiling():
        return _schatten(w)
    gram = _gram(w)
    with torch.no_grad():
        power, log_scale = _high_power(gram)
    share = _trace_of_product(power, gram)
    with torch.no_grad():
        norm = _norm_from_trace(share, log_scale)
    first = norm + norm / 2 * (share - share.detach()) / share.detach()
    return with_derivatives(first, lambda _, gradient, w: vjp(_schatten, w)[1](gradient), w)


def _schatten(w: Tensor) -> Tensor:
    """Return the norm of ``schatten`` with the graph of all powers."""
    gram = _gram(w)
    power, log_scale = _high_power(gram)
    return _norm_from_trace(_trace_of_product(power, gram), log_scale)


def _gram(w: Tensor) -> Tensor:
    """Return the smaller one of WWᵀ and WᵀW."""
    if w.shape[-2] <= w.shape[-1]:
        return w @ w.mH
    return w.mH @ w


def _high_power(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return G^(2^ORDER)/exp(log_scale), and log_scale."""
    power = gram
    log_scale = torch.zeros((), dtype=gram.real.dtype, device=gram.device)
    tiny = torch.finfo(gram.dtype).tiny
    for i in range(ORDER):
        if (
            i % 3 == 0
        ):  # normalized to a largest eigenvalue of at least 1/d, hence d^−8 three squarings later
            trace = power.diagonal(dim1=-2, dim2=-1).sum(-1).real.clamp_min(tiny)
            log_scale = log_scale + 2 ** (ORDER - i) * trace.log()
            power = power / trace[..., None, None]
        power = power @ power
    return power, log_scale


def _trace_of_product(a: Tensor, b: Tensor) -> Tensor:
    """Return tr(A·B) of Hermitian matrices with a positive product."""
    return (a * b.conj()).real.sum((-2, -1)).clamp_min(torch.finfo(a.dtype).tiny)


def _norm_from_trace(trace: Tensor, log_scale: Tensor) -> Tensor:
    return ((log_scale + trace.log()) / (2 ** (ORDER + 1) + 2)).exp()


def _scaled(weight: Tensor, norm: Tensor, lipschitz: float) -> Tensor:
    return weight * (lipschitz / norm).clamp_max(1.0).to(weight.dtype)


def _initialized(net: ContractingNet) -> ContractingNet:
    """Scale hidden layers to just below their Lipschitz constant and the last one to a tenth of it:
    near the identity.

    The singular values of a matrix are all equal.
    The inputs of a hidden unit have magnitude 1/√width, where a swish with β = 1 is almost linear
    and learns slowly; therefore β starts at 10, with biases of matching size.
    """
    layers = [part for part in net if isinstance(part, LAYERS)]
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, Contracting):
                nn.init.orthogonal_(layer.weight)
            norm = schatten(layer.weight) if isinstance(layer, Contracting) else layer.bound()
            layer.weight.mul_(
                layer.lipschitz
                / norm
                * (INITIAL_LAST_NORM if layer is layers[-1] else INITIAL_NORM)
            )
            if layer.bias is not None:
                nn.init.normal_(
                    layer.bias, std=INITIAL_BIAS_STD if layer is not layers[-1] else 0.0
                )
    return net


def contracting_mlp(dim: int, hidden: Sequence[int], lipschitz: float) -> ContractingNet:
    """A network of vectors with Lipschitz constant at most ``lipschitz``, the same for each
    layer.
    """
    each = lipschitz ** (1 / (len(hidden) + 1))
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([dim, *hidden]):
        layers += [Contracting(fan_in, fan_out, each), LipSwish(INITIAL_BETA)]
    return _initialized(ContractingNet(*layers, Contracting([dim, *hidden][-1], dim, each)))


def contracting_cnn(
    channels: int, hidden: Sequence[int], lipschitz: float, squeeze: int = 1, kernel: int = 3
) -> ContractingNet:
    """A network of images (C, H, W) with Lipschitz constant at most ``lipschitz``: hidden 1×1
    convolutions between two convolutions, on blocks of ``squeeze``² pixels as channels."""
    each, width = lipschitz ** (1 / (len(hidden) + 1)), channels * squeeze**2
    layers: list[nn.Module] = [nn.PixelUnshuffle(squeeze)] if squeeze > 1 else []
    for i, (fan_in, fan_out) in enumerate(pairwise([width, *hidden])):
        layers += [
            ContractingConv(fan_in, fan_out, 1 if i else kernel, each),
            LipSwish(INITIAL_BETA),
        ]
    layers += [ContractingConv([width, *hidden][-1], width, kernel, each)]
    return _initialized(
        ContractingNet(*layers, *([nn.PixelShuffle(squeeze)] if squeeze > 1 else []))
    )
