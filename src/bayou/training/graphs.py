"""Steps on a GPU as one CUDA graph: forward, backward and optimizer, or the gradient of chains, in
one launch.
"""

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

from bayou.training.data import Keywords, forward_inputs
from bayou.training.guards import Watch

WARMUP = 3  # steps before the graph is recorded, which compile, allocate and initialize the optimizer's state
KINDS = 32  # number of runs whose compiled steps are cached
_numbers = itertools.count()
Loss = Callable[[Any, Tensor], tuple[Tensor, dict[str, Tensor]]]


def compiled(loss: Callable[..., Any], module: nn.Module, *kind: Hashable) -> Callable[..., Any]:
    """The loss of a step, a method of ``module``, compiled as one graph and cached for later runs
    of the same kind.

    Modules with ``many_small_operations`` (flows) consist of independent operations: on a GPU their
    kernels are fused (an MNF step of LeNet: 148 instead of 235). Others would not gain from this.
    """
    tensors = tuple((name, p.shape, p.dtype, p.device) for name, p in module.named_parameters())
    function: FunctionType = loss.__func__  # type: ignore[attr-defined]
    own = MethodType(_own_code(function, (*kind, repr(module), tensors)), module)
    device = next(module.parameters()).device
    join = device.type == "cuda" and any(
        getattr(part, "many_small_operations", False) for part in module.modules()
    )
    joined: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": False}
    return torch.compile(own, fullgraph=True, options=joined if join else None)


@lru_cache(maxsize=KINDS)
def _own_code(function: FunctionType, kind: Hashable) -> FunctionType:
    """A copy of the function with its own code object: torch caches by code object, eight versions
    at most.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the steps of an optimizer can be recorded on this device."""
    return device.type == "cuda" and all(
        group.get("capturable", False) for group in optimizer.param_groups
    )


class Recording:
    """Inputs of one shape at fixed addresses, and the CUDA graph of a function of them."""

    def __init__(self) -> None:
        self.seen = self.version = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def fits(self, parts: Sequence[Any]) -> bool:
        """Whether inputs have the shapes of the first ones; counts those that have."""
        if not all(isinstance(part, Tensor | Keywords) for part in parts):
            return False
        shapes = [(part.shape, part.dtype) if isinstance(part, Tensor) else part for part in parts]
        if self.seen == 0:
            self.shapes = shapes
        self.seen += shapes == self.shapes
        return shapes == self.shapes

    def replay(self, parts: Sequence[Any], function: Callable[..., Any]) -> Any:
        """The outputs, which the next call overwrites. Recording does not run the function: it is
        replayed then.
        """
        if self.graph is None:
            self.mine = [part.clone() if isinstance(part, Tensor) else part for part in parts]
            graph, stream = (
                torch.cuda.CUDAGraph(),
                torch.cuda.default_generators[torch.cuda.current_device()],
            )
            before = stream.graphsafe_get_state()
            stream.graphsafe_set_state(
                stream.clone_state()
            )  # a failed recording leaves a generator unusable
            try:
                with torch.cuda.graph(graph):
                    self.outputs = function(*self.mine)
            except BaseException:
                stream.graphsafe_set_state(before)
                raise
            self.graph = graph
        else:
            for mine, given in zip(self.mine, parts, strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.outputs


class Replay(Recording):
    """Records a step once, then replays it with new data: 1,767 launches of an eager MNF step
    become one.

    The learning rates are tensors at fixed addresses; the noise depends on the seed set before a
    replay, as in an eager step. A batch of another shape, such as the last of an epoch, is not
    supported (``takes``).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        clip: float | None,
        watch: Watch,
        norm: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.optimizer, self.loss, self.clip, self.watch = optimizer, loss, clip, watch
        self.norm = norm  # the tensor for the norm of the gradients, if any

    def takes(self, x: Any, y: Tensor) -> bool:
        """Whether a batch fits the graph; counts the steps before there is one."""
        return self.fits((*forward_inputs(x), y)) and self.seen > WARMUP

    def __call__(self, x: Any, y: Tensor, step: int) -> dict[str, Tensor]:
        """One step; its numbers stay on the device, and the next step overwrites them."""
        if self.graph is None:
            self.watch.prepare()
            self.optimizer.zero_grad(
                set_to_none=True
            )  # the gradients of the graph live in its own memory
            self.single = isinstance(x, Tensor)
        self.watch.now.fill_(step)
        return dict(self.replay((*forward_inputs(x), y), self._step))

    def _step(self, *parts: Any) -> dict[str, Tensor]:
        *x, y = parts
        value, report = self.loss(x[0] if self.single else tuple(x), y)
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
        return report


class Recorded(Recording):
    """A function of tensors as one launch on a GPU, recorded at its fourth call; ``compile``
    compiles it before.

    Inputs of another shape, and functions that branch on values, run as they are. The function is
    traced to be compiled, so that gradients may be taken in it.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], compile: bool) -> None:
        super().__init__()
        self.function, self.compile = function, compile

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The results, which the next call does not overwrite."""
        given, form = tree_flatten(inputs)
        if not self.fits(given):
            return self.function(*inputs)
        if self.seen == 1:
            self.fast = self._flat(form, given)
        if not given[0].is_cuda or self.seen <= WARMUP:
            with apart() if given[0].is_cuda else nullcontext():
                return self.fast(*given)
        try:
            return tuple(one.clone() for one in self.replay(given, self.fast))
        except RuntimeError:
            if self.graph is not None:
                raise
            self.seen = -(1 << 62)  # the network branches on values: never recorded
            return self.fast(*given)

    def _flat(self, form: Any, given: list[Any]) -> Callable[..., tuple[Tensor, ...]]:
        def flat(*leaves: Any) -> tuple[Tensor, ...]:
            return self.function(*tree_unflatten(leaves, form))

        if not self.compile:
            return flat
        from torch.fx.experimental.proxy_tensor import (
            make_fx,
        )  # imported here because it takes a second

        fast = torch.compile(make_fx(flat)(*given), fullgraph=True)  # which has its casts
        return torch.autocast(given[0].device.type, enabled=False)(torch.no_grad()(fast))


@contextmanager
def apart() -> Iterator[None]:
    """A side stream for the warm-up: a recorded step must not depend on earlier work of the default
    stream.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)
