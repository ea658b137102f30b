"""One pass over the data: the input of each layer and the gradient at its output, a few examples at
a time.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature.information import CurvatureType, information
from bayou.curvature.layers import Layer, layer_of, supported
from bayou.likelihoods import BoundLikelihood
from bayou.network import Call, PlainAttention, VmapOrLoop, Watch, check_tensor, close, rows_of

Network = Callable[..., Tensor]  # (params, *inputs) -> (B, *out)
BUDGET = (
    2**22,
    2**27,
)  # numbers held at a time beside the activations: on a CPU, and on devices other than GPUs of CUDA
TRIED = 3  # rows that the dry run is made with


@dataclass
class Plan:
    """How the gradients of each tensor are computed, from one dry run.

    ``wanted``: the tensors of the curvature. ``layers``: for tensors that the network uses once, in
    a call with a
    ``Layer``. ``other``: all other tensors (used twice, sliced, recurrent), with gradients example
    by example.
    ``single``: examples must be passed one by one, since the dry run had only one distinct row.
    ``numbers``: per example, in memory in addition to the activations. ``outputs``: of the network,
    for one example.
    """

    wanted: list[str]
    layers: dict[str, Layer]
    other: list[str]
    single: bool
    numbers: int
    outputs: int
    copied: set[Layer] = field(default_factory=set)  # their input is modified in place later
    loop: bool = False  # the network does not support vmap


class Sink(ABC):
    """Receives the results of a sweep."""

    def seen(self, layer: Layer, a: Tensor) -> Tensor | None:
        """The input of a layer, once; the return value is passed with every gradient."""
        return a

    @abstractmethod
    def graded(self, layer: Layer, a: Tensor | None, g: Tensor) -> None:
        """The gradient at the output of a layer, for one column of H."""

    @abstractmethod
    def others(self, gradients: Params) -> None:
        """The gradients of tensors without a layer, (rows, *shape) each, for one column of H."""

    def column(self) -> None:  # noqa: B027 (optional)
        """Called after all gradients of one column."""


class Kept(TorchFunctionMode):
    """Inside, a graph keeps its tensors where a network would recompute them by gradient
    checkpointing.

    Unless it is ``second_order``, it keeps detached tensors: a graph that keeps those of itself is
    never freed.
    """

    def __init__(self, second_order: bool = False) -> None:
        super().__init__()
        self.second_order = second_order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with saved_tensors_hooks(lambda t: t if self.second_order else t.detach(), lambda t: t):
            return func(*args, **(kwargs or {}))


class Probe(TorchFunctionMode):
    """Tells a sink the input of every planned layer, and the gradients that reach its output."""

    def __init__(self, plan: Plan, params: Params, rows: int, sink: Sink) -> None:
        super().__init__()
        self.plan, self.rows, self.sink = plan, rows, sink
        self.layers = {id(params[name]): layer for name, layer in plan.layers.items()}
        self.roots: list[
            Tensor
        ] = []  # zeros at which a graph begins; the weights themselves need no gradient

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in Call.ARGUMENTS:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        layer = self.layers.get(id(call.weight)) or self.layers.get(id(call.bias))
        if layer is None:
            return func(*args, **kwargs)
        with torch.no_grad():
            a = layer.inputs(call, self.rows)
            a = a.clone() if layer in self.plan.copied else a
            kept = self.sink.seen(layer, a)
        if not torch.is_grad_enabled():
            raise ValueError(
                f"the network uses {next(iter(layer.shapes))!r} without gradients, so it has no "
                "curvature; remove torch.no_grad(), or call torch.utils.checkpoint with use_reentrant=False"
            )
        out: Tensor = func(*args, **kwargs)
        if not out.requires_grad:
            self.roots.append(
                torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
            )
            out = out + self.roots[-1]
        # A hook, not a reference to the output: an activation in place may overwrite it.
        out.register_hook(lambda g: self.sink.graded(layer, kept, layer.outputs(g, self.rows)))
        return out


@torch.no_grad()
def make_plan(
    network: Network, params: Params, names: Iterable[str] | None, inputs: tuple[Any, ...]
) -> Plan:
    """The plan for a network, from a dry run on a few rows. ``names``: the tensors; None for those
    of the last layer.

    The rows are also passed in rolled order, to verify which axis of each layer counts the
    examples.
    """
    device = next(iter(params.values())).device
    index = _distinct(inputs)
    rolled = index.roll(1)
    few, other_few = rows_of(inputs, index), rows_of(inputs, rolled)
    with rng.isolated(0, device), Watch(params, supported, copies=True) as first:
        f = network(params, *few)
    with rng.isolated(1, device), Watch(params, supported, copies=True) as second:
        g = network(params, *other_few)
    single = len(index) == 1
    _check_rows(network, params, few, f, g)
    wanted = set(first.last if names is None else names)
    unused = sorted(wanted - set(first.uses) - first.other)
    if unused:
        raise ValueError(
            f"{', '.join(map(repr, unused))} is never used by the network in eval mode, so it has no curvature; "
            " leave it out of `where`, or freeze it with requires_grad_(False)"
        )
    plan = Plan([name for name in params if name in wanted], {}, [], single, 0, f[0].numel())
    alike = len(first.calls) == len(second.calls)
    for number, (call, weight, bias) in enumerate(first.calls):
        whole = [
            name if name in wanted and first.uses[name] == 1 and name not in first.other else None
            for name in (weight, bias)
        ]
        before, after = first.copies[number]
        axis = rows_axis(before, second.copies[number][0], len(index)) if alike else None
        if axis is None or not any(whole) or (axis and call.func is not torch.nn.functional.linear):
            continue
        call.given["input"] = before
        layer = layer_of(call, whole[0], whole[1], axis)
        plan.layers |= dict.fromkeys(layer.shapes, layer)
        plan.numbers += layer.numbers(call, len(index))
        if not torch.equal(before, after):
            plan.copied.add(layer)
    plan.other = sorted(wanted - set(plan.layers))
    plan.numbers += 2 * sum(
        params[name].numel() for name in plan.other
    )  # a copy for each example, and its gradient
    return plan


def rows_axis(x: Tensor, rolled: Tensor, rows: int) -> int | None:
    """The axis of x that counts the examples, from its values for rolled examples; None if there is
    none.
    """
    if rows == 1:
        return 0
    if x.shape != rolled.shape or x.ndim == 0:
        return None
    if len(x) % rows == 0 and close(x.reshape(rows, -1).roll(1, 0), rolled.reshape(rows, -1)):
        return 0
    axes = (
        axis
        for axis in range(1, x.ndim - 1)
        if x.shape[axis] == rows and close(x.roll(1, axis), rolled)
    )
    return next(axes, None)


class Quiet:
    """Suppresses two warnings of torch: that forward mode loads torch.jit, and that vmap uses a
    slow fallback.

    Warning filters are shared by all threads: the first thread sets them, the last one restores
    them.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._filters = threading.Lock(), 0, warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._filters.__exit__(None, None, None)


