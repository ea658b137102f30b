"""Posteriors from the randomness of a trained network: dropout masks, and the batch statistics of batch norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.files import StrPath
from bayou.inference.first_batch import check_written, first_inputs
from bayou.inference.method import Method
from bayou.inference.start import starting_point
from bayou.methods.point import MAP
from bayou.network import Network, clear_errors, evaluating, forward_inputs
from bayou.params import Params, stack
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.masked import Masked, Masks
from bayou.posteriors.posterior import NOISE
from bayou.progress import Progress, Show
from bayou.target import Target
from bayou.training.data import Batch, Data, as_data
from bayou.training.guards import Interrupt
from bayou.training.loop import move
from bayou.training.seeds import as_int_seed, part_seed

BatchNorm = nn.modules.batchnorm._BatchNorm
Dropout = nn.modules.dropout._DropoutNd
DEFAULT_BATCH = 128


@final
@dataclass(frozen=True)
class MCDropout(Method):
    """q: the weights at one point, units dropped at random when predicting as when training (Gal & Ghahramani 2016).

    For a network with dropout: modules, or calls of ``F.dropout`` and its variants per channel, which are all on in
    predictions. ``start``: the method that trains it; None for the network as given. ``p``: one rate for all
    predictions instead of each layer's own (training is not changed: set it in the network). ``strict``: dropout
    that is not accessible (inside attention and recurrent layers, or under ``if self.training``) is an error;
    otherwise it is off.
    """

    start: Method | None = field(default_factory=MAP)
    p: float | None = None
    strict: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self._check_start()
        if self.p is not None and (not isinstance(self.p, int | float) or not 0 < self.p < 1):
            raise ValueError(f"MCDropout p must be None or a rate between 0 and 1, got {self.p!r}")

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The batch size of the start."""
        return DEFAULT_BATCH if self.start is None else self.start.batch_size

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, start=None)

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Masked:
        """Train the network, if ``start`` is given, and keep its dropout on."""
        batches = as_data(data, self.batch_size)
        seed = as_int_seed(seed)
        inputs = first_inputs(target, batches)
        with clear_errors(inputs):
            self._look(Network(target.net), target.start(), inputs)
        point = starting_point(self.start, target, batches, seed=seed, checkpoint=checkpoint, progress=progress)
        weights = {name: value[0] for name, value in point.stack.items()}
        posterior = Masked(point.target, point.network, weights, point.history, p=self.p)
        posterior.stopped = point.stopped or "finished"
        return posterior

    @torch.no_grad()
    def _look(self, network: Network, params: Params, inputs: tuple[Any, ...]) -> None:
        """Dry runs that find every dropout call, and calls whose mask cannot be shared by all rows."""
        with evaluating(network.net):
            mode, versions = Masks(0, self.p), [i._version for i in inputs if isinstance(i, Tensor)]
            with watched(network.net, lambda: len(mode.shapes)) as reached, mode:
                network.call(params, *inputs)
            check_written(versions != [i._version for i in inputs if isinstance(i, Tensor)])
            if not any(mode.rates):
                what = "has only dropout with a rate of 0" if mode.rates else "calls no dropout in eval mode"
                raise ValueError(
                    f"{type(network.net).__name__} {what}{unreached(network.net, reached)}; put nn.Dropout(p) with "
                    "p > 0 before the layers whose inputs are to be dropped and train it with them"
                )
            hidden = unreached(network.net, reached)
            if hidden and self.strict:
                raise ValueError(
                    f"some dropout of {type(network.net).__name__} is not accessible{hidden}; MCDropout(strict=False) "
                    "turns it off in predictions, or set it to 0"
                )
            other = Masks(0, self.p)
            with other:
                network.call(params, *(torch.cat([i, i[:1]]) if isinstance(i, Tensor) else i for i in inputs))
        for number, (one, two) in enumerate(zip(mode.shapes, other.shapes, strict=True)):
            if one[1:] != two[1:]:
                raise ValueError(
                    f"dropout call {number} sees {tuple(one)} for a batch of {len(inputs[0])} rows and {tuple(two)} "
                    "for one more: its first axis is not the rows, so no mask can be shared by them; use "
                    "batch_first=True, or transpose after the dropout"
                )


