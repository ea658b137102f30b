"""Decoders of a VAE: p(x | z) of pixels that are independent given z, with parameters from a
network.
"""

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

INITIAL_LOG_SCALE, MAX_LOG_SCALE_CHANGE = (
    -3.0,
    4.0,
)  # of a logistic, relative to the number of levels


class Decoder(ConditionalDistribution):
    r"""p(x | z) = Π p(x_i | θ_i), θ = net(z).

    Args:
        event: the shape of x.
        net: (N, D) → (N, params, \*event), or the same numbers in another shape.

    Shapes: z (..., D), x (..., \*event), θ (..., params, \*event), log p (...).
    """

    params = 1

    def __init__(self, event: int | Sequence[int], net: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.event = as_event(event, "the event")
        self.net = net

    def noise(self, rows: Rows, *copies: int) -> Tensor:
        return open_uniform(rows, *copies, *self.event)

    def draw(self, noise: Tensor, y: Tensor, given: int) -> Pair:
        theta = self.parameters_of(y, given)
        x = self._quantile(noise, theta)
        return x, sum_event(self._log_mass(x, theta), len(self.event))

    def log_prob(self, x: Tensor, y: Tensor, given: int) -> Tensor:
        return sum_event(self._log_mass(x, self.parameters_of(y, given)), len(self.event))

    def center(self, y: Tensor, given: int) -> Tensor:
        return self._mean(self.parameters_of(y, given))

    def parameters_of(self, z: Tensor, given: int = 1) -> Tensor:
        r"""θ (..., params, \*event), in the dtype of z."""
        batch, event = z.shape[: z.ndim - given], z.shape[z.ndim - given :]
        flat = z.reshape(batch.numel(), *event)
        theta = self.net(flat)
        expected = (len(flat), self.params, *self.event)
        if theta.shape[:1] != flat.shape[:1] or theta.numel() != math.prod(expected):
            raise ValueError(
                f"the network of {type(self).__name__} returned {tuple(theta.shape)} for {tuple(flat.shape)}; expected "
                f"{expected}"
            )
        return theta.to(z.dtype).reshape(*batch, *expected[1:])

    def _apart(self, theta: Tensor) -> tuple[Tensor, ...]:
        return theta.unbind(-1 - len(self.event))

    @abstractmethod
    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        """log p of every pixel."""

    @abstractmethod
    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        """Pixels from uniform numbers in (0, 1)."""

    @abstractmethod
    def _mean(self, theta: Tensor) -> Tensor:
        """E[x]."""


@final
class BernoulliDecoder(Decoder):
    """Binary pixels 0 and 1: θ is the logit of 1."""

    levels = 2

    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        (logit,) = self._apart(theta)
        return x * logit - softplus(logit)

    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        return (u < self._mean(theta)).to(u)

    def _mean(self, theta: Tensor) -> Tensor:
        return self._apart(theta)[0].sigmoid()


@final
class LogisticDecoder(Decoder):
    """Pixels 0 .. L − 1 from a discretized logistic: P(x) = σ((x + ½ − m)/s) − σ((x − ½ − m)/s).

    The first and the last level include the tails (Salimans et al. 2017). θ: m = (L − 1)·σ(θ_0),
    and log s.

    Args:
        event, net: as for every decoder, with two parameters per pixel.
        levels: L.
    """

    params = 2

    def __init__(
        self, event: int | Sequence[int], net: Callable[[Tensor], Tensor], levels: int = 256
    ) -> None:
        super().__init__(event, net)
        self.levels: int = check_size(levels, "the levels of pixels", 2)

    def _location_scale(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        location, raw = self._apart(theta)
        log_scale = (
            INITIAL_LOG_SCALE
            + MAX_LOG_SCALE_CHANGE * torch.tanh(raw / MAX_LOG_SCALE_CHANGE)
            + math.log(self.levels)
        )
        return (self.levels - 1) * location.sigmoid(), log_scale.exp()

    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        location, scale = self._location_scale(theta)
        return logistic_log_mass(x, location, 1 / scale, (0, self.levels - 1))

    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        location, scale = self._location_scale(theta)
        return (location + scale * torch.logit(u)).round().clamp(0, self.levels - 1)

    def _mean(self, theta: Tensor) -> Tensor:
        return self._location_scale(theta)[
            0
        ]  # the median, and the mean up to the truncation of the tails


@final
class CategoricalDecoder(Decoder):
    """Pixels 0 .. L − 1 from a categorical distribution: θ are the L logits (van den Oord et al.
    2016).
    """

    def __init__(
        self, event: int | Sequence[int], net: Callable[[Tensor], Tensor], levels: int = 256
    ) -> None:
        super().__init__(event, net)
        self.levels: int = check_size(levels, "the levels of pixels", 2)
        self.params = levels

    def _log_mass(self, x: Tensor, theta: Tensor) -> Tensor:
        axis = -1 - len(self.event)
        batch = torch.broadcast_shapes(x.shape[: axis + 1], theta.shape[:axis])
        index = x.long().unsqueeze(axis).expand(*batch, 1, *self.event)
        return (
            log_softmax(theta, axis)
            .expand(*batch, -1, *self.event)
            .gather(axis, index)
            .squeeze(axis)
        )

    def _quantile(self, u: Tensor, theta: Tensor) -> Tensor:
        axis = -1 - len(self.event)
        below = theta.softmax(axis).cumsum(axis) < u.unsqueeze(axis)
        return below.sum(axis).clamp_max(self.params - 1).to(u)

    def _mean(self, theta: Tensor) -> Tensor:
        axis = -1 - len(self.event)
        values = torch.arange(self.params, dtype=theta.dtype, device=theta.device)
        return (theta.softmax(axis) * values.reshape(-1, *[1] * len(self.event))).sum(axis)