QUIET = Quiet()


def _distinct(inputs: tuple[Any, ...]) -> Tensor:
    """The indices of a few rows that differ from one another."""
    tensors = [
        item.flatten(1) if item.ndim > 1 else item.unsqueeze(1)
        for item in inputs
        if isinstance(item, Tensor)
    ]
    chosen = [0]
    for row in range(1, len(tensors[0])):
        if len(chosen) == TRIED:
            break
        if all(any(not torch.equal(t[row], t[old]) for t in tensors) for old in chosen):
            chosen.append(row)
    return torch.tensor(chosen, device=tensors[0].device)


def _check_rows(
    network: Network, params: Params, few: tuple[Any, ...], f: Tensor, rolled: Tensor
) -> None:
    """Raise a ValueError for a network that draws random numbers, or whose examples depend on each
    other.
    """
    check_tensor(f)
    if not bool(f.isfinite().all()):
        raise FloatingPointError(
            "the outputs of the network are not finite; check its weights and the data"
        )
    device = next(iter(params.values())).device
    with rng.isolated(1, device):
        again = network(params, *few)
    if not close(f, again):
        raise ValueError(
            "the network draws random numbers in eval mode, so it has no curvature; switch its noise off (F.dropout "
            "needs training=self.training)"
        )
    fewer = max(1, len(f) - 1)
    try:
        alone = network(params, *rows_of(few, slice(0, fewer)))
    except ValueError:  # batch norm in training mode cannot take a single row
        alone = torch.full_like(f[:fewer], torch.nan)
    if not close(f[:fewer], alone) or not close(f.roll(1, 0), rolled):
        raise ValueError(
            "the output for an example depends on the other rows of its batch (batch norm without running statistics, "
            "dynamic quantization), so the curvature is not a sum over examples; use track_running_stats=True, another "
            "norm, or static quantization"
        )


