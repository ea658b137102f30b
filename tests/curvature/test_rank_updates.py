"""Rank updates of roots, Kronecker products and low-rank matrices against dense linear algebra."""

import pytest
import torch
from torch.testing import assert_close

from bayou.curvature import Diagonal, Full, Kronecker, LowRankPlusDiagonal
from bayou.curvature.factor import LowRankPrecision
from bayou.curvature.rank_updates import (
    add_rows,
    change_by_row,
    exceeds_prior,
    forget_root,
    reduce_rank,
    remove_rows,
    subtract_low_rank,
)

F64 = torch.float64
SHAPES = {"weight": torch.Size((2, 3)), "bias": torch.Size((2,))}
D = 8
PRIOR = {"weight": torch.tensor(2.0, dtype=F64), "bias": torch.tensor(2.0, dtype=F64)}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def random_root(size, seed=0):
    root = normal(size, size, seed=seed).triu()
    root.diagonal().abs_().add_(0.5)
    return root


def precision(root):
    return torch.linalg.inv(root @ root.mT)


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_added_rows_are_in_the_precision_and_removed_rows_are_not(count):
    root = random_root(D)
    rows = normal(count, D, seed=1)
    added = add_rows(root, rows)
    assert torch.equal(added, added.triu())
    assert_close(precision(added), precision(root) + rows.mT @ rows, rtol=1e-9, atol=1e-9)
    assert_close(remove_rows(added, rows), root, rtol=1e-9, atol=1e-9)


