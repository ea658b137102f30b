"""Mixtures with weights, of posteriors that differ in method, noise, units, network or likelihood."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.core.files import FileError
from bayou.likelihoods import StudentT
from bayou.likelihoods.joined import join_samples
from bayou.likelihoods.known_noise import BoundKnownNoise
from bayou.likelihoods.predictive import Predictive
from bayou.operations import conformal
from bayou.operations.export import export
from bayou.posteriors import Empirical, Mixture
from bayou.posteriors.mixture import allocate_draws

F64 = torch.float64
X = torch.linspace(-1, 1, 12, dtype=F64).unsqueeze(1)
Y = 3 * X + 0.2 * torch.sin(40 * X)
SHORT = {"steps": 20, "batch_size": 16}


def line(slopes, likelihood):
    """The posterior of y = slope·x + noise that has some slopes with equal probability."""
    net = nn.Linear(1, 1, bias=False, dtype=F64)
    target = bayou.methods.MAP(steps=1)
    target = bayou.fit(net, (X, Y), target, likelihood=likelihood, progress=False).target
    stack = {"weight": torch.tensor(slopes, dtype=F64).reshape(-1, 1, 1)}
    return Empirical(target, target.network, stack)


def deep(hidden, activation=nn.Tanh):
    torch.manual_seed(hidden)
    return nn.Sequential(nn.Linear(1, hidden), activation(), nn.Linear(hidden, 1)).to(F64)


def fit(net, method, **options):
    return bayou.fit(net, (X, Y), method, progress=False, **options)


@pytest.fixture(scope="module")
def different():
    """Components over two networks, by three methods, with their networks."""
    nets = [deep(3), deep(5), deep(3)]
    methods = [bayou.VI(**SHORT), bayou.Laplace("full", start=bayou.MAP(**SHORT)),
               bayou.MCDropout(bayou.MAP(**SHORT))]  # fmt: skip
    nets[2] = bayou.select.with_dropout(nets[2])
    pairs = zip(nets, methods, strict=True)
    return nets, [fit(net, method, likelihood=bayou.Gaussian(0.3)) for net, method in pairs]


@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (0.5, 0.3, 0.2), (0.97, 0.02, 0.01), (0.25, 0.25, 0.5), (1.0, 0.0)]
)
def test_every_prefix_of_the_draws_has_the_weights(weights):
    """For every S, the count of component c among the first S draws is within 1 of S·w_c."""
    shares = torch.tensor(weights, dtype=F64)
    for seed in range(20):
        members = allocate_draws(shares, 300, seed)
        counts = nn.functional.one_hot(members, len(weights)).cumsum(0)
        expected = torch.arange(1, 301).unsqueeze(1) * shares
        assert float((counts - expected).abs().max()) < 1


def test_the_first_draw_is_a_draw_of_the_mixture():
    """Over 1,000 seeds its component has the weights, within 5 standard errors."""
    weights = torch.tensor([0.6, 0.3, 0.1], dtype=F64)
    first = torch.stack([allocate_draws(weights, 1, seed)[0] for seed in range(1000)])
    share = nn.functional.one_hot(first, 3).double().mean(0)
    assert bool(((share - weights).abs() < 5 * (weights * (1 - weights) / 1000).sqrt()).all())


def test_predictions_are_the_weighted_mixture_of_those_of_the_components():
    """Two lines with other noises: density, cdf, mean and variance of .75 N + .25 N."""
    components = [line([1.0], bayou.Gaussian(0.5)), line([2.0], bayou.Gaussian(0.2))]
    predictive = Mixture(components, [3, 1]).predict(X)
    x = X.numpy()
    y = Y.numpy()
    normals = [stats.norm(x, 0.5), stats.norm(2 * x, 0.2)]
    density = 0.75 * normals[0].pdf(y) + 0.25 * normals[1].pdf(y)
    assert_close(predictive.log_prob(Y).exp(), torch.tensor(density[:, 0]))
    assert_close(
        predictive.cdf(Y), torch.tensor(0.75 * normals[0].cdf(y) + 0.25 * normals[1].cdf(y))
    )
    mean = 1.25 * X
    assert_close(predictive.mean, mean)
    second = 0.75 * (0.25 + X**2) + 0.25 * (0.04 + 4 * X**2)
    assert_close(predictive.std, (second - mean**2).sqrt())
    assert_close(predictive.aleatoric_std, torch.full_like(X, math.sqrt(0.1975)))
    assert_close(predictive.cdf(predictive.quantile(0.9)), torch.full_like(X, 0.9))


def test_likelihoods_of_other_classes_are_mixed():
    """A Gaussian with a learned noise, a Student t and a predicted noise, against scipy."""
    gaussian = line([1.0], bayou.Gaussian(0.5, learn=True))
    student = line([2.0], StudentT(3.0, 0.3))
    net = nn.Linear(1, 2, bias=False, dtype=F64)
    noise = bayou.HeteroscedasticGaussian()
    target = bayou.fit(net, (X, Y), bayou.MAP(steps=1), likelihood=noise, progress=False).target
    values = torch.tensor([[[3.0], [1.0]]], dtype=F64)  # y ~ N(3x, exp(x))
    predicted = Empirical(target, target.network, {"weight": values})
    mixture = Mixture([gaussian, student, predicted], [0.5, 0.3, 0.2])
    learned = float(gaussian.target.likelihood.log_scale.detach().exp())
    x = X.numpy()
    parts = [
        (0.5, stats.norm(x, learned)),
        (0.3, stats.t(3, 2 * x, 0.3)),
        (0.2, stats.norm(3 * x, torch.exp(X / 2).numpy())),
    ]
    predictive = mixture.predict(X)
    density = sum(weight * part.pdf(Y.numpy()) for weight, part in parts)
    assert_close(predictive.log_prob(Y).exp(), torch.tensor(density[:, 0]))
    variance = sum(weight * (part.var() + part.mean() ** 2) for weight, part in parts)
    mean = sum(weight * part.mean() for weight, part in parts)
    assert_close(predictive.mean, torch.tensor(mean))
    assert_close(predictive.std, torch.tensor(variance - mean**2).sqrt())
    quantile = predictive.quantile(0.8).numpy()
    mass = sum(weight * part.cdf(quantile) for weight, part in parts)
    assert_close(torch.tensor(mass), torch.full_like(X, 0.8))
    draws = predictive.sample(4000, seed=0)
    error = predictive.std / math.sqrt(4000)
    assert bool(((draws.mean(0) - predictive.mean).abs() < 5 * error).all())
    assert bool(predictive.entropy.isfinite().all())
    shifted, outputs = predictive.likelihood.rescale(
        predictive.outputs, torch.tensor(1.0), torch.tensor(2.0)
    )
    rescaled = bayou.Predictive(shifted, outputs)
    assert_close(rescaled.log_prob(1 + 2 * Y), predictive.log_prob(Y) - math.log(2))
    warmer, outputs = predictive.likelihood.temper(predictive.outputs, 1.5)
    assert_close(bayou.Predictive(warmer, outputs).mean, predictive.mean)
    with pytest.raises(ValueError, match="different likelihoods.*use posterior.predict"):
        mixture.call({name: value[0] for name, value in mixture.sample(1, 0).items()}, X)


def test_a_closed_form_stays_one_beside_draws():
    """An exact Laplace has its own predictive density in the mixture, without an error of draws."""
    exact = fit(
        nn.Linear(1, 1).to(F64),
        bayou.Laplace("full", start=bayou.MAP(steps=200), predictive="exact"),
        likelihood=bayou.Gaussian(0.3),
    )
    other = line([2.5], bayou.Gaussian(0.3))
    predictive = Mixture([exact, other], [0.6, 0.4]).predict(X)
    parts = [exact.predict(X), other.predict(X)]
    density = 0.6 * parts[0].log_prob(Y).exp() + 0.4 * parts[1].log_prob(Y).exp()
    assert_close(predictive.log_prob(Y).exp(), density)
    mean = 0.6 * parts[0].mean + 0.4 * parts[1].mean
    second = 0.6 * (parts[0].std ** 2 + parts[0].mean ** 2)
    second = second + 0.4 * (parts[1].std ** 2 + parts[1].mean ** 2)
    assert_close(predictive.std, (second - mean**2).sqrt())


def test_components_over_different_networks(different):
    """A draw names its component, and ``call`` and ``to_module`` give the function of it."""
    _, components = different
    mixture = Mixture(components, [0.5, 0.3, 0.2])
    draws = mixture.sample(40, seed=1)
    assert torch.equal(mixture.sample(10, seed=1, start=30)["index"], draws["index"][30:])
    predictive = mixture.predict(X, 40, seed=1)
    for s in (0, 1, 2, 7, 39):
        draw = {name: value[s] for name, value in draws.items()}
        outputs = mixture.call(draw, X)
        component = components[int(draw["member"])]
        assert mixture.component(draw) is component
        assert_close(outputs, predictive.means[s])
        if draw["member"] == 0:
            assert_close(mixture.to_module(draw)(X), outputs)
    stack = {name: value[:5] for name, value in draws.items()}
    assert_close(mixture.outputs(stack, (X,)), predictive.means[:5])
    for call in (mixture.mean, mixture.std, mixture.by_chain):
        with pytest.raises(ValueError, match="components of this mixture have different tensors"):
            call()
    with pytest.raises(ValueError, match="exported as one program"):
        export(mixture, X)


def test_a_file_holds_weights_and_components_of_different_networks(different, tmp_path):
    nets, components = different
    mixture = Mixture(components, [0.5, 0.3, 0.2])
    bayou.calibrate(mixture, (X, Y))
    mixture.save(tmp_path / "mixture.bayou")
    loaded = bayou.load(tmp_path / "mixture.bayou", [deep(3), deep(5), nets[2]])
    assert torch.equal(loaded.weights, mixture.weights)
    assert torch.equal(loaded.predict(X).outputs, mixture.predict(X).outputs)
    assert loaded.temperature == mixture.temperature
    with pytest.raises(FileError, match="networks that differ, got one; pass a list"):
        bayou.load(tmp_path / "mixture.bayou", deep(3))
    with pytest.raises(FileError, match="3 components, got a list of 2 networks"):
        bayou.load(tmp_path / "mixture.bayou", [deep(3), deep(5)])
    with pytest.raises(FileError, match="belongs to another network"):
        bayou.load(tmp_path / "mixture.bayou", [deep(3), deep(4), nets[2]])
    components[0].save(tmp_path / "one.bayou")
    with pytest.raises(FileError, match="is not a mixture"):
        bayou.load(tmp_path / "one.bayou", [deep(3)])


def test_networks_that_differ_in_their_activation_alone_need_their_own_in_a_file(tmp_path):
    """Tensors agree, so that draws are stacked; a file must not load one network for both."""
    nets = [deep(3), deep(3, nn.ReLU)]
    mixture = Mixture([fit(net, bayou.MAP(**SHORT)) for net in nets], [0.7, 0.3])
    assert not mixture.tensors_differ
    mixture.save(tmp_path / "mixture.bayou")
    with pytest.raises(FileError, match="networks that differ"):
        bayou.load(tmp_path / "mixture.bayou", nets[0])
    loaded = bayou.load(tmp_path / "mixture.bayou", nets)
    assert torch.equal(loaded.predict(X).outputs, mixture.predict(X).outputs)


def test_conformal_prediction_of_a_mixture_with_weights(tmp_path):
    net = deep(3)
    likelihood = bayou.Gaussian(0.3)
    components = [
        fit(net, bayou.MAP(**SHORT), likelihood=likelihood),
        fit(net, bayou.VI(**SHORT), likelihood=bayou.Gaussian(0.4)),
    ]
    mixture = Mixture(components, [0.8, 0.2])
    sets = conformal(mixture, (X, Y), 0.8)
    sets.save(tmp_path / "sets.bayou")
    loaded = bayou.operations.Conformal.load(tmp_path / "sets.bayou", deep(3))
    assert all(map(torch.equal, loaded.interval(X), sets.interval(X)))


@pytest.mark.slow
def test_a_program_has_the_weights():
    """Components with other noises, as one graph; one with its own temperature is refused."""
    net = deep(3)
    components = [
        fit(net, bayou.MAP(**SHORT), likelihood=bayou.Gaussian(0.3)),
        fit(net, bayou.VI(**SHORT), likelihood=bayou.Gaussian(0.4)),
    ]
    mixture = Mixture(components, [0.8, 0.2])
    program = export(mixture, X, 6, seed=2)
    answers = program.module()(X)
    expected = mixture.predict(X, 6, seed=2)
    assert_close(answers["mean"], expected.mean)
    assert_close(answers["std"], expected.std)
    bayou.calibrate(components[0], (X, Y))
    with pytest.raises(ValueError, match="a component has a temperature"):
        export(mixture, X, 4)


def test_moments_have_the_weights():
    likelihood = bayou.Gaussian(0.3)
    mixture = Mixture([line([1.0, 3.0], likelihood), line([7.0], likelihood)], [0.75, 0.25])
    slopes = torch.tensor([1.0, 3.0, 7.0], dtype=F64)
    weights = torch.tensor([0.375, 0.375, 0.25], dtype=F64)
    mean = (weights * slopes).sum()
    assert_close(mixture.mean()["weight"].squeeze(), mean)
    variance = (weights * (slopes - mean) ** 2).sum()
    assert_close(mixture.std()["weight"].squeeze(), variance.sqrt())
    assert mixture.draws is None
    assert Mixture(mixture.components).draws == 3
    draws = mixture.sample(400, seed=0)["weight"].flatten()
    assert [float((draws == slope).double().mean()) for slope in slopes] == pytest.approx(
        weights.tolist(), abs=0.005
    )


def test_a_mixture_of_mixtures_is_the_mixture_of_all_components():
    lines = [line([slope], bayou.Gaussian(0.4)) for slope in (1.0, 2.0, 4.0)]
    nested = Mixture([Mixture(lines[:2], [0.5, 0.5]), lines[2]], [0.8, 0.2])
    flat = Mixture(lines, [0.4, 0.4, 0.2])
    assert_close(nested.predict(X).log_prob(Y), flat.predict(X).log_prob(Y))


def test_posteriors_in_the_units_of_the_user(tmp_path):
    """Fits by name of two networks: standardized inside, mixed, saved and loaded in units of y."""
    generator = torch.Generator().manual_seed(0)
    x = 50 + 10 * torch.randn(9, 1, generator=generator)
    y = 1000 + 20 * x + 30 * torch.randn(9, 1, generator=generator)

    def net(hidden):
        torch.manual_seed(hidden)
        return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    recipe = bayou.select.by_name("map", steps=30)
    other = bayou.select.by_name("ffg", steps=30)
    components = [
        bayou.fit(net(3), (x, y), recipe, progress=False),
        bayou.fit(net(4), (x[:7], y[:7]), other, progress=False),
    ]
    mixture = Mixture(components, [0.7, 0.3])
    predictive = mixture.predict(x, 100)
    density = torch.zeros(9)
    for weight, component in zip((0.7, 0.3), components, strict=True):
        samples = 1 if component.draws == 1 else round(100 * weight)
        seed = bayou.rng.fold(0, "member", components.index(component))
        density += weight * component.predict(x, samples, seed=seed).log_prob(y).exp()
    assert_close(predictive.log_prob(y).exp(), density, rtol=1e-4, atol=1e-9)
    mixture.save(tmp_path / "mixture.bayou")
    loaded = bayou.load(tmp_path / "mixture.bayou", [net(3), net(4)])
    assert torch.equal(loaded.predict(x).outputs, predictive.outputs)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "2 components need 2 weights"),
        ([0.5, -0.5], "must not be negative"),
        ([0.0, 0.0], "sum must be positive"),
        ([math.nan, 1.0], "must not be negative"),
        ([math.inf, 1.0], "finite"),
    ],
)
def test_weights_that_do_not_suit_the_components(weights, message):
    one = line([1.0], bayou.Gaussian(0.1))
    with pytest.raises(ValueError, match=message):
        Mixture([one, one], weights)


def test_components_must_be_posteriors_of_the_same_y():
    one = line([1.0], bayou.Gaussian(0.1))
    classes = bayou.fit(
        nn.Linear(1, 2), (X.float(), (X > 0).long()[:, 0]), bayou.MAP(steps=1), progress=False
    )
    with pytest.raises(ValueError, match="must predict the same y"):
        Mixture([one, classes])
    with pytest.raises(ValueError, match="made of posteriors, got Linear"):
        Mixture([one, nn.Linear(1, 1)])
    pair = bayou.fit(
        nn.Linear(1, 2, dtype=F64), (X, torch.cat([Y, Y], 1)), bayou.MAP(steps=1), progress=False
    )
    with pytest.raises(ValueError, match="predictions of the same y"):
        Mixture([one, pair]).predict(X)


def test_a_component_that_builds_its_network_needs_none_of_its_own(monkeypatch):
    """One network loads a mixture whose other components make theirs from the file."""
    components = [fit(deep(3), bayou.MAP(**SHORT)), line([1.0], bayou.Gaussian(0.3))]
    assert Mixture(components).networks_differ
    builds_network = property(lambda self: self is components[1])
    monkeypatch.setattr(type(components[1]), "builds_network", builds_network)
    assert not Mixture(components).networks_differ


def test_components_with_different_layers_have_no_relevance_together():
    """A network of infinite width has relevances of tensors that no other network has."""
    data = (torch.cat([X, X.square()], 1), Y)
    net = nn.Linear(2, 1, dtype=F64)
    options = {"likelihood": bayou.Gaussian(0.3), "progress": False}
    prior = bayou.Normal("fan_in", learn="in")
    components = [
        bayou.fit(net, data, bayou.VI(**SHORT), prior=prior, **options),
        bayou.fit(net, data, bayou.methods.Wide(draws=1, passes=1), **options),
    ]
    for order in (components, components[::-1]):
        with pytest.raises(ValueError, match="take those of each component"):
            bayou.Mixture(order).relevance()


def test_scores_of_a_mixture_compare_the_values_of_targets_that_have_more():
    """With known noises y has two columns, and a prediction may have a variance of its own."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(3, 5, 1, generator=generator)
    with_variance = torch.rand(2, 5, 1, 2, generator=generator)
    y = torch.cat([f[0], 0.5 + torch.rand(5, 1, generator=generator)], 1)
    samples = [(BoundKnownNoise(), f), (BoundKnownNoise(has_variance=True), with_variance)]
    joined = Predictive(*join_samples(samples))
    outputs = torch.cat([torch.stack([f, torch.zeros_like(f)], -1), with_variance])
    expected = Predictive(BoundKnownNoise(has_variance=True), outputs)
    assert_close(joined.log_prob(y), expected.log_prob(y))
    assert not joined.likelihood.is_linear_in_y
    for score in (bayou.metrics.rmse, bayou.metrics.coverage):
        assert_close(score(joined, y), score(expected, y))
    exact = bayou.metrics.crps(expected, y)
    assert bayou.metrics.crps(joined, y) == pytest.approx(exact, rel=0.1)  # by draws
