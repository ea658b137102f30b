"""``update`` and ``downdate`` of every kind of posterior, against closed forms and fits."""

import functools
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.calibration import QuantileMap
from bayou.posteriors import GaussianPosterior, Guided, WidePosterior

F64 = torch.float64
NOISE = 0.1


def dense(covariance):
    """Σ as a matrix, the tensors one after another."""
    root = covariance.spread(covariance.from_vector(torch.eye(covariance.size, dtype=F64)))
    return root @ root.mT


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# METHODS.md, number 1: conjugate linear regression.
LINE = torch.linspace(-1, 1, 21, dtype=F64)
FEATURES = torch.stack([LINE**power for power in range(4)], 1)
CUBIC = torch.sin(3 * LINE).unsqueeze(1)
ORDER = torch.randperm(21, generator=torch.Generator().manual_seed(0))
EVIDENCE = 6.465824
STDS = [0.032737, 0.089850, 0.066598, 0.125263]
MEANS = [0.0, 2.532311, 0.0, -2.470425]


def some(index):
    return FEATURES[index], CUBIC[index]


def closed_form(x, y, weights=1.0):
    """Mean and precision of the weights under N(0, 1), the rows with weights."""
    scaled = x * torch.as_tensor(weights, dtype=F64).reshape(-1, 1) / NOISE**2
    precision = torch.eye(x.shape[1], dtype=F64) + x.mT @ scaled
    return torch.linalg.solve(precision, scaled.mT @ y), precision


def exact_fit(index):
    """Laplace at the exact mode, which is the conjugate posterior."""
    x, y = some(index)
    net = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(closed_form(x, y)[0].mT)
    method = bayou.Laplace("full", start=None, predictive="exact")
    likelihood, prior = bayou.Gaussian(NOISE), bayou.Normal(1.0)
    return bayou.fit(net, (x, y), method, likelihood=likelihood, prior=prior, progress=False)


def moments(posterior):
    return posterior.center["weight"].mT, posterior.covariance.precision()


def assert_same(posterior, mean, precision, tolerance):
    assert_close(moments(posterior)[0], mean, rtol=0, atol=tolerance)
    assert_close(moments(posterior)[1], precision, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [(11, 10), (11, 5, 5), (11, *[1] * 10)])
def test_a_sequence_of_updates_is_the_batch_to_1e12(parts):
    """Mean, precision, sd and log evidence of the published example, in a random order."""
    first, *rest = ORDER.split(parts)
    posterior = exact_fit(first)
    for part in rest:
        posterior = posterior.update(some(part))
    assert_same(posterior, *closed_form(FEATURES, CUBIC), 1e-12)
    assert_close(posterior.std()["weight"][0], torch.tensor(STDS, dtype=F64), rtol=0, atol=1e-6)
    assert_close(moments(posterior)[0][:, 0], torch.tensor(MEANS, dtype=F64), rtol=0, atol=1e-6)
    assert posterior.log_evidence == pytest.approx(EVIDENCE, abs=1e-6)
    assert posterior.target.n == 21
    assert posterior.updates.added == 10
    assert posterior.updates.calls == len(rest)


def test_the_order_of_rows_and_updates_does_not_matter():
    first, second, third = ORDER.split((7, 7, 7))
    posterior = exact_fit(first)
    one = posterior.update(some(second)).update(some(third))
    other = posterior.update(some(third.flip(0))).update(some(second.flip(0)))
    assert_same(one, *moments(other), 1e-11)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-10)


def test_downdate_is_a_fit_without_the_rows_and_undoes_an_update():
    first, second = ORDER.split((11, 10))
    posterior = exact_fit(first)
    both = posterior.update(some(second))
    assert_same(both.downdate(some(second)), *moments(posterior), 1e-12)
    assert both.downdate(some(second)).log_evidence == pytest.approx(
        posterior.log_evidence, abs=1e-10
    )
    without_first = both.downdate(some(first))
    assert_same(without_first, *closed_form(*some(second)), 1e-11)
    assert without_first.target.n == 10
    assert without_first.updates.removed == 11
    refit = exact_fit(second)
    assert without_first.log_evidence == pytest.approx(refit.log_evidence, abs=1e-10)
    new = FEATURES + 0.1
    assert_close(without_first.predict(new).std, refit.predict(new).std, rtol=1e-11, atol=1e-12)


