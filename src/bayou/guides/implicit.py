"""Implicit posteriors: a Gaussian over all weights of a group, mixed over a noise network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, flatten
from bayou.flows import Side
from bayou.flows.core.nets import mlp
from bayou.guides.guide import KL, Draw, GuideSpec, Tensors, VectorGuide, gaussian_log_prob
from bayou.kernels import hmc

MASS_DRAWS = 16  # new draws of ε for the mass of HMC


class ResidualPerceptron(nn.Module):
    """z = ε + f(ε) with a perceptron f that starts at zero.

    The posterior then starts as a low-rank Gaussian.

    Args:
        dim: the size of ε and z.
        hidden: the units of the perceptron.
    """

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.body: nn.Sequential = mlp(
            dim, hidden, dim, nn.SiLU
        )  # smooth, since HMC uses its gradient

    def forward(self, eps: Tensor) -> Tensor:
        """Compute z from ε, (..., dim) both.

        Args:
            eps: the noise.
        """
        return eps + self.body(eps)


class ImplicitDraw(NamedTuple):
    """n draws of the weights and their noise.

    Args:
        eps: ε, (n, E).
        z: network(ε), (n, R).
        noise: ξ, (n, D).
        params: w as named tensors.
    """

    eps: Tensor
    z: Tensor
    noise: Tensor
    params: Params


@dataclass(frozen=True)
class HMCScore:
    """Draws z' ~ q(z|w), by one jump and trajectories of HMC from the ε of w.

    The start is a draw of q(ε|w), and both moves leave q(ε|w) invariant; but z' must be independent
    of the start, on which ∇w also depends. The jump selects one of the start and K new latents with
    probability ∝ q(w|ε^k) (i-SIR, Andrieu et al. 2018). The mass of HMC is the mean curvature of
    −log q(ε|w), M = I + E[JᵀGJ] with J = ∂z/∂ε at new ε; a trajectory is a quarter of a period
    long.

    Args:
        steps: the number of trajectories.
        leapfrogs: the steps of a trajectory.
    """

    steps: int
    leapfrogs: int

    @torch.no_grad()
    def sample_latents(
        self,
        guide: ImplicitGuide,
        draw: ImplicitDraw,
        proposals: Tensor,
        ratios: Tensor,
        seed: rng.Seed,
        start: int,
    ) -> Tensor:
        """Return z', the later half of a chain: (half of the steps, n, R).

        Args:
            guide: the posterior.
            draw: the weights.
            proposals: K new latents ε, (K, 1 or n, E).
            ratios: log q(w|z^k) − log q(w|z^0) of the new latents, (K, n).
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        gram = guide.factor.mT @ guide.factor
        pull = draw.noise @ guide.factor
        z = draw.z
        n, dim = draw.eps.shape
        chance = rng.uniform(n, (1 + self.steps,), draw.eps, rng.fold(seed, "accept"), start)
        eps = _jump(draw.eps, proposals, ratios, chance[:, 0])
        root = self._mass_root(guide, gram, draw.eps, seed)
        inverse_root = torch.linalg.inv(root)

        def log_prob(u: Tensor) -> tuple[Tensor, Tensor]:
            eps = u @ inverse_root
            ratio = log_ratio(guide.network(eps) - z, pull, gram)
            log_density = ratio - 0.5 * eps.square().sum(-1)
            return log_density.sum(), log_density

        def density(u: Tensor) -> tuple[Tensor, Tensor]:
            if torch.compiler.is_compiling():  # one graph; in eager mode it takes twice as long
                gradient, (_, log_density) = torch.func.grad_and_value(log_prob, has_aux=True)(u)
                return log_density, gradient
            with torch.enable_grad():
                total, log_density = log_prob(u.requires_grad_())
                return log_density.detach(), torch.autograd.grad(total, u)[0]

        noise = rng.normal(n, (self.steps, dim), draw.eps, rng.fold(seed, "momentum"), start)
        step_size = torch.full_like(chance[:, 0], 0.5 * math.pi / self.leapfrogs)
        inverse_mass = torch.ones_like(noise[0, 0])
        state = hmc.init(eps @ root, density)
        latents = []
        for step in range(self.steps):
            state, _ = hmc.step(
                state,
                density,
                noise[:, step],
                chance[:, step + 1],
                step_size,
                inverse_mass,
                self.leapfrogs,
            )
            if step >= self.steps // 2:
                latents.append(guide.network(state.position @ inverse_root))
        return torch.stack(latents)

    def _mass_root(
        self, guide: ImplicitGuide, gram: Tensor, reference: Tensor, seed: rng.Seed
    ) -> Tensor:
        """Return L of the mass M = L·Lᵀ of HMC, with which u = Lᵀε has unit mass."""
        dim = reference.shape[-1]
        eps = rng.normal(MASS_DRAWS, (dim,), reference, rng.fold(seed, "mass"))
        jacobian = torch.func.vmap(torch.func.jacrev(guide.network))(eps)  # (draws, R, E)
        mass = torch.eye(dim).to(gram) + (jacobian.mT @ gram @ jacobian).mean(0)
        return torch.linalg.cholesky(mass)


