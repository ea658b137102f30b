import pytest
import torch
from hypothesis import given, strategies as st

from bayou.core import params as P

NAMES = ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias"]


def test_first_match_wins_and_names_keep_their_order():
    rules = {"conv*.weight": "a", "*.weight": "b", "*": "c"}
    matched = P.match(NAMES, rules)
    assert matched == {"conv1.weight": "a", "conv1.bias": "c", "fc.weight": "b", "fc.bias": "c"}
    assert list(matched) == NAMES


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match=r"'\*\.wieght'.*conv1\.weight.*fc\.bias"):
        P.match(NAMES, {"*.wieght": 1, "*": 2})
    with pytest.raises(ValueError, match="matches no name"):
        P.match(NAMES, {"*": 1, "FC.*": 2})  # case counts


def test_a_shadowed_pattern_is_no_error():
    assert set(P.match(NAMES, {"*": 1, "fc.*": 2}).values()) == {1}


def test_an_uncovered_name_is_an_error_unless_there_is_a_default():
    with pytest.raises(ValueError, match=r"no pattern covers 'conv1\.bias', 'fc\.bias'"):
        P.match(NAMES, {"*.weight": 1})
    assert P.match(NAMES, {"*.weight": 1}, default=0)["fc.bias"] == 0
    assert P.match([], {}) == {}


def draws(n):
    generator = torch.Generator().manual_seed(0)
    shapes = {"b": (2, 3), "a": (), "c": (4,)}
    return [
        {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
        for _ in range(n)
    ]


def test_a_stack_has_a_leading_sample_axis():
    stacked = P.stack(draws(5))
    assert P.size(stacked) == 5
    assert stacked["b"].shape == (5, 2, 3)
    for index, draw in enumerate(draws(5)):
        assert all(torch.equal(stacked[name][index], draw[name]) for name in draw)


def test_tensors_without_a_common_sample_axis_are_an_error():
    one, other = draws(2)
    for bad in ({}, one, {"a": torch.zeros(2, 3), "b": torch.zeros(3)}):
        with pytest.raises(ValueError, match="stack"):
            P.size(bad)
    with pytest.raises(ValueError, match="empty"):
        P.stack([])
    with pytest.raises(ValueError, match="'extra'"):
        P.stack([one, other | {"extra": torch.zeros(())}])
    with pytest.raises(ValueError, match=r"'c' has shape \(5,\) in params 1 but \(4,\)"):
        P.stack([one, other | {"c": torch.zeros(5)}])


@given(st.integers(0, 3))
def test_flatten_and_unflatten_are_inverses_with_sample_axes(samples):
    like = draws(1)[0]
    stacked = P.stack(draws(samples)) if samples else like
    vector = P.flatten(stacked, sample_dims=1 if samples else 0)
    assert vector.shape == ((samples, 11) if samples else (11,))
    back = P.unflatten(vector, like)
    assert list(back) == list(like)
    assert all(torch.equal(back[name], stacked[name]) for name in like)


def test_the_order_of_a_flat_vector_is_that_of_the_names():
    one = draws(1)[0]
    assert torch.equal(P.flatten(one), P.flatten(dict(reversed(one.items()))))
    assert P.flatten(one)[0] == one["a"]


def test_unflatten_gives_the_dtypes_of_its_template():
    like = {"a": torch.zeros(2, dtype=torch.float32), "b": torch.zeros(1, dtype=torch.float64)}
    back = P.unflatten(P.flatten(like), like)
    assert (back["a"].dtype, back["b"].dtype) == (torch.float32, torch.float64)
    with pytest.raises(ValueError, match="3 entries"):
        P.unflatten(torch.zeros(4), like)
    with pytest.raises(ValueError, match="without tensors"):
        P.flatten({})
