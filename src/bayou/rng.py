"""All random numbers of the library.

A *seed* is one of three things, everywhere in bayou:

* an ``int``: every draw is a function of (seed, index), so draw 17 is the same for any chunk size
  and process;
* a ``torch.Generator``: draws come from that stream, in order;
* ``None``: draws come from torch's global stream (``torch.manual_seed`` governs it).

Torch has one global stream for all threads. Code that seeds it (``isolated``) or draws from it here
has exclusive access; other threads wait, and a long block releases it between its draws. A fit has
the same result in any thread.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

Seed = int | torch.Generator | None

Kind = Literal["normal", "uniform"]
_NUMPY: Final[dict[torch.dtype, Any]] = {torch.float32: np.float32, torch.float64: np.float64}

MIN_BLOCK_NUMBERS = 2**14  # numbers from which on a draw on the CPU uses a separate generator
SHARED = 2**18  # numbers from which blocks are drawn by several threads
PIECES = 8  # blocks that a large unseeded draw is cut into
BLOCK = 4096  # numbers drawn from one generator state; larger is faster, and wastes more of a short draw


States = dict[torch.Generator, Tensor]


class _Turns:
    """Exclusive access to the global streams of torch, first come, first served; reentrant."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.owner, self.depth = (
            0,
            0,
        )  # the thread with access, and the number of its nested entries
        self.waiting: deque[int] = deque()
        self.blocks: list[
            States
        ] = []  # the streams as they were before each isolated block of the owner

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self.owner != me:
            with self.changed:
                self.waiting.append(me)
                try:
                    self.changed.wait_for(self._next)
                except BaseException:  # Ctrl-C
                    self.waiting.remove(me)
                    self.changed.notify_all()
                    raise
                self.waiting.popleft()
                self.owner = me
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            with self.changed:
                self.owner = 0
                self.changed.notify_all()

    def _next(self) -> bool:
        return self.owner == 0 and self.waiting[0] == threading.get_ident()

    def offer(self) -> None:
        """Give waiting threads access, with the streams in their outer state; then restore those of
        this block.
        """
        me = threading.get_ident()
        if not self.waiting or self.owner != me:
            return
        depth, blocks, interrupt = self.depth, self.blocks, None
        outside = {stream: state for before in reversed(blocks) for stream, state in before.items()}
        ours = {stream: stream.get_state() for stream in outside}
        _put_back(outside)
        with self.changed:
            self.owner, self.depth, self.blocks = 0, 0, []
            self.waiting.append(me)
            self.changed.notify_all()
            while not self._next():
                try:
                    self.changed.wait()
                except (
                    BaseException
                ) as error:  # Ctrl-C: raised after access is regained, so that the blocks can exit
                    interrupt = error
            self.waiting.popleft()
            self.owner, self.depth, self.blocks = me, depth, blocks
        for stream in outside:  # from which others may have drawn
            next(before for before in blocks if stream in before)[stream] = stream.get_state()
        _put_back(ours)
        if interrupt is not None:
            raise interrupt

    def forked(self) -> None:
        """After a fork only the forking thread exists."""
        self.changed, self.waiting = threading.Condition(), deque()
        if self.owner != threading.get_ident():
            self.owner, self.depth, self.blocks = 0, 0, []


def _put_back(states: States) -> None:
    for stream, state in states.items():
        stream.set_state(state)


_TURNS = _Turns()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_TURNS.forked)


def fold(seed: Seed, *names: str | int) -> Seed:
    """A seed for a named part of a larger draw, independent of the seeds of its siblings."""
    if not _is_number(seed):
        return seed
    digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal(n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0) -> Tensor:
    """Standard normal noise for draws start .. start + n - 1: (n, *event), with the dtype and
    device of ``like``.
    """
    return _draw("normal", n, event, like, seed, start)


def uniform(
    n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0
) -> Tensor:
    """Uniform noise on [0, 1) for draws start .. start + n - 1: (n, *event), with the dtype and
    device of ``like``.
    """
    return _draw("uniform", n, event, like, seed, start)


