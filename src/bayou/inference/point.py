"""A network with point weights in training, with classical regularizers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import no_grad_state
from bayou.core.params import Params
from bayou.inference.method import FitArguments, P, Trained, open_checkpoint
from bayou.inference.network_problem import NetworkProblem, validation_loss
from bayou.likelihoods.base import BoundLikelihood
from bayou.network import Network, adapt, forward_inputs, is_constant, layouts, shared_copy
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.training.checkpoints import RunState
from bayou.training.data import Data
from bayou.training.loop import fit_module
from bayou.training.newton import finish, passes_for
from bayou.training.problem import Hooks
from bayou.training.ranks import reseed_for_rank
from bayou.training.seeds import part_seed

RANDOM_OR_MOVING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
DECAY = 0.55  # of the gradient noise (Neelakantan 2015)


def is_random_or_moving(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers or changes its buffers in training.

    Dropout of rate 0 does not.

    Args:
        module: one layer.
    """
    return isinstance(module, RANDOM_OR_MOVING) and getattr(module, "p", None) != 0


@dataclass(frozen=True, kw_only=True)
class Regularized(Trained[P]):
    """A method that trains one network, with classical regularizers.

    Args:
        max_norm: the largest length of the incoming weights of a unit, enforced after each step
            (Srivastava 2014); None (the default) for no limit.
        input_noise: the standard deviation of Gaussian noise that is added to the inputs in every
            step; 0 by default.
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
        self._check_interval("[0, inf)", "input_noise", "weight_noise", "gradient_noise")

    _penalized: ClassVar[bool] = True  # whether log p(w) is part of the objective

    @property
    def adds_noise(self) -> bool:
        """Whether a step adds noise to the inputs, the weights or the gradient."""
        return bool(self.input_noise or self.weight_noise or self.gradient_noise)

    def _prior(self, target: Target) -> Target:
        """Return the target with the prior of the objective."""
        return target

    def _problem(self, target: Target, data: Data, seed: int) -> PointModel:
        """Return the objective of a run."""
        return PointModel(self, target, seed)

    def _run(self, arguments: FitArguments) -> tuple[PointModel, Data, RunState]:
        """Train, and return the problem at the end of the run, its data and its state."""
        seed = arguments.seed
        progress = arguments.progress
        rows, held_out_rows = self.split(arguments.data, seed)
        target = self._prior(arguments.target.copy(rows.n))
        if self._penalized:
            target.require_fixed_priors(type(self).__name__)
        problem = self._problem(target, rows, seed)
        problem.check_first_batch(rows)
        passes = passes_for(self, rows) if problem.smooth else 0
        file = open_checkpoint(arguments.checkpoint, self, target, rows, seed)
        settings = self
        if passes:  # L-BFGS continues the run
            settings = replace(self, steps=self.total_steps(rows))
        hooks = Hooks(
            None if held_out_rows is None else partial(problem.held_out_loss, held_out_rows),
            problem.add_gradient_noise if self.gradient_noise else None,
        )
        state = fit_module(
            problem, rows, settings, seed=seed, checkpoint=file, progress=progress, hooks=hooks
        )
        if passes and state.stopped == "finished":
            finish(problem, rows, passes, state, progress)
        return problem, rows, state


class PointMethod(Regularized[Empirical]):
    """A method that ends in one point."""

    def _fit(self, arguments: FitArguments) -> Empirical:
        """Maximize the objective over the weights, and return one point."""
        problem, _, state = self._run(arguments)
        weights = problem.weights().items()
        stack = {name: value.detach().unsqueeze(0).clone() for name, value in weights}
        posterior = Empirical(problem.target, Network(problem.net.eval()), stack, state.history)
        posterior.stopped = state.stopped
        return posterior


class PointModel(NetworkProblem):
    """A copy of the network and its likelihood during optimization.

    Args:
        method: the settings of the run.
        target: network, likelihood and prior.
        seed: of the noise on the gradients.
    """

    loss_is_stationary = True

    def __init__(self, method: Regularized[Any], target: Target, seed: int = 0) -> None:
        super().__init__(target)
        self.method = method
        self.likelihood: BoundLikelihood = target.likelihood
        self.seed = seed
        self.title: str = type(method).__name__
        self.net: nn.Module = adapt(shared_copy(target.net, clone=True))
        self.names: list[str] = target.free
        self.register_state_dict_post_hook(_remove_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_ignore_frozen)  # type: ignore[no-untyped-call]
        self.units: list[tuple[str, nn.Module]] = _layers_with_units(self.net)
        self.axes: dict[str, int] = {}
        for name, _ in self.units:
            weight = f"{name}.weight"
            self.axes[name] = layouts(self.net, [weight])[weight].out_axis
        if method.max_norm is not None and not self.units:
            raise ValueError(
                f"{type(self.net).__name__} has no layer with a weight of two or more axes to "
                "constrain"
            )

    def outputs(self, *inputs: object) -> Tensor:
        """Compute the outputs of the network, in its current mode."""
        outputs: Tensor = self.net(*inputs)
        return outputs

    @property
    def smooth(self) -> bool:
        """Whether the loss is a deterministic function of the weights with a bound.

        A second-order method needs both. With a learned noise, which can vanish, there is no bound.
        """
        method = self.method
        if method.validation or method.autocast:
            return False
        if method.adds_noise or method.max_norm is not None:
            return False
        if any(is_random_or_moving(module) for module in self.net.modules()):
            return False
        return not any(parameter.requires_grad for parameter in self.likelihood.parameters())

    def weights(self) -> Params:
        """Return the free weights by name."""
        return {name: value for name, value in self.net.named_parameters() if value.requires_grad}

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute −(log p(y | w) + log p(w))/N, for MLE without log p(w), and its terms."""
        log_likelihood = self.target.log_likelihood(self.training_outputs(x, y.device), y)
        report = {"log_likelihood": log_likelihood}
        objective = log_likelihood
        if self.method._penalized:
            report["log_prior"] = self.target.log_prior(self.weights())
            objective = objective + report["log_prior"]
        terms = {name: value.detach() for name, value in report.items()}
        return -objective / self.target.n, terms

    def training_outputs(self, x: object, device: torch.device) -> Tensor:
        """Compute the outputs in training mode, with the noise of a step."""
        reseed_for_rank(device)
        inputs = forward_inputs(x)
        if self.method.input_noise and self.training:
            std = self.method.input_noise
            inputs = tuple(
                add_noise(item, std) if isinstance(item, Tensor) else item for item in inputs
            )
        with torch.autocast(device.type, torch.bfloat16, enabled=self.method.autocast):
            outputs = self._outputs_of_noisy_weights(inputs)
        return outputs.to(next(self.net.parameters()).dtype)

    def _outputs_of_noisy_weights(self, inputs: tuple[Any, ...]) -> Tensor:
        """Compute the outputs with ``weight_noise`` added to the weights."""
        if not self.method.weight_noise:
            return self.outputs(*inputs)
        params = {
            name: add_noise(value, self.method.weight_noise)
            for name, value in self.weights().items()
        }
        outputs: Tensor = torch.func.functional_call(self.net, params, inputs)
        return outputs

    def held_out_loss(self, rows: Data) -> float:
        """Compute the mean negative log-likelihood of held-out rows."""
        # A stack of one draw, for its size and device; the network has the weights itself.
        stack = {"": next(self.net.parameters()).unsqueeze(0)}
        return validation_loss(self.target, rows, lambda _, *inputs: self.net(*inputs), stack)

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        """Return the objective of a step, the sum of its terms."""
        return sum(numbers.values(), start=next(iter(numbers.values())).new_zeros(()))

    @torch.no_grad()
    def after_step(self, numbers: dict[str, Tensor]) -> None:
        """Shorten the weights of each unit to ``max_norm``."""
        if self.method.max_norm is None:
            return
        for name, module in self.units:
            weight = module.get_parameter("weight")
            input_axes = [axis for axis in range(weight.ndim) if axis != self.axes[name]]
            length = torch.linalg.vector_norm(weight, dim=input_axes, keepdim=True)
            weight.mul_(self.method.max_norm / length.clamp_min(self.method.max_norm))

    @torch.no_grad()
    def add_gradient_noise(self, step: int) -> None:
        """Add the noise of a step to the gradients."""
        seed = part_seed(self.seed, "gradient", step)
        std = self.method.gradient_noise * (1 + step) ** (-DECAY / 2)
        for number, parameter in enumerate(self.parameters()):
            if parameter.grad is not None:
                noise = rng.normal(1, parameter.shape, parameter, rng.fold(seed, number))[0]
                parameter.grad.add_(noise, alpha=std)


