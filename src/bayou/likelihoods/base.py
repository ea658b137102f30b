"""What every likelihood p(y | f) does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bayou.rng import Seed


class BoundLikelihood(nn.Module, ABC):
    """p(y | f) with its parameters. Everything but ``log_prob`` is per coordinate of y, and sample axes are kept."""

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        """The shape of y for outputs of a shape: the same, unless f has an axis of classes or of parameters."""
        return torch.Size(f_shape)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """A ValueError unless y suits outputs of shape (B, *out): for the door of fit and predict, not for a step."""
        expected, got = tuple(self.target_shape(f_shape)), tuple(y.shape)
        if got != expected:
            hint = self._shape_hint(tuple(f_shape), expected, got)
            raise ValueError(f"y has shape {got}, but outputs of shape {tuple(f_shape)} need {expected}{hint}")
        if y.is_complex() or (y.is_floating_point() and not bool(y.isfinite().all())):
            raise ValueError(f"y must be real and finite, got {y.dtype} with nan, inf or complex values")
        if y.numel():
            self._validate_values(f_shape, y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), one number per example: f (..., B, *out), y (B, ...) -> (..., B)."""
        shape = self.target_shape(f.shape)
        if y.ndim == 0 or shape[len(shape) - y.ndim :] != y.shape:
            raise ValueError(f"y has shape {tuple(y.shape)}, but outputs of shape {tuple(f.shape)} need {tuple(shape)}")
        value = self.pointwise(f, y)
        return value.sum(tuple(range(1 - y.ndim, 0))) if y.ndim > 1 else value  # sum(()) would sum everything

    def varied(self, outputs: Tensor, parameters: Mapping[str, Tensor]) -> tuple[BoundLikelihood, Tensor]:
        """A likelihood and outputs that say the same with other parameters in every sample: (S, B, *out), (S, ...)."""
        raise NotImplementedError(f"{type(self).__name__} has no parameters to vary")

    @abstractmethod
    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_i | f) for every coordinate i; f and y may broadcast."""

    @abstractmethod
    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]; class probabilities for a categorical y."""

    @abstractmethod
    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], of the class indicators for a categorical y; the shape of ``mean``."""

    @abstractmethod
    def entropy(self, f: Tensor) -> Tensor:
        """H[y_i | f] in nats, differential for a continuous y."""

    @abstractmethod
    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        """P(Y_i ≤ y_i | f)."""

    @abstractmethod
    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        """Draws of y: (n, *target_shape), or one for each f, whose leading axis is then the index of the draw."""

    def _validate_values(self, f_shape: Sequence[int], y: Tensor) -> None: ...

    def _shape_hint(self, f_shape: tuple[int, ...], expected: tuple[int, ...], got: tuple[int, ...]) -> str:
        if expected == (*got, 1):
            return "; use y.unsqueeze(-1)"
        return "; use y.squeeze(-1)" if got == (*expected, 1) else ""

    def _noise(self, draw: Callable[..., Tensor], f: Tensor, n: int | None, seed: Seed) -> Tensor:
        shape = self.target_shape(f.shape)
        return draw(shape[0], shape[1:], f, seed) if n is None else draw(n, shape, f, seed)


class Likelihood(ABC):
    """What a user writes to name a likelihood: frozen, and made of plain values (JSON-able)."""

    @abstractmethod
    def bind(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BoundLikelihood:
        """The likelihood with its parameters."""


def entr(p: Tensor) -> Tensor:
    """−p·log p, 0 at p = 0, where its gradient is 0 too instead of infinite (then nan)."""
    return torch.special.entr(p.clamp_min(torch.finfo(p.dtype).tiny))


def positive(name: str, value: float) -> None:
    """Raise a ValueError unless the value is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
