"""CUDA graphs: a training step, or the gradient of chains, in one launch on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bayou.training.guards import FiniteCheck
from bayou.training.inputs import Inputs, Keywords, forward_inputs

# Calls before the graph is recorded, which compile, allocate and initialize the optimizer's state.
WARMUP_CALLS = 3
MAX_CACHED_RUNS = 32  # runs whose compiled steps are cached
NEVER_RECORD = -(1 << 62)  # a number of calls that does not reach the warm-up
_code_numbers = itertools.count()
Loss = Callable[[Any, Tensor], tuple[Tensor, dict[str, Tensor]]]


def compile_loss(
    loss: Callable[..., Any], module: nn.Module, *run_key: Hashable
) -> Callable[..., Any]:
    """Compile the loss of a step as one graph, cached for later runs with the same key.

    Modules with ``many_small_operations`` (flows) consist of independent operations: on a GPU their
    kernels are fused (an MNF step of LeNet: 148 instead of 235). Others would not gain from this.

    Args:
        loss: a method of ``module``.
        module: has the parameters.
        run_key: what a run must have in common with another one to share its compiled step, in
            addition to the module and the shapes of its parameters.
    """
    tensors = tuple((name, p.shape, p.dtype, p.device) for name, p in module.named_parameters())
    function: FunctionType = loss.__func__  # type: ignore[attr-defined]
    method = MethodType(_with_new_code(function, (*run_key, repr(module), tensors)), module)
    device = next(module.parameters()).device
    fuses_kernels = device.type == "cuda" and any(
        getattr(submodule, "many_small_operations", False) for submodule in module.modules()
    )
    options: dict[str, Any] | None = None
    if fuses_kernels:
        options = {"combo_kernels": True, "benchmark_combo_kernel": False}
    return torch.compile(method, fullgraph=True, options=options)


@lru_cache(maxsize=MAX_CACHED_RUNS)
def _with_new_code(function: FunctionType, run_key: Hashable) -> FunctionType:
    """Copy a function with its own code object.

    Torch caches compiled functions by code object, at most eight versions of each.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_code_numbers)}")
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the steps of an optimizer can be recorded on this device.

    Args:
        optimizer: the optimizer.
        device: that of the parameters.
    """
    return device.type == "cuda" and all(
        group.get("capturable", False) for group in optimizer.param_groups
    )


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    stored_norm: Tensor | None,
    norm: Tensor | None = None,
) -> None:
    """Clip the gradients of an optimizer's parameters, and store their norm before that.

    Args:
        optimizer: has the parameters.
        max_norm: the largest norm of all gradients together; None does not clip.
        stored_norm: the tensor that receives the norm, if any.
        norm: the norm; by default it is computed.
    """
    if max_norm is None and stored_norm is None:
        return
    free = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if norm is None:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in free])
    if stored_norm is not None:
        stored_norm.copy_(norm)
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(free, max_norm, norm)


class Recording:
    """Inputs of one shape at fixed addresses, and the CUDA graph of a function of them."""

    def __init__(self) -> None:
        self.matching_calls: int = 0
        self.version = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def matches(self, inputs: Sequence[Any]) -> bool:
        """Return whether inputs have the shapes of the first ones; count those that have."""
        if not all(isinstance(item, Tensor | Keywords) for item in inputs):
            return False
        shapes = [(item.shape, item.dtype) if isinstance(item, Tensor) else item for item in inputs]
        if self.matching_calls == 0:
            self.shapes = shapes
        has_same_shapes = shapes == self.shapes
        self.matching_calls += has_same_shapes
        return has_same_shapes

    def replay(self, inputs: Sequence[Any], function: Callable[..., Any]) -> Any:
        """Return the outputs, which the next call overwrites.

        The first call records the function. Recording does not run it: it is replayed then.
        """
        if self.graph is None:
            self.graph = self._record(inputs, function)
        else:
            for fixed, item in zip(self.fixed_inputs, inputs, strict=True):
                if isinstance(fixed, Tensor):
                    fixed.copy_(item, non_blocking=True)
        self.graph.replay()
        return self.outputs

    def _record(self, inputs: Sequence[Any], function: Callable[..., Any]) -> torch.cuda.CUDAGraph:
        """Record the function on copies of the inputs."""
        self.fixed_inputs: list[Tensor] = [
            item.clone() if isinstance(item, Tensor) else item for item in inputs
        ]
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.graphsafe_get_state()
        # A failed recording leaves the state of a generator unusable.
        generator.graphsafe_set_state(generator.clone_state())
        try:
            with torch.cuda.graph(graph):
                self.outputs: Any = function(*self.fixed_inputs)
        except BaseException:
            generator.graphsafe_set_state(state)
            raise
        return graph


class Replay(Recording):
    """An optimizer step that is recorded once and then replayed with new data.

    The 1,767 launches of an eager MNF step become one. The learning rates are tensors at fixed
    addresses; the noise depends on the seed set before a replay, as in an eager step. A batch of
    another shape, such as the last of an epoch, is not supported (``accepts``).

    Args:
        optimizer: the optimizer, with ``capturable`` groups.
        loss: the loss and the numbers of a batch.
        clip: the largest norm of the gradients; None does not clip.
        check: detects values that are not finite.
        norm: the tensor that receives the norm of the gradients before they are clipped, if any.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        clip: float | None,
        check: FiniteCheck,
        norm: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.loss = loss
        self.clip = clip
        self.check = check
        self.norm = norm

    def accepts(self, x: Inputs, y: Tensor) -> bool:
        """Return whether a batch fits the graph; count the steps before there is one."""
        return self.matches((*forward_inputs(x), y)) and self.matching_calls > WARMUP_CALLS

    def __call__(self, x: Inputs, y: Tensor, step: int) -> dict[str, Tensor]:
        """Take one step; its numbers stay on the device, and the next step overwrites them."""
        if self.graph is None:
            self.check.prepare()
            # The gradients of the graph live in its own memory.
            self.optimizer.zero_grad(set_to_none=True)
            self.has_one_input: bool = isinstance(x, Tensor)
        self.check.now.fill_(step)
        return dict(self.replay((*forward_inputs(x), y), self._step))

    def _step(self, *inputs: Any) -> dict[str, Tensor]:
        """Compute the gradients of a batch and update the parameters: the recorded function."""
        *x, y = inputs
        value, numbers = self.loss(x[0] if self.has_one_input else tuple(x), y)
        value.backward()
        self.check.mark(value)
        clip_gradients(self.optimizer, self.clip, self.norm)
        self.optimizer.step()
        return numbers


