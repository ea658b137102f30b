"""Variational autoencoders: decoder p(x|z), a conditional flow as encoder q(z|x), prior p(z)."""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

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
VAE_FIT_DEFAULTS: FitOptions = {
    "batch_size": 100,
    "lr": 1e-3,
    "clip": None,
    "patience": None,
    "warmup": 0.1,
}
SAMPLES_PER_BLOCK = 500  # importance samples per row whose noise is drawn at once


class Terms(NamedTuple):
    """The terms of the bound for every draw of z and every row.

    Args:
        log_likelihood: log p(x|z), (samples, rows).
        log_prior: log p(z), (samples, rows).
        log_q: log q(z|x), (samples, rows).
    """

    log_likelihood: Tensor
    log_prior: Tensor
    log_q: Tensor

    @property
    def kl(self) -> Tensor:
        """Return log q(z|x) − log p(z), (samples, rows), whose mean is KL(q ‖ p)."""
        return self.log_q - self.log_prior

    @property
    def elbo(self) -> Tensor:
        """Return log p(x|z) − kl, (samples, rows)."""
        return self.log_likelihood - self.kl


class VAE(nn.Module):
    r"""A variational autoencoder: decoder p(x|z), encoder q(z|x) and prior p(z).

    log p(x) ≥ E_q[log p(x|z) + log p(z) − log q(z|x)], and with K draws z_k ~ q(z|x) the tighter
    log p(x) ≥ E log (1/K)·Σ_k p(x|z_k)·p(z_k)/q(z_k|x). ``flow`` is the same model as a
    distribution: the prior transformed by an ``Autoencoder`` map. The noise of row i depends on
    (seed, start + i) alone.

    Args:
        decoder: p(x|z), a ``BernoulliDecoder``, ``LogisticDecoder``, ``CategoricalDecoder`` or
            ``ConditionalFlow``.
        encoder: q(z|x), for example
            ``ConditionalFlow(Flow(StandardNormal(64), AmortizedAffine(64, 256)), net)``; flows
            after the ``AmortizedAffine`` make it more flexible.
        prior: p(z), a base or a flow; by default N(0, I).

    Shapes: x (rows, \*event), z (rows, dim).

    Raises:
        ValueError: if the shapes do not agree, or the prior has no exact log-density.

    Example:
        >>> import torch, bayou.flows as flows
        >>> q = flows.Flow(flows.StandardNormal(2), flows.AmortizedAffine(2, 16))
        >>> encoder = flows.ConditionalFlow(q, torch.nn.Linear(9, 16))
        >>> decoder = flows.BernoulliDecoder(9, torch.nn.Linear(2, 9))
        >>> vae = flows.VAE(decoder, encoder)
        >>> x = torch.zeros(100, 9)
        >>> fit = vae.fit(x, steps=5, progress=False)
        >>> vae.elbo(x, seed=0).shape, vae.log_prob(x, samples=10, seed=0).shape
        (torch.Size([100]), torch.Size([100]))
        >>> vae.sample(4, seed=0).shape
        torch.Size([4, 9])

    References:
        Kingma & Welling 2014, Auto-Encoding Variational Bayes.
        Rezende & Mohamed 2015, Variational Inference with Normalizing Flows.
    """

    def __init__(
        self,
        decoder: ConditionalDistribution | Flow,
        encoder: ConditionalDistribution | Flow,
        prior: Base | Flow | None = None,
    ) -> None:
        super().__init__()
        self.map: Autoencoder = Autoencoder(decoder, encoder)
        latent_event = self.map.encoder.event
        self.prior: StandardNormal | Base | Flow = (
            StandardNormal(latent_event) if prior is None else prior
        )
        if self.prior.event_shape != latent_event:
            raise ValueError(
                f"the encoder has events {latent_event}, the prior {self.prior.event_shape}; use "
                "one size"
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
        """The shape of x."""
        return self.map.decoder.event

    def terms(self, x: Tensor, samples: int = 1, *, seed: rng.Seed = None, start: int = 0) -> Terms:
        r"""Compute the terms of the bound at draws z ~ q(z|x), differentiable.

        Args:
            x: (rows, \*event).
            samples: the number of draws for every row, 1 by default.
            seed: of the draws; by default torch's generator.
            start: the noise of row i depends on (seed, start + i); 0 by default.

        Returns:
            The terms, (samples, rows) each.

        Raises:
            ValueError: for x of another shape, or samples that are no positive int.
        """
        self._check(x, samples)
        return self._terms(x, self._noise(x, samples, seed, start))

    def elbo(self, x: Tensor, samples: int = 1, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        r"""Compute the evidence lower bound of every row, differentiable.

        Args:
            x: (rows, \*event).
            samples: the number of draws that are averaged, 1 by default.
            seed: of the draws; by default torch's generator.
            start: the noise of row i depends on (seed, start + i); 0 by default.

        Returns:
            The mean bound (rows,), in nats.
        """
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
        r"""Estimate log p(x) by importance sampling: log (1/K)·Σ_k p(x|z_k)·p(z_k)/q(z_k|x).

        Its mean is a lower bound that tightens with K (Burda et al. 2016, IWAE).

        Args:
            x: (rows, \*event).
            samples: the number K of draws for every row, 5,000 by default.
            seed: of the draws; by default torch's generator.
            start: the noise of row i depends on (seed, start + i); 0 by default.
            chunk: the number of z that are decoded at a time, 4,096 by default; it affects memory,
                not the result.

        Returns:
            log p(x) of every row (rows,), in nats.

        Raises:
            ValueError: for x of another shape, or samples or chunk below 1.
        """
        self._check(x, samples)
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        block = min(samples, SAMPLES_PER_BLOCK)
        rows_per_chunk = max(1, chunk // block)
        log_probs = [
            self._log_prob_of_chunk(
                x[first : first + rows_per_chunk], samples, seed, start + first, chunk
            )
            for first in range(0, len(x), rows_per_chunk)
        ]
        if not log_probs:
            return x.new_zeros(0)
        return torch.cat(log_probs)

    def _log_prob_of_chunk(
        self,
        x: Tensor,
        samples: int,
        seed: rng.Seed,
        start: int,
        max_decoded: int,
    ) -> Tensor:
        """Estimate log p(x) of a few rows, with at most ``max_decoded`` z at a time."""
        block = min(samples, SAMPLES_PER_BLOCK)
        samples_at_once = max(1, max_decoded // len(x))
        log_sum = x.new_full((len(x),), -math.inf)
        for number, done in enumerate(range(0, samples, block)):
            noise = self._noise(x, block, rng.fold(seed, "importance", number), start)
            for noise_chunk in noise[: samples - done].split(samples_at_once):
                log_weights = self._terms(x, noise_chunk).elbo
                log_sum = torch.logaddexp(log_sum, log_weights.logsumexp(0))
        return log_sum - math.log(samples)

    @torch.no_grad()
    def sample(self, n: int, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        r"""Draw x ~ p(x|z), z ~ p(z).

        Args:
            n: the number of draws.
            seed: of the draws; by default torch's generator.
            start: the noise of draw i depends on (seed, start + i); 0 by default.

        Returns:
            Draws (n, \*event).
        """
        return self.flow.sample(n, seed=seed, start=start)

    @torch.no_grad()
    def encode(self, x: Tensor, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        r"""Return z of every row: a draw of q(z|x) with a seed, the center of q(z|x) without one.

        Args:
            x: (rows, \*event).
            seed: of the draws; None, the default, for the centers.
            start: the noise of row i depends on (seed, start + i); 0 by default.

        Returns:
            z (rows, dim).
        """
        self._check(x, 1)
        if seed is None:
            return self.map.encoder.center(x, len(self.event))
        noise = self._noise(x, 1, seed, start)[0]
        z, _ = self.map.encoder.draw(noise, x, len(self.event))
        return z

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, seed: rng.Seed = None, start: int = 0) -> Tensor:
        r"""Return E[x|z] at z = ``encode(x)``.

        Args:
            x: (rows, \*event).
            seed: of z; None, the default, for the center of q(z|x).
            start: the noise of row i depends on (seed, start + i); 0 by default.

        Returns:
            Means (rows, \*event).
        """
        z = self.encode(x, seed=seed, start=start)
        return self.map.decoder.center(z, len(self.map.event_in))

    def _check(self, x: Tensor, samples: int) -> None:
        """Raise a ValueError unless x are rows of data and samples a positive int."""
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples!r}")
        self.map.validate(x, inverse=True)
        if x.ndim != 1 + len(self.event):
            event = ", ".join(map(str, self.event))
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (rows, {event}); flatten the row axes"
            )

    def _noise(self, x: Tensor, samples: int, seed: rng.Seed, start: int) -> Tensor:
        """Draw noise (samples, rows, *noise_event); that of a row does not depend on the chunk."""
        rows = Rows((len(x),), x, rng.fold(seed, "encoder"), start)
        return self.map.encoder.noise(rows, samples).transpose(0, 1)

    def _terms(self, x: Tensor, noise: Tensor) -> Terms:
        """Compute the terms of the bound for valid rows and noise of ``_noise``."""
        z, log_q = self.map.encoder.draw(noise, x, len(self.event))
        log_likelihood = self.map.decoder.log_prob(x, z, len(self.map.event_in))
        return Terms(log_likelihood, self.prior.log_prob(z), log_q)

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
            beta: the final weight of the KL, 1 by default; positive.
            options: settings of the run, see ``FitOptions``.

        Returns:
            The history of the run and its best score; the VAE has the best parameters and is in
            eval mode.

        Raises:
            ValueError: for a beta that is not positive, or settings that are not valid.
        """
        if not beta > 0:
            raise ValueError(f"beta must be positive, got {beta}")
        settings = FlowSettings(**(VAE_FIT_DEFAULTS | options))
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

    min_scored_rows = 256

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
            self.data: Tensor = torch.cat([self.data, held_out.detach().to(self.anchor)])
            self.held_out_rows: Tensor = torch.arange(len(data), len(self.data))
        scored = "held-out" if len(self.held_out_rows) > 0 else "training"
        self.measure = f"−ELBO of {scored} rows"

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        rows, *widths = super().inputs(step)
        return rows, self.anchor.new_full((), self.beta * self.warmed), *widths

    def value(  # type: ignore[override]
        self,
        rows: Tensor,
        beta: Tensor,
        *widths: Tensor,
    ) -> Tensor:
        x = self.data[rows]
        with varied_steps(self.flow, *widths):
            terms = self.vae._terms(x, self.vae._noise(x, 1, None, 0))
        return beta * terms.kl.mean() - terms.log_likelihood.mean()
