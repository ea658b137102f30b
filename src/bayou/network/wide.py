"""Networks of infinite width: their kernels, their draws as networks of finite width, and noise
that they predict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

Units = Literal["erf", "relu"]
UNITS: Final[tuple[Units, ...]] = ("erf", "relu")
JITTER: Final = 1e-6  # is added to the variance of the noise, where y has variance 1
HIDDEN_UNITS: Final = 1000  # of a draw
MIN_ROWS_OF_THRESHOLD: Final = 5  # with fewer the evidence of some rows leaves too little noise
MAX_THRESHOLDS: Final = 1024  # of all columns together: the time of the evidence grows with them
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
    input_variance = scales.inputs.square()[..., None]
    bias_variance = scales.bias.square()[..., None, None]
    # One factor has all scales, so that their gradient takes one product of matrices.
    products = (x * input_variance.mT) @ other.mT + bias_variance
    squares = x.square() @ input_variance + bias_variance
    other_squares = (other.square() @ input_variance).mT + bias_variance
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


def find_thresholds(column: Tensor, count: int) -> Tensor:
    """Return thresholds of a column: middles between neighboring values, evenly by rows.

    Args:
        column: training rows, (N,).
        count: of thresholds, at most. A column of at most two values has none, which would say
            no more than the column itself.

    Returns:
        Increasing thresholds, all of which separate some rows from others.
    """
    values = column.unique()
    middles = (values[1:] + values[:-1]) / 2
    if len(middles) <= 1 or count == 0:
        return middles[:0]
    if len(middles) <= count:
        return middles
    ordered = column.sort().values
    ranks = torch.arange(1, count + 1, device=column.device) * len(column) // (count + 1)
    nearest = torch.searchsorted(middles, ordered[ranks]).clamp_max(len(middles) - 1)
    return middles[nearest.unique()]


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

    x and y are standardized inside; the outputs are in the units of y. With ``thresholds`` the
    hidden units see each column as it is and, for each of its thresholds, ½ above and −½ below, so
    that f may jump there.

    Args:
        units: "erf" or "relu".
        rows: training inputs, (N, d) or (N, ...) with d numbers each.
        targets: y of these rows, (N, *event).
        target_units: the units of y, one number or one for each coordinate of its last axis.
        dtype: of the parameters. Sums over rows are in float64.
        thresholds: of a column, at most; 0 (default) for none. There is at most one for five rows,
            and all columns together have at most 1,024.
        rounding: the standard deviation of the rounding of standardized y, whose square is added to
            the variance of the noise; 0 by default.
    """

    rows: Tensor
    targets: Tensor
    input_shift: Tensor
    input_scale: Tensor
    target_shift: Tensor
    target_units: Tensor
    target_spread: Tensor
    threshold: Tensor
    threshold_column: Tensor
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
        thresholds: int = 0,
        rounding: float = 0.0,
    ) -> None:
        super().__init__()
        self.units = units
        self.thresholds = thresholds
        self.rounding = rounding
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
        self._add_thresholds()
        self._add_parameters(dtype)

    def _add_thresholds(self) -> None:
        """Add the thresholds of all columns, in the units of x."""
        rows, columns = self.rows.shape
        count = min(
            self.thresholds, MAX_THRESHOLDS // max(1, columns), rows // MIN_ROWS_OF_THRESHOLD
        )
        values = [find_thresholds(column, count) for column in self.rows.mT]
        counts = torch.tensor([len(value) for value in values], device=self.rows.device)
        numbers = torch.arange(columns, device=self.rows.device)
        self.register_buffer(
            "threshold", torch.cat([self.rows.new_zeros(0), *values]), persistent=False
        )
        self.register_buffer(
            "threshold_column", numbers.repeat_interleave(counts), persistent=False
        )

    def _add_parameters(self, dtype: torch.dtype) -> None:
        """Add the tensors of a draw, all 0."""
        count = len(self.rows)
        features = len(self.groups)
        outputs = self.targets[0].numel()
        shapes = {
            "log_scales": (features + 3,),
            "hidden_weight": (HIDDEN_UNITS, features),
            "hidden_bias": (HIDDEN_UNITS,),
            "output_weight": (HIDDEN_UNITS, outputs),
            "row_weight": (count, outputs),
        }
        for name, shape in shapes.items():
            value = torch.zeros(shape, dtype=dtype, device=self.rows.device)
            self.register_parameter(name, nn.Parameter(value))

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> WideNetwork:
        """Return this network with other training rows, units or thresholds; all others stay.

        Args:
            buffers: by name, such as ``rows`` and ``targets``.
        """
        network = copy.copy(self)
        network._buffers = self._buffers | {name: buffers[name].detach() for name in buffers}
        network._parameters = dict(self._parameters)
        network._add_parameters(self.row_weight.dtype)
        return network

    @property
    def target_scale(self) -> Tensor:
        """The scale by which y is divided, one number or one for each coordinate of its last axis.

        It is the spread of y/``target_units``, one number, times these units.
        """
        return self.target_spread * self.target_units

    @property
    def columns(self) -> Tensor:
        """The column of each input of the hidden units, (d,)."""
        columns = torch.arange(len(self.input_shift), device=self.threshold_column.device)
        return torch.cat([columns, self.threshold_column])

    @property
    def groups(self) -> Tensor:
        """The group of each input of the hidden units, (d,): a column, or all its thresholds."""
        columns = len(self.input_shift)
        return torch.cat([self.columns[:columns], columns + self.threshold_column])

    @property
    def inputs(self) -> Tensor:
        """The inputs of the hidden units for the training rows, (N, d)."""
        return self.standardize(self.rows)

    @property
    def outputs(self) -> Tensor:
        """The standardized training targets, (N, D)."""
        standardized = (self.targets - self.target_shift) / self.target_scale
        return standardized.reshape(len(standardized), -1)

    def standardize(self, x: Tensor) -> Tensor:
        """Return standardized columns, and −½ or ½ for each threshold, in float64, (B, d).

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
        x = x.double().flatten(1)
        standardized = (x - self.input_shift) / self.input_scale
        if not len(self.threshold):
            return standardized
        is_above = x.index_select(-1, self.threshold_column) > self.threshold
        return torch.cat([standardized, is_above.double() - 0.5], -1)

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


def solve_rows(
    wide: WideNetwork, scales: PriorScales, noise_factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the Cholesky factor of K + σ²·F of the training rows, and (K + σ²·F)⁻¹·y.

    The variance of their rounding is added to σ²·F.

    Args:
        wide: has the training rows.
        scales: of one network.
        noise_factors: F, by which the variance of the noise differs between rows, (N,); None
            (default) for 1.

    Returns:
        The factor (N, N), and the solution (N, D).
    """
    covariance = wide_kernel(wide.units, wide.inputs, wide.inputs, scales)
    covariance.diagonal().add_(noise_variances(scales, noise_factors, wide.rounding))
    root = torch.linalg.cholesky(covariance)
    return root, torch.cholesky_solve(wide.outputs, root)


