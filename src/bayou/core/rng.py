"""All random numbers of the library.

A *seed* is an ``int``, a ``torch.Generator`` or ``None``, everywhere in bayou.

With an ``int`` every draw is a function of (seed, index), so that draw 17 is the same for any chunk
size and process. With a ``torch.Generator`` draws come from that stream, in order. With ``None``
they come from torch's global stream, which ``torch.manual_seed`` seeds.

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

Distribution = Literal["normal", "uniform"]
_NUMPY: Final[dict[torch.dtype, Any]] = {torch.float32: np.float32, torch.float64: np.float64}

MIN_BLOCK_NUMBERS = 2**14  # numbers from which on a draw on the CPU uses a separate generator
SHARED = 2**18  # numbers from which blocks are drawn by several threads
PIECES = 8  # blocks that a large unseeded draw is cut into
# Numbers drawn from one generator state; larger is faster, and wastes more of a short draw.
BLOCK = 4096


States = dict[torch.Generator, Tensor]


class _Turns:
    """Exclusive access to the global streams of torch, first come, first served; reentrant."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.owner = 0  # the thread with access
        self.depth = 0  # the number of its nested entries
        self.waiting: deque[int] = deque()
        # The streams as they were before each isolated block of the owner.
        self.blocks: list[States] = []

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self.owner != thread:
            with self.changed:
                self.waiting.append(thread)
                try:
                    self.changed.wait_for(self._is_next)
                except BaseException:  # Ctrl-C
                    self.waiting.remove(thread)
                    self.changed.notify_all()
                    raise
                self.waiting.popleft()
                self.owner = thread
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            with self.changed:
                self.owner = 0
                self.changed.notify_all()

    def _is_next(self) -> bool:
        """Return whether this thread may have access now."""
        return self.owner == 0 and self.waiting[0] == threading.get_ident()

    def offer(self) -> None:
        """Give waiting threads access, with the streams in their outer state.

        Afterwards the streams continue where this block was.
        """
        thread = threading.get_ident()
        if not self.waiting or self.owner != thread:
            return
        outer_states = {
            stream: state for states in reversed(self.blocks) for stream, state in states.items()
        }
        inner_states = {stream: stream.get_state() for stream in outer_states}
        _set_states(outer_states)
        interrupt = self._wait_for_others(thread)
        for stream in outer_states:  # from which others may have drawn
            outermost = next(states for states in self.blocks if stream in states)
            outermost[stream] = stream.get_state()
        _set_states(inner_states)
        if interrupt is not None:
            raise interrupt

    def _wait_for_others(self, thread: int) -> BaseException | None:
        """Release access, and return once this thread has it again.

        Ctrl-C is returned, so that it is raised after access is regained: then the blocks can exit.
        """
        depth = self.depth
        blocks = self.blocks
        interrupt = None
        with self.changed:
            self.owner = 0
            self.depth = 0
            self.blocks = []
            self.waiting.append(thread)
            self.changed.notify_all()
            while not self._is_next():
                try:
                    self.changed.wait()
                except BaseException as error:
                    interrupt = error
            self.waiting.popleft()
            self.owner = thread
            self.depth = depth
            self.blocks = blocks
        return interrupt

    def reset_after_fork(self) -> None:
        """Forget all threads but the forking one, which alone exists after a fork."""
        self.changed = threading.Condition()
        self.waiting = deque()
        if self.owner != threading.get_ident():
            self.owner = 0
            self.depth = 0
            self.blocks = []


def _set_states(states: States) -> None:
    """Set the states of streams."""
    for stream, state in states.items():
        stream.set_state(state)


_TURNS = _Turns()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_TURNS.reset_after_fork)


def fold(seed: Seed, *names: str | int) -> Seed:
    """Return a seed for a named part of a larger draw, independent of the seeds of its siblings.

    Args:
        seed: the seed of the draw; a stream is returned as it is.
        names: the name of the part, and numbers in it.
    """
    if not _is_number(seed):
        return seed
    digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal(n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0) -> Tensor:
    """Draw standard normal noise for draws start .. start + n - 1: (n, *event).

    Args:
        n: the number of draws.
        event: the shape of a draw.
        like: a tensor of the dtype and device to draw.
        seed: an int, a stream, or None for torch's global stream. Default: None.
        start: the index of the first draw, of which an int seed makes a function. Default: 0.
    """
    return _draw("normal", n, event, like, seed, start)


def uniform(
    n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0
) -> Tensor:
    """Draw uniform noise on [0, 1) for draws start .. start + n - 1: (n, *event).

    Args:
        n: the number of draws.
        event: the shape of a draw.
        like: a tensor of the dtype and device to draw.
        seed: an int, a stream, or None for torch's global stream. Default: None.
        start: the index of the first draw, of which an int seed makes a function. Default: 0.
    """
    return _draw("uniform", n, event, like, seed, start)


