"""The improved variational online Newton method, as a method and as an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.core.specs import later_field
from bayou.guides import Delta, MeanField
from bayou.guides.conditional import ConditionalGaussian, GainMoments
from bayou.guides.factors import GaussianFactor
from bayou.guides.guide import GuideSpec
from bayou.guides.rules import Rules
from bayou.methods.natural_bound import NaturalBound
from bayou.methods.vi import (
    Variational,
    check_guide,
    describe_families,
    describe_family,
    families_of,
)
from bayou.network.target import Target
from bayou.posteriors.guided import Bayesian
from bayou.training.data import Data

ROUNDING = 1e-9  # of lr·hessian, which a rescaled method keeps
MAX_CONCATENATED = 2**22  # entries of the vectors of a step, which are copies
MIN_GAIN_SQUARE = 1e-12  # of E[z²], which divides a step
MIN_VARIANCE = 1e-20  # of z, whose logarithm is taken
MAX_CHANGE = 0.5  # of (1 − β₂)·(ĥ − h)/(h + δ) in a step

GroupKey = tuple[bool, bool, torch.dtype, torch.device, int]


@final
@dataclass(frozen=True)
class IVON(Variational):
    """IVON: Gaussians by natural gradients of the ELBO, at about the cost of Adam.

    q(w) = Π N(m, 1/(N·(h + δ))) with δ = prior precision / N. With ĝ = ∇ of −log p(y|x, w)/N at a
    draw w = m + σ·ε, and ĥ = ĝ·ε/σ, whose mean is the expected curvature:

        g ← β₁·g + (1 − β₁)·ĝ          h ← β₂·h + (1 − β₂)·ĥ + ½(1 − β₂)²·(h − ĥ)²/(h + δ)
        m ← m − min(1, lr·(h₀ + δ))·(g/(1 − β₁ᵗ) + δ·(m − m₀))/(h + δ)

    The square keeps h + δ positive. The curvature that scales a step is also the precision of q.
    Two bounds keep the first steps stable where h₀ is far too small: no step moves a mean by more
    than a standard deviation of q, and r = (1 − β₂)·(ĥ − h)/(h + δ), of which the rule of h is
    h + δ ← (h + δ)·(1 + r + ½r²), lies between −½ and ½. Without them a first step can be many
    Newton steps, after which the noise of ĥ, which grows with the distance from the optimum, raises
    h until the means hardly move.
    With ``MNF``, q(W|z) = Π N(z_i·m_ij, σ_ij²), h and σ follow the same rules, since ĥ is unbiased
    given z; g averages z∘ĝ, and with running means of z and z²

        m ← m − min(1, lr·(h₀ + δ))·(g/(1 − β₁ᵗ) + δ·(E[z²]∘m − E[z]∘m₀))/(E[z²]∘(h + δ))

    The whole bound is maximized: the loss has log q(z) − log r(z|W), also with their gradients in m
    and σ. A Gaussian q(z₀) = N(c, s²) follows the same rules with the curvature k of the whole
    loss, s² = β/(N·k) and c ← c − lr·h₀·g/k, so that the spread of z falls and rises as σ does. The
    conjugate r(z|W) has the moments of z as its center and scale, which are best for any W. The
    flow, mixtures and other r(z|W) are learned by Adam on the same loss. Gaussian gains of point
    weights (``NodeNoise``, ``RankOne``) have the rules of q(z₀).

    In a network of 5,000 weights or more that was given neither a prior nor a length, ``warmup`` is
    0.4, with a prior by unit (``adapt_to_size``).

    Args:
        guide: the family: ``MeanField()`` (default), ``MNF()``, ``NodeNoise()``, ``NodeFlow()`` or
            ``RankOne(std=...)``, or a mapping from patterns of tensor names to these and
            ``Delta()``. The ``std`` of MeanField and MNF is not used; ``hessian`` is.
        lr: the learning rate of the means, 0.1 by default; at most 1/hessian.
        hessian: h₀, where the curvature of the mean loss starts; 0.1 by default.
        beta1: β₁, of the gradient; 0.9 by default.
        beta2: β₂, of the curvature; None (default) is 1 − 5/steps, at most 0.99999, so that a run
            forgets its start.
        local: draw outputs instead of weights, at twice the cost and with less noise; False by
            default. ``MNF`` does so by its own setting.
        plain_lr: the rate of Adam for what is a point (normalization layers, learned noise) and for
            the flows of gains, 1e-3 by default. Scales have ten times that, and so have scales of a
            prior that are learned, by the gradient of the KL; then h stays ≥ 0 and m moves by lr
            scales of the prior at most.
        warmup: the fraction of steps over which the weight β of the KL rises from 0; 0 by default.
        where: a pattern or patterns of the tensors that are random, "*" by default; others keep
            their values. For a ``guide`` of one family.
        samples: draws of the weights in a step; 1 by default.
        start: where q is centered at first: "mode" (default), "network", or a method.

    Returns:
        ``fit`` returns the ``Guided`` posterior of VI(guide).

    Raises:
        ValueError: for a family that is not Gaussian given its gains, priors that are not Normal, a
            clipped gradient or another optimizer, and settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.IVON(steps=10)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> sorted(posterior.std())
    ['bias', 'weight']

    Paper: Shen et al. 2024, https://arxiv.org/abs/2402.17641.
    """

    guide: Rules = later_field(MeanField())
    _: KW_ONLY
    lr: float = 0.1
    hessian: float = 0.1
    beta1: float = 0.9
    beta2: float | None = None
    local: bool = False
    plain_lr: float = 1e-3
    warmup: float = 0.0
    where: str | tuple[str, ...] = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("hessian", "plain_lr")
        if self.lr * self.hessian > 1 + ROUNDING:
            raise ValueError(
                f"IVON lr must be at most 1/hessian = {1 / self.hessian:.3g}, where a step is a "
                f"whole Newton step, got lr={self.lr!r}; the default is 0.1"
            )
        self._check_whole("samples")
        self._check_interval("[0, 1)", "beta1", "beta2")
        self._check_interval("[0, 1]", "warmup")
        if not isinstance(self.where, str | tuple) or not self.where:
            raise ValueError(
                f"IVON where must be a pattern or a tuple of patterns, got {self.where!r}"
            )
        self._check_families()
        if self.optimizer is not None or self.clip is not None:
            raise ValueError(
                "IVON is an optimizer, and a clipped gradient would bias its curvature; "
                "reduce lr instead"
            )

    def _check_families(self) -> None:
        """Raise a ValueError for families without natural gradients."""
        check_guide(self.guide, "IVON")
        for spec in families_of(self.guide):
            if spec.for_natural_gradients(1.0, self.local) is None:
                raise ValueError(
                    "natural gradients need families that are Gaussian given their gains, "
                    "MeanField() and MNF(), or points given Gaussian gains, NodeNoise(), "
                    f"RankOne(std=...) and Delta(); {describe_family(spec)} is not: "
                    "use VI with Adam instead"
                )
        if self.where != "*" and isinstance(self.guide, Mapping):
            raise ValueError(
                f"IVON where={self.where!r} needs a guide of one family; "
                "give patterns → families as the guide, with Delta(learn=False) for the others"
            )

    @property
    def without_density(self) -> str | None:
        """Return the name of this method, or of a family, if some weights are points."""
        if self.where != "*":
            return f"IVON(where={self.where!r})"
        families = families_of(self.guide)
        return next((type(spec).__name__ for spec in families if not spec.dense), None)

    @property
    def title(self) -> str:
        """Return the name of the method, with its families unless it is the default."""
        is_default = isinstance(self.guide, MeanField)
        return "IVON" if is_default else f"IVON({describe_families(self.guide)})"

    def family(self, target: Target) -> Rules:
        """Return the guide with the scale of h₀.

        Args:
            target: network, likelihood and prior.
        """
        std = math.sqrt(self.tempering(target) / (target.n * self.hessian))

        def adapt(spec: GuideSpec) -> GuideSpec:
            return spec.for_natural_gradients(std, self.local) or spec

        if isinstance(self.guide, Mapping):
            return {pattern: adapt(spec) for pattern, spec in self.guide.items()}
        if self.where == "*":
            return adapt(self.guide)
        patterns = (self.where,) if isinstance(self.where, str) else self.where
        return dict.fromkeys(patterns, adapt(self.guide)) | {"*": Delta(learn=False)}

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method from the network as it is, for a loss with this noise.

        The curvature is proportional to 1/noise².
        """
        method = super().at_mode(noise, data)
        return replace(method, lr=self.lr * noise**2, hessian=self.hessian / noise**2)

    def restricted_to(self, names: Sequence[str], *, learns_others: bool = False) -> Self | None:
        """Return this method over some tensors, with the others as they are.

        It is None for a mapping of guides.

        Args:
            names: the tensors.
            learns_others: whether the others are learned as points, which is not possible.
        """
        if learns_others or isinstance(self.guide, Mapping):
            return None
        return replace(self, where=tuple(names))

    def large_network_settings(self, max_fan_in: int) -> dict[str, float | str]:
        """Return the warm-up for a large network."""
        return {"warmup": 0.4}

    def beta_at(self, step: int, steps: int) -> float:
        """Return the weight β of the KL of a step, which increases linearly in the warm-up.

        The loss has the KL of gains and points; the update has that of the Gaussians in closed
        form, with the same weight.

        Args:
            step: the index of the step.
            steps: the length of the fit.
        """
        return min(1.0, (step + 1) / max(1, round(self.warmup * steps)))

    def bound_of(self, target: Target, bayesian: Bayesian) -> NaturalBound:
        """Return the objective, which leaves the KL of the Gaussians to the optimizer.

        Args:
            target: the likelihood, prior and number of rows.
            bayesian: the network with its guides.

        Raises:
            ValueError: for priors that are not Normal.
        """
        problem = NaturalBound(self, target, bayesian, self.tempering(target))
        for gaussian in problem.gaussians:
            if gaussian is not None:
                _ = gaussian.normal_prior
        return problem

    def optimizer_of(self, problem: NaturalBound, steps: int) -> torch.optim.Optimizer:  # type: ignore[override]
        """Return the natural-gradient optimizer of the Gaussians, with Adam for the rest.

        Args:
            problem: has the guides and their parameters.
            steps: the length of the fit.
        """
        beta2 = self.beta2
        if beta2 is None:
            beta2 = min(0.99999, max(0.5, 1 - 5 / steps))
        gaussians = [gaussian for gaussian in problem.gaussians if gaussian is not None]
        factors = problem.factors
        learned = [p for gaussian in gaussians for p in gaussian.prior.parameters()]
        learned += [p for gaussian in gaussians for p in gaussian.parameters]
        learned += [p for factor in factors for p in factor.parameters]
        natural = {id(p) for p in learned}
        rates: dict[nn.Parameter, float] = {}
        for guide in problem.bayesian.guides:
            rates |= guide.learning_rates(self.plain_lr, 10 * self.plain_lr)
        plain = {
            parameter: rates.get(parameter, self.plain_lr)
            for parameter in problem.parameters()
            if parameter.requires_grad and id(parameter) not in natural
        }
        return OnlineNewton(
            gaussians,
            plain,
            problem.target.n / problem.cold,
            self,
            beta2,
            round(self.warmup * steps),
            problem.moments_of_tensors,
            factors,
        )


