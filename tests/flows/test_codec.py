"""Compression: the length of a stream, exact decoding, and errors for anything else."""

import copy
import math
import random
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch

from bayou.flows import (
    MADE,
    Categorical,
    Chain,
    CodecError,
    Dequantize,
    DiscretizedLogistic,
    Flow,
    Groups,
    IntegerCoupling,
    IntegerIdentity,
    Inverse,
    LULinear,
    OneHot,
    OneHotMADE,
    PixelCNN,
    Squeeze,
    integer,
    modulo,
    quincunx,
    realnvp,
    reverse,
)
from bayou.flows.discrete import codec, rans
from bayou.flows.discrete.bijections import cnn
from tests.flows.tools import identical, perturb, standard

EVENT = (1, 4, 4)
codec_error = partial(pytest.raises, CodecError)


def perturbed(name, scale=0.3):
    return perturb(FLOWS[name](), scale).float()


def ideal(flow, y):
    """−log₂ p(y) of all rows."""
    wide = copy.deepcopy(flow).double()
    with torch.no_grad():
        return -wide.log_prob(y.double()).sum().item() / math.log(2)


def grouped():
    groups = Groups(quincunx(EVENT, 2), [cnn(2, (8,), 6)])
    return Flow(
        DiscretizedLogistic(EVENT, 16, 2, groups), integer(EVENT, 16, layers=2, hidden=(8,))
    )


FLOWS = {
    "integers": lambda: Flow(
        DiscretizedLogistic(5, 16, 2), Chain(integer(5, 16, layers=2, hidden=(8,)))
    ),
    "images": grouped,
    "one after another": lambda: Flow(
        DiscretizedLogistic((1, 3, 3), 256, 2, MADE(9, 6, (16,)), bounded=True),
        IntegerIdentity((1, 3, 3), 256),
    ),
    "pixel after pixel": lambda: Flow(
        DiscretizedLogistic(
            (1, 2, 3), 16, 2, PixelCNN((1, 2, 3), 6, width=4, depth=2, kernel=3), bounded=True
        ),
        IntegerIdentity((1, 2, 3), 16),
    ),
    "squeezed": lambda: Flow(
        DiscretizedLogistic((4, 1, 2), 16),
        Chain(
            IntegerCoupling((4, 1, 2), "half", hidden=(4,), scale=8.0), Inverse(Squeeze((1, 2, 4)))
        ),
    ),
    "permuted": lambda: Flow(DiscretizedLogistic(4, 8), Chain(reverse(4), IntegerIdentity(4))),
    "classes": lambda: Flow(Categorical(5, 27), OneHot(5, 27)),
    "modulo": lambda: Flow(Categorical(4, 5), modulo(4, 5, layers=2, hidden=(8,))),
    "modulo, autoregressive": lambda: Flow(
        Categorical(4, 5, OneHotMADE(4, 5, 5, (8,))),
        modulo(4, 5, layers=2, hidden=(8,), autoregressive=True),
    ),
}


def data(flow, rows):
    """Draws, in range where the data have one."""
    y = flow.sample(rows, seed=0)
    last = (
        flow.transform.transforms[-1] if hasattr(flow.transform, "transforms") else flow.transform
    )
    levels = getattr(last, "levels_out", None)
    return y if levels is None else y.clamp(0, levels - 1)


def compressed(name="classes", rows=20):
    """A flow, draws of it and their stream."""
    flow = perturbed(name)
    y = data(flow, rows)
    return flow, y, flow.compress(y)


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for name in FLOWS for rows in (0, 1, 100)] + [("integers", 2100)],
)
def test_decoding_is_exact_and_the_length_is_the_negative_log_probability(name, rows):
    flow, y, stream = compressed(name, rows)
    identical(flow.decompress(stream), y)
    # header and states; parameters are rounded to 2^-12, and the masses to 2^-28
    assert 8 * len(stream) <= 1.0005 * ideal(flow, y) + 8 * 40


def test_a_symbol_of_probability_zero_is_coded():
    flow = Flow(DiscretizedLogistic(1, 20, mean=0.0, scale=1.0), IntegerIdentity(1))
    y = torch.tensor([[900.0], [-5000.0], [0.0]])
    stream = flow.compress(y)
    identical(flow.decompress(stream), y)
    assert 8 * len(stream) < 8 * 40 + 3 * 32
    with codec_error(match="from 0 to 4000000, more than 1,048,576; scale the data"):
        flow.compress(torch.tensor([[0.0], [4e6]]))


