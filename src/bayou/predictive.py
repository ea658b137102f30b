"""What a posterior says about y: a mixture over S samples of the network's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from bayou import rng
from bayou.likelihoods import (
    BoundBernoulli,
    BoundLikelihood,
    BoundPoisson,
    FiniteLikelihood,
    LocationScale,
    UnitNormal,
    count_quantile,
    entr,
)
from bayou.rng import Seed

_CHUNK = 1 << 22  # numbers held at a time beside the outputs
_KNOTS = 160  # at most so many cells + 1 in a quadrature over y
_COUNTS = 1024  # counts below are summed one by one, above integrated
_NODES = ((-0.8611363115940526, 0.3478548451374538), (-0.3399810435848563, 0.6521451548625461))  # Gauss-Legendre, 4


@final
class Predictive:
    """p(y | x) = 1/S Σ_s p(y | f_s), with f_s = net(x; w_s), w_s ~ the posterior.

    Outputs are (S, B, *out), y is (B, *event): the shape of one output, without the classes' axis for a categorical y
    and with half of the last axis for a heteroscedastic one. Moments, quantiles and entropies are the mixture's.
    """

    def __init__(self, likelihood: BoundLikelihood, outputs: Tensor) -> None:
        if outputs.ndim < 2 or outputs.shape[0] == 0:
            raise ValueError(
                f"outputs must be (samples, batch, *out) with 1 sample or more, got {tuple(outputs.shape)}"
            )
        if not outputs.is_floating_point():
            raise ValueError(f"outputs must be floating point, got {outputs.dtype}")
        likelihood.target_shape(outputs.shape[1:])  # outputs that do not suit the likelihood fail here
        self.likelihood = likelihood
        self.outputs = outputs

    def __repr__(self) -> str:
        return f"Predictive({type(self.likelihood).__name__}, outputs={tuple(self.outputs.shape)})"

    @property
    def samples(self) -> Tensor:
        """E[y | f_s] for every sample, class probabilities for a categorical y: (S, B, *event) or (S, B, *event, C)."""
        return self.likelihood.mean(self.outputs)

    @property
    def mean(self) -> Tensor:
        """E[y], class probabilities for a categorical y: (B, *event) or (B, *event, C)."""
        return self._average(self.likelihood.mean)

    @property
    def std(self) -> Tensor:
        """√Var[y], Var[y] = Var_s E[y | f_s] + E_s Var[y | f_s] (of the class indicators for a categorical y)."""
        return (self._epistemic_variance + self._average(self.likelihood.variance)).sqrt()

    @property
    def epistemic_std(self) -> Tensor:
        """√Var_s E[y | f_s]: what more data would take away."""
        return self._epistemic_variance.sqrt()

    @property
    def aleatoric_std(self) -> Tensor:
        """√E_s Var[y | f_s]: the noise that stays."""
        return self._average(self.likelihood.variance).sqrt()

    @property
    def entropy(self) -> Tensor:
        """H[y] in nats, (B,): exact for a finite y, by quadrature for counts and (differential) for a continuous y.

        With several coordinates it is Σ_i H[y_i], an upper bound of the joint entropy: they share the samples.
        """
        likelihood = self.likelihood
        if isinstance(likelihood, FiniteLikelihood):
            return self._per_example(entr(self._pmf(likelihood)).sum(-1))
        if not isinstance(likelihood, LocationScale | BoundPoisson):
            raise NotImplementedError(f"no entropy of a mixture of {type(likelihood).__name__}")
        size = self.outputs.shape[2:].numel() * max(4 * _KNOTS, 20 * len(self.outputs))
        rows = self.outputs.split(max(1, _CHUNK // size), dim=1)
        return self._per_example(torch.cat([_mixture_entropy(likelihood, f) for f in rows]))

    @property
    def mutual_information(self) -> Tensor:
        """I[y; w] = H[y] − E_s H[y | f_s] ≥ 0 in nats, (B,): the epistemic part of the entropy (Houlsby 2011)."""
        likelihood = self.likelihood
        if not isinstance(likelihood, FiniteLikelihood):
            inner = self._per_example(self._average(likelihood.entropy))
            return (self.entropy - inner).clamp_min(0.0)
        tiny = torch.finfo(self.outputs.dtype).tiny
        log_pmf = self._pmf(likelihood).clamp_min(tiny).log()

        def divergence(f: Tensor) -> Tensor:  # E_s KL(p_s ‖ p): the same number, without the cancellation
            log_p = likelihood.log_pmf(f).clamp_min(math.log(tiny))
            return (log_p.exp() * (log_p - log_pmf)).sum(-1)

        return self._per_example(self._average(divergence)).clamp_min(0.0)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) = logsumexp_s log p(y | f_s) − log S, jointly over the coordinates: (B,)."""
        self.likelihood.validate(self.outputs.shape[1:], y)
        terms = torch.cat([self.likelihood.log_prob(f, y) for f in self._chunks()])
        return terms.logsumexp(0) - math.log(len(self.outputs))

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y_i ≤ y_i): (B, *event)."""
        return self._average(lambda f: self.likelihood.cdf(f, y))

    @torch.no_grad()
    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The smallest y_i with P(Y_i ≤ y_i) ≥ q: (B, *event), or (Q, B, *event) for a sequence of Q levels.

        Solved on the mixture, not sampled: to rounding for a continuous y, exact for a discrete one. The quantiles of a
        categorical y are class indices, and mean something if the classes have an order.
        """
        if not isinstance(q, int | float):
            return torch.stack([self.quantile(level) for level in q])
        if not 0 < q < 1:
            raise ValueError(f"a quantile's level must lie strictly between 0 and 1, got {q}")
        if isinstance(self.likelihood, FiniteLikelihood):
            cumulative = self._pmf(self.likelihood).cumsum(-1)
            k = (cumulative < q).sum(-1).clamp_max(cumulative.shape[-1] - 1)
            return k.to(self.outputs.dtype) if isinstance(self.likelihood, BoundBernoulli) else k
        if isinstance(self.likelihood, BoundPoisson):
            return count_quantile(self.cdf, torch.full_like(self.outputs[0], q))
        if isinstance(self.likelihood, LocationScale):
            return self._continuous_quantile(self.likelihood, q)
        raise NotImplementedError(f"no quantiles of a mixture of {type(self.likelihood).__name__}")

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval of y with (at least) this probability: quantiles (1 − level)/2 and (1 + level)/2."""
        if not 0 < level < 1:
            raise ValueError(f"an interval's level must lie strictly between 0 and 1, got {level}")
        return self.quantile(0.5 - level / 2), self.quantile(0.5 + level / 2)

    @torch.no_grad()
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """n draws of y, each from one sample of the network for the whole batch: (n, B, *event)."""
        u = rng.uniform(n, (), self.outputs, rng.fold(seed, "sample"))
        index = (u * len(self.outputs)).long().clamp_max(len(self.outputs) - 1)
        return self.likelihood.sample(self.outputs[index], seed=rng.fold(seed, "noise"))

    @property
    def _epistemic_variance(self) -> Tensor:
        mean = self.mean
        return self._average(lambda f: (self.likelihood.mean(f) - mean).square())

    def _pmf(self, likelihood: FiniteLikelihood) -> Tensor:
        """P(y_i = k): (B, *event, K)."""
        return self._average(lambda f: likelihood.log_pmf(f).exp())

    def _chunks(self) -> Iterator[Tensor]:
        yield from self.outputs.split(max(1, _CHUNK // max(1, self.outputs[0].numel())))

    def _average(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """1/S Σ_s function(f_s), a chunk of samples at a time."""
        total: Tensor | None = None
        for f in self._chunks():
            part = function(f).sum(0)
            total = part if total is None else total + part
        assert total is not None
        return total / len(self.outputs)

    def _per_example(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1) if x.ndim > 1 else x

    def _continuous_quantile(self, likelihood: LocationScale, q: float) -> Tensor:
        """Newton steps on the smaller tail between the components' own quantiles, bisection where they do not halve."""
        sign, tail, z = (1.0 if q <= 0.5 else -1.0), min(q, 1 - q), likelihood.unit.icdf(q)
        lows, highs, reach = [], [], torch.zeros_like(likelihood.mean(self.outputs[0]))
        for f in self._chunks():
            location, log_scale = likelihood.location_log_scale(f)
            scale = log_scale.exp().expand_as(location)
            lows.append((location + scale * z).amin(0))
            highs.append((location + scale * z).amax(0))
            reach = torch.maximum(reach, (location.abs() + scale).amax(0))
        low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
        tolerance = 4 * torch.finfo(low.dtype).eps * reach
        y, last = low + (high - low) / 2, high - low
        for _ in range(200):

            def mass_and_density(f: Tensor, y: Tensor = y) -> Tensor:
                location, log_scale = likelihood.location_log_scale(f)
                z = (y - location) * torch.exp(-log_scale)
                return torch.stack(
                    (likelihood.unit.cdf(sign * z), (likelihood.unit.log_density(z) - log_scale).exp()), 1
                )

            mass, density = self._average(mass_and_density)
            gap = sign * (mass - tail)
            low, high = torch.where(gap < 0, y, low), torch.where(gap < 0, high, y)
            newton = y - gap / density
            inside = (newton >= low) & (newton <= high)  # false for a density of 0
            step = (newton - y).abs()
            done = (high - low <= tolerance) | (inside & (step <= tolerance))
            good = inside & (done | (step <= last / 2))
            y, last = torch.where(good, newton, low + (high - low) / 2), torch.where(good, step, high - low)
            if bool(done.all()):
                break
        return y


