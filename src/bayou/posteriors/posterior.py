"""What every method returns: a distribution over the named tensors of a network."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayou import rng
from bayou.files import FileError, no_grad_state, write_file
from bayou.likelihoods import Likelihood
from bayou.params import Params
from bayou.predictive import Predictive
from bayou.priors import Prior
from bayou.specs import from_json, to_json
from bayou.target import PriorRules, Target, forward_inputs

NOISE = "likelihood."  # prefix of those tensors of a draw that belong to the likelihood, not to the network
DRAWS = 100  # functions that a prediction is made of, unless told
CHUNK_NUMBERS = 2**24  # weights held at once while predicting, unless the user says how many samples


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Every part of a module in eval mode, and afterwards in the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def clear_errors(x: Any) -> Iterator[None]:
    """What the network does not like about its inputs, as a ValueError that says what they were."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        inputs = ", ".join(
            f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
            if isinstance(item, Tensor)
            else type(item).__name__
            for item in forward_inputs(x)
        )
        raise ValueError(f"the network cannot take x = {inputs}: {error}") from error


def check_dtype(x: Any, like: Tensor) -> None:
    """A ValueError where the inputs have another floating-point type than the parameters."""
    for item in forward_inputs(x):
        if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != like.dtype:
            raise ValueError(f"x is {item.dtype} but the network is {like.dtype}; use x.to({like.dtype})")


