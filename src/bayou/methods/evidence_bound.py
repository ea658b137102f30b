"""The objective of variational inference: the negative ELBO of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bayou.inference.network_problem import NetworkProblem, validation_loss
from bayou.likelihoods.base import BoundLikelihood
from bayou.network import forward_inputs
from bayou.network.target import Target
from bayou.posteriors.guided import Bayesian
from bayou.posteriors.network_draw import NetworkDraw
from bayou.training.data import Data
from bayou.training.ranks import current, reseed_for_rank
from bayou.training.settings import Settings

if TYPE_CHECKING:
    from bayou.methods.vi import Variational

HELD_OUT_DRAWS = 8  # for the validation loss


class Baseline(nn.Module):
    """A running mean of the reward, for REINFORCE with one draw per step.

    Its buffers are part of every checkpoint.

    Args:
        like: a tensor whose dtype and device the buffers have.
        decay: the weight of the past in an update, 0.9 by default.
    """

    total: Tensor
    weight: Tensor

    def __init__(self, like: Tensor, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("total", torch.zeros((), dtype=like.dtype, device=like.device))
        self.register_buffer("weight", torch.zeros((), dtype=like.dtype, device=like.device))

    @property
    def value(self) -> Tensor:
        """Return the mean so far; 0 before there is one."""
        return self.total / self.weight.clamp_min(1 - self.decay)

    @torch.no_grad()
    def observe(self, reward: Tensor | None) -> None:
        """Update with the reward of a finished step.

        Args:
            reward: a scalar; None for a step without discrete gains.
        """
        if reward is not None:
            self.total.mul_(self.decay).add_(reward, alpha=1 - self.decay)
            self.weight.mul_(self.decay).add_(1 - self.decay)


class EvidenceBound(NetworkProblem):
    """The objective −ELBO/N of one batch, with the log-likelihood and the KL in nats.

    Args:
        method: has the number of draws, β and the optimizer.
        target: the likelihood, prior and number of rows N.
        bayesian: the network with its guides.
        cold: the factor of the KL, N/D or 1.
    """

    def __init__(
        self,
        method: Variational,
        target: Target,
        bayesian: Bayesian,
        cold: float = 1.0,
    ) -> None:
        super().__init__(target)
        like = next(bayesian.parameters())
        self.bayesian = bayesian
        self.likelihood: BoundLikelihood = target.likelihood
        self.baseline: Baseline = Baseline(like)
        self.method = method
        self.cold = cold
        self.dtype: torch.dtype = like.dtype
        self.title: str = method.title
        self.draws_of_rank: slice | None = current().draws_of_rank(method.samples)
        self.beta: Tensor = torch.ones((), dtype=like.dtype, device=like.device)
        # every mean has a scale; a flow has many more parameters
        means = sum(value.numel() for value in bayesian.mean().values())
        parameters = sum(p.numel() for p in self.parameters() if p.requires_grad)
        self.dimension: int | None = min(2 * means, parameters)

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        """Return the optimizer of the method."""
        return self.method.optimizer_of(self, steps)

    def outputs(self, *inputs: object) -> Tensor:
        """Return the outputs of the network at the mean of q."""
        return self.bayesian.call(self.bayesian.mean(), *inputs)

    def before_step(self, step: int, steps: int) -> None:
        """Set β for a step."""
        self.beta.fill_(self.cold * self.method.beta_at(step, steps))

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return −ELBO/N of a batch and the terms to report, in nats."""
        rows = len(y) if self.bayesian.per_example else None
        draw = self.bayesian.draw(self.method.samples, examples=rows)
        if self.draws_of_rank is not None:
            draw = draw.subset(self.draws_of_rank)
        reseed_for_rank(y.device)
        log_probs = self.likelihood.log_prob(self._drawn_outputs(draw, x, y), y)  # (S, B)
        log_likelihood = self.target.scale(log_probs).mean()
        kl = draw.kl
        objective = log_likelihood - self.beta * self.differentiable_kl(draw, kl)
        report = {"elbo": log_likelihood - kl, "log_likelihood": log_likelihood, "kl": kl}
        report |= self.observations(draw)
        scores = [tensor.score for tensor in draw.draws if tensor.score is not None]
        if scores:
            for score in scores:
                objective = objective + self._reinforce(log_probs.detach(), score)
            report["reward"] = log_probs.mean()
        numbers = {name: number.detach() for name, number in report.items()}
        return -objective / self.target.n, numbers

    def differentiable_kl(self, draw: NetworkDraw, kl: Tensor) -> Tensor:
        """Return the KL with the gradients that the loss has: all of them.

        Args:
            draw: the draws of a step.
            kl: their KL, a scalar.
        """
        return kl

    def observations(self, draw: NetworkDraw) -> dict[str, Tensor]:
        """Return numbers of a step for ``after_step``, which are not reported: none.

        Args:
            draw: the draws of the step.
        """
        return {}

    def _drawn_outputs(self, draw: NetworkDraw, x: object, y: Tensor) -> Tensor:
        """Return the outputs of all draws, (S, B, ...).

        With ``autocast`` only the products of the network have bfloat16: noise, flows and sums
        keep their precision.
        """
        if not self.method.autocast:
            return draw(*forward_inputs(x))
        with torch.autocast(y.device.type, torch.bfloat16):
            return draw(*forward_inputs(x)).to(self.dtype)

    def after_step(self, numbers: dict[str, Tensor]) -> None:
        """Update the running mean of the reward."""
        self.baseline.observe(numbers.pop("reward", None))

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        """Return the objective in nats from reported numbers, at the current β."""
        return numbers["log_likelihood"] - self.beta * numbers["kl"]

    def held_out_loss(self, rows: Data) -> float:
        """Return the negative log-likelihood of a held-out row, by the same draws at any time."""
        draws = self.bayesian.sample(HELD_OUT_DRAWS, seed=0)
        return validation_loss(self.target, rows, self.bayesian.call, draws)

    def name_of(self, name: str) -> str:
        """Return the name of a parameter for messages: its role and the tensors of its guide."""
        parts = name.split(".")
        if parts[:2] != ["bayesian", "guides"]:
            return repr(name)
        return f"{'.'.join(parts[3:])} of {', '.join(self.bayesian.guides[int(parts[2])].names)!r}"

    def _reinforce(self, log_probs: Tensor, score: Tensor) -> Tensor:
        """Return zero, with the gradient of E[log-likelihood] in the rates of discrete gains.

        The baseline of a draw is the mean of the *other* draws (its own reward would bias it), or a
        running mean where there is no other.

        Args:
            log_probs: log p(y | f) of all draws and rows, (S, B).
            score: log q of the gains: (S,), or one for every draw and row.
        """
        is_per_row = score.numel() == log_probs.numel() and log_probs.numel() > len(log_probs)
        if is_per_row and self.bayesian.rows_independent:
            reward = log_probs
        else:
            reward = log_probs.mean(1)
            score = score.reshape(len(log_probs), -1).sum(1)
        advantage = self._advantage(reward)
        score = score.reshape(reward.shape)
        return (advantage * (score - score.detach())).mean() * self.target.n

    def _advantage(self, reward: Tensor) -> Tensor:
        """Return the rewards of draws less their baselines."""
        count = reward.numel()
        if count > 1:
            return (reward - reward.mean()) * (count / (count - 1))
        return reward - self.baseline.value
