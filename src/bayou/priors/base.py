"""The interface of priors: the spec, and the module for one tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bayou.core.rng import Seed
from bayou.core.specs import Checked


class BoundPrior(nn.Module, ABC):
    """A prior p(W) over one tensor, with its hyperparameters.

    Args:
        shape: the shape of the tensor.
        learn: whether the hyperparameters are parameters of the module, instead of buffers.
        hyper: the hyperparameters by name.

    Attributes:
        scales: names of the hyperparameters that are log scales.
    """

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
        self.shape: torch.Size = torch.Size(shape)
        for name, value in hyper.items():
            value = value.detach().clone()
            if learn:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Compute log p(w), summed over the tensor: (..., *shape) to (...).

        Args:
            w: values of the tensor.
        """

    def kl(self, mean: Tensor, std: Tensor) -> Tensor | None:
        """Compute KL(N(mean, std²) ‖ p), (..., *shape) to (...); None without a closed form.

        Args:
            mean: the mean of every entry.
            std: the standard deviation of every entry.
        """
        return None

    @abstractmethod
    def sample(self, n: int, seed: Seed = None, start: int = 0) -> Tensor:
        """Return draws start .. start + n − 1 from the prior: (n, *shape).

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """

    def _event(self, x: Tensor) -> Tensor:
        """Return x with trailing axes of the tensor's shape.

        Axes may be missing or 1, leading ones are samples.
        """
        axes = len(self.shape)
        if x.ndim >= axes and x.shape[x.ndim - axes :] == self.shape:
            return x
        is_broadcastable = True
        try:
            x = x.expand(torch.broadcast_shapes(x.shape, self.shape))
        except RuntimeError:
            is_broadcastable = False
        if not is_broadcastable or x.shape[x.ndim - axes :] != self.shape:
            raise ValueError(
                f"the prior is for tensors of shape (..., *{tuple(self.shape)}), "
                f"got {tuple(x.shape)}"
            )
        return x

    def _sum(self, x: Tensor) -> Tensor:
        """Sum over the tensor's axes: (..., *shape) to (...)."""
        axes = len(self.shape)
        if axes == 0:  # sum(()) would sum everything
            return x
        return self._event(x).sum(tuple(range(-axes, 0)))


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
        """Return the prior of one tensor.

        Args:
            shape: the shape of the tensor.
            fan_in: the number of inputs of each output, for a prior that depends on it.
            dtype: the dtype of the tensor.
            device: the device of the tensor.
            axes: its axes of input and of output units, for a prior by unit.
        """
        return self._bind(shape, torch.empty((), dtype=dtype, device=device), fan_in, axes)

    @abstractmethod
    def _bind(
        self, shape: Sequence[int], reference: Tensor, fan_in: int | None, axes: tuple[int, int]
    ) -> BoundPrior:
        """Return the prior of one tensor, with the dtype and device of ``reference``."""


def check_priors(priors: object) -> None:
    """Raise a ValueError unless these are None, a prior, or priors by pattern.

    Args:
        priors: what the user passed.
    """
    for prior in priors.values() if isinstance(priors, Mapping) else [priors]:
        if isinstance(prior, Prior) or priors is None:
            continue
        is_number = isinstance(prior, int | float) and not isinstance(prior, bool)
        hint = f"; for a standard deviation of {prior} write Normal({prior})" if is_number else ""
        raise ValueError(
            f"prior must be a Prior such as Normal(1.0), or patterns → priors, got {prior!r}{hint}"
        )


def log_of(value: float, reference: Tensor) -> Tensor:
    """Return log value, with the dtype and device of ``reference``.

    Args:
        value: a positive number.
        reference: a tensor.
    """
    return torch.full_like(reference, math.log(value))


def squares(x: Tensor, center: Tensor | None = None) -> Tensor:
    """Compute (x − center)² with a gradient of one pass over x; that of ``square`` takes three.

    Args:
        x: a contiguous tensor.
        center: a tensor that broadcasts to x; None is 0.
    """
    target = x.new_zeros(()) if center is None else center
    return mse_loss(x, target.expand_as(x), reduction="none")
