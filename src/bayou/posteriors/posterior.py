"""What every method returns: a distribution over the named tensors of a network."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayou import rng
from bayou.params import Params
from bayou.predictive import Predictive
from bayou.target import Target, forward_inputs

CHUNK_NUMBERS = 2**24  # weights held at once while predicting, unless the user says how many samples


class Posterior(ABC):
    """One abstract method, ``sample``; predictions and files are derived from it."""

    target: Target
    history: list[dict[str, float]]

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws start .. start + n − 1 of all parameters, stacked: (n, *shape) each."""

    @property
    @abstractmethod
    def net(self) -> nn.Module:
        """The network that the parameters belong to."""

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The network's outputs with these parameters."""
        out: Tensor = functional_call(self.net, params, inputs)
        return out

    @abstractmethod
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to a file that ``bayou.load`` reads; atomic, checksummed, no code inside."""

    @torch.no_grad()
    def predict(
        self,
        x: Any,
        samples: int = 100,
        *,
        seed: rng.Seed = None,
        chunk: int | None = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Outputs for ``samples`` functions, each one draw of the weights for all inputs.

        x: a tensor (B, ...) or a tuple of them. ``chunk`` samples and ``batch_size`` rows are computed at a time; with
        a seed neither changes a number beyond rounding. Shapes: outputs (samples, B, ...).
        """
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        inputs = self._place(x)
        seed = rng.integer(seed)
        was_training = self.net.training
        self.net.eval()
        try:
            stacks = self._stacks(samples, seed, chunk)
            outputs = torch.cat([self._outputs(stack, inputs, batch_size) for stack in stacks])
        finally:
            self.net.train(was_training)
        return Predictive(self.target.likelihood, outputs)

    def _place(self, x: Any) -> tuple[Any, ...]:
        """The inputs on the device of the parameters; a dtype that does not fit is an error here, not deep inside."""
        like = next(iter(self.sample(1, seed=0).values()))
        placed = []
        for item in forward_inputs(x):
            if isinstance(item, Tensor):
                if item.is_floating_point() and item.dtype != like.dtype:
                    raise ValueError(f"x is {item.dtype} but the network is {like.dtype}; use x.to({like.dtype})")
                if item.is_floating_point() and not bool(item.isfinite().all()):
                    raise ValueError("x has NaN or infinite values; remove or impute them first")
                item = item.to(like.device)
            placed.append(item)
        return tuple(placed)

    def _stacks(self, samples: int, seed: rng.Seed, chunk: int | None) -> Iterator[Params]:
        if chunk is None:
            weights = sum(value.numel() for value in self.sample(1, seed=0).values())
            chunk = max(1, min(samples, CHUNK_NUMBERS // max(weights, 1)))
        for start in range(0, samples, chunk):
            yield self.sample(min(chunk, samples - start), seed, start)

    def _outputs(self, stack: Params, inputs: tuple[Any, ...], batch_size: int | None) -> Tensor:
        rows = len(inputs[0])
        size = batch_size or max(rows, 1)
        parts = [
            self._stacked(stack, tuple(item[i : i + size] if isinstance(item, Tensor) else item for item in inputs))
            for i in range(0, max(rows, 1), size)
        ]
        return torch.cat(parts, 1)

    def _stacked(self, stack: Params, inputs: tuple[Any, ...]) -> Tensor:
        count = len(next(iter(stack.values())))
        if next(iter(stack.values())).is_cuda:
            try:
                return vmap(self.call, (0, *[None] * len(inputs)), randomness="different")(stack, *inputs)
            except RuntimeError:
                pass  # an operation without a batching rule: the loop below has no such limits
        return torch.stack([self.call({k: v[s] for k, v in stack.items()}, *inputs) for s in range(count)])