def test_one_row_and_many_rows_agree():
    root, rows = random_root(D), normal(7, D, seed=2)
    one_by_one = root
    for row in rows:
        one_by_one = change_by_row(one_by_one, row, 1.0)
    assert_close(one_by_one, add_rows(root, rows), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("count", [1, 5])
def test_rows_that_are_not_in_the_precision_cannot_be_removed(count):
    root = random_root(D)
    with pytest.raises(ValueError, match="not positive definite.*remove only rows"):
        remove_rows(root, 100 * normal(count, D, seed=3))


def test_forgetting_mixes_the_precision_with_that_of_the_prior():
    root, prior = random_root(D), normal(D, seed=4).square() + 0.1
    forgotten = forget_root(root, 0.7, prior)
    expected = 0.7 * precision(root) + 0.3 * torch.diag(prior)
    assert_close(precision(forgotten), expected, rtol=1e-10, atol=1e-10)
    assert not exceeds_prior(forget_root(random_root(D) * 1e-3, 1e-9, prior), prior, 1e-6)
    assert exceeds_prior(10 * torch.diag(prior.rsqrt()), prior, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("forget", [1.0, 0.999])
def test_100_000_rows_leave_a_positive_definite_matrix(forget):
    """The root is compared with the precision as a sum; its rounding grows slowly."""
    size, prior = 6, torch.full((6,), 0.5, dtype=F64)
    root = torch.diag(prior.rsqrt())
    rows = normal(100_000, size, seed=5) * torch.logspace(-4, 3, size, dtype=F64)
    for row in rows:
        if forget < 1:
            root = forget_root(root, forget, prior)
        root = change_by_row(root, row, 1.0)
    ages = torch.arange(len(rows) - 1, -1, -1, dtype=F64)
    expected = torch.diag(prior) + rows.mT @ (forget ** ages.unsqueeze(1) * rows)
    assert bool((root.diagonal() > 0).all())
    assert bool((torch.linalg.eigvalsh(root @ root.mT) > 0).all())
    whitened = root.mT @ expected @ root
    assert_close(whitened, torch.eye(size, dtype=F64), rtol=0, atol=1e-8)


def test_a_reduced_rank_keeps_the_diagonal_and_the_largest_directions():
    factor = normal(20, 6, seed=6)
    kept, left_out = reduce_rank(factor, 4)
    assert kept.shape == (20, 4)
    exact = factor @ factor.mT
    assert_close((kept @ kept.mT).diagonal() + left_out, exact.diagonal())
    values = torch.linalg.eigvalsh(exact)[-4:]
    assert_close(torch.linalg.eigvalsh(kept.mT @ kept), values)
    same, nothing = reduce_rank(factor, 6)
    assert torch.equal(same, factor)
    assert not nothing.any()


def test_subtracting_low_rank_keeps_the_variances_and_is_exact_where_it_can_be():
    factor = normal(12, 3, seed=7)
    part = factor[:, :2] @ torch.diag(torch.tensor([0.5, 0.9], dtype=F64))
    variance, low_rank = subtract_low_rank(factor, part, 3)
    exact = torch.eye(12, dtype=F64) + factor @ factor.mT - part @ part.mT
    assert_close(torch.diag(variance) + low_rank @ low_rank.mT, exact)
    variance, low_rank = subtract_low_rank(factor, part, 1)
    assert_close(variance + low_rank.square().sum(1), exact.diagonal())
    assert bool((variance > 0).all())


def covariances():
    """One of every structure over the same tensors, which is one layer with a bias."""
    kronecker = {
        "in|weight|bias": torch.linalg.qr(normal(4, 4, seed=1))[0].unsqueeze(0),
        "out|weight|bias": torch.linalg.qr(normal(2, 2, seed=2))[0].unsqueeze(0),
        "root|weight|bias": torch.full((4,), 0.5**0.5, dtype=F64),
        "std|weight|bias": (torch.outer(*map(torch.arange, (1, 3), (3, 7))).double() + 1).rsqrt()[
            None
        ],
    }
    low_rank = {f"std.{n}": normal(*s, seed=3).abs() + 0.3 for n, s in SHAPES.items()}
    low_rank |= {f"factor.{n}": normal(2, *s, seed=4) for n, s in SHAPES.items()}
    return {
        "full": Full(SHAPES, {"root": random_root(D)}),
        "diagonal": Diagonal(SHAPES, {n: normal(*s).abs() + 0.1 for n, s in SHAPES.items()}),
        "kronecker": Kronecker(SHAPES, kronecker),
        "low rank precision": LowRankPrecision.of_factor(
            SHAPES, normal(D).abs() + 0.2, normal(D, 1)
        ),
        "low rank plus diagonal": LowRankPlusDiagonal(SHAPES, low_rank),
    }


def dense(covariance):
    eye = covariance.from_vector(torch.eye(covariance.size, dtype=F64))
    root = covariance.spread(eye)
    return root @ root.mT


@pytest.mark.parametrize("name", covariances())
def test_every_structure_multiplies_forgets_and_adds_rows(name):
    covariance = covariances()[name]
    matrix = dense(covariance)
    rows = covariance.from_vector(normal(3, D, seed=8))
    product = covariance.to_vector(covariance.product(rows))
    vectors = covariance.to_vector(rows)
    assert_close(product, vectors @ matrix)
    forgotten = torch.linalg.inv(dense(covariance.forget_rows(0.6, PRIOR)))
    exact = 0.6 * torch.linalg.inv(matrix) + 0.4 * 2 * torch.eye(D, dtype=F64)
    if name != "kronecker":
        assert_close(forgotten, exact)
    else:  # the std of this one are any numbers, and the precision of the prior is in its basis
        assert_close(forgotten, exact, rtol=1e-9, atol=1e-9)
    added = torch.linalg.inv(dense(covariance.with_rows(rows, PRIOR)))
    exact = torch.linalg.inv(matrix) + vectors.mT @ vectors
    if covariance.adds_exactly:
        assert_close(added, exact, rtol=1e-9, atol=1e-9)
        removed = covariance.with_rows(rows, PRIOR).without_rows(rows, {})
        assert_close(dense(removed), matrix, rtol=1e-8, atol=1e-8)
    else:
        assert_close(added, torch.diag(exact.diagonal()))


def test_a_kronecker_product_of_several_layers_adds_exactly_where_outputs_share_a_factor():
    """Rows e_o ⊗ a of every output o, as of one Gaussian noise, leave G a multiple of 1."""
    shapes = dict.fromkeys(("first", "second"), SHAPES["weight"])
    tensors = {}
    for name in shapes:
        tensors[f"in|{name}"] = torch.eye(3, dtype=F64)[None]
        tensors[f"out|{name}"] = torch.eye(2, dtype=F64)[None]
        tensors[f"root|{name}"] = torch.ones(3, dtype=F64)
        tensors[f"std|{name}"] = (1 + torch.arange(3.0, dtype=F64)).rsqrt().expand(1, 2, 3)
    covariance = Kronecker(shapes, tensors)
    assert not covariance.adds_exactly
    prior = {n: torch.ones((), dtype=F64) for n in shapes}
    inputs = normal(4, 3, seed=9)
    rows = {
        n: torch.einsum("op,mi->mopi", torch.eye(2, dtype=F64), inputs).reshape(-1, 2, 3)
        for n in shapes
    }
    before = torch.linalg.inv(dense(covariance))[:6, :6]
    after = torch.linalg.inv(dense(covariance.with_rows(rows, prior)))
    expected = before + torch.kron(torch.eye(2, dtype=F64), inputs.mT @ inputs)
    assert_close(after[:6, :6], expected)
    assert not after[:6, 6:].abs().max() > 1e-12


def test_a_bounded_rank_stays_bounded_and_larger_ones_become_a_matrix():
    shapes = {"w": torch.Size((40,))}
    std, none = torch.ones(40, dtype=F64), torch.zeros(40, 0, dtype=F64)
    prior = {"w": torch.ones((), dtype=F64)}
    rows = {"w": normal(20, 40, seed=10)}
    bounded = LowRankPrecision.of_factor(shapes, std, none, torch.tensor(5.0, dtype=F64))
    updated = bounded.with_rows(rows, prior)
    assert updated.tensors["factor"].shape == (40, 5)
    exact = torch.eye(40, dtype=F64) + rows["w"].mT @ rows["w"]
    assert_close(torch.linalg.inv(dense(updated)).diagonal(), exact.diagonal())
    exactly = LowRankPrecision.of_factor(shapes, std, none).with_rows(rows, prior)
    assert isinstance(exactly, Full)
    assert_close(torch.linalg.inv(dense(exactly)), exact, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="only approximately"):
        updated.without_rows(rows, prior)
