"""Every method beside the true posterior: a reference is made and read, rows are measured, and the
page says so.
"""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.kernels import Joint
from bayou.likelihoods.predictive import Predictive
from bayou.network import Network
from bayou.network.target import Target
from experiments import truth_reference
from experiments.truth_reference import PROBLEMS, Lengths, Problem, hamiltonian, reference

SHORT = Lengths(chains=4, temperatures=2, annealing_leapfrogs=1, warmup=4, draws=4, leapfrogs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reference of the digits that is no reference at all, but quickly made."""
    there = tmp_path_factory.mktemp("truth")
    problem = PROBLEMS["digits"]
    truth_reference.make(problem, SHORT, problem.path(there), torch.device("cpu"), 0, False)
    return there


def test_a_reference_is_read_as_it_was_made(folder):
    found = reference("digits", folder)
    assert found.predictive.probabilities.shape == (359, 10)
    assert torch.allclose(found.predictive.probabilities.sum(-1), torch.ones(359))
    assert len(found.train[0]) == found.facts["rows"] == 1438
    assert sum(p.numel() for p in found.build(0).parameters()) == 17_610
    assert metrics.nll(found.predictive, found.test[1]) == pytest.approx(
        found.facts["test_nll"], rel=1e-5
    )
    assert found.facts["lengths"] == vars(SHORT)
    assert 0 < found.facts["halves_total_variation"] < 1
    with pytest.raises(ValueError, match="python -m experiments.truth_reference yacht"):
        reference("yacht", folder)


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_references_of_the_repository_have_converged(name):
    found = reference(name)
    facts = found.facts
    assert facts["lengths"] == vars(PROBLEMS[name].lengths)
    assert facts["r_hat_95"] < 1.01
    assert facts["halves_total_variation"] < 0.01
    assert facts["divergences"] == 0
    assert metrics.nll(found.predictive, found.test[1]) == pytest.approx(
        facts["test_nll"], rel=1e-5
    )


def test_the_digits_agree_with_another_run_by_other_code():
    """Another HMC and another annealing of the same problem: −356.6 nats (a spread of 2.5), NLL
    .0941, ECE .045.
    """
    found = reference("digits")
    assert abs(found.evidence + 356.6) < 3 * math.hypot(found.facts["log_evidence_error"], 0.5)
    for score, value, tolerance in (
        (metrics.nll, 0.0941, 1e-3),
        (metrics.ece, 0.045, 2e-3),
        (metrics.accuracy, 1 - 0.0167, 1e-3),
    ):
        assert score(found.predictive, found.test[1]) == pytest.approx(value, abs=tolerance)


def linear_posterior():
    """Number 1 with its posterior mean and covariance."""
    x = torch.linspace(-1, 1, 21, dtype=torch.float64)
    phi, y = torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)
    covariance = torch.linalg.inv(phi.T @ phi / 0.01 + torch.eye(4))
    target = Target.build(
        nn.Linear(4, 1, bias=False).double(), bayou.Gaussian(0.1), bayou.Normal(1.0), 21
    )
    return target, (phi, y), covariance @ phi.T @ y[:, 0] / 0.01, covariance


def test_the_chains_of_a_reference_have_the_exact_posterior():
    target, data, mean, covariance = linear_posterior()
    joint = Joint(target, Network(target.net), target.start())
    lengths = Lengths(
        chains=50, temperatures=0, annealing_leapfrogs=0, warmup=60, draws=40, leapfrogs=25
    )
    begin = mean + 0.1 * torch.randn(50, 4, dtype=torch.float64)
    draws, how = hamiltonian(joint, [data], begin, lambda w: w, lengths, 0, False)
    flat = draws.flatten(0, 1)
    sd = covariance.diagonal().sqrt()
    assert how["divergences"] == 0
    assert torch.all(
        (flat.mean(0) - mean).abs() < 5 * sd / math.sqrt(400)
    )  # of 2,000 draws at least 400 count
    assert torch.all((flat.std(0) / sd - 1).abs() < 5 / math.sqrt(2 * 400))


def test_quantiles_of_a_function_stand_for_its_draws():
    """The total variation between the predictive of 5,000 draws and of 200 quantiles of each row is
    little.
    """
    problem = Problem("made", "relu-50", bayou.Gaussian(0.1), torch.float64, SHORT)
    draws = 0.1 * torch.randn(5000, 2, 1, dtype=torch.float64).exp()
    likelihood = problem.likelihood.bind(dtype=torch.float64)
    short = Predictive(likelihood, truth_reference._summary(problem, draws)["quantiles"])
    assert short.outputs.shape == (200, 2, 1)
    assert metrics.total_variation(short, Predictive(likelihood, draws)) < 5e-3
