"""The fitted distribution that ``Annealed`` starts from, over coordinates of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.params import Params, flatten, unflatten
from bayou.guides.guide import Guide
from bayou.kernels import Joint
from bayou.kernels.hmc import Density
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.guided import Guided

VARIANCE_DRAWS = 1000  # draws of q for its standard deviations, where they have no closed form
FAMILIES = "VI with MeanField, LowRank, JointFlow, Inducing or MNF, IVON, or Laplace with where='*'"


class InitialFamily:
    """q over coordinates v of its tensors, (n, K): the weights themselves, or their noise.

    Args:
        posterior: q.
        joint: has the names and shapes of the tensors.

    Raises:
        ValueError: if q has no exact density.
    """

    def __init__(self, posterior: Guided | GaussianPosterior, joint: Joint) -> None:
        self.posterior = posterior
        self.like: dict[str, Tensor] = joint.like
        self.guides: list[Guide] = list[Guide]()
        if isinstance(posterior, Guided):
            self.guides = list(posterior.bayesian.eval().guides)
        self.moments: tuple[Tensor, Tensor] | None = None  # mean and std of a factorized q
        if self.guides and all(guide.factorized for guide in self.guides):
            self.moments = self._flatten(posterior.mean()), self._flatten(posterior.std())
        self.sizes: list[int] = [coordinates.shape[1] for coordinates in self._draw_by_guide(2, 0)]
        if self.moments is None:
            self._unfold(self.draw(2, 0))  # raises before any work if there is no density

    def _flatten(self, params: Params, batch_axes: int = 0) -> Tensor:
        """Return the tensors as one vector."""
        return flatten({name: params[name] for name in self.like}, batch_axes)

    def draw(self, n: int, seed: int) -> Tensor:
        """Draw from q: (n, K).

        Args:
            n: the number of draws.
            seed: of the draws.
        """
        return torch.cat(self._draw_by_guide(n, seed), 1)

    def _draw_by_guide(self, n: int, seed: int) -> list[Tensor]:
        """Draw the coordinates of every guide, or all at once if they are the weights."""
        if self.moments is not None or not self.guides:
            return [self._flatten(self.posterior.sample(n, seed), 1).detach()]
        params = Params()
        coordinates = list[Tensor]()
        for guide in self.guides:
            guide_seed = rng.fold(seed, *guide.names)
            tensors, v = guide.coordinates(n, guide_seed, **guide.parent_arguments(params, n))
            params |= tensors
            coordinates.append(v.detach())
        return coordinates

    def variance(self, seed: int) -> Tensor:
        """Return Var[v] of each coordinate: (K,).

        Args:
            seed: of the draws, where the variance has no closed form.
        """
        if self.moments is None:
            return self.draw(VARIANCE_DRAWS, seed).var(0)
        return self.moments[1].square()

    def weights(self, v: Tensor) -> Tensor:
        """Return the tensors at v, as flat vectors (n, D).

        Args:
            v: coordinates (n, K).
        """
        return v if self.moments is not None else self._unfold(v)[0].detach()

    def terms(self, v: Tensor, log_joint: Density) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log q(v), its gradient, log p(w, D)·r(z | w)/q(w, z), and its gradient.

        Args:
            v: coordinates (n, K).
            log_joint: log p(w, D) and its gradient.

        Returns:
            (n,), (n, K), (n,) and (n, K).
        """
        if self.moments is not None:
            mean, std = self.moments
            u = (v - mean) / std
            log_q = -0.5 * (u.square().sum(-1) + LOG_2PI * len(mean)) - std.log().sum()
            log_q_gradient = -u / std
            value, gradient = log_joint(v)
            return log_q, log_q_gradient, value - log_q, gradient - log_q_gradient
        with torch.enable_grad():
            v = v.detach().requires_grad_()
            w, log_q, correction = self._unfold(v)
            value, gradient = log_joint(w.detach())
            (log_q_gradient,) = torch.autograd.grad(log_q.sum(), v, retain_graph=True)
            log_ratio = torch.linalg.vecdot(w, gradient) + correction
            (ratio_gradient,) = torch.autograd.grad(log_ratio.sum(), v)
        return log_q.detach(), log_q_gradient, value + correction.detach(), ratio_gradient

    def _unfold(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return w (n, D), log q(v) and the terms added to log p(w, D), (n,) each."""
        if not self.guides:
            log_q = self.posterior.log_prob(unflatten(v, self.like))
            return v, log_q, -log_q
        params = Params()
        log_q = v.new_zeros(len(v))
        correction = v.new_zeros(len(v))
        for guide, coordinates in zip(self.guides, v.split(self.sizes, 1), strict=True):
            unfolded = guide.unfold(coordinates, params)
            if unfolded is None:
                raise ValueError(
                    f"{self.posterior!r} has no density that is known exactly; "
                    f"Annealed takes {FAMILIES}"
                )
            params |= unfolded.params
            log_q = log_q + unfolded.log_q
            correction = correction + unfolded.extra
        return self._flatten(params, 1), log_q, correction
