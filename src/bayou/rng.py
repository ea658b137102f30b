"""The only door to randomness.

A *seed* is one of three things, everywhere in bayou:

* an ``int``: every draw is a function of (seed, index), so draw 17 is the same whatever the chunk size or process;
* a ``torch.Generator``: draws come from that stream, in order;
* ``None``: draws come from torch's global stream (``torch.manual_seed`` governs it).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

LOG_2PI: Final = math.log(2 * math.pi)  # of the density of normal noise

type_error = "seed must be an int, a torch.Generator or None, got {!r}"
Seed = int | torch.Generator | None

Kind = Literal["normal", "uniform"]
_NUMPY: Final[dict[torch.dtype, Any]] = {torch.float32: np.float32, torch.float64: np.float64}

LARGE = 2**14  # numbers from which a draw on the CPU is worth a generator of its own
SHARED = 2**18  # numbers from which blocks are drawn by several threads
PIECES = 8  # blocks that a large unseeded draw is cut into
BLOCK = 4096  # numbers drawn from one generator state; larger is faster, and wastes more of a short draw


def fold(seed: Seed, *names: str | int) -> Seed:
    """A seed for a named part of a larger draw, independent of the seeds of its siblings."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.Generator)):
        raise ValueError(type_error.format(seed))
    if isinstance(seed, torch.Generator):
        return seed
    digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal(n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0) -> Tensor:
    """Standard normal noise for draws start .. start + n - 1: (n, *event), with the dtype and device of ``like``."""
    return _draw("normal", n, event, like, seed, start)


def uniform(n: int, event: Sequence[int], like: Tensor, seed: Seed = None, start: int = 0) -> Tensor:
    """Uniform noise on [0, 1) for draws start .. start + n - 1: (n, *event), with the dtype and device of ``like``."""
    return _draw("uniform", n, event, like, seed, start)


def normal_like(x: Tensor) -> Tensor:
    """Standard normal noise shaped like x, governed by torch's global stream: inside compile and vmap too.

    A large draw on a CPU comes from numpy's ziggurat, seeded by that stream: faster than ``torch.randn`` there.
    """
    plain = x.device.type == "cpu" and x.dtype in _NUMPY and x.numel() >= LARGE
    if not plain or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return torch.randn_like(x)
    first, blocks = integer(None), PIECES if x.numel() >= SHARED else 1  # fixed, so that threads change no number
    seeds = [integer(fold(first, block)) for block in range(blocks)]
    return _numpy("normal", seeds, (-(-x.numel() // blocks),), x.dtype)[: x.numel()].reshape(x.shape)


def permutation(n: int, seed: Seed = None) -> Tensor:
    """A random order of 0 .. n - 1, on the CPU."""
    return torch.randperm(n, generator=_generator(fold(seed, "permutation"), torch.device("cpu")))


def integer(seed: Seed) -> int:
    """An int seed: the seed itself, or one drawn from its stream."""
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed
    generator = _generator(seed, torch.device("cpu"))
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's global streams of the CPU and of ``device``; only inside ``isolated``, which puts them back."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the other devices too
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's global streams of the CPU and of ``device``, seeded inside and put back afterwards.

    For code that is not bayou's (a density, a network with dropout) and draws from the global stream.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        reseed(seed, device)
        yield


def _generator(seed: Seed, device: torch.device) -> torch.Generator | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.Generator)):
        raise ValueError(type_error.format(seed))
    return torch.Generator(device).manual_seed(seed) if isinstance(seed, int) else seed


def _numpy(kind: Kind, seeds: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Blocks of noise on the CPU, one numpy generator each: (len(seeds)·shape[0], *shape[1:])."""
    out = np.empty((len(seeds), *shape), _NUMPY.get(dtype, np.float32))

    def fill(i: int) -> None:
        generator = np.random.Generator(np.random.SFC64(seeds[i]))
        (generator.standard_normal if kind == "normal" else generator.random)(dtype=out.dtype, out=out[i])

    if out.size >= SHARED and len(seeds) > 1:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy lets go of the interpreter while it draws
            list(pool.map(fill, range(len(seeds))))
    else:
        for i in range(len(seeds)):
            fill(i)
    return torch.from_numpy(out.reshape(len(seeds) * shape[0], *shape[1:])).to(dtype)


def _torch(kind: Kind, shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    sampler = torch.randn if kind == "normal" else torch.rand
    return sampler(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)


def _draw(kind: Kind, n: int, event: Sequence[int], like: Tensor, seed: Seed, start: int) -> Tensor:
    event = tuple(event)
    if isinstance(seed, bool) or not isinstance(seed, int):
        return _torch(kind, (n, *event), like, _generator(seed, like.device))
    # Indices are grouped into blocks, each with a generator of its own, so that a draw depends on its index alone.
    size = max(1, BLOCK // max(1, math.prod(event)))
    seeds = [integer(fold(seed, block)) for block in range(start // size, -(-(start + n) // size))]
    if not seeds:
        return like.new_empty((0, *event))
    if like.device.type == "cpu":
        drawn = _numpy(kind, seeds, (size, *event), like.dtype)
    else:
        drawn = torch.cat([_torch(kind, (size, *event), like, _generator(part, like.device)) for part in seeds])
    offset = start % size
    return drawn[offset : offset + n]
