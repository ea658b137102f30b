"""Affine maps with statistics of the data: act norm and batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayou.flows.core.arguments import check_size
from bayou.flows.core.transform import Event, Pair, Transform
from bayou.flows.layers.linear import DiagonalAffine

MIN_STD = 1e-6  # of a coordinate in the batch that initializes ``ActNorm``


def _mean_and_variance(x: Tensor, name: str) -> Pair:
    """Return mean and variance of each coordinate over all batch dimensions."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if len(rows) < 2:
        raise ValueError(
            f"{name} takes its statistics from a batch of at least 2 rows, got {len(rows)}; call "
            "eval()"
        )
    return rows.mean(0), rows.var(0, correction=0)


class ActNorm(DiagonalAffine):
    """A learned scale and shift that standardizes the first batch.

    y = exp(log_scale) ⊙ x + shift, ladj = Σ log_scale (Kingma & Dhariwal 2018, Glow). The direction
    that is called first in training mode is the one whose output is standardized.

    Args:
        event: the size of a vector, or (C, H, W) for images, with one scale and one shift per
            channel; H and W may be None.

    Shapes: x, y (..., *event), ladj (...).
    """

    initialized: Tensor

    def __init__(self, event: int | Sequence[int | None]) -> None:
        shape = (event,) if isinstance(event, int) else tuple(event)
        channels = check_size(shape[0], "ActNorm")  # type: ignore[arg-type]
        super().__init__((channels, *[1] * (len(shape) - 1)))
        self.event_shape: Event = shape
        self.register_buffer("initialized", torch.zeros((), dtype=torch.bool))
        # not initialized, as a Python value that compiled code can branch on
        self._needs_statistics = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._needs_statistics = not bool(self.initialized)

    @torch.no_grad()
    def _initialize(self, x: Tensor, inverse: bool) -> None:
        """Set scale and shift so that the image of x in a direction is standardized."""
        channels_last = x.movedim(-len(self.event_shape), -1)
        mean, variance = _mean_and_variance(channels_last, "ActNorm")
        mean = mean.reshape(self.shift.shape)
        std = variance.reshape(self.shift.shape).sqrt().clamp_min(MIN_STD)
        if inverse:
            self.log_scale.copy_(std.log())
            self.shift.copy_(mean)
        else:
            self.log_scale.copy_(-std.log())
            self.shift.copy_(-mean / std)
        self.initialized.fill_(True)
        self._needs_statistics = False

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        if self.training and self._needs_statistics:
            self._initialize(x, inverse=False)
        return super()._forward(x, context)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        if self.training and self._needs_statistics:
            self._initialize(y, inverse=True)
        return super()._inverse(y, context)


class BatchNorm(Transform):
    """Batch normalization, y = exp(log_scale) ⊙ (x − m)/√(v + ε) + shift.

    In training, the forward direction takes m and v from the batch and updates the running
    statistics, as in ``nn.BatchNorm1d``; the ladj treats them as constants. The inverse, and eval
    mode, use the running statistics (Dinh et al. 2017; Papamakarios et al. 2017). For density
    estimation, which uses ``inverse``, take ``Inverse(BatchNorm(dim))``.

    Args:
        dim: the number of coordinates D.
        eps: ε, added to the variance; 1e-5 by default.
        momentum: the weight of a batch in the running statistics; 0.1 by default.

    Shapes: x, y (..., D), ladj (...).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.event_shape: Event = (check_size(dim, "BatchNorm"),)
        if not eps > 0 or not 0 < momentum <= 1:
            raise ValueError(
                f"BatchNorm needs eps > 0 and 0 < momentum <= 1, got eps={eps}, momentum={momentum}"
            )
        self.eps = eps
        self.momentum = momentum
        self.log_scale: nn.Parameter = nn.Parameter(torch.zeros(dim))
        self.shift: nn.Parameter = nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def _log_slope(self, variance: Tensor) -> Tensor:
        return self.log_scale - 0.5 * torch.log(variance + self.eps)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        mean = self.running_mean
        variance = self.running_var
        if self.training:
            mean, variance = _mean_and_variance(x, "BatchNorm")
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance, self.momentum)
        log_slope = self._log_slope(variance)
        y = (x - mean) * log_slope.exp() + self.shift
        return y, log_slope.sum(-1).expand(x.shape[:-1])

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        log_slope = self._log_slope(self.running_var)
        x = (y - self.shift) * (-log_slope).exp() + self.running_mean
        return x, -log_slope.sum(-1).expand(y.shape[:-1])
