"""Variational autoencoders: decoder p(x|z), a conditional flow as encoder q(z|x), prior p(z)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows.continuous_time.continuous import varied_steps
from bayou.flows.core.bases import Base, StandardNormal
from bayou.flows.core.compose import Chain
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj, Rows
from bayou.flows.fitting.fit import FitOptions, FitResult, FlowProblem, FlowSettings
from bayou.flows.fitting.objectives import MaximumLikelihood
from bayou.flows.surjections.conditional import ConditionalDistribution
from bayou.flows.surjections.maps import Autoencoder

# The defaults of VAE.fit that differ from those of flows.fit.
DEFAULTS: FitOptions = {
    "batch_size": 100,
    "lr": 1e-3,
    "clip": None,
    "patience": None,
    "warmup": 0.1,
}
MIN_SCORED_ROWS = 256  # rows that are scored at a time, or a batch if it is larger
BLOCK = 500  # importance samples per row whose noise is drawn at once


class Terms(NamedTuple):
    """The terms of the bound for every draw of z and every row: (samples, rows) each."""

    log_likelihood: Tensor  # log p(x|z)
    log_prior: Tensor  # log p(z)
    log_q: Tensor  # log q(z|x)

    @property
    def kl(self) -> Tensor:
        """log q(z|x) − log p(z), whose mean is KL(q ‖ p)."""
        return self.log_q - self.log_prior

    @property
    def elbo(self) -> Tensor:
        """log p(x|z) − kl."""
        return self.log_likelihood - self.kl


class VAE(nn.Module):
    r"""log p(x) ≥ E_q[log p(x|z) + log p(z) − log q(z|x)] (Kingma & Welling 2014; with flows
    Rezende & Mohamed 2015).

    ``flow`` is the same model as a distribution: the prior transformed by an ``Autoencoder`` map.
    The noise of row i depends on (seed, start + i) alone.

    Args:
        decoder: p(x|z), a ``BernoulliDecoder``, ``LogisticDecoder``, ``CategoricalDecoder`` or
            ``ConditionalFlow``.
        encoder: q(z|x), for example
            ``ConditionalFlow(Flow(StandardNormal(64), AmortizedAffine(64, 256)), net)``.
        prior: p(z), a base or a flow; by default N(0, I).

    Shapes: x (rows, \*event), z (rows, dim).
    """

    def __init__(
        self,
        decoder: ConditionalDistribution | Flow,
        encoder: ConditionalDistribution | Flow,
        prior: Base | Flow | None = None,
    ) -> None:
        super().__init__()
        self.map = Autoencoder(decoder, encoder)
        latent: Any = self.map.event_in
        self.prior = StandardNormal(latent) if prior is None else prior
        if self.prior.event_shape != latent:
            raise ValueError(
                f"the encoder has events {latent}, the prior {self.prior.event_shape}; use one size"
            )
        if isinstance(self.prior, Flow) and self.prior.kind is not Ladj.exact:
            raise ValueError(f"the prior needs an exact log-density, got {self.prior.kind.name!r}")

    @property
    def flow(self) -> Flow:
        """The model as a distribution of x; its ``log_prob`` is the bound."""
        if isinstance(self.prior, Flow):
            return Flow(self.prior.base, Chain(self.prior.transform, self.map))
        return Flow(self.prior, self.map)

    @property
    def event(self) -> tuple[int, ...]:
        """The event of x."""
        return self.map.decoder.event

    def terms(self, x: Tensor, samples: int = 1, *, seed: rng.Seed = None, start: int = 0) -> Terms:
        """The terms of the bound at draws z ~ q(z|x), differentiable."""
        self._check(x, samples)
        return self._terms(x, self._noise(x, samples, seed, start))

    def elbo(self, x: Tensor, samples: int = 1, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """The evidence lower bound of every row, averaged over draws: (rows,). Differentiable."""
        return self.terms(x, samples, seed=seed, start=start).elbo.mean(0)

    @torch.no_grad()
    def log_prob(
        self,
        x: Tensor,
        samples: int = 5000,
        *,
        seed: rng.Seed = None,
        start: int = 0,
        chunk: int = 4096,
    ) -> Tensor:
        """log (1/K)·Σ_k p(x|z_k)·p(z_k)/q(z_k|x) of every row: (rows,), a bound that tightens with
        K (Burda 2016).

        ``chunk``: the number of z that are decoded at a time; it affects memory, not the result.
        """
        self._check(x, samples)
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        block = min(samples, BLOCK)
        found = []
        for first in range(0, len(x), max(1, chunk // block)):
            part = x[first : first + max(1, chunk // block)]
            total = x.new_full((len(part),), -math.inf)
            for number, done in enumerate(range(0, samples, block)):
                noise = self._noise(
                    part, block, rng.fold(seed, "importance", number), start + first
                )
                for some in noise[: samples - done].split(max(1, chunk // len(part))):
                    total = torch.logaddexp(total, self._terms(part, some).elbo.logsumexp(0))
            found.append(total - math.log(samples))
        return torch.cat(found) if found else x.new_zeros(0)

    @torch.no_grad()
    def sample(self, n: int, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        r"""Draws x ~ p(x|z), z ~ p(z): (n, \*event)."""
        return self.flow.sample(n, seed=seed, start=start)

    @torch.no_grad()
    def encode(self, x: Tensor, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """z of every row: a draw of q(z|x) with a seed, the center of q(z|x) without one."""
        self._check(x, 1)
        if seed is None:
            return self.map.encoder.center(x, len(self.event))
        return self.map.encoder.draw(self._noise(x, 1, seed, start)[0], x, len(self.event))[0]

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        r"""E[x|z] at z = ``encode(x)``: (rows, \*event)."""
        return self.map.decoder.center(
            self.encode(x, seed=seed, start=start), len(self.map.event_in)
        )

    def _check(self, x: Tensor, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples!r}")
        self.map.validate(x, inverse=True)
        if x.ndim != 1 + len(self.event):
            event = ", ".join(map(str, self.event))
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (rows, {event}); flatten the row axes"
            )

    def _noise(self, x: Tensor, samples: int, seed: rng.Seed, start: int) -> Tensor:
        """(samples, rows, *noise); the noise of a row does not depend on the chunk."""
        return self.map.encoder.noise(
            Rows((len(x),), x, rng.fold(seed, "encoder"), start), samples
        ).transpose(0, 1)

    def _terms(self, x: Tensor, noise: Tensor) -> Terms:
        z, log_q = self.map.encoder.draw(noise, x, len(self.event))
        return Terms(
            self.map.decoder.log_prob(x, z, len(self.map.event_in)), self.prior.log_prob(z), log_q
        )

    # --- learning ----------------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Tensor,
        *,
        held_out: Tensor | None = None,
        beta: float = 1.0,
        **options: Unpack[FitOptions],
    ) -> FitResult:
        r"""Fit decoder, encoder and prior, in place: maximize E[log p(x|z)] − β_t·KL.

        β_t increases linearly to ``beta`` over the first ``warmup`` of the run (Sønderby et al.
        2016). KL is the mean over a batch. Early stopping compares the bound itself, β = 1, on
        held-out rows.

        Args:
            data: rows (rows, \*event) to train on.
            held_out: rows to compare parameters on; by default a fraction ``validation`` of the
                data.
            beta: the final weight of the KL.
            options: settings of the run, see ``FitOptions``.
        """
        if not beta > 0:
            raise ValueError(f"beta must be positive, got {beta}")
        settings = FlowSettings(**(DEFAULTS | options))
        settings = settings.with_default_length(len(data) // settings.batch_size)
        key = rng.integer(settings.seed)
        objective = NegativeElbo(
            self, data, held_out, settings.batch_size, settings.validation, beta, key
        )
        fit_result = FlowProblem(objective, settings).fit(key)
        self.eval()
        return fit_result


class NegativeElbo(MaximumLikelihood):
    """The negative bound −(E[log p(x|z)] − β·KL) of a VAE, in nats per row.

    The score is −ELBO with fixed noise.

    Args:
        vae: the model that is fitted.
        data: the training rows, (rows, *event).
        held_out: the rows of the score; None for a fraction ``validation`` of the data.
        batch_size: rows in a step.
        validation: the fraction of the data that is held out; not used with ``held_out``.
        beta: the final weight of the KL.
        seed: the seed of the split, the batches and the noise.
    """

    def __init__(
        self,
        vae: VAE,
        data: Tensor,
        held_out: Tensor | None,
        batch_size: int,
        validation: float,
        beta: float,
        seed: int,
    ) -> None:
        vae._check(data, 1)
        if held_out is not None:
            vae._check(held_out, 1)
            validation = 0.0
        super().__init__(vae.flow, data, None, batch_size, validation, seed)
        self.vae = vae
        self.beta = beta
        if held_out is not None:
            self.data = torch.cat([self.data, held_out.detach().to(self.anchor)])
            self.held_out_rows = torch.arange(len(data), len(self.data))
        self.rows_per_score = max(batch_size, MIN_SCORED_ROWS)
        scored = "held-out" if len(self.held_out_rows) > 0 else "training"
        self.measure = f"−ELBO of {scored} rows"

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        rows, *widths = super().inputs(step)
        return rows, self.anchor.new_full((), self.beta * self.warmed), *widths

    def value(self, rows: Tensor, beta: Tensor, *widths: Tensor) -> Tensor:  # type: ignore[override]
        x = self.data[rows]
        with varied_steps(self.flow, *widths):
            terms = self.vae._terms(x, self.vae._noise(x, 1, None, 0))
        return beta * terms.kl.mean() - terms.log_likelihood.mean()
