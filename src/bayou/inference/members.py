"""The members of an ensemble: their initial weights, and parallel training with stacked weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrize import ParametrizationList

from bayou.core import rng
from bayou.core.params import Params, stack
from bayou.core.progress import Show
from bayou.inference.first_batch import NetworkProblem
from bayou.inference.point import PointMethod
from bayou.network import Network, shared_copy
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.priors import BoundNormal
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, batches_from, stack_batches
from bayou.training.inputs import Batch
from bayou.training.loop import fit_module, move
from bayou.training.problem import Hooks
from bayou.training.seeds import part_seed

Init = str | Callable[[nn.Module], Any] | None
SURE = 4.0  # standard errors of a significant difference of scale
MIN_NUMBERS = 8  # in a tensor for the comparison of its scale
NORM_FLOOR = 1e-6  # what torch adds to a norm before dividing by it, for identical clipping
PLAIN = (
    "max_norm",
    "input_noise",
    "weight_noise",
    "gradient_noise",
    "validation",
    "compile",
    "autocast",
)


def member_seed(seed: int, member: int) -> int:
    """The seed of one member's run."""
    return part_seed(seed, "member", member)


def member_target(target: Target, init: Init, seed: int) -> Target:
    """The target with the member's own network, at its initial weights, and its own likelihood."""
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


def draw_anchor(target: Target, seed: int) -> Params:
    """Draw the weights of one member from its prior.

    Args:
        target: with fixed Normal priors.
        seed: the seed of the member.
    """
    anchor: Params = {}
    for name in target.free:
        prior = target.priors[name]
        if not isinstance(prior, BoundNormal) or any(True for _ in prior.parameters()):
            raise ValueError(
                f"an anchored ensemble needs Normal priors with fixed scales, and that of {name!r} is a "
                f"{type(prior).__name__}; use prior=Normal(...), or anchored=False"
            )
        noise = rng.normal(1, prior.shape, prior.mean, rng.fold(part_seed(seed, "anchor"), name))[0]
        anchor[name] = prior.mean + prior.log_scale.exp() * noise
    return anchor


def prior_means(target: Target) -> Params:
    """Return the means of Normal priors, each in the shape of its tensor."""
    means: Params = {}
    for name, prior in target.priors.items():
        if isinstance(prior, BoundNormal):
            means[name] = prior.mean.detach().expand(prior.shape)
    return means


def draw_targets(target: Target, y: Tensor, seed: int) -> Tensor:
    """Draw the targets of one member, y with another draw of the noise; y itself if it has no
    Gaussian noise.

    Args:
        target: with a known noise, if it is Gaussian.
        y: the targets of all rows.
        seed: the seed of the member.
    """
    std = target.likelihood.gaussian_noise
    if std is None:
        return y
    if any(parameter.requires_grad for parameter in target.likelihood.parameters()):
        raise ValueError(
            "an anchored ensemble adds noise to y, whose size must be known: use likelihood=Gaussian(0.1) with your "
            'noise, the name "ensemble", which selects it, or anchored=False'
        )
    return y + std * rng.normal(1, y.shape, y, part_seed(seed, "targets"))[0]


@torch.no_grad()
def check_fresh(net: nn.Module, drawn: nn.Module) -> None:
    """A ValueError if a tensor of ``net`` is not as drawn by the reset that gave ``drawn``: it may
    be trained.
    """
    fresh = dict(drawn.named_parameters()) | dict(drawn.named_buffers())
    free = ((name, value) for name, value in net.named_parameters() if value.requires_grad)
    for name, value in (*free, *net.named_buffers()):
        if not alike(value.flatten(), fresh[name].flatten()):
            raise ValueError(
                f"{name!r} is not as drawn by reset_parameters(): the network was trained, loaded or given other "
                "initial weights. Choose where the members start: Ensemble(init='keep') at the current weights, "
                "init='reset' at new ones, or init=function, which changes each member's copy in place"
            )


def alike(given: Tensor, drawn: Tensor) -> bool:
    """Whether two vectors may have the same distribution: both constant and equal, or of the same
    root mean square.
    """
    n = given.numel()
    if n < 2 or torch.equal(given, drawn):
        return True
    if any(bool((vector == vector[0]).all()) for vector in (given, drawn)):
        return False
    a, b = (vector.double().square() for vector in (given, drawn))
    spread = max(
        2.0, float(b.square().mean() / b.mean().square()) - 1
    )  # of a square, in means: 2 of a Gaussian one
    return n < MIN_NUMBERS or abs(math.log(float(a.mean() / b.mean()))) < SURE * math.sqrt(
        2 * spread / n
    )