def normal_like(x: Tensor) -> Tensor:
    """Standard normal noise shaped like x, governed by torch's global stream: inside compile and
    vmap too.

    A large draw on a CPU comes from numpy's ziggurat, seeded by that stream: faster than
    ``torch.randn`` there.
    """
    if torch.compiler.is_compiling():
        return torch.randn_like(x)
    plain = x.device.type == "cpu" and x.dtype in _NUMPY and x.numel() >= MIN_BLOCK_NUMBERS
    if not plain or torch._C._functorch.peek_interpreter_stack() is not None:
        with _TURNS:
            return torch.randn_like(x)
    first, blocks = (
        integer(None),
        PIECES if x.numel() >= SHARED else 1,
    )  # fixed, so that threads change no number
    seeds = [integer(fold(first, block)) for block in range(blocks)]
    return _numpy("normal", seeds, (-(-x.numel() // blocks),), x.dtype)[: x.numel()].reshape(
        x.shape
    )


def permutation(n: int, seed: Seed = None) -> Tensor:
    """A random order of 0 .. n - 1, on the CPU."""
    generator = _generator(fold(seed, "permutation"), torch.device("cpu"))
    with _TURNS if generator is None else nullcontext():
        return torch.randperm(n, generator=generator)


def integer(seed: Seed) -> int:
    """An int seed: the seed itself, or one drawn from its stream."""
    if _is_number(seed):
        return seed
    generator = _generator(seed, torch.device("cpu"))
    device = torch.device("cpu") if generator is None else generator.device
    with _TURNS if generator is None else nullcontext():
        return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def _streams(device: torch.device) -> list[torch.Generator]:
    """Torch's global streams of the CPU and of ``device``."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def states(device: torch.device) -> list[Tensor]:
    """The states of the global streams of the CPU and of ``device``."""
    return [stream.get_state() for stream in _streams(device)]


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's global streams of the CPU and of ``device``; only inside ``isolated``, which
    restores them.
    """
    _TURNS.offer()
    for stream in _streams(device):
        stream.manual_seed(seed)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's global streams of the CPU and of ``device``, seeded inside and restored afterwards.

    For user code that draws from the global stream (a density, a network with dropout). Blocks of
    several threads alternate, at ``reseed`` and at each draw; a thread inside a block must not wait
    for another thread.
    """
    with _TURNS:
        before = {stream: stream.get_state() for stream in _streams(device)}
        _TURNS.blocks.append(before)
        try:
            reseed(seed, device)
            yield
        finally:
            _TURNS.blocks.pop()
            _put_back(before)


def _is_number(seed: Seed) -> TypeGuard[int]:
    """Whether a seed is a number, not a stream; a ValueError if it is neither."""
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.Generator, type(None))):
        raise ValueError(f"seed must be an int, a torch.Generator or None, got {seed!r}")
    return isinstance(seed, int)


def _generator(seed: Seed, device: torch.device) -> torch.Generator | None:
    return torch.Generator(device).manual_seed(seed) if _is_number(seed) else seed  # type: ignore[return-value]


def _numpy(kind: Kind, seeds: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Blocks of noise on the CPU, one numpy generator each: (len(seeds)·shape[0], *shape[1:])."""
    out = np.empty((len(seeds), *shape), _NUMPY.get(dtype, np.float32))

    def fill(i: int) -> None:
        generator = np.random.Generator(np.random.SFC64(seeds[i]))
        (generator.standard_normal if kind == "normal" else generator.random)(
            dtype=out.dtype, out=out[i]
        )

    if out.size >= SHARED and len(seeds) > 1:
        with ThreadPoolExecutor(
            torch.get_num_threads()
        ) as pool:  # numpy releases the GIL while it draws
            list(pool.map(fill, range(len(seeds))))
    else:
        for i in range(len(seeds)):
            fill(i)
    drawn = torch.from_numpy(out.reshape(len(seeds) * shape[0], *shape[1:])).to(dtype)
    # A number just below 1 rounds to 1 in half precision.
    return (
        drawn
        if kind == "normal" or dtype in _NUMPY
        else drawn.clamp_max(1 - torch.finfo(dtype).eps / 2)
    )


def _torch(
    kind: Kind, shape: Sequence[int], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    sampler = torch.randn if kind == "normal" else torch.rand
    return sampler(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)


def _draw(kind: Kind, n: int, event: Sequence[int], like: Tensor, seed: Seed, start: int) -> Tensor:
    event = tuple(event)
    if isinstance(seed, bool) or not isinstance(seed, int):
        if seed is not None or torch.compiler.is_compiling():
            return _torch(kind, (n, *event), like, _generator(seed, like.device))
        with _TURNS:
            return _torch(kind, (n, *event), like, None)
    _TURNS.offer()
    # Indices are grouped into blocks with one generator each, so that a draw depends on its index
    # alone.
    size = max(1, BLOCK // max(1, math.prod(event)))
    seeds = [integer(fold(seed, block)) for block in range(start // size, -(-(start + n) // size))]
    if not seeds:
        return like.new_empty((0, *event))
    if like.device.type == "cpu":
        drawn = _numpy(kind, seeds, (size, *event), like.dtype)
    else:
        drawn = torch.cat(
            [_torch(kind, (size, *event), like, _generator(part, like.device)) for part in seeds]
        )
    offset = start % size
    return drawn[offset : offset + n]
