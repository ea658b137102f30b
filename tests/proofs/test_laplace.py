"""Laplace against the posterior, the evidence and the best prior of conjugate regression.

Curvature is compared with curvlinops too.
"""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.curvature.kronecker import KroneckerSum
from bayou.curvature.structures import FullSum
from bayou.curvature.sweep import Sweep, make_plan
from bayou.network import Network
from tests.proofs.regression import (
    COVARIANCE,
    EVIDENCE,
    F64,
    MEAN,
    NOISE,
    ONES,
    PHI,
    Y,
    linear,
    posterior_of,
    rows,
)

CONVERGED = bayou.MAP(effort=0.06, lr=0.1)  # 120 steps of Adam, then L-BFGS
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what curvlinops imports


def evidence_at(w, precision, noise):
    """The Laplace evidence at fixed weights."""
    residual = Y - PHI @ w
    fit = -0.5 * len(Y) * math.log(2 * math.pi * noise**2) - 0.5 * residual @ residual / noise**2
    prior = (
        0.5 * np.log(precision).sum() - 0.5 * (precision * w**2).sum() - 2 * math.log(2 * math.pi)
    )
    log_det = np.linalg.slogdet(np.diag(precision) + PHI.T @ PHI / noise**2)[1]
    return float(fit + prior + 2 * math.log(2 * math.pi) - 0.5 * log_det)


def fitted(structure, weight=MEAN, noise=None, net=None, data=None, rules=None, **options):
    return bayou.fit(
        net or linear(weight),
        data or rows(),
        method=bayou.Laplace(structure, **({"start": None} | options)),
        likelihood=noise or bayou.Gaussian(NOISE),
        prior=rules,
        progress=False,
    )


def covariance_of(posterior):
    spread = posterior.covariance.spread(posterior.covariance.from_vector(torch.eye(4, dtype=F64)))
    return (spread @ spread.mT).numpy()


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_post_hoc_at_the_mode_is_the_posterior_and_its_evidence(structure):
    """One linear layer and a Gaussian: the Kronecker form is exact too."""
    posterior = fitted(structure, curvature="ggn")
    assert_allclose(posterior.mean()["weight"][0].numpy(), MEAN, atol=1e-12)
    assert_allclose(covariance_of(posterior), COVARIANCE, rtol=1e-8, atol=1e-12)
    assert posterior.log_evidence == pytest.approx(6.465824, abs=1e-6)
    assert posterior.log_evidence == pytest.approx(EVIDENCE, abs=1e-9)


def test_a_converged_map_is_the_posterior_and_its_evidence():
    posterior = fitted("full", None, start=CONVERGED)
    assert_allclose(posterior.mean()["weight"][0].numpy(), MEAN, atol=1e-8)
    assert_allclose(
        np.sqrt(np.diag(covariance_of(posterior))), np.sqrt(np.diag(COVARIANCE)), atol=1e-6
    )
    assert posterior.log_evidence == pytest.approx(EVIDENCE, abs=1e-6)


def test_the_diagonal_is_that_of_the_precision():
    posterior = fitted("diagonal")
    precision = np.diag(np.linalg.inv(COVARIANCE))
    assert_allclose(np.diag(covariance_of(posterior)), 1 / precision, rtol=1e-10)
    assert posterior.log_evidence < EVIDENCE - 1  # a diagonal has a larger determinant (Hadamard)


def test_prior_scales_of_tensors_are_added_exactly():
    """Weight and bias with priors of their own, in every structure that is exact here."""
    net = nn.Linear(3, 1, dtype=F64)
    net.weight.data, net.bias.data = (
        torch.from_numpy(MEAN[None, 1:].copy()),
        torch.from_numpy(MEAN[:1].copy()),
    )
    x, y = rows()
    expected = np.linalg.inv(np.diag([1 / 0.09, 4, 4, 4]) + PHI.T @ PHI / NOISE**2)
    rules = {"bias": bayou.Normal(0.3), "weight": bayou.Normal(0.5)}
    for structure in ("full", "kronecker"):
        posterior = fitted(structure, net=net, data=(x[:, 1:], y), rules=rules, curvature="ggn")
        eye = torch.eye(4, dtype=F64)
        spread = posterior.covariance.spread({"bias": eye[:, :1], "weight": eye[:, None, 1:]})
        assert_allclose((spread @ spread.mT).numpy(), expected, rtol=1e-8, atol=1e-12)
        assert_allclose(
            float(posterior.covariance.log_det),
            np.linalg.slogdet(expected)[1],
            rtol=1e-10,
            err_msg=structure,
        )


def test_the_linearized_predictive_is_the_exact_one():
    posterior = fitted("full")
    x, _ = rows()
    mean, covariance = posterior.function(x)
    assert_allclose(mean[:, 0].numpy(), PHI @ MEAN, atol=1e-10)
    assert_allclose(
        covariance[:, 0, 0].numpy(), np.einsum("ni,ij,nj->n", PHI, COVARIANCE, PHI), rtol=1e-8
    )
    drawn = posterior.predict(x, 1000, seed=0)
    expected = np.sqrt(covariance[:, 0, 0].numpy() + NOISE**2)
    assert_allclose(drawn.std[:, 0].numpy(), expected, rtol=5 / math.sqrt(2 * 1000))


