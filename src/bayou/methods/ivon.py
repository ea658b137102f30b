"""The improved variational online Newton method: a factorized Gaussian at about the cost of
Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.guides import Delta, MeanField
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.gaussian import Factorized
from bayou.likelihoods import Likelihood
from bayou.methods.vi import EvidenceBound, Variational
from bayou.posteriors.guided import Guided
from bayou.priors import BoundNormal, BoundPart, Normal
from bayou.target import Target
from bayou.training.data import Data

ROUNDING = 1e-9  # of lr·hessian, which a rescaled method keeps
MOST_JOINED = 2**22  # entries of the vectors of a step, which are copies


@final
@dataclass(frozen=True, kw_only=True)
class IVON(Variational):
    """q(w) = Π N(m, 1/(N·(h + δ))) by natural gradients of the ELBO (Shen et al. 2024); δ: prior
    precision / N.

    With ĝ = ∇ of −log p(y|x, w)/N at a draw w = m + σ·ε, and ĥ = ĝ·ε/σ, whose mean is the expected
    curvature:

        g ← β₁·g + (1 − β₁)·ĝ          h ← β₂·h + (1 − β₂)·ĥ + ½(1 − β₂)²·(h − ĥ)²/(h + δ)
        m ← m − min(1, lr·(h₀ + δ))·(g/(1 − β₁ᵗ) + δ·(m − m₀))/(h + δ)

    The square keeps h + δ positive. ``hessian``: h₀, where the curvature of the mean loss starts.
    ``beta1``: β₁.
    ``beta2``: β₂, by default 1 − 5/steps, at most 0.99999, so that a run forgets its start.
    ``samples``: draws per
    step. ``local``: draw outputs instead of weights, at twice the cost and with less noise.
    ``plain_lr``: the rate of Adam for what is a point (normalization layers, learned noise); scales
    of a prior that are learned, by the gradient of the KL, have ten times that, and then h stays ≥
    0 and m moves by lr scales of the prior at most. ``warmup``: the fraction of steps over which
    the weight β of the KL rises from 0; in a network of 5,000 weights or more that was given
    neither a prior nor a length 0.4, with a prior by unit (``suited``). ``where``: a pattern or
    patterns of the tensors that are random; others keep their values. Priors must be Normal. Ends
    in the posterior of VI(MeanField()).
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
                f"IVON lr must be at most 1/hessian = {1 / self.hessian:.3g}, where a step is a whole Newton step, got "
                f"lr={self.lr!r}; the default is 0.1"
            )
        self._check_whole("samples")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"IVON {name} must lie in [0, 1), got {value!r}")
        if not isinstance(self.where, str | tuple) or not self.where:
            raise ValueError(
                f"IVON where must be a pattern or a tuple of patterns, got {self.where!r}"
            )
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"IVON warmup must lie between 0 and 1, got {self.warmup!r}")
        if self.optimizer is not None or self.clip is not None:
            raise ValueError(
                "IVON is an optimizer, and a clipped gradient would bias its curvature; reduce lr instead"
            )

    @property
    def without_density(self) -> str | None:
        return None if self.where == "*" else f"IVON(where={self.where!r})"

    def family(self, target: Target) -> Rules:
        odd = [
            name
            for name, prior in target.priors.items()
            if not isinstance(prior, BoundNormal) or isinstance(prior, BoundPart)
        ]
        if odd:
            raise ValueError(
                f"IVON needs Normal priors, but that of {odd[0]!r} is not; use VI(MeanField()) instead"
            )
        spec = MeanField(
            std=math.sqrt(self.tempering(target) / (target.n * self.hessian)), local=self.local
        )
        patterns = (self.where,) if isinstance(self.where, str) else self.where
        return (
            spec if self.where == "*" else dict.fromkeys(patterns, spec) | {"*": Delta(learn=False)}
        )

    def at_mode(self, noise: float, data: Data) -> Self:
        own = super().at_mode(noise, data)
        return replace(
            own, lr=self.lr * noise**2, hessian=self.hessian / noise**2
        )  # curvature ∝ 1/noise²

    def restricted_to(self, names: Sequence[str], *, learns_others: bool = False) -> Self | None:
        return None if learns_others else replace(self, where=tuple(names))

    def large(self, widest: int) -> dict[str, Any]:
        return {"warmup": 0.4}

    def beta_at(self, step: int, steps: int) -> float:
        return 0.0  # the update has the gradient of the KL in closed form

    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        beta2 = self.beta2 if self.beta2 is not None else min(0.99999, max(0.5, 1 - 5 / steps))
        gaussians = [guide for guide in problem.bayesian.guides if isinstance(guide, Factorized)]
        own = {id(parameter) for guide in gaussians for parameter in guide.parameters()}
        rest = [p for p in problem.parameters() if p.requires_grad and id(p) not in own]
        return OnlineNewton(
            gaussians,
            rest,
            problem.target.n / problem.cold,
            self,
            beta2,
            round(self.warmup * steps),
        )


