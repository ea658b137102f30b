"""Processes that share one fit, started by torchrun: each computes its rows of every batch."""

from __future__ import annotations

import atexit
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bayou.core import rng
from bayou.core.files import StrPath
from bayou.core.progress import BayouWarning
from bayou.training.inputs import Batch, rows_of
from bayou.training.seeds import part_seed

# The time to find out which process has ended: after its connections it may need some to end
# itself.
LOST_SECONDS = 10.0
POLL_SECONDS = 0.02  # between two looks at the other processes
LOST_KEY = "bayou/lost"  # the key of the ended processes in the store of all processes


class LostRankError(RuntimeError):
    """Another process of torchrun has ended during a fit that they share."""


class Ranks:
    """One of several processes that share their work.

    The loss of a batch is a mean over its rows plus a term that does not depend on them, and so are
    its gradients. With the loss of its own rows from every process, Σ_r share_r·loss_r is the loss
    of the whole batch. So it is with ``draws``, where the draws of a step take the place of the
    rows.

    Args:
        rank: the number of this process. Default: 0.
        size: the number of processes. Default: 1, which shares nothing.
        draws: share the draws of a step, and not the rows of a batch.
        checkpoint: the file of the fit, which the error names if a process ends.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        draws: bool = False,
        checkpoint: StrPath | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.draws = draws
        self.checkpoint = checkpoint
        self._has_noted_unshared_work = False

    def note_unshared(self, work: str) -> None:
        """Warn once in a fit, in the first process, of work that every process does as a whole.

        Args:
            work: what is not shared, as the object of a sentence.
        """
        if self.size > 1 and self.rank == 0 and not self._has_noted_unshared_work:
            self._has_noted_unshared_work = True
            warnings.warn(
                f"the {self.size} processes of torchrun do not share {work}: each computes all of "
                "it, in the time of one process; MAP, MLE, VI, IVON, SWAG, SGLD and SGHMC as "
                "objects share the rows of every batch",
                BayouWarning,
                stacklevel=3,
            )

    def _all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        """Reduce a tensor over the processes, by default to its sum.

        Raises:
            LostRankError: if a process has ended, with its number.
        """
        if operation is None:
            operation = dist.ReduceOp.SUM
        try:
            dist.all_reduce(tensor, operation)
        except RuntimeError:
            lost = find_lost_ranks(self.rank)
            if not lost:
                raise
            raise LostRankError(self._describe_loss(lost)) from None

    def _describe_loss(self, lost: str) -> str:
        """Return the text of the error for processes that have ended, with what to do."""
        ended = (
            f"rank {lost} of the {self.size} processes has ended, so that their fit cannot continue"
        )
        if self.checkpoint is None:
            return f"{ended}; with bayou.fit(..., checkpoint=FILE) the next start would continue it"
        if Path(self.checkpoint).exists():
            return (
                f"{ended}; start all of them again to continue from the checkpoint "
                f"{self.checkpoint}"
            )
        return (
            f"{ended}; the checkpoint {self.checkpoint} was not written yet: start all of them "
            "again"
        )

    def rows(self, batch: Batch) -> tuple[Batch, float]:
        """Return the rows of this process and their share of the batch.

        They are rows rank, rank + size, ...; a process without any gets the first row with a share
        of 0.

        Args:
            batch: the pair (x, y) of all rows.
        """
        if self.size == 1 or self.draws:
            return batch, 1 / self.size
        x, y = batch
        has_rows = self.rank < len(y)
        index = slice(self.rank, None, self.size) if has_rows else slice(1)
        share = len(y[index]) / len(y) if has_rows else 0.0
        return (rows_of(x, index), y[index]), share

    def draws_of_rank(self, samples: int) -> slice | None:
        """Return which draws of a step this process computes; None for all.

        Args:
            samples: the number of draws of a step.

        Raises:
            ValueError: unless each process has as many.
        """
        if not self.draws or self.size == 1:
            return None
        if samples % self.size:
            raise ValueError(
                f"{self.size} processes cannot share {samples} samples; use a multiple, or "
                "draws=False"
            )
        return slice(self.rank, None, self.size)

    def mean(self, tensors: Sequence[Tensor], share: float) -> list[Tensor]:
        """Return Σ_r share_r·tensor_r over the processes, the same bits in all, in one reduction.

        Args:
            tensors: those of this process, on one device.
            share: the weight of this process.
        """
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) * share
        self._all_reduce(flat)
        means = flat.split([tensor.numel() for tensor in tensors])
        return [
            mean.reshape(tensor.shape).to(tensor.dtype)
            for mean, tensor in zip(means, tensors, strict=True)
        ]

    def spread(self, count: int) -> list[int]:
        """Return the numbers of the rows of this process, as many as in any other process.

        The last row may be there twice.

        Args:
            count: the number of rows.
        """
        return [min(row, count - 1) for row in range(self.rank, count + self.rank, self.size)]

    def gather_rows(self, outputs: Tensor, count: int) -> Tensor:
        """Return the outputs of all rows, (S, count, *out), in each process.

        Args:
            outputs: those of the rows of ``spread``.
            count: the number of rows.
        """
        all_outputs = outputs.new_zeros(len(outputs), count, *outputs.shape[2:])
        row_count = len(range(self.rank, count, self.size))
        all_outputs[:, self.rank :: self.size] = outputs[:, :row_count]
        self._all_reduce(all_outputs)  # every number is a sum with zeros: exact
        return all_outputs

    def first(self, number: int, device: torch.device) -> int:
        """Return the number of the first process, such as a seed."""
        if self.size == 1:
            return number
        return int(self.mean([torch.tensor(number, device=device)], self.rank == 0)[0])

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true in some process."""
        # The GPU would have to be waited for.
        device = "cuda"
        if self.size == 1 or "cpu" in str(dist.get_backend_config()):
            device = "cpu"
        return bool(self.mean([torch.tensor(float(flag), device=device)], 1.0)[0])

    def differing(self, codes: Mapping[str, str], device: torch.device) -> list[str]:
        """Return the names whose codes are not the same in all processes.

        Args:
            codes: hexadecimal numbers by name.
            device: on which to compare them.
        """
        numbers = torch.tensor([int(code[:15], 16) for code in codes.values()], device=device)
        extremes = torch.stack([numbers, -numbers])  # the largest, and minus the smallest
        self._all_reduce(extremes, dist.ReduceOp.MAX)
        is_same = (extremes[0] == -extremes[1]).tolist()
        return [name for name, same in zip(codes, is_same, strict=True) if not same]


