"""IVON on families that are Gaussian given their gains: the bound of MNF by natural gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou import IVON, MNF
from bayou.core.specs import from_json, to_json
from bayou.guides import RankOne
from bayou.guides.gain import GainFlow
from bayou.inference.method import Method
from bayou.methods.evidence_bound import EvidenceBound
from bayou.methods.natural_bound import GAIN_MOMENTS, NaturalBound
from bayou.network.target import Target
from bayou.posteriors.guided import Bayesian
from tests.methods.draws import normal
from tests.proofs.regression import F64, NOISE
from tests.training.runs import assert_same, die_at_call

GUIDE = {"*": MNF(mixing=0)}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(F64)


def curve():
    x = normal(40, 3)
    return x, x[:, :1] * x[:, 1:2] + 0.1 * normal(40, 1, seed=1)


def fitted(method, net=None, data=None, **options):
    options = {"likelihood": bayou.Gaussian(0.3), "progress": False, "seed": 1} | options
    return bayou.fit(net or mlp(), data or curve(), method, **options)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("prior", [bayou.Normal(0.5, mean=0.2), bayou.Normal(0.5, learn="units")])
def test_with_gains_of_1_it_is_ivon(prior, local, monkeypatch):
    def ones(self, n, seed=None, start=0):
        like = next(self.parameters())
        return like.new_ones(n, self.base.mean.shape[-1]), like.new_zeros(n)

    monkeypatch.setattr(GainFlow, "draw", ones)
    method = IVON(steps=20, batch_size=10, samples=2, warmup=0.4, local=local, plain_lr=1e-3)
    plain = fitted(method, prior=prior)
    # r(z|W) has a spread of 1e-9, so that its gradients vanish, where its center stays at 1
    guide = MNF(None, z_std=1e-9, local=local)
    monkeypatch.setattr(
        "bayou.guides.multiplicative.Conjugate.forward", lambda self, z, *_: z.new_zeros(len(z))
    )
    with_gains = fitted(replace(method, guide=guide), prior=prior)
    for one, two in zip(plain.bayesian.guides, with_gains.bayesian.guides, strict=True):
        assert_close(two.center, one.center, rtol=1e-9, atol=1e-12)
        assert_close(two.log_std, one.log_std, rtol=1e-9, atol=1e-12)
        assert_close(dict(two.prior.named_parameters()), dict(one.prior.named_parameters()))


@pytest.mark.parametrize("auxiliary", ["conjugate", "paper"])
def test_the_loss_and_the_closed_form_have_the_gradient_of_the_whole_bound(auxiliary):
    """∂ELBO: for M the closed form is λ·(mean of z²·M − mean of z·m₀), for log σ λσ² − 1."""
    x, y = curve()
    guide = MNF(auxiliary=auxiliary, local=False)
    target = Target.build(mlp(), bayou.Gaussian(0.3), bayou.Normal(0.5, mean=0.2), 40)
    torch.manual_seed(1)
    bayesian = Bayesian(target.net, guide, target.prior, (x,))
    gradients = []
    for bound in (
        EvidenceBound(bayou.VI(guide, samples=3), target, bayesian),
        NaturalBound(IVON(guide, samples=3), target, bayesian, 1.0),
    ):
        bound.zero_grad()
        bound.beta.fill_(0.7)
        torch.manual_seed(2)
        loss, numbers = bound.loss(x, y)
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in bayesian.named_parameters()})
    observed = numbers[GAIN_MOMENTS].split([3, 3, 5, 5])
    moments_of = {}
    for index, name in enumerate(["0.weight", "2.weight"]):
        center, std = bound.moments[index].frame()
        v_mean, v_square = observed[2 * index : 2 * index + 2]
        square = center.square() + 2 * center * std * v_mean + std.square() * v_square
        moments_of[name] = (center + std * v_mean, square)
    precision = 1 / 0.5**2
    for index, member in enumerate(bayesian.guides):
        mean, square = moments_of.get(member.name, (1.0, 1.0))
        pull = precision * (square * member.center - mean * 0.2)
        spread = precision * (2 * member.log_std).exp() - 1
        for name, closed in (("center", pull), ("log_std", spread)):
            gradients[1][f"guides.{index}.{name}"] += 0.7 / 40 * closed.detach()
    assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)


def test_the_curvature_is_unbiased_given_the_gains():
    """Loss ½·wᵀAw: E[ĝ·ε/σ | z] is the diagonal of A for any z, and E[z∘ĝ] is z∘A(z∘m)."""
    factor = normal(4, 4)
    matrix = factor @ factor.mT
    bayesian = bayou.bayesianize(
        nn.Linear(4, 1, bias=False, dtype=F64), MNF(None, std=0.5, z_std=1e-9, local=False)
    )
    guide = bayesian.guides[0]
    z = torch.tensor([0.3, 1.0, 2.0, -1.5], dtype=F64)
    with torch.no_grad():
        guide.gain.base.mean.copy_(z)
    draws = 100_000
    w = guide.draw(draws, seed=0).parts["weight"][:, 0]
    slopes = w.detach() @ matrix
    eps = (w - z * guide.center[0]).detach() / 0.5
    (0.5 * ((w @ matrix) * w).sum(1).mean()).backward()
    standard_error = (slopes * eps / 0.5).std(0) / draws**0.5
    curvature = guide.log_std.grad[0] * (-2 * guide.log_std[0]).exp()
    assert ((curvature - matrix.diagonal()).abs() < 4 * standard_error).all()
    center = guide.center.detach()[0]
    standard_error = (z * slopes).std(0) / draws**0.5
    error = guide.center.grad[0] - z * (matrix @ (z * center))
    assert (error.abs() < 4 * standard_error).all()


def orthogonal_regression():
    """Return Φ with ΦᵀΦ = 40·I, y, and the mean and the standard deviation of the posterior."""
    phi = torch.linalg.qr(normal(40, 4)).Q * 40**0.5
    true = torch.tensor([[1.0, -0.5, 0.8], [0.3, 0.6, -1.0], [-0.7, 0.2, 0.4], [0.9, -0.8, 0.1]])
    y = phi @ true.to(F64) + NOISE * normal(40, 3, seed=1)
    precision = 1 + 40 / NOISE**2
    return phi, y, phi.mT @ y / NOISE**2 / precision, precision**-0.5


def log_evidence(phi, y):
    covariance = NOISE**2 * torch.eye(40, dtype=F64) + phi @ phi.mT
    normal = torch.distributions.MultivariateNormal(torch.zeros(40, dtype=F64), covariance)
    return float(normal.log_prob(y.mT).sum())


@pytest.mark.slow
def test_it_reaches_the_posterior_of_an_orthogonal_regression():
    phi, y, mean, std = orthogonal_regression()
    steps = {"steps": 500, "samples": 8, "start": "network"}
    methods = [
        IVON(MNF(None), lr=0.2, local=True, **steps),
        bayou.VI(MNF(None), lr=0.01, **steps),
    ]
    bounds = []
    for method in methods:
        torch.manual_seed(0)
        net = nn.Linear(4, 3, bias=False, dtype=F64)
        posterior = fitted(method, net, (phi, y), likelihood=bayou.Gaussian(NOISE))
        bounds.append(bayou.elbo(posterior, (phi, y), seed=0))
        if isinstance(method, IVON):
            got_mean, got_std = posterior.bayesian.guides[0].moments()
    natural, adam = bounds
    evidence = log_evidence(phi, y)
    assert natural.value > adam.value - 4 * (natural.standard_error + adam.standard_error)
    assert natural.value == pytest.approx(evidence, abs=0.5 + 4 * natural.standard_error)
    # the ratio of curvatures to their mean over 1/(1 − β₂) = 100 steps of 8 draws is within 10 %
    assert_close(got_std, torch.full_like(got_std, std), rtol=0.15, atol=0)
    assert ((got_mean.mT - mean) / std).abs().max() < 0.5


@pytest.mark.parametrize(
    ("hessian", "z_std", "options"),
    [
        (1.0, 0.3, {"local": True}),
        (0.1, 0.03, {"local": True, "warmup": 0.4}),
        (0.1, 0.3, {"local": False}),
        (0.5, 0.1, {"local": False, "warmup": 0.4}),
    ],
)
def test_it_is_robust_to_the_start(hessian, z_std, options):
    """Natural gradients of q(z0) make the spread of gains follow σ, whose curvature grows 100-fold.

    q(W) is at least as wide as given z: Σ σ² is that of the posterior, to the noise of h.
    """
    phi, y, mean, std = orthogonal_regression()
    guide = MNF(None, z_std=z_std, local=options["local"])
    method = IVON(guide, lr=0.2, hessian=hessian, steps=200, samples=8, start="network", **options)
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False, dtype=F64)
    posterior = fitted(method, net, (phi, y), likelihood=bayou.Gaussian(NOISE))
    got_mean, got_std = posterior.bayesian.guides[0].moments()
    assert_close(got_std, torch.full_like(got_std, std), rtol=0.2, atol=0)
    assert ((got_mean.mT - mean) / std).abs().max() < 1.0
    bound = bayou.elbo(posterior, (phi, y), seed=0)
    assert bound.value == pytest.approx(log_evidence(phi, y), abs=1.0 + 4 * bound.standard_error)


@pytest.mark.parametrize(
    "changes",
    [
        {"guide": MNF(), "samples": 4},
        {"guide": MNF(z="example"), "warmup": 0.5, "cold": True},
        {"guide": {"0.weight": MNF(None), "2.*": bayou.MeanField(), "*": bayou.Delta()}},
        {"guide": MNF(components=2, auxiliary="paper"), "where": "*.weight", "local": True},
    ],
)
def test_a_run_resumes_bit_for_bit(changes, tmp_path):
    def fit(checkpoint=None):
        method = IVON(steps=9, batch_size=10, checkpoint_every=2, log_every=1, **changes)
        return fitted(method, checkpoint=checkpoint, prior=bayou.Normal(0.5, learn=True))

    whole = fit()
    die_at_call(6, fit, tmp_path / "run.ckpt")
    assert_same(fit(tmp_path / "run.ckpt"), whole)
    assert not any(name.startswith("moments") for name in whole.state()[0])
    whole.save(tmp_path / "posterior.bayou")
    again = bayou.load(tmp_path / "posterior.bayou", mlp())
    assert_close(again.sample(2, seed=0), whole.sample(2, seed=0), rtol=0, atol=0)


def test_running_means_of_gains_follow_their_distribution():
    """q(z0) changes by far in the first steps; its moments are known at once."""
    method = IVON(MNF(z_std=0.5), steps=30, samples=4, plain_lr=1e-4)
    captured = []
    observe = NaturalBound.after_step

    def watch(self, numbers):
        observe(self, numbers)
        captured.append(self.moments[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NaturalBound, "after_step", watch)
        posterior = fitted(method)
    guide = posterior.bayesian.guides[0]
    z, _ = guide.gain.draw(4096, 0)
    moments = captured[-1]
    std = z.std(0)
    assert (std - 0.5).abs().min() > 0.05
    assert ((moments.mean - z.mean(0)) / std).abs().max() < 0.1
    assert_close(moments.variance.sqrt(), std, rtol=0.1, atol=0)
    # r(z|W) has the moments of the last step but one
    assert_close(guide.auxiliary.center.detach(), moments.mean, rtol=0, atol=0.02)
    assert_close(guide.auxiliary.log_std.detach().exp(), std, rtol=0.2, atol=0)


@pytest.mark.parametrize(
    ("guide", "name"),
    [
        (bayou.LowRank(), "LowRank"),
        (bayou.Inducing(3), "Inducing"),
        ({"0.*": MNF(), "*": bayou.SparseVD()}, "SparseVD"),
        (bayou.Dropout(0.1), "Dropout"),
        (RankOne(4), "RankOne"),
        (bayou.NodeNoise(components=4), r"NodeNoise\(components=4\)"),
    ],
)
def test_other_families_are_refused(guide, name):
    with pytest.raises(ValueError, match=f"Gaussian given their gains.*{name} is not: use VI"):
        IVON(guide)
    with pytest.raises(ValueError, match=f"Gaussian given their gains.*{name} is not: use VI"):
        bayou.VI(guide, optimizer="natural")


@pytest.mark.parametrize(
    "guide", [bayou.MeanField(), MNF(None), {"0.*": MNF(), "*": bayou.Delta()}]
)
def test_vi_with_natural_gradients_is_ivon(guide):
    options = {"steps": 5, "samples": 2, "warmup": 0.4, "batch_size": 10}
    natural = bayou.VI(guide, optimizer="natural", scale_lr=0.02, **options)
    assert natural.natural() == IVON(guide, plain_lr=0.002, **options)
    assert_same(fitted(natural), fitted(natural.natural()))
    assert from_json(to_json(natural), Method, bayou.guides.GuideSpec) == natural
    assert replace(natural, lr=0.3).natural().lr == 0.3


@pytest.mark.parametrize(
    "guide", [bayou.NodeNoise(z_std=0.5), RankOne(1, std=0.5, spread=1e-9), RankOne(3, std=0.5)]
)
def test_gaussian_gains_of_points_reach_their_posterior(guide):
    """y = x·M·z with M = 0.5: q(z) = N(c, s²) is exact for one gain. RankOne has two for a weight,
    whose product has the mean of the posterior for every member.
    """
    x = normal(30, 1)
    y = 0.8 * x + 0.1 * normal(30, 1, seed=1)
    net = nn.Linear(1, 1, bias=False, dtype=F64)
    with torch.no_grad():
        net.weight.fill_(0.5)
    method = bayou.VI(guide, optimizer="natural", steps=300, samples=16, lr=1.0, scale_lr=1e-12)
    posterior = fitted(method, net, (x, y), likelihood=bayou.Gaussian(0.1))
    factors = posterior.bayesian.guides[0].gaussian_factors()
    means = torch.stack([factor.mean.detach().flatten() for factor in factors])
    precision = 1 / guide.prior_std**2 + float((0.5 * x).square().sum()) / 0.1**2
    information = 1 / guide.prior_std**2 + float((0.5 * x * y).sum()) / 0.1**2
    mean = information / precision
    assert_close(means.prod(0), torch.full_like(means[0], mean), rtol=0.05, atol=0)
    if isinstance(guide, bayou.NodeNoise):
        std = float(factors[0].log_std.detach().exp())
        assert std == pytest.approx(precision**-0.5, rel=0.15)


def test_named_optimizers_are_of_vi_alone():
    for method in (bayou.VI, bayou.MAP):
        with pytest.raises(ValueError, match="optimizer must be a callable or None.*'sgd'"):
            method(optimizer="sgd")
    with pytest.raises(ValueError, match="optimizer must be a callable or None"):
        bayou.MAP(optimizer="natural")
    with pytest.raises(ValueError, match="natural gradients has no beta"):
        bayou.VI(optimizer="natural", beta=0.5)
    with pytest.raises(ValueError, match="clipped gradient"):
        bayou.VI(optimizer="natural", clip=1.0)


def test_gains_of_mnf_run_along_the_axis_of_choice():
    net = nn.Conv2d(3, 5, 3, groups=1)
    sizes = {None: 5, "output": 5, "input": 3}
    for where, size in sizes.items():
        bayesian = bayou.bayesianize(net, {"weight": MNF(where=where), "*": bayou.Delta()})
        draw = bayesian.guides[0].draw(2, seed=0)
        assert draw.gains.z.shape == (2, size)
        assert draw.parts["weight"].shape == (2, 5, 3, 3, 3)
    with pytest.raises(ValueError, match="MNF where must be one of input, output"):
        MNF(where="both")
    assert "where" not in to_json(MNF())["fields"]


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_a_run_does_not_depend_on_the_scale_of_the_gains(scale):
    """z/k and k·M are the same W: means of z move relative to √E[z²], and M by 1/E[z²]."""

    def run(factor):
        x, y = curve()
        guide = MNF(None, z_std=0.1, local=False)
        method = IVON(guide, lr=0.1, plain_lr=0.01, batch_size=40)
        target = Target.build(mlp(), bayou.Gaussian(0.3), None, 40)
        bayesian = Bayesian(target.net, guide, target.prior, (x,))
        with torch.no_grad():
            for member in bayesian.guides:
                if member.names[0].endswith("weight"):
                    member.center.mul_(factor)
                    member.gain.base.mean.div_(factor)
                    member.gain.base.log_std.sub_(math.log(factor))
                    member.auxiliary.center.div_(factor)
                    member.auxiliary.log_std.sub_(math.log(factor))
        problem = method.bound_of(target, bayesian)
        optimizer = method.optimizer_of(problem, 10)
        for step in range(10):
            torch.manual_seed(step)
            problem.before_step(step, 10)
            value, numbers = problem.loss(x, y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            problem.after_step(numbers)
        return bayesian.sample(3, seed=0)

    # the 1e-8 of Adam, relative to gradients, depends on the scale
    assert_close(run(scale), run(1.0), rtol=1e-4, atol=1e-5)


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match="IVON guide must be a family"):
        IVON(3)
    with pytest.raises(ValueError, match="needs a guide of one family"):
        IVON(GUIDE, where="0.*")
    with pytest.raises(ValueError, match="IVON needs Normal priors, but that of '0.weight' is not"):
        fitted(IVON(MNF(), steps=2), prior=bayou.priors.ScaleMixture())


def test_a_method_is_plain_json():
    for method in (IVON(), IVON(MNF(flow="iaf", options={"layers": 2})), IVON(GUIDE)):
        assert from_json(to_json(method), Method, bayou.guides.GuideSpec) == method
    assert "guide" not in to_json(IVON())["fields"]  # old checkpoints keep their identity
    assert IVON(GUIDE).title == "IVON(*: MNF)"
    assert IVON(GUIDE).restricted_to(["0.weight"]) is None
    assert IVON(MNF()).restricted_to(["0.weight"]) == IVON(MNF(), where=("0.weight",))
