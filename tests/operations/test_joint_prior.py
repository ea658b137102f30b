"""A posterior over several tensors as their prior: exact where a Gaussian is, and never another
density.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.curvature.joint import nearest_product
from bayou.network.target import Target
from bayou.posteriors import GaussianPosterior
from bayou.posteriors.guided import Bayesian

F64 = torch.float64
X = torch.linspace(-1, 1, 21, dtype=F64)
PHI, Y = torch.stack([X, X**2, X**3], 1), torch.sin(3 * X)[:, None]
FIRST, SECOND = (PHI[:11], Y[:11]), (PHI[11:], Y[11:])


def line():
    """METHODS number 1 with the constant as a bias: two tensors."""
    return nn.Linear(3, 1, dtype=F64)


def fit(net, data, method, **options):
    options = {"prior": bayou.Normal(1.0), "progress": False} | options
    return bayou.fit(net, data, method, likelihood=bayou.Gaussian(0.1), **options)


def two_layers(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def first(method):
    return fit(line(), FIRST, method)


def mode(*parts):
    """The line at the mean of its posterior, in closed form."""
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    phi = torch.cat((x, torch.ones_like(x[:, :1])), 1)
    w = torch.linalg.solve(torch.eye(4, dtype=F64) + phi.mT @ phi / 0.01, phi.mT @ y / 0.01)[:, 0]
    net = line()
    net.load_state_dict({"weight": w[None, :3], "bias": w[3:]})
    return net


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_laplace_of_two_tasks_is_that_of_all_rows(structure):
    """Number 8. Of a linear model with one output the Kronecker factors add up exactly too; so do
    the evidences.
    """
    method = bayou.Laplace(structure, curvature="ggn", start=None)
    one = fit(mode(FIRST), FIRST, method)
    two = fit(mode(FIRST, SECOND), SECOND, method, prior=one.as_prior())
    batch = fit(mode(FIRST, SECOND), (PHI, Y), method)
    assert isinstance(one, GaussianPosterior)
    assert isinstance(two, GaussianPosterior)
    assert isinstance(batch, GaussianPosterior)
    names = {name: torch.randn(5, *value.shape, dtype=F64) for name, value in batch.mean().items()}
    assert_close(
        two.covariance.mahalanobis(names), batch.covariance.mahalanobis(names), rtol=1e-12, atol=0
    )
    target, start = (
        two.target,
        {name: value.clone().requires_grad_() for name, value in batch.mean().items()},
    )
    slopes = torch.autograd.grad(target.log_joint(start, *SECOND), list(start.values()))
    scale = max(float(slope.abs().max()) for slope in slopes)
    assert (
        scale < 1e-8
    )  # of curvatures of 2,000: the mode of the two tasks is the batch mean to 1e-11
    assert one.log_evidence + two.log_evidence == pytest.approx(6.465824, abs=5e-7)


POSTERIORS = {
    "LowRank": bayou.VI(bayou.LowRank(2, std=0.3), steps=3),
    "JointFlow": bayou.VI(bayou.JointFlow("realnvp"), steps=3),
    "Inducing": bayou.VI(bayou.Inducing(4), steps=3),
    "Laplace, full": bayou.Laplace("full", start=bayou.MAP(steps=3)),
    "Laplace, kronecker": bayou.Laplace("kronecker", start=bayou.MAP(steps=3)),
    "Laplace, diagonal": bayou.Laplace("diagonal", start=bayou.MAP(steps=3)),
    "SWAG": bayou.SWAG(start=bayou.MAP(steps=3), steps=8, rank=2),
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_the_prior_is_the_density_of_the_posterior(name):
    posterior = first(POSTERIORS[name])
    target = Target.build(line(), bayou.Gaussian(0.1), posterior.as_prior(), 10)
    draws = posterior.sample(3, seed=0)
    assert_close(target.log_prior(draws), posterior.log_prob(draws))
    moved = {key: value + 0.3 for key, value in draws.items()}
    assert_close(target.log_prior(moved), posterior.log_prob(moved))


@pytest.mark.parametrize(
    "family", [bayou.MeanField(0.4), bayou.LowRank(2, std=0.4)], ids=["MeanField", "LowRank"]
)
def test_the_kl_to_a_joint_prior_is_that_of_gaussians(family):
    posterior = first(bayou.Laplace("full", start=bayou.MAP(steps=5)))
    assert isinstance(posterior, GaussianPosterior)
    bayesian = Bayesian(line(), {"*": family}, posterior.as_prior(), PHI[:2])
    assert not bayesian.local_names
    names = list(posterior.covariance.shapes)
    prior = _normal(
        {name: posterior.mean()[name] for name in names}, posterior.covariance.tensors["root"]
    )
    mean = bayesian.mean()
    if isinstance(family, bayou.LowRank):
        guide = bayesian.guides[0]
        parts = guide.split(torch.cat((torch.diag(guide.log_std.exp()), guide.factor.mT)))
        root = torch.cat([parts[name].flatten(1) for name in names], 1).mT
    else:
        std = {name: value for guide in bayesian.guides for name, value in guide.std().items()}
        root = torch.diag(torch.cat([std[name].flatten() for name in names]))
    q = _normal({name: mean[name] for name in names}, root)
    with torch.no_grad():
        expected = float(torch.distributions.kl_divergence(q, prior))
        kl = torch.stack([bayesian.draw(500, seed=k).kl for k in range(20)])
    assert abs(float(kl.mean()) - expected) < 5 * float(kl.std()) / 20**0.5


def _normal(mean, root):
    center, root = torch.cat([value.flatten() for value in mean.values()]).detach(), root.detach()
    return torch.distributions.MultivariateNormal(center, root @ root.mT)


def test_the_nearest_product_is_the_first_singular_pair_of_the_rearranged_sum():
    """Van Loan 1993, against the sum written out; a sum that is a product stays what it is."""
    torch.manual_seed(0)
    roots = [(torch.randn(2, 3, 3, dtype=F64), torch.randn(2, 4, 4, dtype=F64)) for _ in range(2)]
    pairs = [(a @ a.mT, g @ g.mT) for a, g in roots]
    a, g = nearest_product(pairs)
    for group in range(2):
        total = sum(torch.kron(x[group], y[group]) for x, y in pairs)
        distance = float((total - torch.kron(a[group], g[group])).norm())
        blocks = total.reshape(3, 4, 3, 4).permute(0, 2, 1, 3).reshape(9, 16)
        assert distance == pytest.approx(float(torch.linalg.svdvals(blocks)[1:].norm()), rel=1e-10)
        assert float(torch.linalg.eigvalsh(a[group]).min()) > 0
        assert float(torch.linalg.eigvalsh(g[group]).min()) > 0
    a, g = nearest_product([pairs[0], (2 * pairs[0][0], pairs[0][1])])
    assert_close(torch.kron(a[0], g[0]), 3 * torch.kron(pairs[0][0][0], pairs[0][1][0]))


TASKS = [(PHI, (PHI[:, 0] > 0).long()), (PHI, (PHI[:, 1] > 0.3).long())]


@pytest.mark.parametrize("structure", ["full", pytest.param("kronecker", marks=pytest.mark.slow)])
def test_heads_of_a_laplace_with_correlations(structure):
    """The body is what the last task left of it, without the head that it was correlated with."""
    method = bayou.Laplace(structure, start=bayou.MAP(steps=10))
    found = bayou.continual(
        two_layers(), TASKS, method, heads="2.*", prior=bayou.Normal(1.0), progress=False
    )
    (one, two), joined = found.posteriors, found.final[0]
    assert isinstance(joined, GaussianPosterior)
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        source = one if name[0] == "2" else two
        assert_close(joined.std()[name], source.std()[name])
        assert torch.equal(joined.mean()[name], source.mean()[name])
    body = {name: value for name, value in one.sample(3, seed=0).items() if name[0] == "0"}
    (coupling,) = two.target.couplings
    flat = torch.cat([body[name].flatten(1) for name in coupling.density.names], 1)
    draws = one.sample(20_000, seed=1)
    drawn = torch.cat([draws[name].flatten(1) for name in coupling.density.names], 1)
    normal = torch.distributions.MultivariateNormal(drawn.mean(0), drawn.mT.cov())
    assert_close(coupling.density.log_prob(body), normal.log_prob(flat), atol=0.3, rtol=0)
    assert joined.predict(PHI, seed=0).mean.shape == (21, 2)


def test_methods_with_the_joint_prior_of_another_method():
    """A chain, an MNF and a point with the prior that a full Laplace left, under local noise or
    not.
    """
    prior = first(bayou.Laplace("full", start=bayou.MAP(steps=3))).as_prior()
    for method in (
        bayou.VI(bayou.MNF(), steps=2), bayou.SGLD(steps=4, lr=1e-6, draws=2, start=None),
        bayou.Ensemble(2, bayou.MAP(steps=2)), bayou.VI(bayou.MeanField(), steps=2, compile=False),
    ):  # fmt: skip
        found = fit(line(), SECOND, method, prior=prior)
        assert found.predict(PHI, seed=0).mean.isfinite().all()


def test_methods_that_cannot_use_a_joint_prior_raise():
    full, rank = (
        first(POSTERIORS["Laplace, full"]).as_prior(),
        first(POSTERIORS["LowRank"]).as_prior(),
    )
    for method, prior, message in [
        (
            bayou.Laplace("kronecker"),
            full,
            r"Laplace\('kronecker'\) cannot continue from a joint prior of kind 'full'",
        ),
        (bayou.Laplace("diagonal"), full, "use the structure of the earlier tasks"),
        (bayou.Laplace("full"), rank, "of kind 'low rank plus diagonal'"),
        (bayou.Laplace("full", prior="evidence"), full, "has no scale to learn"),
        (bayou.Laplace("full", where="weight"), full, "where='weight' excludes 'bias'"),
        (bayou.IVON(steps=1), full, "Normal"),
        (
            bayou.VI({"bias": bayou.Delta(), "*": bayou.MeanField()}, steps=1),
            full,
            "'bias' has a joint prior with other",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(line(), SECOND, method, prior=prior)
    frozen = line()
    frozen.bias.requires_grad_(False)
    with pytest.raises(
        ValueError, match="has no density of weight alone, as heads and frozen tensors need"
    ):
        fit(frozen, SECOND, bayou.MAP(steps=1), prior=first(POSTERIORS["Inducing"]).as_prior())
    flow = bayou.VI(bayou.JointFlow("realnvp"), steps=2)
    with pytest.raises(ValueError, match="has no density of .* alone, as heads"):
        bayou.continual(two_layers(), TASKS, flow, heads="2.*", progress=False)


def test_files_of_posteriors_with_a_joint_prior_need_that_prior(tmp_path):
    prior = first(POSTERIORS["Laplace, full"]).as_prior()
    for method in (POSTERIORS["Laplace, full"], POSTERIORS["LowRank"]):
        posterior = fit(line(), SECOND, method, prior=prior)
        posterior.save(tmp_path / "second.bayou")
        again = bayou.load(tmp_path / "second.bayou", line(), prior=prior)
        expected = posterior.predict(PHI, 3, seed=0).outputs
        assert_close(again.predict(PHI, 3, seed=0).outputs, expected, rtol=1e-12, atol=0)
        with pytest.raises(ValueError, match="prior"):
            bayou.load(tmp_path / "second.bayou", line())
