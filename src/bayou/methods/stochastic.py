"""Posteriors from the dropout masks of a trained network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from bayou.core.params import Params
from bayou.inference.data_checks import check_inputs_unchanged, first_inputs
from bayou.inference.method import BatchedMethod, FitArguments, Method
from bayou.inference.start import starting_point
from bayou.methods.point import MAP
from bayou.network import Network, clear_errors, evaluating
from bayou.network.target import Target
from bayou.posteriors.masked import Masked, Masks
from bayou.training.data import Data

Dropout = nn.modules.dropout._DropoutNd
DEFAULT_BATCH_SIZE = 128


@final
@dataclass(frozen=True)
class MCDropout(BatchedMethod[Masked]):
    """MC dropout: units are dropped at random when predicting as when training.

        p(y | x, D) ≈ 1/S Σ_s p(y | f(x; w ∘ mask_s))

    The weights are at one point, and every mask is a draw of q. For a network with dropout:
    modules, calls of ``F.dropout`` and its variants per channel, and the attention of
    ``nn.MultiheadAttention``, which are all on in predictions.

    Args:
        start: the method that trains the network, ``MAP()`` by default; None for the network as it
            is.
        p: one rate for all predictions instead of each layer's own; None by default. Training is
            not changed: set the rate of training in the network.
        strict: whether dropout that is not accessible (inside recurrent layers, or under
            ``if self.training``) is an error; True by default. Otherwise it is off.

    Returns:
        ``fit`` returns a ``Masked`` posterior, whose draws are masks.

    Raises:
        ValueError: for a network without dropout, for a mask that rows cannot share, and for a rate
            out of range.

    >>> import bayou, torch
    >>> layers = torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    >>> net = torch.nn.Sequential(*layers)
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> method = bayou.MCDropout(bayou.MAP(steps=10))
    >>> likelihood = bayou.Gaussian(0.1)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.predict(x, samples=50).epistemic_std.shape
    torch.Size([20, 1])

    Paper: Gal & Ghahramani 2016, https://arxiv.org/abs/1506.02142.
    """

    start: Method | None = field(default_factory=MAP)
    p: float | None = None
    strict: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self._check_start()
        self._check_interval("(0, 1)", "p")

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Return the batch size of the start."""
        return DEFAULT_BATCH_SIZE if self.start is None else self.start.batch_size

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method at the network as it is."""
        return replace(self, start=None)

    def _fit(self, arguments: FitArguments) -> Masked:
        """Train the network, if ``start`` is given, and keep its dropout on."""
        self.check_target(arguments.target, arguments.data)
        point = starting_point(
            self.start,
            arguments.target,
            arguments.data,
            seed=arguments.seed,
            checkpoint=arguments.checkpoint,
            progress=arguments.progress,
        )
        weights = {name: value[0] for name, value in point.stack.items()}
        posterior = Masked(point.target, point.network, weights, point.history, p=self.p)
        posterior.stopped = point.stopped or "finished"
        return posterior

    def check_target(self, target: Target, data: Data) -> None:
        """Raise a ValueError for a network whose dropout cannot make masks."""
        inputs = first_inputs(target, data)
        with clear_errors(inputs):
            self._check_dropout(Network(target.net), target.start(), inputs)

    @torch.no_grad()
    def _check_dropout(self, network: Network, params: Params, inputs: tuple[Any, ...]) -> None:
        """Find every dropout call by a pass, and those whose mask rows cannot share by another."""
        with evaluating(network.net):
            masks = Masks(0, self.p)
            versions = _versions(inputs)
            calling_modules = record_calling_modules(network.net, lambda: len(masks.shapes))
            with calling_modules as reached, masks:
                network.call(params, *inputs)
            check_inputs_unchanged(versions != _versions(inputs))
            self._check_is_reached(network.net, reached, masks)
            masks_of_more_rows = Masks(0, self.p)
            more_rows = [_repeat_first_row(item) for item in inputs]
            with masks_of_more_rows:
                network.call(params, *more_rows)
        shapes = zip(masks.shapes, masks_of_more_rows.shapes, strict=True)
        for number, (shape, shape_of_more) in enumerate(shapes):
            if shape[1:] != shape_of_more[1:]:
                raise ValueError(
                    f"dropout call {number} sees {tuple(shape)} for a batch of {len(inputs[0])} "
                    f"rows and {tuple(shape_of_more)} "
                    "for one more: its first axis is not the rows, so no mask can be shared by "
                    "them; use batch_first=True, or transpose after the dropout"
                )

    def _check_is_reached(self, net: nn.Module, reached: set[int], masks: Masks) -> None:
        """Raise a ValueError unless dropout was called, and if ``strict`` all of it."""
        hidden = describe_unreached(net, reached)
        if not any(masks.rates):
            reason = "calls no dropout in eval mode"
            if masks.rates:
                reason = "has only dropout with a rate of 0"
            raise ValueError(
                f"{type(net).__name__} {reason}{hidden}; put nn.Dropout(p) with "
                "p > 0 before the layers whose inputs are to be dropped, "
                "or train bayou.select.with_dropout(net)"
            )
        if hidden and self.strict:
            raise ValueError(
                f"some dropout of {type(net).__name__} is not accessible{hidden}; "
                "MCDropout(strict=False) turns it off in predictions, or set it to 0"
            )


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    """Return the versions of tensors, which change when they are written to."""
    return [item._version for item in inputs if isinstance(item, Tensor)]


def _repeat_first_row(item: object) -> object:
    """Return a tensor with its first row once more; other inputs as they are."""
    return torch.cat([item, item[:1]]) if isinstance(item, Tensor) else item


@contextmanager
def record_calling_modules(net: nn.Module, calls: Callable[[], int]) -> Iterator[set[int]]:
    """Record the modules, by id, during whose forward pass a count grows.

    Args:
        net: has the modules.
        calls: returns the count.
    """
    module_ids: set[int] = set()
    counts: list[int] = []

    def enter(module: nn.Module, args: object) -> None:
        counts.append(calls())

    def leave(module: nn.Module, args: object, output: object) -> None:
        if calls() > counts.pop():
            module_ids.add(id(module))

    hooks = []
    for module in net.modules():
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield module_ids
    finally:
        for hook in hooks:
            hook.remove()


def describe_unreached(net: nn.Module, reached: set[int]) -> str:
    """Describe the modules with a dropout rate whose dropout was not called.

    Args:
        net: has the modules.
        reached: the ids of those whose dropout was called.

    Returns:
        ': name (type, rate), ...', or an empty string.
    """
    descriptions = []
    for name, module in net.named_modules():
        rates = _dropout_rates(module)
        if rates and id(module) not in reached:
            attribute, rate = next(iter(rates.items()))
            descriptions.append(
                f"{name or 'the network'} ({type(module).__name__}, {attribute}={rate})"
            )
    return f": {', '.join(descriptions)}" if descriptions else ""


def _dropout_rates(module: nn.Module) -> dict[str, float]:
    """Return the attributes of a module that look like a dropout rate."""
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:
        return {}  # its dropout is between layers
    rates = {
        name: value
        for name, value in vars(module).items()
        if "drop" in name and type(value) is float and 0 < value <= 1
    }
    if isinstance(module, Dropout) and module.p > 0:
        rates["p"] = module.p
    return rates
