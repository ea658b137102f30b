"""Range asymmetric numeral systems (rANS, Duda 2013): symbols with probabilities as bytes.

A symbol of probability count / 2²⁸ has ``count`` consecutive slots out of 2²⁸. Coding it turns a
state x, a large integer, into ⌊x / count⌋·2²⁸ + x mod count + start, which adds −log₂(count / 2²⁸)
bits to x; decoding it is the inverse. Many states (lanes) advance at the same time, so that a step
is one operation on arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bayou.flows.core.bases import CodecError

Ints = NDArray[np.int64]
States = NDArray[np.uint64]
Words = NDArray[np.uint32]
FindSymbols = Callable[[slice, Ints], tuple[Ints, Ints, Ints]]

PRECISION = 28  # bits of a slot
TOTAL = 1 << PRECISION  # slots
# A state is in [2^31, 2^63) and exchanges words of 32 bits with the stream.
MIN_STATE_BITS = 31
WORD_BITS = 32
LENGTH_BITS = 5  # of the length of a final state
MIN_LANE_BITS = 40_000  # of the data, for each lane, since a lane costs 7 bits
MAX_LANES = 1024
MAX_VARINT_BYTES = 9
FORGED = "the checksum of the stream is correct, but it was not written by Flow.compress"


def count_lanes(slots: Ints) -> int:
    """Return the number of lanes for symbols with these numbers of slots: 1 to 1024."""
    bits = PRECISION * len(slots) - float(np.log2(slots).sum())
    return int(min(max(1, bits // MIN_LANE_BITS), MAX_LANES))


def encode(start: Ints, count: Ints, lanes: int) -> bytes:
    """Encode symbols with slots start .. start + count − 1 of T, the i-th in lane i mod ``lanes``.

    The initial state of a lane would cost 32 bits: therefore the last symbols are coded first, in a
    single lane, whose words are the initial states of all lanes. The final states are written with
    as many bits as they have, after their length in 5 bits.

    Args:
        start: the first slot of every symbol, (n,).
        count: the number of slots of every symbol, (n,).
        lanes: the largest number of lanes; 1 is used if the symbols have too few bits for more.
    """
    bits = PRECISION - np.log2(count)
    fills_lanes = bits[::-1].cumsum() > (WORD_BITS + 1) * lanes + 2 * WORD_BITS
    tail = len(count)
    if lanes > 1 and fills_lanes.any():
        tail = int(fills_lanes.argmax()) + 1
    if tail == len(count):
        lanes = 1
    cut = len(count) - tail
    states = np.full(1, 1 << MIN_STATE_BITS, np.uint64)
    states, words = _push_symbols(states, start[cut:], count[cut:])
    if cut:
        state = int(states[0])
        halves = [state & (1 << WORD_BITS) - 1, state >> WORD_BITS]
        words = np.concatenate([halves, words]).astype(np.uint32)
        states = np.uint64(1 << WORD_BITS) + words[:lanes]
        states, lane_words = _push_symbols(states, start[:cut], count[:cut])
        words = np.concatenate([lane_words, words[lanes:]])
    packed_states = _pack_states(states)
    header = b"".join(map(varint, (lanes, cut, len(packed_states))))
    return header + packed_states + words.astype("<u4").tobytes()


def _pack_states(states: States) -> bytes:
    """Return the states in binary, each after its length: a 1, then 5 + length bits a state."""
    digits = "1"
    for state in map(int, states):
        length = state.bit_length() - MIN_STATE_BITS - 1
        digits += f"{length:0{LENGTH_BITS}b}{state:b}"
    return int(digits, 2).to_bytes(-(-len(digits) // 8), "big")


def _push_symbols(states: States, start: Ints, count: Ints) -> tuple[States, Words]:
    """Code symbols from the last to the first: new states, and words in decoding order.

    The state x of a lane becomes ⌊x/count⌋·T + x mod count + start. If that would exceed 2^63, the
    lane first outputs a word.
    """
    lanes = len(states)
    words = [np.zeros(0, np.uint32)]
    states = states.astype(np.uint64)
    starts = start.astype(np.uint64)
    counts = count.astype(np.uint64)
    shift = np.uint64(MIN_STATE_BITS + WORD_BITS - PRECISION)
    for i in range((len(start) - 1) // lanes, -1, -1):
        step = slice(i * lanes, (i + 1) * lanes)
        step_counts = counts[step]
        x = states[: len(step_counts)]
        is_full = x >= step_counts << shift
        if is_full.any():
            words.append(x[is_full].astype(np.uint32))
            x = np.where(is_full, x >> np.uint64(WORD_BITS), x)
        quotient, remainder = np.divmod(x, step_counts)
        states[: len(step_counts)] = (quotient << np.uint64(PRECISION)) + remainder + starts[step]
    return states, np.concatenate(words[::-1])


class SymbolDecoder:
    """Decode symbols, in the order in which the model computes their parameters.

    Args:
        data: the bytes of ``encode``.

    Raises:
        CodecError: if the bytes do not contain the states that their header announces.
    """

    cut: int

    def __init__(self, data: bytes) -> None:
        (lanes, self.cut, size), start = read_varints(data, 0, 3)
        packed_states = data[start : start + size]
        words = data[start + size :]
        digits = f"{int.from_bytes(packed_states, 'big'):b}"
        self.states: NDArray[np.uint64] = np.zeros(check_at_most(lanes, MAX_LANES), np.uint64)
        min_digits = 1 + lanes * (LENGTH_BITS + MIN_STATE_BITS + 1)
        is_short = len(packed_states) < size or len(digits) < min_digits
        if not lanes or is_short or len(words) % 4:
            raise CodecError(
                f"{FORGED}: {len(data):,} bytes do not contain the states of {lanes} lanes"
            )
        self._read_states(digits)
        self.words: NDArray[np.uint64] = np.frombuffer(words, "<u4").astype(np.uint64)
        self.words_read: int = 0
        self.symbols_read: int = 0

    def _read_states(self, digits: str) -> None:
        """Read the state of every lane from binary digits, which begin with a 1."""
        position = 1
        for lane in range(len(self.states)):
            start = position + LENGTH_BITS
            length = int(digits[position:start] or "0", 2) + MIN_STATE_BITS + 1
            position = start + length
            self.states[lane] = int(digits[start:position] or "0", 2)

    def take(self, n: int, find: FindSymbols) -> Ints:
        """Decode the next n symbols.

        Args:
            n: the number of symbols.
            find: from a slice of these symbols and their slots, returns the symbols, their first
                slots and their numbers of slots.

        Raises:
            CodecError: if the words of the stream end before.
        """
        symbols = np.zeros(n, np.int64)
        first = self.symbols_read
        while self.symbols_read < first + n:
            if self.symbols_read == self.cut and self.cut:
                self._start_last_lane()
            lane = self.symbols_read % len(self.states)
            offset = self.symbols_read - first
            size = min(n - offset, len(self.states) - lane)
            if self.symbols_read < self.cut:
                size = min(size, self.cut - self.symbols_read)
            positions = slice(offset, offset + size)
            symbols[positions] = self._take_step(slice(lane, lane + size), positions, find)
            self.symbols_read += size
        return symbols

    def _take_step(self, lanes: slice, positions: slice, find: FindSymbols) -> Ints:
        """Decode one symbol of each of these lanes; ``positions`` are those of the symbols."""
        x = self.states[lanes]
        slot = x & np.uint64(TOTAL - 1)
        symbols, start, count = find(positions, slot.astype(np.int64))
        x = count.astype(np.uint64) * (x >> np.uint64(PRECISION)) + slot - start.astype(np.uint64)
        is_low = x < np.uint64(1 << MIN_STATE_BITS)
        missing = int(is_low.sum())
        if missing > len(self.words) - self.words_read:
            raise CodecError(f"{FORGED}: it ends after {self.symbols_read:,} symbols")
        if missing:
            next_words = self.words[self.words_read : self.words_read + missing]
            x[is_low] = (x[is_low] << np.uint64(WORD_BITS)) | next_words
            self.words_read += missing
        self.states[lanes] = x
        return symbols

    def _start_last_lane(self) -> None:
        """Continue with the last lane, whose words are the initial states of all lanes."""
        low_words = self.states & np.uint64((1 << WORD_BITS) - 1)
        words = np.concatenate([low_words, self.words[self.words_read :]])
        if len(words) < 2:
            raise CodecError(f"{FORGED}: it ends after {self.symbols_read:,} symbols")
        self.states = words[:1] | words[1:2] << np.uint64(WORD_BITS)
        self.words = words[2:]
        self.words_read = 0

    @property
    def is_at_end(self) -> bool:
        """Return whether all words were used, and the states are those of an empty stream."""
        has_initial_states = bool((self.states == np.uint64(1 << MIN_STATE_BITS)).all())
        return self.words_read == len(self.words) and has_initial_states


def varint(number: int) -> bytes:
    """Return a number of at least 0 in 7 bits a byte, the lowest first; the last is below 128.

    Args:
        number: an integer of at least 0.
    """
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def read_varints(data: bytes, start: int, count: int) -> tuple[list[int], int]:
    """Read ``count`` numbers from the position ``start``: the numbers, and the position after them.

    Args:
        data: bytes that contain the numbers.
        start: the position of the first number.
        count: the number of numbers.

    Raises:
        CodecError: if a number has more than 9 bytes, or the data end before.
    """
    numbers: list[int] = []
    while len(numbers) < count:
        number, end = _read_varint(data, start)
        numbers.append(number)
        start = end
    return numbers, start


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Read one number: the number, and the position after it."""
    number = 0
    for i, byte in enumerate(data[start : start + MAX_VARINT_BYTES]):
        number += (byte & 127) << 7 * i
        if byte < 128:
            return number, start + i + 1
    raise CodecError(f"{FORGED}: there is no number at byte {start}")


def check_at_most(number: int, most: int) -> int:
    """Return the number; raise a CodecError if it is above ``most``.

    Args:
        number: a number of a stream.
        most: the largest number that is allowed.
    """
    if number > most:
        raise CodecError(f"{FORGED}: it has {number:,} where at most {most:,} is allowed")
    return number
