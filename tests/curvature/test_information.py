"""H in the space of outputs, against Hessians by autograd and E[score·scoreᵀ] by quadrature."""

import math

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.core import rng
from bayou.curvature import information
from bayou.likelihoods import BoundLikelihood, FiniteLikelihood
from tests.curvature import dense

F64 = torch.float64
B = 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# name → (likelihood, outputs, targets); the Hessian does not depend on y for any of them
CANONICAL = {
    "categorical": (bayou.Categorical(), randn(B, 3), torch.arange(B) % 3),
    "categorical, positions": (
        bayou.Categorical(),
        randn(B, 2, 3),
        torch.arange(2 * B).reshape(B, 2) % 3,
    ),
    "categorical, images": (
        bayou.Categorical(-3),
        randn(B, 3, 2, 2),
        torch.arange(4 * B).reshape(B, 2, 2) % 3,
    ),
    "bernoulli": (bayou.Bernoulli(), randn(B, 2), torch.arange(2 * B).reshape(B, 2) % 2),
    "bernoulli, no axis": (bayou.Bernoulli(), randn(B), torch.arange(B) % 2),
    "poisson": (bayou.Poisson(), randn(B, 2), torch.arange(2 * B).reshape(B, 2)),
    "gaussian": (bayou.Gaussian(0.3), randn(B, 2), randn(B, 2, seed=1)),
    "gaussian, learned": (bayou.Gaussian(0.3, learn=True), randn(B, 2, 2), randn(B, 2, 2, seed=1)),
}


def bound(likelihood):
    return likelihood.bind(dtype=F64)


def matrix(likelihood, f, y, **options):
    """Σ_m s_m·s_mᵀ of every example, (B, K, K)."""
    columns = information(likelihood, f, y, **options).columns()
    flat = torch.stack([s.reshape(len(f), -1) for s in columns])
    return torch.einsum("mbk,mbl->bkl", flat, flat)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_ggn_is_the_hessian_where_it_does_not_depend_on_y(name):
    spec, f, y = CANONICAL[name]
    likelihood = bound(spec)
    expected = dense.hessians(likelihood.log_prob, f, y).detach()
    assert_close(matrix(likelihood, f, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_empirical_fisher_is_the_score_of_the_labels(name):
    spec, f, y = CANONICAL[name]
    likelihood = bound(spec)
    s = dense.scores(likelihood.log_prob, f, y).detach()
    assert_close(matrix(likelihood, f, y, kind="fisher"), torch.einsum("bk,bl->bkl", s, s))


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "poisson", "gaussian"])
def test_the_sampled_fisher_is_unbiased(name):
    """Within five standard errors of 20,000 labels, entry by entry."""
    spec, f, y = CANONICAL[name]
    likelihood = bound(spec)
    n = 20_000
    h = information(likelihood, f, y, "sampled", n, seed=0)
    columns = torch.stack(list(h.columns())) * n**0.5
    products = torch.einsum("mbk,mbl->mbkl", columns, columns)
    error = products.std(0) / n**0.5
    assert ((products.mean(0) - matrix(likelihood, f, y)).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize(
    ("spec", "outputs"),
    [
        (bayou.likelihoods.StudentT(4.0, 0.5), 1),
        (bayou.HeteroscedasticGaussian(), 2),
        (bayou.likelihoods.HeteroscedasticStudentT(4.0), 2),
        (bayou.HeteroscedasticGaussian(min_std=0.7), 2),
    ],
)
def test_elsewhere_the_ggn_is_the_fisher_information(spec, outputs):
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
    assert_close(matrix(likelihood, f, y[:1].unsqueeze(1))[0], expected, rtol=1e-6, atol=1e-8)


class Sech(BoundLikelihood):
    """p(y | f) = sech(y − f)/π, without a closed form in bayou: its Fisher information is ½."""

    def pointwise(self, f, y):
        return -torch.log(torch.cosh(y - f)) - math.log(math.pi)

    def sample(self, f, n=None, seed=None):
        return f + torch.tan(math.pi / 2 * self.draw_noise(rng.uniform, f, n, seed)).log()


def test_the_information_of_an_unknown_likelihood_is_sampled():
    """E[tanh²] = ½; the standard error of an entry is below 1/(2·√2048)."""
    f, y = randn(B, 2), randn(B, 2, seed=1)
    h = matrix(Sech(), f, y, seed=0)
    assert ((h - 0.5 * torch.eye(2, dtype=F64)).abs() < 5 / (2 * math.sqrt(2048))).all()
    assert torch.equal(h, matrix(Sech(), f, y, seed=0))
    assert (torch.linalg.eigvalsh(h) > 0).all()
    with pytest.raises(ValueError, match=r"too large to write out.*sampled"):
        information(Sech(), torch.zeros(1, 5000), torch.zeros(1, 5000))


@pytest.mark.parametrize(
    "name", ["categorical", "categorical, positions", "bernoulli", "bernoulli, no axis"]
)
def test_the_information_of_unknown_classes_is_a_sum_over_outcomes(name):
    """FiniteLikelihood's own, for likelihoods whose closed form is known."""
    spec, f, y = CANONICAL[name]
    likelihood = bound(spec)
    columns = FiniteLikelihood.information(likelihood, f).columns()
    flat = torch.stack([s.reshape(len(f), -1) for s in columns])
    assert_close(torch.einsum("mbk,mbl->bkl", flat, flat), matrix(likelihood, f, y))
