"""Variational inference: maximize the evidence lower bound over a family of posteriors."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import torch
from torch import nn

from bayou.core import rng
from bayou.core.progress import spell
from bayou.guides import Delta, MeanField
from bayou.guides.guide import Guide, GuideSpec
from bayou.guides.rules import Rules
from bayou.inference.baseline_checks import compare_with_constant
from bayou.inference.data_checks import first_inputs, some_inputs
from bayou.inference.method import (
    FitArguments,
    Method,
    Trained,
    open_checkpoint,
    prefers_full_batch,
)
from bayou.inference.start import network_at, starting_point
from bayou.likelihoods import BoundLikelihood
from bayou.methods.evidence_bound import EvidenceBound
from bayou.methods.point import MAP
from bayou.network import clear_errors
from bayou.network.layout import fan_ins
from bayou.network.target import Target
from bayou.posteriors.guided import Bayesian, Guided
from bayou.posteriors.posterior import Posterior
from bayou.priors import Normal
from bayou.training.convergence import ConvergenceWarning, fall_from_maximum
from bayou.training.data import Data, as_data
from bayou.training.loop import fit_module
from bayou.training.newton import passes_for
from bayou.training.problem import Hooks
from bayou.training.seeds import part_seed

if TYPE_CHECKING:
    from bayou.methods.ivon import IVON

WIDE_FAN_IN = 256  # inputs of a unit, above which the learning rate is divided by their number
LARGE_NETWORK = 5000  # weights, from which on ``adapt_to_size`` changes the defaults
BY_UNIT = Normal("fan_in", gain=1.4, learn="units")  # the default prior of a large network
MIN_COLLAPSE_STEPS = 1000  # shorter runs are not checked for a collapse
LENGTH_FROM_MODE = 0.3  # fraction of the default number of steps for a run that starts at a mode
LARGE_FALL = 0.1  # nats per row that the objective may fall below its maximum without a warning
VALIDATION = "validation"  # the β that is selected on held-out rows


@dataclass(frozen=True, kw_only=True)
class Variational(Trained[Posterior]):
    """The base class of methods that maximize the ELBO over a family of posteriors.

    A network of 5,000 weights or more that was given neither a prior nor a length gets other
    defaults: see ``adapt_to_size``.

    Args:
        samples: draws of the weights in a step; 1 by default.
        start: where q is centered at first, "mode" by default. "mode": at the MAP, which a run
            without a given length finds first; a run of given ``steps`` or ``epochs``, and one
            with a noise or a prior scale to learn, for which there is no such mode, begin at the
            network as it is. "network": at the network in any case. Or a method that ends in a
            point, with priors fixed at their initial scale.
        cold: multiply the KL by N/D where there are fewer data than weights; False by default
            (Wenzel et al. 2020). With D ≫ N the KL of D weights can outweigh the likelihood of N
            rows, and the best q may ignore the data; the fit then emits a ``CollapseWarning``.
            The last record of the history has the factor, "cold"; the reported ELBO is never
            tempered.
    """

    samples: int = 1
    start: Method | Literal["mode", "network"] = "mode"
    cold: bool = False
    draws_all_weights: ClassVar[bool] = True

    @abstractmethod
    def family(self, target: Target) -> Rules:
        """Return the guides of the posterior."""

    @abstractmethod
    def beta_at(self, step: int, steps: int) -> float:
        """Return the weight of the KL in the loss of a step."""

    @property
    def title(self) -> str:
        """Return the title of the progress line."""
        return type(self).__name__

    @abstractmethod
    def large_network_settings(self, max_fan_in: int) -> dict[str, float | str]:
        """Return the settings for a large network, in place of defaults.

        Args:
            max_fan_in: the largest number of inputs of a unit.
        """

    def adapt_to_size(self, target: Target) -> tuple[Self, Target]:
        """Return this method and target, with other defaults for a large network.

        Under N(0, 1) the KL of 10⁴ weights outweighs the likelihood of some hundred rows, and q
        collapses. So the prior is N(0, (1.4·s·a_i·b_j)²/fan-in) with s and a factor of every unit
        learned by the bound itself (empirical Bayes: it remains a bound, at β = 1), and β reaches 1
        before the first test of convergence. A given prior, length or setting is not changed.

        Args:
            target: what to fit.
        """
        weights = sum(p.numel() for p in target.net.parameters() if p.requires_grad)
        if target.prior_given or not self.open_ended or weights < LARGE_NETWORK:
            return self, target
        defaults = {setting.name: setting.default for setting in fields(self)}
        fan_in = fan_ins(target.net)
        settings = self.large_network_settings(max(fan_in[name] for name in target.free))
        changes: dict[str, Any] = {
            name: value for name, value in settings.items() if getattr(self, name) == defaults[name]
        }
        return replace(self, **changes), replace(target, prior=BY_UNIT)

    def bound_of(self, target: Target, bayesian: Bayesian) -> EvidenceBound:
        """Return the objective of a fit.

        Args:
            target: the likelihood, prior and number of rows.
            bayesian: the network with its guides.
        """
        return EvidenceBound(self, target, bayesian, self.tempering(target))

    @abstractmethod
    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        """Return the optimizer of the guides, the likelihood and learned priors."""

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method from the network as it is, with fewer steps before convergence."""
        if not self.open_ended:
            return replace(self, start="network")
        if not prefers_full_batch(data, self.batch_size):
            return replace(self, start="network", effort=LENGTH_FROM_MODE * self.effort)
        shorter = LENGTH_FROM_MODE / 2 * self.effort  # steps over all rows have less noise
        return replace(self, start="network", effort=shorter, batch_size=data.n)

    def with_planned_length(self, data: Data) -> Self:
        """Return this method with the number of steps that it plans for these data."""
        if not self.open_ended:
            return self
        return replace(self, steps=self.total_steps(as_data(data, self.batch_size)))

    def shortened(self, factor: float) -> Self:
        """Return this method with a fraction of its length.

        Args:
            factor: the fraction.
        """
        return replace(self, effort=factor * self.effort)

    def _fit(self, arguments: FitArguments) -> Posterior:
        """Fit q to the posterior of the target.

        Returns:
            A ``Guided`` posterior, or the point of the start if Ctrl-C came before the first step.
        """
        method, target = self.adapt_to_size(arguments.target)
        return method._fit_adapted(target, arguments)

    def _fit_adapted(self, target: Target, arguments: FitArguments) -> Posterior:
        """Fit with exactly these settings; the start is found under the original prior."""
        seed = arguments.seed
        checkpoint = arguments.checkpoint
        progress = arguments.progress
        batches, held_out = self.split(arguments.data, seed)
        target = target.copy(batches.n)
        inputs = first_inputs(target, batches)
        original_target = arguments.target.copy(batches.n)
        net = target.net
        start = self._start(original_target, batches)
        if start is not None:
            fixed_target = original_target.with_fixed_priors()  # the bound learns them, not a start
            point = starting_point(
                start, fixed_target, batches, seed=seed, checkpoint=checkpoint, progress=progress
            )
            if point.stopped == "interrupted":  # Ctrl-C during the start: return that point
                return point
            net = network_at(point)
        bayesian = self._initial_guides(net, target, batches, inputs, seed)
        problem = self.bound_of(target, bayesian)
        problem.check_first_batch(batches)
        file = open_checkpoint(checkpoint, self, target, batches, seed)
        hooks = Hooks(None if held_out is None else partial(problem.held_out_loss, held_out))
        state = fit_module(
            problem, batches, self, seed=seed, checkpoint=file, progress=progress, hooks=hooks
        )
        posterior = Guided(target, bayesian, state.history)
        posterior.stopped = state.stopped
        last_record = posterior.history[-1]
        if problem.cold < 1:
            last_record["cold"] = problem.cold
        if target.prior is not original_target.prior:
            last_record |= {"lr": self.lr, "warmup": getattr(self, "warmup", 0.0)}
        if state.stopped != "interrupted" and state.step >= MIN_COLLAPSE_STEPS:
            draws_seed = part_seed(seed, "draws")
            last_record |= compare_with_constant(posterior, batches, seed=draws_seed)
            if state.stopped == "finished" and held_out is None:
                last_record |= self._check_final_objective(state.history, problem.cold, batches.n)
        return posterior

    def _initial_guides(
        self,
        net: nn.Module,
        target: Target,
        data: Data,
        inputs: tuple[Any, ...],
        seed: int,
    ) -> Bayesian:
        """Build the guides around the weights of a network, with random flows by the seed."""
        device = next(target.net.parameters()).device
        family = self.family(target)
        specs = family.values() if isinstance(family, Mapping) else [family]
        rows = max(spec.rows for spec in specs)
        example = inputs
        if rows:
            example = some_inputs(target, data, rows, part_seed(seed, "rows"))
        with rng.isolated(part_seed(seed, "start"), device), clear_errors(inputs):
            return Bayesian(net, family, target.prior, example)

    def _check_final_objective(
        self, history: list[dict[str, float]], cold: float, rows: int
    ) -> dict[str, float]:
        """Warn if a run ended far below the maximum of its objective at the last β."""
        beta = cold * getattr(self, "beta", 1.0)
        nats = fall_from_maximum(
            [record["log_likelihood"] - beta * record["kl"] for record in history]
        )
        if nats < LARGE_FALL * rows:
            return {}
        warnings.warn(
            f"{self.title} ended {nats:,.0f} nats below the maximum of its objective: it was "
            "unstable; "
            + spell("use a smaller lr, clip=1.0 or more samples", "use a smaller --lr"),
            ConvergenceWarning,
            stacklevel=5,
        )
        return {"fallen": nats}

    def tempering(self, target: Target) -> float:
        """Return the factor of the KL: N/D if q is cold, else 1.

        Args:
            target: has N rows, and a network of D weights that are not frozen.
        """
        weights = sum(p.numel() for p in target.net.parameters() if p.requires_grad)
        return min(1.0, target.n / max(weights, 1)) if self.cold else 1.0

    def _start(self, target: Target, data: Data) -> Method | None:
        """Return the method that finds the initial center of q; None for the network as it is."""
        if isinstance(self.start, Method):
            return self.start
        learns_noise = any(True for _ in target.likelihood.parameters())
        has_no_mode = learns_noise or target.learned_priors
        if self.start == "network" or not self.open_ended or has_no_mode or not target.free:
            return None
        mode = MAP(
            effort=self.effort,
            batch_size=self.batch_size,
            compile=self.compile,
            autocast=self.autocast,
            log_every=self.log_every,
            checkpoint_every=self.checkpoint_every,
        )
        weights = sum(p.numel() for p in target.net.parameters())
        if weights < LARGE_NETWORK and passes_for(mode, data):
            return mode
        return replace(mode, steps=mode.total_steps(data))


