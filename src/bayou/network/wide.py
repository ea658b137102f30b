"""Networks of infinite width: their kernels, and their draws as networks of finite width."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

Units = Literal["erf", "relu"]
UNITS: Final[tuple[Units, ...]] = ("erf", "relu")
JITTER: Final = 1e-6  # is added to the variance of the noise, where y has variance 1
HIDDEN_UNITS: Final = 1000  # of a draw
MAX_COSINE: Final = 1 - 1e-9  # of ReLU units, whose kernel has no gradient at 1


class PriorScales(NamedTuple):
    """The prior scales of networks, for standardized x and y; leading axes are those of networks.

    Args:
        inputs: a_i of the weights of input i, (..., d).
        bias: b of the biases, (...).
        output: s of the outputs, (...).
        noise: σ of y, (...).
    """

    inputs: Tensor
    bias: Tensor
    output: Tensor
    noise: Tensor

    @property
    def noise_variance(self) -> Tensor:
        """The variance of y given the network, with what makes every covariance invertible."""
        return self.noise.square() + JITTER

    @classmethod
    def from_logs(cls, logs: Tensor) -> PriorScales:
        """Return the scales of their logs.

        Args:
            logs: log a_1 .. log a_d, log b, log s and log σ, (..., d + 3).
        """
        bias, output, noise = logs[..., -3:].exp().unbind(-1)
        return cls(logs[..., :-3].exp(), bias, output, noise)


def wide_kernel(units: Units, x: Tensor, other: Tensor, scales: PriorScales) -> Tensor:
    r"""Compute the covariances of the outputs of random networks with infinitely many units.

    With u(x, x') = b² + Σ_i a_i²·x_i·x'_i the covariance is s²·2/π·asin(2·u(x, x')/√((1 + 2·u(x,
    x))·(1 + 2·u(x', x')))) for erf units (Williams 1997), and s²·|x|·|x'|·(sin θ + (π − θ)·cos
    θ)/π with |x|² = u(x, x) and cos θ = u(x, x')/|x||x'| for ReLU units (Cho & Saul 2009).

    Args:
        units: "erf" or "relu".
        x: rows, (N, d).
        other: rows, (M, d).
        scales: of the networks, (...).

    Returns:
        Covariances (..., N, M).
    """
    scaled = x * scales.inputs[..., None, :]
    other_scaled = other * scales.inputs[..., None, :]
    bias_variance = scales.bias.square()[..., None, None]
    products = scaled @ other_scaled.mT + bias_variance
    squares = scaled.square().sum(-1, keepdim=True) + bias_variance
    other_squares = other_scaled.square().sum(-1)[..., None, :] + bias_variance
    variance = scales.output.square()[..., None, None]
    if units == "erf":
        norms = (1 + 2 * squares).sqrt() * (1 + 2 * other_squares).sqrt()
        return variance * (2 / math.pi) * torch.asin(2 * products / norms)
    norms = squares.sqrt() * other_squares.sqrt()
    cosines = (products / norms).clamp(-MAX_COSINE, MAX_COSINE)
    angles = torch.acos(cosines)
    return variance / math.pi * norms * (torch.sin(angles) + (math.pi - angles) * cosines)


def wide_variance(units: Units, x: Tensor, scales: PriorScales) -> Tensor:
    """Compute the variances of the outputs, the diagonal of ``wide_kernel``.

    Args:
        units: "erf" or "relu".
        x: rows, (N, d).
        scales: of the networks, (...).

    Returns:
        Variances (..., N).
    """
    scaled = x * scales.inputs[..., None, :]
    squares = scaled.square().sum(-1) + scales.bias.square()[..., None]
    variance = scales.output.square()[..., None]
    if units == "erf":
        return variance * (2 / math.pi) * torch.asin(2 * squares / (1 + 2 * squares))
    return variance * squares


def activate(units: Units, values: Tensor) -> Tensor:
    """Compute the activations of hidden units, whose covariances ``wide_kernel`` are.

    Args:
        units: "erf" or "relu".
        values: the inputs of the units.
    """
    if units == "erf":
        return torch.erf(values)
    return math.sqrt(2) * torch.relu(values)


@final
class WideNetwork(nn.Module):
    r"""One draw of a network of infinite width given its training rows.

    f(x) = Σ_h v_h·φ(w_h·x + c_h) + Σ_n α_n·k(x, x_n). The first sum is a random network with 1,000
    hidden units, the second moves it to the data (pathwise conditioning, Wilson et al. 2020): with
    α = (K + σ²)⁻¹·(y − f_random(X) − σ·ε) mean and covariance of f are those of the posterior,
    whatever the number of hidden units. With v = 0 and α = (K + σ²)⁻¹·y it is the mean.

    x and y are standardized inside; the outputs are in the units of y.

    Args:
        units: "erf" or "relu".
        rows: training inputs, (N, d) or (N, ...) with d numbers each.
        targets: y of these rows, (N, *event).
        target_units: the units of y, one number or one for each coordinate of its last axis.
        dtype: of the parameters. Sums over rows are in float64.
    """

    rows: Tensor
    targets: Tensor
    input_shift: Tensor
    input_scale: Tensor
    target_shift: Tensor
    target_units: Tensor
    target_spread: Tensor
    log_scales: nn.Parameter
    hidden_weight: nn.Parameter
    hidden_bias: nn.Parameter
    output_weight: nn.Parameter
    row_weight: nn.Parameter

    def __init__(
        self,
        units: Units,
        rows: Tensor,
        targets: Tensor,
        target_units: Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.units = units
        rows = rows.detach().double().flatten(1)
        targets = targets.detach().double()
        target_units = target_units.detach().double()
        input_scale = rows.std(0, correction=0)
        smallest = torch.finfo(torch.float32).eps * rows.abs().amax(0)
        input_scale = torch.where(input_scale > smallest, input_scale, 1.0)  # a constant column
        target_shift = targets.mean(0)
        deviations = (targets - target_shift) / target_units
        self.register_buffer("rows", rows)
        self.register_buffer("targets", targets)
        self.register_buffer("input_shift", rows.mean(0))
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("target_shift", target_shift)
        self.register_buffer("target_units", target_units)
        self.register_buffer("target_spread", deviations.square().mean().sqrt())
        self._add_parameters(dtype)

    def _add_parameters(self, dtype: torch.dtype) -> None:
        """Add the tensors of a draw, all 0."""
        count, columns = self.rows.shape
        outputs = self.targets[0].numel()
        shapes = {
            "log_scales": (columns + 3,),
            "hidden_weight": (HIDDEN_UNITS, columns),
            "hidden_bias": (HIDDEN_UNITS,),
            "output_weight": (HIDDEN_UNITS, outputs),
            "row_weight": (count, outputs),
        }
        for name, shape in shapes.items():
            value = torch.zeros(shape, dtype=dtype, device=self.rows.device)
            self.register_parameter(name, nn.Parameter(value))

    @property
    def target_scale(self) -> Tensor:
        """The scale by which y is divided, one number or one for each coordinate of its last axis.

        It is the spread of y/``target_units``, one number, times these units.
        """
        return self.target_spread * self.target_units

    @property
    def inputs(self) -> Tensor:
        """The standardized training inputs, (N, d)."""
        return self.standardize(self.rows)

    @property
    def outputs(self) -> Tensor:
        """The standardized training targets, (N, D)."""
        standardized = (self.targets - self.target_shift) / self.target_scale
        return standardized.reshape(len(standardized), -1)

    def standardize(self, x: Tensor) -> Tensor:
        """Return standardized inputs in float64, (B, d).

        Args:
            x: inputs of B rows, with d numbers each.

        Raises:
            ValueError: for another number of columns.
        """
        columns = len(self.input_shift)
        if x.ndim < 2 or math.prod(x.shape[1:]) != columns:
            raise ValueError(
                f"x of shape {tuple(x.shape)} does not suit the rows of the fit, which had "
                f"{columns} columns; give (rows, {columns})"
            )
        return (x.double().flatten(1) - self.input_shift) / self.input_scale

    def restore(self, outputs: Tensor) -> Tensor:
        """Return outputs in the units and the shape of y, (..., B, *event).

        Args:
            outputs: for standardized y, (..., B, D).
        """
        event = self.targets.shape[1:]
        return outputs.reshape(*outputs.shape[:-1], *event) * self.target_scale + self.target_shift

    def forward(self, x: Tensor) -> Tensor:
        """Compute f(x), (B, *event).

        Args:
            x: inputs of B rows.
        """
        scales = PriorScales.from_logs(self.log_scales.double())
        inputs = self.standardize(x)
        values = inputs @ self.hidden_weight.double().mT + self.hidden_bias.double()
        random = activate(self.units, values) @ self.output_weight.double()
        covariances = wide_kernel(self.units, inputs, self.inputs, scales)
        outputs = random + covariances @ self.row_weight.double()
        return self.restore(outputs).type_as(x)  # torch.export cannot take .to(x.dtype)
