"""H in the space of outputs: against Hessians by autograd, and against E[score·scoreᵀ] by quadrature."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import bayou
from bayou.curvature import information
from bayou.likelihoods import BoundLikelihood, Likelihood

dense = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("dense.py"))))
F64 = torch.float64
B = 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# name → (likelihood, outputs, targets); the Hessian does not depend on y for any of them
CANONICAL: dict[str, tuple[Likelihood, Tensor, Tensor]] = {
    "categorical": (bayou.Categorical(), randn(B, 3), torch.arange(B) % 3),
    "categorical, positions": (bayou.Categorical(), randn(B, 2, 3), torch.arange(2 * B).reshape(B, 2) % 3),
    "categorical, images": (bayou.Categorical(-3), randn(B, 3, 2, 2), torch.arange(4 * B).reshape(B, 2, 2) % 3),
    "bernoulli": (bayou.Bernoulli(), randn(B, 2), torch.arange(2 * B).reshape(B, 2) % 2),
    "bernoulli, no axis": (bayou.Bernoulli(), randn(B), torch.arange(B) % 2),
    "poisson": (bayou.Poisson(), randn(B, 2), torch.arange(2 * B).reshape(B, 2)),
    "gaussian": (bayou.Gaussian(0.3), randn(B, 2), randn(B, 2, seed=1)),
    "gaussian, learned": (bayou.Gaussian(0.3, learn=True), randn(B, 2, 2), randn(B, 2, 2, seed=1)),
}


def bound(likelihood: Likelihood) -> BoundLikelihood:
    return likelihood.bind(dtype=F64)


def matrix(likelihood: BoundLikelihood, f: Tensor, y: Tensor, **options: object) -> Tensor:
    """Σ_m s_m·s_mᵀ of every example, (B, K, K)."""
    columns = information(likelihood, f, y, **options).columns()  # type: ignore[arg-type]
    flat = torch.stack([s.reshape(len(f), -1) for s in columns])
    return torch.einsum("mbk,mbl->bkl", flat, flat)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_ggn_is_the_hessian_where_it_does_not_depend_on_y(name: str) -> None:
    spec, f, y = CANONICAL[name]
    likelihood = bound(spec)
    expected = dense.hessians(likelihood.log_prob, f, y).detach()
    torch.testing.assert_close(matrix(likelihood, f, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["ggn", "fisher", "sampled"])
@pytest.mark.parametrize("name", CANONICAL)
def test_products_are_those_of_the_columns(name: str, kind: str) -> None:
    spec, f, y = CANONICAL[name]
    likelihood, u = bound(spec), randn(*f.shape, seed=2)
    options = {"kind": kind, "samples": 3, "seed": 0}
    h = matrix(likelihood, f, y, **options)
    expected = (h @ u.reshape(B, -1, 1)).reshape(u.shape)
    product = information(likelihood, f, y, **options).product(u)  # type: ignore[arg-type]
    torch.testing.assert_close(product, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_empirical_fisher_is_the_score_of_the_labels(name: str) -> None:
    spec, f, y = CANONICAL[name]
    likelihood = bound(spec)
    s = dense.scores(likelihood.log_prob, f, y).detach()
    torch.testing.assert_close(matrix(likelihood, f, y, kind="fisher"), torch.einsum("bk,bl->bkl", s, s))


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "poisson", "gaussian"])
def test_the_sampled_fisher_is_unbiased(name: str) -> None:
    """Within five standard errors of 20,000 labels, entry by entry."""
    spec, f, y = CANONICAL[name]
    likelihood, n = bound(spec), 20_000
    columns = torch.stack(list(information(likelihood, f, y, "sampled", n, seed=0).columns())) * n**0.5
    products = torch.einsum("mbk,mbl->mbkl", columns, columns)
    error = products.std(0) / n**0.5
    assert ((products.mean(0) - matrix(likelihood, f, y)).abs() <= 5 * error + 1e-12).all()
    again = torch.stack(list(information(likelihood, f, y, "sampled", n, seed=0).columns())) * n**0.5
    assert torch.equal(columns, again)


@pytest.mark.parametrize(
    ("spec", "outputs"),
    [
        (bayou.StudentTLikelihood(4.0, 0.5), 1),
        (bayou.HeteroscedasticGaussian(), 2),
        (bayou.HeteroscedasticGaussian(min_std=0.7), 2),
    ],
)
def test_elsewhere_the_ggn_is_the_fisher_information(spec: Likelihood, outputs: int) -> None:
    """E_y[score·scoreᵀ] by quadrature on a wide, fine grid."""
    likelihood, f = bound(spec), torch.tensor([[0.3, -0.4]], dtype=F64)[:, :outputs]
    t = torch.linspace(-12, 12, 40_001, dtype=F64)
    y = torch.sinh(t)  # out to e^12 / 2, where even the t density is gone
    weight = torch.cosh(t) * (t[1] - t[0])
    many = f.repeat(len(y), 1).requires_grad_()
    log_p = likelihood.log_prob(many, y.unsqueeze(1))
    (s,) = torch.autograd.grad(log_p.sum(), many)  # one row for every y
    p = log_p.detach().exp() * weight
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-8)
    expected = torch.einsum("n,nk,nl->kl", p, s, s)
    torch.testing.assert_close(matrix(likelihood, f, y[:1].unsqueeze(1))[0], expected, rtol=1e-6, atol=1e-8)


class Huberish(BoundLikelihood):
    """A likelihood that bayou does not know: −log cosh(y − f), or a concave one."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = sign

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return -self.sign * torch.log(torch.cosh(y - f))

    mean = variance = entropy = cdf = sample = None  # type: ignore[assignment]


def test_an_unknown_likelihood_gets_its_hessian_and_a_concave_loss_is_refused() -> None:
    Huberish.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    f, y = randn(B, 2), randn(B, 2, seed=1)
    likelihood = Huberish()
    expected = dense.hessians(likelihood.log_prob, f, y)
    torch.testing.assert_close(matrix(likelihood, f, y), expected)
    u = randn(B, 2, seed=3)
    torch.testing.assert_close(information(likelihood, f, y).product(u), (expected @ u.unsqueeze(-1)).squeeze(-1))
    with pytest.raises(ValueError, match=r"not convex.*sampled"):
        information(Huberish(-1.0), f, y)
    with pytest.raises(ValueError, match="too large to write out"):
        information(likelihood, torch.zeros(1, 5000), torch.zeros(1, 5000))
