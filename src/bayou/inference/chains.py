"""A run of Markov chains: steps, draws, history, checkpoints, Ctrl-C, and the posterior."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.files import join, making, read_file, split
from bayou.core.progress import Progress, Show
from bayou.inference.data_checks import check_first_batch
from bayou.kernels import Joint
from bayou.posteriors.empirical import Empirical
from bayou.training.checkpoints import Checkpoint, check_fractions
from bayou.training.data import Data
from bayou.training.guards import Interrupt
from bayou.training.inputs import Batch, check_finite
from bayou.training.loop import move
from bayou.training.seeds import part_seed
from bayou.training.threads import largest_product, suitable_threads

# Entries of the history that the progress line shows.
PROGRESS_ENTRIES = ("log_joint", "accept", "step_size", "lr", "beta", "log_weight")


class DivergenceError(FloatingPointError):
    """A chain is not finite.

    ``posterior`` has the draws of the other chains so far; it is None if there are none.
    """

    posterior: Empirical | None = None


class RunSettings(Protocol):
    """The settings of a method that a run of chains reads."""

    @property
    def log_every(self) -> int:
        """Steps from one record of the history to the next."""

    @property
    def checkpoint_every(self) -> int:
        """Steps from one checkpoint to the next."""


class Sampling(ABC):
    """The chains of one run, C of them, with the kernel that moves them.

    Args:
        method: the settings.
        joint: the log joint density of weights and data.
        seed: of the run; the noise of a chain depends on it and on the number of the chain.
        chains: the numbers of the chains.
    """

    draws_are_independent = False  # if they are, the posterior is not divided into chains

    def __init__(self, method: RunSettings, joint: Joint, seed: int, chains: range) -> None:
        self.method = method
        self.joint = joint
        self.seed = seed
        self.chains = chains

    def normal(self, name: str, step: int) -> Tensor:
        """Draw the Gaussian noise of a step, (C, D)."""
        position = self.position
        seed = part_seed(self.seed, name, step)
        return rng.normal(len(self.chains), position.shape[1:], position, seed, self.chains.start)

    @abstractmethod
    def mixing(self, draws: Tensor) -> dict[str, Any]:
        """Return the entries of ``posterior.mixing`` for these draws, (C, K, D)."""

    @property
    def width(self) -> int:
        """The number of positions that a step evaluates together."""
        return len(self.chains)

    @property
    @abstractmethod
    def position(self) -> Tensor:
        """The positions of the chains, (C, D)."""

    @abstractmethod
    def advance(self, step: int) -> None:
        """Take one step of all chains."""

    @abstractmethod
    def record(self) -> dict[str, float]:
        """Return numbers of the last step, for the history and the progress line."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state for the next step, as tensors and plain values."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""

    def lost(self) -> tuple[int, int] | None:
        """Return (chain index, step) of the first chain that was not finite; None if all are."""
        return None