def noise_variances(
    scales: PriorScales, noise_factors: Tensor | None, rounding: float = 0.0
) -> Tensor:
    """Compute the variance of the noise of every row, (N,), or of all rows, one number.

    Args:
        scales: of one network.
        noise_factors: by which the variance differs between rows, (N,); None for 1.
        rounding: the standard deviation of the rounding of y, in every row; 0 by default.
    """
    if noise_factors is None:
        return scales.noise_variance + rounding**2
    return scales.noise.square() * noise_factors + JITTER + rounding**2


@final
class NoiseNetwork(nn.Module):
    r"""The factor by which the variance of the noise differs at x: exp(g(x)) over its mean.

    g is the mean of a network of infinite width that was fitted to log-squared residuals of the
    training rows, and is 0 in the mean far from them. The mean of the factors of the training rows
    is 1. Nothing of it is trained further, and nothing is drawn.

    Args:
        units: "erf" or "relu".
        rows: training inputs, (N, d).
        log_squares: the logs of squared residuals, (N,).
        log_scales: log a_1 .. log a_d, log b, log s and log σ of g, for standardized x and
            standardized ``log_squares``, (d + 3,).
    """

    log_mean: Tensor

    def __init__(self, units: Units, rows: Tensor, log_squares: Tensor, log_scales: Tensor) -> None:
        super().__init__()
        self.network: WideNetwork = WideNetwork(
            units, rows, log_squares[:, None], torch.ones(1).to(rows), torch.float64
        )
        self.network.requires_grad_(False)
        with torch.no_grad():
            log_scales = log_scales.detach().double()
            _, weights = solve_rows(self.network, PriorScales.from_logs(log_scales))
            self.network.log_scales.copy_(log_scales)
            self.network.row_weight.copy_(weights)
            log_variances = self.network(self.network.rows)[:, 0]
            log_mean = log_variances.logsumexp(0) - math.log(len(log_variances))
        self.register_buffer("log_mean", log_mean)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logs of the factors, (B,) in float64.

        Args:
            x: inputs of B rows.
        """
        log_variances: Tensor = self.network(x.double())
        return log_variances[:, 0] - self.log_mean