class Recorded(Recording):
    """A function of tensors as one launch on a GPU, recorded at its fourth call.

    Inputs of another shape, and functions that branch on values, run as they are.

    Args:
        function: the function. It is traced to be compiled, so that gradients may be taken in it.
        compile: compile it before it is recorded.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], compile: bool) -> None:
        super().__init__()
        self.function = function
        self.compile = compile

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the results, which the next call does not overwrite."""
        leaves, tree = tree_flatten(inputs)
        if not self.matches(leaves):
            return self.function(*inputs)
        if self.matching_calls == 1:
            self.flat_function: Callable[..., tuple[Tensor, ...]] = self._flatten_arguments(
                tree, leaves
            )
        is_on_gpu = leaves[0].is_cuda
        if not is_on_gpu or self.matching_calls <= WARMUP_CALLS:
            with warmup_stream() if is_on_gpu else nullcontext():
                return self.flat_function(*leaves)
        try:
            outputs = self.replay(leaves, self.flat_function)
            return tuple(output.clone() for output in outputs)
        except RuntimeError:
            if self.graph is not None:
                raise
            self.matching_calls = NEVER_RECORD  # the network branches on values
            return self.flat_function(*leaves)

    def _flatten_arguments(self, tree: Any, leaves: list[Any]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the function with the leaves of its arguments as arguments, compiled if set."""

        def function_of_leaves(*leaves: Any) -> tuple[Tensor, ...]:
            return self.function(*tree_unflatten(leaves, tree))

        if not self.compile:
            return function_of_leaves
        # Imported here because it takes a second.
        from torch.fx.experimental.proxy_tensor import make_fx

        # The traced function has its casts, so that autocast is off when it runs.
        compiled = torch.compile(make_fx(function_of_leaves)(*leaves), fullgraph=True)
        without_autocast = torch.autocast(leaves[0].device.type, enabled=False)
        return without_autocast(torch.no_grad()(compiled))


@contextmanager
def warmup_stream() -> Iterator[None]:
    """Use a side stream for the warm-up.

    A recorded step must not depend on earlier work of the default stream.
    """
    current_stream = torch.cuda.current_stream()
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(current_stream)
    with torch.cuda.stream(side_stream):
        yield
    current_stream.wait_stream(side_stream)
