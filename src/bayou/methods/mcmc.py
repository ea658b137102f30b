"""Markov chains: the base class of all samplers, from the start of the chains to the posterior of their draws."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from bayou import rng
from bayou.files import StrPath, join, making, split
from bayou.kernels import Joint
from bayou.methods.method import Method, identity
from bayou.methods.point import MAP
from bayou.methods.probe import Probe, warn_unless_mixed
from bayou.methods.start import starting_point
from bayou.network import Network
from bayou.params import flatten
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.progress import Progress, Show
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.guards import Interrupt
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.threads import largest_product, suitable_threads

MODE_LR = 5e-3  # of the short MAP that chains start at
MODE_HELD_OUT, MODE_MIN_ROWS = 0.2, 10  # where a noise is learned: the fraction held out, and the rows that takes


class DivergenceError(FloatingPointError):
    """A chain is not finite. ``posterior`` has the draws of the other chains so far; None if there are none."""

    posterior: Empirical | None = None


@dataclass(frozen=True, kw_only=True)
class Sampler(Method):
    """The base class of Markov chain methods.

    Where a noise is learned, the short MAP of ``start="mode"`` holds out a fifth of the rows and keeps the parameters
    with the lowest validation loss: fitted to all rows, the noise of a network that can interpolate goes to 0. (A
    DataLoader is not split: give a ``start``.)

    ``posterior.mixing`` has diagnostics of the chains: split R-hat and bulk ESS of the functions E[y | x, w] at up to
    64 rows and of the log joint ("r_hat" and "ess" are the worst, "r_hat_median" and "ess_median" the median), the mean
    difference in nats of the draws to the start, and where applicable the acceptance rate and the divergences. With at
    least 20 draws per chain it also has "mixed": R-hat of at most 1.1, an ESS of at least 50, and draws less than
    D + 5·√(D/2) nats below the start (unless a noise is sampled); otherwise there is a ``MixingWarning``.

    The network is in eval mode throughout: batch norm uses the running statistics of the network as given (or of the
    start), dropout is off. Frozen parameters stay. A noise that is learned (``Gaussian(learn=True)``) is sampled too,
    as ``likelihood.log_scale`` with a flat prior on the log scale; its posterior is proper where the network cannot
    go through all data exactly. Ctrl-C ends the run after the step at hand and returns the draws so far,
    ``stopped="interrupted"``; before the first draw it stays a Ctrl-C. A chain that is not finite any more ends the
    run with ``DivergenceError``, which carries the draws of the other chains.

    Args:
        chains: how many run at once, by vmap; chain c is a function of (seed, c), whichever others run beside it.
        start: a method that ends in a point, such as MAP(), or None for the network's own weights. "mode" is a short
            MAP, no longer than the chains themselves (none, where the step size is given or the chains begin at the
            prior).
        dispersal: where the chains begin around the start: the standard deviation of a jitter, or "prior" for
            independent draws from the prior.
        temperature: T of p(w, D)^(1/T); T < 1 is a cold posterior.
        log_every: steps between two records of ``posterior.history``.
        checkpoint_every: steps between two checkpoints with all draws, if the run has a checkpoint file.
    """

    chains: int = 4
    start: Method | Literal["mode"] | None = "mode"
    draws_all_weights: ClassVar[bool] = True
    dispersal: float | Literal["prior"] = 0.01
    temperature: float = 1.0
    log_every: int = 50
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        me = type(self).__name__
        self._check_whole("chains", "batch_size", "log_every", "checkpoint_every")
        self._check_positive("temperature")
        if self.start not in (None, "mode") and not isinstance(self.start, Method):
            raise ValueError(f"{me} start must be 'mode', None or a method such as MAP(), got {self.start!r}")
        if self.dispersal != "prior" and not (isinstance(self.dispersal, int | float) and self.dispersal >= 0):
            raise ValueError(f"{me} dispersal must be 'prior' or a standard deviation, got {self.dispersal!r}")

    @abstractmethod
    def _sampling(self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range) -> Sampling:
        """The chains at their start (C, D)."""

    @abstractmethod
    def _plan(self, data: Data) -> tuple[int, list[int]]:
        """The number of steps, and the steps after which the positions of the chains are kept."""

    @abstractmethod
    def _mode_steps(self, data: Data) -> int:
        """The number of steps towards the mode before the chains start; 0 for none."""

    def _start(self, target: Target, data: Data) -> Method | None:
        """Where the chains start, if it is not the network as it is."""
        if self.start != "mode":
            return self.start
        steps = 0 if self.dispersal == "prior" else min(self._mode_steps(data), max(2000, 10 * data.batches))
        if not steps:
            return None
        # p(w, noise | D) has no mode where the network can interpolate: its noise goes to 0, where no chain can move.
        learned = any(p.requires_grad for p in target.likelihood.parameters())
        held_out = MODE_HELD_OUT if learned and isinstance(data, Rows) and data.n >= MODE_MIN_ROWS else 0.0
        batch_size = min(self.batch_size, MAP.batch_size)
        return MAP(steps=steps, lr=MODE_LR, batch_size=batch_size, validation=held_out)

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Empirical:
        """The draws of all chains, grouped by chain, in order."""
        return self._fit(target, data, seed, checkpoint, progress, range(self.chains))

    def _fit(
        self, target: Target, data: Any, seed: int, checkpoint: StrPath | None, progress: Show, chains: range
    ) -> Empirical:
        """The same for some of the chains."""
        name = type(self).__name__
        found = self._begin(target, data, as_int_seed(seed), checkpoint, progress, chains)
        if isinstance(found, Empirical):
            return found
        run, work = found
        place, device = part_seed(as_int_seed(seed), "run"), run.sampling.position.device
        with rng.isolated(place, device), suitable_threads(len(chains) * work):
            posterior = run.run()
        warn_unless_mixed(name, posterior)
        return posterior

    def stream(self, target: Target, data: Any, *, seed: int = 0, progress: Show = True) -> Iterator[Empirical]:
        """The draws of ``fit``, one of each chain at a time, without storing them.

        The first follows the burn-in. There is no ``mixing``, which needs all draws.
        """
        seed = as_int_seed(seed)
        found = self._begin(target, data, seed, None, progress, range(self.chains))
        if isinstance(found, Empirical):  # Ctrl-C before there was a chain
            raise KeyboardInterrupt(f"{type(self).__name__} was interrupted before its first draw")
        run, _ = found
        yield from run.stream(part_seed(seed, "run"))

    def _begin(
        self, target: Target, data: Any, seed: int, checkpoint: StrPath | None, progress: Show, chains: range
    ) -> tuple[Run, int] | Empirical:
        """The chains before their first step and the cost of one, or the start if it was interrupted."""
        name = type(self).__name__
        batches = as_data(data, self.batch_size)
        steps, kept = self._plan(batches)
        target = replace(target, n=batches.n)
        target.require_fixed_priors(name)
        if not target.free:
            raise ValueError("every parameter of the network is frozen (requires_grad=False): nothing to sample")
        file = None if checkpoint is None else Checkpoint(checkpoint, self._identity(target, batches, seed))
        found = starting_point(
            self._start(target, batches),
            target,
            batches,
            seed=part_seed(seed, "start"),
            checkpoint=checkpoint,
            progress=progress,
        )
        if found.stopped == "interrupted":  # Ctrl-C during the start: return that point
            return found
        target = replace(target, likelihood=found.target.likelihood)  # the user's prior, the learned noise
        joint = Joint(target, found.network, {n: v[0] for n, v in found.stack.items() if not n.startswith(NOISE)})
        begin = self._dispersed(joint, seed, chains)
        with rng.isolated(part_seed(seed, "run"), begin.device):
            make = partial(self._sampling, joint, batches, begin, seed, chains)
            sampling, work = largest_product(make)  # it tries the first batch
        return Run(name, sampling, joint, found.network, steps, kept, self, file, progress, chains), work

    def _identity(self, target: Target, data: Data, seed: int) -> dict[str, Any]:
        """As for every method; old checkpoints with None instead of "mode" keep their identity."""
        found = identity(self, target, data, seed)
        if self.start is None or self.start == "mode":
            found["method"]["fields"]["start"] = "network" if self.start is None else None
        return found

    def _dispersed(self, joint: Joint, seed: int, chains: range) -> Tensor:
        """The initial positions of the chains: (C, D)."""
        count, begin, first = len(chains), joint.start, chains.start
        if self.dispersal != "prior":
            noise = rng.normal(count, begin.shape, begin, part_seed(seed, "dispersal"), first)
            return begin + self.dispersal * noise
        drawn = {name: value.expand(count, *value.shape) for name, value in joint.like.items()}
        for name in joint.target.free:
            drawn[name] = joint.target.priors[name].sample(count, part_seed(seed, "dispersal", name), first)
        return flatten(drawn, 1).detach()


class Sampling(ABC):
    """The chains of one run."""

    probe: Probe
    joint: Joint
    method: Any
    apart = False  # whether every draw is independent, so that the posterior has no chains

    def mixing(self, draws: Tensor) -> dict[str, Any]:
        """The entries of ``posterior.mixing`` for these draws (C, K, D)."""
        return self.probe.mixing(draws, self.joint.start, self.method.temperature)

    @property
    @abstractmethod
    def position(self) -> Tensor:
        """The positions of the chains: (C, D)."""

    @abstractmethod
    def advance(self, step: int) -> None:
        """One step of all chains."""

    @abstractmethod
    def record(self) -> dict[str, float]:
        """Numbers of the last step, for the history and the progress line."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state for the next step, as tensors and plain values."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""

    def lost(self) -> tuple[int, int] | None:
        """(chain, step) of the first that was not finite, by index; None if all are finite."""
        return None


