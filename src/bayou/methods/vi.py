"""Variational inference: maximise the evidence lower bound over a family of posteriors."""

from __future__ import annotations

import copy
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.guides import FFG
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.guide import GuideSpec
from bayou.methods.checkpoints import Checkpoint
from bayou.methods.data import Batch, Data, Rows, as_data, check_finite
from bayou.methods.method import Method
from bayou.methods.training import SCHEDULES, Loop, Schedule, Task, move, parameter_groups, run
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import check_dtype, clear_errors, evaluating
from bayou.progress import Show
from bayou.specs import to_json
from bayou.target import Target, forward_inputs


@dataclass(frozen=True)
class VI(Method):
    """ELBO = E_q[Σ_n log p(y_n | x_n, w)] − β·KL(q ‖ p), maximised by stochastic gradients; the loss is −ELBO/N.

    ``guide``: a family such as MNF(), or patterns → families. ``epochs`` or ``steps``: how long. ``lr`` for everything
    but scales, ``scale_lr`` (10·lr by default) for log-stds, which start small and have far to go. ``samples``: draws
    per step. ``beta`` < 1 tempers; ``warmup``: the fraction of steps over which β rises from 0. ``optimizer``: a
    callable from parameter groups, Adam by default; the groups bring their rates, ``lr`` and ``scale_lr``.
    ``schedule``: "constant", "linear", "cosine", "tail", or a callable from an optimizer to a torch scheduler, which is
    advanced at every step. ``clip``: the largest norm of the gradient of −ELBO/N. ``validation``: a fraction held out;
    its negative log-likelihood picks the best epoch, and ``patience`` epochs without a better one stop the run.
    ``compile``: torch.compile the step. Every ``log_every`` steps a record goes to ``posterior.history``; every
    ``checkpoint_every`` steps the run is saved, if it has a checkpoint.

    Ctrl-C ends a run after the step at hand and returns the posterior so far, ``stopped="interrupted"``.
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
        specs = list(self.guide.values()) if isinstance(self.guide, Mapping) else [self.guide]
        if not specs or not all(isinstance(spec, GuideSpec) for spec in specs):
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
        seed = whole_seed(seed)
        batches = as_data(data, self.batch_size)
        held = None
        if self.validation:
            if not isinstance(batches, Rows):
                raise ValueError("a validation split needs tensors or a Dataset; split a DataLoader's data yourself")
            batches, held = batches.split(self.validation, _fold(seed, "validation"))
        first = next(target.net.parameters())
        likelihood = copy.deepcopy(target.likelihood)
        target = Target(target.net, target.likelihood_spec, likelihood, target.prior, batches.n)
        with rng.isolated(_fold(seed, "start"), first.device):  # flows start at random weights
            bayesian, check = open_door(target, self.guide, batches)
        baseline = Baseline(first)
        trained = nn.ModuleDict({"bayesian": bayesian, "likelihood": likelihood, "baseline": baseline})
        optimizer = self._optimizer(trained)
        steps = self.total_steps(batches)
        objective = Objective(target, bayesian, baseline, self.samples)
        loss = torch.compile(objective.__call__, fullgraph=True) if self.compile else objective.__call__
        file = None if checkpoint is None else Checkpoint(checkpoint, self._identity(target, bayesian, batches, seed))
        loop = Loop(
            steps, optimizer, self.schedule, self.clip, seed, self.log_every, self.patience, file,
            self.checkpoint_every, progress, f"VI({_describe(self.guide)})",
        )  # fmt: skip

        def temperature(step: int) -> Tensor:
            rise = self.warmup * steps
            beta = self.beta * min(1.0, (step + 1) / rise if rise else 1.0)
            return torch.tensor(beta, dtype=first.dtype, device=first.device)

        task = Task(
            trained,
            lambda x, y, step: loss(x, y, temperature(step)),
            None if held is None else lambda: validation_loss(bayesian, target, held),
            check,
            baseline.settle,
            lambda name: parameter_name(bayesian, name),
        )
        state = run(loop, task, batches)
        posterior = Guided(target, bayesian, state.history)
        posterior.stopped = state.stopped
        return posterior

    def _optimizer(self, trained: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(trained, self.lr, self.scale_lr or 10 * self.lr)
        optimizer = torch.optim.Adam(groups) if self.optimizer is None else self.optimizer(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"VI optimizer must return a torch optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("VI cannot use LBFGS, which evaluates a step many times; use Adam or SGD")
        return optimizer

    def _identity(self, target: Target, bayesian: Bayesian, data: Data, seed: int) -> dict[str, Any]:
        """What tells this run from others; where its weights start and how often it is saved do not."""
        method = to_json(self)
        del method["fields"]["checkpoint_every"]
        shapes = {name: list(value.shape) for name, value in bayesian.mean().items()}
        layers = re.sub("0x[0-9a-f]+", "", repr(target.net))
        return {
            "method": method,
            "prior": to_json(target.prior),
            "likelihood": to_json(target.likelihood_spec),
            "network": [layers, shapes],
            "data": data.fingerprint(),
            "seed": seed,
        }


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

    def __init__(self, target: Target, bayesian: Bayesian, baseline: Baseline, samples: int = 1) -> None:
        self.target, self.bayesian, self.baseline, self.samples = target, bayesian, baseline, samples

    def __call__(self, x: Any, y: Tensor, beta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = len(y) if self.bayesian.per_example else None
        draw = self.bayesian.draw(self.samples, examples=rows)
        each = self.target.likelihood.log_prob(draw(*forward_inputs(x)), y)  # (S, B)
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


def open_door(target: Target, guide: Rules, data: Data) -> tuple[Bayesian, Callable[[Batch], None] | None]:
    """The Bayesian network, tried on the first batch, and a check for batches that nobody has seen yet.

    What does not fit (inputs and network, outputs and y) is an error here, before the first step.
    """
    like = next(target.net.parameters())

    def outputs_of(batch: Batch, bayesian: Bayesian | None) -> tuple[Bayesian, Tensor]:
        check_dtype(batch[0], like)
        x, _ = move(batch, like)
        inputs = forward_inputs(x)
        with torch.no_grad(), clear_errors(x):
            bayesian = Bayesian(target.net, guide, target.prior, inputs) if bayesian is None else bayesian
            with evaluating(bayesian):
                outputs = bayesian.call(bayesian.mean(), *inputs)
        if not isinstance(outputs, Tensor):
            raise ValueError(f"the network must return one tensor, got {type(outputs).__name__}")
        if outputs.ndim == 0 or len(outputs) != len(batch[1]):
            raise ValueError(f"the network gives outputs {tuple(outputs.shape)} for a batch of {len(batch[1])} rows")
        return bayesian, outputs

    batch = next(data.ordered())
    check_finite(batch)
    bayesian, outputs = outputs_of(batch, None)
    y = data.targets()
    if y is not None:
        target.likelihood.validate((len(y), *outputs.shape[1:]), y)
        return bayesian, None
    target.likelihood.validate(outputs.shape, batch[1])
    first = batch[1].shape[1:]

    def check(batch: Batch) -> None:
        check_dtype(batch[0], like)
        check_finite(batch)
        if batch[1].shape[1:] == first:  # sequences of another length have outputs of another shape
            target.likelihood.validate((len(batch[1]), *outputs.shape[1:]), batch[1])

    return bayesian, check


@torch.no_grad()
def validation_loss(bayesian: Bayesian, target: Target, held: Data, samples: int = 8) -> float:
    """Mean negative log predictive density of held-out data, with a fixed set of function draws."""
    like = next(bayesian.parameters())
    total = 0.0
    with evaluating(bayesian):
        stack = bayesian.sample(samples, seed=0)
        for raw in held.ordered():
            x, y = move(raw, like)
            outputs = torch.stack(
                [bayesian.call({k: v[s] for k, v in stack.items()}, *forward_inputs(x)) for s in range(samples)]
            )
            each = target.likelihood.log_prob(outputs, y)
            total -= float((each.logsumexp(0) - math.log(samples)).sum())
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


def whole_seed(seed: Any) -> int:
    """The seed of a run as an int, or a ValueError."""
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"the seed of a run must be a whole number, got {seed!r}") from None


def _fold(seed: int, name: str) -> int:
    folded = rng.fold(seed, name)
    assert isinstance(folded, int)
    return folded
