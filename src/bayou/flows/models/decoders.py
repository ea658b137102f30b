"""Decoders of a VAE: p(x | z) of pixels that are independent given z."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.transform import Pair, Rows, sum_event
from bayou.flows.discrete.masses import logistic_log_mass
from bayou.flows.surjections.conditional import ConditionalDistribution, open_uniform

INITIAL_LOG_SCALE = -3.0  # of a logistic, relative to the number of levels
MAX_LOG_SCALE_CHANGE = 4.0


class Decoder(ConditionalDistribution):
    r"""A distribution p(x | z) = Π_i p(x_i | θ_i) of independent pixels, with θ = net(z).

    A subclass sets ``params``, the number of parameters per pixel, and implements ``_log_mass``,
    ``_quantile`` and ``_mean``.

    Args:
        event: the shape of x, a size or several.
        net: a network (N, D) → (N, params, \*event), or to the same numbers in another shape.
        levels: the number of levels L of pixels 0 .. L − 1, 256 by default.

    Shapes: z (..., D), x (..., \*event), θ (..., params, \*event), log p (...).
    """

    params = 1

    def __init__(
        self,
        event: int | Sequence[int],
        net: Callable[[Tensor], Tensor],
        levels: int = 256,
    ) -> None:
        super().__init__()
        self.event: tuple[int, ...] = as_event(event, "the event")
        self.net = net
        self.levels: int = check_size(levels, "the levels of pixels", 2)

    def noise(self, rows: Rows, *copies: int) -> Tensor:
        return open_uniform(rows, *copies, *self.event)

    def draw(self, noise: Tensor, y: Tensor, y_axes: int) -> Pair:
        theta = self.parameters_of(y, y_axes)
        x = self._quantile(noise, theta)
        return x, sum_event(self._log_mass(x, theta), len(self.event))

    def log_prob(self, x: Tensor, y: Tensor, y_axes: int) -> Tensor:
        return sum_event(self._log_mass(x, self.parameters_of(y, y_axes)), len(self.event))

    def center(self, y: Tensor, y_axes: int) -> Tensor:
        return self._mean(self.parameters_of(y, y_axes))

    def parameters_of(self, z: Tensor, z_axes: int = 1) -> Tensor:
        r"""Return θ (..., params, \*event), in the dtype of z.

        Args:
            z: (..., D), or with an event of several axes.
            z_axes: the number of axes of the event of z; 1 by default.

        Raises:
            ValueError: if the network returns another number of numbers.
        """
        batch = z.shape[: z.ndim - z_axes]
        flat = z.reshape(batch.numel(), *z.shape[z.ndim - z_axes :])
        theta = self.net(flat)
        expected = (len(flat), self.params, *self.event)
        if theta.shape[:1] != flat.shape[:1] or theta.numel() != math.prod(expected):
            raise ValueError(
                f"the network of {type(self).__name__} returned {tuple(theta.shape)} for "
                f"{tuple(flat.shape)}; expected {expected}"
            )
        return theta.to(z.dtype).reshape(*batch, *expected[1:])

    def _unbind_params(self, theta: Tensor) -> tuple[Tensor, ...]:
        r"""Return the parameters of all pixels, (..., \*event) each."""
        return theta.unbind(-1 - len(self.event))

    @abstractmethod
    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        """Return log p of every pixel."""

    @abstractmethod
    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        """Return pixels from uniform numbers in (0, 1)."""

    @abstractmethod
    def _mean(self, theta: Tensor) -> Tensor:
        """Return E[x]."""


@final
class BernoulliDecoder(Decoder):
    r"""A decoder of binary pixels 0 and 1: P(x_i = 1) = sigmoid(θ_i).

    Args:
        event: the shape of x, a size or several.
        net: a network (N, D) → (N, 1, \*event), or to the same numbers in another shape, from z to
            the logits θ.

    Shapes: z (..., D), x (..., \*event), log p (...).

    Example:
        >>> import torch, bayou.flows as flows
        >>> decoder = flows.BernoulliDecoder((1, 8, 8), torch.nn.Linear(2, 64))
        >>> decoder.center(torch.zeros(10, 2), y_axes=1).shape  # probabilities of 1
        torch.Size([10, 1, 8, 8])
    """

    def __init__(self, event: int | Sequence[int], net: Callable[[Tensor], Tensor]) -> None:
        super().__init__(event, net, levels=2)

    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        (logit,) = self._unbind_params(theta)
        return x * logit - softplus(logit)

    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        return (u < self._mean(theta)).to(u)

    def _mean(self, theta: Tensor) -> Tensor:
        (logit,) = self._unbind_params(theta)
        return logit.sigmoid()


@final
class LogisticDecoder(Decoder):
    r"""A decoder of pixels 0 .. L − 1: a discretized logistic.

    P(x) = σ((x + ½ − m)/s) − σ((x − ½ − m)/s), where the first and the last level include the
    tails; m = (L − 1)·σ(θ_0), and θ_1 determines log s, which is bounded (Salimans et al. 2017,
    PixelCNN++).

    Args:
        event: the shape of x, a size or several.
        net: a network (N, D) → (N, 2, \*event), or to the same numbers in another shape, from z to
            (θ_0, θ_1).
        levels: the number of levels L, 256 by default.

    Shapes: z (..., D), x (..., \*event), log p (...).

    Example:
        >>> import torch, bayou.flows as flows
        >>> decoder = flows.LogisticDecoder((1, 8, 8), torch.nn.Linear(2, 128), levels=16)
        >>> decoder.log_prob(torch.zeros(10, 1, 8, 8), torch.zeros(10, 2), y_axes=1).shape
        torch.Size([10])
    """

    params = 2

    def _location_scale(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return m and s."""
        raw_location, raw_scale = self._unbind_params(theta)
        change = MAX_LOG_SCALE_CHANGE * torch.tanh(raw_scale / MAX_LOG_SCALE_CHANGE)
        log_scale = INITIAL_LOG_SCALE + change + math.log(self.levels)
        return (self.levels - 1) * raw_location.sigmoid(), log_scale.exp()

    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        location, scale = self._location_scale(theta)
        return logistic_log_mass(x, location, 1 / scale, (0, self.levels - 1))

    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        location, scale = self._location_scale(theta)
        return (location + scale * torch.logit(u)).round().clamp(0, self.levels - 1)

    def _mean(self, theta: Tensor) -> Tensor:
        # The median, and the mean up to the truncation of the tails.
        location, _ = self._location_scale(theta)
        return location


