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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bayou.flows.core.bases import CodecError
from bayou.flows.core.compose import MapChain, MapInverse
from bayou.flows.core.transform import Cost, Ladj, Map
from bayou.flows.discrete.rans import (
    FORGED,
    TOTAL,
    Ints,
    SymbolDecoder,
    check_at_most,
    count_lanes,
    encode,
    read_varints,
    varint,
)
from bayou.flows.layers.linear import Permutation
from bayou.flows.layers.squeeze import Squeeze

if TYPE_CHECKING:
    from bayou.flows.core.flow import Flow
    from bayou.flows.discrete.masses import DiscreteBase

# A stream is MAGIC, the version (1 byte), a checksum of the rest (4), a digest of the model (8), a
# checksum of the data (4), the header, and the symbols.
MAGIC = b"BYF"
DIGEST_BYTES = 8
CHECKSUM_BYTES = 4
HEADER_START = DIGEST_BYTES + CHECKSUM_BYTES  # in the part that the first checksum covers
VERSION = {"cpu": 2, "cuda": 3}  # by device type; it determines the number of rows of a batch
BATCH_ROWS = {2: 1024, 3: 4096}  # by version
PARAMETER_STEPS = 4096.0  # per unit, of rounded parameters
MAX_SYMBOLS = 1 << 20  # different symbols of a stream
MAX_BATCH_AXES = 32
MAX_NUMBERS = 1 << 31  # of the data
MAX_MAGNITUDE = 1 << 53  # of the least symbol
SEARCH_PARTS = np.arange(8)[:, None]


@torch.no_grad()
def compress(flow: Flow, y: Tensor, context: Tensor | None = None) -> bytes:
    """Encode data with a flow of integers; see ``Flow.compress``.

    Args:
        flow: a flow whose base is a ``DiscreteBase`` and whose maps are bijections of integers.
        y: the data, whole numbers as floats, (..., *event).
        context: the context of every row, (..., context_dim), which broadcasts to the batch of y;
            None, the default, for a flow without context.

    Returns:
        A stream of about −log₂ p(y) bits.

    Raises:
        CodecError: if the flow is not a bijection of integers, or the data do not fit it.
    """
    model = CodingModel(flow, context)
    version = VERSION[model.device.type]
    rows, batch_shape = model.rows(y)
    batch_rows = BATCH_ROWS[version]
    batches = [
        model.symbols(batch, i * batch_rows) for i, batch in enumerate(rows.split(batch_rows))
    ]
    low, high = model.symbol_range(batches)
    slots = [np.zeros((2, 0), np.int64)]
    for symbols in batches:
        slots += _slots(model.base, symbols, low, high)
    start, count = np.concatenate(slots, 1)
    header = StreamHeader(batch_shape, low, high).encode()
    body = model.digest + _checksum(rows) + header + encode(start, count, count_lanes(count))
    return MAGIC + bytes([version]) + _crc(body, version) + body


def _slots(base: DiscreteBase, symbols: Tensor, low: int, high: int) -> list[Ints]:
    """Return the first slot and the number of slots of every symbol of a batch, stage by stage."""
    slots: list[Ints] = []

    def choose(members: list[int], params: Tensor) -> Tensor:
        k = symbols[:, members].flatten().numpy()
        edges = Edges(base, params, low, high)
        start = edges(k)
        slots.append(np.stack([start, edges(k + 1) - start]))
        return symbols[:, members].to(params)

    base.unroll((len(symbols),), choose)
    return slots