@torch.no_grad()
def reset(net: nn.Module) -> None:
    """New initial weights, by the ``reset_parameters`` of every module, children before parents.

    Frozen parameters (``requires_grad=False``) are kept. Every other one is set to NaN before, so
    that one which no
    module resets is detected: a bare ``nn.Parameter``, such as a positional embedding. Its new
    values are its old ones in random order if these look like independent draws; a constant or a
    table with a structure keeps its values.

    Raises:
        ValueError: if no module resets any parameter, or a parameter that is not bare remains.
    """
    given: Params = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            given[name] = parameter.detach().clone()
            parameter.fill_(math.nan)
    for module in reversed(list(net.modules())):
        parameters = list(module.parameters())
        if not parameters or any(p.requires_grad for p in parameters):
            again = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if callable(again):
                kept = [(p, p.data) for p in parameters if not p.requires_grad]
                for p, value in kept:
                    p.data = value.clone()  # a frozen tensor is shared, and must not change
                again()
                for p, value in kept:
                    p.data = value
    stale = [
        name for name, p in net.named_parameters() if p.requires_grad and bool(p.isnan().any())
    ]
    others = [name for name in stale if not is_bare(net, name)]
    if others or (stale and len(stale) == len(given)):
        first = (others or stale)[0]
        owner = type(net.get_submodule(first.rpartition(".")[0])).__name__
        raise ValueError(
            f"no reset_parameters() gives {first!r} (of a {owner}) new initial weights; write one, or pass "
            "Ensemble(init=function), which is called with the network and changes it in place, or init='keep' to "
            "start every member at the weights the network has"
        )
    for name in stale:
        value = given[name]
        if look_independent(value):
            order = torch.randperm(value.numel(), device=value.device)
            value = value.flatten()[order].view_as(value)
        net.get_parameter(name).copy_(value)


