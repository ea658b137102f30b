"""A Kronecker-factored precision of one layer, A ⊗ G + D ⊗ 1, with further rows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MAX_ROUNDS: Final = 100  # of alternating least squares for the nearest product
CONVERGED: Final = 1e-13  # relative change of a factor


def factors_of(
    root: Tensor, q: Tensor, v: Tensor, std: Tensor, multiplier: Tensor
) -> tuple[Tensor, Tensor]:
    """Return A and G of a layer with Λ = A ⊗ G + D ⊗ 1.

    1/std² = s ⊗ t + multiplier is of rank one but for the multiplier.

    Args:
        root: D^−½ up to the multiplier, (I,).
        q: eigenvectors of root·A·root, (groups, I, I).
        v: eigenvectors of G, (groups, O, O).
        std: standard deviations in this basis, (groups, O, I).
        multiplier: of D, ().
    """
    products = (std**-2 - multiplier).clamp_min(0.0)  # (groups, O, I)
    t = products.sum(-1)
    s = products.sum(-2)
    s = s / t.sum(-1, keepdim=True).clamp_min(torch.finfo(t.dtype).tiny)
    scaled_q = q / root.unsqueeze(-1)
    return scaled_q * s.unsqueeze(-2) @ scaled_q.mT, v * t.unsqueeze(-2) @ v.mT


def add_rows_to_product(a: Tensor, g: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return A' and G' with A' ⊗ G' nearest to A ⊗ G + Σ_m (X_mᵀX_m) ⊗ (X_m·X_mᵀ)/|X_m|².

    X_m is a row of the scaled Jacobian as a matrix: for a layer that an example uses once it is
    g·aᵀ, and its term is exact. The nearest product in the Frobenius norm (Van Loan 1993) comes
    from alternating least squares, in which both factors stay positive semidefinite. Where all G
    are multiples of one matrix, as in a last layer with one Gaussian noise, it is exact.

    Args:
        a: A, (groups, I, I).
        g: G, (groups, O, O).
        rows: X, (M, groups, O, I).
    """
    weights = rows.square().sum((-2, -1)).clamp_min(torch.finfo(rows.dtype).tiny).reciprocal()
    input_factor = a
    output_factor = g
    if not bool((a.abs().sum() * g.abs().sum()) > 0):  # the prior alone
        input_factor = torch.einsum("mgoi,mgoj->gij", rows, rows)
        output_factor = torch.einsum("mgoi,mgpi->gop", rows, rows)
    for _ in range(MAX_ROUNDS):
        inner = torch.einsum("mgoi,gop,mgpi->mg", rows, output_factor, rows) * weights
        total = a * _product(g, output_factor) + torch.einsum(
            "mg,mgoi,mgoj->gij", inner, rows, rows
        )
        new_input = total / _product(output_factor, output_factor)
        inner = torch.einsum("mgoi,gij,mgoj->mg", rows, new_input, rows) * weights
        total = g * _product(a, new_input) + torch.einsum("mg,mgoi,mgpi->gop", inner, rows, rows)
        new_output = total / _product(new_input, new_input)
        change = (new_output - output_factor).abs().max() + (new_input - input_factor).abs().max()
        size = new_output.abs().max() + new_input.abs().max()
        input_factor = new_input
        output_factor = new_output
        if float(change) <= CONVERGED * float(size):
            break
    return input_factor, output_factor


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Return ⟨A, B⟩ of matrices, (groups, 1, 1), at least the smallest positive number."""
    product = (first * second).sum((-2, -1), keepdim=True)
    return product.clamp_min(torch.finfo(product.dtype).tiny)
