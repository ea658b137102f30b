"""VBLL: the bound and its gradient against dense formulas, exact evidences, predictions in closed
form, errors.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.testing import assert_close

import bayou
from bayou.methods import VBLL
from bayou.network.target import Target
from bayou.training.data import as_data

F64 = torch.float64

NOISE = 0.3
every_rank = pytest.mark.parametrize("rank", [None, 2, 0], ids=["full", "low rank", "diagonal"])


def make_net(outputs=2, bias=True, features=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, features), nn.Tanh(), nn.Linear(features, outputs, bias)
    ).double()


def make_data(outputs=2, rows=30):
    torch.manual_seed(1)
    x = torch.randn(rows, 3, dtype=F64)
    return x, torch.sin(x[:, :outputs]) + NOISE * torch.randn(rows, outputs, dtype=F64)


def make_problem(net, data, likelihood, rank, **options):
    rows = as_data(data, 128)
    problem = VBLL(rank, **options)._problem(Target.build(net, likelihood, None, rows.n), rows, 0)
    torch.manual_seed(2)
    for parameter in (problem.log_std, problem.mixing):
        parameter.data.copy_(-1 + 0.5 * torch.randn_like(parameter))
    return problem


def dense(problem):
    """S of the rows (inputs, bias) of all outputs, one after another: (K·D, K·D)."""
    std, u = problem.log_std.exp(), problem.mixing
    if problem.full:
        roots = [
            torch.diag(s) @ (torch.eye(len(s)).to(s) + a.triu(1))
            for s, a in zip(std, u, strict=True)
        ]
        return torch.block_diag(*[root @ root.T for root in roots])
    root = torch.cat((torch.eye(std.numel()).to(std), u.flatten(0, 1)), 1)
    return std.flatten().diag() @ root @ root.T @ std.flatten().diag()


@every_rank
@pytest.mark.parametrize("bias", [True, False])
def test_the_bound_and_its_gradient_are_those_of_dense_gaussians(rank, bias):
    """Gaussian noise: log N(y | f, σ²) − ½·φᵀSφ/σ² − KL(N(w̄, S) ‖ N(0, I)) + log p of the rest."""
    data = x, y = make_data()
    problem = make_problem(make_net(bias=bias), data, bayou.Gaussian(NOISE), rank)
    net, s = problem.net, dense(problem)
    features = torch.cat((net[:2](x), torch.ones(len(x), int(bias), dtype=x.dtype)), 1)
    blocks = s.unflatten(0, (2, -1)).unflatten(2, (2, -1))
    v = torch.stack(
        [torch.einsum("bd,de,be->b", features, blocks[k, :, k], features) for k in range(2)], 1
    )
    expected = (Normal(net(x), NOISE).log_prob(y) - 0.5 * v / NOISE**2).sum()
    mean = torch.cat((net[2].weight, *([net[2].bias.unsqueeze(1)] if bias else [])), 1).flatten()
    prior = MultivariateNormal(torch.zeros_like(mean), torch.eye(len(mean)).to(mean))
    bound = expected - kl_divergence(MultivariateNormal(mean, s), prior)
    rest = sum(Normal(0.0, 1.0).log_prob(p).sum() for p in net[0].parameters())
    loss, numbers = problem.loss(x, y)
    assert_close(numbers["elbo"], bound.detach(), rtol=1e-10, atol=0)
    parameters = [problem.log_std, *([problem.mixing] if rank != 0 else []), *net.parameters()]
    found = torch.autograd.grad(loss, parameters)
    assert_close(
        found, torch.autograd.grad(-(bound + rest) / len(x), parameters), rtol=1e-8, atol=1e-10
    )


def maximize(problem, x, y):
    free = [parameter for parameter in problem.parameters() if parameter.requires_grad]
    optimizer = torch.optim.LBFGS(
        free, max_iter=500, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = problem.loss(x, y)[0]
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(problem.loss(x, y)[1]["elbo"])


@pytest.mark.parametrize(("rank", "value"), [(None, 6.465824), (0, 5.145762)])
def test_with_fixed_features_the_maximum_is_known(rank, value):
    x = torch.linspace(-1, 1, 21, dtype=F64)
    data = torch.stack([x**k for k in range(4)], 1), torch.sin(3 * x).unsqueeze(1)
    net = nn.Linear(4, 1, bias=False, dtype=F64)
    method = VBLL(rank, effort=0.06, lr=0.1)  # 120 steps of Adam, then L-BFGS
    posterior = bayou.fit(net, data, method, likelihood=bayou.Gaussian(0.1), progress=False)
    assert posterior.log_evidence == pytest.approx(value, abs=2e-6)
    known = torch.tensor(
        [0.032737, 0.089850, 0.066598, 0.125263]
        if rank is None
        else [0.021817, 0.036014, 0.044383, 0.050209]
    )
    assert_close(posterior.std()["weight"][0], known.double(), rtol=0, atol=1e-4)


def test_a_learned_noise_is_that_of_the_largest_evidence():
    data = x, y = make_data(1)
    net = make_net(1).requires_grad_(False)
    net[2].requires_grad_(True)
    problem = make_problem(net, data, bayou.Gaussian(1.0, learn=True), None)
    bound = maximize(problem, x, y)
    features = torch.cat((net[:2](x), torch.ones_like(x[:, :1])), 1)
    noise = torch.linspace(-3, 1, 4001, dtype=F64).exp()
    covariance = (
        features @ features.T + noise.square().reshape(-1, 1, 1) * torch.eye(len(x)).double()
    )
    evidence = MultivariateNormal(torch.zeros(len(x)).double(), covariance).log_prob(y[:, 0])
    assert bound == pytest.approx(float(evidence.max()), abs=1e-5)
    assert problem.likelihood.gaussian_noise == pytest.approx(
        float(noise[evidence.argmax()]), rel=2e-3
    )


def test_predictions_in_closed_form_are_the_limit_of_draws():
    data = make_data()
    method = VBLL(steps=30, lr=0.02)
    posterior = bayou.fit(
        make_net(), data, method, likelihood=bayou.Gaussian(NOISE), progress=False
    )
    x = data[0][:5]
    f, variance = posterior.function(x, diagonal=True)
    p, many, truth = (
        posterior.predict(x),
        posterior.predict(x, 2000, seed=0),
        Normal(f, (variance + NOISE**2).sqrt()),
    )
    y = data[1][:5]
    assert_close(p.mean, f)
    assert_close(p.std, truth.scale)
    assert_close(p.epistemic_std, variance.sqrt())
    assert_close(p.aleatoric_std, torch.full_like(f, NOISE))
    assert_close(p.log_prob(y), truth.log_prob(y).sum(1))
    assert_close(p.interval(0.8)[1], truth.icdf(torch.tensor(0.9).double()), rtol=1e-6, atol=1e-6)
    assert_close(p.entropy, truth.entropy().sum(1), rtol=1e-6, atol=1e-6)
    assert_close(p.mutual_information, (truth.scale / NOISE).log().sum(1), rtol=1e-5, atol=1e-6)
    error = 5 / math.sqrt(2000)
    assert_close(many.epistemic_std, variance.sqrt(), rtol=error, atol=0)
    assert ((many.mean - f).abs() <= error * variance.sqrt()).all()


@every_rank
def test_classes_are_predicted_by_draws_of_the_last_layer(rank):
    x, y = make_data()
    data = x, (y[:, 0] > 0).long()
    posterior = bayou.fit(make_net(), data, VBLL(rank, steps=30, lr=0.05), progress=False)
    std = posterior.std()
    assert not std["0.weight"].any()
    assert (std["2.weight"] > 0).all()
    draws = posterior.sample(2000, seed=0)
    assert_close(draws["2.weight"].std(0), std["2.weight"], rtol=5 / math.sqrt(2 * 2000), atol=0)
    assert posterior.predict(x, 7, seed=0).outputs.shape == (7, 30, 2)
    mean, variance = posterior.function(x, diagonal=True)
    many = posterior.predict(x, 4000, seed=0).outputs
    assert ((many.mean(0) - mean).abs() <= 5 * (variance / 4000).sqrt()).all()


def test_a_frozen_rest_stays_and_an_output_may_be_reshaped():
    x, y = make_data(1)
    net = nn.Sequential(*make_net(1), nn.Flatten(0))
    options = {
        "likelihood": bayou.likelihoods.StudentT(3.0, NOISE),
        "where": "last",
        "progress": False,
    }
    posterior = bayou.fit(net, (x, y[:, 0]), VBLL(steps=20, validation=0.2), **options)
    assert set(posterior.mean()) == {"2.weight", "2.bias"}
    assert {"log_likelihood", "kl", "elbo", "validation"} <= posterior.history[-1].keys()
    assert "log_prior" not in posterior.history[-1]
    assert posterior.predict(x[:3]).outputs.shape == (100, 3)


@pytest.mark.parametrize(
    ("layers", "options", "words"),
    [
        ([nn.Tanh()], {}, "outputs are those of a linear layer"),
        ([nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 2), nn.Flatten()], {}, "linear layer"),
        ([], {"prior": bayou.priors.StudentT()}, "Normal prior"),
        ([], {"likelihood": bayou.HeteroscedasticGaussian()}, "closed form or bound"),
        ([], {"method": VBLL(steps=1, predictive="probit")}, "probit predictions are for classes"),
        ([], {"method": bayou.Ensemble(2, of=VBLL(steps=1), parallel="vmap")}, "vmap"),
    ],
)
def test_unsuitable_networks_and_likelihoods_are_errors(layers, options, words):
    x, y = make_data()
    outputs = 1 if "likelihood" in options else 2  # a mean and a deviation
    defaults = {"method": VBLL(steps=1), "likelihood": bayou.Gaussian(NOISE), "progress": False}
    with pytest.raises(ValueError, match=words):
        bayou.fit(
            nn.Sequential(make_net(), *layers).double(), (x, y[:, :outputs]), **(defaults | options)
        )


def test_exact_predictions_of_classes_are_errors():
    x, y = make_data()
    with pytest.raises(ValueError, match="exact predictions need Gaussian noise"):
        bayou.fit(make_net(), (x, (y[:, 0] > 0).long()), VBLL(predictive="exact"), progress=False)


@pytest.mark.peers
@pytest.mark.parametrize(("rank", "name"), [(None, "dense"), (0, "diagonal")])
def test_the_bounds_are_those_of_the_package_of_the_authors(rank, name):
    """Their covariance of the same weights, with a lower triangular root and a noise of the logits,
    here 0.
    """
    import vbll

    x, y = make_data()
    labels = (y[:, 0] > 0).long()
    problem = make_problem(make_net(bias=False), (x, labels), bayou.Categorical(), rank)
    net, s = problem.net, dense(problem).detach()
    theirs = vbll.DiscClassification(
        4, 2, 1.0, name, prior_scale=2.0
    ).double()  # their variance is 2/inputs times this
    roots = torch.stack([torch.linalg.cholesky(s[k : k + 4, k : k + 4]) for k in (0, 4)])
    with torch.no_grad():
        theirs.W_mean.copy_(net[2].weight)
        theirs.W_logdiag.copy_(roots.diagonal(dim1=1, dim2=2).log())
        theirs.noise_logdiag.fill_(-40.0)
        if rank is None:
            theirs.W_offdiag.copy_(roots)
        found = theirs.jensen_bound(net[:2](x), labels)
        assert_close(problem.expected_log_likelihood(x, labels), found, rtol=1e-6, atol=1e-9)
        kl = (
            vbll.layers.classification.gaussian_kl(theirs.W(), theirs.prior_scale) - 0.5 * 8
        )  # of the constant
        assert_close(problem.kl(), kl, rtol=1e-6, atol=0)


def test_at_a_mode_the_default_length_is_a_tenth():
    rows = as_data(make_data(), None)
    assert VBLL(effort=0.5).at_mode(NOISE, rows).total_steps(rows) == 100
    assert VBLL(steps=3).at_mode(NOISE, rows).total_steps(rows) == 3
