"""What a posterior gives: samples, predictions, its bound, and the snippets a user types."""

import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

import bayou
from bayou.core.params import size
from bayou.network import evaluating

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + X[:, 1] > 0).long()


fit = partial(bayou.fit, progress=False)


def net(out=2, extra=()):
    return nn.Sequential(nn.Linear(3, 6), *extra, nn.Tanh(), nn.Linear(6, out))


def fitted(guide=None, network=None, data=(X, Y), steps=20, **options):
    torch.manual_seed(0)
    method = bayou.VI(
        guide or bayou.MeanField(0.2), steps=steps, batch_size=20, lr=0.01, log_every=5
    )
    return fit(network or net(), data, method, **options)


@pytest.fixture(scope="module")
def posterior():
    return fitted()


def test_a_classifier_learns():
    posterior = fitted(bayou.MeanField(), steps=150)
    assert float((posterior.predict(X, seed=0).mean.argmax(-1) == Y).float().mean()) > 0.9
    assert posterior.history[-1]["elbo"] > posterior.history[0]["elbo"]


# --- predict ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guide", [bayou.MeanField(0.2), bayou.MNF(), bayou.Dropout(0.3), bayou.LowRank(2)]
)
def test_neither_chunk_nor_batch_size_changes_a_prediction(guide):
    posterior = fitted(guide, steps=2)
    whole = posterior.predict(X, 11, seed=5).outputs
    for chunk, batch_size in [(1, None), (4, 7), (11, 1), (100, 100), (None, 13)]:
        outputs = posterior.predict(X, 11, seed=5, chunk=chunk, batch_size=batch_size).outputs
        assert torch.allclose(outputs, whole, atol=1e-6)
    assert torch.allclose(posterior.predict(X, 4, seed=5).outputs, whole[:4], atol=1e-6)
    assert not torch.allclose(posterior.predict(X, 11, seed=6).outputs, whole)


def test_a_prediction_is_one_function_for_all_rows(posterior):
    twice = posterior.predict(torch.cat([X, X]), 5, seed=0).outputs
    assert torch.allclose(twice[:, :40], twice[:, 40:])
    by_hand = posterior.sample(5, seed=0)
    for s in range(5):
        out = posterior.call({name: t[s] for name, t in by_hand.items()}, X)
        assert torch.allclose(out, twice[s, :40], atol=1e-6)


