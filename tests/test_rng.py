"""Draws are functions of (seed, index); generators and the global stream work as torch users
expect.
"""

import math
from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from bayou.core import rng

DRAWS = [rng.normal, rng.uniform]
LIKE = torch.zeros((), dtype=torch.float64)
seeds = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("event", [(), (3,), (50, 50), (5000,)])
def test_chunks_equal_the_whole_across_blocks(draw, event):
    size = max(1, rng.BLOCK // math.prod(event))
    n = 2 * size + 3
    whole = draw(n, event, LIKE, 7)
    edges = (0, 1), (size - 1, size + 1), (size, 2 * size), (size + 1, n), (n - 1, n), (n, n)
    for start, stop in edges:
        assert torch.equal(draw(stop - start, event, LIKE, 7, start=start), whole[start:stop])


def test_every_index_and_every_block_is_different():
    values = rng.normal(3 * rng.BLOCK, (), LIKE, 0)
    assert values.unique().numel() == values.numel()


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_folded_seeds_differ(seed):
    names = [(), ("a",), ("b",), (0,), ("0",), (1,), ("a", "b"), ("ab",), ("a", 0)]
    folded = [rng.fold(seed, *name) for name in names]
    assert len(set(folded)) == len(names)
    assert all(isinstance(value, int) and 0 <= value < 2**63 for value in folded)
    assert folded == [rng.fold(seed, *name) for name in names]


def test_fold_does_not_change_streams():
    generator = torch.Generator()
    assert rng.fold(generator, "a") is generator
    assert rng.fold(None, "a") is None


@pytest.mark.parametrize("draw", DRAWS)
def test_a_generator_is_a_stream(draw):
    generator = torch.Generator().manual_seed(3)
    first, second = draw(4, (2,), LIKE, generator), draw(4, (2,), LIKE, generator)
    assert not torch.equal(first, second)
    assert torch.equal(draw(4, (2,), LIKE, torch.Generator().manual_seed(3)), first)


@pytest.mark.parametrize("draw", DRAWS)
def test_none_is_the_global_stream_and_ints_do_not_change_it(draw):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = draw(4, (2,), LIKE), draw(4, (2,), LIKE)
        assert not torch.equal(first, second)
        torch.manual_seed(5)
        assert torch.equal(draw(4, (2,), LIKE), first)
        state = torch.get_rng_state()
        draw(4, (2,), LIKE, 0)
        draw(4, (2,), LIKE, torch.Generator())
        rng.permutation(4, 0)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", ["0", 0.0, True, torch.tensor(0), (0,)])
def test_an_invalid_seed_is_an_error_with_its_value(seed):
    for call, *arguments in (
        *((draw, 2, (), LIKE, seed) for draw in DRAWS),
        (rng.permutation, 3, seed),
        (rng.fold, seed, "part"),
    ):
        with pytest.raises(ValueError, match="seed must be an int, a torch.Generator or None, got"):
            call(*arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, None])
def test_dtype_and_device_follow_like(dtype, seed):
    like = torch.zeros(3, dtype=dtype)
    for draw in DRAWS:
        got = draw(5, (2,), like, seed)
        assert got.dtype == dtype
        assert got.device == like.device
        assert not got.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_one_in_half_precision(dtype):
    assert rng.uniform(10_000, (), torch.empty((), dtype=dtype), 0).max() < 1


def test_moments():
    n = 100_000
    z, u = rng.normal(n, (), LIKE, 11), rng.uniform(n, (), LIKE, 11)
    for values, power, expected, variance in [
        (z, 1, 0.0, 1.0),
        (z, 2, 1.0, 2.0),
        (z, 3, 0.0, 15.0),
        (z, 4, 3.0, 96.0),
        (u, 1, 1 / 2, 1 / 12),
        (u, 2, 1 / 3, 4 / 45),
    ]:
        assert abs(values.pow(power).mean().item() - expected) < 5 * math.sqrt(variance / n)
    assert u.min() >= 0
    assert u.max() < 1
    # Neighbors within a block and across its edge are uncorrelated.
    for lag in (1, 2, rng.BLOCK):
        assert abs((z[:-lag] * z[lag:]).mean().item()) < 5 / math.sqrt(n - lag)


def test_all_permutations_are_equally_likely():
    counts = Counter(tuple(rng.permutation(3, seed).tolist()) for seed in range(3000))
    assert set(counts) == set(permutations(range(3)))
    # χ²₅ above this: 1e-4
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 25.7


def test_empty_draws_keep_their_shape():
    for seed in (0, None):
        assert rng.normal(0, (2, 3), LIKE, seed).shape == (0, 2, 3)
    assert rng.normal(4, (0,), LIKE, 0).shape == (4, 0)


def test_the_drawn_values_never_change():
    """A saved seed must mean the same noise in every version of bayou, on every kind of machine."""
    assert rng.fold(0, "a", 1) == 7965780462979794708
    assert rng.permutation(5, 0).tolist() == [4, 1, 0, 2, 3]
    for draw, few, last in (
        (rng.normal, [-1.1011291871051814, 1.6121521337561493], -1.4013735317823197),
        (rng.uniform, [0.7495025460542714, 0.8955121187246455], 0.5189819110158598),
    ):
        assert draw(1, (2,), LIKE, 0, start=17)[0].tolist() == pytest.approx(few, rel=1e-14)
        assert draw(1, (20,), LIKE, 0, start=3)[0, -1].item() == pytest.approx(last, rel=1e-14)