_PROCESSES: dict[int, tuple[str, int]] = {}  # rank → machine and process id
_STORES: list[Any] = []  # the store of the processes, if ``sharing`` has made it


def find_lost_ranks(rank: int) -> str:
    """Return the ranks of processes that have ended, separated by commas.

    Args:
        rank: that of this process.

    Returns:
        The ranks; empty if no process that can be observed from here has ended.
    """
    machine = socket.gethostname()
    others = {other: process for other, process in _PROCESSES.items() if other != rank}
    deadline = time.monotonic() + LOST_SECONDS
    while time.monotonic() < deadline:
        with suppress(RuntimeError, IndexError):  # the store may have ended with its process
            if _STORES[0].check([LOST_KEY]):
                return str(_STORES[0].get(LOST_KEY).decode())
        ended = [
            other
            for other, (host, process) in others.items()
            if host == machine and _has_ended(process)
        ]
        if ended:
            lost = ", ".join(map(str, ended))
            with suppress(RuntimeError, IndexError):  # others may see this process end, too
                _STORES[0].set(LOST_KEY, lost)
            return lost
        time.sleep(POLL_SECONDS)
    on_other_machines = [str(other) for other, (host, _) in others.items() if host != machine]
    return " or ".join(on_other_machines)


def _has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended; False where this cannot be known."""
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # of another user, or a system without /proc
        return False
    return state in ("Z", "X")  # it waits for its parent only


def _exchange_processes(size: int) -> None:
    """Tell all processes the machine and the id of each."""
    if "cpu" not in str(dist.get_backend_config()):
        return
    processes: list[Any] = [None] * size
    dist.all_gather_object(processes, (socket.gethostname(), os.getpid()))
    _PROCESSES.update(enumerate(processes))


ALONE = Ranks()
_RANKS: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


def current() -> Ranks:
    """Return the processes that share the work of this block."""
    return _RANKS.get() or ALONE


@contextmanager
def sharing(
    enabled: bool = True, *, draws: bool = False, checkpoint: StrPath | None = None
) -> Iterator[Ranks]:
    """Share the rows of every batch and prediction in the block among the processes of torchrun.

    Every process must run the same code with the same arguments and seeds. Without torchrun nothing
    changes. ``bayou.fit`` does this by itself, unless it is inside such a block: of
    ``sharing(False)``, where each works alone.

    Args:
        enabled: False: each process works alone.
        draws: VI and IVON share the draws of a step (``samples``) instead, each for all rows of the
            batch.
        checkpoint: the file of the fit, which the error names if a process ends.
    """
    ranks = _RANKS.get() or ALONE
    if enabled and _RANKS.get() is None and dist.is_available():
        ranks = _ranks_of_torchrun(draws)
    if ranks.size > 1 and checkpoint is not None:
        ranks = Ranks(ranks.rank, ranks.size, draws=ranks.draws, checkpoint=checkpoint)
    token = _RANKS.set(ranks)
    try:
        yield ranks
    finally:
        _RANKS.reset(token)


def _ranks_of_torchrun(draws: bool) -> Ranks:
    """Return the processes that torchrun started, connected; this process alone without it."""
    is_started_by_torchrun = (
        "MASTER_PORT" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
    )
    if not dist.is_initialized() and is_started_by_torchrun:
        _connect_processes()
    if not dist.is_initialized():
        return ALONE
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), draws=draws)
    if ranks.size > 1 and not _PROCESSES:
        _exchange_processes(ranks.size)
    return ranks


def _connect_processes() -> None:
    """Connect the processes of torchrun, with a backend for each type of device."""
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    # After a restart the store has the addresses of the processes before.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(restarts, store)  # type: ignore[attr-defined]
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    _STORES[:] = [store]
    atexit.register(dist.destroy_process_group)


def reseed_for_rank(device: torch.device) -> None:
    """Let each process but the first draw noise of its rows from its own stream from here on.

    A compiled step draws as one process.
    """
    if torch.compiler.is_compiling():
        return
    rank = current().rank
    if rank:
        rng.reseed(part_seed(rng.integer(None), "rank", rank), device)
