"""SWAG: a Gaussian fitted to the trajectory of stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayou.core.params import Params, stack
from bayou.core.progress import Progress, Show
from bayou.curvature.swag import LowRankPlusDiagonal
from bayou.inference.baseline_checks import compare_with_start
from bayou.inference.method import FitArguments, Method, Trained, open_checkpoint
from bayou.inference.point import PointModel
from bayou.inference.start import network_at, starting_point
from bayou.methods.point import MAP
from bayou.network import Network, forward_inputs
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.posterior import Posterior
from bayou.training.data import Data
from bayou.training.loop import fit_module, move
from bayou.training.problem import Problem
from bayou.training.seeds import part_seed
from bayou.training.settings import Schedule, Settings


@final
@dataclass(frozen=True, kw_only=True)
class SWAG(Trained[Posterior]):
    """SWAG: a Gaussian fitted to the iterates of SGD at a constant rate.

        q(w) = N(w̄, ½·(diag(var) + D·Dᵀ/(K − 1)))

    w̄ and var are the mean and the variance of the iterates, and D has the last K deviations from
    the running mean. The spread of the posterior increases with the learning rate. It costs one
    further training run.

    A network with batch norm needs the statistics of each draw: ``draws`` draws are then made in
    advance, each with one pass over the data, and the posterior consists of those.

    Args:
        start: the method that SGD starts from, ``MAP()`` by default; None: the network as it is
            (pretrained).
        lr: the learning rate of SGD on −log joint / N; 0.01 by default.
        momentum: of SGD; 0.9 by default.
        schedule: the factor of the learning rate; "constant" by default.
        every: steps between two collected iterates; None (default) is an epoch.
        rank: K; 20 by default.
        draws: draws of a network with batch norm; 30 by default.

    Returns:
        ``fit`` returns a ``GaussianPosterior``, or an ``Empirical`` one for batch norm. Where it
        predicts worse than its start, there is a ``WorseThanModeWarning``.

    Raises:
        ValueError: for fewer than two iterates, a validation split, and settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.5)
    >>> method = bayou.SWAG(start=bayou.MAP(steps=10), steps=10, lr=1e-3)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> sorted(posterior.std())
    ['bias', 'weight']

    Paper: Maddox et al. 2019, https://arxiv.org/abs/1902.02476.
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
        self._check_interval("[0, 1)", "momentum")
        if self.validation or self.patience:
            raise ValueError(
                "SWAG averages iterates and cannot select the best one; "
                "give validation to start=MAP()"
            )

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method from the network as it is; gradients are proportional to 1/noise²."""
        return replace(self, lr=self.lr * noise**2, start=None)

    def _fit(self, arguments: FitArguments) -> Posterior:
        """Run SGD from the start and return the Gaussian of its iterates."""
        target = arguments.target
        batches = arguments.data
        seed = arguments.seed
        checkpoint = arguments.checkpoint
        progress = arguments.progress
        target.require_fixed_priors("SWAG")
        point = starting_point(
            self.start, target, batches, seed=seed, checkpoint=checkpoint, progress=progress
        )
        if point.stopped == "interrupted":  # Ctrl-C during the start: return that point
            return point
        steps = self.total_steps(batches)
        every = self._interval(steps, batches)
        target = point.target
        model = PointModel(MAP(autocast=self.autocast), replace(target, net=network_at(point)))
        trajectory = Trajectory(model, self, every)
        model.check_first_batch(batches)
        file = open_checkpoint(checkpoint, self, target, batches, seed)
        state = fit_module(trajectory, batches, self, seed=seed, checkpoint=file, progress=progress)
        if trajectory.iterates < 2:
            raise ValueError(
                f"SWAG was stopped after {trajectory.iterates} of {steps // every} iterates; "
                "it needs 2"
            )
        network = Network(model.net.eval())
        gaussian = GaussianPosterior(
            target, network, trajectory.mean(), trajectory.covariance(), state.history
        )
        posterior: Posterior = gaussian
        if any(_has_running_statistics(module) for module in model.net.modules()):
            posterior = draw_with_statistics(
                gaussian, batches, self.draws, part_seed(seed, "draws"), progress
            )
        posterior.stopped = state.stopped
        if state.stopped != "interrupted":
            rows_seed = part_seed(seed, "rows")
            posterior.history[-1] |= compare_with_start(posterior, point, batches, seed=rows_seed)
        return posterior

    def _interval(self, steps: int, data: Data) -> int:
        """Return the steps between two iterates, of which a run needs two."""
        every = self.every or data.batches
        if steps // every < 2:
            raise ValueError(
                f"SWAG has {steps // every} iterates in {steps} steps, one every {every}; "
                "it needs 2: give more steps"
            )
        return every


class Trajectory(Problem):
    """The moments of the iterates of a model.

    Args:
        trained: the model.
        method: has the rank and the momentum.
        every: steps between two iterates.
    """

    title = "SWAG"
    count: Tensor

    def __init__(self, trained: PointModel, method: SWAG, every: int) -> None:
        super().__init__()
        self.trained = trained
        self.method = method
        self.every = every
        weights = trained.weights()
        self.names: list[str] = list(weights)
        like = weights[self.names[0]]
        for number, name in enumerate(self.names):
            zeros = torch.zeros_like(weights[name].detach())
            self.register_buffer(f"first{number}", zeros)
            self.register_buffer(f"second{number}", zeros.clone())
            self.register_buffer(f"deviations{number}", like.new_zeros(method.rank, *zeros.shape))
        steps_and_iterates = torch.zeros(2, dtype=torch.long, device=like.device)
        self.register_buffer("count", steps_and_iterates)

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the model."""
        return self.trained.loss(x, y)

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        """Return SGD with momentum, or the optimizer of the settings."""
        if settings.optimizer is not None:
            return super().make_optimizer(settings, steps)
        free = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(free, settings.lr, self.method.momentum)

    @property
    def iterates(self) -> int:
        """Return the number of iterates so far."""
        return int(self.count[1])

    def _moments(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first and second moment of a tensor, and its last deviations."""
        return (
            self.get_buffer(f"first{number}"),
            self.get_buffer(f"second{number}"),
            self.get_buffer(f"deviations{number}"),
        )

    @torch.no_grad()
    def after_step(self, numbers: dict[str, Tensor]) -> None:
        """Collect an iterate every so many steps."""
        self.count[0] += 1
        if int(self.count[0]) % self.every:
            return
        k = self.iterates
        self.count[1] += 1
        weights = self.trained.weights()
        for number, name in enumerate(self.names):
            first, second, deviations = self._moments(number)
            w = weights[name]
            first.mul_(k / (k + 1)).add_(w, alpha=1 / (k + 1))
            second.mul_(k / (k + 1)).add_(w.square(), alpha=1 / (k + 1))
            deviations[k % len(deviations)] = w - first

    def mean(self) -> Params:
        """Return w̄."""
        return {name: self.get_buffer(f"first{number}") for number, name in enumerate(self.names)}

    def covariance(self) -> LowRankPlusDiagonal:
        """Return ½·(diag(var) + D·Dᵀ/(K − 1))."""
        tensors = {}
        for number, name in enumerate(self.names):
            first, second, deviations = self._moments(number)
            # the rounding error of a difference of squares
            floor = torch.finfo(first.dtype).eps * (1 + first.square())
            rank = min(self.iterates, len(deviations))
            tensors[f"std.{name}"] = (0.5 * (second - first.square()).clamp_min(floor)).sqrt()
            tensors[f"factor.{name}"] = deviations[:rank] * (0.5 / (rank - 1)) ** 0.5
        shapes = {name: value.shape for name, value in self.mean().items()}
        return LowRankPlusDiagonal(shapes, tensors)


def _has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is batch norm with running statistics."""
    return isinstance(module, _BatchNorm) and module.track_running_stats


@torch.no_grad()
def draw_with_statistics(
    posterior: GaussianPosterior, data: Data, draws: int, seed: int, progress: Show
) -> Empirical:
    """Draw from a posterior, with batch norm statistics of each draw.

    The statistics are cumulative means over the data.

    Args:
        posterior: of a network with batch norm.
        data: all rows.
        draws: their number.
        seed: of the draws.
        progress: whether, or where, to show a line of progress.
    """
    network = Network(posterior.target.net)
    like = next(iter(posterior.center.values()))
    norms = {
        name: module
        for name, module in network.net.named_modules()
        if _has_running_statistics(module)
    }
    network.net.eval()
    for module in norms.values():
        module.train()
        module.momentum = None  # a plain mean over all batches
    tensors: list[Params] = []
    with Progress("batch statistics of the draws", draws, progress) as bar:
        for number in range(draws):
            params = {name: value[0] for name, value in posterior.sample(1, seed, number).items()}
            for module in norms.values():
                module.reset_running_stats()
            for batch in data.epoch():
                network.call(params, *forward_inputs(move(batch, like)[0]))
            buffers = {
                f"{name}.{buffer}": getattr(module, buffer).clone()
                for name, module in norms.items()
                for buffer in ("running_mean", "running_var")
            }
            tensors.append(params | buffers)
            bar.update(number + 1)
    return Empirical(posterior.target, posterior.network, stack(tensors), posterior.history)
