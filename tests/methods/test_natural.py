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
    moments = numbers[GAIN_MOMENTS].split([3, 3, 5, 5])
    moments_of = {"0.weight": moments[:2], "2.weight": moments[2:]}
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
        IVON(MNF(None, z_std=0.03), lr=0.2, local=True, plain_lr=0.01, **steps),
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
    method = IVON(MNF(None, z_std=0.5), steps=3, plain_lr=1e-12)
    captured = []
    observe = NaturalBound.after_step

    def watch(self, numbers):
        observe(self, numbers)
        captured.append(self.moments[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NaturalBound, "after_step", watch)
        fitted(method)
    # of 1,024 draws and 3 steps with 1 % each: standard errors of 0.016 and about 0.04
    assert_close(captured[0].mean, torch.ones(3, dtype=F64), rtol=0, atol=0.1)
    assert_close(captured[0].square, torch.full((3,), 1.25, dtype=F64), rtol=0, atol=0.2)


@pytest.mark.parametrize(
    ("guide", "name"),
    [
        (bayou.LowRank(), "LowRank"),
        (bayou.Inducing(3), "Inducing"),
        ({"0.*": MNF(), "*": bayou.SparseVD()}, "SparseVD"),
        (bayou.Dropout(0.1), "Dropout"),
    ],
)
def test_other_families_are_refused(guide, name):
    with pytest.raises(ValueError, match=f"Gaussian given their gains.*{name} is not: use VI"):
        IVON(guide)


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
