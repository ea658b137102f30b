"""Variational inference: maximize the evidence lower bound over a family of posteriors."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import StrPath
from bayou.core.progress import Show, spell
from bayou.guides import Delta, MeanField
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.guide import Guide, GuideSpec
from bayou.inference.baseline_checks import compare_with_constant
from bayou.inference.data_checks import first_inputs, some_inputs
from bayou.inference.method import Method, Trained, identity, prefers_full_batch
from bayou.inference.network_problem import NetworkProblem, validation_loss
from bayou.inference.start import network_at, starting_point
from bayou.likelihoods import BoundLikelihood
from bayou.methods.point import MAP
from bayou.network import clear_errors, forward_inputs
from bayou.network.layout import fan_ins
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import Posterior
from bayou.priors import Normal
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.convergence import ConvergenceWarning, fall_from_maximum
from bayou.training.data import Data, as_data
from bayou.training.loop import fit_module
from bayou.training.newton import passes_for
from bayou.training.problem import Hooks
from bayou.training.ranks import current, reseed_for_rank
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.settings import Settings

WIDE_FAN_IN = (
    256  # inputs of a unit, above which ``suited`` divides the learning rate by their number
)
LARGE_NETWORK = 5000  # weights, from which on the mode has a fixed number of steps, and ``suited`` sets the defaults
BY_UNIT = Normal("fan_in", gain=1.4, learn="units")  # the default prior of a large network
MIN_COLLAPSE_STEPS = 1000  # shorter runs are not checked for a collapse
HELD_OUT_DRAWS = 8  # for the validation loss
LENGTH_FROM_MODE = (
    0.3  # of the default plan, for a run that starts at a mode: most of the way is done
)
LARGE_FALL = 0.1  # nats per row of the objective: a warning


@dataclass(frozen=True, kw_only=True)
class Variational(Trained):
    """A method that maximizes the ELBO over a family of posteriors.

    A network of 5,000 weights or more that was given neither a prior nor a length gets defaults of
    its own: see ``suited``.

    Args:
        samples: draws of the weights in a step.
        start: where q is centered at first. "mode": at the MAP, which a run without a given length
            finds first; a run of given ``steps`` or ``epochs``, and one with a noise or a prior
            scale to learn, for which there is no such mode, begin at the network as it is.
            "network": there in any case. Or a method that ends in a point, with priors fixed at
            their initial scale.
        cold: multiply the KL by N/D where there are fewer data than weights (Wenzel et al. 2020).
            With D ≫ N the KL of D weights can outweigh the likelihood of N rows, and the best q may
            ignore the data; the fit then emits a ``CollapseWarning``. The last record of the
            history has the factor, "cold"; the reported ELBO is never tempered.
    """

    samples: int = 1
    start: Method | Literal["mode", "network"] = "mode"
    cold: bool = False
    draws_all_weights: ClassVar[bool] = True

    @abstractmethod
    def family(self, target: Target) -> Rules:
        """The guides of the posterior."""

    @abstractmethod
    def beta_at(self, step: int, steps: int) -> float:
        """The weight of the KL in the loss of a step."""

    @property
    def title(self) -> str:
        """The title of the progress line."""
        return type(self).__name__

    @abstractmethod
    def large(self, widest: int) -> dict[str, Any]:
        """Settings for a large network, for those left at their defaults; ``widest``: its largest
        fan-in.
        """

    def suited(self, target: Target) -> tuple[Self, Target]:
        """This method and target, or those for a large network without a given prior and length.

        Under N(0, 1) the KL of 10⁴ weights outweighs the likelihood of some hundred rows, and q
        collapses. So the prior is N(0, (1.4·s·a_i·b_j)²/fan-in) with s and a factor of every unit
        learned by the bound itself (empirical Bayes: it remains a bound, at β = 1), and β reaches 1
        before the first test of convergence.
        """
        learned = sum(p.numel() for p in target.net.parameters() if p.requires_grad)
        if target.prior_given or not self.open_ended or learned < LARGE_NETWORK:
            return self, target
        usual = {f.name: f.default for f in fields(self)}
        inputs = fan_ins(target.net)
        large = self.large(max(inputs[name] for name in target.free))
        chosen = {
            name: value for name, value in large.items() if getattr(self, name) == usual[name]
        }
        return replace(self, **chosen), replace(target, prior=BY_UNIT)

    @abstractmethod
    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        """The optimizer of the guides, the likelihood and learned priors."""

    def at_mode(self, noise: float, data: Data) -> Self:
        """This method from the network as it is, with a shorter plan that still ends at
        convergence.
        """
        if not self.open_ended:
            return replace(self, start="network")
        if not prefers_full_batch(data, self.batch_size):
            return replace(self, start="network", effort=LENGTH_FROM_MODE * self.effort)
        shorter = LENGTH_FROM_MODE / 2 * self.effort  # steps over all rows have less noise
        return replace(self, start="network", effort=shorter, batch_size=data.n)

    def shortened(self, factor: float) -> Self:
        return replace(self, effort=factor * self.effort)

    def with_planned_length(self, data: Data) -> Self:
        if not self.open_ended:
            return self
        return replace(self, steps=self.total_steps(as_data(data, self.batch_size)))

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Fit q to the posterior of ``target``."""
        method, suited = self.suited(target)
        return method._fit(suited, target, data, as_int_seed(seed), checkpoint, progress)

    def _fit(
        self,
        target: Target,
        given: Target,
        data: Any,
        seed: int,
        checkpoint: StrPath | None,
        progress: Show,
    ) -> Posterior:
        """Fit with exactly these settings; a start is found under the ``given`` prior."""
        batches, held = self.split(as_data(data, self.batch_size), seed)
        target = target.copy(batches.n)
        inputs = first_inputs(target, batches)
        given = given.copy(batches.n)
        begin, net = self._start(given, batches), target.net
        if begin is not None:
            fixed = given.with_fixed_priors()  # learned by the bound, not by a start
            point = starting_point(
                begin, fixed, batches, seed=seed, checkpoint=checkpoint, progress=progress
            )
            if point.stopped == "interrupted":  # Ctrl-C during the start: return that point
                return point
            net = network_at(point)
        device, family = next(target.net.parameters()).device, self.family(target)
        rows = max(
            spec.rows for spec in (family.values() if isinstance(family, Mapping) else [family])
        )
        example = some_inputs(target, batches, rows, part_seed(seed, "rows")) if rows else inputs
        with (
            rng.isolated(part_seed(seed, "start"), device),
            clear_errors(inputs),
        ):  # flows start at random
            bayesian = Bayesian(net, family, target.prior, example)
        problem = EvidenceBound(self, target, bayesian, held, self.tempering(target))
        problem.check_first_batch(batches)
        file = (
            None
            if checkpoint is None
            else Checkpoint(checkpoint, identity(self, target, batches, seed))
        )
        hooks = Hooks(None if held is None else problem.held_out_loss)
        state = fit_module(
            problem, batches, self, seed=seed, checkpoint=file, progress=progress, hooks=hooks
        )
        posterior = Guided(target, bayesian, state.history)
        posterior.stopped = state.stopped
        if problem.cold < 1:
            posterior.history[-1]["cold"] = problem.cold
        if target.prior is not given.prior:
            posterior.history[-1] |= {"lr": self.lr, "warmup": getattr(self, "warmup", 0.0)}
        if state.stopped != "interrupted" and state.step >= MIN_COLLAPSE_STEPS:
            posterior.history[-1] |= compare_with_constant(
                posterior, batches, seed=part_seed(seed, "draws")
            )
            if state.stopped == "finished" and held is None:
                posterior.history[-1] |= self._below_its_best(
                    state.history, problem.cold, batches.n
                )
        return posterior

    def _below_its_best(
        self, history: list[dict[str, float]], cold: float, rows: int
    ) -> dict[str, float]:
        """Nats by which a run ended below its maximum at the last β; a ``ConvergenceWarning`` if
        there are many.
        """
        beta = cold * getattr(self, "beta", 1.0)
        nats = fall_from_maximum(
            [record["log_likelihood"] - beta * record["kl"] for record in history]
        )
        if nats < LARGE_FALL * rows:
            return {}
        warnings.warn(
            f"{self.title} ended {nats:,.0f} nats below the maximum of its objective: it was unstable; "
            + spell("use a smaller lr, clip=1.0 or more samples", "use a smaller --lr"),
            ConvergenceWarning,
            stacklevel=5,
        )
        return {"fallen": nats}

    def tempering(self, target: Target) -> float:
        """The factor of the KL: N/D if q is cold, else 1."""
        weights = sum(p.numel() for p in target.net.parameters() if p.requires_grad)
        return min(1.0, target.n / max(weights, 1)) if self.cold else 1.0

    def _start(self, target: Target, data: Data) -> Method | None:
        """The method that finds the initial center of q; None for the network as given."""
        if isinstance(self.start, Method):
            return self.start
        learned = any(True for _ in target.likelihood.parameters()) or target.learned_priors
        if self.start == "network" or not self.open_ended or learned or not target.free:
            return None
        mode = MAP(
            effort=self.effort, batch_size=self.batch_size, compile=self.compile, autocast=self.autocast,
            log_every=self.log_every, checkpoint_every=self.checkpoint_every,
        )  # fmt: skip
        small = sum(p.numel() for p in target.net.parameters()) < LARGE_NETWORK and passes_for(
            mode, data
        )
        return mode if small else replace(mode, steps=mode.total_steps(data))


