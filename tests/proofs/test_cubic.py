"""Families against HMC: the posterior of a 1-20-1 tanh network on a cubic.

``experiments.toy`` has the problem, ``experiments/measure/cubic.py`` makes the whole table. Here the target
is shown to be the one that HMC had, and a few families are fitted again, shortly.
"""

import json
from pathlib import Path

import pytest
import torch

import bayou
from bayou.core.params import flatten
from experiments.measure import cubic
from experiments.toy import Problem, network

F64 = torch.float64


PROBLEM = Problem.load()
REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "cubic_hmc.json").read_text())
TABLE = json.loads(cubic.NUMBERS.read_text())["rows"]


def ratios(row):
    return dict(zip(cubic.KEY_POINTS, row["ratio"], strict=True))


def test_the_target_is_the_one_that_hmc_sampled():
    """log p(y | θ), log p(θ) and f at θ_j = sin j, against the numbers in the reference file."""
    check = REFERENCE["log_joint_check"]
    net, theta = network(), torch.arange(1, 62, dtype=F64).sin()
    named = dict(net.named_parameters())
    assert tuple(named) == ("0.weight", "0.bias", "2.weight", "2.bias")
    parts = theta.split([p.numel() for p in named.values()])
    params = {name: part.view_as(named[name]) for name, part in zip(named, parts, strict=True)}
    outputs = torch.func.functional_call(net, params, PROBLEM.u)
    likelihood = bayou.Gaussian(PROBLEM.noise).bind(dtype=F64)
    assert float(likelihood.log_prob(outputs, PROBLEM.t).sum()) == pytest.approx(
        check["log_likelihood"], rel=1e-12
    )
    prior = sum(
        float(bayou.Normal(1.0).bind(p.shape, dtype=F64).log_prob(p)) for p in params.values()
    )
    assert prior == pytest.approx(check["log_prior"], rel=1e-12)
    x = torch.tensor(cubic.KEY_POINTS, dtype=F64).unsqueeze(1) / PROBLEM.x_scale
    f = PROBLEM.y_scale * torch.func.functional_call(net, params, x).squeeze(1)
    torch.testing.assert_close(
        f, torch.tensor(check["f_at_key_points"], dtype=F64), rtol=1e-12, atol=1e-10
    )
    assert len(flatten(params)) == REFERENCE["model"]["parameters"]


def test_the_problem_is_that_of_the_reference():
    grid = REFERENCE["nuts"]["grid"]
    for name in ("x", "mean", "sd"):
        assert getattr(PROBLEM, name).tolist() == [row[name] for row in grid]
    scaled = {"x": PROBLEM.u * PROBLEM.x_scale, "y": PROBLEM.t * PROBLEM.y_scale}
    for name, values in scaled.items():
        assert values.squeeze(1).tolist() == pytest.approx(REFERENCE["data"][name], rel=1e-15)
    assert PROBLEM.noise == REFERENCE["model"]["noise_sd_scaled"]


def test_the_table_has_every_family_and_richer_ones_are_closer_to_hmc():
    """What holds of the committed numbers: the same optimum by two estimators, and richer families
    nearer to HMC.
    """
    rows = {name: TABLE[name]["0"] for name in cubic.FAMILIES}
    for name, row in rows.items():
        assert row["steps"] == cubic.FAMILIES[name].method.steps, (
            f"{name} was measured with other settings; make it again"
        )
    check_ffg(rows["FFG"])
    check_ffg(rows["FFG, sampled weights"])
    assert rows["MNF"]["elbo"] > rows["MNF, paper"]["elbo"] + 3
    assert rows["JointFlow"]["elbo"] > rows["FFG"]["elbo"] + 5
    beyond = {name: ratios(row)[6.0] for name, row in rows.items()}
    assert beyond["FFG"] < 0.3 < 0.5 < beyond["LowRank, rank 16"] < 1
    assert 0.5 < beyond["JointFlow"] < 1


def check_ffg(row):
    """Too wide among the data, far too narrow beyond them."""
    found = ratios(row)
    for side in (-1.0, 1.0):
        assert 0.17 < found[side * 6] < 0.28
        assert 0.38 < found[side * 5] < 0.58
        assert 1.35 < found[side * 4] < 1.9
    assert 1.8 < found[0.0] < 2.4
    assert row["mean_error_inside"] < 2
    assert row["mean_error_outside"] < 1.5
    assert row["elbo"] == pytest.approx(-87.5, abs=2.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NodeFlow", "SparseVD", "Dropout, concrete"])
def test_a_family_reproduces_its_row_of_the_table(name):
    """One family of each kind; the table of methods reproduces Delta and FFG, smaller problems test
    the others.

    Within 40 %: a change of the gate's range moved NodeFlow at ±6 by a third, its ELBO by 0.2.
    """
    row, again = TABLE[name]["0"], cubic.measure(PROBLEM, name, seed=0)
    assert again["kind"] == row["kind"]
    assert again["ratio"] == pytest.approx(row["ratio"], rel=0.4, abs=0.02)
    assert again["elbo"] == pytest.approx(row["elbo"], abs=3 + 3 * row["elbo_standard_error"])
