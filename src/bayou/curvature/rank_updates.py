"""Rows that are added to or removed from the precision of a Gaussian, in square-root form.

A covariance Σ = R·Rᵀ is held by its upper triangular root R, so that it is positive definite
whatever the rounding. All functions return another root of this form.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MAX_DENSE_WEIGHTS: Final = 1_000  # up to which updates make a matrix of other structures
MAX_SINGLE_ROWS: Final = 2  # rows that are added one by one, in D² operations each
# Of the share of the information that remains in a direction after a removal: less is rounding.
MIN_REMAINING: Final = 1e-12
NOT_CONTAINED = (
    "the precision without these rows is not positive definite: the posterior cannot have had all "
    "of them; remove only rows, with the same x and y, that were in the fit or in an update"
)


def add_rows(root: Tensor, rows: Tensor) -> Tensor:
    """Return the root of (Σ⁻¹ + AᵀA)⁻¹.

    With W = A·R it is R·L^−ᵀ, where L·Lᵀ = 1 + WᵀW, whose eigenvalues are at least 1. One row
    takes 4·D² operations, many rows take D³.

    Args:
        root: R with Σ = R·Rᵀ, (D, D), upper triangular.
        rows: A, (M, D).

    Returns:
        (D, D), upper triangular.
    """
    if len(rows) <= MAX_SINGLE_ROWS:
        for row in rows:
            root = change_by_row(root, row, 1.0)
        return root
    whitened = rows @ root
    middle = whitened.mT @ whitened
    middle.diagonal().add_(1.0)
    return divide_root(root, torch.linalg.cholesky(middle))


def remove_rows(root: Tensor, rows: Tensor) -> Tensor:
    """Return the root of (Σ⁻¹ − AᵀA)⁻¹, the inverse of ``add_rows``.

    Args:
        root: R with Σ = R·Rᵀ, (D, D), upper triangular.
        rows: A, (M, D).

    Returns:
        (D, D), upper triangular.

    Raises:
        ValueError: if Σ⁻¹ − AᵀA is not positive definite.
    """
    if len(rows) <= MAX_SINGLE_ROWS:
        for row in rows:
            root = change_by_row(root, row, -1.0)
        return root
    whitened = rows @ root
    middle = -(whitened.mT @ whitened)
    middle.diagonal().add_(1.0)
    lower, failed = torch.linalg.cholesky_ex(middle)
    if bool(failed) or bool((lower.diagonal().square() < MIN_REMAINING).any()):
        raise ValueError(NOT_CONTAINED)
    return divide_root(root, lower)


def change_by_row(root: Tensor, row: Tensor, sign: float) -> Tensor:
    """Return the root of (Σ⁻¹ ± a·aᵀ)⁻¹.

    With w = Rᵀ·a and t_i = 1 ± Σ_{j≤i} w_j² the columns of the root are
    (R_i ∓ w_i/t_{i−1}·Σ_{j<i} w_j·R_j)·√(t_{i−1}/t_i), by the Cholesky factor of 1 ± w·wᵀ (Gill,
    Golub, Murray & Saunders 1974).

    Args:
        root: R with Σ = R·Rᵀ, (D, D), upper triangular.
        row: a, (D,).
        sign: 1 to add, −1 to remove.

    Raises:
        ValueError: if the precision is not positive definite.
    """
    w = row @ root
    totals = 1.0 + sign * w.square().cumsum(0)
    if sign < 0 and not float(totals[-1]) > MIN_REMAINING:
        raise ValueError(NOT_CONTAINED)
    before = torch.cat((totals.new_ones(1), totals[:-1]))
    products = root * w
    sums = products.cumsum(1) - products
    return (root - sign * (w / before) * sums) * (before / totals).sqrt()


def forget_root(root: Tensor, forget: float, precision: Tensor) -> Tensor:
    """Return the root of (λ·Σ⁻¹ + (1 − λ)·P)⁻¹.

    All rows before count λ times; the precision is never less than that of the prior, P, to which
    it tends (stabilized forgetting, Kulhavý & Zarrop 1993).

    Args:
        root: R with Σ = R·Rᵀ, (D, D), upper triangular.
        forget: λ, in (0, 1].
        precision: the diagonal of P, (D,).
    """
    middle = (1 - forget) * (root.mT @ (precision.unsqueeze(1) * root))
    middle.diagonal().add_(forget)
    return divide_root(root, torch.linalg.cholesky(middle))


def divide_root(root: Tensor, lower: Tensor) -> Tensor:
    """Return R·L^−ᵀ, upper triangular.

    Args:
        root: R, (D, D), upper triangular.
        lower: L, (D, D), lower triangular.
    """
    return torch.linalg.solve_triangular(lower.mT, root, upper=True, left=False)


def exceeds_prior(root: Tensor, precision: Tensor, tolerance: float) -> bool:
    """Return whether Σ is larger than the prior covariance in some direction.

    Args:
        root: R with Σ = R·Rᵀ, (D, D).
        precision: the diagonal of the prior precision, (D,).
        tolerance: relative, of the variance.
    """
    scaled = precision.sqrt().unsqueeze(1) * root
    middle = -(scaled @ scaled.mT)
    middle.diagonal().add_(1.0 + tolerance)
    return bool(torch.linalg.cholesky_ex(middle)[1])


def solve_in_rows(gram: Tensor, values: Tensor) -> Tensor:
    """Return (1 + G)⁻¹·v for the Gram matrix G of M rows.

    Args:
        gram: G = A·Σ·Aᵀ, (M, M).
        values: v, (M,).
    """
    middle = gram.clone()
    middle.diagonal().add_(1.0)
    solution = torch.cholesky_solve(values.unsqueeze(-1), torch.linalg.cholesky(middle))
    return solution.squeeze(-1)


def log_det_of_rows(gram: Tensor) -> Tensor:
    """Return log |1 + G| for the Gram matrix G of M rows.

    Args:
        gram: G = A·Σ·Aᵀ, (M, M).
    """
    middle = gram.clone()
    middle.diagonal().add_(1.0)
    return 2 * torch.linalg.cholesky(middle).diagonal().log().sum()


def reduce_rank(factor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factor of rank K nearest to F, and the diagonal of what it leaves out.

    1 + F·Fᵀ ≈ diag(1 + d) + F_K·F_Kᵀ with the K largest singular values of F and the same diagonal
    (LoFi, Chang et al. 2023, https://arxiv.org/abs/2305.19535).

    Args:
        factor: F, (D, M).
        rank: K.

    Returns:
        F_K, (D, K), and d, (D,).
    """
    if factor.shape[1] <= rank:
        return factor, factor.new_zeros(len(factor))
    _, vectors = torch.linalg.eigh(factor.mT @ factor)
    rotated = factor @ vectors
    left_out = rotated[:, : factor.shape[1] - rank].square().sum(1)
    return rotated[:, factor.shape[1] - rank :], left_out


