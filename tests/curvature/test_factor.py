"""The curvature of few rows by its factor against the dense matrix, in float64."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.curvature import Full, factor
from bayou.curvature.evidence import Evidence, Hyper
from bayou.curvature.factor import LowRankCurvature, LowRankPrecision, RowsSum, to_matrix
from bayou.curvature.kronecker import KroneckerSum
from bayou.curvature.structures import FullCurvature, FullSum, invert_triangular
from bayou.curvature.sweep import Sweep, make_plan
from bayou.likelihoods import Softmax
from bayou.network import Network
from bayou.posteriors import GaussianPosterior
from tests.double import double  # noqa: F401

near = partial(assert_close, rtol=1e-8, atol=1e-8)
SHAPES = {
    "a.weight": torch.Size((20, 15)),
    "a.bias": torch.Size((20,)),
    "c": torch.Size(()),
    "d": torch.Size((4, 5)),
}
D = 341
M = 40
PRIOR = {"a.weight": 0.5, "a.bias": 2.0, "c": 1.5, "d": 4.0}
SEPARATE = {"a.weight": 1.7, "a.bias": 0.4, "c": 0.3, "d": 2.5}
SCALE = 0.8


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def curvatures(rows=M):
    """The curvature by a factor, and the same one as a matrix."""
    prior = {name: torch.tensor(value) for name, value in PRIOR.items()}
    tensors = {"factor": random(rows, D)}
    return (
        LowRankCurvature(SHAPES, tensors, prior),
        FullCurvature(SHAPES, to_matrix(tensors), prior),
    )


def multipliers(kind):
    if kind == "one":
        one = torch.tensor(0.01)
        return dict.fromkeys(SHAPES, one)
    if kind == "equal":  # the same number, not the same tensor
        return {name: torch.tensor(0.01) for name in SHAPES}
    if kind == "units":
        separate = {name: torch.tensor(value) for name, value in SEPARATE.items()}
        return separate | {"a.weight": random(1, 15, seed=4).exp()}
    return {name: torch.tensor(value) for name, value in SEPARATE.items()}


every = pytest.mark.parametrize("kind", ["one", "equal", "separate", "units"])


@every
@pytest.mark.parametrize("rows", [0, 1, M, D + 10])
def test_covariance_draws_and_log_determinant_are_those_of_the_matrix(kind, rows, monkeypatch):
    monkeypatch.setattr(factor, "BLOCK", 32)
    monkeypatch.setattr(factor, "ROOT_NUMBERS", 50 * D)
    low_rank, full = curvatures(rows)
    scale = torch.tensor(SCALE)
    near(low_rank.log_det(multipliers(kind), scale), full.log_det(multipliers(kind), scale))
    like = torch.zeros(())
    covariance = low_rank.covariance(multipliers(kind), scale, like)
    expected = full.covariance(multipliers(kind), scale, like)
    assert isinstance(covariance, LowRankPrecision)
    assert covariance.size == D
    identity = covariance.from_vector(torch.eye(D))
    near(covariance.spread(identity), expected.tensors["root"])
    near(covariance.log_det, expected.log_det)
    near(covariance.to_vector(covariance.variance()), expected.to_vector(expected.variance()))
    deviation = covariance.from_vector(random(3, 2, D, seed=5))
    near(covariance.log_prob(deviation), expected.log_prob(deviation))
    for name, draw in covariance.sample(3, seed=7, start=2).items():
        near(draw, expected.sample(3, seed=7, start=2)[name])
    jacobian = covariance.from_vector(random(2, 3, D, seed=6))
    root = covariance.spread(jacobian)
    expected_root = expected.spread(jacobian)
    near(root @ root.mT, expected_root @ expected_root.mT)


def test_a_draw_does_not_depend_on_how_many_are_drawn():
    covariance = curvatures()[0].covariance(
        multipliers("one"), torch.tensor(SCALE), torch.zeros(())
    )
    many = covariance.sample(5, seed=1)
    few = covariance.sample(2, seed=1, start=3)
    for name in SHAPES:
        assert torch.equal(many[name][3:], few[name])
        assert covariance.sample(0, seed=1)[name].shape == (0, *SHAPES[name])


def test_marginals_and_matrices_are_full():
    low_rank, full = (
        curvature.covariance(multipliers("separate"), torch.tensor(SCALE), torch.zeros(()))
        for curvature in curvatures()
    )
    near(low_rank.as_matrix().tensors["root"], full.tensors["root"])
    names = ["d", "a.bias"]
    marginal = low_rank.marginal(names)
    assert isinstance(marginal, Full)
    near(marginal.tensors["root"], full.marginal(names).tensors["root"])
    other = Full({"e": torch.Size((2,))}, {"root": torch.eye(2)})
    joint = low_rank.with_independent(other)
    near(joint.tensors["root"], full.with_independent(other).tensors["root"])


@pytest.mark.parametrize("groups", [[list(SHAPES)], [["a.weight", "a.bias"], ["c"], ["d"]]])
def test_the_evidence_has_the_same_maximum(groups):
    distance = {name: random(*shape, seed=9) for name, shape in SHAPES.items()}
    low_rank, full = (
        Evidence(curvature, distance, -30.0, residual=20.0, noise=0.7, count=60)
        for curvature in curvatures()
    )
    ones = Hyper.ones(SHAPES, torch.zeros(()))
    for name, value in low_rank.parts(ones).items():
        near(value, full.parts(ones)[name])
    found = low_rank.maximize(groups, noise=True)
    expected = full.maximize(groups, noise=True)
    for name in SHAPES:
        assert_close(found.multipliers[name], expected.multipliers[name], rtol=1e-5, atol=0)
    assert_close(found.noise, expected.noise, rtol=1e-5, atol=0)


def test_rows_are_kept_until_there_are_too_many(monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    x = random(16, 6)
    y = torch.arange(16) % 3
    params = {name: value.detach() for name, value in net.named_parameters()}
    shapes = {name: value.shape for name, value in params.items()}
    weights = sum(value.numel() for value in params.values())

    def tensors(family):
        call = Network(net).call
        plan = make_plan(call, params, list(params), (x,))
        sums = family(shapes, plan, x)
        sweep = Sweep(call, params, plan, bayou.Categorical().bind())
        for number, rows in enumerate((slice(0, 9), slice(9, 16))):
            list(sweep.batch((x[rows],), y[rows], number, sums))
        return sums.tensors(1.7)

    expected = tensors(FullSum)["matrix"]
    assert torch.equal(tensors(RowsSum)["matrix"], expected)  # a small network
    monkeypatch.setattr(factor, "MIN_FACTORED_WEIGHTS", 1)
    monkeypatch.setattr(factor, "MAX_ROWS_PER_WEIGHT", 32 / weights)  # two columns of three classes
    found = tensors(RowsSum)
    assert found["factor"].shape == (32, weights)
    near(to_matrix(found)["matrix"], expected)
    for rows in (0, 10, 31):
        monkeypatch.setattr(factor, "MAX_ROWS_PER_WEIGHT", rows / weights)
        near(tensors(RowsSum)["matrix"], expected)


@pytest.mark.parametrize("size", [1, 3, 40, 101])
def test_a_triangular_matrix_is_inverted_by_halves(size, monkeypatch):
    monkeypatch.setattr("bayou.curvature.structures.TRIANGULAR_BLOCK", 8)
    lower = random(size, size).tril() / size**0.5 + 2 * torch.eye(size)
    near(invert_triangular(lower) @ lower, torch.eye(size))


def fit(x, y, method=None, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    method = method or bayou.Laplace("full", start=bayou.MAP(steps=30), prior="validation")
    return bayou.fit(net, (x, y), method, progress=False, **options)


def table():
    x = random(60, 12)
    return x, (x[:, 0] + 0.5 * random(60, seed=1) > 0).long()


def test_a_posterior_is_that_of_the_matrix_and_survives_a_file(monkeypatch, tmp_path):
    x, y = table()
    posterior = fit(x, y)
    assert isinstance(posterior.covariance, LowRankPrecision)
    monkeypatch.setattr(factor, "MIN_FACTORED_WEIGHTS", 10**6)
    dense = fit(x, y)
    assert isinstance(dense.covariance, Full)
    near(torch.tensor(posterior.log_evidence), torch.tensor(dense.log_evidence))
    near(posterior.predict(x, 10).outputs, dense.predict(x, 10).outputs)
    near(posterior.function(x)[1], dense.function(x)[1])
    path = tmp_path / "posterior.bayou"
    posterior.save(path)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    loaded = bayou.load(path, net)
    assert isinstance(loaded, GaussianPosterior)
    assert torch.equal(loaded.predict(x, 5).outputs, posterior.predict(x, 5).outputs)


def test_the_next_task_continues_from_a_factor(monkeypatch):
    x, y = table()
    method = bayou.Laplace("full", start=bayou.MAP(steps=30))
    given = bayou.Normal(1.0)

    def two_tasks():
        first = fit(x[:30], y[:30], method, prior=given)
        return first, fit(x[30:], y[30:], method, prior=first.as_prior())

    first, second = two_tasks()
    assert isinstance(first.covariance, LowRankPrecision)
    monkeypatch.setattr(factor, "MIN_FACTORED_WEIGHTS", 10**6)
    _, expected = two_tasks()
    near(second.predict(x, 10).outputs, expected.predict(x, 10).outputs)
    near(torch.tensor(second.log_evidence), torch.tensor(expected.log_evidence))


@pytest.mark.parametrize("frozen", ["output", "hidden", "rectified"])
def test_the_factor_of_the_output_layer_is_the_sum_of_the_information(frozen, monkeypatch):
    """It is the same as by the columns of H, where the layer is the output and where it is not."""
    torch.manual_seed(0)
    modules = [torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 7)]
    if frozen == "rectified":
        modules.append(torch.nn.ReLU(inplace=True))
    net = torch.nn.Sequential(*modules)
    x = random(16, 6)
    y = torch.arange(16) % 7
    params = {name: value.detach() for name, value in net.named_parameters()}
    names = ["0.weight", "0.bias"] if frozen == "hidden" else ["2.weight", "2.bias"]

    def tensors():
        call = Network(net).call
        plan = make_plan(call, params, names, (x,))
        sums = KroneckerSum({name: params[name].shape for name in names}, plan, x)
        sweep = Sweep(call, params, plan, bayou.Categorical().bind())
        list(sweep.batch((x,), y, 0, sums))
        return sums.tensors()

    columns = []
    original = Softmax.columns
    monkeypatch.setattr(Softmax, "columns", lambda self: columns.append(1) or original(self))
    found = tensors()
    assert bool(columns) is (frozen != "output")
    monkeypatch.setattr(Softmax, "total", lambda self: None)
    expected = tensors()
    for name, value in expected.items():
        near(found[name], value)
