"""Steps on a GPU as one CUDA graph: forward, backward and optimizer, or the gradient of chains, in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bayou.training.data import Keywords, forward_inputs
from bayou.training.guards import Watch

WARMUP = 3  # steps before the graph is recorded, which compile, allocate and initialize the optimizer's state
KINDS = 32  # number of runs whose compiled steps are cached
_numbers = itertools.count()
Loss = Callable[[Any, Tensor], tuple[Tensor, dict[str, Tensor]]]


def compiled(loss: Callable[..., Any], module: nn.Module, *kind: Hashable) -> Callable[..., Any]:
    """The loss of a step, a method of ``module``, compiled as one graph and cached for later runs of the same kind.

    Modules with ``many_small_operations`` (flows) consist of independent operations: on a GPU their kernels are fused
    (an MNF step of LeNet: 148 instead of 235). Others would not gain from this.
    """
    tensors = tuple((name, p.shape, p.dtype, p.device) for name, p in module.named_parameters())
    function: FunctionType = loss.__func__  # type: ignore[attr-defined]
    own = MethodType(_own_code(function, (*kind, repr(module), tensors)), module)
    device = next(module.parameters()).device
    join = device.type == "cuda" and any(getattr(part, "many_small_operations", False) for part in module.modules())
    joined: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": False}
    return torch.compile(own, fullgraph=True, options=joined if join else None)


@lru_cache(maxsize=KINDS)
def _own_code(function: FunctionType, kind: Hashable) -> FunctionType:
    """A copy of the function with its own code object: torch caches by code object, eight versions at most."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the steps of an optimizer can be recorded on this device."""
    return device.type == "cuda" and all(group.get("capturable", False) for group in optimizer.param_groups)


class Replay:
    """Records a step once, then replays it with new data: 1,767 launches of an eager MNF step become one.

    The learning rates are tensors at fixed addresses; the noise depends on the seed set before a replay, as in an eager
    step. A batch of another shape, such as the last of an epoch, is not supported (``takes``).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, loss: Loss, clip: float | None, watch: Watch, norm: Tensor | None = None
    ) -> None:
        self.optimizer, self.loss, self.clip, self.watch = optimizer, loss, clip, watch
        self.norm = norm  # the tensor for the norm of the gradients, if any
        self.seen = self.version = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x: tuple[Any, ...] = ()

    def takes(self, x: Any, y: Tensor) -> bool:
        """Whether a batch fits the graph; counts the steps before there is one."""
        parts = (*forward_inputs(x), y)
        if not all(isinstance(part, Tensor | Keywords) for part in parts):
            return False
        shapes = [(part.shape, part.dtype) if isinstance(part, Tensor) else part for part in parts]
        if self.seen == 0:
            self.shapes = shapes
        if shapes != self.shapes:
            return False
        self.seen += 1
        return self.seen > WARMUP

    def __call__(self, x: Any, y: Tensor, step: int) -> dict[str, Tensor]:
        """One step; its numbers stay on the device, and the next step overwrites them."""
        parts = forward_inputs(x)
        if self.graph is None:
            self._record(parts, isinstance(x, Tensor), y)
        else:
            for mine, given in zip((*self.x, self.y), (*parts, y), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given, non_blocking=True)
        assert self.graph is not None
        self.watch.now.fill_(step)
        self.graph.replay()
        return dict(self.report)

    def _record(self, parts: tuple[Any, ...], single: bool, y: Tensor) -> None:
        """Record a step; recording does not run it, so that it is replayed afterwards."""
        self.x, self.y = tuple(p.clone() if isinstance(p, Tensor) else p for p in parts), y.clone()
        inputs = self.x[0] if single else self.x
        self.watch.prepare()
        self.optimizer.zero_grad(set_to_none=True)  # the gradients of the graph live in its own memory
        with recording() as graph:
            value, self.report = self.loss(inputs, self.y)
            value.backward()
            self.watch.mark(value)
            free = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
            if self.clip is not None or self.norm is not None:
                norm = nn.utils.get_total_norm([p.grad for p in free])
                if self.norm is not None:
                    self.norm.copy_(norm)
                if self.clip is not None:
                    nn.utils.clip_grads_with_norm_(free, self.clip, norm)
            self.optimizer.step()
        self.graph = graph


class Recorded:
    """A function of tensors as one launch on a GPU, recorded at its fourth call; ``compile`` compiles it before.

    Inputs of other shapes than the first ones', other kinds of inputs, and functions that branch on values run as they
    are. The function is traced to be compiled, so that gradients may be taken in it.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], compile: bool) -> None:
        self.function, self.compile, self.seen = function, compile, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.mine: list[Tensor] = []

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The results, which the next call does not overwrite."""
        given, form = tree_flatten(inputs)
        if not all(isinstance(one, Tensor) for one in given):
            return self.function(*inputs)
        if not self.mine:
            self.mine, self.fast = [one.clone() for one in given], self._flat(form, given)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self.mine, given, strict=True)):
            return self.function(*inputs)
        self.seen += 1
        if self.seen <= WARMUP or not given[0].is_cuda:
            with apart() if given[0].is_cuda else nullcontext():
                return self.fast(*given)
        for mine, one in zip(self.mine, given, strict=True):
            mine.copy_(one, non_blocking=True)
        if self.graph is None:
            try:
                with recording() as graph:
                    self.outputs = self.fast(*self.mine)
            except RuntimeError:  # the network branches on values
                self.seen = -(1 << 62)
                return self.fast(*given)
            self.graph = graph
        self.graph.replay()
        return tuple(one.clone() for one in self.outputs)

    def _flat(self, form: Any, given: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            return self.function(*tree_unflatten(leaves, form))

        if not self.compile:
            return flat
        from torch.fx.experimental.proxy_tensor import make_fx  # imported here because it takes a second

        fast = torch.compile(make_fx(flat)(*given), fullgraph=True)  # which has its casts
        return torch.autocast(given[0].device.type, enabled=False)(torch.no_grad()(fast))


@contextmanager
def apart() -> Iterator[None]:
    """A side stream for the warm-up: a recorded step must not depend on earlier work of the default stream."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@contextmanager
def recording() -> Iterator[torch.cuda.CUDAGraph]:
    """What is done inside is recorded, not run; an error leaves the random numbers of the device as they were."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    before = stream.graphsafe_get_state()
    stream.graphsafe_set_state(stream.clone_state())  # a failed recording leaves a generator unusable
    try:
        with torch.cuda.graph(graph):
            yield graph
    except BaseException:
        stream.graphsafe_set_state(before)
        raise
