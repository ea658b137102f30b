"""``Flow``: a base distribution transformed by a map."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows.core.bases import Base
from bayou.flows.core.transform import Label, Ladj, Map, Transform, common_event


class Flow(nn.Module):
    r"""The distribution of y = f(x), x ~ base: log p(y) = log p_base(x) − log|det ∂f/∂x|.

    For a map that is not a bijection, its term replaces the ladj, and ``label`` states whether log
    p is exact, a bound
    or an estimate: its side ``inverse`` applies to ``log_prob``, its side ``forward`` to
    ``sample_and_log_prob``. The noise of row i, of the base and of the map, depends on (seed, start
    + i) alone.

    Args:
        base: the distribution of x.
        transform: f, from base to data.

    Shapes: samples (\*n, \*batch of the context, \*event), log_prob (...).
    """

    def __init__(self, base: Base, transform: Map) -> None:
        super().__init__()
        if not isinstance(base, Base) or not isinstance(transform, Map):
            got = f"Flow({type(base).__name__}, {type(transform).__name__})"
            raise ValueError(
                f"got {got}; expected Flow(base, transform), as in Flow(StandardNormal(2), realnvp(2))"
            )
        want, got = transform.event_in, base.event_shape
        if common_event(got, want) is None:
            raise ValueError(
                f"the base has events {got} but the transform takes {want}; build both with the same size"
            )
        self.base, self.transform = base, transform
        event = base.event_shape if isinstance(transform, Transform) else transform.event_out
        if None in event:
            raise ValueError(
                f"the size of the events {event} of the transform is not known; build its maps with sizes"
            )
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
        self,
        y: Tensor,
        context: Tensor | None = None,
        *,
        samples: int = 1,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        """log p(y | context): (...). Uses the inverse of the transform.

        Args:
            y: data (..., *event).
            context: (..., context_dim), for a flow with a context.
            samples: K; for a bound, log (1/K)·Σ_k p(x_k)·exp(term_k), tighter for larger K (Burda
                et al. 2016).
            seed, start: row i uses the noise (seed, start + i).
        """
        if samples == 1:
            x, ladj = self.transform.inverse(y, context, seed=seed, start=start)
            return self.base.log_prob(x) + ladj
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        if self.kind is Ladj.estimate:
            raise ValueError(
                "exp of an estimated log-determinant is biased and cannot be averaged; use samples=1"
            )
        found = [
            self.log_prob(y, context, seed=rng.fold(seed, "importance", k), start=start)
            for k in range(samples if self.kind is Ladj.bound else 1)
        ]
        return torch.stack(found).logsumexp(0) - math.log(len(found))

    def sample_and_log_prob(
        self,
        n: int | Sequence[int] = (),
        context: Tensor | None = None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Draws start .. start + n − 1 and their log-densities, differentiable and without
        inversion.
        """
        x, ladj, y = self._draw(n, context, seed, start)
        return y, self.base.log_prob(x) - ladj

    @torch.no_grad()
    def sample(
        self,
        n: int | Sequence[int] = (),
        context: Tensor | None = None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Tensor:
        """Draws without gradients; ``sample_and_log_prob`` has them."""
        return self._draw(n, context, seed, start)[2]

    def _draw(
        self, n: int | Sequence[int], context: Tensor | None, seed: rng.Seed, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x, ladj and y = f(x) of fresh draws."""
        shape = (n,) if isinstance(n, int) else tuple(n)
        if any(size < 0 for size in shape):
            raise ValueError(f"cannot draw {n} samples; n must be at least 0")
        batch = () if context is None else tuple(context.shape[:-1])
        total = torch.Size(shape).numel()
        x = self.base.draw(total, batch, seed, start).reshape(
            *shape, *batch, *self.base.event_shape
        )
        y, ladj = self.transform.forward(
            x, context, seed=seed, start=start * torch.Size(batch).numel()
        )
        return x, ladj, y

    def compress(self, y: Tensor, context: Tensor | None = None) -> bytes:
        r"""Encode data (..., \*event) in −log₂ p(y) bits and about 35 bytes.

        The base must be discrete (``DiscretizedLogistic``, ``Categorical``) and every map a
        bijection of integers; otherwise a ``CodecError`` names the link that is not.
        """
        from bayou.flows.discrete.codec import compress

        return compress(self, y, context)

    def decompress(self, data: bytes, context: Tensor | None = None) -> Tensor:
        """Decode the output of ``compress``; a ``CodecError`` if it is damaged or from another
        model.

        The bytes do not contain the ``context``: pass the one that was given to ``compress``.
        """
        from bayou.flows.discrete.codec import decompress

        return decompress(self, data, context)
