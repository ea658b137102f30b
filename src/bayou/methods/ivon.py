"""The improved variational online Newton method, as a method and as an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.guides import Delta, MeanField
from bayou.guides.gaussian import Factorized
from bayou.guides.rules import Rules
from bayou.methods.evidence_bound import EvidenceBound
from bayou.methods.vi import Variational
from bayou.network.target import Target
from bayou.priors import BoundNormal, BoundPart
from bayou.training.data import Data

ROUNDING = 1e-9  # of lr·hessian, which a rescaled method keeps
MAX_CONCATENATED = 2**22  # entries of the vectors of a step, which are copies

GroupKey = tuple[bool, torch.dtype, torch.device, int]


@final
@dataclass(frozen=True, kw_only=True)
class IVON(Variational):
    """IVON: a factorized Gaussian by natural gradients of the ELBO, at about the cost of Adam.

    q(w) = Π N(m, 1/(N·(h + δ))) with δ = prior precision / N. With ĝ = ∇ of −log p(y|x, w)/N at a
    draw w = m + σ·ε, and ĥ = ĝ·ε/σ, whose mean is the expected curvature:

        g ← β₁·g + (1 − β₁)·ĝ          h ← β₂·h + (1 − β₂)·ĥ + ½(1 − β₂)²·(h − ĥ)²/(h + δ)
        m ← m − min(1, lr·(h₀ + δ))·(g/(1 − β₁ᵗ) + δ·(m − m₀))/(h + δ)

    The square keeps h + δ positive. The curvature that scales a step is also the precision of q.
    In a network of 5,000 weights or more that was given neither a prior nor a length, ``warmup`` is
    0.4, with a prior by unit (``adapt_to_size``).

    Args:
        lr: the learning rate of the means, 0.1 by default; at most 1/hessian.
        hessian: h₀, where the curvature of the mean loss starts; 0.1 by default.
        beta1: β₁, of the gradient; 0.9 by default.
        beta2: β₂, of the curvature; None (default) is 1 − 5/steps, at most 0.99999, so that a run
            forgets its start.
        local: draw outputs instead of weights, at twice the cost and with less noise; False by
            default.
        plain_lr: the rate of Adam for what is a point (normalization layers, learned noise), 1e-3
            by default. Scales of a prior that are learned, by the gradient of the KL, have ten
            times that; then h stays ≥ 0 and m moves by lr scales of the prior at most.
        warmup: the fraction of steps over which the weight β of the KL rises from 0; 0 by default.
        where: a pattern or patterns of the tensors that are random, "*" by default; others keep
            their values.
        samples: draws of the weights in a step; 1 by default.
        start: where q is centered at first: "mode" (default), "network", or a method.

    Returns:
        ``fit`` returns the ``Guided`` posterior of VI(MeanField()).

    Raises:
        ValueError: for priors that are not Normal, a clipped gradient or another optimizer, and
            settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.IVON(steps=10)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> sorted(posterior.std())
    ['bias', 'weight']

    Paper: Shen et al. 2024, https://arxiv.org/abs/2402.17641.
    """

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
        if self.optimizer is not None or self.clip is not None:
            raise ValueError(
                "IVON is an optimizer, and a clipped gradient would bias its curvature; "
                "reduce lr instead"
            )

    @property
    def without_density(self) -> str | None:
        """Return the name of this method if some weights are points."""
        return None if self.where == "*" else f"IVON(where={self.where!r})"

    def family(self, target: Target) -> Rules:
        """Return factorized Gaussians whose scale is that of h₀.

        Args:
            target: network, likelihood and prior.
        """
        for name, prior in target.priors.items():
            if not isinstance(prior, BoundNormal) or isinstance(prior, BoundPart):
                raise ValueError(
                    f"IVON needs Normal priors, but that of {name!r} is not; "
                    "use VI(MeanField()) instead"
                )
        std = math.sqrt(self.tempering(target) / (target.n * self.hessian))
        mean_field = MeanField(std=std, local=self.local)
        if self.where == "*":
            return mean_field
        patterns = (self.where,) if isinstance(self.where, str) else self.where
        return dict.fromkeys(patterns, mean_field) | {"*": Delta(learn=False)}

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method from the network as it is, for a loss with this noise.

        The curvature is proportional to 1/noise².
        """
        method = super().at_mode(noise, data)
        return replace(method, lr=self.lr * noise**2, hessian=self.hessian / noise**2)

    def restricted_to(self, names: Sequence[str], *, learns_others: bool = False) -> Self | None:
        """Return this method over some tensors, with the others as they are.

        Args:
            names: the tensors.
            learns_others: whether the others are learned as points, which is not possible.
        """
        return None if learns_others else replace(self, where=tuple(names))

    def large_network_settings(self, max_fan_in: int) -> dict[str, float | str]:
        """Return the warm-up for a large network."""
        return {"warmup": 0.4}

    def beta_at(self, step: int, steps: int) -> float:
        """Return 0: the update has the gradient of the KL in closed form.

        Args:
            step: the index of the step.
            steps: the length of the fit.
        """
        return 0.0

    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        """Return the natural-gradient optimizer of the Gaussians, with Adam for the rest.

        Args:
            problem: has the guides and their parameters.
            steps: the length of the fit.
        """
        beta2 = self.beta2
        if beta2 is None:
            beta2 = min(0.99999, max(0.5, 1 - 5 / steps))
        gaussians = [guide for guide in problem.bayesian.guides if isinstance(guide, Factorized)]
        natural = {id(parameter) for guide in gaussians for parameter in guide.parameters()}
        plain = [p for p in problem.parameters() if p.requires_grad and id(p) not in natural]
        return OnlineNewton(
            gaussians,
            plain,
            problem.target.n / problem.cold,
            self,
            beta2,
            round(self.warmup * steps),
        )