class ChainRun:
    """One run of all chains: steps, draws, history, checkpoints and Ctrl-C.

    Args:
        method: the settings of the run.
        make_sampling: places the chains at their start; it evaluates the first batch.
        seed: of the fit.
        device: of the chains.
        steps: the number of steps.
        kept_steps: the steps after which positions are kept as draws.
        file: the checkpoint; None for no checkpoint.
        progress: whether and how progress is shown.
    """

    sampling: Sampling

    def __init__(
        self,
        method: RunSettings,
        make_sampling: Callable[[], Sampling],
        seed: int,
        device: torch.device,
        steps: int,
        kept_steps: Iterable[int],
        file: Checkpoint | None,
        progress: Show,
    ) -> None:
        self.name: str = type(method).__name__
        self.method = method
        self.seed: int = part_seed(seed, "run")
        with rng.isolated(self.seed, device):
            self.sampling, largest = largest_product(make_sampling)
        self.work: int = largest * self.sampling.width
        self.device = device
        self.joint: Joint = self.sampling.joint
        self.steps = steps
        self.kept_steps: list[int] = sorted(kept_steps)
        self.file = file
        self.show = progress
        self.chains: range = self.sampling.chains
        self.step: int = 0
        self.draws: list[Tensor] = []
        self.history: list[dict[str, float]] = []

    def run(self) -> Empirical:
        """Run to the last step, or to Ctrl-C, and return the posterior of the draws."""
        stopped = self.complete()
        return self._posterior(range(len(self.chains)), stopped)

    def join_chains(self, files: list[str], stopped: str) -> Empirical:
        """Return the posterior of chains that ran in separate processes.

        Args:
            files: the last checkpoint of each chain. Records of the history are means over chains.
            stopped: how the run ended.
        """
        checkpoints = [read_file(file, "checkpoint") for file in files]
        draws = torch.cat([tensors["draws"] for tensors, _ in checkpoints], 1)
        self.draws = list(draws.to(self.device))  # of (C, D)
        histories = [config["history"] for _, config in checkpoints]
        for records in zip(*histories, strict=True):
            mean = {key: fmean(record[key] for record in records) for key in records[0]}
            if "divergences" in mean:  # a sum
                mean["divergences"] *= len(checkpoints)
            self.history.append(mean)
        return self._posterior(range(len(checkpoints)), stopped)

    def complete(self) -> str:
        """Run to the last step ("finished"), or to Ctrl-C ("interrupted")."""
        self._load()
        first_step = self.step
        kept_steps = frozenset(self.kept_steps)
        seconds = self.history[-1]["seconds"] if self.history else 0.0
        start_time = time.monotonic() - seconds
        with (
            rng.isolated(self.seed, self.device),
            suitable_threads(self.work),
            Progress(self.name, self.steps, self.show) as progress,
            Interrupt() as interrupt,
        ):
            try:
                while self.step < self.steps:
                    with interrupt.defer():
                        self._advance(kept_steps, start_time)
                    progress.update(self.step, **self._progress_entries())
            except KeyboardInterrupt:
                if self.step > first_step:
                    self._check_finite()
                    self._save()
                if not self.draws:
                    raise self._interrupt_before_draws() from None
                return "interrupted"
        return "finished"

    def _progress_entries(self) -> dict[str, float]:
        """Return the numbers of the last record that the progress line shows."""
        record = self.history[-1]
        return {key: value for key, value in record.items() if key in PROGRESS_ENTRIES}

    def _interrupt_before_draws(self) -> KeyboardInterrupt:
        """Return the error for a run that was interrupted before its first draw."""
        advice = ""
        if self.file is not None:
            advice = "; the checkpoint has the run so far, call fit to continue"
        return KeyboardInterrupt(
            f"{self.name} was interrupted after {self.step} steps, before its first draw (step "
            f"{self.kept_steps[0] + 1}): there is nothing to return{advice}"
        )

    def stream(self) -> Iterator[Empirical]:
        """Yield the positions of the chains after each kept step."""
        kept_steps = frozenset(self.kept_steps)
        start_time = time.monotonic()
        with Progress(self.name, self.kept_steps[0] + 1, self.show) as progress:
            while not self.draws:
                with rng.isolated(part_seed(self.seed, self.step), self.device):
                    self._advance(kept_steps, start_time)
                progress.update(self.step)
        while True:
            if self.draws:
                yield Empirical(
                    self.joint.target,
                    self.joint.network,
                    self.joint.tensors(self.draws.pop()),
                    self.history,
                    chains=len(self.chains),
                )
            if self.step >= self.steps:
                return
            with rng.isolated(part_seed(self.seed, self.step), self.device):
                self._advance(kept_steps, start_time)

    def _advance(self, kept_steps: frozenset[int], start_time: float) -> None:
        """Take one step, then keep the draw, record and save where they are due."""
        step = self.step
        is_last = step + 1 == self.steps
        is_kept = step in kept_steps
        is_logged = step % self.method.log_every == 0 or is_last
        is_saved = (step + 1) % self.method.checkpoint_every == 0 or is_last
        self.sampling.advance(step)
        if is_kept or is_logged or is_saved:
            self._check_finite()
        if is_kept:
            self.draws.append(self.sampling.position)
        if is_logged:
            record = {"step": float(step), **self.sampling.record()}
            record["seconds"] = time.monotonic() - start_time
            self.history.append(record)
        self.step += 1
        if is_saved:
            self._save()

    def _check_finite(self) -> None:
        """Raise if a chain is not finite: such values are never kept, saved or returned."""
        divergence = self.sampling.lost()
        if divergence is None:
            return
        chain, step = divergence
        error = DivergenceError(
            f"step {step}: chain {self.chains[chain]} of {self.name} is not finite. The run stops "
            "and the last checkpoint is kept; try a smaller lr or standardized inputs. The draws "
            "of the other chains are in the 'posterior' of this error"
        )
        finite_chains = []
        for index in range(len(self.chains)):
            if index != chain and bool(self.sampling.position[index].isfinite().all()):
                finite_chains.append(index)
        if self.draws and finite_chains:
            error.posterior = self._posterior(finite_chains, "diverged")
        raise error

    def _posterior(self, chains: Iterable[int], stopped: str) -> Empirical:
        """Return the draws of these chains as a posterior."""
        index = list(chains)
        draws = torch.stack(self.draws)[:, index].transpose(0, 1)  # (C, K, D)
        with rng.isolated(self.seed, self.device), suitable_threads(self.work):
            mixing = self._history_summary() | self.sampling.mixing(draws)
        posterior = Empirical(
            self.joint.target,
            self.joint.network,
            self.joint.tensors(draws.reshape(-1, draws.shape[-1])),
            self.history,
            chains=1 if self.sampling.draws_are_independent else len(index),
            mixing=mixing,
        )
        posterior.stopped = stopped
        return posterior

    def _history_summary(self) -> dict[str, float]:
        """Return the mean acceptance rate since the first draw and the number of divergences.

        Each is left out where the history does not have it.
        """
        records = [record for record in self.history if record["step"] >= self.kept_steps[0]]
        rates = [record["accept"] for record in records if "accept" in record]
        summary: dict[str, float] = {}
        if rates:
            summary["accept"] = fmean(rates)
        if records and "divergences" in records[-1]:
            summary["divergences"] = records[-1]["divergences"]
        return summary

    def _save(self) -> None:
        """Write the checkpoint, if there is one."""
        if self.file is None:
            return
        tensors, tree = split(self.sampling.state(), "sampling")
        if self.draws:
            tensors["draws"] = torch.stack(self.draws)
        self.file.write(tensors, {"sampling": tree, "step": self.step, "history": self.history})

    def _load(self) -> None:
        """Continue from the checkpoint, if there is one."""
        contents = None if self.file is None else self.file.read()
        if self.file is None or contents is None:
            return
        tensors, config = contents
        tensors = {name: value.to(self.device) for name, value in tensors.items()}
        # Tensors with fewer axes may count something.
        vectors = {name: value for name, value in tensors.items() if value.ndim > 1}
        check_fractions(self.file.path, vectors)
        with making("run like this one", self.file.path):
            self.sampling.load(join(tensors, config["sampling"]))
            self.step = config["step"]
            self.history = config["history"]
        self.draws = list(tensors["draws"]) if "draws" in tensors else []