@pytest.mark.parametrize("method", [bayou.VI(steps=2), bayou.Laplace(start=None)])
def test_a_prediction_without_a_seed_is_the_same_each_time(method):
    posterior = fit(nn.Linear(3, 2), (X, Y), method)
    torch.manual_seed(3)
    outputs = posterior.predict(X, 3).outputs
    state = torch.get_rng_state()
    assert torch.equal(posterior.predict(X, 3).outputs, outputs)
    torch.testing.assert_close(posterior.predict(X, 3, chunk=1).outputs, outputs)
    assert not torch.equal(posterior.predict(X, 3, seed=1).outputs, outputs)
    posterior.sample(3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_with_a_seed_of_none_the_global_stream_decides(posterior):
    torch.manual_seed(3)
    one, two = (posterior.predict(X, 3, seed=None).outputs for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(posterior.predict(X, 3, seed=None).outputs, one)
    assert not torch.equal(one, two)


def test_predictions_are_made_in_eval_mode_and_every_mode_comes_back():
    posterior = fitted(network=net(extra=[nn.BatchNorm1d(6), nn.Dropout(0.5)]))
    reference = posterior.predict(X, 3, seed=0).outputs
    posterior.bayesian.train()
    posterior.net[1].eval()
    modes = [module.training for module in posterior.bayesian.modules()]
    before = {name: value.clone() for name, value in posterior.bayesian.state_dict().items()}
    assert torch.equal(posterior.predict(X, 3, seed=0).outputs, reference)
    assert torch.allclose(posterior.predict(X[:1], 3, seed=0).outputs, reference[:, :1], atol=1e-6)
    bayou.elbo(posterior, (X, Y), 2)
    posterior.sample(2)
    assert modes == [module.training for module in posterior.bayesian.modules()]
    assert all(
        torch.equal(value, before[name]) for name, value in posterior.bayesian.state_dict().items()
    )


def test_modes_come_back_after_an_error():
    module = nn.Sequential(nn.Dropout(), nn.Dropout())
    module[0].eval()
    inside = []

    def fail():
        with evaluating(module):
            inside.extend(part.training for part in module.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [False] * 3
    assert [part.training for part in module.modules()] == [True, False, True]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (
            X.double(),
            {},
            r"x is torch.float64 but the network is torch.float32; use x.to\(torch.float32\)",
        ),
        (X * math.nan, {}, "x has NaN or infinite values"),
        (X.long(), {}, r"the network cannot take x = int64 \(40, 3\)"),
        (X[:, :2], {}, r"the network cannot take x = float32 \(40, 2\): .*shapes"),
        ((X, X), {}, "the network cannot take x = float32"),
        ((X, X[:3]), {}, "the same rows"),
        (X.numpy(), {}, "got ndarray"),
        (torch.tensor(1.0), {}, "first axis is the rows"),
        ((), {}, "got an empty tuple"),
        (X, {"samples": 0}, "samples must be a whole number of at least 1, got 0"),
        (X, {"samples": 2.5}, "samples must be a whole number"),
        (X, {"chunk": 0}, "chunk must be a whole number of at least 1"),
        (X, {"batch_size": -1}, "batch_size must be a whole number of at least 1"),
        (X, {"seed": "zero"}, "seed must be an int"),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(x, options, message, posterior):
    with pytest.raises(ValueError, match=message):
        posterior.predict(x, **options)


@pytest.mark.parametrize("n", [-1, 1.5, True])
def test_samples_of_a_wrong_number_are_refused(n, posterior):
    with pytest.raises(ValueError, match="must be a whole number of at least 0"):
        posterior.sample(n)


def test_no_rows_give_no_predictions(posterior):
    assert posterior.predict(X[:0], 3).outputs.shape == (3, 0, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_many_samples_of_a_large_network_are_held_a_chunk_at_a_time():
    big = nn.Linear(1000, 1000, bias=False)  # 4 MB a sample, 1 GB for all
    x = torch.randn(2, 1000)
    bnn = bayou.bayesianize(big, bayou.Dropout(0.5), example=x)
    posterior = bnn.posterior(bayou.Gaussian(0.1), len(x))
    import resource  # which Windows does not have

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert posterior.predict(x, 250, seed=0).outputs.shape == (250, 2, 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000


# --- what it says of itself ---------------------------------------------------------------------


def test_a_posterior_says_what_it_is():
    posterior = fitted({"*.weight": bayou.MNF(), "*": bayou.Delta()})
    text = repr(posterior)
    elbo = posterior.history[-1]["elbo"]
    assert text == (
        f"Guided(Sequential: MNF over 30 + Delta over 8 of 38 weights, last ELBO {elbo:,.1f}, finished after 20 steps)"
    )
    bnn = bayou.bayesianize(nn.Linear(3, 1), bayou.MeanField(), example=X)
    untrained = bnn.posterior(bayou.Gaussian(0.1), len(X))
    assert repr(untrained) == "Guided(Linear: MeanField over 4 of 4 weights)"
    assert repr(fitted(bayou.JointFlow(), steps=2)).startswith(
        "Guided(Sequential: JointFlow over 38 of 38 weights"
    )


# --- the bound ----------------------------------------------------------------------------------


def test_elbo_is_log_likelihood_minus_kl_in_nats_over_all_data(posterior):
    e = bayou.elbo(posterior, (X, Y), samples=50, seed=1)
    assert e.value == pytest.approx(e.log_likelihood - e.kl, rel=1e-12)
    p = posterior.predict(X, 400, seed=2)
    average = posterior.target.likelihood.log_prob(p.outputs, Y).sum(1).mean()
    assert e.log_likelihood == pytest.approx(float(average), rel=0.1)
    with torch.no_grad():
        assert e.kl == pytest.approx(
            float(posterior.bayesian.draw().kl), rel=1e-5
        )  # closed form: the same every time
    assert str(e).startswith(f"ELBO {e.value:.4f} ± ")


def test_elbo_does_not_depend_on_batches_and_repeats_itself(posterior):
    one = bayou.elbo(posterior, (X, Y), 10, seed=4)
    assert bayou.elbo(posterior, (X, Y), 10, seed=4) == one
    small = bayou.elbo(posterior, (X, Y), 10, seed=4, batch_size=7)
    assert small.value == pytest.approx(one.value, rel=1e-6)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 9, shuffle=True)
    assert bayou.elbo(posterior, loader, 10, seed=4).value == pytest.approx(one.value, rel=1e-6)
    assert bayou.elbo(posterior, (X, Y), 10, seed=5) != one
    torch.manual_seed(1)
    free = bayou.elbo(posterior, (X, Y), 10)
    torch.manual_seed(1)
    assert bayou.elbo(posterior, (X, Y), 10) == free


def test_the_standard_error_of_elbo_falls_with_the_square_root_of_the_samples(posterior):
    few, many = (bayou.elbo(posterior, (X, Y), samples, seed=0) for samples in (25, 400))
    assert few.standard_error / many.standard_error == pytest.approx(4, rel=0.35)
    assert abs(few.value - many.value) < 5 * few.standard_error


@pytest.mark.parametrize(
    ("data", "samples", "message"),
    [
        ((X, Y), 1, "at least 2 for a standard error, got 1"),
        ((X, Y + 1), 2, "y must lie in 0 .. 1"),
        ((X[:, :2], Y), 2, "the network cannot take x"),
        ((X.double(), Y), 2, "x is torch.float64"),
    ],
)
def test_elbo_checks_its_arguments(data, samples, message, posterior):
    with pytest.raises(ValueError, match=message):
        bayou.elbo(posterior, data, samples)


def test_elbo_needs_a_variational_posterior():
    with pytest.raises(ValueError, match="needs a variational posterior .* got 'posterior'"):
        bayou.elbo("posterior", (X, Y))


# --- empirical Bayes and other likelihoods ------------------------------------------------------


def test_a_learned_prior_scale_maximizes_the_elbo():
    """KL(N(m, s²) ‖ N(0, c²)) over D weights is least at c² = (Σ m² + s²)/D."""
    torch.manual_seed(0)
    x, y = X, X @ torch.randn(3, 4)
    method = bayou.VI(
        bayou.MeanField(), steps=300, lr=0.02, scale_lr=0.05, batch_size=40, samples=8
    )
    options = {"likelihood": bayou.Gaussian(0.5), "prior": bayou.Normal(0.1, learn=True)}
    posterior = fit(nn.Linear(3, 4, bias=False), (x, y), method, **options)
    guide = posterior.bayesian.guides[0]
    best = (guide.center**2 + (2 * guide.log_std).exp()).mean().sqrt().detach()
    assert float(guide.prior.log_scale.detach().exp()) == pytest.approx(float(best), rel=0.02)


def test_learned_noise_recovers_the_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 400).unsqueeze(-1)
    y = 2 * x - 1 + 0.3 * torch.randn(400, 1, generator=generator)
    method = bayou.VI(bayou.MeanField(), steps=250, lr=0.03, scale_lr=0.03, batch_size=400)
    noise = bayou.Gaussian(1.0, learn=True)
    posterior = fit(nn.Linear(1, 1), (x, y), method, likelihood=noise)
    assert float(posterior.target.likelihood.log_scale.detach().exp()) == pytest.approx(
        0.3, rel=0.1
    )


LINE = torch.linspace(-1, 1, 60).unsqueeze(-1)
NOISE = torch.randn(60, 1, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("likelihood", "y", "out"),
    [
        (bayou.HeteroscedasticGaussian(0.01), LINE + (0.05 + 0.3 * LINE.abs()) * NOISE, 2),
        (
            bayou.Poisson(),
            torch.poisson(torch.exp(1 + LINE), generator=torch.Generator().manual_seed(0)),
            1,
        ),
        (bayou.Bernoulli(), (LINE + 0.2 * NOISE > 0).float(), 1),
        (
            bayou.likelihoods.StudentT(3.0, 0.1, learn=True),
            LINE + 0.1 * NOISE + 3.0 * (NOISE > 1.8),
            1,
        ),
    ],
)
def test_every_likelihood_fits_and_improves(likelihood, y, out):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, out))
    method = bayou.VI(steps=60, lr=0.03, batch_size=60)
    posterior = fit(network, (LINE, y), method, likelihood=likelihood)
    first, last = posterior.history[0], posterior.history[-1]
    assert last["log_likelihood"] > first["log_likelihood"]
    assert last["elbo"] > first["elbo"]
    p = posterior.predict(LINE, 50, seed=0)
    assert p.mean.shape == p.std.shape == y.shape
    assert bool((p.std > 0).all())
    assert not any(
        t.requires_grad for t in (p.std, p.outputs, p.log_prob(y), p.entropy)
    )  # a learned noise too
    bnn = bayou.bayesianize(network, bayou.MeanField(), example=LINE)
    untrained = bnn.posterior(likelihood, 60)
    assert float(p.log_prob(y).mean()) > float(
        untrained.predict(LINE, 50, seed=0).log_prob(y).mean()
    )


@pytest.mark.parametrize("most", [1, 7])
def test_predictions_that_do_not_fit_are_made_in_halves(most, monkeypatch):
    """A device that holds ``most`` draws × rows at a time gives the same answer as one that holds
    them all.
    """
    x = X[:9].double()
    posterior = fit(net().double(), (x, Y[:9]), bayou.VI(steps=2))
    whole = posterior.predict(x, samples=5, seed=0).outputs
    functions, sizes = posterior._map_over_draws, []

    def small(stack, *inputs):
        numbers = size(stack) * len(inputs[0])
        if numbers > most:
            raise torch.OutOfMemoryError
        sizes.append(numbers)
        return functions(inputs, loop=True)(stack, *inputs)

    monkeypatch.setattr(posterior, "_map_over_draws", lambda inputs, loop: small)
    torch.testing.assert_close(
        posterior.predict(x, samples=5, seed=0).outputs, whole, rtol=1e-12, atol=1e-12
    )
    assert sum(sizes) == 45
