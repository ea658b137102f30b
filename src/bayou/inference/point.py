"""A network with point weights in training, with classical regularizers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import StrPath, no_grad_state
from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.inference.first_batch import NetworkProblem, validation_loss
from bayou.inference.method import Trained, identity
from bayou.network import Network, adapt, forward_inputs, is_constant, layouts, shared_copy
from bayou.posteriors.empirical import Empirical
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint, RunState
from bayou.training.data import Data, as_data
from bayou.training.loop import fit_module
from bayou.training.newton import finish, passes_for
from bayou.training.problem import Hooks
from bayou.training.ranks import reseed_for_rank
from bayou.training.seeds import as_int_seed, part_seed

RANDOM_OR_MOVING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
DECAY = 0.55  # of the gradient noise (Neelakantan 2015)


def is_random_or_moving(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers or changes its buffers in training; dropout of
    rate 0 does not.
    """
    return isinstance(module, RANDOM_OR_MOVING) and getattr(module, "p", None) != 0


@dataclass(frozen=True, kw_only=True)
class Regularized(Trained):
    """A method that trains one network, with classical regularizers in addition to the settings of
    ``Trained``.

    Args:
        max_norm: the largest length of the incoming weights of a unit, enforced after each step
            (Srivastava 2014).
        input_noise: the standard deviation of Gaussian noise that is added to the inputs in every
            step.
        weight_noise: the same for the weights.
        gradient_noise: the same for the gradient of the loss, times (1 + step)^(−0.55/2)
            (Neelakantan 2015).
    """

    max_norm: float | None = None
    input_noise: float = 0.0
    weight_noise: float = 0.0
    gradient_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("max_norm")
        for name in ("input_noise", "weight_noise", "gradient_noise"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(
                    f"{type(self).__name__} {name} must not be negative, got {value!r}"
                )

    _penalized: ClassVar[bool] = True  # whether log p(w) is part of the objective

    def _prior(self, target: Target) -> Target:
        """The target with the prior of the objective."""
        return target

    def _problem(self, target: Target, data: Data, held: Data | None, seed: int) -> PointModel:
        """The objective of a run."""
        return PointModel(self, target, held, seed)

    def _run(
        self, target: Target, data: Any, seed: int, checkpoint: StrPath | None, progress: Show
    ) -> tuple[PointModel, Data, RunState]:
        """The problem at the end of a run, and the data of its steps."""
        seed = as_int_seed(seed)
        batches, held = self.split(as_data(data, self.batch_size), seed)
        target = self._prior(target.copy(batches.n))
        if self._penalized:
            target.require_fixed_priors(type(self).__name__)
        problem = self._problem(target, batches, held, seed)
        problem.check_first_batch(batches)
        passes = passes_for(self, batches) if problem.smooth else 0
        file = (
            None
            if checkpoint is None
            else Checkpoint(checkpoint, identity(self, target, batches, seed))
        )
        settings = (
            replace(self, steps=self.total_steps(batches)) if passes else self
        )  # L-BFGS continues the run
        hooks = Hooks(
            None if held is None else problem.held_out_loss,
            problem.add_gradient_noise if self.gradient_noise else None,
        )
        state = fit_module(
            problem, batches, settings, seed=seed, checkpoint=file, progress=progress, hooks=hooks
        )
        if passes and state.stopped == "finished":
            finish(problem, batches, passes, state, progress)
        return problem, batches, state


class PointMethod(Regularized):
    """A method that ends in one point."""

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Empirical:
        """The weights that maximize the objective, as a posterior of one point."""
        problem, _, state = self._run(target, data, seed, checkpoint, progress)
        stack = {
            name: value.detach().unsqueeze(0).clone() for name, value in problem.weights().items()
        }
        posterior = Empirical(problem.target, Network(problem.net.eval()), stack, state.history)
        posterior.stopped = state.stopped
        return posterior


class PointModel(NetworkProblem):
    """A copy of the network and its likelihood during optimization."""

    loss_is_stationary = True

    def __init__(
        self, method: Regularized, target: Target, held: Data | None = None, seed: int = 0
    ) -> None:
        super().__init__(target)
        self.method, self.likelihood, self.held, self.seed = method, target.likelihood, held, seed
        self.title = type(method).__name__
        self.net, self.names = adapt(shared_copy(target.net, clone=True)), target.free
        self.register_state_dict_post_hook(_without_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_ignore_frozen)  # type: ignore[no-untyped-call]
        self.units = [
            (name, module)
            for name, module in self.net.named_modules()
            if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.ndim >= 2
        ]  # layers whose weight has a slice for every unit
        self.axes = {
            name: layouts(self.net, [f"{name}.weight"])[f"{name}.weight"].out_axis
            for name, _ in self.units
        }
        if method.max_norm is not None and not self.units:
            raise ValueError(
                f"{type(self.net).__name__} has no layer with a weight of two or more axes to constrain"
            )

    def outputs(self, *inputs: Any) -> Tensor:
        return self.net(*inputs)

    @property
    def smooth(self) -> bool:
        """Whether the loss is a deterministic function of the weights, for a second-order
        method.
        """
        method = self.method
        noisy = (
            method.input_noise
            or method.weight_noise
            or method.gradient_noise
            or method.max_norm is not None
        )
        moving = any(is_random_or_moving(module) for module in self.net.modules())
        learned = any(
            p.requires_grad for p in self.likelihood.parameters()
        )  # no bound if the noise can vanish
        return (
            self.held is None and not noisy and not moving and not learned and not method.autocast
        )

    def weights(self) -> Params:
        """The free weights by name."""
        return {name: value for name, value in self.net.named_parameters() if value.requires_grad}

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_likelihood = self.target.log_likelihood(self.training_outputs(x, y.device), y)
        report = {"log_likelihood": log_likelihood}
        objective = log_likelihood
        if self.method._penalized:
            report["log_prior"] = self.target.log_prior(self.weights())
            objective = objective + report["log_prior"]
        return -objective / self.target.n, {
            name: number.detach() for name, number in report.items()
        }

    def training_outputs(self, x: Any, device: torch.device) -> Tensor:
        """The outputs, in training mode with the noise of a step."""
        reseed_for_rank(device)
        inputs = forward_inputs(x)
        if self.method.input_noise and self.training:
            inputs = tuple(noisy(item, self.method.input_noise) for item in inputs)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.method.autocast):
            outputs = self._noisy_outputs(inputs)
        return outputs.to(next(self.net.parameters()).dtype)

    def _noisy_outputs(self, inputs: tuple[Any, ...]) -> Tensor:
        if self.method.weight_noise:
            params = {
                name: noisy(p, self.method.weight_noise) for name, p in self.weights().items()
            }
            out: Tensor = torch.func.functional_call(self.net, params, inputs)
            return out
        return self.outputs(*inputs)

    def held_out_loss(self) -> float:
        assert self.held is not None
        one = {
            "": next(self.net.parameters()).unsqueeze(0)
        }  # a stack of one, for its size and device
        return validation_loss(self.target, self.held, lambda _, *inputs: self.net(*inputs), one)

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        return sum(numbers.values(), start=next(iter(numbers.values())).new_zeros(()))

    @torch.no_grad()
    def after_step(self, numbers: dict[str, Tensor]) -> None:
        """The constraint on the length of each unit's weights."""
        if self.method.max_norm is not None:
            for name, module in self.units:
                weight, axis = module.weight, self.axes[name]
                others = [k for k in range(weight.ndim) if k != axis]
                length = torch.linalg.vector_norm(weight, dim=others, keepdim=True)
                weight.mul_(self.method.max_norm / length.clamp_min(self.method.max_norm))

    @torch.no_grad()
    def add_gradient_noise(self, step: int) -> None:
        """Noise on the gradients."""
        seed = part_seed(self.seed, "gradient", step)
        std = self.method.gradient_noise * (1 + step) ** (-DECAY / 2)
        for number, parameter in enumerate(self.parameters()):
            if parameter.grad is not None:
                noise = rng.normal(1, parameter.shape, parameter, rng.fold(seed, number))[0]
                parameter.grad.add_(noise, alpha=std)


def _frozen(model: PointModel) -> list[str]:
    persistent = no_grad_state(model.net)
    frozen = [
        name
        for name, value in model.net.named_parameters(remove_duplicate=False)
        if not value.requires_grad
    ]
    constants = [
        name
        for name, value in model.net.named_buffers(remove_duplicate=False)
        if is_constant(value)
    ]
    return [f"net.{name}" for name in (*frozen, *constants) if name in persistent]


def _without_frozen(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Neither frozen parameters nor constants are part of a checkpoint."""
    for name in _frozen(model):
        del state[prefix + name]


def _ignore_frozen(model: Any, found: Any) -> None:
    frozen = tuple(_frozen(model))
    found.missing_keys[:] = [name for name in found.missing_keys if not name.endswith(frozen)]


def noisy(x: Any, std: float) -> Any:
    """x + std·ε, for floating-point tensors; anything else as it is."""
    return x + std * rng.normal_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x