def log_std_of(h: Tensor, delta: Tensor | float, n: Tensor | float) -> Tensor:
    """Return log σ = −½·log(N·(h + δ)).

    Args:
        h: the curvature of the mean loss.
        delta: δ, the prior precision over N.
        n: N.
    """
    return -0.5 * torch.log(n * (h + delta))


def normal_prior(guide: Factorized) -> BoundNormal:
    """Return the prior of a guide, which must be Normal.

    Args:
        guide: has a prior.
    """
    if not isinstance(guide.prior, BoundNormal):
        raise TypeError(f"IVON needs a Normal prior of {guide.name!r}")
    return guide.prior


def prior_moments(guide: Factorized) -> tuple[Tensor, Tensor]:
    """Return the precision and the mean of a prior, in the shape of the tensor.

    Args:
        guide: has a Normal prior.
    """
    prior = normal_prior(guide)
    precision = (-2 * prior.log_scale).exp()
    return precision.expand_as(guide.center), prior.mean.expand_as(guide.center)


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
    square = (h - curvature).square_().div_(h + delta)
    h.lerp_(curvature, 1 - beta2).add_(square, alpha=0.5 * (1 - beta2) ** 2)
    return (g / (1 - beta1 ** state["t"]) + delta * shift) / (h + delta)