def families_of(guide: Rules) -> list[GuideSpec]:
    """Return the families of a guide.

    Args:
        guide: a family, or patterns → families.
    """
    return list(guide.values()) if isinstance(guide, Mapping) else [guide]


def check_guide(guide: Rules, method: str) -> None:
    """Raise a ValueError unless a guide is a family, or patterns → families.

    Args:
        guide: the guide.
        method: the name of the method that has it.
    """
    families = families_of(guide)
    if not families or not all(isinstance(spec, GuideSpec) for spec in families):
        raise ValueError(
            f"{method} guide must be a family such as MNF() or patterns → families, got {guide!r}"
        )


def describe_family(spec: GuideSpec) -> str:
    """Return the name of a family, with what makes it a family of points or mixtures.

    Args:
        spec: the family.
    """
    components = getattr(spec, "components", 1)
    if components > 1:
        return f"{type(spec).__name__}(components={components})"
    return type(spec).__name__


def describe_families(guide: Rules) -> str:
    """Return the names of the families of a guide, with their patterns.

    Args:
        guide: a family, or patterns → families.
    """
    if not isinstance(guide, Mapping):
        return type(guide).__name__
    return ", ".join(f"{name}: {type(spec).__name__}" for name, spec in guide.items())


@final
@dataclass(frozen=True)
class VI(Variational):
    """Variational inference: the member of a family of distributions closest to the posterior.

        max_q  ELBO = E_q[Σ_n log p(y_n | x_n, w)] − β·KL(q ‖ p)

    The expectation is estimated by ``samples`` draws of the weights and a minibatch, and its
    gradient goes through the draws (reparametrization; REINFORCE for discrete gains). The loss is
    −ELBO/N. The family is chosen by ``guide``: a factorized Gaussian by default. At β = 1 the ELBO
    is a lower bound of log p(D).

    In a network of 5,000 weights or more without a given prior and length, the defaults become
    lr=0.01 (times 256/fan-in if a layer has more than 256 inputs), scale_lr=0.01, warmup=0.4 and
    start="network", and the prior is learned per unit (``adapt_to_size``).

    Args:
        guide: the family, such as ``MeanField()`` (default), ``LowRank()`` or ``MNF()``; or a
            mapping from patterns of tensor names to families.
        scale_lr: the learning rate of log standard deviations, which start small and change most;
            None is 10·lr. Parameters that mix D entries (triangular maps of gains, columns of
            LowRank) have it over √D.
        beta: β, the weight of the KL; 1 by default. Less than 1 tempers the posterior. Or
            "validation": ``bayou.fit`` and ``bayou.select.plan`` select it among 1, 0.3, 0.1, 0.03
            and 0.01 on a held-out fifth of the rows, by five fits, and fit it to all rows. The
            ELBO that is reported always has β = 1.
        warmup: the fraction of steps over which β increases from 0, or more if a family requires
            it; 0 by default.
        samples: draws of the weights in a step; 1 by default.
        start: where q is centered at first: "mode" (default), "network", or a method.
        lr: the learning rate of everything else, 1e-3 by default.
        optimizer: "natural" has natural gradients for every Gaussian of the guide and Adam for the
            rest: ``natural()`` is what is fitted. A callable as for other methods; None (default)
            is Adam.

    Returns:
        ``fit`` returns a ``Guided`` posterior: draws, densities, the ELBO and files.

    Raises:
        ValueError: for a guide that is no family, for settings out of range, and with
            optimizer="natural" for families that are not Gaussian given the rest.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> y = x.square()
    >>> method = bayou.VI(bayou.LowRank(rank=2), steps=10, samples=4)
    >>> likelihood = bayou.Gaussian(0.1)
    >>> net = torch.nn.Linear(1, 1)
    >>> posterior = bayou.fit(net, (x, y), method, likelihood=likelihood, progress=False)
    >>> posterior.predict(x).mean.shape
    torch.Size([20, 1])

    Papers: Blundell et al. 2015, https://arxiv.org/abs/1505.05424; Kingma & Welling 2014,
    https://arxiv.org/abs/1312.6114.
    """

    guide: Rules = field(default_factory=MeanField)
    scale_lr: float | None = field(default=None, kw_only=True)
    beta: float | Literal["validation"] = field(default=1.0, kw_only=True)
    warmup: float = field(default=0.0, kw_only=True)
    named_optimizers: ClassVar[tuple[str, ...]] = ("natural",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("samples")
        self._check_positive("scale_lr")
        if isinstance(self.beta, str) and self.beta != VALIDATION:
            raise ValueError(
                f"VI beta must be in [0, inf), or {VALIDATION!r} to select it on held-out rows, "
                f"got {self.beta!r}"
            )
        if self.beta != VALIDATION:
            self._check_interval("[0, inf)", "beta")
        self._check_interval("[0, 1]", "warmup")
        check_guide(self.guide, "VI")
        if self.optimizer == "natural":
            self.natural()  # which validates the families

    def natural(self) -> IVON:
        """Return ``IVON`` with this guide and these settings.

        ``lr``, which is 1e-3 by default, is then 0.1, and ``plain_lr`` a tenth of ``scale_lr``.

        Raises:
            ValueError: for families that are not Gaussian given the rest, for β ≠ 1 and ``clip``.
        """
        from bayou.methods.ivon import IVON

        if self.beta != 1:
            raise ValueError(
                f"VI with natural gradients has no beta, got beta={self.beta!r}; use cold=True"
            )
        defaults = {setting.name: setting.default for setting in fields(self)}
        names = [setting.name for setting in fields(Variational)]
        settings = {name: getattr(self, name) for name in names if name not in ("lr", "optimizer")}
        if self.lr != defaults["lr"]:
            settings["lr"] = self.lr
        if self.scale_lr is not None:
            settings["plain_lr"] = self.scale_lr / 10
        return IVON(self.guide, warmup=self.warmup, **settings)

    def at_mode(self, noise: float, data: Data) -> Self:
        if self.optimizer == "natural":
            return self.natural().at_mode(noise, data)  # type: ignore[return-value]
        return super().at_mode(noise, data)

    @property
    def kl_weight(self) -> float:
        """Return β; a ValueError if it is still to be selected."""
        if isinstance(self.beta, str):
            raise ValueError(
                f"VI(beta={self.beta!r}).fit has no rows to select β on: use bayou.fit or "
                "bayou.select.plan, and inside another method, such as Ensemble, give the number "
                "that they selected"
            )
        return self.beta

    def _fit(self, arguments: FitArguments) -> Posterior:
        """Fit q, with a β that is known before anything is trained."""
        if self.optimizer == "natural":
            return self.natural()._fit(arguments)
        _ = self.kl_weight
        return super()._fit(arguments)

    @property
    def specs(self) -> list[GuideSpec]:
        """Return the families of the guide."""
        return families_of(self.guide)

    @property
    def without_density(self) -> str | None:
        """Return the name of the first family without a density, if any."""
        return next((type(spec).__name__ for spec in self.specs if not spec.dense), None)

    def family(self, target: Target) -> Rules:
        """Return the guide.

        Args:
            target: network, likelihood and prior.
        """
        return self.guide

    def restricted_to(self, names: Sequence[str], *, learns_others: bool = False) -> Self | None:
        """Return this method over some tensors; None for a mapping of guides.

        Args:
            names: the tensors.
            learns_others: whether the others are learned as points; False by default.
        """
        if isinstance(self.guide, Mapping):
            return None
        others = Delta(learn=learns_others)
        return replace(self, guide=dict.fromkeys(names, self.guide) | {"*": others})

    def large_network_settings(self, max_fan_in: int) -> dict[str, float | str]:
        """Return the learning rates, warm-up and start for a large network.

        A step of Adam changes every weight by lr, and a sum over n inputs by n·lr.
        """
        return {
            "start": "network",
            "lr": 0.01 * min(1.0, WIDE_FAN_IN / max_fan_in),
            "scale_lr": 0.01,
            "warmup": 0.4,
        }

    def beta_at(self, step: int, steps: int) -> float:
        """Return β of a step, which increases linearly in the warm-up.

        Args:
            step: the index of the step.
            steps: the length of the fit.
        """
        warmup_steps = max(self.warmup, *(spec.warmup for spec in self.specs)) * steps
        return self.kl_weight * min(1.0, (step + 1) / warmup_steps if warmup_steps else 1.0)

    def optimizer_of(self, problem: EvidenceBound, steps: int) -> torch.optim.Optimizer:
        """Return the optimizer of the settings, with a learning rate for scales.

        Args:
            problem: has the guides and their parameters.
            steps: the length of the fit.
        """
        scale_lr = self.scale_lr or 10 * self.lr
        return self.make_optimizer(parameter_groups(problem, self.lr, scale_lr))

    @property
    def title(self) -> str:
        """Return the name of the method with its families."""
        return f"VI({describe_families(self.guide)})"


def parameter_groups(module: nn.Module, lr: float, scale_lr: float) -> list[dict[str, Any]]:
    """Return the parameters by learning rate: ``scale_lr`` for scales, ``lr`` for locations.

    Guides know the rates of their parameters (``Guide.learning_rates``).

    Args:
        module: a module with guides and likelihoods, such as a ``Bayesian``.
        lr: the learning rate of locations.
        scale_lr: the learning rate of log standard deviations.

    Returns:
        Groups for a torch optimizer, each with "params" and "lr".
    """
    rates: dict[nn.Parameter, float] = {}
    for child in module.modules():
        if isinstance(child, Guide):
            rates |= child.learning_rates(lr, scale_lr)
        elif isinstance(child, BoundLikelihood):
            # other parameters of a likelihood that a user wrote may be locations
            for name, parameter in child.named_parameters(recurse=False):
                if name in ("log_scale", "log_std"):
                    rates[parameter] = scale_lr
    groups: dict[float, list[nn.Parameter]] = {lr: [], scale_lr: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups.setdefault(rates.get(parameter, lr), []).append(parameter)
    return [{"params": group, "lr": rate} for rate, group in groups.items() if group]
