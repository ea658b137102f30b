"""VAEs against probabilistic PCA, whose evidence is known; encoders against autograd; what ``fit``
maximizes.
"""

import math

import pytest
import torch
from torch import distributions as D, nn

from bayou.core import rng
from bayou.flows import (
    VAE,
    AmortizedAffine,
    Autoencoder,
    BernoulliDecoder,
    CategoricalDecoder,
    Chain,
    Conditional,
    ConditionalFlow,
    Flow,
    Ladj,
    LogisticDecoder,
    LULinear,
    Planar,
    Side,
    StandardNormal,
    Sylvester,
    realnvp,
)
from bayou.flows.layers.linear import multiply_reflections, orthonormalize
from bayou.flows.models.vae import NegativeElbo
from experiments.measure.vae_nets import (
    amortized,
    dense_decoder,
    dense_encoder,
)
from tests.conformance.training import check_trained
from tests.flows.tools import (
    built,
    close,
    double,
    identical,
    item_is,
    near,
    perturb,
    refuses,
    standard,
)

W = double([[1.0, 0.5], [-0.3, 0.8], [0.2, -1.0]])
B = double([0.1, -0.2, 0.3])
VARIANCE = 0.25
X = double([[0.7, -0.4, 1.2]])
MARGINAL = D.MultivariateNormal(B, W @ W.T + VARIANCE * torch.eye(3).double())
PRECISION = torch.eye(2).double() + W.T @ W / VARIANCE  # of the posterior
EVIDENCE = MARGINAL.log_prob(X[0]).item()  # −3.4082298


def affine(weight, bias, log_scale):
    """N(weight·context + bias, exp(log_scale)²)."""
    made = AmortizedAffine(len(bias), weight.shape[1]).double()
    with torch.no_grad():
        made.net.weight.copy_(torch.cat([weight, torch.zeros_like(weight)]))
        made.net.bias.copy_(torch.cat([bias, log_scale]))
    return made


def pca(exact=True, wide=1.0):
    """Probabilistic PCA with its posterior, or with the best mean field, its std times ``wide``."""
    cov = torch.linalg.inv(PRECISION)
    gain = cov @ W.T / VARIANCE
    if exact:
        lower = torch.linalg.cholesky(cov)
        mix = LULinear(2).double()
        with torch.no_grad():  # L·U with U diagonal is the Cholesky factor
            mix.weight.lower.copy_(lower / lower.diagonal())
            mix.weight.log_diagonal.copy_(lower.diagonal().log())
        q = Chain(mix, affine(gain, -gain @ B, torch.zeros(2).double()))
    else:
        q = affine(gain, -gain @ B, -0.5 * PRECISION.diagonal().log() + math.log(wide))
    decoder = Flow(
        StandardNormal(3).double(),
        affine(W, B, torch.full((3,), 0.5 * math.log(VARIANCE)).double()),
    )
    return VAE(decoder, Flow(StandardNormal(2).double(), q)).double()


# --- a model whose evidence is known ------------------------------------------------------------


def test_pca_with_its_posterior_is_exact_at_every_draw():
    vae = pca()
    close(vae.terms(X, 50, seed=0).elbo, EVIDENCE, atol=1e-7)
    close(vae.log_prob(X, 7, seed=0), EVIDENCE, atol=1e-7)
    flow = vae.flow
    close(flow.log_prob(X, seed=3), EVIDENCE, atol=1e-7)
    assert (flow.kind, flow.label.inverse) == (Ladj.bound, Side.lower)


def test_pca_with_the_best_mean_field():
    elbo = pca(exact=False).terms(X, 40_000, seed=0).elbo[:, 0].detach()
    error = elbo.std().item() / 200
    divergence = 0.5 * (PRECISION.diagonal().log().sum() - PRECISION.logdet()).item()
    assert abs(elbo.mean().item() - (EVIDENCE - divergence)) < 5 * error
    assert error < 2e-4


