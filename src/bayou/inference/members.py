"""The members of an ensemble: their initial weights, and parallel training with stacked weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayou.core import rng
from bayou.core.params import Params, stack
from bayou.core.progress import Show
from bayou.inference.initial_weights import check_fresh, reset
from bayou.inference.method import Method
from bayou.inference.network_problem import NetworkProblem
from bayou.inference.point import PointMethod
from bayou.likelihoods.base import BoundLikelihood
from bayou.network import Network, shared_copy
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.priors import BoundNormal
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, batches_from, stack_batches
from bayou.training.inputs import Batch
from bayou.training.loop import fit_module, move
from bayou.training.problem import Hooks
from bayou.training.seeds import part_seed

Init = str | Callable[[nn.Module], Any] | None
NORM_FLOOR = 1e-6  # what torch adds to a norm before dividing by it, for identical clipping
# Settings of a point method that parallel training does not have.
SETTINGS_OF_SINGLE_RUNS = (
    "max_norm",
    "input_noise",
    "weight_noise",
    "gradient_noise",
    "validation",
    "compile",
    "autocast",
    "optimizer",  # it may mix the members; the default is elementwise
)


def member_seed(seed: int, member: int) -> int:
    """Return the seed of one member's run.

    Args:
        seed: of the ensemble.
        member: its number.
    """
    return part_seed(seed, "member", member)


def member_target(target: Target, init: Init, seed: int) -> Target:
    """Return the target of one member: its own network, at initial weights, and likelihood.

    Args:
        target: of the ensemble.
        init: where the member starts: "reset" or None for new weights, None only if those of the
            network are as they were drawn; "keep" for the weights of the network; a function that
            changes the network in place.
        seed: of the member.
    """
    net = shared_copy(target.net, clone=True)
    device = next(net.parameters()).device
    with rng.isolated(part_seed(seed, "init"), device):
        if init is None or init == "reset":
            reset(net)
        elif callable(init):
            with torch.no_grad():
                init(net)
    if init is None:
        check_fresh(target.net, net)
    return replace(target.copy(), net=net)


def fixed_normal_priors(target: Target) -> dict[str, BoundNormal]:
    """Return the priors of all tensors, which must be Normal with fixed scales.

    Args:
        target: has the priors.
    """
    priors: dict[str, BoundNormal] = {}
    learned = target.learned_priors
    for name in target.free:
        prior = target.priors[name]
        if not isinstance(prior, BoundNormal) or name in learned:
            raise ValueError(
                "an anchored ensemble needs Normal priors with fixed scales, and that of "
                f"{name!r} is a {type(prior).__name__}; use prior=Normal(...), or anchored=False"
            )
        priors[name] = prior
    return priors


def draw_anchor(target: Target, seed: int) -> Params:
    """Draw the weights of one member from its prior.

    Args:
        target: with fixed Normal priors.
        seed: the seed of the member.
    """
    anchor: Params = {}
    for name, prior in fixed_normal_priors(target).items():
        noise_seed = rng.fold(part_seed(seed, "anchor"), name)
        noise = rng.normal(1, prior.shape, prior.mean, noise_seed)[0]
        anchor[name] = prior.mean + prior.log_scale.exp() * noise
    return anchor


def draw_targets(target: Target, y: Tensor, seed: int) -> Tensor:
    """Draw the targets of one member: y with another draw of the Gaussian noise.

    Args:
        target: with a known noise, if it is Gaussian; without Gaussian noise y is returned.
        y: the targets of all rows.
        seed: the seed of the member.
    """
    std = target.likelihood.gaussian_noise
    if std is None:
        return y
    if any(parameter.requires_grad for parameter in target.likelihood.parameters()):
        raise ValueError(
            "an anchored ensemble adds noise to y, whose size must be known: use "
            'likelihood=Gaussian(0.1) with your noise, the name "ensemble", which selects it, or '
            "anchored=False"
        )
    return y + std * rng.normal(1, y.shape, y, part_seed(seed, "targets"))[0]


class StackedRows(Data):
    """The batches of K runs in parallel, (K, M, ...), row k in the order of member k.

    All steps are one epoch here, so that step t of member k has the same batch as in a separate
    run.

    Args:
        rows: the data of every member.
        seeds: of the members; each determines the order of its rows.
        steps: the number of steps.
        check: applied to every batch of the first epoch; None for no check.
    """

    rows_first = False

    def __init__(
        self, rows: Rows, seeds: list[int], steps: int, check: Callable[[Batch], None] | None
    ) -> None:
        self.rows = rows
        self.seeds = seeds
        self.steps = steps
        self.check = check
        self.n: int = rows.n

    @property
    def batches(self) -> int:
        """The number of batches of an epoch, here that of all steps."""
        return self.steps

    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        """Yield the stacked batches of all steps, without the first ``skip``.

        Without a seed it is one pass in the order of the rows, the same for every member.
        """
        if seed is None:
            return (stack_batches((batch,) * len(self.seeds)) for batch in self.rows.epoch())

        def epoch_seeds(epoch: int) -> list[int]:
            return [part_seed(member, "epoch", epoch) for member in self.seeds]

        batches = batches_from(skip, [self.rows] * len(self.seeds), epoch_seeds, self.check)
        return map(stack_batches, islice(batches, self.steps - skip))

    def fingerprint(self) -> list[Any]:
        """Return the fingerprint of the rows."""
        return self.rows.fingerprint()


class StackedModel(NetworkProblem):
    """K copies of a network and its likelihood with stacked parameters, (K, *shape) each.

    Args:
        method: the settings of every member.
        targets: of the members, each at its initial weights.
    """

    loss_is_stationary = True

    def __init__(self, method: PointMethod, targets: list[Target]) -> None:
        super().__init__(targets[0])
        self.penalized: bool = method._penalized
        self.clip: float | None = method.clip
        self.title: str = f"{len(targets)} × {type(method).__name__}"
        self.network: Network = Network(targets[0].net)
        self.skeleton: nn.Module = self.network.net
        self.likelihood: BoundLikelihood = copy.deepcopy(targets[0].likelihood)
        weights = stack([target.start() for target in targets])
        noises: list[Params] = [dict(target.likelihood.named_parameters()) for target in targets]
        noise = stack(noises) if noises[0] else {}
        self.names: list[str] = list(weights)
        self.noise_names: list[str] = list(noise)
        self.weights: nn.ParameterList = nn.ParameterList(
            [nn.Parameter(value) for value in weights.values()]
        )
        self.noise: nn.ParameterList = nn.ParameterList(
            [nn.Parameter(value.detach()) for value in noise.values()]
        )
        self.likelihood.requires_grad_(False)

    def tensors(self) -> tuple[Params, Params]:
        """Return the weights and the parameters of the likelihood, by name."""
        weights = dict(zip(self.names, self.weights, strict=True))
        noise = dict(zip(self.noise_names, self.noise, strict=True))
        return weights, noise

    def loss(self, x: tuple[Any, ...], y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute Σ_k of the members' losses.

        Its gradient in the weights of member k is that of the loss of this member.

        Args:
            x: stacked inputs, (K, M, ...) each.
            y: stacked targets, (K, M, ...).
        """

        def member_log_likelihood(
            weights: Params, noise: Params, y: Tensor, *inputs: Any
        ) -> Tensor:
            outputs = self.network.call(weights, *inputs)
            return self.target.scale(functional_call(self.likelihood, noise, (outputs, y)))

        weights, noise = self.tensors()
        input_axes = tuple(0 if isinstance(item, Tensor) else None for item in x)
        mapped = vmap(member_log_likelihood, (0, 0, 0, *input_axes), randomness="different")
        log_likelihood = mapped(weights, noise, y, *x)  # (K,)
        report = {"log_likelihood": log_likelihood.detach().mean()}
        objective = log_likelihood
        if self.penalized:
            log_prior = self.target.log_prior(weights)  # (K,)
            report["log_prior"] = log_prior.detach().mean()
            objective = objective + log_prior
        return -objective.sum() / self.target.n, report

    def outputs(self, *inputs: object) -> Tensor:
        """Compute the outputs of the first member."""
        weights, _ = self.tensors()
        return self.network.call({name: value[0] for name, value in weights.items()}, *inputs)

    def name_of(self, name: str) -> str:
        """Return the user's name for a parameter of this module."""
        list_name, _, index = name.partition(".")
        return repr(self.names[int(index)] if list_name == "weights" else NOISE)

    @torch.no_grad()
    def clip_members(self, step: int) -> None:
        """Clip the gradient of every member to ``clip`` by its own norm."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norms = [gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]
        norm = torch.stack(norms).norm(dim=0)  # (K,)
        factor = (self.clip / (norm + NORM_FLOOR)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.reshape(-1, *[1] * (gradient.ndim - 1)))


def fit_stacked(
    method: Method,
    target: Target,
    init: Init,
    data: Data,
    seeds: list[int],
    seed: int,
    checkpoint: Checkpoint | None,
    progress: Show,
) -> Empirical:
    """Train the members of an ensemble as one network with stacked weights.

    Each ends at the point of a separate run, up to rounding.

    Args:
        method: of every member.
        target: network, likelihood and prior.
        init: where the members start, see ``member_target``.
        data: the rows.
        seeds: of the members.
        seed: of the run.
        checkpoint: its file; None for none.
        progress: whether and how progress is shown.

    Returns:
        One point for each member.

    Raises:
        ValueError: with the reason, if that is not possible.
    """
    method, data = _check_settings(method, target, data)
    targets = [method._prior(member_target(target, init, member)) for member in seeds]
    first = targets[0]
    if method._penalized:
        first.require_fixed_priors(type(method).__name__)
    model = StackedModel(method, targets)
    model.check_first_batch(data)
    steps = method.total_steps(data)
    rows = StackedRows(data, seeds, steps, model.check_batch)
    _check_vmap(model, next(rows.epoch(seed)))
    settings = replace(method, clip=None, epochs=None, steps=steps)
    hooks = Hooks(after_gradients=None if method.clip is None else model.clip_members)
    state = fit_module(
        model, rows, settings, seed=seed, checkpoint=checkpoint, progress=progress, hooks=hooks
    )
    weights, noise = model.tensors()
    first_noise = {name: value[0] for name, value in noise.items()}
    first.likelihood.load_state_dict(first.likelihood.state_dict() | first_noise)
    tensors = weights | {f"{NOISE}{name}": value for name, value in noise.items()}
    points = {name: value.detach().clone() for name, value in tensors.items()}
    posterior = Empirical(replace(first, net=target.net), model.network, points, state.history)
    posterior.stopped = state.stopped
    return posterior


def _check_settings(method: Method, target: Target, data: Data) -> tuple[PointMethod, Rows]:
    """Raise a ValueError if members cannot be trained with stacked weights."""
    if not isinstance(method, PointMethod):
        raise no_vmap(f"parallel='vmap' is for MLE and MAP, got {type(method).__name__}")
    unavailable = [name for name in SETTINGS_OF_SINGLE_RUNS if getattr(method, name)]
    if unavailable:
        raise no_vmap(
            f"{type(method).__name__}({unavailable[0]}=...) is not available with parallel='vmap'"
        )
    if not isinstance(data, Rows):
        raise no_vmap(
            "parallel='vmap' needs tensors or a Dataset, to make batches for every member, got a "
            "DataLoader"
        )
    for name, module in target.net.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise no_vmap(
                f"{name!r} ({type(module).__name__}) has running statistics, which stacked weights "
                "cannot update"
            )
    return method, data


def _check_vmap(model: StackedModel, batch: Batch) -> None:
    """Raise a ValueError if the network has operations that vmap does not support.

    One loss and its gradient are computed and discarded.
    """
    parameter = model.weights[0]
    model.train()
    buffers = dict(model.network.net.named_buffers())
    try:
        with rng.isolated(0, parameter.device):
            value, _ = model.loss(*move(batch, parameter))
            value.backward()
    except (RuntimeError, NotImplementedError) as error:
        raise no_vmap(f"the network cannot be mapped over stacked weights: {error}") from error
    model.zero_grad(set_to_none=True)
    for name, value in model.network.net.named_buffers():
        if value is not buffers.get(name):
            raise no_vmap(
                f"the buffer {name!r} changes in a forward pass, which is shared by all members"
            )


def no_vmap(reason: str) -> ValueError:
    """Return the error for what cannot be trained with stacked weights.

    Args:
        reason: the beginning of its message.
    """
    return ValueError(f"{reason}; train the members one after another: Ensemble(parallel=None)")