def log_std_of(h: Tensor, delta: Tensor | float, n: Tensor | float) -> Tensor:
    """Return log σ = −½·log(N·(h + δ)).

    Args:
        h: the curvature of the mean loss.
        delta: δ, the prior precision over N.
        n: N.
    """
    return -0.5 * torch.log(n * (h + delta))


def prior_moments(gaussian: ConditionalGaussian) -> tuple[Tensor, Tensor]:
    """Return the precision and the mean of a prior, in the shape of the tensor.

    Args:
        gaussian: has a Normal prior.
    """
    prior = gaussian.normal_prior
    precision = (-2 * prior.log_scale).exp()
    return precision.expand_as(gaussian.center), prior.mean.expand_as(gaussian.center)


def concatenate(tensors: Iterable[Tensor]) -> Tensor:
    """Return all entries as one vector.

    Args:
        tensors: of any shapes.
    """
    return torch.cat([tensor.flatten() for tensor in tensors])


def natural_step(
    state: dict[str, Any],
    grad: Tensor,
    curvature: Tensor,
    delta: Tensor | float,
    shift: Tensor,
    beta1: float,
    beta2: float,
) -> Tensor:
    """Update g and h and return the direction (g/(1 − β₁ᵗ) + δ·(m − m₀))/(h + δ) of ``IVON``.

    The relative change of h + δ is bounded by ±MAX_CHANGE before the square is added.

    Args:
        state: "g" and "h", which change in place, and "t", the number of the step.
        grad: ĝ.
        curvature: ĥ.
        delta: δ.
        shift: m − m₀.
        beta1: β₁.
        beta2: β₂.
    """
    g = state["g"]
    h = state["h"]
    g.lerp_(grad, 1 - beta1)
    precision = h + delta
    change = ((1 - beta2) * (curvature - h) / precision).clamp_(-MAX_CHANGE, MAX_CHANGE)
    h.add_(precision * (change + 0.5 * change.square()))
    return (g / (1 - beta1 ** state["t"]) + delta * shift) / (h + delta)