class Sweep:
    """Sends batches through a network and their gradients, for every column of H, to a sink."""

    def __init__(
        self,
        network: Network,
        params: Params,
        plan: Plan,
        likelihood: BoundLikelihood,
        kind: CurvatureType = "ggn",
        samples: int = 1,
        seed: rng.Seed = None,
    ) -> None:
        self.network, self.plan, self.likelihood = network, plan, likelihood
        self.params = {name: value.detach() for name, value in params.items()}
        self.kind, self.samples, self.seed = kind, samples, seed
        device = next(iter(self.params.values())).device
        # a sixteenth of the memory of a GPU, as floats: there the number of calls is the cost
        budget = (
            torch.cuda.mem_get_info(device)[1] // 64
            if device.type == "cuda"
            else BUDGET[device.type != "cpu"]
        )
        self.rows = 1 if plan.single else max(1, budget // max(1, plan.numbers))

    def batch(
        self, inputs: tuple[Any, ...], y: Tensor, number: int, sink: Sink
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One batch, a few rows at a time: their outputs and y. ``number`` seeds the labels that
        are drawn for it.
        """
        for first in range(0, len(y), self.rows):
            part, seed = (
                slice(first, first + self.rows),
                rng.fold(self.seed, "batch", number, first),
            )
            yield self._rows(rows_of(inputs, part), y[part], seed, sink), y[part]

    def _rows(self, inputs: tuple[Any, ...], y: Tensor, seed: rng.Seed, sink: Sink) -> Tensor:
        with torch.enable_grad(), Kept(), Probe(self.plan, self.params, len(y), sink) as probe:
            f = self.network(self.params, *inputs)
        each, own = self._apart(inputs, len(y)) if self.plan.other else (f, {})
        for s in information(self.likelihood, f, y, self.kind, self.samples, seed).columns():
            if probe.roots:
                torch.autograd.grad(f, probe.roots, s, retain_graph=True, allow_unused=True)
            if own:
                found = torch.autograd.grad(
                    each, list(own.values()), s, retain_graph=True, materialize_grads=True
                )
                sink.others(dict(zip(own, found, strict=True)))
            sink.column()
        return f.detach()

    def _apart(self, inputs: tuple[Any, ...], rows: int) -> tuple[Tensor, Params]:
        """The outputs, with tensors without a layer that every example has for itself: (rows,
        *shape) each.
        """
        own = {
            name: w.expand(rows, *w.shape).clone()
            for name, w in self.params.items()
            if name in self.plan.other
        }
        tensors = [i for i, item in enumerate(inputs) if isinstance(item, Tensor)]

        def one(own: Params, *row: Tensor) -> Tensor:
            given = dict(enumerate(inputs)) | {
                i: item.unsqueeze(0) for i, item in zip(tensors, row, strict=True)
            }
            return self.network(self.params | own, *given.values()).squeeze(0)

        each = VmapOrLoop(one, (0, *[0] * len(tensors)), loop=self.plan.loop)
        with torch.enable_grad(), Kept(), QUIET, PlainAttention():
            f: Tensor = each(
                {n: w.requires_grad_() for n, w in own.items()}, *[inputs[i] for i in tensors]
            )
        self.plan.loop = each.loop
        return f, own
