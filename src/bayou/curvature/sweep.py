"""One pass over the data: the input of each layer and the gradient at its output."""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bayou.core import rng
from bayou.core.interception import Intercept
from bayou.core.params import Params
from bayou.curvature.information import CurvatureType, information
from bayou.curvature.layers import AffineCall, LayerCall, is_supported, layer_of
from bayou.likelihoods import BoundLikelihood
from bayou.network import Call, PlainAttention, VmapOrLoop, Watch, check_tensor, close, rows_of

Network = Callable[..., Tensor]  # (params, *inputs) -> (B, *out)
Shapes = Mapping[str, torch.Size]
# numbers in memory in addition to the activations: on a CPU, and on devices other than CUDA GPUs
BUDGET = (2**22, 2**27)
DRY_RUN_ROWS = 3  # distinct rows that the dry run is made with


@dataclass
class Plan:
    """How the gradients of each tensor are computed, from one dry run.

    Args:
        wanted: the tensors of the curvature.
        layers: of tensors that the network uses once, in a call that has a ``LayerCall``.
        other: all other tensors (used twice, sliced, recurrent), with gradients by example.
        single: whether examples must be passed one by one, since the dry run had only one distinct
            row.
        numbers: per example, in memory in addition to the activations.
        outputs: of the network, for one example.
        copied: layers whose input is modified in place later.
        loop: whether the network does not support vmap.
    """

    wanted: list[str]
    layers: dict[str, LayerCall]
    other: list[str]
    single: bool
    numbers: int
    outputs: int
    copied: set[LayerCall] = field(default_factory=set)
    loop: bool = False