@contextmanager
def watched(net: nn.Module, calls: Callable[[], int]) -> Iterator[set[int]]:
    """The modules, by id, during whose forward pass ``calls`` grew."""
    found: set[int] = set()
    before: list[int] = []

    def enter(module: nn.Module, args: Any) -> None:
        before.append(calls())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if calls() > before.pop():
            found.add(id(module))

    hooks = [
        hook for m in net.modules() for hook in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def unreached(net: nn.Module, reached: set[int]) -> str:
    """Modules with a dropout rate whose dropout was not called, as ': name, ...', or an empty string."""
    found = []
    for name, module in net.named_modules():
        rates = {key: v for key, v in vars(module).items() if "drop" in key and type(v) is float and 0 < v <= 1}
        if isinstance(module, Dropout) and module.p > 0:
            rates["p"] = module.p
        if isinstance(module, nn.RNNBase) and module.num_layers == 1:
            rates = {}  # its dropout is between layers
        if rates and id(module) not in reached:
            found.append(
                f"{name or 'the network'} ({type(module).__name__}, {next(iter(rates))}={next(iter(rates.values()))})"
            )
    return f": {', '.join(found)}" if found else ""


@final
@dataclass(frozen=True)
class MCBatchNorm(Method):
    """q: the weights at one point, batch norm with the statistics of random training batches (Teye et al. 2018).

    A draw is the mean and the (biased) variance of every batch norm layer for one random batch of training data in
    training mode; predictions use them as running statistics. ``draws`` of them are kept, with one copy of the
    weights. Dropout is off in these passes, so that only the batch is random.

    ``start``: the method that trains the network; None for the network as given. ``batch_size``: that of ``start`` by
    default (128 without one); the theory assumes the batch size of the training.
    """

    start: Method | None = field(default_factory=MAP)
    draws: int = 50
    batch_size: int = None  # type: ignore[assignment]  # None becomes the start's

    def __post_init__(self) -> None:
        self._check_start()
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", DEFAULT_BATCH if self.start is None else self.start.batch_size)
        self._check_whole("draws")
        self._check_whole("batch_size", least=2)

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, start=None)

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Empirical:
        """Train the network, if ``start`` is given, and collect the statistics of random batches."""
        seed = as_int_seed(seed)
        batches = as_data(data, self.batch_size)
        layers = batch_norms(target.net)
        if batches.batches == 1:
            raise ValueError(
                f"a batch of {self.batch_size} is all of the {batches.n} rows, so every draw would be the same; choose "
                "a smaller batch_size"
            )
        point = starting_point(self.start, target, batches, seed=seed, checkpoint=checkpoint, progress=progress)
        if point.stopped == "interrupted":
            return point
        weights = {name: value[0] for name, value in point.stack.items() if not name.startswith(NOISE)}
        found: list[Params] = []
        stopped = "finished"
        with Progress("MCBatchNorm", self.draws, progress) as line, Interrupt() as interrupt:
            try:
                for batch in random_batches(batches, self.draws, part_seed(seed, "batch norm")):
                    with interrupt.held():
                        found.append(batch_statistics(point.network, weights, layers, batch))
                    line.update(len(found))
            except KeyboardInterrupt:
                if not found:
                    raise
                stopped = "interrupted"
        shared = {name: value.expand(len(found), *value.shape[1:]) for name, value in point.stack.items()}
        posterior = Empirical(point.target, point.network, shared | stack(found), point.history)
        posterior.stopped = stopped
        return posterior


def batch_norms(net: nn.Module) -> list[str]:
    """The names of the batch norm layers; a ValueError if there are none, or one has no running statistics."""
    layers = {name: module for name, module in net.named_modules() if isinstance(module, BatchNorm)}
    if not layers:
        raise ValueError(
            f"{type(net).__name__} has no batch norm layer, whose statistics MCBatchNorm draws; use another method"
        )
    for name, module in layers.items():
        if module.running_mean is None:
            raise ValueError(
                f"{name!r} has track_running_stats=False: it normalizes by the predicted batch, and cannot use "
                "the statistics of another; build it with track_running_stats=True"
            )
    return list(layers)


def random_batches(data: Data, count: int, seed: int) -> Iterator[Batch]:
    """Batches of full size from as many shuffled epochs as needed: each is a uniform random subset."""
    epoch = given = 0
    size = 0
    while given < count:
        for batch in data.epoch(part_seed(seed, "epoch", epoch)):
            size = size or len(batch[1])
            if given < count and len(batch[1]) == size:
                given += 1
                yield batch
        epoch += 1


@torch.no_grad()
def batch_statistics(network: Network, weights: Params, layers: list[str], batch: Batch) -> Params:
    """The statistics of each layer for one batch: NAME.running_mean and NAME.running_var, (C,) each."""
    like = next(iter(weights.values()))
    found: Params = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x: Tensor = inputs[0]
            if f"{name}.running_mean" in found:
                raise ValueError(
                    f"{name!r} is called twice in a pass; use a layer for each call, with its own statistics"
                )
            axes = [axis for axis in range(x.ndim) if axis != 1]
            var, mean = torch.var_mean(x, axes, correction=0)
            found.update({f"{name}.running_mean": mean, f"{name}.running_var": var})

        return hook

    net = network.net
    # The passes update running statistics: those of copies, so that the network is not changed.
    buffers = {name: value.clone() for name, value in network.buffers().items()}
    x, _ = move(batch, like)
    with evaluating(net):
        modules = {name: net.get_submodule(name) for name in layers}
        hooks = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
        try:
            for module in modules.values():
                module.training = True
            with clear_errors(x):
                network.call(buffers | weights, *forward_inputs(x))
        finally:
            for hook in hooks:
                hook.remove()
    return found
