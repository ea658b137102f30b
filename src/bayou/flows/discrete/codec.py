"""Lossless compression with a discrete flow, in −log₂ p(y) bits, by range asymmetric numeral
systems (rANS, Duda 2013).

Each symbol of x = f⁻¹(y) is coded by its probability under the base, given the preceding symbols.
Encoder and decoder need identical integers, so both run a float64 copy of the flow over the same
batches of rows and the same stages, and round the parameters to 2⁻¹², which removes rounding errors
(of another number of threads, say). Networks run on the device of the flow; tables and states are
on the CPU. A stream contains a digest of its model and two checksums, so that wrong data are never
returned.
"""

from __future__ import annotations

import copy
import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayou.flows.core.bases import CodecError
from bayou.flows.core.compose import MapChain, MapInverse
from bayou.flows.core.transform import Cost, Ladj, Map
from bayou.flows.layers.linear import Permutation
from bayou.flows.layers.squeeze import Squeeze

if TYPE_CHECKING:
    from bayou.flows.core.flow import Flow
    from bayou.flows.discrete.masses import DiscreteBase

MAGIC, VERSION = b"BYF", {"cpu": 2, "cuda": 3}  # the version determines the batch size
ROWS = {2: 1024, 3: 4096}  # rows per batch, by version
PRECISION = 28  # bits of a frequency
TOTAL = 1 << PRECISION
MAX_SYMBOLS = 1 << 20  # different symbols of a stream
LOW, WORD = 31, 32  # a state is in [2^31, 2^63) and exchanges words of 32 bits
LANE_BITS, LANES = (
    40_000,
    1024,
)  # the least number of bits per lane, each of which costs 7 bits; the most lanes
PARAMETER_STEPS = 4096.0  # per unit, of rounded parameters
MAX_AXES, MAX_NUMBERS, MAX_MAGNITUDE = (
    32,
    1 << 31,
    1 << 53,
)  # of a stream: batch axes, numbers, the least symbol
FORGED = "the checksum of the stream is correct, but it was not written by Flow.compress"
PARTS = np.arange(16)[:, None]

Ints = NDArray[np.int64]
Find = Callable[[slice, Ints], tuple[Ints, Ints, Ints]]