class Sum(ABC):
    """The sum C over a sweep of the data.

    Args:
        shapes: of the named tensors.
        plan: how their gradients are computed.
        like: a tensor of the network.
    """

    def __init__(self, shapes: Shapes, plan: Plan, like: Tensor) -> None:
        self.shapes: dict[str, torch.Size] = dict(shapes)
        self.plan = plan
        self.like = like

    def receive_input(self, layer: LayerCall, a: Tensor) -> Tensor:
        """Receive the input of a layer, once; what is returned comes with every gradient.

        Args:
            layer: the layer.
            a: its input.
        """
        return a

    @abstractmethod
    def receive_gradient(self, layer: LayerCall, a: Tensor, g: Tensor) -> None:
        """Receive the gradient at the output of a layer, for one column of H.

        Args:
            layer: the layer.
            a: what ``receive_input`` returned.
            g: the gradient.
        """

    @abstractmethod
    def receive_row_gradients(self, gradients: Params) -> None:
        """Receive the gradients of tensors without a layer, for one column of H.

        Args:
            gradients: (rows, *shape) each.
        """

    def receive_information(self, layer: LayerCall, total: Tensor) -> bool:
        """Receive Σ_n H_n of a layer whose outputs are those of the network, and no other layer.

        Args:
            layer: the layer, the only one of the plan, with one position for each example.
            total: Σ_n H_n, (K, K).

        Returns:
            Whether the gradients are not needed: for a sum of g·gᵀ this is all.
        """
        return False

    def finish_column(self) -> None:  # noqa: B027 (optional)
        """Finish a column of H, after all its gradients."""

    @abstractmethod
    def tensors(self, factor: float = 1.0) -> Params:
        """Return the tensors of a ``Curvature``.

        Args:
            factor: multiplies C (all rows / rows of the sweep); 1 by default.
        """

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in float64, for the accuracy of a long sum.

        Args:
            shape: of the tensor.
        """
        return torch.zeros(shape, dtype=torch.float64, device=self.like.device)


def keep_activations(second_order: bool = False) -> Intercept:
    """Return a block in which a graph keeps what gradient checkpointing would recompute.

    Args:
        second_order: whether the graph itself has gradients; False by default. Otherwise detached
            tensors are kept: a graph that keeps those of itself is never freed.
    """

    def call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with saved_tensors_hooks(lambda t: t if second_order else t.detach(), lambda t: t):
            return func(*args, **kwargs)

    return Intercept(call)


class LayerProbe:
    """Passes the inputs and output gradients of every planned layer to a sum.

    Args:
        plan: has the layers.
        params: the tensors of the network.
        rows: the number of examples.
        sums: receives the results.
    """

    def __init__(self, plan: Plan, params: Params, rows: int, sums: Sum) -> None:
        self.plan = plan
        self.rows = rows
        self.sums = sums
        self.layers: dict[int, LayerCall] = {
            id(params[name]): layer for name, layer in plan.layers.items()
        }
        # zeros at which a graph begins; the weights themselves need no gradient
        self.roots: list[Tensor] = []
        self.last_layer: LayerCall | None = None
        # the output of the last layer, and the number of changes in place; a graph with a hook that
        # refers to itself would never be freed
        self.last_output: weakref.ref[Tensor] | None = None
        self.last_version: int = 0

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operation of torch, and pass what is known of a layer to the sum.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        if func not in Call.ARGUMENTS:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        layer = self.layers.get(id(call.weight)) or self.layers.get(id(call.bias))
        if layer is None:
            return func(*args, **kwargs)
        with torch.no_grad():
            a = layer.inputs(call, self.rows)
            a = a.clone() if layer in self.plan.copied else a
            kept_input = self.sums.receive_input(layer, a)
        if not torch.is_grad_enabled():
            raise ValueError(
                f"the network uses {next(iter(layer.shapes))!r} without gradients, so it has no "
                "curvature; remove torch.no_grad(), "
                "or call torch.utils.checkpoint with use_reentrant=False"
            )
        out: Tensor = func(*args, **kwargs)
        if not out.requires_grad:
            root = torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
            self.roots.append(root)
            out = out + root

        def pass_gradient(g: Tensor) -> None:
            self.sums.receive_gradient(layer, kept_input, layer.outputs(g, self.rows))

        # A hook, not a reference to the output: an activation in place may overwrite it.
        out.register_hook(pass_gradient)
        self.last_layer = layer
        self.last_output = weakref.ref(out)
        self.last_version = out._version
        return out

    def output_layer(self, f: Tensor) -> LayerCall | None:
        """Return the layer whose outputs are those of the network, if it is the only one planned.

        Args:
            f: the outputs of the network.
        """
        layer = self.last_layer
        is_alone = set(self.plan.layers.values()) == {layer} and not self.plan.other
        output = None if self.last_output is None else self.last_output()
        is_output = f is output and f._version == self.last_version
        is_of_rows = f.ndim == 2 and len(f) == self.rows
        if is_alone and is_output and is_of_rows and isinstance(layer, AffineCall):
            return layer
        return None


@torch.no_grad()
def make_plan(
    network: Network, params: Params, names: Iterable[str] | None, inputs: tuple[Any, ...]
) -> Plan:
    """Plan the gradients for a network, from a dry run on a few rows.

    The rows are also passed in rolled order, to verify which axis of each layer counts the
    examples.

    Args:
        network: (params, *inputs) to outputs.
        params: the tensors of the network.
        names: the tensors of the curvature; None for those of the last layer.
        inputs: of the network, a batch.

    Raises:
        ValueError: for a tensor that the network does not use, or examples that are not
            independent.
    """
    device = next(iter(params.values())).device
    index = _distinct_rows(inputs)
    few_inputs = rows_of(inputs, index)
    rolled_inputs = rows_of(inputs, index.roll(1))
    with rng.isolated(0, device), Watch(params, is_supported, copies=True) as first:
        f = network(params, *few_inputs)
    with rng.isolated(1, device), Watch(params, is_supported, copies=True) as second:
        rolled_f = network(params, *rolled_inputs)
    has_one_row = len(index) == 1
    _check_rows(network, params, few_inputs, f, rolled_f)
    wanted = set(first.last if names is None else names)
    unused = sorted(wanted - set(first.uses) - first.other)
    if unused:
        raise ValueError(
            f"{', '.join(map(repr, unused))} is never used by the network in eval mode, so it has "
            "no curvature;  leave it out of `where`, or freeze it with requires_grad_(False)"
        )
    plan = Plan([name for name in params if name in wanted], {}, [], has_one_row, 0, f[0].numel())
    have_same_calls = len(first.calls) == len(second.calls)
    used_once = {
        name for name in wanted - first.other if name in first.uses and first.uses[name] == 1
    }
    for number, (call, weight, bias) in enumerate(first.calls):
        weight_name = weight if weight in used_once else None
        bias_name = bias if bias in used_once else None
        if not have_same_calls or not (weight_name or bias_name):
            continue
        before, after = first.copies[number]
        axis = rows_axis(before, second.copies[number][0], len(index))
        if axis is None or (axis and call.func is not torch.nn.functional.linear):
            continue
        call.given["input"] = before
        layer = layer_of(call, weight_name, bias_name, axis)
        plan.layers |= dict.fromkeys(layer.shapes, layer)
        plan.numbers += layer.numbers(call, len(index))
        if not torch.equal(before, after):
            plan.copied.add(layer)
    plan.other = sorted(wanted - set(plan.layers))
    # a copy for each example, and its gradient
    plan.numbers += 2 * sum(params[name].numel() for name in plan.other)
    return plan


def rows_axis(x: Tensor, rolled: Tensor, rows: int) -> int | None:
    """Return the axis of x that counts the examples; None if there is none.

    Args:
        x: a tensor in the network.
        rolled: the same for rolled examples.
        rows: the number of examples.
    """
    if rows == 1:
        return 0
    if x.shape != rolled.shape or x.ndim == 0:
        return None
    if len(x) % rows == 0 and close(x.reshape(rows, -1).roll(1, 0), rolled.reshape(rows, -1)):
        return 0
    for axis in range(1, x.ndim - 1):
        if x.shape[axis] == rows and close(x.roll(1, axis), rolled):
            return axis
    return None


class SuppressedWarnings:
    """A block without two warnings of torch.

    They say that forward mode loads torch.jit, and that vmap uses a slow fallback. Warning filters
    are shared by all threads: the first thread sets them, the last one restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self._filters.__exit__(None, None, None)