def test_importance_samples_tighten_the_bound_to_the_evidence():
    vae, rows = pca(exact=False, wide=1.7), X.expand(4000, 3)
    found = [vae.elbo(rows, seed=0).detach()] + [vae.log_prob(rows, k, seed=1) for k in (2, 8, 64)]
    means, errors = (
        [f.mean().item() for f in found],
        [f.std().item() / math.sqrt(4000) for f in found],
    )
    for i in range(3):
        assert means[i] < means[i + 1] + 3 * (errors[i] + errors[i + 1])
    assert means[0] < means[-1] - 0.1
    assert all(mean < EVIDENCE + 5 * error for mean, error in zip(means, errors, strict=True))
    assert abs(means[-1] - EVIDENCE) < 0.02
    weights = vae.terms(rows, seed=2).elbo.detach().exp()  # unbiased for p(x)
    near(weights, math.exp(EVIDENCE))


def test_chunks_and_neighbors_change_no_row():
    vae = pca(exact=False)
    rows = X + rng.normal(7, (3,), X, 0)
    whole = vae.log_prob(rows, 1200, seed=0)
    close(vae.log_prob(rows, 1200, seed=0, chunk=37), whole)
    close(vae.log_prob(rows[3:5], 1200, seed=0, start=3), whole[3:5])
    close(vae.elbo(rows[3:5], 3, seed=0, start=3), vae.elbo(rows, 3, seed=0)[3:5])
    draws = vae.sample(6, seed=0)
    close(vae.sample(2, seed=0, start=4), draws[4:])


def test_draws_are_of_the_model():
    draws = pca().sample(20_000, seed=0)
    cov = MARGINAL.covariance_matrix
    close(draws.mean(0), B, atol=5 * math.sqrt(cov.diagonal().max().item() / 20_000))
    close(draws.T.cov(), cov, atol=5 * 2 * cov.max().item() / math.sqrt(20_000))


def test_reconstructions_are_means():
    vae = pca()
    gain = torch.linalg.inv(PRECISION) @ W.T / VARIANCE
    z = (X - B) @ gain.T
    close(vae.encode(X), z)
    close(vae.reconstruct(X), z @ W.T + B)
    assert not torch.allclose(vae.encode(X, seed=0), z)
    identical(vae.encode(X, seed=0), vae.encode(X, seed=0))


def test_a_prior_may_be_a_flow():
    prior = Flow(StandardNormal(2).double(), perturb(realnvp(2, layers=2, hidden=(8,))))
    decoder, encoder = pca().map.decoder, pca(exact=False, wide=1.5).map.encoder
    vae = VAE(decoder, encoder, prior)
    z = prior.sample(40_000, seed=1)  # log p(x) = log E_prior[p(x|z)]
    likelihood = D.Normal(z @ W.T + B, math.sqrt(VARIANCE)).log_prob(X).sum(-1).exp()
    error = likelihood.std() / 200 / likelihood.mean()
    item_is(vae.log_prob(X, 20_000, seed=0), likelihood.mean().log().item(), abs=6 * error.item())
    assert vae.sample(3, seed=0).shape == (3, 3)


# --- encoders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Planar, Sylvester])
def test_a_context_is_what_conditional_makes_of_the_flow_without_one(kind):
    mine, plain = perturb(kind(3, 2, context_dim=2)), kind(3, 2).double()
    other = Conditional(plain, 2, hidden=()).double()
    with torch.no_grad():
        plain.theta.copy_(mine.theta)
        other.hypernet[0].weight.copy_(mine.weight)
    x, context = rng.normal(6, (3,), W, 0), rng.normal(6, (2,), W, 1)
    for f, g in ((mine, other), (mine.inverse, other.inverse)):
        y, ladj = g(x, context)
        close(f(x, context)[0], y)
        close(f(x, context)[1], ladj)


def test_frames():
    a = rng.normal(6, (5, 3), W, 0)
    q, r = torch.linalg.qr(a)
    close(orthonormalize(a), q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))
    product = torch.eye(5).double()
    for v in a[2].mT:
        product = product @ (torch.eye(5) - 2 * torch.outer(v, v) / v.dot(v))
    close(multiply_reflections(a)[2], product)


