"""Implicit posteriors: a Gaussian over all weights of a group, mixed over the output of a noise
network.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows import Side
from bayou.flows.core.nets import mlp
from bayou.guides.guide import KL, Draw, GuideSpec, Tensors, VectorGuide, gaussian_log_prob
from bayou.kernels import hmc
from bayou.params import Params, flatten

PROBES = 16  # new draws of ε for the mass of HMC


class Residual(nn.Module):
    """z = ε + f(ε) with a perceptron f that starts at zero, so that the posterior starts as a
    low-rank Gaussian.
    """

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.body = mlp(dim, hidden, dim, nn.SiLU)  # smooth, since HMC uses its gradient

    def forward(self, eps: Tensor) -> Tensor:
        return eps + self.body(eps)


class Made(NamedTuple):
    """n draws and their noise: ε (n, E), z (n, R), ξ (n, D), w as named tensors."""

    eps: Tensor
    z: Tensor
    noise: Tensor
    params: Params


@dataclass(frozen=True)
class HMCScore:
    """z' ~ q(z|w), by one jump and ``steps`` trajectories of HMC, ``leapfrogs`` steps each, from
    the ε of w.

    The start is a draw of q(ε|w), and both moves leave q(ε|w) invariant; but z' must be independent
    of the start, on which ∇w also depends. The jump selects one of the start and K new latents with
    probability ∝ q(w|ε^k) (i-SIR, Andrieu et al. 2018). The mass of HMC is the mean curvature of
    −log q(ε|w), M = I + E[JᵀGJ] with J = ∂z/∂ε at new ε; a trajectory is a quarter of a period
    long.
    """

    steps: int
    leapfrogs: int

    @torch.no_grad()
    def latents(
        self,
        guide: ImplicitGuide,
        made: Made,
        others: Tensor,
        ratios: Tensor,
        seed: rng.Seed,
        start: int,
    ) -> Tensor:
        """z' (half of the steps, n, R), the later half of a chain. ``others`` (K, 1 or n, E),
        ``ratios`` (K, n).
        """
        gram, pull, z = guide.factor.mT @ guide.factor, made.noise @ guide.factor, made.z
        n, dim = made.eps.shape
        weights = (
            torch.cat([ratios, torch.zeros_like(ratios[:1])]).softmax(0).cumsum(0)
        )  # the start comes last
        chance = rng.uniform(n, (1 + self.steps,), made.eps, rng.fold(seed, "accept"), start)
        choice = (
            (weights < chance[:, 0])
            .sum(0)
            .clamp_max(len(others))
            .reshape(1, n, 1)
            .expand(1, n, dim)
        )
        eps = (
            torch.cat([others.expand(len(others), n, dim), made.eps.unsqueeze(0)])
            .gather(0, choice)
            .squeeze(0)
        )
        probes = rng.normal(PROBES, (dim,), made.eps, rng.fold(seed, "mass"))
        jacobian = torch.func.vmap(torch.func.jacrev(guide.network))(probes)  # (P, R, E)
        mass = torch.eye(dim).to(gram) + (jacobian.mT @ gram @ jacobian).mean(0)
        root = torch.linalg.cholesky(mass)  # M = L·Lᵀ: u = Lᵀε has unit mass
        back = torch.linalg.inv(root)

        def log_prob(u: Tensor) -> tuple[Tensor, Tensor]:
            eps = u @ back
            each = log_ratio(guide.network(eps) - z, pull, gram) - 0.5 * eps.square().sum(-1)
            return each.sum(), each

        def density(u: Tensor) -> tuple[Tensor, Tensor]:
            if (
                torch.compiler.is_compiling()
            ):  # one graph; in eager mode it takes twice as long as the loop below
                gradient, (_, each) = torch.func.grad_and_value(log_prob, has_aux=True)(u)
                return each, gradient
            with torch.enable_grad():
                total, each = log_prob(u.requires_grad_())
                return each.detach(), torch.autograd.grad(total, u)[0]

        noise = rng.normal(n, (self.steps, dim), made.eps, rng.fold(seed, "momentum"), start)
        size = torch.full_like(chance[:, 0], 0.5 * math.pi / self.leapfrogs)
        state, found = hmc.init(eps @ root, density), []
        for s in range(self.steps):
            step = noise[:, s], chance[:, s + 1], size, torch.ones_like(noise[0, s]), self.leapfrogs
            state, _ = hmc.step(state, density, *step)
            if s >= self.steps // 2:
                found.append(guide.network(state.position @ back))
        return torch.stack(found)


def log_ratio(step: Tensor, pull: Tensor, gram: Tensor) -> Tensor:
    """log q(w|z + d) − log q(w|z) = d·Aᵀξ − ½·dᵀAᵀA·d for steps d (..., n, R): (..., n), at no cost
    in D.
    """
    return (step * pull).sum(-1) - 0.5 * (step @ gram * step).sum(-1)


class ImplicitGuide(VectorGuide):
    """w = center + σ ⊙ (A·z + ξ), z = network(ε), ε ~ N(0, I), ξ ~ N(0, I): q(w) = E_z N(center +
    σ⊙Az, diag σ²).

    With K new latents z^k, and the latent z^0 of w, E log 1/(K+1) Σ_{k=0..K} q(w|z^k) ≥ E log q(w):
    the KL is too large in expectation, less so for larger K. A (D, R) is in units of σ, so entropy
    is Σ log σ + H[A·z + ξ], and the mixture enters only through AᵀA and Aᵀξ: the K latents cost
    O(K·R²), independent of D.
    """

    kl_kind = KL.bound
    kl_side = Side.upper
    closed: Tensor  # (D,) whether the prior of a weight has a closed KL to a Gaussian

    def __init__(self, tensors: Tensors, network: nn.Module, spec: SemiImplicit) -> None:
        super().__init__(tensors)
        start, latent = flatten(tensors.values), spec.latent
        self.latent, self.draws, self.score = latent, spec.draws, spec.score()
        self.network = network.to(start)
        with torch.no_grad():
            size = self.network(start.new_zeros(1, latent)).shape
        if len(size) != 2 or size[0] != 1:
            raise ValueError(
                f"the noise network must map (n, {latent}) to (n, R), got {tuple(size)} for n = 1"
            )
        self.center = nn.Parameter(start.clone())
        self.log_std = nn.Parameter(torch.full_like(start, math.log(spec.std)))
        noise = rng.normal(len(start), size[1:], start, seed=0)
        self.factor = nn.Parameter(noise * (spec.spread / math.sqrt(len(start))))
        closed = {
            name: torch.full(
                value.shape, tensors.priors[name].kl(value, torch.ones_like(value)) is not None
            )
            for name, value in tensors.values.items()
        }
        self.register_buffer("closed", flatten(closed).to(start.device), persistent=False)

    def make(self, n: int, seed: rng.Seed = None, start: int = 0) -> Made:
        """Draws start .. start + n − 1."""
        eps = rng.normal(n, (self.latent,), self.center, rng.fold(seed, "latent"), start)
        noise = rng.normal(n, self.center.shape, self.center, rng.fold(seed, "noise"), start)
        z = self.network(eps)
        return Made(
            eps,
            z,
            noise,
            self.split(self.center + self.log_std.exp() * (z @ self.factor.mT + noise)),
        )

    def conditional_kl(self, made: Made) -> Tensor:
        """KL(q(w|z) ‖ p(w)): closed where the prior has it, log q(w|z) − log p(w) elsewhere;
        (n,).
        """
        std = self.log_std.exp()
        centers = self.split(self.center + std * (made.z @ self.factor.mT))
        stds, total = self.split(std), made.z.new_zeros(len(made.z))
        for name, prior in zip(self.names, self.priors, strict=True):
            kl, w = prior.kl(centers[name], stds[name]), made.params[name]
            if kl is None:
                kl = gaussian_log_prob(w, centers[name], stds[name]) - prior.log_prob(w)
            total = total + kl
        return total

    def log_ratios(self, made: Made, eps: Tensor) -> Tensor:
        """log q(w|z^k) − log q(w|z^0) for z^k = network(ε^k), ε (K, 1 or n, E): (K, n)."""
        return log_ratio(
            self.network(eps) - made.z, made.noise @ self.factor, self.factor.mT @ self.factor
        )

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        made = self.make(n, seed, start)
        # One set of latents serves all draws: the expectation is the same, and draw i depends on
        # (seed, i) alone.
        others = rng.normal(self.draws, (1, self.latent), self.center, rng.fold(seed, "others"))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.score is None):
            ratios = self.log_ratios(made, others)
            bound = torch.cat([ratios, torch.zeros_like(ratios[:1])]).logsumexp(0) - math.log(
                self.draws + 1
            )
        if self.score is not None and torch.is_grad_enabled():
            bound = bound + self._path(
                made, self.score.latents(self, made, others, ratios, seed, start)
            )
        return Draw(dict(made.params), self.conditional_kl(made) + bound)

    def _path(self, made: Made, latents: Tensor) -> Tensor:
        """Zero in value; its gradient is that of E[log q(w) − log q(w|z)], (n,).

        ∇E log q(w) = E[∇log q(w)·∇w], and in v = A·z + ξ, ∇log q(v) = E_{q(z'|v)}[A·z' − v].
        Weights with a sampled prior use this; at the optimum its noise cancels that of the prior
        (Roeder et al. 2017). Weights with a closed-form KL subtract the gradient of log q(w|z),
        with the control variate ξ − A·(I + AᵀA)⁻¹·Aᵀξ: no noise of ξ if z is Gaussian.
        """
        pull, gram, factor = (
            made.noise @ self.factor,
            self.factor.mT @ self.factor,
            self.factor.detach(),
        )
        v, w = made.z @ self.factor.mT + made.noise, self.join(made.params)
        score = (latents.mean(0) @ factor.mT - v).detach()
        known = torch.linalg.solve(gram + torch.eye(len(gram)).to(gram), pull.mT).mT
        less = (score + made.noise - known @ factor.mT).detach()
        each = torch.where(
            self.closed, less * v, score * (-self.log_std).exp().detach() * w + self.log_std
        )
        return (each - each.detach()).sum(-1)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        return self.make(n, seed, start).params

    def mean(self) -> Params:
        z = self.network(self.center.new_zeros(1, self.latent))
        return self.split(self.center + self.log_std.exp() * (z @ self.factor.mT).squeeze(0))


@dataclass(frozen=True)
class SemiImplicit(GuideSpec):
    """Settings of SIVI and UIVI.

    Args:
        draws: K, the number of latents in the bound of the entropy.
        latent: the size of ε.
        hidden: the units of the perceptron.
        network: a callable from ``latent`` to a network of noise, (n, latent) to (n, R), instead of
            the perceptron.
        spread: the initial length of a column of A, in units of σ.
        std: the initial σ.
    """

    draws: int = 100
    latent: int = 16
    hidden: tuple[int, ...] = (64,)
    network: Callable[[int], nn.Module] | None = None
    spread: float = 1.0
    std: float = 0.01
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_whole("draws", "latent")
        self._check_positive("spread", "std")

    @abstractmethod
    def score(self) -> HMCScore | None:
        """The estimator of the entropy gradient; None: that of the bound."""

    def build(self, tensors: Tensors) -> ImplicitGuide:
        network = (
            Residual(self.latent, self.hidden)
            if self.network is None
            else self.network(self.latent)
        )
        return ImplicitGuide(tensors, network, self)


@final
@dataclass(frozen=True)
class SIVI(SemiImplicit):
    """Semi-implicit posterior q(w) = E_{q(z)} N(w; mean(z), diag σ²) over all matched tensors (Yin
    & Zhou 2018).

    z = network(ε), ε ~ N(0, I) of size ``latent``, mean(z) = center + σ ⊙ A·z, A of D × R numbers
    for D weights. The entropy is bounded with K = ``draws`` latents, E log 1/(K+1) Σ_{k=0..K}
    q(w|z^k) ≥ E log q(w), and the resulting bound of the ELBO is maximized; z can increase it by at
    most log(K + 1) nats. By default z = ε + perceptron(ε), so that q starts as ``LowRank``.
    """

    def score(self) -> None:
        return None


@final
@dataclass(frozen=True)
class UIVI(SemiImplicit):
    """The family of ``SIVI``, trained by the score of its entropy (Titsias & Ruiz 2019).

    ∇_w log q(w) = E_{q(ε|w)} ∇_w log q(w|ε), ε ~ q(ε|w) by a chain from the ε of w: a jump to one
    of the K latents of the bound, then HMC. The gradient is that of the KL itself, without the
    limit of log(K + 1) nats; its bias vanishes as the chain becomes independent of its start. The
    KL that is logged is the bound of SIVI.

    Args:
        steps: trajectories of HMC.
        leapfrogs: steps of a trajectory.
    """

    steps: int = 2
    leapfrogs: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("steps", "leapfrogs")

    def score(self) -> HMCScore:
        return HMCScore(self.steps, self.leapfrogs)