QUIET = SuppressedWarnings()


def _distinct_rows(inputs: tuple[Any, ...]) -> Tensor:
    """Return the indices of a few rows that differ from one another."""
    tensors = [
        item.flatten(1) if item.ndim > 1 else item.unsqueeze(1)
        for item in inputs
        if isinstance(item, Tensor)
    ]
    index = [0]
    for row in range(1, len(tensors[0])):
        if len(index) == DRY_RUN_ROWS:
            break
        if all(any(not torch.equal(t[row], t[old]) for t in tensors) for old in index):
            index.append(row)
    return torch.tensor(index, device=tensors[0].device)


def _check_rows(
    network: Network, params: Params, inputs: tuple[Any, ...], f: Tensor, rolled: Tensor
) -> None:
    """Raise a ValueError for a random network, or one whose examples depend on each other."""
    check_tensor(f)
    if not bool(f.isfinite().all()):
        raise FloatingPointError(
            "the outputs of the network are not finite; check its weights and the data"
        )
    device = next(iter(params.values())).device
    with rng.isolated(1, device):
        repeated_f = network(params, *inputs)
    if not close(f, repeated_f):
        raise ValueError(
            "the network draws random numbers in eval mode, so it has no curvature; "
            "switch its noise off (F.dropout needs training=self.training)"
        )
    rows = max(1, len(f) - 1)
    try:
        f_of_fewer = network(params, *rows_of(inputs, slice(0, rows)))
    except ValueError:  # batch norm in training mode cannot take a single row
        f_of_fewer = torch.full_like(f[:rows], torch.nan)
    if not close(f[:rows], f_of_fewer) or not close(f.roll(1, 0), rolled):
        raise ValueError(
            "the output for an example depends on the other rows of its batch (batch norm without "
            "running statistics, dynamic quantization), so the curvature is not a sum over "
            "examples; use track_running_stats=True, another norm, or static quantization"
        )


