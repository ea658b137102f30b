"""The result of every method: a distribution over the named tensors of a network."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.files import StrPath, write_file
from bayou.likelihoods import BoundLikelihood
from bayou.network import DryRun, Network, VmapOrLoop, channels_last, out_of_memory
from bayou.params import Params, match
from bayou.posteriors.checks import Checks, of_history
from bayou.posteriors.state import with_dtypes
from bayou.posteriors.temperature import Calibration, best_temperature
from bayou.predictive import Predictive
from bayou.priors import BoundPrior, BoundUnitNormal, Prior
from bayou.target import Target, forward_inputs

NOISE = "likelihood."  # prefix of those tensors of a draw that belong to the likelihood, not to the network
DEFAULT_SAMPLES = 100  # functions averaged for a prediction
CHUNK_NUMBERS = 2**24  # weights in memory during predictions, unless the user gives a chunk
CHUNK_OUTPUTS = 2**22  # draws times rows, likewise
ACTIVATIONS = {"cpu": 2**22}  # numbers in the largest tensor that a layer makes, by the type of the device
MIN_CHUNK_ROWS = 128  # rows that are never split
DRAW = "pass a draw: to_module(posterior, {name: value[0] for name, value in posterior.sample(1, seed=0).items()})"

_LOCK = threading.Lock()
_EVALUATING: dict[int, tuple[list[tuple[nn.Module, bool]], list[None]]] = {}  # modes before, and one for each holder


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set all submodules to eval mode, and restore their modes when no thread needs it any more."""
    with _LOCK:
        modes, holders = _EVALUATING.setdefault(id(module), ([(m, m.training) for m in module.modules()], []))
        holders.append(None)
        for part, _ in modes:
            part.training = False
    try:
        yield
    finally:
        with _LOCK:
            holders.pop()
            if not holders:
                del _EVALUATING[id(module)]
                for part, mode in modes:
                    part.training = mode


