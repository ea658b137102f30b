"""``Flow``: a base distribution transformed by a map."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows.core.bases import Base
from bayou.flows.core.transform import Event, Label, Ladj, Map, Pair, Transform, common_event


class Flow(nn.Module):
    r"""The distribution of y = f(x), x ~ base.

    log p(y) = log p_base(x) − log|det ∂f/∂x| with x = f⁻¹(y). For a map that is not a bijection,
    its term replaces the ladj, and ``label`` states whether log p is exact, a bound or an estimate:
    its side ``inverse`` applies to ``log_prob``, its side ``forward`` to ``sample_and_log_prob``.
    The noise of row i, of the base and of the map, depends on (seed, start + i) alone.

    Args:
        base: the distribution of x.
        transform: f, from base to data.

    Shapes: samples (\*n, \*batch of the context, \*event), log_prob (...).

    Raises:
        ValueError: if base and transform have events of different shapes.

    Example:
        >>> import torch
        >>> from bayou.flows import Flow, StandardNormal, realnvp
        >>> flow = Flow(StandardNormal(2), realnvp(2))
        >>> optimizer = torch.optim.Adam(flow.parameters())
        >>> loss = -flow.log_prob(torch.zeros(100, 2)).mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> flow.sample(5, seed=0).shape
        torch.Size([5, 2])

    References:
        Papamakarios, Nalisnick, Rezende, Mohamed & Lakshminarayanan 2021, Normalizing Flows for
        Probabilistic Modeling and Inference.
    """

    def __init__(self, base: Base, transform: Map) -> None:
        super().__init__()
        if not isinstance(base, Base) or not isinstance(transform, Map):
            call = f"Flow({type(base).__name__}, {type(transform).__name__})"
            raise ValueError(
                f"got {call}; expected Flow(base, transform), as in Flow(StandardNormal(2), "
                "realnvp(2))"
            )
        if common_event(base.event_shape, transform.event_in) is None:
            raise ValueError(
                f"the base has events {base.event_shape} but the transform takes "
                f"{transform.event_in}; build both with the same size"
            )
        self.base = base
        self.transform = transform
        event: Event = transform.event_out
        if isinstance(transform, Transform):
            event = base.event_shape
        if None in event:
            raise ValueError(
                f"the size of the events {event} of the transform is not known; build its maps "
                "with sizes"
            )
        self.event_shape: tuple[int, ...] = event  # type: ignore[assignment]

    @property
    def label(self) -> Label:
        """The kind and the sides of the log-densities."""
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
        r"""Compute log p(y | context), with the inverse of the transform.

        Args:
            y: data (..., \*event).
            context: (..., context_dim), for a flow with a context.
            samples: the number K of draws of the noise, 1 by default; for a bound,
                log (1/K)·Σ_k p(x_k)·exp(term_k), tighter for larger K (Burda et al. 2016).
            seed: of the noise of the transform; by default torch's generator.
            start: row i uses the noise (seed, start + i); 0 by default.

        Returns:
            Log-densities (...).

        Raises:
            ValueError: for invalid data, and for several samples of an estimate, whose exp is
                biased.
        """
        if samples == 1:
            x, ladj = self.transform.inverse(y, context, seed=seed, start=start)
            return self.base.log_prob(x) + ladj
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        if self.kind is Ladj.estimate:
            raise ValueError(
                "exp of an estimated log-determinant is biased and cannot be averaged; use "
                "samples=1"
            )
        draws = samples if self.kind is Ladj.bound else 1
        log_weights = [
            self.log_prob(y, context, seed=rng.fold(seed, "importance", k), start=start)
            for k in range(draws)
        ]
        return torch.stack(log_weights).logsumexp(0) - math.log(draws)

    def sample_and_log_prob(
        self,
        n: int | Sequence[int] = (),
        context: Tensor | None = None,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> Pair:
        r"""Draw samples with their log-densities, differentiable and without inversion.

        Args:
            n: the number of draws, or a shape of draws; by default one draw without an axis.
            context: (\*batch, context_dim), for a flow with a context; n draws for each.
            seed: an int, a generator, or None for torch's generator.
            start: the index of the first draw; 0 by default. Draw i depends on (seed, start + i).

        Returns:
            Samples (\*n, \*batch, \*event) and log-densities (\*n, \*batch).
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
        r"""Draw samples without gradients; ``sample_and_log_prob`` has them.

        Args:
            n: the number of draws, or a shape of draws; by default one draw without an axis.
            context: (\*batch, context_dim), for a flow with a context; n draws for each.
            seed: an int, a generator, or None for torch's generator.
            start: the index of the first draw; 0 by default. Draw i depends on (seed, start + i).

        Returns:
            Samples (\*n, \*batch, \*event).
        """
        return self._draw(n, context, seed, start)[2]

    def _draw(
        self,
        n: int | Sequence[int],
        context: Tensor | None,
        seed: rng.Seed,
        start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, ladj and y = f(x) of fresh draws."""
        shape = (n,) if isinstance(n, int) else tuple(n)
        if any(size < 0 for size in shape):
            raise ValueError(f"cannot draw {n} samples; n must be at least 0")
        batch = () if context is None else tuple(context.shape[:-1])
        total = math.prod(shape)
        x = self.base.draw(total, batch, seed, start)
        x = x.reshape(*shape, *batch, *self.base.event_shape)
        first_row = start * math.prod(batch)
        y, ladj = self.transform.forward(x, context, seed=seed, start=first_row)
        return x, ladj, y

    def compress(self, y: Tensor, context: Tensor | None = None) -> bytes:
        r"""Encode data in −log₂ p(y) bits and about 35 bytes.

        The base must be discrete (``DiscretizedLogistic``, ``Categorical``) and every map a
        bijection of integers.

        Args:
            y: data (..., \*event) of integers, stored as floats.
            context: (..., context_dim), for a flow with a context.

        Returns:
            Bytes for ``decompress``, which do not contain the context.

        Raises:
            CodecError: for another flow, naming the link that is not a bijection of integers.
        """
        return self.base.compress(self, y, context)

    def decompress(self, data: bytes, context: Tensor | None = None) -> Tensor:
        r"""Decode the output of ``compress``.

        Args:
            data: the bytes.
            context: the context that was passed to ``compress``.

        Returns:
            The data (..., \*event).

        Raises:
            CodecError: if the bytes are damaged, or were written by another model.
        """
        return self.base.decompress(self, data, context)