@final
class CategoricalDecoder(Decoder):
    r"""A decoder of pixels 0 .. L − 1: P(x_i = k) = softmax(θ_i)_k.

    It makes no assumption on the order of the levels (van den Oord et al. 2016, PixelRNN).

    Args:
        event: the shape of x, a size or several.
        net: a network (N, D) → (N, L, \*event), or to the same numbers in another shape, from z to
            the logits θ.
        levels: the number of levels L, 256 by default.

    Shapes: z (..., D), x (..., \*event), log p (...).
    """

    @property
    def params(self) -> int:  # type: ignore[override]
        """The number of logits of a pixel."""
        return self.levels

    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        axis = -1 - len(self.event)
        batch = torch.broadcast_shapes(x.shape[: axis + 1], theta.shape[:axis])
        index = x.long().unsqueeze(axis).expand(*batch, 1, *self.event)
        log_masses = log_softmax(theta, axis).expand(*batch, -1, *self.event)
        return log_masses.gather(axis, index).squeeze(axis)

    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        axis = -1 - len(self.event)
        is_below = theta.softmax(axis).cumsum(axis) < u.unsqueeze(axis)
        return is_below.sum(axis).clamp_max(self.params - 1).to(u)

    def _mean(self, theta: Tensor) -> Tensor:
        axis = -1 - len(self.event)
        values = torch.arange(self.params, dtype=theta.dtype, device=theta.device)
        values = values.reshape(-1, *[1] * len(self.event))
        return (theta.softmax(axis) * values).sum(axis)
