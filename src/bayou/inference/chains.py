"""A run of Markov chains: steps, draws, history, checkpoints, Ctrl-C, and the posterior of the
draws.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.files import join, making, read_file, split
from bayou.core.progress import Progress, Show
from bayou.inference.first_batch import check_first_batch
from bayou.inference.probe import Probe
from bayou.kernels import Joint
from bayou.posteriors.empirical import Empirical
from bayou.training.checkpoints import Checkpoint, check_fractions
from bayou.training.data import Data
from bayou.training.guards import Interrupt
from bayou.training.inputs import Batch, check_finite
from bayou.training.loop import move
from bayou.training.seeds import part_seed
from bayou.training.threads import largest_product, suitable_threads


class DivergenceError(FloatingPointError):
    """A chain is not finite. ``posterior`` has the draws of the other chains so far; None if there
    are none.
    """

    posterior: Empirical | None = None


class Sampling(ABC):
    """The chains of one run, C of them: ``chains`` has their numbers."""

    probe: Probe
    apart = False  # whether every draw is independent, so that the posterior has no chains

    def __init__(self, method: Any, joint: Joint, seed: int, chains: range) -> None:
        self.method, self.joint, self.seed, self.chains = method, joint, seed, chains

    def normal(self, name: str, step: int) -> Tensor:
        """Gaussian noise of a step: (C, D)."""
        like, seed = self.position, part_seed(self.seed, name, step)
        return rng.normal(len(self.chains), like.shape[1:], like, seed, self.chains.start)

    def mixing(self, draws: Tensor) -> dict[str, Any]:
        """The entries of ``posterior.mixing`` for these draws (C, K, D)."""
        return self.probe.mixing(draws, self.joint.start, self.method.temperature)

    @property
    def width(self) -> int:
        """The number of positions that a step evaluates together."""
        return len(self.chains)

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


class Run:
    """Steps, draws, history, checkpoints, Ctrl-C: one run of all chains, which ``make`` places at
    their start.

    ``method``: has ``log_every`` and ``checkpoint_every``. ``kept``: the steps after which
    positions are kept.
    """

    def __init__(
        self, method: Any, make: Callable[[], Sampling], seed: int, device: torch.device, steps: int,
        kept: Iterable[int], file: Checkpoint | None, progress: Show,
    ) -> None:  # fmt: skip
        self.name, self.method, self.seed = type(method).__name__, method, part_seed(seed, "run")
        with rng.isolated(self.seed, device):
            self.sampling, work = largest_product(make)  # it tries the first batch
        self.work, self.device, self.joint = work * self.sampling.width, device, self.sampling.joint
        self.steps, self.kept, self.file, self.show = steps, sorted(kept), file, progress
        self.chains = self.sampling.chains
        self.step = 0
        self.draws: list[Tensor] = []
        self.history: list[dict[str, float]] = []

    def run(self) -> Empirical:
        """The draws after the last step, or at Ctrl-C."""
        stopped = self.complete()
        return self._posterior(range(len(self.chains)), stopped)

    def joined(self, files: list[str], stopped: str) -> Empirical:
        """The draws of chains that ran apart, by their checkpoints; records are means over
        chains.
        """
        parts = [read_file(file, "checkpoint") for file in files]
        self.draws = list(
            torch.cat([tensors["draws"] for tensors, _ in parts], 1).to(self.device)
        )  # of (C, D)
        for each in zip(*(config["history"] for _, config in parts), strict=True):
            self.history.append({key: fmean(record[key] for record in each) for key in each[0]})
            if "divergences" in each[0]:  # a sum
                self.history[-1]["divergences"] *= len(parts)
        return self._posterior(range(len(parts)), stopped)

    def complete(self) -> str:
        """Run to the last step ("finished"), or to Ctrl-C ("interrupted")."""
        self._load()
        first, stopped = self.step, "finished"
        keep = frozenset(self.kept)
        started = time.monotonic() - (self.history[-1]["seconds"] if self.history else 0.0)
        with (
            rng.isolated(self.seed, self.device),
            suitable_threads(self.work),
            Progress(self.name, self.steps, self.show) as progress,
            Interrupt() as interrupt,
        ):
            try:
                while self.step < self.steps:
                    with interrupt.defer():
                        self._advance(keep, started)
                    progress.update(
                        self.step, **{k: v for k, v in self.history[-1].items() if k in SHOWN}
                    )
            except KeyboardInterrupt:
                stopped = "interrupted"
                if self.step > first:
                    self._check()
                    self._save()
                if not self.draws:
                    again = (
                        ""
                        if self.file is None
                        else "; the checkpoint has the run so far, call fit to continue"
                    )
                    raise KeyboardInterrupt(
                        f"{self.name} was interrupted after {self.step} steps, before its first draw (step "
                        f"{self.kept[0] + 1}): there is nothing to return{again}"
                    ) from None
        return stopped

    def stream(self) -> Iterator[Empirical]:
        """The positions of the chains after each kept step."""
        keep, started = frozenset(self.kept), time.monotonic()
        with Progress(self.name, self.kept[0] + 1, self.show) as progress:
            while not self.draws:
                with rng.isolated(part_seed(self.seed, self.step), self.device):
                    self._advance(keep, started)
                progress.update(self.step)
        while True:
            if self.draws:
                stack = self.joint.tensors(self.draws.pop())
                yield Empirical(
                    self.joint.target,
                    self.joint.network,
                    stack,
                    self.history,
                    chains=len(self.chains),
                )
            if self.step >= self.steps:
                return
            with rng.isolated(part_seed(self.seed, self.step), self.device):
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
            self.history.append(
                {"step": float(step), **sampling.record(), "seconds": time.monotonic() - started}
            )
        self.step += 1
        if saving:
            self._save()

    def _check(self) -> None:
        """Raise if a chain is not finite: such values are never kept, saved or returned."""
        lost = self.sampling.lost()
        if lost is None:
            return
        chain, step = lost
        others = [
            c
            for c in range(len(self.chains))
            if c != chain and bool(self.sampling.position[c].isfinite().all())
        ]
        error = DivergenceError(
            f"step {step}: chain {self.chains[chain]} of {self.name} is not finite. The run stops and the last "
            "checkpoint is kept; try a smaller lr or standardized inputs. The draws of the other chains are in the "
            "'posterior' of this error"
        )
        if self.draws and others:
            error.posterior = self._posterior(others, "diverged")
        raise error

    def _posterior(self, chains: Iterable[int], stopped: str) -> Empirical:
        """The draws of these chains."""
        index = list(chains)
        stacked = torch.stack(self.draws)[:, index].transpose(0, 1)  # (C, K, D)
        with rng.isolated(self.seed, self.device), suitable_threads(self.work):
            mixing = self._means() | self.sampling.mixing(stacked)
        stack = self.joint.tensors(stacked.reshape(-1, stacked.shape[-1]))
        count = 1 if self.sampling.apart else len(index)
        found = Empirical(
            self.joint.target, self.joint.network, stack, self.history, chains=count, mixing=mixing
        )
        found.stopped = stopped
        return found

    def _means(self) -> dict[str, float]:
        """The mean acceptance rate since the first draw and the number of divergences, where the
        history has them.
        """
        since = [record for record in self.history if record["step"] >= self.kept[0]]
        accept = [record["accept"] for record in since if "accept" in record]
        found = {"accept": fmean(accept)} if accept else {}
        return found | {
            key: since[-1][key] for key in ("divergences",) if since and key in since[-1]
        }

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
        tensors = {name: value.to(self.device) for name, value in tensors.items()}
        vectors = {
            name: value for name, value in tensors.items() if value.ndim > 1
        }  # others may count something
        check_fractions(self.file.path, vectors)
        with making("run like this one", self.file.path):
            self.sampling.load(join(tensors, config["sampling"]))
            self.step, self.history = config["step"], config["history"]
        self.draws = list(tensors["draws"]) if "draws" in tensors else []


SHOWN = ("log_joint", "accept", "step_size", "lr", "beta", "log_weight")


def mean_of(values: Tensor) -> float:
    """The mean over chains (C,) as a number; NaN where a chain has none."""
    return float(values.mean()) if values.numel() else math.nan


def check_data(joint: Joint, data: Data, start: Tensor) -> Callable[[Batch], None] | None:
    """Try the first batch at ``start`` (C, D); returns a check for further batches, see
    ``check_first_batch``.
    """
    weights = {
        name: value[0]
        for name, value in joint.tensors(start[:1]).items()
        if name in joint.network.names
    }
    return check_first_batch(
        joint.target, data, lambda *inputs: joint.network.call(weights, *inputs)
    )


def resident(joint: Joint, data: Data, start: Tensor) -> list[Batch]:
    """All batches, checked against the network at ``start`` (C, D) and on its device."""
    check = check_data(joint, data, start)
    batches = []
    for batch in data.ordered():
        (check or check_finite)(batch)
        batches.append(move(batch, start))
    rows = sum(len(y) for _, y in batches)
    if rows != data.n:
        raise ValueError(
            f"a pass over the data has {rows} of {data.n} rows; a DataLoader must not drop the last batch"
        )
    return batches