@pytest.mark.parametrize("lanes", [1, 2, 7, 64])
def test_lanes(lanes):
    """Whatever their number, the same symbols come back, in any pieces."""
    generator = np.random.default_rng(0)
    weights = generator.integers(1, 1000, 31)
    edges = np.concatenate([[0], weights.cumsum() * (rans.TOTAL // weights.sum())])
    edges[-1] = rans.TOTAL
    k = generator.choice(31, 3001, p=np.diff(edges) / rans.TOTAL)
    coded = rans.encode(edges[k], edges[k + 1] - edges[k], lanes)

    def find(part, slot):
        found = np.searchsorted(edges, slot, "right") - 1
        return found, edges[found], edges[found + 1] - edges[found]

    decoder = rans.SymbolDecoder(coded)
    pieces = [decoder.take(n, find) for n in (1, 0, 1000, 13, 1987)]
    assert np.array_equal(np.concatenate(pieces), k)
    assert decoder.is_at_end
    bits = (rans.PRECISION - np.log2(edges[k + 1] - edges[k])).sum()
    assert 8 * len(coded) < bits + 8 * lanes + 64 + 8 * 8


def test_the_shape_the_dtype_and_the_seeds_are_kept():
    flow = perturbed("integers")
    y, before = data(flow, 12).reshape(3, 1, 4, 5), torch.get_rng_state()
    again = flow.decompress(flow.compress(y))
    assert (again.shape, again.dtype) == (y.shape, y.dtype)
    identical(again, y)
    single = flow.decompress(flow.compress(y[0, 0, 0]))
    assert single.shape == (5,)
    identical(before, torch.get_rng_state())
    wide = copy.deepcopy(flow).double().train()
    assert wide.compress(y.double()) == flow.compress(y)  # what codes is one and the same model
    assert wide.decompress(flow.compress(y)).dtype == torch.float64
    assert wide.training


def test_another_number_of_threads_reads_it():
    flow, threads = perturbed("one after another", 0.1), torch.get_num_threads()
    y = data(flow, 100)
    try:
        torch.set_num_threads(1)
        stream = flow.compress(y)
        torch.set_num_threads(2)
        identical(flow.decompress(stream), y)
    finally:
        torch.set_num_threads(threads)


CONDITIONAL = {
    "integers": lambda: Flow(
        DiscretizedLogistic(5, 16), integer(5, 16, 2, (8,), wrap=True, context_dim=3)
    ),
    "images": lambda: Flow(
        DiscretizedLogistic(EVENT, 16),
        integer(EVENT, 16, 2, (8,), wrap=True, context_dim=3),
    ),
    "modulo": lambda: Flow(Categorical(4, 5), modulo(4, 5, 2, (8,), context_dim=3)),
    "modulo, autoregressive": lambda: Flow(
        Categorical(4, 5), modulo(4, 5, 2, (8,), autoregressive=True, context_dim=3)
    ),
}


@pytest.mark.parametrize("name", CONDITIONAL)
def test_with_a_context(name):
    flow = perturb(CONDITIONAL[name](), 0.8).float()
    context = torch.eye(3).repeat(7, 1)
    y = flow.sample(1, context, seed=0)[0]
    assert (flow.log_prob(y[0], torch.eye(3)).diff().abs() > 1e-3).any()
    stream = flow.compress(y, context)
    identical(flow.decompress(stream, context), y)
    identical(flow.decompress(flow.compress(y, context[0]), context[0]), y)
    with codec_error(match="another model.*and pass the same context"):
        flow.decompress(stream, context.flip(-1))
    with pytest.raises(ValueError, match="needs a context"):
        flow.compress(y)
    with codec_error(match="must be a tensor .* got list"):
        flow.compress(y, [0, 1, 2])


def test_a_stream_of_a_gpu_is_decoded_on_a_cpu():
    """Up to 1,024 rows it differs from one of a CPU by its version alone."""
    flow, y, stream = compressed("pixel after pixel")
    body = stream[8:]
    stream = codec.MAGIC + bytes([codec.VERSION["cuda"]]) + codec._crc(body, 3) + body
    identical(flow.decompress(stream), y)


# --- errors -------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed():
    flow, _, stream = compressed()
    for i in range(len(stream)):
        for bit in (0, 7):
            damaged = bytearray(stream)
            damaged[i] ^= 1 << bit
            with codec_error(match="damaged|not written by|version"):
                flow.decompress(bytes(damaged))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:-1], "damaged or truncated"),
        (lambda s: s + b"\0", "damaged or truncated"),
        (lambda s: s[:10], "not written by Flow.compress"),
        (lambda s: b"", "these 0 bytes were not written by"),
        (lambda s: b"\x89PNG" + s, "not written by Flow.compress"),
        (lambda s: s[:3] + b"\x07" + s[4:], "version 7, this bayou reads 2 to 3"),
    ],
)
def test_foreign_and_damaged_streams(change, message):
    flow, _, stream = compressed()
    with codec_error(match=message):
        flow.decompress(change(stream))


def sealed(flow, body, version=2):
    """A forged stream: whole by its checksum, and of this model."""
    return codec.MAGIC + bytes([version]) + codec._crc(body, version) + body


