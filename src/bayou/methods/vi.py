"""Variational inference: maximise the evidence lower bound over a family of posteriors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.guides import FFG
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.guide import GuideSpec
from bayou.methods.data import Data, Rows, as_data
from bayou.methods.method import Method
from bayou.methods.training import SCHEDULES, Loop, Schedule, move, parameter_groups, run
from bayou.posteriors.guided import Guided
from bayou.progress import Show
from bayou.specs import to_json
from bayou.target import Target, forward_inputs


@dataclass(frozen=True)
class VI(Method):
    """ELBO = E_q[Σ_n log p(y_n | x_n, w)] − β·KL(q ‖ p), maximised by stochastic gradients; the loss is −ELBO/N.

    ``guide``: a family such as MNF(), or patterns → families. ``epochs`` or ``steps``: how long. ``lr`` for everything
    but scales, ``scale_lr`` (10·lr by default) for log-stds, which start small and have far to go. ``samples``: draws
    per step. ``beta`` < 1 tempers; ``warmup``: the fraction of steps over which β rises from 0. ``optimizer``: a
    callable from parameter groups, Adam by default. ``schedule``: "constant", "linear", "cosine", "tail", or a callable
    from an optimizer to a torch scheduler. ``validation``: a fraction held out; its negative log-likelihood picks the
    best epoch and with ``patience`` stops the run. ``compile``: torch.compile the step.
    """

    guide: Rules = field(default_factory=FFG)
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    lr: float = 1e-3
    scale_lr: float | None = None
    samples: int = 1
    beta: float = 1.0
    warmup: float = 0.0
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    schedule: Schedule = "tail"
    clip: float | None = None
    validation: float = 0.0
    patience: int | None = None
    compile: bool = False
    log_every: int = 50
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}")
        for name in ("epochs", "steps", "batch_size", "samples", "log_every", "checkpoint_every", "patience"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"VI {name} must be a whole number of at least 1, got {value!r}")
        for name in ("lr", "scale_lr", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"VI {name} must be positive, got {value!r}")
        if not self.beta >= 0 or not 0 <= self.warmup <= 1 or not 0 <= self.validation < 1:
            raise ValueError(
                f"VI needs beta >= 0, 0 <= warmup <= 1 and 0 <= validation < 1, got beta={self.beta}, "
                f"warmup={self.warmup}, validation={self.validation}"
            )
        if self.patience is not None and not self.validation:
            raise ValueError("VI patience watches a validation split; set validation, for example 0.1")
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(f"VI schedule must be one of {', '.join(SCHEDULES)} or a callable, got {self.schedule!r}")
        specs = [self.guide] if isinstance(self.guide, GuideSpec) else list(self.guide.values())
        if not all(isinstance(spec, GuideSpec) for spec in specs):
            raise ValueError(f"VI guide must be a family such as MNF() or patterns → families, got {self.guide!r}")

    def total_steps(self, data: Data) -> int:
        """How many optimizer steps the run has; 2,000 steps or 10 epochs, whichever is more, unless told."""
        if self.steps is not None:
            return self.steps
        return self.epochs * data.batches if self.epochs is not None else max(2000, 10 * data.batches)

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
        batches = as_data(data, self.batch_size)
        held = None
        if self.validation:
            if not isinstance(batches, Rows):
                raise ValueError("a validation split needs tensors or a Dataset; split a DataLoader's data yourself")
            batches, held = batches.split(self.validation, _fold(seed, "validation"))
            target = Target(target.net, target.likelihood_spec, target.likelihood, target.prior, batches.n)
        first = next(target.net.parameters())
        x, y = move(next(batches.ordered()), first)
        bayesian = Bayesian(target.net, self.guide, target.prior, forward_inputs(x))
        likelihood = copy.deepcopy(target.likelihood)
        target = Target(target.net, target.likelihood_spec, likelihood, target.prior, target.n)
        with torch.no_grad():
            outputs = bayesian.eval().call(bayesian.mean(), *forward_inputs(x))
        likelihood.validate(outputs.shape, y)
        trained = nn.ModuleDict({"bayesian": bayesian, "likelihood": likelihood})
        groups = parameter_groups(trained, self.lr, self.scale_lr or 10 * self.lr)
        optimizer = torch.optim.Adam(groups) if self.optimizer is None else self.optimizer(groups)
        steps = self.total_steps(batches)
        objective = Objective(self, target, bayesian, steps)
        loss = torch.compile(objective.__call__, fullgraph=True) if self.compile else objective.__call__
        loop = Loop(
            steps, optimizer, self.schedule, self.clip, seed, self.log_every, self.patience, checkpoint,
            self.checkpoint_every, progress, f"VI({_describe(self.guide)})",
        )  # fmt: skip
        shapes = {name: list(value.shape) for name, value in bayesian.mean().items()}
        identity = [to_json(self), to_json(target.prior), to_json(target.likelihood_spec), shapes, target.n, seed]

        def temperature(step: int) -> Tensor:
            rise = self.warmup * steps
            return torch.as_tensor(self.beta * min(1.0, (step + 1) / rise if rise else 1.0), device=first.device)

        state = run(
            loop,
            trained,
            batches,
            lambda x, y, step: loss(x, y, temperature(step)),
            None if held is None else lambda: validation_loss(bayesian, target, held),
            identity,
            lambda name: parameter_name(bayesian, name),
        )
        posterior = Guided(target, bayesian, state.history)
        posterior.stopped = state.stopped
        return posterior


class Objective:
    """−ELBO/N of one batch, with the log-likelihood and the KL in nats beside it."""

    def __init__(self, method: VI, target: Target, bayesian: Bayesian, steps: int) -> None:
        self.method, self.target, self.bayesian, self.steps = method, target, bayesian, steps
        like = next(bayesian.parameters())
        self.baseline = torch.zeros((), dtype=like.dtype, device=like.device)

    def __call__(self, x: Any, y: Tensor, beta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        samples = self.method.samples
        rows = len(y) if self.bayesian.per_example else None
        draw = self.bayesian.draw(samples, examples=rows)
        each = self.target.likelihood.log_prob(draw(*forward_inputs(x)), y)  # (S, B)
        log_likelihood = self.target.scale(each).mean()
        kl = draw.kl
        objective = log_likelihood - beta * kl
        score = draw.score
        if score is not None:
            objective = objective + self._reinforce(each.detach(), score)
        report = {"elbo": log_likelihood - kl, "log_likelihood": log_likelihood, "kl": kl}
        return -objective / self.target.n, {name: number.detach() for name, number in report.items()}

    def _reinforce(self, each: Tensor, score: Tensor) -> Tensor:
        """Zero in value; its gradient is that of E[log-likelihood] in the rates of discrete gains."""
        reward = each if score.numel() == each.numel() else each.mean(1)
        reward = reward.reshape(score.shape)
        advantage = reward - reward.mean() if reward.numel() > 1 else reward - self.baseline
        surrogate = (advantage * (score - score.detach())).mean()
        return surrogate * self.target.n


@torch.no_grad()
def validation_loss(bayesian: Bayesian, target: Target, held: Data, samples: int = 8) -> float:
    """Mean negative log predictive density of held-out data, with a fixed set of function draws."""
    bayesian.eval()
    like = next(bayesian.parameters())
    stack = bayesian.sample(samples, seed=0)
    total = 0.0
    for raw in held.ordered():
        x, y = move(raw, like)
        outputs = torch.stack(
            [bayesian.call({k: v[s] for k, v in stack.items()}, *forward_inputs(x)) for s in range(samples)]
        )
        each = target.likelihood.log_prob(outputs, y)
        total -= float((each.logsumexp(0) - torch.tensor(float(samples)).log()).sum())
    return total / held.n


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


def _fold(seed: int, name: str) -> int:
    folded = rng.fold(seed, name)
    assert isinstance(folded, int)
    return folded
