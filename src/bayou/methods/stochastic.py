"""Posteriors from the dropout masks of a trained network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.inference.data_checks import check_inputs_unchanged, first_inputs
from bayou.inference.method import Method
from bayou.inference.start import starting_point
from bayou.methods.point import MAP
from bayou.network import Network, clear_errors, evaluating
from bayou.posteriors.masked import Masked, Masks
from bayou.target import Target
from bayou.training.data import Data, as_data
from bayou.training.seeds import as_int_seed

Dropout = nn.modules.dropout._DropoutNd
DEFAULT_BATCH = 128


@final
@dataclass(frozen=True)
class MCDropout(Method):
    """q: the weights at one point, units dropped at random when predicting as when training (Gal &
    Ghahramani 2016).

    For a network with dropout: modules, calls of ``F.dropout`` and its variants per channel, and
    the attention of ``nn.MultiheadAttention``, which are all on in predictions. ``start``: the
    method that trains it; None for the
    network as given. ``p``: one rate for all predictions instead of each layer's own (training is
    not changed: set it in the network). ``strict``: dropout that is not accessible (inside
    recurrent layers, or under ``if self.training``) is an error; otherwise it is off.
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
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Masked:
        """Train the network, if ``start`` is given, and keep its dropout on."""
        batches = as_data(data, self.batch_size)
        seed = as_int_seed(seed)
        self.check_target(target, batches)
        point = starting_point(
            self.start, target, batches, seed=seed, checkpoint=checkpoint, progress=progress
        )
        weights = {name: value[0] for name, value in point.stack.items()}
        posterior = Masked(point.target, point.network, weights, point.history, p=self.p)
        posterior.stopped = point.stopped or "finished"
        return posterior

    def check_target(self, target: Target, data: Data) -> None:
        inputs = first_inputs(target, data)
        with clear_errors(inputs):
            self._look(Network(target.net), target.start(), inputs)

    @torch.no_grad()
    def _look(self, network: Network, params: Params, inputs: tuple[Any, ...]) -> None:
        """Dry runs that find every dropout call, and calls whose mask cannot be shared by all
        rows.
        """
        with evaluating(network.net):
            mode, versions = Masks(0, self.p), [i._version for i in inputs if isinstance(i, Tensor)]
            with watched(network.net, lambda: len(mode.shapes)) as reached, mode:
                network.call(params, *inputs)
            check_inputs_unchanged(
                versions != [i._version for i in inputs if isinstance(i, Tensor)]
            )
            if not any(mode.rates):
                what = (
                    "has only dropout with a rate of 0"
                    if mode.rates
                    else "calls no dropout in eval mode"
                )
                raise ValueError(
                    f"{type(network.net).__name__} {what}{unreached(network.net, reached)}; put nn.Dropout(p) with "
                    "p > 0 before the layers whose inputs are to be dropped, or train bayou.select.with_dropout(net)"
                )
            hidden = unreached(network.net, reached)
            if hidden and self.strict:
                raise ValueError(
                    f"some dropout of {type(network.net).__name__} is not accessible{hidden}; MCDropout(strict=False) "
                    "turns it off in predictions, or set it to 0"
                )
            other = Masks(0, self.p)
            with other:
                network.call(
                    params, *(torch.cat([i, i[:1]]) if isinstance(i, Tensor) else i for i in inputs)
                )
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
        hook
        for m in net.modules()
        for hook in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def unreached(net: nn.Module, reached: set[int]) -> str:
    """Modules with a dropout rate whose dropout was not called, as ': name, ...', or an empty
    string.
    """
    found = []
    for name, module in net.named_modules():
        rates = {
            key: v
            for key, v in vars(module).items()
            if "drop" in key and type(v) is float and 0 < v <= 1
        }
        if isinstance(module, Dropout) and module.p > 0:
            rates["p"] = module.p
        if isinstance(module, nn.RNNBase) and module.num_layers == 1:
            rates = {}  # its dropout is between layers
        if rates and id(module) not in reached:
            found.append(
                f"{name or 'the network'} ({type(module).__name__}, {next(iter(rates))}={next(iter(rates.values()))})"
            )
    return f": {', '.join(found)}" if found else ""
