"""A posterior in one network: the optimum of a linear student is known, and so are the densities
that it is told by.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.likelihoods import BoundCategorical, Categorical, Gaussian
from bayou.network import Network
from bayou.network.target import Target
from bayou.operations.distill import dirichlet_loss, gaussian_nll, two_variances_nll
from bayou.posteriors.empirical import Empirical

F64 = torch.float64
EYE = torch.eye(
    4, dtype=F64
)  # a row for each of four x: a linear student can say anything of each of them


def assert_near(found, expected, atol):
    assert_close(found, expected, atol=atol, rtol=0)


def teacher(outputs, likelihood, draws=2):
    """A posterior of known functions: f_s(x_i) is row i of weight s."""
    net = nn.Linear(4, outputs, bias=False, dtype=F64)
    weight = torch.randn(draws, outputs, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    return Empirical(Target.build(net, likelihood, None, 4), Network(net), {"weight": weight})


def student(outputs):
    return nn.Linear(4, outputs, bias=False, dtype=F64)


def distilled(posterior, outputs, keep=None, steps=800):
    options = {"steps": steps, "lr": 0.05, "batch_size": 4, "progress": False}
    return bayou.distill(posterior, student(outputs), EYE, keep=keep, **options)


@pytest.mark.parametrize("likelihood", [Categorical(), bayou.Bernoulli()])
def test_student_of_classes_is_the_mixture_of_the_draws(likelihood):
    """min −Σ_c p_teacher·log p_student is p_student = p_teacher; with the two swapped it would be a
    vertex.
    """
    posterior = teacher(3, likelihood)
    found = distilled(posterior, 3)
    assert isinstance(found, Empirical)
    outputs = posterior.stack["weight"].mT
    probability = torch.sigmoid
    if isinstance(likelihood, Categorical):
        probability = torch.nn.Softmax(-1)
    expected = probability(outputs).mean(0)
    assert_near(found.predict(EYE).mean, expected, 1e-6)
    assert_near(probability(found.to_module()(EYE)), expected, 1e-6)


def test_a_student_of_numbers_ends_at_mean_and_variance_of_the_mixture():
    posterior = teacher(2, Gaussian(0.5))
    found = distilled(posterior, 4).predict(EYE)
    draws = posterior.stack["weight"].mT
    assert_near(found.mean, draws.mean(0), 1e-6)
    assert_near(found.std.square(), draws.var(0, correction=0) + 0.25, 1e-6)


def test_epistemic_and_aleatoric_variance_are_separate():
    posterior = teacher(1, Gaussian(0.5), draws=5)
    found = distilled(posterior, 3, "epistemic")
    assert isinstance(found, bayou.operations.Distilled)
    draws = posterior.stack["weight"].mT
    mean, between, within = found.outputs(EYE).chunk(3, -1)
    assert_near(mean, draws.mean(0), 1e-5)
    assert_near(between.exp(), draws.var(0, correction=0), 1e-5)
    assert_near(within.exp(), torch.full_like(within, 0.25), 1e-5)
    said = found.predict(EYE, 20_000)
    assert_near(said.aleatoric_std, torch.full((4, 1), 0.5, dtype=F64), 1e-5)
    assert_close(
        said.epistemic_std, (0.5 * between).exp(), atol=0, rtol=0.03
    )  # std of a std: 0.005
    with pytest.raises(ValueError, match="concentration is for classes"):
        found.concentration(EYE)


def test_a_dirichlet_has_the_mean_and_the_variance_of_its_draws():
    """At the optimum E p and Σ_c Var p_c of the Dirichlet are the teacher's; the gradients of both
    vanish there.
    """
    posterior = teacher(3, Categorical(), draws=6)
    p = posterior.stack["weight"].mT.softmax(-1)
    mean, variance = p.mean(0), p.var(0, correction=0).sum(-1)
    total = (1 - mean.square().sum(-1)) / variance - 1
    f = (total.unsqueeze(-1) * mean).log().requires_grad_()
    told = torch.cat((mean, p.square().sum(-1).mean(0).unsqueeze(-1)), -1)
    (slope,) = torch.autograd.grad(dirichlet_loss(BoundCategorical())(f, told).sum(), f)
    assert_near(slope, torch.zeros_like(slope), 1e-12)

    found = distilled(posterior, 3, "epistemic")
    assert isinstance(found, bayou.operations.Distilled)
    alpha = found.concentration(EYE)
    share = alpha / alpha.sum(-1, keepdim=True)
    assert_near(share, mean, 1e-5)
    assert_close(alpha.sum(-1), total, atol=0, rtol=1e-3)
    said, n = found.predict(EYE, 20_000, seed=1), 20_000
    spread = (share * (1 - share) / (1 + alpha.sum(-1, keepdim=True))).sqrt()
    assert bool(((said.mean - share).abs() < 5 * spread / n**0.5).all())
    assert_close(said.epistemic_std, spread, atol=0, rtol=0.05)
    assert torch.equal(said.outputs, found.predict(EYE, 20_000, seed=1).outputs)


def test_gaussian_losses_are_expectations():
    """Over a teacher of two points and noise, term by term against torch.distributions."""
    f, draws = torch.randn(4, 3, dtype=F64), torch.randn(2, 4, 1, dtype=F64)
    m, s, t = f.chunk(3, -1)
    normal = torch.distributions.Normal(m, (0.5 * s).exp())
    moments = torch.cat((draws.mean(0), draws.var(0, correction=0)), -1)
    expected = -normal.log_prob(draws).mean(0)[:, 0]
    assert_close(gaussian_nll(f[:, :2], moments), expected)
    noise = -torch.distributions.Normal(0.0, (0.5 * t).exp()).log_prob(
        torch.full((4, 1), 0.3, dtype=F64)
    )[:, 0]
    all_three = torch.cat((moments, torch.full((4, 1), 0.09, dtype=F64)), -1)
    assert_close(two_variances_nll(f, all_three), expected + noise)


CLASSES = teacher(3, Categorical())
LABELED = (EYE, torch.tensor([0, 1, 2, 0]))


def one_function():
    probit = bayou.Laplace(start=bayou.MAP(steps=3), predictive="probit")
    return bayou.fit(student(3), LABELED, method=probit, progress=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: distilled(CLASSES, 4),
            r"gives \(2, 4\) for 2 rows, but this teacher needs \(B, \*\(3,\)\)",
        ),
        (
            lambda: distilled(teacher(1, Gaussian(0.5)), 2, "epistemic"),
            r"needs \(B, \*\(3,\)\).*two log-variances",
        ),
        (
            lambda: bayou.distill(CLASSES, student(3), torch.ones(5, 7, dtype=F64)),
            "the network cannot take x",
        ),
        (
            lambda: bayou.distill(CLASSES, nn.Linear(5, 3, dtype=F64), EYE),
            "the network cannot take x",
        ),
        (
            lambda: distilled(teacher(3, Categorical(), draws=1), 3, "epistemic"),
            "without epistemic uncertainty to keep",
        ),
        (lambda: distilled(one_function(), 3, "epistemic"), "without epistemic uncertainty"),
        (lambda: distilled(CLASSES, 3, "all"), "keep must be None or 'epistemic'"),
        (
            lambda: distilled(teacher(1, bayou.Poisson()), 1),
            "classes and real numbers, got the likelihood BoundPoisson",
        ),
        (
            lambda: bayou.distill(bayou.SGLD(), student(3), LABELED, samples=3),
            "samples= is for a posterior",
        ),
        (
            lambda: bayou.distill(CLASSES, student(3), EYE, prior=bayou.Normal(1.0)),
            "are for a chain",
        ),
        (
            lambda: bayou.distill(bayou.VI(), student(3), LABELED),
            r"a chain to run such as SGLD\(\), got VI",
        ),
        (
            lambda: bayou.distill(
                bayou.SGLD(steps=4, lr=1e-3, draws=2), student(2), LABELED, net=student(3)
            ),
            "the student gives",
        ),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_students_are_saved_and_repeatable(tmp_path):
    posterior, net = teacher(3, Categorical()), student(3)
    before = net.weight.clone()
    options = {"lr": 0.05, "batch_size": 2, "keep": "epistemic", "progress": False}
    whole = bayou.distill(posterior, net, (EYE, torch.zeros(4)), steps=40, **options)
    assert torch.equal(net.weight, before)
    assert isinstance(whole, bayou.operations.Distilled)
    whole.point.save(tmp_path / "student")
    loaded = bayou.load(tmp_path / "student", student(3))
    assert isinstance(loaded, Empirical)
    assert torch.equal(
        bayou.operations.Distilled(loaded).predict(EYE).outputs, whole.predict(EYE).outputs
    )
    again = bayou.distill(posterior, net, EYE, steps=40, **options)
    assert torch.equal(again.outputs(EYE), whole.outputs(EYE))


CHAIN = bayou.HMC(chains=64, warmup=20, draws=100, leapfrogs=6, start=None)
FAST = {"lr": 0.1, "batch_size": 4, "progress": False}


@pytest.mark.parametrize("keep", [None, "epistemic"])
def test_student_of_a_running_chain_has_its_expectation(keep):
    """The student ends, but for the noise of its steps, at the expectation over all draws, which is
    known here.

    Rows are one-hot, so that columns of the weight are independent: p(w_i | y_i) ∝ N(w_i; 0,
    1)·softmax(w_i)[y_i].
    """
    torch.manual_seed(0)
    y, w = torch.tensor([0, 1, 2, 0]), torch.randn(100_000, 3, dtype=F64)
    log_p = w.log_softmax(-1)
    weights = torch.stack([log_p[:, label].exp() for label in y])  # (4, draws)
    weights = weights / weights.sum(1, keepdim=True)
    data, prior = (EYE, y), bayou.Normal(1.0)
    found = bayou.distill(CHAIN, student(3), data, prior=prior, keep=keep, **FAST)
    # the rate falls over the last 25 steps, each with 64 draws: the student is a mean over some 400
    # of them at least
    if not keep:
        spread = (
            weights @ log_p.exp().square() - (weights @ log_p.exp()).square()
        ).sqrt() / 400**0.5
        assert bool(((found.predict(EYE).mean - weights @ log_p.exp()).abs() < 5 * spread).all())
        return
    assert isinstance(found, bayou.operations.Distilled)
    alpha = found.concentration(EYE)
    p, mean = log_p.exp(), weights @ log_p.exp()
    each = (p.unsqueeze(1) - mean).square().sum(-1)  # (draws, 4)
    variance = (weights.T * each).sum(0)
    spread = ((weights.T * each.square()).sum(0) - variance.square()).sqrt() / 400**0.5
    share = alpha / alpha.sum(-1, keepdim=True)
    found_variance = (1 - share.square().sum(-1)) / (1 + alpha.sum(-1))
    assert bool(((found_variance - variance).abs() < 5 * spread).all())


def test_student_of_a_running_chain_of_numbers_has_mean_and_variance():
    """The variance of a y is that of the mixture, not of one draw: conjugate, the variance of a
    weight is 1/5.
    """
    y = torch.tensor([[1.0], [-1.0], [0.0], [2.0]], dtype=F64)
    found = bayou.distill(
        CHAIN, student(2), (EYE, y), net=student(1), likelihood=Gaussian(0.5), **FAST
    )
    said = found.predict(EYE)
    assert_near(said.mean, 0.8 * y, 5 * (0.2 / 400) ** 0.5)
    assert_near(said.std.square(), torch.full_like(y, 0.45), 5 * 0.2 * (2 / 400) ** 0.5)


def test_streamed_draws_are_those_of_a_fit():
    method = bayou.SGLD(steps=30, draws=3, chains=2, lr=1e-3, start=None)
    net = student(3)
    stored, drawn = (
        run(Target.build(net, Categorical(), None, 4), LABELED, progress=False)
        for run in (method.fit, method.stream)
    )
    drawn = torch.stack([one.stack["weight"] for one in drawn], 1)
    assert torch.equal(drawn.flatten(0, 1), stored.stack["weight"])
