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

from bayou import rng
from bayou.files import StrPath
from bayou.progress import BayouWarning
from bayou.training.data import Batch, forward_inputs, rows_of
from bayou.training.seeds import part_seed

LOST_SECONDS = 2.0  # to find out which process has ended
LOST_KEY = "bayou/lost"  # in the store of the processes: what the first one found out


class LostRankError(RuntimeError):
    """Another process of torchrun has ended during a fit that they share."""


class Ranks:
    """Process ``rank`` of ``size`` that share their work; by default one alone.

    The loss of a batch is a mean over its rows plus a term that does not depend on them, and so are
    its gradients. With the loss of its own rows from every process, Σ_r share_r·loss_r is the loss
    of the whole batch. So it is with ``draws``, where the draws of a step take the place of the
    rows.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        draws: bool = False,
        checkpoint: StrPath | None = None,
    ) -> None:
        self.rank, self.size, self.draws = rank, size, draws
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
                f"the {self.size} processes of torchrun do not share {work}: each computes all of it, in the time of "
                "one process; MAP, MLE, VI, IVON, SWAG, SGLD and SGHMC as objects share the rows of every batch",
                BayouWarning,
                stacklevel=3,
            )

    def _all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        """Reduce a tensor over the processes; a LostRankError that names a process that has
        ended.
        """
        try:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if operation is None else operation)
        except RuntimeError:
            lost = find_lost_ranks(self.rank)
            if not lost:
                raise
            raise LostRankError(self._describe_loss(lost)) from None

    def _describe_loss(self, lost: str) -> str:
        ended = (
            f"rank {lost} of the {self.size} processes has ended, so that their fit cannot continue"
        )
        if self.checkpoint is None:
            return f"{ended}; with bayou.fit(..., checkpoint=FILE) the next start would continue it"
        if Path(self.checkpoint).exists():
            return f"{ended}; start all of them again to continue from the checkpoint {self.checkpoint}"
        return f"{ended}; the checkpoint {self.checkpoint} was not written yet: start all of them again"

    def rows(self, batch: Batch) -> tuple[Batch, float]:
        """Rows rank, rank + size, ... of a batch, and their share of it; without any, the first
        with a share of 0.
        """
        if self.size == 1 or self.draws:
            return batch, 1 / self.size
        x, y = batch
        own = slice(self.rank, None, self.size) if self.rank < len(y) else slice(1)
        inputs = rows_of(forward_inputs(x), own)
        share = len(y[own]) / len(y) if self.rank < len(y) else 0.0
        return (inputs if isinstance(x, tuple | list) else inputs[0], y[own]), share

    def own_draws(self, samples: int) -> slice | None:
        """Of the draws of a step those of this process; None for all. A ValueError unless each has
        as many.
        """
        if not self.draws or self.size == 1:
            return None
        if samples % self.size:
            raise ValueError(
                f"{self.size} processes cannot share {samples} samples; use a multiple, or draws=False"
            )
        return slice(self.rank, None, self.size)

    def mean(self, tensors: Sequence[Tensor], share: float) -> list[Tensor]:
        """Σ_r share_r·tensor_r over the processes, which all get the same bits, in one
        reduction.
        """
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) * share
        self._all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]

    def spread(self, count: int) -> list[int]:
        """Of ``count`` rows those of this process, as many as in any other: the last may be there
        twice.
        """
        return [min(row, count - 1) for row in range(self.rank, count + self.rank, self.size)]

    def joined(self, part: Tensor, count: int) -> Tensor:
        """The outputs (S, count, *out) of all rows from those of ``spread``: (S, B, *out) in each
        process.
        """
        whole = part.new_zeros(len(part), count, *part.shape[2:])
        whole[:, self.rank :: self.size] = part[:, : len(range(self.rank, count, self.size))]
        self._all_reduce(whole)  # every number is a sum with zeros: exact
        return whole

    def first(self, number: int, device: torch.device) -> int:
        """The number of the first process, such as a seed."""
        return (
            number
            if self.size == 1
            else int(self.mean([torch.tensor(number, device=device)], self.rank == 0)[0])
        )

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in some process."""
        device = (
            "cpu" if self.size == 1 or "cpu" in str(dist.get_backend_config()) else "cuda"
        )  # which would wait
        return bool(self.mean([torch.tensor(float(flag), device=device)], 1.0)[0])

    def differing(self, codes: Mapping[str, str], device: torch.device) -> list[str]:
        """The names whose codes, hexadecimal numbers, are not the same in all processes."""
        own = torch.tensor([int(code[:15], 16) for code in codes.values()], device=device)
        ends = torch.stack([own, -own])  # the largest, and minus the smallest
        self._all_reduce(ends, dist.ReduceOp.MAX)
        return [
            name
            for name, same in zip(codes, (ends[0] == -ends[1]).tolist(), strict=True)
            if not same
        ]