class Posterior(ABC):
    """One distribution over tensors: ``sample``; predictions and files are derived from it.

    The tensors of a draw are the parameters of the network by name and, where a method draws them too, buffers (the
    statistics of batch norm) and parameters of the likelihood (``likelihood.log_scale``).

    ``history``: one record per logging step, {"step", "elbo", "log_likelihood", "kl", "seconds"} for a variational
    method: estimates from one batch in nats for all data, elbo = log_likelihood − kl. The last step of an epoch has the
    mean negative log predictive density of held-out data too, "validation", if there are any. ``stopped``: why the
    method came to an end, "finished", "early" or "interrupted".
    """

    kind: ClassVar[str]
    target: Target
    history: list[dict[str, float]]
    stopped: str

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws start .. start + n − 1 of all parameters, stacked: (n, *shape) each."""

    @property
    @abstractmethod
    def net(self) -> nn.Module:
        """The network that the parameters belong to."""

    def like(self) -> Params:
        """Tensors with the shapes, dtype and device of one draw."""
        return {name: stack[0] for name, stack in self.sample(1, seed=0).items()}

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The network's outputs with these parameters."""
        out: Tensor = functional_call(self.net, params, inputs)
        return out

    @property
    def draws(self) -> int | None:
        """How many different draws there are: 1 for a point, the members of an ensemble; None for a continuum."""
        return None

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON that ``restore`` makes the posterior of again."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any) -> Posterior:
        """The posterior with this ``state``, for the network it was fitted to; a FileError where they do not fit."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to a file that ``bayou.load`` reads; atomic, checksummed, no code inside."""
        write_file(path, *self.state())

    @torch.no_grad()
    def predict(
        self,
        x: Any,
        samples: int | None = None,
        *,
        seed: rng.Seed = None,
        chunk: int | None = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Outputs for ``samples`` functions (100, or all ``draws`` if there are fewer), each one draw for all inputs.

        x: a tensor (B, ...) or a tuple of them. ``chunk`` samples and ``batch_size`` rows are computed at a time; with
        a seed neither changes a number beyond rounding. Where memory runs out, both are halved until it does not.
        Shapes: outputs (samples, B, ...).
        """
        for name, value in (("samples", samples), ("chunk", chunk), ("batch_size", batch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if samples is None:
            samples = min(DRAWS, self.draws or DRAWS)
        inputs = self._place(x)
        seed = rng.integer(seed)
        parts: list[Tensor] = []
        noise: dict[str, list[Tensor]] = {}
        with evaluating(self.net):
            for stack in self._stacks(samples, seed, chunk):
                weights = {name: value for name, value in stack.items() if not name.startswith(NOISE)}
                for name in stack.keys() - weights.keys():
                    noise.setdefault(name.removeprefix(NOISE), []).append(stack[name])
                parts.append(self._outputs(weights, inputs, batch_size))
        # A copy, so that what was predicted stays when the noise is learned further, and carries no graph.
        likelihood, outputs = copy.deepcopy(self.target.likelihood).requires_grad_(False), torch.cat(parts)
        if noise:
            drawn = {name: torch.cat(values) for name, values in noise.items()}
            likelihood, outputs = likelihood.per_sample(outputs, drawn)
        return Predictive(likelihood, outputs)

    def _place(self, x: Any) -> tuple[Any, ...]:
        """The inputs on the device of the parameters; what does not fit is an error here, not deep inside."""
        like = next(iter(self.like().values()))
        inputs = forward_inputs(x)
        if not inputs or not isinstance(inputs[0], Tensor) or inputs[0].ndim == 0:
            what = type(inputs[0]).__name__ if inputs else "an empty tuple"
            raise ValueError(f"x must be a tensor whose first axis counts the rows, or a tuple of them, got {what}")
        check_dtype(inputs, like)
        for item in inputs:
            if isinstance(item, Tensor):
                if item.ndim == 0 or len(item) != len(inputs[0]):
                    raise ValueError(f"the inputs have {[tuple(i.shape) for i in inputs]}: they need the same rows")
                if item.is_floating_point() and not bool(item.isfinite().all()):
                    raise ValueError("x has NaN or infinite values; remove or impute them first")
        return tuple(item.to(like.device) if isinstance(item, Tensor) else item for item in inputs)

    def _stacks(self, samples: int, seed: rng.Seed, chunk: int | None) -> Iterator[Params]:
        if chunk is None:
            weights = sum(value.numel() for value in self.like().values())
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
        """Outputs of a stack; where the device has too little memory, of half the draws or rows at a time."""
        count, rows = len(next(iter(stack.values()))), len(inputs[0])
        try:
            with clear_errors(inputs):
                return self._called(stack, inputs, count)
        except torch.OutOfMemoryError:
            if count == 1 and (rows == 1 or not self.rows_apart):
                raise
        if count > 1:
            halves = [{k: v[part] for k, v in stack.items()} for part in _halves(count)]
            return torch.cat([self._stacked(half, inputs) for half in halves])
        cuts = [tuple(i[part] if isinstance(i, Tensor) else i for i in inputs) for part in _halves(rows)]
        return torch.cat([self._stacked(stack, cut) for cut in cuts], 1)

    @property
    def rows_apart(self) -> bool:
        """Whether the outputs of a row do not depend on which other rows there are."""
        return True

    def _called(self, stack: Params, inputs: tuple[Any, ...], count: int) -> Tensor:
        if next(iter(stack.values())).is_cuda:
            try:
                return vmap(self.call, (0, *[None] * len(inputs)), randomness="different")(stack, *inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                pass  # an operation without a batching rule: the loop below has no such limits
        return torch.stack([self.call({k: v[s] for k, v in stack.items()}, *inputs) for s in range(count)])


def _halves(count: int) -> tuple[slice, slice]:
    return slice(count // 2), slice(count // 2, None)


def check_count(n: Any) -> None:
    """A ValueError unless n is a number of draws."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"cannot draw {n!r} samples; it must be a whole number")


def target_state(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What every file of a posterior holds: its kind, target, likelihood and history."""
    target = posterior.target
    config = {
        "kind": posterior.kind,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "n": target.n,
        "shapes": {name: list(value.shape) for name, value in target.net.named_parameters()},
        "history": posterior.history,
        "stopped": posterior.stopped,
    }
    return {f"likelihood.{name}": value for name, value in no_grad_state(target.likelihood).items()}, config


def restore_target(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    net: nn.Module,
    prior: PriorRules | None = None,
    likelihood: Likelihood | None = None,
) -> Target:
    """The target of a file for the network it was fitted to (its weights do not matter, its shapes do)."""
    path = config["path"]
    shapes = {name: list(value.shape) for name, value in net.named_parameters()}
    odd = [n for n in [*config["shapes"], *shapes] if shapes.get(n) != config["shapes"].get(n)]
    if odd:
        raise FileError(
            f"{path} belongs to another network: {odd[0]!r} is {config['shapes'].get(odd[0], 'not')} in the file "
            f"and {shapes.get(odd[0], 'not')} here; build the network it was fitted to"
        )
    prior = restore_spec(path, "prior", config["prior"], Prior) if prior is None else prior
    if likelihood is None:
        likelihood = restore_spec(path, "likelihood", config["likelihood"], Likelihood)
    target = Target.build(net, likelihood, prior, config["n"])
    state = under("likelihood.", tensors)
    first = next((value for value in tensors.values() if value.is_floating_point()), None)
    try:
        target.likelihood.to(None if first is None else first.dtype).load_state_dict(state)
    except RuntimeError as error:
        raise FileError(f"{path} does not fit this likelihood: {error}") from None
    return target


def restore_spec(path: str | os.PathLike[str], what: str, value: Any, family: type) -> Any:
    """A spec out of a file, or a FileError that says to pass it again."""
    try:
        return from_json(value, family)
    except ValueError as error:
        raise FileError(f"{path}: {error}; pass the {what} it was fitted with: load(..., {what}=...)") from None


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