@torch.no_grad()
def decompress(flow: Flow, data: bytes, context: Tensor | None = None) -> Tensor:
    """Decode the bytes of ``compress``; see ``Flow.decompress``.

    Args:
        flow: the flow that compressed the data, with the same weights.
        data: the stream.
        context: the context that was passed to ``compress``.

    Returns:
        The data (..., *event), in the dtype and on the device of the flow.

    Raises:
        CodecError: if the stream is damaged, belongs to another model, or does not decode to the
            data of its checksum.
    """
    model = CodingModel(flow, context)
    version, body = _read_body(data)
    if body[:DIGEST_BYTES] != model.digest:
        hint = ", and pass the same context" if flow.transform.context_dim else ""
        raise CodecError(
            "the stream was written by another model: its digest differs from that of this flow; "
            f"load the weights that compressed it{hint}"
        )
    header, symbols_start = StreamHeader.decode(body, model)
    decoder = SymbolDecoder(body[symbols_start:])
    model.expand_context(header.batch_shape)

    def choose(members: list[int], params: Tensor) -> Tensor:
        edges = Edges(model.base, params, header.low, header.high)
        shape = params.shape[:-1]
        k = decoder.take(shape.numel(), edges.find)
        return torch.from_numpy(k).reshape(shape).to(params)

    rows = math.prod(header.batch_shape)
    batch_rows = BATCH_ROWS[version]
    batches = [torch.zeros(0, *flow.event_shape, dtype=torch.float64)]
    for first in range(0, rows, batch_rows):
        symbols = model.base.unroll((min(batch_rows, rows - first),), choose)
        batches.append(model.data(symbols, first).cpu())
    y = torch.cat(batches)
    if not decoder.is_at_end or _checksum(y) != body[DIGEST_BYTES:HEADER_START]:
        raise CodecError(
            "the stream is intact but decodes to different numbers: this machine computes the flow "
            "differently; decode on the type of machine, and with the version of torch, that "
            "encoded it"
        )
    return y.reshape(*header.batch_shape, *flow.event_shape).to(model.reference)