class OnlineNewton(torch.optim.Optimizer):
    """The update of ``IVON`` on pairs (center, log_std) with gradients of −E log-likelihood / N.

    All tensors are updated as one vector (of some MAX_CONCATENATED entries), since on a GPU a step
    of small tensors costs its number of operations.

    Args:
        gaussians: the guides with natural gradients.
        plain: parameters with Adam.
        n: N, or N/β for a KL that is multiplied by β: β·KL with N data is the KL with N/β.
        method: has the learning rates, h₀ and β₁.
        beta2: β₂.
        warmup_steps: steps over which the weight of the KL rises; 0 by default.
    """

    def __init__(
        self,
        gaussians: list[Factorized],
        plain: list[nn.Parameter],
        n: float,
        method: IVON,
        beta2: float,
        warmup_steps: int = 0,
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": [g.center, g.log_std]} for g in gaussians]
        priors = [parameter for guide in gaussians for parameter in guide.prior.parameters()]
        adam_groups = [
            {"params": plain, "lr": method.plain_lr},
            {"params": priors, "lr": 10 * method.plain_lr},
        ]
        groups += [group for group in adam_groups if group["params"]]
        is_capturable = method.compile and groups[0]["params"][0].is_cuda
        super().__init__(groups, {"lr": method.lr, "capturable": is_capturable})
        self.n = n
        self.beta1 = method.beta1
        self.beta2 = beta2
        self.hessian = method.hessian
        self.warmup_steps = warmup_steps
        self.gaussians = gaussians  # of the first groups
        with torch.no_grad():
            self.initial_deltas = {guide: prior_moments(guide)[0] / n for guide in gaussians}
            for guide in gaussians:
                h = torch.full_like(guide.center, self.hessian)
                count = self.n * max(1.0, float(warmup_steps))
                guide.log_std.copy_(log_std_of(h, prior_moments(guide)[0] / count, count))
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
        groups: dict[GroupKey, list[Factorized]] = {}
        entries = 0
        for guide in self.gaussians:
            if guide.center.grad is not None:
                key = (
                    bool(list(guide.prior.parameters())),
                    guide.center.dtype,
                    guide.center.device,
                    entries // MAX_CONCATENATED,
                )
                groups.setdefault(key, []).append(guide)
                entries += guide.center.numel()
        for key, guides in groups.items():
            self._newton_step(guides, key)
        for group in self.param_groups[len(self.gaussians) :]:
            for parameter in group["params"]:
                self._adam_step(parameter, group)

    def _newton_step(self, guides: list[Factorized], key: GroupKey) -> None:
        """Take a step on the tensors of a group, as one vector."""
        learns_prior = key[0]
        lr = self.param_groups[0]["lr"]
        centers = [guide.center for guide in guides]
        log_stds = [guide.log_std for guide in guides]
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
        precision, prior_mean, initial_delta = self._prior_vectors(guides, key)
        count = self.n * self._tempering(t)
        delta = precision / count
        if learns_prior:
            h.clamp_min_(0.0)  # a wider prior must not make h + δ small or negative
            self._set_prior_gradients(guides)
        curvature = log_slope * (-2 * log_std).exp()  # ∂loss/∂log σ = σ·E[ĝ·ε]
        state = {"g": g, "h": h, "t": t}
        move = natural_step(
            state, slope, curvature, delta, center - prior_mean, self.beta1, self.beta2
        )
        # a Newton step, where a prior is narrow
        move *= (lr * (self.hessian + initial_delta)).clamp_max(1.0)
        if learns_prior:
            max_move = lr * precision.rsqrt()
            move = torch.maximum(torch.minimum(move, max_move), -max_move)
        copy_entries(center - move, list(centers))
        copy_entries(log_std_of(h, delta, count), list(log_stds))
        copy_entries(g, mean_gradients)
        copy_entries(h, mean_curvatures)

    def _prior_vectors(self, guides: list[Factorized], key: GroupKey) -> list[Tensor]:
        """Return the precisions and means of priors, and the initial δ, as vectors."""
        if key[0] or key not in self.prior_vectors:
            moments = [(*prior_moments(guide), self.initial_deltas[guide]) for guide in guides]
            self.prior_vectors[key] = [concatenate(values) for values in zip(*moments, strict=True)]
        return self.prior_vectors[key]

    def _tempering(self, t: int | Tensor) -> float | Tensor:
        """Return 1/β of a step."""
        ratio = self.warmup_steps / t
        return ratio.clamp_min(1.0) if isinstance(ratio, Tensor) else max(1.0, ratio)

    def _set_prior_gradients(self, guides: list[Factorized]) -> None:
        """Set the gradients of the parameters of learned priors to those of KL/N."""
        for guide in guides:
            prior = normal_prior(guide)
            parameters = list(prior.parameters())
            with torch.enable_grad():
                kl = prior.kl(guide.center.detach(), guide.log_std.detach().exp()) / self.n
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
        parameter.sub_(group["lr"] / (1 - 0.9 ** state["t"]) * state["g"] / scale)


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
