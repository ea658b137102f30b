"""SWAG: a Gaussian fitted to the trajectory of stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Progress, Show
from bayou.curvature.swag import LowRankPlusDiagonal
from bayou.inference.baseline_checks import compare_with_start
from bayou.inference.method import Method, Trained, identity
from bayou.inference.point import PointModel
from bayou.inference.start import network_at, starting_point
from bayou.methods.point import MAP
from bayou.network import Network, forward_inputs
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.posterior import Posterior
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, as_data
from bayou.training.loop import fit_module, move
from bayou.training.problem import Problem
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.settings import Schedule, Settings


@final
@dataclass(frozen=True, kw_only=True)
class SWAG(Trained):
    """q(w) = N(w̄, ½·(diag(var) + D·Dᵀ/(K − 1))) of the iterates of SGD at a constant rate (Maddox
    et al. 2019).

    ``start``: the start of SGD, MAP() by default; None: the network as given (pretrained).
    ``every``: steps between two collected iterates, an epoch by default; ``rank``: K, the number of
    the last deviations from the running mean
    in D. ``lr``, ``momentum``: of SGD on −log joint / N; the spread of the posterior increases with
    the learning rate.

    A network with batch norm needs the statistics of each draw: ``draws`` draws are then made in
    advance, each with one pass over the data, and the posterior consists of those.
    """

    start: Method | None = field(default_factory=MAP)
    lr: float = 0.01
    momentum: float = 0.9
    schedule: Schedule = "constant"
    every: int | None = None
    rank: int = 20
    draws: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_start()
        self._check_whole("every", "draws")
        self._check_whole("rank", least=2)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"SWAG momentum must lie in [0, 1), got {self.momentum!r}")
        if self.validation or self.patience:
            raise ValueError(
                "SWAG averages iterates and cannot select the best one; give validation to start=MAP()"
            )

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(
            self, lr=self.lr * noise**2, start=None
        )  # gradients are proportional to 1/noise²

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Run SGD from the start and return the Gaussian of its iterates."""
        seed = as_int_seed(seed)
        batches = as_data(data, self.batch_size)
        target.require_fixed_priors("SWAG")
        point = starting_point(
            self.start, target, batches, seed=seed, checkpoint=checkpoint, progress=progress
        )
        if point.stopped == "interrupted":  # Ctrl-C during the start: return that point
            return point
        steps = self.total_steps(batches)
        every = self.every or batches.batches
        if steps // every < 2:
            raise ValueError(
                f"SWAG has {steps // every} iterates in {steps} steps, one every {every}; it needs 2: give more steps"
            )
        target = point.target
        path = Path(
            PointModel(MAP(autocast=self.autocast), replace(target, net=network_at(point))),
            self,
            every,
        )
        path.trained.check_first_batch(batches)
        file = (
            None
            if checkpoint is None
            else Checkpoint(checkpoint, identity(self, target, batches, seed))
        )
        state = fit_module(path, batches, self, seed=seed, checkpoint=file, progress=progress)
        if path.seen < 2:
            raise ValueError(
                f"SWAG was stopped after {int(path.seen)} of {steps // every} iterates; it needs 2"
            )
        network = Network(path.trained.net.eval())
        gaussian = GaussianPosterior(target, network, path.mean(), path.covariance(), state.history)
        posterior: Posterior = gaussian
        if any(
            isinstance(module, _BatchNorm) and module.track_running_stats
            for module in path.trained.net.modules()
        ):
            posterior = with_statistics(
                gaussian, batches, self.draws, part_seed(seed, "draws"), progress
            )
        posterior.stopped = state.stopped
        if state.stopped != "interrupted":
            posterior.history[-1] |= compare_with_start(
                posterior, point, batches, seed=part_seed(seed, "rows")
            )
        return posterior


class Path(Problem):
    """The moments of the iterates of a model."""

    title = "SWAG"
    count: Tensor

    def __init__(self, trained: PointModel, method: SWAG, every: int) -> None:
        super().__init__()
        self.trained, self.method, self.every, rank = trained, method, every, method.rank
        self.names = [
            name for name, parameter in trained.net.named_parameters() if parameter.requires_grad
        ]
        weights = trained.weights()
        like = weights[self.names[0]]
        for number, name in enumerate(self.names):
            for moment in ("first", "second"):
                self.register_buffer(f"{moment}{number}", torch.zeros_like(weights[name].detach()))
            self.register_buffer(f"deviations{number}", like.new_zeros(rank, *weights[name].shape))
        self.register_buffer(
            "count", torch.zeros(2, dtype=torch.long, device=like.device)
        )  # steps, iterates

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.trained.loss(x, y)

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        if settings.optimizer is not None:
            return super().make_optimizer(settings, steps)
        free = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(free, settings.lr, self.method.momentum)

    @property
    def seen(self) -> int:
        return int(self.count[1])

    @torch.no_grad()
    def after_step(self, numbers: dict[str, Tensor]) -> None:
        """Collect an iterate every so many steps."""
        self.count[0] += 1
        if int(self.count[0]) % self.every:
            return
        k = self.seen
        self.count[1] += 1
        weights = self.trained.weights()
        for number, name in enumerate(self.names):
            first, second, deviations = (
                self.get_buffer(f"{part}{number}") for part in ("first", "second", "deviations")
            )
            w = weights[name]
            first.mul_(k / (k + 1)).add_(w, alpha=1 / (k + 1))
            second.mul_(k / (k + 1)).add_(w.square(), alpha=1 / (k + 1))
            deviations[k % len(deviations)] = w - first

    def mean(self) -> Params:
        return {name: self.get_buffer(f"first{number}") for number, name in enumerate(self.names)}

    def covariance(self) -> LowRankPlusDiagonal:
        tensors = {}
        for number, name in enumerate(self.names):
            first, second, deviations = (
                self.get_buffer(f"{part}{number}") for part in ("first", "second", "deviations")
            )
            floor = torch.finfo(first.dtype).eps * (
                1 + first.square()
            )  # the rounding error of a difference of squares
            rank = min(self.seen, len(deviations))
            tensors[f"std.{name}"] = (0.5 * (second - first.square()).clamp_min(floor)).sqrt()
            tensors[f"factor.{name}"] = deviations[:rank] * (0.5 / (rank - 1)) ** 0.5
        return LowRankPlusDiagonal(
            {name: value.shape for name, value in self.mean().items()}, tensors
        )


@torch.no_grad()
def with_statistics(
    posterior: GaussianPosterior, data: Data, draws: int, seed: int, progress: Show
) -> Empirical:
    """Draws of a posterior, each with its batch norm statistics: cumulative means over the data."""
    network = Network(posterior.target.net)
    like = next(iter(posterior.center.values()))
    norms = {
        name: m
        for name, m in network.net.named_modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats
    }
    network.net.eval()
    for module in norms.values():
        module.train()
        module.momentum = None  # a plain mean over all batches
    stacks: list[Params] = []
    with Progress("batch statistics of the draws", draws, progress) as bar:
        for number in range(draws):
            params = {name: value[0] for name, value in posterior.sample(1, seed, number).items()}
            for module in norms.values():
                module.reset_running_stats()
            for raw in data.ordered():
                network.call(params, *forward_inputs(move(raw, like)[0]))
            buffers = {
                f"{name}.{leaf}": getattr(module, leaf).clone()
                for name, module in norms.items()
                for leaf in ("running_mean", "running_var")
            }
            stacks.append(params | buffers)
            bar.update(number + 1)
    stack = {name: torch.stack([part[name] for part in stacks]) for name in stacks[0]}
    return Empirical(posterior.target, posterior.network, stack, posterior.history)
