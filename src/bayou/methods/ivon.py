"""The improved variational online Newton method: a factorized Gaussian at about the cost of Adam."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.guides import MeanField
from bayou.guides.gaussian import Factorized
from bayou.methods.vi import EvidenceBound, Variational
from bayou.priors import BoundNormal, BoundPart, BoundPrior
from bayou.target import Target
from bayou.training.data import Data


@final
@dataclass(frozen=True, kw_only=True)
class IVON(Variational):
    """q(w) = Π N(m, 1/(N·(h + δ))) by natural gradients of the ELBO (Shen et al. 2024); δ: prior precision / N.

    With ĝ = ∇ of −log p(y|x, w)/N at a draw w = m + σ·ε, and ĥ = ĝ·ε/σ, whose mean is the expected curvature:

        g ← β₁·g + (1 − β₁)·ĝ          h ← β₂·h + (1 − β₂)·ĥ + ½(1 − β₂)²·(h − ĥ)²/(h + δ)
        m ← m − lr·(h₀ + δ)·(g/(1 − β₁ᵗ) + δ·(m − m₀))/(h + δ)

    The square keeps h + δ positive. ``hessian``: h₀, where the curvature of the mean loss starts. ``beta1``: β₁.
    ``beta2``: β₂, by default 1 − 5/steps, at most 0.99999, so that a run forgets its start. ``samples``: draws per
    step. ``local``: draw outputs instead of weights, at twice the cost and with less noise. ``plain_lr``: the rate of
    Adam for what is a point (normalization layers, learned noise); scales of a prior that are learned, by the gradient
    of the KL, have ten times that, and then h stays ≥ 0 and m moves by lr scales of the prior at most. ``warmup``: the
    fraction of steps over which the weight β of the KL rises from 0; in a network of 5,000 weights or more that was
    given neither a prior nor a length 0.4, with a prior by unit (``suited``). Priors must be Normal. Ends in the same
    posterior as VI(MeanField()).
    """

    lr: float = 0.1
    hessian: float = 0.1
    beta1: float = 0.9
    beta2: float | None = None
    local: bool = False
    plain_lr: float = 1e-3
    warmup: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("hessian", "plain_lr")
        self._check_whole("samples")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"IVON {name} must lie in [0, 1), got {value!r}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"IVON warmup must lie between 0 and 1, got {self.warmup!r}")
        if self.optimizer is not None or self.clip is not None:
            raise ValueError("IVON is an optimizer, and a clipped gradient would bias its curvature; reduce lr instead")

    @property
    def without_density(self) -> None:
        return None

    def family(self, target: Target) -> MeanField:
        odd = [
            name
            for name, prior in target.priors.items()
            if not isinstance(prior, BoundNormal) or isinstance(prior, BoundPart)
        ]
        if odd:
            raise ValueError(f"IVON needs Normal priors, but that of {odd[0]!r} is not; use VI(MeanField()) instead")
        return MeanField(std=math.sqrt(self.tempering(target) / (target.n * self.hessian)), local=self.local)

    def at_mode(self, noise: float, data: Data) -> Self:
        own = super().at_mode(noise, data)
        return replace(own, lr=self.lr * noise**2, hessian=self.hessian / noise**2)  # curvature ∝ 1/noise²

    def large(self, widest: int) -> dict[str, Any]:
        return {"warmup": 0.4}

    def beta_at(self, step: int, steps: int) -> float:
        return 0.0  # the update has the gradient of the KL in closed form

    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        beta2 = self.beta2 if self.beta2 is not None else min(0.99999, max(0.5, 1 - 5 / steps))
        gaussians = [guide for guide in problem.bayesian.guides if isinstance(guide, Factorized)]
        own = {id(parameter) for guide in gaussians for parameter in guide.parameters()}
        rest = [p for p in problem.parameters() if p.requires_grad and id(p) not in own]
        return OnlineNewton(gaussians, rest, problem.target.n / problem.cold, self, beta2, round(self.warmup * steps))


class OnlineNewton(torch.optim.Optimizer):
    """The update of ``IVON`` on pairs (center, log_std) that hold the gradient of −E log-likelihood / N.

    ``n``: N, or N/β for a KL that is multiplied by β: β·KL with N data is the KL with N/β.
    """

    def __init__(
        self, gaussians: list[Factorized], rest: list[nn.Parameter], n: float, spec: IVON, beta2: float, rise: int = 0
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": [g.center, g.log_std], "lr": spec.lr} for g in gaussians]
        priors = [parameter for guide in gaussians for parameter in guide.prior.parameters()]
        plain = [{"params": rest, "lr": spec.plain_lr}, {"params": priors, "lr": 10 * spec.plain_lr}]
        super().__init__(groups + [group for group in plain if group["params"]], {"lr": spec.lr})
        self.n, self.beta1, self.beta2, self.hessian, self.rise = n, spec.beta1, beta2, spec.hessian, rise
        self.priors = [guide.prior for guide in gaussians]  # of the first groups
        with torch.no_grad():
            self.starts = [self._delta(prior, n) for prior in self.priors]
            for guide in gaussians:
                h, count = torch.full_like(guide.center, self.hessian), self._count(1)
                guide.log_std.copy_(self._log_std(h, self._delta(guide.prior, count), count))

    def _count(self, t: int) -> float:
        """N/β in step t, counted from 1."""
        return self.n * max(1.0, self.rise / t)

    def _delta(self, prior: BoundPrior, count: float) -> Tensor:
        """The precision of the prior over N/β."""
        assert isinstance(prior, BoundNormal)
        return (-2 * prior.log_scale).exp() / count

    def _log_std(self, h: Tensor, delta: Tensor, count: float) -> Tensor:
        return -0.5 * torch.log(count * (h + delta))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step on all tensors."""
        for group, prior, start in zip(self.param_groups, self.priors, self.starts, strict=False):
            self._newton(group, prior, start)
        for group in self.param_groups[len(self.priors) :]:
            for parameter in group["params"]:
                self._adam(parameter, group["lr"])

    def _newton(self, group: dict[str, Any], prior: BoundPrior, start: Tensor) -> None:
        assert isinstance(prior, BoundNormal)
        center, log_std = group["params"]
        if center.grad is None:
            return
        state = self.state[center]
        if not state:
            state["t"], state["g"] = 0, torch.zeros_like(center)
            state["h"] = torch.full_like(center, self.hessian)
        g, h, state["t"] = state["g"], state["h"], state["t"] + 1
        count = self._count(state["t"])
        delta, learned = self._delta(prior, count), list(prior.parameters())
        if learned:
            h.clamp_min_(0.0)  # a wider prior must not make h + δ small or negative
            with torch.enable_grad():
                slopes = torch.autograd.grad(prior.kl(center.detach(), log_std.detach().exp()) / self.n, learned)
            for parameter, slope in zip(learned, slopes, strict=True):
                parameter.grad = slope
        curvature = log_std.grad * (-2 * log_std).exp()  # ∂loss/∂log σ = σ·E[ĝ·ε]
        g.lerp_(center.grad, 1 - self.beta1)
        shrink = 1 - self.beta2
        square = (h - curvature).square_().div_(h + delta)
        h.lerp_(curvature, shrink).add_(square, alpha=0.5 * shrink**2)
        slope = g / (1 - self.beta1 ** state["t"]) + delta * (center - prior.mean)
        move = group["lr"] * (self.hessian + start) * slope / (h + delta)
        if learned:
            most = group["lr"] * prior.log_scale.exp()
            move = torch.maximum(torch.minimum(move, most), -most)
        center.sub_(move)
        log_std.copy_(self._log_std(h, delta, count))

    def _adam(self, parameter: nn.Parameter, lr: float) -> None:
        """Adam with its usual settings."""
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["t"], state["g"], state["v"] = 0, torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["t"] += 1
        state["g"].lerp_(parameter.grad, 0.1)
        state["v"].lerp_(parameter.grad.square(), 0.001)
        scale = (state["v"] / (1 - 0.999 ** state["t"])).sqrt_().add_(1e-8)
        parameter.sub_(lr / (1 - 0.9 ** state["t"]) * state["g"] / scale)