_PROCESSES: dict[int, tuple[str, int]] = {}  # rank → machine and process id
_STORES: list[Any] = []  # the store of the processes, if ``sharing`` has made it


def find_lost_ranks(own: int) -> str:
    """The ranks of processes that have ended, separated by commas; empty if it is none that can be
    seen from here.

    Args:
        own: the rank of this process.
    """
    machine = socket.gethostname()
    others = {rank: who for rank, who in _PROCESSES.items() if rank != own}
    until = time.monotonic() + LOST_SECONDS
    while time.monotonic() < until:
        with suppress(RuntimeError, IndexError):  # the store may have ended with its process
            if _STORES[0].check([LOST_KEY]):
                return str(_STORES[0].get(LOST_KEY).decode())
        ended = [
            rank
            for rank, (host, process) in others.items()
            if host == machine and _has_ended(process)
        ]
        if ended:
            lost = ", ".join(map(str, ended))
            with suppress(RuntimeError, IndexError):  # others may see this process end, too
                _STORES[0].set(LOST_KEY, lost)
            return lost
        time.sleep(0.02)
    elsewhere = [str(rank) for rank, (host, _) in others.items() if host != machine]
    return " or ".join(elsewhere)


def _has_ended(process: int) -> bool:
    """Whether a process of this machine has ended; False where this cannot be known."""
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
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (socket.gethostname(), os.getpid()))
    _PROCESSES.update(enumerate(found))


ALONE = Ranks()
_RANKS: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


def current() -> Ranks:
    """The processes that share the work of this block."""
    return _RANKS.get() or ALONE


@contextmanager
def sharing(
    enabled: bool = True, *, draws: bool = False, checkpoint: StrPath | None = None
) -> Iterator[Ranks]:
    """Inside, the processes of torchrun share the rows of every batch and of every prediction.

    ``draws``: VI and IVON share the draws of a step (``samples``) instead, each for all rows of the
    batch.

    Every process must run the same code with the same arguments and seeds. Without torchrun nothing
    changes. ``bayou.fit`` does this by itself, unless it is inside such a block: of
    ``sharing(False)``, where each works alone.
    ``checkpoint``: the file of the fit, which the error names if a process ends.
    """
    ranks = _RANKS.get() or ALONE
    if enabled and _RANKS.get() is None and dist.is_available():
        if (
            not dist.is_initialized()
            and "MASTER_PORT" in os.environ
            and int(os.environ.get("WORLD_SIZE", 1)) > 1
        ):
            store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            # After a restart the store has the addresses of the processes before.
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # type: ignore[attr-defined]
            gpus = torch.cuda.is_available() and dist.is_nccl_available()
            backend = (
                "cpu:gloo,cuda:nccl" if gpus else "gloo"
            )  # by the device of a tensor, whatever the machine has
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            _STORES[:] = [store]
            atexit.register(dist.destroy_process_group)
        if dist.is_initialized():
            ranks = Ranks(dist.get_rank(), dist.get_world_size(), draws=draws)
            if ranks.size > 1 and not _PROCESSES:
                _exchange_processes(ranks.size)
    if ranks.size > 1 and checkpoint is not None:
        ranks = Ranks(ranks.rank, ranks.size, draws=ranks.draws, checkpoint=checkpoint)
    token = _RANKS.set(ranks)
    try:
        yield ranks
    finally:
        _RANKS.reset(token)


def own_noise(device: torch.device) -> None:
    """Draw noise of single rows from here on: each process but the first from its own stream (if
    not compiled).
    """
    if not torch.compiler.is_compiling() and (rank := current().rank):
        rng.reseed(part_seed(rng.integer(None), "rank", rank), device)
