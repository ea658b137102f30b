"""Variational inference: maximise the evidence lower bound over a family of posteriors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.guides import FFG
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.guide import GuideSpec
from bayou.methods.first_batch import first_inputs, open_door, validation_loss
from bayou.methods.method import Trained, identity, part_seed, whole_seed
from bayou.params import Params
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import clear_errors, evaluating
from bayou.progress import Show
from bayou.target import Target, forward_inputs
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import as_data
from bayou.training.graphs import compiled
from bayou.training.loop import Loop, Task, parameter_groups, run


@final
@dataclass(frozen=True)
class VI(Trained):
    """ELBO = E_q[Σ_n log p(y_n | x_n, w)] − β·KL(q ‖ p), maximised by stochastic gradients; the loss is −ELBO/N.

    ``guide``: a family such as MNF(), or patterns → families. ``lr`` for everything but scales, ``scale_lr`` (10·lr by
    default) for log-stds, which start small and have far to go. ``samples``: draws per step. ``beta`` < 1 tempers;
    ``warmup``: the fraction of steps over which β rises from 0. The other settings are those of ``Trained``.
    """

    guide: Rules = field(default_factory=FFG)
    scale_lr: float | None = field(default=None, kw_only=True)
    samples: int = field(default=1, kw_only=True)
    beta: float = field(default=1.0, kw_only=True)
    warmup: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("samples")
        self._positive("scale_lr")
        if not self.beta >= 0 or not 0 <= self.warmup <= 1:
            raise ValueError(f"VI needs beta >= 0 and 0 <= warmup <= 1, got beta={self.beta}, warmup={self.warmup}")
        specs = list(self.guide.values()) if isinstance(self.guide, Mapping) else [self.guide]
        if not specs or not all(isinstance(spec, GuideSpec) for spec in specs):
            raise ValueError(f"VI guide must be a family such as MNF() or patterns → families, got {self.guide!r}")

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Show = True,
    ) -> Guided:
        """Fit q to the posterior of ``target``."""
        scale_lr = self.scale_lr or 10 * self.lr

        def beta(step: int, steps: int) -> float:
            rise = self.warmup * steps
            return self.beta * min(1.0, (step + 1) / rise if rise else 1.0)

        ascent = Ascent(
            self.guide,
            lambda trained, steps: self._make_optimizer(parameter_groups(trained, self.lr, scale_lr)),
            beta,
            self.samples,
            f"VI({_describe(self.guide)})",
        )
        return climb(self, ascent, target, data, seed=seed, checkpoint=checkpoint, progress=progress)


@dataclass(frozen=True)
class Ascent:
    """How to climb the ELBO: the family, an optimizer of (module, steps), β of (step, steps), draws per step."""

    guide: Rules
    optimizer: Callable[[nn.ModuleDict, int], torch.optim.Optimizer]
    beta: Callable[[int, int], float]
    samples: int
    title: str


def climb(
    method: Trained,
    ascent: Ascent,
    target: Target,
    data: Any,
    *,
    seed: int,
    checkpoint: str | os.PathLike[str] | None,
    progress: Show,
) -> Guided:
    """Fit the guides of an ascent to the posterior of ``target`` by the shared training loop."""
    seed = whole_seed(seed)
    batches, held = method._split(as_data(data, method.batch_size), seed)
    first = next(target.net.parameters())
    likelihood = copy.deepcopy(target.likelihood)
    target = Target(target.net, target.likelihood_spec, likelihood, target.prior, batches.n)
    inputs = first_inputs(target, batches)
    with rng.isolated(part_seed(seed, "start"), first.device), clear_errors(inputs):  # flows start at random
        bayesian = Bayesian(target.net, ascent.guide, target.prior, inputs)

    def evaluated(params: Params, *inputs: Any) -> Tensor:
        with evaluating(bayesian):
            return bayesian.call(params, *inputs)

    check = open_door(target, batches, lambda *inputs: evaluated(bayesian.mean(), *inputs))
    baseline = Baseline(first)
    trained = nn.ModuleDict({"bayesian": bayesian, "likelihood": likelihood, "baseline": baseline})
    steps = method.total_steps(batches)
    objective = Objective(target, bayesian, baseline, ascent.samples, method.autocast)
    fast = compiled(objective.__call__, bayesian) if method.compile else None
    beta = torch.ones((), dtype=first.dtype, device=first.device)
    file = None if checkpoint is None else Checkpoint(checkpoint, identity(method, target, batches, seed))
    loop = Loop(
        steps, ascent.optimizer(trained, steps), method.schedule, method.clip, seed, method.log_every, method.patience,
        file, method.checkpoint_every, progress, ascent.title,
    )  # fmt: skip

    task = Task(
        trained,
        lambda x, y, step: objective(x, y, beta),
        None if held is None else lambda: validation_loss(target, held, evaluated, fixed_draws(bayesian)),
        check,
        baseline.settle,
        lambda name: parameter_name(bayesian, name),
        prepare=lambda step: beta.fill_(ascent.beta(step, steps)),
        fast=None if fast is None else lambda x, y, step: fast(x, y, beta),
    )
    state = run(loop, task, batches)
    posterior = Guided(target, bayesian, state.history)
    posterior.stopped = state.stopped
    return posterior


class Baseline(nn.Module):
    """A running mean of the reward, for REINFORCE with one draw a step; its buffers are part of every checkpoint."""

    total: Tensor
    weight: Tensor

    def __init__(self, like: Tensor, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("total", torch.zeros((), dtype=like.dtype, device=like.device))
        self.register_buffer("weight", torch.zeros((), dtype=like.dtype, device=like.device))

    @property
    def value(self) -> Tensor:
        """The mean so far; 0 before there is one."""
        return self.total / self.weight.clamp_min(1 - self.decay)

    @torch.no_grad()
    def settle(self, report: dict[str, Tensor]) -> None:
        """Move towards the reward of a step that is done."""
        reward = report.pop("reward", None)
        if reward is not None:
            self.total.mul_(self.decay).add_(reward, alpha=1 - self.decay)
            self.weight.mul_(self.decay).add_(1 - self.decay)


class Objective:
    """−ELBO/N of one batch, with the log-likelihood and the KL in nats beside it."""

    def __init__(
        self, target: Target, bayesian: Bayesian, baseline: Baseline, samples: int = 1, autocast: bool = False
    ) -> None:
        self.target, self.bayesian, self.baseline, self.samples = target, bayesian, baseline, samples
        self.autocast, self.like = autocast, next(bayesian.parameters())

    def __call__(self, x: Any, y: Tensor, beta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = len(y) if self.bayesian.per_example else None
        draw = self.bayesian.draw(self.samples, examples=rows)
        if self.autocast:  # the products of the network alone: noise, flows and sums keep their precision
            with torch.autocast(self.like.device.type, torch.bfloat16):
                outputs = draw(*forward_inputs(x)).to(self.like.dtype)
        else:
            outputs = draw(*forward_inputs(x))
        each = self.target.likelihood.log_prob(outputs, y)  # (S, B)
        log_likelihood = self.target.scale(each).mean()
        kl = draw.kl
        objective = log_likelihood - beta * kl
        report = {"elbo": log_likelihood - kl, "log_likelihood": log_likelihood, "kl": kl}
        scores = [part.score for part in draw.draws if part.score is not None]
        if scores:
            for score in scores:
                objective = objective + self._reinforce(each.detach(), score)
            report["reward"] = each.mean()
        return -objective / self.target.n, {name: number.detach() for name, number in report.items()}

    def _reinforce(self, each: Tensor, score: Tensor) -> Tensor:
        """Zero in value; its gradient is that of E[log-likelihood] in the rates of discrete gains.

        The baseline of a draw is the mean of the *other* draws (its own reward would bias it), or a running mean where
        there is no other.
        """
        per_row = score.numel() == each.numel() and each.numel() > len(each)
        if per_row and self.bayesian.rows_independent:
            reward = each
        else:
            reward = each.mean(1)
            score = score.reshape(len(each), -1).sum(1)
        count = reward.numel()
        advantage = (reward - reward.mean()) * (count / (count - 1)) if count > 1 else reward - self.baseline.value
        score = score.reshape(reward.shape)
        return (advantage * (score - score.detach())).mean() * self.target.n


@torch.no_grad()
def fixed_draws(bayesian: Bayesian, samples: int = 8) -> Params:
    """The draws that judge every epoch alike."""
    with evaluating(bayesian):
        return bayesian.sample(samples, seed=0)


def parameter_name(bayesian: Bayesian, name: str) -> str:
    """The user's name for a trained parameter: 'log_std of fc.weight'."""
    parts = name.split(".")
    if parts[:2] == ["bayesian", "guides"]:
        tensors = ", ".join(bayesian.guides[int(parts[2])].names)
        return f"{'.'.join(parts[3:])} of {tensors!r}"
    return repr(name)


def _describe(guide: Rules) -> str:
    return (
        ", ".join(f"{k}: {type(v).__name__}" for k, v in guide.items())
        if isinstance(guide, Mapping)
        else type(guide).__name__
    )
