"""Ensembles: several runs of one method from different initial weights as one posterior."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import nn

from bayou import rng
from bayou.files import FileError, StrPath, write_text
from bayou.inference.members import Init, member_seed, member_target, vmap_ensemble
from bayou.inference.method import Method, identity
from bayou.methods.point import MAP
from bayou.params import Params, stack
from bayou.posteriors import load
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.mixture import Mixture
from bayou.posteriors.posterior import NOISE, Posterior
from bayou.progress import Progress, Show, prefixed
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.seeds import as_int_seed, part_seed

POLL = 0.2  # seconds between two checks of the files of other processes
GRACE = 10.0  # seconds for a process to remove the failure file of an earlier call
FAILURES = (ArithmeticError, RuntimeError, MemoryError)  # of one member; a ValueError concerns the call and ends it


class EnsembleError(RuntimeError):
    """Members failed or are missing.

    Args:
        message: which members, and why.
        failures: member → why.
        posterior: the other members, None without any.
    """

    def __init__(self, message: str, failures: dict[int, str], posterior: Posterior | None) -> None:
        super().__init__(message)
        self.failures, self.posterior = failures, posterior


@final
@dataclass(frozen=True)
class Ensemble(Method):
    """q(w) = 1/n Σ_i q_i(w): n runs of a method, each with its own seed and initial weights.

    Deep ensembles (Lakshminarayanan et al. 2017) for ``of`` = MAP() or MLE(): n points, (n, *shape) each, with the
    running statistics and the learned noise of each. Of any other method: a mixture of its posteriors.

    ``init``: "reset" draws initial weights by the ``reset_parameters()`` of every module (frozen parameters stay);
    "keep" starts every member at the network's weights; a function is called with each member's copy of the network and
    changes it in place. None, the default, is "reset" for a network with weights as drawn by ``reset_parameters()``,
    and otherwise an error: a tensor (a weight of another scale, the zeros of a low-rank adapter, moved statistics) was
    trained, loaded or set. ``bootstrap``: every member is trained on N rows drawn with replacement (Breiman 1996).

    ``parallel``: None trains the members one after another; "vmap" trains them together, as one network with stacked
    weights. Without it ``checkpoint`` is a folder: member-000.bayou for a finished member,
    member-000.run for the current run, from which the same call continues bit for bit. Ctrl-C returns the finished
    members (or the current one, if there are none), ``stopped="interrupted"``. A failed member does not stop the
    others: when they are finished, an ``EnsembleError`` names it and has the others as ``posterior``.

    Under torchrun the members are distributed over the processes, which communicate through the checkpoint folder;
    every process returns the whole ensemble, and a killed one loses only the steps of its current member since the last
    checkpoint. A process that waits ``timeout`` seconds without any change in the files of the missing members raises
    an ``EnsembleError``, so this must be longer than the time between two checkpoints.

    ``parallel="vmap"`` is for MLE and MAP of small networks. Its members are those of ``parallel=None`` up to rounding,
    unless a forward pass is random (dropout). ``checkpoint`` is one file, a record of the history is the mean over
    members, and a failed member ends the run.
    """

    n: int = 5
    of: Method = field(default_factory=MAP)
    parallel: Literal["vmap"] | None = None
    init: Init = None
    bootstrap: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self._check_whole("n")
        if self.parallel is not None:
            self._check_choice("parallel", ("vmap",))
        self._check_positive("timeout")
        if not isinstance(self.of, Method):
            raise ValueError(f"Ensemble of must be a method such as MAP(), got {self.of!r}")
        if isinstance(self.of, Ensemble):
            raise ValueError("an ensemble of ensembles is one ensemble; pass a larger n")
        if self.init not in (None, "reset", "keep") and not callable(self.init):
            raise ValueError(f"Ensemble init must be 'reset', 'keep' or a function of a network, got {self.init!r}")
        if self.bootstrap and getattr(self.of, "validation", False):
            raise ValueError(
                "bootstrap draws rows with replacement, so that a row could be in both training and held-out data; use "
                "validation=0 or bootstrap=False"
            )

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The members' batch size."""
        return self.of.batch_size

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, init=self.init or "reset")  # members that all start at the mode would be one network

    def starts(self, target: Target, seed: int) -> Params | None:
        if self.bootstrap or not isinstance(self.of, MAP) or not self.of.open_ended:
            return None
        seeds = [member_seed(seed, member) for member in range(self.n)]
        return stack([member_target(target, self.init or "reset", own).start() for own in seeds])

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Posterior:
        """Train all members, or those that are not in the checkpoint folder yet."""
        seed = as_int_seed(seed)
        batches = as_data(data, self.batch_size)
        target = replace(target, n=batches.n)
        seeds = [member_seed(seed, member) for member in range(self.n)]
        who = identity(self, target, batches, seed)
        who["method"]["fields"].pop("timeout")
        who["method"]["fields"]["init"] = who["method"]["fields"]["init"] or "reset"  # None only adds a check
        who["method"]["fields"]["of"]["fields"].pop("checkpoint_every", None)
        if self.parallel == "vmap":
            run = vmap_ensemble(self.of, target, self.init, [self._rows(batches, own) for own in seeds], seeds)
            file = None if checkpoint is None else Checkpoint(checkpoint, who)
            posterior = run.fit(seed, file, progress)
            posterior.target = replace(posterior.target, net=target.net)
            return posterior
        return _Members(self, target, batches, seeds, None if checkpoint is None else Folder(checkpoint, who)).fit(
            progress
        )

    def _rows(self, data: Data, seed: int) -> Data:
        """The data of one member."""
        if not self.bootstrap:
            return data
        if not isinstance(data, Rows):
            raise ValueError("bootstrap needs tensors or a Dataset, whose rows it can draw, got a DataLoader")
        uniform = rng.uniform(data.n, (), torch.empty((), dtype=torch.float64), part_seed(seed, "bootstrap"))
        return Rows(data.source, data.index[(uniform * data.n).long()], data.batch_size)