def log_std_of(h: Tensor, delta: Tensor | float, n: Tensor | float) -> Tensor:
    """log σ = −½·log(N·(h + δ))."""
    return -0.5 * torch.log(n * (h + delta))


def prior_of(guide: Factorized) -> tuple[Tensor, Tensor]:
    """The precision and the mean of its prior, in the shape of the tensor."""
    assert isinstance(guide.prior, BoundNormal)
    return (-2 * guide.prior.log_scale).exp().expand_as(guide.center), guide.prior.mean.expand_as(
        guide.center
    )


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """All entries as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def natural_step(
    state: dict[str, Any],
    grad: Tensor,
    curvature: Tensor,
    delta: Tensor | float,
    shift: Tensor,
    b1: float,
    b2: float,
) -> Tensor:
    """Update g and h in ``state`` by ĝ and ĥ (see ``IVON``); (g/(1 − β₁ᵗ) + δ·(m − m₀))/(h + δ), m
    − m₀ the shift.
    """
    g, h = state["g"], state["h"]
    g.lerp_(grad, 1 - b1)
    square = (h - curvature).square_().div_(h + delta)
    h.lerp_(curvature, 1 - b2).add_(square, alpha=0.5 * (1 - b2) ** 2)
    return (g / (1 - b1 ** state["t"]) + delta * shift) / (h + delta)


class OnlineNewton(torch.optim.Optimizer):
    """The update of ``IVON`` on pairs (center, log_std) that hold the gradient of −E log-likelihood
    / N.

    ``n``: N, or N/β for a KL that is multiplied by β: β·KL with N data is the KL with N/β. All
    tensors are updated as one vector (of some MOST_JOINED entries), since on a GPU a step of small
    tensors costs its number of operations.
    """

    def __init__(
        self,
        gaussians: list[Factorized],
        rest: list[nn.Parameter],
        n: float,
        spec: IVON,
        beta2: float,
        rise: int = 0,
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": [g.center, g.log_std]} for g in gaussians]
        priors = [parameter for guide in gaussians for parameter in guide.prior.parameters()]
        plain = [
            {"params": rest, "lr": spec.plain_lr},
            {"params": priors, "lr": 10 * spec.plain_lr},
        ]
        used = groups + [group for group in plain if group["params"]]
        super().__init__(
            used, {"lr": spec.lr, "capturable": spec.compile and used[0]["params"][0].is_cuda}
        )
        self.n, self.beta1, self.beta2, self.hessian, self.rise = (
            n,
            spec.beta1,
            beta2,
            spec.hessian,
            rise,
        )
        self.gaussians = gaussians  # of the first groups
        with torch.no_grad():
            self.starts = {guide: prior_of(guide)[0] / n for guide in gaussians}  # δ
            for guide in gaussians:
                h, count = (
                    torch.full_like(guide.center, self.hessian),
                    self.n * max(1.0, float(rise)),
                )
                guide.log_std.copy_(log_std_of(h, prior_of(guide)[0] / count, count))
        self.fixed: dict[Any, list[Tensor]] = {}  # the vectors of priors that are not learned

    def _began(self, p: Tensor, **state: Tensor) -> dict[str, Any]:
        """The state of a parameter; a recorded step counts on the device."""
        counter = torch.zeros((), device=p.device) if self.param_groups[0]["capturable"] else 0
        self.state[p].update(t=counter, **state)
        return self.state[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step on all tensors."""
        parts: dict[tuple[Any, ...], list[Factorized]] = {}
        size = 0
        for guide in self.gaussians:
            if guide.center.grad is not None:
                kind = (
                    bool(list(guide.prior.parameters())),
                    guide.center.dtype,
                    guide.center.device,
                    size // MOST_JOINED,
                )
                parts.setdefault(kind, []).append(guide)
                size += guide.center.numel()
        for kind, guides in parts.items():
            self._newton(guides, kind)
        for group in self.param_groups[len(self.gaussians) :]:
            for parameter in group["params"]:
                self._adam(parameter, group)

    def _newton(self, guides: list[Factorized], kind: tuple[Any, ...]) -> None:
        learned, lr = kind[0], self.param_groups[0]["lr"]
        pairs = [
            list(pair)
            for pair in zip(*((guide.center, guide.log_std) for guide in guides), strict=True)
        ]
        states = [
            self.state[c]
            or self._began(c, g=torch.zeros_like(c), h=torch.full_like(c, self.hessian))
            for c in pairs[0]
        ]
        states[0]["t"] += 1  # one counter for all
        t, kept = states[0]["t"], [[state[name] for state in states] for name in ("g", "h")]
        center, log_std, slope, log_slope, g, h = map(
            joined, (*pairs, *([p.grad for p in part] for part in pairs), *kept)
        )
        if learned or kind not in self.fixed:
            parts = zip(*((*prior_of(guide), self.starts[guide]) for guide in guides), strict=True)
            self.fixed[kind] = [joined(part) for part in parts]
        precision, mean, start = self.fixed[kind]
        left = self.rise / t
        count = self.n * (
            left.clamp_min(1.0) if isinstance(left, Tensor) else max(1.0, left)
        )  # N/β
        delta = precision / count
        if learned:
            h.clamp_min_(0.0)  # a wider prior must not make h + δ small or negative
            for guide in guides:
                prior, parameters = guide.prior, list(guide.prior.parameters())
                assert isinstance(prior, BoundNormal)
                with torch.enable_grad():
                    kl = prior.kl(guide.center.detach(), guide.log_std.detach().exp()) / self.n
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(kl, parameters), strict=True
                ):
                    parameter.grad = gradient
        curvature = log_slope * (-2 * log_std).exp()  # ∂loss/∂log σ = σ·E[ĝ·ε]
        move = natural_step(
            {"g": g, "h": h, "t": t}, slope, curvature, delta, center - mean, self.beta1, self.beta2
        )
        move *= (lr * (self.hessian + start)).clamp_max(
            1.0
        )  # a Newton step, where a prior is narrow
        if learned:
            most = lr * precision.rsqrt()
            move = torch.maximum(torch.minimum(move, most), -most)
        for part, vector in zip(
            (*pairs, *kept), (center - move, log_std_of(h, delta, count), g, h), strict=True
        ):
            pieces = vector.split([one.numel() for one in part])
            torch._foreach_copy_(
                part, [new.view_as(old) for new, old in zip(pieces, part, strict=True)]
            )

    def _adam(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Adam with its usual settings."""
        if parameter.grad is None:
            return
        state = self.state[parameter] or self._began(
            parameter, g=torch.zeros_like(parameter), v=torch.zeros_like(parameter)
        )
        state["t"] += 1
        state["g"].lerp_(parameter.grad, 0.1)
        state["v"].lerp_(parameter.grad.square(), 0.001)
        scale = (state["v"] / (1 - 0.999 ** state["t"])).sqrt_().add_(1e-8)
        parameter.sub_(group["lr"] / (1 - 0.9 ** state["t"]) * state["g"] / scale)


@final
class IVONOptimizer(torch.optim.Optimizer):
    """The update of ``IVON`` for training loops of other libraries, in the place of Adam (Shen et
    al. 2024).

    The parameters are the means m of q. Call ``loss.backward()``, of a mean over the batch, inside
    the block ``with optimizer.sampled_params(train=True)`` and ``step()`` after it;
    ``step(closure)`` has that block itself. Several blocks before a step accumulate; divide each
    loss by their number, as for any optimizer. The gradients are kept here
    and not in ``.grad``: clipping them would bias the curvature. Noise is a function of (seed,
    number of the draw), the same on all ranks.

    Args:
        params: tensors or groups of them, which may have settings of their own.
        lr: the learning rate.
        n: the number N of training examples; a larger n gives their likelihood more weight than the
            prior's.
        prior_std: of the prior N(0, prior_std²) of every weight; it takes the place of weight
            decay.
        hessian: h₀, where the curvature of the mean loss starts.
        beta1: β₁, of the gradient.
        beta2: β₂, of the curvature; 1 − 5/steps forgets the start of a short run.
        seed: of the draws.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        n: int,
        prior_std: float = 1.0,
        hessian: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        seed: int = 0,
    ) -> None:
        IVON(lr=lr, hessian=hessian, beta1=beta1, beta2=beta2)  # which validates them
        if not n >= 1 or not 0 < prior_std < math.inf:
            raise ValueError(
                f"IVONOptimizer needs n >= 1 and a positive and finite prior_std, got n={n!r}, prior_std={prior_std!r}"
            )
        self.seed, self._drawn = seed, False
        settings = {
            "n": n,
            "prior_std": prior_std,
            "hessian": hessian,
            "beta1": beta1,
            "beta2": beta2,
        }
        super().__init__(params, {"lr": lr} | settings)

    def _each(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], dict[str, Any], float]]:
        """Every parameter with its settings, its state and δ."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    state = self.state[p]
                    if not state:
                        state.update(
                            t=0,
                            draws=0,
                            g=torch.zeros_like(p),
                            h=torch.full_like(p, group["hessian"]),
                        )
                    yield p, group, state, 1 / (group["n"] * group["prior_std"] ** 2)

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Inside, the parameters are a draw of q. ``train``: ``backward()`` is called there, for
        the next step.
        """
        drawn = []
        with torch.no_grad():
            for number, (p, group, state, delta) in enumerate(self._each()):
                std = log_std_of(state["h"], delta, group["n"]).exp()
                noise = rng.normal(1, p.shape, p, rng.fold(self.seed, number, state["draws"]))[0]
                drawn.append((p, state, p.detach().clone(), noise / std))
                state["draws"] += 1
                p.add_(std * noise)
                p.grad = None if train else p.grad
        self._drawn = True
        try:
            yield
        finally:
            self._drawn = False
            for p, state, mean, factor in drawn:
                p.data.copy_(mean)
                if train and p.grad is not None:
                    for name, value in (("grad", p.grad), ("product", p.grad * factor)):
                        state[name] = state[name] + value if name in state else value
                    p.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a closure, on its gradient at a draw."""
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.sampled_params(train=True):
                loss = closure()
        ready = [each for each in self._each() if "product" in each[2]]
        if self._drawn or not ready:
            raise RuntimeError(
                "call backward() inside a block of sampled_params(train=True), and step() after it"
            )
        for p, group, state, delta in ready:
            state["t"] += 1
            gradient, curvature = state.pop("grad"), state.pop("product")
            move = natural_step(
                state, gradient, curvature, delta, p, group["beta1"], group["beta2"]
            )
            p.sub_(group["lr"] * (group["hessian"] + delta) * move)
        return loss

    @torch.no_grad()
    def posterior(self, net: nn.Module, likelihood: Likelihood) -> Guided:
        """q as ``bayou.fit`` returns it: predictions, files, scores; a copy of the current means
        and scales.

        Args:
            net: the network of the parameters; those that the optimizer does not have stay points.
            likelihood: p(y | f), of which the loss was the mean of −log p.
        """
        own = {
            id(p): (g["prior_std"], log_std_of(state["h"], delta, g["n"]))
            for p, g, state, delta in self._each()
        }
        free = {
            name: own.get(id(p), (1.0, None))
            for name, p in net.named_parameters()
            if p.requires_grad
        }
        rules = {
            escape(name): Delta() if log is None else MeanField() for name, (_, log) in free.items()
        }
        bnn = Bayesian(net, rules, {escape(name): Normal(std) for name, (std, _) in free.items()})
        for guide in bnn.guides:
            log_std = free[guide.names[0]][1]
            if isinstance(guide, Factorized) and log_std is not None:
                guide.log_std.copy_(log_std)
        return bnn.posterior(likelihood, self.param_groups[0]["n"])