def is_bare(net: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to a module that cannot reset it; those of a
    parametrization are not bare.
    """
    owner = net.get_submodule(name.rpartition(".")[0])
    can_reset = hasattr(owner, "reset_parameters") or hasattr(owner, "_reset_parameters")
    return not can_reset and not isinstance(owner, ParametrizationList)


def look_independent(values: Tensor) -> bool:
    """Return whether the entries of a tensor may be independent draws from one distribution.

    They differ from each other, and the correlation of neighbors along every axis is within SURE
    standard errors of 0.
    """
    count = values.numel()
    if count < MIN_NUMBERS or values.unique().numel() < count / 2:
        return False
    centered = values.double() - values.double().mean()
    variance = centered.square().mean()
    for axis, size in enumerate(values.shape):
        if size > 1:
            products = centered.narrow(axis, 0, size - 1) * centered.narrow(axis, 1, size - 1)
            correlation = float(products.mean() / variance)
            if abs(correlation) > SURE / math.sqrt(products.numel()):
                return False
    return True


class StackedRows(Data):
    """The batches of K runs in parallel: (K, M, ...), row k in the order given by the seed of
    member k.

    All steps are one epoch here, so that step t of member k has the same batch as in a separate
    run.
    """

    rows_first = False

    def __init__(
        self, rows: Rows, seeds: list[int], steps: int, check: Callable[[Batch], None] | None
    ) -> None:
        self.rows, self.seeds, self.steps, self.check, self.n = rows, seeds, steps, check, rows.n

    @property
    def batches(self) -> int:
        return self.steps

    def epoch(self, seed: int, skip: int = 0) -> Iterator[Batch]:
        def seeds(epoch: int) -> list[int]:
            return [part_seed(own, "epoch", epoch) for own in self.seeds]

        several = batches_from(skip, [self.rows] * len(self.seeds), seeds, self.check)
        return map(stack_batches, islice(several, self.steps - skip))

    def ordered(self) -> Iterator[Batch]:
        return (stack_batches((batch,) * len(self.seeds)) for batch in self.rows.ordered())

    def fingerprint(self) -> list[Any]:
        return self.rows.fingerprint()


class StackedModel(NetworkProblem):
    """K copies of a network and its likelihood with stacked parameters: (K, *shape) each."""

    loss_is_stationary = True

    def __init__(self, method: PointMethod, targets: list[Target]) -> None:
        super().__init__(targets[0])
        self.penalized, self.clip = method._penalized, method.clip
        self.title = f"{len(targets)} × {type(method).__name__}"
        self.network = Network(targets[0].net)
        self.skeleton, self.likelihood = self.network.net, copy.deepcopy(targets[0].likelihood)
        weights = stack([target.start() for target in targets])
        noise = [
            {name: p.detach() for name, p in target.likelihood.named_parameters()}
            for target in targets
        ]
        self.names, self.noise_names = list(weights), list(noise[0])
        self.weights = nn.ParameterList([nn.Parameter(value) for value in weights.values()])
        self.noise = nn.ParameterList(
            [nn.Parameter(value) for value in (stack(noise) if noise[0] else {}).values()]
        )
        self.likelihood.requires_grad_(False)

    def tensors(self) -> tuple[Params, Params]:
        """The weights and the parameters of the likelihood, by name."""
        return dict(zip(self.names, self.weights, strict=True)), dict(
            zip(self.noise_names, self.noise, strict=True)
        )

    def loss(self, x: tuple[Any, ...], y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ_k of the members' losses, whose gradient in the weights of member k is that of its own
        loss.
        """

        def one(weights: Params, noise: Params, y: Tensor, *inputs: Any) -> Tensor:
            outputs = self.network.call(weights, *inputs)
            return self.target.scale(functional_call(self.likelihood, noise, (outputs, y)))

        weights, noise = self.tensors()
        axes = (0, 0, 0, *(0 if isinstance(item, Tensor) else None for item in x))
        log_likelihood = vmap(one, axes, randomness="different")(weights, noise, y, *x)  # (K,)
        report = {"log_likelihood": log_likelihood.detach().mean()}
        objective = log_likelihood
        if self.penalized:
            log_prior = self.target.log_prior(weights)  # (K,)
            report["log_prior"] = log_prior.detach().mean()
            objective = objective + log_prior
        return -objective.sum() / self.target.n, report

    def outputs(self, *inputs: Any) -> Tensor:
        return self.network.call(
            {name: value[0] for name, value in self.tensors()[0].items()}, *inputs
        )

    def name_of(self, name: str) -> str:
        return repr(self.names[int(name.partition(".")[2])] if name[0] == "w" else NOISE)

    @torch.no_grad()
    def clip_members(self, step: int) -> None:
        """Clip the gradient of every member to ``clip`` by its own norm."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        lengths = [
            gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients
        ]  # (K,) each
        norms = torch.stack(lengths).norm(dim=0)
        factor = (self.clip / (norms + NORM_FLOOR)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.reshape(-1, *[1] * (gradient.ndim - 1)))


@dataclass(frozen=True)
class VmapEnsemble:
    """K members of a point method, trained as one."""

    method: PointMethod
    targets: list[Target]
    rows: Rows
    seeds: list[int]

    def fit(self, seed: int, checkpoint: Checkpoint | None, progress: Show) -> Empirical:
        """One point for each member, the one of a separate run up to rounding."""
        method, target = self.method, self.targets[0]
        if method._penalized:
            target.require_fixed_priors(type(method).__name__)
        model = StackedModel(method, self.targets)
        model.check_first_batch(self.rows)
        steps = method.total_steps(self.rows)
        data = StackedRows(self.rows, self.seeds, steps, model.check_batch)
        self._try(model, next(data.epoch(seed)))
        alone = replace(
            method, clip=None, epochs=None, steps=steps
        )  # members are clipped one by one
        hooks = Hooks(after_gradients=None if method.clip is None else model.clip_members)
        state = fit_module(
            model, data, alone, seed=seed, checkpoint=checkpoint, progress=progress, hooks=hooks
        )
        weights, noise = model.tensors()
        first = {name: value[0] for name, value in noise.items()}
        target.likelihood.load_state_dict(target.likelihood.state_dict() | first)
        learned = {f"{NOISE}{name}": value for name, value in noise.items()}
        points = {name: value.detach().clone() for name, value in (weights | learned).items()}
        posterior = Empirical(target, model.network, points, state.history)
        posterior.stopped = state.stopped
        return posterior

    def _try(self, model: StackedModel, batch: Batch) -> None:
        """One loss and its gradient, discarded, so that operations without vmap support raise an
        error here.
        """
        like = model.weights[0]
        model.train()
        before = dict(model.network.net.named_buffers())
        try:
            with rng.isolated(0, like.device):
                value, _ = model.loss(*move(batch, like))
                value.backward()
        except (RuntimeError, NotImplementedError) as error:
            raise no_vmap(f"the network cannot be mapped over stacked weights: {error}") from error
        model.zero_grad(set_to_none=True)
        moved = [
            name
            for name, value in model.network.net.named_buffers()
            if value is not before.get(name)
        ]
        if moved:
            raise no_vmap(
                f"the buffer {moved[0]!r} changes in a forward pass, which is shared by all members"
            )


def no_vmap(why: str) -> ValueError:
    """The error for what cannot be trained with stacked weights."""
    return ValueError(f"{why}; train the members one after another: Ensemble(parallel=None)")


def vmap_ensemble(
    method: Any, target: Target, init: Init, data: Data, seeds: list[int]
) -> VmapEnsemble:
    """The members of a point method as one run, or a ValueError with the reason why that is not
    possible.
    """
    if not isinstance(method, PointMethod):
        raise no_vmap(f"parallel='vmap' is for MLE and MAP, got {type(method).__name__}")
    used = [name for name in PLAIN if getattr(method, name)]
    if method.optimizer is not None:
        used.append("optimizer")  # it may mix the members; the default is elementwise
    if used:
        raise no_vmap(
            f"{type(method).__name__}({used[0]}=...) is not available with parallel='vmap'"
        )
    if not isinstance(data, Rows):
        raise no_vmap(
            "parallel='vmap' needs tensors or a Dataset, to make batches for every member, got a DataLoader"
        )
    for name, module in target.net.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise no_vmap(
                f"{name!r} ({type(module).__name__}) has running statistics, which stacked weights cannot update"
            )
    targets = [method._prior(member_target(target, init, seed)) for seed in seeds]
    return VmapEnsemble(method, targets, data, seeds)