class Paced(Protocol):
    """What a run needs from its method."""

    @property
    def log_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...


class Run:
    """Steps, draws, history, checkpoints, Ctrl-C: one run of all chains."""

    def __init__(
        self, name: str, sampling: Sampling, joint: Joint, network: Network, steps: int, kept: Iterable[int],
        method: Paced, file: Checkpoint | None, progress: Show, chains: range,
    ) -> None:  # fmt: skip
        self.name, self.sampling, self.joint, self.network = name, sampling, joint, network
        self.steps, self.kept, self.method, self.file, self.show = steps, sorted(kept), method, file, progress
        self.chains = chains
        self.step = 0
        self.draws: list[Tensor] = []
        self.history: list[dict[str, float]] = []

    def run(self) -> Empirical:
        """Run to the last step, or to Ctrl-C."""
        self._load()
        first, stopped = self.step, "finished"
        keep = frozenset(self.kept)
        started = time.monotonic() - (self.history[-1]["seconds"] if self.history else 0.0)
        with Progress(self.name, self.steps, self.show) as progress, Interrupt() as interrupt:
            try:
                while self.step < self.steps:
                    with interrupt.held():
                        self._advance(keep, started)
                    progress.update(self.step, **{k: v for k, v in self.history[-1].items() if k in SHOWN})
            except KeyboardInterrupt:
                stopped = "interrupted"
                if self.step > first:
                    self._check()
                    self._save()
                if not self.draws:
                    again = "" if self.file is None else "; the checkpoint has the run so far, call fit to continue"
                    raise KeyboardInterrupt(
                        f"{self.name} was interrupted after {self.step} steps, before its first draw (step "
                        f"{self.kept[0] + 1}): there is nothing to return{again}"
                    ) from None
        posterior = self._posterior(range(len(self.chains)))
        posterior.stopped = stopped
        return posterior

    def stream(self, seed: int) -> Iterator[Empirical]:
        """The positions of the chains after each kept step."""
        keep, started, device = frozenset(self.kept), time.monotonic(), self.sampling.position.device
        with Progress(self.name, self.kept[0] + 1, self.show) as progress:
            while not self.draws:
                with rng.isolated(part_seed(seed, self.step), device):
                    self._advance(keep, started)
                progress.update(self.step)
        while True:
            if self.draws:
                stack = self.joint.tensors(self.draws.pop())
                yield Empirical(self.joint.target, self.network, stack, self.history, chains=len(self.chains))
            if self.step >= self.steps:
                return
            with rng.isolated(part_seed(seed, self.step), device):
                self._advance(keep, started)

    def _advance(self, keep: frozenset[int], started: float) -> None:
        sampling, step = self.sampling, self.step
        sampling.advance(step)
        logging = step % self.method.log_every == 0 or step + 1 == self.steps
        saving = (step + 1) % self.method.checkpoint_every == 0 or step + 1 == self.steps
        if step in keep or logging or saving:
            self._check()
        if step in keep:
            self.draws.append(sampling.position)
        if logging:
            self.history.append({"step": float(step), **sampling.record(), "seconds": time.monotonic() - started})
        self.step += 1
        if saving:
            self._save()

    def _check(self) -> None:
        """Raise if a chain is not finite: such values are never kept, saved or returned."""
        lost = self.sampling.lost()
        if lost is None:
            return
        chain, step = lost
        others = [c for c in range(len(self.chains)) if c != chain and bool(self.sampling.position[c].isfinite().all())]
        error = DivergenceError(
            f"step {step}: chain {self.chains[chain]} of {self.name} is not finite. The run stops and the last "
            "checkpoint is kept; try a smaller lr or standardized inputs. The draws of the other chains so far "
            f"are in the 'posterior' of this error ({len(self.draws) * len(others)} draws)"
        )
        if self.draws and others:
            error.posterior = self._posterior(others)
            error.posterior.stopped = "diverged"
        raise error

    def _posterior(self, chains: Iterable[int]) -> Empirical:
        """The draws of these chains."""
        index = list(chains)
        stacked = torch.stack(self.draws)[:, index].transpose(0, 1)  # (C, K, D)
        mixing = self._means() | self.sampling.mixing(stacked)
        stack = self.joint.tensors(stacked.reshape(-1, stacked.shape[-1]))
        count = 1 if self.sampling.apart else len(index)
        return Empirical(self.joint.target, self.network, stack, self.history, chains=count, mixing=mixing)

    def _means(self) -> dict[str, float]:
        """The mean acceptance rate since the first draw and the number of divergences, where the history has them."""
        since = [record for record in self.history if record["step"] >= self.kept[0]]
        accept = [record["accept"] for record in since if "accept" in record]
        found = {"accept": fmean(accept)} if accept else {}
        return found | {key: since[-1][key] for key in ("divergences",) if since and key in since[-1]}

    def _save(self) -> None:
        if self.file is not None:
            tensors, tree = split(self.sampling.state(), "sampling")
            if self.draws:
                tensors["draws"] = torch.stack(self.draws)
            self.file.write(tensors, {"sampling": tree, "step": self.step, "history": self.history})

    def _load(self) -> None:
        found = None if self.file is None else self.file.read()
        if self.file is None or found is None:
            return
        tensors, config = found
        position = self.sampling.position
        tensors = {name: value.to(position.device) for name, value in tensors.items()}
        with making("run like this one", self.file.path):
            self.sampling.load(join(tensors, config["sampling"]))
            self.step, self.history = config["step"], config["history"]
        self.draws = list(tensors["draws"]) if "draws" in tensors else []


SHOWN = ("log_joint", "accept", "step_size", "lr", "beta", "log_weight")


def mean_of(values: Tensor) -> float:
    """The mean over chains (C,) as a number; NaN where a chain has none."""
    return float(values.mean()) if values.numel() else math.nan