class Folder:
    """The checkpoint of an ensemble: a file that identifies the run, and the files of its members."""

    def __init__(self, path: StrPath, who: dict[str, Any]) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileError(f"cannot write {path}: the folder {self.path.parent} does not exist; create it first")
        if self.path.exists() and not self.path.is_dir():
            raise FileError(f"{path} is a file; the checkpoint of an ensemble is a folder: pass another name")
        self.path.mkdir(exist_ok=True)
        card = Checkpoint(self.path / "ensemble.run", who)
        if card.read() is None:
            if any(self.path.glob("member-*")):
                raise FileError(
                    f"{path} contains members without ensemble.run, so that their run is unknown; use another folder"
                )
            card.write({}, {})

    def finished(self, member: int) -> Path:
        """The file of a finished member."""
        return self.path / f"member-{member:03d}.bayou"

    def run(self, member: int) -> Path:
        """The checkpoint of an unfinished member; a method may add suffixes."""
        return self.path / f"member-{member:03d}.run"

    def note(self, member: int) -> Path:
        """The file that tells waiting processes that a member failed."""
        return self.path / f"member-{member:03d}.failed"

    def clean(self, member: int) -> None:
        """Remove the run of a finished member."""
        for path in self.path.glob(f"{self.run(member).name}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def load(self, member: int, net: nn.Module) -> Posterior | None:
        """A finished member; None if unfinished, or if only its run can restore it (files cannot store functions)."""
        if not self.finished(member).exists():
            return None
        try:
            return load(self.finished(member), net)
        except FileError:
            if any(self.path.glob(f"{self.run(member).name}*")):
                return None
            raise

    def save(self, member: int, posterior: Posterior, net: nn.Module) -> None:
        """Save a finished member; its checkpoint is removed, unless it is needed to restore the member."""
        posterior.save(self.finished(member))
        try:
            load(self.finished(member), net)
        except FileError:
            return
        self.clean(member)

    def wait(self, members: Sequence[int], timeout: float, progress: Show) -> dict[int, str]:
        """Wait for members of other processes; returns the reasons for missing ones."""
        seen: Any = None
        since = time.monotonic()
        with Progress("Ensemble: other processes", len(members), progress) as line:
            while missing := [member for member in members if not self.finished(member).exists()]:
                line.update(len(members) - len(missing))
                now = {
                    str(path): _stamp(path) for member in missing for path in self.path.glob(f"member-{member:03d}.*")
                }
                if now != seen:
                    seen, since = now, time.monotonic()
                waited, failed = time.monotonic() - since, [self.note(member).exists() for member in missing]
                if waited > timeout or (all(failed) and waited > min(GRACE, timeout)):
                    break
                time.sleep(POLL)
            line.update(len(members) - len(missing))
        return {member: self._why(member, timeout) for member in missing}

    def _why(self, member: int, timeout: float) -> str:
        try:
            return self.note(member).read_text(encoding="utf-8")
        except OSError:
            return f"its process made no progress for {timeout:g} s; if it was killed, the same call continues its run"


@dataclass
class _Members:
    """The run of an ensemble: the members one after another."""

    method: Ensemble
    target: Target
    data: Data
    seeds: list[int]
    folder: Folder | None

    def fit(self, progress: Show) -> Posterior:
        rank, world = ranks()
        folder, done, failures = self.folder, dict[int, Posterior](), dict[int, str]()
        if world > 1 and folder is None:
            raise ValueError(
                f"torchrun started {world} processes, which exchange files: pass checkpoint= a shared folder"
            )
        mine = range(rank, self.method.n, world)
        if folder is not None:
            for member in mine:
                folder.note(member).unlink(missing_ok=True)
        cause: BaseException | None = None
        stopped, partial = "finished", None
        try:
            for member in mine:
                try:
                    posterior = self._member(member, progress)
                except NotImplementedError:
                    raise
                except FAILURES as error:
                    failures[member], cause = f"{type(error).__name__}: {error}", error
                    if folder is not None:
                        write_text(folder.note(member), failures[member])
                    continue
                if posterior.stopped == "interrupted":
                    stopped, partial = "interrupted", posterior
                    break
                done[member] = posterior
            if folder is not None and stopped != "interrupted":
                others = [member for member in range(self.method.n) if member not in mine]
                failures |= folder.wait(others, self.method.timeout, progress) if others else {}
                done |= {member: self._member(member, False) for member in others if member not in failures}
        except KeyboardInterrupt:
            if not done:
                raise
            stopped = "interrupted"
        if not done and partial is not None:
            done = {member: partial}
        posterior_of_all = combine(done, self.target, stopped) if done else None
        if failures:
            raise EnsembleError(self._message(failures), failures, posterior_of_all) from cause
        assert posterior_of_all is not None
        return posterior_of_all

    def _member(self, member: int, progress: Show) -> Posterior:
        method, seed, folder = self.method, self.seeds[member], self.folder
        if folder is not None:
            found = folder.load(member, self.target.net)
            if found is not None:
                folder.clean(member)
                return found
        own = member_target(self.target, method.init, seed)
        file = None if folder is None else folder.run(member)
        rows = method._rows(self.data, seed)
        with prefixed(f"member {member + 1} of {method.n}:"):
            posterior = method.of.fit(own, rows, seed=seed, checkpoint=file, progress=progress)
        posterior.target = replace(posterior.target, net=self.target.net)  # whose buffers were not reset
        if folder is not None and posterior.stopped != "interrupted":
            folder.save(member, posterior, self.target.net)
        return posterior

    def _message(self, failures: dict[int, str]) -> str:
        each = "; ".join(f"member {member}: {why}" for member, why in sorted(failures.items()))
        kept = "" if self.folder is None else f" and in the folder {self.folder.path}"
        return (
            f"{len(failures)} of {self.method.n} members did not finish. {each}. The finished ones are in this error's "
            f"posterior{kept}"
        )


def ranks() -> tuple[int, int]:
    """The rank of this process and the number of processes, from the environment of torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def combine(members: dict[int, Posterior], target: Target, stopped: str = "finished") -> Posterior:
    """Members as one posterior: single points as a stack, anything else as a mixture."""
    parts = [members[member] for member in sorted(members)]
    history = [{"member": float(m), **record} for m in sorted(members) for record in members[m].history]
    points = [part for part in parts if isinstance(part, Empirical) and part.draws == 1]
    posterior: Posterior
    if len(points) == len(parts) and len({frozenset(point.stack) for point in points}) == 1:
        own = replace(points[0].target, net=target.net)
        posterior = Empirical(own, points[0].network, stack([_point(point, points) for point in points]), history)
    else:
        posterior = Mixture(parts, history)
    posterior.stopped = stopped
    return posterior


def _point(point: Empirical, points: list[Empirical]) -> Params:
    """The tensors of one member: its weights, the buffers that differ between members, its learned noise."""
    first = points[0].network.buffers()
    buffers = {
        name: value
        for name, value in point.network.buffers().items()
        if any(not torch.equal(other.network.buffers()[name], first[name]) for other in points)
    }
    noise = {f"{NOISE}{name}": value.detach() for name, value in point.target.likelihood.named_parameters()}
    own = {name: value[0] for name, value in point.stack.items()}
    return own | {name: value for name, value in (buffers | noise).items() if name not in own}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