FORGERIES = {
    "lanes": (8, (1 << 40, 0, 5)),  # 8 TiB of states
    "no lanes": (8, (0, 0, 5)),
    "states": (8, (1, 0, 1 << 40)),
    "axes": (0, (1 << 40,)),
    "rows": (0, (1, 1 << 45, 0, 26)),
    "rows by columns": (0, (2, 1 << 31, 1 << 31, 0, 26)),
    "none of many": (0, (2, 0, 1 << 62, 0, 26)),
    "symbols": (0, (1, 20, 0, 1 << 50)),
    "least symbol": (0, (1, 20, 1 << 61, 26)),
    "other symbols": (0, (1, 20, 2, 26)),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_stream_with_invalid_sizes_is_an_error(name):
    flow, _, stream = compressed()
    head = rans.read_varints(stream, 20, 4)[1]
    header_end, numbers = FORGERIES[name]
    kept = stream[8:20] if header_end == 0 else stream[8:head]
    forged = sealed(flow, kept + b"".join(map(rans.varint, numbers)) + stream[head:])
    tracemalloc.start()
    with codec_error(match="checksum of the stream is correct, but"):
        flow.decompress(forged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize("name", ["integers", "classes"])
def test_mutated_streams_give_an_error_or_the_data(name):
    """Bytes changed, cut, doubled or run together behind the digest of the model, under a checksum
    that fits.
    """
    flow, y, stream = compressed(name, 7)
    body, generator, refused = stream[8:], random.Random(0), 0
    for _ in range(100):
        changed = bytearray(body[12:])
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(min(len(changed), generator.choice((12, len(changed)))) or 1)
            piece = bytes(
                generator.choice((0, 1, 127, 128, 255, generator.randrange(256))) for _ in range(9)
            )
            width, size = generator.choice((0, 1, 1, 9)), generator.choice((0, 1, 1, 9))
            changed[at : at + width] = piece[:size]
        try:
            identical(flow.decompress(sealed(flow, body[:12] + bytes(changed))), y)
        except CodecError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("stream", [10**12, "text"])
def test_only_bytes_are_a_stream(stream):
    with codec_error(match="decompress takes the bytes"):
        FLOWS["classes"]().decompress(stream)


def test_another_model_is_refused():
    flow, y, stream = compressed()
    other = copy.deepcopy(flow)
    with torch.no_grad():
        other.base.table[0, 0] += 1e-6
    with codec_error(match="written by another model.*load the weights"):
        other.decompress(stream)
    with codec_error(match="written by another model"):
        perturbed("modulo").decompress(stream)
    identical(copy.deepcopy(flow).decompress(stream), y)


def test_a_machine_that_computes_differently_is_noticed(monkeypatch):
    flow, _, stream = compressed("integers", 50)
    below = DiscretizedLogistic.below
    monkeypatch.setattr(
        DiscretizedLogistic, "below", staticmethod(lambda k, *tables: 0.999 * below(k, *tables))
    )
    with codec_error(match="decodes to different numbers"):
        flow.decompress(stream)


@pytest.mark.parametrize(
    ("flow", "says"),
    [
        (lambda: standard(realnvp(2)), "its base, StandardNormal, is not discrete"),
        (
            lambda: Flow(DiscretizedLogistic(2), Chain(IntegerIdentity(2), LULinear(2))),
            "link 2 of 2, LULinear, is not a bijection",
        ),
        (
            lambda: Flow(DiscretizedLogistic(2), Dequantize(2)),
            "link 1 of 1, Dequantize, is not a bijection",
        ),
    ],
)
def test_flows_without_a_code(flow, says):
    with codec_error(match=says):
        flow().compress(torch.zeros(1, 2))
    with codec_error(match=says):
        flow().decompress(b"")


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (torch.tensor([[0.0, 1.0, 2.0, 3.0, 27.0]]), "OneHot takes 0 to 26, got 0 to 27"),
        (torch.tensor([[0.0, 1.0, 2.0, 3.0, 0.5]]), "whole numbers as data, got 0.5"),
        (torch.zeros(1, 4), r"the last 1 axes must be \(..., 5\)"),
        (
            torch.zeros(1, 5, dtype=torch.long),
            "whole numbers in a floating tensor, got torch.int64",
        ),
        ([[0, 1]], "got list"),
    ],
)
def test_data_that_cannot_be_coded(y, says):
    with pytest.raises(ValueError, match=says):
        FLOWS["classes"]().compress(y)


def test_a_map_that_is_not_a_bijection_is_detected():
    class Lost(IntegerIdentity):
        def _inverse(self, y, context):
            return super()._inverse((y / 2).floor(), context)

    with codec_error(match="does not map back"):
        Flow(DiscretizedLogistic(2), Lost(2)).compress(torch.ones(1, 2))


def test_a_chain_checks_what_its_last_map_checks():
    """A range was checked by a map alone, and not where it ends a chain."""
    chain = Chain(Inverse(IntegerIdentity(2, 4)), Dequantize(2, levels=4))
    with pytest.raises(ValueError, match="Dequantize takes 0 to 3, got 0 to 4"):
        chain.inverse(torch.tensor([0.0, 4.0]))
    with pytest.raises(ValueError, match="takes 0 to 3, got 1 to 4"):
        Inverse(IntegerIdentity(2, 4)).forward(torch.tensor([1.0, 4.0]))
