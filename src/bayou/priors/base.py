"""The interface of priors: the spec, and the module for one tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bayou.rng import Seed
from bayou.specs import Checked


class BoundPrior(nn.Module, ABC):
    """A prior p(W) over one tensor. ``hyper``: its hyperparameters, parameters of the module if
    they are learned.
    """

    # names of the numbers that are log scales
    scales: ClassVar[tuple[str, ...]] = (
        "log_scale",
        "log_scale1",
        "log_scale2",
        "log_base",
        "log_in",
        "log_out",
    )

    def __init__(self, shape: Sequence[int], learn: bool = False, **hyper: Tensor) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        for name, value in hyper.items():
            value = value.detach().clone()
            if learn:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """log p(w), summed over the tensor: (..., *shape) -> (...)."""

    def kl(self, mean: Tensor, std: Tensor) -> Tensor | None:
        """KL(N(mean, std²) ‖ p) in closed form, (..., *shape) each -> (...); None where there is no
        closed form.
        """
        return None

    @abstractmethod
    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        """Draws start .. start + n - 1 from the prior: (n, *shape)."""

    def _event(self, x: Tensor) -> Tensor:
        """x with trailing axes of the tensor's shape; axes may be missing or 1, leading ones are
        samples.
        """
        k = len(self.shape)
        if x.ndim >= k and x.shape[x.ndim - k :] == self.shape:
            return x
        try:
            x = x.expand(torch.broadcast_shapes(x.shape, self.shape))
        except RuntimeError:
            k = -1
        if k < 0 or x.shape[x.ndim - k :] != self.shape:
            raise ValueError(
                f"the prior is for tensors of shape (..., *{tuple(self.shape)}), got {tuple(x.shape)}"
            )
        return x

    def _sum(self, x: Tensor) -> Tensor:
        """The sum over the tensor's axes: (..., *shape) -> (...)."""
        k = len(self.shape)
        return self._event(x).sum(tuple(range(-k, 0))) if k else x  # sum(()) would sum everything


class Prior(Checked, ABC):
    """The spec of a prior: frozen; a file can hold one with plain values."""

    def bind(
        self,
        shape: Sequence[int],
        *,
        fan_in: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        axes: tuple[int, int] = (1, 0),
    ) -> BoundPrior:
        """The prior of one tensor. ``axes``: its axes of input and of output units, for a prior by
        unit.
        """
        return self._bind(shape, torch.empty((), dtype=dtype, device=device), fan_in, axes)

    @abstractmethod
    def _bind(
        self, shape: Sequence[int], like: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundPrior:
        """``bind``, with the dtype and device of ``like``."""


def check_priors(given: Any) -> None:
    """A ValueError unless these are None, a prior, or priors by pattern."""
    for prior in given.values() if isinstance(given, Mapping) else [given]:
        if not isinstance(prior, Prior) and given is not None:
            number = isinstance(prior, int | float) and not isinstance(prior, bool)
            way = f"; for a standard deviation of {prior} write Normal({prior})" if number else ""
            raise ValueError(
                f"prior must be a Prior such as Normal(1.0), or patterns → priors, got {prior!r}{way}"
            )


def log_like(value: float, like: Tensor) -> Tensor:
    """log value, with the dtype and device of ``like``."""
    return torch.full_like(like, math.log(value))


def squares(x: Tensor, center: Tensor | None = None) -> Tensor:
    """(x − center)², for a center that broadcasts to a contiguous x: the gradient is one pass over
    x, that of ``square`` three."""
    return mse_loss(
        x, (x.new_zeros(()) if center is None else center).expand_as(x), reduction="none"
    )