def mean_over_chains(values: Tensor) -> float:
    """Return the mean over chains as a number; NaN where there are none.

    Args:
        values: of the chains, (C,).
    """
    return float(values.mean()) if values.numel() else math.nan


def check_data(joint: Joint, data: Data, start: Tensor) -> Callable[[Batch], None] | None:
    """Check the first batch with the network at a start of chains.

    Args:
        joint: network, likelihood and prior.
        data: all batches.
        start: positions of the chains, (C, D), of which the first is used.

    Returns:
        A check for further batches, see ``check_first_batch``.
    """
    tensors = joint.tensors(start[:1])
    weights = {name: value[0] for name, value in tensors.items() if name in joint.network.names}
    return check_first_batch(
        joint.target, data, lambda *inputs: joint.network.call(weights, *inputs)
    )


def load_batches(joint: Joint, data: Data, start: Tensor) -> list[Batch]:
    """Return all batches, checked and on the device of the chains.

    Args:
        joint: network, likelihood and prior.
        data: all batches.
        start: positions of the chains, (C, D).
    """
    check = check_data(joint, data, start) or check_finite
    batches = []
    for batch in data.epoch():
        check(batch)
        batches.append(move(batch, start))
    rows = sum(len(y) for _, y in batches)
    if rows != data.n:
        raise ValueError(
            f"a pass over the data has {rows} of {data.n} rows; a DataLoader must not drop the "
            "last batch"
        )
    return batches