def subtract_low_rank(factor: Tensor, removed: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return a diagonal v and F_K with diag(v) + F_K·F_Kᵀ near 1 + F·Fᵀ − G·Gᵀ.

    F_K has the K largest positive eigenvalues of F·Fᵀ − G·Gᵀ, and v the same marginal variances as
    the exact matrix.

    Args:
        factor: F, (D, M).
        removed: G, (D, N), such that 1 + F·Fᵀ − G·Gᵀ is positive definite.
        rank: K.

    Returns:
        v, (D,), and F_K, (D, K).
    """
    variance = 1.0 + factor.square().sum(1) - removed.square().sum(1)
    columns = torch.cat((factor, removed), 1)
    signs = torch.cat((columns.new_ones(factor.shape[1]), -columns.new_ones(removed.shape[1])))
    basis, triangle = torch.linalg.qr(columns)
    values, vectors = torch.linalg.eigh((triangle * signs) @ triangle.mT)
    kept = values[-rank:].clamp_min(0.0) if rank else values[:0]
    low_rank = (basis @ vectors[:, len(values) - len(kept) :]) * kept.sqrt()
    low_rank = torch.nn.functional.pad(low_rank, (0, rank - low_rank.shape[1]))
    remaining = variance - low_rank.square().sum(1)
    return remaining.clamp_min(MIN_REMAINING), low_rank