@torch.no_grad()
def compress(flow: Flow, y: Tensor, context: Tensor | None = None) -> bytes:
    """Encode data; see ``Flow.compress``."""
    model = Model(flow, context)
    rows, batch = model.rows(y)
    size = ROWS[version := VERSION[model.device.type]]
    symbols = [model.symbols(part, i * size) for i, part in enumerate(rows.split(size))]
    low, high = model.window(symbols)
    found = [np.zeros((2, 0), np.int64)]
    for part in symbols:

        def choose(members: list[int], params: Tensor, part: Tensor = part) -> Tensor:
            k, edges = part[:, members].flatten().numpy(), Edges(model.base, params, low, high)
            start = edges(k)
            found.append(np.stack([start, edges(k + 1) - start]))
            return part[:, members].to(params)

        model.base.unroll((len(part),), choose)
    start, count = np.concatenate(found, 1)
    bits = PRECISION * len(count) - float(np.log2(count).sum())
    lanes = int(min(max(1, bits // LANE_BITS), LANES))
    head = b"".join(map(_varint, (len(batch), *batch, 2 * abs(low) + (low < 0), high - low)))
    body = model.digest + _checksum(rows) + head + encode(start, count, lanes)
    return MAGIC + bytes([version]) + _crc(body, version) + body


@torch.no_grad()
def decompress(flow: Flow, data: bytes, context: Tensor | None = None) -> Tensor:
    """Decode the bytes of ``compress``; see ``Flow.decompress``."""
    model, (version, body) = Model(flow, context), _checked(data)
    if body[:8] != model.digest:
        given = ", and pass the same context" if flow.transform.context_dim else ""
        raise CodecError(
            "the stream was written by another model: its digest differs from that of this flow; load the weights "
            f"that compressed it{given}"
        )
    (axes,), place = _varints(body, 12, 1)
    batch, place = _varints(body, place, _at_most(axes, MAX_AXES))
    _at_most(math.prod(max(n, 1) for n in (*batch, *flow.event_shape)), MAX_NUMBERS)
    (start, width), place = _varints(body, place, 2)
    low = -(start // 2) if start % 2 else start // 2
    _at_most(abs(low), MAX_MAGNITUDE)
    if (low, low + _at_most(width, MAX_SYMBOLS - 1)) != (model.base.window or (low, low + width)):
        raise CodecError(
            f"{FORGED}: it has symbols from {low} to {low + width}, the flow {model.base.window}"
        )
    decoder = Decoder(body[place:])
    model.spread(batch)

    def choose(members: list[int], params: Tensor) -> Tensor:
        edges = Edges(model.base, params, low, low + width)
        k = decoder.take(params.shape[:-1].numel(), edges.find)
        return torch.from_numpy(k).reshape(params.shape[:-1]).to(params)

    parts = [torch.zeros(0, *flow.event_shape, dtype=torch.float64)]
    for first in range(0, total := math.prod(batch), size := ROWS[version]):
        parts.append(
            model.data(model.base.unroll((min(size, total - first),), choose), first).cpu()
        )
    y = torch.cat(parts)
    if not decoder.finished or _checksum(y) != body[8:12]:
        raise CodecError(
            "the stream is intact but decodes to different numbers: this machine computes the flow differently; decode "
            "on the type of machine, and with the version of torch, that encoded it"
        )
    return y.reshape(*batch, *flow.event_shape).to(model.like)


class Model:
    """The flow as used by encoder and decoder: in float64 and eval mode, with the context of every
    row.
    """

    def __init__(self, flow: Flow, context: Tensor | None = None) -> None:
        if why := uncodable(flow):
            raise CodecError(f"this flow cannot be used for compression: {why}")
        self.like = next(flow.parameters(), flow.base.anchor)
        self.device = (
            self.like.device if self.like.is_cuda else torch.device("cpu")
        )  # others lack float64
        self.flow = copy.deepcopy(flow).to(self.device, torch.float64).eval()
        if not (context is None or isinstance(context, Tensor)):
            raise CodecError(
                f"the context must be a tensor (..., context_dim), got {type(context).__name__}"
            )
        self.context = None if context is None else context.detach().to(self.device, torch.float64)
        self.base: DiscreteBase = self.flow.base  # type: ignore[assignment]
        digest = hashlib.blake2b(digest_size=8)
        for name, module in self.flow.named_modules():
            digest.update(f"{name} {type(module).__name__} ".encode())
        for name, tensor in self.flow.state_dict().items():
            digest.update(
                f"{name} {tuple(tensor.shape)} ".encode()
                + tensor.cpu().contiguous().numpy().tobytes()
            )
        if self.context is not None:
            digest.update(self.context.cpu().contiguous().numpy().tobytes())
        self.digest = digest.digest()

    def rows(self, y: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Data as rows (N, *event), and the shape of the batch."""
        if not isinstance(y, Tensor) or not y.is_floating_point():
            got = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise CodecError(
                f"compress takes whole numbers in a floating tensor, got {got}; use x.float()"
            )
        rows = y.detach().to("cpu", torch.float64)
        self.flow.transform.validate(rows.to(self.device), self.context, inverse=True)
        batch = tuple(rows.shape[: rows.ndim - len(self.flow.event_shape)])
        if len(batch) > MAX_AXES or rows.numel() > MAX_NUMBERS:
            raise CodecError(
                f"got data of {tuple(y.shape)}; a stream has at most {MAX_NUMBERS:,} numbers: split them"
            )
        self.spread(batch)
        return rows.reshape(-1, *self.flow.event_shape), batch

    def spread(self, batch: Sequence[int]) -> None:
        """Expand the context to one per row."""
        if self.context is not None:
            try:
                self.context = self.context.expand(*batch, -1).flatten(0, -2)
            except RuntimeError:
                raise CodecError(
                    f"got data of batch {tuple(batch)} but contexts of {tuple(self.context.shape[:-1])}; pass one each"
                ) from None

    def symbols(self, y: Tensor, first: int) -> Tensor:
        """Symbols (n, D) of the base; an error if they are not mapped back to y."""
        x = self.flow.transform.inverse(y.to(self.device), self._context(first, len(y)))[0]
        symbols = self.base.as_symbols(x).round()
        if self.flow.transform.forward_kind is Cost.analytic and not torch.equal(
            self.data(symbols, first).cpu(), y
        ):
            raise CodecError(
                "the flow does not map back to its data: one of its maps is not a bijection"
            )
        return symbols.long().cpu()

    def data(self, symbols: Tensor, first: int) -> Tensor:
        """The data of symbols, from row ``first`` on."""
        x = self.base.as_event(symbols.to(torch.float64))
        return self.flow.transform.forward(x, self._context(first, len(x)))[0]

    def _context(self, first: int, n: int) -> Tensor | None:
        return None if self.context is None else self.context[first : first + n]

    def window(self, symbols: list[Tensor]) -> tuple[int, int]:
        """The smallest and the largest symbol."""
        low, high = self.base.window or (0, 0)
        if self.base.window is None and (parts := [part for part in symbols if part.numel()]):
            low, high = (
                min(int(part.min()) for part in parts),
                max(int(part.max()) for part in parts),
            )
        if not high - low < MAX_SYMBOLS:
            raise CodecError(
                f"the base would have to code numbers from {low} to {high}, more than {MAX_SYMBOLS:,}; scale the data"
            )
        return low, high


def uncodable(flow: Flow) -> str | None:
    """Return the reason why a flow with a discrete base cannot be used for coding, or None."""
    links = flow.transform.transforms if isinstance(flow.transform, MapChain) else [flow.transform]
    for i, link in enumerate(links, 1):
        inner: Map = link
        while isinstance(inner, MapInverse):
            inner = inner.transform
        name = f"link {i} of {len(links)}, {type(inner).__name__}"
        if not (isinstance(inner, (Permutation, Squeeze)) or (inner.whole_in and inner.whole_out)):
            return f"{name}, is not a bijection of integers; use integer or modulo maps"
        if inner.takes_noise or inner.label.kind is not Ladj.exact:
            return f"{name}, is random; use maps without noise"
    return None


class Edges:
    """Integer CDFs: E(k) = ⌊P(symbol < k)·(T − n)⌋ + k − low for n symbols, so that each has at
    least one slot.
    """

    def __init__(self, base: DiscreteBase, params: Tensor, low: int, high: int) -> None:
        rounded = (params.cpu() * PARAMETER_STEPS).round() / PARAMETER_STEPS
        self.tables = [t.contiguous().numpy() for t in base.tables(rounded.flatten(0, -2))]
        self.below, self.low, self.high = base.below, low, high

    def __call__(self, k: Ints, tables: Sequence[NDArray[np.float64]] | None = None) -> Ints:
        mass = self.below(np.minimum(k, self.high + 1), *(tables or self.tables))
        edge = (mass * (TOTAL - (self.high - self.low + 1))).astype(np.int64) + (k - self.low)
        edge[k <= self.low], edge[k > self.high] = 0, TOTAL
        return edge

    def find(self, part: slice, slot: Ints) -> tuple[Ints, Ints, Ints]:
        """The symbols k with E(k) ≤ slot < E(k + 1), E(k) and E(k + 1) − E(k), by a search in equal
        parts.
        """
        tables, k, size = (
            [t[:, part] for t in self.tables],
            np.full(slot.shape, self.low),
            self.high - self.low + 1,
        )
        parts = (
            PARTS if slot.size < 128 else PARTS[:4]
        )  # fewer calls for few numbers, fewer evaluations for many
        while size > 1:
            size = -(-size // len(parts))
            k += size * (self(k + size * parts[1:], tables) <= slot).sum(0)
        start, end = self(k + PARTS[:2], tables)
        return k, start, end - start


# --- rANS ------------------------------------------------------------------------------------------------------------


def encode(start: Ints, count: Ints, lanes: int) -> bytes:
    """Encode symbols with slots start .. start + count − 1 of T, the i-th in lane i mod ``lanes``.

    The initial state of a lane would cost 32 bits: therefore the last symbols are coded first, in a
    single lane, whose words are the initial states of all lanes. The final states are written with
    as many bits as they have, after their length in 5 bits.
    """
    bits = PRECISION - np.log2(count)
    enough = bits[::-1].cumsum() > (WORD + 1) * lanes + 2 * WORD
    tail = int(enough.argmax()) + 1 if lanes > 1 and enough.any() else len(count)
    lanes = lanes if tail < len(count) else 1
    cut = len(count) - tail
    state, words = _pushed(np.full(1, 1 << LOW, np.uint64), start[cut:], count[cut:])
    if cut:
        words = np.concatenate(
            [[int(state[0]) & (1 << WORD) - 1, int(state[0]) >> WORD], words]
        ).astype(np.uint32)
        state, more = _pushed(np.uint64(1 << WORD) + words[:lanes], start[:cut], count[:cut])
        words = np.concatenate([more, words[lanes:]])
    digits = "1" + "".join(f"{int(x).bit_length() - LOW - 1:05b}{int(x):b}" for x in state)
    packed = int(digits, 2).to_bytes(-(-len(digits) // 8), "big")
    return (
        b"".join(map(_varint, (lanes, cut, len(packed)))) + packed + words.astype("<u4").tobytes()
    )


def _pushed(
    state: NDArray[np.uint64], start: Ints, count: Ints
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """x → ⌊x/count⌋·T + x mod count + start, from the last symbol to the first: states, and words
    in decoding order.

    A state that would exceed 2^63 first outputs a word.
    """
    lanes, words, state = len(state), [np.zeros(0, np.uint32)], state.astype(np.uint64)
    starts, counts = start.astype(np.uint64), count.astype(np.uint64)
    shift, word = np.uint64(LOW + WORD - PRECISION), np.uint64(WORD)
    for i in range((len(start) - 1) // lanes, -1, -1):
        f, s = counts[i * lanes : (i + 1) * lanes], starts[i * lanes : (i + 1) * lanes]
        x = state[: len(f)]
        full = x >= f << shift
        if full.any():
            words.append(x[full].astype(np.uint32))
            x = np.where(full, x >> word, x)
        times, rest = np.divmod(x, f)
        state[: len(f)] = (times << np.uint64(PRECISION)) + rest + s
    return state, np.concatenate(words[::-1])


class Decoder:
    """Decode symbols, in the order in which the model computes their parameters."""

    def __init__(self, data: bytes) -> None:
        (lanes, self.cut, size), place = _varints(data, 0, 3)
        packed, words = data[place : place + size], data[place + size :]
        digits, at = f"{int.from_bytes(packed, 'big'):b}", 1
        self.state = np.zeros(_at_most(lanes, LANES), np.uint64)
        if (
            not lanes
            or len(packed) < size
            or len(words) % 4
            or len(digits) < 1 + lanes * (5 + LOW + 1)
        ):
            raise CodecError(
                f"{FORGED}: {len(data):,} bytes do not contain the states of {lanes} lanes"
            )
        for lane in range(lanes):
            length = int(digits[at : at + 5] or "0", 2) + LOW + 1
            self.state[lane] = int(digits[at + 5 : at + 5 + length] or "0", 2)
            at += 5 + length
        self.words = np.frombuffer(words, "<u4").astype(np.uint64)
        self.place, self.done = 0, 0

    def take(self, n: int, find: Find) -> Ints:
        """The next n symbols; ``find(part of them, slots)`` returns the symbols, starts and counts
        of slots.
        """
        found, first = np.zeros(n, np.int64), self.done
        mask, word, shift = np.uint64(TOTAL - 1), np.uint64(WORD), np.uint64(PRECISION)
        while self.done < first + n:
            if self.done == self.cut and self.cut:
                self._start_last_lane()
            lane, at = self.done % len(self.state), self.done - first
            size = min(
                n - at,
                len(self.state) - lane,
                *([self.cut - self.done] if self.done < self.cut else []),
            )
            x = self.state[lane : lane + size]
            slot = x & mask
            found[at : at + size], start, count = find(slice(at, at + size), slot.astype(np.int64))
            x = count.astype(np.uint64) * (x >> shift) + slot - start.astype(np.uint64)
            empty = x < np.uint64(1 << LOW)
            if (wanted := int(empty.sum())) > len(self.words) - self.place:
                raise CodecError(f"{FORGED}: it ends after {self.done:,} symbols")
            if wanted:
                x[empty] = (x[empty] << word) | self.words[self.place : self.place + wanted]
                self.place += wanted
            self.state[lane : lane + size] = x
            self.done += size
        return found

    def _start_last_lane(self) -> None:
        """Continue with the last lane, whose words are the initial states of all lanes."""
        words = np.concatenate([self.state & np.uint64((1 << WORD) - 1), self.words[self.place :]])
        if len(words) < 2:
            raise CodecError(f"{FORGED}: it ends after {self.done:,} symbols")
        self.state, self.words, self.place = words[:1] | words[1:2] << np.uint64(WORD), words[2:], 0

    @property
    def finished(self) -> bool:
        """Whether all data were used."""
        return self.place == len(self.words) and bool((self.state == np.uint64(1 << LOW)).all())


# --- bytes -----------------------------------------------------------------------------------------------------------


def _checked(data: bytes) -> tuple[int, bytes]:
    """Version and body of an intact stream."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise CodecError(f"decompress takes the bytes of Flow.compress, got {type(data).__name__}")
    data, head = bytes(data), len(MAGIC) + 5
    if data[: len(MAGIC)] != MAGIC or len(data) < head + 12:
        raise CodecError(
            f"these {len(data):,} bytes were not written by Flow.compress: their header is different"
        )
    if (version := data[len(MAGIC)]) not in ROWS:
        known = f"{min(ROWS)} to {max(ROWS)}"
        raise CodecError(
            f"the stream has version {version}, this bayou reads {known}; use the version that wrote it"
        )
    if _crc(data[head:], version) != data[len(MAGIC) + 1 : head]:
        raise CodecError(
            "the stream is damaged or truncated: its checksum does not match; use a backup"
        )
    return version, data[head:]


def _crc(data: bytes, version: int = 0) -> bytes:
    return zlib.crc32(data, version if version > 2 else 0).to_bytes(
        4, "little"
    )  # 2 and 3 differ by one bit


def _checksum(rows: Tensor) -> bytes:
    return _crc(rows.to(torch.int64).contiguous().numpy().astype("<i8").tobytes())


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the last byte is below 128."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _varints(data: bytes, place: int, count: int) -> tuple[list[int], int]:
    """``count`` numbers, and the place after them."""
    found: list[int] = []
    while len(found) < count:
        end = next((i for i in range(place, min(place + 9, len(data))) if data[i] < 128), None)
        if end is None:
            raise CodecError(f"{FORGED}: there is no number at byte {place}")
        found.append(sum((byte & 127) << 7 * i for i, byte in enumerate(data[place : end + 1])))
        place = end + 1
    return found, place


def _at_most(number: int, most: int) -> int:
    """The number, or a CodecError if it is above ``most``."""
    if number > most:
        raise CodecError(f"{FORGED}: it has {number:,} where at most {most:,} is allowed")
    return number
