"""The KL of every family, against Monte Carlo of log q − log p, quadrature, enumeration and known
numbers.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.testing import assert_close

import bayou
from bayou import flows
from bayou.core import rng
from bayou.guides.conditional import gain_kl
from bayou.guides.guide import KL
from bayou.guides.multiplicative import Conjugate
from bayou.priors import BoundNormal

DOUBLE = torch.float64
N = 10_000


def D(value):
    return torch.tensor(value, dtype=DOUBLE)


def shake(module, scale=0.3):
    """Move every parameter away from its start, so that nothing is an identity by accident."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(scale * rng.normal(1, p.shape, p, seed=i)[0])


def guide_of(spec, net, prior=None, name="weight"):
    bnn = bayou.bayesianize(
        net.to(DOUBLE), {name: spec, "*": bayou.Delta()} if not spec.joint else spec, prior=prior
    )
    (guide,) = (g for g in bnn.guides if name in g.names)
    return guide


def near(values, exact, sigmas=5.0):
    """The mean of n independent values is what it should be, to within its standard error."""
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - float(exact)) <= sigmas * error + 1e-9, (
        float(values.mean()),
        exact,
        error,
    )


# log p of a tensor (n, ...), written with torch.distributions
PRIORS = {
    "normal": (bayou.Normal(0.7), lambda fan: distributions.Normal(D(0.0), D(0.7))),
    "normal, mean": (bayou.Normal(0.7, mean=0.3), lambda fan: distributions.Normal(D(0.3), D(0.7))),
    "fan in": (
        bayou.Normal("fan_in", gain=1.5),
        lambda fan: distributions.Normal(D(0.0), D(1.5 / math.sqrt(fan))),
    ),
    "student": (
        bayou.priors.StudentT(3.0, 0.5),
        lambda fan: distributions.StudentT(D(3.0), D(0.0), D(0.5)),
    ),
    "mixture": (
        bayou.priors.ScaleMixture(0.3, 1.0, 0.1),
        lambda fan: distributions.MixtureSameFamily(
            distributions.Categorical(torch.tensor([0.3, 0.7], dtype=DOUBLE)),
            distributions.Normal(
                torch.zeros(2, dtype=DOUBLE), torch.tensor([1.0, 0.1], dtype=DOUBLE)
            ),
        ),
    ),
}


def log_prior(name, w, fan):
    return PRIORS[name][1](fan).log_prob(w).flatten(1).sum(1)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("local", [True, False])