@contextmanager
def clear_errors(x: Any) -> Iterator[None]:
    """Errors of the network about its inputs, as a ValueError that shows the inputs."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        inputs = ", ".join(
            f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
            if isinstance(item, Tensor)
            else type(item).__name__
            for item in forward_inputs(x)
        )
        whole = any(isinstance(item, Tensor) and not item.is_floating_point() for item in forward_inputs(x))
        way = "; if x has numbers rather than indices, use x.float()" if whole else ""
        raise ValueError(f"the network cannot take x = {inputs}: {error}{way}") from error


def check_dtype(x: Any, like: Tensor) -> None:
    """A ValueError if the inputs have another floating-point type than the parameters."""
    for item in forward_inputs(x):
        if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != like.dtype:
            raise ValueError(f"x is {item.dtype} but the network is {like.dtype}; use x.to({like.dtype})")


class Posterior(ABC):
    """One distribution over tensors: ``sample``; predictions and files are derived from it.

    The tensors of a draw are the parameters of the network by name and, if a method draws them, buffers (the
    statistics of batch norm) and parameters of the likelihood (``likelihood.log_scale``).

    ``history``: one record per logging step, {"step", "elbo", "log_likelihood", "kl", "seconds"} for a variational
    method: estimates from one batch in nats for all data, elbo = log_likelihood − kl. The last step of an epoch has the
    mean negative log predictive density of held-out data as "validation", if there are any. ``stopped``: how the
    method ended, "finished", "early" or "interrupted". ``choice``: the reason for this method, if it was selected.
    ``temperature``: of predicted logits, or a factor of the scale of the noise (``calibrate``).
    """

    kind: ClassVar[str]
    target: Target
    network: Network
    history: list[dict[str, float]]
    stopped: str
    choice: str = ""
    temperature: float = 1.0

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws start .. start + n − 1 of all parameters, stacked: (n, *shape) each."""

    @property
    def checks(self) -> Checks:
        """Results of checks: of the history or, after ``bayou.diagnostics.check`` with data, of these, too."""
        known: Checks | None = getattr(self, "_checks", None)
        return of_history(self) if known is None else known

    @checks.setter
    def checks(self, found: Checks) -> None:
        self._checks = found

    @property
    def net(self) -> nn.Module:
        """The network of the parameters."""
        return self.network.net

    def like(self) -> Params:
        """Tensors with the shapes, dtype and device of one draw."""
        return {name: stack[0] for name, stack in self.sample(1, seed=0).items()}

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The network's outputs with these parameters, in eval mode; any number of threads may call it."""
        return self.network.evaluate(params, *inputs)

    @abstractmethod
    def mean(self) -> Params:
        """E[w] of every tensor, (*shape) each; a ValueError where it has no closed form."""

    @abstractmethod
    def std(self) -> Params:
        """The standard deviation of every number, (*shape) each; a ValueError where it has no closed form."""

    @torch.no_grad()
    def to_module(self, params: Params | None = None) -> nn.Module:
        """A copy of the user's network, in eval mode, with tensors of the posterior: one function out of many.

        ``params``: a draw, ``{name: value[0] for name, value in posterior.sample(1, seed=0).items()}``. Without it, a
        single representative set of weights: the point of MLE and MAP; the mode of Laplace and the average of SWAG
        (``mean``); the mean of VI and IVON; the weights of MC dropout, which is then off. Several points, a mixture and
        families whose mean has no closed form (MNF) have none and raise a ValueError; pass a draw instead. Other random
        quantities (masks, noise of the likelihood) and a temperature are not part of the network; the draw of a
        linearized Laplace is the network with these weights, as with ``using("sampled")``.
        """
        if params is None and (self.draws or 1) > 1:
            raise ValueError(f"{self!r} has no one network: the mean of its weights is none of them; {DRAW}")
        if params is None:
            try:
                params = self.mean()
            except ValueError as error:
                raise ValueError(f"{error}; for a network {DRAW}") from None
        buffers = self.network.buffers()
        known = {*self.network.names, *buffers}
        state = buffers | {name: value for name, value in params.items() if name in known}
        net = with_dtypes(copy.deepcopy(self.target.net).to(params[self.network.names[0]].device), state)
        net.load_state_dict(state, strict=False)  # a tied weight is stored once, under one of its names
        return net.eval()

    def to_arviz(self, samples: int | None = None, *, seed: rng.Seed = 0) -> Any:
        """Draws as an arviz ``InferenceData`` (a ``DataTree`` from arviz 1.0 on), for its summaries and plots.

        Points (chains, ensembles) chain by chain; for a distribution ``samples`` independent draws (by default 1,000)
        as one chain, with the ``member`` of a mixture of each.
        """
        try:
            import arviz
        except ImportError:
            raise ImportError("to_arviz needs arviz, which is not installed: pip install arviz") from None
        posterior = {name: value.cpu().numpy() for name, value in self._for_arviz(samples, seed).items()}
        if int(arviz.__version__.partition(".")[0]) >= 1:
            return arviz.from_dict({"posterior": posterior})
        return arviz.from_dict(posterior=posterior)

    def _for_arviz(self, samples: int | None, seed: rng.Seed) -> Params:
        """Draws by chain: (chains, draws, *shape) each."""
        stack = self.sample(min(1000, self.draws or 1000) if samples is None else samples, seed)
        return {name: value.unsqueeze(0) for name, value in stack.items()}

    def as_prior(self) -> dict[str, Prior]:
        """This posterior as the prior of the next task; a ValueError if its tensors have no separate densities."""
        raise ValueError(
            f"{type(self).__name__} has no separate density for each tensor, as a prior needs; use VI(MeanField())"
        )

    def bound_priors(self) -> dict[str, BoundPrior]:
        """The prior of every tensor, with its learned values."""
        return self.target.priors

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """The relevance of inputs: the prior scale s·a_i of each unit of the first layer, the largest 1: (inputs,).

        It needs a prior per unit, ``Normal("fan_in", learn="units")`` or ``"in"``, and inputs of one scale: a column
        with small values has large weights. ``where``: a pattern of tensors, for other layers.
        """
        priors = self.bound_priors()
        weights = [name for name, prior in priors.items() if len(prior.shape) > 1]
        picked = dict.fromkeys(weights[:1], True) if where is None else match(weights, {where: True}, default=False)
        found: dict[str, Tensor] = {}
        for name in (name for name, wanted in picked.items() if wanted):
            prior = priors[name]
            log = prior.log_factor("in") if isinstance(prior, BoundUnitNormal) else None
            if log is None:
                raise ValueError(
                    f"the prior of {name!r} has no factor for each of its inputs, so their relevance is "
                    'unknown; fit with prior=Normal("fan_in", learn="units") or learn="in" by VI or Laplace, and '
                    "several inputs"
                )
            found[name] = (log - log.max()).exp().detach()
        return found

    @property
    def draws(self) -> int | None:
        """The number of different draws: 1 for a point, the members of an ensemble; None for a continuum."""
        return None

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON from which ``restore`` makes the posterior again."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any) -> Posterior:
        """The posterior with this ``state``, for the network it was fitted to; a FileError if they do not match."""

    def save(self, path: StrPath) -> None:
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

        x: a tensor (B, ...) or a tuple of them. ``chunk`` samples and ``batch_size`` rows are computed at a time, by
        default as many as fit into a moderate amount of memory, half as many wherever that runs out; with a seed
        neither changes a number beyond rounding. A pure function: any number of threads may call it.
        Shapes: outputs (samples, B, ...).
        """
        for name, value in (("samples", samples), ("chunk", chunk), ("batch_size", batch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if samples is None:
            samples = min(DEFAULT_SAMPLES, self.draws or DEFAULT_SAMPLES)
        inputs = self._place(x)
        seed = rng.integer(seed)
        if chunk is None:
            weights = sum(value.numel() for value in self.like().values())
            chunk = max(1, min(samples, CHUNK_NUMBERS // max(weights, 1), CHUNK_OUTPUTS // max(len(inputs[0]), 1)))
        noise: dict[str, list[Tensor]] = {}
        outputs = torch.empty(0)
        with self._isolated(inputs, rng.fold(seed, "forward")):
            for start in range(0, samples, chunk):
                stack = self.sample(min(chunk, samples - start), seed, start)
                for name in [name for name in stack if name.startswith(NOISE)]:
                    noise.setdefault(name.removeprefix(NOISE), []).append(stack.pop(name))
                part = self._outputs(stack, inputs, batch_size)
                if start == 0:
                    outputs = part if len(part) == samples else part.new_empty(samples, *part.shape[1:])
                if outputs is not part:
                    outputs[start : start + len(part)] = part
        # A copy, so that what was predicted stays when the noise is learned further, and carries no graph.
        likelihood = copy.deepcopy(self.target.likelihood).requires_grad_(False)
        if noise:
            drawn = {name: torch.cat(values) for name, values in noise.items()}
            likelihood, outputs = likelihood.per_sample(outputs, drawn)
        return self._tempered(likelihood, outputs)

    def _tempered(self, likelihood: BoundLikelihood, outputs: Tensor) -> Predictive:
        """The predictive at the posterior's temperature."""
        if self.temperature != 1.0:
            likelihood, outputs = likelihood.tempered(outputs, self.temperature)
        return Predictive(likelihood, outputs)

    def calibrate(self, x: Any, y: Tensor, samples: int | None = None, *, seed: rng.Seed = 0) -> Calibration:
        """Learn one number on held-out rows: a temperature for classes, a scale of the noise for numbers.

        argmin_T −Σ_n log 1/S Σ_s p(y_n | f_s(x_n), T), with softmax(f/T) (below 1 as ``BoundLikelihood.tempered`` says)
        or noise T·σ (Guo 2017). The posterior and its files store it, replacing an earlier one; ``predict`` applies it
        from then on, and ``posterior.temperature = 1.0`` removes it. The ELBO, the evidence and ``sample`` do not
        change.
        """
        plain = copy.copy(self)
        plain.temperature = 1.0
        found = best_temperature(plain.predict(x, samples, seed=seed), y)
        self.temperature = found.temperature
        return found

    def _place(self, x: Any) -> tuple[Any, ...]:
        """The inputs on the device of the parameters; invalid ones raise an error here, not deep inside the network."""
        like = self.like()[next(name for name, _ in self.target.net.named_parameters())]
        inputs = forward_inputs(x)
        if not inputs or not isinstance(inputs[0], Tensor) or inputs[0].ndim == 0:
            what = type(inputs[0]).__name__ if inputs else "an empty tuple"
            raise ValueError(
                f"x must be a tensor whose first axis is the rows, or a tuple of them, got {what}; use "
                "torch.as_tensor(x, dtype=torch.float32)"
            )
        check_dtype(inputs, like)
        for item in inputs:
            if isinstance(item, Tensor):
                if item.ndim == 0 or len(item) != len(inputs[0]):
                    raise ValueError(f"the inputs have {[tuple(i.shape) for i in inputs]}: they need the same rows")
                if item.is_floating_point() and not bool(item.isfinite().all()):
                    raise ValueError("x has NaN or infinite values; remove or impute them first")
        return tuple(item.to(like.device) if isinstance(item, Tensor) else item for item in inputs)

    def _dry_run(self, inputs: tuple[Any, ...]) -> DryRun:
        """The result of a dry run of the network on inputs of these shapes."""
        return self.network.dry_run(self.like, inputs)

    def _isolated(self, inputs: tuple[Any, ...], seed: rng.Seed) -> AbstractContextManager[None]:
        """A network that draws random numbers in eval mode (dropout that is always on) draws them from the seed."""
        random = self._dry_run(inputs).random
        return rng.isolated(rng.integer(seed), inputs[0].device) if random else nullcontext()

    def _outputs(self, stack: Params, inputs: tuple[Any, ...], batch_size: int | None = None) -> Tensor:
        """Outputs of a stack, (S, B, *out), some rows at a time; half the rows or draws if memory runs out."""
        count, total = len(next(iter(stack.values()))), len(inputs[0])
        rows = batch_size or self._rows(inputs, count)
        if self._dry_run(inputs).channels_last:
            inputs = channels_last(inputs)
        outputs, first = torch.empty(0), 0
        while first < max(total, 1):
            some = tuple(item[first : first + rows] if isinstance(item, Tensor) else item for item in inputs)
            try:
                with clear_errors(inputs):
                    part = self._called(self._at_row(stack, first), some, count)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if rows > 1 and self._dry_run(inputs).rows_apart:
                    rows = -(-min(rows, total) // 2)
                    continue
                if count > 1:
                    halves = ({k: v[half] for k, v in stack.items()} for half in _halves(count))
                    return torch.cat([self._outputs(half, inputs, batch_size) for half in halves])
                raise torch.OutOfMemoryError(
                    f"predict runs out of memory with one function and {len(some[0])} rows of x at a time: {error}"
                ) from error
            if part.ndim < 2 or part.shape[1] != len(some[0]):
                raise ValueError(
                    f"the network gives outputs {tuple(part.shape[1:])} for {len(some[0])} rows of x; the first axis "
                    "of x must be the rows: x.unsqueeze(0) for one"
                )
            if len(some[0]) == total:
                return part
            if first == 0:
                outputs = part.new_empty(count, total, *part.shape[2:])
            outputs[:, first : first + rows] = part
            first += rows
        return outputs

    def _rows(self, inputs: tuple[Any, ...], count: int) -> int:
        """The number of rows of x to compute at a time, so that activations need moderate memory."""
        total, seen = len(inputs[0]), self._dry_run(inputs)
        if total <= MIN_CHUNK_ROWS or not seen.rows_apart:
            return max(total, 1)
        together = count if inputs[0].is_cuda else 1  # draws
        most = max(1, ACTIVATIONS.get(inputs[0].device.type, 2**28) // (seen.numbers * together))
        return -(-total // -(-total // most))  # equal parts

    def _at_row(self, stack: Params, first: int) -> Params:
        """The stack for rows of x from this number on; it matters if draws differ between rows."""
        return stack

    def _called(self, stack: Params, inputs: tuple[Any, ...], count: int) -> Tensor:
        """The outputs of all draws for these rows; on a CPU one by one, which is as fast."""
        out: Tensor = VmapOrLoop(self.call, (0, *[None] * len(inputs)), loop=not inputs[0].is_cuda)(stack, *inputs)
        return out


def _halves(count: int) -> tuple[slice, slice]:
    return slice(count // 2), slice(count // 2, None)


def check_count(n: Any) -> None:
    """A ValueError unless n is a number of draws."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"cannot draw {n!r} samples; it must be a whole number")