# --- decoders -----------------------------------------------------------------------------------

DECODERS = {
    "bernoulli": lambda net: BernoulliDecoder(2, net or nn.Linear(2, 2)),
    "logistic": lambda net: LogisticDecoder(2, net or nn.Linear(2, 4), levels=4),
    "categorical": lambda net: CategoricalDecoder(2, net or nn.Linear(2, 6), levels=3),
}


@pytest.mark.parametrize("name", DECODERS)
def test_masses_sum_to_one_and_draws_have_them(name):
    decoder = perturb(DECODERS[name](None), 1.0)
    levels, z = decoder.levels or 0, double([0.4, -1.1])
    x = torch.cartesian_prod(*[torch.arange(levels).double()] * 2)
    mass = decoder.log_prob(x, z, 1).exp()
    item_is(mass.sum(), 1.0)
    noise = rng.uniform(20_000, (2,), z, 0)
    draws, log_p = decoder.draw(noise, z.expand(20_000, 2), 1)
    number = (draws[:, 0] * levels + draws[:, 1]).long()
    share = torch.bincount(number, minlength=levels**2) / 20_000
    close(share.double(), mass, atol=5 * 0.5 / math.sqrt(20_000))
    close(log_p, mass.log()[number])
    if name != "logistic":  # whose center is the median before rounding
        close(decoder.center(z, 1), (x * mass.unsqueeze(-1)).sum(0))


@pytest.mark.parametrize("name", DECODERS)
def test_a_vae_of_pixels_keeps_the_contract(name):
    encoder = standard(realnvp(2, layers=1, hidden=(4,), context_dim=2))
    only = ["ladj", "batch", "dtype", "state_dict"]
    check_trained(
        Autoencoder(DECODERS[name](None), encoder), only=only, train_steps=2
    ).raise_if_failed()


def test_bernoulli_evidence_by_summing_over_z():
    decoder, x = (
        perturb(BernoulliDecoder(3, nn.Linear(1, 3)), 1.0),
        torch.tensor([[1.0, 0.0, 1.0]]).double(),
    )
    vae = VAE(decoder, perturb(amortized("planar", 1, 3, layers=2)))
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)[:, None]
    joint = D.Normal(0.0, 1.0).log_prob(z[:, 0]) + D.Bernoulli(logits=decoder.net(z)).log_prob(
        x
    ).sum(-1)
    evidence = joint.logsumexp(0).item() + math.log(18 / 20_000)
    weights = vae.terms(x, 20_000, seed=0).elbo.detach()[:, 0].exp()
    near(weights, math.exp(evidence))
    item_is(vae.log_prob(x, 5000, seed=0), evidence, abs=0.05)


# --- learning -----------------------------------------------------------------------------------


def test_the_loss_weights_the_kl():
    vae, rows = pca(exact=False, wide=1.5), torch.arange(4)
    objective = NegativeElbo(vae, X.expand(4, 3), None, 4, 0.0, 1.0, 0)

    def value(beta):
        return built(lambda: objective.value(rows, torch.tensor(beta)).item())

    terms = built(lambda: vae.terms(X.expand(4, 3)))
    assert value(1.0) == pytest.approx(-terms.elbo.mean().item(), rel=1e-12)
    assert value(0.3) == pytest.approx(
        0.3 * terms.kl.mean().item() - terms.log_likelihood.mean().item(), rel=1e-6
    )


def digits(n=200):
    """Rows of two prototypes with flipped pixels."""
    like = torch.zeros(())
    prototypes = (rng.uniform(2, (12,), like, 0) < 0.5).float()
    flip = (rng.uniform(n, (12,), like, 1) < 0.05).float()
    return (prototypes[(rng.uniform(n, (), like, 2) < 0.5).long()] - flip).abs()