def test_factorized(prior, local):
    guide = guide_of(bayou.MeanField(std=0.3), nn.Linear(4, 3), PRIORS[prior][0])
    shake(guide)
    q = distributions.Normal(guide.center.detach(), guide.log_std.detach().exp())
    torch.manual_seed(0)
    w = q.sample((N,))
    each = q.log_prob(w).flatten(1).sum(1) - log_prior(prior, w, 4)
    assert guide.kl_kind is KL.exact
    with torch.no_grad():
        if prior in (
            "student",
            "mixture",
        ):  # no closed form: the KL of each draw is that of its own weights
            if local:
                kl = torch.cat([guide.draw(1, local=True).kl for _ in range(N // 10)])
                near(kl - each[: N // 10], 0.0)
            else:
                draw = guide.draw(N, seed=1)
                drawn = draw.parts["weight"]
                want = q.log_prob(drawn).flatten(1).sum(1) - log_prior(prior, drawn, 4)
                assert_close(draw.kl, want)
                near(draw.kl - each, 0.0)
        else:
            kl = guide.draw(3, local=local).kl
            assert kl.shape == (3,)
            near(each, kl[0])


def test_a_scalar_and_a_vector_have_a_kl_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.scale * x + self.shift

    bnn = bayou.bayesianize(
        Net().to(DOUBLE), bayou.MeanField(std=0.2), prior=bayou.priors.StudentT()
    )
    draw = bnn.draw(5)
    params = draw.parts
    q = {n: distributions.Normal(g.center, g.log_std.exp()) for g in bnn.guides for n in g.names}
    p = distributions.StudentT(D(4.0))
    want = sum((q[n].log_prob(w) - p.log_prob(w)).reshape(5, -1).sum(1) for n, w in params.items())
    assert_close(draw.kl, want.mean())
    log_q = sum(q[n].log_prob(w).reshape(5, -1).sum(1) for n, w in params.items())
    assert_close(bnn.log_prob(params), log_q)


def test_the_kl_of_sparse_variational_dropout_depends_on_log_alpha():
    """The approximation at log α = 0 is .43124 (``tests/test_priors.py`` has its error)."""
    guide = guide_of(bayou.SparseVD(), nn.Linear(1, 1))
    assert guide.kl_kind is KL.constant
    with torch.no_grad():
        guide.center.fill_(-0.7)
        guide.log_std.fill_(math.log(0.7))
    assert guide.log_alpha.item() == pytest.approx(0.0, abs=1e-12)
    assert guide.draw(1, local=True).kl.item() == pytest.approx(0.43124, abs=1e-5)


def test_an_improper_prior_makes_any_kl_one_up_to_a_constant():
    for family in (bayou.MeanField(), bayou.MNF(), bayou.JointFlow(), bayou.LowRank()):
        assert guide_of(family, nn.Linear(3, 2), bayou.priors.LogUniform()).kl_kind is KL.constant


@pytest.mark.parametrize("prior", ["normal, mean", "fan in", "student"])
def test_low_rank(prior):
    guide = guide_of(bayou.LowRank(rank=2, std=0.3), nn.Linear(3, 2), PRIORS[prior][0])
    shake(guide, 0.2)
    with torch.no_grad():
        covariance = (2 * guide.log_std).exp().diag() + guide.factor @ guide.factor.T
        q = distributions.MultivariateNormal(guide.center, covariance)
        draw = guide.draw(N, seed=0)
        w = torch.cat([draw.parts[name].flatten(1) for name in guide.names], 1)
        assert_close(guide.log_prob(draw.parts), q.log_prob(w))
        assert (torch.cov(w.T) - covariance).abs().max() < 5 * float(
            covariance.diag().max()
        ) * math.sqrt(2 / N)
        each = q.log_prob(w) - log_prior(prior, w, 3)  # a bias counts the inputs of its weight
        if prior == "student":
            assert_close(draw.kl, each)
        else:
            near(each, draw.kl[0])
            assert (draw.kl == draw.kl[0]).all()


@pytest.mark.parametrize(
    ("flow", "prior"),
    [(None, "normal, mean"), ("iaf", "student"), ("residual", "normal, mean")],
)
def test_joint_flow(flow, prior):
    options = {} if flow is None else {"layers": 2, "hidden": (8,)}
    spec = bayou.JointFlow(flow, options=options, std=0.3)
    guide = guide_of(spec, nn.Linear(3, 2), PRIORS[prior][0])
    shake(guide, 0.2)
    with torch.no_grad():
        draw = guide.draw(500, seed=0)
        w = torch.cat([draw.parts[name].flatten(1) for name in guide.names], 1)
        log_q = draw.kl + log_prior(prior, w, 3)
        assert_close(guide.log_prob(draw.parts), log_q, rtol=1e-7, atol=1e-7)  # through the inverse

    def weights(eps):  # log q by the change of variables, with the Jacobian of autograd
        x, _ = guide.transform._forward(eps.unsqueeze(0), None)
        return (guide.center + guide.log_std.exp() * x)[0]

    eps = guide.base.draw(500, (), 0, 0)
    for i in (0, 7):
        assert_close(weights(eps[i]), w[i])
        jacobian = torch.func.jacrev(weights)(eps[i])
        want = (
            distributions.Normal(D(0.0), D(1.0)).log_prob(eps[i]).sum()
            - torch.linalg.slogdet(jacobian).logabsdet
        )
        assert_close(log_q[i], want)
    if flow is None:
        with torch.no_grad():
            jacobian = torch.func.jacrev(weights)(eps[0])
            q = distributions.MultivariateNormal(
                weights(torch.zeros_like(eps[0])), jacobian @ jacobian.T
            )
            p = distributions.MultivariateNormal(
                torch.full_like(guide.center, 0.3), 0.49 * torch.eye(8, dtype=DOUBLE)
            )
            near(guide.draw(N, seed=1).kl, distributions.kl_divergence(q, p))


@pytest.mark.parametrize("per", ["unit", "weight"])
@pytest.mark.parametrize("mean", [0.0, 0.4])
def test_dropout(per, mean):
    """E[−log p(W)] − H(mask), by enumeration of all masks; around 0 the L2 with weight 1/(2(1 −
    p)σ²).
    """
    scale = 0.7
    guide = guide_of(
        bayou.Dropout(0.3, per=per, rate="concrete"),
        nn.Linear(2, 3),
        bayou.Normal(scale, mean=mean),
    )
    prior = distributions.Normal(torch.tensor(mean, dtype=DOUBLE), scale)
    shape = (1, 2) if per == "unit" else (3, 2)
    units = math.prod(shape)
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=DOUBLE).reshape(
        -1, *shape
    )

    def enumerated(center, logit):
        p = logit.sigmoid()
        probability = torch.where(masks > 0, 1 - p, p).flatten(1).prod(1)
        log_p = prior.log_prob(center * masks / (1 - p)).flatten(1).sum(1)
        return (probability * (probability.log() - log_p)).sum()

    got = guide.draw(2).kl
    want = enumerated(guide.center, guide.logit_p)
    assert_close(got, want.expand(2))
    parameters = [guide.center, guide.logit_p]
    for a, b in zip(
        torch.autograd.grad(got[0], parameters), torch.autograd.grad(want, parameters), strict=True
    ):
        assert_close(a, b)
    if mean == 0.0:
        p, center = 0.3, guide.center.detach()
        entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
        constant = center.numel() * (math.log(scale) + 0.5 * math.log(2 * math.pi))
        l2 = float(center.square().sum()) / (2 * (1 - p) * scale**2)
        assert got[0].item() == pytest.approx(l2 - units * entropy + constant, rel=1e-12)
    # The masks are the ones it speaks of.
    guide.eval()
    w = guide.sample(N, seed=0)["weight"]
    kept = (w != 0).double().reshape(N, 3, 2)
    assert (kept.mean(0) - 0.7).abs().max() < 5 * math.sqrt(0.21 / N)
    assert_close(w[w != 0], (guide.center.expand_as(w) / 0.7)[w != 0])
    assert bool((kept == kept[:, :1]).all()) == (per == "unit")


def test_dropout_without_dropping_is_a_point():
    guide = guide_of(bayou.Dropout(1e-9), nn.Linear(2, 3), bayou.Normal(0.7))
    point = guide_of(bayou.Delta(penalty=True), nn.Linear(2, 3), bayou.Normal(0.7))
    with torch.no_grad():
        point.value.copy_(guide.center)
    assert_close(guide.draw(1).kl, point.draw(1).kl, rtol=1e-6, atol=1e-6)
    want = -distributions.Normal(D(0.0), D(0.7)).log_prob(point.value).sum()
    assert_close(point.draw(1).kl[0], want)


def test_a_learned_prior_scale_converges_to_that_of_the_weights():
    """Empirical Bayes has an optimum: at σ² = E[W²] the KL is stationary, for every family with a
    closed form.
    """
    for family in (bayou.Dropout(0.3), bayou.MeanField(std=0.3), bayou.Delta(penalty=True)):
        guide = guide_of(family, nn.Linear(4, 3), bayou.Normal(0.5, learn=True))
        with torch.no_grad():
            if isinstance(family, bayou.Dropout):
                second = guide.center.square().mean() / 0.7
            elif isinstance(family, bayou.MeanField):
                second = guide.center.square().mean() + 0.09
            else:
                second = guide.value.square().mean()
            guide.prior.log_scale.copy_(0.5 * second.log())
        (gradient,) = torch.autograd.grad(guide.draw(1).kl[0], guide.prior.log_scale)
        assert abs(gradient.item()) < 1e-9


@pytest.mark.parametrize(
    ("where", "components", "net"),
    [
        ("input", 1, nn.Linear(4, 3)),
        ("output", 3, nn.Linear(4, 3)),
        ("both", 1, nn.ConvTranspose1d(4, 3, 2)),
        ("both", 3, nn.Linear(4, 3)),
    ],
)
def test_node_noise(where, components, net):
    sizes = {"input": [4], "output": [3], "both": [4, 3]}[where]
    spec = bayou.NodeNoise(where=where, components=components, prior_std=0.6, z_std=0.2)
    guide = guide_of(spec, net)
    assert guide.kl_kind is KL.exact
    shake(guide.gains, 0.1)
    with torch.no_grad():
        kl = guide.draw(N, seed=0).kl
        if components == 1:
            want = 0.0
            for gain, size in zip(guide.gains, sizes, strict=True):
                q = distributions.Normal(gain.base.mean, gain.base.log_std.exp())
                assert q.mean.shape == (size,)
                want += float(
                    distributions.kl_divergence(q, distributions.Normal(D(1.0), D(0.6))).sum()
                )
            near(kl, want)
        else:
            torch.manual_seed(0)
            other = torch.zeros(N, dtype=DOUBLE)
            for gain in guide.gains:
                parts = distributions.Independent(
                    distributions.Normal(gain.base.mean, gain.base.log_std.exp()), 1
                )
                q = distributions.MixtureSameFamily(
                    distributions.Categorical(logits=gain.base.logits), parts
                )
                z = q.sample((N,))
                other += q.log_prob(z) - distributions.Normal(D(1.0), D(0.6)).log_prob(z).sum(-1)
            near(kl - other, 0.0)
        # The weights are points: their penalty is −log p.
        penalty = guide_of(
            bayou.NodeNoise(
                where=where, components=components, prior_std=0.6, z_std=0.2, penalty=True
            ),
            net,
        )
        penalty.gains.load_state_dict(guide.gains.state_dict())
        assert penalty.kl_kind is KL.constant
        log_p = distributions.Normal(D(0.0), D(1.0)).log_prob(penalty.center).sum()
        assert_close(penalty.draw(5, seed=0).kl, kl[:5] - log_p)


def hermite(n=60):
    """Nodes and weights for E over a standard normal."""
    x, w = np.polynomial.hermite_e.hermegauss(n)
    return torch.tensor(x, dtype=DOUBLE).unsqueeze(1), torch.tensor(w / w.sum(), dtype=DOUBLE)


def quadrature(gain, monkeypatch):
    """Make a one-dimensional gain draw the nodes of a quadrature; returns the weights."""
    eps, weights = hermite()
    nodes = (gain.base.mean + gain.base.log_std.exp() * eps).detach()
    monkeypatch.setattr(gain.base, "draw", lambda *_: nodes)
    return weights


def test_flow_kl_takes_the_prior_at_the_output(monkeypatch):
    """Number 5: z = 2ε + 1 against N(0, 1) is 1.306853; the node prior is N(1, 1), so both move by
    1.
    """
    for flow in (None, lambda dim: flows.DiagonalAffine(dim)):
        guide = guide_of(bayou.NodeFlow(flow, prior_std=1.0), nn.Linear(1, 2))
        (gain,) = guide.gains
        with torch.no_grad():
            if flow is None:
                gain.base.mean.fill_(2.0)
                gain.base.log_std.fill_(math.log(2.0))
            else:  # base N(0, 1), then z = 2ε + 2
                gain.base.mean.zero_()
                gain.base.log_std.zero_()
                gain.transform.shift.fill_(2.0)
                gain.transform.log_scale.fill_(math.log(2.0))
                z, _ = gain.transform._forward(torch.tensor([[0.0], [1.0]], dtype=DOUBLE), None)
                assert_close(z, torch.tensor([[2.0], [4.0]], dtype=DOUBLE))
        near(guide.draw(N, seed=0).kl.detach(), 1.306853)
        weights = quadrature(gain, monkeypatch)
        assert float((weights @ guide.draw(len(weights)).kl).detach()) == pytest.approx(
            1.306853, abs=1e-6
        )


def number_2(auxiliary="conjugate"):
    guide = guide_of(bayou.MNF(None, std=0.3, z_std=0.5, auxiliary=auxiliary), nn.Linear(1, 3))
    with torch.no_grad():
        guide.center.copy_(torch.tensor([[1.5], [-0.7], [0.2]]))
    return guide


def test_mnf_conjugate_auxiliary_closes_the_gap(monkeypatch):
    """Number 2: exact KL 2.901481; with r = q(z) 3.984418; the conjugate r closes the gap of
    1.082937 completely.
    """
    guide = number_2()
    assert guide.kl_kind is KL.bound
    mean = guide.center.detach()[:, 0]
    covariance = 0.09 * torch.eye(3, dtype=DOUBLE) + 0.25 * torch.outer(mean, mean)
    q = distributions.MultivariateNormal(mean, covariance)
    p = distributions.MultivariateNormal(torch.zeros(3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE))
    assert float(distributions.kl_divergence(q, p)) == pytest.approx(2.901481, abs=1e-6)
    near(guide.draw(N, seed=0, local=True).kl.detach(), 2.901481)
    near(guide.draw(N, seed=0).kl.detach(), 2.901481)
    weights = quadrature(guide.gain, monkeypatch)
    bound = guide.draw(len(weights), local=True).kl
    assert float((weights @ bound).detach()) == pytest.approx(2.901481, abs=1e-6)
    z, _ = guide.gain.draw(len(weights))
    marginal = gain_kl(guide.prior, guide.center, guide.log_std.exp(), z, 1)
    assert float((weights @ marginal).detach()) == pytest.approx(3.984418, abs=1e-6)
    assert float((weights @ (marginal - bound)).detach()) == pytest.approx(1.082937, abs=1e-6)


def test_mnf_conjugate_expectation_against_sampled_weights():
    """E over W of −log r(z|W) is exact, r(z|W) by Gaussian conditioning with dense matrices."""
    dim, wide = 3, 4
    auxiliary = Conjugate(dim, 0.5).to(DOUBLE)
    shake(auxiliary)
    like = auxiliary.center
    mean = rng.normal(1, (dim, wide), like, seed=1)[0]
    std = 0.2 + rng.uniform(1, (dim, wide), like, seed=2)[0]
    z = rng.normal(1, (dim,), like, seed=3) + 1
    w = z.unsqueeze(-1) * mean + std * rng.normal(N, (dim, wide), like, seed=4)
    with torch.no_grad():
        prior_mean, prior_var = auxiliary.center, (2 * auxiliary.log_std).exp()
        total = torch.zeros(N, dtype=DOUBLE)
        for i in range(dim):  # (z_i, W_i1, ..., W_iJ) is jointly Gaussian
            cross = prior_var[i] * mean[i]
            covariance = torch.outer(mean[i], mean[i]) * prior_var[i] + std[i].square().diag()
            gain = torch.linalg.solve(covariance, cross)
            center = prior_mean[i] + (w[:, i] - prior_mean[i] * mean[i]) @ gain
            variance = prior_var[i] - cross @ gain
            total -= distributions.Normal(center, variance.sqrt()).log_prob(z[0, i])
        near(total, auxiliary(z, mean, std, None)[0])


@pytest.mark.parametrize("local", [True, False])
def test_mnf_published_auxiliary_is_a_bound(local):
    """One weight: the bound by Monte Carlo, by quadrature over (z, W), and the exact KL below
    both.
    """
    guide = guide_of(bayou.MNF(None, std=0.4, z_std=0.6, auxiliary="paper"), nn.Linear(1, 1))
    with torch.no_grad():
        guide.center.fill_(1.3)
        guide.auxiliary.c.fill_(0.8)
        guide.auxiliary.b1.fill_(1.1)
        guide.auxiliary.b2.fill_(-0.5)
    q = distributions.Normal(torch.tensor(1.3, dtype=DOUBLE), math.sqrt((1.3 * 0.6) ** 2 + 0.4**2))
    exact = float(distributions.kl_divergence(q, distributions.Normal(D(0.0), D(1.0))))
    eps, weights = hermite(80)
    z = 1 + 0.6 * eps  # (K, 1)
    w = z * 1.3 + 0.4 * eps.T  # (K, K)
    summary = (0.8 * w).tanh()
    log_r = distributions.Normal(1.1 * summary, (-0.25 * summary).exp()).log_prob(z)
    log_q = distributions.Normal(D(1.0), D(0.6)).log_prob(z) + distributions.Normal(
        z * 1.3, 0.4
    ).log_prob(w)
    bound = float(
        weights @ (log_q - log_r - distributions.Normal(D(0.0), D(1.0)).log_prob(w)) @ weights
    )
    assert bound > exact + 0.01
    near(guide.draw(N, seed=0, local=local).kl.detach(), bound)


@pytest.mark.parametrize("axis", [0, 1])
def test_gain_kl_is_the_sum_of_gaussian_kls(axis):
    """For a prior with a mean and with a scale per weight (a posterior turned prior)."""
    shape = (3, 4, 2)
    like = torch.zeros((), dtype=DOUBLE)
    mean = rng.normal(1, shape, like, seed=0)[0]
    std = 0.1 + rng.uniform(1, shape, like, seed=1)[0]
    z = 1 + rng.normal(5, (shape[axis],), like, seed=2)
    cases = {
        "tensors": (
            rng.normal(1, shape, like, seed=3)[0],
            0.3 * rng.normal(1, shape, like, seed=4)[0],
        ),
        "scalars": (torch.tensor(0.4, dtype=DOUBLE), torch.tensor(-0.2, dtype=DOUBLE)),
        "mixed": (torch.tensor(0.4, dtype=DOUBLE), 0.3 * rng.normal(1, shape, like, seed=4)[0]),
    }
    for prior_mean, log_scale in cases.values():
        got = gain_kl(BoundNormal(shape, prior_mean, log_scale), mean, std, z, axis)
        p = distributions.Normal(prior_mean.expand(shape), log_scale.exp().expand(shape))
        for i in range(len(z)):
            factor = z[i].reshape([-1 if a == axis else 1 for a in range(3)])
            want = distributions.kl_divergence(distributions.Normal(factor * mean, std), p).sum()
            assert_close(got[i], want)


@pytest.mark.parametrize("auxiliary", ["conjugate", "paper"])
@pytest.mark.parametrize(
    ("net", "name"),
    [(nn.Linear(3, 4), "weight"), (nn.Conv1d(2, 3, 2), "weight"), (nn.Linear(3, 4), "bias")],
    ids=["dense", "convolution", "vector"],
)
def test_mnf_local_and_sampled_kl_agree(auxiliary, net, name):
    """The KL of a draw has the same expectation whether the weights were sampled or not, for any
    prior.
    """
    for prior in (bayou.Normal(0.5), bayou.priors.StudentT(3.0, 0.3)):
        guide = guide_of(bayou.MNF(std=0.2, z_std=0.3, auxiliary=auxiliary), net, prior, name)
        shake(guide, 0.1)
        with torch.no_grad():
            sampled = guide.draw(N, seed=0).kl
            if isinstance(prior, bayou.Normal):
                local = guide.draw(N, seed=1, local=True).kl
                near(sampled - local, 0.0)
            else:
                local = torch.cat([guide.draw(1, local=True).kl for _ in range(300)])
                error = math.hypot(
                    float(sampled.std()) / math.sqrt(N), float(local.std()) / math.sqrt(300)
                )
                assert abs(float(sampled.mean() - local.mean())) < 5 * error