@final
@dataclass(frozen=True)
class VI(Variational):
    """ELBO = E_q[Σ_n log p(y_n | x_n, w)] − β·KL(q ‖ p), maximized by stochastic gradients; the
    loss is −ELBO/N.

    ``guide``: a family such as MNF(), or patterns → families. ``lr`` for everything but scales,
    ``scale_lr`` (10·lr by default) for log-stds, which start small and change most; over √D for
    parameters that mix D entries (triangular maps of gains, columns of LowRank). ``samples``: draws
    per step. ``beta`` < 1 tempers; ``warmup``: the fraction of steps over which β increases from 0,
    or more if a family requires it. The other settings are those of ``Trained``. In a network of
    5,000 weights or more without a given prior and length, the defaults become lr=0.01 (times
    256/fan-in if a layer has more than 256 inputs), scale_lr=0.01, warmup=0.4, and the prior is
    learned per unit (``suited``).
    """

    guide: Rules = field(default_factory=MeanField)
    scale_lr: float | None = field(default=None, kw_only=True)
    beta: float = field(default=1.0, kw_only=True)
    warmup: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("samples")
        self._check_positive("scale_lr")
        if not 0 <= self.beta < math.inf or not 0 <= self.warmup <= 1:
            raise ValueError(
                f"VI needs a finite beta >= 0 and 0 <= warmup <= 1, got beta={self.beta}, warmup={self.warmup}"
            )
        if not self.specs or not all(isinstance(spec, GuideSpec) for spec in self.specs):
            raise ValueError(
                f"VI guide must be a family such as MNF() or patterns → families, got {self.guide!r}"
            )

    @property
    def specs(self) -> list[GuideSpec]:
        """The families of the guide."""
        return list(self.guide.values()) if isinstance(self.guide, Mapping) else [self.guide]

    @property
    def without_density(self) -> str | None:
        return next((type(spec).__name__ for spec in self.specs if not spec.dense), None)

    def family(self, target: Target) -> Rules:
        return self.guide

    def large(self, widest: int) -> dict[str, Any]:
        # a step of Adam changes every weight by lr, and a sum over n inputs by n·lr
        return {
            "start": "network",
            "lr": 0.01 * min(1.0, WIDE_FAN_IN / widest),
            "scale_lr": 0.01,
            "warmup": 0.4,
        }

    def beta_at(self, step: int, steps: int) -> float:
        rise = max(self.warmup, *(spec.warmup for spec in self.specs)) * steps
        return self.beta * min(1.0, (step + 1) / rise if rise else 1.0)

    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        return self.make_optimizer(
            parameter_groups(problem, self.lr, self.scale_lr or 10 * self.lr)
        )

    def restricted_to(self, names: Sequence[str], *, learns_others: bool = False) -> Self | None:
        if isinstance(self.guide, Mapping):
            return None
        others = Delta(learn=learns_others)
        return replace(self, guide=dict.fromkeys(names, self.guide) | {"*": others})

    @property
    def title(self) -> str:
        guide = self.guide
        if not isinstance(guide, Mapping):
            return f"VI({type(guide).__name__})"
        return (
            f"VI({', '.join(f'{name}: {type(family).__name__}' for name, family in guide.items())})"
        )