def small(kind="gaussian", **options):
    def make():
        decoder = BernoulliDecoder(12, dense_decoder((12,), 2, hidden=16))
        transform = amortized(kind, 2, 16, **options)
        return VAE(decoder, ConditionalFlow(transform, dense_encoder((12,), 16)))

    return built(make)


@pytest.mark.parametrize(("warmup", "beta", "expected"), [(0.5, 1.0, [0.2, 0.4, 0.6, 0.8, 1.0, 1, 1, 1, 1, 1]),
                                                          (0.0, 0.3, [0.3] * 10)])  # fmt: skip
def test_beta_rises(monkeypatch, warmup, beta, expected):
    seen = []
    value = NegativeElbo.value
    monkeypatch.setattr(
        NegativeElbo,
        "value",
        lambda self, x, beta: (seen.append(float(beta)), value(self, x, beta))[1],
    )
    small().fit(digits(), steps=10, warmup=warmup, beta=beta, progress=False)
    assert seen == pytest.approx(expected)


def test_a_fit_learns_repeats_and_leaves_the_global_stream_alone():
    data, found = digits(), []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(2):
        vae = small("planar", layers=2)
        first = vae.elbo(data, seed=0).mean().item()
        result = vae.fit(data, steps=60, lr=2e-2, batch_size=50, seed=3, progress=False)
        found.append((result.best, vae.elbo(data, seed=0).mean().item()))
    assert found[0] == found[1]
    identical(torch.get_rng_state(), before)
    assert found[0][1] > first + 2
    assert result.measure == "−ELBO of held-out rows"
    assert result.ladj is Ladj.bound
    assert result.stopped == "finished"
    assert not vae.training
    alike = (vae.reconstruct(data) > 0.5).float() == data
    assert alike.float().mean() > 0.9


def test_the_best_parameters_by_given_rows_are_kept():
    data, vae = digits(), small()
    held = digits(60)[40:]
    result = vae.fit(
        data[:40], held_out=held, steps=60, check_every=5, lr=3e-2, progress=False, seed=0
    )
    scores = [check.score for check in result.history]
    assert result.best == min(scores)
    bound = vae.flow.log_prob(held, seed=rng.fold(0, "score"))
    assert -bound.mean().item() == pytest.approx(result.best, rel=1e-5)


# --- bad input ----------------------------------------------------------------------------------


def affine_vae(outputs=2, context=2, prior=None):
    encoder = standard(AmortizedAffine(2, context))
    return VAE(BernoulliDecoder(2, nn.Linear(2, outputs)), encoder, prior)


test_bad_input = refuses(
    (lambda: small().elbo(digits(3) + 0.5), "whole numbers as data, got"),
    (lambda: small().elbo(digits(3) * 2), "takes 0 to 1, got 0 to 2"),
    (lambda: small().elbo(digits(3)[0]), r"expected \(rows, 12\)"),
    (lambda: small().log_prob(digits(3), samples=0), "samples must be at least 1, got 0"),
    (lambda: small().log_prob(digits(3), samples=2, chunk=0), "chunk must be at least 1"),
    (lambda: small().fit(digits(), beta=0.0), "beta must be positive"),
    (lambda: small().fit(digits(), held_out=digits()[:, :3]), r"\(\.\.\., 12\)"),
    (lambda: Sylvester(3, rank=4), "rank must be between 1 and 3"),
    (lambda: Sylvester(3, form="triangular", rank=2), "a lower rank needs the orthogonal form"),
    (lambda: Sylvester(3, form="diagonal"), "Sylvester form must be"),
    (lambda: LogisticDecoder(2, nn.Identity(), levels=1), "levels of pixels: .* at least 2, got 1"),
    (lambda: affine_vae(outputs=3).sample(2), r"returned \(2, 3\) for \(2, 2\); expected \(2, 1, 2\)"),
    (lambda: affine_vae(context=3), "build it with context_dim=2"),
    (lambda: affine_vae(prior=StandardNormal(3)), r"has events \(2,\), the prior \(3,\)"),
)  # fmt: skip