def test_rows_that_were_never_added_cannot_be_removed():
    posterior = exact_fit(ORDER[:11])
    far = torch.full((2, 4), 50.0, dtype=F64)
    with pytest.raises(ValueError, match="cannot have had all of them"):
        posterior.downdate((far, CUBIC[:2]))
    with pytest.raises(ValueError, match="11 of 11 rows.*at least one must remain"):
        posterior.downdate(some(ORDER[:11]))
    decayed = posterior.update(some(ORDER[11:]), forget=0.9)
    with pytest.raises(ValueError, match="after an update with forget"):
        decayed.downdate(some(ORDER[11:]))


def test_forgetting_is_a_regression_with_weights_and_tends_to_the_prior():
    """Rows of age k have the weight λ^k: the weighted ridge regression in closed form."""
    posterior, forget = exact_fit(ORDER[:5]), 0.8
    for row in ORDER[5:]:
        posterior = posterior.update(some(row[None]), forget=forget)
    ages = torch.cat((torch.full((5,), 16.0), torch.arange(15.0, -1, -1))).double()
    assert_same(posterior, *closed_form(*some(ORDER), forget**ages), 1e-10)
    assert posterior.updates.kept == pytest.approx(forget**16)
    assert posterior.log_evidence is None
    flat = torch.zeros(1, 4, dtype=F64), CUBIC[:1]
    for _ in range(300):
        posterior = posterior.update(flat, forget=forget)
    assert_close(posterior.std()["weight"], torch.ones(1, 4, dtype=F64))
    assert_close(posterior.center["weight"], torch.zeros(1, 4, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("forget", [0, -1, 1.5, True, "0.9", math.nan])
def test_forget_must_be_a_weight(forget):
    with pytest.raises(ValueError, match="forget must be the weight"):
        exact_fit(ORDER[:5]).update(some(ORDER[5:]), forget=forget)


def make_net(inputs=3, outputs=1, dtype=F64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


X = normal(60, 3, seed=1)
Y = torch.sin(X.sum(1, keepdim=True)) + NOISE * normal(60, 1, seed=2)
OLD, NEW = (X[:40], Y[:40]), (X[40:], Y[40:])


def fit(method, data=OLD, net=None, likelihood=None, prior=None):
    return bayou.fit(
        net or make_net(),
        data,
        method,
        likelihood=likelihood or bayou.Gaussian(NOISE),
        prior=prior or bayou.Normal(1.0),
        progress=False,
    )


MODE = bayou.MAP(steps=60)
LAST = {
    "full": bayou.Laplace("full", where="last", start=MODE),
    "kronecker": bayou.Laplace("kronecker", where="last", start=MODE),
    "vbll": bayou.methods.VBLL(steps=60),
    "vbll, low rank": bayou.methods.VBLL(2, steps=60),
}


@functools.cache
def fitted(name):
    """A fit that tests only look at."""
    return fit((LAST | APPROXIMATE)[name])


@pytest.mark.parametrize("name", LAST)
def test_a_last_layer_is_updated_by_bayes_rule(name):
    """Against N(m, S) of the last layer and its features, with the Kalman equations."""
    posterior = fitted(name)
    updated = posterior.update(NEW)
    center = posterior.center
    phi = torch.tanh(NEW[0] @ center["0.weight"].mT + center["0.bias"])
    phi = torch.cat((phi, torch.ones(len(phi), 1, dtype=F64)), 1)
    mean = torch.cat((center["2.weight"][0], center["2.bias"]))
    before = s = dense(posterior.covariance)
    gain = s @ phi.mT @ torch.linalg.inv(phi @ s @ phi.mT + NOISE**2 * torch.eye(20, dtype=F64))
    expected = mean + gain @ (NEW[1][:, 0] - phi @ mean)
    s = s - gain @ phi @ s
    assert_close(torch.cat((updated.center["2.weight"][0], updated.center["2.bias"])), expected)
    assert_close(dense(updated.covariance), s, rtol=1e-9, atol=1e-12)
    assert_close(updated.center["0.weight"], center["0.weight"], rtol=0, atol=0)
    covariance = phi @ before @ phi.mT + NOISE**2 * torch.eye(20, dtype=F64)
    normal_of_rows = torch.distributions.MultivariateNormal(phi @ mean, covariance)
    log_density = float(normal_of_rows.log_prob(NEW[1][:, 0]))
    assert posterior.log_predictive_density(NEW) == pytest.approx(log_density, rel=1e-9)
    back = updated.downdate(NEW)
    assert_close(back.center["2.weight"], center["2.weight"], rtol=1e-9, atol=1e-10)
    assert_close(back.std()["2.weight"], posterior.std()["2.weight"], rtol=1e-8, atol=1e-10)


APPROXIMATE = {
    "all weights, full": bayou.Laplace("full", start=MODE),
    "all weights, kronecker": bayou.Laplace("kronecker", start=MODE),
    "all weights, diagonal": bayou.Laplace("diagonal", start=MODE),
    "mean field": bayou.VI(steps=60),
    "low rank": bayou.VI(bayou.LowRank(3), steps=60),
    "ivon": bayou.IVON(steps=60),
    "swag": bayou.SWAG(start=MODE, steps=40),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_all_weights_take_a_step_to_the_new_rows_and_lose_variance(name):
    """The mean minimizes the linearized problem, so the error falls; no row can be removed."""
    posterior = fitted(name)
    updated = posterior.update(NEW)
    assert type(updated) is type(posterior)
    assert updated.target.n == 60
    assert posterior.target.n == 40

    def error(q):
        outputs = q.network.evaluate(q.mean(), NEW[0])
        return float((outputs - NEW[1]).square().mean())

    assert error(updated) < error(posterior)
    before, after = posterior.std(), updated.std()
    for key, std in after.items():
        assert bool((std <= before[key] * (1 + 1e-9)).all()), key
        assert bool((std > 0).all())
    with pytest.raises(ValueError, match="exactly.*fit again"):
        updated.downdate(NEW)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_the_mean_is_that_of_the_linearized_model(name):
    """m + S·Jᵀ(J·S·Jᵀ + σ²)⁻¹(y − f) for every structure of S; IVON and SWAG may have others."""
    posterior = fitted(name)
    mean = posterior.bayesian.mean() if isinstance(posterior, Guided) else posterior.center
    mean = {n: v.detach() for n, v in mean.items()}
    covariance = (
        posterior._gaussian_covariance("")
        if isinstance(posterior, Guided)
        else posterior.covariance
    )
    # Rows near their predictions, so that the step is not shortened.
    few = NEW[0][:5], posterior.network.evaluate(mean, NEW[0][:5]) + 1e-3 * NEW[1][:5]
    jacobian = torch.func.jacrev(lambda p: posterior.network.evaluate(p, few[0])[:, 0])(mean)
    rows = covariance.to_vector({n: jacobian[n] for n in covariance.shapes})
    root = covariance.spread(jacobian)
    gram = root @ root.mT + NOISE**2 * torch.eye(5, dtype=F64)
    residual = few[1][:, 0] - posterior.network.evaluate(mean, few[0])[:, 0]
    step = dense(covariance) @ rows.mT @ torch.linalg.solve(gram, residual)
    updated = posterior.update(few)
    moved = updated.bayesian.mean() if isinstance(updated, Guided) else updated.center
    expected = covariance.from_vector(covariance.to_vector(mean) + step)
    for key in expected:
        assert_close(moved[key].detach(), expected[key], rtol=1e-7, atol=1e-9)


def test_classes_take_one_natural_gradient_step():
    """S⁻¹ + Σ JᵀHJ and m + S·Σ Jᵀ(y − p) of a linear softmax, by autograd."""
    labels = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()
    net = nn.Linear(3, 3, bias=False).double()
    method = bayou.Laplace("full", start=bayou.MAP(steps=100))
    posterior = fit(method, (X[:40], labels[:40]), net, bayou.Categorical())
    updated = posterior.update((X[40:], labels[40:]))

    def loss(w):
        return nn.functional.cross_entropy(
            X[40:] @ w.reshape(3, 3).mT, labels[40:], reduction="sum"
        )

    w = posterior.center["weight"].flatten()
    hessian = torch.func.hessian(loss)(w)
    precision = posterior.covariance.precision() + hessian
    assert_close(updated.covariance.precision(), precision, rtol=1e-9, atol=1e-9)
    expected = w - torch.linalg.solve(precision, torch.func.grad(loss)(w))
    assert_close(updated.center["weight"].flatten(), expected)
    assert updated.log_evidence is None
    with pytest.raises(ValueError, match="BoundCategorical cannot be removed exactly"):
        updated.downdate((X[40:], labels[40:]))


def test_a_bounded_rank_is_between_the_diagonal_and_the_full_gaussian():
    """LoFi of a linear model: with the rank of all rows it is exact, with less it is close."""
    net = nn.Linear(3, 1, bias=False).double()
    diagonal = fit(bayou.Laplace("diagonal", start=MODE), net=net)
    low_rank = diagonal.with_low_rank(3)
    updated = low_rank.update((NEW[0][:3], NEW[1][:3]))
    rows = NEW[0][:3] / NOISE
    exact = torch.diag(diagonal.std()["weight"][0] ** -2) + rows.mT @ rows
    assert_close(torch.linalg.inv(dense(updated.covariance)), exact)
    longer = updated
    for _ in range(3):
        longer = longer.update(NEW)
    assert longer.covariance.tensors["factor"].shape == (3, 3)
    with pytest.raises(ValueError, match="needs a diagonal covariance"):
        fitted("full").with_low_rank()


NOT_UPDATED = {
    "MNF": (bayou.VI(bayou.MNF(), steps=5), "MNF over .* it is not Gaussian; use VI"),
    "a point": (bayou.MAP(steps=5), "points.*Laplace\\('full', where='last'\\)"),
    "an ensemble": (bayou.Ensemble(2, of=bayou.MAP(steps=5)), "points"),
    "a chain": (bayou.SGLD(steps=10, draws=3), "points"),
    "dropout": (bayou.MCDropout(bayou.MAP(steps=5)), "random in its masks"),
}


@pytest.mark.parametrize("name", NOT_UPDATED)
def test_what_cannot_be_updated_says_so(name):
    method, words = NOT_UPDATED[name]
    net = make_net()
    if name == "dropout":
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1)).double()
    posterior = fit(method, net=net)
    with pytest.raises(ValueError, match=words):
        posterior.update(NEW)
    with pytest.raises(ValueError, match="cannot be reduced by rows"):
        posterior.downdate(NEW)


def test_a_mixture_weighs_its_components_by_the_density_of_the_new_rows():
    good, bad = fitted("full"), fit(bayou.Laplace("full", where="last", start=bayou.MAP(steps=3)))
    mixture = bayou.Mixture([good, bad], weights=[0.2, 0.8])
    few = NEW[0][:1], NEW[1][:1]
    updated = mixture.update(few)
    densities = torch.tensor(
        [float(c.predict(few[0], predictive="exact").log_prob(few[1])) for c in (good, bad)]
    )
    expected = (densities.double() + mixture.weights.log()).softmax(0)
    assert_close(updated.weights, expected, rtol=1e-6, atol=1e-9)
    assert updated.target.n == 41
    assert updated.components[0].target.n == 41
    assert_close(updated.downdate(few).weights, mixture.weights, rtol=1e-7, atol=1e-9)
    with_point = bayou.Mixture([good, fit(bayou.MAP(steps=3))])
    with pytest.raises(
        ValueError, match="component 1 of this mixture: Empirical cannot be updated"
    ):
        with_point.update(few)


@pytest.mark.parametrize("name", ["full", "mean field", "low rank", "swag"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_an_updated_posterior_is_saved_and_loaded(name, dtype, tmp_path):
    method = (LAST | APPROXIMATE)[name]
    old, new = ([value.to(dtype) for value in pair] for pair in (OLD, NEW))
    posterior = fit(method, tuple(old), make_net(dtype=dtype)).update(tuple(new))
    assert posterior.predict(new[0]).mean.dtype == dtype
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", make_net(dtype=dtype))
    assert torch.equal(loaded.predict(new[0]).outputs, posterior.predict(new[0]).outputs)
    assert loaded.updates == posterior.updates
    assert loaded.target.n == 60
    again, other = loaded.update(tuple(new)), posterior.update(tuple(new))
    assert torch.equal(again.predict(new[0]).outputs, other.predict(new[0]).outputs)


def test_rows_are_in_the_units_of_the_user():
    """A fit by name to x and y far from unit scale is that of the standardized rows."""
    scaled_x, scaled_y = 100 + 20 * X, 5000 + 300 * Y
    posterior = bayou.fit(
        make_net(), (scaled_x[:40], scaled_y[:40]), "laplace-last", progress=False
    )
    updated = posterior.update((scaled_x[40:], scaled_y[40:]))
    mean, variance = posterior.function(scaled_x[40:])
    noise = posterior.target.likelihood.gaussian_noise
    before = float((scaled_y[40:] - mean).square().mean())
    after = float((scaled_y[40:] - updated.function(scaled_x[40:])[0]).square().mean())
    assert after < before
    one = slice(40, 41)
    gain = variance[0, 0, 0] / (variance[0, 0, 0] + noise**2)
    expected = mean[0] + gain * (scaled_y[40] - mean[0])
    single = posterior.update((scaled_x[one], scaled_y[one])).function(scaled_x[one])[0][0]
    assert_close(single, expected, rtol=1e-8, atol=1e-6)


def test_new_rows_are_checked():
    posterior = fitted("full")
    for bad, words in (
        ((NEW[0][:, :2], NEW[1]), "cannot|shape|size"),
        ((NEW[0].float(), NEW[1]), "float32"),
        ((NEW[0], torch.full_like(NEW[1], math.nan)), "NaN"),
        ((NEW[0], NEW[1][:3]), "rows"),
        ((NEW[0], NEW[1][:, 0]), "y has shape"),
        (NEW[0], "pair of tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            posterior.update(bad)


def test_a_loader_is_the_rows_of_its_batches():
    posterior = fitted("full")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*NEW), batch_size=6)
    updated = posterior.update(loader)
    assert_close(updated.center, posterior.update(NEW).center, rtol=1e-10, atol=1e-12)
    assert updated.target.n == 60


@pytest.fixture(scope="module")
def wide():
    return bayou.fit(make_net(), OLD, "wide", progress=False)


def test_a_wide_network_is_conditioned_on_the_rows(wide, tmp_path):
    """Against the Gaussian process of all rows with the same scales and units, in dense algebra."""
    updated = wide.update((NEW[0][:8], NEW[1][:8])).update((NEW[0][8:], NEW[1][8:]))
    assert isinstance(updated, WidePosterior)
    assert updated.target.n == len(updated.wide.rows) == 60
    buffers = {n: getattr(updated.wide, n) for n in ("rows", "targets")}
    batch = wide._with_rows(*buffers.values(), wide.updates, [60])
    grid = normal(30, 3, seed=5)
    for one, other in zip(updated.function(grid), batch.function(grid), strict=True):
        assert_close(one, other, rtol=1e-8, atol=1e-10)
    updated.save(tmp_path / "wide.bayou")
    loaded = bayou.load(tmp_path / "wide.bayou", make_net())
    assert torch.equal(loaded.predict(grid).outputs, updated.predict(grid).outputs)
    one, other = (p.update((NEW[0][:1], NEW[1][:1])) for p in (loaded, updated))
    assert torch.equal(one.predict(grid).outputs, other.predict(grid).outputs)
    back = updated.downdate(NEW)
    assert_close(back.predict(grid).outputs, wide.predict(grid).outputs, rtol=1e-9, atol=1e-11)
    density = wide.log_predictive_density((NEW[0][:1], NEW[1][:1]))
    single = float(wide.predict(NEW[0][:1]).log_prob(NEW[1][:1]))
    assert density == pytest.approx(single, rel=1e-4)  # a jitter of the noise


def test_a_wide_network_refuses_forgetting_and_foreign_rows(wide):
    with pytest.raises(ValueError, match="remove the oldest rows"):
        wide.update(NEW, forget=0.9)
    with pytest.raises(ValueError, match="row 0 is not one of the 40 rows"):
        wide.downdate(NEW)
    with pytest.raises(ValueError, match="at least one must remain"):
        wide.downdate(OLD)
    fewer = wide.downdate((OLD[0][:5], OLD[1][:5]))
    assert torch.equal(fewer.wide.rows, wide.wide.rows[5:])


def test_the_joint_density_of_rows_from_draws_is_that_of_the_closed_form():
    """Σ over 1,000 draws of Π_n p(y_n | w): within 5 standard errors of the closed form."""
    posterior = fitted("vbll")
    few = OLD[0][:3], OLD[1][:3]
    exact = posterior.log_predictive_density(few)
    drawn = posterior.using("linearized").predict(few[0], 1000)
    log_p = drawn.likelihood.log_prob(drawn.outputs, few[1]).sum(-1)
    ratio = (log_p - exact).exp()
    error = float(ratio.std() / math.sqrt(1000))
    assert abs(float(ratio.mean()) - 1) < 5 * error
    by_draws = super(GaussianPosterior, posterior.using("linearized")).log_predictive_density(few)
    assert by_draws == pytest.approx(exact, abs=6 * error)


def test_the_density_of_rows_is_that_of_the_calibrated_prediction():
    """A map of quantile levels changes it; given one, rows are taken as independent."""
    posterior = exact_fit(ORDER[:11])
    before = posterior.log_predictive_density(some(ORDER[11:14]))
    knots, values = torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.2, 1.0]], dtype=F64)
    posterior.calibration_map = QuantileMap(knots, values)
    x, y = some(ORDER[11:14])
    expected = float(posterior.predict(x).log_prob(y).sum())
    assert posterior.log_predictive_density((x, y)) == pytest.approx(expected, abs=0.3)
    assert abs(posterior.log_predictive_density((x, y)) - before) > 0.1


@pytest.mark.slow
def test_2_000_rows_in_200_updates_are_the_batch():
    posterior = exact_fit(ORDER[:5])
    state = torch.Generator().manual_seed(3)
    index = torch.randint(21, (2_000,), generator=state)
    for part in index.split(10):
        posterior = posterior.update(some(part))
    everything = torch.cat((ORDER[:5], index))
    assert_same(posterior, *closed_form(*some(everything)), 1e-9)
    assert posterior.target.n == 2_005


def test_the_table_of_the_guide_has_every_method():
    page = Path(__file__).parents[2] / "docs" / "guide" / "updating.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    named = set(re.findall(r"[A-Za-z]+", " ".join(row.split("|")[1] for row in rows)))
    classes = {cls.__name__ for cls in vars(bayou.methods).values() if is_method(cls)}
    assert len(classes) > 15
    assert classes <= named


def is_method(value):
    return (
        isinstance(value, type)
        and issubclass(value, bayou.methods.Method)
        and not inspect.isabstract(value)
    )