def _jump(eps: Tensor, proposals: Tensor, ratios: Tensor, chance: Tensor) -> Tensor:
    """Select one of the proposals and ε with probability ∝ exp(ratio): (n, E)."""
    n, dim = eps.shape
    log_weights = torch.cat([ratios, torch.zeros_like(ratios[:1])])  # the start comes last
    cumulative = log_weights.softmax(0).cumsum(0)
    index = (cumulative < chance).sum(0).clamp_max(len(proposals))
    candidates = torch.cat([proposals.expand(len(proposals), n, dim), eps.unsqueeze(0)])
    return candidates.gather(0, index.reshape(1, n, 1).expand(1, n, dim)).squeeze(0)


def log_ratio(step: Tensor, pull: Tensor, gram: Tensor) -> Tensor:
    """Compute log q(w|z + d) − log q(w|z) = d·Aᵀξ − ½·dᵀAᵀA·d, at no cost in D.

    Args:
        step: d, (..., n, R).
        pull: Aᵀξ, (n, R).
        gram: AᵀA, (R, R).

    Returns:
        The log ratios, (..., n).
    """
    return (step * pull).sum(-1) - 0.5 * (step @ gram * step).sum(-1)


class ImplicitGuide(VectorGuide):
    """w = center + σ ⊙ (A·z + ξ), z = network(ε), ε ~ N(0, I), ξ ~ N(0, I).

    q(w) = E_z N(center + σ⊙Az, diag σ²). With K new latents z^k, and the latent z^0 of w,
    E log 1/(K+1) Σ_{k=0..K} q(w|z^k) ≥ E log q(w): the KL is too large in expectation, less so for
    larger K. A (D, R) is in units of σ, so entropy is Σ log σ + H[A·z + ξ], and the mixture enters
    only through AᵀA and Aᵀξ: the K latents cost O(K·R²), independent of D.

    Args:
        tensors: the tensors with their priors.
        network: maps ε (n, E) to z (n, R).
        spec: the settings.
    """

    kl_kind = KL.bound
    kl_side = Side.upper
    closed: Tensor  # (D,) whether the prior of a weight has a closed KL to a Gaussian

    def __init__(self, tensors: Tensors, network: nn.Module, spec: SIVI) -> None:
        super().__init__(tensors)
        start = flatten(tensors.values)
        self.latent: int = spec.latent
        self.draws: int = spec.draws
        self.score: HMCScore | None = spec.score()
        self.network: nn.Module = network.to(start)
        with torch.no_grad():
            size = self.network(start.new_zeros(1, self.latent)).shape
        if len(size) != 2 or size[0] != 1:
            raise ValueError(
                f"the noise network must map (n, {self.latent}) to (n, R), "
                f"got {tuple(size)} for n = 1"
            )
        self.center: nn.Parameter = nn.Parameter(start.clone())
        self.log_std: nn.Parameter = nn.Parameter(torch.full_like(start, math.log(spec.std)))
        noise = rng.normal(len(start), size[1:], start, seed=0)
        self.factor: nn.Parameter = nn.Parameter(noise * (spec.spread / math.sqrt(len(start))))
        closed: Params = {}
        for name, value in tensors.values.items():
            kl = tensors.priors[name].kl(value, torch.ones_like(value))
            closed[name] = torch.full(value.shape, kl is not None)
        self.register_buffer("closed", flatten(closed).to(start.device), persistent=False)

    def draw_with_noise(self, n: int, seed: rng.Seed = None, start: int = 0) -> ImplicitDraw:
        """Return draws start .. start + n − 1 with their noise.

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        eps = rng.normal(n, (self.latent,), self.center, rng.fold(seed, "latent"), start)
        noise = rng.normal(n, self.center.shape, self.center, rng.fold(seed, "noise"), start)
        z = self.network(eps)
        w = self.center + self.log_std.exp() * (z @ self.factor.mT + noise)
        return ImplicitDraw(eps, z, noise, self.split(w))

    def conditional_kl(self, draw: ImplicitDraw) -> Tensor:
        """Compute KL(q(w|z) ‖ p(w)) where it is closed, log q(w|z) − log p(w) elsewhere: (n,).

        Args:
            draw: the weights with their noise.
        """
        std = self.log_std.exp()
        centers = self.split(self.center + std * (draw.z @ self.factor.mT))
        stds = self.split(std)
        total = draw.z.new_zeros(len(draw.z))
        for name, prior in zip(self.names, self.priors, strict=True):
            kl = prior.kl(centers[name], stds[name])
            if kl is None:
                w = draw.params[name]
                kl = gaussian_log_prob(w, centers[name], stds[name]) - prior.log_prob(w)
            total = total + kl
        return total

    def log_ratios(self, draw: ImplicitDraw, eps: Tensor) -> Tensor:
        """Compute log q(w|z^k) − log q(w|z^0) for z^k = network(ε^k): (K, n).

        Args:
            draw: the weights with their noise.
            eps: the latents ε^k, (K, 1 or n, E).
        """
        step = self.network(eps) - draw.z
        return log_ratio(step, draw.noise @ self.factor, self.factor.mT @ self.factor)

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        draw = self.draw_with_noise(n, seed, start)
        # One set of latents serves all draws: the expectation is the same, and draw i depends on
        # (seed, i) alone.
        latents = rng.normal(self.draws, (1, self.latent), self.center, rng.fold(seed, "others"))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.score is None):
            ratios = self.log_ratios(draw, latents)
            log_sum = torch.cat([ratios, torch.zeros_like(ratios[:1])]).logsumexp(0)
            bound = log_sum - math.log(self.draws + 1)
        if self.score is not None and torch.is_grad_enabled():
            posterior_latents = self.score.sample_latents(self, draw, latents, ratios, seed, start)
            bound = bound + self._entropy_gradient(draw, posterior_latents)
        return Draw(dict(draw.params), self.conditional_kl(draw) + bound)

    def _entropy_gradient(self, draw: ImplicitDraw, latents: Tensor) -> Tensor:
        """Return zero with the gradient of E[log q(w) − log q(w|z)]: (n,).

        ∇E log q(w) = E[∇log q(w)·∇w], and in v = A·z + ξ, ∇log q(v) = E_{q(z'|v)}[A·z' − v].
        Weights with a sampled prior use this; at the optimum its noise cancels that of the prior
        (Roeder et al. 2017). Weights with a closed-form KL subtract the gradient of log q(w|z),
        with the control variate ξ − A·(I + AᵀA)⁻¹·Aᵀξ: no noise of ξ if z is Gaussian.
        """
        pull = draw.noise @ self.factor
        gram = self.factor.mT @ self.factor
        factor = self.factor.detach()
        v = draw.z @ self.factor.mT + draw.noise
        w = self.join(draw.params)
        score = (latents.mean(0) @ factor.mT - v).detach()
        projection = torch.linalg.solve(gram + torch.eye(len(gram)).to(gram), pull.mT).mT
        reduced_score = (score + draw.noise - projection @ factor.mT).detach()
        sampled_term = score * (-self.log_std).exp().detach() * w + self.log_std
        terms = torch.where(self.closed, reduced_score * v, sampled_term)
        return (terms - terms.detach()).sum(-1)

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0, **parents: Any) -> Params:
        return self.draw_with_noise(n, seed, start).params

    def mean(self) -> Params:
        """Return w at ε = 0 and ξ = 0."""
        z = self.network(self.center.new_zeros(1, self.latent))
        return self.split(self.center + self.log_std.exp() * (z @ self.factor.mT).squeeze(0))


@dataclass(frozen=True)
class SIVI(GuideSpec):
    """Semi-implicit variational inference (Yin & Zhou 2018, arXiv:1805.11183).

    q(w) = E_{q(z)} N(w; center + σ ⊙ A·z, diag σ²) over all matched tensors as one vector w of D
    weights, z = network(ε), ε ~ N(0, I), A (D, R). The entropy is bounded with K = ``draws``
    latents, E log 1/(K+1) Σ_{k=0..K} q(w|z^k) ≥ E log q(w), so that the KL is an upper bound,
    E[KL(q(w|z) ‖ p(w)) + log 1/(K+1) Σ_k q(w|z^k)/q(w|z^0)]; z can increase the bound of the ELBO
    by at most log(K + 1) nats. By default z = ε + perceptron(ε), so that q starts as ``LowRank``.

    Args:
        draws: K, the number of latents in the bound of the entropy (default 100).
        latent: the size of ε (default 16).
        hidden: the units of the perceptron (default one layer of 64).
        network: a callable from ``latent`` to a network of noise, (n, latent) to (n, R), instead of
            the perceptron.
        spread: the initial length of a column of A, in units of σ (default 1).
        std: the initial σ (default 0.01).

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.guides.SIVI(draws=50)))
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

    def score(self) -> HMCScore | None:
        """Return the estimator of the entropy gradient; None for that of the bound."""
        return None

    def build(self, tensors: Tensors) -> ImplicitGuide:
        if self.network is None:
            network: nn.Module = ResidualPerceptron(self.latent, self.hidden)
        else:
            network = self.network(self.latent)
        return ImplicitGuide(tensors, network, self)


@final
@dataclass(frozen=True)
class UIVI(SIVI):
    """Unbiased implicit variational inference: ``SIVI`` trained by the score of its entropy.

    ∇_w log q(w) = E_{q(ε|w)} ∇_w log q(w|ε), ε ~ q(ε|w) by a chain from the ε of w: a jump to one
    of the K latents of the bound, then HMC (Titsias & Ruiz 2019, arXiv:1808.02078). The gradient is
    that of the KL itself, without the limit of log(K + 1) nats; its bias vanishes as the chain
    becomes independent of its start. The KL that is logged is the bound of SIVI.

    Args:
        draws: K, the number of latents in the bound of the entropy (default 100).
        latent: the size of ε (default 16).
        hidden: the units of the perceptron (default one layer of 64).
        network: a callable from ``latent`` to a network of noise, (n, latent) to (n, R), instead of
            the perceptron.
        spread: the initial length of a column of A, in units of σ (default 1).
        std: the initial σ (default 0.01).
        steps: trajectories of HMC (default 2).
        leapfrogs: steps of a trajectory (default 3).
    """

    steps: int = 2
    leapfrogs: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("steps", "leapfrogs")

    def score(self) -> HMCScore:
        return HMCScore(self.steps, self.leapfrogs)