class Baseline(nn.Module):
    """A running mean of the reward, for REINFORCE with one draw per step; its buffers are part of
    every checkpoint.
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
        """The mean so far; 0 before there is one."""
        return self.total / self.weight.clamp_min(1 - self.decay)

    @torch.no_grad()
    def observe(self, reward: Tensor | None) -> None:
        """Update with the reward of a finished step."""
        if reward is not None:
            self.total.mul_(self.decay).add_(reward, alpha=1 - self.decay)
            self.weight.mul_(self.decay).add_(1 - self.decay)


class EvidenceBound(NetworkProblem):
    """−ELBO/N of one batch, with the log-likelihood and the KL in nats."""

    def __init__(
        self,
        method: Variational,
        target: Target,
        bayesian: Bayesian,
        held: Data | None = None,
        cold: float = 1.0,
    ) -> None:
        super().__init__(target)
        like = next(bayesian.parameters())
        self.bayesian, self.likelihood, self.baseline = bayesian, target.likelihood, Baseline(like)
        self.method, self.held, self.cold, self.dtype = method, held, cold, like.dtype
        self.title, self.own = method.title, current().draws_of_rank(method.samples)
        self.beta = torch.ones((), dtype=like.dtype, device=like.device)
        means = sum(
            value.numel() for value in bayesian.mean().values()
        )  # with a scale each; a flow has many more
        self.dimension = min(
            2 * means, sum(p.numel() for p in self.parameters() if p.requires_grad)
        )

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        return self.method.optimizer_of(self, steps)

    def outputs(self, *inputs: Any) -> Tensor:
        return self.bayesian.call(self.bayesian.mean(), *inputs)

    def before_step(self, step: int, steps: int) -> None:
        self.beta.fill_(self.cold * self.method.beta_at(step, steps))

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = len(y) if self.bayesian.per_example else None
        draw = self.bayesian.draw(self.method.samples, examples=rows)
        draw = draw if self.own is None else draw.subset(self.own)
        reseed_for_rank(y.device)
        if (
            self.method.autocast
        ):  # only products of the network: noise, flows and sums keep their precision
            with torch.autocast(y.device.type, torch.bfloat16):
                outputs = draw(*forward_inputs(x)).to(self.dtype)
        else:
            outputs = draw(*forward_inputs(x))
        each = self.likelihood.log_prob(outputs, y)  # (S, B)
        log_likelihood = self.target.scale(each).mean()
        kl = draw.kl
        objective = log_likelihood - self.beta * kl
        report = {"elbo": log_likelihood - kl, "log_likelihood": log_likelihood, "kl": kl}
        scores = [part.score for part in draw.draws if part.score is not None]
        if scores:
            for score in scores:
                objective = objective + self._reinforce(each.detach(), score)
            report["reward"] = each.mean()
        return -objective / self.target.n, {
            name: number.detach() for name, number in report.items()
        }

    def after_step(self, numbers: dict[str, Tensor]) -> None:
        self.baseline.observe(numbers.pop("reward", None))

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        return numbers["log_likelihood"] - self.beta * numbers["kl"]

    def held_out_loss(self) -> float:
        assert self.held is not None
        draws = self.bayesian.sample(HELD_OUT_DRAWS, seed=0)  # the same in every epoch
        return validation_loss(self.target, self.held, self.bayesian.call, draws)

    def name_of(self, name: str) -> str:
        parts = name.split(".")
        if parts[:2] != ["bayesian", "guides"]:
            return repr(name)
        return f"{'.'.join(parts[3:])} of {', '.join(self.bayesian.guides[int(parts[2])].names)!r}"

    def _reinforce(self, each: Tensor, score: Tensor) -> Tensor:
        """Zero in value; its gradient is that of E[log-likelihood] in the rates of discrete gains.

        The baseline of a draw is the mean of the *other* draws (its own reward would bias it), or a
        running mean where there is no other.
        """
        per_row = score.numel() == each.numel() and each.numel() > len(each)
        if per_row and self.bayesian.rows_independent:
            reward = each
        else:
            reward = each.mean(1)
            score = score.reshape(len(each), -1).sum(1)
        count = reward.numel()
        advantage = (
            (reward - reward.mean()) * (count / (count - 1))
            if count > 1
            else reward - self.baseline.value
        )
        score = score.reshape(reward.shape)
        return (advantage * (score - score.detach())).mean() * self.target.n


def parameter_groups(module: nn.Module, lr: float, scale_lr: float) -> list[dict[str, Any]]:
    """Return the parameters by learning rate: ``scale_lr`` for scales, ``lr`` for locations.

    Guides know the rates of their parameters (``Guide.learning_rates``).

    Args:
        module: a module with guides and likelihoods, such as a ``Bayesian``.
        lr: the learning rate of locations.
        scale_lr: the learning rate of scales.
    """
    rates: dict[nn.Parameter, float] = {}
    for child in module.modules():
        if isinstance(child, Guide):
            rates |= child.learning_rates(lr, scale_lr)
        elif isinstance(child, BoundLikelihood):
            # Of a likelihood of the user, others may be locations.
            for name, parameter in child.named_parameters(recurse=False):
                if name in ("log_scale", "log_std"):
                    rates[parameter] = scale_lr
    groups: dict[float, list[nn.Parameter]] = {lr: [], scale_lr: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups.setdefault(rates.get(parameter, lr), []).append(parameter)
    return [{"params": group, "lr": rate} for rate, group in groups.items() if group]