def bounded(move: Tensor, bound: Tensor) -> Tensor:
    """Return a move whose entries lie between −bound and bound.

    Args:
        move: of every entry.
        bound: of every entry, not negative.
    """
    return torch.maximum(torch.minimum(move, bound), -bound)


class OnlineNewton(torch.optim.Optimizer):
    """The update of ``IVON`` on pairs (center, log_std), by gradients without the Gaussian KL.

    All tensors are updated as one vector (of some MAX_CONCATENATED entries), since on a GPU a step
    of small tensors costs its number of operations.

    Args:
        gaussians: tensors with natural gradients.
        plain: parameters with Adam, with their learning rates.
        n: N, or N/β for a KL that is multiplied by β: β·KL with N data is the KL with N/β.
        method: has the learning rates, h₀ and β₁.
        beta2: β₂.
        warmup_steps: steps over which the weight of the KL rises; 0 by default.
        moments: E[z] and E[z²] of tensors with gains; by default there are none.
        factors: Gaussians with natural gradients of the whole loss; () by default.
    """

    def __init__(
        self,
        gaussians: list[ConditionalGaussian],
        plain: Mapping[nn.Parameter, float],
        n: float,
        method: IVON,
        beta2: float,
        warmup_steps: int = 0,
        moments: Mapping[ConditionalGaussian, GainMoments] | None = None,
        factors: Sequence[GaussianFactor] = (),
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": g.parameters} for g in gaussians]
        groups += [{"params": factor.parameters} for factor in factors]
        priors = [parameter for g in gaussians for parameter in g.prior.parameters()]
        for rate in dict.fromkeys(plain.values()):
            params = [p for p, rate_of_p in plain.items() if rate_of_p == rate]
            groups.append({"params": params, "lr": rate})
        if priors:
            groups.append({"params": priors, "lr": 10 * method.plain_lr})
        is_capturable = method.compile and groups[0]["params"][0].is_cuda
        super().__init__(groups, {"lr": method.lr, "capturable": is_capturable})
        self.n = n
        self.beta1: float = method.beta1
        self.beta2 = beta2
        self.hessian: float = method.hessian
        self.warmup_steps = warmup_steps
        self.gaussians = gaussians  # of the first groups
        self.moments: dict[ConditionalGaussian, GainMoments] = dict(moments or {})
        self.factors: list[GaussianFactor] = list(factors)  # of the groups that follow
        self.moments_of_locations: dict[nn.Parameter, GainMoments] = {
            location: moment
            for gaussian, moment in self.moments.items()
            if gaussian.gain is not None
            for location in gaussian.gain.locations
        }
        with torch.no_grad():
            self.initial_deltas: dict[ConditionalGaussian, Tensor] = {
                g: prior_moments(g)[0] / n for g in gaussians
            }
            self.initial_curvatures: dict[GaussianFactor, Tensor] = {
                factor: factor.weight / n * (-2 * factor.log_std).exp() for factor in factors
            }
            for factor in factors:  # β of the first step narrows it, as it does q(W|z)
                factor.log_std.sub_(0.5 * math.log(max(1, warmup_steps)))
            self._match_moments()
            for gaussian in gaussians:
                h = torch.full_like(gaussian.center, self.hessian)
                count = self.n * max(1.0, float(warmup_steps))
                delta = prior_moments(gaussian)[0] / count
                gaussian.log_std.copy_(log_std_of(h, delta, count))
        self.prior_vectors: dict[GroupKey, list[Tensor]] = {}  # of priors that are not learned

    def _init_state(self, p: Tensor, **state: Tensor) -> dict[str, Any]:
        """Set and return the state of a parameter; a recorded step counts on the device."""
        is_capturable = self.param_groups[0]["capturable"]
        counter = torch.zeros((), device=p.device) if is_capturable else 0
        self.state[p].update(t=counter, **state)
        return self.state[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step on all tensors."""
        groups: dict[GroupKey, list[ConditionalGaussian]] = {}
        entries = 0
        for gaussian in self.gaussians:
            center = gaussian.center
            if center.grad is not None:
                key = (
                    bool(list(gaussian.prior.parameters())),
                    gaussian in self.moments,
                    center.dtype,
                    center.device,
                    entries // MAX_CONCATENATED,
                )
                groups.setdefault(key, []).append(gaussian)
                entries += center.numel()
        for key, gaussians in groups.items():
            self._newton_step(gaussians, key)
        self._step_factors()
        self._match_moments()
        for group in self.param_groups[len(self.gaussians) + len(self.factors) :]:
            for parameter in group["params"]:
                self._adam_step(parameter, group)

    def _newton_step(self, gaussians: list[ConditionalGaussian], key: GroupKey) -> None:
        """Take a step on the tensors of a group, as one vector."""
        learns_prior, has_gains, *_ = key
        lr = self.param_groups[0]["lr"]
        centers = [gaussian.center for gaussian in gaussians]
        log_stds = [gaussian.log_std for gaussian in gaussians]
        states = [
            self.state[c]
            or self._init_state(c, g=torch.zeros_like(c), h=torch.full_like(c, self.hessian))
            for c in centers
        ]
        states[0]["t"] += 1  # one counter for all
        t = states[0]["t"]
        mean_gradients = [state["g"] for state in states]
        mean_curvatures = [state["h"] for state in states]
        center = concatenate(centers)
        log_std = concatenate(log_stds)
        slope = concatenate(_gradients(centers))
        log_slope = concatenate(_gradients(log_stds))
        g = concatenate(mean_gradients)
        h = concatenate(mean_curvatures)
        precision, prior_mean, initial_delta = self._prior_vectors(gaussians, key)
        count = self.n * self._tempering(t)
        delta = precision / count
        if learns_prior:
            h.clamp_min_(0.0)  # a wider prior must not make h + δ small or negative
            self._set_prior_gradients(gaussians)
        curvature = log_slope * (-2 * log_std).exp()  # ∂loss/∂log σ = σ·E[ĝ·ε]
        state = {"g": g, "h": h, "t": t}
        shift = center - prior_mean
        if has_gains:
            gain_mean, gain_square = self._gain_vectors(gaussians)
            shift = gain_square * center - gain_mean * prior_mean
        move = natural_step(state, slope, curvature, delta, shift, self.beta1, self.beta2)
        if has_gains:
            move /= gain_square.clamp_min(MIN_GAIN_SQUARE)
        # a Newton step, where a prior is narrow
        move *= (lr * (self.hessian + initial_delta)).clamp_max(1.0)
        max_move = log_std.exp()
        if has_gains:
            max_move /= gain_square.clamp_min(MIN_GAIN_SQUARE).sqrt()
        if learns_prior:
            max_move = torch.minimum(max_move, lr * precision.rsqrt())
        move = bounded(move, max_move)
        copy_entries(center - move, list(centers))
        copy_entries(log_std_of(h, delta, count), list(log_stds))
        copy_entries(g, mean_gradients)
        copy_entries(h, mean_curvatures)

    def _step_factors(self) -> None:
        """Take a step on the factors, those of a dtype and device as one vector.

        k follows the rule of h, of ∂loss/∂log std + β·weight/N = std²·k̂, and
        std² = β·weight/(N·k).
        """
        groups: dict[tuple[torch.dtype, torch.device], list[GaussianFactor]] = {}
        for factor in self.factors:
            if factor.mean.grad is not None:
                groups.setdefault((factor.mean.dtype, factor.mean.device), []).append(factor)
        for factors in groups.values():
            self._factor_step(factors)

    def _factor_step(self, factors: list[GaussianFactor]) -> None:
        """Take a step on factors as one vector."""
        means = [factor.mean for factor in factors]
        log_stds = [factor.log_std for factor in factors]
        states = [
            self.state[factor.mean]
            or self._init_state(
                factor.mean,
                g=torch.zeros_like(factor.mean),
                h=self.initial_curvatures[factor].clone(),
            )
            for factor in factors
        ]
        states[0]["t"] += 1  # one counter for all
        t = states[0]["t"]
        gs = [state["g"] for state in states]
        hs = [state["h"] for state in states]
        weights = [torch.full_like(factor.mean, factor.weight) for factor in factors]
        entropy = concatenate(weights) / (self.n * self._tempering(t))  # β·weight/N
        log_std = concatenate(log_stds)
        slope = concatenate(_gradients(means))
        log_slope = concatenate(_gradients(log_stds))
        curvature = (log_slope + entropy) * (-2 * log_std).exp()
        state = {"g": concatenate(gs), "h": concatenate(hs), "t": t}
        mean = concatenate(means)
        direction = natural_step(state, slope, curvature, 0.0, mean, self.beta1, self.beta2)
        rate = self.param_groups[0]["lr"] * self.hessian  # at most 1
        move = bounded(rate * direction, log_std.exp())
        copy_entries(mean - move, list(means))
        copy_entries(0.5 * torch.log(entropy / state["h"]), list(log_stds))
        copy_entries(state["g"], gs)
        copy_entries(state["h"], hs)

    def _match_moments(self) -> None:
        """Set the parameters of r(z|W) that are moments of z where the bound is largest."""
        for gaussian, moments in self.moments.items():
            if gaussian.moments_of_gains is not None:
                mean, log_std = gaussian.moments_of_gains
                mean.copy_(moments.mean)
                log_std.copy_(0.5 * moments.variance.clamp_min(MIN_VARIANCE).log())

    def _gain_vectors(self, gaussians: list[ConditionalGaussian]) -> tuple[Tensor, Tensor]:
        """Return E[z] and E[z²] of every weight, as vectors."""
        moments = [self.moments[gaussian] for gaussian in gaussians]
        pairs = list(zip(gaussians, moments, strict=True))
        mean = concatenate(gaussian.expand(moment.mean) for gaussian, moment in pairs)
        square = concatenate(gaussian.expand(moment.square) for gaussian, moment in pairs)
        return mean, square

    def _prior_vectors(self, gaussians: list[ConditionalGaussian], key: GroupKey) -> list[Tensor]:
        """Return the precisions and means of priors, and the initial δ, as vectors."""
        if key[0] or key not in self.prior_vectors:
            moments = [(*prior_moments(g), self.initial_deltas[g]) for g in gaussians]
            self.prior_vectors[key] = [concatenate(values) for values in zip(*moments, strict=True)]
        return self.prior_vectors[key]

    def _tempering(self, t: int | Tensor) -> float | Tensor:
        """Return 1/β of a step."""
        ratio = self.warmup_steps / t
        return ratio.clamp_min(1.0) if isinstance(ratio, Tensor) else max(1.0, ratio)

    def _set_prior_gradients(self, gaussians: list[ConditionalGaussian]) -> None:
        """Set the gradients of the parameters of learned priors to those of KL/N."""
        for gaussian in gaussians:
            prior = gaussian.normal_prior
            parameters = list(prior.parameters())
            mean = gaussian.center.detach()
            std = gaussian.log_std.detach().exp()
            if gaussian in self.moments:  # the gradient needs mean and variance of W only
                moments = self.moments[gaussian]
                variance = (moments.square - moments.mean.square()).clamp_min(0.0)
                std = (std.square() + gaussian.expand(variance) * mean.square()).sqrt()
                mean = gaussian.expand(moments.mean) * mean
            with torch.enable_grad():
                kl = prior.kl(mean, std) / self.n
            gradients = torch.autograd.grad(kl, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _adam_step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Take a step of Adam with its usual settings."""
        if parameter.grad is None:
            return
        state = self.state[parameter] or self._init_state(
            parameter, g=torch.zeros_like(parameter), v=torch.zeros_like(parameter)
        )
        state["t"] += 1
        state["g"].lerp_(parameter.grad, 0.1)
        state["v"].lerp_(parameter.grad.square(), 0.001)
        scale = (state["v"] / (1 - 0.999 ** state["t"])).sqrt_().add_(1e-8)
        move = group["lr"] / (1 - 0.9 ** state["t"]) * state["g"] / scale
        if parameter in self.moments_of_locations:
            move *= self.moments_of_locations[parameter].square.sqrt()
        parameter.sub_(move)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that all have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copy_entries(vector: Tensor, tensors: list[Tensor]) -> None:
    """Copy the entries of a vector into tensors, the inverse of ``concatenate``.

    Args:
        vector: all entries.
        tensors: change in place.
    """
    pieces = vector.split([tensor.numel() for tensor in tensors])
    values = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(tensors, values)
