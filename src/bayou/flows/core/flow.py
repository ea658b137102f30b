"""A flow: the distribution of a map of base draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from bayou import rng
from bayou.flows.core.bases import Base
from bayou.flows.core.transform import Label, Ladj, Map, Transform, joined


class Flow(nn.Module):
    r"""The distribution of y = f(x), x ~ base: log p(y) = log p_base(x) − log|det ∂f/∂x|.

    For any map the ladj is the map's term, and ``label`` states what log p is: its ``inverse`` side is that of
    ``log_prob``, its ``forward`` side that of ``sample_and_log_prob``. A seed governs all noise, of the base and of the
    map; that of row i depends on (seed, start + i) alone.
    Shapes: samples (\*n, \*batch of the context, \*event), log_prob (...).
    """

    def __init__(self, base: Base, transform: Map) -> None:
        super().__init__()
        if not isinstance(base, Base) or not isinstance(transform, Map):
            got = f"Flow({type(base).__name__}, {type(transform).__name__})"
            raise ValueError(f"got {got}; expected Flow(base, transform), as in Flow(StandardNormal(2), realnvp(2))")
        want, got = transform.event_in, base.event_shape
        if joined(got, want) is None:
            raise ValueError(f"the base draws events {got} but the transform takes {want}; give both one size")
        self.base, self.transform = base, transform
        event = base.event_shape if isinstance(transform, Transform) else transform.event_out
        if None in event:
            raise ValueError(f"the transform gives events {event} of open size; build its maps with their sizes")
        self.event_shape: tuple[int, ...] = event  # type: ignore[assignment]

    @property
    def label(self) -> Label:
        """Kind and sides of the log-densities."""
        return self.transform.label

    @property
    def kind(self) -> Ladj:
        """Whether log-densities are exact, a bound or an estimate."""
        return self.label.kind

    def log_prob(
        self, y: Tensor, context: Tensor | None = None, *, samples: int = 1, seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        """log p(y | context): (...). Needs the inverse of the transform.

        ``samples`` K > 1, for a bound: log (1/K)·Σ_k p(x_k)·exp(V_k), tighter with K (Burda et al. 2016).
        """
        if samples != 1:
            return self._importance(y, context, samples, seed, start)
        x, ladj = self.transform.inverse(y, context, seed=seed, start=start)
        return self.base.log_prob(x) + ladj

    def _importance(self, y: Tensor, context: Tensor | None, samples: int, seed: rng.Seed, start: int) -> Tensor:
        if samples < 1:
            raise ValueError(f"samples must be one or more, got {samples}")
        if self.kind is Ladj.estimate:
            raise ValueError("exp of an estimated log-determinant is biased, so samples cannot be averaged; samples=1")
        found = [
            self.log_prob(y, context, seed=rng.fold(seed, "importance", k), start=start)
            for k in range(samples if self.kind is Ladj.bound else 1)
        ]
        return torch.stack(found).logsumexp(0) - math.log(len(found))

    def sample_and_log_prob(
        self, n: int | Sequence[int] = (), context: Tensor | None = None, seed: rng.Seed = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Draws start .. start + n − 1 with their log-densities, differentiable and without any inversion."""
        x, ladj, y = self._draw(n, context, seed, start)
        return y, self.base.log_prob(x) - ladj

    @torch.no_grad()
    def sample(
        self, n: int | Sequence[int] = (), context: Tensor | None = None, seed: rng.Seed = None, start: int = 0
    ) -> Tensor:
        """Draws without gradients; ``sample_and_log_prob`` has them."""
        return self._draw(n, context, seed, start)[2]

    def _draw(
        self, n: int | Sequence[int], context: Tensor | None, seed: rng.Seed, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x, ladj and y = f(x) of fresh draws."""
        shape = (n,) if isinstance(n, int) else tuple(n)
        if any(size < 0 for size in shape):
            raise ValueError(f"cannot draw {n} samples; pass a count of zero or more")
        batch = () if context is None else tuple(context.shape[:-1])
        total = torch.Size(shape).numel()
        x = self.base.draw(total, batch, seed, start).reshape(*shape, *batch, *self.base.event_shape)
        y, ladj = self.transform.forward(x, context, seed=seed, start=start * torch.Size(batch).numel())
        return x, ladj, y

    def compress(self, y: Tensor, context: Tensor | None = None) -> bytes:
        r"""Data (..., \*event) as −log₂ p(y) bits and some 35 bytes, for a flow of whole numbers.

        The base has masses (``DiscretizedLogistic``, ``Categorical``), every map is a bijection of whole numbers. A
        ``CodecError`` names the link that is none.
        """
        from bayou.flows.discrete.codec import compress

        return compress(self, y, context)

    def decompress(self, data: bytes, context: Tensor | None = None) -> Tensor:
        """The data given to ``compress``, exactly; a ``CodecError`` for bytes that are damaged or of another model.

        A ``context`` is not part of the bytes: pass the one given to ``compress``.
        """
        from bayou.flows.discrete.codec import decompress

        return decompress(self, data, context)

    def as_distribution(self, context: Tensor | None = None) -> FlowDistribution:
        """This flow, at this context, as a ``torch.distributions.Distribution``."""
        return FlowDistribution(self, context)


class FlowDistribution(Distribution):
    """A flow for code that expects ``torch.distributions``."""

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, flow: Flow, context: Tensor | None = None) -> None:
        self.flow, self.context = flow, context
        batch = torch.Size() if context is None else context.shape[:-1]
        super().__init__(batch, torch.Size(flow.event_shape), validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        low, high = self.flow.transform.codomain
        unbounded = (low, high) == (-torch.inf, torch.inf)
        inner = constraints.real if unbounded else constraints.interval(low, high)
        return constraints.independent(inner, len(self.flow.event_shape))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.flow.sample_and_log_prob(tuple(sample_shape), self.context)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        return self.flow.log_prob(value, self.context)

    def expand(self, batch_shape: Sequence[int], _instance: Distribution | None = None) -> FlowDistribution:
        """The same flow with its context expanded to a larger batch."""
        shape = torch.Size(batch_shape)
        if self.context is None and shape:
            raise ValueError(f"a flow without context has no batch to expand to {tuple(shape)}; draw more samples")
        context = None if self.context is None else self.context.expand(*shape, -1)
        return FlowDistribution(self.flow, context)