@dataclass(frozen=True)
class StreamHeader:
    """The shape of the batch and the range of the symbols, which a stream starts with.

    Args:
        batch_shape: the batch axes of the data.
        low: the least symbol.
        high: the largest symbol.
    """

    batch_shape: tuple[int, ...]
    low: int
    high: int

    def encode(self) -> bytes:
        """Return the header as numbers of variable length; the sign of ``low`` is its last bit."""
        signed_low = 2 * abs(self.low) + (self.low < 0)
        width = self.high - self.low
        return b"".join(map(varint, (len(self.batch_shape), *self.batch_shape, signed_low, width)))

    @classmethod
    def decode(cls, body: bytes, model: CodingModel) -> tuple[StreamHeader, int]:
        """Read a header: the header, and the position after it.

        Args:
            body: a stream without its version and first checksum.
            model: the model that is to decode it.

        Raises:
            CodecError: if a number is out of bounds, or the symbols are not those of the model.
        """
        (axes,), position = read_varints(body, HEADER_START, 1)
        batch_shape, position = read_varints(body, position, check_at_most(axes, MAX_BATCH_AXES))
        shape = (*batch_shape, *model.flow.event_shape)
        check_at_most(math.prod(max(n, 1) for n in shape), MAX_NUMBERS)
        (signed_low, width), position = read_varints(body, position, 2)
        low = -(signed_low // 2) if signed_low % 2 else signed_low // 2
        check_at_most(abs(low), MAX_MAGNITUDE)
        high = low + check_at_most(width, MAX_SYMBOLS - 1)
        window = model.base.window
        if window is not None and window != (low, high):
            raise CodecError(f"{FORGED}: it has symbols from {low} to {high}, the flow {window}")
        return cls(tuple(batch_shape), low, high), position


class CodingModel:
    """The flow as encoder and decoder use it: in float64 and eval mode, with the context of a row.

    Args:
        flow: the flow, which is copied.
        context: contexts (..., context_dim), or None.

    Raises:
        CodecError: if the flow cannot be used for coding.
    """

    def __init__(self, flow: Flow, context: Tensor | None = None) -> None:
        if reason := uncodable(flow):
            raise CodecError(f"this flow cannot be used for compression: {reason}")
        self.reference: nn.Parameter | Tensor = next(flow.parameters(), flow.base.anchor)
        self.device: torch.device = torch.device("cpu")
        if self.reference.is_cuda:  # other devices lack float64
            self.device = self.reference.device
        self.flow: Flow = copy.deepcopy(flow).to(self.device, torch.float64).eval()
        if not (context is None or isinstance(context, Tensor)):
            raise CodecError(
                f"the context must be a tensor (..., context_dim), got {type(context).__name__}"
            )
        self.context: Tensor | None = None
        if context is not None:
            self.context = context.detach().to(self.device, torch.float64)
        self.base: DiscreteBase = self.flow.base  # type: ignore[assignment]
        self.digest: bytes = self._compute_digest()

    def _compute_digest(self) -> bytes:
        """Return 8 bytes that depend on the modules, the weights and the context."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, module in self.flow.named_modules():
            digest.update(f"{name} {type(module).__name__} ".encode())
        for name, tensor in self.flow.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        if self.context is not None:
            digest.update(self.context.cpu().contiguous().numpy().tobytes())
        return digest.digest()

    def rows(self, y: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the data as rows (N, *event), and the shape of the batch; expand the context.

        Args:
            y: data (..., *event).
        """
        if not isinstance(y, Tensor) or not y.is_floating_point():
            received = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise CodecError(
                f"compress takes whole numbers in a floating tensor, got {received}; use x.float()"
            )
        rows = y.detach().to("cpu", torch.float64)
        self.flow.transform.validate(rows.to(self.device), self.context, inverse=True)
        batch_shape = tuple(rows.shape[: rows.ndim - len(self.flow.event_shape)])
        if len(batch_shape) > MAX_BATCH_AXES or rows.numel() > MAX_NUMBERS:
            raise CodecError(
                f"got data of {tuple(y.shape)}; a stream has at most {MAX_NUMBERS:,} numbers: "
                "split them"
            )
        self.expand_context(batch_shape)
        return rows.reshape(-1, *self.flow.event_shape), batch_shape

    def expand_context(self, batch_shape: Sequence[int]) -> None:
        """Expand the context to one per row.

        Args:
            batch_shape: the batch axes of the data.

        Raises:
            CodecError: if it does not broadcast to the batch.
        """
        if self.context is None:
            return
        try:
            self.context = self.context.expand(*batch_shape, -1).flatten(0, -2)
        except RuntimeError:
            raise CodecError(
                f"got data of batch {tuple(batch_shape)} but contexts of "
                f"{tuple(self.context.shape[:-1])}; pass one each"
            ) from None

    def symbols(self, y: Tensor, first: int) -> Tensor:
        """Return the symbols (n, D) of the base for rows y, the first of which is row ``first``.

        Args:
            y: data (n, *event).
            first: the index of their first row, for the context.

        Raises:
            CodecError: if they are not mapped back to y.
        """
        x = self.flow.transform.inverse(y.to(self.device), self._row_context(first, len(y)))[0]
        symbols = self.base.as_symbols(x).round()
        is_cheap = self.flow.transform.forward_kind is Cost.analytic
        if is_cheap and not torch.equal(self.data(symbols, first).cpu(), y):
            raise CodecError(
                "the flow does not map back to its data: one of its maps is not a bijection"
            )
        return symbols.long().cpu()

    def data(self, symbols: Tensor, first: int) -> Tensor:
        """Return the data of symbols (n, D), from row ``first`` on: (n, *event).

        Args:
            symbols: of the base.
            first: the index of their first row, for the context.
        """
        x = self.base.as_event(symbols.to(torch.float64))
        return self.flow.transform.forward(x, self._row_context(first, len(x)))[0]

    def _row_context(self, first: int, n: int) -> Tensor | None:
        """Return the contexts of n rows from ``first`` on."""
        return None if self.context is None else self.context[first : first + n]

    def symbol_range(self, batches: list[Tensor]) -> tuple[int, int]:
        """Return the smallest and the largest symbol, of the base or, if unbounded, of the data.

        Args:
            batches: the symbols (n, D) of all batches.

        Raises:
            CodecError: if there are too many symbols between them.
        """
        low, high = self.base.window or (0, 0)
        filled_batches = [symbols for symbols in batches if symbols.numel()]
        if self.base.window is None and filled_batches:
            low = min(int(symbols.min()) for symbols in filled_batches)
            high = max(int(symbols.max()) for symbols in filled_batches)
        if high - low >= MAX_SYMBOLS:
            raise CodecError(
                f"the base would have to code numbers from {low} to {high}, "
                f"more than {MAX_SYMBOLS:,}; scale the data"
            )
        return low, high


def uncodable(flow: Flow) -> str | None:
    """Return the reason why a flow with a discrete base cannot be used for coding, or None.

    Args:
        flow: a flow, whose base is discrete.
    """
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
    """The first slots of symbols: E(k) = ⌊P(symbol < k)·(T − n)⌋ + k − low for n symbols.

    Every symbol has at least one slot, and E is the integer form of a cumulative distribution.

    Args:
        base: the distribution of the symbols.
        params: its parameters, (..., P), one row for every symbol to code.
        low: the least symbol.
        high: the largest symbol.
    """

    def __init__(self, base: DiscreteBase, params: Tensor, low: int, high: int) -> None:
        rounded_params = (params.cpu() * PARAMETER_STEPS).round() / PARAMETER_STEPS
        tables = base.tables(rounded_params.flatten(0, -2))
        self.tables: list[NDArray[Any]] = [table.contiguous().numpy() for table in tables]
        self.below: Callable[..., NDArray[Any]] = base.below
        self.low = low
        self.high = high

    def __call__(self, k: Ints, tables: Sequence[NDArray[np.float64]] | None = None) -> Ints:
        """Return E(k) for symbols (..., n), by default with the tables of all n rows."""
        mass = self.below(np.minimum(k, self.high + 1), *(tables or self.tables))
        edge = (mass * (TOTAL - (self.high - self.low + 1))).astype(np.int64) + (k - self.low)
        edge[k <= self.low] = 0
        edge[k > self.high] = TOTAL
        return edge

    def find(self, rows: slice, slot: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the symbols k with E(k) ≤ slot < E(k + 1), with E(k) and E(k + 1) − E(k).

        The search divides the range of every symbol into eight parts at a time.

        Args:
            rows: the rows of ``params`` that the slots belong to.
            slot: one slot for each of them, (n,).
        """
        tables = [table[:, rows] for table in self.tables]
        k = np.full(slot.shape, self.low)
        size = self.high - self.low + 1
        while size > 1:
            size = -(-size // len(SEARCH_PARTS))
            k += size * (self(k + size * SEARCH_PARTS[1:], tables) <= slot).sum(0)
        start, end = self(k + SEARCH_PARTS[:2], tables)
        return k, start, end - start


def _read_body(data: bytes) -> tuple[int, bytes]:
    """Return the version and the body of an intact stream.

    Raises:
        CodecError: if it is not a stream, has another version, or is damaged.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise CodecError(f"decompress takes the bytes of Flow.compress, got {type(data).__name__}")
    data = bytes(data)
    body_start = len(MAGIC) + 1 + CHECKSUM_BYTES
    if data[: len(MAGIC)] != MAGIC or len(data) < body_start + HEADER_START:
        raise CodecError(
            f"these {len(data):,} bytes were not written by Flow.compress: their header is "
            "different"
        )
    version = data[len(MAGIC)]
    if version not in BATCH_ROWS:
        known = f"{min(BATCH_ROWS)} to {max(BATCH_ROWS)}"
        raise CodecError(
            f"the stream has version {version}, this bayou reads {known}; use the version that "
            "wrote it"
        )
    if _crc(data[body_start:], version) != data[len(MAGIC) + 1 : body_start]:
        raise CodecError(
            "the stream is damaged or truncated: its checksum does not match; use a backup"
        )
    return version, data[body_start:]


def _crc(data: bytes, version: int = 0) -> bytes:
    """Return a checksum; versions above 2 start it with their number, so that they differ."""
    start = version if version > 2 else 0  # 2 and 3 differ by one bit
    return zlib.crc32(data, start).to_bytes(CHECKSUM_BYTES, "little")


def _checksum(rows: Tensor) -> bytes:
    """Return the checksum of whole numbers."""
    return _crc(rows.to(torch.int64).contiguous().numpy().astype("<i8").tobytes())