def _memory_budget(device: torch.device) -> int:
    """Return how many numbers may be in memory in addition to the activations.

    On a GPU it is a sixteenth of the memory, as floats: there the number of calls is the cost.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] // 64
    return BUDGET[device.type != "cpu"]


class Sweep:
    """A pass of batches through a network, and of their gradients for every column of H.

    Args:
        network: (params, *inputs) to outputs.
        params: the tensors of the network.
        plan: how the gradients are computed.
        likelihood: p(y | f).
        kind: of H, "ggn" by default.
        samples: labels drawn for each row, if "sampled"; 1 by default.
        seed: of these labels.
    """

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
        self.network = network
        self.plan = plan
        self.likelihood = likelihood
        self.params: dict[str, Tensor] = {name: value.detach() for name, value in params.items()}
        self.kind = kind
        self.samples = samples
        self.seed = seed
        device = next(iter(self.params.values())).device
        self.rows: int = 1
        if not plan.single:
            self.rows = max(1, _memory_budget(device) // max(1, plan.numbers))

    def batch(
        self, inputs: tuple[Any, ...], y: Tensor, number: int, sums: Sum
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield outputs and y of one batch, a few rows at a time.

        Args:
            inputs: of the network.
            y: targets.
            number: of the batch, for the labels that are drawn.
            sums: receives the results.
        """
        for first in range(0, len(y), self.rows):
            rows = slice(first, first + self.rows)
            seed = rng.fold(self.seed, "batch", number, first)
            yield self._pass_rows(rows_of(inputs, rows), y[rows], seed, sums), y[rows]

    def _pass_rows(self, inputs: tuple[Any, ...], y: Tensor, seed: rng.Seed, sums: Sum) -> Tensor:
        """Pass some rows forward, and every column of H backward; return the outputs."""
        probe = LayerProbe(self.plan, self.params, len(y), sums)
        with torch.enable_grad(), keep_activations(), Intercept(probe.call):
            f = self.network(self.params, *inputs)
        row_f = f
        row_params: Params = {}
        if self.plan.other:
            row_f, row_params = self._call_by_row(inputs, len(y))
        h = information(self.likelihood, f, y, self.kind, self.samples, seed)
        layer = probe.output_layer(f)
        total = None if layer is None else h.total()
        if layer is not None and total is not None and sums.receive_information(layer, total):
            return f.detach()
        for column in h.columns():
            if probe.roots:
                torch.autograd.grad(f, probe.roots, column, retain_graph=True, allow_unused=True)
            if row_params:
                gradients = torch.autograd.grad(
                    row_f,
                    list(row_params.values()),
                    column,
                    retain_graph=True,
                    materialize_grads=True,
                )
                sums.receive_row_gradients(dict(zip(row_params, gradients, strict=True)))
            sums.finish_column()
        return f.detach()

    def _call_by_row(self, inputs: tuple[Any, ...], rows: int) -> tuple[Tensor, Params]:
        """Return the outputs, with a copy of tensors without a layer for each row."""
        row_params = {
            name: w.expand(rows, *w.shape).clone()
            for name, w in self.params.items()
            if name in self.plan.other
        }
        indices = [i for i, item in enumerate(inputs) if isinstance(item, Tensor)]

        def call_row(params: Params, *row: Tensor) -> Tensor:
            batches = {i: item.unsqueeze(0) for i, item in zip(indices, row, strict=True)}
            row_inputs = dict(enumerate(inputs)) | batches
            return self.network(self.params | params, *row_inputs.values()).squeeze(0)

        mapping = VmapOrLoop(call_row, (0, *[0] * len(indices)), loop=self.plan.loop)
        with torch.enable_grad(), keep_activations(), QUIET, PlainAttention():
            leaves = {name: w.requires_grad_() for name, w in row_params.items()}
            f: Tensor = mapping(leaves, *[inputs[i] for i in indices])
        self.plan.loop = mapping.loop
        return f, row_params