def _mixture_entropy(likelihood: LocationScale | BoundPoisson, f: Tensor) -> Tensor:
    """−∫ p log p for every coordinate: (S, B, *out) -> (B, *event).

    Cells run between knots that every component spreads over its own mass, thinned to a fixed number, so that they are
    narrow where the mixture is; 4 Gauss-Legendre nodes in each. Small counts are summed instead.
    """
    if isinstance(likelihood, LocationScale):
        location, log_scale = likelihood.location_log_scale(f)
        scale, unit, total = log_scale.exp(), likelihood.unit, torch.zeros_like(location[0])
    else:
        location, unit = f.exp(), UnitNormal()
        scale = location.sqrt()
    z = location.new_tensor(unit.knots).reshape(-1, *[1] * location.ndim)
    knots = (location + scale * z).flatten(0, 1).sort(0).values  # (J·S, B, *event)
    if isinstance(likelihood, BoundPoisson):
        last = min(_COUNTS, int(knots[-1].max().ceil().nan_to_num(_COUNTS)) + 20)
        counts = torch.arange(last, dtype=f.dtype, device=f.device).reshape(-1, *[1] * location[0].ndim)
        total = entr(_density(likelihood, f, counts)).sum(0)
        if last < _COUNTS:
            return total
        knots = knots.clamp_min(last - 0.5)
    if len(knots) > _KNOTS:
        knots = knots[torch.linspace(0, len(knots) - 1, _KNOTS, device=f.device).round().long()]
    middle, half = (knots[1:] + knots[:-1]) / 2, (knots[1:] - knots[:-1]) / 2
    for node, weight in (*_NODES, *((-node, weight) for node, weight in _NODES)):
        total = total + (weight * half * entr(_density(likelihood, f, middle + half * node))).sum(0)
    return total


def _density(likelihood: BoundLikelihood, f: Tensor, y: Tensor) -> Tensor:
    """1/S Σ_s p(y_i | f_s) at K points: (S, B, *out), (K, B, *event) -> (K, B, *event)."""
    total = likelihood.pointwise(f[0], y).exp()
    for output in f[1:]:
        total = total + likelihood.pointwise(output, y).exp()
    return total / len(f)
