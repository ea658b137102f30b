"""Families of VI against the posterior of conjugate linear regression."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import bayou
from tests.proofs.regression import (
    COVARIANCE,
    EVIDENCE,
    F64,
    MEAN,
    MEAN_FIELD,
    MEAN_FIELD_STD,
    NOISE,
    PRECISION,
    gaussian_elbo,
    linear,
    posterior_of,
    rows,
)


def fitted(spec, selection=slice(None), prior=None, **options):
    method = bayou.VI(spec, **({"schedule": "cosine"} | options))
    return bayou.fit(
        linear(),
        rows(selection),
        method,
        likelihood=bayou.Gaussian(NOISE),
        prior=prior,
        seed=0,
        progress=False,
    )


def state(posterior, name):
    return getattr(posterior.bayesian.guides[0], name).detach().numpy()


@pytest.fixture(scope="module")
def mean_field():
    return fitted(bayou.MeanField(), steps=400, lr=0.05, samples=16)


@pytest.fixture(scope="module")
def mnf():
    """The gain of the weights, and not their noise, begins with the spread of the posterior."""
    options = {"layers": 1, "hidden": (8,)}
    spec = bayou.MNF(flow="iaf", options=options, std=0.001, z_std=0.3)
    return fitted(spec, steps=600, lr=0.02, scale_lr=0.02, samples=8)


def test_the_references_are_those_of_methods():
    assert_allclose(MEAN, [0, 2.532311, 0, -2.470425], atol=5e-7)
    assert_allclose(
        np.sqrt(np.diag(COVARIANCE)),
        [0.032737, 0.089850, 0.066598, 0.125263],
        atol=5e-7,
    )
    assert_allclose(MEAN_FIELD_STD, [0.021817, 0.036014, 0.044383, 0.050209], atol=5e-7)
    assert pytest.approx(5.145762, abs=5e-7) == MEAN_FIELD
    assert pytest.approx(6.465824, abs=5e-7) == EVIDENCE
    assert gaussian_elbo(MEAN, COVARIANCE) == pytest.approx(EVIDENCE, abs=1e-9)


def test_a_penalized_point_is_the_posterior_mean():
    """The mode of a Gaussian posterior is its mean."""
    point = fitted(bayou.Delta(penalty=True), steps=400, lr=0.1)
    assert_allclose(state(point, "value")[0], MEAN, atol=1e-6)


def test_the_factorized_gaussian_is_the_mean_field_optimum(mean_field):
    mean, std = state(mean_field, "center")[0], np.exp(state(mean_field, "log_std")[0])
    assert_allclose(std, MEAN_FIELD_STD, rtol=0.01)
    assert_allclose(mean, MEAN, atol=0.005)
    exact = gaussian_elbo(mean, np.diag(std**2))
    assert MEAN_FIELD - 0.01 < exact <= MEAN_FIELD + 1e-9
    measured = bayou.elbo(mean_field, rows(), samples=500, seed=1)
    assert measured.kind == "exact"
    assert abs(measured.value - exact) < 3 * measured.standard_error < 0.3


@pytest.mark.slow
def test_low_rank_reaches_the_evidence():
    """Rank 3 plus a diagonal is every covariance in four dimensions."""
    low_rank = fitted(bayou.LowRank(rank=3), steps=800, lr=0.02, scale_lr=0.02, samples=16)
    mean, std, factor = (
        state(low_rank, "center"),
        np.exp(state(low_rank, "log_std")),
        state(low_rank, "factor"),
    )
    covariance = np.diag(std**2) + factor @ factor.T
    exact = gaussian_elbo(mean, covariance)
    assert EVIDENCE - 0.02 < exact <= EVIDENCE + 1e-9
    assert_allclose(np.sqrt(np.diag(covariance)), np.sqrt(np.diag(COVARIANCE)), rtol=0.1)
    measured = bayou.elbo(low_rank, rows(), samples=500, seed=1)
    assert measured.kind == "exact"
    assert abs(measured.value - exact) < 3 * measured.standard_error < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "options"),
    [
        pytest.param(None, {"steps": 700, "lr": 0.03, "scale_lr": 0.05}, id="linear"),
        pytest.param("iaf", {"steps": 2500, "lr": 0.01, "scale_lr": 0.1}, id="iaf"),
    ],
)
def test_a_joint_flow_reaches_the_evidence(flow, options):
    """Its KL is of the very draw, so at the optimum every draw gives the evidence and the error is
    small.
    """
    joint = fitted(
        bayou.JointFlow(flow=flow, options={"layers": 2} if flow else {}, std=0.05),
        samples=8,
        **options,
    )
    measured = bayou.elbo(joint, rows(), samples=1000, seed=1)
    assert measured.kind == "exact"
    assert measured.standard_error < 0.006
    assert abs(measured.value - EVIDENCE) < 0.02


def test_mnf_lies_between_mean_field_and_the_evidence(mnf):
    """One output, so each gain moves one weight, and a flow over the gains can have any
    correlation.

    The conjugate r(z|W) factorizes; it is exact where the noise is far smaller than the spread of
    the gain, since then W tells z. So the spread must come from the gain: the noise starts small,
    and learns no faster than the rest.
    """
    measured = bayou.elbo(mnf, rows(), samples=500, seed=1)
    assert measured.kind == "bound"
    assert measured.value - 3 * measured.standard_error > MEAN_FIELD + 0.8
    assert measured.value < EVIDENCE + 3 * measured.standard_error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "least"),
    [(bayou.MNF(), 6.3), (bayou.JointFlow(), 6.4), (bayou.LowRank(), 6.4)],
    ids=lambda v: str(v)[:9],
)
def test_default_settings_find_more_than_mean_field(spec, least):
    """A fit that is told nothing begins at the mode, where two weights are 0 and a gain on them
    says nothing.
    """
    posterior = fitted(spec, schedule="tail")
    if isinstance(spec, bayou.LowRank):
        std, factor = np.exp(state(posterior, "log_std")), state(posterior, "factor")
        value = gaussian_elbo(state(posterior, "center"), np.diag(std**2) + factor @ factor.T)
    else:
        measured = bayou.elbo(posterior, rows(), samples=2000, seed=1)
        value = measured.value + 2 * measured.standard_error
        assert measured.value < EVIDENCE + 3 * measured.standard_error
    assert value > least


FIRST, SECOND = slice(0, 11), slice(11, None)


def two_tasks(keep):
    """The mean after both tasks, where ``keep`` is what is kept of the precision after the
    first.
    """
    mean, precision = posterior_of(np.eye(4), rows=FIRST)
    return posterior_of(keep(precision), mean=mean, rows=SECOND)[0]


def test_the_references_of_the_two_tasks_are_those_of_methods():
    assert_allclose(two_tasks(lambda precision: precision), MEAN, atol=1e-12)
    assert_allclose(
        two_tasks(lambda precision: np.diag(np.diag(precision))),
        [-0.116412, 2.298160, 0.451637, -2.101316],
        atol=5e-7,
    )


@pytest.mark.slow
def test_a_mean_field_posterior_is_the_prior_of_the_next_task():
    """Variational continual learning (Nguyen et al. 2018)."""
    options = {
        "steps": 1000,
        "lr": 0.3,
        "scale_lr": 0.1,
        "samples": 128,
    }  # half the line leaves a soft direction
    first = fitted(bayou.MeanField(), FIRST, **options)
    second = fitted(bayou.MeanField(), SECOND, prior=first.as_prior(), **options)
    expected = two_tasks(lambda precision: np.diag(np.diag(precision)))
    assert_allclose(state(second, "center")[0], expected, atol=0.01)
    prior = second.bayesian.guides[0].prior
    np.testing.assert_array_equal(prior.mean.numpy(), state(first, "center"))
    np.testing.assert_array_equal(prior.log_scale.numpy(), state(first, "log_std"))


def test_a_full_covariance_prior_gives_the_batch_posterior_exactly():
    """With LowRank at the first posterior as the second prior, a Newton step from 0 ends at the
    batch mean.
    """
    mean, precision = posterior_of(np.eye(4), rows=FIRST)
    values, vectors = np.linalg.eigh(
        np.linalg.inv(precision)
    )  # Σ = least·I + F·Fᵀ with F of rank 3
    first = fitted(bayou.LowRank(rank=3), FIRST, steps=1)
    guide = first.bayesian.guides[0]
    with torch.no_grad():
        guide.center.copy_(torch.from_numpy(mean))
        guide.log_std.fill_(0.5 * math.log(values[0]))
        guide.factor.copy_(torch.from_numpy(vectors[:, 1:] * np.sqrt(values[1:] - values[0])))
    second = fitted(bayou.LowRank(rank=3), SECOND, prior=first.as_prior(), steps=1)
    prior, (phi, y) = second.bayesian.guides[0].priors[0], rows(SECOND)

    def log_joint(w):
        return prior.log_prob(w.unsqueeze(0)) - 0.5 * ((y[:, 0] - phi @ w) / NOISE).square().sum()

    zero = torch.zeros(4, dtype=F64)
    score = torch.func.grad(log_joint)
    gradient, hessian = score(zero), torch.func.jacrev(score)(zero)
    assert_allclose(-hessian.numpy(), PRECISION, rtol=1e-8, atol=1e-8)
    assert_allclose(-torch.linalg.solve(hessian, gradient).numpy(), MEAN, atol=1e-9)


def test_mnf_is_a_prior_by_the_moments_of_each_weight(mnf):
    prior = mnf.as_prior()["weight"].bind((1, 4), dtype=F64)
    draws = mnf.sample(20_000, seed=1)["weight"]
    std = prior.log_scale.exp()
    assert ((prior.mean - draws.mean(0)).abs() < 5 * std * (1 / 4096 + 1 / 20_000) ** 0.5).all()
    torch.testing.assert_close(
        std, draws.std(0), rtol=0.1, atol=0
    )  # 4,096 draws of z, whose tails need not be normal


def test_as_prior_without_a_density_is_an_error():
    node = fitted(bayou.NodeFlow(), FIRST, steps=1)
    with pytest.raises(
        ValueError,
        match="NodeFlow over weight has no density; use MeanField, LowRank or MNF to continue",
    ):
        node.as_prior()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "steps"), [(bayou.guides.SIVI, 500), (bayou.guides.UIVI, 1500)])
def test_implicit_posteriors_leave_mean_field_behind(family, steps):
    """Between mean field and the evidence, by their lower bound of the ELBO; UIVI has noisier
    gradients.
    """
    spec = family(latent=4, draws=200, std=0.02, spread=2.0)
    posterior = fitted(spec, steps=steps, lr=0.02, scale_lr=0.02, samples=16)
    found = bayou.elbo(posterior, rows(), samples=400, seed=0)
    assert (found.kind, found.side) == ("bound", "lower")
    assert MEAN_FIELD + 0.3 < found.value < EVIDENCE + 4 * found.standard_error