def _layers_with_units(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers, by name, whose weight has a slice for every unit."""
    layers = []
    for name, module in net.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
            layers.append((name, module))
    return layers


def _frozen_entries(model: PointModel) -> list[str]:
    """Return the entries of a model's state that do not change: frozen parameters and constants."""
    persistent = no_grad_state(model.net)
    names = []
    for name, parameter in model.net.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            names.append(name)
    for name, buffer in model.net.named_buffers(remove_duplicate=False):
        if is_constant(buffer):
            names.append(name)
    return [f"net.{name}" for name in names if name in persistent]


def _remove_frozen(model: PointModel, state: dict[str, Any], prefix: str, _: object) -> None:
    """Remove what does not change from the state of a checkpoint."""
    for name in _frozen_entries(model):
        del state[prefix + name]


def _ignore_frozen(model: PointModel, keys: Any) -> None:
    """Allow a state without what does not change."""
    frozen = tuple(_frozen_entries(model))
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith(frozen)]


def add_noise(x: Tensor, std: float) -> Tensor:
    """Return x + std·ε with Gaussian ε.

    Args:
        x: a tensor of any shape; without floating-point numbers it is returned as it is.
        std: the standard deviation.
    """
    if not x.is_floating_point():
        return x
    return x + std * rng.normal_like(x)