def best(function, size):
    """exp of the maximum of a function of log parameters, by Nelder-Mead: no gradient, no code in
    common.
    """
    found = minimize(
        lambda t: -function(np.exp(t)), np.zeros(size), method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 20_000, "maxfev": 20_000},
    )  # fmt: skip
    return np.exp(found.x)


def prior_precision(posterior, name="weight"):
    return math.exp(-2 * float(posterior.target.priors[name].log_scale))


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_the_evidence_at_fixed_weights_is_maximized(structure):
    posterior = fitted(structure, curvature="ggn", prior="evidence")
    (expected,) = best(lambda t: evidence_at(MEAN, t * ONES, NOISE), 1)
    assert prior_precision(posterior) == pytest.approx(expected, rel=1e-5)
    assert posterior.log_evidence == pytest.approx(
        evidence_at(MEAN, expected * ONES, NOISE), abs=1e-8
    )


def test_prior_and_noise_at_fixed_weights_are_maximized_together():
    posterior = fitted("full", noise=bayou.Gaussian(0.5, learn=True), prior="evidence")
    expected = best(lambda t: evidence_at(MEAN, t[0] * ONES, t[1]), 2)
    assert prior_precision(posterior) == pytest.approx(expected[0], rel=1e-5)
    assert math.exp(float(posterior.target.likelihood.log_scale.detach())) == pytest.approx(
        expected[1], rel=1e-5
    )
    _, precision = posterior_of(expected[0] * np.eye(4), expected[1])
    assert_allclose(covariance_of(posterior), np.linalg.inv(precision), rtol=1e-4, atol=1e-10)


class Halves(nn.Module):
    """The same regression with the even and the odd features in tensors of their own."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = (nn.Linear(2, 1, bias=False, dtype=F64) for _ in range(2))
        self.even.weight.data = torch.tensor([[0.05, -0.1]], dtype=F64)
        self.odd.weight.data = torch.from_numpy(MEAN[None, 1::2].copy())

    def forward(self, x):
        return self.even(x[:, ::2]) + self.odd(x[:, 1::2])


def test_one_prior_scale_for_each_tensor_maximizes_the_evidence():
    w = np.array([0.05, MEAN[1], -0.1, MEAN[3]])
    posterior = fitted("full", net=Halves(), rules=bayou.Normal(1.0, learn=True))
    expected = best(lambda t: evidence_at(w, np.array([t[0], t[1], t[0], t[1]]), NOISE), 2)
    found = [prior_precision(posterior, f"{part}.weight") for part in ("even", "odd")]
    assert_allclose(found, expected, rtol=1e-5)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.Tanh(),
            nn.Linear(5, 3),
        ).double()
        return net, torch.randn(12, 2, 4, 4, dtype=F64), torch.arange(12) % 3


def swept(structure, kind):
    net, x, y = network()
    call, params = Network(net).call, {name: p.detach() for name, p in net.named_parameters()}
    plan = make_plan(call, params, list(params), (x,))
    sums = structure({name: p.shape for name, p in params.items()}, plan, x)
    list(Sweep(call, params, plan, bayou.Categorical().bind(), kind).batch((x,), y, 0, sums))
    return sums.tensors()


def dense(operator):
    found = operator @ torch.eye(operator.shape[1], dtype=F64)
    return found.detach()


@QUIET
@pytest.mark.peers
def test_ggn_and_empirical_fisher_are_those_of_curvlinops():
    import curvlinops

    net, x, y = network()
    loss, params = nn.CrossEntropyLoss(reduction="sum"), list(net.parameters())
    for kind, operator in (
        ("ggn", curvlinops.GGNLinearOperator),
        ("fisher", curvlinops.EFLinearOperator),
    ):
        expected = dense(operator(net, loss, params, [(x[:7], y[:7]), (x[7:], y[7:])]))
        assert_close(swept(FullSum, kind)["matrix"], expected, rtol=1e-8, atol=1e-10)


@QUIET
@pytest.mark.peers
def test_kronecker_factors_are_those_of_curvlinops():
    """Its product with the identity, block by block, against ours."""
    import curvlinops

    net, x, y = network()
    loss, params = nn.CrossEntropyLoss(reduction="sum"), list(net.parameters())
    expected = dense(
        curvlinops.KFACLinearOperator(
            net,
            loss,
            params,
            [(x, y)],
            fisher_type="type-2",
            kfac_approx="expand",
            separate_weight_and_bias=False,
        )
    )
    found = swept(KroneckerSum, "ggn")
    first = 0
    for layer in ("0", "3", "5"):
        weight, bias = net[int(layer)].weight, net[int(layer)].bias
        outputs, inputs = len(weight), weight[0].numel()
        a, g = (found[f"{part}|{layer}.weight|{layer}.bias"][0] for part in ("in", "out"))
        block = torch.kron(
            g.contiguous(), a.contiguous()
        )  # order (output, input), the bias last of each
        place = torch.arange(outputs * (inputs + 1)).reshape(outputs, inputs + 1)
        order = torch.cat((place[:, :-1].reshape(-1), place[:, -1]))
        size = weight.numel() + bias.numel()
        theirs = expected[first : first + size, first : first + size]
        assert_close(block[order][:, order], theirs, rtol=1e-8, atol=1e-10)
        first += size
