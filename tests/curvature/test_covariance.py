"""Covariances by structure against the dense matrix, in float64."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from bayou.curvature import Diagonal, Full, Kronecker, LowRankPlusDiagonal
from bayou.curvature.evidence import Evidence, Hyper
from bayou.curvature.joint import nearest_product
from bayou.curvature.kronecker import KroneckerCurvature
from bayou.curvature.structures import DiagonalCurvature, FullCurvature
from tests.double import double  # noqa: F401

near = partial(assert_close, rtol=1e-9, atol=1e-11)
SHAPES = {
    "a.weight": torch.Size((4, 3)),
    "a.bias": torch.Size((4,)),
    "c": torch.Size(()),
    "d": torch.Size((2, 2)),
}
D = 21
PRIOR = {"a.weight": 0.5, "a.bias": 2.0, "c": 1.5, "d": 4.0}
# Weight and bias of a layer share theirs.
MULTIPLIERS = {"a.weight": 1.7, "a.bias": 1.7, "c": 0.3, "d": 2.5}
SCALE = 0.8


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gram(*shape, seed=0):
    x = random(*shape, seed=seed)
    return x @ x.mT


def order():
    """Where the entries of (a.weight, a.bias) stand among blocks (groups, outputs, inputs + 1)."""
    place = torch.arange(16).reshape(4, 4)
    return torch.cat((place[:, :3].reshape(-1), place[:, 3]))


def curvature(structure):
    """A curvature, and its C written out."""
    prior = {name: torch.tensor(value) for name, value in PRIOR.items()}
    if structure == "full":
        matrix = gram(D, 10)
        return FullCurvature(SHAPES, {"matrix": matrix}, prior), matrix
    squares = {name: random(*shape, seed=3).square() for name, shape in SHAPES.items()}
    if structure == "diagonal":
        matrix = torch.diag(torch.cat([value.reshape(-1) for value in squares.values()]))
        return DiagonalCurvature(SHAPES, squares, prior), matrix
    # Two groups of two outputs, three inputs and the bias.
    a = torch.stack([gram(4, 4, seed=g) for g in (1, 2)])
    g = torch.stack([gram(2, 2, seed=g) for g in (3, 4)])
    tensors = {"in|a.weight|a.bias": a, "out|a.weight|a.bias": g}
    tensors |= {f"square|{name}": squares[name] for name in ("c", "d")}
    blocks = torch.block_diag(*[torch.kron(g[i], a[i]) for i in range(2)])[order()][:, order()]
    rest = torch.diag(torch.cat([squares[name].reshape(-1) for name in ("c", "d")]))
    return KroneckerCurvature(SHAPES, tensors, prior), torch.block_diag(blocks, rest)


CURVATURES = {"full": Full, "diagonal": Diagonal, "kronecker": Kronecker}
STRUCTURES = CURVATURES | {"low rank plus diagonal": LowRankPlusDiagonal}
every = pytest.mark.parametrize("structure", STRUCTURES)
every_curvature = pytest.mark.parametrize("structure", CURVATURES)


def hyper():
    return Hyper(
        {n: torch.tensor(m) for n, m in MULTIPLIERS.items()},
        torch.tensor(1 / SCALE),
    )


def make(structure):
    """A covariance, Λ written out, and log |Λ| as the curvature has it."""
    if structure == "low rank plus diagonal":
        tensors = {f"std.{n}": random(*shape).square() + 0.1 for n, shape in SHAPES.items()}
        tensors |= {f"factor.{n}": random(2, *shape, seed=1) for n, shape in SHAPES.items()}
        std, factor = (
            torch.cat([tensors[f"{part}.{n}"].reshape(rows, -1) for n in SHAPES], 1)
            for part, rows in (("std", 1), ("factor", 2))
        )
        precision = torch.linalg.inv(torch.diag(std[0].square()) + factor.mT @ factor)
        return LowRankPlusDiagonal(SHAPES, tensors), precision, torch.logdet(precision)
    found, matrix = curvature(structure)
    prior = [torch.full((shape.numel(),), PRIOR[n] * MULTIPLIERS[n]) for n, shape in SHAPES.items()]
    precision = SCALE * matrix + torch.diag(torch.cat(prior))
    multipliers, scale = hyper().multipliers, hyper().scale
    covariance = found.covariance(multipliers, scale, torch.zeros(()))
    return covariance, precision, found.log_det(multipliers, scale)


@every
def test_a_covariance_is_the_inverse_of_the_precision(structure):
    covariance, precision, log_det = make(structure)
    assert type(covariance) is STRUCTURES[structure]
    assert covariance.size == D
    if isinstance(covariance, Full):
        assert_close(covariance.precision(), precision, rtol=1e-9, atol=1e-9)
    sigma = torch.linalg.inv(precision)
    spread = covariance.spread(covariance.from_vector(torch.eye(D)))
    assert_close(spread @ spread.mT, sigma, rtol=1e-9, atol=1e-11)
    variance = covariance.to_vector(covariance.variance())
    near(variance, sigma.diagonal())
    assert_close(log_det, torch.logdet(precision), rtol=1e-10, atol=1e-10)
    assert_close(covariance.log_det, -log_det, rtol=1e-10, atol=1e-10)
    d = random(7, 2, D, seed=5)
    zero = torch.zeros(D)
    expected = torch.distributions.MultivariateNormal(zero, precision_matrix=precision).log_prob(d)
    log_prob = covariance.log_prob(covariance.from_vector(d))
    assert_close(log_prob, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["full", "kronecker", "low rank plus diagonal"])
def test_a_marginal_is_the_block_of_its_tensors(structure):
    covariance, precision, _ = make(structure)
    index = covariance.from_vector(torch.arange(D))
    for names in (["a.weight", "a.bias"], ["d", "c"]):
        marginal = covariance.marginal(names)
        rows = torch.cat([index[name].reshape(-1) for name in names])
        size = len(rows)
        spread = marginal.spread(marginal.from_vector(torch.eye(size)))
        expected = torch.linalg.inv(precision)[rows][:, rows]
        assert_close(spread @ spread.mT, expected, rtol=1e-9, atol=1e-11)


@every
def test_draws_have_the_covariance(structure):
    """Within five standard errors of 4,000 draws, entry by entry."""
    covariance, precision, _ = make(structure)
    n = 4_000
    sigma = torch.linalg.inv(precision)
    drawn = covariance.to_vector(covariance.sample(n, seed=0))
    variances = sigma.diagonal()
    error = ((variances.unsqueeze(1) * variances + sigma.square()) / n).sqrt()
    assert ((drawn.mT @ drawn / n - sigma).abs() <= 5 * error).all()
    assert (drawn.mean(0).abs() <= 5 * (variances / n).sqrt()).all()


@every
def test_a_covariance_is_restored_from_its_tensors(structure):
    covariance, _, _ = make(structure)
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    again = type(covariance)(shapes, covariance.tensors)
    assert_close(covariance.sample(3, 1), again.sample(3, 1), rtol=0, atol=0)
    assert list(covariance.sample(2, 1)) == list(SHAPES)


@every_curvature
def test_the_determinant_has_gradients_in_multipliers_and_scale(structure):
    found, _ = curvature(structure)
    theta = torch.tensor([0.3, -0.4, 0.2, 0.5], requires_grad=True)

    def log_det(theta):
        a, c, d, scale = theta.exp()
        return found.log_det({"a.weight": a, "a.bias": a, "c": c, "d": d}, scale)

    assert torch.autograd.gradcheck(log_det, (theta,))
    one = torch.ones(())
    shared = torch.tensor(0.3, requires_grad=True)  # computed by eigenvalues
    assert torch.autograd.gradcheck(
        lambda t: found.log_det(dict.fromkeys(SHAPES, t.exp()), one), (shared,)
    )


def test_one_multiplier_and_many_equal_ones_agree():
    found, _ = curvature("full")
    shared = torch.tensor(1.3)
    apart = {name: torch.tensor(1.3) for name in SHAPES}
    scale = torch.tensor(0.7)
    assert_close(found.log_det(dict.fromkeys(SHAPES, shared), scale), found.log_det(apart, scale))


def test_a_kronecker_structure_ties_weight_and_bias():
    found, _ = curvature("kronecker")
    assert found.ties == [["a.weight", "a.bias"], ["c"], ["d"]]
    many = {name: torch.tensor(value) for name, value in PRIOR.items()}
    many["a.weight"] = torch.linspace(1, 2, 12).reshape(4, 3)
    with pytest.raises(
        ValueError, match=r"one prior scale for all of 'a\.weight'.*'diagonal' or 'full'"
    ):
        KroneckerCurvature(SHAPES, found.tensors, many)


def test_a_kronecker_structure_takes_a_prior_and_multipliers_for_each_input():
    """Λ = scale·A ⊗ G + D ⊗ 1 for any diagonal D over the columns of a layer."""
    first, matrix = curvature("kronecker")
    prior = {name: torch.tensor(value) for name, value in PRIOR.items()}
    prior["a.weight"] = torch.tensor([[0.5, 1.0, 3.0]])
    found = KroneckerCurvature(SHAPES, first.tensors, prior)
    scale = hyper().scale
    like = torch.zeros(())
    inputs = torch.tensor([[0.3, 1.2, 2.0]])
    for multipliers in (hyper().multipliers, hyper().multipliers | {"a.weight": inputs}):
        each = [
            (multipliers[n] * prior[n]).expand(shape).reshape(-1) for n, shape in SHAPES.items()
        ]
        precision = SCALE * matrix + torch.diag(torch.cat(each))
        covariance = found.covariance(multipliers, scale, like)
        spread = covariance.spread(covariance.from_vector(torch.eye(D)))
        assert_close(spread @ spread.mT, torch.linalg.inv(precision), rtol=1e-9, atol=1e-11)
        assert_close(
            found.log_det(multipliers, scale), torch.logdet(precision), rtol=1e-10, atol=1e-10
        )

    def log_det(log, scale):
        return found.log_det(hyper().multipliers | {"a.weight": log.exp()}, scale)

    assert torch.autograd.gradcheck(
        log_det, (inputs.log().requires_grad_(), scale.clone().requires_grad_())
    )


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_a_prior_for_every_weight(structure):
    found, matrix = curvature(structure)
    prior = {name: random(*shape, seed=8).square() + 0.1 for name, shape in SHAPES.items()}
    other = type(found)(SHAPES, found.tensors, prior)
    one = torch.ones(())
    expected = torch.logdet(matrix + torch.diag(torch.cat([p.reshape(-1) for p in prior.values()])))
    assert_close(other.log_det(dict.fromkeys(SHAPES, one), one), expected)


@every_curvature
def test_a_flat_prior_over_free_directions_raises(structure):
    found, _ = curvature(structure)
    flat = {name: torch.zeros(()) for name in SHAPES}
    for tensor in found.tensors.values():
        tensor.zero_()
    nothing = type(found)(SHAPES, found.tensors, {name: torch.ones(()) for name in SHAPES})
    with pytest.raises(ValueError, match=r"not positive definite.*proper Normal prior"):
        nothing.covariance(flat, torch.ones(()), torch.zeros(()))


def test_an_evidence_without_a_maximum_raises():
    """Weights exactly at their prior mean: the narrower the prior, the better."""
    found, _ = curvature("diagonal")
    evidence = Evidence(found, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, -1.0)
    with pytest.raises(ValueError, match="no maximum"):
        evidence.maximize([list(SHAPES)], noise=False)


def test_the_evidence_is_its_formula():
    found, _ = curvature("full")
    distance = {name: random(*shape, seed=6) for name, shape in SHAPES.items()}
    evidence = Evidence(found, distance, -12.0, residual=0.9, noise=0.3, count=30)
    at = hyper()
    parts = evidence.parts(at)
    noise = 0.3 / math.sqrt(SCALE)
    # Of y, for any noise.
    constant = -12.0 + 0.5 * 0.9 / 0.09 + 15 * math.log(2 * math.pi * 0.09)
    fit = constant - 15 * math.log(2 * math.pi * noise**2) - 0.5 * 0.9 / noise**2
    prior = 0.0
    for name, d in distance.items():
        normal = torch.distributions.Normal(
            0.0, torch.tensor(PRIOR[name] * MULTIPLIERS[name]).rsqrt()
        )
        prior += float(normal.log_prob(d).sum())
    log_det = float(found.log_det(at.multipliers, at.scale))
    assert float(parts["log_evidence"]) == pytest.approx(
        fit + prior + D / 2 * math.log(2 * math.pi) - log_det / 2
    )


def test_the_factors_of_a_nearest_product_are_positive_definite():
    """The signs of singular vectors are arbitrary."""
    pairs = [(gram(2, 3, 3, seed=k), gram(2, 4, 4, seed=k + 3)) for k in range(3)]
    for count in (1, 2, 3):
        for factor in nearest_product(pairs[:count]):
            assert (torch.linalg.eigvalsh(factor) > 0).all()