def normal_like(x: Tensor) -> Tensor:
    """Draw standard normal noise shaped like x from torch's global stream.

    This works inside compile and vmap, too. A large draw on a CPU comes from numpy's ziggurat,
    seeded by that stream, where that is faster than ``torch.randn``: in double precision, and with
    several threads.

    Args:
        x: a tensor of the shape, dtype and device to draw.
    """
    if torch.compiler.is_compiling():
        return torch.randn_like(x)
    # One thread of numpy takes half the time of torch in double and three times it in single
    # precision.
    min_size = MIN_BLOCK_NUMBERS if x.dtype == torch.float64 else SHARED
    suits_numpy = x.device.type == "cpu" and x.dtype in _NUMPY and x.numel() >= min_size
    if not suits_numpy or torch._C._functorch.peek_interpreter_stack() is not None:
        with _TURNS:
            return torch.randn_like(x)
    first = integer(None)
    # The number of blocks is fixed, so that threads change no number.
    blocks = PIECES if x.numel() >= SHARED else 1
    seeds = [integer(fold(first, block)) for block in range(blocks)]
    block_size = -(-x.numel() // blocks)
    noise = _numpy("normal", seeds, (block_size,), x.dtype)
    return noise[: x.numel()].reshape(x.shape)


def permutation(n: int, seed: Seed = None) -> Tensor:
    """Draw a random order of 0 .. n - 1, on the CPU.

    Args:
        n: the number of items.
        seed: an int, a stream, or None for torch's global stream. Default: None.
    """
    generator = _generator(fold(seed, "permutation"), torch.device("cpu"))
    with _TURNS if generator is None else nullcontext():
        return torch.randperm(n, generator=generator)


def integer(seed: Seed) -> int:
    """Return an int seed: the seed itself, or one drawn from its stream.

    Args:
        seed: an int, a stream, or None for torch's global stream.
    """
    if _is_number(seed):
        return seed
    generator = _generator(seed, torch.device("cpu"))
    device = torch.device("cpu") if generator is None else generator.device
    with _TURNS if generator is None else nullcontext():
        return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def _streams(device: torch.device) -> list[torch.Generator]:
    """Return torch's global streams of the CPU and of ``device``."""
    if device.type == "mps":
        return [torch.default_generator, torch.mps._get_default_mps_generator()]
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def states(device: torch.device) -> list[Tensor]:
    """Return the states of the global streams of the CPU and of ``device``.

    Args:
        device: the device.
    """
    return [stream.get_state() for stream in _streams(device)]


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's global streams of the CPU and of ``device``.

    Only inside ``isolated``, which restores them.

    Args:
        seed: the seed.
        device: the device whose stream is seeded, in addition to that of the CPU.
    """
    _TURNS.offer()
    for stream in _streams(device):
        stream.manual_seed(seed)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global streams of the CPU and of ``device``, and restore them afterwards.

    For user code that draws from the global stream (a density, a network with dropout). Blocks of
    several threads alternate, at ``reseed`` and at each draw; a thread inside a block must not wait
    for another thread.

    Args:
        seed: the seed.
        device: the device whose stream is seeded, in addition to that of the CPU.
    """
    with _TURNS:
        before = {stream: stream.get_state() for stream in _streams(device)}
        _TURNS.blocks.append(before)
        try:
            reseed(seed, device)
            yield
        finally:
            _TURNS.blocks.pop()
            _set_states(before)


def _is_number(seed: Seed) -> TypeGuard[int]:
    """Return whether a seed is a number, not a stream; raise a ValueError if it is neither."""
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.Generator, type(None))):
        raise ValueError(f"seed must be an int, a torch.Generator or None, got {seed!r}")
    return isinstance(seed, int)


def _generator(seed: Seed, device: torch.device) -> torch.Generator | None:
    """Return the stream of a seed; None for torch's global stream."""
    return torch.Generator(device).manual_seed(seed) if _is_number(seed) else seed  # type: ignore[return-value]


def _numpy(
    distribution: Distribution, seeds: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Draw blocks on the CPU, one numpy generator each: (len(seeds)·shape[0], *shape[1:])."""
    out = np.empty((len(seeds), *shape), _NUMPY.get(dtype, np.float32))

    def fill(i: int) -> None:
        generator = np.random.Generator(np.random.SFC64(seeds[i]))
        if distribution == "normal":
            generator.standard_normal(dtype=out.dtype, out=out[i])
        else:
            generator.random(dtype=out.dtype, out=out[i])

    if out.size >= SHARED and len(seeds) > 1:
        # numpy releases the GIL while it draws.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(len(seeds))))
    else:
        for i in range(len(seeds)):
            fill(i)
    noise = torch.from_numpy(out.reshape(len(seeds) * shape[0], *shape[1:])).to(dtype)
    if distribution == "normal" or dtype in _NUMPY:
        return noise
    # A number just below 1 rounds to 1 in half precision.
    return noise.clamp_max(1 - torch.finfo(dtype).eps / 2)


def _torch(
    distribution: Distribution,
    shape: Sequence[int],
    like: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw from a stream of torch."""
    sampler = torch.randn if distribution == "normal" else torch.rand
    return sampler(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)


def _draw(
    distribution: Distribution,
    n: int,
    event: Sequence[int],
    like: Tensor,
    seed: Seed,
    start: int,
) -> Tensor:
    """Draw n events from index ``start`` on; with an int seed each depends on its index alone."""
    event = tuple(event)
    if isinstance(seed, bool) or not isinstance(seed, int):
        if seed is not None or torch.compiler.is_compiling():
            return _torch(distribution, (n, *event), like, _generator(seed, like.device))
        with _TURNS:
            return _torch(distribution, (n, *event), like, None)
    _TURNS.offer()
    # Indices are grouped into blocks with one generator each.
    size = max(1, BLOCK // max(1, math.prod(event)))
    blocks = range(start // size, -(-(start + n) // size))
    seeds = [integer(fold(seed, block)) for block in blocks]
    if not seeds:
        return like.new_empty((0, *event))
    if like.device.type == "cpu":
        noise = _numpy(distribution, seeds, (size, *event), like.dtype)
    else:
        block_draws = [
            _torch(distribution, (size, *event), like, _generator(block_seed, like.device))
            for block_seed in seeds
        ]
        noise = torch.cat(block_draws)
    offset = start % size
    return noise[offset : offset + n]
